//! A multilayer perceptron: hidden layers of tanh units, softmax and cross-entropy at the end.
//!
//! All parameters are one flat slice, and so are their gradients, so that one collective averages
//! them. A layer is its weights, a row of its units for each input, and then its biases. By the
//! functions of `libm` the same training has the same bits on every machine.
//!
//! **The limit** is arithmetic: a sample reads each weight once in the pass forward and once in the
//! pass back. Inputs that are 0, as most pixels of a digit are, cost nothing.

use std::ops::Range;

use pleach_vocabulary::random::Random;

/// The inputs of one sample, and the number of its class.
pub type Sample<'a> = (&'a [f32], usize);

/// The shape of a network: everything but its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Perceptron {
    layers: Vec<Layer>,
}

/// Where a layer's parameters lie.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Layer {
    inputs: usize,
    units: usize,
    weights: Range<usize>,
    biases: Range<usize>,
}

/// How well classes are told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reading {
    /// The mean cross-entropy.
    pub loss: f64,
    /// The share of samples whose class is the likeliest.
    pub accuracy: f64,
}

impl Perceptron {
    /// From the number of inputs, through hidden layers of these numbers of units, to classes.
    #[must_use]
    pub fn new(inputs: usize, hidden: &[usize], classes: usize) -> Self {
        let (mut at, mut inputs) = (0, inputs);
        let layer = |&units: &usize| {
            let weights = at..at + inputs * units;
            let biases = weights.end..weights.end + units;
            let layer = Layer { inputs, units, weights, biases };
            (at, inputs) = (layer.biases.end, units);
            layer
        };
        Self { layers: hidden.iter().chain([&classes]).map(layer).collect() }
    }

    /// The lengths of weights and biases, layer by layer.
    #[must_use]
    pub fn lengths(&self) -> Vec<usize> {
        self.layers.iter().flat_map(|layer| [layer.weights.len(), layer.units]).collect()
    }

    /// The number of parameters.
    #[must_use]
    pub fn parameters(&self) -> usize {
        self.layers.last().map_or(0, |layer| layer.biases.end)
    }

    /// Random weights, and biases of 0; the same seed gives the same weights everywhere.
    #[must_use]
    pub fn initial(&self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        let mut parameters = vec![0.0; self.parameters()];
        for layer in &self.layers {
            // So the layer keeps the size of the numbers that go through it.
            let bound = (3.0 / layer.inputs as f32).sqrt();
            parameters[layer.weights.clone()].fill_with(|| bound * uniform(&mut random));
        }
        parameters
    }

    /// Stores the gradient of the loss, summed over the samples and multiplied by `scale`. Returns
    /// that loss.
    ///
    /// # Panics
    ///
    /// A slice has another length than the parameters, or a sample does not fit the network.
    pub fn gradient(
        &self,
        parameters: &[f32],
        samples: &mut dyn Iterator<Item = Sample<'_>>,
        scale: f32,
        into: &mut [f32],
    ) -> f32 {
        assert_eq!(into.len(), self.parameters(), "as many gradients as parameters");
        into.fill(0.0);
        let mut outputs = self.outputs();
        let (mut error, mut below) = (Vec::new(), Vec::new());
        let mut loss = 0.0;
        for (input, class) in samples {
            self.forward(parameters, input, &mut outputs);
            // The gradient of cross-entropy after softmax: what was said minus what is true.
            error.clone_from(&outputs[self.layers.len() - 1]);
            loss += scale * cross_entropy(error[class]);
            error[class] -= 1.0;
            error.iter_mut().for_each(|error| *error *= scale);
            for (number, layer) in self.layers.iter().enumerate().rev() {
                add_scaled(&mut into[layer.biases.clone()], 1.0, &error);
                let rows = into[layer.weights.clone()].chunks_exact_mut(layer.units);
                let Some(before) = number.checked_sub(1) else {
                    for (row, &input) in rows.zip(input).filter(|(_, input)| **input != 0.0) {
                        add_scaled(row, input, &error);
                    }
                    break;
                };
                below.clear();
                let weights = parameters[layer.weights.clone()].chunks_exact(layer.units);
                for ((row, weights), &active) in rows.zip(weights).zip(&outputs[before]) {
                    let blame: f32 = weights.iter().zip(&error).map(|(weight, error)| weight * error).sum();
                    below.push(blame * (1.0 - active * active));
                    add_scaled(row, active, &error);
                }
                std::mem::swap(&mut error, &mut below);
            }
        }
        loss
    }

    /// How well these parameters tell the classes of the samples.
    ///
    /// # Panics
    ///
    /// There are fewer parameters than the network has, or a sample does not fit the network.
    #[must_use]
    pub fn reading(&self, parameters: &[f32], samples: &mut dyn Iterator<Item = Sample<'_>>) -> Reading {
        let mut outputs = self.outputs();
        let (mut loss, mut right, mut all) = (0.0, 0, 0);
        for (input, class) in samples {
            self.forward(parameters, input, &mut outputs);
            let said = &outputs[self.layers.len() - 1];
            let best = (0..said.len()).max_by(|&a, &b| said[a].total_cmp(&said[b]));
            right += usize::from(best == Some(class));
            loss += f64::from(cross_entropy(said[class]));
            all += 1;
        }
        let all = f64::from(all);
        Reading { loss: loss / all, accuracy: right as f64 / all }
    }

    /// Room for the outputs of all layers.
    fn outputs(&self) -> Vec<Vec<f32>> {
        self.layers.iter().map(|layer| vec![0.0; layer.units]).collect()
    }

