//! The program that carries out a call. A planner chooses, generates, proves and compiles a program
//! once, and then finds it in a table.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_schedule::Schedule;
use pleach_schedule::cost::{CostModel, Platform};
use pleach_schedule::generate::{Access, Algorithm, Variant, family, generate};
use pleach_schedule::select::{SelectError, Selection, select, select_algorithm, select_variant};
use pleach_schedule::tuning::{TuningTable, whole_bytes};
use pleach_schedule::verify::{Proof, verify, verify_family};
use pleach_schedule::wiring::Wiring;
use pleach_transport::Rank;
use pleach_transport::mutex::lock;
use pleach_vocabulary::Collective;

use super::error::CollectiveError;
use crate::call::{Counts, Descriptor};
use crate::engine::{Plan, Program};

/// Makes and keeps the programs of one rank of one group. **Invariant:** its choices depend only on
/// values that are the same on all ranks.
#[derive(Debug)]
pub struct Planner {
    rank: Rank,
    /// The ranks on their hosts.
    platform: Platform,
    /// The algorithm to take wherever it fits.
    preferred: Option<Algorithm>,
    /// The variants for calls that name no variant.
    table: Option<Arc<TuningTable>>,
    /// By collective, size class (the logarithm of the bytes) and whether only the ends of a part
    /// may touch it.
    chosen: HashMap<(Collective, u32, bool), Arc<Program>>,
    made: HashMap<(Made, Option<u64>), Arc<Program>>,
    plans: HashMap<(Descriptor, Option<Variant>), Arc<Plan>>,
    /// The plans used last: searching these is quicker than the table.
    recent: Vec<Recent>,
    /// The place in `recent` that is replaced next.
    oldest: usize,
    /// The divisor of averages, if that is not the number of ranks.
    divide_by: Option<u32>,
    /// The caller's processor touches none of the data.
    untouched_by_host: bool,
    /// Take only schedules that fold contributions in rank order.
    in_rank_order: bool,
    /// The schedules that were checked, and whether they do.
    folds: HashMap<(Collective, Algorithm, Access), bool>,
    known: Arc<PlannerCache>,
}

/// A schedule: its collective, algorithm and access, and a window in place of the generator's.
type Made = (Collective, Algorithm, Access, Option<u32>);

/// How blocks are cut, if a variant or the planner says so: how many chunks are under way, and how
/// many bytes each has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Cut {
    window: Option<u32>,
    chunk_bytes: Option<u64>,
}

impl From<&Variant> for Cut {
    fn from(variant: &Variant) -> Self {
        Self { window: variant.window, chunk_bytes: variant.chunk_bytes }
    }
}

/// The key of a choice: a collective, a size class, and the variant that the call named.
type Asked = (Collective, u32, Option<Variant>);

/// Choices and proofs that all planners of one platform in one process share.
#[derive(Debug, Default)]
pub struct PlannerCache {
    tuning: Mutex<HashMap<Asked, (Selection, Cut)>>,
    proofs: Mutex<HashMap<Made, Arc<Proof>>>,
}

#[derive(Debug)]
struct Recent {
    descriptor: Descriptor,
    variant: Option<Variant>,
    plan: Arc<Plan>,
}

