//! Plans: everything that the calls of one shape share, computed once.
//!
//! A [`Program`] is a proof made ready for one rank ([`program`]). It is independent of the number
//! of elements, their type and the operation. A [`Plan`] is a program for calls of one shape, with
//! the places of blocks and chunks ([`layout`]). A run computes only the values that differ from
//! call to call.
//!
//! **Invariant:** both follow from values that all ranks know, and do not change once they are
//! made.

mod layout;
mod program;

use std::sync::Arc;

use pleach_schedule::generate::packed::PacingPolicy;
use pleach_schedule::{BlockId, Part};
use pleach_vocabulary::{Collective, Rank, ReduceOp};

use super::fast_path::FastPlan;
use super::signals::INLINE_DATA_BYTES;
use super::status_board::Record;
use super::{Bytes, Class, StepAddress, Stream, TooLarge};
use crate::call::{Counts, CountsError, Descriptor};
use crate::observe::Shape;
use layout::{Layout, chunking, unit_bytes};

/// The steps of one rank. Independent of the number of elements, their type and the operation.
#[derive(Debug)]
pub struct Program {
    collective: Collective,
    /// Names the schedule on all ranks: part of every run's signature.
    schedule_hash: u64,
    algorithm: String,
    rank: Rank,
    ranks: u32,
    /// How many chunks of a lane may be under way.
    window: u32,
    single_chunk: bool,
    /// The blocks of this rank's lanes; lanes name them by their place here.
    blocks: Vec<BlockExtent>,
    /// The largest share of a block in its part, as the weight of the block and of the part; and
    /// the number of blocks.
    largest_share: (u64, u64, usize),
    lanes: Vec<LaneProgram>,
    steps: Vec<StepProgram>,
    /// Steps and their lags, referred to by range from the steps.
    after: Vec<(u32, u32)>,
    places: Vec<PlaceSlot>,
    /// For the signal slots that this rank waits on, in their order, by peer and number: the lane
    /// that waits.
    waits: Vec<(Rank, u32, u32)>,
    /// Most signal slots any rank keeps for one peer, times the window.
    signal_slots: u32,
    /// Most units of scratch any rank's slots take, times the window.
    slots: u32,
    /// Units that a slot of the largest block takes.
    largest_size: u32,
    /// Set if the links decide the number of chunks. Then all blocks have the same number of
    /// chunks, and each block has its own chunk size.
    pace: Option<PacingPolicy>,
    /// Largest chunk in bytes, if the caller gave one.
    chunk_bytes: Option<usize>,
    /// Largest chunk in bytes, if it differs from that for the host's processors.
    chunk_bytes_max: Option<usize>,
    /// Whether any rank touches another's memory through a mapping.
    maps: bool,
    /// Whether any rank touches another's scratch in that way.
    maps_scratch: bool,
    exposes_input: bool,
    exposes_output: bool,
    /// Whether only the rank that gives a part and the rank that gets it have lanes for it.
    is_private: bool,
    /// Peers that signal this rank in a run. A peer may write to this rank again only when it knows
    /// this rank's progress.
    signalling: Vec<Rank>,
    /// The signalling peers that this rank does not signal: they learn of its progress by credits
    /// alone.
    unsignalled: Vec<Rank>,
    /// All ranks that this rank exchanges signals or bytes with in a run. Each of them has this
    /// rank among its own.
    peers: Vec<Rank>,
}

/// Where a block lies in its part, in weights.
#[derive(Clone, Copy, Debug)]
struct BlockExtent {
    part: u32,
    before: u64,
    weight: u64,
    /// The weight of all blocks of the part.
    total: u64,
    /// Units of scratch that a chunk takes: in proportion to the block's share, if chunk sizes are.
    size: u32,
}

#[derive(Clone, Copy, Debug)]
struct LaneProgram {
    /// Its place in [`Program::blocks`].
    block: u32,
    /// The block's number in the schedule.
    block_id: BlockId,
    first_step: u32,
    steps: u32,
}

