//! Parameter tables whose shards the ranks own, and how far apart ranks may go.
//!
//! A step is a clock. A rank trains at its copy of the table. What a step changes, divided by the
//! number of ranks, it adds to the copy and to the table. For a new copy of a shard it asks the
//! owner, who answers once the shard holds what is asked for, and reads the shard. Its question
//! goes to the owner behind its updates, so the answer holds them too.
//!
//! * *SSP* (Ho et al. 2013): in clock c with bound s it takes a new copy of each shard of which the
//!   one it has lacks a clock below c - s. Bound 0 is bulk synchronous (BSP). An owner hears of a
//!   question when its own step has ended. So a rank does not wait until its copy is too old: for
//!   some clocks before that each of its updates asks for a new copy, and if the answer is there
//!   when the step ends that is computed meanwhile, it reads the shard before it adds the next
//!   update. A copy that is read then holds all updates of this rank, as none was added since the
//!   question.
//! * *DSSP* (Zhao et al. 2019): the bound is from `low` to `high`. The quickest rank goes on for a
//!   few steps where the next push of the slowest is predicted to come sooner then. Its credits are
//!   never more than `high` allows.
//! * *BAP* (Li et al. 2016): versions are bounded, not clocks. With distance D and p ranks a rank
//!   may push d = D / (p - 1) updates that the copy of another rank lacks; then it waits until that
//!   rank has a newer copy. A rank takes one when half of that came from a rank. So ranks of
//!   unlike speed need not wait, as they do with SSP, if d updates come in a step of the slowest.
//!   One that rests takes none, and others may wait for that. So it tells them when it comes to
//!   rest that it will hold all their updates before it computes again, and takes a last copy.
//! * *ASP*: a rank asks and goes on. It takes the copy when it is there at the end of a step. An
//!   update that an owner refuses is kept, and the next one holds it: a write tells how many
//!   updates it is the sum of, so the version of a shard still counts those that it holds. Before a
//!   rank rests or ends it sends what it has kept.
//!
//! **Invariants:** a copy holds all updates of its rank; with ASP, all until it asked, but for
//! those that were refused then and sent since. With SSP and DSSP a copy in clock c holds all
//! updates of clocks up to c - s - 1, so no rank is more than s clocks ahead of the slowest. A rank
//! waits iff the slowest is further behind, but for the time that an owner takes to hear of a
//! question. An answer counts only if it is that to the last question, and this rank has added
//! nothing since it asked. With BAP an update is added to a shard that holds at most D updates of
//! others which the copy lacks by which it was computed. Owners check both. With bound 0 owners
//! show complete clocks alone, so the result has the same bits in each run.

mod bound;

use std::ops::{Range, RangeInclusive};

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;

use crate::policy::{
    Action, Actions, Event, OperationIds, Outcome, Policy, Reads, TableAction, Update, Vector,
};
use crate::scheme::finish::{Finish, Word};
use crate::shares::WindowPlan;
use crate::state::State;
use bound::{Answer, Known, Push, credits};

pub(crate) use bound::Bound;

/// How many updates a write without a bound may be the sum of. A rank that tells more lies, and
/// sums of such numbers over ranks could overflow.
const UPDATES: RangeInclusive<u64> = 1..=1 << 32;

/// What follows when a rank has a copy, or its questions are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It goes on with the next step.
    GoOn,
    /// It makes the step whose gradient it has.
    Step,
    /// All updates of this rank are in the shards, and it asks for the last copy.
    Leave,
    /// It has the last copy.
    End,
    /// It rests, with a copy that holds all updates of the steps so far.
    Rest,
}

/// What a rank does besides owning a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It computes.
    Computing,
    /// It has computed, and the last change is still being written.
    Computed,
    /// It waits until the shards of owners hold so many clocks or versions.
    Asking(u64, Then),
    /// It reads.
    Reading(Then),
    /// It waits until the copies of all ranks hold enough of its updates.
    Waiting,
    /// It answers others until the training goes on.
    Resting,
    /// It has the last copy, and answers others.
    Finishing,
    /// It has ended.
    Ended,
}

