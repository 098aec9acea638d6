//! Tensors as tasks of TensorFlow send them by gRPC, without a socket.
//!
//! * [`messages`] has the messages of `tensorflow.WorkerService`.
//! * A [`TensorflowTensor`] is what a `TensorProto` holds: a type, dimensions, and elements, which
//!   are bytes or strings. It is read from either of the two forms that TensorFlow writes.
//! * [`TransportOption`] is what two programs with pleach say beside that, so that the bytes go by
//!   the exchange.
//!
//! `grpc::tensorflow` is the service and its client.
//!
//! **Invariant:** a [`TensorflowTensor`] has as many elements as its dimensions say. What a message
//! makes this program allocate is bounded by a limit of the caller, whatever dimensions it names.

mod element;
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "it is generated")]
pub mod messages;
mod options;
mod tensor;

pub use self::element::ElementKind;
pub use self::options::{INTRODUCTION_KEY, Offer, TransportOption};
pub use self::tensor::{TensorError, TensorflowTensor};