/// A step, with the range in [`Program::after`] of the steps that it comes after.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepProgram {
    op: OpProgram,
    after: (u32, u32),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum OpProgram {
    Signal {
        to: Rank,
        signal_slot: u32,
    },
    Put(PutProgram),
    /// `into`: where the data of the signal go.
    Wait {
        from: Rank,
        signal_slot: u32,
        into: Option<PlaceSlot>,
    },
    /// Ranges of [`Program::places`].
    Reduce {
        from: (u32, u32),
        into: (u32, u32),
        completes: bool,
    },
}

/// The places and the signal slot of a put.
#[derive(Clone, Copy, Debug)]
pub(super) struct PutProgram {
    pub(super) to: Rank,
    pub(super) signal_slot: u32,
    pub(super) src: PlaceSlot,
    pub(super) dst: PlaceSlot,
    /// Slot to which the source is copied if it is not registered.
    pub(super) bounce: u32,
}

/// A place with its slot, in units of scratch from the first slot on. The slot of a shared part is
/// that of the window which takes its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlaceSlot {
    pub(super) rank: Rank,
    pub(super) part: Part,
    pub(super) slot: u32,
}

/// No slot: the part needs none.
pub(super) const NO_SLOT: u32 = u32::MAX;

impl Program {
    /// The collective it carries out.
    #[must_use]
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// The name of its algorithm.
    #[must_use]
    pub fn algorithm(&self) -> &str {
        &self.algorithm
    }

    /// The ranks that must be connected before a run begins.
    pub(crate) fn peers(&self) -> &[Rank] {
        &self.peers
    }

    /// Peers to which this rank sends a credit after a run. With `is_alone` no other run is under
    /// way, and the signals of the next run tell the other peers.
    pub(super) fn credited(&self, is_alone: bool) -> &[Rank] {
        if is_alone { &self.unsignalled } else { &self.signalling }
    }

    fn steps_of(&self, lane: &LaneProgram) -> &[StepProgram] {
        &self.steps[lane.first_step as usize..(lane.first_step + lane.steps) as usize]
    }
}

/// A program for a number of elements of a type, reduced by an operation. See the module.
#[derive(Debug)]
pub struct Plan {
    program: Arc<Program>,
    descriptor: Descriptor,
    counts: Counts,
    /// The signature of the call itself: the same on all ranks for the same call.
    signature: u64,
    stream: Stream,
    class: Class,
    /// Bytes of a unit of scratch.
    unit_bytes: usize,
    layout: Layout,
    /// Calls of the same shape are counted together.
    shape: Shape,
    /// Data travel in the signal slots themselves.
    is_inline: bool,
    /// See [`Plan::untouched_by_host`].
    is_untouched_by_host: bool,
    lanes: Vec<LanePlan>,
    /// The divisor of an average.
    divide_by: u32,
    /// Steps of all chunks that can be under way.
    states: u32,
    /// How many chunks a lane may be ahead of the slowest one.
    skew_limit: u32,
    /// By rank: how many bytes of puts to it may be under way. Empty if the links do not decide the
    /// pace.
    under_way_max: Vec<u64>,
    /// The steps of a call on the fast path, if its calls can take it.
    fast: Option<FastPlan>,
}

#[derive(Clone, Copy, Debug)]
struct LanePlan {
    chunks: u32,
    /// The number of the lane's first state.
    states: u32,
}

/// Why a plan cannot be made.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The schedule does not fit.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// The counts do not fit the schedule.
    #[error(transparent)]
    Counts(#[from] CountsError),
}

/// By rank: how many bytes of puts to it may be under way, if a chunk of every tree takes
/// `round_ns`. This is the number of bytes that go to the rank in a round trip at the pace of the
/// links.
fn in_round_trip(program: &Program, layout: &Layout, pace: &PacingPolicy, round_ns: u64) -> Vec<u64> {
    let mut bytes = vec![0u64; program.ranks as usize];
    for lane in &program.lanes {
        for step in program.steps_of(lane) {
            if let OpProgram::Put(put) = &step.op {
                bytes[put.to as usize] += layout.chunk_bytes(lane.block, 0) as u64;
            }
        }
    }
    let share = |bytes: u64| u128::from(bytes) * u128::from(pace.round_trip_ns) / u128::from(round_ns);
    bytes.into_iter().map(|bytes| u64::try_from(share(bytes)).unwrap_or(u64::MAX)).collect()
}

