//! The device contract: what every backend does, and what everything above may rely on.
//!
//! A device is one rank's end of a fabric. It registers memory, connects to peers, and carries
//! one-sided transfers. It never blocks, never reads a clock, and does nothing unless it is polled
//! (except that a watcher may signal a loss or answer a message). **The contract**, each line one
//! test of the conformance suite, run against every backend, and once more through mappings where
//! it maps:
//!
//! 1. The bytes of a put are visible when its signal is, to whoever saw the signal. Payload bytes
//!    are never polled.
//! 2. Two transfers are never ordered, not even by their ends. The only order is put → its signal →
//!    what is submitted because of it. However a put is split, it gives one signal.
//! 3. Every accepted transfer ends exactly once: `submit` says that it has ended
//!    ([`Submitted::Ended`]), or, while the device is polled, one `Done` comes, also after loss.
//! 4. `PeerLost` comes once; then all transfers to that peer fail with its cause and submits are
//!    refused with its kind. A peer that said goodbye (`Left`) is not lost; what it had sent before
//!    arrives first. The messages of a peer that have come to this host are given to the responder
//!    before its loss is.
//! 5. `QueueFull` is back-pressure and leaves no trace; polling always makes room again.
//! 6. The end of a put means that its source may be reused, nothing more; of a get, that the bytes
//!    are here.
//! 7. A transfer in flight holds its slice; a region is deregistered when its last handle is
//!    dropped.
//! 8. Zero-length, one-byte, unaligned and maximum-length transfers work. A forged, stale or
//!    out-of-range remote slice changes no byte that its owner can read and harms no other pair;
//!    a fabric that checks keys ends that transfer with an error, others may lose the pair.
//! 9. Fence: after `Severed { peer }` that peer changes no byte of local memory, whether it runs,
//!    is stopped, or is continued later. It also ends this rank's transfers to it
//!    ([`TransferError::Severed`]).
//! 10. Progress: a transfer needs both ends to be polled and nothing else; where
//!     [`Reach::passive`], the target need not be polled. Who submitted polls until
//!     [`Device::flush`] is true.
//! 11. After [`Device::arm`] returned a wake source, no event can come and no signal slot can
//!     change without waking it. Signal slots may have changed until then, also by `arm` itself:
//!     who sleeps looks at them between arming and waiting ([`crate::sleep`]).
//! 12. Lines 1, 8 and 9 hold for accesses through a mapping ([`Device::map`]).
//! 13. [`Device::info`] says the same as long as the device lives, and both ends of a pair are
//!     reached alike. What [`Device::exchange_processors`] shows is a hint; nothing stands on it.

mod error;

use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

pub(crate) use self::error::files_allowed;
pub use self::error::{
    BackendError, ConnectError, LossCause, LossKind, MapError, PostError, ProtocolViolation, RegisterError,
    SubmitError, TransferError,
};
use crate::Rank;
use crate::auth::Secret;
use crate::clock::Nanos;
use crate::memory::Memory;
use crate::region::{Mapped, Region, Registry, RemoteSlice, Slice};
use crate::signals::{Inline, Signal, Signals};

/// Longest control message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 4096;

/// Names a transfer to its submitter, who chooses it; comes back in [`Event::Done`]. Need not be
/// unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// Where a put's bytes come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Registered memory, not to be changed until `Done`.
    Slice(Slice),
    /// These bytes, copied by submit.
    Inline(Inline),
}

impl Source {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Slice(slice) => slice.len(),
            Self::Inline(inline) => inline.len(),
        }
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A one-sided operation on a peer's memory. A signal alone is none: [`Device::signal`].
#[derive(Clone, Debug)]
pub enum Transfer {
    /// Writes `src` to the peer's `dst` (equal lengths), then shows the signal there.
    Put {
        /// What to write.
        src: Source,
        /// Where to write it.
        dst: RemoteSlice,
        /// What to show the peer when the bytes are visible to it.
        signal: Option<Signal>,
    },
    /// Reads the peer's `src` into `dst` (equal lengths).
    Get {
        /// What to read.
        src: RemoteSlice,
        /// Where to.
        dst: Slice,
    },
    /// An operation on an aligned 64-bit word (native byte order) of the peer, atomic among such
    /// operations. The old value comes with `Done`.
    Atomic {
        /// The word; its length is 8 and its address a multiple of 8.
        word: RemoteSlice,
        /// What to do with it.
        op: AtomicOp,
    },
}

