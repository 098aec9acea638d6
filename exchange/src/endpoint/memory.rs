//! The bytes of tensors: lendable memory of this program, and memory of peers that is mapped here.
//!
//! **Invariant:** a [`LendableBuffer`] is the only way in this process to its bytes, and other
//! processes only read them (`transport`, sealed memory). So a reference to them is as good as one
//! to a heap allocation. A buffer's bytes are used again only after its drop. A transfer of this
//! program writes a buffer only while nothing else has it but who began the transfer.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;
use pleach_transport::{Memory, ReadOnlyMapped, Share, SharedMemory, Space};

use super::returns::load_word;
use crate::arena::{AllocateError, ArenaId, ArenaLimits, ArenaPlan, Block};

/// The holders of one secret. An endpoint has one secret, or none, and so one domain.
type TrustDomain = ();

/// Why there is no memory for a tensor.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorMemoryError {
    /// The limit does not allow it.
    #[error(transparent)]
    Limit(#[from] AllocateError),
    /// Its dimensions do not go together with an address space.
    #[error("a tensor of {dimensions} dimensions has too many elements")]
    TooManyElements {
        /// Its dimensions.
        dimensions: usize,
    },
    /// It has too many dimensions.
    #[error("a tensor has {dimensions} dimensions, more than {}; join some", super::tensor::DIMENSIONS_MAX)]
    TooManyDimensions {
        /// Its dimensions.
        dimensions: usize,
    },
    /// The system refuses memory.
    #[error(
        "the system refuses {bytes} bytes of lendable memory; {}",
        pleach_transport::memory::remedy(source)
    )]
    System {
        /// The size of an arena, in bytes.
        bytes: u64,
        /// Its error.
        #[source]
        source: io::Error,
    },
}

/// The lendable memory of an endpoint.
pub(crate) struct LendableMemory {
    arena_bytes: u64,
    arenas: Mutex<Arenas>,
}

struct Arenas {
    plan: ArenaPlan<TrustDomain>,
    memory: BTreeMap<ArenaId, Arc<SharedMemory>>,
    /// Buffers that the program has as plain bytes, by their first address.
    #[cfg(feature = "grpc")]
    plain: BTreeMap<usize, std::sync::Weak<LendableBuffer>>,
}

impl LendableMemory {
    pub(crate) fn new(limits: ArenaLimits) -> Arc<Self> {
        let arenas = Arenas {
            plan: ArenaPlan::new(limits),
            memory: BTreeMap::new(),
            #[cfg(feature = "grpc")]
            plain: BTreeMap::new(),
        };
        Arc::new(Self { arena_bytes: limits.bytes, arenas: Mutex::new(arenas) })
    }

    /// Memory for a tensor. Its bytes are zero, or those of earlier tensors of this domain.
    pub(crate) fn allocate(self: &Arc<Self>, bytes: usize) -> Result<LendableBuffer, TensorMemoryError> {
        let mut arenas = lock(&self.arenas);
        let allocation = arenas.plan.allocate(&(), bytes as u64)?;
        for id in allocation.discarded {
            arenas.memory.remove(&id);
        }
        let (block, overwrite) = (allocation.block, allocation.overwrite);
        let id = block.arena();
        let memory = match arenas.memory.get(&id) {
            Some(memory) => memory.clone(),
            // Untouched pages of an arena take no memory, so each is as long as all may be.
            None => match SharedMemory::lendable(self.arena_bytes as usize) {
                Ok(memory) => {
                    arenas.memory.insert(id, memory.clone());
                    memory
                }
                Err(source) => {
                    arenas.plan.free(block);
                    return Err(TensorMemoryError::System { bytes: self.arena_bytes, source });
                }
            },
        };
        drop(arenas);
        let mut buffer = LendableBuffer { owner: self.clone(), memory, block: Some(block), bytes };
        buffer.overwrite(overwrite);
        Ok(buffer)
    }

    /// Memory into which a tensor of a peer is received: in the arena, which is registered where it
    /// was used before, or of its own where the arena has no room.
    pub(crate) fn allocate_to_receive(
        self: &Arc<Self>,
        bytes: usize,
    ) -> Result<LendableBuffer, TensorMemoryError> {
        match self.allocate(bytes) {
            Err(TensorMemoryError::Limit(_)) => {
                let refused = |source| TensorMemoryError::System { bytes: bytes as u64, source };
                let memory = SharedMemory::lendable(bytes).map_err(refused)?;
                Ok(LendableBuffer { owner: self.clone(), memory, block: None, bytes })
            }
            allocated => allocated,
        }
    }

