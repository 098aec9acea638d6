//! What can go wrong at a device: one type an operation, each saying who and how much.

use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::Rank;
use crate::cuda::CudaError;
use crate::device::{Address, MESSAGE_BYTES_MAX};
use crate::memory::{Space, UNMAPPED_REMEDY};
use crate::region::{OutOfBounds, RegionKey};
use crate::verbs::port::Kind as AddressKind;
use crate::verbs::{CallFailure, KINDS_REMEDY, Limit, LimitKind, NOT_JOINED_REMEDY, Refusal, WorkFailure};

/// How a loss was found out.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossCause {
    /// Its process ended without goodbye.
    #[error("its process ended without closing the group")]
    ProcessEnded,
    /// Its end of a connection was closed without goodbye.
    #[error("its connection closed without a goodbye")]
    ConnectionClosed,
    /// The operating system reported a broken connection.
    #[error("its connection broke ({0})")]
    ConnectionBroke(std::io::ErrorKind),
    /// Its host did not answer keep-alives.
    #[error("its host has not answered for {} ms", .0.as_millis())]
    HostSilent(Duration),
    /// It sent something that the protocol does not allow.
    #[error("it broke the protocol: {0}")]
    Protocol(ProtocolViolation),
    /// It did not come within the time to connect.
    #[error("it was not reached within {} ms", .0.as_millis())]
    NotReached(Duration),
    /// There is no connection to it, since this process may open no more files.
    #[error("this process may open no more than {most} files; raise the limit ('ulimit -n')")]
    Files {
        /// How many it may have open.
        most: u64,
    },
    /// What it shares to be connected with cannot be mapped here (shm).
    #[error("what it shares cannot be mapped ({0}); {UNMAPPED_REMEDY}")]
    Unmapped(std::io::ErrorKind),
    /// There is no queue pair to it, since this process may lock no more memory for the NIC
    /// (verbs).
    #[error(
        "the NIC needs locked memory to reach it, and this process may lock no more: the limit is {limit} bytes; raise it with 'ulimit -l unlimited', or for good by the lines '* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.conf"
    )]
    NotLocked {
        /// How many bytes this process may lock in all.
        limit: u64,
    },
    /// Its port carries packets of another length than this rank's (verbs).
    #[error(
        "its RDMA port carries packets of {peer} bytes, this rank's of {own}; give both ends' network interfaces the same MTU"
    )]
    PacketLengths {
        /// Longest packet of this rank's port, in bytes.
        own: u32,
        /// Longest packet of the peer's port, in bytes.
        peer: u32,
    },
    /// The address of its port is of a kind that does not meet this rank's (verbs).
    #[error(
        "the address of its RDMA port is {peer}, that of this rank's {own}, which do not meet; {KINDS_REMEDY}"
    )]
    AddressKinds {
        /// That of this rank's port.
        own: AddressKind,
        /// That of the peer's port.
        peer: AddressKind,
    },
    /// This rank's NIC does not join a queue pair to the peer's (verbs).
    #[error(
        "this rank's NIC joins no queue pair to it ({}); {NOT_JOINED_REMEDY}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    NotJoined {
        /// Why, as the system numbers it.
        errno: i32,
    },
    /// There is no queue pair to it, since this rank's NIC has no more of something (verbs).
    #[error("this rank's NIC has no more than {most} {kind}; {}", .kind.remedy())]
    Limit {
        /// Of what.
        kind: LimitKind,
        /// How many there may be.
        most: u64,
    },
    /// The connection manager did not join the two (verbs).
    #[error("{0}")]
    Call(CallFailure),
    /// It made no connection, and said why (verbs).
    #[error("it refused the connection: {0}")]
    Refused(Refusal),
    /// This rank's GPU does not show what its NIC has written to it (verbs).
    #[error(
        "this rank's GPU does not show what its NIC has written there (CUDA error {code}); look whether 'nvidia-smi' works"
    )]
    Gpu {
        /// What the driver said; zero: nothing.
        code: u32,
    },
    /// Work on its queue pair failed (verbs).
    #[error("{0}")]
    QueuePair(WorkFailure),
    /// A link on the way is down (simulated).
    #[error("the link to it is down")]
    LinkDown,
}

impl LossCause {
    /// What an error of the system says when it keeps this rank from a connection to a peer.
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

/// How many files this process may have open, if an error of the system says that it has.
pub(crate) fn files_allowed(error: &std::io::Error) -> Option<u64> {
    let is_out_of_files = Errno::from_io_error(error) == Some(Errno::MFILE);
    is_out_of_files.then(|| getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX))
}

