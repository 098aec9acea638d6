//! Slots: what this rank writes into slots at its peers, and what peers have written into its own.
//!
//! **Invariants:** a slot is written again only after its credit. A write is polled once, in the
//! order in which its writer wrote. A credit is owed from the moment at which the caller has seen
//! the write, and is signalled once.

use pleach_transport::{Nanos, Signal, Signals, Slice, Source, Transfer};
use pleach_vocabulary::Rank;

use super::layout::{LINE_BYTES, Layout, SlotHeader};
use super::memory::Place;
use super::one_sided::{PeerMemory, RETRIED_AFTER};
use super::word::Word;
use crate::engine::{Engine, FaultKind};

/// Most writes that are staged at a time.
pub(crate) const STAGED_MAX: usize = 2;

/// A write that has come.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    pub(crate) from: Rank,
    pub(crate) slot: u16,
    pub(crate) word: Word,
    /// The elements, which stay until the credit.
    pub(crate) data: Slice,
}

/// What came from one writer.
#[derive(Clone, Debug)]
struct Received {
    /// Number of the next write.
    next: u64,
    /// By slot: how many signals were polled.
    polled: Vec<u64>,
    /// Credits that were not signalled yet.
    owed: u64,
}

/// What went to one target.
#[derive(Clone, Debug)]
struct Sent {
    /// Number of the next write.
    next: u64,
    /// By slot: the number of its last write.
    last: Vec<Option<u64>>,
}

/// Memory in which a write is put together for a put.
struct Staging {
    slice: Slice,
    is_taken: bool,
    /// For whom it was taken last.
    peer: Rank,
    /// The put that reads it.
    put: Option<u64>,
}

/// Something of slots that goes wrong on purpose.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotMutant {
    /// A slot is written again before its credit.
    WithoutCredit,
    /// A write is polled again.
    PolledTwice,
    /// Writes are taken as they come.
    AnyOrder,
    /// A credit is given when the caller has not seen the write yet.
    CreditTooEarly,
}

/// The slots of a window, seen from one rank.
pub(crate) struct Slots {
    rank: Rank,
    layout: Layout,
    /// Where the credits of peers are counted. The signals of slot 0 come in the next one.
    credit_slot: u16,
    /// What peers write.
    own: Slice,
    /// By rank; empty for this rank.
    signals: Vec<Signals>,
    received: Vec<Received>,
    sent: Vec<Sent>,
    staging: Vec<Staging>,
    puts: u64,
    /// The peer whose writes are looked at first.
    turn: Rank,
    #[cfg(test)]
    pub(crate) mutant: Option<SlotMutant>,
}

impl Slots {
    /// `signals`: by rank. `staging`: for writes to peers whose memory is not mapped.
    pub(crate) fn new(
        rank: Rank,
        layout: Layout,
        credit_slot: u16,
        own: Slice,
        signals: Vec<Signals>,
        staging: Vec<Slice>,
    ) -> Self {
        let slots = usize::from(layout.slots());
        let received = Received { next: 0, polled: vec![0; slots], owed: 0 };
        let sent = Sent { next: 0, last: vec![None; slots] };
        Self {
            rank,
            layout,
            credit_slot,
            own,
            received: vec![received; signals.len()],
            sent: vec![sent; signals.len()],
            signals,
            staging: staging
                .into_iter()
                .map(|slice| Staging { slice, is_taken: false, peer: rank, put: None })
                .collect(),
            puts: 0,
            turn: 0,
            #[cfg(test)]
            mutant: None,
        }
    }

    /// The signal slot of a slot.
    fn signal_slot(&self, slot: u16) -> u16 {
        self.credit_slot + 1 + slot
    }

    /// Whether this rank may write into its slot at the peer: the write before was polled.
    pub(crate) fn is_free(&self, peer: Rank, slot: u16) -> bool {
        #[cfg(test)]
        if self.mutant == Some(SlotMutant::WithoutCredit) {
            return true;
        }
        let last = self.sent[peer as usize].last[usize::from(slot)];
        last.is_none_or(|number| self.signals[peer as usize].count(self.credit_slot) > number)
    }

    /// The place of the next write into a slot that is free. `None`: all staging is in use.
    pub(crate) fn place(&mut self, peers: &[PeerMemory], peer: Rank, slot: u16) -> Option<Place> {
        if let Some(mapped) = peers[peer as usize].slots.get(usize::from(slot)) {
            return Some(Place::Mapped(mapped.clone()));
        }
        let staging = self.staging.iter_mut().find(|staging| !staging.is_taken)?;
        (staging.is_taken, staging.peer) = (true, peer);
        Some(Place::Staged(staging.slice.clone()))
    }

