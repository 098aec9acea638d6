//! What must hold, from outside: it knows what was sent and what was read, and nothing of the code.
//!
//! Each element of a tensor says which tensor it is of, and its place in it. So a read finds out
//! whether the tensor is torn, is another one, or was overwritten.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};
use std::time::Duration;

use pleach_transport::Nanos;

use super::Asked;
use crate::calls::CallError;
use crate::endpoint::error::{ReceiveTensorError, SendTensorError};
use crate::message::FailureKind;
use crate::reference::LeaseNumber;

/// A tensor, by its place among all that were sent.
pub(crate) type TensorNumber = usize;

/// Longer than all that makes an answer late without a fault.
const LATE: Duration = Duration::from_millis(300);

/// In the place of a key: a field of a message, of which a receiver may see nothing.
#[cfg(feature = "grpc")]
pub(crate) const FIELD: usize = usize::MAX;

/// What does not hold.
#[derive(Debug)]
#[expect(dead_code, reason = "it is shown")]
pub(crate) enum Flaw {
    /// Elements are not those of the tensor.
    Torn,
    /// A tensor of another key or program.
    Other,
    /// A tensor that was sent before the end of its step, or by a program that the call did not
    /// name.
    Stale,
    /// A receive took the second of these tensors of a key and left the first for a later one.
    Disorder(TensorNumber, TensorNumber),
    /// A tensor has two receivers, or one and is back with its sender.
    Twice,
    /// Memory that is read was given to another tensor.
    Reused,
    /// A reference that is no good was accepted.
    Accepted(LeaseNumber),
    /// A reference that was refused has changed something.
    Changed,
    /// It waits beyond its deadline, or its link.
    Late(&'static str),
    /// It failed, and nothing had happened for which it might.
    Unexpected(String),
    /// Nobody has it.
    Lost(TensorNumber),
    /// Something is kept that nobody uses.
    Left(String),
}

#[derive(Debug)]
struct Sent {
    at: Nanos,
    program: usize,
    key: usize,
    /// Where it lies in its program's arena.
    range: Range<u64>,
    /// Its step has ended since.
    ended: Option<Nanos>,
    has_failed: bool,
    is_received: bool,
    /// The receive that took it.
    turn: Option<Turn>,
    /// Programs that read it where it lies.
    readers: Vec<usize>,
}

/// When a receive came to the table of the sender.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// Not before this.
    since: Nanos,
    /// Not after this.
    until: Nanos,
    /// In the order of calls by this connection.
    wire: Option<usize>,
}

impl Turn {
    /// That of a call by this connection, which was asked and has ended at these times.
    pub(crate) fn of_call(times: RangeInclusive<Nanos>, wire: usize) -> Self {
        Self { since: *times.start(), until: *times.end(), wire: Some(wire) }
    }

    /// That of a receive in the sender's own program.
    pub(crate) fn at(now: Nanos) -> Self {
        Self { since: now, until: now, wire: None }
    }

    /// Whether it certainly came before another one.
    fn is_before(&self, other: &Self) -> bool {
        let is_same_wire = self.wire.is_some() && self.wire == other.wire;
        self.until < other.since || (is_same_wire && self.since < other.since)
    }
}

/// A call that had no tensor.
#[derive(Clone, Copy, Debug)]
struct Unanswered {
    receiver: usize,
    since: Nanos,
    program: usize,
    key: usize,
    wire: usize,
    is_mapped: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Oracle {
    sent: Vec<Sent>,
    is_alive: Vec<bool>,
    unanswered: Vec<Unanswered>,
    in_place: usize,
    copied: usize,
    timeouts: usize,
    lost_calls: usize,
}

/// Element `at` of a tensor.
fn element(tensor: TensorNumber, at: usize) -> u64 {
    (tensor as u64 + 1) << 20 | at as u64
}

/// Writes the elements of a tensor.
pub(crate) fn fill(tensor: TensorNumber, bytes: &mut [u8]) {
    for (at, word) in bytes.as_chunks_mut().0.iter_mut().enumerate() {
        *word = element(tensor, at).to_le_bytes();
    }
}

/// Whether these are the elements of a tensor.
pub(crate) fn check(tensor: TensorNumber, bytes: &[u8]) -> Result<(), Flaw> {
    let (words, rest) = bytes.as_chunks();
    let mut words = words.iter().enumerate();
    let is_right =
        rest.is_empty() && words.all(|(at, word)| u64::from_le_bytes(*word) == element(tensor, at));
    if is_right { Ok(()) } else { Err(Flaw::Torn) }
}

impl Oracle {
    pub(crate) fn started(&mut self, program: usize) {
        assert_eq!(self.is_alive.len(), program, "programs start in their order");
        self.is_alive.push(true);
    }

