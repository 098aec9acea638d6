//! ZipLine: where the next barrier of ElasticBSP stands (Zhao et al., arXiv 2001.01347).
//!
//! Workers of different speed push their updates at different times. A barrier behind pushes that
//! lie close together costs little waiting, even if the workers have done different numbers of
//! iterations. A worker's next pushes are predicted: the first one, then one after each interval,
//! as many as the *lookahead* R. A *selection* holds one push of each worker. The barrier stands at
//! the latest push of the best selection, and each worker is told how many iterations it does until
//! then.
//!
//! [`place`] sweeps once over the pushes of all workers in the order of time, through a heap of one
//! next push a worker. At each push it looks at one selection: the last push of each worker so far.
//! No other selection that ends there is better by either [`Objective`], so the best of the sweep
//! is the best of all. That takes O(n·R·log n) time and O(n) memory, which a [`Placer`] keeps for
//! its next barrier.
//!
//! **Invariants:** times are integers, and the first of the best selections counts, so equal
//! predictions give equal barriers on all machines. No worker does more than R iterations.
//!
//! ```
//! use pleach_training::zipline::{Objective, Prediction, place};
//!
//! // Two iterations of 30 end when three of 20 do.
//! let workers = [Prediction { next: 30, interval: 30 }, Prediction { next: 20, interval: 20 }];
//! let barrier = place(&workers, 0, 4, Objective::Range)?;
//! assert_eq!((barrier.at, barrier.range(), barrier.iterations), (60, 0, vec![2, 3]));
//! # Ok::<(), pleach_training::zipline::ZipLineError>(())
//! ```

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use crate::state::{Remembered, State};

#[cfg(test)]
mod tests;

/// Most workers.
pub const WORKERS_MAX: usize = 1 << 20;

/// Latest predicted push, counted from now: in nanoseconds 13 days.
pub const TIME_MAX: u64 = 1 << 50;

/// When a worker will push: times in one unit, on one clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// The next push.
    pub next: u64,
    /// From one push to the next, without waiting at barriers; above 0.
    pub interval: u64,
}

/// By which intervals of the past the next ones are predicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Predictor {
    /// The mean of all.
    #[default]
    Mean,
    /// The last one (the paper's).
    Last,
}

/// The intervals of one worker, each from the begin of an iteration to its push. The worker's
/// waiting at a barrier is in none: it would come back as a prediction of more waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Intervals {
    sum: u64,
    count: u64,
    last: u64,
}

impl Intervals {
    /// Notes an iteration.
    pub fn add(&mut self, interval: u64) {
        self.sum = self.sum.saturating_add(interval);
        self.count += 1;
        self.last = interval;
    }

    /// The predicted interval, at least 1; `None` before the first iteration.
    #[must_use]
    pub fn predicted(&self, predictor: Predictor) -> Option<u64> {
        let predicted = match predictor {
            Predictor::Mean => self.sum.checked_div(self.count)?,
            Predictor::Last => (self.count > 0).then_some(self.last)?,
        };
        Some(predicted.max(1))
    }
}

impl Remembered for Intervals {
    fn visit(&mut self, state: &mut State<'_>) {
        state.field(&mut self.sum);
        state.field(&mut self.count);
        state.field(&mut self.last);
    }
}

/// Which selection is best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// That in which workers wait for the least share of the time from now to the barrier. R trades
    /// waiting against the length of a superstep.
    #[default]
    Share,
    /// The shortest (the paper's). With many workers it is often the first: after a barrier all
    /// begin together.
    Range,
}

/// A barrier behind one push of each worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Barrier {
    /// The earliest of the pushes.
    pub first: u64,
    /// The latest of the pushes, where the barrier stands.
    pub at: u64,
    /// The time that all workers wait at the barrier, summed up.
    pub waiting: u128,
    /// Which of its next pushes is that of each worker, from 1: the iterations until the barrier.
    pub iterations: Vec<u32>,
    /// How many selections were compared.
    pub compared: u64,
}

