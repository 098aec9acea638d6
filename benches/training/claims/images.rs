//! Images of digits, and the network that learns to read them.

use std::path::Path;

use pleach::Rank;
use pleach_training::{Layout, Learner, Perceptron, Reading, Sample};
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::digits::{CLASSES, DataSet, Digits};

/// Hidden units of the network.
const HIDDEN: usize = 32;

/// Images in a batch of one rank.
const BATCH: usize = 16;

/// Rows of a square of pixels of MNIST that becomes one pixel.
const MNIST_POOL: usize = 2;

/// Images with their labels.
#[derive(Clone)]
pub(crate) struct Images {
    pixels: Vec<f32>,
    labels: Vec<usize>,
}

/// Images to learn from, and others.
pub(crate) struct Data {
    pub(crate) name: &'static str,
    learned: Images,
    test: Images,
    image_pixels: usize,
}

impl Images {
    fn of(digits: &Digits) -> Self {
        let pixels = digits.samples().flat_map(|(image, _)| image).copied().collect();
        Self { pixels, labels: (0..digits.len()).map(|index| digits.label(index)).collect() }
    }

    fn sample(&self, index: usize) -> Sample<'_> {
        let each = self.pixels.len() / self.labels.len();
        (&self.pixels[index * each..][..each], self.labels[index])
    }

    fn pick(&self, is_picked: impl Fn(usize) -> bool) -> Self {
        let picked: Vec<usize> = (0..self.labels.len()).filter(|index| is_picked(*index)).collect();
        let pixels = picked.iter().flat_map(|index| self.sample(*index).0).copied().collect();
        Self { pixels, labels: picked.iter().map(|index| self.labels[*index]).collect() }
    }
}

impl Data {
    fn new(name: &'static str, all: &DataSet) -> Self {
        let [learned, test] = [&all.train, &all.test].map(Images::of);
        let image_pixels = learned.sample(0).0.len();
        Self { name, learned, test, image_pixels }
    }

    /// The built-in digits.
    pub(crate) fn digits() -> Result<Self, String> {
        let all = DataSet::built_in().map_err(|error| error.to_string())?;
        Ok(Self::new("digits", &all))
    }

    /// MNIST from a folder.
    pub(crate) fn mnist(folder: &Path) -> Result<Self, String> {
        let all = DataSet::from_folder(folder).and_then(|all| all.pooled(MNIST_POOL));
        Ok(Self::new("MNIST", &all.map_err(|error| error.to_string())?))
    }

    /// Pixels of an image, and classes.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.image_pixels, CLASSES)
    }

    /// One of the images to learn from; after the last one comes the first.
    pub(crate) fn learned(&self, index: usize) -> Sample<'_> {
        self.learned.sample(index % self.learned.labels.len())
    }

    /// Four fifths of the images to learn from, with the others to choose by in the place of those
    /// to test by.
    pub(crate) fn validation(&self) -> Self {
        let learned = self.learned.pick(|index| index % 5 != 4);
        let test = self.learned.pick(|index| index % 5 == 4);
        Self { name: self.name, learned, test, image_pixels: self.image_pixels }
    }

    fn network(&self) -> Perceptron {
        Perceptron::new(self.image_pixels, &[HIDDEN], CLASSES)
    }

    /// Bytes of the parameters of the network that reads them.
    pub(crate) fn parameter_bytes(&self) -> u64 {
        (self.network().parameters() * size_of::<f32>()) as u64
    }

    /// How well these parameters read the images to test by.
    pub(crate) fn reading(&self, parameters: &[f32]) -> Reading {
        let mut samples = (0..self.test.labels.len()).map(|index| self.test.sample(index));
        self.network().reading(parameters, &mut samples)
    }

    /// The network on batches of the images to learn from.
    pub(crate) fn reader(&self, seed: u64) -> Reader<'_> {
        Reader { network: self.network(), images: &self.learned, seed, falls_for: None }
    }

    /// Images to learn from.
    pub(crate) fn len(&self) -> usize {
        self.learned.labels.len()
    }

    /// The steps of so many ranks that pass so often over all images.
    pub(crate) fn steps(&self, epochs: u64, ranks: u32) -> u64 {
        (epochs * self.len() as u64).div_ceil(BATCH as u64 * u64::from(ranks))
    }
}

/// The network on batches that are drawn with replacement, by the seed, the rank and the step
/// alone.
pub(crate) struct Reader<'a> {
    network: Perceptron,
    images: &'a Images,
    seed: u64,
    falls_for: Option<u64>,
}

impl Reader<'_> {
    /// The same with gradients that fall to 0 by a cosine in so many steps, as if the learning rate
    /// fell.
    pub(crate) fn falling_for(self, steps: u64) -> Self {
        Self { falls_for: Some(steps), ..self }
    }

    /// The share of the gradient that counts in a step.
    fn share(&self, step: u64) -> f64 {
        let Some(steps) = self.falls_for else { return 1.0 };
        (1.0 + libm::cos(std::f64::consts::PI * step as f64 / steps as f64)) / 2.0
    }
}

impl Learner for Reader<'_> {
    fn layout(&self) -> Layout {
        Layout::of(&self.network.lengths())
    }

    fn initial(&self) -> Vec<f32> {
        self.network.initial(self.seed)
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        let mut random = Random::new(chain(hash_of_pair(self.seed, rank.into()), step));
        let count = self.images.labels.len();
        let mut samples = (0..BATCH).map(|_| self.images.sample(random.index(count)));
        let loss = self.network.gradient(parameters, &mut samples, 1.0 / BATCH as f32, gradient);
        let share = self.share(step) as f32;
        gradient.iter_mut().for_each(|gradient| *gradient *= share);
        loss
    }
}
