//! How an engine is made, how it reports its state, and how it reacts to a poll.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{
    Address, Device, Event, Flush, HostMemory, Memory, Nanos, SharedMemory, Signals, Slice, Space,
};
use pleach_vocabulary::Rank;

use super::admission::Admission;
use super::connector::Connector;
use super::deadlock::DeadlockDetector;
use super::failure::FailureState;
use super::fast_path::FastPath;
use super::fault::{Fault, FaultKind};
use super::message::Message;
use super::observer::Observer;
use super::queries::{self, Queries};
use super::signals::{PeerSignals, Witness};
use super::{Context, Engine, EngineError, NO_TRANSFER, Scratch, ScratchLayout, StatusBoard};
use crate::compute::Compute;
use crate::observe::Observations;

/// After a longer time without a poll this rank was stopped or busy. Then the time does not count
/// as a wait for answers.
const UNSEEN_MAX: Duration = Duration::from_millis(50);
const _: () = assert!(UNSEEN_MAX.as_nanos() > queries::QUERY_INTERVAL_MAX.as_nanos());
/// Events taken from the device at a time.
const EVENTS_MAX: usize = 256;

/// `bytes` zeroed bytes that peers of this host can map. Miri has no anonymous files, so memory
/// under Miri cannot be mapped.
pub(crate) fn memory_for_peers(bytes: usize) -> io::Result<Arc<dyn Memory>> {
    if cfg!(miri) { Ok(HostMemory::new(bytes)) } else { Ok(SharedMemory::new(bytes)?) }
}

impl Engine {
    /// An engine of a connected device whose responder is `board`. Tells the peers where this
    /// rank's scratch is. `addresses`: by rank, where pairs connect on first use.
    pub(crate) fn new(
        device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<StatusBoard>,
        layout: ScratchLayout,
        addresses: Vec<Address>,
    ) -> Result<Self, EngineError> {
        let mut engine = Self::connecting(device, compute, board, layout, addresses)?;
        for peer in engine.context.scratch.first.clone() {
            engine.context.announce_scratch(peer)?;
            engine.connected(peer);
        }
        Ok(engine)
    }

    /// An engine of a device that still connects. Tells each peer where this rank's scratch is,
    /// when the peer is connected.
    pub(crate) fn connecting(
        mut device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<StatusBoard>,
        layout: ScratchLayout,
        addresses: Vec<Address>,
    ) -> Result<Self, EngineError> {
        let bytes = layout.bytes();
        let memory =
            memory_for_peers(bytes as usize).map_err(|source| EngineError::Scratch { bytes, source })?;
        let scratch = device.register(compute.staging(memory)?)?.whole();
        let space = scratch.region().memory().space();
        assert!(scratch.len() as u64 >= bytes, "staging is {} bytes long, not {bytes}", scratch.len());
        assert!(space == Space::Host || space == compute.space(), "staging is in {space}");
        Ok(Self::with_scratch(device, compute, board, layout, scratch, addresses))
    }

    /// The same with scratch that is registered. Tells nobody of it.
    pub(crate) fn with_scratch(
        device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<StatusBoard>,
        layout: ScratchLayout,
        scratch: Slice,
        addresses: Vec<Address>,
    ) -> Self {
        let (rank, ranks) = (device.info().rank, layout.ranks);
        let signal_slots = (0..ranks)
            .map(|peer| if peer == rank { Signals::new(0) } else { device.signal_slots(peer) })
            .collect();
        let first = match board.overlay() {
            Some(overlay) => overlay.neighbours().to_vec(),
            None => (0..ranks).filter(|peer| *peer != rank).collect(),
        };
        Self {
            context: Context {
                rank,
                ranks,
                device,
                compute,
                signals: PeerSignals::new(signal_slots),
                scratch: Scratch::new(scratch, rank, layout, first),
                connector: Connector::new(board.overlay(), addresses),
                completed: 0,
                hears_all: false,
                now: Nanos::ZERO,
                elapsed_ns: 0,
                #[cfg(test)]
                traffic: super::Traffic::default(),
            },
            admission: Admission::new(rank, layout, board.clone()),
            fast_path: FastPath::closed(),
            board,
            queries: Queries::default(),
            deadlocks: DeadlockDetector::default(),
            failure: FailureState::default(),
            observer: Observer::new(Arc::new(Observations::new(rank, ranks, Nanos::ZERO, None))),
            events: Vec::with_capacity(EVENTS_MAX),
            signalled: Vec::new(),
            ended_transfers: Vec::new(),
        }
    }