impl Barrier {
    /// From the earliest to the latest push.
    #[must_use]
    pub fn range(&self) -> u64 {
        self.at - self.first
    }
}

/// Why there is no barrier.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ZipLineError {
    /// No workers, or too many.
    #[error("{workers} workers; give 1 to {WORKERS_MAX}")]
    Workers {
        /// How many there are.
        workers: usize,
    },
    /// A prediction that is none.
    #[error(
        "worker {worker} has an interval of 0, or a next push before now; predict from the intervals of its iterations"
    )]
    Prediction {
        /// The worker.
        worker: usize,
    },
    /// A push beyond [`TIME_MAX`].
    #[error(
        "the last predicted push of worker {worker} is more than {TIME_MAX} from now; take a smaller lookahead"
    )]
    TooLate {
        /// The worker.
        worker: usize,
    },
    /// No iterations.
    #[error("a lookahead of 0 iterations; 1 is a barrier after each iteration")]
    NoLookahead,
    /// So few iterations that the last push of a quick worker may lie before the first of a slow
    /// one.
    #[error(
        "a lookahead of {lookahead} iterations ends for the quickest worker before the slowest does one; give at least {least}"
    )]
    ShortLookahead {
        /// The lookahead.
        lookahead: u32,
        /// The least that reaches from the shortest interval to the longest.
        least: u64,
    },
}

/// The barrier at the best selection of the next `lookahead` pushes of each worker. A lookahead of
/// 1 is a barrier after each iteration (BSP), whatever the intervals.
///
/// # Errors
///
/// Each variant of [`ZipLineError`].
pub fn place(
    workers: &[Prediction],
    now: u64,
    lookahead: u32,
    objective: Objective,
) -> Result<Barrier, ZipLineError> {
    let mut barrier = Barrier::default();
    Placer::default().place(workers, now, lookahead, objective, &mut barrier)?;
    Ok(barrier)
}

/// Places one barrier after the other in the same memory.
#[derive(Debug, Default)]
pub struct Placer {
    /// The next push of each worker that has one: its time, counted from now.
    heap: BinaryHeap<Reverse<(u64, u32)>>,
    sweep: Sweep,
}

impl Placer {
    /// As the function [`place`], into a barrier that there is. After an error that is as it was.
    ///
    /// # Errors
    ///
    /// Each variant of [`ZipLineError`].
    pub fn place(
        &mut self,
        workers: &[Prediction],
        now: u64,
        lookahead: u32,
        objective: Objective,
        barrier: &mut Barrier,
    ) -> Result<(), ZipLineError> {
        check(workers, now, lookahead)?;
        let Self { heap, sweep } = self;
        heap.clear();
        let first_pushes = workers.iter().zip(0..);
        heap.extend(first_pushes.map(|(prediction, worker)| Reverse((prediction.next - now, worker))));
        sweep.begin(workers.len());
        let mut best: Option<Candidate> = None;
        let mut compared = 0;
        while let Some(mut top) = heap.peek_mut() {
            let Reverse((time, worker)) = *top;
            let done = sweep.push(time, worker);
            if done < lookahead {
                top.0.0 = time + workers[worker as usize].interval;
            } else {
                PeekMut::pop(top);
            }
            let Some(first) = sweep.first() else { continue };
            compared += 1;
            let waiting = workers.len() as u128 * u128::from(time) - sweep.sum;
            let candidate = Candidate { first, at: time, waiting };
            // Of pushes at one time the last one ends the best selection.
            if best.is_none_or(|best| best.at == time || candidate.is_better(best, objective)) {
                best = Some(candidate);
            }
        }
        let best = best.expect("after all pushes each worker has pushed");
        (barrier.first, barrier.at) = (now + best.first, now + best.at);
        (barrier.waiting, barrier.compared) = (best.waiting, compared);
        barrier.iterations.clear();
        barrier.iterations.extend(iterations(workers, now, best.at, lookahead));
        Ok(())
    }
}

