//! What a training scheme decides: events come in, actions go out.
//!
//! A [`Policy`] is one rank's part of a scheme. It holds no tensor and no clock, and does no input
//! or output: vectors have names ([`Vector`]), and arithmetic is an action ([`Update`]). A driver
//! carries the actions out and tells the policy what happened, on real ranks
//! ([`Trainer`](crate::Trainer)) or in virtual time ([`Simulation`](crate::Simulation)).
//!
//! **Invariants**, which both drivers check:
//!
//! * Actions are a function of the events so far and their times.
//! * An operation is asked for once, and ends once.
//! * No update and no computing writes a piece that an operation under way uses, or reads a piece
//!   that it writes.
//! * While computing and operations end and words come, each rank computes, waits for an operation,
//!   or says that it waits for a word ([`Action::Await`]), until its last step.
//! * A word is what a peer says, and a peer may be of another version, or lie. Whatever words come,
//!   a policy keeps these invariants, or refuses the word ([`Action::Refuse`]).
//!
//! **One-sided exchanges.** A plan with a [`WindowPlan`](crate::shares::WindowPlan) gives each rank
//! a *share* of the elements. A rank [publishes](Action::Publish) its own share, of any vector.
//! Peers [read](Action::Read) the share that a rank has published, and [write](Action::Write) to
//! the rank what lies in its share. Writes and [words](Action::Tell) come in the order of their
//! writer, each once. A rank that computes hears of them when its gradient is complete, before
//! [`Event::Computed`].
//!
//! **Writes that nobody waits for.** A rank has few credits for writes to a peer, and a slow peer
//! gives them back late. So a write says whether it [waits](Action::Write) for a credit. One that
//! does not wait, and finds none, is *refused*: nothing was sent, and its rank is told at once,
//! before the step that is computed meanwhile has ended, and before [`Event::Pause`] and
//! [`Event::Stop`]. What becomes of its elements is the policy's: it takes the exchange back, or
//! keeps them for a later write. So each element that a scheme conserves is at any time in one
//! place: sent, taken back, or kept. A rank that stops sends what it has kept by writes that wait.
//! One that rests does the same, or has it in its state.

use std::ops::Range;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;
use serde::{Deserialize, Serialize};

use crate::compression::Compression;
use crate::layout::Bucket;
use crate::state::{Remembered, State, StateError};

/// One rank's decisions.
pub trait Policy: Send {
    /// Takes an event and appends the actions that follow from it. `now` is the time since the
    /// training began.
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions);

    /// Names all that it remembers, for a checkpoint. It is asked only between [`Event::Pause`] and
    /// [`Event::Resume`], with nothing under way; a policy that is restored is a new one.
    ///
    /// A policy that does not say keeps no checkpoints.
    fn state(&mut self, state: &mut State<'_>) {
        state.refuse(StateError::Unsupported);
    }

    /// In a session, after [`Event::Committed`]: the step with which a process begins that joins
    /// then, the same on all members. `next` is the step that comes next on this one.
    fn joins_at(&self, next: u64) -> u64 {
        next
    }

    /// What people are to be told of the training so far: that a key of the scheme has a value by
    /// which it does not do what it is for.
    fn remark(&self) -> Option<String> {
        None
    }
}

