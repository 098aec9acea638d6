//! Exchanges of simulated ranks, carried out by real engines over simulated wires.
//!
//! A call begins on a rank when that asks for it, and the engines of all ranks go on with it step
//! by step: calls share the links, and end at different times on different ranks. The operations
//! are those of a [`Trainer`](crate::Trainer): what is encoded goes to its owners by an all-to-all,
//! and comes back by an all-gather. Reads, writes and words are carried out by `one_sided`, rounds
//! by `in_lines`.
//!
//! **Invariants:** the wires are never ahead of the training, nor behind it when something happens
//! to a rank. All ranks make the same calls in the same order: between the two calls of an encoded
//! average a rank begins no other one.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use super::error::SimulationError;
use super::faults::Delays;
use super::in_lines::InLines;
use super::mail::Message;
use super::one_sided::OneSided;
use super::rank::{SimulatedRank, Wanted};
use crate::compression::{Compression, Parts};
use crate::interpreter::Request;
use crate::lines::Line;
use crate::policy::{Event, OperationId, Outcome, Reads, Vector};

/// Most ranks whose engines are simulated.
pub const ENGINES_MAX: u32 = 64;

/// Calls of a rank under way, at most.
const CALLS_MAX: usize = 128;

/// A call that all ranks make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Replaces so many `f32` by their averages, added in the order of ranks.
    Average(usize),
    /// Replaces so many `u64` by their sums.
    Total(usize),
    /// Sends each rank a block of so many bytes, and gets one of each.
    AllToAll(usize),
    /// Sends all ranks a block of so many bytes, and gets one of each.
    AllGather(usize),
}

/// What engines are to be connected for, beside calls of all ranks.
#[derive(Clone, Debug)]
pub struct Exchanges {
    /// How messages are delayed.
    pub delays: Delays,
    /// The elements that each rank publishes, and its slots at each peer, if ranks have a window.
    pub window: Option<(usize, u16)>,
    /// The lines of ranks that combine contributions in rounds.
    pub lines: Vec<Line>,
    /// The elements of a contribution.
    pub contribution: usize,
}

/// What a read has found.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadEnded {
    /// The version, 0 if nothing was published.
    pub version: u64,
    /// Its word.
    pub word: u64,
    /// Its elements.
    pub elements: Vec<f32>,
}

/// A write that has come.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrived {
    /// The rank that wrote.
    pub from: Rank,
    /// Its slot.
    pub slot: u16,
    /// Its word.
    pub word: u64,
    /// The elements.
    pub elements: Vec<f32>,
}

/// A round that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct RoundEnded {
    /// How many ranks have contributed.
    pub contributors: u32,
    /// What their contributions come to.
    pub result: Vec<f32>,
    /// What late contributions come to that the result lacks, if there are any.
    pub late: Option<Vec<f32>>,
}

/// What a rank says to a line beside its contributions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineWord {
    /// It gives nothing before it contributes again.
    StepAside,
    /// It is to be waited for again.
    ComeBack,
    /// It gives nothing any more, and waits for the last round.
    Finish,
}

/// The engines of all ranks, in virtual time since they were connected.
///
/// Nothing here waits. What is not there yet is asked for again when time has passed.
pub trait Engines {
    /// The time.
    fn now(&self) -> Nanos;

    /// Starts a call on a rank.
    ///
    /// # Errors
    ///
    /// It cannot be carried out, as text.
    fn start(&mut self, rank: Rank, call: Call, input: &[u8]) -> Result<(), String>;

    /// Lets ranks do all they can at this instant.
    ///
    /// # Errors
    ///
    /// They find something to do for ever, as text.
    fn settle(&mut self) -> Result<(), String>;

    /// The output of the oldest call of a rank, if that has ended; it is forgotten then.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn take_output(&mut self, rank: Rank) -> Result<Option<Vec<u8>>, String>;

    /// Goes to the next instant at which something moves, or to this time if that comes first.
    /// False when there is neither.
    fn advance(&mut self, until: Option<Nanos>) -> bool;

    /// A rank makes no progress for a while.
    fn freeze(&mut self, rank: Rank, duration: Duration);

    /// A rank ends.
    fn end(&mut self, rank: Rank);

    /// Publishes all elements of a rank with a word.
    ///
    /// # Errors
    ///
    /// The rank has ended, as text.
    fn publish(&mut self, rank: Rank, elements: &[f32], word: u64) -> Result<(), String>;

