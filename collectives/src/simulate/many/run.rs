//! Carries out the lanes of all ranks in virtual time, event by event.
//!
//! A lane goes through its chunks as an engine's does: steps are issued in order, a chunk begins
//! when its place in the window is free, and after a put the other lanes of the rank have their
//! turn. Ranks that have something to do at an instant do it one after the other. Computing takes
//! no time. What an engine does besides is left out: banks and credits of earlier calls,
//! announcements of memory, copies of memory that is not registered, questions to late ranks, and
//! the bytes themselves.
//!
//! **Invariant:** a step is issued when the step before it was issued and all that it is after are
//! complete, and a wait is complete when its signal has come, as [`Schedule`] says. So the order of
//! events is one that the proof allows.
//!
//! [`Schedule`]: pleach_schedule::Schedule

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use pleach_vocabulary::Rank;

use super::links::{Links, PairId, Passage, RouteTable};
use super::program::{LaneId, Lanes, StepOp, Target};
use crate::engine::Plan;

/// Bytes of chunks that a lane may combine or copy before the next lane has its turn, as in an
/// engine.
const TURN_BYTES: usize = 1 << 20;

/// This many puts may be under way to a peer however long they are, where links set the pace; as in
/// an engine.
const PUTS_LEAST: u32 = 2;

/// How blocks are cut into chunks.
#[derive(Clone, Copy)]
pub(crate) enum Cut<'a> {
    /// As the plan of a call says. `of_block`: in place of every block this one.
    Plan { plan: &'a Plan, of_block: Option<u32> },
    /// The first chunk of every block, of so many bytes, alone on its links: what the cost model
    /// counts. `block_bytes`: by block, the length. `chunks`: how many chunks each block has; none:
    /// as many as are not longer than `chunk_bytes`.
    Price { block_bytes: &'a [u64], chunk_bytes: u64, chunks: Option<u64> },
}

impl Cut<'_> {
    fn window(&self) -> u32 {
        match self {
            Self::Plan { plan, .. } => plan.window(),
            Self::Price { .. } => 1,
        }
    }

    fn chunks(&self, block: u32) -> u32 {
        match self {
            Self::Plan { plan, of_block } => plan.block_chunks(of_block.unwrap_or(block)),
            Self::Price { .. } => 1,
        }
    }

    /// The bytes of a chunk, and the bytes that are counted for the price of its links.
    fn bytes(&self, block: u32, chunk: u32) -> (u64, u64) {
        match self {
            Self::Plan { plan, of_block } => {
                (plan.block_chunk_bytes(of_block.unwrap_or(block), chunk) as u64, 0)
            }
            Self::Price { block_bytes, chunk_bytes, chunks } => {
                let whole = block_bytes[block as usize];
                let chunks = chunks.unwrap_or_else(|| whole.div_ceil(*chunk_bytes));
                (whole.div_ceil(chunks.max(1)), whole)
            }
        }
    }

    /// Whether data travel in signals.
    fn is_inline(&self) -> bool {
        matches!(self, Self::Plan { plan, .. } if plan.is_inline())
    }

    /// How many chunks a lane may be ahead of the slowest lane of its rank.
    fn skew_limit(&self) -> u32 {
        match self {
            Self::Plan { plan, .. } => plan.skew_limit(),
            Self::Price { .. } => u32::MAX,
        }
    }

    fn is_paced(&self) -> bool {
        matches!(self, Self::Plan { plan, .. } if plan.is_paced())
    }

    /// How many of these bytes, which a chunk of every tree brings to a peer, may be under way.
    fn under_way_max(&self, bytes: u64) -> u64 {
        match self {
            Self::Plan { plan, .. } => plan.under_way_share(bytes),
            Self::Price { .. } => u64::MAX,
        }
    }
}

/// Why a run did not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unended {
    /// Nothing moves any more.
    Stuck,
    /// More has happened than may.
    TooMuch,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ended {
    at_ns: u64,
    links_ns: u64,
}

impl Ended {
    /// When the last rank had ended, in nanoseconds from the first call on.
    pub(crate) fn at_ns(&self) -> u64 {
        self.at_ns
    }

