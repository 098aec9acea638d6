//! Arrival skew in virtual time, where it is known exactly.

use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::call::{Counts, Descriptor};
use pleach_collectives::engine::{Bytes, Plan, RunId};
use pleach_collectives::simulate::Cluster;
use pleach_schedule::{Access, Algorithm};
use pleach_transport::sim::{Network, Options};
use pleach_transport::{HostMemory, Slice};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

const TIMEOUT: Duration = Duration::from_secs(3600);
const ARRIVAL_SKEW: Duration = Duration::from_millis(40);
const COUNT: usize = 1000;

fn start(cluster: &mut Cluster, rank: Rank, algorithm: &Algorithm, data: &Slice) -> RunId {
    let member = cluster.members[rank as usize].as_mut().unwrap();
    let program = member.planner.make(Collective::AllReduce, algorithm.clone(), Access::Put).unwrap();
    let counts = Counts::Each(COUNT);
    let descriptor = Descriptor {
        collective: Collective::AllReduce,
        amount: counts.amount(),
        data_type: DataType::I32,
        op: ReduceOp::Sum,
        tag: 0,
    };
    let plan = Arc::new(Plan::new(program, descriptor, counts).unwrap());
    let bytes = Bytes::Staged(data.clone());
    let run = member.start(&plan, bytes.clone(), bytes, TIMEOUT).unwrap();
    cluster.wake(rank);
    run
}

/// Each rank calls at its own time. By rank: how late each peer was, as seen from there, and how
/// often it was the last.
fn arrival_skew(algorithm: &Algorithm, late: Rank, ranks: u32) -> Vec<Vec<(Rank, Duration, u64)>> {
    let network = Network::full_mesh(ranks, 10_000_000_000, Duration::from_micros(1));
    let mut cluster = Cluster::new(Options::new(network, 7));
    cluster.run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready())).unwrap();
    let members = cluster.members.iter_mut().flatten();
    let memory: Vec<Slice> = members
        .map(|member| member.engine.device().register(HostMemory::new(COUNT * 4)).unwrap().whole())
        .collect();
    let mut runs: Vec<Option<RunId>> = vec![None; ranks as usize];
    for rank in (0..ranks).filter(|rank| *rank != late) {
        runs[rank as usize] = Some(start(&mut cluster, rank, algorithm, &memory[rank as usize]));
    }
    let call_at = cluster.world.now() + ARRIVAL_SKEW;
    while cluster.world.now() < call_at {
        cluster.settle().unwrap();
        assert!(cluster.advance(Some(call_at)));
    }
    runs[late as usize] = Some(start(&mut cluster, late, algorithm, &memory[late as usize]));
    let mut ended = vec![false; ranks as usize];
    cluster
        .run(|cluster| {
            for rank in 0..ranks as usize {
                let engine = &mut cluster.members[rank].as_mut().unwrap().engine;
                if !ended[rank]
                    && let Some(outcome) = engine.take_outcome(runs[rank].unwrap())
                {
                    outcome.unwrap();
                    ended[rank] = true;
                }
            }
            ended.iter().all(|ended| *ended)
        })
        .unwrap();
    let now = cluster.world.now();
    let members = cluster.members.iter().flatten();
    members
        .map(|member| {
            let report = member.engine.report(&member.board, now);
            let heard = report.peers.iter().filter(|peer| peer.arrival_skew.count() > 0);
            heard.map(|peer| (peer.rank, peer.arrival_skew.longest(), peer.last)).collect()
        })
        .collect()
}

#[test]
fn those_who_hear_from_a_late_rank_know_how_late_and_nobody_else_is_blamed() {
    for algorithm in [Algorithm::Direct, Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::DoubleTree]
    {
        for (late, ranks) in [(2, 4), (0, 4), (7, 8), (0, 2)] {
            let seen = arrival_skew(&algorithm, late, ranks);
            let mut named = 0;
            for (rank, peers) in (0..).zip(&seen) {
                for (peer, longest, last) in peers {
                    let what = format!(
                        "{algorithm}: rank {rank} of {peer} (late is {late} of {ranks}): {longest:?}"
                    );
                    if *peer == late && rank != late {
                        assert!(
                            *longest > ARRIVAL_SKEW.mul_f64(0.97) && *longest < ARRIVAL_SKEW.mul_f64(1.05),
                            "{what}"
                        );
                        assert_eq!(*last, 1, "{what}");
                        named += 1;
                    } else {
                        // What has to come by way of the late rank has the way and the rounding in
                        // it.
                        assert!(*longest < ARRIVAL_SKEW.mul_f64(0.05), "{what}");
                    }
                }
            }
            assert!(named > 0, "{algorithm}: nobody names {late} of {ranks}: {seen:?}");
        }
    }
}
