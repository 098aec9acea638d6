//! One connected peer: a queue pair ([`lane`](super::lane)), and what each end may still send.
//!
//! * **A put** is an RDMA write; its notice is the immediate of that write, or of a second one on the same queue pair that
//!   carries the payload to the cell's place in the target's inbox. A queue pair places writes in their order before it
//!   completes the receive of an immediate, so whoever takes that completion has all of it (contract line 1).
//! * **Credits.** A notice consumes a receive of its target. Each end says in the hello how many notices it takes, and gives
//!   back what it took with its own immediates, or with one of their own when half of them wait. So a notice always finds
//!   a receive, and who has no credit left hears `QueueFull` instead of the NIC's retries.

use std::collections::VecDeque;
use std::io;

use super::lane::{Base, Lane, SLOT_BYTES, Sizes, registered};
use super::objects::MemoryRegion;
use super::request::{Local, Target, of_slice, request, with_immediate};
use super::sys;
use super::wire::{CREDITS_MAX, Hello, Immediate};
use crate::Rank;
use crate::cells::{CELL_PAYLOAD_BYTES, Cells, Inline, Notice};
use crate::device::{
    AtomicOp, Event, ProtocolViolation, Source, SubmitError, Submitted, Transfer, TransferError, TransferId,
};
use crate::region::{RegionKey, RemoteSlice, Slice};

