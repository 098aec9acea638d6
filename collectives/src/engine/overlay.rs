//! The pairs that are connected from the beginning, where all others connect on first use.
//!
//! Data need the peers of a plan alone. All else that the ranks of a group tell each other needed
//! every pair when every pair was connected:
//!
//! | what | who to whom | where pairs connect on use |
//! | --- | --- | --- |
//! | where scratch is | each to each | when the pair is connected |
//! | claims of the cause of a failure, the verdict | each to each | flooded over the overlay ([`super::agreement`]) |
//! | a loss | each device sees its own | the neighbours of the lost rank see it, and flood it |
//! | queries and answers ([`super::queries`]) | who waits, to the awaited | direct, or routed over the overlay |
//! | probes for deadlocks ([`super::deadlock`]) | who is blocked, to ranks that others named | the same |
//! | that a rank has left | its bye to each | its bye to its peers; a query to it comes back ([`Message::Away`]) |
//! | reads and writes of windows | each to each | direct; the first one connects the pair |
//! | that a round is open | rank 0, down a binomial tree | along links of the overlay |
//! | that a rank is ready for a round | each to rank 0 | direct; these pairs connect when the rounds are made |
//!
//! The overlay has a link between any two ranks whose distance in the ring of ranks is a power of
//! two, as the fingers of Chord (Stoica et al., SIGCOMM 2001, section 4.3) with both directions. A
//! rank has at most `2 log2 n` neighbours, and a way to any other rank is at most `log2 n` links
//! long: each hop takes the largest power of two that is not beyond the target, so ways have no
//! loops. The ranks of a host that dies are a run of ranks, and longer links lead over it.
//! Ring neighbours and the partners of halving and doubling are links of the overlay.
//!
//! The status board floods and routes, on the thread that reads messages. So a rank that is in no
//! call passes on what others say.
//!
//! **Invariant:** a message comes nearer to its target with every hop.

use pleach_transport::{PostError, Rank, Relay, Urgency};

use super::message::Message;

/// A rank's place in the overlay; see the module.
#[derive(Clone, Debug)]
pub(crate) struct Overlay {
    rank: Rank,
    ranks: u32,
    neighbours: Vec<Rank>,
}

/// The ranks to which `rank` is always connected, in a group of `ranks`, in their order.
pub(crate) fn neighbours(rank: Rank, ranks: u32) -> Vec<Rank> {
    let powers = (0..u32::BITS).map(|bit| 1 << bit).take_while(|distance| *distance < ranks);
    let both = powers.flat_map(|distance| {
        let forward = (u64::from(rank) + u64::from(distance)) % u64::from(ranks);
        let back = (u64::from(rank) + u64::from(ranks - distance)) % u64::from(ranks);
        [forward as Rank, back as Rank]
    });
    let mut neighbours: Vec<Rank> = both.collect();
    neighbours.sort_unstable();
    neighbours.dedup();
    neighbours
}

impl Overlay {
    pub(crate) fn new(rank: Rank, ranks: u32) -> Self {
        Self { rank, ranks, neighbours: neighbours(rank, ranks) }
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.ranks
    }

    pub(crate) fn neighbours(&self) -> &[Rank] {
        &self.neighbours
    }

    /// The neighbours on the way to a rank, the nearest to the target first.
    fn towards(&self, to: Rank) -> impl Iterator<Item = Rank> + use<> {
        let (rank, ranks) = (u64::from(self.rank), u64::from(self.ranks));
        let distance = (u64::from(to) + ranks - rank) % ranks;
        let bits = (0..u32::BITS).rev().filter(move |bit| 1u64 << bit <= distance);
        bits.map(move |bit| ((rank + (1u64 << bit)) % ranks) as Rank)
    }

    /// Sends a message of `from` on its way to a rank.
    ///
    /// # Errors
    ///
    /// That of the last neighbour that was tried: none takes it. [`PostError::NotConnected`] with
    /// the target's own number: it is a neighbour, and not connected any more or not yet.
    pub(crate) fn route(
        &self,
        (from, to): (Rank, Rank),
        message: &[u8],
        relay: &mut Relay<'_>,
    ) -> Result<(), PostError> {
        let routed = Message::Routed { from, to, message: message.to_vec() }.encode();
        let mut result = Err(PostError::NotConnected { peer: to });
        for (tried, hop) in self.towards(to).enumerate() {
            match relay(hop, &routed, Urgency::Ordinary) {
                Ok(()) => return Ok(()),
                Err(error) if tried == 0 => result = Err(error),
                // The first neighbour says more about the target.
                Err(_) => {}
            }
            if hop == to {
                break;
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn links_are_mutual_few_and_hold_the_ranks_together_without_any_host() {
        for ranks in (1..80).chain([128, 1000, 1024]) {
            let all: Vec<Vec<Rank>> = (0..ranks).map(|rank| neighbours(rank, ranks)).collect();
            for (rank, own) in (0..).zip(&all) {
                assert!(!own.contains(&rank), "{rank} of {ranks}");
                assert!(own.iter().all(|peer| all[*peer as usize].contains(&rank)), "{rank} of {ranks}");
                assert!(own.len() as u32 <= 2 * ranks.next_power_of_two().ilog2(), "{rank} of {ranks}");
            }
            let host = 8.min(ranks / 2);
            let reached = &mut BTreeSet::from([host]);
            let mut open = vec![host];
            while let Some(rank) = open.pop() {
                for peer in all.get(rank as usize).into_iter().flatten() {
                    if *peer >= host && reached.insert(*peer) {
                        open.push(*peer);
                    }
                }
            }
            let reached = reached.iter().filter(|rank| **rank < ranks).count() as u32;
            assert_eq!(reached, ranks - host, "without the first {host} of {ranks}");
        }
    }

    #[test]
    fn a_message_comes_to_every_rank_in_few_hops_also_around_one_that_has_left() {
        for ranks in 2..70 {
            for (from, to) in (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to))) {
                let gone = (from + 1) % ranks;
                let (mut at, mut hops) = (from, 0);
                while at != to && to != gone {
                    let mut next = None;
                    let relay: &mut Relay<'_> = &mut |hop, message, _| {
                        if hop == gone {
                            return Err(PostError::NotConnected { peer: hop });
                        }
                        assert!(neighbours(at, ranks).contains(&hop));
                        let routed = Message::decode(message).expect("it is one");
                        assert_eq!(routed, Message::Routed { from, to, message: vec![7] });
                        next = Some(hop);
                        Ok(())
                    };
                    let routed = Overlay::new(at, ranks).route((from, to), &[7], relay);
                    let Some(hop) = next else {
                        // All ways lead over the rank that has left.
                        assert!(routed.is_err());
                        break;
                    };
                    (at, hops) = (hop, hops + 1);
                    assert!(hops <= ranks.next_power_of_two().ilog2(), "{from} to {to} of {ranks}");
                }
            }
        }
    }
}
