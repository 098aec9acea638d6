//! Whether one event is always before another: searches along the edges of a [`Graph`], nearest
//! events first.
//!
//! Two places in different chunks conflict only if the chunks are `window` chunks apart, or a
//! multiple of that. What holds between chunks 0 and `window` holds between all such pairs, because
//! every chunk has the same edges (the first chunks have fewer incoming edges), and all of chunk
//! `c` of a lane is before its chunk `c + window`. So searches go from chunk `window` back to chunk
//! 0, or stay in chunk 0.

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
        })
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
