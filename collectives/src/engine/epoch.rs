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

use std::sync::{Arc, OnceLock};

use pleach_transport::{Device, PostError, Slice};
use pleach_vocabulary::Rank;

use super::fault::{Fault, FaultKind};
use super::{Engine, ScratchLayout, StatusBoard};
use crate::compute::Compute;

/// How the epoch of an engine ends; shared by the session, the engine and its status board.
pub(crate) struct EpochEnd {
    /// Is told of the engine's faults, on the thread that finds them. Never blocks.
    found: Box<dyn Fn(&Fault) + Send + Sync>,
    over: OnceLock<Fault>,
}

impl EpochEnd {
    /// `found` is told of faults, and never blocks.
    pub(crate) fn new(found: impl Fn(&Fault) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { found: Box::new(found), over: OnceLock::new() })
    }

    /// Tells the session of a fault of this engine.
    pub(crate) fn found(&self, fault: &Fault) {
        (self.found)(fault);
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
