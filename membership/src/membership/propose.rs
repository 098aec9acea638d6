//! When a member proposes, and whom. Times are eighths of the time until suspicion.

use std::collections::BTreeSet;
use std::time::Duration;

use pleach_transport::Nanos;

use super::Membership;
use crate::message::Message;
use crate::output::Output;
use crate::plan::{self, Plan};
use crate::{Process, Record, Seat};

/// How long the roll is called.
const ROLL_CALL: usize = 2;
/// How long an asked member may take to answer.
const ANSWER: usize = 4;
/// By how much each member waits longer than the one before.
const STAGGER: usize = 2;
/// How much longer waits who is to go, who can propose less than half, and who was overtaken.
const LONGER: usize = 8;

/// What a member has tried in this epoch, and since when. Times are those of its own clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attempts {
    /// Since a suspicion, a death or another member's ballot is known.
    alarm: Option<Nanos>,
    /// Since members do not reach each other.
    broken: Option<Nanos>,
    /// Since a change is needed.
    needed: Option<Nanos>,
    /// Since the last ballot of this member.
    asked: Option<Nanos>,
    /// Since it has promised a ballot.
    frozen: Option<Nanos>,
    /// Since the epoch is being entered.
    entering: Option<Nanos>,
    /// Since no unit is whole.
    lost: Option<Nanos>,
    /// Whether this member begins no step.
    begins_no_step: bool,
    has_called: bool,
    said_no_quorum: bool,
}

impl Attempts {
    /// This member begins no step in this epoch.
    pub(crate) fn begin_no_step(&mut self) {
        self.begins_no_step = true;
    }

    /// Whether no unit has been whole for so long.
    pub(crate) fn has_lost_every_unit(&self, clock: Nanos, limit: Duration) -> bool {
        self.lost.is_some_and(|lost| clock.since(lost) >= limit)
    }

    /// Whether others should hear of everything often.
    pub(crate) fn is_restless(&self) -> bool {
        self.alarm.is_some() || self.entering.is_some()
    }
}

/// The time since which something holds.
fn since(holds: bool, before: Option<Nanos>, clock: Nanos) -> Option<Nanos> {
    if holds { before.or(Some(clock)) } else { None }
}

impl Membership {
    /// Calls the roll, proposes and decides, where it is time to.
    pub(crate) fn propose(&mut self) {
        let Some(record) = self.participant.epoch().cloned() else { return };
        let clock = self.detector.clock();
        let is_frozen = self.participant.is_frozen();
        let has_broken = !plan::broken_pairs(&record, &self.views, &self.participant).is_empty();
        let has_dead = record.members().iter().any(|member| self.participant.is_certified(*member));
        let attempts = &mut self.attempts;
        attempts.frozen = since(is_frozen, attempts.frozen, clock);
        attempts.alarm = since(has_broken || has_dead || is_frozen, attempts.alarm, clock);
        attempts.broken = since(has_broken, attempts.broken, clock);
        self.suspect_who_does_not_drain(clock);
        self.call_the_roll(record.members());
        // When a process has just died, the first view without it makes a pair of which either end
        // could go. Its certificate and the views of the others come within the roll call.
        let is_clear = !has_broken
            || self.attempts.broken.is_some_and(|broken| self.detector.has_passed(ROLL_CALL, broken));
        let is_stuck = self.has_failed() || (self.attempts.begins_no_step && self.has_planned_change());
        let is_needed =
            self.participant.is_halted() || has_dead || is_frozen || is_stuck || (has_broken && is_clear);
        self.attempts.needed = since(is_needed, self.attempts.needed, clock);
        let Some(needed) = self.attempts.needed else {
            self.attempts.lost = None;
            return;
        };
        let (plan, position) = self.plan(&record);
        self.attempts.lost = since(plan.stay.is_empty(), self.attempts.lost, clock);
        self.suspect_who_does_not_answer(&plan);
        let is_small = 2 * plan.stay.len() < record.members().len();
        let delay = position + if is_small { LONGER } else { 0 };
        let frozen = self.attempts.frozen.filter(|_| !self.has_promised_a_dead(&record));
        let is_time = match (self.attempts.asked, frozen) {
            (Some(asked), _) => self.detector.has_passed(LONGER + delay, asked),
            (None, Some(frozen)) => self.detector.has_passed(LONGER + delay, frozen),
            (None, None) => self.detector.has_passed(delay, needed),
        };
        if is_time && is_clear && !plan.stay.is_empty() {
            self.attempts.asked = Some(clock);
            let outputs = self.participant.propose().unwrap_or_default();
            self.carry_out(outputs);
        }
        if is_clear {
            self.decide(&plan);
        }
    }

