//! Who uses which signal slots and which scratch, and when they may be used again.
//!
//! Runs of collectives are numbered; each takes the next *bank* of its class. A bank is free again
//! for a rank's peers when that rank has completed the bank's previous run, which its peers know
//! from the `completed` of its headers, from credits, or by asking. **Invariant:** all ranks assign
//! the same banks, because assignment depends on the sequence of calls alone (and where the
//! sequences differ, signatures differ before anything is used).

use pleach_schedule::generate::eager::{MESSAGE_BYTES_MAX, SCRATCH_BYTES};
use pleach_schedule::generate::packed::{PacingPolicy, signal_slots_of_pair_max};
use pleach_transport::Rank;

use super::at::{LANES_MAX, STEPS_MAX, WINDOW_MAX};
use super::header::INLINE_DATA_BYTES;
use super::layout::{ALIGN_BYTES, longest_block};
use super::program::Program;
use super::stream::Stream;

/// Signal slots before this one tell credits: see [`super::credit`].
pub(super) const FIRST_SIGNAL_SLOT: u32 = 2;

/// Messages of one rank to another that go straight to scratch and may be under way at once.
pub(super) const EAGER_BANKS: u64 = 8;
const EAGER_SIGNAL_SLOTS_BASE: u32 = FIRST_SIGNAL_SLOT;
/// Scratch of such a message, in bytes.
const EAGER_SCRATCH_BYTES: u64 = 8 << 10;
const _: () = assert!(MESSAGE_BYTES_MAX <= EAGER_SCRATCH_BYTES);

/// First signal slot of the other messages between two ranks.
const MESSAGE_SIGNAL_SLOTS_BASE: u32 = 16;
const _: () = assert!(EAGER_SIGNAL_SLOTS_BASE + EAGER_BANKS as u32 <= MESSAGE_SIGNAL_SLOTS_BASE);
/// Signal slots of a message in each direction.
const MESSAGE_SIGNAL_SLOTS: u32 = 6;
/// Scratch of messages for each peer and direction, in bytes.
const MESSAGE_SCRATCH_BYTES: u64 = 128 << 10;
/// Largest chunk of a message, in bytes.
const MESSAGE_CHUNK_BYTES: usize = 64 << 10;

const SMALL_BANKS: usize = 8;
const SMALL_SIGNAL_SLOTS_BASE: u32 = 64;
const SMALL_SIGNAL_SLOTS: u32 = 32;
const _: () = assert!(MESSAGE_SIGNAL_SLOTS_BASE + 8 * MESSAGE_SIGNAL_SLOTS <= SMALL_SIGNAL_SLOTS_BASE);
/// Scratch of a small bank, in bytes.
const SMALL_SCRATCH_BYTES: u64 = 64 << 10;
const _: () = assert!(SCRATCH_BYTES <= SMALL_SCRATCH_BYTES);

const LARGE_BANKS: usize = 2;
const LARGE_SIGNAL_SLOTS_BASE: u32 = SMALL_SIGNAL_SLOTS_BASE + SMALL_BANKS as u32 * SMALL_SIGNAL_SLOTS;
/// Scratch of a large bank, in bytes: what is under way along a hundred trees that are ten deep, up
/// and down.
pub(super) const LARGE_SCRATCH_BYTES: u64 = 32 << 20;
/// Largest chunk of a block that is put, in bytes: fits the second-level cache several times over,
/// and is long beside a signal.
const CHUNK_BYTES_MAX: usize = 256 << 10;
/// The same where peers' memory is mapped: what is staged for them stays in the cache that they
/// read it from.
const MAPPED_CHUNK_BYTES_MAX: usize = 128 << 10;

/// Signal slots that a rank keeps for each peer, in a group of so many ranks.
#[must_use]
pub const fn signal_slots(ranks: u32) -> usize {
    (LARGE_SIGNAL_SLOTS_BASE + LARGE_BANKS as u32 * signal_slots_of_pair_max(ranks)) as usize
}

/// Chunks of blocks of different shares are rounded up to the alignment, as are the ends of blocks:
/// by so much a chunk may be longer than its block's share of the longest.
const UNIT_SPARE_BYTES: usize = 2 * ALIGN_BYTES;

/// How a run uses banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A message that the receiver says it is ready for.
    Message,
    /// One that it reads in place.
    MappedMessage,
    /// One that comes unasked.
    EagerMessage,
    Small,
    Large,
}

