//! Which members the next epoch should have.

use std::collections::{BTreeMap, BTreeSet};

use crate::cover::{self, Pairs};
use crate::participant::Participant;
use crate::record::{Cause, MEMBERS_MAX, Reason};
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

impl Plan {
    pub(crate) fn members(&self) -> Vec<Process> {
        self.stay.union(&self.join).copied().collect()
    }

    /// Whether a member goes because it wants to.
    pub(crate) fn leaves(&self, process: Process) -> bool {
        self.causes.contains(&Cause { process, reason: Reason::Left })
    }

    pub(crate) fn causes(&self) -> Vec<Cause> {
        self.causes.clone()
    }
}

/// The newest views, the process's own among them.
pub(crate) type Views = BTreeMap<Process, View>;

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

/// Processes that wait to join.
pub(crate) fn waiting<'a>(record: &'a Record, views: &'a Views) -> impl Iterator<Item = &'a View> {
    views.values().filter(|view| view.epoch.is_none() && !record.contains(view.process))
}

/// The members of the next epoch. `keeps` stays whatever others reach.
pub(crate) fn plan(
    record: &Record,
    views: &Views,
    participant: &Participant,
    keeps: Option<Process>,
) -> Plan {
    let since = |process: Process| record.member_since(process).unwrap_or(u64::MAX);
    let unreachable = cover::fewest(&broken_pairs(record, views, participant), keeps, &since);
    let is_gone = |member: &Process| participant.is_certified(*member) || unreachable.contains(member);
    let wants_to_leave = |member: &Process| views.get(member).is_some_and(|view| view.leaves);
    // Where nobody else is left, nobody leaves: the job is theirs to end.
    let is_left = record.members().iter().any(|member| !is_gone(member) && !wants_to_leave(member));
    let leaves = |member: &Process| is_left && wants_to_leave(member);
    let mut causes = Vec::new();
    let mut stay = BTreeSet::new();
    for member in record.members() {
        let reason = if participant.is_certified(*member) {
            Some(Reason::Died)
        } else if unreachable.contains(member) {
            Some(Reason::Unreachable)
        } else {
            leaves(member).then_some(Reason::Left)
        };
        match reason {
            Some(reason) => causes.push(Cause { process: *member, reason }),
            None => drop(stay.insert(*member)),
        }
    }
    let mut join: BTreeSet<Process> = BTreeSet::new();
    for joiner in waiting(record, views) {
        let seat = joiner.process.seat;
        let replaced = record.on_seat(seat).filter(|member| stay.contains(member));
        let reach = |other: &Process| {
            joiner.reached.contains(other)
                && views.get(other).is_some_and(|view| view.reached.contains(&joiner.process))
        };
        let others = stay.iter().filter(|member| Some(**member) != replaced).chain(&join);
        let is_taken = join.iter().any(|other| other.seat == seat);
        let is_full = replaced.is_none() && stay.len() + join.len() >= MEMBERS_MAX;
        if is_full || is_taken || !others.clone().all(reach) || others.count() == 0 {
            continue;
        }
        if let Some(replaced) = replaced {
            stay.remove(&replaced);
            causes.push(Cause { process: replaced, reason: Reason::Replaced });
        }
        join.insert(joiner.process);
        causes.push(Cause { process: joiner.process, reason: Reason::Joined });
    }
    Plan { stay, join, causes }
}
