//! One rank's rounds: what it has heard and said, what it binds, and what has ended. Pure but for
//! the [`Engine`] that it starts runs on: it takes `now`, and never blocks.
//!
//! **Invariants:** rounds are bound once, in order. The engine knows no contribution before it is
//! bound, so no byte of it is read before. A result that the caller waits for or reads is written
//! no more. (Which buffers the caller has is the matter of `handover`, what is said that of
//! `words`.)
//!
//! A rank is bound *ahead* if it is bound before it has heard that the round is open. This changes
//! no set: what was handed over in time is this rank's input whenever the round opens, as nothing
//! takes it back. A rank that was handed nothing is never bound ahead, and waits for the opening.
//! So where no rank is late, nobody waits for a word.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_vocabulary::{Rank, ReduceOp};

use super::activation::{Divisor, Grace, Late, Terms};
use super::contributions::{Contribution, Contributions};
use super::handover::{Handover, LateGoes};
use super::opening::{Decision, Opening};
use super::readiness::Readiness;
use super::runs::{DataPlans, RoundRuns, RoundsMemory, Stage};
use super::set_sum::SetSum;
use super::words::RoundWords;
use super::{Activation, RankSet};
use crate::engine::{Engine, FaultKind, StartError};
use crate::observe::{PartialReport, RoundCounters};

/// How much longer than rank 0 another rank waits for a round to open: rank 0 knows who is late. As
/// long as rank 0 shows life, the other rank leaves it to rank 0 to say so, for once more as long.
const MORE_THAN_RANK_0: Duration = Duration::from_secs(1);

/// What a rank's own contribution became in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Own {
    /// It is in the round's result.
    Counted,
    /// It came too late, and will be in a later round.
    Carried,
    /// It came too late, and is in no round.
    Dropped,
    /// It came too late, and will be in the correction of a later round.
    Corrected,
    /// There was none.
    Abstained,
}

/// How long a rank waits for signs of life of those that a round misses, after the time for the
/// round is up. A rank that seldom runs cannot tell whether an answer has come.
const ANSWERED_WITHIN: Duration = Duration::from_secs(1);

/// How soon a rank is asked again that could not be asked.
const ASKED_AGAIN_AFTER: Duration = Duration::from_millis(10);

/// Most other missing ranks that an error names.
const ALSO_NAMED_MAX: usize = 4;

/// Which other ranks are missing, in few words.
fn also_missing(others: &RankSet) -> String {
    let names: Vec<String> = others.iter().take(ALSO_NAMED_MAX).map(|rank| rank.to_string()).collect();
    match (names.is_empty(), others.len() as usize - names.len()) {
        (true, _) => String::new(),
        (false, 0) => format!("; also missing: {}", names.join(", ")),
        (false, more) => format!("; also missing: {} and {more} more", names.join(", ")),
    }
}

/// What a caller waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Awaited {
    /// The round. `None`: the last one, whichever that is.
    round: Option<u64>,
    own: Own,
    /// How many results the caller has seen or missed.
    passed: u64,
}

impl Awaited {
    /// The round. `None`: the last one, whichever that is.
    pub(crate) fn round(&self) -> Option<u64> {
        self.round
    }

    /// What has become of the caller's own contribution.
    pub(crate) fn own(&self) -> Own {
        self.own
    }

    /// How many results the caller has missed when it sees this round.
    pub(crate) fn missed(&self, ended: &Ended) -> u64 {
        ended.results_before - self.passed
    }
}

/// A round that has ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) number: u64,
    pub(crate) contributors: RankSet,
    /// Whose late contributions are in the correction, where there is one.
    pub(crate) corrected: Option<RankSet>,
    /// Which of the results it has, and which of the corrections.
    pub(crate) result: usize,
    /// How many rounds before it have a result.
    pub(crate) results_before: u64,
}

impl Ended {
    /// Whether any rank has given something to it: if not, it has no result.
    pub(crate) fn has_result(&self) -> bool {
        !self.contributors.is_empty() || self.corrected.as_ref().is_some_and(|set| !set.is_empty())
    }
}

