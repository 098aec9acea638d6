//! Transfers under way.
//!
//! A put: `Depart` (its bytes enter the wire), the flow drains, `Arrive` (the remaining bytes land,
//! then its signal is raised). `Complete` comes when the flow has drained, or some time after the
//! arrival, as it always does with `Options::signals_before_ends`; bytes that have not landed by
//! then are copied out of the source at this last moment. With tearing, pieces land before. A get:
//! the request travels, `Depart` at the peer, the flow drains, `Arrive` and `Complete` here. An
//! atomic is carried out at `Depart`.

use std::ops::Range;
use std::time::Duration;

use super::{LinkScheduler, SimEvent, State};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{AtomicOp, Event, Incarnation, Source, Transfer, TransferError, TransferId};
use crate::region::{RegionKey, RemoteSlice, Slice};
use crate::signals::Signal;
use crate::sim::flows::FlowId;
use crate::sim::observer::{AccessKind, Actor, Record, TransferNumber};
use crate::sim::world::Mutant;

/// By this time a mutant delays the bytes after their signal, or the read of a source after `Done`.
const MUTANT_LATENESS: Duration = Duration::from_micros(20);

/// By this time a mutant delays a signal or a repetition of a put from before a drain.
const DRAIN_MUTANT_LATENESS: Duration = Duration::from_micros(200);

enum TransferBody {
    /// A signal without data has neither source nor destination.
    Put {
        source: Option<Source>,
        destination: Option<RemoteSlice>,
        signal: Option<Signal>,
    },
    Get {
        source: RemoteSlice,
        destination: Slice,
    },
    Atomic {
        word: RemoteSlice,
        op: AtomicOp,
    },
}

pub(super) struct ActiveTransfer {
    submitter: Rank,
    /// The device that submitted it.
    incarnation: Option<Incarnation>,
    /// That device has died.
    is_orphaned: bool,
    peer: Rank,
    id: TransferId,
    body: TransferBody,
    /// Drains of its submitter before it.
    drains_before: u64,
    /// The ranges that have not landed yet.
    pieces: Vec<Range<usize>>,
    landed_bytes: u64,
    /// A copy of the source, taken at `Done`.
    snapshot: Option<Vec<u8>>,
    flow: Option<FlowId>,
    drained: bool,
    arrived: bool,
    outcome: Result<u64, TransferError>,
    /// For a mutant: the signal that is submitted when this transfer is `Done`.
    next_signal: Option<Signal>,
    /// Its `Done` can be polled, or is not needed.
    reported: bool,
    /// No further byte of the transfer will land.
    over: bool,
}

impl ActiveTransfer {
    pub(super) fn new(submitter: Rank, peer: Rank, id: TransferId, transfer: Transfer) -> Self {
        let body = match transfer {
            Transfer::Put { src, dst, signal } => {
                TransferBody::Put { source: Some(src), destination: Some(dst), signal }
            }
            Transfer::Get { src, dst } => TransferBody::Get { source: src, destination: dst },
            Transfer::Atomic { word, op } => TransferBody::Atomic { word, op },
        };
        Self::of(submitter, peer, id, body, false)
    }

    /// A signal without data. `reported`: its submitter knows already that it has ended.
    pub(super) fn of_signal(
        submitter: Rank,
        peer: Rank,
        id: TransferId,
        signal: Signal,
        reported: bool,
    ) -> Self {
        let body = TransferBody::Put { source: None, destination: None, signal: Some(signal) };
        Self::of(submitter, peer, id, body, reported)
    }

    fn of(submitter: Rank, peer: Rank, id: TransferId, body: TransferBody, reported: bool) -> Self {
        Self {
            submitter,
            incarnation: None,
            is_orphaned: false,
            peer,
            id,
            body,
            drains_before: 0,
            pieces: Vec::new(),
            landed_bytes: 0,
            snapshot: None,
            flow: None,
            drained: false,
            arrived: false,
            outcome: Ok(0),
            next_signal: None,
            reported,
            over: false,
        }
    }

