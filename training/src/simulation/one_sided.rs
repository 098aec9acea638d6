//! Reads, writes and words of a simulated rank, carried out by the window of its engine.
//!
//! As a [`Trainer`](crate::Trainer) does it, a rank carries them out one after the other, in the
//! order of the [`Outbox`]. A rank takes messages out of its window when it hears them, and so
//! gives their credits then.
//!
//! A read of a table is made of several reads ([`PeerCopy`]). It begins anew from the copy as it
//! was, with all that they have found so far, until none is missing.

use std::ops::Range;
use std::sync::Arc;

use pleach_collectives::Rank;

use super::engines::{Arrived, Engines, ReadEnded};
use super::mail::{Elements, Message};
use super::rank::SimulatedRank;
use crate::copies::PeerCopy;
use crate::interpreter::Request;
use crate::outbox::Outbox;
use crate::policy::{Event, OperationId, Outcome, Reads, Vector};
use crate::rows::encode;

/// A read that is carried out.
struct Reading {
    id: OperationId,
    from: Rank,
    into: Vector,
    piece: Range<usize>,
    reads: Reads,
    /// What was found so far.
    found: Vec<ReadEnded>,
}

/// What a read still lacks.
struct Missing(Range<usize>);

/// What a read has come to.
enum Read {
    /// It lacks these of the published elements.
    Lacks(Range<usize>),
    /// A version and its word.
    Ended(u64, u64),
}

/// The one-sided exchanges of one rank; see the module.
pub(crate) struct OneSided {
    /// The elements that a rank publishes, and the slots for writes.
    window: (usize, u16),
    outbox: Outbox,
    reading: Option<Reading>,
    /// Writes and words so far.
    sent: u64,
    /// Versions so far.
    published: u64,
    /// By peer, of a table: its share, as it was read last.
    copies: Vec<PeerCopy>,
    /// The rows of a write.
    rows: Vec<f32>,
}

impl OneSided {
    /// Of a rank that has so many ranks; `window`: the elements of a rank and its slots, the last
    /// of which is for words.
    pub(crate) fn new(ranks: usize, window: Option<(usize, u16)>) -> Self {
        let (len, slots) = window.unwrap_or_default();
        Self {
            window: (len, slots.saturating_sub(1)),
            outbox: Outbox::new(ranks),
            reading: None,
            sent: 0,
            published: 0,
            copies: (0..ranks).map(|_| PeerCopy::default()).collect(),
            rows: Vec::new(),
        }
    }

    /// Takes a request, to be carried out after those before. A write that does not wait comes back
    /// where there is no credit.
    pub(crate) fn ask(
        &mut self,
        rank: Rank,
        request: Request,
        engines: &mut dyn Engines,
    ) -> Result<Option<Request>, String> {
        if let Request::Write { to, waits: false, .. } = request {
            let slot = self.outbox.next_slot(to, self.window.1);
            let is_held_up = self.outbox.peers().any(|peer| peer == to);
            if is_held_up || !engines.has_credit(rank, (to, slot))? {
                return Ok(Some(request));
            }
        }
        self.outbox.ask(request);
        Ok(None)
    }

    /// Carries out nothing of what was asked for.
    pub(crate) fn forget(&mut self) {
        self.outbox.clear();
        self.reading = None;
    }

    /// Whether nothing that was asked for is left.
    pub(crate) fn is_idle(&self) -> bool {
        self.outbox.is_empty() && self.reading.is_none()
    }

    /// Writes and words so far.
    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    /// The first peer whose credit the rank waits for.
    pub(crate) fn awaits(&self) -> Option<Rank> {
        self.outbox.peers().next()
    }

    /// Publishes what the rank has published since the last call.
    pub(crate) fn publish(&mut self, rank: &SimulatedRank, engines: &mut dyn Engines) -> Result<(), String> {
        let (version, word, share) = rank.published();
        let Some(share) = share.filter(|_| version > self.published) else { return Ok(()) };
        let mut elements = share.to_vec();
        elements.extend(rank.stamps().iter().flat_map(|stamps| stamps.iter()));
        elements.resize(self.window.0, 0.0);
        for _ in self.published..version {
            engines.publish(rank.number(), &elements, word)?;
        }
        self.published = version;
        Ok(())
    }

