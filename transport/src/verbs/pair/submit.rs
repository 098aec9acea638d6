//! The work requests of each kind of transfer.

use std::collections::VecDeque;

use super::super::request::{Local, Request, Target, of_slice, request, with_immediate};
use super::super::send_queue::{CompletionOwner, SLOT_BYTES, SendQueue};
use super::super::stripes::part;
use super::super::sys;
use super::super::wire::{CREDITS_MAX, Immediate, NicKeys, Piggyback, RemoteRegion, Stripe};
use super::{Pair, RemoteRegions};
use crate::device::{AtomicOp, Event, Source, SubmitError, Submitted, Transfer, TransferError, TransferId};
use crate::memory::Space;
use crate::region::{RegionKey, RemoteSlice, Slice};
use crate::signals::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES, Signal};

/// The checked slices of a transfer.
struct TransferSlices<'a> {
    local: &'a Slice,
    remote: RemoteSlice,
    /// The local slice's keys, by NIC of this rank.
    keys: NicKeys,
    /// The announced regions of the peer.
    remote_regions: &'a RemoteRegions,
}

impl Pair {
    /// Starts a transfer whose lengths and local slice were checked. `keys` are those of the local
    /// slice, `remote_regions` the announced regions of the peer.
    pub(in crate::verbs) fn submit(
        &mut self,
        transfer: &Transfer,
        id: TransferId,
        keys: NicKeys,
        remote_regions: &RemoteRegions,
        events: &mut VecDeque<Event>,
    ) -> Result<Submitted, SubmitError> {
        let signal = if let Transfer::Put { signal, .. } = transfer { signal.as_ref() } else { None };
        self.expect_room(signal)?;
        Ok(match transfer {
            Transfer::Put { dst, signal, .. } if dst.len == 0 => {
                signal.as_ref().map_or(Submitted::Ended(0), |signal| self.submit_signal(signal))
            }
            Transfer::Put { src: Source::Inline(inline), dst, signal } => {
                self.put_inline(inline, dst, signal.as_ref(), remote_regions)
            }
            Transfer::Put { src: Source::Slice(local), dst, signal } => match inline_bytes(local) {
                Some(inline) => self.put_inline(&inline, dst, signal.as_ref(), remote_regions),
                None => self.put(
                    &TransferSlices { local, remote: *dst, keys, remote_regions },
                    signal.as_ref(),
                    id,
                ),
            },
            Transfer::Get { dst, .. } if dst.is_empty() => Submitted::Ended(0),
            Transfer::Get { src, dst } => {
                self.get(&TransferSlices { local: dst, remote: *src, keys, remote_regions }, id)
            }
            Transfer::Atomic { word, op } => self.atomic(word, *op, id, events),
        })
    }

    /// Starts a signal without data.
    pub(in crate::verbs) fn signal(&mut self, signal: &Signal) -> Result<Submitted, SubmitError> {
        self.expect_room(Some(signal))?;
        Ok(self.submit_signal(signal))
    }

    /// Whether one more transfer may be under way, and the peer accepts its signal.
    fn expect_room(&self, signal: Option<&Signal>) -> Result<(), SubmitError> {
        let full = Err(SubmitError::QueueFull { peer: self.peer });
        if let Some(signal) = signal {
            if u32::from(signal.signal_slot) >= self.remote_signal_slots {
                let signal_slots = self.remote_signal_slots as usize;
                return Err(SubmitError::NoSuchSignalSlot { signal_slot: signal.signal_slot, signal_slots });
            }
            if (self.credits as usize) < self.queues.len() {
                return full;
            }
        }
        if self.has_room() { Ok(()) } else { full }
    }

    fn submit_signal(&mut self, signal: &Signal) -> Submitted {
        let (queue, immediate) = (self.queue_of(signal.signal_slot), self.immediate(signal));
        let signal_write = signal_write(&self.queues[queue], signal, immediate);
        self.queues[queue].push(CompletionOwner::NoOwner, None, RegionKey::NONE, &[signal_write]);
        self.charge(immediate);
        Submitted::Ended(0)
    }

    /// A put whose bytes are copied now.
    fn put_inline(
        &mut self,
        inline: &Inline,
        dst: &RemoteSlice,
        signal: Option<&Signal>,
        remote_regions: &RemoteRegions,
    ) -> Submitted {
        let (queue, target) = self.select_queue(signal, dst, remote_regions);
        self.put_over(
            queue,
            CompletionOwner::NoOwner,
            None,
            (target, Local::Inline(inline)),
            signal,
            dst.key,
        );
        Submitted::Ended(0)
    }

