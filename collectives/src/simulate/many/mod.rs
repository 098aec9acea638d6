//! Worlds of thousands of ranks in virtual time: proved schedules over given links, without
//! engines, devices and data.
//!
//! [`Prepared`] is a schedule, its proof and its routes. [`Prepared::time`] carries it out, event
//! by event, as [`wired::time`](super::wired::time) does with real engines: the same schedule, the
//! same chunks as the plan of such a call has, the same rules of links ([`links`]). `run` says what
//! is left out. [`Prepared::price`] is the time by the cost model
//! ([`Platform::time_over_links`](pleach_schedule::cost::Platform::time_over_links)).
//!
//! Where a family of schedules and the links have symmetries in common, one rank of each class is
//! carried out, as all ranks of a class do the same ([`folding`]). Then all blocks are taken to be
//! as long as the longest, and transfers that come to a link at the same instant may take turns in
//! another order; so times may differ a little from those without folding.
//!
//! **Invariant:** only proved schedules are carried out, of plans that fit the ranks' memory, and
//! only over links that join the ranks.

mod bound;
mod folding;
mod links;
mod program;
mod routes;
mod run;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pleach_packing::topology::{NodeId, Topology};
use pleach_schedule::HostMap;
use pleach_schedule::generate::{Access, Algorithm, FAMILY_RANKS_MAX, GenerateError, family, generate};
use pleach_schedule::select::{CHUNK_BYTES, SelectError, candidates};
use pleach_schedule::verify::{Proof, Violation, verify, verify_family};
use pleach_schedule::wiring::{Routes, Wiring};
use pleach_transport::sim::Random;
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

pub use bound::{Bound, bound};

use crate::call::{Counts, Descriptor};
use crate::engine::{Plan, PlanError, Program};
use crate::partial::duration;
use folding::Folding;
use links::{PairId, RouteTable};
use program::{Lanes, StepOp};
use routes::{Entering, RouteSearch};
use run::{Cut, Run, Unended};

/// Most ranks of a world.
pub const RANKS_MAX: u32 = FAMILY_RANKS_MAX;

/// Most ranks of a schedule that has a block for each of them and is no family: it is made and
/// proved whole, which takes the square of the ranks.
pub const WHOLE_RANKS_MAX: u32 = 256;

/// Most lanes that are carried out: each takes about a hundred bytes.
const LANES_MAX: u64 = 1 << 21;

/// Most events on links: they take about a minute on one processor.
const EVENTS_MAX: u64 = 200_000_000;

/// Why nothing was timed.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum ManyError {
    /// More ranks than are simulated.
    #[error("{ranks} ranks are too many; simulate at most {RANKS_MAX}")]
    TooManyRanks {
        /// How many.
        ranks: u32,
    },
    /// There is no such schedule, or the links do not join its ranks.
    #[error(transparent)]
    Select(#[from] SelectError),
    /// A schedule without symmetry, for too many ranks.
    #[error(
        "{algorithm} of {ranks} ranks is no family of schedules, so it would be proved whole; take at most {WHOLE_RANKS_MAX} ranks, or another algorithm"
    )]
    NoFamily {
        /// The algorithm.
        algorithm: Algorithm,
        /// How many ranks.
        ranks: u32,
    },
    /// A schedule that is wrong.
    #[error("the schedule is wrong: {0}; report it")]
    Violation(Arc<Violation>),
    /// The schedule does not fit the memory that ranks have for each other.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// So much would happen that it would take too long.
    #[error(
        "{algorithm} of {ranks} ranks would take more than {most} {what}; take fewer ranks, a smaller size or another algorithm"
    )]
    TooMuch {
        /// The algorithm.
        algorithm: Algorithm,
        /// How many ranks.
        ranks: u32,
        /// The limit.
        most: u64,
        /// Of what.
        what: &'static str,
    },
    /// The ranks wait for each other, or a transfer takes longer than time is counted.
    #[error("{algorithm} of {ranks} ranks does not end; report it")]
    Stuck {
        /// The algorithm.
        algorithm: Algorithm,
        /// How many ranks.
        ranks: u32,
    },
}

