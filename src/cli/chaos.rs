//! `pleach chaos`: a session whose members are killed and stopped for a while, and everything that
//! they say compared.
//!
//! This process starts MAX ranks as members of a session, which add up what each contributes, step
//! by step. One after the other is struck ([`Strikes`]) until MIN are left. No process is started
//! that joins, so a new job begins then, until the time is up. Each member says of each step that
//! it was told is committed who has contributed, and the digest of all its steps so far.
//! **Invariant:** of every member, the struck ones included, each step is checked by this process:
//! it is the one behind the step before, and has the contributors and the digest that it has on
//! every other member ([`Checker`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::Write as _;
use std::str::FromStr;
use std::time::Duration;

use pleach::partial::duration;
use pleach::session::{Elastic, Session, Verdict};
use pleach::transport::rendezvous::{ExplicitWorld, FabricChoice, World};
use pleach::transport::{Nanos, clock};
use pleach::{Options, ReduceOp};
use pleach_vocabulary::digest::chain;
use serde_json::{Map, Value, json};

use super::CommandError;
use super::faults::Fault;
use super::launch::members::{Members, Told};
use super::output::{print, print_json, put, rounded};
use super::recovered::{Recovered, STAGES, Survivor};
use super::strikes::{Look, Strike, Strikes};

/// Elements that a step sums, besides the contributors.
const ELEMENTS: usize = 10_000;

/// How long a rank computes between two sums: its steps are lines to be read.
const COMPUTING: Duration = Duration::from_millis(1);

/// Most ranks: each is a bit.
const RANKS_MAX: u32 = 64;

/// How long the ranks of a job may take to begin, and to go on after a fault.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long this process hears nothing before it looks whether a fault is due.
const LISTENING: Duration = Duration::from_millis(20);

/// Arguments of `pleach chaos`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pleach chaos --for 20s\n  pleach chaos --ranks 2:4 --fabric tcp --faults kill --every 1s --seed 7 --json"
)]
pub(crate) struct Arguments {
    /// MAX ranks are started, and struck until MIN are left; then a new job begins
    #[arg(long, value_name = "MIN:MAX", default_value = "2:6")]
    ranks: Limits,
    /// The fabric: shm, tcp, shm+tcp, verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value_t)]
    fabric: FabricChoice,
    /// The faults, in turn: kill and stop
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "kill,stop")]
    faults: Vec<Fault>,
    /// The time between two faults, at least: the others have to have gone on
    #[arg(long, value_name = "D", value_parser = time, default_value = "2s")]
    every: Duration,
    /// How long ranks are struck
    #[arg(long = "for", value_name = "D", value_parser = time, default_value = "60s")]
    lasts: Duration,
    /// The seed that chooses the ranks to strike
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
    /// This process is one of the ranks
    #[arg(long, hide = true)]
    member: bool,
}

fn time(text: &str) -> Result<Duration, &'static str> {
    duration(text).ok_or("give a time, as 2s")
}

/// The fewest and the most ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    fewest: u32,
    most: u32,
}

impl FromStr for Limits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers =
            text.split_once(':').and_then(|(fewest, most)| Some((fewest.parse().ok()?, most.parse().ok()?)));
        match numbers {
            Some((fewest, most)) if fewest >= 1 && fewest < most && most <= RANKS_MAX => {
                Ok(Self { fewest, most })
            }
            _ => Err(format!("give MIN:MAX, as 2:6, with MIN from 1 and MAX above it, at most {RANKS_MAX}")),
        }
    }
}

/// Runs `pleach chaos`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let world = World::find(&ExplicitWorld::default()).map_err(CommandError::usage)?;
    match (world, arguments.member) {
        (Some(world), true) => return member(arguments, world),
        (None, false) => {}
        _ => {
            return Err(CommandError::typed(
                "one process too many: chaos starts its ranks by itself, to strike them; start it once, without a launcher",
            ));
        }
    }
    let until = clock::now() + arguments.lasts;
    let mut totals = Totals { fewest: arguments.ranks.most, ..Totals::default() };
    if !arguments.json {
        print("faults", &head())?;
    }
    let mut jobs = 0;
    while jobs == 0 || clock::now() < until {
        Job::start(arguments, arguments.seed.wrapping_add(jobs))?.run(until, &mut totals)?;
        jobs += 1;
    }
    totals.print(arguments.json, jobs)
}

/// What all jobs came to.
#[derive(Debug, Default)]
struct Totals {
    faults: u64,
    steps: u64,
    retried: u64,
    epochs: u64,
    fewest: u32,
    most: u32,
}

impl Totals {
    /// Whatever differed was an error before.
    fn print(&self, as_json: bool, jobs: u64) -> Result<(), CommandError> {
        let Self { faults, steps, retried, epochs, fewest, most } = self;
        if as_json {
            let row = json!({
                "steps": steps, "retried": retried, "epochs": epochs, "members_min": fewest, "members_max": most,
                "equal": true,
            });
            return print_json("results", &row);
        }
        print(
            "results",
            &format!(
                "{faults} faults in {jobs} jobs of {fewest} to {most} ranks: {steps} steps, each counted once on all members; \
                 {retried} were repeated, in {epochs} epochs\n"
            ),
        )
    }
}

