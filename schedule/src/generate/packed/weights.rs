//! The weights of blocks: in the proportion of what the trees of a packing carry.

use std::collections::BTreeMap;

use pleach_packing::{Rate, Tree};

use super::Share;

/// Gives every tree the weight of its block: proportional, exactly where 32 bits suffice, and then
/// as small as can be; else rounded to what 32 bits hold. Returns by which part the slowest takes
/// longer.
pub(super) fn weigh(shares: &mut [Share], trees: &[Tree]) -> Rate {
    let mut members: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (tree, share) in shares.iter().enumerate() {
        members.entry(share.part).or_default().push(tree);
    }
    let mut slowest = Rate::from_integer(0);
    for members in members.values() {
        let weights: Vec<Rate> = members.iter().map(|&tree| trees[tree].weight).collect();
        let whole = exact(&weights);
        let rounded = whole.clone().unwrap_or_else(|| nearest(&weights));
        for (&tree, &weight) in members.iter().zip(&rounded) {
            shares[tree].weight = weight;
        }
        if whole.is_none() {
            slowest = slowest.max(lost(&weights, &rounded));
        }
    }
    slowest
}

/// By which part the share of a rounded weight is larger than that of the weight, at most; to
/// 2^-40, upwards.
fn lost(weights: &[Rate], rounded: &[u32]) -> Rate {
    const STEPS: f64 = (1u64 << 40) as f64;
    let (sum, sum_rounded): (f64, f64) =
        (weights.iter().map(value).sum(), rounded.iter().map(|&weight| f64::from(weight)).sum());
    let more =
        |(weight, &rounded): (&Rate, &u32)| f64::from(rounded) / sum_rounded / (value(weight) / sum) - 1.0;
    let most = weights.iter().zip(rounded).map(more).fold(0.0, f64::max);
    Rate::new((most * STEPS).ceil() as i128, 1 << 40)
}

fn value(weight: &Rate) -> f64 {
    *weight.numer() as f64 / *weight.denom() as f64
}

/// The smallest whole numbers in the same proportion, if they fit.
fn exact(weights: &[Rate]) -> Option<Vec<u32>> {
    let mut multiple: i128 = 1;
    for weight in weights {
        multiple = (multiple / gcd(multiple, *weight.denom())).checked_mul(*weight.denom())?;
    }
    let mut whole = Vec::with_capacity(weights.len());
    for weight in weights {
        whole.push(weight.numer().checked_mul(multiple / weight.denom())?);
    }
    let common = whole.iter().copied().fold(0, gcd).max(1);
    whole.into_iter().map(|weight| u32::try_from(weight / common).ok()).collect()
}

/// The nearest whole numbers, the largest being as large as can be.
fn nearest(weights: &[Rate]) -> Vec<u32> {
    let largest = weights.iter().map(value).fold(f64::MIN_POSITIVE, f64::max);
    weights
        .iter()
        .map(|weight| ((value(weight) / largest * f64::from(u32::MAX)).round() as u32).max(1))
        .collect()
}

fn gcd(one: i128, other: i128) -> i128 {
    if other == 0 { one } else { gcd(other, one % other) }
}
