//! Collectives along trees, one tree a block: the form that most algorithms take.
//!
//! Contributions go up a tree to its root, results go down one. What an algorithm adds is the shape: a ring is a chain
//! for each block, halving and doubling a binomial tree, a grid one of as many levels as dimensions.
//!
//! * **Up and down** (all-reduce): nothing but data is sent where both trees are the same. A rank has the result of a chunk
//!   only when all have done with its contribution, so its place there is free; and its output is written only after its
//!   contribution. Where the rank above on the way down is another one than on the way up (a ring), it has not heard of
//!   this rank otherwise, so each edge has one more notice a chunk, sent at the chunk's begin.
//! * **Up alone** (reduce, reduce-scatter), **down alone** (broadcast, all-gather): each edge has one more notice a
//!   chunk: by puts the receiver says that it is ready, mapped the reader says that it has read.
//!
//! By puts a contribution lands in a slot of the parent, which combines all of them in one pass. Mapped, the parent
//! reads the children's partial results where they are; an all-reduce writes results down, everything else reads.

use std::collections::VecDeque;

use crate::Rank;
use crate::collective::Collective;
use crate::schedule::{Block, BlockId, Cell, Lane, Part, Place, Schedule};

use super::Access;
use super::program::{Program, Target};

/// A contribution has come, or may be read.
const PARTIAL: Cell = Cell(0);
/// The result has come, or may be read.
const RESULT: Cell = Cell(1);
/// Something may come, or has been read.
const READY: Cell = Cell(2);
/// What a rank has combined for its parent.
const SUM: Part = Part::Scratch(0);

/// A rooted tree over all ranks.
pub(super) struct Tree {
    parents: Vec<Option<Rank>>,
    /// In the order in which they are ready to contribute.
    children: Vec<Vec<Rank>>,
    /// A rank's place among its parent's children.
    slots: Vec<u16>,
}

impl Tree {
    /// A tree from its edges, child and parent; of two children the one whose edge comes first contributes first.
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
        Self::new(ranks, (1..ranks).map(|turn| ((root + turn) % ranks, root)))
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

    fn parent(&self, rank: Rank) -> Option<Rank> {
        self.parents[rank as usize]
    }

    fn children(&self, rank: Rank) -> &[Rank] {
        &self.children[rank as usize]
    }
}

/// Which ways data go, and along what.
#[derive(Clone, Copy)]
enum Ways<'a> {
    /// Contributions to the root of the first tree, the result down the second one, which has the same root.
    UpAndDown(&'a Tree, &'a Tree),
    /// Contributions to the root.
    Up(&'a Tree),
    /// The root's input to all.
    Down(&'a Tree),
}

/// Which ways the blocks of a collective go.
pub(super) struct Shape {
    pub(super) up: Tree,
    /// When it is not the same.
    pub(super) down: Option<Tree>,
}

impl Shape {
    /// The same tree both ways.
    pub(super) fn both(tree: Tree) -> Self {
        Self { up: tree, down: None }
    }

    /// The longest way up and down again, in edges.
    pub(super) fn round_trip(&self) -> u32 {
        self.up.depth() + self.down.as_ref().unwrap_or(&self.up).depth()
    }
}

/// What a schedule along trees consists of.
pub(super) struct Forest<'a> {
    pub(super) collective: Collective,
    pub(super) ranks: u32,
    pub(super) access: Access,
    pub(super) window: u32,
    pub(super) blocks: Vec<Block>,
    /// The trees of a block.
    pub(super) shape: &'a dyn Fn(BlockId) -> Shape,
    /// When a rank turns to a block: its lanes are sorted by this.
    pub(super) turn: &'a dyn Fn(Rank, BlockId) -> u32,
}

impl Forest<'_> {
    pub(super) fn schedule(self) -> Schedule {
        let blocks = self.blocks.len();
        let mut programs: Vec<Vec<Lane>> = (0..self.ranks).map(|_| Vec::with_capacity(blocks)).collect();
        for block in 0..blocks as BlockId {
            let shape = (self.shape)(block);
            let (up, down) = (&shape.up, shape.down.as_ref().unwrap_or(&shape.up));
            let ways = match self.collective {
                Collective::AllReduce => Ways::UpAndDown(up, down),
                collective if collective.reduces() => Ways::Up(up),
                _ => Ways::Down(down),
            };
            for (rank, lanes) in programs.iter_mut().enumerate() {
                lanes.extend(lane(ways, self.access, rank as Rank, block));
            }
        }
        for (rank, lanes) in programs.iter_mut().enumerate() {
            lanes.sort_by_key(|lane| (self.turn)(rank as Rank, lane.block));
            lanes.shrink_to_fit();
        }
        let Self { collective, window, blocks, .. } = self;
        Schedule { collective, window, blocks, programs }
    }
}

/// A rank's lane for a block.
fn lane(ways: Ways<'_>, access: Access, rank: Rank, block: BlockId) -> Option<Lane> {
    let mut lane = Program::new(access, rank, block);
    match (ways, access) {
        (Ways::UpAndDown(up, down), _) => all_reduce(&mut lane, up, down, access, rank),
        (Ways::Up(tree), Access::Put) => up_by_puts(&mut lane, tree, rank),
        (Ways::Up(tree), Access::Mapped) => up_mapped(&mut lane, tree, rank),
        (Ways::Down(tree), Access::Put) => down_by_puts(&mut lane, tree, rank),
        (Ways::Down(tree), Access::Mapped) => down_mapped(&mut lane, tree, rank),
    }
    lane.finish()
}

