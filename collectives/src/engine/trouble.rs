//! What goes wrong: who is late and why, what is told to whom, and how a group ends.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{
    Flush, LossKind, MapError, Nanos, SubmitError, TransferError, TransferId, Urgency, last_resort,
};
use pleach_vocabulary::Rank;

use super::agreement::{Look, Talk};
use super::at::run_of;
use super::circle::LOOK_INTERVAL_MAX;
use super::fault::{Fault, FaultKind};
use super::message::{Message, Record, Verdict};
use super::run::{Run, Trouble};
use super::stream::Stream;
use super::waiting::Heard;
use super::{
    Asked, COMPUTE_END_LIMIT, DOUBT_TIME, Engine, FLOOD_TIME, FLOOD_TIME_EXPELLED, Phase, QUERY_AFTER,
    QUERY_INTERVAL_MAX, SEVER_LIMIT, SILENT_AFTER, State, Times,
};

impl Engine {
    pub(super) fn transfer_failed(&mut self, id: TransferId, error: &TransferError, now: Nanos) {
        let slot = Some(run_of(id) as u8);
        let fault = match error {
            TransferError::Lost { peer, cause } => {
                self.fault_of_loss(*peer, cause.kind(), cause.to_string(), slot, now)
            }
            TransferError::Departed { peer } => {
                self.fault(FaultKind::Left, *peer, error.to_string(), slot, now)
            }
            TransferError::Refused { peer, .. } => {
                self.fault(FaultKind::Protocol, *peer, error.to_string(), slot, now)
            }
            TransferError::Fabric { .. } => {
                self.fault(FaultKind::Compute, self.rank, error.to_string(), slot, now)
            }
            _ => return,
        };
        self.fail(fault, now);
    }

    /// A peer was in another call: unless it lies, the group has failed.
    pub(super) fn compare(&mut self, peer: Rank, stream: Stream, theirs: &Record, now: Nanos) {
        let Ok(own) = self.board.record_for(peer, stream, theirs.run) else { return };
        if own.signature == theirs.signature {
            return;
        }
        let mut fault = self.fault(FaultKind::Mismatch, peer, String::new(), None, now);
        fault.run = own.run;
        fault.during = own.describe();
        fault.theirs = theirs.describe();
        self.fail(fault, now);
    }

    pub(super) fn ask_earlier(&mut self, peer: Rank, stream: Stream, run: u64) {
        if let Some(earlier) = run.checked_sub(1)
            && let Ok(record) = self.board.record_for(peer, stream, earlier)
        {
            self.query(peer, stream, record, self.observer.seen_at);
        }
    }

    /// Whether who computes has failed; then the group has.
    pub(super) fn check_compute(&mut self, now: Nanos) -> bool {
        let Some(error) = self.compute.failure() else { return false };
        let fault = self.fault(FaultKind::Compute, self.rank, error.to_string(), None, now);
        self.fail(fault, now);
        true
    }

    /// Deadlines, departed peers and questions; true when something failed.
    pub(super) fn check_time(&mut self, now: Nanos) -> bool {
        for index in 0..self.order.len() {
            let slot = self.order[index];
            let entry = &mut self.slots[usize::from(slot)];
            let Some(run) = &mut entry.run else { continue };
            let times = *entry.times.get_or_insert_with(|| {
                entry.has_moved = true;
                Times { begun_at: now, deadline: now + entry.timeout }
            });
            let is_suspicious = run.suspect.take().is_some();
            if std::mem::take(&mut entry.has_moved) {
                if entry.query_interval > QUERY_AFTER {
                    self.board.block_on(None);
                }
                entry.query_interval = QUERY_AFTER;
                entry.query_at = now + QUERY_AFTER;
            }
            // A signal that does not match is asked about at once, but only once: it is seen again
            // at every poll.
            let asks_early = is_suspicious && entry.query_interval == QUERY_AFTER;
            if now < entry.query_at.min(times.deadline) && !asks_early {
                continue;
            }
            if now >= times.deadline {
                let fault = self.timed_out(slot, now);
                self.fail(fault, now);
                return true;
            }
            entry.query_interval = (entry.query_interval * 2).min(QUERY_INTERVAL_MAX);
            entry.query_at = now + entry.query_interval;
            if let Some(fault) = self.ask(slot, now) {
                self.fail(fault, now);
                return true;
            }
            self.look_for_circle(slot, now);
            if self.suspects_circle(slot) {
                let query_at = &mut self.slots[usize::from(slot)].query_at;
                *query_at = (*query_at).min(now + LOOK_INTERVAL_MAX);
            }
        }
        false
    }

