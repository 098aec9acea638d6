//! Tensors by key between programs.
//!
//! A program sends a tensor under a [`Key`], and another program receives the tensor by that key.
//!
//! | word | meaning | elsewhere |
//! | --- | --- | --- |
//! | key | a step and a name; tensors of one key are received in the order in which they were sent | TensorFlow: rendezvous key |
//! | tensor table | the tensors that a program sent and that wait for a receiver, and the receives that wait for a tensor | TensorFlow: rendezvous |
//! | incarnation | a number that a program draws at its start, so that a restarted one is another one | TensorFlow: the same |
//!
//! **Invariant:** what decides here is pure. Nothing here opens a socket or a device, starts a
//! thread or reads a clock: `now` is an argument, and each wait has a deadline. Bytes of a peer are
//! hostile until they are checked.

#![forbid(unsafe_code)]

pub mod key;
pub mod table;

pub use key::Key;
pub use table::TensorTable;
