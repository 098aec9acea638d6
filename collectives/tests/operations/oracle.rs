//! What every rank must find after a call, computed from what all ranks gave.

use pleach_collectives::Reproducible;
use pleach_vocabulary::{Collective, ReduceOp};

pub(crate) const RANKS: u32 = 3;
pub(crate) const ROOT: u32 = 2;

/// What the ranks' inputs are multiplied by in premultiplied sums.
pub(crate) const FACTORS: [f32; RANKS as usize] = [0.5, 3.0, -1.25];

/// Elements of the ranks' blocks.
pub(crate) fn counts(count: usize, is_uneven: bool) -> Vec<usize> {
    if is_uneven { vec![count, 0, 2 * count + 1] } else { vec![count; RANKS as usize] }
}

/// What a rank receives of each rank in an all-to-all where all send by these counts.
pub(crate) fn received(rank: u32, counts: &[usize]) -> Vec<usize> {
    vec![counts[rank as usize]; RANKS as usize]
}

/// A number that rounding has something to do with, of a rank's element.
fn value(rank: u32, index: usize) -> f32 {
    let whole = (rank as usize * 31 + index * 7) % 101;
    (whole as f32 - 50.0) / 7.0 * [1.0, 1e-4, 1e3][(index + rank as usize) % 3]
}

pub(crate) fn input(rank: u32, len: usize) -> Vec<f32> {
    (0..len).map(|index| value(rank, index)).collect()
}

pub(crate) struct Expected {
    /// What the rank gives.
    pub(crate) input: Vec<f32>,
    /// What it finds in the output, exact where numbers are combined.
    pub(crate) output: Vec<f64>,
    /// How large the numbers were that were combined.
    pub(crate) magnitude: Vec<f64>,
    /// The memory that is both, before the call.
    pub(crate) whole: Vec<f32>,
    /// Where the output lies in it.
    pub(crate) at: usize,
}

fn sum(counts: &[usize]) -> usize {
    counts.iter().sum()
}

/// All of it for a rank.
pub(crate) fn expected(rank: u32, collective: Collective, op: ReduceOp, counts: &[usize]) -> Expected {
    let (own, all) = (counts[rank as usize], sum(counts));
    let before = sum(&counts[..rank as usize]);
    let is_root = collective.root() == Some(rank);
    let vector = counts[0];
    let len_of = |rank: u32| match collective {
        Collective::AllGather | Collective::Gather { .. } => counts[rank as usize],
        Collective::ReduceScatter | Collective::Scatter { .. } | Collective::AllToAll => all,
        _ => vector,
    };
    let input_of = |rank: u32| input(rank, len_of(rank));
    let plain = |elements: Vec<f32>| {
        let output: Vec<f64> = elements.into_iter().map(f64::from).collect();
        (vec![0.0; output.len()], output)
    };
    let reduced = |range: std::ops::Range<usize>| {
        let terms = |index: usize| -> Vec<f64> {
            (0..RANKS)
                .map(|rank| {
                    let value = value(rank, index);
                    let factor =
                        if matches!(op, ReduceOp::PremulSum(_)) { FACTORS[rank as usize] } else { 1.0 };
                    f64::from(value * factor)
                })
                .collect()
        };
        let combined = |terms: Vec<f64>| match op {
            ReduceOp::Max => terms.into_iter().fold(f64::MIN, f64::max),
            ReduceOp::Avg => terms.into_iter().sum::<f64>() / f64::from(RANKS),
            _ => terms.into_iter().sum(),
        };
        let magnitude = |index| match op {
            ReduceOp::Max => 0.0,
            _ => terms(index).into_iter().map(f64::abs).sum(),
        };
        (range.clone().map(magnitude).collect(), range.map(|index| combined(terms(index))).collect())
    };
    let (magnitude, output): (Vec<f64>, Vec<f64>) = match collective {
        Collective::AllReduce => reduced(0..vector),
        Collective::Reduce { .. } if is_root => reduced(0..vector),
        Collective::ReduceScatter => reduced(before..before + own),
        Collective::Broadcast { root } => plain(input_of(root)),
        Collective::AllGather => plain((0..RANKS).flat_map(input_of).collect()),
        Collective::Gather { .. } if is_root => plain((0..RANKS).flat_map(input_of).collect()),
        Collective::Scatter { root } => plain(input_of(root)[before..before + own].to_vec()),
        Collective::AllToAll => {
            plain((0..RANKS).flat_map(|from| input_of(from)[before..before + own].to_vec()).collect())
        }
        Collective::SendRecv { from, to } if rank == to => plain(input_of(from)),
        _ => (Vec::new(), Vec::new()),
    };
    let input = match collective {
        // Not looked at.
        Collective::Scatter { .. } | Collective::Broadcast { .. } if !is_root => Vec::new(),
        Collective::SendRecv { to, .. } if rank == to => Vec::new(),
        _ => input_of(rank),
    };
    let (whole, at) = match collective {
        Collective::AllGather => (placed(&input, before, all), 0),
        Collective::Gather { .. } if is_root => (placed(&input, before, all), 0),
        Collective::ReduceScatter => (input.clone(), before),
        Collective::Scatter { .. } if is_root => (input.clone(), before),
        Collective::Scatter { .. } => (vec![-1.0; own], 0),
        Collective::Broadcast { .. } if !is_root => (vec![-1.0; vector], 0),
        Collective::SendRecv { to, .. } if rank == to => (vec![-1.0; vector], 0),
        _ => (input.clone(), 0),
    };
    Expected { input, output, magnitude, whole, at }
}

fn placed(own: &[f32], before: usize, all: usize) -> Vec<f32> {
    let mut whole = vec![-1.0; all];
    whole[before..before + own.len()].copy_from_slice(own);
    whole
}

/// Holds what a call left, the input where it is apart and the output or the only memory, against
/// what must be there.
pub(crate) fn check(
    rank: u32,
    collective: &Collective,
    op: ReduceOp,
    counts: &[usize],
    level: Reproducible,
    (left, found): &(Option<Vec<f32>>, Vec<f32>),
) -> Result<(), String> {
    let Expected { input, output, magnitude, whole, at } = expected(rank, *collective, op, counts);
    if left.as_ref().is_some_and(|left| *left != input) {
        return Err("the input has changed".to_owned());
    }
    let at = if left.is_some() { 0 } else { at };
    let result = found.get(at..at + output.len()).ok_or("the output is too short")?;
    for (index, ((&found, &exact), magnitude)) in result.iter().zip(&output).zip(&magnitude).enumerate() {
        let is_exact = level == Reproducible::Exact || *magnitude == 0.0;
        let tolerance = f64::from(f32::EPSILON) * f64::from(RANKS) * magnitude;
        let is_right =
            if is_exact { found == exact as f32 } else { (f64::from(found) - exact).abs() <= tolerance };
        if !is_right {
            return Err(format!("element {index} is {found:e}, not {exact:e}"));
        }
    }
    // In place, what is no result stays as it is; but a root's gathered blocks, and what a rank
    // multiplies for itself.
    let premultiplied_in_place = matches!(op, ReduceOp::PremulSum(_)) && *collective == Collective::AllReduce;
    if left.is_none() && !premultiplied_in_place {
        let rest = (0..found.len()).filter(|index| !(at..at + output.len()).contains(index));
        if let Some(index) = rest.into_iter().find(|&index| found[index] != whole[index]) {
            return Err(format!("element {index} was changed, which is no result"));
        }
    }
    Ok(())
}
