//! Elastic averaging along the lines of a grid (BIDMach; Peng, UCB/EECS-2018-77).
//!
//! After its steps a rank meets the ranks of its line in one dimension, the dimensions in turn:
//! `w ← (1 - a)w + a·average`. A round opens when a share of the line is there, so a slow rank
//! holds nobody up; what it gives too late is dropped, and it takes the newest round's average.
//!
//! In a session all members make as many steps, and lines are those of as many members as there
//! are.
//!
//! **Invariants:** no operation before the end has more ranks than the side of the grid. At the end
//! the parameters of all ranks are averaged. In its exchange number k of a dimension a rank waits
//! for no round above k. So ranks never wait for each other in a circle: of all ranks that wait
//! consider the one with the fewest exchanges. The other ranks of its line have as many at least,
//! so each of them is ready for the same round, or that round has opened. Nobody waits for a rank
//! that was left out often either. A rank that was late, waits for the round after the newest one,
//! and is waited for in another line, would close such a circle.

use pleach_collectives::RankSpace;
use pleach_transport::clock::Nanos;

use crate::policy::{Action, Actions, Event, OperationIds, Outcome, Policy, Update, Vector};
use crate::state::State;

/// The policy of [`Scheme::Bidmach`](super::Scheme::Bidmach).
#[derive(Debug)]
pub(crate) struct Grid {
    parameters: usize,
    every: u64,
    rate: f32,
    side: u32,
    /// By dimension: the ranks of this rank's line.
    lengths: Vec<usize>,
    next_step: u64,
    /// Exchanges before the lines were made, whose rounds count from 0.
    exchanges_before: u64,
    ids: OperationIds,
    /// Whether it comes to rest before a checkpoint.
    is_paused: bool,
    is_exceeded: bool,
}

impl Grid {
    pub(crate) fn new(parameters: usize, every: u64, rate: f32, side: u32, lengths: Vec<usize>) -> Self {
        Self {
            parameters,
            every,
            rate,
            side,
            lengths,
            next_step: 0,
            exchanges_before: 0,
            ids: OperationIds::default(),
            is_paused: false,
            is_exceeded: false,
        }
    }

    /// Of so many exchanges from the first on, those of a dimension.
    fn in_dimension(&self, exchanges: u64, dimension: usize) -> u64 {
        let dimensions = self.lengths.len();
        (exchanges + (dimensions - 1 - dimension) as u64) / dimensions as u64
    }

    fn computed(&mut self, actions: &mut Actions) {
        actions.update(Update::Step);
        self.next_step += 1;
        if self.next_step.is_multiple_of(self.every) {
            let exchange = self.next_step / self.every - 1;
            let line = (exchange % self.lengths.len() as u64) as usize;
            if self.lengths[line] > 1 {
                let (from, into, piece) = (Vector::Parameters, Vector::Fetched, 0..self.parameters);
                actions.update(Update::Copy { from, into, piece });
                let (id, vector) = (self.ids.take(), Vector::Fetched);
                let [before, so_far] =
                    [self.exchanges_before, exchange].map(|count| self.in_dimension(count, line));
                let limit = so_far - before;
                return actions.push(Action::Contribute { id, line, vector, limit });
            }
        }
        actions.compute(self.next_step);
    }

    fn combined(&mut self, contributors: u32, actions: &mut Actions) {
        self.is_exceeded |= contributors > self.side;
        if contributors == 0 {
            // It is behind the ranks of this line, and goes on to catch up with them.
            return actions.compute(self.next_step);
        }
        let (into, from, piece) = (Vector::Parameters, Vector::Fetched, 0..self.parameters);
        actions.update(Update::Mix { into, alpha: 1.0 - self.rate, from, beta: self.rate, piece });
        actions.push(Action::Exchanged);
        actions.compute(self.next_step);
    }
}

impl Policy for Grid {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => actions.compute(0),
            Event::Ready(_)
            | Event::Needed(_)
            | Event::Totalled { .. }
            | Event::Arrived { .. }
            | Event::Told { .. }
            | Event::Committed => {}
            Event::Membership { ranks, step, .. } => {
                let grid = RankSpace::balanced(ranks, self.lengths.len() as u32);
                self.side = grid.extents().iter().copied().max().unwrap_or(1);
                self.next_step = step;
            }
            // What is late is dropped, so nothing is carried.
            Event::Pause => {
                self.is_paused = true;
                actions.push(Action::Leave { id: self.ids.take(), into: None });
            }
            Event::Resume => {
                self.is_paused = false;
                self.exchanges_before = self.next_step / self.every;
                actions.compute(self.next_step);
            }
            Event::Computed { .. } => self.computed(actions),
            Event::Done(_, Outcome::Combined { contributors }) => self.combined(contributors, actions),
            Event::Done(_, Outcome::Left { .. }) if self.is_paused => {}
            Event::Done(_, Outcome::Left { .. }) => {
                let (id, vector) = (self.ids.take(), Vector::Parameters);
                actions.push(Action::Average { id, vector, piece: 0..self.parameters });
            }
            Event::Done(..) => {
                actions.push(Action::Conserved(!self.is_exceeded));
                actions.push(Action::Agreed(Vector::Parameters));
            }
            Event::Stop => actions.push(Action::Leave { id: self.ids.take(), into: None }),
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        state.field(&mut self.is_exceeded);
    }
}
