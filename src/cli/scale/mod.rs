//! `pleach scale`: how the time of a collective grows with the ranks, by each algorithm, on links
//! of one kind. Nothing is run on real ranks: [`points`] has the cost model for all numbers of
//! ranks and plans in virtual time where few events do.

use std::path::PathBuf;
use std::time::Duration;

use pleach::collectives::simulate::many::{Bound, Jitter};
use pleach::{Collective, Rank};

use self::sizes::{LinksOfSize, RankList};
use crate::cli::CommandError;
use crate::cli::bench::Size;
use crate::cli::output::{note, print, print_json};
use crate::cli::schedule::collective;

mod points;
mod report;
mod sizes;
mod svg;

/// Arguments of `pleach scale`.
#[derive(Debug, clap::Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:\n  pleach scale all-reduce --topology dgx-h100 --ranks 8..1024 --sizes 1M,1G --svg scale.svg\n  \
    pleach scale all-gather --topology star@12.5 --ranks 8,64,512 --sizes 64M --json\n  \
    pleach scale all-reduce --topology dgx-a100 --ranks 16..128 --sizes 64M --slow-link 0.5 --jitter exponential:200us\n\n\
    A size is the vector of one rank; for all-gather, reduce-scatter, gather, scatter and all-to-all it is the blocks of\n\
    all ranks together. docs/scale.md describes the columns and the limits of the model."
)]
pub(crate) struct Arguments {
    /// all-reduce, reduce, broadcast, all-gather, reduce-scatter, gather, scatter, all-to-all or
    /// barrier
    #[arg(value_parser = collective)]
    collective: Collective,
    /// A preset without its numbers: dgx-a100, dgx-h100, mi250, ring, mesh, torus, star or
    /// fat-tree; [@GB/s] may follow the last five
    #[arg(long, value_name = "PRESET")]
    topology: LinksOfSize,
    /// Numbers of ranks: doubled from the first to the last, or a list, as 8,24,64
    #[arg(long, value_name = "FIRST..LAST|LIST", default_value = "8..16384")]
    ranks: RankList,
    /// Sizes, separated by commas
    #[arg(long, value_name = "BYTES,...", value_delimiter = ',', default_value = "1M,1G")]
    sizes: Vec<Size>,
    /// The root of a reduce, broadcast, gather or scatter
    #[arg(long, value_name = "RANK")]
    root: Option<Rank>,
    /// Leave the slowest link of rank 0 this fraction of its bandwidth; 0 removes the link
    #[arg(long, value_name = "FRACTION", value_parser = fraction)]
    slow_link: Option<f64>,
    /// How late each rank makes the call: uniform:MOST or exponential:MEAN, as exponential:200us
    #[arg(long, value_name = "DISTRIBUTION")]
    jitter: Option<Jitter>,
    /// The seed of the jitter
    #[arg(long, value_name = "SEED", default_value_t = 0, requires = "jitter")]
    seed: u64,
    /// Print one line of JSON for each point
    #[arg(long)]
    json: bool,
    /// Draw time and efficiency over ranks, for the largest size, to an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// A part of a bandwidth, for clap.
fn fraction(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|part| (0.0..=1.0).contains(part)).ok_or_else(|| "give a number from 0 to 1".to_owned())
}

/// What is asked for.
pub(crate) struct Question {
    collective: Collective,
    links: LinksOfSize,
    /// In bytes, ascending.
    sizes: Vec<u64>,
    slow_link: Option<f64>,
    /// With its seed.
    jitter: Option<(Jitter, u64)>,
}

/// An algorithm, a number of ranks and a size.
pub(crate) struct Point {
    ranks: u32,
    /// The size that was asked for, in bytes.
    size: u64,
    /// The same, rounded down to whole blocks.
    bytes: u64,
    /// With its extents.
    algorithm: String,
    family: &'static str,
    bound: Option<Bound>,
    /// The time by the cost model.
    model: Duration,
    /// The time of its plan in virtual time, and how many ranks were carried out; or why there is
    /// none.
    simulated: Result<(Duration, u32), String>,
}

impl Point {
    /// The best known time.
    fn time(&self) -> Duration {
        self.simulated.as_ref().map_or(self.model, |(time, _)| *time)
    }

    /// The time that the bound allows, in seconds.
    fn bound_s(&self) -> Option<f64> {
        let bound = self.bound.filter(|_| self.bytes > 0)?;
        Some(self.bytes as f64 / bound.bytes_per_s())
    }

    /// The part of the bound that is reached.
    fn efficiency(&self) -> Option<f64> {
        Some(self.bound_s()? / self.time().as_secs_f64())
    }
}

/// All points, and the algorithms without points.
pub(crate) struct Outlook {
    question: Question,
    points: Vec<Point>,
    /// By algorithm: of how many ranks, and why.
    missing: Vec<(String, u32, String)>,
}

impl Outlook {
    /// The algorithms without points: the fewest ranks, and why.
    fn remarks(&self) -> Vec<String> {
        let mut told: Vec<&str> = Vec::new();
        let mut remarks = Vec::new();
        for (algorithm, ranks, why) in &self.missing {
            let family = algorithm.split(':').next().unwrap_or_default();
            if !told.contains(&family) {
                told.push(family);
                remarks.push(format!("no {algorithm} of {ranks} ranks: {why}"));
            }
        }
        remarks
    }
}

/// Runs `pleach scale`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let collective = with_root(arguments)?;
    let mut sizes: Vec<u64> = arguments.sizes.iter().map(|size| size.0).collect();
    if collective == Collective::Barrier {
        sizes = vec![0];
    }
    sizes.sort_unstable();
    sizes.dedup();
    let question = Question {
        collective,
        links: arguments.topology.clone(),
        sizes,
        slow_link: arguments.slow_link,
        jitter: arguments.jitter.map(|jitter| (jitter, arguments.seed)),
    };
    let mut outlook = Outlook { question, points: Vec::new(), missing: Vec::new() };
    for (ranks, topology) in arguments.ranks.topologies(&arguments.topology)? {
        let from = outlook.points.len();
        points::add(&mut outlook, ranks, &topology)?;
        if arguments.json {
            outlook.points[from..].iter().try_for_each(|point| print_point(&outlook, point))?;
        }
    }
    if outlook.points.is_empty() {
        let too_short = || "give sizes of at least one byte for each block".to_owned();
        let why = outlook.remarks().pop().unwrap_or_else(too_short);
        return Err(CommandError::usage(format!("no points: {}; {why}", collective.name())));
    }
    if let Some(path) = &arguments.svg {
        std::fs::write(path, svg::picture(&outlook)).map_err(|error| {
            let path = path.display();
            CommandError::usage(format!("picture not written: {path} ({error}); name another file"))
        })?;
    }
    if !arguments.json {
        print("outlook", &report::text(&outlook))?;
        outlook.remarks().iter().for_each(|remark| note(remark));
    }
    Ok(())
}

fn print_point(outlook: &Outlook, point: &Point) -> Result<(), CommandError> {
    print_json("point", &report::object(outlook, point))
}

fn with_root(arguments: &Arguments) -> Result<Collective, CommandError> {
    let collective = arguments.collective;
    match arguments.root {
        None => Ok(collective),
        Some(root) if collective.root().is_none() => {
            Err(CommandError::usage(format!("root {root}: {} has no root; leave it out", collective.name())))
        }
        Some(root) if root >= arguments.ranks.least() => Err(CommandError::usage(format!(
            "root {root}: the fewest ranks are {}; name one of these",
            arguments.ranks.least()
        ))),
        Some(root) => Ok(collective.with_root(root)),
    }
}
