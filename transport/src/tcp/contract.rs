//! The device contract over [`TcpDevice`].

use std::sync::Arc;

use super::connection::OutConnection;
use super::pair::{ByeState, PairState};
use super::{FABRIC, Peer, TcpDevice};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{
    Address, Armed, ConnectError, Device, DeviceInfo, Event, Flush, MapError, PostError, RegisterError,
    SubmitError, Submitted, Transfer, TransferError, TransferId, Urgency, WakeSource,
};
use crate::memory::{Memory, Space};
use crate::region::{Mapped, Region, RemoteSlice, random_key};
use crate::signals::{Signal, Signals};

// SAFETY: the conformance suite tests each line of the contract.
#[allow(unsafe_code)]
unsafe impl Device for TcpDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        match memory.space() {
            Space::Host => {}
            space => return Err(RegisterError::Space { fabric: FABRIC, space }),
        }
        let region = Region::new(memory, random_key(), Arc::clone(&self.registry));
        self.regions.insert(&region);
        Ok(region)
    }

    fn map(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<Mapped, MapError> {
        Err(MapError::Unsupported { fabric: FABRIC })
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.control.connect(peer, address)?;
        if let Some(slot @ Peer::Idle) = self.peers.get_mut(peer as usize) {
            *slot = Peer::Connecting;
        }
        Ok(())
    }

    fn sever(&mut self, peer: Rank) {
        self.control.sever(peer);
        self.close(peer, Peer::Severed, &TransferError::Severed { peer });
        self.event_queue.push_back(Event::Severed { peer });
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        self.expect_open(peer)?;
        self.check(peer, &transfer)?;
        self.queue(peer, |state| state.submit(transfer, id))
    }

    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError> {
        self.expect_open(peer)?;
        self.expect_room(peer)?;
        self.queue(peer, |state| state.signal(signal, id))
    }

    fn signal_slots(&self, peer: Rank) -> Signals {
        self.signal_slots[peer as usize].get_or_init(|| Signals::new(self.info.signal_slots)).clone()
    }

    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        self.post_message(peer, message, urgency == Urgency::Urgent)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.now = now;
        self.unfinished = false;
        if self.control.wake_source().is_set() {
            self.control.wake_source().drain();
        }
        if self.control.has_events() {
            self.take_events();
        }
        if self.releases.has_any() {
            self.release_regions();
        }
        if !self.sending.is_empty() {
            self.flush_connections();
        }
        self.receive();
        // Answers, and frames that had to wait for a frame of the peer.
        if !self.sending.is_empty() {
            self.flush_connections();
        }
        self.expire_suspects();
        if self.control.has_events() {
            self.take_events();
        }
        self.deliver(events);
    }

    fn arm(&mut self) -> Option<Armed> {
        let is_woken = self.control.wake_source().drain();
        let sendable = self.sending.iter().any(|peer| match &self.peers[*peer as usize] {
            Peer::Open(open) => open.pair.state.out.iter().any(OutConnection::is_ready),
            _ => false,
        });
        if is_woken
            || sendable
            || self.unfinished
            || self.control.has_events()
            || !self.event_queue.is_empty()
        {
            return None;
        }
        for (peer, state) in self.peers.iter_mut().enumerate() {
            if let Peer::Open(open) = state
                && Self::watch(&self.epoll, peer as Rank, open).is_err()
            {
                return None;
            }
        }
        let suspects = self.open.iter().filter_map(|peer| match &self.peers[*peer as usize] {
            Peer::Open(open) => open.suspect.as_ref().map(|(until, _)| *until),
            _ => None,
        });
        Some(Armed { wake_source: WakeSource::File(Arc::clone(&self.epoll)), until: suspects.min() })
    }

    fn leave(&mut self) {
        self.is_leaving = true;
        for peer in 0..self.control.world_size() {
            if let Peer::Open(open) = &mut self.peers[peer as usize] {
                if open.pair.state.bye == ByeState::No {
                    open.pair.state.bye = ByeState::Wanted;
                }
                open.pair.state.queue_bye();
                self.list_sending(peer);
            }
        }
        self.flush_connections();
    }

    fn flush(&mut self, scope: Flush) -> bool {
        if !self.sending.is_empty() {
            self.flush_connections();
        }
        (0..).zip(&self.peers).all(|(rank, peer)| match peer {
            Peer::Open(open) => {
                let is_sent = open.suspect.is_none() && open.pair.is_flushed();
                is_sent && (scope == Flush::Transfers || !self.control.has_output(rank))
            }
            _ => true,
        })
    }
}

impl TcpDevice {
    /// Whether transfers to a peer are accepted.
    fn expect_open(&mut self, peer: Rank) -> Result<(), SubmitError> {
        if self.control.has_events() {
            // The owner of a key may have revoked it.
            self.take_events();
        }
        match self.peers.get(peer as usize) {
            Some(Peer::Open(open)) if open.departed || self.is_leaving => Err(SubmitError::Departed { peer }),
            Some(Peer::Open(_)) => Ok(()),
            None | Some(Peer::Idle | Peer::Connecting) => Err(SubmitError::NotConnected { peer }),
            Some(Peer::Lost(cause)) => Err(SubmitError::Lost { peer, kind: cause.kind() }),
            Some(Peer::Severed) => Err(SubmitError::Severed { peer }),
        }
    }

    /// Queues a frame for an open peer, and lists the peer among those to send to.
    fn queue(
        &mut self,
        peer: Rank,
        queue: impl FnOnce(&mut PairState) -> Result<(), SubmitError>,
    ) -> Result<Submitted, SubmitError> {
        if let Peer::Open(open) = &mut self.peers[peer as usize] {
            queue(&mut open.pair.state)?;
            if !open.pair.state.is_listed && open.suspect.is_none() {
                open.pair.state.is_listed = true;
                self.sending.push(peer);
            }
        }
        Ok(Submitted::UnderWay)
    }
}
