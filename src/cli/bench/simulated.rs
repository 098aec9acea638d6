//! Measures simulated ranks: all of them in this process, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use pleach::collectives::call::{Counts, Descriptor};
use pleach::collectives::engine::{Bytes, RunId};
use pleach::collectives::simulate::wired::{TimeError, choose, cluster, time};
use pleach::collectives::simulate::{Cluster, Member};
use pleach::packing::{Rate, topology};
use pleach::schedule::wiring::Wiring;
use pleach::transport::sim::{Network, Options};
use pleach::transport::{Nanos, SharedMemory, Slice};
use pleach::{Collective, Rank, Topology};

use super::Report;
use crate::cli::bench::pattern::Pattern;
use crate::cli::bench::sizes::Sweep;
use crate::cli::bench::{
    Arguments, BenchFabric, CommandError, Measurement, OverLinks, SAMPLE_ITERATIONS_MAX, SAMPLE_MIN, Task,
    lengths, verdict,
};

/// The network, in words.
pub(super) const NOTE: &str = " (full mesh, 12.5 GB/s and 1.5 us a link, virtual time)";
const LINK_BYTES_PER_S: u64 = 12_500_000_000;
const LINK_LATENCY: Duration = Duration::from_nanos(1500);

/// Most simulated ranks.
const RANKS_MAX: u32 = 64;

/// Nothing varies in virtual time, so that few iterations say all.
const SMALL_BYTES: u64 = 64 << 10;
const ITERATIONS: u64 = 20;
const ITERATIONS_MIN: u64 = 2;

/// How long an iteration may take, in virtual time.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Most polls of a rank at one instant: more is a livelock.
const POLLS_MAX: usize = 100_000;

/// Ranks and what they do.
pub(super) struct Simulation<'a> {
    task: &'a Task,
    cluster: Cluster,
    pattern: Pattern,
    iteration: usize,
}

/// Memory of one iteration of one rank.
struct IterationMemory {
    /// The input; also the output, where that has as many elements.
    data: Slice,
    output: Option<Slice>,
}

/// A rank's share of a sample.
struct RankSample {
    slots: Vec<IterationMemory>,
    run: Option<RunId>,
    done: usize,
    /// When each iteration began, and the last ended.
    stamps: Vec<Nanos>,
}

impl<'a> Simulation<'a> {
    pub(super) fn new(task: &'a Task) -> Result<Self, CommandError> {
        let ranks = task.ranks;
        if ranks > RANKS_MAX {
            return Err(CommandError::usage(format!(
                "bad number of ranks: --ranks {ranks}; give 1 to {RANKS_MAX}, or links of more ranks, as --topology star:{ranks}"
            )));
        }
        let network = Network::full_mesh(ranks, LINK_BYTES_PER_S, LINK_LATENCY);
        Ok(Self::of(task, Cluster::new(Options::new(network, 0))))
    }

    /// The ranks of a cluster.
    pub(super) fn of(task: &'a Task, cluster: Cluster) -> Self {
        Self { task, cluster, pattern: Pattern::new(task), iteration: 0 }
    }

    /// Measures one size.
    pub(super) fn measure(&mut self, bytes: u64) -> Result<Measurement, CommandError> {
        let task = self.task;
        let count = task.count(bytes);
        let scaled = (ITERATIONS * SMALL_BYTES / bytes.max(SMALL_BYTES)).max(ITERATIONS_MIN);
        let iterations = task.iterations.map_or(scaled, u64::from);
        let mut shares: Vec<RankSample> = (0..task.ranks)
            .map(|_| RankSample { slots: Vec::new(), run: None, done: 0, stamps: Vec::new() })
            .collect();
        self.grow(&mut shares, count, 1)?;
        let mut errors = 0;
        let mut usual = SAMPLE_MIN;
        for _ in 0..task.warmup.unwrap_or(1) {
            usual = self.sample(&mut shares, count, &mut errors)?;
        }
        let in_sample = SAMPLE_MIN.as_nanos() as u64 / (usual.as_nanos() as u64).max(1) + 1;
        let in_sample = (in_sample as usize).min(SAMPLE_ITERATIONS_MAX);
        self.grow(&mut shares, count, in_sample)?;
        let samples: Result<Vec<_>, _> = (0..iterations.div_ceil(in_sample as u64))
            .map(|_| Ok(self.sample(&mut shares, count, &mut errors)? / in_sample as u32))
            .collect();
        let planner = &mut member(&mut self.cluster, 0)?.planner;
        let part_bytes = count * task.data_type.bytes();
        let program = planner
            .program(task.collective, part_bytes, task.variant.as_ref())
            .map_err(CommandError::failed)?;
        Ok(Measurement {
            algorithm: program.algorithm().to_owned(),
            count,
            samples: samples?,
            errors,
            over_links: None,
        })
    }

