//! `cargo bench --bench partial`: partial all-reduce while ranks are late, and while none is.
//!
//! 1. *Latency*: the experiment of eager-SGD's figure 8, by `pleach bench partial-all-reduce`: the
//!    mean wait of a rank in a round for which rank `r` is `r + 1` ms late. Beside it the same with
//!    the activation `all`, and MPI_Allreduce (`skewed.c`).
//! 2. *Steps*: the experiment of its figure 9: ranks that compute for 40 ms a step, of which one,
//!    drawn anew in each step, computes longer. The ideal is known: nobody waits for the late rank.
//! 3. *Overhead*: rounds in which nobody is late, beside `all_reduce` in the same processes. Blocks
//!    of one and of the other take turns; in a block one call follows the other. Once with
//!    contributions that stay, and once with contributions that are written before each call, whose
//!    own time is not counted.
//!
//! Medians of rounds in turn count. This reports, and fails only where a result is wrong.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use clap::Parser;
use pleach::partial::{Activation, Divisor};
use pleach::transport::clock;
use pleach::{Group, Operation, Options, Rank, ReduceOp};
use pleach_vocabulary::random::Random;

#[path = "../report/mod.rs"]
mod report;

use report::median;

/// Measure partial all-reduce.
#[derive(Debug, Parser)]
#[command(name = "partial", after_help = "Example:\n  cargo bench --bench partial -- --only overhead")]
struct Arguments {
    /// Only these experiments: latency, steps, overhead; with commas between
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    times: u32,
    /// Ranks of the latency experiment
    #[arg(long, value_name = "N", default_value_t = 32)]
    ranks: u32,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
    /// A rank of an experiment, as another process starts it
    #[arg(long, hide = true, num_args = 2)]
    rank: Option<Vec<String>>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.rank.as_deref() {
        Some([experiment, value]) => rank(experiment, value).map_err(|error| error.to_string()),
        _ => measure(&arguments),
    };
    report::ended(outcome)
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let wanted = |name: &str| arguments.only.is_empty() || arguments.only.iter().any(|only| only == name);
    if wanted("latency") {
        latency(arguments)?;
    }
    if wanted("steps") {
        steps(arguments)?;
    }
    if wanted("overhead") {
        overhead(arguments)?;
    }
    Ok(())
}

/// What a command prints.
fn output(command: &mut Command) -> Result<String, String> {
    let ended = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    if ended.status.success() {
        return Ok(String::from_utf8_lossy(&ended.stdout).into_owned());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&ended.stderr)))
}

fn pleach() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pleach"))
}

// ---- Latency.

/// How late each rank is more than the one before, and how often.
const LATE_US: &str = "1000";
const ROUNDS: &str = "64";
const SIZES: [&str; 3] = ["64", "4096", "1048576"];

fn latency(arguments: &Arguments) -> Result<(), String> {
    let ranks = arguments.ranks.to_string();
    let peer = mpi(&std::env::temp_dir().join(format!("pleach-bench-skewed-{}", std::process::id())));
    println!(
        "# latency: mean us of a rank in a round, {ranks} ranks, rank r is (r + 1) ms late, {ROUNDS} rounds"
    );
    println!(
        "{:>9} {:>10} {:>10} {:>10} {:>10}  all/solo all/majority",
        "bytes", "all", "solo", "majority", "MPI"
    );
    for bytes in SIZES {
        let [mut all, mut solo, mut majority, mut of_peer] = [const { Vec::new() }; 4];
        for _ in 0..arguments.times {
            for (activation, times) in [("solo", &mut solo), ("majority", &mut majority)] {
                let mut command = pleach();
                command.args(["bench", "partial-all-reduce", "--fabric", "shm", "--json", "--ranks", &ranks]);
                command.args([
                    "--skew",
                    "linear:1ms",
                    "--rounds",
                    ROUNDS,
                    "--sizes",
                    bytes,
                    "--activation",
                    activation,
                ]);
                let line = output(&mut command)?;
                times.push(field(&line, "time_us_mean")?);
                all.push(field(&line, "all_time_us_mean")?);
            }
            if let Ok(peer) = &peer {
                let mut command = Command::new("mpirun.openmpi");
                command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks]);
                command.arg(peer).args([LATE_US, ROUNDS, bytes]);
                let line = output(&mut command)?;
                of_peer.push(line.trim().parse().map_err(|error| format!("{line}: {error}"))?);
            }
        }
        let [all, solo, majority] = [all, solo, majority].map(median);
        let of_peer = if of_peer.is_empty() { "-".to_owned() } else { format!("{:.1}", median(of_peer)) };
        let (by_solo, by_majority) = (all / solo, all / majority);
        println!(
            "{bytes:>9} {all:>10.1} {solo:>10.1} {majority:>10.1} {of_peer:>10} {by_solo:>9.2} {by_majority:>12.2}"
        );
    }
    match peer {
        Ok(program) => drop(std::fs::remove_file(program)),
        Err(reason) => println!("# MPI was not measured: {reason}"),
    }
    Ok(())
}

