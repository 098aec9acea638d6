//! One simulated rank: its policy, vectors, optimizer and times.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use super::Settings;
use super::gradients::Task;
use super::mail::Elements;
use super::passes::Passes;
use crate::checkpoint::{CheckpointError, RankState, vector};
use crate::compression::{Compression, Parts};
use crate::copies::{Stamps, changed};
use crate::interpreter::{Agreement, Interpreter, Plan, Request, Staleness, Vectors, combine, encode};
use crate::layout::Bucket;
use crate::learner::{Learner, Sgd};
use crate::ledger::PolicyError;
use crate::lines::Line;
use crate::policy::{Event, Vector};
use crate::rows::{decode as decode_rows, encode as encode_rows};
use crate::state::StateError;

/// What a rank has published.
#[derive(Default)]
struct Published {
    version: u64,
    word: u64,
    elements: Option<Arc<[f32]>>,
    /// Of a table.
    stamps: Option<Arc<[f32]>>,
}

/// The vectors of a rank on the heap; those that a scheme does not name are empty.
#[derive(Default)]
struct LocalVectors {
    vectors: [Vec<f32>; Vector::COUNT],
    published: Published,
    /// Of a table: the elements of a row, and which rows were published when.
    stamps: Option<(usize, Stamps)>,
}

impl Vectors for LocalVectors {
    fn pieces<const N: usize>(&mut self, names: [Vector; N], piece: &Range<usize>) -> [&mut [f32]; N] {
        let vectors = self.vectors.get_disjoint_mut(names.map(Vector::index)).expect("different vectors");
        vectors.map(|vector| &mut vector[piece.clone()])
    }

    fn step(&mut self, _: &Range<usize>) -> Result<(), PolicyError> {
        Err(PolicyError::NoOptimizer)
    }

    fn publish(&mut self, vector: Vector, piece: &Range<usize>, word: u64) {
        let share = &self.vectors[vector.index()][piece.clone()];
        let Published { version, word: published_word, elements, stamps } = &mut self.published;
        (*version, *published_word) = (*version + 1, word);
        *stamps = self.stamps.as_mut().map(|(row, stamps)| Arc::from(stamps.publish(share, *row)));
        // Nobody reads the version before: its memory will do.
        match elements.as_mut().and_then(Arc::get_mut).filter(|memory| memory.len() == share.len()) {
            Some(memory) => memory.copy_from_slice(share),
            None => *elements = Some(Arc::from(share)),
        }
    }
}

/// A copy of a piece of a vector, for all writes that a rank asks for at a time.
#[derive(Debug)]
pub(crate) struct Copied {
    vector: Vector,
    piece: Range<usize>,
    copy: Arc<[f32]>,
}

/// What an all-reduce is of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wanted {
    /// The average of a piece.
    Average { vector: Vector, piece: Range<usize>, compression: Compression },
    /// The sums of so many numbers.
    Total { numbers: usize },
}

impl fmt::Display for Wanted {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Average { vector, piece, .. } => write!(formatter, "the {} {piece:?}", vector.name()),
            Self::Total { numbers } => write!(formatter, "{numbers} numbers"),
        }
    }
}

/// The vector of a checkpoint with the velocity of the optimizer.
const OPTIMIZER: &str = "optimizer";

/// A rank's vectors, and the optimizer that steps in pieces of them.
struct Stepping<'a> {
    vectors: &'a mut LocalVectors,
    sgd: &'a RefCell<&'a mut Sgd>,
}

impl Vectors for Stepping<'_> {
    fn pieces<const N: usize>(&mut self, names: [Vector; N], piece: &Range<usize>) -> [&mut [f32]; N] {
        self.vectors.pieces(names, piece)
    }

    fn step(&mut self, piece: &Range<usize>) -> Result<(), PolicyError> {
        let [parameters, gradient] = self.vectors.pieces([Vector::Parameters, Vector::Gradient], piece);
        self.sgd.borrow_mut().step_piece(piece.clone(), parameters, gradient);
        Ok(())
    }

    fn publish(&mut self, vector: Vector, piece: &Range<usize>, word: u64) {
        self.vectors.publish(vector, piece, word);
    }
}

