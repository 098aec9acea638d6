//! The status board: answers peers' queries and keeps their messages while the engine may be busy
//! elsewhere.
//!
//! Shared by the engine (which writes records of its runs and reads messages), the device's watcher
//! (which answers queries and stores messages) and any thread that aborts the group. The engine's
//! fast path costs one relaxed load ([`StatusBoard::has_unread`]) and, once a run, a few stores
//! into the records of its stream.
//!
//! **Invariants:** one thread at a time writes records (the one that holds the engine), without a
//! lock, and any thread may read them. A peer makes this rank keep a bounded number of messages.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::{LossCause, LossKind, PostError, Relay, Responder, Urgency};
use pleach_vocabulary::Rank;

use super::agreement::Agreement;
use super::deadlock::BlockedCall;
use super::epoch::EpochEnd;
use super::fault::{Fault, FaultKind};
use super::message::Message;
use super::overlay::Overlay;
use super::{EAGER_BANKS, Stream};
use crate::call::{Amount, DESCRIPTOR_WORDS, Descriptor, Paired};

/// Records of collectives that are kept.
const RECORDS: usize = 64;
/// Records of messages that are kept for each peer and direction: a sender cannot be so many ahead.
const MESSAGE_RECORDS: usize = 16;
const _: () = assert!(MESSAGE_RECORDS as u64 > EAGER_BANKS);

/// Most unread messages that are kept. Only a peer that sends without being asked causes more.
const UNREAD_MAX: usize = 16384;

/// Not a rank.
const NO_RANK: u64 = u64::MAX;

const RECORD_WORDS: usize = 3 + DESCRIPTOR_WORDS;

/// A call that a rank has entered. Queries compare records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    run: u64,
    /// The signature of the call itself.
    signature: u64,
    /// The signature of the call and all calls before it in its stream; signals carry it.
    history: u64,
    descriptor: [u64; DESCRIPTOR_WORDS],
}

impl Record {
    #[inline]
    pub(super) fn new(run: u64, signature: u64, history: u64, call: &Descriptor) -> Self {
        Self { run, signature, history, descriptor: call.to_words() }
    }

    /// That of no call.
    pub(super) fn nothing(run: u64) -> Self {
        Self { run, signature: 0, history: 0, descriptor: [0; DESCRIPTOR_WORDS] }
    }

    pub(super) fn run(&self) -> u64 {
        self.run
    }

    pub(super) fn is_same_call(&self, other: &Self) -> bool {
        self.signature == other.signature
    }

    pub(super) fn call(&self) -> Option<Descriptor> {
        Descriptor::from_words(self.descriptor)
    }

    #[inline]
    pub(super) fn words(&self) -> [u64; RECORD_WORDS] {
        let [first, second, third, fourth] = self.descriptor;
        [self.run, self.signature, self.history, first, second, third, fourth]
    }

    pub(super) fn of_words(words: [u64; RECORD_WORDS]) -> Self {
        let [run, signature, history, descriptor @ ..] = words;
        Self { run, signature, history, descriptor }
    }
}

/// How the call of a queried rank compares with the call of the rank that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Comparison {
    /// The queried rank is or was in the same call.
    Same = 0,
    /// The queried rank is or was in another call.
    Different = 1,
    /// The queried rank is or was in the same call, but an earlier call differed.
    EarlierDiffers = 2,
    /// The queried rank has not entered the run.
    NotYet = 3,
    /// The queried rank was in the run too long ago to know.
    Forgotten = 4,
}

impl Comparison {
    pub(super) fn from_word(word: u64) -> Option<Self> {
        let all = [Self::Same, Self::Different, Self::EarlierDiffers, Self::NotYet, Self::Forgotten];
        all.into_iter().find(|comparison| *comparison as u64 == word)
    }
}

/// A record that one thread writes and others read: a sequence lock on atomics.
struct RecordSlot {
    /// Odd during a write. The release store pairs with the acquire load in `read`.
    sequence: AtomicU64,
    words: [AtomicU64; RECORD_WORDS],
}

