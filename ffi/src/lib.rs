//! The C ABI: communicators and collectives, with the names, parameter orders and in-place rules of
//! NCCL's API under the prefix `pleach`, and tensors by key.
//!
//! **Invariants.** A handle such as `pleachComm_t` has the type of a pointer but holds a number.
//! The number is looked up in a table ([`handles`]) and never dereferenced. So a handle of a
//! destroyed object, or an invented handle, is an error and no crash. No panic crosses the
//! boundary: [`result::guarded`] turns a panic into `pleachInternalError`. Every function that can
//! fail returns a [`pleachResult_t`] and leaves a text for `pleachGetLastError` of the same thread.
//!
//! **Costs.** Compared with a call of `pleach-collectives`, a call here has two more atomic
//! operations on the slot of its communicator and one more store to thread-local memory.
//!
//! The header `include/pleach.h` is generated from this crate by cbindgen.
// The text of each function, which is also in the header, says what the caller promises.
#![allow(clippy::missing_safety_doc)]
#![allow(unsafe_code, non_camel_case_types, non_snake_case, non_upper_case_globals)]

pub mod batch;
pub mod calls;
pub mod comm;
pub mod device;
pub mod exchange;
pub mod failure;
mod handles;
pub mod memory;
pub mod partial;
pub mod result;
pub mod session;
pub mod skew;
pub mod types;
pub mod unique_id;
pub mod window;

pub use result::pleachResult_t;

/// The header of the C ABI, for programs that are compiled where only this library is installed.
pub const HEADER: &str = include_str!("../include/pleach.h");
