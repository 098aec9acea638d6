//! Gossip by writes: a rank sends its parameters to a peer, and takes in what has come.
//!
//! * *Mean*: the parameters become the mean of a rank's own and of all that came since its last
//!   exchange.
//! * *Sum* (push-sum; Kempe, Dobra and Gehrke 2003): a rank holds a part of a sum and a weight. It
//!   gives half of both to the peer, and adds what came. Its parameters are the sum over the
//!   weight. What a step of the optimizer changes goes into the sum times the weight. (Stochastic
//!   gradient push, Assran et al. 2019, leaves the weight out: where ranks do not exchange in step,
//!   one that sends more often than others send to it would make larger and larger steps.)
//!
//! With uniform peers no rank waits for another before the end: a write that is refused is left
//! out, and its half of the sum and of the weight stays with its rank. With a butterfly or a ring
//! it is known who writes to whom in each round: a rank tells that peer that the round has begun,
//! gets one write, and waits for it.
//!
//! **Invariants:** each write that is not refused is taken in once. The weights of all ranks and of
//! the writes under way are together the number of ranks, exactly: they are counted in units.
//! Halving a sum is exact too: the half that is given and the half that is kept are together the
//! sum before.

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use super::Peers;
use crate::policy::{Action, Actions, Event, OperationIds, Outcome, Policy, Update, Vector};
use crate::scheme::finish::{Finish, Word};
use crate::shares::WindowPlan;
use crate::state::State;

/// Units in a weight of 1.
const UNIT: u64 = 1 << 48;

/// A rank with less weight gives nothing until something has come: a quotient of so small numbers
/// would be worth little.
const WEIGHT_MIN: u64 = UNIT >> 20;

/// A round under way.
#[derive(Clone, Copy, Debug)]
struct Round {
    number: u64,
    is_asked: bool,
    is_written: bool,
    /// The weight that was given with the write.
    given: u64,
}

/// What came since the last exchange.
#[derive(Clone, Copy, Debug, Default)]
struct Come {
    writes: u32,
    weight: u64,
}

/// The policy of [`Scheme::Gossip`](crate::Scheme::Gossip) that writes.
#[derive(Debug)]
pub(crate) struct Push {
    parameters: usize,
    peers: Peers,
    every: u64,
    /// None: the mean.
    weight: Option<u64>,
    next_step: u64,
    ids: OperationIds,
    round: Option<Round>,
    come: Come,
    /// By rank: rounds that it has begun.
    begun: Vec<u64>,
    finish: Finish,
    /// By rank: its weight, once it has heard of all writes.
    weights: Vec<Option<u64>>,
    has_told_weight: bool,
    is_averaging: bool,
}

impl Push {
    pub(crate) fn new(
        parameters: usize,
        every: u64,
        peers: Peers,
        plan: WindowPlan,
        has_weight: bool,
    ) -> Self {
        Self {
            parameters,
            peers,
            every,
            weight: has_weight.then_some(UNIT),
            next_step: 0,
            ids: OperationIds::default(),
            round: None,
            come: Come::default(),
            begun: vec![0; peers.ranks as usize],
            finish: Finish::new(plan),
            weights: vec![None; peers.ranks as usize],
            has_told_weight: false,
            is_averaging: false,
        }
    }

    /// That of all ranks together; 0 where there is none.
    fn weight_of_all(&self) -> u64 {
        self.weight.map_or(0, |_| UNIT.saturating_mul(self.peers.ranks.into()))
    }

    /// The vector that is exchanged.
    fn exchanged(&self) -> Vector {
        if self.weight.is_some() { Vector::Sum } else { Vector::Parameters }
    }

    fn copy(&self, from: Vector, into: Vector, actions: &mut Actions) {
        actions.update(Update::Copy { from, into, piece: 0..self.parameters });
    }