/// Chunks under way of a large direct collective among few ranks that map each other. Nothing is
/// put, so ranks need to wait for each other only at the end. With many chunks under way, a rank
/// that is late for one chunk does not make the others late.
const DEEP_WINDOW: u32 = 16;
/// Least part for this window, in bytes.
const DEEP_BYTES: u64 = 1 << 20;
/// Most ranks for this window: each rank has slots for all of them in the same scratch.
const DEEP_RANKS_MAX: u32 = 4;
/// Largest chunk that kernels combine where peers map the memory, in bytes. The time of such a
/// chunk is long beside the ten microseconds of launching a kernel and seeing its end: a GPU of 400
/// GB/s reads it in 160 us.
const GPU_CHUNK_BYTES: usize = 64 << 20;
/// Largest chunk that a GPU copies to a peer, in bytes. Another rank may pass chunks on, so a block
/// is to be of several; and a copy takes ten microseconds whatever its length, in which an H100
/// copies 12 MiB.
const GPU_PUT_CHUNK_BYTES: usize = 16 << 20;
/// Shorter parts take the algorithm of this length where GPUs copy, in bytes. What is quickest for
/// short parts on a processor puts them and combines them then: a copy and a launch, where reading
/// in place takes a launch.
const GPU_PART_BYTES_MIN: usize = 64 << 10;
/// A message to a rank that sleeps costs as much as so many to a rank that takes its turn. With 32
/// ranks on two processors, of which one is there, a round of 64 bytes took 1.5 ms with 31 messages
/// of each rank, and less than a tenth of that with five.
const WAKE_MESSAGES: f64 = 3.0;
/// Plans that are compared one by one.
const RECENT_PLANS: usize = 8;
/// Most plans that are kept. A program whose calls have more shapes makes some plans again.
const PLANS_MAX: usize = 4096;

impl Planner {
    /// A planner for a rank of this platform; `preferred` is taken wherever it fits.
    #[must_use]
    pub fn new(rank: Rank, platform: Platform, preferred: Option<Algorithm>) -> Self {
        Self {
            rank,
            platform,
            preferred,
            table: None,
            chosen: HashMap::new(),
            made: HashMap::new(),
            plans: HashMap::new(),
            recent: Vec::with_capacity(RECENT_PLANS),
            oldest: 0,
            divide_by: None,
            untouched_by_host: false,
            in_rank_order: false,
            folds: HashMap::new(),
            known: Arc::default(),
        }
    }

    /// The same planner; it shares choices and proofs with planners of the same platform.
    #[must_use]
    pub fn sharing(self, known: Arc<PlannerCache>) -> Self {
        Self { known, ..self }
    }

    /// From now on the ranks are joined by these links. Calls under way and plans that were given
    /// out stay as they are.
    pub fn take_links(&mut self, wiring: Option<Arc<Wiring>>) {
        self.platform.wiring = wiring;
        self.chosen.clear();
        self.forget_plans();
        self.known = Arc::default();
    }

    /// From now on the ranks may sleep when they are signalled, as in rounds of a partial
    /// all-reduce. Where ranks take turns on processors, a message then costs more.
    pub(crate) fn signal_sleeping_ranks(&mut self) {
        let near = &mut self.platform.near;
        if self.platform.access == Access::Mapped && near.message_s > CostModel::SHARED_MEMORY.message_s {
            near.message_s *= WAKE_MESSAGES;
            self.chosen.clear();
            self.forget_plans();
            self.known = Arc::default();
        }
    }

    /// From now on averages are divided by this number, or by that of the ranks. Plans that were
    /// given out stay as they are.
    pub(crate) fn divide_averages_by(&mut self, divide_by: Option<u32>) {
        if self.divide_by != divide_by {
            self.divide_by = divide_by;
            self.forget_plans();
        }
    }

    fn forget_plans(&mut self) {
        self.plans.clear();
        self.recent.clear();
        self.oldest = 0;
    }

    /// The platform, by which schedules are chosen.
    #[must_use]
    pub fn platform(&self) -> &Platform {
        &self.platform
    }

    /// The links that join the ranks, if the planner was told them.
    #[must_use]
    pub fn wiring(&self) -> Option<&Arc<Wiring>> {
        self.platform.wiring.as_ref()
    }

    /// The same planner; it takes only schedules that fold contributions in the order of the ranks.
    #[must_use]
    pub fn in_rank_order(self) -> Self {
        Self { in_rank_order: true, ..self }
    }

    /// The same planner, for memory that the caller's processor does not touch.
    #[must_use]
    pub fn untouched_by_host(self) -> Self {
        Self { untouched_by_host: true, ..self }
    }