/// A round that the caller has waited for, that wait, and which contribution the caller may write.
pub(crate) type Seen = (Ended, Awaited, Contribution);

/// A round that this rank has bound and that has not ended.
struct Active {
    number: u64,
    is_last: bool,
    result: usize,
    corrects: bool,
}

/// What one rank knows of its rounds; see the module.
pub(crate) struct Rounds {
    rank: Rank,
    ranks: u32,
    activation: Activation,
    timeout: Duration,
    runs: RoundRuns,
    /// Of rank 0.
    opening: Option<Opening>,
    words: RoundWords,
    handover: Handover,
    /// The first round that this rank has not bound.
    next: u64,
    /// The first round whose result its caller has not seen.
    seen: u64,
    /// How many rounds have a result, and how many of these the caller has seen or missed.
    results: u64,
    passed: u64,
    active: Option<Active>,
    awaited: Option<Awaited>,
    /// The round that the caller waits for, once it has ended.
    kept: Option<Ended>,
    /// Which of the results the caller reads.
    read: Option<usize>,
    newest: Option<Ended>,
    /// Whether the set of the round before was not full.
    must_correct: bool,
    /// The first round after the last one to which no rank gave anything: then no rank is absent.
    all_present: u64,
    /// Binds no further round.
    has_stopped: bool,
    /// The group has failed.
    is_over: bool,
    /// When something happened last while the caller waits.
    waits_since: Option<Nanos>,
    /// The end of the time for which a rank was waited for, where ranks were asked for a sign of
    /// life then.
    asked_at_end: Option<(Nanos, BTreeSet<Rank>)>,
    /// When to look again.
    wakeup: Option<Nanos>,
    counters: Arc<RoundCounters>,
    /// By rank: the name of its host, where these are known.
    hosts: Vec<String>,
    /// What was bound since checkers have looked, where there are any.
    pub(crate) trail: Option<Vec<Bound>>,
    /// What is to be done wrong.
    #[cfg(test)]
    pub(crate) mutant: Option<Mutant>,
}

/// What a rank has bound to a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) number: u64,
    pub(crate) given: Option<Contributions>,
    pub(crate) late: Option<Contributions>,
}

/// A defect that checkers must catch.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// The set and the data are bound at two instants.
    TornBinding,
    /// The memory that the caller still writes is given where nothing was handed over.
    UnboundContribution,
    /// The bit of rank 0 counts twice where the set is added, which makes it the bit of rank 1. To
    /// tell a bit twice changes nothing, so where signals tell the set rank 0 tells that of rank 1.
    OtherBit,
    /// A late contribution is forgotten when it is bound, in place of another or apart.
    LostLate,
    /// A rank that has missed results says so of one less.
    UncountedResult,
    /// One rank shows another set.
    OtherSet,
    /// Nobody waits for a rank that was left out too often.
    Stale,
    /// The caller gets the memory of a contribution that it has dropped, and that may still count.
    ReusedContribution,
    /// A rank that gives a contribution says that its input is absent.
    MuteContribution,
    /// The caller gets the memory of a contribution that the active round reads.
    ActiveContribution,
    /// A rank that was handed nothing is bound before the round is open.
    UnreadyAhead,
    /// Something is expected only after the caller's next call though a round may open before.
    ForgottenCaller,
}

impl Rounds {
    /// The rounds of a rank. Every rank has made them with the same terms.
    pub(crate) fn new(
        (rank, ranks): (Rank, u32),
        terms: &Terms,
        timeout: Duration,
        sums: (Option<SetSum>, DataPlans),
        memory: RoundsMemory,
    ) -> Self {
        let (activation, buffers) = (terms.activation, memory.contributions.len());
        Self {
            rank,
            ranks,
            activation,
            timeout,
            runs: RoundRuns::new((rank, ranks), terms, timeout, sums, memory),
            opening: (rank == 0).then(|| Opening::new(ranks, activation, timeout)),
            words: RoundWords::new(rank, ranks),
            handover: Handover::new(buffers),
            next: 0,
            seen: 0,
            results: 0,
            passed: 0,
            active: None,
            awaited: None,
            kept: None,
            read: None,
            newest: None,
            must_correct: false,
            all_present: 0,
            has_stopped: false,
            is_over: false,
            waits_since: None,
            asked_at_end: None,
            wakeup: None,
            counters: Arc::new(RoundCounters::new(ranks)),
            hosts: Vec::new(),
            trail: None,
            #[cfg(test)]
            mutant: None,
        }
    }

