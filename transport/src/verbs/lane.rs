//! A queue pair of a peer, and what is under way on it.
//!
//! Requests complete in order; one that nobody waits for asks for no completion, but every [`SIGNAL_EVERY`]th does, so that
//! room comes back.
//!
//! **Invariant:** what the NIC may still touch (source, destination, own slots) is held by an entry of `sent`, which goes
//! only with its completion or with the queue pair.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::objects::{Completions, Domain, MemoryRegion, QueuePair, Receives};
use super::port::{Chosen, Kind};
use super::request::{Local, Target, request};
use super::sys;
use super::wire::Hello;
use crate::Rank;
use crate::cells::{CELL_PAYLOAD_BYTES, Inline};
use crate::device::{Event, LossCause, SubmitError, TransferError, TransferId};
use crate::memory::{HostMemory, Memory};
use crate::region::{RegionKey, Slice};

/// Requests that nobody waits for between two that ask for a completion.
const SIGNAL_EVERY: u32 = 32;

/// Requests kept free for credits and for the end.
const SPARE_REQUESTS: u32 = 8;

/// Requests of one group at most.
const GROUP_REQUESTS: u32 = 2;

/// Bytes of a cell's place in the inbox, and of a request's own place.
pub(super) const SLOT_BYTES: usize = 64;
/// Bytes of a group's own slot.
const GROUP_SLOT_BYTES: usize = GROUP_REQUESTS as usize * SLOT_BYTES;
const _: () = assert!(CELL_PAYLOAD_BYTES <= SLOT_BYTES);

/// A lost packet is sent again after 4.096 us times two to this power, 0.54 s: a host under load answers later than one would
/// think, and who has died is found out by the control stream.
const RETRY_TIMEOUT: u8 = 17;
/// So often; 7 would be for ever with some NICs.
const RETRIES: u8 = 6;
/// How long a sender waits for a receive, as the verbs number it: 0.64 ms. Credits see to it that none does.
const NOT_READY_TIMER: u8 = 12;
const NOT_READY_RETRIES: u8 = 6;
const HOP_LIMIT: u8 = 64;

/// How much of everything a pair has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Transfers under way.
    pub(super) depth: u32,
    /// Notices that each end takes ahead.
    pub(super) credits: u32,
    /// Reads and atomics at once.
    pub(super) reads: u8,
}

impl Sizes {
    /// Requests of a queue pair.
    pub(super) fn requests(self) -> u32 {
        GROUP_REQUESTS * self.depth + SPARE_REQUESTS
    }

    /// Receives that a peer can use up: its notices, and what it gives credits back with. It has given back those of all
    /// that came but the last half, so two such are under way at most; twice that for ends that are out of step.
    pub(super) fn receives(self) -> u32 {
        self.credits + 4
    }
}

/// What a pair is made on.
pub(super) struct Base<'a> {
    pub(super) domain: &'a Arc<Domain>,
    pub(super) completions: &'a Completions,
    pub(super) receives: &'a Receives,
    pub(super) chosen: &'a Chosen,
    pub(super) port: &'a sys::ibv_port_attr,
}

/// One group of requests: those of a transfer.
pub(super) struct Sent {
    requests: u32,
    /// Who waits for its end.
    waits: Option<TransferId>,
    /// Kept until then.
    _holds: Option<Slice>,
    /// What it names at the peer.
    key: RegionKey,
    /// Whether its slot gets an old value.
    is_atomic: bool,
    /// Which slot it uses.
    slot: usize,
}

/// See the module.
pub(super) struct Lane {
    peer: Rank,
    // Before the memory that it touches.
    queue_pair: QueuePair,
    /// A slot for each group under way: bytes that do not fit a request, old values of atomics.
    slots: MemoryRegion,
    sizes: Sizes,
    carries_inline: bool,
    first_packet: u32,
    sent: VecDeque<Sent>,
    /// The number of `sent`'s first entry.
    first: u64,
    /// Requests that may be posted.
    room: u32,
    unsignaled: u32,
    /// Groups whose end somebody waits for.
    waiting: u32,
}

