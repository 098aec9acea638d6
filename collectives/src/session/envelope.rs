//! What members of a session send over the control streams of their devices.
//!
//! A message of the engine of an epoch carries the number of the epoch. A message about membership
//! may be longer than a control message: it goes in parts, one behind the other. Bytes of a peer
//! are hostile until decoded: a peer makes this rank hold one message that is not whole, of bounded
//! length.

use pleach_membership::Message;
use pleach_membership::message::MESSAGE_BYTES_MAX;
use pleach_transport::Incarnation;
use pleach_transport::rendezvous::KEY_BYTES_MAX;
use pleach_transport::wire::{Reader, Writer};
use pleach_transport::witness::WordPlace;

use super::heal::Said;
use super::roster::Neighbour;
use super::shared_device::Messages;

/// Bytes of a part. A control message has room for a few words more.
const PART_BYTES: usize = 3 << 10;
const _: () = assert!(PART_BYTES + 64 <= pleach_transport::MESSAGE_BYTES_MAX);

const ENGINE: u8 = 1;
const PART: u8 = 2;
const WORD: u8 = 3;
const END: u8 = 4;
const NEWCOMER: u8 = 5;
const SAID: u8 = 6;
const LEAVE: u8 = 7;
const MEETING: u8 = 8;

/// A control message of a session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Envelope<'a> {
    /// Of the engine of an epoch.
    Engine { epoch: u64, message: &'a [u8] },
    /// A part of a message about membership.
    Part { is_first: bool, is_last: bool, bytes: &'a [u8] },
    /// Where the last word of the sender is, which is this incarnation.
    Word(Incarnation, WordPlace),
    /// A process waits to join.
    Newcomer(Neighbour),
    /// About states, in an epoch.
    Said(u64, Said),
    /// A person asks the receiver, which is this incarnation, to leave.
    Leave(Incarnation),
    /// Where members make a part of the epoch's group: a value of the epoch's store.
    Meeting { epoch: u64, key: String, value: Vec<u8> },
    /// Of the epochs before this record: the sender has signalled in signal slots below this one,
    /// and has sent to the receiver, and received from it, so many messages.
    End { record: u64, below: u16, messages: Messages },
}

impl<'a> Envelope<'a> {
    /// `None`: no message of a session.
    pub(crate) fn open(message: &'a [u8]) -> Option<Self> {
        let mut reader = Reader::new(message);
        match reader.u8().ok()? {
            ENGINE => {
                Some(Self::Engine { epoch: reader.u64().ok()?, message: reader.rest(message.len()).ok()? })
            }
            PART => {
                let flags = reader.u8().ok().filter(|flags| *flags < 4)?;
                let bytes = reader.rest(PART_BYTES).ok()?;
                Some(Self::Part { is_first: flags & 1 == 1, is_last: flags & 2 == 2, bytes })
            }
            WORD => {
                let incarnation = Incarnation(reader.u64().ok()?);
                Some(Self::Word(incarnation, WordPlace::decode(reader.rest(message.len()).ok()?).ok()?))
            }
            SAID => {
                let (epoch, said) = (reader.u64().ok()?, Said::take(&mut reader).ok()?);
                reader.end().ok().map(|()| Self::Said(epoch, said))
            }
            LEAVE => {
                let incarnation = Incarnation(reader.u64().ok()?);
                reader.end().ok().map(|()| Self::Leave(incarnation))
            }
            NEWCOMER => {
                let neighbour = Neighbour::take(&mut reader).ok()?;
                reader.end().ok().map(|()| Self::Newcomer(neighbour))
            }
            MEETING => {
                let epoch = reader.u64().ok()?;
                let key = reader.text(KEY_BYTES_MAX).ok()?;
                let value = reader.rest(message.len()).ok()?.to_vec();
                Some(Self::Meeting { epoch, key, value })
            }
            END => {
                let (record, below) = (reader.u64().ok()?, reader.u16().ok()?);
                let messages = Messages::new(reader.u64().ok()?, reader.u64().ok()?);
                reader.end().ok().map(|()| Self::End { record, below, messages })
            }
            _ => None,
        }
    }
}

/// A message of the engine of an epoch.
pub(crate) fn of_engine(epoch: u64, message: &[u8]) -> Vec<u8> {
    Writer::default().u8(ENGINE).u64(epoch).raw(message).finish()
}

/// Where the last word of this process is.
pub(crate) fn of_word(own: Incarnation, place: &WordPlace) -> Vec<u8> {
    Writer::default().u8(WORD).u64(own.0).raw(&place.encode()).finish()
}

/// About states, in an epoch.
pub(crate) fn of_said(epoch: u64, said: Said) -> Vec<u8> {
    said.put(Writer::default().u8(SAID).u64(epoch)).finish()
}

/// A person asks the receiver, which is this incarnation, to leave.
pub(crate) fn of_leave(incarnation: Incarnation) -> Vec<u8> {
    Writer::default().u8(LEAVE).u64(incarnation.0).finish()
}

/// A process waits to join.
pub(crate) fn of_newcomer(neighbour: &Neighbour) -> Vec<u8> {
    neighbour.put(Writer::default().u8(NEWCOMER)).finish()
}

/// Of the epochs before a record: below which signal slot this process has signalled, and how many
/// messages it has sent to the receiver, and received from it.
pub(crate) fn of_end(record: u64, below: u16, messages: Messages) -> Vec<u8> {
    let writer = Writer::default().u8(END).u64(record).u16(below);
    writer.u64(messages.sent()).u64(messages.received()).finish()
}

/// A value of the store of an epoch; `None`: the key or both together have too many bytes.
pub(crate) fn of_meeting(epoch: u64, key: &str, value: &[u8]) -> Option<Vec<u8>> {
    if key.len() > KEY_BYTES_MAX {
        return None;
    }
    let message = Writer::default().u8(MEETING).u64(epoch).bytes(key.as_bytes()).raw(value).finish();
    (message.len() <= pleach_transport::MESSAGE_BYTES_MAX).then_some(message)
}

/// A message about membership, as control messages.
pub(crate) fn parts(message: &Message) -> Vec<Vec<u8>> {
    let bytes = message.encode();
    let count = bytes.len().div_ceil(PART_BYTES);
    let part = |(number, bytes): (usize, &[u8])| {
        let flags = u8::from(number == 0) | u8::from(number + 1 == count) << 1;
        Writer::default().u8(PART).u8(flags).raw(bytes).finish()
    };
    bytes.chunks(PART_BYTES).enumerate().map(part).collect()
}

/// Puts the parts of one peer's messages together.
#[derive(Debug, Default)]
pub(crate) struct Assembly(Vec<u8>);

impl Assembly {
    /// Takes in the next part; the message, where it is whole and is one.
    pub(crate) fn add(&mut self, is_first: bool, is_last: bool, bytes: &[u8]) -> Option<Message> {
        if is_first {
            self.0.clear();
        } else if self.0.is_empty() {
            return None; // Its beginning was too long, or never came.
        }
        self.0.extend_from_slice(bytes);
        if self.0.len() > MESSAGE_BYTES_MAX {
            self.0 = Vec::new();
            return None;
        }
        if !is_last {
            return None;
        }
        let message = Message::decode(&self.0).ok();
        self.0.clear();
        message
    }
}

/// Opens bytes as a message, and what opens once more: for fuzzing.
pub(crate) fn check_decoder(bytes: &[u8]) {
    let Some(envelope) = Envelope::open(bytes) else { return };
    let again = match &envelope {
        Envelope::Engine { epoch, message } => of_engine(*epoch, message),
        Envelope::Part { is_first, is_last, bytes } => {
            let mut assembly = Assembly::default();
            assembly.add(true, false, bytes);
            assembly.add(*is_first, *is_last, bytes);
            return;
        }
        Envelope::Word(own, place) => of_word(*own, place),
        Envelope::Newcomer(neighbour) => of_newcomer(neighbour),
        Envelope::Said(epoch, said) => of_said(*epoch, *said),
        Envelope::Leave(incarnation) => of_leave(*incarnation),
        Envelope::Meeting { epoch, key, value } => match of_meeting(*epoch, key, value) {
            Some(message) => message,
            None => return, // No control message is as long.
        },
        Envelope::End { record, below, messages } => of_end(*record, *below, *messages),
    };
    assert_eq!(Envelope::open(&again), Some(envelope));
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pleach_membership::{Process, Record};

    use super::*;

    fn long(members: u32) -> Message {
        let members = (0..members).map(|seat| Process::new(seat, 7)).collect();
        Message::Decided(Arc::new(Record::first(members).expect("has members")))
    }

    fn add(assembly: &mut Assembly, part: &[u8]) -> Option<Message> {
        match Envelope::open(part) {
            Some(Envelope::Part { is_first, is_last, bytes }) => assembly.add(is_first, is_last, bytes),
            other => panic!("{other:?} is no part"),
        }
    }

    #[test]
    fn messages_of_all_lengths_come_whole() {
        let mut assembly = Assembly::default();
        for message in [Message::Alive { asks: true }, long(3), long(151), long(4096)] {
            let parts = parts(&message);
            let fits = |part: &Vec<u8>| part.len() <= pleach_transport::MESSAGE_BYTES_MAX;
            assert!(parts.iter().all(fits), "{} parts", parts.len());
            let (last, before) = parts.split_last().expect("one part at least");
            assert!(before.iter().all(|part| add(&mut assembly, part).is_none()));
            assert_eq!(add(&mut assembly, last), Some(message));
        }
    }

    #[test]
    fn a_message_whose_part_is_missing_is_dropped_and_the_next_one_comes() {
        let mut assembly = Assembly::default();
        let parts = parts(&long(400));
        assert!(parts.len() > 2);
        assert_eq!(add(&mut assembly, &parts[1]), None, "it has no beginning");
        for (number, part) in parts.iter().enumerate().filter(|(number, _)| *number != 1) {
            assert_eq!(add(&mut assembly, part), None, "part {number}");
        }
        for part in &parts {
            let whole = add(&mut assembly, part);
            assert_eq!(whole.is_some(), part == parts.last().expect("there are some"));
        }
    }

    #[test]
    fn endless_parts_take_bounded_memory() {
        let mut assembly = Assembly::default();
        assert_eq!(assembly.add(true, false, &[9]), None);
        for _ in 0..2 * MESSAGE_BYTES_MAX / PART_BYTES {
            assert_eq!(assembly.add(false, false, &[0; PART_BYTES]), None);
            assert!(assembly.0.len() <= MESSAGE_BYTES_MAX);
        }
    }

    #[test]
    fn bytes_that_are_no_message_are_refused() {
        for bytes in [&[][..], &[0], &[ENGINE, 1, 2], &[PART], &[PART, 4], &[WORD, 1], &[END, 1], &[9, 9]] {
            assert_eq!(Envelope::open(bytes), None, "{bytes:?}");
        }
        let messages = Messages::new(3, 2);
        let end = of_end(7, 9, messages);
        assert_eq!(Envelope::open(&end), Some(Envelope::End { record: 7, below: 9, messages }));
        assert_eq!(Envelope::open(&of_leave(Incarnation(3))), Some(Envelope::Leave(Incarnation(3))));
        let message = of_meeting(7, "e7-s0-1/rank/0", &[9]).expect("is short");
        let (key, value) = ("e7-s0-1/rank/0".to_owned(), vec![9]);
        assert_eq!(Envelope::open(&message), Some(Envelope::Meeting { epoch: 7, key, value }));
        assert_eq!(of_meeting(7, "a", &[9; pleach_transport::MESSAGE_BYTES_MAX]), None, "is too long");
        let message = of_engine(7, &[1, 2]);
        assert_eq!(Envelope::open(&message), Some(Envelope::Engine { epoch: 7, message: &[1, 2] }));
    }
}
