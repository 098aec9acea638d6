//! Tensors that are received into a GPU's memory.
//!
//! Where the device registers that memory the bytes land there directly. Else they land in the
//! host's memory and the GPU copies them, which the receiver does not wait for: it asks again.
//! Metadata and signals are in the host's memory in either way.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::cuda::{CudaCopy, CudaError, CudaMemory, Gpu};
use pleach_transport::{Device, Memory, Rank, Region, RegisterError, Slice, Space};

use super::incoming::State;
use super::metadata::TensorForm;
use super::{ChannelError, Channels, OpenError, Problem, Received, ReceivedBytes, slot_bytes, slots};

/// Bytes in a GPU's memory.
#[derive(Clone, Debug)]
pub struct GpuBytes {
    memory: Arc<CudaMemory>,
    offset: usize,
    len: usize,
}

impl GpuBytes {
    /// The memory in which they lie.
    #[must_use]
    pub fn memory(&self) -> &Arc<CudaMemory> {
        &self.memory
    }

    /// Where they begin in the memory, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Their number.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A copy in the host's memory; returns after it was made.
    ///
    /// # Errors
    ///
    /// Not within `limit`, or the driver's error.
    pub fn to_vec(&self, limit: Duration) -> Result<Vec<u8>, CudaError> {
        let mut bytes = vec![0; self.len];
        self.memory.load(self.offset, &mut bytes, limit)?;
        Ok(bytes)
    }
}

/// A tensor on its way from the host's memory to the GPU's.
pub(crate) struct Staging {
    copy: CudaCopy,
    place: GpuBytes,
    form: Option<TensorForm>,
    pub(crate) iteration: u64,
}

/// Memory of a GPU for tensors of one slot.
pub(crate) struct GpuTarget {
    memory: Arc<CudaMemory>,
    /// Registered, if the device reaches it.
    region: Option<Region>,
}

/// Registers memory of a GPU; nothing where the device does not reach it.
fn register(
    device: &mut dyn Device,
    peer: Rank,
    memory: &Arc<CudaMemory>,
) -> Result<Option<Region>, RegisterError> {
    match device.register_for(peer, memory.clone()) {
        Ok(region) => Ok(Some(region)),
        Err(RegisterError::Space { .. } | RegisterError::NotShareable { .. } | RegisterError::Fabric(_)) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// As [`slots`], on a GPU: for each slot the memory into which the sender puts, and where the
/// tensor is in the end.
pub(crate) fn slots_on(
    device: &mut dyn Device,
    peer: Rank,
    ordinal: u32,
    bytes: u64,
    count: u32,
) -> Result<Vec<(Slice, GpuBytes)>, OpenError> {
    let all = slot_bytes(bytes, count);
    let gpu = Gpu::open(ordinal).map_err(OpenError::Gpu)?;
    let memory = CudaMemory::new(&gpu, all).map_err(OpenError::Gpu)?;
    let (step, len) = (all / count as usize, bytes as usize);
    let place = |number: usize| GpuBytes { memory: memory.clone(), offset: number * step, len };
    let landing = match register(device, peer, &memory).map_err(OpenError::Register)? {
        Some(region) => {
            let slot =
                |number: usize| region.slice(number * step..number * step + len).expect("it lies inside");
            (0..count as usize).map(slot).collect()
        }
        None => slots(device, peer, bytes, count)?,
    };
    Ok(landing.into_iter().enumerate().map(|(number, landing)| (landing, place(number))).collect())
}

impl GpuTarget {
    /// Memory for a tensor of so many bytes: that of the one before if it is long enough.
    pub(crate) fn of(
        device: &mut dyn Device,
        peer: Rank,
        ordinal: u32,
        have: Option<Self>,
        bytes: usize,
    ) -> Result<Self, Problem> {
        if let Some(target) = have.filter(|target| target.memory.len() >= bytes) {
            return Ok(target);
        }
        let gpu = Gpu::open(ordinal).map_err(Problem::Gpu)?;
        let memory = CudaMemory::new(&gpu, bytes).map_err(Problem::Gpu)?;
        let region = register(device, peer, &memory).map_err(Problem::Register)?;
        Ok(Self { memory, region })
    }

    /// The region of the memory, if the device reaches it.
    pub(crate) fn region(&self) -> Option<&Region> {
        self.region.as_ref()
    }

    /// The first bytes.
    pub(crate) fn place(&self, len: usize) -> GpuBytes {
        GpuBytes { memory: self.memory.clone(), offset: 0, len }
    }
}

impl Channels {
    /// The bytes of a tensor have landed; it is received when they are at their place.
    pub(crate) fn landed(
        &mut self,
        channel: usize,
        iteration: u64,
        landing: Slice,
        place: GpuBytes,
        form: Option<TensorForm>,
    ) -> Result<Option<Received>, ChannelError> {
        if landing.region().memory().space() != Space::Host {
            return Ok(Some(Received { bytes: ReceivedBytes::Gpu(place), form }));
        }
        let copy = CudaCopy::begin(landing, &place.memory, place.offset);
        let copy = copy.map_err(|error| self.error(channel, iteration, Problem::Gpu(error)))?;
        let slot = (iteration % self.depth) as usize;
        let staging = Staging { copy, place, form, iteration };
        self.incoming(channel).set_state(slot, State::Staging(staging));
        self.staged(channel, slot)
    }

    /// The tensor of a slot, once the GPU has copied it.
    pub(crate) fn staged(&mut self, channel: usize, slot: usize) -> Result<Option<Received>, ChannelError> {
        let State::Staging(staging) = self.incoming(channel).state(slot) else { return Ok(None) };
        let iteration = staging.iteration;
        let received =
            || Received { bytes: ReceivedBytes::Gpu(staging.place.clone()), form: staging.form.clone() };
        let is_done = staging.copy.is_done().map(|is_done| is_done.then(received));
        is_done.map_err(|error| self.error(channel, iteration, Problem::Gpu(error)))
    }
}
