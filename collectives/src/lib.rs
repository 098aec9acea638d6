//! Groups of ranks that carry out proved schedules.
//!
//! A [`Group`] is what users hold. Behind it an [`engine`] carries out proofs of
//! `pleach-schedule` for one rank, over a device of `pleach-transport`, with the kernels of
//! [`compute`]. [`call`] says what a call is, [`observe`] what the engine does and who is late;
//! [`simulate`] runs whole groups in virtual time.
//!
//! **Invariant:** only what is proved is carried out, and the engine decides from its arguments
//! alone: it takes `now`, so that the same engine runs in groups and in the simulator.

// Under loom there is only what is tested in all interleavings.
#[cfg(loom)]
#[path = "partial/contributions.rs"]
#[allow(dead_code, reason = "used by rounds, which loom does not see")]
mod contributions;
#[cfg(loom)]
#[path = "partial/handover.rs"]
mod handover;
#[cfg(loom)]
#[path = "window/version_line.rs"]
mod version_line;

#[cfg(not(loom))]
#[doc(hidden)]
pub mod call;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod compute;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod engine;
#[cfg(not(loom))]
mod exact;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod group;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod observe;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod partial;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod reproducible;
#[cfg(not(loom))]
pub mod session;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod simulate;
#[cfg(all(test, not(loom)))]
#[path = "../../tests/skipped/mod.rs"]
mod skipped;
// As `tests/ranks` calls this crate, which is a module of a test here.
#[cfg(all(test, not(loom)))]
extern crate self as pleach_collectives;
#[cfg(all(test, not(loom)))]
#[path = "../tests/ranks/mod.rs"]
mod ranks;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod window;

#[cfg(not(loom))]
pub use compute::{F8E4M3, F8E5M2};
/// The half-width elements, as [`Buffer`] and slices hold them.
#[cfg(not(loom))]
pub use half::{bf16, f16};

#[cfg(not(loom))]
pub use group::{
    Arrival, Batch, BorrowedData, Buffer, CollectiveError, Connect, Data, DataMut, Element, GpuBuffer,
    GpuMemory, Group, GroupInfo, GroupName, HostMemory, JoinGroupError, NotExact, Operation, Options,
    OwnedData, Partial, PartialError, Pending, PendingError, PendingRead, Persistent, ProbeError, Progress,
    RawData, RawPair, RawPartial, RawRound, Registered, Round, SetTopologyError, SplitError, Started, Window,
    WindowError,
};
#[cfg(not(loom))]
pub use observe::{HistogramMetric, Metric, MetricKind, Observe, Report};
#[cfg(not(loom))]
pub use pleach_schedule::{GridLine, RankSpace, SpaceError};
#[cfg(not(loom))]
pub use pleach_vocabulary::{Collective, DataType, Factor, Parts, Rank, ReduceOp, UnknownName};
#[cfg(not(loom))]
pub use reproducible::Reproducible;
#[cfg(not(loom))]
pub use session::{Change, Elastic, GpuState, Session, SessionError, State, Verdict};
#[cfg(not(loom))]
pub use window::Word;