    fn computed(&mut self, step: u64, actions: &mut Actions) {
        if let Some(weight) = self.weight {
            self.copy(Vector::Parameters, Vector::Anchor, actions);
            actions.update(Update::Step);
            let piece = 0..self.parameters;
            let (into, from) = (Vector::Anchor, Vector::Parameters);
            actions.update(Update::Mix { into, alpha: -1.0, from, beta: 1.0, piece: piece.clone() });
            let (into, from, beta) = (Vector::Sum, Vector::Anchor, (weight as f64 / UNIT as f64) as f32);
            actions.update(Update::Mix { into, alpha: 1.0, from, beta, piece });
        } else {
            actions.update(Update::Step);
        }
        self.next_step = step + 1;
        if !self.next_step.is_multiple_of(self.every) || self.peers.ranks == 1 {
            return self.compute(actions);
        }
        let number = self.next_step / self.every - 1;
        self.round = Some(Round { number, is_asked: false, is_written: false, given: 0 });
        if let Some(source) = self.peers.source(number) {
            Word::Round(number + 1).tell(source, actions);
        }
        self.advance(actions);
    }

    /// Goes on with the round under way.
    fn advance(&mut self, actions: &mut Actions) {
        let Some(mut round) = self.round else { return };
        let target = self.peers.target(round.number);
        let source = self.peers.source(round.number);
        if !round.is_asked && (source.is_none() || self.begun[target as usize] > round.number) {
            round.is_asked = true;
            let given = self.write(target, source.is_some(), actions);
            (round.is_written, round.given) = (given.is_none(), given.unwrap_or_default());
        }
        let awaited = source.filter(|_| self.come.writes == 0);
        if round.is_written && awaited.is_none() {
            self.round = None;
            self.mix(actions);
            return self.compute(actions);
        }
        self.round = Some(round);
        if !round.is_asked {
            actions.push(Action::Await { from: target });
        } else if let Some(from) = awaited {
            actions.push(Action::Await { from });
        }
    }

    /// Writes to a peer; returns the weight that it gives, if it does.
    fn write(&mut self, to: Rank, waits: bool, actions: &mut Actions) -> Option<u64> {
        let mut word = 0;
        if let Some(weight) = &mut self.weight {
            if *weight < WEIGHT_MIN {
                return None;
            }
            word = *weight / 2;
            *weight -= word;
            let piece = 0..self.parameters;
            actions.update(Update::Scale { vector: Vector::Sum, factor: 0.5, piece });
        }
        let (id, from) = (self.ids.take(), self.exchanged());
        actions.push(Action::Write { id, to, from, word, waits });
        self.finish.sent(to);
        Some(word)
    }

    /// Takes what was given back: doubling undoes halving.
    fn refused(&mut self, by: Rank, actions: &mut Actions) {
        self.finish.refused(by);
        let given = self.round.map_or(0, |round| round.given);
        if let Some(weight) = &mut self.weight {
            *weight += given;
            let piece = 0..self.parameters;
            actions.update(Update::Scale { vector: Vector::Sum, factor: 2.0, piece });
        }
    }

    fn arrived(&mut self, word: u64, actions: &mut Actions) {
        let (into, from, piece) = (Vector::Fetched, Vector::Arrival, 0..self.parameters);
        if self.come.writes == 0 {
            actions.update(Update::Copy { from, into, piece });
        } else {
            actions.update(Update::Mix { into, alpha: 1.0, from, beta: 1.0, piece });
        }
        self.come.writes = self.come.writes.saturating_add(1);
        self.come.weight = self.come.weight.saturating_add(word);
    }

    /// Takes in what came.
    fn mix(&mut self, actions: &mut Actions) {
        let Come { writes, weight: come } = std::mem::take(&mut self.come);
        if writes > 0 {
            let share = if self.weight.is_some() { 1.0 } else { 1.0 / (1.0 + writes as f32) };
            let (into, piece) = (self.exchanged(), 0..self.parameters);
            actions.update(Update::Mix { into, alpha: share, from: Vector::Fetched, beta: share, piece });
            actions.push(Action::Exchanged);
        }
        if let Some(weight) = &mut self.weight {
            *weight = weight.saturating_add(come);
        }
    }

