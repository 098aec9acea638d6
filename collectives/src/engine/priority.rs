//! Which of several runs goes first.
//!
//! Runs are admitted in the order of their calls, because banks are (`bank`); of those admitted,
//! one of a higher priority takes all steps that it can before one of a lower priority takes its
//! next. So what was started late but is needed early, as the first layer's gradients are,
//! overtakes what was started before. **Invariant:** priority decides about time alone: numbers,
//! banks and signatures are those of the order of calls, so ranks need not agree about it.
//!
//! While every run has the usual priority nothing here is looked at.

use pleach_transport::Nanos;

use super::{Engine, RunId, State};

/// The priorities that are not the usual one.
#[derive(Default)]
pub(super) struct Priorities {
    /// By the issue of the run.
    of: Vec<(u64, i32)>,
    /// Kept to be used again.
    slots: Vec<u8>,
}

impl Priorities {
    /// Whether any run has one.
    pub(super) fn matter(&self) -> bool {
        !self.of.is_empty()
    }

    fn of(&self, issue: u64) -> i32 {
        self.of.iter().find(|(known, _)| *known == issue).map_or(0, |(_, priority)| *priority)
    }
}

impl Engine {
    /// Has a run that was just started go before those of lower priorities; the usual one is 0.
    pub fn prioritize(&mut self, id: RunId, priority: i32) {
        if priority != 0 {
            self.priorities.of.push((id.issue, priority));
        }
    }

    /// As [`Engine::advance_runs`], where runs have different priorities.
    pub(super) fn advance_by_priority(&mut self, now: Nanos) -> bool {
        let mut slots = std::mem::take(&mut self.priorities.slots);
        slots.clear();
        let mut may_admit = true;
        for index in 0..self.order.len() {
            if self.admit(index, &mut may_admit) == State::Active {
                slots.push(self.order[index]);
            }
        }
        // Stable: of equal priorities the earlier call goes first.
        slots.sort_by_key(|slot| std::cmp::Reverse(self.priority_of(*slot)));
        let mut moved = None;
        for slot in slots.iter().copied() {
            let priority = self.priority_of(slot);
            if moved.is_some_and(|before| before > priority) {
                // What moved may move again, and goes first.
                break;
            }
            match self.advance(slot, now) {
                Ok(true) => moved = Some(priority),
                Ok(false) => {}
                Err(fault) => {
                    self.fail(*fault, now);
                    moved = Some(priority);
                    break;
                }
            }
            if self.slots[usize::from(slot)].state == State::Finished {
                self.forget_finished(slot);
            }
        }
        self.priorities.slots = slots;
        moved.is_some()
    }

    fn priority_of(&self, slot: u8) -> i32 {
        self.priorities.of(self.slots[usize::from(slot)].issue)
    }

