//! Less deep trees with no more load.
//!
//! Ranks are hung nearer to the root, one at a time, as long as orbits of links carry it; where one
//! would carry too much, another rank, of this tree or of another one, is hung elsewhere at no
//! greater depth so that it does not.

use std::collections::BTreeMap;

use pleach_vocabulary::Rank;

use super::hung::Hung;
use super::ways::{Column, Ways};
use crate::Rate;

/// Places looked at in all.
const PLACES_MAX: usize = 6_000_000;

/// Ranks looked at to make up for one, of all that change loads alike.
const ALIKE_MAX: usize = 6;

/// By how much uses of orbits change, those that do.
type Difference = Vec<(usize, i128)>;

/// A rank of a tree that may be hung below another one.
#[derive(Clone, Copy, Debug)]
struct Change {
    tree: usize,
    rank: Rank,
    above: Rank,
}

struct Lifting<'w, 't> {
    ways: &'w Ways<'t>,
    trees: Vec<Hung>,
    depths: Vec<Vec<u32>>,
    /// Weights of trees, what orbits carry and can carry: of one unit.
    weights: Vec<i128>,
    used: Vec<i128>,
    limits: Vec<i128>,
    places: usize,
}

/// Makes trees less deep. Their loads stay within `carries` times `load`.
pub(super) fn lifted(
    ways: &Ways<'_>,
    columns: Vec<(Column, Rate)>,
    carries: &[Rate],
    load: Rate,
) -> Vec<(Column, Rate)> {
    let parts = columns.iter().map(|(_, part)| *part.denom());
    let Some(unit) = parts.clone().try_fold(1_i128, least_multiple) else { return columns };
    let amount = |rate: Rate| rate.numer().checked_mul(unit / rate.denom());
    let limit = |carries: &Rate| {
        let numerator = carries.numer().checked_mul(unit)?.checked_mul(*load.numer())?;
        Some(numerator.div_euclid(carries.denom().checked_mul(*load.denom())?))
    };
    let (Some(weights), Some(limits)) =
        (columns.iter().map(|(_, part)| amount(*part)).collect(), carries.iter().map(limit).collect())
    else {
        return columns;
    };
    let trees: Vec<Hung> = columns.iter().map(|(column, _)| Hung::of(column, ways)).collect();
    let mut lifting = Lifting {
        ways,
        depths: trees.iter().map(|tree| tree.depths(ways)).collect(),
        trees,
        weights,
        used: vec![0; carries.len()],
        limits,
        places: 0,
    };
    for (tree, weight) in lifting.trees.iter().zip(&lifting.weights) {
        let uses = tree.above.iter().flatten().flat_map(|above| &above.uses);
        uses.for_each(|&orbit| lifting.used[orbit] += weight);
    }
    while lifting.places < PLACES_MAX && (lifting.lift_one() || lifting.lift_one_for_another()) {}
    let parts = columns.into_iter().map(|(_, part)| part);
    lifting.trees.iter().map(|tree| tree.column(ways, carries.len())).zip(parts).collect()
}

fn least_multiple(one: i128, other: i128) -> Option<i128> {
    one.checked_mul(*Rate::new(other, one).numer())
}

impl Lifting<'_, '_> {
    /// Every rank that can hang nearer to the root does, the deepest first; says whether any does.
    fn lift_one(&mut self) -> bool {
        let mut lifted = false;
        for tree in 0..self.trees.len() {
            for rank in self.deepest_first(tree) {
                let change = self.nearer(tree, rank).into_iter().find(|&change| {
                    let difference = self.difference(change);
                    self.fits(&difference, &Vec::new())
                });
                if let Some(change) = change {
                    self.apply(change);
                    lifted = true;
                }
            }
        }
        lifted
    }

    /// Hangs one rank nearer to the root and another one elsewhere; says whether there was such a
    /// pair.
    fn lift_one_for_another(&mut self) -> bool {
        let mut alike: BTreeMap<Difference, Vec<Change>> = BTreeMap::new();
        for tree in 0..self.trees.len() {
            for rank in self.deepest_first(tree) {
                for change in self.no_deeper(tree, rank) {
                    let changes = alike.entry(self.difference(change)).or_default();
                    if changes.len() < ALIKE_MAX {
                        changes.push(change);
                    }
                }
            }
        }
        for tree in 0..self.trees.len() {
            for rank in self.deepest_first(tree) {
                for change in self.nearer(tree, rank) {
                    if self.places > PLACES_MAX {
                        return false;
                    }
                    let difference = self.difference(change);
                    for (other, changes) in &alike {
                        self.places += 1;
                        if self.fits(&difference, other)
                            && changes.iter().any(|&other| self.apply_both(change, other))
                        {
                            return true;
                        }
                    }
                }
            }
        }
        false
    }

