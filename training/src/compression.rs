//! Averages of compressed elements, in the form of an all-reduce.
//!
//! A piece is cut in as many parts as there are ranks, each of which a rank *owns*. A rank encodes
//! its piece and sends each owner its part. An owner decodes the parts of all ranks, adds them in
//! the order of ranks as `f32`, divides by their number, and encodes the average. All ranks decode
//! all averages, so they have the same bits.
//!
//! * `bf16`: each element is rounded once by its rank, and once by the owner.
//! * `f8` (E4M3): a block of [`BLOCK`] elements shares a scale, a power of two. What encoding loses
//!   is kept and added the next time (error feedback): at the sender, and at the owner.
//!
//! **Invariants:** what an `f8` encodes and what is kept of it are together the element with what
//! was kept before, bit for bit in `f32`, as nothing else is rounded. The drivers do the same
//! arithmetic, so simulated and real ranks have the same bits.

use std::ops::Range;

use pleach_collectives::{F8E4M3, Rank, bf16};

/// Elements that share a scale.
pub const BLOCK: usize = 64;

/// How elements travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize)]
pub enum Compression {
    /// As `f32`.
    #[default]
    None,
    /// As `bf16`.
    Bf16,
    /// As `f8` with scales and error feedback.
    F8,
}

impl Compression {
    /// All forms.
    pub const ALL: &[Self] = &[Self::None, Self::Bf16, Self::F8];

    /// Its name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Bf16 => "bf16",
            Self::F8 => "f8",
        }
    }

    /// Bytes of so many encoded elements.
    #[must_use]
    pub fn bytes(self, elements: usize) -> usize {
        match self {
            Self::None => size_of::<f32>() * elements,
            Self::Bf16 => size_of::<bf16>() * elements,
            Self::F8 => elements + elements.div_ceil(BLOCK),
        }
    }

    /// Whether what encoding loses is kept.
    #[must_use]
    pub fn keeps_residuals(self) -> bool {
        self == Self::F8
    }

    /// Appends encoded elements. With error feedback `residual` is added first, and then becomes
    /// what encoding has lost; it is as long as the elements, and otherwise is not used.
    fn encode(self, elements: &[f32], residual: &mut [f32], out: &mut Vec<u8>) {
        match self {
            Self::None => out.extend(elements.iter().flat_map(|element| element.to_le_bytes())),
            Self::Bf16 => {
                out.extend(elements.iter().flat_map(|element| bf16::from_f32(*element).to_le_bytes()));
            }
            Self::F8 => {
                for (elements, residual) in elements.chunks(BLOCK).zip(residual.chunks_mut(BLOCK)) {
                    residual.iter_mut().zip(elements).for_each(|(kept, element)| *kept += element);
                    let largest = residual.iter().fold(0.0, |largest: f32, kept| largest.max(kept.abs()));
                    let scale = Scale::of(largest);
                    out.push(scale.0);
                    for kept in residual {
                        let encoded = F8E4M3::from_f32(*kept / scale.value());
                        out.push(encoded.to_bits());
                        *kept -= encoded.to_f32() * scale.value();
                    }
                }
            }
        }
    }

    /// Stores the elements that were encoded, or adds them.
    fn decode(self, mut bytes: &[u8], elements: &mut [f32], adds: bool) {
        let store = |element: &mut f32, value: f32| *element = if adds { *element + value } else { value };
        match self {
            Self::None => {
                for (element, bytes) in elements.iter_mut().zip(bytes.chunks_exact(size_of::<f32>())) {
                    store(element, f32::from_le_bytes(bytes.try_into().expect("four bytes")));
                }
            }
            Self::Bf16 => {
                for (element, bytes) in elements.iter_mut().zip(bytes.chunks_exact(size_of::<bf16>())) {
                    store(element, bf16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f32());
                }
            }
            Self::F8 => {
                for elements in elements.chunks_mut(BLOCK) {
                    let (block, rest) = bytes.split_at(1 + elements.len());
                    bytes = rest;
                    let scale = Scale(block[0]).value();
                    for (element, bits) in elements.iter_mut().zip(&block[1..]) {
                        store(element, F8E4M3::from_bits(*bits).to_f32() * scale);
                    }
                }
            }
        }
    }
}

