//! Signals of peers: what a signal carries, which signals were consumed, and how far peers are.
//!
//! The payload of a signal, in words:
//!
//! | word | |
//! | --- | --- |
//! | 0 | run (48 bits), number of earlier runs that the sender has not completed (8 bits, saturating: no more than |
//! | | [`super::RUNS_MAX`] are under way), and how long the sender has been in the call (8 bits, [`scale`](crate::observe::scale)) |
//! | 1 | signature of the run and of all runs before it. In a round its halves tell more (see [`InRound`]) |
//! | 2, 3 | key and offset of the sender's input, zero: in scratch. Or the first half of the data. The highest bit of |
//! | | the offset: the input is absent |
//! | 4, 5 | key and offset of the sender's output, zero: in scratch. Or the second half of the data |
//!
//! A *credit* is the number of runs that a peer has completed. The group's collectives, which all
//! ranks make, are counted apart from the messages that this rank sends to each peer. Credits come
//! with the headers of signals, in a signal slot of their own, and with answers to queries.
//!
//! In a round of a partial all-reduce, the upper half of the signature is inverted if the signal is
//! in place of a put of neutral elements, whose bytes are not moved. The lower half is combined by
//! exclusive or with the *contributors* that the sender knows of, a bit for each rank.
//!
//! A *round word* is a number about the rounds of a partial all-reduce ([`crate::partial`]), in a
//! signal slot of its own. A rank says larger numbers later.
//!
//! **Invariants:** a signal is consumed once. A credit is never more than the peer has completed,
//! without a gap.

use pleach_transport::{
    Device, Inline, RegionKey, RemoteSlice, SIGNAL_SLOT_PAYLOAD_BYTES, Signal, Signals, SubmitError,
};
use pleach_vocabulary::Rank;

use super::address::DataWords;
use super::{Engine, NO_TRANSFER, Stream};
use crate::observe::scale::{step_above, step_ns};

/// Schedules are priced by the bytes that a signal slot carries.
const _: () = assert!(SIGNAL_SLOT_PAYLOAD_BYTES == pleach_schedule::cost::INLINE_BYTES_MAX);

/// Bytes of data that fit beside the header, where the schedule exposes no slices.
pub(super) const INLINE_DATA_BYTES: usize = SIGNAL_SLOT_PAYLOAD_BYTES - HEADER_BYTES;

const HEADER_BYTES: usize = 16;
const RUN_BITS: u32 = 48;
const INCOMPLETE_BITS: u32 = 8;
/// With this number of incomplete runs or more, the header does not tell the sender's progress.
const INCOMPLETE_MAX: u64 = (1 << INCOMPLETE_BITS) - 1;

/// The signal slots in which peers tell their credits when no other signal does.
const COLLECTIVES_SIGNAL_SLOT: u16 = 0;
const MESSAGES_SIGNAL_SLOT: u16 = 1;
/// The signal slots of [`RoundWord`].
const READY_SIGNAL_SLOT: u16 = 2;
const OPEN_SIGNAL_SLOT: u16 = 3;
const _: () = assert!((OPEN_SIGNAL_SLOT as u32) < super::FIRST_SIGNAL_SLOT);

/// How often a signal slot is polled at a time: some hundred nanoseconds.
const POLLS: u32 = 128;

/// Is told of everything that a rank acts on; for checkers.
pub trait Witness: Send {
    /// The rank goes on because the signal slot that it keeps for `from` counts `count`.
    fn consumed(&mut self, from: Rank, signal_slot: u16, count: u64);

    /// Records how many runs of a sequence this rank has completed (the group's collectives, the
    /// messages from one rank to another), without a gap. Peers may be told from now on.
    fn completed(&mut self, sequence: u64, runs: u64);

    /// The rank has written to a peer's memory through a mapping, other than by its processor
    /// ([`Compute`](crate::compute::Compute)).
    fn wrote(&mut self, address: *const u8, len: usize);

    /// The rank knows, otherwise than by a signal that it waited for, that `from` has completed so
    /// many runs of a sequence.
    fn heard_completed(&mut self, from: Rank, sequence: u64, runs: u64);

    /// Appends the signal slots that were signalled since the last call, each with the peer that it
    /// is kept for. Returns whether all are named: then lanes that wait for other signal slots need
    /// not be looked at.
    fn take_signalled(&mut self, signal_slots: &mut Vec<(Rank, u16)>) -> bool;
}

/// What a word about rounds is about; see [`crate::partial`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoundWord {
    /// What a rank gives to the next round.
    Ready,
    /// How many rounds are open.
    Open,
}

