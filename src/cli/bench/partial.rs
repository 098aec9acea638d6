//! `pleach bench partial-all-reduce`: how long ranks wait for a sum while some of them are late.
//!
//! The experiment of eager-SGD (Li et al., PPoPP 2020, figure 8): in each round all ranks meet in a
//! barrier, sleep as the skew says, and contribute; only the contributing is timed. The same
//! rounds with the activation `all` are the measure beside it. **Invariant:** every contribution
//! is found again in the results: what is in no round, or in two, is an error.

use std::io::Write;
use std::time::Duration;

use pleach::partial::{Activation, Divisor, Late, Own, PartialError, Round};
use pleach::transport::clock;
use pleach::{Group, Options, ReduceOp};
use serde_json::json;

use super::{Arguments, DEFAULT_RANKS, Size, Sweep};
use crate::cli::CommandError;
use crate::cli::launch::rank_or_launch;
use crate::cli::output::rounded;
use crate::cli::skew::Skew;

/// Largest size that is measured unless `--sizes` names others.
const MAX: Size = Size(1 << 20);

/// What `pleach bench partial-all-reduce` takes besides.
#[derive(Debug, clap::Args)]
pub(crate) struct PartialArguments {
    /// With partial-all-reduce: when a round opens: all, solo, majority, quorum:K,
    /// quorum:K+GRACE, deadline:D or deadline:pN (a learned percentile)
    #[arg(long, value_name = "ACTIVATION", default_value = "solo")]
    activation: Activation,
    /// With partial-all-reduce: what becomes of late contributions: carry, drop or correct
    /// [default: that of the activation]
    #[arg(long, value_name = "RULE")]
    late: Option<Late>,
    /// With partial-all-reduce: how late ranks are: none, linear:D (rank r sleeps (r + 1) D) or
    /// one:D (one rank, drawn each round)
    #[arg(long, value_name = "SKEW", default_value = "none")]
    skew: Skew,
    /// With partial-all-reduce: rounds of each size
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
}

/// What becomes of late contributions.
fn rule(arguments: &PartialArguments) -> Late {
    arguments.late.unwrap_or_else(|| arguments.activation.late_rule())
}

/// What was measured of one size.
struct Measured {
    time_us_mean: f64,
    contributors_mean: f64,
    missed: f64,
    errors: u64,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let type_of_sum = pleach::DataType::F32;
    if arguments.dtype != type_of_sum || arguments.op != ReduceOp::Sum {
        return Err(CommandError::usage(
            "not measured: partial-all-reduce is measured with sums of f32; leave --dtype and --op out",
        ));
    }
    let sweep = if arguments.sizes.is_empty() {
        let max = arguments.max.min(MAX);
        Sweep::new(arguments.min.min(max), max, arguments.factor, type_of_sum)
    } else {
        Sweep::of(&arguments.sizes, type_of_sum)
    };
    let sweep = sweep.map_err(CommandError::typed)?;
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, DEFAULT_RANKS, arguments.bind)?
    else {
        return Ok(());
    };
    let mut options = Options::from_env_in(world);
    options.fabric = match arguments.fabric {
        Some(super::BenchFabric::Real(fabric)) => pleach::FabricChoice::Only(fabric),
        Some(super::BenchFabric::Simulated) => {
            return Err(CommandError::usage("not simulated: a partial all-reduce; name another --fabric"));
        }
        _ => pleach::FabricChoice::Auto,
    };
    let group = Group::join(&options).map_err(CommandError::joining)?;
    let fabric = group.info().fabric.map_or_else(|| "none".to_owned(), |fabric| fabric.to_string());
    // Sums must be exact, to be checked.
    let activation = arguments.partial.activation.divisor(Divisor::None);
    let late = rule(&arguments.partial);
    let activation = activation.late(late);
    let mut errors = 0;
    if group.rank() == 0 && !arguments.json {
        println_checked(format_args!(
            "# partial-all-reduce ({activation}, late: {late}), skew {}, {} ranks, {} rounds of each size\n{:>10} {:>14} {:>14} {:>8} \
             {:>13} {:>7} {:>7}",
            arguments.partial.skew,
            group.world_size(),
            arguments.partial.rounds,
            "bytes",
            "mean us",
            "all: mean us",
            "ratio",
            "contributors",
            "missed",
            "errors"
        ))?;
    }
    for bytes in sweep.sizes() {
        let all = measure(&group, Activation::all(), arguments, bytes).map_err(CommandError::failed)?;
        let partial = measure(&group, activation, arguments, bytes).map_err(CommandError::failed)?;
        errors += all.errors + partial.errors;
        if group.rank() == 0 {
            print_row(arguments, &fabric, bytes, &partial, &all)?;
        }
    }
    let is_first = group.rank() == 0;
    group.close().map_err(CommandError::failed)?;
    if is_first { super::verdict(errors) } else { Ok(()) }
}