/// The policy of schemes with tables.
#[derive(Debug)]
pub(crate) struct BoundedStaleness {
    parameters: usize,
    plan: WindowPlan,
    bound: Bound,
    phase: Phase,
    is_stopped: bool,
    next_step: u64,
    ids: OperationIds,
    reading: u32,
    writing: u32,
    /// Steps that this rank may make before it waits.
    credits: u64,
    /// When the step began that is computed, and how long the last one took.
    began: Nanos,
    interval: u64,
    /// By rank.
    known: Vec<Known>,
    /// Ranks that ask, and how many clocks or versions each asks for.
    asked: Vec<(Rank, u64)>,
    /// With no bound: whether this rank has asked for a copy that it has not taken.
    has_asked: bool,
    /// Whether no step was made since this rank took a copy.
    is_fresh: bool,
    /// Whether the shard was not published as it is.
    is_changed: bool,
    /// Whether a bound did not hold.
    is_exceeded: bool,
    /// By rank: of this rank's updates those that it has refused, which the next write to it holds.
    kept: Vec<u64>,
    /// By rank: the updates in the last write to it.
    offered: Vec<u64>,
    finish: Finish,
}

impl BoundedStaleness {
    pub(crate) fn new(parameters: usize, bound: Bound, plan: WindowPlan) -> Self {
        Self {
            parameters,
            plan,
            bound,
            phase: Phase::Computing,
            is_stopped: false,
            next_step: 0,
            ids: OperationIds::default(),
            reading: 0,
            writing: 0,
            credits: 0,
            began: Nanos::ZERO,
            interval: 0,
            known: vec![Known::default(); plan.ranks as usize],
            asked: Vec::with_capacity(plan.ranks as usize),
            has_asked: false,
            is_fresh: false,
            is_changed: true,
            is_exceeded: false,
            kept: vec![0; plan.ranks as usize],
            offered: vec![0; plan.ranks as usize],
            finish: Finish::new(plan),
        }
    }

    fn whole(&self) -> Range<usize> {
        0..self.parameters
    }

    fn copy(&self, from: Vector, into: Vector, actions: &mut Actions) {
        actions.update(Update::Copy { from, into, piece: self.whole() });
    }

    fn mix(&self, into: Vector, from: Vector, beta: f32, actions: &mut Actions) {
        actions.update(Update::Mix { into, alpha: 1.0, from, beta, piece: self.whole() });
    }

    /// Complete clocks of this rank's shard.
    fn complete(&self) -> u64 {
        self.known.iter().map(|known| known.clocks).min().unwrap_or(0)
    }

    /// Updates that this rank's shard holds.
    fn version(&self) -> u64 {
        self.known.iter().fold(0, |sum: u64, known| sum.saturating_add(known.clocks))
    }

    /// The updates of all ranks, which make as many steps as this one.
    fn updates_of_all(&self) -> u64 {
        self.next_step.saturating_mul(u64::from(self.plan.ranks))
    }

    /// Those of other ranks than this one.
    fn others(&self, rank: Rank) -> u64 {
        self.version() - self.known[rank as usize].clocks
    }

    /// What is asked for, and answered with.
    fn measure(&self) -> u64 {
        if self.bound.is_of_clocks() { self.complete() } else { self.version() }
    }

    /// Whether the value of the shard has updates of clocks that are not complete.
    fn has_pending(&self) -> bool {
        !matches!(self.bound, Bound::Clocks { high: 0, .. })
    }

    /// Makes the step, and sends what it changes.
    fn step(&mut self, now: Nanos, actions: &mut Actions) {
        self.copy(Vector::Parameters, Vector::Anchor, actions);
        actions.update(Update::Step);
        self.copy(Vector::Parameters, Vector::Delta, actions);
        self.mix(Vector::Delta, Vector::Anchor, -1.0, actions);
        let factor = 1.0 / self.plan.ranks as f32;
        actions.update(Update::Scale { vector: Vector::Delta, factor, piece: self.whole() });
        self.copy(Vector::Anchor, Vector::Parameters, actions);
        self.mix(Vector::Parameters, Vector::Delta, 1.0, actions);
        self.add((self.plan.rank, 1), self.interval, Vector::Delta, now, actions);
        self.answer(actions);
        for to in self.plan.peers() {
            let push = Push::new(self.interval, self.question(to));
            if self.bound == Bound::None {
                let updates = self.merge_kept(to, actions);
                self.write(to, Vector::Delta, updates, false, actions);
            } else {
                self.write(to, Vector::Delta, push.encode(self.next_step), true, actions);
            }
            if self.bound.is_of_clocks() {
                // Answers to what was asked before this update may lack it.
                self.known[to as usize].outdate();
            }
            if push.asks().is_some() {
                self.known[to as usize].ask();
            }
        }
        self.next_step += 1;
        self.is_fresh = false;
        self.go_on(now, actions);
    }

