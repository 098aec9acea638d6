//! The inputs of a run: from files, or drawn at random.

use super::channels::TensorForm;
use super::plan::{Job, JobError};
use crate::element::ElementType;
use crate::graph::ValueId;
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
        let input = |set: u64, &input: &ValueId| {
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

    fn input(&self, input: ValueId, file: TensorFile) -> Result<Tensor, JobError> {
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
        let form = TensorForm { element, dims: file.dims };
        let mut bytes = vec![0; form.bytes().unwrap_or(0) as usize];
        convert(file.element, element, &file.bytes, &mut bytes)
            .map_err(|number| self.out_of_range(input, number, element))?;
        Ok(Tensor { form, bytes })
    }

    pub(crate) fn out_of_range(&self, input: ValueId, number: i64, element: ElementType) -> JobError {
        let input = self.graph.value(input).name.clone();
        JobError::OutOfRange { input, number, element, runtime: self.runtime.name() }
    }
}

/// Writes elements of one type as those of another that runtimes hold in its place, and back. The
/// error is a number that the other type does not have.
pub(crate) fn convert(from: ElementType, to: ElementType, values: &[u8], into: &mut [u8]) -> Result<(), i64> {
    const WIDE: usize = size_of::<i64>();
    const NARROW: usize = size_of::<i32>();
    let wide = |value: &[u8]| i64::from_le_bytes(value.try_into().unwrap_or_default());
    let narrow = |value: &[u8]| i32::from_le_bytes(value.try_into().unwrap_or_default());
    match (from, to) {
        (ElementType::I64, ElementType::I32) => {
            for (value, place) in values.chunks_exact(WIDE).zip(into.chunks_exact_mut(NARROW)) {
                let value = wide(value);
                place.copy_from_slice(&i32::try_from(value).map_err(|_| value)?.to_le_bytes());
            }
        }
        (ElementType::I32, ElementType::I64) => {
            for (value, place) in values.chunks_exact(NARROW).zip(into.chunks_exact_mut(WIDE)) {
                place.copy_from_slice(&i64::from(narrow(value)).to_le_bytes());
            }
        }
        (ElementType::Bool, ElementType::I32) => {
            for (value, place) in values.iter().zip(into.chunks_exact_mut(NARROW)) {
                place.copy_from_slice(&i32::from(*value != 0).to_le_bytes());
            }
        }
        (ElementType::I32, ElementType::Bool) => {
            for (value, place) in values.chunks_exact(NARROW).zip(into) {
                *place = u8::from(narrow(value) != 0);
            }
        }
        _ => into.copy_from_slice(values),
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_that_runtimes_hold_as_others_come_back_as_they_were() {
        let numbers: Vec<u8> =
            [0_i64, -5, i64::from(i32::MAX)].iter().flat_map(|n| n.to_le_bytes()).collect();
        let cases = [(ElementType::I64, numbers, 12), (ElementType::Bool, vec![1, 0, 1], 12)];
        for (element, values, held_bytes) in cases {
            let (mut held, mut back) = (vec![9; held_bytes], vec![9; values.len()]);
            assert_eq!(convert(element, ElementType::I32, &values, &mut held), Ok(()));
            assert_eq!(convert(ElementType::I32, element, &held, &mut back), Ok(()));
            assert_eq!(back, values, "{element}");
        }
        let large = (1_i64 << 31).to_le_bytes();
        assert_eq!(convert(ElementType::I64, ElementType::I32, &large, &mut [0; 4]), Err(1 << 31));
    }
}
