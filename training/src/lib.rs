//! Training over the ranks of a group.
//!
//! [`svm`] trains a support vector machine. The crate uses a [`Group`](pleach_collectives::Group)
//! as any program does: `tests/tidy` checks that each name which it imports from the crates below
//! is one that the facade `pleach` exports.

pub mod svm;
