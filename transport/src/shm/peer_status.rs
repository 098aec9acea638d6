//! The status of peers as the watcher sees it, for the polling thread. It is a table, with one flag
//! that announces changes.
//!
//! The table has a fixed size: for each peer a link, an end, and one region for each slot. So a
//! peer that sends much while nobody polls fills no queue.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

use super::link::{PeerMemory, PeerRegion};
use crate::Rank;
use crate::device::{Incarnation, LossCause};
use crate::region::RegionKey;

/// Most bytes of one peer's regions that are mapped. An address space of 128 TiB holds the regions
/// of 64 such peers.
const MAPPED_BYTES_MAX: u64 = 1 << 40;

/// How a connection ended.
#[derive(Clone, Debug)]
pub(crate) enum ConnectionEnd {
    Lost(LossCause),
    Departed,
}

/// The state of a slot of a peer's region table.
#[derive(Clone)]
pub(crate) enum SlotState {
    Empty,
    Mapped(Arc<PeerRegion>),
    /// The region is announced, but this process could not map it.
    Unmappable(RegionKey),
}

/// The process of a peer, as far as it is known.
#[derive(Default)]
pub(crate) enum PeerProcess {
    /// The peer was never connected, or is severed, so it has none of this rank's memory.
    #[default]
    Unconnected,
    /// The descriptor that the peer sent may be that of another process.
    Unproven,
    /// The kernel says that this is the process at the other end of the stream.
    Proven(OwnedFd),
}

impl PeerProcess {
    /// Whether the process may have this rank's memory mapped. A process that has ended maps
    /// nothing.
    fn may_map(&self) -> bool {
        match self {
            Self::Unconnected => false,
            Self::Unproven => true,
            Self::Proven(process) => {
                let mut poll = [PollFd::from_borrowed_fd(process.as_fd(), PollFlags::IN)];
                // True after an error, too.
                rustix::event::poll(&mut poll, Some(&Timespec::default())) != Ok(1)
            }
        }
    }
}

/// The changes of one peer since the last poll.
#[derive(Default)]
pub(crate) struct PeerStatus {
    /// The generation of the pair to which the other fields belong.
    pub(crate) generation: u32,
    pub(crate) process: PeerProcess,
    /// Processes that had the rank before and may have this rank's memory mapped.
    former: Vec<PeerProcess>,
    pub(crate) incarnation: Option<Incarnation>,
    pub(crate) link: Option<PeerMemory>,
    pub(crate) end: Option<ConnectionEnd>,
    /// Number of drain marks that have come.
    pub(crate) drain_marks: u64,
    slots: Vec<Slot>,
    changed: Vec<u16>,
    mapped_bytes: u64,
    listed: bool,
}

struct Slot {
    state: SlotState,
    listed: bool,
}

/// The status of all peers of a device, behind a mutex that the poller takes only after a change.
pub(crate) struct StatusTable {
    peers: Vec<PeerStatus>,
    changed: Vec<Rank>,
}

impl StatusTable {
    pub(crate) fn new(world_size: u32) -> Self {
        Self { peers: (0..world_size).map(|_| PeerStatus::default()).collect(), changed: Vec::new() }
    }

    /// Whether a process with this rank may have this rank's memory mapped.
    pub(crate) fn may_map(&self, peer: Rank) -> bool {
        let status = &self.peers[peer as usize];
        status.process.may_map() || status.former.iter().any(PeerProcess::may_map)
    }

    /// Notes that the rank is severed. From now on no process with this rank has memory of this
    /// rank mapped.
    pub(crate) fn take_back(&mut self, peer: Rank) {
        let status = &mut self.peers[peer as usize];
        (status.process, status.former) = (PeerProcess::Unconnected, Vec::new());
    }

    /// Begins a generation. Forgets everything about earlier generations but their processes.
    /// Returns the regions.
    pub(crate) fn begin(&mut self, peer: Rank, generation: u32) -> Vec<SlotState> {
        let forgotten = self.forget(peer);
        let status = &mut self.peers[peer as usize];
        let before = std::mem::take(&mut status.process);
        status.former.push(before);
        status.former.retain(PeerProcess::may_map);
        (status.generation, status.link, status.end) = (generation, None, None);
        status.drain_marks = 0;
        forgotten
    }

    /// The generation of a pair that the watcher has reached.
    pub(crate) fn generation_of(&self, peer: Rank) -> u32 {
        self.peers[peer as usize].generation
    }

    /// The device that has the rank, or had it last.
    pub(crate) fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.peers[peer as usize].incarnation
    }

    /// The status of a peer, for changes.
    pub(crate) fn status_of(&mut self, peer: Rank) -> &mut PeerStatus {
        let status = &mut self.peers[peer as usize];
        if !status.listed {
            status.listed = true;
            self.changed.push(peer);
        }
        status
    }

    /// The next changed peer.
    pub(crate) fn next(&mut self) -> Option<(Rank, &mut PeerStatus)> {
        let peer = self.changed.pop()?;
        let status = &mut self.peers[peer as usize];
        status.listed = false;
        Some((peer, status))
    }

    /// Removes all regions of a peer, so that the table does not keep them mapped.
    pub(crate) fn forget(&mut self, peer: Rank) -> Vec<SlotState> {
        let status = &mut self.peers[peer as usize];
        status.changed.clear();
        status.mapped_bytes = 0;
        status.slots.drain(..).map(|slot| slot.state).collect()
    }
}

impl PeerStatus {
    /// Whether another region of `len` bytes may be mapped.
    pub(crate) fn has_room(&self, len: u64) -> bool {
        self.mapped_bytes.checked_add(len).is_some_and(|bytes| bytes <= MAPPED_BYTES_MAX)
    }

    /// Sets the state of a slot (below `REGIONS_MAX`) and returns the previous one.
    pub(crate) fn set(&mut self, index: u16, state: SlotState) -> SlotState {
        let at = usize::from(index);
        while self.slots.len() <= at {
            self.slots.push(Slot { state: SlotState::Empty, listed: false });
        }
        let slot = &mut self.slots[at];
        if !slot.listed {
            slot.listed = true;
            self.changed.push(index);
        }
        let before = std::mem::replace(&mut slot.state, state);
        let bytes = |state: &SlotState| if let SlotState::Mapped(region) = state { region.len() } else { 0 };
        self.mapped_bytes = self.mapped_bytes + bytes(&slot.state) - bytes(&before);
        before
    }

    /// The next changed slot.
    pub(crate) fn next_slot(&mut self) -> Option<(u16, SlotState)> {
        let index = self.changed.pop()?;
        let slot = &mut self.slots[usize::from(index)];
        slot.listed = false;
        Some((index, slot.state.clone()))
    }
}
