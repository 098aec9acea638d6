//! What is true of a solution, found in other ways: the conditions of optimality from the samples
//! alone, and the least objective by a solver of quadratic programs.

use clarabel::algebra::CscMatrix;
use clarabel::solver::{DefaultSettings, DefaultSolver, IPSolver, SolverStatus, SupportedConeT};

use super::kernel::Kernel;
use super::samples::Samples;

/// How near to the least objective the solver ends, relative and absolute.
const TOLERANCE: f64 = 1e-9;

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

/// The least objective, by an interior-point solver: half of f'Qf less the sum of f, where the
/// factors f lie between 0 and C and add up to 0 with their signs. The kernel must be positive.
pub(crate) fn least_objective(gram: &[Vec<f64>], signs: &[f64], c: f64) -> f64 {
    let count = signs.len();
    let quadratic: Vec<Vec<f64>> =
        (0..count).map(|i| (0..count).map(|j| signs[i] * signs[j] * gram[i][j]).collect()).collect();
    let diagonal = |value: f64| -> Vec<Vec<f64>> {
        (0..count).map(|i| (0..count).map(|j| if i == j { value } else { 0.0 }).collect()).collect()
    };
    let mut rows = vec![signs.to_vec()];
    rows.extend(diagonal(1.0));
    rows.extend(diagonal(-1.0));
    let right = [vec![0.0], vec![c; count], vec![0.0; count]].concat();
    let cones = [SupportedConeT::ZeroConeT(1), SupportedConeT::NonnegativeConeT(2 * count)];
    let settings = DefaultSettings {
        verbose: false,
        tol_gap_abs: TOLERANCE,
        tol_gap_rel: TOLERANCE,
        tol_feas: TOLERANCE,
        ..DefaultSettings::default()
    };
    let quadratic = CscMatrix::from(&quadratic).to_triu();
    let linear = vec![-1.0; count];
    let mut solver =
        DefaultSolver::new(&quadratic, &linear, &CscMatrix::from(&rows), &right, &cones, settings)
            .expect("a problem of consistent sizes");
    solver.solve();
    let status = solver.solution.status;
    assert!(matches!(status, SolverStatus::Solved | SolverStatus::AlmostSolved), "{status}");
    solver.solution.obj_val
}
