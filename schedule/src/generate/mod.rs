//! Generators: algorithms that make a [`Schedule`].
//!
//! Each algorithm is one file, and its module states its cost. No generator is trusted:
//! [`verify`](crate::verify::verify) proves the schedules and shares no code with the generators.
//! [`generate`] is the entry; [`Algorithm`] names the algorithms, and [`Access`] says how a rank
//! reaches its peers.
//!
//! **Rules of all generators:**
//!
//! * A private input or output is touched by its own rank alone.
//! * The shared output of a peer is written only after a signal of that peer in the same chunk. By
//!   then the caller's old data have been read (output may be input), and the result of the chunk a
//!   window before has been taken away.
//! * A block is reduced in one order only, so all ranks end with the same bits.
//! * No signal is sent that the flow of data already implies.
//!
//! A *put* has read its source when its signal has arrived. Puts read `Input` and `Output` directly
//! if nothing else would have to be written; the executor stages memory that is not registered.

mod algorithm;
mod chain;
mod direct;
mod double_tree;
pub mod eager;
mod error;
mod exchange;
mod family;
mod grid;
mod grid_shape;
mod grid_staged;
#[cfg(test)]
mod grid_tests;
mod halving_doubling;
mod hierarchical;
#[cfg(test)]
mod interpreter;
pub mod packed;
mod pairwise;
mod recursive_doubling;
mod ring;
mod variant;

pub use algorithm::{
    ALL_TO_ALL_RANKS_MAX, Algorithm, DIRECT_RANKS_MAX, EXCHANGE_RANKS_MAX, RANKS_MAX, check, generate,
};
pub use error::GenerateError;
pub use family::{FAMILY_RANKS_MAX, family};
pub use grid_shape::{GRID_DIMENSIONS_MAX, GridShape};
pub use variant::Variant;

use std::collections::VecDeque;
use std::fmt;

use pleach_vocabulary::{Collective, Rank};

use crate::hosts::HostMap;
use crate::{Block, BlockId, Lane, Op, Part, Place, Schedule, SignalSlot, Step, StepId};

/// How a rank reaches its peers' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// By puts alone.
    Put,
    /// By reading and writing the memory in place: a reduction takes one pass, and signals carry no
    /// data.
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
    /// All ranks in the same way.
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

/// The only part in one piece.
fn one_block() -> Vec<Block> {
    vec![Block { part: 0, weight: 1 }]
}

/// A block for each part.
fn block_for_each_part(collective: Collective, ranks: u32) -> Vec<Block> {
    (0..collective.parts(ranks)).map(|part| Block { part, weight: 1 }).collect()
}

/// The lanes of every rank, sorted by the time at which the rank turns to them. Lanes of the same
/// time keep their order.
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

/// The target of a delivery: a part of a peer, and the signal slot that reports the delivery.
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

    /// Signals a peer, once the given steps are complete.
    fn signal(&mut self, to: Rank, signal_slot: SignalSlot, after: &[StepId]) -> StepId {
        self.push(Op::Signal { to, signal_slot }, after.iter().map(|&step| (step, 0)).collect())
    }

    /// Waits for a signal of a peer.
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

    /// Combines places, keeps the result in parts of this rank's memory, and delivers it to peers.
    /// Mapped peers get it in the same pass. The others get it by puts from `staging`, or from the
    /// only source, which needs no pass. Returns the step that reads the sources, or the first such
    /// step.
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

    /// Makes a step wait for another step of some chunks earlier.
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

    /// The steps that must be complete before a step that reads `reads` and writes `writes`.
    /// Forgets the reads and writes of parts that the new step overwrites.
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

/// Whether a copy between a part and its shared window, which writes `written`, may overwrite
/// `other`. The two parts of the copy are then different memory.
fn window_copy_clash(written: Part, other: Part) -> bool {
    written == Part::Output && other == Part::Input
}

