//! The device contract: the guarantees of every backend, on which all other crates rely.
//!
//! A device is one rank's end of a fabric. It registers memory, connects to peers, and carries out
//! one-sided transfers. It never blocks, never reads a clock, and makes progress only when it is
//! polled (but a watcher may report a loss or answer a message). **The contract**: each line has a
//! test of the conformance suite, which runs against every backend, and once more through mappings
//! where a backend maps:
//!
//! 1. The bytes of a put are visible to every thread that sees its signal. Payload bytes are never
//!    polled.
//! 2. Two transfers are never ordered, nor are their ends. The only order is: put, its signal,
//!    transfers submitted because of the signal. A put that is split gives one signal.
//! 3. Every accepted transfer ends exactly once: `submit` returns that it has ended
//!    ([`Submitted::Ended`]), or one `Done` comes while the device is polled, also after a loss.
//! 4. `PeerLost` comes once; then all transfers to that peer fail with its cause and submits are
//!    refused with its kind. A peer that departed with a bye (`Departed`) is not lost; all that it
//!    sent before arrives first. Messages of a peer that have reached this host are given to the
//!    responder before the loss is. The responder may send to any connected peer because of a
//!    message or a loss ([`Relay`]), and that goes out while nobody polls.
//! 5. `QueueFull` is back-pressure and has no effect; polling always makes room again.
//! 6. The end of a put means that its source may be reused, nothing more. The end of a get means
//!    that its bytes are here.
//! 7. A transfer in flight holds its slice; a region is deregistered when its last handle is
//!    dropped.
//! 8. Zero-length, one-byte, unaligned and maximum-length transfers work. A forged, stale or
//!    out-of-range remote slice changes no byte that its owner can read and harms no other pair;
//!    a fabric that checks keys ends that transfer with an error, others may lose the pair.
//! 9. Fence: after `Severed { peer }` that peer changes no byte of local memory, whether it runs,
//!    is stopped, or is continued later. It also ends this rank's transfers to it
//!    ([`TransferError::Severed`]).
//! 10. Progress: a transfer needs polls at both ends and nothing else; with [`Reach::passive`] the
//!     target need not poll. The submitter polls until [`Device::flush`] returns true.
//! 11. After [`Device::arm`] returned a wake source, no event can come and no signal slot can
//!     change without waking it. Signal slots may have changed until then, also by `arm` itself: a
//!     sleeper checks them between arming and waiting ([`crate::sleep`]).
//! 12. Lines 1, 8 and 9 hold for accesses through a mapping ([`Device::map`]).
//! 13. [`Device::info`] does not change during the device's life, but for the [`Reach`] of a rank
//!     that [`Device::connect`] gives to a process of another host. Both ends of a pair have the
//!     same [`Reach`]. The processors of [`Device::exchange_processors`] are a hint only.
//! 14. Memory that peers may not write ([`Memory::peers_may_write`]) is *lent*: gets and
//!     [`Device::map_read_only`] reach it. A put or an atomic into it ends as one with a bad key
//!     does (line 8), and [`Device::map`] refuses it. Severing takes it from no peer: its key stays
//!     good for the others, and the severed peer may go on reading what it has mapped.
//! 15. Severing one peer takes nothing from other pairs, whatever they have under way, but memory
//!     that the severed peer could write as well, and that only on a fabric that maps while the
//!     peer's process has not ended. Memory that was registered for one peer alone
//!     ([`Device::register_for`]) has a bad key for all others (line 8).
//! 16. A rank is free again when `Departed`, `PeerLost` or `Severed` of its peer was polled. From
//!     then on [`Device::connect`] gives it to another process, an [`Incarnation`], and touches no
//!     other pair. Nothing late of the former process is taken for its successor's: no signal,
//!     message, end or loss. The successor finds new signal slots. The former process's keys, and
//!     those of memory that was registered for it alone, are bad for the successor (line 8). The
//!     device knows the last 256 processes that had a rank, and gives it to none of them again.
//!     Severing a rank severs every process that has had it (line 9).
//! 17. Drain: the n-th `Drained { peer }` comes once, after the n-th [`Device::drain`] at both ends
//!     of the pair, counted from its `Connected`. By then all transfers and signals that the peer
//!     had submitted before its n-th drain have landed here or never will, however they ended, and
//!     none of them reads memory here any more. This rank's transfers from before its n-th drain
//!     have ended, and their `Done` came first. The pair goes on: later transfers work as before,
//!     and no `Drained` waits for them or speaks of them. No `Drained` comes while the peer does
//!     not drain. None comes after the pair has ended: `PeerLost`, `Departed` or `Severed` comes in
//!     its place. Accesses through mappings are the callers' own, who end them before they drain.

