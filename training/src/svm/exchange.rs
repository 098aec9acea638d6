//! The messages of an iteration: candidates of all ranks, of which each rank picks the same.
//!
//! An all-gather of 24 or 32 bytes: they travel in the signals of one step, whereas a pair of value
//! and index does not fit the 8 bytes that a maximum compares at once.

use pleach_collectives::{Buffer, CollectiveError, Element, Group, Operation, Persistent};

use super::wide::Extreme;

/// No sample.
const NOBODY: u32 = u32::MAX;

/// A sample with the value by which it was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) value: f64,
    /// Its number among the samples of all ranks.
    pub(crate) number: u32,
}

/// The pair that violates most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair {
    /// The smallest error of those that may go up.
    pub(crate) up: Option<Candidate>,
    /// The largest error of those that may go down.
    pub(crate) low: Option<Candidate>,
    /// What ranks told beside their candidates.
    pub(crate) notes: u32,
    /// The sample whose kernel values are not finite, if a note tells of such.
    pub(crate) not_finite: u32,
}

/// Notes of ranks to all.
pub(crate) mod note {
    /// Somebody asks the solver to stop.
    pub(crate) const STOP: u32 = 1;
    /// Kernel values are not finite.
    pub(crate) const NOT_FINITE: u32 = 2;
}

/// The partner that gains most with the one that violates most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Partner {
    pub(crate) gain: f64,
    pub(crate) number: u32,
    pub(crate) error: f64,
    /// The kernel value of the pair.
    pub(crate) value: f32,
}

type Gathering = Persistent<(Buffer<u64>, Buffer<u64>)>;

/// The all-gathers of an iteration, prepared.
#[derive(Debug)]
pub(crate) struct Exchange {
    pairs: Gathering,
    partners: Gathering,
}

/// 8-byte words of a candidate pair and of a partner.
const PAIR_WORDS: usize = 4;
const PARTNER_WORDS: usize = 3;

impl Exchange {
    pub(crate) fn new(group: &Group) -> Result<Self, CollectiveError> {
        let gathering = |words: usize| -> Result<Gathering, CollectiveError> {
            let (input, output) = (group.buffer(words)?, group.buffer(words * group.world_size() as usize)?);
            group.prepare(Operation::all_gather(input, output)).map_err(|refused| refused.error)
        };
        Ok(Self { pairs: gathering(PAIR_WORDS)?, partners: gathering(PARTNER_WORDS)? })
    }

    /// The pair of all ranks, by this rank's extremes, whose places begin at `offset` among the
    /// samples of all ranks.
    pub(crate) fn pair(
        &mut self,
        [up, low]: [Extreme; 2],
        offset: u32,
        (notes, not_finite): (u32, u32),
    ) -> Result<Pair, CollectiveError> {
        let number = |extreme: Extreme| extreme.place.map_or(NOBODY, |place| offset + place as u32);
        self.pairs.input_mut().copy_from_slice(&[
            up.value.to_bits(),
            low.value.to_bits(),
            join(number(up), number(low)),
            join(notes, not_finite),
        ]);
        self.pairs.run()?;
        let mut pair = Pair { up: None, low: None, notes: 0, not_finite: 0 };
        for words in self.pairs.output().as_chunks::<PAIR_WORDS>().0 {
            let [up, low, numbers, notes] = *words;
            let (up, low, numbers) = (f64::from_bits(up), f64::from_bits(low), split(numbers));
            // The samples of a later rank have larger numbers, so the first of equal values is the
            // one of the smallest number.
            if numbers.0 != NOBODY && pair.up.is_none_or(|best| up < best.value) {
                pair.up = Some(Candidate { value: up, number: numbers.0 });
            }
            if numbers.1 != NOBODY && pair.low.is_none_or(|best| low > best.value) {
                pair.low = Some(Candidate { value: low, number: numbers.1 });
            }
            let (notes, not_finite) = split(notes);
            pair.notes |= notes;
            if notes & note::NOT_FINITE != 0 {
                pair.not_finite = not_finite;
            }
        }
        Ok(pair)
    }

    /// The best partner of all ranks, by this rank's best.
    pub(crate) fn partner(&mut self, own: Option<Partner>) -> Result<Option<Partner>, CollectiveError> {
        let nobody = Partner { gain: 0.0, number: NOBODY, error: 0.0, value: 0.0 };
        let Partner { gain, number, error, value } = own.unwrap_or(nobody);
        let words = [gain.to_bits(), error.to_bits(), join(number, value.to_bits())];
        self.partners.input_mut().copy_from_slice(&words);
        self.partners.run()?;
        let mut best = None;
        for words in self.partners.output().as_chunks::<PARTNER_WORDS>().0 {
            let [gain, error] = [words[0], words[1]].map(f64::from_bits);
            let (number, value) = split(words[2]);
            if number != NOBODY && best.is_none_or(|best: Partner| gain > best.gain) {
                best = Some(Partner { gain, number, error, value: f32::from_bits(value) });
            }
        }
        Ok(best)
    }
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn split(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Lists of every rank, in rank order.
#[derive(Debug)]
pub(crate) struct Gathered<T> {
    pub(crate) items: Vec<T>,
    /// How many items each rank gave.
    pub(crate) counts: Vec<usize>,
}

/// Gives every rank the items of all.
pub(crate) fn gather<T: Element + Default>(group: &Group, own: &[T]) -> Result<Gathered<T>, CollectiveError> {
    let mut counts = vec![0u64; group.world_size() as usize];
    group.all_gather(&[own.len() as u64], &mut counts)?;
    let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
    let mut items = vec![T::default(); counts.iter().sum()];
    if !items.is_empty() {
        group.run(Operation::all_gather(own, &mut items[..]).with_counts(&counts))?;
    }
    Ok(Gathered { items, counts })
}