/// The ranks that take part in exchanges among a power of two, and the proxies of the others.
struct PowerOfTwoGroup {
    ranks: u32,
    participants: u32,
}

impl PowerOfTwoGroup {
    fn new(ranks: u32) -> Self {
        Self { ranks, participants: 1 << ranks.ilog2() }
    }

    fn others(&self) -> u32 {
        self.ranks - self.participants
    }

    /// The proxy of a rank: itself, or its successor.
    fn proxy(&self, rank: Rank) -> Rank {
        if rank < 2 * self.others() { rank | 1 } else { rank }
    }

    /// The number of a participant.
    fn number(&self, rank: Rank) -> u32 {
        if rank < 2 * self.others() { rank / 2 } else { rank - self.others() }
    }

    /// The participant of this number.
    fn rank(&self, number: u32) -> Rank {
        if number < self.others() { 2 * number + 1 } else { number + self.others() }
    }

    /// The rank of which a participant is the proxy.
    fn represented(&self, participant: Rank) -> Option<Rank> {
        (participant < 2 * self.others()).then(|| participant - 1)
    }
}

// Collectives along trees, one tree a block: the form that most algorithms take.
//
// Contributions go up a tree to its root, results go down a tree. An algorithm only adds the shape:
// a ring is a chain for each block, halving and doubling is a binomial tree, and a grid is a tree
// with as many levels as dimensions.
//
// * **Up and down** (all-reduce): where both trees are the same, nothing but data is sent. A rank
//   has the result of a chunk only when all ranks have used its contribution, so the place of the
//   contribution is free. The output of a rank is written only after its contribution. In a ring,
//   the parent on the way down is not the parent on the way up, and has heard nothing of this rank.
//   So each edge has one more signal a chunk, sent when the chunk begins.
// * **Up alone** (reduce, reduce-scatter), **down alone** (broadcast, all-gather): each edge has
//   one more signal a chunk. With puts, the receiver signals that it is ready. With mappings, the
//   reader signals that it has read.
//
// With puts, a contribution goes to a slot of the parent, which combines all contributions in one
// pass. With mappings, the parent reads the children's partial results in place. An all-reduce
// writes results down, all other collectives read them. Each edge has puts or mappings by itself.

/// A contribution has arrived, or may be read.
const PARTIAL: SignalSlot = SignalSlot(0);
/// The result has arrived, or may be read.
const RESULT: SignalSlot = SignalSlot(1);
/// The receiver is ready for data, or has read them.
const READY: SignalSlot = SignalSlot(2);
/// The partial result of a rank for its parent.
const SUM: Part = Part::Scratch(0);

/// A rooted tree over all ranks.
struct Tree {
    parents: Vec<Option<Rank>>,
    /// The children of each rank, in the order in which they are ready to contribute.
    children: Vec<Vec<Rank>>,
    slots: Vec<u16>,
}

impl Tree {
    /// A tree from its edges, child and parent. The children of a rank contribute in the order of
    /// their edges.
    fn new(ranks: u32, edges: impl IntoIterator<Item = (Rank, Rank)>) -> Self {
        let mut tree = Self {
            parents: vec![None; ranks as usize],
            children: vec![Vec::new(); ranks as usize],
            slots: vec![0; ranks as usize],
        };
        for (child, parent) in edges {
            debug_assert!(tree.parents[child as usize].is_none(), "rank {child} has two parents");
            tree.parents[child as usize] = Some(parent);
            let siblings = &mut tree.children[parent as usize];
            tree.slots[child as usize] = siblings.len() as u16;
            siblings.push(child);
        }
        tree
    }

    /// All ranks are children of the root, in their order from the rank after the root on.
    fn star(ranks: u32, root: Rank) -> Self {
        Self::new(ranks, (1..ranks).map(|lane_order| ((root + lane_order) % ranks, root)))
    }

