//! The registration cache: memory that is registered already is not registered again.
//!
//! Registering memory is expensive: the kernel finds and locks every page, and the NIC gets a table
//! of them. If the same bytes are registered again while a handle of their region lives, the region
//! gets one more handle: same key, one registration with each NIC. **Invariant:** the cache holds
//! no memory and no region. The registration ends with the last handle. Memory that is allocated at
//! the same address afterwards is other memory, so nothing has to watch `malloc` or `munmap`.
//!
//! The same bytes are a [`Span`]: the same space, address and length. This holds for a dma-buf as
//! well, because addresses of GPU memory are unique in a process. Two `Memory` values may name one
//! span; the region keeps the first, which keeps the bytes alive. Memory that peers may not write
//! is another span.

use std::collections::BTreeMap;

use crate::memory::{Memory, Space};
use crate::region::{Region, WeakRegion};

/// The number of entries from which entries of dropped regions are removed.
const SWEEP_FROM: usize = 64;

/// Bytes that may be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Span {
    /// The GPU; `None`: the host.
    gpu: Option<u32>,
    address: usize,
    bytes: usize,
    /// Whether peers may write it.
    is_writable: bool,
}

impl Span {
    /// `None` for memory without bytes, whose address has no meaning.
    fn of(memory: &dyn Memory) -> Option<Self> {
        let gpu = match memory.space() {
            Space::Host => None,
            Space::Gpu { ordinal } => Some(ordinal),
        };
        let (address, bytes) = (memory.base().as_ptr() as usize, memory.len());
        (bytes > 0).then_some(Self { gpu, address, bytes, is_writable: memory.peers_may_write() })
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Cache {
    regions: BTreeMap<Span, WeakRegion>,
    sweep_at: usize,
}

impl Cache {
    /// The region of this memory, if it has one.
    pub(crate) fn find(&self, memory: &dyn Memory) -> Option<Region> {
        self.regions.get(&Span::of(memory)?)?.upgrade()
    }

    /// Records a region as that of its memory.
    pub(crate) fn add(&mut self, region: &Region) {
        let Some(span) = Span::of(&**region.memory()) else { return };
        self.regions.insert(span, region.downgrade());
        if self.regions.len() > self.sweep_at.max(SWEEP_FROM) {
            self.regions.retain(|_, region| region.upgrade().is_some());
            // So that the removal costs each entry a constant at most.
            self.sweep_at = 2 * self.regions.len();
        }
    }

    /// Removes all entries, because their pages are about to be replaced.
    pub(crate) fn clear(&mut self) {
        self.regions.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::memory::HostMemory;
    use crate::region::{RegionKey, Registry};

    struct NoOwner;

    impl Registry for NoOwner {
        fn released(&self, _key: RegionKey) {}
    }

    fn region(memory: &Arc<HostMemory>, key: u64) -> Region {
        Region::new(Arc::clone(memory) as _, RegionKey(key), Arc::new(NoOwner))
    }

    #[test]
    fn memory_is_found_as_long_as_a_handle_of_its_region_lives() {
        let (memory, other) = (HostMemory::new(100), HostMemory::new(100));
        let mut cache = Cache::default();
        let first = region(&memory, 1);
        cache.add(&first);
        assert!(cache.find(&*other).is_none());
        let second = cache.find(&*memory).expect("it has a region");
        assert_eq!(second.key(), first.key());
        drop(first);
        let third = cache.find(&*memory).expect("one handle is left");
        drop((second, third));
        assert!(cache.find(&*memory).is_none());
        assert_eq!(Arc::strong_count(&memory), 1, "the cache holds nothing");
    }

    #[test]
    fn memory_without_bytes_is_never_the_same() {
        let memory = HostMemory::new(0);
        let mut cache = Cache::default();
        let region = region(&memory, 1);
        cache.add(&region);
        assert!(cache.find(&*memory).is_none());
    }

    #[test]
    fn entries_of_regions_that_are_gone_do_not_gather() {
        let mut cache = Cache::default();
        let kept: Vec<_> = (0..10_u64).map(|key| region(&HostMemory::new(8), key)).collect();
        kept.iter().for_each(|region| cache.add(region));
        // All at once, so that no two have the same address.
        let gone: Vec<_> = (10..500_u64).map(|key| region(&HostMemory::new(8), key)).collect();
        for region in gone {
            cache.add(&region);
        }
        assert!(cache.regions.len() <= 2 * SWEEP_FROM, "{}", cache.regions.len());
        assert!(kept.iter().all(|region| cache.find(&**region.memory()).is_some()));
        cache.clear();
        assert!(kept.iter().all(|region| cache.find(&**region.memory()).is_none()));
    }
}
