//! Hashes that are the same on every rank, by which ranks check that they agree.

use std::hash::Hasher;

/// FNV-1a, 64 bits: the same on every rank, unlike the standard library's hasher.
#[derive(Clone, Copy, Debug)]
pub struct Hasher64(u64);

impl Default for Hasher64 {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Hasher64 {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
}

/// 2⁶⁴ divided by the golden ratio, the increment of SplitMix64.
pub(crate) const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection in which every bit of the
/// result depends on every bit of the word.
#[inline]
#[must_use]
pub const fn mixed(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The hash of a sequence whose earlier words have the hash `history`. The order of words counts.
#[inline]
#[must_use]
pub const fn chain(history: u64, word: u64) -> u64 {
    mixed(history.rotate_left(23).wrapping_add(word).wrapping_add(INCREMENT))
}

/// A hash of two numbers.
#[inline]
#[must_use]
pub const fn hash_of_pair(one: u64, other: u64) -> u64 {
    mixed(one.wrapping_add(other.wrapping_mul(INCREMENT)))
}
