//! Who uses which cells and which scratch, and when they may be used again.
//!
//! Runs of collectives are numbered; each takes the next *bank* of its class. A bank is free again for a rank's peers
//! when that rank has completed the bank's previous run, which its peers know from the `completed` of its headers, from
//! credits, or by asking. **Invariant:** all ranks assign the same banks, because assignment depends on the sequence of
//! calls alone (and where the sequences differ, signatures differ before anything is used).

use pleach_transport::Rank;

use super::header::INLINE_DATA_BYTES;
use super::layout::longest_block;
use super::program::Program;
use super::run::{Bank, LANES_MAX, STEPS_MAX, WINDOW_MAX};
use super::signature::Stream;
use crate::generate::eager::SCRATCH_BYTES;
use crate::generate::packed::Pace;

/// The cell in which peers tell how many runs they have completed, when nothing else tells it.
pub(super) const CREDIT_CELL: u16 = 0;

/// First cell of the messages between two ranks.
const MESSAGE_CELLS_BASE: u32 = 16;
/// Cells of a message in each direction.
const MESSAGE_CELLS: u32 = 12;
/// Scratch of messages for each peer and direction, in bytes.
const MESSAGE_SCRATCH_BYTES: u64 = 256 << 10;
/// Largest chunk of a message, in bytes.
const MESSAGE_CHUNK_BYTES: usize = 64 << 10;

const SMALL_BANKS: usize = 8;
const SMALL_CELLS_BASE: u32 = 64;
const SMALL_CELLS: u32 = 32;
const _: () = assert!(MESSAGE_CELLS_BASE + 4 * MESSAGE_CELLS <= SMALL_CELLS_BASE);
/// Scratch of a small bank, in bytes.
const SMALL_SCRATCH_BYTES: u64 = 64 << 10;
const _: () = assert!(SCRATCH_BYTES <= SMALL_SCRATCH_BYTES);

const LARGE_BANKS: usize = 2;
const LARGE_CELLS_BASE: u32 = SMALL_CELLS_BASE + SMALL_BANKS as u32 * SMALL_CELLS;
const LARGE_CELLS: u32 = 1024;
/// Scratch of a large bank, in bytes.
const LARGE_SCRATCH_BYTES: u64 = 16 << 20;
/// Largest chunk of a block that is put, in bytes: fits the second-level cache several times over, and is long beside a
/// notice.
const CHUNK_BYTES_MAX: usize = 256 << 10;
/// The same where peers' memory is mapped: what is staged for them stays in the cache that they read it from.
const MAPPED_CHUNK_BYTES_MAX: usize = 128 << 10;

/// Cells that a rank keeps for each peer.
pub const CELLS: usize = (LARGE_CELLS_BASE + LARGE_BANKS as u32 * LARGE_CELLS) as usize;

const ALIGN_BYTES: usize = 64;

/// How a run uses banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Message,
    Small,
    Large,
}

/// A schedule that does not fit the cells or the scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the schedule needs {cells} cells a peer and {slots} scratch slots a rank; there is room for {cells_max} and {slots_max}"
)]
pub struct TooLarge {
    /// Cells that it needs for a peer.
    pub cells: u32,
    /// Slots that it needs.
    pub slots: u32,
    /// Cells there are.
    pub cells_max: u32,
    /// Slots there is room for.
    pub slots_max: u32,
}

/// The size of chunks and the class of a run of `program` over parts of at most `part_bytes` (`None`: not all ranks know
/// how long): the same on every rank.
pub(super) fn chunking(program: &Program, part_bytes: Option<usize>) -> Result<(usize, Class), TooLarge> {
    // Of unknown parts any may be longer than the largest chunk.
    let longest = part_bytes.map_or(LARGE_SCRATCH_BYTES as usize, |bytes| longest_block(program, bytes));
    let whole =
        if longest <= INLINE_DATA_BYTES { INLINE_DATA_BYTES } else { longest.next_multiple_of(ALIGN_BYTES) };
    let slots = u64::from(program.slots);
    let (class, cells_max, scratch_bytes, chunk_max) =
        if Stream::of(program.collective) != Stream::Collectives {
            (Class::Message, MESSAGE_CELLS, MESSAGE_SCRATCH_BYTES, MESSAGE_CHUNK_BYTES)
        } else if program.cells <= SMALL_CELLS && slots * whole as u64 <= SMALL_SCRATCH_BYTES {
            (Class::Small, SMALL_CELLS, SMALL_SCRATCH_BYTES, whole)
        } else {
            let chunk_max = if program.maps { MAPPED_CHUNK_BYTES_MAX } else { CHUNK_BYTES_MAX };
            let chunk_max = program.chunk_bytes_max.unwrap_or(chunk_max);
            (Class::Large, LARGE_CELLS, LARGE_SCRATCH_BYTES, chunk_max)
        };
    let room = (scratch_bytes / slots.max(1)) as usize / ALIGN_BYTES * ALIGN_BYTES;
    let fits = program.cells <= cells_max
        && room >= ALIGN_BYTES
        && program.window <= WINDOW_MAX
        && program.lanes.len() <= LANES_MAX
        && program.lanes.iter().all(|lane| lane.steps <= STEPS_MAX);
    if !fits {
        let slots_max = (scratch_bytes / ALIGN_BYTES as u64) as u32;
        return Err(TooLarge { cells: program.cells, slots: program.slots, cells_max, slots_max });
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
        return Err(TooLarge { cells: program.cells, slots: program.slots, cells_max, slots_max });
    }
    Ok((chunk, class))
}

