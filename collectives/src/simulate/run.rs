//! A scenario as a whole: its calls, then rounds of a partial all-reduce where ranks are late.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use pleach_transport::Nanos;
use pleach_transport::mutex::lock;
use pleach_transport::sim::TraceHash;
use pleach_vocabulary::digest::chain;

use super::late::run_late;
use super::scenario::Scenario;
use super::trial::{Failure, TrialReport, run_calls};

/// A trace of several worlds.
#[derive(Clone)]
struct SharedTrace(Arc<Mutex<Box<dyn Write + Send>>>);

impl Write for SharedTrace {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        lock(&self.0).flush()
    }
}

/// Carries out a scenario; `trace` gets a line for every event.
///
/// # Errors
///
/// The first check that did not hold.
pub fn run(scenario: &Scenario, trace: Option<Box<dyn Write + Send>>) -> Result<TrialReport, Failure> {
    if !scenario.is_late {
        return run_calls(scenario, trace);
    }
    let trace = trace.map(|trace| SharedTrace(Arc::new(Mutex::new(trace))));
    let lines = || trace.clone().map(|trace| -> Box<dyn Write + Send> { Box::new(trace) });
    let (calls, rounds) = (run_calls(scenario, lines())?, run_late(scenario, lines())?);
    Ok(TrialReport {
        hash: TraceHash(chain(calls.hash.0, rounds.hash.0)),
        events: calls.events + rounds.events,
        virtual_time: Nanos(calls.virtual_time.0 + rounds.virtual_time.0),
        succeeded: calls.succeeded + rounds.succeeded,
        failed: calls.failed + rounds.failed,
    })
}
