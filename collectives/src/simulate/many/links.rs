//! Links that carry one transfer after the other, over routes that are known before the run.
//!
//! The rules are those of the transport's simulator for links in order: a transfer is split over
//! the routes of its pair by weight, passes the links of a route cut-through, and occupies each
//! link for the time of its bytes. A signal without data occupies no link. Of ranks that a symmetry
//! folds together there is one link for each class of links, as all of a class do the same.
//!
//! **Invariant:** no two transfers occupy a link at the same time, unless the links are those of a
//! price, on which each transfer is alone. Times are whole picoseconds.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

const PICOS_PER_NANO: u64 = 1_000;
const PICOS_PER_S: u128 = 1_000_000_000_000;

/// Names a transfer until it has left and arrived.
pub(crate) type TransferId = u32;

/// Names a pair of ranks in [`RouteTable`].
pub(crate) type PairId = u32;

/// The routes of pairs: by pair the routes, each with its links in order.
#[derive(Debug, Default)]
pub(crate) struct RouteTable {
    /// By pair: where its routes begin and end.
    pairs: Vec<(u32, u32)>,
    routes: Vec<RouteShare>,
    hops: Vec<u32>,
}

#[derive(Clone, Copy, Debug)]
struct RouteShare {
    hops: (u32, u32),
    /// The weights of the pair's routes before this one, with this one, and all together.
    before: u64,
    until: u64,
    of_all: u64,
}

impl RouteTable {
    /// Adds a pair with its routes: links and weights, which together fit in 63 bits.
    pub(crate) fn add(&mut self, routes: impl IntoIterator<Item = (Vec<u32>, u64)>) -> PairId {
        let (first, mut before) = (self.routes.len(), 0);
        for (links, weight) in routes {
            let start = self.hops.len() as u32;
            self.hops.extend(links);
            let hops = (start, self.hops.len() as u32);
            self.routes.push(RouteShare { hops, before, until: before + weight, of_all: 0 });
            before += weight;
        }
        self.routes[first..].iter_mut().for_each(|route| route.of_all = before.max(1));
        self.pairs.push((first as u32, self.routes.len() as u32));
        self.pairs.len() as PairId - 1
    }
}

impl RouteShare {
    /// The bytes of a transfer that go this way.
    fn share(&self, bytes: u64) -> u64 {
        let upto = |weight: u64| (u128::from(bytes) * u128::from(weight) / u128::from(self.of_all)) as u64;
        upto(self.until) - upto(self.before)
    }
}

/// What has become of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passage {
    /// Its last byte has left the sender.
    Left(TransferId),
    /// Its last byte has arrived.
    Arrived(TransferId),
}

#[derive(Clone, Copy, Debug)]
struct Link {
    bytes_per_s: u64,
    latency: u64,
    /// Until when it is occupied.
    free: u64,
    /// When it is first used.
    first: u64,
    /// Bytes of all that goes over it, for its price.
    load: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    /// The first byte of a part is at a link of its route; the part has come out of the link before
    /// at `behind`.
    Head {
        transfer: TransferId,
        route: u32,
        hop: u32,
        bytes: u64,
        behind: u64,
    },
    Left(TransferId),
    Arrived(TransferId),
}

#[derive(Clone, Copy, Debug, Default)]
struct Transit {
    parts_left: u32,
    arrives: u64,
    /// Of leaving and arriving.
    events_left: u8,
}

/// The links, and all that is under way on them.
#[derive(Debug)]
pub(crate) struct Links<'a> {
    table: &'a RouteTable,
    links: Vec<Link>,
    /// Whether each transfer is alone on its links.
    are_alone: bool,
    transits: Vec<Transit>,
    unused: Vec<TransferId>,
    /// By time, then in the order in which they were added.
    steps: BinaryHeap<Reverse<(u64, u64, Step)>>,
    stepped: u64,
}

