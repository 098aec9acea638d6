//! The work of a poll: completions become signals, ends of transfers and losses; events of the
//! control plane become events of the device.

use super::objects::{COMPLETIONS_AT_ONCE, WorkCompletion};
use super::pair::Pair;
use super::pair_error::PairError;
use super::status::{Operation, WorkFailure, WorkStatus};
use super::{CONTROL_INTERVAL, ControlMessage, Peer, VerbsDevice, sys};
use crate::Rank;
use crate::clock::Nanos;
use crate::control::ControlEvent;
use crate::cuda::CudaError;
use crate::device::{Event, LossCause, PostError, TransferError};

/// Batches of completions that one poll takes at most.
const BATCHES_MAX: usize = 16;

impl VerbsDevice {
    /// Handles completions; true when there may be more.
    #[inline(always)]
    pub(super) fn take_completions(&mut self) -> bool {
        let mut may_be_more = false;
        for nic in 0..self.nics.len() {
            let count = self.nics[nic].poll();
            // Most polls find nothing: their duration is the latency of a signal.
            if count > 0 {
                may_be_more |= self.take_batches(nic, count);
            }
        }
        may_be_more
    }

    /// Handles `count` completions of a poll of this NIC, and those that come meanwhile; true when
    /// there may be more.
    fn take_batches(&mut self, nic: usize, mut count: usize) -> bool {
        for _ in 1..BATCHES_MAX {
            self.take_batch(nic, count);
            if count < COMPLETIONS_AT_ONCE {
                return false;
            }
            count = self.nics[nic].poll();
        }
        self.take_batch(nic, count);
        count == COMPLETIONS_AT_ONCE
    }

    /// Handles `count` completions.
    fn take_batch(&mut self, nic: usize, count: usize) {
        if let Err(error) = self.gpus.flush() {
            self.gpu_flush_failed(error);
        }
        let mut used = 0;
        for index in 0..count {
            let completion = self.nics[nic].completions.found(index);
            used += u32::from(completion.is_receive);
            self.completed(nic, &completion);
        }
        self.nics[nic].replenish(used);
    }

    /// Handles a completion.
    fn completed(&mut self, nic: usize, completion: &WorkCompletion) {
        // A queue pair that is gone: its transfers have ended already.
        let Some(&(peer, queue)) = self.nics[nic].owners.get(&completion.queue_pair) else { return };
        if completion.status != sys::IBV_WC_SUCCESS {
            return self.failed(peer, queue, completion);
        }
        let slot = &mut self.peers[peer as usize];
        let is_connecting = matches!(slot, Peer::Connecting(_));
        let Some(pair) = slot.pair_mut() else { return };
        if !completion.is_receive {
            pair.completed(queue, completion.number, &mut self.event_queue);
        } else if let Err(violation) = pair.received(queue, completion.immediate, completion.bytes) {
            return self.lose(peer, LossCause::Protocol(violation));
        }
        // Also after requests ended: there may have been no room before. A peer that was sent the
        // bye starts no signal any more, and nobody would ask for the completion of this request.
        if !self.has_left && pair.return_credits() {
            self.post_or_list(peer);
        }
        if is_connecting {
            self.advance(peer);
        }
    }

    /// Handles a failed completion.
    #[cold]
    fn failed(&mut self, peer: Rank, queue: usize, completion: &WorkCompletion) {
        let operation = match self.peers[peer as usize].pair_mut() {
            _ if completion.is_receive => Operation::Receive,
            Some(pair) => pair.operation(queue, completion.number),
            None => Operation::Other,
        };
        if completion.status == sys::IBV_WC_REM_ACCESS_ERR
            && let Some(pair) = self.peers[peer as usize].pair_mut()
        {
            pair.refuse(queue, completion.number, &mut self.event_queue);
        }
        // The peer's process may have ended just now; the control stream reports that cause.
        let (status, queue_pair) = (WorkStatus::of(completion.status), completion.queue_pair);
        self.lose(peer, PairError::QueuePair(WorkFailure { status, operation, queue_pair }).into());
    }

    /// Posts the work requests of a peer, or lists the peer among those to post.
    pub(super) fn post_or_list(&mut self, peer: Rank) {
        let Some(pair) = self.peers[peer as usize].pair_mut() else { return };
        if pair.is_due() {
            match pair.post() {
                Ok(()) if pair.has_posted_all() => return,
                Ok(()) => {}
                Err(cause) => return self.lose(peer, cause),
            }
        }
        pair.list(&mut self.due);
    }

    /// Posts all work requests for which the NICs have room.
    #[inline]
    pub(super) fn post_all(&mut self) {
        if !self.due.is_empty() {
            self.post_due();
        }
    }

    fn post_due(&mut self) {
        let mut kept = 0;
        for index in 0..self.due.len() {
            let peer = self.due[index];
            let Some(pair) = self.peers[peer as usize].pair_mut() else { continue };
            match pair.post_listed() {
                Ok(stays_listed) => {
                    self.due[kept] = peer;
                    kept += usize::from(stays_listed);
                }
                Err(cause) => self.lose(peer, cause),
            }
        }
        self.due.truncate(kept);
    }

    /// Gives a peer up; its event comes from the control plane. Contract line 4: messages of the
    /// peer may not have been read from its stream yet, so an open pair ends with that event.
    pub(super) fn lose(&mut self, peer: Rank, cause: LossCause) {
        self.control.lose(peer, cause.clone());
        if let Peer::Open(_) = self.peers[peer as usize] {
            return self.forget_queue_pairs(peer);
        }
        if !self.untold.contains(&peer) && matches!(self.peers[peer as usize], Peer::Connecting(_)) {
            self.untold.push(peer);
        }
        self.end(peer, Peer::Lost(cause.clone()), &TransferError::Lost { peer, cause });
    }

