//! `cargo bench --bench elastic`: jobs whose processes come and go.
//!
//! 1. *kill*: members are killed, and the others make their next all-reduce. Also that of rank 0,
//!    which holds the rendezvous.
//! 2. *stop*: a member stands still, and the others go on without it.
//! 3. *join*: from the call of `Session::join` to the newcomer's first result, and how long the
//!    members stand still, by [`Heal`](pleach::session::Heal).
//! 4. *heal*: what a newcomer reads in its first step, beside a plain get of as many bytes.
//! 5. *links*: the same over three shaped links, beside one of them. It takes root, `ip` and `tc`.
//! 6. *overhead*: the loop of a session in which nothing happens, beside the same loop on a group
//!    of the same processes, in turn.
//! 7. *packing*: of the survivors of the loss of any one rank.
//!
//! Ranks are processes of this program. Medians count. This reports, and fails only
//! where a result is wrong. The peer is torchft, by its defaults and tuned
//! (`benches/peers/torchft_member.py`), if `benches/install-peers` has installed it. Its calls are
//! Gloo's. Beside kills stands also what Gloo takes alone, by `_reconfigure` of torch
//! (`benches/peers/gloo_member.py`).

use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use pleach::packing::topology::preset;
use pleach::packing::{PackOptions, check, pack};
use pleach::transport::clock;
use pleach::{Collective, Fabric, Rank};

mod get;
mod job;
#[path = "../../tests/links/mod.rs"]
#[allow(dead_code, reason = "tests of shaped links use the rest")]
mod links;
mod member;
#[path = "../report/mod.rs"]
mod report;

use job::{Job, Program};
use links::{Hosts, Wire};
use report::{is_chosen, median, write_between};

/// Measure jobs whose processes come and go.
#[derive(Debug, Parser)]
#[command(name = "elastic", after_help = "Example:\n  cargo bench --bench elastic -- --only kill,join")]
struct Arguments {
    /// Only these, with commas between: kill, stop, join, heal, links, overhead, packing
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    times: u32,
    /// Bytes of the state that is healed, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    state: usize,
    /// Write the table into docs/elastic.md
    #[arg(long, conflicts_with = "only")]
    write_docs: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
    /// A rank, as this program starts it
    #[arg(long, hide = true)]
    member: Option<String>,
}

/// Between these the table stands.
const MARKS: [&str; 2] = ["<!-- measured: begin -->", "<!-- measured: end -->"];
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/elastic.md");

const FABRICS: [Fabric; 2] = [Fabric::Shm, Fabric::Tcp];

/// One line of the table.
struct Row {
    what: String,
    goal: &'static str,
    found: String,
    beside: String,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    report::ended(match &arguments.member {
        Some(told) => member::run(told),
        None => measure(&arguments),
    })
}

/// Measures some rows of the table.
type Experiment = fn(&Arguments) -> Result<Vec<Row>, String>;

fn measure(arguments: &Arguments) -> Result<(), String> {
    let experiments: [(&str, Experiment); 7] = [
        ("kill", kill),
        ("stop", stop),
        ("join", join),
        ("heal", heal),
        ("links", links),
        ("overhead", overhead),
        ("packing", packing),
    ];
    let mut table = format!(
        "{}\n\n| what | goal | found | beside |\n| --- | --- | --- | --- |\n",
        circumstances(arguments)
    );
    print!("{table}");
    for (_, experiment) in experiments.iter().filter(|(name, _)| is_chosen(&arguments.only, name)) {
        for Row { what, goal, found, beside } in experiment(arguments)? {
            let line = format!("| {what} | {goal} | {found} | {beside} |\n");
            print!("{line}");
            table.push_str(&line);
        }
    }
    if arguments.write_docs { write_between(MARKS, &table, PAGE) } else { Ok(()) }
}

/// The host, and how busy it was before.
fn circumstances(arguments: &Arguments) -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0);
    let loaded = if load >= 0.5 { ": loaded by other programs" } else { "" };
    let times = arguments.times;
    format!("{processors} processors, load {load:.1} at the begin{loaded}; p50 of {times}, and the most.")
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The median and the most of some times in milliseconds.
fn both(times: &[f64]) -> String {
    let most = times.iter().copied().fold(0.0, f64::max);
    format!("{:.1} ms, most {most:.1} ms", median(times.to_vec()))
}

// ---- Kill.

const KILLED_OF: u32 = 8;

