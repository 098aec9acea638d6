//! Scenarios: ranks, wires, faults and the calls of every rank, as data that a seed draws.
//!
//! **Invariant:** each part of a scenario has random numbers of its own, so that a new part does
//! not change the scenarios of known seeds.

use std::fmt;
use std::time::Duration;

use pleach_schedule::generate::{Access, Algorithm, check};
use pleach_schedule::hosts::HostMap;
use pleach_schedule::select::candidates;
use pleach_transport::sim::{self, FaultKind, FaultKinds, Faults, Network, NodeId, Random};
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::CallPlan;
use crate::compute::simulated::ComputeMutant;

/// Most ranks of a scenario.
pub const RANKS_MAX: u32 = 64;
/// Most ranks that map each other: when a group fails, each of its mappings of scratch becomes a
/// copy.
const MAPPED_RANKS_MAX: u32 = 8;
/// Most calls that a script has before the barrier at its end.
pub const CALLS_MAX: u64 = 8;
/// Most calls that a rank has under way at once.
pub const DEPTH_MAX: u64 = 4;
/// The deadline of calls that must not time out, in virtual time.
pub const TIMEOUT_FAR: Duration = Duration::from_secs(100);

/// Limits within which a scenario is drawn.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The number of ranks; `None`: mostly few, now and then many.
    pub ranks: Option<u32>,
    /// A scenario has some of these kinds of faults.
    pub faults: FaultKinds,
}

/// A rank that makes another call than the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Instead of which call of the script.
    pub call: usize,
    /// The rank.
    pub rank: Rank,
    /// The call that it makes instead.
    pub instead: CallPlan,
}

/// A rank that ends the group's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// The rank.
    pub rank: Rank,
    /// The time from the start of the run to the call.
    pub after: Duration,
}

/// Everything that one simulation does; a function of its seed and limits.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Where it comes from.
    pub seed: u64,
    /// How many ranks.
    pub ranks: u32,
    /// The wires.
    pub network: Network,
    /// Which rank is on which host.
    pub hosts: HostMap,
    /// Whether ranks of one host map each other's memory.
    pub maps: bool,
    /// Whether bytes land while nobody polls.
    pub passive: bool,
    /// Transfers under way to one peer.
    pub queue_depth: usize,
    /// Whether processors take no time, so that small calls go the short way.
    pub is_immediate: bool,
    /// Whether pairs connect on first use. Never drawn.
    pub connects_on_use: bool,
    /// Which kinds of faults were drawn.
    pub kinds: FaultKinds,
    /// Whether late ranks have rounds of a partial all-reduce after the calls.
    pub is_late: bool,
    /// The injected faults.
    pub faults: Faults,
    /// The calls of the ranks, one after the other; the last one is the barrier of closing.
    pub calls: Vec<CallPlan>,
    /// By rank: how many calls it has under way at once.
    pub depth: Vec<usize>,
    /// By call and rank: how urgent it is to it; none where all are alike.
    pub priorities: Vec<Vec<i32>>,
    /// How long each call may take.
    pub timeout: Duration,
    /// At most one rank that calls something else.
    pub mismatch: Option<Mismatch>,
    /// At most one rank that aborts.
    pub abort: Option<Abort>,
    /// A contract that the device breaks, to see whether that is caught.
    pub world_mutant: Option<sim::Mutant>,
    /// A defect of the processors that checkers must catch.
    pub compute_mutant: Option<ComputeMutant>,
    /// A rank's programs of named algorithms lose a dependency after they were proved, this one of
    /// those that are needed, to see whether that is caught.
    pub lost_dependency: Option<(Rank, u64)>,
}