impl Transfer {
    /// For backends: what can be seen to be wrong before anything is done. Regions must be of this
    /// registry.
    #[inline(always)] // One caller a backend, on the way of every transfer.
    pub(crate) fn check(&self, registry: &Arc<dyn Registry>, bytes_max: u64) -> Result<(), SubmitError> {
        let (local, source_bytes, destination_bytes) = match self {
            Self::Put { src: Source::Slice(slice), dst, .. } => (Some(slice), slice.len() as u64, dst.len),
            Self::Put { src: Source::Inline(inline), dst, .. } => (None, inline.len() as u64, dst.len),
            Self::Get { src, dst } => (Some(dst), src.len, dst.len() as u64),
            Self::Atomic { word, .. } if word.len != 8 || !word.offset.is_multiple_of(8) => {
                return Err(SubmitError::MisalignedWord);
            }
            Self::Atomic { .. } => (None, 8, 8),
        };
        if local.is_some_and(|slice| !slice.region().belongs_to(registry)) {
            return Err(SubmitError::ForeignRegion);
        }
        if source_bytes != destination_bytes {
            return Err(SubmitError::Lengths { source_bytes, destination_bytes });
        }
        if source_bytes > bytes_max {
            return Err(SubmitError::TooLong { bytes: source_bytes, max: bytes_max });
        }
        Ok(())
    }
}

/// What an atomic transfer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds, wrapping.
    Add(u64),
    /// Stores `new` where the word equals `expected`.
    CompareSwap {
        /// The value it must have.
        expected: u64,
        /// The value it then gets.
        new: u64,
    },
}

/// What became of a transfer that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It has ended well, no `Done` will come. The value is an atomic's old value, zero otherwise.
    Ended(u64),
    /// [`Event::Done`] with its name will come.
    UnderWay,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Transfers to and from this peer are possible.
    Connected {
        /// Who.
        peer: Rank,
    },
    /// A transfer ended. The value is an atomic's old value, zero otherwise.
    Done {
        /// As given to submit.
        id: TransferId,
        /// How it ended.
        result: Result<u64, TransferError>,
    },
    /// The peer is gone without goodbye. Once a peer, and also instead of `Connected`.
    PeerLost {
        /// Who.
        peer: Rank,
        /// How it was found out.
        cause: LossCause,
    },
    /// The peer said goodbye. Once; not a failure.
    Left {
        /// Who.
        peer: Rank,
    },
    /// The fence asked for by [`Device::sever`] holds.
    Severed {
        /// Who.
        peer: Rank,
    },
}

/// Where a device listens: text that its peers' `connect` understands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address(pub String);

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// What a device is and can do. Fixed when the device is made.
#[derive(Clone)]
pub struct DeviceInfo {
    /// This rank.
    pub rank: Rank,
    /// Where it listens; peers connect to it.
    pub address: Address,
    /// Its name: `sim`, `shm`, `tcp`, `shm+tcp`, `verbs`, `shm+verbs`.
    pub fabric: &'static str,
    /// Whether any host memory can be registered, at the cost of a table entry: then slices that a
    /// caller lends for one operation are registered for its duration instead of being staged.
    pub registers_freely: bool,
    /// Signal slots a rank keeps for each peer.
    pub signal_slots: usize,
    /// Longest transfer, in bytes.
    pub transfer_bytes_max: u64,
    /// How it reaches each rank, by rank. The entry of this rank says nothing.
    pub reach: Vec<Reach>,
    /// Wakes its wake source, from any thread.
    pub waker: Arc<dyn Wake>,
}

impl fmt::Debug for DeviceInfo {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceInfo({} of rank {} at {})", self.fabric, self.rank, self.address)
    }
}