    /// A binomial tree. Ranks are numbered from the root on, which is number 0. The parent of a
    /// number is the number without its lowest bit.
    fn binomial(ranks: u32, root: Rank) -> Self {
        let rank = |number: u32| (root + number) % ranks;
        Self::new(ranks, (1..ranks).map(|number| (rank(number), rank(number & (number - 1)))))
    }

    /// A chain: each rank is the parent of the rank after it.
    fn chain_after(ranks: u32, root: Rank) -> Self {
        Self::new(ranks, (1..ranks).map(|hop| ((root + hop) % ranks, (root + hop - 1) % ranks)))
    }

    /// A chain: each rank is the parent of the rank before it.
    fn chain_before(ranks: u32, root: Rank) -> Self {
        Self::new(
            ranks,
            (1..ranks).map(|hop| ((root + ranks - hop) % ranks, (root + ranks - hop + 1) % ranks)),
        )
    }

    /// The longest path from the root to a leaf, in edges.
    fn depth(&self) -> u32 {
        let roots = self.parents.iter().enumerate().filter(|(_, parent)| parent.is_none());
        let mut queue: VecDeque<(Rank, u32)> = roots.map(|(rank, _)| (rank as Rank, 0)).collect();
        let mut deepest = 0;
        while let Some((rank, depth)) = queue.pop_front() {
            deepest = depth;
            queue.extend(self.children[rank as usize].iter().map(|&child| (child, depth + 1)));
        }
        deepest
    }

    fn parent(&self, rank: Rank) -> Option<Rank> {
        self.parents[rank as usize]
    }

    fn children(&self, rank: Rank) -> &[Rank] {
        &self.children[rank as usize]
    }

    /// A rank's place among its parent's children.
    fn slot(&self, rank: Rank) -> u16 {
        self.slots[rank as usize]
    }
}

/// The directions in which data go, with the tree of each.
#[derive(Clone, Copy)]
enum Flow<'a> {
    /// Contributions go to the root of the first tree. The result goes down the second tree, which
    /// has the same root.
    UpAndDown(&'a Tree, &'a Tree),
    /// Contributions go to the root.
    Up(&'a Tree),
    /// The root's input goes to all ranks.
    Down(&'a Tree),
}

/// The lanes that a generator makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cover {
    /// All: the whole schedule.
    All,
    /// Those of block 0, or those of rank 0 where there is one block and all ranks do the same: a
    /// column, of which a [`family`](fn@family) makes all others.
    First,
}

impl Cover {
    /// The covered ones of so many blocks.
    fn of(self, blocks: u32) -> std::ops::Range<BlockId> {
        match self {
            Self::All => 0..blocks,
            Self::First => 0..blocks.min(1),
        }
    }
}

/// The trees of a block.
struct TreePair {
    up: Tree,
    /// The tree for the way down, if it is not `up`.
    down: Option<Tree>,
}

impl TreePair {
    /// The same tree in both directions.
    fn both(tree: Tree) -> Self {
        Self { up: tree, down: None }
    }

    /// The longest path up and down again, in edges.
    fn round_trip(&self) -> u32 {
        self.up.depth() + self.down.as_ref().unwrap_or(&self.up).depth()
    }
}

/// The parts of a schedule along trees.
struct TreeSchedule<'a> {
    collective: Collective,
    ranks: u32,
    links: PeerAccess<'a>,
    window: u32,
    blocks: Vec<Block>,
    /// The trees of a block.
    shape: &'a dyn Fn(BlockId) -> TreePair,
    /// The time at which a rank turns to a block: the lanes of the rank are sorted by it.
    lane_order: &'a dyn Fn(Rank, BlockId) -> u32,
    cover: Cover,
}

