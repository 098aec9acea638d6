//! Moves bytes between registered memory regions.
//!
//! A remote machine is a device on a channel: [`Memory`] registered with a [`Device`] is a
//! [`Region`], a part of it a [`Slice`]; what a peer needs to name it is a [`RemoteSlice`]. A
//! [`Transfer`] is one-sided; a [`Notice`] tells the target that a put has landed, by adding one to
//! a *cell* ([`Cells`]).
//!
//! Read [`device`] first: it holds the contract. The backends are `sim` (one process, one seed,
//! virtual time, the harshest), `shm` (one host), `tcp` (anywhere) and `hybrid` (both of them, by
//! peer); each passes the same conformance suite.
//!
//! Nothing here reads a clock except [`clock`], and nothing here decides what to send: that is
//! `pleach-collectives`.

mod accepting;
pub mod auth;
pub mod cells;
pub mod clock;
mod control;
pub mod cuda;
pub mod device;
pub mod fork;
#[cfg(not(loom))]
pub mod hybrid;
pub mod last_resort;
pub mod memory;
#[cfg(test)]
mod other_user;
mod primitive;
#[cfg(not(loom))]
pub mod processors;
pub mod region;
// Makes devices, which have no place among loom's threads.
#[cfg(not(loom))]
pub mod rendezvous;
pub mod shm;
pub mod sim;
pub mod sleep;
pub mod tcp;
pub mod verbs;

pub use auth::Secret;
pub use cells::{CELL_PAYLOAD_BYTES, Cells, Inline, Notice};
pub use clock::Nanos;
pub use device::{
    Address, Armed, AtomicOp, BackendError, Bell, ConnectError, Device, DeviceConfig, DeviceInfo, Event,
    Flush, LossCause, LossKind, MESSAGE_BYTES_MAX, MapError, PostError, Reach, RegisterError, Responder,
    Ring, Source, SubmitError, Submitted, Transfer, TransferError, TransferId, Urgency,
};
pub use memory::{DmaBuf, HostMemory, Memory, Share, SharedMemory, Space};
pub use pleach_vocabulary::Rank;
pub use region::{LentSlice, Mapped, OutOfBounds, Region, RegionKey, Registry, RemoteSlice, Slice};