    fn put(&mut self, bytes: &TransferSlices<'_>, signal: Option<&Signal>, id: TransferId) -> Submitted {
        self.waiting += 1;
        if self.is_striped(bytes) {
            self.put_striped(bytes, signal, id);
        } else {
            let (queue, target) = self.select_queue(signal, &bytes.remote, bytes.remote_regions);
            let local = of_slice(bytes.local, bytes.keys[self.queues[queue].nic]);
            let holds = Some(bytes.local.clone());
            self.put_over(
                queue,
                CompletionOwner::Transfer(id),
                holds,
                (target, local),
                signal,
                bytes.remote.key,
            );
        }
        Submitted::UnderWay
    }

    /// A put over one queue pair.
    #[inline(always)]
    fn put_over(
        &mut self,
        queue: usize,
        owner: CompletionOwner,
        holds: Option<Slice>,
        (target, local): (Target, Local<'_>),
        signal: Option<&Signal>,
        key: RegionKey,
    ) {
        let write = (request(sys::IBV_WR_RDMA_WRITE, target), local);
        let Some(signal) = signal else { return self.queues[queue].push(owner, holds, key, &[write]) };
        let immediate = self.immediate(signal);
        if signal.payload.is_empty() {
            self.queues[queue].push(owner, holds, key, &[(with_immediate(target, immediate), local)]);
        } else {
            let signal_write = signal_write(&self.queues[queue], signal, immediate);
            self.queues[queue].push(owner, holds, key, &[write, signal_write]);
        }
        self.charge(immediate);
    }

    /// A put over all queue pairs: on each a part and, if there is a signal, an immediate that
    /// announces the part.
    fn put_striped(&mut self, bytes: &TransferSlices<'_>, signal: Option<&Signal>, id: TransferId) {
        let count = self.queues.len();
        self.striped_transfers.begin(id, count);
        let stripe = Stripe { number: Stripe::number(self.striped), parts: count as u8 };
        for queue in 0..count {
            let (target, local) = self.part(bytes, queue);
            let (holds, key) = (Some(bytes.local.clone()), bytes.remote.key);
            let write = (request(sys::IBV_WR_RDMA_WRITE, target), local);
            let Some(signal) = signal else {
                self.queues[queue].push(CompletionOwner::StripePart, holds, key, &[write]);
                continue;
            };
            let has_payload = !signal.payload.is_empty() && queue == self.queue_of(signal.signal_slot);
            let piggyback = Piggyback::Stripe(stripe);
            let immediate = Immediate { signal_slot: Some(signal.signal_slot), has_payload, piggyback };
            if has_payload {
                let signal_write = signal_write(&self.queues[queue], signal, immediate);
                self.queues[queue].push(CompletionOwner::StripePart, holds, key, &[write, signal_write]);
            } else {
                let write = (with_immediate(target, immediate), local);
                self.queues[queue].push(CompletionOwner::StripePart, holds, key, &[write]);
            }
            self.charge(immediate);
        }
        self.striped += u64::from(signal.is_some());
    }

    fn get(&mut self, bytes: &TransferSlices<'_>, id: TransferId) -> Submitted {
        self.waiting += 1;
        let key = bytes.remote.key;
        if self.is_striped(bytes) {
            self.striped_transfers.begin(id, self.queues.len());
            for queue in 0..self.queues.len() {
                let (target, local) = self.part(bytes, queue);
                let read = (request(sys::IBV_WR_RDMA_READ, target), local);
                self.queues[queue].push(CompletionOwner::StripePart, Some(bytes.local.clone()), key, &[read]);
            }
        } else {
            let (queue, target) = self.select_queue(None, &bytes.remote, bytes.remote_regions);
            let local = of_slice(bytes.local, bytes.keys[self.queues[queue].nic]);
            let read = (request(sys::IBV_WR_RDMA_READ, target), local);
            self.queues[queue].push(CompletionOwner::Transfer(id), Some(bytes.local.clone()), key, &[read]);
        }
        Submitted::UnderWay
    }

    fn atomic(
        &mut self,
        word: &RemoteSlice,
        op: AtomicOp,
        id: TransferId,
        events: &mut VecDeque<Event>,
    ) -> Submitted {
        let target = Target::of(word);
        if !target.address.is_multiple_of(8) {
            // No region begins there: a forged key. This NIC would not send the request.
            let refused = TransferError::Refused { peer: self.peer, key: word.key };
            events.push_back(Event::Done { id, result: Err(refused) });
            return Submitted::UnderWay;
        }
        let (opcode, compare_add, swap) = match op {
            AtomicOp::Add(value) => (sys::IBV_WR_ATOMIC_FETCH_AND_ADD, value, 0),
            AtomicOp::CompareSwap { expected, new } => (sys::IBV_WR_ATOMIC_CMP_AND_SWP, expected, new),
        };
        let atomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
            remote_addr: target.address,
            compare_add,
            swap,
            rkey: target.key,
        };
        self.waiting += 1;
        self.queues[0].push_atomic(id, word.key, opcode, atomic);
        Submitted::UnderWay
    }

