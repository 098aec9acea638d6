//! The errors that callers of a group get.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pleach_schedule::select::SelectError;
use pleach_schedule::verify::Violation;
use pleach_transport::cuda::CudaError;
use pleach_transport::memory::remedy;
use pleach_transport::rendezvous::StoreError;
use pleach_transport::{Rank, RegisterError, Space};
use pleach_vocabulary::{Collective, DataType, ReduceOp};

use crate::call::CountsError;
use crate::compute::ComputeError;
use crate::engine::{EngineError, Fault, PlanError, StartError, TooLarge};

/// Why a group could not be made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The engine could not be made.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Peers are connected but have not said where their memory is.
    #[error("ranks {missing:?} have connected but not said where their memory is within {} ms", .limit.as_millis())]
    Silent {
        /// The ranks.
        missing: Vec<Rank>,
        /// How long they had to say it.
        limit: Duration,
    },
    /// Ranks met, and then did not tell each other whether their NICs reach their GPUs.
    #[error("ranks have met but not said whether their NICs reach their GPUs: {0}")]
    Store(#[from] StoreError),
    /// The GPU that the group is to work on does not work.
    #[error(transparent)]
    Compute(#[from] ComputeError),
    /// A peer was lost meanwhile.
    #[error("{0}")]
    Failed(Arc<Fault>),
    /// The thread cannot be started that connects pairs on use.
    #[error(
        "no thread can be started for connections ({0}); raise the limit ('ulimit -u') or set Options::progress to \
         Progress::WhenCalled"
    )]
    Thread(#[source] std::io::Error),
    /// The topology is one of other ranks.
    #[error(
        "the topology has {nodes} ranks, the group {ranks}; give that of the group's ranks, or leave it out"
    )]
    Topology {
        /// How many ranks the topology has.
        nodes: u32,
        /// How many there are.
        ranks: u32,
    },
    /// Metrics cannot be served.
    #[error(
        "no metrics: {address} ({source}); choose another address or port, as many ports from it on are taken as ranks are on a host"
    )]
    Metrics {
        /// The address that was asked for.
        address: std::net::SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// There are fewer ports than ranks.
    #[error("no metrics: there is no port {port} for a rank of this host; choose a lower one")]
    Port {
        /// The port that a rank would have.
        port: u32,
    },
    /// The trace cannot be begun.
    #[error("no trace: {} ({source}); name a file that can be written", .path.display())]
    Trace {
        /// The file.
        path: std::path::PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

/// How errors name a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupName {
    /// Its number among the groups of this process, from 1.
    pub number: u64,
    /// This process's rank in it.
    pub rank: Rank,
    /// How many ranks it has.
    pub world_size: u32,
}

impl fmt::Display for GroupName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "group {} (rank {} of {})", self.number, self.rank, self.world_size)
    }
}

