//! The network on digits, as training schemes train it.

use std::hash::Hasher as _;

use pleach::Rank;
use pleach::partial::Divisor;
use pleach_training::{Layout, Learner, Perceptron, Reading, Sample, Scheme};
use pleach_vocabulary::digest::{Hasher64, chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::data::Synthetic;
use super::network::{LEARNING_RATE, MOMENTUM, Model};
use super::{BY_SCHEME, SEED};
use crate::cli::CommandError;
use crate::cli::digits::Digits;

/// Options of trainings by a scheme.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TrainingArguments {
    /// Steps of each rank [default: as many as give E passes over all images]
    #[arg(long, value_name = "K", requires = BY_SCHEME, conflicts_with = "epochs", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) steps: Option<u64>,
    /// Images in a batch of one rank
    #[arg(long, value_name = "B", requires = BY_SCHEME, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch: u32,
    /// The learning rate; simulated, of several the one of the least loss on images held out
    /// [default: 0.1; with downpour, which adds up what all ranks change, 0.1/N; with dssp, bap and
    /// asp, which have no momentum, 0.3]
    #[arg(long = "lr", value_name = "F,...", requires = BY_SCHEME, value_delimiter = ',', value_parser = rate)]
    learning_rates: Vec<f32>,
    /// The momentum of the ranks' optimizers [default: 0.9; with downpour, eamsgd, dssp, bap
    /// and asp 0]
    #[arg(long, value_name = "F", requires = BY_SCHEME, value_parser = momentum)]
    momentum: Option<f32>,
    /// The seed of weights, batches and computing times
    #[arg(long, value_name = "S", requires = BY_SCHEME, default_value_t = SEED)]
    pub(crate) seed: u64,
}

/// The learning rate where ranks have no momentum, as late changes would count again and again.
const LEARNING_RATE_ALONE: f32 = 0.3;

/// Whether changes may come many steps late.
fn is_far_apart(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Dssp { .. } | Scheme::Bap { .. } | Scheme::Asp)
}

fn rate(text: &str) -> Result<f32, &'static str> {
    let rate = text.parse().ok().filter(|rate: &f32| rate.is_finite() && *rate > 0.0);
    rate.ok_or("give a number above 0")
}

fn momentum(text: &str) -> Result<f32, &'static str> {
    let momentum = text.parse().ok().filter(|momentum: &f32| (0.0..1.0).contains(momentum));
    momentum.ok_or("give a number from 0 to below 1")
}

impl TrainingArguments {
    /// The learning rate and the momentum of the optimizers of that many ranks in a scheme.
    ///
    /// # Errors
    ///
    /// Several learning rates; a momentum was given, and the scheme has its own.
    pub(crate) fn optimizer(&self, scheme: &Scheme, ranks: u32) -> Result<(f32, f32), CommandError> {
        match self.rates(scheme, ranks)[..] {
            [rate] => Ok((rate, self.momentum(scheme)?)),
            _ => Err(CommandError::usage("several learning rates: of real ranks; give one, or --simulate")),
        }
    }

    /// Whether one of several learning rates is to be chosen.
    pub(crate) fn has_several_rates(&self) -> bool {
        self.learning_rates.len() > 1
    }

    /// The learning rates that were given, or the usual one.
    pub(crate) fn rates(&self, scheme: &Scheme, ranks: u32) -> Vec<f32> {
        let usual = match scheme {
            // Steps by sums.
            Scheme::Downpour { .. } | Scheme::Eager { divisor: Divisor::None, .. } => {
                LEARNING_RATE / ranks as f32
            }
            _ if is_far_apart(scheme) => LEARNING_RATE_ALONE,
            _ => LEARNING_RATE,
        };
        if self.learning_rates.is_empty() { vec![usual] } else { self.learning_rates.clone() }
    }

