//! Collectives on a GPU's memory, in the order of a stream.
//!
//! A group that works on a GPU's memory ([`Options::space`](super::Options::space), [`Group::in_memory`]) takes
//! [`GpuBuffer`]s through [`Group::on`]. **Invariant:** a call begins when the stream has done what was put into it before
//! the call, and when it returns the GPU is through with the data: what is put into any stream afterwards finds the result.
//! So the caller's thread waits for the stream's earlier work, at most until the call's deadline, and for nothing else;
//! nothing is put into the stream, and no other stream or the whole GPU is waited for.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::cuda::{CudaError, CudaMemory, ForeignMemory, Gpu, Stream};
use pleach_transport::{Memory, Slice, Space, clock};

use super::Group;
use super::data::{Element, private};
use super::error::CollectiveError;
use super::operation::{Operation, expect_length};
use crate::Rank;
use crate::collective::{Collective, DataType, ReduceOp};
use crate::engine::{Bytes, Counts};
use crate::parts::Parts;

/// How often a call that waits for a stream looks at it while it carries on what else the group does.
const LOOK_EVERY: Duration = Duration::from_micros(20);

/// Longest time for a copy between a buffer and the host's memory.
const COPY_LIMIT: Duration = Duration::from_secs(60);

/// Elements in a GPU's memory. Not dereferenced by the host: [`GpuBuffer::store`] and [`GpuBuffer::load`] copy.
pub struct GpuBuffer<T: Element> {
    memory: Held,
    len: usize,
    _element: PhantomData<T>,
}

enum Held {
    /// Registered with the group of this number, perhaps: then peers map it.
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
        let memory = CudaMemory::new(gpu, len.saturating_mul(size_of::<T>()))?;
        Ok(Self { memory: Held::Own(memory, None), len, _element: PhantomData })
    }

    /// As many elements as fit memory that somebody else allocated, and frees after the buffer is dropped. That it is there
    /// still is looked at before each call.
    ///
    /// # Errors
    ///
    /// It does not begin at a multiple of the element's size.
    pub fn of(memory: ForeignMemory) -> Result<Self, CollectiveError> {
        let address = memory.base().as_ptr();
        if !(address as usize).is_multiple_of(size_of::<T>()) {
            let (data_type, address) = (T::DATA_TYPE, address as u64);
            return Err(CollectiveError::Misaligned { data_type, address });
        }
        let len = memory.len() / size_of::<T>();
        Ok(Self { memory: Held::Foreign(memory), len, _element: PhantomData })
    }

    /// How many elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whose memory it is.
    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        match &self.memory {
            Held::Own(memory, _) => memory.gpu(),
            Held::Foreign(memory) => memory.gpu(),
        }
    }

    /// Address of the first element, for kernels and copies of the GPU.
    #[must_use]
    pub fn as_ptr(&self) -> *mut T {
        match &self.memory {
            Held::Own(memory, _) => memory.base().as_ptr().cast(),
            Held::Foreign(memory) => memory.base().as_ptr().cast(),
        }
    }

    /// Copies elements of the host's memory over the first ones; returns when they are there. What streams do with the
    /// buffer meanwhile is the caller's to order.
    ///
    /// # Errors
    ///
    /// There are more than the buffer has, it was freed, or what the driver says.
    pub fn store(&mut self, elements: &[T]) -> Result<(), CollectiveError> {
        self.expect_room(elements.len())?;
        let bytes = bytemuck::cast_slice(elements);
        match &self.memory {
            Held::Own(memory, _) => memory.store(0, bytes, COPY_LIMIT)?,
            Held::Foreign(memory) => memory.store(bytes, COPY_LIMIT)?,
        }
        Ok(())
    }

    /// Copies the first elements to the host's memory; returns when they are there.
    ///
    /// # Errors
    ///
    /// More are wanted than there are, it was freed, or what the driver says.
    pub fn load(&self, elements: &mut [T]) -> Result<(), CollectiveError> {
        self.expect_room(elements.len())?;
        let bytes = bytemuck::cast_slice_mut(elements);
        match &self.memory {
            Held::Own(memory, _) => memory.load(0, bytes, COPY_LIMIT)?,
            Held::Foreign(memory) => memory.load(bytes, COPY_LIMIT)?,
        }
        Ok(())
    }

    /// The elements, copied to the host's memory.
    ///
    /// # Errors
    ///
    /// See [`GpuBuffer::load`].
    pub fn to_vec(&self) -> Result<Vec<T>, CollectiveError> {
        let mut elements = vec![T::zeroed(); self.len];
        self.load(&mut elements)?;
        Ok(elements)
    }

    fn expect_room(&self, len: usize) -> Result<(), CollectiveError> {
        let is_there = len <= self.len;
        if is_there { Ok(()) } else { expect_length("the host's side of a copy", self.len, len) }
    }

    /// As an engine takes it.
    fn bytes(&self, group: &Group) -> Result<Bytes, CollectiveError> {
        group.expect_gpu(self.gpu())?;
        let bytes = self.len * size_of::<T>();
        match &self.memory {
            Held::Own(_, Some((number, slice))) if *number == group.shared.number => {
                return Ok(Bytes::Registered(slice.slice(0..bytes).expect("made for so many elements")));
            }
            Held::Own(..) => {}
            Held::Foreign(memory) => memory.expect_alive()?,
        }
        Ok(private(self.as_ptr().cast(), bytes))
    }
}

