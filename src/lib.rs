//! RDMA-native tensor transport and collective communication.
//!
//! [`Group`] is what programs hold, and an [`Operation`] is what they ask of it. Everything that a
//! program needs is here, each name once. What these names stand on is a pipeline, a crate each:
//! `pleach-transport` moves bytes, `pleach-packing` finds the trees that links allow,
//! `pleach-schedule` makes and proves collectives as data, and `pleach-collectives` carries them
//! out.
//!
//! Start with [`Group`]. The repository's
//! [README](https://github.com/pleach-rs/pleach#readme) and
//! [quickstart](https://github.com/pleach-rs/pleach/blob/main/docs/quickstart.md) show programs and
//! the `pleach` command; the [`glossary`] says what NCCL, NVSHMEM, MPI and verbs call each thing.
// The links of the README lead to files of the repository, which a page of documentation does not
// have. Its programs are compiled and run all the same.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

/// Groups, and what is asked of them.
pub use pleach_collectives::{
    Batch, BorrowedData, Group, GroupInfo, GroupName, Operation, Options, Pending, PendingError, Persistent,
    Progress, RawData, RawPair, Reproducible, Started,
};
/// What they work on.
pub use pleach_collectives::{
    Buffer, Data, DataMut, Element, F8E4M3, F8E5M2, GpuBuffer, OwnedData, bf16, f16,
};
pub use pleach_collectives::{Collective, DataType, Factor, Rank, ReduceOp};
/// What can go wrong.
pub use pleach_collectives::{
    CollectiveError, JoinGroupError, NotExact, ProbeError, SetTopologyError, SplitError,
    engine::{Fault, FaultKind},
};
/// How they do it, and what they say of it.
pub use pleach_collectives::{Observe, Report};
pub use pleach_packing::topology::Topology;
pub use pleach_schedule::{Algorithm, HostMap, Tuning, TuningSource, Variant};
/// Where ranks meet.
pub use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World, WorldError};
/// Memory of GPUs.
pub use pleach_transport::{
    Space,
    cuda::{CudaError, ForeignMemory, Gpu, Stream},
};
pub use variables::{VARIABLES, Variable};

// What these names stand on, for our own tests and tools.
#[doc(hidden)]
pub use pleach_collectives as collectives;
#[doc(hidden)]
pub use pleach_packing as packing;
#[doc(hidden)]
pub use pleach_schedule as schedule;
#[doc(hidden)]
pub use pleach_transport as transport;

#[cfg(doc)]
pub mod glossary;
mod variables;
