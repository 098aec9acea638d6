//! The holder's end of leases.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use pleach_transport::{RegionKey, RemoteSlice};

use super::{SLOTS_MAX, UNTOUCHED};
use crate::reference::{LeaseNumber, LinkId, Reference};

/// Regions that an owner may announce on one link.
pub const REGIONS_MAX: usize = 1 << 10;

/// The counters of a link, a slot each: how many leases of the slot are back, and whether the last
/// one was [`UNTOUCHED`]. They begin with zero. The holder writes them and the owner reads them.
pub trait ReturnCounters: Send + Sync {
    /// Stores the counter of a slot. The owner sees the number only after all that was read from
    /// the lease. Called once a lease, from any thread.
    fn store(&self, slot: u32, count: u64);

    /// The number that [`ReturnCounters::store`] stored last.
    fn load(&self, slot: u32) -> u64;
}

/// Why a reference was refused. Nothing was read.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// It is good on another link.
    #[error("a reference of link {link} came, which is not good on link {own}; ask for the tensor anew")]
    WrongLink {
        /// The link of the reference.
        link: LinkId,
        /// This link.
        own: LinkId,
    },
    /// A link has no such slot.
    #[error("a reference to slot {slot} came on link {link}, which has {slots} slots")]
    UnknownSlot {
        /// The link.
        link: LinkId,
        /// The slot.
        slot: u32,
        /// The slots of a link.
        slots: u32,
    },
    /// The owner announced no such region.
    #[error("a reference of link {link} names {key:?}, which was not announced")]
    UnknownRegion {
        /// The link.
        link: LinkId,
        /// The region.
        key: RegionKey,
    },
    /// The bytes are not inside of the region.
    #[error("a reference of link {link} names {len} bytes from byte {offset} of a region of {bytes} bytes")]
    OutOfRange {
        /// The link.
        link: LinkId,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        len: u64,
        /// The length of the region.
        bytes: u64,
    },
    /// The lease was accepted or recalled before.
    #[error(
        "lease {generation} of slot {slot} came on link {link} again, after lease {last}; ask for the tensor anew"
    )]
    Stale {
        /// The link.
        link: LinkId,
        /// The slot.
        slot: u32,
        /// Its lease.
        generation: u64,
        /// The last lease of the slot.
        last: u64,
    },
    /// The lease cannot exist yet: the lease before it in the slot is not back.
    #[error(
        "lease {generation} of slot {slot} came on link {link} while {returned} leases of the slot were back"
    )]
    Early {
        /// The link.
        link: LinkId,
        /// The slot.
        slot: u32,
        /// Its lease.
        generation: u64,
        /// The leases of the slot that are back.
        returned: u64,
    },
}

/// Why a region was not taken as announced.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegionAnnounceError {
    /// The owner announces too many regions.
    #[error("link {link} announces more than {REGIONS_MAX} regions")]
    TooManyRegions {
        /// The link.
        link: LinkId,
    },
    /// It has the key of no region.
    #[error("link {link} announces a region without a key")]
    NoKey {
        /// The link.
        link: LinkId,
    },
    /// A region of this key is known.
    #[error("link {link} announces {key:?} twice")]
    Again {
        /// The link.
        link: LinkId,
        /// The region.
        key: RegionKey,
    },
}

/// The leases that this program borrows on one link. See the module.
pub struct LeaseHolder {
    link: LinkId,
    /// By key: the length in bytes.
    regions: BTreeMap<RegionKey, u64>,
    /// By slot: the last lease that was accepted or recalled.
    last: Vec<u64>,
    counters: Arc<dyn ReturnCounters>,
    #[cfg(test)]
    accepts_stale: bool,
}

impl LeaseHolder {
    /// The holder's end of a link with this many slots, at most [`SLOTS_MAX`].
    pub fn new(link: LinkId, slots: u32, counters: Arc<dyn ReturnCounters>) -> Self {
        Self {
            link,
            regions: BTreeMap::new(),
            last: vec![0; slots.min(SLOTS_MAX) as usize],
            counters,
            #[cfg(test)]
            accepts_stale: false,
        }
    }

    /// From now on leases are accepted again and again: a violation that simulations must find.
    #[cfg(test)]
    pub(crate) fn accept_stale(&mut self) {
        self.accepts_stale = true;
    }

    /// The owner has announced a region, which is mapped here or can be read over the fabric.
    ///
    /// # Errors
    ///
    /// See [`RegionAnnounceError`].
    pub fn add_region(&mut self, key: RegionKey, bytes: u64) -> Result<(), RegionAnnounceError> {
        let link = self.link;
        if key == RegionKey::NONE {
            return Err(RegionAnnounceError::NoKey { link });
        }
        if self.regions.contains_key(&key) {
            return Err(RegionAnnounceError::Again { link, key });
        }
        if self.regions.len() >= REGIONS_MAX {
            return Err(RegionAnnounceError::TooManyRegions { link });
        }
        self.regions.insert(key, bytes);
        Ok(())
    }

