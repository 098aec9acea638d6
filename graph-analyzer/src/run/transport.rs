//! How tensors travel between the ranks of a run: by registered memory, or as another crate says.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::device::{Armed, Flush, Wake};
use pleach_transport::{
    Device, Event, Nanos, Rank, Region, RegisterError, SharedMemory, Slice, clock, sleep,
};

use super::channels::{Channel, ChannelError, Channels, OpenError, Received, SLOT_ALIGN_BYTES, TensorForm};

/// How long a rank with a processor of its own asks again and again, before it sleeps. To be woken
/// takes about 60 us, more than a tensor of 3 MB takes to cross. A part of a large model computes
/// for 0.1 to 0.2 s, so the rank after it waits that long in each iteration.
const SPIN: Duration = Duration::from_millis(500);

/// The longest sleep: what waits for room in a queue is tried again.
pub(crate) const SLEEP_MAX: Duration = Duration::from_millis(5);

/// Carries the tensors of one rank. Crossings have the numbers of the partition; iterations follow
/// each other.
pub trait TensorTransport: Send {
    /// New memory from which tensors are sent.
    ///
    /// # Errors
    ///
    /// [`TransportError`]: there is none.
    fn memory(&mut self, bytes: usize) -> Result<Slice, TransportError>;

    /// Waits until the source of this iteration's tensor may be written.
    ///
    /// # Errors
    ///
    /// [`TransportError`]: the receiver is gone, or late.
    fn wait_free(&mut self, crossing: usize, iteration: u64) -> Result<(), TransportError>;

    /// Sends a tensor from memory of [`TensorTransport::memory`].
    ///
    /// # Errors
    ///
    /// [`TransportError`]: the tensor is not as was agreed, or cannot be sent.
    fn send(
        &mut self,
        crossing: usize,
        iteration: u64,
        source: Slice,
        form: &TensorForm,
    ) -> Result<(), TransportError>;

    /// Waits until what was sent travels on while this rank computes.
    ///
    /// # Errors
    ///
    /// [`TransportError`]: a receiver is gone, or late.
    fn flush(&mut self) -> Result<(), TransportError>;

    /// Waits for a tensor.
    ///
    /// # Errors
    ///
    /// [`TransportError`]: the sender is gone, or late.
    fn receive(&mut self, crossing: usize, iteration: u64) -> Result<Received, TransportError>;

    /// Gives a tensor back.
    ///
    /// # Errors
    ///
    /// [`TransportError`]: the sender cannot be told.
    fn release(&mut self, crossing: usize, iteration: u64) -> Result<(), TransportError>;

    /// Waits until everything that was sent is released, and leaves.
    ///
    /// # Errors
    ///
    /// [`TransportError`]: a peer is gone, or late.
    fn finish(&mut self) -> Result<(), TransportError>;

    /// The bytes of memory for tensors that this rank has registered.
    fn registered_bytes(&self) -> u64;
}