    fn write(&mut self, to: Rank, from: Vector, word: u64, waits: bool, actions: &mut Actions) {
        let id = self.ids.take();
        actions.push(Action::Write { id, to, from, word, waits });
        self.writing += 1;
        self.finish.sent(to);
    }

    /// Adds the updates that an owner has refused to the one that it is sent now; returns how many
    /// it is the sum of.
    fn merge_kept(&mut self, to: Rank, actions: &mut Actions) -> u64 {
        let kept = std::mem::take(&mut self.kept[to as usize]);
        self.offered[to as usize] = kept + 1;
        if kept > 0 {
            let (into, from) = (Vector::Delta, Vector::Residual);
            let piece = self.plan.share(to, self.parameters);
            actions.update(Update::Mix { into, alpha: 1.0, from, beta: 1.0, piece });
        }
        kept + 1
    }

    /// Keeps the updates that an owner has refused.
    fn refused(&mut self, by: Rank, actions: &mut Actions) {
        self.finish.refused(by);
        self.kept[by as usize] = self.offered[by as usize];
        let piece = self.plan.share(by, self.parameters);
        actions.update(Update::Copy { from: Vector::Delta, into: Vector::Residual, piece });
    }

    /// Adds the updates that were refused to a copy that was read: its owner does not hold them.
    fn add_kept(&mut self, actions: &mut Actions) {
        for owner in self.plan.peers().filter(|owner| self.kept[*owner as usize] > 0) {
            let (into, from) = (Vector::Parameters, Vector::Residual);
            let piece = self.plan.share(owner, self.parameters);
            actions.update(Update::Mix { into, alpha: 1.0, from, beta: 1.0, piece });
        }
    }

    /// Sends the updates that were refused.
    fn send_kept(&mut self, actions: &mut Actions) {
        for to in self.plan.peers() {
            let kept = std::mem::take(&mut self.kept[to as usize]);
            if kept > 0 {
                self.write(to, Vector::Residual, kept, true, actions);
            }
        }
    }

    fn compute(&mut self, now: Nanos, actions: &mut Actions) {
        self.phase = Phase::Computing;
        self.began = now;
        actions.compute(self.next_step);
    }

    /// For how many clocks an owner is asked with the next update, if the copy of its shard is, or
    /// soon will be, too old.
    fn question(&self, owner: Rank) -> Option<u64> {
        let Bound::Clocks { low, .. } = self.bound else { return None };
        let (next, copied) = (self.next_step + 1, self.known[owner as usize].copied);
        let needed = |step: u64| step.saturating_sub(low);
        if copied < needed(next) {
            return Some(needed(next));
        }
        // With a bound of 0 a step needs the update of the one before, which the owner cannot have.
        let is_soon = low > 0 && copied < needed(next + 1 + Bound::clocks_ahead(low));
        is_soon.then(|| needed(next + 1).max(copied + 1))
    }

    /// Complete clocks in the copies of all shards.
    fn copied(&self) -> u64 {
        self.known.iter().map(|known| known.copied).min().unwrap_or(0)
    }

    /// Begins the next step, if the bound allows it.
    fn go_on(&mut self, now: Nanos, actions: &mut Actions) {
        match self.bound {
            Bound::Clocks { low, high } => {
                let (needed, copied) = (self.next_step.saturating_sub(low), self.copied());
                if copied >= needed {
                    return self.compute(now, actions);
                }
                if self.credits == 0 {
                    let ahead = copied.saturating_add(high).saturating_add(1);
                    let most = ahead.saturating_sub(self.next_step);
                    self.credits = self.credits(now, needed, most);
                }
                if self.credits == 0 {
                    // The last update has asked for it.
                    self.phase = Phase::Asking(needed, Then::GoOn);
                    return;
                }
                self.credits -= 1;
            }
            Bound::Versions { distance } => {
                let most = Bound::of_a_rank(distance, self.plan.ranks);
                let mut peers = self.plan.peers().map(|peer| &self.known[peer as usize]);
                let is_old =
                    peers.any(|peer| peer.clocks.saturating_sub(peer.asked_with) >= most.div_ceil(2));
                let waits = self.without_my_updates(most).is_some();
                // With a new copy a rank makes a step first: quick ranks may not keep it from that.
                if is_old && (waits || !self.is_fresh) {
                    return self.refresh(Then::GoOn, actions);
                }
                if waits {
                    self.phase = Phase::Waiting;
                    return;
                }
            }
            Bound::None if !self.has_asked => {
                self.has_asked = true;
                self.tell_question(0, actions);
            }
            Bound::None => {}
        }
        self.compute(now, actions);
    }

