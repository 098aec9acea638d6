//! The plan of lendable memory: in which arena and at which offset each buffer lies.
//!
//! A program that maps an arena can read all of it, and a mapping cannot be taken back. So each
//! *trust domain*, the holders of one secret, has an arena of its own. Pages of an arena cannot be
//! dropped either (`transport`, sealed memory). A page that was touched stays until the whole arena
//! is discarded.
//!
//! * A buffer takes the smallest run of free bytes that is long enough, or the arena grows.
//! * An arena without buffers and without readers is *idle*. A domain that has none gets an idle
//!   one, whose bytes are overwritten first.
//! * Where the limit does not let an arena grow, idle arenas are discarded.
//!
//! **Invariant:** buffers do not overlap. All arenas have touched at most as many bytes as the
//! limit says. All readers of an arena are of its domain. An arena holds no bytes of another domain
//! once the caller has overwritten the range that an [`Allocation`] names. A refused allocation
//! changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Buffers begin at multiples of it, in bytes.
pub const ALIGNMENT: u64 = 64;

/// The limits of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaLimits {
    /// The bytes that all arenas have touched.
    pub bytes: u64,
    /// Arenas.
    pub arenas: usize,
}

impl Default for ArenaLimits {
    fn default() -> Self {
        // As much as may be held in a table and lent at the same time.
        Self { bytes: 2 << 30, arenas: 16 }
    }
}

/// Names an arena. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaId(u64);

impl ArenaId {
    /// Its number, from 1.
    #[must_use]
    pub fn number(self) -> u64 {
        self.0
    }
}

/// The place of a buffer. It is freed by [`ArenaPlan::free`], once: it has no copies.
#[derive(Debug, PartialEq, Eq)]
pub struct Block {
    arena: ArenaId,
    offset: u64,
    /// A multiple of the alignment.
    len: u64,
}

/// A new buffer, and what is to be done before its first use.
#[derive(Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its place.
    pub block: Block,
    /// The arena was another domain's: these bytes of it are to be overwritten.
    pub overwrite: Range<u64>,
    /// Arenas that are no longer: their memory is to be given back.
    pub discarded: Vec<ArenaId>,
}

/// Why there is no place for a buffer.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocateError {
    /// It would go beyond the limit.
    #[error(
        "no room for a tensor of {bytes} bytes in lendable memory: {touched} bytes of at most {limit} are in \
         arenas; drop tensors, or raise the limit"
    )]
    Full {
        /// The length of the buffer, in bytes.
        bytes: u64,
        /// The bytes that arenas have touched.
        touched: u64,
        /// The limit.
        limit: u64,
    },
    /// All arenas are in use by other domains.
    #[error(
        "{limit} arenas of lendable memory are in use, and no more may be; close links, or raise the limit"
    )]
    TooManyArenas {
        /// The limit.
        limit: usize,
    },
}

/// The plan of all arenas. `D` names a trust domain. See the module.
pub struct ArenaPlan<D> {
    limits: ArenaLimits,
    arenas: BTreeMap<ArenaId, Arena<D>>,
    by_domain: BTreeMap<D, ArenaId>,
    /// Those that can read the arena of a domain.
    readers: BTreeMap<D, usize>,
    touched: u64,
    last: u64,
}

struct Arena<D> {
    domain: D,
    /// Bytes below this one may hold something.
    touched: u64,
    free: FreeRuns,
    /// Buffers: their length by their offset.
    blocks: BTreeMap<u64, u64>,
}

impl Block {
    /// Its arena.
    #[must_use]
    pub fn arena(&self) -> ArenaId {
        self.arena
    }

    /// Its bytes in the arena, at least as many as were asked for.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }
}

/// Where an allocation may go.
enum Candidate {
    /// The arena of the domain.
    Own(ArenaId),
    /// An idle one of another domain.
    Idle(ArenaId),
    New,
}

impl<D: Clone + Ord> ArenaPlan<D> {
    /// A plan without arenas.
    #[must_use]
    pub fn new(limits: ArenaLimits) -> Self {
        let (arenas, by_domain, readers) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        Self { limits, arenas, by_domain, readers, touched: 0, last: 0 }
    }

    /// Finds a place for a buffer that holders of this domain may read.
    ///
    /// # Errors
    ///
    /// See [`AllocateError`].
    pub fn allocate(&mut self, domain: &D, bytes: u64) -> Result<Allocation, AllocateError> {
        let (touched, limit) = (self.touched, self.limits.bytes);
        let full = AllocateError::Full { bytes, touched, limit };
        let len = bytes.max(1).checked_next_multiple_of(ALIGNMENT).ok_or(full)?;
        let candidate = self.candidate(domain)?;
        let (arena, growth) = match candidate {
            Candidate::Own(id) | Candidate::Idle(id) => (Some(id), self.arenas[&id].growth(len)),
            Candidate::New => (None, len),
        };
        let discarded = self.to_discard(arena, growth).ok_or(full)?;
        for id in &discarded {
            self.discard(*id);
        }
        let mut overwrite = 0..0;
        let id = match candidate {
            Candidate::Own(id) => id,
            Candidate::Idle(id) => {
                overwrite.end = self.hand_over(id, domain);
                id
            }
            Candidate::New => self.open(domain),
        };
        let arena = self.arenas.get_mut(&id).expect("it is there or was opened");
        self.touched += growth;
        Ok(Allocation { block: Block { arena: id, offset: arena.take(len), len }, overwrite, discarded })
    }

