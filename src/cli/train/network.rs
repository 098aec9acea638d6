//! A small network: one hidden layer of tanh units, cross-entropy, gradient descent with momentum.
//!
//! All parameters are one flat slice, and so are their gradients, so that one collective averages
//! them. The layout is: weights of the hidden layer (a row an input), its biases, weights of the
//! output (a row a hidden unit), its biases.
//!
//! By the functions of `libm` the same training has the same bits on every machine.

use pleach_training::Sgd;
use pleach_vocabulary::random::Random;

use crate::cli::digits::{CLASSES, Digits};

/// Units of the hidden layer.
const HIDDEN: usize = 64;

/// Of the optimizer, where nothing else is said.
pub(crate) const LEARNING_RATE: f32 = 0.1;
pub(crate) const MOMENTUM: f32 = 0.9;

/// A number from -1 to 1.
fn uniform(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// The shape of a network: everything but its parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    inputs: usize,
}

/// A network and its optimizer.
#[derive(Debug)]
pub(crate) struct Network {
    shape: Shape,
    parameters: Vec<f32>,
    optimizer: Sgd,
}

/// How well digits are read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    /// The mean cross-entropy.
    pub(crate) loss: f64,
    /// The share that is read rightly.
    pub(crate) accuracy: f64,
}

/// A flat slice as layers.
struct Layers<'a> {
    hidden: &'a [f32],
    hidden_bias: &'a [f32],
    output: &'a [f32],
    output_bias: &'a [f32],
}

impl Shape {
    /// For images of that many pixels.
    pub(crate) fn new(inputs: usize) -> Self {
        Self { inputs }
    }

    /// The lengths of the pieces of the flat slice.
    pub(crate) fn lengths(self) -> [usize; 4] {
        [self.inputs * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES]
    }

    /// The number of parameters.
    pub(crate) fn parameters(self) -> usize {
        self.lengths().iter().sum()
    }

    /// Random weights; the same seed gives the same weights everywhere.
    pub(crate) fn initial(self, seed: u64) -> Vec<f32> {
        let mut random = Random::new(seed);
        let mut parameters = vec![0.0; self.parameters()];
        let (hidden, rest) = parameters.split_at_mut(self.inputs * HIDDEN);
        let output = &mut rest[HIDDEN..][..HIDDEN * CLASSES];
        for (weights, fan_in) in [(hidden, self.inputs), (output, HIDDEN)] {
            // So the layer keeps the size of what goes through it.
            let bound = (3.0 / fan_in as f32).sqrt();
            weights.iter_mut().for_each(|weight| *weight = bound * uniform(&mut random));
        }
        parameters
    }

    /// Stores the gradients of the loss, summed over these images and multiplied by `scale`.
    /// Returns that loss.
    pub(crate) fn gradients(
        self,
        parameters: &[f32],
        digits: &Digits,
        images: impl Iterator<Item = usize>,
        scale: f32,
        into: &mut [f32],
    ) -> f32 {
        into.fill(0.0);
        let layers = self.layers(parameters);
        let (hidden, rest) = into.split_at_mut(self.inputs * HIDDEN);
        let (hidden_bias, rest) = rest.split_at_mut(HIDDEN);
        let (output, output_bias) = rest.split_at_mut(HIDDEN * CLASSES);
        let mut loss = 0.0;
        for image in images {
            let input = digits.image(image);
            let (activation, mut error) = layers.forward(input);
            loss += scale * cross_entropy(error[digits.label(image)]);
            // The gradient of cross-entropy after softmax: what was said minus what is true.
            error[digits.label(image)] -= 1.0;
            error.iter_mut().for_each(|error| *error *= scale);
            add_scaled(output_bias, 1.0, &error);
            let mut hidden_error = [0.0; HIDDEN];
            for (unit, &active) in activation.iter().enumerate() {
                let row = unit * CLASSES..(unit + 1) * CLASSES;
                let blame: f32 = layers.output[row.clone()].iter().zip(&error).map(|(w, e)| w * e).sum();
                hidden_error[unit] = blame * (1.0 - active * active);
                add_scaled(&mut output[row], active, &error);
            }
            add_scaled(hidden_bias, 1.0, &hidden_error);
            for (row, &pixel) in
                hidden.chunks_exact_mut(HIDDEN).zip(input).filter(|(_, pixel)| **pixel != 0.0)
            {
                add_scaled(row, pixel, &hidden_error);
            }
        }
        loss
    }

