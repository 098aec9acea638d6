//! The group of an epoch: an ordinary group over the device of a session.
//!
//! It has the registrations of its session. Buffers know their group by a number, and all groups of
//! a session have the session's, so buffers go from epoch to epoch.

use std::sync::Arc;

use pleach_schedule::cost::Platform;
use pleach_transport::cuda::Gpu;
use pleach_transport::processors::Processors;
use pleach_transport::rendezvous::{Connect, Fabric, Store};
use pleach_transport::{Device, Memory, Nanos, Slice, Space, clock};
use pleach_vocabulary::Rank;

use super::driver::Driver;
use super::exact::Exact;
use super::join::{platform, settings, wiring, without_mapping};
use super::observed::SessionMetrics;
use super::parts::Parts;
use super::unwinding::NoUnwinding;
use super::{
    Buffer, CollectiveError, Connection, Element, Group, GroupError, Known, Options, Origin, next_number,
};
use crate::compute::cuda::{CudaCompute, StagingSpace};
use crate::compute::{Compute, ComputeError, HostCompute};
use crate::engine::{
    Carried, EngineError, FaultKind, ScratchLayout, StatusBoard, memory_for_peers, signal_slots,
};

/// What an epoch's group has from its session.
#[derive(Clone, Copy)]
pub(crate) struct CarriedGroup<'a> {
    pub(crate) engine: &'a Carried,
    /// By which buffers know their group.
    pub(crate) number: u64,
    /// The groups that are made of its ranks.
    pub(crate) parts: &'a Arc<Parts>,
}

/// What is the same for all epochs of a session.
pub(crate) struct Setting {
    options: Options,
    fabric: Fabric,
    /// Where the groups work on a GPU's memory. Those of all epochs have the kernels of this one.
    compute: Option<CudaCompute>,
    /// Keeps what exact sums work in.
    exact: Arc<Exact>,
    /// Groups serve none of their own.
    metrics: Option<SessionMetrics>,
    /// Processors of this host that run.
    processors: usize,
}

/// Where a member is; the same on all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    rank: Rank,
    host: u32,
    ranks_a_processor: u32,
}

impl Place {
    /// A rank of the device, the number of its host, and ranks for each processor that it may run
    /// on.
    pub(crate) fn new(rank: Rank, host: u32, ranks_a_processor: u32) -> Self {
        Self { rank, host, ranks_a_processor }
    }
}

impl Setting {
    /// With these options over this fabric.
    pub(crate) fn new(mut options: Options, fabric: Fabric) -> Result<Self, GroupError> {
        let metrics = SessionMetrics::start(&options)?;
        options.observe.metrics = None;
        let compute = match options.space {
            Space::Gpu { ordinal } => {
                let gpu = Gpu::open(ordinal).map_err(ComputeError::from)?;
                Some(CudaCompute::new(&gpu, StagingSpace::Host).map_err(ComputeError::from)?)
            }
            _ => None,
        };
        let processors = Processors::online().map_or(0, |online| online.len());
        Ok(Self { options, fabric, compute, exact: Arc::default(), metrics, processors })
    }