impl RoundWord {
    fn signal_slot(self) -> u16 {
        match self {
            Self::Ready => READY_SIGNAL_SLOT,
            Self::Open => OPEN_SIGNAL_SLOT,
        }
    }
}

/// In the offset of an input that is absent. No region has so many bytes.
const ABSENT: u64 = 1 << 63;

/// Where a rank's buffer is: part of a registered region, or in the rank's scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BufferAddress {
    key: RegionKey,
    offset: u64,
}

impl BufferAddress {
    /// In scratch.
    pub(super) const IN_SCRATCH: Self = Self { key: RegionKey::NONE, offset: 0 };

    /// Where a registered buffer begins.
    pub(super) fn of(buffer: RemoteSlice) -> Self {
        Self { key: buffer.key, offset: buffer.offset }
    }

    /// `bytes` further on.
    pub(super) fn further(self, bytes: u64) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }

    /// The same buffer, an input that is absent.
    pub(crate) fn absent(self) -> Self {
        Self { offset: self.offset | ABSENT, ..self }
    }

    /// The buffer, and whether it is an input that is absent.
    pub(crate) fn without_absence(self) -> (Self, bool) {
        (Self { offset: self.offset & !ABSENT, ..self }, self.offset & ABSENT != 0)
    }

    pub(super) fn is_in_scratch(self) -> bool {
        self.key == RegionKey::NONE
    }

    /// `len` bytes of the buffer from `offset` on.
    pub(super) fn slice(self, offset: usize, len: u64) -> RemoteSlice {
        // A sum that a peer's number makes too large lies in no region, and the owner refuses it.
        let offset = self.offset.saturating_add(offset as u64);
        RemoteSlice { key: self.key, offset, len }
    }
}

/// In the difference of signatures, of a signal in place of a put of neutral elements.
const NEUTRAL: u64 = !(u32::MAX as u64);

/// What a signal tells in a round of a partial all-reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InRound {
    /// It is in place of a put of neutral elements.
    pub(crate) is_neutral: bool,
    /// The ranks of which the sender knows that their inputs are not absent, by bits. None, where
    /// the round has too many ranks for that.
    pub(crate) contributors: u32,
}

/// The header of a signal; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    run: u64,
    /// How many runs before `run` are not complete.
    incomplete: u64,
    history: u64,
    /// On the scale of times; zero also where nobody has read the clock.
    elapsed: u8,
}

impl Header {
    /// The header of a signal of run `run` whose sender has completed `completed` runs.
    pub(super) fn new(run: u64, history: u64, completed: u64) -> Self {
        Self { run, incomplete: (run - completed.min(run)).min(INCOMPLETE_MAX), history, elapsed: 0 }
    }

    /// Whether the signal belongs to this run and this history of calls.
    #[inline]
    pub(super) fn is_of(&self, run: u64, history: u64) -> bool {
        self.history == history && self.run == run
    }

    /// What the header tells if the signal belongs to this run of a round and this history of
    /// calls. `ranks`: the bits that it may tell of.
    #[inline]
    pub(crate) fn in_round(&self, run: u64, history: u64, ranks: u32) -> Option<InRound> {
        let difference = self.history ^ history;
        let (contributors, is_neutral) = (difference as u32, difference & NEUTRAL != 0);
        let is_whole = difference & NEUTRAL == if is_neutral { NEUTRAL } else { 0 };
        let is_of = self.run == run && is_whole && contributors & !ranks == 0;
        is_of.then_some(InRound { is_neutral, contributors })
    }

    /// The header of a signal that tells this in a round.
    #[inline]
    pub(crate) fn telling(self, InRound { is_neutral, contributors }: InRound) -> Self {
        let neutral = if is_neutral { NEUTRAL } else { 0 };
        Self { history: self.history ^ neutral ^ u64::from(contributors), ..self }
    }

    pub(super) fn is_of_run(&self, run: u64) -> bool {
        self.run == run
    }

    /// How many runs the sender has completed, at least.
    fn completed(&self) -> u64 {
        if self.incomplete == INCOMPLETE_MAX { 0 } else { self.run.saturating_sub(self.incomplete) }
    }

    /// The time for which the sender had been in the call when it sent this.
    pub(super) fn after(self, elapsed_ns: u64) -> Self {
        Self { elapsed: step_above(elapsed_ns), ..self }
    }

    /// How long the sender had been in the call, at most 12.5 % too much.
    pub(super) fn elapsed_ns(&self) -> u64 {
        step_ns(self.elapsed)
    }