    pub(crate) fn killed(&mut self, program: usize) {
        self.is_alive[program] = false;
        self.sent.iter_mut().for_each(|sent| sent.readers.retain(|reader| *reader != program));
    }

    /// A program is about to send a tensor for which it was given this memory.
    pub(crate) fn sent(&mut self, at: Nanos, program: usize, key: usize, range: Range<u64>) -> TensorNumber {
        self.sent.push(Sent {
            at,
            program,
            key,
            range,
            ended: None,
            has_failed: false,
            is_received: false,
            turn: None,
            readers: Vec::new(),
        });
        self.sent.len() - 1
    }

    /// No tensor that is read lies in this memory of a program.
    pub(crate) fn allocated(&self, program: usize, range: &Range<u64>) -> Result<(), Flaw> {
        let overlaps = |sent: &Sent| {
            let Range { start, end } = sent.range;
            sent.program == program && !sent.readers.is_empty() && start < range.end && range.start < end
        };
        if self.sent.iter().any(overlaps) { Err(Flaw::Reused) } else { Ok(()) }
    }

    pub(crate) fn send_ended(
        &mut self,
        tensor: TensorNumber,
        result: Result<(), SendTensorError>,
        now: Nanos,
        deadline: Nanos,
    ) -> Result<(), Flaw> {
        let sent = &mut self.sent[tensor];
        let Err(error) = result else { return Ok(()) };
        sent.has_failed = true;
        if sent.is_received {
            return Err(Flaw::Twice);
        }
        match error.kind() {
            FailureKind::Timeout if now >= deadline => Ok(()),
            FailureKind::Exhausted => Ok(()),
            // Later requests of a step that was aborted fail too.
            FailureKind::Aborted => Ok(()),
            _ => Err(Flaw::Unexpected(error.to_string())),
        }
    }

    /// A program has received these bytes for a key of another one.
    pub(crate) fn received(
        &mut self,
        receiver: usize,
        (program, key): (usize, usize),
        turn: Turn,
        bytes: &[u8],
    ) -> Result<TensorNumber, Flaw> {
        let first = bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let number = ((first >> 20) as usize).checked_sub(1).filter(|number| *number < self.sent.len());
        let number = number.ok_or(Flaw::Torn)?;
        check(number, bytes)?;
        let sent = &mut self.sent[number];
        if (sent.program, sent.key) != (program, key) {
            return Err(Flaw::Other);
        }
        if sent.ended.is_some_and(|ended| ended < turn.since) {
            return Err(Flaw::Stale);
        }
        if std::mem::replace(&mut sent.is_received, true) || sent.has_failed {
            return Err(Flaw::Twice);
        }
        sent.turn = Some(turn);
        debug_assert!(self.is_alive[receiver], "who has ended receives nothing");
        Ok(number)
    }

    pub(crate) fn begin_reading(&mut self, tensor: TensorNumber, reader: usize) {
        self.in_place += 1;
        self.sent[tensor].readers.push(reader);
    }

    pub(crate) fn end_reading(&mut self, tensor: TensorNumber, reader: usize) {
        self.sent[tensor].readers.retain(|other| *other != reader);
    }

    /// A tensor came by a get.
    pub(crate) fn was_copied(&mut self) {
        self.copied += 1;
    }

    /// A step of a program has ended: what was sent in it is for nobody who asks later.
    pub(crate) fn step_ended(&mut self, program: usize, step: u64, now: Nanos) {
        for sent in &mut self.sent {
            if sent.program == program && sent.key < super::KEYS && sent.key as u64 % 2 == step {
                sent.ended.get_or_insert(now);
            }
        }
    }

