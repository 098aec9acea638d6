//! One block of a schedule as a graph of events.
//!
//! Lanes of different blocks share neither signal slots nor bytes and nothing orders them, so each
//! block is a problem of its own. A step `i` has two events: it is issued, `S(i)`, and it is
//! complete, `F(i)`. The edges are those of the [schedule's](crate::Schedule) words:
//!
//! * `S(i) -> F(i)`, and `S(i) -> S(i + 1)` in a chunk of a lane;
//! * `F(i) -> S(i + 1)` if `i` is a wait;
//! * `F(d) -> S(i)` for every `d` that `i` is after, from the chunk of the lag;
//! * `S(signal) -> F(wait)` for the signal or put that the wait consumes;
//! * all `F` of a lane in chunk `c - window` `->` its first `S` in chunk `c`.
//!
//! No edge leads to an earlier chunk. So a cycle lies within one chunk, and as every chunk has the
//! same inner edges, one chunk shows every deadlock.

use std::ops::Range;

use pleach_vocabulary::Rank;

use crate::verify::violation::{SignalSlotName, Site, Violation};
use crate::{BlockId, Op, Schedule, SignalSlot, Step};

/// No step.
pub(super) const NONE: u32 = u32::MAX;

/// An event within a chunk: [`issued`] or [`complete`] of a step of the block.
pub(super) type Event = u32;

pub(super) fn issued(step: u32) -> Event {
    step * 2
}

pub(super) fn complete(step: u32) -> Event {
    step * 2 + 1
}

/// A lane: its rank, and its number in that rank's program.
#[derive(Clone, Copy, Debug)]
pub(super) struct LaneRef {
    pub(super) rank: Rank,
    pub(super) lane: u32,
}

/// The lanes of every block, ordered by rank and number.
#[derive(Debug)]
pub(super) struct LanesByBlock {
    starts: Vec<u32>,
    lanes: Vec<LaneRef>,
}

impl LanesByBlock {
    pub(super) fn new(schedule: &Schedule) -> Self {
        let all = || schedule.programs.iter().flatten();
        let mut starts = vec![0; schedule.blocks.len() + 1];
        for lane in all() {
            starts[lane.block as usize + 1] += 1;
        }
        for block in 0..schedule.blocks.len() {
            starts[block + 1] += starts[block];
        }
        let mut next = starts.clone();
        let mut lanes = vec![LaneRef { rank: 0, lane: 0 }; all().count()];
        for (rank, program) in schedule.programs.iter().enumerate() {
            for (number, lane) in program.iter().enumerate() {
                let place = &mut next[lane.block as usize];
                lanes[*place as usize] = LaneRef { rank: rank as Rank, lane: number as u32 };
                *place += 1;
            }
        }
        Self { starts, lanes }
    }

    pub(super) fn of(&self, block: BlockId) -> &[LaneRef] {
        let block = block as usize;
        &self.lanes[self.starts[block] as usize..self.starts[block + 1] as usize]
    }
}

/// The lanes of one block, their steps numbered through, with the edges between them.
#[derive(Debug)]
pub(super) struct Graph<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) block: BlockId,
    lanes: &'a [LaneRef],
    /// The first step of each lane, and the number of steps.
    starts: Vec<u32>,
    /// The lane of each step, as an index of `lanes`.
    lane_of: Vec<u32>,
    pub(super) steps: Vec<&'a Step>,
    /// For a signal or put its wait, for a wait its signal or put.
    pub(super) matched: Vec<u32>,
    /// The steps that are after a step in the same chunk: where each one's begin in `dependents`.
    dependent_starts: Vec<u32>,
    dependents: Vec<u32>,
    /// The place of each event in an order that follows the edges.
    pub(super) position: Vec<u32>,
    /// The steps in the order in which they are issued.
    pub(super) order: Vec<u32>,
    /// Whether a step is after one of an earlier chunk within the window.
    has_lags: bool,
}

