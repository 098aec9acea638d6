//! The mean of all ranks' parameters between two steps, and how far a rank is from it.
//!
//! **Invariant:** a rank that is in the mean answers its peers until all are in it, so no rank waits
//! in its step for one that waits in the mean.

use pleach_collectives::{Buffer, Operation, PendingError, ReduceOp};

use super::{TrainError, Trainer, messages};
use crate::policy::Event;
use crate::scheme::Scheme;

impl Trainer {
    /// The mean of all ranks' parameters, between two steps. All ranks call it, and the call takes
    /// the same place among the averages of the scheme on each: after as many steps, but for
    /// [`Scheme::ElasticBsp`]. Meanwhile this rank answers its peers. The training is as before, but
    /// with [`Scheme::Bap`]: there others may wait until this rank has a newer copy of the table, so
    /// it takes one.
    ///
    /// # Errors
    ///
    /// [`TrainError::UnderWay`], if a bucket is ready already; see [`TrainError`].
    pub fn averaged(&mut self) -> Result<Buffer<f32>, TrainError> {
        self.expect_group("the mean between two steps")?;
        if let Some(mut step) = self.step()? {
            step.vectors()?;
        }
        self.mean()
    }

    /// As [`Trainer::averaged`]; also after the last step. Measures the spread.
    pub(crate) fn mean(&mut self) -> Result<Buffer<f32>, TrainError> {
        let mut mean = self.group.buffer(self.layout.parameters())?;
        mean.copy_from_slice(self.parameters_mut());
        let renews = matches!(self.scheme, Scheme::Bap { .. }) && self.requested.is_some();
        let before = renews.then(|| mean.to_vec());
        if renews {
            self.requested = None;
            self.drive(Event::Pause, &mut |_, _| {})?;
        }
        self.step_aside()?;
        let started = self.group.start(Operation::all_reduce(mean, ReduceOp::Avg));
        let mut pending = started.map_err(|PendingError { error, .. }| error)?;
        while self.vectors.window.is_some() && !pending.wait_for(messages::TURN) {
            self.hear_all(&mut |_, _| {})?;
            while self.send_next(&mut |_, _| {})? {}
        }
        let mean = pending.wait().map_err(|PendingError { error, .. }| error)?;
        let own = before.as_deref().unwrap_or_else(|| self.parameters_mut());
        self.spread = Some(distance(own, &mean));
        if renews {
            self.drive(Event::Resume, &mut |_, _| {})?;
        }
        self.come_back()?;
        Ok(mean)
    }
}

/// The distance of a vector from a mean, as a share of the length of the mean.
fn distance(own: &[f32], mean: &[f32]) -> f64 {
    let square = |element: f32| f64::from(element) * f64::from(element);
    let length: f64 = mean.iter().map(|element| square(*element)).sum();
    let apart: f64 = own.iter().zip(mean).map(|(own, mean)| square(own - mean)).sum();
    if length > 0.0 { (apart / length).sqrt() } else { 0.0 }
}
