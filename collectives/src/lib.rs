//! Groups of ranks that carry out proved schedules.
//!
//! A [`Group`] is what users hold. Behind it an [`engine`] carries out proofs of
//! `pleach-schedule` for one rank, over a device of `pleach-transport`, with the kernels of
//! [`compute`]. [`call`] says what a call is, [`observe`] what the engine does and who is late;
//! [`simulate`] runs whole groups in virtual time.
//!
//! **Invariant:** only what is proved is carried out, and the engine decides from its arguments
//! alone: it takes `now`, so that the same engine runs in groups and in the simulator.

pub mod call;
pub mod compute;
pub mod engine;
pub mod group;
pub mod observe;
pub mod reproducible;
pub mod simulate;

pub use compute::{F8E4M3, F8E5M2};
/// The half-width elements, as [`Buffer`] and slices hold them.
pub use half::{bf16, f16};

pub use group::{
    Batch, Buffer, CollectiveError, Data, DataMut, Element, GpuBatch, GpuBuffer, GpuPersistent, Group,
    GroupName, JoinGroupError, OnStream, Options, OwnedData, Pending, PendingError, Persistent, ProbeError,
    Progress, SetTopologyError, SplitError, Started,
};
pub use observe::{Observe, Report};
pub use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};
pub use reproducible::Reproducible;