mod error;

use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

pub use self::error::{
    BackendError, ConnectError, LossCause, LossKind, MapError, PostError, ProtocolViolation, RegisterError,
    SubmitError, TransferError,
};
pub(crate) use self::error::{awaits_end, check_only, files_allowed};
use crate::Rank;
use crate::auth::{Secret, random_bytes};
use crate::clock::Nanos;
use crate::memory::Memory;
use crate::region::{Mapped, ReadOnlyMapped, Region, Registry, RemoteSlice, Slice};
use crate::signals::{Inline, Signal, Signals};
pub use crate::tls::{Protection, TlsFault};

/// Longest control message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 4096;

/// Drains of a pair at one end that wait for their `Drained` at most.
pub const DRAINS_MAX: u64 = 64;

/// Names a transfer to its submitter, who chooses it; returned in [`Event::Done`]. Need not be
/// unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferId(pub u64);

/// The source of a put.
#[derive(Clone, Debug)]
pub enum Source {
    /// Registered memory, which must not change until `Done`.
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

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A one-sided operation on a peer's memory. [`Device::signal`] sends a signal without data.
#[derive(Clone, Debug)]
pub enum Transfer {
    /// Writes `src` to the peer's `dst` (equal lengths), then raises the signal there.
    Put {
        /// The source.
        src: Source,
        /// The destination.
        dst: RemoteSlice,
        /// The signal to raise when the bytes are visible to the peer.
        signal: Option<Signal>,
    },
    /// Reads the peer's `src` into `dst` (equal lengths).
    Get {
        /// The source.
        src: RemoteSlice,
        /// The destination.
        dst: Slice,
    },
    /// An operation on an aligned 64-bit word (native byte order) of the peer, atomic among such
    /// operations. The old value comes with `Done`.
    Atomic {
        /// The word; its length is 8 and its address a multiple of 8.
        word: RemoteSlice,
        /// The operation.
        op: AtomicOp,
    },
}

impl Transfer {
    /// For backends: the checks before anything is done. Regions must belong to `registry`.
    #[inline(always)] // One caller a backend, in every transfer.
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

/// An atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds, wrapping.
    Add(u64),
    /// Stores `new` if the word equals `expected`.
    CompareSwap {
        /// The expected value.
        expected: u64,
        /// The new value.
        new: u64,
    },
}

/// The state of a transfer that was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It has ended with success; no `Done` will come. The value is an atomic's old value, else
    /// zero.
    Ended(u64),
    /// [`Event::Done`] with its id will come.
    UnderWay,
}

/// An event of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Transfers to and from this peer are possible.
    Connected {
        /// The peer.
        peer: Rank,
    },
    /// A transfer ended. The value is an atomic's old value, else zero.
    Done {
        /// The id that was given to submit.
        id: TransferId,
        /// The result.
        result: Result<u64, TransferError>,
    },
    /// The peer is gone without a bye. Once a peer; it may come in place of `Connected`.
    PeerLost {
        /// The peer.
        peer: Rank,
        /// The cause.
        cause: LossCause,
    },
    /// The peer departed with a bye. Once; not a failure.
    Departed {
        /// The peer.
        peer: Rank,
    },
    /// The fence that [`Device::sever`] asked for holds.
    Severed {
        /// The peer.
        peer: Rank,
    },
    /// Both ends have drained the pair: all that the peer had submitted before has landed or never
    /// will. Once for each [`Device::drain`].
    Drained {
        /// The peer.
        peer: Rank,
    },
}

/// A device's address, as text for the `connect` of its peers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address(pub String);

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// What tells a device from all others that have, had or will have its rank: 64 random bits, drawn
/// when the device is made.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Incarnation(pub u64);