/// A power of two by its exponent as `f32` has it, from 1 to 254.
#[derive(Clone, Copy)]
struct Scale(u8);

impl Scale {
    /// The least with which the largest element is no more than the largest `f8`.
    fn of(largest: f32) -> Self {
        const MANTISSA_BITS: u32 = 23;
        /// A larger scale would not be finite; it is taken for what is not finite.
        const MAX: u32 = 254;
        let most = F8E4M3::MAX.to_f32();
        let exponent = ((largest / most).to_bits() >> MANTISSA_BITS).clamp(1, MAX) as u8;
        let scale = Self(exponent);
        let is_too_small = largest > most * scale.value() && u32::from(exponent) < MAX;
        Self(exponent + u8::from(is_too_small))
    }

    fn value(self) -> f32 {
        const MANTISSA_BITS: u32 = 23;
        f32::from_bits(u32::from(self.0) << MANTISSA_BITS)
    }
}

/// How a piece is cut in parts for its owners.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts {
    pub(crate) compression: Compression,
    pub(crate) ranks: u32,
    pub(crate) elements: usize,
}

impl Parts {
    /// Elements of the longest part.
    fn longest(&self) -> usize {
        self.elements.div_ceil(self.ranks as usize)
    }

    /// The elements of the piece that a rank owns.
    pub(crate) fn part(&self, owner: Rank) -> Range<usize> {
        let begin = self.elements.min(self.longest() * owner as usize);
        begin..self.elements.min(begin + self.longest())
    }

    /// Bytes of an encoded part: the same for all, with zeros behind shorter ones.
    pub(crate) fn block_bytes(&self) -> usize {
        self.compression.bytes(self.longest())
    }

    /// A rank's piece, encoded for all owners. `residual` is its own for this piece, or empty.
    pub(crate) fn encode(&self, piece: &[f32], residual: &mut [f32], out: &mut Vec<u8>) {
        out.clear();
        for owner in 0..self.ranks {
            let part = self.part(owner);
            let kept = residual.get_mut(part.clone()).unwrap_or_default();
            self.compression.encode(&piece[part], kept, out);
            out.resize(self.block_bytes() * (1 + owner as usize), 0);
        }
    }

    /// The encoded average of the parts of all ranks, one after the other. `residual` is the
    /// owner's own for its part, or empty.
    pub(crate) fn combine(&self, owner: Rank, blocks: &[u8], residual: &mut [f32], out: &mut Vec<u8>) {
        let mut sums = vec![0.0; self.part(owner).len()];
        for (rank, block) in blocks.chunks_exact(self.block_bytes()).enumerate() {
            self.compression.decode(block, &mut sums, rank > 0);
        }
        let ranks = self.ranks as f32;
        sums.iter_mut().for_each(|sum| *sum /= ranks);
        out.clear();
        self.compression.encode(&sums, residual, out);
        out.resize(self.block_bytes(), 0);
    }

