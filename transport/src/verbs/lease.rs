//! Keys that one peer may use for a while: memory windows of type 2, where the NIC has them.
//!
//! A region's own key is good for every peer and as long as the region. A lease is good for one
//! peer, on the queue pair that joins the two, and can be taken back at once, without the cost of
//! registering the memory anew. **Invariant:** a lease holds its slice, so its region is
//! deregistered after the last lease of it.

use super::limits::{Limit, NotMade};
use super::objects::Window;
use super::pair::Pair;
use super::{Peer, VerbsDevice, sys};
use crate::Rank;
use crate::device::TransferId;
use crate::region::{RegionKey, RemoteSlice, Slice};

/// Why memory was not leased.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum LeaseError {
    /// Not connected, or no longer.
    #[error("rank {peer} is not connected")]
    NotConnected {
        /// Who.
        peer: Rank,
    },
    /// A lease is good on one queue pair, and there are several to this peer.
    #[error("rank {peer} is joined by {queue_pairs} queue pairs, and a lease is good on one only")]
    SeveralQueuePairs {
        /// Who.
        peer: Rank,
        /// How many.
        queue_pairs: usize,
    },
    /// The slice is of another device, or has no bytes.
    #[error("there are no bytes of this device to lease")]
    Nothing,
    /// Too much is under way to the peer; poll, then try again.
    #[error("rank {peer} has too many transfers under way")]
    QueueFull {
        /// Who.
        peer: Rank,
    },
    /// The NIC has no memory windows of type 2, or no more of them.
    #[error("RDMA device {device} gives no memory window of type 2")]
    NoWindow {
        /// Which device.
        device: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It gives so many.
    #[error(transparent)]
    Limit(#[from] Limit),
}

/// A lease that was not taken back.
pub(super) struct Leased {
    _window: Window,
    _holds: Slice,
}

impl VerbsDevice {
    /// Leases a slice to one peer: it may use the name that is returned as it would the slice's
    /// own, from when [`Event::Done`](crate::Event::Done) with `id` has come here until
    /// [`VerbsDevice::revoke`], and not beyond the slice.
    ///
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
        let window = Window::new(&nic.domain).map_err(|error| match error {
            NotMade::Limit(limit) => LeaseError::Limit(limit),
            NotMade::System(source) => LeaseError::NoWindow { device: nic.chosen.device.clone(), source },
        })?;
        let leased = pair.lease(peer, window, region, slice, id)?;
        self.post_or_list(peer);
        Ok(leased)
    }

    /// Takes a lease back: when this returns, the peer's NIC is refused, and who still uses it
    /// loses the pair. Nothing where there is no such lease (any more).
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
        window: Window,
        region: &super::objects::MemoryRegion,
        slice: &Slice,
        id: TransferId,
    ) -> Result<RemoteSlice, LeaseError> {
        let access =
            sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_REMOTE_ATOMIC;
        if self.queue_pairs().count() > 1 {
            return Err(LeaseError::SeveralQueuePairs { peer, queue_pairs: self.queue_pairs().count() });
        }
        if !self.has_room() {
            return Err(LeaseError::QueueFull { peer });
        }
        let named = slice.remote();
        let address = super::request::Target::of(&named).address;
        let bind = window.bind(region, address, slice.len() as u64, access);
        let parts =
            super::wire::KeyParts { remote_key: bind.rkey, ..super::wire::KeyParts::decode(named.key.0) };
        let key = RegionKey(parts.encode());
        self.bind(bind, id, key, Leased { _window: window, _holds: slice.clone() });
        Ok(RemoteSlice { key, ..named })
    }
}
