//! The checker of races and of writes after a fence, from the accesses that the world reports.
//!
//! It keeps a vector clock for each rank. A rank's own entry grows whenever others can learn from
//! it: when it submits a transfer, and when it tells how many runs it has completed. A transfer
//! begins with the clock of its submitter. A rank knows the transfer when it has seen its signal;
//! the submitter knows the reads of its source from its `Done` on. Of two accesses to the same
//! bytes, one of them a write, the later one must know the earlier one.

use std::collections::BTreeMap;
use std::ops::Range;

use pleach_transport::Nanos;
use pleach_transport::sim::{Access, AccessKind, Actor, Observer, Record, TransferNumber};
use pleach_vocabulary::Rank;

use super::trial::Checker;

type Clock = Vec<u32>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accessor {
    /// A rank, at this time of its own.
    Rank(Rank, u32),
    Transfer(TransferNumber),
}

#[derive(Clone, Debug)]
struct Segment {
    end: usize,
    write: Option<Accessor>,
    reads: Vec<Accessor>,
}

#[derive(Default)]
struct Sent {
    submitter: Rank,
    clock: Clock,
    /// From these times of these ranks on it is known.
    known: Vec<(Rank, u32)>,
    is_done: bool,
}

/// The checker; see the module.
pub(super) struct Watch {
    clocks: Vec<Clock>,
    transfers: BTreeMap<TransferNumber, Sent>,
    /// By sender, receiver and signal slot: the transfers whose signals were shown and not acted on
    /// yet, by count.
    shown: BTreeMap<(Rank, Rank, u16), BTreeMap<u64, TransferNumber>>,
    /// By rank and sequence, then by number of complete runs: the rank's clock when it told that
    /// number.
    released: Vec<BTreeMap<u64, BTreeMap<u64, Clock>>>,
    /// By owner.
    memory: Vec<BTreeMap<usize, Segment>>,
    /// By rank and peer.
    severed: Vec<Vec<bool>>,
    /// By owner: where memory of callers begins and ends.
    lent: Vec<BTreeMap<usize, usize>>,
    /// Ranks that make different calls take each other's scratch for free; nothing of it is used,
    /// for their signatures differ. Then only callers' memory counts.
    forgives_scratch: bool,
    found: Option<(Checker, Nanos, String)>,
}

impl Watch {
    pub(super) fn new(ranks: u32, forgives_scratch: bool) -> Self {
        let ranks = ranks as usize;
        Self {
            // Each rank begins with a time of its own that no other knows.
            clocks: (0..ranks)
                .map(|rank| (0..ranks).map(|other| u32::from(other == rank)).collect())
                .collect(),
            transfers: BTreeMap::new(),
            shown: BTreeMap::new(),
            released: vec![BTreeMap::new(); ranks],
            memory: vec![BTreeMap::new(); ranks],
            severed: vec![vec![false; ranks]; ranks],
            lent: vec![BTreeMap::new(); ranks],
            forgives_scratch,
            found: None,
        }
    }

    /// These addresses are memory of a caller of `owner`.
    pub(super) fn lend(&mut self, owner: Rank, addresses: Range<usize>) {
        self.lent[owner as usize].insert(addresses.start, addresses.end);
    }

    fn is_lent(&self, owner: Rank, address: usize) -> bool {
        self.lent[owner as usize].range(..=address).next_back().is_some_and(|(_, end)| address < *end)
    }

    /// The first thing that was wrong.
    pub(super) fn found(&self) -> Option<&(Checker, Nanos, String)> {
        self.found.as_ref()
    }

    fn report(&mut self, checker: Checker, now: Nanos, what: String) {
        self.found.get_or_insert((checker, now, what));
    }

    fn join(&mut self, rank: Rank, clock: &Clock) {
        for (own, other) in self.clocks[rank as usize].iter_mut().zip(clock) {
            *own = (*own).max(*other);
        }
    }

    fn tick(&mut self, rank: Rank) {
        self.clocks[rank as usize][rank as usize] += 1;
    }

    fn submitted(&mut self, rank: Rank, transfer: TransferNumber) {
        let clock = self.clocks[rank as usize].clone();
        let sent = Sent { submitter: rank, clock, ..Sent::default() };
        self.transfers.insert(transfer, sent);
        self.tick(rank);
    }