impl RecordSlot {
    const fn new() -> Self {
        Self { sequence: AtomicU64::new(0), words: [const { AtomicU64::new(0) }; RECORD_WORDS] }
    }

    fn write(&self, record: &Record) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        self.sequence.store(sequence + 1, Ordering::Relaxed);
        // Pairs with the acquire fence in `read`: a thread that reads a new word also sees the odd
        // sequence.
        fence(Ordering::Release);
        for (slot, word) in self.words.iter().zip(record.words()) {
            slot.store(word, Ordering::Relaxed);
        }
        self.sequence.store(sequence + 2, Ordering::Release);
    }

    fn read(&self) -> Option<Record> {
        let before = self.sequence.load(Ordering::Acquire);
        let words: [u64; RECORD_WORDS] = std::array::from_fn(|word| self.words[word].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        let unchanged =
            before != 0 && before.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == before;
        unchanged.then_some(Record::of_words(words))
    }
}

/// The last `LAST` runs of a stream that this rank has begun, and the number of completed runs.
pub(super) struct Records<const LAST: usize> {
    slots: [RecordSlot; LAST],
    /// The number of runs begun. The release store in `begin` pairs with the acquire loads of
    /// readers: the record is complete before its run counts.
    begun: AtomicU64,
    /// The number of runs completed without a gap. The release store in `complete` pairs with the
    /// acquire loads of readers.
    completed: AtomicU64,
}

impl<const LAST: usize> Records<LAST> {
    const fn new() -> Self {
        let slots = [const { RecordSlot::new() }; LAST];
        Self { slots, begun: AtomicU64::new(0), completed: AtomicU64::new(0) }
    }

    /// This rank has entered a run: the one after the last.
    pub(super) fn begin(&self, record: &Record) {
        self.slots[record.run as usize % LAST].write(record);
        self.begun.store(record.run + 1, Ordering::Release);
    }

    pub(super) fn complete(&self, completed: u64) {
        self.completed.store(completed, Ordering::Release);
    }

    pub(super) fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    fn completed(&self) -> u64 {
        self.completed.load(Ordering::Acquire)
    }

    /// The runs whose records may still be kept, oldest first.
    fn last(&self) -> std::ops::Range<u64> {
        let begun = self.begun();
        begun.saturating_sub(LAST as u64)..begun
    }

    fn record(&self, run: u64) -> Result<Record, Comparison> {
        if run >= self.begun() {
            return Err(Comparison::NotYet);
        }
        // An unreadable slot is one that is being overwritten: the run is long past.
        let record = self.slots[run as usize % LAST].read();
        record.filter(|record| record.run == run).ok_or(Comparison::Forgotten)
    }
}

/// The records of the messages from one rank to another.
pub(super) type MessageRecords = Records<MESSAGE_RECORDS>;

