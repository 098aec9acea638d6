//! One-sided exchanges of a trainer, by a [`Window`] of the group.
//!
//! A rank carries its reads, writes and words out on the program's thread, in the order of the
//! [`Outbox`]. A message waits for a credit only while there is nothing to compute, and then this
//! rank takes in what comes, so ranks that write to each other do not wait for ever.
//!
//! **Invariants:** messages of a peer are heard in its order, each once. A rank that waits ends
//! with an error if no peer shows life for longer than the group's deadline: a message, or a new
//! version of what it publishes; and at once if the peer for which it waits has left.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use pleach_collectives::{Buffer, Operation, Rank, ReduceOp, Window, Word};
use pleach_transport::clock::{self, Nanos};

use super::{TrainError, Trainer};
use crate::copies::PeerCopy;
use crate::interpreter::{Request, Vectors};
use crate::ledger::PolicyError;
use crate::outbox::Outbox;
use crate::policy::{Event, OperationId, Outcome, Reads, Vector};
use crate::rows::encode;

/// How long a rank that waits for something else, as a credit, waits for it or for messages in
/// turn.
pub(crate) const TURN: Duration = Duration::from_millis(1);

/// Says that its sender is at rest; policies' words have zeros where this one has none.
fn at_rest_word() -> Word {
    const REST_MARK: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    Word::new(&REST_MARK).expect("a word has more bytes")
}

/// A message that has come.
struct Message {
    from: Rank,
    word: Word,
    /// None: a word alone.
    elements: Option<Vec<f32>>,
}

/// What a rank has to send, and what has come.
pub(crate) struct Messages {
    outbox: Outbox,
    come: VecDeque<Message>,
    /// By peer: the newest version that was seen of what it publishes.
    versions: Vec<u64>,
    /// Writes and words that the policy has asked for, and those of which it was told.
    exchanged: [u64; 2],
    /// Peers that were not told yet that this rank is at rest.
    untold: VecDeque<Rank>,
    /// By rank: whether it is at rest, as far as this one knows.
    at_rest: Vec<bool>,
    /// Since when this rank waits without a message.
    waits_since: Option<Nanos>,
    /// Vectors of messages that were heard.
    spare: Vec<Vec<f32>>,
    /// The rows of a write.
    rows: Vec<f32>,
    /// By peer, of a table: its share, as it was read last.
    copies: Vec<PeerCopy>,
}

impl Messages {
    pub(crate) fn new(ranks: u32) -> Self {
        Self {
            outbox: Outbox::new(ranks as usize),
            come: VecDeque::new(),
            versions: vec![0; ranks as usize],
            exchanged: [0; 2],
            untold: VecDeque::new(),
            at_rest: vec![false; ranks as usize],
            waits_since: None,
            spare: Vec::new(),
            rows: Vec::new(),
            copies: (0..ranks).map(|_| PeerCopy::default()).collect(),
        }
    }

    /// Takes a request, to be carried out after those before.
    pub(crate) fn ask(&mut self, request: Request) {
        self.exchanged[0] += u64::from(!matches!(request, Request::Read { .. }));
        self.outbox.ask(request);
    }

    /// A peer that is not known to be at rest.
    fn restless(&self, own: Rank) -> Option<Rank> {
        (0..).zip(&self.at_rest).find(|(rank, at_rest)| *rank != own && !**at_rest).map(|(rank, _)| rank)
    }

    /// Whether all requests were carried out: a peer may wait for a word that waits for a credit.
    pub(crate) fn are_sent(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Takes what has come out of a window; waits for it at most that long, and until a rank
    /// leaves.
    fn receive(&mut self, window: &mut Window<f32>, limit: Duration) -> Result<usize, TrainError> {
        let words_slot = window.slots() - 1;
        let Self { come, spare, at_rest, .. } = self;
        let seen = |arrival: pleach_collectives::Arrival<'_, f32>| {
            if arrival.word == at_rest_word() {
                at_rest[arrival.from as usize] = true;
                return;
            }
            let elements = (arrival.slot != words_slot).then(|| {
                let mut elements: Vec<f32> = spare.pop().unwrap_or_default();
                elements.clear();
                elements.extend_from_slice(arrival.data());
                elements
            });
            come.push_back(Message { from: arrival.from, word: arrival.word, elements });
        };
        let count =
            if limit.is_zero() { window.poll(seen)? } else { window.wait_or_departure(limit, seen)? };
        if count > 0 {
            self.waits_since = None;
        }
        Ok(count)
    }
}

impl Trainer {
    /// Makes the window of the scheme's plan, with a slot more for words.
    pub(crate) fn open_window(&mut self) -> Result<(), TrainError> {
        if let Some(plan) = self.interpreter.window() {
            let (len, slots) = (plan.published(self.layout.parameters()), plan.slots + 1);
            self.vectors.window = Some(self.group.window(len, slots)?);
        }
        Ok(())
    }

    /// Ends the training on all ranks.
    pub fn abort(&mut self) {
        self.lines.abort();
        if let Some(window) = &self.vectors.window {
            window.abort();
        }
        self.group.abort();
    }

