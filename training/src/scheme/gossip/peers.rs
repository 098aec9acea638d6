//! The peer with which a rank exchanges in a round.

use pleach_collectives::Rank;
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::super::Peer;

/// Sets the draws of peers apart from others.
const PEERS_MARK: u64 = 0x676f_7373_6970;

/// The peers of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peers {
    pub(crate) rule: Peer,
    pub(crate) rank: Rank,
    pub(crate) ranks: u32,
}

impl Peers {
    /// The peer that this rank reads from or writes to in a round; there are at least two ranks. It
    /// is a function of the rank and the round alone.
    pub(crate) fn target(&self, round: u64) -> Rank {
        let Self { rule, rank, ranks } = *self;
        match rule {
            Peer::Uniform => {
                let seed = chain(hash_of_pair(PEERS_MARK, rank.into()), round);
                let drawn = Random::new(seed).index(ranks as usize - 1) as Rank;
                if drawn < rank { drawn } else { drawn + 1 }
            }
            Peer::Butterfly => self.partner(round),
            Peer::Ring => (rank + 1) % ranks,
        }
    }

    /// The peer that writes to this rank in a round, where the rule names one.
    pub(crate) fn source(&self, round: u64) -> Option<Rank> {
        match self.rule {
            Peer::Uniform => None,
            Peer::Butterfly => Some(self.partner(round)),
            Peer::Ring => Some((self.rank + self.ranks - 1) % self.ranks),
        }
    }

    fn partner(&self, round: u64) -> Rank {
        let stages = u64::from(self.ranks.ilog2());
        self.rank ^ 1 << (round % stages.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_its_own_peer_and_uniform_peers_are_all_others_alike() {
        let mut drawn = [0_u32; 5];
        for round in 0..4000 {
            drawn[Peers { rule: Peer::Uniform, rank: 2, ranks: 5 }.target(round) as usize] += 1;
        }
        assert_eq!(drawn[2], 0);
        assert!(drawn.iter().enumerate().all(|(rank, times)| rank == 2 || (900..1100).contains(times)));
        assert_eq!(Peers { rule: Peer::Uniform, rank: 1, ranks: 2 }.target(7), 0);
    }

    #[test]
    fn the_source_of_a_rank_has_that_rank_as_its_target() {
        for rule in [Peer::Butterfly, Peer::Ring] {
            for (ranks, round) in [(2, 3), (4, 0), (8, 1), (8, 5), (16, 7)] {
                for rank in 0..ranks {
                    let source = Peers { rule, rank, ranks }.source(round).expect("the rule says");
                    assert_ne!(source, rank);
                    assert_eq!(Peers { rule, rank: source, ranks }.target(round), rank, "{rule:?}");
                }
            }
        }
    }
}
