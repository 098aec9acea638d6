//! `cargo bench --features grpc --bench graph`: what it takes until a tensor of a model that runs
//! on two ranks has crossed, in four ways: by gRPC over sockets, by gRPC over byte streams of
//! shared memory, copied into registered memory, and without a copy. They are the four bars of Xue
//! et al., "RDMA and tensors" (arXiv 1805.08430, section 5).
//!
//! Each model is measured in turn with each way, several times; the medians count. The iterations
//! follow each other (`--depth 1`), so that a tensor is waited for. This reports, and fails only
//! where something does not run. `--write-docs` writes the table into `docs/graph.md`.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use clap::Parser;
use serde_json::Value;

#[path = "../report/mod.rs"]
mod report;

use report::{is_chosen, median};

/// The light models of the `onnx` package, and iterations that take a few seconds.
const MODELS: [(&str, u32); 9] = [
    ("bvlc_alexnet", 60),
    ("densenet121", 40),
    ("inception_v1", 60),
    ("inception_v2", 60),
    ("resnet50", 40),
    ("shufflenet", 100),
    ("squeezenet", 100),
    ("vgg19", 12),
    ("zfnet512", 40),
];

/// In the order of the bars.
const WAYS: [&str; 4] = ["grpc", "grpc-fabric", "copy", "zero-copy"];

/// Where the table stands in the page.
const MARKS: [&str; 2] = ["<!-- measured bars: begin -->", "<!-- measured bars: end -->"];

/// Measure how tensors of models cross.
#[derive(Debug, Parser)]
#[command(
    name = "graph",
    after_help = "Example:\n  cargo bench --features grpc --bench graph -- --only vgg19"
)]
struct Arguments {
    /// Only models whose names begin with one of these, with commas between
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Write the table into docs/graph.md
    #[arg(long)]
    write_docs: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    report::ended(measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let mut table = String::from(
        "| model | bytes that cross | grpc, us | grpc-fabric, us | copy, us | zero-copy, us | grpc / zero-copy | \
         grpc-fabric / zero-copy |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for (name, iterations) in MODELS.into_iter().filter(|(name, _)| is_chosen(&arguments.only, name)) {
        let mut times = WAYS.map(|_| Vec::new());
        let mut bytes = 0;
        for _ in 0..arguments.rounds {
            for (way, times) in WAYS.into_iter().zip(&mut times) {
                let (crossed, handover_us) = run(name, way, iterations)?;
                bytes = crossed / u64::from(iterations);
                times.extend(handover_us);
            }
        }
        let medians = times.map(|times| (!times.is_empty()).then(|| median(times)));
        let [grpc, fabric, _, zero] = medians;
        let shown = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.1}"));
        let ratio = |one: Option<f64>| one.zip(zero).map(|(one, zero)| one / zero);
        let _ = write!(table, "| {name} | {bytes} ");
        for value in medians.into_iter().chain([ratio(grpc), ratio(fabric)]) {
            let _ = write!(table, "| {} ", shown(value));
        }
        table.push_str("|\n");
        eprintln!("{name} is measured");
    }
    print!("{table}");
    if arguments.write_docs {
        report::write_between(MARKS, &table, concat!(env!("CARGO_MANIFEST_DIR"), "/docs/graph.md"))?;
    }
    Ok(())
}

/// Runs a model. Returns the bytes that the last rank received, and the median time from the end of
/// the operator that computes a tensor to the start of one that waited for it.
fn run(name: &str, way: &str, iterations: u32) -> Result<(u64, Option<f64>), String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    let model = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = model.join(format!("graph-analyzer/tests/data/light/light_{name}.onnx"));
    command.args(["graph", "run"]).arg(model).args([
        "--ranks",
        "2",
        "--fabric",
        "shm",
        "--random-weights",
        "1",
    ]);
    command.args(["--depth", "1", "--json", "--transfer", way, "--iterations", &iterations.to_string()]);
    let output = command.output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{name} by {way}: {}", String::from_utf8_lossy(&output.stderr).trim_end()));
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
    let rows = rows.map_err(|error| format!("{name} by {way}: {error}"))?;
    let bytes = rows.iter().rev().find_map(|row| row["bytes_in"].as_u64()).unwrap_or(0);
    Ok((bytes, rows.last().and_then(|row| row["handover_us_p50"].as_f64())))
}