impl<'a> Links<'a> {
    /// Links of these bandwidths (in bytes a second, at least 1) and latencies (in nanoseconds).
    /// `are_alone`: no transfer waits for another.
    pub(crate) fn new(
        table: &'a RouteTable,
        links: impl Iterator<Item = (u64, u64)>,
        are_alone: bool,
    ) -> Self {
        let link = |(bytes_per_s, latency_ns): (u64, u64)| Link {
            bytes_per_s,
            latency: latency_ns.saturating_mul(PICOS_PER_NANO),
            free: 0,
            first: u64::MAX,
            load: 0,
        };
        Self {
            table,
            links: links.map(link).collect(),
            are_alone,
            transits: Vec::new(),
            unused: Vec::new(),
            steps: BinaryHeap::new(),
            stepped: 0,
        }
    }

    /// Starts to send bytes. `load`: what is counted for the price of its links. `now_ns` never
    /// goes backwards.
    pub(crate) fn start(&mut self, now_ns: u64, pair: PairId, bytes: u64, load: u64) -> TransferId {
        let now = now_ns.saturating_mul(PICOS_PER_NANO);
        let id = self.unused.pop().unwrap_or_else(|| {
            self.transits.push(Transit::default());
            self.transits.len() as TransferId - 1
        });
        let (first, end) = self.table.pairs[pair as usize];
        self.transits[id as usize] = Transit { parts_left: end - first, arrives: now, events_left: 2 };
        let mut left = now;
        for route in first..end {
            let share = self.table.routes[route as usize];
            self.load(&share, now, share.share(load));
            left = left.max(self.enter(id, route, 0, share.share(bytes), now, now));
        }
        self.add(left, Step::Left(id));
        id
    }

    /// Counts bytes on the links of a route.
    fn load(&mut self, route: &RouteShare, now: u64, bytes: u64) {
        if !self.are_alone || bytes == 0 {
            return;
        }
        let mut at = now;
        for &link in &self.table.hops[route.hops.0 as usize..route.hops.1 as usize] {
            let link = &mut self.links[link as usize];
            link.load = link.load.saturating_add(bytes);
            link.first = link.first.min(at);
            at = at.saturating_add(link.latency);
        }
    }

    /// When something happens next, in nanoseconds rounded up.
    pub(crate) fn next_ns(&self) -> Option<u64> {
        self.steps.peek().map(|Reverse((at, ..))| at.div_ceil(PICOS_PER_NANO))
    }

    /// Lets it happen.
    pub(crate) fn step(&mut self) -> Option<Passage> {
        let Reverse((at, _, step)) = self.steps.pop()?;
        match step {
            Step::Head { transfer, route, hop, bytes, behind } => {
                self.enter(transfer, route, hop, bytes, at, behind);
                None
            }
            Step::Left(id) => Some(self.ended(id, Passage::Left(id))),
            Step::Arrived(id) => Some(self.ended(id, Passage::Arrived(id))),
        }
    }

    fn ended(&mut self, id: TransferId, passage: Passage) -> Passage {
        let transit = &mut self.transits[id as usize];
        transit.events_left -= 1;
        if transit.events_left == 0 {
            self.unused.push(id);
        }
        passage
    }

    /// The first byte of a part comes to a link, the last one not before `behind`. Returns when the
    /// part has passed it.
    fn enter(&mut self, id: TransferId, route: u32, hop: u32, bytes: u64, head: u64, behind: u64) -> u64 {
        let hops = self.table.routes[route as usize].hops;
        if bytes == 0 {
            // It waits for nobody, so its arrival is known.
            let links = &self.table.hops[hops.0 as usize..hops.1 as usize];
            let latencies = links.iter().map(|&link| self.links[link as usize].latency);
            let latency = latencies.fold(0, u64::saturating_add);
            self.arrive(id, head.saturating_add(latency));
            return head;
        }
        let link = &mut self.links[self.table.hops[(hops.0 + hop) as usize] as usize];
        let took = (u128::from(bytes) * PICOS_PER_S).div_ceil(u128::from(link.bytes_per_s));
        let took = u64::try_from(took).unwrap_or(u64::MAX);
        let free = if self.are_alone { 0 } else { link.free };
        let start = head.max(free).max(behind.saturating_sub(took));
        let end = start.saturating_add(took);
        link.free = end;
        let there = end.saturating_add(link.latency);
        if hop + 1 < hops.1 - hops.0 {
            let at = start.saturating_add(link.latency);
            self.add(at, Step::Head { transfer: id, route, hop: hop + 1, bytes, behind: there });
        } else {
            self.arrive(id, there);
        }
        end
    }

