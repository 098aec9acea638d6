//! Whether one event is always before another: searches along the edges of a [`Graph`], nearest
//! events first.
//!
//! Two places in different chunks conflict only if the chunks are `window` chunks apart, or a
//! multiple of that. What holds between chunks 0 and `window` holds between all such pairs, because
//! every chunk has the same edges (the first chunks have fewer incoming edges), and all of chunk
//! `c` of a lane is before its chunk `c + window`. So searches go from chunk `window` back to chunk
//! 0, or stay in chunk 0.
//!
//! Many ways are long and lead through the same few events: in a ring, all from a contribution to
//! the next chunk lead around the ring, through the complete result. [`Hubs`] knows such events, so
//! that no search has to go there. A search decides what they leave open.

use std::rc::Rc;

use pleach_vocabulary::Rank;

use super::violation::Violation;
use super::{Event, Graph, complete, issued};
use crate::Op;

/// Most events that the searches in a block look at, all together: some ten seconds of work.
const MAX_VISITS: u64 = 1 << 31;
/// Most events of a block in all chunks of a window together.
const MAX_EVENTS: u64 = 1 << 29;

/// In which chunk of those that a search knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunk {
    /// Chunk 0.
    First,
    /// Chunk `window`.
    Window,
}

/// Searches in one graph. It remembers which events a search has seen.
#[derive(Debug)]
pub(super) struct HappensBefore<'g, 'a> {
    graph: &'g Graph<'a>,
    /// The level of chunk `window`. Chunks between are levels only if lags lead into them.
    top: u32,
    /// By level and event: the last search that saw it.
    seen: Vec<u32>,
    search: u32,
    /// Events to look at, in the order in which they were found.
    queue: Vec<(Event, u32)>,
    /// Events of `close` ranks, which are looked at before: mostly the way is a short one between
    /// two ranks.
    near: Vec<(Event, u32)>,
    close: [Rank; 2],
    head: usize,
    visits: u64,
    hubs: Rc<Hubs>,
}

/// Nobody is close.
const NO_RANKS: [Rank; 2] = [Rank::MAX; 2];

impl<'g, 'a> HappensBefore<'g, 'a> {
    pub(super) fn new(graph: &'g Graph<'a>) -> Result<Self, Violation> {
        let top = if graph.has_lags { graph.schedule.window } else { 1 };
        let events = graph.events() as u64 * (u64::from(top) + 1);
        if events > MAX_EVENTS {
            return Err(Violation::TooLarge {
                what: "events in the window of a block",
                found: events,
                most: MAX_EVENTS,
            });
        }
        let seen = vec![0; events as usize];
        Ok(Self {
            graph,
            top,
            seen,
            search: 0,
            queue: Vec::new(),
            near: Vec::new(),
            close: NO_RANKS,
            head: 0,
            visits: 0,
            hubs: Rc::new(Hubs::new(graph)),
        })
    }

    /// The hubs of the graph.
    pub(super) fn hubs(&self) -> Rc<Hubs> {
        self.hubs.clone()
    }

    /// Whether step `later` in chunk `chunk` is issued only after one of the `end_events` of
    /// chunk 0.
    pub(super) fn ended_before(
        &mut self,
        end_events: &[Event],
        chunk: Chunk,
        later: u32,
    ) -> Result<bool, Violation> {
        let graph = self.graph;
        if chunk == Chunk::Window
            && end_events.iter().any(|end| end == &complete(end / 2) && graph.same_lane(end / 2, later))
        {
            return Ok(true); // the window of the lane
        }
        if chunk == Chunk::First && end_events.iter().any(|&end| graph.is_just_before(end, later)) {
            return Ok(true);
        }
        if chunk == Chunk::Window && end_events.iter().any(|&end| lanes_have_met(graph, end, later)) {
            return Ok(true);
        }
        if self.hubs.lead(graph, end_events, chunk, later) {
            return Ok(true);
        }
        self.search(end_events, chunk, later)
    }

