//! Generators: algorithms that make a [`Schedule`].
//!
//! Each algorithm is one file, and its module states its cost. No generator is trusted:
//! [`verify`](crate::verify::verify) proves the schedules and shares no code with the generators.
//! [`generate`] is the entry; [`Algorithm`] names the algorithms, and [`Access`] says how a rank
//! reaches its peers.
//!
//! **Rules of all generators:** a private input or output is touched by its own rank alone. The
//! shared output of a peer is written only after a signal of that peer in the same chunk, so that
//! the caller's old data have been read (output may be input) and the result of the chunk a window
//! before has been taken away. A block is reduced in one order only, so all ranks end with the same
//! bits. No signal is sent that the flow of data already implies.
//!
//! A *put* has read its source when its signal has arrived. Puts read `Input` and `Output` directly
//! if nothing else would have to be written; the executor stages memory that is not registered.

mod chain;
mod direct;
mod double_tree;
pub mod eager;
mod error;
mod exchange;
mod grid;
mod grid_staged;
mod halving_doubling;
mod hierarchical;
#[cfg(test)]
mod interpreter;
pub mod packed;
mod pairwise;
mod recursive_doubling;
mod ring;
mod tree;
mod variant;

pub use error::GenerateError;
pub use variant::Variant;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use pleach_vocabulary::{Collective, Rank, UnknownName};

use crate::hosts::HostMap;
use crate::rank_space::RankSpace;
use crate::{Block, BlockId, Lane, Op, Part, Place, Schedule, SignalSlot, Step, StepId};
use packed::PackedTrees;

/// How a rank reaches its peers' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// By puts alone.
    Put,
    /// By reading and writing it in place: a reduction takes one pass, and signals carry no data.
    Mapped,
}

impl fmt::Display for Access {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Put => "put",
            Self::Mapped => "mapped",
        })
    }
}

/// How each rank reaches each other.
#[derive(Clone, Copy)]
enum PeerAccess<'a> {
    /// All in the same way.
    All(Access),
    /// Neighbours in this way, ranks of different hosts by puts.
    Inside(Access, &'a HostMap),
}

impl From<Access> for PeerAccess<'_> {
    fn from(access: Access) -> Self {
        Self::All(access)
    }
}

impl PeerAccess<'_> {
    fn between(self, rank: Rank, peer: Rank) -> Access {
        match self {
            Self::All(access) => access,
            Self::Inside(access, hosts) if hosts.are_neighbours(rank, peer) => access,
            Self::Inside(..) => Access::Put,
        }
    }
}

/// Most dimensions of a grid.
pub const GRID_DIMENSIONS_MAX: usize = 16;

/// How a collective is carried out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank with every other, in one hop.
    Direct,
    /// Straight to the scratch of those who get it, without a word of theirs before: for few bytes.
    Eager,
    /// The same along a binomial tree.
    EagerTree,
    /// Everything to everybody, in one round.
    Exchange,
    /// Exchanges of everything with the rank at distance 1, 2, 4, …
    RecursiveDoubling,
    /// Exchanges of halves, quarters, … and back.
    HalvingDoubling,
    /// Around a ring.
    Ring,
    /// Two binary trees, each for half of the data; an inner rank of one is a leaf of the other.
    DoubleTree,
    /// Along a chain.
    Chain,
    /// Along the lines of a grid of these extents: reduce-scatter dimension after dimension,
    /// all-gather back.
    Grid(Vec<u32>),
    /// Along the lines of a grid: a whole all-reduce in each dimension, one after the other.
    GridStaged(Vec<u32>),
    /// Inside every host, and across hosts by one rank of each for a share of the data. Its
    /// mappings stay inside hosts. `None`: the hosts of the group that carries it out.
    Hierarchical(Option<HostMap>),
    /// Along the trees of a packing, which are for one collective. `None`: what is packed for the
    /// topology of the group that carries it out.
    Packed(Option<Arc<PackedTrees>>),
}