/// A rank's status and the messages of its peers; see the module.
pub struct StatusBoard {
    rank: Rank,
    /// Something is unread, or something has failed. Release stores pair with the engine's acquire
    /// swap.
    has_unread: AtomicBool,
    unread: Mutex<Vec<(Rank, Message)>>,
    /// Why the group has failed, once it has.
    agreement: Mutex<Agreement>,
    /// The records of the group's collectives.
    collectives: Records<RECORDS>,
    /// By sender and receiver; this rank is one of the two.
    messages: Mutex<BTreeMap<(Rank, Rank), Arc<MessageRecords>>>,
    /// The counts of the last runs whose part lengths only the two ends of a part know, by the
    /// number of the run.
    paired: Mutex<VecDeque<(u64, Arc<Paired>)>>,
    /// The rank that this rank waits for. Relaxed: only used in answers.
    blocked_on: AtomicU64,
    /// The call in which this rank waits, if it can make no other call before that call ends.
    blocked: Mutex<Option<BlockedCall>>,
    /// In a session: how the epoch ends.
    epoch_end: Option<Arc<EpochEnd>>,
    /// Where pairs connect on first use: this rank's place among the pairs that are connected.
    overlay: Option<Overlay>,
    connections: Mutex<Connections>,
    /// Has the engine polled, also while no caller does.
    alarm: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// What the board knows of pairs that connect on first use.
#[derive(Default)]
struct Connections {
    /// Peers that are or were connected.
    known: BTreeSet<Rank>,
    /// Peers that wait for a connection to this rank, and that the engine was not told of.
    wanted: BTreeSet<Rank>,
}

impl StatusBoard {
    /// The board of `rank`; to be given to its device as [`Responder`] and to its engine.
    #[must_use]
    pub fn new(rank: Rank) -> Self {
        Self {
            rank,
            has_unread: AtomicBool::new(false),
            unread: Mutex::default(),
            agreement: Mutex::new(Agreement::new(rank)),
            collectives: Records::new(),
            messages: Mutex::new(BTreeMap::new()),
            paired: Mutex::new(VecDeque::new()),
            blocked_on: AtomicU64::new(NO_RANK),
            blocked: Mutex::new(None),
            epoch_end: None,
            overlay: None,
            connections: Mutex::default(),
            alarm: OnceLock::new(),
        }
    }

    /// The same for a group whose pairs connect on first use, but for those of the overlay.
    pub(crate) fn on_use(rank: Rank, ranks: u32) -> Self {
        let overlay = Overlay::new(rank, ranks);
        let agreement = Mutex::new(Agreement::over(rank, overlay.clone()));
        Self { agreement, overlay: Some(overlay), ..Self::new(rank) }
    }

    /// Whether this rank passes messages on, because not all pairs are connected.
    pub(crate) fn relays(&self) -> bool {
        self.overlay.is_some()
    }

    pub(crate) fn overlay(&self) -> Option<&Overlay> {
        self.overlay.as_ref()
    }

    /// The pair with this peer is connected.
    pub(crate) fn note_connected(&self, peer: Rank) {
        if self.relays() {
            lock(&self.connections).known.insert(peer);
        }
    }

    /// Whether the neighbours of a peer say what has become of it: this rank was never connected to
    /// the peer, and finds that nobody listens there. The peer may have left, which is no loss.
    pub(crate) fn leaves_to_neighbours(&self, peer: Rank, cause: &LossCause) -> bool {
        let Some(overlay) = &self.overlay else { return false };
        let is_absence = matches!(cause.kind(), LossKind::ProcessEnded | LossKind::Closed | LossKind::Broken);
        let was_connected =
            overlay.neighbours().contains(&peer) || lock(&self.connections).known.contains(&peer);
        is_absence && !was_connected
    }

    /// Peers that wait for a connection to this rank, each once.
    pub(crate) fn take_wanted(&self) -> BTreeSet<Rank> {
        if self.relays() { std::mem::take(&mut lock(&self.connections).wanted) } else { BTreeSet::new() }
    }

    /// Has this called when a peer waits for a connection to this rank. The call has the engine
    /// polled, soon and by another thread.
    pub(crate) fn alarm_by(&self, alarm: impl Fn() + Send + Sync + 'static) {
        assert!(self.alarm.set(Box::new(alarm)).is_ok(), "a board has one alarm");
    }

    /// Tells the neighbours this rank's claim, where that has changed.
    fn flood(&self, relay: &mut Relay<'_>) {
        let Some(overlay) = &self.overlay else { return };
        // Each round tells a claim that is greater, and claims end to grow.
        loop {
            let Some(claim) = self.agreement().untold() else { return };
            let message = Message::Claim { claim: claim.clone(), asks: false }.encode();
            for peer in overlay.neighbours() {
                // A peer that is gone need not know; one that is not connected yet is told then.
                let _ = relay(*peer, &message, Urgency::Urgent);
            }
            self.agreement().has_told(&claim);
        }
    }

