//! How many members a job has, and how patient they are.

use std::time::Duration;

/// How many members a job has, and how patient they are; the same on all.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Elastic {
    /// Steps are made by so many members or more.
    pub fewest: u32,
    /// Members at most.
    pub most: u32,
    /// After what silence a member is suspected: 2 s unless changed. It does not count while the
    /// observer itself did not run.
    pub suspect_after: Duration,
    /// How long members that are too few to make a step wait for others: 60 s unless changed.
    pub fewest_wait: Duration,
    /// How long members that are too few to agree on the next epoch wait for others: 20 s unless
    /// changed.
    pub quorum_wait: Duration,
    /// How often a step that cannot be ended is repeated by the same members: 3 times unless
    /// changed.
    pub retries_max: u32,
}

impl Elastic {
    /// Between `fewest` and `most` members.
    #[must_use]
    pub const fn between(fewest: u32, most: u32) -> Self {
        Self {
            fewest,
            most,
            suspect_after: Duration::from_secs(2),
            fewest_wait: Duration::from_secs(60),
            quorum_wait: Duration::from_secs(20),
            retries_max: 3,
        }
    }
}
