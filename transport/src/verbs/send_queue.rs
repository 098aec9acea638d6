//! A queue pair of a peer, and the requests under way on it.
//!
//! Submitted requests are linked ([`WorkRequestList`]) and posted with one
//! doorbell ([`SendQueue::post`]): when the device is polled or flushed, or when a list is long.
//! Requests complete in order. So only the last request of a list whose end is reported asks for a
//! completion; otherwise every [`SIGNAL_EVERY`]th does, so that room comes back.
//!
//! **Invariant:** memory that the NIC may still access (source, destination, own slots) is held by
//! an entry of `sent`, which is removed only after its completion or with the queue pair.

use std::collections::VecDeque;
use std::sync::Arc;
use std::{io, ptr};

use super::Nic;
use super::limits::CreateError;
use super::objects::{MemoryRegion, QueuePair};
use super::port::{ChosenPort, GidType, Service};
use super::status::Operation;
use super::wire::{Immediate, KeyParts, NicKeys, PairHello, Piggyback, QueuePairHello, RemoteRegions};
use super::{Counts, sys};
use crate::device::{AtomicOp, LossCause, TransferId};
use crate::memory::{HostMemory, Memory};
use crate::region::{RegionKey, RemoteSlice, Slice};
use crate::signals::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES, Signal};

/// Requests without a report between two that ask for a completion.
const SIGNAL_EVERY: u32 = 32;

/// Requests reserved for credits and for the last request.
const SPARE_REQUESTS: u32 = 8;

/// A list of this many requests is posted at once,
const LIST_REQUESTS: usize = 32;
/// and so is a list that moves this many bytes: compared with them the cost of a doorbell is small.
const LIST_BYTES: usize = 4096;

/// Requests of one group at most.
const GROUP_REQUESTS: u32 = 2;

/// Bytes of an inbox slot of a signal slot, and of a request's own slot.
pub(super) const SLOT_BYTES: usize = 64;
/// Bytes of a group's own slot.
const GROUP_SLOT_BYTES: usize = GROUP_REQUESTS as usize * SLOT_BYTES;
const _: () = assert!(SIGNAL_SLOT_PAYLOAD_BYTES <= SLOT_BYTES);

/// The timeout of an acknowledgement: 4.096 us times two to this power, 0.54 s. A host under load
/// answers late; dead peers are detected by the control stream.
const RETRY_TIMEOUT: u8 = 17;
/// Retries; 7 would be infinite with some NICs.
pub(super) const RETRIES: u8 = 6;
/// How long a sender waits for a receive, in the code of the verbs: 0.64 ms. Credits prevent such
/// waits.
const NOT_READY_TIMER: u8 = 12;
const NOT_READY_RETRIES: u8 = 6;
const HOP_LIMIT: u8 = 64;
/// Bytes of a GID that name its InfiniBand subnet.
const PREFIX_BYTES: usize = 8;
/// Offset in a GID of a router's LID, two bytes: the packets' address on this subnet.
const FABRIC_LID_AT: usize = 4;

/// Queue lengths and limits of a pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueSizes {
    /// Queue pairs on each NIC.
    pub(super) queue_pairs: u32,
    /// Transfers under way whose ends are reported.
    pub(super) depth: u32,
    /// Signals that each end accepts before it returns credits.
    pub(super) credits: u32,
    /// Reads and atomics at once.
    pub(super) reads: u8,
    /// How switches treat the packets.
    pub(super) service: Service,
}

impl QueueSizes {
    /// Requests of a queue pair.
    pub(super) fn requests(self) -> u32 {
        GROUP_REQUESTS * self.depth + SPARE_REQUESTS
    }

    /// Receives that a peer can consume: its signals, and immediates that return credits. It
    /// returns credits when half are due, so two such immediates are under way at most; twice that
    /// number covers ends that are out of step.
    pub(super) fn receives(self) -> u32 {
        self.credits + 4
    }
}

/// The receiver of a report of a group's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CompletionOwner {
    NoOwner,
    /// The submitter of the transfer.
    Transfer(TransferId),
    /// The submitter, together with the other parts of a striped transfer.
    StripePart,
    /// The drains of the pair.
    DrainMark,
}

/// The requests of one transfer.
struct RequestGroup {
    requests: u32,
    owner: CompletionOwner,
    /// Kept until the group ends.
    _holds: Option<Slice>,
    /// The remote key.
    key: RegionKey,
    /// The opcode of the first request.
    opcode: u32,
    /// Its slot.
    slot: u32,
}

