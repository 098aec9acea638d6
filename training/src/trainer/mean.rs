//! The mean of all ranks' parameters between two steps, and how far a rank is from it.
//!
//! **Invariant:** a rank that is in the mean answers its peers until all are in it. So no rank
//! waits in its step for one that waits in the mean.

use pleach_collectives::{Buffer, Operation, PendingError, ReduceOp};

use super::{TrainError, Trainer, messages};
use crate::policy::Event;
use crate::scheme::Scheme;

/// As [`Trainer::averaged`]; also after the last step. Measures the spread.
pub(crate) fn of(trainer: &mut Trainer) -> Result<Buffer<f32>, TrainError> {
    let mut mean = trainer.group.buffer(trainer.layout.parameters())?;
    mean.copy_from_slice(trainer.parameters_mut());
    let renews = matches!(trainer.scheme, Some(Scheme::Bap { .. })) && trainer.requested.is_some();
    let before = renews.then(|| mean.to_vec());
    if renews {
        trainer.requested = None;
        trainer.drive(Event::Pause, &mut |_, _| {})?;
    }
    trainer.step_aside()?;
    let started = trainer.group.start(Operation::all_reduce(mean, ReduceOp::Avg));
    let mut pending = started.map_err(|PendingError { error, .. }| error)?;
    while trainer.vectors.window.is_some() && !pending.wait_for(messages::TURN) {
        trainer.hear_all(&mut |_, _| {})?;
        while trainer.send_next(&mut |_, _| {})? {}
    }
    let mean = pending.wait().map_err(|PendingError { error, .. }| error)?;
    let own = before.as_deref().unwrap_or_else(|| trainer.parameters_mut());
    trainer.spread = Some(distance(own, &mean));
    if renews {
        trainer.drive(Event::Resume, &mut |_, _| {})?;
    }
    trainer.come_back()?;
    Ok(mean)
}

/// The same with [`Scheme::ElasticBsp`]: at a barrier each rank has the mean. Other ranks have
/// averages of their own in other places, so none is asked.
pub(crate) fn at_barrier(trainer: &mut Trainer) -> Result<Buffer<f32>, TrainError> {
    let steps = trainer.interpreter.staleness().next();
    if steps > 0 {
        return Err(TrainError::NoCommonPlace { steps });
    }
    let mut mean = trainer.group.buffer(trainer.layout.parameters())?;
    mean.copy_from_slice(trainer.parameters_mut());
    trainer.spread = Some(0.0);
    Ok(mean)
}

/// The distance of a vector from a mean, as a share of the length of the mean.
fn distance(own: &[f32], mean: &[f32]) -> f64 {
    let square = |element: f32| f64::from(element) * f64::from(element);
    let length: f64 = mean.iter().map(|element| square(*element)).sum();
    let apart: f64 = own.iter().zip(mean).map(|(own, mean)| square(own - mean)).sum();
    if length > 0.0 { (apart / length).sqrt() } else { 0.0 }
}