    /// Whether the device that has this rank submitted it.
    pub(super) fn is_of(&self, rank: Rank) -> bool {
        self.submitter == rank && !self.is_orphaned
    }

    /// Whether the device that has this rank submitted it to the peer.
    pub(super) fn is_of_pair(&self, rank: Rank, peer: Rank) -> bool {
        self.is_of(rank) && self.peer == peer
    }

    /// As [`ActiveTransfer::is_of_pair`], before the drain after `drains`.
    pub(super) fn is_before_drain(&self, rank: Rank, peer: Rank, drains: u64) -> bool {
        self.is_of_pair(rank, peer) && self.drains_before <= drains
    }

    fn len(&self) -> usize {
        match &self.body {
            TransferBody::Put { source, .. } => source.as_ref().map_or(0, Source::len),
            TransferBody::Get { destination, .. } => destination.len(),
            TransferBody::Atomic { .. } => 0,
        }
    }

    /// The rank that sends the bytes.
    pub(super) fn sender(&self) -> Rank {
        if matches!(self.body, TransferBody::Put { .. }) { self.submitter } else { self.peer }
    }

    /// The rank that gets the bytes.
    pub(super) fn receiver(&self) -> Rank {
        if matches!(self.body, TransferBody::Put { .. }) { self.peer } else { self.submitter }
    }

    /// Whether bytes, a request or an answer of the transfer go from `from` to `to`.
    pub(super) fn uses_wire(&self, from: Rank, to: Rank) -> bool {
        let there = self.submitter == from && self.peer == to;
        let back = self.peer == from && self.submitter == to;
        there || (back && !matches!(self.body, TransferBody::Put { .. }))
    }

    /// The peer's memory that the transfer names.
    fn remote(&self) -> Option<&RemoteSlice> {
        match &self.body {
            TransferBody::Put { destination, .. } => destination.as_ref(),
            TransferBody::Get { source, .. } => Some(source),
            TransferBody::Atomic { word, .. } => Some(word),
        }
    }

    /// How the transfer accesses that memory.
    fn remote_access(&self) -> AccessKind {
        match &self.body {
            TransferBody::Put { .. } => AccessKind::Write,
            TransferBody::Get { .. } => AccessKind::Read,
            TransferBody::Atomic { .. } => AccessKind::Atomic,
        }
    }

    fn is_flushed(&self) -> bool {
        self.over && self.reported
    }

    /// Copies all bytes of the source that may still be read, so that the source may be reused.
    fn release_source(&mut self, moves_bytes: bool) {
        if let TransferBody::Put { source, .. } = &mut self.body {
            if moves_bytes && !self.over && !self.pieces.is_empty() && self.snapshot.is_none() {
                self.snapshot = match source {
                    Some(Source::Slice(slice)) => Some(slice.to_vec()),
                    _ => None,
                };
            }
            if matches!(source, Some(Source::Slice(_))) {
                *source = None;
            }
        }
    }
}

impl State {
    /// Starts a transfer that was checked.
    pub(super) fn start_transfer(&mut self, mut active: ActiveTransfer) {
        if self.mutant == Some(Mutant::SignalAfterDone)
            && let TransferBody::Put { source: Some(_), signal, .. } = &mut active.body
        {
            active.next_signal = signal.take();
        }
        let number = TransferNumber(self.submitted);
        self.submitted += 1;
        let (rank, peer) = (active.submitter, active.peer);
        active.incarnation = self.ranks[rank as usize].incarnation;
        active.drains_before = self.transfer_starts(rank, peer, !active.reported);
        let kind = match &active.body {
            TransferBody::Put { .. } => 0,
            TransferBody::Get { .. } => 1,
            TransferBody::Atomic { .. } => 2,
        };
        let reported = u64::from(active.reported);
        self.event(
            "submit",
            &[number.0, u64::from(rank), u64::from(peer), kind, active.len() as u64, reported],
        );
        self.note(|| Record::Submitted { rank, peer, transfer: number });
        let request = match active.body {
            TransferBody::Put { .. } => Duration::ZERO,
            _ => self.network.latency(rank, peer),
        };
        self.transfers.insert(number, active);
        let wait = request + self.random_delay();
        self.after(wait, SimEvent::Depart(number));
    }