fn kill(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let cases: [(&str, &[u32]); 3] =
        [("1 of 8", &[5]), ("3 of 8", &[2, 5, 7]), ("the holder of the rendezvous, of 8", &[0])];
    let mut rows = Vec::new();
    for fabric in FABRICS {
        for (name, struck) in cases {
            let settings = format!("steps {fabric} compute=0");
            let one = || recovery(Program::Own, Job::kill, struck, &settings);
            let times = (0..arguments.times).map(|_| one()).collect::<Result<Vec<_>, _>>()?;
            // Members of torchft meet by TCP, at a process that is none of them.
            let is_alike = fabric == Fabric::Tcp && !struck.contains(&0);
            let [mut beside] = by_torchft(is_alike, arguments, |program, tuned| {
                recovery(program, Job::kill, struck, &format!("steps compute=0{tuned}")).map(|time| [time])
            });
            if let Some(program) = Program::gloo().filter(|_| is_alike) {
                let settings = format!("steps left={}", KILLED_OF - struck.len() as u32);
                let one = || recovery(program.clone(), Job::kill, struck, &settings);
                let times: Result<Vec<_>, _> = (0..arguments.times.min(PEER_TIMES)).map(|_| one()).collect();
                let found =
                    times.map_or_else(|error| format!("has no figure, as {error}"), |times| both(&times));
                beside.push_str(&format!("; Gloo's `_reconfigure` {found}"));
            }
            rows.push(Row {
                what: format!("kill -9 of {name} → next all-reduce, {fabric}"),
                goal: "p50 ≤ 30 ms, p99 < 100 ms",
                found: both(&times),
                beside,
            });
        }
    }
    Ok(rows)
}

/// How often a peer is measured at most: its processes take long to start.
const PEER_TIMES: u32 = 3;

/// What torchft takes for the same, in milliseconds, if it is installed and does the same, or why
/// there is no figure.
fn by_torchft<const N: usize>(
    is_alike: bool,
    arguments: &Arguments,
    measured: impl Fn(Program, &str) -> Result<[f64; N], String>,
) -> [String; N] {
    let Some(program) = Program::torchft() else {
        return ["skipped: no torchft; run benches/install-peers"; N].map(str::to_owned);
    };
    if !is_alike {
        return ["–"; N].map(str::to_owned);
    }
    let of = |tuned| -> Result<Vec<[f64; N]>, String> {
        (0..arguments.times.min(PEER_TIMES)).map(|_| measured(program.clone(), tuned)).collect()
    };
    let (usual, tuned) = (of(""), of(" tuned"));
    std::array::from_fn(|place| {
        let [usual, tuned] = [&usual, &tuned].map(|all| match all {
            Ok(all) => both(&all.iter().map(|times| times[place]).collect::<Vec<_>>()),
            Err(error) => format!("no figure, as {error}"),
        });
        format!("torchft {usual}; tuned {tuned}")
    })
}

/// Milliseconds from the first strike to the next result of the last of the others.
fn recovery(
    program: Program,
    strike: fn(&mut Job, u32),
    struck: &[u32],
    settings: &str,
) -> Result<f64, String> {
    let mut job = Job::start_by(program, KILLED_OF, settings)?;
    job.await_all("ready")?;
    let at = clock::now();
    struck.iter().for_each(|seat| strike(&mut job, *seat));
    let rest = KILLED_OF - struck.len() as u32;
    let mut last = Duration::ZERO;
    for seat in (0..KILLED_OF).filter(|seat| !struck.contains(seat)) {
        let (result, _) = job.await_change(seat, rest)?;
        last = last.max(result.since(at));
    }
    Ok(milliseconds(last))
}

// ---- Stop.

/// MiB of the states of the members, of which the stopped one has mapped those of the others.
const STOPPED_STATES: [(Fabric, usize, &str); 3] = [
    (Fabric::Shm, 0, "≤ 300 ms"),
    (Fabric::Shm, 128, "≤ 300 ms + 1 s a GiB mapped: 1175 ms"),
    (Fabric::Tcp, 0, "≤ 300 ms"),
];

fn stop(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for (fabric, state, goal) in STOPPED_STATES {
        let settings = format!("steps {fabric} compute=0 suspect=200 state={state}");
        let one = || recovery(Program::Own, Job::stop, &[5], &settings);
        let times = (0..arguments.times).map(|_| one()).collect::<Result<Vec<_>, _>>()?;
        let [beside] = by_torchft(fabric == Fabric::Tcp, arguments, |program, tuned| {
            recovery(program, Job::stop, &[5], &format!("steps compute=0{tuned}")).map(|time| [time])
        });
        rows.push(Row {
            what: format!(
                "1 of {KILLED_OF} stopped, `suspect_after` 200 ms, {state} MiB a member → next all-reduce, {fabric}"
            ),
            goal,
            found: both(&times),
            beside,
        });
    }
    Ok(rows)
}

