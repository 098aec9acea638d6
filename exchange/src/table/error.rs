//! Why requests at a table fail.

use std::sync::Arc;
use std::time::Duration;

use crate::key::Key;

/// Why a tensor was not sent.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The table can never hold it.
    #[error("tensor {key} has {bytes} bytes, and at most {limit} bytes are held here; raise the limit")]
    TooLarge {
        /// Its key.
        key: Key,
        /// Its length, in bytes.
        bytes: u64,
        /// The limit of all tensors held.
        limit: u64,
    },
    /// Too many sends wait already.
    #[error("tensor {key} was not sent: {limit} sends wait already until tensors are received")]
    TooManySends {
        /// The key.
        key: Key,
        /// The limit.
        limit: usize,
    },
    /// The table had no room until the deadline.
    #[error(
        "tensor {key} of {bytes} bytes was not sent within {waited:?}: {held} bytes of at most {limit} are \
         held here; receive or clean up tensors, or raise the limit"
    )]
    Timeout {
        /// The key.
        key: Key,
        /// Its length, in bytes.
        bytes: u64,
        /// How long the send waited.
        waited: Duration,
        /// The bytes of all tensors held.
        held: u64,
        /// Their limit.
        limit: u64,
    },
    /// The step was aborted.
    #[error("tensor {key} was not sent: the step was aborted: {reason}")]
    Aborted {
        /// The key.
        key: Key,
        /// Why.
        reason: Arc<str>,
    },
    /// The step was cleaned up.
    #[error("tensor {key} was not sent: the step was cleaned up")]
    CleanedUp {
        /// The key.
        key: Key,
    },
}

/// Why a tensor was not received.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// A request of this id was served or waits.
    #[error("request {request:016x} for tensor {key} came twice; ask anew with another id")]
    DuplicateRequest {
        /// The key.
        key: Key,
        /// The id.
        request: u64,
    },
    /// The sender was restarted since the receiver learnt of it.
    #[error(
        "tensor {key} is asked of incarnation {asked:016x}, and the sender was restarted as incarnation \
         {own:016x}; connect anew"
    )]
    WrongIncarnation {
        /// The key.
        key: Key,
        /// The incarnation that the receiver asks.
        asked: u64,
        /// That of the table.
        own: u64,
    },
    /// Too many receives wait already.
    #[error("tensor {key} was not received: {limit} receives wait already until tensors are sent")]
    TooManyReceives {
        /// The key.
        key: Key,
        /// The limit.
        limit: usize,
    },
    /// The tensor was not sent until the deadline.
    #[error("tensor {key} was not sent within {waited:?}; look for the sender, or wait longer")]
    Timeout {
        /// The key.
        key: Key,
        /// How long the receive waited.
        waited: Duration,
    },
    /// The step was aborted.
    #[error("tensor {key} was not received: the step was aborted: {reason}")]
    Aborted {
        /// The key.
        key: Key,
        /// Why.
        reason: Arc<str>,
    },
    /// The step was cleaned up.
    #[error("tensor {key} was not received: the step was cleaned up")]
    CleanedUp {
        /// The key.
        key: Key,
    },
}