/// Where a rank finds the contributions of its children, and its own: in rank order, so that trees which are stars
/// combine every block in the same order.
fn contributions(tree: &Tree, access: Access, rank: Rank) -> Vec<Place> {
    let children = tree.children(rank);
    let mut places = Vec::with_capacity(children.len() + 1);
    places.push((rank, Place { rank, part: Part::Input }));
    for (slot, &child) in children.iter().enumerate() {
        let place = match access {
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

fn all_reduce(lane: &mut Program, up: &Tree, down: &Tree, access: Access, rank: Rank) {
    let is_stranger = |child: Rank, above: Rank| up.parent(child) != Some(above);
    if let Some(above) = down.parent(rank).filter(|above| is_stranger(rank, *above)) {
        lane.notify(above, READY, &[]);
    }
    for &child in up.children(rank) {
        lane.wait(child, PARTIAL);
    }
    let below: Vec<Target> = down
        .children(rank)
        .iter()
        .rev()
        .map(|&rank| Target { rank, part: Part::SharedOutput, cell: RESULT })
        .collect();
    let meet = |lane: &mut Program| {
        for &child in down.children(rank).iter().filter(|child| is_stranger(**child, rank)) {
            lane.wait(child, READY);
        }
    };
    let Some(parent) = up.parent(rank) else {
        meet(lane);
        lane.deliver_places(contributions(up, access, rank), &[Part::Output], Part::SharedOutput, &below);
        return;
    };
    match access {
        Access::Put => contribute_by_put(lane, up, rank, parent),
        Access::Mapped => {
            share_contribution(lane, up, rank, parent);
        }
    }
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

fn contribute_by_put(lane: &mut Program, tree: &Tree, rank: Rank, parent: Rank) {
    let slot = Part::Scratch(tree.slots[rank as usize]);
    let target = Target { rank: parent, part: slot, cell: PARTIAL };
    lane.deliver_places(contributions(tree, Access::Put, rank), &[], SUM, &[target]);
}

/// Puts the contribution where the parent can read it; returns the step that does.
fn share_contribution(lane: &mut Program, tree: &Tree, rank: Rank, parent: Rank) -> u32 {
    let step = if tree.children(rank).is_empty() {
        lane.copy(Part::Input, Part::SharedInput)
    } else {
        lane.reduce(contributions(tree, Access::Mapped, rank), vec![lane.own(SUM)])
    };
    lane.notify(parent, PARTIAL, &[step]);
    step
}

fn up_by_puts(lane: &mut Program, tree: &Tree, rank: Rank) {
    for &child in tree.children(rank) {
        lane.notify(child, READY, &[]);
    }
    for &child in tree.children(rank) {
        lane.wait(child, PARTIAL);
    }
    if let Some(parent) = tree.parent(rank) {
        lane.wait(parent, READY);
        contribute_by_put(lane, tree, rank, parent);
    } else {
        lane.reduce(contributions(tree, Access::Put, rank), vec![lane.own(Part::Output)]);
    }
}

fn up_mapped(lane: &mut Program, tree: &Tree, rank: Rank) {
    for &child in tree.children(rank) {
        lane.wait(child, PARTIAL);
    }
    let parent = tree.parent(rank);
    let step = match parent {
        Some(parent) => share_contribution(lane, tree, rank, parent),
        None => lane.reduce(contributions(tree, Access::Mapped, rank), vec![lane.own(Part::Output)]),
    };
    for &child in tree.children(rank) {
        lane.notify(child, READY, &[step]);
    }
    if let Some(parent) = parent {
        lane.wait(parent, READY);
    }
}

fn down_by_puts(lane: &mut Program, tree: &Tree, rank: Rank) {
    let source = match tree.parent(rank) {
        Some(parent) => {
            lane.notify(parent, READY, &[]);
            lane.wait(parent, RESULT);
            Part::SharedOutput
        }
        None => Part::Input,
    };
    for &child in tree.children(rank).iter().rev() {
        lane.wait(child, READY);
        lane.put(source, Target { rank: child, part: Part::SharedOutput, cell: RESULT });
    }
    lane.copy(source, Part::Output);
}

fn down_mapped(lane: &mut Program, tree: &Tree, rank: Rank) {
    let children = tree.children(rank);
    let readable = match tree.parent(rank) {
        Some(parent) => {
            let part = if tree.parent(parent).is_none() { Part::SharedInput } else { Part::SharedOutput };
            lane.wait(parent, RESULT);
            let mut into = vec![lane.own(Part::Output)];
            if !children.is_empty() {
                into.push(lane.own(Part::SharedOutput));
            }
            lane.reduce(vec![Place { rank: parent, part }], into)
        }
        None => lane.copy(Part::Input, Part::SharedInput),
    };
    for &child in children.iter().rev() {
        lane.notify(child, RESULT, &[readable]);
    }
    match tree.parent(rank) {
        Some(parent) => {
            lane.notify(parent, READY, &[readable]);
        }
        None => {
            lane.copy(Part::Input, Part::Output);
        }
    }
    for &child in children {
        lane.wait(child, READY);
    }
}
