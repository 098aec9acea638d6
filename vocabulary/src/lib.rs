//! The words that every crate of the workspace shares.
//!
//! A [`Rank`] is a process of a job, a [`Fabric`] is what joins ranks, a [`Collective`] is what
//! they compute together: which [`Parts`] of the data inputs and outputs hold, of which
//! [`DataType`], combined by which [`ReduceOp`].
//!
//! [`digest`] and [`random`] hold the hashes and the pseudo-random numbers of all crates.
//!
//! **Invariant:** this crate holds values and their names alone. It touches no device and no memory
//! of others, so that crates that plan (`pleach-packing`, `pleach-schedule`) and crates that move
//! bytes (`pleach-transport`) speak of the same things, and neither is built for the other. Enums
//! are exhaustive on purpose: a new collective or element type does not compile before every crate
//! has said what it does with it.

#![forbid(unsafe_code)]

mod collective;
#[doc(hidden)]
pub mod digest;
mod fabric;
mod name;
mod parts;
#[doc(hidden)]
pub mod random;

pub use collective::{Collective, DataType, Factor, ReduceOp};
pub use fabric::{Fabric, FabricChoice};
#[doc(hidden)]
pub use name::nearest;
pub use name::{UnknownName, named};
pub use parts::Parts;

/// A rank: the number of a process in its world, `0 .. world_size`.
pub type Rank = u32;
