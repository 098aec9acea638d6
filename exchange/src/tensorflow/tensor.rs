//! A tensor, from and to the message that TensorFlow has for it.

use std::fmt;

use bytes::Bytes;

use super::ElementKind;
use super::messages::tensor_shape_proto::Dim;
use super::messages::{TensorProto, TensorShapeProto};
use crate::endpoint::TensorElement;

/// Most dimensions, as TensorFlow has them.
const DIMENSIONS_MAX: usize = 254;

/// A tensor of TensorFlow: as many elements as its dimensions say. Clones share the elements.
#[derive(Clone, PartialEq, Eq)]
pub struct TensorflowTensor {
    element: ElementKind,
    dimensions: Vec<u64>,
    content: Content,
}

/// The elements, the last dimension the fastest.
#[derive(Clone, PartialEq, Eq)]
enum Content {
    /// Little endian.
    Bytes(Bytes),
    Strings(Vec<Bytes>),
}

/// Why a message is no tensor for this program. The text is one line.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// Elements of this type have no bytes: resources, variants, types of less than a byte.
    #[error("a tensor has elements of TensorFlow's type {number}, which do not travel as bytes; cast them")]
    Type {
        /// Its number in TensorFlow's `DataType`.
        number: i32,
    },
    /// Strings have no bytes of one length, and other elements are no strings.
    #[error(
        "elements of type {element} were taken for others: strings are given one by one, others as bytes"
    )]
    Form {
        /// The type.
        element: ElementKind,
    },
    /// The dimensions are unknown, negative or too many.
    #[error("a tensor has no dimensions that can be: {reason}")]
    Dimensions {
        /// What is wrong.
        reason: &'static str,
    },
    /// The tensor is larger than the program takes.
    #[error("a tensor has more than {limit} bytes; send parts of it, or raise the limit")]
    TooLarge {
        /// The limit, in bytes.
        limit: u64,
    },
    /// There are other elements than the dimensions say.
    #[error("a tensor of {expected} elements of type {element} came with {given}")]
    Elements {
        /// The type.
        element: ElementKind,
        /// The elements that the dimensions say.
        expected: usize,
        /// What came.
        given: String,
    },
}

impl TensorflowTensor {
    /// A tensor of these bytes, which are its elements, little endian.
    ///
    /// # Errors
    ///
    /// See [`TensorError`].
    pub fn new(element: ElementKind, dimensions: Vec<u64>, bytes: Bytes) -> Result<Self, TensorError> {
        let (elements, size) =
            (elements(&dimensions)?, element.bytes().ok_or(TensorError::Form { element })?);
        if elements.checked_mul(size) != Some(bytes.len()) {
            let given = format!("{} bytes", bytes.len());
            return Err(TensorError::Elements { element, expected: elements, given });
        }
        Ok(Self { element, dimensions, content: Content::Bytes(bytes) })
    }

    /// A tensor of strings.
    ///
    /// # Errors
    ///
    /// See [`TensorError`].
    pub fn of_strings(dimensions: Vec<u64>, strings: Vec<Bytes>) -> Result<Self, TensorError> {
        let (expected, element) = (elements(&dimensions)?, ElementKind::String);
        if expected != strings.len() {
            let given = format!("{} strings", strings.len());
            return Err(TensorError::Elements { element, expected, given });
        }
        Ok(Self { element, dimensions, content: Content::Strings(strings) })
    }

    /// The type of the elements.
    #[must_use]
    pub fn element(&self) -> ElementKind {
        self.element
    }

    /// The dimensions, the slowest first.
    #[must_use]
    pub fn dimensions(&self) -> &[u64] {
        &self.dimensions
    }

    /// The bytes of the elements, little endian; nothing for strings.
    #[must_use]
    pub fn bytes(&self) -> Option<&Bytes> {
        match &self.content {
            Content::Bytes(bytes) => Some(bytes),
            Content::Strings(_) => None,
        }
    }

    /// The strings; nothing for elements of other types.
    #[must_use]
    pub fn strings(&self) -> Option<&[Bytes]> {
        match &self.content {
            Content::Bytes(_) => None,
            Content::Strings(strings) => Some(strings),
        }
    }

    /// A copy of the elements: what came by gRPC is aligned for no type.
    ///
    /// # Errors
    ///
    /// When they are of another type, or of one that pleach does not have.
    pub fn to_vec<T: TensorElement>(&self) -> Result<Vec<T>, TensorError> {
        let (element, expected) = (self.element, ElementKind::from(T::DATA_TYPE));
        match &self.content {
            Content::Bytes(bytes) if element == expected => {
                let elements = bytes.chunks_exact(size_of::<T>());
                Ok(elements.map(bytemuck::pod_read_unaligned).collect())
            }
            _ => Err(TensorError::Form { element }),
        }
    }

