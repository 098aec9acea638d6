//! The errors of a device: one type an operation, each with the peer and the numbers.
//!
//! The contract knows no backend. An error of only one fabric or its hardware is a type of that
//! backend, carried as a [`BackendError`]. A loss also has a [`LossKind`], which every caller can
//! match and which other ranks are told.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::{Address, Event, MESSAGE_BYTES_MAX};
use crate::Rank;
use crate::memory::{Space, UNMAPPED_REMEDY};
use crate::region::{OutOfBounds, RegionKey};
use crate::tls::{Protection, TlsFault};

/// An error of one fabric or its hardware, of a type that the backend defines. Two errors are equal
/// when fabric and text are.
#[derive(Clone)]
pub struct BackendError {
    fabric: &'static str,
    error: Arc<dyn Error + Send + Sync>,
}

impl BackendError {
    /// For backends.
    pub fn new(fabric: &'static str, error: impl Error + Send + Sync + 'static) -> Self {
        Self { fabric, error: Arc::new(error) }
    }

    /// Name of the fabric, as [`crate::DeviceInfo::fabric`] of its device.
    #[must_use]
    pub fn fabric(&self) -> &'static str {
        self.fabric
    }

    /// The error, if it has this type.
    #[must_use]
    pub fn downcast_ref<T: Error + 'static>(&self) -> Option<&T> {
        self.error.downcast_ref()
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(formatter)
    }
}

impl fmt::Debug for BackendError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{self}")
    }
}

impl Error for BackendError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl PartialEq for BackendError {
    fn eq(&self, other: &Self) -> bool {
        self.fabric == other.fabric && self.to_string() == other.to_string()
    }
}

impl Eq for BackendError {}

/// The kind of a loss. The same for all fabrics, so callers can match it; on the wire it is its
/// [`code`](Self::code).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
#[repr(u8)]
pub enum LossKind {
    /// The peer's process ended without a bye.
    ProcessEnded = 1,
    /// The peer closed a connection without a bye.
    Closed = 2,
    /// A connection to the peer broke.
    Broken = 3,
    /// The peer's host or NIC does not answer.
    Unresponsive = 4,
    /// The peer was not reached: not in time, or there is no route.
    Unreachable = 5,
    /// The peer or its host refused the connection.
    Refused = 6,
    /// The peer's NIC refused an access to memory.
    AccessDenied = 7,
    /// The peer broke the protocol.
    Protocol = 8,
    /// The ports of the two ranks are incompatible.
    Incompatible = 9,
    /// A limit of this process, host or NIC left no room for a connection.
    Exhausted = 10,
    /// A NIC or a GPU failed.
    Hardware = 11,
    /// A link on the way is down.
    LinkDown = 12,
}

impl LossKind {
    const ALL: [Self; 12] = [
        Self::ProcessEnded,
        Self::Closed,
        Self::Broken,
        Self::Unresponsive,
        Self::Unreachable,
        Self::Refused,
        Self::AccessDenied,
        Self::Protocol,
        Self::Incompatible,
        Self::Exhausted,
        Self::Hardware,
        Self::LinkDown,
    ];

    /// Its number on the wire, never zero.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }

    /// The kind of this code, if there is one.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for LossKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::ProcessEnded => "its process ended",
            Self::Closed => "its connection closed",
            Self::Broken => "its connection broke",
            Self::Unresponsive => "it does not answer",
            Self::Unreachable => "it was not reached",
            Self::Refused => "it refused the connection",
            Self::AccessDenied => "it refused an access",
            Self::Protocol => "it broke the protocol",
            Self::Incompatible => "its port and this rank's do not go together",
            Self::Exhausted => "a limit left no room for a connection to it",
            Self::Hardware => "hardware failed",
            Self::LinkDown => "the link to it is down",
        })
    }
}

/// The cause of a loss.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossCause {
    /// Its process ended without a bye.
    #[error("its process ended without closing the group")]
    ProcessEnded,
    /// It closed a connection without a bye.
    #[error("its connection closed without a bye")]
    ConnectionClosed,
    /// The operating system reported a broken connection.
    #[error("its connection broke ({0})")]
    ConnectionBroke(std::io::ErrorKind),
    /// Its host did not answer keep-alives.
    #[error("its host has not answered for {} ms", .0.as_millis())]
    HostSilent(Duration),
    /// It broke the protocol.
    #[error("it broke the protocol: {0}")]
    Protocol(ProtocolViolation),
    /// It did not connect in time.
    #[error("it was not reached within {} ms", .0.as_millis())]
    NotReached(Duration),
    /// This process may open no more files for a connection to it.
    #[error("this process may open no more than {most} files; raise the limit ('ulimit -n')")]
    Files {
        /// The limit of open files.
        most: u64,
    },
    /// Memory that it shares for the connection cannot be mapped here.
    #[error("what it shares cannot be mapped ({0}); {UNMAPPED_REMEDY}")]
    Unmapped(std::io::ErrorKind),
    /// A link on the way is down.
    #[error("the link to it is down")]
    LinkDown,
    /// An error of one fabric.
    #[error("{error}")]
    Fabric {
        /// Its kind.
        kind: LossKind,
        /// The fabric's error.
        error: BackendError,
    },
}