/// See the module.
pub(super) struct SendQueue {
    // Before the memory that it touches.
    queue_pair: QueuePair,
    /// A slot for each group under way: inline bytes of requests, old values of atomics.
    slots: MemoryRegion,
    /// The address of the first slot.
    slots_address: u64,
    /// The index of this rank's NIC.
    nic: usize,
    /// The index of the peer's NIC.
    remote_nic: usize,
    /// The peer's inbox, with its key on that NIC.
    inbox: Target,
    counts: Counts,
    sizes: QueueSizes,
    carries_inline: bool,
    first_packet: u32,
    sent: VecDeque<RequestGroup>,
    /// The number of `sent`'s first entry.
    first: u64,
    /// Requests that may still be posted.
    room: u32,
    unsignaled: u32,
    /// Requests that are not posted yet.
    list: WorkRequestList,
    /// The slot of the next group. There are more slots than groups under path.
    next_slot: u32,
}

impl SendQueue {
    /// A queue pair that is not connected yet.
    pub(super) fn new(nics: &[Nic], nic: usize, sizes: QueueSizes, random: u64) -> Result<Self, CreateError> {
        let base = &nics[nic];
        let memory: Arc<dyn Memory> = HostMemory::new(sizes.requests() as usize * GROUP_SLOT_BYTES);
        let address = memory.base().as_ptr() as u64;
        let slots = MemoryRegion::new(&base.domain, memory, address, sys::IBV_ACCESS_LOCAL_WRITE)?;
        let make = |inline: u32| {
            QueuePair::new(&base.domain, &base.completions, &base.receives, sizes.requests(), inline)
        };
        // Some NICs support no inline data.
        let (mut queue_pair, carries_inline) = match make(SLOT_BYTES as u32) {
            Ok(made) => (made, true),
            Err(limit @ CreateError::Limit(_)) => return Err(limit),
            Err(CreateError::System(_)) => (make(0)?, false),
        };
        // SAFETY: plain numbers, of which zero is one.
        let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = sys::IBV_QPS_INIT;
        attributes.port_num = base.chosen.port;
        attributes.qp_access_flags = sys::IBV_ACCESS_LOCAL_WRITE
            | sys::IBV_ACCESS_REMOTE_WRITE
            | sys::IBV_ACCESS_REMOTE_READ
            | sys::IBV_ACCESS_REMOTE_ATOMIC;
        let mask = sys::IBV_QP_STATE | sys::IBV_QP_PKEY_INDEX | sys::IBV_QP_PORT | sys::IBV_QP_ACCESS_FLAGS;
        queue_pair.modify(attributes, mask)?;
        Ok(Self {
            queue_pair,
            slots,
            slots_address: address,
            nic,
            remote_nic: 0,
            inbox: Target { address: 0, key: 0 },
            counts: Counts::default(),
            sizes,
            carries_inline,
            first_packet: random as u32 & 0x00ff_ffff,
            sent: VecDeque::with_capacity(sizes.requests() as usize),
            first: 0,
            room: sizes.requests(),
            unsignaled: 0,
            list: WorkRequestList::new(LIST_REQUESTS + GROUP_REQUESTS as usize),
            next_slot: 0,
        })
    }

    /// The number by which completions name it.
    pub(super) fn number(&self) -> u32 {
        self.queue_pair.number()
    }

    /// The index of this rank's NIC.
    #[inline]
    pub(super) fn nic(&self) -> usize {
        self.nic
    }

    /// Its requests to the NIC.
    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    /// The hello for the peer, whose payloads go to this rank's `inboxes`, one with each NIC.
    pub(super) fn hello(&self, nics: &[Nic], inboxes: &[MemoryRegion]) -> QueuePairHello {
        let base = &nics[self.nic];
        QueuePairHello {
            queue_pair: self.number(),
            packet: self.first_packet,
            gid: base.chosen.gid.address.octets(),
            kind: base.chosen.gid.kind,
            lid: base.port.lid,
            mtu: base.port.active_mtu as u8,
            nic: self.nic as u8,
            inbox_key: inboxes[self.nic].remote_key(),
        }
    }

    /// Connects it to the peer's `queue`: it receives and sends from now on.
    pub(super) fn connect(
        &mut self,
        nics: &[Nic],
        hello: &PairHello,
        queue: &QueuePairHello,
    ) -> io::Result<()> {
        let (to_receive, to_send) = (self.to_receive(nics, queue), self.to_send());
        self.connect_as(hello, queue, |state| {
            Ok(if state == sys::IBV_QPS_RTR { to_receive } else { to_send })
        })
    }

