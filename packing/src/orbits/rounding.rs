//! From the solution of the master problem to trees with exact weights.
//!
//! 1. The weights are computed again exactly, from the orbits of links that are full. If this
//!    fails, the weights are rounded.
//! 2. Trees of equal weight are tried: as many as were requested, or the fewest that carry as much.
//!    A local search moves ranks below other parents, so that overloaded orbits lose load. It may
//!    miss a solution that exists.
//! 3. A second local search moves ranks nearer to the roots while the loads stay within their
//!    limits.
//!    limits.

use std::collections::{BTreeMap, BTreeSet};

use num_rational::Ratio;
use pleach_vocabulary::Rank;

use super::master::MasterSolution;
use super::pricing::{Column, Pricing};
use crate::{MAX_TREES_PER_ROOT, Rate};

/// Largest number of trees of equal weight for each root that is tried first.
const EQUAL_TREES_MAX: u32 = 8;

/// The trees of a solution with their weights, and the largest load of an orbit of links. The load
/// is 1 if the rate aimed for is reached. With `trees_per_root` all weights of a root are equal.
pub(super) fn rounded_trees(
    pricing: &Pricing<'_>,
    carries: &[Rate],
    groups: usize,
    solution: &MasterSolution,
    trees_per_root: Option<u32>,
) -> (Vec<(Column, Rate)>, Rate) {
    let search = LocalSearch { pricing, carries, groups };
    let (columns, load) = match trees_per_root {
        Some(count) => shares(search.least(solution, count), count),
        None => fractional_or_equal(solution, &search),
    };
    let load = load.max(Rate::from_integer(1));
    (nearer_to_roots(pricing, columns, carries, load), load)
}

/// The fewest trees that reach the rate aimed for; if no such trees are found, the trees that come
/// nearest to it.
fn fractional_or_equal(
    solution: &MasterSolution,
    search: &LocalSearch<'_, '_>,
) -> (Vec<(Column, Rate)>, Rate) {
    let weights = exact_weights(solution, search.carries, search.groups);
    let different: BTreeSet<_> = solution.columns.iter().map(|(column, _)| edges_of(column)).collect();
    let of_root = |root: usize| different.iter().filter(|tree| tree.0 == root).count();
    let most = (0..search.groups).map(of_root).max().unwrap_or(0) as u32;
    let is_good = weights.is_simple() || (weights.is_exact() && most == 1);
    let fewer = if is_good && most <= MAX_TREES_PER_ROOT { most } else { EQUAL_TREES_MAX + 1 };
    for count in 1..fewer.min(EQUAL_TREES_MAX + 1) {
        if let Some(equal) = search.fitting(solution, count) {
            return shares(equal, count);
        }
    }
    if most > MAX_TREES_PER_ROOT {
        return shares(search.least(solution, MAX_TREES_PER_ROOT), MAX_TREES_PER_ROOT);
    }
    let columns = solution.columns.iter().map(|(column, _)| column.clone());
    (columns.zip(weights.parts).collect(), weights.load)
}

fn shares(equal: EqualTrees, count: u32) -> (Vec<(Column, Rate)>, Rate) {
    let share = |(column, times): (Column, u32)| (column, Rate::new(times.into(), count.into()));
    (equal.columns.into_iter().map(share).collect(), equal.load)
}

/// The orbit of the root and the edges of a tree.
pub(super) fn edges_of(column: &Column) -> (usize, Vec<(Rank, Rank)>) {
    (column.orbit, column.edges.iter().map(|&(from, to, _)| (from, to)).collect())
}

/// The least load at which an orbit of links counts as full.
const FULL: f64 = 1.0 - 1e-6;

/// Denominator of the rounded weights, where exact weights were not found.
const COARSE: u32 = 1 << 16;

/// Weights of the columns, as shares of the data of their root. Divided by `load`, they overload no
/// orbit. `load` is 1 if the rate aimed for is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Weights {
    parts: Vec<Rate>,
    load: Rate,
}