impl Algorithm {
    /// Those whose names may stand without extents.
    const PLAIN: [Self; 11] = [
        Self::Direct,
        Self::Eager,
        Self::EagerTree,
        Self::Exchange,
        Self::RecursiveDoubling,
        Self::HalvingDoubling,
        Self::Ring,
        Self::DoubleTree,
        Self::Chain,
        Self::Hierarchical(None),
        Self::Packed(None),
    ];

    /// The names of the algorithms that carry out a collective. A name that ends in a colon wants
    /// extents: `grid:2x3`.
    #[must_use]
    pub fn names(collective: Collective) -> &'static [&'static str] {
        match collective {
            Collective::AllReduce => &[
                "direct",
                "exchange",
                "recursive-doubling",
                "halving-doubling",
                "ring",
                "double-tree",
                "grid:AxB",
                "grid-staged:AxB",
                "hierarchical:HxR",
                "packed",
            ],
            Collective::Reduce { .. } | Collective::Broadcast { .. } => {
                &["direct", "eager", "eager-tree", "double-tree", "chain", "hierarchical:HxR", "packed"]
            }
            Collective::AllGather | Collective::ReduceScatter => {
                &["direct", "eager", "ring", "halving-doubling", "grid:AxB", "hierarchical:HxR", "packed"]
            }
            Collective::Barrier => &["recursive-doubling", "hierarchical:HxR"],
            Collective::Gather { .. } | Collective::Scatter { .. } => &["direct", "eager", "packed"],
            Collective::AllToAll | Collective::SendRecv { .. } => &["direct", "eager"],
        }
    }

    /// The longest part of the collective that it carries between `ranks`, in bytes, where
    /// there is a limit.
    #[must_use]
    pub fn part_bytes_max(&self, collective: Collective, ranks: u32) -> Option<u64> {
        matches!(self, Self::Eager | Self::EagerTree).then(|| eager::part_bytes_max(collective, ranks))
    }

    /// Whether it can carry out the collective.
    #[must_use]
    pub fn carries_out(&self, collective: Collective) -> bool {
        Self::names(collective).iter().any(|name| name.split(':').next() == Some(self.family()))
    }

    /// The algorithm of this name, which must be able to carry out the collective.
    ///
    /// # Errors
    ///
    /// Lists the names that the collective knows.
    pub fn named(name: &str, collective: Collective) -> Result<Self, UnknownName> {
        let unknown = || UnknownName {
            what: "algorithm for this collective",
            name: name.to_owned(),
            known: Self::names(collective).join(" "),
        };
        let algorithm: Self = name.parse().map_err(|_| unknown())?;
        if algorithm.carries_out(collective) { Ok(algorithm) } else { Err(unknown()) }
    }

    /// Its name without extents.
    #[must_use]
    pub fn family(&self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Eager => "eager",
            Self::EagerTree => "eager-tree",
            Self::Exchange => "exchange",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::HalvingDoubling => "halving-doubling",
            Self::Ring => "ring",
            Self::DoubleTree => "double-tree",
            Self::Chain => "chain",
            Self::Grid(_) => "grid",
            Self::GridStaged(_) => "grid-staged",
            Self::Hierarchical(_) => "hierarchical",
            Self::Packed(_) => "packed",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.family())?;
        if let Self::Grid(extents) | Self::GridStaged(extents) = self {
            for (index, extent) in extents.iter().enumerate() {
                write!(formatter, "{}{extent}", if index == 0 { ':' } else { 'x' })?;
            }
        }
        if let Self::Hierarchical(Some(hosts)) = self {
            write!(formatter, ":{hosts}")?;
        }
        if let Self::Packed(Some(trees)) = self {
            write!(formatter, ":{:08x}", trees.digest() >> 32)?;
        }
        Ok(())
    }
}

