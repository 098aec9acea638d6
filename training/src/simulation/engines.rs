//! All-reduces of simulated ranks, carried out by real engines over simulated wires.
//!
//! A call begins on a rank when that asks for it, and the engines of all ranks go on with it step
//! by step: calls share the links, and end at different times on different ranks. The operations
//! are those of a [`Trainer`](crate::Trainer): what is encoded goes to its owners by an all-to-all,
//! and comes back by an all-gather.
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
use super::rank::{SimulatedRank, Wanted};
use crate::compression::{Compression, Parts};
use crate::policy::{Event, OperationId, Outcome, Vector};

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

/// The engines of all ranks, in virtual time since they were connected.
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
}

impl<'e> OverEngines<'e> {
    pub(crate) fn new(engines: Box<dyn Engines + 'e>, began: Nanos, ranks: u32) -> Self {
        Self { engines, began, operations: (0..ranks).map(|_| Operations::default()).collect() }
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
            let started = self.engines.start(rank, call, &input);
            started.map_err(|cause| SimulationError::Engine { rank, cause })?;
            under_way.push_back((id, then));
        }
        Ok(())
    }

    /// Lets ranks do all they can at this instant, and ends operations that have come to their end.
    /// Returns what ranks are to be told of that. An operation ends after those that its rank has
    /// asked for before it.
    pub(crate) fn ended(
        &mut self,
        ranks: &mut [SimulatedRank],
    ) -> Result<Vec<(Rank, Event)>, SimulationError> {
        self.engines.settle().map_err(|cause| SimulationError::Engine { rank: 0, cause })?;
        let mut events = Vec::new();
        for rank in ranks.iter_mut().filter(|rank| !rank.is_lost()) {
            self.end_operations_of(rank, &mut events)?;
        }
        Ok(events)
    }

    fn end_operations_of(
        &mut self,
        rank: &mut SimulatedRank,
        events: &mut Vec<(Rank, Event)>,
    ) -> Result<(), SimulationError> {
        let number = rank.number();
        let failed = |cause| SimulationError::Engine { rank: number, cause };
        while !self.operations[number as usize].under_way.is_empty()
            && let Some(output) = self.engines.take_output(number).map_err(failed)?
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

    /// Whether no rank has asked for anything that has not ended.
    pub(crate) fn are_idle(&self) -> bool {
        self.operations.iter().all(Operations::is_idle)
    }

    /// An operation for which a rank waits, and a rank that has ended all its own and has not asked
    /// for it.
    pub(crate) fn awaited(&self) -> Option<(u64, Rank)> {
        let waiting = self.operations.iter().filter(|operations| !operations.is_idle());
        let newest = waiting.map(|operations| operations.ended).max()?;
        let is_missing = |operations: &Operations| operations.is_idle() && operations.ended <= newest;
        Some((newest, self.operations.iter().position(is_missing)? as Rank))
    }

    /// Goes to the next instant at which something moves, or to this time if that comes first.
    pub(crate) fn advance(&mut self, until: Option<Nanos>) -> Result<(), SimulationError> {
        if self.engines.advance(until.map(|until| Nanos(until.0 - self.began.0))) {
            return Ok(());
        }
        let cause = format!("nothing moves any more at {}", self.now());
        Err(SimulationError::Engine { rank: 0, cause })
    }

    /// A rank stands still.
    pub(crate) fn freeze(&mut self, rank: Rank, duration: Duration) {
        self.engines.freeze(rank, duration);
    }

    /// A rank ends.
    pub(crate) fn end(&mut self, rank: Rank) {
        self.operations[rank as usize] = Operations::default();
        self.engines.end(rank);
    }
}
