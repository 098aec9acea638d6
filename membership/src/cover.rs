//! Who has to go so that any two of the rest reach each other.
//!
//! Pairs of processes that do not reach each other are the edges of a graph. The fewest processes
//! whose removal leaves no edge are a minimum vertex cover. It is found by branching on a vertex of
//! the highest degree; where that takes more than [`BRANCHES_MAX`] branches, the vertex is taken
//! out without the second branch. Equal graphs give equal covers on all members: of two equal
//! vertices the one that became a member last goes, as it has the least of the job's states, and of
//! two as old ones that on the higher seat.

use std::collections::BTreeSet;

use crate::Process;

/// Pairs that do not reach each other, in either order.
pub(crate) type Pairs = BTreeSet<(Process, Process)>;

/// Branches of one search.
const BRANCHES_MAX: usize = 4096;

/// The fewest processes without which no pair is left. `keeps` is not among them. `since` is the
/// record with which a process became a member.
pub(crate) fn fewest(
    pairs: &Pairs,
    keeps: Option<Process>,
    since: &dyn Fn(Process) -> u64,
) -> BTreeSet<Process> {
    let mut out: BTreeSet<Process> = BTreeSet::new();
    if let Some(keeps) = keeps {
        let other = |(one, other): &(Process, Process)| {
            if *one == keeps { Some(*other) } else { (*other == keeps).then_some(*one) }
        };
        out.extend(pairs.iter().filter_map(other).filter(|other| *other != keeps));
    }
    let rest = without(pairs, &out);
    out.extend(cover(&rest, since, &mut 0));
    out
}

fn without(pairs: &Pairs, out: &BTreeSet<Process>) -> Pairs {
    let stays =
        |(one, other): &&(Process, Process)| one != other && !out.contains(one) && !out.contains(other);
    pairs.iter().filter(stays).copied().collect()
}

fn neighbours(pairs: &Pairs, process: Process) -> BTreeSet<Process> {
    let ends = |(one, other): &(Process, Process)| {
        if *one == process { Some(*other) } else { (*other == process).then_some(*one) }
    };
    pairs.iter().filter_map(ends).collect()
}

fn cover(pairs: &Pairs, since: &dyn Fn(Process) -> u64, branches: &mut usize) -> BTreeSet<Process> {
    let vertices: BTreeSet<Process> = pairs.iter().flat_map(|(one, other)| [*one, *other]).collect();
    let rank = |vertex: &Process| (neighbours(pairs, *vertex).len(), since(*vertex), *vertex);
    let Some((degree, _, vertex)) = vertices.iter().map(rank).max() else {
        return BTreeSet::new();
    };
    *branches += 1;
    let out = BTreeSet::from([vertex]);
    let mut with = cover(&without(pairs, &out), since, branches);
    with.insert(vertex);
    // A vertex with one neighbour may always go in the place of that neighbour.
    if degree == 1 || *branches > BRANCHES_MAX {
        return with;
    }
    let around = neighbours(pairs, vertex);
    let mut others = cover(&without(pairs, &around), since, branches);
    others.extend(around);
    if others.len() < with.len() { others } else { with }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(u32, u32)]) -> Pairs {
        list.iter().map(|(one, other)| (Process::new(*one, 1), Process::new(*other, 1))).collect()
    }

    /// All became members together.
    fn together(_: Process) -> u64 {
        0
    }

    fn seats(out: &BTreeSet<Process>) -> Vec<u32> {
        out.iter().map(|process| process.seat.0).collect()
    }

    /// Against every subset, for every graph of five vertices.
    #[test]
    fn covers_are_the_smallest() {
        let all: Vec<(u32, u32)> = (0..5).flat_map(|one| (0..one).map(move |other| (one, other))).collect();
        for graph in 0_u32..1 << all.len() {
            let list: Vec<_> = (0..all.len()).filter(|at| graph >> at & 1 == 1).map(|at| all[at]).collect();
            let covers = |set: u32| list.iter().all(|(one, other)| (set >> one | set >> other) & 1 == 1);
            let least = (0_u32..1 << 5).filter(|set| covers(*set)).map(u32::count_ones).min();
            let found = fewest(&pairs(&list), None, &together);
            assert_eq!(Some(found.len() as u32), least, "{list:?}");
            assert!(without(&pairs(&list), &found).is_empty(), "{list:?}");
        }
    }

    #[test]
    fn of_one_broken_link_the_higher_seat_goes() {
        assert_eq!(seats(&fewest(&pairs(&[(0, 3)]), None, &together)), [3]);
        assert_eq!(seats(&fewest(&pairs(&[(0, 3)]), Some(Process::new(3, 1)), &together)), [0]);
    }

    #[test]
    fn of_one_broken_link_the_one_that_came_last_goes_whatever_its_seat() {
        let newcomer = |process: Process| u64::from(process.seat.0 == 0);
        assert_eq!(seats(&fewest(&pairs(&[(0, 3)]), None, &newcomer)), [0]);
        assert_eq!(seats(&fewest(&pairs(&[(0, 1), (1, 2)]), None, &newcomer)), [1], "the fewest go first");
    }

    #[test]
    fn whom_many_do_not_reach_goes() {
        assert_eq!(seats(&fewest(&pairs(&[(0, 1), (2, 0), (0, 3)]), None, &together)), [0]);
    }

    #[test]
    fn a_large_graph_has_an_answer_in_bounded_time() {
        let random: Vec<_> = (0_u32..600).map(|at| (at * 37 % 64, at * 53 % 61 + 64)).collect();
        let found = fewest(&pairs(&random), None, &together);
        assert!(without(&pairs(&random), &found).is_empty());
    }
}
