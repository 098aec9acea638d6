//! `pleach train`: ranks that learn to read handwritten digits together.
//!
//! Every rank computes the gradients of its shard of each batch, and `all_reduce` averages them. So
//! all ranks take the same step. The end checks two things: all ranks have the same bits in their
//! parameters, and these are the parameters of one rank that trained on the same batches, up to
//! rounding.
//!
//! With `--scheme` the ranks train by a scheme of `pleach-training`, and with `--simulate` they do
//! so in virtual time. `--partial` is a spelling of the scheme `eager`, whose end also checks that
//! the digits are read as well as by one rank.

use std::convert::Infallible;
use std::hash::Hasher as _;
use std::io::Write;
use std::ops::DerefMut;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::TypedValueParser as _;
use pleach::partial::{Activation, Divisor, Late};
use pleach::transport::clock;
use pleach::transport::rendezvous::FabricChoice;
use pleach::{Buffer, CollectiveError, Group, Options, Rank, ReduceOp};
use pleach_training::Scheme;
use pleach_training::simulation::Faults;
use pleach_vocabulary::digest::Hasher64;
use pleach_vocabulary::random::Random;
use serde_json::json;

use crate::cli::digits::Digits;
use crate::cli::launch::{Bind, WorldArguments, rank_or_launch};
use crate::cli::metrics::MetricsAddress;
use crate::cli::output::rounded;
use crate::cli::skew::Skew;
use crate::cli::{CommandError, progress};
use computing::ComputingSource;
use data::DataSource;
use network::{Model, Network};
use until::{Sweep, Until};

mod computing;
mod curves;
mod data;
mod elastic;
mod exact;
mod hybrid;
mod keeping;
mod learner;
mod network;
mod scheme;
mod schemes;
mod simulated;
mod until;
mod wires;

/// Ranks that are started where nothing says how many.
const DEFAULT_RANKS: u32 = 4;

/// Enough for the built-in digits.
const DEFAULT_EPOCHS: u32 = 30;

/// The same by [`Scheme::Downpour`], whose learning rate is that of the others over the ranks, and
/// which has no momentum: the worst of 10 trainings by 30 passes read 95.3 % of the digits, that of
/// 20 by 90 passes 96.4 %.
const DOWNPOUR_EPOCHS: u32 = 90;

/// Images in a batch, of all ranks together.
const BATCH: usize = 64;

/// All ranks begin with the same weights and shuffle alike.
const SEED: u64 = 42;

/// How far parameters may be from those of one rank, which adds the same numbers in another order,
/// as a share of the largest.
const ROUNDING: f32 = 2e-5;

/// The options that choose a scheme.
const BY_SCHEME: &str = "by scheme";