    pub(super) fn depart(&mut self, number: TransferNumber) {
        let Some(active) = self.transfers.find(&number) else { return };
        let (sender, receiver, peer) = (active.sender(), active.receiver(), active.peer);
        let (over, submitter) = (active.over, active.submitter);
        let (remote, kind) = (active.remote().copied(), active.remote_access());
        if over || self.drop_if_cut(number) {
            return;
        }
        self.event("depart", &[number.0]);
        if let Some(remote) = remote
            && self.ranks[peer as usize].table.find(&remote, submitter, kind).is_none()
        {
            return self.refuse(number, remote.key);
        }
        if self
            .transfers
            .find(&number)
            .is_some_and(|active| matches!(active.body, TransferBody::Atomic { .. }))
        {
            return self.carry_out_atomic(number);
        }
        if self.mutant == Some(Mutant::SignalsSwapped) {
            self.swap_signal(number);
        }
        let pieces = self.cut_into_pieces(number);
        let Some(active) = self.transfers.find_mut(&number) else { return };
        let bytes = active.len() as u64;
        let early = pieces.len().saturating_sub(1);
        active.pieces = pieces;
        let flow = self.scheduler.start(self.now, sender, receiver, bytes);
        active.flow = Some(flow);
        self.flow_of.insert(flow, number);
        // Links in order show no progress of a transfer before its end.
        let LinkScheduler::Fair(flows) = &self.scheduler else { return };
        let first = self.now + self.network.latency(sender, receiver);
        let last = flows.ends_at(flow).unwrap_or(self.now) + self.network.latency(sender, receiver);
        for _ in 0..early {
            let at = Nanos(self.delays.between(first.0, last.0));
            self.at(at, SimEvent::Piece(number));
        }
    }

    /// Random cuts, in random order.
    fn cut_into_pieces(&mut self, number: TransferNumber) -> Vec<Range<usize>> {
        let len = self.transfers.find(&number).map_or(0, ActiveTransfer::len);
        if len == 0 {
            return Vec::new();
        }
        let count = self.choices.between(1, u64::from(self.faults.pieces.max(1)));
        let mut cuts: Vec<usize> = (1..count).map(|_| self.choices.index(len + 1)).collect();
        cuts.extend([0, len]);
        cuts.sort_unstable();
        cuts.dedup();
        let mut pieces: Vec<_> = cuts.windows(2).map(|ends| ends[0]..ends[1]).collect();
        self.choices.shuffle(&mut pieces);
        pieces
    }

    /// Handles the entry of a transfer's last byte into the wire.
    pub(super) fn drained(&mut self, flow: FlowId) {
        let is_known = match &mut self.scheduler {
            LinkScheduler::Fair(flows) => {
                flows.stop(self.now, flow);
                self.flow_of.remove(&flow)
            }
            LinkScheduler::InOrder(_) => self.flow_of.find(&flow).copied(),
        };
        let Some(number) = is_known else { return };
        let Some(active) = self.transfers.find_mut(&number) else { return };
        active.drained = true;
        let is_put = matches!(active.body, TransferBody::Put { .. });
        let ends = (active.sender(), active.receiver());
        if matches!(self.scheduler, LinkScheduler::Fair(_)) {
            active.flow = None;
        }
        self.event("drained", &[number.0]);
        if matches!(self.scheduler, LinkScheduler::Fair(_)) {
            let wait = self.network.latency(ends.0, ends.1) + self.random_delay();
            self.after(wait, SimEvent::Arrive(number));
        }
        // Without reordering, a source is free when it has been sent. With reordering, it may also
        // become free after the arrival.
        let may_end = is_put && !self.signals_before_ends;
        if may_end && (self.faults.reorder.is_zero() || self.choices.coin()) {
            self.after(Duration::ZERO, SimEvent::Complete(number));
        }
    }