impl From<GenerateError> for ManyError {
    fn from(error: GenerateError) -> Self {
        Self::Select(error.into())
    }
}

/// How much later than the first a rank makes the call, drawn for each rank by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Jitter {
    /// Any time up to this one, each as likely.
    Uniform(Duration),
    /// With this mean, exponentially distributed: a few ranks are very late.
    Exponential(Duration),
}

/// Longest time of a jitter.
const JITTER_MAX: Duration = Duration::from_secs(1_000);

impl Jitter {
    /// By rank: its delay in nanoseconds. Equal seeds give equal delays.
    #[must_use]
    pub fn delays_ns(self, seed: u64, ranks: u32) -> Vec<u64> {
        let root = Random::new(seed).split("jitter");
        let delay = |rank: Rank| {
            let bits = root.split_number(u64::from(rank)).bits();
            // Of (0, 1].
            let part = ((bits >> 11) + 1) as f64 / (1u64 << 53) as f64;
            match self {
                Self::Uniform(most) => (most.as_nanos() as f64 * part) as u64,
                Self::Exponential(mean) => (mean.as_nanos() as f64 * -part.ln()) as u64,
            }
        };
        (0..ranks).map(delay).collect()
    }
}

impl FromStr for Jitter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, time) = text.split_once(':').unwrap_or((text, ""));
        let time = duration(time).filter(|time| *time <= JITTER_MAX);
        match (name, time) {
            ("uniform", Some(most)) => Ok(Self::Uniform(most)),
            ("exponential", Some(mean)) => Ok(Self::Exponential(mean)),
            _ => {
                Err("write uniform:MOST or exponential:MEAN with a time up to 1000s, as uniform:200us"
                    .to_owned())
            }
        }
    }
}

impl fmt::Display for Jitter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform(most) => write!(formatter, "uniform:{most:?}"),
            Self::Exponential(mean) => write!(formatter, "exponential:{mean:?}"),
        }
    }
}

/// The hosts of a topology as its links show them: ranks that links of the largest bandwidth join.
#[must_use]
pub fn hosts(topology: &Topology) -> HostMap {
    let most = topology.links().iter().map(|link| link.bytes_per_s).max().unwrap_or(0);
    let unset = u32::MAX;
    let mut host_of = vec![unset; topology.nodes().len()];
    let mut hosts = 0;
    for rank in 0..topology.ranks() {
        let mut open = vec![topology.node(rank)];
        if host_of[open[0].0 as usize] != unset {
            continue;
        }
        host_of[open[0].0 as usize] = hosts;
        while let Some(node) = open.pop() {
            for link in topology.leaving(node).iter().filter(|link| link.bytes_per_s == most) {
                let NodeId(to) = link.to;
                if host_of[to as usize] == unset {
                    host_of[to as usize] = hosts;
                    open.push(link.to);
                }
            }
        }
        hosts += 1;
    }
    if hosts == 1 {
        return HostMap::one(topology.ranks());
    }
    let by_rank: Vec<u32> =
        (0..topology.ranks()).map(|rank| host_of[topology.node(rank).0 as usize]).collect();
    HostMap::new(&by_rank)
}

/// The algorithms that may carry out a collective of so many ranks on these hosts, but for packed
/// trees and for those of few ranks.
#[must_use]
pub fn algorithms(collective: Collective, hosts: &HostMap) -> Vec<Algorithm> {
    let ranks = hosts.ranks();
    let mut all = candidates(collective, ranks);
    all.retain(|algorithm| *algorithm != Algorithm::Exchange);
    let count = hosts.hosts();
    if (2..ranks).contains(&count) {
        let size = ranks / count;
        if count * size == ranks {
            let extents = vec![count, size];
            all.extend([Algorithm::Grid(extents.clone().into()), Algorithm::GridStaged(extents.into())]);
        }
        all.push(Algorithm::Hierarchical(Some(hosts.clone())));
    }
    let mut seen = BTreeSet::new();
    all.retain(|algorithm| algorithm.carries_out(collective) && seen.insert(algorithm.clone()));
    all
}

