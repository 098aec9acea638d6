mod gates {
    use std::sync::atomic::{AtomicBool, Ordering};

    use pleach_transport::cuda::CudaError;
    use pleach_transport::sim::{Network, Options};
    use pleach_transport::{HostMemory, Slice};
    use pleach_vocabulary::{Collective, DataType, ReduceOp};

    use super::super::*;
    use crate::call::{Amount, Counts, Descriptor};
    use crate::simulate::Cluster;

    const RANKS: usize = 2;
    const LEN: usize = 100_000;
    const TIMEOUT: Duration = Duration::from_millis(500);
    /// Much longer than the calls take where nothing is in their way.
    const LONG: Duration = Duration::from_millis(50);

    type Outcome = Option<Result<(), Arc<Fault>>>;

    /// Two ranks that have started the same calls, of which rank 0's first has a gate.
    struct Ranks {
        cluster: Cluster,
        /// By rank and call.
        runs: Vec<Vec<RunId>>,
        data: Vec<Vec<Slice>>,
        outcomes: Vec<Vec<Outcome>>,
    }

    impl Ranks {
        fn new(gate: Gate, calls: usize) -> Self {
            let network = Network::full_mesh(RANKS as u32, 1_000_000_000, Duration::from_micros(5));
            let mut cluster = Cluster::new(Options::new(network, 1));
            cluster
                .run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready()))
                .expect("ranks connect");
            let (mut runs, mut data) = (Vec::new(), Vec::new());
            let mut gate = Some(gate);
            for member in cluster.members.iter_mut().flatten() {
                let descriptor = Descriptor {
                    collective: Collective::AllReduce,
                    amount: Amount::Each(LEN as u64),
                    data_type: DataType::U8,
                    op: ReduceOp::Sum,
                    tag: 0,
                };
                let plan =
                    member.planner.plan(&descriptor, &Counts::Each(LEN), None).expect("a plan").clone();
                let engine = &mut member.engine;
                let region = |_| engine.device().register(HostMemory::new(LEN)).expect("registered").whole();
                let slices: Vec<Slice> = (0..calls).map(region).collect();
                slices.iter().for_each(|slice| slice.store(&vec![1; LEN]));
                let start = |slice: &Slice| {
                    let bytes = Bytes::Registered(slice.clone());
                    engine.start_behind(gate.take(), &plan, bytes.clone(), bytes, TIMEOUT).expect("accepted")
                };
                runs.push(slices.iter().map(start).collect());
                data.push(slices);
            }
            Self { cluster, runs, data, outcomes: vec![vec![None; calls]; RANKS] }
        }

        /// Goes on until every call has ended, or for so long; whether they have.
        fn go_on(&mut self, limit: Duration) -> bool {
            let until = self.cluster.world.now() + limit;
            let (runs, outcomes) = (&self.runs, &mut self.outcomes);
            self.cluster
                .run(|cluster| {
                    for (rank, member) in cluster.members.iter_mut().enumerate() {
                        let engine = &mut member.as_mut().expect("nobody dies").engine;
                        for (outcome, run) in outcomes[rank].iter_mut().zip(&runs[rank]) {
                            if outcome.is_none() {
                                *outcome = engine.take_outcome(*run);
                            }
                        }
                    }
                    cluster.world.now() >= until || outcomes.iter().flatten().all(Option::is_some)
                })
                .expect("a gate is looked at again");
            self.outcomes.iter().flatten().all(Option::is_some)
        }

        fn faults(&self) -> Vec<Arc<Fault>> {
            let all = self.outcomes.iter().flatten().flatten();
            all.map(|outcome| outcome.clone().expect_err("the group has failed")).collect()
        }
    }

    #[test]
    fn behind_a_closed_gate_no_byte_is_touched_and_later_calls_wait() {
        let is_open = Arc::new(AtomicBool::new(false));
        let asked = is_open.clone();
        let mut ranks = Ranks::new(Box::new(move || Ok(asked.load(Ordering::Relaxed))), 2);
        assert!(!ranks.go_on(LONG));
        assert!(ranks.outcomes.iter().flatten().all(Option::is_none), "nobody goes on without rank 0");
        // What the work that is waited for does.
        ranks.data[0][0].store(&vec![5; LEN]);
        is_open.store(true, Ordering::Relaxed);
        assert!(ranks.go_on(LONG));
        for (rank, slices) in ranks.data.iter().enumerate() {
            assert!(ranks.outcomes[rank].iter().all(|outcome| *outcome == Some(Ok(()))));
            assert_eq!(slices[0].to_vec(), vec![6; LEN], "rank {rank}");
            assert_eq!(slices[1].to_vec(), vec![2; LEN], "rank {rank}");
        }
    }

    #[test]
    fn a_gate_that_does_not_open_in_time_ends_the_group_with_the_rank_and_the_reason() {
        let mut ranks = Ranks::new(Box::new(|| Ok(false)), 1);
        assert!(ranks.go_on(TIMEOUT * 2));
        for fault in ranks.faults() {
            assert_eq!((fault.kind, fault.subject), (FaultKind::TimedOut, 0), "{fault}");
        }
        let told = ranks.faults().iter().any(|fault| fault.detail.contains("work from before the call"));
        assert!(told, "who waits for its own stream says so: {:?}", ranks.faults());
    }

    #[test]
    fn a_gate_that_fails_ends_the_group_on_all_ranks() {
        let error = || ComputeError::from(CudaError::Freed { address: 0x1000 });
        let mut ranks = Ranks::new(Box::new(move || Err(error())), 2);
        assert!(ranks.go_on(TIMEOUT * 2));
        for fault in ranks.faults() {
            assert_eq!((fault.kind, fault.subject), (FaultKind::Compute, 0), "{fault}");
            assert!(fault.detail.contains("was freed"), "{fault}");
        }
    }
}

mod priorities {
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
        assert!(cluster.members.iter().flatten().all(|member| member.engine.admission.prioritized == 0));
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
        // Ranks may have different priorities. The second rank finishes first, because the first
        // rank stops for a while.
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
