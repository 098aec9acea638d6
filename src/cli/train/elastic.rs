//! `pleach train --elastic`: ranks that may end or stop while the others train on, and others that
//! may join.
//!
//! The ranks are members of a session. By the scheme `sync` a step has the images of one batch,
//! whoever shares it: so the parameters at the end are those of one rank that was never disturbed,
//! up to rounding, if no step was lost or applied twice; with `--exact` ([`exact`]) they are its
//! bits. By other schemes each seat has batches of its own. Outside of a
//! launcher this process starts the ranks, passes on what they print, and with `--chaos` kills and
//! stops some of them, and lets some join and leave ([`Strikes`]).

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use indicatif::ProgressBar;
use pleach::partial::duration;
use pleach::session::{Elastic, Session, SessionError};
use pleach::transport::{Nanos, clock};
use pleach::{Options, Reproducible};
use pleach_training::{Layout, Learner as _, Perceptron, Scheme, Sgd, TrainError, Trainer};
use pleach_vocabulary::random::Random;
use serde_json::json;

use super::learner::DigitReader;
use super::{Arguments, BATCH, ROUNDING, SEED, Shard, Verdict, difference, exact, steps, train_alone};
use crate::cli::CommandError;
use crate::cli::bounds::Bounds;
use crate::cli::digits::{DataSet, Digits};
use crate::cli::faults::Fault;
use crate::cli::launch::members::{Members, Told};
use crate::cli::launch::{is_one_of_several, rank_count, rank_or_launch};
use crate::cli::output::{note, print, print_json, put, rounded};
use crate::cli::progress;
use crate::cli::strikes::{Look, Strike, Strikes};

/// The numbers of ranks where none are given.
const USUAL: &str = "2:6";

/// The faults where none are named.
const USUAL_FAULTS: [Fault; 4] = [Fault::Kill, Fault::Stop, Fault::Join, Fault::Leave];

/// Time between two faults.
const EVERY: Duration = Duration::from_secs(2);

/// How long a step takes at least with `--chaos`: the training outlasts some faults.
const PACE: Duration = Duration::from_millis(20);

/// How long the launcher hears nothing before it looks whether a fault is due.
const LISTENING: Duration = Duration::from_millis(50);

/// How long ranks that were stopped or told to leave have to find that they are out, after the
/// others have ended.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// How a rank says to its launcher what its seat is, and of how many ranks a new epoch is.
const MARK: &str = "@epoch ";

/// How a rank says to its launcher that it has made the last step: the session is over.
const END: &str = "@end";

/// Options of trainings whose ranks may end.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ElasticArguments {
    /// Train in a session, by the scheme sync if none is given (not by every scheme, see
    /// --schemes): ranks may end, stop, leave and join, and MIN or more of at most MAX go on
    /// [without a value: 2:6]
    #[arg(
        long,
        value_name = "MIN:MAX",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = USUAL,
        conflicts_with_all = ["partial", "simulate", "replay", "checkpoint", "resume", "log", "record", "steps", "batch", "learning_rates", "momentum", "seed", "skew"],
    )]
    elastic: Option<Bounds>,
    /// Every 2 s a fault, where MIN and MAX allow it: kill, stop, join and leave in turn, or those
    /// of a LIST
    #[arg(
        long,
        value_name = "LIST",
        num_args = 0..=1,
        require_equals = true,
        value_delimiter = ',',
        value_parser = Fault::simple,
        requires = "elastic",
    )]
    chaos: Option<Vec<Fault>>,
    /// Add gradients up without rounding: the parameters are the very bits of one undisturbed rank
    #[arg(long, requires = "elastic", conflicts_with = super::BY_SCHEME)]
    exact: bool,
    /// How long each step takes at least [default: 20ms with --chaos]
    #[arg(long, value_name = "D", requires = "elastic", value_parser = pace)]
    pace: Option<Duration>,
    /// Tell the launcher of each epoch
    #[arg(long, hide = true, requires = "elastic")]
    member: bool,
}

impl ElasticArguments {
    /// Of a training in a session.
    pub(crate) fn bounds(&self) -> Option<Bounds> {
        self.elastic
    }
}

fn pace(text: &str) -> Result<Duration, &'static str> {
    duration(text).ok_or("give a time, as 5ms")
}