    /// Passes a message on, or handles it when this rank is its target.
    fn pass_on(&self, (from, to): (Rank, Rank), message: &[u8], relay: &mut Relay<'_>) {
        let Some(overlay) = self.overlay.as_ref().filter(|overlay| from.max(to) < overlay.ranks()) else {
            return;
        };
        if to == self.rank {
            if let Some(answer) = self.answer_routed(from, message) {
                // Whoever asked asks again.
                let _ = overlay.route((to, from), &answer, relay);
            }
            return;
        }
        let is_gone = |peer: Rank| lock(&self.connections).known.contains(&peer);
        if let Err(PostError::NotConnected { peer }) = overlay.route((from, to), message, relay)
            && peer == to
            && is_gone(to)
        {
            let _ = overlay.route((self.rank, from), &Message::Away { rank: to }.encode(), relay);
        }
    }

    fn answer_routed(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        let message = Message::decode(message)?;
        match message {
            Message::Query { .. } | Message::Probe { .. } if self.has_failed() => None,
            Message::Query { .. } => {
                // The peer waits for this rank, so it waits for a connection too.
                let mut connections = lock(&self.connections);
                let is_connected = connections.known.contains(&from);
                if !is_connected {
                    connections.wanted.insert(from);
                }
                drop(connections);
                if !is_connected {
                    self.set_unread();
                    // Whenever the peer asks: at the first time there may have been no alarm yet.
                    self.alarm.get().into_iter().for_each(|alarm| alarm());
                }
                self.handle(from, message)
            }
            Message::Probe { .. }
            | Message::Answer { .. }
            | Message::ProbeAnswer { .. }
            | Message::Away { .. } => self.handle(from, message),
            Message::Scratch(_) | Message::Claim { .. } | Message::Routed { .. } => None,
        }
    }

    /// The board of a rank in an epoch of a session.
    pub(crate) fn of_epoch(rank: Rank, end: Arc<EpochEnd>) -> Self {
        Self { epoch_end: Some(end), ..Self::new(rank) }
    }

    /// In a session: how the epoch ends.
    pub(crate) fn epoch_end(&self) -> Option<&EpochEnd> {
        self.epoch_end.as_deref()
    }

    /// Makes the engine look.
    pub(crate) fn set_unread(&self) {
        self.has_unread.store(true, Ordering::Release);
    }

    /// Whether these bytes decode as a message.
    #[must_use]
    pub fn understands(message: &[u8]) -> bool {
        Message::decode(message).is_some()
    }

    /// Ends the group's work here at once, and on all ranks when the engine polls or a peer asks.
    /// The caller wakes the device.
    pub fn abort(&self) {
        self.propose(self.fault(FaultKind::Aborted, self.rank, String::new()));
    }

    /// A fault as this rank finds it while its engine may be busy elsewhere.
    pub(crate) fn fault(&self, kind: FaultKind, subject: Rank, detail: String) -> Fault {
        let (run, during) = self.position();
        let (found_by, waited) = (self.rank, Duration::ZERO);
        Fault {
            kind,
            found_by,
            subject,
            loss: None,
            run,
            during,
            theirs: None,
            detail,
            waited,
            told_during: None,
        }
    }

    /// The number and the call of the oldest run under way; without one the number of the next
    /// collective.
    fn position(&self) -> (u64, Option<Descriptor>) {
        let called = |record: Result<Record, Comparison>| record.ok().and_then(|record| record.call());
        // Read in this order, so that a completed run has also begun.
        let completed = self.collectives.completed();
        if completed < self.collectives.begun() {
            return (completed, called(self.collectives.record(completed)));
        }
        let messages = lock(&self.messages);
        let unfinished = messages.values().find_map(|messages| {
            let run = messages.completed();
            (run < messages.begun()).then(|| (run, called(messages.record(run))))
        });
        unfinished.unwrap_or((completed, None))
    }