    /// The averages of all owners, one after the other, as a piece.
    pub(crate) fn decode(&self, blocks: &[u8], piece: &mut [f32]) {
        for (owner, block) in (0..self.ranks).zip(blocks.chunks_exact(self.block_bytes())) {
            self.compression.decode(block, &mut piece[self.part(owner)], false);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bits(elements: &[f32]) -> Vec<u32> {
        elements.iter().map(|element| element.to_bits()).collect()
    }

    /// Any finite number that leaves room for sums.
    fn element() -> impl Strategy<Value = f32> {
        any::<f32>().prop_filter_map("finite and not huge", |element| {
            (element.is_finite() && element.abs() < 1e36).then_some(element)
        })
    }

    proptest! {
        #[test]
        fn what_is_sent_and_what_is_kept_are_the_element_and_what_was_kept_before(
            steps in prop::collection::vec(prop::collection::vec(element(), 150), 1..5),
        ) {
            let mut residual = vec![0.0_f32; 150];
            for elements in steps {
                let wanted: Vec<f32> = residual.iter().zip(&elements).map(|(kept, x)| kept + x).collect();
                let (mut encoded, mut sent) = (Vec::new(), vec![0.0; 150]);
                Compression::F8.encode(&elements, &mut residual, &mut encoded);
                prop_assert_eq!(encoded.len(), Compression::F8.bytes(150));
                Compression::F8.decode(&encoded, &mut sent, false);
                for ((sent, kept), wanted) in sent.iter().zip(&residual).zip(&wanted) {
                    // Exact, as f64 has room for both.
                    prop_assert_eq!(f64::from(*sent) + f64::from(*kept), f64::from(*wanted));
                }
            }
        }

        #[test]
        fn elements_are_as_near_as_their_format_allows(elements in prop::collection::vec(-1e3_f32..1e3, 1..200)) {
            let near = |compression: Compression, relative: f32| {
                let (mut encoded, mut decoded) = (Vec::new(), vec![0.0; elements.len()]);
                compression.encode(&elements, &mut vec![0.0; elements.len()], &mut encoded);
                assert_eq!(encoded.len(), compression.bytes(elements.len()));
                compression.decode(&encoded, &mut decoded, false);
                elements.chunks(BLOCK).zip(decoded.chunks(BLOCK)).all(|(block, decoded)| {
                    let largest = block.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
                    let near = |x: &f32, y: &f32| (x - y).abs() <= relative * x.abs() + largest * 1e-5;
                    block.iter().zip(decoded).all(|(x, y)| near(x, y))
                })
            };
            prop_assert!(near(Compression::None, 0.0));
            prop_assert!(near(Compression::Bf16, 1.0 / 256.0));
            prop_assert!(near(Compression::F8, 1.0 / 16.0));
        }
    }

    #[test]
    fn each_part_has_one_owner_and_all_ranks_decode_the_same_average() {
        for compression in [Compression::None, Compression::Bf16, Compression::F8] {
            for (ranks, elements) in [(1_u32, 70), (3, 1), (4, 300), (5, 299), (7, 7)] {
                let parts = Parts { compression, ranks, elements };
                let piece = |rank: u32| -> Vec<f32> {
                    (0..elements).map(|element| (element as f32).mul_add(0.25, rank as f32 - 3.0)).collect()
                };
                let encoded: Vec<Vec<u8>> = (0..ranks)
                    .map(|rank| {
                        let mut out = Vec::new();
                        parts.encode(&piece(rank), &mut vec![0.0; elements], &mut out);
                        assert_eq!(out.len(), parts.block_bytes() * ranks as usize);
                        out
                    })
                    .collect();
                let mut averages = Vec::new();
                for owner in 0..ranks {
                    let place = parts.block_bytes() * owner as usize;
                    let blocks = encoded.iter().flat_map(|all| &all[place..place + parts.block_bytes()]);
                    let (blocks, mut out) = (blocks.copied().collect::<Vec<_>>(), Vec::new());
                    parts.combine(owner, &blocks, &mut vec![0.0; parts.part(owner).len()], &mut out);
                    averages.extend(out);
                }
                let mut average = vec![f32::NAN; elements];
                parts.decode(&averages, &mut average);
                for (element, average) in average.iter().enumerate() {
                    let mean = (0..ranks).map(|rank| piece(rank)[element]).sum::<f32>() / ranks as f32;
                    assert!(
                        (mean - average).abs() <= 0.14 * mean.abs() + 0.5,
                        "{compression:?} {mean} {average}"
                    );
                }
            }
        }
    }

    #[test]
    fn extreme_elements_keep_their_magnitude_and_nan_stays() {
        for largest in [f32::MAX / 2.0, 1e-38, f32::MIN_POSITIVE / 8.0, 448.0, 449.0, 0.0] {
            let (mut encoded, mut decoded) = (Vec::new(), [0.0]);
            Compression::F8.encode(&[largest], &mut [0.0], &mut encoded);
            Compression::F8.decode(&encoded, &mut decoded, false);
            assert!((decoded[0] - largest).abs() <= largest / 16.0, "{largest:e} {:e}", decoded[0]);
        }
        let (mut encoded, mut decoded) = (Vec::new(), [0.0; 2]);
        Compression::F8.encode(&[f32::NAN, f32::INFINITY], &mut [0.0; 2], &mut encoded);
        Compression::F8.decode(&encoded, &mut decoded, false);
        assert!(decoded.iter().all(|element| !element.is_finite()), "{decoded:?}");
        assert_eq!(bits(&[0.0]), [0]);
    }
}