    /// Reads a message. Elements that stand for several are repeated, up to `bytes_max` bytes.
    ///
    /// # Errors
    ///
    /// See [`TensorError`].
    pub fn read(message: TensorProto, bytes_max: u64) -> Result<Self, TensorError> {
        let unsupported = TensorError::Type { number: message.dtype };
        let element = ElementKind::from_number(message.dtype).ok_or(unsupported)?;
        let dimensions = dimensions(message.tensor_shape.as_ref())?;
        let elements = elements(&dimensions)?;
        let too_large = || TensorError::TooLarge { limit: bytes_max };
        let Some(size) = element.bytes() else {
            // Each takes this much here, whatever its length.
            let most = bytes_max / size_of::<Bytes>() as u64;
            if elements as u64 > most {
                return Err(too_large());
            }
            let wrong = |given| TensorError::Elements { element, expected: elements, given };
            let strings = if message.tensor_content.is_empty() {
                repeated(message.string_val, Bytes::new(), elements).map_err(wrong)?
            } else {
                let given = || wrong("content that is no list of strings".to_owned());
                string_list(message.tensor_content, elements).ok_or_else(given)?
            };
            return Self::of_strings(dimensions, strings);
        };
        let bytes = elements.checked_mul(size).filter(|bytes| *bytes as u64 <= bytes_max);
        let bytes = bytes.ok_or_else(too_large)?;
        if !message.tensor_content.is_empty() || bytes == 0 {
            return Self::new(element, dimensions, message.tensor_content);
        }
        let given = typed(&message, element);
        let wrong = |given: usize| {
            let given = format!("{given} bytes in the field of their type");
            TensorError::Elements { element, expected: elements, given }
        };
        if !given.len().is_multiple_of(size) || given.len() > bytes {
            return Err(wrong(given.len()));
        }
        // No element at all stands for zeros.
        let last = given.rchunks_exact(size).next().map_or_else(|| vec![0; size], <[u8]>::to_vec);
        let mut whole = given;
        whole.reserve_exact(bytes - whole.len());
        while whole.len() < bytes {
            whole.extend_from_slice(&last);
        }
        Self::new(element, dimensions, whole.into())
    }

    /// The message. Its bytes are those of the tensor, uncopied.
    #[must_use]
    pub fn write(self) -> TensorProto {
        let dim = |size: u64| Dim { size: i64::try_from(size).unwrap_or(i64::MAX) };
        let shape =
            TensorShapeProto { dim: self.dimensions.into_iter().map(dim).collect(), unknown_rank: false };
        let (tensor_content, string_val) = match self.content {
            Content::Bytes(bytes) => (bytes, Vec::new()),
            Content::Strings(strings) => (Bytes::new(), strings),
        };
        let (dtype, tensor_shape) = (self.element.number(), Some(shape));
        TensorProto { dtype, tensor_shape, tensor_content, string_val, ..TensorProto::default() }
    }
}

/// As many elements, of which the last one may stand for all that follow.
fn repeated<T: Clone>(mut given: Vec<T>, default: T, elements: usize) -> Result<Vec<T>, String> {
    if given.len() > elements {
        return Err(format!("{} of them", given.len()));
    }
    let last = given.last().cloned().unwrap_or(default);
    given.resize(elements, last);
    Ok(given)
}

/// As many strings from the content of a tensor: the lengths of all, then the strings.
fn string_list(mut content: Bytes, elements: usize) -> Option<Vec<Bytes>> {
    // Each has at least a byte of its length.
    let mut lengths = Vec::with_capacity(elements.min(content.len()));
    for _ in 0..elements {
        lengths.push(usize::try_from(prost::encoding::decode_varint(&mut content).ok()?).ok()?);
    }
    let take = |length: usize| (length <= content.len()).then(|| content.split_to(length));
    let strings = lengths.into_iter().map(take).collect::<Option<Vec<Bytes>>>()?;
    content.is_empty().then_some(strings)
}

