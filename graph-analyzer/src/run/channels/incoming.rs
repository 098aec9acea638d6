//! The receiver's end of a channel.

use pleach_transport::{
    Device, Inline, MapError, Nanos, Rank, ReadOnlyMapped, Region, RemoteSlice, Signal, Slice, Space,
    Submitted, Transfer,
};

use super::gpu::{GpuBytes, GpuTarget, Staging, slots_on};
use super::metadata::{Layout, SLOT_BYTES, TensorForm};
use super::outgoing::credit_payload;
use super::{
    Channel, ChannelEnd, ChannelError, Channels, Form, OpenError, Problem, Received, ReceivedBytes,
    TransferName, memory_for, slots,
};

/// The receiver's end of a channel.
pub(crate) struct Incoming {
    peer: Rank,
    first: u16,
    layout: Option<Layout>,
    /// Tensors stay in the sender's memory.
    maps: bool,
    space: Space,
    /// The next iteration.
    next: u64,
    slots: Vec<Slot>,
}

struct Slot {
    state: State,
    /// Credits that were given, and of these the ones that were submitted.
    credits: u64,
    submitted_credits: u64,
    /// Memory into which the sender puts tensors or metadata.
    memory: Option<Slice>,
    /// The place of tensors that were put, on a GPU.
    on_gpu: Option<GpuBytes>,
    /// Memory into which tensors are got.
    fetched: Option<Region>,
    /// The same on a GPU.
    fetched_on_gpu: Option<GpuTarget>,
    /// The sender's memory that was mapped last.
    mapped: Option<(RemoteSlice, ReadOnlyMapped)>,
}

pub(crate) enum State {
    Empty,
    Getting(Getting),
    Staging(Staging),
    Held,
}

/// A tensor that is being got.
pub(crate) struct Getting {
    iteration: u64,
    place: RemoteSlice,
    form: Option<TensorForm>,
    into: Slice,
    /// The place of the tensor in the end, on a GPU.
    on_gpu: Option<GpuBytes>,
    /// Bytes whose transfers were submitted.
    submitted: u64,
    under_way: usize,
}

impl Incoming {
    pub(crate) fn open(
        device: &mut dyn Device,
        channel: &Channel,
        first: u16,
        depth: u32,
    ) -> Result<Self, OpenError> {
        let (peer, layout) = (channel.from, Layout::of(channel.form));
        let on_host = |slot| (Some(slot), None);
        let memory: Vec<_> = match (channel.form, layout, channel.space) {
            (Form::Put { bytes }, _, Space::Gpu { ordinal }) => {
                let slots = slots_on(device, peer, ordinal, bytes, depth)?.into_iter();
                slots.map(|(landing, place)| (Some(landing), Some(place))).collect()
            }
            (Form::Put { bytes }, ..) => {
                slots(device, peer, bytes, depth)?.into_iter().map(on_host).collect()
            }
            (_, Some(Layout::Slot), _) => {
                slots(device, peer, SLOT_BYTES as u64, depth)?.into_iter().map(on_host).collect()
            }
            _ => vec![(None, None); depth as usize],
        };
        let slot = |(memory, on_gpu)| Slot {
            state: State::Empty,
            credits: 1,
            submitted_credits: 0,
            memory,
            on_gpu,
            fetched: None,
            fetched_on_gpu: None,
            mapped: None,
        };
        let space = channel.space;
        let reaches = device.info().reach.get(peer as usize).is_some_and(|reach| reach.maps);
        let maps = reaches && space == Space::Host;
        Ok(Self { peer, first, layout, maps, space, next: 0, slots: memory.into_iter().map(slot).collect() })
    }

    pub(crate) fn peer(&self) -> Rank {
        self.peer
    }

    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn slot_bytes(&self) -> u64 {
        self.slots.iter().filter_map(|slot| slot.memory.as_ref()).map(|memory| memory.len() as u64).sum()
    }

    pub(crate) fn state(&self, slot: usize) -> &State {
        &self.slots[slot].state
    }

    pub(crate) fn set_state(&mut self, slot: usize, state: State) {
        self.slots[slot].state = state;
    }

    pub(crate) fn owes_credits(&self) -> bool {
        self.slots.iter().any(|slot| slot.submitted_credits < slot.credits)
    }

    /// Memory into which a tensor of so many bytes is got, and its place on a GPU if it is to be
    /// there.
    fn memory_of(
        &mut self,
        device: &mut dyn Device,
        slot: usize,
        bytes: usize,
    ) -> Result<(Slice, Option<GpuBytes>), Problem> {
        let (peer, space, slot) = (self.peer, self.space, &mut self.slots[slot]);
        let mut on_gpu = None;
        if let Space::Gpu { ordinal } = space {
            let target = GpuTarget::of(device, peer, ordinal, slot.fetched_on_gpu.take(), bytes)?;
            let target = slot.fetched_on_gpu.insert(target);
            if let Some(region) = target.region() {
                let into = region.slice(0..bytes).expect("it is long enough");
                return Ok((into, Some(target.place(bytes))));
            }
            on_gpu = Some(target.place(bytes));
        }
        let region = memory_for(device, peer, slot.fetched.take(), bytes)?;
        let region = slot.fetched.insert(region);
        Ok((region.slice(0..bytes).expect("it is long enough"), on_gpu))
    }

