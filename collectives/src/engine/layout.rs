//! Where blocks and chunks are, for a given number of elements.

use super::program::Program;
use crate::parts::Parts;

/// Block boundaries are multiples of this many bytes within their part, so that no two ranks write one cache line.
const ALIGN_BYTES: usize = 64;

/// The bytes of every block.
#[derive(Debug, Default)]
pub(super) struct Layout {
    blocks: Vec<BlockAt>,
    part_bytes: usize,
    chunk_bytes: usize,
}

#[derive(Clone, Copy, Debug)]
struct BlockAt {
    part: u32,
    /// Within the part.
    start: usize,
    bytes: usize,
}

impl Layout {
    /// `count` elements a part, chunks of `chunk_bytes` (a multiple of the element size).
    pub(super) fn set(&mut self, program: &Program, count: usize, element_bytes: usize, chunk_bytes: usize) {
        self.blocks.clear();
        self.part_bytes = count * element_bytes;
        self.chunk_bytes = chunk_bytes;
        for cut in &program.blocks {
            let start = boundary(self.part_bytes, cut.before, cut.total);
            let bytes = boundary(self.part_bytes, cut.before + cut.weight, cut.total) - start;
            self.blocks.push(BlockAt { part: cut.part, start, bytes });
        }
    }

    /// How many chunks a block has: at least one.
    pub(super) fn chunks(&self, block: u32) -> u32 {
        (self.blocks[block as usize].bytes.div_ceil(self.chunk_bytes)).max(1) as u32
    }

    /// Length of a chunk in bytes.
    pub(super) fn chunk_bytes(&self, block: u32, chunk: u32) -> usize {
        let start = chunk as usize * self.chunk_bytes;
        (self.blocks[block as usize].bytes - start).min(self.chunk_bytes)
    }

    /// Where a chunk begins in a slice that holds these parts, in bytes.
    pub(super) fn offset(&self, block: u32, chunk: u32, parts: Parts) -> usize {
        let block = &self.blocks[block as usize];
        parts.position(block.part) as usize * self.part_bytes
            + block.start
            + chunk as usize * self.chunk_bytes
    }

    pub(super) fn part_bytes(&self) -> usize {
        self.part_bytes
    }
}

/// End of the first `passed` of `total` weights of a part, at a multiple of the alignment unless it is the part's end.
fn boundary(part_bytes: usize, passed: u64, total: u64) -> usize {
    if passed == total {
        return part_bytes;
    }
    if passed == 0 {
        return 0;
    }
    let exact = match (part_bytes as u64).checked_mul(passed) {
        Some(product) => (product / total) as usize,
        None => (part_bytes as u128 * u128::from(passed) / u128::from(total)) as usize,
    };
    exact / ALIGN_BYTES * ALIGN_BYTES
}

/// Longest block of a program for parts of at most `part_bytes`, in bytes: what a chunk need not exceed. The same on
/// every rank.
pub(super) fn longest_block(program: &Program, part_bytes: usize) -> usize {
    let (weight, total, blocks) = program.largest_share;
    if weight == total {
        return part_bytes;
    }
    let exact = (part_bytes as u128 * u128::from(weight)).div_ceil(u128::from(total)) as usize;
    (exact + ALIGN_BYTES * blocks).min(part_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boundaries_cover_a_part_without_gap_and_keep_cache_lines_whole() {
        for bytes in [0, 1, 63, 64, 65, 1000, 1 << 20] {
            let ends: Vec<usize> = (0..=7).map(|passed| boundary(bytes, passed, 7)).collect();
            assert_eq!((ends[0], ends[7]), (0, bytes));
            assert!(ends.windows(2).all(|pair| pair[0] <= pair[1]));
            assert!(ends[..7].iter().all(|end| end % ALIGN_BYTES == 0));
        }
    }
}