/// Trains in a session.
pub(crate) fn run(
    arguments: &Arguments,
    bounds: Bounds,
    schemes: &[Scheme],
    data: &DataSet,
) -> Result<(), CommandError> {
    let scheme = match schemes {
        [] => "sync".parse().map_err(CommandError::usage)?,
        [scheme] => *scheme,
        _ => return Err(CommandError::typed("several schemes: --elastic trains once; give one --scheme")),
    };
    let layout = Layout::of(&arguments.model.network(&data.train).lengths());
    scheme.plan_in_session(&layout, 0, 1).map_err(CommandError::typed)?;
    let ElasticArguments { chaos, member, .. } = &arguments.elastic;
    let faults = faults(chaos.as_deref());
    if is_one_of_several(&arguments.world)? {
        if chaos.is_some() {
            return Err(CommandError::typed(
                "no chaos here: --chaos strikes ranks that this command has started; leave --chaos or the launcher away",
            ));
        }
        return train(arguments, bounds, &scheme, data, *member);
    }
    let ranks = rank_count(&arguments.world, arguments.ranks, bounds.most(), 0)?;
    if !bounds.allow(ranks) {
        let (fewest, most) = (bounds.fewest(), bounds.most());
        return Err(CommandError::typed(format!(
            "ranks contradict: --ranks {ranks}, and --elastic={bounds}; give a number from {fewest} to {most}"
        )));
    }
    if ranks == 1 {
        return Err(CommandError::typed("one rank alone is in no session: give --ranks 2 or more"));
    }
    launch(arguments, bounds, ranks, faults)
}

/// One rank.
fn train(
    arguments: &Arguments,
    bounds: Bounds,
    scheme: &Scheme,
    data: &DataSet,
    tells: bool,
) -> Result<(), CommandError> {
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, 1, None)? else { return Ok(()) };
    let ranks = world.world_size;
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    options.observe.metrics = arguments.metrics.map(|address| address.0).or(options.observe.metrics);
    let is_exact = arguments.elastic.exact;
    if is_exact {
        options.reproducible = Reproducible::Exact;
    }
    let reader = DigitReader::new(&data.train, &arguments.model, &arguments.training);
    let (model, epochs, hash) = (&arguments.model, arguments.epochs(), reader.hash());
    let mut elastic = Elastic::between(bounds.fewest(), bounds.most());
    let adds = if is_exact { "exactly" } else { "by rounding" };
    elastic.program =
        format!("pleach train: {scheme}, {adds}, of {model}, {epochs} passes over the data of hash {hash:x}");
    let optimizer = arguments.training.optimizer(scheme, ranks)?;
    let session = Session::join(&options, &elastic).map_err(CommandError::failed)?;
    let pace = arguments.elastic.pace.unwrap_or_default();
    let (digits, is_one_batch) = (&data.train, is_one_batch(scheme));
    let steps = if is_one_batch {
        steps(digits, epochs)
    } else {
        arguments.training.steps(epochs, digits.len(), ranks)
    };
    let training = Training { arguments, digits, steps, is_one_batch, optimizer, pace, tells };
    let ended = if is_exact { exact::train(&training, session) } else { training.by(scheme, session) };
    let Some(trained) = ended.map_err(CommandError::failed)? else { return Ok(()) };
    if tells {
        print("results", &format!("{END}\n"))?;
    }
    if trained.rank != 0 {
        return Ok(());
    }
    let difference = if is_exact {
        let alone = exact::alone(&training).map_err(CommandError::failed)?;
        Some(exact::difference(&trained.parameters, &alone))
    } else if is_one_batch {
        let alone = train_alone(model, digits, epochs);
        Some(difference(&trained.parameters, alone.network.parameters()))
    } else {
        None
    };
    let verdict = Verdict {
        accuracy: reader.reading(&trained.parameters, &data.test).accuracy,
        examined: data.test.len(),
        parameters_equal: trained.parameters_equal,
        difference: difference.unwrap_or_default(),
        rounding: if is_exact { 0.0 } else { ROUNDING },
    };
    report(arguments, &trained, training.steps, &verdict, difference.map(|_| verdict.matches_one_rank()))?;
    verdict.check()
}

/// Whether members share the images of one batch in each step. Else each seat has its own.
fn is_one_batch(scheme: &Scheme) -> bool {
    matches!(scheme, Scheme::Sync { .. })
}