    /// This rank has found a fault; it counts if nothing has failed before.
    pub(super) fn propose(&self, fault: Fault) {
        if let Some(end) = &self.epoch_end {
            end.found(&fault);
        }
        self.agreement().propose(fault);
        self.has_unread.store(true, Ordering::Release);
    }

    /// This rank's side of the agreement on why the group has failed.
    pub(super) fn agreement(&self) -> MutexGuard<'_, Agreement> {
        lock(&self.agreement)
    }

    /// Whether anything has failed, here or at a peer that has said so.
    pub(crate) fn has_failed(&self) -> bool {
        let is_over = self.epoch_end().is_some_and(|end| end.over().is_some());
        is_over || self.agreement().claim().is_some()
    }

    /// The answer of this rank once its group has failed.
    fn claimed(&self) -> Option<Vec<u8>> {
        let claim = self.agreement().claim()?.clone();
        Some(Message::Claim { claim, asks: false }.encode())
    }

    /// Whether there is something to read: the fast path's poll.
    #[inline]
    pub(super) fn has_unread(&self) -> bool {
        self.has_unread.load(Ordering::Relaxed)
    }

    /// The messages of peers since the last time, oldest first.
    pub(super) fn take_unread(&self) -> Vec<(Rank, Message)> {
        self.has_unread.swap(false, Ordering::Acquire);
        std::mem::take(&mut *lock(&self.unread))
    }

    /// Keeps a message for the engine. A peer says only once where its scratch is.
    fn keep(&self, from: Rank, message: Message) {
        let mut unread = lock(&self.unread);
        if unread.len() < UNREAD_MAX || matches!(message, Message::Scratch(_)) {
            unread.push((from, message));
        }
        self.has_unread.store(true, Ordering::Release);
    }

    /// The engine is about to enter a run with paired counts.
    pub(super) fn begin_paired(&self, run: u64, counts: Arc<Paired>) {
        let mut paired = lock(&self.paired);
        if paired.len() == RECORDS {
            paired.pop_front();
        }
        paired.push_back((run, counts));
    }

    /// The records of collectives, to be written by the engine.
    pub(super) fn collectives(&self) -> &Records<RECORDS> {
        &self.collectives
    }

    /// The records of the messages from one rank to another, to be written by the engine.
    pub(super) fn messages(&self, from: Rank, to: Rank) -> Arc<MessageRecords> {
        lock(&self.messages).entry((from, to)).or_insert_with(|| Arc::new(Records::new())).clone()
    }

    /// The messages that this rank has begun to send to a peer, and those of the peer that it has
    /// received.
    pub(crate) fn messages_with(&self, peer: Rank) -> (u64, u64) {
        let messages = lock(&self.messages);
        let (sent, received) = (messages.get(&(self.rank, peer)), messages.get(&(peer, self.rank)));
        (sent.map_or(0, |sent| sent.begun()), received.map_or(0, |received| received.completed()))
    }

    /// Sets the rank that this rank waits for, as far as it knows.
    pub(super) fn block_on(&self, peer: Option<Rank>) {
        self.blocked_on.store(peer.map_or(NO_RANK, u64::from), Ordering::Relaxed);
    }

    /// Sets the call in which this rank is blocked. The engine clears it before it can make another
    /// call.
    pub(super) fn block_in(&self, blocked: Option<BlockedCall>) {
        *lock(&self.blocked) = blocked;
    }

    /// The rank that this rank waits for, once the wait has taken a millisecond.
    pub(crate) fn waits_for(&self) -> Option<Rank> {
        Rank::try_from(self.blocked_on.load(Ordering::Relaxed)).ok()
    }

    /// Collectives that this rank has begun and not completed.
    pub(crate) fn under_way(&self) -> u64 {
        // Read in this order, so that the difference is never below zero.
        let completed = self.collectives.completed();
        self.collectives.begun().saturating_sub(completed)
    }

