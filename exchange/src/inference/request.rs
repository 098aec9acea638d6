//! Whether a request fits a model.

use std::collections::HashMap;

use bytes::Bytes;

use super::messages::infer_parameter::ParameterChoice;
use super::messages::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use super::messages::{InferParameter, InferTensorContents, ModelInferRequest};
use super::{Datatype, Dimension, InferenceError, ModelInterface, RegionSlice, TensorSpec, shown};

/// The most bytes of an input: what a request makes this program allocate has a limit.
const TENSOR_BYTES_MAX: u64 = 1 << 31;

/// A request that fits its model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InferCall {
    /// The client's name of the request.
    pub id: String,
    /// By input of the model.
    pub inputs: Vec<GivenInput>,
    /// The outputs that are asked for, in the order in which they are.
    pub outputs: Vec<WantedOutput>,
}

/// An input of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenInput {
    /// Its sizes.
    pub shape: Vec<u64>,
    /// Its elements.
    pub source: InputSource,
}

/// Where the elements of an input are: as many as its shape says, little endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputSource {
    /// In the message.
    Message(Bytes),
    /// In shared memory.
    Region(RegionSlice),
}

/// An output that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedOutput {
    /// Its number among the outputs of the model.
    pub number: usize,
    /// Where it goes in shared memory; nothing for one that goes into the message.
    pub region: Option<RegionSlice>,
}

type Parameters = HashMap<String, InferParameter>;

fn invalid<T>(text: String) -> Result<T, InferenceError> {
    Err(InferenceError::Invalid(text))
}

fn names(tensors: &[TensorSpec]) -> String {
    let names: Vec<String> = tensors.iter().map(|tensor| format!("'{}'", tensor.name)).collect();
    names.join(", ")
}

impl ModelInterface {
    /// Checks that a request names this model.
    ///
    /// # Errors
    ///
    /// [`InferenceError::NotFound`].
    pub fn check_name(&self, name: &str, version: &str) -> Result<(), InferenceError> {
        if name != self.name {
            let (asked, name) = (shown(name), &self.name);
            return Err(InferenceError::NotFound(format!("there is no model {asked}; '{name}' is served")));
        }
        if !version.is_empty() && version != self.version {
            let (asked, own) = (shown(version), &self.version);
            let text = format!("the model '{name}' has no version {asked}; it has version {own}");
            return Err(InferenceError::NotFound(text));
        }
        Ok(())
    }

    /// Checks a request. What it takes and gives in shared memory is not looked at.
    ///
    /// # Errors
    ///
    /// [`InferenceError`] says what was expected.
    pub fn check(&self, request: ModelInferRequest) -> Result<InferCall, InferenceError> {
        self.check_name(&request.model_name, &request.model_version)?;
        let is_sequence = |name: &&String| name.starts_with("sequence_");
        if let Some(name) = request.parameters.keys().find(is_sequence) {
            let text = format!("the parameter {} is not served: requests are no sequences", shown(name));
            return Err(InferenceError::Unsupported(text));
        }
        let mut given: Vec<Option<GivenInput>> = vec![None; self.inputs.len()];
        let mut sizes = HashMap::new();
        let mut raw = request.raw_input_contents.into_iter();
        let is_raw = raw.len() > 0;
        for input in request.inputs {
            let Some(number) = self.inputs.iter().position(|known| known.name == input.name) else {
                let (name, known) = (shown(&input.name), names(&self.inputs));
                return invalid(format!("the model has no input {name}; it has {known}"));
            };
            let spec = &self.inputs[number];
            let checked = given_input(spec, input, &mut sizes, is_raw.then_some(&mut raw))?;
            if given[number].replace(checked).is_some() {
                return invalid(format!("the input '{}' is given twice", spec.name));
            }
        }
        if raw.len() > 0 {
            let text = "there are more raw contents than inputs that are in no shared memory";
            return invalid(text.to_owned());
        }
        let mut inputs = Vec::with_capacity(given.len());
        for (input, spec) in given.into_iter().zip(&self.inputs) {
            let Some(input) = input else {
                return invalid(format!("the input '{}' is missing; it is {}", spec.name, said(spec)));
            };
            inputs.push(input);
        }
        Ok(InferCall { id: request.id, inputs, outputs: self.wanted(request.outputs)? })
    }