    /// The same rounds, which count for the group that they are for.
    #[must_use]
    pub(crate) fn counted_by(self, counters: Arc<RoundCounters>) -> Self {
        Self { counters, ..self }
    }

    /// The same rounds, whose errors say on which of these hosts a rank is.
    #[must_use]
    pub(crate) fn on_hosts(self, hosts: Vec<String>) -> Self {
        Self { hosts, ..self }
    }

    /// Has the rounds do something wrong.
    #[cfg(test)]
    pub(crate) fn mutate(&mut self, mutant: Option<Mutant>) {
        self.mutant = mutant;
        self.runs.mutate(mutant);
        if mutant == Some(Mutant::Stale)
            && let Some(opening) = &mut self.opening
        {
            *opening = Opening::new(self.ranks, self.activation.staleness_max(u32::MAX), self.timeout);
        }
    }

    /// The operation of the runs that reduce the data.
    pub(crate) fn data_op(terms: &Terms) -> ReduceOp {
        if terms.activation.division() == Divisor::None { terms.activation.op() } else { ReduceOp::Avg }
    }

    /// What happened so far.
    pub(crate) fn report(&self) -> PartialReport {
        self.counters.report()
    }

    /// For how long a late rank is waited for on purpose, as far as that is known; without end if
    /// it is not waited for.
    pub(crate) fn grace(&self) -> Duration {
        match self.activation.grace_time() {
            Grace::Fixed(Duration::ZERO) => Duration::MAX,
            Grace::Fixed(grace) => grace,
            Grace::Learned { .. } => Duration::ZERO,
        }
    }

    /// Whether a poll may compute for long.
    pub(crate) fn polls_take_long(&self) -> bool {
        self.runs.is_exact()
    }

    /// Which of the contributions the caller may write: one that no round holds.
    pub(crate) fn free_contribution(&self) -> Contribution {
        let waits = self.awaited.is_some();
        #[cfg(test)]
        if self.mutant == Some(Mutant::ActiveContribution) {
            return self.handover.free_or_bound(waits);
        }
        #[cfg(test)]
        let waits = waits && self.mutant != Some(Mutant::ReusedContribution);
        self.handover.free(waits)
    }

    /// A late contribution with which the next one must be combined before it is handed over,
    /// taken out of the rounds' hands. None where sums are exact: to combine them would round.
    pub(crate) fn take_late(&mut self) -> Option<Contribution> {
        if self.runs.is_exact() {
            return None;
        }
        self.take_late_with_next().and_then(|late| late.iter().next())
    }

    /// After the group has failed: a contribution that is in no result, other than this one, which
    /// the caller has. The caller gets it back.
    pub(crate) fn take_back(&mut self, own: Contribution) -> Option<Contribution> {
        self.handover.take_back(own)
    }

    /// The late contribution that goes with the next one.
    fn take_late_with_next(&mut self) -> Option<Contributions> {
        let is_late = self.next > self.seen;
        if is_late || self.activation.late_rule() == Late::Carry { self.handover.take_late() } else { None }
    }

    /// The caller hands a contribution over, and waits for the round that counts it, or the newest
    /// that was bound without it. `facts`: where sums are exact, those of the contribution.
    pub(crate) fn hand_over(&mut self, contribution: Contribution, facts: Vec<i32>) {
        self.runs.note(contribution, facts);
        let with = if self.runs.is_exact() { self.take_late_with_next() } else { None };
        if self.next == self.seen {
            self.handover.hand_over(contribution, with);
            self.say(Readiness::Ready);
            return self.awaits(Some(self.next), Own::Counted);
        }
        // It gives something again.
        self.say(Readiness::Silent);
        let own = match self.activation.late_rule() {
            Late::Carry => Own::Carried,
            Late::Correct => Own::Corrected,
            Late::Drop => Own::Dropped,
        };
        self.handover.hand_over_late(contribution, with, own != Own::Dropped);
        self.awaits(Some(self.newest_missed()), own)
    }

