//! The owner's end of leases.

use std::collections::BTreeMap;
use std::ops::Range;

use pleach_transport::{OutOfBounds, RegionKey, RemoteSlice};

use super::{SLOTS_MAX, UNTOUCHED};
use crate::reference::{LeaseNumber, LinkId, Reference};

/// What an owner lends at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseLimits {
    /// The bytes of all buffers of which a part is lent. A buffer counts once.
    pub bytes_lent: u64,
    /// Leases of one link, at most [`SLOTS_MAX`].
    pub leases_per_link: u32,
    /// Links.
    pub links: usize,
}

impl Default for LeaseLimits {
    fn default() -> Self {
        Self { bytes_lent: 1 << 30, leases_per_link: 1 << 12, links: 1 << 10 }
    }
}

/// Why a link was not opened.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OpenLinkError {
    /// There are too many.
    #[error("{limit} links are open, and no more may be; raise the limit, or send inline")]
    TooManyLinks {
        /// The limit.
        limit: usize,
    },
    /// A link of this name is open.
    #[error("link {link} is open already; draw another number")]
    IsOpen {
        /// The link.
        link: LinkId,
    },
}

/// Why bytes were not lent. They may be sent inline.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LendError {
    /// There is no such link, or no longer.
    #[error("link {link} is not open; connect anew")]
    UnknownLink {
        /// The link.
        link: LinkId,
    },
    /// The other end holds too many leases.
    #[error("link {link} holds {limit} leases, and no more may be; drop tensors there, or raise the limit")]
    TooManyLeases {
        /// The link.
        link: LinkId,
        /// The limit.
        limit: u32,
    },
    /// Too much is lent.
    #[error(
        "{bytes} bytes are not lent: {lent} bytes of at most {limit} are; drop tensors where they were received, or raise the limit"
    )]
    TooManyBytes {
        /// The length of the buffer, in bytes.
        bytes: u64,
        /// The bytes that are lent.
        lent: u64,
        /// The limit.
        limit: u64,
    },
    /// The bytes are not inside of the buffer.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}

/// A counter of a link says what it cannot. The other end is wrong: sever it.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReturnError {
    /// There is no such link, or no longer.
    #[error("link {link} is not open")]
    UnknownLink {
        /// The link.
        link: LinkId,
    },
    /// The slot was never lent.
    #[error("link {link} returns a lease of slot {slot}, which it never had; it is to be severed")]
    UnknownSlot {
        /// The link.
        link: LinkId,
        /// The slot.
        slot: u32,
    },
    /// The counter of a slot is neither that of the last lease nor that of the one before.
    #[error(
        "link {link} counts {count} leases of slot {slot} as returned, and had {lent}; it is to be severed"
    )]
    WrongCount {
        /// The link.
        link: LinkId,
        /// The slot.
        slot: u32,
        /// The counter.
        count: u64,
        /// The leases that the slot has had.
        lent: u64,
    },
}

/// Bytes that were not lent, with what keeps their buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Unlent<B> {
    /// What keeps the buffer.
    pub handle: B,
    /// Why it was not lent.
    pub error: LendError,
}

/// What is lent, over handles of any kind that keep a buffer from being used again. See the module.
pub struct LeaseOwner<B> {
    limits: LeaseLimits,
    links: BTreeMap<LinkId, Link<B>>,
    /// Leases by buffer.
    buffers: BTreeMap<BufferId, usize>,
    bytes_lent: u64,
}

/// A lease that has come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Returned<B> {
    /// What kept the buffer.
    pub handle: B,
    /// Whether nobody read it.
    pub is_untouched: bool,
}

/// Key, offset and length of a buffer.
type BufferId = (RegionKey, u64, u64);

struct Link<B> {
    /// By slot: the leases that the slot has had.
    generations: Vec<u64>,
    /// Slots without a lease.
    free: Vec<u32>,
    open: BTreeMap<u32, OpenLease<B>>,
}

