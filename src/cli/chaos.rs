//! `pleach chaos`: a session whose members are killed and stopped, join and leave for a while, and
//! everything that they say compared; or a program of the user's instead ([`observer`]).
//!
//! This process starts MAX ranks as members of a session, which add up what each contributes, step
//! by step. One fault after the other befalls them ([`Strikes`]). Where no fault is possible any
//! more, because MIN are left and none joins, a new job begins, until the time is up. Each member
//! says of each step that it was told is committed who has contributed, and the digest of all steps
//! so far, which is a state: who joins reads it from the others.
//! **Invariant:** of every member, the struck ones included, each step is checked by this process:
//! it is the one behind the step before, and has the contributors and the digest that it has on
//! every other member ([`Checker`]).

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::Arc;
use std::time::Duration;

use pleach::partial::duration;
use pleach::session::{Elastic, Session, SessionError, Verdict};
use pleach::transport::rendezvous::{ExplicitWorld, FabricChoice, Rendezvous, World};
use pleach::transport::{Nanos, clock};
use pleach::{Options, ReduceOp};
use pleach_vocabulary::digest::chain;
use serde_json::{Map, Value, json};

use super::CommandError;
use super::bounds::Bounds;
use super::faults::Fault;
use super::launch::members::{Members, Told};
use super::launch::not_found;
use super::launch::store::Between;
use super::output::{print, print_json, put, rounded};
use super::recovered::{JOINING, Recovered, STAGES, Survivor};
use super::strikes::{CUT_RANKS_MIN, Look, Strike, Strikes};
use observer::Observer;

mod observer;

/// Elements that a step sums, besides the contributors.
const ELEMENTS: usize = 10_000;

/// How long a rank computes between two sums: its steps are lines to be read.
const COMPUTING: Duration = Duration::from_millis(1);

/// The faults where none are named.
const USUAL_FAULTS: &str = "kill,stop,join,leave";

/// Most ranks: each is a bit.
const RANKS_MAX: u32 = 64;

/// How long the ranks of a job may take to begin, and to go on after a fault.
const PATIENCE: Duration = Duration::from_secs(60);

/// Steps that are kept to be compared, before those are forgotten that all members have made.
const STEPS_KEPT: usize = 1 << 16;

/// How long this process hears nothing before it looks whether a fault is due.
const LISTENING: Duration = Duration::from_millis(20);

/// How long the processes of a program may take to begin, and to go on after a fault: a step of
/// theirs may be long.
const PATIENCE_WITH_PROGRAM: Duration = Duration::from_secs(300);

/// How long the processes of a program may take to end when they are told to.
const ENDING: Duration = Duration::from_secs(20);

/// Arguments of `pleach chaos`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pleach chaos --for 20s\n  pleach chaos --ranks 2:4 --fabric tcp --faults kill --every 1s --seed 7 --json\n  \
    pleach chaos --ranks 2:4 --for 10m -- ./my-training-program\n\n\
    Of a COMMAND is known what its members say to anybody who asks: who they are, their epochs, and the number of their\n\
    step. Whether its results are right it has to find out by itself: where a process that was not struck ends with\n\
    another status than 0, chaos fails. It is over when the program is, and when the time is up: then processes get SIGTERM.\n\
    What they print comes on standard error."
)]
pub(crate) struct Arguments {
    /// MAX ranks are started, and there are MIN to MAX at any time; where none joins and MIN are
    /// left, a new job begins
    #[arg(long, value_name = "MIN:MAX", default_value = "2:6", value_parser = bounds)]
    ranks: Bounds,
    /// The fabric: shm, tcp, shm+tcp, verbs, shm+verbs or auto; a COMMAND chooses its own
    #[arg(long, value_name = "FABRIC", default_value_t, conflicts_with = "command")]
    fabric: FabricChoice,
    /// The faults, in turn, where the limits allow them: kill stop join leave; slow (a rank stands
    /// still for three quarters of 2 s, in short turns); cut (the connections of two are shut down,
    /// and one of them has to go); rendezvous (whoever holds it is killed) and store (one is killed
    /// while the etcd or TCPStore of --rendezvous is out of reach)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = USUAL_FAULTS)]
    faults: Vec<Fault>,
    /// Where the processes meet: tcp://HOST:PORT of this host, file:///DIR,
    /// etcd[s]://HOST:PORT/PREFIX or c10d://HOST:PORT [default: a free port of this host]
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Option<Rendezvous>,
    /// The time between two faults, at least: the others have to have gone on
    #[arg(long, value_name = "D", value_parser = time, default_value = "2s")]
    every: Duration,
    /// How long ranks are struck
    #[arg(long = "for", value_name = "D", value_parser = time, default_value = "60s")]
    lasts: Duration,
    /// The seed that chooses the ranks that a fault befalls
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Print results as JSON, one object a line
    #[arg(long)]
    json: bool,
    /// This process is one of the ranks
    #[arg(long, hide = true)]
    member: bool,
    /// A program in a session, started as by 'pleach run --elastic', with its arguments [default:
    /// ranks that sum what each contributes]
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

fn time(text: &str) -> Result<Duration, &'static str> {
    let of = |unit: char, seconds: u64| {
        let count: u32 = text.strip_suffix(unit)?.parse().ok()?;
        Some(Duration::from_secs(u64::from(count) * seconds))
    };
    duration(text).or_else(|| of('m', 60)).or_else(|| of('h', 3600)).ok_or("give a time, as 2s, 10m or 24h")
}

