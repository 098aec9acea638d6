//! How a pair comes about: the control stream opens, each end says where its queue pairs are, each
//! end says that it is ready, and each sees a write of no bytes acknowledged on each queue pair:
//! one that is connected may still lead nowhere, which is better known now than in the first
//! operation.
//!
//! That is so unless the connection manager joins them, see [`cm`](super::cm).
//!
//! An end that makes no connection says why ([`Refusal`]) and waits until the other one has heard,
//! so that both name the cause.

use std::io;
use std::time::Duration;

use super::cm::{Entrance, Meeting};
use super::nic::Nic;
use super::open::{hint, refused};
use super::pair::Pair;
use super::pair_error::PairError;
use super::refusal::Refusal;
use super::registered::Registered;
use super::wire::{Announcement, Hello, QueuePairHello};
use super::{ControlMessage, Peer, VerbsDevice};
use crate::Rank;
use crate::clock::{self, Nanos};
use crate::device::{Device, Event, LossCause, ProtocolViolation, TransferError};

use crate::region::{RegionKey, random_key};

/// Regions of a peer that are kept in mind; transfers to further ones go whole, over the first NIC.
const KNOWN_REGIONS_MAX: usize = 1 << 16;

/// How long a peer that is refused has time to hear why and hang up.
pub(super) const REFUSAL_GRACE: Duration = Duration::from_secs(2);

/// A pair on its way: the control stream, then each end's hello, then each end's word that it is
/// ready.
pub(super) struct Joining {
    pub(super) deadline: Nanos,
    pub(super) pair: Option<Pair>,
    pub(super) hello: Option<Hello>,
    pub(super) is_connected: bool,
    pub(super) peer_is_ready: bool,
    /// Writes of no bytes are under way, or were acknowledged.
    pub(super) is_tried: bool,
    /// There will be no connection; the peer has been told.
    pub(super) is_refused: bool,
    /// Where the peer waits to be called, until it is.
    pub(super) entrance: Option<Entrance>,
    pub(super) meeting: Meeting,
}

impl Joining {
    pub(super) fn new(deadline: Nanos) -> Self {
        Self {
            deadline,
            pair: None,
            hello: None,
            is_connected: false,
            peer_is_ready: false,
            is_tried: false,
            is_refused: false,
            entrance: None,
            meeting: Meeting::default(),
        }
    }

    /// Sends a write of no bytes over each queue pair when both ends are ready, once.
    fn try_ways(&mut self) -> Result<(), LossCause> {
        match &mut self.pair {
            Some(pair) if self.is_connected && self.peer_is_ready && !self.is_tried => {
                self.is_tried = true;
                pair.try_ways()
            }
            _ => Ok(()),
        }
    }
}

impl VerbsDevice {
    /// Says something to a peer; false when the peer does not hear it.
    pub(super) fn say(&self, peer: Rank, message: &ControlMessage) -> bool {
        self.control.say(peer, &message.encode())
    }

