//! Whole groups in one process and in virtual time: the real engine over the simulated device.
//!
//! A [`Scenario`] is everything that one simulation does, drawn from a seed; [`run`] carries it out
//! and checks it, with checkers that share no code with what they check (results against an oracle,
//! guard bytes, races by vector clocks, fence, liveness, causes of errors, release). A scenario
//! runs on a [`Cluster`].
//!
//! **Invariant:** a run is a function of the code and the scenario, so a seed that fails fails
//! again.

mod call;
mod cause;
mod cluster;
mod mutation;
mod oracle;
mod scenario;
mod slices;
mod time_bound;
mod trial;
mod watch;
pub mod wired;

pub use crate::compute::simulated::ComputeMutant;
pub use call::CallPlan;
pub use cluster::{Cluster, Member, NoProgress};
pub use scenario::{Abort, CALLS_MAX, DEPTH_MAX, Limits, Mismatch, RANKS_MAX, Scenario, TIMEOUT_FAR};
pub use trial::{ABORT_NOTICED_WITHIN, Checker, Failure, GRACE, MISMATCH_NOTICED_WITHIN, TrialReport, run};
