//! `cargo bench --bench svm`: the support vector machine beside scikit-learn's SVC, which is
//! LIBSVM, and beside `svm-train`, if they are there.
//!
//! All of one data set are measured in turn, round by round, on the same files; medians count.
//! Kernel values are counts, so one run of each is enough. Ranks that this machine does not have
//! are simulated: an iteration is the time of the kernel rows and of the loops as measured on one
//! rank, divided by the ranks, and of its collectives in virtual time.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use clap::Parser;
use pleach::transport::clock;
use serde_json::Value;

#[path = "../report/mod.rs"]
mod report;

use report::{is_chosen, median};

/// Measure the support vector machine.
#[derive(Debug, Parser)]
#[command(name = "svm", after_help = "Example:\n  cargo bench --bench svm -- --only breast_cancer")]
struct Arguments {
    /// Only data sets whose names begin with one of these, with commas between
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    only: Vec<String>,
    /// How often each is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The Python that has scikit-learn
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: PathBuf,
    /// The folder with the files of MNIST
    #[arg(long, value_name = "DIR", default_value = "../shared/data/mnist")]
    mnist: PathBuf,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// A data set with the parameters of its machine.
struct Set {
    name: &'static str,
    c: &'static str,
    gamma: &'static str,
    /// That of the times.
    tolerance: &'static str,
}

const SETS: [Set; 4] = [
    Set { name: "breast_cancer", c: "1", gamma: "0.03333333333333333", tolerance: "1e-3" },
    Set { name: "digits", c: "1", gamma: "0.1", tolerance: "1e-3" },
    Set { name: "mnist-4000", c: "10", gamma: "0.02", tolerance: "1e-3" },
    Set { name: "mnist-8000", c: "10", gamma: "0.02", tolerance: "1e-3" },
];

/// That at which solutions are compared.
const TIGHT: &str = "1e-6";

/// Parameters and tolerances of two trainings that make the same kernel rows, the second with many
/// thousands of iterations more.
const LONG: Set = Set { name: "", c: "1e5", gamma: "0.001", tolerance: "1e-1" };
const LONGER: &str = "1e-9";

/// The heuristics of the paper.
const SHRINKS: [&str; 13] = [
    "none",
    "2:single",
    "2:multi",
    "500:single",
    "500:multi",
    "1000:single",
    "1000:multi",
    "5%:single",
    "5%:multi",
    "10%:single",
    "10%:multi",
    "50%:single",
    "50%:multi",
];

/// Bytes that a rank gives in the two all-gathers of an iteration.
const EXCHANGE_BYTES: [usize; 2] = [32, 24];

fn main() -> ExitCode {
    report::ended(measure(&Arguments::parse()))
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let folder = std::env::temp_dir().join(format!("pleach-bench-svm-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let result = measure_in(arguments, &folder);
    let _ = std::fs::remove_dir_all(&folder);
    result
}

fn measure_in(arguments: &Arguments, folder: &Path) -> Result<(), String> {
    let mut export = peer(arguments);
    export.arg("export").arg(folder);
    if arguments.mnist.exists() {
        export.arg(&arguments.mnist);
    } else {
        println!("skipped MNIST: {} is not there", arguments.mnist.display());
    }
    if let Err(error) = output(&mut export) {
        println!("skipped all: scikit-learn, which writes the data sets, does not start ({error})");
        return Ok(());
    }
    let has_libsvm = Command::new("svm-train").output().is_ok();
    if !has_libsvm {
        println!("skipped svm-train: it is not installed (Debian's libsvm-tools)");
    }
    for set in
        SETS.iter().filter(|set| is_chosen(&arguments.only, set.name) && folder.join(set.name).exists())
    {
        let file = folder.join(set.name);
        println!("\n## {} (C = {}, gamma = {})\n", set.name, set.c, set.gamma);
        times(arguments, set, &file, has_libsvm)?;
        solutions(arguments, set, &file)?;
        savings(set, &file)?;
        simulated(set, &file)?;
        if set.name == "breast_cancer" {
            iteration(arguments, &file)?;
        }
    }
    println!();
    collectives()
}

fn peer(arguments: &Arguments) -> Command {
    let mut command = Command::new(&arguments.python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/svm/peer.py"));
    command
}

fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    let error = text(&output.stderr);
    Err(error.lines().last().unwrap_or("it says nothing").to_owned())
}

fn rows(command: &mut Command) -> Result<Vec<Value>, String> {
    let parsed = |line: &str| serde_json::from_str(line).map_err(|error| format!("{line}: {error}"));
    output(command)?.lines().map(parsed).collect()
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or(f64::NAN)
}

fn pleach(set: &Set, file: &Path, arguments: &[&str]) -> Result<Vec<Value>, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    command.arg("svm").arg(file).args(["--c", set.c, "--gamma", set.gamma, "--json"]).args(arguments);
    rows(&mut command)
}

fn fit(arguments: &Arguments, set: &Set, file: &Path, tolerance: &str) -> Result<Value, String> {
    let fitted = rows(peer(arguments).arg("fit").arg(file).args([set.c, set.gamma, tolerance]))?;
    fitted.into_iter().next().ok_or_else(|| "scikit-learn printed nothing".to_owned())
}

/// Times of training, in turn.
fn times(arguments: &Arguments, set: &Set, file: &Path, has_libsvm: bool) -> Result<(), String> {
    let names = ["scikit-learn", "1 rank", "1 rank, none", "2 ranks", "2 ranks, first", "svm-train, all"];
    let (mut seconds, mut iterations) = (vec![Vec::new(); names.len()], vec![f64::NAN; names.len()]);
    for _ in 0..arguments.rounds {
        let tolerance = ["--tolerance", set.tolerance];
        let own = |more: &[&str]| pleach(set, file, &[&tolerance[..], more].concat());
        let found = [
            fit(arguments, set, file, set.tolerance)?,
            own(&["--ranks", "1"])?.remove(0),
            own(&["--ranks", "1", "--shrink", "none"])?.remove(0),
            own(&["--ranks", "2", "--fabric", "shm"])?.remove(0),
            own(&["--ranks", "2", "--fabric", "shm", "--selection", "first"])?.remove(0),
        ];
        for (at, row) in found.iter().enumerate() {
            seconds[at].push(number(row, "train_s"));
            iterations[at] = number(row, "iterations");
        }
        if has_libsvm {
            let began = clock::now();
            let model = file.with_extension("model");
            let words = ["-q", "-m", "200", "-c", set.c, "-g", set.gamma, "-e", set.tolerance];
            output(Command::new("svm-train").args(words).arg(file).arg(model))?;
            seconds[5].push((clock::now() - began).as_secs_f64());
        }
    }
    println!(
        "| tolerance {} | seconds, median of {} | by scikit-learn's | iterations | us each |",
        set.tolerance, arguments.rounds
    );
    println!("|--|--:|--:|--:|--:|");
    let medians: Vec<Option<f64>> =
        seconds.into_iter().map(|values| (!values.is_empty()).then(|| median(values))).collect();
    for ((name, seconds), iterations) in names.iter().zip(&medians).zip(iterations) {
        if let (Some(seconds), Some(theirs)) = (seconds, medians[0]) {
            let each = seconds * 1e6 / iterations;
            println!("| {name} | {seconds:.4} | {:.2} | {iterations} | {each:.1} |", seconds / theirs);
        }
    }
    Ok(())
}

/// Whether both end at one solution.
fn solutions(arguments: &Arguments, set: &Set, file: &Path) -> Result<(), String> {
    let theirs = fit(arguments, set, file, TIGHT)?;
    let ours = pleach(set, file, &["--ranks", "2", "--tolerance", TIGHT])?.remove(0);
    println!("\n| tolerance {TIGHT} | support vectors | objective | intercept |\n|--|--:|--:|--:|");
    for (name, row) in [("scikit-learn", &theirs), ("pleach", &ours)] {
        let [vectors, objective, intercept] =
            ["support_vectors", "objective", "intercept"].map(|field| number(row, field));
        println!("| {name} | {vectors} | {objective:.8} | {intercept:.6} |");
    }
    Ok(())
}

/// The share of kernel values that each heuristic saves, without a cache as published, and with
/// one.
fn savings(set: &Set, file: &Path) -> Result<(), String> {
    let shrinks: Vec<&str> = SHRINKS.iter().flat_map(|shrink| ["--shrink", shrink]).collect();
    let evaluations = |cache: &str| -> Result<Vec<f64>, String> {
        let options = ["--ranks", "1", "--cache", cache, "--tolerance", set.tolerance];
        let found = pleach(set, file, &[&options[..], &shrinks].concat())?;
        Ok(found.iter().map(|row| number(row, "kernel_evaluations")).collect())
    };
    let (without, with) = (evaluations("0")?, evaluations("200M")?);
    let saved = |value: f64, none: f64| (1.0 - value / none) * 100.0;
    println!(
        "\n| first check | kernel values | saved | with a cache of 200M | saved |\n|--|--:|--:|--:|--:|"
    );
    for ((shrink, without_cache), with_cache) in SHRINKS.iter().zip(&without).zip(&with) {
        println!(
            "| {shrink} | {without_cache} | {:.1} % | {with_cache} | {:.1} % |",
            saved(*without_cache, without[0]),
            saved(*with_cache, with[0])
        );
    }
    let options = ["--ranks", "1", "--cache", "0", "--tolerance", TIGHT];
    let tight = pleach(set, file, &[&options[..], &["--shrink", "none", "--shrink", "5%:single"]].concat())?;
    let [none, single] = [0, 1].map(|at| number(&tight[at], "kernel_evaluations"));
    println!(
        "\n5%:single at tolerance {TIGHT}, without a cache: {single} kernel values of {none}, {:.1} % saved",
        saved(single, none)
    );
    Ok(())
}

/// Median times of collectives, in us, by `pleach bench`.
fn collective(name: &str, ranks: u32, fabric: &str, bytes: usize) -> Result<f64, String> {
    let (ranks, bytes) = (ranks.to_string(), bytes.to_string());
    let mut command = Command::new(env!("CARGO_BIN_EXE_pleach"));
    command.args(["bench", name, "--ranks", &ranks, "--fabric", fabric, "--sizes", &bytes, "--json"]);
    let rows = rows(&mut command)?;
    let row = rows.iter().find(|row| row["time_us_p50"].is_number());
    row.map(|row| number(row, "time_us_p50")).ok_or_else(|| format!("no time of {name}: {rows:?}"))
}

/// Speed on ranks that are not here.
fn simulated(set: &Set, file: &Path) -> Result<(), String> {
    let options = ["--ranks", "1", "--tolerance", set.tolerance];
    let shrunk = pleach(set, file, &[&options[..], &["--shrink", "none", "--shrink", "5%:single"]].concat())?;
    println!(
        "\n| simulated ranks | none, s | 5%:single, s | times as fast as 1 rank, none |\n|--|--:|--:|--:|"
    );
    let of_one = number(&shrunk[0], "train_s");
    for ranks in [1u32, 2, 4, 8, 16, 32, 64] {
        let mut iteration_us = 0.0;
        if ranks > 1 {
            for bytes in EXCHANGE_BYTES {
                iteration_us += collective("all-gather", ranks, "sim", bytes * ranks as usize)?;
            }
            iteration_us += collective("broadcast", ranks, "sim", 4096)?;
        }
        let seconds = |row: &Value| {
            number(row, "train_s") / f64::from(ranks) + iteration_us * 1e-6 * number(row, "iterations")
        };
        let (none, single) = (seconds(&shrunk[0]), seconds(&shrunk[1]));
        println!("| {ranks} | {none:.4} | {single:.4} | {:.1} |", of_one / single);
    }
    Ok(())
}

/// What an iteration takes beside its kernel rows: the time of the iterations that one training
/// makes more than another, where both make the same rows.
fn iteration(arguments: &Arguments, file: &Path) -> Result<(), String> {
    /// Each takes milliseconds where it is of use.
    const TRAININGS_A_ROUND: u32 = 5;
    let mut beyond_us = [Vec::new(), Vec::new()];
    let mut collectives_us = Vec::new();
    let mut iterations = 0.0;
    for _ in 0..arguments.rounds * TRAININGS_A_ROUND {
        for (beyond_us, ranks) in beyond_us.iter_mut().zip(["1", "2"]) {
            let with = |tolerance| -> Result<Value, String> {
                let options = ["--ranks", ranks, "--fabric", "shm", "--shrink", "none"];
                Ok(pleach(&LONG, file, &[&options[..], &["--tolerance", tolerance]].concat())?.remove(0))
            };
            let (few, many) = (with(LONG.tolerance)?, with(LONGER)?);
            let more = |name: &str| number(&many, name) - number(&few, name);
            if more("kernel_evaluations") != 0.0 {
                println!("\nan iteration without rows: not shown, at {LONGER} other rows are made");
                return Ok(());
            }
            iterations = more("iterations");
            beyond_us.push(more("train_s") * 1e6 / iterations);
        }
        let [first, second] = EXCHANGE_BYTES.map(|bytes| collective("all-gather", 2, "shm", bytes * 2));
        collectives_us.push(first? + second?);
    }
    let ([one, two], exchange) = (beyond_us.map(median), median(collectives_us));
    println!(
        "\nan iteration on shm, without rows, median over trainings of {iterations} iterations: {one:.2} us \
         with 1 rank; {two:.2} us with 2, {:.2} times its collectives' {exchange:.2} us",
        two / exchange
    );
    Ok(())
}

/// What an iteration's collectives take on this machine.
fn collectives() -> Result<(), String> {
    for (fabric, ranks) in [("shm", 2), ("tcp", 2)] {
        let [first, second] = EXCHANGE_BYTES.map(|bytes| collective("all-gather", ranks, fabric, bytes * 2));
        let (first, second) = (first?, second?);
        println!(
            "{fabric}, {ranks} ranks: the two all-gathers of an iteration take {first:.2} + {second:.2} us"
        );
    }
    Ok(())
}
