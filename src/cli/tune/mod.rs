//! `pleach tune`: which way each collective should go here, measured, and the table that pins it.
//!
//! Every rank carries out the same ways in the same order; rank 0 makes the table of the times and
//! writes it. What is measured and what follows from the times is decided by
//! [`pleach::schedule::tuning::tune`]; `measure` carries it out.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use pleach::schedule::cost::Platform;
use pleach::schedule::tuning::{Tuning, TuningError, TuningRow, TuningSource, TuningTable, tune};
use pleach::schedule::{Access, HostMap};
use pleach::transport::rendezvous::{Fabric, FabricChoice};
use pleach::{Collective, Group, Options};

use super::CommandError;
use super::bench::{Size, fabric_choice};
use super::launch::{Bind, WorldArguments, is_one_of_several, rank_count, rank_or_launch};
use super::schedule::collective;

mod measure;

use measure::Measuring;

/// Ranks that are started where nothing says how many: they have a processor each on any machine.
const DEFAULT_RANKS: u32 = 2;

/// From one size to the next.
const FACTOR: u64 = 4;

/// Longest time for a size that can be asked for, in ms.
const TIME_MAX_MS: i64 = 600_000;

/// Arguments of `pleach tune`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  pleach tune -o tuning\n  \
    mpirun -n 8 pleach tune --fabric tcp --collectives all-reduce,all-gather -o tuning\n  \
    PLEACH_TUNING=tuning pleach bench --fabric shm\n  pleach tune --show tuning\n\n\
    The table is for this fabric and these ranks on their hosts; a file holds one for each, and -o replaces this one's.\n\
    Sizes are those of 'pleach bench'. Times are of f32 sums in registered memory, each the median over rounds in which\n\
    all ways take turns, on the slowest rank.")]
pub(crate) struct Arguments {
    /// Where the table goes; standard output shows it in any case
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How bytes move: shm, tcp, shm+tcp (by host) or auto
    #[arg(long, value_name = "FABRIC", default_value = "auto", value_parser = fabric_choice)]
    fabric: FabricChoice,
    /// How many ranks to start here [default: 2]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    /// Which collectives, with commas between [default: all that have a choice]
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = collective)]
    collectives: Vec<Collective>,
    /// Smallest size
    #[arg(long, value_name = "BYTES", default_value = "8")]
    min: Size,
    /// Largest size
    #[arg(long, value_name = "BYTES", default_value = "16M")]
    max: Size,
    /// About how long each size of a collective is measured
    #[arg(long, value_name = "MS", default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=TIME_MAX_MS))]
    time: u32,
    /// Which processors each rank that is started here is kept on [default: core, where there are
    /// as many as ranks]
    #[arg(long, value_name = "HOW", value_enum)]
    bind: Option<Bind>,
    /// Show what a tuning file says, and measure nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["output", "predicted"])]
    show: Option<PathBuf>,
    /// Show what is chosen without measurements for these ranks on one host, and measure nothing
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
        output.map(Kept::open).transpose()?;
    }
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, DEFAULT_RANKS, arguments.bind)?
    else {
        return Ok(());
    };
    let kept = output.filter(|_| world.rank == 0).map(Kept::open).transpose()?;
    let mut options = Options::from_env_in(world);
    options.fabric = arguments.fabric;
    // What is measured must not depend on what was measured before.
    options.tuning = TuningSource::Nothing;
    let group = Group::join(&options).map_err(CommandError::failed)?;
    measure_all(&group, arguments, &sizes, kept)?;
    group.close().map_err(CommandError::failed)
}

/// Measures one collective after the other; shows it on rank 0, and writes what was measured so far
/// each time.
fn measure_all(
    group: &Group,
    arguments: &Arguments,
    sizes: &[u64],
    mut kept: Option<Kept>,
) -> Result<(), CommandError> {
    let fabric = group.info().fabric.unwrap_or(Fabric::Tcp);
    let plain = TuningTable::new(fabric, group.info().hosts);
    let platform = plain.platform();
    let mut shown = Shown { is_first: group.rank() == 0 };
    shown.line(&format!(
        "measuring {fabric} {}, us a call; the best way, then the next",
        group.info().hosts
    ))?;
    let mut measuring = Measuring::new(group, Duration::from_millis(arguments.time.into()));
    let (mut all, mut rows) = (Vec::new(), Vec::new());
    let mut off = 1.0;
    let mut table = plain.clone();
    for collective in wanted(arguments, &platform)? {
        let mut of_it = Vec::new();
        for &bytes in sizes_of(collective, sizes) {
            let variants = tune::variants(collective, bytes, &platform).map_err(CommandError::failed)?;
            let measured = measuring.measure(collective, bytes, variants).map_err(CommandError::failed)?;
            let measured = measuring.with_best_chunks(measured).map_err(CommandError::failed)?;
            shown.measured(&measured)?;
            of_it.push(measured);
        }
        rows.extend(tune::rows(&of_it));
        all.extend(of_it);
        let (near, far, factor) = tune::models(&all, &platform);
        off = factor;
        table = plain.clone().with_models(&near, &far);
        push_all(&mut table, rows.clone())?;
        if let Some(kept) = &mut kept {
            kept.write(table.clone())?;
        }
    }
    shown.line(&format!("the models are off by a factor of {off:.2} (median)\n\n{table}"))
}

/// The table of the cost model, as it is where nothing is pinned.
fn predict(arguments: &Arguments, sizes: &[u64]) -> Result<(), CommandError> {
    let ranks = rank_count(&arguments.world, arguments.ranks, DEFAULT_RANKS)?;
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

/// What has no data has one size.
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
struct Kept {
    path: PathBuf,
    tuning: Tuning,
}

impl Kept {
    /// Reads what the file holds already, and tries whether it can be written.
    fn open(path: &Path) -> Result<Self, CommandError> {
        let tuning = match Tuning::read(path) {
            Err(TuningError::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {
                Tuning::default()
            }
            Ok(tuning) => tuning,
            Err(error) => return Err(CommandError::usage(format!("not overwritten: {error}"))),
        };
        let kept = Self { path: path.to_owned(), tuning };
        let beside = kept.beside();
        let written = std::fs::write(&beside, "").and_then(|()| std::fs::remove_file(&beside));
        written.map_err(|error| CommandError::usage(kept.unwritten(&error)))?;
        Ok(kept)
    }

    /// Puts a table in the place of the one for the same world. No reader sees half of the file: a
    /// new one takes its place.
    fn write(&mut self, table: TuningTable) -> Result<(), CommandError> {
        self.tuning.insert(table);
        let beside = self.beside();
        let written = std::fs::write(&beside, self.tuning.to_string())
            .and_then(|()| std::fs::rename(&beside, &self.path));
        written.map_err(|error| {
            // It may be there or not.
            let _ = std::fs::remove_file(&beside);
            CommandError::failed(self.unwritten(&error))
        })
    }

    /// A file of this process in the same folder.
    fn beside(&self) -> PathBuf {
        self.path.with_extension(format!("{}.new", std::process::id()))
    }

    fn unwritten(&self, error: &std::io::Error) -> String {
        format!("tuning not written: {} ({error}); name another file", self.path.display())
    }
}

/// What rank 0 shows.
struct Shown {
    is_first: bool,
}

impl Shown {
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