/// What happened on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The training begins; all ranks have the same parameters. No rank reads before all have
    /// published what they publish now.
    Start,
    /// The gradient of a bucket is complete, while later buckets are still computed. Each bucket
    /// becomes ready once a step, before [`Event::Computed`].
    Ready(Bucket),
    /// The forward pass of a step that was asked for by [`Action::Begin`] comes to a bucket: it
    /// waits for [`Action::Supply`], if that has not been. Each bucket is needed once a step,
    /// before it is ready.
    Needed(Bucket),
    /// One of the sums that [`Action::Total`] has asked for. All of them come before the operation
    /// is done.
    Totalled {
        /// The place of the number.
        place: u32,
        /// The sum over all ranks, modulo 2⁶⁴.
        total: u64,
    },
    /// The gradient of this step is complete.
    Computed {
        /// The step, from 0.
        step: u64,
    },
    /// An operation has ended, with its result in place.
    Done(OperationId, Outcome),
    /// A peer's write has come. [`Vector::Arrival`] holds its elements during this event.
    Arrived {
        /// The writer.
        from: Rank,
        /// The word that it gave.
        word: u64,
    },
    /// A peer's word has come.
    Told {
        /// The peer.
        from: Rank,
        /// The word.
        word: u64,
    },
    /// A checkpoint will be made before the step that was asked for by [`Action::Compute`]; it is
    /// not computed. Ranks pause before the same step, and what is under way comes to its end. A
    /// policy that others wait for goes on until they do not.
    Pause,
    /// The training goes on after [`Event::Pause`], perhaps in another process, where nothing is
    /// published. The policy asks for the step again.
    Resume,
    /// All members of the session are done with what [`Action::Commit`] asked about: it counts on
    /// all of them. None but a training in a session is told so.
    Committed,
    /// The members of the session have changed, or could not end a step or an exchange. What was
    /// under way is over without a result, and no member has applied anything of it. The policy
    /// asks for it again. It is the first event of a training in a session, and none but such a
    /// training is told so.
    Membership {
        /// The number of members.
        ranks: u32,
        /// The step that comes next: the first one that is not computed to its end, or, where each
        /// step is one of the session, that of the session. To a process that joins: the step with
        /// which it begins.
        step: u64,
        /// The exchanges, or steps, that count so far.
        committed: u64,
    },
    /// The last step was the one before: what was asked for by [`Action::Compute`] is not computed.
    Stop,
}

/// The result of an operation, besides what it left in a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// An average is there.
    Averaged,
    /// All sums were told.
    Totalled,
    /// The combined contributions of a round are there.
    Combined {
        /// The number of ranks whose contributions they are; 0 where nothing was contributed.
        contributors: u32,
    },
    /// All ranks have left the lines.
    Left {
        /// Whether the vector that was named holds late contributions.
        carries: bool,
    },
    /// A share of a peer is there.
    Read {
        /// Which of the versions that the peer has published, from 1; 0 before the first, which is
        /// zeros. A torn share has elements of this version and of newer ones.
        version: u64,
        /// The word that the peer published with it; 0 with a torn share.
        word: u64,
    },
    /// A write is on its way, and its elements may be changed.
    Written,
    /// A write that does not wait found no credit: nothing was sent.
    Refused {
        /// The peer.
        by: Rank,
    },
}

