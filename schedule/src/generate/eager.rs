//! Eager: a part goes straight to the scratch of its receivers, and the sender does not wait for
//! them. This is the algorithm for few bytes.
//!
//! The other algorithms put into a slice of a peer. Either the peer first signals that it is ready,
//! or the reader signals that it has read; both cost as much as the data. Scratch needs no such
//! signal, because credits of earlier runs say that it is free. So a part goes one way with one
//! signal, and a rank that only gives is done at once. The price is a copy out of scratch, and a
//! single chunk ([`Schedule::single_chunk`]): within a run no rank learns that a slot is free
//! again.
//!
//! A rooted collective goes along a tree. `eager` is a star. `eager-tree` is a binomial tree, which
//! pays where a message costs its sender more than a round takes. All contributions go directly to
//! the rank that combines them, which combines them in rank order. A rank turns to the peer at
//! distance 1 first, and gives before it takes.
//!
//! Cost for `p` ranks and `n` bytes of one rank's whole (gather, scatter: of the root's), for the
//! busiest rank:
//!
//! | collective | rounds | messages | bytes sent or received | bytes reduced |
//! |--|--|--|--|--|
//! | broadcast, reduce | 1 | p-1 (reduce: 1) | (p-1)·n | 0, (p-1)·n |
//! | the same by a binomial tree | floor(log2 p) | ceil(log2 p) (reduce: 1) | ceil(log2 p)·n | 0, ceil(log2 p)·n |
//! | all-gather, all-to-all | 1 | p-1 | (p-1)/p·n | 0 |
//! | reduce-scatter | 1 | p-1 | (p-1)/p·n | (p-1)/p·n |
//! | gather, scatter | 1 | 1, p-1 | (p-1)/p·n | 0 |
//! | send-recv | 1 | 1 | n | 0 |

use pleach_vocabulary::{Collective, Rank};

use super::{
    Access, Program, Target, Tree, block_for_each_part, block_for_each_rank, one_block, ordered_lanes,
};
use crate::{Block, BlockId, Lane, Part, Schedule, SignalSlot};

/// All scratch slots of a rank together, in bytes, at most.
pub const SCRATCH_BYTES: u64 = 64 << 10;

/// The longest message that is sent eagerly, in bytes: several of them may be on their way to one
/// rank.
pub const MESSAGE_BYTES_MAX: u64 = 8 << 10;

/// The longest part that is sent eagerly, in bytes. A rank that gives to all and gets from all has
/// two slots for each peer.
pub(crate) fn part_bytes_max(collective: Collective, ranks: u32) -> u64 {
    match collective {
        Collective::SendRecv { .. } => MESSAGE_BYTES_MAX,
        _ => SCRATCH_BYTES / (2 * u64::from(ranks.saturating_sub(1)).max(1)),
    }
}

/// The tree of a rooted collective.
pub(super) enum EagerTree {
    Star,
    Binomial,
}

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access, form: &EagerTree) -> Schedule {
    let root = collective.root();
    let blocks = match root {
        _ if collective.ends(0, ranks).is_some() => block_for_each_part(collective, ranks),
        Some(_) => one_block(),
        None => block_for_each_rank(collective, ranks),
    };
    let passed_on = |rank, block: BlockId, parent, children: &[Rank]| {
        let part = blocks[block as usize].part;
        let gives = collective.input_parts(rank, ranks).contains(part);
        let keeps = collective.output_parts(rank, ranks).contains(part);
        let mut lane = Program::new(access, rank, block);
        down(&mut lane, parent, children, gives, keeps);
        lane.finish()
    };
    let mut programs: Vec<Vec<((bool, u32), Lane)>> = (0..ranks).map(|_| Vec::new()).collect();
    for (block, &Block { part, .. }) in (0..).zip(&blocks) {
        let mut add = |rank: Rank, is_root: bool, lane: Option<Lane>| {
            // Lanes that other ranks wait for come first.
            let takes = is_root == collective.reduces();
            let distance = (block + ranks - rank) % ranks;
            programs[rank as usize].extend(lane.map(|lane| ((takes, distance), lane)));
        };
        if let Some((from, to)) = collective.ends(part, ranks) {
            // Nobody else touches it.
            let taker = (from != to).then_some(to);
            add(from, true, passed_on(from, block, None, taker.as_slice()));
            if from != to {
                add(to, false, passed_on(to, block, Some(from), &[]));
            }
            continue;
        }
        let tree = match form {
            EagerTree::Star => Tree::star(ranks, root.unwrap_or(block)),
            EagerTree::Binomial => Tree::binomial(ranks, root.unwrap_or(block)),
        };
        for rank in 0..ranks {
            let lane = if collective.reduces() {
                up(access, &tree, rank, block)
            } else {
                passed_on(rank, block, tree.parent(rank), tree.children(rank))
            };
            add(rank, tree.parent(rank).is_none(), lane);
        }
    }
    Schedule { collective, window: 1, single_chunk: true, programs: ordered_lanes(programs), blocks }
}

/// The signal slot of all data.
const DATA: SignalSlot = SignalSlot(0);

fn up(access: Access, tree: &Tree, rank: Rank, block: BlockId) -> Option<Lane> {
    let mut lane = Program::new(access, rank, block);
    let mut contributions = vec![(rank, Part::Input)];
    for (slot, &child) in (0..).zip(tree.children(rank)) {
        lane.wait(child, DATA);
        contributions.push((child, Part::Scratch(slot)));
    }
    contributions.sort_unstable_by_key(|&(contributor, _)| contributor);
    let from: Vec<Part> = contributions.into_iter().map(|(_, part)| part).collect();
    match tree.parent(rank) {
        // The first slot has been read when the sum is complete.
        Some(parent) => {
            let target = Target { rank: parent, part: Part::Scratch(tree.slot(rank)), signal_slot: DATA };
            lane.deliver(&from, &[], Part::Scratch(0), &[target])
        }
        None => lane.deliver(&from, &[Part::Output], Part::Output, &[]),
    };
    lane.finish()
}

fn down(lane: &mut Program<'_>, parent: Option<Rank>, children: &[Rank], gives: bool, keeps: bool) {
    let source = match parent {
        Some(parent) => {
            lane.wait(parent, DATA);
            Part::Scratch(0)
        }
        None if gives => Part::Input,
        // The part is between two other ranks.
        None => return,
    };
    // The child that passes most on comes first.
    let below = children.iter().rev();
    let targets: Vec<Target> =
        below.map(|&rank| Target { rank, part: Part::Scratch(0), signal_slot: DATA }).collect();
    let keep: &[Part] = if keeps { &[Part::Output] } else { &[] };
    lane.deliver(&[source], keep, source, &targets);
}