    /// Takes the lease that a reference names.
    ///
    /// # Errors
    ///
    /// See [`ReferenceError`]; nothing is changed then.
    pub fn accept(&mut self, reference: &Reference) -> Result<Lease, ReferenceError> {
        let (link, slice) = (self.link, reference.slice);
        if reference.link != link {
            return Err(ReferenceError::WrongLink { link: reference.link, own: link });
        }
        let RemoteSlice { key, offset, len } = slice;
        let Some(&bytes) = self.regions.get(&key) else {
            return Err(ReferenceError::UnknownRegion { link, key });
        };
        if offset.checked_add(len).is_none_or(|end| end > bytes) {
            return Err(ReferenceError::OutOfRange { link, offset, len, bytes });
        }
        self.take(*reference)
    }

    /// Takes a lease whose bytes come with the message that names it: its return says that they
    /// have been received.
    ///
    /// # Errors
    ///
    /// See [`ReferenceError`]; nothing is changed then.
    pub fn accept_inline(&mut self, lease: LeaseNumber, bytes: u64) -> Result<Lease, ReferenceError> {
        let slice = RemoteSlice { key: RegionKey::NONE, offset: 0, len: bytes };
        self.take(Reference { link: self.link, lease, slice })
    }

    fn take(&mut self, reference: Reference) -> Result<Lease, ReferenceError> {
        let (link, lease) = (self.link, reference.lease);
        let last = self.last(lease)?;
        #[cfg(test)]
        if self.accepts_stale && last >= lease.generation {
            let inner = LeaseInner { reference, is_untouched: false, counters: self.counters.clone() };
            return Ok(Lease { inner: Arc::new(inner) });
        }
        if last >= lease.generation {
            let LeaseNumber { slot, generation } = lease;
            return Err(ReferenceError::Stale { link, slot, generation, last });
        }
        self.begin(lease)?;
        let inner = LeaseInner { reference, is_untouched: false, counters: self.counters.clone() };
        Ok(Lease { inner: Arc::new(inner) })
    }

    /// The owner asks for a lease back whose reference may have got lost. If the reference never
    /// came, the lease counts as returned now. If it came, nothing changes: the drop of the last
    /// handle returns it.
    ///
    /// # Errors
    ///
    /// When the lease cannot exist: see [`ReferenceError`].
    pub fn recall(&mut self, lease: LeaseNumber) -> Result<(), ReferenceError> {
        if self.last(lease)? < lease.generation {
            self.begin(lease)?;
            self.counters.store(lease.slot, lease.generation | UNTOUCHED);
        }
        Ok(())
    }

    /// The leases that were accepted and are not back. After the last accept, all other leases of
    /// the link are nobody's.
    pub fn held(&self) -> impl Iterator<Item = LeaseNumber> {
        self.last.iter().enumerate().filter_map(|(slot, last)| {
            let slot = slot as u32;
            let is_held = self.counters.load(slot) & !UNTOUCHED != *last;
            is_held.then_some(LeaseNumber { slot, generation: *last })
        })
    }

    /// The last lease in the slot of this lease.
    fn last(&self, LeaseNumber { slot, .. }: LeaseNumber) -> Result<u64, ReferenceError> {
        let slots = self.last.len() as u32;
        let last = self.last.get(slot as usize).copied();
        last.ok_or(ReferenceError::UnknownSlot { link: self.link, slot, slots })
    }

    /// Makes `lease` the last one of its slot. It must be the next one, and the one before must be
    /// back.
    fn begin(&mut self, lease: LeaseNumber) -> Result<(), ReferenceError> {
        let (last, LeaseNumber { slot, generation }) = (self.last(lease)?, lease);
        let returned = self.counters.load(slot) & !UNTOUCHED;
        if last != returned || generation - 1 != last {
            return Err(ReferenceError::Early { link: self.link, slot, generation, returned });
        }
        self.last[slot as usize] = generation;
        Ok(())
    }
}

/// Memory of another program that is lent to this one. Clones are handles of the same lease. The
/// drop of the last handle returns the lease.
#[derive(Clone)]
pub struct Lease {
    inner: Arc<LeaseInner>,
}

struct LeaseInner {
    reference: Reference,
    /// Whether it was declined.
    is_untouched: bool,
    counters: Arc<dyn ReturnCounters>,
}

impl Drop for LeaseInner {
    fn drop(&mut self) {
        let LeaseNumber { slot, generation } = self.reference.lease;
        let bit = if self.is_untouched { UNTOUCHED } else { 0 };
        self.counters.store(slot, generation | bit);
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Lease({:?})", self.inner.reference)
    }
}

impl Lease {
    /// Returns the lease untouched: nobody has read it, and the owner may give the tensor to
    /// another receiver. A lease with clones is returned by its last drop, as one that was read.
    pub fn decline(mut self) {
        if let Some(inner) = Arc::get_mut(&mut self.inner) {
            inner.is_untouched = true;
        }
    }

    /// The link on which the reference came.
    #[must_use]
    pub fn link(&self) -> LinkId {
        self.inner.reference.link
    }

    /// The number of the lease on its link.
    #[must_use]
    pub fn number(&self) -> LeaseNumber {
        self.inner.reference.lease
    }

    /// The bytes, in a region of the owner; in [`RegionKey::NONE`] where they came with a message.
    #[must_use]
    pub fn slice(&self) -> RemoteSlice {
        self.inner.reference.slice
    }
}