/// What is to be done on this rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Action {
    /// Computes the gradient of a batch at the present parameters into [`Vector::Gradient`].
    Compute {
        /// The step, from 0.
        step: u64,
    },
    /// As [`Action::Compute`], bucket by bucket: computing uses a bucket, its parameters and its
    /// gradient, from its [`Action::Supply`] on. The pass asks for a bucket by [`Event::Needed`].
    Begin {
        /// The step, from 0.
        step: u64,
    },
    /// Lets the step that was begun compute with a bucket.
    Supply {
        /// The bucket.
        bucket: Bucket,
    },
    /// Adds numbers of all ranks up, modulo 2⁶⁴. All ranks ask for it at the same place among their
    /// averages, with as many numbers. The sums come as [`Event::Totalled`].
    Total {
        /// Its number, larger than those of all operations before.
        id: OperationId,
        /// The numbers of this rank.
        numbers: Vec<u64>,
    },
    /// Starts an all-reduce: replaces a piece of a vector by its average over all ranks. All ranks
    /// ask for the same pieces in the same order.
    Average {
        /// Its number, larger than those of all operations before.
        id: OperationId,
        /// The vector.
        vector: Vector,
        /// The elements.
        piece: Range<usize>,
    },
    /// As [`Action::Average`], of elements that are encoded on their way; see
    /// [`crate::compression`]. What encoding loses is kept in [`Vector::Residual`] and
    /// [`Vector::OwnedResidual`].
    AverageCompressed {
        /// Its number, larger than those of all operations before.
        id: OperationId,
        /// The vector.
        vector: Vector,
        /// The elements.
        piece: Range<usize>,
        /// How they are encoded.
        compression: Compression,
    },
    /// Contributes a vector to a round of a [line](crate::lines::Line): replaces it by the combined
    /// contributions of the round that counts it, or of the newest round that did not wait for it.
    /// If the next round has a number above the limit and this rank has seen all rounds before it,
    /// then nothing is contributed, the vector stays as it is, and the outcome has no contributors.
    Contribute {
        /// Its number, larger than those of all operations before.
        id: OperationId,
        /// Which of the plan's lines.
        line: usize,
        /// The vector.
        vector: Vector,
        /// The highest number of a round, from 0, that this rank waits for.
        limit: u64,
    },
    /// Says, at once, that this rank gives nothing to a line before it contributes again: nobody
    /// waits for it there.
    StepAside {
        /// Which of the plan's lines.
        line: usize,
    },
    /// Says, at once, that a line is to wait for this rank again.
    ComeBack {
        /// Which of the plan's lines.
        line: usize,
    },
    /// Says that this rank gives nothing to any line any more; ends when all ranks of its lines
    /// have said so. After [`Event::Resume`] all ranks are in new lines, whose rounds count from 0.
    Leave {
        /// Its number, larger than those of all operations before.
        id: OperationId,
        /// Where the late contributions go that no round had combined before: the last one combines
        /// them, with the same result on all ranks. Of a plan with one line.
        into: Option<Vector>,
    },
    /// Reads the share that a peer has published.
    Read {
        /// Its number, larger than those of all operations before.
        id: OperationId,
        /// The peer.
        from: Rank,
        /// Where the elements go, at their own places.
        into: Vector,
        /// Whether they are of one version.
        reads: Reads,
    },
    /// Writes to a peer what lies in the peer's share. There is a credit for it while the peer has
    /// fewer writes of this rank that it has not heard of than [`WindowPlan::slots`] says.
    ///
    /// [`WindowPlan::slots`]: crate::shares::WindowPlan::slots
    Write {
        /// Its number, larger than those of all operations before.
        id: OperationId,
        /// The peer.
        to: Rank,
        /// The vector.
        from: Vector,
        /// Goes with the elements.
        word: u64,
        /// Whether it waits for a credit. If not, it ends with [`Outcome::Refused`] where there is
        /// none, or where a message to the peer waits before it.
        waits: bool,
    },
    /// Publishes this rank's share of a vector, at once.
    Publish {
        /// The vector.
        vector: Vector,
        /// Goes with the elements.
        word: u64,
    },
    /// Sends a peer a word.
    Tell {
        /// The peer.
        to: Rank,
        /// The word.
        word: u64,
    },
    /// Asks whether all members of the session are done with a step, or with an exchange, before
    /// any of it is applied. All members ask the same questions in the same order. The answer is
    /// [`Event::Committed`] or [`Event::Membership`].
    Commit {
        /// The number of the step, or of the exchange since this member came, from 0.
        step: u64,
    },
    /// Says that this rank waits for a word or a write, if nothing else is under way. It holds
    /// until the next event.
    Await {
        /// A rank without whose word this one does not go on.
        from: Rank,
    },
    /// Computes with the vectors of this rank, at once.
    Update(Update),
    /// Works with this rank's shard of a table, at once.
    Table(TableAction),
    /// Says that a vector has the same bits on all ranks here. Drivers compare them. Staleness is
    /// counted from here if these are the parameters.
    Agreed(Vector),
    /// Says that the parameters now hold work of other ranks: staleness is counted from here.
    Exchanged,
    /// Says whether the scheme has lost nothing that it conserves, as far as this rank can see.
    Conserved(bool),
    /// Refuses a word of a peer, or of its write: no rank sends it at that place. This rank ends
    /// with an error that names the peer.
    Refuse {
        /// The peer.
        from: Rank,
        /// The word.
        word: u64,
    },
}

