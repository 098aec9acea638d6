//! Tensors by key between programs.
//!
//! A program sends a tensor under a [`Key`], and another program receives the tensor by that key.
//! The sender's side is a [`Server`], made of a [`TensorTable`] and a [`LeaseOwner`]. The
//! receiver's side are [`Calls`], with a [`LeaseHolder`]. They exchange [`Message`]s on a link,
//! which two [`Introduction`]s open. An [`ArenaPlan`] says where tensors lie that can be lent.
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | key | a step and a name; tensors of one key are received in the order in which they were sent | TensorFlow: rendezvous key |
//! | tensor table | the tensors that a program sent and that wait for a receiver, and the receives that wait for a tensor | TensorFlow: rendezvous |
//! | introduction | what two programs tell each other, in any RPC, to build a link | verbs: exchange of queue pair numbers; NCCL: unique id |
//! | link | two programs that lend memory to each other | verbs: connection |
//! | lease | memory of one program that another one reads in place until it drops the tensor | Plasma: pinned object; Rust: borrow |
//! | reference | what a message holds in the place of a tensor: link, lease, and the bytes | KServe: shared-memory region with offset and size |
//! | arena | lendable memory that the holders of one secret, a trust domain, may map | TensorFlow, Arrow: memory pool |
//! | incarnation | a number that a program draws at its start, so that a restarted one is another one | TensorFlow: the same |
//!
//! A program opens an [`Endpoint`], which listens and holds what the program sends. Another
//! program's endpoint connects to it ([`Peer`]) and receives.
//!
//! **Invariant:** what decides here is pure. Nothing outside of [`endpoint`] opens a socket or a
//! device, starts a thread or reads a clock: `now` is an argument, and each wait has a deadline.
//! Bytes of a peer are hostile until they are checked.

// Under loom there is only what is tested in all interleavings.
#[cfg(loom)]
#[path = "endpoint/returns.rs"]
mod returns;

#[forbid(unsafe_code)]
pub mod arena;
#[cfg(not(loom))]
#[forbid(unsafe_code)]
pub mod calls;
#[cfg(not(loom))]
pub mod endpoint;
#[cfg(not(loom))]
#[forbid(unsafe_code)]
pub mod gathered;
#[cfg(all(feature = "grpc", not(loom)))]
pub mod grpc;
#[cfg(all(feature = "inference", not(loom)))]
#[forbid(unsafe_code)]
pub mod inference;
#[cfg(not(loom))]
#[forbid(unsafe_code)]
pub mod introduction;
#[cfg(not(loom))]
#[forbid(unsafe_code)]
pub mod key;
#[forbid(unsafe_code)]
pub mod lease;
#[cfg(not(loom))]
#[forbid(unsafe_code)]
pub mod message;
#[forbid(unsafe_code)]
pub mod reference;
#[cfg(not(loom))]
#[forbid(unsafe_code)]
pub mod server;
#[cfg(not(loom))]
#[forbid(unsafe_code)]
pub mod table;
#[cfg(all(feature = "tensorflow", not(loom)))]
#[forbid(unsafe_code)]
pub mod tensorflow;

pub use arena::ArenaPlan;
#[cfg(not(loom))]
pub use calls::Calls;
#[cfg(not(loom))]
pub use endpoint::{
    ElementTypeError, Endpoint, EndpointLimits, EndpointOptions, ExchangeFabric, LinkError,
    OpenEndpointError, Peer, PendingTensor, ReceiveTensorError, ReceivedTensor, SendTensorError,
    SharedTensor, Tensor, TensorElement, TensorMemoryError, TensorShape, TensorWay, UntypedTensor,
};
#[cfg(not(loom))]
pub use introduction::Introduction;
#[cfg(not(loom))]
pub use key::Key;
pub use lease::{Lease, LeaseHolder, LeaseOwner};
#[cfg(not(loom))]
pub use message::Message;
pub use reference::Reference;
#[cfg(not(loom))]
pub use server::Server;
#[cfg(not(loom))]
pub use table::TensorTable;