/// A group whose calls take their place in a stream: see [`Group::on`].
#[derive(Clone, Copy, Debug)]
pub struct OnStream<'a> {
    group: &'a Group,
    stream: &'a Stream,
}

impl Group {
    /// The GPU whose memory the group works on, if it works on one's.
    #[must_use]
    pub fn gpu(&self) -> Option<&Arc<Gpu>> {
        self.shared.gpu.as_ref()
    }

    /// `len` zeroed elements in the memory of the group's GPU. Over shared memory the group's peers map it, so that its
    /// collectives read and write it in place; other buffers are copied to and from memory that they map.
    ///
    /// # Errors
    ///
    /// The group works on host memory, or the GPU has too little.
    pub fn gpu_buffer<T: Element>(&self, len: usize) -> Result<GpuBuffer<T>, CollectiveError> {
        self.expect_own_process()?;
        let there = CollectiveError::Space { group: Space::Host, data: Space::Cuda { ordinal: 0 } };
        let mut buffer = GpuBuffer::new(self.gpu().ok_or(there)?, len)?;
        if self.shared.shares_gpu
            && let Held::Own(memory, slice) = &mut buffer.memory
        {
            let region = self.shared.driver.lock().engine.device().register(memory.clone());
            let region = region.map_err(|error| CollectiveError::Register(Arc::new(error)))?;
            *slice = Some((self.shared.number, region.whole()));
        }
        Ok(buffer)
    }

    /// The same group, for calls on GPU memory: each begins when this stream, of the group's GPU, has done what was put into
    /// it before the call, and returns when the GPU is through with it.
    #[must_use]
    pub fn on<'a>(&'a self, stream: &'a Stream) -> OnStream<'a> {
        OnStream { group: self, stream }
    }

    fn space(&self) -> Space {
        self.gpu().map_or(Space::Host, |gpu| Space::Cuda { ordinal: gpu.ordinal() })
    }

    fn expect_gpu(&self, gpu: &Gpu) -> Result<(), CollectiveError> {
        let (group, data) = (self.space(), Space::Cuda { ordinal: gpu.ordinal() });
        if group == data { Ok(()) } else { Err(CollectiveError::Space { group, data }) }
    }

    /// Refuses what there is only for groups that work on host memory.
    pub(super) fn expect_host(&self) -> Result<(), CollectiveError> {
        let group = self.space();
        if group == Space::Host { Ok(()) } else { Err(CollectiveError::Space { group, data: Space::Host }) }
    }

    /// Refuses data that are in other memory than the group works on.
    pub(super) fn expect_space(&self, operation: &Operation) -> Result<(), CollectiveError> {
        let (group, data) = (self.space(), operation.space);
        let has_data = operation.input.len() > 0 || operation.output.len() > 0;
        if has_data && group != data { Err(CollectiveError::Space { group, data }) } else { Ok(()) }
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

impl OnStream<'_> {
    /// Whose calls they are.
    #[must_use]
    pub fn group(&self) -> &Group {
        self.group
    }

    /// [`Group::all_reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce<T: Element>(
        &self,
        data: &mut GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let bytes = data.bytes(self.group)?;
        self.reducing::<T>(Collective::AllReduce, op, data.len, bytes.clone(), bytes)
    }

