//! Where blocks and chunks are, for given numbers of elements, and how long chunks are.

use pleach_schedule::Part;
use pleach_schedule::generate::packed::PacingPolicy;
use pleach_vocabulary::{Parts, Rank};

use super::super::{Class, LARGE_SCRATCH_BYTES, TooLarge};
use super::super::{LANES_MAX, STEPS_MAX, Stream, WINDOW_MAX};
use super::{INLINE_DATA_BYTES, PlaceSlot, Program};
use crate::call::{Counts, CountsError};

/// Block boundaries are multiples of this many bytes within their part, and chunk boundaries within
/// their block, so that no two ranks write one cache line.
const ALIGN_BYTES: usize = 64;

/// Lengths of chunks are kept in parts of a byte, 2 to this power of them: the chunks of a
/// block end where it ends, give or take a byte, without a division a chunk.
const PITCH_BITS: u32 = 16;

/// Chunks of blocks of different shares are rounded up to the alignment, as are the ends of blocks:
/// by so much a chunk may be longer than its block's share of the longest.
const UNIT_SPARE_BYTES: usize = 2 * ALIGN_BYTES;

/// The bytes of every block.
#[derive(Debug)]
pub(super) struct Layout {
    blocks: Vec<BlockLayout>,
    lengths: Lengths,
}

/// The lengths of parts in bytes, as they are known; see the module of counts. Starts are one more
/// than there are lengths: the last one is the end.
#[derive(Debug)]
enum Lengths {
    Each {
        part_bytes: usize,
    },
    /// Where each part would begin if all lay one after the other.
    Listed {
        starts: Vec<usize>,
    },
    /// By rank: where the part for it begins in the input, and where the part from it begins in the
    /// output.
    Paired {
        given: Vec<usize>,
        taken: Vec<usize>,
    },
}

#[derive(Clone, Copy, Debug)]
struct BlockLayout {
    part: u32,
    /// Within the part.
    start: usize,
    bytes: usize,
    chunks: u32,
    /// From the beginning of a chunk to that of the next, but for the alignment; in parts of a
    /// byte.
    pitch: usize,
}

impl BlockLayout {
    /// Where a chunk begins, from the beginning of the block on.
    fn chunk_start(&self, chunk: u32) -> usize {
        ((chunk as usize * self.pitch) >> PITCH_BITS).next_multiple_of(ALIGN_BYTES)
    }
}

impl Layout {
    /// Of counts that were checked ([`Counts::check_sum`]), with chunks of `chunk_bytes` (a
    /// multiple of the element size and of the alignment), or of at most that where all blocks are
    /// to have as many; none longer than the units of scratch that its block has. Links give each
    /// tree its share chunk by chunk, so as many means exactly as many: lengths that were each
    /// rounded up would end short blocks early.
    pub(super) fn new(
        program: &Program,
        counts: &Counts,
        element_bytes: usize,
        (chunk_bytes, unit_bytes): (usize, usize),
    ) -> Result<Self, CountsError> {
        let lengths = match counts {
            Counts::Each(count) => Lengths::Each { part_bytes: count * element_bytes },
            Counts::Listed(list) => Lengths::Listed { starts: starts(list, element_bytes) },
            Counts::Paired(paired) => Lengths::Paired {
                given: starts(&paired.given, element_bytes),
                taken: starts(&paired.taken, element_bytes),
            },
        };
        let chunks = program.pace.as_ref().and_then(|_| {
            let longest = longest_block(program, counts.longest()? * element_bytes);
            Some(longest.div_ceil(chunk_bytes).max(1))
        });
        let mut layout = Self { blocks: Vec::with_capacity(program.blocks.len()), lengths };
        for cut in &program.blocks {
            let bytes = layout.length(program, cut.part);
            let start = boundary(bytes, cut.before, cut.total);
            let end = boundary(bytes, cut.before + cut.weight, cut.total);
            let bytes = end - start;
            let most = chunk_bytes.min(cut.size as usize * unit_bytes);
            let least = bytes.div_ceil(most).max(1);
            let (chunks, pitch) = match chunks {
                None => (least, most << PITCH_BITS),
                Some(chunks) => {
                    let chunks = chunks.min(bytes / ALIGN_BYTES).max(least);
                    (chunks, (bytes << PITCH_BITS) / chunks)
                }
            };
            assert!(most.is_multiple_of(ALIGN_BYTES) || chunks == 1, "{chunks} chunks of up to {most} bytes");
            let chunks = u32::try_from(chunks).map_err(|_| CountsError::TooLong)?;
            layout.blocks.push(BlockLayout { part: cut.part, start, bytes, chunks, pitch });
        }
        Ok(layout)
    }

    /// Length of a part that this rank has to do with, in bytes.
    fn length(&self, program: &Program, part: u32) -> usize {
        let between = |starts: &[usize], index: u32| starts[index as usize + 1] - starts[index as usize];
        match &self.lengths {
            Lengths::Each { part_bytes } => *part_bytes,
            Lengths::Listed { starts } => between(starts, part),
            Lengths::Paired { given, taken } => match ends(program, part) {
                (from, to) if from == program.rank => between(given, to),
                (from, _) => between(taken, from),
            },
        }
    }

