//! `pleach tune`: measures the best variant of each collective, and writes a tuning table.
//!
//! Every rank runs the same variants in the same order. Rank 0 makes the table from the times and
//! writes the file. [`pleach::schedule::tuning::tune`] decides what is measured and what follows
//! from the times.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pleach::schedule::cost::Platform;
use pleach::schedule::tuning::tune::{Measured, VariantTime};
use pleach::schedule::tuning::{Tuning, TuningError, TuningRow, TuningSource, TuningTable, tune};
use pleach::schedule::{Access, HostMap, Variant};
use pleach::transport::clock;
use pleach::transport::rendezvous::{Fabric, FabricChoice};
use pleach::{Buffer, Collective, CollectiveError, Group, Options, ReduceOp};

use crate::cli::CommandError;
use crate::cli::bench::{Size, fabric_choice};
use crate::cli::launch::{Bind, WorldArguments, is_one_of_several, rank_count, rank_or_launch};
use crate::cli::schedule::collective;

/// Ranks that are started where nothing says how many: they have a processor each on any machine.
const DEFAULT_RANKS: u32 = 2;

/// The ratio of one size to the one before.
const FACTOR: u64 = 4;

/// Longest time for a size that can be asked for, in ms.
const TIME_MAX_MS: i64 = 600_000;

/// Arguments of `pleach tune`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pleach tune -o tuning\n  \
    mpirun -n 8 pleach tune --fabric tcp --collectives all-reduce,all-gather -o tuning\n  \
    PLEACH_TUNING=tuning pleach bench --fabric shm\n  pleach tune --show tuning\n\n\
    The table is for this fabric and these ranks on their hosts. A file holds one table for each such world, and -o\n\
    replaces the table of this world. Sizes are those of 'pleach bench'. Times are of f32 sums in registered memory: the\n\
    median on the slowest rank, over rounds in which all algorithms take turns.")]
pub(crate) struct Arguments {
    /// File of the table, which standard output shows too
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The fabric: shm, tcp, shm+tcp (by host), verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value = "auto", value_parser = fabric_choice)]
    fabric: FabricChoice,
    /// How many ranks to start here [default: 2]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// Collectives, separated by commas [default: all with more than one algorithm]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = collective)]
    collectives: Vec<Collective>,
    /// Smallest size
    #[arg(long, value_name = "BYTES", default_value = "8")]
    min: Size,
    /// Largest size
    #[arg(long, value_name = "BYTES", default_value = "16M")]
    max: Size,
    /// Approximate time for each size of a collective
    #[arg(long, value_name = "MS", default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=TIME_MAX_MS))]
    time: u32,
    /// Processors that each rank started here is bound to [default: core, if there are enough
    /// cores]
    #[arg(long, value_name = "HOW", value_enum)]
    bind: Option<Bind>,
    /// Show the tables of a file, and measure nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["output", "predicted"])]
    show: Option<PathBuf>,
    /// Show the choices of the cost model for these ranks on one host, and measure nothing
    #[arg(long, conflicts_with = "output")]
    predicted: bool,
    #[command(flatten)]
    world: WorldArguments,
}

/// Runs `pleach tune`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    if let Some(path) = &arguments.show {
        let tuning = Tuning::read(path).map_err(CommandError::usage)?;
        return print(&tuning.to_string());
    }
    let sizes = sizes(arguments)?;
    if arguments.predicted {
        return predict(arguments, &sizes);
    }
    let output = arguments.output.as_deref();
    if !is_one_of_several(&arguments.world)? {
        // Before any rank is started: whether the file can take a table.
        output.map(TuningFile::open).transpose()?;
    }
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, DEFAULT_RANKS, arguments.bind)?
    else {
        return Ok(());
    };
    let file = output.filter(|_| world.rank == 0).map(TuningFile::open).transpose()?;
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    // What is measured must not depend on what was measured before.
    options.tuning = TuningSource::Nothing;
    let group = Group::join(&options).map_err(CommandError::failed)?;
    measure_all(&group, arguments, &sizes, file)?;
    group.close().map_err(CommandError::failed)
}