    /// When the last of the links has carried its load without a gap: see [`Links::busiest_ns`].
    pub(crate) fn links_ns(&self) -> u64 {
        self.links_ns
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct LaneState {
    /// Chunks before this one are complete; those from `next` on have not begun.
    first: u32,
    next: u32,
    /// Where its bits begin in [`Run::bits`].
    bits: u32,
    is_due: bool,
    is_at_limit: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Instance {
    chunk: u32,
    /// The step that is issued next.
    step: u32,
    /// Steps that are not complete.
    remaining: u32,
}

#[derive(Debug, Default)]
struct RankState {
    /// Lanes that may go on.
    due: Vec<LaneId>,
    is_due: bool,
    has_begun: bool,
    /// No lane begins this chunk or a later one.
    chunk_limit: u32,
    /// Peers to which puts are pending and one has ended.
    with_room: Vec<Rank>,
}

/// A put or a signal under way.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    lane: LaneId,
    chunk: u32,
    step: u32,
    /// Whether its step is complete only when it has left.
    completes: bool,
    bytes: u64,
    to: Rank,
    waiting: LaneId,
    wait: u32,
}

/// The puts of a rank to one peer, where links set the pace.
#[derive(Debug, Default)]
struct PeerQueue {
    puts: u32,
    bytes: u64,
    bytes_max: u64,
    /// The oldest chunk first, then lanes with smaller numbers.
    pending: BinaryHeap<Reverse<(u32, LaneId, u32)>>,
}

impl PeerQueue {
    fn has_room(&self, bytes: u64) -> bool {
        self.puts < PUTS_LEAST || self.bytes + bytes <= self.bytes_max
    }
}

/// The two sets of steps of a chunk under way.
const COMPLETE: u32 = 0;
const SIGNALLED: u32 = 1;

/// One run of all lanes.
pub(crate) struct Run<'a> {
    lanes: &'a Lanes<'a>,
    cut: Cut<'a>,
    /// By rank that is carried out and rank: the routes.
    pairs: &'a HashMap<(u32, Rank), PairId>,
    links: Links<'a>,
    states: Vec<LaneState>,
    /// By lane and place in the window.
    instances: Vec<Instance>,
    bits: Vec<u64>,
    ranks: Vec<RankState>,
    due: Vec<u32>,
    sent: Vec<Sent>,
    queues: HashMap<(u32, Rank), PeerQueue>,
    unfinished: u32,
    turn_bytes: usize,
    now_ns: u64,
}

impl<'a> Run<'a> {
    /// Of these lanes, over links of these bandwidths and latencies.
    pub(crate) fn new(
        lanes: &'a Lanes<'a>,
        cut: Cut<'a>,
        pairs: &'a HashMap<(u32, Rank), PairId>,
        table: &'a RouteTable,
        links: impl Iterator<Item = (u64, u64)>,
    ) -> Self {
        let window = cut.window();
        let mut states = Vec::with_capacity(lanes.count() as usize);
        let mut words = 0;
        for lane in 0..lanes.count() {
            states.push(LaneState { bits: words, ..LaneState::default() });
            words += lanes.steps(lane).len().div_ceil(64) as u32 * 2 * window;
        }
        let rank = |_| RankState { chunk_limit: cut.skew_limit(), ..RankState::default() };
        let mut run = Self {
            lanes,
            cut,
            pairs,
            links: Links::new(table, links, matches!(cut, Cut::Price { .. })),
            states,
            instances: vec![Instance::default(); lanes.count() as usize * window as usize],
            bits: vec![0; words as usize],
            ranks: (0..lanes.ranks()).map(rank).collect(),
            due: Vec::new(),
            sent: Vec::new(),
            queues: HashMap::new(),
            unfinished: lanes.count(),
            turn_bytes: 0,
            now_ns: 0,
        };
        if cut.is_paced() {
            run.limit_puts();
        }
        run
    }

    /// Where links set the pace: how many bytes of puts may be under way to each peer.
    fn limit_puts(&mut self) {
        for lane in 0..self.lanes.count() {
            let (bytes, class) = (self.cut.bytes(self.lanes.block(lane), 0).0, self.lanes.class(lane));
            for step in self.lanes.steps(lane) {
                if let StepOp::Put(peer) = step.op() {
                    let to = self.lanes.target(lane, peer).rank();
                    self.queues.entry((class, to)).or_default().bytes_max += bytes;
                }
            }
        }
        for queue in self.queues.values_mut() {
            queue.bytes_max = self.cut.under_way_max(queue.bytes_max);
        }
    }