/// The faults that were asked for: those that are usual, where none were named.
fn faults(chaos: Option<&[Fault]>) -> Vec<Fault> {
    match chaos {
        None => Vec::new(),
        Some([]) => USUAL_FAULTS.to_vec(),
        Some(named) => named.to_vec(),
    }
}

/// What a rank trains.
#[derive(Clone, Copy)]
pub(crate) struct Training<'a> {
    arguments: &'a Arguments,
    digits: &'a Digits,
    steps: u64,
    /// Whether members share the images of one batch in each step.
    is_one_batch: bool,
    /// The learning rate and the momentum.
    optimizer: (f32, f32),
    /// How long a step takes at least.
    pace: Duration,
    /// Whether the launcher is told of epochs.
    tells: bool,
}

/// A finished training in a session.
pub(crate) struct Trained {
    /// The number of this rank at the end.
    rank: u32,
    ranks: u32,
    parameters: Vec<f32>,
    /// Of all ranks, and wherever they had to be.
    parameters_equal: bool,
    /// Steps that this rank has computed again.
    repeated: u64,
    epochs: u64,
}

impl Trained {
    /// Of this rank, the number of ranks, their parameters, and whether all have the same.
    pub(crate) fn new(
        (rank, ranks): (u32, u32),
        parameters: &[f32],
        parameters_equal: bool,
        course: &Course<'_>,
    ) -> Self {
        let (parameters, repeated) = (parameters.to_vec(), course.repeated);
        let epochs = 1 + course.epoch.unwrap_or_default();
        Self { rank, ranks, parameters, parameters_equal, repeated, epochs }
    }
}

impl<'a> Training<'a> {
    /// The images to learn from.
    pub(crate) fn digits(&self) -> &'a Digits {
        self.digits
    }

    /// The network that reads them.
    pub(crate) fn network(&self) -> Perceptron {
        self.arguments.model.network(self.digits)
    }

    /// The number of steps.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// The same, as quick as it can be.
    pub(crate) fn without_pace(&self) -> Self {
        Self { pace: Duration::ZERO, ..*self }
    }

    /// Trains by a scheme; `None`: this rank has left.
    fn by(&self, scheme: &Scheme, mut session: Session) -> Result<Option<Trained>, TrainingError> {
        session.leave_on(signal_hook::consts::SIGTERM)?;
        let reader = DigitReader::new(self.digits, &self.arguments.model, &self.arguments.training);
        let layout = reader.layout();
        // Who makes steps by itself has an optimizer of its own.
        let mut kept = if self.is_one_batch {
            Some(session.state::<f32>("velocity", layout.parameters())?)
        } else {
            None
        };
        let mut trainer = Trainer::in_session(session, scheme, &layout, self.steps)?
            .checked()
            .comparing("the hash of the data", reader.hash());
        let (learning_rate, momentum) = self.optimizer;
        let mut sgd = Sgd::new(layout.parameters(), learning_rate, momentum);
        if let Some(kept) = &kept {
            sgd.velocity_mut().copy_from_slice(kept);
        }
        let mut course = Course::new(self, trainer.session().map_or(0, |session| session.seat().0));
        let mut stepped = |parameters: &mut [f32], gradient: &[f32]| {
            sgd.step(parameters, gradient);
            if let Some(kept) = &mut kept {
                kept.update(|kept| kept.copy_from_slice(sgd.velocity()));
            }
        };
        let made = self.make_steps(&mut trainer, &reader, &mut stepped, &mut course);
        let ended = match made {
            Ok(()) => trainer.end(),
            Err(error) => Err((error, Box::new(trainer))),
        };
        let trained = match ended {
            Ok(trained) => trained,
            Err((TrainError::Session(SessionError::Left), trainer)) => {
                return trainer.leave().map(|()| None).map_err(|error| TrainError::from(error).into());
            }
            Err((error, _)) => return Err(error.into()),
        };
        if let (0, Some(remark)) = (trained.rank, &trained.remark) {
            note(&format!("{scheme}: {remark}"));
        }
        let is_equal = trained.parameters_equal && trained.guarantee_held;
        Ok(Some(Trained::new((trained.rank, trained.ranks), &trained.parameters, is_equal, &course)))
    }

    fn make_steps(
        &self,
        trainer: &mut Trainer,
        reader: &DigitReader<'_>,
        stepped: &mut dyn FnMut(&mut [f32], &[f32]),
        course: &mut Course<'_>,
    ) -> Result<(), TrainError> {
        let network = self.network();
        trainer.parameters_mut().copy_from_slice(&network.initial(SEED));
        let mut batches = Batches::new(self.digits.len());
        while let Some(mut step) = trainer.step()? {
            let (number, (rank, ranks)) = (step.number(), step.members());
            course.attempts(number, step.session().and_then(Session::attempted_epoch), ranks);
            let begun = clock::now();
            let (parameters, gradient) = step.vectors()?;
            let loss = if self.is_one_batch {
                let shard = Shard { rank: rank as usize, ranks: ranks as usize };
                let batch = batches.of(number);
                let scale = shard.ranks as f32 / batch.len() as f32;
                let mine = batch.iter().copied().skip(shard.rank).step_by(shard.ranks);
                let mut samples = mine.map(|image| self.digits.sample(image));
                network.gradient(parameters, &mut samples, scale, gradient)
            } else {
                reader.gradient(course.seat, number, parameters, gradient)
            };
            self.rest_of_step(begun);
            step.update(&mut *stepped, loss)?;
        }
        Ok(())
    }

    /// Waits until a step has taken the time that it takes at least.
    pub(crate) fn rest_of_step(&self, begun: Nanos) {
        rest(self.pace.saturating_sub(clock::now() - begun));
    }
}

