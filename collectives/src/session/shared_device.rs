//! The device of a session: one device for all epochs.
//!
//! The engine of the epoch uses it through a view ([`EpochDevice`](super::EpochDevice)), the thread
//! of the session directly. Whoever polls it sorts the events: ends of transfers are the epoch's,
//! what happened to a pair is told to the session ([`PairEvent`]).
//!
//! **Invariants:**
//!
//! * *Quiet before drained.* A pair is drained, and a process severed, only when the engine of the
//!   epoch has stopped: when it severs its peers, as a failed engine does, or when it is gone. From
//!   then on its view takes no transfer. So the drain's mark stands behind all that the epoch has
//!   submitted, and no thread reads a peer's memory through a mapping any more.
//! * *A severed peer is a fence.* The engine is told `Severed` of a peer when the pair was drained,
//!   or when the device has severed the peer for good. So whatever the engine then gives back, no
//!   peer touches.
//! * *Drains are counted by records.* Both ends of a pair drain once for each record that they have
//!   in common, however many of them an end has not heard of. So the n-th drain of one end and the
//!   n-th of the other are about the same record.
//! * *The session's own reads cross no epoch's end.* A get of states names the record of its epoch,
//!   and is refused once its pair is to be drained for a later one, or its peer is out. So it
//!   stands before the drain's mark. A new epoch's are begun when all of them have ended.
//! * *The device is had in turn.* A poll that makes memory private takes milliseconds, and whoever
//!   polls does so again at once. The lock is fair to who waits for so long: the thread of the
//!   session answers other members meanwhile, and is not taken for silent.
//! * *Ends are their epoch's.* Transfers have numbers of this device's own, so the end of a
//!   transfer of an epoch before is never taken for that of another one.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use pleach_transport::{
    Address, ConnectError, Device, DeviceInfo, Event, Flush, Memory, Nanos, PostError, Reach, Region,
    RegisterError, RemoteSlice, Signal, Slice, SubmitError, Submitted, Transfer, TransferError, TransferId,
    Urgency,
};
use pleach_vocabulary::Rank;

use super::envelope::of_end;
use crate::engine::StatusBoard;

/// Events taken from the device at a time.
const EVENTS_MAX: usize = 256;

/// In the place of an epoch's number: a transfer of the session itself.
const OF_SESSION: u64 = u64::MAX;

/// What happened to a pair. Ranks are those of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PairEvent {
    /// The pair is connected.
    Connected(Rank),
    /// The peer is lost or has departed.
    Lost(Rank),
    /// The pair is drained for this record.
    Drained { peer: Rank, record: u64 },
}

/// How many messages this process has sent to a peer, and received from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Messages {
    sent: u64,
    received: u64,
}

impl Messages {
    pub(crate) fn new(sent: u64, received: u64) -> Self {
        Self { sent, received }
    }

    pub(crate) fn sent(&self) -> u64 {
        self.sent
    }

    pub(crate) fn received(&self) -> u64 {
        self.received
    }
}

/// What is known of one pair.
#[derive(Clone, Copy, Debug, Default)]
struct Pair {
    /// How many drains there should have been, and for which record.
    wanted: u64,
    record: u64,
    begun: u64,
    drained: u64,
    /// This end has signalled in signal slots below this one.
    signalled_below: u16,
    /// Messages since the pair was connected, in the epochs that are over.
    messages: Messages,
    /// Is to be severed.
    is_out: bool,
    is_severing: bool,
    is_severed: bool,
    is_connected: bool,
}

/// The epoch whose engine uses the device.
struct Route {
    epoch: u64,
    /// By rank of the epoch: the rank of the device.
    ranks: Vec<Rank>,
    /// Counts the messages of the epoch.
    board: Arc<StatusBoard>,
    events: VecDeque<Event>,
    /// The engine has stopped.
    is_quiet: bool,
    /// By rank of the epoch: whether the engine has severed the peer and was not told that it is.
    severing: Vec<bool>,
    /// By rank of the epoch: how many drains of the pair there were before.
    drained_before: Vec<u64>,
}

/// What the lock guards.
pub(crate) struct Shared {
    pub(crate) device: Box<dyn Device>,
    events: Vec<Event>,
    route: Option<Route>,
    /// By number: the epoch whose transfer it is, and the name that it has there.
    transfers: HashMap<u64, (u64, TransferId)>,
    /// Gets of the session itself that have ended, and whether well.
    gets: Vec<(u64, bool)>,
    next_transfer: u64,
    /// Whether marks of drains may not have gone out.
    has_marks: bool,
    /// By rank of the device.
    pairs: Vec<Pair>,
    pair_events: Vec<PairEvent>,
}

