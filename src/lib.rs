//! RDMA-native tensor transport and collective communication.
//!
//! [`Group`] is what programs hold; [`transport`] and [`collectives`] are what it stands on.
#![doc = include_str!("../README.md")]

pub use pleach_collectives as collectives;
pub use pleach_collectives::{
    Algorithm, Batch, Buffer, Collective, CollectiveError, Data, DataMut, DataType, Element, F8E4M3, F8E5M2,
    GpuBuffer, Group, JoinGroupError, Observe, OnStream, Options, OwnedData, Pending, PendingError,
    Persistent, Progress, Rank, ReduceOp, Reproducible, SplitError, bf16, f16,
};
pub use pleach_transport as transport;
pub use variables::{VARIABLES, Variable};

mod variables;
