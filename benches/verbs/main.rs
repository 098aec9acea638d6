//! `cargo bench --bench verbs`: one connection of pleach beside perftest and a ping-pong by hand,
//! on the same two RDMA devices.
//!
//! Five things are measured: writes and reads one after the other, as `ib_write_bw` and
//! `ib_read_bw` do; signals of 8 bytes there and back, beside `benches/peers/verbs.c`, and
//! `ib_write_lat` for who wants to know what polling payload would save; reads of a window, beside
//! three plain reads; and all-reduces of two ranks, beside Gloo's ibverbs transport and Open MPI
//! over UCX where these are installed.
//!
//! **Invariant:** all take turns, round by round, and of each the best round counts: on devices
//! made of software, times vary more between rounds than between contenders. This reports and never
//! fails because something is slow.

use std::process::ExitCode;

use clap::Parser;

mod contender;
mod end;
mod page;
#[path = "../report/mod.rs"]
mod report;
mod window;

use contender::{Contender, Measured, Programs, Task};
use page::Best;

/// Rounds of a whole run and of a quick one.
const ROUNDS: (u32, u32) = (7, 2);

/// Bytes that one measurement of bandwidth moves.
const MOVED_BYTES: u64 = 16 << 20;

/// Turns of one measurement of latency.
const TURNS: u64 = 1_000;

/// Measure a connection beside perftest.
#[derive(Debug, Parser)]
#[command(
    name = "verbs",
    after_help = "Example:\n  cargo bench --bench verbs -- --devices rxe1,rxe2 --gid-index 1"
)]
struct Arguments {
    /// Two RDMA devices, the same one twice where there is only one
    #[arg(long, value_name = "DEVICE,DEVICE", value_delimiter = ',', num_args = 1)]
    devices: Vec<String>,
    /// Number of the GID that the others use; pleach chooses itself
    #[arg(long, value_name = "INDEX", default_value_t = 1)]
    gid_index: u32,
    /// 2 rounds
    #[arg(long)]
    quick: bool,
    /// How often everything is measured [default: 7, quick 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Measure only what has this in its name: "signals", "writes of 64 KiB"
    #[arg(long, value_name = "TEXT", conflicts_with = "write_docs")]
    only: Option<String>,
    /// Only compile the programs of others, to start them on another machine that sees these files
    #[arg(long)]
    build: bool,
    /// Write docs/verbs.md
    #[arg(long)]
    write_docs: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    if let Some(task) = end::asked() {
        return end::run(&task);
    }
    report::ended(measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let programs = Programs::build(&report::target()?.join("verbs"))?;
    if arguments.build {
        return Ok(());
    }
    let devices: [String; 2] = match arguments.devices.as_slice() {
        [one, other] => [one.clone(), other.clone()],
        [] => return Err("no devices: --devices says which two; 'pleach devices' lists them".to_owned()),
        _ => return Err("two devices: --devices takes two with a comma between".to_owned()),
    };
    let rounds = arguments.rounds.unwrap_or(if arguments.quick { ROUNDS.1 } else { ROUNDS.0 });
    let mut best = Best::default();
    for round in 1..=rounds {
        let is_asked =
            |task: &Task| arguments.only.as_ref().is_none_or(|text| task.to_string().contains(text));
        for task in tasks().into_iter().filter(is_asked) {
            for contender in Contender::of(&task) {
                let measured = contender.measure(&programs, &task, &devices, arguments.gid_index);
                match &measured {
                    Ok(Measured { value, .. }) => {
                        println!("round {round}: {task}: {contender}: {value:.3} {}", task.unit());
                    }
                    Err(reason) => println!("skipped {task}: {contender}: {reason}"),
                }
                best.add(&task, contender, measured);
            }
        }
    }
    print!("{}", best.table());
    if arguments.write_docs {
        page::write(&best, rounds)?;
    }
    Ok(())
}

/// What is measured.
fn tasks() -> Vec<Task> {
    let sizes = [64 << 10, 256 << 10, 1 << 20];
    let mut tasks: Vec<Task> = Vec::new();
    for bytes in sizes {
        let count = MOVED_BYTES / bytes;
        tasks.extend([Task::Write { bytes, count }, Task::Read { bytes, count }]);
    }
    tasks.push(Task::PingPong { bytes: 8, turns: TURNS });
    tasks.push(Task::WindowRead { bytes: 8, reads: TURNS });
    tasks.extend([8, 4 << 10, 256 << 10].map(|bytes| Task::AllReduce { bytes }));
    tasks
}
