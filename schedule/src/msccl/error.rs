//! Errors of reading and writing algorithms.

use pleach_vocabulary::{Collective, Rank};

/// Where an XML is no algorithm that a schedule can be made of, and why.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct ImportError {
    /// The line, from 1.
    pub line: usize,
    /// The problem there.
    pub problem: ImportProblem,
}

/// A problem in an XML.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportProblem {
    /// Something else stands there.
    #[error("expected {what}, found {found}")]
    Expected {
        /// The element that was expected.
        what: &'static str,
        /// The text that was found, shortened.
        found: String,
    },
    /// An attribute that must be there.
    #[error("'{element}' has no attribute '{attribute}'")]
    NoAttribute {
        /// The element.
        element: &'static str,
        /// The attribute.
        attribute: &'static str,
    },
    /// A value that the attribute cannot have.
    #[error("{attribute}=\"{value}\": expected {what}")]
    Value {
        /// The attribute.
        attribute: &'static str,
        /// Its value, shortened.
        value: String,
        /// The values that are allowed.
        what: &'static str,
    },
    /// Larger than this reader takes.
    #[error("more than {most} {what}")]
    TooMany {
        /// The kind of thing.
        what: &'static str,
        /// The limit.
        most: u64,
    },
    /// GPUs or thread blocks are not numbered from 0 on.
    #[error("{what} {number} is there twice, or one before it is missing")]
    Numbering {
        /// The kind of thing.
        what: &'static str,
        /// The number.
        number: u32,
    },
    /// A collective that no schedule is for.
    #[error("'{name}' is no collective that is read; there are {known}")]
    Collective {
        /// The name.
        name: String,
        /// Those that are.
        known: &'static str,
    },
    /// The root of a broadcast or reduce cannot be told.
    #[error("nothing says which GPU is the root; add root=\"...\" to 'algo'")]
    NoRoot,
    /// Chunks do not come out even.
    #[error("{chunks} chunks do not divide among {ranks} GPUs")]
    Chunks {
        /// How many chunks.
        chunks: u32,
        /// How many GPUs.
        ranks: u32,
    },
    /// A place outside its buffer.
    #[error("chunk {chunk} of a buffer that has {chunks}")]
    OutOfBuffer {
        /// The chunk.
        chunk: u32,
        /// The number of chunks.
        chunks: u32,
    },
    /// A step that sends in a block without a peer to send to, or the same for receiving.
    #[error("the thread block has no peer to {what}")]
    NoPeer {
        /// `send to` or `receive from`.
        what: &'static str,
    },
    /// Two thread blocks use one end of a connection.
    #[error("another thread block of GPU {gpu} uses the connection with GPU {peer} on channel {channel}")]
    SharedConnection {
        /// The GPU.
        gpu: Rank,
        /// The peer.
        peer: Rank,
        /// The channel.
        channel: u32,
    },
    /// Sends and receives of a connection do not match.
    #[error("from GPU {from} to GPU {to} on channel {channel} this step has no partner of {count} chunks")]
    Unmatched {
        /// The sender.
        from: Rank,
        /// The receiver.
        to: Rank,
        /// The channel.
        channel: u32,
        /// How many chunks are sent or received.
        count: u32,
    },
    /// A dependency on a step that is not there or never tells.
    #[error(
        "step {step} of thread block {block} is not there, or neither it nor a later one has hasdep=\"1\""
    )]
    Dependency {
        /// In which block.
        block: u32,
        /// The step.
        step: u32,
    },
    /// Steps wait for each other.
    #[error("GPU {gpu} waits here in a cycle, where a connection holds two steps that were not received")]
    Cycle {
        /// The GPU.
        gpu: Rank,
    },
    /// Two steps of a GPU touch a chunk in no order.
    #[error("GPU {gpu} touches this chunk in no order with the step of line {other}, and one of them writes")]
    Race {
        /// The GPU.
        gpu: Rank,
        /// The other step's line.
        other: usize,
    },
    /// Nothing has been written there.
    #[error("GPU {gpu} reads a chunk that holds nothing yet")]
    Empty {
        /// The GPU.
        gpu: Rank,
    },
    /// Data of one chunk where those of another belong, or combined with them.
    #[error("chunk {found} of the data comes where chunk {place} belongs")]
    MisplacedChunk {
        /// The chunk that was found.
        found: u32,
        /// The chunk that was expected.
        place: u32,
    },
    /// The input of an algorithm for calls out of place is written.
    #[error("GPU {gpu} writes its input, which is the caller's where calls are out of place")]
    WritesInput {
        /// The GPU.
        gpu: Rank,
    },
}

/// Why a schedule has no form as an algorithm.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The runtimes know no size of chunks for it.
    #[error("MSCCL has all-reduce, all-gather, reduce-scatter, broadcast and reduce, not {}", .collective.name())]
    Collective {
        /// Its collective.
        collective: Collective,
    },
    /// Other ranks' memory is read or written in place.
    #[error("rank {rank} uses the memory of others in place; generate the schedule by puts")]
    Mapped {
        /// Which rank does.
        rank: Rank,
    },
    /// A signal without its wait: no proved schedule has that.
    #[error("rank {rank} waits for or sends a signal that has no other half; is the schedule proved?")]
    Unmatched {
        /// The rank.
        rank: Rank,
    },
    /// More than the runtimes have.
    #[error("{needed} {what}, and an algorithm has at most {most}")]
    TooMany {
        /// The kind of thing.
        what: &'static str,
        /// How many it takes.
        needed: u64,
        /// How many there may be.
        most: u64,
    },
}