    /// How many steps are made before the slowest rank is waited for.
    fn credits(&self, now: Nanos, needed: u64, most: u64) -> u64 {
        let Some(slowest) = self.known.iter().min_by_key(|known| known.clocks) else { return 0 };
        let is_quickest = self.known.iter().all(|known| known.clocks <= self.next_step);
        // If all have come so far, the copy is old, and owners need not be waited for.
        if slowest.clocks >= needed || !is_quickest { 0 } else { credits(now, self.interval, slowest, most) }
    }

    /// A rank whose copy would lack more than so many updates of this rank after its next one.
    fn without_my_updates(&self, most: u64) -> Option<Rank> {
        self.plan
            .peers()
            .find(|peer| self.next_step + 1 > self.known[*peer as usize].holds.saturating_add(most))
    }

    /// Adds an update of a rank to this rank's shard, or the sum of several.
    fn add(
        &mut self,
        (rank, updates): (Rank, u64),
        interval: u64,
        from: Vector,
        now: Nanos,
        actions: &mut Actions,
    ) {
        actions.push(Action::Table(TableAction::Add { rank, from }));
        let Known { clocks, others_answered, .. } = self.known[rank as usize];
        self.is_exceeded |= match self.bound {
            Bound::Clocks { high, .. } => clocks > self.complete().saturating_add(high),
            Bound::Versions { distance } => self.others(rank).saturating_sub(others_answered) > distance,
            Bound::None => false,
        };
        let known = &mut self.known[rank as usize];
        (known.clocks, known.came, known.interval) = (clocks.saturating_add(updates), now, interval);
        self.is_changed = true;
    }

    /// Answers the ranks that ask for no more than the shard holds, in the order of the questions.
    fn answer(&mut self, actions: &mut Actions) {
        let held = self.measure();
        let is_any_ready = self.asked.iter().any(|(_, needed)| *needed <= held);
        if is_any_ready && std::mem::take(&mut self.is_changed) {
            let with_pending = self.has_pending();
            actions.push(Action::Table(TableAction::Read { into: Vector::Centre, with_pending }));
            actions.push(Action::Publish { vector: Vector::Centre, word: held });
        }
        let mut asked = std::mem::take(&mut self.asked);
        asked.retain(|&(rank, needed)| {
            let is_ready = needed <= held;
            if is_ready {
                self.known[rank as usize].others_answered = self.others(rank);
                let question = self.known[rank as usize].heard;
                Word::Result(Answer::new(held, question).encode()).tell(rank, actions);
            }
            !is_ready
        });
        self.asked = asked;
    }

    /// A rank asks for so many clocks or versions, in place of what it has asked for before.
    fn hear(&mut self, from: Rank, needed: u64) {
        self.known[from as usize].heard += 1;
        self.asked.retain(|(rank, _)| *rank != from);
        self.asked.push((from, needed));
    }

    /// Asks all owners for so many clocks or versions, and waits.
    fn ask(&mut self, needed: u64, then: Then, actions: &mut Actions) {
        self.phase = Phase::Asking(needed, then);
        self.tell_question(needed, actions);
    }

    fn tell_question(&mut self, needed: u64, actions: &mut Actions) {
        for owner in self.plan.peers() {
            self.known[owner as usize].ask();
            Word::Round(needed).tell(owner, actions);
        }
    }

    /// With BAP: takes a copy that holds all updates that this rank knows of.
    fn refresh(&mut self, then: Then, actions: &mut Actions) {
        self.known.iter_mut().for_each(|known| known.asked_with = known.clocks);
        self.ask(self.version(), then, actions);
    }

