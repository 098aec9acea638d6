//! Memory as the NICs know it: one registration with each, and the keys by which requests and peers name it.
//!
//! Memory that is a dma-buf is registered as one, other memory of a GPU is refused; memory of the host is registered by its
//! address, locked. Where the limit of locked memory does not suffice and
//! the NIC takes page faults (on-demand paging), it is registered for those instead.

use std::io;
use std::sync::Arc;

use super::limits::NotMade;
use super::nic::Nic;
use super::objects::MemoryRegion;
use super::open::locked_limit;
use super::wire::{KeyParts, KnownRegion, NICS_MAX, NicKeys, REGION_BYTES_MAX};
use super::{FABRIC, sys};
use crate::device::RegisterError;
use crate::memory::{Memory, Space, random_key};
use crate::region::RegionKey;

/// What peers may do with a region whose key they know, and this rank's own gets: all that the contract's transfers need.
/// The order in which the bytes of one write become visible is the NIC's choice, as nobody looks at them before its
/// completion, which is ordered behind them.
const ACCESS: u32 = sys::IBV_ACCESS_LOCAL_WRITE
    | sys::IBV_ACCESS_REMOTE_WRITE
    | sys::IBV_ACCESS_REMOTE_READ
    | sys::IBV_ACCESS_REMOTE_ATOMIC
    | sys::IBV_ACCESS_RELAXED_ORDERING;

/// Bytes of the smallest page: an address keeps its place in it.
const PAGE_BYTES: usize = 4096;

/// A region of this rank.
pub(super) struct Registered {
    /// One with each NIC; none of a region without bytes.
    regions: Vec<MemoryRegion>,
    pub(super) local_keys: NicKeys,
    known: KnownRegion,
}

impl Registered {
    /// Registers memory with all NICs, under a key that is new, and that ends with `slot` where shared memory lists it too.
    pub(super) fn new(
        nics: &[Nic],
        memory: &Arc<dyn Memory>,
        slot: Option<u16>,
    ) -> Result<(RegionKey, Self), RegisterError> {
        let bytes = memory.len();
        if bytes as u64 >= REGION_BYTES_MAX {
            let source = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(RegisterError::System { bytes, source });
        }
        let space = memory.space();
        if space != Space::Host && memory.dma_buf().is_none() {
            return Err(RegisterError::Space { fabric: FABRIC, space });
        }
        let page_offset = (memory.base().as_ptr() as usize % PAGE_BYTES) as u16;
        let random = (random_key().0 as u32 >> 12).max(1);
        let tag = slot.map_or(random, |slot| random & !0xffff | u32::from(slot));
        let mut parts = KeyParts { remote_key: 0, tag, page_offset };
        let with = |nic: &Nic| register(nic, memory, parts.address());
        let regions = nics.iter().filter(|_| bytes > 0).map(with).collect::<Result<Vec<_>, _>>();
        let regions = regions.map_err(|error| not_registered(&**memory, error))?;
        let (mut local_keys, mut remote_keys) = ([0; NICS_MAX], [0; NICS_MAX]);
        for (nic, region) in regions.iter().enumerate() {
            (local_keys[nic], remote_keys[nic]) = (region.local_key(), region.remote_key());
        }
        parts.remote_key = remote_keys[0];
        let known = KnownRegion { bytes: bytes as u64, keys: remote_keys };
        Ok((RegionKey(parts.encode()), Self { regions, local_keys, known }))
    }

    /// What peers may be told of it beside its key.
    pub(super) fn known(&self) -> KnownRegion {
        self.known
    }

    /// As the first NIC knows it; `None` without bytes.
    pub(super) fn on_first_nic(&self) -> Option<&MemoryRegion> {
        self.regions.first()
    }
}

/// What people are told of it.
fn not_registered(memory: &dyn Memory, error: NotMade) -> RegisterError {
    let bytes = memory.len();
    match (memory.space(), error) {
        (_, NotMade::Limit(limit)) => RegisterError::Limit(limit),
        // Without a limit it is another memory that there is too little of.
        (Space::Host, NotMade::System(error))
            if error.kind() == io::ErrorKind::OutOfMemory && locked_limit() < u64::MAX =>
        {
            RegisterError::Locked { bytes, limit: locked_limit() }
        }
        (Space::Host, NotMade::System(source)) => RegisterError::System { bytes, source },
        (space, NotMade::System(_)) => RegisterError::Space { fabric: FABRIC, space },
    }
}

/// Registers memory with one NIC.
fn register(nic: &Nic, memory: &Arc<dyn Memory>, address: u64) -> Result<MemoryRegion, NotMade> {
    let windows = if nic.has_windows { sys::IBV_ACCESS_MW_BIND } else { 0 };
    let with = |access| MemoryRegion::new(&nic.domain, Arc::clone(memory), address, access);
    let locked = with(ACCESS | windows);
    let may_fault = memory.space() == Space::Host && memory.dma_buf().is_none();
    match &locked {
        Err(error) if error.kind() == io::ErrorKind::OutOfMemory && may_fault => {
            // What locking said is what can be mended.
            with(ACCESS | sys::IBV_ACCESS_ON_DEMAND).or(locked)
        }
        _ => locked,
    }
}
