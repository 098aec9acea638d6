//! The file of a model: ONNX, the text form of a graph, or its JSON; and the same file with stages.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use pleach::graph::onnx::{MODEL_BYTES_MAX, Model, check_weight_files};
use pleach::graph::{Graph, Partition, Placement};

use crate::cli::CommandError;
use crate::cli::output::visible;

/// What a file holds.
pub(super) enum Source {
    Onnx(Box<Model>),
    Text,
    Json,
}

/// Reads a file, and says of which form it is.
pub(super) fn read(path: &Path) -> Result<(Source, Graph), CommandError> {
    let shown = path.display();
    let unread = |error: std::io::Error| {
        CommandError::usage(format!(
            "model not read: {shown} ({error}); name an ONNX file or a graph in text or JSON"
        ))
    };
    let mut bytes = Vec::new();
    // One byte more than may be, so that the decoder sees that it is too long.
    let limit = MODEL_BYTES_MAX as u64 + 1;
    File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)).map_err(unread)?;
    let wrong = |error: &dyn Display| {
        CommandError::usage(format!("no graph: {shown}, {}", visible(&error.to_string())))
    };
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|error| wrong(&error));
    let (source, graph) = if bytes.starts_with(b"{") {
        (Source::Json, Graph::from_json(&text(bytes)?).map_err(|error| wrong(&error))?)
    } else if bytes.starts_with(b"pleach-graph") || bytes.starts_with(b"#") {
        (Source::Text, Graph::from_text(&text(bytes)?).map_err(|error| wrong(&error))?)
    } else {
        let model = Model::decode(bytes).map_err(|error| wrong(&error))?;
        let graph = model.graph().map_err(|error| wrong(&error))?;
        (Source::Onnx(Box::new(model)), graph)
    };
    check_weight_files(&graph, path.parent().unwrap_or(Path::new(""))).map_err(|error| wrong(&error))?;
    Ok((source, graph))
}

/// Writes a model with the stage of each node.
pub(super) fn write(
    path: &Path,
    source: &Source,
    graph: &Graph,
    placement: &Placement,
    partition: &Partition,
) -> Result<(), CommandError> {
    // A constant lies on several ranks, and its stage is the first of them.
    let mut stages = vec![None; graph.nodes().len()];
    for part in partition.parts().iter().rev() {
        part.nodes.iter().for_each(|node| stages[node.index()] = Some(part.rank));
    }
    let bytes = match source {
        Source::Text => graph.with_stages(&stages).to_string().into_bytes(),
        Source::Json => graph.with_stages(&stages).to_json().into_bytes(),
        Source::Onnx(model) => {
            let mut by_output = HashMap::new();
            for (node, stage) in graph.nodes().iter().zip(&stages) {
                if let (Some(output), Some(stage)) = (node.results().next(), stage) {
                    by_output.insert(graph.value(output).name.as_str(), *stage);
                }
            }
            model.with_stages(placement.ranks(), &by_output).encode()
        }
    };
    write_file(path, &bytes)
}

/// Writes a result into a file.
pub(super) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), CommandError> {
    std::fs::write(path, bytes).map_err(|error| {
        CommandError::failed(format!("not written: {} ({error}); name another file", path.display()))
    })
}
