//! A plan: all that the calls of one shape share, worked out once, so that a call computes nothing
//! but what differs.

use std::sync::Arc;

use pleach_schedule::generate::packed::PacingPolicy;
use pleach_vocabulary::Rank;

use super::bank::{self, Class, TooLarge};
use super::bytes::Bytes;
use super::header::INLINE_DATA_BYTES;
use super::layout::Layout;
use super::message::Record;
use super::program::{OpProgram, Program};
use super::short::Short;
use super::stream::Stream;
use crate::call::{Counts, CountsError, Descriptor};
use crate::observe::Shape;

/// A program for so many elements of a type, reduced by an operation. See the module.
#[derive(Debug)]
pub struct Plan {
    pub(super) program: Arc<Program>,
    pub(super) descriptor: Descriptor,
    pub(super) counts: Counts,
    /// Of the call itself: the same on all ranks for the same call.
    pub(super) signature: u64,
    pub(super) stream: Stream,
    pub(super) class: Class,
    /// What the slots of scratch are made of.
    pub(super) unit_bytes: usize,
    pub(super) layout: Layout,
    /// What its calls are counted with.
    pub(super) shape: Shape,
    /// Data travel in the signal slots themselves.
    pub(super) inline: bool,
    pub(super) lanes: Vec<LanePlan>,
    /// Steps of all chunks that can be under way.
    pub(super) states: u32,
    /// How many chunks a lane may be ahead of the slowest one.
    pub(super) lead: u32,
    /// By rank: how many bytes of puts to it may be under way, where links set the pace; else
    /// empty.
    pub(super) under_way_max: Vec<u64>,
    /// How it goes the short way, if it can.
    pub(super) short: Option<Short>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LanePlan {
    pub(super) chunks: u32,
    /// Where the states of its steps begin.
    pub(super) states: u32,
}

/// Why there is no such plan.
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

/// By rank: how many bytes of puts may be under way to it, when a chunk of every tree takes so
/// long: as many as go there in a round trip at the pace of the links.
fn in_round_trip(program: &Program, layout: &Layout, pace: &PacingPolicy, round_ns: u64) -> Vec<u64> {
    let mut bytes = vec![0u64; program.ranks as usize];
    for lane in &program.lanes {
        let steps = &program.steps[lane.first_step as usize..(lane.first_step + lane.steps) as usize];
        for step in steps {
            if let OpProgram::Put(put) = &step.op {
                bytes[put.to as usize] += layout.chunk_bytes(lane.block, 0) as u64;
            }
        }
    }
    let share = |bytes: u64| u128::from(bytes) * u128::from(pace.round_trip_ns) / u128::from(round_ns);
    bytes.into_iter().map(|bytes| u64::try_from(share(bytes)).unwrap_or(u64::MAX)).collect()
}

impl Plan {
    /// What carries out calls of this shape by this program, with parts of these lengths, which are
    /// made the descriptor's amount.
    ///
    /// # Errors
    ///
    /// See [`PlanError`].
    pub fn new(program: Arc<Program>, mut descriptor: Descriptor, counts: Counts) -> Result<Self, PlanError> {
        let (collective, place) = (program.collective, (program.rank, program.ranks));
        counts.check_for(collective, program.ranks, program.is_private)?;
        descriptor.amount = counts.amount();
        let element_bytes = descriptor.data_type.bytes();
        counts.check_sum(collective, place, element_bytes)?;
        let longest_bytes = counts.longest().map(|count| count * element_bytes);
        let (chunk_bytes, class) = bank::chunking(&program, longest_bytes)?;
        let unit_bytes = bank::unit_bytes(&program, chunk_bytes);
        let layout = Layout::new(&program, &counts, element_bytes, (chunk_bytes, unit_bytes))?;
        let bytes = counts.elements(collective, place).saturating_mul(element_bytes) as u64;
        let shape = Shape::new(collective, &program.algorithm, bytes);
        let mut states = 0;
        let mut lanes = Vec::with_capacity(program.lanes.len());
        for lane in &program.lanes {
            lanes.push(LanePlan { chunks: layout.chunks(lane.block), states });
            states += lane.steps * program.window;
        }
        let chunks = lanes.iter().map(|lane| lane.chunks).max().unwrap_or(1);
        let whole_bytes =
            (longest_bytes.unwrap_or(0) as u64).saturating_mul(collective.parts(program.ranks).into());
        let lead = program.pace.map_or(u32::MAX, |pace| pace.skew_limit_of(whole_bytes, chunks));
        let under_way_max = program.pace.map_or(Vec::new(), |pace| {
            in_round_trip(&program, &layout, &pace, pace.round_ns(whole_bytes, chunks))
        });
        let inline = !program.maps && chunk_bytes <= INLINE_DATA_BYTES;
        // Where lengths differ there is more to be compared than the short way looks at.
        let is_even = matches!(counts, Counts::Each(_));
        let short =
            if is_even { Short::of(&program, &layout, (chunk_bytes, unit_bytes), &descriptor) } else { None };
        Ok(Self {
            signature: descriptor.signature(program.schedule_hash, chunk_bytes),
            stream: Stream::of(collective),
            inline,
            short,
            descriptor,
            counts,
            class,
            unit_bytes,
            shape,
            layout,
            lanes,
            states,
            lead,
            under_way_max,
            program,
        })
    }