impl LossCause {
    /// The kind of the loss.
    #[must_use]
    pub fn kind(&self) -> LossKind {
        match self {
            Self::ProcessEnded => LossKind::ProcessEnded,
            Self::ConnectionClosed => LossKind::Closed,
            Self::ConnectionBroke(_) => LossKind::Broken,
            Self::HostSilent(_) => LossKind::Unresponsive,
            Self::Protocol(_) => LossKind::Protocol,
            Self::NotReached(_) => LossKind::Unreachable,
            Self::Files { .. } | Self::Unmapped(_) => LossKind::Exhausted,
            Self::LinkDown => LossKind::LinkDown,
            Self::Fabric { kind, .. } => *kind,
        }
    }

    /// The fabric's error, if it has this type.
    #[must_use]
    pub fn fabric_error<T: Error + 'static>(&self) -> Option<&T> {
        match self {
            Self::Fabric { error, .. } => error.downcast_ref(),
            _ => None,
        }
    }

    /// The cause when an error of the system prevents a connection to a peer.
    #[must_use]
    pub(crate) fn unconnected(error: &std::io::Error) -> Self {
        match files_allowed(error) {
            Some(most) => Self::Files { most },
            None => Self::ConnectionBroke(error.kind()),
        }
    }
}

impl From<ProtocolViolation> for LossCause {
    fn from(violation: ProtocolViolation) -> Self {
        Self::Protocol(violation)
    }
}

/// The limit of open files, if an error of the system means that it is reached.
pub(crate) fn files_allowed(error: &std::io::Error) -> Option<u64> {
    let is_out_of_files = Errno::from_io_error(error) == Some(Errno::MFILE);
    is_out_of_files.then(|| getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
}

/// How a peer broke the protocol.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolViolation {
    /// A frame that does not decode.
    #[error("a malformed frame")]
    MalformedFrame,
    /// A frame longer than its kind allows.
    #[error("an oversized frame")]
    OversizedFrame,
    /// A signal slot that does not exist.
    #[error("a signal to a signal slot that does not exist")]
    UnknownSignalSlot,
    /// An answer without a request.
    #[error("an answer that nothing asked for")]
    UnexpectedAnswer,
    /// A file descriptor of the wrong kind, or whose memory could be taken away under a mapping.
    #[error("a file that cannot be mapped safely")]
    UnsafeFile,
    /// More requests at once than allowed, or requests without reading the answers.
    #[error("too many requests at once")]
    TooManyRequests,
    /// Another protocol version, or another protocol.
    #[error("another protocol or version")]
    Version,
    /// It could not prove that it knows the shared secret.
    #[error("a wrong shared secret")]
    WrongSecret,
    /// It claims to be another rank than expected.
    #[error("another rank than expected")]
    WrongRank,
    /// Another process has the rank there, or had it and was not replaced yet.
    #[error("another process has this rank there; end it, and let its peer connect again")]
    RankTaken,
    /// The process had the rank before. A rank goes to another process only.
    #[error("this process had the rank before; start another one, or use another rank")]
    FormerProcess,
    /// The two ends do not protect the connection alike.
    #[error(
        "it {theirs} on this connection and this rank {own}; set PLEACH_TLS, PLEACH_TLS_CERT, PLEACH_TLS_KEY and PLEACH_TLS_CA alike on all ranks"
    )]
    Protection {
        /// This end's.
        own: Protection,
        /// The other end's.
        theirs: Protection,
    },
    /// TLS with it failed.
    #[error("{0}")]
    Tls(TlsFault),
}

impl From<TlsFault> for ProtocolViolation {
    fn from(fault: TlsFault) -> Self {
        Self::Tls(fault)
    }
}

