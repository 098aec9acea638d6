//! The protocol by which tensors cross: a state machine over a [`Device`].
//!
//! A [`Channel`] is one tensor that crosses to one receiver, once in each iteration. [`Channels`]
//! has all ends of channels of one rank. It never waits and never reads a clock: the caller polls
//! it, and each question takes the time and a deadline.
//!
//! Each channel has `depth` slots, and iteration `i` uses slot `i % depth`. A slot has one signal
//! slot in each direction: one for tensors, and one for *credits*. The receiver gives a credit when
//! it is ready, and one whenever its consumer has released the slot. The sender uses a slot for the
//! n-th time only after the n-th credit. So up to `depth` iterations are under way, and nothing is
//! overwritten before its last consumer has finished. Slots have signal slots of their own because
//! two transfers are never ordered (contract line 2).
//!
//! A tensor crosses in one of three [`Form`]s:
//!
//! * *Put*: the receiver has memory for each slot, and the slot's first credit carries its address
//!   and key. A tensor is one put with a signal.
//! * *Lend*: the tensor stays with the sender, whose fabric maps memory. The signal carries the
//!   address, and the receiver reads the tensor in place until it gives the credit.
//! * *Fetch*: as lend, but the dimensions change. The signal carries them too. If they are too
//!   many, they are put into a slot of their own. Where the fabric maps nothing, the receiver gets
//!   the tensor into memory of its own.
//!
//! A receiver may have its tensors in a GPU's memory ([`Channel::space`]). It maps nothing then:
//! the bytes land there directly where the device registers that memory, and are staged elsewhere.
//! Over shared memory the sender must see that GPU.
//!
//! **Invariant:** the bytes of a slot and its metadata are read only after its signal, and used
//! again only after its credit. Metadata of a peer are hostile until they are checked.

use pleach_transport::cuda::CudaError;
use pleach_transport::{
    Device, Event, MapError, Nanos, Rank, ReadOnlyMapped, Region, RegisterError, RemoteSlice, SharedMemory,
    Slice, Space, SubmitError, TransferError, TransferId,
};

use crate::element::ElementType;

mod gpu;
mod incoming;
mod metadata;
mod outgoing;

pub use self::gpu::GpuBytes;
use self::incoming::Incoming;
pub use self::metadata::TensorForm;
use self::outgoing::Outgoing;

/// Most signal slots of a pair of ranks.
pub const SIGNAL_SLOTS_MAX: usize = 1 << 16;

/// Events taken from a device at a time.
const EVENTS: usize = 64;

/// How the tensors of a channel cross.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// By puts into slots of this size.
    Put {
        /// The size of the tensor.
        bytes: u64,
    },
    /// In the sender's memory, which the receiver maps.
    Lend {
        /// The size of the tensor.
        bytes: u64,
    },
    /// By metadata; then the receiver maps or gets the tensor.
    Fetch {
        /// The type of the elements, if it is known.
        element: Option<ElementType>,
        /// The number of dimensions, if it is known.
        dimensions: Option<usize>,
    },
}

/// A tensor that crosses to one receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channel {
    /// The name of the tensor.
    pub tensor: String,
    /// The sender.
    pub from: Rank,
    /// The receiver.
    pub to: Rank,
    /// How the tensor crosses.
    pub form: Form,
    /// Where the receiver has the tensor.
    pub space: Space,
}

/// Why a tensor did not cross.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[error("the tensor '{tensor}' of iteration {iteration} {problem}")]
pub struct ChannelError {
    /// The tensor.
    pub tensor: String,
    /// The iteration.
    pub iteration: u64,
    /// The rank at the other end.
    pub peer: Rank,
    /// The problem.
    #[source]
    pub problem: Problem,
}

