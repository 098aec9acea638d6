//! Streaming DiLoCo (Douillard et al. 2025): parameters are cut into fragments, which are exchanged
//! in turn, and the result of an exchange is applied some steps after it has begun. Fragments are
//! equal parts, or the layers of the layout.
//!
//! Of each `every` steps fragment f of F is exchanged after the (f + 1)·`every`/F-th. The average
//! of what the fragment has changed travels while `delay` more steps are computed. Then the outer
//! optimizer takes its step, and the parameters become `mix` parts their own and `1 - mix` parts
//! those of the outer optimizer.
//!
//! In a session, what all members have in common is the anchor and the velocity of the outer
//! optimizer. A process that joins begins at the anchor. It takes part in the exchanges that are
//! under way, which follow from how many count: it has changed nothing, so it gives zeros.
//!
//! **Invariants:** a fragment is exchanged every `every` steps, after the same steps on all ranks,
//! and at most one after a step. What was exchanged is applied in that order. The anchor, which the
//! outer optimizer moves, has the same bits on all ranks. After the last step what is under way is
//! applied and all fragments are exchanged once more, without mixing.

use std::ops::Range;

use pleach_transport::clock::Nanos;

use super::periodic::Outer;
use crate::compression::Compression;
use crate::layout::Layout;
use crate::policy::{Action, Actions, Event, OperationId, OperationIds, Policy, Update, Vector};
use crate::state::State;

/// How [`Scheme::Diloco`](super::Scheme::Diloco) cuts the parameters into fragments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragments {
    /// Into so many parts, at least 1, of the same length. The last one may be shorter, and those
    /// behind the parameters are left out.
    Parts(u32),
    /// Into the layers of the layout.
    Layers,
}

impl Fragments {
    /// The number of fragments. Of more parts than there are parameters some are empty.
    pub(crate) fn count(self, layout: &Layout) -> u64 {
        match self {
            Self::Parts(count) => u64::from(count.max(1)),
            Self::Layers => layout.layers().iter().filter(|layer| **layer > 0).count() as u64,
        }
    }

    /// The fragments that are not empty: all parameters, in order.
    fn pieces(self, layout: &Layout) -> Vec<Range<usize>> {
        let (parameters, mut end) = (layout.parameters(), 0);
        let mut next = |length: usize| {
            let begin = end;
            end = parameters.min(begin + length);
            begin..end
        };
        match self {
            Self::Parts(count) => {
                let longest = parameters.div_ceil(count.max(1) as usize).max(1);
                (0..parameters).step_by(longest).map(|_| next(longest)).collect()
            }
            Self::Layers => {
                layout.layers().iter().filter(|layer| **layer > 0).map(|layer| next(*layer)).collect()
            }
        }
    }
}

/// How fragments are exchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Streams {
    pub(crate) every: u64,
    pub(crate) fragments: Fragments,
    pub(crate) delay: u64,
    pub(crate) mix: f32,
}

/// A part of the parameters.
#[derive(Debug)]
struct Fragment {
    piece: Range<usize>,
    /// The steps after which it is exchanged, modulo the period.
    phase: u64,
    /// Its average, while it travels.
    travels: Option<OperationId>,
    /// The number of steps after which what was averaged is applied.
    applied_after: Option<u64>,
}

/// The policy of [`Scheme::Diloco`](super::Scheme::Diloco) with fragments, a delay or mixing.
#[derive(Debug)]
pub(crate) struct Streaming {
    streams: Streams,
    outer: Outer,
    compression: Compression,
    whole: Range<usize>,
    fragments: Vec<Fragment>,
    next_step: u64,
    /// Whether fragments whose turn it is before the next step were exchanged.
    has_exchanged: bool,
    ids: OperationIds,
    is_stopped: bool,
    /// The last exchange of all.
    last: Option<OperationId>,
    has_ended: bool,
}

impl Streaming {
    pub(crate) fn new(layout: &Layout, streams: Streams, outer: Outer, compression: Compression) -> Self {
        let (count, every) = (u128::from(streams.fragments.count(layout)), u128::from(streams.every));
        let fragment = |(number, piece): (u128, Range<usize>)| {
            let phase = ((number * every / count) % every) as u64;
            Fragment { piece, phase, travels: None, applied_after: None }
        };
        Self {
            streams,
            outer,
            compression,
            whole: 0..layout.parameters(),
            fragments: (1..).zip(streams.fragments.pieces(layout)).map(fragment).collect(),
            next_step: 0,
            has_exchanged: true,
            ids: OperationIds::default(),
            is_stopped: false,
            last: None,
            has_ended: false,
        }
    }

