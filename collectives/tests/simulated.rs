//! Every collective on simulated ranks: the real engine over the simulated device, against an
//! oracle.

use std::sync::Arc;
use std::time::Duration;

use pleach_collectives::call::{Counts, Descriptor};
use pleach_collectives::engine::{Bytes, Plan, RunId};
use pleach_collectives::simulate::{Cluster, Limits, Scenario, run};
use pleach_schedule::{Access, Algorithm, GridShape, HostMap};
use pleach_transport::sim::{FaultKinds, Faults, Network, Options};
use pleach_transport::{Device, SharedMemory};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

const TIMEOUT: Duration = Duration::from_secs(3600);
/// Scenarios of groups whose pairs connect on first use.
const ON_USE_SEEDS: u64 = 80;

/// Memory of one rank for one call, which peers may reach or only the rank itself.
fn memory(device: &mut dyn Device, len: usize, is_reached: bool, fill: &[u8]) -> Bytes {
    let slice = device.register(SharedMemory::new(len).unwrap()).unwrap().whole().slice(0..len).unwrap();
    slice.store(fill);
    if is_reached { Bytes::Registered(slice) } else { Bytes::Staged(slice) }
}

fn read(bytes: &Bytes) -> Vec<i32> {
    let (Bytes::Registered(slice) | Bytes::Staged(slice)) = bytes else { return Vec::new() };
    let bytes = slice.to_vec();
    bytes.chunks_exact(4).map(|bytes| i32::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

fn input_value(rank: Rank, index: usize) -> i32 {
    (rank as i32 + 1) * 1000 + (index % 997) as i32
}

/// What `rank`'s output must hold.
fn expected(collective: Collective, rank: Rank, ranks: u32, count: usize) -> Option<Vec<i32>> {
    let sum = |index: usize| (0..ranks).map(|rank| input_value(rank, index)).sum::<i32>();
    match collective {
        Collective::AllReduce => Some((0..count).map(sum).collect()),
        Collective::Reduce { root } => (root == rank).then(|| (0..count).map(sum).collect()),
        Collective::Broadcast { root } => Some((0..count).map(|index| input_value(root, index)).collect()),
        Collective::AllGather => {
            Some((0..ranks).flat_map(|rank| (0..count).map(move |index| input_value(rank, index))).collect())
        }
        Collective::ReduceScatter => {
            Some((0..count).map(|index| sum(rank as usize * count + index)).collect())
        }
        Collective::Gather { root } => (root == rank).then(|| {
            (0..ranks).flat_map(|rank| (0..count).map(move |index| input_value(rank, index))).collect()
        }),
        Collective::Scatter { root } => {
            Some((0..count).map(|index| input_value(root, rank as usize * count + index)).collect())
        }
        Collective::AllToAll => {
            let part = |from| (0..count).map(move |index| input_value(from, rank as usize * count + index));
            Some((0..ranks).flat_map(part).collect())
        }
        Collective::SendRecv { from, to } => {
            (to == rank).then(|| (0..count).map(|index| input_value(from, index)).collect())
        }
        _ => None,
    }
}

#[derive(Clone, Debug)]
struct Case {
    collective: Collective,
    algorithm: Algorithm,
    ranks: u32,
    count: usize,
    maps: bool,
    /// By rank: the number of its host; empty: all are on one.
    hosts: Vec<u32>,
    /// By rank, cyclic: whether its slices are registered.
    registered: [bool; 2],
    in_place: bool,
    seed: u64,
}

/// One rank's share of a call.
struct Share {
    input: Option<Bytes>,
    output: Option<Bytes>,
    run: RunId,
}

fn start(cluster: &mut Cluster, case: &Case, rank: Rank) -> Share {
    let Case { collective, ranks, count, .. } = *case;
    let member = cluster.members[rank as usize].as_mut().unwrap();
    let registered = case.registered[rank as usize % 2];
    let inputs = collective.input_parts(rank, ranks).len() * count;
    let outputs = collective.output_parts(rank, ranks).len() * count;
    let fill: Vec<u8> = (0..inputs)
        .flat_map(|index| {
            // Reduce-scatter's parts differ, so that a part in a wrong place is seen.
            input_value(rank, index).to_ne_bytes()
        })
        .collect();
    let has_input = !collective.input_parts(rank, ranks).is_empty();
    let has_output = !collective.output_parts(rank, ranks).is_empty();
    let is_exchange = collective == Collective::AllToAll && ranks > 1;
    let in_place = case.in_place && has_input && has_output && inputs == outputs && !is_exchange;
    let input = has_input.then(|| memory(member.engine.device(), inputs * 4, registered, &fill));
    let output =
        (has_output && !in_place).then(|| memory(member.engine.device(), outputs * 4, registered, &[]));
    let access = if case.maps { Access::Mapped } else { Access::Put };
    let program = member.planner.make(collective, case.algorithm.clone(), access).unwrap();
    let bytes = |memory: &Option<Bytes>| memory.clone().unwrap_or(Bytes::None);
    let (input_bytes, output_bytes) = (bytes(&input), if in_place { bytes(&input) } else { bytes(&output) });
    let counts = Counts::Each(count);
    let descriptor = Descriptor {
        collective,
        amount: counts.amount(),
        data_type: DataType::I32,
        op: ReduceOp::Sum,
        tag: 0,
    };
    let plan = Arc::new(Plan::new(program, descriptor, counts).unwrap());
    let run = member.start(&plan, input_bytes, output_bytes, TIMEOUT).unwrap();
    Share { input, output, run }
}

fn check(case: &Case) {
    let ranks = case.ranks;
    let network = Network::full_mesh(ranks, 10_000_000_000, Duration::from_micros(1));
    let mut options = Options::new(network.clone(), case.seed);
    options.maps = case.maps;
    options.passive = case.maps;
    options.hosts = case.hosts.clone();
    options.faults = Faults::draw(&FaultKinds::harmless(), case.seed, &network, Duration::from_millis(1));
    let mut cluster = Cluster::new(options);
    // Twelve calls, so that banks come round.
    for round in 0..12 {
        let shares: Vec<Share> = (0..ranks).map(|rank| start(&mut cluster, case, rank)).collect();
        let mut outcomes = vec![None; ranks as usize];
        let run = cluster.run(|cluster| {
            for (rank, outcome) in outcomes.iter_mut().enumerate().filter(|(_, outcome)| outcome.is_none()) {
                let engine = &mut cluster.members[rank].as_mut().unwrap().engine;
                *outcome = engine.take_outcome(shares[rank].run);
            }
            outcomes.iter().all(Option::is_some)
        });
        assert!(run.is_ok(), "{case:?} round {round}: {run:?} {outcomes:?}");
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            if let Some(Err(fault)) = outcome {
                panic!("{case:?} round {round}: {fault}");
            }
            let Some(expected) = expected(case.collective, rank as Rank, ranks, case.count) else { continue };
            let values = read(shares[rank].output.as_ref().or(shares[rank].input.as_ref()).unwrap());
            let wrong = values.iter().zip(&expected).position(|(value, expected)| value != expected);
            assert!(
                values.len() == expected.len() && wrong.is_none(),
                "{case:?} round {round} rank {rank} from {wrong:?}: {:?} not {:?}",
                &values[wrong.unwrap_or(0)..][..8.min(values.len() - wrong.unwrap_or(0))],
                &expected[wrong.unwrap_or(0)..][..8.min(values.len() - wrong.unwrap_or(0))],
            );
        }
    }
}

/// Ranks on hosts of two that take turns, so that most have a neighbour and all have peers across.
fn two_tiers(ranks: u32) -> Vec<u32> {
    let hosts = ranks.div_ceil(2);
    (0..ranks).map(|rank| rank % hosts).collect()
}

fn check_all(collective: Collective, algorithm: &Algorithm) {
    for ranks in [1, 2, 3, 4, 5] {
        if matches!(collective, Collective::SendRecv { .. }) && ranks < 2 {
            continue;
        }
        for (number, count) in [0usize, 1, 7, 100, 1000, 70_000].into_iter().enumerate() {
            for maps in [false, true] {
                let (hosts, algorithm) = match algorithm {
                    Algorithm::Hierarchical(None) => {
                        let hosts = two_tiers(ranks);
                        let map = HostMap::new(&hosts);
                        (hosts, Algorithm::Hierarchical(Some(map)))
                    }
                    other => (Vec::new(), other.clone()),
                };
                if algorithm.part_bytes_max(collective, ranks).is_some_and(|most| count as u64 * 4 > most) {
                    continue;
                }
                let seed = u64::from(ranks) * 100 + number as u64 * 10 + u64::from(maps);
                check(&Case {
                    collective,
                    algorithm,
                    ranks,
                    count,
                    maps,
                    hosts,
                    registered: [[true, true], [false, false], [true, false]][number % 3],
                    in_place: seed.is_multiple_of(3),
                    seed,
                });
            }
        }
    }
}

macro_rules! collectives {
    ($($name:ident: $collective:expr, $algorithm:expr;)*) => {
        $(
            #[test]
            fn $name() {
                check_all($collective, &$algorithm);
            }
        )*
    };
}

collectives! {
    all_reduce_direct: Collective::AllReduce, Algorithm::Direct;
    all_reduce_exchange: Collective::AllReduce, Algorithm::Exchange;
    all_reduce_recursive_doubling: Collective::AllReduce, Algorithm::RecursiveDoubling;
    all_reduce_halving_doubling: Collective::AllReduce, Algorithm::HalvingDoubling;
    all_reduce_double_tree: Collective::AllReduce, Algorithm::DoubleTree;
    broadcast_double_tree: Collective::Broadcast { root: 0 }, Algorithm::DoubleTree;
    broadcast_chain: Collective::Broadcast { root: 0 }, Algorithm::Chain;
    reduce_chain: Collective::Reduce { root: 0 }, Algorithm::Chain;
    reduce_double_tree: Collective::Reduce { root: 0 }, Algorithm::DoubleTree;
    all_gather_halving_doubling: Collective::AllGather, Algorithm::HalvingDoubling;
    reduce_scatter_halving_doubling: Collective::ReduceScatter, Algorithm::HalvingDoubling;
    all_reduce_ring: Collective::AllReduce, Algorithm::Ring;
    reduce_direct: Collective::Reduce { root: 0 }, Algorithm::Direct;
    broadcast_direct: Collective::Broadcast { root: 0 }, Algorithm::Direct;
    all_gather_direct: Collective::AllGather, Algorithm::Direct;
    all_gather_ring: Collective::AllGather, Algorithm::Ring;
    reduce_scatter_direct: Collective::ReduceScatter, Algorithm::Direct;
    reduce_scatter_ring: Collective::ReduceScatter, Algorithm::Ring;
    gather_direct: Collective::Gather { root: 0 }, Algorithm::Direct;
    scatter_direct: Collective::Scatter { root: 0 }, Algorithm::Direct;
    all_to_all_direct: Collective::AllToAll, Algorithm::Direct;
    send_recv_direct: Collective::SendRecv { from: 0, to: 1 }, Algorithm::Direct;
    broadcast_eager: Collective::Broadcast { root: 0 }, Algorithm::Eager;
    broadcast_eager_tree: Collective::Broadcast { root: 0 }, Algorithm::EagerTree;
    reduce_eager: Collective::Reduce { root: 0 }, Algorithm::Eager;
    reduce_eager_tree: Collective::Reduce { root: 0 }, Algorithm::EagerTree;
    all_gather_eager: Collective::AllGather, Algorithm::Eager;
    reduce_scatter_eager: Collective::ReduceScatter, Algorithm::Eager;
    gather_eager: Collective::Gather { root: 0 }, Algorithm::Eager;
    scatter_eager: Collective::Scatter { root: 0 }, Algorithm::Eager;
    all_to_all_eager: Collective::AllToAll, Algorithm::Eager;
    send_recv_eager: Collective::SendRecv { from: 0, to: 1 }, Algorithm::Eager;
    all_reduce_grid: Collective::AllReduce, Algorithm::Grid(GridShape::Dimensions(2));
    all_gather_grid: Collective::AllGather, Algorithm::Grid(GridShape::Dimensions(2));
    reduce_scatter_grid: Collective::ReduceScatter, Algorithm::Grid(GridShape::Dimensions(2));
    all_reduce_grid_staged: Collective::AllReduce, Algorithm::GridStaged(GridShape::Dimensions(2));
    barrier: Collective::Barrier, Algorithm::RecursiveDoubling;
    all_reduce_hierarchical: Collective::AllReduce, Algorithm::Hierarchical(None);
    reduce_hierarchical: Collective::Reduce { root: 0 }, Algorithm::Hierarchical(None);
    broadcast_hierarchical: Collective::Broadcast { root: 0 }, Algorithm::Hierarchical(None);
    all_gather_hierarchical: Collective::AllGather, Algorithm::Hierarchical(None);
    reduce_scatter_hierarchical: Collective::ReduceScatter, Algorithm::Hierarchical(None);
    barrier_hierarchical: Collective::Barrier, Algorithm::Hierarchical(None);
}

/// The virtual time of calls that all ranks make at once.
fn time_of_calls_at_once(algorithm: &Algorithm, ranks: u32, count: usize, calls: usize) -> Duration {
    let network = Network::full_mesh(ranks, 10_000_000_000, Duration::from_micros(1));
    let mut cluster = Cluster::new(Options::new(network, 1));
    cluster.run(|cluster| cluster.members.iter().flatten().all(|member| member.engine.is_ready())).unwrap();
    let case = Case {
        collective: Collective::AllReduce,
        algorithm: algorithm.clone(),
        ranks,
        count,
        registered: [true; 2],
        in_place: true,
        maps: false,
        hosts: Vec::new(),
        seed: 1,
    };
    let begun = cluster.world.now();
    let mut left: Vec<(Rank, Share)> = (0..calls)
        .flat_map(|_| (0..ranks).collect::<Vec<_>>())
        .map(|rank| (rank, start(&mut cluster, &case, rank)))
        .collect();
    (0..ranks).for_each(|rank| cluster.wake(rank));
    let run = cluster.run(|cluster| {
        left.retain(|(rank, share)| {
            let engine = &mut cluster.members[*rank as usize].as_mut().unwrap().engine;
            engine.take_outcome(share.run).is_none_or(|outcome| {
                outcome.unwrap();
                false
            })
        });
        left.is_empty()
    });
    run.unwrap();
    cluster.world.now().since(begun)
}

/// Many calls at once take no longer than the same calls one by one. If a rank had to ask its peers
/// how far they are, it would take a millisecond longer each time its banks come round.
#[test]
fn calls_under_way_at_once_do_not_wait_for_answers() {
    let cases = [
        (Algorithm::Direct, 2, 16_384),
        (Algorithm::Direct, 4, 65_536),
        (Algorithm::Ring, 4, 65_536),
        (Algorithm::DoubleTree, 4, 65_536),
        (Algorithm::RecursiveDoubling, 4, 16),
        (Algorithm::Direct, 3, 16),
    ];
    for (algorithm, ranks, count) in cases {
        let one = time_of_calls_at_once(&algorithm, ranks, count, 1);
        let calls = 24;
        let all = time_of_calls_at_once(&algorithm, ranks, count, calls as usize);
        assert!(all <= one * calls, "{algorithm} of {ranks} ranks: {calls} at once {all:?}, one {one:?}");
    }
}

/// Scenarios of groups whose pairs connect on first use, with ranks that freeze or die, and calls
/// that differ, are aborted or late. (Links that go down are not among them: a pair that cannot
/// connect is found out at the deadline of the call that needs it.)
#[test]
fn scenarios_hold_where_pairs_connect_on_first_use() {
    let faults: FaultKinds = "delay,reorder,tear,queue-full,freeze,rank-death".parse().expect("faults");
    let (mut succeeded, mut failed) = (0, 0);
    for seed in 0..ON_USE_SEEDS {
        let ranks = if seed % 4 == 0 { Some(16 + (seed % 9) as u32) } else { None };
        let mut scenario = Scenario::draw(seed, &Limits { ranks, faults: faults.clone() });
        (scenario.connects_on_use, scenario.is_late) = (true, false);
        let report = run(&scenario, None).unwrap_or_else(|failure| panic!("{failure}\n{scenario}"));
        (succeeded, failed) = (succeeded + report.succeeded, failed + report.failed);
    }
    assert!(succeeded > 5 * ON_USE_SEEDS && failed > ON_USE_SEEDS / 2, "{succeeded} and {failed}");
}
