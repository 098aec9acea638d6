//! A proof made ready to run on one rank: signal slots and scratch slots numbered, steps flattened.
//!
//! **Invariant:** the numbering is a function of the schedule alone, so every rank computes the
//! same for itself and for its peers: a sender knows the signal slot and the scratch slot at its
//! target without being told.
//!
//! Signal slots of a sender at a target are numbered in the order of (block, signal slot); for
//! scratch slots see [`super::slots`].

use std::collections::BTreeMap;

use pleach_schedule::generate::packed::PacingPolicy;
use pleach_schedule::verify::Proof;
use pleach_schedule::{BlockId, Op, Part, Place, Schedule, SignalSlot};
use pleach_vocabulary::{Collective, Rank};

use super::slots::{Slots, bounces, most_units, size_by_share};

/// What one rank runs. Independent of the number of elements, their type and the operation.
#[derive(Debug)]
pub struct Program {
    pub(super) collective: Collective,
    /// Names the schedule on all ranks: part of every run's signature.
    pub(super) schedule_hash: u64,
    pub(super) algorithm: String,
    pub(super) rank: Rank,
    pub(super) ranks: u32,
    pub(super) window: u32,
    pub(super) single_chunk: bool,
    /// Those that this rank has lanes for; lanes name them by their place here.
    pub(super) blocks: Vec<Cut>,
    /// The largest share that a block has of its part, in weights of it and of all; and how many
    /// blocks there are.
    pub(super) largest_share: (u64, u64, usize),
    pub(super) lanes: Vec<LaneProgram>,
    pub(super) steps: Vec<StepProgram>,
    /// Steps and their lags, referred to by range from the steps.
    pub(super) after: Vec<(u32, u32)>,
    pub(super) places: Vec<PlaceAt>,
    /// For the signal slots that this rank waits on, in their order, by peer and number: the lane
    /// that does.
    pub(super) waits: Vec<(Rank, u32, u32)>,
    /// Most signal slots any rank keeps for one peer, times the window.
    pub(super) signal_slots: u32,
    /// Most units of scratch any rank's slots take, times the window.
    pub(super) slots: u32,
    /// Units that a slot of the largest block takes.
    pub(super) largest_size: u32,
    /// Where the number of chunks follows from links: then all blocks have as many, each of its own
    /// size.
    pub(super) pace: Option<PacingPolicy>,
    /// How long chunks are at most, where that was asked for.
    pub(super) chunk_bytes: Option<usize>,
    /// Largest chunk in bytes, where it is another one than for the host's processors.
    pub(super) chunk_bytes_max: Option<usize>,
    /// Whether any rank touches another's memory through a mapping.
    pub(super) maps: bool,
    pub(super) exposes_input: bool,
    pub(super) exposes_output: bool,
    /// Whether only the rank that gives a part and the one that gets it have lanes for it.
    pub(super) is_private: bool,
    /// Peers that signal this rank in a run: they may only write to it again when they know how far
    /// it is.
    pub(super) heard: Vec<Rank>,
    /// Those of them that it does not signal: they learn of its progress by credits alone.
    pub(super) silent_to: Vec<Rank>,
}

/// Where a block lies in its part, in weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) part: u32,
    pub(super) before: u64,
    pub(super) weight: u64,
    /// Of all blocks of the part.
    pub(super) total: u64,
    /// Units of scratch that a chunk of it takes: in proportion to its share where chunks are.
    pub(super) size: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct LaneProgram {
    /// Its place in [`Program::blocks`].
    pub(super) block: u32,
    /// What the schedule calls it.
    pub(super) block_id: BlockId,
    pub(super) first_step: u32,
    pub(super) steps: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct StepProgram {
    pub(super) op: OpProgram,
    pub(super) after: (u32, u32),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum OpProgram {
    Signal {
        to: Rank,
        signal_slot: u32,
    },
    Put(PutProgram),
    Wait {
        from: Rank,
        signal_slot: u32,
        landing: Option<PlaceAt>,
    },
    /// Ranges of [`Program::places`].
    Reduce {
        from: (u32, u32),
        into: (u32, u32),
        completes: bool,
    },
}

/// What a put needs to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct PutProgram {
    pub(super) to: Rank,
    pub(super) signal_slot: u32,
    pub(super) src: PlaceAt,
    pub(super) dst: PlaceAt,
    /// Where the source is copied to when it is not registered.
    pub(super) bounce: u32,
}

/// A place with its slot, in units of scratch from the first one on; for shared parts the slot is
/// that of the window which stands in for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlaceAt {
    pub(super) rank: Rank,
    pub(super) part: Part,
    pub(super) slot: u32,
}

