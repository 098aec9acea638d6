//! One connected peer: its queue pairs ([`SendQueue`]), and the credits of
//! each end.
//!
//! * **A put** is an RDMA write. Its signal is the immediate of that write, or of a second write on
//!   the same queue pair that carries the payload to the slot of the signal in the target's inbox.
//!   A queue pair places writes in order before it completes the receive of an immediate, so all
//!   bytes are visible with that completion (contract line 1).
//! * **Several queue pairs**: a long transfer is striped over all of them, any other uses one of
//!   them. Signals of one signal slot always use the same
//!   queue pair, because their payloads share a slot of the inbox. Atomics use the first queue
//!   pair: they are atomic among those of one NIC.
//! * **Credits.** An immediate consumes a receive of its target. The hello of each end states the
//!   number of its receives. Each end returns credits with its own immediates, or with a separate
//!   immediate when half of the credits are due. So an immediate always finds a receive, and a
//!   submit without credit returns `QueueFull` instead of causing retries of the NIC.
//! * **Drains.** A mark, an immediate of its own, goes over each queue pair behind all that was
//!   submitted, and after the reads and atomics there have ended. The receive of a mark proves that
//!   the peer's writes are placed here, its completion that all requests of its sender have ended.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::Nic;
use super::lease::Leases;
use super::limits::CreateError;
use super::objects::{MemoryRegion, MemoryWindow};
use super::send_queue::{CompletionOwner, QueueSizes, SLOT_BYTES, SendQueue};
use super::send_queue::{Local, Target, request, with_immediate};
use super::status::Operation;
use super::wire::{
    CREDITS_MAX, Immediate, NicKeys, PairHello, Piggyback, QUEUE_PAIRS_MAX, QueuePairHello, RemoteRegion,
    RemoteRegions, Stripe,
};
use super::{Counts, sys};
use crate::Rank;
use crate::device::{
    AtomicOp, Event, LossCause, ProtocolViolation, Source, SubmitError, Submitted, Transfer, TransferError,
    TransferId,
};
use crate::drain::Drains;
use crate::memory::{HostMemory, Memory, Space};
use crate::region::{RegionKey, RemoteSlice, Slice};
use crate::signals::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES, Signal, Signals};

/// See the module.
pub(super) struct Pair {
    peer: Rank,
    /// Freed before the queue pairs that bind them: a queue pair with a bound window is not
    /// destroyed by every driver.
    leases: Leases,
    // Before the memory that they access.
    queues: Vec<SendQueue>,
    /// The peer's payloads, a slot for each signal slot; registered with each NIC.
    inboxes: Vec<MemoryRegion>,
    signal_slots: Signals,
    sizes: QueueSizes,
    stripe_bytes: usize,
    /// Credits that the peer grants; zero before it is connected.
    remote_credits: u32,
    remote_signal_slots: u32,
    /// Immediates that the peer accepts now.
    credits: u32,
    /// Immediates of the peer whose credits were not returned.
    unreturned: u32,
    /// Transfers whose ends will be reported.
    waiting: u32,
    striped_transfers: StripedTransfers,
    arriving: IncomingStripedPuts,
    /// Striped puts with a signal so far.
    striped: u64,
    /// The queue pair of the last transfer that could use any.
    next: usize,
    /// With the stages [`own_mark`] and [`peer_mark`] of each queue pair.
    drains: Drains,
    /// Drains whose marks were submitted.
    drains_marked: u64,
    /// Whether the device lists this pair among those to post.
    is_listed: bool,
}

