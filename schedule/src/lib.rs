//! Collectives as data, proved before they run.
//!
//! A pipeline of values: [`generate`](generate::generate) makes a [`Schedule`], or [`text`] and
//! MSCCL's XML are read as one; [`verify`](verify::verify) turns it into a
//! [`Proof`](verify::Proof), and only a proof can be executed. [`cost`] says how long a schedule
//! takes, [`select`](mod@select) and [`tuning`] which one is taken. [`wiring`] holds the links
//! that a group was told of, with what `pleach-packing` packed for them. Start with [`Schedule`].
//!
//! **Invariant:** there is no clock here, no device and no memory of others, and a file or variable
//! is read only where a function is named for it ([`Tuning::read`], [`TuningSource::from_env`]).
//! All else depends on arguments alone, so ranks that give the same arguments get the same
//! schedules.

#![forbid(unsafe_code)]

pub mod cost;
pub mod digest;
pub mod generate;
pub mod hosts;
#[cfg(feature = "msccl")]
pub mod msccl;
mod rank_space;
mod schedule;
pub mod select;
pub mod text;
pub mod tuning;
pub mod verify;
pub mod wiring;

pub use cost::CostModel;
pub use generate::{Access, Algorithm, Variant, generate};
pub use hosts::HostMap;
pub use schedule::{Block, BlockId, Lane, Op, Part, Place, Schedule, SignalSlot, Step, StepId};
pub use select::{Selection, select, select_algorithm, select_named};
pub use tuning::{Tuning, TuningError, TuningSource};