    /// The newest round that was bound and that the caller has not seen.
    fn newest_missed(&self) -> u64 {
        let newest = || self.newest.as_ref().map(|newest| newest.number);
        self.active.as_ref().map(|active| active.number).or_else(newest).expect("a round was missed")
    }

    /// The caller has nothing to give, and waits for a round as in [`Rounds::hand_over`].
    pub(crate) fn abstain(&mut self) {
        if self.next > self.seen {
            self.say(Readiness::Absent);
            self.awaits(Some(self.newest_missed()), Own::Abstained)
        } else {
            self.say(Readiness::Abstains);
            self.awaits(Some(self.next), Own::Abstained)
        }
    }

    /// The round for which a contribution would be in time now; `None` where a round is bound
    /// without it.
    pub(crate) fn next_round(&self) -> Option<u64> {
        (self.next == self.seen).then_some(self.next)
    }

    /// The caller has nothing to give until it hands over again, and waits for no round.
    pub(crate) fn step_aside(&mut self) {
        self.say(Readiness::Absent);
    }

    /// The caller will give something again.
    pub(crate) fn come_back(&mut self) {
        self.say(Readiness::Silent);
    }

    /// The caller will give nothing any more, and waits for the last round.
    pub(crate) fn finish(&mut self) {
        self.say(Readiness::Finished);
        self.awaits(None, Own::Abstained)
    }

    /// Has a word for rank 0, about the rounds that this rank has not bound.
    fn say(&mut self, readiness: Readiness) {
        self.words.say(self.next, readiness);
    }

    fn awaits(&mut self, round: Option<u64>, own: Own) {
        (self.kept, self.read) = (None, None);
        if self.newest.as_ref().is_some_and(|newest| Some(newest.number) == round) {
            self.kept = self.newest.take();
        }
        self.awaited = Some(Awaited { round, own, passed: self.passed });
        self.waits_since = None;
    }

    /// The round that the caller waits for, once it has ended. The caller may read the result until
    /// it hands over, abstains or finishes.
    pub(crate) fn take_ended(&mut self) -> Option<Seen> {
        let awaited = self.awaited?;
        let ended = self.kept.take()?;
        (self.awaited, self.read) = (None, Some(ended.result));
        #[cfg(test)]
        let awaited = self.mutated_wait(awaited, &ended);
        match awaited.own {
            Own::Carried => self.counters.carried(),
            Own::Dropped => self.counters.dropped(),
            Own::Corrected => self.counters.corrected(),
            Own::Counted | Own::Abstained => {}
        }
        self.counters.missed(awaited.missed(&ended));
        self.seen = ended.number + 1;
        self.passed = ended.results_before + u64::from(ended.has_result());
        self.pass_skipped();
        Some((ended, awaited, self.free_contribution()))
    }

    /// Takes rounds for seen that were none for the caller: see [`Rounds::skip`].
    fn pass_skipped(&mut self) {
        if self.newest.as_ref().is_none_or(|newest| newest.number < self.seen) {
            self.seen = self.active.as_ref().map_or(self.next, |active| active.number);
        }
    }

    /// When to poll at the latest, if nothing wakes this rank.
    pub(crate) fn next_wakeup(&self) -> Option<Nanos> {
        self.wakeup
    }

    /// Whether a round is likely to end before any rank has to hear a word about it: each round
    /// waits for all ranks, and all were in the round before.
    pub(crate) fn need_no_words(&self) -> bool {
        self.activation.waits_for_all(self.ranks) && !self.must_correct
    }

    /// Whether nothing can happen here before the caller makes a call: no round goes on, and none
    /// opens without this rank.
    pub(crate) fn wait_for_caller(&self) -> bool {
        #[cfg(test)]
        if self.mutant == Some(Mutant::ForgottenCaller) {
            return self.active.is_none() && !self.handover.is_in_time();
        }
        self.active.is_none()
            && !self.handover.is_in_time()
            && self.activation.waits_for_all(self.ranks)
            && self.words.is_surely_silent(self.next)
    }