fn bounds(text: &str) -> Result<Bounds, String> {
    let bounds: Option<Bounds> = text.parse().ok();
    bounds
        .filter(|bounds| bounds.fewest() < bounds.most() && bounds.most() <= RANKS_MAX)
        .ok_or_else(|| format!("give MIN:MAX, as 2:6, with MIN from 1 and MAX above it, at most {RANKS_MAX}"))
}

impl Arguments {
    /// The faults that were asked for, if they are possible.
    fn faults(&self) -> Result<Vec<Fault>, CommandError> {
        if only_joins(&self.faults) && self.ranks.most() <= 2 {
            return Err(CommandError::typed(format!(
                "no fault is possible: --faults join, and two ranks begin the job, which --ranks {} allows no third; \
                 give --ranks 1:3 or other faults",
                self.ranks
            )));
        }
        if self.faults.contains(&Fault::Cut) && self.ranks.most() < CUT_RANKS_MIN {
            return Err(CommandError::typed(format!(
                "nobody would agree which of two goes: --faults cut, and --ranks {}; give a MAX from {CUT_RANKS_MIN} on",
                self.ranks
            )));
        }
        if self.faults.contains(&Fault::Rendezvous)
            && let Some(
                store @ (Rendezvous::Etcd { .. } | Rendezvous::C10d { .. } | Rendezvous::TcpList { .. }),
            ) = &self.rendezvous
        {
            return Err(CommandError::typed(format!(
                "no holder to kill: --faults rendezvous, and no process of the job is known to hold {store}; give tcp://HOST:PORT \
                 or file:///DIR, or of a store --faults store"
            )));
        }
        Ok(self.faults.clone())
    }

    /// What stands before a store that is taken away.
    fn between(&self) -> Result<Option<Arc<Between>>, CommandError> {
        if !self.faults.contains(&Fault::Store) {
            return Ok(None);
        }
        let on_port = Rendezvous::Tcp { host: String::new(), port: 0 };
        Between::start(self.rendezvous.as_ref().unwrap_or(&on_port)).map(|between| Some(Arc::new(between)))
    }
}

/// The address of one of several jobs that meet at the same place one after the other.
fn of_job(rendezvous: &Rendezvous, job: u64) -> Rendezvous {
    match rendezvous.clone() {
        Rendezvous::Etcd { is_private, places, prefix } => {
            Rendezvous::Etcd { is_private, places, prefix: format!("{prefix}/{job}") }
        }
        rendezvous => rendezvous,
    }
}