    /// As [`HappensBefore::ended_before`], by going back along all ways.
    fn search(&mut self, end_events: &[Event], chunk: Chunk, later: u32) -> Result<bool, Violation> {
        let graph = self.graph;
        // In chunk 0 nothing that is placed before all of the ends can be after one of them.
        let earliest = end_events.iter().map(|&end| graph.position[end as usize]).min().unwrap_or(0);
        let level = if chunk == Chunk::Window { self.top } else { 0 };
        self.close = [graph.rank(later), end_events.first().map_or(Rank::MAX, |end| graph.rank(end / 2))];
        self.begin(issued(later), level);
        while let Some((event, level)) = self.next()? {
            if level == 0 && end_events.contains(&event) {
                return Ok(true);
            }
            self.push_predecessors(event, level, earliest);
        }
        Ok(false)
    }

    /// Calls `found` for every rank whose signal the rank of `later` has waited for before `later`,
    /// in chunk 0, nearest first, until it returns true; returns whether it did.
    pub(super) fn signalled_before(
        &mut self,
        later: u32,
        mut found: impl FnMut(Rank) -> bool,
    ) -> Result<bool, Violation> {
        let graph = self.graph;
        let own = graph.rank(later);
        self.close = [own, own];
        self.begin(issued(later), 0);
        while let Some((event, level)) = self.next()? {
            let step = event / 2;
            if event == complete(step)
                && graph.rank(step) == own
                && let Op::Wait { from, .. } = graph.steps[step as usize].op
                && found(from)
            {
                return Ok(true);
            }
            self.push_predecessors(event, level, 0);
        }
        Ok(false)
    }

    /// Calls `found` for the rank of every event that is after the completion of `earlier` in chunk
    /// 0, nearest first, until it returns true; returns whether it did.
    pub(super) fn ranks_after(
        &mut self,
        earlier: u32,
        mut found: impl FnMut(Rank) -> bool,
    ) -> Result<bool, Violation> {
        self.close = NO_RANKS;
        self.begin(complete(earlier), 0);
        while let Some((event, _)) = self.next()? {
            if found(self.graph.rank(event / 2)) {
                return Ok(true);
            }
            let graph = self.graph;
            graph.successors(event, |next| self.push(next, 0));
        }
        Ok(false)
    }

    fn begin(&mut self, event: Event, level: u32) {
        self.search = self.search.wrapping_add(1);
        if self.search == 0 {
            self.seen.fill(0);
            self.search = 1;
        }
        self.queue.clear();
        self.near.clear();
        self.head = 0;
        self.push(event, level);
    }

    fn push(&mut self, event: Event, level: u32) {
        let seen = &mut self.seen[level as usize * self.graph.events() + event as usize];
        if *seen != self.search {
            *seen = self.search;
            let near = self.close != NO_RANKS && self.close.contains(&self.graph.rank(event / 2));
            if near { &mut self.near } else { &mut self.queue }.push((event, level));
        }
    }

    /// Goes back from an event; in chunk 0 not beyond the position `earliest`.
    fn push_predecessors(&mut self, event: Event, level: u32, earliest: u32) {
        let graph = self.graph;
        graph.predecessors(event, |before, lag| {
            let level = if lag == 0 {
                level
            } else if graph.has_lags && lag <= level {
                level - lag
            } else {
                return; // the window says as much, or it is before chunk 0
            };
            if level > 0 || graph.position[before as usize] >= earliest {
                self.push(before, level);
            }
        });
        let step = event / 2;
        if level == self.top && event == issued(step) {
            let lane = graph.lane_steps(step);
            if step == lane.start {
                for earlier in lane {
                    if graph.position[complete(earlier) as usize] >= earliest {
                        self.push(complete(earlier), 0);
                    }
                }
            }
        }
    }

    /// The next event to look at. Every search is bounded by the graph; this bounds all of them
    /// together.
    fn next(&mut self) -> Result<Option<(Event, u32)>, Violation> {
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return Err(Violation::TooHard { block: self.graph.block, most: MAX_VISITS });
        }
        if let Some(near) = self.near.pop() {
            return Ok(Some(near));
        }
        let next = self.queue.get(self.head).copied();
        self.head += 1;
        Ok(next)
    }
}

