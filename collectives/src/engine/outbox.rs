//! Puts that wait to be submitted, where links set the pace: of those to one peer the oldest chunk
//! goes first.
//!
//! A link that carries one transfer after the other keeps the order in which they were given to it.
//! Given to it as soon as they can be, the first steps of all chunks in a window go before any of
//! their second ones: chunks travel from link to link in one crowd, and the links before and behind
//! it are idle, for good. (Networks of queues that serve first what came first can lose throughput
//! in that way, and those that serve first what is under way longest cannot: Andrews, Awerbuch,
//! Fernández, Kleinberg, Leighton and Liu, "Universal stability results for greedy
//! contention-resolution protocols", FOCS 1996.) So a rank gives the device no more puts to a peer
//! than keep its link busy, and what it gives next is of the oldest chunk that any tree has for
//! that peer.
//!
//! **Invariant:** a put that waits here is under way for its lane, with its source and its room at
//! the peer, as if the device had it; each is given to the device once there is room for it, or the
//! run ends.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use pleach_vocabulary::Rank;

use super::at::At;
use super::ground::Ground;
use super::plan::Plan;
use super::program::{OpProgram, PutProgram};
use super::run::{Issue, Run, Site, Trouble};

/// So many puts may be under way to a peer however long they are: one more than its link carries at
/// a time.
const PUTS_LEAST: u32 = 2;

/// A put that waits: those of older chunks first, then those of lanes that have their turn earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    chunk: u32,
    lane: u32,
    step: u32,
    slot: u32,
    bytes: usize,
}

impl Waiting {
    fn new(chunk: u32, at: At, bytes: usize) -> Self {
        Self { chunk, lane: at.lane, step: at.step, slot: at.slot, bytes }
    }
}

/// What a run has for one peer.
#[derive(Debug, Default)]
struct Outbox {
    /// Under way.
    puts: u32,
    bytes: u64,
    bytes_max: u64,
    waiting: BinaryHeap<Reverse<Waiting>>,
}

impl Outbox {
    fn has_room(&self, bytes: usize) -> bool {
        self.puts < PUTS_LEAST || self.bytes + bytes as u64 <= self.bytes_max
    }
}

/// What a run has for its peers. Kept from run to run for its memory.
#[derive(Debug, Default)]
pub(super) struct Outboxes {
    /// By rank.
    of: Vec<Outbox>,
    /// Peers to which puts wait and one has ended.
    with_room: Vec<Rank>,
}

impl Outboxes {
    /// Empty; by rank: how many bytes of puts may be under way to it.
    pub(super) fn reset(&mut self, bytes_max: &[u64]) {
        self.with_room.clear();
        self.of.resize_with(bytes_max.len(), Outbox::default);
        for (outbox, &most) in self.of.iter_mut().zip(bytes_max) {
            (outbox.puts, outbox.bytes, outbox.bytes_max) = (0, 0, most);
            outbox.waiting.clear();
        }
    }

    /// Whether a put of a chunk may be submitted now; else it waits until [`Outboxes::next`] gives
    /// it back.
    fn admits(&mut self, to: Rank, put: Waiting) -> bool {
        let outbox = &mut self.of[to as usize];
        let is_admitted = outbox.has_room(put.bytes);
        if !is_admitted {
            outbox.waiting.push(Reverse(put));
        }
        is_admitted
    }

    /// A put was submitted and has not ended.
    pub(super) fn sent(&mut self, to: Rank, bytes: usize) {
        let outbox = &mut self.of[to as usize];
        outbox.puts += 1;
        outbox.bytes += bytes as u64;
    }

    /// A put has ended.
    fn ended(&mut self, to: Rank, bytes: usize) {
        let outbox = &mut self.of[to as usize];
        outbox.puts -= 1;
        outbox.bytes -= bytes as u64;
        if !outbox.waiting.is_empty() {
            self.with_room.push(to);
        }
    }

    /// What goes next to a peer, if it has room.
    fn next(&mut self, to: Rank) -> Option<Waiting> {
        let outbox = &mut self.of[to as usize];
        let Reverse(first) = *outbox.waiting.peek()?;
        if !outbox.has_room(first.bytes) {
            return None;
        }
        outbox.waiting.pop();
        Some(first)
    }

    /// The device takes no more at present: what was next stays so.
    fn keep(&mut self, to: Rank, put: Waiting) {
        self.of[to as usize].waiting.push(Reverse(put));
        self.with_room.push(to);
    }
}

