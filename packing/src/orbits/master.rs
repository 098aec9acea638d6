//! The master problem of the column generation (Dantzig and Wolfe 1960; Gilmore and Gomory 1961).
//!
//! The rate is known beforehand from the cut. The load of a tree on an orbit of links is a share of
//! the capacity of the orbit. It is computed at this rate and as if the tree carried all data of
//! its root. The program asks for weights with sum 1 for each orbit of roots such that all loads
//! together are at most 1. It has few rows and very many columns, so columns are generated one at a
//! time: the cheapest column at the present prices. The program is solved in floating point. Only
//! the choice of trees is taken from the solution; their weights are computed again exactly.

use std::collections::BTreeSet;

use crate::orbits::pricing::Column;

/// Values of smaller magnitude count as zero.
const EPSILON: f64 = 1e-9;

/// How far a load of exactly 1 may be above 1 in floating point.
const FITS: f64 = 1e-7;

/// Number of pivots after which the inverse is computed anew.
const PIVOTS_FRESH_MAX: u32 = 48;

/// Largest number of pivots. After it the present solution is taken.
const PIVOTS_MAX: u32 = 4_000;

/// The solution: trees, with weights whose sum is 1 for each orbit of roots.
#[derive(Clone, Debug)]
pub(super) struct MasterSolution {
    /// Trees with a weight above zero.
    pub(super) columns: Vec<(Column, f64)>,
    /// Whether no orbit of links is loaded above its capacity.
    pub(super) fits: bool,
}

/// A variable of the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variable {
    /// The weight of a column.
    Weight(usize),
    /// The difference between the largest load and the load of an orbit of links.
    Slack(usize),
    /// The largest load.
    Load,
}

struct MasterProgram {
    /// Loads as fractions of the orbits' capacities.
    loads: Vec<Vec<f64>>,
    columns: Vec<Column>,
    /// The number of orbits of links; then the number of orbits of roots.
    rows: usize,
    groups: usize,
    basis: Vec<Variable>,
    inverse: Vec<Vec<f64>>,
    values: Vec<f64>,
    pivots: u32,
}

/// Finds weights of trees. `carries` is the number of uses that each orbit of links can carry at
/// the rate aimed for. `cheapest` gives the cheapest tree of an orbit of roots at given prices.
/// Stops as soon as all loads are at most 1, or when no column improves the solution.
pub(super) fn solve_master(
    carries: &[f64],
    groups: usize,
    rounds: usize,
    mut cheapest: impl FnMut(usize, &[f64]) -> Column,
) -> MasterSolution {
    let mut ask = |group: usize, prices: &[f64]| {
        let scaled: Vec<f64> = prices.iter().zip(carries).map(|(price, carries)| price / carries).collect();
        cheapest(group, &scaled)
    };
    let loads = |column: &Column| -> Vec<f64> {
        column.loads.iter().zip(carries).map(|(&load, carries)| f64::from(load) / carries).collect()
    };
    let mut pool = initial_columns(carries.len(), groups, rounds, &mut ask, &loads);
    let mut program = MasterProgram::new(carries.len(), groups, &mut pool, &loads);
    program.solve_with_pool();
    for _ in 0..PIVOTS_MAX {
        if program.load() <= 1.0 + EPSILON || program.pivots > PIVOTS_MAX {
            break;
        }
        let prices = program.prices();
        let mut is_better = false;
        for group in 0..groups {
            let column = ask(group, &prices[..carries.len()]);
            let loads = loads(&column);
            let cost: f64 = loads.iter().zip(&prices).map(|(load, price)| load * price).sum();
            if cost < prices[carries.len() + group] - EPSILON {
                program.columns.push(column);
                program.loads.push(loads);
                is_better = true;
            }
        }
        if !is_better {
            break;
        }
        program.solve_with_pool();
    }
    program.solution()
}