    /// Whether all ranks are on one host and their GPUs copy between each other's memory: the same
    /// on all ranks.
    #[must_use]
    pub fn gpus_copy(&self) -> bool {
        self.untouched_by_host && self.platform.access == Access::Mapped && self.platform.hosts.hosts() == 1
    }

    /// The same planner with a table of this platform. It takes the variants of the table where the
    /// table has some and no algorithm is preferred.
    #[must_use]
    pub fn tuned_by(self, table: Option<Arc<TuningTable>>) -> Self {
        Self { table, ..self }
    }

    /// The plan of calls of this shape and these counts (which are the descriptor's amount), by the
    /// named variant or the best one.
    ///
    /// # Errors
    ///
    /// The variant does not fit the collective or the ranks.
    pub fn plan(
        &mut self,
        descriptor: &Descriptor,
        counts: &Counts,
        variant: Option<&Variant>,
    ) -> Result<&Arc<Plan>, CollectiveError> {
        let is_it = |recent: &Recent| {
            recent.descriptor == *descriptor
                && recent.variant.as_ref() == variant
                && recent.plan.is_for(counts)
        };
        if let Some(index) = self.recent.iter().position(is_it) {
            return Ok(&self.recent[index].plan);
        }
        let key = (*descriptor, variant.cloned());
        let plan = match self.plans.get(&key).filter(|plan| plan.is_for(counts)) {
            Some(plan) => plan.clone(),
            None => {
                let bytes = counts.plan_bytes(descriptor.data_type.bytes());
                let is_private = matches!(counts, Counts::Paired(_));
                let program = self.choose(descriptor.collective, bytes, variant, is_private)?;
                let plan = Plan::new(program, *descriptor, counts.clone())?;
                let plan =
                    if let Some(divide_by) = self.divide_by { plan.dividing_by(divide_by) } else { plan };
                let plan = Arc::new(if self.untouched_by_host { plan.untouched_by_host() } else { plan });
                if self.plans.len() >= PLANS_MAX {
                    self.plans.clear();
                }
                self.plans.insert(key, plan.clone());
                plan
            }
        };
        let recent = Recent { descriptor: *descriptor, variant: variant.cloned(), plan };
        let index = if self.recent.len() < RECENT_PLANS {
            self.recent.push(recent);
            self.recent.len() - 1
        } else {
            let index = self.oldest;
            self.recent[index] = recent;
            self.oldest = (index + 1) % RECENT_PLANS;
            index
        };
        Ok(&self.recent[index].plan)
    }

    /// The program for `bytes` a part, by the named variant or the best one.
    ///
    /// # Errors
    ///
    /// The variant does not fit the collective or the ranks.
    pub fn program(
        &mut self,
        collective: Collective,
        bytes: usize,
        variant: Option<&Variant>,
    ) -> Result<Arc<Program>, CollectiveError> {
        self.choose(collective, bytes, variant, false)
    }

    /// The predicted time of a call of `bytes` a part, by the algorithm that it takes.
    ///
    /// # Errors
    ///
    /// There is none.
    pub(crate) fn price(
        &mut self,
        collective: Collective,
        bytes: usize,
    ) -> Result<Duration, CollectiveError> {
        let class = usize::BITS - bytes.leading_zeros();
        let largest = 1u64.checked_shl(class).map_or(u64::MAX, |end| end - 1);
        let (selection, _) = self.selection(collective, class, largest, None)?;
        let Selection { algorithm, access, .. } = self.admit(selection, false)?;
        let whole = (bytes as u64).saturating_mul(u64::from(collective.parts(self.platform.ranks())));
        let priced = select_algorithm(&algorithm, collective, whole, &self.platform)?;
        let row = priced.table.iter().find(|row| (&row.algorithm, row.access) == (&algorithm, access));
        // By the other access, where these bytes are priced by that alone.
        let price = row.map(|row| row.seconds).or_else(|| priced.predicted_s());
        Ok(Duration::from_secs_f64(price.unwrap_or(0.0)))
    }