    /// Whether this member cannot be ready with its step.
    fn has_failed(&self) -> bool {
        self.views.get(&self.process()).is_some_and(|view| view.failed)
    }

    /// Whether the proposer of the ballot that this member has promised is certified dead.
    fn has_promised_a_dead(&self, record: &Record) -> bool {
        let proposer = self.participant.promised().and_then(|ballot| record.on_seat(ballot.seat));
        proposer.is_some_and(|proposer| self.participant.is_certified(proposer))
    }

    /// The plan, and how long this member waits until it proposes: the longer, the more others
    /// should do so before.
    fn plan(&self, record: &Record) -> (Plan, usize) {
        let process = self.process();
        let position = |stay: &BTreeSet<Process>| stay.iter().position(|member| *member == process);
        let preferred = plan::plan(record, &self.views, &self.participant, self.room, None);
        match position(&preferred.stay) {
            // Nobody else knows of a need.
            Some(_) if self.has_failed() => (preferred, 0),
            Some(position) => (preferred, STAGGER * position),
            // It leaves and takes part in no step: nobody else knows that they wait for it.
            None if self.has_failed() && preferred.leaves(process) => (preferred, 0),
            None => {
                let keeps = Some(process);
                let plan = plan::plan(record, &self.views, &self.participant, self.room, keeps);
                let rank = record.rank_of(process).unwrap_or(0);
                (plan, LONGER + STAGGER * rank)
            }
        }
    }

    /// Proposes the record where all that shall stay have answered.
    fn decide(&mut self, plan: &Plan) {
        let Some((answered, false)) = self.participant.proposal() else { return };
        let has = |member: &Process| answered.contains(&member.seat);
        if plan.stay.iter().all(has)
            && let Ok(outputs) = self.participant.decide(plan.members(), plan.causes())
        {
            self.carry_out(outputs);
        }
        self.say_no_quorum(&answered);
    }

    fn say_no_quorum(&mut self, answered: &BTreeSet<Seat>) {
        let is_late = self.attempts.asked.is_some_and(|asked| self.detector.has_passed(ANSWER, asked));
        if is_late && !self.attempts.said_no_quorum && !self.participant.suffices(answered) {
            self.attempts.said_no_quorum = true;
            let members = self.participant.epoch().map_or(0, |record| record.members().len());
            self.outputs.push(Output::NoQuorum { answered: answered.len(), members });
        }
    }

    fn call_the_roll(&mut self, members: &[Process]) {
        let Some(alarm) = self.attempts.alarm else {
            self.attempts.has_called = false;
            return;
        };
        let others = members.iter().copied().filter(|member| *member != self.process());
        let others: Vec<Process> = others.filter(|member| !self.participant.is_certified(*member)).collect();
        if !self.attempts.has_called {
            self.attempts.has_called = true;
            for to in others {
                self.send(to, Message::Alive { asks: true });
            }
        } else if self.detector.has_passed(ANSWER, alarm) {
            // A member that shares a processor with others that wait may take that long.
            for member in others {
                if self.detector.is_silent_since(member, alarm) {
                    self.detector.silent(member);
                }
            }
        }
    }

    fn suspect_who_does_not_answer(&mut self, plan: &Plan) {
        let Some((answered, _)) = self.participant.proposal() else { return };
        if self.attempts.asked.is_some_and(|asked| self.detector.has_passed(ANSWER, asked)) {
            for member in plan.stay.iter().filter(|member| !answered.contains(&member.seat)) {
                self.detector.silent(*member);
            }
        }
    }

    fn suspect_who_does_not_drain(&mut self, clock: Nanos) {
        let undrained = self.entry.undrained();
        self.attempts.entering = since(!undrained.is_empty(), self.attempts.entering, clock);
        if self.attempts.entering.is_some_and(|entering| self.detector.has_passed(LONGER, entering)) {
            for member in undrained {
                self.detector.late(member);
            }
        }
    }
}