/// No slot: the part needs none.
pub(super) const NO_SLOT: u32 = u32::MAX;

/// The signal slots of one pair of ranks, in the order of their numbers.
type PairSignals = BTreeMap<(BlockId, SignalSlot), u32>;

/// Numbers the signal slots that `rank` signals (`outgoing`) or waits on, by peer, and says how
/// many the largest pair of any two ranks has.
fn number_signal_slots(
    schedule: &Schedule,
    rank: Rank,
) -> (BTreeMap<Rank, PairSignals>, BTreeMap<Rank, PairSignals>, u32) {
    let (mut outgoing, mut incoming) =
        (BTreeMap::<Rank, PairSignals>::new(), BTreeMap::<Rank, PairSignals>::new());
    let mut pairs = BTreeMap::<(Rank, Rank), u32>::new();
    for (own, lanes) in schedule.programs.iter().enumerate() {
        let own = own as Rank;
        for lane in lanes {
            for step in &lane.steps {
                match step.op {
                    Op::Signal { to, signal_slot } | Op::Put { to, signal_slot, .. } => {
                        *pairs.entry((own, to)).or_default() += 1;
                        if own == rank {
                            outgoing.entry(to).or_default().insert((lane.block, signal_slot), 0);
                        }
                    }
                    Op::Wait { from, signal_slot } if own == rank => {
                        incoming.entry(from).or_default().insert((lane.block, signal_slot), 0);
                    }
                    _ => {}
                }
            }
        }
    }
    for pair in outgoing.values_mut().chain(incoming.values_mut()) {
        for (number, signal_slot) in pair.values_mut().enumerate() {
            *signal_slot = number as u32;
        }
    }
    (outgoing, incoming, pairs.values().copied().max().unwrap_or(0))
}

impl Program {
    /// `rank`'s share of what was proved; `algorithm` is how people call it.
    #[must_use]
    pub fn new(proof: &Proof, rank: Rank, algorithm: &str) -> Self {
        Self::of(proof, rank, algorithm, cuts(proof.schedule()))
    }

    /// The same with as many chunks of each block as suits links of this pace.
    #[must_use]
    pub fn paced(proof: &Proof, rank: Rank, algorithm: &str, pace: PacingPolicy) -> Self {
        let mut cuts = cuts(proof.schedule());
        size_by_share(proof.schedule(), &mut cuts);
        let mut program = Self::of(proof, rank, algorithm, cuts);
        let mut hasher = pleach_schedule::digest::Hasher64::default();
        std::hash::Hash::hash(&(program.schedule_hash, pace), &mut hasher);
        program.schedule_hash = std::hash::Hasher::finish(&hasher);
        program.pace = Some(pace);
        program
    }

