//! Rounds whose sums of floats are exact: see [`crate::exact`] for how.
//!
//! A round takes several runs, one after the other: one finds the binary places that the numbers of
//! each block use (beside the run of the set), then one a block adds the block's digits. A rank
//! that gives nothing has no digits: zeros. So a result depends on the contributions alone.
//!
//! **Invariant:** what runs there are, and in which order, follows from the facts and the set,
//! which are the same on all ranks. The words are expanded, reduced and rounded block by block, so
//! a poll computes for one block at most.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::contributions::{Contribution, Contributions};
use crate::engine::{Address, Bytes, Engine, Plan, RunId, StartError};
use crate::exact::{Block, BlockSums};

/// The plans of the runs.
pub(crate) struct ExactPlans {
    /// Of the facts of all parts.
    pub(crate) facts: Arc<Plan>,
    /// By the number of words of a block.
    pub(crate) words: HashMap<usize, Arc<Plan>>,
}

/// A part of a round: a rank's inputs, and the memory of their result. The data are one part. If
/// late contributions are reduced separately, they are another part.
pub(crate) struct Part<'a> {
    pub(crate) inputs: Vec<&'a Bytes>,
    pub(crate) result: &'a Bytes,
}

/// Which run of the round is under way.
enum Stage {
    /// None.
    Idle,
    Facts(RunId),
    /// So many blocks have ended; the run of the next one, if it has begun.
    Blocks {
        ended: usize,
        run: Option<RunId>,
    },
    /// The group has failed.
    Failed,
}

/// The exact sums of one rank's rounds; see the module.
pub(crate) struct ExactSums {
    sums: BlockSums,
    plans: ExactPlans,
    /// How many parts the facts have room for.
    parts_max: usize,
    /// By contribution, as it was handed over.
    facts_of: Vec<Vec<i32>>,
    /// What the run of the facts reads and writes.
    facts_input: Vec<i32>,
    facts: Vec<i32>,
    /// What the run of a block reads and writes.
    words: Vec<i64>,
    stage: Stage,
}

/// The outcome of a run, if it has ended.
fn take_outcome(run: RunId, engine: &mut Engine) -> Option<bool> {
    engine.has_ended(run).then(|| matches!(engine.take_outcome(run), Some(Ok(()))))
}

impl ExactSums {
    /// `contributions`: how many buffers there are.
    pub(crate) fn new(sums: BlockSums, plans: ExactPlans, parts_max: usize, contributions: usize) -> Self {
        let facts = Self::facts_len(sums, parts_max);
        let words_max = plans.words.keys().copied().max().unwrap_or(0);
        Self {
            sums,
            plans,
            parts_max,
            facts_of: vec![Vec::new(); contributions],
            facts_input: vec![0; facts],
            facts: vec![0; facts],
            // As many as the largest block becomes. Pages are had when they are used.
            words: vec![0; words_max],
            stage: Stage::Idle,
        }
    }

    /// How many numbers the run of the facts combines, by maximum.
    pub(crate) fn facts_len(sums: BlockSums, parts_max: usize) -> usize {
        sums.facts_of_nothing().len() * parts_max
    }

    /// What the numbers of a contribution are like that is handed over.
    pub(crate) fn note(&mut self, contribution: Contribution, facts: Vec<i32>) {
        self.facts_of[contribution] = facts;
    }

    /// A round is bound: the run of the facts begins.
    pub(crate) fn bind(
        &mut self,
        engine: &mut Engine,
        given: &[Option<Contributions>],
        timeout: Duration,
    ) -> Result<(), StartError> {
        let nothing = self.sums.facts_of_nothing();
        self.facts_input.clear();
        for part in 0..self.parts_max {
            let mut facts = nothing.clone();
            for contribution in given.get(part).copied().flatten().into_iter().flat_map(Contributions::iter) {
                let own = &self.facts_of[contribution];
                facts.iter_mut().zip(own).for_each(|(all, own)| *all = (*all).max(*own));
            }
            self.facts_input.extend(facts);
        }
        let bytes = [&mut self.facts_input, &mut self.facts].map(|facts| {
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(facts);
            Bytes::Private { base: Address::of(bytes), len: bytes.len() }
        });
        let [input, output] = bytes;
        self.stage = Stage::Facts(engine.start(&self.plans.facts, input, output, timeout)?);
        Ok(())
    }

    /// Goes on by one block at most; `divide_by` is known when the set is. True when anything
    /// moved.
    pub(crate) fn advance(
        &mut self,
        engine: &mut Engine,
        divide_by: Option<u32>,
        parts: &[Part<'_>],
        timeout: Duration,
    ) -> Result<bool, StartError> {
        let (ended, run) = match self.stage {
            Stage::Idle | Stage::Failed => return Ok(false),
            Stage::Facts(run) => {
                let Some(is_well) = take_outcome(run, engine) else { return Ok(false) };
                self.stage = if is_well { Stage::Blocks { ended: 0, run: None } } else { Stage::Failed };
                return Ok(true);
            }
            Stage::Blocks { ended, run } => (ended, run),
        };
        let Some(divide_by) = divide_by else { return Ok(false) };
        let blocks = self.sums.blocks();
        if ended == blocks * parts.len() {
            self.stage = Stage::Idle;
            return Ok(true);
        }
        let (part, number) = (ended / blocks, ended % blocks);
        let facts = &self.facts[part * self.facts.len() / self.parts_max..];
        let block = Block { number, facts, divide_by };
        let words = self.sums.words(block);
        match run {
            None if words > 0 => {
                self.sums.expand(block, &parts[part].inputs, &mut self.words[..words]);
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words[..words]);
                let bytes = Bytes::Private { base: Address::of(bytes), len: bytes.len() };
                let plan = &self.plans.words[&words];
                let run = engine.start(plan, bytes.clone(), bytes, timeout)?;
                self.stage = Stage::Blocks { ended, run: Some(run) };
                return Ok(true);
            }
            Some(run) => match take_outcome(run, engine) {
                None => return Ok(false),
                Some(true) => {}
                Some(false) => {
                    self.stage = Stage::Failed;
                    return Ok(true);
                }
            },
            // No rank has a number other than zero there.
            None => {}
        }
        self.sums.round(block, &self.words[..words], parts[part].result);
        self.stage = Stage::Blocks { ended: ended + 1, run: None };
        Ok(true)
    }

    /// Whether no round is under way.
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.stage, Stage::Idle)
    }
}
