//! Where blocks and chunks are, for a given number of elements.

use super::program::Program;

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
        let parts = program.collective.parts(program.ranks);
        // Blocks of a part need not stand together in the list: first weigh, then cut.
        if parts == 1 {
            self.cut(program, self.part_bytes);
            return;
        }
        let mut weights = vec![(0u64, 0u64); parts as usize];
        for block in &program.blocks {
            weights[block.part as usize].0 += u64::from(block.weight);
        }
        for block in &program.blocks {
            let (total, passed) = &mut weights[block.part as usize];
            let start = boundary(self.part_bytes, *passed, *total);
            *passed += u64::from(block.weight);
            let bytes = boundary(self.part_bytes, *passed, *total) - start;
            self.blocks.push(BlockAt { part: block.part, start, bytes });
        }
    }

    /// The common case without any allocation: one part.
    fn cut(&mut self, program: &Program, part_bytes: usize) {
        let total = program.blocks.iter().map(|block| u64::from(block.weight)).sum();
        let mut passed = 0;
        let mut start = 0;
        for block in &program.blocks {
            passed += u64::from(block.weight);
            let end = boundary(part_bytes, passed, total);
            self.blocks.push(BlockAt { part: block.part, start, bytes: end - start });
            start = end;
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

    /// Where a chunk begins in a slice that begins with part `first_part`, in bytes.
    pub(super) fn offset(&self, block: u32, chunk: u32, first_part: u32) -> usize {
        let block = &self.blocks[block as usize];
        (block.part - first_part) as usize * self.part_bytes + block.start + chunk as usize * self.chunk_bytes
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
    let exact = (part_bytes as u128 * u128::from(passed) / u128::from(total.max(1))) as usize;
    exact / ALIGN_BYTES * ALIGN_BYTES
}

/// Longest block of a program for `part_bytes`, in bytes: what a chunk need not exceed.
pub(super) fn longest_block(program: &Program, part_bytes: usize) -> usize {
    let parts = program.collective.parts(program.ranks) as usize;
    if parts == 1 {
        let total: u64 = program.blocks.iter().map(|block| u64::from(block.weight)).sum();
        let most = program.blocks.iter().map(|block| u64::from(block.weight)).max().unwrap_or(1);
        let exact = (part_bytes as u128 * u128::from(most)).div_ceil(u128::from(total.max(1))) as usize;
        return if program.blocks.len() == 1 {
            part_bytes
        } else {
            (exact + ALIGN_BYTES * program.blocks.len()).min(part_bytes)
        };
    }
    part_bytes
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
