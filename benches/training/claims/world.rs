//! Simulated ranks, and a training of theirs.

use std::ops::ControlFlow;
use std::time::Duration;

use pleach::Rank;
use pleach_training::simulation::{
    Computing, Network, Observation, Settings, Simulated, Simulation, SimulationError, TransferTime,
};
use pleach_training::{Learner, Scheme};

use super::images::Data;

/// The mean time of a step's computing.
pub(crate) const STEP: Duration = Duration::from_millis(10);

/// Steps of rank 0 between two looks at the test images.
const LOOK_STEPS: u64 = 5;

/// Steps of a training that ends by time: more than any makes.
const ENDLESS: u64 = 1 << 40;

/// What exchanges take: a time for a whole vector of parameters, and of a part its share.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Links {
    /// An all-reduce, in [`STEP`]s.
    pub(crate) all_reduce_steps: f64,
    /// A read or a write, in [`STEP`]s.
    pub(crate) transfer_steps: f64,
    /// Bytes of the whole vector.
    pub(crate) bytes: u64,
}

impl Links {
    fn time(&self, steps: f64, bytes: u64) -> Duration {
        if self.bytes == 0 {
            return Duration::ZERO;
        }
        STEP.mul_f64(steps * bytes as f64 / self.bytes as f64)
    }
}

impl Network for Links {
    fn all_reduce(&mut self, bytes: u64) -> Duration {
        self.time(self.all_reduce_steps, bytes)
    }

    fn transfer(&mut self, _: Rank, _: Rank, bytes: u64) -> TransferTime {
        TransferTime { latency: Duration::ZERO, sending: self.time(self.transfer_steps, bytes) }
    }
}

/// When a training ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// After so many steps of each rank.
    Steps(u64),
    /// After so much time, in [`STEP`]s.
    Time(f64),
}

/// Ranks, their speeds and links, and their optimizers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World {
    pub(crate) ranks: u32,
    pub(crate) computing: Computing,
    pub(crate) links: Links,
    pub(crate) learning_rate: f32,
    pub(crate) momentum: f32,
    pub(crate) seed: u64,
    pub(crate) end: End,
    /// Whether the learning rate falls to 0 by a cosine, where the number of steps is known.
    pub(crate) rate_falls: bool,
    /// A rank that ends, and the step before which it does.
    pub(crate) death: Option<(Rank, u64)>,
}

/// A training that came to its end.
#[derive(Clone, Debug)]
pub(crate) struct Trained {
    pub(crate) simulated: Simulated,
    /// Of the test images, by the mean of all ranks' parameters.
    pub(crate) loss: f64,
    pub(crate) accuracy: f64,
    /// When the target was reached, in [`STEP`]s.
    pub(crate) target_steps: Option<f64>,
    /// The share of time that ranks waited until rank 0 had made half of its steps: later, quick
    /// ranks wait for the others to end.
    pub(crate) early_waiting: f64,
}

/// What a training is to reach.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    Accuracy(f64),
    Loss(f64),
}

/// Computing times as on the command line.
///
/// # Errors
///
/// It is no such text.
pub(crate) fn computing(text: &str) -> Result<Computing, String> {
    text.parse().map_err(|error| format!("{error}"))
}

/// A scheme of its text.
///
/// # Errors
///
/// It is no such text.
pub(crate) fn scheme(text: &str) -> Result<Scheme, String> {
    text.parse().map_err(|error| format!("{text}: {error}"))
}

