//! `--data` and `--pool`: the images that ranks learn from.

use std::path::PathBuf;

use pleach::Rank;
use pleach_training::Perceptron;
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::SEED;
use crate::cli::CommandError;
use crate::cli::digits::{CLASSES, DataSet, Digits};

/// Rows and columns of a synthetic image, as of the built-in digits.
const SIDE: usize = 8;

/// Hidden units of the network that labels synthetic images.
const HIDDEN: usize = 32;

/// Synthetic images that count as a pass over all, and those to test by.
const IMAGES: usize = 2048;
const TEST_IMAGES: usize = 1024;

/// Streams of the seed of synthetic images.
const WEIGHTS: u64 = 0;
const BATCHES: u64 = 1;
const HELD_OUT: u64 = 2;
const TEST: u64 = 3;

/// Where images come from, if they are not the built-in digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DataSource {
    /// The files of MNIST.
    Folder(PathBuf),
    /// Drawn by this seed, without end.
    Synthetic(u64),
}

impl DataSource {
    /// From its text; a folder of the name `synthetic` is `./synthetic`.
    pub(crate) fn parse(path: PathBuf) -> Result<Self, &'static str> {
        let rest = path.to_str().and_then(|text| text.strip_prefix("synthetic"));
        if rest == Some("") {
            return Ok(Self::Synthetic(SEED));
        }
        match rest.and_then(|rest| rest.strip_prefix(':')) {
            Some(seed) => {
                seed.parse().map(Self::Synthetic).map_err(|_| "give a number as seed, as synthetic:7")
            }
            None => Ok(Self::Folder(path)),
        }
    }
}

/// The images of a source, each square of `pool` times `pool` pixels averaged; and the drawing of
/// more, if there is no end of them.
pub(crate) fn read(
    source: Option<&DataSource>,
    pool: Option<u32>,
) -> Result<(DataSet, Option<Synthetic>), CommandError> {
    let data = match source {
        Some(DataSource::Synthetic(_)) if pool.is_some() => {
            return Err(CommandError::typed(
                "nothing to average: the pixels of synthetic images are independent of each other; leave --pool away",
            ));
        }
        Some(DataSource::Synthetic(seed)) => {
            let synthetic = Synthetic::new(*seed);
            return Ok((synthetic.data_set(), Some(synthetic)));
        }
        Some(DataSource::Folder(folder)) => DataSet::from_folder(folder).map_err(CommandError::usage)?,
        None => DataSet::built_in().map_err(CommandError::failed)?,
    };
    let pooled = match pool {
        Some(pool) => data.pooled(pool as usize).map_err(CommandError::typed)?,
        None => data,
    };
    Ok((pooled, None))
}

/// Endless images: pixels are independent, from -1 to 1, and the class is what a fixed random
/// network says. All of it follows from the seed.
#[derive(Clone, Debug)]
pub(crate) struct Synthetic {
    teacher: Perceptron,
    weights: Vec<f32>,
    seed: u64,
}

impl Synthetic {
    fn new(seed: u64) -> Self {
        let teacher = Perceptron::new(SIDE * SIDE, &[HIDDEN], CLASSES);
        let weights = teacher.initial(hash_of_pair(seed, WEIGHTS));
        Self { teacher, weights, seed }
    }

    /// Images that are in no batch: to count and to choose by, and to test by.
    fn data_set(&self) -> DataSet {
        let draw = |stream, count| self.draw(Random::new(hash_of_pair(self.seed, stream)), count);
        DataSet { train: draw(HELD_OUT, IMAGES), test: draw(TEST, TEST_IMAGES) }
    }

    /// The batch of a rank in a step of a training with this seed.
    pub(crate) fn batch(&self, seed: u64, rank: Rank, step: u64, count: usize) -> Digits {
        let stream = chain(hash_of_pair(self.seed, BATCHES), seed);
        self.draw(Random::new(chain(chain(stream, rank.into()), step)), count)
    }

    fn draw(&self, mut random: Random, count: usize) -> Digits {
        // 24 bits, as many as an f32 has.
        let mut pixel = || (random.bits() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0;
        let pixels: Vec<f32> = (0..count * SIDE * SIDE).map(|_| pixel()).collect();
        let label = |image: &[f32]| self.teacher.class(&self.weights, image) as u8;
        let labels = pixels.chunks_exact(SIDE * SIDE).map(label).collect();
        Digits::new(pixels, labels, [SIDE, SIDE])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_folder_or_synthetic_with_a_seed() {
        let parse = |text: &str| DataSource::parse(PathBuf::from(text));
        assert_eq!(parse("synthetic"), Ok(DataSource::Synthetic(SEED)));
        assert_eq!(parse("synthetic:7"), Ok(DataSource::Synthetic(7)));
        for folder in ["./synthetic", "synthetics", "mnist", "a:7"] {
            assert_eq!(parse(folder), Ok(DataSource::Folder(PathBuf::from(folder))));
        }
        for wrong in ["synthetic:", "synthetic:x", "synthetic:-1"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn synthetic_images_follow_from_the_seed_and_no_two_streams_share_one() {
        let one = Synthetic::new(7);
        let first = |digits: &Digits| digits.sample(0).0.to_vec();
        let DataSet { train, test } = one.data_set();
        let batches: Vec<Digits> = [(1, 0, 0), (1, 1, 0), (1, 0, 1), (2, 0, 0)]
            .map(|(seed, rank, step)| one.batch(seed, rank, step, 16))
            .into();
        let mut firsts: Vec<Vec<f32>> = batches.iter().chain([&train, &test]).map(first).collect();
        firsts.push(first(&Synthetic::new(8).batch(1, 0, 0, 16)));
        for (number, image) in firsts.iter().enumerate() {
            assert!(!firsts[..number].contains(image), "{number}");
        }
        assert_eq!(first(&Synthetic::new(7).batch(1, 0, 0, 16)), firsts[0]);
        // A class that is never drawn would be learned by nobody, and one that always is by all.
        for digit in 0..CLASSES {
            let share =
                test.samples().filter(|(_, label)| *label == digit).count() as f64 / test.len() as f64;
            assert!((0.02..0.3).contains(&share), "{digit}: {share}");
        }
        let images = test.samples().flat_map(|(image, _)| image).collect::<Vec<_>>();
        let mean = images.iter().map(|pixel| f64::from(**pixel)).sum::<f64>() / images.len() as f64;
        assert!(mean.abs() < 0.02 && images.iter().all(|pixel| (-1.0..1.0).contains(*pixel)), "{mean}");
    }
}
