//! Requests for inference by KServe's open protocol, version 2, with Triton's extensions: what a
//! client may ask of a model, without a socket.
//!
//! * [`messages`] has the messages of gRPC, and [`decode()`] reads a request whose length alone is
//!   known.
//! * A [`ModelInterface`] says which tensors a model takes and gives. It checks a request
//!   ([`ModelInterface::check`]), which becomes an [`InferCall`]: all inputs in the model's order.
//! * [`SharedRegions`] are the shared memory that clients have registered.
//!
//! `grpc::inference` is the service around them.
//!
//! **Invariant:** an [`InferCall`] fits its model: every input is there once, with the datatype and
//! as many bytes as its shape says, and every output that is asked for exists. What a request makes
//! this program allocate is bounded by its own length, and by the shapes of the model.

mod decode;
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "it is generated")]
pub mod messages;
mod regions;
mod request;

use std::fmt;

pub use self::decode::{FIELDS_MAX, decode};
use self::messages::DataType;
pub use self::regions::{REGIONS_MAX, RegionSlice, SharedRegions};
pub use self::request::{GivenInput, InferCall, InputSource, WantedOutput};

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is its name")]
pub enum Datatype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
    Bf16,
}

/// Type, its name in requests, its number in configurations, bytes of an element.
const DATATYPES: &[(Datatype, &str, DataType, u64)] = &[
    (Datatype::Bool, "BOOL", DataType::TypeBool, 1),
    (Datatype::Uint8, "UINT8", DataType::TypeUint8, 1),
    (Datatype::Uint16, "UINT16", DataType::TypeUint16, 2),
    (Datatype::Uint32, "UINT32", DataType::TypeUint32, 4),
    (Datatype::Uint64, "UINT64", DataType::TypeUint64, 8),
    (Datatype::Int8, "INT8", DataType::TypeInt8, 1),
    (Datatype::Int16, "INT16", DataType::TypeInt16, 2),
    (Datatype::Int32, "INT32", DataType::TypeInt32, 4),
    (Datatype::Int64, "INT64", DataType::TypeInt64, 8),
    (Datatype::Fp16, "FP16", DataType::TypeFp16, 2),
    (Datatype::Fp32, "FP32", DataType::TypeFp32, 4),
    (Datatype::Fp64, "FP64", DataType::TypeFp64, 8),
    (Datatype::Bf16, "BF16", DataType::TypeBf16, 2),
];

impl Datatype {
    /// The type with this name. `BYTES`, the type of texts, is none: texts have no fixed size.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        DATATYPES.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Its number in the configuration of a model.
    #[must_use]
    pub fn in_config(self) -> DataType {
        self.row().2
    }

    /// The bytes of an element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.row().3
    }

    fn row(self) -> &'static (Self, &'static str, DataType, u64) {
        &DATATYPES[self as usize]
    }
}

impl fmt::Display for Datatype {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The size of a tensor along one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dimension {
    /// Always this size.
    Fixed(u64),
    /// The size that a request gives, the same for all dimensions of this name.
    Symbol(String),
    /// Any size.
    Any,
}

/// A tensor that a model takes or gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: Datatype,
    /// Its dimensions; nothing if their number is not known before the model runs.
    pub dimensions: Option<Vec<Dimension>>,
}

impl TensorSpec {
    /// The shape, with -1 for sizes that are not fixed. A shape without known dimensions is one -1.
    #[must_use]
    pub fn shape(&self) -> Vec<i64> {
        let size = |dimension: &Dimension| match dimension {
            Dimension::Fixed(size) => i64::try_from(*size).unwrap_or(i64::MAX),
            Dimension::Symbol(_) | Dimension::Any => -1,
        };
        self.dimensions.as_ref().map_or_else(|| vec![-1], |dimensions| dimensions.iter().map(size).collect())
    }

    /// The elements, if all sizes are fixed.
    fn elements(&self) -> Option<u64> {
        self.dimensions.as_ref()?.iter().try_fold(1_u64, |product, dimension| match dimension {
            Dimension::Fixed(size) => product.checked_mul(*size),
            Dimension::Symbol(_) | Dimension::Any => None,
        })
    }
}

/// What a model takes and gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelInterface {
    /// The name of the model.
    pub name: String,
    /// The only version.
    pub version: String,
    /// What runs it and the format of its file, such as `rten_onnx`.
    pub platform: String,
    /// The inputs, in order.
    pub inputs: Vec<TensorSpec>,
    /// The outputs, in order.
    pub outputs: Vec<TensorSpec>,
}

/// The longest request beside its tensors: names, shapes, parameters; in bytes.
const REQUEST_BYTES: u64 = 1 << 20;

/// The most bytes of an element in a message: a negative number.
const ELEMENT_BYTES_MAX: u64 = 10;

/// The longest request for a model whose inputs have no fixed size, in bytes.
const OPEN_REQUEST_BYTES: u64 = 1 << 30;

impl ModelInterface {
    /// The longest request that can be right, in bytes.
    #[must_use]
    pub fn request_bytes_max(&self) -> usize {
        let bytes = |input: &TensorSpec| input.elements()?.checked_mul(ELEMENT_BYTES_MAX);
        let inputs = self.inputs.iter().try_fold(REQUEST_BYTES, |sum, input| sum.checked_add(bytes(input)?));
        usize::try_from(inputs.unwrap_or(OPEN_REQUEST_BYTES)).unwrap_or(usize::MAX)
    }
}

/// Why a request has no answer. The text is one line, for people.
#[derive(Clone, PartialEq, Eq, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum InferenceError {
    /// The request does not fit the model.
    #[error("{0}")]
    Invalid(String),
    /// There is no such model or region.
    #[error("{0}")]
    NotFound(String),
    /// There is a region of this name.
    #[error("{0}")]
    Exists(String),
    /// There is no room for more.
    #[error("{0}")]
    Full(String),
    /// It is not served.
    #[error("{0}")]
    Unsupported(String),
    /// The model does not run any more.
    #[error("{0}")]
    Unavailable(String),
}

/// The most characters of a client's text in an error.
const SHOWN_MAX: usize = 64;

/// A text of a client, for an error.
fn shown(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN_MAX).collect();
    format!("{cut:?}{}", if cut.len() < text.len() { "…" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_types() {
        for (place, row) in DATATYPES.iter().enumerate() {
            assert_eq!(row.0 as usize, place, "{}", row.1);
            assert_eq!(Datatype::from_name(row.1), Some(row.0));
            assert_eq!(row.2.as_str_name(), format!("TYPE_{}", row.1));
        }
        assert_eq!(Datatype::from_name("BYTES"), None);
    }

    #[test]
    fn a_text_of_a_client_is_short_and_has_no_control_characters() {
        assert_eq!(shown("a\u{1b}b\n"), "\"a\\u{1b}b\\n\"");
        assert_eq!(shown(&"x".repeat(100)), format!("\"{}\"…", "x".repeat(64)));
    }
}
