//! RDMA-native tensor transport and collective communication.
//!
//! [`Group`] is what programs hold. What it stands on is a pipeline, a crate each: [`transport`]
//! moves bytes, [`packing`] finds the trees that links allow, [`schedule`] makes and proves
//! collectives as data, and [`collectives`] carries them out.
#![doc = include_str!("../README.md")]

pub use pleach_collectives as collectives;
pub use pleach_collectives::{
    Batch, Buffer, Collective, CollectiveError, Data, DataMut, DataType, Element, F8E4M3, F8E5M2, GpuBuffer,
    Group, JoinGroupError, Observe, OnStream, Options, OwnedData, Pending, PendingError, Persistent,
    Progress, Rank, ReduceOp, Reproducible, SplitError, bf16, f16,
};
pub use pleach_packing as packing;
pub use pleach_schedule::{self as schedule, Algorithm};
pub use pleach_transport as transport;
pub use variables::{VARIABLES, Variable};

#[cfg(doc)]
pub mod glossary;
mod variables;
