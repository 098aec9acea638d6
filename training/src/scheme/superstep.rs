//! Supersteps (ElasticBSP; Zhao et al., arXiv 2001.01347): a barrier where all ranks are predicted
//! to end a step at nearly the same time, so ranks make different numbers of steps until then.
//!
//! When a rank comes to the barrier it tells rank 0 how long its steps are predicted to take, and
//! the parameters of all ranks are averaged. Rank 0 places the next barrier by
//! [`zipline`](crate::zipline) and tells each rank how many steps it makes. The first superstep has
//! one. The paper's ranks send each update to a server during a superstep; here ranks train by
//! themselves until the barrier.
//!
//! In a session there are no words between ranks: predictions are added up, and each rank places
//! the barrier as the others do. The steps that ranks have made are added up too. A process that
//! joins begins behind a barrier, with the parameters of all, as if it had made as many steps as a
//! rank on the average. Its first superstep has one step, as that of all in the beginning: so it
//! has an interval of its own when it comes to its first barrier.
//!
//! A rank that has made its last step comes to each barrier at once, until all have. It does so too
//! before a checkpoint, after which the first superstep has one step again.
//!
//! **Invariants:** no superstep has more steps of a rank than the lookahead: a rank refuses to be
//! told more. At least one rank makes one. All ranks have the same parameters after each barrier.

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use crate::policy::{Action, Actions, Event, OperationIds, Outcome, Policy, Update, Vector};
use crate::scheme::finish::Word;
use crate::shares::WindowPlan;
use crate::state::State;
use crate::zipline::{Barrier, Intervals, Objective, Placer, Prediction, Predictor, ZipLineError};

/// Longest interval that is predicted, in nanoseconds: an hour.
const INTERVAL_MAX: u64 = 3_600_000_000_000;

/// The policy of [`Scheme::ElasticBsp`](crate::Scheme::ElasticBsp).
#[derive(Debug)]
pub(crate) struct Supersteps {
    parameters: usize,
    plan: WindowPlan,
    lookahead: u32,
    objective: Objective,
    predictor: Predictor,
    intervals: Intervals,
    /// When the step began that is computed.
    began: Nanos,
    next_step: u64,
    ids: OperationIds,
    /// Steps that are left until the barrier.
    left: u64,
    /// Operations of the barrier that are under way.
    under_way: u32,
    /// Whether all ranks know by sums what each has predicted, and place the barrier alike. Then
    /// ranks are seats.
    by_sums: bool,
    /// The members that there are.
    members: u32,
    /// The steps that a member had made at the last barrier, on the average.
    mean_steps: u64,
    /// The steps of the next superstep, once they are told.
    told: Option<Word>,
    /// Whether it makes no step, for ever or before a checkpoint.
    is_stopped: bool,
    /// Whether no rank makes a step any more.
    has_ended: bool,
    /// On rank 0, by rank: the predicted interval; 0 after a rank's last step.
    predicted: Vec<Option<u64>>,
    /// On rank 0: what the ranks that make steps will do, and the barrier behind that. Their memory
    /// is used again.
    running: Vec<Prediction>,
    placer: Placer,
    barrier: Barrier,
    short: Option<Short>,
}

/// That the lookahead ended for the quickest rank before the slowest made a step.
#[derive(Clone, Copy, Debug)]
struct Short {
    /// At so many barriers.
    barriers: u64,
    /// The slowest rank, and the least lookahead that reaches it, where that was largest.
    slowest: Rank,
    least: u64,
}

impl Supersteps {
    pub(crate) fn new(
        parameters: usize,
        plan: WindowPlan,
        lookahead: u32,
        objective: Objective,
        predictor: Predictor,
    ) -> Self {
        Self {
            parameters,
            plan,
            lookahead,
            objective,
            predictor,
            intervals: Intervals::default(),
            began: Nanos::ZERO,
            next_step: 0,
            ids: OperationIds::default(),
            left: 1,
            under_way: 0,
            by_sums: false,
            members: 1,
            mean_steps: 0,
            told: None,
            is_stopped: false,
            has_ended: false,
            predicted: vec![None; plan.ranks as usize],
            running: Vec::new(),
            placer: Placer::default(),
            barrier: Barrier::default(),
            short: None,
        }
    }

    /// The same without words between ranks: predictions are added up, each at the place of the
    /// member's seat. A seat where nobody is has predicted nothing, as after its last step.
    pub(crate) fn by_sums(
        parameters: usize,
        plan: WindowPlan,
        lookahead: u32,
        objective: Objective,
        predictor: Predictor,
    ) -> Self {
        Self { by_sums: true, ..Self::new(parameters, plan, lookahead, objective, predictor) }
    }

    fn compute(&mut self, now: Nanos, actions: &mut Actions) {
        self.began = now;
        actions.compute(self.next_step);
    }

    fn computed(&mut self, now: Nanos, actions: &mut Actions) {
        actions.update(Update::Step);
        let interval = now.since(self.began).as_nanos();
        self.intervals.add(u64::try_from(interval).unwrap_or(u64::MAX));
        self.next_step += 1;
        self.left -= 1;
        if self.left > 0 {
            self.compute(now, actions);
        } else {
            self.come_to_barrier(actions);
        }
    }