    /// How well these parameters read digits.
    pub(crate) fn reading(self, parameters: &[f32], digits: &Digits) -> Reading {
        let layers = self.layers(parameters);
        let (mut loss, mut right) = (0.0, 0);
        for index in 0..digits.len() {
            let (_, said) = layers.forward(digits.image(index));
            let best = (0..CLASSES).max_by(|&a, &b| said[a].total_cmp(&said[b]));
            right += usize::from(best == Some(digits.label(index)));
            loss += f64::from(cross_entropy(said[digits.label(index)]));
        }
        let all = digits.len() as f64;
        Reading { loss: loss / all, accuracy: right as f64 / all }
    }

    fn layers(self, parameters: &[f32]) -> Layers<'_> {
        let (hidden, rest) = parameters.split_at(self.inputs * HIDDEN);
        let (hidden_bias, rest) = rest.split_at(HIDDEN);
        let (output, output_bias) = rest.split_at(HIDDEN * CLASSES);
        Layers { hidden, hidden_bias, output, output_bias }
    }
}

/// The loss of an image whose true digit got this probability. It is finite if the probability is a
/// number.
fn cross_entropy(probability: f32) -> f32 {
    -(if probability == 0.0 { f32::MIN_POSITIVE } else { probability }).ln()
}

impl Network {
    /// With random weights; the same seed gives the same network everywhere.
    pub(crate) fn new(inputs: usize, seed: u64) -> Self {
        let shape = Shape::new(inputs);
        let parameters = shape.initial(seed);
        let optimizer = Sgd::new(parameters.len(), LEARNING_RATE, MOMENTUM);
        Self { shape, parameters, optimizer }
    }

    pub(crate) fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    pub(crate) fn parameters_mut(&mut self) -> &mut [f32] {
        &mut self.parameters
    }

    /// Stores the gradients of the loss, summed over these images and multiplied by `scale`.
    pub(crate) fn gradients(
        &self,
        digits: &Digits,
        images: impl Iterator<Item = usize>,
        scale: f32,
        into: &mut [f32],
    ) {
        self.shape.gradients(&self.parameters, digits, images, scale, into);
    }

    /// Goes a step against the gradients.
    pub(crate) fn step(&mut self, gradients: &[f32]) {
        self.optimizer.step(&mut self.parameters, gradients);
    }

    /// The share of the digits that it reads rightly.
    pub(crate) fn accuracy(&self, digits: &Digits) -> f64 {
        self.shape.reading(&self.parameters, digits).accuracy
    }
}

impl Layers<'_> {
    /// Activations of the hidden layer, and the probability of each digit.
    fn forward(&self, input: &[f32]) -> ([f32; HIDDEN], [f32; CLASSES]) {
        let mut hidden = [0.0; HIDDEN];
        hidden.copy_from_slice(self.hidden_bias);
        for (row, &pixel) in self.hidden.chunks_exact(HIDDEN).zip(input).filter(|(_, pixel)| **pixel != 0.0) {
            add_scaled(&mut hidden, pixel, row);
        }
        hidden.iter_mut().for_each(|unit| *unit = libm::tanhf(*unit));
        let mut output = [0.0; CLASSES];
        output.copy_from_slice(self.output_bias);
        for (row, &unit) in self.output.chunks_exact(CLASSES).zip(&hidden) {
            add_scaled(&mut output, unit, row);
        }
        let largest = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        output.iter_mut().for_each(|value| *value = libm::expf(*value - largest));
        let sum: f32 = output.iter().sum();
        output.iter_mut().for_each(|value| *value /= sum);
        (hidden, output)
    }
}

fn add_scaled(into: &mut [f32], factor: f32, from: &[f32]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into += factor * from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::digits::DataSet;

    #[test]
    fn gradients_are_the_slopes_of_the_loss() {
        const STEP: f32 = 1e-2;
        let digits = DataSet::built_in().expect("is whole").train;
        let shape = Shape::new(64);
        let (mut parameters, mut gradients) = (shape.initial(7), vec![0.0; shape.parameters()]);
        let at_start = shape.gradients(&parameters, &digits, 0..8, 1.0, &mut gradients);
        let mut unused = vec![0.0; gradients.len()];
        for parameter in (0..gradients.len()).step_by(23) {
            let mut loss = |change: f32| {
                parameters[parameter] += change;
                let loss = shape.gradients(&parameters, &digits, 0..8, 1.0, &mut unused);
                parameters[parameter] -= change;
                loss
            };
            let (slope, gradient) = ((loss(STEP) - loss(-STEP)) / (2.0 * STEP), gradients[parameter]);
            assert!((slope - gradient).abs() <= 0.01 + 0.05 * slope.abs(), "{parameter}: {slope} {gradient}");
        }
        // Ten digits that are equally likely have a loss of ln 10.
        assert!((at_start / 8.0 - 10_f32.ln()).abs() < 1.0, "{at_start}");
    }
}