/// See the module.
pub(crate) struct SharedDevice {
    shared: Mutex<Shared>,
    /// As it was when the device was made. See [`SharedDevice::reach`] for what has changed.
    info: DeviceInfo,
    /// Is called when something happened to a pair, with the lock held; never blocks.
    listener: Box<dyn Fn() + Send + Sync>,
}

impl SharedDevice {
    /// A device that is connected to these ranks, and is one of them itself. `listener` is called
    /// when something happened to a pair, and never blocks.
    pub(crate) fn new(
        device: Box<dyn Device>,
        events: Vec<Event>,
        connected: &[Rank],
        listener: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        let info = device.info().clone();
        let pair = |rank: usize| {
            let is_connected = connected.contains(&(rank as Rank));
            Pair { is_connected, ..Pair::default() }
        };
        let mut shared = Shared {
            device,
            events,
            route: None,
            transfers: HashMap::new(),
            gets: Vec::new(),
            next_transfer: 0,
            has_marks: false,
            pairs: (0..info.reach.len()).map(pair).collect(),
            pair_events: Vec::new(),
        };
        shared.sort();
        shared.events.reserve(EVENTS_MAX);
        Arc::new(Self { shared: Mutex::new(shared), info, listener: Box::new(listener) })
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }

    /// Registers memory for all epochs.
    pub(crate) fn register(&self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.lock().device.register(memory)
    }

    /// Sends a control message.
    pub(crate) fn post(&self, peer: Rank, message: &[u8]) -> Result<(), PostError> {
        self.lock().device.post(peer, message, Urgency::Ordinary)
    }

    /// Begins to read a peer's memory, for the session itself, in the epoch of this record. `None`:
    /// it has ended.
    pub(crate) fn get(
        &self,
        record: u64,
        peer: Rank,
        src: RemoteSlice,
        dst: Slice,
    ) -> Result<Option<u64>, SubmitError> {
        let mut shared = self.lock();
        if shared.pairs.get(peer as usize).is_none_or(|pair| pair.is_out || pair.record > record) {
            return Err(SubmitError::Severed { peer });
        }
        let number = shared.next_transfer;
        let submitted = shared.device.submit(peer, Transfer::Get { src, dst }, TransferId(number))?;
        if submitted != Submitted::UnderWay {
            return Ok(None);
        }
        shared.next_transfer += 1;
        shared.transfers.insert(number, (OF_SESSION, TransferId(number)));
        Ok(Some(number))
    }

    /// The gets that have ended, and whether well.
    pub(crate) fn take_gets(&self) -> Vec<(u64, bool)> {
        std::mem::take(&mut self.lock().gets)
    }

    /// Starts to connect.
    pub(crate) fn connect(&self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.lock().device.connect(peer, address)
    }

    /// Whether no process has the rank here, and the one that had it is fenced. A device that is
    /// connected to it still would take the next one for it.
    pub(crate) fn is_free(&self, peer: Rank) -> bool {
        let is_free = |pair: &Pair| !pair.is_connected && (!pair.is_out || pair.is_severed);
        self.lock().pairs.get(peer as usize).is_some_and(is_free)
    }

    /// Makes progress, for the session's thread. Whoever sleeps on the device's wake source looks
    /// again: what would have woken them may have been taken here.
    pub(crate) fn poll(&self, now: Nanos) {
        let mut shared = self.lock();
        // A poll disarms a word, after which nothing wakes who sleeps on it; and it takes what has
        // made a file readable. So it is woken before and after, and cannot arm in between.
        self.info.waker.wake();
        shared.poll(now);
        self.info.waker.wake();
    }

    /// Makes progress, for the caller between two steps: nobody waits for a call then, so nobody is
    /// woken.
    pub(crate) fn poll_between_steps(&self, now: Nanos) {
        let mut shared = self.lock();
        shared.poll(now);
        self.tell(&shared);
    }

    /// What happened since the last call.
    pub(crate) fn take_pair_events(&self) -> Vec<PairEvent> {
        std::mem::take(&mut self.lock().pair_events)
    }

    /// Says that something happened to a pair, where that is so.
    pub(crate) fn tell(&self, shared: &Shared) {
        if !shared.pair_events.is_empty() {
            (self.listener)();
        }
    }

    /// Messages to and from a rank since it was connected, in the epochs that are over.
    pub(crate) fn messages(&self, peer: Rank) -> Messages {
        self.lock().pairs[peer as usize].messages
    }

    /// An epoch begins: its engine, which has this board, will use the device. The one before has
    /// stopped.
    pub(crate) fn begin(&self, epoch: u64, ranks: &[Rank], board: Arc<StatusBoard>) {
        let mut shared = self.lock();
        let drained_before = ranks.iter().map(|rank| shared.pairs[*rank as usize].drained).collect();
        shared.route = Some(Route {
            epoch,
            ranks: ranks.to_vec(),
            board,
            events: VecDeque::new(),
            is_quiet: false,
            severing: vec![false; ranks.len()],
            drained_before,
        });
    }

