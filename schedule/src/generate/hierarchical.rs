//! Hierarchical algorithms: inside every host, and between hosts by one rank of each host for a
//! share of the data.
//!
//! Every block has a tree. Its root is the owner of the block; below the owner are the other ranks
//! of its host and one *leader* of each other host; below each leader are the ranks of its host.
//! Leaders take turns: for each block the leader of a host is the rank with the same number in its
//! host as the owner (in a smaller host, that number modulo its size). So every rank leads for its
//! share, the wires between hosts carry each byte once, and mapped memory inside a host is read and
//! written in place: a reduce-scatter inside hosts, an all-reduce between ranks of equal number, an
//! all-gather inside hosts.
//!
//! Up to [`STAR_HOSTS_MAX`] hosts, leaders talk to the owner directly. For more hosts they form a
//! chain that begins at the host of the owner, in one direction up and in the other down, as around
//! a ring. Collectives with a root always take the chain, which sends everything once. A barrier
//! gathers at the first rank of each host, and these ranks signal each other at doubling distances.
//!
//! Cost between hosts for `h` hosts and `n` bytes of the whole, for every host (all its ranks
//! together):
//!
//! | collective | rounds, star | rounds, chain | bytes sent |
//! | --- | --- | --- | --- |
//! | all-reduce | 2 | 2(h-1) | 2(h-1)/h·n |
//! | reduce-scatter, all-gather | 1 | h-1 | (h-1)/h·n |
//! | reduce, broadcast | | h-1 | n |
//! | barrier | ceil(log2 h) | | 0 |
//!
//! The cost inside a host is that of [`direct`](super::direct) among its ranks.

use pleach_vocabulary::{Collective, Rank};

use super::{
    Access, Cover, PeerAccess, Program, Tree, TreePair, TreeSchedule, block_for_each_rank, one_block,
};
use crate::hosts::HostMap;
use crate::{Block, BlockId, Lane, Schedule, SignalSlot};

/// Most hosts whose leaders all talk to the owner of a block.
const STAR_HOSTS_MAX: u32 = 8;

const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, hosts: &HostMap, access: Access, cover: Cover) -> Schedule {
    let (ranks, members) = (hosts.ranks(), hosts.members());
    if collective == Collective::Barrier {
        let programs = (0..ranks).map(|rank| barrier(hosts, &members, rank).into_iter().collect());
        return Schedule {
            collective,
            window: WINDOW,
            single_chunk: false,
            blocks: one_block(),
            programs: programs.collect(),
        };
    }
    let largest = members.iter().map(Vec::len).max().unwrap_or(1);
    let blocks = match collective.root() {
        Some(_) => vec![Block { part: 0, weight: 1 }; largest],
        None => block_for_each_rank(collective, ranks),
    };
    let count = blocks.len() as u32;
    TreeSchedule {
        collective,
        ranks,
        links: PeerAccess::Inside(access, hosts),
        window: WINDOW,
        blocks,
        shape: &|block| shape(collective, hosts, &members, block),
        // Others wait for what this rank gives them, so its own block comes last.
        lane_order: &|rank, block| (block + count - rank % count + count - 1) % count,
        cover,
    }
    .schedule()
}

fn shape(collective: Collective, hosts: &HostMap, members: &[Vec<Rank>], block: BlockId) -> TreePair {
    let owner = collective.root().unwrap_or(block);
    let home = hosts.host(owner);
    let number = match collective.root() {
        Some(_) => block as usize,
        None => members[home as usize].iter().position(|&rank| rank == owner).unwrap_or(0),
    };
    let proxy = |host: u32| {
        let ranks = &members[host as usize];
        if host == home { owner } else { ranks[number % ranks.len()] }
    };
    let count = hosts.hosts();
    // Inside hosts first: who has others to wait for contributes later. Both orders begin at
    // the owner and the proxies, so on hosts of one size all trees are translations of one another.
    let inside: Vec<(Rank, Rank)> = (0..count)
        .map(|lane_order| (home + lane_order) % count)
        .flat_map(|host| {
            let (ranks, proxy) = (&members[host as usize], proxy(host));
            let first = ranks.iter().position(|&rank| rank == proxy).unwrap_or(0);
            (1..ranks.len()).map(move |place| (ranks[(first + place) % ranks.len()], proxy))
        })
        .collect();
    let tree = |across: &dyn Fn(u32) -> (u32, u32)| {
        let across = (1..count).map(across).map(|(child, parent)| (proxy(child), proxy(parent)));
        Tree::new(hosts.ranks(), inside.iter().copied().chain(across))
    };
    let after = |hop: u32| ((home + hop) % count, (home + hop - 1) % count);
    let before = |hop: u32| ((home + count - hop) % count, (home + count - hop + 1) % count);
    if collective.root().is_some() {
        return TreePair::both(tree(&after));
    }
    if count <= STAR_HOSTS_MAX {
        return TreePair::both(tree(&|lane_order| ((home + lane_order) % count, home)));
    }
    TreePair { up: tree(&before), down: Some(tree(&after)) }
}

/// Signal slots of a barrier: here, all are here, and the rounds across from then on.
const HERE: SignalSlot = SignalSlot(0);
const ALL_HERE: SignalSlot = SignalSlot(1);
const FIRST_ROUND: u16 = 2;

fn barrier(hosts: &HostMap, members: &[Vec<Rank>], rank: Rank) -> Option<Lane> {
    let mut lane = Program::new(Access::Put, rank, 0);
    let (host, count) = (hosts.host(rank), hosts.hosts());
    let (first, others) = members[host as usize].split_first()?;
    let begin = lane.next();
    let mut last = None;
    if rank == *first {
        for &other in others {
            last = Some(lane.wait(other, HERE));
        }
        let begin = lane.next();
        for round in 0..count.next_power_of_two().ilog2() {
            let distance = 1 << round;
            let proxy = |host: u32| members[host as usize][0];
            let signal_slot = SignalSlot(FIRST_ROUND + round as u16);
            lane.signal(proxy((host + distance) % count), signal_slot, &[]);
            last = Some(lane.wait(proxy((host + count - distance) % count), signal_slot));
        }
        if let Some(last) = last.filter(|&last| last >= begin) {
            lane.after_earlier(begin, last, 1);
        }
        for &other in others {
            lane.signal(other, ALL_HERE, &[]);
        }
    } else {
        lane.signal(*first, HERE, &[]);
        let told = lane.wait(*first, ALL_HERE);
        lane.after_earlier(begin, told, 1);
    }
    lane.finish()
}