/// Largest common denominator of exact weights. Its product with a bandwidth is far below 2¹²⁷.
const DENOMINATOR_MAX: i128 = 1 << 56;

/// Up to this common denominator, different weights are as good as equal weights.
const DENOMINATOR_SMALL: i128 = 1 << 20;

impl Weights {
    /// Whether the weights reach the rate aimed for and have a common denominator within
    /// [`DENOMINATOR_MAX`].
    fn is_exact(&self) -> bool {
        self.load <= Rate::from_integer(1) && self.has_denominator_up_to(DENOMINATOR_MAX)
    }

    /// Whether the weights are exact and also have a small common denominator, which people can
    /// read.
    fn is_simple(&self) -> bool {
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

/// The weights that fill exactly the orbits that are full in floating point. If these weights
/// overload another orbit, the result is the weights of the solution, rounded.
fn exact_weights(solution: &MasterSolution, carries: &[Rate], groups: usize) -> Weights {
    let exact = solved(solution, carries, groups)
        .map(|parts| Weights { load: load(solution, carries, &parts), parts });
    match exact {
        Some(weights) if weights.is_exact() => weights,
        _ => rounded(solution, carries, groups, COARSE),
    }
}

/// The weights, rounded to multiples of 1 / `parts`. The weights of each group sum to 1.
fn rounded(solution: &MasterSolution, carries: &[Rate], groups: usize, parts: u32) -> Weights {
    let counts = counts(solution, groups, parts);
    let weights: Vec<Rate> = counts.into_iter().map(|count| Rate::new(count.into(), parts.into())).collect();
    Weights { load: load(solution, carries, &weights).max(Rate::from_integer(1)), parts: weights }
}

/// The weight of each column in units of 1 / `parts`, rounded so that each group has `parts` units.
fn counts(solution: &MasterSolution, groups: usize, parts: u32) -> Vec<u32> {
    let wanted: Vec<f64> = solution.columns.iter().map(|(_, weight)| weight * f64::from(parts)).collect();
    let mut counts: Vec<u32> = wanted.iter().map(|wanted| wanted.floor() as u32).collect();
    for group in 0..groups {
        let mut members: Vec<usize> =
            (0..counts.len()).filter(|&place| solution.columns[place].0.orbit == group).collect();
        let rest = |place: usize| wanted[place] - wanted[place].floor();
        members.sort_by(|&one, &other| rest(other).total_cmp(&rest(one)));
        let sum: u32 = members.iter().map(|&place| counts[place]).sum();
        members.iter().cycle().take(parts.saturating_sub(sum) as usize).for_each(|&place| counts[place] += 1);
    }
    counts
}

/// The largest load of any orbit.
fn load(solution: &MasterSolution, carries: &[Rate], parts: &[Rate]) -> Rate {
    let of_orbit = |orbit: usize| {
        let used: Rate = parts
            .iter()
            .zip(&solution.columns)
            .map(|(part, (column, _))| part * i128::from(column.loads[orbit]))
            .sum();
        used / carries[orbit]
    };
    (0..carries.len()).map(of_orbit).max().unwrap_or_default()
}

/// Solves the equations that each full orbit has load 1 and that the weights of each group sum to
/// 1. `None` if there is no unique solution, a weight is negative, or the numbers grow too large.
fn solved(solution: &MasterSolution, carries: &[Rate], groups: usize) -> Option<Vec<Rate>> {
    let unknowns = solution.columns.len();
    let mut rows: Vec<Vec<Rate>> = Vec::new();
    for group in 0..groups {
        let mut row: Vec<Rate> = solution
            .columns
            .iter()
            .map(|(column, _)| Rate::from_integer(i128::from(column.orbit == group)))
            .collect();
        row.push(Rate::from_integer(1));
        rows.push(row);
    }
    for (orbit, carries) in carries.iter().enumerate() {
        let used: f64 =
            solution.columns.iter().map(|(column, weight)| weight * f64::from(column.loads[orbit])).sum();
        if used / (*carries.numer() as f64 / *carries.denom() as f64) >= FULL {
            let mut row: Vec<Rate> = solution
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

/// A product; `None` if it does not fit.
fn product(one: Rate, other: Rate) -> Option<Rate> {
    // Common factors are removed crosswise first, so that the products are small.
    let (left, right) = (Ratio::new(*one.numer(), *other.denom()), Ratio::new(*other.numer(), *one.denom()));
    let numerator = left.numer().checked_mul(*right.numer())?;
    Some(Ratio::new_raw(numerator, left.denom().checked_mul(*right.denom())?))
}

/// A difference; `None` if its numerator or denominator does not fit.
fn less(one: Rate, other: Rate) -> Option<Rate> {
    let scale = Ratio::new(*one.denom(), *other.denom());
    // one.denom = scale.numer · common, other.denom = scale.denom · common.
    let left = one.numer().checked_mul(*scale.denom())?;
    let right = other.numer().checked_mul(*scale.numer())?;
    Some(Ratio::new(left.checked_sub(right)?, one.denom().checked_mul(*scale.denom())?))
}

/// A tree whose edges can be changed.
#[derive(Clone, Debug)]
struct MutableTree {
    /// The orbit of the root.
    orbit: usize,
    /// By rank: the edge from its parent; the root has no parent.
    parent: Vec<Option<ParentEdge>>,
}

/// The edge from the parent of a rank.
#[derive(Clone, Debug)]
struct ParentEdge {
    rank: Rank,
    /// The nodes of the path.
    nodes: Vec<u32>,
    /// The orbits of links on the path, once for each use.
    uses: Vec<usize>,
}

impl MutableTree {
    fn of(column: &Column, pricing: &Pricing<'_>) -> Self {
        let mut parent = vec![None; pricing.ranks()];
        for (from, to, nodes) in &column.edges {
            parent[*to as usize] =
                Some(ParentEdge { rank: *from, nodes: nodes.clone(), uses: pricing.orbits_over(nodes) });
        }
        Self { orbit: column.orbit, parent }
    }

    /// Moves a rank below another parent, over the shortest path. Returns the edge from the old
    /// parent.
    fn reparent(&mut self, pricing: &Pricing<'_>, rank: Rank, parent: Rank) -> Option<ParentEdge> {
        let nodes = pricing.shortest_path_nodes(parent, rank).expect("a path leads to the new parent");
        let uses = pricing.orbits_over(&nodes);
        self.parent[rank as usize].replace(ParentEdge { rank: parent, nodes, uses })
    }

    /// Whether a rank is `top` or a descendant of `top`.
    fn is_descendant(&self, rank: Rank, top: Rank) -> bool {
        let mut rank = rank;
        while let Some(parent) = &self.parent[rank as usize] {
            if rank == top {
                return true;
            }
            rank = parent.rank;
        }
        rank == top
    }

    /// The depth of each rank, in edges.
    fn depths(&self, pricing: &Pricing<'_>) -> Vec<u32> {
        let mut depths = vec![0; self.parent.len()];
        let children = self.children();
        let mut reached = vec![pricing.first_rank(self.orbit)];
        while let Some(rank) = reached.pop() {
            for &one in &children[rank as usize] {
                depths[one as usize] = depths[rank as usize] + 1;
                reached.push(one);
            }
        }
        depths
    }

    fn children(&self) -> Vec<Vec<Rank>> {
        let mut children = vec![Vec::new(); self.parent.len()];
        for (rank, parent) in self.parent.iter().enumerate() {
            if let Some(parent) = parent {
                children[parent.rank as usize].push(rank as Rank);
            }
        }
        children
    }

    /// The tree as a column, with loads on `orbits` orbits of links.
    fn column(&self, pricing: &Pricing<'_>, orbits: usize) -> Column {
        let mut loads = vec![0; orbits];
        self.parent.iter().flatten().flat_map(|parent| &parent.uses).for_each(|&orbit| loads[orbit] += 1);
        let children = self.children();
        let mut edges = Vec::with_capacity(self.parent.len());
        let mut reached = vec![pricing.first_rank(self.orbit)];
        let mut next = 0;
        while let Some(&rank) = reached.get(next) {
            next += 1;
            for &one in &children[rank as usize] {
                let nodes = self.parent[one as usize].as_ref().map(|parent| parent.nodes.clone());
                edges.push((rank, one, nodes.expect("a child has a path from its parent")));
                reached.push(one);
            }
        }
        Column { orbit: self.orbit, loads, edges }
    }
}

// Trees of equal weight: the number that was requested, or the fewest that carry as much.
//
// A local search starts from the solution, rounded to whole trees. It moves one rank at a time
// below another parent so that overloaded orbits of links lose load. It may miss a solution that
// exists. Its result is checked in any case, because loads are counted.

/// Number of changes that are considered for one number of trees and one limit.
const BALANCE_WORK_MAX: usize = 4_000_000;

/// Moves without improvement before the search ends.
const IDLE_MAX: usize = 60;

/// Number of load limits that are tried between a limit that was reached and a limit that cannot be
/// reached.
const LIMITS_TRIED: u32 = 8;

/// Trees of equal weight, each with its count, and the largest load.
#[derive(Clone, Debug)]
struct EqualTrees {
    columns: Vec<(Column, u32)>,
    load: Rate,
}

/// A local search for trees of equal weight. `carries` is the number of uses that every orbit of
/// links can carry for each tree of a root, and `groups` the number of orbits of roots with trees.
struct LocalSearch<'w, 't> {
    pricing: &'w Pricing<'t>,
    carries: &'w [Rate],
    groups: usize,
}

impl LocalSearch<'_, '_> {
    /// `count` trees of equal weight for each root with a load of at most 1, if the search finds
    /// such trees.
    fn fitting(&self, solution: &MasterSolution, count: u32) -> Option<EqualTrees> {
        let one = Rate::from_integer(1);
        self.may_fit(count).then(|| self.searched(solution, count, one)).filter(|equal| equal.load <= one)
    }

    /// `count` trees of equal weight for each root, with the least load that the search finds.
    fn least(&self, solution: &MasterSolution, count: u32) -> EqualTrees {
        let (mut low, half) = (Rate::from_integer(1), Rate::new(1, 2));
        let mut best = self.searched(solution, count, low);
        for _ in 0..LIMITS_TRIED {
            if best.load <= Rate::from_integer(1) {
                break;
            }
            // A rate near the middle with a small denominator.
            let middle = ((low + best.load) * half * 1024).round() / 1024;
            if middle <= low || middle >= best.load {
                break;
            }
            let equal = self.searched(solution, count, middle);
            if equal.load > middle {
                low = middle;
            }
            if equal.load < best.load {
                best = equal;
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

    /// Whether the links allow as many edges into ranks as the trees have.
    fn may_fit(&self, count: u32) -> bool {
        let ranks = self.pricing.ranks() as i128;
        let search: i128 = self.limits(count, Rate::from_integer(1)).iter().sum();
        search >= i128::from(count) * self.groups as i128 * (ranks - 1)
    }

    fn searched(&self, solution: &MasterSolution, count: u32, load: Rate) -> EqualTrees {
        let limits = self.limits(count, load);
        let mut trees = self.rounded(solution, count);
        let mut used = vec![0_i128; limits.len()];
        let all_uses = trees.iter().flat_map(|tree| tree.parent.iter().flatten());
        all_uses.flat_map(|parent| &parent.uses).for_each(|&orbit| used[orbit] += 1);
        let (mut idle, mut places, mut turn) = (0, 0, 0);
        let excess =
            |used: &[i128]| used.iter().zip(&limits).map(|(used, limit)| (used - limit).max(0)).sum::<i128>();
        let mut least = excess(&used);
        while least > 0 && idle < IDLE_MAX && places < BALANCE_WORK_MAX {
            turn += 1;
            let Some(change) = self.best_change(&trees, &used, &limits, turn, &mut places) else { break };
            change.apply(self.pricing, &mut trees, &mut used);
            idle += 1;
            if excess(&used) < least {
                (least, idle) = (excess(&used), 0);
            }
        }
        self.equal(trees, &used, count)
    }

    fn rounded(&self, solution: &MasterSolution, count: u32) -> Vec<MutableTree> {
        let weights = counts(solution, self.groups, count);
        let mut trees = Vec::new();
        for ((column, _), count) in solution.columns.iter().zip(weights) {
            let tree = MutableTree::of(column, self.pricing);
            trees.extend((0..count).map(|_| tree.clone()));
        }
        trees
    }

    /// The best change that takes a use from an overloaded orbit. `turn` decides which overloaded
    /// orbit this is, and which of several equally good changes is taken.
    fn best_change(
        &self,
        trees: &[MutableTree],
        used: &[i128],
        limits: &[i128],
        turn: usize,
        places: &mut usize,
    ) -> Option<Reparenting> {
        let over: Vec<usize> = (0..limits.len()).filter(|&orbit| used[orbit] > limits[orbit]).collect();
        let orbit = *over.get(turn % over.len().max(1))?;
        let mut best: Option<((i128, u64), Reparenting)> = None;
        for (tree, searched) in trees.iter().enumerate() {
            for (rank, parent) in searched.parent.iter().enumerate() {
                let Some(parent) = parent.as_ref().filter(|parent| parent.uses.contains(&orbit)) else {
                    continue;
                };
                for other in (0..self.pricing.ranks() as Rank).filter(|&other| other != parent.rank) {
                    *places += 1;
                    if other as usize == rank || *places > BALANCE_WORK_MAX {
                        continue;
                    }
                    let Some(instead) = self.pricing.shortest_path_orbits(other, rank as Rank) else {
                        continue;
                    };
                    let gain = gain(used, limits, &parent.uses, &instead);
                    // The order of equally good changes differs from turn to turn.
                    let order = (turn as u64 + u64::from(other) * 31 + rank as u64 * 17)
                        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
                    let key = (gain, order);
                    if best.as_ref().is_none_or(|(least, _)| key < *least)
                        && !searched.is_descendant(other, rank as Rank)
                    {
                        best = Some((key, Reparenting { tree, rank: rank as Rank, parent: other }));
                    }
                }
            }
        }
        best.map(|(_, change)| change)
    }

    fn equal(&self, trees: Vec<MutableTree>, used: &[i128], count: u32) -> EqualTrees {
        let load =
            used.iter().zip(self.carries).map(|(&used, &carries)| Rate::from_integer(used) / carries).max();
        let mut columns: Vec<Column> =
            trees.into_iter().map(|tree| tree.column(self.pricing, used.len())).collect();
        columns.sort_unstable();
        let mut counted: Vec<(Column, u32)> = Vec::new();
        for column in columns {
            match counted.last_mut() {
                Some((last, count)) if *last == column => *count += 1,
                _ => counted.push((column, 1)),
            }
        }
        EqualTrees { columns: counted, load: load.unwrap_or_default() / i128::from(count) }
    }
}

/// How much the sum of all uses beyond the limits grows.
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

/// A change: a rank of a tree gets another parent.
#[derive(Clone, Copy, Debug)]
struct Reparenting {
    tree: usize,
    rank: Rank,
    parent: Rank,
}

impl Reparenting {
    fn apply(self, pricing: &Pricing<'_>, trees: &mut [MutableTree], used: &mut [i128]) {
        let tree = &mut trees[self.tree];
        if let Some(before) = tree.reparent(pricing, self.rank, self.parent) {
            before.uses.into_iter().for_each(|orbit| used[orbit] -= 1);
        }
        if let Some(now) = &tree.parent[self.rank as usize] {
            now.uses.iter().for_each(|&orbit| used[orbit] += 1);
        }
    }
}

// Reduces the depth of trees without more load on any orbit.
//
// Ranks move nearer to the root, one at a time, while the orbits of links can carry the change. If
// a change would overload an orbit, a second rank, of this tree or of another tree, gets another
// parent too. The second rank gets no deeper and frees the orbit.

/// Number of changes that are considered in all.
const DEPTH_WORK_MAX: usize = 6_000_000;

/// Number of second changes that are considered for each difference of loads.
const ALIKE_MAX: usize = 6;

/// The orbits whose uses change, each with the amount of the change.
type Difference = Vec<(usize, i128)>;

struct DepthReduction<'w, 't> {
    pricing: &'w Pricing<'t>,
    trees: Vec<MutableTree>,
    depths: Vec<Vec<u32>>,
    /// The weights of the trees, then the use and the limit of each orbit, all in one unit.
    weights: Vec<i128>,
    used: Vec<i128>,
    limits: Vec<i128>,
    places: usize,
}

/// Makes trees less deep. Loads stay within `carries` times `load`.
fn nearer_to_roots(
    pricing: &Pricing<'_>,
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
    let trees: Vec<MutableTree> =
        columns.iter().map(|(column, _)| MutableTree::of(column, pricing)).collect();
    let mut reduction = DepthReduction {
        pricing,
        depths: trees.iter().map(|tree| tree.depths(pricing)).collect(),
        trees,
        weights,
        used: vec![0; carries.len()],
        limits,
        places: 0,
    };
    for (tree, weight) in reduction.trees.iter().zip(&reduction.weights) {
        let uses = tree.parent.iter().flatten().flat_map(|parent| &parent.uses);
        uses.for_each(|&orbit| reduction.used[orbit] += weight);
    }
    while reduction.places < DEPTH_WORK_MAX && (reduction.reparent_nearer() || reduction.reparent_pair()) {}
    let parts = columns.into_iter().map(|(_, part)| part);
    reduction.trees.iter().map(|tree| tree.column(pricing, carries.len())).zip(parts).collect()
}

fn least_multiple(one: i128, other: i128) -> Option<i128> {
    one.checked_mul(*Rate::new(other, one).numer())
}

impl DepthReduction<'_, '_> {
    /// Moves every rank nearer to the root if possible, the deepest rank first. Returns whether a
    /// rank was moved.
    fn reparent_nearer(&mut self) -> bool {
        let mut reduce_depth = false;
        for tree in 0..self.trees.len() {
            for rank in self.deepest_first(tree) {
                let change = self.nearer(tree, rank).into_iter().find(|&change| {
                    let difference = self.difference(change);
                    self.fits(&difference, &Vec::new())
                });
                if let Some(change) = change {
                    self.apply(change);
                    reduce_depth = true;
                }
            }
        }
        reduce_depth
    }

    /// Moves one rank nearer to the root and moves a second rank elsewhere. Returns whether there
    /// was such a pair.
    fn reparent_pair(&mut self) -> bool {
        let mut alike: BTreeMap<Difference, Vec<Reparenting>> = BTreeMap::new();
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
                    if self.places > DEPTH_WORK_MAX {
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
        let mut ranks: Vec<Rank> = (0..self.pricing.ranks() as Rank).collect();
        ranks.sort_by_key(|&rank| std::cmp::Reverse(self.depths[tree][rank as usize]));
        ranks.retain(|&rank| self.trees[tree].parent[rank as usize].is_some());
        ranks
    }

    /// The changes that bring a rank nearer to the root; those with the parent nearest to the root
    /// come first.
    fn nearer(&mut self, tree: usize, rank: Rank) -> Vec<Reparenting> {
        let depth = self.depths[tree][rank as usize];
        let mut changes = self.reparentings(tree, rank, |parent| parent + 1 < depth);
        changes.sort_by_key(|change| self.depths[tree][change.parent as usize]);
        changes
    }

    fn no_deeper(&mut self, tree: usize, rank: Rank) -> Vec<Reparenting> {
        let depth = self.depths[tree][rank as usize];
        self.reparentings(tree, rank, |parent| parent < depth)
    }

    fn reparentings(&mut self, tree: usize, rank: Rank, may: impl Fn(u32) -> bool) -> Vec<Reparenting> {
        let depths = &self.depths[tree];
        self.places += depths.len();
        // A rank that is no deeper than `rank` is not its descendant.
        let others = (0..self.pricing.ranks() as Rank)
            .filter(|&parent| parent != rank && may(depths[parent as usize]));
        let is_there = |&parent: &Rank| self.pricing.has_path(parent, rank);
        others.filter(is_there).map(|parent| Reparenting { tree, rank, parent }).collect()
    }

    fn difference(&self, change: Reparenting) -> Difference {
        let weight = self.weights[change.tree];
        let mut difference: BTreeMap<usize, i128> = BTreeMap::new();
        let more = self.pricing.shortest_path_orbits(change.parent, change.rank).unwrap_or_default();
        more.into_iter().for_each(|orbit| *difference.entry(orbit).or_default() += weight);
        if let Some(parent) = &self.trees[change.tree].parent[change.rank as usize] {
            parent.uses.iter().for_each(|&orbit| *difference.entry(orbit).or_default() -= weight);
        }
        difference.into_iter().filter(|&(_, amount)| amount != 0).collect()
    }

    /// Whether the orbits can carry both changes.
    fn fits(&self, one: &Difference, other: &Difference) -> bool {
        let change = |of: &Difference, orbit: usize| {
            of.iter().find(|entry| entry.0 == orbit).map_or(0, |entry| entry.1)
        };
        one.iter().chain(other).all(|&(orbit, _)| {
            let change = change(one, orbit) + change(other, orbit);
            change <= 0 || self.used[orbit] + change <= self.limits[orbit]
        })
    }

    fn apply(&mut self, change: Reparenting) {
        for (orbit, amount) in self.difference(change) {
            self.used[orbit] += amount;
        }
        self.trees[change.tree].reparent(self.pricing, change.rank, change.parent);
        self.depths[change.tree] = self.trees[change.tree].depths(self.pricing);
    }

    /// Applies both changes, if the second change is still valid after the first one.
    fn apply_both(&mut self, one: Reparenting, other: Reparenting) -> bool {
        if (one.tree, one.rank) == (other.tree, other.rank) {
            return false;
        }
        let depths = self.depths[one.tree].clone();
        let back = self.trees[one.tree].parent[one.rank as usize].clone();
        self.trees[one.tree].reparent(self.pricing, one.rank, one.parent);
        self.depths[one.tree] = self.trees[one.tree].depths(self.pricing);
        let tree = &self.trees[other.tree];
        let is_deeper =
            self.depths[other.tree][other.parent as usize] >= self.depths[other.tree][other.rank as usize];
        if is_deeper || tree.is_descendant(other.parent, other.rank) {
            self.trees[one.tree].parent[one.rank as usize] = back;
            self.depths[one.tree] = depths;
            return false;
        }
        let weight = self.weights[one.tree];
        if let Some(back) = back {
            back.uses.iter().for_each(|&orbit| self.used[orbit] -= weight);
        }
        if let Some(now) = &self.trees[one.tree].parent[one.rank as usize] {
            now.uses.iter().for_each(|&orbit| self.used[orbit] += weight);
        }
        self.apply(other);
        true
    }
}