    /// Until all ranks have ended. `delays_ns`: by rank, how long after the first it makes the
    /// call; none: all at once.
    pub(crate) fn run(mut self, delays_ns: &[u64], events_max: u64) -> Result<Ended, Unended> {
        let delay = |class: u32| delays_ns.get(class as usize).copied().unwrap_or(0);
        let mut starts: BinaryHeap<Reverse<(u64, u32)>> =
            (0..self.lanes.ranks()).map(|class| Reverse((delay(class), class))).collect();
        loop {
            while let Some(&Reverse((_, class))) = starts.peek().filter(|first| first.0.0 <= self.now_ns) {
                starts.pop();
                self.begin(class);
            }
            let mut due = std::mem::take(&mut self.due);
            due.sort_unstable();
            for class in due {
                self.poll(class);
                self.ranks[class as usize].is_due = false;
            }
            if self.unfinished == 0 && starts.is_empty() {
                return Ok(Ended { at_ns: self.now_ns, links_ns: self.links.busiest_ns() });
            }
            let start = starts.peek().map(|Reverse((at, _))| *at);
            let Some(next) = self.links.next_ns().into_iter().chain(start).min() else {
                return Err(Unended::Stuck);
            };
            self.now_ns = self.now_ns.max(next);
            while self.links.next_ns().is_some_and(|at| at <= self.now_ns) {
                match self.links.step() {
                    Some(Passage::Left(id)) => self.left(id),
                    Some(Passage::Arrived(id)) => self.arrived(id),
                    None => {}
                }
            }
            if self.links.steps() > events_max {
                return Err(Unended::TooMuch);
            }
        }
    }

    /// A rank makes the call.
    fn begin(&mut self, class: u32) {
        self.ranks[class as usize].has_begun = true;
        for lane in self.lanes.of_rank(class) {
            self.make_due(lane);
        }
    }

    fn make_due(&mut self, lane: LaneId) {
        let class = self.lanes.class(lane);
        if !std::mem::replace(&mut self.states[lane as usize].is_due, true) {
            self.ranks[class as usize].due.push(lane);
        }
        self.wake(class);
    }

    fn wake(&mut self, class: u32) {
        let rank = &mut self.ranks[class as usize];
        if rank.has_begun && !std::mem::replace(&mut rank.is_due, true) {
            self.due.push(class);
        }
    }

    /// A rank does all that it can at this instant.
    fn poll(&mut self, class: u32) {
        loop {
            self.submit_pending(class);
            let mut due = std::mem::take(&mut self.ranks[class as usize].due);
            due.sort_unstable();
            let was_any = !due.is_empty();
            for lane in due {
                self.states[lane as usize].is_due = false;
                if self.states[lane as usize].first < self.cut.chunks(self.lanes.block(lane)) {
                    self.advance_lane(lane);
                }
            }
            let is_raised = self.cut.is_paced() && self.raise_chunk_limit(class);
            if !was_any && !is_raised {
                return;
            }
        }
    }

    fn advance_lane(&mut self, lane: LaneId) {
        let (window, chunks) = (self.cut.window(), self.cut.chunks(self.lanes.block(lane)));
        self.turn_bytes = 0;
        loop {
            let LaneState { first, next, is_at_limit, .. } = self.states[lane as usize];
            let mut is_any_complete = false;
            for chunk in first..next {
                self.advance_chunk(lane, chunk);
                is_any_complete |= self.instances[(lane * window + chunk % window) as usize].remaining == 0;
                if self.turn_bytes >= TURN_BYTES {
                    break;
                }
            }
            let may_begin = next == 0 || is_any_complete || is_at_limit;
            let began = may_begin && self.begin_chunks(lane, chunks);
            if self.turn_bytes >= TURN_BYTES {
                return self.make_due(lane);
            }
            if !began {
                return;
            }
        }
    }

