//! The reasons for which a schedule is refused, with their places.

use std::fmt;

use pleach_vocabulary::{Collective, Rank};

use crate::{BlockId, Part, Place, SignalSlot, StepId};

/// A step of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// The rank of the program.
    pub rank: Rank,
    /// The lane.
    pub lane: u32,
    /// The block of that lane.
    pub block: BlockId,
    /// The step.
    pub step: StepId,
}

impl fmt::Display for Site {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "rank {} lane {} (block {}) step {}", self.rank, self.lane, self.block, self.step)
    }
}

/// A step that reads or writes a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepAccess {
    /// The step.
    pub site: Site,
    /// The chunk.
    pub chunk: u32,
    /// Whether it writes.
    pub writes: bool,
    /// The place.
    pub place: Place,
}

impl fmt::Display for StepAccess {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verb = if self.writes { "writes" } else { "reads" };
        write!(formatter, "{} chunk {} {verb} {}", self.site, self.chunk, self.place)
    }
}

/// Which places of a rank are the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Placement {
    /// The shared input is the input.
    pub shared_input_is_input: bool,
    /// The shared output is the output.
    pub shared_output_is_output: bool,
    /// The output is the input.
    pub in_place: bool,
}

impl fmt::Display for Placement {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let apart = |same| if same { "the same memory" } else { "apart" };
        write!(
            formatter,
            "input and shared-input {}, output and shared-output {}, input and output {}",
            apart(self.shared_input_is_input),
            apart(self.shared_output_is_output),
            apart(self.in_place)
        )
    }
}