    /// Handles the exit of a transfer's last byte from the last of links that are shared in order.
    pub(super) fn left_last_link(&mut self, flow: FlowId) {
        self.scheduler.stop(self.now, flow);
        let Some(number) = self.flow_of.remove(&flow) else { return };
        let Some(active) = self.transfers.find_mut(&number) else { return };
        active.flow = None;
        let wait = self.random_delay();
        self.after(wait, SimEvent::Arrive(number));
    }

    /// Lands a piece early if its bytes can have come by now; otherwise it waits for the arrival of
    /// all.
    pub(super) fn land_piece(&mut self, number: TransferNumber) {
        let Some(active) = self.transfers.find(&number) else { return };
        let Some(piece) = active.pieces.last().cloned() else { return };
        let sent = match (active.flow, &self.scheduler) {
            (Some(flow), LinkScheduler::Fair(flows)) => flows.sent(self.now, flow).unwrap_or(0),
            (Some(_), LinkScheduler::InOrder(_)) => 0,
            (None, _) => active.len() as u64,
        };
        let enough = active.landed_bytes + piece.len() as u64 <= sent;
        if active.over || !enough || self.drop_if_cut(number) {
            return;
        }
        self.event("piece", &[number.0, piece.start as u64, piece.end as u64]);
        self.land(number, 1);
    }

    /// Moves the bytes of some of the pieces that have not landed yet. False when the peer's memory
    /// is gone.
    fn land(&mut self, number: TransferNumber, count: usize) -> bool {
        for _ in 0..count {
            let Some(active) = self.transfers.find_mut(&number) else { return false };
            let Some(piece) = active.pieces.pop() else { return true };
            active.landed_bytes += piece.len() as u64;
            let (submitter, peer) = (active.submitter, active.peer);
            let actor = Actor::Transfer(number, submitter);
            let table = &self.ranks[peer as usize].table;
            let kind = active.remote_access();
            let Some(whole) = active.remote().and_then(|remote| table.find(remote, submitter, kind)) else {
                return false;
            };
            let Ok(there) = whole.slice(piece.clone()) else { return false };
            if !self.moves_bytes {
                continue;
            }
            match &active.body {
                TransferBody::Put { source, .. } => {
                    let snapshot = active.snapshot.as_ref().map(|bytes| bytes[piece.clone()].to_vec());
                    let (bytes, read) = match (snapshot, source) {
                        (Some(bytes), _) => (bytes, None),
                        (None, Some(Source::Slice(slice))) => match slice.slice(piece.clone()) {
                            Ok(part) => (part.to_vec(), Some(part)),
                            Err(_) => return false,
                        },
                        (None, Some(Source::Inline(inline))) => (inline.as_bytes()[piece].to_vec(), None),
                        (None, None) => return false,
                    };
                    there.store(&bytes);
                    if let Some(part) = read {
                        self.accessed(actor, submitter, &part, AccessKind::Read);
                    }
                    self.accessed(actor, peer, &there, AccessKind::Write);
                }
                TransferBody::Get { destination, .. } => {
                    let Ok(here) = destination.slice(piece) else { return false };
                    here.store(&there.to_vec());
                    self.accessed(actor, peer, &there, AccessKind::Read);
                    self.accessed(actor, submitter, &here, AccessKind::Write);
                }
                TransferBody::Atomic { .. } => return false,
            }
        }
        true
    }

