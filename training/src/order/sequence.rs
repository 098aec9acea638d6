//! Jobs on one machine, which are ready at different times and due at different times.
//!
//! The problem is 1 | r_j | L_max of scheduling theory: find the sequence whose most belated job is
//! belated least. It is NP-hard. Carlier's branch and bound (European Journal of Operational
//! Research 11, 1982) solves it with few branches. A *node* of the search is a set of changes, each
//! of which puts one job before or after a set of others. Its lower bound is Jackson's schedule
//! with preemption.
//!
//! The search ends without proof after [`WORK_MAX`] looks at a job. What it has then is still no
//! worse than first come, first served, and late by at most one job's time more than the optimum,
//! as the schedule of the earliest due date is, with which it began.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Most looks at a job in one search.
const WORK_MAX: usize = 50_000;

/// One job. Times are of one clock and one unit, and below 2⁵⁰ together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    /// The earliest begin.
    pub(crate) ready: i64,
    /// The latest end that delays nothing.
    pub(crate) due: i64,
    /// The time from begin to end.
    pub(crate) time: i64,
}

/// When each job of a sequence ends.
pub(crate) fn finish_times(jobs: &[Job], sequence: &[u32]) -> impl Iterator<Item = i64> {
    sequence.iter().scan(i64::MIN, |now, &job| {
        let Job { ready, time, .. } = jobs[job as usize];
        *now = (*now).max(ready) + time;
        Some(*now)
    })
}

/// How late the most belated job of a sequence is; negative if all end early.
pub(crate) fn lateness(jobs: &[Job], sequence: &[u32]) -> i64 {
    let late = finish_times(jobs, sequence).zip(sequence).map(|(end, &job)| end - jobs[job as usize].due);
    late.max().unwrap_or(0)
}

/// First come, first served; of jobs that are ready together the first one first.
pub(crate) fn by_ready(jobs: &[Job]) -> Vec<u32> {
    let mut sequence: Vec<u32> = (0..jobs.len() as u32).collect();
    sequence.sort_by_key(|&job| jobs[job as usize].ready);
    sequence
}

/// The sequence whose most belated job is belated least, as far as the search finds it. No further
/// one is sought when no job is late, or when it would not be better than first come, first served.
pub(crate) fn planned(jobs: &[Job]) -> Vec<u32> {
    let mut best = Best { sequence: by_ready(jobs), lateness: 0 };
    best.lateness = lateness(jobs, &best.sequence);
    let mut open = BinaryHeap::from([Node { bound: i64::MIN, changes: Vec::new() }]);
    let mut work = 0;
    while let Some(node) = open.pop() {
        if best.lateness <= node.bound.max(0) || work > WORK_MAX {
            break;
        }
        let changed = node.apply(jobs);
        let sequence = earliest_due_first(&changed);
        work += 2 * jobs.len();
        let branch = critical_set(&changed, &sequence);
        best.improve(jobs, sequence);
        for change in branch.into_iter().flatten() {
            let mut changes = node.changes.clone();
            changes.push(change);
            let mut child = Node { bound: node.bound, changes };
            child.bound = child.bound.max(preemptive_lateness(&child.apply(jobs)));
            work += jobs.len();
            if child.bound < best.lateness {
                open.push(child);
            }
        }
    }
    best.sequence
}

struct Best {
    sequence: Vec<u32>,
    lateness: i64,
}

impl Best {
    fn improve(&mut self, jobs: &[Job], sequence: Vec<u32>) {
        let lateness = lateness(jobs, &sequence);
        if lateness < self.lateness {
            *self = Self { sequence, lateness };
        }
    }
}

/// A change of one job that puts it before or after others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    Ready(u32, i64),
    Due(u32, i64),
}

/// A set of sequences: those that the changes allow.
#[derive(PartialEq, Eq)]
struct Node {
    /// No sequence of the set is less late.
    bound: i64,
    changes: Vec<Change>,
}