impl TreeSchedule<'_> {
    fn schedule(self) -> Schedule {
        let covered = self.cover.of(self.blocks.len() as u32);
        let mut programs: Vec<Vec<Lane>> =
            (0..self.ranks).map(|_| Vec::with_capacity(covered.len())).collect();
        for block in covered {
            let shape = (self.shape)(block);
            let (up, down) = (&shape.up, shape.down.as_ref().unwrap_or(&shape.up));
            let flow = match self.collective {
                Collective::AllReduce => Flow::UpAndDown(up, down),
                collective if collective.reduces() => Flow::Up(up),
                _ => Flow::Down(down),
            };
            for (rank, lanes) in programs.iter_mut().enumerate() {
                lanes.extend(lane(flow, self.links, rank as Rank, block));
            }
        }
        for (rank, lanes) in programs.iter_mut().enumerate() {
            lanes.sort_by_key(|lane| (self.lane_order)(rank as Rank, lane.block));
            lanes.shrink_to_fit();
        }
        let Self { collective, window, blocks, .. } = self;
        Schedule { collective, window, single_chunk: false, blocks, programs }
    }
}

/// A rank's lane for a block.
fn lane(flow: Flow<'_>, links: PeerAccess<'_>, rank: Rank, block: BlockId) -> Option<Lane> {
    let mut lane = Program::new(links, rank, block);
    match flow {
        Flow::UpAndDown(above, below) => all_reduce(&mut lane, above, below, rank),
        Flow::Up(tree) => up(&mut lane, tree, rank),
        Flow::Down(tree) => down(&mut lane, tree, rank),
    }
    lane.finish()
}

/// The children that a rank reaches with this access.
fn children_reached_by<'a>(
    lane: &Program<'_>,
    tree: &'a Tree,
    rank: Rank,
    access: Access,
) -> impl DoubleEndedIterator<Item = Rank> + use<'a> {
    let children: Vec<Rank> =
        tree.children(rank).iter().copied().filter(|&child| lane.access(child) == access).collect();
    children.into_iter()
}

/// The places of the contributions of a rank and its children, in rank order. So all star trees
/// combine every block in the same order.
fn contributions(lane: &Program<'_>, tree: &Tree, rank: Rank) -> Vec<Place> {
    let children = tree.children(rank);
    let mut places = Vec::with_capacity(children.len() + 1);
    places.push((rank, Place { rank, part: Part::Input }));
    for (slot, &child) in children.iter().enumerate() {
        let place = match lane.access(child) {
            Access::Put => Place { rank, part: Part::Scratch(slot as u16) },
            Access::Mapped if tree.children(child).is_empty() => {
                Place { rank: child, part: Part::SharedInput }
            }
            Access::Mapped => Place { rank: child, part: SUM },
        };
        places.push((child, place));
    }
    places.sort_unstable_by_key(|&(contributor, _)| contributor);
    places.into_iter().map(|(_, place)| place).collect()
}

fn all_reduce(lane: &mut Program<'_>, up: &Tree, down: &Tree, rank: Rank) {
    let is_stranger = |child: Rank, above: Rank| up.parent(child) != Some(above);
    if let Some(above) = down.parent(rank).filter(|above| is_stranger(rank, *above)) {
        lane.signal(above, READY, &[]);
    }
    for &child in up.children(rank) {
        lane.wait(child, PARTIAL);
    }
    let below: Vec<Target> = down
        .children(rank)
        .iter()
        .rev()
        .map(|&rank| Target { rank, part: Part::SharedOutput, signal_slot: RESULT })
        .collect();
    let meet = |lane: &mut Program<'_>| {
        for &child in down.children(rank).iter().filter(|child| is_stranger(**child, rank)) {
            lane.wait(child, READY);
        }
    };
    let Some(parent) = up.parent(rank) else {
        meet(lane);
        let from = contributions(lane, up, rank);
        lane.deliver_places(from, &[Part::Output], Part::SharedOutput, &below);
        return;
    };
    contribute(lane, up, rank, parent);
    if let Some(above) = down.parent(rank) {
        lane.wait(above, RESULT);
    }
    meet(lane);
    if below.is_empty() {
        lane.copy(Part::SharedOutput, Part::Output);
    } else {
        lane.deliver(&[Part::SharedOutput], &[Part::Output], Part::SharedOutput, &below);
    }
}

