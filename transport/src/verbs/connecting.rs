//! The connecting of a pair without the connection manager. The control stream opens; each end
//! sends its queue pairs in a hello; each end sends "ready"; each end waits until a write of no
//! bytes is acknowledged on each queue pair. A queue pair that is connected may still have no path,
//! and this is found now rather than in the first operation.
//!
//! [`cm`](super::cm) has the way with the connection manager.
//!
//! An end that refuses the connection sends the reason ([`Refusal`]) and waits until the other end
//! has read it, so that both report the cause.

use std::io;
use std::time::Duration;

use super::Nic;
use super::cm::{CmState, ConnectFailure, ListenerAddress};
use super::pair::Pair;
use super::pair_error::PairError;
use super::wire::Refusal;
use super::wire::{Announcement, PairHello, QueuePairHello};
use super::{ControlMessage, Peer, VerbsDevice};
use super::{hint, refused};
use crate::Rank;
use crate::clock::{self, Nanos};
use crate::device::{Device, Event, LossCause, ProtocolViolation, TransferError};

use crate::region::{RegionKey, random_key};

/// Announced regions of a peer that are stored; transfers to further regions are not striped.
const REMOTE_REGIONS_MAX: usize = 1 << 16;

/// How long a refused peer has time to read the reason and close the stream.
const REFUSAL_GRACE: Duration = Duration::from_secs(2);

/// The state of a pair that is connecting.
pub(super) struct Connecting {
    /// When the peer is given up. It comes earlier once the connection is refused.
    deadline: Nanos,
    /// From the opening of the control stream until this rank refuses the connection.
    pair: Option<Pair>,
    hello: Option<PairHello>,
    is_connected: bool,
    peer_is_ready: bool,
    /// Writes of no bytes are under way, or were acknowledged.
    is_probed: bool,
    /// The connection is refused; the peer has been told.
    is_refused: bool,
    /// The peer's listener, until this rank connects to it.
    listener: Option<ListenerAddress>,
    cm_state: CmState,
}

impl Connecting {
    pub(super) fn new(deadline: Nanos) -> Self {
        Self {
            deadline,
            pair: None,
            hello: None,
            is_connected: false,
            peer_is_ready: false,
            is_probed: false,
            is_refused: false,
            listener: None,
            cm_state: CmState::default(),
        }
    }

    pub(super) fn deadline(&self) -> Nanos {
        self.deadline
    }

    pub(super) fn pair(&self) -> Option<&Pair> {
        self.pair.as_ref()
    }

    pub(super) fn pair_mut(&mut self) -> Option<&mut Pair> {
        self.pair.as_mut()
    }

    pub(super) fn into_pair(self) -> Option<Pair> {
        self.pair
    }

    /// The state of this pair in the connection manager.
    pub(super) fn cm_state(&mut self) -> &mut CmState {
        &mut self.cm_state
    }

    /// The peer's listener, which this rank is about to use.
    pub(super) fn take_listener(&mut self) -> Option<ListenerAddress> {
        self.listener.take()
    }

    /// The connection manager has connected all queue pairs.
    pub(super) fn mark_connected(&mut self) {
        self.is_connected = true;
    }

    /// The connection is refused: waits until the end that refused it is understood.
    pub(super) fn await_end(&mut self) {
        self.is_refused = true;
        self.deadline = self.deadline.min(clock::now() + REFUSAL_GRACE);
    }

    /// Sends a write of no bytes over each queue pair when both ends are ready, once.
    fn probe_paths(&mut self) -> Result<(), LossCause> {
        match &mut self.pair {
            Some(pair) if self.is_connected && self.peer_is_ready && !self.is_probed => {
                self.is_probed = true;
                pair.probe_paths()
            }
            _ => Ok(()),
        }
    }
}

impl VerbsDevice {
    /// Sends a message to a peer; false when the peer does not read it.
    fn send_message(&self, peer: Rank, message: &ControlMessage) -> bool {
        self.control.send_message(peer, &message.encode())
    }