/// Why a rank trains no more.
pub(crate) type TrainingError = Box<dyn std::error::Error>;

/// What a rank says and counts of its attempts.
pub(crate) struct Course<'a> {
    training: &'a Training<'a>,
    seat: u32,
    bar: ProgressBar,
    epoch: Option<u64>,
    newest: Option<u64>,
    /// Steps that were attempted again.
    repeated: u64,
}

impl<'a> Course<'a> {
    pub(crate) fn new(training: &'a Training<'a>, seat: u32) -> Self {
        let bar = progress::bar("training", training.steps, seat == 0);
        Self { training, seat, bar, epoch: None, newest: None, repeated: 0 }
    }

    /// A step is attempted in an epoch of so many ranks.
    pub(crate) fn attempts(&mut self, step: u64, epoch: Option<u64>, ranks: u32) {
        if std::mem::replace(&mut self.epoch, epoch) != epoch && self.training.tells {
            // Where nobody listens, the launcher is gone, and so will be this rank.
            let _ = print("epochs", &format!("{MARK}{} {ranks}\n", self.seat));
        }
        self.repeated += u64::from(self.newest.replace(step) == Some(step));
        self.bar.set_position(step);
    }
}

impl Drop for Course<'_> {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// The rest of the time that a step takes at least.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn rest(time: Duration) {
    std::thread::sleep(time);
}

/// The batches of a training, of all ranks together; the same as those of the loop without a
/// session.
pub(crate) struct Batches {
    random: Random,
    order: Vec<usize>,
    /// Passes that have begun.
    passes: u64,
}

impl Batches {
    pub(crate) fn new(images: usize) -> Self {
        Self { random: Random::new(SEED), order: (0..images).collect(), passes: 0 }
    }

