//! Counts the work of each rank for one chunk of every block, and the critical path through that
//! chunk.
//!
//! Lanes of different blocks tell each other nothing, so each block has a path of its own. In a
//! [`Family`] all blocks are translations of block 0. Where a translation keeps ranks of one host
//! on one host, the translated block has the same path, and the same work at the translated ranks.
//! So only one block is counted of those that such translations make of each other; on one host
//! that is block 0 alone. The classes of blocks are those of ranks too: ranks that these
//! translations make of each other do the same work over all blocks.

use std::collections::{BTreeMap, VecDeque};

use pleach_vocabulary::Rank;

use super::{InterHost, Work};
use crate::family::{Family, Symmetry, Translations};
use crate::hosts::HostMap;
use crate::{BlockId, Lane, Op, Part, Place, Schedule};

/// The work of a schedule of ranks on these hosts, and how many steps were looked at for it.
pub(crate) fn schedule(schedule: &Schedule, hosts: &HostMap) -> (Work, usize) {
    let of = hosts.by_rank();
    (work(schedule, &loads(schedule, of), &critical_path(schedule, of), hosts), steps(schedule))
}

fn steps(schedule: &Schedule) -> usize {
    schedule.programs.iter().flatten().map(|lane| lane.steps.len()).sum()
}

/// As [`fn@schedule`], of the schedule that a family means; `None` where its ranks, not its blocks,
/// are translations of each other. Such a schedule has one block and is short.
pub(crate) fn family(family: &Family, hosts: &HostMap) -> Option<(Work, usize)> {
    let Family { symmetry: Symmetry::Blocks, column, extents, .. } = family else { return None };
    let group = Translations::new(extents, column.ranks())?;
    let first = classes(&group, hosts.by_rank());
    let (mut path, mut blocks) = (CriticalPath::default(), 0);
    let mut totals = vec![RankLoad::default(); first.len()];
    for block in (0..column.ranks()).filter(|&block| first[block as usize] == block) {
        blocks += 1;
        // The hosts as block 0 finds them where this block is.
        let of: Vec<u32> = (0..column.ranks()).map(|rank| hosts.host(group.add(rank, block))).collect();
        path.join(critical_path(column, &of));
        for (rank, load) in (0..).zip(loads(column, &of)) {
            totals[first[group.add(rank, block) as usize] as usize].add(load);
        }
    }
    let loads: Vec<RankLoad> = first.iter().map(|&first| totals[first as usize]).collect();
    Some((work(column, &loads, &path, hosts), blocks * steps(column)))
}

/// By rank: the first rank of its class. A class is made of one rank by the translations that keep
/// ranks of one host on one host.
fn classes(group: &Translations, hosts: &[u32]) -> Vec<Rank> {
    let ranks = hosts.len() as Rank;
    // These translations are a group. The ranks that they make of rank 0 say which they are.
    let mut kept = vec![0];
    let mut is_kept: Vec<bool> = (0..ranks).map(|rank| rank == 0).collect();
    for by in 1..ranks {
        if is_kept[by as usize] || !keeps_neighbours(group, hosts, by) {
            continue;
        }
        let known = kept.len();
        let mut further = by;
        while !is_kept[further as usize] {
            for index in 0..known {
                let translation = group.add(kept[index], further);
                is_kept[translation as usize] = true;
                kept.push(translation);
            }
            further = group.add(further, by);
        }
    }
    let mut first = vec![Rank::MAX; hosts.len()];
    for rank in 0..ranks {
        if first[rank as usize] == Rank::MAX {
            kept.iter().for_each(|&by| first[group.add(rank, by) as usize] = rank);
        }
    }
    first
}