    fn words(self) -> [u64; 2] {
        [
            self.run | self.incomplete << RUN_BITS | u64::from(self.elapsed) << (RUN_BITS + INCOMPLETE_BITS),
            self.history,
        ]
    }

    /// A payload of the header and the first `bytes` of the data; word by word: a processor waits
    /// where stored pieces are read again in other pieces.
    #[inline]
    pub(super) fn with_data(self, data: &DataWords, bytes: usize) -> Inline {
        let [first, second] = self.words().map(u64::to_le);
        Inline::of_words([first, second, data[0], data[1], data[2], data[3]], HEADER_BYTES + bytes)
    }

    /// A payload that says where the sender's input and output are.
    pub(super) fn with_buffers(self, input: BufferAddress, output: BufferAddress) -> Inline {
        let words = [input.key.0, input.offset, output.key.0, output.offset].map(u64::to_le);
        self.with_data(&words, INLINE_DATA_BYTES)
    }

    /// The header of a payload and the data beside it, of which the receiver knows the length.
    #[inline]
    pub(super) fn decode(payload: &[u64; SIGNAL_SLOT_PAYLOAD_BYTES / 8]) -> (Self, DataWords) {
        let [first, history, data @ ..] = *payload;
        let (first, history) = (u64::from_le(first), u64::from_le(history));
        let header = Self {
            run: first & ((1 << RUN_BITS) - 1),
            incomplete: first >> RUN_BITS & INCOMPLETE_MAX,
            history,
            elapsed: (first >> (RUN_BITS + INCOMPLETE_BITS)) as u8,
        };
        (header, data)
    }

    /// Where the sender's input and output are, from the data beside its header.
    pub(super) fn buffers(data: &DataWords) -> [BufferAddress; 2] {
        let [input_key, input_offset, output_key, output_offset] = data.map(u64::from_le);
        [
            BufferAddress { key: RegionKey(input_key), offset: input_offset },
            BufferAddress { key: RegionKey(output_key), offset: output_offset },
        ]
    }
}

/// A signal slot whose next signal some run waits for.
#[derive(Clone, Copy, Debug)]
struct AwaitedSignal {
    from: Rank,
    signal_slot: u16,
    /// The signal slot's count as long as nothing has come.
    count: u64,
}

/// The signal slots that this rank keeps for its peers; see the module.
pub(super) struct PeerSignals {
    /// By rank; empty for this rank.
    slots: Vec<Signals>,
    /// By rank and signal slot: how many signals were consumed.
    consumed: Vec<Vec<u64>>,
    /// By rank: how many collectives the rank has completed, as last heard.
    collectives: Vec<u64>,
    /// By rank: how many of the messages that this rank sends to it.
    messages: Vec<u64>,
    /// A signal that some run was found to wait for, since the runs were looked at last.
    awaited: Option<AwaitedSignal>,
    witness: Option<Box<dyn Witness>>,
}

impl PeerSignals {
    /// `slots`: by rank.
    pub(super) fn new(slots: Vec<Signals>) -> Self {
        Self {
            consumed: slots.iter().map(|slots| vec![0; slots.len()]).collect(),
            collectives: vec![0; slots.len()],
            messages: vec![0; slots.len()],
            slots,
            awaited: None,
            witness: None,
        }
    }

    /// Takes all signals that have come so far for those of engines before this one: they count
    /// for nothing here. `below`: by rank, below which signal slot some may have come; `None`:
    /// in any.
    pub(crate) fn begin_behind_former(&mut self, below: &[Option<u16>]) {
        for ((slots, consumed), below) in self.slots.iter().zip(&mut self.consumed).zip(below) {
            let most = below.map_or(usize::MAX, usize::from);
            for (signal_slot, consumed) in consumed.iter_mut().enumerate().take(most) {
                *consumed = slots.count(signal_slot as u16);
            }
        }
    }

    /// Whether a word has come in a signal slot whose signals no run consumes.
    fn has_word(&self, from: Rank, signal_slot: u16, count: u64) -> bool {
        count != self.consumed[from as usize][usize::from(signal_slot)]
    }

    /// The checker that is told, where there is one.
    pub(super) fn witness(&mut self) -> &mut Option<Box<dyn Witness>> {
        &mut self.witness
    }

    /// Whether the signal slot's next signal has come. A signal that has not is awaited.
    #[inline]
    pub(super) fn has_come(&mut self, from: Rank, signal_slot: u16) -> bool {
        let count = self.consumed[from as usize][usize::from(signal_slot)];
        let has_come = self.slots[from as usize].count(signal_slot) != count;
        if !has_come {
            self.awaited = Some(AwaitedSignal { from, signal_slot, count });
        }
        has_come
    }

