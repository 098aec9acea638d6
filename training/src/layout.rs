//! The parameters of a model as one vector: its layers, and the buckets in which gradients travel.
//!
//! **Invariant:** the buckets of a layout hold each parameter once, and none is longer than what
//! was asked for. They are in the order in which backward passes make them: the last layer first.

use std::ops::Range;

/// The number of a bucket, from 0 in the order in which backward passes make them.
pub type Bucket = usize;

/// The lengths of a model's layers, in the order in which forward passes use them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    layers: Vec<usize>,
    parameters: usize,
    /// Elements of a row; `None` of a model that is no table.
    row: Option<usize>,
}

impl Layout {
    /// Layers of these numbers of parameters, one after the other in one vector.
    #[must_use]
    pub fn of(layers: &[usize]) -> Self {
        let parameters = layers.iter().fold(0, |sum: usize, layer| sum.saturating_add(*layer));
        Self { layers: layers.to_vec(), parameters, row: None }
    }

    /// A table of so many rows of this length, as one layer: an update that changes few rows is
    /// sent and kept as those rows, by schemes whose ranks write to each other, and of a share the
    /// rows that have changed are read.
    #[must_use]
    pub fn table(rows: usize, length: usize) -> Self {
        let length = length.max(1);
        Self { row: Some(length), ..Self::of(&[rows.saturating_mul(length)]) }
    }

    /// The elements of a row, of a table.
    #[must_use]
    pub fn row(&self) -> Option<usize> {
        self.row
    }

    /// The number of all parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.parameters
    }

    /// The parameters of each layer.
    #[must_use]
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Buckets of at most `bytes` bytes of `f32`, at least one element. Short layers that follow
    /// each other share a bucket; a longer layer is cut.
    #[must_use]
    pub fn buckets(&self, bytes: usize) -> Vec<Range<usize>> {
        let most = (bytes / size_of::<f32>()).max(1);
        let mut buckets = Vec::new();
        let (mut begin, mut end) = (self.parameters, self.parameters);
        for layer in self.layers.iter().rev() {
            let layer_begin = begin - layer;
            if begin < end && end - layer_begin > most {
                buckets.push(begin..end);
                end = begin;
            }
            begin = layer_begin;
            while end - begin > most {
                buckets.push(end - most..end);
                end -= most;
            }
        }
        if begin < end {
            buckets.push(begin..end);
        }
        buckets
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn short_layers_share_a_bucket_and_long_ones_are_cut() {
        let layout = Layout::of(&[10, 3, 2, 1]);
        assert_eq!(layout.buckets(16), [13..16, 10..13, 6..10, 2..6, 0..2]);
        assert_eq!(layout.buckets(1 << 20), std::slice::from_ref(&(0..16)));
        assert_eq!(Layout::of(&[2]).buckets(0), [1..2, 0..1]);
        assert!(Layout::of(&[]).buckets(4).is_empty());
    }

    proptest! {
        #[test]
        fn each_parameter_is_in_one_bucket_from_the_last_to_the_first(
            layers in prop::collection::vec(0_usize..40, 0..8),
            bytes in 0_usize..200,
        ) {
            let layout = Layout::of(&layers);
            let buckets = layout.buckets(bytes);
            let mut end = layout.parameters();
            for bucket in &buckets {
                prop_assert_eq!(bucket.end, end);
                prop_assert!(!bucket.is_empty() && bucket.len() <= (bytes / 4).max(1));
                end = bucket.start;
            }
            prop_assert_eq!(end, 0);
        }
    }
}