    /// Whether a transfer is striped. It must be known to lie inside its region, else the peer
    /// might accept some parts only.
    fn is_striped(&self, bytes: &TransferSlices<'_>) -> bool {
        let lies_inside = |known: &RemoteRegion| {
            bytes.remote.offset.checked_add(bytes.remote.len).is_some_and(|end| end <= known.bytes)
        };
        self.queues.len() > 1
            && bytes.local.len() >= self.stripe_bytes
            && bytes.remote_regions.get(&bytes.remote.key).is_some_and(lies_inside)
    }

    /// The part of a striped transfer on this queue pair.
    fn part(&self, bytes: &TransferSlices<'_>, queue: usize) -> (Target, Local<'static>) {
        let range = part(bytes.local.len(), self.queues.len(), queue);
        let queue = &self.queues[queue];
        let local = match bytes.local.slice(range.clone()) {
            Ok(slice) if !slice.is_empty() => of_slice(&slice, bytes.keys[queue.nic]),
            _ => return (queue.inbox, Local::Nothing),
        };
        let remote =
            RemoteSlice { offset: bytes.remote.offset.wrapping_add(range.start as u64), ..bytes.remote };
        (target(queue, &remote, bytes.remote_regions).unwrap_or_else(|| Target::of(&remote)), local)
    }

    /// The queue pair of a transfer that is not striped, and its target: a queue pair whose NIC's
    /// key is known. The key of the first NIC always is.
    #[inline]
    fn select_queue(
        &mut self,
        signal: Option<&Signal>,
        dst: &RemoteSlice,
        remote_regions: &RemoteRegions,
    ) -> (usize, Target) {
        let queue = match signal {
            Some(signal) => self.queue_of(signal.signal_slot),
            None => {
                self.next = if self.next + 1 < self.queues.len() { self.next + 1 } else { 0 };
                self.next
            }
        };
        match target(&self.queues[queue], dst, remote_regions) {
            Some(target) => (queue, target),
            None => (0, Target::of(dst)),
        }
    }

    fn queue_of(&self, signal_slot: u16) -> usize {
        // A division is expensive compared with the other costs of a small put.
        if self.queues.len() == 1 { 0 } else { usize::from(signal_slot) % self.queues.len() }
    }

    fn immediate(&self, signal: &Signal) -> Immediate {
        let piggyback = Piggyback::Credits(self.unreturned.min(CREDITS_MAX));
        Immediate {
            signal_slot: Some(signal.signal_slot),
            has_payload: !signal.payload.is_empty(),
            piggyback,
        }
    }

    /// Accounts for an immediate that was submitted.
    pub(super) fn charge(&mut self, immediate: Immediate) {
        if let Piggyback::Credits(credits) = immediate.piggyback {
            self.unreturned -= credits;
        }
        self.credits -= u32::from(immediate.signal_slot.is_some());
    }
}

/// The bytes of a slice that are copied at once because they are few; then nobody waits for the end
/// of the put.
fn inline_bytes(slice: &Slice) -> Option<Inline> {
    if slice.len() > SIGNAL_SLOT_PAYLOAD_BYTES || slice.region().memory().space() != Space::Host {
        return None;
    }
    let mut bytes = [0; SIGNAL_SLOT_PAYLOAD_BYTES];
    let bytes = &mut bytes[..slice.len()];
    slice.load(bytes);
    Inline::new(bytes)
}

/// The remote address and key for this queue pair, if known.
fn target(queue: &SendQueue, slice: &RemoteSlice, remote_regions: &RemoteRegions) -> Option<Target> {
    let first = Target::of(slice);
    match queue.remote_nic {
        0 => Some(first),
        nic => remote_regions.get(&slice.key).map(|known| Target { key: known.keys[nic], ..first }),
    }
}

/// The request that delivers a signal with its payload.
fn signal_write<'a>(queue: &SendQueue, signal: &'a Signal, immediate: Immediate) -> (Request, Local<'a>) {
    let address = queue.inbox.address + u64::from(signal.signal_slot) * SLOT_BYTES as u64;
    let write = with_immediate(Target { address, key: queue.inbox.key }, immediate);
    let local = if signal.payload.is_empty() { Local::Nothing } else { Local::Inline(&signal.payload) };
    (write, local)
}
