//! That nobody leaves a barrier before all have entered it.

use pleach_vocabulary::Rank;

use super::graph::{Event, Graph};
use super::violation::Violation;

/// Most words that are kept for the events of a block: 1 GiB.
const MAX_WORDS: u64 = 1 << 27;

/// By rank: of whom it has heard when it ends.
#[derive(Debug)]
pub(super) struct Heard {
    words: usize,
    bits: Vec<u64>,
}

impl Heard {
    pub(super) fn new(ranks: u32) -> Self {
        let words = ranks.div_ceil(u64::BITS) as usize;
        let mut heard = Self { words, bits: vec![0; words * ranks as usize] };
        for rank in 0..ranks as usize {
            heard.bits[rank * words + rank / 64] |= 1 << (rank % 64);
        }
        heard
    }

    /// Adds what is heard through the lanes of a block: at every event, what was at those before
    /// it, and its own rank.
    pub(super) fn add(&mut self, graph: &Graph<'_>) -> Result<(), Violation> {
        let needed = graph.events() as u64 * self.words as u64;
        if needed > MAX_WORDS {
            return Err(Violation::TooLarge {
                what: "words about the events of a barrier",
                found: needed,
                most: MAX_WORDS,
            });
        }
        let mut sorted: Vec<Event> = (0..graph.events() as u32).collect();
        sorted.sort_unstable_by_key(|&event| graph.position[event as usize]);
        let mut known = vec![0u64; needed as usize];
        for event in sorted {
            let start = event as usize * self.words;
            let rank = graph.rank(event / 2) as usize;
            known[start + rank / 64] |= 1 << (rank % 64);
            graph.predecessors(event, |before, lag| {
                if lag == 0 {
                    for word in 0..self.words {
                        known[start + word] |= known[before as usize * self.words + word];
                    }
                }
            });
            for word in 0..self.words {
                self.bits[rank * self.words + word] |= known[start + word];
            }
        }
        Ok(())
    }

    pub(super) fn check(&self, ranks: u32) -> Result<(), Violation> {
        let knows = |rank: Rank, other: Rank| {
            self.bits[rank as usize * self.words + other as usize / 64] & (1 << (other % 64)) != 0
        };
        for rank in 0..ranks {
            if let Some(unheard) = (0..ranks).find(|&other| !knows(rank, other)) {
                return Err(Violation::LeavesEarly { rank, unheard });
            }
        }
        Ok(())
    }
}