/// What a peer sent that it may not.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolViolation {
    /// A frame that does not decode.
    #[error("a malformed frame")]
    MalformedFrame,
    /// A frame longer than its kind allows.
    #[error("an oversized frame")]
    OversizedFrame,
    /// A cell that does not exist.
    #[error("a notice to a cell that does not exist")]
    UnknownCell,
    /// An answer to nothing.
    #[error("an answer that nothing asked for")]
    UnexpectedAnswer,
    /// A file descriptor that is not what it should be, or whose memory could be taken away under a
    /// mapping.
    #[error("a file that cannot be mapped safely")]
    UnsafeFile,
    /// More questions at once than were agreed on, or questions without reading the answers.
    #[error("too many requests at once")]
    TooManyRequests,
    /// A different protocol version, or not pleach at all.
    #[error("another protocol or version")]
    Version,
    /// It could not prove that it knows the shared secret.
    #[error("a wrong shared secret")]
    WrongSecret,
    /// It says it is another rank than the one expected.
    #[error("another rank than expected")]
    WrongRank,
}

/// Why a transfer failed.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer is gone.
    #[error("rank {peer} is lost: {cause}")]
    Lost {
        /// Who.
        peer: Rank,
        /// How it was found out.
        cause: LossCause,
    },
    /// The peer said goodbye before it was carried out.
    #[error("rank {peer} has left")]
    Left {
        /// Who.
        peer: Rank,
    },
    /// [`crate::Device::sever`] ended it.
    #[error("the connection to rank {peer} was severed here")]
    Severed {
        /// From whom.
        peer: Rank,
    },
    /// A GPU did not carry it out.
    #[error("a copy by a GPU, from or to memory of rank {peer}, failed: {error}")]
    Gpu {
        /// Whose memory is at the other end.
        peer: Rank,
        /// Why.
        error: CudaError,
    },
    /// The peer has no such region, or the range does not lie inside it; or this process could not
    /// map it, which its log says.
    #[error(
        "rank {peer} refuses the access: region {key:?} is unknown there or too short, or this process could not map it"
    )]
    Refused {
        /// By whom.
        peer: Rank,
        /// The key that was used.
        key: RegionKey,
    },
}

/// Why a transfer was not accepted. Nothing has happened then.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// Too many transfers are under way; poll, then try again.
    #[error("rank {peer} has too many transfers under way")]
    QueueFull {
        /// To whom.
        peer: Rank,
    },
    /// `Connected` has not come yet.
    #[error("rank {peer} is not connected")]
    NotConnected {
        /// Who.
        peer: Rank,
    },
    /// The peer is gone.
    #[error("rank {peer} is lost: {cause}")]
    Lost {
        /// Who.
        peer: Rank,
        /// How it was found out.
        cause: LossCause,
    },
    /// The peer said goodbye.
    #[error("rank {peer} has left")]
    Left {
        /// Who.
        peer: Rank,
    },
    /// The peer was severed.
    #[error("the connection to rank {peer} was severed here")]
    Severed {
        /// Who.
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
    /// The peer has no such cell.
    #[error("cell {cell} does not exist, there are {cells}")]
    NoSuchCell {
        /// The cell.
        cell: u16,
        /// How many there are.
        cells: usize,
    },
    /// More bytes than [`crate::Caps::transfer_bytes_max`].
    #[error("{bytes} bytes are more than the {max} of one transfer")]
    TooLong {
        /// How many.
        bytes: u64,
        /// How many are allowed.
        max: u64,
    },
    /// An atomic's word is not 8 aligned bytes.
    #[error("an atomic needs 8 bytes at a multiple of 8")]
    MisalignedWord,
}

// It is what the data path returns: each submission would look whether there is something to drop.
const _: () = assert!(!std::mem::needs_drop::<SubmitError>() && size_of::<SubmitError>() <= 40);