    /// As [`Planner::program`]. With `is_private` only the ends of a part know its length, so no
    /// other rank may pass it on.
    fn choose(
        &mut self,
        collective: Collective,
        bytes: usize,
        variant: Option<&Variant>,
        is_private: bool,
    ) -> Result<Arc<Program>, CollectiveError> {
        let is_short = self.gpus_copy() && variant.is_none() && (1..GPU_PART_BYTES_MIN).contains(&bytes);
        let bytes = match collective {
            // A short message is sent before its receiver asks for it.
            Collective::SendRecv { .. } => bytes,
            _ if is_short => GPU_PART_BYTES_MIN,
            _ => bytes,
        };
        // All sizes with the same number of bits have one choice: that of the largest of them.
        let class = usize::BITS - bytes.leading_zeros();
        if variant.is_none()
            && let Some(program) = self.chosen.get(&(collective, class, is_private))
        {
            return Ok(program.clone());
        }
        let largest = 1u64.checked_shl(class).map_or(u64::MAX, |end| end - 1);
        let largest = match variant {
            Some(variant) => self.within_limit(variant, collective, bytes as u64, largest)?,
            None => largest,
        };
        let (selection, cut) = self.selection(collective, class, largest, variant)?;
        let wanted = (selection.algorithm.clone(), selection.access);
        let selection = if is_private && variant.is_none() { self.private(selection)? } else { selection };
        let selection = self.admit(selection, variant.is_some())?;
        // The window and the chunks belong to the algorithm that was wanted. Another one may have
        // replaced it.
        let is_wanted = wanted == (selection.algorithm.clone(), selection.access);
        let cut = if is_wanted { cut } else { Cut::default() };
        tracing::debug!("{collective} up to {largest} bytes a part: {selection}");
        let is_deep =
            selection.access == Access::Mapped && selection.ranks <= DEEP_RANKS_MAX && largest >= DEEP_BYTES;
        // A GPU needs few long chunks: chunks under way share the scratch, and each chunk is a
        // launch.
        let is_deep = is_deep && !self.untouched_by_host;
        let deep = (is_deep && selection.algorithm == Algorithm::Direct).then_some(DEEP_WINDOW);
        let cut = Cut { window: cut.window.or(deep), ..cut };
        let program = self.make_with(collective, selection.algorithm, selection.access, cut)?;
        if variant.is_none() {
            self.chosen.insert((collective, class, is_private), program.clone());
        }
        Ok(program)
    }

    /// The largest part that a named variant is chosen for. It is the largest of the size class, or
    /// the most that the variant carries if that is less: a call of that length may name the
    /// variant.
    fn within_limit(
        &self,
        variant: &Variant,
        collective: Collective,
        bytes: u64,
        largest: u64,
    ) -> Result<u64, CollectiveError> {
        let ranks = self.platform.ranks();
        match variant.algorithm.part_bytes_max(collective, ranks) {
            Some(most) if bytes > most => {
                let algorithm = variant.algorithm.clone();
                Err(SelectError::TooLong { algorithm, bytes, most, ranks }.into())
            }
            Some(most) => Ok(largest.min(most)),
            None => Ok(largest),
        }
    }

    /// The choice for `largest` bytes a part, and how its blocks are cut. It is the named variant,
    /// else the preferred algorithm if it fits, else the variant of the table, else the cheapest
    /// algorithm.
    fn selection(
        &self,
        collective: Collective,
        class: u32,
        largest: u64,
        variant: Option<&Variant>,
    ) -> Result<(Selection, Cut), CollectiveError> {
        let key = (collective, class, variant.cloned());
        let mut known = lock(&self.known.tuning);
        if let Some(selection) = known.get(&key) {
            return Ok(selection.clone());
        }
        let platform = &self.platform;
        let priced = largest.saturating_mul(u64::from(collective.parts(platform.ranks())));
        let bytes = whole_bytes(collective, largest, platform.ranks());
        let pinned = || self.table.as_ref().and_then(|table| table.variant(collective, bytes));
        let selection = if let Some(variant) = variant {
            (select_variant(variant, collective, priced, platform)?, variant.into())
        } else if let Some(preferred) = &self.preferred {
            let named = select_variant(&preferred.clone().into(), collective, priced, platform);
            (named.or_else(|_| select(collective, priced, platform))?, Cut::default())
        } else if let Some(variant) = pinned() {
            match select_variant(variant, collective, priced, platform) {
                // A row holds from a number of bytes on, and its variant may carry only few bytes.
                Err(SelectError::TooLong { .. }) => (select(collective, priced, platform)?, Cut::default()),
                selection => (selection?, variant.into()),
            }
        } else {
            (select(collective, priced, platform)?, Cut::default())
        };
        known.insert(key, selection.clone());
        Ok(selection)
    }

