//! What checkers that stand outside are told.
//!
//! Records come in the order of virtual time and of cause. They suffice to build vector clocks: a
//! rank's thread and every transfer are actors; `Submitted` orders a rank before its transfer,
//! `Noticed` then `Consumed` a transfer before the rank that saw its signal, `Completed` a
//! transfer's reads (a get's writes) before its submitter. What ranks tell each other by control
//! messages or in payload orders them by `Released` and `Acquired`.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use crate::Rank;
use crate::clock::Nanos;
use crate::region::RegionKey;

/// Numbers all transfers of a world, in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransferNumber(pub u64);

/// Who touches bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Actor {
    /// A rank's thread, or its compute.
    Rank(Rank),
    /// A transfer that this rank submitted.
    Transfer(TransferNumber, Rank),
}

/// What is done to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AccessKind {
    /// They are read.
    Read,
    /// They are written.
    Write,
    /// They are read and written in one atomic step.
    Atomic,
}

/// Bytes that someone touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Who.
    pub by: Actor,
    /// Whose bytes.
    pub owner: Rank,
    /// In which region; [`RegionKey::NONE`] for memory that is not registered.
    pub key: RegionKey,
    /// Which bytes of the region; for memory that is not registered the addresses.
    pub range: Range<u64>,
    /// Addresses of the bytes in their owner's memory: equal for the same bytes however they were
    /// reached. Not the same in two runs of one seed.
    pub addresses: Range<usize>,
    /// How.
    pub kind: AccessKind,
    /// Not before.
    pub start: Nanos,
    /// Not after.
    pub end: Nanos,
}

/// What an [`Observer`] is told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Record {
    /// Bytes were touched.
    Access(Access),
    /// A transfer was accepted.
    Submitted {
        /// From whom.
        rank: Rank,
        /// To whom.
        peer: Rank,
        /// Which.
        transfer: TransferNumber,
    },
    /// A signal was shown: the signal slot that `to` keeps for `from` now counts `count`.
    Noticed {
        /// Whose signal.
        from: Rank,
        /// Who may see it.
        to: Rank,
        /// In which signal slot.
        signal_slot: u16,
        /// What the signal slot counts now.
        count: u64,
        /// By which transfer.
        transfer: TransferNumber,
    },
    /// `rank` saw the signal slot that it keeps for `from` count at least `count` (told by
    /// [`super::World::consumed`]).
    Consumed {
        /// Who saw it.
        rank: Rank,
        /// Whose signal.
        from: Rank,
        /// In which signal slot.
        signal_slot: u16,
        /// The count that was seen.
        count: u64,
    },
    /// `rank` says, on a way that carries no signal, that all it did so far for `number` things of
    /// a sequence is over (told by [`super::World::released`]).
    Released {
        /// Who says so.
        rank: Rank,
        /// Which things are counted.
        sequence: u64,
        /// Of how many things.
        number: u64,
    },
    /// `rank` has heard that `from` [`Record::Released`] at least `number` things, and goes on
    /// because of it.
    Acquired {
        /// Who heard.
        rank: Rank,
        /// Whose word it is.
        from: Rank,
        /// Which things are counted.
        sequence: u64,
        /// Of how many things.
        number: u64,
    },
    /// The submitter has polled the transfer's `Done`.
    Completed {
        /// The submitter.
        rank: Rank,
        /// Which.
        transfer: TransferNumber,
        /// Whether it succeeded.
        succeeded: bool,
    },
    /// `rank` has polled that it lost `peer`.
    Lost {
        /// Who knows.
        rank: Rank,
        /// Who is gone.
        peer: Rank,
    },
    /// From now on nothing of `peer` may change a byte of `rank`.
    Severed {
        /// Whose memory.
        rank: Rank,
        /// The peer that must be fenced.
        peer: Rank,
    },
    /// A rank ended without goodbye.
    Died {
        /// Which.
        rank: Rank,
    },
}

/// A checker outside of what it checks.
pub trait Observer: Send {
    /// Something happened at `now`. Must not call the world, which is in the middle of it.
    fn observe(&mut self, now: Nanos, record: &Record);
}

/// So that who installs a checker can ask it afterwards.
impl<T: Observer> Observer for Arc<Mutex<T>> {
    fn observe(&mut self, now: Nanos, record: &Record) {
        self.lock().unwrap_or_else(std::sync::PoisonError::into_inner).observe(now, record);
    }
}