    fn come_to_barrier(&mut self, actions: &mut Actions) {
        let predicted = self.intervals.predicted(self.predictor).unwrap_or(1).min(INTERVAL_MAX);
        let predicted = if self.is_stopped { 0 } else { predicted };
        if self.by_sums {
            let (id, mut numbers) = (self.ids.take(), vec![0; self.predicted.len()]);
            numbers[self.plan.rank as usize] = predicted;
            numbers.push(self.next_step);
            self.under_way += 1;
            actions.push(Action::Total { id, numbers });
        } else if self.plan.rank == 0 {
            self.predicted[0] = Some(predicted);
        } else {
            Word::Round(predicted).tell(0, actions);
        }
        let (id, piece) = (self.ids.take(), 0..self.parameters);
        self.under_way += 1;
        actions.push(Action::Average { id, vector: Vector::Parameters, piece });
    }

    /// Rank 0 places the next barrier when all have come to this one.
    fn try_place(&mut self, actions: &mut Actions) {
        let places = self.by_sums || self.plan.rank == 0;
        if !places || self.under_way > 0 || self.predicted.contains(&None) {
            return;
        }
        let own = self.plan.rank;
        let Self { predicted, running, placer, barrier, .. } = self;
        running.clear();
        let running_ranks = predicted.iter().flatten().filter(|interval| **interval > 0);
        running.extend(running_ranks.map(|interval| Prediction { next: *interval, interval: *interval }));
        if let Err(error) = placer.place(running, 0, self.lookahead, self.objective, barrier) {
            // If speeds differ by more than the lookahead, a barrier follows each step.
            barrier.iterations.clear();
            if let ZipLineError::ShortLookahead { least, .. } = error {
                let intervals = (0..).zip(predicted.iter().copied());
                let slowest = intervals.max_by_key(|(_, interval)| *interval).map_or(0, |(rank, _)| rank);
                let short = self.short.get_or_insert(Short { barriers: 0, slowest, least });
                short.barriers += 1;
                if least > short.least {
                    (short.slowest, short.least) = (slowest, least);
                }
            }
        }
        let mut steps = barrier.iterations.iter();
        for (rank, interval) in (0..).zip(predicted.iter_mut().filter_map(Option::take)) {
            let word = match interval {
                _ if running.is_empty() => Word::Finished(0),
                0 => Word::Round(0),
                _ => Word::Round(steps.next().copied().unwrap_or(1).into()),
            };
            if rank == own {
                self.told = Some(word);
            } else if !self.by_sums {
                word.tell(rank, actions);
            }
        }
    }

    /// Goes on after a barrier.
    fn advance(&mut self, now: Nanos, actions: &mut Actions) {
        if self.has_ended || self.under_way > 0 || self.left > 0 && !self.is_stopped {
            return;
        }
        self.try_place(actions);
        match self.told.take() {
            None => actions.push(Action::Await { from: self.missing() }),
            Some(Word::Round(0)) => self.come_to_barrier(actions),
            Some(Word::Round(steps)) => {
                self.left = steps;
                self.compute(now, actions);
            }
            Some(_) => self.has_ended = true,
        }
    }

    /// A rank that this one waits for.
    fn missing(&self) -> Rank {
        self.predicted
            .iter()
            .skip(1)
            .position(Option::is_none)
            .filter(|_| self.plan.rank == 0)
            .map_or(0, |rank| 1 + rank as Rank)
    }

    /// Returns whether a rank sends this word now.
    fn heard(&mut self, from: Rank, word: u64) -> bool {
        let word = Word::decode(word);
        match word {
            Word::Round(interval) if self.plan.rank == 0 => {
                interval <= INTERVAL_MAX && self.predicted[from as usize].replace(interval).is_none()
            }
            _ => {
                // Rank 0 answers what this rank has told it at the barrier.
                let is_answer = from == 0 && self.left == 0 && !self.has_ended;
                let is_right = match word {
                    Word::Round(0) | Word::Finished(0) => self.is_stopped,
                    Word::Round(steps) => !self.is_stopped && steps <= u64::from(self.lookahead),
                    _ => false,
                };
                is_answer && is_right && self.told.replace(word).is_none()
            }
        }
    }
}

impl Policy for Supersteps {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => self.compute(now, actions),
            Event::Ready(_) | Event::Needed(_) => {}
            Event::Arrived { from, word } => actions.push(Action::Refuse { from, word }),
            Event::Committed => {}
            Event::Membership { ranks, step, .. } => (self.members, self.next_step) = (ranks, step),
            Event::Totalled { place, total } => match self.predicted.get_mut(place as usize) {
                Some(predicted) => *predicted = Some(total),
                None => self.mean_steps = total / u64::from(self.members.max(1)),
            },
            Event::Computed { .. } => self.computed(now, actions),
            Event::Done(_, outcome) => {
                self.under_way -= 1;
                if outcome == Outcome::Averaged {
                    actions.push(Action::Agreed(Vector::Parameters));
                }
                self.advance(now, actions);
            }
            Event::Told { from, word } => {
                if !self.heard(from, word) {
                    return actions.push(Action::Refuse { from, word });
                }
                self.advance(now, actions);
            }
            Event::Pause | Event::Stop => {
                self.is_stopped = true;
                self.left = 0;
                self.come_to_barrier(actions);
            }
            Event::Resume => {
                (self.is_stopped, self.has_ended) = (false, false);
                self.left = 1;
                self.compute(now, actions);
            }
        }
    }

    fn joins_at(&self, next: u64) -> u64 {
        if self.by_sums { self.mean_steps } else { next }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.intervals);
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
    }

    fn remark(&self) -> Option<String> {
        let Short { barriers, slowest, least } = self.short?;
        let (lookahead, of) = (self.lookahead, if self.by_sums { "seat" } else { "rank" });
        Some(format!(
            "lookahead={lookahead} is too short for the steps of {of} {slowest}: {barriers} barriers stood behind a \
             single step of each rank; give at least lookahead={least}"
        ))
    }
}