fn println_checked(line: std::fmt::Arguments<'_>) -> Result<(), CommandError> {
    writeln!(std::io::stdout().lock(), "{line}").map_err(|error| {
        CommandError::failed(format!("results not printed: standard output ({error}); give it a reader"))
    })
}

fn print_row(
    arguments: &Arguments,
    fabric: &str,
    bytes: u64,
    partial: &Measured,
    all: &Measured,
) -> Result<(), CommandError> {
    let ratio = all.time_us_mean / partial.time_us_mean;
    let errors = partial.errors + all.errors;
    let Measured { time_us_mean, contributors_mean, missed, .. } = partial;
    if arguments.json {
        let PartialArguments { activation, skew, rounds, .. } = &arguments.partial;
        let late = rule(&arguments.partial).to_string();
        println_checked(format_args!(
            "{}",
            json!({
                "collective": "partial-all-reduce", "fabric": fabric, "bytes": bytes, "activation": activation.to_string(),
                "late": late, "skew": skew.to_string(), "rounds": rounds,
                "time_us_mean": rounded(*time_us_mean, 2), "all_time_us_mean": rounded(all.time_us_mean, 2),
                "ratio_to_all": rounded(ratio, 3), "contributors_mean": rounded(*contributors_mean, 3),
                "missed": rounded(*missed, 3), "errors": errors
            })
        ))
    } else {
        println_checked(format_args!(
            "{bytes:>10} {time_us_mean:>14.1} {:>14.1} {ratio:>8.2} {contributors_mean:>13.2} {missed:>7.2} {errors:>7}",
            all.time_us_mean
        ))
    }
}

/// The results that this rank saw: by round, the first element, or [`UNSEEN`].
struct Found {
    sums: Vec<f64>,
    contributors: u64,
    errors: u64,
}

/// Less than any sum.
const UNSEEN: f64 = -1.0;

impl Found {
    /// All elements of a result are the same; they are checked against the contributions at the
    /// end.
    fn note(&mut self, round: &Round<'_, f32>) {
        let number = round.number() as usize;
        self.sums.resize(self.sums.len().max(number + 1), UNSEEN);
        let first = round.result().first().copied().unwrap_or(0.0);
        self.errors += round.result().iter().filter(|element| **element != first).count() as u64;
        let corrected = round.correction().and_then(|(_, sum)| sum.first().copied()).unwrap_or(0.0);
        self.sums[number] = f64::from(first) + f64::from(corrected);
    }
}

fn measure(
    group: &Group,
    activation: Activation,
    arguments: &Arguments,
    bytes: u64,
) -> Result<Measured, PartialError> {
    let PartialArguments { skew, rounds: count, .. } = arguments.partial;
    let (rank, ranks) = (group.rank(), group.world_size());
    let len = (bytes / size_of::<f32>() as u64) as usize;
    let mut rounds = group.partial::<f32>(len, activation)?;
    let mut found = Found { sums: Vec::new(), contributors: 0, errors: 0 };
    let (mut waited, mut missed, mut given) = (Duration::ZERO, 0, 0.0f64);
    let own = f64::from(rank + 1);
    for step in 0..u64::from(count) {
        group.barrier()?;
        skew.sleep(rank, ranks, step);
        rounds.contribution().fill(own as f32);
        let begin = clock::now();
        let round = rounds.contribute()?;
        waited += clock::now() - begin;
        missed += round.missed();
        found.contributors += u64::from(round.contributors().len());
        if round.own() != Own::Dropped {
            given += own;
        }
        found.note(&round);
    }
    found.note(&rounds.finish()?);
    // Each round was seen by a rank at least: that which it waited for.
    found.sums.resize(rounds.report()?.rounds as usize, UNSEEN);
    group.all_reduce(&mut found.sums[..], ReduceOp::Max)?;
    let steps = f64::from(count);
    let mut totals = [
        given,
        found.errors as f64,
        waited.as_secs_f64() * 1e6 / steps,
        found.contributors as f64 / steps,
        missed as f64,
    ];
    group.all_reduce(&mut totals, ReduceOp::Sum)?;
    let [given, errors, time_us, contributors, missed] = totals;
    let is_whole = len == 0 || found.sums.iter().sum::<f64>() == given;
    Ok(Measured {
        time_us_mean: time_us / f64::from(ranks),
        contributors_mean: contributors / f64::from(ranks),
        missed: missed / f64::from(ranks) / steps,
        errors: errors as u64 + u64::from(!is_whole),
    })
}