/// The chunk of the longest block, when all blocks are cut into as many as suits the links.
fn paced_chunk(program: &Program, pace: &Pace, longest: usize, part_bytes: Option<usize>) -> usize {
    let parts = u64::from(program.collective.parts(program.ranks));
    let whole = part_bytes.map_or(longest as u64, |bytes| bytes as u64).saturating_mul(parts);
    let chunks = usize::try_from(pace.chunks(whole)).unwrap_or(usize::MAX);
    longest.div_ceil(chunks).next_multiple_of(ALIGN_BYTES)
}

/// Bytes of scratch that a rank in a group of `ranks` needs.
pub(super) fn scratch_bytes(ranks: u32) -> u64 {
    message_base() + u64::from(ranks) * 2 * MESSAGE_SCRATCH_BYTES
}

const fn message_base() -> u64 {
    SMALL_BANKS as u64 * SMALL_SCRATCH_BYTES + LARGE_BANKS as u64 * LARGE_SCRATCH_BYTES
}

/// The banks of the collectives of one group.
#[derive(Debug, Default)]
pub(super) struct Banks {
    /// By bank: one more than the number of the last run that used it.
    small: [u64; SMALL_BANKS],
    large: [u64; LARGE_BANKS],
    small_runs: usize,
    large_runs: usize,
}

impl Banks {
    /// The bank of run `run`, which is the next one.
    pub(super) fn take(&mut self, class: Class, run: u64) -> Bank {
        let (index, used, cells, scratch) = match class {
            Class::Large => {
                let index = self.large_runs % LARGE_BANKS;
                self.large_runs += 1;
                let cells = LARGE_CELLS_BASE + index as u32 * LARGE_CELLS;
                let scratch = SMALL_BANKS as u64 * SMALL_SCRATCH_BYTES + index as u64 * LARGE_SCRATCH_BYTES;
                (index, &mut self.large[..], cells, scratch)
            }
            Class::Small | Class::Message => {
                let index = self.small_runs % SMALL_BANKS;
                self.small_runs += 1;
                let cells = SMALL_CELLS_BASE + index as u32 * SMALL_CELLS;
                (index, &mut self.small[..], cells, index as u64 * SMALL_SCRATCH_BYTES)
            }
        };
        let needed = std::mem::replace(&mut used[index], run + 1);
        Bank {
            notify_base: cells,
            wait_base: cells,
            scratch_base: scratch,
            peer_scratch_base: scratch,
            needed,
        }
    }
}

/// The bank of message `number` from one rank to another, as `rank` (one of them) sees it.
///
/// Cells alternate from message to message: whoever ends a message with a notice may begin the next one with another
/// before the peer has seen the first. Two messages on neither can, for in every message each of the two hears from the
/// other, who has ended the one before by then. Scratch is written only after the peer was heard of in the same message.
pub(super) fn message_bank(rank: Rank, from: Rank, to: Rank, number: u64) -> Bank {
    let (peer, role) = if rank == from { (to, 0) } else { (from, 1) };
    let scratch =
        |peer: Rank, role: u64| message_base() + (u64::from(peer) * 2 + role) * MESSAGE_SCRATCH_BYTES;
    // What the sender notifies lies below what the receiver notifies.
    let data = MESSAGE_CELLS_BASE + (number % 2) as u32 * 2 * MESSAGE_CELLS;
    let ready = data + MESSAGE_CELLS;
    let (notify_base, wait_base) = if role == 0 { (data, ready) } else { (ready, data) };
    Bank {
        notify_base,
        wait_base,
        scratch_base: scratch(peer, role),
        peer_scratch_base: scratch(rank, 1 - role),
        needed: 0,
    }
}

/// Whether a rank that is silent towards a peer in run `run` tells it of its progress now: often enough that a writer
/// never runs out of free banks while everybody keeps up.
pub(super) fn credit_is_due(class: Class, run: u64) -> bool {
    class == Class::Large || run.is_multiple_of(SMALL_BANKS as u64 / 2)
}
