//! Shares of the data in equal chunks.

use std::collections::BTreeSet;

use super::error::ExportError;

/// Most chunks that a part is cut into: calls whose length does not divide by them go another way
/// in the runtimes.
pub(super) const CHUNKS_MAX: u32 = 64;

/// How many chunks each block gets, for every part, and what that loses.
#[derive(Debug)]
pub(super) struct Rounded {
    /// Chunks of a part.
    pub(super) each: u32,
    /// By part, of its blocks in their order.
    pub(super) counts: Vec<Vec<u32>>,
    /// How much slower the block is that got too much, at most: 0 where all shares are exact.
    pub(super) loss: f64,
}

/// Cuts every part into the same number of chunks. `weights` are those of its blocks.
pub(super) fn rounded(weights: &[Vec<u32>]) -> Result<Rounded, ExportError> {
    let different: BTreeSet<&Vec<u32>> = weights.iter().collect();
    let blocks = weights.iter().map(Vec::len).max().unwrap_or(0) as u64;
    if blocks > u64::from(CHUNKS_MAX) {
        let what = "trees share one part of the data";
        return Err(ExportError::TooMany { what, needed: blocks, most: u64::from(CHUNKS_MAX) });
    }
    let worst = |each: u32| {
        let excess = |weights: &&Vec<u32>| excess(weights, &apportioned(weights, each));
        different.iter().map(excess).fold(1.0, f64::max)
    };
    let mut best = (f64::INFINITY, 0);
    for each in blocks.max(1) as u32..=CHUNKS_MAX {
        let excess = worst(each);
        if excess < best.0 {
            best = (excess, each);
        }
    }
    let (excess, each) = best;
    let counts = weights.iter().map(|weights| apportioned(weights, each)).collect();
    Ok(Rounded { each, counts, loss: 1.0 - 1.0 / excess })
}

/// At least one each; what is left goes where it makes the largest excess smallest.
fn apportioned(weights: &[u32], each: u32) -> Vec<u32> {
    let mut counts = vec![1; weights.len()];
    for _ in weights.len()..each as usize {
        let after = |index: usize| (u64::from(counts[index]) + 1, u64::from(weights[index]));
        let by_excess = |&one: &usize, &other: &usize| {
            let ((count, weight), (other_count, other_weight)) = (after(one), after(other));
            (count * other_weight).cmp(&(other_count * weight))
        };
        let least = (0..weights.len()).min_by(by_excess);
        let Some(least) = least else { break };
        counts[least] += 1;
    }
    counts
}

/// The largest share by chunks over the share by weight.
fn excess(weights: &[u32], counts: &[u32]) -> f64 {
    let (weight, count): (u64, u64) = (sum(weights), sum(counts));
    let ratios = weights.iter().zip(counts).map(|(&of_weight, &of_count)| {
        (f64::from(of_count) * weight as f64) / (f64::from(of_weight) * count as f64)
    });
    ratios.fold(1.0, f64::max)
}

fn sum(numbers: &[u32]) -> u64 {
    numbers.iter().map(|&number| u64::from(number)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_that_come_out_even_lose_nothing_and_take_the_fewest_chunks() {
        let Rounded { each, counts, loss } = rounded(&[vec![6, 3, 3], vec![1, 1]]).unwrap();
        assert_eq!((each, counts, loss), (4, vec![vec![2, 1, 1], vec![2, 2]], 0.0));
    }

    #[test]
    fn shares_that_do_not_are_rounded_and_the_loss_is_that_of_the_largest_excess() {
        let Rounded { each, counts, loss } = rounded(&[vec![100, 1]]).unwrap();
        assert_eq!((each, counts), (64, vec![vec![63, 1]]));
        assert!((loss - (1.0 - 64.0 / 101.0)).abs() < 1e-12, "{loss}");
    }

    #[test]
    fn more_blocks_than_chunks_are_refused() {
        assert!(rounded(&[vec![1; 65]]).is_err() && rounded(&[vec![1; 64]]).is_ok());
    }
}
