//! Synchronous SGD: each step is made by the average of all ranks' gradients.
//!
//! Buckets are averaged in pieces of at most [`PIECE_BYTES`](super::PIECE_BYTES), of which at most
//! [`UNDER_WAY_BYTES`] are under way. All ranks must start operations in one order, so all follow
//! one list of pieces: first come, first served, or planned (see [`super::planning`]).
//!
//! The policy has two forms. *As a whole*: the step is made when the averages of all pieces are
//! there, and then the next one is computed. *By bucket*: the next step is begun at once, and
//! computing gets each bucket as soon as its parameters have made their step.
//!
//! In a session the step is made when all members have the averages, by the session's word. When
//! members change, the same step begins anew on those that there are.
//!
//! **Invariants:** pieces start in the order of the list on each rank, whatever the order in which
//! buckets become ready. Each element makes one step for each gradient, when its average is there.
//! The list changes before the same step on all ranks.

use std::collections::VecDeque;
use std::ops::Range;

use pleach_transport::clock::Nanos;

use super::planning::{Piece, Planning, Profile, first_come};
use crate::compression::Compression;
use crate::layout::Bucket;
use crate::parallelize::OrderRule;
use crate::policy::{Action, Actions, Event, OperationId, OperationIds, Outcome, Policy, Update, Vector};
use crate::state::State;

/// Most bytes of gradients that are averaged at once: enough for a network to be busy while the
/// program computes between two buckets, as operations are started there alone.
pub(crate) const UNDER_WAY_BYTES: usize = 16 << 20;

/// A piece whose average is under way.
#[derive(Debug)]
struct UnderWay {
    id: OperationId,
    /// Of the list.
    place: usize,
    since: Nanos,
}

/// The policy of [`Scheme::Sync`](super::Scheme::Sync).
#[derive(Debug)]
pub(crate) struct Synchronous {
    buckets: Vec<Range<usize>>,
    compression: Compression,
    is_by_bucket: bool,
    /// Whether a step is made by the word of a session alone.
    commits: bool,
    /// In the order in which all ranks average them.
    list: Vec<Piece>,
    profile: Profile,
    /// `None`: first come, first served.
    planning: Option<Planning>,
    ids: OperationIds,
    /// The step whose gradients are averaged.
    step: u64,
    /// The step that is computed next.
    next_step: u64,
    /// By bucket: whether its gradient is ready in this step.
    is_ready: Vec<bool>,
    /// By bucket: pieces whose average is not there.
    missing: Vec<usize>,
    /// By bucket, of the step that was begun: whether computing has it.
    is_supplied: Vec<bool>,
    /// The pieces of the list that were started in this step.
    started: usize,
    under_way: VecDeque<UnderWay>,
    bytes_under_way: usize,
    /// Whether the gradient of the step is complete.
    is_computed: bool,
    /// Whether the word of the session is awaited.
    is_committing: bool,
    /// Whether no step is begun: before a checkpoint, and at the end.
    is_held: bool,
}

impl Synchronous {
    /// For these buckets, on so many ranks.
    pub(crate) fn new(
        buckets: Vec<Range<usize>>,
        ranks: u32,
        order: OrderRule,
        compression: Compression,
        is_by_bucket: bool,
        commits: bool,
    ) -> Self {
        let list = first_come(&buckets);
        let count = buckets.len();
        let is_planned = order == OrderRule::Planned && list.len() > 1;
        let mut policy = Self {
            profile: Profile::new(count, is_by_bucket),
            planning: is_planned.then(|| Planning::new(buckets.clone(), ranks)),
            buckets,
            compression,
            is_by_bucket,
            commits,
            list,
            ids: OperationIds::default(),
            step: 0,
            next_step: 0,
            is_ready: vec![false; count],
            missing: vec![0; count],
            is_supplied: vec![false; count],
            started: 0,
            under_way: VecDeque::new(),
            bytes_under_way: 0,
            is_computed: false,
            is_committing: false,
            is_held: false,
        };
        policy.count_missing();
        policy
    }

    /// Goes on with a step of which nothing was applied, on so many ranks.
    fn repeat(&mut self, ranks: u32, step: u64) {
        self.next_step = step;
        self.under_way.clear();
        (self.bytes_under_way, self.is_committing) = (0, false);
        if self.planning.is_some() {
            self.planning = Some(Planning::new(self.buckets.clone(), ranks));
        }
        self.begin_anew();
    }

    /// Goes on after a checkpoint, perhaps by another clock: all ranks measure anew.
    fn begin_anew(&mut self) {
        self.is_held = false;
        self.step = self.next_step;
        self.is_ready.fill(false);
        (self.started, self.is_computed) = (0, false);
        self.list = first_come(&self.buckets);
        self.count_missing();
        self.profile = Profile::new(self.buckets.len(), self.is_by_bucket);
        if let Some(planning) = &mut self.planning {
            planning.begin_anew();
        }
    }

    fn count_missing(&mut self) {
        self.missing.fill(0);
        for piece in &self.list {
            self.missing[piece.bucket] += 1;
        }
    }

    /// Asks for the next step, whose buckets are all settled.
    fn go_on(&mut self, now: Nanos, actions: &mut Actions) {
        if self.is_by_bucket {
            self.begin(actions);
            (0..self.buckets.len()).for_each(|bucket| self.supply(bucket, now, actions));
        } else {
            actions.compute(self.next_step);
        }
    }

    fn begin(&mut self, actions: &mut Actions) {
        self.is_supplied.fill(false);
        actions.push(Action::Begin { step: self.next_step });
    }

