//! What a poll does: completions become counted cells, ends of transfers and losses; the control streams' events become the
//! device's.

use super::cm::CallFailure;
use super::objects::{COMPLETIONS_AT_ONCE, Completion};
use super::pair::Pair;
use super::refusal::Refusal;
use super::status::{Operation, WorkFailure, WorkStatus};
use super::{CONTROL_INTERVAL, Peer, VerbsDevice, desk, sys};
use crate::Rank;
use crate::clock::Nanos;
use crate::cuda::CudaError;
use crate::device::{Device, Event, LossCause, TransferError};

/// Batches of completions that one poll takes at most.
const BATCHES_MAX: usize = 16;

impl VerbsDevice {
    /// Takes what has completed; true when there may be more.
    pub(super) fn take_completions(&mut self) -> bool {
        let mut may_be_more = false;
        for nic in 0..self.nics.len() {
            let mut batches = 0;
            loop {
                let count = self.nics[nic].poll();
                // Most looks find nothing: what they do is how late a notice is seen.
                if count > 0 {
                    self.take_batch(nic, count);
                }
                batches += 1;
                if count < COMPLETIONS_AT_ONCE {
                    break;
                }
                if batches == BATCHES_MAX {
                    may_be_more = true;
                    break;
                }
            }
        }
        may_be_more
    }

    /// Takes so many completions, which a look at this NIC's queue has found.
    fn take_batch(&mut self, nic: usize, count: usize) {
        if let Err(error) = self.gpus.flush() {
            tracing::error!("{error}");
            let code = match error {
                CudaError::Call { code, .. } | CudaError::Driver { code, .. } => code.code,
                _ => 0,
            };
            self.lose_all(&LossCause::Gpu { code });
        }
        let mut used = 0;
        for index in 0..count {
            let completion = self.nics[nic].completions.found(index);
            used += u32::from(self.completed(nic, &completion));
        }
        self.nics[nic].restock(used);
    }

    /// Takes a completion; whether it used up a receive.
    fn completed(&mut self, nic: usize, completion: &Completion) -> bool {
        let is_receive = completion.is_receive;
        // Of one that is gone: what was under way on it has ended already.
        let Some(&(peer, lane)) = self.nics[nic].owners.get(&completion.queue_pair) else {
            return is_receive;
        };
        if completion.status != sys::IBV_WC_SUCCESS {
            self.failed(peer, lane, completion);
            return is_receive;
        }
        let Some(pair) = self.peers[peer as usize].pair_mut() else { return is_receive };
        if is_receive {
            if let Err(violation) = pair.received(lane, completion.immediate, completion.bytes) {
                self.lose(peer, LossCause::Protocol(violation));
                return true;
            }
        } else {
            pair.completed(lane, completion.number, &mut self.outbox);
        }
        // Also when requests ended: there may have been no room for it before.
        if pair.give_back() {
            self.ring_or_list(peer);
        }
        if matches!(self.peers[peer as usize], Peer::Joining(_)) {
            self.advance(peer);
        }
        is_receive
    }

    /// Work to a peer failed.
    fn failed(&mut self, peer: Rank, lane: usize, completion: &Completion) {
        let operation = match self.peers[peer as usize].pair_mut() {
            _ if completion.is_receive => Operation::Receive,
            Some(pair) => pair.operation(lane, completion.number),
            None => Operation::Other,
        };
        if completion.status == sys::IBV_WC_REM_ACCESS_ERR
            && let Some(pair) = self.peers[peer as usize].pair_mut()
        {
            pair.refuse(lane, completion.number, &mut self.outbox);
        }
        // Its process may have ended a moment ago, which the control stream tells better.
        let (status, queue_pair) = (WorkStatus::of(completion.status), completion.queue_pair);
        self.lose(peer, LossCause::QueuePair(WorkFailure { status, operation, queue_pair }));
    }

    /// Something was submitted to a peer: posts it, or notes that it is to be posted.
    pub(super) fn ring_or_list(&mut self, peer: Rank) {
        let Some(pair) = self.peers[peer as usize].pair_mut() else { return };
        if pair.is_due()
            && let Err(cause) = pair.ring()
        {
            return self.lose(peer, cause);
        }
        if !pair.is_listed && !pair.has_rung() {
            pair.is_listed = true;
            self.due.push(peer);
        }
    }

    /// Posts all that waits for it, as far as the NICs have room.
    #[inline]
    pub(super) fn ring_all(&mut self) {
        if !self.due.is_empty() {
            self.ring_due();
        }
    }