    fn wanted(&self, asked: Vec<InferRequestedOutputTensor>) -> Result<Vec<WantedOutput>, InferenceError> {
        if asked.is_empty() {
            let all = 0..self.outputs.len();
            return Ok(all.map(|number| WantedOutput { number, region: None }).collect());
        }
        let mut wanted: Vec<WantedOutput> = Vec::with_capacity(asked.len().min(self.outputs.len()));
        for output in asked {
            let Some(number) = self.outputs.iter().position(|known| known.name == output.name) else {
                let (name, known) = (shown(&output.name), names(&self.outputs));
                return invalid(format!("the model has no output {name}; it has {known}"));
            };
            let name = &self.outputs[number].name;
            if wanted.iter().any(|other| other.number == number) {
                return invalid(format!("the output '{name}' is asked for twice"));
            }
            if output.parameters.contains_key("classification") {
                let text = format!("classification is not served; ask for the output '{name}' without it");
                return Err(InferenceError::Unsupported(text));
            }
            wanted.push(WantedOutput { number, region: region(name, &output.parameters)? });
        }
        Ok(wanted)
    }
}

/// A tensor's datatype and shape, for an error.
fn said(spec: &TensorSpec) -> String {
    let size = |dimension: &Dimension| match dimension {
        Dimension::Fixed(size) => size.to_string(),
        Dimension::Symbol(name) => name.clone(),
        Dimension::Any => "any".to_owned(),
    };
    let sizes = spec.dimensions.as_ref().map(|all| all.iter().map(size).collect::<Vec<_>>().join(", "));
    format!("{} [{}]", spec.datatype, sizes.unwrap_or_else(|| "…".to_owned()))
}

/// Checks an input. `sizes` has the sizes of symbols in the inputs before.
fn given_input(
    spec: &TensorSpec,
    input: InferInputTensor,
    sizes: &mut HashMap<String, u64>,
    raw: Option<&mut std::vec::IntoIter<Bytes>>,
) -> Result<GivenInput, InferenceError> {
    let name = &spec.name;
    let shape = given_shape(spec, &input, sizes)?;
    let bytes = shape.iter().try_fold(spec.datatype.bytes(), |product, &size| product.checked_mul(size));
    let Some(bytes) = bytes.filter(|bytes| *bytes <= TENSOR_BYTES_MAX) else {
        return invalid(format!("the input '{name}' has more than {TENSOR_BYTES_MAX} bytes"));
    };
    if let Some(slice) = region(name, &input.parameters)? {
        if input.contents.is_some() {
            return invalid(format!("the input '{name}' is in shared memory and has contents too"));
        }
        check_bytes(spec, &shape, bytes, slice.bytes)?;
        return Ok(GivenInput { shape, source: InputSource::Region(slice) });
    }
    let contents = match (raw, input.contents) {
        (Some(_), Some(_)) => {
            return invalid(format!("the input '{name}' has contents beside raw contents; give one of them"));
        }
        (Some(raw), None) => {
            let Some(raw) = raw.next() else {
                return invalid(format!("there are no raw contents for the input '{name}'"));
            };
            raw
        }
        (None, Some(contents)) => typed(spec, &contents, bytes / spec.datatype.bytes())?.into(),
        (None, None) => Bytes::new(),
    };
    check_bytes(spec, &shape, bytes, contents.len() as u64)?;
    Ok(GivenInput { shape, source: InputSource::Message(contents) })
}

/// Checks the datatype and the shape of an input.
fn given_shape(
    spec: &TensorSpec,
    input: &InferInputTensor,
    sizes: &mut HashMap<String, u64>,
) -> Result<Vec<u64>, InferenceError> {
    let other = || {
        let (given, shape) = (shown(&input.datatype), &input.shape[..input.shape.len().min(SHAPE_SHOWN)]);
        invalid(format!("the input '{}' is {}, and the request has {given} {shape:?}", spec.name, said(spec)))
    };
    if input.datatype != spec.datatype.name() {
        return other();
    }
    let expected = spec.dimensions.as_deref();
    if expected.is_some_and(|expected| expected.len() != input.shape.len()) {
        return other();
    }
    let mut shape = Vec::with_capacity(input.shape.len());
    for (place, &size) in input.shape.iter().enumerate() {
        let Some(size) = u64::try_from(size).ok().filter(|size| *size > 0) else { return other() };
        match expected.map(|expected| &expected[place]) {
            Some(Dimension::Fixed(fixed)) if *fixed != size => return other(),
            Some(Dimension::Symbol(symbol)) => {
                let known = *sizes.entry(symbol.clone()).or_insert(size);
                if known != size {
                    let name = &spec.name;
                    return invalid(format!(
                        "the size {symbol} of the input '{name}' is {size}, and {known} before"
                    ));
                }
            }
            _ => {}
        }
        shape.push(size);
    }
    Ok(shape)
}

/// The most sizes of a client's shape in an error.
const SHAPE_SHOWN: usize = 16;