/// How a device reaches one peer. The same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The fabric that joins the two: that of [`DeviceInfo`], or the one of several that it takes
    /// for this peer.
    pub fabric: &'static str,
    /// Whether [`Device::map`] works.
    pub maps: bool,
    /// Whether a transfer ends without its target being polled.
    pub passive: bool,
    /// Transfers under way to the peer before `QueueFull`.
    pub queue_depth: usize,
}

/// What to sleep on after [`Device::arm`]. Sleeping ends at the latest when the time is up; it may
/// end for no reason.
#[derive(Clone)]
pub enum WakeSource {
    /// A futex word (possibly shared with other processes): sleep while it holds `seen`.
    Word {
        /// Keeps the word.
        word: Arc<dyn AsRef<AtomicU32> + Send + Sync>,
        /// What it held when armed.
        seen: u32,
    },
    /// A file descriptor: sleep until it is readable. Polling the device makes it unreadable again.
    File(Arc<OwnedFd>),
}

impl fmt::Debug for WakeSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Word { .. } => "Wake source::Word",
            Self::File(_) => "Wake source::File",
        })
    }
}

impl WakeSource {
    /// Sleeps until it is woken, `limit` has passed, or an OS signal comes.
    pub fn wait(&self, limit: Duration) {
        let limit = rustix::time::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // Every way of returning (woken, time up, interrupted, value changed) means: look again.
        match self {
            Self::Word { word, seen } => {
                let _ = rustix::thread::futex::wait(
                    (**word).as_ref(),
                    rustix::thread::futex::Flags::empty(),
                    *seen,
                    Some(&limit),
                );
            }
            Self::File(file) => {
                let mut poll =
                    [rustix::event::PollFd::from_borrowed_fd(file.as_fd(), rustix::event::PollFlags::IN)];
                let _ = rustix::event::poll(&mut poll, Some(&limit));
            }
        }
    }
}

/// A wake source that was armed: see [`Device::arm`].
#[derive(Clone, Debug)]
pub struct Armed {
    /// What to sleep on.
    pub wake_source: WakeSource,
    /// When to poll at the latest even if it does not wake.
    pub until: Option<Nanos>,
}

impl Armed {
    /// Sleeps until it is woken, the device wants to be polled, `limit` has passed, or a
    /// signal comes.
    pub fn wait(&self, now: Nanos, limit: Duration) {
        self.wake_source.wait(self.until.map_or(limit, |until| until.since(now).min(limit)));
    }
}

/// What [`Device::flush`] hands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Transfers.
    Transfers,
    /// And messages and goodbyes.
    All,
}

/// What becomes of a control message that finds a queue full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// [`PostError::QueueFull`].
    Ordinary,
    /// It is not lost: it has a place of its own at each peer, which it takes over from an urgent
    /// message that has not gone out yet. It may arrive after messages that were posted later.
    Urgent,
}

/// Wakes a device's wake source from any thread.
pub trait Wake: Send + Sync {
    /// Wakes who sleeps on the device's wake source, now or at its next attempt.
    fn wake(&self);
}

/// Answers control messages, on whichever thread reads them, also while nobody polls the device.
pub trait Responder: Send + Sync {
    /// A message from a peer arrived; returns the message to send back, if any. Must not block.
    /// Messages of one peer arrive in the order in which they were posted. The device's wake source
    /// is woken afterwards.
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>>;
    /// A peer was lost; called once, before `PeerLost` is polled, so that a loss is known while
    /// nobody polls.
    fn lost(&self, peer: Rank, cause: &LossCause);
}

/// What every device is made from.
#[derive(Clone)]
pub struct DeviceConfig {
    /// This rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world_size: u32,
    /// What peers must prove to know; see [`crate::auth`]. Fabrics over TCP take one always, `shm`
    /// also none: the kernel keeps other users away there.
    pub secret: Option<Secret>,
    /// Signal slots to keep for each peer, at most 65,536.
    pub signal_slots: usize,
    /// How long after `connect` a peer may take to be there.
    pub connect_timeout: Duration,
    /// Address or name of the network interface to listen on, where the fabric has some;
    /// [`Self::address`] when absent.
    pub interface: Option<String>,
    /// Address to listen on where no interface is named, and preferred among those of the one that
    /// is; loopback when absent.
    pub address: Option<IpAddr>,
    /// Answers control messages.
    pub responder: Arc<dyn Responder>,
}

