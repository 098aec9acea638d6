//! The text form and the JSON: what is printed parses to the same graph.

use std::sync::Arc;

use pleach_graph_analyzer::graph::{
    Attribute, AttributeValue, Dim, Literal, NodeDraft, TensorType, WeightSource,
};
use pleach_graph_analyzer::{ElementType, Graph, GraphBuilder};
use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};
use proptest::test_runner::Config;

use super::samples::{LIGHT, light};

/// Names as hostile as files have them.
fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z]{1,4}",
        "[-+.>0-9a-z/:]{1,4}",
        "[ \"\\\\#\n\u{7f}é,]{1,3}",
        Just("->".to_owned()),
        Just("stage".to_owned())
    ]
}

fn tensor() -> impl Strategy<Value = TensorType> {
    let dim = prop_oneof![
        any::<u64>().prop_map(Dim::Fixed),
        name().prop_map(|name| Dim::Symbol(Arc::from(name))),
        Just(Dim::Unknown)
    ];
    let element = prop_oneof![Just(None), Just(Some(ElementType::F32)), Just(Some(ElementType::I4))];
    (element, prop::option::of(prop::collection::vec(dim, 0..4)))
        .prop_map(|(element, shape)| TensorType { element, shape })
}

fn attribute() -> impl Strategy<Value = Attribute> {
    let float = any::<i32>().prop_map(|bits| bits as f32 / 7.0);
    let integers = || prop::collection::vec(any::<i64>(), 0..3);
    let literal = (prop::collection::vec(any::<u64>(), 0..3), prop::option::of(integers()))
        .prop_map(|(dims, integers)| Literal { element: ElementType::I64, dims, integers });
    let value = prop_oneof![
        any::<i64>().prop_map(AttributeValue::Int),
        float.clone().prop_map(AttributeValue::Float),
        Just(AttributeValue::Float(f32::NEG_INFINITY)),
        name().prop_map(AttributeValue::Text),
        integers().prop_map(AttributeValue::Ints),
        prop::collection::vec(float, 0..3).prop_map(AttributeValue::Floats),
        prop::collection::vec(name(), 0..3).prop_map(AttributeValue::Texts),
        literal.prop_map(AttributeValue::Tensor),
    ];
    (name(), value).prop_map(|(name, value)| Attribute { name, value })
}

type DrawnNode = (String, TensorType, Vec<Attribute>, Option<u32>, u64, bool);

fn graph() -> impl Strategy<Value = Graph> {
    let node = (
        name(),
        tensor(),
        prop::collection::vec(attribute(), 0..3),
        prop::option::of(0_u32..9),
        any::<u64>(),
        any::<bool>(),
    );
    let nodes = prop::collection::vec(node, 0..6);
    let weights = prop::collection::vec(
        (tensor(), prop::option::of(prop::collection::vec(any::<i64>(), 0..3)), any::<bool>()),
        0..3,
    );
    (name(), tensor(), nodes, weights).prop_map(
        |(suffix, input, nodes, weights): (String, TensorType, Vec<DrawnNode>, _)| {
            let mut builder = GraphBuilder::new(&suffix);
            builder.operator_set("", 17).operator_set("12", 3).input(&format!("x{suffix}"), input);
            let mut known = vec![format!("x{suffix}")];
            for (number, (tensor, integers, is_in_file)) in weights.into_iter().enumerate() {
                let source = if is_in_file {
                    let path = format!("w{}.bin", suffix.replace(['\\', '/'], ""));
                    WeightSource::File { path, offset: u64::MAX }
                } else {
                    WeightSource::Model
                };
                known.push(format!("w{number}{suffix}"));
                builder.weight(&format!("w{number}{suffix}"), tensor, source, integers);
            }
            for (number, (name, tensor, attributes, stage, seed, has_more)) in nodes.into_iter().enumerate() {
                let used = known[seed as usize % known.len()].clone();
                let result = format!("{name}{number}");
                let mut inputs = vec![used.clone()];
                if has_more {
                    inputs.extend([String::new(), known[(seed >> 8) as usize % known.len()].clone()]);
                }
                let mut outputs = vec![(result.clone(), tensor)];
                if has_more {
                    outputs.insert(0, (String::new(), TensorType::default()));
                }
                let captured = if seed % 3 == 0 { vec![used] } else { Vec::new() };
                let domain = if seed % 5 == 0 { "com.example".to_owned() } else { String::new() };
                builder.node(NodeDraft {
                    operator: name.clone(),
                    name,
                    domain,
                    inputs,
                    captured,
                    outputs,
                    attributes,
                    stage,
                });
                known.push(result);
            }
            builder.output(&known[known.len() - 1]);
            builder.build().expect("it is a graph")
        },
    )
}

