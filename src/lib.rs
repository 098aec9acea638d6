//! RDMA-native tensor transport and collective communication.
//!
//! [`Group`] is what programs hold; [`transport`] and [`collectives`] are what it stands on.
#![doc = include_str!("../README.md")]

pub use pleach_collectives as collectives;
pub use pleach_collectives::{
    Algorithm, Buffer, Collective, CollectiveError, Data, DataMut, DataType, Element, F8E4M3, F8E5M2,
    GpuBuffer, Group, JoinGroupError, OnStream, Options, Pending, PendingError, Rank, ReduceOp, Reproducible,
};
pub use pleach_transport as transport;
