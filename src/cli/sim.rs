//! `pleach sim`: simulates whole groups and checks everything they do.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use pleach::collectives::simulate::{Failure, Limits, RANKS_MAX, Scenario, TrialReport, run as simulate};
use pleach::transport::mutex::lock;
use pleach::transport::sim::FaultKinds;

use pleach_vocabulary::digest::chain;

use super::CommandError;

/// Arguments of `pleach sim`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  pleach sim --seeds 1000\n  \
    pleach sim --seed 42 --ranks 5 --faults delay,rank-death --trace run.trace\n\n\
    A run depends on the program and the seed alone: a seed that fails will fail again in the same way."
)]
pub(crate) struct Arguments {
    /// The first seed
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// How many seeds to run, one after the other
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// How many ranks [default: drawn from the seed, mostly few, at most 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(RANKS_MAX)))]
    ranks: Option<u32>,
    /// Kinds of faults that a seed may draw, separated by commas: delay, reorder, tear,
    /// queue-full, freeze, link-down, rank-death, one-sided-loss, late (rounds of a partial
    /// all-reduce follow the calls); or all, or none
    #[arg(long, value_name = "LIST", default_value = "all", value_parser = faults)]
    faults: FaultKinds,
    /// Write a line for every event of the (only) seed to this file
    #[arg(long, value_name = "FILE", conflicts_with = "seeds")]
    trace: Option<PathBuf>,
}

/// A list of faults, for clap.
fn faults(list: &str) -> Result<FaultKinds, String> {
    list.parse().map_err(|error: pleach::transport::sim::UnknownFault| error.to_string())
}

/// Seeds between two lines of progress.
const PROGRESS_SEEDS: u64 = 50;

/// Sums of many runs.
#[derive(Default)]
struct Totals {
    seeds: u64,
    succeeded: u64,
    failed: u64,
    events: u64,
    virtual_ns: u64,
    hash: u64,
}

impl Totals {
    fn add(&mut self, report: &TrialReport) {
        self.seeds += 1;
        self.succeeded += report.succeeded;
        self.failed += report.failed;
        self.events += report.events;
        self.virtual_ns += report.virtual_time.0;
        // The order of the seeds counts.
        self.hash = chain(self.hash, report.hash.0);
    }
}

/// Runs `pleach sim`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let limits = Limits { ranks: arguments.ranks, faults: arguments.faults.clone() };
    let mut totals = Totals::default();
    for number in 0..arguments.seeds {
        let seed = arguments.seed.wrapping_add(number);
        let scenario = Scenario::draw(seed, &limits);
        let first_error = FirstError::default();
        let trace = arguments.trace.as_ref().map(|path| open_trace(path, &first_error)).transpose()?;
        let report = simulate(&scenario, trace).map_err(|failure| failed(arguments, &scenario, &failure))?;
        if let (Some(path), Some(error)) = (&arguments.trace, first_error.take()) {
            return Err(CommandError::failed(format!(
                "trace not whole: {} ({error}); name a file where there is room",
                path.display()
            )));
        }
        totals.add(&report);
        if arguments.seeds == 1 {
            return print(&format!("{scenario}: {}", summary(&totals, &report.hash.to_string())));
        }
        if totals.seeds.is_multiple_of(PROGRESS_SEEDS) && std::io::stderr().is_terminal() {
            // Only for who watches; nothing is lost if it cannot be written.
            let _ = write!(std::io::stderr(), "\r{} of {} seeds", totals.seeds, arguments.seeds);
        }
    }
    if std::io::stderr().is_terminal() {
        let _ = writeln!(std::io::stderr());
    }
    let hash = format!("{:016x}", totals.hash);
    print(&format!("{} seeds from {}: {}", totals.seeds, arguments.seed, summary(&totals, &hash)))
}

fn summary(totals: &Totals, hash: &str) -> String {
    let Totals { succeeded, failed, events, virtual_ns, .. } = totals;
    let virtual_s = *virtual_ns as f64 / 1e9;
    format!(
        "{succeeded} calls succeeded, {failed} ended with the error that they had to end with; {events} events, \
         {virtual_s:.6} s of virtual time, hash {hash}; everything held"
    )
}

fn print(line: &str) -> Result<(), CommandError> {
    match writeln!(std::io::stdout(), "{line}") {
        // A closed pipe is no error.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CommandError::failed(format!(
            "summary not printed: standard output ({error}); write it elsewhere"
        ))),
        _ => Ok(()),
    }
}

/// The first error of a trace, reported when its writer is dropped.
#[derive(Clone, Default)]
struct FirstError(Arc<Mutex<Option<io::Error>>>);

impl FirstError {
    fn put(&self, error: io::Error) {
        lock(&self.0).get_or_insert(error);
    }

    fn take(&self) -> Option<io::Error> {
        lock(&self.0).take()
    }
}

/// The file of a trace. The simulation goes on whatever becomes of it.
struct Trace {
    file: BufWriter<File>,
    first_error: FirstError,
}

impl Write for Trace {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = self.file.write_all(bytes) {
            self.first_error.put(error);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Err(error) = self.file.flush() {
            self.first_error.put(error);
        }
        Ok(())
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

fn open_trace(path: &PathBuf, first_error: &FirstError) -> Result<Box<dyn Write + Send>, CommandError> {
    match File::create(path) {
        Ok(file) => Ok(Box::new(Trace { file: BufWriter::new(file), first_error: first_error.clone() })),
        Err(error) => Err(CommandError::usage(format!(
            "trace not written: {} ({error}); name another file",
            path.display()
        ))),
    }
}

fn failed(arguments: &Arguments, scenario: &Scenario, failure: &Failure) -> CommandError {
    let ranks = arguments.ranks.map_or(String::new(), |ranks| format!(" --ranks {ranks}"));
    let faults = if arguments.faults == FaultKinds::all() {
        String::new()
    } else {
        format!(" --faults {}", arguments.faults)
    };
    CommandError::failed(format!(
        "simulation failed: {failure} ({scenario}); run it again by 'pleach sim --seed {}{ranks}{faults}'",
        scenario.seed
    ))
}
