//! The time of a schedule over given links.
//!
//! Each link carries the chunks on its routes one after the other, and cannot begin before the
//! first chunk arrives. So a schedule takes at least
//!
//! ```text
//! T = max( path, max over links (first + load / bandwidth + latency) )
//! ```
//!
//! where `path` is the critical path through one chunk of every block, each transfer alone on its
//! links, and `first` is the time at which the link is first used on it. Computation takes no time:
//! only links are compared. This is the time that the simulator measures if chunks do not wait for
//! each other, and it is close to that time if they do.

use std::collections::{BTreeMap, VecDeque};

use pleach_packing::topology::Link;
use pleach_vocabulary::Rank;

use crate::wiring::Routes;
use crate::{BlockId, Op, Schedule, StepId};

/// The size of a block, and the size of each of its chunks, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockBytes {
    pub(crate) block: f64,
    pub(crate) chunk: f64,
}

/// Time of a schedule for blocks of these sizes, in seconds.
pub(crate) fn seconds(routes: &Routes, schedule: &Schedule, sizes: &dyn Fn(BlockId) -> BlockBytes) -> f64 {
    let sizes: Vec<BlockBytes> = (0..schedule.blocks.len() as BlockId).map(sizes).collect();
    let mut clock =
        LinkClock { routes, sizes: &sizes, links: vec![LinkUse::default(); routes.links().len()] };
    let path = clock.path(schedule);
    let used = routes.links().iter().zip(&clock.links).filter(|(_, used)| used.bytes > 0.0);
    used.map(|(link, used)| used.first_s + used.bytes / link.bytes_per_s as f64 + latency_s(link))
        .fold(path, f64::max)
}

/// The latency of a byte.
fn latency_s(link: &Link) -> f64 {
    seconds_of(link.latency_ns)
}

fn seconds_of(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

/// The traffic of a link.
#[derive(Clone, Copy)]
struct LinkUse {
    bytes: f64,
    first_s: f64,
}

impl Default for LinkUse {
    fn default() -> Self {
        Self { bytes: 0.0, first_s: f64::INFINITY }
    }
}

/// A signal: destination rank, source rank, block, signal slot.
type BlockSignal = (Rank, Rank, BlockId, u16);

/// How far a lane has come, and when.
struct LaneTime {
    next: usize,
    issued_s: f64,
    complete_s: Vec<f64>,
}

struct LinkClock<'a> {
    routes: &'a Routes,
    sizes: &'a [BlockBytes],
    links: Vec<LinkUse>,
}

impl LinkClock<'_> {
    /// Notes a put and returns how long its sender is at it and how long until it is there.
    fn put(&mut self, from: Rank, to: Rank, block: BlockId, issued_s: f64) -> (f64, f64) {
        let BlockBytes { block, chunk } = self.sizes[block as usize];
        let routes = self.routes.between(from, to);
        let sum: f64 = routes.iter().map(|route| route.weight as f64).sum();
        let (mut sent_s, mut there_s): (f64, f64) = (0.0, 0.0);
        for route in routes {
            let part = route.weight as f64 / sum;
            let (mut before_s, mut slowest_s): (f64, f64) = (0.0, 0.0);
            for (hop, link) in route.links.iter().enumerate() {
                let wire = &self.routes.links()[*link];
                let used = &mut self.links[*link];
                used.bytes += part * block;
                used.first_s = used.first_s.min(issued_s + before_s);
                before_s += latency_s(wire);
                let takes_s = part * chunk / wire.bytes_per_s as f64;
                slowest_s = slowest_s.max(takes_s);
                if hop == 0 {
                    sent_s = sent_s.max(takes_s);
                }
            }
            there_s = there_s.max(before_s + slowest_s);
        }
        (sent_s, there_s)
    }

    /// The longest way through one chunk of every block.
    fn path(&mut self, schedule: &Schedule) -> f64 {
        let mut longest_s: f64 = 0.0;
        let mut shown: BTreeMap<BlockSignal, f64> = BTreeMap::new();
        let mut waiting: BTreeMap<BlockSignal, (usize, usize)> = BTreeMap::new();
        let start = |_: &_| LaneTime { next: 0, issued_s: 0.0, complete_s: Vec::new() };
        let mut progress: Vec<Vec<LaneTime>> =
            schedule.programs.iter().map(|lanes| lanes.iter().map(start).collect()).collect();
        let lanes_of = |(rank, lanes): (usize, &Vec<LaneTime>)| {
            (0..lanes.len()).map(move |lane| (rank, lane)).collect::<Vec<_>>()
        };
        let mut ready: VecDeque<(usize, usize)> = progress.iter().enumerate().flat_map(lanes_of).collect();
        while let Some((rank, lane_index)) = ready.pop_front() {
            let lane = &schedule.programs[rank][lane_index];
            let state = &mut progress[rank][lane_index];
            while let Some(step) = lane.steps.get(state.next) {
                let done = |&&(_, chunks): &&(StepId, u32)| chunks == 0;
                let after = step.after.iter().filter(done).map(|&(step, _)| state.complete_s[step as usize]);
                state.issued_s = after.fold(state.issued_s, f64::max);
                let mut complete_s = state.issued_s;
                let signal = match &step.op {
                    Op::Wait { from, signal_slot } => {
                        let name = (rank as Rank, *from, lane.block, signal_slot.0);
                        let Some(arrival_s) = shown.remove(&name) else {
                            waiting.insert(name, (rank, lane_index));
                            break;
                        };
                        state.issued_s = state.issued_s.max(arrival_s);
                        complete_s = state.issued_s;
                        None
                    }
                    Op::Signal { to, signal_slot } => {
                        let latency_s = seconds_of(self.routes.latency_ns(rank as Rank, *to));
                        Some((*to, signal_slot.0, state.issued_s + latency_s))
                    }
                    Op::Put { to, signal_slot, .. } => {
                        let (sent_s, there_s) = self.put(rank as Rank, *to, lane.block, state.issued_s);
                        complete_s += sent_s;
                        Some((*to, signal_slot.0, state.issued_s + there_s))
                    }
                    Op::Reduce { .. } => None,
                };
                if let Some((to, signal_slot, arrival_s)) = signal {
                    let name = (to, rank as Rank, lane.block, signal_slot);
                    shown.insert(name, arrival_s);
                    ready.extend(waiting.remove(&name));
                    longest_s = longest_s.max(arrival_s);
                }
                longest_s = longest_s.max(complete_s);
                state.complete_s.push(complete_s);
                state.next += 1;
            }
        }
        longest_s
    }
}
