//! One connected peer: its queue pairs ([`send_queue`](super::send_queue pair)), and the credits of
//! each end.
//!
//! * **A put** is an RDMA write. Its signal is the immediate of that write, or of a second write on
//!   the same queue pair that carries the payload to the slot of the signal in the target's inbox.
//!   A queue pair places writes in order before it completes the receive of an immediate, so all
//!   bytes are visible with that completion (contract line 1).
//! * **Several queue pairs**: a long transfer is striped over all of them
//!   ([`stripes`](super::stripes)), remote_regions use one. Signals of one signal slot always use the same
//!   queue pair, because their payloads share a slot of the inbox. Atomics use the first queue
//!   pair: they are atomic among those of one NIC.
//! * **Credits.** An immediate consumes a receive of its target. The hello of each end states the
//!   number of its receives. Each end returns credits with its own immediates, or with a separate
//!   immediate when half of the credits are due. So an immediate always finds a receive, and a
//!   submit without credit returns `QueueFull` instead of causing retries of the NIC.

mod submit;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::lease::HeldLease;
use super::limits::CreateError;
use super::nic::Nic;
use super::objects::MemoryRegion;
use super::request::{Local, with_immediate};
use super::send_queue::{CompletionOwner, QueueSizes, SLOT_BYTES, SendQueue};
use super::status::Operation;
use super::stripes::{IncomingStripedPuts, StripedTransfers};
use super::wire::{CREDITS_MAX, Hello, Immediate, Piggyback, QueuePairHello, RemoteRegion};
use super::{Counts, sys};
use crate::Rank;
use crate::device::{Event, LossCause, ProtocolViolation, TransferError, TransferId};
use crate::memory::{HostMemory, Memory};
use crate::region::{KeyMap, RegionKey};
use crate::signals::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES, Signal, Signals};

/// The announced regions of a peer.
pub(super) type RemoteRegions = KeyMap<RemoteRegion>;

/// See the module.
pub(super) struct Pair {
    peer: Rank,
    // Before the memory that they access.
    queues: Vec<SendQueue>,
    /// The peer's payloads, a slot for each signal slot; registered with each NIC.
    inboxes: Vec<MemoryRegion>,
    /// Memory windows by their keys.
    leases: KeyMap<HeldLease>,
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
    /// Whether the device lists this pair among those to post.
    pub(super) is_listed: bool,
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
        Ok(Self {
            peer,
            queues: queues.collect::<Result<Vec<_>, _>>()?,
            inboxes,
            leases: KeyMap::default(),
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
            is_listed: false,
        })
    }

    /// Its queue pairs, by NIC and number.
    pub(super) fn queue_pairs(&self) -> impl Iterator<Item = (usize, u32)> {
        self.queues.iter().map(|queue| (queue.nic, queue.number()))
    }

    /// The hello for the peer.
    pub(super) fn hello(&self, nics: &[Nic]) -> Hello {
        let queues = self.queues.iter().map(|queue| queue.hello(nics, self.inboxes[queue.nic].remote_key()));
        Hello {
            reads: self.sizes.reads,
            credits: self.sizes.credits,
            inbox_address: self.inboxes[0].memory().base().as_ptr() as u64,
            signal_slots: self.signal_slots.len() as u32,
            queues: queues.collect(),
        }
    }

    /// Connects it to the peer of this hello, over as many queue pairs as both have.
    pub(super) fn connect(&mut self, nics: &[Nic], hello: &Hello) -> io::Result<()> {
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
    }

    /// Connects one of its queue pairs to the peer's, with the path in `attributes`.
    pub(super) fn connect_queue(
        &mut self,
        queue: usize,
        hello: &Hello,
        other: &QueuePairHello,
        attributes: impl Fn(sys::ibv_qp_state) -> io::Result<(sys::ibv_qp_attr, u32)>,
    ) -> io::Result<()> {
        self.queues[queue].connect_as(hello, other, attributes)?;
        self.set_remote_limits(hello);
        Ok(())
    }

    /// Takes over the peer's limits, before anything was sent.
    fn set_remote_limits(&mut self, hello: &Hello) {
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

    /// Handles the success of the requests of this queue pair up to `number`.
    pub(super) fn completed(&mut self, queue: usize, number: u64, events: &mut VecDeque<Event>) {
        while let Some(ended) = self.queues[queue].pop_completed(number) {
            let id = match ended.owner {
                CompletionOwner::NoOwner => None,
                CompletionOwner::Transfer(id) => Some(id),
                CompletionOwner::StripePart => self.striped_transfers.part_ended(queue),
            };
            let Some(id) = id else { continue };
            self.waiting -= 1;
            events.push_back(Event::Done { id, result: Ok(ended.old_value) });
        }
    }

    /// Handles an immediate that came with a write of `bytes` bytes.
    pub(super) fn received(&mut self, queue: usize, word: u32, bytes: u32) -> Result<(), ProtocolViolation> {
        let said = Immediate::decode(word).ok_or(ProtocolViolation::MalformedFrame)?;
        if let Piggyback::Credits(credits) = said.piggyback {
            if credits > self.remote_credits - self.credits {
                return Err(ProtocolViolation::UnexpectedAnswer);
            }
            self.credits += credits;
        }
        let Some(signal_slot) = said.signal_slot else { return Ok(()) };
        if usize::from(signal_slot) >= self.signal_slots.len() {
            return Err(ProtocolViolation::UnknownSignalSlot);
        }
        self.unreturned += 1;
        if self.unreturned > self.sizes.credits {
            return Err(ProtocolViolation::TooManyRequests);
        }
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
        let write = with_immediate(self.queues[0].inbox, immediate);
        self.queues[0].push(CompletionOwner::NoOwner, None, RegionKey::NONE, &[(write, Local::Nothing)]);
        self.charge(immediate);
        true
    }

    /// Whether each queue pair takes one more transfer.
    pub(super) fn has_room(&self) -> bool {
        self.waiting < self.sizes.depth && self.queues.iter().all(SendQueue::has_room)
    }

    /// Adds a request that binds a memory window.
    pub(super) fn bind(
        &mut self,
        bind: sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1,
        id: TransferId,
        key: RegionKey,
        leased: HeldLease,
    ) {
        self.waiting += 1;
        self.queues[0].push_bind(id, key, bind);
        self.leases.insert(key, leased);
    }

    /// Revokes a memory window.
    pub(super) fn revoke(&mut self, key: RegionKey) {
        self.leases.remove(&key);
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
            CompletionOwner::NoOwner => None,
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
        self.queues.iter().for_each(|queue| counts += queue.counts);
        counts
    }

    /// Ends all transfers with `error` and destroys the queue pairs.
    pub(super) fn fail(self, error: &TransferError, events: &mut VecDeque<Event>) {
        let Self { queues, striped_transfers, .. } = self;
        let ids: Vec<_> =
            queues.into_iter().flat_map(SendQueue::fail).chain(striped_transfers.into_ids()).collect();
        events.extend(ids.into_iter().map(|id| Event::Done { id, result: Err(error.clone()) }));
    }
}
