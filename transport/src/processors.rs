//! The processors of threads: sets in the kernel's notation, and the calls that read and change a
//! thread's set.
//!
//! A set of more than [`CpuSet::MAX_CPU`] processors cannot be represented: then nothing is known,
//! and nothing is changed.

use std::fmt;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A set of processors, by the kernel's numbers. As text a list in the kernel's notation: `0-3,8`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processors(
    /// Ascending, each once.
    Vec<u32>,
);

impl Processors {
    /// The set of these processors.
    pub fn new(numbers: impl IntoIterator<Item = u32>) -> Self {
        let mut numbers: Vec<u32> =
            numbers.into_iter().filter(|number| (*number as usize) < CpuSet::MAX_CPU).collect();
        numbers.sort_unstable();
        numbers.dedup();
        Self(numbers)
    }

    /// The processors of a list in the kernel's notation; malformed parts are ignored.
    #[must_use]
    pub fn of_list(list: &str) -> Self {
        let ranges = list.trim().split(',').filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (first.trim().parse::<u32>().ok()?, last.trim().parse::<u32>().ok()?);
            Some(first..=last.min(CpuSet::MAX_CPU as u32))
        });
        Self::new(ranges.flatten())
    }

    /// The processors that this thread may use; `None` when the kernel's answer is too long.
    #[must_use]
    pub fn allowed() -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        Some(Self::new((0..CpuSet::MAX_CPU as u32).filter(|number| allowed.is_set(*number as usize))))
    }

    /// The processors of this machine that run; `None` when the kernel does not say.
    #[must_use]
    pub fn online() -> Option<Self> {
        std::fs::read_to_string("/sys/devices/system/cpu/online").ok().map(|list| Self::of_list(&list))
    }

    /// Binds this thread, and its future threads, to these processors.
    ///
    /// # Errors
    ///
    /// The kernel's: this thread may use none of them.
    pub fn keep_this_thread(&self) -> std::io::Result<()> {
        let mut only = CpuSet::new();
        self.0.iter().for_each(|number| only.set(*number as usize));
        Ok(sched_setaffinity(None, &only)?)
    }

    /// The number of processors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it has this processor.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        self.0.binary_search(&number).is_ok()
    }

    /// Whether it is a subset of `others`.
    #[must_use]
    pub fn all_among(&self, others: &Self) -> bool {
        self.iter().all(|number| others.contains(number))
    }

    /// The numbers, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }
}

impl fmt::Display for Processors {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = self.0.chunk_by(|number, next| number + 1 == *next);
        for (place, range) in ranges.enumerate() {
            let comma = if place == 0 { "" } else { "," };
            match range {
                [only] => write!(formatter, "{comma}{only}")?,
                [first, .., last] => write!(formatter, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

/// The processor that runs this thread, or ran it a moment ago. No system call.
#[must_use]
pub fn current() -> u32 {
    sched_getcpu() as u32
}

/// Moves this thread to one of its processors that is not in `taken`; its set stays. False when it
/// has no other.
///
/// The kernel places a thread anew when it wakes, or when a processor is idle. It does not separate
/// two threads that share a processor while the others are busy. A thread whose set is narrowed
/// moves at once.
pub fn move_away_from(taken: &Processors) -> bool {
    let Some(allowed) = Processors::allowed() else { return false };
    let free = Processors::new(allowed.iter().filter(|number| !taken.contains(*number)));
    if free.is_empty() || free.keep_this_thread().is_err() {
        return false;
    }
    if let Err(error) = allowed.keep_this_thread() {
        tracing::debug!("a thread stays on processors {free}, and not on {allowed}: {error}");
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written_as_the_kernel_does_and_nonsense_is_left_out() {
        for list in ["", "0", "0-2,5,7-8", "1-1023"] {
            assert_eq!(Processors::of_list(list).to_string(), list);
        }
        assert_eq!(Processors::of_list("8,0-1,1\n").to_string(), "0-1,8");
        assert_eq!(Processors::of_list("x,3-y,4,9-5,-,2-").to_string(), "4");
        assert_eq!(Processors::of_list("0-4294967295").len(), CpuSet::MAX_CPU);
        assert_eq!(Processors::of_list("99999999").len(), 0);
    }

    #[test]
    fn a_thread_may_use_none_but_those_that_run() {
        let online = Processors::online().expect("the kernel says it");
        assert!(!online.is_empty() && Processors::allowed().expect("few").all_among(&online), "{online}");
    }

    #[test]
    fn a_thread_that_moves_away_is_elsewhere_and_may_run_where_it_might() {
        // A thread of its own, because the set is per thread.
        let of_it = || {
            let all = Processors::allowed().expect("a machine of few processors");
            let taken = Processors::new([current()]);
            let only = taken.iter().next().expect("one");
            taken.keep_this_thread().expect("it runs there");
            assert!(!move_away_from(&taken), "it has no other");
            assert_eq!(Processors::allowed(), Some(taken.clone()));
            all.keep_this_thread().expect("it might before");
            if all.len() > 1 {
                assert!(move_away_from(&taken));
                assert_eq!(Processors::allowed(), Some(all));
            } else {
                println!("not tried on one processor: moving away from {only}");
            }
        };
        std::thread::spawn(of_it).join().expect("it ends well");
    }
}
