//! The models of the package `onnx` that PyTorch exported, with the inputs and results that PyTorch
//! had: a part on each of up to three ranks, one after another, by each runtime that is found.
//! `PLEACH_ONNX_CONVERTED` names their folder.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use pleach_graph_analyzer::onnx::{Model, TensorFile};
use pleach_graph_analyzer::placement::PlacementError;
use pleach_graph_analyzer::run::{Job, Onnxruntime, Rten, Runtime, Tensor};
use pleach_graph_analyzer::{Costs, ElementType, Machine, Partition, Placement};

#[path = "../../tests/skipped/mod.rs"]
mod skipped;

/// What `onnx.backend.test` allows: a difference of this much, and of this share of the number.
const DIFFERENCE_MOST: f64 = 1e-7;
const SHARE_MOST: f64 = 1e-3;

const RANKS_MAX: u32 = 3;

/// Models whose operators each runtime has. rten has few of three dimensions, and neither has all
/// of those that ONNX gave up before version 7.
const RTEN_LEAST: usize = 56;
const ONNXRUNTIME_LEAST: usize = 59;
const EITHER_LEAST: usize = 69;

#[test]
fn models_that_pytorch_exported_have_the_results_of_pytorch() {
    let Some(folder) = std::env::var_os("PLEACH_ONNX_CONVERTED") else {
        return skipped::skip("PLEACH_ONNX_CONVERTED names no folder");
    };
    let mut models: Vec<_> = std::fs::read_dir(folder)
        .expect("the folder can be read")
        .map(|entry| entry.expect("it can be read").path())
        .filter(|path| path.join("model.onnx").exists())
        .collect();
    models.sort();
    assert!(models.len() >= 80, "the package has 82 models, the folder {}", models.len());
    let mut right = check(&Rten::new(), &models, RTEN_LEAST);
    match Onnxruntime::open(None) {
        Ok(onnxruntime) => right.extend(check(&onnxruntime, &models, ONNXRUNTIME_LEAST)),
        Err(error) => return skipped::skip_part(error),
    }
    println!("{} of {} models by one of both", right.len(), models.len());
    assert!(right.len() >= EITHER_LEAST, "{} of {}", right.len(), models.len());
}

enum Failure {
    /// The runtime says that it cannot run the model.
    NotRun(String),
    Wrong(String),
}

fn not_run(error: impl std::fmt::Display) -> Failure {
    Failure::NotRun(error.to_string())
}

/// Runs each model, of which the runtime must have so many, and returns those that it has.
fn check<'a>(runtime: &dyn Runtime, models: &'a [PathBuf], least: usize) -> HashSet<&'a Path> {
    let (mut right, mut refused, mut wrong) = (HashSet::new(), Vec::new(), Vec::new());
    for model in models {
        let name = model.file_name().unwrap_or_default().to_string_lossy();
        match run(runtime, model) {
            Ok(()) => drop(right.insert(model.as_path())),
            Err(Failure::NotRun(error)) => refused.push(format!("{name}: {error}")),
            Err(Failure::Wrong(error)) => wrong.push(format!("{name}: {error}")),
        }
    }
    println!("{}: {} models right, {} not run", runtime.name(), right.len(), refused.len());
    assert!(wrong.is_empty(), "{}:\n{}", runtime.name(), wrong.join("\n"));
    assert!(right.len() >= least, "{} runs {}:\n{}", runtime.name(), right.len(), refused.join("\n"));
    right
}

fn run(runtime: &dyn Runtime, folder: &Path) -> Result<(), Failure> {
    let bytes = std::fs::read(folder.join("model.onnx")).expect("it can be read");
    let model = Model::decode(bytes).map_err(not_run)?;
    let graph = model.graph().map_err(not_run)?.with_dims(&[]).map_err(not_run)?;
    let costs = Costs::estimated(&graph, &Machine::TYPICAL);
    for ranks in 1..=RANKS_MAX {
        let placement = match Placement::pipeline(&graph, ranks, &costs, None) {
            Err(PlacementError::MoreRanksThanNodes { .. }) if ranks > 1 => break,
            placement => placement.map_err(not_run)?,
        };
        let partition = Partition::new(&graph, &placement).map_err(not_run)?;
        let job = Job {
            model: &model,
            folder,
            graph: &graph,
            partition: &partition,
            runtime,
            random_weights: None,
        };
        compare(&job, &folder.join("test_data_set_0"))?;
    }
    Ok(())
}

fn compare(job: &Job<'_>, data: &Path) -> Result<(), Failure> {
    let files = |kind: &str| -> Vec<TensorFile> {
        let path = |number| data.join(format!("{kind}_{number}.pb"));
        let read = |path| TensorFile::decode(std::fs::read(path).expect("it can be read"));
        (0..)
            .map(path)
            .take_while(|path| path.exists())
            .map(|path| read(path).expect("it is a tensor"))
            .collect()
    };
    let inputs = job.inputs(files("input")).map_err(not_run)?;
    let reference = job.reference(&[inputs]).map_err(not_run)?;
    let expected = files("output");
    assert_eq!(reference.outputs[0].len(), expected.len(), "the model has so many outputs");
    for (number, (result, expected)) in reference.outputs[0].iter().zip(&expected).enumerate() {
        same(result, expected)
            .map_err(|error| Failure::Wrong(format!("{} ranks, output {number}: {error}", job.ranks())))?;
    }
    Ok(())
}

fn same(result: &Tensor, expected: &TensorFile) -> Result<(), String> {
    assert_eq!(expected.element, ElementType::F32, "all results of these models are floats");
    if (result.form.element, &result.form.dims) != (expected.element, &expected.dims) {
        return Err(format!("{:?} and not {:?}", result.form, expected.dims));
    }
    let floats = |bytes: &[u8]| -> Vec<f64> {
        let float = |value: &[u8]| f64::from(f32::from_le_bytes(value.try_into().expect("four bytes")));
        bytes.chunks_exact(4).map(float).collect()
    };
    let (result, expected) = (floats(&result.bytes), floats(&expected.bytes));
    let differs = |(result, expected): &(&f64, &f64)| {
        let difference: f64 = (*result - *expected).abs();
        difference.is_nan() || difference > DIFFERENCE_MOST + SHARE_MOST * expected.abs()
    };
    match result.iter().zip(&expected).find(differs) {
        Some((result, expected)) => Err(format!("{result} and not {expected}")),
        None => Ok(()),
    }
}