fn check_bytes(spec: &TensorSpec, shape: &[u64], expected: u64, found: u64) -> Result<(), InferenceError> {
    if expected == found {
        return Ok(());
    }
    let (name, datatype) = (&spec.name, spec.datatype);
    invalid(format!(
        "the input '{name}' of {datatype} {shape:?} has {expected} bytes, and {found} were given"
    ))
}

/// The slice of a region that a tensor's parameters name.
fn region(tensor: &str, parameters: &Parameters) -> Result<Option<RegionSlice>, InferenceError> {
    let parameter = |name: &str| parameters.get(name).and_then(|value| value.parameter_choice.as_ref());
    let number = |name: &str| match parameter(name) {
        Some(ParameterChoice::Int64Param(number)) => {
            u64::try_from(*number).map(Some).map_err(|_| name.to_owned())
        }
        Some(ParameterChoice::Uint64Param(number)) => Ok(Some(*number)),
        Some(_) => Err(name.to_owned()),
        None => Ok(None),
    };
    let wrong =
        |name: String| InferenceError::Invalid(format!("the parameter {name} of '{tensor}' is no size"));
    let region = match parameter("shared_memory_region") {
        None => return Ok(None),
        Some(ParameterChoice::StringParam(region)) => region.clone(),
        Some(_) => return invalid(format!("the parameter shared_memory_region of '{tensor}' is no text")),
    };
    let offset = number("shared_memory_offset").map_err(wrong)?.unwrap_or(0);
    let Some(bytes) = number("shared_memory_byte_size").map_err(wrong)? else {
        return invalid(format!("'{tensor}' in shared memory has no parameter shared_memory_byte_size"));
    };
    Ok(Some(RegionSlice { region, offset, bytes }))
}