/// What a read takes while the peer publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Reads {
    /// One version of all elements.
    Consistent,
    /// The bytes as they are, of several versions.
    Torn,
}

/// What is done with a rank's shard of a [`Table`](crate::table::Table), whose elements are the
/// rank's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum TableAction {
    /// The table begins with the elements of a vector.
    Begin {
        /// The vector.
        from: Vector,
        /// Whether values depend only on which updates the shard holds. If not, updates are added
        /// in the order in which they come, and none is pending.
        is_ordered: bool,
    },
    /// Adds the next clock's update of a rank.
    Add {
        /// The rank.
        rank: Rank,
        /// The vector that holds the update.
        from: Vector,
    },
    /// Stores the shard's value in a vector.
    Read {
        /// The vector.
        into: Vector,
        /// Whether updates of clocks count that are not complete.
        with_pending: bool,
    },
}

/// The number of an operation on its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct OperationId(pub u64);

/// Numbers for the operations of a policy, each larger than those before.
#[derive(Debug, Default)]
pub struct OperationIds(u64);

impl OperationIds {
    /// The next number.
    pub fn take(&mut self) -> OperationId {
        self.0 += 1;
        OperationId(self.0 - 1)
    }
}

impl Remembered for OperationIds {
    fn visit(&mut self, state: &mut State<'_>) {
        state.field(&mut self.0);
    }
}

/// A vector of one rank, as long as the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum Vector {
    /// The parameters.
    Parameters,
    /// The gradient of the last batch.
    Gradient,
    /// Parameters of this rank at an earlier time, as after the last exchange.
    Anchor,
    /// A change: what local steps changed, or how far parameters and centre are pulled together.
    Delta,
    /// The velocity of an optimizer that is a part of the scheme. Local optimizers keep their own.
    Velocity,
    /// The centre of elastic averaging: this rank's share of it, and other shares as they were
    /// read.
    Centre,
    /// What was read, or has come, from peers.
    Fetched,
    /// This rank's part of a sum over all ranks; in a session, what is exchanged.
    Sum,
    /// What this rank sends the next time: what encoding has lost of its elements, or changes whose
    /// write was refused.
    Residual,
    /// What encoding has lost of averages that this rank owns.
    OwnedResidual,
    /// The elements of a write that has come, at their own places. Nothing else than
    /// [`Event::Arrived`] fills it, and no event but that may read it.
    Arrival,
}

impl Vector {
    /// The number of vectors.
    pub const COUNT: usize = 11;

    /// Its place among all.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Its name in a message.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradient => "gradient",
            Self::Anchor => "anchor",
            Self::Delta => "delta",
            Self::Velocity => "velocity",
            Self::Centre => "centre",
            Self::Fetched => "fetched elements",
            Self::Sum => "sum",
            Self::Residual => "residual",
            Self::OwnedResidual => "owned residual",
            Self::Arrival => "arrival",
        }
    }
}