    /// Starts a read of elements that a rank has published. A rank makes one at a time.
    ///
    /// # Errors
    ///
    /// It cannot be carried out, as text.
    fn read(&mut self, rank: Rank, from: Rank, range: Range<usize>, reads: Reads) -> Result<(), String>;

    /// What the read of a rank has found, once.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn take_read(&mut self, rank: Rank) -> Result<Option<ReadEnded>, String>;

    /// Whether a rank's write before into a slot at a peer was taken.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn has_credit(&mut self, rank: Rank, target: (Rank, u16)) -> Result<bool, String>;

    /// Writes into a slot of a rank at a peer. False: not now, as the write before was not taken,
    /// or others of the rank are on their way.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn write(&mut self, rank: Rank, target: (Rank, u16), elements: &[f32], word: u64)
    -> Result<bool, String>;

    /// Takes the next write that has come to a rank.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn take_write(&mut self, rank: Rank) -> Result<Option<Arrived>, String>;

    /// The round of a line for which a contribution of a rank would be in time; none if a round was
    /// bound without it.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn next_round(&mut self, rank: Rank, line: usize) -> Result<Option<u64>, String>;

    /// Hands a contribution of a rank over to a line.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn contribute(&mut self, rank: Rank, line: usize, contribution: &[f32]) -> Result<(), String>;

    /// Says something to a line.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn say(&mut self, rank: Rank, line: usize, word: LineWord) -> Result<(), String>;

    /// The round for which a rank of a line waits, once it has ended.
    ///
    /// # Errors
    ///
    /// The ranks have failed, as text.
    fn take_round(&mut self, rank: Rank, line: usize) -> Result<Option<RoundEnded>, String>;

    /// Makes all lines anew, which all ranks have left.
    ///
    /// # Errors
    ///
    /// They do not connect, as text.
    fn reopen(&mut self) -> Result<(), String>;
}

/// A piece of a vector whose average is encoded on its way.
type Encoded = (Vector, Range<usize>, Compression);

/// What is done when a call has ended.
enum Then {
    /// The output is a piece of a vector.
    Keep(Vector, Range<usize>),
    /// It is sums of numbers.
    Tell,
    /// It is the parts that this rank owns, of all ranks: their averages are handed out.
    HandOut(Encoded),
    /// It is the averages of all parts.
    Decode(Encoded),
}

/// A call that a rank has asked for.
struct Asked {
    id: OperationId,
    then: Then,
    input: Vec<u8>,
}

/// The operations of a rank.
#[derive(Default)]
struct Operations {
    asked: VecDeque<Asked>,
    under_way: VecDeque<(OperationId, Then)>,
    ended: u64,
}

impl Operations {
    fn is_idle(&self) -> bool {
        self.asked.is_empty() && self.under_way.is_empty()
    }
}

/// See the module.
pub(crate) struct OverEngines<'e> {
    engines: Box<dyn Engines + 'e>,
    /// The time of the training at which they were connected.
    began: Nanos,
    /// By rank.
    operations: Vec<Operations>,
    one_sided: Vec<OneSided>,
    in_lines: Vec<InLines>,
    /// Writes and words that were heard.
    heard: u64,
}

/// What a rank's engine has found, as text, and whose it is.
fn failed_at(rank: Rank) -> impl Fn(String) -> SimulationError {
    move |cause| SimulationError::Engine { rank, cause }
}

impl<'e> OverEngines<'e> {
    /// `lines`: by rank and its line, which of those that the engines know.
    pub(crate) fn new(
        engines: Box<dyn Engines + 'e>,
        began: Nanos,
        window: Option<(usize, u16)>,
        lines: &[Vec<usize>],
    ) -> Self {
        let ranks = lines.len();
        Self {
            engines,
            began,
            operations: (0..ranks).map(|_| Operations::default()).collect(),
            one_sided: (0..ranks).map(|_| OneSided::new(ranks, window)).collect(),
            in_lines: lines.iter().map(|lines| InLines::new(lines.clone())).collect(),
            heard: 0,
        }
    }

    /// Time since the training began.
    pub(crate) fn now(&self) -> Nanos {
        self.began + self.engines.now().since(Nanos::ZERO)
    }

