//! Neutral elements: combined with anything, they leave the other operand as it is, bit for bit.
//!
//! A sum's is −0.0, because x + −0.0 is x also for −0.0, while −0.0 + 0.0 is 0.0. That of a minimum
//! is the largest value of the type and that of a maximum the smallest: infinities where the type
//! has them. (An operand that is NaN stays NaN. Its payload is promised by no reduction.)

use half::{bf16, f16};
use pleach_vocabulary::{DataType, ReduceOp};

use crate::compute::{F8E4M3, F8E5M2};

/// Which value of its type the neutral element is.
#[derive(Clone, Copy)]
enum Value {
    Zero,
    One,
    Largest,
    Smallest,
    AllBits,
}

/// Largest finite value of [`F8E4M3`], which has no infinities.
const F8E4M3_MAX: f32 = 448.0;

/// The bytes of the neutral element. The tests of the kernels ([`crate::compute`]) combine it with
/// all kinds of numbers of every type.
pub(crate) fn neutral(data_type: DataType, op: ReduceOp) -> Vec<u8> {
    let value = match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) | ReduceOp::Or | ReduceOp::Xor => Value::Zero,
        ReduceOp::Prod => Value::One,
        ReduceOp::Min => Value::Largest,
        ReduceOp::Max => Value::Smallest,
        ReduceOp::And => Value::AllBits,
    };
    let float = |largest: f32| match value {
        Value::Zero => -0.0,
        Value::One => 1.0,
        Value::Largest => largest,
        Value::Smallest | Value::AllBits => -largest,
    };
    macro_rules! integer {
        ($type:ty) => {
            match value {
                Value::Zero => <$type>::MIN ^ <$type>::MIN,
                Value::One => 1,
                Value::Largest => <$type>::MAX,
                Value::Smallest => <$type>::MIN,
                Value::AllBits => !0,
            }
            .to_ne_bytes()
            .to_vec()
        };
    }
    let infinite = float(f32::INFINITY);
    match data_type {
        DataType::F32 => infinite.to_ne_bytes().to_vec(),
        DataType::F64 => f64::from(infinite).to_ne_bytes().to_vec(),
        DataType::F16 => f16::from_f32(infinite).to_ne_bytes().to_vec(),
        DataType::Bf16 => bf16::from_f32(infinite).to_ne_bytes().to_vec(),
        DataType::F8E4M3 => bytemuck::bytes_of(&F8E4M3::from_f32(float(F8E4M3_MAX))).to_vec(),
        DataType::F8E5M2 => bytemuck::bytes_of(&F8E5M2::from_f32(infinite)).to_vec(),
        DataType::I64 => integer!(i64),
        DataType::I32 => integer!(i32),
        DataType::I16 => integer!(i16),
        DataType::I8 => integer!(i8),
        DataType::U64 => integer!(u64),
        DataType::U32 => integer!(u32),
        DataType::U16 => integer!(u16),
        DataType::U8 => integer!(u8),
    }
}
