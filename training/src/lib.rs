//! Training over the ranks of a group.
//!
//! A training [`Scheme`] is a rule by which ranks train one model. Its [`Policy`] decides, and a
//! driver carries out what was decided: a [`Trainer`] on the ranks of a group.
//! [`svm`] trains a support vector machine. The crate uses a [`Group`](pleach_collectives::Group)
//! as any program does: `tests/tidy` checks that each name which it imports from the crates below
//! is one that the facade `pleach` exports, or one of a clock, hashes and random numbers.
//!
//! The planners are pure. [`parallelize`] plans how a network is split over ranks, [`order`] in
//! which order gradients are exchanged, [`zipline`] where the barriers of ElasticBSP stand.

pub mod checkpoint;
pub mod compression;
mod copies;
pub mod hybrid;
pub mod interpreter;
pub mod layout;
mod learner;
pub mod ledger;
pub mod lines;
pub mod order;
mod outbox;
pub mod parallelize;
mod perceptron;
pub mod policy;
pub mod replay;
mod rows;
mod scheme;
pub mod shares;
pub mod simulation;
pub mod state;
pub mod svm;
pub mod table;
mod trainer;
pub mod zipline;

pub use hybrid::{Hybrid, HybridError};
pub use layout::{Bucket, Layout};
pub use learner::{Learner, Sgd};
pub use ledger::PolicyError;
pub use perceptron::{Passes, Perceptron, Reading, Sample};
pub use policy::Policy;
pub use rows::Rows;
pub use scheme::{
    AfterLoss, Axes, Exchange, ExchangeRule, Fragments, Parallelism, Refusal, Scheme, SchemeTextError, State,
    Timing,
};
pub use simulation::Simulation;
pub use trainer::{Progress, Step, TrainError, Trained, Trainer, VectorMemory};