/// The first trees: the cheapest trees without prices, then at prices that rise with the load of
/// the trees so far (multiplicative weights).
fn initial_columns(
    rows: usize,
    groups: usize,
    rounds: usize,
    ask: &mut impl FnMut(usize, &[f64]) -> Column,
    loads: &impl Fn(&Column) -> Vec<f64>,
) -> BTreeSet<Column> {
    let mut pool = BTreeSet::new();
    let mut sums = vec![0.0_f64; rows];
    let mut prices = vec![0.0; rows];
    for round in 0..=rounds {
        for group in 0..groups {
            let column = ask(group, &prices);
            loads(&column).iter().zip(&mut sums).for_each(|(load, sum)| *sum += load);
            pool.insert(column);
        }
        let most = sums.iter().copied().fold(0.0, f64::max);
        if round == 0 && most <= 1.0 + EPSILON {
            break;
        }
        let steepness = 20.0 / most.max(EPSILON);
        let weights: Vec<f64> = sums.iter().map(|sum| (steepness * (sum - most)).exp()).collect();
        let total: f64 = weights.iter().sum();
        prices = weights.iter().map(|weight| weight / total).collect();
    }
    pool
}

impl MasterProgram {
    /// Begins with one column of each group.
    fn new(
        rows: usize,
        groups: usize,
        pool: &mut BTreeSet<Column>,
        loads: &impl Fn(&Column) -> Vec<f64>,
    ) -> Self {
        let columns: Vec<Column> = std::mem::take(pool).into_iter().collect();
        let loads: Vec<Vec<f64>> = columns.iter().map(loads).collect();
        let first = |group: usize| columns.iter().position(|column| column.orbit == group);
        let firsts: Vec<usize> = (0..groups).filter_map(first).collect();
        assert_eq!(firsts.len(), groups, "every group has a column");
        let sum = |row: usize| firsts.iter().map(|&first| loads[first][row]).sum::<f64>();
        let fullest = (0..rows).max_by(|&one, &other| sum(one).total_cmp(&sum(other))).unwrap_or(0);
        let mut basis: Vec<Variable> = (0..rows).map(Variable::Slack).collect();
        basis[fullest] = Variable::Load;
        basis.extend(firsts.iter().map(|&first| Variable::Weight(first)));
        let mut program =
            Self { loads, columns, rows, groups, basis, inverse: Vec::new(), values: Vec::new(), pivots: 0 };
        program.refresh();
        program
    }

    fn size(&self) -> usize {
        self.rows + self.groups
    }

    fn coefficients(&self, variable: Variable) -> Vec<f64> {
        let mut coefficients = vec![0.0; self.size()];
        match variable {
            Variable::Weight(column) => {
                coefficients[..self.rows].copy_from_slice(&self.loads[column]);
                coefficients[self.rows + self.columns[column].orbit] = 1.0;
            }
            Variable::Slack(row) => coefficients[row] = 1.0,
            Variable::Load => coefficients[..self.rows].fill(-1.0),
        }
        coefficients
    }

    /// Computes the inverse of the basis anew (Gauss and Jordan, largest pivots).
    fn refresh(&mut self) {
        let size = self.size();
        let mut rows: Vec<Vec<f64>> = vec![vec![0.0; 2 * size]; size];
        for (place, &variable) in self.basis.iter().enumerate() {
            for (row, value) in self.coefficients(variable).into_iter().enumerate() {
                rows[row][place] = value;
            }
        }
        (0..size).for_each(|row| rows[row][size + row] = 1.0);
        for place in 0..size {
            let largest =
                (place..size).max_by(|&a, &b| rows[a][place].abs().total_cmp(&rows[b][place].abs()));
            rows.swap(place, largest.unwrap_or(place));
            let pivot = rows[place][place];
            rows[place].iter_mut().for_each(|value| *value /= pivot);
            let pivot_row = rows[place].clone();
            for (row, values) in rows.iter_mut().enumerate() {
                let factor = values[place];
                if row != place && factor != 0.0 {
                    values.iter_mut().zip(&pivot_row).for_each(|(value, pivot)| *value -= factor * pivot);
                }
            }
        }
        self.inverse = rows.into_iter().map(|row| row[size..].to_vec()).collect();
        self.values = self.inverse.iter().map(|row| row[self.rows..].iter().sum()).collect();
    }

