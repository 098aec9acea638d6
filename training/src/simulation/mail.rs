//! What simulated ranks write and tell each other, from its sender to its receiver.
//!
//! A rank sends in its order. A write waits for a credit, and what comes after it waits with it.
//! What has come is kept until the rank hears of it.
//!
//! **Invariant:** of the writes of a rank to a peer there are never more than there are slots that
//! the peer has not heard of.
//!
//! A message goes to any rank, whose vectors and policy are in no cache then. So what messages
//! touch lies together here, in little memory.

use std::collections::VecDeque;
use std::ops::{Deref, Range};
use std::sync::Arc;

use pleach_collectives::Rank;

use crate::policy::OperationId;

/// Bytes of a word.
const WORD_BYTES: u64 = 8;

/// Most elements that are gathered: they stay in the nearest cache.
const GATHERED_MAX: usize = 4096;

/// A write or a word on its way.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) from: Rank,
    pub(crate) word: u64,
    /// None: a word alone.
    pub(crate) elements: Option<Elements>,
}

impl Message {
    /// The bytes of the elements.
    pub(crate) fn element_bytes(&self) -> u64 {
        self.elements.as_ref().map_or(0, |elements| size_of_val(&elements[..]) as u64)
    }
}

/// The elements of a write: a part of a copy that several writes share.
#[derive(Clone, Debug)]
pub(crate) struct Elements {
    copy: Arc<[f32]>,
    part: Range<usize>,
}

impl Elements {
    pub(crate) fn whole(copy: Arc<[f32]>) -> Self {
        Self { part: 0..copy.len(), copy }
    }

    pub(crate) fn part(copy: Arc<[f32]>, part: Range<usize>) -> Self {
        Self { copy, part }
    }
}

impl Deref for Elements {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.copy[self.part.clone()]
    }
}

/// A write or a word that a rank has to send.
#[derive(Debug)]
struct Outgoing {
    to: Rank,
    /// None: a word.
    write: Option<OperationId>,
    message: Message,
}

/// What a rank sends: the write that is done by it, the receiver, the bytes, and the message.
pub(crate) type Sent = (Option<OperationId>, Rank, u64, Message);

/// What a rank has to send, and what has come to it.
#[derive(Debug, Default)]
struct MailBox {
    outgoing: VecDeque<Outgoing>,
    inbox: VecDeque<Message>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Mail {
    /// Most writes of a rank to a peer that the peer has not heard of.
    slots: u16,
    /// By rank.
    boxes: Vec<MailBox>,
    /// By receiver and then by writer: writes that the receiver has not heard of.
    unheard: Vec<u16>,
    /// Elements of messages that a rank hears of, and how many of them it has.
    gathered: Vec<f32>,
    taken: usize,
}

impl Mail {
    /// Of so many ranks; those that write have slots.
    pub(crate) fn new(ranks: usize, slots: u16) -> Self {
        let pairs = if slots > 0 { ranks * ranks } else { 0 };
        let boxes = (0..ranks).map(|_| MailBox::default()).collect();
        Self { slots, boxes, unheard: vec![0; pairs], gathered: Vec::new(), taken: 0 }
    }

    fn unheard(&self, from: Rank, to: Rank) -> usize {
        to as usize * self.boxes.len() + from as usize
    }

    /// Whether a write would be sent at once.
    pub(crate) fn has_credit(&self, from: Rank, to: Rank) -> bool {
        !self.has_outgoing(from) && self.unheard[self.unheard(from, to)] < self.slots
    }

    /// Takes a write that a rank is to send after everything before.
    pub(crate) fn write(&mut self, [from, to]: [Rank; 2], id: OperationId, word: u64, elements: Elements) {
        let message = Message { from, word, elements: Some(elements) };
        self.boxes[from as usize].outgoing.push_back(Outgoing { to, write: Some(id), message });
    }

    /// Takes a word that a rank is to send after everything before.
    pub(crate) fn tell(&mut self, [from, to]: [Rank; 2], word: u64) {
        let message = Message { from, word, elements: None };
        self.boxes[from as usize].outgoing.push_back(Outgoing { to, write: None, message });
    }

    /// Whether a rank has anything to send.
    pub(crate) fn has_outgoing(&self, from: Rank) -> bool {
        !self.boxes[from as usize].outgoing.is_empty()
    }

    /// The peer for whose credit a rank waits.
    pub(crate) fn awaits(&self, from: Rank) -> Option<Rank> {
        self.boxes[from as usize].outgoing.front().map(|outgoing| outgoing.to)
    }