impl Pair {
    /// A pair that is not connected yet.
    pub(super) fn new(
        nics: &[Nic],
        peer: Rank,
        signal_slots: Signals,
        sizes: QueueSizes,
        stripe_bytes: usize,
        mut random: impl FnMut() -> u64,
    ) -> Result<Self, CreateError> {
        let memory: Arc<dyn Memory> = HostMemory::new(signal_slots.len().max(1) * SLOT_BYTES);
        let address = memory.base().as_ptr() as u64;
        let access = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE;
        let inboxes =
            nics.iter().map(|nic| MemoryRegion::new(&nic.domain, Arc::clone(&memory), address, access));
        let inboxes = inboxes.collect::<Result<Vec<_>, _>>()?;
        let count = sizes.queue_pairs as usize * nics.len();
        let queues = (0..count).map(|queue| SendQueue::new(nics, queue % nics.len(), sizes, random()));
        let drains = Drains::new(2 * count);
        Ok(Self {
            peer,
            queues: queues.collect::<Result<Vec<_>, _>>()?,
            inboxes,
            leases: Leases::default(),
            signal_slots,
            sizes,
            stripe_bytes,
            remote_credits: 0,
            remote_signal_slots: 0,
            credits: 0,
            unreturned: 0,
            waiting: 0,
            striped_transfers: StripedTransfers::default(),
            arriving: IncomingStripedPuts::default(),
            striped: 0,
            next: 0,
            drains,
            drains_marked: 0,
            is_listed: false,
        })
    }

    /// Its queue pairs, by NIC and number.
    pub(super) fn queue_pairs(&self) -> impl Iterator<Item = (usize, u32)> {
        self.queues.iter().map(|queue| (queue.nic(), queue.number()))
    }

    /// The hello for the peer.
    pub(super) fn hello(&self, nics: &[Nic]) -> PairHello {
        let queues = self.queues.iter().map(|queue| queue.hello(nics, &self.inboxes));
        PairHello {
            reads: self.sizes.reads,
            credits: self.sizes.credits,
            inbox_address: self.inboxes[0].memory().base().as_ptr() as u64,
            signal_slots: self.signal_slots.len() as u32,
            queues: queues.collect(),
        }
    }

    /// Connects it to the peer of this hello, over as many queue pairs as both have.
    pub(super) fn connect(&mut self, nics: &[Nic], hello: &PairHello) -> io::Result<()> {
        self.truncate_queues(hello.queues.len());
        for (queue, other) in self.queues.iter_mut().zip(&hello.queues) {
            queue.connect(nics, hello, other)?;
        }
        self.set_remote_limits(hello);
        Ok(())
    }

    /// Drops the queue pairs for which the peer has no counterpart.
    pub(super) fn truncate_queues(&mut self, count: usize) {
        self.queues.truncate(count);
        self.drains = Drains::new(2 * self.queues.len());
    }

    /// Begins a drain.
    pub(crate) fn drain(&mut self) -> Result<(), SubmitError> {
        self.drains.begin(self.peer)
    }

    /// Submits the marks of drains for which there is room, and reports the drains that are over.
    /// Returns whether none is under way any more.
    pub(crate) fn advance_drains(&mut self, events: &mut VecDeque<Event>) -> bool {
        while self.drains_marked < self.drains.begun() && self.has_room_for_marks() {
            self.queues.iter_mut().for_each(SendQueue::push_drain_mark);
            self.credits -= self.queues.len() as u32;
            self.drains_marked += 1;
        }
        events.extend(std::iter::from_fn(|| self.drains.next_drained(self.peer)));
        !self.drains.is_under_way()
    }

    fn has_room_for_marks(&self) -> bool {
        self.credits as usize >= self.queues.len() && self.queues.iter().all(SendQueue::has_room)
    }

    /// Connects one of its queue pairs to the peer's, with the path in `attributes`.
    pub(super) fn connect_queue(
        &mut self,
        queue: usize,
        hello: &PairHello,
        other: &QueuePairHello,
        attributes: impl Fn(sys::ibv_qp_state) -> io::Result<(sys::ibv_qp_attr, u32)>,
    ) -> io::Result<()> {
        self.queues[queue].connect_as(hello, other, attributes)?;
        self.set_remote_limits(hello);
        Ok(())
    }

    /// Takes over the peer's limits, before anything was sent.
    fn set_remote_limits(&mut self, hello: &PairHello) {
        self.remote_credits = hello.credits;
        self.remote_signal_slots = hello.signal_slots;
        self.credits = hello.credits;
    }

    /// Whether the work requests should be posted now.
    pub(super) fn is_due(&self) -> bool {
        self.queues.iter().any(SendQueue::is_due)
    }

    /// Lists the pair among those to post.
    pub(super) fn list(&mut self, due: &mut Vec<Rank>) {
        if !self.is_listed {
            self.is_listed = true;
            due.push(self.peer);
        }
    }

