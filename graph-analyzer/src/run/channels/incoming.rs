//! The receiver's end of a channel.

use pleach_transport::{
    Device, Inline, MapError, Nanos, Rank, ReadOnlyMapped, Region, RemoteSlice, Signal, Slice, Submitted,
    Transfer,
};

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
    maps: bool,
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
    /// Memory into which tensors are got.
    fetched: Option<Region>,
    /// The sender's memory that was mapped last.
    mapped: Option<(RemoteSlice, ReadOnlyMapped)>,
}

enum State {
    Empty,
    Getting(Getting),
    Held,
}

/// A tensor that is being got.
struct Getting {
    iteration: u64,
    place: RemoteSlice,
    form: Option<TensorForm>,
    into: Slice,
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
        let memory = match (channel.form, layout) {
            (Form::Put { bytes }, _) => slots(device, peer, bytes, depth)?.into_iter().map(Some).collect(),
            (_, Some(Layout::Slot)) => {
                slots(device, peer, SLOT_BYTES as u64, depth)?.into_iter().map(Some).collect()
            }
            _ => vec![None; depth as usize],
        };
        let slot = |memory| Slot {
            state: State::Empty,
            credits: 1,
            submitted_credits: 0,
            memory,
            fetched: None,
            mapped: None,
        };
        let maps = device.info().reach.get(peer as usize).is_some_and(|reach| reach.maps);
        Ok(Self { peer, first, layout, maps, next: 0, slots: memory.into_iter().map(slot).collect() })
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

    pub(crate) fn owes_credits(&self) -> bool {
        self.slots.iter().any(|slot| slot.submitted_credits < slot.credits)
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
        let Some(layout) = incoming.layout else {
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
        let incoming = self.incoming(channel);
        let have = incoming.slots[slot].fetched.take();
        let region = memory_for(device, peer, have, place.len as usize)
            .map_err(|problem| self.error(channel, iteration, problem))?;
        let into = region.slice(0..place.len as usize).expect("it is long enough");
        let getting = Getting { iteration, place, form, into, submitted: 0, under_way: 0 };
        let incoming = self.incoming(channel);
        incoming.slots[slot].fetched = Some(region);
        incoming.slots[slot].state = State::Getting(getting);
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
        // A get that failed because the peer is gone has ended too.
        let (bytes, form) = (ReceivedBytes::Own(getting.into.clone()), getting.form.take());
        Ok(self.gone[peer as usize].is_none().then_some(Received { bytes, form }))
    }

    fn incoming(&mut self, channel: usize) -> &mut Incoming {
        match &mut self.ends[channel] {
            ChannelEnd::Incoming(incoming) => incoming,
            _ => panic!("this rank does not receive channel {channel}"),
        }
    }
}
