//! The responder of both devices of a hybrid device: it sends to each peer through the device that
//! connects the pair, whichever of the two has brought the message.

use std::sync::{Arc, OnceLock};

use super::PeerFabric;
use crate::Rank;
use crate::control::Streams;
use crate::device::{LossCause, PostError, Relay, Responder, Urgency};

/// See the module.
pub(crate) struct HybridResponder {
    responder: Arc<dyn Responder>,
    peer_fabrics: Vec<PeerFabric>,
    /// Set when both devices were made. Before that no pair is connected.
    streams: OnceLock<[Streams; 2]>,
}

impl HybridResponder {
    pub(crate) fn new(responder: Arc<dyn Responder>, peer_fabrics: Vec<PeerFabric>) -> Self {
        Self { responder, peer_fabrics, streams: OnceLock::new() }
    }

    /// The streams to peers of this host, and those to the others.
    pub(crate) fn connect(&self, here: Streams, there: Streams) {
        let _ = self.streams.set([here, there]);
    }

    fn post(&self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        let [here, there] = self.streams.get().ok_or(PostError::NotConnected { peer })?;
        let streams = match self.peer_fabrics.get(peer as usize) {
            Some(PeerFabric::Shm) => here,
            Some(PeerFabric::Network) | None => there,
        };
        streams.post(peer, message, urgency.is_urgent())
    }
}

impl Responder for HybridResponder {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.responder.message(from, message)
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        self.responder.lost(peer, cause);
    }

    fn message_relaying(&self, from: Rank, message: &[u8], _relay: &mut Relay<'_>) -> Option<Vec<u8>> {
        let relay: &mut Relay<'_> = &mut |to, message, urgency| self.post(to, message, urgency);
        self.responder.message_relaying(from, message, relay)
    }

    fn lost_relaying(&self, peer: Rank, cause: &LossCause, _relay: &mut Relay<'_>) {
        let relay: &mut Relay<'_> = &mut |to, message, urgency| self.post(to, message, urgency);
        self.responder.lost_relaying(peer, cause, relay);
    }
}
