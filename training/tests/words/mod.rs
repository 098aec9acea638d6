//! One rank of a scheme among peers that say whatever some bytes are.
//!
//! The rank has its policy and its interpreter. What computes, and ends operations, keeps the rules
//! of drivers. Its order, the times, and the words and writes of all peers are those of the bytes.
//!
//! **What must hold:** the policy goes on, or refuses a word and names its sender. It breaks no
//! invariant, asks for a bounded number of things after an event, and comes to its end, or waits
//! for a peer, when the peers say nothing any more.

use std::collections::VecDeque;
use std::ops::Range;

use pleach_collectives::Rank;
use pleach_training::interpreter::{Interpreter, Request, Vectors};
use pleach_training::policy::{Event, OperationId, Outcome, Vector};
use pleach_training::{Layout, PolicyError, Scheme};
use pleach_transport::Nanos;

/// The schemes whose ranks tell each other words, in all their ways.
pub(crate) const SCHEMES: [&str; 21] = [
    "gossip",
    "gossip:every=2,peer=ring,reads=torn",
    "gossip:direction=push",
    "gossip:direction=push,peer=butterfly",
    "gossip:direction=push,peer=ring,every=2",
    "gossip:direction=push-sum",
    "gossip:direction=push-sum,peer=butterfly",
    "easgd:every=1",
    "easgd:every=2,mode=round-robin",
    "eamsgd:every=2,momentum=0.5",
    "downpour:every=2",
    "bsp",
    "ssp:staleness=2",
    "ssp:staleness=9",
    "dssp:low=1,high=4",
    "dssp:low=0,high=3",
    "bap:distance=3",
    "bap:distance=12",
    "asp",
    "elastic-bsp:lookahead=1",
    "elastic-bsp:lookahead=5",
];

const RANKS: u32 = 4;
const STEPS: u64 = 12;

/// Elements: the last rank has a share of none.
const LAYERS: [usize; 2] = [3, 3];

/// Most that is asked for after one event: a read or a write, a word and its answer to each peer.
const REQUESTS_MAX: usize = 8 * RANKS as usize;

/// Most events after the last word of a peer: steps, and the operations of each.
const EVENTS_MAX: usize = 64 * STEPS as usize * RANKS as usize;

/// Vectors of a rank without a window.
struct Memory(Vec<Vec<f32>>);

impl Vectors for Memory {
    fn pieces<const N: usize>(&mut self, names: [Vector; N], piece: &Range<usize>) -> [&mut [f32]; N] {
        let vectors = self.0.get_disjoint_mut(names.map(Vector::index)).expect("different vectors");
        vectors.map(|vector| &mut vector[piece.clone()])
    }

    fn step(&mut self, _: &Range<usize>) -> Result<(), PolicyError> {
        Err(PolicyError::NoOptimizer)
    }

    fn publish(&mut self, vector: Vector, piece: &Range<usize>, _: u64) {
        assert!(self.0[vector.index()].get(piece.clone()).is_some(), "it has the elements");
    }
}

/// How an operation ends.
#[derive(Clone, Copy)]
enum Ends {
    Averaged,
    Read,
    Written,
}

/// The rank, and what a driver knows of it.
struct Told {
    text: &'static str,
    interpreter: Interpreter,
    vectors: Memory,
    requests: Vec<Request>,
    now: Nanos,
    computes: Option<u64>,
    /// Averages end in their order; reads and writes in any.
    averages: VecDeque<OperationId>,
    others: Vec<(OperationId, Ends)>,
    /// Writes that do not wait for a credit. For some there is none.
    unwaiting: u64,
    is_paused: bool,
}

/// The policy has refused a word.
struct Refused;

impl Told {
    fn new(text: &'static str, rank: Rank) -> Self {
        let scheme: Scheme = text.parse().unwrap_or_else(|error| panic!("{text}: {error}"));
        let plan = scheme.plan(&Layout::of(&LAYERS), rank, RANKS).expect("is not refused");
        let elements = LAYERS.iter().sum();
        Self {
            text,
            interpreter: Interpreter::new(plan, true),
            vectors: Memory(vec![vec![1.0; elements]; Vector::COUNT]),
            requests: Vec::new(),
            now: Nanos(0),
            computes: None,
            averages: VecDeque::new(),
            others: Vec::new(),
            unwaiting: 0,
            is_paused: false,
        }
    }