    /// The momentum of optimizers in a scheme.
    ///
    /// # Errors
    ///
    /// It was given, and the scheme has its own.
    pub(crate) fn momentum(&self, scheme: &Scheme) -> Result<f32, CommandError> {
        let has_none =
            matches!(scheme, Scheme::Downpour { .. }) || scheme.has_momentum() || is_far_apart(scheme);
        let usual_momentum = if has_none { 0.0 } else { MOMENTUM };
        let momentum = self.momentum.unwrap_or(usual_momentum);
        if scheme.has_momentum() && momentum > 0.0 {
            return Err(CommandError::usage(format!(
                "momentum given twice: --momentum {momentum}, and {} has its own; give {}:momentum={momentum}",
                scheme.name(),
                scheme.name()
            )));
        }
        Ok(momentum)
    }

    /// The steps of each of that many ranks.
    pub(crate) fn steps(&self, epochs: u32, images: usize, ranks: u32) -> u64 {
        let a_step = u64::from(self.batch) * u64::from(ranks);
        self.steps.unwrap_or_else(|| (u64::from(epochs) * images as u64).div_ceil(a_step))
    }
}

/// The network, and the batches of all ranks: drawn with replacement from all images, or new ones
/// where there is no end of them, by the seed, the rank and the step alone.
#[derive(Debug)]
pub(crate) struct DigitReader<'a> {
    network: Perceptron,
    digits: &'a Digits,
    endless: Option<&'a Synthetic>,
    batch: u32,
    seed: u64,
}

/// The images of a rank in a step.
pub(crate) enum Batch<'a> {
    Of(Vec<Sample<'a>>),
    Drawn(Digits),
}

impl Batch<'_> {
    /// The images with their labels.
    pub(crate) fn samples(&self) -> Box<dyn Iterator<Item = Sample<'_>> + '_> {
        match self {
            Self::Of(samples) => Box::new(samples.iter().copied()),
            Self::Drawn(digits) => Box::new(digits.samples()),
        }
    }
}

impl<'a> DigitReader<'a> {
    pub(crate) fn new(digits: &'a Digits, model: &Model, arguments: &TrainingArguments) -> Self {
        let network = model.network(digits);
        Self { network, digits, endless: None, batch: arguments.batch, seed: arguments.seed }
    }

    /// The same with new images in each batch, if there are any.
    pub(crate) fn with_endless(self, endless: Option<&'a Synthetic>) -> Self {
        Self { endless, ..self }
    }

    /// The same with another seed.
    pub(crate) fn with_seed(self, seed: u64) -> Self {
        Self { seed, ..self }
    }

    /// The network.
    pub(crate) fn network(&self) -> &Perceptron {
        &self.network
    }

    /// The batch of a rank in a step.
    pub(crate) fn batch(&self, rank: Rank, step: u64) -> Batch<'_> {
        if let Some(synthetic) = self.endless {
            return Batch::Drawn(synthetic.batch(self.seed, rank, step, self.batch as usize));
        }
        let mut random = Random::new(chain(hash_of_pair(self.seed, rank.into()), step));
        let drawn = (0..self.batch).map(|_| self.digits.sample(random.index(self.digits.len())));
        Batch::Of(drawn.collect())
    }

    /// By what slopes and losses of the samples of a batch are multiplied.
    pub(crate) fn scale(&self) -> f32 {
        1.0 / self.batch as f32
    }

    /// The number of images to learn from; where there is no end of them, those of a pass.
    pub(crate) fn images(&self) -> usize {
        self.digits.len()
    }

    /// How well these parameters read digits.
    pub(crate) fn reading(&self, parameters: &[f32], digits: &Digits) -> Reading {
        self.network.reading(parameters, &mut digits.samples())
    }

    /// A hash of all that has to be the same on all ranks for them to train one network.
    pub(crate) fn hash(&self) -> u64 {
        let mut hasher = Hasher64::default();
        for image in 0..self.digits.len() {
            self.digits.image(image).iter().for_each(|pixel| hasher.write(&pixel.to_bits().to_le_bytes()));
            hasher.write(&[self.digits.label(image) as u8]);
        }
        chain(hasher.finish(), self.batch.into())
    }
}