    fn consumed(&mut self, rank: Rank, from: Rank, signal_slot: u16, count: u64) {
        let Some(shown) = self.shown.get_mut(&(from, rank, signal_slot)) else { return };
        let later = shown.split_off(&(count + 1));
        let seen = std::mem::replace(shown, later);
        for transfer in seen.values() {
            let Some(sent) = self.transfers.get_mut(transfer) else { continue };
            let clock = sent.clock.clone();
            let own = self.clocks[rank as usize][rank as usize];
            sent.known.push((rank, own));
            self.join(rank, &clock);
        }
    }

    /// Whether `actor`, at this clock, knows the accesses of `by`.
    fn knows(&self, clock: &Clock, actor: &Accessor, by: &Accessor) -> bool {
        match by {
            Accessor::Rank(rank, time) => clock[*rank as usize] >= *time,
            Accessor::Transfer(transfer) => {
                let known = self.transfers.get(transfer).map_or(&[][..], |sent| &sent.known);
                actor == by || known.iter().any(|(rank, time)| clock[*rank as usize] >= *time)
            }
        }
    }

    fn access(&mut self, now: Nanos, access: &Access) {
        let (actor, clock, rank) = match access.by {
            Actor::Rank(rank) => {
                let clock = self.clocks[rank as usize].clone();
                (Accessor::Rank(rank, clock[rank as usize]), clock, rank)
            }
            Actor::Transfer(transfer, submitter) => {
                let Some(sent) = self.transfers.get(&transfer) else { return };
                if sent.is_done && access.owner == submitter {
                    let what = format!("rank {submitter}'s transfer touches its own memory after its Done");
                    self.report(Checker::Race, now, what);
                    return;
                }
                (Accessor::Transfer(transfer), self.transfers[&transfer].clock.clone(), submitter)
            }
        };
        let writes = access.kind != AccessKind::Read;
        if writes && self.severed[access.owner as usize][rank as usize] {
            let what = format!("rank {rank} writes to rank {} that has severed it", access.owner);
            self.report(Checker::Fence, now, what);
            return;
        }
        let mut memory = std::mem::take(&mut self.memory[access.owner as usize]);
        let raced = self.touch(&mut memory, access.addresses.clone(), writes, actor, &clock);
        self.memory[access.owner as usize] = memory;
        let counts = !self.forgives_scratch || self.is_lent(access.owner, access.addresses.start);
        if let Some(other) = raced.filter(|_| counts) {
            let Access { by, owner, range, kind, key, .. } = access;
            let what = format!(
                "{by:?} ({kind:?}) and {other:?} touch bytes {range:?} of {} of rank {owner}, and nothing orders them",
                if *key == pleach_transport::RegionKey::NONE { "private memory" } else { "a region" },
            );
            self.report(Checker::Race, now, what);
        }
    }

    /// Notes the access; returns the actor with which it races.
    fn touch(
        &self,
        memory: &mut BTreeMap<usize, Segment>,
        range: Range<usize>,
        writes: bool,
        actor: Accessor,
        clock: &Clock,
    ) -> Option<Accessor> {
        if range.is_empty() {
            return None;
        }
        split(memory, range.start);
        split(memory, range.end);
        let mut raced = None;
        for segment in memory.range_mut(range.clone()).map(|(_, segment)| segment) {
            let reads = segment.reads.iter().filter(|_| writes);
            let unknown = segment.write.iter().chain(reads).find(|by| !self.knows(clock, &actor, by));
            raced = raced.or(unknown.copied());
            if !writes {
                segment.reads.retain(|by| !self.knows(clock, &actor, by));
                segment.reads.push(actor);
            }
        }
        if writes {
            let inside: Vec<usize> = memory.range(range.clone()).map(|(start, _)| *start).collect();
            inside.into_iter().for_each(|start| drop(memory.remove(&start)));
            memory.insert(range.start, Segment { end: range.end, write: Some(actor), reads: Vec::new() });
            return raced;
        }
        let mut at = range.start;
        let mut gaps = Vec::new();
        for (start, segment) in memory.range(range.clone()) {
            if at < *start {
                gaps.push(at..*start);
            }
            at = segment.end;
        }
        gaps.push(at..range.end);
        for gap in gaps.into_iter().filter(|gap| !gap.is_empty()) {
            memory.insert(gap.start, Segment { end: gap.end, write: None, reads: vec![actor] });
        }
        raced
    }
}