/// A proved schedule with its routes over the links of a topology.
#[derive(Debug)]
pub struct Prepared<'a> {
    topology: &'a Topology,
    collective: Collective,
    algorithm: Algorithm,
    proof: Proof,
    folding: Folding,
    table: RouteTable,
    /// By rank that is carried out, and rank.
    pairs: HashMap<(u32, Rank), PairId>,
}

/// Why routes do not fit a folding.
enum RouteFault {
    /// Several routes are as good.
    NotOnly,
    Many(ManyError),
}

impl<'a> Prepared<'a> {
    /// An algorithm over these links.
    ///
    /// # Errors
    ///
    /// There is no such schedule, too large a one, or one over ranks that no link joins.
    pub fn new(
        topology: &'a Topology,
        collective: Collective,
        algorithm: &Algorithm,
    ) -> Result<Self, ManyError> {
        Self::with(topology, collective, algorithm, None)
    }

    /// Packed trees of these links, with the routes of the packing; and any other algorithm.
    ///
    /// # Errors
    ///
    /// Those of [`Prepared::new`].
    pub fn wired(
        wiring: &'a Wiring,
        collective: Collective,
        algorithm: &Algorithm,
    ) -> Result<Self, ManyError> {
        let packed = wiring.carried_out_by(collective, algorithm);
        Self::with(wiring.topology(), collective, algorithm, packed.as_ref().map(|packed| &packed.routes))
    }

    fn with(
        topology: &'a Topology,
        collective: Collective,
        algorithm: &Algorithm,
        routes: Option<&Routes>,
    ) -> Result<Self, ManyError> {
        let ranks = topology.ranks();
        if ranks > RANKS_MAX {
            return Err(ManyError::TooManyRanks { ranks });
        }
        let proof = proof(collective, algorithm, ranks)?;
        let folding = match proof.family() {
            Some(family) if routes.is_none() => Folding::by(family, topology),
            _ => Folding::none(topology),
        };
        let mut prepared = Self {
            topology,
            collective,
            algorithm: algorithm.clone(),
            proof,
            folding,
            table: RouteTable::default(),
            pairs: HashMap::new(),
        };
        match prepared.find_routes(routes) {
            Ok(()) => Ok(prepared),
            Err(RouteFault::Many(error)) => Err(error),
            Err(RouteFault::NotOnly) => {
                prepared.folding = Folding::none(topology);
                match prepared.find_routes(routes) {
                    Ok(()) => Ok(prepared),
                    Err(RouteFault::Many(error)) => Err(error),
                    Err(RouteFault::NotOnly) => unreachable!("nothing is folded"),
                }
            }
        }
    }

    /// Finds the routes of all signals and puts of the ranks that are carried out.
    fn find_routes(&mut self, routes: Option<&Routes>) -> Result<(), RouteFault> {
        let of_rank = self.proof.family().map_or(0, |family| family.column().blocks.len() as u64);
        if of_rank * self.folding.carried_out().len() as u64 > LANES_MAX {
            return Err(RouteFault::Many(self.too_much(LANES_MAX, "lanes")));
        }
        let (mut table, mut pairs) = (RouteTable::default(), HashMap::new());
        let lanes = Lanes::new(&self.proof, &self.folding);
        let entering = Entering::new(self.topology);
        for class in 0..lanes.ranks() {
            let own = self.folding.carried_out()[class as usize];
            let mut peers = BTreeSet::new();
            for lane in lanes.of_rank(class) {
                for step in lanes.steps(lane) {
                    if let StepOp::Signal(peer) | StepOp::Put(peer) = step.op() {
                        peers.insert(lanes.target(lane, peer).rank());
                    }
                }
            }
            let search = RouteSearch::new(&entering, own);
            for to in peers {
                let pair =
                    match routes {
                        Some(routes) => table.add(routes.between(own, to).iter().map(|route| {
                            (route.links.iter().map(|&link| link as u32).collect(), route.weight)
                        })),
                        None => {
                            let found =
                                search.to(to).ok_or_else(|| RouteFault::Many(self.not_joined(own, to)))?;
                            if self.folding.folds() && !found.is_only() {
                                return Err(RouteFault::NotOnly);
                            }
                            let classes = found.links().iter().map(|&link| self.folding.link_class(link));
                            table.add([(classes.collect(), 1)])
                        }
                    };
                pairs.insert((class, to), pair);
            }
        }
        drop(lanes);
        (self.table, self.pairs) = (table, pairs);
        Ok(())
    }

