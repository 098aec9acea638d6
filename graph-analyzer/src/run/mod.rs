//! Runs the parts of a graph, each on a rank of its own.
//!
//! A [`Job`] is what all ranks know: the model, its parts, and the [`Runtime`] that computes. Each
//! rank calls [`run_rank`], which cuts its part out of the model, and in each iteration receives
//! what the part needs, runs it, and sends what crosses. A [`TensorTransport`] carries the tensors:
//! [`Regions`] by registered memory of a device, with the protocol of [`channels`]. Another crate
//! may carry them in another way.
//!
//! No tensor is copied between the operator that computes it and the one that uses it. A runtime
//! that is told where to put its results writes them into registered memory. One that is not
//! ([rten]) gets registered memory from its allocator ([`allocator`]) once it is known which
//! allocation holds the result: from the second iteration on. Its other buffers then have the
//! places of a memory plan. Where ranks share memory the receiver reads the tensor in the memory of
//! its sender, and everywhere inputs are used where they are.
//!
//! A run has inputs that are known before it begins. Where they come one after another, a rank of
//! its own is the [`Caller`], which feeds them and drains the outputs; all others call
//! [`serve_rank`]. The iterations are those of a run, and so are the transfers.
//!
//! [`Job::reference`] has the results that a run must have.

pub mod allocator;
mod bytes;
mod caller;
pub mod channels;
mod inputs;
mod onnxruntime;
mod plan;
mod rank;
mod reference;
mod rten;
mod runtime;
mod states;
mod trace;
mod transport;

pub use self::allocator::TracingAllocator;
pub use self::caller::{Caller, Drained, FeedError};
pub use self::inputs::Tensor;
pub use self::onnxruntime::Onnxruntime;
pub use self::plan::{Copies, Job, JobError, Part, RankPlan};
pub use self::rank::{OnOutputs, RankError, RankOptions, RankReport, median, run_rank, serve_rank};
pub use self::reference::Reference;
pub use self::rten::Rten;
pub use self::runtime::{Output, Place, Program, Runtime, RuntimeError, TensorRef, Values};
pub use self::transport::{Regions, TensorTransport, TransportError, leave, tensor_memory};