    /// All owners have answered. They hold all updates of this rank, so with BAP others may push
    /// as many more as this rank's next copy may lack.
    fn answered(&mut self, then: Then, actions: &mut Actions) {
        // A rank that rests has told them before it asked.
        if matches!(self.bound, Bound::Versions { .. }) && then != Then::Rest {
            for peer in self.plan.peers() {
                let held = if self.is_stopped { Word::MOST } else { self.known[peer as usize].asked_with };
                Word::Held(held).tell(peer, actions);
            }
        }
        if then == Then::Leave {
            return self.ask(self.updates_of_all(), Then::End, actions);
        }
        self.read(then, actions);
    }

    /// Reads the shards of all owners that have answered, and this rank's own.
    fn read(&mut self, then: Then, actions: &mut Actions) {
        self.phase = Phase::Reading(then);
        for from in self.plan.peers() {
            let Some(held) = self.known[from as usize].answer.take() else { continue };
            self.known[from as usize].copied = held;
            let id = self.ids.take();
            actions.push(Action::Read { id, from, into: Vector::Parameters, reads: Reads::Consistent });
            self.reading += 1;
        }
        let (others, held) = (self.others(self.plan.rank), self.measure());
        let own = &mut self.known[self.plan.rank as usize];
        (own.others_answered, own.copied) = (others, held);
        let with_pending = self.has_pending();
        actions.push(Action::Table(TableAction::Read { into: Vector::Parameters, with_pending }));
    }

    /// Goes on where this rank waits for others.
    fn advance(&mut self, now: Nanos, actions: &mut Actions) {
        while self.advance_once(now, actions) {}
        if let Some(from) = self.missing() {
            actions.push(Action::Await { from });
        }
    }

    /// Returns whether it did.
    fn advance_once(&mut self, now: Nanos, actions: &mut Actions) -> bool {
        match self.phase {
            Phase::Computed if self.writing == 0 => {
                if self.has_answers() {
                    self.has_asked = false;
                    self.read(Then::Step, actions);
                } else {
                    self.step(now, actions);
                }
            }
            Phase::Asking(_, then) if self.missing().is_none() => self.answered(then, actions),
            Phase::Reading(then) if self.reading == 0 => {
                self.add_kept(actions);
                actions.push(Action::Exchanged);
                self.is_fresh = true;
                match then {
                    Then::Step => self.step(now, actions),
                    Then::GoOn | Then::Leave => self.go_on(now, actions),
                    Then::Rest => self.phase = Phase::Resting,
                    Then::End => {
                        self.phase = Phase::Finishing;
                        self.finish.begin(actions);
                    }
                }
            }
            Phase::Waiting => {
                self.go_on(now, actions);
                return self.phase != Phase::Waiting;
            }
            Phase::Finishing if self.missing().is_none() => {
                self.phase = Phase::Ended;
                actions.push(Action::Conserved(!self.is_exceeded && self.finish.has_all()));
                actions.push(Action::Agreed(Vector::Parameters));
            }
            _ => return false,
        }
        true
    }

    /// Whether a rank that has computed a gradient reads before it makes the step.
    fn has_answers(&self) -> bool {
        match self.bound {
            Bound::Clocks { .. } => self.plan.peers().any(|peer| self.known[peer as usize].answer.is_some()),
            Bound::Versions { .. } => false,
            Bound::None => self.has_asked && self.unanswered(0).is_none(),
        }
    }

    /// An owner that has not answered that it holds so much. With clocks, only if the copy of its
    /// shard holds less.
    fn unanswered(&self, needed: u64) -> Option<Rank> {
        let is_of_clocks = self.bound.is_of_clocks();
        let lacks = |known: &Known| !is_of_clocks || known.copied < needed;
        self.plan.peers().find(|peer| {
            let known = &self.known[*peer as usize];
            lacks(known) && known.answer.is_none_or(|held| held < needed)
        })
    }

    /// A rank for whose word or update this one waits.
    fn missing(&self) -> Option<Rank> {
        match self.phase {
            Phase::Asking(needed, _) => {
                let slowest = || self.plan.peers().min_by_key(|peer| self.known[*peer as usize].clocks);
                let slow = || if self.measure() < needed { slowest() } else { None };
                self.unanswered(needed).or_else(slow)
            }
            Phase::Waiting => {
                let Bound::Versions { distance } = self.bound else { return None };
                self.without_my_updates(Bound::of_a_rank(distance, self.plan.ranks))
            }
            Phase::Finishing => self.finish.missing(),
            Phase::Computing | Phase::Computed | Phase::Reading(_) | Phase::Resting | Phase::Ended => None,
        }
    }

