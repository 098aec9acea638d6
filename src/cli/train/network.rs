//! The network that `pleach train` trains: its text on the command line, and its optimizer.

use std::fmt;
use std::str::FromStr;

use pleach_training::{Perceptron, Sgd};

use crate::cli::digits::{CLASSES, Digits};

/// Of the optimizer, where nothing else is said.
pub(crate) const LEARNING_RATE: f32 = 0.1;
pub(crate) const MOMENTUM: f32 = 0.9;

/// Most hidden layers, and most units of one: enough for images, and of few enough parameters that
/// a thousand ranks can be simulated.
const LAYERS_MAX: usize = 8;
const UNITS_MAX: usize = 4096;

/// A model as it is named on the command line: `mlp:H[xH...]`, the units of each hidden layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Model {
    hidden: Vec<usize>,
}

impl Model {
    /// The network that reads these images.
    pub(crate) fn network(&self, digits: &Digits) -> Perceptron {
        Perceptron::new(digits.image_pixels(), &self.hidden, CLASSES)
    }
}

impl Default for Model {
    fn default() -> Self {
        Self { hidden: vec![64] }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units: Vec<String> = self.hidden.iter().map(usize::to_string).collect();
        write!(formatter, "mlp:{}", units.join("x"))
    }
}

impl FromStr for Model {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let units = |text: &str| text.parse().ok().filter(|units| (1..=UNITS_MAX).contains(units));
        let hidden: Option<Vec<usize>> =
            text.strip_prefix("mlp:").and_then(|layers| layers.split('x').map(units).collect());
        hidden.filter(|hidden| hidden.len() <= LAYERS_MAX).map(|hidden| Self { hidden }).ok_or_else(|| {
            format!(
                "give mlp:H or mlp:HxH and so on: up to {LAYERS_MAX} hidden layers of 1 to {UNITS_MAX} units"
            )
        })
    }
}

/// A network with its parameters and its optimizer.
#[derive(Debug)]
pub(crate) struct Network {
    shape: Perceptron,
    parameters: Vec<f32>,
    optimizer: Sgd,
}

impl Network {
    /// With random weights; the same seed gives the same network everywhere.
    pub(crate) fn new(shape: Perceptron, seed: u64) -> Self {
        let parameters = shape.initial(seed);
        let optimizer = Sgd::new(parameters.len(), LEARNING_RATE, MOMENTUM);
        Self { shape, parameters, optimizer }
    }

    pub(crate) fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Stores the gradients of the loss, summed over these images and multiplied by `scale`.
    pub(crate) fn gradients(
        &self,
        digits: &Digits,
        images: impl Iterator<Item = usize>,
        scale: f32,
        into: &mut [f32],
    ) {
        let mut samples = images.map(|image| digits.sample(image));
        self.shape.gradient(&self.parameters, &mut samples, scale, into);
    }

    /// Goes a step against the gradients.
    pub(crate) fn step(&mut self, gradients: &[f32]) {
        self.optimizer.step(&mut self.parameters, gradients);
    }

    /// The share of the digits that it reads rightly.
    pub(crate) fn accuracy(&self, digits: &Digits) -> f64 {
        self.shape.reading(&self.parameters, &mut digits.samples()).accuracy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_one_text() {
        for text in ["mlp:64", "mlp:1", "mlp:128x64x4096"] {
            assert_eq!(text.parse::<Model>().expect("is a model").to_string(), text);
        }
        assert_eq!(Model::default().to_string(), "mlp:64");
        let long = format!("mlp:{}", ["8"; LAYERS_MAX + 1].join("x"));
        for text in ["mlp", "mlp:", "mlp:0", "mlp:64x", "mlp:4097", "cnn:3", &long] {
            assert!(text.parse::<Model>().expect_err(text).contains("mlp:HxH"), "{text}");
        }
    }
}
