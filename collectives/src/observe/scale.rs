//! Times on a scale of 255 steps, for the headers of signals and the bins of histograms.
//!
//! A step is 256 ns up to 2 µs. Above, it is an eighth of an octave (at most 12.5 %), up to 36
//! minutes.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The length of the first steps, in nanoseconds.
const UNIT_NS: u64 = 256;
/// The number of steps, zero included.
const STEPS: usize = 256;

/// The last step that does not end after `time_ns`.
fn step_below(time_ns: u64) -> u8 {
    let units = time_ns / UNIT_NS;
    if units < 8 {
        return units as u8;
    }
    let exponent = units.ilog2();
    let step = u64::from(exponent - 2) * 8 + (units >> (exponent - 3) & 7);
    step.min(STEPS as u64 - 1) as u8
}

/// The first step that is not before `time_ns`. The difference of a time and this step is never too
/// large.
pub(crate) fn step_above(time_ns: u64) -> u8 {
    let below = step_below(time_ns);
    if step_ns(below) < time_ns { below.saturating_add(1) } else { below }
}

/// The begin of a step, in nanoseconds.
pub(crate) fn step_ns(step: u8) -> u64 {
    let step = u64::from(step);
    match step {
        0..8 => step * UNIT_NS,
        _ => ((8 + step % 8) << (step / 8 - 1)) * UNIT_NS,
    }
}

/// A histogram of times. One thread adds to it, and any thread may read it meanwhile. Relaxed: no
/// other memory depends on a number.
#[derive(Debug)]
pub(super) struct Histogram {
    bins: Box<[AtomicU32]>,
    sum_ns: AtomicU64,
    longest_ns: AtomicU64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self {
            bins: (0..STEPS).map(|_| AtomicU32::new(0)).collect(),
            sum_ns: AtomicU64::new(0),
            longest_ns: AtomicU64::new(0),
        }
    }

    pub(super) fn add(&self, time_ns: u64) {
        let bin = &self.bins[usize::from(step_below(time_ns))];
        bin.store(bin.load(Ordering::Relaxed).saturating_add(1), Ordering::Relaxed);
        let sum_ns = self.sum_ns.load(Ordering::Relaxed).saturating_add(time_ns);
        self.sum_ns.store(sum_ns, Ordering::Relaxed);
        self.longest_ns.store(self.longest_ns.load(Ordering::Relaxed).max(time_ns), Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> Distribution {
        let bins = self.bins.iter().enumerate().filter_map(|(step, count)| {
            let count = u64::from(count.load(Ordering::Relaxed));
            (count > 0).then_some((step as u8, count))
        });
        Distribution {
            bins: bins.collect(),
            sum: Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed)),
            longest: Duration::from_nanos(self.longest_ns.load(Ordering::Relaxed)),
        }
    }
}

/// The distribution of many times: a histogram with bins of at most 12.5 %.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// The steps that have times, each with the number of times.
    bins: Vec<(u8, u64)>,
    sum: Duration,
    longest: Duration,
}

impl Distribution {
    /// The number of times.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.bins.iter().map(|(_, count)| count).sum()
    }

    /// The sum of all times.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// The longest.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.longest
    }

    /// The time that the share `quantile` (from 0 to 1) of all times does not exceed, to the
    /// precision of a bin; zero if there are no times.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Duration {
        let wanted = (self.count() as f64 * quantile.clamp(0.0, 1.0)).ceil() as u64;
        let mut before = 0;
        for (step, count) in &self.bins {
            before += count;
            if before >= wanted {
                let end = Duration::from_nanos(step_ns(step.saturating_add(1)));
                return end.min(self.longest);
            }
        }
        self.longest
    }

    /// The number of times that are at most `limit`, to the precision of a bin.
    #[must_use]
    pub fn at_most(&self, limit: Duration) -> u64 {
        let below = |step: u8| Duration::from_nanos(step_ns(step)) <= limit;
        self.bins.iter().filter(|(step, _)| below(*step)).map(|(_, count)| count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_rise_by_an_eighth_and_hold_what_lies_between() {
        for step in 0..u8::MAX {
            let (begin, end) = (step_ns(step), step_ns(step + 1));
            assert!(begin < end && (step < 8 || end - begin <= begin / 8), "{step}: {begin} to {end}");
            assert_eq!([step_below(begin), step_below(end - 1)], [step; 2]);
            assert_eq!([step_above(begin), step_above(begin + 1)], [step, step + 1]);
        }
        assert_eq!(step_below(u64::MAX), u8::MAX);
        assert_eq!(step_above(u64::MAX), u8::MAX);
        assert!(step_ns(u8::MAX) > 1_000_000_000 * 60 * 30);
    }

    #[test]
    fn quantiles_are_right_to_a_bin() {
        let histogram = Histogram::new();
        (1..=1000).for_each(|number| histogram.add(number * 1000));
        let read = histogram.read();
        assert_eq!((read.count(), read.longest()), (1000, Duration::from_millis(1)));
        assert_eq!(read.sum(), Duration::from_micros(500_500));
        for (quantile, expected_us) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1000.0), (0.1, 100.0)] {
            let found_us = read.quantile(quantile).as_secs_f64() * 1e6;
            assert!((found_us / expected_us - 1.0).abs() < 0.13, "{quantile}: {found_us}");
        }
        assert_eq!(Histogram::new().read().quantile(0.5), Duration::ZERO);
        assert_eq!(read.at_most(Duration::from_secs(1)), 1000);
        assert_eq!(read.at_most(Duration::ZERO), 0);
    }
}
