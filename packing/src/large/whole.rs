//! Trees of equal weight: as many as are asked for, or so few that carry as much as any mix.
//!
//! From a mix rounded to whole trees, ranks of a tree are hung below others, one at a time, so that
//! orbits of links that are used too often are used less. Nothing says that this finds what there
//! is; what it finds is counted.

use pleach_vocabulary::Rank;

use super::hung::Hung;
use super::mix::Mixed;
use super::ways::{Column, Ways};
use crate::Rate;

/// Places looked at for one number of trees and one limit.
const PLACES_MAX: usize = 4_000_000;

/// Ranks hung elsewhere without getting better.
const IDLE_MAX: usize = 60;

/// Limits tried between what was reached and what cannot be.
const LIMITS_TRIED: u32 = 8;

/// Trees of equal weight, with how many of each, and the largest load.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    pub(super) columns: Vec<(Column, u32)>,
    pub(super) load: Rate,
}

/// What every orbit of links carries for each tree of a root, and for which orbits of roots trees
/// are made.
pub(super) struct Room<'w, 't> {
    pub(super) ways: &'w Ways<'t>,
    pub(super) carries: &'w [Rate],
    pub(super) groups: usize,
}

impl Room<'_, '_> {
    /// `count` trees of equal weight for each root whose load is 1, if they are found.
    pub(super) fn fitting(&self, mixed: &Mixed, count: u32) -> Option<Whole> {
        let one = Rate::from_integer(1);
        self.may_fit(count).then(|| self.hung(mixed, count, one)).filter(|whole| whole.load <= one)
    }

    /// `count` trees of equal weight for each root, with as little load as was found.
    pub(super) fn least(&self, mixed: &Mixed, count: u32) -> Whole {
        let (mut low, half) = (Rate::from_integer(1), Rate::new(1, 2));
        let mut best = self.hung(mixed, count, low);
        for _ in 0..LIMITS_TRIED {
            if best.load <= Rate::from_integer(1) {
                break;
            }
            // A neighbour of the middle with a small denominator.
            let middle = ((low + best.load) * half * 1024).round() / 1024;
            if middle <= low || middle >= best.load {
                break;
            }
            let whole = self.hung(mixed, count, middle);
            if whole.load > middle {
                low = middle;
            }
            if whole.load < best.load {
                best = whole;
            }
        }
        best
    }

    fn limits(&self, count: u32, load: Rate) -> Vec<i128> {
        self.carries
            .iter()
            .map(|&carries| (carries * i128::from(count) * load).floor().to_integer())
            .collect()
    }

    /// Whether links allow as many edges into ranks as trees have.
    fn may_fit(&self, count: u32) -> bool {
        let ranks = self.ways.ranks() as i128;
        let room: i128 = self.limits(count, Rate::from_integer(1)).iter().sum();
        room >= i128::from(count) * self.groups as i128 * (ranks - 1)
    }

    fn hung(&self, mixed: &Mixed, count: u32, load: Rate) -> Whole {
        let limits = self.limits(count, load);
        let mut trees = self.rounded(mixed, count);
        let mut used = vec![0_i128; limits.len()];
        let all_uses = trees.iter().flat_map(|tree| tree.above.iter().flatten());
        all_uses.flat_map(|above| &above.uses).for_each(|&orbit| used[orbit] += 1);
        let (mut idle, mut places, mut turn) = (0, 0, 0);
        let excess =
            |used: &[i128]| used.iter().zip(&limits).map(|(used, limit)| (used - limit).max(0)).sum::<i128>();
        let mut least = excess(&used);
        while least > 0 && idle < IDLE_MAX && places < PLACES_MAX {
            turn += 1;
            let Some(change) = self.best_change(&trees, &used, &limits, turn, &mut places) else { break };
            change.apply(self.ways, &mut trees, &mut used);
            idle += 1;
            if excess(&used) < least {
                (least, idle) = (excess(&used), 0);
            }
        }
        self.whole(trees, &used, count)
    }

