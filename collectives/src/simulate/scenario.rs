//! What is simulated, as data that a seed draws: ranks, wires, faults and what every rank is asked
//! for.

mod draw;

use std::fmt;
use std::time::Duration;

use pleach_schedule::hosts::HostMap;
use pleach_transport::sim::{FaultKinds, Faults, Mutant, Network, Random};
use pleach_vocabulary::{Collective, Rank};

use super::call::CallPlan;
use crate::compute::simulated::Sabotage;

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

/// What a scenario may be drawn from.
#[derive(Clone, Debug)]
pub struct Limits {
    /// So many ranks; `None`: mostly few, now and then many.
    pub ranks: Option<u32>,
    /// A scenario has some of these kinds of faults.
    pub faults: FaultKinds,
}

/// A rank that makes another call than the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Instead of which call of the script.
    pub call: usize,
    /// Which rank.
    pub rank: Rank,
    /// What it calls.
    pub instead: CallPlan,
}

/// A rank that ends the group's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abort {
    /// Which rank.
    pub rank: Rank,
    /// When.
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
    /// Which kinds of faults were drawn.
    pub kinds: FaultKinds,
    /// What goes wrong.
    pub faults: Faults,
    /// What the ranks call, one after the other; the last one is the barrier of closing.
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
    pub mutant: Option<Mutant>,
    /// What the processors do wrong, to see whether that is caught.
    pub sabotage: Option<Sabotage>,
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
        let ranks = limits.ranks.unwrap_or_else(|| draw::ranks(&mut root.split("ranks")));
        assert!((1..=RANKS_MAX).contains(&ranks), "{ranks} ranks; there are scenarios of 1 to {RANKS_MAX}");
        let random = &mut root.split("world");
        let maps = random.coin() && ranks <= MAPPED_RANKS_MAX;
        let passive = maps || random.coin();
        let queue_depth = *draw::pick(random, &[1, 2, 4, 16, 64]);
        let hosts = draw::hosts(&mut root.split("hosts"), ranks);
        let network = match hosts.hosts() {
            1 => draw::network(random, ranks),
            _ => draw::two_tiers(random, &hosts),
        };
        let is_immediate = root.split("immediate").coin();
        let depth = (0..ranks).map(|_| random.between(1, DEPTH_MAX) as usize).collect();
        let mut calls = draw::calls(&root.split("calls"), ranks, maps);
        if hosts.hosts() > 1 {
            let random = &mut root.split("tiers");
            calls.iter_mut().for_each(|plan| draw::keep_inside(random, plan, &hosts));
        }
        let kinds = draw::kinds(&mut root.split("kinds"), &limits.faults);
        let within = draw::span(&network, &calls);
        let faults = Faults::draw(&kinds, seed, &network, within);
        let priorities = draw::priorities(&mut root.split("priorities"), ranks, calls.len());
        let mut scenario = Self {
            seed,
            ranks,
            network,
            hosts,
            maps,
            passive,
            queue_depth,
            is_immediate,
            kinds,
            faults,
            calls,
            depth,
            priorities,
            timeout: TIMEOUT_FAR,
            mismatch: None,
            abort: None,
            mutant: None,
            sabotage: None,
            lost_dependency: None,
        };
        let random = &mut root.split("trouble");
        if random.chance(150_000) {
            scenario.mismatch = draw::mismatch(random, &scenario.calls, ranks);
            if let Some(mismatch) = &mut scenario.mismatch
                && scenario.hosts.hosts() > 1
            {
                draw::keep_inside(random, &mut mismatch.instead, &scenario.hosts);
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
        Ok(())
    }
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