    fn forget_finished(&mut self, slot: u8) {
        let issue = self.slots[usize::from(slot)].issue;
        self.priorities.of.retain(|(known, _)| *known != issue);
        self.order.retain(|other| *other != slot);
        self.note_completed();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use pleach_transport::sim::{Fault, Network, Options};
    use pleach_vocabulary::{Collective, DataType, ReduceOp};

    use crate::call::{Amount, Counts, Descriptor};
    use crate::engine::{Address, Bytes, RunId};
    use crate::simulate::{Cluster, Member};

    const RANKS: u32 = 2;
    const LEN: usize = 1 << 20;

    /// Ranks that are connected, over links of a gigabyte a second.
    fn connected(seed: u64) -> Cluster {
        let network = Network::full_mesh(RANKS, 1_000_000_000, Duration::from_micros(5));
        let mut cluster = Cluster::new(Options::new(network, seed));
        cluster
            .run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready()))
            .expect("ranks connect");
        cluster
    }

    /// Starts runs, a buffer each, at each rank with its priorities.
    fn start(
        cluster: &mut Cluster,
        memory: &mut [Vec<u8>],
        priorities: [&[i32]; RANKS as usize],
    ) -> Vec<Vec<(usize, RunId)>> {
        let mut buffers = memory.iter_mut();
        let members = cluster.members.iter_mut().flatten();
        let start = |(member, priorities): (&mut Member, &[i32])| {
            let start = |(index, priority): (usize, &i32)| {
                let buffer = buffers.next().expect("one a run");
                let (base, len) = (Address::of(buffer), buffer.len());
                let descriptor = Descriptor {
                    collective: Collective::AllReduce,
                    amount: Amount::Each(len as u64),
                    data_type: DataType::U8,
                    op: ReduceOp::Sum,
                    tag: 0,
                };
                let plan =
                    Arc::clone(member.planner.plan(&descriptor, &Counts::Each(len), None).expect("a plan"));
                let bytes = Bytes::Private { base, len };
                let timeout = Duration::from_secs(60);
                let run = member.engine.start(&plan, bytes.clone(), bytes, timeout).expect("accepted");
                member.engine.prioritize(run, *priority);
                (index, run)
            };
            priorities.iter().enumerate().map(start).collect()
        };
        members.zip(priorities).map(start).collect()
    }

    /// Takes the outcomes of a rank's runs that have ended, which they did well.
    fn take_ended(cluster: &mut Cluster, rank: usize, runs: &mut Vec<(usize, RunId)>) -> Vec<usize> {
        let engine = &mut cluster.members[rank].as_mut().expect("nobody dies").engine;
        let mut ended = Vec::new();
        runs.retain(|(index, run)| match engine.take_outcome(*run) {
            None => true,
            Some(outcome) => {
                outcome.expect("nothing fails");
                ended.push(*index);
                false
            }
        });
        ended
    }

    /// The order in which runs of these priorities, started one after the other, end at each rank.
    fn ends(priorities: &[i32], len: usize, seed: u64) -> Vec<Vec<usize>> {
        let mut cluster = connected(seed);
        let mut memory: Vec<Vec<u8>> = vec![vec![1; len]; RANKS as usize * priorities.len()];
        let mut runs = start(&mut cluster, &mut memory, [priorities; RANKS as usize]);
        let mut ends = vec![Vec::new(); RANKS as usize];
        cluster
            .run(|cluster| {
                for (rank, runs) in runs.iter_mut().enumerate() {
                    ends[rank].append(&mut take_ended(cluster, rank, runs));
                }
                runs.iter().all(Vec::is_empty)
            })
            .expect("all end");
        assert!(cluster.members.iter().flatten().all(|member| !member.engine.priorities.matter()));
        drop(cluster);
        assert!(memory.iter().flatten().all(|byte| u32::from(*byte) == RANKS));
        ends
    }

    #[test]
    fn of_two_long_runs_the_one_of_higher_priority_ends_first() {
        for seed in 0..8 {
            assert_eq!(ends(&[0, 0], LEN, seed), [[0, 1], [0, 1]], "seed {seed}");
            assert_eq!(ends(&[0, 1], LEN, seed), [[1, 0], [1, 0]], "seed {seed}");
            assert_eq!(ends(&[-1, 0], LEN, seed), [[1, 0], [1, 0]], "seed {seed}");
            assert_eq!(ends(&[1, 0], LEN, seed), [[0, 1], [0, 1]], "seed {seed}");
        }
    }

    #[test]
    fn runs_of_many_priorities_all_end_though_most_wait_for_a_bank() {
        for len in [8, 1000, LEN / 4] {
            let priorities: Vec<i32> = (0..20).map(|index| index % 5 - 2).collect();
            for mut order in ends(&priorities, len, 1) {
                order.sort_unstable();
                assert_eq!(order, (0..20).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn a_peer_that_is_through_may_leave_while_this_rank_has_not_looked_at_all_that_it_said() {
        const LEN: usize = 40_000;
        // Ranks need not agree; the second one is through first, as the first one stands still in
        // between.
        let priorities: [&[i32]; RANKS as usize] =
            [&[-2, -1, 0, 1, 2, -2, -1, 0], &[-2, 0, 2, -1, 1, -2, 0, 2]];
        let mut left_early = 0;
        for stops_after_us in (10..600).step_by(10) {
            let mut cluster = connected(stops_after_us);
            let mut memory: Vec<Vec<u8>> = vec![vec![1; LEN]; RANKS as usize * priorities[0].len()];
            let mut runs = start(&mut cluster, &mut memory, priorities);
            let stops_at = cluster.world.now() + Duration::from_micros(stops_after_us);
            let (mut has_stopped, mut has_left) = (false, false);
            cluster
                .run(|cluster| {
                    if !has_stopped && cluster.world.now() >= stops_at {
                        has_stopped = true;
                        let duration = Duration::from_millis(20);
                        cluster.world.inject(Fault::Freeze { rank: 0, duration, watcher: false });
                    }
                    for (rank, runs) in runs.iter_mut().enumerate() {
                        take_ended(cluster, rank, runs);
                    }
                    if runs[1].is_empty() && !has_left {
                        has_left = true;
                        left_early += u32::from(runs[0].len() > 1);
                        cluster.members[1].as_mut().expect("nobody dies").engine.leave();
                        cluster.wake(1);
                    }
                    runs.iter().all(Vec::is_empty)
                })
                .expect("all end");
            drop(cluster);
            assert!(memory.iter().flatten().all(|byte| u32::from(*byte) == RANKS));
        }
        assert!(left_early > 0, "it never left while the other one had several runs to end");
    }
}
