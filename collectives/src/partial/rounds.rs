//! One rank's rounds: what it has heard and said, what it binds, and what has ended. Pure but for
//! the [`Engine`] that it starts runs on: it takes `now`, and never blocks.
//!
//! **Invariants:** rounds are bound once, in order. The engine knows no contribution before it is
//! bound, so no byte of it is read before. A buffer is in one place: with the caller, handed over,
//! late, or in the active round. A result that the caller waits for or reads is written no more.

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{Nanos, Slice};
use pleach_vocabulary::{Rank, ReduceOp};

use super::activation::{Divisor, Late, Terms};
use super::opening::{Decision, Opening};
use super::readiness::{Readiness, ReadyWord, ReadyWords};
use super::{Activation, RankSet};
use crate::engine::{Address, Bytes, Engine, FaultKind, Plan, RoundWord, RunId, StartError};

/// How long a word to rank 0 stays unanswered before it is said again, at first and at most: it may
/// have been replaced by an older one that it had overtaken.
const SAID_AGAIN_AFTER: Duration = Duration::from_millis(10);
const SAID_AGAIN_AFTER_MAX: Duration = Duration::from_secs(1);
/// How often a word is tried that a peer had no room for.
const RETRIED_AFTER: Duration = Duration::from_micros(50);
/// How much longer than rank 0 another rank waits for a round to open: rank 0 knows who is late.
const MORE_THAN_RANK_0: Duration = Duration::from_secs(1);

/// The memory of one rank's rounds, in bytes of the data but for the sets.
pub(crate) struct RoundsMemory {
    /// The caller writes one, one was handed over, and one may be late or in the active round.
    pub(crate) contributions: [Slice; 3],
    /// One that the caller reads, one that has ended since, one that is written.
    pub(crate) results: [Slice; 3],
    /// The same for late contributions, where these are reduced apart.
    pub(crate) corrections: Vec<Slice>,
    pub(crate) neutral: Slice,
}

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

/// What a caller waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Awaited {
    /// The round. `None`: the last one, whichever that is.
    pub(crate) round: Option<u64>,
    pub(crate) own: Own,
    /// The first round whose result the caller has not seen.
    pub(crate) seen: u64,
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
}

/// A round that this rank has bound and that has not ended.
struct Active {
    number: u64,
    is_last: bool,
    result: usize,
    corrects: bool,
    /// Buffers to give back.
    given: Option<usize>,
    late: Option<usize>,
    set: Option<RunId>,
    contributors: RankSet,
    corrected: RankSet,
    /// Data, then correction.
    data: [Option<RunId>; 2],
    has_started_data: bool,
}

/// How the rounds of one rank went so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartialReport {
    /// How many rounds have ended here.
    pub rounds: u64,
    /// By rank: in how many of them its contribution was.
    pub counted: Vec<u64>,
    /// How many contributions of this rank came too late for their round.
    pub late: u64,
    /// How many of these were dropped.
    pub dropped: u64,
    /// How many results this rank's caller never saw.
    pub missed: u64,
}

/// What one rank knows of its rounds; see the module.
pub(crate) struct Rounds {
    rank: Rank,
    ranks: u32,
    activation: Activation,
    timeout: Duration,
    set_plan: Arc<Plan>,
    data_plan: Arc<Plan>,
    memory: RoundsMemory,
    /// What the set's run reads and writes: a bit for each rank, then as many words for late
    /// contributions that are reduced apart.
    set_input: Vec<u64>,
    set_output: Vec<u64>,
    /// Of rank 0.
    opening: Option<Opening>,
    /// Of rank 0; of other ranks none.
    words: ReadyWords,
    /// The newest word of this rank.
    own_word: ReadyWord,
    /// The word that it said last, when it says the word again, and how long after that again.
    said: (ReadyWord, Nanos, Duration),
    /// How many rounds are open, and whether the last of them is the last of all.
    open: u64,
    is_last_open: bool,
    /// The ranks that this rank tells of open rounds, each with the word that it was told.
    children: Vec<(Rank, u64)>,
    /// The first round that this rank has not bound.
    next: u64,
    /// The first round whose result its caller has not seen.
    seen: u64,
    /// A contribution for the next round, handed over in time.
    pending: Option<usize>,
    /// A contribution that came too late for its round.
    late: Option<usize>,
    /// The contribution that the caller has handed over last.
    handed: Option<usize>,
    active: Option<Active>,
    awaited: Option<Awaited>,
    /// The round that the caller waits for or reads, once it has ended.
    kept: Option<Ended>,
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
    /// When to look again.
    wakeup: Option<Nanos>,
    report: PartialReport,
    /// What was bound, for checkers, and what is to be done wrong.
    #[cfg(test)]
    pub(crate) trail: Vec<Bound>,
    #[cfg(test)]
    pub(crate) mutant: Option<Mutant>,
}

