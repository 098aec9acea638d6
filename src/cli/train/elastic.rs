//! `pleach train --elastic`: ranks that may end or stop while the others train on.
//!
//! The ranks are members of a session. A step has the images of one batch, whoever shares it: so
//! the parameters at the end are those of one rank that was never disturbed, up to rounding, if
//! no step was lost or applied twice. Outside of a launcher this process starts the ranks, passes
//! on what they print, and with `--chaos` kills and stops some of them ([`Strikes`]).

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::str::FromStr;
use std::time::Duration;

use pleach::Options;
use pleach::partial::duration;
use pleach::session::{Elastic, Session};
use pleach::transport::{Nanos, clock};
use pleach_training::{Layout, Learner as _, Scheme, Sgd, TrainError, Trained, Trainer};
use pleach_vocabulary::random::Random;
use serde_json::json;

use super::learner::DigitReader;
use super::network::{LEARNING_RATE, MOMENTUM};
use super::{Arguments, BATCH, SEED, Shard, Verdict, difference, steps, train_alone};
use crate::cli::CommandError;
use crate::cli::digits::{DataSet, Digits};
use crate::cli::faults::Fault;
use crate::cli::launch::members::{Members, Told};
use crate::cli::launch::{is_one_of_several, rank_count, rank_or_launch};
use crate::cli::output::{note, print, print_json, put, rounded};
use crate::cli::progress;
use crate::cli::strikes::{Look, Strike, Strikes};

/// The numbers of ranks where none are given.
const USUAL: &str = "2:6";

/// Time between two faults.
const EVERY: Duration = Duration::from_secs(2);

/// How long a step takes at least with `--chaos`: the training outlasts some faults.
const PACE: Duration = Duration::from_millis(20);

/// How long the launcher hears nothing before it looks whether a fault is due.
const LISTENING: Duration = Duration::from_millis(50);

/// How long ranks that were stopped have to find that they are out, after the others have ended.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How a rank says to its launcher of how many ranks a new epoch is.
const MARK: &str = "@epoch ";

/// Options of trainings whose ranks may end.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ElasticArguments {
    /// Train in a session by the scheme sync: ranks may end or stop, and MIN or more of at most MAX
    /// go on [default: 2:6]
    #[arg(
        long,
        value_name = "MIN:MAX",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = USUAL,
        conflicts_with_all = ["partial", "simulate", "replay", "checkpoint", "resume", "log", "record", "steps", "batch", "learning_rates", "momentum", "seed", "skew"],
    )]
    elastic: Option<Limits>,
    /// Strike one of the ranks every 2 s while more than MIN are left: kill and stop in turn, or
    /// those of a LIST
    #[arg(
        long,
        value_name = "LIST",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "kill,stop",
        value_delimiter = ',',
        requires = "elastic",
    )]
    chaos: Vec<Fault>,
    /// How long each step takes at least [default: 20ms with --chaos]
    #[arg(long, value_name = "D", requires = "elastic", value_parser = pace)]
    pace: Option<Duration>,
    /// Tell the launcher of each epoch
    #[arg(long, hide = true, requires = "elastic")]
    member: bool,
}

impl ElasticArguments {
    /// Of a training in a session.
    pub(crate) fn limits(&self) -> Option<Limits> {
        self.elastic
    }
}

fn pace(text: &str) -> Result<Duration, &'static str> {
    duration(text).ok_or("give a time, as 5ms")
}

/// The fewest and the most ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    fewest: u32,
    most: u32,
}

impl FromStr for Limits {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let numbers =
            text.split_once(':').and_then(|(fewest, most)| Some((fewest.parse().ok()?, most.parse().ok()?)));
        match numbers {
            Some((fewest, most)) if fewest >= 1 && fewest <= most => Ok(Self { fewest, most }),
            _ => Err("give MIN:MAX, as 2:6, with MIN from 1 to MAX"),
        }
    }
}

/// Trains in a session.
pub(crate) fn run(
    arguments: &Arguments,
    limits: Limits,
    schemes: &[Scheme],
    data: &DataSet,
) -> Result<(), CommandError> {
    let scheme = match schemes {
        [] => "sync".parse().map_err(CommandError::usage)?,
        [scheme] => *scheme,
        _ => return Err(CommandError::typed("several schemes: --elastic trains once; give one --scheme")),
    };
    let layout = Layout::of(&arguments.model.network(&data.train).lengths());
    scheme.plan_in_session(&layout, 1).map_err(CommandError::typed)?;
    let ElasticArguments { chaos, member, .. } = &arguments.elastic;
    if is_one_of_several(&arguments.world)? {
        if !chaos.is_empty() {
            return Err(CommandError::typed(
                "no chaos here: --chaos strikes ranks that this command has started; leave --chaos or the launcher away",
            ));
        }
        return train(arguments, limits, &scheme, data, *member);
    }
    let ranks = rank_count(&arguments.world, arguments.ranks, limits.most, 0)?;
    if !(limits.fewest..=limits.most).contains(&ranks) {
        let Limits { fewest, most } = limits;
        return Err(CommandError::typed(format!(
            "ranks contradict: --ranks {ranks}, and --elastic={fewest}:{most}; give a number from {fewest} to {most}"
        )));
    }
    if ranks == 1 {
        return Err(CommandError::typed("one rank alone is in no session: give --ranks 2 or more"));
    }
    launch(arguments, limits, ranks)
}