    /// Binds no further round; the active one goes on.
    pub(crate) fn stop(&mut self) {
        self.has_stopped = true;
    }

    /// Whether no round is active.
    pub(crate) fn is_idle(&self) -> bool {
        self.active.is_none()
    }

    /// Whether no round is active that this rank knows to be open. One that was bound ahead may be
    /// under way all the same.
    pub(crate) fn has_no_open(&self) -> bool {
        self.closed_round().is_some()
    }

    /// The round that is to be carried out next: the active one if it was bound ahead and is not
    /// known to be open. `None`: the active one is open.
    fn closed_round(&self) -> Option<u64> {
        match &self.active {
            None => Some(self.next),
            Some(active) => (active.number >= self.words.open()).then_some(active.number),
        }
    }

    /// Binds the round of what was just handed over, if that is possible. So the caller's own
    /// thread carries it out, without a word of another rank.
    pub(crate) fn begin(&mut self, engine: &mut Engine) {
        if !self.is_over && engine.works() && self.bind(engine, true).is_err() {
            // The group is failing.
            self.is_over = true;
        }
    }

    /// Goes on with the active round alone: hears nothing, tells nothing and finds no fault. So it
    /// costs little. It replaces no [`Rounds::poll`], which also finds a wrong set. False: there is
    /// nothing to go on with by it.
    pub(crate) fn poll_active(&mut self, engine: &mut Engine) -> bool {
        let is_apt = self.active.is_some() && !self.is_over && engine.works() && !self.polls_take_long();
        if is_apt && !self.runs.are_all_under_way(engine) {
            match self.runs.advance(engine) {
                Ok(_) if self.runs.stage() == Stage::Ended => self.end(),
                Ok(_) => {}
                Err(_) => self.is_over = true,
            }
        }
        is_apt
    }

    /// Goes as far as it can; true when anything moved. To be called after the engine was polled.
    pub(crate) fn poll(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        self.wakeup = None;
        if self.is_over || !engine.works() {
            return false;
        }
        let mut moved = false;
        loop {
            self.words.hear(engine);
            let mut again = self.open_next(engine, now);
            self.start_time(engine);
            self.expect_all(engine, now);
            if !engine.works() {
                return moved;
            }
            if let Some(at) = self.words.tell(engine, now) {
                self.wake_by(at);
            }
            match self.bind(engine, false).and_then(|bound| Ok(bound | self.advance(engine, now)?)) {
                Ok(has_moved) => again |= has_moved,
                // The group is failing.
                Err(_) => {
                    self.is_over = true;
                    return moved;
                }
            }
            if !again {
                break;
            }
            moved = true;
            self.waits_since = None;
            if self.polls_take_long() {
                // Other threads come between.
                break;
            }
        }
        self.look_at_time(engine, now);
        moved
    }

    fn wake_by(&mut self, at: Nanos) {
        self.wakeup = Some(self.wakeup.map_or(at, |wakeup| wakeup.min(at)));
    }

    /// Rank 0 opens the next round when it is time.
    fn open_next(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        let round = self.words.open();
        if self.closed_round() != Some(round) || self.words.is_last_open() || self.has_stopped {
            return false;
        }
        let Some(opening) = &mut self.opening else { return false };
        let decision = opening.decide(round, self.words.of(round, self.all_present), now);
        match decision {
            Decision::Wait(None) => return false,
            Decision::Wait(Some(at)) => {
                self.wake_by(at);
                return false;
            }
            Decision::Open => self.words.open_round(round, false),
            Decision::OpenLast => self.words.open_round(round, true),
            Decision::TimedOut { missing, waited } => {
                self.give_up_on_one_of(engine, &missing, round, waited, now);
                return false;
            }
        }
        true
    }