    /// The attributes of the peer's end, and their mask.
    fn to_receive(&self, nics: &[Nic], queue: &QueuePairHello) -> (sys::ibv_qp_attr, u32) {
        let base = &nics[self.nic];
        // SAFETY: plain numbers, of which zero is one.
        let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = sys::IBV_QPS_RTR;
        // The peer's is the same, see `connecting`.
        attributes.path_mtu = base.port.active_mtu;
        attributes.dest_qp_num = queue.queue_pair;
        attributes.rq_psn = queue.packet;
        attributes.ah_attr = path_to(&base.chosen, queue);
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN;
        (attributes, mask)
    }

    /// The attributes of its own packets, and their mask.
    fn to_send(&self) -> (sys::ibv_qp_attr, u32) {
        // SAFETY: plain numbers, of which zero is one.
        let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = sys::IBV_QPS_RTS;
        attributes.sq_psn = self.first_packet;
        (attributes, sys::IBV_QP_STATE | sys::IBV_QP_SQ_PSN)
    }

    /// As [`SendQueue::connect`], with path attributes from the caller. Retries and the number of
    /// reads at once are chosen here.
    pub(super) fn connect_as(
        &mut self,
        hello: &PairHello,
        queue: &QueuePairHello,
        attributes: impl Fn(sys::ibv_qp_state) -> io::Result<(sys::ibv_qp_attr, u32)>,
    ) -> io::Result<()> {
        let (mut to_receive, mask) = attributes(sys::IBV_QPS_RTR)?;
        set_service(&mut to_receive.ah_attr, self.sizes.service);
        to_receive.max_dest_rd_atomic = self.sizes.reads;
        to_receive.min_rnr_timer = NOT_READY_TIMER;
        let own = sys::IBV_QP_MAX_DEST_RD_ATOMIC | sys::IBV_QP_MIN_RNR_TIMER;
        self.queue_pair.modify(to_receive, mask | own)?;
        let (mut to_send, mask) = attributes(sys::IBV_QPS_RTS)?;
        to_send.timeout = RETRY_TIMEOUT;
        to_send.retry_cnt = RETRIES;
        to_send.rnr_retry = NOT_READY_RETRIES;
        to_send.max_rd_atomic = self.sizes.reads.min(hello.reads);
        let own = sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.queue_pair.modify(to_send, mask | own)?;
        self.remote_nic = usize::from(queue.nic);
        self.inbox = Target { address: hello.inbox_address, key: queue.inbox_key };
        Ok(())
    }

    /// Whether it takes one more transfer.
    pub(super) fn has_room(&self) -> bool {
        self.room >= GROUP_REQUESTS + SPARE_REQUESTS
    }

    /// Whether it takes a request that is not of a transfer.
    pub(super) fn has_spare_room(&self) -> bool {
        self.room > 0
    }

    /// The remote address and key of a slice for this queue pair, if known.
    #[inline]
    pub(super) fn target(&self, slice: &RemoteSlice, remote_regions: &RemoteRegions) -> Option<Target> {
        let first = Target::of(slice);
        match self.remote_nic {
            0 => Some(first),
            nic => remote_regions.get(&slice.key).map(|known| Target { key: known.keys[nic], ..first }),
        }
    }

