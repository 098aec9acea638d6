//! Distributed deadlock detection: finds ranks whose calls wait for each other in a cycle. Examples
//! are a receive against a collective, and two receives.
//!
//! A rank that is blocked in a call makes no other call before that call ends, if one thread makes
//! its calls. So a cycle of ranks, each of which waits for a call that the next one has not made
//! because it is blocked in another call, never ends.
//!
//! A blocked rank chases the edges of such a cycle (as in Chandy, Misra and Haas, "Distributed
//! deadlock detection", ACM Transactions on Computer Systems 1, 1983) with a [`Probe`]: it asks the
//! ranks that its call needs in which call they are blocked, then the ranks that these name, each
//! only when the one before has answered.
//!
//! **Invariant:** a cycle that was found was there as a whole at one instant. An edge holds until
//! the missing call is made; a rank that has answered is blocked until then; and each edge was seen
//! after the one before. Ranks whose calls come from several threads say so, and then none of their
//! calls counts as blocked.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::{Collective, Rank};

use super::fault::{Fault, FaultKind};
use super::message::Message;
use super::{Context, Engine, RunId, Stream};
use crate::call::{DESCRIPTOR_WORDS, Descriptor};

/// How long a cycle has to last until it is an error.
pub const DEADLOCK_AFTER: Duration = Duration::from_millis(30);
/// Longest time between two probes while a cycle is suspected.
pub(super) const PROBE_INTERVAL_MAX: Duration = Duration::from_millis(8);
/// Most probes whose answers are awaited at once; older ones are given up.
const PROBES_MAX: usize = 8;

const BLOCKED_CALL_WORDS: usize = 3 + DESCRIPTOR_WORDS;

/// A run that has to end before its rank makes another call, and that needs a call of rank `on`, as
/// far as the rank knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockedCall {
    run: RunOf,
    on: Rank,
    descriptor: [u64; DESCRIPTOR_WORDS],
}

impl BlockedCall {
    pub(super) fn words(&self) -> impl Iterator<Item = u64> + use<> {
        [self.run.0.to_word(), self.run.1, u64::from(self.on)].into_iter().chain(self.descriptor)
    }

    pub(super) fn of_words(words: [u64; BLOCKED_CALL_WORDS]) -> Option<Self> {
        let [stream, run, on, descriptor @ ..] = words;
        Some(Self { run: (Stream::from_word(stream), run), on: Rank::try_from(on).ok()?, descriptor })
    }
}

type RunOf = (Stream, u64);

/// A rank that was asked whether it has entered a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Edge {
    rank: Rank,
    run: RunOf,
    /// The edge whose rank is blocked in that run; `None` where it is this rank's own.
    before: Option<usize>,
    /// The call in which the rank is blocked, once it has said so.
    instead: Option<BlockedCall>,
}

/// The edges that were followed from this rank's own call.
struct Probe {
    number: u64,
    begun_at: Nanos,
    edges: Vec<Edge>,
}

/// A cycle that was found: its ranks and runs.
struct SuspectedCycle {
    cycle: Vec<(Rank, RunOf)>,
    since: Nanos,
}

/// What a blocked rank knows of the ranks that wait for each other; see the module.
#[derive(Default)]
pub(super) struct DeadlockDetector {
    /// The call that this rank's thread waits for without a limit of its own.
    awaited: Option<RunId>,
    /// Several threads make calls, so a rank that is blocked in one may make another.
    is_concurrent: bool,
    /// The status board says that this rank is blocked in the run of this slot.
    told: Option<u8>,
    probes: VecDeque<Probe>,
    next_probe: u64,
    suspected: Vec<SuspectedCycle>,
    /// By rank: how many probes it has not answered.
    unanswered: BTreeMap<Rank, usize>,
    /// Ranks that others of the same call wait for, which this rank's own share needs too.
    named: BTreeSet<Rank>,
    /// Ranks that have not entered the call and are blocked in another.
    elsewhere: BTreeSet<Rank>,
}

/// Whether `rank`'s result of the call depends on `peer`, whatever the schedule.
fn needs(collective: Collective, rank: Rank, peer: Rank) -> bool {
    match collective {
        Collective::Broadcast { root } | Collective::Scatter { root } => rank != root && peer == root,
        Collective::Reduce { root } | Collective::Gather { root } => rank == root,
        Collective::SendRecv { .. } => false,
        _ => true,
    }
}