impl Scenario {
    /// The scenario of this seed.
    ///
    /// # Panics
    ///
    /// When the limits ask for no ranks, or more than [`RANKS_MAX`].
    #[must_use]
    pub fn draw(seed: u64, limits: &Limits) -> Self {
        let root = Random::new(seed).split("scenario");
        let ranks = limits.ranks.unwrap_or_else(|| draw_ranks(&mut root.split("ranks")));
        assert!((1..=RANKS_MAX).contains(&ranks), "{ranks} ranks; there are scenarios of 1 to {RANKS_MAX}");
        let random = &mut root.split("world");
        let maps = random.coin() && ranks <= MAPPED_RANKS_MAX;
        let passive = maps || random.coin();
        let queue_depth = *pick(random, &[1, 2, 4, 16, 64]);
        let hosts = draw_hosts(&mut root.split("hosts"), ranks);
        let network = match hosts.hosts() {
            1 => draw_network(random, ranks),
            _ => draw_two_tiers(random, &hosts),
        };
        let is_immediate = root.split("immediate").coin();
        let depth = (0..ranks).map(|_| random.between(1, DEPTH_MAX) as usize).collect();
        let mut calls = draw_calls(&root.split("calls"), ranks, maps);
        if hosts.hosts() > 1 {
            let random = &mut root.split("tiers");
            calls.iter_mut().for_each(|plan| keep_inside(random, plan, &hosts));
        }
        // Late ranks have rounds beside the calls, which stay those of their seed.
        let of_calls = limits.faults.filtered(|kind| kind != FaultKind::Late);
        let kinds = draw_kinds(&mut root.split("kinds"), &of_calls);
        let is_late = limits.faults.contains(FaultKind::Late) && root.split("late").coin();
        let within = span(&network, &calls);
        let faults = Faults::draw(&kinds, seed, &network, within);
        let priorities = draw_priorities(&mut root.split("priorities"), ranks, calls.len());
        let mut scenario = Self {
            seed,
            ranks,
            network,
            hosts,
            maps,
            passive,
            queue_depth,
            is_immediate,
            connects_on_use: false,
            kinds,
            is_late,
            faults,
            calls,
            depth,
            priorities,
            timeout: TIMEOUT_FAR,
            mismatch: None,
            abort: None,
            world_mutant: None,
            compute_mutant: None,
            lost_dependency: None,
        };
        let random = &mut root.split("trouble");
        if random.chance(150_000) {
            scenario.mismatch = draw_mismatch(random, &scenario.calls, ranks);
            if let Some(mismatch) = &mut scenario.mismatch
                && scenario.hosts.hosts() > 1
            {
                keep_inside(random, &mut mismatch.instead, &scenario.hosts);
            }
        }
        if random.chance(60_000) {
            let rank = random.below(u64::from(ranks)) as Rank;
            let after = Duration::from_nanos(random.below(within.as_nanos() as u64 + 1));
            scenario.abort = Some(Abort { rank, after });
        }
        let may_be_near = scenario.kinds.iter().any(|kind| !kind.is_harmless());
        if may_be_near && random.chance(350_000) {
            scenario.timeout = Duration::from_micros(random.between(2_000, 40_000));
        }
        scenario
    }

    /// The call that `rank` makes as number `call`; `None` where it has no part in it.
    #[must_use]
    pub fn plan(&self, call: usize, rank: Rank) -> Option<&CallPlan> {
        let plan = match &self.mismatch {
            Some(mismatch) if mismatch.call == call && mismatch.rank == rank => &mismatch.instead,
            _ => &self.calls[call],
        };
        match plan.collective {
            Collective::SendRecv { from, to } if rank != from && rank != to => None,
            _ => Some(plan),
        }
    }

    /// How urgent a call is to a rank.
    #[must_use]
    pub fn priority(&self, call: usize, rank: Rank) -> i32 {
        self.priorities.get(call).map_or(0, |of_rank| of_rank[rank as usize])
    }

