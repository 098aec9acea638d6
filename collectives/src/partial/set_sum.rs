//! The set of a round as a sum, where the signals of the data's run do not tell it: there are too
//! many ranks, or several runs. Each rank sets its own bit, for a contribution that it gives and
//! for a late one that is reduced apart, and an all-reduce adds the words. The sum of disjoint bits
//! is their union.
//!
//! **Invariant:** the words are stored when a round is bound, and the caller's buffers are bound at
//! the same instant ([`super::runs`]).

use std::sync::Arc;
use std::time::Duration;

use pleach_transport::Slice;
use pleach_vocabulary::Rank;

use super::activation::Terms;
use super::{Late, RankSet};
use crate::engine::{Bytes, Engine, Plan, RunId, StartError};

/// See the module.
pub(crate) struct SetSum {
    place: (Rank, u32),
    plan: Arc<Plan>,
    /// What the run reads and writes, on the host: a bit for each rank, then as many words for late
    /// contributions that are reduced apart.
    memory: [Slice; 2],
    words: Vec<u64>,
    run: Option<RunId>,
    /// Does something wrong.
    #[cfg(test)]
    is_mutant: bool,
}

impl SetSum {
    /// How many words the set of so many ranks has.
    pub(crate) fn words(terms: &Terms, ranks: u32) -> usize {
        let kinds = if terms.activation.late_rule() == Late::Correct { 2 } else { 1 };
        RankSet::words_for(ranks) * kinds
    }

    /// Of the rank at this place among so many, by this plan of an all-reduce.
    pub(crate) fn new(place: (Rank, u32), plan: Arc<Plan>, memory: [Slice; 2]) -> Self {
        let words = vec![0; memory[0].len() / size_of::<u64>()];
        Self {
            place,
            plan,
            memory,
            words,
            run: None,
            #[cfg(test)]
            is_mutant: false,
        }
    }

    /// Has rank 0 add its bit twice.
    #[cfg(test)]
    pub(crate) fn add_bit_twice(&mut self) {
        self.is_mutant = self.place.0 == 0;
    }

    /// Whether a sum is under way.
    pub(crate) fn is_under_way(&self) -> bool {
        self.run.is_some()
    }

    /// Starts the sum of a round to which this rank gives something, and something late.
    pub(crate) fn start(
        &mut self,
        engine: &mut Engine,
        [gives, gives_late]: [bool; 2],
        timeout: Duration,
    ) -> Result<(), StartError> {
        let (rank, ranks) = self.place;
        let half = RankSet::words_for(ranks);
        let (index, bit) = ((rank / u64::BITS) as usize, 1u64 << (rank % u64::BITS));
        self.words.fill(0);
        self.words[index] = if gives { bit } else { 0 };
        if gives_late {
            self.words[half + index] = bit;
        }
        #[cfg(test)]
        if self.is_mutant {
            self.words[index] *= 2;
        }
        self.memory[0].store(bytemuck::cast_slice(&self.words));
        let [input, output] = self.memory.each_ref().map(|slice| Bytes::Staged(slice.clone()));
        self.run = Some(engine.start(&self.plan, input, output, timeout)?);
        Ok(())
    }

    /// Whether the time of the sum stands still.
    pub(crate) fn hold_time(&self, engine: &mut Engine, is_held: bool) {
        self.run.into_iter().for_each(|run| engine.hold_time(run, is_held));
    }

    /// The ranks that have given something, and those that have given something late, once the sum
    /// is there.
    pub(crate) fn take_ended(&mut self, engine: &mut Engine) -> Option<[RankSet; 2]> {
        let run = self.run.take_if(|run| engine.has_ended(*run))?;
        let Some(Ok(())) = engine.take_outcome(run) else { return None };
        self.memory[1].load(bytemuck::cast_slice_mut(&mut self.words));
        let mut halves = self.words.chunks(RankSet::words_for(self.place.1));
        Some([(); 2].map(|()| RankSet::of_words(halves.next().unwrap_or_default())))
    }
}
