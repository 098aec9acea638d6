//! `pleach graph analyze`: a model's parts, the tensors that cross, and the memory of each part.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use pleach::graph::partition::Part;
use pleach::graph::placement::{PlacementError, Table};
use pleach::graph::plan::{Checked, Effort, MemoryPlan};
use pleach::graph::{Costs, Graph, Machine, Partition, Placement};
use pleach::transport::clock;

use super::{json, rates, report, source, svg};
use crate::cli::CommandError;
use crate::cli::bench::Size;
use crate::cli::output::{print, print_json, visible};

/// Arguments of `pleach graph analyze`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  pleach graph analyze model.onnx --ranks 4\n  \
    pleach graph analyze model.onnx --ranks 2 --place min-cut --imbalance 10 --dim batch=8 --svg parts.svg\n  \
    pleach graph analyze model.onnx --place ranks.txt --memory 2G -o placed.onnx --json\n\n\
    FILE of --place has a line 'PATTERN RANK' for each name or pattern (*, ?) of nodes; the first that matches decides.\n\
    docs/graph.md describes the forms of graphs and what is computed.")]
pub(super) struct Arguments {
    /// An ONNX file, or a graph as text or JSON
    model: PathBuf,
    /// How many ranks run the model [default: 1, or as many as the stages or FILE name]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// pipeline (contiguous parts, least bottleneck), min-cut (fewest bytes that cross), stages
    /// (pipeline_stage in the model), or a table of names and ranks
    #[arg(long, value_name = "pipeline|min-cut|stages|FILE", default_value = "pipeline")]
    place: String,
    /// Bind a symbol in the dimensions to a size; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = named_size)]
    dim: Vec<(String, u64)>,
    /// The memory of a rank for weights and buffers, such as 512M or 16G
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// For min-cut: how much longer than the average a rank may compute [default: no limit]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    imbalance: Option<u32>,
    /// Estimate the time of nodes by the rates of a typical machine, or by rates measured here
    #[arg(long, value_enum, default_value_t = CostSource::Estimated)]
    costs: CostSource,
    /// How buffers get their places in the arena
    #[arg(long, value_enum, default_value_t = Planner::Search)]
    planner: Planner,
    /// How long the search for better places may take, all parts together
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(0..=3_600_000))]
    effort: u64,
    /// Draw the parts to an SVG file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the model with the rank of each node as its pipeline_stage
    #[arg(short, long, value_name = "MODEL")]
    output: Option<PathBuf>,
    /// Print the analysis as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum CostSource {
    Estimated,
    Measured,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Planner {
    Search,
    BestFit,
    Tflite,
    Xla,
}

/// `NAME=VALUE`, for clap.
fn named_size(text: &str) -> Result<(String, u64), String> {
    let wrong = || "write the name of a dimension and its size, such as batch=8".to_owned();
    let (name, size) = text.split_once('=').ok_or_else(wrong)?;
    let size = size.parse().ok().filter(|size| *size > 0).ok_or_else(wrong)?;
    if name.is_empty() { Err(wrong()) } else { Ok((name.to_owned(), size)) }
}

/// What was found out about a model.
pub(super) struct Analysis {
    /// As the person wrote it.
    pub(super) model: String,
    pub(super) graph: Graph,
    pub(super) placement: Placement,
    pub(super) place: String,
    pub(super) partition: Partition,
    pub(super) costs: Costs,
    pub(super) cost_source: CostSource,
    /// By rank.
    pub(super) plans: Vec<Checked>,
    /// By rank: nanoseconds of computing.
    pub(super) compute_ns: Vec<u64>,
}

impl Analysis {
    /// A rank's share of all computing, from 0 to 1.
    pub(super) fn share(&self, rank: usize) -> f64 {
        let all: u64 = self.compute_ns.iter().sum();
        self.compute_ns[rank] as f64 / all.max(1) as f64
    }
}

/// By rank: nanoseconds of computing.
fn compute_ns(partition: &Partition, placement: &Placement, costs: &Costs) -> Vec<u64> {
    let of = |part: &Part| {
        let placed = part.nodes.iter().filter(|&&node| placement.rank_of(node).is_some());
        placed.map(|node| costs.node_ns[node.index()]).sum()
    };
    partition.parts().iter().map(of).collect()
}