/// The problem of a channel.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The peer is gone without a bye.
    #[error("did not cross: rank {peer} is lost ({cause}); look at what rank {peer} says")]
    Lost {
        /// The peer.
        peer: Rank,
        /// The cause.
        cause: String,
    },
    /// The peer departed.
    #[error("did not cross: rank {peer} has left; run all ranks with the same options")]
    Departed {
        /// The peer.
        peer: Rank,
    },
    /// Nothing came in time.
    #[error("did not cross in time: rank {peer} did not {action}; look at rank {peer}, or allow more time")]
    Deadline {
        /// The peer.
        peer: Rank,
        /// What the peer was to do.
        action: &'static str,
    },
    /// The peer does not keep the protocol.
    #[error("was refused: rank {peer} {violation}; run the same version on all ranks")]
    Violation {
        /// The peer.
        peer: Rank,
        /// What is wrong.
        violation: String,
    },
    /// A transfer failed.
    #[error("did not cross: {0}")]
    Transfer(#[source] TransferError),
    /// A transfer was refused.
    #[error("did not cross: {0}")]
    Submit(#[source] SubmitError),
    /// A peer's memory was not mapped.
    #[error("did not cross: {0}; free memory on this host")]
    Map(#[source] MapError),
    /// There is no memory for the tensor.
    #[error("has no memory here ({0}); free memory on this host")]
    Memory(#[source] std::io::Error),
    /// Memory was not registered.
    #[error("has no registered memory here: {0}")]
    Register(#[source] RegisterError),
    /// The GPU into whose memory it is received.
    #[error("did not come into the GPU's memory: {0}")]
    Gpu(#[source] CudaError),
}

/// Why the ends of channels were not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// More signal slots than a pair has.
    #[error(
        "{needed} slots between two ranks, and there are at most {SIGNAL_SLOTS_MAX}; take a smaller depth"
    )]
    SignalSlots {
        /// The number of slots that are needed.
        needed: usize,
    },
    /// A tensor is longer than a transfer.
    #[error("the tensor '{tensor}' has {bytes} bytes, and one transfer at most {most}; place it on one rank")]
    TooLong {
        /// The tensor.
        tensor: String,
        /// Its size.
        bytes: u64,
        /// The limit of the fabric.
        most: u64,
    },
    /// There is no memory for slots.
    #[error("no memory for {bytes} bytes of slots ({source}); free memory on this host")]
    Memory {
        /// The size of the slots.
        bytes: u64,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// Memory was not registered.
    #[error("no registered memory for slots: {0}")]
    Register(#[source] RegisterError),
    /// There is no GPU, or it has no memory.
    #[error("no memory of a GPU for slots: {0}")]
    Gpu(#[source] CudaError),
}

/// A tensor that has come. Its bytes stay as they are until the slot is released.
#[derive(Clone, Debug)]
pub struct Received {
    /// The bytes.
    pub bytes: ReceivedBytes,
    /// The type and the dimensions, if they came with the tensor.
    pub form: Option<TensorForm>,
}

/// The place of a tensor that has come.
#[derive(Clone, Debug)]
pub enum ReceivedBytes {
    /// Memory of this rank.
    Own(Slice),
    /// Memory of the sender.
    Mapped(ReadOnlyMapped),
    /// Memory of a GPU of this rank.
    Gpu(GpuBytes),
    /// The tensor has no bytes.
    Empty,
}

/// Why a peer does nothing any more.
#[derive(Clone, Debug)]
enum End {
    Lost(String),
    Departed,
}

/// All ends of channels of one rank. See the module.
pub struct Channels {
    rank: Rank,
    depth: u64,
    transfer_bytes_max: u64,
    channels: Vec<Channel>,
    /// By channel: this rank's end of it.
    ends: Vec<ChannelEnd>,
    /// By rank.
    gone: Vec<Option<End>>,
    events: Vec<Event>,
    #[cfg(test)]
    mutant: Option<tests::Mutant>,
}

/// The end of a channel that a rank has.
enum ChannelEnd {
    Outgoing(Outgoing),
    Incoming(Incoming),
    Elsewhere,
}

impl std::fmt::Debug for Channels {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Channels({} seen by rank {})", self.channels.len(), self.rank)
    }
}

/// The signal slots of a device that these channels need.
#[must_use]
pub fn signal_slots(channels: &[Channel], depth: u32) -> usize {
    first_slots(channels).iter().map(|first| (first + 1) * depth as usize).max().unwrap_or(0).max(1)
}

/// By channel: its number among those of the same two ranks.
fn first_slots(channels: &[Channel]) -> Vec<usize> {
    let mut of_pair = std::collections::HashMap::new();
    let number = |channel: &Channel| {
        let pair = (channel.from.min(channel.to), channel.from.max(channel.to));
        let next = of_pair.entry(pair).or_insert(0);
        *next += 1;
        *next - 1
    };
    channels.iter().map(number).collect()
}

impl Channels {
    /// This device's ends of channels. All ranks give the same channels and depth, and connect
    /// before.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: there are too many slots, or no memory for them.
    pub fn open(device: &mut dyn Device, channels: Vec<Channel>, depth: u32) -> Result<Self, OpenError> {
        let needed = signal_slots(&channels, depth);
        if needed > SIGNAL_SLOTS_MAX {
            return Err(OpenError::SignalSlots { needed });
        }
        let (rank, most) = (device.info().rank, device.info().transfer_bytes_max);
        let ranks = channels.iter().map(|channel| channel.from.max(channel.to) + 1).max().unwrap_or(1);
        let mut ends = Vec::with_capacity(channels.len());
        for (channel, first) in channels.iter().zip(first_slots(&channels)) {
            if let Form::Put { bytes } = channel.form
                && bytes > most
            {
                return Err(OpenError::TooLong { tensor: channel.tensor.clone(), bytes, most });
            }
            let first = (first * depth as usize) as u16;
            ends.push(if channel.from == rank {
                ChannelEnd::Outgoing(Outgoing::open(device, channel, first, depth)?)
            } else if channel.to == rank {
                ChannelEnd::Incoming(Incoming::open(device, channel, first, depth)?)
            } else {
                ChannelEnd::Elsewhere
            });
        }
        Ok(Self {
            rank,
            depth: u64::from(depth),
            transfer_bytes_max: most,
            channels,
            ends,
            gone: vec![None; ranks.max(rank + 1) as usize],
            events: Vec::with_capacity(EVENTS),
            #[cfg(test)]
            mutant: None,
        })
    }

    /// The channels.
    #[must_use]
    pub fn channels(&self) -> &[Channel] {
        &self.channels
    }

    /// How many iterations can be under way.
    #[must_use]
    pub fn depth(&self) -> u64 {
        self.depth
    }

    /// The bytes of the slots of this rank.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        let bytes = |end: &ChannelEnd| match end {
            ChannelEnd::Incoming(incoming) => incoming.slot_bytes(),
            _ => 0,
        };
        self.ends.iter().map(bytes).sum()
    }

    /// Makes progress with everything that was begun.
    ///
    /// # Errors
    ///
    /// [`ChannelError`]: something that was begun cannot end, or did not in time.
    pub fn poll(&mut self, device: &mut dyn Device, now: Nanos) -> Result<(), ChannelError> {
        let mut events = std::mem::take(&mut self.events);
        device.poll(now, &mut events);
        let handled = events.drain(..).try_for_each(|event| self.handle(event));
        self.events = events;
        handled?;
        for number in 0..self.ends.len() {
            match self.ends[number] {
                ChannelEnd::Outgoing(_) => self.push(device, number, now)?,
                ChannelEnd::Incoming(_) => self.give_credits(device, number)?,
                ChannelEnd::Elsewhere => {}
            }
        }
        Ok(())
    }

    /// Handles an event of the device that came before the channels were opened.
    ///
    /// # Errors
    ///
    /// As of [`Channels::poll`].
    pub fn handle(&mut self, event: Event) -> Result<(), ChannelError> {
        match event {
            Event::PeerLost { peer, cause } => self.end(peer, End::Lost(cause.to_string())),
            Event::Departed { peer } => self.end(peer, End::Departed),
            Event::Done { id, result } => self.done(id, result)?,
            Event::Connected { .. } | Event::Severed { .. } | Event::Drained { .. } => {}
        }
        Ok(())
    }

    /// Whether a peer is lost or has left.
    #[must_use]
    pub fn is_gone(&self, peer: Rank) -> bool {
        self.gone.get(peer as usize).is_some_and(Option::is_some)
    }

    /// Whether a tensor waits for a credit, or for room in a queue.
    #[must_use]
    pub fn has_queued(&self) -> bool {
        self.ends.iter().any(|end| matches!(end, ChannelEnd::Outgoing(outgoing) if outgoing.has_queued()))
    }

    /// Whether nothing is under way: all tensors that were sent were released, and all credits were
    /// sent.
    ///
    /// # Errors
    ///
    /// [`ChannelError`]: something cannot end, or `deadline` is over.
    pub fn is_idle(&self, device: &dyn Device, now: Nanos, deadline: Nanos) -> Result<bool, ChannelError> {
        for (number, end) in self.ends.iter().enumerate() {
            let (peer, iteration, action) = match end {
                ChannelEnd::Outgoing(outgoing) => match outgoing.unreleased(device, self.depth) {
                    Some(iteration) => (outgoing.peer(), iteration, "release it"),
                    None => continue,
                },
                // A sender that is gone needs no credit.
                ChannelEnd::Incoming(incoming)
                    if incoming.owes_credits() && self.gone[incoming.peer() as usize].is_none() =>
                {
                    (incoming.peer(), incoming.next(), "take the credit of the one before")
                }
                _ => continue,
            };
            self.still_possible(number, peer, iteration, action, now, deadline)?;
            return Ok(false);
        }
        Ok(true)
    }

    fn end(&mut self, peer: Rank, end: End) {
        if let Some(gone) = self.gone.get_mut(peer as usize) {
            gone.get_or_insert(end);
        }
    }

    fn done(&mut self, id: TransferId, result: Result<u64, TransferError>) -> Result<(), ChannelError> {
        let name = TransferName::of(id);
        let ended = match self.ends.get_mut(name.channel as usize) {
            Some(ChannelEnd::Outgoing(outgoing)) => outgoing.done(name.slot, self.depth),
            Some(ChannelEnd::Incoming(incoming)) => incoming.done(name, self.depth),
            _ => return Ok(()),
        };
        // A lost or departed peer is an error only for those who still wait for something.
        match result {
            Err(TransferError::Lost { peer, cause }) => self.end(peer, End::Lost(cause.to_string())),
            Err(TransferError::Departed { peer }) => self.end(peer, End::Departed),
            Err(error) => {
                return Err(self.error(name.channel as usize, ended, Problem::Transfer(error)));
            }
            Ok(_) => {}
        }
        Ok(())
    }

    /// An error if what somebody waits for cannot come any more, or not in time.
    fn still_possible(
        &self,
        channel: usize,
        peer: Rank,
        iteration: u64,
        action: &'static str,
        now: Nanos,
        deadline: Nanos,
    ) -> Result<(), ChannelError> {
        let problem = match &self.gone[peer as usize] {
            Some(End::Lost(cause)) => Problem::Lost { peer, cause: cause.clone() },
            Some(End::Departed) => Problem::Departed { peer },
            None if now >= deadline => Problem::Deadline { peer, action },
            None => return Ok(()),
        };
        Err(self.error(channel, iteration, problem))
    }

    fn error(&self, channel: usize, iteration: u64, problem: Problem) -> ChannelError {
        let channel = &self.channels[channel];
        let peer = if channel.from == self.rank { channel.to } else { channel.from };
        ChannelError { tensor: channel.tensor.clone(), iteration, peer, problem }
    }

    /// What a refused submit means: nothing for a full queue, and for a peer that is gone only to
    /// those who wait for it.
    fn refused(&mut self, channel: usize, iteration: u64, error: SubmitError) -> Result<(), ChannelError> {
        match error {
            SubmitError::QueueFull { .. } => Ok(()),
            SubmitError::Lost { peer, kind } => {
                self.end(peer, End::Lost(kind.to_string()));
                Ok(())
            }
            SubmitError::Departed { peer } => {
                self.end(peer, End::Departed);
                Ok(())
            }
            error => Err(self.error(channel, iteration, Problem::Submit(error))),
        }
    }
}

/// The name of a transfer: what it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TransferName {
    channel: u32,
    slot: u32,
    is_get: bool,
}

impl TransferName {
    fn id(self) -> TransferId {
        let kind = u64::from(self.is_get) << 31;
        TransferId(u64::from(self.channel) << 32 | kind | u64::from(self.slot))
    }

    fn of(id: TransferId) -> Self {
        let low = id.0 as u32;
        Self { channel: (id.0 >> 32) as u32, slot: low & !(1 << 31), is_get: low >> 31 == 1 }
    }
}

/// New memory, in so many equal parts; each begins at a multiple of [`SLOT_ALIGN_BYTES`].
fn slots(device: &mut dyn Device, peer: Rank, bytes: u64, count: u32) -> Result<Vec<Slice>, OpenError> {
    let all = slot_bytes(bytes, count);
    let memory = SharedMemory::new(all).map_err(|source| OpenError::Memory { bytes: all as u64, source })?;
    let region = device.register_for(peer, memory).map_err(OpenError::Register)?;
    let step = all / count as usize;
    let slot = |number: usize| region.slice(number * step..number * step + bytes as usize);
    Ok((0..count as usize).map(|number| slot(number).expect("it lies inside")).collect())
}

/// The bytes of so many slots; too many for any memory where they overflow.
fn slot_bytes(bytes: u64, count: u32) -> usize {
    let all =
        bytes.checked_next_multiple_of(SLOT_ALIGN_BYTES).and_then(|bytes| bytes.checked_mul(count.into()));
    all.and_then(|all| usize::try_from(all).ok()).unwrap_or(usize::MAX)
}

/// Alignment of slots, in bytes: a cache line.
pub const SLOT_ALIGN_BYTES: u64 = 64;

/// Memory for a tensor that is got: that of the one before if it is long enough.
fn memory_for(
    device: &mut dyn Device,
    peer: Rank,
    have: Option<Region>,
    bytes: usize,
) -> Result<Region, Problem> {
    if let Some(region) = have.filter(|region| region.len() >= bytes) {
        return Ok(region);
    }
    let memory = SharedMemory::new(bytes).map_err(Problem::Memory)?;
    device.register_for(peer, memory).map_err(Problem::Register)
}

/// A remote slice as it is sent.
const REMOTE_SLICE_BYTES: usize = 24;

fn encode_remote(slice: &RemoteSlice) -> [u8; REMOTE_SLICE_BYTES] {
    let mut bytes = [0; REMOTE_SLICE_BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip([slice.key.0, slice.offset, slice.len]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests;