// ---- Join.

const JOINED: u32 = 4;

/// MiB of the states of the joins.
const STATES: [usize; 2] = [0, 64];

fn join(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for fabric in FABRICS {
        for state in STATES {
            for heal in ["boundary", "hidden"] {
                let [mut first, mut still] = [const { Vec::new() }; 2];
                for _ in 0..arguments.times {
                    let settings = format!("steps {fabric} compute=2000 state={state} heal={heal}");
                    let [of_newcomer, of_members] = one_join(Program::Own, &settings)?;
                    first.push(of_newcomer);
                    still.push(of_members);
                }
                let is_alike = fabric == Fabric::Tcp && heal == "boundary";
                let [beside, beside_still] = by_torchft(is_alike, arguments, |program, tuned| {
                    one_join(program, &format!("steps compute=2000 state={state}{tuned}"))
                });
                rows.push(Row {
                    what: format!("a joiner, 4 → 5, {state} MiB, {heal}, {fabric}: join → its first result"),
                    goal: "< 200 ms + state",
                    found: both(&first),
                    beside,
                });
                rows.push(Row {
                    what: "the same: the others stand still, beyond their 2 ms steps".to_owned(),
                    goal: if heal == "hidden" { "≤ 20 ms + not hidden" } else { "≤ 20 ms + state" },
                    found: both(&still),
                    beside: beside_still,
                });
            }
        }
    }
    Ok(rows)
}

/// Milliseconds from the newcomer's call to its first result, and the longest time without a result
/// of a member, less a step.
fn one_join(program: Program, settings: &str) -> Result<[f64; 2], String> {
    let mut job = Job::start_by(program, JOINED, settings)?;
    job.await_all("ready")?;
    let newcomer = job.spawn(settings)?;
    let at = job.await_time(newcomer, "joins")?;
    let first = job.await_change(newcomer, JOINED + 1)?.0.since(at);
    let mut still = Duration::ZERO;
    for seat in 0..JOINED {
        still = still.max(job.await_change(seat, JOINED + 1)?.1);
    }
    Ok([milliseconds(first), milliseconds(still.saturating_sub(member::STEP))])
}

// ---- Heal.

fn heal(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    let gigabytes = (arguments.state << 20) as f64 / 1e9;
    for fabric in FABRICS {
        let [mut healed, mut got] = [const { Vec::new() }; 2];
        for _ in 0..arguments.times {
            let mut job = Job::start(2, &format!("steps {fabric} compute=0 state={}", arguments.state))?;
            job.await_all("ready")?;
            let newcomer = job.spawn(&format!("steps {fabric} compute=0 state={}", arguments.state))?;
            healed.push(gigabytes / job.await_duration(newcomer, "healed")?.as_secs_f64());
            drop(job);
            let mut job = Job::start(2, &format!("get {fabric} state={}", arguments.state))?;
            got.push(gigabytes / job.await_duration(1, "got")?.as_secs_f64());
        }
        let (healed, got) = (median(healed), median(got));
        let [beside] = by_torchft(fabric == Fabric::Tcp, arguments, |program, tuned| {
            let settings = format!("steps compute=0 state={}{tuned}", arguments.state);
            let mut job = Job::start_by(program, 2, &settings)?;
            job.await_all("ready")?;
            let newcomer = job.spawn(&settings)?;
            job.await_duration(newcomer, "healed").map(|time| [milliseconds(time)])
        });
        rows.push(Row {
            what: format!("healing {} MiB from two members, {fabric}", arguments.state),
            goal: "≥ 0.8× a plain get",
            found: format!("{healed:.2} GB/s, {:.2}×", healed / got),
            beside: format!("a plain get {got:.2} GB/s; in one member's HTTP {beside}"),
        });
    }
    Ok(rows)
}

// ---- Links.

/// Members that a newcomer reads from, each over a link of its own, and what a link carries.
const SOURCES: usize = 3;
const MEGABITS_PER_S: u32 = 400;
/// MiB of the state that is read over links.
const STATE_OVER_LINKS: usize = 256;