    /// A rank asks for an all-reduce.
    pub(crate) fn ask(
        &mut self,
        rank: &mut SimulatedRank,
        id: OperationId,
        wanted: Wanted,
        numbers: &[u64],
    ) -> Result<(), SimulationError> {
        let (then, input) = match wanted {
            Wanted::Total { .. } => {
                (Then::Tell, numbers.iter().flat_map(|number| number.to_ne_bytes()).collect())
            }
            Wanted::Average { vector, piece, compression: Compression::None } => {
                let elements = rank.piece(vector, &piece);
                let input = elements.iter().flat_map(|element| element.to_ne_bytes()).collect();
                (Then::Keep(vector, piece), input)
            }
            Wanted::Average { vector, piece, compression } => {
                let mut input = Vec::new();
                rank.encode(&self.parts(&piece, compression), vector, &piece, &mut input);
                (Then::HandOut((vector, piece, compression)), input)
            }
        };
        self.operations[rank.number() as usize].asked.push_back(Asked { id, then, input });
        self.start(rank.number())
    }

    /// Takes a request that ranks exchange one-sided or in lines; hands others back, and writes
    /// that do not wait and find no credit.
    pub(crate) fn take(&mut self, rank: Rank, request: Request) -> Result<Option<Request>, SimulationError> {
        match request {
            Request::Read { .. } | Request::Write { .. } | Request::Tell { .. } => {
                let asked = self.one_sided[rank as usize].ask(rank, request, &mut *self.engines);
                return asked.map_err(failed_at(rank));
            }
            Request::Contribute { .. }
            | Request::StepAside { .. }
            | Request::ComeBack { .. }
            | Request::Leave { .. } => self.in_lines[rank as usize].ask(request),
            request => return Ok(Some(request)),
        }
        Ok(None)
    }

    /// Publishes what a rank has published since the last call.
    pub(crate) fn publish(&mut self, rank: &SimulatedRank) -> Result<(), SimulationError> {
        let published = self.one_sided[rank.number() as usize].publish(rank, &mut *self.engines);
        published.map_err(failed_at(rank.number()))
    }

    /// The next message that has come to a rank.
    pub(crate) fn next_message(&mut self, rank: Rank) -> Result<Option<Message>, SimulationError> {
        let one_sided = &self.one_sided[rank as usize];
        let message = one_sided.next_message(rank, &mut *self.engines).map_err(failed_at(rank))?;
        self.heard += u64::from(message.is_some());
        Ok(message)
    }

    /// Begins anew in all lines, which all ranks have left.
    pub(crate) fn reopen(&mut self) -> Result<(), SimulationError> {
        self.engines.reopen().map_err(failed_at(0))
    }

    fn parts(&self, piece: &Range<usize>, compression: Compression) -> Parts {
        Parts { compression, ranks: self.operations.len() as u32, elements: piece.len() }
    }

    /// Starts what a rank has asked for, as far as it may.
    fn start(&mut self, rank: Rank) -> Result<(), SimulationError> {
        let ranks = self.operations.len();
        let Operations { asked, under_way, .. } = &mut self.operations[rank as usize];
        while under_way.len() < CALLS_MAX
            && !under_way.iter().any(|(_, then)| matches!(then, Then::HandOut(_)))
            && let Some(Asked { id, then, input }) = asked.pop_front()
        {
            let call = match &then {
                Then::Keep(_, piece) => Call::Average(piece.len()),
                Then::Tell => Call::Total(input.len() / size_of::<u64>()),
                Then::HandOut(_) => Call::AllToAll(input.len() / ranks),
                Then::Decode(_) => Call::AllGather(input.len()),
            };
            self.engines.start(rank, call, &input).map_err(failed_at(rank))?;
            under_way.push_back((id, then));
        }
        Ok(())
    }

    /// Lets ranks do all they can at this instant, and ends operations that have come to their end.
    /// Returns what ranks are to be told of that. An all-reduce ends after those that its rank has
    /// asked for before it.
    pub(crate) fn ended(
        &mut self,
        ranks: &mut [SimulatedRank],
    ) -> Result<Vec<(Rank, Event)>, SimulationError> {
        let mut events = Vec::new();
        let mut moved = true;
        while moved && events.is_empty() {
            self.engines.settle().map_err(failed_at(0))?;
            moved = false;
            for rank in ranks.iter_mut().filter(|rank| !rank.is_lost()) {
                self.end_operations_of(rank, &mut events)?;
                moved |= self.go_on(rank, &mut events).map_err(failed_at(rank.number()))?;
            }
        }
        Ok(events)
    }