/// Why a collective did not happen. In any case no byte of the caller's memory changes afterwards.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The group has failed, now or before; this is the first cause, and every later call returns
    /// it again.
    #[error("{0}")]
    Failed(Arc<Fault>),
    /// The group was closed.
    #[error("the group is closed; join a new one")]
    Closed,
    /// The process forked: only the parent's group works.
    #[error("this group belongs to process {owner}; a forked child must join a group of its own")]
    Forked {
        /// The process that joined.
        owner: u32,
    },
    /// A slice has the wrong length.
    #[error("{what} has {actual} elements, not {expected}")]
    Length {
        /// The name of the slice.
        what: &'static str,
        /// The length that it should have.
        expected: usize,
        /// The length that it has.
        actual: usize,
    },
    /// A list of counts that has not one count for each rank.
    #[error("there are {actual} counts for {what}, not {expected}, one for each rank")]
    CountOfCounts {
        /// The name of the list.
        what: &'static str,
        /// How many ranks there are.
        expected: usize,
        /// How many counts there are.
        actual: usize,
    },
    /// Counts of blocks where the collective has no such blocks.
    #[error(
        "{collective} has no blocks of such counts; {}", match collective {
            Collective::AllToAll => "say what goes to each rank and what comes from it (with_send_and_receive_counts)",
            Collective::AllGather | Collective::ReduceScatter | Collective::Gather { .. } | Collective::Scatter { .. } => {
                "give one count for each rank (with_counts)"
            }
            _ => "leave them out",
        }
    )]
    NoSuchCounts {
        /// The collective.
        collective: Collective,
    },
    /// Counts that do not fit the schedule.
    #[error(transparent)]
    Counts(#[from] CountsError),
    /// Input and output share memory, but not in the collective's in-place form.
    #[error(
        "the input and the output of {collective} overlap, and not exactly as in place; pass memory that is apart, or {}",
        if *collective == Collective::AllReduce { "the same for both" } else { "a rank's own block at its place among all blocks" }
    )]
    Overlap {
        /// The collective.
        collective: Collective,
    },
    /// A rank that is not in the group.
    #[error("rank {rank} is not in this group of {world_size} (ranks are 0 to {})", world_size - 1)]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// How many there are.
        world_size: u32,
    },
    /// An operation that has no meaning for the elements.
    #[error("{op} has no meaning for {data_type}; there are {}", ReduceOp::fitting(*data_type))]
    Meaningless {
        /// What was asked for.
        op: ReduceOp,
        /// The type of the elements.
        data_type: DataType,
    },
    /// An algorithm whose results are not those of a reproducible group.
    #[error(
        "{algorithm} of {ranks} ranks does not combine contributions in the order of the ranks, which a reproducible group does; {}",
        in_rank_order(known)
    )]
    NotReproducible {
        /// What was asked for.
        algorithm: String,
        /// The number of ranks.
        ranks: u32,
        /// The algorithms that a reproducible group has.
        known: Vec<String>,
    },
    /// An operation that cannot be exact.
    #[error("{op} of {data_type} cannot be exact: {reason}")]
    NotExact {
        /// What was asked for.
        op: ReduceOp,
        /// The type of the elements.
        data_type: DataType,
        /// The reason.
        reason: NotExact,
    },
    /// Elements that a window has not.
    #[error("elements {start}..{end} do not lie inside a window of {len}")]
    OutsideWindow {
        /// The first one.
        start: usize,
        /// One past the last one.
        end: usize,
        /// How many the window has.
        len: usize,
    },
    /// A slot that a window has not.
    #[error("a window of {slots} slots has no slot {slot}; they are numbered from 0")]
    NoSuchSlot {
        /// The slot.
        slot: u16,
        /// How many there are.
        slots: u16,
    },
    /// A call that does not reduce, or is to outlive its step, while a member of a session still
    /// reads the states. The step is repeated when that member has them.
    #[error(
        "only {contributors} ranks contribute, as the others read the states of the session; such a step does nothing but \
         reduce (all_reduce, reduce, reduce_scatter); take Heal::Boundary, or repeat the step"
    )]
    Healing {
        /// How many ranks contribute.
        contributors: u32,
    },
    /// A message to oneself.
    #[error("rank {rank} cannot send to or receive from itself")]
    Own {
        /// This rank.
        rank: Rank,
    },
    /// The algorithm asked for does not exist for this collective and group.
    #[error(transparent)]
    Algorithm(#[from] SelectError),
    /// The schedule was refused by the proof: a mistake of its generator.
    #[error("the schedule is wrong: {0}")]
    Violation(Arc<Violation>),
    /// The schedule needs more of a resource than the group has.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// A batch holds operations of one group.
    #[error("a batch of {first} cannot take operations of {second}; run a batch of each group")]
    MixedGroups {
        /// The batch's group.
        first: GroupName,
        /// The other one.
        second: GroupName,
    },
    /// Too many non-blocking operations.
    #[error("too many operations are under way; wait for some of them")]
    TooMany,
    /// The thread of [`Progress::Thread`](super::Progress::Thread) could not be started.
    #[error(
        "no thread can be started for the group ({0}); raise the limit ('ulimit -u') or set Options::progress to \
         Progress::WhenCalled"
    )]
    Thread(Arc<std::io::Error>),
    /// A GPU, or its memory.
    #[error(transparent)]
    Gpu(#[from] CudaError),
    /// The data are not in the kind of memory that the group works on.
    #[error(
        "this group works on {group} memory, and the data are in {data} memory; {}", match group {
            Space::Host => "take a group for the GPU's (Group::in_memory, Options::space)",
            _ => "give a GpuBuffer of that GPU, or take a group for the host's (Group::in_memory)",
        }
    )]
    Space {
        /// The memory of the group.
        group: Space,
        /// The memory of the data.
        data: Space,
    },
    /// Elements at the null address.
    #[error("{count} elements cannot be at the null address; give their memory, or a count of 0")]
    Null {
        /// The number of elements.
        count: usize,
    },
    /// More elements than a process can address.
    #[error("{count} elements of {data_type} are more than a process can address")]
    TooLong {
        /// The number of elements.
        count: usize,
        /// The type of the elements.
        data_type: DataType,
    },
    /// A buffer with elements of another type, or with too few.
    #[error(
        "the buffer has {held} elements of {held_type}, and the call is on {count} of {data_type}; give it as what it is"
    )]
    OtherElements {
        /// Type of the buffer's elements.
        held_type: DataType,
        /// Number of the buffer's elements.
        held: usize,
        /// Type of the call's elements.
        data_type: DataType,
        /// Number of the call's elements.
        count: usize,
    },
    /// An operation that GPUs have no kernel for.
    #[error("there is no kernel for {op} on a GPU; multiply the data there first and take sum")]
    NoKernel {
        /// What was asked for.
        op: ReduceOp,
    },
    /// A call on a GPU's memory that is in no stream.
    #[error(
        "a call on the memory of GPU {ordinal} comes after the work of a stream; make it through Group::on(&stream)"
    )]
    NoStream {
        /// The GPU of the memory.
        ordinal: u32,
    },
    /// Memory whose address is not a multiple of the element's size.
    #[error(
        "memory at {address:#x} does not begin at a multiple of the size of {data_type}; give it from where it does"
    )]
    Misaligned {
        /// The type of the elements.
        data_type: DataType,
        /// Where it begins.
        address: u64,
    },
    /// There is no group of some ranks, no window or no partial all-reduce, in a step of a session
    /// that needs one: [`SplitError`](super::SplitError), [`WindowError`](super::WindowError),
    /// [`PartialError`](super::PartialError).
    #[error("{0}")]
    NotMade(Arc<dyn std::error::Error + Send + Sync>),
    /// Memory cannot be registered.
    #[error("memory cannot be registered: {0}")]
    Register(Arc<RegisterError>),
    /// Memory cannot be allocated.
    #[error("{bytes} bytes cannot be had: {source}; {}", remedy(source))]
    Memory {
        /// The number of bytes.
        bytes: usize,
        /// The cause.
        #[source]
        source: Arc<std::io::Error>,
    },
}