/// Arguments of `pleach train`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    group(clap::ArgGroup::new(BY_SCHEME).args(["scheme", "partial"])),
    after_help = "Examples:\n  pleach train\n  pleach train --ranks 2 --fabric tcp --data ~/mnist --epochs 5\n  pleach train --scheme local-sgd:every=8 --scheme diloco\n  pleach train --scheme gossip:direction=push-sum --scheme easgd:mode=round-robin --fabric tcp\n  pleach train --scheme easgd --checkpoint kept --every 100 --log events\n  pleach train --scheme easgd --epochs 60 --resume kept\n  pleach train --replay events\n  pleach train --elastic --chaos\n  pleach train --elastic=2:4 --fabric tcp\n  pleach train --elastic --chaos --exact\n  pleach train --simulate 64 --scheme sync --scheme local-sgd --compute 10ms,cv=0.3 --curves out\n  pleach train --simulate 16 --scheme ssp --sweep staleness=0,1,3,10 --until time=2s --seeds 3\n  pleach train --simulate 16 --scheme gossip --faults freeze,rank-death\n  pleach train --simulate 16 --scheme sync --fidelity engine\n  pleach train --simulate 16 --scheme sync --data synthetic:7\n  pleach train --schemes"
)]
pub(crate) struct Arguments {
    /// How many ranks to start here [default: 4]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// The fabric: shm, tcp, shm+tcp, verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value_t)]
    fabric: FabricChoice,
    /// A folder with the files of MNIST, instead of the built-in digits; or, with --scheme, endless
    /// images that a fixed random network has labelled
    #[arg(
        long,
        value_name = "DIR|synthetic[:SEED]",
        value_parser = clap::builder::PathBufValueParser::new().try_map(DataSource::parse),
    )]
    data: Option<DataSource>,
    /// Average squares of K×K pixels
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    pool: Option<u32>,
    /// How many times the training passes over all images [default: 30; by downpour, which takes
    /// small steps, 90, unless it is simulated]
    #[arg(long, value_name = "E", value_parser = clap::value_parser!(u32).range(1..))]
    epochs: Option<u32>,
    /// The network: a perceptron with hidden layers of these numbers of units
    #[arg(long, value_name = "mlp:H[xH...]", default_value_t)]
    model: Model,
    /// Average gradients without waiting for late ranks: as --scheme eager:activation=ACTIVATION; a
    /// round opens by: all, solo, majority, quorum:K, quorum:K+GRACE, deadline:D or deadline:pN (a
    /// learned percentile)
    #[arg(long, value_name = "ACTIVATION")]
    partial: Option<Activation>,
    /// What becomes of late gradients: carry, drop or correct [default: that of the activation]
    #[arg(long, value_name = "RULE", requires = "partial")]
    late: Option<Late>,
    /// By what sums are divided: world, contributors or none, with a learning rate that is as many
    /// times smaller as there are ranks [default: that of the activation; world where it has none]
    #[arg(long, value_name = "BY", requires = "partial")]
    divisor: Option<Divisor>,
    /// How late ranks are: none, linear:D (rank r sleeps (r + 1) D a step) or one:D (one rank,
    /// drawn each step)
    #[arg(long, value_name = "SKEW", default_value = "none")]
    skew: Skew,
    /// Processors that each rank started here is bound to [default: core, if there are enough
    /// cores]
    #[arg(long, value_name = "HOW", value_enum)]
    bind: Option<Bind>,
    /// Serve metrics for Prometheus and 'pleach top'; rank r of a host listens on PORT + r;
    /// without IP the address is loopback
    #[arg(long, value_name = "[IP:]PORT")]
    metrics: Option<MetricsAddress>,
    /// Train by a scheme: sync, hybrid, local-sgd, diloco, gossip, easgd, eamsgd, downpour, ssp,
    /// bsp, dssp, bap, asp, eager, bidmach or elastic-bsp, with keys as local-sgd:every=8; several
    /// times: by each
    #[arg(long, value_name = "NAME[:KEY=VALUE,...]")]
    scheme: Vec<Scheme>,
    /// Simulate N ranks in virtual time, with real gradients
    #[arg(
        long,
        value_name = "N",
        requires = BY_SCHEME,
        value_parser = clap::value_parser!(u32).range(1..=simulated::RANKS_MAX.into()),
        conflicts_with_all = ["ranks", "fabric", "skew", "bind", "metrics", "rank", "world_size", "rendezvous"],
    )]
    simulate: Option<u32>,
    /// How long simulated ranks compute a gradient: lognormal; F is the standard deviation over the
    /// mean (cv), how much slower the slowest rank may be (spread), how many times slower one is;
    /// or as in a file that --record wrote
    #[arg(
        long,
        value_name = "MEAN[,cv=F][,spread=F][,straggler=RANK:F]|FILE",
        requires = "simulate",
        default_value = "10ms,cv=0.1"
    )]
    compute: ComputingSource,
    /// The links of simulated ranks: a preset or a file [default: star:N@1]
    #[arg(long, value_name = "PRESET|FILE", requires = "simulate")]
    topology: Option<String>,
    /// How exchanges of simulated ranks are made: priced (they take the time that the cost model
    /// says) or engine (by real engines over simulated wires, for at most 64 ranks)
    #[arg(long, value_name = "HOW", requires = "simulate", value_enum, default_value_t)]
    fidelity: Fidelity,
    /// What befalls simulated ranks, drawn from the seed, separated by commas: slow (a rank), drift
    /// (speeds change), freeze (a rank stands still), delay (some messages are late), reorder (all
    /// messages are a little late), link-shrink (a rank's links get slower), rank-death (a rank
    /// ends); or all, or none
    #[arg(long, value_name = "LIST", requires = "simulate", default_value = "none")]
    faults: Faults,
    /// Draw loss, accuracy, staleness and waiting of simulated ranks in this folder
    #[arg(long, value_name = "DIR", requires = "simulate")]
    curves: Option<PathBuf>,
    /// When simulated ranks stop: accuracy=F, loss=F (of the test images), time=D or steps=K
    /// [default: after --epochs or --steps]
    #[arg(long, value_name = "WHAT=VALUE", requires = "simulate")]
    until: Option<Until>,
    /// Simulate by K seeds: S and those after it
    #[arg(long, value_name = "K", requires = "simulate", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    seeds: u32,
    /// Simulate each scheme with each of these values of a key, as staleness=0,1,3, and name the
    /// one of most progress in a second
    #[arg(long, value_name = "KEY=LIST", requires = "simulate")]
    sweep: Option<Sweep>,
    /// Print the schemes that there are, with their places in the taxonomy
    #[arg(long, conflicts_with_all = ["scheme", "simulate", "partial"])]
    schemes: bool,
    #[command(flatten)]
    training: learner::TrainingArguments,
    #[command(flatten)]
    keeping: keeping::KeepingArguments,
    #[command(flatten)]
    elastic: elastic::ElasticArguments,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    world: WorldArguments,
}