fn only_joins(faults: &[Fault]) -> bool {
    faults.iter().all(|fault| *fault == Fault::Join)
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
    let faults = arguments.faults()?;
    let between = arguments.between()?;
    if let Some(reason) = arguments.command.first().and_then(not_found) {
        return Err(CommandError::typed(reason));
    }
    let until = clock::now() + arguments.lasts;
    let mut totals = Totals { fewest: arguments.ranks.most(), ..Totals::default() };
    if !arguments.json {
        print("faults", &head())?;
    }
    let mut jobs = 0;
    let is_program = !arguments.command.is_empty();
    // A server of PyTorch's has the table of one job.
    let is_one = is_program || matches!(arguments.rendezvous, Some(Rendezvous::C10d { .. }));
    while jobs == 0 || (clock::now() < until && !is_one) {
        let job = Job::start(arguments, &faults, between.as_ref(), jobs)?;
        if is_program { job.run_program(until, &mut totals) } else { job.run(until, &mut totals) }?;
        jobs += 1;
    }
    if is_program { totals.print_of_program(arguments.json) } else { totals.print(arguments.json, jobs) }
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
    /// So many ranks work.
    fn saw(&mut self, ranks: u32) {
        (self.fewest, self.most) = (self.fewest.min(ranks), self.most.max(ranks));
    }

    /// Whatever differed was an error before.
    fn print(&self, as_json: bool, jobs: u64) -> Result<(), CommandError> {
        let Self { faults, steps, retried, epochs, fewest, most } = self;
        let text = format!(
            "{faults} faults in {jobs} jobs of {fewest} to {most} ranks: {steps} steps, each counted once on all members; \
             {retried} were repeated, in {epochs} epochs\n"
        );
        self.print_as(as_json, &text, (Some(*retried), Some(true)))
    }

    /// Of a program nobody here knows more.
    fn print_of_program(&self, as_json: bool) -> Result<(), CommandError> {
        let Self { faults, steps, epochs, fewest, most, .. } = self;
        let text = format!(
            "{faults} faults in a job of {fewest} to {most} processes: its members came to step {steps}, in {epochs} epochs; \
             none that was not struck has failed\n"
        );
        self.print_as(as_json, &text, (None, None))
    }

    /// As this text, or as JSON. Whether steps were repeated, and equal, may be unknown.
    fn print_as(
        &self,
        as_json: bool,
        text: &str,
        (retried, equal): (Option<u64>, Option<bool>),
    ) -> Result<(), CommandError> {
        if !as_json {
            return print("results", text);
        }
        let Self { steps, epochs, fewest, most, .. } = self;
        let row = json!({
            "steps": steps, "retried": retried, "epochs": epochs, "members_min": fewest, "members_max": most,
            "equal": equal,
        });
        print_json("results", &row)
    }
}

/// What members said of their steps; see the module.
#[derive(Debug, Default)]
struct Checker {
    /// By step: who contributed, and the digest. Steps that all members have made are forgotten.
    steps: BTreeMap<u64, (u64, u64)>,
    /// By number of a member that has not ended: the step that it commits next.
    next: BTreeMap<u32, u64>,
    /// One past the last step that any member has committed.
    end: u64,
}

impl Checker {
    /// A member begins the job.
    fn begins(&mut self, number: u32) {
        self.next.insert(number, 0);
    }

    /// A member has ended.
    fn ended(&mut self, number: u32) {
        self.next.remove(&number);
    }

    /// A member was told that a step is committed. The first one of a member that has joined is any
    /// step.
    fn step(&mut self, (number, seat): (u32, u32), step: u64, bits: u64, digest: u64) -> Result<(), String> {
        let next = self.next.entry(number).or_insert(step);
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
        self.end = self.end.max(step + 1);
        if self.steps.len() > STEPS_KEPT {
            let oldest = self.next.values().copied().min().unwrap_or(self.end);
            self.steps = self.steps.split_off(&oldest);
        }
        Ok(())
    }

    fn steps(&self) -> u64 {
        self.end
    }
}

/// One job: ranks that faults befall until none is possible any more.
struct Job {
    as_json: bool,
    /// The number of ranks that begin it.
    founders: u32,
    members: Members,
    strikes: Strikes,
    checker: Checker,
    /// What members told of the newest change, by number.
    survivors: BTreeMap<u32, Survivor>,
    epoch: u64,
    /// Steps that were repeated.
    retried: BTreeSet<u64>,
    /// When the newest fault befell, or the ranks were started.
    heard: Nanos,
    /// When the newest process began to join.
    joining: Option<Nanos>,
    /// What members of a program say of themselves.
    observer: Option<Observer>,
}

