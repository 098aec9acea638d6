//! Shapes beside those of `onnx.shape_inference`, symbols, and dimensions that contradict.

use std::collections::HashMap;

use pleach_graph_analyzer::graph::Dim;
use pleach_graph_analyzer::{Graph, ShapeError};

use super::samples::{LIGHT, data, light};

/// Sizes by value; nothing for those that onnx does not know.
type Sizes = Vec<(String, Vec<Option<u64>>)>;

/// What onnx says of each model.
fn expected() -> HashMap<String, Sizes> {
    let text = std::fs::read_to_string(data("light/shapes.txt")).expect("it is in the tree");
    let (mut models, mut model) = (HashMap::new(), String::new());
    for line in text.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        match fields.as_slice() {
            [name] => model = name.trim_start_matches("model ").to_owned(),
            [_, _, "unknown"] => {}
            [name, _, dims] => {
                let dims =
                    dims.split(' ').filter(|dim| !dim.is_empty()).map(|dim| dim.parse().ok()).collect();
                models.entry(model.clone()).or_insert_with(Vec::new).push(((*name).to_owned(), dims));
            }
            _ => panic!("no line of the form: {line}"),
        }
    }
    models
}

#[test]
fn shapes_of_the_light_models_are_those_of_onnx() {
    let expected = expected();
    let mut seen = 0;
    for name in LIGHT {
        let graph = light(name);
        for (value, dims) in &expected[&format!("light_{name}.onnx")] {
            let id = graph.find(value).unwrap_or_else(|| panic!("{name} has no value {value}"));
            let own = graph.value(id).tensor.sizes().expect("every shape is fixed");
            assert_eq!(own.len(), dims.len(), "{name} {value}");
            assert!(
                own.iter().zip(dims).all(|(own, dim)| dim.is_none_or(|dim| *own == dim)),
                "{name} {value}: {own:?} {dims:?}"
            );
            seen += 1;
        }
    }
    assert!(seen > 4000, "only {seen} values were compared");
}

/// A graph in text with `lines` between an input `x f32 [batch, 8]` and the output `y`.
fn graph(lines: &str) -> Graph {
    let text = format!("pleach-graph 1 graph g opset 17 input x f32 [batch, 8] {lines} output y");
    Graph::from_text(&text).expect("it is a graph")
}

fn shape_of_y(graph: &Graph) -> Option<Vec<Dim>> {
    graph.value(graph.outputs()[0]).tensor.shape.clone()
}

#[test]
fn symbols_are_followed_and_bound() {
    let open = graph(
        "const w f32 [8, 4] const s i64 [2] = -1 2 node m MatMul(x, w) -> h ? ? node r Reshape(h, s) -> y ? ?",
    );
    let inferred = open.with_dims(&[]).expect("it has shapes");
    assert_eq!(shape_of_y(&inferred), Some(vec![Dim::Unknown, Dim::Fixed(2)]), "2 * batch is no symbol");
    let h = inferred.find("h").expect("it is there");
    assert_eq!(inferred.value(h).tensor.to_string(), "f32 [batch, 4]");
    let bound = open.with_dims(&[("batch", 3)]).expect("it has shapes");
    assert_eq!(shape_of_y(&bound), Some(vec![Dim::Fixed(6), Dim::Fixed(2)]));
    let error = open.with_dims(&[("bacht", 3)]).expect_err("there is no such symbol");
    assert_eq!(error.to_string(), "no dimension is called 'bacht'; there are batch");
}

#[test]
fn shapes_that_are_computed_are_followed() {
    let graph = graph(
        "const i i64 [] = 0 const eight i64 [1] = 8 const zero i64 [1] = 0
         node s Shape(x) -> s ? ? node g Gather(s, i) -> g ? ? node u Unsqueeze(g, zero) -> u ? ?
         node c Concat(u, eight) -> c ? ? { axis = 0 } node e ConstantOfShape(c) -> y ? ?",
    );
    let inferred = graph.with_dims(&[]).expect("it has shapes");
    assert_eq!(inferred.value(inferred.outputs()[0]).tensor.to_string(), "f32 [batch, 8]");
}

#[test]
fn an_operator_without_a_rule_makes_its_outputs_unknown_and_the_file_may_know_them() {
    let unknown = graph("node u com.example:Unknown(x) -> h ? ? node r Relu(h) -> y ? ?");
    assert_eq!(shape_of_y(&unknown.with_dims(&[]).expect("it has shapes")), None);
    let known = graph("node u com.example:Unknown(x) -> h f32 [batch, 2] node r Relu(h) -> y ? ?");
    let inferred = known.with_dims(&[("batch", 5)]).expect("it has shapes");
    assert_eq!(inferred.value(inferred.outputs()[0]).tensor.bytes(), Some(40));
}

#[test]
fn dimensions_that_contradict_are_refused() {
    let declared = graph("node r Relu(x) -> y f32 [batch, 9]");
    let error = declared.with_dims(&[]).expect_err("8 is not 9");
    assert!(matches!(error, ShapeError::Contradiction { .. }), "{error}");
    assert!(
        error
            .to_string()
            .starts_with("'y' is f32 [batch, 9] in the file, and f32 [batch, 8] by its node 'r'"),
        "{error}"
    );
    let inputs = graph("const w f32 [9] node a Add(x, w) -> y ? ?");
    let error = inputs.with_dims(&[]).expect_err("8 and 9 do not broadcast");
    assert!(matches!(error, ShapeError::Incompatible { .. }), "{error}");
}

#[test]
fn sizes_beyond_32_bits_make_results_unknown_and_not_wrong() {
    let large = graph("const w f32 [3000000000] node a Add(w, w) -> h ? ? node s Size(h) -> y ? ?");
    let inferred = large.with_dims(&[]).expect("it has shapes");
    let h = inferred.find("h").expect("it is there");
    assert_eq!(inferred.value(h).tensor.sizes(), None);
    let product = graph("const w f32 [65536, 65536] const s i64 [1] = -1 node r Reshape(w, s) -> y ? ?");
    let inferred = product.with_dims(&[]).expect("it has shapes");
    assert_eq!(inferred.value(inferred.outputs()[0]).tensor.sizes(), None);
}