    /// The control stream to a peer is open: makes queue pairs and tells the peer of them.
    pub(super) fn greet(&mut self, peer: Rank) {
        // Severed, or given up, since the stream opened.
        if !matches!(self.peers[peer as usize], Peer::Joining(_)) {
            return;
        }
        let signal_slots = self.signal_slots(peer);
        let made =
            Pair::new(&self.nics, peer, signal_slots, self.sizes, self.stripe_bytes, || random_key().0);
        let made = made.and_then(|pair| {
            for nic in &mut self.nics {
                nic.receives.post(self.sizes.receives() as usize)?;
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
        let Peer::Joining(joining) = &mut self.peers[peer as usize] else { return };
        for (queue, (nic, number)) in pair.queue_pairs().enumerate() {
            self.nics[nic].owners.insert(number, (peer, queue));
        }
        let hello = ControlMessage::Hello(pair.hello(&self.nics));
        joining.pair = Some(pair);
        let said = self.open_entrance(peer).map_or(hello, ControlMessage::Entrance);
        // Not heard only when the peer is gone, which comes as an event.
        self.say(peer, &said);
        if self.announces() {
            let keys: Vec<_> = self.regions.keys().copied().collect();
            keys.into_iter().for_each(|key| self.announce_to(peer, key));
        }
        self.advance(peer);
    }

    /// Whether peers may be joined by several queue pairs.
    fn announces(&self) -> bool {
        self.nics.len() > 1 || self.sizes.queue_pairs > 1
    }

    /// Tells a peer of a region, or that it is gone. It does without where it is not told: then its
    /// transfers go whole, over the first NIC.
    fn announce_to(&mut self, peer: Rank, region: RegionKey) {
        let known = self.regions.get(&region).map(Registered::known);
        let announcement = Announcement { region, known };
        self.say(peer, &ControlMessage::Announcement(announcement));
    }

    /// Tells all peers that hear of it.
    pub(super) fn announce(&mut self, region: RegionKey) {
        if self.announces() {
            let hears = |peer: &Rank| self.peers[*peer as usize].pair().is_some();
            let peers: Vec<_> = (0..self.peers.len() as Rank).filter(hears).collect();
            peers.into_iter().for_each(|peer| self.announce_to(peer, region));
        }
    }

    /// A peer has said something.
    pub(super) fn told(&mut self, peer: Rank, message: ControlMessage) {
        match (message, &mut self.peers[peer as usize]) {
            (ControlMessage::Announcement(announcement), _) => return self.learn(peer, announcement),
            (ControlMessage::Refusal(refusal), Peer::Joining(_)) => {
                let cause = self.control.cause(peer, refusal.heard());
                return self.lose(peer, cause);
            }
            (_, Peer::Joining(joining)) if joining.is_refused => return,
            (ControlMessage::Hello(hello), Peer::Joining(joining)) => joining.hello = Some(hello),
            (ControlMessage::Entrance(entrance), Peer::Joining(joining)) => joining.entrance = Some(entrance),
            (ControlMessage::Ready, Peer::Joining(joining)) => joining.peer_is_ready = true,
            (_, Peer::Open(_)) => {
                return self.lose(peer, LossCause::Protocol(ProtocolViolation::UnexpectedAnswer));
            }
            _ => return,
        }
        self.advance(peer);
    }

    /// Keeps in mind what a peer says of one of its regions.
    fn learn(&mut self, peer: Rank, Announcement { region, known }: Announcement) {
        let regions = &mut self.known_regions[peer as usize];
        match known {
            Some(known) if regions.len() < KNOWN_REGIONS_MAX => drop(regions.insert(region, known)),
            _ => drop(regions.remove(&region)),
        }
    }

    /// This rank's queue pairs to a peer receive and send.
    pub(super) fn say_ready(&mut self, peer: Rank) {
        self.say(peer, &ControlMessage::Ready);
    }

    /// Whether the peer wants to be joined in the other way than this rank.
    fn is_other_way(&self, joining: &Joining) -> bool {
        match self.switchboard {
            Some(_) => joining.hello.is_some(),
            None => joining.entrance.is_some(),
        }
    }

    /// Goes on with a pair on its way as far as it can.
    pub(super) fn advance(&mut self, peer: Rank) {
        if let Peer::Joining(joining) = &self.peers[peer as usize]
            && joining.pair.is_some()
        {
            if self.is_other_way(joining) {
                return self.refuse(peer, PairError::Refused(Refusal::OtherWay).into());
            }
            if joining.entrance.is_some() {
                return self.call_back(peer);
            }
        }
        let slot = std::mem::replace(&mut self.peers[peer as usize], Peer::Idle);
        let Peer::Joining(mut joining) = slot else {
            self.peers[peer as usize] = slot;
            return;
        };
        let failure = self.connect_as_told(peer, &mut joining).and_then(|()| joining.try_ways()).err();
        let is_tried = joining.is_tried;
        self.peers[peer as usize] = match joining.pair.take() {
            Some(pair) if is_tried && pair.is_idle() => {
                self.outbox.push_back(Event::Connected { peer });
                Peer::Open(Box::new(pair))
            }
            pair => {
                joining.pair = pair;
                Peer::Joining(joining)
            }
        };
        if let Some(cause) = failure {
            self.refuse(peer, cause);
        }
    }

    /// Joins the queue pairs to the peer's, where it has said which those are and nobody else does
    /// it.
    fn connect_as_told(&mut self, peer: Rank, joining: &mut Joining) -> Result<(), LossCause> {
        let (Some(pair), Some(hello), false) = (&mut joining.pair, &joining.hello, joining.is_connected)
        else {
            return Ok(());
        };
        if let Some(unequal) = unequal_kinds(&self.nics, hello).or_else(|| unequal_packets(&self.nics, hello))
        {
            return Err(unequal);
        }
        pair.connect(&self.nics, hello).map_err(|error| not_joined(peer, error))?;
        joining.is_connected = true;
        self.say_ready(peer);
        Ok(())
    }

    /// Makes no connection to a peer: tells it why, and waits a while for it to hang up.
    pub(super) fn refuse(&mut self, peer: Rank, cause: LossCause) {
        let is_told = Refusal::of(&cause).is_some_and(|refusal| {
            self.control.refuse(peer, cause.clone());
            self.say(peer, &ControlMessage::Refusal(refusal))
        });
        match &mut self.peers[peer as usize] {
            Peer::Joining(joining) if is_told => {
                joining.deadline = joining.deadline.min(clock::now() + REFUSAL_GRACE);
                joining.is_refused = true;
                if let Some(pair) = joining.pair.take() {
                    self.end_pair(peer, pair, &TransferError::Lost { peer, cause });
                }
            }
            _ => self.lose(peer, cause),
        }
    }
}

/// Why a queue pair does not go together with its peer's.
pub(super) fn not_joined(peer: Rank, error: io::Error) -> LossCause {
    tracing::debug!("verbs: the queue pair to rank {peer} does not connect ({error})");
    match error.raw_os_error() {
        Some(errno) if error.kind() != io::ErrorKind::OutOfMemory => PairError::NotJoined { errno }.into(),
        _ => refused(&error.into()),
    }
}

/// Addresses of ports of the two that do not meet.
fn unequal_kinds(nics: &[Nic], hello: &Hello) -> Option<LossCause> {
    facing(nics, hello).map(|(nic, queue)| (nic.chosen.gid.kind, queue.kind)).find_map(|(own, peer)| {
        let error = PairError::AddressKinds { own, peer };
        (!own.meets(peer)).then(|| error.into())
    })
}

/// Packets that ports of the two do not have in common.
pub(super) fn unequal_packets(nics: &[Nic], hello: &Hello) -> Option<LossCause> {
    facing(nics, hello).map(|(nic, queue)| (nic.port.active_mtu, u32::from(queue.mtu))).find_map(
        |(own, other)| {
            let error = PairError::PacketLengths { own: packet_bytes(own), peer: packet_bytes(other) };
            (own != other).then(|| error.into())
        },
    )
}

/// This rank's NICs, each with what the peer said of a queue pair that it is joined to.
fn facing<'a>(nics: &'a [Nic], hello: &'a Hello) -> impl Iterator<Item = (&'a Nic, &'a QueuePairHello)> {
    nics.iter().cycle().zip(&hello.queues)
}

/// Bytes of the longest packet that the verbs number so.
fn packet_bytes(mtu: u32) -> u32 {
    128 << mtu
}
