//! Kernels, and rows of their values.

use super::samples::{LANES, Row, Samples};
use super::wide;

/// How alike two samples are.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Kernel {
    /// x·y
    Linear,
    /// (gamma x·y + offset) to the power of `degree`
    Polynomial {
        /// The power.
        degree: u32,
        /// The factor of the scalar product.
        gamma: f64,
        /// What is added to it (`coef0` of LIBSVM).
        offset: f64,
    },
    /// e to the power of -gamma |x - y|²
    Rbf {
        /// The factor of the squared distance.
        gamma: f64,
    },
    /// tanh(gamma x·y + offset), which is not positive for many samples and parameters: then there
    /// may be several solutions.
    Sigmoid {
        /// The factor of the scalar product.
        gamma: f64,
        /// What is added to it (`coef0` of LIBSVM).
        offset: f64,
    },
}

impl Kernel {
    /// The value for two samples, by their scalar product and their squared lengths.
    fn of_product(self, product: f64, norms: f64) -> f64 {
        match self {
            Self::Linear => product,
            Self::Polynomial { degree, gamma, offset } => power(gamma * product + offset, degree),
            Self::Rbf { .. } => wide::exponential(self.rbf_power(product, norms)),
            Self::Sigmoid { gamma, offset } => tanh(gamma * product + offset),
        }
    }

    /// The power of e of an RBF value; the sum may be below 0 by rounding.
    fn rbf_power(self, product: f64, norms: f64) -> f64 {
        let Self::Rbf { gamma } = self else { return 0.0 };
        let distance = norms - 2.0 * product;
        if distance > 0.0 { -gamma * distance } else { 0.0 }
    }

    /// The value of a sample with itself, by its squared length.
    pub(crate) fn diagonal(self, norm: f64) -> f64 {
        f64::from(self.of_product(norm, norm + norm) as f32)
    }

    /// No value of samples of at most this squared length is farther from 0.
    pub(crate) fn largest(self, norm: f64) -> f64 {
        match self {
            Self::Linear => norm,
            Self::Polynomial { degree, gamma, offset } => power(gamma.abs() * norm + offset.abs(), degree),
            Self::Rbf { .. } | Self::Sigmoid { .. } => 1.0,
        }
    }

    /// The kernel's numbers, to compare those of different ranks.
    pub(crate) fn bits(self) -> [u64; 4] {
        match self {
            Self::Linear => [0; 4],
            Self::Polynomial { degree, gamma, offset } => {
                [1, degree.into(), gamma.to_bits(), offset.to_bits()]
            }
            Self::Rbf { gamma } => [2, 0, gamma.to_bits(), 0],
            Self::Sigmoid { gamma, offset } => [3, 0, gamma.to_bits(), offset.to_bits()],
        }
    }
}

/// By squaring, in an order of its own: the standard library's has other bits on other machines.
fn power(mut base: f64, mut exponent: u32) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

fn tanh(number: f64) -> f64 {
    /// Beyond it the result is 1 in 53 bits.
    const FLAT: f64 = 20.0;
    let size = number.abs().min(FLAT);
    let result = 1.0 - 2.0 / (wide::exponential(2.0 * size) + 1.0);
    if number < 0.0 { -result } else { result }
}

/// A sample that is compared with many, with room for all its features.
#[derive(Debug)]
pub(crate) struct Query {
    features: Vec<[f64; LANES]>,
    /// The blocks that are not zero.
    filled: Vec<u32>,
    norm: f64,
    /// Products or powers, while a row is made.
    scratch: Vec<f64>,
}

impl Query {
    /// For samples of at most so many features.
    pub(crate) fn new(features: u32) -> Self {
        let blocks = features.div_ceil(LANES as u32) as usize;
        Self { features: vec![[0.0; LANES]; blocks], filled: Vec::new(), norm: 0.0, scratch: Vec::new() }
    }

    /// Takes this sample in the place of the one before.
    pub(crate) fn set(&mut self, row: Row<'_>) {
        for block in self.filled.drain(..) {
            self.features[block as usize] = [0.0; LANES];
        }
        self.filled.extend_from_slice(row.blocks);
        for (block, values) in row.blocks.iter().zip(row.values) {
            self.features[*block as usize] = values.map(f64::from);
        }
        self.norm = row.norm();
    }

