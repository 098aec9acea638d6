//! The metadata of a tensor: where it is at the sender, its type and its dimensions.
//!
//! Words of 64 bits, little endian. The place comes first: key, offset, length. With a fixed type
//! and a fixed number of dimensions the dimensions follow, as far as a signal has room. Otherwise
//! the metadata lie in a slot of their own, where type and number precede the dimensions.

use pleach_transport::{RegionKey, RemoteSlice, SIGNAL_SLOT_PAYLOAD_BYTES};

use super::{Form, REMOTE_SLICE_BYTES, encode_remote};
use crate::element::ElementType;
use crate::graph::DIMENSIONS_MAX;
use crate::plan::BUFFER_BYTES_MAX;

/// The type and the dimensions of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorForm {
    /// The type of the elements.
    pub element: ElementType,
    /// The dimensions.
    pub dims: Vec<u64>,
}

impl TensorForm {
    /// The bytes of the tensor, if they are as few as buffers have.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.dims.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim))?;
        self.element.bytes(elements).filter(|&bytes| bytes <= BUFFER_BYTES_MAX)
    }
}

/// The length of metadata in a slot of their own.
pub(crate) const SLOT_BYTES: usize = REMOTE_SLICE_BYTES + 8 * (2 + DIMENSIONS_MAX);

/// How the metadata of a channel are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// The place alone: type and dimensions are fixed, and so is the length.
    Place { bytes: u64 },
    /// The place and so many dimensions.
    Dimensions { element: ElementType, count: usize },
    /// Everything, in a slot of its own.
    Slot,
}

impl Layout {
    /// The layout of this form; nothing if it has no metadata.
    pub(crate) fn of(form: Form) -> Option<Self> {
        let most = (SIGNAL_SLOT_PAYLOAD_BYTES - REMOTE_SLICE_BYTES) / 8;
        match form {
            Form::Put { .. } => None,
            Form::Lend { bytes } => Some(Self::Place { bytes }),
            Form::Fetch { element: Some(element), dimensions: Some(count) } if count <= most => {
                Some(Self::Dimensions { element, count })
            }
            Form::Fetch { .. } => Some(Self::Slot),
        }
    }

    /// Writes metadata; nothing if the tensor is not as the layout says.
    pub(crate) fn encode(self, place: &RemoteSlice, form: Option<&TensorForm>) -> Option<Vec<u8>> {
        let mut bytes = encode_remote(place).to_vec();
        match (self, form) {
            (Self::Place { bytes: len }, _) if len == place.len => {}
            (Self::Dimensions { element, count }, Some(form))
                if form.element == element && form.dims.len() == count =>
            {
                form.dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
            }
            (Self::Slot, Some(form)) if form.dims.len() <= DIMENSIONS_MAX => {
                for word in [form.element.to_onnx() as u64, form.dims.len() as u64] {
                    bytes.extend(word.to_le_bytes());
                }
                form.dims.iter().for_each(|dim| bytes.extend(dim.to_le_bytes()));
                bytes.resize(SLOT_BYTES, 0);
            }
            _ => return None,
        }
        Some(bytes)
    }

    /// Reads metadata of a peer. The length of the place is that of the tensor.
    pub(crate) fn decode(self, bytes: &[u8]) -> Result<(RemoteSlice, Option<TensorForm>), String> {
        let mut words =
            bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
        let mut next = || words.next().ok_or_else(|| "sent metadata that are too short".to_owned());
        let place = RemoteSlice { key: RegionKey(next()?), offset: next()?, len: next()? };
        let (element, count) = match self {
            Self::Place { bytes } if bytes == place.len => return Ok((place, None)),
            Self::Place { bytes } => {
                return Err(format!("lends {} bytes for a tensor of {bytes}", place.len));
            }
            Self::Dimensions { element, count } => (element, count),
            Self::Slot => {
                let (element, count) = (next()?, next()?);
                let known = i32::try_from(element).ok().and_then(ElementType::from_onnx);
                let element = known.ok_or_else(|| format!("sent elements of an unknown type {element}"))?;
                let count = usize::try_from(count).ok().filter(|&count| count <= DIMENSIONS_MAX);
                (element, count.ok_or_else(|| format!("sent more than {DIMENSIONS_MAX} dimensions"))?)
            }
        };
        let dims = (0..count).map(|_| next()).collect::<Result<_, _>>()?;
        let form = TensorForm { element, dims };
        match form.bytes() {
            Some(bytes) if bytes == place.len => Ok((place, Some(form))),
            _ => Err(format!("sent {} bytes for dimensions {:?}", place.len, form.dims)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(len: u64) -> RemoteSlice {
        RemoteSlice { key: RegionKey(7), offset: 64, len }
    }

    #[test]
    fn metadata_are_read_as_they_were_written() {
        let form = TensorForm { element: ElementType::F32, dims: vec![2, 3, 5] };
        let fetch =
            |element, dimensions| Layout::of(Form::Fetch { element, dimensions }).expect("it has metadata");
        let layouts = [
            (fetch(Some(ElementType::F32), Some(3)), 48),
            (fetch(Some(ElementType::F32), Some(4)), SLOT_BYTES),
            (fetch(None, Some(3)), SLOT_BYTES),
            (fetch(Some(ElementType::F32), None), SLOT_BYTES),
        ];
        for (layout, len) in layouts {
            let bytes = layout.encode(&place(120), Some(&form)).expect("it fits");
            assert_eq!(bytes.len(), len, "{layout:?}");
            assert_eq!(layout.decode(&bytes), Ok((place(120), Some(form.clone()))), "{layout:?}");
            assert!(layout.decode(&bytes[..len.min(40)]).is_err());
        }
        let lend = Layout::of(Form::Lend { bytes: 120 }).expect("it has metadata");
        let bytes = lend.encode(&place(120), None).expect("it fits");
        assert_eq!(lend.decode(&bytes), Ok((place(120), None)));
        assert_eq!(Layout::of(Form::Put { bytes: 1 }), None);
    }

    #[test]
    fn metadata_that_contradict_themselves_are_refused() {
        let layout = Layout::Dimensions { element: ElementType::F32, count: 2 };
        let form = TensorForm { element: ElementType::F32, dims: vec![2, 3] };
        for len in [0, 23, 25, u64::MAX] {
            let bytes = layout.encode(&place(len), Some(&form)).expect("it fits");
            assert!(layout.decode(&bytes).is_err(), "{len}");
        }
        let huge = TensorForm { element: ElementType::F32, dims: vec![u64::MAX, 2] };
        let bytes = layout.encode(&place(24), Some(&huge)).expect("it fits");
        assert!(layout.decode(&bytes).is_err());
        let mut bytes = Layout::Slot.encode(&place(24), Some(&form)).expect("it fits");
        for (at, word) in [(24, 99_u64), (24, u64::MAX), (32, 65), (32, u64::MAX)] {
            let before = bytes[at..at + 8].to_vec();
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
            assert!(Layout::Slot.decode(&bytes).is_err(), "{at} {word}");
            bytes[at..at + 8].copy_from_slice(&before);
        }
        assert!(Layout::Place { bytes: 8 }.decode(&encode_remote(&place(9))).is_err());
        assert!(layout.encode(&place(24), None).is_none());
    }
}