    /// Has another processor of the host's memory compute, before anything was started.
    pub(crate) fn compute_by(&mut self, compute: Box<dyn Compute>) {
        assert!(self.is_idle() && compute.space() == self.context.compute.space(), "nothing is computed yet");
        self.context.compute = compute;
    }

    /// Installs a checker.
    pub fn witness(&mut self, witness: Box<dyn Witness>) {
        *self.context.signals.witness() = Some(witness);
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.context.rank
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.context.ranks
    }

    /// The device, to register memory and to sleep on.
    pub fn device(&mut self) -> &mut dyn Device {
        &mut *self.context.device
    }

    /// The kind of memory in which peers put the bytes that this rank combines.
    #[must_use]
    pub fn scratch_space(&self) -> Space {
        let scratch = self.context.scratch.own.as_ref();
        scratch.map_or(Space::Host, |scratch| scratch.region().memory().space())
    }

    /// Whether the peers that are connected from the beginning have said where their scratch is;
    /// runs begin then.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.context.scratch.is_ready()
    }

    /// Of these peers, those that are not connected yet, or have not said where their scratch is.
    pub fn not_ready(&self) -> impl Iterator<Item = Rank> + '_ {
        self.context.scratch.not_ready()
    }

    /// The fault that ended the group, once no peer can touch this rank's memory.
    #[must_use]
    pub fn failure(&self) -> Option<&Arc<Fault>> {
        self.failure.fault()
    }

    /// Whether the group has failed and every peer that can be reached was told why.
    #[must_use]
    pub fn has_told_failure(&self) -> bool {
        self.is_severing() || self.failure().is_some()
    }

    /// Whether the fence is under way, which takes this rank's memory out of its peers' reach. The
    /// fence is work of this rank, and waits for no other.
    #[must_use]
    pub fn is_severing(&self) -> bool {
        self.failure.is_severing()
    }

    /// Whether every run has ended.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.admission.is_idle()
    }

    /// When to poll at the latest if the device's wake source does not wake this rank; the device
    /// may want it earlier ([`pleach_transport::Armed::until`]).
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Nanos> {
        let seen_at = self.observer.seen_at();
        if self.failure.is_active() {
            self.admission.next_wakeup(&*self.context.compute, seen_at)
        } else {
            // A failing group waits for its fence, not for its runs.
            self.failure.next_wakeup(seen_at)
        }
    }

    /// Makes progress; true when anything moved.
    pub fn poll(&mut self, now: Nanos) -> bool {
        let mut moved = false;
        let unseen = self.observer.see(now);
        if unseen > UNSEEN_MAX {
            // Answers that came during this time were not read yet.
            self.queries.postpone(unseen);
        }
        if self.board.has_unread() {
            self.read_messages(now);
            moved = true;
        }
        self.context.device.poll(now, &mut self.events);
        if !self.events.is_empty() {
            let mut events = std::mem::take(&mut self.events);
            self.handle(&mut events, now);
            self.events = events;
            moved = true;
        }
        self.take_signalled();
        if self.failure.is_active() {
            moved | self.advance_runs(now) | self.check_compute(now) | self.check_time(now)
        } else {
            moved | self.advance_failure(now)
        }
    }

    /// Goes as far as the signals of peers allow, for devices whose peers act without a poll here
    /// ([`pleach_transport::Reach::passive`]). It polls neither the device nor the clock, so `now`
    /// may be old if computing takes no time. The call costs a tenth of [`Engine::poll`], but does
    /// not replace it. True when anything moved.
    pub fn poll_signals(&mut self, now: Nanos) -> bool {
        if !self.failure.is_active() || self.board.has_unread() {
            return false;
        }
        if self.context.signals.poll_awaited() == Some(false) {
            return false;
        }
        self.context.hears_all = false;
        self.advance_runs(now)
    }

    /// The poll between arming the device's wake source and sleeping on it. It takes all signals
    /// since the last poll, because these wake nobody. True when there were signals; then the
    /// thread must not sleep.
    pub fn poll_before_sleep(&mut self, now: Nanos) -> bool {
        if self.board.has_unread() {
            return true;
        }
        if !self.failure.is_active() {
            return false;
        }
        self.context.hears_all = false;
        self.advance_runs(now)
    }

    /// Hands on the submitted transfers; see [`Device::flush`].
    pub fn flush(&mut self) -> bool {
        self.context.device.flush(Flush::Transfers)
    }

    /// Says bye to the peers; see [`Device::leave`].
    pub fn leave(&mut self) {
        self.context.device.leave();
    }

    /// Sends everything as far as possible; returns whether all of it has gone out.
    pub fn flush_all(&mut self) -> bool {
        self.context.device.flush(Flush::All)
    }

    /// Takes events of the device that other code polled.
    pub(crate) fn accept(&mut self, mut events: Vec<Event>, now: Nanos) {
        self.handle(&mut events, now);
    }

    fn handle(&mut self, events: &mut Vec<Event>, now: Nanos) {
        for event in events.drain(..) {
            match event {
                Event::Done { id: NO_TRANSFER, .. } => {}
                Event::Connected { peer } => {
                    // If the peer is lost again, that loss has an event of its own.
                    let _ = self.context.announce_scratch(peer);
                    self.connected(peer);
                    self.board.agreement().tell_again();
                }
                Event::Done { id, result: Ok(_) } => {
                    if self.failure.is_active() {
                        self.admission.transfer_done(id);
                        self.note_ended_transfer(id);
                    }
                }
                // The loss that caused this error has an event of its own. Transfers to a severed
                // peer were given up at the sever.
                Event::Done { result: Err(error), id } => self.transfer_failed(id, &error, now),
                Event::PeerLost { peer, cause } if self.board.leaves_to_neighbours(peer, &cause) => {}
                Event::PeerLost { peer, cause } => {
                    self.board.agreement().lose(peer);
                    let fault = self.fault_of_loss(peer, cause.kind(), cause.to_string(), None, now);
                    self.fail(fault, now);
                }
                Event::Departed { peer } => {
                    self.board.agreement().lose(peer);
                    self.queries.has_left(peer);
                }
                Event::Severed { peer } => self.failure.severed(peer),
                // A group drains no pair.
                Event::Drained { .. } => {}
            }
        }
    }

    /// The pair with this peer is connected.
    pub(super) fn connected(&mut self, peer: Rank) {
        self.context.scratch.connected(peer);
        self.board.note_connected(peer);
        self.map_for_fast_path(peer);
    }

    /// Marks the lanes whose signals have come, if the witness names their signal slots.
    fn take_signalled(&mut self) {
        let Some(witness) = self.context.signals.witness() else { return };
        self.context.hears_all = witness.take_signalled(&mut self.signalled);
        for (from, signal_slot) in self.signalled.drain(..) {
            self.admission.mark_signalled(from, signal_slot);
        }
    }

    /// Acts on the messages that came from peers since the last call.
    pub(super) fn read_messages(&mut self, now: Nanos) {
        for (peer, message) in self.board.take_unread() {
            match message {
                Message::Scratch(slice) => {
                    self.context.scratch.announced(peer, slice);
                    self.map_for_fast_path(peer);
                }
                Message::Away { rank } => {
                    if rank < self.context.ranks && self.board.relays() {
                        self.queries.has_left(rank);
                    }
                }
                // The peer is in another call than this rank.
                Message::Query { stream, record } => self.compare(peer, stream, &record, now),
                Message::Answer { stream, comparison, record, completed, blocked_on } => {
                    self.context.signals.hear_credit(peer, stream, completed);
                    self.read_answer(peer, stream, comparison, &record, blocked_on, now);
                }
                Message::ProbeAnswer { probe, stream, run, has_entered, blocked } => {
                    let fault = self.read_probe_answer(peer, probe, (stream, run), has_entered, blocked, now);
                    if let Some(fault) = fault {
                        self.fail(fault, now);
                    }
                }
                Message::Probe { .. } | Message::Claim { .. } | Message::Routed { .. } => {}
            }
        }
        if self.failure.is_active() {
            self.connect_to_wanted();
        }
        if self.board.has_failed() {
            self.begin_failing(now);
        }
    }

    /// Whether the processor or GPU that computes has failed. If so, the group fails.
    fn check_compute(&mut self, now: Nanos) -> bool {
        let Some(error) = self.context.compute.failure() else { return false };
        let fault = self.fault(FaultKind::Compute, self.context.rank, error.to_string(), None, now);
        self.fail(fault, now);
        true
    }
}
