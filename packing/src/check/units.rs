//! Weights as integers over one denominator: a million of them are summed in no time, and exactly.

use std::collections::BTreeSet;

use num_rational::Ratio;

use super::Flaw;
use crate::{Packing, Rate};

/// What the common denominator may be at most: beside it every capacity, and sums of many, fit in
/// 127 bits.
const DENOMINATOR_MAX: i128 = 1 << 60;

/// The common denominator of all weights of a packing.
pub(super) struct Units {
    denominator: i128,
}

impl Units {
    /// Finds it, and that all rates are numbers.
    pub(super) fn of(packing: &Packing) -> Result<Self, Flaw> {
        let mut denominators = BTreeSet::new();
        let mut last = 0;
        let trees = packing.trees.iter();
        let weights = trees.flat_map(|tree| {
            let paths = tree.edges.iter().flat_map(|edge| &edge.paths).map(|path| path.weight);
            paths.chain([tree.weight])
        });
        for weight in weights.chain([packing.rate, packing.bound]) {
            // Most weights are like the one before.
            if *weight.denom() != last {
                last = *weight.denom();
                denominators.insert(last);
            }
        }
        let mut denominator: i128 = 1;
        for other in denominators {
            if other < 1 {
                return Err(Flaw::NoNumber);
            }
            let multiple = denominator / greatest_divisor(denominator, other);
            denominator =
                multiple.checked_mul(other).filter(|&all| all <= DENOMINATOR_MAX).ok_or(Flaw::TooFine)?;
        }
        Ok(Self { denominator })
    }

    /// A weight in units; none where it does not fit.
    pub(super) fn exact(&self, weight: Rate) -> Option<i128> {
        weight.numer().checked_mul(self.denominator / weight.denom())
    }

    /// The same of a weight that has to be more than nothing.
    pub(super) fn positive(&self, weight: Rate) -> Option<i128> {
        self.exact(weight).filter(|&units| units > 0)
    }

    /// So many units as a rate.
    pub(super) fn rate(&self, units: i128) -> Rate {
        Ratio::new(units, self.denominator)
    }
}

fn greatest_divisor(mut one: i128, mut other: i128) -> i128 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}