impl Plan {
    /// The plan of calls of this shape by this program. The lengths of parts become the
    /// descriptor's amount.
    pub fn new(program: Arc<Program>, mut descriptor: Descriptor, counts: Counts) -> Result<Self, PlanError> {
        let (collective, place) = (program.collective, (program.rank, program.ranks));
        counts.check_for(collective, program.ranks, program.is_private)?;
        descriptor.amount = counts.amount();
        let element_bytes = descriptor.data_type.bytes();
        counts.check_sum(collective, place, element_bytes)?;
        let longest_bytes = counts.longest().map(|count| count * element_bytes);
        let (chunk_bytes, class) = chunking(&program, longest_bytes)?;
        let unit_bytes = unit_bytes(&program, chunk_bytes);
        let layout = Layout::new(&program, &counts, element_bytes, (chunk_bytes, unit_bytes))?;
        let bytes = counts.elements(collective, place).saturating_mul(element_bytes) as u64;
        let mut states = 0;
        let mut lanes = Vec::with_capacity(program.lanes.len());
        for lane in &program.lanes {
            lanes.push(LanePlan { chunks: layout.chunks(lane.block), states });
            states += lane.steps * program.window;
        }
        let chunks = lanes.iter().map(|lane| lane.chunks).max().unwrap_or(1);
        let whole_bytes =
            (longest_bytes.unwrap_or(0) as u64).saturating_mul(collective.parts(program.ranks).into());
        let under_way_max = program.pace.map_or(Vec::new(), |pace| {
            in_round_trip(&program, &layout, &pace, pace.round_ns(whole_bytes, chunks))
        });
        // Where lengths differ, more must be compared than the fast path compares.
        let is_even = matches!(counts, Counts::Each(_));
        let mut plan = Self {
            signature: descriptor.signature(program.schedule_hash, chunk_bytes),
            stream: Stream::of(collective),
            is_inline: !program.maps && chunk_bytes <= INLINE_DATA_BYTES,
            shape: Shape::new(collective, &program.algorithm, bytes),
            skew_limit: program.pace.map_or(u32::MAX, |pace| pace.skew_limit_of(whole_bytes, chunks)),
            is_untouched_by_host: false,
            fast: None,
            descriptor,
            counts,
            class,
            unit_bytes,
            layout,
            lanes,
            divide_by: program.ranks,
            states,
            under_way_max,
            program,
        };
        plan.fast = if is_even { FastPlan::new(&plan, chunk_bytes) } else { None };
        Ok(plan)
    }

    /// The same plan; averages are divided by this number, not by that of the ranks.
    #[must_use]
    pub fn dividing_by(mut self, divide_by: u32) -> Self {
        if let Some(fast) = &mut self.fast {
            fast.divide_averages_by(divide_by);
        }
        Self { divide_by, ..self }
    }

    /// The same plan, for memory that the caller's processor must not touch: that processor copies
    /// none of it, and no data travel in signal slots.
    #[must_use]
    pub fn untouched_by_host(self) -> Self {
        Self { is_inline: false, is_untouched_by_host: true, fast: None, ..self }
    }

    /// Checks that input and output are as long as the counts say. If all parts have one length,
    /// the caller has checked it.
    pub(super) fn check_lengths(&self, input: &Bytes, output: &Bytes) -> Result<(), CountsError> {
        let Program { collective, rank, ranks, .. } = *self.program;
        let element_bytes = self.descriptor.data_type.bytes();
        self.counts.check_lengths(collective, (rank, ranks), element_bytes, [input.len(), output.len()])
    }