    fn grow(
        &mut self,
        shares: &mut [RankSample],
        count: usize,
        iterations: usize,
    ) -> Result<(), CommandError> {
        let element = self.task.data_type.bytes();
        for ((share, member), rank) in shares.iter_mut().zip(&mut self.cluster.members).zip(0..) {
            let Some(member) = member else { continue };
            let (data, output) = lengths(self.task, rank, count);
            let (data, output) = (data * element, output.map(|output| output * element));
            let mut register = |bytes: usize| {
                let memory = SharedMemory::new(bytes).map_err(|error| {
                    CommandError::failed(format!("no memory: {bytes} bytes ({error}); give a smaller --max"))
                })?;
                let region = member.engine.device().register(memory).map_err(CommandError::failed)?;
                region.whole().slice(0..bytes).map_err(CommandError::failed)
            };
            while share.slots.len() < iterations {
                share.slots.push(IterationMemory {
                    data: register(data)?,
                    output: output.map(&mut register).transpose()?,
                });
            }
        }
        Ok(())
    }

    /// Runs an iteration in each slot and checks; how long that took until the last rank had ended.
    fn sample(
        &mut self,
        shares: &mut [RankSample],
        count: usize,
        errors: &mut u64,
    ) -> Result<Duration, CommandError> {
        let task = self.task;
        let begin = self.cluster.world.now();
        for (share, rank) in shares.iter_mut().zip(0..) {
            let mut input = vec![0; share.slots[0].data.len()];
            for (slot, iteration) in share.slots.iter().zip(self.iteration..) {
                self.pattern.fill(rank, iteration, &mut input);
                slot.data.store(&input);
            }
            (share.done, share.run) = (0, None);
            share.stamps.clear();
            share.next(&mut self.cluster, task, rank, count)?;
        }
        let mut failed = None;
        let run = self.cluster.run(|cluster| {
            for (share, rank) in shares.iter_mut().zip(0..) {
                if let Err(error) = share.advance(cluster, task, rank, count) {
                    failed.get_or_insert(error);
                }
            }
            failed.is_some() || shares.iter().all(|share| share.run.is_none())
        });
        if let Some(error) = failed {
            return Err(error);
        }
        run.map_err(|simulation_failed| {
            CommandError::failed(format!("simulation stuck: {simulation_failed}; report it"))
        })?;
        *errors += self.count_errors(shares);
        self.iteration += shares[0].slots.len();
        let ends = shares.iter().filter_map(|share| share.stamps.last());
        Ok(ends.max().map_or(Duration::ZERO, |end| end.since(begin)))
    }

    fn count_errors(&self, shares: &[RankSample]) -> u64 {
        let mut count = 0;
        for (share, rank) in shares.iter().zip(0..) {
            for (slot, iteration) in share.slots.iter().zip(self.iteration..) {
                let output = slot.output.as_ref().unwrap_or(&slot.data).to_vec();
                count += self.pattern.count_errors(rank, iteration, 1, &output);
            }
            if matches!(self.task.collective, Collective::Barrier) {
                // Nobody may have gone on before the last had come.
                let came = |iteration: usize| shares.iter().map(|share| share.stamps[iteration]).max();
                let left = share.stamps[1..].iter().enumerate();
                count += left.filter(|(iteration, left)| Some(**left) < came(*iteration)).count() as u64;
            }
        }
        count
    }
}

impl RankSample {
    /// Starts the next iteration, if there is one and this rank has a part in it.
    fn next(
        &mut self,
        cluster: &mut Cluster,
        task: &Task,
        rank: Rank,
        count: usize,
    ) -> Result<(), CommandError> {
        let now = cluster.world.now();
        self.stamps.push(now);
        let is_part = match task.collective {
            Collective::SendRecv { from, to } => rank == from || rank == to,
            _ => true,
        };
        let Some(slot) = self.slots.get(self.done).filter(|_| is_part) else { return Ok(()) };
        let counts = Counts::Each(count);
        let descriptor = Descriptor {
            collective: task.collective,
            amount: counts.amount(),
            data_type: task.data_type,
            op: task.op,
            tag: 0,
        };
        let bytes = |slice: &Slice, has: bool| match has {
            true => Bytes::Registered(slice.clone()),
            false => Bytes::None,
        };
        let has_input = !task.collective.input_parts(rank, task.ranks).is_empty();
        let has_output = !task.collective.output_parts(rank, task.ranks).is_empty();
        let input = bytes(&slot.data, has_input);
        let output = bytes(slot.output.as_ref().unwrap_or(&slot.data), has_output);
        let member = member(cluster, rank)?;
        let plan = member.planner.plan(&descriptor, &counts, task.variant.as_ref());
        let plan = plan.map_err(CommandError::failed)?.clone();
        self.run = Some(member.start(&plan, input, output, TIMEOUT).map_err(CommandError::failed)?);
        Ok(())
    }