    /// Peers that a run waits for, with the first step that does.
    pub(super) fn waits_for(&self, slot: u8) -> BTreeMap<Rank, String> {
        let mut peers = BTreeMap::new();
        let entry = &self.slots[usize::from(slot)];
        if let Some(run) = &entry.run
            && entry.state == State::Active
        {
            let heard =
                Heard { credits: &self.credits, signal_slots: &self.signal_slots, consumed: &self.consumed };
            run.waits_for(&heard, &mut |peer, step| {
                peers.entry(peer).or_insert_with(step);
            });
        }
        peers
    }

    /// Asks those a run waits for what they are doing; a fault when one of them has left.
    pub(super) fn ask(&mut self, slot: u8, now: Nanos) -> Option<Fault> {
        let run = self.slots[usize::from(slot)].run.as_ref()?;
        let stream = run.stream();
        let number = run.parameters.number;
        let peers = self.waits_for(slot);
        self.board.block_on(self.blame(slot, &peers, now).map(|(peer, _)| peer));
        for (peer, step) in peers {
            if self.left[peer as usize] {
                return Some(self.fault_of_left(slot, peer, step, now));
            }
            let record = self.board.record_for(peer, stream, number).ok()?;
            if !self.query(peer, stream, record, now) {
                // Another run's question is under way: this one has its turn when that is answered.
                self.slots[usize::from(slot)].query_at = now + QUERY_AFTER;
            }
        }
        None
    }

    /// A run waits for a peer that has left: the peer made fewer calls, or another one, as its
    /// signal says. The peer does not answer any more which one that was.
    fn fault_of_left(&self, slot: u8, peer: Rank, step: String, now: Nanos) -> Fault {
        let heard =
            Heard { credits: &self.credits, signal_slots: &self.signal_slots, consumed: &self.consumed };
        let run = self.slots[usize::from(slot)].run.as_ref();
        if !run.is_some_and(|run| run.differs_by_signal(&heard, peer)) {
            return self.fault(FaultKind::Left, peer, step, Some(slot), now);
        }
        self.fault(FaultKind::Mismatch, peer, String::new(), Some(slot), now)
    }

    /// Asks a peer what it is doing, if no question to it is unanswered; false where another run's
    /// is. So a peer that is stopped is sent one question, however long it is waited for.
    fn query(&mut self, peer: Rank, stream: Stream, record: Record, now: Nanos) -> bool {
        let about = (stream, record.run);
        if let Some(asked) = self.asked.get(&peer) {
            return asked.about == about;
        }
        if self.device.post(peer, &Message::Query { stream, record }.encode(), Urgency::Ordinary).is_ok() {
            self.asked.insert(peer, Asked { since: now, about });
        }
        true
    }