impl Incarnation {
    /// Another one than any before.
    pub(crate) fn fresh() -> Self {
        Self(u64::from_ne_bytes(random_bytes()))
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

/// How a device meets one of another world ([`Device::meet`]). One end dials, the other awaits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meeting<'a> {
    /// This device dials.
    Dial {
        /// The peer's address.
        address: &'a Address,
        /// The rank that the peer gives to this device.
        own: Rank,
    },
    /// The peer dials, at the address of this device.
    Await,
}

/// Counts of a device's set-up work, exact. Any thread reads them, at any time.
#[derive(Debug, Default)]
pub struct SetupCounts {
    registered: AtomicU64,
    connected: AtomicU64,
}

impl SetupCounts {
    /// How often memory was made accessible to peers. Another handle of a region that exists counts
    /// nothing.
    #[must_use]
    pub fn registered(&self) -> u64 {
        // Relaxed, as in all of these: nothing else is read because of the number.
        self.registered.load(Ordering::Relaxed)
    }

    /// How many pairs were connected: the number of [`Event::Connected`] so far.
    #[must_use]
    pub fn connected(&self) -> u64 {
        self.connected.load(Ordering::Relaxed)
    }

    /// For backends: counts a registration.
    pub(crate) fn count_registered(&self) {
        self.registered.fetch_add(1, Ordering::Relaxed);
    }

    /// For backends: counts a connection.
    pub(crate) fn count_connected(&self) {
        self.connected.fetch_add(1, Ordering::Relaxed);
    }
}

/// The properties of a device. They never change, but for [`DeviceInfo::reach`].
#[derive(Clone)]
pub struct DeviceInfo {
    /// This rank.
    pub rank: Rank,
    /// The process that has the rank.
    pub incarnation: Incarnation,
    /// Its address; peers connect to it.
    pub address: Address,
    /// Its name: `sim`, `shm`, `tcp`, `shm+tcp`, `verbs`, `shm+verbs`.
    pub fabric: &'static str,
    /// Whether registering host memory costs only a table entry: then slices that a caller lends
    /// for one operation are registered for its duration instead of being staged.
    pub registers_freely: bool,
    /// Signal slots of a rank for each peer.
    pub signal_slots: usize,
    /// Longest transfer, in bytes.
    pub transfer_bytes_max: u64,
    /// How the device reaches each rank, by rank. The entry of this rank has no meaning. Over a
    /// hybrid fabric it depends on the host of the process: it is right from `connect` on, and
    /// before that where the device was told the host of the rank. Line 13.
    pub reach: Vec<Reach>,
    /// Wakes the device's wake source, from any thread.
    pub waker: Arc<dyn Wake>,
    /// Counts registrations and connections.
    pub setup: Arc<SetupCounts>,
}

impl fmt::Debug for DeviceInfo {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "DeviceInfo({} of rank {} at {})", self.fabric, self.rank, self.address)
    }
}

/// How a device reaches one peer. The same at both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// The fabric between the two: that of [`DeviceInfo`], or one of several for this peer.
    pub fabric: &'static str,
    /// Whether [`Device::map`] works.
    pub maps: bool,
    /// Whether a transfer ends without a poll of its target.
    pub passive: bool,
    /// Transfers under way to the peer before `QueueFull`.
    pub queue_depth: usize,
}

/// A wake source to sleep on after [`Device::arm`]. A sleep ends at the latest when its limit has
/// passed; it may end without a reason.
#[derive(Clone)]
pub enum WakeSource {
    /// A futex word (possibly shared with other processes): sleep while it holds `seen`.
    Word {
        /// Holds the word.
        word: Arc<dyn AsRef<AtomicU32> + Send + Sync>,
        /// Its value when armed.
        seen: u32,
    },
    /// A file descriptor: sleep until it is readable. Polling the device makes it unreadable again.
    File(Arc<OwnedFd>),
}

impl fmt::Debug for WakeSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Word { .. } => "WakeSource::Word",
            Self::File(_) => "WakeSource::File",
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
        // Every reason to return (woken, timeout, interruption, changed value) means: poll again.
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

/// An armed wake source: see [`Device::arm`].
#[derive(Clone, Debug)]
pub struct Armed {
    /// The wake source.
    pub wake_source: WakeSource,
    /// When to poll at the latest, even if nothing wakes.
    pub until: Option<Nanos>,
}

impl Armed {
    /// Sleeps until it is woken, the device must be polled, `limit` has passed, or an OS signal
    /// comes.
    pub fn wait(&self, now: Nanos, limit: Duration) {
        self.wake_source.wait(self.until.map_or(limit, |until| until.since(now).min(limit)));
    }
}

/// The scope of [`Device::flush`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Transfers.
    Transfers,
    /// Transfers, messages and byes.
    All,
}

