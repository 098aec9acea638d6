//! `pleach run`: starts local ranks of any command.

use std::ffi::OsString;

use pleach::transport::rendezvous::{Rendezvous, WORLD_SIZE_MAX};

use super::CommandError;
use super::bounds::Bounds;
use super::launch::{Bind, Launch, Outliving, Output, not_found};

/// How many times a rank is started anew where nothing says how often.
const RESTARTS: u32 = 3;

/// Arguments of `pleach run`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  \
    pleach run -n 4 -- ./my-training-program --epochs 3\n\n\
    Two hosts of four ranks each; the secret is written once and copied to both:\n  \
    pleach secret job.secret\n  \
    PLEACH_SECRET_FILE=job.secret pleach run -n 4 --world-size 8 --first-rank 0 --rendezvous tcp://node-0:4000 -- ./my-training-program   # on node-0\n  \
    PLEACH_SECRET_FILE=job.secret pleach run -n 4 --world-size 8 --first-rank 4 --rendezvous tcp://node-0:4000 -- ./my-training-program   # on the other\n\n\
    Ranks on several hosts listen on the address by which they reach the rendezvous; PLEACH_INTERFACE chooses another\n\
    address. A job of a session goes on without a rank that has died, and the rank joins it again:\n  \
    pleach run -n 4 --elastic=2:4 --restarts 10 -- ./my-training-program\n\n\
    'pleach doctor --listen' on one host and 'pleach doctor --peer HOST' on another test whether they can join."
)]
pub(crate) struct Arguments {
    /// How many ranks to start here
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(WORLD_SIZE_MAX)))]
    ranks: u32,
    /// The number of ranks on all hosts [default: N]
    #[arg(long, value_name = "W", requires = "rendezvous")]
    world_size: Option<u32>,
    /// Number of the first rank here
    #[arg(long, value_name = "F", default_value_t = 0)]
    first_rank: u32,
    /// Rendezvous of the ranks of all hosts: tcp://HOST:PORT or file:///DIR, or
    /// etcd[s]://HOST:PORT/PREFIX or c10d://HOST:PORT [default: a free port
    /// of this host]
    #[arg(long, value_name = "ADDRESS")]
    rendezvous: Option<Rendezvous>,
    /// Processors that each rank is bound to [default: share, if there are enough processors]
    #[arg(long, value_name = "HOW", value_enum)]
    bind: Option<Bind>,
    /// When ranks speak TLS over TCP [default: PLEACH_TLS, or where an address is not loopback]
    #[arg(long, value_name = "MODE", value_parser = ["off", "on", "require"])]
    tls: Option<String>,
    /// Restart a rank that has died; the program must use a session. The other ranks go on, and
    /// the restarted rank joins them. If this launcher has started all ranks, the job ends when
    /// fewer than MIN run and no restart is left. The job succeeds if the last rank to end has
    /// status 0 [without a value: 1:W]
    #[arg(long, value_name = "MIN:MAX", num_args = 0..=1, require_equals = true)]
    elastic: Option<Option<Bounds>>,
    /// How many times a rank is started anew, all ranks together [default: 3]
    #[arg(long, value_name = "K", requires = "elastic")]
    restarts: Option<u32>,
    /// The command and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs `pleach run`.
pub(crate) fn run(arguments: Arguments) -> Result<(), CommandError> {
    let Arguments { ranks, first_rank, rendezvous, bind, command, tls, .. } = arguments;
    let world_size = arguments.world_size.unwrap_or(ranks);
    if world_size > WORLD_SIZE_MAX || first_rank.checked_add(ranks).is_none_or(|end| end > world_size) {
        return Err(CommandError::usage(format!(
            "ranks outside the world: {ranks} ranks from {first_rank} in a world of {world_size}; set --world-size (at most {WORLD_SIZE_MAX}) and --first-rank"
        )));
    }
    if let Some(reason) = not_found(&command[0]) {
        return Err(CommandError::usage(reason));
    }
    let bounds = arguments.elastic.map(|bounds| bounds.unwrap_or(Bounds::up_to(world_size)));
    let restarts = arguments.restarts.unwrap_or(RESTARTS);
    let outliving = bounds.map(|bounds| Outliving::new(bounds, restarts));
    if let Some(bounds) = bounds.filter(|bounds| !bounds.allow(world_size)) {
        return Err(CommandError::usage(format!(
            "ranks contradict: {world_size} ranks, and --elastic={bounds}; give a number from {} to {}",
            bounds.fewest(),
            bounds.most()
        )));
    }
    let output = Output::Prefixed;
    // The command may have as many threads as it likes.
    let usual_bind = Bind::Share;
    let launch = Launch {
        ranks,
        first_rank,
        world_size,
        rendezvous,
        command,
        output,
        bind,
        usual_bind,
        tls,
        outliving,
    };
    // Whatever the command's own status says, for this one it is a job that failed.
    launch.run().map_err(|error| CommandError::Failed(error.into_text()))
}