/// Measures one collective after the other; shows it on rank 0, and writes what was measured so far
/// each time.
fn measure_all(
    group: &Group,
    arguments: &Arguments,
    sizes: &[u64],
    mut file: Option<TuningFile>,
) -> Result<(), CommandError> {
    let fabric = group.info().fabric.unwrap_or(Fabric::Tcp);
    let plain = TuningTable::new(fabric, group.info().hosts);
    let platform = plain.platform();
    let mut printer = Printer { is_first: group.rank() == 0 };
    printer.line(&format!(
        "measuring {fabric} {}, us a call; the best way, then the next",
        group.info().hosts
    ))?;
    let mut measuring = Measurer::new(group, Duration::from_millis(arguments.time.into()));
    let (mut all, mut rows) = (Vec::new(), Vec::new());
    let mut off = 1.0;
    let mut table = plain.clone();
    for collective in wanted(arguments, &platform)? {
        let mut of_it = Vec::new();
        for &bytes in sizes_of(collective, sizes) {
            let variants = tune::variants(collective, bytes, &platform).map_err(CommandError::failed)?;
            let measured = measuring.measure(collective, bytes, variants).map_err(CommandError::failed)?;
            let measured = measuring.with_best_chunks(measured).map_err(CommandError::failed)?;
            printer.measured(&measured)?;
            of_it.push(measured);
        }
        rows.extend(tune::rows(&of_it));
        all.extend(of_it);
        let (near, far, factor) = tune::models(&all, &platform);
        off = factor;
        table = plain.clone().with_models(&near, &far);
        push_all(&mut table, rows.clone())?;
        if let Some(file) = &mut file {
            file.write(table.clone())?;
        }
    }
    printer.line(&format!("the models are off by a factor of {off:.2} (median)\n\n{table}"))
}

/// The table of the cost model, as it is where nothing is pinned.
fn predict(arguments: &Arguments, sizes: &[u64]) -> Result<(), CommandError> {
    let ranks = rank_count(&arguments.world, arguments.ranks, DEFAULT_RANKS, 0)?;
    let fabric = match arguments.fabric {
        FabricChoice::Only(fabric) => fabric,
        FabricChoice::Auto => Fabric::Shm,
    };
    let mut table = TuningTable::new(fabric, HostMap::one(ranks));
    let platform = table.platform();
    for collective in wanted(arguments, &platform)? {
        let predicted: Result<Vec<_>, _> = sizes_of(collective, sizes)
            .iter()
            .map(|&bytes| tune::predicted(collective, bytes, &platform))
            .collect();
        push_all(&mut table, tune::rows(&predicted.map_err(CommandError::failed)?))?;
    }
    print(&table.to_string())
}

fn push_all(table: &mut TuningTable, rows: Vec<TuningRow>) -> Result<(), CommandError> {
    rows.into_iter().try_for_each(|row| table.push(row)).map_err(CommandError::failed)
}

/// The collectives that were asked for; or those that can be carried out in more than one way.
fn wanted(arguments: &Arguments, platform: &Platform) -> Result<Vec<Collective>, CommandError> {
    let ranks = platform.ranks();
    if ranks < 2 {
        return Err(CommandError::usage("nothing to choose: one rank has no peers; give --ranks 2 or more"));
    }
    if !arguments.collectives.is_empty() {
        return Ok(arguments.collectives.clone());
    }
    let has_selection = |collective: &Collective| {
        tune::variants(*collective, 1 << 20, platform).is_ok_and(|variants| {
            let all = variants.iter().filter(|variant| variant.window.is_none());
            all.count() > 1 || (platform.access == Access::Mapped && variants.len() > 1)
        })
    };
    Ok(Collective::ALL.into_iter().filter(has_selection).collect())
}

/// A collective without data has one size.
fn sizes_of(collective: Collective, sizes: &[u64]) -> &[u64] {
    if collective == Collective::Barrier { &sizes[..1] } else { sizes }
}

