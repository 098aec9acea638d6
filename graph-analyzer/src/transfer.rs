//! How a tensor crosses between two ranks. Its shape decides (Xue et al. 2018).
//!
//! * [`Transfer::Static`]: all dimensions are fixed. The receiver has slots for the tensor; the
//!   sender puts it there with a signal.
//! * [`Transfer::Dynamic`]: the sender sends fixed-size metadata, and the receiver allocates the
//!   tensor and gets it. The metadata go with the signal if they are short.

use crate::graph::TensorType;
use crate::plan::BUFFER_BYTES_MAX;

/// Slots of a static crossing: as many iterations can be under way.
pub const SLOTS: u64 = 2;

/// Bytes of metadata that a signal carries.
pub const SIGNAL_BYTES: u64 = 48;

/// Bytes of metadata beside the dimensions: address, key and length.
const METADATA_BYTES: u64 = 24;

/// Bytes of a dimension in metadata.
const DIMENSION_BYTES: u64 = 8;

/// How a tensor crosses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// One put with a signal, into a slot of this size.
    Static {
        /// The size of the tensor.
        bytes: u64,
    },
    /// Metadata, then a get.
    Dynamic {
        /// The size of the metadata; nothing if the number of dimensions is unknown.
        metadata_bytes: Option<u64>,
        /// Whether the metadata go with the signal, and not into a slot of their own.
        is_in_signal: bool,
    },
}

impl Transfer {
    /// How a tensor of this type crosses.
    #[must_use]
    pub fn of(tensor: &TensorType) -> Self {
        if let Some(bytes) = tensor.bytes().filter(|&bytes| bytes <= BUFFER_BYTES_MAX) {
            return Self::Static { bytes };
        }
        let dimensions = tensor.shape.as_ref().map(|dims| dims.len() as u64);
        let metadata_bytes = dimensions.map(|count| METADATA_BYTES + DIMENSION_BYTES * count);
        Self::Dynamic {
            metadata_bytes,
            is_in_signal: metadata_bytes.is_some_and(|bytes| bytes <= SIGNAL_BYTES),
        }
    }

    /// The bytes of the tensor; 0 if they are not known before it is there.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::Static { bytes } => bytes,
            Self::Dynamic { .. } => 0,
        }
    }
}