/// Why a schedule was refused.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// There are no ranks.
    #[error("the schedule has no ranks")]
    NoRanks,
    /// Larger than this verifier takes.
    #[error("the schedule has {found} {what}; at most {most} can be verified")]
    TooLarge {
        /// The number that is too large.
        what: &'static str,
        /// How large it is.
        found: u64,
        /// The limit.
        most: u64,
    },
    /// The search for an order ran into its limit. Nothing is known to be wrong.
    #[error("block {block} was not verified: the search for an order exceeded {most} visits")]
    TooHard {
        /// The block.
        block: BlockId,
        /// The limit.
        most: u64,
    },
    /// No chunk may be under way.
    #[error("the window is 0 chunks; it is at least 1")]
    NoWindow,
    /// The collective names a rank that does not exist.
    #[error("{collective} names rank {rank}, but there are {ranks} ranks")]
    UnknownRoot {
        /// The collective.
        collective: Collective,
        /// Whom it names.
        rank: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A part of the data lies in no block.
    #[error("part {part} has data, but no block covers it")]
    Uncovered {
        /// The part.
        part: u32,
    },
    /// A block names a part that does not exist.
    #[error("block {block} is of part {part}, but there are {parts} parts")]
    UnknownPart {
        /// The block.
        block: BlockId,
        /// What it names.
        part: u32,
        /// The number of parts.
        parts: u32,
    },
    /// A block has no share.
    #[error("block {block} has weight 0; it is at least 1")]
    NoWeight {
        /// The block.
        block: BlockId,
    },
    /// A lane names a block that does not exist.
    #[error("rank {rank} lane {lane} is of block {block}, but there are {blocks} blocks")]
    UnknownBlock {
        /// The rank.
        rank: Rank,
        /// The lane.
        lane: u32,
        /// What it names.
        block: BlockId,
        /// The number of blocks.
        blocks: u32,
    },
    /// A step names a rank that does not exist.
    #[error("{site} names rank {named}, but there are {ranks} ranks")]
    UnknownRank {
        /// The step.
        site: Site,
        /// Whom it names.
        named: Rank,
        /// The number of ranks.
        ranks: u32,
    },
    /// A signal to or from oneself.
    #[error("{site} sends a signal to its own rank or waits for one")]
    ToItself {
        /// The step.
        site: Site,
    },
    /// A reduce without sources or destinations.
    #[error("{site} has no source or no destination")]
    NothingToDo {
        /// The step.
        site: Site,
    },
    /// A place stands twice in a list, or a copy's source is its destination.
    #[error("{site} names {place} twice")]
    NamedTwice {
        /// The step.
        site: Site,
        /// The place.
        place: Place,
    },
    /// `after` names a step that is not in the lane, or not earlier.
    #[error("{site} is after step {earlier} of {lag} chunks earlier, which is no earlier step of its lane")]
    UnknownStep {
        /// The step.
        site: Site,
        /// What it names.
        earlier: StepId,
        /// How many chunks earlier.
        lag: u32,
    },
    /// The rank has no such slice for this block.
    #[error("{site} uses {place}, but rank {rank} has no such slice of part {part} in this collective", rank = place.rank)]
    NoSlice {
        /// The step.
        site: Site,
        /// The place.
        place: Place,
        /// The block's part.
        part: u32,
    },
    /// Another rank's private slice.
    #[error("{site} uses {place}, which its own rank alone may touch; peers use the shared one")]
    Private {
        /// The step.
        site: Site,
        /// The place.
        place: Place,
    },
    /// A put goes elsewhere than to shared output or scratch.
    #[error("{site} puts to {place}; a put goes to shared-output or scratch of another rank")]
    PutInto {
        /// The step.
        site: Site,
        /// The place.
        place: Place,
    },
    /// An input is written.
    #[error(
        "{site} writes {place}; inputs are never written, and a shared-input only as a copy of its rank's own input"
    )]
    WritesInput {
        /// The step.
        site: Site,
        /// The place.
        place: Place,
    },
    /// Values are combined in a collective that has no operation.
    #[error("{site} combines several sources, but {collective} combines nothing")]
    CombinesNothing {
        /// The step.
        site: Site,
        /// The collective.
        collective: Collective,
    },
    /// A signal without a wait.
    #[error("{site} signals {signal_slot} of rank {to}, where no wait consumes it")]
    Unconsumed {
        /// The signal or put.
        site: Site,
        /// The receiver.
        to: Rank,
        /// The signal slot.
        signal_slot: SignalSlotName,
    },
    /// A wait without a signal.
    #[error("{site} waits for {signal_slot} from rank {from}, which never signals it")]
    NeverSignalled {
        /// The wait.
        site: Site,
        /// The sender.
        from: Rank,
        /// The signal slot.
        signal_slot: SignalSlotName,
    },
    /// Two steps signal the same signal slot in a chunk.
    #[error("{second} signals {signal_slot} again, which {first} signals in the same chunk")]
    SignalledTwice {
        /// The first.
        first: Site,
        /// The second.
        second: Site,
        /// The signal slot.
        signal_slot: SignalSlotName,
    },
    /// Two steps wait for the same signal slot in a chunk.
    #[error("{second} waits again for {signal_slot}, for which {first} waits in the same chunk")]
    WaitedTwice {
        /// The first.
        first: Site,
        /// The second.
        second: Site,
        /// The signal slot.
        signal_slot: SignalSlotName,
    },
    /// A signal slot may be signalled for a later chunk before the earlier signal was consumed.
    #[error(
        "{signal} chunk {chunk} may signal {signal_slot} before {wait} has consumed the signal of chunk 0 in it"
    )]
    SignalSlotReused {
        /// The signal or put.
        signal: Site,
        /// The wait.
        wait: Site,
        /// The signal slot.
        signal_slot: SignalSlotName,
        /// The chunk.
        chunk: u32,
    },
    /// Steps wait for each other.
    #[error("deadlock: {}", cycle_text(.cycle))]
    Deadlock {
        /// Each cannot be before the next one is, and the last not before the first.
        cycle: Vec<Site>,
    },
    /// Two accesses to the same memory, at least one of them a write, in no order.
    #[error("race: {first}, and {second}, in no order")]
    Race {
        /// One.
        first: Box<StepAccess>,
        /// The other.
        second: Box<StepAccess>,
    },
    /// Another rank's memory is touched before a signal of that rank to this one.
    #[error("{access} before it has waited for a signal of rank {owner}", owner = access.place.rank)]
    TouchedEarly {
        /// The access.
        access: Box<StepAccess>,
    },
    /// Another rank's memory is touched after that rank may have ended.
    #[error("{access}, and rank {owner} may end before that is over", owner = access.place.rank)]
    TouchedLate {
        /// The access.
        access: Box<StepAccess>,
    },
    /// A place is read in which nothing has been written.
    #[error("{site} reads {place}, in which nothing has been written")]
    Undefined {
        /// The step.
        site: Site,
        /// The place.
        place: Place,
    },
    /// A contribution would be in a result twice.
    #[error("{site} counts the contribution of rank {contributor} twice, in {place}")]
    CountedTwice {
        /// The step.
        site: Site,
        /// The rank that contributes.
        contributor: Rank,
        /// In which source.
        place: Place,
    },
    /// What a step reads depends on which places are the same memory.
    #[error("{site} reads something else in {place} when it is so with rank {rank}: {placement}", rank = place.rank)]
    PlacementMatters {
        /// The step.
        site: Site,
        /// The source.
        place: Place,
        /// With this placement, as compared with all apart.
        placement: Placement,
    },
    /// A rank's output holds nothing at the end.
    #[error("rank {rank} ends without its output of block {block}")]
    OutputMissing {
        /// The rank of the output.
        rank: Rank,
        /// The block.
        block: BlockId,
    },
    /// A rank's output lacks a contribution.
    #[error("rank {rank} ends without the contribution of rank {contributor} in block {block} of its output")]
    ContributionMissing {
        /// The rank of the output.
        rank: Rank,
        /// The block.
        block: BlockId,
        /// The rank that contributes.
        contributor: Rank,
    },
    /// A rank's output holds a contribution that does not belong there.
    #[error("rank {rank} ends with the contribution of rank {contributor} in block {block} of its output")]
    ContributionForeign {
        /// The rank of the output.
        rank: Rank,
        /// The block.
        block: BlockId,
        /// The rank that contributes.
        contributor: Rank,
    },
    /// A rank's output is right only with some placements.
    #[error("rank {rank} ends with something else in block {block} of its output when it is so: {placement}")]
    OutputDepends {
        /// The rank of the output.
        rank: Rank,
        /// The block.
        block: BlockId,
        /// With this placement, as compared with all apart.
        placement: Placement,
    },
    /// Two ranks combine in different order, so their results may differ in the last bits.
    #[error(
        "ranks {one} and {other} end with block {block} combined in different orders: their bits may differ"
    )]
    DifferentBits {
        /// The block.
        block: BlockId,
        /// One rank.
        one: Rank,
        /// The other.
        other: Rank,
    },
    /// A family that does not describe a schedule by its first block.
    #[error("the blocks are no translations of block 0: {flaw}")]
    NoFamily {
        /// Why not.
        flaw: Box<super::family::FamilyFlaw>,
    },
    /// A rank may leave a barrier too early.
    #[error("rank {rank} may leave the barrier before rank {missing} has entered it")]
    LeavesEarly {
        /// The rank.
        rank: Rank,
        /// A rank that has not arrived as far as this rank knows.
        missing: Rank,
    },
}

/// A signal slot in messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SignalSlotName(pub SignalSlot);

impl fmt::Display for SignalSlotName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "slot {}", self.0.0)
    }
}

/// Most steps of a cycle that a message shows.
const CYCLE_SHOWN: usize = 8;

fn cycle_text(cycle: &[Site]) -> String {
    let shown =
        cycle.iter().take(CYCLE_SHOWN).map(Site::to_string).collect::<Vec<_>>().join(", which waits for ");
    let more = match cycle.len().saturating_sub(CYCLE_SHOWN) {
        0 => String::new(),
        more => format!(", and {more} more"),
    };
    format!("{shown}{more}, which waits for the first")
}

/// The name of a part as data, for tables indexed by it: 0 input, 1 output, 2 shared input, 3
/// shared output.
pub(super) fn data_index(part: Part) -> Option<usize> {
    match part {
        Part::Input => Some(0),
        Part::Output => Some(1),
        Part::SharedInput => Some(2),
        Part::SharedOutput => Some(3),
        Part::Scratch(_) => None,
    }
}
