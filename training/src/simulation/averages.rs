//! Averages over all simulated ranks, as real ranks exchange them.

use std::ops::Range;

use super::rank::SimulatedRank;
use crate::compression::{Compression, Parts};
use crate::policy::Vector;

/// The average of a piece, added in the order of ranks.
pub(crate) fn average(
    ranks: &mut [SimulatedRank],
    vector: Vector,
    piece: &Range<usize>,
    compression: Compression,
) -> Vec<f32> {
    if compression != Compression::None {
        return compressed(ranks, vector, piece, compression);
    }
    let count = ranks.len() as f32;
    let mut sum = ranks[0].piece(vector, piece).to_vec();
    for rank in &mut ranks[1..] {
        let piece = rank.piece(vector, piece);
        sum.iter_mut().zip(piece).for_each(|(sum, element)| *sum += *element);
    }
    sum.iter_mut().for_each(|sum| *sum /= count);
    sum
}

fn compressed(
    ranks: &mut [SimulatedRank],
    vector: Vector,
    piece: &Range<usize>,
    compression: Compression,
) -> Vec<f32> {
    let parts = Parts { compression, ranks: ranks.len() as u32, elements: piece.len() };
    let mut encoded = Vec::new();
    for rank in &mut *ranks {
        let mut out = Vec::new();
        rank.encode(&parts, vector, piece, &mut out);
        encoded.push(out);
    }
    let mut averages = Vec::new();
    for (owner, rank) in ranks.iter_mut().enumerate() {
        let place = owner * parts.block_bytes();
        let blocks = encoded.iter().flat_map(|all| &all[place..place + parts.block_bytes()]);
        let (blocks, mut out) = (blocks.copied().collect::<Vec<_>>(), Vec::new());
        rank.combine(&parts, piece, &blocks, &mut out);
        averages.extend(out);
    }
    let mut average = vec![0.0; piece.len()];
    parts.decode(&averages, &mut average);
    average
}