    /// The same for memory that only who computes touches: nothing of it travels in signal slots,
    /// or is copied by the caller's processor.
    #[must_use]
    pub fn untouched_by_host(self) -> Self {
        Self { inline: false, short: None, ..self }
    }

    /// Whether input and output are as long as the counts say; where those are one for all parts,
    /// the caller knows.
    pub(super) fn check_lengths(&self, input: &Bytes, output: &Bytes) -> Result<(), CountsError> {
        let Program { collective, rank, ranks, .. } = *self.program;
        let element_bytes = self.descriptor.data_type.bytes();
        self.counts.check_lengths(collective, (rank, ranks), element_bytes, [input.len(), output.len()])
    }

    /// As [`Plan::check_lengths`], where the caller does not know.
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

    /// Whose plan it is, and among how many ranks.
    pub(crate) fn place(&self) -> (Rank, u32) {
        (self.program.rank, self.program.ranks)
    }

    /// What is told of a call of this plan to those who ask.
    #[inline]
    pub(super) fn record(&self, run: u64, history: u64) -> Record {
        Record { run, signature: self.signature, history, descriptor: self.descriptor.to_words() }
    }

    /// What a signal between this rank and a peer says of the calls so far; see the module of
    /// counts.
    pub(super) fn mark(&self, history: u64, peer: Rank) -> u64 {
        match &self.counts {
            Counts::Each(_) | Counts::Listed(_) => history,
            Counts::Paired(paired) => {
                paired.between(self.program.rank, peer).map_or(history, |between| between.mark(history))
            }
        }
    }

    /// Whether links set the pace of its calls.
    pub(super) fn is_paced(&self) -> bool {
        !self.under_way_max.is_empty()
    }

    /// Whether it is one for parts of these lengths; the descriptor says so only where there is but
    /// one length.
    #[must_use]
    #[inline]
    pub fn is_for(&self, counts: &Counts) -> bool {
        self.counts == *counts
    }

    /// What the calls are.
    #[must_use]
    pub fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// What carries them out.
    #[must_use]
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }
}

#[cfg(test)]
mod tests {
    use pleach_packing::topology::preset;
    use pleach_schedule::cost::Platform;
    use pleach_schedule::generate::{Access, Algorithm};
    use pleach_schedule::verify::verify;
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
                    u64::from(program.slots) * plan.unit_bytes as u64 <= bank::LARGE_SCRATCH_BYTES,
                    "{name}, {bytes} bytes"
                );
            }
            assert_eq!(sizes > 1, differ, "{name}: whether trees have several weights");
        }
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