    /// A part arrives.
    fn arrive(&mut self, id: TransferId, at: u64) {
        let transit = &mut self.transits[id as usize];
        transit.arrives = transit.arrives.max(at);
        transit.parts_left -= 1;
        if transit.parts_left == 0 {
            let arrives = transit.arrives;
            self.add(arrives, Step::Arrived(id));
        }
    }

    fn add(&mut self, at: u64, step: Step) {
        self.stepped += 1;
        self.steps.push(Reverse((at, self.stepped, step)));
    }

    /// How much has happened or will.
    pub(crate) fn steps(&self) -> u64 {
        self.stepped
    }

    /// When the last of the links has carried its load, if each carries it without a gap from its
    /// first use on: in nanoseconds.
    pub(crate) fn busiest_ns(&self) -> u64 {
        let used = self.links.iter().filter(|link| link.load > 0);
        let end = |link: &Link| {
            let took = (u128::from(link.load) * PICOS_PER_S).div_ceil(u128::from(link.bytes_per_s));
            let took = u64::try_from(took).unwrap_or(u64::MAX);
            link.first.saturating_add(took).saturating_add(link.latency)
        };
        used.map(end).max().unwrap_or(0).div_ceil(PICOS_PER_NANO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB_PER_S: u64 = 1_000_000_000;

    /// When each transfer has left and arrived.
    fn run(links: &mut Links<'_>) -> Vec<(u64, u64)> {
        let mut seen = vec![(0, 0); 8];
        while let Some(at) = links.next_ns() {
            match links.step() {
                Some(Passage::Left(id)) => seen[id as usize].0 = at,
                Some(Passage::Arrived(id)) => seen[id as usize].1 = at,
                None => {}
            }
        }
        seen
    }

    #[test]
    fn transfers_over_one_link_go_one_after_the_other_and_signals_wait_for_nobody() {
        let mut table = RouteTable::default();
        let pair = table.add([(vec![0], 1)]);
        let mut links = Links::new(&table, [(GB_PER_S, 1_000)].into_iter(), false);
        let ids = [3_000, 1_000, 0].map(|bytes| links.start(0, pair, bytes, 0));
        let seen = run(&mut links);
        assert_eq!(ids.map(|id| seen[id as usize]), [(3_000, 4_000), (4_000, 5_000), (0, 1_000)]);
        assert!(links.unused.len() == 3 && links.next_ns().is_none());
    }

    #[test]
    fn a_transfer_passes_links_cut_through_and_has_come_with_its_last_part() {
        let mut table = RouteTable::default();
        let through = table.add([(vec![0, 1, 2], 1)]);
        let links = || [(4 * GB_PER_S, 1_000), (GB_PER_S, 1_000), (2 * GB_PER_S, 1_000)].into_iter();
        let mut line = Links::new(&table, links(), false);
        line.start(0, through, 8_000, 0);
        assert_eq!(run(&mut line)[0], (2_000, 11_000));
        let mut table = RouteTable::default();
        let split = table.add([(vec![0], 3), (vec![1], 1)]);
        let wires = || [(3 * GB_PER_S, 1_000), (GB_PER_S, 5_000)].into_iter();
        let mut both = Links::new(&table, wires(), false);
        both.start(0, split, 8_000, 0);
        assert_eq!(run(&mut both)[0], (2_000, 7_000));
    }

    #[test]
    fn a_price_counts_loads_and_lets_nothing_wait() {
        let mut table = RouteTable::default();
        let pair = table.add([(vec![0], 1)]);
        let mut links = Links::new(&table, [(GB_PER_S, 1_000)].into_iter(), true);
        let ids = [0, 500].map(|at| links.start(at, pair, 1_000, 4_000));
        let seen = run(&mut links);
        assert_eq!(ids.map(|id| seen[id as usize].1), [2_000, 2_500]);
        assert_eq!(links.busiest_ns(), 8_000 + 1_000);
    }
}
