//! Samples: rows of features, most of which may be zero.
//!
//! **Invariant:** every value is finite, the blocks of a row ascend, and no block is all zeros. So
//! equal rows have equal bytes, and a kernel value does not depend on how the rows came here.

/// Features of a block. The sum of products is made in as many lanes, so the number belongs to the
/// bits of every result.
pub(crate) const LANES: usize = 8;

/// Most features of a sample: a row is expanded to as many numbers where it is compared with
/// others.
pub const FEATURES_MAX: u32 = 1 << 25;

/// Rows of features. A row keeps the blocks of eight features that are not all zero: dense and
/// sparse rows have the same form, and vector instructions work on both.
///
/// Values are kept as `f32`. Their products are exact in `f64`, in which all sums are made.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    features: u32,
    /// Where the blocks of each row begin, and the end of the last row.
    starts: Vec<usize>,
    blocks: Vec<u32>,
    values: Vec<[f32; LANES]>,
}

/// Why a row is no sample.
#[derive(pleach_derive::ErrorDebug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FeatureError {
    /// A value is not finite as `f32`.
    #[error("feature {index} is not a finite 32-bit number; remove the sample or replace the value")]
    NotFinite {
        /// Of the feature.
        index: u32,
    },
    /// Indices do not ascend.
    #[error("feature {index} stands behind feature {before}; sort the features of a sample by index")]
    NotAscending {
        /// Of the feature.
        index: u32,
        /// The index before it.
        before: u32,
    },
    /// An index is beyond [`FEATURES_MAX`].
    #[error("feature {index} is beyond the limit of {FEATURES_MAX} features; number the features anew")]
    TooLarge {
        /// Of the feature.
        index: u32,
    },
}

/// One sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row<'a> {
    pub(crate) blocks: &'a [u32],
    pub(crate) values: &'a [[f32; LANES]],
}

impl Default for Samples {
    fn default() -> Self {
        Self::new(0)
    }
}

impl Samples {
    /// No samples yet, of at least this many features.
    #[must_use]
    pub fn new(features: u32) -> Self {
        Self { features, starts: vec![0], blocks: Vec::new(), values: Vec::new() }
    }

    /// Adds a sample: pairs of an index, from 0 and ascending, and a value.
    ///
    /// # Errors
    ///
    /// See [`FeatureError`]; nothing was added then.
    pub fn push(&mut self, features: impl IntoIterator<Item = (u32, f64)>) -> Result<(), FeatureError> {
        let (blocks, mut before, mut end) = (self.blocks.len(), None, self.features);
        let mut error = None;
        for (index, value) in features {
            error = Self::refusal(before, index, value);
            if error.is_some() {
                break;
            }
            before = Some(index);
            end = end.max(index + 1);
            if value as f32 != 0.0 {
                let (block, lane) = (index / LANES as u32, index as usize % LANES);
                if self.blocks.len() == blocks || self.blocks.last() != Some(&block) {
                    self.blocks.push(block);
                    self.values.push([0.0; LANES]);
                }
                self.values.last_mut().expect("a block was added")[lane] = value as f32;
            }
        }
        if let Some(error) = error {
            self.blocks.truncate(blocks);
            self.values.truncate(blocks);
            return Err(error);
        }
        self.features = end;
        self.starts.push(self.blocks.len());
        Ok(())
    }

    /// Adds samples of `features` values each, one after the other.
    ///
    /// # Errors
    ///
    /// See [`FeatureError`]; the samples before the bad one were added.
    ///
    /// # Panics
    ///
    /// If the values are no whole number of samples.
    pub fn push_dense(&mut self, values: &[f32], features: u32) -> Result<(), FeatureError> {
        assert!(
            features > 0 && values.len().is_multiple_of(features as usize),
            "{} values are no whole samples of {features}",
            values.len()
        );
        for row in values.chunks_exact(features as usize) {
            self.push((0..).zip(row.iter().map(|value| f64::from(*value))))?;
        }
        Ok(())
    }

    /// Why a feature cannot follow the one of index `before` in a sample.
    pub(crate) fn refusal(before: Option<u32>, index: u32, value: f64) -> Option<FeatureError> {
        match before {
            _ if index >= FEATURES_MAX => Some(FeatureError::TooLarge { index }),
            Some(before) if before >= index => Some(FeatureError::NotAscending { index, before }),
            _ if !(value as f32).is_finite() => Some(FeatureError::NotFinite { index }),
            _ => None,
        }
    }

    /// Sets the number of features to at least this.
    pub fn widen(&mut self, features: u32) {
        self.features = self.features.max(features);
    }

    /// Forgets the samples.
    pub(crate) fn clear(&mut self) {
        self.starts.truncate(1);
        self.blocks.clear();
        self.values.clear();
    }

    /// The number of samples.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    /// Whether there is no sample.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of features: one more than the largest index, or the number that was given.
    #[must_use]
    pub fn features(&self) -> u32 {
        self.features
    }