    /// The images of a step, which is the one before or a later one.
    pub(crate) fn of(&mut self, step: u64) -> &[usize] {
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
    arguments: &Arguments,
    trained: &Trained,
    steps: u64,
    verdict: &Verdict,
    matches: Option<bool>,
) -> Result<(), CommandError> {
    let Trained { ranks, repeated, epochs, .. } = trained;
    let Verdict { accuracy, examined, parameters_equal, difference, .. } = verdict;
    if arguments.json {
        let row = json!({
            "ranks": ranks,
            "steps": steps,
            "retried": repeated,
            "epochs": epochs,
            "test_accuracy": rounded(*accuracy, 4),
            "parameters_equal": parameters_equal,
            "matches_one_rank": matches,
            "exact": arguments.elastic.exact,
        });
        return print_json("results", &row);
    }
    let in_words = |holds| if holds { "yes" } else { "NO" };
    let how = if arguments.elastic.exact { "bit for bit" } else { "up to rounding" };
    let mut out = String::new();
    put!(
        out,
        "{ranks} ranks at the end, and {epochs} epochs; {steps} steps, of which rank 0 has computed {repeated} again"
    );
    put!(out, "all ranks have the same parameters, bit for bit: {}", in_words(*parameters_equal));
    if let Some(matches) = matches {
        let matches = in_words(matches);
        put!(out, "they are those of one rank {how}: {matches} (largest difference {difference:.1e})");
    }
    put!(out, "test accuracy {accuracy:.4} on {examined} images never seen before");
    print("results", &out)
}

/// Starts the ranks, strikes some, and stays until the last has ended.
fn launch(arguments: &Arguments, bounds: Bounds, ranks: u32, faults: Vec<Fault>) -> Result<(), CommandError> {
    let is_chaos = |argument: &OsString| {
        argument.to_str().is_some_and(|text| text == "--chaos" || text.starts_with("--chaos="))
    };
    let mut command: Vec<OsString> =
        std::env::args_os().skip(1).filter(|argument| !is_chaos(argument)).collect();
    command.push("--member".into());
    if !faults.is_empty() && arguments.elastic.pace.is_none() {
        command.push(format!("--pace={}ms", PACE.as_millis()).into());
    }
    let mut members = Members::start(ranks, &command, None)?;
    let mut strikes = Strikes::new(ranks, bounds, faults, EVERY, SEED);
    let mut heard = Heard::default();
    while strikes.has_ranks() {
        listen(&mut members, &mut strikes, &mut heard, clock::now() + LISTENING)?;
        if let Look::Struck(strike) = strikes.look(&mut members, clock::now())? {
            tell(strike, arguments.json)?;
        }
        if strikes.has_done() {
            strikes.give_up_joining(&members);
        }
    }
    // Who was stopped to the end finds that it is out.
    strikes.wake_the_stopped(&members);
    let until = clock::now() + LAST_WORDS;
    while strikes.has_leaving() && clock::now() < until {
        listen(&mut members, &mut strikes, &mut heard, until)?;
    }
    if let Some(error) = heard.failed {
        return Err(CommandError::failed(error));
    }
    if !strikes.has_done() {
        return Err(CommandError::failed(
            "no rank is left: all have ended before the last step; start it again",
        ));
    }
    if !heard.has_results {
        return Err(CommandError::failed(
            "no results: rank 0 has ended before it could compare what was trained; start it again",
        ));
    }
    Ok(())
}

/// What the launcher has heard of its ranks.
#[derive(Default)]
struct Heard {
    /// The error of the first rank that failed by itself.
    failed: Option<String>,
    /// Whether a rank has printed what the training came to.
    has_results: bool,
}

/// Hears what a rank says, by then.
fn listen(
    members: &mut Members,
    strikes: &mut Strikes,
    heard: &mut Heard,
    until: Nanos,
) -> Result<(), CommandError> {
    match members.next(until) {
        Some((number, Told::Line(line))) if line == END => strikes.session_ends(number),
        Some((number, Told::Line(line))) => match line.strip_prefix(MARK) {
            Some(epoch) => {
                let numbers = epoch.split_once(' ').map(|(seat, ranks)| (seat.parse(), ranks.parse()));
                if let Some((Ok(seat), Ok(ranks))) = numbers {
                    strikes.works(number, seat, ranks);
                }
            }
            None => {
                heard.has_results = true;
                print("results", &format!("{line}\n"))?;
            }
        },
        Some((number, Told::Ended(status, error))) => {
            let comes_too_late = strikes.is_joining(number) && (strikes.is_over() || strikes.has_done());
            let struck = strikes.ended(number, status.success());
            let is_expected = match struck {
                Some(fault) => fault != Fault::Leave || status.success(),
                None => comes_too_late || status.success(),
            };
            if is_expected {
                return Ok(());
            }
            if status.signal().is_some() {
                note(&format!("rank {number} has ended ({status}), and the others go on"));
            } else {
                let error = error.unwrap_or_else(|| status.to_string());
                heard.failed.get_or_insert(format!("rank {number} failed: {error}"));
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
    let whom = seat.map_or_else(String::new, |seat| format!(" of rank {seat}"));
    print("faults", &format!("after {at_s:.1} s: {fault}{whom}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