    /// Collectives that this rank has completed, each with its result.
    pub(crate) fn completed_collectives(&self) -> u64 {
        self.collectives.completed()
    }

    /// The collectives begun last, oldest first.
    pub(crate) fn last_calls(&self) -> Vec<(u64, Descriptor)> {
        let described = |run| Some((run, self.collectives.record(run).ok()?.call()?));
        self.collectives.last().filter_map(described).collect()
    }

    /// Whether this rank has entered the run.
    pub(super) fn has_entered(&self, stream: Stream, run: u64) -> bool {
        self.record(stream, run) != Err(Comparison::NotYet)
    }

    /// The blocked call is read first. If this rank was blocked then, and had not entered the run
    /// afterwards, it could enter the run at no time between.
    fn probe_answer(&self, probe: u64, stream: Stream, run: u64) -> Message {
        let blocked = *lock(&self.blocked);
        Message::ProbeAnswer { probe, stream, run, has_entered: self.has_entered(stream, run), blocked }
    }

    fn record(&self, stream: Stream, run: u64) -> Result<Record, Comparison> {
        match stream {
            Stream::Collectives => self.collectives.record(run),
            Stream::Messages { from, to } => match self.known_messages(from, to) {
                Some(messages) => messages.record(run),
                None => Err(Comparison::NotYet),
            },
        }
    }

    fn completed(&self, stream: Stream) -> u64 {
        match stream {
            Stream::Collectives => self.collectives.completed(),
            Stream::Messages { from, to } => {
                self.known_messages(from, to).map_or(0, |messages| messages.completed())
            }
        }
    }

    /// The records of messages that exist. A query never makes this rank keep new records.
    fn known_messages(&self, from: Rank, to: Rank) -> Option<Arc<MessageRecords>> {
        lock(&self.messages).get(&(from, to)).cloned()
    }

    /// The record as this rank and a peer compare it. If only the two know the lengths of the parts
    /// between them, the record includes these lengths.
    pub(super) fn record_for(&self, peer: Rank, stream: Stream, run: u64) -> Result<Record, Comparison> {
        let record = self.record(stream, run)?;
        let Some(descriptor) = record.call().filter(|record| record.amount == Amount::Paired) else {
            return Ok(record);
        };
        let paired = lock(&self.paired);
        let counts = paired.iter().rev().find(|(number, _)| *number == run).ok_or(Comparison::Forgotten)?;
        let Some(between) = counts.1.between(self.rank, peer) else { return Ok(record) };
        Ok(Record {
            run,
            signature: between.mark(record.signature),
            history: between.mark(record.history),
            descriptor: Descriptor { amount: between.amount(), ..descriptor }.to_words(),
        })
    }

    fn answer(&self, from: Rank, stream: Stream, asked: &Record) -> Message {
        let completed = self.completed(stream);
        let (comparison, record) = match self.record_for(from, stream, asked.run) {
            Ok(own) if !own.is_same_call(asked) => {
                self.keep(from, Message::Query { stream, record: *asked });
                (Comparison::Different, own)
            }
            Ok(own) if own.history != asked.history => (Comparison::EarlierDiffers, own),
            Ok(own) => (Comparison::Same, own),
            Err(comparison) => (comparison, *asked),
        };
        let blocked_on = Rank::try_from(self.blocked_on.load(Ordering::Relaxed)).ok();
        Message::Answer { stream, comparison, record, completed, blocked_on }
    }
}

impl StatusBoard {
    fn handle(&self, from: Rank, message: Message) -> Option<Vec<u8>> {
        match message {
            // The peer may not know of a failure: this rank may be in no call, and then it tells
            // nobody by itself.
            Message::Query { stream, record } => {
                self.claimed().or_else(|| Some(self.answer(from, stream, &record).encode()))
            }
            Message::Probe { probe, stream, run } => Some(self.probe_answer(probe, stream, run).encode()),
            Message::Claim { claim, asks } => {
                self.agreement().hear(from, claim);
                self.has_unread.store(true, Ordering::Release);
                self.claimed().filter(|_| asks)
            }
            message @ (Message::ProbeAnswer { .. }
            | Message::Scratch(_)
            | Message::Answer { .. }
            | Message::Away { .. }) => {
                self.keep(from, message);
                None
            }
            // It needs a way to other ranks.
            Message::Routed { .. } => None,
        }
    }
}

