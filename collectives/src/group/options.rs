//! How a group is joined and how it behaves.

use std::sync::Arc;
use std::time::Duration;

use pleach_packing::topology::Topology;
use pleach_schedule::generate::Algorithm;
use pleach_schedule::tuning::TuningSource;
use pleach_transport::Space;
use pleach_transport::rendezvous::{Connect, DEFAULT_JOIN_TIMEOUT, FabricChoice, World, WorldError};

use super::progress::Progress;
use crate::observe::Observe;
use crate::reproducible::Reproducible;

/// How a group is joined and how it behaves.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Who this process is and where the ranks meet.
    pub world: World,
    /// How bytes move; the same on all ranks. [`FabricChoice::Auto`] unless changed.
    pub fabric: FabricChoice,
    /// When pairs of ranks connect; the same on all ranks. What the world says (`PLEACH_CONNECT`);
    /// where that says nothing, [`Connect::OnUse`] in groups of 16 ranks or more. A group that is
    /// split from this one has a number of ranks of its own.
    ///
    /// A pair that connects on use needs a poll at both ends. A rank that is in no call is polled
    /// by the thread of its group, unless it has none ([`Progress::WhenCalled`]): then a first
    /// message to the rank waits until the rank enters a call.
    pub connect: Option<Connect>,
    /// Longest time to wait for the other ranks to come: what the world says
    /// (`PLEACH_JOIN_TIMEOUT`), or a minute.
    pub join_timeout: Duration,
    /// Longest time a call waits for its peers: 60 s unless changed. See also `Group::within`.
    pub timeout: Duration,
    /// Longest time that closing waits for the peers to close too: 5 s unless changed.
    pub close_timeout: Duration,
    /// Use this algorithm wherever it fits (the same on all ranks); otherwise the best is chosen
    /// for each size.
    pub algorithm: Option<Algorithm>,
    /// The measured algorithms that calls keep to where no algorithm is named; the same on all
    /// ranks. None unless changed; [`Options::from_env`] takes `PLEACH_TUNING`. If there is no
    /// table for the world that is joined, the built-in selection chooses, and rank 0 warns. A
    /// group that is split from it takes the table of its own world, if there is one. Groups over a
    /// device of the caller's ([`Connection::into_group`](super::Connection::into_group)) have no
    /// table.
    pub tuning: TuningSource,
    /// The links between the ranks, if they are known; the same on all ranks. Then collectives are
    /// packed for them and schedules chosen by them alone (see also `Group::set_topology`). Those
    /// of a session are between all its seats.
    pub topology: Option<Arc<Topology>>,
    /// How long a waiting call polls before it sleeps: 200 µs unless changed.
    pub spin: Duration,
    /// Set it when several threads of a rank make calls in this group at the same time, so that one
    /// call may depend on another thread's call that has not been made yet. Otherwise ranks that
    /// wait for each other's calls in a cycle, as one in a receive and its peer in an all-reduce,
    /// are told of the mismatch within 100 ms; with it only at the deadline. Found out by itself
    /// when two threads meet in a call.
    pub concurrent_calls: bool,
    /// What memory its calls work on: the host's, or that of a GPU of this process (another one on
    /// each rank, perhaps; all ranks take the host's, or all take GPUs'). See
    /// [`Group::in_memory`](super::Group::in_memory), which makes the one from the other. Groups
    /// over a device of the caller's work on what its [`Compute`](crate::compute::Compute) works
    /// on.
    pub space: Space,
    /// Which results are the same bits again; the same on all ranks. [`Reproducible::No`] unless
    /// changed.
    pub reproducible: Reproducible,
    /// Who carries on what was [started](super::Group::start); each rank as it likes. Usually a
    /// thread of the group, so that transfers go on while the caller computes.
    pub progress: Progress,
    /// What is written down of the group, and where: nothing unless changed;
    /// [`Options::from_env`] takes what [`Observe::from_env`] finds.
    pub observe: Observe,
}

impl Options {
    /// For this world, everything else as usual. Reads no environment.
    #[must_use]
    pub fn new(world: World) -> Self {
        Self {
            join_timeout: world.join_timeout.unwrap_or(DEFAULT_JOIN_TIMEOUT),
            connect: world.connect,
            world,
            fabric: FabricChoice::Auto,
            timeout: Duration::from_secs(60),
            close_timeout: Duration::from_secs(5),
            algorithm: None,
            tuning: TuningSource::default(),
            topology: None,
            spin: Duration::from_micros(200),
            concurrent_calls: false,
            space: Space::Host,
            reproducible: Reproducible::No,
            progress: Progress::default(),
            observe: Observe::default(),
        }
    }

    /// For the world that this process's launcher describes (`pleach run`, torchrun, mpirun, srun),
    /// or this process alone.
    pub fn from_env() -> Result<Self, WorldError> {
        Ok(Self::from_env_in(World::from_env()?))
    }

    /// As [`Options::from_env`] in this world, whatever the environment says of it.
    #[must_use]
    pub fn from_env_in(world: World) -> Self {
        Self { tuning: TuningSource::from_env(), observe: Observe::from_env(), ..Self::new(world) }
    }
}