impl FromStr for Algorithm {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let unknown = || {
            UnknownName {
            what: "algorithm",
            name: name.to_owned(),
            known:
                "direct eager eager-tree exchange recursive-doubling halving-doubling ring double-tree chain grid:AxB grid-staged:AxB hierarchical:HxR packed"
                    .to_owned(),
        }
        };
        if let Some(plain) = Self::PLAIN.into_iter().find(|plain| plain.family() == name) {
            return Ok(plain);
        }
        let (family, extents) = name.split_once(':').ok_or_else(unknown)?;
        if family == "hierarchical" {
            return Ok(Self::Hierarchical(Some(extents.parse().map_err(|_| unknown())?)));
        }
        let extents = extents
            .split('x')
            .map(|extent| extent.parse().ok().filter(|&extent: &u32| extent > 0))
            .collect::<Option<Vec<u32>>>()
            .filter(|extents| extents.len() <= GRID_DIMENSIONS_MAX)
            .ok_or_else(unknown)?;
        match family {
            "grid" => Ok(Self::Grid(extents)),
            "grid-staged" => Ok(Self::GridStaged(extents)),
            _ => Err(unknown()),
        }
    }
}

/// Most ranks of a schedule.
pub const RANKS_MAX: u32 = 4096;
/// Most ranks of an algorithm in which every rank talks to every other.
pub const DIRECT_RANKS_MAX: u32 = 1024;
/// Most ranks of an exchange, in which each sends everything to all others; it is for ranks that
/// share a host.
pub const EXCHANGE_RANKS_MAX: u32 = 64;
/// Most ranks of an all-to-all, which has a block for every two of them.
pub const ALL_TO_ALL_RANKS_MAX: u32 = 256;

/// Makes the schedule by which `ranks` ranks carry out a collective.
pub fn generate(
    collective: Collective,
    algorithm: &Algorithm,
    ranks: u32,
    access: Access,
) -> Result<Schedule, GenerateError> {
    let hosts = check(collective, algorithm, ranks)?;
    if ranks == 1 || matches!(collective, Collective::SendRecv { from, to } if from == to) {
        return Ok(single_rank(collective, ranks, access));
    }
    let space = |extents: &[u32]| {
        RankSpace::row_major(0, extents).filter(|space| space.size() == ranks).ok_or_else(|| {
            let places =
                extents.iter().fold(1u64, |places, &extent| places.saturating_mul(u64::from(extent)));
            GenerateError::GridDoesNotFit { algorithm: algorithm.clone(), places, ranks }
        })
    };
    Ok(match algorithm {
        Algorithm::Direct => direct::schedule(collective, ranks, access),
        Algorithm::Eager => eager::schedule(collective, ranks, access, &eager::EagerTree::Star),
        Algorithm::EagerTree => eager::schedule(collective, ranks, access, &eager::EagerTree::Binomial),
        Algorithm::Exchange => exchange::schedule(collective, ranks, access),
        Algorithm::RecursiveDoubling => recursive_doubling::schedule(collective, ranks, access),
        Algorithm::HalvingDoubling => halving_doubling::schedule(collective, ranks, access),
        Algorithm::Ring => ring::schedule(collective, ranks, access),
        Algorithm::DoubleTree => double_tree::schedule(collective, ranks, access),
        Algorithm::Chain => chain::schedule(collective, ranks, access),
        Algorithm::Grid(extents) => grid::schedule(collective, &space(extents)?, access),
        Algorithm::GridStaged(extents) => grid_staged::schedule(&space(extents)?, access),
        Algorithm::Hierarchical(_) => hierarchical::schedule(collective, &hosts, access),
        Algorithm::Packed(Some(trees)) => packed::schedule(trees, access),
        Algorithm::Packed(None) => return Err(GenerateError::NoTopology { ranks }),
    })
}