    fn compute(&mut self, actions: &mut Actions) {
        if let Some(weight) = self.weight {
            self.copy(Vector::Sum, Vector::Parameters, actions);
            let factor = (UNIT as f64 / weight as f64) as f32;
            actions.update(Update::Scale { vector: Vector::Parameters, factor, piece: 0..self.parameters });
        }
        actions.compute(self.next_step);
    }

    fn try_finish(&mut self, actions: &mut Actions) {
        if !self.finish.has_begun() || self.is_averaging {
            return;
        }
        if let Some(from) = self.finish.missing() {
            return actions.push(Action::Await { from });
        }
        if !self.has_told_weight {
            self.has_told_weight = true;
            self.mix(actions);
            self.tell_weight(actions);
        }
        if self.weight.is_some()
            && let Some(missing) = self.weights.iter().position(Option::is_none)
        {
            return actions.push(Action::Await { from: missing as Rank });
        }
        let all = u128::from(self.peers.ranks) * u128::from(UNIT);
        let found: u128 = self.weights.iter().flatten().map(|weight| u128::from(*weight)).sum();
        let keeps_weight = self.weight.is_none() || found == all;
        actions.push(Action::Conserved(keeps_weight && self.finish.has_all()));
        self.is_averaging = true;
        let (id, vector) = (self.ids.take(), self.exchanged());
        actions.push(Action::Average { id, vector, piece: 0..self.parameters });
    }

    /// Tells all peers the weight that this rank ends with.
    fn tell_weight(&mut self, actions: &mut Actions) {
        let Some(weight) = self.weight else { return };
        self.weights[self.peers.rank as usize] = Some(weight);
        for peer in self.finish.peers() {
            Word::Result(weight).tell(peer, actions);
        }
    }

    fn told(&mut self, from: Rank, word: u64, actions: &mut Actions) {
        let place = from as usize;
        let is_right = match Word::decode(word) {
            Word::Round(rounds) => {
                let has_sources = self.peers.source(0).is_some();
                has_sources && rounds > std::mem::replace(&mut self.begun[place], rounds)
            }
            Word::Finished(sent) => self.finish.told(from, sent),
            Word::Result(weight) => {
                let is_weighed = self.weight.is_some() && self.finish.has_told(from);
                is_weighed && self.weights[place].replace(weight).is_none()
            }
            Word::Held(_) => false,
        };
        if !is_right {
            return actions.push(Action::Refuse { from, word });
        }
        self.advance(actions);
        self.try_finish(actions);
    }
}

impl Policy for Push {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => {
                if self.weight.is_some() {
                    self.copy(Vector::Parameters, Vector::Sum, actions);
                }
                actions.compute(0);
            }
            Event::Ready(_) | Event::Needed(_) | Event::Totalled { .. } | Event::Pause => {}
            Event::Committed | Event::Membership { .. } => {}
            // The parameters are those at which it computes already.
            Event::Resume => actions.compute(self.next_step),
            Event::Computed { step } => self.computed(step, actions),
            Event::Done(_, outcome @ (Outcome::Written | Outcome::Refused { .. })) => {
                if let Outcome::Refused { by } = outcome {
                    self.refused(by, actions);
                }
                if let Some(round) = &mut self.round {
                    round.is_written = true;
                }
                self.advance(actions);
            }
            Event::Done(..) => {
                if self.weight.is_some() {
                    self.copy(Vector::Sum, Vector::Parameters, actions);
                }
                actions.push(Action::Agreed(Vector::Parameters));
            }
            Event::Arrived { from, word } => {
                if !self.finish.came(from) || word > self.weight_of_all() {
                    return actions.push(Action::Refuse { from, word });
                }
                self.arrived(word, actions);
                self.advance(actions);
                self.try_finish(actions);
            }
            Event::Told { from, word } => self.told(from, word, actions),
            Event::Stop => {
                self.finish.begin(actions);
                self.try_finish(actions);
            }
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.weight);
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        state.field(&mut self.come.writes);
        state.field(&mut self.come.weight);
        state.field(&mut self.begun);
        state.field(&mut self.finish);
    }
}
