//! The sender's end of a channel.

use pleach_transport::{
    Device, Inline, Nanos, Rank, RegionKey, RemoteSlice, Signal, Slice, Source, Submitted, Transfer,
};

use super::metadata::{Layout, SLOT_BYTES, TensorForm};
use super::{
    Channel, ChannelEnd, ChannelError, Channels, Form, OpenError, Problem, REMOTE_SLICE_BYTES, TransferName,
    encode_remote, slots,
};

/// The sender's end of a channel.
pub(crate) struct Outgoing {
    peer: Rank,
    first: u16,
    layout: Option<Layout>,
    /// The next iteration.
    next: u64,
    slots: Vec<Slot>,
}

struct Slot {
    state: State,
    /// Memory from which metadata are put.
    metadata: Option<Slice>,
    /// Memory of the receiver, as its first credit says.
    remote: Option<RemoteSlice>,
}

enum State {
    /// The source may be written.
    Free,
    /// The tensor waits for a credit, or for room in a queue.
    Queued { iteration: u64, source: Slice, metadata: Option<Vec<u8>>, deadline: Nanos },
    /// The device reads the source, or sends the signal.
    Submitted { iteration: u64, source: Slice },
    /// The receiver reads the source, which stays registered until it is released.
    Lent { iteration: u64, _source: Slice },
}

impl Outgoing {
    pub(crate) fn open(
        device: &mut dyn Device,
        channel: &Channel,
        first: u16,
        depth: u32,
    ) -> Result<Self, OpenError> {
        let layout = Layout::of(channel.form);
        let metadata = if layout == Some(Layout::Slot) {
            slots(device, channel.to, SLOT_BYTES as u64, depth)?.into_iter().map(Some).collect()
        } else {
            vec![None; depth as usize]
        };
        let slot = |metadata| Slot { state: State::Free, metadata, remote: None };
        let slots = metadata.into_iter().map(slot).collect();
        Ok(Self { peer: channel.to, first, layout, next: 0, slots })
    }

    pub(crate) fn peer(&self) -> Rank {
        self.peer
    }

    pub(crate) fn has_queued(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot.state, State::Queued { .. }))
    }

    /// The credits that a slot has got.
    fn credits(&self, device: &dyn Device, slot: usize) -> u64 {
        device.signal_slots(self.peer).count(self.first + slot as u16)
    }

    /// The first iteration whose source the device or the receiver may still read.
    pub(crate) fn unreleased(&self, device: &dyn Device, depth: u64) -> Option<u64> {
        let busy = |(slot, state): (usize, &Slot)| match state.state {
            State::Free => None,
            State::Lent { iteration, .. } if self.credits(device, slot) >= iteration / depth + 2 => None,
            State::Queued { iteration, .. }
            | State::Submitted { iteration, .. }
            | State::Lent { iteration, .. } => Some(iteration),
        };
        self.slots.iter().enumerate().filter_map(busy).min()
    }

    /// A transfer of a slot has ended; returns its iteration.
    pub(crate) fn done(&mut self, slot: u32, depth: u64) -> u64 {
        let is_put = self.layout.is_none();
        let Some(slot) = self.slots.get_mut(slot as usize) else { return self.next };
        let State::Submitted { iteration, ref source } = slot.state else {
            return self.next.saturating_sub(depth);
        };
        slot.state = if is_put { State::Free } else { State::Lent { iteration, _source: source.clone() } };
        iteration
    }
}

impl Channels {
    /// Whether the source of this iteration's tensor may be written: the device and the receiver
    /// have finished with that of `depth` iterations before.
    ///
    /// # Errors
    ///
    /// [`ChannelError`]: this cannot come any more, or `deadline` is over.
    ///
    /// # Panics
    ///
    /// If this rank does not send the channel.
    pub fn is_free(
        &mut self,
        device: &dyn Device,
        channel: usize,
        iteration: u64,
        now: Nanos,
        deadline: Nanos,
    ) -> Result<bool, ChannelError> {
        let depth = self.depth;
        let slot = (iteration % depth) as usize;
        let outgoing = self.outgoing(channel);
        let credits = outgoing.credits(device, slot);
        let state = &mut outgoing.slots[slot].state;
        if let State::Lent { iteration, .. } = state
            && credits >= *iteration / depth + 2
        {
            *state = State::Free;
        }
        if matches!(state, State::Free) {
            return Ok(true);
        }
        let (peer, before) = (outgoing.peer, iteration.saturating_sub(depth));
        self.still_possible(channel, peer, before, "release it", now, deadline)?;
        Ok(false)
    }

    /// Sends the tensor of an iteration. `form` is needed where the dimensions change. The source
    /// stays as it is until [`Channels::is_free`] says that it may be written again.
    ///
    /// # Errors
    ///
    /// [`ChannelError`]: the tensor is not as the channel says, or cannot be sent.
    ///
    /// # Panics
    ///
    /// If this rank does not send the channel, the iteration is not the next, or the slot is not
    /// free.
    #[expect(clippy::too_many_arguments, reason = "a tensor, its place, and when")]
    pub fn send(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        iteration: u64,
        source: Slice,
        form: Option<&TensorForm>,
        now: Nanos,
        deadline: Nanos,
    ) -> Result<(), ChannelError> {
        let is_as_said = match self.channels[channel].form {
            Form::Put { bytes } | Form::Lend { bytes } => source.len() as u64 == bytes,
            Form::Fetch { .. } => form.and_then(TensorForm::bytes) == Some(source.len() as u64),
        };
        let depth = self.depth;
        let outgoing = self.outgoing(channel);
        assert_eq!(iteration, outgoing.next, "tensors are sent in order");
        let metadata = outgoing.layout.map(|layout| layout.encode(&source.remote(), form));
        let peer = outgoing.peer;
        if !is_as_said || metadata == Some(None) {
            let violation = "expects another type, size or number of dimensions".to_owned();
            return Err(self.error(channel, iteration, Problem::Violation { peer, violation }));
        }
        let slot = &mut outgoing.slots[(iteration % depth) as usize];
        assert!(matches!(slot.state, State::Free), "the slot of iteration {iteration} is in use");
        slot.state = State::Queued { iteration, source, metadata: metadata.flatten(), deadline };
        outgoing.next += 1;
        self.push(device, channel, now)
    }