    /// Whether every call must succeed.
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        let nothing = self.mismatch.is_none() && self.abort.is_none() && self.faults.is_harmless();
        nothing && self.timeout >= TIMEOUT_FAR
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, ranks, hosts, maps, passive, queue_depth, kinds, .. } = self;
        write!(
            formatter,
            "seed {seed}: {ranks} ranks on hosts {hosts}, {}, {}, queues of {queue_depth}, faults {kinds}; ",
            if *maps { "mapped" } else { "put" },
            if *passive { "passive" } else { "polled" },
        )?;
        for (number, alike) in self.calls.chunk_by(PartialEq::eq).enumerate() {
            let separator = if number > 0 { ", " } else { "" };
            write!(formatter, "{separator}{}", alike[0])?;
            if alike.len() > 1 {
                write!(formatter, " ({} times)", alike.len())?;
            }
        }
        if let Some(Mismatch { call, rank, instead }) = &self.mismatch {
            write!(formatter, "; rank {rank} calls {instead} as number {call}")?;
        }
        if let Some(Abort { rank, after }) = self.abort {
            write!(formatter, "; rank {rank} aborts after {after:?}")?;
        }
        for (at, fault) in &self.faults.timed {
            write!(formatter, "; at {at} {fault:?}")?;
        }
        if !self.priorities.is_empty() {
            write!(formatter, "; of priorities")?;
        }
        if self.timeout < TIMEOUT_FAR {
            write!(formatter, "; calls time out after {:?}", self.timeout)?;
        }
        if self.connects_on_use {
            write!(formatter, "; pairs connect on use")?;
        }
        if self.is_late {
            write!(formatter, "; then rounds with late ranks")?;
        }
        Ok(())
    }
}

/// Most bytes of all ranks' inputs and outputs of one call, so that a seed takes little time.
const CALL_BYTES_MAX: u64 = 4 << 20;
/// The same for all but a few calls.
const CALL_BYTES_USUAL: u64 = 512 << 10;
/// Longest part of a call that is repeated many times, in bytes.
const REPEATED_BYTES_MAX: usize = 4096;

fn pick<'a, T>(random: &mut Random, items: &'a [T]) -> &'a T {
    &items[random.index(items.len())]
}

fn draw_ranks(random: &mut Random) -> u32 {
    match random.below(1000) {
        0..900 => random.between(1, 8) as u32,
        900..990 => random.between(9, 17) as u32,
        990..998 => random.between(18, 33) as u32,
        _ => random.between(34, u64::from(RANKS_MAX)) as u32,
    }
}

fn draw_network(random: &mut Random, ranks: u32) -> Network {
    let bytes_per_s = *pick(random, &[100_000_000, 1_000_000_000, 10_000_000_000, 50_000_000_000]);
    let latency = Duration::from_nanos(random.between(1, 40) * *pick(random, &[50, 1_000]));
    if random.coin() {
        Network::full_mesh(ranks, bytes_per_s, latency)
    } else {
        Network::star(ranks, bytes_per_s, latency)
    }
}

/// Mostly one host; else two or more, of which some have several ranks.
fn draw_hosts(random: &mut Random, ranks: u32) -> HostMap {
    if ranks < 3 || !random.chance(300_000) {
        return HostMap::one(ranks);
    }
    let hosts = random.between(2, u64::from(ranks.min(12)));
    let in_turns = random.coin();
    let host = |rank: Rank| match in_turns {
        true => rank % hosts as u32,
        false => random.below(hosts) as u32,
    };
    HostMap::new(&(0..ranks).map(host).collect::<Vec<_>>())
}

/// A switch in each host, and one that joins them by wires that are slower and longer.
fn draw_two_tiers(random: &mut Random, hosts: &HostMap) -> Network {
    let bytes_per_s = *pick(random, &[1_000_000_000, 10_000_000_000, 50_000_000_000]);
    let latency = Duration::from_nanos(random.between(50, 500));
    let (slower, longer) = (*pick(random, &[1, 4, 20]), random.between(1, 40) as u32);
    let mut builder = Network::builder(hosts.ranks());
    let middle = builder.switch();
    let switches: Vec<_> = (0..hosts.hosts()).map(|_| builder.switch()).collect();
    for &switch in &switches {
        builder.wire(switch, middle, bytes_per_s / slower, latency * longer);
    }
    for rank in 0..hosts.ranks() {
        builder.wire(NodeId(rank), switches[hosts.host(rank) as usize], bytes_per_s, latency);
    }
    builder.build().expect("every rank has a wire to its host's switch, and that one to the middle")
}

/// Leaves mappings to schedules that stay inside hosts: such a one, or puts.
fn keep_inside(random: &mut Random, plan: &mut CallPlan, hosts: &HostMap) {
    let hierarchical = Algorithm::Hierarchical(Some(hosts.clone()));
    if plan.algorithm.is_some() && random.coin() && hierarchical.carries_out(plan.collective) {
        plan.algorithm = Some(hierarchical);
    } else {
        plan.access = Access::Put;
    }
}