    pub(super) fn arrive(&mut self, number: TransferNumber) {
        let Some(active) = self.transfers.find(&number) else { return };
        let (first, left) = (!active.arrived, active.pieces.len());
        let (submitter, peer) = (active.submitter, active.peer);
        let (remote, kind) = (active.remote().copied(), active.remote_access());
        if active.over || self.drop_if_cut(number) {
            return;
        }
        self.event("arrive", &[number.0]);
        let late_bytes = first && left > 0 && self.mutant == Some(Mutant::SignalBeforeBytes);
        if late_bytes {
            if let Some(active) = self.transfers.find_mut(&number) {
                active.arrived = true;
            }
            self.raise_signal(number);
            self.after(MUTANT_LATENESS, SimEvent::Arrive(number));
            return;
        }
        // The region may have gone since the departure. This is checked also when no byte is left
        // to land.
        let table = &self.ranks[peer as usize].table;
        let gone = remote.filter(|remote| table.find(remote, submitter, kind).is_none());
        if let Some(remote) = gone {
            return self.refuse(number, remote.key);
        }
        self.put_again_if_mutated(number);
        let landed = self.land(number, left);
        debug_assert!(landed, "the range was looked up just now");
        if first && !self.delays_signal_if_mutated(number) {
            self.raise_signal(number);
        }
        let Some(active) = self.transfers.find_mut(&number) else { return };
        active.over = true;
        let reported = active.reported;
        if !reported {
            let back = match active.body {
                TransferBody::Put { .. } => self.network.latency(peer, submitter) + self.random_delay(),
                _ => Duration::ZERO,
            };
            self.after(back, SimEvent::Complete(number));
        }
        self.forget_if_ended(number);
        self.deliver_bye_if_quiet(submitter, peer);
        self.wake(peer);
    }

    /// The drains of the submitter since the transfer.
    fn drains_since(&mut self, number: TransferNumber) -> u64 {
        let Some(active) = self.transfers.find(&number) else { return 0 };
        let (rank, peer, before) = (active.submitter, active.peer, active.drains_before);
        self.drains_begun(rank, peer) - before
    }

    /// For a mutant: lets the signal of a put from before a drain come late.
    fn delays_signal_if_mutated(&mut self, number: TransferNumber) -> bool {
        if self.mutant != Some(Mutant::SignalAfterDrained) || self.drains_since(number) == 0 {
            return false;
        }
        let Some(active) = self.transfers.find(&number) else { return false };
        let TransferBody::Put { signal: Some(signal), .. } = active.body else { return false };
        self.after(DRAIN_MUTANT_LATENESS, SimEvent::LateSignal(active.submitter, active.peer, signal));
        true
    }

    /// For a mutant: lets the bytes of a put from before a drain that are about to land do so once
    /// more later.
    fn put_again_if_mutated(&mut self, number: TransferNumber) {
        if self.mutant != Some(Mutant::PutAgainAfterDrained) || self.drains_since(number) == 0 {
            return;
        }
        let Some(active) = self.transfers.find(&number) else { return };
        let (submitter, peer) = (active.submitter, active.peer);
        let TransferBody::Put { source: Some(Source::Slice(source)), destination: Some(destination), .. } =
            &active.body
        else {
            return;
        };
        let bytes = source.to_vec();
        let table = &self.ranks[peer as usize].table;
        if let Some(there) = table.find(destination, submitter, AccessKind::Write) {
            let actor = Actor::Transfer(number, submitter);
            self.after(DRAIN_MUTANT_LATENESS, SimEvent::Rewrite(peer, actor, there, bytes));
        }
    }

    /// For a mutant: raises a signal that is late.
    pub(crate) fn raise_late(&mut self, from: Rank, to: Rank, signal: &Signal) {
        let incarnation = self.ranks[from as usize].incarnation;
        if let Some(signal_slots) = self.signal_slots_of(to, from, incarnation) {
            signal_slots.signal(signal);
            self.wake(to);
        }
    }

    fn raise_signal(&mut self, number: TransferNumber) {
        let Some(active) = self.transfers.find(&number) else { return };
        let TransferBody::Put { signal: Some(signal), .. } = &active.body else { return };
        let (from, to, signal, incarnation) = (active.submitter, active.peer, *signal, active.incarnation);
        let Some(signal_slots) = self.signal_slots_of(to, from, incarnation) else { return };
        if usize::from(signal.signal_slot) >= signal_slots.len() {
            return;
        }
        signal_slots.signal(&signal);
        let count = signal_slots.count(signal.signal_slot);
        self.event("signal", &[number.0, u64::from(signal.signal_slot), count]);
        self.note(|| Record::Signalled {
            from,
            to,
            signal_slot: signal.signal_slot,
            count,
            transfer: number,
        });
        if let Some(signalled) = &mut self.ranks[to as usize].signalled {
            signalled.push((from, signal.signal_slot));
        }
        self.wake(to);
    }