    /// The control stream to a peer is open: makes queue pairs and sends the hello.
    pub(super) fn send_hello(&mut self, peer: Rank) {
        // Severed, or given up, since the stream opened.
        if !matches!(self.peers[peer as usize], Peer::Connecting(_)) {
            return;
        }
        let signal_slots = self.signal_slots(peer);
        let made =
            Pair::new(&self.nics, peer, signal_slots, self.sizes, self.stripe_bytes, || random_key().0);
        let made = made.and_then(|pair| {
            let count = self.sizes.receives() as usize;
            for nic in &mut self.nics {
                // A process that had a rank has left receives, and nobody knows how many: messages
                // may have been under way to its queue pairs. A full queue has enough for all.
                if self.was_replaced { nic.receives.fill(count)? } else { nic.receives.post(count)? }
            }
            Ok(pair)
        });
        let pair = match made {
            Ok(pair) => pair,
            Err(error) => {
                tracing::warn!("verbs: no queue pair for rank {peer} ({error}){}", hint(error.kind()));
                return self.refuse(peer, refused(&error));
            }
        };
        let Peer::Connecting(connecting) = &mut self.peers[peer as usize] else { return };
        for (queue, (nic, number)) in pair.queue_pairs().enumerate() {
            self.nics[nic].owners.insert(number, (peer, queue));
        }
        let hello = ControlMessage::Hello(pair.hello(&self.nics));
        connecting.pair = Some(pair);
        let said = self.listener_address(peer).map_or(hello, ControlMessage::ListenerAddress);
        // It fails only when the peer is gone, which comes as an event.
        self.send_message(peer, &said);
        if self.announces() {
            let keys: Vec<_> = self.regions.keys().copied().collect();
            keys.into_iter().for_each(|key| self.announce_to(peer, key));
        }
        self.advance(peer);
    }

    /// Whether peers may have several queue pairs.
    fn announces(&self) -> bool {
        self.nics.len() > 1 || self.sizes.queue_pairs > 1
    }

    /// Announces a region to a peer, or that it is gone. Without the announcement transfers are not
    /// striped.
    fn announce_to(&mut self, peer: Rank, region: RegionKey) {
        let known = self.regions.get(&region).and_then(|registered| registered.known_to(peer));
        let announcement = Announcement { region, known };
        self.send_message(peer, &ControlMessage::Announcement(announcement));
    }

    /// Announces a region to all connected peers.
    pub(super) fn announce(&mut self, region: RegionKey) {
        if self.announces() {
            let hears = |peer: &Rank| self.peers[*peer as usize].pair().is_some();
            let peers: Vec<_> = (0..self.peers.len() as Rank).filter(hears).collect();
            peers.into_iter().for_each(|peer| self.announce_to(peer, region));
        }
    }

    /// Handles a message of a peer.
    pub(super) fn handle_message(&mut self, peer: Rank, message: ControlMessage) {
        match (message, &mut self.peers[peer as usize]) {
            (ControlMessage::Announcement(announcement), _) => return self.learn(peer, announcement),
            (ControlMessage::Refusal(refusal), Peer::Connecting(_)) => {
                let cause = self.control.cause(peer, refusal.as_received());
                return self.lose(peer, cause);
            }
            (_, Peer::Connecting(connecting)) if connecting.is_refused => return,
            (ControlMessage::Hello(hello), Peer::Connecting(connecting)) => connecting.hello = Some(hello),
            (ControlMessage::ListenerAddress(listener), Peer::Connecting(connecting)) => {
                connecting.listener = Some(listener)
            }
            (ControlMessage::Ready, Peer::Connecting(connecting)) => connecting.peer_is_ready = true,
            (_, Peer::Open(_)) => {
                return self.lose(peer, LossCause::Protocol(ProtocolViolation::UnexpectedAnswer));
            }
            _ => return,
        }
        self.advance(peer);
    }

    /// Stores a peer's announcement of a region.
    fn learn(&mut self, peer: Rank, Announcement { region, known }: Announcement) {
        let regions = &mut self.remote_regions[peer as usize];
        match known {
            Some(known) if regions.len() < REMOTE_REGIONS_MAX => drop(regions.insert(region, known)),
            _ => drop(regions.remove(&region)),
        }
    }

    /// Tells a peer that this rank's queue pairs receive and send.
    pub(super) fn say_ready(&mut self, peer: Rank) {
        self.send_message(peer, &ControlMessage::Ready);
    }

    /// Whether the peer uses the other connect method.
    fn uses_other_method(&self, connecting: &Connecting) -> bool {
        match self.connection_manager {
            Some(_) => connecting.hello.is_some(),
            None => connecting.listener.is_some(),
        }
    }