impl Job {
    fn start(
        arguments: &Arguments,
        faults: &[Fault],
        between: Option<&Arc<Between>>,
        number: u64,
    ) -> Result<Self, CommandError> {
        let seed = arguments.seed.wrapping_add(number);
        let rendezvous = between.map(|between| between.rendezvous()).or(arguments.rendezvous.as_ref());
        let rendezvous = rendezvous.map(|rendezvous| of_job(rendezvous, number));
        let bounds = arguments.ranks;
        // There is a job to join, and a seat that is free.
        let ranks = if only_joins(faults) { bounds.fewest().max(2) } else { bounds.most() };
        let members = if arguments.command.is_empty() {
            let mut command: Vec<OsString> = std::env::args_os().skip(1).collect();
            command.push("--member".into());
            Members::start(ranks, &command, rendezvous)?
        } else {
            Members::start_program(ranks, &arguments.command, rendezvous)?
        };
        let members = members.through(between.cloned());
        let is_program = !arguments.command.is_empty();
        let observer = is_program.then(|| Observer::start(members.asker()?, ranks)).transpose()?;
        let mut checker = Checker::default();
        (0..ranks).for_each(|number| checker.begins(number));
        Ok(Self {
            as_json: arguments.json,
            founders: ranks,
            members,
            strikes: Strikes::new(ranks, bounds, faults.to_vec(), arguments.every, seed),
            checker,
            survivors: BTreeMap::new(),
            epoch: 0,
            retried: BTreeSet::new(),
            heard: clock::now(),
            joining: None,
            observer,
        })
    }

    fn run(mut self, until: Nanos, totals: &mut Totals) -> Result<(), CommandError> {
        totals.saw(self.founders);
        let mut is_settled = false;
        // A fault that has befallen is watched to its end.
        while !is_settled || (clock::now() < until && self.strikes.can_go_on()) {
            self.listen()?;
            is_settled = self.strike(is_settled, PATIENCE, totals)?;
        }
        totals.steps += self.checker.steps();
        totals.retried += self.retried.len() as u64;
        totals.epochs += 1 + self.epoch;
        Ok(())
    }

    /// Until the program has ended, by itself or because it was told to when the time was up.
    fn run_program(mut self, until: Nanos, totals: &mut Totals) -> Result<(), CommandError> {
        totals.saw(self.founders);
        // Since when processes end, by themselves or because they were told to, and how long they
        // may.
        let mut ending: Option<(Nanos, Duration)> = None;
        while self.strikes.has_any() {
            self.listen()?;
            self.observe();
            if let Some((since, limit)) = ending {
                if clock::now().since(since) > limit {
                    let seconds = limit.as_secs();
                    return Err(CommandError::failed(format!(
                        "not ended: a process still runs {seconds} s after others had ended, or after SIGTERM; let the program \
                         end, or leave at this signal"
                    )));
                }
            } else if self.strikes.has_done() {
                // It is over: who comes would find nobody.
                self.strikes.give_up_joining(&self.members);
                self.strikes.wake_the_stopped(&self.members);
                ending = Some((clock::now(), PATIENCE_WITH_PROGRAM));
            } else if clock::now() >= until && !self.strikes.awaits_ranks() {
                self.strikes.end();
                self.members.end();
                ending = Some((clock::now(), ENDING));
            } else {
                self.strike(true, PATIENCE_WITH_PROGRAM, totals)?;
            }
        }
        totals.steps += self.observer.as_ref().map_or(0, Observer::step);
        totals.epochs += 1 + self.epoch;
        Ok(())
    }

