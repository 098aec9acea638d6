//! The lanes of a proved schedule, with the wait that each signal ends.
//!
//! Of a [family](pleach_schedule::Family) only the column is kept: the lane of a block at a rank is
//! a program of the column, translated by the block. So thousands of ranks take the memory of one
//! block. Of ranks that fold together only those have lanes that are carried out.
//!
//! **Invariant:** each signal and put names the wait of its target that it ends: that of the same
//! block, sender and signal slot, of which the proof says that there is exactly one.

use std::collections::HashMap;

use pleach_schedule::verify::{Proof, ProvedFamily};
use pleach_schedule::{BlockId, Lane, Op, SignalSlot, Symmetry};
use pleach_vocabulary::Rank;

use super::folding::Folding;

/// Names a lane of those that are carried out.
pub(crate) type LaneId = u32;

/// The operation of a step, as far as it takes time or others wait for it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepOp {
    Wait,
    Signal(Peer),
    Put(Peer),
    /// Combines or copies.
    Pass,
}

/// The target of a signal or put.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// In a family: the rank, in the column. Else the lane that waits.
    to: u32,
    /// The step of that lane that waits for it.
    wait: u32,
}

/// A target that is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    rank: Rank,
    lane: LaneId,
    wait: u32,
}

impl Target {
    /// The rank that gets the signal, before folding.
    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// The lane that waits, after folding.
    pub(crate) fn lane(&self) -> LaneId {
        self.lane
    }

    /// The step of that lane.
    pub(crate) fn wait(&self) -> u32 {
        self.wait
    }
}

/// A step of a program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LaneStep {
    op: StepOp,
    after: (u32, u32),
}

impl LaneStep {
    pub(crate) fn op(&self) -> StepOp {
        self.op
    }
}

/// The programs of lanes, one after the other.
#[derive(Debug, Default)]
struct Programs {
    steps: Vec<LaneStep>,
    after: Vec<(u32, u32)>,
    /// By program: its steps.
    ranges: Vec<(u32, u32)>,
}

impl Programs {
    fn add(&mut self, lane: &Lane, mut peer: impl FnMut(Rank, SignalSlot) -> Peer) {
        let first = self.steps.len() as u32;
        for step in &lane.steps {
            let op = match step.op {
                Op::Wait { .. } => StepOp::Wait,
                Op::Signal { to, signal_slot } => StepOp::Signal(peer(to, signal_slot)),
                Op::Put { to, signal_slot, .. } => StepOp::Put(peer(to, signal_slot)),
                Op::Reduce { .. } => StepOp::Pass,
            };
            let after = self.after.len() as u32;
            self.after.extend(&step.after);
            self.steps.push(LaneStep { op, after: (after, self.after.len() as u32) });
        }
        self.ranges.push((first, self.steps.len() as u32));
    }
}

/// The waits of a lane: by sender and signal slot, the number of the step.
fn waits(lane: &Lane) -> impl Iterator<Item = ((Rank, SignalSlot), u32)> + '_ {
    (0..).zip(&lane.steps).filter_map(|(number, step)| match step.op {
        Op::Wait { from, signal_slot } => Some(((from, signal_slot), number)),
        _ => None,
    })
}

#[derive(Debug)]
enum Kind<'a> {
    /// Lanes of a family: as many at each rank as there are blocks, or one.
    Family {
        family: &'a ProvedFamily,
        folding: &'a Folding,
        blocks: u32,
        /// By class of ranks and block: the place of the block's lane among those of the rank.
        places: Vec<u32>,
    },
    /// By lane: its rank and its block.
    Whole { lanes: Vec<(Rank, BlockId)> },
}

/// The lanes of all ranks that are carried out.
#[derive(Debug)]
pub(crate) struct Lanes<'a> {
    programs: Programs,
    kind: Kind<'a>,
    /// By rank that is carried out: its first lane; and one more, the number of all lanes.
    first: Vec<u32>,
}

impl<'a> Lanes<'a> {
    /// Of a proof that is folded in this way. Of a schedule that is no family nothing is folded.
    pub(crate) fn new(proof: &'a Proof, folding: &'a Folding) -> Self {
        match proof.family() {
            Some(family) => Self::of_family(family, folding),
            None => Self::of_whole(proof),
        }
    }