/// One rank.
fn train(
    arguments: &Arguments,
    limits: Limits,
    scheme: &Scheme,
    data: &DataSet,
    tells: bool,
) -> Result<(), CommandError> {
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, 1, None)? else { return Ok(()) };
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    options.observe.metrics = arguments.metrics.map(|address| address.0).or(options.observe.metrics);
    let elastic = Elastic::between(limits.fewest, limits.most);
    let session = Session::join(&options, &elastic).map_err(CommandError::failed)?;
    let steps = steps(&data.train, arguments.epochs);
    let (trained, epochs) =
        make_steps(arguments, session, scheme, &data.train, steps, tells).map_err(CommandError::failed)?;
    if trained.rank != 0 {
        return Ok(());
    }
    let one_rank = train_alone(&arguments.model, &data.train, arguments.epochs);
    let reader = DigitReader::new(&data.train, &arguments.model, &arguments.training);
    let verdict = Verdict {
        accuracy: reader.reading(&trained.parameters, &data.test).accuracy,
        examined: data.test.len(),
        parameters_equal: trained.parameters_equal && trained.guarantee_held,
        difference: difference(&trained.parameters, one_rank.network.parameters()),
    };
    report(arguments.json, &trained, steps, epochs, &verdict)?;
    verdict.check()
}

/// Returns the number of epochs after the first one too.
fn make_steps(
    arguments: &Arguments,
    session: Session,
    scheme: &Scheme,
    digits: &Digits,
    steps: u64,
    tells: bool,
) -> Result<(Trained, u64), TrainError> {
    let network = arguments.model.network(digits);
    let reader = DigitReader::new(digits, &arguments.model, &arguments.training);
    let pace = arguments.elastic.pace.unwrap_or_default();
    let mut trainer = Trainer::in_session(session, scheme, &reader.layout(), steps)?
        .checked()
        .comparing("the hash of the data", reader.hash());
    trainer.parameters_mut().copy_from_slice(&network.initial(SEED));
    let mut sgd = Sgd::new(reader.layout().parameters(), LEARNING_RATE, MOMENTUM);
    let mut batches = Batches::new(digits.len());
    let mut epoch = None;
    let seat = trainer.session().map_or(0, |session| session.seat().0);
    let bar = progress::bar("training", steps, seat == 0);
    while let Some(mut step) = trainer.step()? {
        let (number, (rank, ranks)) = (step.number(), step.members());
        let newest = step.session().and_then(Session::attempted_epoch);
        if std::mem::replace(&mut epoch, newest) != newest && tells {
            // Where nobody listens, the launcher is gone, and so will be this rank.
            let _ = print("epochs", &format!("{MARK}{ranks}\n"));
        }
        let begun = clock::now();
        let (parameters, gradient) = step.vectors()?;
        let shard = Shard { rank: rank as usize, ranks: ranks as usize };
        let batch = batches.of(number);
        let scale = shard.ranks as f32 / batch.len() as f32;
        let mine = batch.iter().copied().skip(shard.rank).step_by(shard.ranks);
        let mut samples = mine.map(|image| digits.sample(image));
        let loss = network.gradient(parameters, &mut samples, scale, gradient);
        rest(pace.saturating_sub(clock::now() - begun));
        step.update(|parameters, gradient| sgd.step(parameters, gradient), loss)?;
        bar.set_position(number);
    }
    bar.finish_and_clear();
    Ok((trainer.finish()?, 1 + epoch.unwrap_or_default()))
}

/// The rest of the time that a step takes at least.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn rest(time: Duration) {
    std::thread::sleep(time);
}

/// The batches of a training, of all ranks together; the same as those of the loop without a
/// session.
struct Batches {
    random: Random,
    order: Vec<usize>,
    /// Passes that have begun.
    passes: u64,
}

impl Batches {
    fn new(images: usize) -> Self {
        Self { random: Random::new(SEED), order: (0..images).collect(), passes: 0 }
    }

    /// The images of a step, which is the one before or a later one.
    fn of(&mut self, step: u64) -> &[usize] {
        let a_pass = self.order.len().div_ceil(BATCH) as u64;
        while self.passes <= step / a_pass {
            self.random.shuffle(&mut self.order);
            self.passes += 1;
        }
        let begin = (step % a_pass) as usize * BATCH;
        &self.order[begin..self.order.len().min(begin + BATCH)]
    }
}

