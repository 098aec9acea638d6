//! Makes a proof ready to run on one rank: numbers its signal slots and scratch slots, and flattens
//! its steps.
//!
//! **Invariant:** the numbers follow from the schedule alone, so every rank computes the same ones
//! for itself and for its peers: a sender knows the signal slot and the scratch slot at its target
//! without being told. Of a [family](pleach_schedule::Family) they are the same as of the whole
//! schedule, but only the lanes of the rank itself are made: a slot of a peer follows from the
//! column and from the place of the peer in each block.
//!
//! Signal slots of a sender at a target are numbered in the order of (block, signal slot). Scratch
//! slots of a rank are numbered block by block: first the schedule's slots, then a window of the
//! shared input and output, where peers touch these (one for both: `verify` allows it, and half as
//! much memory passes through the cache). After all blocks come the rank's own bounce slots, for
//! sources of puts in memory that is not registered.
//!
//! Where all blocks have the same number of chunks, each of its own length, a slot takes as
//! many *units* of scratch as its block's share needs, and is numbered by its first unit. So a
//! packing of thirty trees has room for chunks four times as long as with slots that are all as
//! long as the longest.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

use pleach_schedule::generate::packed::PacingPolicy;
use pleach_schedule::verify::{Proof, ProvedFamily};
use pleach_schedule::{BlockId, Lane, Op, Part, Place, Schedule, SignalSlot, Symmetry};
use pleach_vocabulary::Rank;
use pleach_vocabulary::digest::Hasher64;

use super::{BlockExtent, LaneProgram, NO_SLOT, OpProgram, PlaceSlot, Program, PutProgram, StepProgram};

/// Units of scratch that a chunk of the largest block takes, where chunks of blocks differ in
/// length.
const SIZE_MAX: u32 = 64;

/// Most units of a window: with more, each unit would be too small for rounding.
const UNITS_MAX: u32 = 1 << 15;

/// The signal slots of one pair of ranks, in the order of their numbers.
type PairSignals = BTreeMap<(BlockId, SignalSlot), u32>;

/// Numbers the signal slots that a rank with these lanes signals and those that it waits on, by
/// peer.
fn number_signal_slots(lanes: &[Lane]) -> (BTreeMap<Rank, PairSignals>, BTreeMap<Rank, PairSignals>) {
    let (mut outgoing, mut incoming) =
        (BTreeMap::<Rank, PairSignals>::new(), BTreeMap::<Rank, PairSignals>::new());
    for lane in lanes {
        for step in &lane.steps {
            match step.op {
                Op::Signal { to, signal_slot } | Op::Put { to, signal_slot, .. } => {
                    outgoing.entry(to).or_default().insert((lane.block, signal_slot), 0);
                }
                Op::Wait { from, signal_slot } => {
                    incoming.entry(from).or_default().insert((lane.block, signal_slot), 0);
                }
                Op::Reduce { .. } => {}
            }
        }
    }
    for pair in outgoing.values_mut().chain(incoming.values_mut()) {
        for (number, signal_slot) in pair.values_mut().enumerate() {
            *signal_slot = number as u32;
        }
    }
    (outgoing, incoming)
}

/// How many signal slots the largest pair of any two ranks has.
///
/// A family has as many signals between two ranks as its column has between all pairs of the same
/// displacement: a translation takes each of these to the two ranks in one block, or in the only
/// one.
fn most_signals_of_pair(proof: &Proof) -> u32 {
    let family = proof.family();
    let pair = |from: Rank, to: Rank| match family {
        Some(family) => (0, family.displacement(from, to)),
        None => (from, to),
    };
    let mut pairs = BTreeMap::<(Rank, Rank), u32>::new();
    for (own, lanes) in (0..).zip(&outline(proof).programs) {
        for step in lanes.iter().flat_map(|lane| &lane.steps) {
            if let Op::Signal { to, .. } | Op::Put { to, .. } = step.op {
                *pairs.entry(pair(own, to)).or_default() += 1;
            }
        }
    }
    pairs.values().copied().max().unwrap_or(0)
}

/// The blocks and all else of a proved schedule; of a family with the lanes of its column alone.
fn outline(proof: &Proof) -> &Schedule {
    proof.family().map_or_else(|| proof.schedule(), ProvedFamily::column)
}

impl Program {
    /// `rank`'s share of a proved schedule; `algorithm` is its name.
    #[must_use]
    pub fn new(proof: &Proof, rank: Rank, algorithm: &str) -> Self {
        Self::of(proof, rank, algorithm, extents(outline(proof)))
    }

