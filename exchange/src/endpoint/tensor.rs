//! Tensors as programs hold them: made here, shared, or received.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use pleach_transport::ReadOnlyMapped;
use pleach_vocabulary::DataType;

use super::memory::{LendableBuffer, TensorMemoryError, mapped_bytes};
use super::shared::LinkHold;
use crate::arena::ALIGNMENT;
use crate::lease::Lease;
use crate::message::Description;

/// Most dimensions of a tensor.
pub const DIMENSIONS_MAX: usize = 8;

/// The version of a tensor's description.
const DESCRIPTION_VERSION: u8 = 1;

/// A type of element: plain numbers.
pub trait TensorElement: bytemuck::Pod {
    /// Its name on the wire.
    const DATA_TYPE: DataType;
}

macro_rules! elements {
    ($($element:ty => $name:ident),* $(,)?) => {
        $(impl TensorElement for $element {
            const DATA_TYPE: DataType = DataType::$name;
        })*
    };
}

elements!(
    f32 => F32, f64 => F64, half::f16 => F16, half::bf16 => Bf16,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
);

/// Type and dimensions of a tensor.
#[derive(Clone, PartialEq, Eq)]
pub struct TensorShape {
    data_type: DataType,
    dimensions: Arc<[usize]>,
    /// All elements.
    bytes: usize,
}

/// A tensor has elements of another type.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("the tensor has elements of type {data_type}, and {asked} was asked for")]
pub struct ElementTypeError {
    /// The type of its elements.
    pub data_type: DataType,
    /// The type that was asked for.
    pub asked: DataType,
}

impl TensorShape {
    /// A shape.
    ///
    /// # Errors
    ///
    /// When there are too many dimensions or elements.
    pub fn new(data_type: DataType, dimensions: &[usize]) -> Result<Self, TensorMemoryError> {
        let count = dimensions.len();
        if count > DIMENSIONS_MAX {
            return Err(TensorMemoryError::TooManyDimensions { dimensions: count });
        }
        let product = dimensions.iter().try_fold(data_type.bytes(), |bytes, size| bytes.checked_mul(*size));
        let bytes = product.filter(|bytes| isize::try_from(*bytes).is_ok());
        let bytes = bytes.ok_or(TensorMemoryError::TooManyElements { dimensions: count })?;
        Ok(Self { data_type, dimensions: dimensions.into(), bytes })
    }

    /// The type of the elements.
    #[must_use]
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// The dimensions, the slowest first.
    #[must_use]
    pub fn dimensions(&self) -> &[usize] {
        &self.dimensions
    }

    /// The length of all elements, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// As it is sent.
    pub(crate) fn describe(&self) -> Description {
        let mut bytes = vec![DESCRIPTION_VERSION, self.data_type as u8, self.dimensions.len() as u8];
        self.dimensions.iter().for_each(|size| bytes.extend((*size as u64).to_le_bytes()));
        Description::new(&bytes).expect("eight dimensions fit")
    }

    /// Reads a description of so many bytes of a peer; `None` when it is none of them.
    pub(crate) fn of(description: &Description, bytes: u64) -> Option<Self> {
        let (&[version, code, count], rest) = description.as_bytes().split_first_chunk()?;
        let (sizes, []) = rest.as_chunks::<8>() else { return None };
        if version != DESCRIPTION_VERSION || sizes.len() != usize::from(count) {
            return None;
        }
        let data_type = DataType::ALL.into_iter().find(|known| *known as u8 == code)?;
        let sizes = sizes.iter().map(|size| usize::try_from(u64::from_le_bytes(*size)).ok());
        let dimensions = sizes.collect::<Option<Vec<usize>>>()?;
        Self::new(data_type, &dimensions).ok().filter(|shape| shape.bytes as u64 == bytes)
    }

    fn check<T: TensorElement>(&self) -> Result<(), ElementTypeError> {
        let (data_type, asked) = (self.data_type, T::DATA_TYPE);
        if data_type == asked { Ok(()) } else { Err(ElementTypeError { data_type, asked }) }
    }
}