    /// Carries the next read, write or word out that has to wait for no credit.
    pub(crate) fn send_next(
        &mut self,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<bool, TrainError> {
        let Some(window) = &mut self.vectors.window else { return Ok(false) };
        let outbox = &mut self.messages.outbox;
        if outbox.is_empty() {
            return self.tell_rest();
        }
        let next = outbox.next(window.slots() - 1, |to, slot| window.is_free(to, slot))?;
        let Some((place, slot)) = next else { return Ok(false) };
        let done = match (slot, outbox.take(place)) {
            (None, Request::Write { id, to, .. }) => {
                self.messages.exchanged[0] -= 1;
                Some((id, Outcome::Refused { by: to }))
            }
            (slot, request) => {
                let before = clock::now();
                let done = self.carry_out(request, slot.unwrap_or_default());
                let time = clock::now().since(before);
                self.times.waiting += time;
                self.times.communicating += time;
                done?
            }
        };
        if let Some((id, outcome)) = done {
            self.deliver(Event::Done(id, outcome), optimizer)?;
        }
        Ok(true)
    }

    /// Tells the next peer that this rank is at rest, behind all messages to it.
    fn tell_rest(&mut self) -> Result<bool, TrainError> {
        let Some(window) = &mut self.vectors.window else { return Ok(false) };
        let words_slot = window.slots() - 1;
        match self.messages.untold.front() {
            Some(to) if window.is_free(*to, words_slot)? => {
                window.write(*to, words_slot, &[0.0_f32; 0], at_rest_word())?;
                self.messages.untold.pop_front();
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Comes to rest with all ranks: each has paused, nothing is under way, and each message was
    /// heard.
    pub(crate) fn come_to_rest(&mut self) -> Result<(), TrainError> {
        self.drive(Event::Pause, &mut |_, _| {})?;
        let Some(plan) = self.interpreter.window().copied() else { return Ok(()) };
        // A rank may take long until it pauses. Until then it may need answers of this one.
        self.messages.untold.extend(plan.peers());
        while self.messages.restless(plan.rank).is_some() || !self.messages.untold.is_empty() {
            if !self.send_next(&mut |_, _| {})? && !self.hear_next(&mut |_, _| {})? {
                self.await_message()?;
            }
        }
        // Now ranks send answers alone. All were heard if, twice one after the other, as many
        // messages were heard as were sent (Mattern 1987, the four counter method).
        let mut before = None;
        loop {
            let mut counts: Buffer<u64> = self.group.buffer(2)?;
            counts.copy_from_slice(&self.messages.exchanged);
            let pending = self.group.start(Operation::all_reduce(counts, ReduceOp::Sum));
            let mut pending = pending.map_err(|failed| failed.error)?;
            while !pending.wait_for(TURN) {
                self.hear_all(&mut |_, _| {})?;
                while self.send_next(&mut |_, _| {})? {}
            }
            let counts = pending.wait().map_err(|failed| failed.error)?;
            let counts = [counts[0], counts[1]];
            if counts[0] == counts[1] && before == Some(counts) {
                break;
            }
            before = Some(counts);
            self.hear_all(&mut |_, _| {})?;
            while self.send_next(&mut |_, _| {})? {}
        }
        self.messages.at_rest.fill(false);
        Ok(())
    }

    fn carry_out(
        &mut self,
        request: Request,
        slot: u16,
    ) -> Result<Option<(OperationId, Outcome)>, TrainError> {
        match request {
            Request::Read { id, from, into, piece, reads } => {
                let (version, word) = self.read(from, into, &piece, reads)?;
                Ok(Some((id, Outcome::Read { version, word })))
            }
            Request::Write { id, to, from, piece, word, waits: _ } => {
                self.note_exchange(2);
                let row = self.row();
                let window = self.vectors.window.take();
                let mut window = window.expect("a plan with writes has a window");
                let written = if piece.is_empty() {
                    window.write(to, slot, &[0.0_f32; 0], word.into())
                } else {
                    let [elements] = self.vectors.pieces([from], &piece);
                    let sent = encode(elements, row, &mut self.messages.rows);
                    self.times.bytes += size_of_val(sent) as u64;
                    window.write(to, slot, sent, word.into())
                };
                self.vectors.window = Some(window);
                written?;
                self.messages.outbox.wrote(to);
                Ok(Some((id, Outcome::Written)))
            }
            Request::Tell { to, word } => {
                let window = self.vectors.window.as_mut().expect("a plan with words has a window");
                window.write(to, slot, &[0.0_f32; 0], word.into())?;
                Ok(None)
            }
            _ => unreachable!("these go another way"),
        }
    }

    /// Elements of a row, of a table.
    fn row(&self) -> Option<usize> {
        self.interpreter.window().and_then(|plan| plan.row)
    }

    /// Reads the share of a peer.
    fn read(
        &mut self,
        from: Rank,
        into: Vector,
        piece: &Range<usize>,
        reads: Reads,
    ) -> Result<(u64, u64), TrainError> {
        if piece.is_empty() {
            let window = self.vectors.window.as_mut().expect("a plan with reads has a window");
            let (version, word) = window.read(from, 0..0, &mut [0.0_f32; 0])?;
            return Ok((version, word.number()));
        }
        let (row, len) = (self.row(), piece.len());
        let mut part = self.vectors.take(into, piece).expect("the ledger found it free");
        let window = self.vectors.window.as_mut().expect("a plan with reads has a window");
        let mut elements_read = len;
        let read = match (reads, row) {
            (Reads::Consistent, Some(row)) => {
                elements_read = 0;
                let copy = &mut self.messages.copies[from as usize];
                let renewed = copy.renew(len, row, |range, into| {
                    elements_read += range.len();
                    window.read(from, range, into)
                });
                if renewed.is_ok() {
                    part.copy_from_slice(copy.elements(len));
                }
                renewed
            }
            (Reads::Consistent, None) => window.read(from, 0..len, &mut part),
            (Reads::Torn, _) => {
                window.read_torn(from, 0..len, &mut part).map(|version| (version, Word::EMPTY))
            }
        };
        self.note_exchange(2);
        self.times.bytes += (size_of::<f32>() * elements_read) as u64;
        self.vectors.put(into, piece.start, part);
        let (version, word) = read?;
        Ok((version, word.number()))
    }

    /// Tells the policy of the next message that has come, if there is one.
    pub(crate) fn hear_next(
        &mut self,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<bool, TrainError> {
        let Some(Message { from, word, elements }) = self.messages.come.pop_front() else {
            return Ok(false);
        };
        self.messages.exchanged[1] += 1;
        let (sent, word) = (word, word.number());
        if sent != Word::from(word) {
            return Err(PolicyError::Word { from, word }.into());
        }
        let event = match elements {
            None => Event::Told { from, word },
            Some(elements) => {
                let row = self.row();
                self.vectors.store_arrival(&elements, row);
                self.messages.spare.push(elements);
                Event::Arrived { from, word }
            }
        };
        self.deliver(event, optimizer)?;
        Ok(true)
    }

    /// Tells the policy of all that has come.
    pub(crate) fn hear_all(
        &mut self,
        optimizer: &mut dyn FnMut(&mut [f32], &[f32]),
    ) -> Result<(), TrainError> {
        if let Some(window) = &mut self.vectors.window {
            self.messages.receive(window, Duration::ZERO)?;
        }
        while self.hear_next(optimizer)? {}
        Ok(())
    }

    /// Waits for a message, or for a credit.
    pub(crate) fn await_message(&mut self) -> Result<(), TrainError> {
        // Looked at before its last messages are taken: it sends nothing more.
        let has_left = self.owing().is_some_and(|(peer, _)| self.has_left(peer));
        let window = self.vectors.window.as_mut().expect("only a plan with a window waits for words");
        let deadline = window.timeout();
        let since = *self.messages.waits_since.get_or_insert_with(clock::now);
        let awaits_credit = !self.messages.outbox.is_empty() || !self.messages.untold.is_empty();
        let limit = if awaits_credit { TURN } else { deadline };
        let limit = if has_left { Duration::ZERO } else { limit };
        let before = clock::now();
        let count = self.messages.receive(window, limit)?;
        let now = clock::now();
        self.times.waiting += now.since(before);
        if count > 0 || (now.since(since) < deadline && !has_left) {
            return Ok(());
        }
        self.look_for_life(since, now)
    }

    fn has_left(&self, peer: Rank) -> bool {
        self.vectors.window.as_ref().is_some_and(|window| window.has_left(peer))
    }

    /// The peer for which this rank waits, and for what.
    fn owing(&self) -> Option<(Rank, &'static str)> {
        match self.messages.outbox.first() {
            Some(Request::Write { to, .. } | Request::Tell { to, .. }) => Some((*to, "a credit")),
            _ => {
                let awaited = self.interpreter.awaits();
                let awaited = awaited.or_else(|| self.messages.restless(self.group.rank()));
                awaited.map(|peer| (peer, "a word of its training"))
            }
        }
    }

    /// Starts the deadline again if a peer has published something, or ends the training.
    fn look_for_life(&mut self, since: Nanos, now: Nanos) -> Result<(), TrainError> {
        let window = self.vectors.window.as_mut().expect("only a plan with a window waits for words");
        let mut lives = false;
        for (peer, seen) in (0..).zip(&mut self.messages.versions) {
            let (version, _) = window.read(peer, 0..0, &mut [0.0_f32; 0])?;
            lives |= std::mem::replace(seen, version) != version;
        }
        if lives {
            self.messages.waits_since = None;
            return Ok(());
        }
        let (peer, needed) = self.owing().unwrap_or((self.group.rank(), "a word of its training"));
        let window = self.vectors.window.as_ref().expect("as above");
        Err(window.give_up(peer, needed, now.since(since)).into())
    }
}