/// Whether there is such a schedule; for an algorithm of hosts, which rank it has where (else all
/// on one).
pub fn check(collective: Collective, algorithm: &Algorithm, ranks: u32) -> Result<HostMap, GenerateError> {
    if ranks == 0 {
        return Err(GenerateError::NoRanks);
    }
    if !algorithm.carries_out(collective) {
        let known = Algorithm::names(collective);
        return Err(GenerateError::WrongCollective { algorithm: algorithm.clone(), collective, known });
    }
    let limit = match collective {
        Collective::AllToAll => ALL_TO_ALL_RANKS_MAX,
        Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter
            if matches!(algorithm, Algorithm::Direct | Algorithm::Eager) =>
        {
            DIRECT_RANKS_MAX
        }
        Collective::AllReduce if *algorithm == Algorithm::Exchange => EXCHANGE_RANKS_MAX,
        _ => RANKS_MAX,
    };
    if ranks > limit {
        return Err(GenerateError::TooManyRanks { algorithm: algorithm.clone(), ranks, limit });
    }
    if let Algorithm::Grid(extents) | Algorithm::GridStaged(extents) = algorithm {
        let places = extents.iter().fold(1u64, |places, &extent| places.saturating_mul(u64::from(extent)));
        if places != u64::from(ranks) {
            return Err(GenerateError::GridDoesNotFit { algorithm: algorithm.clone(), places, ranks });
        }
    }
    match algorithm {
        Algorithm::Packed(None) if ranks > 1 => return Err(GenerateError::NoTopology { ranks }),
        Algorithm::Packed(Some(trees)) if (trees.collective(), trees.ranks()) != (collective, ranks) => {
            return Err(GenerateError::WrongPacking {
                algorithm: algorithm.clone(),
                packed: trees.collective(),
                packed_ranks: trees.ranks(),
                collective,
                ranks,
            });
        }
        _ => {}
    }
    let hosts = match algorithm {
        Algorithm::Hierarchical(hosts) => {
            let places = hosts.as_ref().map_or(0, HostMap::ranks);
            let unfit = || GenerateError::HostsDoNotFit { algorithm: algorithm.clone(), places, ranks };
            hosts.clone().filter(|_| places == ranks).ok_or_else(unfit)?
        }
        _ => HostMap::one(ranks),
    };
    let named = match collective {
        Collective::SendRecv { from, to } => [from, to],
        _ => [collective.root().unwrap_or(0); 2],
    };
    match named.into_iter().find(|&rank| rank >= ranks) {
        Some(rank) => Err(GenerateError::NoSuchRank { rank, collective, ranks }),
        None => Ok(hosts),
    }
}

/// Nobody to talk to: who has input and output copies.
fn single_rank(collective: Collective, ranks: u32, access: Access) -> Schedule {
    use crate::Part::{Input, Output};
    let lanes = |rank| -> Vec<Lane> {
        let mut lane = Program::new(access, rank, 0);
        if !collective.input_parts(rank, ranks).is_empty() {
            lane.copy(Input, Output);
        }
        lane.finish().into_iter().collect()
    };
    Schedule {
        collective,
        window: 1,
        single_chunk: false,
        blocks: one_block(),
        programs: (0..ranks).map(lanes).collect(),
    }
}

/// The only part in one piece.
fn one_block() -> Vec<Block> {
    vec![Block { part: 0, weight: 1 }]
}

/// A block for each part.
fn block_for_each_part(collective: Collective, ranks: u32) -> Vec<Block> {
    (0..collective.parts(ranks)).map(|part| Block { part, weight: 1 }).collect()
}

/// The lanes of every rank, sorted by when it turns to them; of those at once the first comes
/// first.
fn ordered_lanes<T: Ord>(programs: Vec<Vec<(T, Lane)>>) -> Vec<Vec<Lane>> {
    let sorted = |mut lanes: Vec<(T, Lane)>| {
        lanes.sort_by(|(one, _), (other, _)| one.cmp(other));
        lanes.into_iter().map(|(_, lane)| lane).collect()
    };
    programs.into_iter().map(sorted).collect()
}

