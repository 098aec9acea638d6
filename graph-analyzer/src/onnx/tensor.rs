//! Tensors in files of their own: the inputs of a run.

use prost::Message as _;
use prost::bytes::Bytes;

use super::OnnxError;
use super::proto::{TensorProto, tensor_proto::DataLocation};
use crate::element::ElementType;
use crate::graph::DIMENSIONS_MAX;

/// A tensor with its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFile {
    /// The type of the elements.
    pub element: ElementType,
    /// The dimensions.
    pub dims: Vec<u64>,
    /// The values, in the order and the bytes of the processor.
    pub bytes: Vec<u8>,
}

impl TensorFile {
    /// Decodes a file with one `TensorProto`.
    ///
    /// # Errors
    ///
    /// [`OnnxError`]: it holds no such tensor.
    pub fn decode(bytes: impl Into<Bytes>) -> Result<Self, OnnxError> {
        let bytes = bytes.into();
        if bytes.len() > super::MODEL_BYTES_MAX {
            return Err(OnnxError::TooMuch { what: "bytes", most: super::MODEL_BYTES_MAX });
        }
        let tensor =
            TensorProto::decode(bytes).map_err(|error| OnnxError::NoModel { reason: error.to_string() })?;
        let wrong =
            |problem: &str| OnnxError::Tensor { name: tensor.name().to_owned(), problem: problem.to_owned() };
        let element =
            ElementType::from_onnx(tensor.data_type()).ok_or_else(|| wrong("has an unknown type"))?;
        if tensor.data_location() == DataLocation::External || tensor.dims.len() > DIMENSIONS_MAX {
            return Err(wrong("does not hold its values itself"));
        }
        let dims: Option<Vec<u64>> = tensor.dims.iter().map(|&dim| u64::try_from(dim).ok()).collect();
        let dims = dims.ok_or_else(|| wrong("has a dimension below zero"))?;
        let elements = dims.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim));
        let len = elements.and_then(|elements| element.bytes(elements));
        let len = len.ok_or_else(|| wrong("is larger than any memory, or of text"))?;
        let bytes = values(&tensor, element);
        if bytes.len() as u64 != len {
            return Err(wrong(&format!("has {} bytes and dimensions for {len}", bytes.len())));
        }
        Ok(Self { element, dims, bytes })
    }
}

fn values(tensor: &TensorProto, element: ElementType) -> Vec<u8> {
    if let Some(raw) = &tensor.raw_data {
        return raw.to_vec();
    }
    match element {
        ElementType::F32 => tensor.float_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ElementType::F64 => tensor.double_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ElementType::I64 => tensor.int64_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ElementType::U64 => tensor.uint64_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ElementType::U32 => {
            tensor.uint64_data.iter().flat_map(|&value| (value as u32).to_le_bytes()).collect()
        }
        ElementType::I32 => tensor.int32_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        ElementType::U16 | ElementType::I16 | ElementType::F16 | ElementType::Bf16 => {
            tensor.int32_data.iter().flat_map(|&value| (value as u16).to_le_bytes()).collect()
        }
        _ => tensor.int32_data.iter().map(|&value| value as u8).collect(),
    }
}