    /// The same with as many chunks of each block as suits links of this pace.
    #[must_use]
    pub fn paced(proof: &Proof, rank: Rank, algorithm: &str, pace: PacingPolicy) -> Self {
        let mut extents = extents(proof.schedule());
        size_by_share(proof.schedule(), &mut extents);
        let mut program = Self::of(proof, rank, algorithm, extents);
        let mut hasher = Hasher64::default();
        (program.schedule_hash, pace).hash(&mut hasher);
        program.schedule_hash = hasher.finish();
        program.pace = Some(pace);
        program
    }

    fn of(proof: &Proof, rank: Rank, algorithm: &str, extents: Vec<BlockExtent>) -> Self {
        let schedule = outline(proof);
        let own_lanes = proof.lanes(rank);
        let (slots, most_slots) = match proof.family() {
            Some(family) => Slots::of_family(family, rank, &own_lanes, &extents),
            None => {
                let slots = Slots::new(schedule, &extents);
                let most = most_units(schedule, &slots, &extents);
                (slots, most)
            }
        };
        let (outgoing, incoming) = number_signal_slots(&own_lanes);
        let mut builder = Builder {
            slots: &slots,
            outgoing: &outgoing,
            incoming: &incoming,
            proof,
            rank,
            bounce: slots.count[rank as usize],
            extents: &extents,
            own_blocks: BTreeMap::new(),
            lanes: Vec::new(),
            steps: Vec::new(),
            after: Vec::new(),
            places: Vec::new(),
        };
        for (number, lane) in own_lanes.iter().enumerate() {
            builder.lane(number, lane);
        }
        let maps_any = |of: fn(Part) -> bool| {
            schedule.programs.iter().enumerate().any(|(own, lanes)| {
                lanes.iter().flat_map(|lane| &lane.steps).any(|step| {
                    matches!(&step.op, Op::Reduce { from, into }
                        if from.iter().chain(into).any(|place| place.rank != own as Rank && of(place.part)))
                })
            })
        };
        let maps = maps_any(|_| true);
        let largest = extents.iter().max_by(|one, other| {
            let share = |cut: &BlockExtent, total: u64| u128::from(cut.weight) * u128::from(total);
            share(one, other.total).cmp(&share(other, one.total))
        });
        let largest_share = largest.map_or((1, 1, 1), |cut| (cut.weight, cut.total, extents.len()));
        let largest_size = extents.iter().map(|cut| cut.size).max().unwrap_or(1);
        let mut waits: Vec<(Rank, u32, u32)> = (0..)
            .zip(&builder.lanes)
            .flat_map(|(number, lane)| {
                let steps = &builder.steps[lane.first_step as usize..(lane.first_step + lane.steps) as usize];
                steps.iter().filter_map(move |step| match step.op {
                    OpProgram::Wait { from, signal_slot, .. } => Some((from, signal_slot, number)),
                    _ => None,
                })
            })
            .collect();
        waits.sort_unstable();
        let mut peers: BTreeSet<Rank> = incoming.keys().chain(outgoing.keys()).copied().collect();
        peers.extend(builder.places.iter().map(|place| place.rank).filter(|peer| *peer != rank));
        let mut own_blocks: Vec<(BlockId, u32)> = builder.own_blocks.into_iter().collect();
        own_blocks.sort_unstable_by_key(|(_, place)| *place);
        Self {
            collective: schedule.collective,
            schedule_hash: hash_proof(proof),
            algorithm: algorithm.to_owned(),
            rank,
            ranks: schedule.ranks(),
            window: schedule.window,
            single_chunk: schedule.single_chunk,
            blocks: own_blocks.into_iter().map(|(block, _)| extents[block as usize]).collect(),
            largest_share,
            lanes: builder.lanes,
            steps: builder.steps,
            after: builder.after,
            places: builder.places,
            waits,
            signal_slots: most_signals_of_pair(proof) * schedule.window,
            slots: most_slots * schedule.window,
            largest_size,
            pace: None,
            chunk_bytes: None,
            chunk_bytes_max: None,
            maps,
            maps_scratch: maps_any(|part| matches!(part, Part::Scratch(_))),
            exposes_input: proof.exposes_input(rank),
            exposes_output: proof.exposes_output(rank),
            is_private: is_private(schedule),
            signalling: incoming.keys().copied().collect(),
            unsignalled: incoming.keys().filter(|peer| !outgoing.contains_key(peer)).copied().collect(),
            peers: peers.into_iter().collect(),
        }
    }