fn sizes(arguments: &Arguments) -> Result<Vec<u64>, CommandError> {
    let (min, max) = (arguments.min, arguments.max);
    if min > max || min.0 == 0 {
        return Err(CommandError::typed(format!(
            "bad sizes: --min {min} and --max {max}; give a smallest above 0 and a largest not below it"
        )));
    }
    let mut sizes: Vec<u64> = std::iter::successors(Some(min.0), |size| size.checked_mul(FACTOR))
        .take_while(|size| *size <= max.0)
        .collect();
    if sizes.last() != Some(&max.0) {
        sizes.push(max.0);
    }
    Ok(sizes)
}

/// The file that is written, and the tables that it holds.
struct TuningFile {
    path: PathBuf,
    tuning: Tuning,
}

impl TuningFile {
    /// Reads what the file holds already, and tries whether it can be written.
    fn open(path: &Path) -> Result<Self, CommandError> {
        let tuning = match Tuning::read(path) {
            Err(TuningError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Tuning::default()
            }
            Ok(tuning) => tuning,
            Err(error) => return Err(CommandError::usage(format!("not overwritten: {error}"))),
        };
        let file = Self { path: path.to_owned(), tuning };
        let temporary_path = file.temporary_path();
        let written =
            std::fs::write(&temporary_path, "").and_then(|()| std::fs::remove_file(&temporary_path));
        written.map_err(|error| CommandError::usage(file.unwritten(&error)))?;
        Ok(file)
    }

    /// Puts a table in the place of the one for the same world. No reader sees half of the file: a
    /// new one takes its place.
    fn write(&mut self, table: TuningTable) -> Result<(), CommandError> {
        self.tuning.insert(table);
        let temporary_path = self.temporary_path();
        let written = std::fs::write(&temporary_path, self.tuning.to_string())
            .and_then(|()| std::fs::rename(&temporary_path, &self.path));
        written.map_err(|error| {
            // It may be there or not.
            let _ = std::fs::remove_file(&temporary_path);
            CommandError::failed(self.unwritten(&error))
        })
    }

    /// A file of this process in the same folder.
    fn temporary_path(&self) -> PathBuf {
        self.path.with_extension(format!("{}.new", std::process::id()))
    }

    fn unwritten(&self, error: &std::io::Error) -> String {
        format!("tuning not written: {} ({error}); name another file", self.path.display())
    }
}

/// The output of rank 0.
struct Printer {
    is_first: bool,
}

impl Printer {
    fn line(&mut self, text: &str) -> Result<(), CommandError> {
        if self.is_first { print(&format!("{text}\n")) } else { Ok(()) }
    }

    fn measured(&mut self, measured: &tune::Measured) -> Result<(), CommandError> {
        let tune::Measured { collective, bytes, timed } = measured;
        let mut line = format!("{:<14} {:>5}", collective.name(), Size(*bytes).to_string());
        for tune::VariantTime { variant, seconds } in timed.iter().take(2) {
            line += &format!("  {:>10.2} {:<32}", seconds * 1e6, variant.to_string());
        }
        self.line(line.trim_end())
    }
}

fn print(text: &str) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    let printed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    printed.map_err(|error| CommandError::failed(format!("output closed: {error}; keep reading it")))
}

// Measures variants in turns. All decisions come from numbers that all ranks share, so all ranks
// make the same calls.

/// Shortest sample: what is shorter is mostly the clock's and the barrier's time.
const SAMPLE_MIN: Duration = Duration::from_micros(200);

/// The largest number of calls in a sample.
const CALLS_MAX: usize = 200;

/// Calls of a way before its first sample: plans are made, memory is touched.
const WARMUP: usize = 2;

/// A variant whose first sample took this many times as long as the best one's is dropped.
const DROP_FACTOR: f64 = 2.5;

/// Least and most rounds in which all ways take turns.
const ROUNDS_MIN: u128 = 5;
const ROUNDS_MAX: u128 = 41;

/// Measures collectives as the module describes.
struct Measurer<'a> {
    group: &'a Group,
    /// The approximate time for each size.
    time: Duration,
}

