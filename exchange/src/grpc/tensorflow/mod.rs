//! `tensorflow.WorkerService`: tensors from and to tasks of TensorFlow, with or without pleach.
//!
//! A program of Rust is a task of the cluster. [`WorkerService`] answers the tasks that receive
//! from it, with the tensors that its endpoint sends; [`WorkerClient`] receives from a task.
//!
//! ```text
//! // What TensorFlow pulls:
//! let service = WorkerService::new(&endpoint, WorkerOptions::of("pleach", 0));
//! endpoint.send(&Key::new(ANY_STEP, &service.key("x", receiver))?, tensor.share())?;
//! Server::builder().add_service(service)
//! // What TensorFlow has produced:
//! let client = WorkerClient::connect(&endpoint, "host:2222").await?;
//! let received = client.receive(step, &key, limit).await?;
//! ```
//!
//! * The bytes come in the message, as TensorFlow sends them. Where the other task has pleach too,
//!   the plug-in of TensorFlow or this module, long tensors go by the exchange
//!   ([`crate::tensorflow::TransportOption`]).
//! * A tensor that pleach has no type for, of strings, or a dead one, is sent as [`share`],
//!   [`labelled`] and [`dead`] make it.
//! * A step that is aborted or cleaned up at the endpoint fails the receives that wait in it.
//!   CleanupGraph cleans up a step.
//!
//! **Invariant:** a tensor is given to one receiver. A receive that was cancelled, or ended at its
//! deadline, leaves the tensor for the next one, unless the task's answer was on its way just then.
//! An offer that nobody takes is withdrawn.
//!
//! **Limits:** a tensor that comes or goes in a message has less than 2 GiB. gRPC proves nobody:
//! whoever reaches the service receives what waits there.

mod client;
mod local;
mod service;

use tonic::Status;

pub use self::client::{Device, Received, WorkerClient};
pub use self::local::{dead, labelled, share};
pub use self::service::{ANY_STEP, WorkerOptions, WorkerService};
use crate::message::FailureKind;
use crate::tensorflow::TensorError;

/// The name of the service.
pub const SERVICE: &str = "tensorflow.WorkerService";

/// Shorter tensors are sent in the message: that costs less than a fetch behind it. The plug-in of
/// TensorFlow has the same bound.
const OFFERED_BYTES_MIN: usize = 512 << 10;

/// The longest message of protobuf, in bytes, and what of it may be beside a tensor's elements.
const MESSAGE_BYTES_MAX: usize = i32::MAX as usize;
const MESSAGE_BYTES_BESIDE: usize = 64 << 10;

/// The longest answer of a task, in bytes, that has no tensor: its devices are in one.
const OTHER_ANSWER_BYTES_MAX: usize = 4 << 20;

/// The method whose answer has a tensor.
const RECV_TENSOR: &str = "RecvTensor";

/// A failure in gRPC's words.
fn failed(kind: FailureKind, text: impl Into<String>) -> Status {
    match kind {
        FailureKind::Timeout => Status::deadline_exceeded(text),
        FailureKind::Aborted => Status::aborted(text),
        FailureKind::Exhausted => Status::resource_exhausted(text),
        FailureKind::NotFound => Status::not_found(text),
        FailureKind::Unavailable => Status::unavailable(text),
    }
}

impl From<TensorError> for Status {
    fn from(error: TensorError) -> Self {
        let text = error.to_string();
        match error {
            TensorError::Type { .. } => Self::unimplemented(text),
            TensorError::TooLarge { .. } => Self::resource_exhausted(text),
            _ => Self::data_loss(text),
        }
    }
}