impl Learner for DigitReader<'_> {
    fn layout(&self) -> Layout {
        Layout::of(&self.network.lengths())
    }

    fn initial(&self) -> Vec<f32> {
        self.network.initial(self.seed)
    }

    fn gradient(&self, rank: Rank, step: u64, parameters: &[f32], gradient: &mut [f32]) -> f32 {
        let batch = self.batch(rank, step);
        self.network.gradient(parameters, &mut batch.samples(), self.scale(), gradient)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::digits::DataSet;

    #[derive(clap::Parser)]
    struct Line {
        #[arg(long, group = BY_SCHEME)]
        scheme: Option<String>,
        #[arg(long, default_value_t = 30)]
        epochs: u32,
        #[command(flatten)]
        training: TrainingArguments,
    }

    fn arguments(line: &[&str]) -> TrainingArguments {
        let line = [&["train", "--scheme", "sync"], line].concat();
        Line::try_parse_from(line).expect("are arguments").training
    }

    #[test]
    fn ranks_and_steps_have_batches_of_their_own_that_come_again() {
        let data = DataSet::built_in().expect("is whole");
        let reader = DigitReader::new(&data.train, &Model::default(), &arguments(&[]));
        let parameters = reader.initial();
        let gradient = |rank, step| {
            let mut gradient = vec![0.0; parameters.len()];
            let loss = reader.gradient(rank, step, &parameters, &mut gradient);
            assert!((1.0..5.0).contains(&loss), "{loss}");
            gradient
        };
        assert_eq!(gradient(1, 2), gradient(1, 2));
        assert_ne!(gradient(1, 2), gradient(2, 2));
        assert_ne!(gradient(1, 2), gradient(1, 3));
        let other = DigitReader::new(&data.train, &Model::default(), &arguments(&["--seed", "7"]));
        assert_ne!(other.initial(), parameters);
        assert_ne!(DigitReader::new(&data.test, &Model::default(), &arguments(&[])).hash(), reader.hash());
    }

    #[test]
    fn steps_are_those_of_the_epochs_unless_they_are_given() {
        assert_eq!(arguments(&[]).steps(30, 1438, 4), 675);
        assert_eq!(arguments(&["--batch", "1"]).steps(1, 10, 3), 4);
        assert_eq!(arguments(&["--steps", "7"]).steps(30, 1438, 4), 7);
    }

    #[test]
    fn optimizers_are_those_of_the_scheme_unless_they_are_given() {
        let optimizer = |line: &[&str], scheme: &str| {
            let scheme = scheme.parse().expect("is a scheme");
            arguments(line).optimizer(&scheme, 4)
        };
        assert_eq!(optimizer(&[], "easgd"), Ok((0.1, 0.9)));
        assert_eq!(optimizer(&[], "eamsgd"), Ok((0.1, 0.0)));
        assert_eq!(optimizer(&[], "downpour"), Ok((0.025, 0.0)));
        assert_eq!(optimizer(&[], "asp"), Ok((0.3, 0.0)));
        assert_eq!(optimizer(&["--lr", "0.5", "--momentum", "0.2"], "downpour"), Ok((0.5, 0.2)));
        assert!(optimizer(&["--lr", "0.5,0.1"], "sync").is_err(), "which one?");
        let error = optimizer(&["--momentum", "0.2"], "eamsgd").expect_err("it has its own");
        let CommandError::Usage(error) = error else { panic!("the arguments are wrong") };
        assert!(error.contains("give eamsgd:momentum=0.2"), "{error}");
    }

    #[test]
    fn numbers_that_train_nothing_are_refused() {
        for line in [["--lr", "0"], ["--lr", "inf"], ["--momentum", "1"], ["--batch", "0"], ["--steps", "0"]]
        {
            let line = [&["train", "--scheme", "sync"], &line[..]].concat();
            assert!(Line::try_parse_from(&line).is_err(), "{line:?}");
        }
        let line = ["train", "--scheme", "sync", "--steps", "5", "--epochs", "3"];
        assert!(Line::try_parse_from(line).is_err(), "either says how many steps");
    }
}