/// As `f32[2, 3]`.
impl fmt::Display for TensorShape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{:?}", self.data_type, self.dimensions)
    }
}

impl fmt::Debug for TensorShape {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// A tensor in lendable memory that its program writes. It derefs to its elements.
pub struct Tensor<T> {
    buffer: LendableBuffer,
    shape: TensorShape,
    element: PhantomData<T>,
}

impl<T: TensorElement> Tensor<T> {
    pub(crate) fn new(buffer: LendableBuffer, shape: TensorShape) -> Self {
        Self { buffer, shape, element: PhantomData }
    }

    /// Type and dimensions.
    #[must_use]
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// The tensor to be sent: nobody writes it any more.
    #[must_use]
    pub fn share(self) -> SharedTensor {
        SharedTensor::of_bytes(self.buffer, self.shape)
    }
}

impl<T: TensorElement> Deref for Tensor<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(self.buffer.as_bytes())
    }
}

impl<T: TensorElement> DerefMut for Tensor<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(self.buffer.as_bytes_mut())
    }
}

impl<T> fmt::Debug for Tensor<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Tensor({})", self.shape)
    }
}

/// A tensor in lendable memory that its program writes, of a type that is known at run time.
pub struct UntypedTensor {
    buffer: LendableBuffer,
    shape: TensorShape,
}

impl UntypedTensor {
    pub(crate) fn new(buffer: LendableBuffer, shape: TensorShape) -> Self {
        Self { buffer, shape }
    }

    /// Type and dimensions.
    #[must_use]
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// The bytes of its elements. They stay at their address when the tensor is moved or shared.
    #[must_use]
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.buffer.as_bytes_mut()
    }

    /// The tensor to be sent: nobody writes it any more.
    #[must_use]
    pub fn share(self) -> SharedTensor {
        SharedTensor::of_bytes(self.buffer, self.shape)
    }
}

impl fmt::Debug for UntypedTensor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "UntypedTensor({})", self.shape)
    }
}

/// A tensor that may be sent, any number of times. Clones share the memory.
#[derive(Clone)]
pub struct SharedTensor {
    buffer: Arc<LendableBuffer>,
    /// Where the tensor begins in the buffer, in bytes.
    start: usize,
    shape: TensorShape,
    /// Dropped when neither this program nor a peer needs the tensor any more.
    _guard: Option<Arc<dyn Any + Send + Sync>>,
    /// What an interface of this program has noted of the tensor; peers do not see it.
    #[cfg(feature = "grpc")]
    note: Option<Arc<dyn Any + Send + Sync>>,
}

impl SharedTensor {
    pub(crate) fn of_bytes(buffer: LendableBuffer, shape: TensorShape) -> Self {
        Self {
            buffer: Arc::new(buffer),
            start: 0,
            shape,
            _guard: None,
            #[cfg(feature = "grpc")]
            note: None,
        }
    }

    /// The tensor of this shape in the bytes of this one, from byte `start` on; `None` where it
    /// does not lie inside, or begins at no multiple of [`ALIGNMENT`].
    #[must_use]
    pub fn part(&self, start: usize, shape: &TensorShape) -> Option<Self> {
        let is_inside = start.checked_add(shape.bytes).is_some_and(|end| end <= self.shape.bytes);
        let is_aligned = (start as u64).is_multiple_of(ALIGNMENT);
        let (start, shape) = (self.start + start, shape.clone());
        (is_inside && is_aligned).then(|| Self { start, shape, ..self.clone() })
    }