    /// Brings the next fault where it is time to. Returns whether the newest one was watched to its
    /// end.
    fn strike(
        &mut self,
        is_settled: bool,
        patience: Duration,
        totals: &mut Totals,
    ) -> Result<bool, CommandError> {
        let is_settled = match self.strikes.look(&mut self.members, clock::now())? {
            Look::Nothing => is_settled,
            Look::Struck(_) => {
                self.heard = clock::now();
                self.survivors.clear();
                false
            }
            Look::WentOn(strike) => {
                totals.faults += 1;
                totals.saw(self.strikes.working());
                self.tell(strike)?;
                true
            }
        };
        if self.strikes.awaits_ranks() && clock::now().since(self.heard) > patience {
            let seconds = patience.as_secs();
            return Err(CommandError::failed(format!(
                "ranks stand still: not all went on within {seconds} s; report this with PLEACH_LOG=debug"
            )));
        }
        Ok(is_settled)
    }

    /// Takes in what the members of a program say.
    fn observe(&mut self) {
        if let Some(observer) = &mut self.observer {
            observer.look(&mut self.strikes);
            self.epoch = self.epoch.max(observer.epoch());
        }
    }

    fn listen(&mut self) -> Result<(), CommandError> {
        match self.members.next(clock::now() + LISTENING) {
            Some((number, Told::Line(line))) => self.line(number, &line).map_err(|error| {
                CommandError::failed(format!("wrong steps: {error}; report this with this command line"))
            }),
            Some((number, Told::Ended(status, error))) => {
                self.checker.ended(number);
                let was_told =
                    self.strikes.is_over() && status.signal() == Some(signal_hook::consts::SIGTERM);
                let comes_too_late = self.strikes.has_done() && self.strikes.is_joining(number);
                let struck = self.strikes.ended(number, status.success());
                let is_well = match struck {
                    Some(fault) => fault != Fault::Leave || status.success(),
                    // Members of this command go on until they are ended here.
                    None => was_told || comes_too_late || (self.observer.is_some() && status.success()),
                };
                if is_well {
                    return Ok(());
                }
                let error = error.unwrap_or_else(|| status.to_string());
                let how = if struck.is_some() { "did not leave well" } else { "did not go on" };
                Err(CommandError::failed(format!("process {number} {how}: {error}")))
            }
            None => Ok(()),
        }
    }

    fn line(&mut self, number: u32, line: &str) -> Result<(), String> {
        let broken = || format!("process {number} says '{line}'");
        let (kind, rest) = line.split_once(' ').ok_or_else(broken)?;
        match kind {
            "step" => {
                let numbers: Option<Vec<u64>> = rest.split(' ').map(|word| word.parse().ok()).collect();
                let Some(&[seat, step, bits, digest]) = numbers.as_deref() else { return Err(broken()) };
                let seat = u32::try_from(seat).ok().filter(|seat| *seat < RANKS_MAX).ok_or_else(broken)?;
                self.strikes.committed(number, step);
                self.checker.step((number, seat), step, bits, digest)
            }
            "retry" => {
                self.retried.insert(rest.parse().map_err(|_| broken())?);
                Ok(())
            }
            JOINING => {
                self.joining = Some(Nanos(rest.parse().map_err(|_| broken())?));
                Ok(())
            }
            "epoch" => {
                let (epoch, rest) = rest.split_once(' ').ok_or_else(broken)?;
                let (seat, survivor) = rest.split_once(' ').ok_or_else(broken)?;
                let (ranks, survivor) = Survivor::read(survivor).ok_or_else(broken)?;
                self.epoch = self.epoch.max(epoch.parse().map_err(|_| broken())?);
                self.survivors.insert(number, survivor);
                self.strikes.works(number, seat.parse().map_err(|_| broken())?, ranks);
                Ok(())
            }
            _ => Err(broken()),
        }
    }

    /// Says how a fault went.
    fn tell(&mut self, strike: Strike) -> Result<(), CommandError> {
        let survivors = std::mem::take(&mut self.survivors);
        let joins = strike.fault() == Fault::Join;
        let others = survivors.into_iter().filter(|(number, _)| joins || *number != strike.number());
        // From the moment in which it came to the job: before that it was started.
        let at = self.joining.take().filter(|_| joins).unwrap_or(strike.at());
        let recovered = Recovered::of(at, others.map(|(_, survivor)| survivor));
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
        let seat = seat.map_or_else(|| "-".to_owned(), |seat| seat.to_string());
        put!(out, "{at_s:>8.1} {:>10} {seat:>5} {:>6}{times}", fault.to_string(), self.epoch);
        print("faults", &out)
    }
}

