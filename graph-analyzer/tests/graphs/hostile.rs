//! Files that are no models, or that lie.

use pleach_graph_analyzer::Graph;
use pleach_graph_analyzer::onnx::{OnnxError, check_weight_files};

use super::samples::light_bytes;

#[test]
fn a_model_that_is_cut_off_anywhere_is_an_error_or_a_smaller_model() {
    let bytes = light_bytes("bvlc_alexnet");
    let mut errors = 0;
    for length in (0..bytes.len()).step_by(7) {
        match Graph::from_onnx(&bytes[..length]) {
            Ok(graph) => assert!(graph.nodes().len() <= 40),
            Err(_) => errors += 1,
        }
    }
    assert!(errors > 500, "{errors}");
    assert!(matches!(Graph::from_onnx(b""), Err(OnnxError::NoModel { .. })));
    assert!(matches!(Graph::from_onnx(b"#!/bin/sh\n"), Err(OnnxError::NoModel { .. })));
}

#[test]
fn a_model_with_a_changed_byte_never_panics() {
    let bytes = light_bytes("bvlc_alexnet");
    for place in (0..bytes.len()).step_by(5) {
        for change in [1, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[place] ^= change;
            if let Ok(graph) = Graph::from_onnx(&changed) {
                // Whatever shapes there are, or a contradiction.
                drop(graph.with_dims(&[]));
            }
        }
    }
}

/// A field of a protobuf message.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    assert!(content.len() < 128);
    bytes.push(content.len() as u8);
    bytes.extend_from_slice(content);
    bytes
}

/// A model with one weight in a file.
fn with_external(path: &str) -> Vec<u8> {
    let entry = |key: &str, value: &str| {
        let pair = [field(1, key.as_bytes()), field(2, value.as_bytes())].concat();
        field(13, &pair)
    };
    let mut tensor = vec![0x08, 4, 0x10, 1];
    tensor.extend(field(8, b"w"));
    tensor.extend(entry("location", path));
    tensor.extend(entry("offset", "8"));
    tensor.extend([14 << 3, 1]);
    field(7, &field(5, &tensor))
}

#[test]
fn weights_lie_below_the_folder_of_the_model_and_their_files_are_there() {
    for path in ["../w.bin", "/etc/passwd", "a/../../w.bin", "", "a\\w.bin"] {
        let error = Graph::from_onnx(&with_external(path)).expect_err("it leads out of the folder");
        assert!(error.to_string().contains("no path below the model's folder"), "{error}");
    }
    let graph = Graph::from_onnx(&with_external("w.bin")).expect("it is a model");
    let folder = std::env::temp_dir().join(format!("pleach-weights-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("there is a folder for temporary files");
    let check = || check_weight_files(&graph, &folder).map_err(|error| error.to_string());
    assert!(check().expect_err("the file is missing").contains("put it beside the model"));
    std::fs::write(folder.join("w.bin"), [0; 23]).expect("the folder can be written");
    assert!(check().expect_err("the file is short").contains("ends at byte 24"));
    std::fs::write(folder.join("w.bin"), [0; 24]).expect("the folder can be written");
    assert_eq!(check(), Ok(()));
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
}

#[test]
fn what_bodies_capture_is_used_by_their_node() {
    // A node 'If' with a body whose node uses 'c' (its own) and 'x' (of the graph outside).
    let name_of = |number: u8, name: &str| field(number, name.as_bytes());
    let own = [name_of(2, "c"), name_of(4, "Constant")].concat();
    let inner = [name_of(1, "c"), name_of(1, "x"), name_of(2, "z"), name_of(4, "Add")].concat();
    let body = [field(1, &own), field(1, &inner), field(12, &name_of(1, "z"))].concat();
    let attribute = [name_of(1, "then_branch"), field(6, &body), vec![0xa0, 0x01, 5]].concat();
    let node = [name_of(1, "x"), name_of(2, "y"), name_of(4, "If"), field(5, &attribute)].concat();
    let graph = [field(1, &node), field(11, &name_of(1, "x")), field(12, &name_of(1, "y"))].concat();
    let graph = Graph::from_onnx(&field(7, &graph)).expect("it is a model");
    let captured: Vec<&str> =
        graph.nodes()[0].captured.iter().map(|&id| graph.value(id).name.as_str()).collect();
    assert_eq!(captured, ["x"]);
}
