//! `pleach train`: ranks that learn to read handwritten digits together.
//!
//! Every rank computes the gradients of its shard of each batch, and `all_reduce` averages them. So
//! all ranks take the same step. The end checks two things: all ranks have the same bits in their
//! parameters, and these are the parameters of one rank that trained on the same batches, up to
//! rounding.

use std::convert::Infallible;
use std::hash::Hasher as _;
use std::io::Write;
use std::ops::DerefMut;
use std::path::PathBuf;
use std::time::Duration;

use pleach::transport::clock;
use pleach::transport::rendezvous::FabricChoice;
use pleach::{CollectiveError, Group, Options, ReduceOp};
use pleach_vocabulary::digest::Hasher64;
use pleach_vocabulary::random::Random;
use serde_json::json;

use crate::cli::digits::{DataSet, Digits};
use crate::cli::launch::{Bind, WorldArguments, rank_or_launch};
use crate::cli::metrics::MetricsAddress;
use crate::cli::output::rounded;

use crate::cli::{CommandError, progress};
use network::Network;

mod network;

/// Ranks that are started where nothing says how many.
const DEFAULT_RANKS: u32 = 4;

/// Enough for the built-in digits.
const DEFAULT_EPOCHS: u32 = 30;

/// Images in a batch, of all ranks together.
const BATCH: usize = 64;

/// All ranks begin with the same weights and shuffle alike.
const SEED: u64 = 42;

/// How far parameters may be from those of one rank, which adds the same numbers in another order,
/// as a share of the largest.
const ROUNDING: f32 = 2e-5;

/// Arguments of `pleach train`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  pleach train\n  pleach train --ranks 2 --fabric tcp --data ~/mnist --epochs 5"
)]
pub(crate) struct Arguments {
    /// How many ranks to start here [default: 4]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// The fabric: shm, tcp, shm+tcp, verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value_t)]
    fabric: FabricChoice,
    /// A folder with the files of MNIST, instead of the built-in digits
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// How many times the training passes over all images
    #[arg(long, value_name = "E", default_value_t = DEFAULT_EPOCHS, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Processors that each rank started here is bound to [default: core, if there are enough
    /// cores]
    #[arg(long, value_name = "HOW", value_enum)]
    bind: Option<Bind>,
    /// Serve metrics for Prometheus and 'pleach top'; rank r of a host listens on PORT + r;
    /// without IP the address is loopback
    #[arg(long, value_name = "[IP:]PORT")]
    metrics: Option<MetricsAddress>,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    world: WorldArguments,
}

/// Runs `pleach train`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let data = match &arguments.data {
        Some(folder) => DataSet::from_folder(folder).map_err(CommandError::usage)?,
        None => DataSet::built_in().map_err(CommandError::failed)?,
    };
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, DEFAULT_RANKS, arguments.bind)?
    else {
        return Ok(());
    };
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    options.observe.metrics = arguments.metrics.map(|address| address.0).or(options.observe.metrics);
    let group = Group::join(&options).map_err(CommandError::joining)?;
    let (rank, ranks) = (group.rank() as usize, group.world_size() as usize);

    let bar = progress::bar("training", steps(&data.train, arguments.epochs), rank == 0);
    let mut gradients =
        group.buffer(Network::parameters_for(data.train.image_pixels)).map_err(CommandError::failed)?;
    let average = |gradients: &mut _| group.all_reduce(gradients, ReduceOp::Avg);
    let shard = Shard { rank, ranks };
    let trained = train(&data.train, arguments.epochs, shard, &mut gradients, average, || bar.inc(1))
        .map_err(CommandError::failed);
    bar.finish_and_clear();
    let trained = trained?;
    let summary = Summary::gather(&group, &trained).map_err(CommandError::failed)?;
    group.close().map_err(CommandError::failed)?;
    if rank != 0 {
        return Ok(());
    }

    let alone = Shard { rank: 0, ranks: 1 };
    let mut gradients = vec![0.0; trained.network.parameters().len()];
    let nobody = |_: &mut _| Ok::<_, Infallible>(());
    let Ok(one_rank) = train(&data.train, arguments.epochs, alone, &mut gradients, nobody, || ());
    let difference = difference(trained.network.parameters(), one_rank.network.parameters());
    let verdict = Verdict {
        accuracy: trained.network.accuracy(&data.test),
        examined: data.test.len(),
        parameters_equal: summary.parameters_equal,
        difference,
    };
    summary.print(&verdict, arguments.json).map_err(|error| {
        CommandError::failed(format!("results not printed: standard output ({error}); give it a reader"))
    })?;
    verdict.check()
}

/// Which part of each batch is whose: every `ranks`-th image from `rank` on.
#[derive(Clone, Copy, Debug)]
struct Shard {
    rank: usize,
    ranks: usize,
}