struct OpenLease<B> {
    buffer: BufferId,
    handle: B,
}

impl<B> LeaseOwner<B> {
    /// An owner that has lent nothing.
    #[must_use]
    pub fn new(limits: LeaseLimits) -> Self {
        let leases_per_link = limits.leases_per_link.min(SLOTS_MAX);
        Self {
            limits: LeaseLimits { leases_per_link, ..limits },
            links: BTreeMap::new(),
            buffers: BTreeMap::new(),
            bytes_lent: 0,
        }
    }

    /// Opens a link. Its name must be random, and the same at the other end.
    ///
    /// # Errors
    ///
    /// See [`OpenLinkError`].
    pub fn open_link(&mut self, link: LinkId) -> Result<(), OpenLinkError> {
        if self.links.contains_key(&link) {
            return Err(OpenLinkError::IsOpen { link });
        }
        if self.links.len() >= self.limits.links {
            return Err(OpenLinkError::TooManyLinks { limit: self.limits.links });
        }
        self.links.insert(link, Link { generations: Vec::new(), free: Vec::new(), open: BTreeMap::new() });
        Ok(())
    }

    /// Lends a part of a buffer. `handle` keeps the buffer until the lease is back.
    ///
    /// # Errors
    ///
    /// See [`LendError`]; the handle comes back.
    pub fn lend(
        &mut self,
        link: LinkId,
        buffer: RemoteSlice,
        part: Range<u64>,
        handle: B,
    ) -> Result<Reference, Unlent<B>> {
        let (slice, more) = match self.check(link, buffer, part) {
            Ok(checked) => checked,
            Err(error) => return Err(Unlent { handle, error }),
        };
        let open = self.links.get_mut(&link).expect("it was checked");
        let slot = open.free.pop().unwrap_or_else(|| {
            open.generations.push(0);
            // Fewer than the limit, which has 32 bits.
            (open.generations.len() - 1) as u32
        });
        let generation = &mut open.generations[slot as usize];
        *generation += 1;
        let lease = LeaseNumber { slot, generation: *generation };
        let buffer = (buffer.key, buffer.offset, buffer.len);
        open.open.insert(slot, OpenLease { buffer, handle });
        *self.buffers.entry(buffer).or_default() += 1;
        self.bytes_lent += more;
        Ok(Reference { link, lease, slice })
    }

    /// The bytes of a lease that may be made, and by how much more is lent then.
    fn check(
        &self,
        link: LinkId,
        buffer: RemoteSlice,
        part: Range<u64>,
    ) -> Result<(RemoteSlice, u64), LendError> {
        let limits = self.limits;
        let Some(open) = self.links.get(&link) else { return Err(LendError::UnknownLink { link }) };
        let slice = buffer.slice(part)?;
        let id = (buffer.key, buffer.offset, buffer.len);
        let lent = self.bytes_lent;
        let more = if self.buffers.contains_key(&id) { 0 } else { buffer.len };
        if more > limits.bytes_lent.saturating_sub(lent) {
            return Err(LendError::TooManyBytes { bytes: buffer.len, lent, limit: limits.bytes_lent });
        }
        if open.open.len() >= limits.leases_per_link as usize {
            return Err(LendError::TooManyLeases { link, limit: limits.leases_per_link });
        }
        Ok((slice, more))
    }

    /// The counter of a slot as the other end has written it: that many leases of the slot are
    /// back. Returns the lease that has come back.
    ///
    /// # Errors
    ///
    /// When the counter says what it cannot; sever the link then.
    pub fn returned(
        &mut self,
        link: LinkId,
        slot: u32,
        counter: u64,
    ) -> Result<Option<Returned<B>>, ReturnError> {
        let Some(open) = self.links.get_mut(&link) else { return Err(ReturnError::UnknownLink { link }) };
        let Some(&lent) = open.generations.get(slot as usize) else {
            return Err(ReturnError::UnknownSlot { link, slot });
        };
        let (count, is_untouched) = (counter & !UNTOUCHED, counter & UNTOUCHED != 0);
        let is_open = open.open.contains_key(&slot);
        if count != lent && !(is_open && count == lent - 1) {
            return Err(ReturnError::WrongCount { link, slot, count, lent });
        }
        let Some(lease) = (if count == lent { open.open.remove(&slot) } else { None }) else {
            return Ok(None);
        };
        open.free.push(slot);
        Ok(Some(Returned { handle: self.end(lease), is_untouched }))
    }