    /// Goes on after the steps that were made.
    fn advance(&mut self, actions: &mut Actions) {
        if self.has_ended || self.last.is_some() || !self.apply(actions) {
            return;
        }
        if self.is_stopped {
            return self.exchange_all(actions);
        }
        if !std::mem::replace(&mut self.has_exchanged, true) {
            self.exchange(actions);
            if !self.apply(actions) {
                return;
            }
        }
        actions.compute(self.next_step);
    }

    /// Applies what is due; returns whether nothing that is due travels still.
    fn apply(&mut self, actions: &mut Actions) -> bool {
        let Self { outer: Outer { learning_rate, momentum }, streams: Streams { mix, .. }, .. } = *self;
        let (next_step, is_stopped) = (self.next_step, self.is_stopped);
        let is_due = |fragment: &&mut Fragment| {
            fragment.applied_after.is_some_and(|after| after <= next_step || is_stopped)
        };
        // One by one, so that ranks agree at the same places, whenever averages come.
        while let Some(fragment) =
            self.fragments.iter_mut().filter(is_due).min_by_key(|fragment| fragment.applied_after)
        {
            if fragment.travels.is_some() {
                return false;
            }
            fragment.applied_after = None;
            let piece = fragment.piece.clone();
            let own = (Vector::Parameters, Vector::Fetched);
            if mix > 0.0 {
                actions.update(Update::Copy { from: own.0, into: own.1, piece: piece.clone() });
            }
            actions.update(Update::Outer { learning_rate, momentum, piece: piece.clone() });
            if mix > 0.0 {
                let (into, from) = own;
                actions.update(Update::Mix { into, alpha: 1.0 - mix, from, beta: mix, piece });
            }
            actions.push(Action::Agreed(Vector::Anchor));
            actions.push(Action::Exchanged);
        }
        true
    }

    /// Begins the exchange of the fragment whose turn it is.
    fn exchange(&mut self, actions: &mut Actions) {
        let phase = self.next_step % self.streams.every;
        if let Some(place) = self.fragments.iter().position(|fragment| fragment.phase == phase) {
            self.begin(place, self.next_step, actions);
        }
    }

    /// Begins the exchange of a fragment, whose turn it is after so many steps.
    fn begin(&mut self, place: usize, after: u64, actions: &mut Actions) {
        let (id, fragment) = (self.ids.take(), &mut self.fragments[place]);
        actions.update(Update::Difference { piece: fragment.piece.clone() });
        actions.average(id, Vector::Delta, fragment.piece.clone(), self.compression);
        fragment.travels = Some(id);
        fragment.applied_after = Some(after.saturating_add(self.streams.delay));
    }

    /// Begins before a step of the others, behind so many of their exchanges.
    fn join(&mut self, step: u64, exchanges: u64, actions: &mut Actions) {
        self.next_step = step;
        let (count, every) = (self.fragments.len() as u64, self.streams.every);
        for exchange in exchanges.. {
            let place = (exchange % count) as usize;
            let phase = self.fragments[place].phase;
            // A phase of 0 is the end of a period.
            let in_period = if phase == 0 { every } else { phase };
            let after = (exchange / count).saturating_mul(every).saturating_add(in_period);
            if after > step {
                break;
            }
            self.begin(place, after, actions);
        }
    }

    /// Begins the last exchange.
    fn exchange_all(&mut self, actions: &mut Actions) {
        let id = self.ids.take();
        actions.update(Update::Difference { piece: self.whole.clone() });
        actions.average(id, Vector::Delta, self.whole.clone(), self.compression);
        self.last = Some(id);
    }

    fn averaged(&mut self, id: OperationId, actions: &mut Actions) {
        if self.last == Some(id) {
            let Outer { learning_rate, momentum } = self.outer;
            actions.update(Update::Outer { learning_rate, momentum, piece: self.whole.clone() });
            actions.push(Action::Agreed(Vector::Parameters));
            (self.last, self.has_ended) = (None, true);
            return;
        }
        if let Some(fragment) = self.fragments.iter_mut().find(|fragment| fragment.travels == Some(id)) {
            fragment.travels = None;
        }
    }

    /// Whether it waits for an exchange, and computes nothing.
    fn is_waiting(&self) -> bool {
        let due = |fragment: &Fragment| fragment.applied_after.is_some_and(|after| after <= self.next_step);
        self.is_stopped || self.fragments.iter().any(due)
    }
}