/// The memory of a call, and what is called.
struct Call {
    collective: Collective,
    input: Buffer<f32>,
    output: Option<Buffer<f32>>,
}

impl<'a> Measurer<'a> {
    fn new(group: &'a Group, time: Duration) -> Self {
        Self { group, time }
    }

    /// Times all ways for a size, in turns; the quickest comes first. Ways for which there is not
    /// enough scratch are left out.
    fn measure(
        &mut self,
        collective: Collective,
        bytes: u64,
        variants: Vec<Variant>,
    ) -> Result<Measured, CollectiveError> {
        let mut call = Call::new(self.group, collective, bytes)?;
        let mut contestants = Vec::new();
        let mut refused = Vec::new();
        for variant in variants {
            let group = self.group.with_variant(variant.clone());
            // Before anything has begun.
            refused.push(match call.repeat(&group, WARMUP) {
                Ok(()) => 0,
                Err(CollectiveError::TooLarge(_)) => 1,
                Err(error) => return Err(error),
            });
            contestants.push((variant, group));
        }
        // Ranks that have no part in a message are refused nothing.
        self.group.all_reduce(&mut refused[..], ReduceOp::Max)?;
        let mut refused = refused.into_iter();
        contestants.retain(|_| refused.next() == Some(0u32));
        let first: Result<Vec<_>, _> =
            contestants.iter().map(|(_, group)| self.sample(&mut call, group, 1)).collect();
        let first = self.slowest(&first?)?;
        let best = first.iter().min().copied().unwrap_or_default().as_secs_f64();
        let is_hopeful = |time: &Duration| time.as_secs_f64() <= best * DROP_FACTOR;
        let mut hopeful: Vec<_> =
            contestants.into_iter().zip(first).filter(|(_, time)| is_hopeful(time)).collect();
        let calls: Vec<usize> = hopeful
            .iter()
            .map(|(_, time)| (SAMPLE_MIN.as_nanos() / time.as_nanos().max(1)) as usize + 1)
            .map(|calls| calls.min(CALLS_MAX))
            .collect();
        let round: u128 =
            hopeful.iter().zip(&calls).map(|((_, time), calls)| time.as_nanos() * *calls as u128).sum();
        let rounds = (self.time.as_nanos() / round.max(1)).clamp(ROUNDS_MIN, ROUNDS_MAX) as usize;
        let mut own = Vec::with_capacity(rounds * hopeful.len());
        for turn in 0..rounds {
            for place in 0..hopeful.len() {
                // Beginning with another one each time.
                let place = (place + turn) % hopeful.len();
                own.push((place, self.sample(&mut call, &hopeful[place].0.1, calls[place])?));
            }
        }
        own.sort_by_key(|(place, _)| *place);
        let own: Vec<Duration> = own.into_iter().map(|(_, time)| time).collect();
        let all = self.slowest(&own)?;
        let mut timed: Vec<VariantTime> = hopeful
            .drain(..)
            .zip(all.chunks_exact(rounds))
            .map(|(((variant, _), _), samples)| VariantTime {
                variant,
                seconds: median(samples).as_secs_f64(),
            })
            .collect();
        timed.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        Ok(Measured { collective, bytes, timed })
    }

    /// Looks for the chunks by which the best way takes least, and measures the two against each
    /// other. Nothing changes where calls are not cut.
    fn with_best_chunks(&mut self, measured: Measured) -> Result<Measured, CollectiveError> {
        let Measured { collective, bytes, mut timed } = measured;
        let best = timed.first().map(|timed| timed.variant.clone());
        let Some((variant, mut search)) =
            best.and_then(|variant| Some((variant.clone(), tune::chunk_search(&variant, bytes)?)))
        else {
            return Ok(Measured { collective, bytes, timed });
        };
        let with = |chunk_bytes: u64| Variant { chunk_bytes: Some(chunk_bytes), ..variant.clone() };
        let mut call = Call::new(self.group, collective, bytes)?;
        while !search.is_settled() {
            let group = self.group.with_variant(with(search.chunk_bytes()));
            call.repeat(&group, 1)?;
            let own: Result<Vec<_>, _> = (0..ROUNDS_MIN).map(|_| self.sample(&mut call, &group, 1)).collect();
            let taken = median(&self.slowest(&own?)?);
            search.measured((u128::from(bytes) * 1_000_000_000 / taken.as_nanos().max(1)) as u64);
        }
        let variants = vec![variant.clone(), with(search.chunk_bytes())];
        timed.retain(|timed| timed.variant != variant);
        timed.extend(self.measure(collective, bytes, variants)?.timed);
        timed.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        Ok(Measured { collective, bytes, timed })
    }

