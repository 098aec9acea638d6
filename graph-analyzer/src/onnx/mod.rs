//! ONNX models: decoded, read as graphs, and written back with a placement.
//!
//! [`Model`] holds what the file says; [`Model::graph`] makes a [`Graph`] of it. Bytes of weights
//! stay where they are: fields of bytes refer to the file's contents and are not copied.
//!
//! **Invariant:** a file is hostile until it is checked. [`limits`] bounds the memory that decoding
//! takes before anything is decoded; the decoder bounds the depth; [`import`] checks names, sizes
//! and paths.

use prost::Message as _;
use prost::bytes::Bytes;

use crate::graph::{Graph, GraphError};

mod cut;
mod export;
mod import;
mod limits;
mod of_graph;
pub(crate) mod random;
mod rewrites;
mod tensor;
mod weights;
#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "it is generated")]
mod proto;

pub use cut::{Cut, CutError};
pub use tensor::TensorFile;
pub use weights::{WeightFileError, check_weight_files};

/// Largest file of a model, in bytes: protobuf's own limit.
pub const MODEL_BYTES_MAX: usize = (1 << 31) - 1;

/// Why a file is no model.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OnnxError {
    /// The bytes are no model.
    #[error("no ONNX model ({reason}); name a file that was exported as ONNX")]
    NoModel {
        /// The decoder's reason.
        reason: String,
    },
    /// The file holds more than this reader takes.
    #[error("the file has more than {most} {what}; use a smaller model")]
    TooMuch {
        /// The kind of thing.
        what: &'static str,
        /// The limit.
        most: usize,
    },
    /// A tensor is not what it says.
    #[error("the tensor '{name}' {problem}; export the model again")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The graph is none.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

/// An ONNX model as its file says it.
#[derive(Clone, PartialEq)]
pub struct Model {
    proto: proto::ModelProto,
}

impl Model {
    /// Decodes a file. Fields of later versions of the form than this one are left out.
    ///
    /// # Errors
    ///
    /// [`OnnxError`]: the bytes are no model, or are larger than the limits.
    pub fn decode(bytes: impl Into<Bytes>) -> Result<Self, OnnxError> {
        let bytes = bytes.into();
        limits::check(&bytes)?;
        let proto = proto::ModelProto::decode(bytes);
        let proto = proto.map_err(|error| OnnxError::NoModel { reason: error.to_string() })?;
        Ok(Self { proto })
    }

    /// The graph of the model.
    ///
    /// # Errors
    ///
    /// [`OnnxError`]: there is none, or it is none.
    pub fn graph(&self) -> Result<Graph, OnnxError> {
        import::graph(&self.proto)
    }

    /// Encodes the model.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        self.proto.encode_to_vec()
    }
}

impl std::fmt::Debug for Model {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Model").field("producer", &self.proto.producer_name).finish_non_exhaustive()
    }
}

impl Graph {
    /// The graph of an ONNX model.
    ///
    /// # Errors
    ///
    /// [`OnnxError`]: the bytes are no model, or its graph is none.
    pub fn from_onnx(bytes: &[u8]) -> Result<Self, OnnxError> {
        Model::decode(Bytes::copy_from_slice(bytes))?.graph()
    }
}