    /// Retires complete chunks and begins those that may; true when any began.
    fn begin_chunks(&mut self, lane: LaneId, chunks: u32) -> bool {
        let window = self.cut.window();
        let steps = self.lanes.steps(lane).len() as u32;
        let limit = self.ranks[self.lanes.class(lane) as usize].chunk_limit;
        let state = &mut self.states[lane as usize];
        while state.first < state.next
            && self.instances[(lane * window + state.first % window) as usize].remaining == 0
        {
            state.first += 1;
            if state.first == chunks {
                self.unfinished -= 1;
            }
        }
        let mut began = false;
        state.is_at_limit = false;
        while state.next < chunks {
            if state.next >= limit {
                state.is_at_limit = true;
                break;
            }
            let place = state.next % window;
            let instance = &mut self.instances[(lane * window + place) as usize];
            if state.next >= window && instance.remaining != 0 {
                break;
            }
            *instance = Instance { chunk: state.next, step: 0, remaining: steps };
            let words = steps.div_ceil(64);
            let start = (state.bits + (2 * place + COMPLETE) * words) as usize;
            self.bits[start..start + words as usize].fill(0);
            state.next += 1;
            began = true;
        }
        began
    }

    fn advance_chunk(&mut self, lane: LaneId, chunk: u32) {
        let lanes = self.lanes;
        let steps = lanes.steps(lane);
        let place = chunk % self.cut.window();
        let at = (lane * self.cut.window() + place) as usize;
        let mut number = self.instances[at].step;
        let mut completed = 0;
        while let Some(step) = steps.get(number as usize) {
            if !lanes.after(step).iter().all(|&(earlier, lag)| self.is_complete(lane, chunk, earlier, lag)) {
                break;
            }
            let is_complete = match step.op() {
                StepOp::Wait => {
                    if !self.take(lane, place, SIGNALLED, number) {
                        break;
                    }
                    true
                }
                StepOp::Pass => {
                    self.turn_bytes += self.cut.bytes(lanes.block(lane), chunk).0 as usize;
                    true
                }
                StepOp::Signal(peer) => {
                    let target = lanes.target(lane, peer);
                    self.send(Sent { lane, chunk, step: number, ..Sent::to(target) }, 0);
                    true
                }
                StepOp::Put(peer) => self.put(lane, chunk, number, lanes.target(lane, peer)),
            };
            if is_complete {
                self.set(lane, place, COMPLETE, number);
                completed += 1;
            }
            number += 1;
        }
        let instance = &mut self.instances[at];
        instance.step = number;
        instance.remaining -= completed;
    }

    /// Whether a step of the same lane, `lag` chunks earlier, is complete.
    fn is_complete(&self, lane: LaneId, chunk: u32, step: u32, lag: u32) -> bool {
        let Some(earlier) = chunk.checked_sub(lag) else { return true };
        let window = self.cut.window();
        let place = earlier % window;
        earlier < self.states[lane as usize].first
            || self.instances[(lane * window + place) as usize].chunk != earlier
            || self.has(lane, place, COMPLETE, step)
    }

    /// Tries a put; whether its step is complete.
    fn put(&mut self, lane: LaneId, chunk: u32, step: u32, target: Target) -> bool {
        let (bytes, load) = self.cut.bytes(self.lanes.block(lane), chunk);
        let sent = Sent { lane, chunk, step, ..Sent::to(target) };
        if self.cut.is_inline() || bytes == 0 {
            self.send(sent, 0);
            return true;
        }
        let sent = Sent { completes: true, bytes, ..sent };
        if self.cut.is_paced() {
            let queue = self.queues.entry((self.lanes.class(lane), target.rank())).or_default();
            if !queue.has_room(bytes) {
                queue.pending.push(Reverse((chunk, lane, step)));
                return false;
            }
        }
        self.submit(sent, load);
        false
    }

    /// Gives the links a put that may go.
    fn submit(&mut self, sent: Sent, load: u64) {
        let class = self.lanes.class(sent.lane);
        if self.cut.is_paced() {
            let queue = self.queues.entry((class, sent.to)).or_default();
            queue.puts += 1;
            queue.bytes += sent.bytes;
        }
        if self.lanes.of_rank(class).len() > 1 {
            // All lanes submit their first chunk before any submits its second.
            self.turn_bytes = TURN_BYTES;
        }
        self.send(sent, load);
    }

    fn send(&mut self, sent: Sent, load: u64) {
        let pair = self.pairs[&(self.lanes.class(sent.lane), sent.to)];
        let id = self.links.start(self.now_ns, pair, sent.bytes, load) as usize;
        if self.sent.len() <= id {
            self.sent.resize(id + 1, Sent::default());
        }
        self.sent[id] = sent;
    }

