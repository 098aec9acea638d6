//! Collectives as data, proved before they run.
//!
//! A pipeline of values: [`generate`](generate::generate) makes a [`Schedule`], or [`text`] and
//! MSCCL's XML are parsed into a schedule. [`verify`](verify::verify) turns the schedule into a
//! [`Proof`](verify::Proof), and only a proof can be executed. [`cost`] predicts the time of a
//! schedule; [`select`](mod@select) and [`tuning`] choose a schedule. [`wiring`] holds the links of
//! a group, with the packings that `pleach-packing` made for them. Start with [`Schedule`].
//!
//! **Invariant:** this crate uses no clock, no device and no memory of others. It reads a file or a
//! variable only in functions that are named for it ([`Tuning::read`], [`TuningSource::from_env`]).
//! Everything else depends on arguments alone, so ranks with equal arguments get equal schedules.

#![forbid(unsafe_code)]

#[doc(hidden)]
pub mod cost;
mod family;
#[doc(hidden)]
pub mod generate;
#[doc(hidden)]
pub mod hosts;
#[doc(hidden)]
#[cfg(feature = "msccl")]
pub mod msccl;
mod rank_space;
mod schedule;
#[doc(hidden)]
pub mod select;
#[doc(hidden)]
pub mod text;
#[doc(hidden)]
pub mod tuning;
#[doc(hidden)]
pub mod verify;
#[doc(hidden)]
pub mod wiring;

pub use cost::CostModel;
pub use family::{Family, LaneOrder, SourceOrder, Symmetry};
pub use generate::{Access, Algorithm, GridShape, Variant, generate};
pub use hosts::HostMap;
pub use rank_space::{GridLine, RankSpace, SpaceError, balanced_extents};
pub use schedule::{Block, BlockId, Lane, Op, Part, Place, Schedule, SignalSlot, Step, StepId};
pub use select::{Selection, select, select_algorithm, select_named};
pub use tuning::{Tuning, TuningError, TuningSource};
