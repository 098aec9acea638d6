//! `pleach train --elastic --exact`: the bits of one rank that nobody disturbed, whoever trains.
//!
//! A batch is divided into shares of a few images. The gradient of a share is a contribution,
//! whoever computes it; the contributions of all ranks are added up without rounding, and the sum
//! is rounded once (`Group::all_reduce_many`). **Invariant:** the bits of a step depend on the
//! parameters before it and on its batch alone.

use pleach::session::{Session, SessionError, Verdict};
use pleach::transport::clock;
use pleach::transport::rendezvous::World;
use pleach::{CollectiveError, Group, Options, ReduceOp, Reproducible};
use pleach_training::{Perceptron, Sgd};

use super::elastic::{Batches, Course, Trained, Training, TrainingError};
use super::network::{LEARNING_RATE, MOMENTUM};
use super::{SEED, hash};

/// Images of a share.
const SHARE: usize = 4;

/// What adds up the gradients of a batch.
struct Summing<'a> {
    training: &'a Training<'a>,
    network: Perceptron,
    batches: Batches,
    /// Of the shares of this rank, and more that are free.
    contributions: Vec<Vec<f32>>,
}

impl<'a> Summing<'a> {
    fn new(training: &'a Training<'a>) -> Self {
        let network = training.network();
        let batches = Batches::new(training.digits().len());
        Self { training, network, batches, contributions: Vec::new() }
    }

    /// Stores the mean gradient of a step's batch.
    fn sum(
        &mut self,
        group: &Group,
        step: u64,
        parameters: &[f32],
        sum: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let (rank, ranks) = (group.rank() as usize, group.world_size() as usize);
        let begun = clock::now();
        let batch = self.batches.of(step);
        let scale = 1.0 / batch.len() as f32;
        let mine = batch.chunks(SHARE).skip(rank).step_by(ranks);
        let count = mine.len();
        if self.contributions.len() < count {
            self.contributions.resize(count, vec![0.0; parameters.len()]);
        }
        for (share, contribution) in mine.zip(&mut self.contributions) {
            let mut samples = share.iter().map(|image| self.training.digits().sample(*image));
            self.network.gradient(parameters, &mut samples, scale, contribution);
        }
        self.training.rest_of_step(begun);
        let contributions: Vec<&[f32]> = self.contributions[..count].iter().map(Vec::as_slice).collect();
        group.all_reduce_many(&contributions, sum)
    }
}

/// Trains in a session whose groups are exact; `None`: this rank has left.
pub(crate) fn train(training: &Training<'_>, mut session: Session) -> Result<Option<Trained>, TrainingError> {
    session.leave_on(signal_hook::consts::SIGTERM)?;
    let trained = make_steps(training, &mut session);
    if matches!(&trained, Err(error) if matches!(error.downcast_ref::<SessionError>(), Some(SessionError::Left)))
    {
        session.leave()?;
        return Ok(None);
    }
    let trained = trained?;
    session.leave()?;
    Ok(Some(trained))
}

fn make_steps(training: &Training<'_>, session: &mut Session) -> Result<Trained, TrainingError> {
    let mut summing = Summing::new(training);
    let elements = summing.network.parameters();
    let mut parameters = session.state::<f32>("parameters", elements)?;
    let mut velocity = session.state::<f32>("velocity", elements)?;
    let mut sum = session.buffer::<f32>(elements)?;
    if session.step() == 0 {
        parameters.update(|parameters| parameters.copy_from_slice(&summing.network.initial(SEED)));
    }
    let mut sgd = Sgd::new(elements, LEARNING_RATE, MOMENTUM);
    let mut course = Course::new(training, session.seat().0);
    loop {
        let step = session.next()?;
        let group = session.group()?.clone();
        if step >= training.steps() {
            // The largest hash and the complement of the smallest; equal if they are complements.
            let own = hash(&parameters);
            let mut extremes = [own, !own];
            let outcome = group.all_reduce(&mut extremes, ReduceOp::Max);
            let place = (group.rank(), group.world_size());
            drop(group);
            if session.commit(outcome)? != Verdict::Committed {
                continue;
            }
            let is_equal = extremes[0] == !extremes[1];
            return Ok(Trained::new(place, &parameters, is_equal, &course));
        }
        course.attempts(step, session.attempted_epoch(), group.world_size());
        let outcome = summing.sum(&group, step, &parameters, &mut sum);
        drop(group);
        if session.commit(outcome)? == Verdict::Committed {
            sgd.velocity_mut().copy_from_slice(&velocity);
            parameters.update(|parameters| sgd.step(parameters, &sum));
            velocity.update(|velocity| velocity.copy_from_slice(sgd.velocity()));
        }
    }
}

/// The parameters of one rank that nobody disturbs.
pub(crate) fn alone(training: &Training<'_>) -> Result<Vec<f32>, TrainingError> {
    let mut options = Options::new(World::alone());
    options.reproducible = Reproducible::Exact;
    let group = Group::join(&options)?;
    let training = training.without_pace();
    let mut summing = Summing::new(&training);
    let mut parameters = summing.network.initial(SEED);
    let mut sum = vec![0.0; parameters.len()];
    let mut sgd = Sgd::new(parameters.len(), LEARNING_RATE, MOMENTUM);
    for step in 0..training.steps() {
        summing.sum(&group, step, &parameters, &mut sum)?;
        sgd.step(&mut parameters, &sum);
    }
    Ok(parameters)
}

/// 0 if these are the same bits; else the largest difference.
pub(crate) fn difference(left: &[f32], right: &[f32]) -> f32 {
    let is_same = left.len() == right.len()
        && left.iter().zip(right).all(|(left, right)| left.to_bits() == right.to_bits());
    if is_same { 0.0 } else { super::difference(left, right).max(f32::MIN_POSITIVE) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_is_a_difference() {
        assert_eq!(difference(&[1.0, -2.0], &[1.0, -2.0]), 0.0);
        for other in [[1.0, -2.000_000_2], [1.0, 2.0], [1.0, f32::NAN]] {
            assert!(difference(&[1.0, -2.0], &other) > 0.0, "{other:?}");
        }
        assert!(difference(&[0.0], &[-0.0]) > 0.0);
    }
}