/// Gives the parent the contribution of this rank and of all ranks below it. The contribution is
/// put, or left where the parent reads it. Returns the step that reads the children's
/// contributions.
fn contribute(lane: &mut Program<'_>, tree: &Tree, rank: Rank, parent: Rank) -> StepId {
    let from = contributions(lane, tree, rank);
    match lane.access(parent) {
        Access::Put => {
            let slot = Part::Scratch(tree.slot(rank));
            lane.deliver_places(from, &[], SUM, &[Target { rank: parent, part: slot, signal_slot: PARTIAL }])
        }
        Access::Mapped => {
            let shared = if from.len() == 1 { Part::SharedInput } else { SUM };
            let step = lane.reduce(from, vec![lane.own(shared)]);
            lane.signal(parent, PARTIAL, &[step]);
            step
        }
    }
}

fn up(lane: &mut Program<'_>, tree: &Tree, rank: Rank) {
    for child in children_reached_by(lane, tree, rank, Access::Put) {
        lane.signal(child, READY, &[]);
    }
    for &child in tree.children(rank) {
        lane.wait(child, PARTIAL);
    }
    let parent = tree.parent(rank).map(|parent| (parent, lane.access(parent)));
    let step = match parent {
        Some((parent, access)) => {
            if access == Access::Put {
                lane.wait(parent, READY);
            }
            contribute(lane, tree, rank, parent)
        }
        None => lane.reduce(contributions(lane, tree, rank), vec![lane.own(Part::Output)]),
    };
    for child in children_reached_by(lane, tree, rank, Access::Mapped) {
        lane.signal(child, READY, &[step]);
    }
    if let Some((parent, Access::Mapped)) = parent {
        lane.wait(parent, READY);
    }
}

fn down(lane: &mut Program<'_>, tree: &Tree, rank: Rank) {
    let children = tree.children(rank);
    let is_read = children_reached_by(lane, tree, rank, Access::Mapped).next().is_some();
    let parent = tree.parent(rank).map(|parent| (parent, lane.access(parent)));
    let (source, readable) = match parent {
        Some((parent, Access::Put)) => {
            lane.signal(parent, READY, &[]);
            lane.wait(parent, RESULT);
            (Part::SharedOutput, None)
        }
        Some((parent, Access::Mapped)) => {
            let part = if tree.parent(parent).is_none() { Part::SharedInput } else { Part::SharedOutput };
            lane.wait(parent, RESULT);
            let mut into = vec![lane.own(Part::Output)];
            if !children.is_empty() {
                into.push(lane.own(Part::SharedOutput));
            }
            (Part::SharedOutput, Some(lane.reduce(vec![Place { rank: parent, part }], into)))
        }
        None => (Part::Input, is_read.then(|| lane.copy(Part::Input, Part::SharedInput))),
    };
    for child in children_reached_by(lane, tree, rank, Access::Mapped).rev() {
        lane.signal(child, RESULT, readable.as_slice());
    }
    if let Some((parent, Access::Mapped)) = parent {
        lane.signal(parent, READY, readable.as_slice());
    }
    for child in children_reached_by(lane, tree, rank, Access::Put).rev() {
        lane.wait(child, READY);
        lane.put(source, Target { rank: child, part: Part::SharedOutput, signal_slot: RESULT });
    }
    match parent {
        Some((_, Access::Put)) => {
            lane.copy(source, Part::Output);
        }
        None => {
            lane.copy(source, Part::Output);
        }
        Some((_, Access::Mapped)) => {}
    }
    for child in children_reached_by(lane, tree, rank, Access::Mapped) {
        lane.wait(child, READY);
    }
}