    /// The choice, or the next best that a reproducible group may take. The algorithm that a call
    /// named is not replaced, but may be carried out in another form.
    fn admit(&mut self, selection: Selection, is_named: bool) -> Result<Selection, CollectiveError> {
        if !self.in_rank_order || !selection.collective.reduces() {
            return Ok(selection);
        }
        if self.folds_in_rank_order(selection.collective, &selection.algorithm, selection.access)? {
            return Ok(selection);
        }
        let selection = selection.beside_others(&self.platform)?;
        let rows: Vec<_> = selection.table.iter().map(|row| (row.algorithm.clone(), row.access)).collect();
        let mut known = Vec::new();
        for (algorithm, access) in rows {
            if !self.folds_in_rank_order(selection.collective, &algorithm, access)? {
                continue;
            }
            if !is_named || algorithm == selection.algorithm {
                return Ok(Selection { algorithm, access, ..selection });
            }
            let name = algorithm.to_string();
            if !known.contains(&name) {
                known.push(name);
            }
        }
        let algorithm = selection.algorithm.to_string();
        Err(CollectiveError::NotReproducible { algorithm, ranks: self.platform.ranks(), known })
    }

    fn folds_in_rank_order(
        &mut self,
        collective: Collective,
        algorithm: &Algorithm,
        access: Access,
    ) -> Result<bool, CollectiveError> {
        let key = (collective, algorithm.clone(), access);
        if let Some(&folds) = self.folds.get(&key) {
            return Ok(folds);
        }
        let folds = self.proof(&(collective, algorithm.clone(), access, None))?.folds_in_rank_order();
        let folds = folds.map_err(|violation| CollectiveError::Violation(Arc::new(violation)))?;
        self.folds.insert(key, folds);
        Ok(folds)
    }

    /// The program of this algorithm and access.
    ///
    /// # Errors
    ///
    /// The algorithm does not fit the collective or the number of ranks.
    pub fn make(
        &mut self,
        collective: Collective,
        algorithm: Algorithm,
        access: Access,
    ) -> Result<Arc<Program>, CollectiveError> {
        self.make_with(collective, algorithm, access, Cut::default())
    }

    /// As [`Planner::make`], with another number of chunks under way than the generator chose.
    fn make_with(
        &mut self,
        collective: Collective,
        algorithm: Algorithm,
        access: Access,
        cut: Cut,
    ) -> Result<Arc<Program>, CollectiveError> {
        let key = ((collective, algorithm, access, cut.window), cut.chunk_bytes);
        if let Some(program) = self.made.get(&key) {
            return Ok(program.clone());
        }
        let proof = self.proof(&key.0)?;
        let algorithm = &key.0.1;
        let name = algorithm.to_string();
        let mut program = match algorithm {
            Algorithm::Packed(Some(trees)) => Program::paced(&proof, self.rank, &name, *trees.pacing()),
            _ => Program::new(&proof, self.rank, &name),
        };
        if self.untouched_by_host && key.0.2 == Access::Mapped {
            program = program.in_chunks_up_to(GPU_CHUNK_BYTES);
        } else if self.gpus_copy() {
            program = program.in_chunks_up_to(GPU_PUT_CHUNK_BYTES);
        }
        if let Some(bytes) = cut.chunk_bytes {
            program = program.with_chunks_of(usize::try_from(bytes).unwrap_or(usize::MAX));
        }
        let program = Arc::new(program);
        self.made.insert(key, program.clone());
        Ok(program)
    }