/// Often only harmless faults, else almost every scenario would end with an error.
fn draw_kinds(random: &mut Random, allowed: &FaultKinds) -> FaultKinds {
    let drawn = allowed.swarm(random);
    let has_harmless = allowed.iter().any(FaultKind::is_harmless);
    if has_harmless && random.chance(600_000) {
        let harmless: Vec<FaultKind> = drawn.iter().filter(|kind| kind.is_harmless()).collect();
        return FaultKinds::of(&harmless);
    }
    drawn
}

fn draw_calls(random: &Random, ranks: u32, maps: bool) -> Vec<CallPlan> {
    let mut shape = random.split("shape");
    let calls = shape.between(1, CALLS_MAX);
    // Many ranks are slow to simulate and to prove.
    let calls = if ranks > 16 { calls.min(2) } else { calls };
    let repeats = shape.chance(300_000);
    let mut plans: Vec<CallPlan> = Vec::new();
    for number in 0..calls {
        let mut random = random.split_number(number);
        let plan = match plans.last() {
            // Programs make the same call again and again, and so banks are used again.
            Some(last) if repeats => CallPlan { late: None, ..last.clone() },
            _ => draw_call(&mut random, ranks, maps),
        };
        plans.push(plan);
    }
    let is_small = match &plans[0].lengths {
        None => plans[0].count * plans[0].data_type.bytes() <= REPEATED_BYTES_MAX,
        Some(_) => plans[0].whole_bytes(ranks) <= REPEATED_BYTES_MAX,
    };
    if repeats && ranks <= 8 && is_small {
        for _ in 0..shape.below(12) {
            let again = CallPlan { late: None, ..plans[0].clone() };
            plans.push(again);
        }
    }
    plans.push(CallPlan {
        collective: Collective::Barrier,
        data_type: DataType::U8,
        op: ReduceOp::Sum,
        count: 0,
        lengths: None,
        algorithm: None,
        access: Access::Put,
        in_place: false,
        registered: vec![(false, false); ranks as usize],
        late: None,
    });
    plans
}

fn draw_collective(random: &mut Random, ranks: u32) -> Collective {
    let rank = random.below(u64::from(ranks)) as Rank;
    match random.below(14) {
        0..3 => Collective::AllReduce,
        3 => Collective::Reduce { root: rank },
        4 => Collective::Broadcast { root: rank },
        5 => Collective::AllGather,
        6 => Collective::ReduceScatter,
        7 => Collective::Barrier,
        8 => Collective::Gather { root: rank },
        9 => Collective::Scatter { root: rank },
        10 | 11 => Collective::AllToAll,
        _ if ranks == 1 => Collective::AllReduce,
        _ => {
            let to = (rank + 1 + random.below(u64::from(ranks) - 1) as Rank) % ranks;
            Collective::SendRecv { from: rank, to }
        }
    }
}

fn draw_call(random: &mut Random, ranks: u32, maps: bool) -> CallPlan {
    let collective = draw_collective(random, ranks);
    let data_type = *pick(random, &DataType::ALL);
    let fitting: Vec<ReduceOp> = ReduceOp::ALL.into_iter().filter(|op| op.fits(data_type)).collect();
    let op = if collective.reduces() { *pick(random, &fitting) } else { ReduceOp::Sum };
    let fitting: Vec<Algorithm> = candidates(collective, ranks)
        .into_iter()
        .filter(|algorithm| check(collective, algorithm, ranks).is_ok())
        .filter(|algorithm| algorithm.part_bytes_max(collective, ranks).is_none())
        .collect();
    // The planner prices and proves for each rank by itself, which is slow where ranks are many.
    let algorithm = (ranks > 8 || random.coin()).then(|| pick(random, &fitting).clone());
    let access = if maps && random.chance(700_000) { Access::Mapped } else { Access::Put };
    let all = *pick(random, &[(true, true), (false, false)]);
    let alike = random.chance(600_000);
    let registered = (0..ranks).map(|_| if alike { all } else { (random.coin(), random.coin()) }).collect();
    let late = random.chance(100_000).then(|| {
        let rank = random.below(u64::from(ranks)) as Rank;
        (rank, Duration::from_nanos(random.between(1_000, 30_000_000)))
    });
    let count = draw_count(random, collective, data_type, ranks);
    let lengths = random.chance(400_000).then(|| draw_lengths(random, collective, count, ranks)).flatten();
    let plan = CallPlan {
        collective,
        data_type,
        op,
        count,
        lengths,
        algorithm,
        access,
        in_place: random.coin(),
        registered,
        late,
    };
    made_eager(plan, ranks)
}