    /// Whether all work requests were posted.
    pub(super) fn has_posted_all(&self) -> bool {
        self.queues.iter().all(SendQueue::has_posted_all)
    }

    /// Posts the work requests.
    #[inline]
    pub(super) fn post(&mut self) -> Result<(), LossCause> {
        for queue in &mut self.queues {
            queue.post()?;
        }
        Ok(())
    }

    /// Posts the work requests of a listed pair; returns whether it stays listed, because the NIC
    /// had no room for all.
    pub(super) fn post_listed(&mut self) -> Result<bool, LossCause> {
        self.post()?;
        self.is_listed = !self.has_posted_all();
        Ok(self.is_listed)
    }

    /// Handles the success of the requests of this queue pair up to `number`.
    pub(super) fn completed(&mut self, queue: usize, number: u64, events: &mut VecDeque<Event>) {
        while let Some((owner, old_value)) = self.queues[queue].pop_completed(number) {
            let id = match owner {
                CompletionOwner::NoOwner => None,
                CompletionOwner::Transfer(id) => Some(id),
                CompletionOwner::StripePart => self.striped_transfers.part_ended(queue),
                CompletionOwner::DrainMark => {
                    self.drains.pass(own_mark(queue), 1);
                    None
                }
            };
            let Some(id) = id else { continue };
            self.waiting -= 1;
            events.push_back(Event::Done { id, result: Ok(old_value) });
        }
        self.leases.free_revoked(&self.queues[0]);
    }

    /// Handles an immediate that came with a write of `bytes` bytes.
    pub(super) fn received(&mut self, queue: usize, word: u32, bytes: u32) -> Result<(), ProtocolViolation> {
        let said = Immediate::decode(word).map_err(ProtocolViolation::from)?;
        if let Piggyback::Credits(credits) = said.piggyback {
            if credits > self.remote_credits - self.credits {
                return Err(ProtocolViolation::UnexpectedAnswer);
            }
            self.credits += credits;
        }
        let Some(signal_slot) = said.signal_slot else {
            if said.piggyback == Piggyback::DrainMark {
                self.consume_credit()?;
                self.drains.pass(peer_mark(queue), 1);
            }
            return Ok(());
        };
        if usize::from(signal_slot) >= self.signal_slots.len() {
            return Err(ProtocolViolation::UnknownSignalSlot);
        }
        self.consume_credit()?;
        let mut payload_bytes = said.has_payload.then_some(bytes);
        if let Piggyback::Stripe(stripe) = said.piggyback {
            let put = self.arriving.part(queue, self.queues.len(), stripe, signal_slot, payload_bytes)?;
            let Some(put) = put else { return Ok(()) };
            payload_bytes = put.payload_bytes;
        }
        let payload = payload_bytes.map_or(Ok(Inline::EMPTY), |bytes| self.payload(signal_slot, bytes))?;
        self.signal_slots.signal(&Signal { signal_slot, payload });
        Ok(())
    }

    /// Accounts for a receive that the peer has consumed.
    fn consume_credit(&mut self) -> Result<(), ProtocolViolation> {
        self.unreturned += 1;
        if self.unreturned > self.sizes.credits {
            return Err(ProtocolViolation::TooManyRequests);
        }
        Ok(())
    }

    /// The payload that the peer has written to the inbox slot of a signal slot.
    fn payload(&self, signal_slot: u16, bytes: u32) -> Result<Inline, ProtocolViolation> {
        let mut buffer = [0; SIGNAL_SLOT_PAYLOAD_BYTES];
        let buffer = buffer.get_mut(..bytes as usize).ok_or(ProtocolViolation::OversizedFrame)?;
        // SAFETY: the inbox slot of the signal slot has room for any payload. The peer writes it
        // again only after it knows that this signal was taken. A peer that breaks this rule
        // changes these bytes only.
        unsafe {
            let slot = self.inboxes[0].memory().base().as_ptr().add(usize::from(signal_slot) * SLOT_BYTES);
            std::ptr::copy_nonoverlapping(slot, buffer.as_mut_ptr(), buffer.len());
        }
        Ok(Inline::new(buffer).unwrap_or(Inline::EMPTY))
    }

    /// Returns credits before the peer has to wait for them; returns whether a work request was
    /// added.
    #[inline]
    pub(super) fn return_credits(&mut self) -> bool {
        self.unreturned >= self.sizes.credits.div_ceil(2) && self.return_all_credits()
    }

