//! Types of elements.

use std::fmt;

use pleach_vocabulary::DataType;

/// The type of a tensor's elements. Resources, variants and types of less than a byte have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is its name")]
pub enum ElementKind {
    Float,
    Double,
    Int32,
    Uint8,
    Int16,
    Int8,
    String,
    Complex64,
    Int64,
    Bool,
    Qint8,
    Quint8,
    Qint32,
    Bfloat16,
    Qint16,
    Quint16,
    Uint16,
    Complex128,
    Half,
    Uint32,
    Uint64,
    Float8E5m2,
    Float8E4m3fn,
}

/// The type, its number and its name in TensorFlow, bytes of an element, the same type in pleach.
type Row = (ElementKind, i32, &'static str, usize, Option<DataType>);

const ELEMENTS: &[Row] = &[
    (ElementKind::Float, 1, "float", 4, Some(DataType::F32)),
    (ElementKind::Double, 2, "double", 8, Some(DataType::F64)),
    (ElementKind::Int32, 3, "int32", 4, Some(DataType::I32)),
    (ElementKind::Uint8, 4, "uint8", 1, Some(DataType::U8)),
    (ElementKind::Int16, 5, "int16", 2, Some(DataType::I16)),
    (ElementKind::Int8, 6, "int8", 1, Some(DataType::I8)),
    (ElementKind::String, 7, "string", 0, None),
    (ElementKind::Complex64, 8, "complex64", 8, None),
    (ElementKind::Int64, 9, "int64", 8, Some(DataType::I64)),
    (ElementKind::Bool, 10, "bool", 1, None),
    (ElementKind::Qint8, 11, "qint8", 1, None),
    (ElementKind::Quint8, 12, "quint8", 1, None),
    (ElementKind::Qint32, 13, "qint32", 4, None),
    (ElementKind::Bfloat16, 14, "bfloat16", 2, Some(DataType::Bf16)),
    (ElementKind::Qint16, 15, "qint16", 2, None),
    (ElementKind::Quint16, 16, "quint16", 2, None),
    (ElementKind::Uint16, 17, "uint16", 2, Some(DataType::U16)),
    (ElementKind::Complex128, 18, "complex128", 16, None),
    (ElementKind::Half, 19, "half", 2, Some(DataType::F16)),
    (ElementKind::Uint32, 22, "uint32", 4, Some(DataType::U32)),
    (ElementKind::Uint64, 23, "uint64", 8, Some(DataType::U64)),
    (ElementKind::Float8E5m2, 24, "float8_e5m2", 1, Some(DataType::F8E5M2)),
    (ElementKind::Float8E4m3fn, 25, "float8_e4m3fn", 1, Some(DataType::F8E4M3)),
];

impl ElementKind {
    /// The type with this number of TensorFlow's `DataType`.
    #[must_use]
    pub fn from_number(number: i32) -> Option<Self> {
        ELEMENTS.iter().find(|row| row.1 == number).map(|row| row.0)
    }

    /// Its number in TensorFlow's `DataType`.
    #[must_use]
    pub fn number(self) -> i32 {
        self.row().1
    }

    /// The bytes of an element; none for strings, each of which has its own length.
    #[must_use]
    pub fn bytes(self) -> Option<usize> {
        Some(self.row().3).filter(|bytes| *bytes > 0)
    }

    /// The same type in pleach, where there is one.
    #[must_use]
    pub fn data_type(self) -> Option<DataType> {
        self.row().4
    }

    fn row(self) -> &'static Row {
        &ELEMENTS[self as usize]
    }
}

impl From<DataType> for ElementKind {
    fn from(data_type: DataType) -> Self {
        match data_type {
            DataType::F32 => Self::Float,
            DataType::F64 => Self::Double,
            DataType::F16 => Self::Half,
            DataType::Bf16 => Self::Bfloat16,
            DataType::I32 => Self::Int32,
            DataType::I64 => Self::Int64,
            DataType::U8 => Self::Uint8,
            DataType::I8 => Self::Int8,
            DataType::U32 => Self::Uint32,
            DataType::U64 => Self::Uint64,
            DataType::F8E4M3 => Self::Float8E4m3fn,
            DataType::F8E5M2 => Self::Float8E5m2,
            DataType::I16 => Self::Int16,
            DataType::U16 => Self::Uint16,
        }
    }
}

/// As TensorFlow names it.
impl fmt::Display for ElementKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.row().2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_types() {
        for (place, row) in ELEMENTS.iter().enumerate() {
            assert_eq!(row.0 as usize, place, "{}", row.2);
            assert_eq!(ElementKind::from_number(row.1), Some(row.0));
        }
        // RESOURCE, VARIANT, INT4, a reference.
        for number in [0, 20, 21, 29, 101, -1] {
            assert_eq!(ElementKind::from_number(number), None);
        }
    }

    #[test]
    fn each_type_of_pleach_is_one_of_tensorflow_with_as_many_bytes() {
        for data_type in DataType::ALL {
            let kind = ElementKind::from(data_type);
            assert_eq!((kind.data_type(), kind.bytes()), (Some(data_type), Some(data_type.bytes())));
        }
    }
}
