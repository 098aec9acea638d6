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
    pub fn gradient<'a>(
        &'a self,
        parameters: &[f32],
        samples: &mut dyn Iterator<Item = Sample<'a>>,
        scale: f32,
        into: &mut [f32],
    ) -> f32 {
        assert_eq!(into.len(), self.parameters(), "as many gradients as parameters");
        let mut passes = self.passes(samples);
        passes.forward(parameters);
        let loss = passes.begin_backward(scale);
        passes.backward(&(0..into.len()), parameters, into);
        loss
    }

    /// The passes of a batch, before the first layer.
    ///
    /// # Panics
    ///
    /// A sample does not fit the network.
    #[must_use]
    pub fn passes<'a>(&'a self, samples: &mut dyn Iterator<Item = Sample<'a>>) -> Passes<'a> {
        let samples: Vec<Sample<'a>> = samples.collect();
        let inputs = self.layers.first().map_or(0, |layer| layer.inputs);
        assert!(samples.iter().all(|(input, _)| input.len() == inputs), "a sample has {inputs} inputs");
        Passes { network: self, samples, outputs: Vec::new(), error: Vec::new(), backward: None }
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
            right += usize::from(likeliest(said) == Some(class));
            loss += f64::from(cross_entropy(said[class]));
            all += 1;
        }
        let all = f64::from(all);
        Reading { loss: loss / all, accuracy: right as f64 / all }
    }

    /// The likeliest class of a sample with these inputs.
    ///
    /// # Panics
    ///
    /// There are fewer parameters than the network has, or it has no classes.
    #[must_use]
    pub fn class(&self, parameters: &[f32], input: &[f32]) -> usize {
        let mut outputs = self.outputs();
        self.forward(parameters, input, &mut outputs);
        outputs.last().and_then(|said| likeliest(said)).expect("a network has classes")
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

/// The two passes of a batch, layer by layer: forward a layer at a time from the first, as its
/// parameters come, and backward a piece of the gradient at a time from the last element. So a
/// piece can travel while those below it are computed.
///
/// **Invariant:** an element of the gradient is added up in the order of samples, so neither pieces
/// nor the order of layers change a bit.
#[derive(Clone, Debug)]
pub struct Passes<'a> {
    network: &'a Perceptron,
    samples: Vec<Sample<'a>>,
    /// By layer that was passed: its outputs, sample by sample.
    outputs: Vec<Vec<f32>>,
    /// The slope of the loss by what goes into the units of a layer, sample by sample.
    error: Vec<f32>,
    /// Whose slope that is; none before the backward pass, and behind it.
    backward: Option<usize>,
}

impl Passes<'_> {
    /// Passes forward through all layers whose parameters are there, which were not passed: the
    /// slice begins with the first layer, and may end in the middle of any.
    pub fn forward(&mut self, parameters: &[f32]) {
        let layers = &self.network.layers;
        for (number, layer) in layers.iter().enumerate().skip(self.outputs.len()) {
            if parameters.len() < layer.biases.end {
                return;
            }
            let mut outputs = Vec::with_capacity(self.samples.len() * layer.units);
            let weights = &parameters[layer.weights.clone()];
            for sample in 0..self.samples.len() {
                let begin = outputs.len();
                outputs.extend_from_slice(&parameters[layer.biases.clone()]);
                let output = &mut outputs[begin..];
                let rows = weights.chunks_exact(layer.units.max(1));
                // Most pixels of a digit are 0.
                for (row, &input) in rows.zip(self.inputs(number, sample)) {
                    if number > 0 || input != 0.0 {
                        add_scaled(output, input, row);
                    }
                }
                if number + 1 < layers.len() {
                    output.iter_mut().for_each(|unit| *unit = libm::tanhf(*unit));
                } else {
                    softmax(output);
                }
            }
            self.outputs.push(outputs);
        }
    }

    /// Begins the backward pass. Returns the loss, summed over the samples and multiplied by
    /// `scale`, as all slopes are.
    ///
    /// # Panics
    ///
    /// The forward pass is not over.
    pub fn begin_backward(&mut self, scale: f32) -> f32 {
        let last = self.network.layers.len().checked_sub(1).expect("a network has a layer");
        assert_eq!(self.outputs.len(), last + 1, "the forward pass comes first");
        self.error.clone_from(&self.outputs[last]);
        let mut loss = 0.0;
        let units = self.network.layers[last].units;
        for (error, (_, class)) in self.error.chunks_exact_mut(units.max(1)).zip(&self.samples) {
            loss += scale * cross_entropy(error[*class]);
            // The gradient of cross-entropy after softmax: what was said minus what is true.
            error[*class] -= 1.0;
            error.iter_mut().for_each(|error| *error *= scale);
        }
        self.backward = Some(last);
        loss
    }

    /// Stores a piece of the gradient; the first one ends with the last element, and each ends
    /// where the one before has begun.
    ///
    /// # Panics
    ///
    /// There are fewer parameters than the network has, or `into` is not as long as the piece.
    pub fn backward(&mut self, piece: &Range<usize>, parameters: &[f32], into: &mut [f32]) {
        assert_eq!(into.len(), piece.len(), "as many gradients as the piece has");
        into.fill(0.0);
        while let Some(number) = self.backward {
            let begin = self.network.layers[number].weights.start;
            if begin < piece.end {
                self.add(number, piece, into);
            }
            if begin <= piece.start {
                // What lies below is computed when this piece is on its way.
                return;
            }
            self.go_below(number, parameters);
        }
    }

    /// What a layer reads of a sample.
    fn inputs(&self, number: usize, sample: usize) -> &[f32] {
        match number.checked_sub(1) {
            None => self.samples[sample].0,
            Some(below) => {
                let units = self.network.layers[below].units;
                &self.outputs[below][sample * units..(sample + 1) * units]
            }
        }
    }

    /// Adds the elements of a layer that are in a piece.
    fn add(&self, number: usize, piece: &Range<usize>, into: &mut [f32]) {
        let layer = &self.network.layers[number];
        let common = |range: &Range<usize>| {
            let begin = range.start.max(piece.start);
            begin..range.end.min(piece.end).max(begin)
        };
        let (weights, biases) = (common(&layer.weights), common(&layer.biases));
        for (sample, error) in self.error.chunks_exact(layer.units.max(1)).enumerate() {
            if !biases.is_empty() {
                let own = &error[biases.start - layer.biases.start..];
                add_scaled(&mut into[biases.start - piece.start..biases.end - piece.start], 1.0, own);
            }
            let inputs = self.inputs(number, sample);
            let mut at = weights.start;
            while at < weights.end {
                let (row, unit) =
                    ((at - layer.weights.start) / layer.units, (at - layer.weights.start) % layer.units);
                let end = weights.end.min(at + layer.units - unit);
                // Most pixels of a digit are 0.
                if number > 0 || inputs[row] != 0.0 {
                    add_scaled(&mut into[at - piece.start..end - piece.start], inputs[row], &error[unit..]);
                }
                at = end;
            }
        }
    }

    /// Goes on to the layer below this one.
    fn go_below(&mut self, number: usize, parameters: &[f32]) {
        self.backward = number.checked_sub(1);
        let Some(below) = self.backward else { return };
        let layer = &self.network.layers[number];
        let mut errors = Vec::with_capacity(self.samples.len() * layer.inputs);
        let outputs = self.outputs[below].chunks_exact(layer.inputs.max(1));
        for (error, output) in self.error.chunks_exact(layer.units.max(1)).zip(outputs) {
            let rows = parameters[layer.weights.clone()].chunks_exact(layer.units.max(1));
            for (row, active) in rows.zip(output) {
                let blame: f32 = row.iter().zip(error).map(|(weight, error)| weight * error).sum();
                errors.push(blame * (1.0 - active * active));
            }
        }
        self.error = errors;
    }
}