/// Why an operation of an exact group cannot be exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotExact {
    /// Its result depends on the order of the ranks, however the result is computed.
    Operation,
    /// It needs several operations, one after the other, and a started call or batch makes one
    /// operation.
    Started,
    /// A rank may give two contributions to a round of a partial all-reduce, and exact sums have
    /// room for one a rank where there are so many ranks.
    Partial,
    /// There are no kernels for it.
    OnGpu,
    /// Its contributions are added up without rounding by exact groups alone.
    Group,
}

impl fmt::Display for NotExact {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Operation => {
                "exact groups have sum, avg, min and max of floats, and everything of integers"
            }
            Self::Started => {
                "it takes operations of which each needs the result of the one before; run it, or a batch with it"
            }
            Self::Partial => {
                "late contributions go beside others of their rank, which exact sums of more than 2048 ranks have no room for; \
                 take Late::Drop"
            }
            Self::Group => {
                "only exact groups add several contributions of a rank; set Options::reproducible to Reproducible::Exact"
            }
            Self::OnGpu => {
                "there are no kernels for it; take Reproducible::PerWorldSize, or copy the data to the host"
            }
        })
    }
}

/// What a reproducible group can do, if its links allow these algorithms.
fn in_rank_order(known: &[String]) -> String {
    if known.is_empty() {
        return "no other one goes over its links, so take others, as star:N@1, or a group that is not"
            .to_owned();
    }
    format!("choose {}", known.join(" or "))
}

impl From<StartError> for CollectiveError {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Failed(fault) => Self::Failed(fault),
            StartError::TooManyRuns => Self::TooMany,
            StartError::Counts(error) => Self::Counts(error),
        }
    }
}

impl From<PlanError> for CollectiveError {
    fn from(error: PlanError) -> Self {
        match error {
            PlanError::TooLarge(error) => Self::TooLarge(error),
            PlanError::Counts(error) => Self::Counts(error),
        }
    }
}