    /// As [`Plan::check_lengths`], for callers that have checked no length.
    pub(crate) fn expect_all_bytes(&self, input: &Bytes, output: &Bytes) -> Result<(), CountsError> {
        self.check_lengths(input, output)?;
        let Counts::Each(count) = self.counts else { return Ok(()) };
        let Program { collective, rank, ranks, .. } = *self.program;
        let expect = |what, parts: usize, actual| {
            let expected = parts * count * self.descriptor.data_type.bytes();
            if actual == expected { Ok(()) } else { Err(CountsError::Length { what, expected, actual }) }
        };
        expect("input", collective.input_parts(rank, ranks).len(), input.len())?;
        expect("output", collective.output_parts(rank, ranks).len(), output.len())
    }

    /// The rank of the plan, and the number of ranks.
    pub(crate) fn place(&self) -> (Rank, u32) {
        (self.program.rank, self.program.ranks)
    }

    /// The record of a call of this plan.
    #[inline]
    pub(super) fn record(&self, run: u64, history: u64) -> Record {
        Record::new(run, self.signature, history, &self.descriptor)
    }

    /// The history that signals between this rank and a peer carry; see the module of counts.
    pub(super) fn mark(&self, history: u64, peer: Rank) -> u64 {
        match &self.counts {
            Counts::Each(_) | Counts::Listed(_) => history,
            Counts::Paired(paired) => {
                paired.between(self.program.rank, peer).map_or(history, |between| between.mark(history))
            }
        }
    }

    /// Whether the links decide the pace of its calls.
    #[inline]
    pub(crate) fn is_paced(&self) -> bool {
        !self.under_way_max.is_empty()
    }

    /// The number of blocks of this rank.
    pub(crate) fn blocks(&self) -> u32 {
        self.program.blocks.len() as u32
    }

    /// The number of chunks of a block, by its place among those of this rank.
    pub(crate) fn block_chunks(&self, block: u32) -> u32 {
        self.layout.chunks(block)
    }

    /// The length of a chunk of a block, by its place among those of this rank, in bytes.
    pub(crate) fn block_chunk_bytes(&self, block: u32, chunk: u32) -> usize {
        self.layout.chunk_bytes(block, chunk)
    }

    /// How many bytes of puts to a peer may be under way, if links decide the pace and a chunk of
    /// every tree brings it so many.
    pub(crate) fn under_way_share(&self, bytes: u64) -> u64 {
        let Some(pace) = &self.program.pace else { return u64::MAX };
        let chunks = self.lanes.iter().map(|lane| lane.chunks).max().unwrap_or(1);
        let parts = u64::from(self.program.collective.parts(self.program.ranks));
        let part_bytes = self.counts.longest().unwrap_or(0) * self.descriptor.data_type.bytes();
        let round_ns = pace.round_ns((part_bytes as u64).saturating_mul(parts), chunks);
        let share = u128::from(bytes) * u128::from(pace.round_trip_ns) / u128::from(round_ns);
        u64::try_from(share).unwrap_or(u64::MAX)
    }

    /// By rank: how many bytes of puts to it may be under way, if the links decide the pace.
    pub(super) fn under_way_max(&self) -> &[u64] {
        &self.under_way_max
    }

    /// How many chunks a lane may be ahead of the slowest one.
    pub(crate) fn skew_limit(&self) -> u32 {
        self.skew_limit
    }

    /// The steps of a call on the fast path, if its calls can take it.
    #[inline]
    pub(super) fn fast(&self) -> Option<&FastPlan> {
        self.fast.as_ref()
    }

    #[inline]
    pub(super) fn stream(&self) -> Stream {
        self.stream
    }

    #[inline]
    pub(super) fn class(&self) -> Class {
        self.class
    }

    #[inline]
    pub(super) fn signature(&self) -> u64 {
        self.signature
    }

