//! What one process tells all others about its links and its plans.

use std::collections::BTreeSet;

use crate::Process;

/// Whom a process reaches, and what it wants. Of two views of one process the higher version
/// counts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Whose view it is.
    pub process: Process,
    /// Counts up with each change.
    pub version: u64,
    /// The newest epoch that the process knows; `None`: it waits to join.
    pub epoch: Option<u64>,
    /// Whether it wants to leave at the end of the step.
    pub leaves: bool,
    /// Whether its step failed in this epoch.
    pub failed: bool,
    /// The members that it does not reach or does not hear.
    pub unreached: BTreeSet<Process>,
    /// The processes that wait to join and that it reaches; for one that waits, the members too.
    pub reached: BTreeSet<Process>,
}

impl View {
    pub(crate) fn new(process: Process) -> Self {
        let (unreached, reached) = (BTreeSet::new(), BTreeSet::new());
        Self { process, version: 0, epoch: None, leaves: false, failed: false, unreached, reached }
    }
}