    #[cold]
    fn return_all_credits(&mut self) -> bool {
        if !self.queues[0].has_spare_room() {
            return false;
        }
        let piggyback = Piggyback::Credits(self.unreturned.min(CREDITS_MAX));
        let immediate = Immediate { signal_slot: None, has_payload: false, piggyback };
        self.queues[0].push_immediate(immediate);
        self.charge(immediate);
        true
    }

    /// Whether each queue pair takes one more transfer.
    pub(super) fn has_room(&self) -> bool {
        self.waiting < self.sizes.depth && self.queues.iter().all(SendQueue::has_room)
    }

    /// Adds a request that binds a memory window to a slice.
    pub(super) fn bind(
        &mut self,
        bind: sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1,
        id: TransferId,
        key: RegionKey,
        (window, slice): (MemoryWindow, Slice),
    ) {
        self.waiting += 1;
        let number = self.queues[0].push_bind(id, key, bind);
        self.leases.add(key, number, window, slice);
    }

    /// Whether a memory window is bound.
    pub(crate) fn has_bound(&self, key: RegionKey) -> bool {
        self.leases.has_bound(key, &self.queues[0])
    }

    /// Revokes a memory window.
    pub(super) fn revoke(&mut self, key: RegionKey) {
        self.leases.revoke(key, &self.queues[0]);
    }

    /// Sends a write of no bytes over each queue pair; its completion proves that the path works.
    pub(super) fn probe_paths(&mut self) -> Result<(), LossCause> {
        self.queues.iter_mut().for_each(SendQueue::push_empty_write);
        self.post()
    }

    /// Makes sure that all submitted requests will be completed.
    pub(super) fn request_completion(&mut self) {
        self.queues.iter_mut().for_each(SendQueue::request_completion);
    }

    /// Whether the peer has acknowledged all requests.
    pub(super) fn is_idle(&self) -> bool {
        self.queues.iter().all(SendQueue::is_idle)
    }

    /// The operation of the request of this number.
    pub(super) fn operation(&self, queue: usize, number: u64) -> Operation {
        self.queues[queue].operation(number)
    }

    /// Reports a request that failed because of its remote key.
    pub(super) fn refuse(&mut self, queue: usize, number: u64, events: &mut VecDeque<Event>) {
        let Some((owner, key)) = self.queues[queue].refuse(number) else { return };
        let id = match owner {
            CompletionOwner::NoOwner | CompletionOwner::DrainMark => None,
            CompletionOwner::Transfer(id) => Some(id),
            CompletionOwner::StripePart => self.striped_transfers.part_failed(queue),
        };
        if let Some(id) = id {
            let refused = TransferError::Refused { peer: self.peer, key };
            events.push_back(Event::Done { id, result: Err(refused) });
        }
    }

    /// The requests to the NICs for this pair.
    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.queues.iter().for_each(|queue| counts += queue.counts());
        counts
    }

    /// Ends all transfers with `error` and destroys the queue pairs.
    pub(super) fn fail(self, error: &TransferError, events: &mut VecDeque<Event>) {
        let Self { queues, leases, striped_transfers, .. } = self;
        drop(leases);
        let ids: Vec<_> =
            queues.into_iter().flat_map(SendQueue::fail).chain(striped_transfers.into_ids()).collect();
        events.extend(ids.into_iter().map(|id| Event::Done { id, result: Err(error.clone()) }));
    }
}

/// The stage of a drain: this end's mark on a queue pair has ended, and all before it.
fn own_mark(queue: usize) -> usize {
    2 * queue
}