    /// [`Group::all_reduce_into`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_reduce_into<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let (count, from, into) = self.between(Collective::AllReduce, input, output)?;
        self.reducing::<T>(Collective::AllReduce, op, count, from, into)
    }

    /// [`Group::reduce`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce<T: Element>(
        &self,
        data: &mut GpuBuffer<T>,
        op: ReduceOp,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        self.group.expect_rank(root)?;
        let input = data.bytes(self.group)?;
        let output = if self.group.rank() == root { input.clone() } else { Bytes::None };
        self.reducing::<T>(Collective::Reduce { root }, op, data.len, input, output)
    }

    /// [`Group::broadcast`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn broadcast<T: Element>(&self, data: &mut GpuBuffer<T>, root: Rank) -> Result<(), CollectiveError> {
        self.group.expect_rank(root)?;
        let output = data.bytes(self.group)?;
        let input = if self.group.rank() == root { output.clone() } else { Bytes::None };
        self.moving::<T>(Collective::Broadcast { root }, data.len, input, output)
    }

    /// [`Group::all_gather`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_gather<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
    ) -> Result<(), CollectiveError> {
        let (count, from, into) = self.between(Collective::AllGather, input, output)?;
        self.moving::<T>(Collective::AllGather, count, from, into)
    }

    /// [`Group::reduce_scatter`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        op: ReduceOp,
    ) -> Result<(), CollectiveError> {
        let (count, from, into) = self.between(Collective::ReduceScatter, input, output)?;
        self.reducing::<T>(Collective::ReduceScatter, op, count, from, into)
    }

    /// [`Group::gather`]; on ranks other than the root the output is left as it is.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn gather<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let (count, from, into) = self.between(Collective::Gather { root }, input, output)?;
        self.moving::<T>(Collective::Gather { root }, count, from, into)
    }

    /// [`Group::scatter`]; of ranks other than the root the input is not looked at.
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn scatter<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
        root: Rank,
    ) -> Result<(), CollectiveError> {
        let (count, from, into) = self.between(Collective::Scatter { root }, input, output)?;
        self.moving::<T>(Collective::Scatter { root }, count, from, into)
    }

    /// [`Group::all_to_all`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn all_to_all<T: Element>(
        &self,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
    ) -> Result<(), CollectiveError> {
        let (count, from, into) = self.between(Collective::AllToAll, input, output)?;
        self.moving::<T>(Collective::AllToAll, count, from, into)
    }

    /// [`Group::send`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn send<T: Element>(&self, data: &GpuBuffer<T>, to: Rank) -> Result<(), CollectiveError> {
        self.group.expect_peer(to)?;
        let collective = Collective::SendRecv { from: self.group.rank(), to };
        self.moving::<T>(collective, data.len, data.bytes(self.group)?, Bytes::None)
    }

    /// [`Group::recv`].
    ///
    /// # Errors
    ///
    /// See [`CollectiveError`].
    pub fn recv<T: Element>(&self, data: &mut GpuBuffer<T>, from: Rank) -> Result<(), CollectiveError> {
        self.group.expect_peer(from)?;
        let collective = Collective::SendRecv { from, to: self.group.rank() };
        self.moving::<T>(collective, data.len, Bytes::None, data.bytes(self.group)?)
    }

    /// Elements of a part, and both buffers as an engine takes them, where this rank's matter.
    fn between<T: Element>(
        &self,
        collective: Collective,
        input: &GpuBuffer<T>,
        output: &mut GpuBuffer<T>,
    ) -> Result<(usize, Bytes, Bytes), CollectiveError> {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        let count = self.group.part_len(collective, input.len, output.len)?;
        let bytes = |buffer: &GpuBuffer<T>, parts: Parts| {
            if parts.is_empty() { Ok(Bytes::None) } else { buffer.bytes(self.group) }
        };
        let from = bytes(input, collective.input_parts(rank, ranks))?;
        let into = bytes(output, collective.output_parts(rank, ranks))?;
        Ok((count, from, into))
    }

    fn moving<T: Element>(
        &self,
        collective: Collective,
        count: usize,
        input: Bytes,
        output: Bytes,
    ) -> Result<(), CollectiveError> {
        self.run(T::DATA_TYPE, collective, ReduceOp::Sum, count, (input, output))
    }

    fn reducing<T: Element>(
        &self,
        collective: Collective,
        op: ReduceOp,
        count: usize,
        input: Bytes,
        output: Bytes,
    ) -> Result<(), CollectiveError> {
        if self.group.exact_for(T::DATA_TYPE, op)?.is_some() {
            return Err(CollectiveError::ExactOnGpu);
        }
        self.run(T::DATA_TYPE, collective, op, count, (input, output))
    }

    fn run(
        &self,
        data_type: DataType,
        collective: Collective,
        op: ReduceOp,
        count: usize,
        (input, output): (Bytes, Bytes),
    ) -> Result<(), CollectiveError> {
        self.group.expect_open()?;
        self.group.expect_gpu(self.stream.gpu())?;
        self.follow_stream()?;
        let counts = Counts::Each(count);
        let space = self.group.space();
        self.group.blocking(Operation { collective, data_type, op, counts, input, output, space })
    }

    /// Waits until the stream has done what is in it, carrying on what else the group does.
    fn follow_stream(&self) -> Result<(), CollectiveError> {
        let mark = self.stream.mark()?;
        let began = clock::now();
        while !mark.is_reached()? {
            let now = clock::now();
            let waited = now.since(began);
            if waited >= self.group.timeout {
                let ordinal = self.stream.gpu().ordinal();
                return Err(CudaError::Late { ordinal, waited }.into());
            }
            let driver = &self.group.shared.driver;
            driver.drive(driver.lock(), now + LOOK_EVERY, |_| None::<()>);
        }
        Ok(())
    }
}
