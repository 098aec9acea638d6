//! How far peers are, as far as this rank was told: who may be written to.
//!
//! Each sequence of runs is counted for itself: the group's collectives, which all ranks make, and
//! the messages that this rank sends to each peer. A peer's count comes with its signals, in a
//! signal slot of its own (each sequence has one), and with its answers. **Invariant:** a count is
//! never more than the peer has completed, without a gap.

use pleach_transport::{Inline, Rank, Signal, Signals};

use super::Engine;
use super::at::NOBODY;
use super::bank;
use super::ground::Witness;
use super::stream::Stream;

/// The signal slots in which peers tell how many runs they have completed, when nothing else tells
/// it.
const COLLECTIVES_SIGNAL_SLOT: u16 = 0;
const MESSAGES_SIGNAL_SLOT: u16 = 1;
const _: () = assert!((MESSAGES_SIGNAL_SLOT as u32) < bank::FIRST_SIGNAL_SLOT);

fn signal_slot(stream: Stream) -> u16 {
    match stream {
        Stream::Collectives => COLLECTIVES_SIGNAL_SLOT,
        Stream::Messages { .. } => MESSAGES_SIGNAL_SLOT,
    }
}

/// By rank: how many runs it has completed, as last heard.
#[derive(Debug)]
pub(super) struct Credits {
    collectives: Vec<u64>,
    /// Of the messages that this rank sends to it.
    messages: Vec<u64>,
}

impl Credits {
    pub(super) fn new(ranks: u32) -> Self {
        Self { collectives: vec![0; ranks as usize], messages: vec![0; ranks as usize] }
    }

    /// How many runs of the stream the peer has completed at least; the messages of a stream are
    /// those sent to the peer.
    pub(super) fn of(&self, peer: Rank, stream: Stream) -> u64 {
        match stream {
            Stream::Collectives => self.collectives[peer as usize],
            Stream::Messages { .. } => self.messages[peer as usize],
        }
    }

    /// The peer says that it has completed so many runs of the stream.
    pub(super) fn hear(&mut self, peer: Rank, stream: Stream, completed: u64) {
        let credits = match stream {
            Stream::Collectives => &mut self.collectives,
            Stream::Messages { to, .. } if to == peer => &mut self.messages,
            // It sends them; how far it is tells this rank nothing.
            Stream::Messages { .. } => return,
        };
        if let Some(credit) = credits.get_mut(peer as usize) {
            *credit = (*credit).max(completed);
        }
    }

    /// What the peer has told last in its signal slot, for which the signal slot's count is
    /// returned where it is not enough.
    pub(super) fn look(
        &mut self,
        peer: Rank,
        stream: Stream,
        runs: u64,
        signal_slots: &Signals,
        witness: Option<&mut (dyn Witness + 'static)>,
    ) -> Result<(), (u16, u64)> {
        let signal_slot = signal_slot(stream);
        let count = signal_slots.count(signal_slot);
        if count > 0 {
            let payload = signal_slots.payload(signal_slot);
            // One word, stored at once: the newest credit or the one before it, both true.
            let told = u64::from_le_bytes(payload[..8].try_into().expect("8 bytes"));
            self.hear(peer, stream, told);
            if let Some(witness) = witness {
                witness.heard_completed(peer, stream.to_word(), told);
            }
        }
        if self.of(peer, stream) >= runs { Ok(()) } else { Err((signal_slot, count)) }
    }
}

impl Engine {
    /// Tells peers how many runs of a stream are complete here.
    pub(super) fn tell_progress(&mut self, stream: Stream, peers: &[Rank], completed: u64) {
        if let Some(witness) = &mut self.witness {
            witness.completed(stream.to_word(), completed);
        }
        for peer in peers {
            let payload = Inline::new(&completed.to_le_bytes()).expect("8 bytes fit");
            let signal = Signal { signal_slot: signal_slot(stream), payload };
            // Lost, left or full: then the peer asks when it needs to know.
            let _ = self.device.signal(*peer, &signal, NOBODY);
        }
    }

    /// A message has ended here: who receives it says so now and then.
    pub(super) fn note_completed_message(&mut self, stream: Stream, number: u64) {
        let Stream::Messages { from, to } = stream else { return };
        if self.rank != to {
            return;
        }
        let completed = number + 1;
        self.journal.messages(from, to).complete(completed);
        let told: &[Rank] = if bank::message_credit_is_due(number) { &[from] } else { &[] };
        self.tell_progress(stream, told, completed);
    }
}
