//! The results of calls, computed from every rank's input alone and with none of the code under
//! test.

use half::{bf16, f16};
use pleach_transport::sim::Random;
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use super::call::CallPlan;
use crate::compute::{F8E4M3, F8E5M2};

/// Most ranks whose powers of two between 1/2 and 2 have a product that is exact in every type.
const EXACT_FACTORS_MAX: u32 = 8;

/// `rank`'s input of a call, drawn from the seed: any integers, floats small enough that nothing
/// overflows.
pub(super) fn input(seed: u64, call: usize, rank: Rank, plan: &CallPlan, ranks: u32) -> Vec<u8> {
    let mut random = Random::new(seed).split("input").split_number(call as u64).split_number(u64::from(rank));
    let mut bytes = vec![0; plan.bytes_of(plan.collective.input_parts(rank, ranks))];
    if !plan.data_type.is_float() {
        random.fill(&mut bytes);
        return bytes;
    }
    let (low, width) = if plan.op == ReduceOp::Prod { (0.9, 0.2) } else { (-1.0, 2.0) };
    let coarse = matches!(plan.data_type, DataType::F8E4M3 | DataType::F8E5M2);
    for element in bytes.chunks_exact_mut(plan.data_type.bytes()) {
        if coarse && plan.op == ReduceOp::Prod {
            // Exact in any order: of other numbers so few bits hold no product of many to within a
            // known error.
            let scale = if ranks <= EXACT_FACTORS_MAX { random.below(3) as i32 - 1 } else { 0 };
            let sign = if random.coin() { -1.0 } else { 1.0 };
            write_float(plan.data_type, sign * 2f64.powi(scale), element);
            continue;
        }
        let unit = (random.bits() >> 11) as f64 / (1u64 << 53) as f64;
        write_float(plan.data_type, low + width * unit, element);
    }
    bytes
}

fn write_float(data_type: DataType, value: f64, element: &mut [u8]) {
    match data_type {
        DataType::F64 => element.copy_from_slice(&value.to_ne_bytes()),
        DataType::F32 => element.copy_from_slice(&(value as f32).to_ne_bytes()),
        DataType::F16 => element.copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        DataType::F8E4M3 => element[0] = F8E4M3::from_f32(value as f32).to_bits(),
        DataType::F8E5M2 => element[0] = F8E5M2::from_f32(value as f32).to_bits(),
        _ => element.copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
    }
}

fn read_float(data_type: DataType, bytes: &[u8]) -> f64 {
    let four = |bytes: &[u8]| u32::from_ne_bytes(std::array::from_fn(|index| bytes[index]));
    let two = |bytes: &[u8]| u16::from_ne_bytes([bytes[0], bytes[1]]);
    match data_type {
        DataType::F64 => f64::from_ne_bytes(std::array::from_fn(|index| bytes[index])),
        DataType::F32 => f64::from(f32::from_bits(four(bytes))),
        DataType::F16 => f16::from_bits(two(bytes)).to_f64(),
        DataType::F8E4M3 => F8E4M3::from_bits(bytes[0]).to_f32().into(),
        DataType::F8E5M2 => F8E5M2::from_bits(bytes[0]).to_f32().into(),
        _ => bf16::from_bits(two(bytes)).to_f64(),
    }
}

fn read_integer(data_type: DataType, bytes: &[u8]) -> i128 {
    match data_type {
        DataType::I64 => i64::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::I32 => i32::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::U64 => u64::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::U32 => u32::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::U16 => u16::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::I16 => i16::from_ne_bytes(std::array::from_fn(|index| bytes[index])).into(),
        DataType::I8 => (bytes[0] as i8).into(),
        _ => bytes[0].into(),
    }
}

fn wrapped(data_type: DataType, value: i128) -> i128 {
    match data_type {
        DataType::I64 => (value as i64).into(),
        DataType::I32 => (value as i32).into(),
        DataType::U64 => (value as u64).into(),
        DataType::U32 => (value as u32).into(),
        DataType::U16 => (value as u16).into(),
        DataType::I16 => (value as i16).into(),
        DataType::I8 => (value as i8).into(),
        _ => (value as u8).into(),
    }
}

/// Half of the distance between 1 and the next number, generously.
fn rounding(data_type: DataType) -> f64 {
    match data_type {
        DataType::F64 => f64::EPSILON,
        DataType::F32 => f64::from(f32::EPSILON),
        DataType::F16 => 2f64.powi(-10),
        DataType::F8E4M3 => 2f64.powi(-3),
        DataType::F8E5M2 => 2f64.powi(-2),
        _ => 2f64.powi(-7),
    }
}

/// A rank's input of a call, with the call that the rank made, which may differ from the others'.
pub(super) struct RankInput<'a> {
    pub(super) plan: &'a CallPlan,
    pub(super) bytes: Vec<u8>,
}