    /// Header and data of the signal slot's last signal.
    #[inline]
    pub(super) fn read(&self, from: Rank, signal_slot: u16) -> (Header, DataWords) {
        Header::decode(&self.slots[from as usize].payload_words(signal_slot))
    }

    /// The header of the signal that has come and was not consumed.
    pub(super) fn unconsumed(&self, from: Rank, signal_slot: u16) -> Option<Header> {
        let count = self.consumed[from as usize][usize::from(signal_slot)];
        let has_come = self.slots[from as usize].count(signal_slot) != count;
        has_come.then(|| self.read(from, signal_slot).0)
    }

    /// The run goes on because of that signal, whose header was found to be that of the call.
    #[inline]
    pub(super) fn consume(&mut self, from: Rank, signal_slot: u16, header: &Header, stream: Stream) {
        let consumed = &mut self.consumed[from as usize][usize::from(signal_slot)];
        *consumed += 1;
        if let Some(witness) = &mut self.witness {
            witness.consumed(from, signal_slot, *consumed);
        }
        self.raise_credit(from, stream, header.completed());
    }

    /// No run waits for a signal any more, until one is found to.
    #[inline]
    pub(super) fn forget_awaited(&mut self) {
        self.awaited = None;
    }

    /// Polls for the awaited signal: whether it comes. `None`: no run waits for one.
    #[inline]
    pub(super) fn poll_awaited(&self) -> Option<bool> {
        let AwaitedSignal { from, signal_slot, count } = self.awaited?;
        let slots = &self.slots[from as usize];
        // The tightest of loops: a signal on its way is seen at once, and nothing else is stored
        // meanwhile.
        Some((0..POLLS).any(|_| slots.count(signal_slot) != count))
    }

    /// How many runs of the stream the peer has completed at least; the messages of a stream are
    /// those sent to the peer.
    #[inline]
    pub(super) fn credit(&self, peer: Rank, stream: Stream) -> u64 {
        match stream {
            Stream::Collectives => self.collectives[peer as usize],
            Stream::Messages { .. } => self.messages[peer as usize],
        }
    }

    /// Whether the peer is known to have completed that many runs of the stream. A credit that is
    /// too low is awaited.
    #[inline]
    pub(super) fn has_completed(&mut self, peer: Rank, stream: Stream, runs: u64) -> bool {
        self.credit(peer, stream) >= runs || self.read_credit(peer, stream, runs)
    }

    fn read_credit(&mut self, peer: Rank, stream: Stream, runs: u64) -> bool {
        let signal_slot = credit_slot(stream);
        let slots = &self.slots[peer as usize];
        let count = slots.count(signal_slot);
        if self.has_word(peer, signal_slot, count) {
            // One word, stored at once: the newest credit or the one before it, both true.
            let told = u64::from_le(slots.payload_words(signal_slot)[0]);
            self.hear_credit(peer, stream, told);
        }
        let is_enough = self.credit(peer, stream) >= runs;
        if !is_enough {
            self.awaited = Some(AwaitedSignal { from: peer, signal_slot, count });
        }
        is_enough
    }

    /// The peer tells its number of completed runs, by another way than a signal of a run.
    pub(super) fn hear_credit(&mut self, peer: Rank, stream: Stream, completed: u64) {
        self.raise_credit(peer, stream, completed);
        if let Some(witness) = &mut self.witness {
            witness.heard_completed(peer, stream.to_word(), completed);
        }
    }

    #[inline]
    fn raise_credit(&mut self, peer: Rank, stream: Stream, completed: u64) {
        let credits = match stream {
            Stream::Collectives => &mut self.collectives,
            Stream::Messages { to, .. } if to == peer => &mut self.messages,
            // The peer sends them; its progress tells this rank nothing.
            Stream::Messages { .. } => return,
        };
        if let Some(credit) = credits.get_mut(peer as usize) {
            *credit = (*credit).max(completed);
        }
    }

    /// Tells peers how many runs of a stream this rank has completed.
    pub(super) fn send_credits(
        &mut self,
        device: &mut dyn Device,
        stream: Stream,
        peers: &[Rank],
        completed: u64,
    ) {
        if let Some(witness) = &mut self.witness {
            witness.completed(stream.to_word(), completed);
        }
        for peer in peers {
            let payload = Inline::new(&completed.to_le_bytes()).expect("8 bytes fit");
            let signal = Signal { signal_slot: credit_slot(stream), payload };
            // Lost, left or full: then the peer asks when it needs to know.
            let _ = device.signal(*peer, &signal, NO_TRANSFER);
        }
    }
}