impl Run {
    /// Whether a put may be given to the device now; it waits for its turn where not.
    pub(super) fn has_turn(&mut self, site: Site<'_>, put: &PutProgram) -> bool {
        let waiting = Waiting::new(site.chunk, site.at, site.bytes());
        !site.plan.is_paced() || self.outboxes.admits(put.to, waiting)
    }

    /// A step's transfer has ended: if it was a put, another one may have its turn.
    pub(super) fn make_room(&mut self, plan: &Plan, at: At) {
        let lane = &plan.program.lanes[at.lane as usize];
        if let OpProgram::Put(put) = &plan.program.steps[(lane.first_step + at.step) as usize].op {
            let chunk = self.instance(plan, at).chunk;
            self.outboxes.ended(put.to, plan.layout.chunk_bytes(lane.block, chunk));
        }
    }

    /// Gives the device what has waited for its turn; true when there was anything.
    pub(super) fn send_waiting(&mut self, plan: &Plan, ground: &mut Ground<'_>) -> Result<bool, Trouble> {
        let mut moved = false;
        while let Some(peer) = self.outboxes.with_room.pop() {
            while let Some(first) = self.outboxes.next(peer) {
                let Waiting { chunk, lane, step, slot, .. } = first;
                let at = At { lane, slot, step };
                let lane = &plan.program.lanes[lane as usize];
                let OpProgram::Put(put) = &plan.program.steps[(lane.first_step + step) as usize].op else {
                    unreachable!("nothing but puts waits here")
                };
                match self.submit(ground, Site { plan, lane, at, chunk }, put)? {
                    Issue::Complete => self.complete(plan, at),
                    Issue::UnderWay => {}
                    Issue::Blocked | Issue::Unnoticed { .. } => {
                        self.outboxes.keep(peer, first);
                        return Ok(moved);
                    }
                }
                moved = true;
            }
        }
        Ok(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(chunk: u32, lane: u32) -> Waiting {
        Waiting::new(chunk, At { lane, slot: chunk % 8, step: 0 }, 10)
    }

    fn outboxes(bytes_max: u64) -> Outboxes {
        let mut outboxes = Outboxes::default();
        outboxes.reset(&[bytes_max, bytes_max]);
        outboxes
    }

    fn submit(outboxes: &mut Outboxes, put: Waiting) -> bool {
        let is_admitted = outboxes.admits(1, put);
        if is_admitted {
            outboxes.sent(1, put.bytes);
        }
        is_admitted
    }

    #[test]
    fn the_oldest_chunk_goes_first_whenever_it_came() {
        let mut outboxes = outboxes(0);
        assert!(submit(&mut outboxes, put(5, 0)) && submit(&mut outboxes, put(6, 0)));
        for late in [put(7, 0), put(3, 2), put(3, 1), put(4, 0)] {
            assert!(!submit(&mut outboxes, late));
        }
        assert_eq!(outboxes.next(1), None, "two are under way");
        let mut gone = Vec::new();
        for _ in 0..4 {
            outboxes.ended(1, 10);
            assert_eq!(outboxes.with_room.pop(), Some(1));
            let next = outboxes.next(1).expect("one has ended");
            outboxes.sent(1, next.bytes);
            gone.push((next.chunk, next.lane));
        }
        assert_eq!(gone, [(3, 1), (3, 2), (4, 0), (7, 0)]);
    }

    #[test]
    fn as_many_are_under_way_as_a_round_trip_carries() {
        let mut outboxes = outboxes(35);
        let admitted = (0..5).filter(|&chunk| submit(&mut outboxes, put(chunk, 0))).count();
        assert_eq!(admitted, 3);
        assert!(outboxes.admits(0, put(9, 0)), "another peer's room is another one");
    }

    #[test]
    fn what_the_device_does_not_take_is_still_next() {
        let mut outboxes = outboxes(0);
        let all: Vec<bool> = (0..4).map(|chunk| submit(&mut outboxes, put(chunk, 0))).collect();
        assert_eq!(all, [true, true, false, false]);
        outboxes.ended(1, 10);
        outboxes.with_room.clear();
        let next = outboxes.next(1).expect("room");
        outboxes.keep(1, next);
        assert_eq!(outboxes.with_room, [1]);
        assert_eq!(outboxes.next(1), Some(next));
    }
}