/// Says what the training came to.
fn report(
    as_json: bool,
    trained: &Trained,
    steps: u64,
    epochs: u64,
    verdict: &Verdict,
) -> Result<(), CommandError> {
    let repeated = trained.progress.steps - steps;
    let Verdict { accuracy, examined, parameters_equal, difference } = verdict;
    if as_json {
        let row = json!({
            "ranks": trained.ranks,
            "steps": steps,
            "retried": repeated,
            "epochs": epochs,
            "test_accuracy": rounded(*accuracy, 4),
            "parameters_equal": parameters_equal,
            "matches_one_rank": verdict.matches_one_rank(),
        });
        return print_json("results", &row);
    }
    let [equal, matches] =
        [*parameters_equal, verdict.matches_one_rank()].map(|holds| if holds { "yes" } else { "NO" });
    let mut out = String::new();
    put!(
        out,
        "{} ranks at the end, and {epochs} epochs; {steps} steps, of which rank 0 has computed {repeated} again",
        trained.ranks
    );
    put!(out, "all ranks have the same parameters, bit for bit: {equal}");
    put!(out, "they are those of one rank up to rounding: {matches} (largest difference {difference:.1e})");
    put!(out, "test accuracy {accuracy:.4} on {examined} images never seen before");
    print("results", &out)
}

/// Starts the ranks, strikes some, and stays until the last has ended.
fn launch(arguments: &Arguments, limits: Limits, ranks: u32) -> Result<(), CommandError> {
    let faults = &arguments.elastic.chaos;
    let is_chaos = |argument: &OsString| {
        argument.to_str().is_some_and(|text| text == "--chaos" || text.starts_with("--chaos="))
    };
    let mut command: Vec<OsString> =
        std::env::args_os().skip(1).filter(|argument| !is_chaos(argument)).collect();
    command.push("--member".into());
    if !faults.is_empty() && arguments.elastic.pace.is_none() {
        command.push(format!("--pace={}ms", PACE.as_millis()).into());
    }
    let mut members = Members::start(ranks, &command)?;
    let mut strikes = Strikes::new(ranks, limits.fewest, faults.clone(), EVERY, SEED);
    let mut failed = None;
    while strikes.has_ranks() {
        listen(&mut members, &mut strikes, &mut failed, clock::now() + LISTENING)?;
        if let Look::Struck(strike) = strikes.look(&members, clock::now()) {
            tell(strike, arguments.json)?;
        }
    }
    // Who was stopped to the end finds that it is out.
    strikes.wake_the_stopped(&members);
    let until = clock::now() + LAST_WORDS;
    while strikes.has_stopped() && clock::now() < until {
        listen(&mut members, &mut strikes, &mut failed, until)?;
    }
    if let Some(error) = failed {
        return Err(CommandError::failed(error));
    }
    if !strikes.has_done() {
        return Err(CommandError::failed(
            "no rank is left: all have ended before the last step; start it again",
        ));
    }
    Ok(())
}

/// Hears what a rank says, by then; keeps the error of the first rank that fails by itself.
fn listen(
    members: &mut Members,
    strikes: &mut Strikes,
    failed: &mut Option<String>,
    until: Nanos,
) -> Result<(), CommandError> {
    match members.next(until) {
        Some((seat, Told::Line(line))) => match line.strip_prefix(MARK).map(str::parse) {
            Some(Ok(ranks)) => strikes.works(seat, ranks),
            Some(Err(_)) => {}
            None => print("results", &format!("{line}\n"))?,
        },
        Some((seat, Told::Ended(status, error))) => {
            let was_struck = strikes.ended(seat, status.success());
            if status.signal().is_some() && !was_struck {
                note(&format!("rank {seat} has ended ({status}), and the others go on"));
            } else if !status.success() && !was_struck {
                let error = error.unwrap_or_else(|| status.to_string());
                failed.get_or_insert(format!("rank {seat} failed: {error}"));
            }
        }
        None => {}
    }
    Ok(())
}

fn tell(strike: Strike, as_json: bool) -> Result<(), CommandError> {
    let (at_s, fault, seat) = (strike.since_begin().as_secs_f64(), strike.fault(), strike.seat());
    if as_json {
        let row = json!({ "at_s": rounded(at_s, 3), "fault": fault.to_string(), "seat": seat });
        return print_json("faults", &row);
    }
    print("faults", &format!("after {at_s:.1} s: {fault} of rank {seat}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_two_numbers_in_order() {
        assert_eq!("2:6".parse(), Ok(Limits { fewest: 2, most: 6 }));
        assert_eq!("3:3".parse(), Ok(Limits { fewest: 3, most: 3 }));
        for wrong in ["8:2", "0:2", "2", "2:", ":6", "2:6:8", "a:b"] {
            assert!(wrong.parse::<Limits>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn batches_are_those_of_the_loop_without_a_session_also_when_a_step_is_repeated() {
        let mut batches = Batches::new(150);
        let (mut random, mut order) = (Random::new(SEED), (0..150).collect::<Vec<usize>>());
        let mut step = 0;
        for _ in 0..3 {
            random.shuffle(&mut order);
            for batch in order.chunks(BATCH) {
                assert_eq!(batches.of(step), batch);
                assert_eq!(batches.of(step), batch);
                step += 1;
            }
        }
    }
}
