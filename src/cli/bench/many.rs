//! Measures worlds of so many ranks that no engines are made for them: plans alone, over the links
//! of a topology, in virtual time. No data move, so none are checked.

use std::time::Duration;

use pleach::collectives::simulate::many::{ManyError, Prepared, algorithms, bound, hosts};
use pleach::tuning::{Algorithm, HostMap};
use pleach::{Collective, Topology};

use super::sizes::Sweep;
use super::{
    Arguments, Measurement, OverLinks, Report, Task, expect_meaning, expect_simulated, rooted, sweep,
};
use crate::cli::CommandError;

/// Measures all sizes.
pub(super) fn run(
    arguments: &Arguments,
    collective: Collective,
    topology: &Topology,
) -> Result<(), CommandError> {
    expect_simulated(arguments)?;
    let collective = rooted(arguments.root, collective, topology.ranks())?;
    expect_meaning(collective, arguments.op, arguments.dtype)?;
    let sweep = sweep(arguments, collective)?;
    let task = task(arguments, collective, topology.ranks());
    let all = prepared(&arguments.algorithm, collective, topology)?;
    let source = arguments.topology.as_deref().unwrap_or_default();
    let note = format!(" (the links of {source}, plans without data, virtual time)");
    let report = Report::new(&task, "sim", arguments.json).noting(note).over(source).of_plans();
    measure(report, &task, &sweep, &all, topology)
}

fn task(arguments: &Arguments, collective: Collective, ranks: u32) -> Task {
    let Arguments { dtype: data_type, op, memory, reproducible, .. } = *arguments;
    Task {
        collective,
        data_type,
        op,
        ranks,
        variant: None,
        warmup: None,
        iterations: None,
        time: None,
        memory,
        reproducible,
        reuse: false,
    }
}

/// The algorithm of this name over these links, or all that there are for `auto`.
fn prepared<'a>(
    name: &str,
    collective: Collective,
    topology: &'a Topology,
) -> Result<Vec<Prepared<'a>>, CommandError> {
    let hosts = hosts(topology);
    let refused = |error: ManyError| {
        let ranks = topology.ranks();
        CommandError::typed(format!("no schedule: {name} {collective} of {ranks} ranks; {error}"))
    };
    if name == "auto" {
        let (mut found, mut last) = (Vec::new(), None);
        for algorithm in algorithms(collective, &hosts) {
            match Prepared::new(topology, collective, &algorithm) {
                Ok(prepared) => found.push(prepared),
                Err(error) => {
                    tracing::info!("{algorithm} is left out: {error}");
                    last = Some(error);
                }
            }
        }
        return match last {
            Some(error) if found.is_empty() => Err(refused(error)),
            _ => Ok(found),
        };
    }
    let algorithm = named(name, collective, &hosts)?;
    Ok(vec![Prepared::new(topology, collective, &algorithm).map_err(refused)?])
}

fn named(name: &str, collective: Collective, hosts: &HostMap) -> Result<Algorithm, CommandError> {
    match Algorithm::named(name, collective) {
        Ok(Algorithm::Hierarchical(None)) => Ok(Algorithm::Hierarchical(Some(hosts.clone()))),
        Ok(algorithm) => Ok(algorithm),
        Err(error) => {
            let (collective, known) = (collective.name(), error.known);
            Err(CommandError::typed(format!(
                "unknown algorithm: '{name}' for {collective}; use one of auto {known}"
            )))
        }
    }
}

fn measure(
    mut report: Report<'_>,
    task: &Task,
    sweep: &Sweep,
    all: &[Prepared<'_>],
    topology: &Topology,
) -> Result<(), CommandError> {
    let bound = bound(topology, task.collective);
    report.head()?;
    for bytes in sweep.sizes() {
        let count = task.count(bytes);
        let part_bytes = count * task.data_type.bytes();
        let (prepared, predicted_s, samples) = quickest(all, task, part_bytes)?;
        let over_links = OverLinks {
            bound_bytes_per_s: bound.map(|bound| bound.bytes_per_s()),
            predicted_s,
            carried_out: Some(prepared.carried_out()),
        };
        report.row(&Measurement {
            algorithm: prepared.algorithm().to_string(),
            count,
            samples,
            errors: 0,
            over_links: Some(over_links),
        })?;
    }
    Ok(())
}

/// The first algorithm in the order of prices whose calls of this length fit the ranks: itself, its
/// price in seconds, and its time.
fn quickest<'p, 'a>(
    all: &'p [Prepared<'a>],
    task: &Task,
    part_bytes: usize,
) -> Result<(&'p Prepared<'a>, f64, Vec<Duration>), CommandError> {
    let mut refused = "its parts are too long".to_owned();
    let carries = |prepared: &&Prepared<'_>| {
        let most = prepared.algorithm().part_bytes_max(task.collective, task.ranks);
        most.is_none_or(|most| part_bytes as u64 <= most)
    };
    let mut priced: Vec<_> =
        all.iter().filter(carries).map(|prepared| (prepared.price(part_bytes as u64), prepared)).collect();
    priced.sort_by_key(|(price, _)| *price);
    for (price, prepared) in priced {
        match prepared.time(part_bytes) {
            Ok(time) => return Ok((prepared, price.as_secs_f64(), vec![time])),
            Err(error) => refused = format!("{}: {error}", prepared.algorithm()),
        }
    }
    let (collective, ranks) = (task.collective, task.ranks);
    Err(CommandError::typed(format!(
        "not simulated: {collective} of {ranks} ranks and {part_bytes} bytes a part; {refused}"
    )))
}