    /// Whether [`Slots::place`] finds a place for a slot that is free.
    pub(crate) fn has_place(&self, peers: &[PeerMemory], peer: Rank) -> bool {
        !peers[peer as usize].slots.is_empty() || self.staging.iter().any(|staging| !staging.is_taken)
    }

    /// The peer of the write that has been on its way for longest.
    pub(crate) fn oldest_on_its_way(&self) -> Option<Rank> {
        let under_way = self.staging.iter().filter(|staging| staging.put.is_some());
        under_way.min_by_key(|staging| staging.put).map(|staging| staging.peer)
    }

    /// The header of the next write to a peer.
    pub(crate) fn header(&self, peer: Rank, bytes: usize) -> SlotHeader {
        SlotHeader { number: self.sent[peer as usize].next, bytes: bytes as u64 }
    }

    /// Sends what was put together in a place. False: not now.
    pub(crate) fn send(
        &mut self,
        engine: &mut Engine,
        peers: &[PeerMemory],
        (peer, slot): (Rank, u16),
        (place, bytes): (&Place, usize),
        word: Word,
        now: Nanos,
    ) -> bool {
        let signal = Signal { signal_slot: self.signal_slot(slot), payload: word.payload() };
        match place {
            Place::Mapped(_) => {
                if !engine.signal(peer, &signal, now) {
                    return false;
                }
            }
            Place::Staged(slice) => {
                let at = self.layout.slot(self.rank, slot, bytes);
                let dst = peers[peer as usize].written.slice(at.start as u64..at.end as u64);
                let Ok(dst) = dst else { unreachable!("a peer's memory was found to be long enough") };
                let src = slice.slice(0..at.len()).expect("staging is as long as a slot");
                let put = Transfer::Put { src: Source::Slice(src), dst, signal: Some(signal) };
                let number = self.puts << 1 | 1;
                // Before it may end.
                let same = |staging: &&mut Staging| staging.slice.offset() == slice.offset();
                let staging = self.staging.iter_mut().find(same).expect("the place is one of them");
                if !engine.submit(peer, put, number, now) {
                    return false;
                }
                staging.put = Some(number);
                self.puts += 1;
            }
        }
        let sent = &mut self.sent[peer as usize];
        sent.last[usize::from(slot)] = Some(sent.next);
        sent.next += 1;
        true
    }

    /// A put has ended: its staging is free.
    pub(crate) fn note_ended(&mut self, number: u64) {
        if let Some(staging) = self.staging.iter_mut().find(|staging| staging.put == Some(number)) {
            (staging.put, staging.is_taken) = (None, false);
        }
    }

    /// Whether a write can be taken, or a peer has broken the protocol.
    pub(crate) fn has_arrival(&self) -> bool {
        (0..self.signals.len() as Rank).any(|peer| !matches!(self.find(peer), Ok(None)))
    }

    /// The next write of a peer, by its slot and its length; or what the peer did wrong.
    fn find(&self, peer: Rank) -> Result<Option<(u16, usize)>, String> {
        let (signals, received) = (&self.signals[peer as usize], &self.received[peer as usize]);
        if signals.is_empty() {
            return Ok(None);
        }
        for (slot, polled) in (0..self.layout.slots()).zip(&received.polled) {
            let come = signals.count(self.signal_slot(slot)).wrapping_sub(*polled);
            if come == 0 {
                continue;
            }
            if come > 1 {
                return Err(format!("it wrote into slot {slot} of a window again before its credit"));
            }
            let mut header = SlotHeader { number: 0, bytes: 0 };
            let at = self.layout.slot(peer, slot, 0);
            self.own.slice(at).expect("inside of the slots").load(bytemuck::bytes_of_mut(&mut header));
            let ahead = header.number.wrapping_sub(received.next);
            #[cfg(test)]
            let ahead = if self.mutant == Some(SlotMutant::AnyOrder) { 0 } else { ahead };
            if ahead >= u64::from(self.layout.slots()) || header.bytes > self.layout.data_bytes() as u64 {
                return Err(format!("slot {slot} of a window holds no write that it can have made"));
            }
            if ahead == 0 {
                return Ok(Some((slot, header.bytes as usize)));
            }
        }
        Ok(None)
    }

