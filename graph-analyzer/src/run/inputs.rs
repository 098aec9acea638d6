//! The inputs of a run: from files, or drawn at random.

use super::channels::TensorForm;
use super::plan::{Job, JobError};
use crate::element::ElementType;
use crate::onnx::{TensorFile, random};

/// A tensor with its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Type and dimensions.
    pub form: TensorForm,
    /// The values, in the bytes of the processor.
    pub bytes: Vec<u8>,
}

/// Largest whole number that is drawn: indices are small in any model.
const INTEGERS: u64 = 4;

impl Job<'_> {
    /// So many different sets of inputs, drawn at random.
    ///
    /// # Errors
    ///
    /// [`JobError`]: the shape of an input is not known.
    pub fn random_inputs(&self, sets: u64, seed: u64) -> Result<Vec<Vec<Tensor>>, JobError> {
        let input = |set: u64, &input: &crate::graph::ValueId| {
            self.check_input(input)?;
            let form = self
                .form(input)
                .ok_or_else(|| JobError::UnknownInput { input: self.graph.value(input).name.clone() })?;
            Ok(drawn(form, &format!("{set} {}", self.graph.value(input).name), seed))
        };
        let set = |set| self.graph.inputs().iter().map(|value| input(set, value)).collect();
        (0..sets).map(set).collect()
    }

    /// The inputs that files hold, in the order of the graph's inputs.
    ///
    /// # Errors
    ///
    /// [`JobError`]: an input has another type or shape.
    pub fn inputs(&self, files: Vec<TensorFile>) -> Result<Vec<Tensor>, JobError> {
        let inputs = self.graph.inputs();
        if files.len() != inputs.len() {
            return Err(JobError::Inputs { expected: inputs.len(), found: files.len() });
        }
        inputs.iter().zip(files).map(|(&input, file)| self.input(input, file)).collect()
    }

    fn input(&self, input: crate::graph::ValueId, file: TensorFile) -> Result<Tensor, JobError> {
        self.check_input(input)?;
        let value = self.graph.value(input);
        let is_same =
            value.tensor.element == Some(file.element) && value.tensor.sizes().as_ref() == Some(&file.dims);
        let other = |found: String| JobError::OtherInput {
            input: value.name.clone(),
            expected: value.tensor.to_string(),
            found,
        };
        if !is_same {
            return Err(other(format!("{} {:?}", file.element, file.dims)));
        }
        let element = self.runtime.element(file.element).unwrap_or(file.element);
        let bytes = match (file.element, element) {
            (ElementType::I64, ElementType::I32) => {
                let values = file
                    .bytes
                    .chunks_exact(8)
                    .map(|value| i64::from_le_bytes(value.try_into().unwrap_or_default()));
                let values = values
                    .map(|value| i32::try_from(value).map_err(|_| other(format!("the number {value}"))));
                let values = values.collect::<Result<Vec<_>, _>>()?;
                values.into_iter().flat_map(i32::to_le_bytes).collect()
            }
            (ElementType::Bool, ElementType::I32) => {
                file.bytes.iter().flat_map(|&value| i32::from(value != 0).to_le_bytes()).collect()
            }
            _ => file.bytes,
        };
        Ok(Tensor { form: TensorForm { element, dims: file.dims }, bytes })
    }
}

fn drawn(form: TensorForm, name: &str, seed: u64) -> Tensor {
    let mut random = random::stream(name, seed);
    let elements: u64 = form.dims.iter().product();
    let mut bytes = Vec::new();
    for _ in 0..elements {
        match form.element {
            ElementType::F32 => bytes.extend(random::unit(&mut random).to_le_bytes()),
            ElementType::F64 => bytes.extend(f64::from(random::unit(&mut random)).to_le_bytes()),
            ElementType::I64 | ElementType::U64 => bytes.extend(random.below(INTEGERS).to_le_bytes()),
            ElementType::I32 | ElementType::U32 => {
                bytes.extend((random.below(INTEGERS) as u32).to_le_bytes())
            }
            ElementType::Bool => bytes.push(random.below(2) as u8),
            ElementType::U8 | ElementType::I8 => bytes.push(random.below(INTEGERS) as u8),
            // Zeros are numbers of every type.
            element => bytes.extend(vec![0; element.bytes(1).unwrap_or(1) as usize]),
        }
    }
    Tensor { form, bytes }
}