    /// The GPU whose memory the groups work on, if they do.
    pub(crate) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.compute.as_ref().map(CudaCompute::gpu)
    }

    /// Memory for the scratch of engines of so many ranks.
    pub(crate) fn scratch_memory(&self, ranks: u32) -> Result<Arc<dyn Memory>, EngineError> {
        let bytes = ScratchLayout { ranks, gpus_copy: false }.bytes();
        let memory =
            memory_for_peers(bytes as usize).map_err(|source| EngineError::Scratch { bytes, source })?;
        Ok(match &self.compute {
            Some(compute) => compute.staging(memory)?,
            None => memory,
        })
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// The members on their hosts, and the links between them if they are known.
    fn platform(&self, members: &[Place], own: usize) -> Platform {
        let hosts: Vec<u32> = members.iter().map(|place| place.host).collect();
        let here = hosts.iter().filter(|host| **host == hosts[own]).count() as u32;
        let in_turn = members.iter().map(|place| place.ranks_a_processor).max();
        let mut platform = platform(self.fabric, &hosts, here, in_turn);
        let ranks: Vec<Rank> = members.iter().map(|place| place.rank).collect();
        let topology = self.options.topology.as_ref().and_then(|whole| whole.only(&ranks).ok());
        platform.wiring = topology.map(|topology| wiring(&topology, &platform));
        if self.compute.is_some() { without_mapping(platform) } else { platform }
    }

    /// The group of these members over this view of the device. This process is the one of rank
    /// `own` among them.
    pub(crate) fn group(
        &self,
        members: &[Place],
        own: usize,
        device: Box<dyn Device>,
        board: Arc<StatusBoard>,
        (carried, store): (CarriedGroup<'_>, Box<dyn Store>),
    ) -> Result<Group, GroupError> {
        let mut platform = self.platform(members, own);
        let table = self.options.tuning.table(self.fabric, &platform.hosts);
        if let Some(&(near, far)) = table.as_ref().and_then(|table| table.models()) {
            (platform.near, platform.far) = (near, far);
        }
        let connection = Connection {
            device,
            events: Vec::new(),
            board,
            platform,
            ranks_a_processor: share(members, own, self.processors),
            store: Some(store),
        };
        let compute: Box<dyn Compute> = match &self.compute {
            Some(compute) => Box::new(compute.with_new_stream().map_err(ComputeError::from)?),
            None => Box::new(HostCompute::new()),
        };
        let mut group = Group::assembled(
            table,
            connection,
            compute,
            Known::default(),
            &self.options,
            Origin::Epoch(carried),
        )?;
        group.fabric = Some(self.fabric);
        self.metrics.iter().for_each(|metrics| metrics.show(&group));
        group.exact = group.exact.map(|_| Arc::clone(&self.exact));
        Ok(group)
    }
}

/// The ranks that take turns on a processor of this rank: as many as when the job began, or all of
/// this host on the processors that run there, if these are more. Members that came later may run
/// on any of these.
fn share(members: &[Place], own: usize, processors: usize) -> u32 {
    let Place { host, ranks_a_processor, .. } = members[own];
    let here = members.iter().filter(|place| place.host == host).count();
    // Where their number is not known, what was known counts.
    let now = if processors == 0 { 0 } else { here.div_ceil(processors) as u32 };
    ranks_a_processor.max(now)
}

/// What processes compare when they meet for a session of so many seats, besides these settings of
/// the session itself.
pub(crate) fn session_settings(
    options: &Options,
    seats: u32,
    knobs: Vec<(String, String)>,
) -> pleach_transport::rendezvous::JoinOptions {
    // All pairs of members are connected.
    let mut settings = settings(&Options { connect: Some(Connect::AtJoin), ..options.clone() });
    // The first depends on the number of ranks, which changes. And whether a GPU can share its
    // memory is nobody's matter: no group of a session shares it.
    settings.knobs.retain(|(name, _)| !["signal slots", "memory"].contains(&name.as_str()));
    let memory = if matches!(options.space, Space::Gpu { .. }) { "cuda" } else { "host" };
    settings.knobs.push(("memory".to_owned(), memory.to_owned()));
    settings.knobs.extend(knobs);
    // Groups of fewer ranks have more slots for each pair.
    settings.signal_slots = most_signal_slots(seats);
    settings
}

/// Enough for the group of any members of such a world.
fn most_signal_slots(ranks: u32) -> usize {
    (1..=ranks).map(signal_slots).max().unwrap_or_default()
}

/// The number by which buffers of a session know their groups.
pub(crate) fn session_number() -> u64 {
    next_number()
}

/// A buffer of memory that the session has registered. Nobody changes the memory while another
/// buffer reads it.
pub(crate) fn session_buffer<T: Element>(slice: Slice, len: usize, number: u64) -> Buffer<T> {
    Buffer::new(slice, len, number)
}

impl Group {
    /// Whether a commit of the step that has begun can be calls of this group: the group works on
    /// the host's memory, and all ranks contribute.
    pub(crate) fn commits_by_calls(&self) -> bool {
        self.gpu().is_none() && self.contributors() == self.world_size()
    }

    /// Goes on with the end of an epoch's group where no other thread does. Returns whether the
    /// group uses its device no more, but for what the device still has under way.
    pub(crate) fn has_stopped(&self) -> bool {
        self.shared.driver.has_stopped()
    }

    /// Whether there are more than so many handles of the group, or operations that were started.
    pub(crate) fn is_kept_beside(&self, handles: usize) -> bool {
        let drivers = 1 + usize::from(self.shared.progress.is_some());
        Arc::strong_count(&self.shared) > handles || Arc::strong_count(&self.shared.driver) > drivers
    }

    /// Waits until every peer is drained or severed, and so no peer reads or changes memory of the
    /// epoch. Returns whether that is so by then.
    pub(crate) fn await_end(&self, until: Nanos) -> bool {
        self.shared.driver.await_end(until)
    }
}

impl Driver {
    /// As [`Group::await_end`].
    pub(crate) fn await_end(&self, until: Nanos) -> bool {
        self.drive(self.lock(), until, |engine| engine.failure().map(|_| ())).is_some()
    }

    fn has_stopped(&self) -> bool {
        // Another thread that drives the engine sees the end of the epoch itself.
        let Some(mut core) = self.try_lock() else { return false };
        let _whole = NoUnwinding::new();
        core.poll(clock::now());
        core.engine.has_told_failure()
    }
}

impl CollectiveError {
    /// Whether the call ended because the session's members have changed: then its step is
    /// repeated, and nobody is at fault.
    #[must_use]
    pub fn is_change(&self) -> bool {
        matches!(self, Self::Failed(fault) if fault.kind == FaultKind::Changed)
    }
}

#[cfg(test)]
mod tests {
    use pleach_transport::rendezvous::World;

    use super::*;

    #[test]
    fn a_gpu_that_cannot_share_its_memory_is_a_gpu_as_any_other_to_a_session() {
        let memory = |space| {
            let options = Options { space, ..Options::new(World::alone()) };
            let settings = session_settings(&options, 2, Vec::new());
            settings.knobs.into_iter().filter(|(name, _)| name == "memory").map(|(_, value)| value).collect()
        };
        // There is none of this number, so it cannot share anything.
        let of_gpu: Vec<String> = memory(Space::Gpu { ordinal: 99 });
        let of_host: Vec<String> = memory(Space::Host);
        assert_eq!((of_gpu, of_host), (vec!["cuda".to_owned()], vec!["host".to_owned()]));
    }

    #[test]
    fn members_take_turns_when_more_have_come_than_processors_run() {
        let members = |hosts: &[u32], founded| -> Vec<Place> {
            (0..).zip(hosts).map(|(rank, &host)| Place::new(rank, host, founded)).collect()
        };
        assert_eq!(share(&members(&[0, 0], 1), 0, 2), 1);
        assert_eq!(share(&members(&[0, 0, 0], 1), 2, 2), 2, "a third has come to two processors");
        assert_eq!(share(&members(&[0, 0, 7], 1), 0, 2), 1, "it is on another host");
        assert_eq!(share(&members(&[0, 0], 3), 0, 2), 3, "they were bound to few");
        assert_eq!(share(&members(&[0, 0, 0], 1), 0, 0), 1, "nothing is known");
    }
}
