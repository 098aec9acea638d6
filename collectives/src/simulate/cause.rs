//! Whether an error is explained by an injected fault.

use pleach_transport::sim::Fault as Injected;
use pleach_vocabulary::{Collective, Rank};

use super::CallPlan;
use super::scenario::{Mismatch, Scenario, TIMEOUT_FAR};
use super::time_bound::time_bound;
use crate::engine::{Fault, FaultKind};

/// Whether an injection of this scenario explains the fault.
pub(super) fn explains(scenario: &Scenario, fault: &Fault) -> bool {
    let Fault { found_by, subject, .. } = *fault;
    match fault.kind {
        FaultKind::Aborted => scenario.abort.is_some_and(|abort| abort.rank == subject),
        FaultKind::Mismatch => scenario
            .mismatch
            .as_ref()
            .is_some_and(|mismatch| mismatch.rank == subject || mismatch.rank == found_by),
        FaultKind::Lost => injected(scenario).any(|injection| match injection {
            Injection::Dead(rank) => rank == subject,
            Injection::Apart(one, other) => [one, other].contains(&subject),
            Injection::Slow(_) => false,
        }),
        FaultKind::TimedOut => {
            let last = scenario.calls.len() - 1;
            let is_injected = injected(scenario).any(|injection| match injection {
                Injection::Dead(rank) | Injection::Slow(rank) => rank == subject,
                Injection::Apart(one, other) => [one, other].contains(&subject),
            });
            scenario.timeout < TIMEOUT_FAR && (is_injected || time_bound(scenario, last) > scenario.timeout)
        }
        FaultKind::Left
        | FaultKind::Protocol
        | FaultKind::OutOfReach
        | FaultKind::Compute
        | FaultKind::Changed => false,
    }
}

/// An injected fault, with the ranks that it concerns.
enum Injection {
    Dead(Rank),
    Slow(Rank),
    Apart(Rank, Rank),
}

fn injected(scenario: &Scenario) -> impl Iterator<Item = Injection> + '_ {
    let late = scenario.calls.iter().filter_map(|plan| Some(Injection::Slow(plan.late?.0)));
    let timed = scenario.faults.timed.iter().flat_map(|(_, fault)| match *fault {
        Injected::RankDeath { rank } => vec![Injection::Dead(rank)],
        Injected::Freeze { rank, .. } => vec![Injection::Slow(rank)],
        Injected::OneSidedLoss { rank, peer } => vec![Injection::Apart(rank, peer)],
        Injected::LinkDown { link } => {
            let pairs = scenario.network.pairs_over(link).into_iter();
            pairs.map(|(low, high)| Injection::Apart(low, high)).collect()
        }
        _ => Vec::new(),
    });
    late.chain(timed)
}

/// The sets of survivors that must have the same verdict. In each set one rank reaches all others,
/// and no rank reaches a rank outside. Survivors without such a rank need not agree.
pub(super) fn must_agree(scenario: &Scenario, survivors: &[Rank]) -> Vec<Vec<Rank>> {
    let apart: Vec<[Rank; 2]> = injected(scenario)
        .filter_map(|injection| match injection {
            Injection::Apart(one, other) => Some([one, other]),
            Injection::Dead(_) | Injection::Slow(_) => None,
        })
        .collect();
    let reaches = |one: Rank, other: Rank| !apart.contains(&[one, other]) && !apart.contains(&[other, one]);
    let mut left = survivors.to_vec();
    let mut sets = Vec::new();
    while let Some(first) = left.pop() {
        let mut set = vec![first];
        let mut at = 0;
        while at < set.len() {
            let one = set[at];
            let (near, far): (Vec<Rank>, Vec<Rank>) = left.iter().partition(|other| reaches(one, **other));
            set.extend(near);
            left = far;
            at += 1;
        }
        if set.iter().any(|one| set.iter().all(|other| reaches(*one, *other))) {
            sets.push(set);
        }
    }
    sets
}

/// Whether `rank`'s call must fail because another rank calls something else. A rank that only
/// sends in its call may have ended it before any rank sees the difference.
pub(super) fn must_fail(plan: &CallPlan, mismatch: &Mismatch, rank: Rank, ranks: u32) -> bool {
    if ranks == 1 {
        return false;
    }
    if let Some((from, to)) = ends_that_differ(plan, mismatch, ranks) {
        return rank == from || rank == to;
    }
    let differing = mismatch.rank;
    let own = if rank == differing { &mismatch.instead } else { plan };
    match own.collective {
        Collective::Reduce { root } | Collective::Gather { root } => rank == root,
        Collective::Broadcast { root } | Collective::Scatter { root } => {
            rank != root && (differing == root || differing == rank)
        }
        Collective::SendRecv { to, .. } => rank == to,
        _ => true,
    }
}

/// Whether results of a call are not checked: a rank calls something else in which it sends to
/// others, and may replace bytes that a third rank has put into the same scratch. `check_mismatch`
/// still holds that every rank learns of the difference.
pub(super) fn may_overwrite_scratch(scenario: &Scenario, call: usize) -> bool {
    scenario.mismatch.as_ref().is_some_and(|mismatch| {
        let sends = match mismatch.instead.collective {
            Collective::Barrier => false,
            Collective::Broadcast { root } | Collective::Scatter { root } => mismatch.rank == root,
            Collective::Reduce { root } | Collective::Gather { root } => mismatch.rank != root,
            Collective::SendRecv { from, .. } => mismatch.rank == from,
            _ => true,
        };
        mismatch.call == call && sends
    })
}

/// The two ranks that differ, where they do so only in the length of a part that nobody else knows.
pub(super) fn ends_that_differ(plan: &CallPlan, mismatch: &Mismatch, ranks: u32) -> Option<(Rank, Rank)> {
    let instead = &mismatch.instead;
    let alike = CallPlan { lengths: plan.lengths.clone(), late: plan.late, ..instead.clone() };
    let pairs = plan.lengths.iter().flatten().zip(instead.lengths.iter().flatten());
    let (part, _) = (0..).zip(pairs).find(|(_, (one, other))| one != other)?;
    plan.collective.ends(part, ranks).filter(|_| alike == *plan)
}
