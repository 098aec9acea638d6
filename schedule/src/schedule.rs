//! A collective as data: read the first comment of [`Schedule`].

use std::fmt;

use pleach_vocabulary::{Collective, Rank};

/// A block's number in [`Schedule::blocks`].
pub type BlockId = u32;
/// A step's number in [`Lane::steps`].
pub type StepId = u32;

/// A counter at a receiver for one sender and one block. See [`Schedule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SignalSlot(pub u16);

/// A collective as data.
///
/// A [`Schedule`] holds for every rank a few [`Lane`]s. A lane is a small program over one *block*
/// of the data; it is run once for every *chunk* of its block, with up to [`Schedule::window`]
/// chunks under way at once. So a schedule is independent of the number of bytes, the element type
/// and the operation, and so is its proof.
///
/// # What the data are
///
/// The collective says which parts inputs and outputs hold ([`Collective`]). Every part is cut into
/// the [`Block`]s that name it, in the order of the list, in proportion to their weights. A block
/// is cut into chunks of a size that is chosen when the schedule is run and is the same on all
/// ranks. **A block always has at least one chunk**, if need be an empty one: ranks meet even
/// when there is nothing to move. A barrier has no data, so its blocks have just one. A schedule
/// for few bytes may say that its blocks are never cut ([`Schedule::single_chunk`]): then nothing
/// has to keep one chunk from another.
///
/// # What a step does
///
/// Within one chunk of a lane steps are *issued* in the order of the list; each is issued when the
/// step before it has been issued and all it is [`after`](Step::after) are complete. A [`Op::Wait`]
/// blocks: it is issued and complete when its signal has come, so whatever stands behind it in the
/// lane happens after it. [`Op::Put`] and [`Op::Reduce`] complete some time after they were issued
/// (a put: when its source may be reused); [`Op::Signal`] at once. `after` with a lag of `k` means
/// the step of `k` chunks earlier (none for the first `k` chunks). Chunk `c` is begun when all
/// steps of chunk `c - window` are complete. Nothing else is ordered: not two transfers, not two
/// chunks, not two lanes.
///
/// # Signal slots and slots
///
/// A signal goes to a [`SignalSlot`] of the receiving rank, from a given sender, for a given block;
/// each chunk under way has its own instance of it (`chunk % window`), so the signals of two chunks
/// cannot be mistaken for each other. Each signal or put is matched by exactly one wait of the same
/// block and signal slot at its target, and a signal slot instance is signalled again only after
/// that wait. Scratch slots are a rank's own memory, again for each block and chunk under way. A
/// rank may have several lanes of a block; they share its signal slots and slots.
///
/// # Whose memory
///
/// [`Part::Input`] and [`Part::Output`] are the caller's slices and are touched by their own rank
/// only. That includes the sources of its puts: who carries out the schedule copies what is not
/// registered to memory that is. What peers touch is [`Part::SharedInput`] and
/// [`Part::SharedOutput`]: the very same memory where the caller's slice is registered, else a
/// window in scratch. A rank therefore copies (`Reduce` of one source) its input to its shared
/// input before peers may read it, and its shared output to its output afterwards; where the two
/// are the same memory such a copy is nothing and takes no time (of several destinations those that
/// are the source's memory are left out, and those that are one memory are written once). A
/// schedule must be right in either case, on each rank by itself, and also when output and input
/// are the same slice; the windows in scratch are there once for each chunk under way, as slots
/// are. An input is never written, and a shared input only as a copy of its own rank's input, for
/// it may be the same memory. Peers touch what is shared only between the rank's first and last
/// step in the run, each only after it has waited for a signal of that rank in this run (which says
/// where its slices are); its scratch they may write, by a put or a mapped reduce, before they have
/// heard of it in this run: who carries out the schedule writes to a peer only when that scratch is
/// free of earlier runs. Mapped access is a [`Op::Reduce`] that names another rank's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The collective that it carries out.
    pub collective: Collective,
    /// How many chunks of a lane may be under way at once, at least 1.
    pub window: u32,
    /// Every block is one chunk, however long it is.
    pub single_chunk: bool,
    /// How the parts are cut.
    pub blocks: Vec<Block>,
    /// The lanes of every rank; as many entries as ranks.
    pub programs: Vec<Vec<Lane>>,
}

impl Schedule {
    /// How many ranks take part.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.programs.len() as u32
    }

    /// Whether a block has but one chunk in every run.
    #[must_use]
    pub fn has_one_chunk(&self) -> bool {
        self.single_chunk || self.collective == Collective::Barrier
    }
}

/// A piece of a part, proportional to its weight among the blocks of that part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// Which part ([`Collective::parts`]).
    pub part: u32,
    /// Its share, at least 1.
    pub weight: u32,
}

/// A program over the chunks of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// The block of the chunks.
    pub block: BlockId,
    /// The steps for each chunk.
    pub steps: Vec<Step>,
}

/// An operation and what must be complete before it is issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The operation.
    pub op: Op,
    /// Steps of the same lane, each with how many chunks earlier (0: the same chunk, and then an
    /// earlier step).
    pub after: Vec<(StepId, u32)>,
}

/// The operation of a step.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// Signals a peer's signal slot.
    Signal {
        /// The receiver.
        to: Rank,
        /// The signal slot.
        signal_slot: SignalSlot,
    },
    /// Writes a place of this rank to a place of a peer, then signals the peer's signal slot.
    Put {
        /// The receiver.
        to: Rank,
        /// From this rank's place.
        src: Part,
        /// To that rank's place: its shared output or scratch.
        dst: Part,
        /// The signal slot of that rank.
        signal_slot: SignalSlot,
    },
    /// Waits for one signal in one of this rank's signal slots.
    Wait {
        /// The sender.
        from: Rank,
        /// The signal slot of this rank.
        signal_slot: SignalSlot,
    },
    /// Combines the sources from left to right and stores the result in every destination, in one
    /// pass. One source: a copy. Places of other ranks are reached through mappings.
    Reduce {
        /// At least one.
        from: Vec<Place>,
        /// At least one.
        into: Vec<Place>,
    },
}

/// A part of the memory of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// The rank.
    pub rank: Rank,
    /// The part.
    pub part: Part,
}

/// Which memory of a rank, at the current block and chunk. See [`Schedule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// The caller's input.
    Input,
    /// The caller's output.
    Output,
    /// The input, as peers read it.
    SharedInput,
    /// The output, as peers write (or read) it.
    SharedOutput,
    /// A slot of scratch memory.
    Scratch(u16),
}

impl Part {
    /// Whether it is an input, as its rank or as peers read it.
    #[must_use]
    pub fn is_input(self) -> bool {
        matches!(self, Self::Input | Self::SharedInput)
    }
}

impl fmt::Display for Part {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input => formatter.write_str("input"),
            Self::Output => formatter.write_str("output"),
            Self::SharedInput => formatter.write_str("shared-input"),
            Self::SharedOutput => formatter.write_str("shared-output"),
            Self::Scratch(slot) => write!(formatter, "scratch-{slot}"),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.rank, self.part)
    }
}