/// Why memory was not registered.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The fabric needs memory that peers can map.
    #[error(
        "{fabric} moves only memory that other processes can map; allocate it with SharedMemory or Group::buffer"
    )]
    NotShareable {
        /// Which fabric.
        fabric: &'static str,
    },
    /// The fabric does not reach this kind of memory.
    #[error(
        "{fabric} does not reach {space} memory; stage it through host memory, as a group whose Options::space is {space} does"
    )]
    Space {
        /// Which fabric.
        fabric: &'static str,
        /// Which memory.
        space: Space,
    },
    /// Neither of the two ways to let a NIC reach a GPU's memory works here.
    #[error(
        "the NIC does not reach memory of GPU {ordinal}: neither as a dma-buf ({dma_buf}), nor by its address ({address}), which takes nvidia-peermem; load that ('sudo modprobe nvidia-peermem'), or install NVIDIA's open kernel modules (driver 515 or newer, with Linux 5.12 and rdma-core 34 or newer); a group whose Options::space is cuda:{ordinal} stages it through host memory meanwhile"
    )]
    NoGpuDirect {
        /// Which GPU.
        ordinal: u32,
        /// Why not as a dma-buf.
        dma_buf: String,
        /// What the kernel said to its address.
        address: std::io::Error,
    },
    /// The GPU shows what NICs write to it only to who reads it back through the NIC.
    #[error(
        "GPU {ordinal} gives the host no way to see what a NIC has written there in full (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS says so); update NVIDIA's driver, or stage through host memory, as a group whose Options::space is cuda:{ordinal} does"
    )]
    NoFlush {
        /// Which GPU.
        ordinal: u32,
    },
    /// One device reaches the memory of one GPU.
    #[error(
        "memory of GPU {other} cannot be registered beside that of GPU {first}; make a group for each GPU"
    )]
    OtherGpu {
        /// Whose memory is registered.
        first: u32,
        /// Whose was to be.
        other: u32,
    },
    /// It was cut off from all peers when one of them was severed, and nobody else can see what is
    /// written to it.
    #[error("this memory was cut off from other processes by a severed peer; allocate new memory")]
    Detached {
        /// Which fabric.
        fabric: &'static str,
    },
    /// As many regions exist as the fabric can name.
    #[error("{fabric} has {regions} regions already; drop some, or register larger ones")]
    TooMany {
        /// Which fabric.
        fabric: &'static str,
        /// How many there are.
        regions: usize,
    },
    /// The NIC needs the memory to be locked, and this process may lock no more.
    #[error(
        "{bytes} bytes cannot be locked for the NIC: the limit is {limit} bytes; raise it with 'ulimit -l unlimited', or for good by the lines '* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.conf"
    )]
    Locked {
        /// How many.
        bytes: usize,
        /// How many this process may lock in all.
        limit: u64,
    },
    /// The NIC takes no more, or none so long.
    #[error(transparent)]
    Limit(Limit),
    /// The operating system refused.
    #[error("registering {bytes} bytes failed")]
    System {
        /// How many.
        bytes: usize,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Why a peer's memory was not mapped.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The peer has announced no such region (yet: the announcement may be on its way, poll and try
    /// again).
    #[error("rank {peer} has announced no region {key:?}")]
    Unknown {
        /// Whose.
        peer: Rank,
        /// Which.
        key: RegionKey,
    },
    /// The range does not lie inside the region.
    #[error("rank {peer}'s region is shorter")]
    OutOfBounds {
        /// Whose.
        peer: Rank,
        /// Which part.
        #[source]
        source: OutOfBounds,
    },
    /// The kernel gave this process no mapping of it, or no file; its log says which.
    #[error("this process has no room for a mapping of rank {peer}'s region {key:?}")]
    NoRoom {
        /// Whose.
        peer: Rank,
        /// Which.
        key: RegionKey,
    },
    /// It is on a GPU, which this process does not reach.
    #[error("rank {peer}'s region {key:?} on a GPU is out of reach: {source}")]
    Gpu {
        /// Whose.
        peer: Rank,
        /// Which.
        key: RegionKey,
        /// Why.
        #[source]
        source: CudaError,
    },
    /// It is on a GPU, and what this rank computes is on its host.
    #[error(
        "rank {peer}'s region {key:?} is on a GPU, and this rank's group works on host memory; let all ranks make the group on one kind of memory"
    )]
    OnGpu {
        /// Whose.
        peer: Rank,
        /// Which.
        key: RegionKey,
    },
    /// This device maps nothing ([`crate::Reach::maps`]).
    #[error("{fabric} does not map")]
    Unsupported {
        /// Which fabric.
        fabric: &'static str,
    },
    /// The peer is gone, has left or was severed.
    #[error("rank {peer} is not connected any more")]
    Disconnected {
        /// Who.
        peer: Rank,
    },
}

/// Why connecting did not start.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The text is no address of this fabric.
    #[error("'{address}' is not an address of {fabric}")]
    Address {
        /// Which fabric.
        fabric: &'static str,
        /// What was given.
        address: Address,
    },
    /// A rank outside the world, or this one.
    #[error("rank {peer} is not a peer of rank {own} in a world of {world_size}")]
    Peer {
        /// Who was named.
        peer: Rank,
        /// Who asks.
        own: Rank,
        /// How many there are.
        world_size: u32,
    },
    /// The operating system refused.
    #[error("connecting to rank {peer} at {address} failed")]
    System {
        /// To whom.
        peer: Rank,
        /// Where.
        address: Address,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// Why a message was not sent.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The peer is gone, has left, was severed or is not connected yet.
    #[error("rank {peer} is not connected")]
    NotConnected {
        /// Who.
        peer: Rank,
    },
    /// Too many messages wait to be sent.
    #[error("too many messages to rank {peer} are waiting")]
    QueueFull {
        /// To whom.
        peer: Rank,
    },
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("a message of {bytes} bytes is longer than {MESSAGE_BYTES_MAX}")]
    TooLong {
        /// How long.
        bytes: usize,
    },
}
