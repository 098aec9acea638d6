//! Which members the next epoch should have.
//!
//! **Invariant:** a plan takes units whole. Of each it has all members, or none: a member that goes
//! takes its unit along, and a process joins when all processes of its unit do.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use crate::cover::{self, Pairs};
use crate::participant::Participant;
use crate::record::{Cause, Reason};
use crate::view::View;
use crate::{Process, Record};

/// The members of the next epoch as one process would have them.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Members of this epoch.
    pub(crate) stay: BTreeSet<Process>,
    /// Processes that join.
    pub(crate) join: BTreeSet<Process>,
    causes: Vec<Cause>,
}

/// How many seats make a unit, whose members come and go together: seats 0 to `n - 1`, and so on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit(NonZeroU32);

impl Unit {
    pub(crate) fn of_seats(seats: NonZeroU32) -> Self {
        Self(seats)
    }

    /// The number of the unit that a process is of.
    pub(crate) fn of(self, process: Process) -> u32 {
        process.seat.0 / self.0
    }

    /// The units of those that are named.
    pub(crate) fn all_of<'a>(self, processes: impl IntoIterator<Item = &'a Process>) -> BTreeSet<u32> {
        processes.into_iter().map(|process| self.of(*process)).collect()
    }

    fn size(self) -> usize {
        self.0.get() as usize
    }
}

impl Plan {
    pub(crate) fn members(&self) -> Vec<Process> {
        self.stay.union(&self.join).copied().collect()
    }

    /// Whether a member goes because it wants to.
    pub(crate) fn leaves(&self, process: Process) -> bool {
        self.causes.contains(&Cause { process, reason: Reason::Left })
    }

    /// Whether a process comes or goes because it wants to.
    pub(crate) fn is_wished(&self) -> bool {
        self.causes.iter().any(|cause| matches!(cause.reason, Reason::Joined | Reason::Left))
    }

    /// Why the members change, and whose step failed.
    pub(crate) fn causes(&self) -> Vec<Cause> {
        self.causes.clone()
    }

    /// Names the members whose step failed. Where a member is lost steps fail for that reason, and
    /// nobody else is named.
    fn name_failed(&mut self, record: &Record, views: &Views) {
        let is_loss = |cause: &Cause| matches!(cause.reason, Reason::Died | Reason::Unreachable);
        if self.causes.iter().any(is_loss) {
            return;
        }
        let failed = |process: &&Process| {
            views.get(process).is_some_and(|view| view.failed && view.epoch == Some(record.number()))
        };
        let failed = self.stay.iter().filter(failed);
        self.causes.extend(failed.map(|process| Cause { process: *process, reason: Reason::Failed }));
    }

    /// Takes in a unit of those that wait for a place in it, if it is whole, and it and all others
    /// reach each other, and there is room. It takes the place of the unit that is there.
    fn admit(&mut self, waiting: &[&View], views: &Views, unit: Unit, most: usize) {
        let Some(number) = waiting.first().map(|joiner| unit.of(joiner.process)) else { return };
        let replaced: Vec<Process> =
            self.stay.iter().copied().filter(|member| unit.of(*member) == number).collect();
        let mut joiners = BTreeSet::new();
        for joiner in waiting {
            let reach = |other: &Process| reach_each_other(views, joiner.process, *other);
            let mut others = self.stay.iter().filter(|member| !replaced.contains(member)).chain(&self.join);
            let is_alone = others.clone().next().is_none();
            let is_taken = joiners.iter().any(|other: &Process| other.seat == joiner.process.seat);
            if !is_alone && !is_taken && others.all(reach) && joiners.iter().all(reach) {
                joiners.insert(joiner.process);
            }
        }
        let members = self.stay.len() + self.join.len() + joiners.len() - replaced.len();
        if joiners.len() < unit.size() || members > most {
            return;
        }
        for process in replaced {
            self.stay.remove(&process);
            self.causes.push(Cause { process, reason: Reason::Replaced });
        }
        self.causes.extend(joiners.iter().map(|process| Cause { process: *process, reason: Reason::Joined }));
        self.join.extend(joiners);
    }
}

/// The newest views, the process's own among them.
pub(crate) type Views = BTreeMap<Process, View>;

/// Whether a process that waits to join and another process reach and hear each other.
pub(crate) fn reach_each_other(views: &Views, joiner: Process, other: Process) -> bool {
    let reaches = |one, other| views.get(&one).is_some_and(|view| view.reached.contains(&other));
    reaches(joiner, other) && reaches(other, joiner)
}

