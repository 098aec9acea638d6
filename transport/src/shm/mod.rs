//! `shm`: ranks of one host, through memory that each maps of the other.
//!
//! A region is a sealed memfd that every peer maps when it is announced. A transfer is a copy by
//! its submitter's processor; a signal is a store into the target's signal slot and, only if the
//! target sleeps, a futex wake. So the data path is a few cache lines: no syscall, no lock, no
//! allocation, and the target does nothing.
//!
//! Files are handed over on an abstract Unix socket after both ends have proved the secret, so
//! there are no names that could be left behind. A [`watcher`] thread sleeps on those sockets and
//! on the peers' processes; it tells the [`ShmDevice`] what changed over a [`board`] that the
//! poller looks at when one flag says so.
//!
//! A region on a GPU is an allocation whose descriptor is handed over like a memfd, and which a
//! peer's driver imports when it is first wanted; transfers from and to it are copies by the GPU,
//! whose signals are shown when it is through ([`copies`]).
//!
//! **Invariants:** nothing that a peer passes is mapped before it was checked ([`mapping`]);
//! nothing that a peer does, stopped, killed or lying, makes this process wait or fault; after
//! `Severed` no page of this rank's memory is shared with anybody ([`fence`]).

// Under loom only what loom can look into: the wake source, with the signal slots.
#[cfg(not(loom))]
mod board;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod contract;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod copies;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod detached;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod device;
#[cfg(not(loom))]
mod directory;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod fence;
#[cfg(not(loom))]
mod frame;
#[cfg(not(loom))]
mod handshake;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod link;
#[cfg(all(loom, test))]
mod loom_tests;
#[cfg(not(loom))]
#[allow(unsafe_code)]
mod mapping;
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
mod watcher;

#[cfg(not(loom))]
pub use device::{OpenError, ShmDevice};

/// Gives bytes to every decoder of what peers say on this fabric: for fuzzing.
///
/// # Panics
///
/// When what was decoded does not survive being encoded and decoded again.
#[cfg(not(loom))]
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    if let Ok(frame) = frame::decode(bytes) {
        assert_eq!(frame.encode(), bytes);
    }
}