/// Whether ranks of one host stay on one host. Then ranks of different hosts do not come together
/// either: a translation reaches every rank, so the hosts that the hosts come to are all hosts.
fn keeps_neighbours(group: &Translations, hosts: &[u32], by: Rank) -> bool {
    let mut images = vec![None; hosts.len()];
    (0..).zip(hosts).all(|(rank, &host): (Rank, _)| {
        let image = hosts[group.add(rank, by) as usize];
        *images[host as usize].get_or_insert(image) == image
    })
}

/// From the loads of all ranks, and the longest path.
fn work(schedule: &Schedule, loads: &[RankLoad], path: &CriticalPath, hosts: &HostMap) -> Work {
    let most = |count: &dyn Fn(&RankLoad) -> u32| loads.iter().map(count).max().unwrap_or(0);
    let mut wires = vec![(0, 0); hosts.hosts() as usize];
    for (rank, load) in (0..).zip(loads) {
        let (sent, received) = &mut wires[hosts.host(rank) as usize];
        *sent += load.inter_host_sent;
        *received += load.inter_host_received;
    }
    let wire = wires.iter().map(|&(sent, received)| sent.max(received)).max().unwrap_or(0);
    let moved = most(&|load| load.sent.max(load.received));
    let passed = most(&|load| load.passed);
    Work {
        blocks: schedule.blocks.len() as u32,
        rounds: path.rounds,
        messages: most(&|load| load.messages),
        moved,
        reduced: most(&|load| load.reduced),
        passed,
        moved_on_path: path.moved.max(moved),
        passed_on_path: path.passed.max(passed),
        inter_host: InterHost {
            rounds: path.inter_host_rounds,
            messages: most(&|load| load.inter_host_messages),
            moved: wire,
            moved_on_path: path.inter_host_moved.max(wire),
        },
    }
}

/// The work of one rank for a chunk of every block.
#[derive(Clone, Copy, Debug, Default)]
struct RankLoad {
    messages: u32,
    sent: u32,
    received: u32,
    inter_host_messages: u32,
    inter_host_sent: u32,
    inter_host_received: u32,
    passed: u32,
    reduced: u32,
}

impl RankLoad {
    fn add(&mut self, other: Self) {
        self.messages += other.messages;
        self.sent += other.sent;
        self.received += other.received;
        self.inter_host_messages += other.inter_host_messages;
        self.inter_host_sent += other.inter_host_sent;
        self.inter_host_received += other.inter_host_received;
        self.passed += other.passed;
        self.reduced += other.reduced;
    }
}

