//! Tensors of this program as TensorFlow sees them.
//!
//! The endpoint knows types of numbers and eight dimensions. A tensor of TensorFlow that has more
//! is sent as bytes, with a note of what it is; other programs of pleach receive the bytes.

use std::sync::Arc;

use crate::endpoint::{
    DIMENSIONS_MAX, Endpoint, ReceivedTensor, SharedTensor, TensorMemoryError, TensorShape,
};
use crate::tensorflow::{ElementKind, TensorError, TensorflowTensor};
use pleach_vocabulary::DataType;

/// What a tensor is for TensorFlow where its shape does not say it.
#[derive(Debug)]
enum Note {
    /// Of a branch that was not taken.
    Dead,
    Numbers {
        element: ElementKind,
        dimensions: Vec<u64>,
    },
    /// Strings behind each other.
    Strings {
        dimensions: Vec<u64>,
        lengths: Vec<usize>,
    },
}

/// A tensor of TensorFlow in lendable memory, to be sent.
///
/// # Errors
///
/// See [`TensorMemoryError`].
pub fn share(endpoint: &Endpoint, tensor: &TensorflowTensor) -> Result<SharedTensor, TensorMemoryError> {
    let (element, dimensions) = (tensor.element(), tensor.dimensions());
    let sizes = dimensions.iter().map(|size| usize::try_from(*size).unwrap_or(usize::MAX));
    let sizes = sizes.collect::<Vec<_>>();
    let strings = tensor.strings().unwrap_or_default();
    let numbers = tensor.bytes().map(|bytes| &bytes[..]);
    let parts: Vec<&[u8]> = numbers.into_iter().chain(strings.iter().map(|text| &text[..])).collect();
    let bytes = parts.iter().map(|part| part.len()).sum();
    let data_type = element.data_type().filter(|_| sizes.len() <= DIMENSIONS_MAX);
    let shape = match data_type {
        Some(data_type) => TensorShape::new(data_type, &sizes)?,
        None => TensorShape::new(DataType::U8, &[bytes])?,
    };
    let shared = endpoint.tensor_of_bytes(&shape, |target| {
        let mut rest = target;
        for part in &parts {
            let (here, behind) = rest.split_at_mut(part.len());
            here.copy_from_slice(part);
            rest = behind;
        }
        Ok::<(), TensorMemoryError>(())
    })?;
    if data_type.is_some() {
        return Ok(shared);
    }
    let dimensions = dimensions.to_vec();
    let note = if element == ElementKind::String {
        Note::Strings { dimensions, lengths: strings.iter().map(bytes::Bytes::len).collect() }
    } else {
        Note::Numbers { element, dimensions }
    };
    Ok(shared.with_note(Arc::new(note)))
}

/// The same tensor, whose bytes are these elements for TensorFlow: of a type that pleach does not
/// have, or with more dimensions.
///
/// # Errors
///
/// See [`TensorError`]: it has another number of bytes.
pub fn labelled(
    tensor: SharedTensor,
    element: ElementKind,
    dimensions: Vec<u64>,
) -> Result<SharedTensor, TensorError> {
    TensorflowTensor::new(element, dimensions.clone(), tensor.clone().into_bytes())?;
    Ok(tensor.with_note(Arc::new(Note::Numbers { element, dimensions })))
}

/// A dead tensor: that of a branch that was not taken.
///
/// # Errors
///
/// See [`TensorMemoryError`].
pub fn dead(endpoint: &Endpoint) -> Result<SharedTensor, TensorMemoryError> {
    Ok(endpoint.tensor::<u8>(&[0])?.share().with_note(Arc::new(Note::Dead)))
}

/// A tensor of this program for TensorFlow; nothing if it is dead.
pub(super) fn of_own(tensor: ReceivedTensor) -> Result<Option<TensorflowTensor>, TensorError> {
    let local = tensor.local().cloned();
    let bytes = || tensor.clone().into_bytes();
    match local.as_ref().and_then(SharedTensor::note::<Note>) {
        Some(Note::Dead) => Ok(None),
        Some(Note::Numbers { element, dimensions }) => {
            TensorflowTensor::new(*element, dimensions.clone(), bytes()).map(Some)
        }
        Some(Note::Strings { dimensions, lengths }) => {
            let mut rest = bytes();
            let strings = lengths.iter().map(|length| rest.split_to(*length)).collect();
            TensorflowTensor::of_strings(dimensions.clone(), strings).map(Some)
        }
        None => {
            let shape = tensor.shape();
            let dimensions = shape.dimensions().iter().map(|size| *size as u64).collect();
            TensorflowTensor::new(ElementKind::from(shape.data_type()), dimensions, bytes()).map(Some)
        }
    }
}
