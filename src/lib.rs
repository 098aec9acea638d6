//! RDMA-native tensor transport and collective communication.
//!
//! A program holds a [`Group`] and gives it [`Operation`]s. This crate exports each public name
//! once. Four crates below form a pipeline: `pleach-transport` moves bytes, `pleach-packing`
//! computes the trees that the links allow, `pleach-schedule` generates and proves collectives as
//! data, and `pleach-collectives` carries the proved collectives out.
//!
//! Start with [`Group`]. The repository's
//! [README](https://github.com/pleach-rs/pleach#readme) and
//! [quickstart](https://github.com/pleach-rs/pleach/blob/main/docs/quickstart.md) show programs and
//! the `pleach` command; the [`glossary`] says what NCCL, NVSHMEM, MPI and verbs call each thing.
// The links of the README lead to files of the repository, which a page of documentation does not
// have. Its programs are compiled and run all the same.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]

/// Groups and their operations.
pub use pleach_collectives::{
    Batch, BorrowedData, Connect, Group, GroupInfo, GroupName, Operation, Options, Pending, PendingError,
    Persistent, Progress, RankSpace, Registered, Reproducible, Started,
};
/// The memory and the values that operations work on.
pub use pleach_collectives::{
    Buffer, Data, DataMut, Element, F8E4M3, F8E5M2, GpuBuffer, OwnedData, bf16, f16,
};
pub use pleach_collectives::{Collective, DataType, Factor, Rank, ReduceOp};
/// Errors.
pub use pleach_collectives::{
    CollectiveError, JoinGroupError, NotExact, ProbeError, SetTopologyError, SpaceError, SplitError,
    engine::{Fault, FaultKind},
};
/// The links of a group, and what a group reports.
pub use pleach_collectives::{Observe, Report};
/// Tensors by key between programs (feature `exchange`).
#[cfg(feature = "exchange")]
pub use pleach_exchange as exchange;
/// Data-flow graphs over several ranks (feature `graph`).
#[cfg(feature = "graph")]
pub use pleach_graph_analyzer as graph;
pub use pleach_packing::topology::Topology;
/// The rendezvous.
pub use pleach_transport::rendezvous::{Fabric, FabricChoice, Launcher, Rendezvous, World, WorldError};
pub use pleach_transport::{LossKind, Secret};
/// Memory of GPUs.
pub use pleach_transport::{
    Space,
    cuda::{CudaError, Gpu, Stream},
};

/// Jobs whose processes come and go.
pub use pleach_collectives::session;

pub mod variables;

/// Partial all-reduce: a sum that does not wait for late ranks, and says whose data are in it
/// ([`Group::partial`]).
pub mod partial {
    #[doc(hidden)]
    pub use pleach_collectives::partial::duration;
    pub use pleach_collectives::partial::{
        Activation, ActivationError, Divisor, Late, Own, PartialReport, RankSet,
    };
    pub use pleach_collectives::{GpuMemory, HostMemory, Partial, PartialError, RawPartial, RawRound, Round};
}

/// One-sided memory of a group: ranks publish elements that others read, and write into slots of
/// others ([`Group::window`]).
pub mod window {
    pub use pleach_collectives::{Arrival, PendingRead, Window, WindowError, Word};
}

/// Which algorithm a call takes: named, or measured by `pleach tune`.
pub mod tuning {
    pub use pleach_schedule::cost::{CostModel, Platform};
    pub use pleach_schedule::generate::packed::{PacingPolicy, PackedTrees};
    pub use pleach_schedule::tuning::{TuningRow, TuningTable};
    pub use pleach_schedule::{
        Access, Algorithm, GridShape, HostMap, Tuning, TuningError, TuningSource, Variant,
    };
}

/// Operations on memory that is given by its address.
pub mod raw {
    pub use pleach_collectives::{Parts, RawData, RawPair};
    pub use pleach_transport::Memory;
    pub use pleach_transport::cuda::ForeignMemory;
}

/// The nodes and links of a [`Topology`], and how one is built.
pub mod topology {
    pub use pleach_packing::topology::{Builder, Link, Node, NodeId, NodeKind};
}

/// The parts of a [`Report`].
pub mod report {
    pub use pleach_collectives::observe::{
        Distribution, HistogramMetric, Metric, MetricKind, PeerReport, ShapeReport,
    };
}

/// Where ranks meet when a program starts them in a way of its own.
pub mod rendezvous {
    pub use pleach_transport::rendezvous::{ExplicitWorld, Store};
}

/// Identity, events and the flushing of writes of a [`Gpu`].
pub mod cuda {
    pub use pleach_transport::cuda::{CudaEvent, FlushMethod, FlushScope, GpuId};
}

/// The causes inside of the errors above.
pub mod errors {
    pub use pleach_collectives::UnknownName;
    pub use pleach_collectives::call::{Amount, CountsError, Descriptor};
    pub use pleach_collectives::compute::ComputeError;
    pub use pleach_collectives::engine::{EngineError, TooLarge};
    pub use pleach_collectives::group::{GroupError, TopologyName};
    pub use pleach_packing::topology::TopologyError;
    pub use pleach_schedule::generate::GenerateError;
    pub use pleach_schedule::generate::packed::PackedError;
    pub use pleach_schedule::select::SelectError;
    pub use pleach_schedule::verify::{NotPartial, Violation};
    pub use pleach_schedule::wiring::WiringError;
    pub use pleach_transport::RegisterError;
    pub use pleach_transport::auth::SecretError;
    pub use pleach_transport::cuda::CudaErrorCode;
    pub use pleach_transport::rendezvous::{JoinError, OpenStoreError, RendezvousError, StoreError};
}

// The crates below, for the tests and tools of this repository.
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