    /// Which of the peers that a run waits for is the cause, by what they say: one that says
    /// nothing, else one that has not made the call or whom it waits for in another one, else whom
    /// those wait for who have; and how it is to be put.
    pub(super) fn blame(
        &self,
        slot: u8,
        peers: &BTreeMap<Rank, String>,
        now: Nanos,
    ) -> Option<(Rank, String)> {
        let run = self.slots[usize::from(slot)].run.as_ref()?;
        let (stream, number) = (run.stream(), run.parameters.number);
        let said = |peer: Rank| {
            let answer = self.answers.get(&peer);
            answer.filter(|answer| answer.stream == stream && answer.record.run == number)
        };
        let since = |peer: Rank| self.silent_since(peer, now);
        if let Some((peer, step)) =
            peers.iter().filter(|(peer, _)| since(**peer).is_some()).min_by_key(|(peer, _)| since(**peer))
        {
            return Some((*peer, format!("it does not say any more what it is doing ({step})")));
        }
        if let Some((peer, step)) = peers.iter().find(|(peer, _)| said(**peer).is_none()) {
            return Some((*peer, format!("it does not say what it is doing ({step})")));
        }
        let is_absent = |peer: &Rank| said(*peer).is_some_and(|answer| answer.verdict == Verdict::NotYet);
        if let Some((peer, step)) = peers.iter().find(|(peer, _)| is_absent(peer)) {
            return Some(match said(*peer).and_then(|answer| answer.blocked_on) {
                // One that is a call behind is not the cause of what it waits for.
                Some(other) if other != self.rank && !peers.contains_key(&other) => {
                    let behind = format!("rank {peer} has not made this call yet");
                    (other, format!("{behind}, as it waits in another one for rank {other} ({step})"))
                }
                Some(other) => {
                    let absent = "it has not made this call yet";
                    (*peer, format!("{absent}, as it waits in another one for rank {other} ({step})"))
                }
                None => (*peer, format!("it has not made this call yet ({step})")),
            });
        }
        let behind = peers.keys().find_map(|peer| Some((*peer, said(*peer)?.blocked_on?)));
        if let Some((peer, culprit)) = behind.filter(|(_, culprit)| *culprit != self.rank) {
            return Some((culprit, format!("rank {peer} waits for it ({} of rank {peer})", peers[&peer])));
        }
        peers.iter().next().map(|(peer, step)| (*peer, step.clone()))
    }

    /// Since when a peer has not answered, if that is long.
    fn silent_since(&self, peer: Rank, now: Nanos) -> Option<Nanos> {
        let asked = self.asked.get(&peer).map(|asked| asked.since);
        asked.filter(|since| now.since(*since) >= SILENT_AFTER)
    }

    pub(super) fn timed_out(&self, slot: u8, now: Nanos) -> Fault {
        let peers = self.waits_for(slot);
        let (subject, detail) = match self.blame(slot, &peers, now) {
            Some(found) => found,
            None if self.slots[usize::from(slot)].gate.is_some() => {
                (self.rank, "the stream's work from before the call, which the GPU has not done".to_owned())
            }
            None if self.is_ready() => {
                (self.rank, "work of its own (earlier calls are unfinished)".to_owned())
            }
            None => (self.not_ready().next().unwrap_or(self.rank), "joining the group".to_owned()),
        };
        self.fault(FaultKind::TimedOut, subject, detail, Some(slot), now)
    }

    pub(super) fn fault_of(&self, slot: u8, trouble: &Trouble, now: Nanos) -> Fault {
        let (kind, peer, detail) = match trouble {
            Trouble::Submit { peer, error: SubmitError::Lost { kind, .. } } => {
                // The board was told the cause before.
                return self.fault_of_loss(*peer, *kind, kind.to_string(), Some(slot), now);
            }
            Trouble::Submit { peer, error: error @ SubmitError::Departed { .. } } => {
                (FaultKind::Left, peer, error.to_string())
            }
            Trouble::Submit { peer, error } => (FaultKind::Protocol, peer, error.to_string()),
            Trouble::Map { peer, error: error @ MapError::NoRoom { .. } } => {
                (FaultKind::OutOfReach, peer, error.to_string())
            }
            Trouble::Map { error: error @ MapError::Fabric { .. }, .. } => {
                (FaultKind::Compute, &self.rank, error.to_string())
            }
            Trouble::Map { peer, error } => (FaultKind::Protocol, peer, error.to_string()),
        };
        self.fault(kind, *peer, detail, Some(slot), now)
    }