/// Pairs of members that do not reach each other by the views of this epoch. Those that are
/// certified dead are left out.
pub(crate) fn broken_pairs(record: &Record, views: &Views, participant: &Participant) -> Pairs {
    let is_member = |process: &Process| record.contains(*process) && !participant.is_certified(*process);
    let of_epoch = views.values().filter(|view| view.epoch == Some(record.number()));
    of_epoch
        .filter(|view| is_member(&view.process))
        .flat_map(|view| view.unreached.iter().map(|other| (view.process, *other)))
        .filter(|(_, other)| is_member(other))
        .collect()
}

/// Processes that wait to join. One that leaves does not.
pub(crate) fn waiting<'a>(record: &'a Record, views: &'a Views) -> impl Iterator<Item = &'a View> {
    views.values().filter(|view| view.epoch.is_none() && !view.leaves && !record.contains(view.process))
}

/// The units that go so that any two members of the rest reach each other, as few as may be.
/// `keeps` does not go for another unit's sake.
fn torn(record: &Record, broken: &Pairs, unit: Unit, keeps: Option<Process>) -> BTreeSet<u32> {
    let (within, between): (Pairs, Pairs) =
        broken.iter().partition(|(one, other)| unit.of(*one) == unit.of(*other));
    let mut torn = unit.all_of(within.iter().map(|(one, _)| one));
    // Its first member stands for a unit.
    let first = |process: Process| {
        let of_unit = record.members().iter().find(|member| unit.of(**member) == unit.of(process));
        of_unit.copied().unwrap_or(process)
    };
    let is_whole = |process: &Process| !torn.contains(&unit.of(*process));
    let between = between.iter().filter(|(one, other)| is_whole(one) && is_whole(other));
    let between: Pairs = between.map(|(one, other)| (first(*one), first(*other))).collect();
    let since = |process: Process| record.member_since(process).unwrap_or(u64::MAX);
    torn.extend(unit.all_of(&cover::fewest(&between, keeps.map(first), &since)));
    torn
}

/// The members of the next epoch, `most` or fewer where processes join. `keeps` stays whatever
/// others reach, if its own unit is whole.
pub(crate) fn plan(
    record: &Record,
    views: &Views,
    participant: &Participant,
    (unit, most): (Unit, usize),
    keeps: Option<Process>,
) -> Plan {
    let members = record.members();
    let broken = broken_pairs(record, views, participant);
    let torn = torn(record, &broken, unit, keeps);
    let has_died = |member: &&Process| participant.is_certified(**member);
    let dead = unit.all_of(members.iter().filter(has_died));
    let is_gone = |number: &u32| torn.contains(number) || dead.contains(number);
    let wants_to_leave = |member: &&Process| views.get(member).is_some_and(|view| view.leaves);
    let leaving = unit.all_of(members.iter().filter(wants_to_leave));
    // Where nobody else is left, nobody leaves: the job is theirs to end.
    let is_left = unit.all_of(members).iter().any(|number| !is_gone(number) && !leaving.contains(number));
    let leaves = |number: &u32| is_left && leaving.contains(number);
    let is_unreached = |member: &Process| broken.iter().any(|(one, other)| one == member || other == member);
    let mut causes = Vec::new();
    let mut stay = BTreeSet::new();
    for member in members {
        let number = unit.of(*member);
        let reason = if has_died(&member) {
            Some(Reason::Died)
        } else if torn.contains(&number) && is_unreached(member) {
            Some(Reason::Unreachable)
        } else if leaves(&number) && wants_to_leave(&member) {
            Some(Reason::Left)
        } else {
            (is_gone(&number) || leaves(&number)).then_some(Reason::Unit)
        };
        match reason {
            Some(reason) => causes.push(Cause { process: *member, reason }),
            None => drop(stay.insert(*member)),
        }
    }
    // Nobody comes in a record without one that leaves, also where its process has ended by then:
    // where a job ends, members leave one after the other, and nobody is to come for the last of
    // them. Where the others go on, who waits comes at the end of their next step.
    let leaves_now = |member: &Process| !stay.contains(member) && leaving.contains(&unit.of(*member));
    let most = if members.iter().any(leaves_now) { 0 } else { most };
    let mut plan = Plan { stay, join: BTreeSet::new(), causes };
    let mut waiting_by_unit: BTreeMap<u32, Vec<&View>> = BTreeMap::new();
    for joiner in waiting(record, views) {
        waiting_by_unit.entry(unit.of(joiner.process)).or_default().push(joiner);
    }
    for joiners in waiting_by_unit.values() {
        plan.admit(joiners, views, unit, most);
    }
    plan.name_failed(record, views);
    plan
}
