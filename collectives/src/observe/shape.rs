//! The shapes by which calls are counted.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use pleach_vocabulary::Collective;

/// A collective, the algorithm that carries it out, and how many bytes about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Of the three below; never zero.
    pub(super) key: u64,
    pub(super) collective: &'static str,
    pub(super) algorithm: Arc<str>,
    /// The power of two that these calls do not exceed, in bytes; zero where there are none.
    pub(super) bytes_max: u64,
    /// Of one call on this rank: its input or its output, whichever is longer.
    pub(super) bytes: u64,
}

impl Shape {
    /// Of calls that are not told apart any more.
    pub(super) fn others() -> Self {
        Self { key: 0, collective: "others", algorithm: "".into(), bytes_max: 0, bytes: 0 }
    }

    /// `bytes`: of one call on this rank, its input or its output, whichever is longer.
    pub(crate) fn new(collective: Collective, algorithm: &str, bytes: u64) -> Self {
        let bytes_max = if bytes == 0 { 0 } else { bytes.checked_next_power_of_two().unwrap_or(u64::MAX) };
        let mut hasher = DefaultHasher::new();
        (collective.name(), algorithm, bytes_max).hash(&mut hasher);
        Self {
            key: hasher.finish().max(1),
            collective: collective.name(),
            algorithm: algorithm.into(),
            bytes_max,
            bytes,
        }
    }
}
