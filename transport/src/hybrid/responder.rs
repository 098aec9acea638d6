//! The responder of both devices of a hybrid device: it sends to each peer through the device that
//! connects the pair, whichever of the two has brought the message.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::PeerFabric;
use crate::Rank;
use crate::control::Streams;
use crate::device::{LossCause, PostError, Relay, Responder, Urgency};

/// See the module.
pub(crate) struct HybridResponder {
    responder: Arc<dyn Responder>,
    /// By rank: whether the process is of this host. Relaxed: nothing else is read because of it. A
    /// message that goes the former way finds no open stream there.
    is_here: Vec<AtomicBool>,
    /// Set when both devices were made. Before that no pair is connected.
    streams: OnceLock<[Streams; 2]>,
}

impl HybridResponder {
    pub(crate) fn new(responder: Arc<dyn Responder>, peer_fabrics: &[PeerFabric]) -> Self {
        let is_here = peer_fabrics.iter().map(|fabric| AtomicBool::new(*fabric == PeerFabric::Shm));
        Self { responder, is_here: is_here.collect(), streams: OnceLock::new() }
    }

    /// The rank is that of processes that this fabric joins to this one.
    pub(crate) fn move_to(&self, fabric: PeerFabric, peer: Rank) {
        if let Some(is_here) = self.is_here.get(peer as usize) {
            is_here.store(fabric == PeerFabric::Shm, Ordering::Relaxed);
        }
    }

    /// The streams to peers of this host, and those to the others.
    pub(crate) fn connect(&self, here: Streams, there: Streams) {
        let _ = self.streams.set([here, there]);
    }

    fn post(&self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        let [here, there] = self.streams.get().ok_or(PostError::NotConnected { peer })?;
        let is_here = self.is_here.get(peer as usize).is_some_and(|is_here| is_here.load(Ordering::Relaxed));
        let streams = if is_here { here } else { there };
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
