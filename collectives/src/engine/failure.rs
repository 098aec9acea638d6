//! How a group fails.
//!
//! The first fault ends the group. The engine then goes through these phases:
//!
//! 1. *Doubting*, only where a peer refuses an access, as a peer does whose group has failed: no
//!    run goes on, and for a moment the peer's reason is awaited.
//! 2. *Failing*: the ranks agree on one verdict ([`super::agreement`]), the verdict is told to all,
//!    jobs that are still computed end, and every peer is severed.
//! 3. *Failed*: no peer can touch this rank's memory.
//!
//! **Invariant:** outcomes are given out only in the last phase.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{
    Flush, LossKind, MapError, Nanos, SubmitError, TransferError, TransferId, Urgency, last_resort,
};
use pleach_vocabulary::Rank;

use super::agreement::Negotiation;
use super::fault::{Fault, FaultKind};
use super::message::Message;
use super::run::StepError;
use super::{Context, Engine, StepAddress};
use crate::call::Descriptor;

/// How long a rank tries to tell its peers the verdict before it severs them.
const FLOOD_TIME: Duration = Duration::from_millis(20);
/// The same where a peer that can be reached was called gone by another rank: that peer has not
/// agreed, and has to hear the verdict to know it.
const FLOOD_TIME_EXPELLED: Duration = Duration::from_millis(100);
/// How long a rank that was refused an access waits to hear why, or to see that the peer is gone,
/// before it blames the peer.
const DOUBT_TIME: Duration = Duration::from_millis(150);
/// How long a failed group waits for a GPU to end its kernels. They run for milliseconds. A kernel
/// that runs longer hangs, and the process is aborted: its memory may not be given back while
/// kernels write there.
const COMPUTE_END_LIMIT: Duration = Duration::from_secs(10);
/// How long a device may take to sever all peers, which is this rank's own work: several TiB of
/// memory are copied in that time. Only a defect takes longer, and the process is aborted.
const SEVER_LIMIT: Duration = Duration::from_secs(1800);
/// How often a failed group polls whether its GPU has ended.
const COMPUTE_END_INTERVAL: Duration = Duration::from_millis(1);

#[derive(Default)]
enum Phase {
    #[default]
    Active,
    Doubting {
        fault: Box<Fault>,
        since: Nanos,
        deadline: Option<Nanos>,
    },
    Failing {
        negotiation: Negotiation,
        /// Once the ranks have agreed on it.
        verdict: Option<Arc<Fault>>,
        sever_at: Nanos,
        is_severing: bool,
        /// By rank: whether the peer may still touch this rank's memory.
        unfenced: Vec<bool>,
    },
    Failed(Arc<Fault>),
}

/// Whether and how far the group has failed; see the module.
#[derive(Default)]
pub(super) struct FailureState {
    phase: Phase,
    /// When a poll first found the group failing.
    failing_since: Option<Nanos>,
}

impl FailureState {
    /// Whether nothing has failed.
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Active)
    }

    /// The fault, in the last phase.
    pub(super) fn fault(&self) -> Option<&Arc<Fault>> {
        match &self.phase {
            Phase::Failed(fault) => Some(fault),
            _ => None,
        }
    }

    /// Whether this rank's memory is being taken out of its peers' reach.
    pub(super) fn is_severing(&self) -> bool {
        matches!(self.phase, Phase::Failing { is_severing: true, .. })
    }

    /// The fault on which the ranks have agreed, as a call sees it that is told now. Until they
    /// have agreed calls are accepted and do not begin.
    pub(super) fn verdict_during(&mut self, call: &Descriptor) -> Option<Arc<Fault>> {
        let (Phase::Failing { verdict: Some(fault), .. } | Phase::Failed(fault)) = &mut self.phase else {
            return None;
        };
        if fault.during.is_none() && fault.told_during.is_none() {
            Arc::make_mut(fault).told_during = Some(*call);
        }
        Some(fault.clone())
    }

    /// When to go on at the latest.
    pub(super) fn next_wakeup(&self, seen_at: Nanos) -> Option<Nanos> {
        match &self.phase {
            Phase::Failing { negotiation, verdict: None, .. } => Some(negotiation.wakeup()),
            Phase::Failing { sever_at, is_severing: false, .. } => {
                Some((*sever_at).max(seen_at + COMPUTE_END_INTERVAL))
            }
            Phase::Doubting { since, deadline, .. } => {
                Some(deadline.unwrap_or(Nanos::MAX).min(*since + DOUBT_TIME))
            }
            Phase::Active | Phase::Failing { .. } | Phase::Failed(_) => None,
        }
    }

    /// The peer is severed.
    pub(super) fn severed(&mut self, peer: Rank) {
        if let Phase::Failing { unfenced, .. } = &mut self.phase {
            unfenced[peer as usize] = false;
        }
    }
}

impl Engine {
    /// Whether the group works: nothing has failed.
    pub(crate) fn works(&self) -> bool {
        self.failure.is_active()
    }

