//! The watcher's packets: the handshake, and the frames of connected peers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll;
use rustix::io::Errno;

use super::{ConnectState, Phase, Watcher};
use crate::Rank;
use crate::auth::{Challenges, Side, TAG_BYTES, challenge};
use crate::control::SECOND_DESCRIPTOR;
use crate::control::packet::{self, Packet, send};
use crate::cuda::GpuId;
use crate::device::{LossCause, MESSAGE_BYTES_MAX, ProtocolViolation};
use crate::region::RegionKey;
use crate::shm::frame::{Claim, Frame, PROTOCOL_VERSION, Reason, decode};
use crate::shm::link::{GpuFile, Link, PeerRegion, REGIONS_MAX, slot_of};
use crate::shm::mapping::check;
use crate::shm::peer_status::{ConnectionEnd, SlotState};

impl Watcher {
    /// Sends the hello on a dialed stream.
    pub(super) fn send_hello(&mut self, peer: Rank, stream: OwnedFd) {
        if !packet::is_same_user(&stream) {
            return self.lose(peer, LossCause::ConnectionBroke(std::io::ErrorKind::PermissionDenied));
        }
        let challenge = challenge();
        let frame = Frame::Hello { claim: self.claim(peer), challenge };
        match self.add(stream, Phase::AwaitWelcome { peer, challenge }) {
            Some(index) => self.send_frame(index, &frame, &[]),
            None => self.lose(peer, LossCause::ConnectionBroke(std::io::ErrorKind::OutOfMemory)),
        }
    }

    /// Handles a packet of a connection. An error costs the connection, and with it the peer.
    pub(super) fn packet(&mut self, index: usize, bytes: &[u8], packet: Packet) -> Result<(), LossCause> {
        let frame = decode(bytes).inspect_err(|violation| {
            if *violation == ProtocolViolation::Version {
                self.send_frame(index, &Frame::Reject(Reason::Version), &[]);
            }
        })?;
        if packet.files.len() != frame.files() && !packet.files_lost {
            return Err(ProtocolViolation::MalformedFrame.into());
        }
        let Some(phase) = self.phase(index) else { return Ok(()) };
        if packet.files_lost && matches!(phase, Phase::AwaitGrant { .. } | Phase::AwaitAccept { .. }) {
            return Err(LossCause::unconnected(&Errno::MFILE.into()));
        }
        match (phase, frame) {
            (Phase::Unauthenticated { .. }, Frame::Hello { claim, challenge }) => {
                self.handle_hello(index, claim, challenge)
            }
            (
                &Phase::AwaitWelcome { peer, challenge },
                Frame::Welcome { claim, challenge: theirs, answer },
            ) => {
                let challenges = Challenges::new(Side::Dialer, challenge, theirs);
                self.handle_welcome(index, peer, claim, &challenges, &answer)?;
            }
            (&Phase::AwaitGrant { peer, signal_slots, challenges }, Frame::Grant { answer }) => {
                let claim = self.claim_of(peer, signal_slots).to_bytes();
                if !challenges.verify(self.secret.as_ref(), &claim, &answer) {
                    self.send_frame(index, &Frame::Reject(Reason::Secret), &[]);
                    return Err(ProtocolViolation::WrongSecret.into());
                }
                let (link, process) = Link::from_files(packet.files, signal_slots)?;
                self.send_frame_with_files(index, peer, &Frame::Accept);
                self.open(index, peer, link, process);
            }
            (&Phase::AwaitAccept { peer, signal_slots }, Frame::Accept) => {
                let (link, process) = Link::from_files(packet.files, signal_slots)?;
                self.open(index, peer, link, process);
            }
            (
                Phase::AwaitWelcome { .. } | Phase::AwaitGrant { .. } | Phase::AwaitAccept { .. },
                Frame::Reject(reason),
            ) => return Err(ProtocolViolation::from(reason).into()),
            (&Phase::Open { peer, .. }, Frame::Announce { slot, key, offset, len }) => {
                self.handle_announce(peer, slot, key, offset, len, packet)?;
            }
            (&Phase::Open { peer, .. }, Frame::AnnounceGpu { slot, key, bytes, len, gpu }) => {
                self.handle_announce_gpu(peer, slot, (key, bytes, len, gpu), packet)?;
            }
            (&Phase::Open { peer, .. }, Frame::Revoke { slot }) => {
                in_table(slot)?;
                let before = self.shared.peer_status().status_of(peer).set(slot, SlotState::Empty);
                self.shared.publish();
                drop(before);
            }
            (&Phase::Open { peer, .. }, Frame::Message(message)) => self.message(peer, message),
            (&Phase::Open { peer, has_sent_bye: false }, Frame::Bye) => {
                self.set_phase(index, Phase::Open { peer, has_sent_bye: true });
                self.shared.peer_status().status_of(peer).end = Some(ConnectionEnd::Departed);
                self.shared.publish();
            }
            _ => return Err(ProtocolViolation::MalformedFrame.into()),
        }
        Ok(())
    }

