//! Elements in a GPU's memory, and groups that work on it.
//!
//! A group that works on a GPU's memory ([`Options::space`](super::Options::space),
//! [`Group::in_memory`]) takes [`GpuBuffer`]s through [`Group::on`].
//!
//! **Invariant:** memory that pleach allocated cannot be freed while a buffer or a region names it.
//! Memory that other code allocated must stay while a buffer names it: the code that makes the
//! buffer's [`ForeignMemory`] promises this. Before each call the driver is asked whether the
//! allocation still exists. This finds memory that went back to the driver. It does not find memory
//! that went back to a framework's cache, which then hands the memory to other code.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::cuda::{CudaMemory, ForeignMemory, Gpu, Stream};
use pleach_transport::{Memory, Slice, Space};

use super::Group;
use super::bound::expect_length;
use super::data::{Element, Operand, private};
use super::error::CollectiveError;
use crate::engine::Bytes;

/// Longest time for a copy between a buffer and the host's memory.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// Elements in a GPU's memory. Not dereferenced by the host: [`GpuBuffer::store`] and
/// [`GpuBuffer::load`] copy.
pub struct GpuBuffer<T: Element> {
    /// Behind a pointer, because buffers are moved into calls and out of them again.
    memory: Arc<Held>,
    len: usize,
    _element: PhantomData<T>,
}

/// Memory of a GPU, for elements of any type.
#[derive(Debug)]
pub(super) enum Held {
    /// Perhaps registered with the group of this number: then peers map it.
    Own(Arc<CudaMemory>, Option<(u64, Slice)>),
    Foreign(ForeignMemory),
}

impl<T: Element> fmt::Debug for GpuBuffer<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "GpuBuffer<{}>({} elements, GPU {})", T::DATA_TYPE, self.len, self.gpu().ordinal())
    }
}

impl<T: Element> GpuBuffer<T> {
    /// `len` zeroed elements.
    ///
    /// # Errors
    ///
    /// The GPU has too little memory, or what the driver says.
    pub fn new(gpu: &Arc<Gpu>, len: usize) -> Result<Self, CollectiveError> {
        Ok(Self::in_memory(CudaMemory::new(gpu, len.saturating_mul(size_of::<T>()))?, len))
    }

    /// The first `len` elements of this memory, which has so many.
    pub(crate) fn in_memory(memory: Arc<CudaMemory>, len: usize) -> Self {
        Self { memory: Arc::new(Held::Own(memory, None)), len, _element: PhantomData }
    }

    /// Another handle of this buffer.
    pub(crate) fn share(&self) -> Self {
        Self { memory: self.held(), len: self.len, _element: PhantomData }
    }

    /// The elements that fit memory which other code allocated, and which it frees after the buffer
    /// is dropped. Before each call the driver is asked whether the allocation still exists. The
    /// check does not see that an allocator with a cache has given the memory to other code.
    ///
    /// # Errors
    ///
    /// The memory does not begin at a multiple of the element's size.
    pub fn of(memory: ForeignMemory) -> Result<Self, CollectiveError> {
        let address = memory.base().as_ptr();
        if !(address as usize).is_multiple_of(size_of::<T>()) {
            let (data_type, address) = (T::DATA_TYPE, address as u64);
            return Err(CollectiveError::Misaligned { data_type, address });
        }
        let len = memory.len() / size_of::<T>();
        Ok(Self { memory: Arc::new(Held::Foreign(memory)), len, _element: PhantomData })
    }

    /// The number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The GPU of the memory.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        match &*self.memory {
            Held::Own(memory, _) => memory.gpu(),
            Held::Foreign(memory) => memory.gpu(),
        }
    }

    /// Address of the first element, for kernels and copies of the GPU. They must have ended when
    /// the buffer is dropped: no driver waits for them before it unmaps the memory.
    #[must_use]
    pub fn as_ptr(&self) -> *mut T {
        match &*self.memory {
            Held::Own(memory, _) => memory.base().as_ptr().cast(),
            Held::Foreign(memory) => memory.base().as_ptr().cast(),
        }
    }

    /// Copies elements of the host's memory over the first elements; returns when the copy has
    /// ended. The caller orders the copy with the work of streams on this buffer.
    ///
    /// # Errors
    ///
    /// `elements` has more elements than the buffer, the buffer's memory was freed, or the driver's
    /// error.
    pub fn store(&mut self, elements: &[T]) -> Result<(), CollectiveError> {
        self.store_at(0, elements)
    }

    /// Copies elements of the host's memory over those from `first` on, which are in the buffer.
    pub(super) fn store_at(&mut self, first: usize, elements: &[T]) -> Result<(), CollectiveError> {
        self.expect_room(first.saturating_add(elements.len()))?;
        let bytes = bytemuck::cast_slice(elements);
        match &*self.memory {
            Held::Own(memory, _) => memory.store(first * size_of::<T>(), bytes, COPY_LIMIT)?,
            Held::Foreign(memory) if first == 0 => memory.store(bytes, COPY_LIMIT)?,
            Held::Foreign(_) => unreachable!("pleach stores elsewhere in its own memory alone"),
        }
        Ok(())
    }

    /// Copies the first elements to the host's memory; returns when the copy has ended.
    ///
    /// # Errors
    ///
    /// `elements` has more elements than the buffer, the buffer's memory was freed, or the driver's
    /// error.
    pub fn load(&self, elements: &mut [T]) -> Result<(), CollectiveError> {
        self.expect_room(elements.len())?;
        let bytes = bytemuck::cast_slice_mut(elements);
        match &*self.memory {
            Held::Own(memory, _) => memory.load(0, bytes, COPY_LIMIT)?,
            Held::Foreign(memory) => memory.load(bytes, COPY_LIMIT)?,
        }
        Ok(())
    }

    /// The elements, copied to the host's memory.
    pub fn to_vec(&self) -> Result<Vec<T>, CollectiveError> {
        let mut elements = vec![T::zeroed(); self.len];
        self.load(&mut elements)?;
        Ok(elements)
    }

    fn expect_room(&self, len: usize) -> Result<(), CollectiveError> {
        let is_there = len <= self.len;
        if is_there { Ok(()) } else { expect_length("the host's side of a copy", self.len, len) }
    }

    /// The operand for the group with this number.
    pub(super) fn operand(&self, group: u64) -> Result<Operand, CollectiveError> {
        self.memory.operand(group, self.len, size_of::<T>())
    }

    /// A handle of the memory, which keeps the memory when the buffer is dropped.
    pub(super) fn held(&self) -> Arc<Held> {
        self.memory.clone()
    }
}

