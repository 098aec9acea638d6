//! How the passes of a step share its computing time out over buckets.
//!
//! A layer takes its work ([`Learner::work`](crate::Learner::work)) in the forward pass and twice
//! that in the backward pass, spread evenly over its parameters. Buckets are parts of layers, or
//! several of them.

use std::ops::Range;
use std::time::Duration;

use crate::layout::Layout;

/// A forward pass is one of so many equal parts of a step's computing, as a backward pass takes
/// about twice as long.
const PASSES: u64 = 3;

/// The work of a pass in each bucket, and of those before it in the backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Passes {
    /// By bucket, in the order of backward passes: the work up to its end.
    ends: Vec<u128>,
}

impl Passes {
    /// Of buckets of this layout, whose layers take this work. Where they take none, parameters
    /// count.
    pub(crate) fn new(layout: &Layout, work: &[u64], buckets: &[Range<usize>]) -> Self {
        let is_given = work.len() == layout.layers().len() && work.iter().any(|work| *work > 0);
        let before = |element: usize| {
            let (mut begin, mut sum) = (0, 0_u128);
            for (number, length) in layout.layers().iter().enumerate() {
                let part = element.clamp(begin, begin + length) - begin;
                let of_layer = if is_given { work[number] } else { *length as u64 };
                // A layer without parameters is in no bucket.
                sum +=
                    (u128::from(of_layer) * part as u128 * SCALE).checked_div(*length as u128).unwrap_or(0);
                begin += length;
            }
            sum
        };
        let all = before(layout.parameters());
        Self { ends: buckets.iter().map(|bucket| all - before(bucket.start)).collect() }
    }

    fn all(&self) -> u128 {
        self.ends.last().copied().unwrap_or(1).max(1)
    }

    /// When a bucket is ready, from the begin of a backward pass of a step of this time.
    pub(crate) fn ready(&self, time: Duration, bucket: usize) -> u64 {
        let nanos = time.as_nanos() as u64;
        let backward = nanos - nanos / PASSES;
        (u128::from(backward) * self.ends[bucket] / self.all()) as u64
    }

    /// The time of a backward pass.
    pub(crate) fn backward(&self, time: Duration) -> u64 {
        let nanos = time.as_nanos() as u64;
        nanos - nanos / PASSES
    }

    /// How long the forward pass takes with a bucket: those of all are the time of the pass.
    pub(crate) fn forward(&self, time: Duration, bucket: usize) -> u64 {
        let forward = time.as_nanos() as u64 / PASSES;
        // From the last bucket to the first one.
        let after = |ends: u128| (u128::from(forward) * (self.all() - ends) / self.all()) as u64;
        let begin = bucket.checked_sub(1).map_or(0, |before| self.ends[before]);
        after(begin) - after(self.ends[bucket])
    }
}

/// Parts of a unit of work.
const SCALE: u128 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_take_the_time_of_a_step_and_layers_their_work() {
        let layout = Layout::of(&[10, 30, 60]);
        let buckets = [60..100, 40..60, 10..40, 0..10];
        for work in [&[][..], &[7, 1, 2], &[0, 0, 0]] {
            let passes = Passes::new(&layout, work, &buckets);
            for nanos in [1, 2, 3, 1_000, 1_001] {
                let time = Duration::from_nanos(nanos);
                let forward: u64 = (0..4).map(|bucket| passes.forward(time, bucket)).sum();
                assert_eq!(forward + passes.backward(time), nanos);
                assert_eq!(passes.ready(time, 3), passes.backward(time));
                assert!((1..4).all(|bucket| passes.ready(time, bucket - 1) <= passes.ready(time, bucket)));
            }
        }
        let time = Duration::from_nanos(3_000);
        let passes = Passes::new(&layout, &[7, 1, 2], &buckets);
        let ready: Vec<u64> = (0..4).map(|bucket| passes.ready(time, bucket)).collect();
        let forward: Vec<u64> = (0..4).map(|bucket| passes.forward(time, bucket)).collect();
        assert_eq!((ready, forward), (vec![266, 400, 600, 2_000], vec![134, 66, 100, 700]));
    }
}