/// What a rank has bound to a round.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) number: u64,
    pub(crate) given: Option<usize>,
    pub(crate) late: Option<usize>,
}

/// A defect that checkers must catch.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// The set and the data are bound at two instants.
    TornBinding,
    /// The memory that the caller still writes is given where nothing was handed over.
    UnboundContribution,
    /// A rank's bit is added twice.
    BitTwice,
    /// A late contribution is forgotten.
    LostLate,
    /// One rank shows another set.
    OtherSet,
    /// Nobody waits for a rank that was left out too often.
    Stale,
    /// The caller gets the memory of a contribution that it has dropped, and that may still count.
    ReusedContribution,
}

/// Whether a run has ended; then it is known no more.
fn take_ended(run: &mut Option<RunId>, engine: &mut Engine) -> bool {
    let Some(ended) = run.filter(|run| engine.has_ended(*run)) else { return false };
    *run = None;
    matches!(engine.take_outcome(ended), Some(Ok(())))
}

/// The children of a rank in the binomial tree with root 0.
fn children(rank: Rank, ranks: u32) -> impl Iterator<Item = Rank> {
    let first = Rank::BITS - rank.leading_zeros();
    (first..Rank::BITS).filter_map(move |bit| rank.checked_add(1 << bit)).filter(move |child| *child < ranks)
}

/// The parent of a rank other than 0 in that tree.
fn parent(rank: Rank) -> Rank {
    rank & !(1 << (Rank::BITS - 1 - rank.leading_zeros()))
}

impl Rounds {
    /// The rounds of a rank. Every rank has made them with the same terms.
    pub(crate) fn new(
        (rank, ranks): (Rank, u32),
        terms: &Terms,
        timeout: Duration,
        [set_plan, data_plan]: [Arc<Plan>; 2],
        memory: RoundsMemory,
    ) -> Self {
        let activation = terms.activation;
        Self {
            rank,
            ranks,
            activation,
            timeout,
            set_plan,
            data_plan,
            memory,
            set_input: vec![0; Self::set_words(terms, ranks)],
            set_output: vec![0; Self::set_words(terms, ranks)],
            opening: (rank == 0).then(|| Opening::new(ranks, activation, timeout)),
            words: ReadyWords::new(if rank == 0 { ranks } else { 0 }),
            own_word: ReadyWord::default(),
            said: (ReadyWord::default(), Nanos::MAX, SAID_AGAIN_AFTER),
            open: 0,
            is_last_open: false,
            children: children(rank, ranks).map(|child| (child, 0)).collect(),
            next: 0,
            seen: 0,
            pending: None,
            late: None,
            handed: None,
            active: None,
            awaited: None,
            kept: None,
            newest: None,
            must_correct: false,
            all_present: 0,
            has_stopped: false,
            is_over: false,
            waits_since: None,
            wakeup: None,
            report: PartialReport { counted: vec![0; ranks as usize], ..PartialReport::default() },
            #[cfg(test)]
            trail: Vec::new(),
            #[cfg(test)]
            mutant: None,
        }
    }