/// As many blocks as ranks: pieces of the one part, or one block for each part.
fn block_for_each_rank(collective: Collective, ranks: u32) -> Vec<Block> {
    let parts = collective.parts(ranks);
    (0..ranks).map(|block| Block { part: if parts == 1 { 0 } else { block }, weight: 1 }).collect()
}

#[cfg(test)]
mod tests;

// The steps of one lane, with the dependencies between them.
//
// A [`Program`] collects the steps of a rank for one block. It knows which earlier steps still
// read or write a part of this rank's memory, and makes a step depend on the steps that it
// conflicts with. Input, output and their shared windows may all be the same memory, and are
// treated as such.

/// Where something is delivered: a part of a peer, and the signal slot that tells it.
#[derive(Clone, Copy, Debug)]
struct Target {
    rank: Rank,
    part: Part,
    signal_slot: SignalSlot,
}

/// A lane under construction.
struct Program<'a> {
    links: PeerAccess<'a>,
    rank: Rank,
    block: BlockId,
    steps: Vec<Step>,
    reads: Vec<(Part, StepId)>,
    writes: Vec<(Part, StepId)>,
}

impl<'a> Program<'a> {
    fn new(links: impl Into<PeerAccess<'a>>, rank: Rank, block: BlockId) -> Self {
        Self { links: links.into(), rank, block, steps: Vec::new(), reads: Vec::new(), writes: Vec::new() }
    }

    /// The lane; `None` if there is nothing to do.
    fn finish(mut self) -> Option<Lane> {
        self.steps.shrink_to_fit();
        (!self.steps.is_empty()).then_some(Lane { block: self.block, steps: self.steps })
    }

    /// A part of this rank's memory.
    fn own(&self, part: Part) -> Place {
        Place { rank: self.rank, part }
    }

    /// Tells a peer, once the given steps are complete.
    fn signal(&mut self, to: Rank, signal_slot: SignalSlot, after: &[StepId]) -> StepId {
        self.push(Op::Signal { to, signal_slot }, after.iter().map(|&step| (step, 0)).collect())
    }

    /// Waits for a peer.
    fn wait(&mut self, from: Rank, signal_slot: SignalSlot) -> StepId {
        self.push(Op::Wait { from, signal_slot }, Vec::new())
    }

    /// Copies within this rank's memory.
    fn copy(&mut self, src: Part, dst: Part) -> StepId {
        self.reduce(vec![self.own(src)], vec![self.own(dst)])
    }

    /// Combines places into places.
    fn reduce(&mut self, from: Vec<Place>, into: Vec<Place>) -> StepId {
        let own = |places: &[Place]| -> Vec<Part> {
            places.iter().filter(|place| place.rank == self.rank).map(|place| place.part).collect()
        };
        let (reads, writes) = (own(&from), own(&into));
        // A copy between a part and its shared window changes nothing where the two are the same
        // memory.
        let window_copy = matches!(
            (from.as_slice(), into.as_slice()),
            ([src], [dst]) if src.rank == dst.rank && matches!(
                (src.part, dst.part),
                (Part::Input, Part::SharedInput) | (Part::SharedOutput, Part::Output)
            )
        );
        let after = self.conflicts(&reads, &writes, window_copy);
        let step = self.push(Op::Reduce { from, into }, after);
        self.reads.extend(reads.into_iter().map(|part| (part, step)));
        self.writes.extend(writes.into_iter().map(|part| (part, step)));
        step
    }

    /// Puts a part of this rank's memory.
    fn put(&mut self, src: Part, target: Target) -> StepId {
        let after = self.conflicts(&[src], &[], false);
        let Target { rank: to, part: dst, signal_slot } = target;
        let step = self.push(Op::Put { to, src, dst, signal_slot }, after);
        self.reads.push((src, step));
        step
    }

    /// Combines parts of this rank's memory, keeps the result in some of them and delivers it to
    /// peers.
    fn deliver(&mut self, from: &[Part], keep: &[Part], staging: Part, targets: &[Target]) -> StepId {
        let from = from.iter().map(|&part| self.own(part)).collect();
        self.deliver_places(from, keep, staging, targets)
    }