/// A schedule that does not fit the signal slots or the scratch.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the schedule needs {signal_slots} signal slots a peer and {slots} scratch slots a rank; there is room for {signal_slots_max} and {slots_max}"
)]
pub struct TooLarge {
    /// Signal slots that it needs for a peer.
    pub signal_slots: u32,
    /// Slots that it needs.
    pub slots: u32,
    /// Signal slots there are.
    pub signal_slots_max: u32,
    /// Slots there is room for.
    pub slots_max: u32,
}

/// Which signal slots and which scratch a run uses: the same on all ranks but for the messages
/// between two.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bank {
    /// First signal slot that this rank signals at its peers.
    pub(super) signal_base: u32,
    /// First signal slot that this rank waits on.
    pub(super) wait_base: u32,
    /// Where its slots begin in this rank's scratch, in bytes.
    pub(super) scratch_base: u64,
    /// Where they begin in a peer's scratch, in bytes.
    pub(super) peer_scratch_base: u64,
    /// A peer may be written to when it has completed so many runs: then it does not use this bank
    /// any more.
    pub(super) needed: u64,
}

/// The size of chunks and the class of a run of `program` over parts of at most `part_bytes`
/// (`None`: not all ranks know how long): the same on every rank.
pub(super) fn chunking(program: &Program, part_bytes: Option<usize>) -> Result<(usize, Class), TooLarge> {
    // Of unknown parts any may be longer than the largest chunk.
    let longest = part_bytes.map_or(LARGE_SCRATCH_BYTES as usize, |bytes| longest_block(program, bytes));
    let whole =
        if longest <= INLINE_DATA_BYTES { INLINE_DATA_BYTES } else { longest.next_multiple_of(ALIGN_BYTES) };
    let slots = u64::from(program.slots);
    let is_small = program.signal_slots <= SMALL_SIGNAL_SLOTS
        && slots * unit_bytes(program, whole) as u64 <= SMALL_SCRATCH_BYTES;
    let (class, signal_slots_max, scratch_bytes, chunk_max) =
        if Stream::of(program.collective) != Stream::Collectives {
            match message_class(program) {
                Class::EagerMessage => (Class::EagerMessage, 1, EAGER_SCRATCH_BYTES, whole),
                class => (class, MESSAGE_SIGNAL_SLOTS, MESSAGE_SCRATCH_BYTES, MESSAGE_CHUNK_BYTES),
            }
        } else if is_small {
            (Class::Small, SMALL_SIGNAL_SLOTS, SMALL_SCRATCH_BYTES, whole)
        } else {
            let chunk_max = if program.maps { MAPPED_CHUNK_BYTES_MAX } else { CHUNK_BYTES_MAX };
            let chunk_max = program.chunk_bytes_max.unwrap_or(chunk_max);
            (Class::Large, signal_slots_of_pair_max(program.ranks), LARGE_SCRATCH_BYTES, chunk_max)
        };
    let room = longest_in(program, (scratch_bytes / slots.max(1)) as usize / ALIGN_BYTES * ALIGN_BYTES);
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

/// Bytes of a unit of scratch, when a chunk of the largest block is so long: where blocks have
/// units in proportion to their share, with room for what lengths are rounded up by.
pub(super) fn unit_bytes(program: &Program, chunk_bytes: usize) -> usize {
    match program.largest_size as usize {
        1 => chunk_bytes,
        size => chunk_bytes.div_ceil(size).next_multiple_of(ALIGN_BYTES) + UNIT_SPARE_BYTES,
    }
}

/// The longest chunk of the largest block whose units are no longer than so many bytes, a multiple
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
    longest.div_ceil(chunks).next_multiple_of(ALIGN_BYTES)
}

/// Bytes of scratch that a rank in a group of `ranks` needs.
pub(super) fn scratch_bytes(ranks: u32) -> u64 {
    eager_base(ranks) + u64::from(ranks) * 2 * EAGER_BANKS * EAGER_SCRATCH_BYTES
}