    /// The engine of this epoch has stopped.
    pub(crate) fn quiet(&self, epoch: u64) {
        let mut shared = self.lock();
        if shared.is_of(epoch) {
            shared.stop();
            shared.advance();
            self.info.waker.wake();
        }
    }

    /// Drains a pair for a record, when the engine has stopped. `count`: how many drains of the
    /// pair there are then since it was connected.
    pub(crate) fn drain(&self, peer: Rank, record: u64, count: u64) {
        let mut shared = self.lock();
        let pair = &mut shared.pairs[peer as usize];
        (pair.wanted, pair.record) = (count, record);
        shared.advance();
        self.tell(&shared);
        self.info.waker.wake();
    }

    /// Severs a process, when the engine has stopped.
    pub(crate) fn sever(&self, peer: Rank) {
        let mut shared = self.lock();
        shared.pairs[peer as usize].is_out = true;
        shared.advance();
        self.info.waker.wake();
    }

    /// Severs at once a rank that is of no epoch.
    pub(crate) fn sever_stranger(&self, peer: Rank) {
        let mut shared = self.lock();
        let pair = &mut shared.pairs[peer as usize];
        (pair.is_out, pair.is_severing, pair.is_severed) = (true, true, false);
        shared.device.sever(peer);
    }

    /// Whether drains or fences are under way: then the device has to be polled.
    pub(crate) fn is_ending(&self) -> bool {
        let mut shared = self.lock();
        let is_ending =
            |pair: &Pair| pair.drained < pair.wanted && !pair.is_out || pair.is_out && !pair.is_severed;
        if shared.pairs.iter().any(is_ending) {
            return true;
        }
        // A peer may still wait for a mark of this rank.
        shared.has_marks = shared.has_marks && !shared.device.flush(Flush::Transfers);
        shared.has_marks
    }

    /// Whether severing this process takes memory from the others too: it may have it mapped.
    pub(crate) fn maps(&self, peer: Rank) -> bool {
        self.reach(peer).maps
    }

    /// How the process is reached that has this rank, or had it last.
    pub(crate) fn reach(&self, peer: Rank) -> Reach {
        self.lock().device.info().reach[peer as usize]
    }

    /// How many ranks the device has.
    pub(crate) fn seats(&self) -> u32 {
        self.info.reach.len() as u32
    }
}

impl Shared {
    /// The epoch's part, while it is this epoch's.
    pub(crate) fn is_of(&self, epoch: u64) -> bool {
        self.route.as_ref().is_some_and(|route| route.epoch == epoch)
    }

    fn route_of(&mut self, epoch: u64) -> Option<&mut Route> {
        self.route.as_mut().filter(|route| route.epoch == epoch)
    }

    /// Makes progress.
    pub(crate) fn poll(&mut self, now: Nanos) {
        self.device.poll(now, &mut self.events);
        if !self.events.is_empty() {
            self.sort();
        }
    }

    /// Moves as many events of an epoch as `into` has room for.
    pub(crate) fn take_events(&mut self, epoch: u64, into: &mut Vec<Event>) {
        let room = into.capacity() - into.len();
        if let Some(route) = self.route_of(epoch) {
            let count = room.min(route.events.len());
            into.extend(route.events.drain(..count));
        }
    }

    pub(crate) fn has_events(&self, epoch: u64) -> bool {
        self.route.as_ref().is_some_and(|route| route.epoch == epoch && !route.events.is_empty())
    }

    /// Begins a transfer or a signal of an epoch, which `submit` hands to the device under another
    /// name.
    pub(crate) fn submit(
        &mut self,
        epoch: u64,
        peer: Rank,
        id: TransferId,
        signal: Option<&Signal>,
        submit: impl FnOnce(&mut dyn Device, Rank, TransferId) -> Result<Submitted, SubmitError>,
    ) -> Result<Submitted, SubmitError> {
        let route = self.route.as_ref().filter(|route| route.epoch == epoch && !route.is_quiet);
        let Some(rank) = route.and_then(|route| route.ranks.get(peer as usize).copied()) else {
            return Err(SubmitError::Severed { peer });
        };
        if let Some(signal) = signal {
            let below = &mut self.pairs[rank as usize].signalled_below;
            *below = (*below).max(signal.signal_slot.saturating_add(1));
        }
        let number = self.next_transfer;
        let submitted = submit(&mut *self.device, rank, TransferId(number))?;
        if submitted == Submitted::UnderWay {
            self.next_transfer += 1;
            self.transfers.insert(number, (epoch, id));
        }
        Ok(submitted)
    }