    /// Answers the hello of a peer that this rank is connecting to, with a proof of the secret.
    pub(super) fn send_welcome(&mut self, index: usize) {
        let Some(&Phase::Parked { peer, signal_slots, challenge: theirs }) = self.phase(index) else {
            return;
        };
        let ours = challenge();
        let claim = self.claim(peer);
        let challenges = Challenges::new(Side::Listener, ours, theirs);
        let answer = challenges.answer(self.secret.as_ref(), &claim.to_bytes());
        self.set_phase(index, Phase::AwaitGrant { peer, signal_slots, challenges });
        self.send_frame(index, &Frame::Welcome { claim, challenge: ours, answer }, &[]);
    }

    fn handle_hello(&mut self, index: usize, claim: Claim, challenge: [u8; TAG_BYTES]) {
        let peer = claim.from;
        let is_possible = claim.to == self.shared.rank
            && claim.world_size == self.shared.world_size
            && peer > self.shared.rank
            && peer < self.shared.world_size;
        // Of two connections that claim the same rank the first counts.
        let is_first = is_possible
            && matches!(
                self.connect_states[peer as usize],
                ConnectState::NotRequested | ConnectState::Connection { .. }
            )
            && self.connections.iter().all(|(_, other)| other.phase.peer() != Some(peer));
        if !is_first {
            self.send_frame(index, &Frame::Reject(Reason::Rank), &[]);
            return self.close(index);
        }
        self.set_phase(index, Phase::Parked { peer, signal_slots: claim.signal_slots, challenge });
        if matches!(self.connect_states[peer as usize], ConnectState::Connection { .. }) {
            self.send_welcome(index);
        }
    }

    /// Handles a welcome: if it proves the secret, sends its own proof and the files.
    fn handle_welcome(
        &mut self,
        index: usize,
        peer: Rank,
        claim: Claim,
        challenges: &Challenges,
        answer: &[u8; TAG_BYTES],
    ) -> Result<(), ProtocolViolation> {
        if claim != self.claim_of(peer, claim.signal_slots) {
            self.send_frame(index, &Frame::Reject(Reason::Rank), &[]);
            return Err(ProtocolViolation::WrongRank);
        }
        if !challenges.verify(self.secret.as_ref(), &claim.to_bytes(), answer) {
            self.send_frame(index, &Frame::Reject(Reason::Secret), &[]);
            return Err(ProtocolViolation::WrongSecret);
        }
        let own = self.claim(peer).to_bytes();
        let answer = challenges.answer(self.secret.as_ref(), &own);
        self.set_phase(index, Phase::AwaitAccept { peer, signal_slots: claim.signal_slots });
        self.send_frame_with_files(index, peer, &Frame::Grant { answer });
        Ok(())
    }

    /// Both ends are authenticated and have exchanged their files.
    fn open(&mut self, index: usize, peer: Rank, link: Link, process: OwnedFd) {
        let token = self.connections.token(index);
        let Some(connection) = self.connections.value_mut(index) else { return };
        let data = epoll::EventData::new_u64(token | SECOND_DESCRIPTOR);
        if epoll::add(&*self.shared.epoll, &process, data, epoll::EventFlags::IN).is_err() {
            return self.fail(index, ProtocolViolation::UnsafeFile.into());
        }
        connection.process = Some(process);
        connection.phase = Phase::Open { peer, has_sent_bye: false };
        self.connect_states[peer as usize] = ConnectState::Settled;
        let stream = connection.stream.clone();
        // The stream is entered before the device can see the link, because the device's first
        // posts look the stream up.
        if self.shared.directory().open(peer, stream, token) {
            self.shared.peer_status().status_of(peer).link = Some(link);
            self.shared.publish();
        } else {
            self.close(index);
        }
    }

