//! A search for the best chunk size while chunks are in use.
//!
//! Small chunks fill a deep tree sooner, large chunks have lower fixed costs, and the best size
//! depends on the machine. Blink (MLSys 2020, section 4.2.1) starts small, doubles the chunk in
//! each iteration while the throughput rises, and then decreases it by a fixed step while that
//! helps: multiplicative increase, additive decrease. The paper does not give the size of the step;
//! here it is an eighth of the chunk at which the decrease begins.
//!
//! **Invariant:** [`ChunkSearch`] is a pure state machine: its input is the throughput, its output
//! the next chunk size. It settles after at most log2(most/least) + 9 measurements, on the best
//! size that it has tried.

/// By what a chunk grows while growth helps.
const GROWTH: u64 = 2;

/// In how many steps the decrease would reach nothing.
const STEPS: u64 = 8;

/// What a rise or fall of throughput has to exceed to count, as a share of it: 1/64. Less is noise.
const NOISE_SHARE: u64 = 64;

/// Searches for the best size of chunks. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkSearch {
    least_bytes: u64,
    most_bytes: u64,
    phase: Phase,
    /// Being tried.
    chunk_bytes: u64,
    /// The best so far, and its throughput.
    best: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Growing,
    Shrinking { step_bytes: u64 },
    Settled,
}

impl ChunkSearch {
    /// A search between two sizes, the least first.
    ///
    /// # Panics
    ///
    /// When the least size is zero or larger than the most.
    #[must_use]
    pub fn new(least_bytes: u64, most_bytes: u64) -> Self {
        assert!((1..=most_bytes).contains(&least_bytes), "a chunk has between 1 byte and all of them");
        Self { least_bytes, most_bytes, phase: Phase::Growing, chunk_bytes: least_bytes, best: None }
    }

    /// The chunk to use next.
    #[must_use]
    pub fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// Whether it stays at that.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.phase == Phase::Settled
    }

    /// Takes the throughput that was measured with the chunk of now. Once settled nothing changes
    /// any more.
    pub fn measured(&mut self, bytes_per_s: u64) {
        let better = self.best.is_none_or(|(_, best)| bytes_per_s > best + best / NOISE_SHARE);
        let (best_bytes, _) = *match better {
            true => self.best.insert((self.chunk_bytes, bytes_per_s)),
            false => self.best.get_or_insert((self.chunk_bytes, bytes_per_s)),
        };
        match self.phase {
            Phase::Growing if better && self.chunk_bytes < self.most_bytes => {
                self.chunk_bytes = self.chunk_bytes.saturating_mul(GROWTH).min(self.most_bytes);
            }
            Phase::Growing => {
                let step_bytes = (self.chunk_bytes / STEPS).max(1);
                self.shrink(step_bytes, best_bytes);
            }
            // The way down from beyond the peak may begin with what is no better than the best of
            // the way up.
            Phase::Shrinking { step_bytes } if better || self.chunk_bytes > best_bytes => {
                self.shrink(step_bytes, best_bytes);
            }
            Phase::Shrinking { .. } => self.settle(best_bytes),
            Phase::Settled => {}
        }
    }

    fn shrink(&mut self, step_bytes: u64, best_bytes: u64) {
        let mut next = self.chunk_bytes.saturating_sub(step_bytes);
        if next == best_bytes {
            // Measured already.
            next = next.saturating_sub(step_bytes);
        }
        if next < self.least_bytes {
            return self.settle(best_bytes);
        }
        self.phase = Phase::Shrinking { step_bytes };
        self.chunk_bytes = next;
    }

    fn settle(&mut self, best_bytes: u64) {
        self.phase = Phase::Settled;
        self.chunk_bytes = best_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of depth `depth` pipelines `bytes` in chunks, each step of which costs `fixed_ns` and
    /// a time for its bytes.
    struct Curve {
        depth: f64,
        fixed_ns: f64,
        bytes: f64,
        ns_per_byte: f64,
    }

    impl Curve {
        fn time_ns(&self, chunk_bytes: f64) -> f64 {
            let chunks = self.bytes / chunk_bytes;
            (self.depth + chunks - 1.0) * (self.fixed_ns + chunk_bytes * self.ns_per_byte)
        }

        fn bytes_per_s(&self, chunk_bytes: u64) -> u64 {
            (self.bytes / self.time_ns(chunk_bytes as f64) * 1e9) as u64
        }

        /// At k* = √((d-1)·nβ/α) chunks.
        fn least_ns(&self) -> f64 {
            let chunks = ((self.depth - 1.0) * self.bytes * self.ns_per_byte / self.fixed_ns).sqrt();
            self.time_ns(self.bytes / chunks.max(1.0))
        }
    }

    fn settled(search: &mut ChunkSearch, mut throughput: impl FnMut(u64) -> u64) -> u32 {
        for measurement in 0..64 {
            if search.is_settled() {
                return measurement;
            }
            search.measured(throughput(search.chunk_bytes()));
        }
        panic!("not settled: {search:?}");
    }

    #[test]
    fn it_finds_the_best_chunk_of_a_pipelined_tree() {
        for depth in [2.0, 3.0, 7.0] {
            for fixed_ns in [1e3, 1e4, 1e5] {
                for bytes in [1e6, 5e8, 1e9] {
                    let curve = Curve { depth, fixed_ns, bytes, ns_per_byte: 0.04 };
                    let mut search = ChunkSearch::new(4 << 10, bytes as u64);
                    let measurements = settled(&mut search, |chunk| curve.bytes_per_s(chunk));
                    let time_ns = curve.time_ns(search.chunk_bytes() as f64);
                    let ratio = time_ns / curve.least_ns();
                    assert!(ratio < 1.08, "{depth} {fixed_ns} {bytes}: {ratio} after {measurements}");
                    assert!(measurements <= 27, "{measurements}");
                }
            }
        }
    }

    #[test]
    fn where_larger_is_always_better_it_ends_at_the_most() {
        let mut search = ChunkSearch::new(1 << 10, 1 << 20);
        settled(&mut search, |chunk| chunk);
        assert_eq!(search.chunk_bytes(), 1 << 20);
    }

    #[test]
    fn where_smaller_is_always_better_it_ends_at_the_least() {
        let mut search = ChunkSearch::new(1 << 10, 1 << 20);
        settled(&mut search, |chunk| 1_000_000_000 / chunk);
        assert_eq!(search.chunk_bytes(), 1 << 10);
    }

    #[test]
    fn a_peak_between_two_powers_is_found_by_the_way_down() {
        let peak = 700 << 10;
        let mut search = ChunkSearch::new(1 << 10, 1 << 24);
        settled(&mut search, |chunk: u64| 1_000 * chunk.min(peak).saturating_sub(chunk.saturating_sub(peak)));
        assert!(search.chunk_bytes().abs_diff(peak) <= (1 << 20) / 8, "{}", search.chunk_bytes());
    }

    #[test]
    fn what_is_settled_stays() {
        let mut search = ChunkSearch::new(8, 8);
        settled(&mut search, |chunk| chunk);
        search.measured(u64::MAX);
        assert!(search.is_settled() && search.chunk_bytes() == 8);
    }
}
