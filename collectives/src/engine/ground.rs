//! What a run stands on, and how it looks at what came.

use pleach_transport::{Device, Nanos, RemoteSlice, Signals, Slice};
use pleach_vocabulary::Rank;

use super::credit::Credits;
use super::header::Header;
use super::stream::Stream;
use crate::compute::Compute;

/// Told what a rank acts on; for checkers.
pub trait Witness: Send {
    /// The rank goes on because the signal slot that it keeps for `from` counts `count`.
    fn consumed(&mut self, from: Rank, signal_slot: u16, count: u64);

    /// So many runs of a sequence (the group's collectives, the messages from one rank to another)
    /// are complete here, from the first one on without a gap; peers may be told from now on.
    fn completed(&mut self, sequence: u64, runs: u64);

    /// The rank has written to a peer's memory through a mapping, other than by its processor
    /// ([`Compute`]).
    fn wrote(&mut self, address: *const u8, len: usize);

    /// The rank knows, otherwise than by a signal that it waited for, that `from` has completed so
    /// many runs of a sequence.
    fn heard_completed(&mut self, from: Rank, sequence: u64, runs: u64);

    /// Appends the signal slots of the rank in which something has come since this was asked last,
    /// each with the peer that it is kept for, and says whether all are named: then lanes that wait
    /// for others need not be looked at.
    fn take_signalled(&mut self, signal_slots: &mut Vec<(Rank, u16)>) -> bool;
}

/// What a run stands on; owned by the engine.
pub(super) struct Ground<'a> {
    pub(super) device: &'a mut dyn Device,
    pub(super) compute: &'a mut dyn Compute,
    /// By rank; empty for this rank.
    pub(super) signal_slots: &'a [Signals],
    /// By rank and signal slot: how many signals were consumed.
    pub(super) consumed: &'a mut [Vec<u64>],
    pub(super) credits: &'a mut Credits,
    pub(super) scratch: &'a Slice,
    /// By rank.
    pub(super) peer_scratch: &'a [RemoteSlice],
    /// How many runs this rank has completed.
    pub(super) completed: u64,
    pub(super) witness: Option<&'a mut (dyn Witness + 'static)>,
    /// A signal slot of this rank that a wait found as it was.
    pub(super) blocked: &'a mut Option<Blocked>,
    /// Every signal that comes is told by [`Run::stir`](super::run::Run::stir), so that signal
    /// slots need not be looked at.
    pub(super) hears_all: bool,
    pub(super) now: Nanos,
    /// How long this rank has been in the call, in nanoseconds; zero where nobody has looked at the
    /// clock.
    pub(super) elapsed_ns: u64,
}

impl Ground<'_> {
    /// Whether the signal slot's next signal has come; remembers that it is waited for where it has
    /// not.
    pub(super) fn has_come(&mut self, from: Rank, signal_slot: u16) -> bool {
        let count = self.consumed[from as usize][usize::from(signal_slot)];
        let has_come = self.signal_slots[from as usize].count(signal_slot) != count;
        if !has_come {
            *self.blocked = Some(Blocked { from, signal_slot, count });
        }
        has_come
    }

    /// Whether the peer is known to have completed so many runs of the stream; remembers that its
    /// next credit is waited for where it is not.
    #[inline]
    pub(super) fn has_completed(&mut self, peer: Rank, stream: Stream, runs: u64) -> bool {
        self.credits.of(peer, stream) >= runs || self.look_for_credit(peer, stream, runs)
    }

    fn look_for_credit(&mut self, peer: Rank, stream: Stream, runs: u64) -> bool {
        let signal_slots = &self.signal_slots[peer as usize];
        let found = self.credits.look(peer, stream, runs, signal_slots, self.witness.as_deref_mut());
        if let Err((signal_slot, count)) = found {
            *self.blocked = Some(Blocked { from: peer, signal_slot, count });
        }
        found.is_ok()
    }

    /// The run goes on because of that signal, whose header was found to be that of the call.
    pub(super) fn consume(&mut self, from: Rank, signal_slot: u16, header: &Header, stream: Stream) {
        let consumed = &mut self.consumed[from as usize][usize::from(signal_slot)];
        *consumed += 1;
        if let Some(witness) = &mut self.witness {
            witness.consumed(from, signal_slot, *consumed);
        }
        self.credits.hear(from, stream, header.completed());
    }
}

/// A signal slot whose next signal some run waits for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocked {
    pub(super) from: Rank,
    pub(super) signal_slot: u16,
    /// What it counts as long as nothing has come.
    pub(super) count: u64,
}
