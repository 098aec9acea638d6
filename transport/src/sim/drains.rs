//! Drains of pairs (contract line 17).
//!
//! A transfer is in the world's table until nothing of it lands any more and its `Done` can be
//! polled. So a rank's drain mark goes off when no transfer from before the drain is in the table,
//! and arrives like a message, at a time of its own. **Invariant:** a mark that arrived was sent by
//! the device that is connected, over a wire that was not cut since.

use super::{SimEvent, State};
use crate::Rank;
use crate::device::{Incarnation, SubmitError};
use crate::sim::observer::Record;
use crate::sim::world::Mutant;

/// The stage of a drain: the rank's own transfers from before have ended.
const OWN_MARK: usize = 0;

/// The stage of a drain: the peer's mark has arrived.
const PEER_MARK: usize = 1;

impl State {
    /// Drains a connected pair.
    pub(crate) fn drain(&mut self, rank: Rank, peer: Rank) -> Result<(), SubmitError> {
        self.peer_state(rank, peer).drains.begin(peer)?;
        self.event("drain", &[u64::from(rank), u64::from(peer)]);
        self.note(|| Record::Drains { rank, peer });
        self.advance_drains(rank, peer);
        Ok(())
    }

    /// Sends the marks of a rank to its peer whose transfers from before have ended.
    pub(crate) fn advance_drains(&mut self, rank: Rank, peer: Rank) {
        // Bytes of a dead rank that are on the wire may still land, and nobody knows when.
        while !self.ranks[rank as usize].dead {
            let drains = &self.peer_state(rank, peer).drains;
            let sent = drains.passed(OWN_MARK);
            if sent == drains.begun() || self.is_before_drain_under_way(rank, peer, sent) {
                return;
            }
            self.event("drain-mark", &[u64::from(rank), u64::from(peer), sent + 1]);
            self.peer_state(rank, peer).drains.pass(OWN_MARK, 1);
            let wait = self.network.latency(rank, peer) + self.random_delay();
            let device = self.ranks[rank as usize].incarnation;
            self.after(wait, SimEvent::DrainMark(rank, peer, device));
            self.tell_drained(rank, peer);
        }
    }

    /// Whether a transfer from before the drain after `drains` is under way.
    fn is_before_drain_under_way(&self, rank: Rank, peer: Rank, drains: u64) -> bool {
        self.mutant != Some(Mutant::DrainedBeforeLanding)
            && self.transfers.iter().any(|(_, active)| active.is_before_drain(rank, peer, drains))
    }

    /// Handles the arrival of a mark.
    pub(crate) fn drain_marked(&mut self, from: Rank, to: Rank, device: Option<Incarnation>) {
        if self.peer_state(from, to).cut || !self.is_of_pair(to, from, device) {
            return;
        }
        self.peer_state(to, from).drains.pass(PEER_MARK, 1);
        self.tell_drained(to, from);
    }

    /// Reports the drains of a rank that are over.
    pub(crate) fn tell_drained(&mut self, rank: Rank, peer: Rank) {
        if !self.is_connected(rank, peer) {
            return;
        }
        while let Some(drained) = self.peer_state(rank, peer).drains.next_drained(peer) {
            self.event("drained", &[u64::from(rank), u64::from(peer)]);
            self.push_ready(rank, drained, None);
        }
    }
}