/// How exchanges of simulated ranks are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Fidelity {
    #[default]
    Priced,
    Engine,
}

/// Runs `pleach train`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    if arguments.schemes {
        return schemes::print_all(arguments.json);
    }
    if let Some(folder) = &arguments.keeping.replay {
        return keeping::replay(folder, arguments.json);
    }
    let schemes = arguments.schemes()?;
    arguments.keeping.check(&schemes)?;
    let (data, endless) = data::read(arguments.data.as_ref(), arguments.pool)?;
    let endless = endless.as_ref();
    let passes =
        arguments.elastic.bounds().is_some() || arguments.simulate.is_none() && arguments.scheme.is_empty();
    if passes && endless.is_some() {
        return Err(CommandError::typed(
            "no pass over all images: there is no end of synthetic ones; give --scheme, and no --elastic",
        ));
    }
    if let Some(bounds) = arguments.elastic.bounds() {
        return elastic::run(arguments, bounds, &schemes, &data);
    }
    if let Some(ranks) = arguments.simulate {
        return simulated::run(arguments, &schemes, ranks, (&data, endless));
    }
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, DEFAULT_RANKS, arguments.bind)?
    else {
        return Ok(());
    };
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    options.observe.metrics = arguments.metrics.map(|address| address.0).or(options.observe.metrics);
    let group = Group::join(&options).map_err(CommandError::joining)?;
    if !schemes.is_empty() {
        return scheme::run(arguments, &schemes, group, (&data, endless));
    }
    let (rank, ranks) = (group.rank() as usize, group.world_size() as usize);

    let bar = progress::bar("training", steps(&data.train, arguments.epochs()), rank == 0);
    let model = &arguments.model;
    let parameters = model.network(&data.train).parameters();
    let shard = Shard { rank, ranks };
    let mut step = 0;
    let mut computed = || {
        bar.inc(1);
        arguments.skew.sleep(rank as Rank, ranks as u32, step);
        step += 1;
    };
    let mut gradients = group.buffer(parameters).map_err(CommandError::failed)?;
    let mut by_all = ByAll { group: &group };
    let trained =
        train(model, &data.train, arguments.epochs(), shard, &mut gradients, &mut by_all, &mut computed);
    bar.finish_and_clear();
    let trained = trained.map_err(CommandError::failed)?;
    let summary = Summary::gather(&group, &trained).map_err(CommandError::failed)?;
    group.close().map_err(CommandError::failed)?;
    if rank != 0 {
        return Ok(());
    }

    let one_rank = train_alone(model, &data.train, arguments.epochs());
    let difference = difference(trained.network.parameters(), one_rank.network.parameters());
    let verdict = Verdict {
        accuracy: trained.network.accuracy(&data.test),
        examined: data.test.len(),
        parameters_equal: summary.parameters_equal,
        difference,
        rounding: ROUNDING,
    };
    summary.print(&verdict, arguments.json).map_err(|error| {
        CommandError::failed(format!("results not printed: standard output ({error}); give it a reader"))
    })?;
    verdict.check()
}

impl Arguments {
    /// How many times a training passes over all images.
    fn epochs(&self) -> u32 {
        self.epochs.unwrap_or(DEFAULT_EPOCHS)
    }

    /// The same of real ranks by a scheme. Simulated ones make as many steps by each scheme, as
    /// these are compared.
    fn epochs_by(&self, scheme: &Scheme) -> u32 {
        let usual = if matches!(scheme, Scheme::Downpour { .. }) { DOWNPOUR_EPOCHS } else { DEFAULT_EPOCHS };
        self.epochs.unwrap_or(usual)
    }

    /// The schemes by which ranks train, one after the other; none for the loop of this file.
    fn schemes(&self) -> Result<Vec<Scheme>, CommandError> {
        let Some(activation) = self.partial else { return Ok(self.scheme.clone()) };
        // What was not asked for is no step by the sum of all gradients.
        let divisor = match activation.division() {
            Divisor::None => Divisor::World,
            own => own,
        };
        let divisor = self.divisor.unwrap_or(divisor);
        let late = self.late.unwrap_or(activation.late_rule());
        let usual: Scheme = "eager".parse().map_err(CommandError::usage)?;
        let Scheme::Eager { every, .. } = usual else { unreachable!("that is its name") };
        Ok(vec![Scheme::Eager { activation, late, divisor, every }])
    }
}

/// How gradients become those of all ranks.
trait Averaging<G> {
    type Error;