    /// The arena that is lent to peers, by its number.
    pub(crate) fn arena(self: &Arc<Self>) -> Result<(u64, Arc<SharedMemory>), TensorMemoryError> {
        // The first buffer makes the arena. It stays, since this program has one trust domain.
        let buffer = self.allocate(0)?;
        Ok((buffer.arena().map_or(0, ArenaId::number), buffer.memory.clone()))
    }

    /// The buffer that holds these bytes, and where they begin in it. `None` also for a buffer that
    /// was not made findable ([`LendableBuffer::make_findable`]).
    #[cfg(feature = "grpc")]
    pub(crate) fn find(&self, bytes: &[u8]) -> Option<(Arc<LendableBuffer>, usize)> {
        let address = bytes.as_ptr().addr();
        let arenas = lock(&self.arenas);
        let (first, buffer) = arenas.plain.range(..=address).next_back()?;
        let (start, buffer) = (address - first, buffer.upgrade()?);
        // Dropped after the lock, where it may be the last handle.
        drop(arenas);
        let is_inside = start.checked_add(bytes.len()).is_some_and(|end| end <= buffer.bytes);
        is_inside.then_some((buffer, start))
    }

    /// The bytes that all arenas have touched.
    pub(crate) fn touched(&self) -> u64 {
        lock(&self.arenas).plan.touched()
    }
}

/// Bytes in lendable memory.
pub(crate) struct LendableBuffer {
    owner: Arc<LendableMemory>,
    memory: Arc<SharedMemory>,
    /// Its place in the arena; `None` when the memory is its own. Taken by the drop.
    block: Option<Block>,
    bytes: usize,
}

impl LendableBuffer {
    /// Its bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.part(0..self.bytes)
    }

    /// Some of its bytes.
    pub(crate) fn part(&self, part: Range<usize>) -> &[u8] {
        assert!(part.start <= part.end && part.end <= self.bytes, "{part:?} of {} bytes", self.bytes);
        let start = self.range().start as usize + part.start;
        // SAFETY: the plan gave this block to this buffer alone, inside of the arena, which
        // `memory` keeps mapped. Only `as_bytes_mut` writes here, which borrows the buffer as a
        // whole; other processes cannot write.
        unsafe { std::slice::from_raw_parts(self.memory.base().as_ptr().add(start), part.len()) }
    }

    /// Its bytes, to be written.
    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        let start = self.range().start as usize;
        // SAFETY: as in `as_bytes`. The buffer is not shared yet, so no peer has been told to read
        // it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base().as_ptr().add(start), self.bytes) }
    }

    /// Its length, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes
    }

    /// The memory in which it lies.
    pub(crate) fn memory(&self) -> Arc<SharedMemory> {
        self.memory.clone()
    }

    /// From now on [`LendableMemory::find`] finds it, if it lies in an arena.
    #[cfg(feature = "grpc")]
    pub(crate) fn make_findable(self: &Arc<Self>) {
        if self.block.is_some() {
            lock(&self.owner.arenas).plain.insert(self.as_bytes().as_ptr().addr(), Arc::downgrade(self));
        }
    }

    /// Its arena; `None` when it has memory of its own.
    pub(crate) fn arena(&self) -> Option<ArenaId> {
        self.block.as_ref().map(Block::arena)
    }

    /// Its bytes in the arena, rounded up to what is used again as a whole.
    pub(crate) fn range(&self) -> Range<u64> {
        self.block.as_ref().map_or(0..0, Block::range)
    }

    /// Overwrites bytes of the arena with zeros: those of another domain.
    fn overwrite(&mut self, range: Range<u64>) {
        let (start, end) = (range.start as usize, (range.end as usize).min(self.memory.len()));
        if start < end {
            // SAFETY: inside of the arena. It was idle until this buffer was allocated: no other
            // buffer lies there, and nobody of its new domain has mapped it.
            unsafe { std::ptr::write_bytes(self.memory.base().as_ptr().add(start), 0, end - start) };
        }
    }
}

impl Drop for LendableBuffer {
    fn drop(&mut self) {
        #[cfg(feature = "grpc")]
        let address = self.as_bytes().as_ptr().addr();
        if let Some(block) = self.block.take() {
            let mut arenas = lock(&self.owner.arenas);
            #[cfg(feature = "grpc")]
            arenas.plain.remove(&address);
            arenas.plan.free(block);
        }
    }
}