    /// Gives up every peer, because bytes in GPU memory may not be visible.
    #[cold]
    fn gpu_flush_failed(&mut self, error: CudaError) {
        tracing::error!("{error}");
        let cause = LossCause::from(PairError::GpuNotFlushed(error));
        for peer in 0..self.peers.len() as Rank {
            if self.peers[peer as usize].pair_mut().is_some() {
                self.lose(peer, cause.clone());
            }
        }
    }

    /// Ends all transfers of a peer.
    pub(super) fn end(&mut self, peer: Rank, then: Peer, error: &TransferError) {
        let pair = match std::mem::replace(&mut self.peers[peer as usize], then) {
            Peer::Open(pair) => Some(*pair),
            Peer::Connecting(connecting) => connecting.into_pair(),
            _ => None,
        };
        if let Some(pair) = pair {
            self.end_pair(peer, pair, error);
        }
    }

    /// Destroys a pair's queue pairs and ends its transfers.
    pub(super) fn end_pair(&mut self, peer: Rank, pair: Pair, error: &TransferError) {
        self.forget_queue_pairs(peer);
        if let Some(connection_manager) = &mut self.connection_manager {
            connection_manager.disconnect(peer);
        }
        self.past_counts += pair.counts();
        pair.fail(error, &mut self.event_queue);
    }

    /// Ignores later completions for this peer.
    fn forget_queue_pairs(&mut self, peer: Rank) {
        for nic in &mut self.nics {
            nic.owners.retain(|_, (owner, _)| *owner != peer);
        }
    }

    /// The work that not every poll does.
    #[cold]
    pub(super) fn poll_slow_path(&mut self, now: Nanos) {
        self.poll_control(now);
        self.expire_connecting(now);
    }

    /// Handles the events of the control plane, in order.
    fn poll_control(&mut self, now: Nanos) {
        self.control_due_at = now + CONTROL_INTERVAL;
        self.control_polls = 0;
        if self.control.wake_source().is_set() {
            self.control.wake_source().drain();
        }
        if self.control.has_events() {
            for event in self.control.take_events() {
                self.take_event(event);
            }
        }
        if self.connection_manager.is_some() && (std::mem::take(&mut self.has_slept) || self.is_connecting())
        {
            self.poll_connection_manager();
        }
    }

    fn take_event(&mut self, event: ControlEvent<ControlMessage>) {
        if let ControlEvent::Departed { peer } | ControlEvent::Lost { peer, .. } = &event {
            self.untold.retain(|untold| untold != peer);
        }
        match event {
            ControlEvent::Opened { peer, pair } => {
                self.incarnations[peer as usize] = Some(pair.incarnation);
                if self.has_left {
                    self.control.send_bye(peer);
                }
                self.send_hello(peer);
            }
            ControlEvent::Message { peer, message } => self.handle_message(peer, message),
            ControlEvent::Departed { peer } | ControlEvent::Lost { peer, .. }
                if matches!(self.peers[peer as usize], Peer::Severed) => {}
            ControlEvent::Departed { peer } => {
                // The peer sent its bye when its NIC had all acknowledgements: so all completions
                // are here.
                while self.take_completions() {}
                self.end(peer, Peer::Departed, &TransferError::Departed { peer });
                self.event_queue.push_back(Event::Departed { peer });
            }
            ControlEvent::Lost { peer, cause } => {
                let error = TransferError::Lost { peer, cause: cause.clone() };
                self.end(peer, Peer::Lost(cause.clone()), &error);
                self.event_queue.push_back(Event::PeerLost { peer, cause });
            }
        }
    }

    /// Submits the marks of drains for which there is room, and reports the drains that are over.
    #[cold]
    pub(crate) fn advance_drains(&mut self) {
        for peer in std::mem::take(&mut self.draining) {
            // A drain of a pair that has ended is never over.
            let Peer::Open(pair) = &mut self.peers[peer as usize] else { continue };
            let is_over = pair.advance_drains(&mut self.event_queue);
            pair.list(&mut self.due);
            if !is_over {
                self.draining.push(peer);
            }
        }
    }

    fn is_connecting(&self) -> bool {
        self.peers.iter().any(|peer| matches!(peer, Peer::Connecting(_)))
    }

    /// Sends byes when every peer has acknowledged all requests.
    pub(super) fn finish_leaving(&mut self) {
        let (mut is_idle, mut broken) = (true, Vec::new());
        for (rank, peer) in (0..).zip(&mut self.peers) {
            let Peer::Open(pair) = peer else { continue };
            pair.request_completion();
            if let Err(cause) = pair.post() {
                broken.push((rank, cause));
            }
            is_idle &= pair.is_idle();
        }
        for (peer, cause) in broken {
            self.lose(peer, cause);
        }
        if is_idle {
            self.has_left = true;
            (0..self.control.world_size()).for_each(|peer| self.control.send_bye(peer));
        }
    }

    pub(super) fn post_message(
        &mut self,
        peer: Rank,
        message: &[u8],
        is_urgent: bool,
    ) -> Result<(), PostError> {
        match self.peers.get(peer as usize) {
            Some(Peer::Open(_)) => {}
            _ => return Err(PostError::NotConnected { peer }),
        }
        // A peer that has this message finds earlier released regions gone.
        self.forget_released();
        self.control.post(peer, message, is_urgent)
    }

    /// Deregisters regions without a handle.
    pub(super) fn forget_released(&mut self) {
        for key in self.releases.take() {
            self.regions.remove(&key);
            self.announce(key);
        }
    }

    pub(super) fn deliver(&mut self, events: &mut Vec<Event>) {
        let count = (events.capacity() - events.len()).min(self.event_queue.len());
        events.extend(self.event_queue.drain(..count));
    }
}