    fn carry_out_atomic(&mut self, number: TransferNumber) {
        let Some(active) = self.transfers.find_mut(&number) else { return };
        let TransferBody::Atomic { word, op } = &active.body else { return };
        let (submitter, peer, word, op) = (active.submitter, active.peer, *word, *op);
        let slice = self.ranks[peer as usize].table.find(&word, submitter, AccessKind::Atomic);
        let Some(slice) = slice.filter(|slice| (slice.as_ptr() as usize).is_multiple_of(8)) else {
            return self.refuse(number, word.key);
        };
        let mut bytes = [0; 8];
        slice.load(&mut bytes);
        let old = u64::from_ne_bytes(bytes);
        let new = match op {
            AtomicOp::Add(value) => old.wrapping_add(value),
            AtomicOp::CompareSwap { expected, new } => {
                if old == expected {
                    new
                } else {
                    old
                }
            }
        };
        slice.store(&new.to_ne_bytes());
        active.outcome = Ok(old);
        active.over = true;
        self.event("atomic", &[number.0, old, new]);
        self.accessed(Actor::Transfer(number, submitter), peer, &slice, AccessKind::Atomic);
        self.wake(peer);
        let back = self.network.latency(peer, submitter) + self.random_delay();
        self.after(back, SimEvent::Complete(number));
        self.deliver_bye_if_quiet(submitter, peer);
    }

    fn refuse(&mut self, number: TransferNumber, key: RegionKey) {
        let Some(active) = self.transfers.find_mut(&number) else { return };
        let (submitter, peer) = (active.submitter, active.peer);
        active.outcome = Err(TransferError::Refused { peer, key });
        active.over = true;
        active.pieces.clear();
        let reported = active.reported;
        self.event("refuse", &[number.0]);
        if !reported {
            let back = self.network.latency(peer, submitter) + self.random_delay();
            self.after(back, SimEvent::Complete(number));
        }
        self.forget_if_ended(number);
        self.deliver_bye_if_quiet(submitter, peer);
    }

    /// Makes the submitter's `Done` ready.
    pub(super) fn complete(&mut self, number: TransferNumber) {
        let mutant = self.mutant;
        let Some(active) = self.transfers.find_mut(&number) else { return };
        if active.reported {
            return;
        }
        active.reported = true;
        let (rank, peer, id) = (active.submitter, active.peer, active.id);
        let result = active.outcome.clone();
        let next_signal = active.next_signal.take().filter(|_| result.is_ok());
        let read = match &active.body {
            TransferBody::Put { source: Some(Source::Slice(slice)), .. } if active.snapshot.is_none() => {
                active.pieces.iter().filter_map(|piece| slice.slice(piece.clone()).ok()).collect()
            }
            _ => Vec::new(),
        };
        // The mutant keeps the slice and goes on reading it.
        if mutant != Some(Mutant::SourceReadAfterDone) {
            active.release_source(self.moves_bytes);
            for part in &read {
                self.accessed(Actor::Transfer(number, rank), rank, part, AccessKind::Read);
            }
        }
        self.event("complete", &[number.0, u64::from(result.is_ok())]);
        self.push_ready(rank, Event::Done { id, result }, Some((peer, number)));
        if let Some(signal) = next_signal {
            // Nobody polls its `Done`.
            self.start_transfer(ActiveTransfer::of_signal(rank, peer, id, signal, true));
        }
        self.forget_if_ended(number);
        self.deliver_bye_if_quiet(rank, peer);
    }

