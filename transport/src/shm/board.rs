//! The status of peers as the watcher sees it, for the polling thread: a table, and one flag that
//! tells of changes.
//!
//! The table has a fixed size (a link, an end and a region a slot for each peer), so a peer that
//! sends much while nobody polls fills nothing.

use std::sync::Arc;

use super::link::{Link, PeerRegion};
use crate::Rank;
use crate::device::LossCause;
use crate::region::RegionKey;

/// Bytes of one peer's regions that are mapped at most: an address space of 128 TiB holds 64 such
/// peers.
const MAPPED_BYTES_MAX: u64 = 1 << 40;

/// How a connection ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Lost(LossCause),
    Left,
}

/// The state of a slot of a peer's region table.
#[derive(Clone)]
pub(crate) enum Known {
    Nothing,
    Mapped(Arc<PeerRegion>),
    /// Announced, but this process could not map it.
    Unmappable(RegionKey),
}

/// The changes of one peer since the last poll.
#[derive(Default)]
pub(crate) struct PeerNews {
    pub(crate) link: Option<Link>,
    pub(crate) end: Option<End>,
    slots: Vec<Slot>,
    changed: Vec<u16>,
    mapped_bytes: u64,
    listed: bool,
}

struct Slot {
    known: Known,
    listed: bool,
}

/// One for a device, behind a mutex that is taken only after a change.
pub(crate) struct Board {
    peers: Vec<PeerNews>,
    changed: Vec<Rank>,
}

impl Board {
    pub(crate) fn new(world_size: u32) -> Self {
        Self { peers: (0..world_size).map(|_| PeerNews::default()).collect(), changed: Vec::new() }
    }

    /// A peer's status, to be changed.
    pub(crate) fn about(&mut self, peer: Rank) -> &mut PeerNews {
        let news = &mut self.peers[peer as usize];
        if !news.listed {
            news.listed = true;
            self.changed.push(peer);
        }
        news
    }

    /// The next changed peer.
    pub(crate) fn next(&mut self) -> Option<(Rank, &mut PeerNews)> {
        let peer = self.changed.pop()?;
        let news = &mut self.peers[peer as usize];
        news.listed = false;
        Some((peer, news))
    }

    /// Removes all regions of a peer, so that the table does not keep them mapped.
    pub(crate) fn forget(&mut self, peer: Rank) -> Vec<Known> {
        let news = &mut self.peers[peer as usize];
        news.changed.clear();
        news.mapped_bytes = 0;
        news.slots.drain(..).map(|slot| slot.known).collect()
    }
}

impl PeerNews {
    /// Whether another region of `len` bytes may be mapped.
    pub(crate) fn has_room(&self, len: u64) -> bool {
        self.mapped_bytes.checked_add(len).is_some_and(|bytes| bytes <= MAPPED_BYTES_MAX)
    }

    /// Sets the state of a slot (below `REGIONS_MAX`) and returns the previous one.
    pub(crate) fn set(&mut self, index: u16, known: Known) -> Known {
        let at = usize::from(index);
        while self.slots.len() <= at {
            self.slots.push(Slot { known: Known::Nothing, listed: false });
        }
        let slot = &mut self.slots[at];
        if !slot.listed {
            slot.listed = true;
            self.changed.push(index);
        }
        let before = std::mem::replace(&mut slot.known, known);
        let bytes = |known: &Known| if let Known::Mapped(region) = known { region.len() } else { 0 };
        self.mapped_bytes = self.mapped_bytes + bytes(&slot.known) - bytes(&before);
        before
    }

    /// The next changed slot.
    pub(crate) fn next_slot(&mut self) -> Option<(u16, Known)> {
        let index = self.changed.pop()?;
        let slot = &mut self.slots[usize::from(index)];
        slot.listed = false;
        Some((index, slot.known.clone()))
    }
}
