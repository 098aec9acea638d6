//! The rounds of a line in virtual time: a partial all-reduce whose rule is that of real groups.
//!
//! A round opens at the instant at which the rule is met ([`Opening`]), and binds each rank then:
//! its contribution, if it has handed one over, else nothing. One round is under way at a time.
//! What becomes of late contributions is as in [`pleach_collectives::partial`].
//!
//! **Invariant:** rounds are bound in order, each rank once a round. A contribution that is carried
//! is in one result, one that is dropped in none.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_collectives::partial::{Decision, Divisor, Late, Opening, RankSet, Readiness};
use pleach_transport::clock::Nanos;

use crate::lines::Line;
use crate::policy::{OperationId, Outcome, Vector};

/// No round waits so long in virtual time: the end of a run finds out who waits for ever.
const NEVER: Duration = Duration::from_secs(1 << 32);

/// An operation of a rank that has ended.
#[derive(Debug)]
pub(crate) struct Completed {
    pub(crate) rank: Rank,
    pub(crate) id: OperationId,
    pub(crate) outcome: Outcome,
    /// What the vector holds now.
    pub(crate) result: Option<(Vector, Arc<[f32]>)>,
}

/// What a rank waits for.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    id: OperationId,
    /// None: it takes no result.
    vector: Option<Vector>,
    /// None: the last round, to which it gives nothing.
    round: Option<u64>,
}

/// A rank of the line.
#[derive(Debug)]
struct Place {
    readiness: Readiness,
    /// Handed over in time, late, and dropped as too late.
    pending: Option<Vec<f32>>,
    late: Option<Vec<f32>>,
    dropped: Option<Vec<f32>>,
    /// The first round whose result it has not seen.
    seen: u64,
    awaited: Option<Awaited>,
    /// An operation that has waited for no round.
    passed: Option<OperationId>,
}

/// A round that is bound.
#[derive(Clone, Debug)]
struct Bound {
    number: u64,
    is_last: bool,
    contributors: RankSet,
    /// Whether nothing was given to it, late or in time.
    is_empty: bool,
    result: Arc<[f32]>,
}

/// See the module.
pub(crate) struct Rounds {
    line: Line,
    opening: Opening,
    places: Vec<Place>,
    /// The first round that is not bound.
    next: u64,
    active: Option<Bound>,
    newest: Option<Bound>,
    /// Whether a rank was left out of the round before.
    must_correct: bool,
    has_ended: bool,
}

impl Rounds {
    pub(crate) fn new(line: Line) -> Self {
        let place = || Place {
            readiness: Readiness::Silent,
            pending: None,
            late: None,
            dropped: None,
            seen: 0,
            awaited: None,
            passed: None,
        };
        let ranks = line.ranks.len() as u32;
        Self {
            opening: Opening::new(ranks, line.activation, NEVER),
            places: (0..ranks).map(|_| place()).collect(),
            line,
            next: 0,
            active: None,
            newest: None,
            must_correct: false,
            has_ended: false,
        }
    }

