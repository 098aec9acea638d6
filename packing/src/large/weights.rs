//! Exact weights of trees that were found in floating point.

use num_rational::Ratio;

use super::mix::Mixed;
use crate::Rate;

/// How near to full an orbit of links is taken to be full.
const FULL: f64 = 1.0 - 1e-6;

/// Denominator of weights where exact ones were not found.
const COARSE: u32 = 1 << 16;

/// Weights of the columns, as parts of their root's data, such that no orbit is loaded above what
/// it carries, divided by the `load` beside them: 1 where the rate aimed for is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Weights {
    pub(super) parts: Vec<Rate>,
    pub(super) load: Rate,
}

/// Most that the common denominator of exact weights may be: times a bandwidth it fits in 127 bits
/// by far.
const DENOMINATOR_MAX: i128 = 1 << 56;

/// Up to which common denominator weights are as good as equal ones.
const DENOMINATOR_SMALL: i128 = 1 << 20;

impl Weights {
    /// Whether the rate aimed for is reached, by weights that are not too fine to work with.
    pub(super) fn is_exact(&self) -> bool {
        self.load <= Rate::from_integer(1) && self.has_denominator_up_to(DENOMINATOR_MAX)
    }

    /// Whether, besides, the weights are parts that people can read.
    pub(super) fn is_simple(&self) -> bool {
        self.is_exact() && self.has_denominator_up_to(DENOMINATOR_SMALL)
    }

    fn has_denominator_up_to(&self, most: i128) -> bool {
        let mut parts = self.parts.iter();
        let common = parts.try_fold(1_i128, |common, part| {
            let factor = *Ratio::new(*part.denom(), common).numer();
            common.checked_mul(factor).filter(|&common| common <= most)
        });
        common.is_some()
    }
}

/// The weights that fill what floating point found full, if they are right for the rest as well;
/// else those found, rounded.
pub(super) fn weighed(mixed: &Mixed, carries: &[Rate], groups: usize) -> Weights {
    let exact =
        solved(mixed, carries, groups).map(|parts| Weights { load: load(mixed, carries, &parts), parts });
    match exact {
        Some(weights) if weights.is_exact() => weights,
        _ => rounded(mixed, carries, groups, COARSE),
    }
}

/// Weights that are multiples of 1 / `parts`, of which each group has `parts`.
fn rounded(mixed: &Mixed, carries: &[Rate], groups: usize, parts: u32) -> Weights {
    let counts = counts(mixed, groups, parts);
    let weights: Vec<Rate> = counts.into_iter().map(|count| Rate::new(count.into(), parts.into())).collect();
    Weights { load: load(mixed, carries, &weights).max(Rate::from_integer(1)), parts: weights }
}

/// How many of `parts` each column has if weights are rounded so that every group has all of them.
pub(super) fn counts(mixed: &Mixed, groups: usize, parts: u32) -> Vec<u32> {
    let wanted: Vec<f64> = mixed.columns.iter().map(|(_, weight)| weight * f64::from(parts)).collect();
    let mut counts: Vec<u32> = wanted.iter().map(|wanted| wanted.floor() as u32).collect();
    for group in 0..groups {
        let mut members: Vec<usize> =
            (0..counts.len()).filter(|&place| mixed.columns[place].0.orbit == group).collect();
        let rest = |place: usize| wanted[place] - wanted[place].floor();
        members.sort_by(|&one, &other| rest(other).total_cmp(&rest(one)));
        let sum: u32 = members.iter().map(|&place| counts[place]).sum();
        members.iter().cycle().take(parts.saturating_sub(sum) as usize).for_each(|&place| counts[place] += 1);
    }
    counts
}

/// The largest load of any orbit.
fn load(mixed: &Mixed, carries: &[Rate], parts: &[Rate]) -> Rate {
    let of_orbit = |orbit: usize| {
        let used: Rate = parts
            .iter()
            .zip(&mixed.columns)
            .map(|(part, (column, _))| part * i128::from(column.loads[orbit]))
            .sum();
        used / carries[orbit]
    };
    (0..carries.len()).map(of_orbit).max().unwrap_or_default()
}

/// Solves for full orbits and for weights that sum to 1; none where there is not one solution, or
/// it is not one of weights, or its numbers grow too large.
fn solved(mixed: &Mixed, carries: &[Rate], groups: usize) -> Option<Vec<Rate>> {
    let unknowns = mixed.columns.len();
    let mut rows: Vec<Vec<Rate>> = Vec::new();
    for group in 0..groups {
        let mut row: Vec<Rate> = mixed
            .columns
            .iter()
            .map(|(column, _)| Rate::from_integer(i128::from(column.orbit == group)))
            .collect();
        row.push(Rate::from_integer(1));
        rows.push(row);
    }
    for (orbit, carries) in carries.iter().enumerate() {
        let used: f64 =
            mixed.columns.iter().map(|(column, weight)| weight * f64::from(column.loads[orbit])).sum();
        if used / (*carries.numer() as f64 / *carries.denom() as f64) >= FULL {
            let mut row: Vec<Rate> = mixed
                .columns
                .iter()
                .map(|(column, _)| Rate::from_integer(column.loads[orbit].into()))
                .collect();
            row.push(*carries);
            rows.push(row);
        }
    }
    for place in 0..unknowns {
        let pivot = (place..rows.len()).find(|&row| *rows[row][place].numer() != 0)?;
        rows.swap(place, pivot);
        let one = rows[place][place];
        let pivot_row: Option<Vec<Rate>> =
            rows[place].iter().map(|&value| product(value, one.recip())).collect();
        rows[place] = pivot_row?;
        for row in 0..rows.len() {
            let factor = rows[row][place];
            if row == place || *factor.numer() == 0 {
                continue;
            }
            let eliminated =
                rows[row].iter().zip(&rows[place]).map(|(&one, &pivot)| less(one, product(factor, pivot)?));
            rows[row] = eliminated.collect::<Option<_>>()?;
        }
    }
    let parts: Vec<Rate> = rows[..unknowns].iter().map(|row| row[unknowns]).collect();
    parts.iter().all(|part| *part.numer() >= 0).then_some(parts)
}

/// A product, unless it is too large.
fn product(one: Rate, other: Rate) -> Option<Rate> {
    // Reduced crosswise first, so that only what stays is multiplied.
    let (left, right) = (Ratio::new(*one.numer(), *other.denom()), Ratio::new(*other.numer(), *one.denom()));
    let numerator = left.numer().checked_mul(*right.numer())?;
    Some(Ratio::new_raw(numerator, left.denom().checked_mul(*right.denom())?))
}

/// A difference, unless its parts are too large.
fn less(one: Rate, other: Rate) -> Option<Rate> {
    let scale = Ratio::new(*one.denom(), *other.denom());
    // one.denom = scale.numer · common, other.denom = scale.denom · common.
    let left = one.numer().checked_mul(*scale.denom())?;
    let right = other.numer().checked_mul(*scale.numer())?;
    Some(Ratio::new(left.checked_sub(right)?, one.denom().checked_mul(*scale.denom())?))
}