    /// Returns whether a rank sends this word now.
    fn told(&mut self, from: Rank, word: u64, actions: &mut Actions) -> bool {
        let has_told = self.finish.has_told(from);
        match Word::decode(word) {
            Word::Round(needed) if !has_told => {
                self.hear(from, needed);
                self.answer(actions);
                true
            }
            Word::Result(number) => {
                let answer = Answer::decode(number);
                self.known[from as usize].answered(answer);
                // A clock is complete when the update of this rank is there, too.
                !self.bound.is_of_clocks() || answer.held() <= self.next_step
            }
            Word::Held(clocks) => {
                self.known[from as usize].holds = clocks;
                matches!(self.bound, Bound::Versions { .. }) && !has_told
            }
            Word::Finished(sent) => self.finish.told(from, sent),
            Word::Round(_) => false,
        }
    }

    /// Comes to rest: all ranks have made, or will make, as many steps. With a bound of clocks they
    /// wait for no more of this one than its answers.
    fn rest(&mut self, actions: &mut Actions) {
        if self.bound.is_of_clocks() {
            return;
        }
        if let Bound::Versions { .. } = self.bound {
            for peer in self.plan.peers() {
                self.known[peer as usize].asked_with = self.next_step;
                Word::Held(self.next_step).tell(peer, actions);
            }
        }
        self.send_kept(actions);
        self.has_asked = false;
        self.ask(self.updates_of_all(), Then::Rest, actions);
    }

    /// After the last step: takes the last copy, which holds all updates of all ranks.
    fn stop(&mut self, actions: &mut Actions) {
        self.is_stopped = true;
        match self.bound {
            Bound::Clocks { .. } => self.ask(self.next_step, Then::End, actions),
            Bound::Versions { .. } => self.refresh(Then::Leave, actions),
            Bound::None => {
                self.send_kept(actions);
                self.ask(self.updates_of_all(), Then::End, actions);
            }
        }
    }
}

impl Policy for BoundedStaleness {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        match event {
            Event::Start => {
                // Without a bound of clocks ranks may be any number of them apart.
                let is_ordered = self.bound.is_of_clocks();
                actions.push(Action::Table(TableAction::Begin { from: Vector::Parameters, is_ordered }));
                self.compute(now, actions);
            }
            Event::Ready(_) | Event::Needed(_) | Event::Totalled { .. } => {}
            Event::Committed | Event::Membership { .. } => {}
            Event::Pause => self.rest(actions),
            Event::Resume => {
                // What was asked before is answered, and is not read any more.
                self.known.iter_mut().for_each(Known::outdate);
                self.is_changed = true;
                self.compute(now, actions);
            }
            Event::Computed { .. } => {
                self.interval = u64::try_from(now.since(self.began).as_nanos()).unwrap_or(u64::MAX);
                self.phase = Phase::Computed;
            }
            Event::Done(_, outcome @ (Outcome::Written | Outcome::Refused { .. })) => {
                if let Outcome::Refused { by } = outcome {
                    self.refused(by, actions);
                }
                self.writing -= 1;
            }
            Event::Done(..) => self.reading -= 1,
            Event::Arrived { from, word } => {
                if !self.finish.came(from) || (self.bound == Bound::None && !UPDATES.contains(&word)) {
                    return actions.push(Action::Refuse { from, word });
                }
                if self.bound == Bound::None {
                    self.add((from, word), 0, Vector::Arrival, now, actions);
                } else {
                    let push = Push::decode(word, self.known[from as usize].clocks);
                    self.add((from, 1), push.interval(), Vector::Arrival, now, actions);
                    if let Some(needed) = push.asks() {
                        self.hear(from, needed);
                    }
                }
                self.answer(actions);
            }
            Event::Told { from, word } => {
                if !self.told(from, word, actions) {
                    return actions.push(Action::Refuse { from, word });
                }
            }
            Event::Stop => self.stop(actions),
        }
        self.advance(now, actions);
    }

    fn state(&mut self, state: &mut State<'_>) {
        state.field(&mut self.next_step);
        state.field(&mut self.ids);
        state.field(&mut self.credits);
        state.field(&mut self.interval);
        state.field(&mut self.known);
        state.field(&mut self.is_exceeded);
        state.field(&mut self.finish);
    }
}
