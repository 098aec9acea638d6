//! Shapes beside those of `onnx.shape_inference`, symbols, and dimensions that contradict.

use std::collections::HashMap;
use std::sync::Arc;

use pleach_graph_analyzer::graph::{Dim, ValueId};
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

#[test]
fn axes_that_repeat_make_results_unknown() {
    let twice = graph("const a i64 [2] = 2 2 node u Unsqueeze(x, a) -> y ? ?");
    assert_eq!(shape_of_y(&twice.with_dims(&[]).expect("it has shapes")), None);
    let behind = graph("const a i64 [2] = 3 3 node u Unsqueeze(x, a) -> y ? ?");
    assert_eq!(shape_of_y(&behind.with_dims(&[]).expect("it has shapes")), None);
    let negative = graph("const a i64 [2] = 0 -4 node u Unsqueeze(x, a) -> y ? ?");
    assert_eq!(shape_of_y(&negative.with_dims(&[]).expect("it has shapes")), None);
    // The size of the dimension would grow twofold with each repetition.
    let many = |value: &str| [value; 40].join(" ");
    let slice = format!(
        "const s i64 [40] = {} const e i64 [40] = {} const a i64 [40] = {} node s Slice(x, s, e, a) -> y ? ?",
        many("1"),
        many("5"),
        many("0")
    );
    assert_eq!(shape_of_y(&graph(&slice).with_dims(&[]).expect("it has shapes")), None);
    let once = graph("const a i64 [2] = 0 -1 node u Unsqueeze(x, a) -> y ? ?");
    let inferred = once.with_dims(&[]).expect("it has shapes");
    assert_eq!(inferred.value(inferred.outputs()[0]).tensor.to_string(), "f32 [1, batch, 8, 1]");
}

#[test]
fn numbers_beyond_32_bits_are_negated_without_overflow() {
    for number in [i64::MIN, i64::from(i32::MIN), i64::from(i32::MAX), i64::MAX] {
        let lines = format!(
            "const s i64 [1] = {number} const e i64 [1] = 4 const a i64 [1] = 0 node s Slice(x, s, e, a) -> y ? ?"
        );
        let inferred = graph(&lines).with_dims(&[("batch", 3)]).expect("it has shapes");
        assert!(shape_of_y(&inferred).is_some_and(|dims| dims.len() == 2), "{number}");
    }
}

#[test]
fn a_result_of_too_many_dimensions_is_unknown() {
    // Each has one dimension less than twice as many as the one before: 2, 3, 5, ... 65.
    let mut lines = "const w f32 [1, 1] node n0 Gather(w, w) -> h0 ? ? ".to_owned();
    for number in 1..6 {
        let before = number - 1;
        lines += &format!("node n{number} Gather(h{before}, h{before}) -> h{number} ? ? ");
    }
    let inferred = graph(&format!("{lines} node r Relu(h5) -> y ? ?")).with_dims(&[]).expect("it has shapes");
    let rank = |name: &str| {
        let id = inferred.find(name).expect("it is there");
        inferred.value(id).tensor.shape.as_ref().map(Vec::len)
    };
    assert_eq!((rank("h4"), rank("h5"), rank("y")), (Some(33), None, None));
}

#[test]
fn a_node_of_too_many_inputs_has_unknown_results() {
    let concat = |count: usize| {
        let inputs = vec!["x"; count].join(", ");
        let graph = graph(&format!("node c Concat({inputs}) -> y ? ? {{ axis = 1 }}"));
        shape_of_y(&graph.with_dims(&[]).expect("it has shapes")).map(|dims| dims[1].clone())
    };
    assert_eq!(concat(1024), Some(Dim::Fixed(8 * 1024)));
    assert_eq!(concat(1025), None);
    let sum = |count: usize| {
        let graph = graph(&format!("node s Sum({}) -> y ? ?", vec!["x"; count].join(", ")));
        graph.with_dims(&[]).expect("it has shapes")
    };
    assert_eq!(shape_of_y(&sum(1024)).map(|dims| dims.len()), Some(2));
    let large = sum(1 << 20);
    let y = &large.value(large.outputs()[0]).tensor;
    assert_eq!(y.to_string(), "f32 ?", "the element type follows");
    let einsum = |count: usize| {
        let (inputs, terms) = (vec!["x"; count].join(", "), vec!["ab"; count].join(","));
        let graph = graph(&format!("node e Einsum({inputs}) -> y ? ? {{ equation = \"{terms}->ba\" }}"));
        shape_of_y(&graph.with_dims(&[]).expect("it has shapes"))
    };
    assert_eq!(einsum(16), Some(vec![Dim::Fixed(8), Dim::Symbol("batch".into())]));
    assert_eq!(einsum(17), None);
}

#[test]
fn an_error_names_the_first_inputs_alone() {
    let inputs = vec!["x"; 100].join(", ");
    let graph = graph(&format!("const w f32 [9] node s Sum(w, {inputs}) -> y ? ?"));
    let error = graph.with_dims(&[]).expect_err("8 and 9 do not broadcast").to_string();
    assert_eq!(error.matches("f32 [").count(), 16, "{error}");
    assert!(error.contains(", and 85 more; correct the dimensions"), "{error}");
}

#[test]
fn a_size_beyond_32_bits_in_a_shape_makes_the_result_unknown() {
    for operator in ["ConstantOfShape(s)", "Reshape(x, s)", "Expand(x, s)"] {
        let lines = format!("const s i64 [1] = 1099511627776 node c {operator} -> y ? ?");
        let inferred = graph(&lines).with_dims(&[]).expect("it has shapes");
        assert_eq!(shape_of_y(&inferred), None, "{operator}");
    }
}

#[test]
fn values_beyond_the_limit_of_all_nodes_are_unknown() {
    let chain = |length: usize| {
        let values = ["7"; 1024].join(" ");
        let mut lines = format!("const v0 i64 [1024] = {values}\n");
        for number in 1..=length {
            lines += &format!("node n{number} Identity(v{}) -> v{number} ? ?\n", number - 1);
        }
        let inferred = graph(&format!("{lines}node c Identity(v{length}) -> y ? ?")).with_dims(&[]);
        shape_of_y(&inferred.expect("it has shapes"))
    };
    assert_eq!(chain(100), Some(vec![Dim::Fixed(1024)]));
    assert_eq!(chain(1 << 13), None);
}

#[test]
fn a_symbol_has_one_name_in_memory() {
    let inferred = graph("node r Relu(x) -> y ? ?").with_dims(&[]).expect("it has shapes");
    let name = |id: ValueId| match inferred.value(id).tensor.shape.as_deref() {
        Some([Dim::Symbol(name), ..]) => Arc::clone(name),
        other => panic!("{other:?} begins with no symbol"),
    };
    assert!(Arc::ptr_eq(&name(inferred.inputs()[0]), &name(inferred.outputs()[0])));
}