    /// The bytes of a registered slice with these keys; their addresses are the same here and at
    /// peers.
    #[inline]
    pub(super) fn local(&self, slice: &Slice, keys: &NicKeys) -> Local<'static> {
        Local::RegisteredMemory {
            address: Target::of(&slice.remote()).address,
            length: slice.len() as u32,
            key: keys[self.nic],
        }
    }

    /// The target and the bytes of a request that moves none.
    pub(super) fn no_bytes(&self) -> (Target, Local<'static>) {
        (self.inbox, Local::Nothing)
    }

    /// The request that delivers a signal with its payload.
    #[inline]
    pub(super) fn signal_write<'a>(
        &self,
        signal: &'a Signal,
        immediate: Immediate,
    ) -> (WorkRequest, Local<'a>) {
        let address = self.inbox.address + u64::from(signal.signal_slot) * SLOT_BYTES as u64;
        let write = with_immediate(Target { address, key: self.inbox.key }, immediate);
        let local = if signal.payload.is_empty() { Local::Nothing } else { Local::Inline(&signal.payload) };
        (write, local)
    }

    /// Adds an atomic on an aligned word to the list; its old value comes with its completion.
    pub(super) fn push_atomic(&mut self, id: TransferId, key: RegionKey, target: Target, op: AtomicOp) {
        let (opcode, compare_add, swap) = match op {
            AtomicOp::Add(value) => (sys::IBV_WR_ATOMIC_FETCH_AND_ADD, value, 0),
            AtomicOp::CompareSwap { expected, new } => (sys::IBV_WR_ATOMIC_CMP_AND_SWP, expected, new),
        };
        let list =
            sys::ibv_sge { addr: self.address_of(self.next_slot), length: 8, lkey: self.slots.local_key() };
        self.list.add(self.next_number(), &request(opcode, target), 0, list).wr.atomic =
            sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
                remote_addr: target.address,
                compare_add,
                swap,
                rkey: target.key,
            };
        self.pushed(CompletionOwner::Transfer(id), None, key, opcode, 1);
    }

    /// Adds the binding of a memory window to the list; returns its number. The window must stay
    /// until the binding has ended.
    pub(super) fn push_bind(
        &mut self,
        id: TransferId,
        key: RegionKey,
        bind: sys::ibv_send_wr__bindgen_ty_4__bindgen_ty_1,
    ) -> u64 {
        let (number, binding) =
            (self.next_number(), request(sys::IBV_WR_BIND_MW, Target { address: 0, key: 0 }));
        let place = self.list.add(number, &binding, 0, NO_BYTES);
        place.__bindgen_anon_2.bind_mw = bind;
        self.pushed(CompletionOwner::Transfer(id), None, key, binding.opcode, 1);
        number
    }

    /// Whether the group of this number has ended with success.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        number < self.first
    }

    /// Adds a group of one or two requests to the list. The group names `key` at the peer and holds
    /// a slice here. There must be room.
    pub(super) fn push<const N: usize>(
        &mut self,
        owner: CompletionOwner,
        holds: Option<Slice>,
        key: RegionKey,
        requests: &[(WorkRequest, Local<'_>); N],
    ) {
        const { assert!(N > 0 && N as u32 <= GROUP_REQUESTS) };
        let number = self.next_number();
        for (index, (request, local)) in requests.iter().enumerate() {
            let (list, flags) = match *local {
                Local::Nothing => (NO_BYTES, 0),
                Local::RegisteredMemory { address, length, key } => {
                    (sys::ibv_sge { addr: address, length, lkey: key }, 0)
                }
                Local::Inline(inline) => self.carry(inline, index),
            };
            self.list.add(number, request, flags, list);
        }
        self.pushed(owner, holds, key, requests[0].0.opcode, N as u32);
    }

    /// Records a group of `requests` requests that was linked.
    #[inline(always)]
    fn pushed(
        &mut self,
        owner: CompletionOwner,
        holds: Option<Slice>,
        key: RegionKey,
        opcode: u32,
        requests: u32,
    ) {
        self.room -= requests;
        self.unsignaled += requests;
        if owner != CompletionOwner::NoOwner || self.unsignaled >= SIGNAL_EVERY {
            self.signal_last();
        }
        let slot = self.next_slot;
        self.next_slot = if slot + 1 < self.sizes.requests() { slot + 1 } else { 0 };
        self.sent.push_back(RequestGroup { requests, owner, _holds: holds, key, opcode, slot });
    }

    /// Copies the inline bytes of a request of the next group to their slot; returns their address
    /// and the request's flags.
    #[inline]
    fn carry(&mut self, inline: &Inline, index: usize) -> (sys::ibv_sge, u32) {
        let address = self.address_of(self.next_slot) + (index * SLOT_BYTES) as u64;
        let words = inline.words();
        // SAFETY: the slot of a group that does not exist yet, with room for the inline bytes of a
        // request; the NIC reads it only after the request was posted.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), address as *mut u64, words.len()) };
        let flags = if self.carries_inline { sys::IBV_SEND_INLINE } else { 0 };
        self.counts.inlined += u64::from(self.carries_inline);
        (sys::ibv_sge { addr: address, length: inline.len() as u32, lkey: self.slots.local_key() }, flags)
    }

    fn next_number(&self) -> u64 {
        self.first + self.sent.len() as u64
    }

    fn address_of(&self, slot: u32) -> u64 {
        self.slots_address + u64::from(slot) * GROUP_SLOT_BYTES as u64
    }

    /// Makes the last request of the list ask for a completion.
    fn signal_last(&mut self) {
        self.list.signal_last();
        self.unsignaled = 0;
    }

    /// Whether to post the list before the next poll of the device.
    pub(super) fn is_due(&self) -> bool {
        self.list.len() >= LIST_REQUESTS || self.list.bytes() >= LIST_BYTES
    }

    /// Whether all requests were posted.
    pub(super) fn has_posted_all(&self) -> bool {
        self.list.is_empty()
    }

    /// Posts the list. Requests for which the NIC has no room stay in it.
    #[inline]
    pub(super) fn post(&mut self) -> Result<(), LossCause> {
        if self.list.is_empty() {
            return Ok(());
        }
        // SAFETY: the list names memory that `sent` holds or slots of this queue pair, which are
        // dropped after the queue pair.
        let posted = unsafe { self.list.post(&mut self.queue_pair) };
        self.counts.doorbells += 1;
        self.counts.requests += posted.requests as u64;
        self.counts.signaled += u64::from(posted.is_signaled);
        match posted.error {
            None => Ok(()),
            // There will be room when requests under way have ended.
            Some(error) if error.kind() == io::ErrorKind::OutOfMemory && self.is_under_way() => Ok(()),
            Some(error) => Err(LossCause::ConnectionBroke(error.kind())),
        }
    }

    /// Whether requests wait to be posted while others are under path.
    fn is_under_way(&self) -> bool {
        let not_ended: u32 = self.sent.iter().map(|sent| sent.requests).sum();
        !self.list.is_empty() && not_ended as usize > self.list.len()
    }

    /// Removes the first group, if it is not after the one of this number, which ended with
    /// success. Returns the receiver of its report, and the old value of an atomic.
    pub(super) fn pop_completed(&mut self, number: u64) -> Option<(CompletionOwner, u64)> {
        if self.first > number {
            return None;
        }
        let sent = self.sent.pop_front()?;
        let is_atomic =
            matches!(sent.opcode, sys::IBV_WR_ATOMIC_CMP_AND_SWP | sys::IBV_WR_ATOMIC_FETCH_AND_ADD);
        let old_value = if is_atomic { self.old_value(self.address_of(sent.slot)) } else { 0 };
        self.first += 1;
        self.room += sent.requests;
        Some((sent.owner, old_value))
    }

    fn old_value(&self, slot: u64) -> u64 {
        let mut bytes = [0; 8];
        // SAFETY: an own slot, which the NIC has written and does not access any more.
        unsafe { std::ptr::copy_nonoverlapping(slot as *const u8, bytes.as_mut_ptr(), bytes.len()) };
        u64::from_ne_bytes(bytes)
    }

    /// Makes sure that all submitted requests will be completed.
    pub(super) fn request_completion(&mut self) {
        if self.unsignaled > 0 && self.has_spare_room() {
            self.push_empty_write();
        }
    }

    /// Adds a write of no bytes, with a completion, to the list. There must be room.
    pub(super) fn push_empty_write(&mut self) {
        let nothing = request(sys::IBV_WR_RDMA_WRITE, self.inbox);
        self.push(CompletionOwner::NoOwner, None, RegionKey::NONE, &[(nothing, Local::Nothing)]);
        self.signal_last();
    }

    /// Adds an immediate alone to the list. There must be room.
    pub(super) fn push_immediate(&mut self, immediate: Immediate) {
        let write = with_immediate(self.inbox, immediate);
        self.push(CompletionOwner::NoOwner, None, RegionKey::NONE, &[(write, Local::Nothing)]);
    }

    /// Adds the mark of a drain to the list. It waits for reads and atomics before it to end
    /// (`IBV_SEND_FENCE`), and follows writes in any case. There must be room.
    pub(crate) fn push_drain_mark(&mut self) {
        let piggyback = Piggyback::DrainMark;
        let immediate = Immediate { signal_slot: None, has_payload: false, piggyback };
        let mut mark = with_immediate(self.inbox, immediate);
        mark.flags |= sys::IBV_SEND_FENCE;
        self.push(CompletionOwner::DrainMark, None, RegionKey::NONE, &[(mark, Local::Nothing)]);
    }

    /// Whether the peer has acknowledged all requests.
    pub(super) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }

    /// The operation of the request of this number, if it has not ended.
    pub(super) fn operation(&self, number: u64) -> Operation {
        self.place(number).map_or(Operation::Other, |place| Operation::of(self.sent[place].opcode))
    }

    /// Marks the request of this number as failed because of its remote key. Returns the receiver
    /// of its report, and the key; nobody gets a second report.
    pub(super) fn refuse(&mut self, number: u64) -> Option<(CompletionOwner, RegionKey)> {
        let place = self.place(number)?;
        let sent = &mut self.sent[place];
        Some((std::mem::replace(&mut sent.owner, CompletionOwner::NoOwner), sent.key))
    }

    /// The index of the group of this number.
    fn place(&self, number: u64) -> Option<usize> {
        let place = usize::try_from(number.checked_sub(self.first)?).ok()?;
        (place < self.sent.len()).then_some(place)
    }

    /// Destroys the queue pair; returns the transfers that have not ended.
    pub(super) fn fail(self) -> impl Iterator<Item = TransferId> {
        let Self { queue_pair, sent, .. } = self;
        // Before the memory that it accesses.
        drop(queue_pair);
        sent.into_iter().filter_map(|sent| match sent.owner {
            CompletionOwner::Transfer(id) => Some(id),
            CompletionOwner::NoOwner | CompletionOwner::StripePart | CompletionOwner::DrainMark => None,
        })
    }
}

