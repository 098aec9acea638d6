//! Revocable keys for one peer: memory windows of type 2, if the NIC has them.
//!
//! A region's own key is valid for every peer and as long as the region. A lease is valid for one
//! peer, on its queue pair, and can be revoked at once, without registering the memory anew. The
//! tensor exchange lends by such keys.
//!
//! **Invariant:** a lease holds its slice, so its region is deregistered after its last lease. A
//! window is not freed before its binding has ended, or its pair has: a request that is not posted
//! yet names the window by its address, and nothing is posted once the pair has ended. A driver may
//! refuse to destroy a queue pair that has bound a window (Soft-RoCE does, after it has waited), so
//! windows are freed first.

use super::limits::{CreateError, Limit};
use super::objects::MemoryWindow;
use super::pair::Pair;
use super::send_queue::SendQueue;
use super::{Peer, VerbsDevice, sys};
use crate::Rank;
use crate::device::TransferId;
use crate::region::{KeyMap, RegionKey, RemoteSlice, Slice};

/// Why memory was not leased.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Not connected, or no longer.
    #[error("rank {peer} is not connected")]
    NotConnected {
        /// The peer.
        peer: Rank,
    },
    /// A lease is valid on one queue pair, and this peer has several.
    #[error("rank {peer} is joined by {queue_pairs} queue pairs, and a lease is good on one only")]
    SeveralQueuePairs {
        /// The peer.
        peer: Rank,
        /// Their number.
        queue_pairs: usize,
    },
    /// The slice belongs to another device, or is empty.
    #[error("there are no bytes of this device to lease")]
    Nothing,
    /// Too many transfers are under way to the peer; poll, then try again.
    #[error("rank {peer} has too many transfers under way")]
    QueueFull {
        /// The peer.
        peer: Rank,
    },
    /// The NIC has no memory windows of type 2, or no more of them, or binds none to this memory.
    #[error("RDMA device {device} gives no memory window of type 2")]
    NoWindow {
        /// The device.
        device: String,
        /// The NIC's error.
        #[source]
        source: std::io::Error,
    },
    /// A limit of the NIC.
    #[error(transparent)]
    Limit(#[from] Limit),
}

/// The leases of a pair that were not revoked.
#[derive(Default)]
pub(crate) struct Leases {
    held: KeyMap<HeldLease>,
    /// Of these, those that were revoked before they were bound.
    revoked: Vec<RegionKey>,
}

struct HeldLease {
    /// The number of the request that binds the window.
    binding: u64,
    // Before the region to which it is bound.
    _window: MemoryWindow,
    _holds: Slice,
}

impl Leases {
    pub(crate) fn add(&mut self, key: RegionKey, binding: u64, window: MemoryWindow, slice: Slice) {
        self.held.insert(key, HeldLease { binding, _window: window, _holds: slice });
    }

    /// Frees the window of a key, at once if `queue` has bound it.
    pub(crate) fn revoke(&mut self, key: RegionKey, queue: &SendQueue) {
        match self.held.get(&key) {
            Some(lease) if !queue.has_ended(lease.binding) => self.revoked.push(key),
            _ => drop(self.held.remove(&key)),
        }
    }

    /// Whether `queue` has bound the window of a key.
    pub(crate) fn has_bound(&self, key: RegionKey, queue: &SendQueue) -> bool {
        self.held.get(&key).is_some_and(|lease| queue.has_ended(lease.binding))
    }

    /// Frees the windows of revoked leases that `queue` has bound meanwhile.
    #[inline]
    pub(crate) fn free_revoked(&mut self, queue: &SendQueue) {
        if !self.revoked.is_empty() {
            for key in std::mem::take(&mut self.revoked) {
                self.revoke(key, queue);
            }
        }
    }
}

impl VerbsDevice {
    /// Leases a slice to one peer. The peer may use the returned name in place of the slice's own,
    /// from the [`Event::Done`](crate::Event::Done) of `id` here until [`VerbsDevice::revoke`].
    /// # Errors
    ///
    /// See [`LeaseError`].
    pub fn lease(&mut self, peer: Rank, slice: &Slice, id: TransferId) -> Result<RemoteSlice, LeaseError> {
        let Some(Peer::Open(pair)) = self.peers.get_mut(peer as usize) else {
            return Err(LeaseError::NotConnected { peer });
        };
        let registered = self.regions.get(&slice.region().key()).filter(|_| !slice.is_empty());
        let region =
            registered.and_then(|registered| registered.on_first_nic()).ok_or(LeaseError::Nothing)?;
        let nic = &self.nics[0];
        let no_window = |source| LeaseError::NoWindow { device: nic.chosen.device.clone(), source };
        if !region.takes_windows() {
            return Err(no_window(std::io::ErrorKind::Unsupported.into()));
        }
        let window = MemoryWindow::new(&nic.domain).map_err(|error| match error {
            CreateError::Limit(limit) => LeaseError::Limit(limit),
            CreateError::System(source) => no_window(source),
        })?;
        let leased = pair.lease(peer, window, region, slice, id)?;
        self.post_or_list(peer);
        Ok(leased)
    }

    /// Whether the NIC has bound a lease, so that the peer may use its name already. Takes what the
    /// NIC has completed; its events come by the next poll, for which the wake source wakes.
    pub fn is_bound(&mut self, peer: Rank, key: RegionKey) -> bool {
        self.post_all();
        self.unfinished |= self.take_completions();
        let pair = self.peers.get_mut(peer as usize);
        matches!(pair, Some(Peer::Open(pair)) if pair.has_bound(key))
    }

    /// Revokes a lease. When this returns the NIC refuses the key, and a peer that still uses it
    /// loses the pair. A lease whose `Done` has not come is revoked when it comes. Ignored when no
    /// such lease exists.
    pub fn revoke(&mut self, peer: Rank, key: RegionKey) {
        if let Some(Peer::Open(pair)) = self.peers.get_mut(peer as usize) {
            pair.revoke(key);
        }
    }
}

impl Pair {
    /// Binds a window to a slice of this region.
    fn lease(
        &mut self,
        peer: Rank,
        window: MemoryWindow,
        region: &super::objects::MemoryRegion,
        slice: &Slice,
        id: TransferId,
    ) -> Result<RemoteSlice, LeaseError> {
        let writes = sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
        let may_write = slice.region().memory().peers_may_write();
        let access = sys::IBV_ACCESS_REMOTE_READ | if may_write { writes } else { 0 };
        if self.queue_pairs().count() > 1 {
            return Err(LeaseError::SeveralQueuePairs { peer, queue_pairs: self.queue_pairs().count() });
        }
        if !self.has_room() {
            return Err(LeaseError::QueueFull { peer });
        }
        let named = slice.remote();
        let address = super::send_queue::Target::of(&named).address;
        let bind = window.bind(region, address, slice.len() as u64, access);
        let parts =
            super::wire::KeyParts { remote_key: bind.rkey, ..super::wire::KeyParts::decode(named.key.0) };
        let key = RegionKey(parts.encode());
        self.bind(bind, id, key, (window, slice.clone()));
        Ok(RemoteSlice { key, ..named })
    }
}
