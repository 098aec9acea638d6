//! Pseudo-random numbers that are the same in every run.

/// The SplitMix64 generator (Steele, Lea and Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

/// The increment of SplitMix64: 2⁶⁴ divided by the golden ratio.
const INCREMENT: u64 = 0x9E37_79B9_7F4A_7C15;

impl Random {
    /// A generator with this seed. Equal seeds give equal numbers.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub const fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(INCREMENT);
        mixed(self.0)
    }

    /// A number below `limit`, which is not zero.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.bits() % limit
    }

    /// An index of a list of `len` items, which is not empty.
    pub const fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// Puts items in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

/// The finaliser of SplitMix64: every bit of the result depends on every bit of the value.
#[must_use]
pub const fn mixed(mut value: u64) -> u64 {
    value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// A hash of two numbers.
#[must_use]
pub const fn hash_of_pair(one: u64, other: u64) -> u64 {
    mixed(one.wrapping_add(other.wrapping_mul(INCREMENT)))
}