    /// Has the rounds do something wrong.
    #[cfg(test)]
    pub(crate) fn mutate(&mut self, mutant: Option<Mutant>) {
        self.mutant = mutant;
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

    /// How many words the set has.
    pub(crate) fn set_words(terms: &Terms, ranks: u32) -> usize {
        let kinds = if terms.activation.late_rule() == Late::Correct { 2 } else { 1 };
        RankSet::words_for(ranks) * kinds
    }

    /// What happened so far.
    pub(crate) fn report(&self) -> &PartialReport {
        &self.report
    }

    /// Which of the contributions the caller may write: one that no round holds.
    pub(crate) fn free_contribution(&self) -> usize {
        let active = self.active.as_ref();
        let [given, late] = [active.and_then(|it| it.given), active.and_then(|it| it.late)];
        // What is dropped counts after all if its round was none: see `skip`.
        let handed = self.handed.filter(|_| self.awaited.is_some());
        #[cfg(test)]
        let handed = handed.filter(|_| self.mutant != Some(Mutant::ReusedContribution));
        let held = [self.pending, self.late, given, late, handed];
        (0..3).find(|index| !held.contains(&Some(*index))).expect("at most two of three are held")
    }

    /// A late contribution with which the next one must be combined before it is handed over,
    /// taken out of the rounds' hands.
    pub(crate) fn take_late(&mut self) -> Option<usize> {
        let is_late = self.next > self.seen;
        if is_late || self.activation.late_rule() == Late::Carry { self.late.take() } else { None }
    }

    /// The caller hands a contribution over, and waits for the round that counts it, or the newest
    /// that was bound without it.
    pub(crate) fn hand_over(&mut self, contribution: usize) {
        self.handed = Some(contribution);
        if self.next == self.seen {
            self.pending = Some(contribution);
            self.say(Readiness::Ready);
            return self.awaits(Some(self.next), Own::Counted);
        }
        // It gives something again.
        self.say(Readiness::Silent);
        self.report.late += 1;
        let own = match self.activation.late_rule() {
            Late::Carry => Own::Carried,
            Late::Correct => Own::Corrected,
            Late::Drop => Own::Dropped,
        };
        if own == Own::Dropped {
            self.report.dropped += 1;
        } else {
            debug_assert!(self.late.is_none(), "late contributions are combined by the caller");
            self.late = Some(contribution);
        }
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

    /// The caller will give nothing any more, and waits for the last round.
    pub(crate) fn finish(&mut self) {
        self.say(Readiness::Finished);
        self.awaits(None, Own::Abstained)
    }

    /// Has a word for rank 0, about the rounds that this rank has not bound.
    fn say(&mut self, readiness: Readiness) {
        self.own_word = self.own_word.then(self.next, readiness);
    }

    fn awaits(&mut self, round: Option<u64>, own: Own) {
        self.kept = None;
        if self.newest.as_ref().is_some_and(|newest| Some(newest.number) == round) {
            self.kept = self.newest.take();
        }
        self.awaited = Some(Awaited { round, own, seen: self.seen });
        self.waits_since = None;
    }

    /// The round that the caller waits for, once it has ended, and what the caller has waited for.
    /// It may read the result until it hands over or abstains again.
    pub(crate) fn take_ended(&mut self) -> Option<(Ended, Awaited)> {
        let awaited = self.awaited?;
        let ended = self.kept.clone()?;
        self.awaited = None;
        self.report.missed += ended.number - self.seen;
        self.seen = ended.number + 1;
        self.pass_skipped();
        Some((ended, awaited))
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

    /// Binds no further round; the active one goes on.
    pub(crate) fn stop(&mut self) {
        self.has_stopped = true;
    }

    /// Whether no round is active.
    pub(crate) fn is_idle(&self) -> bool {
        self.active.is_none()
    }

    /// Goes as far as it can; true when anything moved. To be called after the engine was polled.
    pub(crate) fn poll(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        self.wakeup = None;
        if self.is_over || !engine.works() {
            return false;
        }
        let mut moved = false;
        loop {
            self.hear(engine);
            let mut again = self.open_next(engine, now);
            self.expect_all(engine, now);
            if !engine.works() {
                return moved;
            }
            self.tell(engine, now);
            match self.bind(engine).and_then(|bound| Ok(bound | self.advance(engine, now)?)) {
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
        }
        self.look_at_time(engine, now);
        moved
    }

    fn wake_by(&mut self, at: Nanos) {
        self.wakeup = Some(self.wakeup.map_or(at, |wakeup| wakeup.min(at)));
    }

    fn hear(&mut self, engine: &Engine) {
        if self.rank != 0 {
            let word = engine.heard(parent(self.rank), RoundWord::Open);
            self.hear_open(word);
            return;
        }
        let own = self.own_word;
        self.words.hear(|rank| match rank {
            0 => own,
            peer => ReadyWord::heard(engine.heard(peer, RoundWord::Ready)),
        });
    }

    fn hear_open(&mut self, word: u64) {
        if !self.is_last_open && word > self.open_word() {
            (self.open, self.is_last_open) = (word / 2, word % 2 == 1);
        }
    }

    fn open_word(&self) -> u64 {
        self.open * 2 + u64::from(self.is_last_open)
    }

    /// Rank 0 opens the next round when it is time.
    fn open_next(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        let Some(opening) = &mut self.opening else { return false };
        if self.active.is_some() || self.open > self.next || self.is_last_open || self.has_stopped {
            return false;
        }
        let round = self.next;
        match opening.decide(round, self.words.of(round, self.all_present), now) {
            Decision::Wait(None) => return false,
            Decision::Wait(Some(at)) => {
                self.wake_by(at);
                return false;
            }
            Decision::Open => self.open = round + 1,
            Decision::OpenLast => (self.open, self.is_last_open) = (round + 1, true),
            Decision::TimedOut { rank, waited } => {
                let detail = format!("its contribution to round {round} of a partial all-reduce");
                engine.give_up_on(FaultKind::TimedOut, rank, detail, waited, now);
                return false;
            }
        }
        true
    }

    /// Tells others what they do not know yet.
    fn tell(&mut self, engine: &mut Engine, now: Nanos) {
        let word = self.open_word();
        let mut must_retry = false;
        for (child, told) in self.children.iter_mut().filter(|(_, told)| *told < word) {
            if engine.say(*child, RoundWord::Open, word) {
                *told = word;
            } else {
                must_retry = true;
            }
        }
        must_retry |= self.rank != 0 && !self.is_last_open && !self.tell_rank_0(engine, now);
        if must_retry {
            self.wake_by(now + RETRIED_AFTER);
        }
    }

    /// Tells rank 0 this rank's word, and tells it again as long as its round is not open. False:
    /// there was no room for it.
    fn tell_rank_0(&mut self, engine: &mut Engine, now: Nanos) -> bool {
        let (said, again_at, interval) = self.said;
        let is_new = said < self.own_word;
        if !is_new && said.round().is_none_or(|round| self.open > round) {
            return true;
        }
        if is_new || now >= again_at {
            if !engine.say(0, RoundWord::Ready, self.own_word.number()) {
                return false;
            }
            let interval = if is_new { SAID_AGAIN_AFTER } else { interval * 2 }.min(SAID_AGAIN_AFTER_MAX);
            self.said = (self.own_word, now + interval, interval);
        }
        self.wake_by(self.said.1);
        true
    }

    /// Binds this rank's input to the next round, if that is open and the one before has ended.
    fn bind(&mut self, engine: &mut Engine) -> Result<bool, StartError> {
        if self.active.is_some() || self.has_stopped || self.next >= self.open {
            return Ok(false);
        }
        let number = self.next;
        let is_last = self.is_last_open && number + 1 == self.open;
        let corrects = self.activation.late_rule() == Late::Correct && (self.must_correct || is_last);
        let given = self.pending.take();
        let (given, late) = match self.activation.late_rule() {
            Late::Carry => (given.or_else(|| self.late.take()), None),
            Late::Correct if corrects => (given, self.late.take()),
            Late::Correct | Late::Drop => (given, None),
        };
        #[cfg(test)]
        let (given, late) = self.mutated(given, late);
        let held = [&self.kept, &self.newest].map(|ended| ended.as_ref().map(|ended| ended.result));
        let result =
            (0..3).find(|index| !held.contains(&Some(*index))).expect("at most two of three are held");
        let set = Some(self.start_set(engine, given.is_some(), late.is_some())?);
        #[cfg(test)]
        self.trail.push(Bound { number, given, late });
        #[cfg(test)]
        let given = given.filter(|_| self.mutant != Some(Mutant::TornBinding));
        self.active = Some(Active {
            number,
            is_last,
            result,
            corrects,
            given,
            late,
            set,
            contributors: RankSet::default(),
            corrected: RankSet::default(),
            data: [None; 2],
            has_started_data: false,
        });
        self.next += 1;
        if self.activation.division() != Divisor::Contributors {
            self.start_data(engine, None)?;
        }
        Ok(true)
    }

    /// What the mutant binds in place of a contribution and a late one.
    #[cfg(test)]
    fn mutated(&mut self, given: Option<usize>, late: Option<usize>) -> (Option<usize>, Option<usize>) {
        match self.mutant {
            Some(Mutant::UnboundContribution) if given.is_none() && self.rank == 1 => {
                (Some(self.free_contribution()), late)
            }
            Some(Mutant::LostLate) => (given, None),
            _ => (given, late),
        }
    }

    /// Starts the run of the set, with this rank's bits in it.
    fn start_set(&mut self, engine: &mut Engine, gives: bool, corrects: bool) -> Result<RunId, StartError> {
        let half = RankSet::words_for(self.ranks);
        let (index, bit) = ((self.rank / u64::BITS) as usize, 1u64 << (self.rank % u64::BITS));
        self.set_input.fill(0);
        self.set_input[index] = if gives { bit } else { 0 };
        if corrects {
            self.set_input[half + index] = bit;
        }
        #[cfg(test)]
        if self.mutant == Some(Mutant::BitTwice) && self.rank == 0 {
            self.set_input[index] *= 2;
        }
        let bytes = [&mut self.set_input, &mut self.set_output].map(|words| {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(words);
            Bytes::Private { base: Address::of(bytes), len: bytes.len() }
        });
        engine.start_divided(None, &self.set_plan, bytes, self.timeout)
    }

    /// The set that has come out in the words from `first` on.
    fn read_set(&self, first: usize) -> RankSet {
        RankSet::of_words(self.set_output[first..first + RankSet::words_for(self.ranks)].to_vec())
    }

    /// Starts the runs of the data of the active round.
    fn start_data(&mut self, engine: &mut Engine, divide_by: Option<u32>) -> Result<(), StartError> {
        let Some(active) = &mut self.active else { return Ok(()) };
        let RoundsMemory { contributions, results, corrections, neutral, .. } = &self.memory;
        let input = |buffer: Option<usize>| buffer.map_or(neutral, |buffer| &contributions[buffer]);
        let mut start = |input: &Slice, output: &Slice| {
            let bytes = [input, output].map(|slice| Bytes::Registered(slice.clone()));
            engine.start_divided(divide_by, &self.data_plan, bytes, self.timeout)
        };
        active.has_started_data = true;
        active.data[0] = Some(start(input(active.given), &results[active.result])?);
        if active.corrects {
            active.data[1] = Some(start(input(active.late), &corrections[active.result])?);
        }
        Ok(())
    }

    /// Looks what has ended of the active round.
    fn advance(&mut self, engine: &mut Engine, now: Nanos) -> Result<bool, StartError> {
        let Some(active) = &mut self.active else { return Ok(false) };
        let mut moved = take_ended(&mut active.set, engine);
        if moved {
            let (corrects, must_start) = (active.corrects, !active.has_started_data);
            let contributors = self.read_set(0);
            let divide_by = contributors.len().max(1);
            let corrected =
                if corrects { self.read_set(RankSet::words_for(self.ranks)) } else { RankSet::default() };
            if let Some(active) = &mut self.active {
                (active.contributors, active.corrected) = (contributors, corrected);
            }
            if let Some(detail) = self.find_wrong_bits() {
                engine.give_up_on(FaultKind::Protocol, self.rank, detail, Duration::ZERO, now);
                return Ok(moved);
            }
            if must_start {
                self.start_data(engine, Some(divide_by))?;
            }
        }
        let Some(active) = &mut self.active else { return Ok(moved) };
        for run in &mut active.data {
            moved |= take_ended(run, engine);
        }
        if active.set.is_none() && active.has_started_data && active.data == [None; 2] {
            self.end();
            moved = true;
        }
        Ok(moved)
    }

    /// A set that cannot have come about by each rank adding its own bit.
    fn find_wrong_bits(&self) -> Option<String> {
        let active = self.active.as_ref()?;
        let sets = [(&active.contributors, active.given), (&active.corrected, active.late)];
        let is_wrong = |(set, own): (&RankSet, Option<usize>)| {
            set.contains(self.rank) != own.is_some() || set.iter().any(|rank| rank >= self.ranks)
        };
        sets.into_iter().any(is_wrong).then(|| {
            format!(
                "the set of round {} is none that the ranks can have given together; which of them is wrong is \
                 not known",
                active.number
            )
        })
    }

    /// The active round has ended.
    fn end(&mut self) {
        let Some(active) = self.active.take() else { return };
        let Active { number, is_last, result, corrects, contributors, corrected, .. } = active;
        if let Some(opening) = &mut self.opening {
            opening.ended(&contributors, self.words.of(number, self.all_present));
        }
        self.say_again(number, contributors.is_empty());
        self.report.rounds += 1;
        for rank in contributors.iter() {
            if let Some(counted) = self.report.counted.get_mut(rank as usize) {
                *counted += 1;
            }
        }
        self.must_correct = contributors.len() < self.ranks;
        if contributors.is_empty() && corrected.is_empty() && !is_last && self.skip(number) {
            return;
        }
        #[cfg(test)]
        let contributors = match self.mutant {
            Some(Mutant::OtherSet) if self.rank == 1 => contributors.iter().skip(1).collect(),
            _ => contributors,
        };
        let ended = Ended { number, contributors, corrected: corrects.then_some(corrected), result };
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
        if self.own_word.round().is_none_or(|round| round > ended) {
            return;
        }
        match self.own_word.readiness() {
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
                (own, None) => {
                    self.report.late = self.report.late.saturating_sub(1);
                    self.report.dropped = self.report.dropped.saturating_sub((own == Own::Dropped).into());
                    *awaited = Awaited { round: Some(self.next), own: Own::Counted, seen: self.next };
                    (self.late, self.pending) = (None, self.handed);
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
        if !self.is_last_open
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
        if self.awaited.is_none() || self.kept.is_some() || self.active.is_some() {
            self.waits_since = None;
            return;
        }
        let since = *self.waits_since.get_or_insert(now);
        let until = since + self.timeout + MORE_THAN_RANK_0;
        if now < until {
            self.wake_by(until);
            return;
        }
        let of = self.words.of(self.next, self.all_present);
        // Only rank 0 has heard the others.
        let heard = if self.rank == 0 { 0..self.ranks } else { 0..0 };
        let (rank, what) = match heard.into_iter().find(|rank| of(*rank) == Readiness::Silent) {
            Some(rank) => (rank, "its contribution to"),
            None => (0, "it opens"),
        };
        let detail = format!("{what} round {} of a partial all-reduce", self.next);
        engine.give_up_on(FaultKind::TimedOut, rank, detail, now.since(since), now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_one_parent_which_has_it_as_a_child() {
        for ranks in 1..70 {
            let mut told = vec![0; ranks as usize];
            for rank in 0..ranks {
                for child in children(rank, ranks) {
                    assert!(child < ranks && parent(child) == rank, "{rank} of {ranks} tells {child}");
                    told[child as usize] += 1;
                }
            }
            assert!(told[1..].iter().all(|times| *times == 1) && told[0] == 0, "{told:?}");
        }
    }
}
