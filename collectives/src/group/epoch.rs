//! The group of an epoch: an ordinary group over the device of a session.
//!
//! It has the registrations of its session. Buffers know their group by a number, and all groups of
//! a session have the session's, so buffers go from epoch to epoch.

use std::sync::Arc;

use pleach_schedule::cost::Platform;
use pleach_transport::rendezvous::Fabric;
use pleach_transport::{Device, Memory, Nanos, Slice, clock};
use pleach_vocabulary::Rank;

use super::driver::Driver;
use super::join::{platform, settings, wiring};
use super::unwinding::NoUnwinding;
use super::{Buffer, CollectiveError, Connection, Element, Group, GroupError, Options, next_number};
use crate::compute::HostCompute;
use crate::engine::{Carried, FaultKind, ScratchLayout, StatusBoard, memory_for_peers, signal_slots};

/// What an epoch's group has from its session.
#[derive(Clone, Copy)]
pub(crate) struct CarriedGroup<'a> {
    pub(crate) engine: &'a Carried,
    /// By which buffers know their group.
    pub(crate) number: u64,
}

/// What is the same for all epochs of a session.
pub(crate) struct Setting {
    pub(crate) options: Options,
    pub(crate) fabric: Fabric,
    /// By rank of the device.
    pub(crate) hosts: Vec<u32>,
    /// Of the ranks of the device, those on this host.
    pub(crate) ranks_here: u32,
    /// By rank of the device: ranks for each processor that it may run on.
    pub(crate) ranks_a_processor: Vec<u32>,
}

impl Setting {
    /// The members on their hosts, and the links between them if they are known.
    fn platform(&self, members: &[Rank]) -> Platform {
        let hosts: Vec<u32> = members.iter().map(|rank| self.hosts[*rank as usize]).collect();
        let own = self.hosts[self.options.world.rank as usize];
        let here = hosts.iter().filter(|host| **host == own).count() as u32;
        let in_turn = members.iter().map(|rank| self.ranks_a_processor[*rank as usize]).max();
        let mut platform = platform(self.fabric, &hosts, here.min(self.ranks_here), in_turn);
        let topology = self.options.topology.as_ref().and_then(|whole| whole.only(members).ok());
        platform.wiring = topology.map(|topology| wiring(&topology, &platform));
        platform
    }

    /// The group of these members, ranks of the device, over this view of it.
    pub(crate) fn group(
        &self,
        members: &[Rank],
        device: Box<dyn Device>,
        board: Arc<StatusBoard>,
        carried: CarriedGroup<'_>,
    ) -> Result<Group, GroupError> {
        let connection = Connection {
            device,
            events: Vec::new(),
            board,
            platform: self.platform(members),
            ranks_a_processor: self.ranks_a_processor[self.options.world.rank as usize],
            store: None,
        };
        let compute = Box::new(HostCompute::new());
        let mut group =
            Group::assembled(None, connection, compute, Vec::new(), &self.options, Some(carried))?;
        group.fabric = Some(self.fabric);
        Ok(group)
    }
}

/// What ranks compare when they meet for a session.
pub(crate) fn session_settings(options: &Options) -> pleach_transport::rendezvous::JoinOptions {
    let mut settings = settings(options);
    settings.knobs.push(("session".to_owned(), "1".to_owned()));
    // Groups of fewer ranks have more slots for each pair.
    settings.signal_slots = most_signal_slots(options.world.world_size);
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

/// Scratch of an engine of so many ranks.
pub(crate) fn scratch_memory(ranks: u32) -> std::io::Result<Arc<dyn Memory>> {
    memory_for_peers(ScratchLayout { ranks, gpus_copy: false }.bytes() as usize)
}

/// A buffer of memory that the session has registered and that no other code uses.
pub(crate) fn session_buffer<T: Element>(slice: Slice, len: usize, number: u64) -> Buffer<T> {
    Buffer::new(slice, len, number)
}

impl Group {
    /// Goes on with the end of an epoch's group where no other thread does. Returns whether the
    /// group uses its device no more, but for what the device still has under way.
    pub(crate) fn has_stopped(&self) -> bool {
        self.shared.driver.has_stopped()
    }

    /// Waits until every peer is drained or severed, and so no peer reads or changes memory of the
    /// epoch. Returns whether that is so by then.
    pub(crate) fn await_end(&self, until: Nanos) -> bool {
        let driver = &self.shared.driver;
        driver.drive(driver.lock(), until, |engine| engine.failure().map(|_| ())).is_some()
    }
}

impl Driver {
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