/// What computing reads, and what it writes.
const COMPUTED_WITH: [Vector; 2] = [Vector::Parameters, Vector::Gradient];

/// A gradient that is computed.
#[derive(Clone, Copy)]
struct InComputing {
    step: u64,
    since: Nanos,
    /// Without waiting for buckets.
    time: Duration,
    waited: Duration,
    /// The bucket for which the forward pass waits, and since when.
    waits: Option<(Bucket, Nanos)>,
    /// Whether the forward pass has, or comes to, all buckets without waiting.
    has_all: bool,
    /// When its first bucket is ready, once the backward pass is to begin.
    ready_from: Nanos,
    /// Once it is there.
    loss: Option<f32>,
}

impl InComputing {
    /// How long it has computed.
    fn computed(&self, now: Nanos) -> Duration {
        let waits = self.waits.map_or(Duration::ZERO, |(_, since)| now.since(since));
        now.since(self.since).saturating_sub(self.waited + waits)
    }
}

/// See the module.
pub(crate) struct SimulatedRank {
    number: Rank,
    interpreter: Interpreter,
    vectors: LocalVectors,
    sgd: Sgd,
    passes: Passes,
    in_computing: Option<InComputing>,
    /// Of all gradients that are complete.
    computed: Duration,
    /// The step that comes next.
    step: u64,
    operations: u64,
    bytes: u64,
    /// Lines that it leaves and that have not ended.
    leaving: usize,
    /// Whether it has ended before its last step.
    is_lost: bool,
    /// By peer, of a table: the stamps of its share, as it was read last.
    known_stamps: Vec<Option<Arc<[f32]>>>,
}

impl SimulatedRank {
    pub(crate) fn new(
        number: Rank,
        plan: Plan,
        initial: &[f32],
        learner: &impl Learner,
        settings: &Settings,
    ) -> Self {
        let passes = Passes::new(&learner.layout(), &learner.work(), &plan.buckets);
        let mut vectors = LocalVectors::default();
        for vector in &plan.vectors {
            vectors.vectors[vector.index()] = vec![0.0; plan.parameters];
        }
        vectors.vectors[Vector::Parameters.index()].copy_from_slice(initial);
        let row = plan.window.and_then(|window| window.row);
        vectors.stamps = row.map(|row| (row, Stamps::default()));
        let sgd = Sgd::new(plan.parameters, settings.learning_rate, settings.momentum);
        let peers = plan.window.map_or(0, |window| window.ranks as usize);
        Self {
            number,
            interpreter: Interpreter::new(plan, true),
            vectors,
            sgd,
            passes,
            in_computing: None,
            computed: Duration::ZERO,
            step: 0,
            operations: 0,
            bytes: 0,
            leaving: 0,
            is_lost: false,
            known_stamps: vec![None; if row.is_some() { peers } else { 0 }],
        }
    }

    /// The state of this rank, which is at rest at this time.
    pub(crate) fn save(&mut self, now: Nanos) -> Result<RankState, StateError> {
        let mut own = [now.0, self.computed.as_nanos() as u64, self.bytes];
        let mut saved = self.interpreter.save(&mut self.vectors, &mut own)?;
        saved.insert(OPTIMIZER, self.sgd.velocity());
        Ok(saved)
    }

    /// Takes the state of a rank over; returns the time at which it was saved.
    pub(crate) fn restore(&mut self, saved: &RankState) -> Result<Nanos, CheckpointError> {
        let mut own = [0; 3];
        self.interpreter.restore(saved, &mut self.vectors, &mut own)?;
        let velocity = vector(saved, OPTIMIZER, self.interpreter.parameters())?;
        self.sgd.velocity_mut().copy_from_slice(velocity);
        let [now, computed, bytes] = own;
        (self.computed, self.bytes) = (Duration::from_nanos(computed), bytes);
        self.step = self.interpreter.next_step();
        Ok(Nanos(now))
    }