/// Why a transfer failed.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer is gone.
    #[error("rank {peer} is lost: {cause}")]
    Lost {
        /// The peer.
        peer: Rank,
        /// The cause.
        cause: LossCause,
    },
    /// The peer departed before it was carried out.
    #[error("rank {peer} has left")]
    Departed {
        /// The peer.
        peer: Rank,
    },
    /// [`crate::Device::sever`] ended it.
    #[error("the connection to rank {peer} was severed here")]
    Severed {
        /// The peer.
        peer: Rank,
    },
    /// This rank's own hardware failed; the peer has no part in it.
    #[error("a transfer from or to memory of rank {peer} failed here: {error}")]
    Fabric {
        /// The peer.
        peer: Rank,
        /// The backend's error.
        error: BackendError,
    },
    /// The peer has no such region, the range does not lie inside it, or it is written and the peer
    /// lends it for reading only; or this process could not map it, see its log.
    #[error(
        "rank {peer} refuses the access: region {key:?} is unknown there, too short or for reading only, or this process could not map it"
    )]
    Refused {
        /// The peer.
        peer: Rank,
        /// The key that was used.
        key: RegionKey,
    },
}

/// Why a transfer was not accepted. It has no effect then.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Too many transfers are under way; poll, then try again.
    #[error("rank {peer} has too many transfers under way")]
    QueueFull {
        /// The peer.
        peer: Rank,
    },
    /// `Connected` has not come yet.
    #[error("rank {peer} is not connected")]
    NotConnected {
        /// The peer.
        peer: Rank,
    },
    /// The peer is gone.
    #[error("rank {peer} is lost: {kind}")]
    Lost {
        /// The peer.
        peer: Rank,
        /// The kind; [`crate::Event::PeerLost`] has the cause.
        kind: LossKind,
    },
    /// The peer departed.
    #[error("rank {peer} has left")]
    Departed {
        /// The peer.
        peer: Rank,
    },
    /// The peer was severed.
    #[error("the connection to rank {peer} was severed here")]
    Severed {
        /// The peer.
        peer: Rank,
    },
    /// Source and destination differ in length.
    #[error("{source_bytes} bytes do not fit a destination of {destination_bytes} exactly")]
    Lengths {
        /// Length of the source.
        source_bytes: u64,
        /// Length of the destination.
        destination_bytes: u64,
    },
    /// The local slice belongs to another device.
    #[error("the region was registered with another device")]
    ForeignRegion,
    /// The peer has no such signal slot.
    #[error("signal slot {signal_slot} does not exist, there are {signal_slots}")]
    NoSuchSignalSlot {
        /// The signal slot.
        signal_slot: u16,
        /// The number of signal slots.
        signal_slots: usize,
    },
    /// More bytes than [`crate::DeviceInfo::transfer_bytes_max`].
    #[error("{bytes} bytes are more than the {max} of one transfer")]
    TooLong {
        /// Its length.
        bytes: u64,
        /// The longest transfer.
        max: u64,
    },
    /// An atomic's word is not 8 aligned bytes.
    #[error("an atomic needs 8 bytes at a multiple of 8")]
    MisalignedWord,
}

// The data path returns it: a type that needs no drop costs each submit nothing.
const _: () = assert!(!std::mem::needs_drop::<SubmitError>() && size_of::<SubmitError>() <= 24);

/// Why memory was not registered.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The fabric needs memory that peers can map.
    #[error(
        "{fabric} moves only memory that other processes can map; allocate it with SharedMemory or Group::buffer"
    )]
    NotShareable {
        /// The fabric.
        fabric: &'static str,
    },
    /// The fabric does not reach this memory space.
    #[error(
        "{fabric} does not reach {space} memory; stage it through host memory, as a group whose Options::space is {space} does"
    )]
    Space {
        /// The fabric.
        fabric: &'static str,
        /// The memory space.
        space: Space,
    },
    /// It was detached from all peers when one of them was severed; writes to it reach no process.
    #[error("this memory was cut off from other processes by a severed peer; allocate new memory")]
    Detached {
        /// The fabric.
        fabric: &'static str,
    },
    /// A rank outside the world, or this one.
    #[error("rank {peer} is not a peer of rank {own}; register memory for a rank that is one, or for all")]
    Peer {
        /// The rank that was given.
        peer: Rank,
        /// This rank.
        own: Rank,
    },
    /// The fabric's table of regions is full.
    #[error("{fabric} has {regions} regions already; drop some, or register larger ones")]
    TooMany {
        /// The fabric.
        fabric: &'static str,
        /// Their number.
        regions: usize,
    },
    /// An error of one fabric.
    #[error(transparent)]
    Fabric(BackendError),
    /// The operating system refused.
    #[error("registering {bytes} bytes failed")]
    System {
        /// The length, in bytes.
        bytes: usize,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}

