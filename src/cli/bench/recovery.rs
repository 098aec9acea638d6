//! `pleach bench recovery`: how long a session stands still when a rank is killed or stopped, joins
//! or leaves.
//!
//! For each sample this process starts the ranks as members of a session that sum a few elements
//! step by step. When all of them do, the fault befalls one, and each of the others tells when it
//! found the fault, when it knew the next epoch, when its pairs were drained, when its first step
//! began there, and when the next result was there. All times are of one clock, that of the host,
//! and are counted from the moment before the signal was sent. Of each the last rank counts. A rank
//! that joins is started when the others work, and all times are counted from its call of
//! `Session::join`, those of the rank itself too.
//! **Invariant:** a sample counts only if all but the struck rank, or all with the one that joined,
//! go on together, and every sum is right.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::ffi::OsString;
use std::io::Write as _;
use std::time::Duration;

use pleach::partial::duration;
use pleach::session::{Elastic, Session, SessionError, Verdict};
use pleach::transport::{Nanos, clock};
use pleach::{FabricChoice, Options, ReduceOp};
use serde_json::{Map, Value, json};

use super::{Arguments, BenchFabric, Size, percentile};
use crate::cli::CommandError;
use crate::cli::faults::Fault;
use crate::cli::launch::members::{Members, Told};
use crate::cli::launch::{is_one_of_several, rank_count, rank_or_launch};
use crate::cli::output::{print, print_json, put, rounded};
use crate::cli::recovered::{JOINING, Recovered, STAGES, Survivor};

/// Ranks that are started where nothing says how many.
const DEFAULT_RANKS: u32 = 4;

/// Elements that a step sums.
const ELEMENTS: usize = 1024;

/// Steps that a rank makes before it says that it is ready.
const WARMUP: u64 = 20;

/// How long ranks may take to be ready, and then to go on.
const PATIENCE: Duration = Duration::from_secs(60);

/// After what silence a rank is suspected: where ranks are killed, which the kernel tells, and
/// where they are stopped.
const SUSPECTED_AFTER: [Duration; 2] = [Duration::from_secs(2), Duration::from_millis(200)];

/// The shares of samples that are told, in per cent.
const SHARES: [(&str, usize); 3] = [("p50", 50), ("p99", 99), ("max", 100)];

/// What `pleach bench recovery` takes besides.
#[derive(Debug, clap::Args)]
pub(crate) struct RecoveryArguments {
    /// With recovery: the fault of one rank: kill, stop, join or leave
    #[arg(long, value_name = "FAULT", default_value_t = Fault::Kill, value_parser = Fault::simple)]
    fault: Fault,
    /// With recovery: bytes of a state that each rank has registered; one that joins reads it
    #[arg(long, value_name = "BYTES", default_value = "1M")]
    state: Size,
    /// With recovery: how many times ranks are started, and one of them is struck, or one more
    /// joins
    #[arg(long, value_name = "K", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    samples: u32,
    /// With recovery: after what silence a rank is suspected [default: 2s; with --fault stop 200ms]
    #[arg(long, value_name = "D", value_parser = patience)]
    suspect_after: Option<Duration>,
    /// This process is one of the ranks
    #[arg(long, hide = true)]
    member: bool,
}

fn patience(text: &str) -> Result<Duration, String> {
    duration(text)
        .filter(|time| *time >= Duration::from_millis(10))
        .ok_or_else(|| "give 10ms or more".to_owned())
}