impl Responder for StatusBoard {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.handle(from, Message::decode(message)?)
    }

    fn message_relaying(&self, from: Rank, message: &[u8], relay: &mut Relay<'_>) -> Option<Vec<u8>> {
        let answer = match Message::decode(message)? {
            Message::Routed { from, to, message } => {
                self.pass_on((from, to), &message, relay);
                None
            }
            message => self.handle(from, message),
        };
        self.flood(relay);
        answer
    }

    fn lost_relaying(&self, peer: Rank, cause: &LossCause, relay: &mut Relay<'_>) {
        self.lost(peer, cause);
        self.flood(relay);
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        if self.leaves_to_neighbours(peer, cause) {
            return;
        }
        self.agreement().lose(peer);
        let fault = self.fault(FaultKind::Lost, peer, cause.to_string());
        self.propose(Fault { loss: Some(cause.kind()), ..fault });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_runs_are_known_earlier_ones_forgotten_and_later_ones_not_begun() {
        let records = Records::<4>::new();
        assert_eq!(records.record(0), Err(Comparison::NotYet));
        for run in 0..6 {
            let descriptor = [7; DESCRIPTOR_WORDS];
            records.begin(&Record { run, signature: run + 100, history: 0, descriptor });
            assert_eq!(records.record(run).expect("just begun").signature, run + 100);
        }
        assert_eq!((records.begun(), records.last()), (6, 2..6));
        assert_eq!(records.record(1), Err(Comparison::Forgotten));
        assert_eq!(records.record(2).expect("one of the last four").signature, 102);
        assert_eq!(records.record(6), Err(Comparison::NotYet));
    }

    #[test]
    fn a_peer_that_waits_for_a_connection_rings_whenever_it_asks_until_it_is_connected() {
        let board = StatusBoard::on_use(0, 20);
        let query = Message::Query { stream: Stream::Collectives, record: Record::nothing(0) }.encode();
        let routed = Message::Routed { from: 3, to: 0, message: query }.encode();
        let ask = || board.message_relaying(1, &routed, &mut |_, _, _| Ok(()));
        // Before there is an alarm.
        assert_eq!(ask(), None);
        let rung = Arc::new(AtomicU64::new(0));
        let alarm = rung.clone();
        board.alarm_by(move || {
            alarm.fetch_add(1, Ordering::Relaxed);
        });
        for times in 1..3 {
            ask();
            assert_eq!(rung.load(Ordering::Relaxed), times);
        }
        assert!(board.has_unread());
        assert_eq!(board.take_wanted(), BTreeSet::from([3]));
        board.note_connected(3);
        ask();
        assert_eq!((rung.load(Ordering::Relaxed), board.take_wanted().len()), (2, 0));
    }

    #[test]
    fn nobody_at_the_address_of_a_rank_that_was_never_connected_is_no_loss() {
        let absent = LossCause::ConnectionBroke(std::io::ErrorKind::ConnectionRefused);
        let fails = |peer: Rank, was_connected: bool, cause: &LossCause| {
            let board = StatusBoard::on_use(0, 20);
            if was_connected {
                board.note_connected(peer);
            }
            board.lost(peer, cause);
            board.has_failed()
        };
        assert!(!fails(3, false, &absent), "its neighbours say whether it has left");
        assert!(fails(3, true, &absent));
        assert!(fails(4, false, &absent), "a neighbour is connected from the beginning");
        let files = LossCause::Files { most: 16 };
        assert!(fails(3, false, &files), "this rank cannot connect");
    }
}