    /// Reads the counters of all slots that are lent on a link. Returns the leases that have come
    /// back.
    ///
    /// # Errors
    ///
    /// When a counter says what it cannot; sever the link then, which returns the other handles.
    /// Those of leases that have come back are dropped.
    pub fn collect(
        &mut self,
        link: LinkId,
        counter: impl Fn(u32) -> u64,
    ) -> Result<Vec<Returned<B>>, ReturnError> {
        let Some(open) = self.links.get(&link) else { return Err(ReturnError::UnknownLink { link }) };
        let slots: Vec<u32> = open.open.keys().copied().collect();
        let mut leases = Vec::new();
        for slot in slots {
            leases.extend(self.returned(link, slot, counter(slot))?);
        }
        Ok(leases)
    }

    /// Reads the counters of a link whose other end accepts no more: see [`LeaseOwner::collect`].
    /// `held`: the lease that the other end holds in a slot. Every other one was never accepted,
    /// and is back untouched.
    ///
    /// # Errors
    ///
    /// As of [`LeaseOwner::collect`].
    pub fn collect_closed(
        &mut self,
        link: LinkId,
        counter: impl Fn(u32) -> u64,
        held: impl Fn(u32) -> u64,
    ) -> Result<Vec<Returned<B>>, ReturnError> {
        let mut leases = self.collect(link, counter)?;
        let open = self.open_leases(link).filter(|(lease, _)| held(lease.slot) != lease.generation);
        let nobodys: Vec<LeaseNumber> = open.map(|(lease, _)| lease).collect();
        for LeaseNumber { slot, generation } in nobodys {
            leases.extend(self.returned(link, slot, generation | UNTOUCHED)?);
        }
        Ok(leases)
    }

    /// Closes a link whose other end is severed: it reads no more. Returns the handles of its
    /// leases.
    pub fn sever(&mut self, link: LinkId) -> Vec<B> {
        let Some(closed) = self.links.remove(&link) else { return Vec::new() };
        closed.open.into_values().map(|lease| self.end(lease)).collect()
    }

    /// The bytes of all buffers of which a part is lent.
    #[must_use]
    pub fn bytes_lent(&self) -> u64 {
        self.bytes_lent
    }

    /// The leases of a link that are not back.
    #[must_use]
    pub fn leases(&self, link: LinkId) -> usize {
        self.links.get(&link).map_or(0, |link| link.open.len())
    }

    /// The leases of a link that are not back, with what keeps their buffers.
    pub fn open_leases(&self, link: LinkId) -> impl Iterator<Item = (LeaseNumber, &B)> {
        self.links.get(&link).into_iter().flat_map(|link| {
            let number = |slot: u32| LeaseNumber { slot, generation: link.generations[slot as usize] };
            link.open.iter().map(move |(slot, lease)| (number(*slot), &lease.handle))
        })
    }

    /// Whether one more link may be opened.
    #[must_use]
    pub fn has_room_for_link(&self) -> bool {
        self.links.len() < self.limits.links
    }

    /// The links that are open.
    #[must_use]
    pub fn links(&self) -> usize {
        self.links.len()
    }

    fn end(&mut self, lease: OpenLease<B>) -> B {
        if let Some(leases) = self.buffers.get_mut(&lease.buffer) {
            *leases -= 1;
            if *leases == 0 {
                self.buffers.remove(&lease.buffer);
                self.bytes_lent -= lease.buffer.2;
            }
        }
        lease.handle
    }
}