impl RecoveryArguments {
    fn suspect_after(&self) -> Duration {
        let [of_kill, of_stop] = SUSPECTED_AFTER;
        self.suspect_after.unwrap_or(if self.fault == Fault::Stop { of_stop } else { of_kill })
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let fabric = match arguments.fabric {
        Some(BenchFabric::Real(fabric)) => FabricChoice::Only(fabric),
        Some(BenchFabric::Simulated) => {
            return Err(CommandError::typed("not simulated: recovery; name another --fabric"));
        }
        Some(BenchFabric::Best) | None => FabricChoice::Auto,
    };
    if arguments.recovery.member {
        return member(arguments, fabric);
    }
    if is_one_of_several(&arguments.world)? {
        return Err(CommandError::typed(
            "one process too many: recovery starts its ranks by itself, to strike one of them; start it once, without a launcher",
        ));
    }
    let ranks = rank_count(&arguments.world, arguments.ranks, DEFAULT_RANKS, 0)?;
    if ranks < 2 {
        return Err(CommandError::typed(format!(
            "nobody would go on: --ranks {ranks}, and one of them is struck; give 2 or more"
        )));
    }
    let (mut samples, mut used) = (Vec::new(), String::new());
    for number in 0..arguments.recovery.samples {
        let (sample, fabric) = sample(arguments.recovery.fault, ranks, number % ranks)?;
        samples.push(sample);
        used = fabric;
    }
    report(arguments, ranks, &used, &samples)
}

/// What one sample came to.
struct Sample {
    recovered: Recovered,
    /// How long the rank that joined took to its first step from when it was a member: it waits for
    /// the others to come to the end of theirs, and reads the states.
    healing: Option<Duration>,
}

/// Starts ranks and strikes one, or starts one more. Returns the fabric that they used too.
fn sample(fault: Fault, ranks: u32, struck: u32) -> Result<(Sample, String), CommandError> {
    let mut command: Vec<OsString> = std::env::args_os().skip(1).collect();
    command.push("--member".into());
    let mut members = Members::start(ranks, &command, None)?;
    let mut fabric = String::new();
    let mut ready = 0;
    let until = clock::now() + PATIENCE;
    while ready < ranks {
        let said = next(&mut members, None, until)?.1;
        if let Some(name) = said.as_deref().and_then(|line| line.strip_prefix("ready ")) {
            name.clone_into(&mut fabric);
            ready += 1;
        }
    }
    let mut at = clock::now();
    let joins = fault == Fault::Join;
    let number = if joins { members.join()? } else { struck };
    members.strike(number, fault);
    let (after, mut healing) = (fault.ranks_after(ranks), None);
    let mut survivors = BTreeMap::new();
    let until = at + PATIENCE;
    let mut has_left = false;
    while survivors.len() < after as usize || (fault == Fault::Leave && !has_left) {
        let (from, said) = next(&mut members, (!joins).then_some((struck, fault)), until)?;
        let Some(line) = said else {
            has_left = true;
            continue;
        };
        let (kind, rest) = line.split_once(' ').unwrap_or((line.as_str(), ""));
        match kind {
            "change" => {
                // A change before the fault was another one.
                if let Some((_, survivor)) = Survivor::read(rest).filter(|(ranks, _)| *ranks == after) {
                    survivors.insert(from, survivor);
                }
            }
            JOINING if joins && from == number => at = Nanos(rest.parse().unwrap_or(at.0)),
            "healed" => healing = rest.parse().ok().map(Duration::from_nanos),
            _ => {}
        }
    }
    Ok((Sample { recovered: Recovered::of(at, survivors.into_values()), healing }, fabric))
}

/// The next line of a member; `None`: the struck one has ended, as its fault has it.
fn next(
    members: &mut Members,
    struck: Option<(u32, Fault)>,
    until: Nanos,
) -> Result<(u32, Option<String>), CommandError> {
    match members.next(until) {
        Some((number, Told::Line(line))) => Ok((number, Some(line))),
        Some((number, Told::Ended(status, error))) => {
            let struck = struck.filter(|(struck, _)| *struck == number).map(|(_, fault)| fault);
            if struck.is_some_and(|fault| fault != Fault::Leave || status.success()) {
                return Ok((number, None));
            }
            let error = error.unwrap_or_else(|| status.to_string());
            let how = if struck.is_some() { "did not leave well" } else { "did not go on" };
            Err(CommandError::failed(format!("rank {number} {how}: {error}")))
        }
        None => {
            let seconds = PATIENCE.as_secs();
            Err(CommandError::failed(format!(
                "ranks stand still: not all went on within {seconds} s; report this with PLEACH_LOG=debug"
            )))
        }
    }
}

/// One rank.
fn member(arguments: &Arguments, fabric: FabricChoice) -> Result<(), CommandError> {
    let Some(world) = rank_or_launch(&arguments.world, None, 1, None)? else { return Ok(()) };
    let most = world.world_size + u32::from(arguments.recovery.fault == Fault::Join);
    let mut elastic = Elastic::between(1, most);
    elastic.suspect_after = arguments.recovery.suspect_after();
    let mut options = Options::from_env_in(world);
    options.fabric = fabric;
    say(&format!("{JOINING} {}", clock::now().0)).map_err(CommandError::failed)?;
    let mut session = Session::join(&options, &elastic).map_err(CommandError::failed)?;
    let bytes = usize::try_from(arguments.recovery.state.0).unwrap_or(usize::MAX);
    let Err(error) = make_steps(&mut session, bytes);
    match error.downcast_ref::<SessionError>() {
        Some(SessionError::Left) => session.leave().map_err(CommandError::failed),
        _ => Err(CommandError::failed(error)),
    }
}

/// Makes steps, and tells of a change.
fn make_steps(session: &mut Session, bytes: usize) -> Result<Infallible, Box<dyn std::error::Error>> {
    session.leave_on(signal_hook::consts::SIGTERM)?;
    let has_joined = session.step() > 0;
    let mut state = session.state::<u8>("state", bytes)?;
    if !has_joined {
        // Its pages are there.
        state.update(|bytes| bytes.fill(1));
    }
    let mut data = session.buffer::<f32>(ELEMENTS)?;
    let (mut steps, mut last, mut told) = (0, None, None);
    let mut before = session.set_up();
    loop {
        let begun = clock::now();
        session.next()?;
        if has_joined && steps == 0 {
            say(&format!("healed {}", clock::now().since(begun).as_nanos()))?;
        }
        let timeline = session.timeline();
        let group = session.group()?;
        let (ranks, fabric) = (group.world_size(), group.info().fabric);
        data.fill(1.0);
        let outcome = group.all_reduce(&mut data, ReduceOp::Sum);
        let result = clock::now();
        if session.commit(outcome)? != Verdict::Committed {
            continue;
        }
        if data.iter().any(|sum| *sum != ranks as f32) {
            return Err("wrong results: a sum of ones is not the number of ranks; report this".into());
        }
        steps += 1;
        if steps == 1 && state.iter().any(|byte| *byte != 1) {
            return Err("wrong state: it is not that of the others; report this".into());
        }
        if steps == WARMUP {
            before = session.set_up();
            say(&format!("ready {}", fabric.map_or_else(|| "none".to_owned(), |fabric| fabric.to_string())))?;
        }
        if timeline.planned_at().is_some() && timeline.planned_at() != told {
            told = timeline.planned_at();
            let (registered, connected) = session.set_up();
            // What it takes to come to the job is not because of a fault.
            let set_up = if steps > WARMUP { (registered - before.0, connected - before.1) } else { (0, 0) };
            let stop = last.map_or(Duration::ZERO, |last| result.since(last));
            let survivor = Survivor::new(&timeline, result, stop, set_up);
            say(&format!("change {}", survivor.to_text(ranks)))?;
        }
        last = Some(result);
    }
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush())
}