/// The path from a port to the peer's end of a queue pair.
fn path_to(own: &ChosenPort, queue: &QueuePairHello) -> sys::ibv_ah_attr {
    // SAFETY: plain numbers, of which zero is one.
    let mut path: sys::ibv_ah_attr = unsafe { std::mem::zeroed() };
    path.port_num = own.port;
    path.dlid = queue.lid;
    let is_infiniband = own.gid.kind == GidType::InfiniBand;
    if is_infiniband && own.gid.address.octets()[..PREFIX_BYTES] == queue.gid[..PREFIX_BYTES] {
        return path;
    }
    // RoCE, or another subnet: routers use the global header.
    path.is_global = 1;
    path.grh.dgid = sys::ibv_gid { raw: queue.gid };
    path.grh.sgid_index = own.gid.index as u8;
    path.grh.hop_limit = HOP_LIMIT;
    let router = u16::from_be_bytes([queue.gid[FABRIC_LID_AT], queue.gid[FABRIC_LID_AT + 1]]);
    if is_infiniband && router != 0 {
        path.dlid = router;
    }
    path
}

/// Sets the service level and traffic class that are configured.
fn set_service(path: &mut sys::ibv_ah_attr, service: Service) {
    if let Some(level) = service.service_level {
        path.sl = level;
    }
    if let Some(class) = service.traffic_class {
        path.grh.traffic_class = class;
    }
}

