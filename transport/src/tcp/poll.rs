//! A poll's work on sockets: sending, receiving, and giving up peers that stay silent after their
//! connection broke.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;

use super::connection::InConnection;
use super::pair::{ByeState, Outcome};
use super::{OpenPeer, Peer, TcpDevice};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{LossCause, TransferError};

/// Up to this number of open peers a poll reads all their sockets; with more peers epoll first
/// tells which sockets are ready.
const DIRECT_PEERS_MAX: usize = 4;

/// Peers that one poll serves at most when epoll tells which are ready; the next poll serves the
/// others.
const READY_MAX: usize = 64;

/// How long a poll waits for the bye of a peer whose connection broke, from the last bytes on.
const BYE_GRACE: Duration = Duration::from_millis(500);

impl TcpDevice {
    /// Sends what the sockets take.
    pub(super) fn flush_connections(&mut self) {
        let mut sending = std::mem::take(&mut self.sending);
        sending.retain(|peer| {
            let Peer::Open(open) = &mut self.peers[*peer as usize] else { return false };
            let said = open.pair.state.bye;
            match open.pair.state.flush(&mut self.event_queue) {
                Ok(()) => {}
                Err(_) if open.departed => {
                    open.pair.state.fail_all(
                        &TransferError::Departed { peer: *peer },
                        false,
                        &mut self.event_queue,
                    );
                    open.pair.state.bye = ByeState::Sent;
                }
                Err(cause) => {
                    open.suspect.get_or_insert((self.now + BYE_GRACE, cause));
                    open.pair.state.is_listed = false;
                    return false;
                }
            }
            open.pair.state.queue_bye();
            if said != ByeState::Sent && open.pair.state.bye == ByeState::Sent {
                self.control.send_bye(*peer);
            }
            open.pair.state.is_listed = open.pair.state.has_output();
            open.pair.state.is_listed
        });
        // The list had no other additions meanwhile.
        self.sending = sending;
    }

    fn receive_from(&mut self, peer: Rank) {
        let Peer::Open(open) = &mut self.peers[peer as usize] else { return };
        if open.departed || open.is_silent {
            return;
        }
        let outcome = open.pair.receive(&mut self.regions, &mut self.event_queue);
        if let Some((until, _)) = &mut open.suspect
            && open.pair.incoming.iter().any(InConnection::has_received)
        {
            *until = self.now + BYE_GRACE;
        }
        if open.pair.state.bye == ByeState::Wanted {
            open.pair.state.queue_bye();
        }
        match outcome {
            Ok(Outcome::Idle) => self.list_sending(peer),
            Ok(Outcome::More) => {
                self.unfinished = true;
                self.list_sending(peer);
            }
            Ok(Outcome::Left) => {
                self.departed(peer);
                self.list_sending(peer);
            }
            Err(cause @ LossCause::Protocol(_)) => self.control.lose_at_once(peer, cause),
            // The peer's last message is on the control stream, which the watcher reads; a
            // connection may end before that.
            Err(cause) => {
                open.is_silent = true;
                open.suspect.get_or_insert((self.now + BYE_GRACE, cause));
            }
        }
    }

    pub(super) fn receive(&mut self) {
        if self.open.len() <= DIRECT_PEERS_MAX {
            // By index, because a departing peer leaves the list. A peer that is skipped by that is
            // served by the next poll.
            let mut at = 0;
            while let Some(peer) = self.open.get(at).copied() {
                self.receive_from(peer);
                at += 1;
            }
            return;
        }
        // Announced data are under way already: no need to ask.
        let mut at = 0;
        while let Some(peer) = self.open.get(at).copied() {
            if let Peer::Open(open) = &self.peers[peer as usize]
                && open.pair.expects_more()
            {
                self.receive_from(peer);
            }
            at += 1;
        }
        let mut space = [const { MaybeUninit::uninit() }; READY_MAX];
        let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        // After an interruption no peer is known to be ready, and the next poll asks again.
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut space, Some(&at_once)) else { return };
        self.unfinished |= ready.len() == READY_MAX;
        for event in ready {
            let token = event.data.u64();
            if token < u64::from(self.control.world_size()) {
                self.receive_from(token as Rank);
            }
        }
    }

    pub(super) fn expire_suspects(&mut self) {
        for at in 0..self.open.len() {
            let peer = self.open[at];
            if let Peer::Open(open) = &mut self.peers[peer as usize]
                && let Some((until, cause)) = &mut open.suspect
                && self.now >= *until
            {
                // This process may have been stopped all that time, and its watcher too.
                *until = Nanos::MAX;
                self.control.lose(peer, cause.clone());
            }
        }
    }

    /// Makes the epoll descriptor readable exactly when a connection of this peer can proceed.
    pub(super) fn watch(epoll: &OwnedFd, peer: Rank, open: &mut OpenPeer) -> rustix::io::Result<()> {
        for connection in 0..open.pair.incoming.len() {
            let expects = !open.is_silent && open.pair.expects(connection);
            let incoming = &mut open.pair.incoming[connection];
            let socket = incoming.socket.as_fd();
            watch_socket(epoll, peer, (socket, epoll::EventFlags::IN), &mut incoming.watched, expects)?;
        }
        let suspect = open.suspect.is_some();
        for connection in &mut open.pair.state.out {
            let waits = !connection.is_empty() && !suspect;
            let socket = connection.socket.as_fd();
            watch_socket(epoll, peer, (socket, epoll::EventFlags::OUT), &mut connection.watched, waits)?;
        }
        Ok(())
    }
}

/// Adds the socket to epoll or removes it, if that changes.
fn watch_socket(
    epoll: &OwnedFd,
    peer: Rank,
    (socket, readiness): (BorrowedFd<'_>, epoll::EventFlags),
    is_watched: &mut bool,
    wanted: bool,
) -> rustix::io::Result<()> {
    if wanted == *is_watched {
        return Ok(());
    }
    if wanted {
        epoll::add(epoll, socket, epoll::EventData::new_u64(u64::from(peer)), readiness)?;
    } else {
        epoll::delete(epoll, socket)?;
    }
    *is_watched = wanted;
    Ok(())
}
