//! Element types and reductions as numbers. Types and reductions of NCCL have NCCL's numbers.

use std::ffi::c_void;

use pleach_vocabulary::{DataType, ReduceOp};

use crate::comm::Comm;
use crate::result::Failed;

/// The type of an element: one of the constants pleachInt8 to pleachUint16.
pub type pleachDataType_t = u32;

/// 8-bit signed integer.
pub const pleachInt8: pleachDataType_t = 0;
/// pleachInt8 by its other name in NCCL.
pub const pleachChar: pleachDataType_t = pleachInt8;
/// 8-bit unsigned integer.
pub const pleachUint8: pleachDataType_t = 1;
/// 32-bit signed integer.
pub const pleachInt32: pleachDataType_t = 2;
/// pleachInt32 by its other name in NCCL.
pub const pleachInt: pleachDataType_t = pleachInt32;
/// 32-bit unsigned integer.
pub const pleachUint32: pleachDataType_t = 3;
/// 64-bit signed integer.
pub const pleachInt64: pleachDataType_t = 4;
/// 64-bit unsigned integer.
pub const pleachUint64: pleachDataType_t = 5;
/// IEEE binary16.
pub const pleachFloat16: pleachDataType_t = 6;
/// pleachFloat16 by its other name in NCCL.
pub const pleachHalf: pleachDataType_t = pleachFloat16;
/// IEEE binary32.
pub const pleachFloat32: pleachDataType_t = 7;
/// pleachFloat32 by its other name in NCCL.
pub const pleachFloat: pleachDataType_t = pleachFloat32;
/// IEEE binary64.
pub const pleachFloat64: pleachDataType_t = 8;
/// pleachFloat64 by its other name in NCCL.
pub const pleachDouble: pleachDataType_t = pleachFloat64;
/// bfloat16.
pub const pleachBfloat16: pleachDataType_t = 9;
/// 8-bit float with 4 bits of exponent.
pub const pleachFloat8e4m3: pleachDataType_t = 10;
/// 8-bit float with 5 bits of exponent.
pub const pleachFloat8e5m2: pleachDataType_t = 11;
/// 16-bit signed integer; NCCL has no such type.
pub const pleachInt16: pleachDataType_t = 32;
/// 16-bit unsigned integer; NCCL has no such type.
pub const pleachUint16: pleachDataType_t = 33;

/// How inputs are combined: one of the constants pleachSum to pleachBitXor, or a number that
/// pleachRedOpCreatePreMulSum stores.
pub type pleachRedOp_t = u32;

/// Sum; integers wrap.
pub const pleachSum: pleachRedOp_t = 0;
/// Product; integers wrap.
pub const pleachProd: pleachRedOp_t = 1;
/// Maximum; NaN if any input is NaN.
pub const pleachMax: pleachRedOp_t = 2;
/// Minimum; NaN if any input is NaN.
pub const pleachMin: pleachRedOp_t = 3;
/// Sum divided by the number of ranks.
pub const pleachAvg: pleachRedOp_t = 4;
/// Bitwise and, of integers; NCCL has no such operation.
pub const pleachBitAnd: pleachRedOp_t = 32;
/// Bitwise or, of integers; NCCL has no such operation.
pub const pleachBitOr: pleachRedOp_t = 33;
/// Bitwise exclusive or, of integers; NCCL has no such operation.
pub const pleachBitXor: pleachRedOp_t = 34;

/// The place of the scalar of pleachRedOpCreatePreMulSum: pleachScalarHostImmediate.
pub type pleachScalarResidence_t = u32;

/// In memory of a GPU, read when a call uses the scalar. NCCL has this; this library refuses it.
pub const pleachScalarDevice: pleachScalarResidence_t = 0;
/// In host memory, read before pleachRedOpCreatePreMulSum returns.
pub const pleachScalarHostImmediate: pleachScalarResidence_t = 1;

/// The first number of a premultiplied sum.
pub(crate) const PREMUL_FIRST: pleachRedOp_t = 1 << 16;

#[inline]
pub(crate) fn data_type(number: pleachDataType_t) -> Result<DataType, Failed> {
    Ok(match number {
        pleachInt8 => DataType::I8,
        pleachUint8 => DataType::U8,
        pleachInt32 => DataType::I32,
        pleachUint32 => DataType::U32,
        pleachInt64 => DataType::I64,
        pleachUint64 => DataType::U64,
        pleachFloat16 => DataType::F16,
        pleachFloat32 => DataType::F32,
        pleachFloat64 => DataType::F64,
        pleachBfloat16 => DataType::Bf16,
        pleachFloat8e4m3 => DataType::F8E4M3,
        pleachFloat8e5m2 => DataType::F8E5M2,
        pleachInt16 => DataType::I16,
        pleachUint16 => DataType::U16,
        _ => return Err(no_data_type(number)),
    })
}