    /// The next message that has come.
    pub(crate) fn next_message(
        &self,
        rank: Rank,
        engines: &mut dyn Engines,
    ) -> Result<Option<Message>, String> {
        if self.window.1 == 0 {
            return Ok(None);
        }
        Ok(engines.take_write(rank)?.map(|Arrived { from, slot, word, elements }| {
            let elements = (slot != self.window.1).then(|| Elements::whole(Arc::from(elements)));
            Message { from, word, elements }
        }))
    }

    /// Goes on as far as to the end of one operation, of which the rank is to be told then; true
    /// when anything moved.
    pub(crate) fn go_on(
        &mut self,
        rank: &mut SimulatedRank,
        engines: &mut dyn Engines,
        events: &mut Vec<(Rank, Event)>,
    ) -> Result<bool, String> {
        let number = rank.number();
        if let Some(reading) = &mut self.reading {
            let Some(found) = engines.take_read(number)? else { return Ok(false) };
            reading.found.push(found);
            events.extend(self.read_on(rank, engines)?.map(|event| (number, event)));
            return Ok(true);
        }
        let next = self.outbox.next(self.window.1, |to, slot| engines.has_credit(number, (to, slot)))?;
        let Some((place, slot)) = next else { return Ok(false) };
        let request = self.outbox.take(place);
        match (&request, slot) {
            (Request::Write { id, to, from, piece, word, .. }, Some(slot)) => {
                let row = rank.row();
                let sent = encode(rank.piece(*from, piece), row, &mut self.rows);
                let (bytes, id, to) = (size_of_val(sent) as u64, *id, *to);
                if !engines.write(number, (to, slot), sent, *word)? {
                    self.outbox.put_back(place, request);
                    return Ok(false);
                }
                self.outbox.wrote(to);
                self.sent += 1;
                rank.count(bytes);
                events.push((number, Event::Done(id, Outcome::Written)));
            }
            (Request::Write { id, to, .. }, None) => {
                events.push((number, Event::Done(*id, Outcome::Refused { by: *to })));
            }
            (Request::Tell { to, word }, Some(slot)) => {
                if !engines.write(number, (*to, slot), &[], *word)? {
                    self.outbox.put_back(place, request);
                    return Ok(false);
                }
                self.sent += 1;
            }
            (Request::Read { id, from, into, piece, reads }, _) => {
                let (id, from, into, piece, reads) = (*id, *from, *into, piece.clone(), *reads);
                self.reading = Some(Reading { id, from, into, piece, reads, found: Vec::new() });
                self.read_on(rank, engines)?;
            }
            _ => unreachable!("these go another way"),
        }
        Ok(true)
    }

    /// Goes on with the read: begins the next one that it lacks, or ends it.
    fn read_on(
        &mut self,
        rank: &mut SimulatedRank,
        engines: &mut dyn Engines,
    ) -> Result<Option<Event>, String> {
        let Some(reading) = &self.reading else { return Ok(None) };
        let (from, reads) = (reading.from, reading.reads);
        match self.outcome(rank) {
            Read::Lacks(range) => {
                rank.count((size_of::<f32>() * range.len()) as u64);
                engines.read(rank.number(), from, range, reads)?;
                Ok(None)
            }
            Read::Ended(version, word) => {
                let ended = self.reading.take().map(|reading| reading.id);
                // Bytes of several versions have no word.
                let word = if reads == Reads::Torn { 0 } else { word };
                Ok(ended.map(|id| Event::Done(id, Outcome::Read { version, word })))
            }
        }
    }

    /// What the read under way has come to. One that has ended is stored.
    fn outcome(&mut self, rank: &mut SimulatedRank) -> Read {
        let Some(Reading { from, into, piece, reads, found, .. }) = &self.reading else {
            return Read::Ended(0, 0);
        };
        let len = piece.len();
        let Some(row) = rank.row().filter(|_| *reads == Reads::Consistent && len > 0) else {
            let Some(ReadEnded { version, word, elements }) = found.first() else {
                return Read::Lacks(0..len);
            };
            rank.piece(*into, piece).copy_from_slice(elements);
            return Read::Ended(*version, *word);
        };
        let mut copy = self.copies[*from as usize].clone();
        let mut found = found.iter();
        let renewed = copy.renew(len, row, |range, into| {
            let ReadEnded { version, word, elements } = found.next().ok_or(Missing(range))?;
            into.copy_from_slice(elements);
            Ok((*version, *word))
        });
        match renewed {
            Err(Missing(range)) => Read::Lacks(range),
            Ok((version, word)) => {
                rank.piece(*into, piece).copy_from_slice(copy.elements(len));
                self.copies[*from as usize] = copy;
                Read::Ended(version, word)
            }
        }
    }
}