    /// Takes the outcome of the iteration under way and starts the next, as often as that goes at
    /// this instant.
    fn advance(
        &mut self,
        cluster: &mut Cluster,
        task: &Task,
        rank: Rank,
        count: usize,
    ) -> Result<(), CommandError> {
        let now = cluster.world.now();
        while let Some(run) = self.run {
            let Some(outcome) = member(cluster, rank)?.engine.take_outcome(run) else { break };
            outcome.map_err(CommandError::failed)?;
            self.run = None;
            self.done += 1;
            self.next(cluster, task, rank, count)?;
            let engine = &mut member(cluster, rank)?.engine;
            for _ in 0..POLLS_MAX {
                if !engine.poll(now) {
                    break;
                }
            }
        }
        Ok(())
    }
}

fn member(cluster: &mut Cluster, rank: Rank) -> Result<&mut Member, CommandError> {
    let member = cluster.members.get_mut(rank as usize).and_then(Option::as_mut);
    member.ok_or_else(|| CommandError::failed(format!("rank died: rank {rank} of the simulation; report it")))
}

// Measures simulated ranks over the links of a topology, in virtual time.
//
// The bytes of small messages move, and their results are checked. For large messages, whose
// memory would not fit, only the time is simulated, exactly as if the bytes moved. The same
// schedule is checked with a smaller message whose bytes move.

/// Most bytes of all ranks' inputs and outputs that are moved.
const MOVED_BYTES_MAX: u64 = 64 << 20;

/// The largest number of ranks with engines over simulated links; of more, plans are carried out
/// alone.
const LINKED_RANKS_MAX: u32 = 256;

/// The links that were asked for.
pub(super) fn links(arguments: &Arguments) -> Result<Option<Topology>, CommandError> {
    arguments.topology.as_deref().map(|name| topology::source(name).map_err(CommandError::usage)).transpose()
}

/// Whether so many ranks are simulated over these links that no engines are made for them.
pub(super) fn are_many(arguments: &Arguments, links: &Topology) -> bool {
    arguments.fabric == Some(BenchFabric::Simulated) && links.ranks() > LINKED_RANKS_MAX
}

/// Measures all sizes.
pub(super) fn measure_links(
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
        let measured = measure_size(task, bytes, wiring)?;
        errors += measured.errors;
        report.row(&measured)?;
    }
    verdict(errors)
}

fn measure_size(task: &Task, bytes: u64, wiring: &Arc<Wiring>) -> Result<Measurement, CommandError> {
    let count = task.count(bytes);
    let part_bytes = count * task.data_type.bytes();
    let selection =
        choose(wiring, task.collective, part_bytes, task.variant.as_ref().map(|variant| &variant.algorithm))
            .map_err(|error| CommandError::usage(format!("no schedule: {error}")))?;
    let task =
        Task { variant: Some(selection.algorithm.clone().into()), iterations: Some(1), ..task.clone() };
    let moved = |bytes: u64| -> Result<Measurement, CommandError> {
        let cluster = cluster(wiring, &selection, true).map_err(simulation_failed)?;
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
        .map_err(timing_failed)?;
        let element = task.data_type.bytes() as u64;
        let checked = moved((MOVED_BYTES_MAX / 2 / u64::from(task.ranks)).next_multiple_of(element))?;
        Measurement { count, samples: vec![timed.time], ..checked }
    };
    measured.over_links = Some(OverLinks {
        bound_bytes_per_s: bound(task.collective, wiring),
        predicted_s: selection.predicted_s().unwrap_or(0.0),
        carried_out: None,
    });
    Ok(measured)
}

/// The upper bound of the bandwidth.
fn bound(collective: Collective, wiring: &Wiring) -> Option<f64> {
    let value = |rate: Rate| *rate.numer() as f64 / *rate.denom() as f64;
    let packed = wiring.packed(collective).ok()?;
    Some(value(packed.packing.bound)).filter(|bound| *bound > 0.0)
}

fn simulation_failed(error: impl std::fmt::Display) -> CommandError {
    CommandError::failed(format!("simulation stuck: {error}; report it"))
}

fn timing_failed(error: TimeError) -> CommandError {
    CommandError::failed(format!("not timed: {error}"))
}