    /// The same program with all blocks of the schedule in their order, also those that this rank
    /// has no lanes of: for simulations of all ranks at once.
    pub(crate) fn with_all_blocks(mut self, proof: &Proof) -> Self {
        self.blocks = extents(outline(proof));
        if self.pace.is_some() {
            size_by_share(proof.schedule(), &mut self.blocks);
        }
        self.lanes.iter_mut().for_each(|lane| lane.block = lane.block_id);
        self
    }

    /// The same program, with chunks of at most `bytes` bytes.
    #[must_use]
    pub(crate) fn in_chunks_up_to(mut self, bytes: usize) -> Self {
        self.chunk_bytes_max = Some(bytes);
        self
    }

    /// The same program with shorter chunks, at most of the given bytes, where a call is so long
    /// that it is cut at all.
    #[must_use]
    pub(crate) fn with_chunks_of(self, bytes: usize) -> Self {
        Self { chunk_bytes: Some(bytes), ..self }
    }

    /// The same program without one entry of what its steps come after, counted through all steps:
    /// for the simulator, which has to catch it. Outside of this crate nothing runs that was not
    /// proved.
    pub(crate) fn without_dependency(mut self, number: usize) -> Self {
        self.after.remove(number);
        let number = number as u32;
        for StepProgram { after: (start, end), .. } in &mut self.steps {
            *start -= u32::from(*start > number);
            *end -= u32::from(*end > number);
        }
        self
    }
}

fn is_private(schedule: &Schedule) -> bool {
    let ranks = schedule.ranks();
    let is_end = |rank: Rank, block: BlockId| {
        let ends = schedule.collective.ends(schedule.blocks[block as usize].part, ranks);
        ends.is_some_and(|(from, to)| rank == from || rank == to)
    };
    let mut lanes = schedule
        .programs
        .iter()
        .zip(0..)
        .flat_map(|(lanes, rank)| lanes.iter().map(move |lane| (rank, lane)));
    lanes.all(|(rank, lane)| is_end(rank, lane.block))
}

/// By block: where it lies. Blocks of a part need not stand together in the list.
fn extents(schedule: &Schedule) -> Vec<BlockExtent> {
    let mut weights = vec![0; schedule.collective.parts(schedule.ranks()) as usize];
    let mut extents: Vec<BlockExtent> = Vec::with_capacity(schedule.blocks.len());
    for block in &schedule.blocks {
        let before = &mut weights[block.part as usize];
        let weight = u64::from(block.weight);
        extents.push(BlockExtent { part: block.part, before: *before, weight, total: 0, size: 1 });
        *before += weight;
    }
    extents.iter_mut().for_each(|cut| cut.total = weights[cut.part as usize]);
    extents
}

struct Builder<'a> {
    slots: &'a Slots,
    outgoing: &'a BTreeMap<Rank, PairSignals>,
    incoming: &'a BTreeMap<Rank, PairSignals>,
    proof: &'a Proof,
    rank: Rank,
    bounce: u32,
    extents: &'a [BlockExtent],
    own_blocks: BTreeMap<BlockId, u32>,
    lanes: Vec<LaneProgram>,
    steps: Vec<StepProgram>,
    after: Vec<(u32, u32)>,
    places: Vec<PlaceSlot>,
}