    fn place_of_load(&self) -> usize {
        let place = self.basis.iter().position(|&variable| variable == Variable::Load);
        place.expect("the load is above zero and stays in the basis")
    }

    fn load(&self) -> f64 {
        self.values[self.place_of_load()]
    }

    /// The prices of the orbits of links, then for each orbit of roots the most that a tree may
    /// cost.
    fn prices(&self) -> Vec<f64> {
        let row = &self.inverse[self.place_of_load()];
        row.iter().enumerate().map(|(place, &value)| if place < self.rows { -value } else { value }).collect()
    }

    /// Pivots while a slack or a known column reduces the largest load.
    fn solve_with_pool(&mut self) {
        while self.pivots <= PIVOTS_MAX && self.load() > 1.0 + EPSILON {
            let prices = self.prices();
            let mut best = (-EPSILON, None);
            for (row, &price) in prices[..self.rows].iter().enumerate() {
                if price < best.0 {
                    best = (price, Some(Variable::Slack(row)));
                }
            }
            for (column, loads) in self.loads.iter().enumerate() {
                let cost: f64 = loads.iter().zip(&prices).map(|(load, price)| load * price).sum();
                let gain = cost - prices[self.rows + self.columns[column].orbit];
                if gain < best.0 {
                    best = (gain, Some(Variable::Weight(column)));
                }
            }
            let Some(entering) = best.1 else { break };
            if !self.pivot(entering) {
                break;
            }
        }
    }

    fn pivot(&mut self, entering: Variable) -> bool {
        let coefficients = self.coefficients(entering);
        let dot = |row: &Vec<f64>| row.iter().zip(&coefficients).map(|(one, other)| one * other).sum::<f64>();
        let change: Vec<f64> = self.inverse.iter().map(dot).collect();
        let mut leaving: Option<(f64, usize)> = None;
        for (place, &change_here) in change.iter().enumerate() {
            if change_here <= EPSILON || self.basis[place] == Variable::Load {
                continue;
            }
            let ratio = self.values[place].max(0.0) / change_here;
            let is_less = leaving.is_none_or(|(least, other)| {
                ratio < least - EPSILON || (ratio < least + EPSILON && change_here > change[other])
            });
            if is_less {
                leaving = Some((ratio, place));
            }
        }
        let Some((ratio, place)) = leaving else { return false };
        self.pivots += 1;
        self.basis[place] = entering;
        if self.pivots.is_multiple_of(PIVOTS_FRESH_MAX) {
            self.refresh();
            return true;
        }
        let pivot_row: Vec<f64> = self.inverse[place].iter().map(|value| value / change[place]).collect();
        for (row, &factor) in change.iter().enumerate() {
            if row != place && factor != 0.0 {
                self.inverse[row]
                    .iter_mut()
                    .zip(&pivot_row)
                    .for_each(|(value, pivot)| *value -= factor * pivot);
                self.values[row] -= factor * ratio;
            }
        }
        self.inverse[place] = pivot_row;
        self.values[place] = ratio;
        true
    }

    fn solution(mut self) -> MasterSolution {
        self.refresh();
        let fits = self.load() <= 1.0 + FITS;
        let mut used: Vec<(usize, f64)> = Vec::new();
        for (&variable, &value) in self.basis.iter().zip(&self.values) {
            if let Variable::Weight(column) = variable
                && value > EPSILON
            {
                used.push((column, value));
            }
        }
        used.sort_by_key(|&(column, _)| column);
        MasterSolution {
            fits,
            columns: used
                .into_iter()
                .map(|(column, weight)| (self.columns[column].clone(), weight))
                .collect(),
        }
    }
}