/// How many elements there are.
fn elements(dimensions: &[u64]) -> Result<usize, TensorError> {
    if dimensions.len() > DIMENSIONS_MAX {
        return Err(TensorError::Dimensions { reason: "there are more than 254" });
    }
    // A size of zero hides no others that are too large.
    let product = dimensions.iter().try_fold(1_u64, |product, size| product.checked_mul((*size).max(1)));
    let product = product.and_then(|product| isize::try_from(product).ok());
    let product = product.ok_or(TensorError::Dimensions { reason: "they have too many elements" })?;
    Ok(if dimensions.contains(&0) { 0 } else { product.unsigned_abs() })
}

fn dimensions(shape: Option<&TensorShapeProto>) -> Result<Vec<u64>, TensorError> {
    // No shape is that of a scalar, which has no fields.
    let Some(shape) = shape else { return Ok(Vec::new()) };
    if shape.unknown_rank {
        return Err(TensorError::Dimensions { reason: "they are unknown" });
    }
    let negative = TensorError::Dimensions { reason: "one is negative" };
    shape.dim.iter().map(|dim| u64::try_from(dim.size).map_err(|_| negative.clone())).collect()
}

/// The bytes of the elements in the field of their type.
fn typed(message: &TensorProto, element: ElementKind) -> Vec<u8> {
    /// As the field has them, and as the tensor does.
    fn bytes<T: Copy, const N: usize>(values: &[T], encode: impl Fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|value| encode(*value)).collect()
    }
    match element {
        ElementKind::Float => bytes(&message.float_val, f32::to_le_bytes),
        ElementKind::Double => bytes(&message.double_val, f64::to_le_bytes),
        ElementKind::Int32 | ElementKind::Qint32 => bytes(&message.int_val, i32::to_le_bytes),
        // Narrower integers are the low bits.
        ElementKind::Int16 | ElementKind::Uint16 | ElementKind::Qint16 | ElementKind::Quint16 => {
            bytes(&message.int_val, |value| (value as u16).to_le_bytes())
        }
        ElementKind::Int8 | ElementKind::Uint8 | ElementKind::Qint8 | ElementKind::Quint8 => {
            bytes(&message.int_val, |value| [value as u8])
        }
        ElementKind::String => Vec::new(),
        ElementKind::Complex64 => bytes(&message.scomplex_val, f32::to_le_bytes),
        ElementKind::Int64 => bytes(&message.int64_val, i64::to_le_bytes),
        ElementKind::Bool => bytes(&message.bool_val, |value| [u8::from(value)]),
        ElementKind::Bfloat16 | ElementKind::Half => {
            bytes(&message.half_val, |value| (value as u16).to_le_bytes())
        }
        ElementKind::Complex128 => bytes(&message.dcomplex_val, f64::to_le_bytes),
        ElementKind::Uint32 => bytes(&message.uint32_val, u32::to_le_bytes),
        ElementKind::Uint64 => bytes(&message.uint64_val, u64::to_le_bytes),
        ElementKind::Float8E5m2 | ElementKind::Float8E4m3fn => message.float8_val.to_vec(),
    }
}