/// Whether the completion `end` of chunk 0 is before `later` of chunk `window` by one signal
/// between their two lanes.
///
/// * The lane of the end signals the lane of `later`, which waits for that before `later`: in chunk
///   `window`, whose steps come after all of the lane of the end in chunk 0.
/// * A signal that is issued after the end goes to the lane of `later`, which waits for it: in
///   chunk 0, which ends before its chunk `window`.
fn lanes_have_met(graph: &Graph<'_>, end: Event, later: u32) -> bool {
    let step = end / 2;
    if end != complete(step) {
        return false;
    }
    let (signaller, waiter) = (graph.lane_steps(step), graph.lane_steps(later));
    let is_issued_after = |signal: u32| {
        let listed = |&(earlier, lag): &(u32, u32)| lag == 0 && signaller.start + earlier == step;
        signal > step && (graph.is_wait(step) || graph.steps[signal as usize].after.iter().any(listed))
    };
    let meets = |signal: u32, wait: u32| wait < later || is_issued_after(signal);
    let matched = |step: u32| graph.matched[step as usize];
    if signaller.len() < waiter.len() {
        let mut signals = signaller.clone().filter(|&signal| !graph.is_wait(signal));
        signals.any(|signal| waiter.contains(&matched(signal)) && meets(signal, matched(signal)))
    } else {
        let mut waits = waiter.filter(|&wait| graph.is_wait(wait));
        waits.any(|wait| signaller.contains(&matched(wait)) && meets(matched(wait), wait))
    }
}

/// Most hubs of a graph: one bit of a word each.
const HUBS_MAX: usize = 64;

/// Events of chunk 0 that are before *every* event that is placed after them, spread over the
/// order.
///
/// An event at position `p` is one if every event at a later position has a predecessor at `p` or
/// later: the way back along such predecessors ends at `p` and nowhere else. Before a hub are the
/// events from which a way leads to it, which one pass back over the order finds for all hubs.
#[derive(Debug)]
pub(super) struct Hubs {
    /// Their positions, ascending.
    positions: Vec<u32>,
    /// By event: the hubs that it is before, or is; the first hub is bit 0.
    before: Vec<u64>,
    /// By lane: the last position of a completion of its steps.
    lane_ends: Vec<u32>,
    /// By rank: the last position of an event of it.
    rank_ends: Vec<u32>,
}

impl Hubs {
    fn new(graph: &Graph<'_>) -> Self {
        let events = graph.events();
        let mut sorted: Vec<Event> = vec![0; events];
        let mut lane_ends = vec![0; graph.lanes.len()];
        let mut rank_ends = vec![0; graph.schedule.programs.len()];
        for event in 0..events as u32 {
            let (position, step) = (graph.position[event as usize], event / 2);
            sorted[position as usize] = event;
            let rank_end = &mut rank_ends[graph.rank(step) as usize];
            *rank_end = position.max(*rank_end);
            if event == complete(step) {
                let lane_end = &mut lane_ends[graph.lane_of[step as usize] as usize];
                *lane_end = position.max(*lane_end);
            }
        }
        // From the last position back: the least of the last predecessors of all events behind.
        let mut hubs: Vec<u32> = Vec::new();
        let mut least_behind = u32::MAX;
        for (position, &event) in sorted.iter().enumerate().rev() {
            let position = position as u32;
            if least_behind >= position {
                hubs.push(position);
            }
            // An event without a predecessor is behind none.
            let mut last = None;
            graph.predecessors(event, |before, lag| {
                if lag == 0 {
                    last = last.max(Some(graph.position[before as usize]));
                }
            });
            match last {
                Some(last) => least_behind = least_behind.min(last),
                None => break,
            }
        }
        // Of hubs that stand together the last one has most events before it.
        let gap = (events / HUBS_MAX) as u32;
        let mut positions: Vec<u32> = Vec::with_capacity(HUBS_MAX);
        for hub in hubs {
            let is_apart = positions.last().is_none_or(|&last| last - hub > gap);
            if is_apart && positions.len() < HUBS_MAX {
                positions.push(hub);
            }
        }
        positions.reverse();
        let mut before = vec![0u64; events];
        for (bit, &position) in positions.iter().enumerate() {
            before[sorted[position as usize] as usize] |= 1 << bit;
        }
        if !positions.is_empty() {
            for &event in sorted.iter().rev() {
                let hubs = before[event as usize];
                graph.predecessors(event, |earlier, lag| {
                    if lag == 0 {
                        before[earlier as usize] |= hubs;
                    }
                });
            }
        }
        Self { positions, before, lane_ends, rank_ends }
    }