impl Engine {
    /// Tells a peer a word about rounds. False: try again, as there is no room for it now. A peer
    /// that is gone is told nothing; an event says that it is gone.
    pub(crate) fn say(&mut self, peer: Rank, about: RoundWord, word: u64) -> bool {
        let payload = Inline::new(&word.to_le_bytes()).expect("8 bytes fit");
        let signal = Signal { signal_slot: about.signal_slot(), payload };
        let said = self.context.device.signal(peer, &signal, NO_TRANSFER);
        !matches!(said, Err(SubmitError::QueueFull { .. } | SubmitError::NotConnected { .. }))
    }

    /// The word about rounds that came last from a peer; 0: none came. A word that was overtaken
    /// may come after the larger one that overtook it.
    pub(crate) fn heard(&self, peer: Rank, about: RoundWord) -> u64 {
        let (signals, signal_slot) = (&self.context.signals, about.signal_slot());
        let slots = &signals.slots[peer as usize];
        // One word, stored at once.
        let has_come = signals.has_word(peer, signal_slot, slots.count(signal_slot));
        if has_come { u64::from_le(slots.payload_words(signal_slot)[0]) } else { 0 }
    }
}

fn credit_slot(stream: Stream) -> u16 {
    match stream {
        Stream::Collectives => COLLECTIVES_SIGNAL_SLOT,
        Stream::Messages { .. } => MESSAGES_SIGNAL_SLOT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_former_engines_are_behind_a_new_one() {
        let signal = |slots: &Signals, signal_slot| {
            slots.signal(&Signal { signal_slot, payload: Inline::EMPTY });
        };
        let slots = [Signals::new(8), Signals::new(8)];
        for signal_slot in [0, 2, 2] {
            signal(&slots[0], signal_slot);
            signal(&slots[1], signal_slot + 5);
        }
        let mut signals = PeerSignals::new(slots.to_vec());
        signals.begin_behind_former(&[Some(3), None]);
        let mut come = |from, signal_slot| signals.has_come(from, signal_slot);
        assert!((0..8).all(|signal_slot| !come(0, signal_slot) && !come(1, signal_slot)));
        signal(&slots[0], 2);
        signal(&slots[1], 7);
        assert!(come(0, 2) && come(1, 7));
    }

    #[test]
    fn a_header_tells_run_signature_progress_and_buffers() {
        let header = Header::new(1000, 77, 998).after(5_000_000);
        let buffer = BufferAddress { key: RegionKey(5), offset: 64 };
        let payload = header.with_buffers(buffer, BufferAddress::IN_SCRATCH);
        let slots = Signals::new(1);
        slots.signal(&Signal { signal_slot: 0, payload });
        let (decoded, data) = Header::decode(&slots.payload_words(0));
        assert_eq!(decoded, header);
        assert_eq!(decoded.completed(), 998);
        let elapsed_ns = decoded.elapsed_ns();
        assert!((5_000_000..5_625_000).contains(&elapsed_ns), "{elapsed_ns}");
        assert_eq!(Header::buffers(&data), [buffer, BufferAddress::IN_SCRATCH]);
        assert_eq!(buffer.absent().further(8).without_absence(), (buffer.further(8), true));
        assert_eq!(buffer.without_absence(), (buffer, false));
        assert_eq!(Header::new(1 << 20, 0, 0).completed(), 0, "too far behind to say: nothing is claimed");
    }

    #[test]
    fn a_header_of_a_round_tells_contributors_and_that_a_put_was_left_out() {
        let header = Header::new(1000, u64::MAX - 5, 998);
        let ranks = 0b1111;
        for (is_neutral, contributors) in [(false, 0), (false, 0b1010), (true, 0), (true, 0b1111)] {
            let told = InRound { is_neutral, contributors };
            let telling = header.telling(told);
            assert_eq!(telling.in_round(1000, u64::MAX - 5, ranks), Some(told));
            assert_eq!(telling.in_round(1001, u64::MAX - 5, ranks), None, "another run");
            assert_eq!(telling.in_round(1000, u64::MAX - 5 - (1 << 40), ranks), None, "another call");
            assert_eq!(telling.is_of(1000, u64::MAX - 5), !is_neutral && contributors == 0);
        }
        let told = InRound { is_neutral: false, contributors: 0b10000 };
        assert_eq!(header.telling(told).in_round(1000, u64::MAX - 5, ranks), None, "there is no rank 4");
    }
}