    fn supply(&mut self, bucket: Bucket, now: Nanos, actions: &mut Actions) {
        if self.is_by_bucket && !self.is_held {
            self.is_supplied[bucket] = true;
            self.profile.supplied(bucket, now);
            actions.push(Action::Supply { bucket });
        }
    }

    /// Starts the pieces whose turn it is, as many as may be under way.
    fn start(&mut self, now: Nanos, actions: &mut Actions) {
        while let Some(piece) = self.list.get(self.started) {
            let bytes = size_of::<f32>() * piece.elements.len();
            let has_room = self.bytes_under_way == 0 || self.bytes_under_way + bytes <= UNDER_WAY_BYTES;
            let is_held = self.planning.as_ref().is_some_and(|planning| planning.holds(self.step));
            if !self.is_ready[piece.bucket] || !has_room || is_held {
                return;
            }
            let id = self.ids.take();
            actions.average(id, Vector::Gradient, piece.elements.clone(), self.compression);
            self.under_way.push_back(UnderWay { id, place: self.started, since: now });
            self.bytes_under_way += bytes;
            self.started += 1;
        }
        // Behind all pieces of the step on each rank.
        if self.is_computed
            && let Some(planning) = &mut self.planning
            && let Some(numbers) = planning.numbers(self.step, &mut self.profile)
        {
            let id = self.ids.take();
            planning.asked(id);
            actions.push(Action::Total { id, numbers });
        }
    }

    fn computed(&mut self, now: Nanos, actions: &mut Actions) {
        self.is_computed = true;
        self.next_step += 1;
        self.profile.computed(now);
        self.start(now, actions);
        if self.is_by_bucket {
            self.begin(actions);
            for bucket in (0..self.buckets.len()).rev() {
                self.settle(bucket, now, actions);
            }
        }
        self.end_step(now, actions);
    }

    fn averaged(&mut self, id: OperationId, now: Nanos, actions: &mut Actions) {
        let Some(at) = self.under_way.iter().position(|under_way| under_way.id == id) else { return };
        let Some(UnderWay { place, since, .. }) = self.under_way.remove(at) else { return };
        let (bucket, bytes) = (self.list[place].bucket, size_of::<f32>() * self.list[place].elements.len());
        self.profile.averaged(bytes, since, now);
        self.bytes_under_way -= bytes;
        self.missing[bucket] -= 1;
        self.start(now, actions);
        if self.is_computed && self.is_by_bucket {
            self.settle(bucket, now, actions);
        }
        self.end_step(now, actions);
    }

    /// Lets a bucket make its step, if its average is there, and computing go on with it.
    fn settle(&mut self, bucket: Bucket, now: Nanos, actions: &mut Actions) {
        if self.missing[bucket] == 0 {
            actions.update(Update::StepPiece { piece: self.buckets[bucket].clone() });
            self.supply(bucket, now, actions);
        }
    }

    /// Ends the step if everything of it is there.
    fn end_step(&mut self, now: Nanos, actions: &mut Actions) {
        if !self.is_computed || self.is_committing || self.missing.iter().any(|missing| *missing > 0) {
            return;
        }
        if self.commits {
            self.is_committing = true;
            actions.push(Action::Commit { step: self.step });
        } else {
            self.apply(now, actions);
        }
    }

    /// Makes the step.
    fn apply(&mut self, now: Nanos, actions: &mut Actions) {
        if !self.is_by_bucket {
            actions.update(Update::Step);
        }
        actions.push(Action::Agreed(Vector::Parameters));
        self.is_ready.fill(false);
        (self.started, self.is_computed) = (0, false);
        self.step += 1;
        self.take_list();
        self.count_missing();
        if !self.is_by_bucket {
            self.go_on(now, actions);
        }
    }

    /// Takes a new list, if it is time.
    fn take_list(&mut self) {
        if self.started == 0
            && let Some(list) = self.planning.as_mut().and_then(|planning| planning.take_list(self.step))
        {
            self.list = list;
            self.count_missing();
        }
    }

    fn totalled(&mut self, id: OperationId, now: Nanos, actions: &mut Actions) {
        if let Some(planning) = &mut self.planning {
            if !planning.done(id, &self.list) {
                actions.push(Action::Conserved(false));
            }
            self.take_list();
            self.start(now, actions);
        }
    }
}

impl Policy for Synchronous {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => self.go_on(now, actions),
            Event::Resume => {
                self.begin_anew();
                self.go_on(now, actions);
            }
            Event::Committed => {
                self.is_committing = false;
                self.apply(now, actions);
            }
            Event::Membership { ranks, step, .. } => {
                self.repeat(ranks, step);
                self.go_on(now, actions);
            }
            Event::Needed(bucket) => self.profile.needed(bucket, now, self.is_supplied.get(bucket)),
            Event::Ready(bucket) => {
                self.profile.ready(bucket, now);
                self.is_ready[bucket] = true;
                self.start(now, actions);
            }
            Event::Computed { .. } => self.computed(now, actions),
            Event::Done(id, Outcome::Totalled) => self.totalled(id, now, actions),
            Event::Done(id, _) => self.averaged(id, now, actions),
            Event::Totalled { place, total } => {
                if let Some(planning) = &mut self.planning {
                    planning.totalled(place, total);
                }
            }
            // Pieces under way make their step, and nobody computes with them.
            Event::Pause | Event::Stop => self.is_held = true,
            Event::Arrived { .. } | Event::Told { .. } => {}
        }
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
    }
}
