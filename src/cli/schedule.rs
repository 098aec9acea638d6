//! `pleach schedule`: prints the schedule that an algorithm makes.

use std::io::{BufWriter, Write};

use pleach::schedule::generate::{Access, Algorithm, generate};
use pleach::{Collective, Rank};

use super::CommandError;

/// Arguments of `pleach schedule`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example:\n  pleach schedule all-reduce --algorithm ring --ranks 4\n  \
    pleach schedule all-reduce --algorithm grid:2x4 --ranks 8 --mapped > grid.schedule"
)]
pub(crate) struct Arguments {
    /// all-reduce, reduce, broadcast, all-gather, reduce-scatter, gather, scatter, all-to-all,
    /// barrier or send-recv
    #[arg(value_parser = collective)]
    collective: Collective,
    /// direct, eager, eager-tree, exchange, recursive-doubling, halving-doubling, ring,
    /// double-tree, chain, grid:AxB, grid-staged:AxB (any number of ranks up to A·B; also 2d: two
    /// dimensions, balanced) or hierarchical:HxR (H hosts of R ranks; also 3+2, or the host of each
    /// rank: 0,1,0,1)
    #[arg(long, value_name = "NAME")]
    algorithm: String,
    /// How many ranks take part
    #[arg(long, value_name = "N")]
    ranks: u32,
    /// The root of a reduce, broadcast, gather or scatter
    #[arg(long, value_name = "RANK")]
    root: Option<Rank>,
    /// Read and write peers' memory in place, instead of putting into it
    #[arg(long)]
    mapped: bool,
}

/// The collective of a name, for clap; also as other libraries write it, as `all_reduce` or
/// `AllReduce`.
pub(crate) fn collective(name: &str) -> Result<Collective, String> {
    let letters = |name: &str| name.replace(['-', '_'], "").to_ascii_lowercase();
    let known = Collective::NAMES.iter().find(|known| letters(known) == letters(name));
    known
        .and_then(|known| Collective::from_name(known))
        .ok_or_else(|| format!("there are {}", Collective::NAMES.join(" ")))
}

/// Runs `pleach schedule`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let Arguments { algorithm, ranks, mapped, .. } = arguments;
    let collective = match (arguments.collective, arguments.root) {
        (rooted, Some(root)) if rooted.root().is_some() => rooted.with_root(root),
        (other, Some(root)) => {
            return Err(CommandError::usage(format!(
                "root {root}: {} has no root; leave it out",
                other.name()
            )));
        }
        (collective, None) => collective,
    };
    let named = Algorithm::named(algorithm, collective).map_err(|error| {
        CommandError::usage(format!(
            "no such algorithm: '{algorithm}' for {}; use one of {}",
            collective.name(),
            error.known
        ))
    })?;
    let access = if *mapped { Access::Mapped } else { Access::Put };
    let schedule = generate(collective, &named, *ranks, access)
        .map_err(|error| CommandError::usage(format!("no schedule: {collective}; {error}")))?;
    let mut out = BufWriter::new(std::io::stdout().lock());
    match write!(out, "{schedule}").and_then(|()| out.flush()) {
        // A closed pipe is no error.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(CommandError::failed(format!(
            "schedule not printed: standard output ({error}); write it elsewhere"
        ))),
        _ => Ok(()),
    }
}
