//! The engine of a group that lasts for one epoch of a session.
//!
//! In a session the ranks do not agree on a fault among themselves: the members agree on the next
//! epoch, and its record is the verdict. So an engine of an epoch stops at the first fault, tells
//! it to the session ([`EpochEnd::found`]) and waits for the end of the epoch ([`EpochEnd::over`]),
//! which comes in any case. Then it severs its peers as any engine does. Its device answers when
//! the pair is drained, or severed where the peer is out.
//!
//! **Invariant:** nothing of another epoch counts here. Signals that came before are behind this
//! engine ([`PeerSignals::begin_behind_former`](super::signals::PeerSignals::begin_behind_former)):
//! the pairs were drained, and no peer begins a run before it has heard where this rank's scratch
//! is. Signatures are seeded with the epoch's digest besides.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::{Device, Nanos, PostError, Slice};
use pleach_vocabulary::Rank;

use super::fault::{Fault, FaultKind};
use super::{Engine, ScratchLayout, StatusBoard};
use crate::compute::Compute;

/// How the epoch of an engine ends; shared by the session, the engine and its status board.
pub(crate) struct EpochEnd {
    /// Is told of the engine's faults, on the thread that finds them. Never blocks.
    found: Box<dyn Fn(&Fault) + Send + Sync>,
    over: OnceLock<Fault>,
    /// Of a part of the epoch's group: for so long a peer that has ended its pairs there is no
    /// fault.
    patience: Option<Duration>,
    /// Such a fault that was not told.
    untold: Mutex<Option<Untold>>,
}

/// A fault that is told if the epoch does not end.
struct Untold {
    fault: Fault,
    /// Since when the engine has waited.
    since: Option<Nanos>,
}

impl EpochEnd {
    /// `found` is told of faults, and never blocks.
    pub(crate) fn new(found: impl Fn(&Fault) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::told(Box::new(found), None))
    }

    /// The same for a part of the epoch's group, with devices of its own. A member that hears of
    /// the next epoch first severs its peers there, and one that could not make the part leaves it:
    /// both live. That a member has ended, the session finds itself. So what a peer does that ends
    /// its pairs is told only when an engine that is used has waited so long.
    pub(crate) fn of_part(patience: Duration, found: impl Fn(&Fault) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self::told(Box::new(found), Some(patience)))
    }

    fn told(found: Box<dyn Fn(&Fault) + Send + Sync>, patience: Option<Duration>) -> Self {
        Self { found, over: OnceLock::new(), patience, untold: Mutex::default() }
    }

    /// Tells the session of a fault of this engine.
    pub(crate) fn found(&self, fault: &Fault) {
        let may_be_echo = matches!(fault.kind, FaultKind::Lost | FaultKind::Left | FaultKind::Protocol);
        if self.patience.is_some() && may_be_echo {
            lock(&self.untold).get_or_insert_with(|| Untold { fault: fault.clone(), since: None });
        } else {
            (self.found)(fault);
        }
    }

    /// The engine waits for the end.
    pub(crate) fn await_over(&self, now: Nanos) {
        let Some(patience) = self.patience else { return };
        let mut untold = lock(&self.untold);
        let is_due = |untold: &mut Untold| now.since(*untold.since.get_or_insert(now)) >= patience;
        if let Some(Untold { fault, .. }) = untold.take_if(is_due) {
            drop(untold);
            (self.found)(&fault);
        }
    }

    /// The end, once there is one.
    pub(crate) fn over(&self) -> Option<&Fault> {
        self.over.get()
    }
}

impl StatusBoard {
    /// The epoch is over, for a cause in words. The caller wakes the device.
    pub(crate) fn end_epoch(&self, subject: Rank, cause: String) {
        if let Some(end) = self.epoch_end()
            && end.over.set(self.fault(FaultKind::Changed, subject, cause)).is_ok()
        {
            self.set_unread();
        }
    }
}

/// What an epoch's engine has from the session.
pub(crate) struct Carried {
    /// Registered for all epochs, long enough for the largest.
    pub(crate) scratch: Slice,
    /// Of the digest of the epoch's record.
    pub(crate) seed: u64,
    /// By rank, where signals of former epochs may have come: in the signal slots below this one,
    /// or in any (`None`). Empty: none have come.
    pub(crate) former: Vec<Option<u16>>,
}

impl Engine {
    /// The engine of an epoch, over a device whose responder is `board`. Tells the peers where this
    /// rank's scratch is.
    pub(crate) fn of_epoch(
        device: Box<dyn Device>,
        compute: Box<dyn Compute>,
        board: Arc<StatusBoard>,
        layout: ScratchLayout,
        carried: &Carried,
    ) -> Result<Self, PostError> {
        let bytes = layout.bytes() as usize;
        let scratch = carried.scratch.slice(0..bytes).expect("it is long enough for the largest epoch");
        let mut engine = Self::with_scratch(device, compute, board, layout, scratch, Vec::new());
        engine.admission.seed(carried.seed);
        engine.context.signals.begin_behind_former(&carried.former);
        for peer in engine.context.peers() {
            engine.context.announce_scratch(peer)?;
            engine.connected(peer);
        }
        Ok(engine)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn a_peer_that_ends_its_pairs_in_a_part_is_a_fault_only_when_the_epoch_goes_on() {
        let told = Arc::new(AtomicU32::new(0));
        let counts = || {
            let told = Arc::clone(&told);
            // Relaxed: one thread.
            move |_: &Fault| {
                told.fetch_add(1, Ordering::Relaxed);
            }
        };
        let patience = Duration::from_secs(2);
        let whole = EpochEnd::new(counts());
        let part = EpochEnd::of_part(patience, counts());
        let of = |kind| StatusBoard::new(0).fault(kind, 1, String::new());
        let counted = || told.swap(0, Ordering::Relaxed);
        for kind in [FaultKind::Lost, FaultKind::Left, FaultKind::Protocol, FaultKind::TimedOut] {
            whole.found(&of(kind));
            assert_eq!(counted(), 1, "{kind:?}");
        }
        part.found(&of(FaultKind::TimedOut));
        part.found(&of(FaultKind::Mismatch));
        assert_eq!(counted(), 2, "these are told at once");
        let now = Nanos(7);
        part.await_over(now);
        part.found(&of(FaultKind::Lost));
        part.found(&of(FaultKind::Left));
        for (after, times) in [(0, 0), (1, 0), (2, 1), (3, 0)] {
            part.await_over(now + Duration::from_secs(60 + after));
            assert_eq!(counted(), times, "{after} s after the engine has begun to wait");
        }
    }
}