    /// The buffer is no longer, nor any lease of it.
    ///
    /// # Panics
    ///
    /// When the block is of another plan.
    pub fn free(&mut self, block: Block) {
        let Block { arena, offset, len } = block;
        let arena = self.arenas.get_mut(&arena).expect("an arena with buffers is not discarded");
        assert_eq!(arena.blocks.remove(&offset), Some(len), "a block is freed once, in its plan");
        arena.free.insert(offset, len);
    }

    /// Someone who holds the domain's secret can read the domain's arena from now on.
    pub fn add_reader(&mut self, domain: &D) {
        *self.readers.entry(domain.clone()).or_default() += 1;
    }

    /// A reader can read no more: its process is known to have ended, or it never mapped the arena.
    /// A reader that was only severed may still have its mapping, and is not removed.
    pub fn remove_reader(&mut self, domain: &D) {
        if let Some(readers) = self.readers.get_mut(domain) {
            *readers -= 1;
            if *readers == 0 {
                self.readers.remove(domain);
            }
        }
    }

    /// The bytes that all arenas have touched.
    #[must_use]
    pub fn touched(&self) -> u64 {
        self.touched
    }

    /// The arena of a domain.
    #[must_use]
    pub fn arena(&self, domain: &D) -> Option<ArenaId> {
        self.by_domain.get(domain).copied()
    }

    fn is_idle(&self, arena: &Arena<D>) -> bool {
        arena.blocks.is_empty() && !self.readers.contains_key(&arena.domain)
    }

    /// The arena of this domain, else the idle one with most bytes, else a new one.
    fn candidate(&self, domain: &D) -> Result<Candidate, AllocateError> {
        if let Some(id) = self.arena(domain) {
            return Ok(Candidate::Own(id));
        }
        let idle = self.arenas.iter().filter(|(_, arena)| self.is_idle(arena));
        if let Some((id, _)) = idle.max_by_key(|(_, arena)| arena.touched) {
            return Ok(Candidate::Idle(*id));
        }
        let limit = self.limits.arenas;
        if self.arenas.len() < limit {
            Ok(Candidate::New)
        } else {
            Err(AllocateError::TooManyArenas { limit })
        }
    }

    /// The idle arenas, but for the one that grows, that make room for its growth; `None` when they
    /// do not.
    fn to_discard(&self, grows: Option<ArenaId>, growth: u64) -> Option<Vec<ArenaId>> {
        let mut touched = self.touched.checked_add(growth)?;
        let mut discarded = Vec::new();
        let idle = self.arenas.iter().filter(|(id, arena)| Some(**id) != grows && self.is_idle(arena));
        for (id, arena) in idle {
            if touched <= self.limits.bytes {
                break;
            }
            touched -= arena.touched;
            discarded.push(*id);
        }
        (touched <= self.limits.bytes).then_some(discarded)
    }

    fn discard(&mut self, id: ArenaId) {
        if let Some(arena) = self.arenas.remove(&id) {
            self.by_domain.remove(&arena.domain);
            self.touched -= arena.touched;
        }
    }

    /// Gives an idle arena to another domain. Returns how many bytes of it are to be overwritten.
    fn hand_over(&mut self, id: ArenaId, domain: &D) -> u64 {
        let arena = self.arenas.get_mut(&id).expect("it is idle");
        self.by_domain.remove(&arena.domain);
        self.by_domain.insert(domain.clone(), id);
        arena.domain = domain.clone();
        arena.touched
    }

    fn open(&mut self, domain: &D) -> ArenaId {
        self.last += 1;
        let id = ArenaId(self.last);
        let (free, blocks) = (FreeRuns::default(), BTreeMap::new());
        self.arenas.insert(id, Arena { domain: domain.clone(), touched: 0, free, blocks });
        self.by_domain.insert(domain.clone(), id);
        id
    }
}

impl<D> Arena<D> {
    /// By how much the arena grows for a buffer of this length.
    fn growth(&self, len: u64) -> u64 {
        if self.free.best(len).is_some() { 0 } else { len - self.free.length_before(self.touched) }
    }

    /// Takes the bytes of a buffer; returns their offset.
    fn take(&mut self, len: u64) -> u64 {
        if self.free.best(len).is_none() {
            let growth = self.growth(len);
            self.free.insert(self.touched, growth);
            self.touched += growth;
        }
        let (length, offset) = self.free.best(len).expect("the arena has grown by enough");
        self.free.remove(offset, length);
        if length > len {
            self.free.insert(offset + len, length - len);
        }
        self.blocks.insert(offset, len);
        offset
    }
}

/// Runs of free bytes. No two touch each other.
#[derive(Default)]
struct FreeRuns {
    by_offset: BTreeMap<u64, u64>,
    by_length: BTreeSet<(u64, u64)>,
}

impl FreeRuns {
    /// The shortest run of at least this length, the first of several.
    fn best(&self, len: u64) -> Option<(u64, u64)> {
        self.by_length.range((len, 0)..).next().copied()
    }

    /// The length of the run that ends here.
    fn length_before(&self, end: u64) -> u64 {
        let run = self.by_offset.range(..end).next_back();
        run.filter(|(offset, length)| *offset + *length == end).map_or(0, |(_, length)| *length)
    }

    fn insert(&mut self, mut offset: u64, mut length: u64) {
        let before = self.length_before(offset);
        if before > 0 {
            self.remove(offset - before, before);
            (offset, length) = (offset - before, length + before);
        }
        if let Some(&after) = self.by_offset.get(&(offset + length)) {
            self.remove(offset + length, after);
            length += after;
        }
        self.by_offset.insert(offset, length);
        self.by_length.insert((length, offset));
    }

    fn remove(&mut self, offset: u64, length: u64) {
        self.by_offset.remove(&offset);
        self.by_length.remove(&(length, offset));
    }
}

#[cfg(test)]
mod tests;
