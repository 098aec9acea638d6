//! Scratch slots of every rank, numbered alike on all of them.
//!
//! Slots of a rank are numbered block by block: first its schedule's slots, then a window of the
//! shared input and output, where peers touch these (one for both: `verify` allows it, and half as
//! much memory passes through the cache); after all of them come the rank's own bounce slots
//! (sources of puts in memory that is not registered). Where all blocks have as many chunks, each
//! of its own length, a slot takes so many *units* of scratch as its block's share asks for, and is
//! numbered by its first one: a packing of thirty trees has room for chunks four times as long as
//! with slots that are all as long as the longest.

use std::collections::BTreeMap;

use pleach_schedule::{BlockId, Op, Part, Place, Schedule};
use pleach_vocabulary::Rank;

use super::program::{Cut, NO_SLOT, PlaceAt};

/// Units of scratch that a chunk of the largest block takes, where chunks of blocks differ in
/// length.
const SIZE_MAX: u32 = 64;

/// Most units of a window: with more each would be too small for what rounding takes.
const UNITS_MAX: u32 = 1 << 15;

/// The scratch slots of every rank.
pub(super) struct Slots {
    /// By rank and block: where its slots begin and which windows follow them.
    at: BTreeMap<(Rank, BlockId), BlockSlots>,
    /// By rank: how many units in all.
    pub(super) count: Vec<u32>,
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
    pub(super) fn new(schedule: &Schedule, cuts: &[Cut]) -> Self {
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
            slots.size = cuts[*block as usize].size;
            slots.base = count[*rank as usize];
            count[*rank as usize] += slots.len();
        }
        Self { at, count }
    }

    pub(super) fn place(&self, place: Place, block: BlockId) -> PlaceAt {
        let slot = self.at.get(&(place.rank, block)).map_or(NO_SLOT, |slots| slots.slot(place.part));
        PlaceAt { rank: place.rank, part: place.part, slot }
    }
}

/// Gives each block as much scratch a chunk as it has of its part, in proportion, as finely as the
/// number of units allows.
pub(super) fn size_by_share(schedule: &Schedule, cuts: &mut [Cut]) {
    let share = |cut: &Cut| (u128::from(cut.weight) << u32::BITS) / u128::from(cut.total.max(1));
    let shares: Vec<u128> = cuts.iter().map(share).collect();
    let largest = shares.iter().copied().max().unwrap_or(0).max(1);
    let mut most = SIZE_MAX;
    while most > 1 {
        for (cut, share) in cuts.iter_mut().zip(&shares) {
            cut.size = (share * u128::from(most)).div_ceil(largest).max(1) as u32;
        }
        let units = most_units(schedule, &Slots::new(schedule, cuts), cuts);
        let is_even = cuts.iter().all(|cut| cut.size == most);
        if !is_even && units.saturating_mul(schedule.window) <= UNITS_MAX {
            return;
        }
        most /= 2;
    }
    cuts.iter_mut().for_each(|cut| cut.size = 1);
}

/// The units of scratch of the rank that has most. Bounce slots are the own rank's affair, but the
/// size of a bank must be the same everywhere.
pub(super) fn most_units(schedule: &Schedule, slots: &Slots, cuts: &[Cut]) -> u32 {
    let bounces = |lane: &pleach_schedule::Lane| {
        let puts = lane.steps.iter().filter(|step| bounces(&step.op)).count() as u32;
        puts * cuts[lane.block as usize].size
    };
    let used = slots.count.iter().zip(&schedule.programs);
    used.map(|(units, lanes)| units + lanes.iter().map(bounces).sum::<u32>()).max().unwrap_or(0)
}

/// Whether what is put may have to be copied first.
pub(super) fn bounces(op: &Op) -> bool {
    matches!(op, Op::Put { src: Part::Input | Part::Output, .. })
}