impl Held {
    /// The operand of the first `len` elements of `size` bytes, for the group with this number.
    pub(super) fn operand(&self, group: u64, len: usize, size: usize) -> Result<Operand, CollectiveError> {
        let (gpu, base) = match self {
            Self::Own(memory, _) => (memory.gpu(), memory.base()),
            Self::Foreign(memory) => (memory.gpu(), memory.base()),
        };
        let bytes = len * size;
        let (bytes, foreign) = match self {
            Self::Own(_, Some((number, slice))) if *number == group => {
                (Bytes::Registered(slice.slice(0..bytes).expect("made for so many elements")), None)
            }
            Self::Own(..) => (private(base.as_ptr(), bytes), None),
            Self::Foreign(memory) => {
                memory.expect_alive()?;
                (private(base.as_ptr(), bytes), Some(memory.clone()))
            }
        };
        Ok(Operand { bytes, len, space: Space::Gpu { ordinal: gpu.ordinal() }, foreign })
    }
}

impl Group {
    pub(super) fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.shared.gpu.as_ref()
    }

    /// `len` zeroed elements in the memory of the group's GPU. If peers reach that memory
    /// ([`GroupInfo::reaches_gpu`](super::GroupInfo::reaches_gpu)), collectives read and write the
    /// buffer in place. Elements of other buffers are copied to and from memory that peers reach.
    ///
    /// # Errors
    ///
    /// The group works on host memory, the GPU has too little memory, or a NIC cannot register so
    /// much.
    pub fn gpu_buffer<T: Element>(&self, len: usize) -> Result<GpuBuffer<T>, CollectiveError> {
        self.expect_own_process()?;
        let there = CollectiveError::Space { group: Space::Host, data: Space::Gpu { ordinal: 0 } };
        let mut buffer = GpuBuffer::new(self.gpu().ok_or(there)?, len)?;
        if self.shared.shares_gpu
            && let Some(Held::Own(memory, slice)) = Arc::get_mut(&mut buffer.memory)
        {
            *slice = Some((self.shared.number, self.registered(memory.clone())?));
        }
        Ok(buffer)
    }

    pub(super) fn space(&self) -> Space {
        self.gpu().map_or(Space::Host, |gpu| Space::Gpu { ordinal: gpu.ordinal() })
    }

    pub(super) fn expect_gpu(&self, gpu: &Gpu) -> Result<(), CollectiveError> {
        let (group, data) = (self.space(), Space::Gpu { ordinal: gpu.ordinal() });
        if group == data { Ok(()) } else { Err(CollectiveError::Space { group, data }) }
    }

    /// Refuses a call that only groups on host memory have.
    pub(super) fn expect_host(&self) -> Result<(), CollectiveError> {
        let group = self.space();
        if group == Space::Host { Ok(()) } else { Err(CollectiveError::Space { group, data: Space::Host }) }
    }

    /// Refuses elements that are not in the kind of memory that the group works on.
    #[inline]
    pub(super) fn expect_space(&self, data: Space, elements: usize) -> Result<(), CollectiveError> {
        let group = self.space();
        if elements > 0 && group != data { Err(CollectiveError::Space { group, data }) } else { Ok(()) }
    }

    /// Stores every rank's words in every rank's `all`, whatever memory the group works on.
    pub(super) fn gather_words(&self, own: &[u64], all: &mut [u64]) -> Result<(), CollectiveError> {
        let Some(gpu) = self.gpu() else { return self.all_gather(own, all) };
        let (mut input, mut output) = (GpuBuffer::new(gpu, own.len())?, GpuBuffer::new(gpu, all.len())?);
        input.store(own)?;
        self.on(&Stream::new(gpu)?).all_gather(&input, &mut output)?;
        output.load(all)
    }
}
