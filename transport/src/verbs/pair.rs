//! One connected peer: a queue pair, what is under way on it, and what each end may still send.
//!
//! * **A put** is an RDMA write; its notice is the immediate of that write, or of a second one on the same queue pair that
//!   carries the payload to the cell's place in the target's inbox. A queue pair places writes in their order before it
//!   completes the receive of an immediate, so whoever takes that completion has all of it (contract line 1).
//! * **Credits.** A notice consumes a receive of its target. Each end says in the hello how many notices it takes, and gives
//!   back what it took with its own immediates, or with one of their own when half of them wait. So a notice always finds
//!   a receive, and who has no credit left hears `QueueFull` instead of the NIC's retries.
//! * **Completions.** Requests complete in order; one that nobody waits for asks for none, but every [`SIGNAL_EVERY`]th does,
//!   so that room comes back.
//!
//! **Invariant:** what the NIC may still touch (source, destination, own slots) is held by an entry of `sent`, which goes
//! only with its completion or with the queue pair.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::objects::{Completions, Domain, MemoryRegion, QueuePair, Receives};
use super::port::{Chosen, Kind};
use super::request::{Local, Target, registered, request, with_immediate};
use super::sys;
use super::wire::{CREDITS_MAX, Hello, Immediate};
use crate::Rank;
use crate::cells::{CELL_PAYLOAD_BYTES, Cells, Inline, Notice};
use crate::device::{
    AtomicOp, Event, LossCause, ProtocolViolation, Source, SubmitError, Submitted, Transfer, TransferError,
    TransferId,
};
use crate::memory::{HostMemory, Memory};
use crate::region::{RegionKey, Slice};

/// Requests that nobody waits for between two that ask for a completion.
const SIGNAL_EVERY: u32 = 32;

/// Requests kept free for credits and for the end.
const SPARE_REQUESTS: u32 = 8;

/// Bytes of a cell's place in the inbox, and of a request's own place.
const SLOT_BYTES: usize = 64;
/// Bytes of a group's own slot: it has at most two requests.
const GROUP_SLOT_BYTES: usize = 2 * SLOT_BYTES;
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
    /// Requests of a queue pair: a transfer has at most two.
    pub(super) fn requests(self) -> u32 {
        2 * self.depth + SPARE_REQUESTS
    }

    /// Receives that a peer can use up: its notices, and what it gives credits back with. It has given back those of all
    /// that came but the last half, so two such are under way at most; twice that for ends that are out of step.
    pub(super) fn receives(self) -> u32 {
        self.credits + 4
    }
}

/// One group of requests: those of a transfer.
struct Sent {
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
pub(super) struct Pair {
    peer: Rank,
    // Before the memory that it touches.
    queue_pair: QueuePair,
    /// Where the peer's payloads go, a slot for each cell.
    inbox: MemoryRegion,
    /// A slot for each group under way: bytes that do not fit a request, old values of atomics.
    slots: MemoryRegion,
    cells: Cells,
    sizes: Sizes,
    carries_inline: bool,
    first_packet: u32,
    remote: Option<Hello>,
    sent: VecDeque<Sent>,
    /// The number of `sent`'s first entry.
    first: u64,
    /// Requests that may be posted.
    room: u32,
    unsignaled: u32,
    /// Groups whose end somebody waits for.
    waiting: u32,
    /// Notices that the peer takes.
    credits: u32,
    /// Notices of the peer that it has not been told of as taken.
    owed: u32,
}

/// What a pair is made on.
pub(super) struct Base<'a> {
    pub(super) domain: &'a Arc<Domain>,
    pub(super) completions: &'a Completions,
    pub(super) receives: &'a Receives,
    pub(super) chosen: &'a Chosen,
    pub(super) port: &'a sys::ibv_port_attr,
}