    fn not_joined(&self, from_rank: Rank, to_rank: Rank) -> ManyError {
        let name = |rank: Rank| self.topology.name(self.topology.node(rank)).to_owned();
        let algorithm = self.algorithm.clone();
        let (from, to) = (name(from_rank), name(to_rank));
        ManyError::Select(SelectError::NotJoined { algorithm, from, from_rank, to, to_rank })
    }

    fn too_much(&self, most: u64, what: &'static str) -> ManyError {
        ManyError::TooMuch { algorithm: self.algorithm.clone(), ranks: self.topology.ranks(), most, what }
    }

    /// The algorithm.
    #[must_use]
    pub fn algorithm(&self) -> &Algorithm {
        &self.algorithm
    }

    /// How many ranks are carried out; the others do what one of these does.
    #[must_use]
    pub fn carried_out(&self) -> u32 {
        self.folding.carried_out().len() as u32
    }

    /// The links that are carried out: bandwidth and latency.
    fn links(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let link = |&place: &u32| {
            let link = &self.topology.links()[place as usize];
            (link.bytes_per_s, link.latency_ns)
        };
        self.folding.links().iter().map(link)
    }

    /// The time by the cost model for so many bytes a part.
    #[must_use]
    pub fn price(&self, part_bytes: u64) -> Duration {
        let column = self.proof.family().map_or_else(|| self.proof.schedule(), |family| family.column());
        let mut weights = vec![0u64; self.collective.parts(self.topology.ranks()) as usize];
        column.blocks.iter().for_each(|block| weights[block.part as usize] += u64::from(block.weight));
        let bytes = |block: &pleach_schedule::Block| {
            let of_all = u128::from(weights[block.part as usize].max(1));
            (u128::from(part_bytes) * u128::from(block.weight)).div_ceil(of_all) as u64
        };
        let block_bytes: Vec<u64> = column.blocks.iter().map(bytes).collect();
        let parts = u64::from(self.collective.parts(self.topology.ranks()));
        let chunks = match &self.algorithm {
            Algorithm::Packed(Some(trees)) => Some(trees.pacing().chunks(part_bytes.saturating_mul(parts))),
            _ => None,
        };
        let lanes = Lanes::new(&self.proof, &self.folding);
        let cut = Cut::Price { block_bytes: &block_bytes, chunk_bytes: CHUNK_BYTES, chunks };
        let run = Run::new(&lanes, cut, &self.pairs, &self.table, self.links());
        let ended = run.run(&[], u64::MAX).unwrap_or_else(|_| unreachable!("the schedule is proved to end"));
        Duration::from_nanos(ended.at_ns().max(ended.links_ns()))
    }

    /// Carries the schedule out for so many bytes a part: the time from the first call to the end
    /// on the last rank.
    ///
    /// # Errors
    ///
    /// The plan does not fit the memory of the ranks, or so much happens that it takes too long.
    pub fn time(&self, part_bytes: usize) -> Result<Duration, ManyError> {
        self.time_within(part_bytes, EVENTS_MAX)
    }

    /// The same, with at most so many events on links in place of as many as take a minute.
    ///
    /// # Errors
    ///
    /// Those of [`Prepared::time`].
    pub fn time_within(&self, part_bytes: usize, events_max: u64) -> Result<Duration, ManyError> {
        self.carry_out(part_bytes, &[], events_max)
    }