    #[inline]
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }

    #[inline]
    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether data travel in the signal slots themselves.
    #[inline]
    pub(crate) fn is_inline(&self) -> bool {
        self.is_inline
    }

    /// Whether any rank touches another's memory through a mapping.
    pub(super) fn maps(&self) -> bool {
        self.program.maps
    }

    /// Whether no rank reads another's scratch, and the host's processors may write to it.
    pub(crate) fn keeps_scratch_to_itself(&self) -> bool {
        !self.is_inline && !self.program.maps_scratch && !self.is_untouched_by_host
    }

    /// Whether peers touch this rank's input or output.
    pub(super) fn exposes_buffers(&self) -> bool {
        self.program.exposes_input || self.program.exposes_output
    }

    /// Offsets, in this rank's input and output, of the buffers that it announces to a peer, in
    /// bytes.
    pub(super) fn buffer_starts(&self, peer: Rank) -> (u64, u64) {
        self.layout.buffer_starts(peer)
    }

    /// How many chunks of a lane may be under way.
    #[inline]
    pub(crate) fn window(&self) -> u32 {
        self.program.window
    }

    /// The lanes of this rank, by number.
    #[inline]
    pub(super) fn lanes(&self) -> std::ops::Range<u32> {
        0..self.lanes.len() as u32
    }

    #[inline]
    pub(super) fn chunks(&self, lane: u32) -> u32 {
        self.lanes[lane as usize].chunks
    }

    #[inline]
    pub(super) fn steps(&self, lane: u32) -> &[StepProgram] {
        self.program.steps_of(&self.program.lanes[lane as usize])
    }

    /// The number of states: of all steps of chunks that can be under way.
    pub(super) fn states(&self) -> u32 {
        self.states
    }

    /// Number of the state of a step.
    #[inline]
    pub(super) fn state_of(&self, address: StepAddress) -> usize {
        let StepAddress { lane, slot, step } = address;
        (self.lanes[lane as usize].states + slot * self.program.lanes[lane as usize].steps + step) as usize
    }

    /// The lane that waits on a signal slot, counted from the first one that this rank waits on.
    pub(super) fn lane_waiting_on(&self, from: Rank, signal_slot: u32) -> Option<u32> {
        let (waits, number) = (&self.program.waits, signal_slot / self.program.window);
        let place = waits.partition_point(|&(peer, slot, _)| (peer, slot) < (from, number));
        let &(peer, slot, lane) = waits.get(place)?;
        ((peer, slot) == (from, number)).then_some(lane)
    }

    #[inline]
    pub(super) fn places(&self, range: (u32, u32)) -> &[PlaceSlot] {
        &self.program.places[range.0 as usize..range.1 as usize]
    }

    /// Whether the place is one of this rank.
    #[inline]
    pub(super) fn is_own(&self, place: &PlaceSlot) -> bool {
        place.rank == self.program.rank
    }

    /// The divisor of a reduction. Only a reduction that completes an average divides.
    #[inline]
    pub(super) fn divisor(&self, completes: bool) -> u32 {
        if completes && self.descriptor.op == ReduceOp::Avg { self.divide_by } else { 1 }
    }

    /// A step of a chunk of a lane.
    #[inline]
    pub(super) fn chunk_step(&self, lane: u32, chunk: u32, step: u32) -> ChunkStep<'_> {
        let address = StepAddress { lane, slot: chunk % self.program.window, step };
        ChunkStep { plan: self, lane: &self.program.lanes[lane as usize], address, chunk }
    }

    /// Whether the plan is for parts of these lengths. The descriptor says so only if all parts
    /// have one length.
    #[must_use]
    #[inline]
    pub fn is_for(&self, counts: &Counts) -> bool {
        self.counts == *counts
    }

    /// The calls of this plan.
    #[must_use]
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// The program that carries the calls out.
    #[must_use]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }
}

impl StepProgram {
    #[inline]
    pub(super) fn op(&self) -> &OpProgram {
        &self.op
    }
}