/// Makes a segment end at `at`.
fn split(memory: &mut BTreeMap<usize, Segment>, at: usize) {
    if let Some((start, segment)) = memory.range_mut(..at).next_back()
        && *start < at
        && segment.end > at
    {
        let behind = segment.clone();
        segment.end = at;
        memory.insert(at, behind);
    }
}

impl Observer for Watch {
    fn observe(&mut self, now: Nanos, record: &Record) {
        match *record {
            Record::Access(ref access) => self.access(now, access),
            Record::Submitted { rank, transfer, .. } => self.submitted(rank, transfer),
            Record::Signalled { from, to, signal_slot, count, transfer } => {
                self.shown.entry((from, to, signal_slot)).or_default().insert(count, transfer);
            }
            Record::Consumed { rank, from, signal_slot, count } => {
                self.consumed(rank, from, signal_slot, count)
            }
            Record::Completed { rank, transfer, .. } => {
                let time = self.clocks[rank as usize][rank as usize];
                if let Some(sent) = self.transfers.get_mut(&transfer) {
                    sent.is_done = true;
                    debug_assert_eq!(sent.submitter, rank);
                    sent.known.push((rank, time));
                }
            }
            Record::Released { rank, sequence, number } => {
                let released = self.released[rank as usize].entry(sequence).or_default();
                if released.last_key_value().is_none_or(|(last, _)| *last < number) {
                    released.insert(number, self.clocks[rank as usize].clone());
                    self.tick(rank);
                }
            }
            Record::Acquired { rank, from, sequence, number } => {
                let released = self.released[from as usize].get(&sequence);
                let clock = released.and_then(|released| released.range(..=number).next_back());
                if let Some(clock) = clock.map(|(_, clock)| clock.clone()) {
                    self.join(rank, &clock);
                }
            }
            Record::Severed { rank, peer } => self.severed[rank as usize][peer as usize] = true,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use pleach_transport::RegionKey;

    use super::*;

    fn access(by: Actor, kind: AccessKind, addresses: Range<usize>) -> Record {
        Record::Access(Access {
            by,
            owner: 1,
            key: RegionKey::NONE,
            range: 0..addresses.len() as u64,
            addresses,
            kind,
            start: Nanos(0),
            end: Nanos(0),
        })
    }

    fn seen(records: &[Record]) -> Option<Checker> {
        let mut watch = Watch::new(2, false);
        records.iter().for_each(|record| watch.observe(Nanos(0), record));
        watch.found().map(|(checker, ..)| *checker)
    }

    fn put(records: &[Record]) -> Vec<Record> {
        let transfer = TransferNumber(7);
        let mut all = vec![
            Record::Submitted { rank: 0, peer: 1, transfer },
            access(Actor::Transfer(transfer, 0), AccessKind::Write, 100..200),
            Record::Signalled { from: 0, to: 1, signal_slot: 3, count: 1, transfer },
        ];
        all.extend_from_slice(records);
        all
    }

    #[test]
    fn bytes_may_be_touched_after_their_signal_was_acted_on_and_not_before() {
        let read = access(Actor::Rank(1), AccessKind::Read, 150..160);
        let consumed = Record::Consumed { rank: 1, from: 0, signal_slot: 3, count: 1 };
        assert_eq!(seen(&put(std::slice::from_ref(&read))), Some(Checker::Race));
        assert_eq!(seen(&put(&[consumed, read])), None);
        assert_eq!(seen(&put(&[access(Actor::Rank(1), AccessKind::Read, 200..260)])), None);
    }

    #[test]
    fn two_reads_are_no_race_and_a_write_after_them_must_know_both() {
        let read = |rank| access(Actor::Rank(rank), AccessKind::Read, 0..10);
        let write = access(Actor::Rank(1), AccessKind::Write, 5..6);
        assert_eq!(seen(&[read(0), read(1)]), None);
        assert_eq!(seen(&[read(1), write.clone()]), None);
        assert_eq!(seen(&[read(0), read(1), write.clone()]), Some(Checker::Race));
        let told = [
            read(0),
            Record::Released { rank: 0, sequence: 0, number: 1 },
            Record::Acquired { rank: 1, from: 0, sequence: 0, number: 1 },
            write,
        ];
        assert_eq!(seen(&told), None);
    }

    #[test]
    fn a_severed_peer_that_writes_is_seen() {
        let severed = Record::Severed { rank: 1, peer: 0 };
        let records = [severed, access(Actor::Rank(0), AccessKind::Write, 0..1)];
        assert_eq!(seen(&records), Some(Checker::Fence));
    }
}
