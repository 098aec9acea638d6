//! The results that a run must have: those of the same parts one after another in one process.

use std::collections::HashMap;

use super::inputs::Tensor;
use super::plan::{Job, JobError};
use super::runtime::{Output, Program, RuntimeError, TensorRef};
use crate::graph::ValueId;

/// The results of a graph for each set of inputs, in the order of the graph's outputs.
#[derive(Clone, Debug)]
pub struct Reference {
    /// By set.
    pub outputs: Vec<Vec<Tensor>>,
    /// The largest difference from the results of the whole model, as a share of its largest number
    /// in the same tensor.
    pub largest_difference: f64,
}

impl Job<'_> {
    /// Computes the results for each set of inputs, by the parts one after another and by the whole
    /// model.
    ///
    /// # Errors
    ///
    /// [`JobError`]: a part or the whole model does not run.
    pub fn reference(&self, inputs: &[Vec<Tensor>]) -> Result<Reference, JobError> {
        let mut reference = Reference { outputs: Vec::new(), largest_difference: 0.0 };
        let mut result = Ok(());
        self.runtime.within(&mut || result = self.compute_reference(inputs, &mut reference));
        result.map(|()| reference)
    }

    fn compute_reference(&self, inputs: &[Vec<Tensor>], reference: &mut Reference) -> Result<(), JobError> {
        for set in inputs {
            reference.outputs.push(self.run_parts(set)?);
        }
        let nodes: Vec<_> = (0..self.graph.nodes().len() as u32).map(crate::graph::NodeId).collect();
        let is_computed = |value: &ValueId| !self.graph.inputs().contains(value);
        let mut wanted: Vec<ValueId> = self.graph.outputs().iter().copied().filter(is_computed).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let given = self.graph.inputs().to_vec();
        let Some(mut whole) = self.load(0, &nodes, &given, &wanted)? else { return Ok(()) };
        for (set, parts) in inputs.iter().zip(&reference.outputs) {
            let mut values = self.given(set);
            run(&mut *whole, &given, &wanted, &mut values)
                .map_err(|error| JobError::Runtime { rank: 0, error })?;
            for (value, part) in self.graph.outputs().iter().zip(parts) {
                let difference = values.get(value).map_or(f64::INFINITY, |whole| difference(whole, part));
                reference.largest_difference = reference.largest_difference.max(difference);
            }
        }
        Ok(())
    }

    fn given(&self, set: &[Tensor]) -> HashMap<ValueId, Tensor> {
        self.graph.inputs().iter().copied().zip(set.iter().cloned()).collect()
    }

    /// The results of the parts for one set. A part runs once all that it needs is there.
    fn run_parts(&self, set: &[Tensor]) -> Result<Vec<Tensor>, JobError> {
        let mut values = self.given(set);
        let mut open: Vec<u32> = (0..self.ranks()).collect();
        while !open.is_empty() {
            let is_ready =
                |rank: &u32| self.rank_plan(*rank).needs.iter().all(|value| values.contains_key(value));
            // Parts form no cycle.
            let place = open.iter().position(is_ready).unwrap_or(0);
            let rank = open.remove(place);
            let plan = self.rank_plan(rank);
            if let Some(mut program) = self.load(rank, &plan.nodes, &plan.needs, &plan.computes)? {
                run(&mut *program, &plan.needs, &plan.computes, &mut values)
                    .map_err(|error| JobError::Runtime { rank, error })?;
            }
        }
        let output = |value: &ValueId| values.get(value).cloned();
        Ok(self.graph.outputs().iter().filter_map(output).collect())
    }
}

fn run(
    program: &mut dyn Program,
    needs: &[ValueId],
    computes: &[ValueId],
    values: &mut HashMap<ValueId, Tensor>,
) -> Result<(), RuntimeError> {
    let inputs: Vec<TensorRef<'_>> = needs
        .iter()
        .filter_map(|value| values.get(value))
        .map(|tensor| TensorRef { form: &tensor.form, bytes: &tensor.bytes })
        .collect();
    let mut places: Vec<_> = computes.iter().map(|_| None).collect();
    let outputs = program.run(&inputs, &mut places)?;
    drop(inputs);
    let tensor = |output: Output| Tensor {
        form: output.form,
        bytes: output.bytes.map(|values| values.bytes().to_vec()).unwrap_or_default(),
    };
    values.extend(computes.iter().copied().zip(outputs.into_iter().map(tensor)));
    Ok(())
}

/// The largest difference of two tensors, as a share of the largest number in the first.
fn difference(whole: &Tensor, part: &Tensor) -> f64 {
    if whole.form != part.form {
        return f64::INFINITY;
    }
    if whole.bytes == part.bytes {
        return 0.0;
    }
    let (whole, part) = (numbers(whole), numbers(part));
    let largest = whole.iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
    let differences = whole.iter().zip(&part).map(|(whole, part)| (whole - part).abs());
    // The maximum must not swallow what is not a number.
    let worst =
        differences.fold(0.0_f64, |worst, next| if next > worst || next.is_nan() { next } else { worst });
    worst / largest.max(f64::MIN_POSITIVE)
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    use crate::element::ElementType;
    match tensor.form.element {
        ElementType::F32 => {
            let values = tensor.bytes.chunks_exact(4);
            values.map(|value| f64::from(f32::from_le_bytes(value.try_into().unwrap_or_default()))).collect()
        }
        ElementType::F64 => {
            let values = tensor.bytes.chunks_exact(8);
            values.map(|value| f64::from_le_bytes(value.try_into().unwrap_or_default())).collect()
        }
        ElementType::I32 => {
            let values = tensor.bytes.chunks_exact(4);
            values.map(|value| f64::from(i32::from_le_bytes(value.try_into().unwrap_or_default()))).collect()
        }
        _ => tensor.bytes.iter().map(|&value| f64::from(value)).collect(),
    }
}