    fn handle_announce(
        &mut self,
        peer: Rank,
        slot: u16,
        key: RegionKey,
        offset: u64,
        len: u64,
        packet: Packet,
    ) -> Result<(), ProtocolViolation> {
        in_table(slot)?;
        if slot_of(key) != slot || key == RegionKey::NONE {
            return Err(ProtocolViolation::MalformedFrame);
        }
        let state = match packet.files.first() {
            None => {
                tracing::warn!(peer, "a region cannot be mapped: too many open files (ulimit -n)");
                SlotState::Unmappable(key)
            }
            Some(file) => {
                let end = offset.checked_add(len).ok_or(ProtocolViolation::MalformedFrame)?;
                check(file.as_fd(), end)?;
                self.map(peer, key, file, offset, len)
            }
        };
        let before = self.shared.peer_status().status_of(peer).set(slot, state);
        self.shared.publish();
        // Unmapping may take long, so not under the lock.
        drop(before);
        Ok(())
    }

    /// A region on a GPU: its file is for the driver, which checks it at the first use.
    fn handle_announce_gpu(
        &mut self,
        peer: Rank,
        slot: u16,
        (key, bytes, len, gpu): (RegionKey, u64, u64, GpuId),
        packet: Packet,
    ) -> Result<(), ProtocolViolation> {
        in_table(slot)?;
        if slot_of(key) != slot || key == RegionKey::NONE || len > bytes {
            return Err(ProtocolViolation::MalformedFrame);
        }
        let has_room = self.shared.peer_status().status_of(peer).has_room(len);
        let state = match packet.files.into_iter().next() {
            Some(file) if has_room => {
                SlotState::Mapped(Arc::new(PeerRegion::on_gpu(key, GpuFile { file, bytes, gpu }, len)))
            }
            _ => {
                tracing::warn!(peer, len, "a region on a GPU cannot be taken: too many open files or bytes");
                SlotState::Unmappable(key)
            }
        };
        let before = self.shared.peer_status().status_of(peer).set(slot, state);
        self.shared.publish();
        drop(before);
        Ok(())
    }

    fn map(&self, peer: Rank, key: RegionKey, file: &OwnedFd, offset: u64, len: u64) -> SlotState {
        if !self.shared.peer_status().status_of(peer).has_room(len) {
            tracing::warn!(peer, len, "a region cannot be mapped: the peer has too many bytes registered");
            return SlotState::Unmappable(key);
        }
        match PeerRegion::new(key, file, offset, len) {
            Ok(region) => SlotState::Mapped(Arc::new(region)),
            Err(error) => {
                tracing::warn!(peer, len, %error, "a region cannot be mapped (vm.max_map_count, ulimit -v)");
                SlotState::Unmappable(key)
            }
        }
    }

    fn message(&mut self, peer: Rank, message: &[u8]) {
        if let Some(answer) = self.responder.message(peer, message) {
            if answer.len() <= MESSAGE_BYTES_MAX {
                self.shared.directory().answer(peer, &answer);
            } else {
                tracing::error!(peer, bytes = answer.len(), "an answer is too long to be sent");
            }
        }
        crate::device::Wake::wake(&*self.shared);
    }

    fn claim(&self, to: Rank) -> Claim {
        Claim {
            version: PROTOCOL_VERSION,
            from: self.shared.rank,
            to,
            world_size: self.shared.world_size,
            signal_slots: self.shared.signal_slots.each() as u32,
        }
    }

    /// The claim of a peer with `signal_slots`.
    fn claim_of(&self, from: Rank, signal_slots: u32) -> Claim {
        Claim { from, to: self.shared.rank, signal_slots, ..self.claim(from) }
    }

    fn set_phase(&mut self, index: usize, phase: Phase) {
        if let Some(connection) = self.connections.value_mut(index) {
            connection.phase = phase;
        }
    }

    fn send_frame_with_files(&mut self, index: usize, peer: Rank, frame: &Frame<'_>) {
        let shared = self.shared.clone();
        let Some(signal_slots) = shared.signal_slots.of(peer).take_file() else { return };
        let own = &shared.own;
        let files = [own.process.as_fd(), signal_slots.as_fd(), own.wake_file.as_fd(), own.keys_file.as_fd()];
        self.send_frame(index, frame, &files);
    }

    /// Sends a packet of a handshake, for which a new stream has room. If it fails all the same,
    /// the stream is broken, and its end or the deadline is detected.
    fn send_frame(&mut self, index: usize, frame: &Frame<'_>, files: &[BorrowedFd<'_>]) {
        if let Some(connection) = self.connections.value(index)
            && let Err(errno) = send(&connection.stream, &frame.encode(), files)
        {
            tracing::debug!(%errno, "a handshake packet was not sent");
        }
    }
}

fn in_table(slot: u16) -> Result<(), ProtocolViolation> {
    if usize::from(slot) < REGIONS_MAX { Ok(()) } else { Err(ProtocolViolation::MalformedFrame) }
}
