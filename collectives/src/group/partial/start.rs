//! How the rounds of a partial all-reduce begin: the ranks compare what they ask for, meet in a
//! group of their own, and make the memory and the plans of the rounds.

#[cfg(test)]
mod absent;

use std::sync::{Arc, Mutex};

use pleach_schedule::Schedule;
use pleach_schedule::verify::expect_partial_rounds;
use pleach_transport::Slice;
use pleach_transport::cuda::PinnedMemory;
use pleach_transport::rendezvous::host_name;
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::super::bound::BoundCall;
use super::super::driver::{Core, Served};
use super::super::error::{CollectiveError, NotExact};
use super::super::gpu::GpuBuffer;
use super::super::{Group, Progress};
use super::{PartialError, RawPartial};
use crate::call::Counts;
use crate::compute::cuda::{CudaCompute, StagingSpace};
use crate::compute::{Compute, IsolatedCompute};
use crate::engine::{Bytes, Plan, Program, memory_for_peers};
use crate::exact::BlockSums;
use crate::partial::{
    Activation, CONTRIBUTIONS, DataPlans, EXACT_CONTRIBUTIONS, ExactPlans, ExactSums, Late, Rounds,
    RoundsMemory, SetSum, Terms, WORDS, is_set_told, neutral,
};

/// Most ranks of rounds whose sums of floats are exact and in which a late contribution may go
/// beside another one of its rank: exact sums have room for 4096 numbers.
const EXACT_RANKS_MAX: u32 = 2048;

/// Sets the comparison of terms, and what ranks tell of their hosts, apart from a caller's own
/// all-gather.
const PARTIAL_MARK: u32 = 0x5041_5254;

/// Words of a host's name; longer names are cut.
const HOST_WORDS: usize = 8;

/// The plans of a group's rounds. **Invariant:** each is of a schedule that admits partial rounds.
struct RoundPlans<'a> {
    core: &'a mut Core,
    /// The programs whose schedules were found to.
    admitted: Vec<Arc<Program>>,
}

impl RoundPlans<'_> {
    /// The plan of an all-reduce of the group.
    fn all_reduce(
        &mut self,
        group: &Group,
        data_type: DataType,
        op: ReduceOp,
        len: usize,
    ) -> Result<Arc<Plan>, PartialError> {
        let plan = group.all_reduce_plan(self.core, data_type, op, len)?;
        let program = plan.program();
        if !self.admitted.iter().any(|known| Arc::ptr_eq(known, program)) {
            expect_admitted(program.algorithm(), &self.core.planner.schedule_of(program)?)?;
            self.admitted.push(program.clone());
        }
        Ok(plan)
    }
}

fn expect_admitted(algorithm: &str, schedule: &Schedule) -> Result<(), PartialError> {
    let named = |reason| PartialError::Schedule { algorithm: algorithm.to_owned(), reason };
    expect_partial_rounds(schedule).map_err(named)
}

/// Fills this many bytes of memory with copies of an element, piece by piece: the system may not
/// have the memory for a copy of the whole.
fn fill(
    bytes: usize,
    element: &[u8],
    mut store: impl FnMut(usize, &[u8]) -> Result<(), CollectiveError>,
) -> Result<(), CollectiveError> {
    const PIECE_BYTES: usize = 64 << 10;
    let piece = element.repeat(PIECE_BYTES / element.len().max(1));
    (0..bytes).step_by(piece.len()).try_for_each(|start| {
        let end = bytes.min(start + piece.len());
        store(start, &piece[..end - start])
    })
}