fn check(workers: &[Prediction], now: u64, lookahead: u32) -> Result<(), ZipLineError> {
    if workers.is_empty() || workers.len() > WORKERS_MAX {
        return Err(ZipLineError::Workers { workers: workers.len() });
    }
    if lookahead == 0 {
        return Err(ZipLineError::NoLookahead);
    }
    for (worker, prediction) in workers.iter().enumerate() {
        if prediction.interval == 0 || prediction.next < now {
            return Err(ZipLineError::Prediction { worker });
        }
        let more = prediction.interval.checked_mul(u64::from(lookahead - 1));
        let last = more.and_then(|more| (prediction.next - now).checked_add(more));
        if last.is_none_or(|last| last > TIME_MAX) {
            return Err(ZipLineError::TooLate { worker });
        }
    }
    let intervals = || workers.iter().map(|prediction| prediction.interval);
    let (least, most) = (intervals().min().unwrap_or(1), intervals().max().unwrap_or(1));
    let needed = most.div_ceil(least);
    if lookahead > 1 && u64::from(lookahead) < needed {
        return Err(ZipLineError::ShortLookahead { lookahead, least: needed });
    }
    Ok(())
}

/// The pushes of each worker up to a time, from 1.
fn iterations(workers: &[Prediction], now: u64, at: u64, lookahead: u32) -> impl Iterator<Item = u32> {
    workers.iter().map(move |prediction| {
        let pushes = 1 + (at - (prediction.next - now)) / prediction.interval;
        u32::try_from(pushes).unwrap_or(u32::MAX).min(lookahead)
    })
}

/// A selection, with times counted from now.
#[derive(Clone, Copy)]
struct Candidate {
    first: u64,
    at: u64,
    waiting: u128,
}

impl Candidate {
    fn is_better(self, other: Self, objective: Objective) -> bool {
        match objective {
            Objective::Range => self.at - self.first < other.at - other.first,
            // Waiting is below 2^70, so products are below 2^120. A barrier at once has no waiting.
            Objective::Share => {
                self.waiting * u128::from(other.at.max(1)) < other.waiting * u128::from(self.at.max(1))
            }
        }
    }
}

/// No worker.
const NOBODY: u32 = u32::MAX;

/// The last push of each worker up to now, in a list by time: who pushes again goes to its end.
#[derive(Debug, Default)]
struct Sweep {
    last: Vec<Push>,
    first_worker: u32,
    last_worker: u32,
    missing: usize,
    /// Of the last pushes.
    sum: u128,
}

#[derive(Clone, Copy, Debug)]
struct Push {
    time: u64,
    /// From 1; 0 before the first push.
    count: u32,
    before: u32,
    behind: u32,
}

impl Sweep {
    /// Begins with workers that have not pushed.
    fn begin(&mut self, workers: usize) {
        self.last.clear();
        self.last.resize(workers, Push { time: 0, count: 0, before: NOBODY, behind: NOBODY });
        (self.first_worker, self.last_worker) = (NOBODY, NOBODY);
        (self.missing, self.sum) = (workers, 0);
    }

    /// Takes the next push; returns how many this worker has made.
    fn push(&mut self, time: u64, worker: u32) -> u32 {
        let Push { time: former, count, before, behind } = self.last[worker as usize];
        if count == 0 {
            self.missing -= 1;
        } else {
            self.link(before, behind);
        }
        self.sum += u128::from(time - former);
        self.last[worker as usize] = Push { time, count: count + 1, before: NOBODY, behind: NOBODY };
        self.link(self.last_worker, worker);
        self.link(worker, NOBODY);
        count + 1
    }

    /// Puts two workers side by side.
    fn link(&mut self, before: u32, behind: u32) {
        match self.last.get_mut(before as usize) {
            Some(push) => push.behind = behind,
            None => self.first_worker = behind,
        }
        match self.last.get_mut(behind as usize) {
            Some(push) => push.before = before,
            None => self.last_worker = before,
        }
    }

    /// The earliest of the last pushes, once each worker has pushed.
    fn first(&self) -> Option<u64> {
        (self.missing == 0).then(|| self.last[self.first_worker as usize].time)
    }
}
