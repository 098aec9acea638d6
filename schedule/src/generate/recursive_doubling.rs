//! Exchanges of everything with the rank at distance 1, 2, 4, …
//!
//! The way for few bytes. In an all-reduce both ends of an exchange combine the same two sums, so
//! all end with the same bits. When `p` is no power of two, q being the highest one below, `p - q`
//! ranks give their data to a neighbour first and have the result from it in the end. The barrier
//! needs no pairs: in each round a rank tells the one `d` ahead and waits for the one `d` behind
//! (dissemination), for any rank count.
//!
//! Cost for `n` bytes, for every rank:
//!
//! | collective | rounds | messages | bytes sent | bytes reduced |
//! |--|--|--|--|--|
//! | all-reduce, p a power of two | log2 p | log2 p | log2 p·n | log2 p·n |
//! | all-reduce, other p: a proxy | log2 q + 2 | log2 q + 1 | (log2 q + 1)·n | (log2 q + 1)·n |
//! | all-reduce, other p: a represented rank | log2 q + 2 | 1 | n | 0 |
//! | barrier | ceil(log2 p) | ceil(log2 p) | 0 | 0 |
//!
//! No signal says that a slot is free. A chunk begins when the one before it is done here, and
//! instances of slots and signal slots alternate; so what comes for chunk `c` says that its sender
//! has done with chunk `c - 1`, and that what is sent for chunk `c + 1` finds its slot free.

use pleach_vocabulary::{Collective, Rank};

use super::{Access, Cover, PowerOfTwoGroup, one_block};
use super::{Program, Target};
use crate::{Lane, Part, Schedule, SignalSlot};

/// Two instances alternate; see the module.
const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access, cover: Cover) -> Schedule {
    let group = PowerOfTwoGroup::new(ranks);
    let program = |rank| -> Vec<Lane> {
        if cover == Cover::First && rank > 0 {
            return Vec::new();
        }
        let lane = match collective {
            Collective::Barrier => barrier(ranks, access, rank),
            _ if group.proxy(rank) == rank => all_reduce(&group, access, rank),
            _ => represented_rank(access, rank),
        };
        lane.into_iter().collect()
    };
    Schedule {
        collective,
        window: WINDOW,
        single_chunk: false,
        blocks: one_block(),
        programs: (0..ranks).map(program).collect(),
    }
}

/// The slot and the signal slot of the exchange at distance 2^(round - 1); round 0 is for those who
/// have a proxy.
fn target(rank: Rank, round: u32) -> Target {
    Target { rank, part: Part::Scratch(round as u16), signal_slot: SignalSlot(round as u16) }
}

fn all_reduce(group: &PowerOfTwoGroup, access: Access, rank: Rank) -> Option<Lane> {
    let mut lane = Program::new(access, rank, 0);
    let mut sum = vec![Part::Input];
    let represented = group.represented(rank);
    if let Some(other) = represented {
        lane.wait(other, SignalSlot(0));
        sum.push(Part::Scratch(0));
    }
    let number = group.number(rank);
    let mut first_sent = None;
    for round in 1..=group.participants.ilog2() {
        let peer = group.rank(number ^ (1 << (round - 1)));
        let combines = sum.len() > 1;
        let keep: &[Part] = if combines { &[Part::Output] } else { &[] };
        let step = lane.deliver(&sum, keep, Part::Output, &[target(peer, round)]);
        // By puts a sum is made before it is put.
        first_sent.get_or_insert(if combines && access == Access::Put { step + 1 } else { step });
        lane.wait(peer, SignalSlot(round as u16));
        sum =
            vec![if combines || round > 1 { Part::Output } else { Part::Input }, Part::Scratch(round as u16)];
    }
    let result =
        represented.map(|rank| Target { rank, part: Part::SharedOutput, signal_slot: SignalSlot(0) });
    let last = lane.deliver(&sum, &[Part::Output], Part::Output, result.as_slice());
    if let Some(first) = first_sent {
        lane.after_earlier(first, last, 1);
    }
    lane.finish()
}

fn represented_rank(access: Access, rank: Rank) -> Option<Lane> {
    let mut lane = Program::new(access, rank, 0);
    lane.deliver(&[Part::Input], &[], Part::Input, &[target(rank + 1, 0)]);
    lane.wait(rank + 1, SignalSlot(0));
    lane.copy(Part::SharedOutput, Part::Output);
    lane.finish()
}

fn barrier(ranks: u32, access: Access, rank: Rank) -> Option<Lane> {
    let mut lane = Program::new(access, rank, 0);
    let rounds = ranks.next_power_of_two().ilog2();
    let mut last = 0;
    for round in 0..rounds {
        let distance = 1 << round;
        lane.signal((rank + distance) % ranks, SignalSlot(round as u16), &[]);
        last = lane.wait((rank + ranks - distance) % ranks, SignalSlot(round as u16));
    }
    if rounds > 0 {
        lane.after_earlier(0, last, 1);
    }
    lane.finish()
}