impl Group {
    /// Compares what the ranks ask for. Returns the names of their hosts, for errors.
    fn agree_on(&self, terms: Terms) -> Result<Vec<String>, PartialError> {
        let mut own = [0; WORDS + HOST_WORDS];
        own[..WORDS].copy_from_slice(&terms.to_words());
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut own[WORDS..]);
        let host = self.shared.options.world.host.clone().unwrap_or_else(host_name);
        into.iter_mut().zip(host.trim().bytes()).for_each(|(into, byte)| *into = byte);
        let mut all = vec![0; own.len() * self.world_size() as usize];
        let plain = Self { variant: None, stream: None, ..self.tagged_further(PARTIAL_MARK) };
        plain.gather_words(&own, &mut all)?;
        let rows = || all.chunks_exact(own.len()).map(|row| row.split_at(WORDS));
        let all_terms: Vec<u64> = rows().flat_map(|(terms, _)| terms).copied().collect();
        if let Some((rank, theirs)) = terms.find_difference(&all_terms) {
            return Err(PartialError::Differs {
                rank,
                theirs,
                own_rank: self.rank(),
                own: terms.to_string(),
            });
        }
        let name = |(_, words): (_, &[u64])| {
            let text = String::from_utf8_lossy(bytemuck::cast_slice(words)).into_owned();
            text.chars().filter(|letter| !letter.is_control()).collect()
        };
        Ok(rows().map(name).collect())
    }

    /// Begins the rounds in this group, which nothing else uses, for the group `observed`.
    fn into_partial(
        self,
        terms: Terms,
        hosts: Vec<String>,
        observed: &Self,
    ) -> Result<RawPartial, PartialError> {
        let Terms { len, data_type, activation, .. } = terms;
        let is_exact = self.is_exact(data_type, activation.op())?;
        let exact = is_exact.then(|| BlockSums::new(data_type, len));
        let bytes = len.saturating_mul(data_type.bytes());
        let mut on_gpu = Vec::new();
        let mut memory = || self.memory_for_rounds(bytes, &mut on_gpu);
        let buffers = if is_exact { EXACT_CONTRIBUTIONS } else { CONTRIBUTIONS };
        let contributions = (0..buffers).map(|_| memory()).collect::<Result<Vec<_>, _>>()?;
        let results = [memory()?, memory()?, memory()?];
        let corrects = activation.late_rule() == Late::Correct;
        let corrections =
            (0..if corrects { 3 } else { 0 }).map(|_| memory()).collect::<Result<Vec<_>, _>>()?;
        let neutral_bytes = if is_exact { Bytes::None } else { memory()? };
        let element = neutral(data_type, activation.op());
        fill(neutral_bytes.len(), &element, |start, piece| match (&neutral_bytes, on_gpu.last_mut()) {
            (_, Some(buffer)) => buffer.store_at(start, piece),
            (Bytes::Registered(slice), None) => {
                slice.slice(start..start + piece.len()).expect("inside of the slice").store(piece);
                Ok(())
            }
            _ => Ok(()),
        })?;
        let place = (self.rank(), self.world_size());
        let set_words = SetSum::words(&terms, place.1);
        let set_memory = if is_set_told(is_exact, place.1, len) {
            None
        } else {
            Some([self.memory_for_set(set_words)?, self.memory_for_set(set_words)?])
        };
        let memory = RoundsMemory {
            contributions: contributions.clone(),
            results: results.clone(),
            corrections: corrections.clone(),
            neutral: neutral_bytes,
        };
        let compute: Box<dyn Compute> = match self.gpu() {
            Some(gpu) => Box::new(CudaCompute::new(gpu, StagingSpace::Host).map_err(CollectiveError::from)?),
            None => Box::new(IsolatedCompute::default()),
        };
        self.shared.begin_progress()?;
        let mut core = self.shared.driver.lock();
        if self.gpu().is_none() {
            core.engine.compute_by(Box::new(IsolatedCompute::default()));
        }
        core.planner.signal_sleeping_ranks();
        let plain = Self { variant: None, ..self.clone() };
        let mut plans = RoundPlans { core: &mut core, admitted: Vec::new() };
        let data = match exact {
            Some(sums) => self.exact_plans(&mut plans, sums, corrects)?,
            None => {
                let op = Rounds::data_op(&terms);
                DataPlans::Combined(plans.all_reduce(&self, data_type, op, len)?)
            }
        };
        let set = match set_memory {
            None => None,
            Some(memory) => {
                let plan = plans.all_reduce(&plain, DataType::U64, ReduceOp::Sum, set_words)?;
                Some(SetSum::new(place, plan, memory))
            }
        };
        let rounds = Rounds::new(place, &terms, self.timeout, (set, data), memory);
        let rounds = rounds.on_hosts(hosts);
        let rounds = rounds.counted_by(observed.shared.driver.observed().observations().begin_rounds());
        core.served = Some(Served::Rounds(Box::new(rounds)));
        drop(core);
        self.shared.wake_progress();
        Ok(RawPartial {
            group: self,
            terms,
            contributions,
            results,
            corrections,
            exact,
            compute: Mutex::new(compute),
            on_gpu,
            current: 0,
            started: None,
            has_finished: false,
        })
    }

    /// Memory of the kind that the group works on.
    fn memory_for_rounds(
        &self,
        bytes: usize,
        on_gpu: &mut Vec<GpuBuffer<u8>>,
    ) -> Result<Bytes, CollectiveError> {
        if self.gpu().is_none() {
            return Ok(Bytes::Registered(self.new_registered(bytes)?));
        }
        let buffer = self.gpu_buffer(bytes)?;
        let named = buffer.operand(self.shared.number)?.bytes;
        on_gpu.push(buffer);
        Ok(named)
    }

    /// Memory on the host for a set of so many words, which a GPU reaches as well.
    fn memory_for_set(&self, words: usize) -> Result<Slice, CollectiveError> {
        let bytes = words * size_of::<u64>();
        let Some(gpu) = self.gpu() else { return self.new_registered(bytes) };
        let memory = memory_for_peers(bytes)
            .map_err(|source| CollectiveError::Memory { bytes, source: Arc::new(source) })?;
        self.registered(PinnedMemory::new(gpu, memory)?)
    }

    /// The plans of exact rounds.
    fn exact_plans(
        &self,
        plans: &mut RoundPlans<'_>,
        sums: BlockSums,
        corrects: bool,
    ) -> Result<DataPlans, PartialError> {
        let parts_max = if corrects { 2 } else { 1 };
        let plain = Self { variant: None, ..self.clone() };
        let facts_len = ExactSums::facts_len(sums, parts_max);
        let facts = plans.all_reduce(&plain, DataType::I32, ReduceOp::Max, facts_len)?;
        let possible = sums.possible_words().into_iter();
        let by_words =
            possible.map(|words| Ok((words, plans.all_reduce(self, DataType::I64, ReduceOp::Sum, words)?)));
        let plans = ExactPlans { facts, words: by_words.collect::<Result<_, PartialError>>()? };
        let exact = ExactSums::new(sums, plans, parts_max, EXACT_CONTRIBUTIONS);
        Ok(DataPlans::Exact(Box::new(exact)))
    }

    fn all_reduce_plan(
        &self,
        core: &mut Core,
        data_type: DataType,
        op: ReduceOp,
        len: usize,
    ) -> Result<Arc<Plan>, CollectiveError> {
        let (collective, counts) = (Collective::AllReduce, Counts::Each(len));
        let call = BoundCall::new(collective, data_type, op, counts, Bytes::None, Bytes::None);
        self.plan(&mut core.planner, &call).cloned()
    }
}

