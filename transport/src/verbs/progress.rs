//! What a poll does: completions become counted cells, ends of transfers and losses; the control streams' events become the
//! device's.

use super::objects::{COMPLETIONS_AT_ONCE, Completion};
use super::pair::Pair;
use super::status::WorkStatus;
use super::{Peer, VerbsDevice, sys};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{Device, Event, LossCause, TransferError};

/// Batches of completions that one poll takes at most.
const BATCHES_MAX: usize = 16;

impl VerbsDevice {
    /// Takes what has completed; true when there may be more.
    pub(super) fn take_completions(&mut self) -> bool {
        let mut completions = [Completion::default(); COMPLETIONS_AT_ONCE];
        for _ in 0..BATCHES_MAX {
            let Ok(count) = self.completions.poll(&mut completions) else { return false };
            let mut consumed = 0;
            for completion in &completions[..count] {
                consumed += usize::from(self.completed(completion));
            }
            if consumed > 0 && self.receives.post(consumed).is_err() {
                tracing::warn!("verbs: {} took no receives", self.chosen.device);
            }
            if count < completions.len() {
                return false;
            }
        }
        true
    }

    /// Takes a completion; whether it used up a receive.
    fn completed(&mut self, completion: &Completion) -> bool {
        let is_receive = completion.is_receive;
        // Of one that is gone: what was under way on it has ended already.
        let Some(&peer) = self.by_queue_pair.get(&completion.queue_pair) else { return is_receive };
        if completion.status != sys::IBV_WC_SUCCESS {
            self.failed(peer, completion);
            // Of a failed request only status, number and queue pair say anything.
            return false;
        }
        let Some(pair) = pair_mut(&mut self.peers, peer) else { return is_receive };
        if !is_receive {
            pair.completed(completion.number, &mut self.outbox);
            return false;
        }
        match pair.received(completion.immediate, completion.bytes) {
            Ok(()) => pair.give_back(),
            Err(violation) => self.lose(peer, LossCause::Protocol(violation)),
        }
        true
    }

    /// Work to a peer failed.
    fn failed(&mut self, peer: Rank, completion: &Completion) {
        if completion.status == sys::IBV_WC_REM_ACCESS_ERR
            && let Some(pair) = pair_mut(&mut self.peers, peer)
        {
            pair.refuse(completion.number, &mut self.outbox);
        }
        // Its process may have ended a moment ago, which the control stream tells better.
        self.lose(peer, LossCause::QueuePair(WorkStatus::of(completion.status)));
    }

    /// Gives a peer up; its event comes by way of the control stream.
    pub(super) fn lose(&mut self, peer: Rank, cause: LossCause) {
        self.control.lose(peer, cause.clone());
        self.end(peer, Peer::Lost(cause.clone()), &TransferError::Lost { peer, cause });
    }

    /// Ends all that is under way with a peer.
    pub(super) fn end(&mut self, peer: Rank, then: Peer, error: &TransferError) {
        let pair = match std::mem::replace(&mut self.peers[peer as usize], then) {
            Peer::Open(pair) => Some(*pair),
            Peer::Joining(joining) => joining.pair,
            _ => None,
        };
        if let Some(pair) = pair {
            self.by_queue_pair.remove(&pair.number());
            pair.fail(error, &mut self.outbox);
        }
    }

    /// Looks at the control streams once; what they have left makes the next poll look again.
    pub(super) fn poll_control(&mut self, now: Nanos) {
        self.control_polled_at = now;
        self.control_polls = 0;
        let mut events = std::mem::take(&mut self.control_events);
        self.control.poll(now, &mut events);
        for event in events.drain(..) {
            match event {
                Event::Connected { peer } => self.greet(peer),
                Event::PeerLost { peer, cause } => {
                    let error = TransferError::Lost { peer, cause: cause.clone() };
                    self.end(peer, Peer::Lost(cause.clone()), &error);
                    self.outbox.push_back(Event::PeerLost { peer, cause });
                }
                Event::Left { peer } => {
                    // It said so when its NIC had everything acknowledged: all of it has completed here.
                    while self.take_completions() {}
                    self.end(peer, Peer::Left, &TransferError::Left { peer });
                    self.outbox.push_back(Event::Left { peer });
                }
                Event::Severed { peer } => self.outbox.push_back(Event::Severed { peer }),
                // Nothing is transferred over it.
                Event::Done { .. } => {}
            }
        }
        self.control_events = events;
        for (peer, told) in self.desk.take() {
            self.told(peer, told);
        }
    }

    /// Goodbye is said when every peer's NIC has all that was sent.
    pub(super) fn go(&mut self) {
        let mut is_idle = true;
        for peer in &mut self.peers {
            if let Peer::Open(pair) = peer {
                pair.seal();
                is_idle &= pair.is_idle();
            }
        }
        if is_idle {
            self.has_left = true;
            self.control.leave();
        }
    }

    pub(super) fn convict_late(&mut self, now: Nanos) {
        for peer in 0..self.peers.len() as Rank {
            if let Peer::Joining(joining) = &self.peers[peer as usize]
                && now >= joining.deadline
            {
                self.lose(peer, LossCause::NotReached(self.connect_timeout));
            }
        }
    }

    /// Deregisters what has no handle any more.
    pub(super) fn forget_released(&mut self) {
        for key in self.releases.take() {
            self.regions.remove(&key);
        }
    }

    pub(super) fn deliver(&mut self, events: &mut Vec<Event>) {
        let count = (events.capacity() - events.len()).min(self.outbox.len());
        events.extend(self.outbox.drain(..count));
    }
}

/// The pair of a peer that is open or on its way.
fn pair_mut(peers: &mut [Peer], peer: Rank) -> Option<&mut Pair> {
    match &mut peers[peer as usize] {
        Peer::Open(pair) => Some(pair),
        Peer::Joining(joining) => joining.pair.as_mut(),
        _ => None,
    }
}
