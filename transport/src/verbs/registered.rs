//! Registered memory: a memory region with each NIC, and its keys.
//!
//! Memory of a GPU is registered as a dma-buf, or by its address where the kernel gives NICs access
//! ([`super::direct`]). Host memory that is a dma-buf is registered as one, other host memory by
//! its address, locked. If the limit of locked memory is too small and the NIC supports page faults
//! (on-demand paging), the memory is registered for those instead.

use std::io;
use std::sync::Arc;

use super::Nic;
use super::limits::{CreateError, Limit};
use super::locked_limit;
use super::objects::MemoryRegion;
use super::wire::{KeyParts, NICS_MAX, NicKeys, REGION_BYTES_MAX, RemoteRegion};
use super::{FABRIC, sys};
use crate::Rank;
use crate::cuda::CudaMemory;
use crate::device::{BackendError, RegisterError};
use crate::memory::{Memory, Space};
use crate::region::{RegionKey, random_key};

/// The rights of peers to memory that they may only read, and of this rank's own gets. The NIC may
/// order the bytes of one write as it likes: nobody reads them before its completion, which is
/// ordered behind them.
const READ_ACCESS: u32 =
    sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_READ | sys::IBV_ACCESS_RELAXED_ORDERING;

/// The rights of peers that know the key, and of this rank's own gets: all that the contract's
/// transfers need.
fn access(memory: &dyn Memory) -> u32 {
    let writes = sys::IBV_ACCESS_REMOTE_WRITE | sys::IBV_ACCESS_REMOTE_ATOMIC;
    READ_ACCESS | if memory.peers_may_write() { writes } else { 0 }
}

/// Bytes of the smallest page: an address keeps its offset in it.
const PAGE_BYTES: usize = 4096;

/// A region of this rank.
pub(super) struct RegisteredMemory {
    /// One with each NIC; none for an empty region.
    regions: Vec<MemoryRegion>,
    local_keys: NicKeys,
    known: RemoteRegion,
    /// The only peer that it is for.
    only: Option<Rank>,
    /// Another process has the rank that it was for.
    is_orphaned: bool,
}

impl RegisteredMemory {
    /// Registers memory with all NICs, under a new key. The key ends with `slot` when shared memory
    /// lists the region too.
    pub(super) fn new(
        nics: &[Nic],
        memory: &Arc<dyn Memory>,
        slot: Option<u16>,
        only: Option<Rank>,
    ) -> Result<(RegionKey, Self), RegisterError> {
        let bytes = memory.len();
        if bytes as u64 >= REGION_BYTES_MAX {
            let source = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(RegisterError::System { bytes, source });
        }
        let page_offset = (memory.base().as_ptr() as usize % PAGE_BYTES) as u16;
        let random = random_key().0 as u32 >> 12;
        // Never zero without the slot: the key of empty memory in slot 0 would be that of no
        // region.
        let tag = match slot {
            None => random.max(1),
            Some(slot) => (random & !0xffff).max(1 << u16::BITS) | u32::from(slot),
        };
        let mut parts = KeyParts { remote_key: 0, tag, page_offset };
        let with = |nic: &Nic| register(nic, memory, parts.address());
        let regions = nics.iter().filter(|_| bytes > 0).map(with).collect::<Result<Vec<_>, _>>();
        let regions = regions.map_err(|error| not_registered(&**memory, error))?;
        let (mut local_keys, mut remote_keys) = ([0; NICS_MAX], [0; NICS_MAX]);
        for (nic, region) in regions.iter().enumerate() {
            (local_keys[nic], remote_keys[nic]) = (region.local_key(), region.remote_key());
        }
        parts.remote_key = remote_keys[0];
        let known = RemoteRegion { bytes: bytes as u64, keys: remote_keys };
        Ok((RegionKey(parts.encode()), Self { regions, local_keys, known, only, is_orphaned: false }))
    }

    /// This rank's own keys, by NIC.
    #[inline]
    pub(super) fn local_keys(&self) -> NicKeys {
        self.local_keys
    }

    /// The contents of its announcement to a peer, if it is for that peer.
    pub(super) fn known_to(&self, peer: Rank) -> Option<RemoteRegion> {
        let is_for_peer = !self.is_orphaned && self.only.is_none_or(|only| only == peer);
        is_for_peer.then_some(self.known)
    }

    /// Announces memory for this peer alone no more: another process gets its rank.
    pub(crate) fn orphan(&mut self, peer: Rank) {
        self.is_orphaned |= self.only == Some(peer);
    }

    /// Its memory region on the first NIC; `None` when it is empty.
    pub(super) fn on_first_nic(&self) -> Option<&MemoryRegion> {
        self.regions.first()
    }
}

/// Why a NIC did not register memory.
enum Refused {
    Nic(CreateError),
    /// Neither way to a GPU's memory works.
    OutOfReach {
        dma_buf: String,
        address: io::Error,
    },
}