impl Builder<'_> {
    fn lane(&mut self, lane_number: usize, lane: &Lane) {
        let first_step = self.steps.len() as u32;
        for (step_number, step) in lane.steps.iter().enumerate() {
            let after = self.after.len() as u32;
            self.after.extend(&step.after);
            let op = self.op(lane_number, lane.block, step_number, &step.op);
            self.steps.push(StepProgram { op, after: (after, self.after.len() as u32) });
        }
        let known = self.own_blocks.len() as u32;
        let block = *self.own_blocks.entry(lane.block).or_insert(known);
        let steps = lane.steps.len() as u32;
        self.lanes.push(LaneProgram { block, block_id: lane.block, first_step, steps });
    }

    fn op(&mut self, lane: usize, block: BlockId, step: usize, op: &Op) -> OpProgram {
        let place = |rank, part| self.slots.place(Place { rank, part }, block);
        match op {
            Op::Signal { to, signal_slot } => {
                OpProgram::Signal { to: *to, signal_slot: self.outgoing[to][&(block, *signal_slot)] }
            }
            Op::Put { to, src, dst, signal_slot } => {
                let mut bounce = NO_SLOT;
                if bounces(op) {
                    bounce = self.bounce;
                    self.bounce += self.extents[block as usize].size;
                }
                OpProgram::Put(PutProgram {
                    to: *to,
                    signal_slot: self.outgoing[to][&(block, *signal_slot)],
                    src: place(self.rank, *src),
                    dst: place(*to, *dst),
                    bounce,
                })
            }
            Op::Wait { from, signal_slot } => OpProgram::Wait {
                from: *from,
                signal_slot: self.incoming[from][&(block, *signal_slot)],
                into: self.proof.put_target(self.rank, lane, step).map(|part| place(self.rank, part)),
            },
            Op::Reduce { from, into } => {
                let from = self.range(from, block);
                let into = self.range(into, block);
                OpProgram::Reduce { from, into, completes: self.proof.completes(self.rank, lane, step) }
            }
        }
    }

    fn range(&mut self, places: &[Place], block: BlockId) -> (u32, u32) {
        let start = self.places.len() as u32;
        self.places.extend(places.iter().map(|place| self.slots.place(*place, block)));
        (start, self.places.len() as u32)
    }
}

/// FNV-1a over the words of the schedule or the family: equal on all ranks for equal ones.
fn hash_proof(proof: &Proof) -> u64 {
    let (schedule, mut hasher) = (outline(proof), Hasher64::default());
    if let Some(proved) = proof.family() {
        let family = proved.family();
        (family.symmetry, &family.extents, family.source_order, family.lane_order).hash(&mut hasher);
    }
    format!("{}", schedule.collective).hash(&mut hasher);
    (schedule.window, schedule.single_chunk).hash(&mut hasher);
    schedule.blocks.hash(&mut hasher);
    for lanes in &schedule.programs {
        for lane in lanes {
            lane.block.hash(&mut hasher);
            for step in &lane.steps {
                step.op.hash(&mut hasher);
                step.after.hash(&mut hasher);
            }
        }
    }
    hasher.finish()
}

/// The scratch slots of every rank.
struct Slots {
    /// By rank and block: where its slots begin and which windows follow them.
    at: BTreeMap<(Rank, BlockId), BlockSlots>,
    /// By rank: how many units in all.
    count: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct BlockSlots {
    base: u32,
    /// Of each, in units.
    size: u32,
    scratch: u32,
    shared: bool,
}

impl BlockSlots {
    fn slot(self, part: Part) -> u32 {
        match part {
            Part::Input | Part::Output => NO_SLOT,
            Part::Scratch(slot) => self.base + u32::from(slot) * self.size,
            Part::SharedInput | Part::SharedOutput => self.base + self.scratch * self.size,
        }
    }

    fn touch(&mut self, part: Part) {
        match part {
            Part::Input | Part::Output => {}
            Part::Scratch(slot) => self.scratch = self.scratch.max(u32::from(slot) + 1),
            Part::SharedInput | Part::SharedOutput => self.shared = true,
        }
    }

    fn len(self) -> u32 {
        (self.scratch + u32::from(self.shared)) * self.size
    }
}

/// Every place an operation of `rank` touches.
fn places(rank: Rank, op: &Op) -> impl Iterator<Item = Place> + '_ {
    let (put, reduce): (Option<[Place; 2]>, Option<_>) = match op {
        Op::Put { to, src, dst, .. } => {
            (Some([Place { rank, part: *src }, Place { rank: *to, part: *dst }]), None)
        }
        Op::Reduce { from, into } => (None, Some(from.iter().chain(into).copied())),
        Op::Signal { .. } | Op::Wait { .. } => (None, None),
    };
    put.into_iter().flatten().chain(reduce.into_iter().flatten())
}

impl Slots {
    fn new(schedule: &Schedule, extents: &[BlockExtent]) -> Self {
        let mut at: BTreeMap<(Rank, BlockId), BlockSlots> = BTreeMap::new();
        for (rank, lanes) in schedule.programs.iter().enumerate() {
            for lane in lanes {
                for place in lane.steps.iter().flat_map(|step| places(rank as Rank, &step.op)) {
                    if !matches!(place.part, Part::Input | Part::Output) {
                        at.entry((place.rank, lane.block)).or_default().touch(place.part);
                    }
                }
            }
        }
        let mut count = vec![0; schedule.programs.len()];
        for ((rank, block), slots) in &mut at {
            slots.size = extents[*block as usize].size;
            slots.base = count[*rank as usize];
            count[*rank as usize] += slots.len();
        }
        Self { at, count }
    }