    /// Whether it has come to rest before a checkpoint.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.interpreter.is_at_rest()
    }

    /// Copies what the writes among these requests send of one vector, once for all of them: before
    /// the last of them is taken nothing changes. Of a table each write has rows of its own.
    pub(crate) fn copy_for(&mut self, requests: &[Request]) -> Option<Copied> {
        let mut all: Option<(Vector, Range<usize>)> = None;
        for request in requests {
            let Request::Write { from, piece, .. } = request else { continue };
            let (vector, covered) = all.get_or_insert_with(|| (*from, piece.clone()));
            if vector == from {
                *covered = covered.start.min(piece.start)..covered.end.max(piece.end);
            }
        }
        let (vector, piece) = all.filter(|_| self.row().is_none())?;
        let copy = Arc::from(&*self.piece(vector, &piece));
        Some(Copied { vector, piece, copy })
    }

    /// The elements of a write: of the copy, if it has them.
    pub(crate) fn elements(
        &mut self,
        copied: Option<&Copied>,
        vector: Vector,
        piece: &Range<usize>,
    ) -> Elements {
        if let Some(copied) = copied.filter(|copied| copied.vector == vector) {
            let begin = copied.piece.start;
            return Elements::part(copied.copy.clone(), piece.start - begin..piece.end - begin);
        }
        let (row, mut memory) = (self.row(), Vec::new());
        Elements::whole(Arc::from(encode_rows(self.piece(vector, piece), row, &mut memory)))
    }

    /// Stores the elements of a write that has come.
    pub(crate) fn take_arrival(&mut self, elements: &[f32]) {
        let plan = self.interpreter.window().expect("a peer with the same plan has written");
        let share = plan.share(self.number, self.interpreter.parameters());
        let row = self.row();
        decode_rows(elements, row, self.piece(Vector::Arrival, &share));
    }

    /// Elements of a row, of a table.
    pub(crate) fn row(&self) -> Option<usize> {
        self.interpreter.window().and_then(|plan| plan.row)
    }

    /// The version, the word and the elements that are published.
    pub(crate) fn published(&self) -> (u64, u64, Option<Arc<[f32]>>) {
        let Published { version, word, elements, .. } = &self.vectors.published;
        (*version, *word, elements.clone())
    }

    /// The stamps of the rows that are published, of a table.
    pub(crate) fn stamps(&self) -> Option<Arc<[f32]>> {
        self.vectors.published.stamps.clone()
    }

    /// Notes a read of so many elements that a peer has published, with these stamps if it has
    /// rows. Returns the bytes that a real rank would read, and whether it would read stamps first.
    pub(crate) fn read(&mut self, from: Rank, stamps: Option<Arc<[f32]>>, len: usize) -> (u64, bool) {
        let (mut elements, mut asks_twice) = (len, false);
        if let Some((row, stamps)) = self.row().zip(stamps) {
            let known = self.known_stamps[from as usize].replace(stamps.clone());
            let rows = |known: &Arc<[f32]>| changed(known, &stamps, row).map(|run| run.len()).sum();
            elements = stamps.len() + known.as_ref().map_or(len, rows);
            asks_twice = known.is_some();
        }
        let bytes = (size_of::<f32>() * elements) as u64;
        self.count(bytes);
        (bytes, asks_twice)
    }

    /// The rank for whose word it waits, if it waits.
    pub(crate) fn awaits(&self) -> Rank {
        self.interpreter.awaits().unwrap_or(self.number)
    }

    /// Whether its policy has come to its end.
    pub(crate) fn has_ended(&self) -> bool {
        self.interpreter.has_ended()
    }

    /// Whether it has made all its steps.
    pub(crate) fn has_made_all_steps(&self) -> bool {
        self.interpreter.has_made_all_steps()
    }

    /// It ends before the step that comes next.
    pub(crate) fn lose(&mut self) {
        self.is_lost = true;
    }

    /// Whether it has ended before its last step.
    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Leaves all of its lines; there is at least one.
    pub(crate) fn leave(&mut self) {
        self.leaving = self.lines().len();
    }

    /// A line that it leaves has ended; returns whether all have.
    pub(crate) fn has_left(&mut self) -> bool {
        self.leaving = self.leaving.saturating_sub(1);
        self.leaving == 0
    }

    /// The elements that it publishes, and its slots at each peer, the last of which is for words;
    /// if it reads, writes or tells.
    pub(crate) fn window(&self) -> Option<(usize, u16)> {
        let plan = self.interpreter.window()?;
        Some((plan.published(self.interpreter.parameters()), plan.slots + 1))
    }

    /// Its slots at each peer for writes, if it writes.
    pub(crate) fn slots(&self) -> u16 {
        self.interpreter.window().map_or(0, |plan| plan.slots)
    }

    /// Its lines.
    pub(crate) fn lines(&self) -> &[Line] {
        self.interpreter.lines()
    }

    pub(crate) fn is_computing(&self) -> bool {
        self.in_computing.is_some()
    }

    /// Counts bytes of vectors that this rank moves.
    pub(crate) fn count(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    pub(crate) fn number(&self) -> Rank {
        self.number
    }

    /// The step that comes next.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn remark(&self) -> Option<String> {
        self.interpreter.remark()
    }

    pub(crate) fn agreement(&self) -> Agreement {
        self.interpreter.agreement()
    }

    pub(crate) fn staleness(&self) -> Staleness {
        self.interpreter.staleness()
    }

    pub(crate) fn deliver(
        &mut self,
        event: Event,
        now: Nanos,
        requests: &mut Vec<Request>,
    ) -> Result<(), PolicyError> {
        let sgd = RefCell::new(&mut self.sgd);
        let mut optimizer =
            |parameters: &mut [f32], gradient: &[f32]| sgd.borrow_mut().step(parameters, gradient);
        let mut vectors = Stepping { vectors: &mut self.vectors, sgd: &sgd };
        self.interpreter.deliver(event, now, &mut vectors, &mut optimizer, requests)
    }

    /// Counts an operation; returns how many came before.
    pub(crate) fn ask(&mut self) -> u64 {
        self.operations += 1;
        self.operations - 1
    }

    /// Encodes a piece for all owners of its parts.
    pub(crate) fn encode(&mut self, parts: &Parts, vector: Vector, piece: &Range<usize>, out: &mut Vec<u8>) {
        encode(&mut self.vectors, parts, vector, piece, out);
    }

    /// Encodes the average of the parts of all ranks that this rank owns.
    pub(crate) fn combine(&mut self, parts: &Parts, piece: &Range<usize>, blocks: &[u8], out: &mut Vec<u8>) {
        combine(&mut self.vectors, parts, self.number, piece, blocks, out);
    }

    /// All of a vector.
    pub(crate) fn whole(&mut self, vector: Vector) -> &mut [f32] {
        let all = 0..self.interpreter.parameters();
        self.piece(vector, &all)
    }

    /// A piece of a vector.
    pub(crate) fn piece(&mut self, vector: Vector, piece: &Range<usize>) -> &mut [f32] {
        let [piece] = self.vectors.pieces([vector], piece);
        piece
    }

    /// Begins a gradient that takes this time. Returns the bucket that the forward pass needs
    /// first, if it asks for buckets.
    pub(crate) fn begin_computing(&mut self, step: u64, now: Nanos, time: Duration) -> Option<Bucket> {
        let asks = self.interpreter.is_by_bucket();
        let waited = Duration::ZERO;
        let computing = InComputing {
            step,
            since: now,
            time,
            waited,
            waits: None,
            has_all: !asks,
            ready_from: now,
            loss: None,
        };
        self.in_computing = Some(computing);
        self.step = step;
        let last = self.interpreter.buckets().len().checked_sub(1);
        last.filter(|_| asks)
    }

    /// Goes on with the forward pass at a bucket, or waits for it. Returns when the pass is over
    /// with it.
    pub(crate) fn pass_forward(&mut self, bucket: Bucket, now: Nanos) -> Option<Nanos> {
        let is_supplied = self.interpreter.is_supplied(bucket);
        let computing = self.in_computing.as_mut()?;
        if !is_supplied {
            computing.waits = Some((bucket, now));
            return None;
        }
        computing.has_all = bucket == 0;
        Some(Nanos(now.0.saturating_add(self.passes.forward(computing.time, bucket))))
    }

    /// Ends the waiting for a bucket; returns whether the forward pass has waited for it.
    pub(crate) fn end_waiting(&mut self, bucket: Bucket, now: Nanos) -> bool {
        let Some(computing) = &mut self.in_computing else { return false };
        let waited = computing.waits.take_if(|(waits_for, _)| *waits_for == bucket);
        computing.waited += waited.map_or(Duration::ZERO, |(_, since)| now.since(since));
        waited.is_some()
    }

    /// Notes when the backward pass of the gradient that was begun begins.
    pub(crate) fn begin_backward(&mut self, begin: Nanos) {
        let ready_from = if self.buckets() > 0 { self.ready_at(begin, 0) } else { begin };
        if let Some(computing) = &mut self.in_computing {
            computing.ready_from = ready_from;
        }
    }

    /// When the first bucket is ready of the gradient that was begun.
    pub(crate) fn ready_from(&self) -> Nanos {
        self.in_computing.map_or(Nanos::ZERO, |computing| computing.ready_from)
    }

    /// The number of buckets of its gradients.
    pub(crate) fn buckets(&self) -> usize {
        self.interpreter.buckets().len()
    }

    /// When a bucket is ready, of the gradient that was begun and whose backward pass begins then.
    pub(crate) fn ready_at(&self, begin: Nanos, bucket: Bucket) -> Nanos {
        Nanos(begin.0.saturating_add(self.passes.ready(self.computing_time(), bucket)))
    }

    /// When all buckets are.
    pub(crate) fn backward_end(&self, begin: Nanos) -> Nanos {
        Nanos(begin.0.saturating_add(self.passes.backward(self.computing_time())))
    }

    /// Of the gradient that was begun, without waiting for buckets.
    fn computing_time(&self) -> Duration {
        self.in_computing.map_or(Duration::ZERO, |computing| computing.time)
    }

    /// When the forward pass is over that begins now and waits for nothing.
    pub(crate) fn forward_end(&self, now: Nanos) -> Nanos {
        let time = self.computing_time();
        let forward = time.as_nanos() as u64 - self.passes.backward(time);
        Nanos(now.0.saturating_add(forward))
    }

    /// Whether a gradient is begun, has all parameters, and is not there.
    pub(crate) fn lacks_gradient(&self) -> bool {
        self.in_computing.is_some_and(|computing| computing.has_all && computing.loss.is_none())
    }

    /// Lends its vectors to a thread that computes the gradient that was begun.
    pub(crate) fn lend(&mut self) -> Task {
        let lend = |vector: Vector| std::mem::take(&mut self.vectors.vectors[vector.index()]);
        Task::new(self.number, self.step, COMPUTED_WITH.map(lend))
    }

    /// Takes them back with the gradient.
    pub(crate) fn take_back(&mut self, task: Task) {
        let (loss, vectors) = task.ended();
        for (vector, elements) in COMPUTED_WITH.into_iter().zip(vectors) {
            self.vectors.vectors[vector.index()] = elements;
        }
        if let Some(computing) = &mut self.in_computing {
            computing.loss = Some(loss);
        }
    }

    /// The step and the loss of the gradient that was begun, if the loss is not finite.
    pub(crate) fn infinite_loss(&self) -> Option<(u64, f32)> {
        let InComputing { step, loss, .. } = self.in_computing?;
        loss.filter(|loss| !loss.is_finite()).map(|loss| (step, loss))
    }

    pub(crate) fn end_computing(&mut self, now: Nanos) {
        if let Some(computing) = self.in_computing.take() {
            self.computed += computing.computed(now);
            self.step = computing.step + 1;
        }
    }

    /// How long it has computed so far.
    pub(crate) fn computing(&self, now: Nanos) -> Duration {
        self.computed + self.in_computing.map_or(Duration::ZERO, |computing| computing.computed(now))
    }
}