    /// A transfer of a slot has ended; returns its iteration.
    pub(crate) fn done(&mut self, name: TransferName, depth: u64) -> u64 {
        match self.slots.get_mut(name.slot as usize).map(|slot| &mut slot.state) {
            Some(State::Getting(getting)) if name.is_get => {
                getting.under_way = getting.under_way.saturating_sub(1);
                getting.iteration
            }
            _ => self.next.saturating_sub(depth),
        }
    }
}

impl Channels {
    /// The tensor of an iteration, once it is here. It stays until it is released.
    ///
    /// A tensor for a GPU may have landed in the host's memory. Nothing wakes the caller when the
    /// GPU has copied it, so a caller that sleeps must ask again after a short time.
    ///
    /// # Errors
    ///
    /// [`ChannelError`]: the tensor cannot come any more, is not as the channel says, or did not
    /// come before `deadline`.
    ///
    /// # Panics
    ///
    /// If this rank does not receive the channel, or the iteration is not the next.
    pub fn receive(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        iteration: u64,
        now: Nanos,
        deadline: Nanos,
    ) -> Result<Option<Received>, ChannelError> {
        let slot = (iteration % self.depth) as usize;
        assert_eq!(iteration, self.incoming(channel).next, "tensors are received in order");
        let received = match self.incoming(channel).slots[slot].state {
            State::Empty => self.arrived(device, channel, iteration)?,
            State::Getting(_) => self.get(device, channel, slot)?,
            State::Staging(_) => self.staged(channel, slot)?,
            State::Held => panic!("the tensor of iteration {iteration} was not released"),
        };
        let incoming = self.incoming(channel);
        match received {
            Some(received) => {
                incoming.slots[slot].state = State::Held;
                incoming.next += 1;
                #[cfg(test)]
                if self.mutant == Some(super::tests::Mutant::ReleasedEarly) {
                    self.incoming(channel).slots[slot].credits += 1;
                    self.give_credits(device, channel)?;
                }
                Ok(Some(received))
            }
            // What has landed comes, whatever becomes of its sender.
            None if now < deadline && matches!(incoming.slots[slot].state, State::Staging(_)) => Ok(None),
            None => {
                let peer = incoming.peer;
                self.still_possible(channel, peer, iteration, "send it", now, deadline)?;
                Ok(None)
            }
        }
    }

    /// Releases a tensor: the sender may use its slot again.
    ///
    /// # Errors
    ///
    /// [`ChannelError`]: the sender cannot be told.
    ///
    /// # Panics
    ///
    /// If this rank does not hold the tensor.
    pub fn release(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        iteration: u64,
    ) -> Result<(), ChannelError> {
        let slot = (iteration % self.depth) as usize;
        let incoming = self.incoming(channel);
        let is_held = incoming.next > iteration && matches!(incoming.slots[slot].state, State::Held);
        assert!(is_held, "the tensor of iteration {iteration} is not held");
        incoming.slots[slot].state = State::Empty;
        incoming.slots[slot].credits += 1;
        #[cfg(test)]
        match self.mutant {
            Some(super::tests::Mutant::ReleasedEarly) => self.incoming(channel).slots[slot].credits -= 1,
            Some(super::tests::Mutant::ReleasedTwice) => self.incoming(channel).slots[slot].credits += 1,
            _ => {}
        }
        self.give_credits(device, channel)
    }

    /// Submits the credits that were given.
    pub(crate) fn give_credits(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
    ) -> Result<(), ChannelError> {
        for slot in 0..self.depth as usize {
            let incoming = self.incoming(channel);
            let (peer, signal_slot) = (incoming.peer, incoming.first + slot as u16);
            let Slot { credits, submitted_credits, memory, .. } = &incoming.slots[slot];
            if submitted_credits >= credits {
                continue;
            }
            // The address is needed once: with the first credit.
            let payload =
                if *submitted_credits == 0 { credit_payload(memory.as_ref()) } else { Inline::EMPTY };
            let name = TransferName { channel: channel as u32, slot: slot as u32, is_get: false };
            match device.signal(peer, &Signal { signal_slot, payload }, name.id()) {
                Ok(_) => self.incoming(channel).slots[slot].submitted_credits += 1,
                Err(error) => {
                    let iteration = self.incoming(channel).next;
                    self.refused(channel, iteration, error)?;
                }
            }
        }
        Ok(())
    }