/// What members said of their steps; see the module.
#[derive(Debug, Default)]
struct Checker {
    /// By step: who contributed, and the digest.
    steps: BTreeMap<u64, (u64, u64)>,
    /// By seat: the step that it commits next.
    next: BTreeMap<u32, u64>,
}

impl Checker {
    /// A member was told that a step is committed.
    fn step(&mut self, seat: u32, step: u64, bits: u64, digest: u64) -> Result<(), String> {
        let next = self.next.entry(seat).or_default();
        if *next != step {
            return Err(format!("rank {seat} has committed step {step}, and step {next} is its next one"));
        }
        *next += 1;
        if bits >> seat & 1 == 0 {
            return Err(format!("rank {seat} has committed step {step} without its own contribution"));
        }
        let known = *self.steps.entry(step).or_insert((bits, digest));
        if known != (bits, digest) {
            return Err(format!(
                "step {step} of rank {seat} has contributors {bits:#b} and digest {digest:#x}, and {:#b} and {:#x} elsewhere",
                known.0, known.1
            ));
        }
        Ok(())
    }

    fn steps(&self) -> u64 {
        self.steps.len() as u64
    }
}

/// One job: ranks that are struck until few are left.
struct Job {
    as_json: bool,
    fewest: u32,
    members: Members,
    strikes: Strikes,
    checker: Checker,
    /// What members told of the newest change, by seat.
    survivors: BTreeMap<u32, Survivor>,
    epoch: u64,
    /// Steps that were repeated.
    retried: BTreeSet<u64>,
    /// When the newest fault befell, or the ranks were started.
    heard: Nanos,
}

impl Job {
    fn start(arguments: &Arguments, seed: u64) -> Result<Self, CommandError> {
        let Limits { fewest, most } = arguments.ranks;
        let mut command: Vec<OsString> = std::env::args_os().skip(1).collect();
        command.push("--member".into());
        Ok(Self {
            as_json: arguments.json,
            fewest,
            members: Members::start(most, &command)?,
            strikes: Strikes::new(most, fewest, arguments.faults.clone(), arguments.every, seed),
            checker: Checker::default(),
            survivors: BTreeMap::new(),
            epoch: 0,
            retried: BTreeSet::new(),
            heard: clock::now(),
        })
    }

    fn run(mut self, until: Nanos, totals: &mut Totals) -> Result<(), CommandError> {
        let mut is_settled = false;
        // A fault that has befallen is watched to its end.
        while !is_settled || (clock::now() < until && self.strikes.working() > self.fewest) {
            self.listen()?;
            match self.strikes.look(&self.members, clock::now()) {
                Look::Nothing => {}
                Look::Struck(_) => {
                    is_settled = false;
                    self.heard = clock::now();
                    self.survivors.clear();
                }
                Look::WentOn(strike) => {
                    is_settled = true;
                    totals.faults += 1;
                    self.tell(strike)?;
                }
            }
            if clock::now().since(self.heard) > PATIENCE && !is_settled {
                let seconds = PATIENCE.as_secs();
                return Err(CommandError::failed(format!(
                    "ranks stand still: not all went on within {seconds} s; report this with PLEACH_LOG=debug"
                )));
            }
        }
        totals.steps += self.checker.steps();
        totals.retried += self.retried.len() as u64;
        totals.epochs += 1 + self.epoch;
        totals.most = totals.most.max(self.strikes.ranks());
        totals.fewest = totals.fewest.min(self.strikes.working());
        Ok(())
    }

    fn listen(&mut self) -> Result<(), CommandError> {
        match self.members.next(clock::now() + LISTENING) {
            Some((seat, Told::Line(line))) => self.line(seat, &line).map_err(|error| {
                CommandError::failed(format!("wrong steps: {error}; report this with this command line"))
            }),
            Some((seat, Told::Ended(status, error))) if !self.strikes.ended(seat, false) => {
                let error = error.unwrap_or_else(|| status.to_string());
                Err(CommandError::failed(format!("rank {seat} did not go on: {error}")))
            }
            _ => Ok(()),
        }
    }

    fn line(&mut self, seat: u32, line: &str) -> Result<(), String> {
        let broken = || format!("rank {seat} says '{line}'");
        let (kind, rest) = line.split_once(' ').ok_or_else(broken)?;
        match kind {
            "step" => {
                let numbers: Option<Vec<u64>> = rest.split(' ').map(|word| word.parse().ok()).collect();
                let Some(&[step, bits, digest]) = numbers.as_deref() else { return Err(broken()) };
                self.checker.step(seat, step, bits, digest)
            }
            "retry" => {
                self.retried.insert(rest.parse().map_err(|_| broken())?);
                Ok(())
            }
            "epoch" => {
                let (epoch, survivor) = rest.split_once(' ').ok_or_else(broken)?;
                let (ranks, survivor) = Survivor::read(survivor).ok_or_else(broken)?;
                self.epoch = self.epoch.max(epoch.parse().map_err(|_| broken())?);
                self.survivors.insert(seat, survivor);
                self.strikes.works(seat, ranks);
                Ok(())
            }
            _ => Err(broken()),
        }
    }

