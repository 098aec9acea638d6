//! `cargo bench --bench graph`: what it takes until a tensor of a model that runs
//! on two ranks has crossed, in four ways: by gRPC over sockets, by gRPC over byte streams of the
//! fabric, copied into registered memory, and without a copy. They are the four bars of Xue et al.,
//! "RDMA and tensors" (arXiv 1805.08430, section 5). Behind them, over shared memory, how many
//! iterations of a pipeline two ranks run in a second, and one process.
//!
//! Each model is measured in turn with each way, several times; the medians count. The iterations
//! of the bars follow each other (`--depth 1`), so that a tensor is waited for. This reports, and
//! fails only where something does not run. `--write-docs` writes the tables into `docs/graph.md`.

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

/// The models whose pipelines are measured.
const PIPELINES: [&str; 2] = ["resnet50", "vgg19"];

/// The page, and where the tables stand in it.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/graph.md");
const BARS: [&str; 2] = ["<!-- measured bars: begin -->", "<!-- measured bars: end -->"];
const BARS_TCP: [&str; 2] =
    ["<!-- measured bars over tcp: begin -->", "<!-- measured bars over tcp: end -->"];
const PIPELINES_MARKS: [&str; 2] = ["<!-- measured pipelines: begin -->", "<!-- measured pipelines: end -->"];

/// The fabric of the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Fabric {
    Shm,
    Tcp,
    /// The page has no table for it
    Verbs,
}

impl Fabric {
    fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Verbs => "verbs",
        }
    }

    /// Where its bars stand in the page.
    fn bars(self) -> Option<[&'static str; 2]> {
        match self {
            Self::Shm => Some(BARS),
            Self::Tcp => Some(BARS_TCP),
            Self::Verbs => None,
        }
    }
}

/// Measure how tensors of models cross.
#[derive(Debug, Parser)]
#[command(name = "graph", after_help = "Example:\n  cargo bench --bench graph -- --only vgg19")]
struct Arguments {
    /// Only models whose names begin with one of these, with commas between
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// The fabric of the ranks
    #[arg(long, value_enum, default_value_t = Fabric::Shm)]
    fabric: Fabric,
    /// How often each is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Write the tables into docs/graph.md
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
    let bars = measure_bars(arguments)?;
    print!("{bars}");
    if arguments.write_docs {
        let marks = arguments.fabric.bars();
        let marks = marks.ok_or("docs/graph.md has no table for verbs; leave --write-docs out")?;
        report::write_between(marks, &bars, PAGE)?;
    }
    if arguments.fabric == Fabric::Shm {
        let pipelines = measure_pipelines(arguments)?;
        print!("\n{pipelines}");
        if arguments.write_docs {
            report::write_between(PIPELINES_MARKS, &pipelines, PAGE)?;
        }
    }
    Ok(())
}

/// The models that are asked for.
fn models(arguments: &Arguments) -> impl Iterator<Item = (&'static str, u32)> {
    MODELS.into_iter().filter(|(name, _)| is_chosen(&arguments.only, name))
}

fn measure_bars(arguments: &Arguments) -> Result<String, String> {
    let mut table = String::from(
        "| model | bytes that cross | grpc, us | grpc-fabric, us | copy, us | zero-copy, us | grpc / zero-copy | \
         grpc-fabric / zero-copy |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for (name, iterations) in models(arguments) {
        let mut times = WAYS.map(|_| Vec::new());
        let mut bytes = 0;
        for _ in 0..arguments.rounds {
            for (way, times) in WAYS.into_iter().zip(&mut times) {
                let options = ["--ranks", "2", "--depth", "1", "--transfer", way];
                let rows = run(name, arguments.fabric, iterations, &options)?;
                let crossed = rows.iter().rev().find_map(|row| row["bytes_in"].as_u64()).unwrap_or(0);
                bytes = crossed / u64::from(iterations);
                times.extend(number(&rows, "handover_us_p50"));
            }
        }
        let medians = times.map(|times| (!times.is_empty()).then(|| median(times)));
        let [grpc, fabric, _, zero] = medians;
        let _ = write!(table, "| {name} | {bytes} ");
        for value in medians.into_iter().chain([ratio(grpc, zero), ratio(fabric, zero)]) {
            let _ = write!(table, "| {} ", shown(value));
        }
        table.push_str("|\n");
        eprintln!("{name} is measured");
    }
    Ok(table)
}

/// Iterations of a pipeline a second, each rank with one thread.
fn measure_pipelines(arguments: &Arguments) -> Result<String, String> {
    let mut table = String::from(
        "| model | one process, iterations/s | two ranks, iterations/s | two ranks / one process |\n\
         | --- | ---: | ---: | ---: |\n",
    );
    for (name, iterations) in models(arguments).filter(|(name, _)| PIPELINES.contains(name)) {
        let mut rates = ["1", "2"].map(|ranks| (ranks, Vec::new()));
        for _ in 0..arguments.rounds {
            for (ranks, rates) in &mut rates {
                let rows = run(name, Fabric::Shm, iterations, &["--ranks", ranks, "--depth", "2"])?;
                rates.extend(number(&rows, "iterations_per_s"));
            }
        }
        let [one, two] = rates.map(|(_, rates)| (!rates.is_empty()).then(|| median(rates)));
        let _ = write!(table, "| {name} | {} | {} ", shown(one), shown(two));
        let ratio = ratio(two, one).map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
        let _ = writeln!(table, "| {ratio} |");
        eprintln!("the pipeline of {name} is measured");
    }
    Ok(table)
}

fn shown(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.1}"))
}

fn ratio(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.zip(other).map(|(one, other)| one / other)
}

/// A figure of all ranks.
fn number(rows: &[Value], name: &str) -> Option<f64> {
    rows.last().and_then(|row| row[name].as_f64())
}

/// Runs a model. Returns the objects that are printed: one for each rank, and one for all.
fn run(name: &str, fabric: Fabric, iterations: u32, options: &[&str]) -> Result<Vec<Value>, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    let model = Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = model.join(format!("graph-analyzer/tests/data/light/light_{name}.onnx"));
    command.args(["graph", "run"]).arg(model).args(["--fabric", fabric.name(), "--random-weights", "1"]);
    command.args(["--json", "--iterations", &iterations.to_string()]).args(options);
    let output = command.output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        let shown = options.join(" ");
        return Err(format!("{name} {shown}: {}", String::from_utf8_lossy(&output.stderr).trim_end()));
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let rows: Result<Vec<Value>, _> = text.lines().map(serde_json::from_str).collect();
    rows.map_err(|error| format!("{name} {}: {error}", options.join(" ")))
}