    pub(crate) fn call_failed(
        &mut self,
        error: &ReceiveTensorError,
        now: Nanos,
        asked: &Asked,
        wire_has_ended: bool,
        is_harmless: bool,
    ) -> Result<(), Flaw> {
        let is_expected = match error {
            ReceiveTensorError::Call(CallError::Lost { .. }) => {
                self.lost_calls += 1;
                wire_has_ended
            }
            error => match error.kind() {
                FailureKind::Timeout => {
                    self.timeouts += 1;
                    now >= asked.deadline && !(is_harmless && self.was_there(asked))
                }
                // Limits are small, and steps end.
                FailureKind::Exhausted | FailureKind::Aborted => true,
                FailureKind::NotFound | FailureKind::Unavailable => false,
            },
        };
        if is_expected { Ok(()) } else { Err(Flaw::Unexpected(error.to_string())) }
    }

    /// Whether a tensor was there for a call, longer than anything takes that is late: then
    /// somebody was not woken.
    fn was_there(&self, asked: &Asked) -> bool {
        let is_for_it = |sent: &Sent| {
            let is_free = !(sent.is_received || sent.has_failed || sent.ended.is_some());
            is_free
                && (sent.program, sent.key) == (asked.program, asked.key)
                && sent.at.max(asked.since) + LATE < asked.deadline
        };
        self.sent.iter().any(is_for_it)
    }

    /// A call that has ended without a tensor.
    pub(crate) fn unanswered(&mut self, receiver: usize, asked: &Asked) {
        let Asked { program, key, since, wire, is_mapped, .. } = *asked;
        self.unanswered.push(Unanswered { receiver, since, program, key, wire, is_mapped });
    }

    /// Each tensor that was sent to the end of its step has a receiver, or is back, or was on its
    /// way to a receiver of which nobody knows whether it has read it: one that was killed, or one
    /// that got it, or its bytes, over a link that has ended.
    pub(crate) fn finish(&self, is_harmless: bool, ended_early: impl Fn(usize) -> bool) -> Result<(), Flaw> {
        let mut doubtful: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for call in &self.unanswered {
            let Unanswered { receiver, program, key, wire, is_mapped, .. } = *call;
            let is_doubtful = !self.is_alive[receiver] || (!is_mapped && ended_early(wire));
            if is_doubtful && !is_harmless {
                *doubtful.entry((program, key)).or_default() += 1;
            }
        }
        for (number, sent) in self.sent.iter().enumerate() {
            let is_known = sent.is_received || sent.has_failed || sent.ended.is_some();
            #[cfg(feature = "grpc")]
            let is_known = is_known || sent.key == FIELD;
            if is_known || !self.is_alive[sent.program] {
                continue;
            }
            match doubtful.get_mut(&(sent.program, sent.key)) {
                Some(calls) if *calls > 0 => *calls -= 1,
                _ => return Err(Flaw::Lost(number)),
            }
        }
        self.check_order()
    }

    /// Receives of a key take its tensors in the order in which these were sent. A tensor may have
    /// been away when a receive came that took a later one: at a call that had no tensor in the
    /// end.
    fn check_order(&self) -> Result<(), Flaw> {
        for (second, later) in self.sent.iter().enumerate() {
            let Some(taken) = later.turn else { continue };
            let is_of_key = |program, key| (program, key) == (later.program, later.key);
            let mut calls = self.unanswered.iter().filter(|call| is_of_key(call.program, call.key));
            #[cfg(feature = "grpc")]
            let is_field = later.key == FIELD;
            #[cfg(not(feature = "grpc"))]
            let is_field = false;
            if is_field || calls.any(|call| call.since <= taken.until) {
                continue;
            }
            for (first, earlier) in self.sent[..second].iter().enumerate() {
                let is_late = earlier.turn.is_some_and(|turn| taken.is_before(&turn));
                if is_late && is_of_key(earlier.program, earlier.key) {
                    return Err(Flaw::Disorder(first, second));
                }
            }
        }
        Ok(())
    }

    /// What was seen in another run is seen too.
    pub(crate) fn add(&mut self, other: &Self) {
        self.in_place += other.in_place;
        self.copied += other.copied;
        self.timeouts += other.timeouts;
        self.lost_calls += other.lost_calls;
    }

    pub(crate) fn read_in_place(&self) -> usize {
        self.in_place
    }

    pub(crate) fn copied(&self) -> usize {
        self.copied
    }

    pub(crate) fn timeouts(&self) -> usize {
        self.timeouts
    }

    pub(crate) fn lost_calls(&self) -> usize {
        self.lost_calls
    }
}