    /// The fault of a lost peer.
    pub(super) fn fault_of_loss(
        &self,
        peer: Rank,
        kind: LossKind,
        detail: String,
        slot: Option<u8>,
        now: Nanos,
    ) -> Fault {
        Fault { loss: Some(kind), ..self.fault(FaultKind::Lost, peer, detail, slot, now) }
    }

    pub(super) fn fault(
        &self,
        kind: FaultKind,
        subject: Rank,
        detail: String,
        slot: Option<u8>,
        now: Nanos,
    ) -> Fault {
        let slot = slot.or_else(|| self.order.first().copied());
        let entry = slot.and_then(|slot| self.slots.get(usize::from(slot)));
        let run = entry.and_then(|entry| entry.run.as_ref());
        let begun_at = entry.and_then(|entry| entry.times).map(|times| times.begun_at);
        Fault {
            kind,
            found_by: self.rank,
            subject,
            loss: None,
            run: run.map_or(self.next_run, |run| run.parameters.number),
            during: run.map(|run| run.plan().descriptor),
            theirs: None,
            detail,
            waited: begun_at.map_or(Duration::ZERO, |begun_at| now.since(begun_at)),
            told_during: None,
        }
    }

    /// The first fault ends the group.
    pub(super) fn fail(&mut self, fault: Fault, now: Nanos) {
        let may_be_echo = match fault.kind {
            FaultKind::TimedOut | FaultKind::Lost | FaultKind::Left | FaultKind::Protocol => true,
            FaultKind::Mismatch | FaultKind::Aborted | FaultKind::OutOfReach | FaultKind::Compute => false,
        };
        if may_be_echo && self.board.has_news() {
            // What peers said before counts first: it may tell why one of them went or refuses.
            self.read_news(now);
        }
        if fault.kind != FaultKind::Protocol {
            return self.settle(fault, now);
        }
        if matches!(self.phase, Phase::Active) {
            // A peer whose group has failed lets go of its memory: the word of its cause, or its
            // end, may be on its way.
            let times = self.order.iter().filter_map(|slot| self.slots[usize::from(*slot)].times);
            let deadline = times.map(|times| times.deadline).min();
            self.phase = Phase::Doubting { fault: Box::new(fault), since: now, deadline };
        }
    }

    /// Takes a refusal for the cause when no other has come to be known in time; true when it has.
    pub(super) fn end_doubt(&mut self, now: Nanos) -> bool {
        let Phase::Doubting { fault, since, deadline } = &self.phase else { return false };
        let is_late = deadline.is_some_and(|deadline| now >= deadline);
        if !is_late && now < *since + DOUBT_TIME {
            return false;
        }
        let mut fault = (**fault).clone();
        if is_late {
            // Nobody can tell any more whether the reason would still have come.
            fault.kind = FaultKind::TimedOut;
        }
        fault.waited += now.since(*since);
        self.settle(fault, now);
        true
    }

    /// As [`Engine::fail`], at once.
    fn settle(&mut self, fault: Fault, now: Nanos) {
        if matches!(self.phase, Phase::Active | Phase::Doubting { .. }) {
            self.board.propose(fault);
            self.begin_failing(now);
        }
    }

    /// The group has failed: no run goes on, and this rank agrees with its peers on why.
    pub(super) fn begin_failing(&mut self, now: Nanos) {
        if !matches!(self.phase, Phase::Active | Phase::Doubting { .. }) {
            return;
        }
        let silent = (0..self.ranks).filter(|peer| self.silent_since(*peer, now).is_some());
        let mut agreement = self.board.agreement();
        silent.for_each(|peer| agreement.lose(peer));
        drop(agreement);
        let waiting_for = (0..self.ranks).map(|peer| peer != self.rank).collect();
        self.phase = Phase::Failing {
            talk: Talk::new(now),
            verdict: None,
            sever_at: Nanos::MAX,
            is_severing: false,
            waiting_for,
        };
        self.agree(now);
    }

