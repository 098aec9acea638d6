//! A policy whose ranks make steps by themselves, in a session: its exchanges count on all members
//! or on none.
//!
//! The policy inside knows of no session. What it gives to an exchange is copied first, and the
//! copy ([`Vector::Sum`]) is exchanged. When the policy has nothing else to do than to wait for the
//! result, this one asks for the word of the session ([`Action::Commit`]). With that the copy takes
//! the place of the elements, and the policy inside hears of the end. Where members change before,
//! the exchange begins anew among those that there are, with the same elements. So the steps that a
//! member has made by itself stay, and a step that is computed is computed to its end. A process
//! that joins the others resumes behind the exchange that was committed last.
//!
//! Numbers that are added up are a part of the exchange that is asked for behind them.
//!
//! **Invariants:** the policy inside hears of the end of each exchange once, when all members have
//! the result. Until then the elements that it gave are as they were. Exchanges are committed one
//! by one, in the order in which they were asked for, which is the same on all members.

use std::collections::VecDeque;
use std::ops::Range;

use pleach_transport::clock::Nanos;

use crate::compression::Compression;
use crate::policy::{Action, Actions, Event, OperationId, OperationIds, Outcome, Policy, Update, Vector};

/// What a part of an exchange is of.
#[derive(Debug)]
enum Given {
    Average { vector: Vector, piece: Range<usize>, compression: Compression },
    Contribution { vector: Vector, piece: Range<usize>, line: usize },
    Numbers(Vec<u64>),
}

/// A part of an exchange that is not committed.
#[derive(Debug)]
struct Part {
    /// Its number for the policy inside.
    number: OperationId,
    /// The operation that carries it out.
    id: OperationId,
    given: Given,
    /// Of [`Given::Numbers`]: the sums, with their places.
    totals: Vec<(u32, u64)>,
    outcome: Option<Outcome>,
}

impl Part {
    fn begin(&mut self, ids: &mut OperationIds, actions: &mut Actions) {
        let id = ids.take();
        (self.id, self.outcome) = (id, None);
        self.totals.clear();
        match &self.given {
            Given::Average { vector, piece, compression } => {
                copy(*vector, Vector::Sum, piece, actions);
                actions.average(id, Vector::Sum, piece.clone(), *compression);
            }
            Given::Contribution { vector, piece, line } => {
                copy(*vector, Vector::Sum, piece, actions);
                let (vector, limit) = (Vector::Sum, u64::MAX);
                actions.push(Action::Contribute { id, line: *line, vector, limit });
            }
            Given::Numbers(numbers) => actions.push(Action::Total { id, numbers: numbers.clone() }),
        }
    }
}

fn copy(from: Vector, into: Vector, piece: &Range<usize>, actions: &mut Actions) {
    actions.update(Update::Copy { from, into, piece: piece.clone() });
}

/// See the module.
pub(crate) struct Exchanges {
    inner: Box<dyn Policy>,
    /// The elements of a vector.
    whole: Range<usize>,
    ids: OperationIds,
    asked: VecDeque<Part>,
    /// The end of all rounds that the policy inside waits for: its number there and here.
    leaves: Option<(OperationId, OperationId)>,
    /// The step that is computed.
    computing: Option<u64>,
    committed: u64,
    has_begun: bool,
    is_committing: bool,
    /// What the policy inside asks for. The memory is used again.
    said: Actions,
}

impl Exchanges {
    /// Of this policy, on vectors of so many elements.
    pub(crate) fn of(inner: Box<dyn Policy>, parameters: usize) -> Self {
        Self {
            inner,
            whole: 0..parameters,
            ids: OperationIds::default(),
            asked: VecDeque::new(),
            leaves: None,
            computing: None,
            committed: 0,
            has_begun: false,
            is_committing: false,
            said: Actions::default(),
        }
    }

    /// Tells the policy inside of an event.
    fn tell(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        let mut said = std::mem::take(&mut self.said);
        self.inner.on(event, now, &mut said);
        for action in said.drain() {
            match action {
                Action::Average { id, vector, piece } => {
                    let given = Given::Average { vector, piece, compression: Compression::None };
                    self.exchange(id, given, actions);
                }
                Action::AverageCompressed { id, vector, piece, compression } => {
                    self.exchange(id, Given::Average { vector, piece, compression }, actions);
                }
                Action::Contribute { id, line, vector, .. } => {
                    let piece = self.whole.clone();
                    self.exchange(id, Given::Contribution { vector, piece, line }, actions);
                }
                Action::Total { id, numbers } => self.exchange(id, Given::Numbers(numbers), actions),
                // Its rounds wait for all members, so nothing is late.
                Action::Leave { id: number, .. } => {
                    let id = self.ids.take();
                    self.leaves = Some((number, id));
                    actions.push(Action::Leave { id, into: None });
                }
                Action::Compute { step } => {
                    self.computing = Some(step);
                    actions.compute(step);
                }
                action => actions.push(action),
            }
        }
        self.said = said;
    }

