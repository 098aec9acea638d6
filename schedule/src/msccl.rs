//! Schedules as MSCCL algorithms: the XML that MSCCL and RCCL run on GPUs, written and read.
//!
//! [`export()`] writes a [`Schedule`](crate::Schedule) of puts as such an algorithm, [`import()`]
//! reads one, ours or a stranger's, into a [`Schedule`](crate::Schedule) that
//! [`verify`](crate::verify::verify()) can prove. **What is written is never trusted for that:** a
//! file is right when it was read back and proved. Nothing here has been run on GPUs.
//!
//! # The format
//!
//! An `algo` has a `gpu` for each rank, which has `tb`s (thread blocks), which have `step`s. A
//! thread block carries out its steps one after the other, receives from at most one peer and sends
//! to at most one, on one channel. The data are cut into `nchunksperloop` equal chunks; a step
//! works on `cnt` of them, from `srcoff` in `srcbuf` to `dstoff` in `dstbuf` (`i` input, `o`
//! output, `s` scratch):
//!
//! | type | what it does |
//! |--|--|
//! | `s` | sends its source |
//! | `r` | receives into its destination |
//! | `rcs` | receives into its destination and sends that on |
//! | `rrc` | source + what comes, into its destination |
//! | `rrs` | source + what comes, sent on without being kept |
//! | `rrcs` | source + what comes, into its destination, and sends that on |
//! | `cpy` | source into destination |
//! | `re` | destination + source, into destination |
//! | `nop` | carries one more dependency of the next step |
//!
//! A step begins after the step `deps` of thread block `depid` of its GPU, which must have
//! `hasdep="1"`. What is sent on a channel from one GPU to another arrives in order, through a
//! buffer between them.
//!
//! # What reading proves
//!
//! Import checks the order of the steps in the file: every send has its receive, thread blocks do
//! not wait for each other in a cycle if each connection holds two steps that have not been
//! received, and of two steps of a GPU that touch the same chunk, one of them writing, one is
//! before the other. So all orders in which the GPUs may run the algorithm have the same effect.
//! One of these orders becomes a schedule, and its proof shows the result. An algorithm for calls
//! in place alone is read with input and output as one memory. An algorithm for calls out of place
//! alone is read with its input set aside first, because a proof always covers both.
//!
//! **Invariant:** reading takes time and memory in proportion to the text and the limits below, and
//! never panics.

mod assign;
mod error;
mod export;
mod import;
mod xml;

pub use error::{ExportError, ImportError, ImportProblem};
pub use export::{Exported, export};
pub use import::import;

use pleach_vocabulary::Rank;

/// Longest XML that is read, in bytes.
pub const MAX_XML_BYTES: usize = 1 << 26;
/// Most GPUs of an algorithm that is read.
pub const MAX_GPUS: u32 = 1_024;
/// Most steps of an algorithm that is read, all GPUs together, each counted as often as it has
/// chunks.
pub const MAX_CHUNK_STEPS: u64 = 1 << 21;
/// Most places of an algorithm that is read: GPUs by chunks.
pub const MAX_PLACES: u64 = 1 << 22;
/// Most channels: what the runtimes are built with.
pub const MAX_CHANNELS: u32 = 32;
/// Most thread blocks of a GPU: all of them run at once, one on each multiprocessor. This is the
/// number of multiprocessors of an A100.
pub const MAX_THREAD_BLOCKS: u32 = 108;
/// Most peers of a GPU on one channel, each way.
pub const MAX_CHANNEL_PEERS: u32 = 32;
/// Most steps of a thread block in MSCCL.
pub const MAX_STEPS: u32 = 256;
/// Most steps of a thread block in RCCL, which is less.
pub const MAX_STEPS_RCCL: u32 = 64;
/// Most chunks of one step.
pub const MAX_COUNT: u32 = 71;

/// An algorithm as its file has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Algorithm {
    name: String,
    collective: String,
    root: Option<Rank>,
    channels: u32,
    /// Of input or output, whichever is more.
    chunks: u32,
    in_place: bool,
    out_of_place: bool,
    gpus: Vec<Gpu>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Gpu {
    input_chunks: u32,
    output_chunks: u32,
    scratch_chunks: u32,
    /// By number.
    blocks: Vec<ThreadBlock>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ThreadBlock {
    send: Option<Rank>,
    receive: Option<Rank>,
    channel: u32,
    /// The line of the file, for errors; 0 where there is no file.
    line: usize,
    steps: Vec<Instruction>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Buffer {
    Input,
    Output,
    Scratch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstructionKind {
    Send,
    Receive,
    ReceiveCopySend,
    ReceiveReduceCopy,
    ReceiveReduceSend,
    ReceiveReduceCopySend,
    Copy,
    Reduce,
    Nothing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Instruction {
    kind: InstructionKind,
    source: (Buffer, u32),
    target: (Buffer, u32),
    count: u32,
    /// Thread block and step of the same GPU.
    after: Option<(u32, u32)>,
    is_waited_for: bool,
    line: usize,
}

impl InstructionKind {
    const ALL: [(Self, &'static str); 9] = [
        (Self::Send, "s"),
        (Self::Receive, "r"),
        (Self::ReceiveCopySend, "rcs"),
        (Self::ReceiveReduceCopy, "rrc"),
        (Self::ReceiveReduceSend, "rrs"),
        (Self::ReceiveReduceCopySend, "rrcs"),
        (Self::Copy, "cpy"),
        (Self::Reduce, "re"),
        (Self::Nothing, "nop"),
    ];

    fn sends(self) -> bool {
        matches!(
            self,
            Self::Send | Self::ReceiveCopySend | Self::ReceiveReduceSend | Self::ReceiveReduceCopySend
        )
    }

    fn receives(self) -> bool {
        matches!(
            self,
            Self::Receive
                | Self::ReceiveCopySend
                | Self::ReceiveReduceCopy
                | Self::ReceiveReduceSend
                | Self::ReceiveReduceCopySend
        )
    }

    /// Whether it reads the chunks of its source.
    fn reads_source(self) -> bool {
        !matches!(self, Self::Receive | Self::ReceiveCopySend | Self::Nothing)
    }

    /// Whether it writes the chunks of its target.
    fn writes_target(self) -> bool {
        !matches!(self, Self::Send | Self::ReceiveReduceSend | Self::Nothing)
    }
}

#[cfg(test)]
mod tests;