/// The remote address and key of a request.
#[derive(Clone, Copy)]
pub(super) struct Target {
    pub(super) address: u64,
    pub(super) key: u32,
}

impl Target {
    pub(super) fn of(slice: &RemoteSlice) -> Self {
        let parts = KeyParts::decode(slice.key.0);
        // Beyond the region, or wrapped around: the NIC refuses both.
        Self { address: parts.address().wrapping_add(slice.offset), key: parts.remote_key }
    }
}

/// The local bytes of a request.
#[derive(Clone, Copy)]
pub(super) enum Local<'a> {
    Nothing,
    RegisteredMemory { address: u64, length: u32, key: u32 },
    Inline(&'a Inline),
}

/// An operation on a peer's memory.
#[derive(Clone, Copy)]
pub(super) struct WorkRequest {
    opcode: u32,
    flags: u32,
    /// In network order; for an opcode with an immediate.
    immediate: u32,
    target: Target,
}

/// A request without a completion.
#[inline]
pub(super) fn request(opcode: u32, target: Target) -> WorkRequest {
    WorkRequest { opcode, flags: 0, immediate: 0, target }
}

#[inline]
pub(super) fn with_immediate(target: Target, immediate: Immediate) -> WorkRequest {
    // Any completion wakes the completion queue; the flag is for NICs that need it.
    WorkRequest {
        opcode: sys::IBV_WR_RDMA_WRITE_WITH_IMM,
        flags: sys::IBV_SEND_SOLICITED,
        immediate: immediate.encode().to_be(),
        target,
    }
}

/// Linked work requests, posted with one doorbell.
///
/// The requests of a list are elements of one array. Each is linked to the next one and to its own
/// entry of bytes for good. So a request is written where the driver reads it, and only the fields
/// of its opcode are written. Posting cuts the array behind the last request while the call lasts.
/// A field of an earlier use is read only if the opcode has it, and then it was written anew.
///
/// **Invariant:** except while the list is posted, every element leads to the next one and to its
/// entry of bytes.
struct WorkRequestList {
    elements: Vec<sys::ibv_send_wr>,
    /// The local bytes of each request.
    lists: Vec<sys::ibv_sge>,
    /// The number of requests; the elements behind them are free.
    len: usize,
    /// The bytes that the requests move.
    bytes: usize,
    /// Which of them asks for a completion: one is enough.
    signaled: Option<usize>,
}

/// The result of posting a list.
struct Posted {
    requests: usize,
    /// One of them asks for a completion.
    is_signaled: bool,
    /// The error, if not all was posted.
    error: Option<io::Error>,
}

// SAFETY: the pointers in `elements` lead into this value's own vectors.
unsafe impl Send for WorkRequestList {}

/// Of a request that names none here.
const NO_BYTES: sys::ibv_sge = sys::ibv_sge { addr: 0, length: 0, lkey: 0 };

