//! `shm`: ranks of one host, which map each other's memory.
//!
//! A region is a sealed memfd that every peer maps when it is announced. A transfer is a copy by
//! its submitter's processor. A signal is a store by the submitter into the target's signal slot
//! and, only if the target sleeps, a futex wake (`raise_signal` in `device.rs`). So the data path
//! is a few cache lines: no syscall, no lock, no allocation, and the target does nothing.
//!
//! The [control plane](crate::control) uses abstract Unix sockets, so no names can be left behind.
//! It sends files after both ends have proved the secret, and watches the peers' processes. Its
//! watcher thread publishes changes to the [`ShmDevice`] in a [table](peer_status), which the
//! poller reads when one flag is set.
//!
//! A region on a GPU is an allocation whose descriptor is sent like a memfd; a peer's driver
//! imports it at the first use. The GPU copies transfers from and to it, and their signals are
//! raised when the copy has ended ([`copies`]).
//!
//! **Invariants:** a peer's file is checked before it is mapped ([`mapping`]); a peer that is
//! stopped, killed or hostile cannot make this process wait or fault; after `Severed` no page of
//! this rank's memory that a peer may write is shared ([`fence`]).

// Loom builds contain only the parts that loom can check: the wake source, with the signal slots.
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod copies;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod device;
#[cfg(not(loom))]
mod directory;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod fence;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod link;
#[cfg(all(loom, test))]
mod loom_tests;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod mapping;
#[cfg(not(loom))]
mod message;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod page_detachment;
#[cfg(not(loom))]
mod peer_status;
#[cfg(not(loom))]
mod shared;
#[cfg(all(test, not(loom)))]
#[allow(unsafe_code)]
mod tests;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod transfer;
#[cfg_attr(loom, allow(dead_code, reason = "used by the device, which loom does not see"))]
mod wake_word;

#[cfg(not(loom))]
pub use device::{OpenError, ShmDevice};

/// Decodes bytes with every decoder of this fabric: for fuzzing.
///
/// # Panics
///
/// When a decoded value does not survive encoding and decoding.
#[cfg(not(loom))]
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    if let Ok(message) = message::RegionMessage::decode(bytes) {
        assert_eq!(message.encode(), bytes);
    }
}