/// Few bytes go the eager way for half of the counts, instead of directly or along a chain. Nothing
/// is drawn for it, so that seeds that failed once still draw what they drew.
fn made_eager(plan: CallPlan, ranks: u32) -> CallPlan {
    let eager = match plan.algorithm {
        Some(Algorithm::Direct) => Algorithm::Eager,
        Some(Algorithm::Chain) => Algorithm::EagerTree,
        _ => return plan,
    };
    let is_wanted = plan.count % 2 == 1 && eager.carries_out(plan.collective);
    if is_wanted && fits(&plan, &eager, ranks) { CallPlan { algorithm: Some(eager), ..plan } } else { plan }
}

/// Whether no part is too long for the algorithm. Parts whose lengths only two ranks know count as
/// too long.
fn fits(plan: &CallPlan, algorithm: &Algorithm, ranks: u32) -> bool {
    let longest = match &plan.lengths {
        None => plan.count,
        Some(_) if plan.collective.ends(0, ranks).is_some() => usize::MAX,
        Some(lengths) => lengths.iter().copied().max().unwrap_or(0),
    };
    let bytes = longest.saturating_mul(plan.data_type.bytes()) as u64;
    algorithm.part_bytes_max(plan.collective, ranks).is_none_or(|most| bytes <= most)
}

/// Parts of different lengths, with as many elements together, about.
fn draw_lengths(random: &mut Random, collective: Collective, count: usize, ranks: u32) -> Option<Vec<usize>> {
    let parts = collective.parts(ranks) as usize;
    if parts < 2 {
        return None;
    }
    let only = random.index(parts);
    let kind = random.below(8);
    Some(
        (0..parts)
            .map(|part| match kind {
                0 => 0,
                // One has everything.
                1 if part == only => count * parts.min(8),
                1 => 0,
                2 if part == only => 0,
                2 => count,
                _ if random.chance(200_000) => 0,
                _ => random.below(2 * count as u64 + 2) as usize,
            })
            .collect(),
    )
}

fn draw_count(random: &mut Random, collective: Collective, data_type: DataType, ranks: u32) -> usize {
    if collective == Collective::Barrier {
        return 0;
    }
    let count = match random.below(12) {
        0 => 0,
        1 => 1,
        2..5 => random.between(2, 40),
        5..8 => random.between(41, 5_000),
        8..11 => random.between(5_001, 60_000),
        _ => random.between(60_001, 600_000),
    };
    let parts = match collective {
        Collective::AllToAll => u64::from(ranks),
        _ => u64::from(collective.parts(ranks)),
    };
    let budget = if random.chance(30_000) { CALL_BYTES_MAX } else { CALL_BYTES_USUAL };
    let most = budget / (2 * u64::from(ranks) * parts * data_type.bytes() as u64);
    count.min(most.max(1)) as usize
}

/// How urgent each rank takes each call: mostly all alike; else often only some ranks do, as they
/// need not agree.
fn draw_priorities(random: &mut Random, ranks: u32, calls: usize) -> Vec<Vec<i32>> {
    if !random.chance(300_000) {
        return Vec::new();
    }
    let agree = random.coin();
    let mut of_call = || {
        let all = random.below(5) as i32 - 2;
        let mut of_rank = || if agree { all } else { random.below(5) as i32 - 2 };
        (0..ranks).map(|_| of_rank()).collect()
    };
    (0..calls).map(|_| of_call()).collect()
}