    /// Gives up on the first of these ranks that shows no life, or on the first of them, once it is
    /// known which of them do. There is at least one.
    fn give_up_on_one_of(
        &mut self,
        engine: &mut Engine,
        missing: &RankSet,
        round: u64,
        waited: Duration,
        now: Nanos,
    ) {
        let end = Nanos(now.0.saturating_sub(waited.as_nanos() as u64)) + self.timeout;
        let Some(silent) = self.first_without_life(engine, missing, end, now) else { return };
        let Some(rank) = silent.or(missing.iter().next()) else { return };
        let on = self.on_host(rank);
        let mut detail = format!("its contribution to round {round} of a partial all-reduce{on}");
        let others: RankSet = missing.iter().filter(|other| *other != rank).collect();
        if silent.is_some() {
            detail += "; it gives no sign of life";
        }
        detail += &also_missing(&others);
        engine.give_up_on(FaultKind::TimedOut, rank, detail, waited, now);
    }

    /// Where a rank is.
    fn on_host(&self, rank: Rank) -> String {
        let host = self.hosts.get(rank as usize).filter(|host| !host.is_empty());
        host.map_or_else(String::new, |host| format!(", on host {host}"))
    }

    /// The first of these ranks that shows no life, if any. They are asked once for each `end` of a
    /// time for which they were waited for. `None`: that is not known yet. A rank shows no life if
    /// it has not answered [`ANSWERED_WITHIN`] the time after `end`, or could not be asked.
    fn first_without_life(
        &mut self,
        engine: &mut Engine,
        ranks: &RankSet,
        end: Nanos,
        now: Nanos,
    ) -> Option<Option<Rank>> {
        let asked = match self.asked_at_end.take() {
            Some((asked_at, asked)) if asked_at >= end => asked,
            _ => BTreeSet::new(),
        };
        let (_, asked) = self.asked_at_end.insert((end, asked));
        let is_over = now >= end + ANSWERED_WITHIN;
        let (mut silent, mut look_at) = (None, None);
        for rank in ranks.iter() {
            // Others may be missing than when the first were asked.
            let is_asked = asked.contains(&rank) || (engine.ask_for_life(rank, now) && asked.insert(rank));
            let lives = if is_asked { engine.lives(rank, now) } else { Err(now + ASKED_AGAIN_AFTER) };
            match lives {
                Ok(true) => {}
                Err(at) if !is_over => look_at = look_at.max(Some(at)),
                Ok(false) | Err(_) => silent = silent.or(Some(rank)),
            }
        }
        match look_at {
            Some(at) => {
                self.wake_by(at);
                None
            }
            None => Some(silent),
        }
    }

    /// The time of the active round's runs begins when the round is open. So it does when a rank
    /// has left, which may be one that they wait for.
    fn start_time(&mut self, engine: &mut Engine) {
        let is_open = self.active.as_ref().is_some_and(|active| self.words.open() > active.number);
        if self.runs.are_held() && (is_open || engine.first_departed().is_some()) {
            self.runs.start_time(engine);
        }
    }

    /// Whether this rank's input to the next round is known before the round is open. A learned
    /// deadline is learned from words, so its rounds wait for them. Exact sums take several runs,
    /// one after the other, beside which words cost nothing.
    fn can_bind_ahead(&self) -> bool {
        #[cfg(test)]
        if self.mutant == Some(Mutant::UnreadyAhead) && self.rank == 1 {
            return true;
        }
        self.handover.is_in_time()
            && matches!(self.activation.grace_time(), Grace::Fixed(_))
            && !self.runs.is_exact()
    }

