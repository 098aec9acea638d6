//! Exact weights of trees that were found in floating point.

use num_rational::Ratio;

use super::mix::Mixed;
use crate::packing::Rate;

/// How near to full an orbit of links is taken to be full.
const FULL: f64 = 1.0 - 1e-6;

/// Denominator of weights where exact ones were not found.
const COARSE: i128 = 1 << 16;

/// Weights of the columns, as parts of their root's data, such that no orbit is loaded above what it carries, divided by the
/// `load` beside them: 1 where the rate aimed for is reached.
#[derive(Clone, Debug)]
pub(super) struct Weights {
    pub(super) parts: Vec<Rate>,
    pub(super) load: Rate,
}

/// The weights that fill what floating point found full, if they are right for the rest as well; else those found, rounded.
pub(super) fn weighed(mixed: &Mixed, carries: &[Rate], groups: usize) -> Weights {
    let exact =
        solved(mixed, carries, groups).map(|parts| Weights { load: load(mixed, carries, &parts), parts });
    match exact {
        Some(weights) if weights.load <= Rate::from_integer(1) => weights,
        exact => {
            let rounded = rounded(mixed, carries, groups, COARSE);
            exact.filter(|exact| exact.load <= rounded.load).unwrap_or(rounded)
        }
    }
}

/// Weights that are multiples of 1 / `parts`, of which each group has `parts`.
pub(super) fn rounded(mixed: &Mixed, carries: &[Rate], groups: usize, parts: i128) -> Weights {
    let mut counts: Vec<i128> = Vec::with_capacity(mixed.columns.len());
    for (_, weight) in &mixed.columns {
        counts.push((weight * parts as f64).floor() as i128);
    }
    for group in 0..groups {
        let members: Vec<usize> =
            (0..counts.len()).filter(|&place| mixed.columns[place].0.orbit == group).collect();
        let mut by_rest = members.clone();
        let rest = |place: usize| mixed.columns[place].1 * parts as f64 - counts[place] as f64;
        by_rest.sort_by(|&one, &other| rest(other).total_cmp(&rest(one)));
        let sum: i128 = members.iter().map(|&place| counts[place]).sum();
        let missing = usize::try_from(parts - sum).unwrap_or(0);
        by_rest.iter().cycle().take(missing).for_each(|&place| counts[place] += 1);
    }
    let weights: Vec<Rate> = counts.into_iter().map(|count| Rate::new(count, parts)).collect();
    Weights { load: load(mixed, carries, &weights).max(Rate::from_integer(1)), parts: weights }
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

/// Solves for full orbits and for weights that sum to 1; none where there is not one solution, or it is not one of weights, or its
/// numbers grow too large.
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
