//! Puts that wait to be submitted, where links set the pace: of the puts to one peer the oldest
//! chunk goes first.
//!
//! A link that carries one transfer after the other keeps their order. If puts are submitted as
//! soon as they can be, the first steps of all chunks in a window go before any second step. Then
//! all chunks travel from link to link together, and the links before and behind them stay idle.
//! (Networks of queues that serve the first arrival first can lose throughput in this way;
//! networks that serve the packet that is under way longest cannot: Andrews, Awerbuch, Fernández,
//! Kleinberg, Leighton and Liu, "Universal stability results for greedy contention-resolution
//! protocols", FOCS 1996.) So a rank gives the device no more puts to a peer than keep the peer's
//! link busy. The next put is one of the oldest chunk that any tree has for the peer.
//!
//! **Invariant:** a pending put is under way for its lane, with its source and its room at the
//! peer, as if the device had it. Each is submitted once there is room for it, or the run ends.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use pleach_vocabulary::Rank;

use super::super::StepAddress;
use super::super::plan::{ChunkStep, Plan};

/// This many puts may be under way to a peer however long they are: one more than its link carries
/// at a time.
const PUTS_LEAST: u32 = 2;

/// A put that waits for its turn. Older chunks go first, then lanes with smaller numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PendingPut {
    chunk: u32,
    lane: u32,
    step: u32,
    bytes: usize,
}

impl PendingPut {
    pub(super) fn new(step: ChunkStep<'_>) -> Self {
        let StepAddress { lane, step: number, .. } = step.address();
        Self { chunk: step.chunk(), lane, step: number, bytes: step.bytes() }
    }

    /// The step that puts.
    pub(super) fn step(self, plan: &Plan) -> ChunkStep<'_> {
        plan.chunk_step(self.lane, self.chunk, self.step)
    }
}

/// The puts of a run to one peer.
#[derive(Debug, Default)]
struct PeerQueue {
    /// Puts under way, and their bytes.
    puts: u32,
    bytes: u64,
    bytes_max: u64,
    pending: BinaryHeap<Reverse<PendingPut>>,
}

impl PeerQueue {
    fn has_room(&self, bytes: usize) -> bool {
        self.puts < PUTS_LEAST || self.bytes + bytes as u64 <= self.bytes_max
    }
}

/// The puts of a run. Kept from run to run for its memory.
#[derive(Debug, Default)]
pub(super) struct PendingPuts {
    /// By rank.
    queues: Vec<PeerQueue>,
    /// Peers to which puts are pending and one has ended.
    with_room: Vec<Rank>,
}

impl PendingPuts {
    /// None; by rank: how many bytes of puts may be under way to it.
    pub(super) fn reset(&mut self, bytes_max: &[u64]) {
        self.with_room.clear();
        self.queues.resize_with(bytes_max.len(), PeerQueue::default);
        for (queue, &most) in self.queues.iter_mut().zip(bytes_max) {
            (queue.puts, queue.bytes, queue.bytes_max) = (0, 0, most);
            queue.pending.clear();
        }
    }

    /// Whether a put may be submitted now; else it is pending until [`PendingPuts::next`] returns
    /// it.
    pub(super) fn admits(&mut self, to: Rank, put: PendingPut) -> bool {
        let queue = &mut self.queues[to as usize];
        let is_admitted = queue.has_room(put.bytes);
        if !is_admitted {
            queue.pending.push(Reverse(put));
        }
        is_admitted
    }

    /// A put was submitted and has not ended.
    pub(super) fn sent(&mut self, to: Rank, bytes: usize) {
        let queue = &mut self.queues[to as usize];
        queue.puts += 1;
        queue.bytes += bytes as u64;
    }

    /// A put has ended.
    pub(super) fn ended(&mut self, to: Rank, bytes: usize) {
        let queue = &mut self.queues[to as usize];
        queue.puts -= 1;
        queue.bytes -= bytes as u64;
        if !queue.pending.is_empty() {
            self.with_room.push(to);
        }
    }

    /// Takes the put that goes next, with its peer, if a peer has room.
    pub(super) fn next(&mut self) -> Option<(Rank, PendingPut)> {
        while let Some(&peer) = self.with_room.last() {
            let queue = &mut self.queues[peer as usize];
            let first = queue.pending.peek().map(|Reverse(first)| *first);
            if let Some(first) = first.filter(|first| queue.has_room(first.bytes)) {
                queue.pending.pop();
                return Some((peer, first));
            }
            self.with_room.pop();
        }
        None
    }

    /// The device takes no more at present: the put goes next again.
    pub(super) fn put_back(&mut self, to: Rank, put: PendingPut) {
        self.queues[to as usize].pending.push(Reverse(put));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(chunk: u32, lane: u32) -> PendingPut {
        PendingPut { chunk, lane, step: 0, bytes: 10 }
    }

    fn puts(bytes_max: u64) -> PendingPuts {
        let mut puts = PendingPuts::default();
        puts.reset(&[bytes_max, bytes_max]);
        puts
    }

    fn submit(puts: &mut PendingPuts, put: PendingPut) -> bool {
        let is_admitted = puts.admits(1, put);
        if is_admitted {
            puts.sent(1, put.bytes);
        }
        is_admitted
    }

    #[test]
    fn the_oldest_chunk_goes_first_whenever_it_came() {
        let mut puts = puts(0);
        assert!(submit(&mut puts, put(5, 0)) && submit(&mut puts, put(6, 0)));
        for late in [put(7, 0), put(3, 2), put(3, 1), put(4, 0)] {
            assert!(!submit(&mut puts, late));
        }
        assert_eq!(puts.next(), None, "two are under way");
        let mut gone = Vec::new();
        for _ in 0..4 {
            puts.ended(1, 10);
            let (peer, next) = puts.next().expect("one has ended");
            assert_eq!(peer, 1);
            puts.sent(1, next.bytes);
            gone.push((next.chunk, next.lane));
            assert_eq!(puts.next(), None, "two are under way");
        }
        assert_eq!(gone, [(3, 1), (3, 2), (4, 0), (7, 0)]);
    }

    #[test]
    fn as_many_are_under_way_as_a_round_trip_carries() {
        let mut puts = puts(35);
        let admitted = (0..5).filter(|&chunk| submit(&mut puts, put(chunk, 0))).count();
        assert_eq!(admitted, 3);
        assert!(puts.admits(0, put(9, 0)), "another peer's room is another one");
    }

    #[test]
    fn a_put_that_the_device_does_not_take_is_still_next() {
        let mut puts = puts(0);
        let all: Vec<bool> = (0..4).map(|chunk| submit(&mut puts, put(chunk, 0))).collect();
        assert_eq!(all, [true, true, false, false]);
        puts.ended(1, 10);
        let (peer, next) = puts.next().expect("room");
        puts.put_back(peer, next);
        assert_eq!(puts.next(), Some((1, next)));
    }
}
