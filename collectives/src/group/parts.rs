//! The groups into which the group of an epoch is split, and how they end with the epoch.
//!
//! A *part* has a device of its own, as any group that was split from another one: its ranks meet
//! in the store of the epoch and connect. Its engine is that of an epoch all the same
//! ([`EpochEnd`]). It stops at its first fault, tells it to the session, and waits for the end of
//! the epoch. With that it severs its peers, so no peer reads or changes memory of the part any
//! more, and its calls end with [`FaultKind::Changed`]. Windows and the rounds of a partial
//! all-reduce are parts.
//!
//! A peer that has ended its pairs in a part may have heard of the next epoch first, or have failed
//! to make the part. So it is no fault of the epoch before an engine that is used has waited for
//! the end of the epoch for a while.
//!
//! **Invariants:** a part is listed before its ranks meet, so the end of the epoch reaches it. A
//! fault of a part is told with the rank that its subject has in the epoch.

use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_transport::mutex::lock;
use pleach_vocabulary::Rank;

use super::driver::Driver;
use crate::engine::{EpochEnd, FaultKind, StatusBoard};

/// Is told of faults: which rank of the epoch is gone or late, or that the step cannot be ended.
type Found = dyn Fn(Option<Rank>) + Send + Sync;

/// A part, while there is one.
struct Part {
    rank: Rank,
    board: Weak<StatusBoard>,
    driver: Arc<OnceLock<Weak<Driver>>>,
}

#[derive(Default)]
struct State {
    /// Why the epoch is over, once it is.
    cause: Option<String>,
    parts: Vec<Part>,
}

/// The parts of an epoch's group; see the module.
pub(crate) struct Parts {
    epoch: u64,
    /// How long a peer that has ended its pairs in a part is no fault.
    patience: Duration,
    found: Box<Found>,
    state: Mutex<State>,
}

/// What a group in an epoch knows of that.
#[derive(Clone)]
pub(crate) struct InEpoch {
    parts: Arc<Parts>,
    /// By rank of this group: the rank in the epoch.
    ranks: Vec<Rank>,
}

/// A part that is being made.
pub(crate) struct NewPart {
    board: Arc<StatusBoard>,
    place: InEpoch,
    driver: Arc<OnceLock<Weak<Driver>>>,
}

impl Part {
    fn end(&self, cause: &str) {
        if let Some(board) = self.board.upgrade() {
            board.end_epoch(self.rank, cause.to_owned());
        }
        if let Some(driver) = self.driver() {
            driver.waker().wake();
        }
    }

    fn driver(&self) -> Option<Arc<Driver>> {
        self.driver.get().and_then(Weak::upgrade)
    }
}

impl Parts {
    /// `found` is told of faults, and never blocks; of peers that have ended their pairs in a part
    /// only when the epoch has not ended for so long.
    pub(crate) fn new(
        epoch: u64,
        patience: Duration,
        found: impl Fn(Option<Rank>) + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { epoch, patience, found: Box::new(found), state: Mutex::default() })
    }

    /// The epoch is over.
    pub(crate) fn end(&self, cause: &str) {
        let mut state = lock(&self.state);
        state.cause.get_or_insert_with(|| cause.to_owned());
        state.parts.iter().for_each(|part| part.end(cause));
    }

    /// Whether the program has any of them.
    pub(crate) fn are_kept(&self) -> bool {
        lock(&self.state).parts.iter().any(|part| part.driver().is_some())
    }

    /// Waits, when the epoch is over, until no peer reads or changes memory of any part. Returns
    /// whether that is so by then.
    pub(crate) fn await_end(&self, until: Nanos) -> bool {
        let drivers: Vec<Arc<Driver>> = lock(&self.state).parts.iter().filter_map(Part::driver).collect();
        drivers.iter().all(|driver| driver.await_end(until))
    }
}

impl InEpoch {
    /// What the group of the epoch knows, which has so many ranks.
    pub(crate) fn whole(parts: Arc<Parts>, ranks: u32) -> Self {
        Self { parts, ranks: (0..ranks).collect() }
    }

    /// The number of the epoch.
    pub(crate) fn epoch(&self) -> u64 {
        self.parts.epoch
    }

    /// This process is of this rank in a new part of these ranks of the group.
    pub(crate) fn part(&self, rank: Rank, members: &[Rank]) -> NewPart {
        let ranks: Vec<Rank> = members.iter().map(|member| self.ranks[*member as usize]).collect();
        let (parts, of_epoch) = (Arc::downgrade(&self.parts), ranks.clone());
        let end = EpochEnd::of_part(self.parts.patience, move |fault| {
            // Who has ended its pairs in a part has not left the epoch.
            let late = fault.late().filter(|_| fault.kind == FaultKind::TimedOut);
            if let Some(parts) = parts.upgrade() {
                (parts.found)(late.and_then(|rank| of_epoch.get(rank as usize).copied()));
            }
        });
        let board = Arc::new(StatusBoard::of_epoch(rank, end));
        let driver = Arc::new(OnceLock::new());
        let part = Part { rank, board: Arc::downgrade(&board), driver: Arc::clone(&driver) };
        let mut state = lock(&self.parts.state);
        state.parts.retain(|part| part.board.strong_count() > 0);
        if let Some(cause) = &state.cause {
            part.end(cause);
        }
        state.parts.push(part);
        drop(state);
        NewPart { board, place: Self { parts: Arc::clone(&self.parts), ranks }, driver }
    }
}

impl NewPart {
    /// The board of the part.
    pub(crate) fn board(&self) -> Arc<StatusBoard> {
        Arc::clone(&self.board)
    }

    /// The part is made, and this drives it.
    pub(crate) fn made(self, driver: &Arc<Driver>) -> InEpoch {
        self.driver.get_or_init(|| Arc::downgrade(driver));
        self.place
    }
}