    /// The mean time of a call on this rank, over `calls` calls in a row.
    fn sample(&self, call: &mut Call, variant: &Group, calls: usize) -> Result<Duration, CollectiveError> {
        self.group.barrier()?;
        let begin = clock::now();
        call.repeat(variant, calls)?;
        Ok((clock::now() - begin) / calls as u32)
    }

    /// Each sample's time on the rank that took longest.
    fn slowest(&self, own: &[Duration]) -> Result<Vec<Duration>, CollectiveError> {
        let mut times: Vec<u64> = own.iter().map(|time| time.as_nanos() as u64).collect();
        self.group.all_reduce(&mut times, ReduceOp::Max)?;
        Ok(times.into_iter().map(Duration::from_nanos).collect())
    }
}

fn median(samples: &[Duration]) -> Duration {
    let mut samples = samples.to_vec();
    samples.sort_unstable();
    samples[samples.len() / 2]
}

impl Call {
    /// For a size as `pleach bench` counts it: of one rank's vector, or of the blocks of all ranks
    /// together.
    fn new(group: &Group, collective: Collective, bytes: u64) -> Result<Self, CollectiveError> {
        let ranks = group.world_size() as usize;
        let elements = (bytes as usize / size_of::<f32>()).max(1);
        let block = (elements / ranks).max(1);
        let (input, output) = match collective {
            Collective::AllGather => (block, Some(block * ranks)),
            Collective::ReduceScatter => (block * ranks, Some(block)),
            Collective::Gather { .. } => (block, Some(block * ranks)),
            Collective::Scatter { .. } => (block * ranks, Some(block)),
            Collective::AllToAll => (block * ranks, Some(block * ranks)),
            _ => (elements, None),
        };
        let output = output.map(|elements| group.buffer(elements)).transpose()?;
        Ok(Self { collective, input: group.buffer(input)?, output })
    }

    /// Makes `calls` calls in a row, on zeros, whose sums are zeros.
    fn repeat(&mut self, group: &Group, calls: usize) -> Result<(), CollectiveError> {
        (0..calls).try_for_each(|_| self.once(group))
    }

    fn once(&mut self, group: &Group) -> Result<(), CollectiveError> {
        let Self { collective, input, output } = self;
        match (*collective, output) {
            (Collective::AllReduce, _) => group.all_reduce(input, ReduceOp::Sum),
            (Collective::Reduce { root }, _) => group.reduce(input, ReduceOp::Sum, root),
            (Collective::Broadcast { root }, _) => group.broadcast(input, root),
            (Collective::AllGather, Some(output)) => group.all_gather(input, output),
            (Collective::ReduceScatter, Some(output)) => group.reduce_scatter(input, output, ReduceOp::Sum),
            (Collective::Gather { root }, Some(output)) => group.gather(input, output, root),
            (Collective::Scatter { root }, Some(output)) => group.scatter(input, output, root),
            (Collective::AllToAll, Some(output)) => group.all_to_all(input, output),
            (Collective::SendRecv { from, to }, _) if group.rank() == from => group.send(input, to),
            (Collective::SendRecv { from, to }, _) if group.rank() == to => group.recv(input, from),
            (Collective::Barrier, _) => group.barrier(),
            // The other ranks of a message have no part in it.
            _ => Ok(()),
        }
    }
}