impl DeadlockDetector {
    fn forget(&mut self) {
        self.probes.clear();
        self.suspected.clear();
        self.named.clear();
        self.elsewhere.clear();
    }

    /// The rank to ask next. If ranks are known that are blocked elsewhere, it is one of these,
    /// else one of the needed ranks. All get their turn, as each of them may be part of a cycle.
    fn one_of(&self, needed: &BTreeSet<Rank>) -> Option<Rank> {
        let ranks = if self.elsewhere.is_empty() { needed } else { &self.elsewhere };
        let turn = (self.next_probe as usize).checked_rem(ranks.len())?;
        ranks.iter().nth(turn).copied()
    }

    fn begin(&mut self, needed: &BTreeSet<Rank>, run: RunOf, now: Nanos) -> u64 {
        if self.probes.len() == PROBES_MAX {
            self.probes.pop_front();
        }
        let number = self.next_probe;
        self.next_probe += 1;
        let edges = needed.iter().map(|rank| Edge { rank: *rank, run, before: None, instead: None });
        self.probes.push_back(Probe { number, begun_at: now, edges: edges.collect() });
        number
    }

    /// The edges from this rank's own call to `last`, the time since when the cycle is known, and
    /// the begin of the probe. A new cycle is known since now.
    fn close(&mut self, number: u64, last: usize, now: Nanos) -> Option<(Vec<Edge>, Nanos, Nanos)> {
        let probe = self.probes.iter().find(|probe| probe.number == number)?;
        let mut edges = Vec::new();
        let mut at = Some(last);
        while let Some(edge) = at.and_then(|at| probe.edges.get(at)) {
            edges.push(*edge);
            at = edge.before;
        }
        edges.reverse();
        let cycle: Vec<_> = edges.iter().map(|edge| (edge.rank, edge.run)).collect();
        let begun_at = probe.begun_at;
        let since = match self.suspected.iter().find(|suspect| suspect.cycle == cycle) {
            Some(suspect) => suspect.since,
            None => {
                self.suspected.push(SuspectedCycle { cycle, since: now });
                now
            }
        };
        Some((edges, since, begun_at))
    }

    /// Whether the run of this slot is part of a suspected cycle, so that it is worth probing more
    /// often.
    pub(super) fn suspects(&self, slot: u8) -> bool {
        self.told == Some(slot) && !self.suspected.is_empty()
    }

    fn send(&mut self, context: &mut Context, peer: Rank, probe: u64, (stream, run): RunOf) {
        let unanswered = self.unanswered.entry(peer).or_default();
        // At most `PROBES_MAX` probes to a peer are unanswered, so a stopped peer gets no more.
        // If the peer is gone or its queue is full, no answer will come.
        let message = Message::Probe { probe, stream, run };
        if *unanswered < PROBES_MAX && context.post(peer, &message.encode()).is_ok() {
            *unanswered += 1;
        }
    }
}

impl Engine {
    /// Sets whether several threads of this rank make calls. If they do, a blocked call may depend
    /// on a call that another thread is about to make. Otherwise ranks whose calls wait for each
    /// other in a cycle get an error.
    pub fn allow_concurrent_calls(&mut self, is_concurrent: bool) {
        self.deadlocks.is_concurrent = is_concurrent;
        if is_concurrent {
            self.unblock();
        }
    }

    /// The thread that makes this rank's calls makes no other call before this one has ended.
    pub fn await_run(&mut self, run: RunId) {
        self.deadlocks.awaited = Some(run);
    }

    /// The run has moved: the edges that were found from it are out of date.
    #[inline]
    pub(super) fn note_moved(&mut self, slot: u8) {
        if self.deadlocks.told == Some(slot) {
            self.unblock();
        }
    }

    fn unblock(&mut self) {
        if self.deadlocks.told.take().is_some() {
            self.board.block_in(None);
        }
        self.deadlocks.forget();
    }

    /// The run that has to end before this rank's thread goes on.
    fn blocked_slot(&self) -> Option<u8> {
        let awaited = self.deadlocks.awaited.filter(|_| !self.deadlocks.is_concurrent)?;
        self.admission.blocking_slot(awaited)
    }

