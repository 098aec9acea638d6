//! Groups of ranks that carry out proved schedules.
//!
//! A [`Group`] is what users hold. Behind it an [`engine`] carries out proofs of
//! `pleach-schedule` for one rank, over a device of `pleach-transport`, with the kernels of
//! [`compute`]. [`call`] says what a call is, [`observe`] what the engine does and who is late;
//! [`simulate`] runs whole groups in virtual time.
//!
//! **Invariant:** only what is proved is carried out, and the engine decides from its arguments
//! alone: it takes `now`, so that the same engine runs in groups and in the simulator.

#[doc(hidden)]
pub mod call;
#[doc(hidden)]
pub mod compute;
#[doc(hidden)]
pub mod engine;
#[doc(hidden)]
pub mod group;
#[doc(hidden)]
pub mod observe;
#[doc(hidden)]
pub mod reproducible;
#[doc(hidden)]
pub mod simulate;
#[cfg(test)]
#[path = "../../tests/skipped/mod.rs"]
mod skipped;

pub use compute::{F8E4M3, F8E5M2};
/// The half-width elements, as [`Buffer`] and slices hold them.
pub use half::{bf16, f16};

pub use group::{
    Batch, BorrowedData, Buffer, CollectiveError, Data, DataMut, Element, GpuBuffer, Group, GroupInfo,
    GroupName, JoinGroupError, NotExact, Operation, Options, OwnedData, Pending, PendingError, Persistent,
    ProbeError, Progress, RawData, RawPair, Registered, SetTopologyError, SplitError, Started,
};
pub use observe::{Observe, Report};
pub use pleach_vocabulary::{Collective, DataType, Factor, Parts, Rank, ReduceOp, UnknownName};
pub use reproducible::Reproducible;
