//! The messages of this backend on the control stream, apart from those of users.

use super::cm::ListenerAddress;
use super::refusal::Refusal;
use super::wire::{Announcement, Hello};
use crate::control::FabricMessage;
use crate::device::LossCause;

const HELLO: u8 = 1;
const READY: u8 = 2;
const ANNOUNCEMENT: u8 = 3;
const REFUSAL: u8 = 4;
const LISTENER: u8 = 5;

/// A message of a rank to the same backend of another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControlMessage {
    /// The sender's queue pairs.
    Hello(Hello),
    /// The sender's listener of the connection manager.
    ListenerAddress(ListenerAddress),
    /// The sender's queue pairs receive and send.
    Ready,
    /// A region's length and its keys on further NICs; or that the region is gone.
    Announcement(Announcement),
    /// The sender refuses the connection.
    Refusal(Refusal),
}

impl ControlMessage {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, body): (u8, Vec<u8>) = match self {
            Self::Hello(hello) => (HELLO, hello.encode()),
            Self::ListenerAddress(listener) => (LISTENER, listener.encode()),
            Self::Ready => (READY, Vec::new()),
            Self::Announcement(announcement) => (ANNOUNCEMENT, announcement.encode()),
            Self::Refusal(refusal) => (REFUSAL, refusal.encode().into()),
        };
        [&[kind], &body[..]].concat()
    }
}

impl FabricMessage for ControlMessage {
    fn decode(bytes: &[u8]) -> Option<Self> {
        match bytes.split_first()? {
            (&HELLO, hello) => Hello::decode(hello).map(Self::Hello),
            (&LISTENER, listener) => ListenerAddress::decode(listener).map(Self::ListenerAddress),
            (&READY, []) => Some(Self::Ready),
            (&ANNOUNCEMENT, announced) => Announcement::decode(announced).map(Self::Announcement),
            (&REFUSAL, refusal) => Refusal::decode(refusal).map(Self::Refusal),
            _ => None,
        }
    }

    fn refusal(&self) -> Option<LossCause> {
        match self {
            Self::Refusal(refusal) => Some(refusal.as_received()),
            _ => None,
        }
    }
}