    /// Asks the ranks that the blocked call needs in which call they are, and lets others know that
    /// this rank is blocked.
    pub(super) fn probe_for_deadlock(&mut self, slot: u8, now: Nanos) {
        if self.blocked_slot() != Some(slot) {
            return;
        }
        let Some(run) = self.admission.run(slot) else { return };
        let own = (run.stream(), run.number());
        let descriptor = run.plan().descriptor().to_words();
        let detector = &mut self.deadlocks;
        let mut needed = detector.named.clone();
        needed.extend(run.needs_signal());
        if detector.told.replace(slot).is_some_and(|told| told != slot) {
            detector.forget();
        }
        let on = detector.one_of(&needed);
        self.board.block_in(on.map(|on| BlockedCall { run: own, on, descriptor }));
        let probe = detector.begin(&needed, own, now);
        for peer in needed {
            detector.send(&mut self.context, peer, probe, own);
        }
    }

    /// A rank has answered a probe: whether it has entered `run`, and in which call it is blocked.
    /// Returns the fault, if that closes a cycle which has lasted.
    pub(super) fn read_probe_answer(
        &mut self,
        peer: Rank,
        number: u64,
        run: RunOf,
        has_entered: bool,
        blocked: Option<BlockedCall>,
        now: Nanos,
    ) -> Option<Fault> {
        let detector = &mut self.deadlocks;
        if let Some(unanswered) = detector.unanswered.get_mut(&peer) {
            *unanswered = unanswered.saturating_sub(1);
        }
        let slot = detector.told?;
        if self.blocked_slot() != Some(slot) {
            return None;
        }
        let (rank, ranks) = (self.context.rank, self.context.ranks);
        let own = self.admission.run(slot)?;
        let own_run = (own.stream(), own.number());
        let collective = own.plan().descriptor().collective;
        let detector = &mut self.deadlocks;
        let probe = detector.probes.iter_mut().find(|probe| probe.number == number)?;
        let index = probe.edges.iter().position(|edge| edge.rank == peer && edge.run == run)?;
        let blocked = blocked.filter(|blocked| blocked.on < ranks)?;
        let is_first = probe.edges[index].before.is_none();
        if has_entered {
            let is_same = blocked.run == own_run && is_first;
            if is_same && blocked.on != rank && needs(collective, rank, blocked.on) {
                detector.named.insert(blocked.on);
            }
            return None;
        }
        probe.edges[index].instead = Some(blocked);
        if is_first {
            detector.elsewhere.insert(peer);
        }
        if blocked.on != rank {
            let is_known = probe.edges.iter().any(|edge| edge.rank == blocked.on && edge.run == blocked.run);
            // Every rank is followed once: a longer path is a cycle without this rank.
            if !is_known && probe.edges.len() < ranks as usize * 2 {
                let edge = Edge { rank: blocked.on, run: blocked.run, before: Some(index), instead: None };
                probe.edges.push(edge);
                detector.send(&mut self.context, blocked.on, number, blocked.run);
            }
            return None;
        }
        let (stream, own_number) = blocked.run;
        if self.board.has_entered(stream, own_number) {
            return None;
        }
        let (edges, since, begun_at) = detector.close(number, index, now)?;
        let has_lasted = begun_at.since(since) >= DEADLOCK_AFTER && self.failure.is_active();
        has_lasted.then(|| self.deadlock_fault(slot, &edges, now))
    }

    fn deadlock_fault(&self, slot: u8, edges: &[Edge], now: Nanos) -> Fault {
        let own = self.context.rank;
        let subject = edges.first().map_or(own, |edge| edge.rank);
        let theirs = edges.first().and_then(|edge| Descriptor::from_words(edge.instead?.descriptor));
        let ring: Vec<String> =
            edges.iter().map(|edge| edge.rank).chain([own]).map(|rank| rank.to_string()).collect();
        let detail = format!("rank {own} waits for rank {}", ring.join(", which waits for rank "));
        let fault = self.fault(FaultKind::Mismatch, subject, detail, Some(slot), now);
        Fault { theirs, ..fault }
    }
}
