//! Weights of which a file gives only the shape, drawn at random.
//!
//! A weight depends on the seed and on its name alone, so each rank draws those that it uses. With
//! equal weights everywhere, a tensor that came from a wrong place would look right.

use std::hash::Hasher as _;

use pleach_vocabulary::digest::Hasher64;
use pleach_vocabulary::random::Random;
use prost::bytes::Bytes;

use super::MODEL_BYTES_MAX;
use super::proto::{TensorProto, tensor_proto::DataType};

/// A weight of these dimensions; nothing if it is longer than a model can be.
///
/// Weights with one dimension are from 0.5 to 1.5, because a variance is positive. The others are
/// around zero, so that sums over all but their first dimension have a variance of about one.
pub(crate) fn draw(name: &str, dims: &[u64], seed: u64) -> Option<TensorProto> {
    let elements = dims.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim))?;
    if elements.checked_mul(4)? > MODEL_BYTES_MAX as u64 {
        return None;
    }
    let mut random = stream(name, seed);
    let inputs = dims.iter().skip(1).product::<u64>().max(1) as f32;
    let (low, width) = match dims.len() {
        0 | 1 => (0.5, 1.0),
        _ => (-(3.0 / inputs).sqrt(), 2.0 * (3.0 / inputs).sqrt()),
    };
    let mut raw = Vec::with_capacity(elements as usize * 4);
    for _ in 0..elements {
        raw.extend_from_slice(&(low + width * unit(&mut random)).to_le_bytes());
    }
    Some(TensorProto {
        name: Some(name.to_owned()),
        dims: dims.iter().map(|&dim| dim as i64).collect(),
        data_type: Some(DataType::Float as i32),
        raw_data: Some(Bytes::from(raw)),
        ..TensorProto::default()
    })
}

/// The stream of random numbers of a name.
pub(crate) fn stream(name: &str, seed: u64) -> Random {
    let mut hasher = Hasher64::default();
    hasher.write(name.as_bytes());
    hasher.write(&seed.to_le_bytes());
    Random::new(hasher.finish())
}

/// A number from 0 to 1.
pub(crate) fn unit(random: &mut Random) -> f32 {
    (random.bits() >> 40) as f32 / (1 << 24) as f32
}
