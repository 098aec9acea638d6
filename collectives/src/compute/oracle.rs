//! The result of a reduction, computed one element after the other without any code of the kernels.

use half::{bf16, f16};
use pleach_vocabulary::{DataType, ReduceOp};

use super::{F8E4M3, F8E5M2};

/// A reduction whose result is asked for.
#[derive(Clone, Copy)]
pub(super) struct Question<'a> {
    pub(super) data_type: DataType,
    pub(super) op: ReduceOp,
    pub(super) divide_by: u32,
    pub(super) sources: &'a [&'a [u8]],
}

impl Question<'_> {
    /// The bytes of one element of the result; those beyond the type's size are zero.
    pub(super) fn element(&self, index: usize) -> [u8; 8] {
        if self.sources.len() == 1 && self.divide_by <= 1 {
            let size = self.data_type.bytes();
            return pad(&self.sources[0][index * size..][..size]);
        }
        match self.data_type {
            DataType::F64 => {
                let folded = self.fold(index, f64::from_le_bytes, |a, b| self.combine(a, b));
                pad(&(if self.divide_by > 1 { folded / f64::from(self.divide_by) } else { folded })
                    .to_le_bytes())
            }
            DataType::F32 => pad(&self.fold_f32(index, f32::from_le_bytes).to_le_bytes()),
            DataType::F16 => {
                let value = self.fold_f32(index, |bytes: [u8; 2]| f16::from_le_bytes(bytes).to_f32());
                pad(&f16::from_f32(value).to_le_bytes())
            }
            DataType::Bf16 => {
                let value = self.fold_f32(index, |bytes: [u8; 2]| bf16::from_le_bytes(bytes).to_f32());
                pad(&bf16::from_f32(value).to_le_bytes())
            }
            // The conversions of 8-bit floats are tested against a reference of their own.
            DataType::F8E4M3 => {
                let value = self.fold_f32(index, |[bits]: [u8; 1]| F8E4M3::from_bits(bits).to_f32());
                pad(&[F8E4M3::from_f32(value).to_bits()])
            }
            DataType::F8E5M2 => {
                let value = self.fold_f32(index, |[bits]: [u8; 1]| F8E5M2::from_bits(bits).to_f32());
                pad(&[F8E5M2::from_f32(value).to_bits()])
            }
            DataType::U64 => {
                let value = self.fold_integer(index, |b| u64::from_le_bytes(b).into(), |v| v as u64 as i128);
                pad(&(value as u64).to_le_bytes())
            }
            DataType::U32 => {
                let value = self.fold_integer(index, |b| u32::from_le_bytes(b).into(), |v| v as u32 as i128);
                pad(&(value as u32).to_le_bytes())
            }
            DataType::I16 => {
                let value = self.fold_integer(index, |b| i16::from_le_bytes(b).into(), |v| v as i16 as i128);
                pad(&(value as i16).to_le_bytes())
            }
            DataType::U16 => {
                let value = self.fold_integer(index, |b| u16::from_le_bytes(b).into(), |v| v as u16 as i128);
                pad(&(value as u16).to_le_bytes())
            }
            DataType::I8 => {
                let value = self.fold_integer(index, |b| i8::from_le_bytes(b).into(), |v| v as i8 as i128);
                pad(&(value as i8).to_le_bytes())
            }
            DataType::I64 => {
                let value = self.fold_integer(index, |b| i64::from_le_bytes(b).into(), |v| v as i64 as i128);
                pad(&(value as i64).to_le_bytes())
            }
            DataType::I32 => {
                let value = self.fold_integer(index, |b| i32::from_le_bytes(b).into(), |v| v as i32 as i128);
                pad(&(value as i32).to_le_bytes())
            }
            DataType::U8 => {
                let value = self.fold_integer(index, |[b]: [u8; 1]| b.into(), |v| v as u8 as i128);
                pad(&[value as u8])
            }
        }
    }

    fn fold<T, const N: usize>(
        &self,
        index: usize,
        read: impl Fn([u8; N]) -> T,
        combine: impl Fn(T, T) -> T,
    ) -> T {
        let values = self.sources.iter().map(|source| read(source[index * N..][..N].try_into().unwrap()));
        values.reduce(combine).unwrap()
    }

    fn combine(&self, a: f64, b: f64) -> f64 {
        match self.op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => a + b,
            ReduceOp::Prod => a * b,
            ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
            // The total order has -0 before +0.
            ReduceOp::Min => std::cmp::min_by(a, b, f64::total_cmp),
            ReduceOp::Max => std::cmp::max_by(a, b, f64::total_cmp),
            ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => unreachable!("combined as integers"),
        }
    }

    /// Computes in `f64` and rounds to `f32` after each operation. For two `f32` this gives the
    /// same result as the operation in `f32`. The divisor is an `f32` too.
    fn fold_f32<const N: usize>(&self, index: usize, read: impl Fn([u8; N]) -> f32) -> f32 {
        let folded = self.fold(index, read, |a, b| self.combine(f64::from(a), f64::from(b)) as f32);
        if self.divide_by > 1 {
            (f64::from(folded) / f64::from(self.divide_by as f32)) as f32
        } else {
            folded
        }
    }

    fn fold_integer<const N: usize>(
        &self,
        index: usize,
        read: impl Fn([u8; N]) -> i128,
        wrap: impl Fn(i128) -> i128,
    ) -> i128 {
        let folded = self.fold(index, read, |a, b| {
            wrap(match self.op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => a + b,
                // The product of two large `u64` does not fit in an `i128`; only its low half
                // counts.
                ReduceOp::Prod => a.wrapping_mul(b),
                ReduceOp::Min => a.min(b),
                ReduceOp::Max => a.max(b),
                ReduceOp::And => a & b,
                ReduceOp::Or => a | b,
                ReduceOp::Xor => a ^ b,
            })
        });
        folded / i128::from(self.divide_by.max(1))
    }
}

/// Whether two results are the same: the same bits, or both NaN.
pub(super) fn same(data_type: DataType, left: &[u8], right: &[u8]) -> bool {
    left == right || (is_nan(data_type, left) && is_nan(data_type, right))
}

fn is_nan(data_type: DataType, bytes: &[u8]) -> bool {
    let bits = u64::from_le_bytes(pad(bytes));
    match data_type {
        DataType::F64 => f64::from_bits(bits).is_nan(),
        DataType::F32 => f32::from_bits(bits as u32).is_nan(),
        DataType::F16 => f16::from_bits(bits as u16).is_nan(),
        DataType::Bf16 => bf16::from_bits(bits as u16).is_nan(),
        DataType::F8E4M3 => F8E4M3::from_bits(bits as u8).is_nan(),
        DataType::F8E5M2 => F8E5M2::from_bits(bits as u8).is_nan(),
        _ => false,
    }
}

fn pad(bytes: &[u8]) -> [u8; 8] {
    let mut padded = [0; 8];
    padded[..bytes.len()].copy_from_slice(bytes);
    padded
}