    /// The engine of an epoch severs a peer: it has stopped.
    pub(crate) fn sever_in(&mut self, epoch: u64, peer: Rank) {
        let Some(route) = self.route_of(epoch) else { return };
        if let Some(severing) = route.severing.get_mut(peer as usize) {
            *severing = true;
        }
        self.stop();
        self.advance();
    }

    /// The engine of an epoch is gone.
    pub(crate) fn drop_engine(&mut self, epoch: u64) {
        if self.is_of(epoch) {
            self.stop();
            self.route = None;
            self.advance();
        }
    }

    /// The engine has stopped: it sends and receives no more.
    fn stop(&mut self) {
        let Some(route) = self.route.as_mut().filter(|route| !route.is_quiet) else { return };
        route.is_quiet = true;
        for (peer, rank) in (0..).zip(&route.ranks) {
            let (sent, received) = route.board.messages_with(peer);
            let messages = &mut self.pairs[*rank as usize].messages;
            messages.sent += sent;
            messages.received += received;
        }
    }

    /// Sorts the events.
    fn sort(&mut self) {
        for event in std::mem::take(&mut self.events) {
            match event {
                Event::Done { id, result } => self.ended(id, result),
                Event::Connected { peer } => {
                    self.pairs[peer as usize] = Pair { is_connected: true, ..Pair::default() };
                    self.pair_events.push(PairEvent::Connected(peer));
                }
                Event::PeerLost { peer, .. } | Event::Departed { peer } => {
                    self.pairs[peer as usize].is_connected = false;
                    self.pair_events.push(PairEvent::Lost(peer));
                }
                Event::Severed { peer } => {
                    let pair = &mut self.pairs[peer as usize];
                    (pair.is_severed, pair.is_connected) = (true, false);
                }
                Event::Drained { peer } => {
                    let pair = &mut self.pairs[peer as usize];
                    pair.drained += 1;
                    if pair.drained == pair.wanted {
                        self.pair_events.push(PairEvent::Drained { peer, record: pair.record });
                    }
                }
            }
        }
        self.events.reserve(EVENTS_MAX);
        self.advance();
    }

    fn ended(&mut self, id: TransferId, result: Result<u64, TransferError>) {
        let Some((epoch, id)) = self.transfers.remove(&id.0) else { return };
        if epoch == OF_SESSION {
            self.gets.push((id.0, result.is_ok()));
            return;
        }
        if let Some(route) = self.route_of(epoch) {
            let result = result.map_err(|error| route.as_of_epoch(error));
            route.events.push_back(Event::Done { id, result });
        }
    }

    /// Drains and severs what is to be, once the engine has stopped, and tells the engine of which
    /// peers it is fenced.
    fn advance(&mut self) {
        if self.route.as_ref().is_some_and(|route| !route.is_quiet) {
            return;
        }
        for (peer, pair) in (0..).zip(&mut self.pairs) {
            if pair.is_out && !pair.is_severing {
                pair.is_severing = true;
                self.device.sever(peer);
            }
            if !pair.is_out && pair.begun < pair.wanted {
                // Without room for it the peer looks at all its signal slots.
                let told = of_end(pair.record, pair.signalled_below, pair.messages);
                let _ = self.device.post(peer, &told, Urgency::Ordinary);
            }
            // A refusal but for want of room is that of a pair that has ended, of which an event
            // tells.
            while !pair.is_out && pair.begun < pair.wanted && self.device.drain(peer).is_ok() {
                pair.begun += 1;
                self.has_marks = true;
            }
        }
        let Some(route) = &mut self.route else { return };
        for (peer, severing) in (0..).zip(&mut route.severing) {
            let pair = &self.pairs[route.ranks[peer as usize] as usize];
            let is_fenced = pair.is_severed || pair.drained > route.drained_before[peer as usize];
            if *severing && is_fenced {
                *severing = false;
                route.events.push_back(Event::Severed { peer });
            }
        }
    }
}

impl Route {
    /// The error with the rank that the peer has in the epoch.
    fn as_of_epoch(&self, error: TransferError) -> TransferError {
        let of =
            |peer: Rank| self.ranks.iter().position(|rank| *rank == peer).map_or(peer, |rank| rank as Rank);
        match error {
            TransferError::Lost { peer, cause } => TransferError::Lost { peer: of(peer), cause },
            TransferError::Departed { peer } => TransferError::Departed { peer: of(peer) },
            TransferError::Severed { peer } => TransferError::Severed { peer: of(peer) },
            TransferError::Fabric { peer, error } => TransferError::Fabric { peer: of(peer), error },
            TransferError::Refused { peer, key } => TransferError::Refused { peer: of(peer), key },
            error => error,
        }
    }
}
