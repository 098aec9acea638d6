//! The control stream's frames: messages of users and of the fabric, "ready" and "bye". A pure
//! codec.

use crate::device::{MESSAGE_BYTES_MAX, ProtocolViolation};
use crate::wire::Writer;

/// Length of a control frame's header, in bytes: kind (1), zero (3), length of what follows (4,
/// little endian).
pub(super) const HEADER_BYTES: usize = 8;

const MESSAGE: u8 = 0;
const READY: u8 = 1;
const BYE: u8 = 2;
const FABRIC: u8 = 3;

/// What is said on a control stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControlFrame<'a> {
    /// For the responder.
    Message(&'a [u8]),
    /// The sender has all connections of the pair and wants the pair. Over Unix sockets both ends
    /// send it, with their files.
    Ready,
    /// For the fabric itself.
    Fabric(&'a [u8]),
    /// The stream's end will be no loss.
    Bye,
}

impl<'a> ControlFrame<'a> {
    /// The frame at the beginning of `bytes` and its length; `None` when more bytes are needed.
    pub(crate) fn decode(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, ProtocolViolation> {
        let Some(header) = bytes.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [kind, zero @ .., a, b, c, d] = *header;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len > MESSAGE_BYTES_MAX {
            return Err(ProtocolViolation::OversizedFrame);
        }
        let len_is_right = match kind {
            MESSAGE | FABRIC => true,
            _ => len == 0,
        };
        if zero != [0; 3] || !len_is_right {
            return Err(ProtocolViolation::MalformedFrame);
        }
        let end = HEADER_BYTES + len;
        let Some(body) = bytes.get(HEADER_BYTES..end) else { return Ok(None) };
        let frame = match kind {
            MESSAGE => Self::Message(body),
            READY => Self::Ready,
            BYE => Self::Bye,
            FABRIC => Self::Fabric(body),
            _ => return Err(ProtocolViolation::MalformedFrame),
        };
        Ok(Some((frame, end)))
    }

    /// The frame's bytes. A message is at most [`MESSAGE_BYTES_MAX`] long.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let (kind, body): (u8, &[u8]) = match self {
            Self::Message(body) => (MESSAGE, body),
            Self::Ready => (READY, &[]),
            Self::Bye => (BYE, &[]),
            Self::Fabric(body) => (FABRIC, body),
        };
        Writer::with_capacity(HEADER_BYTES + body.len()).raw(&[kind, 0, 0, 0]).bytes(body).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_were_and_parts_of_them_ask_for_more() {
        let longest = [7; MESSAGE_BYTES_MAX];
        let frames = [
            ControlFrame::Message(b""),
            ControlFrame::Message(b"what are you doing?"),
            ControlFrame::Message(&longest),
            ControlFrame::Fabric(b""),
            ControlFrame::Fabric(&longest),
            ControlFrame::Ready,
            ControlFrame::Bye,
        ];
        for frame in frames {
            let bytes = frame.to_bytes();
            for part in 0..bytes.len() {
                assert_eq!(ControlFrame::decode(&bytes[..part]), Ok(None));
            }
            assert_eq!(ControlFrame::decode(&bytes), Ok(Some((frame, bytes.len()))));
        }
    }

    #[test]
    fn what_is_no_frame_is_refused_before_its_bytes_are_awaited() {
        for kind in [MESSAGE, FABRIC] {
            let oversized = [kind, 0, 0, 0, 1, 16, 0, 0];
            assert_eq!(ControlFrame::decode(&oversized), Err(ProtocolViolation::OversizedFrame));
        }
        for header in [[0, 1, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 7, 0, 0, 0], [9; 8]] {
            assert!(ControlFrame::decode(&header).is_err(), "{header:?}");
        }
    }
}