    /// Binds this rank's input to the next round, if that is open or the input known, and the round
    /// before has ended. `may_wait`: see [`RoundRuns::bind`].
    fn bind(&mut self, engine: &mut Engine, may_wait: bool) -> Result<bool, StartError> {
        let is_ahead = self.next >= self.words.open();
        if self.active.is_some() || self.has_stopped || (is_ahead && !self.can_bind_ahead()) {
            return Ok(false);
        }
        let number = self.next;
        // Only ranks that give nothing any more are in the last round, so nobody is bound to it
        // ahead.
        let is_last = self.words.is_last_open() && number + 1 == self.words.open();
        let corrects = self.activation.late_rule() == Late::Correct && (self.must_correct || is_last);
        #[cfg(test)]
        let was_in_time = self.handover.is_in_time();
        let [given, late] = self.handover.bind(match self.activation.late_rule() {
            Late::Carry => LateGoes::InPlace,
            Late::Correct if corrects => LateGoes::Apart,
            Late::Correct | Late::Drop => LateGoes::Nowhere,
        });
        #[cfg(test)]
        let (given, late) = self.mutated((given, was_in_time), late);
        let of = |ended: &Option<Ended>| ended.as_ref().map(|ended| ended.result);
        let held = [self.read.or(of(&self.kept)), of(&self.newest)];
        let result =
            (0..3).find(|index| !held.contains(&Some(*index))).expect("at most two of three are held");
        if let Some(trail) = &mut self.trail {
            trail.push(Bound { number, given, late });
        }
        self.active = Some(Active { number, is_last, result, corrects });
        self.next += 1;
        // A rank may be as late as the activation allows; `look_at_time` sees to it that rank 0
        // opens the round.
        self.runs.bind(engine, [given, late], (corrects, result), (is_ahead, may_wait))?;
        Ok(true)
    }

    /// What the mutant binds in place of a contribution, which was in time or is a late one in its
    /// place, and of one that is late and apart.
    #[cfg(test)]
    fn mutated(
        &mut self,
        (given, was_in_time): (Option<Contributions>, bool),
        late: Option<Contributions>,
    ) -> (Option<Contributions>, Option<Contributions>) {
        match self.mutant {
            Some(Mutant::UnboundContribution) if given.is_none() && self.rank == 1 => {
                (Some(Contributions::of(self.free_contribution())), late)
            }
            Some(Mutant::LostLate) => (given.filter(|_| was_in_time), None),
            _ => (given, late),
        }
    }

    /// What the mutant takes a wait for that has ended.
    #[cfg(test)]
    fn mutated_wait(&self, awaited: Awaited, ended: &Ended) -> Awaited {
        let has_forgotten = self.mutant == Some(Mutant::UncountedResult) && awaited.missed(ended) > 0;
        Awaited { passed: awaited.passed + u64::from(has_forgotten), ..awaited }
    }

    /// Goes on with the runs of the active round.
    fn advance(&mut self, engine: &mut Engine, now: Nanos) -> Result<bool, StartError> {
        let Some(active) = &self.active else { return Ok(false) };
        let moved = self.runs.advance(engine)?;
        match self.runs.stage() {
            Stage::UnderWay => return Ok(moved),
            Stage::WrongSet => {
                let detail = format!(
                    "the set of round {} is none that the ranks can have given together; which of them is wrong \
                     is not known",
                    active.number
                );
                engine.give_up_on(FaultKind::Protocol, self.rank, detail, Duration::ZERO, now);
                return Ok(moved);
            }
            Stage::Ended => self.end(),
        }
        Ok(true)
    }

    /// The active round has ended.
    fn end(&mut self) {
        let Some(active) = self.active.take() else { return };
        self.handover.end();
        let Active { number, is_last, result, corrects } = active;
        let (contributors, corrected) = self.runs.take_sets();
        // All ranks are bound: it was open, said or not.
        self.words.ended(number);
        if let Some(opening) = &mut self.opening {
            opening.ended(&contributors, self.words.of(number, self.all_present));
        }
        self.say_again(number, contributors.is_empty());
        self.counters.ended(contributors.iter());
        self.must_correct = contributors.len() < self.ranks;
        if contributors.is_empty() && corrected.is_empty() && !is_last && self.skip(number) {
            return;
        }
        #[cfg(test)]
        let contributors = match self.mutant {
            Some(Mutant::OtherSet) if self.rank == 1 => contributors.iter().skip(1).collect(),
            _ => contributors,
        };
        let corrected = corrects.then_some(corrected);
        let ended = Ended { number, contributors, corrected, result, results_before: self.results };
        self.results += u64::from(ended.has_result());
        let is_awaited = self.kept.is_none()
            && self.awaited.is_some_and(|awaited| awaited.round.map_or(is_last, |round| round == number));
        if is_awaited {
            self.kept = Some(ended);
        } else {
            self.newest = Some(ended);
        }
    }

