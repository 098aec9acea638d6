//! What is true of a solution, found in other ways: the conditions of optimality from the samples
//! alone, and the solution of a small problem by trying everything.

use super::kernel::Kernel;
use super::samples::Samples;

/// The kernel values of all pairs, by the formulas.
pub(crate) fn gram(kernel: Kernel, samples: &Samples) -> Vec<Vec<f64>> {
    let features = samples.features() as usize;
    let rows: Vec<Vec<f64>> = (0..samples.len())
        .map(|sample| {
            let mut row = vec![0.0; features];
            samples.nonzero(sample).for_each(|(index, value)| row[index as usize] = f64::from(value));
            row
        })
        .collect();
    let value = |x: &[f64], y: &[f64]| {
        let product: f64 = x.iter().zip(y).map(|(x, y)| x * y).sum();
        match kernel {
            Kernel::Linear => product,
            Kernel::Polynomial { degree, gamma, offset } => (gamma * product + offset).powi(degree as i32),
            Kernel::Rbf { gamma } => {
                let distance: f64 = x.iter().zip(y).map(|(x, y)| (x - y) * (x - y)).sum();
                (-gamma * distance).exp()
            }
            Kernel::Sigmoid { gamma, offset } => (gamma * product + offset).tanh(),
        }
    };
    rows.iter().map(|x| rows.iter().map(|y| value(x, y)).collect()).collect()
}

/// The largest violation of the conditions of optimality by these coefficients (factors times
/// labels), and the objective.
pub(crate) fn violation(gram: &[Vec<f64>], signs: &[f64], coefficients: &[f64], c: f64) -> (f64, f64) {
    let (mut least_up, mut most_low, mut objective) = (f64::INFINITY, f64::NEG_INFINITY, 0.0);
    let balance: f64 = coefficients.iter().sum();
    assert!(balance.abs() <= 1e-9 * c * signs.len() as f64, "coefficients add up to {balance:e}");
    for (row, (sign, coefficient)) in gram.iter().zip(signs.iter().zip(coefficients)) {
        let factor = sign * coefficient;
        assert!((0.0..=c).contains(&factor), "a factor is {factor}");
        let decision: f64 = row.iter().zip(coefficients).map(|(value, other)| value * other).sum();
        let error = decision - sign;
        let [may_grow, may_fall] = [factor < c, factor > 0.0];
        if if *sign > 0.0 { may_grow } else { may_fall } {
            least_up = least_up.min(error);
        }
        if if *sign > 0.0 { may_fall } else { may_grow } {
            most_low = most_low.max(error);
        }
        objective += factor * (0.5 * sign * decision - 1.0);
    }
    (most_low - least_up, objective)
}

/// The least objective of a small problem: each factor is at 0, at C or between, and for each such
/// choice the factors between follow from linear equations.
pub(crate) fn least_objective(gram: &[Vec<f64>], signs: &[f64], c: f64) -> f64 {
    let count = signs.len();
    let mut best = f64::INFINITY;
    for choice in 0..3usize.pow(count as u32) {
        let state = |at: usize| choice / 3usize.pow(at as u32) % 3;
        let free: Vec<usize> = (0..count).filter(|at| state(*at) == 2).collect();
        let mut factors: Vec<f64> = (0..count).map(|at| if state(at) == 1 { c } else { 0.0 }).collect();
        // For each free factor: its error is the intercept. And all factors times labels add to 0.
        let size = free.len() + 1;
        let mut rows: Vec<Vec<f64>> = free
            .iter()
            .map(|&i| {
                let mut row: Vec<f64> = free.iter().map(|&j| signs[j] * gram[i][j]).collect();
                let fixed: f64 = (0..count).map(|j| factors[j] * signs[j] * gram[i][j]).sum();
                row.extend([-1.0, signs[i] - fixed]);
                row
            })
            .collect();
        let fixed: f64 = factors.iter().zip(signs).map(|(factor, sign)| factor * sign).sum();
        let mut last: Vec<f64> = free.iter().map(|&j| signs[j]).collect();
        last.extend([0.0, -fixed]);
        rows.push(last);
        if free.is_empty() {
            if fixed.abs() > 1e-12 {
                continue;
            }
        } else if let Some(solution) = solved(rows, size) {
            free.iter().zip(solution).for_each(|(&at, value)| factors[at] = value);
        } else {
            continue;
        }
        if factors.iter().all(|factor| (-1e-12..=c + 1e-12).contains(factor)) {
            let coefficients: Vec<f64> =
                factors.iter().zip(signs).map(|(factor, sign)| factor.clamp(0.0, c) * sign).collect();
            best = best.min(violation(gram, signs, &coefficients, c).1);
        }
    }
    best
}

/// Solves linear equations, the right side in the last column; `None` if they have no one solution.
fn solved(mut rows: Vec<Vec<f64>>, size: usize) -> Option<Vec<f64>> {
    for column in 0..size {
        let pivot =
            (column..size).max_by(|a, b| rows[*a][column].abs().total_cmp(&rows[*b][column].abs()))?;
        rows.swap(column, pivot);
        if rows[column][column].abs() < 1e-10 {
            return None;
        }
        for other in (0..size).filter(|other| *other != column) {
            let factor = rows[other][column] / rows[column][column];
            let pivot_row = rows[column].clone();
            rows[other].iter_mut().zip(pivot_row).for_each(|(value, pivot)| *value -= factor * pivot);
        }
    }
    Some((0..size).map(|at| rows[at][size] / rows[at][at]).collect())
}
