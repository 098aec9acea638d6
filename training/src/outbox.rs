//! The reads, writes and words that a rank has asked for and not carried out, and their order.
//!
//! Messages to one peer go in the order in which the policy asked for them. A message that waits
//! for a credit holds up no read and no message to another peer. Writes to a peer take its slots in
//! turn, and words have a slot of their own, the last one.
//!
//! **Invariant:** ranks of a group and simulated ranks over engines have this one order. So a
//! simulation says what real ranks would do.

use std::collections::VecDeque;

use pleach_collectives::Rank;

use crate::interpreter::Request;

/// See the module.
#[derive(Debug)]
pub(crate) struct Outbox {
    asked: VecDeque<Request>,
    /// By peer: writes so far, which take the slots in turn.
    written: Vec<u64>,
    /// Peers to whom a message waits for a credit; of one look at all that is asked for.
    held_up: Vec<Rank>,
}

/// The peer of a message.
fn peer_of(request: &Request) -> Option<Rank> {
    match request {
        Request::Write { to, .. } | Request::Tell { to, .. } => Some(*to),
        _ => None,
    }
}

impl Outbox {
    /// Of a rank among so many.
    pub(crate) fn new(ranks: usize) -> Self {
        Self { asked: VecDeque::new(), written: vec![0; ranks], held_up: Vec::new() }
    }

    /// Takes a request, to be carried out after those before.
    pub(crate) fn ask(&mut self, request: Request) {
        self.asked.push_back(request);
    }

    /// Forgets all that was asked for.
    pub(crate) fn clear(&mut self) {
        self.asked.clear();
    }

    /// Whether all was carried out.
    pub(crate) fn is_empty(&self) -> bool {
        self.asked.is_empty()
    }

    /// The oldest request.
    pub(crate) fn first(&self) -> Option<&Request> {
        self.asked.front()
    }

    /// The peers of all messages, oldest first.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Rank> {
        self.asked.iter().filter_map(peer_of)
    }

    /// The slot of the next write to a peer.
    pub(crate) fn next_slot(&self, to: Rank, words_slot: u16) -> u16 {
        (self.written[to as usize] % u64::from(words_slot)) as u16
    }

    /// The place of the next request that has to wait for no credit, and the slot of a message. A
    /// write without a slot is refused: it does not wait, and there is no credit.
    ///
    /// # Errors
    ///
    /// Those of `is_free`, which says whether a slot at a peer is free.
    pub(crate) fn next<E>(
        &mut self,
        words_slot: u16,
        mut is_free: impl FnMut(Rank, u16) -> Result<bool, E>,
    ) -> Result<Option<(usize, Option<u16>)>, E> {
        self.held_up.clear();
        for (place, request) in self.asked.iter().enumerate() {
            let (to, slot, waits) = match request {
                Request::Write { to, waits, .. } => (*to, self.next_slot(*to, words_slot), *waits),
                Request::Tell { to, .. } => (*to, words_slot, true),
                _ => return Ok(Some((place, None))),
            };
            if !self.held_up.contains(&to) && is_free(to, slot)? {
                return Ok(Some((place, Some(slot))));
            }
            if !waits {
                return Ok(Some((place, None)));
            }
            self.held_up.push(to);
        }
        Ok(None)
    }

    /// Takes the request at a place out, to carry it out.
    pub(crate) fn take(&mut self, place: usize) -> Request {
        self.asked.remove(place).expect("it was found there")
    }

    /// Puts a request back to its place: it cannot be carried out now.
    pub(crate) fn put_back(&mut self, place: usize, request: Request) {
        self.asked.insert(place, request);
    }

    /// A write to a peer was carried out.
    pub(crate) fn wrote(&mut self, to: Rank) {
        self.written[to as usize] += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::policy::{OperationIds, Reads, Vector};

    const WORDS_SLOT: u16 = 2;

    /// What is next where these slots are free: the place, and the slot.
    fn next(outbox: &mut Outbox, free: &[(Rank, u16)]) -> Option<(usize, Option<u16>)> {
        let is_free = |to, slot| Ok::<_, Infallible>(free.contains(&(to, slot)));
        outbox.next(WORDS_SLOT, is_free).expect("cannot fail")
    }

    #[test]
    fn a_message_that_waits_holds_up_those_to_its_peer_alone_and_one_that_does_not_is_refused() {
        let mut ids = OperationIds::default();
        let mut write = |to, waits| {
            let (id, from, piece, word) = (ids.take(), Vector::Delta, 0..1, 0);
            Request::Write { id, to, from, piece, word, waits }
        };
        let mut outbox = Outbox::new(4);
        outbox.ask(Request::Tell { to: 1, word: 0 });
        outbox.ask(write(1, true));
        outbox.ask(write(2, true));
        // The word waits, and so does the write behind it, though its slot is free.
        assert_eq!(next(&mut outbox, &[(1, 0), (2, 0)]), Some((2, Some(0))));
        assert_eq!(next(&mut outbox, &[(1, 0)]), None);
        assert_eq!(next(&mut outbox, &[(1, WORDS_SLOT)]), Some((0, Some(WORDS_SLOT))));
        let id = ids.take();
        outbox.ask(Request::Read { id, from: 1, into: Vector::Centre, piece: 0..1, reads: Reads::Torn });
        assert_eq!(next(&mut outbox, &[]), Some((3, None)), "a read waits for no credit");
        let mut outbox = Outbox::new(4);
        let mut write = |to, waits| {
            let (id, from, piece, word) = (ids.take(), Vector::Delta, 0..1, 0);
            Request::Write { id, to, from, piece, word, waits }
        };
        outbox.ask(write(3, true));
        outbox.ask(write(3, false));
        assert_eq!(next(&mut outbox, &[]), Some((1, None)), "refused");
        assert_eq!(next(&mut outbox, &[(3, 0)]), Some((0, Some(0))));
        outbox.wrote(3);
        assert_eq!([3, 1].map(|to| outbox.next_slot(to, WORDS_SLOT)), [1, 0], "in turn");
        outbox.wrote(3);
        assert_eq!(outbox.next_slot(3, WORDS_SLOT), 0);
    }
}
