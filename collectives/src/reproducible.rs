//! Results that are the same bits again.
//!
//! A sum of floats depends on the order in which it is made, so without further care on the
//! algorithm, and with it on the message size, the fabric and the number of ranks. All ranks always
//! end with the same bits ([`verify`](pleach_schedule::verify::verify) proves that); the levels of
//! [`Reproducible`] say in which *other* run of the program they are the same too.
//!
//! * [`Reproducible::PerWorldSize`] takes only schedules whose every result is one and the same
//!   expression: the fold of all contributions from rank 0 to the last, in one pass
//!   ([`Proof::folds_in_rank_order`](pleach_schedule::verify::Proof)). The proof of each schedule
//!   is asked, nothing is taken for granted about its generator. It costs the choice: with more
//!   than two ranks `direct` is what is left, which moves no more bytes than the best but more
//!   messages, and `exchange` for short parts; with two ranks it costs nothing.
//! * [`Reproducible::Exact`] adds without rounding, in integers wide enough, and rounds once: the
//!   correctly rounded sum (or average) of all contributions, whatever the number and order of
//!   ranks. See `exact` for how and for the cost.
//!
//! Integers, minimum and maximum are exact anyway. Of a NaN only that it is one is promised, at any
//! level.

use std::fmt;
use std::str::FromStr;

use pleach_vocabulary::{UnknownName, named};

/// Which results are the same bits again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reproducible {
    /// Those of the same call with the same algorithm.
    #[default]
    No,
    /// For as many ranks: whatever the message size, chunks, algorithm, fabric and topology.
    PerWorldSize,
    /// Also for any order and number of ranks, as long as the contributions are the same; zeros
    /// more or less do not count. Sums and averages of floats are correctly rounded, and an exact
    /// zero is +0. Products of floats are refused. Calls block.
    Exact,
}

impl Reproducible {
    const ALL: [Self; 3] = [Self::No, Self::PerWorldSize, Self::Exact];

    fn name(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::PerWorldSize => "per-world-size",
            Self::Exact => "exact",
        }
    }
}

impl fmt::Display for Reproducible {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Reproducible {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        named("level of reproducibility", &Self::ALL, Self::name, name)
    }
}