    /// Goes on to agree with the peers on why the group has failed; true when anything was told or
    /// decided.
    pub(super) fn agree(&mut self, now: Nanos) -> bool {
        let Phase::Failing { talk, verdict, is_severing: false, .. } = &mut self.phase else { return false };
        let Look { tell, verdict: agreed } = match verdict {
            None => talk.look(&mut self.board.agreement(), self.ranks, now),
            // Who was not connected yet when the others were told.
            Some(_) => Look { tell: talk.untold(&self.board.agreement()), verdict: None },
        };
        if let Some(claim) = &tell {
            let message = Message::Claim { claim: claim.clone(), asks: !claim.is_final }.encode();
            for peer in (0..self.ranks).filter(|peer| *peer != self.rank) {
                // Who is gone need not know.
                let _ = self.device.post(peer, &message, Urgency::Urgent);
            }
        }
        let Some(mut agreed) = agreed else { return tell.is_some() };
        let flood_time = if self.board.agreement().has_expelled() { FLOOD_TIME_EXPELLED } else { FLOOD_TIME };
        if agreed.during.is_none() {
            // It was found in no call: this rank's own says what it ended.
            let run = self.order.first().and_then(|slot| self.slots[usize::from(*slot)].run.as_ref());
            agreed.told_during = run.map(|run| run.plan().descriptor);
        }
        tracing::info!(rank = self.rank, "group failed: {agreed}");
        self.note_failure(agreed.to_string(), now);
        if let Phase::Failing { verdict, sever_at, .. } = &mut self.phase {
            (*verdict, *sever_at) = (Some(Arc::new(agreed)), now + flood_time);
        }
        true
    }

    /// Cuts everybody off once the ranks have agreed; the group has failed when nobody can touch
    /// this rank's memory any more.
    pub(super) fn sever(&mut self, now: Nanos) -> bool {
        let Phase::Failing { verdict: Some(fault), sever_at, is_severing, waiting_for, .. } = &mut self.phase
        else {
            return false;
        };
        let was_severing = *is_severing;
        // A peer whose connection is still on its way has been told nothing yet.
        let is_told = || {
            let agreement = self.board.agreement();
            self.connected.iter().zip(0..).all(|(connected, peer)| *connected || agreement.has_lost(peer))
        };
        // What is still computed works on memory that is let go of here.
        let is_time = !*is_severing && (now >= *sever_at || self.device.flush(Flush::All) && is_told());
        let is_idle = is_time && self.compute.is_idle();
        // Not since `sever_at`: a fault may be found by a call that did not look at the clock.
        let waited = now.since(*self.failing_since.get_or_insert(now));
        if is_time && !is_idle && waited >= COMPUTE_END_LIMIT {
            last_resort::abort(format_args!(
                "rank {}: the group has failed ({fault}), but the GPU has not ended its kernels, which may write to the \
                 call's buffers, for {COMPUTE_END_LIMIT:?}",
                self.rank
            ));
        }
        if *is_severing && waited >= COMPUTE_END_LIMIT + SEVER_LIMIT {
            last_resort::abort(format_args!(
                "rank {}: the group has failed ({fault}), but the {} device has not kept all peers from writing to this \
                 rank's memory within {SEVER_LIMIT:?}",
                self.rank,
                self.device.info().fabric
            ));
        }
        if is_idle {
            *is_severing = true;
            // Deregistered first: on shm severing would make every page of it private, which takes
            // long. For the same reason peers' memory is let go of, which it would copy: no run
            // goes on.
            self.scratch = None;
            self.peer_scratch_mapped.clear();
            self.slots.iter_mut().filter_map(|slot| slot.run.as_mut()).for_each(Run::stop);
            for peer in (0..self.ranks).filter(|peer| *peer != self.rank) {
                self.device.sever(peer);
            }
        }
        if *is_severing && !waiting_for.contains(&true) {
            self.phase = Phase::Failed(fault.clone());
            return true;
        }
        *is_severing != was_severing
    }
}