/// A part of an arena, to be registered by itself. It is not shared by its file.
pub(crate) struct ArenaPart {
    arena: Arc<SharedMemory>,
    start: usize,
    len: usize,
}

impl ArenaPart {
    /// These bytes of an arena, as far as they are inside.
    pub(crate) fn new(arena: Arc<SharedMemory>, range: Range<usize>) -> Arc<Self> {
        let start = range.start.min(arena.len());
        let len = range.end.min(arena.len()).saturating_sub(start);
        Arc::new(Self { arena, start, len })
    }
}

// SAFETY: the bytes are those of the arena, which is held and keeps its address. Peers may write as
// little of it as of the arena. No device shares it by a file.
unsafe impl Memory for ArenaPart {
    fn base(&self) -> NonNull<u8> {
        // SAFETY: `new` has found the start inside of the arena.
        unsafe { self.arena.base().add(self.start) }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn space(&self) -> Space {
        Space::Host
    }

    fn share(&self) -> Share<'_> {
        Share::Private
    }

    fn peers_may_write(&self) -> bool {
        self.arena.peers_may_write()
    }
}

/// The bytes of a peer's tensor, through a mapping of the region in which they lie.
///
/// The range must be inside of the region and lent to this program: until the lease is returned the
/// owner changes none of these bytes.
pub(crate) fn mapped_bytes(mapping: &ReadOnlyMapped, range: Range<usize>) -> Option<&[u8]> {
    let is_inside = range.start <= range.end && range.end <= mapping.len() && mapping.is_on_host();
    if !is_inside {
        return None;
    }
    // SAFETY: inside of the mapping, which stays while it is borrowed. The owner has lent the bytes
    // and promises to leave them alone: it holds the secret, or is of the same user. A promise that
    // is broken shows other values of plain numbers.
    Some(unsafe { std::slice::from_raw_parts(mapping.as_ptr().add(range.start), range.len()) })
}

/// Words of this program that a peer may read, in memory of their own.
pub(crate) struct PageWords {
    memory: Arc<SharedMemory>,
}

impl PageWords {
    /// So many words, all zero.
    pub(crate) fn new(words: usize) -> io::Result<Self> {
        Ok(Self { memory: SharedMemory::lendable(words * size_of::<u64>())? })
    }

    /// The memory, to be registered.
    pub(crate) fn memory(&self) -> Arc<SharedMemory> {
        self.memory.clone()
    }

    /// A word, which peers read.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        let offset = index * size_of::<u64>();
        assert!(offset + size_of::<u64>() <= self.memory.len(), "word {index} of a page");
        // SAFETY: inside of the memory, which is mapped while it is borrowed, and aligned. All
        // access of this process is atomic, and peers only read.
        unsafe { AtomicU64::from_ptr(self.memory.base().as_ptr().add(offset).cast()) }
    }

    /// Stores a word. Release: pairs with the acquire in [`MappedWords::load`].
    pub(crate) fn store(&self, index: usize, value: u64) {
        self.word(index).store(value, Ordering::Release);
    }

    /// A word of this program's own.
    pub(crate) fn load(&self, index: usize) -> u64 {
        self.word(index).load(Ordering::Relaxed)
    }
}

/// Words of a peer that are mapped here.
pub(crate) struct MappedWords {
    mapping: ReadOnlyMapped,
}

impl MappedWords {
    pub(crate) fn new(mapping: ReadOnlyMapped) -> Self {
        Self { mapping }
    }

    /// A word; zero where there is none. Acquire: pairs with the release in [`PageWords::store`].
    pub(crate) fn load(&self, index: usize) -> u64 {
        let offset = index.saturating_mul(size_of::<u64>());
        let address = self.mapping.as_ptr().wrapping_add(offset);
        let is_inside = offset.checked_add(size_of::<u64>()).is_some_and(|end| end <= self.mapping.len());
        if !is_inside || !address.cast::<u64>().is_aligned() || !self.mapping.is_on_host() {
            return 0;
        }
        // SAFETY: inside of the mapping, which stays while it is borrowed, and aligned. A load may
        // read pages that are read-only here.
        let word = unsafe { AtomicU64::from_ptr(address.cast::<u64>().cast_mut()) };
        load_word(word)
    }
}