    fn ring_due(&mut self) {
        for index in (0..self.due.len()).rev() {
            let peer = self.due[index];
            let rung = match self.peers[peer as usize].pair_mut() {
                Some(pair) => pair.ring().map(|()| {
                    pair.is_listed = !pair.has_rung();
                    !pair.is_listed
                }),
                None => Ok(true),
            };
            if !matches!(rung, Ok(false)) {
                self.due.swap_remove(index);
            }
            if let Err(cause) = rung {
                self.lose(peer, cause);
            }
        }
    }

    /// Gives a peer up; its event comes by way of the control stream.
    pub(super) fn lose(&mut self, peer: Rank, cause: LossCause) {
        self.control.lose(peer, cause.clone());
        self.end(peer, Peer::Lost(cause.clone()), &TransferError::Lost { peer, cause });
    }

    /// Gives up every peer whose completions would tell what cannot be shown.
    fn lose_all(&mut self, cause: &LossCause) {
        for peer in 0..self.peers.len() as Rank {
            if self.peers[peer as usize].pair_mut().is_some() {
                self.lose(peer, cause.clone());
            }
        }
    }

    /// Ends all that is under way with a peer.
    pub(super) fn end(&mut self, peer: Rank, then: Peer, error: &TransferError) {
        let pair = match std::mem::replace(&mut self.peers[peer as usize], then) {
            Peer::Open(pair) => Some(*pair),
            Peer::Joining(joining) => joining.pair,
            _ => None,
        };
        if let Some(pair) = pair {
            self.end_pair(peer, pair, error);
        }
    }

    /// Destroys a pair's queue pairs and ends what is under way on them.
    pub(super) fn end_pair(&mut self, peer: Rank, pair: Pair, error: &TransferError) {
        for nic in &mut self.nics {
            nic.owners.retain(|_, (owner, _)| *owner != peer);
        }
        if let Some(switchboard) = &mut self.switchboard {
            switchboard.hang_up(peer);
        }
        self.past += pair.counts();
        pair.fail(error, &mut self.outbox);
    }

    /// Looks at the control streams once; what they have left makes the next poll look again.
    pub(super) fn poll_control(&mut self, now: Nanos) {
        self.control_due_at = now + CONTROL_INTERVAL;
        self.control_polls = 0;
        let mut events = std::mem::take(&mut self.control_events);
        self.control.poll(now, &mut events);
        // What a peer said before it was lost tells more than that it was.
        for (peer, told) in self.desk.take() {
            self.told(peer, told);
        }
        for event in events.drain(..) {
            match event {
                Event::Connected { peer } => self.greet(peer),
                Event::PeerLost { peer, cause } => {
                    let cause = self.desk.cause(peer, cause);
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
        if self.switchboard.is_some() && (std::mem::take(&mut self.has_slept) || self.is_joining()) {
            self.take_calls();
        }
    }

    fn is_joining(&self) -> bool {
        self.peers.iter().any(|peer| matches!(peer, Peer::Joining(_)))
    }

    /// Goodbye is said when every peer's NIC has all that was sent.
    pub(super) fn go(&mut self) {
        let (mut is_idle, mut broken) = (true, Vec::new());
        for (rank, peer) in (0..).zip(&mut self.peers) {
            let Peer::Open(pair) = peer else { continue };
            pair.seal();
            if let Err(cause) = pair.ring() {
                broken.push((rank, cause));
            }
            is_idle &= pair.is_idle();
        }
        for (peer, cause) in broken {
            self.lose(peer, cause);
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
                let seen = if joining.is_refused {
                    CallFailure::NotJoined.into()
                } else {
                    LossCause::NotReached(self.connect_timeout)
                };
                let cause = self.desk.cause(peer, seen);
                if !joining.is_refused {
                    // So that it knows who gave up, if it is there.
                    let _ = self.control.post_framed(peer, &desk::of_refusal(Refusal::NoWay));
                }
                self.lose(peer, cause);
            }
        }
    }

    /// Deregisters what has no handle any more.
    pub(super) fn forget_released(&mut self) {
        for key in self.releases.take() {
            self.regions.remove(&key);
            self.announce(key);
        }
    }

    pub(super) fn deliver(&mut self, events: &mut Vec<Event>) {
        if self.outbox.is_empty() {
            return;
        }
        let count = (events.capacity() - events.len()).min(self.outbox.len());
        events.extend(self.outbox.drain(..count));
    }
}