proptest! {
    #![proptest_config(Config { cases: 256, failure_persistence: None, ..Config::default() })]

    #[test]
    fn what_is_printed_parses_to_the_same_graph(graph in graph()) {
        let text = graph.to_string();
        let parsed = Graph::from_text(&text);
        proptest::prop_assert_eq!(parsed.as_ref(), Ok(&graph), "{}", text);
        let json = graph.to_json();
        let parsed = Graph::from_json(&json).map_err(|error| error.to_string());
        proptest::prop_assert_eq!(parsed, Ok(graph), "{}", json);
    }
}

#[test]
fn the_light_models_have_text_and_json_that_parse_to_them() {
    for name in LIGHT {
        let graph = light(name);
        assert_eq!(Graph::from_text(&graph.to_string()).as_ref(), Ok(&graph), "{name}");
        assert_eq!(Graph::from_json(&graph.to_json()).expect("it is JSON of a graph"), graph, "{name}");
    }
}

#[test]
fn the_example_of_the_documentation_is_a_graph() {
    let text = r#"
        pleach-graph 1                                        # form and version
        graph "tiny"
        opset 17                                              # of ONNX; others: opset com.example 2
        input x f32 [batch, 16]                               # a dimension: size, symbol, or ?
        const w f32 [16, 4]                                   # a weight in the model
        const s i64 [2] = 4 -1                                # a small constant
        const v f32 [4] in "weights.bin" at 4096              # a weight in another file
        node first MatMul(x, w) -> h f32 [batch, 4]           # types may be '? ?'
        node second com.example:Scale(h, -, v) captures (w) -> y f32 [batch, 4], - { axis = 1, to = f[0.5] } stage 1
        output y
    "#;
    let graph = Graph::from_text(text).expect("it is a graph");
    assert_eq!((graph.nodes().len(), graph.values().len()), (2, 6));
    assert_eq!(graph.nodes()[1].domain, "com.example");
    assert_eq!(graph.nodes()[1].stage, Some(1));
}

#[test]
fn an_error_names_the_line() {
    let error = |text: &str| Graph::from_text(text).expect_err("it is no graph").to_string();
    assert_eq!(error("pleach-graph 2"), "line 1: expected the version 1 of the form, found '2'");
    assert_eq!(
        error("pleach-graph 1\ngraph g\ninput x f33 []"),
        "line 3: expected a type as f32, or '?', found 'f33 []'"
    );
    assert_eq!(error("pleach-graph 1\ngraph g\nnode a Relu(x y)"), "line 3: expected ',' or ')', found 'y)'");
    assert_eq!(error("pleach-graph 1\ngraph \"g"), "line 2: expected the name of the graph, found '\"g'");
}

#[test]
fn every_form_keeps_to_the_same_limits() {
    let text = |lines: &str| {
        let text = format!("pleach-graph 1 graph g {lines}");
        Graph::from_text(&text).map(drop).map_err(|error| error.to_string())
    };
    let json = |lines: &str| {
        let json = format!(r#"{{"form":"pleach-graph","version":1,{lines}}}"#);
        Graph::from_json(&json).map(drop).map_err(|error| error.to_string())
    };
    for path in ["../w.bin", "/etc/passwd", "a/../../w.bin", "", "a\\w.bin"] {
        let quoted = serde_json::to_string(path).expect("a text has JSON");
        let is_refused = |answer: Result<(), String>| {
            answer.is_err_and(|error| error.contains("no path below the model's folder"))
        };
        assert!(is_refused(text(&format!("const w f32 [1] in {quoted} at 0"))), "{path}");
        let file = format!(
            r#""graph":"g","consts":[{{"name":"w","shape":[1],"file":{{"path":{quoted},"offset":0}}}}]"#
        );
        assert!(is_refused(json(&file)), "{path}");
    }
    let long = "n".repeat(4097);
    let names = [
        format!("opset {long} 1"),
        format!("input x f32 [2] node r Relu(x) -> y ? ? {{ {long} = 1 }}"),
        format!("input {long} f32 [2]"),
    ];
    for lines in names {
        let error = text(&lines).expect_err("a name is too long");
        assert!(error.contains("bytes of a name: at most 4096"), "{error}");
    }
    assert!(json(&format!(r#""graph":"{long}""#)).is_err_and(|error| error.contains("bytes of a name")));
    let integers = ["1"; 1025].join(",");
    let constant = format!(r#""graph":"g","consts":[{{"name":"c","shape":[1025],"integers":[{integers}]}}]"#);
    assert!(json(&constant).is_err_and(|error| error.contains("integers of a constant: at most 1024")));
    let dims = ["1"; 65].join(",");
    let literal = format!(
        r#""graph":"g","nodes":[{{"name":"c","operator":"Constant","attributes":[{{"name":"value","value":{{"tensor":{{"type":"i64","shape":[{dims}]}}}}}}]}}]"#
    );
    assert!(json(&literal).is_err_and(|error| error.contains("dimensions of a tensor: at most 64")));
}