/// Why a tensor did not travel.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// A channel failed.
    #[error(transparent)]
    Channel(#[from] ChannelError),
    /// The channels were not opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is no memory.
    #[error("no memory for {bytes} bytes of tensors ({source}); free memory on this host")]
    Memory {
        /// The bytes.
        bytes: usize,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// Memory was not registered.
    #[error("no registered memory for tensors: {0}")]
    Register(#[source] RegisterError),
    /// That of a transport of another crate.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
}

/// Tensors travel through registered memory of a device.
pub struct Regions {
    device: Box<dyn Device>,
    channels: Channels,
    patience: Duration,
    spin: Duration,
    registered_bytes: u64,
}

impl std::fmt::Debug for Regions {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Regions({:?})", self.channels)
    }
}

impl Regions {
    /// Opens the channels over a device that is connected to all peers. `events` came before. Waits
    /// take no longer than `patience`. A rank that shares its processor sleeps at once.
    ///
    /// # Errors
    ///
    /// [`TransportError`]: there is no memory for the slots.
    pub fn open(
        mut device: Box<dyn Device>,
        events: Vec<Event>,
        channels: Vec<Channel>,
        depth: u32,
        patience: Duration,
        is_crowded: bool,
    ) -> Result<Self, TransportError> {
        let mut channels = Channels::open(&mut *device, channels, depth)?;
        events.into_iter().try_for_each(|event| channels.handle(event))?;
        let spin = if is_crowded { Duration::ZERO } else { SPIN };
        let registered_bytes = channels.slot_bytes();
        Ok(Self { device, channels, patience, spin, registered_bytes })
    }

    /// Makes progress with all that is under way.
    pub(crate) fn poll(&mut self) -> Result<(), TransportError> {
        Ok(self.channels.poll(&mut *self.device, clock::now())?)
    }

    /// Whether the source of this iteration's tensor may be written, without waiting.
    pub(crate) fn is_free(
        &mut self,
        crossing: usize,
        iteration: u64,
        deadline: Nanos,
    ) -> Result<bool, TransportError> {
        Ok(self.channels.is_free(&*self.device, crossing, iteration, clock::now(), deadline)?)
    }

    /// A tensor, if it is here.
    pub(crate) fn try_receive(
        &mut self,
        crossing: usize,
        iteration: u64,
        deadline: Nanos,
    ) -> Result<Option<Received>, TransportError> {
        Ok(self.channels.receive(&mut *self.device, crossing, iteration, clock::now(), deadline)?)
    }

    /// How long a wait takes at most.
    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// What wakes a rank that sleeps, from any thread.
    pub(crate) fn waker(&self) -> Arc<dyn Wake> {
        self.device.info().waker.clone()
    }

    /// Prepares a sleep: see [`sleep::unless_ready`].
    pub(crate) fn arm(&mut self) -> Option<Armed> {
        self.device.arm()
    }

    /// Stays until a peer is gone, for so long at most. A rank that fails because of another one
    /// stays until the caller has seen who was the first.
    pub fn stay_until_gone(&mut self, peer: Rank, limit: Duration) {
        let deadline = clock::now() + limit;
        while !self.channels.is_gone(peer) && clock::now() < deadline {
            // An error is what this rank already has.
            let _ = self.poll();
            if let Some(armed) = self.arm() {
                armed.wait(clock::now(), SLEEP_MAX);
            }
        }
    }

    /// Asks until there is an answer.
    fn wait<T>(
        &mut self,
        mut ask: impl FnMut(&mut Channels, &mut dyn Device, Nanos, Nanos) -> Result<Option<T>, ChannelError>,
    ) -> Result<T, TransportError> {
        let began = clock::now();
        let deadline = began + self.patience;
        loop {
            let now = clock::now();
            if let Some(answer) = ask(&mut self.channels, &mut *self.device, now, deadline)? {
                return Ok(answer);
            }
            self.channels.poll(&mut *self.device, now)?;
            if now.since(began) < self.spin {
                std::hint::spin_loop();
                continue;
            }
            let mut answer = None;
            sleep::unless_ready(
                self,
                |own| own.device.arm(),
                |own| {
                    answer = ask(&mut own.channels, &mut *own.device, now, deadline).transpose();
                    answer.is_some()
                },
                |_, armed| armed.wait(clock::now(), SLEEP_MAX),
            );
            if let Some(answer) = answer {
                return Ok(answer?);
            }
        }
    }
}

impl TensorTransport for Regions {
    fn memory(&mut self, bytes: usize) -> Result<Slice, TransportError> {
        let slice = tensor_memory(bytes, |memory| self.device.register(memory))?;
        self.registered_bytes += slice.region().len() as u64;
        Ok(slice)
    }

    fn wait_free(&mut self, crossing: usize, iteration: u64) -> Result<(), TransportError> {
        self.wait(|channels, device, now, deadline| {
            Ok(channels.is_free(device, crossing, iteration, now, deadline)?.then_some(()))
        })
    }

    fn send(
        &mut self,
        crossing: usize,
        iteration: u64,
        source: Slice,
        form: &TensorForm,
    ) -> Result<(), TransportError> {
        let now = clock::now();
        let deadline = now + self.patience;
        let Self { channels, device, .. } = self;
        Ok(channels.send(&mut **device, crossing, iteration, source, Some(form), now, deadline)?)
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        // A transfer makes progress in polls, and there is none before the next wait. That wait
        // names a peer that is late.
        self.wait(|channels, device, now, deadline| {
            let is_sent = !channels.has_queued() && device.flush(Flush::Transfers);
            Ok((is_sent || now >= deadline).then_some(()))
        })
    }

    fn receive(&mut self, crossing: usize, iteration: u64) -> Result<Received, TransportError> {
        self.wait(|channels, device, now, deadline| {
            channels.receive(device, crossing, iteration, now, deadline)
        })
    }

    fn release(&mut self, crossing: usize, iteration: u64) -> Result<(), TransportError> {
        Ok(self.channels.release(&mut *self.device, crossing, iteration)?)
    }

    fn finish(&mut self) -> Result<(), TransportError> {
        self.wait(|channels, device, now, deadline| {
            Ok(channels.is_idle(device, now, deadline)?.then_some(()))
        })?;
        leave(&mut *self.device, self.patience);
        Ok(())
    }

    fn registered_bytes(&self) -> u64 {
        self.registered_bytes
    }
}

/// New memory from which tensors are sent, registered by `register`. Peers only read it, so nobody
/// can change a tensor that another rank reads. The region is as long as whole slots need.
///
/// # Errors
///
/// [`TransportError`]: there is none.
pub fn tensor_memory(
    bytes: usize,
    register: impl FnOnce(Arc<SharedMemory>) -> Result<Region, RegisterError>,
) -> Result<Slice, TransportError> {
    let room = bytes.next_multiple_of(SLOT_ALIGN_BYTES as usize);
    let memory = SharedMemory::lendable(room).map_err(|source| TransportError::Memory { bytes, source })?;
    let region = register(memory).map_err(TransportError::Register)?;
    Ok(region.slice(0..bytes).expect("it is long enough"))
}

/// Leaves the peers of a device: they get all that was sent, if that takes no longer than
/// `patience`.
pub fn leave(device: &mut dyn Device, patience: Duration) {
    device.leave();
    let (deadline, mut events) = (clock::now() + patience, Vec::with_capacity(8));
    while !device.flush(Flush::All) && clock::now() < deadline {
        device.poll(clock::now(), &mut events);
        events.clear();
    }
}