impl Pair {
    /// One that can be told where its peer is.
    pub(super) fn new(
        base: &Base<'_>,
        peer: Rank,
        cells: Cells,
        sizes: Sizes,
        random: u64,
    ) -> io::Result<Self> {
        let register = |bytes: usize, access: u32| {
            let memory: Arc<dyn Memory> = HostMemory::new(bytes.max(SLOT_BYTES));
            let address = memory.base().as_ptr() as u64;
            MemoryRegion::new(base.domain, memory, address, access)
        };
        let inbox =
            register(cells.len() * SLOT_BYTES, sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE)?;
        let slots = register(sizes.requests() as usize * GROUP_SLOT_BYTES, sys::IBV_ACCESS_LOCAL_WRITE)?;
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
            inbox,
            slots,
            cells,
            sizes,
            carries_inline,
            first_packet: random as u32 & 0x00ff_ffff,
            remote: None,
            sent: VecDeque::with_capacity(sizes.requests() as usize),
            first: 0,
            room: sizes.requests(),
            unsignaled: 0,
            waiting: 0,
            credits: 0,
            owed: 0,
        })
    }

    /// By what completions name it.
    pub(super) fn number(&self) -> u32 {
        self.queue_pair.number()
    }

    /// What the peer must know.
    pub(super) fn hello(&self, base: &Base<'_>) -> Hello {
        Hello {
            queue_pair: self.queue_pair.number(),
            packet: self.first_packet,
            gid: base.chosen.gid.address.octets(),
            lid: base.port.lid,
            mtu: base.port.active_mtu as u8,
            reads: self.sizes.reads,
            credits: self.sizes.credits,
            inbox_key: self.inbox.remote_key(),
            inbox_address: self.inbox.memory().base().as_ptr() as u64,
            cells: self.cells.len() as u32,
        }
    }

    /// Joins it to the peer that said this: it receives and sends from now on.
    pub(super) fn connect(&mut self, base: &Base<'_>, hello: Hello) -> io::Result<()> {
        // SAFETY: as above.
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
        self.queue_pair.modify(attributes, mask)?;
        self.credits = hello.credits;
        self.remote = Some(hello);
        Ok(())
    }

    /// Starts a transfer whose lengths and local slice were checked. `local_key`: of its slice.
    pub(super) fn submit(
        &mut self,
        transfer: Transfer,
        id: TransferId,
        local_key: u32,
        events: &mut VecDeque<Event>,
    ) -> Result<Submitted, SubmitError> {
        let full = SubmitError::QueueFull { peer: self.peer };
        let Some(remote) = self.remote else { return Err(SubmitError::NotConnected { peer: self.peer }) };
        if let Transfer::Notify(notice) | Transfer::Put { notice: Some(notice), .. } = &transfer {
            if u32::from(notice.cell) >= remote.cells {
                return Err(SubmitError::NoSuchCell { cell: notice.cell, cells: remote.cells as usize });
            }
            if self.credits == 0 {
                return Err(full);
            }
        }
        if self.room < 2 + SPARE_REQUESTS || self.waiting >= self.sizes.depth {
            return Err(full);
        }
        match transfer {
            Transfer::Notify(notice) => self.notify(&notice, None),
            Transfer::Put { src, dst, notice } => {
                let target = Target::of(&dst);
                let (local, holds) = match src {
                    _ if dst.len == 0 => (Local::Nothing, None),
                    Source::Inline(inline) => (Local::Carried(inline), None),
                    Source::Slice(slice) => (registered(&slice, local_key), Some(slice)),
                };
                let waits = holds.is_some().then_some(id);
                let sent = self.group(waits, holds, dst.key);
                match (local, notice) {
                    (Local::Nothing, None) => {}
                    (Local::Nothing, Some(notice)) => self.notify(&notice, None)?,
                    (local, None) => {
                        let write = request(sys::IBV_WR_RDMA_WRITE, target);
                        self.post(sent, &mut [(write, local)])?;
                    }
                    (local, Some(notice)) if notice.payload.is_empty() => {
                        let immediate = self.immediate(notice.cell, false);
                        let write = with_immediate(target, immediate);
                        self.post(sent, &mut [(write, local)])?;
                        self.charge(immediate);
                    }
                    (local, Some(notice)) => {
                        let write = request(sys::IBV_WR_RDMA_WRITE, target);
                        self.notify(&notice, Some((sent, write, local)))?;
                    }
                }
                return Ok(if waits.is_some() { Submitted::UnderWay } else { Submitted::Ended(0) });
            }
            Transfer::Get { src, dst } => {
                if dst.is_empty() {
                    return Ok(Submitted::Ended(0));
                }
                let local = registered(&dst, local_key);
                let sent = self.group(Some(id), Some(dst), src.key);
                let read = request(sys::IBV_WR_RDMA_READ, Target::of(&src));
                self.post(sent, &mut [(read, local)])?;
                return Ok(Submitted::UnderWay);
            }
            Transfer::Atomic { word, op } => {
                let Target { address, key } = Target::of(&word);
                if !address.is_multiple_of(8) {
                    // No region begins there: a forged key, which this NIC would not even send.
                    let refused = TransferError::Refused { peer: self.peer, key: word.key };
                    events.push_back(Event::Done { id, result: Err(refused) });
                    return Ok(Submitted::UnderWay);
                }
                let (opcode, compare_add, swap) = match op {
                    AtomicOp::Add(value) => (sys::IBV_WR_ATOMIC_FETCH_AND_ADD, value, 0),
                    AtomicOp::CompareSwap { expected, new } => {
                        (sys::IBV_WR_ATOMIC_CMP_AND_SWP, expected, new)
                    }
                };
                let mut atomic = request(opcode, Target { address, key });
                atomic.wr.atomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
                    remote_addr: address,
                    compare_add,
                    swap,
                    rkey: key,
                };
                let mut sent = self.group(Some(id), None, word.key);
                sent.is_atomic = true;
                let slot = self.slot_address(sent.slot);
                let local = Local::Registered { address: slot, length: 8, key: self.slots.local_key() };
                self.post(sent, &mut [(atomic, local)])?;
                return Ok(Submitted::UnderWay);
            }
        }?;
        Ok(Submitted::Ended(0))
    }

    /// Sends a notice, perhaps behind a write in the same chain.
    fn notify(
        &mut self,
        notice: &Notice,
        behind: Option<(Sent, sys::ibv_send_wr, Local)>,
    ) -> Result<(), SubmitError> {
        let Some(remote) = self.remote else { return Err(SubmitError::NotConnected { peer: self.peer }) };
        let immediate = self.immediate(notice.cell, !notice.payload.is_empty());
        let address = remote.inbox_address + u64::from(notice.cell) * SLOT_BYTES as u64;
        let write = with_immediate(Target { address, key: remote.inbox_key }, immediate);
        let local = if notice.payload.is_empty() { Local::Nothing } else { Local::Carried(notice.payload) };
        match behind {
            Some((sent, first, bytes)) => self.post(sent, &mut [(first, bytes), (write, local)])?,
            None => {
                let sent = self.group(None, None, RegionKey::NONE);
                self.post(sent, &mut [(write, local)])?;
            }
        }
        self.charge(immediate);
        Ok(())
    }

    fn immediate(&self, cell: u16, has_payload: bool) -> Immediate {
        Immediate { cell: Some(cell), has_payload, credits: self.owed.min(CREDITS_MAX) }
    }

    /// A notice was posted.
    fn charge(&mut self, immediate: Immediate) {
        self.owed -= immediate.credits;
        if immediate.cell.is_some() {
            self.credits -= 1;
        }
    }

    fn group(&self, waits: Option<TransferId>, holds: Option<Slice>, key: RegionKey) -> Sent {
        let slots = self.slots.memory().len() / GROUP_SLOT_BYTES;
        let slot = ((self.first + self.sent.len() as u64) % slots as u64) as usize;
        Sent { requests: 0, waits, _holds: holds, key, is_atomic: false, slot }
    }

    fn slot_address(&self, slot: usize) -> u64 {
        self.slots.memory().base().as_ptr() as u64 + (slot * GROUP_SLOT_BYTES) as u64
    }

    /// Posts a group of one or two requests by one ring of the NIC's doorbell.
    fn post(
        &mut self,
        mut sent: Sent,
        requests: &mut [(sys::ibv_send_wr, Local)],
    ) -> Result<(), SubmitError> {
        let count = requests.len() as u32;
        let number = self.first + self.sent.len() as u64;
        let is_signaled = sent.waits.is_some() || self.unsignaled + count >= SIGNAL_EVERY;
        let mut lists = [sys::ibv_sge { addr: 0, length: 0, lkey: 0 }; 2];
        let mut carried = [Inline::EMPTY; 2];
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
        // SAFETY: the chain and its lists are on this stack frame. What they name is held by `sent` or is this pair's own
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

    /// A notice has come, with a write of so many bytes.
    pub(super) fn received(&mut self, immediate: u32, bytes: u32) -> Result<(), ProtocolViolation> {
        let said = Immediate::decode(immediate).ok_or(ProtocolViolation::MalformedFrame)?;
        let most = self.remote.map_or(0, |remote| remote.credits);
        if said.credits > most - self.credits.min(most) {
            return Err(ProtocolViolation::UnexpectedAnswer);
        }
        self.credits += said.credits;
        let Some(cell) = said.cell else { return Ok(()) };
        if usize::from(cell) >= self.cells.len() {
            return Err(ProtocolViolation::UnknownCell);
        }
        self.owed += 1;
        let mut payload = Inline::EMPTY;
        if said.has_payload {
            let len = bytes as usize;
            if len > CELL_PAYLOAD_BYTES {
                return Err(ProtocolViolation::OversizedFrame);
            }
            let mut buffer = [0; CELL_PAYLOAD_BYTES];
            // SAFETY: the cell's slot of the inbox, which has room for any payload; the peer writes it again only after
            // it knows that this notice was taken (or breaks the rules, and then these are just bytes).
            unsafe {
                let slot = self.inbox.memory().base().as_ptr().add(usize::from(cell) * SLOT_BYTES);
                std::ptr::copy_nonoverlapping(slot, buffer.as_mut_ptr(), len);
            }
            payload = Inline::new(&buffer[..len]).unwrap_or(Inline::EMPTY);
        }
        self.cells.notify(&Notice { cell, payload });
        Ok(())
    }

    /// Gives back what the peer would otherwise soon wait for.
    pub(super) fn give_back(&mut self) {
        if self.owed < self.sizes.credits.div_ceil(2) || self.room == 0 {
            return;
        }
        let Some(remote) = self.remote else { return };
        let immediate = Immediate { cell: None, has_payload: false, credits: self.owed.min(CREDITS_MAX) };
        let write =
            with_immediate(Target { address: remote.inbox_address, key: remote.inbox_key }, immediate);
        let sent = self.group(None, None, RegionKey::NONE);
        if self.post(sent, &mut [(write, Local::Nothing)]).is_ok() {
            self.charge(immediate);
        }
    }

    /// Sees to it that the end of what was posted will be known.
    pub(super) fn seal(&mut self) {
        if self.unsignaled == 0 || self.room == 0 {
            return;
        }
        let Some(remote) = self.remote else { return };
        let nothing =
            request(sys::IBV_WR_RDMA_WRITE, Target { address: remote.inbox_address, key: remote.inbox_key });
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

/// What a status of a completion says about the peer.
pub(super) fn loss(status: u32) -> LossCause {
    LossCause::QueuePair(super::status::WorkStatus::of(status))
}