    /// How many chunks a block has: at least one.
    pub(super) fn chunks(&self, block: u32) -> u32 {
        self.blocks[block as usize].chunks
    }

    /// Length of a chunk in bytes.
    pub(super) fn chunk_bytes(&self, block: u32, chunk: u32) -> usize {
        let block = &self.blocks[block as usize];
        let end = if chunk + 1 == block.chunks { block.bytes } else { block.chunk_start(chunk + 1) };
        end - block.chunk_start(chunk)
    }

    /// Where a chunk begins in the input or output of the place's rank, in bytes; of a peer with
    /// paired counts: in the buffer that the peer has told of.
    pub(super) fn offset(&self, program: &Program, block: u32, chunk: u32, place: PlaceSlot) -> usize {
        let block = &self.blocks[block as usize];
        let part_start = match &self.lengths {
            Lengths::Each { part_bytes } => parts(program, place).position(block.part) as usize * part_bytes,
            Lengths::Listed { starts } => {
                // A list is taken only for parts that lie one after the other.
                let first = parts(program, place).iter().next().unwrap_or(block.part);
                starts[block.part as usize] - starts[first as usize]
            }
            Lengths::Paired { .. } if place.rank != program.rank => 0,
            Lengths::Paired { given, taken } => match ends(program, block.part) {
                (_, to) if is_input(place.part) => given[to as usize],
                (from, _) => taken[from as usize],
            },
        };
        part_start + block.start + block.chunk_start(chunk)
    }

    /// Length of the buffer that a peer has told of, in bytes: its whole slice, or the part of the
    /// block.
    pub(super) fn buffer_bytes(&self, program: &Program, block: u32, place: PlaceSlot) -> usize {
        match &self.lengths {
            Lengths::Each { part_bytes } => parts(program, place).len() * part_bytes,
            Lengths::Listed { .. } => {
                parts(program, place).iter().map(|part| self.length(program, part)).sum()
            }
            Lengths::Paired { .. } => self.length(program, self.blocks[block as usize].part),
        }
    }

    /// Where in this rank's input and output the buffers begin that it tells a peer, in bytes.
    pub(super) fn buffer_starts(&self, peer: Rank) -> (u64, u64) {
        match &self.lengths {
            Lengths::Each { .. } | Lengths::Listed { .. } => (0, 0),
            Lengths::Paired { given, taken } => (given[peer as usize] as u64, taken[peer as usize] as u64),
        }
    }
}

