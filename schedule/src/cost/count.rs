//! Counting in a schedule: what ranks do for one chunk of every block, and the longest way through
//! it.

use std::collections::{BTreeMap, VecDeque};

use pleach_vocabulary::Rank;

use crate::hosts::HostMap;
use crate::{Op, Part, Place, Schedule};

/// What one rank does for a chunk of every block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
    pub(super) messages: u32,
    pub(super) sent: u32,
    pub(super) received: u32,
    pub(super) messages_across: u32,
    pub(super) sent_across: u32,
    pub(super) received_across: u32,
    pub(super) passed: u32,
    pub(super) reduced: u32,
}

/// By rank; messages and puts are those inside its host but for what says "across".
pub(super) fn loads(schedule: &Schedule, hosts: &HostMap) -> Vec<Load> {
    let mut loads = vec![Load::default(); schedule.programs.len()];
    for (rank, lanes) in schedule.programs.iter().enumerate() {
        for step in lanes.iter().flat_map(|lane| &lane.steps) {
            match &step.op {
                Op::Wait { .. } => {}
                Op::Signal { to, .. } if hosts.are_neighbours(rank as Rank, *to) => loads[rank].messages += 1,
                Op::Signal { .. } => loads[rank].messages_across += 1,
                Op::Put { to, .. } if hosts.are_neighbours(rank as Rank, *to) => {
                    loads[rank].messages += 1;
                    loads[rank].sent += 1;
                    loads[*to as usize].received += 1;
                }
                Op::Put { to, .. } => {
                    loads[rank].messages_across += 1;
                    loads[rank].sent_across += 1;
                    loads[*to as usize].received_across += 1;
                }
                Op::Reduce { from, into } => {
                    loads[rank].passed += passed(from, into);
                    loads[rank].reduced += from.len() as u32 - 1;
                }
            }
        }
    }
    loads
}

/// Places that a pass reads and writes, as if all memory were registered.
fn passed(from: &[Place], into: &[Place]) -> u32 {
    let place = |place: &Place| Place {
        rank: place.rank,
        part: match place.part {
            Part::SharedInput => Part::Input,
            Part::SharedOutput => Part::Output,
            own => own,
        },
    };
    let mut written: Vec<Place> = into.iter().map(place).collect();
    written.sort_unstable();
    written.dedup();
    if let [only] = from {
        let only = place(only);
        written.retain(|&place| {
            place != only && (place.rank, place.part, only.part) != (only.rank, Part::Output, Part::Input)
        });
    }
    if written.is_empty() { 0 } else { (from.len() + written.len()) as u32 }
}

/// How long the way to a moment is, in each measure for itself.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Way {
    pub(super) rounds: u32,
    pub(super) moved: u32,
    pub(super) rounds_across: u32,
    pub(super) moved_across: u32,
    pub(super) passed: u32,
}

impl Way {
    /// After a signal to a peer, with bytes or without.
    fn sent(mut self, is_near: bool, moved: u32) -> Self {
        if is_near {
            self.rounds += 1;
            self.moved += moved;
        } else {
            self.rounds_across += 1;
            self.moved_across += moved;
        }
        self
    }

    fn join(&mut self, other: Self) {
        self.rounds = self.rounds.max(other.rounds);
        self.moved = self.moved.max(other.moved);
        self.rounds_across = self.rounds_across.max(other.rounds_across);
        self.moved_across = self.moved_across.max(other.moved_across);
        self.passed = self.passed.max(other.passed);
    }
}

/// A signal: to whom, from whom, for which block, in which signal slot.
type SignalName = (Rank, Rank, u32, u16);

/// How far a lane has come.
struct Progress {
    next: usize,
    issued: Way,
    complete: Vec<Way>,
}

/// The longest way through one chunk of every block.
pub(super) fn longest_way(schedule: &Schedule, hosts: &HostMap) -> Way {
    let mut longest = Way::default();
    let mut shown: BTreeMap<SignalName, Way> = BTreeMap::new();
    let mut waiting: BTreeMap<SignalName, (usize, usize)> = BTreeMap::new();
    let mut progress: Vec<Vec<Progress>> = schedule
        .programs
        .iter()
        .map(|lanes| {
            let start = |_| Progress { next: 0, issued: Way::default(), complete: Vec::new() };
            lanes.iter().map(start).collect()
        })
        .collect();
    let mut ready: VecDeque<(usize, usize)> = progress
        .iter()
        .enumerate()
        .flat_map(|(rank, lanes)| (0..lanes.len()).map(move |lane| (rank, lane)))
        .collect();
    while let Some((rank, lane_index)) = ready.pop_front() {
        let lane = &schedule.programs[rank][lane_index];
        let state = &mut progress[rank][lane_index];
        while let Some(step) = lane.steps.get(state.next) {
            for &(earlier, chunks) in &step.after {
                if chunks == 0 {
                    state.issued.join(state.complete.get(earlier as usize).copied().unwrap_or_default());
                }
            }
            let mut complete = state.issued;
            let arrival = |to: Rank, moved| state.issued.sent(hosts.are_neighbours(rank as Rank, to), moved);
            let signal = match &step.op {
                Op::Wait { from, signal_slot } => {
                    let name = (rank as Rank, *from, lane.block, signal_slot.0);
                    let Some(arrival) = shown.remove(&name) else {
                        waiting.insert(name, (rank, lane_index));
                        break;
                    };
                    state.issued.join(arrival);
                    complete = state.issued;
                    None
                }
                Op::Signal { to, signal_slot } => Some((*to, signal_slot, arrival(*to, 0))),
                Op::Put { to, signal_slot, .. } => Some((*to, signal_slot, arrival(*to, 1))),
                Op::Reduce { from, into } => {
                    complete.passed += passed(from, into);
                    None
                }
            };
            if let Some((to, signal_slot, arrival)) = signal {
                let name = (to, rank as Rank, lane.block, signal_slot.0);
                shown.insert(name, arrival);
                ready.extend(waiting.remove(&name));
            }
            longest.join(complete);
            state.complete.push(complete);
            state.next += 1;
        }
    }
    longest
}