/// Runs `pleach graph analyze`.
pub(super) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let model = arguments.model.display().to_string();
    let (source, graph) = source::read(&arguments.model)?;
    let wrong = |error: &dyn Display| {
        CommandError::usage(format!("no analysis: {model}, {}", visible(&error.to_string())))
    };
    let dims: Vec<(&str, u64)> = arguments.dim.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    let graph = graph.with_dims(&dims).map_err(|error| wrong(&error))?;
    let machine = match arguments.costs {
        CostSource::Estimated => Machine::TYPICAL,
        CostSource::Measured => rates::measured(),
    };
    let costs = Costs::estimated(&graph, &machine);
    let placement = place(arguments, &graph, &costs)?;
    let partition = Partition::new(&graph, &placement).map_err(|error| wrong(&error))?;
    let plans = plans(arguments, &partition)?;
    let (place, cost_source) = (arguments.place.clone(), arguments.costs);
    let compute_ns = compute_ns(&partition, &placement, &costs);
    let analysis =
        Analysis { model, graph, placement, place, partition, costs, cost_source, plans, compute_ns };
    refuse_large_parts(arguments, &analysis)?;
    if let Some(path) = &arguments.output {
        source::write(path, &source, &analysis.graph, &analysis.placement, &analysis.partition)?;
    }
    if let Some(path) = &arguments.svg {
        source::write_file(path, svg::picture(&analysis).as_bytes())?;
    }
    if arguments.json {
        return print_json("analysis", &json::object(&analysis));
    }
    print("analysis", &report::text(&analysis))
}

fn place(arguments: &Arguments, graph: &Graph, costs: &Costs) -> Result<Placement, CommandError> {
    let ranks = arguments.ranks;
    if arguments.imbalance.is_some() && arguments.place != "min-cut" {
        return Err(CommandError::usage(format!(
            "no such limit: --imbalance with --place {}; give it with --place min-cut",
            arguments.place
        )));
    }
    let memory = arguments.memory.map(|Size(bytes)| bytes);
    let placed = match arguments.place.as_str() {
        "pipeline" => Placement::pipeline(graph, ranks.unwrap_or(1), costs, memory),
        "min-cut" => Placement::min_cut(graph, ranks.unwrap_or(1), costs, arguments.imbalance),
        "stages" => Placement::stages(graph),
        file => Placement::table(graph, &table(Path::new(file))?, ranks),
    };
    let model = arguments.model.display();
    let placement = placed.map_err(|error| {
        let text = format!("no placement: {model}, {}", visible(&error.to_string()));
        match error {
            PlacementError::Memory { .. } | PlacementError::Imbalance { .. } => CommandError::failed(text),
            _ => CommandError::usage(text),
        }
    })?;
    match ranks.filter(|&ranks| ranks != placement.ranks()) {
        Some(ranks) => Err(CommandError::usage(format!(
            "no placement: {model}, the stages are for {} ranks, not for {ranks}; leave --ranks out",
            placement.ranks()
        ))),
        None => Ok(placement),
    }
}

fn table(path: &Path) -> Result<Table, CommandError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        CommandError::usage(format!(
            "no placement: --place {shown} ({error}); use pipeline, min-cut, stages or a file with a table"
        ))
    })?;
    Table::parse(&text)
        .map_err(|error| CommandError::usage(format!("no placement: {shown}, {error}; correct it there")))
}

/// Plans the memory of each part, and has each plan checked.
fn plans(arguments: &Arguments, partition: &Partition) -> Result<Vec<Checked>, CommandError> {
    let end_ns = clock::now().0.saturating_add(arguments.effort * 1_000_000);
    let mut plans = Vec::new();
    for (place, part) in partition.parts().iter().enumerate() {
        let buffers = part.plan_buffers();
        let plan = match arguments.planner {
            Planner::BestFit => MemoryPlan::best_fit(&buffers),
            Planner::Tflite => MemoryPlan::tflite(&buffers),
            Planner::Xla => MemoryPlan::xla(&buffers),
            Planner::Search => {
                // What earlier parts left is shared by those that remain.
                let now_ns = clock::now().0;
                let parts = (partition.parts().len() - place) as u64;
                let until_ns = now_ns + end_ns.saturating_sub(now_ns) / parts;
                MemoryPlan::search(&buffers, Effort::while_it_holds(|| clock::now().0 < until_ns))
            }
        };
        let checked = plan.check(&buffers).map_err(|flaw| {
            CommandError::failed(format!(
                "wrong memory plan: rank {}, {flaw}; this is a defect of pleach, please report it",
                part.rank
            ))
        })?;
        plans.push(checked);
    }
    Ok(plans)
}

/// Weights and arena have to fit the memory of a rank.
fn refuse_large_parts(arguments: &Arguments, analysis: &Analysis) -> Result<(), CommandError> {
    let Some(Size(limit)) = arguments.memory else { return Ok(()) };
    for (part, plan) in analysis.partition.parts().iter().zip(&analysis.plans) {
        let needed = part.weight_bytes(&analysis.graph).saturating_add(plan.bytes);
        if needed > limit {
            return Err(CommandError::failed(format!(
                "no placement: {}, rank {} needs {needed} bytes for weights and buffers, {} more than --memory {limit}; \
                 allow more memory or take more ranks",
                analysis.model,
                part.rank,
                needed - limit
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dimension_has_a_name_and_a_size() {
        assert_eq!(named_size("batch=8"), Ok(("batch".to_owned(), 8)));
        for text in ["batch", "=8", "batch=", "batch=0", "batch=-1", "batch=x"] {
            assert!(named_size(text).is_err(), "{text}");
        }
    }
}
