//! Links that serve one transfer after the other: each is a queue, in the order of the transfers'
//! arrival.
//!
//! A transfer over several routes is split into parts by weight. A part passes its links
//! cut-through: it may enter the next link when its first byte has arrived, occupies every link for
//! the time of its bytes at that link's bandwidth, and cannot leave a link before the previous one.
//! A transfer without bytes occupies no link and does not wait.
//!
//! **Invariant:** no two transfers occupy a link at the same time. Times are in whole picoseconds,
//! rounded up, so that many short transfers do not each lose part of a nanosecond.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use crate::Rank;
use crate::clock::Nanos;
use crate::sim::flows::FlowId;
use crate::sim::network::{LinkId, Network, Route};
use crate::sim::sequence_map::SequenceMap;

const PICOS_PER_NANO: u128 = 1_000;
const PICOS_PER_S: u128 = 1_000_000_000_000;

/// The progress of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlowProgress {
    /// Its last byte has left its sender.
    Left(FlowId),
    /// Its last byte has arrived.
    Arrived(FlowId),
}

/// An internal event.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// The first byte of a part is at a link; the part has come out of the link before at this
    /// time.
    Head {
        flow: FlowId,
        part: u32,
        hop: u32,
        behind: u128,
    },
    FlowProgress(FlowProgress),
}

/// When it happens. Equal and ordered by that alone.
#[derive(Clone, Copy, Debug)]
struct QueuedStep {
    at: u128,
    number: u64,
    step: Step,
}

impl Ord for QueuedStep {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl PartialOrd for QueuedStep {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for QueuedStep {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for QueuedStep {}

#[derive(Debug)]
struct Transit {
    from: Rank,
    to: Rank,
    /// Of each route's part.
    bytes: Vec<u64>,
    parts_left: usize,
    arrives: u128,
}

/// The links of a network as queues.
#[derive(Debug)]
pub(super) struct Queues {
    network: Arc<Network>,
    /// By link: until when it is occupied.
    free: Vec<u128>,
    transits: SequenceMap<FlowId, Transit>,
    /// The first on top: by time, then in the order in which they were added.
    steps: BinaryHeap<Reverse<QueuedStep>>,
    stepped: u64,
    next: u64,
}

impl Queues {
    /// With nothing under way.
    #[must_use]
    pub(super) fn new(network: Arc<Network>) -> Self {
        let free = vec![0; network.links().len()];
        Self { network, free, transits: SequenceMap::new(), steps: BinaryHeap::new(), stepped: 0, next: 0 }
    }

    /// Starts to send `bytes` from one rank to another. `now` never goes backwards.
    pub(super) fn start(&mut self, now: Nanos, from: Rank, to: Rank, bytes: u64) -> FlowId {
        let flow = FlowId(self.next);
        self.next += 1;
        let now = u128::from(now.0) * PICOS_PER_NANO;
        let bytes = split(self.network.routes(from, to), bytes);
        let parts = bytes.len();
        self.transits.insert(flow, Transit { from, to, bytes, parts_left: parts, arrives: now });
        let left = (0..parts as u32).map(|part| self.enter(flow, part, 0, now, now)).max();
        self.add(left.unwrap_or(now), Step::FlowProgress(FlowProgress::Left(flow)));
        flow
    }

    /// Forgets a transfer; what it occupies stays occupied.
    pub(super) fn stop(&mut self, flow: FlowId) {
        self.transits.remove(&flow);
    }

    /// When something happens next.
    #[must_use]
    pub(super) fn next_step(&self) -> Option<Nanos> {
        self.steps.peek().map(|Reverse(step)| nanos(step.at))
    }

    /// Lets it happen.
    pub(super) fn step(&mut self) -> Option<FlowProgress> {
        let Reverse(QueuedStep { at, step, .. }) = self.steps.pop()?;
        match step {
            Step::Head { flow, part, hop, behind } => {
                if self.transits.find(&flow).is_some() {
                    self.enter(flow, part, hop, at, behind);
                }
                None
            }
            Step::FlowProgress(passage) => Some(passage),
        }
    }

    /// The first byte of a part comes to a link, the last one not before `behind`. Returns when the
    /// part has passed it.
    fn enter(&mut self, flow: FlowId, part: u32, hop: u32, head: u128, behind: u128) -> u128 {
        let Some(transit) = self.transits.find_mut(&flow) else { return head };
        let bytes = transit.bytes[part as usize];
        let links = &self.network.routes(transit.from, transit.to)[part as usize].links;
        let Some(&LinkId(link)) = links.get(hop as usize) else { return head };
        let wire = &self.network.links()[link as usize];
        let latency = picos(wire.latency);
        let took = (u128::from(bytes) * PICOS_PER_S).div_ceil(u128::from(wire.bytes_per_s));
        let free = &mut self.free[link as usize];
        let start = if bytes == 0 { head } else { head.max(*free).max(behind.saturating_sub(took)) };
        let end = start + took;
        if bytes > 0 {
            *free = end;
        }
        if hop as usize + 1 < links.len() {
            let step = Step::Head { flow, part, hop: hop + 1, behind: end + latency };
            self.add(start + latency, step);
            return end;
        }
        transit.arrives = transit.arrives.max(end + latency);
        transit.parts_left -= 1;
        if transit.parts_left == 0 {
            let arrives = transit.arrives;
            self.add(arrives, Step::FlowProgress(FlowProgress::Arrived(flow)));
        }
        end
    }