/// The class of the largest probability.
fn likeliest(said: &[f32]) -> Option<usize> {
    (0..said.len()).max_by(|&a, &b| said[a].total_cmp(&said[b]))
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

    /// The gradient and the loss, one sample after the other through all layers.
    fn sample_by_sample(
        network: &Perceptron,
        parameters: &[f32],
        samples: &[(Vec<f32>, usize)],
        scale: f32,
    ) -> (Vec<f32>, f32) {
        let (mut into, mut loss) = (vec![0.0; parameters.len()], 0.0);
        let mut outputs = network.outputs();
        let mut below = Vec::new();
        for (input, class) in borrowed(samples) {
            network.forward(parameters, input, &mut outputs);
            let mut error = outputs[network.layers.len() - 1].clone();
            loss += scale * cross_entropy(error[class]);
            error[class] -= 1.0;
            error.iter_mut().for_each(|error| *error *= scale);
            for (number, layer) in network.layers.iter().enumerate().rev() {
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
        (into, loss)
    }

    #[test]
    fn pieces_of_a_gradient_have_the_bits_of_one_sample_after_the_other() {
        let mut random = Random::new(11);
        let bits = |elements: &[f32]| elements.iter().map(|element| element.to_bits()).collect::<Vec<_>>();
        for hidden in [&[][..], &[24], &[7, 12, 5]] {
            let network = Perceptron::new(20, hidden, 4);
            let drawn = samples(&mut random, 20, 4, 9);
            let parameters = network.initial(3);
            let (whole, loss) = sample_by_sample(&network, &parameters, &drawn, 0.125);
            let mut gradient = vec![1.0; whole.len()];
            let at_once = network.gradient(&parameters, &mut borrowed(&drawn), 0.125, &mut gradient);
            assert_eq!((bits(&gradient), at_once.to_bits()), (bits(&whole), loss.to_bits()), "{hidden:?}");
            for length in [1, 3, 16, 100, whole.len()] {
                let mut passes = network.passes(&mut borrowed(&drawn));
                // Parameters come in pieces, too, and the first layers first.
                (0..=whole.len()).step_by(length).for_each(|end| passes.forward(&parameters[..end]));
                passes.forward(&parameters);
                assert_eq!(passes.begin_backward(0.125).to_bits(), loss.to_bits(), "{hidden:?}, {length}");
                let mut end = whole.len();
                gradient.fill(1.0);
                while end > 0 {
                    let piece = end.saturating_sub(length)..end;
                    passes.backward(&piece, &parameters, &mut gradient[piece.clone()]);
                    end = piece.start;
                }
                assert_eq!(bits(&gradient), bits(&whole), "{hidden:?}, pieces of {length}");
            }
        }
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