impl WorkRequestList {
    /// An empty list with room for `places` requests.
    fn new(places: usize) -> Self {
        let mut list = Self { elements: Vec::new(), lists: Vec::new(), len: 0, bytes: 0, signaled: None };
        list.grow(places.max(1));
        list
    }

    fn len(&self) -> usize {
        self.len
    }

    fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes that its requests move.
    fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds a request for these local bytes; returns the element, for fields that only its opcode
    /// has.
    #[inline]
    fn add(
        &mut self,
        number: u64,
        request: &WorkRequest,
        flags: u32,
        list: sys::ibv_sge,
    ) -> &mut sys::ibv_send_wr {
        if self.len == self.elements.len() {
            self.grow(2 * self.len);
        }
        let index = self.len;
        self.len += 1;
        self.bytes += list.length as usize;
        self.lists[index] = list;
        let place = &mut self.elements[index];
        place.wr_id = number;
        place.num_sge = i32::from(list.length > 0);
        place.opcode = request.opcode;
        place.send_flags = request.flags | flags;
        place.__bindgen_anon_1.imm_data = request.immediate;
        place.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: request.target.address,
            rkey: request.target.key,
        };
        place
    }

    /// Makes the last request ask for a completion, which covers all before it.
    #[inline]
    fn signal_last(&mut self) {
        let Some(last) = self.len.checked_sub(1) else { return };
        if let Some(before) = self.signaled {
            self.elements[before].send_flags &= !sys::IBV_SEND_SIGNALED;
        }
        self.elements[last].send_flags |= sys::IBV_SEND_SIGNALED;
        self.signaled = Some(last);
    }

    /// Posts the list with one doorbell. Requests that the NIC does not take stay.
    ///
    /// # Safety
    ///
    /// The list is not empty. The local memory of its requests is registered with the queue pair's
    /// protection domain, and stays until their completion came or the queue pair was dropped.
    /// pair's domain and stays until their completion came, or the queue pair was dropped.
    #[inline]
    unsafe fn post(&mut self, queue_pair: &mut QueuePair) -> Posted {
        let base = self.elements.as_mut_ptr();
        let last = self.len - 1;
        let next = std::mem::replace(&mut self.elements[last].next, ptr::null_mut());
        // SAFETY: the caller's; the array and its entries do not move meanwhile.
        let posted = unsafe { queue_pair.post(base) };
        self.elements[last].next = next;
        match posted {
            Ok(()) => {
                let requests = std::mem::take(&mut self.len);
                self.bytes = 0;
                Posted { requests, is_signaled: self.signaled.take().is_some(), error: None }
            }
            Err((error, refused)) => {
                let taken = (refused as usize).saturating_sub(base as usize) / size_of::<sys::ibv_send_wr>();
                self.keep_from(taken.min(self.len), error)
            }
        }
    }

    /// Keeps the requests from `taken` on.
    #[cold]
    fn keep_from(&mut self, taken: usize, error: io::Error) -> Posted {
        let is_signaled = self.signaled.is_some_and(|index| index < taken);
        self.signaled = self.signaled.and_then(|index| index.checked_sub(taken));
        self.elements.copy_within(taken..self.len, 0);
        self.lists.copy_within(taken..self.len, 0);
        self.len -= taken;
        self.bytes = self.lists[..self.len].iter().map(|list| list.length as usize).sum();
        self.link();
        Posted { requests: taken, is_signaled, error: Some(error) }
    }

    /// Grows the array.
    #[cold]
    fn grow(&mut self, places: usize) {
        // SAFETY: numbers and pointers, of which zero is one.
        let nothing: sys::ibv_send_wr = unsafe { std::mem::zeroed() };
        self.elements.resize(places, nothing);
        self.lists.resize(places, NO_BYTES);
        self.link();
    }

    fn link(&mut self) {
        let (base, lists, count) = (self.elements.as_mut_ptr(), self.lists.as_mut_ptr(), self.elements.len());
        for (index, place) in self.elements.iter_mut().enumerate() {
            place.sg_list = lists.wrapping_add(index);
            place.next = if index + 1 < count { base.wrapping_add(index + 1) } else { ptr::null_mut() };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::super::port::Gid;
    use super::*;

    fn chosen(address: &str, kind: GidType) -> ChosenPort {
        let address: Ipv6Addr = address.parse().expect("an address");
        let gid = Gid { index: 3, address, kind, interface: None };
        ChosenPort { device: "mlx5_0".to_owned(), port: 1, gid, reason: String::new() }
    }

    fn peer(address: &str, kind: GidType) -> QueuePairHello {
        let gid = address.parse::<Ipv6Addr>().expect("an address").octets();
        QueuePairHello { queue_pair: 7, packet: 0, gid, kind, lid: 21, mtu: 5, nic: 0, inbox_key: 0 }
    }

    #[test]
    fn packets_have_a_global_header_over_roce_and_between_subnets() {
        let own = chosen("fe80::1", GidType::InfiniBand);
        let near = path_to(&own, &peer("fe80::2", GidType::InfiniBand));
        assert_eq!((near.is_global, near.dlid, near.port_num), (0, 21, 1));
        let far = path_to(&own, &peer("fec0:0:0:5::2", GidType::InfiniBand));
        assert_eq!((far.is_global, far.dlid, far.grh.sgid_index, far.grh.hop_limit), (1, 21, 3, HOP_LIMIT));
        // SAFETY: both forms of the address are plain bytes.
        assert_eq!(unsafe { far.grh.dgid.raw }, peer("fec0:0:0:5::2", GidType::InfiniBand).gid);
        let routed = path_to(&own, &peer("fec0:0:4a:5::2", GidType::InfiniBand));
        assert_eq!((routed.is_global, routed.dlid), (1, 0x4a), "the router's address is in the prefix");
        let roce = chosen("::ffff:10.0.0.1", GidType::RoceV2Ipv4);
        let roce = path_to(&roce, &peer("::ffff:10.0.0.2", GidType::RoceV2Ipv4));
        assert_eq!((roce.is_global, roce.dlid), (1, 21));
    }

    #[test]
    fn switches_are_told_the_wished_service_and_else_what_was_there() {
        let mut path = path_to(
            &chosen("::ffff:10.0.0.1", GidType::RoceV2Ipv4),
            &peer("::ffff:10.0.0.2", GidType::RoceV2Ipv4),
        );
        assert_eq!((path.sl, path.grh.traffic_class), (0, 0));
        set_service(&mut path, Service { traffic_class: Some(106), service_level: Some(3) });
        set_service(&mut path, Service::default());
        assert_eq!((path.sl, path.grh.traffic_class), (3, 106));
    }
}

#[cfg(test)]
mod work_requests_tests {
    use super::*;

    /// Adds a write of `length` bytes.
    fn add(list: &mut WorkRequestList, number: u64, length: u32) {
        let write = request(sys::IBV_WR_RDMA_WRITE, Target { address: number, key: 7 });
        list.add(number, &write, 0, sys::ibv_sge { addr: number, length, lkey: 0 });
    }

    /// A list whose request `n` moves `n` bytes.
    fn list_of(count: u64) -> WorkRequestList {
        let mut list = WorkRequestList::new(2);
        (0..count).for_each(|number| add(&mut list, number, number as u32));
        list
    }

    /// Numbers of the requests as a driver reads them, each with the first byte of its entry.
    fn followed(list: &WorkRequestList) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        let mut place = list.elements.as_ptr();
        for _ in 0..list.len() {
            // SAFETY: links of the row lead into it and into the lists, and this ends before the
            // row does.
            unsafe {
                found.push(((*place).wr_id, (*(*place).sg_list).addr));
                place = (*place).next;
            }
        }
        found
    }

    #[test]
    fn a_list_that_grows_is_linked_throughout() {
        let list = list_of(9);
        assert_eq!(followed(&list), (0..9).map(|number| (number, number)).collect::<Vec<_>>());
        assert_eq!((list.len(), list.bytes()), (9, 36));
    }

    #[test]
    fn what_was_not_taken_stays_linked_with_its_signal() {
        for (taken, was_signaled) in [(0, false), (4, false), (6, true), (9, true)] {
            let mut list = list_of(6);
            list.signal_last();
            (6..9).for_each(|number| add(&mut list, number, 1));
            let bytes = list.bytes();
            let posted = list.keep_from(taken, io::ErrorKind::OutOfMemory.into());
            assert_eq!((posted.requests, posted.is_signaled), (taken, was_signaled));
            let rest: Vec<_> = (taken as u64..9).map(|number| (number, number)).collect();
            assert_eq!(followed(&list), rest);
            let gone: u64 = (0..taken as u64).map(|number| if number < 6 { number } else { 1 }).sum();
            assert_eq!(list.bytes(), bytes - gone as usize);
            list.signal_last();
            let signaled = |place: &sys::ibv_send_wr| place.send_flags & sys::IBV_SEND_SIGNALED != 0;
            assert_eq!(
                list.elements[..list.len()].iter().filter(|place| signaled(place)).count(),
                rest.len().min(1)
            );
        }
    }
}