impl Node {
    fn apply(&self, jobs: &[Job]) -> Vec<Job> {
        let mut jobs = jobs.to_vec();
        for change in &self.changes {
            match *change {
                Change::Ready(job, ready) => jobs[job as usize].ready = ready,
                Change::Due(job, due) => jobs[job as usize].due = due,
            }
        }
        jobs
    }
}

/// The node of the least bound first, then the one of fewest changes.
impl Ord for Node {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        let key = |node: &Self| Reverse((node.bound, node.changes.len()));
        key(self).cmp(&key(other))
    }
}

impl PartialOrd for Node {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Whenever the machine is free it takes, of the jobs that are ready, the one that is due first
/// (Schrage's schedule).
fn earliest_due_first(jobs: &[Job]) -> Vec<u32> {
    let arrivals = by_ready(jobs);
    let mut arrivals = arrivals.iter().peekable();
    let mut ready = BinaryHeap::new();
    let mut sequence = Vec::with_capacity(jobs.len());
    let mut now = i64::MIN;
    while sequence.len() < jobs.len() {
        if ready.is_empty() {
            now = arrivals.peek().map_or(now, |&&job| now.max(jobs[job as usize].ready));
        }
        while let Some(&&job) = arrivals.peek().filter(|&&&job| jobs[job as usize].ready <= now) {
            ready.push(Reverse((jobs[job as usize].due, job)));
            arrivals.next();
        }
        let Some(Reverse((_, job))) = ready.pop() else { break };
        now += jobs[job as usize].time;
        sequence.push(job);
    }
    sequence
}

/// How late the most belated job is if a job may be interrupted by one that is due earlier: less
/// than in any sequence (Jackson's schedule with preemption).
fn preemptive_lateness(jobs: &[Job]) -> i64 {
    let arrivals = by_ready(jobs);
    let mut arrivals = arrivals.iter().peekable();
    let mut ready: BinaryHeap<Reverse<(i64, u32, i64)>> = BinaryHeap::new();
    let (mut now, mut worst) = (i64::MIN, i64::MIN);
    loop {
        if ready.is_empty() {
            let Some(&&job) = arrivals.peek() else { return worst };
            now = now.max(jobs[job as usize].ready);
        }
        while let Some(&&job) = arrivals.peek().filter(|&&&job| jobs[job as usize].ready <= now) {
            let Job { due, time, .. } = jobs[job as usize];
            ready.push(Reverse((due, job, time)));
            arrivals.next();
        }
        let Some(Reverse((due, job, left))) = ready.pop() else { return worst };
        let until = arrivals.peek().map_or(i64::MAX, |&&next| jobs[next as usize].ready);
        if now + left <= until {
            now += left;
            worst = worst.max(now - due);
        } else {
            ready.push(Reverse((due, job, left - (until - now))));
            now = until;
        }
    }
}

/// The two changes of which the optimum allows one, unless this sequence, which takes the earliest
/// due first, is optimal.
///
/// The most belated job is the last of a block without idle time. A job of the block that is due
/// later than the last one holds up the jobs behind it. The optimum puts it before or behind all of
/// them.
fn critical_set(jobs: &[Job], sequence: &[u32]) -> Option<[Change; 2]> {
    let job = |at: usize| jobs[sequence[at] as usize];
    let ends: Vec<i64> = finish_times(jobs, sequence).collect();
    // Of equally late ones the last: its block is the longest.
    let last = (0..sequence.len()).max_by_key(|&at| ends[at] - job(at).due)?;
    let first = (1..=last).rev().find(|&at| ends[at - 1] < job(at).ready).unwrap_or(0);
    let held = (first..last).rev().find(|&at| job(at).due > job(last).due)?;
    let set = || (held + 1..=last).map(job);
    let time: i64 = set().map(|job| job.time).sum();
    let ready = set().map(|job| job.ready).min()?;
    let number = sequence[held];
    Some([
        Change::Due(number, job(held).due.min(job(last).due - time)),
        Change::Ready(number, job(held).ready.max(ready + time)),
    ])
}