    /// Submits the queued tensors that have a credit.
    pub(crate) fn push(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        now: Nanos,
    ) -> Result<(), ChannelError> {
        for slot in 0..self.depth as usize {
            self.push_slot(device, channel, slot, now)?;
        }
        Ok(())
    }

    fn push_slot(
        &mut self,
        device: &mut dyn Device,
        channel: usize,
        slot: usize,
        now: Nanos,
    ) -> Result<(), ChannelError> {
        let depth = self.depth;
        #[cfg(test)]
        let ignores_credits = self.mutant == Some(super::tests::Mutant::CreditIgnored);
        let outgoing = self.outgoing(channel);
        let State::Queued { iteration, deadline, .. } = outgoing.slots[slot].state else { return Ok(()) };
        let (peer, needed) = (outgoing.peer, iteration / depth + 1);
        let credits = outgoing.credits(device, slot);
        #[cfg(test)]
        let credits = if ignores_credits && credits > 0 { needed } else { credits };
        if credits < needed {
            return self.still_possible(channel, peer, iteration, "give a credit for it", now, deadline);
        }
        if credits > needed {
            let violation = format!("gave {credits} credits of {needed}");
            return Err(self.error(channel, iteration, Problem::Violation { peer, violation }));
        }
        if outgoing.slots[slot].remote.is_none() {
            // The next credit comes after the tensor that is sent now, so the payload is whole.
            let payload = device.signal_slots(peer).payload_words(outgoing.first + slot as u16);
            let [key, offset, len, ..] = payload.map(u64::from_le);
            outgoing.slots[slot].remote = Some(RemoteSlice { key: RegionKey(key), offset, len });
        }
        let Some(transfer) = outgoing.transfer(slot) else {
            let violation = "has a slot of another size".to_owned();
            return Err(self.error(channel, iteration, Problem::Violation { peer, violation }));
        };
        let name = TransferName { channel: channel as u32, slot: slot as u32, is_get: false };
        let submitted = match transfer {
            Outbound::Put(transfer) => device.submit(peer, transfer, name.id()),
            Outbound::Signal(signal) => device.signal(peer, &signal, name.id()),
        };
        let outgoing = self.outgoing(channel);
        match submitted {
            Ok(submitted) => {
                if let State::Queued { source, .. } = &outgoing.slots[slot].state {
                    let source = source.clone();
                    outgoing.slots[slot].state = State::Submitted { iteration, source };
                }
                if let Submitted::Ended(_) = submitted {
                    outgoing.done(slot as u32, depth);
                }
                Ok(())
            }
            Err(error) => {
                self.refused(channel, iteration, error)?;
                self.still_possible(channel, peer, iteration, "take it", now, deadline)
            }
        }
    }

    fn outgoing(&mut self, channel: usize) -> &mut Outgoing {
        match &mut self.ends[channel] {
            ChannelEnd::Outgoing(outgoing) => outgoing,
            _ => panic!("this rank does not send channel {channel}"),
        }
    }
}

enum Outbound {
    Put(Transfer),
    Signal(Signal),
}

impl Outgoing {
    /// The transfer of a queued tensor; nothing if the receiver's slot has another size.
    fn transfer(&self, slot: usize) -> Option<Outbound> {
        let signal_slot = self.first + slot as u16;
        let Slot { state: State::Queued { source, metadata, .. }, metadata: room, remote } =
            &self.slots[slot]
        else {
            return None;
        };
        let Some(metadata) = metadata else {
            let dst = (*remote)?;
            let signal = Some(Signal { signal_slot, payload: Inline::EMPTY });
            let put = Transfer::Put { src: Source::Slice(source.clone()), dst, signal };
            return (dst.len == source.len() as u64).then_some(Outbound::Put(put));
        };
        if let Some(room) = room {
            // The receiver has read what was here before: it gave a credit since.
            room.store(metadata);
            let dst = (*remote)?;
            let signal = Some(Signal { signal_slot, payload: Inline::EMPTY });
            let put = Transfer::Put { src: Source::Slice(room.clone()), dst, signal };
            return (dst.len == room.len() as u64).then_some(Outbound::Put(put));
        }
        Some(Outbound::Signal(Signal { signal_slot, payload: Inline::new(metadata)? }))
    }
}

/// The payload of a credit: the memory of the slot, if it has some.
pub(crate) fn credit_payload(slot: Option<&Slice>) -> Inline {
    let bytes = slot.map_or([0; REMOTE_SLICE_BYTES], |slot| encode_remote(&slot.remote()));
    Inline::new(&bytes).unwrap_or(Inline::EMPTY)
}
