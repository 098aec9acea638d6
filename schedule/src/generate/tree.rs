//! Collectives along trees, one tree a block: the form that most algorithms take.
//!
//! Contributions go up a tree to its root, results go down one. What an algorithm adds is the
//! shape: a ring is a chain for each block, halving and doubling a binomial tree, a grid one of as
//! many levels as dimensions.
//!
//! * **Up and down** (all-reduce): nothing but data is sent where both trees are the same. A rank
//!   has the result of a chunk only when all have done with its contribution, so its place there is
//!   free; and its output is written only after its contribution. Where the rank above on the way
//!   down is another one than on the way up (a ring), it has not heard of this rank otherwise, so
//!   each edge has one more signal a chunk, sent at the chunk's begin.
//! * **Up alone** (reduce, reduce-scatter), **down alone** (broadcast, all-gather): each edge has
//!   one more signal a chunk: by puts the receiver says that it is ready, mapped the reader says
//!   that it has read.
//!
//! By puts a contribution lands in a slot of the parent, which combines all of them in one pass.
//! Mapped, the parent reads the children's partial results where they are; an all-reduce writes
//! results down, everything else reads. Which of the two it is, is a matter of each edge by itself.

use std::collections::VecDeque;

use pleach_vocabulary::{Collective, Rank};

use super::{Access, PeerAccess};
use super::{Program, Target};
use crate::{Block, BlockId, Lane, Part, Place, Schedule, SignalSlot, StepId};

/// A contribution has come, or may be read.
const PARTIAL: SignalSlot = SignalSlot(0);
/// The result has come, or may be read.
const RESULT: SignalSlot = SignalSlot(1);
/// Something may come, or has been read.
const READY: SignalSlot = SignalSlot(2);
/// The partial result of a rank for its parent.
const SUM: Part = Part::Scratch(0);

/// A rooted tree over all ranks.
pub(super) struct Tree {
    parents: Vec<Option<Rank>>,
    /// In the order in which they are ready to contribute.
    children: Vec<Vec<Rank>>,
    slots: Vec<u16>,
}

impl Tree {
    /// A tree from its edges, child and parent; of two children the one whose edge comes first
    /// contributes first.
    pub(super) fn new(ranks: u32, edges: impl IntoIterator<Item = (Rank, Rank)>) -> Self {
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

    /// Everybody below the root, which begins with the rank after it.
    pub(super) fn star(ranks: u32, root: Rank) -> Self {
        Self::new(ranks, (1..ranks).map(|lane_order| ((root + lane_order) % ranks, root)))
    }

    /// Below the root, which is number 0 from there on, each rank with the number that is its own
    /// without its lowest bit.
    pub(super) fn binomial(ranks: u32, root: Rank) -> Self {
        let rank = |number: u32| (root + number) % ranks;
        Self::new(ranks, (1..ranks).map(|number| (rank(number), rank(number & (number - 1)))))
    }

    /// The root, then the rank after it below it, and so on.
    pub(super) fn chain_after(ranks: u32, root: Rank) -> Self {
        Self::new(ranks, (1..ranks).map(|hop| ((root + hop) % ranks, (root + hop - 1) % ranks)))
    }

    /// The root, then the rank before it below it, and so on.
    pub(super) fn chain_before(ranks: u32, root: Rank) -> Self {
        Self::new(
            ranks,
            (1..ranks).map(|hop| ((root + ranks - hop) % ranks, (root + ranks - hop + 1) % ranks)),
        )
    }

    /// The longest way from the root to a leaf, in edges.
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

    pub(super) fn parent(&self, rank: Rank) -> Option<Rank> {
        self.parents[rank as usize]
    }

    pub(super) fn children(&self, rank: Rank) -> &[Rank] {
        &self.children[rank as usize]
    }

    /// A rank's place among its parent's children.
    pub(super) fn slot(&self, rank: Rank) -> u16 {
        self.slots[rank as usize]
    }
}

/// Which ways data go, and along what.
#[derive(Clone, Copy)]
enum Flow<'a> {
    /// Contributions to the root of the first tree, the result down the second one, which has the
    /// same root.
    UpAndDown(&'a Tree, &'a Tree),
    /// Contributions to the root.
    Up(&'a Tree),
    /// The root's input to all.
    Down(&'a Tree),
}

/// Which ways the blocks of a collective go.
pub(super) struct TreePair {
    pub(super) up: Tree,
    /// When it is not the same.
    pub(super) down: Option<Tree>,
}

impl TreePair {
    /// The same tree both ways.
    pub(super) fn both(tree: Tree) -> Self {
        Self { up: tree, down: None }
    }

    /// The longest way up and down again, in edges.
    pub(super) fn round_trip(&self) -> u32 {
        self.up.depth() + self.down.as_ref().unwrap_or(&self.up).depth()
    }
}

/// The parts of a schedule along trees.
pub(super) struct TreeSchedule<'a> {
    pub(super) collective: Collective,
    pub(super) ranks: u32,
    pub(super) links: PeerAccess<'a>,
    pub(super) window: u32,
    pub(super) blocks: Vec<Block>,
    /// The trees of a block.
    pub(super) shape: &'a dyn Fn(BlockId) -> TreePair,
    /// When a rank turns to a block: its lanes are sorted by this.
    pub(super) lane_order: &'a dyn Fn(Rank, BlockId) -> u32,
}

impl TreeSchedule<'_> {
    pub(super) fn schedule(self) -> Schedule {
        let blocks = self.blocks.len();
        let mut programs: Vec<Vec<Lane>> = (0..self.ranks).map(|_| Vec::with_capacity(blocks)).collect();
        for block in 0..blocks as BlockId {
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

/// The children that are reached in this way.
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

/// Where a rank finds the contributions of its children, and its own: in rank order, so that trees
/// which are stars combine every block in the same order.
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

/// Gives the parent this rank's contribution and that of all below it: puts it, or leaves it where
/// the parent reads it. Returns the step that reads what the children gave.
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