fn links(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let mut row = Row {
        what: format!(
            "healing {STATE_OVER_LINKS} MiB from {SOURCES} members over links of {MEGABITS_PER_S} Mbit/s, tcp"
        ),
        goal: "≥ 2.7× one link",
        found: String::new(),
        beside: "–".to_owned(),
    };
    let wires: Vec<Wire> = (0..SOURCES)
        .map(|source| Wire { ends: [source, SOURCES], megabits_per_s: Some(MEGABITS_PER_S) })
        .collect();
    let hosts = match Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), SOURCES + 1, &wires) {
        Ok(hosts) => Rc::new(hosts),
        Err(reason) => {
            row.found = format!("not measured, as there are no shaped networks here: {reason}");
            return Ok(vec![row]);
        }
    };
    let settings = format!("steps tcp compute=0 state={STATE_OVER_LINKS}");
    let healed = |members: usize| -> Result<f64, String> {
        let mut job = Job::start_by(Program::Apart(Rc::clone(&hosts)), members as u32, &settings)?;
        job.await_all("ready")?;
        let newcomer = job.spawn(&settings)?;
        Ok((STATE_OVER_LINKS << 20) as f64 / 1e6 / job.await_duration(newcomer, "healed")?.as_secs_f64())
    };
    let [mut by_one, mut by_all] = [const { Vec::new() }; 2];
    for _ in 0..arguments.times {
        by_one.push(healed(1)?);
        by_all.push(healed(SOURCES)?);
    }
    let (by_one, by_all) = (median(by_one), median(by_all));
    row.found = format!("{by_all:.0} MB/s, {:.2}×", by_all / by_one);
    row.beside = format!("from one member over one link {by_one:.0} MB/s");
    Ok(vec![row])
}

// ---- Overhead.

fn overhead(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for (ranks, fabric) in [2, 4].into_iter().flat_map(|ranks| FABRICS.map(|fabric| (ranks, fabric))) {
        let [mut of_group, mut of_session] = [const { Vec::new() }; 2];
        for _ in 0..arguments.times {
            let mut job = Job::start(ranks, &format!("overhead {fabric}"))?;
            of_group.push(job.await_duration(0, "group")?.as_secs_f64() * 1e6);
            of_session.push(job.await_duration(0, "session")?.as_secs_f64() * 1e6);
        }
        let (of_group, of_session) = (median(of_group), median(of_session));
        let [beside] = by_torchft(fabric == Fabric::Tcp, arguments, |program, tuned| {
            let mut job = Job::start_by(program, ranks, &format!("overhead{tuned}"))?;
            let group = job.await_duration(0, "group")?;
            Ok([milliseconds(job.await_duration(0, "session")?) - milliseconds(group)])
        });
        rows.push(Row {
            what: format!("a session without faults, {ranks} ranks, 2 ms steps, {fabric}"),
            goal: "< 1 % over a group",
            found: format!("{of_session:.0} µs a step, {:+.2} %", (of_session / of_group - 1.0) * 100.0),
            beside: format!("a group {of_group:.0} µs; beyond Gloo's {beside}"),
        });
    }
    Ok(rows)
}

// ---- Packing.

fn packing(arguments: &Arguments) -> Result<Vec<Row>, String> {
    let mut rows = Vec::new();
    for name in ["dgx-1v", "dgx-a100:2"] {
        let whole = preset(name).map_err(|error| format!("{name}: {error}"))?;
        let ranks: Rank = whole.ranks();
        let (mut slowest, mut times, mut are_exact) = (0.0_f64, Vec::new(), true);
        for lost in 0..ranks {
            let rest: Vec<Rank> = (0..ranks).filter(|rank| *rank != lost).collect();
            let topology = whole.only(&rest).map_err(|error| format!("{name} without {lost}: {error}"))?;
            for collective in
                [Collective::Broadcast { root: 0 }, Collective::AllGather, Collective::AllReduce]
            {
                let mut of_this = Vec::new();
                for _ in 0..arguments.times {
                    let began = clock::now();
                    let packed = pack(&topology, collective, &PackOptions::default());
                    of_this.push(milliseconds(clock::now().since(began)));
                    let packed = packed.map_err(|error| format!("{name} without {lost}: {error}"))?;
                    check(&topology, &packed).map_err(|error| format!("{name} without {lost}: {error}"))?;
                    are_exact &= packed.is_optimal();
                }
                let time = median(of_this);
                slowest = slowest.max(time);
                times.push(time);
            }
        }
        let exact = if are_exact { "all exact" } else { "not all exact" };
        rows.push(Row {
            what: format!("packing for the survivors of any one loss, {name}, each of three collectives"),
            goal: "exact in < 50 ms",
            found: format!("{:.1} ms, slowest {slowest:.1} ms, {exact}", median(times)),
            beside: "–".to_owned(),
        });
    }
    Ok(rows)
}