/// By rank. Messages and puts are those inside its host, but for the fields named `inter_host`.
fn loads(schedule: &Schedule, hosts: &[u32]) -> Vec<RankLoad> {
    let mut loads = vec![RankLoad::default(); schedule.programs.len()];
    for (rank, lanes) in schedule.programs.iter().enumerate() {
        let is_near = |to: Rank| hosts[rank] == hosts[to as usize];
        for step in lanes.iter().flat_map(|lane| &lane.steps) {
            match &step.op {
                Op::Wait { .. } => {}
                Op::Signal { to, .. } if is_near(*to) => loads[rank].messages += 1,
                Op::Signal { .. } => loads[rank].inter_host_messages += 1,
                Op::Put { to, .. } if is_near(*to) => {
                    loads[rank].messages += 1;
                    loads[rank].sent += 1;
                    loads[*to as usize].received += 1;
                }
                Op::Put { to, .. } => {
                    loads[rank].inter_host_messages += 1;
                    loads[rank].inter_host_sent += 1;
                    loads[*to as usize].inter_host_received += 1;
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
    let only = if let [only] = from { Some(place(only)) } else { None };
    let is_written = |place: &Place| {
        only.is_none_or(|only| {
            *place != only && (place.rank, place.part, only.part) != (only.rank, Part::Output, Part::Input)
        })
    };
    let written = match into {
        [into] => u32::from(is_written(&place(into))),
        _ => {
            let mut written: Vec<Place> = into.iter().map(place).filter(is_written).collect();
            written.sort_unstable();
            written.dedup();
            written.len() as u32
        }
    };
    if written == 0 { 0 } else { from.len() as u32 + written }
}

/// The length of the path to a moment, in each measure by itself.
#[derive(Clone, Copy, Debug, Default)]
struct CriticalPath {
    rounds: u32,
    moved: u32,
    inter_host_rounds: u32,
    inter_host_moved: u32,
    passed: u32,
}

impl CriticalPath {
    /// The path after a signal to a peer, with bytes or without.
    fn sent(mut self, is_near: bool, moved: u32) -> Self {
        if is_near {
            self.rounds += 1;
            self.moved += moved;
        } else {
            self.inter_host_rounds += 1;
            self.inter_host_moved += moved;
        }
        self
    }

    fn join(&mut self, other: Self) {
        self.rounds = self.rounds.max(other.rounds);
        self.moved = self.moved.max(other.moved);
        self.inter_host_rounds = self.inter_host_rounds.max(other.inter_host_rounds);
        self.inter_host_moved = self.inter_host_moved.max(other.inter_host_moved);
        self.passed = self.passed.max(other.passed);
    }
}

/// A signal of a block: destination rank, source rank, signal slot.
type SignalName = (Rank, Rank, u16);

/// The end of a signal that came first.
enum SignalEnd {
    Arrived(CriticalPath),
    /// The number of the lane that waits.
    Awaited(usize),
}

/// How far a lane has come.
struct LanePath<'a> {
    rank: Rank,
    lane: &'a Lane,
    next: usize,
    issued: CriticalPath,
    /// Of its first step, among the steps of its block.
    first: usize,
}

/// The longest path through one chunk of every block.
fn critical_path(schedule: &Schedule, hosts: &[u32]) -> CriticalPath {
    let lanes_of = |(rank, lanes): (usize, &'_ Vec<Lane>)| (0..lanes.len()).map(move |lane| (rank, lane));
    let mut lanes: Vec<(BlockId, usize, usize)> = schedule
        .programs
        .iter()
        .enumerate()
        .flat_map(lanes_of)
        .map(|(rank, lane)| (schedule.programs[rank][lane].block, rank, lane))
        .collect();
    lanes.sort_unstable();
    let mut longest = CriticalPath::default();
    // Each block uses their memory again.
    let mut signals: BTreeMap<SignalName, SignalEnd> = BTreeMap::new();
    let (mut states, mut complete) = (Vec::new(), Vec::new());
    let mut ready = VecDeque::new();
    for block in lanes.chunk_by(|(one, ..), (other, ..)| one == other) {
        signals.clear();
        states.clear();
        let mut steps = 0;
        states.extend(block.iter().map(|&(_, rank, lane)| {
            let lane = &schedule.programs[rank][lane];
            steps += lane.steps.len();
            let (rank, issued, first) = (rank as Rank, CriticalPath::default(), steps - lane.steps.len());
            LanePath { rank, lane, next: 0, issued, first }
        }));
        complete.clear();
        complete.resize(steps, CriticalPath::default());
        ready.extend(0..states.len());
        while let Some(number) = ready.pop_front() {
            let LanePath { rank, lane, next, issued, first } = &mut states[number];
            let complete = &mut complete[*first..*first + lane.steps.len()];
            while let Some(step) = lane.steps.get(*next) {
                for &(earlier, chunks) in &step.after {
                    if chunks == 0 {
                        issued.join(complete.get(earlier as usize).copied().unwrap_or_default());
                    }
                }
                let mut done = *issued;
                let arrival =
                    |to: Rank, moved| issued.sent(hosts[*rank as usize] == hosts[to as usize], moved);
                let signal = match &step.op {
                    Op::Wait { from, signal_slot } => {
                        let name = (*rank, *from, signal_slot.0);
                        let Some(SignalEnd::Arrived(arrival)) = signals.remove(&name) else {
                            signals.insert(name, SignalEnd::Awaited(number));
                            break;
                        };
                        issued.join(arrival);
                        done = *issued;
                        None
                    }
                    Op::Signal { to, signal_slot } => Some((*to, signal_slot, arrival(*to, 0))),
                    Op::Put { to, signal_slot, .. } => Some((*to, signal_slot, arrival(*to, 1))),
                    Op::Reduce { from, into } => {
                        done.passed += passed(from, into);
                        None
                    }
                };
                if let Some((to, signal_slot, arrival)) = signal {
                    let name = (to, *rank, signal_slot.0);
                    if let Some(SignalEnd::Awaited(lane)) = signals.insert(name, SignalEnd::Arrived(arrival))
                    {
                        ready.push_back(lane);
                    }
                }
                longest.join(done);
                complete[*next] = done;
                *next += 1;
            }
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use pleach_vocabulary::Collective;

    use super::*;
    use crate::generate::{Access, Algorithm, family, generate};
    use crate::select::candidates;

    #[test]
    fn every_rank_sends_and_reduces_its_share() {
        for ranks in [2, 3, 5, 8, 12] {
            for algorithm in ["ring", "direct", "grid"] {
                let algorithm = match algorithm {
                    "grid" => Algorithm::Grid(vec![ranks].into()),
                    name => name.parse().expect("a known name"),
                };
                let schedule =
                    generate(Collective::AllReduce, &algorithm, ranks, Access::Put).expect("it fits");
                for load in loads(&schedule, HostMap::one(ranks).by_rank()) {
                    assert_eq!(load.sent, 2 * (ranks - 1), "{algorithm} {ranks}");
                    assert_eq!(load.received, load.sent);
                    assert_eq!(load.reduced, ranks - 1);
                }
            }
        }
    }

    #[test]
    fn one_block_of_each_class_says_what_the_whole_schedule_says() {
        let arranged = "1x2 1x6 1x16 1x21 2x2 2x4 4x2 4x4 2x8 8x4 3x5 5x3 6x1 3+2 5+3+8 1+1+2 0,1,0,1 \
                        0,1,2,0,1,2 0,0,1,1,1,0 0,0,1,1,0,0,1,1";
        let mut compared = 0;
        for arranged in arranged.split(' ') {
            let hosts: HostMap = arranged.parse().expect("a map");
            for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
                let hierarchical = Algorithm::Hierarchical(Some(hosts.clone()));
                for algorithm in candidates(collective, hosts.ranks()).into_iter().chain([hierarchical]) {
                    for access in [Access::Put, Access::Mapped] {
                        let fits = "the algorithm is a candidate";
                        let made = family(collective, &algorithm, hosts.ranks(), access).expect(fits);
                        let Some((counted, _)) = made.and_then(|made| super::family(&made, &hosts)) else {
                            continue;
                        };
                        let whole = generate(collective, &algorithm, hosts.ranks(), access).expect(fits);
                        let (whole, _) = schedule(&whole, &hosts);
                        assert_eq!(counted, whole, "{collective} {algorithm} {access} {arranged}");
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 300, "{compared}");
    }

    #[test]
    fn classes_are_as_few_as_the_hosts_allow() {
        for (hosts, extents, count) in [
            ("1x12", &[12][..], 1),
            ("3x4", &[12], 4),
            ("3x4", &[3, 4], 1),
            ("4x4", &[2, 2, 2, 2], 1),
            ("6x1", &[6], 1),
            ("0,1,0,1", &[4], 1),
            ("3+2", &[5], 5),
            ("0,0,1,1,1,0", &[6], 3),
        ] {
            let map: HostMap = hosts.parse().expect("a map");
            let group = Translations::new(extents, map.ranks()).expect("it fits");
            let first = classes(&group, map.by_rank());
            let found = (0..).zip(&first).filter(|&(rank, &first): &(Rank, _)| first == rank).count();
            assert_eq!(found, count, "{hosts} {extents:?}: {first:?}");
        }
    }
}