    /// Stores the kernel values of the sample with these samples, whose squared lengths are
    /// `norms`, in `into`. Returns whether all are finite.
    pub(crate) fn fill(
        &mut self,
        kernel: Kernel,
        samples: &Samples,
        which: &[u32],
        norms: impl Fn(usize) -> f64,
        into: &mut [f32],
    ) -> bool {
        let (scratch, norm) = (&mut self.scratch, self.norm);
        scratch.clear();
        scratch.resize(which.len(), 0.0);
        wide::products(&self.features, samples, which, scratch);
        if let Kernel::Rbf { .. } = kernel {
            for (at, number) in scratch.iter_mut().enumerate() {
                *number = kernel.rbf_power(*number, norm + norms(at));
            }
            wide::exponentials(scratch);
        } else {
            for (at, number) in scratch.iter_mut().enumerate() {
                *number = kernel.of_product(*number, norm + norms(at));
            }
        }
        let mut is_finite = true;
        for (into, number) in into.iter_mut().zip(scratch) {
            *into = *number as f32;
            is_finite &= into.is_finite();
        }
        is_finite
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Samples {
        let mut samples = Samples::new(20);
        samples.push([(0, 1.0), (17, -2.5), (18, 0.5)]).expect("is a sample");
        samples.push([(0, 0.25), (9, 3.0), (18, 4.0)]).expect("is a sample");
        samples.push([]).expect("is a sample");
        samples
    }

    #[test]
    fn rows_have_the_values_of_the_formulas_for_every_kernel() {
        let samples = samples();
        let plain = |row: usize| {
            let mut values = [0.0; 20];
            samples.nonzero(row).for_each(|(index, value)| values[index as usize] = f64::from(value));
            values
        };
        let mut query = Query::new(20);
        for kernel in [
            Kernel::Linear,
            Kernel::Polynomial { degree: 3, gamma: 0.5, offset: 1.0 },
            Kernel::Polynomial { degree: 0, gamma: 0.5, offset: 1.0 },
            Kernel::Rbf { gamma: 0.07 },
            Kernel::Sigmoid { gamma: 0.3, offset: -0.2 },
        ] {
            for first in 0..3 {
                query.set(samples.row(first));
                let norms: Vec<f64> = (0..3).map(|row| samples.row(row).norm()).collect();
                let mut row = [0.0; 3];
                assert!(query.fill(kernel, &samples, &[0, 1, 2], |at| norms[at], &mut row));
                for (second, found) in row.iter().copied().map(f64::from).enumerate() {
                    let pairs = || plain(first).into_iter().zip(plain(second));
                    let product: f64 = pairs().map(|(x, y)| x * y).sum();
                    let distance: f64 = pairs().map(|(x, y)| (x - y) * (x - y)).sum();
                    let expected = match kernel {
                        Kernel::Linear => product,
                        Kernel::Polynomial { degree, gamma, offset } => {
                            (gamma * product + offset).powi(degree as i32)
                        }
                        Kernel::Rbf { gamma } => (-gamma * distance).exp(),
                        Kernel::Sigmoid { gamma, offset } => (gamma * product + offset).tanh(),
                    };
                    let error = (found - expected).abs();
                    assert!(
                        error <= 1e-7 * expected.abs(),
                        "{kernel:?} {first} {second}: {found} {expected}"
                    );
                    assert!(found.abs() <= kernel.largest(30.0) * 1.0001);
                }
                assert_eq!(f64::from(row[first]), kernel.diagonal(norms[first]), "{kernel:?} {first}");
            }
        }
    }

    #[test]
    fn a_query_forgets_the_sample_before_and_tells_values_that_are_not_finite() {
        let samples = samples();
        let mut query = Query::new(20);
        let mut row = [0.0];
        query.set(samples.row(0));
        query.set(samples.row(2));
        assert!(query.fill(Kernel::Linear, &samples, &[0], |_| 0.0, &mut row));
        assert_eq!(row, [0.0]);
        query.set(samples.row(1));
        let steep = Kernel::Polynomial { degree: 200, gamma: 1.0, offset: 0.0 };
        assert!(!query.fill(steep, &samples, &[1], |_| 0.0, &mut row));
    }
}