fn head() -> String {
    let stages: String = STAGES.iter().map(|stage| format!("{stage:>10}")).collect();
    format!(
        "# ms since the fault, of the last of the others; since a process came, of the last of all\n#  at (s)      fault  rank  epoch{stages}\n"
    )
}

/// One rank.
fn member(arguments: &Arguments, world: World) -> Result<(), CommandError> {
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    let elastic = Elastic::between(arguments.ranks.fewest(), arguments.ranks.most());
    say(&format!("{JOINING} {}", clock::now().0)).map_err(CommandError::failed)?;
    let mut session = Session::join(&options, &elastic).map_err(CommandError::failed)?;
    let Err(error) = make_steps(&mut session);
    match error.downcast_ref::<SessionError>() {
        Some(SessionError::Left) => session.leave().map_err(CommandError::failed),
        _ => Err(CommandError::failed(error)),
    }
}

/// Makes steps until this process is ended, or told to leave.
fn make_steps(session: &mut Session) -> Result<Infallible, Box<dyn std::error::Error>> {
    session.leave_on(signal_hook::consts::SIGTERM)?;
    let seat = session.seat().0;
    let own = 1_u64 << seat;
    let mut digest = session.state::<u64>("digest", 1)?;
    let mut sums = session.buffer::<u64>(1 + ELEMENTS)?;
    let (mut told, mut last) = (None, None);
    let mut before = session.set_up();
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
        let newest = chain(chain(digest[0], step), sums[0]);
        digest.update(|digest| digest[0] = newest);
        if told != epoch {
            told = epoch;
            let set_up = session.set_up();
            // What it takes to come to the job is not because of a fault.
            let since = if last.is_none() { (0, 0) } else { (set_up.0 - before.0, set_up.1 - before.1) };
            before = set_up;
            let stop = last.map_or(Duration::ZERO, |last| result.since(last));
            let survivor = Survivor::new(&timeline, result, stop, since);
            say(&format!("epoch {} {seat} {}", epoch.unwrap_or_default(), survivor.to_text(ranks)))?;
        }
        say(&format!("step {seat} {step} {} {newest}", sums[0]))?;
        last = Some(result);
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
        (0..5).for_each(|number| checker.begins(number));
        for seat in [0, 1] {
            for step in 0..3 {
                checker.step((seat, seat), step, 0b11, step + 7).expect("all is well");
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
            let error = checker.step((seat, seat), step, bits, digest).expect_err(part);
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn one_that_joins_begins_with_any_step_and_has_the_digest_of_the_others_from_then_on() {
        let mut checker = Checker::default();
        (0..2).for_each(|number| checker.begins(number));
        checker.step((0, 0), 0, 0b11, 7).expect("all is well");
        checker.ended(1);
        // On the seat of one that has ended.
        checker.step((2, 1), 1, 0b11, 8).expect("all is well");
        checker.step((0, 0), 1, 0b11, 8).expect("all is well");
        let error = checker.step((2, 1), 3, 0b11, 10).expect_err("a step is lost");
        assert!(error.contains("step 2 is its next one"), "{error}");
        let error = checker.step((3, 2), 1, 0b111, 8).expect_err("it has not contributed there");
        assert!(error.contains("elsewhere"), "{error}");
    }

    #[test]
    fn a_time_may_be_hours() {
        let times = ["500ms", "2s", "10m", "24h"].map(|text| time(text).map(|time| time.as_millis()));
        assert_eq!(times, [Ok(500), Ok(2_000), Ok(600_000), Ok(86_400_000)]);
        for wrong in ["", "h", "-1m", "1.5h", "2d", "2"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_leave_somebody_to_strike() {
        assert_eq!(bounds("2:6"), "2:6".parse());
        for wrong in ["6:2", "3:3", "0:2", "2", "1:65"] {
            assert!(bounds(wrong).is_err(), "{wrong}");
        }
    }
}