/// The constant of an element type.
pub(crate) fn number_of(data_type: DataType) -> pleachDataType_t {
    match data_type {
        DataType::I8 => pleachInt8,
        DataType::U8 => pleachUint8,
        DataType::I32 => pleachInt32,
        DataType::U32 => pleachUint32,
        DataType::I64 => pleachInt64,
        DataType::U64 => pleachUint64,
        DataType::F16 => pleachFloat16,
        DataType::F32 => pleachFloat32,
        DataType::F64 => pleachFloat64,
        DataType::Bf16 => pleachBfloat16,
        DataType::F8E4M3 => pleachFloat8e4m3,
        DataType::F8E5M2 => pleachFloat8e5m2,
        DataType::I16 => pleachInt16,
        DataType::U16 => pleachUint16,
    }
}

#[cold]
fn no_data_type(number: pleachDataType_t) -> Failed {
    Failed::argument(format!("{number} is no element type; take a constant as pleachFloat32"))
}

#[inline]
pub(crate) fn reduction(comm: &Comm, number: pleachRedOp_t) -> Result<ReduceOp, Failed> {
    Ok(match number {
        pleachSum => ReduceOp::Sum,
        pleachProd => ReduceOp::Prod,
        pleachMax => ReduceOp::Max,
        pleachMin => ReduceOp::Min,
        pleachAvg => ReduceOp::Avg,
        pleachBitAnd => ReduceOp::And,
        pleachBitOr => ReduceOp::Or,
        pleachBitXor => ReduceOp::Xor,
        _ => return premultiplied(comm, number),
    })
}

#[cold]
fn premultiplied(comm: &Comm, number: pleachRedOp_t) -> Result<ReduceOp, Failed> {
    comm.premultiplied(number).ok_or_else(|| {
        Failed::argument(format!(
            "{number} is no reduction of this communicator; take a constant as pleachSum, or a number that \
             pleachRedOpCreatePreMulSum stored and that was not destroyed"
        ))
    })
}

/// The premultiplied sum by a scalar in host memory.
///
/// # Safety
///
/// `scalar` points to an element of the type, at any address.
pub(crate) unsafe fn premul_sum(scalar: *const c_void, data_type: DataType) -> ReduceOp {
    use pleach_collectives::{F8E4M3, F8E5M2, bf16, f16};
    macro_rules! read {
        ($type:ty) => {
            // SAFETY: the caller's promise.
            unsafe { scalar.cast::<$type>().read_unaligned() }
        };
    }
    match data_type {
        DataType::F64 => ReduceOp::premul_sum(read!(f64)),
        DataType::F32 => ReduceOp::premul_sum(f64::from(read!(f32))),
        DataType::F16 => ReduceOp::premul_sum(f64::from(f16::from_bits(read!(u16)))),
        DataType::Bf16 => ReduceOp::premul_sum(f64::from(bf16::from_bits(read!(u16)))),
        DataType::F8E4M3 => ReduceOp::premul_sum(f64::from(F8E4M3::from_bits(read!(u8)).to_f32())),
        DataType::F8E5M2 => ReduceOp::premul_sum(f64::from(F8E5M2::from_bits(read!(u8)).to_f32())),
        DataType::I64 => ReduceOp::premul_sum(read!(i64)),
        DataType::I32 => ReduceOp::premul_sum(i64::from(read!(i32))),
        DataType::I16 => ReduceOp::premul_sum(i64::from(read!(i16))),
        DataType::I8 => ReduceOp::premul_sum(i64::from(read!(i8))),
        DataType::U64 => ReduceOp::premul_sum(read!(u64)),
        DataType::U32 => ReduceOp::premul_sum(i64::from(read!(u32))),
        DataType::U16 => ReduceOp::premul_sum(i64::from(read!(u16))),
        DataType::U8 => ReduceOp::premul_sum(i64::from(read!(u8))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_type_has_a_number_and_no_two_share_one() {
        let known: Vec<_> = (0..64).filter_map(|number| data_type(number).ok()).collect();
        for data_type_of in DataType::ALL {
            assert_eq!(known.iter().filter(|known| **known == data_type_of).count(), 1, "{data_type_of}");
            assert_eq!(data_type(number_of(data_type_of)).ok(), Some(data_type_of));
        }
        assert_eq!(known.len(), DataType::ALL.len());
        assert!(data_type(12).is_err() && data_type(u32::MAX).is_err());
    }
}