/// Arithmetic on vectors of one rank, element by element.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub enum Update {
    /// A step of the local optimizer: [`Vector::Parameters`] by [`Vector::Gradient`], all elements.
    Step,
    /// A step of the local optimizer in some elements, by those of [`Vector::Gradient`].
    StepPiece {
        /// The elements.
        piece: Range<usize>,
    },
    /// `into ← from`.
    Copy {
        /// Is read.
        from: Vector,
        /// Is written.
        into: Vector,
        /// The elements.
        piece: Range<usize>,
    },
    /// `into ← alpha·into + beta·from`.
    Mix {
        /// Is read and written.
        into: Vector,
        /// The share of it that is kept.
        alpha: f32,
        /// Is read.
        from: Vector,
        /// The share of that.
        beta: f32,
        /// The elements.
        piece: Range<usize>,
    },
    /// `vector ← factor·vector`.
    Scale {
        /// The vector.
        vector: Vector,
        /// The factor.
        factor: f32,
        /// The elements.
        piece: Range<usize>,
    },
    /// How far parameters and centre are pulled together: `Delta ← rate·(Parameters - Centre)`
    /// (Zhang, Choromanska and LeCun 2015, equations 5 and 6).
    Elastic {
        /// The moving rate.
        rate: f32,
        /// The elements.
        piece: Range<usize>,
    },
    /// The pseudo-gradient: `Delta ← Anchor - Parameters`.
    Difference {
        /// The elements.
        piece: Range<usize>,
    },
    /// A step of stochastic gradient descent with Nesterov momentum from the anchor against the
    /// pseudo-gradient, as PyTorch defines it: `Velocity ← momentum·Velocity + Delta`,
    /// `Anchor ← Anchor - learning_rate·(Delta + momentum·Velocity)`, `Parameters ← Anchor`.
    Outer {
        /// The learning rate.
        learning_rate: f32,
        /// The share of the velocity that is kept.
        momentum: f32,
        /// The elements.
        piece: Range<usize>,
    },
}

impl Update {
    /// The vectors that it reads and does not write.
    #[must_use]
    pub fn reads(&self) -> &[Vector] {
        match self {
            Self::Step | Self::StepPiece { .. } => &[Vector::Gradient],
            Self::Copy { from, .. } | Self::Mix { from, .. } => std::slice::from_ref(from),
            Self::Scale { .. } => &[],
            Self::Elastic { .. } => &[Vector::Parameters, Vector::Centre],
            Self::Difference { .. } => &[Vector::Anchor, Vector::Parameters],
            Self::Outer { .. } => &[Vector::Delta],
        }
    }

    /// The vectors that it writes.
    #[must_use]
    pub fn writes(&self) -> &[Vector] {
        match self {
            Self::Step | Self::StepPiece { .. } => &[Vector::Parameters],
            Self::Copy { into, .. } | Self::Mix { into, .. } | Self::Scale { vector: into, .. } => {
                std::slice::from_ref(into)
            }
            Self::Elastic { .. } | Self::Difference { .. } => &[Vector::Delta],
            Self::Outer { .. } => &[Vector::Velocity, Vector::Anchor, Vector::Parameters],
        }
    }

    /// The elements; `None` for all of them.
    #[must_use]
    pub fn piece(&self) -> Option<&Range<usize>> {
        match self {
            Self::Step => None,
            Self::Copy { piece, .. }
            | Self::Mix { piece, .. }
            | Self::Scale { piece, .. }
            | Self::Elastic { piece, .. }
            | Self::Difference { piece }
            | Self::StepPiece { piece }
            | Self::Outer { piece, .. } => Some(piece),
        }
    }
}

/// The actions that follow from an event, in order. The memory is used again for the next event.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Actions(Vec<Action>);

impl Actions {
    /// Appends an action.
    pub fn push(&mut self, action: Action) {
        self.0.push(action);
    }

    /// Appends [`Action::Update`].
    pub fn update(&mut self, update: Update) {
        self.push(Action::Update(update));
    }

    /// Appends [`Action::Average`], or [`Action::AverageCompressed`].
    pub fn average(&mut self, id: OperationId, vector: Vector, piece: Range<usize>, by: Compression) {
        self.push(match by {
            Compression::None => Action::Average { id, vector, piece },
            compression => Action::AverageCompressed { id, vector, piece, compression },
        });
    }

    /// Appends [`Action::Compute`].
    pub fn compute(&mut self, step: u64) {
        self.push(Action::Compute { step });
    }

    /// Takes all actions out, in order.
    pub fn drain(&mut self) -> impl Iterator<Item = Action> + '_ {
        self.0.drain(..)
    }

    /// The actions, in order.
    #[must_use]
    pub fn as_slice(&self) -> &[Action] {
        &self.0
    }
}
