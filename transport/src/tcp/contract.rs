//! The device contract over [`TcpDevice`].

use std::io;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::lane::OutLane;
use super::pair::Goodbye;
use super::shared::{Order, Shared, Standing};
use super::{FABRIC, LINGER_LIMIT, Peer, QUEUE_DEPTH, TcpDevice, WATCHER_END_LIMIT, socket};
use crate::Rank;
use crate::cells::Cells;
use crate::clock::{self, Nanos};
use crate::device::{
    Address, Bell, Caps, ConnectError, Device, Event, MapError, Mapped, PostError, Reach, RegisterError,
    Ring, SubmitError, Submitted, Transfer, TransferError, TransferId,
};
use crate::memory::{Memory, Space, random_key};
use crate::region::{Region, RemoteSlice};

// SAFETY: the conformance suite tests each line of the contract.
#[allow(unsafe_code)]
unsafe impl Device for TcpDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reach(&self, _peer: Rank) -> Reach {
        let (fabric, queue_depth) = (FABRIC, QUEUE_DEPTH);
        Reach { fabric, maps: false, passive: false, sever_detaches: false, queue_depth }
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn address(&self) -> Address {
        self.address.clone()
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
        if peer >= self.world_size || peer == self.rank {
            return Err(ConnectError::Peer { peer, own: self.rank, world_size: self.world_size });
        }
        let target = socket::from_text(address)
            .ok_or_else(|| ConnectError::Address { fabric: FABRIC, address: address.clone() })?;
        if !target.ip().is_loopback() && !self.has_secret {
            let source = io::Error::new(
                io::ErrorKind::PermissionDenied,
                "a shared secret is required, since the address is not loopback; write one with 'pleach secret FILE' and set PLEACH_SECRET_FILE=FILE",
            );
            return Err(ConnectError::System { peer, address: address.clone(), source });
        }
        if matches!(self.peers[peer as usize], Peer::Idle) {
            self.peers[peer as usize] = Peer::Connecting;
            // Of two ranks the higher one dials, so that they never dial each other at once.
            let dial = (self.rank > peer).then_some(target);
            let deadline = clock::now() + self.connect_timeout;
            self.shared.order(Order::Connect { peer, dial, deadline });
        }
        Ok(())
    }

    fn sever(&mut self, peer: Rank) {
        self.shared.link(peer).end(Standing::Severed);
        self.shared.order(Order::Sever { peer });
        self.close(peer, Peer::Severed, &TransferError::Severed { peer });
        self.outbox.push_back(Event::Severed { peer });
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        if self.shared.has_mail() {
            // A key may have been taken back.
            self.take_mail();
        }
        let Some(state) = self.peers.get(peer as usize) else {
            return Err(SubmitError::NotConnected { peer });
        };
        match state {
            Peer::Open(open) if open.departed || self.leaving => return Err(SubmitError::Left { peer }),
            Peer::Open(_) => {}
            Peer::Idle | Peer::Connecting => return Err(SubmitError::NotConnected { peer }),
            Peer::Lost(cause) => return Err(SubmitError::Lost { peer, kind: cause.kind() }),
            Peer::Severed => return Err(SubmitError::Severed { peer }),
        }
        self.check(peer, &transfer)?;
        if let Peer::Open(open) = &mut self.peers[peer as usize] {
            open.pair.core.submit(transfer, id)?;
            if !open.pair.core.listed && open.suspect.is_none() {
                open.pair.core.listed = true;
                self.sending.push(peer);
            }
        }
        Ok(Submitted::UnderWay)
    }

    fn cells(&self, peer: Rank) -> Cells {
        self.cells[peer as usize].get_or_init(|| Cells::on_heap(self.cells_each)).clone()
    }

    fn post(&mut self, peer: Rank, message: &[u8]) -> Result<(), PostError> {
        self.post_user(peer, message, false)
    }