/// About how long the calls take, from above where nothing goes wrong: faults fall into this time.
fn span(network: &Network, calls: &[CallPlan]) -> Duration {
    let ranks = network.ranks();
    let latency = (1..ranks).map(|peer| network.latency(0, peer)).max().unwrap_or(Duration::from_nanos(100));
    let bytes_per_s = network.links().iter().map(|link| link.bytes_per_s).min().unwrap_or(1_000_000_000);
    let of = |call: &CallPlan| {
        let bytes = call.whole_bytes(ranks) as u64;
        let moved = Duration::from_nanos(2 * bytes * 1_000_000_000 / bytes_per_s);
        let late = call.late.map_or(Duration::ZERO, |(_, by)| by);
        latency * (2 + ranks.ilog2()) * 2 + moved + late
    };
    calls.iter().map(of).sum::<Duration>() + 4 * latency + Duration::from_micros(1)
}

/// Another rank's mistake: wrong operation, count, type, root, or collective.
fn draw_mismatch(random: &mut Random, calls: &[CallPlan], ranks: u32) -> Option<Mismatch> {
    if ranks < 2 {
        return None;
    }
    let call = random.index(calls.len());
    let mut rank = random.below(u64::from(ranks)) as Rank;
    let mut instead = calls[call].clone();
    if let Collective::SendRecv { from, to } = instead.collective {
        rank = if random.coin() { from } else { to };
    }
    instead.late = None;
    let another_count = |count: usize| if count == 0 { 1 } else { count - 1 };
    match (random.below(4), instead.collective) {
        (_, Collective::Barrier) => {
            instead.collective = Collective::AllReduce;
            instead.lengths = None;
            instead.count = random.between(1, 100) as usize;
        }
        (0, collective) if collective.reduces() => {
            let fitting = ReduceOp::ALL.into_iter().filter(|op| op.fits(instead.data_type));
            let others = fitting.filter(|op| *op != instead.op);
            instead.op = *pick(random, &others.collect::<Vec<_>>());
        }
        (1, _) => {
            let fitting = DataType::ALL.into_iter().filter(|item| instead.op.fits(*item));
            let others = fitting.filter(|item| *item != instead.data_type);
            instead.data_type = *pick(random, &others.collect::<Vec<_>>());
        }
        (2, collective) if collective.root().is_some() => {
            let root = collective.root().unwrap_or_default();
            instead.collective = collective.with_root((root + 1) % ranks);
        }
        (2, Collective::AllReduce) => {
            instead.collective = Collective::Barrier;
            (instead.count, instead.lengths, instead.algorithm) = (0, None, None);
            (instead.data_type, instead.op) = (DataType::U8, ReduceOp::Sum);
        }
        (_, collective) => match &mut instead.lengths {
            None => instead.count = another_count(instead.count),
            Some(lengths) => {
                // Of a part that it has to do with; where all know all, any.
                let parts = (0..lengths.len() as u32).filter(|part| {
                    collective
                        .ends(*part, ranks)
                        .is_none_or(|(from, to)| from != to && (from == rank || to == rank))
                });
                let part = *pick(random, &parts.collect::<Vec<_>>()) as usize;
                lengths[part] = another_count(lengths[part]);
            }
        },
    }
    let is_possible =
        |algorithm: &Algorithm| algorithm.carries_out(instead.collective) && fits(&instead, algorithm, ranks);
    if instead.algorithm.as_ref().is_some_and(|algorithm| !is_possible(algorithm)) {
        instead.algorithm = None;
    }
    // A named algorithm is part of a call, but the planner's choice for a barrier names none.
    Some(Mismatch { call, rank, instead })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_scenario_twice_and_limits_hold() {
        let limits = Limits { ranks: Some(3), faults: FaultKinds::harmless() };
        for seed in 0..200 {
            let scenario = Scenario::draw(seed, &limits);
            assert_eq!(scenario.to_string(), Scenario::draw(seed, &limits).to_string());
            assert_eq!(scenario.ranks, 3);
            assert!(scenario.faults.is_harmless());
            assert!(scenario.mismatch.is_none_or(|it| scenario.calls[it.call] != it.instead));
        }
    }
}