    /// Says this rank's word again, about the rounds after the one that has ended, as words may be
    /// lost. After a round to which no rank gave anything no rank is absent any more.
    fn say_again(&mut self, ended: u64, is_empty: bool) {
        if is_empty {
            self.all_present = ended + 1;
        }
        if self.words.own().round().is_none_or(|round| round > ended) {
            return;
        }
        match self.words.own().readiness() {
            Readiness::Abstains | Readiness::Absent if is_empty => self.say(Readiness::Silent),
            Readiness::Abstains => self.say(Readiness::Absent),
            Readiness::Ready => {}
            readiness => self.say(readiness),
        }
    }

    /// A round has ended to which no rank gave anything. It is no round for a caller that does not
    /// abstain itself: if that has missed no other round, a contribution that came too late for
    /// this one is in time for the next. Returns whether the round is none.
    fn skip(&mut self, number: u64) -> bool {
        let missed = self.newest.as_ref().map(|newest| newest.number).filter(|newest| *newest >= self.seen);
        match &mut self.awaited {
            Some(awaited) if awaited.round == Some(number) => match (awaited.own, missed) {
                (Own::Abstained, _) => return false,
                (_, Some(_)) => {
                    awaited.round = missed;
                    self.kept = self.newest.take();
                }
                (_, None) => {
                    *awaited = Awaited { round: Some(self.next), own: Own::Counted, ..*awaited };
                    self.handover.count_after_all();
                    self.say(Readiness::Ready);
                    self.seen = self.next;
                }
            },
            Some(_) => {}
            None => self.pass_skipped(),
        }
        true
    }

    /// Gives up when a rank has left that has not finished: no further round could end.
    fn expect_all(&self, engine: &mut Engine, now: Nanos) {
        // The active round may still end without it.
        if !self.words.is_last_open()
            && !self.has_stopped
            && self.active.is_none()
            && let Some(rank) = engine.first_departed()
        {
            let detail = "it dropped its partial all-reduce before all ranks had finished".to_owned();
            engine.give_up_on(FaultKind::Left, rank, detail, Duration::ZERO, now);
        }
    }

    /// Gives up when a caller has waited for a round for too long that rank 0 does not open.
    fn look_at_time(&mut self, engine: &mut Engine, now: Nanos) {
        let closed = self.closed_round().filter(|_| self.awaited.is_some() && self.kept.is_none());
        let Some(round) = closed else {
            self.waits_since = None;
            return;
        };
        let since = *self.waits_since.get_or_insert(now);
        let grace = match self.activation.grace_time() {
            Grace::Fixed(grace) => grace,
            Grace::Learned { .. } => Duration::ZERO,
        };
        let (until, waited) = (since + self.timeout + grace + MORE_THAN_RANK_0, now.since(since));
        if now < until {
            self.wake_by(until);
            return;
        }
        if self.rank == 0 {
            let silent: RankSet = {
                let of = self.words.of(round, self.all_present);
                (0..self.ranks).filter(|rank| of(*rank) == Readiness::Silent).collect()
            };
            if !silent.is_empty() {
                return self.give_up_on_one_of(engine, &silent, round, waited, now);
            }
        }
        // It is asked again from time to time.
        let times = now.since(until).as_nanos() / MORE_THAN_RANK_0.as_nanos();
        let asked_at = until + MORE_THAN_RANK_0 * times as u32;
        let rank_0 = [0].into_iter().collect();
        let at_last = until + self.timeout + grace + MORE_THAN_RANK_0;
        let silent = match self.first_without_life(engine, &rank_0, asked_at, now) {
            None if now < at_last => return,
            Some(None) if now < at_last => return self.wake_by(asked_at + MORE_THAN_RANK_0),
            found => found.flatten(),
        };
        let is_silent = if silent.is_some() { "; it gives no sign of life" } else { "" };
        let on = self.on_host(0);
        let detail = format!("it opens round {round} of a partial all-reduce{on}{is_silent}");
        engine.give_up_on(FaultKind::TimedOut, 0, detail, waited, now);
    }
}