/// The result of training on a rank.
#[derive(Debug)]
struct Trained {
    network: Network,
    steps: u64,
    time: Duration,
    communicating: Duration,
}

fn steps(digits: &Digits, epochs: u32) -> u64 {
    digits.len().div_ceil(BATCH) as u64 * u64::from(epochs)
}

/// The loop. `average` replaces the gradients by their average over all ranks.
fn train<G: DerefMut<Target = [f32]>, E>(
    digits: &Digits,
    epochs: u32,
    shard: Shard,
    gradients: &mut G,
    mut average: impl FnMut(&mut G) -> Result<(), E>,
    mut stepped: impl FnMut(),
) -> Result<Trained, E> {
    let mut network = Network::new(digits.image_pixels, SEED);
    // The ranks meet once before the clock starts: waiting for the last to come is not
    // communicating.
    average(gradients)?;
    let begin = clock::now();
    let mut communicating = Duration::ZERO;
    let mut random = Random::new(SEED);
    let mut order: Vec<usize> = (0..digits.len()).collect();
    for _ in 0..epochs {
        random.shuffle(&mut order);
        for batch in order.chunks(BATCH) {
            // Shares differ by an image where the batch cannot be divided, so each sums over its
            // own and divides by the average share: the average of these sums is the average over
            // the batch.
            let scale = shard.ranks as f32 / batch.len() as f32;
            let mine = batch.iter().copied().skip(shard.rank).step_by(shard.ranks);
            network.gradients(digits, mine, scale, gradients);
            let computed = clock::now();
            average(gradients)?;
            communicating += clock::now() - computed;
            network.step(gradients);
            stepped();
        }
    }
    Ok(Trained { network, steps: steps(digits, epochs), time: clock::now() - begin, communicating })
}

/// The largest difference between two sets of parameters, as a share of the largest parameter.
fn difference(left: &[f32], right: &[f32]) -> f32 {
    let largest = left.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    // The maximum must not swallow what is not a number.
    let differences = left.iter().zip(right).map(|(left, right)| (left - right).abs());
    let worst =
        differences.fold(0.0, |worst: f32, next| if next > worst || next.is_nan() { next } else { worst });
    worst / largest.max(f32::MIN_POSITIVE)
}

/// The combined result of all ranks.
#[derive(Debug)]
struct Summary {
    /// Steps a second and the share of time in communication, of each rank.
    ranks: Vec<[f64; 2]>,
    parameters_equal: bool,
}

impl Summary {
    fn gather(group: &Group, trained: &Trained) -> Result<Self, CollectiveError> {
        let seconds = trained.time.as_secs_f64();
        let own = [trained.steps as f64 / seconds, trained.communicating.as_secs_f64() / seconds];
        let mut all = vec![0.0; own.len() * group.world_size() as usize];
        group.all_gather(&own, &mut all)?;
        // The largest hash and the complement of the smallest in one go; equal if they are
        // complements.
        let hash = hash(trained.network.parameters());
        let mut extremes = [hash, !hash];
        group.all_reduce(&mut extremes, ReduceOp::Max)?;
        let parameters_equal = extremes[0] == !extremes[1];
        Ok(Self { ranks: all.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect(), parameters_equal })
    }

    fn print(&self, verdict: &Verdict, as_json: bool) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        if !as_json {
            writeln!(out, "rank    steps/s  communicating")?;
        }
        for (rank, [steps_per_s, shard]) in self.ranks.iter().enumerate() {
            if as_json {
                let (steps_per_s, shard) = (rounded(*steps_per_s, 1), rounded(*shard, 4));
                let row = json!({ "rank": rank, "steps_per_s": steps_per_s, "communication_share": shard });
                writeln!(out, "{row}")?;
            } else {
                writeln!(out, "{rank:>4} {steps_per_s:>10.1} {:>12.1} %", shard * 100.0)?;
            }
        }
        let Verdict { accuracy, examined, parameters_equal, difference } = verdict;
        let (ranks, matches) = (self.ranks.len(), verdict.matches_one_rank());
        if as_json {
            let row = json!({
                "test_accuracy": rounded(*accuracy, 4), "ranks": ranks, "parameters_equal": parameters_equal,
                "matches_one_rank": matches
            });
            writeln!(out, "{row}")
        } else {
            let [equal, matches] = [*parameters_equal, matches].map(|holds| if holds { "yes" } else { "NO" });
            writeln!(out, "all ranks have the same parameters, bit for bit: {equal}")?;
            writeln!(
                out,
                "they are those of one rank up to rounding: {matches} (largest difference {difference:.1e})"
            )?;
            writeln!(out, "test accuracy {accuracy:.4} on {examined} images never seen before")
        }
    }
}