/// The program of Open MPI, compiled.
fn mpi(program: &Path) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/partial/skewed.c");
    let mut command = Command::new("mpicc.openmpi");
    command.args(["-O3", "-Wall", "-Wextra", "-o"]).arg(program).arg(source);
    output(&mut command).map(|_| program.to_owned())
}

fn field(line: &str, name: &str) -> Result<f64, String> {
    let row: serde_json::Value = serde_json::from_str(line).map_err(|error| format!("{line}: {error}"))?;
    row[name].as_f64().ok_or_else(|| format!("{line}: no {name}"))
}

// ---- Steps and overhead: ranks are processes of this program.

/// How long a rank computes in a step that is not late, and how many steps are measured.
const STEP: Duration = Duration::from_millis(40);
const STEPS: u32 = 100;
const STEP_RANKS: u32 = 8;
/// Gradients of a step.
const STEP_LEN: usize = 1 << 14;

fn ranks_of_this(ranks: u32, experiment: &str, value: &str) -> Result<String, String> {
    let own = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut command = pleach();
    command.args(["run", "-n", &ranks.to_string(), "--"]).arg(own).args(["--rank", experiment, value]);
    output(&mut command)
}

/// The numbers behind the mark, as [`say`] prints them.
fn numbers(text: &str) -> Result<Vec<f64>, String> {
    let line =
        text.lines().find_map(|line| line.split_once(MARK)).ok_or_else(|| format!("no result: {text}"))?;
    line.1.split_whitespace().map(|word| word.parse().map_err(|error| format!("{word}: {error}"))).collect()
}

const MARK: &str = "result:";

fn steps(arguments: &Arguments) -> Result<(), String> {
    println!("\n# steps/s of {STEP_RANKS} ranks that compute {STEP:?} a step, one of them late by D");
    println!(
        "{:>6} {:>8} {:>8} {:>9} {:>7}  solo/ideal majority/all",
        "D", "all", "solo", "majority", "ideal"
    );
    for late_ms in [20, 30, 40] {
        let [mut all, mut solo, mut majority] = [const { Vec::new() }; 3];
        for _ in 0..arguments.times {
            for (activation, rates) in [("all", &mut all), ("solo", &mut solo), ("majority", &mut majority)] {
                let text = ranks_of_this(STEP_RANKS, "steps", &format!("{activation},{late_ms}"))?;
                rates.push(numbers(&text)?[0]);
            }
        }
        let [all, solo, majority] = [all, solo, majority].map(median);
        // Each rank is late in one step of as many as there are ranks.
        let late_s = f64::from(late_ms) / 1e3 / f64::from(STEP_RANKS);
        let ideal = 1.0 / (STEP.as_secs_f64() + late_s);
        let (to_ideal, to_all) = (solo / ideal, majority / all);
        println!(
            "{late_ms:>3} ms {all:>8.2} {solo:>8.2} {majority:>9.2} {ideal:>7.2} {to_ideal:>11.3} {to_all:>12.3}"
        );
    }
    Ok(())
}

fn overhead(arguments: &Arguments) -> Result<(), String> {
    println!(
        "\n# overhead: us of a round in which nobody is late (all), beside all_reduce into another buffer"
    );
    println!(
        "{:>5} {:>9} {:>8} {:>10} {:>10} {:>6}",
        "ranks", "bytes", "inputs", "all_reduce", "round", "ratio"
    );
    for ranks in [2, 4] {
        for bytes in [8, 1024, 65_536, 1 << 20, 8 << 20] {
            for inputs in ["kept", "written"] {
                let [mut plain, mut round] = [const { Vec::new() }; 2];
                for _ in 0..arguments.times {
                    let value = format!("{inputs},{bytes}");
                    let found = numbers(&ranks_of_this(ranks, "overhead", &value)?)?;
                    plain.push(found[0]);
                    round.push(found[1]);
                }
                let [plain, round] = [plain, round].map(median);
                let ratio = round / plain;
                println!("{ranks:>5} {bytes:>9} {inputs:>8} {plain:>10.2} {round:>10.2} {ratio:>6.2}");
            }
        }
    }
    Ok(())
}

type Failure = Box<dyn std::error::Error>;