/// As `float[2, 3]`.
impl fmt::Debug for TensorflowTensor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{:?}", self.element, self.dimensions)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    const LIMIT: u64 = 1 << 20;

    fn message(element: ElementKind, sizes: &[i64]) -> TensorProto {
        let dim = sizes.iter().map(|size| Dim { size: *size }).collect();
        let tensor_shape = Some(TensorShapeProto { dim, unknown_rank: false });
        TensorProto { dtype: element.number(), tensor_shape, ..TensorProto::default() }
    }

    #[test]
    fn a_tensor_survives_being_sent() {
        let numbers = Bytes::copy_from_slice(&[1.5_f32, -2.0].map(f32::to_le_bytes).concat());
        let strings = vec![Bytes::from_static(b"a"), Bytes::new()];
        for tensor in [
            TensorflowTensor::new(ElementKind::Float, vec![1, 2], numbers).expect("two elements"),
            TensorflowTensor::new(ElementKind::Complex128, vec![], Bytes::from(vec![7; 16])).expect("one"),
            TensorflowTensor::new(ElementKind::Bool, vec![0, 5], Bytes::new()).expect("no element"),
            TensorflowTensor::of_strings(vec![2], strings).expect("two strings"),
        ] {
            let sent = tensor.clone().write().encode_to_vec();
            let received = TensorProto::decode(&sent[..]).expect("was encoded");
            assert_eq!(TensorflowTensor::read(received, LIMIT), Ok(tensor));
        }
    }

    #[test]
    fn elements_in_the_field_of_their_type_are_read_and_the_last_one_repeated() {
        let read = |message| TensorflowTensor::read(message, LIMIT).expect("fits");
        let float = TensorProto { float_val: vec![1.0, 2.5], ..message(ElementKind::Float, &[2, 2]) };
        assert_eq!(read(float).to_vec::<f32>(), Ok(vec![1.0, 2.5, 2.5, 2.5]));
        let narrow = TensorProto { int_val: vec![-1, 300], ..message(ElementKind::Int8, &[3]) };
        assert_eq!(read(narrow).to_vec::<i8>(), Ok(vec![-1, 44, 44]));
        let wide = TensorProto { int64_val: vec![-5], ..message(ElementKind::Int64, &[]) };
        assert_eq!(read(wide).to_vec::<i64>(), Ok(vec![-5]));
        let bits = TensorProto { half_val: vec![0x3f80], ..message(ElementKind::Bfloat16, &[2]) };
        assert_eq!(read(bits).to_vec::<half::bf16>(), Ok(vec![half::bf16::ONE; 2]));
        let complex = TensorProto { scomplex_val: vec![1.0, 2.0], ..message(ElementKind::Complex64, &[2]) };
        assert_eq!(read(complex).bytes().map(Bytes::len), Some(16));
        let texts = TensorProto { string_val: vec!["x".into()], ..message(ElementKind::String, &[2]) };
        assert_eq!(read(texts).strings(), Some(&[Bytes::from("x"), Bytes::from("x")][..]));
        // As a task of TensorFlow sends them.
        let content = Bytes::from_static(b"\x01\x00\x02abc");
        let listed = TensorProto { tensor_content: content, ..message(ElementKind::String, &[3]) };
        let expected = ["a", "", "bc"].map(Bytes::from);
        assert_eq!(read(listed).strings(), Some(&expected[..]));
        // No element at all stands for zeros.
        assert_eq!(read(message(ElementKind::Uint16, &[2])).to_vec::<u16>(), Ok(vec![0, 0]));
    }

    #[test]
    fn a_message_that_is_no_tensor_is_refused_with_what_is_wrong() {
        let error = |message| TensorflowTensor::read(message, LIMIT).expect_err("is wrong").to_string();
        let float = |sizes: &[i64]| message(ElementKind::Float, sizes);
        let content = |bytes: usize| TensorProto { tensor_content: vec![0; bytes].into(), ..float(&[2]) };
        let list = |content: &'static [u8]| TensorProto {
            tensor_content: Bytes::from_static(content),
            ..message(ElementKind::String, &[1])
        };
        let variant = TensorProto { dtype: 21, ..float(&[]) };
        let unknown = TensorShapeProto { unknown_rank: true, ..TensorShapeProto::default() };
        for (message, part) in [
            (variant, "type 21"),
            (TensorProto { tensor_shape: Some(unknown), ..float(&[]) }, "unknown"),
            (float(&[2, -1]), "negative"),
            (float(&[i64::MAX, i64::MAX]), "too many elements"),
            (float(&[0, i64::MAX, i64::MAX]), "too many elements"),
            (float(&[1; DIMENSIONS_MAX + 1]), "more than 254"),
            (float(&[1 << 40]), "more than 1048576 bytes"),
            (message(ElementKind::String, &[1 << 40]), "more than 1048576 bytes"),
            (content(7), "7 bytes"),
            (content(12), "12 bytes"),
            (TensorProto { float_val: vec![0.0; 3], ..float(&[2]) }, "12 bytes in the field"),
            (TensorProto { scomplex_val: vec![0.0; 3], ..message(ElementKind::Complex64, &[2]) }, "12 bytes"),
            (TensorProto { string_val: vec![Bytes::new(); 2], ..message(ElementKind::String, &[1]) }, "2 of"),
            (list(b"\x01"), "no list"),
            (list(b"\x02a"), "no list"),
            (list(b"\x01ab"), "no list"),
            (list(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), "no list"),
        ] {
            let text = error(message);
            assert!(text.contains(part), "{text}: {part}");
        }
    }

    #[test]
    fn elements_are_taken_for_no_others() {
        let tensor = TensorflowTensor::new(ElementKind::Float, vec![1], vec![0; 4].into()).expect("one");
        assert!(matches!(tensor.to_vec::<i32>(), Err(TensorError::Form { .. })));
        let strings = TensorflowTensor::new(ElementKind::String, vec![0], Bytes::new());
        assert!(matches!(strings, Err(TensorError::Form { .. })));
        assert!(TensorflowTensor::of_strings(vec![2], vec![Bytes::new()]).is_err());
    }
}
