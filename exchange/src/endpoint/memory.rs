//! The bytes of tensors: lendable memory of this program.
//!
//! **Invariant:** a [`LendableBuffer`] is the only way in this process to its bytes, and other
//! processes only read them (`transport`, sealed memory). So a reference to them is as good as one
//! to a heap allocation. A buffer's bytes are used again only after its drop.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;
use pleach_transport::{Memory, SharedMemory};

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
}

impl LendableMemory {
    pub(crate) fn new(limits: ArenaLimits) -> Arc<Self> {
        let arenas = Arenas { plan: ArenaPlan::new(limits), memory: BTreeMap::new() };
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

    /// The bytes that all arenas have touched.
    pub(crate) fn touched(&self) -> u64 {
        lock(&self.arenas).plan.touched()
    }
}

/// Bytes in lendable memory.
pub(crate) struct LendableBuffer {
    owner: Arc<LendableMemory>,
    memory: Arc<SharedMemory>,
    /// Taken by the drop.
    block: Option<Block>,
    bytes: usize,
}

impl LendableBuffer {
    /// Its bytes.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        let start = self.range().start as usize;
        // SAFETY: the plan gave this block to this buffer alone, inside of the arena, which
        // `memory` keeps mapped. Only `as_bytes_mut` writes here, which borrows the buffer as a
        // whole; other processes cannot write.
        unsafe { std::slice::from_raw_parts(self.memory.base().as_ptr().add(start), self.bytes) }
    }

    /// Its bytes, to be written.
    pub(crate) fn as_bytes_mut(&mut self) -> &mut [u8] {
        let start = self.range().start as usize;
        // SAFETY: as in `as_bytes`. The buffer is not shared yet, so no peer has been told to read
        // it.
        unsafe { std::slice::from_raw_parts_mut(self.memory.base().as_ptr().add(start), self.bytes) }
    }

    /// Its arena.
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
        if let Some(block) = self.block.take() {
            lock(&self.owner.arenas).plan.free(block);
        }
    }
}