    /// The hubs that are placed at this position or before.
    fn up_to(&self, position: u32) -> u64 {
        match self.positions.partition_point(|&hub| hub <= position) {
            0 => 0,
            count => u64::MAX >> (HUBS_MAX - count),
        }
    }

    /// Whether a way from one of the end events of chunk 0 to the issue of `later` leads through a
    /// hub. If not, there may be another way.
    fn lead(&self, graph: &Graph<'_>, end_events: &[Event], chunk: Chunk, later: u32) -> bool {
        let issue = graph.position[issued(later) as usize];
        let leads = |event: Event, position| self.before[event as usize] & self.up_to(position) != 0;
        end_events.iter().any(|&end| match chunk {
            Chunk::First => leads(end, issue),
            // What is before the end of a lane's chunk 0 is before its chunk `window`. So the hub
            // is in chunk 0, before an end in the lane of `later`; or it is in chunk `window`,
            // after the beginning of the lane of the end event.
            Chunk::Window => {
                let lane = |step: u32| graph.lane_of[step as usize] as usize;
                let begin = graph.starts[lane(end / 2)];
                leads(end, self.lane_ends[lane(later)])
                    || end == complete(end / 2) && leads(issued(begin), issue)
            }
        })
    }

    /// Whether a way from the completion of `earlier` to an event of the rank, in chunk 0, leads
    /// through a hub. If not, there may be another way.
    pub(super) fn lead_to_rank(&self, earlier: u32, rank: Rank) -> bool {
        self.before[complete(earlier) as usize] & self.up_to(self.rank_ends[rank as usize]) != 0
    }
}

#[cfg(test)]
mod tests {
    use pleach_vocabulary::Collective;

    use super::super::LanesByBlock;
    use super::*;
    use crate::generate::{Access, Algorithm, generate};

    /// Whatever a hub or a single signal says, a search along all ways finds too.
    #[test]
    fn short_cuts_lead_only_where_there_is_a_way() {
        let (mut led, mut open) = (0, 0);
        let names =
            ["ring", "double-tree", "grid:2x3", "grid-staged:2x3", "hierarchical:3x2", "exchange", "direct"];
        for (name, access) in names.into_iter().flat_map(|name| [(name, Access::Put), (name, Access::Mapped)])
        {
            let algorithm = Algorithm::named(name, Collective::AllReduce).expect("a name");
            let schedule = generate(Collective::AllReduce, &algorithm, 6, access).expect("it fits");
            let lanes = LanesByBlock::new(&schedule);
            let graph = Graph::new(&schedule, 0, lanes.of(0)).expect("no deadlock");
            let mut order = HappensBefore::new(&graph).expect("it is small");
            let (hubs, steps) = (order.hubs(), graph.steps.len() as u32);
            for (earlier, later) in (0..steps * steps).map(|pair| (pair / steps, pair % steps)) {
                let end = complete(earlier);
                for chunk in [Chunk::First, Chunk::Window] {
                    let by_one_edge = match chunk {
                        Chunk::First => graph.is_just_before(end, later),
                        Chunk::Window => lanes_have_met(&graph, end, later),
                    };
                    let is_led = by_one_edge || hubs.lead(&graph, &[end], chunk, later);
                    let found = order.search(&[end], chunk, later).expect("it is small");
                    assert!(found || !is_led, "{name} {access}: {chunk:?} from {earlier} to {later}");
                    led += u32::from(is_led);
                    open += u32::from(found && !is_led);
                }
                let rank = graph.rank(later);
                let found = order.ranks_after(earlier, |after| after == rank).expect("it is small");
                assert!(
                    found || !hubs.lead_to_rank(earlier, rank),
                    "{name} {access}: {earlier} to rank {rank}"
                );
            }
        }
        assert!(led > 1000 && open > 100, "{led} by short cuts, {open} by searches alone");
    }
}