/// See the module.
pub(super) struct Pair {
    peer: Rank,
    // Before the memory that it touches.
    lane: Lane,
    /// Where the peer's payloads go, a slot for each cell.
    inbox: MemoryRegion,
    cells: Cells,
    sizes: Sizes,
    remote: Option<Hello>,
    /// Notices that the peer takes.
    credits: u32,
    /// Notices of the peer that it has not been told of as taken.
    owed: u32,
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
        let access = sys::IBV_ACCESS_LOCAL_WRITE | sys::IBV_ACCESS_REMOTE_WRITE;
        let inbox = registered(base, cells.len() * SLOT_BYTES, access)?;
        let lane = Lane::new(base, peer, sizes, random)?;
        Ok(Self { peer, lane, inbox, cells, sizes, remote: None, credits: 0, owed: 0 })
    }

    /// By what completions name it.
    pub(super) fn number(&self) -> u32 {
        self.lane.number()
    }

    /// What the peer must know.
    pub(super) fn hello(&self, base: &Base<'_>) -> Hello {
        Hello {
            queue_pair: self.lane.number(),
            packet: self.lane.first_packet(),
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
        self.lane.connect(base, &hello)?;
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
        let Some(remote) = self.remote else { return Err(SubmitError::NotConnected { peer: self.peer }) };
        if let Transfer::Notify(notice) | Transfer::Put { notice: Some(notice), .. } = &transfer {
            if u32::from(notice.cell) >= remote.cells {
                return Err(SubmitError::NoSuchCell { cell: notice.cell, cells: remote.cells as usize });
            }
            if self.credits == 0 {
                return Err(SubmitError::QueueFull { peer: self.peer });
            }
        }
        if !self.lane.has_room() {
            return Err(SubmitError::QueueFull { peer: self.peer });
        }
        match transfer {
            Transfer::Notify(notice) => self.notify(&remote, &notice),
            Transfer::Put { src, dst, notice } => {
                self.put(&remote, &src, &dst, notice.as_ref(), id, local_key)
            }
            Transfer::Get { src, dst } => self.get(&src, dst, id, local_key),
            Transfer::Atomic { word, op } => self.atomic(&word, op, id, events),
        }
    }

    fn notify(&mut self, remote: &Hello, notice: &Notice) -> Result<Submitted, SubmitError> {
        let immediate = self.immediate(notice);
        let sent = self.lane.group(None, None, RegionKey::NONE);
        self.lane.post(sent, &mut [shown(remote, notice, immediate)])?;
        self.charge(immediate);
        Ok(Submitted::Ended(0))
    }

    fn put(
        &mut self,
        remote: &Hello,
        src: &Source,
        dst: &RemoteSlice,
        notice: Option<&Notice>,
        id: TransferId,
        local_key: u32,
    ) -> Result<Submitted, SubmitError> {
        let (local, holds) = match src {
            _ if dst.len == 0 => {
                return notice.map_or(Ok(Submitted::Ended(0)), |notice| self.notify(remote, notice));
            }
            Source::Inline(inline) => (Local::Carried(*inline), None),
            Source::Slice(slice) => (of_slice(slice, local_key), Some(slice.clone())),
        };
        let submitted = if holds.is_some() { Submitted::UnderWay } else { Submitted::Ended(0) };
        let sent = self.lane.group(holds.is_some().then_some(id), holds, dst.key);
        let target = Target::of(dst);
        let Some(notice) = notice else {
            self.lane.post(sent, &mut [(request(sys::IBV_WR_RDMA_WRITE, target), local)])?;
            return Ok(submitted);
        };
        let immediate = self.immediate(notice);
        if notice.payload.is_empty() {
            self.lane.post(sent, &mut [(with_immediate(target, immediate), local)])?;
        } else {
            let write = (request(sys::IBV_WR_RDMA_WRITE, target), local);
            self.lane.post(sent, &mut [write, shown(remote, notice, immediate)])?;
        }
        self.charge(immediate);
        Ok(submitted)
    }

    fn get(
        &mut self,
        src: &RemoteSlice,
        dst: Slice,
        id: TransferId,
        local_key: u32,
    ) -> Result<Submitted, SubmitError> {
        if dst.is_empty() {
            return Ok(Submitted::Ended(0));
        }
        let local = of_slice(&dst, local_key);
        let sent = self.lane.group(Some(id), Some(dst), src.key);
        self.lane.post(sent, &mut [(request(sys::IBV_WR_RDMA_READ, Target::of(src)), local)])?;
        Ok(Submitted::UnderWay)
    }

    fn atomic(
        &mut self,
        word: &RemoteSlice,
        op: AtomicOp,
        id: TransferId,
        events: &mut VecDeque<Event>,
    ) -> Result<Submitted, SubmitError> {
        let target = Target::of(word);
        if !target.address.is_multiple_of(8) {
            // No region begins there: a forged key, which this NIC would not even send.
            let refused = TransferError::Refused { peer: self.peer, key: word.key };
            events.push_back(Event::Done { id, result: Err(refused) });
            return Ok(Submitted::UnderWay);
        }
        let (opcode, compare_add, swap) = match op {
            AtomicOp::Add(value) => (sys::IBV_WR_ATOMIC_FETCH_AND_ADD, value, 0),
            AtomicOp::CompareSwap { expected, new } => (sys::IBV_WR_ATOMIC_CMP_AND_SWP, expected, new),
        };
        let mut atomic = request(opcode, target);
        atomic.wr.atomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
            remote_addr: target.address,
            compare_add,
            swap,
            rkey: target.key,
        };
        let (sent, old_value) = self.lane.atomic_group(id, word.key);
        self.lane.post(sent, &mut [(atomic, old_value)])?;
        Ok(Submitted::UnderWay)
    }

    fn immediate(&self, notice: &Notice) -> Immediate {
        Immediate {
            cell: Some(notice.cell),
            has_payload: !notice.payload.is_empty(),
            credits: self.owed.min(CREDITS_MAX),
        }
    }

    /// A notice was posted.
    fn charge(&mut self, immediate: Immediate) {
        self.owed -= immediate.credits;
        if immediate.cell.is_some() {
            self.credits -= 1;
        }
    }

    /// The requests up to this one have ended well.
    pub(super) fn completed(&mut self, number: u64, events: &mut VecDeque<Event>) {
        self.lane.completed(number, events);
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
        let payload = if said.has_payload { self.payload(cell, bytes)? } else { Inline::EMPTY };
        self.cells.notify(&Notice { cell, payload });
        Ok(())
    }

    /// What the peer has written to a cell's place in the inbox.
    fn payload(&self, cell: u16, bytes: u32) -> Result<Inline, ProtocolViolation> {
        let mut buffer = [0; CELL_PAYLOAD_BYTES];
        let buffer = buffer.get_mut(..bytes as usize).ok_or(ProtocolViolation::OversizedFrame)?;
        // SAFETY: the cell's slot of the inbox, which has room for any payload; the peer writes it again only after it
        // knows that this notice was taken (or breaks the rules, and then these are just bytes).
        unsafe {
            let slot = self.inbox.memory().base().as_ptr().add(usize::from(cell) * SLOT_BYTES);
            std::ptr::copy_nonoverlapping(slot, buffer.as_mut_ptr(), buffer.len());
        }
        Ok(Inline::new(buffer).unwrap_or(Inline::EMPTY))
    }

    /// Gives back what the peer would otherwise soon wait for.
    pub(super) fn give_back(&mut self) {
        if self.owed < self.sizes.credits.div_ceil(2) || !self.lane.has_spare_room() {
            return;
        }
        let Some(remote) = self.remote else { return };
        let immediate = Immediate { cell: None, has_payload: false, credits: self.owed.min(CREDITS_MAX) };
        let write = with_immediate(inbox(&remote), immediate);
        let sent = self.lane.group(None, None, RegionKey::NONE);
        if self.lane.post(sent, &mut [(write, Local::Nothing)]).is_ok() {
            self.charge(immediate);
        }
    }

    /// Sees to it that the end of what was posted will be known.
    pub(super) fn seal(&mut self) {
        if let Some(remote) = &self.remote {
            self.lane.seal(inbox(remote));
        }
    }

    /// Whether the peer has all that was posted.
    pub(super) fn is_idle(&self) -> bool {
        self.lane.is_idle()
    }

    /// The request of this number failed because of what it names at the peer.
    pub(super) fn refuse(&mut self, number: u64, events: &mut VecDeque<Event>) {
        self.lane.refuse(number, events);
    }

    /// Ends all that is under way; the queue pair goes.
    pub(super) fn fail(self, error: &TransferError, events: &mut VecDeque<Event>) {
        self.lane.fail(error, events);
    }
}

/// The beginning of the peer's inbox.
fn inbox(remote: &Hello) -> Target {
    Target { address: remote.inbox_address, key: remote.inbox_key }
}

/// The request that shows a notice, with its payload, to the peer.
fn shown(remote: &Hello, notice: &Notice, immediate: Immediate) -> (sys::ibv_send_wr, Local) {
    let address = remote.inbox_address + u64::from(notice.cell) * SLOT_BYTES as u64;
    let write = with_immediate(Target { address, key: remote.inbox_key }, immediate);
    let local = if notice.payload.is_empty() { Local::Nothing } else { Local::Carried(notice.payload) };
    (write, local)
}