/// The first wrong element of a rank's output, and how it differs. `inputs`: by rank.
pub(super) fn difference(
    plan: &CallPlan,
    rank: Rank,
    inputs: &[RankInput<'_>],
    output: &[u8],
) -> Option<String> {
    let ranks = inputs.len() as u32;
    let size = plan.data_type.bytes();
    let collective = plan.collective;
    let parts = collective.output_parts(rank, ranks);
    if output.len() != plan.bytes_of(parts) {
        return Some(format!("{} bytes instead of {}", output.len(), plan.bytes_of(parts)));
    }
    parts.iter().find_map(|part| {
        let contributors = (0..ranks).filter(|source| collective.contributes(*source, part, ranks));
        let contributions: Option<Vec<&[u8]>> = contributors
            .map(|source| {
                // Who was asked for something else may still have agreed with this rank on what is
                // between the two.
                let RankInput { plan: theirs, bytes } = &inputs[source as usize];
                let is_same_kind = theirs.collective == plan.collective && theirs.data_type == plan.data_type;
                if !is_same_kind {
                    return None;
                }
                bytes.get(theirs.range(collective.input_parts(source, ranks), part))
            })
            .collect();
        let length = plan.range(parts, part).len();
        let Some(contributions) = contributions.filter(|all| all.iter().all(|bytes| bytes.len() == length))
        else {
            return Some(format!("part {part} came although who gives it was asked for something else"));
        };
        output[plan.range(parts, part)].chunks_exact(size).enumerate().find_map(|(index, found)| {
            let at = index * size..(index + 1) * size;
            let sources: Vec<&[u8]> = contributions.iter().map(|bytes| &bytes[at.clone()]).collect();
            let how = wrong_element(plan, &sources, found)?;
            Some(format!("element {index} of part {part} is {how}"))
        })
    })
}

fn wrong_element(plan: &CallPlan, sources: &[&[u8]], found: &[u8]) -> Option<String> {
    let CallPlan { data_type, op, .. } = *plan;
    if !plan.collective.reduces() {
        return (found != sources[0]).then(|| format!("{found:?}, not {:?}", sources[0]));
    }
    let ranks = sources.len();
    if !data_type.is_float() {
        let values = sources.iter().map(|bytes| read_integer(data_type, bytes));
        let folded = values.reduce(|a, b| match op {
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => wrapped(data_type, a + b),
            ReduceOp::Prod => wrapped(data_type, a.wrapping_mul(b)),
            ReduceOp::Min => a.min(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::And => a & b,
            ReduceOp::Or => a | b,
            ReduceOp::Xor => a ^ b,
        });
        let divisor = if op == ReduceOp::Avg { ranks as i128 } else { 1 };
        let expected = folded.unwrap_or_default() / divisor;
        let found = read_integer(data_type, found);
        return (found != expected).then(|| format!("{found}, not {expected}"));
    }
    let values: Vec<f64> = sources.iter().map(|bytes| read_float(data_type, bytes)).collect();
    let found = read_float(data_type, found);
    let step = rounding(data_type) * ranks as f64;
    let magnitude: f64 = values.iter().map(|value| value.abs()).sum();
    let (expected, tolerance) = match op {
        ReduceOp::Sum | ReduceOp::PremulSum(_) => (values.iter().sum(), step * magnitude),
        ReduceOp::Avg => (
            values.iter().sum::<f64>() / ranks as f64,
            2.0 * step * magnitude / ranks as f64 + f64::MIN_POSITIVE,
        ),
        ReduceOp::Prod => {
            let product: f64 = values.iter().product();
            (product, 2.0 * step * product.abs())
        }
        ReduceOp::Min => (values.iter().copied().fold(f64::INFINITY, f64::min), 0.0),
        ReduceOp::Max => (values.iter().copied().fold(f64::NEG_INFINITY, f64::max), 0.0),
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => {
            return Some(format!("{op} of {data_type} has no meaning"));
        }
    };
    // Averages in few bits may be so small that their last bit is worth more than their value.
    let least = match data_type {
        DataType::F16 => 2f64.powi(-23),
        DataType::F8E4M3 => 2f64.powi(-8),
        DataType::F8E5M2 => 2f64.powi(-15),
        _ => 0.0,
    };
    let close = (found - expected).abs() <= tolerance + if op == ReduceOp::Avg { least } else { 0.0 };
    (!close).then(|| format!("{found}, not {expected} (within {tolerance})"))
}

/// Whether a rank's result depends on what other ranks give.
pub(super) fn depends_on_others(collective: Collective, rank: Rank, ranks: u32) -> bool {
    match collective {
        _ if ranks == 1 => false,
        Collective::Barrier => true,
        Collective::Broadcast { root } | Collective::Scatter { root } => rank != root,
        _ => !collective.output_parts(rank, ranks).is_empty(),
    }
}