    fn of(proof: &Proof, rank: Rank, algorithm: &str, cuts: Vec<Cut>) -> Self {
        let schedule = proof.schedule();
        let slots = Slots::new(schedule, &cuts);
        let (outgoing, incoming, pair_signal_slots) = number_signal_slots(schedule, rank);
        let mut builder = Builder {
            slots: &slots,
            outgoing: &outgoing,
            incoming: &incoming,
            proof,
            rank,
            bounce: slots.count[rank as usize],
            cuts: &cuts,
            own_blocks: BTreeMap::new(),
            lanes: Vec::new(),
            steps: Vec::new(),
            after: Vec::new(),
            places: Vec::new(),
        };
        for (lane, program) in schedule.programs[rank as usize].iter().enumerate() {
            builder.lane(lane, program);
        }
        let most_slots = most_units(schedule, &slots, &cuts);
        let maps = schedule.programs.iter().enumerate().any(|(own, lanes)| {
            lanes.iter().flat_map(|lane| &lane.steps).any(|step| {
                matches!(&step.op, Op::Reduce { from, into }
                    if from.iter().chain(into).any(|place| place.rank != own as Rank))
            })
        });
        let largest = cuts.iter().max_by(|one, other| {
            let share = |cut: &Cut, total: u64| u128::from(cut.weight) * u128::from(total);
            share(one, other.total).cmp(&share(other, one.total))
        });
        let largest_share = largest.map_or((1, 1, 1), |cut| (cut.weight, cut.total, cuts.len()));
        let largest_size = cuts.iter().map(|cut| cut.size).max().unwrap_or(1);
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
        let mut own_blocks: Vec<(BlockId, u32)> = builder.own_blocks.into_iter().collect();
        own_blocks.sort_unstable_by_key(|(_, place)| *place);
        Self {
            collective: schedule.collective,
            schedule_hash: hash_schedule(schedule),
            algorithm: algorithm.to_owned(),
            rank,
            ranks: schedule.ranks(),
            window: schedule.window,
            single_chunk: schedule.single_chunk,
            blocks: own_blocks.into_iter().map(|(block, _)| cuts[block as usize]).collect(),
            largest_share,
            lanes: builder.lanes,
            steps: builder.steps,
            after: builder.after,
            places: builder.places,
            waits,
            signal_slots: pair_signal_slots * schedule.window,
            slots: most_slots * schedule.window,
            largest_size,
            pace: None,
            chunk_bytes: None,
            chunk_bytes_max: None,
            maps,
            exposes_input: proof.exposes_input(rank),
            exposes_output: proof.exposes_output(rank),
            is_private: is_private(schedule),
            heard: incoming.keys().copied().collect(),
            silent_to: incoming.keys().filter(|peer| !outgoing.contains_key(peer)).copied().collect(),
        }
    }

    /// The same program with chunks of up to so many bytes.
    #[must_use]
    pub(crate) fn in_chunks_up_to(mut self, bytes: usize) -> Self {
        self.chunk_bytes_max = Some(bytes);
        self
    }

    /// The same program with chunks of so many bytes at most, where a call is so long that it is
    /// cut at all.
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

    /// The collective it carries out.
    #[must_use]
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// What people call its algorithm.
    #[must_use]
    pub fn algorithm(&self) -> &str {
        &self.algorithm
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
fn cuts(schedule: &Schedule) -> Vec<Cut> {
    let mut weights = vec![0; schedule.collective.parts(schedule.ranks()) as usize];
    let mut cuts: Vec<Cut> = Vec::with_capacity(schedule.blocks.len());
    for block in &schedule.blocks {
        let before = &mut weights[block.part as usize];
        let weight = u64::from(block.weight);
        cuts.push(Cut { part: block.part, before: *before, weight, total: 0, size: 1 });
        *before += weight;
    }
    cuts.iter_mut().for_each(|cut| cut.total = weights[cut.part as usize]);
    cuts
}

struct Builder<'a> {
    slots: &'a Slots,
    outgoing: &'a BTreeMap<Rank, PairSignals>,
    incoming: &'a BTreeMap<Rank, PairSignals>,
    proof: &'a Proof,
    rank: Rank,
    bounce: u32,
    cuts: &'a [Cut],
    own_blocks: BTreeMap<BlockId, u32>,
    lanes: Vec<LaneProgram>,
    steps: Vec<StepProgram>,
    after: Vec<(u32, u32)>,
    places: Vec<PlaceAt>,
}

impl Builder<'_> {
    fn lane(&mut self, lane_number: usize, lane: &pleach_schedule::Lane) {
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
                    self.bounce += self.cuts[block as usize].size;
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
                landing: self.proof.landing(self.rank, lane, step).map(|part| place(self.rank, part)),
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

/// FNV-1a over the schedule's words: equal on all ranks for equal schedules.
fn hash_schedule(schedule: &Schedule) -> u64 {
    use std::hash::{Hash, Hasher};
    let mut hasher = pleach_schedule::digest::Hasher64::default();
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