/// The stage of a drain: the peer's mark on a queue pair has come.
fn peer_mark(queue: usize) -> usize {
    2 * queue + 1
}

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
    pub(super) fn submit(
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
    pub(super) fn signal(&mut self, signal: &Signal) -> Result<Submitted, SubmitError> {
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
        let signal_write = self.queues[queue].signal_write(signal, immediate);
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
            let local = self.queues[queue].local(bytes.local, &bytes.keys);
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
            let signal_write = self.queues[queue].signal_write(signal, immediate);
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
                let signal_write = self.queues[queue].signal_write(signal, immediate);
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
            let local = self.queues[queue].local(bytes.local, &bytes.keys);
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
        self.waiting += 1;
        self.queues[0].push_atomic(id, word.key, target, op);
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
            Ok(slice) if !slice.is_empty() => queue.local(&slice, &bytes.keys),
            _ => return queue.no_bytes(),
        };
        let remote =
            RemoteSlice { offset: bytes.remote.offset.wrapping_add(range.start as u64), ..bytes.remote };
        (queue.target(&remote, bytes.remote_regions).unwrap_or_else(|| Target::of(&remote)), local)
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
        match self.queues[queue].target(dst, remote_regions) {
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
    fn charge(&mut self, immediate: Immediate) {
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

/// Parts begin at multiples of this, in bytes, unless they are shorter.
const PART_ALIGN_BYTES: usize = 4096;

/// The range of part `queue` of `queues` in a transfer of `bytes`; the last parts may be shorter,
/// or empty.
fn part(bytes: usize, queues: usize, queue: usize) -> Range<usize> {
    let even = bytes.div_ceil(queues);
    let length = if even < PART_ALIGN_BYTES { even } else { even.next_multiple_of(PART_ALIGN_BYTES) };
    (queue * length).min(bytes)..((queue + 1) * length).min(bytes)
}

/// Incomplete striped puts of a peer at most; a queue pair and its completions hold far fewer.
const ARRIVING_MAX: usize = 4096;

/// Striped transfers whose ends are reported.
#[derive(Default)]
struct StripedTransfers {
    under_way: VecDeque<StripedTransfer>,
    /// The number of transfers that have ended.
    ended: u64,
    /// The number of parts that have ended, by queue pair.
    parts: [u64; QUEUE_PAIRS_MAX],
}

struct StripedTransfer {
    /// `None`: reported already.
    id: Option<TransferId>,
    parts_left: usize,
}

impl StripedTransfers {
    /// Records a transfer with a part on each of `queues` queue pairs.
    fn begin(&mut self, id: TransferId, queues: usize) {
        self.under_way.push_back(StripedTransfer { id: Some(id), parts_left: queues });
    }

    fn next_on(&mut self, queue: usize) -> Option<&mut StripedTransfer> {
        let index = self.parts[queue] - self.ended;
        self.under_way.get_mut(index as usize)
    }

    /// Records the end of the next part on this queue pair; returns its transfer after the last
    /// part.
    fn part_ended(&mut self, queue: usize) -> Option<TransferId> {
        let transfer = self.next_on(queue)?;
        transfer.parts_left -= 1;
        let is_last = transfer.parts_left == 0;
        self.parts[queue] += 1;
        if !is_last {
            return None;
        }
        self.ended += 1;
        self.under_way.pop_front()?.id
    }

    /// Records the failure of the next part on this queue pair; returns its transfer, once.
    fn part_failed(&mut self, queue: usize) -> Option<TransferId> {
        self.next_on(queue)?.id.take()
    }

    /// The transfers that have not ended.
    fn into_ids(self) -> impl Iterator<Item = TransferId> {
        self.under_way.into_iter().filter_map(|transfer| transfer.id)
    }
}

/// Striped puts of a peer of which some parts have arrived.
///
/// Queue pairs are not ordered with each other, so the receiver counts: each part of a put with a
/// signal is a write whose immediate states the put's number and the number of its parts. A striped
/// transfer has one part, perhaps an empty one, on each queue pair of its peer. **Invariant:** each
/// queue pair is in order, so the n-th part on each belongs to the n-th striped put, and no put
/// completes before those that were sent before it. The number is a check only, so four bits
/// suffice.
#[derive(Default)]
struct IncomingStripedPuts {
    puts: VecDeque<StripedPut>,
    /// The number of puts that have arrived.
    arrived: u64,
    /// The number of parts that have arrived, by queue pair.
    parts: [u64; QUEUE_PAIRS_MAX],
}

/// A striped put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StripedPut {
    signal_slot: u16,
    /// Length of the payload in the inbox slot, if there is one.
    payload_bytes: Option<u32>,
    parts_left: usize,
}

impl IncomingStripedPuts {
    /// Records a part on one of `queues` queue pairs; returns its put after the last part.
    fn part(
        &mut self,
        queue: usize,
        queues: usize,
        stripe: Stripe,
        signal_slot: u16,
        payload_bytes: Option<u32>,
    ) -> Result<Option<StripedPut>, ProtocolViolation> {
        let number = self.parts[queue];
        if stripe.number != Stripe::number(number) || usize::from(stripe.parts) != queues {
            return Err(ProtocolViolation::UnexpectedAnswer);
        }
        let index = (number - self.arrived) as usize;
        if index == self.puts.len() && index < ARRIVING_MAX {
            self.puts.push_back(StripedPut { signal_slot, payload_bytes: None, parts_left: queues });
        }
        // A queue pair is at most one part ahead of the newest put.
        let put = self.puts.get_mut(index).ok_or(ProtocolViolation::UnexpectedAnswer)?;
        if put.signal_slot != signal_slot || (put.payload_bytes.is_some() && payload_bytes.is_some()) {
            return Err(ProtocolViolation::UnexpectedAnswer);
        }
        put.payload_bytes = put.payload_bytes.or(payload_bytes);
        put.parts_left -= 1;
        let is_whole = put.parts_left == 0;
        self.parts[queue] += 1;
        if !is_whole {
            return Ok(None);
        }
        self.arrived += 1;
        Ok(self.puts.pop_front())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stripe(number: u64, parts: usize) -> Stripe {
        Stripe { number: Stripe::number(number), parts: parts as u8 }
    }

    #[test]
    fn parts_cover_every_length_once_in_order() {
        for queues in 1..=QUEUE_PAIRS_MAX {
            for bytes in [0, 1, 2, 7, 4095, 4096, 4097, 65_536, 1_000_003] {
                let mut end = 0;
                for queue in 0..queues {
                    let part = part(bytes, queues, queue);
                    assert_eq!(part.start, end, "{bytes} bytes, part {queue} of {queues}");
                    end = part.end;
                }
                assert_eq!(end, bytes);
            }
        }
    }

    #[test]
    fn a_put_has_arrived_when_each_queue_pair_brought_its_part_however_far_one_is_ahead() {
        let mut arriving = IncomingStripedPuts::default();
        // Queue pair 0 is 40 puts ahead, more than four bits distinguish.
        for put in 0..40 {
            assert_eq!(arriving.part(0, 2, stripe(put, 2), put as u16, None), Ok(None));
        }
        for put in 0..40 {
            let payload = (put % 3 == 0).then_some(5);
            let arrived = arriving.part(1, 2, stripe(put, 2), put as u16, payload).unwrap();
            let arrived = arrived.expect("both parts are here");
            assert_eq!((arrived.signal_slot, arrived.payload_bytes), (put as u16, payload));
        }
    }

    #[test]
    fn parts_that_do_not_fit_are_a_breach_of_the_protocol() {
        let fresh =
            |queue, said, signal_slot| IncomingStripedPuts::default().part(queue, 2, said, signal_slot, None);
        assert!(fresh(0, stripe(1, 2), 0).is_err(), "the first put's number is 0");
        assert!(fresh(0, stripe(0, 3), 0).is_err(), "there are two queue pairs");
        let mut arriving = IncomingStripedPuts::default();
        assert_eq!(arriving.part(0, 2, stripe(0, 2), 7, Some(1)), Ok(None));
        assert!(arriving.part(1, 2, stripe(0, 2), 8, None).is_err(), "another slot");
        assert!(arriving.part(1, 2, stripe(0, 2), 7, Some(1)).is_err(), "a second payload");
    }

    #[test]
    fn a_striped_transfer_ends_once_with_its_last_part_or_fails_once() {
        let mut striped_transfers = StripedTransfers::default();
        for id in 0..3 {
            striped_transfers.begin(TransferId(id), 2);
        }
        assert_eq!([striped_transfers.part_ended(0), striped_transfers.part_ended(0)], [None, None]);
        assert_eq!(striped_transfers.part_ended(1), Some(TransferId(0)));
        assert_eq!(striped_transfers.part_failed(1), Some(TransferId(1)));
        assert_eq!(striped_transfers.part_failed(1), None);
        assert_eq!(striped_transfers.into_ids().collect::<Vec<_>>(), [TransferId(2)]);
    }
}