    /// The bytes of the features in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.starts) + size_of_val(&*self.blocks) + size_of_val(&*self.values)
    }

    /// The features of a sample that are not zero, by ascending index.
    ///
    /// # Panics
    ///
    /// If there is no sample of this number.
    pub fn nonzero(&self, sample: usize) -> impl Iterator<Item = (u32, f32)> + '_ {
        self.row(sample).nonzero()
    }

    /// The samples of a range, in a set of their own.
    ///
    /// # Panics
    ///
    /// If there are not so many samples.
    #[must_use]
    pub fn pick(&self, samples: impl IntoIterator<Item = usize>) -> Self {
        let mut picked = Self::new(self.features);
        for sample in samples {
            picked.push_row(self.row(sample));
        }
        picked
    }

    pub(crate) fn row(&self, sample: usize) -> Row<'_> {
        let blocks = self.starts[sample]..self.starts[sample + 1];
        Row { blocks: &self.blocks[blocks.clone()], values: &self.values[blocks] }
    }

    pub(crate) fn push_row(&mut self, row: Row<'_>) {
        self.blocks.extend_from_slice(row.blocks);
        self.values.extend_from_slice(row.values);
        self.starts.push(self.blocks.len());
    }

    /// Adds the sample that stands at the beginning of `words`, and returns the words behind it.
    /// `None` when the words are no sample with at most the features that these have.
    pub(crate) fn push_words<'a>(&mut self, words: &'a [u32]) -> Option<&'a [u32]> {
        let (&count, rest) = words.split_first()?;
        let count = count as usize;
        let (blocks, rest) = rest.split_at_checked(count)?;
        let (values, rest) = rest.split_at_checked(count.checked_mul(LANES)?)?;
        let block_end = self.features.div_ceil(LANES as u32);
        let ascends = blocks.is_sorted_by(|left, right| left < right);
        let is_finite = |bits: &u32| f32::from_bits(*bits).is_finite();
        if !ascends || blocks.last().is_some_and(|last| *last >= block_end) || !values.iter().all(is_finite) {
            return None;
        }
        self.blocks.extend_from_slice(blocks);
        self.values.extend(values.as_chunks().0.iter().map(|block| block.map(f32::from_bits)));
        self.starts.push(self.blocks.len());
        Some(rest)
    }
}

impl<'a> Row<'a> {
    /// How many words [`Row::put_words`] writes for a row of so many blocks.
    pub(crate) fn words_of(blocks: usize) -> usize {
        1 + blocks * (1 + LANES)
    }

    /// Adds the row as words, for other ranks.
    pub(crate) fn put_words(&self, words: &mut Vec<u32>) {
        words.push(self.blocks.len() as u32);
        words.extend_from_slice(self.blocks);
        words.extend(self.values.as_flattened().iter().map(|value| value.to_bits()));
    }

    pub(crate) fn nonzero(self) -> impl Iterator<Item = (u32, f32)> + use<'a> {
        self.blocks.iter().zip(self.values).flat_map(|(block, values)| {
            let first = block * LANES as u32;
            (first..).zip(values.iter().copied()).filter(|(_, value)| *value != 0.0)
        })
    }

    /// The sum of the squares.
    pub(crate) fn norm(&self) -> f64 {
        let mut lanes = [0.0; LANES];
        for values in self.values {
            for (sum, value) in lanes.iter_mut().zip(values) {
                *sum += f64::from(*value) * f64::from(*value);
            }
        }
        sum_of_lanes(lanes)
    }
}

/// The sum of the lanes, in an order that is part of every result.
#[inline(always)]
pub(crate) fn sum_of_lanes(lanes: [f64; LANES]) -> f64 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_kept_by_blocks_that_are_not_zero() {
        let mut samples = Samples::new(0);
        samples.push([(0, 1.0), (9, 0.0), (17, -2.5)]).expect("is a sample");
        samples.push([]).expect("is a sample");
        assert_eq!((samples.len(), samples.features()), (2, 18));
        assert_eq!(samples.row(0).blocks, [0, 2]);
        assert_eq!(samples.nonzero(0).collect::<Vec<_>>(), [(0, 1.0), (17, -2.5)]);
        assert_eq!(samples.nonzero(1).count(), 0);
        assert!((samples.row(0).norm() - 7.25).abs() < 1e-12);
    }

    #[test]
    fn a_bad_row_is_named_and_leaves_no_trace() {
        let mut samples = Samples::new(0);
        for (row, error) in [
            (&[(1, 1.0), (1, 2.0)][..], FeatureError::NotAscending { index: 1, before: 1 }),
            (&[(0, f64::NAN)], FeatureError::NotFinite { index: 0 }),
            (&[(3, 1.0), (8, 1e39)], FeatureError::NotFinite { index: 8 }),
            (&[(FEATURES_MAX, 1.0)], FeatureError::TooLarge { index: FEATURES_MAX }),
        ] {
            assert_eq!(samples.push(row.iter().copied()), Err(error));
            assert_eq!(samples, Samples::new(0));
        }
    }

    #[test]
    fn words_bring_a_row_and_hostile_words_bring_none() {
        let mut samples = Samples::new(20);
        samples.push([(0, 1.0), (17, -2.5)]).expect("is a sample");
        let mut words = Vec::new();
        samples.row(0).put_words(&mut words);
        assert_eq!(words.len(), Row::words_of(2));
        words.push(7);
        let mut copy = Samples::new(20);
        assert_eq!(copy.push_words(&words), Some(&[7][..]));
        assert_eq!(copy, samples);
        for cut in 0..words.len() - 1 {
            assert_eq!(copy.push_words(&words[..cut]), None, "{cut}");
        }
        for (at, word) in [(0, u32::MAX), (1, 2), (2, 3), (3, f32::NAN.to_bits())] {
            let mut words = words.clone();
            words[at] = word;
            assert_eq!(copy.push_words(&words), None, "word {at}");
        }
        assert_eq!(copy, samples);
    }
}
