//! The C ABI: communicators and collectives, with the names, parameter orders and in-place rules of
//! NCCL's API under the prefix `pleach`, and tensors by key.
//!
//! **Invariants.** A `pleachComm_t` is a number in the clothes of a pointer: it is looked up in a
//! table ([`handles`]) and never followed, so a communicator or device that was destroyed, or that
//! never was, is an error and no crash. No panic crosses the boundary: [`result::guarded`] turns it
//! into `pleachInternalError`. Every function that can fail returns a [`pleachResult_t`] and leaves
//! a text for `pleachGetLastError` of the same thread.
//!
//! **Costs.** A call adds two atomic operations on the slot of its communicator and one store to
//! thread-local memory to the call of `pleach-collectives`.
//!
//! The header `include/pleach.h` is generated from this crate by cbindgen.
// What a caller promises stands in the text of each function, which is that of the header too.
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
pub mod skew;
pub mod types;
pub mod unique_id;

pub use result::pleachResult_t;

/// The header of the C ABI, for programs that are compiled where nothing else of it is installed.
pub const HEADER: &str = include_str!("../include/pleach.h");