    /// The same with ranks that make the call so much later than at time zero, in nanoseconds by
    /// rank.
    /// It takes a schedule that is not folded: [`Prepared::unfolded`].
    ///
    /// # Errors
    ///
    /// Those of [`Prepared::time`].
    ///
    /// # Panics
    ///
    /// When ranks are folded, or there is not a delay for each rank.
    pub fn time_with_delays(
        &self,
        part_bytes: usize,
        delays_ns: &[u64],
        events_max: u64,
    ) -> Result<Duration, ManyError> {
        let ranks = self.topology.ranks();
        assert!(
            !self.folding.folds() && delays_ns.len() == ranks as usize,
            "a delay for each of {ranks} ranks"
        );
        self.carry_out(part_bytes, delays_ns, events_max)
    }

    /// The same schedule with every rank carried out.
    ///
    /// # Errors
    ///
    /// Those of [`Prepared::new`].
    pub fn unfolded(mut self) -> Result<Self, ManyError> {
        if self.folding.folds() {
            self.folding = Folding::none(self.topology);
            match self.find_routes(None) {
                Ok(()) => {}
                Err(RouteFault::Many(error)) => return Err(error),
                Err(RouteFault::NotOnly) => unreachable!("nothing is folded"),
            }
        }
        Ok(self)
    }

    fn carry_out(
        &self,
        part_bytes: usize,
        delays_ns: &[u64],
        events_max: u64,
    ) -> Result<Duration, ManyError> {
        let name = self.algorithm.to_string();
        let program = match &self.algorithm {
            Algorithm::Packed(Some(trees)) => Program::paced(&self.proof, 0, &name, *trees.pacing()),
            _ => Program::new(&self.proof, 0, &name),
        };
        let counts = Counts::Each(part_bytes);
        let (data_type, op) = (DataType::U8, ReduceOp::Sum);
        let descriptor =
            Descriptor { collective: self.collective, amount: counts.amount(), data_type, op, tag: 0 };
        let plan = Plan::new(Arc::new(program.with_all_blocks(&self.proof)), descriptor, counts)?;
        let blocks = 0..plan.blocks();
        let length = |&block: &u32| {
            let chunks = plan.block_chunks(block);
            (chunks, plan.block_chunk_bytes(block, chunks - 1))
        };
        let of_block = self.folding.folds().then(|| blocks.max_by_key(length)).flatten();
        let lanes = Lanes::new(&self.proof, &self.folding);
        let cut = Cut::Plan { plan: &plan, of_block };
        let run = Run::new(&lanes, cut, &self.pairs, &self.table, self.links());
        let (algorithm, ranks) = (self.algorithm.clone(), self.topology.ranks());
        match run.run(delays_ns, events_max) {
            Ok(ended) => Ok(Duration::from_nanos(ended.at_ns())),
            Err(Unended::TooMuch) => Err(self.too_much(events_max, "events on links")),
            Err(Unended::Stuck) => Err(ManyError::Stuck { algorithm, ranks }),
        }
    }
}

/// The proof of a schedule by puts: of a family where it is one.
fn proof(collective: Collective, algorithm: &Algorithm, ranks: u32) -> Result<Proof, ManyError> {
    let wrong = |violation: Violation| ManyError::Violation(Arc::new(violation));
    if let Some(family) = family(collective, algorithm, ranks, Access::Put)? {
        return verify_family(family).map_err(wrong);
    }
    let has_block_for_each_rank = matches!(
        collective,
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter | Collective::AllToAll
    );
    let has_few_blocks =
        matches!(algorithm, Algorithm::DoubleTree | Algorithm::Chain | Algorithm::RecursiveDoubling);
    if ranks > WHOLE_RANKS_MAX && has_block_for_each_rank && !has_few_blocks {
        return Err(ManyError::NoFamily { algorithm: algorithm.clone(), ranks });
    }
    verify(generate(collective, algorithm, ranks, Access::Put)?).map_err(wrong)
}
