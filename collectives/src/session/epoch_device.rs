//! The view that an epoch's engine has of the session's device: its ranks are those of the epoch.
//!
//! The view keeps the contract of [`Device`] for one epoch. Severing a peer through it ends what
//! the peer does in this epoch: the pair is drained, or severed for good where the peer is out
//! ([`SharedDevice`]). The pair itself goes on.
#![allow(unsafe_code)]

use std::sync::Arc;

use pleach_transport::{
    Address, Armed, ConnectError, Device, DeviceInfo, Event, Flush, Incarnation, MapError, Mapped, Meeting,
    Memory, Nanos, PostError, Reach, ReadOnlyMapped, Region, RegisterError, RemoteSlice, Signal, Signals,
    SubmitError, Submitted, Transfer, TransferId, Urgency,
};
use pleach_vocabulary::Rank;

use super::envelope::of_engine;
use super::shared_device::SharedDevice;
use crate::engine::StatusBoard;

/// See the module.
pub(crate) struct EpochDevice {
    shared: Arc<SharedDevice>,
    epoch: u64,
    info: DeviceInfo,
    /// By rank of the epoch: the rank of the device.
    ranks: Vec<Rank>,
}

impl EpochDevice {
    /// The view of an epoch with these members, ranks of the device, one of which is this rank, for
    /// the engine that has this board. The engines of epochs before have stopped.
    pub(crate) fn new(
        shared: Arc<SharedDevice>,
        epoch: u64,
        ranks: Vec<Rank>,
        board: Arc<StatusBoard>,
    ) -> Self {
        let of = shared.info();
        let own = ranks.iter().position(|rank| *rank == of.rank).expect("this rank is a member");
        let reach: Vec<Reach> = ranks.iter().map(|rank| shared.reach(*rank)).collect();
        let info = DeviceInfo { rank: own as Rank, reach, ..of.clone() };
        shared.begin(epoch, &ranks, board);
        Self { shared, epoch, info, ranks }
    }

    fn of(&self, peer: Rank) -> Option<Rank> {
        self.ranks.get(peer as usize).copied()
    }
}

// SAFETY: the device behind keeps the contract, and this passes its calls on, with the ranks of the
// epoch. It is stricter in two things: after the engine has stopped no transfer is taken, and
// `Severed` is told when the pair was drained or its peer severed. After a drain nothing of what
// the peer had submitted before reads or changes memory (line 17), and what it submits later
// belongs to another epoch, whose engine begins after this one has ended.
unsafe impl Device for EpochDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.shared.register(memory)
    }

    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        // A rank that there is not is refused by the device.
        let peer = self.of(peer).unwrap_or(Rank::MAX);
        self.shared.lock().device.register_for(peer, memory)
    }

    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError> {
        let rank = self.of(peer).ok_or(MapError::Disconnected { peer })?;
        self.shared.lock().device.map(rank, slice)
    }

    fn map_read_only(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        let rank = self.of(peer).ok_or(MapError::Disconnected { peer })?;
        self.shared.lock().device.map_read_only(rank, slice)
    }

    fn connect(&mut self, _peer: Rank, _address: &Address) -> Result<(), ConnectError> {
        // The session has connected the members.
        Ok(())
    }

    fn meet(&mut self, peer: Rank, _meeting: Meeting<'_>) -> Result<(), ConnectError> {
        let (own, world_size) = (self.info.rank, self.ranks.len() as u32);
        Err(ConnectError::Peer { peer, own, world_size })
    }

    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.shared.lock().device.incarnation(self.of(peer)?)
    }

    fn sever(&mut self, peer: Rank) {
        self.shared.lock().sever_in(self.epoch, peer);
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        let signal = match &transfer {
            Transfer::Put { signal, .. } => *signal,
            _ => None,
        };
        let mut shared = self.shared.lock();
        shared.submit(self.epoch, peer, id, signal.as_ref(), |device, rank, id| {
            device.submit(rank, transfer, id)
        })
    }

    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError> {
        let mut shared = self.shared.lock();
        shared.submit(self.epoch, peer, id, Some(signal), |device, rank, id| device.signal(rank, signal, id))
    }

    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        // The session drains, between epochs.
        Err(SubmitError::NotConnected { peer })
    }

    /// # Panics
    ///
    /// When there is no such rank.
    fn signal_slots(&self, peer: Rank) -> Signals {
        self.shared.lock().device.signal_slots(self.ranks[peer as usize])
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        let rank = self.of(peer).ok_or(PostError::NotConnected { peer })?;
        let mut shared = self.shared.lock();
        if !shared.is_of(self.epoch) {
            return Err(PostError::NotConnected { peer });
        }
        shared.device.post(rank, &of_engine(self.epoch, message), urgency)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        let mut shared = self.shared.lock();
        shared.poll(now);
        shared.take_events(self.epoch, events);
        self.shared.tell(&shared);
    }

    fn arm(&mut self) -> Option<Armed> {
        let mut shared = self.shared.lock();
        if shared.has_events(self.epoch) { None } else { shared.device.arm() }
    }

    fn exchange_processors(&mut self, own: u32, visit: &mut dyn FnMut(Rank, u32)) {
        let ranks = &self.ranks;
        self.shared.lock().device.exchange_processors(own, &mut |peer, processor| {
            if let Some(rank) = ranks.iter().position(|rank| *rank == peer) {
                visit(rank as Rank, processor);
            }
        });
    }

    fn leave(&mut self) {
        // The pairs go on.
    }

    fn flush(&mut self, scope: Flush) -> bool {
        self.shared.lock().device.flush(scope)
    }
}

impl Drop for EpochDevice {
    fn drop(&mut self) {
        self.shared.lock().drop_engine(self.epoch);
    }
}