/// What a rank of an experiment does.
fn rank(experiment: &str, value: &str) -> Result<(), Failure> {
    let group = Group::join(&Options::from_env()?)?;
    let found = match experiment {
        "steps" => steps_of_rank(&group, value)?,
        _ => overhead_of_rank(&group, value)?,
    };
    if group.rank() == 0 {
        println!("{MARK} {}", found.map(|number| number.to_string()).join(" "));
    }
    Ok(group.close()?)
}

/// Steps a second.
#[expect(clippy::disallowed_methods, reason = "ranks that compute")]
fn steps_of_rank(group: &Group, value: &str) -> Result<[f64; 2], Failure> {
    let (activation, late_ms) = value.split_once(',').ok_or("ACTIVATION,MS")?;
    let late = Duration::from_millis(late_ms.parse()?);
    let mut rounds = group.partial::<f32>(STEP_LEN, activation.parse::<Activation>()?)?;
    let mut random = Random::new(5);
    group.barrier()?;
    let begin = clock::now();
    for _ in 0..STEPS {
        let is_late = random.below(group.world_size().into()) as Rank == group.rank();
        std::thread::sleep(if is_late { STEP + late } else { STEP });
        rounds.contribution().fill(1.0);
        rounds.contribute()?;
    }
    let mut seconds = [(clock::now() - begin).as_secs_f64()];
    rounds.finish()?;
    group.all_reduce(&mut seconds, ReduceOp::Avg)?;
    Ok([f64::from(STEPS) / seconds[0], 0.0])
}

/// How long a block of calls takes about, and how many blocks of each kind are measured.
const BLOCK: Duration = Duration::from_millis(60);
const BLOCKS: usize = 10;

/// Medians of an all-reduce and of a round, in microseconds. A call gives the time in which its
/// contribution was written, and its own.
fn overhead_of_rank(group: &Group, value: &str) -> Result<[f64; 2], Failure> {
    let (inputs, bytes) = value.split_once(',').ok_or("INPUTS,BYTES")?;
    let (is_written, len) = (inputs == "written", bytes.parse::<usize>()? / size_of::<f32>());
    let mut rounds = group.partial::<f32>(len, Activation::all().divisor(Divisor::None))?;
    let (mut input, mut output) = (group.buffer::<f32>(len)?, group.buffer::<f32>(len)?);
    input.fill(1.0);
    let expected = group.world_size() as f32;
    let mut plain = |is_written: bool| -> Result<(Duration, Duration), Failure> {
        let begin = clock::now();
        if is_written {
            input.fill(1.0);
        }
        let called = clock::now();
        group.run(Operation::all_reduce_into(&input, &mut output, ReduceOp::Sum))?;
        let took = clock::now() - called;
        if output.first() != Some(&expected) {
            return Err("an all-reduce has another sum than that of all inputs".into());
        }
        Ok((called - begin, took))
    };
    let mut round = |is_written: bool| -> Result<(Duration, Duration), Failure> {
        let begin = clock::now();
        if is_written {
            rounds.contribution().fill(1.0);
        }
        let called = clock::now();
        let ended = rounds.contribute()?;
        let took = clock::now() - called;
        if ended.result().first() != Some(&expected) {
            return Err("a round has another sum than that of all contributions".into());
        }
        Ok((called - begin, took))
    };
    type Call<'a> = &'a mut dyn FnMut(bool) -> Result<(Duration, Duration), Failure>;
    let block = |call: Call<'_>, calls: u32| -> Result<f64, Failure> {
        let mut took = Duration::ZERO;
        for _ in 0..calls {
            took += call(is_written)?.1;
        }
        Ok(took.as_secs_f64() * 1e6 / f64::from(calls))
    };
    // What is read was written before; all ranks make as many calls in a block.
    let mut wrote = Duration::ZERO;
    for _ in 0..3 {
        wrote = plain(true)?.0 + round(true)?.0;
    }
    block(&mut plain, 100)?;
    let wrote = if is_written { wrote.as_secs_f64() } else { 0.0 };
    let mut once = [block(&mut plain, 30)? / 1e6 + wrote];
    group.all_reduce(&mut once, ReduceOp::Max)?;
    let calls = (BLOCK.as_secs_f64() / once[0]).clamp(20.0, 1e6) as u32;
    let [mut plain_us, mut round_us] = [const { Vec::new() }; 2];
    for _ in 0..BLOCKS {
        group.barrier()?;
        plain_us.push(block(&mut plain, calls)?);
        group.barrier()?;
        round_us.push(block(&mut round, calls)?);
    }
    if rounds.contribute()?.result() != &output[..] {
        return Err("a round has another sum than all_reduce".into());
    }
    rounds.finish()?;
    Ok([median(plain_us), median(round_us)])
}