/// The behaviour of a control message when a queue is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// [`PostError::QueueFull`].
    Ordinary,
    /// It is never refused: it has a slot of its own at each peer, and replaces an urgent message
    /// that was not sent yet. It may overtake messages, or be overtaken.
    Urgent,
}

impl Urgency {
    pub(crate) fn is_urgent(self) -> bool {
        self == Self::Urgent
    }
}

/// Wakes a device's wake source from any thread.
pub trait Wake: Send + Sync {
    /// Wakes a thread that sleeps on the device's wake source, now or at its next sleep.
    fn wake(&self);
}

/// Sends a control message to a peer, as [`Device::post`] does, from the thread that calls a
/// [`Responder`].
pub type Relay<'a> = dyn FnMut(Rank, &[u8], Urgency) -> Result<(), PostError> + 'a;

/// Answers control messages, on the thread that reads them, also while nobody polls the device.
pub trait Responder: Send + Sync {
    /// Handles a message of a peer; returns the answer, if any. Must not block. Messages of one
    /// peer arrive in the order of their posts. Afterwards the device's wake source is woken.
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>>;
    /// A peer was lost; called once, before `PeerLost` is polled, so that a loss is known while
    /// nobody polls.
    fn lost(&self, peer: Rank, cause: &LossCause);
    /// As [`Responder::message`], for a responder that sends messages to other peers because of
    /// this one. Devices call this method.
    fn message_relaying(&self, from: Rank, message: &[u8], _relay: &mut Relay<'_>) -> Option<Vec<u8>> {
        self.message(from, message)
    }
    /// As [`Responder::lost`], for a responder that sends messages to other peers because of the
    /// loss. Devices call this method.
    fn lost_relaying(&self, peer: Rank, cause: &LossCause, _relay: &mut Relay<'_>) {
        self.lost(peer, cause);
    }
}

/// For backends: what a device knows of the process that has a rank, or had it last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// The device was never asked to connect one.
    Nobody,
    /// It is to be connected.
    Connecting,
    /// It is connected.
    Connected,
    /// Its end was not polled yet.
    Ends,
    /// Its end was polled: the rank is free again.
    Gone,
}

impl Holder {
    /// Whether another process may get the rank now. False: it is connected or connecting, or the
    /// first one.
    pub(crate) fn is_succeeded(self, peer: Rank) -> Result<bool, ConnectError> {
        match self {
            Self::Nobody | Self::Connecting | Self::Connected => Ok(false),
            Self::Ends => Err(ConnectError::NotFree { peer }),
            Self::Gone => Ok(true),
        }
    }
}

/// The configuration of a device.
#[derive(Clone)]
pub struct DeviceConfig {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world_size: u32,
    /// The secret that peers must prove; see [`crate::auth`]. Fabrics over TCP require one. `shm`
    /// needs none: the kernel keeps other users out.
    pub secret: Option<Secret>,
    /// Signal slots for each peer, at most 65,536.
    pub signal_slots: usize,
    /// Time limit of a connect.
    pub connect_timeout: Duration,
    /// Address or name of the network interface to listen on, if the fabric has some;
    /// [`Self::address`] when absent.
    pub interface: Option<String>,
    /// Address to listen on if no interface is named, and preferred among those of a named one;
    /// loopback when absent.
    pub address: Option<IpAddr>,
    /// Answers control messages.
    pub responder: Arc<dyn Responder>,
}

/// One rank's end of a fabric. See the module for the contract.
///
/// # Safety
///
/// An implementation keeps the contract, because callers lend memory on its terms. In particular:
///
/// * The bytes of a region are those of the memory that was registered.
/// * A mapping has the requested length.
/// * Nothing but its transfer touches a slice, and the transfer does not touch it after its end.
/// * A region is used only as its owner asked.
/// * The fence holds.
///
/// ```compile_fail,E0200
/// # use pleach_transport::*;
/// struct Own;
/// impl Device for Own {}
/// ```
#[allow(unsafe_code)]
pub unsafe trait Device: Send {
    /// The properties of the device. Line 13.
    fn info(&self) -> &DeviceInfo;

    /// Makes memory accessible to transfers. May pin and announce it; not for the data path. Memory
    /// that has a region here gets another region, or another handle of that one if registering is
    /// expensive. Line 7.
    ///
    /// # Errors
    ///
    /// See [`RegisterError`].
    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError>;

    /// As [`Device::register`], for one peer alone, connected or not. A fabric that maps gives the
    /// memory to no other peer, so that severing others leaves it in place. When the rank is given
    /// to another process, peers have no access any more. Lines 15 and 16.
    ///
    /// # Errors
    ///
    /// See [`RegisterError`].
    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError>;