/// The bytes of typed contents.
fn typed(
    spec: &TensorSpec,
    contents: &InferTensorContents,
    elements: u64,
) -> Result<Vec<u8>, InferenceError> {
    /// As many values as there are elements, each by `bytes`; nothing for one that does not fit.
    fn all<T: Copy, const N: usize>(
        (spec, field, elements): (&TensorSpec, &str, u64),
        values: &[T],
        bytes: impl Fn(T) -> Option<[u8; N]>,
    ) -> Result<Vec<u8>, InferenceError> {
        let TensorSpec { name, datatype, .. } = spec;
        if values.len() as u64 != elements {
            let found = values.len();
            return invalid(format!(
                "the input '{name}' has {elements} elements of {datatype}, and {field} has {found}"
            ));
        }
        let mut all = Vec::with_capacity(values.len() * N);
        for &value in values {
            let Some(bytes) = bytes(value) else {
                return invalid(format!(
                    "a number in {field} of the input '{name}' is out of the range of {datatype}"
                ));
            };
            all.extend(bytes);
        }
        Ok(all)
    }
    let ints = |of| (spec, of, elements);
    let (int, uint) = ("int_contents", "uint_contents");
    match spec.datatype {
        Datatype::Bool => {
            all(ints("bool_contents"), &contents.bool_contents, |value| Some([u8::from(value)]))
        }
        Datatype::Int8 => {
            all(ints(int), &contents.int_contents, |value| Some(i8::try_from(value).ok()?.to_le_bytes()))
        }
        Datatype::Int16 => {
            all(ints(int), &contents.int_contents, |value| Some(i16::try_from(value).ok()?.to_le_bytes()))
        }
        Datatype::Int32 => all(ints(int), &contents.int_contents, |value| Some(value.to_le_bytes())),
        Datatype::Int64 => {
            all(ints("int64_contents"), &contents.int64_contents, |value| Some(value.to_le_bytes()))
        }
        Datatype::Uint8 => {
            all(ints(uint), &contents.uint_contents, |value| Some(u8::try_from(value).ok()?.to_le_bytes()))
        }
        Datatype::Uint16 => {
            all(ints(uint), &contents.uint_contents, |value| Some(u16::try_from(value).ok()?.to_le_bytes()))
        }
        Datatype::Uint32 => all(ints(uint), &contents.uint_contents, |value| Some(value.to_le_bytes())),
        Datatype::Uint64 => {
            all(ints("uint64_contents"), &contents.uint64_contents, |value| Some(value.to_le_bytes()))
        }
        Datatype::Fp32 => {
            all(ints("fp32_contents"), &contents.fp32_contents, |value| Some(value.to_le_bytes()))
        }
        Datatype::Fp64 => {
            all(ints("fp64_contents"), &contents.fp64_contents, |value| Some(value.to_le_bytes()))
        }
        Datatype::Fp16 | Datatype::Bf16 => {
            let TensorSpec { name, datatype, .. } = spec;
            invalid(format!("the input '{name}' is {datatype}, which has raw contents alone"))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::super::decode;
    use super::*;

    fn spec(name: &str, datatype: Datatype, dimensions: &[Dimension]) -> TensorSpec {
        TensorSpec { name: name.to_owned(), datatype, dimensions: Some(dimensions.to_vec()) }
    }

    /// Inputs `x`: FP32 [batch, 2] and `y`: INT64 [batch]; an output `z`.
    fn model() -> ModelInterface {
        let batch = Dimension::Symbol("batch".to_owned());
        ModelInterface {
            name: "m".to_owned(),
            version: "1".to_owned(),
            platform: "test".to_owned(),
            inputs: vec![
                spec("x", Datatype::Fp32, &[batch.clone(), Dimension::Fixed(2)]),
                spec("y", Datatype::Int64, &[batch]),
            ],
            outputs: vec![spec("z", Datatype::Fp32, &[Dimension::Any])],
        }
    }

    fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
        InferInputTensor {
            name: name.to_owned(),
            datatype: datatype.to_owned(),
            shape: shape.to_vec(),
            ..InferInputTensor::default()
        }
    }

    fn request(inputs: Vec<InferInputTensor>, raw: &[&'static [u8]]) -> ModelInferRequest {
        ModelInferRequest {
            model_name: "m".to_owned(),
            inputs,
            raw_input_contents: raw.iter().map(|bytes| Bytes::from_static(bytes)).collect(),
            ..ModelInferRequest::default()
        }
    }

    fn two() -> Vec<InferInputTensor> {
        vec![input("y", "INT64", &[1]), input("x", "FP32", &[1, 2])]
    }

    fn parameter(value: ParameterChoice) -> InferParameter {
        InferParameter { parameter_choice: Some(value) }
    }

    fn refused(request: ModelInferRequest) -> String {
        match model().check(request) {
            Err(InferenceError::Invalid(text)) => text,
            other => panic!("{other:?} is no invalid request"),
        }
    }

    #[test]
    fn a_request_that_fits_has_its_inputs_in_the_order_of_the_model() {
        let call = model().check(request(two(), &[b"12345678", b"abcdefgh"])).expect("it fits");
        let message = |bytes: &'static [u8]| InputSource::Message(Bytes::from_static(bytes));
        assert_eq!(call.inputs[0], GivenInput { shape: vec![1, 2], source: message(b"abcdefgh") });
        assert_eq!(call.inputs[1], GivenInput { shape: vec![1], source: message(b"12345678") });
        assert_eq!(call.outputs, [WantedOutput { number: 0, region: None }]);
    }

    #[test]
    fn typed_contents_become_the_bytes_of_the_datatype() {
        let contents = InferTensorContents {
            bool_contents: vec![true, false],
            int_contents: vec![-2, 3],
            int64_contents: vec![-2, 3],
            uint_contents: vec![2, 300],
            uint64_contents: vec![2, 3],
            fp32_contents: vec![0.5, -1.0],
            fp64_contents: vec![0.5, -1.0],
            bytes_contents: Vec::new(),
        };
        let bytes = |datatype| typed(&spec("x", datatype, &[]), &contents, 2);
        assert_eq!(bytes(Datatype::Bool), Ok(vec![1, 0]));
        assert_eq!(bytes(Datatype::Int8), Ok(vec![254, 3]));
        assert_eq!(bytes(Datatype::Int16), Ok(vec![254, 255, 3, 0]));
        assert_eq!(bytes(Datatype::Uint16), Ok(vec![2, 0, 44, 1]));
        assert_eq!(bytes(Datatype::Fp32), Ok([0.5_f32.to_le_bytes(), (-1_f32).to_le_bytes()].concat()));
        for datatype in [Datatype::Int64, Datatype::Uint64, Datatype::Fp64] {
            assert_eq!(bytes(datatype).map(|bytes| bytes.len()), Ok(16));
        }
        let error = bytes(Datatype::Uint8).expect_err("300 is too large").to_string();
        assert!(error.contains("out of the range of UINT8"), "{error}");
        assert!(bytes(Datatype::Fp16).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused_with_what_was_expected() {
        let raw: &[&[u8]] = &[b"12345678", b"abcdefgh"];
        let with = |place: usize, input: InferInputTensor| {
            let mut inputs = two();
            inputs[place] = input;
            inputs
        };
        let cases = [
            (with(0, input("q", "INT64", &[1])), raw, "no input \"q\"; it has 'x', 'y'"),
            (with(0, input("x", "FP32", &[1, 2])), raw, "'x' is given twice"),
            (vec![two().remove(0)], &raw[..1], "the input 'x' is missing; it is FP32 [batch, 2]"),
            (
                with(1, input("x", "FP64", &[1, 2])),
                raw,
                "'x' is FP32 [batch, 2], and the request has \"FP64\"",
            ),
            (with(1, input("x", "FP32", &[1, 3])), raw, "and the request has \"FP32\" [1, 3]"),
            (with(1, input("x", "FP32", &[2])), raw, "and the request has \"FP32\" [2]"),
            (with(1, input("x", "FP32", &[-1, 2])), raw, "[-1, 2]"),
            (with(1, input("x", "FP32", &[0, 2])), raw, "[0, 2]"),
            (with(1, input("x", "FP32", &[2, 2])), raw, "the size batch of the input 'x' is 2, and 1 before"),
            (two(), &[b"12345678", b"abc"], "'x' of FP32 [1, 2] has 8 bytes, and 3 were given"),
            (two(), &[b"12345678"], "no raw contents for the input 'x'"),
            (two(), &[b"12345678", b"abcdefgh", b"more"], "more raw contents than inputs"),
            (two(), &[], "'y' of INT64 [1] has 8 bytes, and 0 were given"),
            (vec![input("y", "INT64", &[i64::MAX])], &[b""], "more than 2147483648 bytes"),
        ];
        for (inputs, raw, expected) in cases {
            let error = refused(request(inputs, raw));
            assert!(error.contains(expected), "{error} does not contain {expected}");
        }
        let mut both = two();
        both[0].contents = Some(InferTensorContents::default());
        assert!(refused(request(both, raw)).contains("contents beside raw contents"));
    }

    #[test]
    fn another_model_another_version_and_another_output_are_not_found() {
        let check = |name: &str, version: &str| model().check_name(name, version);
        assert_eq!((check("m", ""), check("m", "1")), (Ok(()), Ok(())));
        assert!(matches!(check("n", ""), Err(InferenceError::NotFound(_))));
        assert!(matches!(check("m", "2"), Err(InferenceError::NotFound(_))));
        let output =
            InferRequestedOutputTensor { name: "q".to_owned(), ..InferRequestedOutputTensor::default() };
        let asked =
            ModelInferRequest { outputs: vec![output], ..request(two(), &[b"12345678", b"abcdefgh"]) };
        assert_eq!(refused(asked), "the model has no output \"q\"; it has 'z'");
    }

    #[test]
    fn parameters_name_shared_memory() {
        let mut inputs = two();
        let sizes = |region: &str, bytes, offset| {
            HashMap::from([
                (
                    "shared_memory_region".to_owned(),
                    parameter(ParameterChoice::StringParam(region.to_owned())),
                ),
                ("shared_memory_byte_size".to_owned(), parameter(ParameterChoice::Int64Param(bytes))),
                ("shared_memory_offset".to_owned(), parameter(ParameterChoice::Int64Param(offset))),
            ])
        };
        inputs[0].parameters = sizes("r", 8, 16);
        let call = model().check(request(inputs.clone(), &[b"abcdefgh"])).expect("it fits");
        let slice = RegionSlice { region: "r".to_owned(), offset: 16, bytes: 8 };
        assert_eq!(call.inputs[1].source, InputSource::Region(slice));
        for (bytes, offset, expected) in [
            (9, 0, "has 8 bytes, and 9 were given"),
            (-1, 0, "shared_memory_byte_size"),
            (8, -1, "is no size"),
        ] {
            inputs[0].parameters = sizes("r", bytes, offset);
            let error = refused(request(inputs.clone(), &[b"abcdefgh"]));
            assert!(error.contains(expected), "{error}");
        }
        inputs[0].parameters = sizes("r", 8, 0);
        inputs[0].parameters.remove("shared_memory_byte_size");
        assert!(refused(request(inputs, &[b"abcdefgh"])).contains("no parameter shared_memory_byte_size"));
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_reason_to_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
        ) {
            let _ = decode(&bytes[..]).and_then(|request| model().check(request));
            let mut message = request(two(), &[b"12345678", b"abcdefgh"]).encode_to_vec();
            for (place, byte) in changes {
                let place = place.index(message.len());
                message[place] = byte;
            }
            if let Ok(call) = decode(&message[..]).and_then(|request| model().check(request)) {
                prop_assert_eq!(&call.inputs[0].shape[1..], &[2]);
                prop_assert_eq!(call.inputs[0].shape[0], call.inputs[1].shape[0]);
            }
        }
    }
}