/// A step of a chunk: where its signals and its bytes are.
#[derive(Clone, Copy)]
pub(super) struct ChunkStep<'a> {
    plan: &'a Plan,
    lane: &'a LaneProgram,
    address: StepAddress,
    chunk: u32,
}

impl<'a> ChunkStep<'a> {
    #[inline]
    pub(super) fn plan(&self) -> &'a Plan {
        self.plan
    }

    #[inline]
    pub(super) fn address(&self) -> StepAddress {
        self.address
    }

    #[inline]
    pub(super) fn chunk(&self) -> u32 {
        self.chunk
    }

    /// The step of this number in the same chunk.
    #[inline]
    pub(super) fn with_step(self, step: u32) -> Self {
        Self { address: StepAddress { step, ..self.address }, ..self }
    }

    #[inline]
    pub(super) fn op(&self) -> &'a OpProgram {
        &self.plan.program.steps[(self.lane.first_step + self.address.step) as usize].op
    }

    /// The steps that must be complete before, each with the number of chunks by which it is
    /// earlier.
    #[inline]
    pub(super) fn after(&self) -> &'a [(u32, u32)] {
        let program = &*self.plan.program;
        let (first, end) = program.steps[(self.lane.first_step + self.address.step) as usize].after;
        &program.after[first as usize..end as usize]
    }

    /// Length of the chunk.
    #[inline]
    pub(super) fn bytes(&self) -> usize {
        self.plan.layout.chunk_bytes(self.lane.block, self.chunk)
    }

    /// Offset of the chunk in the input or output of the place's rank, in bytes.
    #[inline]
    pub(super) fn buffer_offset(&self, place: PlaceSlot) -> usize {
        self.plan.layout.offset(&self.plan.program, self.lane.block, self.chunk, place)
    }

    /// Length of the buffer that a peer has announced, in bytes.
    pub(super) fn buffer_bytes(&self, place: PlaceSlot) -> u64 {
        self.plan.layout.buffer_bytes(&self.plan.program, self.lane.block, place) as u64
    }

    /// Offset, in its bank, of the chunk's instance of a slot of scratch, in bytes.
    #[inline]
    pub(super) fn scratch_offset(&self, slot: u32) -> u64 {
        let program = &*self.plan.program;
        let size = program.blocks[self.lane.block as usize].size;
        u64::from(slot * program.window + self.address.slot * size) * self.plan.unit_bytes as u64
    }

    /// The chunk's instance of a signal slot, counted from the first one of its bank.
    #[inline]
    pub(super) fn signal_offset(&self, signal_slot: u32) -> u32 {
        signal_slot * self.plan.program.window + self.address.slot
    }
}

/// The step in words, for the texts of faults.
impl std::fmt::Display for ChunkStep<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { lane, address, chunk, .. } = self;
        write!(formatter, "block {} chunk {chunk} lane {} step {}", lane.block_id, address.lane, address.step)
    }
}

#[cfg(test)]
mod tests {
    use pleach_packing::topology::preset;
    use pleach_schedule::cost::Platform;
    use pleach_schedule::generate::{Access, Algorithm, family};
    use pleach_schedule::verify::{Proof, verify, verify_family};
    use pleach_schedule::wiring::Wiring;
    use pleach_vocabulary::{Collective, DataType, ReduceOp};

    use super::*;
    use crate::call::counts::CALL_BYTES_MAX;
    use crate::group::Planner;