fn report(arguments: &Arguments, ranks: u32, fabric: &str, samples: &[Sample]) -> Result<(), CommandError> {
    let sorted = |time: &dyn Fn(&Sample) -> Option<Duration>| {
        let mut times: Vec<Duration> = samples.iter().filter_map(time).collect();
        times.sort_unstable();
        times
    };
    let stages: Vec<Vec<Duration>> =
        (0..STAGES.len()).map(|stage| sorted(&|sample: &Sample| sample.recovered.times()[stage])).collect();
    let stops = sorted(&|sample: &Sample| Some(sample.recovered.stop()));
    let healings = sorted(&|sample: &Sample| sample.healing);
    let registered = samples.iter().map(|sample| sample.recovered.set_up().0).max().unwrap_or_default();
    let connected = samples.iter().map(|sample| sample.recovered.set_up().1).max().unwrap_or_default();
    let millis = |times: &[Duration], percent| {
        (!times.is_empty()).then(|| percentile(times, percent).as_secs_f64() * 1e3)
    };
    let (fault, state) = (arguments.recovery.fault, arguments.recovery.state);
    let state_gb_s =
        (!healings.is_empty()).then(|| state.0 as f64 / percentile(&healings, 50).as_nanos().max(1) as f64);
    if arguments.json {
        let mut row = Map::new();
        row.insert("fabric".to_owned(), fabric.into());
        row.insert("fault".to_owned(), fault.to_string().into());
        row.insert("ranks".to_owned(), ranks.into());
        row.insert("samples".to_owned(), samples.len().into());
        for (stage, times) in STAGES.iter().zip(&stages) {
            for (share, percent) in SHARES {
                let time = millis(times, percent).map(|time| rounded(time, 3));
                row.insert(format!("{stage}_ms_{share}"), json!(time));
            }
        }
        row.insert("stop_ms_p99".to_owned(), json!(millis(&stops, 99).map(|time| rounded(time, 3))));
        row.insert("state_gb_s".to_owned(), json!(state_gb_s.map(|rate| rounded(rate, 3))));
        row.insert("connected".to_owned(), connected.into());
        row.insert("registered".to_owned(), registered.into());
        return print_json("results", &Value::Object(row));
    }
    let suspected = arguments.recovery.suspect_after();
    let whom = if fault == Fault::Join { format!("1 to {ranks}") } else { format!("1 of {ranks}") };
    let mut out = format!(
        "# pleach bench recovery: {fault} of {whom} ranks, fabric {fabric}, state {state}, suspected after {suspected:?}, {} samples\n\
         # ms since the fault, of the last of the others; stopped: between their results before and after it\n\
         # of a join: since the call of Session::join, of the last of all\n",
        samples.len()
    );
    let heads =
        STAGES.iter().copied().chain(["stopped"]).map(|stage| format!("{stage:>10}")).collect::<String>();
    put!(out, "#   {heads}");
    for (share, percent) in SHARES {
        let row = stages.iter().chain([&stops]).map(|times| {
            millis(times, percent).map_or_else(|| format!("{:>10}", "-"), |time| format!("{time:>10.2}"))
        });
        put!(out, " {share}{}", row.collect::<String>());
    }
    if let Some(rate) = state_gb_s {
        put!(out, "the one that joined had the state {rate:.3} GB/s after it was a member (p50)");
    }
    put!(out, "the others registered memory {registered} times and connected {connected} pairs, at most");
    print("results", &out)
}