    /// The rounds of all lines, and by rank and its line which of them; of the lines of each rank.
    pub(crate) fn of_lines<'a>(lines: impl Iterator<Item = &'a [Line]>) -> (Vec<Self>, Vec<Vec<usize>>) {
        let (mut rounds, mut found) = (Vec::new(), HashMap::new());
        let of_rank = |lines: &'a [Line]| {
            let number = |(dimension, line): (usize, &Line)| {
                *found.entry((dimension, line.ranks[0])).or_insert_with(|| {
                    rounds.push(Self::new(line.clone()));
                    rounds.len() - 1
                })
            };
            lines.iter().enumerate().map(number).collect()
        };
        let numbers = lines.map(of_rank).collect();
        (rounds, numbers)
    }

    /// The line.
    pub(crate) fn line(&self) -> &Line {
        &self.line
    }

    /// The ranks of the line.
    pub(crate) fn ranks(&self) -> &[Rank] {
        &self.line.ranks
    }

    fn place(&mut self, rank: Rank) -> &mut Place {
        let place = self.line.ranks.iter().position(|other| *other == rank);
        &mut self.places[place.expect("a rank asks for its own lines")]
    }

    /// A rank hands a contribution over; it gets the result in that vector. It waits for no round
    /// above the limit: returns whether it contributes.
    pub(crate) fn contribute(
        &mut self,
        rank: Rank,
        id: OperationId,
        (vector, limit): (Vector, u64),
        mut given: Vec<f32>,
    ) -> bool {
        let (rule, next, missed) = (self.line.activation.late_rule(), self.next, self.newest_missed());
        let place = self.place(rank);
        let is_late = next > place.seen;
        if !is_late && next > limit {
            place.passed = Some(id);
            return false;
        }
        if is_late || rule == Late::Carry {
            let late = place.late.take();
            late.into_iter().for_each(|late| given.iter_mut().zip(late).for_each(|(sum, late)| *sum += late));
        }
        let round = if is_late {
            place.readiness = Readiness::Silent;
            let kept = if rule == Late::Drop { &mut place.dropped } else { &mut place.late };
            *kept = Some(given);
            missed
        } else {
            place.readiness = Readiness::Ready;
            place.pending = Some(given);
            Some(next)
        };
        place.awaited = Some(Awaited { id, vector: Some(vector), round });
        true
    }

    /// A rank has nothing to give until it contributes again.
    pub(crate) fn step_aside(&mut self, rank: Rank) {
        self.place(rank).readiness = Readiness::Absent;
    }

    /// It is waited for again.
    pub(crate) fn come_back(&mut self, rank: Rank) {
        self.place(rank).readiness = Readiness::Silent;
    }

    /// A rank gives nothing any more. It gets the late contributions of the last round in that
    /// vector.
    pub(crate) fn leave(&mut self, rank: Rank, id: OperationId, into: Option<Vector>) {
        let place = self.place(rank);
        place.readiness = Readiness::Finished;
        place.awaited = Some(Awaited { id, vector: into, round: None });
    }

    /// Begins anew when all ranks have left.
    pub(crate) fn reopen(&mut self) {
        *self = Self::new(self.line.clone());
    }

    fn newest_missed(&self) -> Option<u64> {
        self.active.as_ref().or(self.newest.as_ref()).map(|round| round.number)
    }

    /// Opens the next round if it is time, and returns whether it did; and when to look again.
    pub(crate) fn open(&mut self, now: Nanos) -> (bool, Option<Nanos>) {
        if self.active.is_some() || self.has_ended {
            return (false, None);
        }
        let places = &self.places;
        match self.opening.decide(self.next, |place| places[place as usize].readiness, now) {
            Decision::Open => self.bind(false),
            Decision::OpenLast => self.bind(true),
            Decision::Wait(at) => {
                // The end of the world is no time to look.
                return (false, at.filter(|at| at.since(now) < NEVER / 2));
            }
            Decision::TimedOut { .. } => return (false, None),
        }
        (true, None)
    }

    fn bind(&mut self, is_last: bool) {
        let activation = self.line.activation;
        let rule = activation.late_rule();
        let corrects = rule == Late::Correct && (self.must_correct || is_last);
        let (mut given, mut late) = (Vec::new(), Vec::new());
        let mut contributors = Vec::new();
        for (number, place) in (0..).zip(&mut self.places) {
            let contribution = place.pending.take();
            let contribution =
                if rule == Late::Carry { contribution.or_else(|| place.late.take()) } else { contribution };
            if let Some(contribution) = contribution {
                contributors.push(number);
                given.push(contribution);
            }
            if corrects {
                late.extend(place.late.take());
            }
        }
        let divisor = match activation.division() {
            Divisor::World => self.places.len(),
            Divisor::Contributors => given.len().max(1),
            _ => 1,
        };
        let is_empty = given.is_empty() && late.is_empty();
        let mut result = average(given, divisor as f32);
        // Late contributions are a sum of their own, which a rank adds to the result.
        let late = average(late, divisor as f32);
        if result.is_empty() {
            result = late;
        } else {
            result.iter_mut().zip(late).for_each(|(element, late)| *element += late);
        }
        let (number, contributors) = (self.next, contributors.into_iter().collect());
        self.active = Some(Bound { number, is_last, contributors, is_empty, result: result.into() });
        self.next += 1;
    }

    /// Ends the round under way.
    pub(crate) fn end(&mut self) {
        let Some(ended) = self.active.take() else { return };
        let places = &self.places;
        self.opening.ended(&ended.contributors, |place| places[place as usize].readiness);
        self.must_correct = (ended.contributors.len() as usize) < self.places.len();
        let gave_none = ended.contributors.is_empty();
        for (number, place) in (0..).zip(&mut self.places) {
            place.readiness = match place.readiness {
                Readiness::Ready if ended.contributors.contains(number) => Readiness::Silent,
                Readiness::Absent if gave_none => Readiness::Silent,
                other => other,
            };
        }
        if ended.is_empty && !ended.is_last {
            return self.skip(&ended);
        }
        self.has_ended = ended.is_last;
        self.newest = Some(ended);
    }

    /// A round to which nobody gave anything is none.
    fn skip(&mut self, empty: &Bound) {
        let (next, missed) = (self.next, self.newest.as_ref().map(|newest| newest.number));
        for place in &mut self.places {
            let missed = missed.filter(|missed| *missed >= place.seen);
            match &mut place.awaited {
                Some(Awaited { round: Some(round), vector: Some(_), .. }) if *round == empty.number => {
                    if let Some(missed) = missed {
                        *round = missed;
                        continue;
                    }
                    // It is in time for the next one.
                    *round = next;
                    place.pending = place.late.take().or_else(|| place.dropped.take());
                    place.readiness = Readiness::Ready;
                    place.seen = next;
                }
                Some(_) => {}
                None if missed.is_none() => place.seen = next,
                None => {}
            }
        }
    }

    /// Takes the operations that have ended.
    pub(crate) fn completed(&mut self) -> Vec<Completed> {
        let (newest, next) = (self.newest.clone(), self.next);
        let active = self.active.as_ref().map(|active| active.number);
        let mut completed = Vec::new();
        for (rank, place) in self.line.ranks.iter().zip(&mut self.places) {
            if let Some(id) = place.passed.take() {
                let outcome = Outcome::Combined { contributors: 0 };
                completed.push(Completed { rank: *rank, id, outcome, result: None });
            }
            let Some(Awaited { id, vector, round }) = place.awaited else { continue };
            let has_ended = match round {
                None => self.has_ended,
                Some(round) => newest.as_ref().is_some_and(|newest| newest.number >= round),
            };
            if !has_ended {
                continue;
            }
            (place.awaited, place.dropped) = (None, None);
            place.seen = match (&newest, round) {
                (Some(newest), Some(_)) => newest.number + 1,
                _ => active.unwrap_or(next),
            };
            if newest.as_ref().is_none_or(|newest| newest.number < place.seen) {
                place.seen = active.unwrap_or(next);
            }
            let result = vector.zip(newest.as_ref().map(|newest| newest.result.clone()));
            let contributors = newest.as_ref().map_or(0, |newest| newest.contributors.len());
            let is_empty = newest.as_ref().is_none_or(|newest| newest.is_empty);
            let outcome = match round {
                Some(_) => Outcome::Combined { contributors },
                None => Outcome::Left { carries: result.is_some() && !is_empty },
            };
            completed.push(Completed { rank: *rank, id, outcome, result });
        }
        completed
    }
}

/// The sum in this order, divided; nothing of nothing.
fn average(given: Vec<Vec<f32>>, divisor: f32) -> Vec<f32> {
    let mut given = given.into_iter();
    let Some(mut sum) = given.next() else { return Vec::new() };
    given.for_each(|given| sum.iter_mut().zip(given).for_each(|(sum, element)| *sum += element));
    sum.iter_mut().for_each(|sum| *sum /= divisor);
    sum
}