/// A hash over the bits.
fn hash(parameters: &[f32]) -> i64 {
    let mut hasher = Hasher64::default();
    parameters.iter().for_each(|value| hasher.write(&value.to_bits().to_le_bytes()));
    hasher.finish().cast_signed()
}

/// Whether it went well.
#[derive(Debug)]
struct Verdict {
    accuracy: f64,
    examined: usize,
    parameters_equal: bool,
    /// From one rank's parameters; see [`difference`].
    difference: f32,
}

impl Verdict {
    fn matches_one_rank(&self) -> bool {
        self.difference <= ROUNDING
    }

    fn check(&self) -> Result<(), CommandError> {
        if !self.parameters_equal {
            return Err(CommandError::failed(
                "ranks differ: parameters do not have the same bits on all ranks; report this with PLEACH_LOG=debug",
            ));
        }
        if !self.matches_one_rank() {
            return Err(CommandError::failed(format!(
                "wrong parameters: they differ from one rank's by {:.1e} of the largest; report this with PLEACH_LOG=debug",
                self.difference
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All ranks in one thread: each computes its share, then all get the average. In one step a
    /// share may be lost.
    fn train_in_turn(digits: &Digits, epochs: u32, ranks: usize, lost_in_step: Option<u64>) -> Network {
        let mut network = Network::new(digits.image_pixels, SEED);
        let (mut random, mut order) = (Random::new(SEED), (0..digits.len()).collect::<Vec<_>>());
        let mut gradients = vec![0.0; network.parameters().len()];
        let mut step = 0;
        for _ in 0..epochs {
            random.shuffle(&mut order);
            for batch in order.chunks(BATCH) {
                let mut sum = vec![0.0; gradients.len()];
                step += 1;
                for rank in usize::from(lost_in_step == Some(step))..ranks {
                    let mine = batch.iter().copied().skip(rank).step_by(ranks);
                    network.gradients(digits, mine, ranks as f32 / batch.len() as f32, &mut gradients);
                    sum.iter_mut().zip(&gradients).for_each(|(sum, gradient)| *sum += gradient);
                }
                sum.iter_mut().for_each(|sum| *sum /= ranks as f32);
                network.step(&sum);
            }
        }
        network
    }

    fn train_alone(digits: &Digits, epochs: u32) -> Network {
        let mut gradients = vec![0.0; Network::parameters_for(digits.image_pixels)];
        let alone = Shard { rank: 0, ranks: 1 };
        let Ok(trained) = train(digits, epochs, alone, &mut gradients, |_| Ok::<_, Infallible>(()), || ());
        assert_eq!(trained.steps, steps(digits, epochs));
        trained.network
    }

    #[test]
    fn one_rank_learns_to_read_digits_it_never_saw() {
        let data = DataSet::built_in().expect("is whole");
        let accuracy = train_alone(&data.train, 12).accuracy(&data.test);
        assert!(accuracy >= 0.95, "{accuracy}");
    }

    #[test]
    fn any_number_of_ranks_learns_the_same_up_to_rounding() {
        let data = DataSet::built_in().expect("is whole");
        let epochs = 3;
        let alone = train_alone(&data.train, epochs);
        let from_alone = |ranks, lost_in_step| {
            let together = train_in_turn(&data.train, epochs, ranks, lost_in_step);
            difference(together.parameters(), alone.parameters())
        };
        for ranks in [2, 4, 7, 100] {
            let difference = from_alone(ranks, None);
            assert!(difference <= ROUNDING, "{ranks} ranks differ from one by {difference:e}");
        }
        let difference = from_alone(4, Some(steps(&data.train, epochs) / 2));
        assert!(difference > 10.0 * ROUNDING, "a share that is lost once must show: {difference:e}");
    }

    #[test]
    fn one_bit_makes_another_hash() {
        assert_eq!(hash(&[0.0, 1.0]), hash(&[0.0, 1.0]));
        assert_ne!(hash(&[0.0, 1.0]), hash(&[-0.0, 1.0]));
        assert_ne!(hash(&[0.0, 1.0]), hash(&[1.0, 0.0]));
    }

    #[test]
    fn a_wrong_number_is_never_close_to_a_right_one() {
        assert!(difference(&[1.0, 2.0], &[1.0, 2.0]) == 0.0);
        assert!(difference(&[1.0, 2.0], &[1.0, 1.5]) == 0.25);
        let not_a_number = Verdict {
            accuracy: 1.0,
            examined: 1,
            parameters_equal: true,
            difference: difference(&[1.0, f32::NAN], &[1.0, 0.0]),
        };
        assert!(!not_a_number.matches_one_rank() && not_a_number.check().is_err());
    }
}