    /// Looks whether the tensor of an iteration or its metadata are here.
    fn arrived(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        iteration: u64,
    ) -> Result<Option<Received>, ChannelError> {
        let depth = self.depth;
        let slot = (iteration % depth) as usize;
        #[cfg(test)]
        let early = self.mutant == Some(super::tests::Mutant::ReadEarly);
        let incoming = self.incoming(channel);
        let (peer, needed) = (incoming.peer, iteration / depth + 1);
        let signals = device.signal_slots(peer);
        let signal_slot = incoming.first + slot as u16;
        let count = signals.count(signal_slot);
        #[cfg(test)]
        let count = if early && count > 0 { needed } else { count };
        if count < needed {
            return Ok(None);
        }
        if count > needed {
            let violation = "used a slot without a credit".to_owned();
            return Err(self.error(channel, iteration, Problem::Violation { peer, violation }));
        }
        let memory = incoming.slots[slot].memory.clone();
        let on_gpu = incoming.slots[slot].on_gpu.clone();
        let Some(layout) = incoming.layout else {
            if let (Some(landing), Some(place)) = (memory.clone(), on_gpu) {
                return self.landed(channel, iteration, landing, place, None);
            }
            let bytes = memory.map_or(ReceivedBytes::Empty, ReceivedBytes::Own);
            return Ok(Some(Received { bytes, form: None }));
        };
        let decoded = match memory {
            Some(memory) => layout.decode(&memory.to_vec()),
            None => layout.decode(&signals.payload(signal_slot)),
        };
        let (place, form) = decoded
            .map_err(|violation| self.error(channel, iteration, Problem::Violation { peer, violation }))?;
        if place.len == 0 {
            return Ok(Some(Received { bytes: ReceivedBytes::Empty, form }));
        }
        if self.incoming(channel).maps {
            return self.map(device, channel, iteration, place, form);
        }
        let made = self.incoming(channel).memory_of(device, slot, place.len as usize);
        let (into, on_gpu) = made.map_err(|problem| self.error(channel, iteration, problem))?;
        let getting = Getting { iteration, place, form, into, on_gpu, submitted: 0, under_way: 0 };
        self.incoming(channel).slots[slot].state = State::Getting(getting);
        self.get(device, channel, slot)
    }

    fn map(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        iteration: u64,
        place: RemoteSlice,
        form: Option<TensorForm>,
    ) -> Result<Option<Received>, ChannelError> {
        let slot = (iteration % self.depth) as usize;
        let incoming = self.incoming(channel);
        let known = incoming.slots[slot].mapped.as_ref().filter(|(known, _)| *known == place);
        let mapped = match known {
            Some((_, mapped)) => mapped.clone(),
            None => match device.map_read_only(incoming.peer, &place) {
                Ok(mapped) => mapped,
                // The announcement of the region is on its way.
                Err(MapError::Unknown { .. }) => return Ok(None),
                Err(error) => return Err(self.error(channel, iteration, Problem::Map(error))),
            },
        };
        self.incoming(channel).slots[slot].mapped = Some((place, mapped.clone()));
        Ok(Some(Received { bytes: ReceivedBytes::Mapped(mapped), form }))
    }

    /// Goes on to get a tensor, and returns it once it is here.
    fn get(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        slot: usize,
    ) -> Result<Option<Received>, ChannelError> {
        let most = self.transfer_bytes_max;
        let incoming = self.incoming(channel);
        let peer = incoming.peer;
        let State::Getting(getting) = &mut incoming.slots[slot].state else { return Ok(None) };
        let name = TransferName { channel: channel as u32, slot: slot as u32, is_get: true };
        while getting.submitted < getting.place.len {
            let end = getting.place.len.min(getting.submitted.saturating_add(most));
            let src = getting.place.slice(getting.submitted..end);
            let dst = getting.into.slice(getting.submitted as usize..end as usize);
            let (Ok(src), Ok(dst)) = (src, dst) else {
                let violation = "lends memory beyond all addresses".to_owned();
                let iteration = getting.iteration;
                return Err(self.error(channel, iteration, Problem::Violation { peer, violation }));
            };
            match device.submit(peer, Transfer::Get { src, dst }, name.id()) {
                Ok(submitted) => {
                    getting.under_way += usize::from(submitted == Submitted::UnderWay);
                    getting.submitted = end;
                }
                Err(error) => {
                    let iteration = getting.iteration;
                    self.refused(channel, iteration, error)?;
                    return Ok(None);
                }
            }
        }
        if getting.under_way > 0 {
            return Ok(None);
        }
        let (iteration, into) = (getting.iteration, getting.into.clone());
        let (on_gpu, form) = (getting.on_gpu.clone(), getting.form.take());
        // A get that failed because the peer is gone has ended too.
        if self.gone[peer as usize].is_some() {
            return Ok(None);
        }
        match on_gpu {
            Some(place) => self.landed(channel, iteration, into, place, form),
            None => Ok(Some(Received { bytes: ReceivedBytes::Own(into), form })),
        }
    }

    pub(crate) fn incoming(&mut self, channel: usize) -> &mut Incoming {
        match &mut self.ends[channel] {
            ChannelEnd::Incoming(incoming) => incoming,
            _ => panic!("this rank does not receive channel {channel}"),
        }
    }
}
