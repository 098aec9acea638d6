//! A small network: one hidden layer of tanh units, cross-entropy, gradient descent with momentum.
//!
//! All parameters are one flat slice, and so are their gradients, so that one collective averages
//! them. The layout is: weights of the hidden layer (a row an input), its biases, weights of the
//! output (a row a hidden unit), its biases.

use pleach_vocabulary::random::Random;

use crate::cli::digits::{CLASSES, Digits};

/// Units of the hidden layer.
const HIDDEN: usize = 64;
const LEARNING_RATE: f32 = 0.1;
const MOMENTUM: f32 = 0.9;

/// A number from -1 to 1.
fn uniform(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

/// The network and the velocity of its parameters.
#[derive(Debug)]
pub(super) struct Network {
    inputs: usize,
    parameters: Vec<f32>,
    velocity: Vec<f32>,
}

/// A flat slice as layers.
struct Layers<'a> {
    hidden: &'a [f32],
    hidden_bias: &'a [f32],
    output: &'a [f32],
    output_bias: &'a [f32],
}

impl Network {
    /// With random weights; the same seed gives the same network everywhere.
    pub(super) fn new(inputs: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut parameters = vec![0.0; Self::parameters_for(inputs)];
        let (hidden, rest) = parameters.split_at_mut(inputs * HIDDEN);
        let output = &mut rest[HIDDEN..][..HIDDEN * CLASSES];
        for (weights, fan_in) in [(hidden, inputs), (output, HIDDEN)] {
            // So the layer keeps the size of what goes through it.
            let bound = (3.0 / fan_in as f32).sqrt();
            weights.iter_mut().for_each(|weight| *weight = bound * uniform(&mut random));
        }
        let velocity = vec![0.0; parameters.len()];
        Self { inputs, parameters, velocity }
    }

    /// The number of parameters of a network with `inputs` inputs.
    pub(super) fn parameters_for(inputs: usize) -> usize {
        inputs * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
    }

    pub(super) fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Stores the gradients of the loss, summed over these images and multiplied by `scale`.
    pub(super) fn gradients(
        &self,
        digits: &Digits,
        images: impl Iterator<Item = usize>,
        scale: f32,
        into: &mut [f32],
    ) {
        into.fill(0.0);
        let layers = self.layers();
        let (hidden, rest) = into.split_at_mut(self.inputs * HIDDEN);
        let (hidden_bias, rest) = rest.split_at_mut(HIDDEN);
        let (output, output_bias) = rest.split_at_mut(HIDDEN * CLASSES);
        for image in images {
            let input = digits.image(image);
            let (activation, mut error) = layers.forward(input);
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
    }

    /// Goes a step against the gradients.
    pub(super) fn step(&mut self, gradients: &[f32]) {
        let moving = self.parameters.iter_mut().zip(&mut self.velocity);
        for ((parameter, velocity), gradient) in moving.zip(gradients) {
            *velocity = MOMENTUM * *velocity - LEARNING_RATE * gradient;
            *parameter += *velocity;
        }
    }

    /// The share of the digits that it reads rightly.
    pub(super) fn accuracy(&self, digits: &Digits) -> f64 {
        let layers = self.layers();
        let is_right = |&index: &usize| {
            let (_, said) = layers.forward(digits.image(index));
            let best = (0..CLASSES).max_by(|&a, &b| said[a].total_cmp(&said[b]));
            best == Some(digits.label(index))
        };
        (0..digits.len()).filter(is_right).count() as f64 / digits.len() as f64
    }

    fn layers(&self) -> Layers<'_> {
        let (hidden, rest) = self.parameters.split_at(self.inputs * HIDDEN);
        let (hidden_bias, rest) = rest.split_at(HIDDEN);
        let (output, output_bias) = rest.split_at(HIDDEN * CLASSES);
        Layers { hidden, hidden_bias, output, output_bias }
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
        hidden.iter_mut().for_each(|unit| *unit = unit.tanh());
        let mut output = [0.0; CLASSES];
        output.copy_from_slice(self.output_bias);
        for (row, &unit) in self.output.chunks_exact(CLASSES).zip(&hidden) {
            add_scaled(&mut output, unit, row);
        }
        let largest = output.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        output.iter_mut().for_each(|value| *value = (*value - largest).exp());
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
        let mut network = Network::new(64, 7);
        let mut gradients = vec![0.0; network.parameters().len()];
        network.gradients(&digits, 0..8, 1.0, &mut gradients);
        for parameter in (0..gradients.len()).step_by(23) {
            let mut loss = |change: f32| {
                network.parameters[parameter] += change;
                let losses = (0..8)
                    .map(|image| -network.layers().forward(digits.image(image)).1[digits.label(image)].ln());
                let loss: f32 = losses.sum();
                network.parameters[parameter] -= change;
                loss
            };
            let (slope, gradient) = ((loss(STEP) - loss(-STEP)) / (2.0 * STEP), gradients[parameter]);
            assert!((slope - gradient).abs() <= 0.01 + 0.05 * slope.abs(), "{parameter}: {slope} {gradient}");
        }
    }
}
