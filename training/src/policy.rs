//! What a training scheme decides: events come in, actions go out.
//!
//! A [`Policy`] is one rank's part of a scheme. It holds no tensor and no clock, and does no input
//! or output: vectors have names ([`Vector`]), and arithmetic is an action ([`Update`]). A driver
//! carries the actions out and tells the policy what happened, on real ranks
//! ([`Trainer`](crate::Trainer)) or in virtual time ([`Simulation`](crate::Simulation)).
//!
//! **Invariants**, which both drivers check:
//!
//! * Actions are a function of the events so far.
//! * An operation is asked for once, and ends once.
//! * No update and no computing touches a piece that an operation under way reads or writes.
//! * While computing and operations end, each rank computes or waits for an operation until its
//!   last step.

use std::ops::Range;

use pleach_transport::clock::Nanos;

use crate::layout::Bucket;

/// One rank's decisions.
pub trait Policy: Send {
    /// Takes an event and appends the actions that follow from it. `now` is the time since the
    /// training began.
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions);
}

/// What happened on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The training begins; all ranks have the same parameters.
    Start,
    /// The gradient of a bucket is complete, while later buckets are still computed. Each bucket
    /// becomes ready once a step, before [`Event::Computed`].
    Ready(Bucket),
    /// The gradient of this step is complete.
    Computed {
        /// The step, from 0.
        step: u64,
    },
    /// An operation has ended, with its result in place.
    Done(OperationId),
    /// The last step was the one before: what was asked for by [`Action::Compute`] is not computed.
    Stop,
}

/// What is to be done on this rank.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Computes the gradient of a batch at the present parameters into [`Vector::Gradient`].
    Compute {
        /// The step, from 0.
        step: u64,
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
    /// Computes with the vectors of this rank, at once.
    Update(Update),
    /// Says that the parameters have the same bits on all ranks here. Drivers compare them.
    Agreed,
}

/// The number of an operation on its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationId(pub u64);

/// A vector of one rank, as long as the parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vector {
    /// The parameters.
    Parameters,
    /// The gradient of the last batch.
    Gradient,
    /// The parameters after the last exchange.
    Anchor,
    /// The pseudo-gradient: what local steps changed, with the opposite sign.
    Delta,
    /// The velocity of an outer optimizer. Local optimizers keep their own.
    Velocity,
}

impl Vector {
    /// The number of vectors.
    pub const COUNT: usize = 5;

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
        }
    }
}

/// Arithmetic on vectors of one rank, element by element.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// A step of the local optimizer: [`Vector::Parameters`] by [`Vector::Gradient`], all elements.
    Step,
    /// `into ← from`.
    Copy {
        /// Is read.
        from: Vector,
        /// Is written.
        into: Vector,
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
            Self::Step => &[Vector::Gradient],
            Self::Copy { from, .. } => std::slice::from_ref(from),
            Self::Difference { .. } => &[Vector::Anchor, Vector::Parameters],
            Self::Outer { .. } => &[Vector::Delta],
        }
    }

    /// The vectors that it writes.
    #[must_use]
    pub fn writes(&self) -> &[Vector] {
        match self {
            Self::Step => &[Vector::Parameters],
            Self::Copy { into, .. } => std::slice::from_ref(into),
            Self::Difference { .. } => &[Vector::Delta],
            Self::Outer { .. } => &[Vector::Velocity, Vector::Anchor, Vector::Parameters],
        }
    }

    /// The elements; `None` for all of them.
    #[must_use]
    pub fn piece(&self) -> Option<&Range<usize>> {
        match self {
            Self::Step => None,
            Self::Copy { piece, .. } | Self::Difference { piece } | Self::Outer { piece, .. } => Some(piece),
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
