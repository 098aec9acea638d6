//! `pleach bench recovery`: how long a session stands still when a rank is killed or stopped.
//!
//! For each sample this process starts the ranks as members of a session that sum a few elements
//! step by step. When all of them do, the fault befalls one, and each of the others tells when it
//! found the fault, when it knew the next epoch, when its pairs were drained, when its first step
//! began there, and when the next result was there. All times are of one clock, that of the host,
//! and are counted from the moment before the signal was sent. Of each the last rank counts.
//! **Invariant:** a sample counts only if all but the struck rank go on together, and every sum is
//! right.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::time::Duration;

use pleach::partial::duration;
use pleach::session::{Elastic, Session, Verdict};
use pleach::transport::{Nanos, clock};
use pleach::{FabricChoice, Options, ReduceOp};
use serde_json::{Map, Value, json};

use super::{Arguments, BenchFabric, Size, percentile};
use crate::cli::CommandError;
use crate::cli::faults::Fault;
use crate::cli::launch::members::{Members, Told};
use crate::cli::launch::{is_one_of_several, rank_count, rank_or_launch};
use crate::cli::output::{print, print_json, put, rounded};
use crate::cli::recovered::{Recovered, STAGES, Survivor};

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
    /// With recovery: the fault of one rank: kill or stop
    #[arg(long, value_name = "FAULT", default_value_t = Fault::Kill)]
    fault: Fault,
    /// With recovery: bytes of a state that each rank has registered
    #[arg(long, value_name = "BYTES", default_value = "1M")]
    state: Size,
    /// With recovery: how many times ranks are started, and one of them is struck
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

/// Starts ranks and strikes one. Returns the fabric that they used too.
fn sample(fault: Fault, ranks: u32, struck: u32) -> Result<(Recovered, String), CommandError> {
    let mut command: Vec<OsString> = std::env::args_os().skip(1).collect();
    command.push("--member".into());
    let mut members = Members::start(ranks, &command)?;
    let mut fabric = String::new();
    let mut ready = 0;
    let until = clock::now() + PATIENCE;
    while ready < ranks {
        if let Some(name) = line(&mut members, None, until)?.1.strip_prefix("ready ") {
            name.clone_into(&mut fabric);
            ready += 1;
        }
    }
    let at = clock::now();
    members.strike(struck, fault);
    let mut survivors = BTreeMap::new();
    let until = at + PATIENCE;
    while survivors.len() + 1 < ranks as usize {
        let (seat, line) = line(&mut members, Some(struck), until)?;
        let change = line.strip_prefix("change ").and_then(Survivor::read);
        // A change before the fault was another one.
        if let Some((_, survivor)) = change.filter(|(left, _)| left + 1 == ranks) {
            survivors.insert(seat, survivor);
        }
    }
    Ok((Recovered::of(at, survivors.into_values()), fabric))
}

/// The next line of a member.
fn line(members: &mut Members, struck: Option<u32>, until: Nanos) -> Result<(u32, String), CommandError> {
    loop {
        match members.next(until) {
            Some((seat, Told::Line(line))) => return Ok((seat, line)),
            Some((seat, Told::Ended(..))) if struck == Some(seat) => {}
            Some((seat, Told::Ended(status, error))) => {
                let error = error.unwrap_or_else(|| status.to_string());
                return Err(CommandError::failed(format!("rank {seat} did not go on: {error}")));
            }
            None => {
                let seconds = PATIENCE.as_secs();
                return Err(CommandError::failed(format!(
                    "ranks stand still: not all went on within {seconds} s; report this with PLEACH_LOG=debug"
                )));
            }
        }
    }
}

/// Makes steps, and tells of a change.
fn member(arguments: &Arguments, fabric: FabricChoice) -> Result<(), CommandError> {
    let Some(world) = rank_or_launch(&arguments.world, None, 1, None)? else { return Ok(()) };
    let mut elastic = Elastic::between(1, world.world_size);
    elastic.suspect_after = arguments.recovery.suspect_after();
    let mut options = Options::from_env_in(world);
    options.fabric = fabric;
    let mut session = Session::join(&options, &elastic).map_err(CommandError::failed)?;
    let bytes = usize::try_from(arguments.recovery.state.0).unwrap_or(usize::MAX);
    let mut state = session.state::<u8>("state", bytes).map_err(CommandError::failed)?;
    // Its pages are there.
    state.update(|bytes| bytes.fill(1));
    let mut data = session.buffer::<f32>(ELEMENTS).map_err(CommandError::failed)?;
    let (mut steps, mut last, mut told) = (0, clock::now(), None);
    let mut before = session.set_up();
    loop {
        session.next().map_err(CommandError::failed)?;
        let timeline = session.timeline();
        let group = session.group().map_err(CommandError::failed)?;
        let (ranks, fabric) = (group.world_size(), group.info().fabric);
        data.fill(1.0);
        let outcome = group.all_reduce(&mut data, ReduceOp::Sum);
        let result = clock::now();
        if session.commit(outcome).map_err(CommandError::failed)? != Verdict::Committed {
            continue;
        }
        if data.iter().any(|sum| *sum != ranks as f32) {
            return Err(CommandError::failed(
                "wrong results: a sum of ones is not the number of ranks; report this",
            ));
        }
        steps += 1;
        if steps == WARMUP {
            before = session.set_up();
            say(&format!("ready {}", fabric.map_or_else(|| "none".to_owned(), |fabric| fabric.to_string())))?;
        }
        if timeline.planned_at().is_some() && timeline.planned_at() != told {
            told = timeline.planned_at();
            let (registered, connected) = session.set_up();
            let set_up = (registered - before.0, connected - before.1);
            let survivor = Survivor::new(&timeline, result, result.since(last), set_up);
            say(&format!("change {}", survivor.to_text(ranks)))?;
        }
        last = result;
    }
}

fn say(line: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(CommandError::failed)
}

fn report(
    arguments: &Arguments,
    ranks: u32,
    fabric: &str,
    samples: &[Recovered],
) -> Result<(), CommandError> {
    let sorted = |time: &dyn Fn(&Recovered) -> Option<Duration>| {
        let mut times: Vec<Duration> = samples.iter().filter_map(time).collect();
        times.sort_unstable();
        times
    };
    let stages: Vec<Vec<Duration>> =
        (0..STAGES.len()).map(|stage| sorted(&|sample: &Recovered| sample.times()[stage])).collect();
    let stops = sorted(&|sample: &Recovered| Some(sample.stop()));
    let registered = samples.iter().map(|sample| sample.set_up().0).max().unwrap_or_default();
    let connected = samples.iter().map(|sample| sample.set_up().1).max().unwrap_or_default();
    let millis = |times: &[Duration], percent| {
        (!times.is_empty()).then(|| percentile(times, percent).as_secs_f64() * 1e3)
    };
    let (fault, state) = (arguments.recovery.fault, arguments.recovery.state);
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
        // Nobody reads a state yet.
        row.insert("state_gb_s".to_owned(), Value::Null);
        row.insert("connected".to_owned(), connected.into());
        row.insert("registered".to_owned(), registered.into());
        return print_json("results", &Value::Object(row));
    }
    let suspected = arguments.recovery.suspect_after();
    let mut out = format!(
        "# pleach bench recovery: {fault} of 1 of {ranks} ranks, fabric {fabric}, state {state}, suspected after {suspected:?}, {} samples\n\
         # ms since the fault, of the last of the others; stopped: between their results before and after it\n",
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
    put!(out, "the others registered memory {registered} times and connected {connected} pairs, at most");
    print("results", &out)
}
