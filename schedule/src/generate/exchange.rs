//! Everything to everybody, in one round: each rank puts its whole input to all others and combines
//! what it has from them.
//!
//! The way for few bytes where a round costs more than a message: where ranks share processors,
//! each round of a longer way is a turn of all of them. All ranks combine in rank order, so all end
//! with the same bits.
//!
//! Cost for an all-reduce of `n` bytes, for every rank: 1 round, `p-1` messages, `(p-1)·n` bytes
//! sent and reduced.
//!
//! No signal says that a slot is free, for the same reason as in [`super::recursive_doubling`]: a
//! chunk begins when the one before it is done here, and instances of slots and signal slots
//! alternate; so what comes for chunk `c` says that its sender has done with chunk `c - 1`, and
//! everybody hears from everybody in each chunk.

use pleach_vocabulary::{Collective, Rank};

use super::{Access, one_block};
use super::{Program, Target};
use crate::{Lane, Part, Schedule, SignalSlot};

/// Two instances alternate; see the module.
const WINDOW: u32 = 2;

pub(super) fn schedule(collective: Collective, ranks: u32, access: Access) -> Schedule {
    let program = |rank| lane(ranks, access, rank).into_iter().collect();
    Schedule {
        collective,
        window: WINDOW,
        single_chunk: false,
        blocks: one_block(),
        programs: (0..ranks).map(program).collect(),
    }
}

fn lane(ranks: u32, access: Access, rank: Rank) -> Option<Lane> {
    let mut lane = Program::new(access, rank, 0);
    // Every rank begins with another peer, so that no rank is the target of all at once.
    let peers = || (1..ranks).map(|distance| (rank + distance) % ranks);
    // Where data of a rank waits at its peers: they number each other without themselves.
    let slot = |of: Rank, at: Rank| (of - Rank::from(of > at)) as u16;
    let targets: Vec<Target> = peers()
        .map(|peer| {
            let slot = slot(rank, peer);
            Target { rank: peer, part: Part::Scratch(slot), signal_slot: SignalSlot(0) }
        })
        .collect();
    let first = lane.deliver(&[Part::Input], &[], Part::Input, &targets);
    for peer in peers() {
        lane.wait(peer, SignalSlot(0));
    }
    let contribution = |of| if of == rank { Part::Input } else { Part::Scratch(slot(of, rank)) };
    let contributions: Vec<Part> = (0..ranks).map(contribution).collect();
    let last = lane.deliver(&contributions, &[Part::Output], Part::Output, &[]);
    lane.after_earlier(first, last, 1);
    lane.finish()
}
