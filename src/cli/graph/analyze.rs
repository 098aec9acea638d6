//! `pleach graph analyze`: a model's parts, the tensors that cross, and the memory of each part.

use std::fmt::Display;
use std::path::PathBuf;

use pleach::graph::partition::Part;
use pleach::graph::plan::{Checked, Effort, MemoryPlan};
use pleach::graph::{Costs, Graph, Machine, Partition, Placement};
use pleach::transport::{Rank, Space, clock};

use super::placing::ModelArguments;
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
    #[command(flatten)]
    model: ModelArguments,
    /// The memory of a rank for weights and buffers, such as 512M or 16G
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// For min-cut: how much longer than the average a rank may compute [default: no limit]
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u32).range(0..=10_000))]
    imbalance: Option<u32>,
    /// Estimate the time of nodes by the rates of a typical machine, or by rates measured here
    #[arg(long, value_enum, default_value_t = CostSource::Estimated)]
    costs: CostSource,
    /// Where a rank has the tensors that it receives: host, or gpu:N; may be given several times
    #[arg(long, value_name = "RANK=SPACE", value_parser = rank_and_space)]
    space: Vec<(Rank, Space)>,
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

/// `RANK=SPACE`, for clap.
fn rank_and_space(text: &str) -> Result<(Rank, Space), String> {
    let wrong = || "write a rank and its memory, such as 1=gpu:0 or 1=host".to_owned();
    let (rank, space) = text.split_once('=').ok_or_else(wrong)?;
    let space = match space.strip_prefix("gpu:") {
        Some(ordinal) => Space::Gpu { ordinal: ordinal.parse().map_err(|_| wrong())? },
        None if space == "host" => Space::Host,
        None => return Err(wrong()),
    };
    Ok((rank.parse().map_err(|_| wrong())?, space))
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
    let model = arguments.model.shown();
    let (source, graph) = source::read(&arguments.model.model)?;
    let wrong = |error: &dyn Display| {
        CommandError::usage(format!("no analysis: {model}, {}", visible(&error.to_string())))
    };
    let graph = graph.with_dims(&arguments.model.dims()).map_err(|error| wrong(&error))?;
    let machine = match arguments.costs {
        CostSource::Estimated => Machine::TYPICAL,
        CostSource::Measured => rates::measured(),
    };
    let costs = Costs::estimated(&graph, &machine);
    let placement =
        arguments.space.iter().try_fold(place(arguments, &graph, &costs)?, |placement, space| {
            placement.with_space(space.0, space.1).map_err(|error| wrong(&error))
        })?;
    let partition = Partition::new(&graph, &placement).map_err(|error| wrong(&error))?;
    let plans = plans(arguments, &partition)?;
    let (place, cost_source) = (arguments.model.place.clone(), arguments.costs);
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
    let model = &arguments.model;
    if arguments.imbalance.is_some() && model.place != "min-cut" {
        return Err(CommandError::usage(format!(
            "no such limit: --imbalance with --place {}; give it with --place min-cut",
            model.place
        )));
    }
    model.place(graph, costs, model.ranks.unwrap_or(1), arguments.memory, arguments.imbalance)
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