    /// Replaces the gradients by their average over ranks.
    fn average(&mut self, gradients: &mut G) -> Result<(), Self::Error>;
}

/// Over all ranks.
struct ByAll<'a> {
    group: &'a Group,
}

impl Averaging<Buffer<f32>> for ByAll<'_> {
    type Error = CollectiveError;

    fn average(&mut self, gradients: &mut Buffer<f32>) -> Result<(), CollectiveError> {
        self.group.all_reduce(gradients, ReduceOp::Avg)
    }
}

/// A rank alone.
struct Alone;

impl Averaging<Vec<f32>> for Alone {
    type Error = Infallible;

    fn average(&mut self, _: &mut Vec<f32>) -> Result<(), Infallible> {
        Ok(())
    }
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

/// The loop.
fn train<G: DerefMut<Target = [f32]>, A: Averaging<G>>(
    model: &Model,
    digits: &Digits,
    epochs: u32,
    shard: Shard,
    gradients: &mut G,
    averaging: &mut A,
    mut computed: impl FnMut(),
) -> Result<Trained, A::Error> {
    let mut network = Network::new(model.network(digits), SEED);
    // The ranks meet once before the clock starts: waiting for the last to come is not
    // communicating.
    averaging.average(gradients)?;
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
            computed();
            let before = clock::now();
            averaging.average(gradients)?;
            communicating += clock::now() - before;
            network.step(gradients);
        }
    }
    Ok(Trained { network, steps: steps(digits, epochs), time: clock::now() - begin, communicating })
}

/// The same on one rank.
fn train_alone(model: &Model, digits: &Digits, epochs: u32) -> Trained {
    let alone = Shard { rank: 0, ranks: 1 };
    let mut gradients = vec![0.0; model.network(digits).parameters()];
    let Ok(trained) = train(model, digits, epochs, alone, &mut gradients, &mut Alone, || ());
    trained
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
        let Verdict { accuracy, examined, parameters_equal, difference, .. } = verdict;
        let (ranks, matches) = (self.ranks.len(), verdict.matches_one_rank());
        if as_json {
            let row = json!({
                "test_accuracy": rounded(*accuracy, 4), "ranks": ranks, "parameters_equal": parameters_equal,
                "matches_one_rank": matches,
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
    /// The largest difference that counts as none.
    rounding: f32,
}

impl Verdict {
    fn matches_one_rank(&self) -> bool {
        self.difference <= self.rounding
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
    use clap::Args;

    use super::*;
    use crate::cli::digits::DataSet;

    #[test]
    fn sums_are_divided_as_the_activation_says_and_by_nothing_only_if_asked_for() {
        let scheme = |options: &str| {
            let command = Arguments::augment_args(clap::Command::new("train"));
            let matches =
                command.try_get_matches_from(format!("train {options}").split(' ')).expect("options");
            let arguments = <Arguments as clap::FromArgMatches>::from_arg_matches(&matches).expect("options");
            arguments.schemes().map(|schemes| schemes[0].to_string())
        };
        for (options, text) in [
            ("--partial deadline:5ms", "eager:activation=deadline:5ms,late=drop,divisor=contributors"),
            ("--partial majority", "eager"),
            ("--partial quorum:2 --divisor contributors", "eager:activation=quorum:2,divisor=contributors"),
            ("--partial solo --late correct", "eager:activation=solo,late=correct"),
            ("--partial quorum:2 --divisor none", "eager:activation=quorum:2,divisor=none"),
        ] {
            assert_eq!(scheme(options), scheme(&format!("--scheme {text}")), "{options}");
            assert_eq!(scheme(options).expect("is a scheme"), text);
        }
    }

    /// All ranks in one thread: each computes its share, then all get the average. In one step a
    /// share may be lost.
    fn train_in_turn(digits: &Digits, epochs: u32, ranks: usize, lost_in_step: Option<u64>) -> Network {
        let mut network = Network::new(Model::default().network(digits), SEED);
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

    fn alone(digits: &Digits, epochs: u32) -> Network {
        let trained = train_alone(&Model::default(), digits, epochs);
        assert_eq!(trained.steps, steps(digits, epochs));
        trained.network
    }

    #[test]
    fn one_rank_learns_to_read_digits_it_never_saw() {
        let data = DataSet::built_in().expect("is whole");
        let accuracy = alone(&data.train, 12).accuracy(&data.test);
        assert!(accuracy >= 0.95, "{accuracy}");
    }

    #[test]
    fn any_number_of_ranks_learns_the_same_up_to_rounding() {
        let data = DataSet::built_in().expect("is whole");
        let epochs = 3;
        let alone = alone(&data.train, epochs);
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
            rounding: ROUNDING,
        };
        assert!(!not_a_number.matches_one_rank() && not_a_number.check().is_err());
    }
}