    /// Says how a fault went.
    fn tell(&mut self, strike: Strike) -> Result<(), CommandError> {
        let survivors = std::mem::take(&mut self.survivors);
        let others = survivors.into_iter().filter(|(seat, _)| *seat != strike.seat());
        let recovered = Recovered::of(strike.at(), others.map(|(_, survivor)| survivor));
        let millis = recovered.times().map(|time| time.map(|time| rounded(time.as_secs_f64() * 1e3, 3)));
        let (at_s, fault, seat) = (strike.since_begin().as_secs_f64(), strike.fault(), strike.seat());
        if self.as_json {
            let mut row = Map::new();
            row.insert("at_s".to_owned(), rounded(at_s, 3).into());
            row.insert("fault".to_owned(), fault.to_string().into());
            row.insert("seat".to_owned(), seat.into());
            row.insert("epoch".to_owned(), self.epoch.into());
            for (stage, time) in STAGES.iter().zip(millis) {
                row.insert(format!("{stage}_ms"), json!(time));
            }
            return print_json("faults", &Value::Object(row));
        }
        let mut out = String::new();
        let times: String = millis
            .iter()
            .map(|time| time.map_or_else(|| format!("{:>10}", "-"), |time| format!("{time:>10.2}")))
            .collect();
        put!(out, "{at_s:>8.1} {:>6} {seat:>5} {:>6}{times}", fault.to_string(), self.epoch);
        print("faults", &out)
    }
}

fn head() -> String {
    let stages: String = STAGES.iter().map(|stage| format!("{stage:>10}")).collect();
    format!("# ms since the fault, of the last of the others\n#  at (s)  fault  rank  epoch{stages}\n")
}

/// One rank.
fn member(arguments: &Arguments, world: World) -> Result<(), CommandError> {
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    let elastic = Elastic::between(arguments.ranks.fewest, arguments.ranks.most);
    let session = Session::join(&options, &elastic).map_err(CommandError::failed)?;
    make_steps(session).map_err(CommandError::failed)
}

/// Makes steps until this process is ended.
fn make_steps(mut session: Session) -> Result<(), Box<dyn std::error::Error>> {
    let own = 1_u64 << session.seat().0;
    let mut sums = session.buffer::<u64>(1 + ELEMENTS)?;
    let (mut told, mut last, mut digest) = (None, clock::now(), 0);
    let before = session.set_up();
    loop {
        let step = session.next()?;
        let (epoch, timeline) = (session.attempted_epoch(), session.timeline());
        let group = session.group()?;
        let ranks = group.world_size();
        compute();
        sums[0] = own;
        sums[1..].fill(step << 8 | 1);
        let outcome = group.all_reduce(&mut sums, ReduceOp::Sum);
        let result = clock::now();
        if session.commit(outcome)? != Verdict::Committed {
            say(&format!("retry {step}"))?;
            continue;
        }
        let sum = u64::from(ranks) * (step << 8 | 1);
        if sums[0].count_ones() != ranks || sums[1..].iter().any(|element| *element != sum) {
            return Err(format!("the sum of step {step} is not that of {ranks} ranks").into());
        }
        digest = chain(chain(digest, step), sums[0]);
        if told != epoch {
            told = epoch;
            let set_up = session.set_up();
            let set_up = (set_up.0 - before.0, set_up.1 - before.1);
            let survivor = Survivor::new(&timeline, result, result.since(last), set_up);
            say(&format!("epoch {} {}", epoch.unwrap_or_default(), survivor.to_text(ranks)))?;
        }
        say(&format!("step {step} {} {digest}", sums[0]))?;
        last = result;
    }
}

#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute() {
    std::thread::sleep(COMPUTING);
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_are_lost_repeated_or_different_are_found() {
        let mut checker = Checker::default();
        for seat in [0, 1] {
            for step in 0..3 {
                checker.step(seat, step, 0b11, step + 7).expect("all is well");
            }
        }
        assert_eq!(checker.steps(), 3);
        for (seat, step, bits, digest, part) in [
            (0, 4, 0b11, 11, "step 3 is its next one"),
            (1, 2, 0b11, 9, "step 3 is its next one"),
            (2, 0, 0b11, 7, "without its own contribution"),
            (3, 0, 0b1000, 7, "elsewhere"),
            (4, 0, 0b10011, 7, "elsewhere"),
        ] {
            let error = checker.step(seat, step, bits, digest).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn limits_leave_somebody_to_strike() {
        assert_eq!("2:6".parse(), Ok(Limits { fewest: 2, most: 6 }));
        for wrong in ["6:2", "3:3", "0:2", "2", "1:65"] {
            assert!(wrong.parse::<Limits>().is_err(), "{wrong}");
        }
    }
}
