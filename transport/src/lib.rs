//! Moves bytes between registered memory regions.
//!
//! A remote machine is a device on a channel: [`Memory`] registered with a [`Device`] is a
//! [`Region`], a part of it a [`Slice`]; what a peer needs to name it is a [`RemoteSlice`]. A
//! [`Transfer`] is one-sided; a [`Signal`] tells the target that a put has landed, by adding one to
//! a *signal slot* ([`Signals`]).
//!
//! Read [`device`] first: it holds the contract. The backends are `sim` (one process, one seed,
//! virtual time, the harshest), `shm` (one host), `tcp` (anywhere), `verbs` (RDMA) and `hybrid`
//! (`shm` to ranks of this host, `tcp` or `verbs` to others). Each passes the same conformance
//! suite.
//!
//! [`metrics_server`] answers whoever asks for metrics, of groups and of tensor exchanges.
//!
//! Nothing here reads a clock except [`clock`], and nothing here decides what to send: that is
//! `pleach-collectives`.

#[doc(hidden)]
pub mod accepting;
#[doc(hidden)]
pub mod auth;
#[doc(hidden)]
pub mod clock;
mod control;
#[doc(hidden)]
pub mod cuda;
#[doc(hidden)]
pub mod device;
#[cfg_attr(loom, allow(dead_code, reason = "used by devices, which loom does not see"))]
mod drain;
#[doc(hidden)]
pub mod fork;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod hybrid;
#[doc(hidden)]
pub mod last_resort;
#[doc(hidden)]
pub mod memory;
#[doc(hidden)]
pub mod metrics_server;
#[doc(hidden)]
pub mod mutex;
#[cfg(test)]
mod other_user;
#[cfg(all(test, feature = "etcd", not(loom)))]
#[path = "../../tests/outside_stores/mod.rs"]
mod outside_stores;
#[cfg(all(test, not(loom)))]
#[path = "../../tests/ports/mod.rs"]
mod ports;
mod primitive;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod processors;
#[doc(hidden)]
pub mod region;
#[doc(hidden)]
pub mod signals;
#[cfg(test)]
#[path = "../../tests/skipped/mod.rs"]
mod skipped;
// Makes devices, which have no place among loom's threads.
#[cfg(not(loom))]
#[doc(hidden)]
pub mod rendezvous;
#[doc(hidden)]
pub mod shm;
#[doc(hidden)]
pub mod sim;
mod slab;
#[doc(hidden)]
pub mod sleep;
#[doc(hidden)]
pub mod tcp;
#[doc(hidden)]
pub mod tls;
#[doc(hidden)]
pub mod verbs;
#[doc(hidden)]
pub mod wire;
#[cfg(not(loom))]
#[doc(hidden)]
pub mod witness;

pub use auth::Secret;
pub use clock::Nanos;
#[doc(hidden)]
pub use control::{host_identity, listening_address, listening_address_of, tune_stream};
pub use device::{
    Address, Armed, AtomicOp, BackendError, ConnectError, DRAINS_MAX, Device, DeviceConfig, DeviceInfo,
    Event, Flush, Incarnation, LossCause, LossKind, MESSAGE_BYTES_MAX, MapError, Meeting, PostError, Reach,
    RegisterError, Relay, Responder, SetupCounts, Source, SubmitError, Submitted, Transfer, TransferError,
    TransferId, Urgency, Wake, WakeSource,
};
pub use memory::{DmaBuf, HostMemory, Memory, Share, SharedMemory, Space};
pub use pleach_vocabulary::Rank;
pub use region::{
    LentSlice, Mapped, OutOfBounds, ReadOnlyMapped, Region, RegionKey, Registry, RemoteSlice, Slice,
};
pub use signals::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES, Signal, Signals};
