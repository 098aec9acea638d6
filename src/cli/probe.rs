//! `pleach probe`: measures the links between ranks and saves them as a topology.

use std::path::PathBuf;
use std::time::Duration;

use pleach::transport::rendezvous::FabricChoice;
use pleach::{Group, Options};

use super::CommandError;
use super::launch::{WorldArguments, rank_or_launch};

/// Ranks that are started where nothing says how many.
const DEFAULT_RANKS: u32 = 2;

/// How long a message of a measurement may take: also over slow links.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Arguments of `pleach probe`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  pleach probe --ranks 4 -o topology.toml\n  \
    mpirun -n 8 pleach probe --fabric tcp -o topology.toml\n  \
    pleach bench all-reduce --fabric sim --topology topology.toml\n\n\
    Every pair of ranks is measured, in rounds of pairs without a common rank. Bandwidths and latencies are rounded to two\n\
    digits. Rank 0 writes the file."
)]
pub(crate) struct Arguments {
    /// The fabric: shm, tcp, shm+tcp (by host), verbs, shm+verbs or auto
    #[arg(long, value_name = "FABRIC", default_value = "auto")]
    fabric: FabricChoice,
    /// File of the topology
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// How many ranks to start here [default: 2]
    #[arg(long, value_name = "N")]
    ranks: Option<u32>,
    #[command(flatten)]
    world: WorldArguments,
}

/// Runs `pleach probe`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let Some(world) = rank_or_launch(&arguments.world, arguments.ranks, DEFAULT_RANKS, None)? else {
        return Ok(());
    };
    let mut options = Options::from_env_in(world);
    (options.fabric, options.timeout) = (arguments.fabric, TIMEOUT);
    let group = Group::join(&options).map_err(CommandError::failed)?;
    let topology = group.probe().map_err(CommandError::failed)?;
    let path = arguments.output.display();
    let saved = match group.rank() {
        0 => std::fs::write(&arguments.output, topology.to_toml()).map_err(|error| {
            CommandError::failed(format!(
                "topology not saved: {path} ({error}); name a file that can be written with -o"
            ))
        }),
        _ => Ok(()),
    };
    group.close().map_err(CommandError::failed)?;
    saved
}