    /// Takes the next write of any peer; peers take turns. A peer that breaks the protocol ends the
    /// group.
    pub(crate) fn take_arrival(&mut self, engine: &mut Engine, now: Nanos) -> Option<Arrived> {
        let peers = self.signals.len() as Rank;
        for from in (0..peers).map(|step| (self.turn + step) % peers) {
            let (slot, bytes) = match self.find(from) {
                Ok(Some(found)) => found,
                Ok(None) => continue,
                Err(detail) => {
                    let waited = std::time::Duration::ZERO;
                    engine.give_up_on(FaultKind::Protocol, from, detail, waited, now);
                    return None;
                }
            };
            self.turn = (from + 1) % peers;
            let received = &mut self.received[from as usize];
            #[cfg(test)]
            let is_again =
                self.mutant == Some(SlotMutant::PolledTwice) && received.next == 2 && received.owed == 0;
            #[cfg(not(test))]
            let is_again = false;
            if !is_again {
                received.next += 1;
                received.polled[usize::from(slot)] += 1;
            }
            let at = self.layout.slot(from, slot, bytes);
            let data = self.own.slice(at.start + LINE_BYTES..at.end).expect("inside of the slots");
            let word = Word::of_payload(self.signals[from as usize].payload_words(self.signal_slot(slot)));
            #[cfg(test)]
            if self.mutant == Some(SlotMutant::CreditTooEarly) {
                self.owe(from);
            }
            return Some(Arrived { from, slot, word, data });
        }
        None
    }

    /// The caller has seen a write of this peer.
    pub(crate) fn owe(&mut self, from: Rank) {
        self.received[from as usize].owed += 1;
    }

    /// Whether credits are owed.
    pub(crate) fn owes(&self) -> bool {
        self.received.iter().any(|received| received.owed > 0)
    }

    /// Signals the credits that are owed. Returns when to try again, if there was no room for all.
    pub(crate) fn give_credits(&mut self, engine: &mut Engine, now: Nanos) -> Option<Nanos> {
        let signal = Signal { signal_slot: self.credit_slot, payload: Word::EMPTY.payload() };
        let mut retry = None;
        for (received, peer) in self.received.iter_mut().zip(0..) {
            while received.owed > 0 {
                if !engine.signal(peer, &signal, now) {
                    retry = Some(now + RETRIED_AFTER);
                    break;
                }
                received.owed -= 1;
            }
        }
        retry
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pleach_transport::{HostMemory, Region, RegionKey, Registry};
    use pleach_vocabulary::random::Random;

    use super::*;

    struct Nobody;
    impl Registry for Nobody {
        fn released(&self, _key: RegionKey) {}
    }

    /// The slots of rank 0 of two, and what rank 1 can do to them.
    fn slots() -> (Slots, Slice, Signals) {
        let layout = Layout::new(100, 3, 2).expect("a few bytes");
        let memory = HostMemory::new(layout.slots_bytes());
        let own = Region::new(memory, RegionKey(1), Arc::new(Nobody)).whole();
        let signals = Signals::new(10);
        let all = vec![Signals::new(0), signals.clone()];
        (Slots::new(0, layout, 5, own.clone(), all, Vec::new()), own, signals)
    }

    #[test]
    fn a_wait_for_a_write_sees_one_that_comes_and_one_that_cannot_be() {
        for (number, bytes, is_right) in [(0, 100, true), (7, 100, false), (0, 101, false)] {
            let (slots, own, signals) = slots();
            let header = SlotHeader { number, bytes };
            own.slice(slots.layout.slot(1, 0, 0)).expect("inside").store(bytemuck::bytes_of(&header));
            assert!(!slots.has_arrival(), "nobody has said so");
            signals.signal(&Signal { signal_slot: 6, payload: Word::EMPTY.payload() });
            assert_eq!(slots.find(1).is_ok(), is_right);
            assert!(slots.has_arrival(), "{number} {bytes}");
        }
    }

    #[test]
    fn whatever_a_peer_writes_its_elements_lie_in_its_slot_or_it_is_found() {
        let mut random = Random::new(1);
        let (mut found, mut refused) = (0, 0);
        for _ in 0..3000 {
            let (slots, own, signals) = slots();
            for slot in 0..3 {
                let mut number = |most: u64| match random.below(4) {
                    0 => random.bits(),
                    1 => u64::MAX,
                    _ => random.below(most),
                };
                let header = SlotHeader { number: number(4), bytes: number(120) };
                own.slice(slots.layout.slot(1, slot, 0)).expect("inside").store(bytemuck::bytes_of(&header));
                for _ in 0..random.below(3) {
                    signals.signal(&Signal { signal_slot: 6 + slot, payload: Word::EMPTY.payload() });
                }
            }
            match slots.find(1) {
                Ok(Some((slot, bytes))) => {
                    assert!(slot < 3 && bytes <= 100 && signals.count(6 + slot) == 1);
                    found += 1;
                }
                Ok(None) => {}
                Err(text) => {
                    assert!(text.contains(" of a window "), "{text}");
                    refused += 1;
                }
            }
            assert!(matches!(slots.find(0), Ok(None)), "this rank writes into none of its own");
        }
        assert!(found > 10 && refused > 100, "{found} found, {refused} refused");
    }
}
