//! Collectives as data, proved before they run.
//!
//! A pipeline of values: a generator makes a [`Schedule`], [`verify`](verify::verify) turns it into
//! a [`Proof`](verify::Proof), and only a proof can be executed. Start with [`schedule`].

pub mod call;
pub mod choices;
pub mod collective;
pub mod compute;
pub mod cost;
mod digest;
pub mod engine;
pub mod generate;
pub mod group;
pub mod hosts;
pub mod observe;
pub mod packing;
pub mod parts;
pub mod rank_space;
pub mod reproducible;
pub mod schedule;
pub mod select;
pub mod simulate;
pub mod topology;
pub mod verify;
pub mod wiring;

pub use choices::{Choices, ChoicesError, Pinned};
pub use collective::{Collective, DataType, ReduceOp};
pub use compute::{F8E4M3, F8E5M2};
pub use cost::CostModel;
/// The half-width elements, as [`Buffer`] and slices hold them.
pub use half::{bf16, f16};

pub use generate::{Access, Algorithm, Way, generate};
pub use group::{
    Batch, Buffer, CollectiveError, Data, DataMut, Element, GpuBatch, GpuBuffer, GpuPersistent, Group,
    GroupName, JoinGroupError, OnStream, Options, OwnedData, Pending, PendingError, Persistent, ProbeError,
    Progress, SetTopologyError, SplitError, Started,
};
pub use hosts::HostMap;
pub use observe::{Observe, Report};
pub use parts::Parts;
pub use pleach_transport::Rank;
pub use reproducible::Reproducible;
pub use schedule::{Block, BlockId, Cell, Lane, Op, Part, Place, Schedule, Step, StepId};
pub use select::{Choice, select, select_algorithm, select_named};