    fn of_family(family: &'a ProvedFamily, folding: &'a Folding) -> Self {
        let column = family.column();
        let mut programs = Programs::default();
        let (blocks, by_ranks) = match family.family().symmetry {
            Symmetry::Blocks => (column.blocks.len() as u32, false),
            Symmetry::Ranks => (1, true),
        };
        let lanes: Vec<&Lane> = column.programs.iter().flatten().collect();
        let waits: Vec<HashMap<(Rank, SignalSlot), u32>> =
            lanes.iter().map(|lane| waits(lane).collect()).collect();
        for (own, lane) in (0..).zip(&lanes) {
            programs.add(lane, |to, signal_slot| {
                // By ranks: the receiver sees the sender as rank 0 would see it from there.
                let (place, from) = if by_ranks { (0, family.displacement(to, 0)) } else { (to, own) };
                Peer { to, wait: waits[place as usize][&(from, signal_slot)] }
            });
        }
        let mut places = Vec::new();
        if !by_ranks {
            for &rank in folding.carried_out() {
                let base = places.len();
                places.resize(base + blocks as usize, 0);
                for place in 0..blocks {
                    places[base + family.block(rank, place) as usize] = place;
                }
            }
        }
        let first = (0..=folding.carried_out().len() as u32).map(|class| class * blocks).collect();
        Self { programs, kind: Kind::Family { family, folding, blocks, places }, first }
    }

    fn of_whole(proof: &'a Proof) -> Self {
        let schedule = proof.schedule();
        let mut known: HashMap<(Rank, Rank, BlockId, SignalSlot), (LaneId, u32)> = HashMap::new();
        let (mut lanes, mut first) = (Vec::new(), Vec::new());
        for (rank, program) in (0..).zip(&schedule.programs) {
            first.push(lanes.len() as u32);
            for lane in program {
                for ((from, signal_slot), step) in waits(lane) {
                    known.insert((rank, from, lane.block, signal_slot), (lanes.len() as LaneId, step));
                }
                lanes.push((rank, lane.block));
            }
        }
        first.push(lanes.len() as u32);
        let mut programs = Programs::default();
        for (rank, program) in (0..).zip(&schedule.programs) {
            for lane in program {
                programs.add(lane, |to, signal_slot| {
                    let (lane, wait) = known[&(to, rank, lane.block, signal_slot)];
                    Peer { to: lane, wait }
                });
            }
        }
        Self { programs, kind: Kind::Whole { lanes }, first }
    }

    /// How many lanes there are.
    pub(crate) fn count(&self) -> u32 {
        self.first.last().copied().unwrap_or(0)
    }

    /// How many ranks are carried out.
    pub(crate) fn ranks(&self) -> u32 {
        self.first.len() as u32 - 1
    }

    /// The lanes of a rank that is carried out, in the order in which it turns to them.
    pub(crate) fn of_rank(&self, class: u32) -> std::ops::Range<LaneId> {
        self.first[class as usize]..self.first[class as usize + 1]
    }

    /// The number of the rank of a lane among those that are carried out.
    pub(crate) fn class(&self, lane: LaneId) -> u32 {
        match &self.kind {
            Kind::Family { blocks, .. } => lane / blocks,
            Kind::Whole { lanes } => lanes[lane as usize].0,
        }
    }

    /// The block of a lane.
    pub(crate) fn block(&self, lane: LaneId) -> BlockId {
        match &self.kind {
            Kind::Family { family, folding, blocks, .. } => {
                family.block(folding.carried_out()[(lane / blocks) as usize], lane % blocks)
            }
            Kind::Whole { lanes } => lanes[lane as usize].1,
        }
    }

    /// The steps of a lane.
    pub(crate) fn steps(&self, lane: LaneId) -> &[LaneStep] {
        let program = match &self.kind {
            Kind::Family { family, folding, blocks, .. } => {
                let rank = folding.carried_out()[(lane / blocks) as usize];
                family.position(rank, family.block(rank, lane % blocks))
            }
            Kind::Whole { .. } => lane,
        };
        let (first, end) = self.programs.ranges[program as usize];
        &self.programs.steps[first as usize..end as usize]
    }

    /// What must be complete before a step: steps of the same lane, each with how many chunks
    /// earlier.
    pub(crate) fn after(&self, step: &LaneStep) -> &[(u32, u32)] {
        &self.programs.after[step.after.0 as usize..step.after.1 as usize]
    }

    /// The target of a signal or put of a lane.
    pub(crate) fn target(&self, lane: LaneId, peer: Peer) -> Target {
        let (family, folding, blocks, places) = match &self.kind {
            Kind::Family { family, folding, blocks, places } => (family, folding, *blocks, places),
            Kind::Whole { lanes } => {
                return Target { rank: lanes[peer.to as usize].0, lane: peer.to, wait: peer.wait };
            }
        };
        let own = folding.carried_out()[(lane / blocks) as usize];
        if places.is_empty() {
            let rank = family.translated_rank(peer.to, own);
            return Target { rank, lane: folding.class_of(rank).0, wait: peer.wait };
        }
        let block = family.block(own, lane % blocks);
        let rank = family.translated_rank(peer.to, block);
        let (class, by) = folding.class_of(rank);
        let folded = family.displacement(by, block);
        let lane = class * blocks + places[(class * blocks + folded) as usize];
        Target { rank, lane, wait: peer.wait }
    }
}