    /// The same tensor with a guard, which is dropped when neither this program nor a peer needs
    /// the tensor any more. The drop may happen under the endpoint's lock: it must not block, and
    /// must not use the endpoint.
    #[must_use]
    pub fn with_guard(self, guard: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _guard: Some(guard), ..self }
    }

    /// Its bytes, to be a field of a message: they go by reference where the other program can read
    /// them, see [`crate::grpc`]. Clones and slices share the memory.
    #[cfg(feature = "grpc")]
    #[must_use]
    pub fn into_bytes(self) -> bytes::Bytes {
        self.buffer.make_findable();
        bytes::Bytes::from_owner(self)
    }

    /// The tensor of bytes that lie in lendable memory. They are kept as long as it is.
    #[cfg(feature = "grpc")]
    pub(crate) fn of_lendable(memory: &super::memory::LendableMemory, bytes: bytes::Bytes) -> Option<Self> {
        let (buffer, start) = memory.find(&bytes)?;
        let shape = TensorShape::new(DataType::U8, &[bytes.len()]).ok()?;
        Some(Self { buffer, start, shape, _guard: Some(Arc::new(bytes)), note: None })
    }

    /// The same tensor with a note of an interface of this program.
    #[cfg(feature = "grpc")]
    pub(crate) fn with_note(self, note: Arc<dyn Any + Send + Sync>) -> Self {
        Self { note: Some(note), ..self }
    }

    /// The note, if it is of this type.
    #[cfg(feature = "grpc")]
    pub(crate) fn note<T: Any>(&self) -> Option<&T> {
        self.note.as_ref()?.downcast_ref()
    }

    /// Type and dimensions.
    #[must_use]
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// The bytes of its elements.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.buffer.part(self.range())
    }

    /// Its bytes in the buffer.
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.shape.bytes
    }

    pub(crate) fn buffer(&self) -> &Arc<LendableBuffer> {
        &self.buffer
    }

    /// Whether other programs can read it where it lies.
    #[cfg(feature = "grpc")]
    pub(crate) fn is_lendable(&self) -> bool {
        self.buffer.arena().is_some()
    }
}

impl fmt::Debug for SharedTensor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "SharedTensor({})", self.shape)
    }
}

#[cfg(feature = "grpc")]
impl AsRef<[u8]> for SharedTensor {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

/// How a tensor came here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorWay {
    /// It lies in its sender's memory.
    InPlace,
    /// It was read from its sender's memory into this program's.
    Copied,
    /// Its bytes came over the control connection.
    Inline,
    /// This program sent it to itself.
    Local,
}

impl fmt::Display for TensorWay {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::InPlace => "in place",
            Self::Copied => "copied",
            Self::Inline => "inline",
            Self::Local => "local",
        })
    }
}

/// Where the bytes of a received tensor are.
pub(crate) enum ReceivedBytes {
    /// In this program's own memory, of which the tensor is the first bytes.
    Own(Vec<u64>),
    /// In the sender's memory.
    Mapped {
        mapping: ReadOnlyMapped,
        range: Range<usize>,
        lease: Lease,
        /// The link stays open for the return of the lease.
        _link: Arc<LinkHold>,
    },
    /// In lendable memory of this program, into which it was got.
    Copied(SharedTensor),
    /// In lendable memory of this program, which sent it.
    Local(SharedTensor),
}

/// A tensor that was received. Where the sender's memory is mapped the bytes stay there until the
/// last handle is dropped. Clones are handles of one tensor.
#[derive(Clone)]
pub struct ReceivedTensor {
    bytes: Arc<ReceivedBytes>,
    shape: TensorShape,
}

impl ReceivedTensor {
    pub(crate) fn new(bytes: ReceivedBytes, shape: TensorShape) -> Self {
        Self { bytes: Arc::new(bytes), shape }
    }

    /// Type and dimensions.
    #[must_use]
    pub fn shape(&self) -> &TensorShape {
        &self.shape
    }

    /// How it came.
    #[must_use]
    pub fn way(&self) -> TensorWay {
        match &*self.bytes {
            ReceivedBytes::Own(_) => TensorWay::Inline,
            ReceivedBytes::Mapped { .. } => TensorWay::InPlace,
            ReceivedBytes::Copied(_) => TensorWay::Copied,
            ReceivedBytes::Local(_) => TensorWay::Local,
        }
    }