    /// The last byte of a put has left: its source may be used again.
    fn left(&mut self, id: u32) {
        let Sent { lane, chunk, step, completes, bytes, to, .. } = self.sent[id as usize];
        if !completes {
            return;
        }
        if self.cut.is_paced() {
            let class = self.lanes.class(lane);
            let queue = self.queues.entry((class, to)).or_default();
            queue.puts -= 1;
            queue.bytes -= bytes;
            if !queue.pending.is_empty() {
                self.ranks[class as usize].with_room.push(to);
                self.wake(class);
            }
        }
        let place = chunk % self.cut.window();
        self.set(lane, place, COMPLETE, step);
        self.instances[(lane * self.cut.window() + place) as usize].remaining -= 1;
        self.make_due(lane);
    }

    /// A signal has come, with the bytes of its put.
    fn arrived(&mut self, id: u32) {
        let Sent { chunk, waiting, wait, .. } = self.sent[id as usize];
        let place = chunk % self.cut.window();
        self.set(waiting, place, SIGNALLED, wait);
        let instance = self.instances[(waiting * self.cut.window() + place) as usize];
        let state = self.states[waiting as usize];
        if (state.first..state.next).contains(&chunk) && (instance.chunk, instance.step) == (chunk, wait) {
            self.make_due(waiting);
        }
    }

    /// Submits the puts whose turn has come.
    fn submit_pending(&mut self, class: u32) {
        while let Some(&peer) = self.ranks[class as usize].with_room.last() {
            let queue = self.queues.entry((class, peer)).or_default();
            let first = queue.pending.peek().map(|Reverse(first)| *first);
            let fits = first
                .filter(|&(chunk, lane, _)| queue.has_room(self.cut.bytes(self.lanes.block(lane), chunk).0));
            let Some((chunk, lane, step)) = fits else {
                self.ranks[class as usize].with_room.pop();
                continue;
            };
            queue.pending.pop();
            let StepOp::Put(peer) = self.lanes.steps(lane)[step as usize].op() else { continue };
            let (bytes, load) = self.cut.bytes(self.lanes.block(lane), chunk);
            let target = self.lanes.target(lane, peer);
            self.submit(Sent { lane, chunk, step, completes: true, bytes, ..Sent::to(target) }, load);
        }
    }

    /// Raises the limit of how far lanes of a rank may be ahead, as far as its slowest lane allows.
    /// True when that lets any lane go on.
    fn raise_chunk_limit(&mut self, class: u32) -> bool {
        let unfinished = self.lanes.of_rank(class).filter_map(|lane| {
            let first = self.states[lane as usize].first;
            (first < self.cut.chunks(self.lanes.block(lane))).then_some(first)
        });
        let skew = self.cut.skew_limit();
        let limit = unfinished.min().map_or(u32::MAX, |first| first.saturating_add(skew));
        if limit <= self.ranks[class as usize].chunk_limit {
            return false;
        }
        self.ranks[class as usize].chunk_limit = limit;
        let mut were_any = false;
        for lane in self.lanes.of_rank(class) {
            if self.states[lane as usize].is_at_limit {
                self.make_due(lane);
                were_any = true;
            }
        }
        were_any
    }

    /// Where the bit of a step is: the word, and the bit in it.
    fn bit(&self, lane: LaneId, place: u32, set: u32, step: u32) -> (usize, u64) {
        let words = (self.lanes.steps(lane).len() as u32).div_ceil(64);
        let word = self.states[lane as usize].bits + (2 * place + set) * words + step / 64;
        (word as usize, 1 << (step % 64))
    }

    fn has(&self, lane: LaneId, place: u32, set: u32, step: u32) -> bool {
        let (word, bit) = self.bit(lane, place, set, step);
        self.bits[word] & bit != 0
    }

    fn set(&mut self, lane: LaneId, place: u32, set: u32, step: u32) {
        let (word, bit) = self.bit(lane, place, set, step);
        self.bits[word] |= bit;
    }

    /// Whether the bit was set; it is not any more.
    fn take(&mut self, lane: LaneId, place: u32, set: u32, step: u32) -> bool {
        let (word, bit) = self.bit(lane, place, set, step);
        let was_set = self.bits[word] & bit != 0;
        self.bits[word] &= !bit;
        was_set
    }
}

impl Sent {
    fn to(target: Target) -> Self {
        Self { to: target.rank(), waiting: target.lane(), wait: target.wait(), ..Self::default() }
    }
}
