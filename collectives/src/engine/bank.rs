//! Banks: which signal slots and which scratch a run uses, and when they may be used again.
//!
//! Runs of collectives are numbered; each takes the next *bank* of its class. A bank is free again
//! for a rank's peers when that rank has completed the bank's previous run, which its peers know
//! from the `completed` of its headers, from credits, or by asking. **Invariant:** all ranks assign
//! the same banks, because assignment depends on the sequence of calls alone (and where the
//! sequences differ, signatures differ before anything is used).

use pleach_schedule::generate::eager::{MESSAGE_BYTES_MAX, SCRATCH_BYTES};
use pleach_schedule::generate::packed::signal_slots_of_pair_max;
use pleach_vocabulary::Rank;

/// Signal slots before this one tell credits: see [`super::signals`].
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
/// Scratch of a large bank, in bytes: room for the chunks under way along a hundred trees that are
/// ten deep, up and down.
pub(super) const LARGE_SCRATCH_BYTES: u64 = 32 << 20;
/// Largest chunk of a block that is put, in bytes: fits the second-level cache several times over,
/// and is long beside a signal.
const CHUNK_BYTES_MAX: usize = 256 << 10;
/// The same where peers' memory is mapped: chunks staged for peers stay in the cache from which the
/// peers read them.
const MAPPED_CHUNK_BYTES_MAX: usize = 128 << 10;

/// Signal slots that a rank keeps for each peer, in a group of that many ranks.
#[must_use]
pub const fn signal_slots(ranks: u32) -> usize {
    (LARGE_SIGNAL_SLOTS_BASE + LARGE_BANKS as u32 * signal_slots_of_pair_max(ranks)) as usize
}

/// How a run uses banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// A message that the receiver says it is ready for.
    Message,
    /// A message that the receiver reads in place.
    MappedMessage,
    /// A message that the sender puts without asking.
    EagerMessage,
    Small,
    Large,
}

impl Class {
    /// What fits a bank of this class: signal slots for each peer, bytes of scratch, and bytes of a
    /// chunk. `maps`: ranks touch each other's memory through mappings.
    pub(super) fn capacity(self, ranks: u32, maps: bool) -> (u32, u64, usize) {
        match self {
            Self::EagerMessage => (1, EAGER_SCRATCH_BYTES, usize::MAX),
            Self::Message | Self::MappedMessage => {
                (MESSAGE_SIGNAL_SLOTS, MESSAGE_SCRATCH_BYTES, MESSAGE_CHUNK_BYTES)
            }
            Self::Small => (SMALL_SIGNAL_SLOTS, SMALL_SCRATCH_BYTES, usize::MAX),
            Self::Large => {
                let chunk_bytes = if maps { MAPPED_CHUNK_BYTES_MAX } else { CHUNK_BYTES_MAX };
                (signal_slots_of_pair_max(ranks), LARGE_SCRATCH_BYTES, chunk_bytes)
            }
        }
    }
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
    signal_base: u32,
    /// First signal slot that this rank waits on.
    wait_base: u32,
    /// Where its slots begin in this rank's scratch, in bytes.
    scratch_base: u64,
    /// Where they begin in a peer's scratch, in bytes.
    peer_scratch_base: u64,
    needed: u64,
}

impl Bank {
    /// How many runs a peer must have completed before it may be written to: then it does not use
    /// this bank any more.
    #[inline]
    pub(super) fn needed(&self) -> u64 {
        self.needed
    }

    /// A signal slot that this rank signals at its peers.
    #[inline]
    pub(super) fn outgoing(&self, offset: u32) -> u16 {
        // The bank has room for all signal slots of its runs, and banks end below 65,536.
        (self.signal_base + offset) as u16
    }

    /// A signal slot that this rank waits on.
    #[inline]
    pub(super) fn incoming(&self, offset: u32) -> u16 {
        (self.wait_base + offset) as u16
    }

    /// The opposite of [`Bank::incoming`]; `None`: a signal slot of another bank.
    pub(super) fn incoming_offset(&self, signal_slot: u16) -> Option<u32> {
        u32::from(signal_slot).checked_sub(self.wait_base)
    }

    /// A byte of the bank in this rank's scratch.
    #[inline]
    pub(super) fn scratch(&self, offset: u64) -> usize {
        (self.scratch_base + offset) as usize
    }

    /// A byte of the bank in a peer's scratch.
    #[inline]
    pub(super) fn peer_scratch(&self, offset: u64) -> u64 {
        self.peer_scratch_base + offset
    }
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
    /// The bank of run `run`, which is the next one, in a group of `ranks`.
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
    rank: Rank,
    ranks: u32,
    from: Rank,
    to: Rank,
}

impl MessageBanks {
    pub(super) fn new(rank: Rank, ranks: u32, from: Rank, to: Rank) -> Self {
        Self { rank, ranks, from, to }
    }

    /// The bank of message `number`, which is of this class.
    ///
    /// Eager messages use some banks in turn. The sender writes to a bank when it knows that the
    /// receiver has ended the message before in the same bank.
    ///
    /// The other classes have two sets of signal slots each, used in turn. A set is free when both
    /// ranks have ended the last message of that class and parity (two numbers earlier, say),
    /// whatever came between:
    /// * `Message`: the receiver says that it is ready only when it has ended that message. The
    ///   sender, which has ended it too, has seen that the receiver was ready then, and it writes
    ///   after it has heard from the receiver again.
    /// * `MappedMessage`: the sender begins when it has ended that message, so the receiver has
    ///   read it. The receiver signals only after it has heard from the sender, and by then the
    ///   sender has seen the receiver's last signal in the set.
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
        // The signal slots that the sender signals lie below those that the receiver signals.
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

/// Whether the receiver of message `number` sends a credit: often enough that a sender never runs
/// out of free banks while the receiver keeps up.
pub(super) fn message_credit_is_due(number: u64) -> bool {
    (number + 1).is_multiple_of(EAGER_BANKS / 2)
}

/// Whether a rank sends a credit after run `run` to the peers that it does not signal: often enough
/// that a writer never runs out of free banks while all ranks keep up.
pub(super) fn credit_is_due(class: Class, run: u64) -> bool {
    class == Class::Large || run.is_multiple_of(SMALL_BANKS as u64 / 2)
}