impl<'a> Graph<'a> {
    /// Matches signals with waits and orders the events, or says why that cannot be.
    pub(super) fn new(
        schedule: &'a Schedule,
        block: BlockId,
        lanes: &'a [LaneRef],
    ) -> Result<Self, Violation> {
        let mut starts = vec![0];
        let mut lane_of = Vec::new();
        let mut steps = Vec::new();
        for (index, lane) in lanes.iter().enumerate() {
            steps.extend(&schedule.programs[lane.rank as usize][lane.lane as usize].steps);
            lane_of.resize(steps.len(), index as u32);
            starts.push(steps.len() as u32);
        }
        let window = schedule.window;
        let has_lags = steps.iter().any(|step| step.after.iter().any(|&(_, lag)| lag > 0 && lag < window));
        let mut graph = Self {
            schedule,
            block,
            lanes,
            starts,
            lane_of,
            matched: vec![NONE; steps.len()],
            steps,
            dependent_starts: Vec::new(),
            dependents: Vec::new(),
            position: Vec::new(),
            order: Vec::new(),
            has_lags,
        };
        graph.match_signals()?;
        graph.find_dependents();
        graph.sort()?;
        Ok(graph)
    }

    pub(super) fn events(&self) -> usize {
        self.steps.len() * 2
    }

    /// Whose step.
    pub(super) fn rank(&self, step: u32) -> Rank {
        self.lanes[self.lane_of[step as usize] as usize].rank
    }

    /// The steps of the lane in which this step is.
    fn lane_steps(&self, step: u32) -> Range<u32> {
        let lane = self.lane_of[step as usize] as usize;
        self.starts[lane]..self.starts[lane + 1]
    }

    fn same_lane(&self, one: u32, other: u32) -> bool {
        self.lane_of[one as usize] == self.lane_of[other as usize]
    }

    fn is_wait(&self, step: u32) -> bool {
        matches!(self.steps[step as usize].op, Op::Wait { .. })
    }

    pub(super) fn site(&self, step: u32) -> Site {
        let lane = self.lanes[self.lane_of[step as usize] as usize];
        let step = step - self.lane_steps(step).start;
        Site { rank: lane.rank, lane: lane.lane, block: self.block, step }
    }

    /// The signal slot of a signal or a wait.
    pub(super) fn signal_slot(&self, step: u32) -> Option<SignalSlot> {
        match self.steps[step as usize].op {
            Op::Signal { signal_slot, .. } | Op::Put { signal_slot, .. } | Op::Wait { signal_slot, .. } => {
                Some(signal_slot)
            }
            Op::Reduce { .. } => None,
        }
    }

    fn match_signals(&mut self) -> Result<(), Violation> {
        // (from, to, signal slot, is a wait, step): a signal sorts just before its wait.
        let mut end_events: Vec<(Rank, Rank, u16, bool, u32)> = Vec::new();
        for (number, step) in self.steps.iter().enumerate() {
            let number = number as u32;
            let own = self.rank(number);
            match step.op {
                Op::Signal { to, signal_slot } | Op::Put { to, signal_slot, .. } => {
                    end_events.push((own, to, signal_slot.0, false, number));
                }
                Op::Wait { from, signal_slot } => end_events.push((from, own, signal_slot.0, true, number)),
                Op::Reduce { .. } => {}
            }
        }
        end_events.sort_unstable();
        for group in end_events.chunk_by(|one, other| (one.0, one.1, one.2) == (other.0, other.1, other.2)) {
            let (from, to, signal_slot) = (group[0].0, group[0].1, SignalSlotName(SignalSlot(group[0].2)));
            match *group {
                [(.., false, signal), (.., true, wait)] => {
                    self.matched[signal as usize] = wait;
                    self.matched[wait as usize] = signal;
                }
                [(.., false, first), (.., false, second), ..] => {
                    let (first, second) = (self.site(first), self.site(second));
                    return Err(Violation::SignalledTwice { first, second, signal_slot });
                }
                [.., (.., true, first), (.., true, second)] => {
                    let (first, second) = (self.site(first), self.site(second));
                    return Err(Violation::WaitedTwice { first, second, signal_slot });
                }
                [(.., false, signal), ..] => {
                    return Err(Violation::Unconsumed { site: self.site(signal), to, signal_slot });
                }
                [(.., wait), ..] => {
                    return Err(Violation::NeverSignalled { site: self.site(wait), from, signal_slot });
                }
                [] => {}
            }
        }
        Ok(())
    }

    fn find_dependents(&mut self) {
        let mut starts = vec![0; self.steps.len() + 1];
        for (number, step) in self.steps.iter().enumerate() {
            let first = self.lane_steps(number as u32).start;
            for &(earlier, lag) in &step.after {
                starts[(first + earlier) as usize + 1] += u32::from(lag == 0);
            }
        }
        for step in 0..self.steps.len() {
            starts[step + 1] += starts[step];
        }
        let mut next = starts.clone();
        let mut dependents = vec![0; starts[self.steps.len()] as usize];
        for (number, step) in self.steps.iter().enumerate() {
            let first = self.lane_steps(number as u32).start;
            for &(earlier, _) in step.after.iter().filter(|(_, lag)| *lag == 0) {
                let place = &mut next[(first + earlier) as usize];
                dependents[*place as usize] = number as u32;
                *place += 1;
            }
        }
        self.dependent_starts = starts;
        self.dependents = dependents;
    }