    /// Ends the group, because `rank` does not do what `detail` says.
    pub(crate) fn give_up_on(
        &mut self,
        kind: FaultKind,
        rank: Rank,
        detail: String,
        waited: Duration,
        now: Nanos,
    ) {
        let fault = self.fault(kind, rank, detail, None, now);
        self.fail(Fault { waited, ..fault }, now);
    }

    /// The lowest rank that has left, if any has.
    pub(crate) fn first_departed(&self) -> Option<Rank> {
        self.queries.first_departed()
    }

    /// How many ranks have left.
    pub(crate) fn departures(&self) -> usize {
        self.queries.departures()
    }

    /// Whether this rank has left.
    pub(crate) fn has_departed(&self, peer: Rank) -> bool {
        self.queries.has_departed(peer)
    }

    /// Goes on with the end of the group; true when anything moved.
    pub(super) fn advance_failure(&mut self, now: Nanos) -> bool {
        match self.failure.phase {
            Phase::Active | Phase::Failed(_) => false,
            Phase::Doubting { .. } => self.end_doubt(now),
            Phase::Failing { .. } => self.agree(now) | self.sever(now),
        }
    }

    /// A transfer of a run has failed.
    pub(super) fn transfer_failed(&mut self, id: TransferId, error: &TransferError, now: Nanos) {
        let slot = Some(StepAddress::run_of(id));
        let (kind, peer) = match error {
            TransferError::Lost { peer, cause } => {
                let fault = self.fault_of_loss(*peer, cause.kind(), cause.to_string(), slot, now);
                return self.fail(fault, now);
            }
            TransferError::Departed { peer } => (FaultKind::Left, *peer),
            TransferError::Refused { peer, .. } => (FaultKind::Protocol, *peer),
            TransferError::Fabric { .. } => (FaultKind::Compute, self.context.rank),
            _ => return,
        };
        let fault = self.fault(kind, peer, error.to_string(), slot, now);
        self.fail(fault, now);
    }