    fn add(&mut self, at: u128, step: Step) {
        self.stepped += 1;
        self.steps.push(Reverse(QueuedStep { at, number: self.stepped, step }));
    }
}

fn nanos(picos: u128) -> Nanos {
    Nanos(u64::try_from(picos.div_ceil(PICOS_PER_NANO)).unwrap_or(u64::MAX))
}

fn picos(duration: Duration) -> u128 {
    duration.as_nanos() * PICOS_PER_NANO
}

/// The bytes of each route's part.
fn split(routes: &[Route], bytes: u64) -> Vec<u64> {
    let sum: u128 = routes.iter().map(|route| u128::from(route.weight)).sum();
    let (mut before, mut given) = (0, 0);
    let part = |route: &Route| {
        before += u128::from(route.weight);
        let end = (u128::from(bytes) * before / sum.max(1)) as u64;
        end - std::mem::replace(&mut given, end)
    };
    routes.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::sim::network::NodeId;

    const GB_PER_S: u64 = 1_000_000_000;
    const MICRO: Duration = Duration::from_micros(1);

    /// When each transfer has left and arrived, by its number.
    fn run(queues: &mut Queues) -> BTreeMap<u64, (u64, u64)> {
        let mut seen: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        while let Some(at) = queues.next_step() {
            match queues.step() {
                Some(FlowProgress::Left(flow)) => seen.entry(flow.0).or_default().0 = at.0,
                Some(FlowProgress::Arrived(flow)) => seen.entry(flow.0).or_default().1 = at.0,
                None => {}
            }
        }
        seen
    }

    #[test]
    fn transfers_over_one_link_go_one_after_the_other_and_signals_wait_for_nobody() {
        let mut queues = Queues::new(Arc::new(Network::full_mesh(2, GB_PER_S, MICRO)));
        for bytes in [3_000, 1_000, 0] {
            queues.start(Nanos(0), 0, 1, bytes);
        }
        let seen = run(&mut queues);
        assert_eq!(seen[&0], (3_000, 4_000));
        assert_eq!(seen[&1], (4_000, 5_000));
        assert_eq!(seen[&2], (0, 1_000));
    }

    #[test]
    fn a_transfer_passes_links_cut_through_at_the_pace_of_the_slowest() {
        // 4 GB/s to the switch, 1 GB/s behind it, and 2 GB/s at the end.
        let mut builder = Network::builder(2);
        let (one, other) = (builder.switch(), builder.switch());
        builder.wire(NodeId(0), one, 4 * GB_PER_S, MICRO);
        builder.wire(one, other, GB_PER_S, MICRO);
        builder.wire(other, NodeId(1), 2 * GB_PER_S, MICRO);
        let mut queues = Queues::new(Arc::new(builder.build().expect("a line")));
        queues.start(Nanos(0), 0, 1, 8_000);
        assert_eq!(run(&mut queues)[&0], (2_000, 8_000 + 3_000));
        // The last link is occupied only while bytes come at its own pace: another transfer finds
        // it free before.
        let mut builder = Network::builder(3);
        let switch = builder.switch();
        builder.wire(NodeId(0), switch, GB_PER_S, Duration::ZERO);
        builder.wire(NodeId(2), switch, 8 * GB_PER_S, Duration::ZERO);
        builder.wire(switch, NodeId(1), 8 * GB_PER_S, Duration::ZERO);
        let mut queues = Queues::new(Arc::new(builder.build().expect("a star")));
        queues.start(Nanos(0), 2, 1, 4_000);
        queues.start(Nanos(0), 0, 1, 8_000);
        let seen = run(&mut queues);
        assert_eq!((seen[&0].1, seen[&1].1), (500, 8_000));
    }

    #[test]
    fn a_transfer_over_two_routes_has_come_with_the_last_part() {
        let mut builder = Network::builder(2);
        let [wide, _] = builder.wire(NodeId(0), NodeId(1), 3 * GB_PER_S, MICRO);
        let [narrow, _] = builder.wire(NodeId(0), NodeId(1), GB_PER_S, 5 * MICRO);
        let route = |link, weight| Route { links: vec![link], weight };
        builder.routes(0, 1, vec![route(wide, 3), route(narrow, 1)]);
        let mut queues = Queues::new(Arc::new(builder.build().expect("paths")));
        queues.start(Nanos(0), 0, 1, 8_000);
        queues.start(Nanos(0), 0, 1, 4_000);
        let seen = run(&mut queues);
        assert_eq!((seen[&0], seen[&1]), ((2_000, 7_000), (3_000, 8_000)));
    }

    #[test]
    fn links_lose_no_time_between_short_transfers() {
        let mut queues = Queues::new(Arc::new(Network::full_mesh(2, 3 * GB_PER_S, Duration::ZERO)));
        for _ in 0..3_000 {
            queues.start(Nanos(0), 0, 1, 1);
        }
        let last = run(&mut queues).values().map(|times| times.1).max();
        assert_eq!(last, Some(3_000 * 334 / 1_000), "a byte takes 333 1/3 ps at 3 GB/s, rounded up");
    }
}
