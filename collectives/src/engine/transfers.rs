//! Transfers and signals that belong to no run: those of one-sided memory ([`crate::window`]).
//!
//! **Invariant:** a transfer has a number that its owner chose, and the number comes back once,
//! when the transfer has ended well. A transfer that fails ends the group.

use pleach_transport::{Nanos, Signal, Signals, SubmitError, Submitted, Transfer, TransferId};
use pleach_vocabulary::Rank;

use super::fault::FaultKind;
use super::run::StepError;
use super::{Engine, NO_TRANSFER, RUNS_MAX};

/// The slot of no run.
const NO_RUN: u8 = RUNS_MAX as u8;

/// The id of a transfer that belongs to no run.
fn id_of(number: u64) -> TransferId {
    TransferId(number << u8::BITS | u64::from(NO_RUN))
}

/// The opposite of [`id_of`]; `None`: the transfer belongs to a run.
#[inline]
fn number_of(id: TransferId) -> Option<u64> {
    (id.0 as u8 == NO_RUN).then_some(id.0 >> u8::BITS)
}

impl Engine {
    /// Starts a transfer. False: try again, as there is no room for it now, or the group is
    /// failing.
    pub(crate) fn submit(&mut self, peer: Rank, transfer: Transfer, number: u64, now: Nanos) -> bool {
        debug_assert!(id_of(number) != NO_TRANSFER && number >> (u64::BITS - u8::BITS) == 0);
        if !self.works() {
            return false;
        }
        let submitted = self.context.device.submit(peer, transfer, id_of(number));
        if let Ok(Submitted::Ended(_)) = &submitted {
            self.ended_transfers.push(number);
        }
        self.is_accepted(peer, submitted, now)
    }

    /// Signals a peer. False: as in [`Engine::submit`].
    pub(crate) fn signal(&mut self, peer: Rank, signal: &Signal, now: Nanos) -> bool {
        if !self.works() {
            return false;
        }
        let submitted = self.context.device.signal(peer, signal, NO_TRANSFER);
        self.is_accepted(peer, submitted, now)
    }

    fn is_accepted(&mut self, peer: Rank, submitted: Result<Submitted, SubmitError>, now: Nanos) -> bool {
        match submitted {
            Ok(_) => true,
            Err(SubmitError::QueueFull { .. } | SubmitError::NotConnected { .. }) => false,
            Err(error) => {
                let fault = self.fault_of_step(NO_RUN, &StepError::Submit { peer, error }, now);
                self.fail(fault, now);
                false
            }
        }
    }

    /// Takes the numbers of the transfers that have ended well since the last call.
    pub(crate) fn take_ended_transfers(&mut self, into: &mut Vec<u64>) {
        into.append(&mut self.ended_transfers);
    }

    /// Whether such transfers have ended since then.
    pub(crate) fn has_ended_transfers(&self) -> bool {
        !self.ended_transfers.is_empty()
    }

    /// Notes the end of a transfer, if it belongs to no run.
    #[inline]
    pub(crate) fn note_ended_transfer(&mut self, id: TransferId) {
        self.ended_transfers.extend(number_of(id));
    }

    /// The signal slots of this rank for a peer.
    pub(crate) fn signals_of(&self, peer: Rank) -> Signals {
        self.context.device.signal_slots(peer)
    }

    /// Ends the group if this peer has left it. `detail`: what is still needed of the peer.
    pub(crate) fn expect_present(&mut self, peer: Rank, detail: &str, now: Nanos) {
        if self.works() && self.queries.has_departed(peer) {
            self.give_up_on(FaultKind::Left, peer, detail.to_owned(), std::time::Duration::ZERO, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::StepAddress;

    #[test]
    fn a_transfer_of_a_run_has_no_number_and_others_have_their_own() {
        for number in [0, 1, 77, (1 << 56) - 2] {
            assert_eq!(number_of(id_of(number)), Some(number));
            assert_ne!(id_of(number), NO_TRANSFER);
        }
        let step = StepAddress { lane: (1 << 24) - 1, slot: 255, step: (1 << 24) - 1 };
        for run in 0..NO_RUN {
            assert_eq!(number_of(step.id(run)), None);
        }
    }
}
