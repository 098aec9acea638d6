//! The arguments that say which model runs on which ranks.

use std::path::{Path, PathBuf};

use pleach::graph::placement::{PlacementError, Table};
use pleach::graph::{Costs, Graph, Placement};

use crate::cli::CommandError;
use crate::cli::bench::Size;
use crate::cli::output::visible;

/// A model, and its ranks.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArguments {
    /// An ONNX file, or a graph as text or JSON
    pub(crate) model: PathBuf,
    /// How many ranks run the model [default: 1, or as many as the stages or FILE name]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) ranks: Option<u32>,
    /// pipeline (contiguous parts, least bottleneck), min-cut (fewest bytes that cross), stages
    /// (pipeline_stage in the model), or a table of names and ranks
    #[arg(long, value_name = "pipeline|min-cut|stages|FILE", default_value = "pipeline")]
    pub(crate) place: String,
    /// Bind a symbol in the dimensions to a size; may be given several times
    #[arg(long, value_name = "NAME=VALUE", value_parser = named_size)]
    dim: Vec<(String, u64)>,
}

/// `NAME=VALUE`, for clap.
fn named_size(text: &str) -> Result<(String, u64), String> {
    let wrong = || "write the name of a dimension and its size, such as batch=8".to_owned();
    let (name, size) = text.split_once('=').ok_or_else(wrong)?;
    let size = size.parse().ok().filter(|size| *size > 0).ok_or_else(wrong)?;
    if name.is_empty() { Err(wrong()) } else { Ok((name.to_owned(), size)) }
}

impl ModelArguments {
    /// The model's name, as the person wrote it.
    pub(crate) fn shown(&self) -> String {
        self.model.display().to_string()
    }

    /// The symbols that are bound.
    pub(crate) fn dims(&self) -> Vec<(&str, u64)> {
        self.dim.iter().map(|(name, size)| (name.as_str(), *size)).collect()
    }

    /// Places a graph, on `ranks` where nothing else says how many.
    pub(crate) fn place(
        &self,
        graph: &Graph,
        costs: &Costs,
        ranks: u32,
        memory: Option<Size>,
        imbalance: Option<u32>,
    ) -> Result<Placement, CommandError> {
        let memory = memory.map(|Size(bytes)| bytes);
        let placed = match self.place.as_str() {
            "pipeline" => Placement::pipeline(graph, ranks, costs, memory),
            "min-cut" => Placement::min_cut(graph, ranks, costs, imbalance),
            "stages" => Placement::stages(graph),
            file => Placement::table(graph, &table(Path::new(file))?, self.ranks),
        };
        let model = self.shown();
        let placement = placed.map_err(|error| {
            let text = format!("no placement: {model}, {}", visible(&error.to_string()));
            match error {
                PlacementError::Memory { .. } | PlacementError::Imbalance { .. } => {
                    CommandError::failed(text)
                }
                _ => CommandError::usage(text),
            }
        })?;
        match self.ranks.filter(|&ranks| ranks != placement.ranks()) {
            Some(ranks) => Err(CommandError::usage(format!(
                "no placement: {model}, the stages are for {} ranks, not for {ranks}; leave --ranks out",
                placement.ranks()
            ))),
            None => Ok(placement),
        }
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
