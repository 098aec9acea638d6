//! Random numbers that are a function of a seed and a purpose, and of nothing else.

use pleach_vocabulary::digest::mixed;

/// A pseudo-random stream (xoshiro256++, seeded through splitmix64). Not for secrets.
///
/// One seed is split by purpose: two purposes never share a stream, so a new draw in one place
/// changes nothing in the others.
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    state: [u64; 4],
}

/// One in a million, the unit of the probabilities here.
pub const MILLION: u32 = 1_000_000;

impl Random {
    /// The stream of this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut words = pleach_vocabulary::random::Random::new(seed);
        let state = std::array::from_fn(|_| words.bits());
        Self { seed, state }
    }

    /// The stream for `purpose`: a function of the seed and the name, not of earlier draws.
    #[must_use]
    pub fn split(&self, purpose: &str) -> Self {
        let mut seed = mixed(self.seed ^ 0x706c_6561_6368_0001);
        for &byte in purpose.as_bytes() {
            seed = mixed(seed ^ u64::from(byte));
        }
        Self::new(seed)
    }

    /// The stream for the `number`-th of several equal purposes.
    #[must_use]
    pub fn split_number(&self, number: u64) -> Self {
        Self::new(mixed(mixed(self.seed ^ 0x706c_6561_6368_0002) ^ number))
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let [a, b, c, d] = self.state;
        let result = a.wrapping_add(d).rotate_left(23).wrapping_add(a);
        let (c, d) = (c ^ a, d ^ b);
        self.state = [a ^ d, b ^ c, c ^ (b << 17), d.rotate_left(45)];
        result
    }

    /// A number in `0 .. limit`.
    ///
    /// # Panics
    ///
    /// When `limit` is zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "a number below zero was asked for");
        // The bias is at most limit / 2^64, far below what a simulation can detect.
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// A number in `low ..= high`; `low` when the range is reversed.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        match high.saturating_sub(low) {
            0 => low,
            u64::MAX => self.bits(),
            span => low + self.below(span + 1),
        }
    }

    /// An index into a sequence of this length.
    ///
    /// # Panics
    ///
    /// When `len` is zero.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// True in `per_million` of a million cases.
    pub fn chance(&mut self, per_million: u32) -> bool {
        self.below(u64::from(MILLION)) < u64::from(per_million)
    }

    /// True in half of the cases.
    pub fn coin(&mut self) -> bool {
        self.bits() >> 63 == 1
    }

    /// Shuffles the items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }

    /// Fills `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.bits().to_le_bytes()[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_purpose_has_the_same_stream_whatever_was_drawn_elsewhere() {
        let mut root = Random::new(7);
        let mut early = root.split("ties");
        for _ in 0..100 {
            root.bits();
        }
        let mut late = root.split("ties");
        let mut other = root.split("keys");
        let first: Vec<u64> = (0..8).map(|_| early.bits()).collect();
        assert_eq!(first, (0..8).map(|_| late.bits()).collect::<Vec<_>>());
        assert_ne!(first, (0..8).map(|_| other.bits()).collect::<Vec<_>>());
    }

    #[test]
    fn ranges_are_reached_to_both_ends_and_not_left() {
        let mut random = Random::new(1);
        let mut seen = [0u32; 4];
        for _ in 0..4000 {
            seen[random.between(3, 6) as usize - 3] += 1;
        }
        assert!(seen.iter().all(|&count| (800..1200).contains(&count)), "{seen:?}");
        assert_eq!(random.between(5, 5), 5);
    }

    #[test]
    fn a_chance_of_a_quarter_comes_true_in_about_a_quarter_of_cases() {
        let mut random = Random::new(2);
        let hits = (0..10_000).filter(|_| random.chance(MILLION / 4)).count();
        assert!((2_300..2_700).contains(&hits), "{hits}");
        assert!(!random.chance(0));
        assert!(random.chance(MILLION));
    }
}