    fn rounded(&self, mixed: &Mixed, count: u32) -> Vec<Hung> {
        let weights = super::weights::counts(mixed, self.groups, count);
        let mut trees = Vec::new();
        for ((column, _), count) in mixed.columns.iter().zip(weights) {
            let tree = Hung::of(column, self.ways);
            trees.extend((0..count).map(|_| tree.clone()));
        }
        trees
    }

    /// Of an orbit that is used too often, the use that is best given up, and what for. Which orbit
    /// depends on the turn, and so does which of equally good changes is taken.
    fn best_change(
        &self,
        trees: &[Hung],
        used: &[i128],
        limits: &[i128],
        turn: usize,
        places: &mut usize,
    ) -> Option<Change> {
        let over: Vec<usize> = (0..limits.len()).filter(|&orbit| used[orbit] > limits[orbit]).collect();
        let orbit = *over.get(turn % over.len().max(1))?;
        let mut best: Option<((i128, u64), Change)> = None;
        for (tree, hung) in trees.iter().enumerate() {
            for (rank, above) in hung.above.iter().enumerate() {
                let Some(above) = above.as_ref().filter(|above| above.uses.contains(&orbit)) else {
                    continue;
                };
                for other in (0..self.ways.ranks() as Rank).filter(|&other| other != above.rank) {
                    *places += 1;
                    if other as usize == rank || *places > PLACES_MAX {
                        continue;
                    }
                    let Some(instead) = self.ways.shortest_uses(other, rank as Rank) else { continue };
                    let gain = gain(used, limits, &above.uses, &instead);
                    // A different one of many each turn.
                    let order = (turn as u64 + u64::from(other) * 31 + rank as u64 * 17)
                        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    let key = (gain, order);
                    if best.as_ref().is_none_or(|(least, _)| key < *least)
                        && !hung.is_below(other, rank as Rank)
                    {
                        best = Some((key, Change { tree, rank: rank as Rank, above: other }));
                    }
                }
            }
        }
        best.map(|(_, change)| change)
    }

    fn whole(&self, trees: Vec<Hung>, used: &[i128], count: u32) -> Whole {
        let load =
            used.iter().zip(self.carries).map(|(&used, &carries)| Rate::from_integer(used) / carries).max();
        let mut columns: Vec<Column> =
            trees.into_iter().map(|tree| tree.column(self.ways, used.len())).collect();
        columns.sort_unstable();
        let mut counted: Vec<(Column, u32)> = Vec::new();
        for column in columns {
            match counted.last_mut() {
                Some((last, count)) if *last == column => *count += 1,
                _ => counted.push((column, 1)),
            }
        }
        Whole { columns: counted, load: load.unwrap_or_default() / i128::from(count) }
    }
}

/// By how much uses beyond limits grow.
fn gain(used: &[i128], limits: &[i128], less: &[usize], more: &[usize]) -> i128 {
    let mut gain = 0;
    for (place, &orbit) in less.iter().chain(more).enumerate() {
        let is_first = !less.iter().chain(more).take(place).any(|&other| other == orbit);
        if is_first {
            let count = |uses: &[usize]| uses.iter().filter(|&&other| other == orbit).count() as i128;
            let before = (used[orbit] - limits[orbit]).max(0);
            gain += (used[orbit] + count(more) - count(less) - limits[orbit]).max(0) - before;
        }
    }
    gain
}

/// A rank of a tree that is hung below another one.
struct Change {
    tree: usize,
    rank: Rank,
    above: Rank,
}

impl Change {
    fn apply(self, ways: &Ways<'_>, trees: &mut [Hung], used: &mut [i128]) {
        let tree = &mut trees[self.tree];
        if let Some(before) = tree.hang(ways, self.rank, self.above) {
            before.uses.into_iter().for_each(|orbit| used[orbit] -= 1);
        }
        if let Some(now) = &tree.above[self.rank as usize] {
            now.uses.iter().for_each(|&orbit| used[orbit] += 1);
        }
    }
}