fn eager_base(ranks: u32) -> u64 {
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
    /// The bank of run `run`, which is the next one, in a group of so many ranks.
    pub(super) fn take(&mut self, class: Class, run: u64, ranks: u32) -> Bank {
        let (index, used, signal_slots, scratch) = match class {
            Class::Large => {
                let index = self.large_runs % LARGE_BANKS;
                self.large_runs += 1;
                let signal_slots = LARGE_SIGNAL_SLOTS_BASE + index as u32 * signal_slots_of_pair_max(ranks);
                let scratch = SMALL_BANKS as u64 * SMALL_SCRATCH_BYTES + index as u64 * LARGE_SCRATCH_BYTES;
                (index, &mut self.large[..], signal_slots, scratch)
            }
            _ => {
                let index = self.small_runs % SMALL_BANKS;
                self.small_runs += 1;
                let signal_slots = SMALL_SIGNAL_SLOTS_BASE + index as u32 * SMALL_SIGNAL_SLOTS;
                (index, &mut self.small[..], signal_slots, index as u64 * SMALL_SCRATCH_BYTES)
            }
        };
        let needed = std::mem::replace(&mut used[index], run + 1);
        Bank {
            signal_base: signal_slots,
            wait_base: signal_slots,
            scratch_base: scratch,
            peer_scratch_base: scratch,
            needed,
        }
    }
}

/// The bank of a message from one rank to another, as `rank` (one of them) sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MessageBanks {
    pub(super) rank: Rank,
    pub(super) ranks: u32,
    pub(super) from: Rank,
    pub(super) to: Rank,
}

impl MessageBanks {
    /// That of message `number`, which is of this class.
    ///
    /// One that comes unasked has one of some banks in turn, and is written when the receiver is
    /// known to have ended the message before in the same bank.
    ///
    /// For the others there are two sets of signal slots in turn, and each class has its own. The
    /// signal slots are free, whatever came between, when the two have made the last message of
    /// that class and parity (say: two numbers earlier):
    /// * asked for: the receiver says that it is ready only when it has ended that message; and the
    ///   sender, who has ended it too, has seen that it was ready then. The sender writes after it
    ///   has heard.
    /// * read in place: the sender begins, and has ended that message, so the receiver has read it;
    ///   the receiver ends with its own signal after it has heard, when the sender has seen the
    ///   last one.
    ///
    /// Their scratch is written only after the peer was heard of in the same message, or is the
    /// sender's own.
    pub(super) fn of(self, class: Class, number: u64) -> Bank {
        let Self { rank, ranks, from, to } = self;
        let (peer, role) = if rank == from { (to, 0) } else { (from, 1) };
        let base =
            |base: u64, bytes: u64, owner: Rank, role: u64| base + (u64::from(owner) * 2 + role) * bytes;
        if class == Class::EagerMessage {
            let bank = number % EAGER_BANKS;
            let signal_slots = EAGER_SIGNAL_SLOTS_BASE + bank as u32;
            let scratch = |peer, role| {
                let bytes = EAGER_BANKS * EAGER_SCRATCH_BYTES;
                base(eager_base(ranks), bytes, peer, role) + bank * EAGER_SCRATCH_BYTES
            };
            return Bank {
                signal_base: signal_slots,
                wait_base: signal_slots,
                scratch_base: scratch(peer, role),
                peer_scratch_base: scratch(rank, 1 - role),
                needed: if role == 0 { (number + 1).saturating_sub(EAGER_BANKS) } else { 0 },
            };
        }
        let scratch = |peer, role| base(message_base(), MESSAGE_SCRATCH_BYTES, peer, role);
        // What the sender signals lies below what the receiver signals.
        let form = u32::from(class == Class::MappedMessage);
        let data = MESSAGE_SIGNAL_SLOTS_BASE + ((number % 2) as u32 * 2 + form) * 2 * MESSAGE_SIGNAL_SLOTS;
        let ready = data + MESSAGE_SIGNAL_SLOTS;
        let (signal_base, wait_base) = if role == 0 { (data, ready) } else { (ready, data) };
        Bank {
            signal_base,
            wait_base,
            scratch_base: scratch(peer, role),
            peer_scratch_base: scratch(rank, 1 - role),
            needed: 0,
        }
    }
}

/// Whether who has received message `number` tells how far it is: often enough that a sender never
/// runs out of free banks while the receiver keeps up.
pub(super) fn message_credit_is_due(number: u64) -> bool {
    (number + 1).is_multiple_of(EAGER_BANKS / 2)
}

/// Whether a rank that is silent towards a peer in run `run` tells it of its progress now: often
/// enough that a writer never runs out of free banks while everybody keeps up.
pub(super) fn credit_is_due(class: Class, run: u64) -> bool {
    class == Class::Large || run.is_multiple_of(SMALL_BANKS as u64 / 2)
}