/// One rank's end of a fabric. See the module for the contract.
///
/// # Safety
///
/// Who implements it keeps the contract, on which memory stands that callers lend. In particular: a
/// region is one of the memory that was registered; a mapping has the length that was asked for; a
/// slice is touched by its transfer alone, and not after the end of that; nothing is done with a
/// region that its owner did not ask for; and fence holds.
///
/// ```compile_fail,E0200
/// # use pleach_transport::*;
/// struct Own;
/// impl Device for Own {}
/// ```
#[allow(unsafe_code)]
pub unsafe trait Device: Send {
    /// What it is and can do. Line 13.
    fn info(&self) -> &DeviceInfo;

    /// Makes memory reachable for transfers. May pin and announce it; not for the data path. Memory
    /// that has a region here gets another region, or another handle of that one where registering
    /// is dear. Line 7.
    ///
    /// # Errors
    ///
    /// See [`RegisterError`].
    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError>;

    /// A peer's memory at an address here, where [`Reach::maps`]. Line 12.
    ///
    /// # Errors
    ///
    /// See [`MapError`].
    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError>;

    /// Starts to connect; `Connected` or `PeerLost` ends it. Both ends call it, in any order.
    /// Line 4.
    ///
    /// # Errors
    ///
    /// See [`ConnectError`].
    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError>;

    /// Starts to cut a peer off; `Severed` ends it, within a time bounded by this process's own
    /// work, whatever state the peer is in: not connected yet, lost, gone or severed before. A
    /// fabric that maps may take local regions away from all peers that it joins, and from those
    /// that RDMA joins; they keep their bytes and addresses. Line 9.
    fn sever(&mut self, peer: Rank);

    /// Starts a transfer, and ends it where that takes no waiting. Never blocks. Lines 2, 3, 5, 6
    /// and 8.
    ///
    /// # Errors
    ///
    /// See [`SubmitError`]; nothing has happened then.
    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError>;

    /// Starts a transfer that is only a signal, with no bytes but its payload. A signal counts and
    /// ends as every other transfer does. Lines 1, 2, 3 and 5.
    ///
    /// # Errors
    ///
    /// See [`SubmitError`]; nothing has happened then.
    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError>;

    /// The signal slots that this rank keeps for `peer`'s signals. Line 1.
    fn signal_slots(&self, peer: Rank) -> Signals;

    /// Sends a control message (at most [`MESSAGE_BYTES_MAX`] bytes) to the peer's [`Responder`].
    /// Not for data. Line 4.
    ///
    /// # Errors
    ///
    /// See [`PostError`].
    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError>;

    /// Makes progress and appends what happened, never more than fits `events` without growing it.
    /// Never blocks. Lines 3 and 10.
    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>);

    /// What to sleep on until something can happen; `None`: poll again, something may have happened
    /// already. To be called by way of [`crate::sleep::unless_news`], as signal slots may have
    /// changed since the last poll. Line 11.
    fn arm(&mut self) -> Option<Armed>;

    /// Tells the peers that can see it on which processor this rank waits, and calls `shown` with
    /// each of them and the processor on which it waited when it last said so, which may be long
    /// ago, or is a lie. A hint, cheap where nothing has changed; a device whose peers cannot see
    /// it does nothing. Line 13.
    fn exchange_processors(&mut self, _own: u32, _shown: &mut dyn FnMut(Rank, u32)) {}

    /// Says goodbye to every connected peer: what this rank ends from now on is no loss. Transfers
    /// submitted before are still carried out while the device is polled. Line 4.
    fn leave(&mut self);

    /// Hands on what was submitted, as far as that goes without waiting. True when the peers get
    /// all of it, and are woken by it, without another poll here: then this rank may go and do
    /// something else for as long as it likes. With [`Flush::All`] also when messages and goodbyes
    /// have gone out, so that dropping the device loses nothing. Line 10.
    fn flush(&mut self, what: Flush) -> bool;
}