impl Policy for Streaming {
    fn on(&mut self, event: Event, _now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => {
                let (from, into) = (Vector::Parameters, Vector::Anchor);
                actions.update(Update::Copy { from, into, piece: self.whole.clone() });
                actions.compute(0);
            }
            Event::Ready(_)
            | Event::Needed(_)
            | Event::Totalled { .. }
            | Event::Arrived { .. }
            | Event::Told { .. }
            | Event::Committed
            | Event::Pause => {}
            Event::Membership { step, committed, .. } => {
                if step > self.next_step {
                    self.join(step, committed, actions);
                }
            }
            Event::Resume => actions.compute(self.next_step),
            Event::Computed { step } => {
                actions.update(Update::Step);
                self.next_step = step + 1;
                self.has_exchanged = false;
                self.advance(actions);
            }
            Event::Done(id, _) => {
                let was_waiting = self.is_waiting();
                self.averaged(id, actions);
                if was_waiting {
                    self.advance(actions);
                }
            }
            Event::Stop => {
                self.is_stopped = true;
                self.advance(actions);
            }
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        // Nothing travels.
        self.fragments.iter_mut().for_each(|fragment| state.field(&mut fragment.applied_after));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ten parameters.
    fn layout() -> Layout {
        Layout::of(&[3, 1, 0, 6])
    }

    /// The fragments whose averages begin after each step, and those that are applied.
    fn exchanges(streams: Streams, steps: u64) -> Vec<(u64, usize, bool)> {
        let outer = Outer { learning_rate: 1.0, momentum: 0.0 };
        let mut policy = Streaming::new(&layout(), streams, outer, Compression::None);
        let (mut actions, mut seen) = (Actions::default(), Vec::new());
        policy.on(Event::Start, Nanos::ZERO, &mut actions);
        actions.drain().for_each(drop);
        for step in 0..steps {
            let mut events = vec![Event::Computed { step }];
            while let Some(event) = events.pop() {
                policy.on(event, Nanos::ZERO, &mut actions);
                for action in actions.drain() {
                    match action {
                        Action::Average { id, piece, .. } => {
                            seen.push((step + 1, piece.start, false));
                            events.push(Event::Done(id, crate::policy::Outcome::Averaged));
                        }
                        Action::Update(Update::Outer { piece, .. }) => {
                            seen.push((step + 1, piece.start, true));
                        }
                        _ => {}
                    }
                }
            }
        }
        seen
    }

    #[test]
    fn each_fragment_is_exchanged_once_in_a_period_and_applied_after_the_delay() {
        let streams = Streams { every: 6, fragments: Fragments::Parts(3), delay: 1, mix: 0.0 };
        let begun_and_applied = [
            (2, 0, false),
            (3, 0, true),
            (4, 4, false),
            (5, 4, true),
            (6, 8, false),
            (7, 8, true),
            (8, 0, false),
            (9, 0, true),
        ];
        assert_eq!(exchanges(streams, 9), begun_and_applied);
        let at_once = Streams { every: 4, fragments: Fragments::Parts(1), delay: 0, mix: 0.0 };
        assert_eq!(exchanges(at_once, 8), [(4, 0, false), (4, 0, true), (8, 0, false), (8, 0, true)]);
    }

    #[test]
    fn who_joins_begins_the_exchanges_that_are_under_way_and_no_others() {
        // Exchanges begin after 2, 4, 6, 8 … steps, and end 3 steps later.
        let streams = Streams { every: 6, fragments: Fragments::Parts(3), delay: 3, mix: 0.0 };
        let outer = Outer { learning_rate: 1.0, momentum: 0.0 };
        for (step, committed, begun) in
            [(5, 1, &[4][..]), (7, 2, &[8]), (8, 2, &[8, 0]), (8, 4, &[]), (9, 3, &[0])]
        {
            let mut policy = Streaming::new(&layout(), streams, outer, Compression::None);
            let mut actions = Actions::default();
            policy.on(Event::Membership { ranks: 2, step, committed }, Nanos::ZERO, &mut actions);
            let averages = |action| match action {
                Action::Average { piece, .. } => Some(piece.start),
                _ => None,
            };
            let averaged: Vec<usize> = actions.drain().filter_map(averages).collect();
            assert_eq!(averaged, begun, "step {step}, {committed} exchanges");
            policy.on(Event::Resume, Nanos::ZERO, &mut actions);
            assert!(actions.drain().eq([Action::Compute { step }]));
        }
    }

    #[test]
    fn a_fragment_of_which_there_is_nothing_is_left_out() {
        let streams = Streams { every: 20, fragments: Fragments::Parts(20), delay: 0, mix: 0.0 };
        let begun = exchanges(streams, 20).into_iter().filter(|(.., applied)| !applied).count();
        assert_eq!(begun, 10);
    }

    #[test]
    fn fragments_hold_each_parameter_once_and_none_is_empty() {
        let pieces = |fragments: Fragments| fragments.pieces(&layout());
        assert_eq!(pieces(Fragments::Parts(3)), [0..4, 4..8, 8..10]);
        assert_eq!(pieces(Fragments::Parts(u32::MAX)).len(), 10);
        assert_eq!(pieces(Fragments::Layers), [0..3, 3..4, 4..10]);
    }
}