    /// Lets a rank go on with what it exchanges one-sided and in lines; true when anything moved.
    fn go_on(&mut self, rank: &mut SimulatedRank, events: &mut Vec<(Rank, Event)>) -> Result<bool, String> {
        let (number, engines) = (rank.number(), &mut *self.engines);
        let moved = self.one_sided[number as usize].go_on(rank, engines, events)?;
        Ok(moved | self.in_lines[number as usize].go_on(rank, engines, events)?)
    }

    fn end_operations_of(
        &mut self,
        rank: &mut SimulatedRank,
        events: &mut Vec<(Rank, Event)>,
    ) -> Result<(), SimulationError> {
        let number = rank.number();
        while !self.operations[number as usize].under_way.is_empty()
            && let Some(output) = self.engines.take_output(number).map_err(failed_at(number))?
        {
            let operations = &mut self.operations[number as usize];
            let (id, then) = operations.under_way.pop_front().expect("there is one");
            let mut outcome = Outcome::Averaged;
            match then {
                Then::Keep(vector, piece) => {
                    let elements = rank.piece(vector, &piece).iter_mut();
                    for (element, bytes) in elements.zip(output.chunks_exact(size_of::<f32>())) {
                        *element = f32::from_ne_bytes(bytes.try_into().expect("four bytes"));
                    }
                }
                Then::Tell => {
                    for (place, bytes) in (0..).zip(output.chunks_exact(size_of::<u64>())) {
                        let total = u64::from_ne_bytes(bytes.try_into().expect("eight bytes"));
                        events.push((number, Event::Totalled { place, total }));
                    }
                    outcome = Outcome::Totalled;
                }
                Then::HandOut((vector, piece, compression)) => {
                    let (parts, mut input) = (self.parts(&piece, compression), Vec::new());
                    rank.combine(&parts, &piece, &output, &mut input);
                    let then = Then::Decode((vector, piece, compression));
                    self.operations[number as usize].asked.push_front(Asked { id, then, input });
                    self.start(number)?;
                    continue;
                }
                Then::Decode((vector, piece, compression)) => {
                    self.parts(&piece, compression).decode(&output, rank.piece(vector, &piece));
                }
            }
            self.operations[number as usize].ended += 1;
            self.start(number)?;
            events.push((number, Event::Done(id, outcome)));
        }
        Ok(())
    }

    /// Whether no rank has asked for anything that has not ended, and all messages were heard.
    pub(crate) fn are_idle(&self) -> bool {
        self.operations.iter().all(Operations::is_idle) && self.are_others_idle()
    }

    /// Whether no rank has asked for anything else than calls that has not ended, and all messages
    /// were heard.
    fn are_others_idle(&self) -> bool {
        let are_idle =
            self.one_sided.iter().all(OneSided::is_idle) && self.in_lines.iter().all(InLines::is_idle);
        are_idle && self.one_sided.iter().map(OneSided::sent).sum::<u64>() == self.heard
    }

    /// An all-reduce for which a rank waits, and a rank that has ended all its own and has not
    /// asked for it, where nothing else is under way that may let it ask.
    pub(crate) fn awaited(&self) -> Option<(u64, Rank)> {
        let waiting = self.operations.iter().filter(|operations| !operations.is_idle());
        let newest = waiting.map(|operations| operations.ended).max()?;
        let is_missing = |operations: &Operations| operations.is_idle() && operations.ended <= newest;
        let missing = self.operations.iter().position(is_missing).filter(|_| self.are_others_idle());
        Some((newest, missing? as Rank))
    }

    /// A rank that waits until a peer takes its writes, and the peer.
    pub(crate) fn blocked(&self) -> Option<(Rank, Rank)> {
        (0..).zip(&self.one_sided).find_map(|(rank, one_sided)| Some((rank, one_sided.awaits()?)))
    }

    /// Goes to the next instant at which something moves, or to this time if that comes first.
    /// False when there is neither.
    pub(crate) fn advance(&mut self, until: Option<Nanos>) -> bool {
        self.engines.advance(until.map(|until| Nanos(until.0 - self.began.0)))
    }

    /// A rank stands still.
    pub(crate) fn freeze(&mut self, rank: Rank, duration: Duration) {
        self.engines.freeze(rank, duration);
    }

    /// A rank ends.
    pub(crate) fn end(&mut self, rank: Rank) {
        self.operations[rank as usize] = Operations::default();
        self.one_sided[rank as usize].forget();
        self.in_lines[rank as usize].forget();
        self.engines.end(rank);
    }
}
