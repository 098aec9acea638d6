//! How long real ranks took to compute, as a file, and the same for simulated ranks.
//!
//! **Invariant:** each rank has at least one time, and each time is from 1 ns to [`TIME_MAX`].

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_vocabulary::digest::hash_of_pair;
use pleach_vocabulary::random::Random;
use serde::{Deserialize, Serialize};

/// Counts changes of the form of the files.
const FORMAT: u32 = 1;

/// The longest time of a step.
const TIME_MAX: Duration = Duration::from_secs(3_600);

/// The longest file, in bytes.
const FILE_BYTES_MAX: u64 = 1 << 28;

/// Why computing times are not written, or not taken.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum RecordError {
    /// A file cannot be written or read.
    #[error("computing times not {done}: {} ({error}); name a file that can be written and read", .path.display())]
    Io {
        /// What was not done, as "written".
        done: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// A file has no computing times.
    #[error("no computing times in {}: {reason}; name a file that was given by --record", .path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// The computing times of the ranks of a training, step by step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedTimes {
    ranks: Vec<Vec<Duration>>,
}

/// As a file has them.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    format: u32,
    /// By rank and step.
    computing_ns: Vec<Vec<u64>>,
}

impl RecordedTimes {
    /// The times of each rank, of which each has at least one. A time below 1 ns counts as 1 ns,
    /// and one above an hour as an hour.
    #[must_use]
    pub fn new(ranks: Vec<Vec<Duration>>) -> Option<Self> {
        let is_whole = !ranks.is_empty() && ranks.iter().all(|times| !times.is_empty());
        let bounded = |time: Duration| time.clamp(Duration::from_nanos(1), TIME_MAX);
        let ranks = ranks.into_iter().map(|times| times.into_iter().map(bounded).collect()).collect();
        is_whole.then_some(Self { ranks })
    }

    /// The number of ranks that were recorded.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// The computing time of a rank in a step. A rank that was recorded takes the times that it
    /// took, and begins again behind the last. Another rank takes those of one that was recorded,
    /// the ranks in turn, from a step on that is drawn by the seed.
    #[must_use]
    pub fn time(&self, seed: u64, rank: Rank, step: u64) -> Duration {
        let times = &self.ranks[rank as usize % self.ranks.len()];
        let steps = times.len() as u64;
        let is_recorded = (rank as usize) < self.ranks.len();
        let from = if is_recorded { 0 } else { Random::new(hash_of_pair(seed, rank.into())).bits() % steps };
        times[((step % steps + from) % steps) as usize]
    }

    /// Writes the file.
    ///
    /// # Errors
    ///
    /// [`RecordError::Io`].
    pub fn write(&self, path: &Path) -> Result<(), RecordError> {
        let nanos = |times: &Vec<Duration>| times.iter().map(|time| time.as_nanos() as u64).collect();
        let text = Text { format: FORMAT, computing_ns: self.ranks.iter().map(nanos).collect() };
        let written = serde_json::to_vec(&text).map_err(io::Error::from).and_then(|mut text| {
            text.push(b'\n');
            fs::write(path, text)
        });
        written.map_err(|error| RecordError::Io { done: "written", path: path.to_owned(), error })
    }

    /// Reads a file.
    ///
    /// # Errors
    ///
    /// [`RecordError`].
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let form = |reason| RecordError::Form { path: path.to_owned(), reason };
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes));
        read.map_err(|error| RecordError::Io { done: "read", path: path.to_owned(), error })?;
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(form(format!("it is longer than {} MiB", FILE_BYTES_MAX >> 20)));
        }
        let text: Text = serde_json::from_slice(&bytes).map_err(|error| form(error.to_string()))?;
        if text.format != FORMAT {
            return Err(form(format!("format {}, and this version of pleach reads {FORMAT}", text.format)));
        }
        let longest = TIME_MAX.as_nanos() as u64;
        for (rank, times) in text.computing_ns.iter().enumerate() {
            if let Some(step) = times.iter().position(|time| !(1..=longest).contains(time)) {
                let time = times[step];
                return Err(form(format!("{time} ns of rank {rank} in step {step}, not 1 to {longest}")));
            }
        }
        let times = |times: Vec<u64>| times.into_iter().map(Duration::from_nanos).collect();
        let ranks = text.computing_ns.into_iter().map(times).collect();
        Self::new(ranks).ok_or_else(|| form("a rank has no step, or there is no rank".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(times: &[u64]) -> Vec<Duration> {
        times.iter().map(|time| Duration::from_millis(*time)).collect()
    }

    #[test]
    fn ranks_that_were_recorded_take_their_times_and_others_those_of_one_of_them() {
        let times =
            RecordedTimes::new(vec![milliseconds(&[1, 2, 3]), milliseconds(&[10, 20])]).expect("whole");
        let of = |seed, rank, steps| -> Vec<u64> {
            (0..steps).map(|step| times.time(seed, rank, step).as_millis() as u64).collect()
        };
        assert_eq!((of(7, 0, 5), of(7, 1, 3)), (vec![1, 2, 3, 1, 2], vec![10, 20, 10]));
        assert_eq!(of(8, 0, 5), of(7, 0, 5), "nothing is drawn");
        let mut others: Vec<Vec<u64>> = (0..20).map(|seed| of(seed, 2, 3)).collect();
        others.sort_unstable();
        others.dedup();
        assert_eq!(others, [[1, 2, 3], [2, 3, 1], [3, 1, 2]]);
        assert_eq!(times.time(0, 3, u64::MAX), times.time(0, 3, 1));
        assert_eq!(RecordedTimes::new(vec![milliseconds(&[1]), Vec::new()]), None);
        assert_eq!(RecordedTimes::new(Vec::new()), None);
    }

    #[test]
    fn a_file_comes_back_and_another_one_is_refused() {
        let folder = std::env::temp_dir().join(format!("pleach-recorded-{}", std::process::id()));
        fs::create_dir_all(&folder).expect("there is space");
        let path = folder.join("times");
        let times =
            RecordedTimes::new(vec![vec![Duration::ZERO, Duration::MAX], milliseconds(&[5])]).expect("whole");
        times.write(&path).expect("there is space");
        assert_eq!(RecordedTimes::read(&path).expect("was written"), times);
        for (text, part) in [
            ("", "EOF"),
            ("10ms", "expected"),
            ("{\"format\":1}", "computing_ns"),
            ("{\"format\":2,\"computing_ns\":[[1]]}", "format 2"),
            ("{\"format\":1,\"computing_ns\":[]}", "no rank"),
            ("{\"format\":1,\"computing_ns\":[[1],[]]}", "no step"),
            ("{\"format\":1,\"computing_ns\":[[5,0]]}", "0 ns of rank 0 in step 1"),
            ("{\"format\":1,\"computing_ns\":[[3600000000001]]}", "not 1 to 3600000000000"),
            ("{\"format\":1,\"computing_ns\":[[-1]]}", "-1"),
            ("{\"format\":1,\"computing_ns\":[[1]],\"more\":1}", "more"),
        ] {
            fs::write(&path, text).expect("there is space");
            let error = RecordedTimes::read(&path).expect_err(text);
            assert!(matches!(error, RecordError::Form { .. }) && error.to_string().contains(part), "{error}");
        }
        fs::remove_dir_all(&folder).expect("is there");
        assert!(matches!(RecordedTimes::read(&path), Err(RecordError::Io { .. })));
        assert!(matches!(times.write(&path), Err(RecordError::Io { .. })));
    }
}