    /// Ends, with this error, all transfers of `rank` to `peer`; bytes already on the wire may
    /// still land.
    pub(super) fn fail_transfers(&mut self, rank: Rank, peer: Rank, error: &TransferError) {
        let cut = self.is_cut(rank, peer);
        let numbers: Vec<_> = (self.transfers.iter())
            .filter(|(_, active)| active.submitter == rank && active.peer == peer && !active.reported)
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            let lives_on = !cut && self.choices.coin();
            let Some(active) = self.transfers.find_mut(&number) else { continue };
            let is_decided = match (&active.outcome, error) {
                _ if !active.over => false,
                (Err(TransferError::Refused { .. }), _) => true,
                // A bye comes after the report that a transfer has landed.
                (Ok(_), TransferError::Departed { .. }) => true,
                _ => false,
            };
            // The result was decided, but not reported yet.
            if !is_decided {
                active.outcome = Err(error.clone());
            }
            let is_put = matches!(active.body, TransferBody::Put { .. });
            let on_the_wire = is_put && (active.flow.is_some() || active.drained);
            if !(on_the_wire && lives_on) {
                self.end(number);
            }
            self.complete(number);
        }
    }

    /// Lets nothing more of the transfer land.
    pub(super) fn end(&mut self, number: TransferNumber) {
        let Some(active) = self.transfers.find_mut(&number) else { return };
        active.over = true;
        active.pieces.clear();
        if let Some(flow) = active.flow.take() {
            self.flow_of.remove(&flow);
            self.scheduler.stop(self.now, flow);
        }
        self.forget_if_ended(number);
    }

    /// Ends the transfer if a wire that it uses is cut. The submitter learns of it later.
    fn drop_if_cut(&mut self, number: TransferNumber) -> bool {
        let Some(active) = self.transfers.find(&number) else { return true };
        let (rank, peer) = (active.submitter, active.peer);
        let back = active.uses_wire(peer, rank);
        let cut = self.is_cut(rank, peer) || (back && self.is_cut(peer, rank));
        if cut {
            self.end(number);
        }
        cut
    }

    fn forget_if_ended(&mut self, number: TransferNumber) {
        if self.transfers.find(&number).is_some_and(ActiveTransfer::is_flushed)
            && let Some(ended) = self.transfers.remove(&number)
        {
            self.advance_drains(ended.submitter, ended.peer);
        }
    }

    /// Handles the transfers of a rank that dies, and the transfers to that rank. Nobody polls the
    /// `Done` events of the dead rank. Submitters of transfers to the dead rank get their `Done`
    /// when they detect the death.
    pub(super) fn orphan_transfers(&mut self, dead: Rank) {
        let numbers: Vec<_> = (self.transfers.iter())
            .filter(|(_, active)| active.submitter == dead || active.peer == dead)
            .map(|(number, _)| number)
            .collect();
        for number in numbers {
            let lands = self.choices.coin();
            let Some(active) = self.transfers.find_mut(&number) else { continue };
            if active.submitter == dead {
                let on_the_wire = active.drained && matches!(active.body, TransferBody::Put { .. });
                active.release_source(self.moves_bytes);
                (active.reported, active.is_orphaned) = (true, true);
                if !(on_the_wire && lands) {
                    self.end(number);
                }
            } else {
                self.end(number);
            }
            self.forget_if_ended(number);
        }
    }

    /// For a mutant: exchanges the signals of this put and another one.
    fn swap_signal(&mut self, number: TransferNumber) {
        let Some(active) = self.transfers.find(&number) else { return };
        let TransferBody::Put { signal: Some(mine), .. } = &active.body else { return };
        let (submitter, peer, mine) = (active.submitter, active.peer, *mine);
        let other = self.transfers.iter_mut().find_map(|(other, active)| {
            let same_pair = active.submitter == submitter && active.peer == peer;
            match &mut active.body {
                TransferBody::Put { signal: Some(theirs), .. }
                    if same_pair
                        && other != number
                        && !active.over
                        && theirs.signal_slot != mine.signal_slot =>
                {
                    Some(std::mem::replace(theirs, mine))
                }
                _ => None,
            }
        });
        if let (Some(theirs), Some(active)) = (other, self.transfers.find_mut(&number))
            && let TransferBody::Put { signal, .. } = &mut active.body
        {
            *signal = Some(theirs);
        }
    }
}
