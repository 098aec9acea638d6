//! Files of NumPy (NPY, version 1): a header and the elements.

use std::io::{self, Write};

use pleach::DataType;
use pleach::exchange::TensorShape;

/// The header's length is a multiple of it, so that the elements are aligned.
const ALIGNMENT_BYTES: usize = 64;

/// Elements that NumPy has no type for.
#[derive(Debug, thiserror::Error)]
#[error("NumPy has no elements of type {0}")]
pub(crate) struct NoNumpyType(DataType);

/// The type as NumPy names it.
fn type_name(data_type: DataType) -> Option<&'static str> {
    Some(match data_type {
        DataType::F16 => "<f2",
        DataType::F32 => "<f4",
        DataType::F64 => "<f8",
        DataType::I8 => "|i1",
        DataType::I16 => "<i2",
        DataType::I32 => "<i4",
        DataType::I64 => "<i8",
        DataType::U8 => "|u1",
        DataType::U16 => "<u2",
        DataType::U32 => "<u4",
        DataType::U64 => "<u8",
        DataType::Bf16 | DataType::F8E4M3 | DataType::F8E5M2 => return None,
    })
}

/// The header of a file with this tensor.
pub(crate) fn header(shape: &TensorShape) -> Result<Vec<u8>, NoNumpyType> {
    let name = type_name(shape.data_type()).ok_or_else(|| NoNumpyType(shape.data_type()))?;
    let sizes: String = shape.dimensions().iter().map(|size| format!("{size}, ")).collect();
    let text = format!("{{'descr': '{name}', 'fortran_order': False, 'shape': ({}), }}", sizes.trim_end());
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    let length = (bytes.len() + 2 + text.len() + 1).next_multiple_of(ALIGNMENT_BYTES);
    // Eight dimensions need far less than 65,536 bytes.
    bytes.extend(((length - bytes.len() - 2) as u16).to_le_bytes());
    bytes.extend(text.as_bytes());
    bytes.resize(length - 1, b' ');
    bytes.push(b'\n');
    Ok(bytes)
}

/// Writes a whole file.
pub(crate) fn write(into: &mut impl Write, header: &[u8], elements: &[u8]) -> io::Result<()> {
    into.write_all(header)?;
    into.write_all(elements)?;
    into.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_what_numpy_writes() {
        let shape = |data_type, sizes: &[usize]| TensorShape::new(data_type, sizes).expect("is small");
        let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[10..]).into_owned();
        let bytes = header(&shape(DataType::F32, &[2, 3])).expect("is known");
        assert_eq!((&bytes[..10], bytes.len() % 64), (&b"\x93NUMPY\x01\x00\x76\x00"[..], 0));
        let expected = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3,), }";
        assert!(text(&bytes).starts_with(expected) && text(&bytes).ends_with(" \n"), "{}", text(&bytes));
        let bytes = header(&shape(DataType::U8, &[])).expect("is known");
        assert!(text(&bytes).contains("'|u1', 'fortran_order': False, 'shape': ()"), "{}", text(&bytes));
        let error = header(&shape(DataType::Bf16, &[1])).expect_err("is not known");
        assert_eq!(error.to_string(), "NumPy has no elements of type bf16");
    }
}
