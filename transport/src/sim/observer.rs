//! The records for checkers outside of the simulation.
//!
//! Records come in the order of virtual time and of cause. They suffice for vector clocks. A rank's
//! thread and every transfer are actors. `Submitted` orders a rank before its transfer; `Signalled`
//! then `Consumed` order a transfer before the rank that saw its signal; `Completed` orders a
//! transfer's reads (a get's writes) before its submitter. `Released` and `Acquired` order ranks by
//! their control messages and payloads.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::Rank;
use crate::clock::Nanos;
use crate::mutex::lock;
use crate::region::RegionKey;

/// Numbers all transfers of a world, in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferNumber(pub u64);

/// The actor of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Actor {
    /// A rank's thread, or its compute.
    Rank(Rank),
    /// A transfer that this rank submitted.
    Transfer(TransferNumber, Rank),
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AccessKind {
    /// They are read.
    Read,
    /// They are written.
    Write,
    /// They are read and written in one atomic step.
    Atomic,
}

/// An access to bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The actor.
    pub by: Actor,
    /// The owner of the bytes.
    pub owner: Rank,
    /// The region; [`RegionKey::NONE`] for memory that is not registered.
    pub key: RegionKey,
    /// The range in the region; for memory that is not registered the addresses.
    pub range: Range<u64>,
    /// Addresses of the bytes in their owner's memory: the same for the same bytes, however they
    /// were accessed. Different in two runs of one seed.
    pub addresses: Range<usize>,
    /// The kind.
    pub kind: AccessKind,
    /// Not before this time.
    pub start: Nanos,
    /// Not after this time.
    pub end: Nanos,
}

/// A record for an [`Observer`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Record {
    /// Bytes were touched.
    Access(Access),
    /// A transfer was accepted.
    Submitted {
        /// The submitter.
        rank: Rank,
        /// The peer.
        peer: Rank,
        /// The transfer.
        transfer: TransferNumber,
    },
    /// A signal was raised: the signal slot that `to` keeps for `from` now counts `count`.
    Signalled {
        /// The sender.
        from: Rank,
        /// The target.
        to: Rank,
        /// The signal slot.
        signal_slot: u16,
        /// The new count.
        count: u64,
        /// The transfer of the signal.
        transfer: TransferNumber,
    },
    /// `rank` saw the signal slot that it keeps for `from` count at least `count` (reported by
    /// [`super::World::consumed`]).
    Consumed {
        /// The rank.
        rank: Rank,
        /// The sender.
        from: Rank,
        /// The signal slot.
        signal_slot: u16,
        /// The count that was seen.
        count: u64,
    },
    /// `rank` reports, without a signal, that all its work for the first `number` elements of a
    /// sequence is over (reported by [`super::World::released`]).
    Released {
        /// The rank.
        rank: Rank,
        /// The sequence.
        sequence: u64,
        /// The number of elements.
        number: u64,
    },
    /// `rank` has learned that `from` [`Record::Released`] at least `number` elements, and goes on
    /// because of it.
    Acquired {
        /// The rank that learned it.
        rank: Rank,
        /// The rank that reported it.
        from: Rank,
        /// The sequence.
        sequence: u64,
        /// The number of elements.
        number: u64,
    },
    /// The submitter has polled the transfer's `Done`.
    Completed {
        /// The submitter.
        rank: Rank,
        /// The transfer.
        transfer: TransferNumber,
        /// Whether it succeeded.
        succeeded: bool,
    },
    /// `rank` has polled that it lost `peer`.
    Lost {
        /// The rank that lost its peer.
        rank: Rank,
        /// The lost peer.
        peer: Rank,
    },
    /// From now on `peer` may not change a byte of `rank`.
    Severed {
        /// The owner of the memory.
        rank: Rank,
        /// The peer that must be fenced.
        peer: Rank,
    },
    /// `rank` drains its pair with `peer`: what it submits from now on is after the drain.
    Drains {
        /// The rank.
        rank: Rank,
        /// The peer.
        peer: Rank,
    },
    /// `rank` has polled that its pair with `peer` is drained.
    Drained {
        /// The rank.
        rank: Rank,
        /// The peer.
        peer: Rank,
    },
    /// A rank ended without a bye.
    Died {
        /// The rank.
        rank: Rank,
    },
}

/// A checker, apart from the code that it checks.
pub trait Observer: Send {
    /// Handles a record at `now`. Must not call the world, which is locked.
    fn observe(&mut self, now: Nanos, record: &Record);
}

/// So that a checker can be read after the run.
impl<T: Observer> Observer for Arc<Mutex<T>> {
    fn observe(&mut self, now: Nanos, record: &Record) {
        lock(self).observe(now, record);
    }
}
