//! Measures simulated ranks that are joined by the links of a topology, in virtual time.
//!
//! Small messages move and are checked as they are measured. Of large ones, whose memory of all
//! ranks together would not fit, only the time is simulated, exactly as if their bytes moved; what
//! checks them is the same schedule for a smaller message, whose bytes do move.

use std::sync::Arc;

use pleach::Collective;
use pleach::collectives::simulate::wired::{TimeError, choose, cluster, time};
use pleach::packing::Rate;
use pleach::packing::topology;
use pleach::schedule::wiring::Wiring;

use super::report::Report;
use super::simulated::Simulation;
use super::sizes::Sweep;
use super::{Arguments, BenchFabric, CommandError, Measured, OverLinks, Task, verdict};

/// Most bytes of all ranks' inputs and outputs that are moved.
const MOVED_BYTES_MAX: u64 = 64 << 20;

/// Most ranks whose links are simulated.
const RANKS_MAX: u32 = 256;

/// The links that were asked for.
pub(super) fn wiring(arguments: &Arguments) -> Result<Option<Arc<Wiring>>, CommandError> {
    let Some(source) = &arguments.topology else { return Ok(None) };
    let topology = topology::source(source).map_err(CommandError::usage)?;
    if arguments.fabric == Some(BenchFabric::Simulated) && topology.ranks() > RANKS_MAX {
        return Err(CommandError::usage(format!(
            "too many ranks: {source} has {}; give a topology of at most {RANKS_MAX}, more are not simulated",
            topology.ranks()
        )));
    }
    Ok(Some(Arc::new(Wiring::new(topology))))
}

/// Measures all sizes.
pub(super) fn measure(
    arguments: &Arguments,
    task: &Task,
    sweep: &Sweep,
    wiring: &Arc<Wiring>,
) -> Result<(), CommandError> {
    let source = arguments.topology.as_deref().unwrap_or_default();
    let note = format!(" (the links of {source}, one transfer after the other on each, virtual time)");
    let mut report = Report::new(task, "sim", arguments.json).noting(note).over(source);
    report.head()?;
    let mut errors = 0;
    for bytes in sweep.sizes() {
        let measured = one(task, bytes, wiring)?;
        errors += measured.errors;
        report.row(&measured)?;
    }
    verdict(errors)
}

fn one(task: &Task, bytes: u64, wiring: &Arc<Wiring>) -> Result<Measured, CommandError> {
    let count = task.count(bytes);
    let part_bytes = count * task.data_type.bytes();
    let selection =
        choose(wiring, task.collective, part_bytes, task.variant.as_ref().map(|variant| &variant.algorithm))
            .map_err(|error| CommandError::usage(format!("no schedule: {error}")))?;
    let task =
        Task { variant: Some(selection.algorithm.clone().into()), iterations: Some(1), ..task.clone() };
    let moved = |bytes: u64| -> Result<Measured, CommandError> {
        let cluster = cluster(wiring, &selection, true).map_err(stuck)?;
        Simulation::of(&task, cluster).measure(bytes)
    };
    let mut measured = if bytes.saturating_mul(2 * u64::from(task.ranks)) <= MOVED_BYTES_MAX {
        moved(bytes)?
    } else {
        let timed = time(
            wiring,
            task.collective,
            part_bytes,
            task.variant.as_ref().map(|variant| &variant.algorithm),
        )
        .map_err(untimed)?;
        let element = task.data_type.bytes() as u64;
        let checked = moved((MOVED_BYTES_MAX / 2 / u64::from(task.ranks)).next_multiple_of(element))?;
        Measured { count, samples: vec![timed.time], ..checked }
    };
    let row = selection.table.iter().find(|row| row.algorithm == selection.algorithm);
    measured.over_links = Some(OverLinks {
        bound_bytes_per_s: bound(task.collective, wiring),
        predicted_s: row.map_or(0.0, |row| row.seconds),
    });
    Ok(measured)
}

/// What nothing can exceed.
fn bound(collective: Collective, wiring: &Wiring) -> Option<f64> {
    let value = |rate: Rate| *rate.numer() as f64 / *rate.denom() as f64;
    let packed = wiring.packed(collective).ok()?;
    Some(value(packed.packing.bound)).filter(|bound| *bound > 0.0)
}

fn stuck(error: impl std::fmt::Display) -> CommandError {
    CommandError::failed(format!("simulation stuck: {error}; report it"))
}

fn untimed(error: TimeError) -> CommandError {
    CommandError::failed(format!("not timed: {error}"))
}