    /// Computes the outputs of all layers; those of the last are the probabilities of the classes.
    fn forward(&self, parameters: &[f32], input: &[f32], outputs: &mut [Vec<f32>]) {
        for (number, layer) in self.layers.iter().enumerate() {
            let (before, rest) = outputs.split_at_mut(number);
            let output = &mut rest[0];
            output.copy_from_slice(&parameters[layer.biases.clone()]);
            let rows = parameters[layer.weights.clone()].chunks_exact(layer.units);
            match before.last() {
                None => {
                    for (row, &input) in rows.zip(input).filter(|(_, input)| **input != 0.0) {
                        add_scaled(output, input, row);
                    }
                }
                Some(units) => rows.zip(units).for_each(|(row, &unit)| add_scaled(output, unit, row)),
            }
            if number + 1 < self.layers.len() {
                output.iter_mut().for_each(|unit| *unit = libm::tanhf(*unit));
            } else {
                softmax(output);
            }
        }
    }
}

/// A number from -1 to 1.
fn uniform(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// Makes probabilities of numbers.
pub(crate) fn softmax(values: &mut [f32]) {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    values.iter_mut().for_each(|value| *value = libm::expf(*value - largest));
    let sum: f32 = values.iter().sum();
    values.iter_mut().for_each(|value| *value /= sum);
}

/// The loss of a sample whose true class got this probability. It is finite if the probability is a
/// number.
pub(crate) fn cross_entropy(probability: f32) -> f32 {
    -(if probability == 0.0 { f32::MIN_POSITIVE } else { probability }).ln()
}

pub(crate) fn add_scaled(into: &mut [f32], factor: f32, from: &[f32]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into += factor * from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random samples; every third input is 0.
    fn samples(random: &mut Random, inputs: usize, classes: usize, count: usize) -> Vec<(Vec<f32>, usize)> {
        let mut sample = || {
            let input = (0..inputs).map(|at| if at % 3 == 2 { 0.0 } else { uniform(random) }).collect();
            (input, random.index(classes))
        };
        (0..count).map(|_| sample()).collect()
    }

    fn borrowed(samples: &[(Vec<f32>, usize)]) -> impl Iterator<Item = Sample<'_>> {
        samples.iter().map(|(input, class)| (&input[..], *class))
    }

    #[test]
    fn the_parts_of_the_flat_slice_lie_one_behind_the_other() {
        let network = Perceptron::new(64, &[32, 16], 10);
        assert_eq!(network.lengths(), [64 * 32, 32, 32 * 16, 16, 16 * 10, 10]);
        assert_eq!(network.parameters(), network.lengths().iter().sum::<usize>());
        let initial = network.initial(7);
        assert_eq!(initial, network.initial(7));
        assert_ne!(initial, network.initial(8));
        assert!(initial[64 * 32..][..32].iter().all(|bias| *bias == 0.0));
        let bound = (3.0_f32 / 64.0).sqrt();
        assert!(initial[..64 * 32].iter().all(|weight| weight.abs() <= bound));
    }

    #[test]
    fn gradients_are_the_slopes_of_the_loss() {
        const STEP: f32 = 1e-2;
        const CLASSES: usize = 5;
        let mut random = Random::new(3);
        for hidden in [&[][..], &[24], &[24, 12], &[8, 8, 8]] {
            let network = Perceptron::new(20, hidden, CLASSES);
            let drawn = samples(&mut random, 20, CLASSES, 8);
            let (mut parameters, mut gradient) = (network.initial(7), vec![1.0; network.parameters()]);
            let at_start = network.gradient(&parameters, &mut borrowed(&drawn), 1.0, &mut gradient);
            let mut unused = vec![0.0; gradient.len()];
            for parameter in (0..gradient.len()).step_by(7) {
                let mut loss = |change: f32| {
                    parameters[parameter] += change;
                    let loss = network.gradient(&parameters, &mut borrowed(&drawn), 1.0, &mut unused);
                    parameters[parameter] -= change;
                    loss
                };
                let slope = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
                let found = gradient[parameter];
                assert!(
                    (slope - found).abs() <= 0.01 + 0.05 * slope.abs(),
                    "{hidden:?} {parameter}: {slope} {found}"
                );
            }
            // Classes that are equally likely have a loss of ln of their number.
            let loss = f64::from(at_start / 8.0);
            assert!((loss - (CLASSES as f64).ln()).abs() < 1.0, "{hidden:?}: {loss}");
            let reading = network.reading(&parameters, &mut borrowed(&drawn));
            assert!((reading.loss - loss).abs() < 1e-4 && (0.0..=1.0).contains(&reading.accuracy));
        }
    }

    #[test]
    fn descent_learns_classes_that_can_be_told() {
        let mut random = Random::new(5);
        let network = Perceptron::new(6, &[12, 6], 2);
        // The class is a product of signs, which no network without a hidden layer tells.
        let mut drawn = samples(&mut random, 6, 2, 200);
        drawn.iter_mut().for_each(|(input, class)| *class = usize::from(input[0] * input[1] > 0.0));
        let (mut parameters, mut gradient) = (network.initial(1), vec![0.0; network.parameters()]);
        let mut sgd = crate::Sgd::new(parameters.len(), 0.3, 0.9);
        for _ in 0..300 {
            network.gradient(&parameters, &mut borrowed(&drawn), 1.0 / 200.0, &mut gradient);
            sgd.step(&mut parameters, &gradient);
        }
        assert!(network.reading(&parameters, &mut borrowed(&drawn)).accuracy > 0.95);
    }
}