    fn deepest_first(&self, tree: usize) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = (0..self.ways.ranks() as Rank).collect();
        ranks.sort_by_key(|&rank| std::cmp::Reverse(self.depths[tree][rank as usize]));
        ranks.retain(|&rank| self.trees[tree].above[rank as usize].is_some());
        ranks
    }

    /// Below what a rank would be nearer to the root, the nearest first.
    fn nearer(&mut self, tree: usize, rank: Rank) -> Vec<Change> {
        let depth = self.depths[tree][rank as usize];
        let mut changes = self.below_others(tree, rank, |above| above + 1 < depth);
        changes.sort_by_key(|change| self.depths[tree][change.above as usize]);
        changes
    }

    fn no_deeper(&mut self, tree: usize, rank: Rank) -> Vec<Change> {
        let depth = self.depths[tree][rank as usize];
        self.below_others(tree, rank, |above| above < depth)
    }

    fn below_others(&mut self, tree: usize, rank: Rank, may: impl Fn(u32) -> bool) -> Vec<Change> {
        let depths = &self.depths[tree];
        self.places += depths.len();
        // Whatever is no deeper than a rank does not hang below it.
        let others =
            (0..self.ways.ranks() as Rank).filter(|&above| above != rank && may(depths[above as usize]));
        let is_there = |&above: &Rank| self.ways.has_way(above, rank);
        others.filter(is_there).map(|above| Change { tree, rank, above }).collect()
    }

    fn difference(&self, change: Change) -> Difference {
        let weight = self.weights[change.tree];
        let mut difference: BTreeMap<usize, i128> = BTreeMap::new();
        let more = self.ways.shortest_uses(change.above, change.rank).unwrap_or_default();
        more.into_iter().for_each(|orbit| *difference.entry(orbit).or_default() += weight);
        if let Some(above) = &self.trees[change.tree].above[change.rank as usize] {
            above.uses.iter().for_each(|&orbit| *difference.entry(orbit).or_default() -= weight);
        }
        difference.into_iter().filter(|&(_, amount)| amount != 0).collect()
    }

    /// Whether orbits carry both changes.
    fn fits(&self, one: &Difference, other: &Difference) -> bool {
        let change = |of: &Difference, orbit: usize| {
            of.iter().find(|entry| entry.0 == orbit).map_or(0, |entry| entry.1)
        };
        one.iter().chain(other).all(|&(orbit, _)| {
            let change = change(one, orbit) + change(other, orbit);
            change <= 0 || self.used[orbit] + change <= self.limits[orbit]
        })
    }

    fn apply(&mut self, change: Change) {
        for (orbit, amount) in self.difference(change) {
            self.used[orbit] += amount;
        }
        self.trees[change.tree].hang(self.ways, change.rank, change.above);
        self.depths[change.tree] = self.trees[change.tree].depths(self.ways);
    }

    /// Applies both, if the second is still what it was after the first.
    fn apply_both(&mut self, one: Change, other: Change) -> bool {
        if (one.tree, one.rank) == (other.tree, other.rank) {
            return false;
        }
        let depths = self.depths[one.tree].clone();
        let back = self.trees[one.tree].above[one.rank as usize].clone();
        self.trees[one.tree].hang(self.ways, one.rank, one.above);
        self.depths[one.tree] = self.trees[one.tree].depths(self.ways);
        let tree = &self.trees[other.tree];
        let is_deeper =
            self.depths[other.tree][other.above as usize] >= self.depths[other.tree][other.rank as usize];
        if is_deeper || tree.is_below(other.above, other.rank) {
            self.trees[one.tree].above[one.rank as usize] = back;
            self.depths[one.tree] = depths;
            return false;
        }
        let weight = self.weights[one.tree];
        if let Some(back) = back {
            back.uses.iter().for_each(|&orbit| self.used[orbit] -= weight);
        }
        if let Some(now) = &self.trees[one.tree].above[one.rank as usize] {
            now.uses.iter().for_each(|&orbit| self.used[orbit] += weight);
        }
        self.apply(other);
        true
    }
}