/// For backends: whether an end of the peer is among the events that wait to be polled.
pub(crate) fn awaits_end<'a>(mut events: impl Iterator<Item = &'a Event>, peer: Rank) -> bool {
    events.any(|event| match event {
        Event::PeerLost { peer: of, .. } | Event::Departed { peer: of } | Event::Severed { peer: of } => {
            *of == peer
        }
        Event::Connected { .. } | Event::Done { .. } | Event::Drained { .. } => false,
    })
}

/// For backends: whether the only peer that memory is registered for exists.
pub(crate) fn check_only(only: Option<Rank>, own: Rank, world_size: u32) -> Result<(), RegisterError> {
    match only {
        Some(peer) if peer == own || peer >= world_size => Err(RegisterError::Peer { peer, own }),
        _ => Ok(()),
    }
}

/// Why a peer's memory was not mapped.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The peer has announced no such region. The announcement may be on its way: poll and try
    /// again.
    #[error("rank {peer} has announced no region {key:?}")]
    Unknown {
        /// The peer.
        peer: Rank,
        /// The region.
        key: RegionKey,
    },
    /// The range does not lie inside the region.
    #[error("rank {peer}'s region is shorter")]
    OutOfBounds {
        /// The peer.
        peer: Rank,
        /// The range.
        #[source]
        source: OutOfBounds,
    },
    /// The kernel gave this process no mapping of it, or no file; see its log.
    #[error("this process has no room for a mapping of rank {peer}'s region {key:?}")]
    NoRoom {
        /// The peer.
        peer: Rank,
        /// The region.
        key: RegionKey,
    },
    /// This rank's own hardware does not reach it.
    #[error("rank {peer}'s region {key:?} is out of reach: {error}")]
    Fabric {
        /// The peer.
        peer: Rank,
        /// The region.
        key: RegionKey,
        /// The backend's error.
        error: BackendError,
    },
    /// Its owner lends it: it can only be read. [`crate::Device::map_read_only`] maps it.
    #[error("rank {peer} lends region {key:?} for reading only")]
    ReadOnly {
        /// The peer.
        peer: Rank,
        /// The region.
        key: RegionKey,
    },
    /// It is GPU memory, and this rank computes on its host.
    #[error(
        "rank {peer}'s region {key:?} is on a GPU, and this rank's group works on host memory; let all ranks make the group on one kind of memory"
    )]
    OnGpu {
        /// The region.
        peer: Rank,
        /// The region.
        key: RegionKey,
    },
    /// This device maps nothing ([`crate::Reach::maps`]).
    #[error("{fabric} does not map")]
    Unsupported {
        /// The fabric.
        fabric: &'static str,
    },
    /// The peer is lost, departed or severed.
    #[error("rank {peer} is not connected any more")]
    Disconnected {
        /// The peer.
        peer: Rank,
    },
}

/// Why connecting did not start.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The rank's process ended or is being severed, and the event of it was not polled.
    #[error("rank {peer} is not free yet; poll until its end (Departed, PeerLost or Severed), then connect")]
    NotFree {
        /// The peer.
        peer: Rank,
    },
    /// The operating system refused the shared memory of the signal slots.
    #[error(
        "the system refused the signal slots of rank {peer} ({source}); raise the limit of memory ('ulimit -v') or of files ('ulimit -n')"
    )]
    SignalSlots {
        /// The peer.
        peer: Rank,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The fabric joins devices of one world only.
    #[error("{fabric} joins ranks of one world only; use another fabric for devices of other worlds")]
    OtherWorld {
        /// The fabric.
        fabric: &'static str,
    },
    /// The text is no address of this fabric.
    #[error("'{address}' is not an address of {fabric}")]
    Address {
        /// The fabric.
        fabric: &'static str,
        /// The text.
        address: Address,
    },
    /// A rank outside the world, or this one.
    #[error("rank {peer} is not a peer of rank {own} in a world of {world_size}")]
    Peer {
        /// The rank that was given.
        peer: Rank,
        /// This rank.
        own: Rank,
        /// The number of ranks.
        world_size: u32,
    },
    /// The operating system refused.
    #[error("connecting to rank {peer} at {address} failed")]
    System {
        /// The peer.
        peer: Rank,
        /// Its address.
        address: Address,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}

/// Why a message was not sent.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The peer is lost, departed, severed or not connected yet.
    #[error("rank {peer} is not connected")]
    NotConnected {
        /// The peer.
        peer: Rank,
    },
    /// Too many messages wait to be sent.
    #[error("too many messages to rank {peer} are waiting")]
    QueueFull {
        /// The peer.
        peer: Rank,
    },
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("a message of {bytes} bytes is longer than {MESSAGE_BYTES_MAX}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
}