    /// The slots that a rank with these lanes touches, in a family; and the units of scratch that
    /// every rank of it needs, with bounce slots. Each rank stands at every place of the column, in
    /// one block each, so all need as much as the whole column.
    fn of_family(family: &ProvedFamily, rank: Rank, lanes: &[Lane], extents: &[BlockExtent]) -> (Self, u32) {
        let column = family.column();
        let of_column = Self::new(column, extents);
        let positions = match family.family().symmetry {
            Symmetry::Blocks => column.ranks(),
            Symmetry::Ranks => 1,
        };
        let mut by_position = vec![BlockSlots { size: 1, ..BlockSlots::default() }; positions as usize];
        for (&(rank, _), slots) in &of_column.at {
            // By ranks: as the lane of rank 0 touches another rank, that of another touches rank 0.
            let position = &mut by_position[if positions == 1 { 0 } else { rank as usize }];
            position.scratch = position.scratch.max(slots.scratch);
            position.shared |= slots.shared;
        }
        let mut touched: Vec<(Rank, BlockId)> = Vec::new();
        for lane in lanes {
            let places = lane.steps.iter().flat_map(|step| places(rank, &step.op));
            touched.extend(places.map(|place| (place.rank, lane.block)));
        }
        touched.sort_unstable();
        touched.dedup();
        let mut at = BTreeMap::new();
        for of_peer in touched.chunk_by(|one, other| one.0 == other.0) {
            let (mut base, mut next) = (0, 0);
            for &(peer, block) in of_peer {
                // The slots of blocks before this one come first.
                while next < block {
                    base += by_position[family.position(peer, next) as usize].len();
                    next += 1;
                }
                at.insert(
                    (peer, block),
                    BlockSlots { base, ..by_position[family.position(peer, block) as usize] },
                );
            }
        }
        let units: u32 = by_position.iter().map(|slots| slots.len()).sum();
        let steps = column.programs.iter().flatten().flat_map(|lane| &lane.steps);
        let most = units + steps.filter(|step| bounces(&step.op)).count() as u32;
        (Self { at, count: vec![units; column.programs.len()] }, most)
    }

    fn place(&self, place: Place, block: BlockId) -> PlaceSlot {
        let slot = self.at.get(&(place.rank, block)).map_or(NO_SLOT, |slots| slots.slot(place.part));
        PlaceSlot { rank: place.rank, part: place.part, slot }
    }
}

/// Gives each block as much scratch a chunk as it has of its part, in proportion, as finely as the
/// number of units allows.
fn size_by_share(schedule: &Schedule, extents: &mut [BlockExtent]) {
    let share = |cut: &BlockExtent| (u128::from(cut.weight) << u32::BITS) / u128::from(cut.total.max(1));
    let shares: Vec<u128> = extents.iter().map(share).collect();
    let largest = shares.iter().copied().max().unwrap_or(0).max(1);
    let mut most = SIZE_MAX;
    while most > 1 {
        for (cut, share) in extents.iter_mut().zip(&shares) {
            cut.size = (share * u128::from(most)).div_ceil(largest).max(1) as u32;
        }
        let units = most_units(schedule, &Slots::new(schedule, extents), extents);
        let is_even = extents.iter().all(|cut| cut.size == most);
        if !is_even && units.saturating_mul(schedule.window) <= UNITS_MAX {
            return;
        }
        most /= 2;
    }
    extents.iter_mut().for_each(|cut| cut.size = 1);
}

/// The units of scratch of the rank that has most. Bounce slots are the own rank's affair, but the
/// size of a bank must be the same everywhere.
fn most_units(schedule: &Schedule, slots: &Slots, extents: &[BlockExtent]) -> u32 {
    let bounces = |lane: &Lane| {
        let puts = lane.steps.iter().filter(|step| bounces(&step.op)).count() as u32;
        puts * extents[lane.block as usize].size
    };
    let used = slots.count.iter().zip(&schedule.programs);
    used.map(|(units, lanes)| units + lanes.iter().map(bounces).sum::<u32>()).max().unwrap_or(0)
}

/// Whether the source of a put may have to be copied first.
fn bounces(op: &Op) -> bool {
    matches!(op, Op::Put { src: Part::Input | Part::Output, .. })
}
