//! Shapes beside those of `onnx.shape_inference` for all models that the package `onnx` brings or
//! makes. `tests/data/infer_shapes.py --wheel FOLDER` writes what is compared, and
//! `PLEACH_ONNX_SHAPES` names it.

use pleach_graph_analyzer::Graph;
use pleach_graph_analyzer::graph::Dim;

/// What was compared.
#[derive(Debug, Default)]
struct Comparison {
    models: usize,
    /// Models that are no graph for this crate, with the reason.
    refused: Vec<String>,
    same: usize,
    /// Dimensions that onnx alone knows.
    unknown: usize,
    wrong: Vec<String>,
}

#[test]
fn no_shape_of_a_model_of_the_package_differs_from_that_of_onnx() {
    let Some(path) = std::env::var_os("PLEACH_ONNX_SHAPES") else {
        return crate::skipped::skip("PLEACH_ONNX_SHAPES names no file");
    };
    let text = std::fs::read_to_string(path).expect("the file can be read");
    let (mut comparison, mut graph, mut model) = (Comparison::default(), None, "");
    for line in text.lines() {
        if let Some(path) = line.strip_prefix("model ") {
            model = path;
            comparison.models += 1;
            graph = read(path).map_err(|error| comparison.refused.push(format!("{path}: {error}"))).ok();
        } else if let Some(graph) = &graph {
            compare(graph, model, line, &mut comparison);
        }
    }
    let Comparison { models, refused, same, unknown, wrong } = &comparison;
    println!("{models} models, {} refused, {same} dimensions the same, {unknown} unknown", refused.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    assert!(*same > *unknown, "{same} known, {unknown} unknown");
}

fn read(path: &str) -> Result<Graph, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let graph = Graph::from_onnx(&bytes).map_err(|error| error.to_string())?;
    graph.with_dims(&[]).map_err(|error| error.to_string())
}

fn compare(graph: &Graph, model: &str, line: &str, comparison: &mut Comparison) {
    let Some((rest, shape)) = line.rsplit_once('\t') else { panic!("no line of the form: {line}") };
    let (name, _) = rest.rsplit_once('\t').expect("a line has three fields");
    // Some results of onnx are those of values in bodies.
    let Some(id) = graph.find(name) else { return };
    if shape == "unknown" {
        return;
    }
    let dims: Vec<Option<u64>> =
        shape.split(' ').filter(|dim| !dim.is_empty()).map(|dim| dim.parse().ok()).collect();
    let Some(own) = &graph.value(id).tensor.shape else {
        comparison.unknown += dims.len().max(1);
        return;
    };
    if own.len() != dims.len() {
        comparison.wrong.push(format!("{model} {name}: {own:?} and {dims:?}"));
        return;
    }
    for (own, dim) in own.iter().zip(&dims) {
        match (own, dim) {
            (Dim::Fixed(own), Some(dim)) if own != dim => {
                comparison.wrong.push(format!("{model} {name}: {own} and {dims:?}"));
            }
            (Dim::Fixed(_), _) | (_, None) => comparison.same += 1,
            (_, Some(_)) => comparison.unknown += 1,
        }
    }
}