    /// Takes out what a rank sends next, if it has a credit for that.
    pub(crate) fn next_sent(&mut self, from: Rank) -> Option<Sent> {
        let outgoing = self.boxes[from as usize].outgoing.front()?;
        if outgoing.write.is_some() {
            let place = self.unheard(from, outgoing.to);
            if self.unheard[place] >= self.slots {
                return None;
            }
            self.unheard[place] += 1;
        }
        let Outgoing { to, write, message } = self.boxes[from as usize].outgoing.pop_front()?;
        Some((write, to, message.element_bytes() + WORD_BYTES, message))
    }

    /// A message is at its receiver.
    pub(crate) fn come(&mut self, to: Rank, message: Message) {
        self.boxes[to as usize].inbox.push_back(message);
    }

    /// Copies the elements of messages that a rank is to hear of side by side, in their order.
    ///
    /// Those of many short messages lie wherever their writers were. A loop that copies them all
    /// fetches several at once. Fetched one by one, when each is heard of, they took a tenth of
    /// the time of `easgd` beside its gradients.
    pub(crate) fn gather(&mut self, rank: Rank) {
        self.gathered.clear();
        self.taken = 0;
        for elements in self.boxes[rank as usize].inbox.iter().filter_map(|it| it.elements.as_ref()) {
            if self.gathered.len() + elements.len() > GATHERED_MAX {
                return;
            }
            self.gathered.extend_from_slice(elements);
        }
    }

    /// The elements of the next write that was gathered; these ones, if it was not.
    pub(crate) fn gathered<'a>(&'a mut self, elements: &'a [f32]) -> &'a [f32] {
        let begin = self.taken;
        self.taken += elements.len();
        self.gathered.get(begin..self.taken).unwrap_or(elements)
    }

    /// Takes out the next message that a rank has not heard of.
    pub(crate) fn hear(&mut self, rank: Rank) -> Option<Message> {
        self.boxes[rank as usize].inbox.pop_front()
    }

    /// A rank has heard of a write, whose writer has its credit back.
    pub(crate) fn give_credit(&mut self, writer: Rank, receiver: Rank) {
        let place = self.unheard(writer, receiver);
        self.unheard[place] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elements(length: usize, number: u64) -> Elements {
        Elements::whole(Arc::from(vec![number as f32; length]))
    }

    #[test]
    fn a_write_waits_for_its_credit_and_what_follows_waits_with_it() {
        let mut mail = Mail::new(3, 2);
        (0..3).for_each(|number| mail.write([0, 1], OperationId(number), number, elements(3, number)));
        mail.tell([0, 2], 3);
        let sent = |mail: &mut Mail| {
            let sent = std::iter::from_fn(|| mail.next_sent(0));
            sent.map(|(.., bytes, message)| (message.word, bytes)).collect::<Vec<_>>()
        };
        assert_eq!(sent(&mut mail), [(0, 20), (1, 20)], "elements and a word");
        assert_eq!((mail.awaits(0), mail.has_credit(0, 2)), (Some(1), false));
        assert!(mail.has_credit(1, 0) && mail.has_credit(2, 1), "credits are those of a pair, one way");
        mail.give_credit(0, 1);
        assert_eq!(sent(&mut mail), [(2, 20), (3, 8)]);
        assert_eq!((mail.awaits(0), mail.has_outgoing(0)), (None, false));
        assert!(mail.has_credit(0, 2) && !mail.has_credit(0, 1));
    }

    #[test]
    fn what_has_come_is_heard_of_in_its_order_whether_it_was_gathered_or_not() {
        let copy: Arc<[f32]> = Arc::from([1.0, 2.0, 3.0]);
        let mut expected = vec![Elements::part(copy, 1..3), elements(1, 4)];
        expected.extend([elements(GATHERED_MAX, 5), elements(1, 6)]);
        let mut mail = Mail::new(2, 4);
        for elements in &expected {
            mail.come(1, Message { from: 0, word: 1, elements: Some(elements.clone()) });
            mail.come(1, Message { from: 0, word: 2, elements: None });
        }
        mail.gather(1);
        assert_eq!(mail.gathered, [2.0, 3.0, 4.0], "as much as there is room for");
        mail.come(1, Message { from: 0, word: 1, elements: Some(elements(2, 7)) });
        expected.push(elements(2, 7));
        let mut heard = Vec::new();
        while let Some(message) = mail.hear(1) {
            heard.extend(message.elements.map(|elements| mail.gathered(&elements).to_vec()));
        }
        assert!(heard.iter().map(|elements| &elements[..]).eq(expected.iter().map(|elements| &elements[..])));
    }
}