    fn tell(&mut self, event: Event) -> Result<(), Refused> {
        let Self { text, interpreter, vectors, requests, now, .. } = self;
        match interpreter.deliver(event, *now, vectors, &mut |_, _| {}, requests) {
            Ok(()) => {}
            Err(PolicyError::Word { from, .. }) => {
                let (Event::Told { from: sender, .. } | Event::Arrived { from: sender, .. }) = event else {
                    panic!("{text}: {event:?} has no word")
                };
                assert_eq!(from, sender, "{text}: {event:?}");
                return Err(Refused);
            }
            Err(error) => panic!("{text}: {event:?}: {error}"),
        }
        assert!(requests.len() <= REQUESTS_MAX, "{text}: {event:?}: {} requests", requests.len());
        let (mut is_last, mut refused) = (false, Vec::new());
        for request in std::mem::take(&mut self.requests) {
            match request {
                Request::Compute { step } if step == STEPS => is_last = true,
                Request::Compute { step } => self.computes = Some(step),
                Request::Average { id, .. } => self.averages.push_back(id),
                Request::Read { id, .. } => self.others.push((id, Ends::Read)),
                Request::Write { id, waits: true, .. } => self.others.push((id, Ends::Written)),
                Request::Write { id, to, .. } => {
                    self.unwaiting += 1;
                    if self.unwaiting.is_multiple_of(4) {
                        refused.push((id, to));
                    } else {
                        self.others.push((id, Ends::Written));
                    }
                }
                Request::Tell { .. } => {}
                other => panic!("{}: {other:?}", self.text),
            }
        }
        // At once, before anything else happens.
        for (id, by) in refused {
            self.tell(Event::Done(id, Outcome::Refused { by }))?;
        }
        if is_last { self.tell(Event::Stop) } else { Ok(()) }
    }

    /// The gradient of the step is complete, if one is computed.
    fn end_computing(&mut self) -> Result<(), Refused> {
        let Some(step) = self.computes.take() else { return Ok(()) };
        for bucket in 0..self.interpreter.buckets().len() {
            self.tell(Event::Ready(bucket))?;
        }
        self.tell(Event::Computed { step })
    }

    /// One of the operations under way ends, with what a peer has published.
    fn end_operation(&mut self, number: u64) -> Result<(), Refused> {
        let count = self.others.len() + usize::from(!self.averages.is_empty());
        if count == 0 {
            return Ok(());
        }
        let place = (number % count as u64) as usize;
        let (id, ends) = if place < self.others.len() {
            self.others.remove(place)
        } else {
            (self.averages.pop_front().expect("it is counted"), Ends::Averaged)
        };
        let outcome = match ends {
            Ends::Averaged => Outcome::Averaged,
            Ends::Read => Outcome::Read { version: number, word: number.rotate_left(32) },
            Ends::Written => Outcome::Written,
        };
        self.tell(Event::Done(id, outcome))
    }

    /// Comes to rest before the step that is computed, or goes on.
    fn pause_or_resume(&mut self) -> Result<(), Refused> {
        if self.is_paused && self.interpreter.is_at_rest() {
            self.is_paused = false;
            self.tell(Event::Resume)
        } else if !self.is_paused && self.computes.take().is_some() {
            self.is_paused = true;
            self.tell(Event::Pause)
        } else {
            Ok(())
        }
    }

    /// Lets the rank go on by itself, until it cannot.
    fn go_on(&mut self) -> Result<(), Refused> {
        for _ in 0..EVENTS_MAX {
            self.now.0 += 1_000;
            if self.computes.is_some() {
                self.end_computing()?;
            } else if !self.averages.is_empty() || !self.others.is_empty() {
                self.end_operation(0)?;
            } else if self.is_paused && self.interpreter.is_at_rest() {
                self.pause_or_resume()?;
            } else {
                let interpreter = &self.interpreter;
                let is_over = interpreter.has_ended() || interpreter.awaits().is_some();
                assert!(is_over, "{}: it does nothing, and waits for nobody", self.text);
                return Ok(());
            }
        }
        panic!("{}: it goes on for ever", self.text)
    }
}

/// Takes the next bytes, as many as there are, as a number.
fn number(bytes: &mut &[u8], most: usize) -> u64 {
    let (taken, rest) = bytes.split_at(bytes.len().min(most));
    *bytes = rest;
    taken.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// A word of a policy: one of four kinds with a small number, or any.
fn word(bytes: &mut &[u8]) -> u64 {
    let form = number(bytes, 1);
    let length = if form & 0x80 == 0 { 1 } else { 8 };
    (form & 3) << 62 ^ number(bytes, length)
}

/// Tells a rank what these bytes say.
fn tell_rank(told: &mut Told, rank: Rank, mut bytes: &[u8]) -> Result<(), Refused> {
    told.tell(Event::Start)?;
    while !bytes.is_empty() {
        let byte = number(&mut bytes, 1);
        // Any rank but this one.
        let from = (rank + 1 + (byte >> 4) as Rank % (RANKS - 1)) % RANKS;
        match byte & 7 {
            0 => told.end_computing()?,
            1 => told.end_operation(number(&mut bytes, 1))?,
            2 | 3 => told.tell(Event::Told { from, word: word(&mut bytes) })?,
            4 => told.tell(Event::Arrived { from, word: word(&mut bytes) })?,
            5 => told.pause_or_resume()?,
            6 => told.now.0 = told.now.0.saturating_add(1 << (number(&mut bytes, 1) % 48)),
            _ => told.go_on()?,
        }
    }
    told.go_on()
}

/// Tells a rank of each scheme what these bytes say, but for the first, which is the rank. Returns
/// how many have refused a word.
pub(crate) fn tell(bytes: &[u8]) -> usize {
    let Some((first, bytes)) = bytes.split_first() else { return 0 };
    let rank = u32::from(*first) % RANKS;
    let tell = |text: &'static str| tell_rank(&mut Told::new(text, rank), rank, bytes);
    SCHEMES.into_iter().filter(|text| tell(text).is_err()).count()
}