    /// The events just after this one in the same chunk.
    fn successors(&self, event: Event, mut visit: impl FnMut(Event)) {
        let step = event / 2;
        let next = Some(step + 1).filter(|next| self.lane_steps(step).contains(next));
        if event == issued(step) {
            visit(complete(step));
            if let Some(next) = next {
                visit(issued(next));
            }
            if !self.is_wait(step) && self.matched[step as usize] != NONE {
                visit(complete(self.matched[step as usize]));
            }
        } else {
            if let Some(next) = next.filter(|_| self.is_wait(step)) {
                visit(issued(next));
            }
            let step = step as usize;
            let range = self.dependent_starts[step] as usize..self.dependent_starts[step + 1] as usize;
            self.dependents[range].iter().for_each(|&dependent| visit(issued(dependent)));
        }
    }

    /// The events just before this one, each with how many chunks earlier it is; the window's are
    /// left to the caller.
    pub(super) fn predecessors(&self, event: Event, mut visit: impl FnMut(Event, u32)) {
        let step = event / 2;
        let first = self.lane_steps(step).start;
        if event == complete(step) {
            if self.is_wait(step) {
                visit(issued(self.matched[step as usize]), 0);
            }
            visit(issued(step), 0);
        } else {
            for &(earlier, lag) in &self.steps[step as usize].after {
                visit(complete(first + earlier), lag);
            }
            if step > first {
                visit(if self.is_wait(step - 1) { complete(step - 1) } else { issued(step - 1) }, 0);
            }
        }
    }

    /// Orders the events of a chunk along the edges.
    fn sort(&mut self) -> Result<(), Violation> {
        let mut missing = vec![0u32; self.events()];
        for event in 0..self.events() as u32 {
            self.successors(event, |next| missing[next as usize] += 1);
        }
        let mut sorted: Vec<Event> =
            (0..self.events() as u32).filter(|&event| missing[event as usize] == 0).collect();
        let mut done = 0;
        while done < sorted.len() {
            let event = sorted[done];
            done += 1;
            self.successors(event, |next| {
                missing[next as usize] -= 1;
                if missing[next as usize] == 0 {
                    sorted.push(next);
                }
            });
        }
        if sorted.len() < self.events() {
            return Err(Violation::Deadlock { cycle: self.cycle(&missing) });
        }
        self.position = vec![0; self.events()];
        for (position, &event) in sorted.iter().enumerate() {
            self.position[event as usize] = position as u32;
        }
        self.order = sorted.iter().filter(|&event| event % 2 == 0).map(|event| event / 2).collect();
        Ok(())
    }

    /// A cycle among the events that miss a predecessor: going back from any of them meets one
    /// twice.
    fn cycle(&self, missing: &[u32]) -> Vec<Site> {
        let mut seen_at = vec![NONE; self.events()];
        let mut path = Vec::new();
        let mut event = missing.iter().position(|&count| count > 0).unwrap_or(0) as Event;
        while seen_at[event as usize] == NONE {
            seen_at[event as usize] = path.len() as u32;
            path.push(event);
            let mut before = event;
            self.predecessors(event, |earlier, lag| {
                if lag == 0 && missing[earlier as usize] > 0 {
                    before = earlier;
                }
            });
            event = before;
        }
        let mut cycle: Vec<Site> =
            path[seen_at[event as usize] as usize..].iter().map(|event| self.site(event / 2)).collect();
        cycle.dedup();
        if cycle.len() > 1 && cycle.first() == cycle.last() {
            cycle.pop();
        }
        cycle
    }
}

// Whether one event is always before another: searches along the edges of a [`Graph`], nearest
// events first.
//
// Two places in different chunks conflict only if the chunks are `window` chunks apart, or a
// multiple of that. What holds between chunks 0 and `window` holds between all such pairs, because
// every chunk has the same edges (the first chunks have fewer incoming edges), and all of chunk
// `c` of a lane is before its chunk `c + window`. So searches go from chunk `window` back to chunk
// 0, or stay in chunk 0.

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
pub(super) struct Order<'g, 'a> {
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

impl<'g, 'a> Order<'g, 'a> {
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
