//! How a pair comes about: the control stream opens, each end says where its queue pair is, each end says that it is ready.

use super::open::{hint, refused};
use super::pair::Pair;
use super::wire::Hello;
use super::{Peer, VerbsDevice, desk};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{Device, Event, LossCause, ProtocolViolation};
use crate::memory::random_key;

use desk::Told;

/// A pair on its way: the control stream, then each end's hello, then each end's word that it is ready.
pub(super) struct Joining {
    pub(super) deadline: Nanos,
    pub(super) pair: Option<Pair>,
    pub(super) hello: Option<Hello>,
    pub(super) is_connected: bool,
    pub(super) peer_is_ready: bool,
}

impl VerbsDevice {
    /// The control stream to a peer is open: makes a queue pair and tells the peer of it.
    pub(super) fn greet(&mut self, peer: Rank) {
        let cells = self.cells(peer);
        let random = random_key().0;
        let made = Pair::new(&self.base(), peer, cells, self.sizes, random);
        let made = made.and_then(|pair| {
            self.receives.post(self.sizes.receives() as usize)?;
            Ok(pair)
        });
        let pair = match made {
            Ok(pair) => pair,
            Err(error) => {
                tracing::warn!("verbs: no queue pair for rank {peer} ({error}){}", hint(&error));
                return self.lose(peer, refused(&error));
            }
        };
        let hello = pair.hello(&self.base());
        let Peer::Joining(joining) = &mut self.peers[peer as usize] else { return };
        self.by_queue_pair.insert(pair.number(), peer);
        joining.pair = Some(pair);
        // Refused only when the peer is gone, which comes as an event.
        let _ = self.control.post_framed(peer, &desk::of_hello(&hello));
        self.advance(peer);
    }

    pub(super) fn told(&mut self, peer: Rank, told: Told) {
        let Peer::Joining(joining) = &mut self.peers[peer as usize] else {
            if matches!(self.peers[peer as usize], Peer::Open(_)) {
                self.lose(peer, LossCause::Protocol(ProtocolViolation::UnexpectedAnswer));
            }
            return;
        };
        match told {
            Told::Hello(hello) => joining.hello = Some(hello),
            Told::Ready => joining.peer_is_ready = true,
            Told::Nonsense => {
                return self.lose(peer, LossCause::Protocol(ProtocolViolation::MalformedFrame));
            }
        }
        self.advance(peer);
    }

    /// Goes on with a pair on its way as far as it can.
    fn advance(&mut self, peer: Rank) {
        let slot = std::mem::replace(&mut self.peers[peer as usize], Peer::Idle);
        let Peer::Joining(mut joining) = slot else {
            self.peers[peer as usize] = slot;
            return;
        };
        let mut failure = None;
        if !joining.is_connected
            && let (Some(pair), Some(hello)) = (&mut joining.pair, joining.hello)
        {
            match pair.connect(&self.base(), hello) {
                Ok(()) => {
                    joining.is_connected = true;
                    let _ = self.control.post_framed(peer, &desk::of_ready());
                }
                Err(error) => failure = Some(error),
            }
        }
        let is_open = joining.is_connected && joining.peer_is_ready;
        self.peers[peer as usize] = match joining.pair.take() {
            Some(pair) if is_open => {
                self.outbox.push_back(Event::Connected { peer });
                Peer::Open(Box::new(pair))
            }
            pair => {
                joining.pair = pair;
                Peer::Joining(joining)
            }
        };
        if let Some(error) = failure {
            tracing::warn!(
                "verbs: the queue pair to rank {peer} does not connect ({error}): is the peer's GID on this network?"
            );
            self.lose(peer, LossCause::ConnectionBroke(error.kind()));
        }
    }
}