    /// The fault of a run that cannot go on.
    pub(super) fn fault_of_step(&self, slot: u8, error: &StepError, now: Nanos) -> Fault {
        let (kind, peer, detail) = match error {
            StepError::Submit { peer, error: SubmitError::Lost { kind, .. } } => {
                // The status board was told the cause before.
                return self.fault_of_loss(*peer, *kind, kind.to_string(), Some(slot), now);
            }
            StepError::Submit { peer, error: error @ SubmitError::Departed { .. } } => {
                (FaultKind::Left, peer, error.to_string())
            }
            StepError::Submit { peer, error } => (FaultKind::Protocol, peer, error.to_string()),
            StepError::Map { peer, error: error @ MapError::NoRoom { .. } } => {
                (FaultKind::OutOfReach, peer, error.to_string())
            }
            StepError::Map { error: error @ MapError::Fabric { .. }, .. } => {
                (FaultKind::Compute, &self.context.rank, error.to_string())
            }
            StepError::Map { peer, error } => (FaultKind::Protocol, peer, error.to_string()),
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

    /// A fault that this rank has found in the run of a slot, without one in the oldest run.
    pub(super) fn fault(
        &self,
        kind: FaultKind,
        subject: Rank,
        detail: String,
        slot: Option<u8>,
        now: Nanos,
    ) -> Fault {
        let slot = slot.or_else(|| self.admission.unfinished().first().copied());
        let run = slot.and_then(|slot| self.admission.run(slot));
        let begun_at = slot.and_then(|slot| self.admission.begun_at(slot));
        Fault {
            kind,
            found_by: self.context.rank,
            subject,
            loss: None,
            run: run.map_or(self.admission.next_run(), |run| run.number()),
            during: run.map(|run| *run.plan().descriptor()),
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
            FaultKind::Mismatch
            | FaultKind::Aborted
            | FaultKind::OutOfReach
            | FaultKind::Compute
            | FaultKind::Changed => false,
        };
        if may_be_echo && self.board.has_unread() {
            // Messages that came before count first: they may tell why a peer left or refuses.
            self.read_messages(now);
        }
        if fault.kind != FaultKind::Protocol {
            return self.propose(fault, now);
        }
        if self.failure.is_active() {
            // A peer whose group has failed lets go of its memory: its word of the cause, or its
            // end, may be on its way.
            let deadline = self.admission.first_deadline();
            self.failure.phase = Phase::Doubting { fault: Box::new(fault), since: now, deadline };
        }
    }

    /// Takes a refusal for the cause when no other has come to be known in time; true when it has.
    fn end_doubt(&mut self, now: Nanos) -> bool {
        let Phase::Doubting { fault, since, deadline } = &self.failure.phase else { return false };
        let is_late = deadline.is_some_and(|deadline| now >= deadline);
        if !is_late && now < *since + DOUBT_TIME {
            return false;
        }
        let mut fault = (**fault).clone();
        if is_late {
            // It cannot be known any more whether the reason would still have come.
            fault.kind = FaultKind::TimedOut;
        }
        fault.waited += now.since(*since);
        self.propose(fault, now);
        true
    }

    /// As [`Engine::fail`], at once.
    fn propose(&mut self, fault: Fault, now: Nanos) {
        if matches!(self.failure.phase, Phase::Active | Phase::Doubting { .. }) {
            self.board.propose(fault);
            self.begin_failing(now);
        }
    }

    /// The group has failed: no run goes on, and this rank agrees with its peers on why.
    pub(super) fn begin_failing(&mut self, now: Nanos) {
        if !matches!(self.failure.phase, Phase::Active | Phase::Doubting { .. }) {
            return;
        }
        let Context { rank, ranks, .. } = self.context;
        self.failure.phase = Phase::Failing {
            negotiation: Negotiation::new(now),
            verdict: None,
            sever_at: Nanos::MAX,
            is_severing: false,
            unfenced: (0..ranks).map(|peer| peer != rank).collect(),
        };
        self.agree(now);
    }

    /// Goes on to agree with the peers on why the group has failed; true when anything was told or
    /// decided.
    fn agree(&mut self, now: Nanos) -> bool {
        let Phase::Failing { negotiation, verdict, sever_at, is_severing: false, .. } =
            &mut self.failure.phase
        else {
            return false;
        };
        if let Some(end) = self.board.epoch_end() {
            // The session tells the others, and has agreed with them.
            negotiation.rest(now);
            end.await_over(now);
            let Some(fault) = end.over().filter(|_| verdict.is_none()) else { return false };
            (*verdict, *sever_at) = (Some(Arc::new(fault.clone())), now);
            return true;
        }
        let (tell, agreed) = match verdict {
            None => negotiation.advance(&mut self.board.agreement(), self.context.ranks, now),
            // A peer that was not connected yet when the others were told.
            Some(_) => (self.board.agreement().untold(), None),
        };
        let has_told = tell.is_some();
        if let Some(claim) = tell {
            let asks = !claim.is_final() && !self.board.relays();
            let message = Message::Claim { asks, claim: claim.clone() }.encode();
            let told = self.board.agreement().told(self.context.ranks);
            for peer in told {
                // A peer that is gone need not know.
                let _ = self.context.device.post(peer, &message, Urgency::Urgent);
            }
            self.board.agreement().has_told(&claim);
        }
        let Some(mut agreed) = agreed else { return has_told };
        let flood_time = if self.board.agreement().has_expelled() { FLOOD_TIME_EXPELLED } else { FLOOD_TIME };
        if agreed.during.is_none() {
            // The fault was found in no call: this rank's oldest call says what it ended.
            let run = self.admission.unfinished().first().and_then(|slot| self.admission.run(*slot));
            agreed.told_during = run.map(|run| *run.plan().descriptor());
        }
        tracing::info!(rank = self.context.rank, "group failed: {agreed:#}");
        self.note_failure(format!("{agreed:#}"), now);
        if let Phase::Failing { verdict, sever_at, .. } = &mut self.failure.phase {
            (*verdict, *sever_at) = (Some(Arc::new(agreed)), now + flood_time);
        }
        true
    }

    /// Severs all peers once the ranks have agreed; the group has failed when no peer can touch
    /// this rank's memory any more.
    fn sever(&mut self, now: Nanos) -> bool {
        let Phase::Failing { verdict: Some(fault), sever_at, is_severing, unfenced, .. } =
            &mut self.failure.phase
        else {
            return false;
        };
        let context = &mut self.context;
        let was_severing = *is_severing;
        // A peer whose connection is still on its way was told nothing yet.
        let is_told = |context: &Context| {
            let agreement = self.board.agreement();
            context.scratch.unconnected().all(|peer| agreement.has_lost(peer))
        };
        let is_time =
            !*is_severing && (now >= *sever_at || context.device.flush(Flush::All) && is_told(context));
        // Jobs that are still computed work on memory that is let go of here.
        let is_idle = is_time && context.compute.is_idle();
        // Not since `sever_at`: a fault may be found by a call that did not read the clock.
        let waited = now.since(*self.failure.failing_since.get_or_insert(now));
        let rank = context.rank;
        if is_time && !is_idle && waited >= COMPUTE_END_LIMIT {
            last_resort::abort(format_args!(
                "rank {rank}: the group has failed ({fault}), but the GPU has not ended its kernels, which may write to the \
                 call's buffers, for {COMPUTE_END_LIMIT:?}"
            ));
        }
        if *is_severing && waited >= COMPUTE_END_LIMIT + SEVER_LIMIT {
            last_resort::abort(format_args!(
                "rank {rank}: the group has failed ({fault}), but the {} device has not kept all peers from writing to this \
                 rank's memory within {SEVER_LIMIT:?}",
                context.device.info().fabric
            ));
        }
        if is_idle {
            *is_severing = true;
            // Deregistered first: on shm severing would make every page of it private, which takes
            // long. For the same reason peers' memory is let go of, which it would copy: no run
            // goes on.
            context.scratch.own = None;
            self.fast_path.close();
            self.admission.stop_runs();
            for peer in context.peers() {
                context.device.sever(peer);
            }
        }
        if *is_severing && !unfenced.contains(&true) {
            self.failure.phase = Phase::Failed(fault.clone());
            return true;
        }
        *is_severing != was_severing
    }
}