impl World {
    /// Runs a learner by a scheme; `None` if the loss became infinite.
    ///
    /// # Errors
    ///
    /// The scheme is refused, an invariant is broken, or a rank has ended for which others wait.
    pub(crate) fn run(
        &self,
        learner: &impl Learner,
        text: &str,
        observe: &mut dyn FnMut(&Observation<'_>) -> ControlFlow<()>,
    ) -> Result<Option<Simulated>, String> {
        let (steps, observed_every) = match self.end {
            End::Steps(steps) => (steps, LOOK_STEPS.min(steps / 2).max(1)),
            End::Time(_) => (ENDLESS, 1),
        };
        let Self { ranks, computing, learning_rate, momentum, seed, .. } = *self;
        let settings = Settings { ranks, steps, seed, computing, learning_rate, momentum, observed_every };
        let failed = |error: SimulationError| format!("{text} on {ranks} ranks: {error}");
        let mut simulation = Simulation::new(learner, &scheme(text)?, &settings).map_err(failed)?;
        if let Some((rank, step)) = self.death {
            simulation = simulation.ending(rank, step).map_err(failed)?;
        }
        let mut links = self.links;
        let ran = simulation.run_until(&mut links, &mut |observed| {
            observe(observed)?;
            match self.end {
                End::Time(limit) if in_steps(observed.time) >= limit => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        });
        match ran {
            Ok(simulated) => Ok(Some(simulated)),
            Err(SimulationError::Loss { .. }) => Ok(None),
            Err(error) => Err(failed(error)),
        }
    }

    /// Trains by a scheme, until the target if there is one; `None` if the loss became infinite.
    ///
    /// # Errors
    ///
    /// The scheme is refused, or does not keep what it guarantees.
    pub(crate) fn train(
        &self,
        data: &Data,
        text: &str,
        target: Option<Target>,
    ) -> Result<Option<Trained>, String> {
        let (mut target_steps, mut early_waiting) = (None, 0.0);
        let mut reader = data.reader(self.seed);
        if let (End::Steps(steps), true) = (self.end, self.rate_falls) {
            reader = reader.falling_for(steps);
        }
        let ran = self.run(&reader, text, &mut |observed| {
            if let End::Steps(steps) = self.end
                && observed.step <= steps / 2
            {
                early_waiting = observed.wait_share;
            }
            if let Some(target) = target
                && observed.step.is_multiple_of(LOOK_STEPS)
            {
                let reading = data.reading(observed.parameters);
                let is_reached = match target {
                    Target::Accuracy(least) => reading.accuracy >= least,
                    Target::Loss(most) => reading.loss <= most,
                };
                if is_reached {
                    target_steps = Some(in_steps(observed.time));
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        })?;
        let Some(simulated) = ran else { return Ok(None) };
        if !simulated.guarantee_held || (simulated.has_ended && !simulated.parameters_equal) {
            return Err(format!("{text} on {} ranks: its guarantee does not hold", self.ranks));
        }
        let reading = data.reading(&simulated.parameters);
        let (loss, accuracy) = (reading.loss, reading.accuracy);
        Ok(Some(Trained { simulated, loss, accuracy, target_steps, early_waiting }))
    }

    /// The learning rate, of these, of the least loss on images held out.
    ///
    /// # Errors
    ///
    /// As [`World::train`].
    pub(crate) fn best_rate(&self, data: &Data, text: &str, rates: &[f32]) -> Result<f32, String> {
        let held_out = data.validation();
        let mut best = (f64::INFINITY, rates[0]);
        for &learning_rate in rates {
            let trained = Self { learning_rate, ..*self }.train(&held_out, text, None)?;
            // Too large a rate is what a choice is for.
            let loss = trained.map_or(f64::INFINITY, |trained| trained.loss);
            if loss < best.0 {
                best = (loss, learning_rate);
            }
        }
        Ok(best.1)
    }

    /// A training by each seed that must not diverge.
    ///
    /// # Errors
    ///
    /// As [`World::train`], and one diverges.
    pub(crate) fn train_all(&self, data: &Data, text: &str, seeds: &[u64]) -> Result<Vec<Trained>, String> {
        let each = seeds.iter().map(|&seed| {
            let trained = Self { seed, ..*self }.train(data, text, None)?;
            trained.ok_or_else(|| format!("{text} on {} ranks: the loss became infinite", self.ranks))
        });
        each.collect()
    }
}

/// A time in [`STEP`]s.
pub(crate) fn in_steps(time: Duration) -> f64 {
    time.as_secs_f64() / STEP.as_secs_f64()
}