    /// How a peer is reached.
    fn access(&self, peer: Rank) -> Access {
        self.links.between(self.rank, peer)
    }

    /// Combines places, keeps the result in parts of this rank's memory and delivers it to peers:
    /// in one pass to those that are mapped, by puts from `staging` (or from the only source, which
    /// needs no pass at all) to the others. Returns the step that reads the sources, or the first
    /// of them.
    fn deliver_places(
        &mut self,
        from: Vec<Place>,
        keep: &[Part],
        staging: Part,
        targets: &[Target],
    ) -> StepId {
        let first = self.next();
        let mut into: Vec<Place> = keep.iter().map(|&part| self.own(part)).collect();
        let (mapped, put): (Vec<Target>, Vec<Target>) =
            targets.iter().partition(|target| self.access(target.rank) == Access::Mapped);
        into.extend(mapped.iter().map(|target| Place { rank: target.rank, part: target.part }));
        let only = match from.as_slice() {
            [only] if only.rank == self.rank => Some(only.part),
            _ => None,
        };
        if let Some(part) = only {
            for &target in &put {
                self.put(part, target);
            }
        } else if !keep.contains(&staging) && !put.is_empty() {
            into.push(self.own(staging));
        }
        if !into.is_empty() {
            let pass = self.reduce(from, into);
            for target in &mapped {
                self.signal(target.rank, target.signal_slot, &[pass]);
            }
        }
        if only.is_none() {
            for &target in &put {
                self.put(staging, target);
            }
        }
        first
    }

    /// Makes a step wait for another one of some chunks earlier.
    fn after_earlier(&mut self, step: StepId, earlier: StepId, chunks: u32) {
        self.steps[step as usize].after.push((earlier, chunks));
    }

    /// The step of this lane that last wrote a part of this rank's memory, if any did.
    fn last_write(&self, part: Part) -> Option<StepId> {
        self.writes.iter().rev().find(|&&(written, _)| written == part).map(|&(_, step)| step)
    }

    /// The steps of this lane that read a part of this rank's memory.
    fn readers(&self, part: Part) -> Vec<StepId> {
        self.reads.iter().filter(|&&(read, _)| read == part).map(|&(_, step)| step).collect()
    }

    /// The number of the next step.
    fn next(&self) -> StepId {
        self.steps.len() as StepId
    }

    fn push(&mut self, op: Op, after: Vec<(StepId, u32)>) -> StepId {
        let step = self.next();
        self.steps.push(Step { op, after });
        step
    }

    /// The steps that must be complete before one that reads and writes these; forgets what it
    /// overwrites.
    fn conflicts(&mut self, reads: &[Part], writes: &[Part], window_copy: bool) -> Vec<(StepId, u32)> {
        let mut after: Vec<StepId> = Vec::new();
        after.extend(self.writes.iter().filter(|(part, _)| reads.contains(part)).map(|&(_, step)| step));
        for &written in writes {
            let clashes = |part: Part| {
                part == written
                    || if window_copy { window_copy_clash(written, part) } else { may_alias(written, part) }
            };
            for list in [&mut self.reads, &mut self.writes] {
                after.extend(list.iter().filter(|&&(part, _)| clashes(part)).map(|&(_, step)| step));
                list.retain(|&(part, _)| !clashes(part));
            }
        }
        after.sort_unstable();
        after.dedup();
        after.into_iter().map(|step| (step, 0)).collect()
    }
}

/// Whether two different parts may be the same memory.
fn may_alias(one: Part, other: Part) -> bool {
    let callers = |part| !matches!(part, Part::Scratch(_));
    callers(one) && callers(other)
}

/// The same for what a copy out of or into a shared window writes, which is then not the same
/// memory as that window.
fn window_copy_clash(written: Part, other: Part) -> bool {
    written == Part::Output && other == Part::Input
}
