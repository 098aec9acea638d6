//! Types of elements, as ONNX numbers and as the text form names them.

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "each is its name")]
#[non_exhaustive]
pub enum ElementType {
    F32,
    U8,
    I8,
    U16,
    I16,
    I32,
    I64,
    Text,
    Bool,
    F16,
    F64,
    U32,
    U64,
    Complex64,
    Complex128,
    Bf16,
    F8E4M3,
    F8E4M3Fnuz,
    F8E5M2,
    F8E5M2Fnuz,
    U4,
    I4,
    F4E2M1,
    F8E8M0,
    U2,
    I2,
}

/// Number in ONNX, type, name, bits of an element. Elements of text have no size.
const TABLE: &[(i32, ElementType, &str, Option<u64>)] = &[
    (1, ElementType::F32, "f32", Some(32)),
    (2, ElementType::U8, "u8", Some(8)),
    (3, ElementType::I8, "i8", Some(8)),
    (4, ElementType::U16, "u16", Some(16)),
    (5, ElementType::I16, "i16", Some(16)),
    (6, ElementType::I32, "i32", Some(32)),
    (7, ElementType::I64, "i64", Some(64)),
    (8, ElementType::Text, "text", None),
    (9, ElementType::Bool, "bool", Some(8)),
    (10, ElementType::F16, "f16", Some(16)),
    (11, ElementType::F64, "f64", Some(64)),
    (12, ElementType::U32, "u32", Some(32)),
    (13, ElementType::U64, "u64", Some(64)),
    (14, ElementType::Complex64, "c64", Some(64)),
    (15, ElementType::Complex128, "c128", Some(128)),
    (16, ElementType::Bf16, "bf16", Some(16)),
    (17, ElementType::F8E4M3, "f8e4m3", Some(8)),
    (18, ElementType::F8E4M3Fnuz, "f8e4m3fnuz", Some(8)),
    (19, ElementType::F8E5M2, "f8e5m2", Some(8)),
    (20, ElementType::F8E5M2Fnuz, "f8e5m2fnuz", Some(8)),
    (21, ElementType::U4, "u4", Some(4)),
    (22, ElementType::I4, "i4", Some(4)),
    (23, ElementType::F4E2M1, "f4e2m1", Some(4)),
    (24, ElementType::F8E8M0, "f8e8m0", Some(8)),
    (25, ElementType::U2, "u2", Some(2)),
    (26, ElementType::I2, "i2", Some(2)),
];

impl ElementType {
    /// The type with this number in ONNX.
    pub(crate) fn from_onnx(number: i32) -> Option<Self> {
        TABLE.iter().find(|row| row.0 == number).map(|row| row.1)
    }

    /// The number of the type in ONNX.
    pub(crate) fn to_onnx(self) -> i32 {
        self.row().0
    }

    /// The type with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.2 == name).map(|row| row.1)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// The bytes of so many elements, which lie close together; nothing for text and for sizes that
    /// no memory has.
    #[must_use]
    pub fn bytes(self, elements: u64) -> Option<u64> {
        Some(elements.checked_mul(self.row().3?)?.div_ceil(8))
    }

    fn row(self) -> &'static (i32, Self, &'static str, Option<u64>) {
        &TABLE[self as usize]
    }
}

impl std::fmt::Display for ElementType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_types() {
        for (place, row) in TABLE.iter().enumerate() {
            assert_eq!(row.1 as usize, place, "{}", row.2);
            assert_eq!(ElementType::from_name(row.2), Some(row.1));
            assert_eq!(ElementType::from_onnx(row.0), Some(row.1));
        }
        assert_eq!(ElementType::I4.bytes(3), Some(2));
        assert_eq!(ElementType::F64.bytes(u64::MAX), None);
    }
}
