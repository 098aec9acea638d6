//! The points of an outlook: for a number of ranks, each algorithm and each size, the time by the
//! cost model and, where few events do, of the plan in virtual time.

use std::sync::Arc;
use std::time::Duration;

use pleach::collectives::simulate::many::{Bound, ManyError, Prepared, algorithms, bound, hosts};
use pleach::collectives::simulate::wired::choose;
use pleach::packing::topology::{Link, TopologyError};
use pleach::schedule::wiring::Wiring;
use pleach::tuning::Algorithm;
use pleach::{Collective, Topology};

use super::{Outlook, Point, Question};
use crate::cli::CommandError;

/// Most events on links of a point in virtual time: about a second.
const EVENTS_MAX: u64 = 2_000_000;

/// Most ranks for which trees are packed: their schedules are no families.
const PACKED_RANKS_MAX: u32 = 64;

/// Adds all points of so many ranks.
pub(crate) fn add(outlook: &mut Outlook, ranks: u32, topology: &Topology) -> Result<(), CommandError> {
    let slowed = match outlook.question.slow_link {
        Some(part) => Some(slowed(topology, part).map_err(|error| {
            CommandError::usage(format!(
                "no links: {ranks} ranks and a link of {part} of its bandwidth; {error}"
            ))
        })?),
        None => None,
    };
    // Hosts are where they were.
    let hosts = hosts(topology);
    let topology = slowed.as_ref().unwrap_or(topology);
    let bound = bound(topology, outlook.question.collective);
    for algorithm in algorithms(outlook.question.collective, &hosts) {
        let prepared = Prepared::new(topology, outlook.question.collective, &algorithm);
        let prepared = match outlook.question.jitter {
            Some(_) => prepared.and_then(Prepared::unfolded),
            None => prepared,
        };
        match prepared {
            Ok(prepared) => {
                for bytes in outlook.question.sizes.clone() {
                    add_point(outlook, (ranks, bytes), &prepared, bound);
                }
            }
            Err(error) => outlook.missing.push((algorithm.to_string(), ranks, error.to_string())),
        }
    }
    add_packed(outlook, topology, bound);
    Ok(())
}

/// Adds the points of packed trees, which differ by size.
fn add_packed(outlook: &mut Outlook, topology: &Topology, bound: Option<Bound>) {
    let (ranks, collective) = (topology.ranks(), outlook.question.collective);
    let packed = Algorithm::Packed(None);
    if !packed.carries_out(collective) {
        return;
    }
    if ranks > PACKED_RANKS_MAX {
        let why = format!("trees are packed for at most {PACKED_RANKS_MAX} ranks here");
        return outlook.missing.push(("packed".to_owned(), ranks, why));
    }
    let wiring = Arc::new(Wiring::new(topology.clone()));
    for bytes in outlook.question.sizes.clone() {
        let part_bytes = (bytes / parts(collective, ranks)) as usize;
        let prepared = choose(&wiring, collective, part_bytes, Some(&packed))
            .map_err(ManyError::from)
            .and_then(|selection| Prepared::wired(&wiring, collective, &selection.algorithm));
        match prepared {
            Ok(prepared) => add_point(outlook, (ranks, bytes), &prepared, bound),
            Err(error) => outlook.missing.push(("packed".to_owned(), ranks, error.to_string())),
        }
    }
}

/// How many parts a size is of: those that are together at one rank.
fn parts(collective: Collective, ranks: u32) -> u64 {
    match collective {
        Collective::AllToAll => u64::from(ranks),
        other => u64::from(other.parts(ranks)),
    }
}

/// Adds a point, unless its parts have no bytes or are longer than the algorithm carries.
fn add_point(
    outlook: &mut Outlook,
    (ranks, size): (u32, u64),
    prepared: &Prepared<'_>,
    bound: Option<Bound>,
) {
    let Question { collective, jitter, .. } = &outlook.question;
    let (algorithm, parts) = (prepared.algorithm(), parts(*collective, ranks));
    let part_bytes = size / parts;
    let is_too_short = part_bytes == 0 && size > 0;
    let most = algorithm.part_bytes_max(*collective, ranks);
    if is_too_short || most.is_some_and(|most| part_bytes > most) {
        return;
    }
    let delays = jitter.map(|(jitter, seed)| jitter.delays_ns(seed, ranks));
    let simulated = match &delays {
        None => prepared.time_within(part_bytes as usize, EVENTS_MAX),
        Some(delays) => prepared.time_with_delays(part_bytes as usize, delays, EVENTS_MAX),
    };
    let latest = delays.iter().flatten().max().copied().unwrap_or(0);
    outlook.points.push(Point {
        ranks,
        size,
        bytes: part_bytes * parts,
        algorithm: algorithm.to_string(),
        family: algorithm.family(),
        bound,
        model: prepared.price(part_bytes) + Duration::from_nanos(latest),
        simulated: simulated.map(|time| (time, prepared.carried_out())).map_err(|error| error.to_string()),
    });
}

/// The same links with the slowest one of rank 0 slower still, or without it.
fn slowed(topology: &Topology, part: f64) -> Result<Topology, TopologyError> {
    let own = topology.node(0);
    let slowest = topology.leaving(own).iter().min_by_key(|link| link.bytes_per_s).map(|link| link.to);
    let mut builder = Topology::builder();
    // Nodes keep their numbers.
    topology.nodes().iter().for_each(|node| {
        builder.node(node.name.clone(), node.kind);
    });
    for link in topology.links() {
        let is_slow = [(Some(link.from), Some(link.to)), (Some(link.to), Some(link.from))]
            .contains(&(Some(own), slowest));
        let bytes_per_s = if is_slow { (link.bytes_per_s as f64 * part) as u64 } else { link.bytes_per_s };
        if bytes_per_s > 0 {
            builder.add(Link { bytes_per_s, ..*link });
        }
    }
    builder.build()
}