impl RawPartial {
    /// As [`Group::partial`].
    ///
    /// # Errors
    ///
    /// See [`PartialError`]; the same on all ranks.
    pub fn new(
        group: &Group,
        len: usize,
        data_type: DataType,
        activation: Activation,
    ) -> Result<Self, PartialError> {
        group.expect_host()?;
        Self::in_any_memory(group, len, data_type, activation)
    }

    /// The same in the memory that the group works on.
    pub(crate) fn in_any_memory(
        group: &Group,
        len: usize,
        data_type: DataType,
        activation: Activation,
    ) -> Result<Self, PartialError> {
        group.expect_open()?;
        group.expect_stream(len)?;
        let has_thread = group.shared.options.progress == Progress::Thread;
        let can_multiply = activation
            .factor()
            .is_none_or(|factor| group.gpu().is_none() && ReduceOp::PremulSum(factor).fits(data_type));
        let terms = Terms { len, data_type, activation, has_thread, can_multiply };
        let hosts = group.agree_on(terms)?;
        terms.check(group.world_size())?;
        if group.is_exact(data_type, activation.op())?
            && activation.late_rule() != Late::Drop
            && group.world_size() > EXACT_RANKS_MAX
        {
            let (op, reason) = (activation.op(), NotExact::Partial);
            return Err(CollectiveError::NotExact { op, data_type, reason }.into());
        }
        let own = group.with_signal_slots(0)?;
        // Each rank tells rank 0 when it is ready, and rank 0 tells each that does not hear it down
        // the tree. The tree's links are links of the overlay, which are connected.
        let others: Vec<Rank> = (1..own.world_size()).collect();
        own.connect_to(if own.rank() == 0 { &others } else { &[0] })?;
        let own = Group {
            interrupted: group.interrupted,
            variant: group.variant.clone(),
            stream: group.stream.clone(),
            ..own
        };
        own.into_partial(terms, hosts, group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pleach_schedule::generate::{Access, Algorithm, generate};

    #[test]
    fn a_schedule_that_admits_no_rounds_is_refused_by_its_name_with_the_reason() {
        let made = |collective| generate(collective, &Algorithm::Direct, 3, Access::Put).expect("any ranks");
        expect_admitted("direct", &made(Collective::AllReduce)).expect("it combines");
        let refused =
            expect_admitted("direct", &made(Collective::AllGather)).expect_err("nothing is combined");
        assert_eq!(
            refused.to_string(),
            "algorithm direct admits no partial rounds: all-gather combines nothing, so a rank cannot give \
             something neutral; take another one (Group::with_variant)"
        );
    }
}