    #[test]
    fn trees_of_all_weights_have_as_many_chunks_each_no_longer_than_the_scratch_of_its_own() {
        for (name, differ) in [("mi250:1", true), ("dgx-1v", true), ("torus:3x5", false), ("mesh:4", false)] {
            let wiring = Arc::new(Wiring::new(preset(name).expect("a preset")));
            let mut planner = Planner::new(0, Platform::wired(wiring), None);
            let mut sizes = 1;
            for bytes in [4 << 10, 1 << 20, 100_000_004, 256 << 20] {
                let collective = Collective::AllReduce;
                let program = planner.program(collective, bytes, None).expect("there is one");
                let count = bytes / 4;
                let descriptor = Descriptor {
                    collective,
                    amount: Counts::Each(count).amount(),
                    data_type: DataType::F32,
                    op: ReduceOp::Sum,
                    tag: 0,
                };
                let plan = Plan::new(program, descriptor, Counts::Each(count)).expect("it fits");
                let program = &plan.program;
                sizes = sizes.max(program.largest_size);
                let chunks: Vec<u32> = plan.lanes.iter().map(|lane| lane.chunks).collect();
                let most = chunks.iter().max().expect("some");
                assert!(chunks.iter().all(|chunks| chunks == most || bytes < 1 << 20), "{name}: {chunks:?}");
                for lane in &program.lanes {
                    let room = program.blocks[lane.block as usize].size as usize * plan.unit_bytes;
                    assert!(plan.layout.chunk_bytes(lane.block, 0) <= room, "{name}, {bytes} bytes");
                }
                assert!(
                    u64::from(program.slots) * plan.unit_bytes as u64 <= super::super::LARGE_SCRATCH_BYTES,
                    "{name}, {bytes} bytes"
                );
            }
            assert_eq!(sizes > 1, differ, "{name}: whether trees have several weights");
        }
    }

    /// Slots, signal slots and all else of a family's program are those of the whole schedule.
    #[test]
    fn the_program_of_a_family_is_that_of_its_whole_schedule() {
        let mut compared = 0;
        for ranks in [2, 3, 4, 6, 8, 9, 12, 16] {
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
                for name in Algorithm::names(collective) {
                    let rows = (1..=ranks).filter(|rows| ranks % rows == 0 && rows * rows <= ranks).max();
                    let shape = rows.map(|rows| format!("{rows}x{}", ranks / rows)).expect("1 at least");
                    let name = name.replace("AxB", &shape).replace("HxR", &shape);
                    let algorithm = Algorithm::named(&name, collective).expect("a name");
                    for access in [Access::Put, Access::Mapped] {
                        let Ok(Some(family)) = family(collective, &algorithm, ranks, access) else {
                            continue;
                        };
                        let proof = verify_family(family).expect("it is right");
                        let whole = verify(proof.schedule().clone()).expect("it is right");
                        for rank in 0..ranks {
                            let text = |proof: &Proof| {
                                let program = Program::new(proof, rank, &name);
                                format!("{:?}", Program { schedule_hash: 0, ..program })
                            };
                            assert_eq!(
                                text(&proof),
                                text(&whole),
                                "{collective} by {name}, {access}: {rank}"
                            );
                            compared += 1;
                        }
                    }
                }
            }
        }
        assert!(compared > 1000, "{compared}");
    }

    #[test]
    fn counts_of_more_bytes_than_there_are_addresses_are_refused() {
        let group =
            pleach_schedule::generate(Collective::Gather { root: 0 }, &Algorithm::Direct, 3, Access::Put);
        let proof = verify(group.expect("there is one")).expect("it is right");
        let program = Arc::new(Program::new(&proof, 1, "direct"));
        let counts =
            |long| [Counts::Each(long), Counts::listed(&[long, 1, 2]), Counts::listed(&[1, 2, long])];
        let (data_type, op) = (DataType::F64, ReduceOp::Sum);
        let plan = |counts: Counts| {
            let (collective, amount) = (Collective::Gather { root: 0 }, counts.amount());
            Plan::new(program.clone(), Descriptor { collective, amount, data_type, op, tag: 0 }, counts)
        };
        for long in [CALL_BYTES_MAX / 8 + 1, usize::MAX / 8, usize::MAX / 8 + 1, usize::MAX / 2, usize::MAX] {
            for counts in counts(long) {
                let refused = plan(counts.clone()).expect_err("it is too long");
                assert!(matches!(refused, PlanError::Counts(CountsError::TooLong)), "{counts:?}: {refused}");
            }
        }
        assert!(counts(CALL_BYTES_MAX / 64).into_iter().all(|counts| plan(counts).is_ok()));
    }
}
