//! `--compute`: how long simulated ranks compute, drawn or as real ranks did; and `--record`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pleach::{CollectiveError, Group};
use pleach_training::simulation::{Computing, RecordError, RecordedTimes};

use crate::cli::CommandError;

/// Where computing times come from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ComputingSource {
    Drawn(Computing),
    /// What `--record` wrote.
    File(PathBuf),
}

impl ComputingSource {
    /// The distribution, or the default one behind recorded times.
    pub(crate) fn drawn(&self) -> Computing {
        match self {
            Self::Drawn(computing) => *computing,
            Self::File(_) => Computing::default(),
        }
    }

    /// The times of a file.
    pub(crate) fn recorded(&self) -> Result<Option<Arc<RecordedTimes>>, RecordError> {
        match self {
            Self::Drawn(_) => Ok(None),
            Self::File(path) => RecordedTimes::read(path).map(|times| Some(Arc::new(times))),
        }
    }
}

impl FromStr for ComputingSource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(computing) => Ok(Self::Drawn(computing)),
            Err(_) if Path::new(text).exists() => Ok(Self::File(PathBuf::from(text))),
            Err(error) => Err(format!("{error}, or a file that was given by --record")),
        }
    }
}

impl fmt::Display for ComputingSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drawn(computing) => computing.fmt(formatter),
            Self::File(path) => write!(formatter, "as in {}", path.display()),
        }
    }
}

/// Writes the computing times of all ranks, which made as many steps as each other, on rank 0.
pub(crate) fn record(group: &Group, own: &[Duration], path: &Path) -> Result<(), CommandError> {
    let own: Vec<u64> = own.iter().map(|time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)).collect();
    let mut all = vec![0_u64; own.len() * group.world_size() as usize];
    let gathered: Result<(), CollectiveError> = group.all_gather(&own, &mut all);
    gathered.map_err(CommandError::failed)?;
    if group.rank() != 0 {
        return Ok(());
    }
    let times = |times: &[u64]| times.iter().copied().map(Duration::from_nanos).collect();
    let ranks = all.chunks(own.len().max(1)).map(times).collect();
    let times = RecordedTimes::new(ranks).ok_or_else(|| {
        CommandError::failed(format!("nothing to record in {}: no rank made a step", path.display()))
    })?;
    times.write(path).map_err(CommandError::failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_distribution_or_a_file_that_is_there() {
        let drawn: ComputingSource = "10ms,cv=0.2".parse().expect("is a text");
        assert_eq!(
            (drawn.to_string().as_str(), drawn.recorded().is_ok_and(|none| none.is_none())),
            ("10ms,cv=0.2", true)
        );
        let file: ComputingSource = "Cargo.toml".parse().expect("is there");
        assert!(file.recorded().expect_err("has no times").to_string().contains("--record"));
        assert_eq!(file.to_string(), "as in Cargo.toml");
        let error = "10ms,cv=x".parse::<ComputingSource>().expect_err("is neither");
        assert!(error.contains("cv=x") && error.contains("--record"), "{error}");
    }
}