    /// Advances a connecting pair as far as possible.
    pub(super) fn advance(&mut self, peer: Rank) {
        if let Peer::Connecting(connecting) = &self.peers[peer as usize]
            && connecting.pair.is_some()
        {
            if self.uses_other_method(connecting) {
                return self.refuse(peer, PairError::Refused(Refusal::OtherConnectMethod).into());
            }
            if connecting.listener.is_some() {
                return self.connect_by_cm(peer);
            }
        }
        let slot = std::mem::replace(&mut self.peers[peer as usize], Peer::Idle);
        let Peer::Connecting(mut connecting) = slot else {
            self.peers[peer as usize] = slot;
            return;
        };
        let failure =
            self.connect_as_told(peer, &mut connecting).and_then(|()| connecting.probe_paths()).err();
        let is_probed = connecting.is_probed;
        self.peers[peer as usize] = match connecting.pair.take() {
            Some(pair) if is_probed && pair.is_idle() => {
                self.info.setup.count_connected();
                self.event_queue.push_back(Event::Connected { peer });
                Peer::Open(Box::new(pair))
            }
            pair => {
                connecting.pair = pair;
                Peer::Connecting(connecting)
            }
        };
        if let Some(cause) = failure {
            self.refuse(peer, cause);
        }
    }

    /// Connects the queue pairs when the peer's hello is there, unless the connection manager does
    /// it.
    fn connect_as_told(&mut self, peer: Rank, connecting: &mut Connecting) -> Result<(), LossCause> {
        let (Some(pair), Some(hello), false) =
            (&mut connecting.pair, &connecting.hello, connecting.is_connected)
        else {
            return Ok(());
        };
        if let Some(unequal) =
            gid_type_mismatch(&self.nics, hello).or_else(|| mtu_mismatch(&self.nics, hello))
        {
            return Err(unequal);
        }
        pair.connect(&self.nics, hello).map_err(|error| connect_failed(peer, error))?;
        connecting.is_connected = true;
        self.say_ready(peer);
        Ok(())
    }

    /// Gives up the peers whose time to connect is over.
    pub(super) fn expire_connecting(&mut self, now: Nanos) {
        for peer in 0..self.peers.len() as Rank {
            if let Peer::Connecting(connecting) = &self.peers[peer as usize]
                && now >= connecting.deadline
            {
                let seen = if connecting.is_refused {
                    ConnectFailure::NotConnected.into()
                } else {
                    LossCause::NotReached(self.connect_timeout)
                };
                let cause = self.control.cause(peer, seen);
                if !connecting.is_refused {
                    // So that the peer knows the cause, if it exists.
                    self.send_message(peer, &ControlMessage::Refusal(Refusal::NoPath));
                }
                self.lose(peer, cause);
            }
        }
    }

    /// Refuses the connection: sends the reason, and waits for the peer to close the stream.
    pub(super) fn refuse(&mut self, peer: Rank, cause: LossCause) {
        let is_told = Refusal::of(&cause).is_some_and(|refusal| {
            self.control.refuse(peer, cause.clone());
            self.send_message(peer, &ControlMessage::Refusal(refusal))
        });
        match &mut self.peers[peer as usize] {
            Peer::Connecting(connecting) if is_told => {
                connecting.await_end();
                if let Some(pair) = connecting.pair.take() {
                    self.end_pair(peer, pair, &TransferError::Lost { peer, cause });
                }
            }
            _ => self.lose(peer, cause),
        }
    }
}

/// The cause of a loss when a queue pair could not be connected.
pub(super) fn connect_failed(peer: Rank, error: io::Error) -> LossCause {
    tracing::debug!("verbs: the queue pair to rank {peer} does not connect ({error})");
    match error.raw_os_error() {
        Some(errno) if error.kind() != io::ErrorKind::OutOfMemory => PairError::NotConnected { errno }.into(),
        _ => refused(&error.into()),
    }
}

/// Whether GID types of the two ends do not fit.
fn gid_type_mismatch(nics: &[Nic], hello: &PairHello) -> Option<LossCause> {
    paired_ends(nics, hello).map(|(nic, queue)| (nic.chosen.gid.kind, queue.kind)).find_map(|(own, peer)| {
        let error = PairError::GidTypeMismatch { own, peer };
        (!own.meets(peer)).then(|| error.into())
    })
}

/// Whether path MTUs of the two ends differ.
pub(super) fn mtu_mismatch(nics: &[Nic], hello: &PairHello) -> Option<LossCause> {
    paired_ends(nics, hello).map(|(nic, queue)| (nic.port.active_mtu, u32::from(queue.mtu))).find_map(
        |(own, other)| {
            let error = PairError::MtuMismatch { own: mtu_bytes(own), peer: mtu_bytes(other) };
            (own != other).then(|| error.into())
        },
    )
}

/// This rank's NICs, each with the peer's end of its queue pair.
fn paired_ends<'a>(
    nics: &'a [Nic],
    hello: &'a PairHello,
) -> impl Iterator<Item = (&'a Nic, &'a QueuePairHello)> {
    nics.iter().cycle().zip(&hello.queues)
}

/// Bytes of a path MTU in the code of the verbs.
fn mtu_bytes(mtu: u32) -> u32 {
    128 << mtu
}