    fn post_urgent(&mut self, peer: Rank, message: &[u8]) -> Result<(), PostError> {
        self.post_user(peer, message, true)
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.now = now;
        self.unfinished = false;
        if self.shared.bell.is_rung() {
            self.shared.bell.silence();
        }
        if self.shared.has_mail() {
            self.take_mail();
        }
        if self.releases.any() {
            self.release_regions();
        }
        if !self.sending.is_empty() {
            self.flush_lanes();
        }
        self.receive();
        // Answers, and what could not go before the peer's word came.
        if !self.sending.is_empty() {
            self.flush_lanes();
        }
        self.convict_suspects();
        if self.shared.has_mail() {
            self.take_mail();
        }
        self.deliver(events);
    }

    fn arm(&mut self) -> Option<Bell> {
        let rung = self.shared.bell.silence();
        let sendable = self.sending.iter().any(|peer| match &self.peers[*peer as usize] {
            Peer::Open(open) => open.pair.core.out.iter().any(OutLane::is_ready),
            _ => false,
        });
        if rung || sendable || self.unfinished || self.shared.has_mail() || !self.outbox.is_empty() {
            return None;
        }
        for (peer, state) in self.peers.iter_mut().enumerate() {
            if let Peer::Open(open) = state
                && Self::watch(&self.epoll, peer as Rank, open).is_err()
            {
                return None;
            }
        }
        Some(Bell::File(Arc::clone(&self.epoll)))
    }

    fn ringer(&self) -> Arc<dyn Ring> {
        Arc::new(Ringer(Arc::clone(&self.shared)))
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let suspects = self.open.iter().filter_map(|peer| match &self.peers[*peer as usize] {
            Peer::Open(open) => open.suspect.as_ref().map(|(until, _)| *until),
            _ => None,
        });
        suspects.min()
    }

    fn leave(&mut self) {
        self.leaving = true;
        for peer in 0..self.world_size {
            if let Peer::Open(open) = &mut self.peers[peer as usize] {
                if open.pair.core.goodbye == Goodbye::No {
                    open.pair.core.goodbye = Goodbye::Wanted;
                }
                open.pair.core.say_goodbye();
                self.list_sending(peer);
            }
        }
        self.flush_lanes();
    }

    fn flush(&mut self) -> bool {
        if !self.sending.is_empty() {
            self.flush_lanes();
        }
        self.peers.iter().all(|peer| match peer {
            Peer::Open(open) => open.suspect.is_none() && open.pair.is_flushed(),
            _ => true,
        })
    }

    fn is_flushed(&self) -> bool {
        self.peers.iter().zip(&self.shared.links).all(|(peer, link)| match peer {
            Peer::Open(open) => open.suspect.is_none() && open.pair.is_flushed() && !link.has_output(),
            _ => true,
        })
    }
}

impl Drop for TcpDevice {
    fn drop(&mut self) {
        let linger = if self.leaving { LINGER_LIMIT } else { Duration::ZERO };
        // The lanes close before the goodbye's stream does, so that peers read what was sent first.
        self.peers.clear();
        self.shared.order(Order::Stop { linger_until: clock::now() + linger });
        if let Some(watcher) = self.watcher.take() {
            // Not when the watcher itself drops the device, through its responder: it ends when it
            // returns from there.
            let is_watcher = watcher.thread().id() == std::thread::current().id();
            let limit = if is_watcher { Duration::ZERO } else { linger + WATCHER_END_LIMIT };
            let end = self.watcher_end.get_mut().unwrap_or_else(PoisonError::into_inner);
            match end.recv_timeout(limit) {
                Err(RecvTimeoutError::Timeout) if is_watcher => {}
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!(rank = self.rank, "the responder blocks; its thread is left behind");
                }
                // A panic there was reported by the thread itself.
                _ => drop(watcher.join()),
            }
        }
        for link in &self.shared.links {
            link.close();
        }
    }
}

struct Ringer(Arc<Shared>);

impl Ring for Ringer {
    fn ring(&self) {
        self.0.bell.ring();
    }
}