    fn exchange(&mut self, number: OperationId, given: Given, actions: &mut Actions) {
        let mut part = Part { number, id: number, given, totals: Vec::new(), outcome: None };
        part.begin(&mut self.ids, actions);
        self.asked.push_back(part);
    }

    /// There are other members, or one could not end an exchange. `step` comes next.
    fn changed(&mut self, event: Event, step: u64, now: Nanos, actions: &mut Actions) {
        // By that only a process asks for something that joins.
        self.tell(event, now, actions);
        if !std::mem::replace(&mut self.has_begun, true) {
            // A process that joins begins behind an exchange of the others.
            let begins = if step == 0 { Event::Start } else { Event::Resume };
            return self.tell(begins, now, actions);
        }
        self.is_committing = false;
        self.asked.iter_mut().for_each(|part| part.begin(&mut self.ids, actions));
        if let Some((_, id)) = &mut self.leaves {
            *id = self.ids.take();
            actions.push(Action::Leave { id: *id, into: None });
        }
        if let Some(step) = self.computing {
            actions.compute(step);
        }
    }

    fn done(&mut self, id: OperationId, outcome: Outcome, now: Nanos, actions: &mut Actions) {
        if let Some((number, _)) = self.leaves.take_if(|(_, leaves)| *leaves == id) {
            return self.tell(Event::Done(number, outcome), now, actions);
        }
        if let Some(part) = self.asked.iter_mut().find(|part| part.id == id) {
            part.outcome = Some(outcome);
        }
    }

    /// All members have the result of the oldest exchange.
    fn committed(&mut self, now: Nanos, actions: &mut Actions) {
        self.is_committing = false;
        self.committed += 1;
        for _ in self.oldest() {
            let Some(Part { number, given, totals, outcome: Some(outcome), .. }) = self.asked.pop_front()
            else {
                return;
            };
            if let Given::Average { vector, piece, .. } | Given::Contribution { vector, piece, .. } = given {
                copy(Vector::Sum, vector, &piece, actions);
            }
            for (place, total) in totals {
                self.tell(Event::Totalled { place, total }, now, actions);
            }
            self.tell(Event::Done(number, outcome), now, actions);
        }
    }

    /// The parts of the oldest exchange, as a range of all.
    fn oldest(&self) -> Range<usize> {
        let is_last = |part: &Part| !matches!(part.given, Given::Numbers(_));
        0..self.asked.iter().position(is_last).map_or(0, |last| last + 1)
    }

    /// Asks for the word of the session, if the policy inside waits for that.
    fn try_commit(&mut self, actions: &mut Actions) {
        let oldest = self.oldest();
        let is_done = !oldest.is_empty() && self.asked.range(oldest).all(|part| part.outcome.is_some());
        if is_done && !self.is_committing && self.computing.is_none() {
            self.is_committing = true;
            actions.push(Action::Commit { step: self.committed });
        }
    }
}

impl Policy for Exchanges {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        match event {
            Event::Membership { step, .. } => self.changed(event, step, now, actions),
            Event::Committed => self.committed(now, actions),
            Event::Done(id, outcome) => self.done(id, outcome, now, actions),
            Event::Totalled { place, total } => {
                let is_summed =
                    |part: &&mut Part| matches!(part.given, Given::Numbers(_)) && part.outcome.is_none();
                if let Some(part) = self.asked.iter_mut().find(is_summed) {
                    part.totals.push((place, total));
                }
            }
            Event::Computed { .. } | Event::Stop => {
                self.computing = None;
                self.tell(event, now, actions);
            }
            event => self.tell(event, now, actions),
        }
        self.try_commit(actions);
    }

    fn joins_at(&self, next: u64) -> u64 {
        self.inner.joins_at(next)
    }

    fn remark(&self) -> Option<String> {
        self.inner.remark()
    }
}