    /// The bytes of its elements.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        let whole = match &*self.bytes {
            ReceivedBytes::Own(words) => bytemuck::cast_slice(words),
            ReceivedBytes::Mapped { mapping, range, .. } => {
                mapped_bytes(mapping, range.clone()).unwrap_or_default()
            }
            ReceivedBytes::Copied(tensor) | ReceivedBytes::Local(tensor) => tensor.as_bytes(),
        };
        whole.get(..self.shape.bytes()).unwrap_or_default()
    }

    /// Its elements.
    ///
    /// # Errors
    ///
    /// When they are of another type.
    pub fn as_slice<T: TensorElement>(&self) -> Result<&[T], ElementTypeError> {
        self.shape.check::<T>()?;
        // Own memory and blocks of arenas are aligned for every element.
        Ok(bytemuck::cast_slice(self.as_bytes()))
    }

    /// The tensor as this program has sent it to itself; nothing for one of another program.
    #[cfg(feature = "grpc")]
    pub(crate) fn local(&self) -> Option<&SharedTensor> {
        match &*self.bytes {
            ReceivedBytes::Local(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// Its bytes. They stay where they are until the last clone or slice is dropped.
    #[cfg(feature = "grpc")]
    #[must_use]
    pub fn into_bytes(self) -> bytes::Bytes {
        if let ReceivedBytes::Copied(tensor) | ReceivedBytes::Local(tensor) = &*self.bytes {
            tensor.buffer.make_findable();
        }
        bytes::Bytes::from_owner(self)
    }

    /// Gives the tensor back unread, where that is possible, so that another receiver gets it.
    pub(crate) fn decline(self) {
        if let Ok(ReceivedBytes::Mapped { lease, .. }) = Arc::try_unwrap(self.bytes) {
            lease.decline();
        }
    }
}

#[cfg(feature = "grpc")]
impl AsRef<[u8]> for ReceivedTensor {
    fn as_ref(&self) -> &[u8] {
        self.as_bytes()
    }
}

impl fmt::Debug for ReceivedTensor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ReceivedTensor({}, {})", self.shape, self.way())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_survives_the_wire_and_only_for_its_bytes() {
        for dimensions in [&[][..], &[0], &[2, 3], &[1; DIMENSIONS_MAX]] {
            let shape = TensorShape::new(DataType::F64, dimensions).expect("is small");
            let bytes = shape.bytes() as u64;
            assert_eq!(TensorShape::of(&shape.describe(), bytes), Some(shape.clone()));
            assert_eq!(TensorShape::of(&shape.describe(), bytes + 1), None);
        }
    }

    #[test]
    fn a_description_that_is_wrong_is_no_shape() {
        let huge = [u64::MAX.to_le_bytes(), 2_u64.to_le_bytes()].concat();
        for bytes in [
            &[][..],
            &[1, 1],
            &[2, 1, 0],
            &[1, 99, 0],
            &[1, 1, 1],
            &[1, 1, 0, 0],
            &[&[1, 1, 2][..], &huge].concat(),
        ] {
            let description = Description::new(bytes).expect("is short");
            assert_eq!(TensorShape::of(&description, 4), None, "{bytes:?}");
        }
    }

    #[test]
    fn a_shape_has_limits() {
        let error = TensorShape::new(DataType::U8, &[1; 9]).expect_err("has nine dimensions");
        assert_eq!(error.to_string(), "a tensor has 9 dimensions, more than 8; join some");
        let error = TensorShape::new(DataType::U64, &[usize::MAX / 8, 2]).expect_err("is too large");
        assert_eq!(error.to_string(), "a tensor of 2 dimensions has too many elements");
        let shape = TensorShape::new(DataType::F32, &[2, 3]).expect("is small");
        assert_eq!((shape.to_string(), shape.bytes()), ("f32[2, 3]".to_owned(), 24));
    }
}