fn starts(counts: &[usize], element_bytes: usize) -> Vec<usize> {
    let ends = counts.iter().scan(0, |end, count| {
        *end += count * element_bytes;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

fn is_input(part: Part) -> bool {
    matches!(part, Part::Input | Part::SharedInput)
}

/// The parts that the input or output of the place's rank holds.
fn parts(program: &Program, place: PlaceSlot) -> Parts {
    if is_input(place.part) {
        program.collective.input_parts(place.rank, program.ranks)
    } else {
        program.collective.output_parts(place.rank, program.ranks)
    }
}

/// The rank that gives a part and the rank that gets it, of a program that was checked to have such
/// parts.
fn ends(program: &Program, part: u32) -> (Rank, Rank) {
    program.collective.ends(part, program.ranks).expect("checked when the call was accepted")
}

/// End of the first `passed` of `total` weights of a part, at a multiple of the alignment unless it
/// is the part's end.
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

/// Longest block of a program for parts of at most `part_bytes`, in bytes: no chunk needs to be
/// longer. The same on every rank.
fn longest_block(program: &Program, part_bytes: usize) -> usize {
    let (weight, total, blocks) = program.largest_share;
    if weight == total {
        return part_bytes;
    }
    let exact = (part_bytes as u128 * u128::from(weight)).div_ceil(u128::from(total)) as usize;
    (exact + ALIGN_BYTES * blocks).min(part_bytes)
}

/// The size of chunks and the class of a run of `program` over parts of at most `part_bytes`
/// (`None`: not all ranks know how long): the same on every rank.
pub(super) fn chunking(program: &Program, part_bytes: Option<usize>) -> Result<(usize, Class), TooLarge> {
    // Of unknown parts any may be longer than the largest chunk.
    let longest = part_bytes.map_or(LARGE_SCRATCH_BYTES as usize, |bytes| longest_block(program, bytes));
    let whole =
        if longest <= INLINE_DATA_BYTES { INLINE_DATA_BYTES } else { longest.next_multiple_of(ALIGN_BYTES) };
    let slots = u64::from(program.slots);
    let class = match Stream::of(program.collective) {
        Stream::Messages { .. } => message_class(program),
        Stream::Collectives if is_small(program, whole) => Class::Small,
        Stream::Collectives => Class::Large,
    };
    let (signal_slots_max, scratch_bytes, chunk_max) = capacity(class, program);
    let chunk_max = match class {
        Class::Large | Class::Small => program.chunk_bytes_max.unwrap_or(chunk_max),
        _ => chunk_max,
    };
    let room = match program.chunk_bytes_max {
        Some(bytes) if slots == 0 => bytes,
        _ => longest_in(program, (scratch_bytes / slots.max(1)) as usize / ALIGN_BYTES * ALIGN_BYTES),
    };
    let fits = program.signal_slots <= signal_slots_max
        && room >= ALIGN_BYTES
        && program.window <= WINDOW_MAX
        && program.lanes.len() <= LANES_MAX
        && program.lanes.iter().all(|lane| lane.steps <= STEPS_MAX);
    if !fits {
        let slots_max = (scratch_bytes / ALIGN_BYTES as u64) as u32;
        return Err(TooLarge {
            signal_slots: program.signal_slots,
            slots: program.slots,
            signal_slots_max,
            slots_max,
        });
    }
    let wanted = match (program.chunk_bytes, &program.pace) {
        _ if class != Class::Large => chunk_max,
        (Some(bytes), _) => bytes.next_multiple_of(ALIGN_BYTES),
        (None, Some(pace)) => paced_chunk(program, pace, longest, part_bytes),
        (None, None) => chunk_max,
    };
    let chunk = whole.min(chunk_max).min(wanted).min(room.max(ALIGN_BYTES));
    if program.single_chunk && chunk < whole {
        let slots_max = (scratch_bytes / whole as u64) as u32;
        return Err(TooLarge {
            signal_slots: program.signal_slots,
            slots: program.slots,
            signal_slots_max,
            slots_max,
        });
    }
    Ok((chunk, class))
}

/// As [`Class::capacity`]. A planner sets the longest chunk of programs of which GPUs copy.
fn capacity(class: Class, program: &Program) -> (u32, u64, usize) {
    class.capacity(program.ranks, program.maps, program.chunk_bytes_max.is_some())
}

/// Whether all blocks, with chunks of `whole` bytes, fit a small bank.
fn is_small(program: &Program, whole: usize) -> bool {
    let (signal_slots, scratch_bytes, _) = capacity(Class::Small, program);
    program.signal_slots <= signal_slots
        && u64::from(program.slots) * unit_bytes(program, whole) as u64 <= scratch_bytes
}

/// Bytes of a unit of scratch, when a chunk of the largest block is so long: where blocks have
/// units in proportion to their share, with room for rounding lengths up.
pub(super) fn unit_bytes(program: &Program, chunk_bytes: usize) -> usize {
    match program.largest_size as usize {
        1 => chunk_bytes,
        size => chunk_bytes.div_ceil(size).next_multiple_of(ALIGN_BYTES) + UNIT_SPARE_BYTES,
    }
}

/// The longest chunk of the largest block whose units are not longer than the limit, a multiple
/// of the alignment.
fn longest_in(program: &Program, unit_bytes: usize) -> usize {
    match program.largest_size as usize {
        1 => unit_bytes,
        size => unit_bytes.saturating_sub(UNIT_SPARE_BYTES) * size,
    }
}

fn message_class(program: &Program) -> Class {
    match (program.single_chunk, program.maps) {
        (true, _) => Class::EagerMessage,
        (false, true) => Class::MappedMessage,
        (false, false) => Class::Message,
    }
}

/// The chunk of the longest block, when all blocks are cut into as many as suits the links.
fn paced_chunk(program: &Program, pace: &PacingPolicy, longest: usize, part_bytes: Option<usize>) -> usize {
    let parts = u64::from(program.collective.parts(program.ranks));
    let whole = part_bytes.map_or(longest as u64, |bytes| bytes as u64).saturating_mul(parts);
    let chunks = usize::try_from(pace.chunks(whole)).unwrap_or(usize::MAX);
    // A call without bytes has a chunk too.
    longest.max(1).div_ceil(chunks).next_multiple_of(ALIGN_BYTES)
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

    #[test]
    fn chunks_cover_a_block_without_gap_and_none_is_longer_than_the_pitch_rounded_up() {
        for bytes in [640, 700, 4_001, 65_536, 1_000_003, (1 << 40) + 5] {
            for chunks in [1, 2, 3, 7, 10] {
                let block = BlockLayout {
                    part: 0,
                    start: 0,
                    bytes,
                    chunks,
                    pitch: (bytes << PITCH_BITS) / chunks as usize,
                };
                let layout = Layout { blocks: vec![block], lengths: Lengths::Each { part_bytes: bytes } };
                let mut end = 0;
                for chunk in 0..chunks {
                    assert_eq!(block.chunk_start(chunk), end);
                    let length = layout.chunk_bytes(0, chunk);
                    let most = bytes.div_ceil(chunks as usize).next_multiple_of(ALIGN_BYTES);
                    assert!(
                        length > 0 && length <= most,
                        "chunk {chunk} of {chunks} of {bytes} bytes: {length}"
                    );
                    end += length;
                }
                assert_eq!(end, bytes);
            }
        }
    }
}
