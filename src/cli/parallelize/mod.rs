//! `pleach parallelize`: how synchronous training of a network is split over ranks, and the time
//! and speed-up that follow (Das et al., arXiv 1602.06709). Nothing is trained or measured.

use std::fmt::Display;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use pleach_training::parallelize::{
    FILE_BYTES_MAX, FileError, MACHINES, Machine, NETWORKS, Network, OrderRule, Plan, PlanError, Planner,
    Split, machine_from_toml, network_from_toml,
};

use crate::cli::CommandError;
use crate::cli::error::did_you_mean;
use crate::cli::output::{print, print_json, visible};

mod report;
mod svg;

/// Most ranks of the list that is taken if none is given.
const DEFAULT_RANKS_MAX: u32 = 128;

/// Most numbers of ranks in one call.
const RANKS_LISTED_MAX: usize = 1_024;

/// Arguments of `pleach parallelize`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Example:\n  pleach parallelize vgg-a --batch 512 --ranks 16,64,128\n  \
    pleach parallelize resnet-50 --batch 1024 --machine aws-10g --svg resnet.svg\n  \
    pleach parallelize model.toml --batch 256 --machine cluster.toml --split groups=4 --json\n\n\
    Models: vgg-a, overfeat-fast, dnn-7, resnet-50. Machines: haswell-aries, haswell-fdr, aws-10g.\n\
    docs/parallelize.md describes the model, the files and the figures."
)]
pub(crate) struct Arguments {
    /// A built-in network, or a TOML file with its layers
    #[arg(value_name = "MODEL|FILE")]
    model: String,
    /// Images of a minibatch, over all ranks
    #[arg(long, value_name = "B")]
    batch: u64,
    /// Numbers of ranks, as 16,64,128 [default: powers of two to 128]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    ranks: Vec<u32>,
    /// A built-in machine, or a TOML file with its rates
    #[arg(long, value_name = "NAME|FILE", default_value = "haswell-aries")]
    machine: String,
    /// How fully connected layers are split: auto, data, model or groups=G
    #[arg(long, value_name = "SPLIT", default_value_t = Split::Auto)]
    split: Split,
    /// In which order weight gradients are exchanged
    #[arg(long, value_name = "ORDER", value_enum, default_value_t = OrderName::Planned)]
    order: OrderName,
    /// Print one line of JSON for each number of ranks
    #[arg(long)]
    json: bool,
    /// Draw the speed-up over ranks, and the layers on most ranks, to an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum OrderName {
    /// So that the next forward pass waits least
    Planned,
    /// First come, first served
    Fifo,
}

/// What was asked for, with a plan for each number of ranks.
struct Outlook {
    network: Network,
    machine: Machine,
    batch: u64,
    plans: Vec<Plan>,
    /// The optimal design point, unless the groups are given: few ranks have not as many.
    design_point: Option<u32>,
}

impl Outlook {
    /// The plan for most ranks.
    fn largest(&self) -> &Plan {
        self.plans.iter().max_by_key(|plan| plan.ranks()).expect("there is a number of ranks")
    }
}

/// Runs `pleach parallelize`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let network = network(&arguments.model)?;
    let machine = machine(&arguments.machine)?;
    let outlook = outlook(arguments, network, machine)?;
    if let Some(path) = &arguments.svg {
        std::fs::write(path, svg::picture(&outlook)).map_err(|error| {
            let path = path.display();
            CommandError::usage(format!("picture not written: {path} ({error}); name another file"))
        })?;
    }
    if arguments.json {
        return outlook.plans.iter().try_for_each(|plan| print_json("plan", &report::object(&outlook, plan)));
    }
    print("plan", &report::text(&outlook))
}

fn outlook(arguments: &Arguments, network: Network, machine: Machine) -> Result<Outlook, CommandError> {
    let ranks = ranks(arguments)?;
    let order = match arguments.order {
        OrderName::Planned => OrderRule::Planned,
        OrderName::Fifo => OrderRule::Fifo,
    };
    let refused = |error: PlanError| CommandError::usage(format!("no plan: {error}"));
    let planner = Planner::new(&network, &machine, arguments.batch);
    let planner = planner.with_split(arguments.split).with_order(order);
    let plans = ranks.into_iter().map(|ranks| planner.plan(ranks)).collect::<Result<_, _>>();
    let plans = plans.map_err(refused)?;
    let design_point = match arguments.split {
        Split::Groups(_) => None,
        _ => Some(planner.design_point().map_err(refused)?),
    };
    Ok(Outlook { batch: arguments.batch, design_point, plans, network, machine })
}

/// The numbers of ranks: those of the arguments, or powers of two in groups that were asked for.
fn ranks(arguments: &Arguments) -> Result<Vec<u32>, CommandError> {
    if arguments.ranks.len() > RANKS_LISTED_MAX {
        return Err(CommandError::usage(format!(
            "too many plans: {} numbers of ranks; give at most {RANKS_LISTED_MAX}",
            arguments.ranks.len()
        )));
    }
    if !arguments.ranks.is_empty() {
        return Ok(arguments.ranks.clone());
    }
    let first = if let Split::Groups(groups) = arguments.split { groups } else { 1 };
    let doubled = std::iter::successors(Some(first), |ranks| ranks.checked_mul(2));
    Ok(doubled.take_while(|&ranks| ranks == first || ranks <= DEFAULT_RANKS_MAX).collect())
}

fn network(name: &str) -> Result<Network, CommandError> {
    let built_in = Network::named(name);
    built_in.map_or_else(|| from_file("model", name, &NETWORKS, network_from_toml), Ok)
}

fn machine(name: &str) -> Result<Machine, CommandError> {
    let built_in = Machine::named(name);
    built_in.map_or_else(|| from_file("machine", name, &MACHINES, machine_from_toml), Ok)
}

/// What a file describes; `what` it is, and what else may be named in its place.
fn from_file<T>(
    what: &str,
    name: &str,
    built_in: &[&str],
    read: impl FnOnce(&str) -> Result<T, FileError>,
) -> Result<T, CommandError> {
    let shown = visible(name);
    let path = Path::new(name);
    if !path.exists() {
        return Err(CommandError::usage(format!(
            "no such {what}: '{shown}'{}; there are {}, or name a TOML file",
            did_you_mean(built_in.iter().copied(), name),
            built_in.join(", ")
        )));
    }
    let wrong = |error: &dyn Display| {
        CommandError::usage(format!("no {what}: {shown}: {error}; docs/parallelize.md shows one"))
    };
    let mut bytes = Vec::new();
    // One byte more than may be, so that a longer file is seen to be longer.
    let limit = FILE_BYTES_MAX as u64 + 1;
    File::open(path)
        .and_then(|file| file.take(limit).read_to_end(&mut bytes))
        .map_err(|error| wrong(&error))?;
    let text = std::str::from_utf8(&bytes).map_err(|error| wrong(&error));
    // A character may be cut at the limit.
    if bytes.len() > FILE_BYTES_MAX {
        return Err(wrong(&FileError::TooLong));
    }
    read(text?).map_err(|error| wrong(&error))
}