/// Why a NIC does not register memory: see [`RegisterError::Fabric`].
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Neither way for a NIC to reach a GPU's memory works here.
    #[error(
        "the NIC does not reach memory of GPU {ordinal}: neither as a dma-buf ({dma_buf}), nor by its address ({address}), which takes nvidia-peermem; load that ('sudo modprobe nvidia-peermem'), or install NVIDIA's open kernel modules (driver 515 or newer, with Linux 5.12 and rdma-core 34 or newer); a group whose Options::space is gpu:{ordinal} stages it through host memory meanwhile"
    )]
    NoGpuDirect {
        /// The GPU.
        ordinal: u32,
        /// The error of the dma-buf.
        dma_buf: String,
        /// The kernel's error for its address.
        address: io::Error,
    },
    /// The GPU makes a NIC's writes visible only to a read through the NIC.
    #[error(
        "GPU {ordinal} gives the host no way to see what a NIC has written there in full (CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS says so); update NVIDIA's driver, or stage through host memory, as a group whose Options::space is gpu:{ordinal} does"
    )]
    NoFlush {
        /// The GPU.
        ordinal: u32,
    },
    /// The NIC needs locked memory, and this process may lock no more.
    #[error(
        "{bytes} bytes cannot be locked for the NIC: the limit is {limit} bytes; raise it with 'ulimit -l unlimited', or for good by the lines '* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.conf"
    )]
    Locked {
        /// The length, in bytes.
        bytes: usize,
        /// The limit of locked memory of this process, in bytes.
        limit: u64,
    },
    /// A limit of the NIC.
    #[error(transparent)]
    Limit(Limit),
}

impl From<MemoryError> for RegisterError {
    fn from(error: MemoryError) -> Self {
        Self::Fabric(BackendError::new(FABRIC, error))
    }
}

/// The public error.
fn not_registered(memory: &dyn Memory, refused: Refused) -> RegisterError {
    let bytes = memory.len();
    match (memory.space(), refused) {
        (_, Refused::Nic(CreateError::Limit(limit))) => MemoryError::Limit(limit).into(),
        // Without a limit another kind of memory is short.
        (Space::Host, Refused::Nic(CreateError::System(error)))
            if error.kind() == io::ErrorKind::OutOfMemory && locked_limit() < u64::MAX =>
        {
            MemoryError::Locked { bytes, limit: locked_limit() }.into()
        }
        (Space::Host, Refused::Nic(CreateError::System(source))) => RegisterError::System { bytes, source },
        (Space::Gpu { ordinal }, Refused::OutOfReach { dma_buf, address }) => {
            MemoryError::NoGpuDirect { ordinal, dma_buf, address }.into()
        }
        (space, _) => RegisterError::Space { fabric: FABRIC, space },
    }
}

/// Registers memory with one NIC.
fn register(nic: &Nic, memory: &Arc<dyn Memory>, address: u64) -> Result<MemoryRegion, Refused> {
    let windows = if nic.has_windows { sys::IBV_ACCESS_MW_BIND } else { 0 };
    let access = access(&**memory);
    if memory.space() != Space::Host {
        return register_on_gpu(nic, memory, address, access | windows);
    }
    let with = |access| MemoryRegion::new(&nic.domain, Arc::clone(memory), address, access);
    let locked = with(access | windows);
    let may_fault = memory.dma_buf().is_none();
    match &locked {
        Err(error) if error.kind() == io::ErrorKind::OutOfMemory && may_fault => {
            // The error of locking is the one that a user can remedy.
            with(access | sys::IBV_ACCESS_ON_DEMAND).or(locked)
        }
        _ => locked,
    }
    .map_err(Refused::Nic)
}

/// Registers a GPU's memory with one NIC: as a dma-buf, else by its address, which works where
/// nvidia-peermem is loaded.
fn register_on_gpu(
    nic: &Nic,
    memory: &Arc<dyn Memory>,
    address: u64,
    access: u32,
) -> Result<MemoryRegion, Refused> {
    let dma_buf = match CudaMemory::of(&**memory).map(CudaMemory::as_dma_buf) {
        Some(Err(error)) => error.to_string(),
        _ => match MemoryRegion::by_dma_buf(&nic.domain, Arc::clone(memory), address, access) {
            Err(CreateError::System(error)) => error.to_string(),
            registered => return registered.map_err(Refused::Nic),
        },
    };
    tracing::debug!("a GPU's memory is registered by its address: {dma_buf}");
    let registered = MemoryRegion::by_address(&nic.domain, Arc::clone(memory), address, access);
    registered.map_err(|error| match error {
        CreateError::System(address) => Refused::OutOfReach { dma_buf, address },
        limit => Refused::Nic(limit),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::HostMemory;

    #[test]
    fn the_key_of_empty_memory_names_its_slot_and_is_never_that_of_no_region() {
        let memory: Arc<dyn Memory> = HostMemory::new(0);
        for slot in [None, Some(0), Some(1), Some(u16::MAX)] {
            // Of 16 keys that are drawn anyhow one would be none.
            for _ in 0..200 {
                let key = RegisteredMemory::new(&[], &memory, slot, None).map(|(key, _)| key);
                let key = key.expect("no NIC refuses it");
                assert_ne!(key, RegionKey::NONE);
                assert!(slot.is_none_or(|slot| key.0 as u16 == slot), "{key:?}, slot {slot:?}");
            }
        }
    }
}