    /// The schedule of a program that this planner has made, made again.
    pub(crate) fn schedule_of(&self, program: &Arc<Program>) -> Result<Schedule, CollectiveError> {
        let made = self.made.iter().find(|(_, known)| Arc::ptr_eq(known, program));
        let Some(((made, _), _)) = made else { unreachable!("another planner has made this program") };
        self.schedule(made)
    }

    fn schedule(&self, made: &Made) -> Result<Schedule, CollectiveError> {
        let (collective, algorithm, access, window) = made;
        let ranks = self.platform.ranks();
        let schedule = generate(*collective, algorithm, ranks, *access).map_err(SelectError::from)?;
        Ok(Schedule { window: window.unwrap_or(schedule.window), ..schedule })
    }

    fn proof(&self, made: &Made) -> Result<Arc<Proof>, CollectiveError> {
        let mut known = lock(&self.known.proofs);
        if let Some(proof) = known.get(made) {
            return Ok(proof.clone());
        }
        let (collective, algorithm, access, window) = made;
        let ranks = self.platform.ranks();
        // A family is proved on one block, and no rank makes the lanes of another.
        let proof = match family(*collective, algorithm, ranks, *access).map_err(SelectError::from)? {
            Some(mut family) => {
                family.column.window = window.unwrap_or(family.column.window);
                verify_family(family)
            }
            None => verify(self.schedule(made)?),
        };
        let proof = Arc::new(proof.map_err(|violation| CollectiveError::Violation(Arc::new(violation)))?);
        // Other planners of this process take the proof from here before they make their own
        // programs.
        if Arc::strong_count(&self.known) > 1 {
            known.insert(made.clone(), proof.clone());
        }
        Ok(proof)
    }

    /// The same choice, or the next best in which only the ends of a part touch it.
    fn private(&self, selection: Selection) -> Result<Selection, CollectiveError> {
        let is_packed = |algorithm: &Algorithm| matches!(algorithm, Algorithm::Packed(_));
        if !is_packed(&selection.algorithm) {
            return Ok(selection);
        }
        let selection = selection.beside_others(&self.platform)?;
        let next = selection.table.iter().find(|row| !is_packed(&row.algorithm));
        Ok(match next.map(|row| (row.algorithm.clone(), row.access)) {
            Some((algorithm, access)) => Selection { algorithm, access, ..selection },
            None => selection,
        })
    }
}

#[cfg(test)]
mod tests {
    use pleach_schedule::hosts::HostMap;
    use pleach_vocabulary::{DataType, ReduceOp};

    use super::*;

    /// The algorithm of an all-reduce of 64 bytes.
    fn algorithm_of(planner: &mut Planner) -> String {
        let (collective, counts) = (Collective::AllReduce, Counts::Each(16));
        let (amount, data_type) = (counts.amount(), DataType::F32);
        let descriptor = Descriptor { collective, amount, data_type, op: ReduceOp::Sum, tag: 0 };
        planner.plan(&descriptor, &counts, None).expect("it can be planned").program().algorithm().to_owned()
    }

    #[test]
    fn ranks_that_may_sleep_get_few_messages_where_they_take_turns() {
        for (in_turn, algorithms) in
            [(16, ["exchange", "recursive-doubling"]), (1, ["recursive-doubling"; 2])]
        {
            let mut platform = Platform::new(HostMap::one(32), Access::Mapped);
            platform.near = platform.near.of_ranks_in_turn(in_turn);
            let mut planner = Planner::new(0, platform, None);
            let awake = algorithm_of(&mut planner);
            planner.signal_sleeping_ranks();
            assert_eq!([awake, algorithm_of(&mut planner)], algorithms, "{in_turn} in turn");
        }
    }
}