    /// Maps a peer's memory, if [`Reach::maps`]. Line 12.
    ///
    /// # Errors
    ///
    /// See [`MapError`].
    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError>;

    /// Maps a peer's memory to be read, if [`Reach::maps`]. Memory that peers may not write can be
    /// mapped too. Lines 12 and 14.
    ///
    /// # Errors
    ///
    /// See [`MapError`].
    fn map_read_only(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError>;

    /// Starts to connect; `Connected` or `PeerLost` ends it. Both ends call it, in any order and at
    /// any time. Does nothing for a peer that is connected or connecting. A rank that is free again
    /// is given to the process that comes next. Lines 4 and 16.
    ///
    /// # Errors
    ///
    /// See [`ConnectError`].
    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError>;

    /// As [`Device::connect`], to a device of another world: each end gives the other a rank of its
    /// own world, and the end that dials was told its rank. So a server has a rank for each of its
    /// clients, as many as its world is large, and each client has one for the server.
    ///
    /// # Errors
    ///
    /// See [`ConnectError`].
    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError>;

    /// The process that has the rank, or had it last, once it was connected. Line 16.
    fn incarnation(&self, peer: Rank) -> Option<Incarnation>;

    /// Starts to sever a peer; `Severed` ends it, in a time bounded by this process's own work,
    /// whatever state the peer is in: not connected, lost, departed or severed. A fabric that maps
    /// may unmap local regions that the peer may write from all peers, also for RDMA; they keep
    /// their bytes and addresses. Lines 9, 14 and 15.
    fn sever(&mut self, peer: Rank);

    /// Starts a transfer, and ends it if that takes no waiting. Never blocks. Lines 2, 3, 5, 6 and
    /// 8.
    ///
    /// # Errors
    ///
    /// See [`SubmitError`]; it has no effect then.
    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError>;

    /// Starts a signal without data, except its payload. The signal counts and ends as a transfer
    /// does. Lines 1, 2, 3 and 5.
    ///
    /// # Errors
    ///
    /// See [`SubmitError`]; it has no effect then.
    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError>;

    /// Marks the end of what this rank has submitted to a connected peer so far;
    /// [`Event::Drained`] comes when both ends have drained and all from before their marks is
    /// over. The caller has the deadline: a peer that never drains causes no event. Line 17.
    ///
    /// # Errors
    ///
    /// See [`SubmitError`]; it has no effect then. [`SubmitError::QueueFull`]: [`DRAINS_MAX`]
    /// drains of this end wait for the peer's; polling makes room when the peer drains.
    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError>;

    /// The signal slots of this rank for `peer`'s signals. A process that takes the rank of another
    /// has new ones from `connect` on. Lines 1 and 16.
    fn signal_slots(&self, peer: Rank) -> Signals;

    /// Sends a control message (at most [`MESSAGE_BYTES_MAX`] bytes) to the peer's [`Responder`].
    /// Not for data. Line 4.
    ///
    /// # Errors
    ///
    /// See [`PostError`].
    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError>;

    /// Makes progress and appends events, never more than `events` has capacity for. Never blocks.
    /// Lines 3 and 10.
    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>);

    /// Arms the wake source; `None`: poll again, because something may have happened already. Call
    /// it through [`crate::sleep::unless_ready`], because signal slots may have changed since the
    /// last poll. Line 11.
    fn arm(&mut self) -> Option<Armed>;

    /// Shows to the peers on which processor this rank waits. Calls `visit` with each peer whose
    /// processor can be seen, and that processor. The processor may be out of date, or a lie. The
    /// call is a hint, and cheap when nothing has changed. The default does nothing, for devices
    /// whose peers see no processors. Line 13.
    fn exchange_processors(&mut self, _own: u32, _visit: &mut dyn FnMut(Rank, u32)) {}

    /// Sends a bye to every connected peer: connections that this rank closes from now on are no
    /// loss. Earlier transfers are still carried out while the device is polled. Line 4.
    fn leave(&mut self);

    /// Sends submitted transfers as far as possible without waiting. True when the peers get and
    /// see all of them without another poll here: then this rank need not poll. With [`Flush::All`]
    /// true only when messages and byes were sent too, so that dropping the device loses nothing.
    /// Line 10.
    fn flush(&mut self, scope: Flush) -> bool;
}