impl Lane {
    /// One that can be told where its peer is.
    pub(super) fn new(base: &Base<'_>, peer: Rank, sizes: Sizes, random: u64) -> io::Result<Self> {
        let bytes = sizes.requests() as usize * GROUP_SLOT_BYTES;
        let slots = registered(base, bytes, sys::IBV_ACCESS_LOCAL_WRITE)?;
        let make = |inline: u32| {
            QueuePair::new(base.domain, base.completions, base.receives, sizes.requests(), inline)
        };
        // Some NICs carry nothing in a request.
        let (mut queue_pair, carries_inline) = match make(SLOT_BYTES as u32) {
            Ok(made) => (made, true),
            Err(_) => (make(0)?, false),
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
            peer,
            queue_pair,
            slots,
            sizes,
            carries_inline,
            first_packet: random as u32 & 0x00ff_ffff,
            sent: VecDeque::with_capacity(sizes.requests() as usize),
            first: 0,
            room: sizes.requests(),
            unsignaled: 0,
            waiting: 0,
        })
    }

    /// By what completions name it.
    pub(super) fn number(&self) -> u32 {
        self.queue_pair.number()
    }

    /// The number of its first packet.
    pub(super) fn first_packet(&self) -> u32 {
        self.first_packet
    }

    /// Joins it to the peer's that was described so: it receives and sends from now on.
    pub(super) fn connect(&mut self, base: &Base<'_>, hello: &Hello) -> io::Result<()> {
        // SAFETY: plain numbers, of which zero is one.
        let mut attributes: sys::ibv_qp_attr = unsafe { std::mem::zeroed() };
        attributes.qp_state = sys::IBV_QPS_RTR;
        // The longest packet that both ports carry.
        attributes.path_mtu = base.port.active_mtu.min(u32::from(hello.mtu));
        attributes.dest_qp_num = hello.queue_pair;
        attributes.rq_psn = hello.packet;
        attributes.max_dest_rd_atomic = self.sizes.reads;
        attributes.min_rnr_timer = NOT_READY_TIMER;
        attributes.ah_attr.port_num = base.chosen.port;
        attributes.ah_attr.dlid = hello.lid;
        if base.chosen.gid.kind != Kind::InfiniBand {
            attributes.ah_attr.is_global = 1;
            attributes.ah_attr.grh.dgid = sys::ibv_gid { raw: hello.gid };
            attributes.ah_attr.grh.sgid_index = base.chosen.gid.index as u8;
            attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
        }
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_AV
            | sys::IBV_QP_PATH_MTU
            | sys::IBV_QP_DEST_QPN
            | sys::IBV_QP_RQ_PSN
            | sys::IBV_QP_MAX_DEST_RD_ATOMIC
            | sys::IBV_QP_MIN_RNR_TIMER;
        self.queue_pair.modify(attributes, mask)?;
        attributes.qp_state = sys::IBV_QPS_RTS;
        attributes.sq_psn = self.first_packet;
        attributes.timeout = RETRY_TIMEOUT;
        attributes.retry_cnt = RETRIES;
        attributes.rnr_retry = NOT_READY_RETRIES;
        attributes.max_rd_atomic = self.sizes.reads.min(hello.reads);
        let mask = sys::IBV_QP_STATE
            | sys::IBV_QP_SQ_PSN
            | sys::IBV_QP_TIMEOUT
            | sys::IBV_QP_RETRY_CNT
            | sys::IBV_QP_RNR_RETRY
            | sys::IBV_QP_MAX_QP_RD_ATOMIC;
        self.queue_pair.modify(attributes, mask)
    }

    /// Whether it takes one more transfer.
    pub(super) fn has_room(&self) -> bool {
        self.room >= GROUP_REQUESTS + SPARE_REQUESTS && self.waiting < self.sizes.depth
    }

    /// Whether it takes a request beside transfers.
    pub(super) fn has_spare_room(&self) -> bool {
        self.room > 0
    }

    /// The next group to post, of a transfer that names `key` at the peer. `waits`: who waits for its end.
    pub(super) fn group(&self, waits: Option<TransferId>, holds: Option<Slice>, key: RegionKey) -> Sent {
        let slots = self.slots.memory().len() / GROUP_SLOT_BYTES;
        let slot = (self.next_number() % slots as u64) as usize;
        Sent { requests: 0, waits, _holds: holds, key, is_atomic: false, slot }
    }

    /// As [`Lane::group`], of an atomic; and where its old value goes.
    pub(super) fn atomic_group(&self, id: TransferId, key: RegionKey) -> (Sent, Local) {
        let sent = Sent { is_atomic: true, ..self.group(Some(id), None, key) };
        let address = self.slot_address(sent.slot);
        (sent, Local::Registered { address, length: 8, key: self.slots.local_key() })
    }

    fn next_number(&self) -> u64 {
        self.first + self.sent.len() as u64
    }

    fn slot_address(&self, slot: usize) -> u64 {
        self.slots.memory().base().as_ptr() as u64 + (slot * GROUP_SLOT_BYTES) as u64
    }

    /// Posts a group of one or two requests by one ring of the NIC's doorbell.
    pub(super) fn post(
        &mut self,
        mut sent: Sent,
        requests: &mut [(sys::ibv_send_wr, Local)],
    ) -> Result<(), SubmitError> {
        let count = requests.len() as u32;
        let number = self.next_number();
        let is_signaled = sent.waits.is_some() || self.unsignaled + count >= SIGNAL_EVERY;
        let mut lists = [sys::ibv_sge { addr: 0, length: 0, lkey: 0 }; GROUP_REQUESTS as usize];
        let mut carried = [Inline::EMPTY; GROUP_REQUESTS as usize];
        let mut next: *mut sys::ibv_send_wr = std::ptr::null_mut();
        // From the last one on, as each names the next.
        for (index, (request, local)) in requests.iter_mut().enumerate().rev() {
            let list = &mut lists[index];
            match *local {
                Local::Nothing => {}
                Local::Registered { address, length, key } => {
                    *list = sys::ibv_sge { addr: address, length, lkey: key };
                }
                Local::Carried(inline) => {
                    carried[index] = inline;
                    let bytes = carried[index].as_bytes();
                    list.length = bytes.len() as u32;
                    list.addr = bytes.as_ptr() as u64;
                    if self.carries_inline {
                        request.send_flags |= sys::IBV_SEND_INLINE;
                    } else {
                        let slot = self.slot_address(sent.slot) + (index * SLOT_BYTES) as u64;
                        // SAFETY: a slot of this group alone, which the NIC reads only after the post below.
                        unsafe {
                            std::ptr::copy_nonoverlapping(bytes.as_ptr(), slot as *mut u8, bytes.len())
                        };
                        list.addr = slot;
                        list.lkey = self.slots.local_key();
                    }
                }
            }
            if list.length > 0 {
                request.sg_list = list;
                request.num_sge = 1;
            }
            request.wr_id = number;
            request.next = next;
            next = request;
        }
        if is_signaled && let Some((last, _)) = requests.last_mut() {
            last.send_flags |= sys::IBV_SEND_SIGNALED;
        }
        // SAFETY: the chain and its lists are on this stack frame. What they name is held by `sent` or is this lane's own
        // slots, which go after the queue pair.
        match unsafe { self.queue_pair.post(next) } {
            Ok(()) => {}
            // The NIC is full: what is under way makes room.
            Err(error) if error.kind() == io::ErrorKind::OutOfMemory && !self.sent.is_empty() => {
                return Err(SubmitError::QueueFull { peer: self.peer });
            }
            Err(error) => {
                let cause = LossCause::ConnectionBroke(error.kind());
                return Err(SubmitError::Lost { peer: self.peer, cause });
            }
        }
        sent.requests = count;
        self.waiting += u32::from(sent.waits.is_some());
        self.room -= count;
        self.unsignaled = if is_signaled { 0 } else { self.unsignaled + count };
        self.sent.push_back(sent);
        Ok(())
    }

    /// The request of this number and all before it have ended well.
    pub(super) fn completed(&mut self, number: u64, events: &mut VecDeque<Event>) {
        while self.first <= number
            && let Some(sent) = self.sent.pop_front()
        {
            self.first += 1;
            self.room += sent.requests;
            let Some(id) = sent.waits else { continue };
            self.waiting -= 1;
            let value = if sent.is_atomic { self.old_value(sent.slot) } else { 0 };
            events.push_back(Event::Done { id, result: Ok(value) });
        }
    }

    fn old_value(&self, slot: usize) -> u64 {
        let mut bytes = [0; 8];
        // SAFETY: a slot of our own, which the NIC has written and does not touch any more.
        unsafe {
            let address = self.slot_address(slot) as *const u8;
            std::ptr::copy_nonoverlapping(address, bytes.as_mut_ptr(), bytes.len());
        }
        u64::from_ne_bytes(bytes)
    }

    /// Sees to it that the end of what was posted will be known. `target`: memory of the peer.
    pub(super) fn seal(&mut self, target: Target) {
        if self.unsignaled == 0 || !self.has_spare_room() {
            return;
        }
        let nothing = request(sys::IBV_WR_RDMA_WRITE, target);
        self.unsignaled = SIGNAL_EVERY;
        let sent = self.group(None, None, RegionKey::NONE);
        // Where the NIC does not take it there are completions to come.
        let _ = self.post(sent, &mut [(nothing, Local::Nothing)]);
    }

    /// Whether the peer has all that was posted.
    pub(super) fn is_idle(&self) -> bool {
        self.sent.is_empty()
    }

    /// The request of this number failed because of what it names at the peer.
    pub(super) fn refuse(&mut self, number: u64, events: &mut VecDeque<Event>) {
        let Some(index) = number.checked_sub(self.first) else { return };
        let peer = self.peer;
        if let Some(sent) = self.sent.get_mut(index as usize)
            && let Some(id) = sent.waits.take()
        {
            events.push_back(Event::Done { id, result: Err(TransferError::Refused { peer, key: sent.key }) });
        }
    }

    /// Ends all that is under way; the queue pair goes.
    pub(super) fn fail(self, error: &TransferError, events: &mut VecDeque<Event>) {
        let Self { queue_pair, sent, .. } = self;
        // Before anything that it touches.
        drop(queue_pair);
        for id in sent.iter().filter_map(|sent| sent.waits) {
            events.push_back(Event::Done { id, result: Err(error.clone()) });
        }
    }
}

/// Memory of this rank alone, registered for this.
pub(super) fn registered(base: &Base<'_>, bytes: usize, access: u32) -> io::Result<MemoryRegion> {
    let memory: Arc<dyn Memory> = HostMemory::new(bytes.max(SLOT_BYTES));
    let address = memory.base().as_ptr() as u64;
    MemoryRegion::new(base.domain, memory, address, access)
}
