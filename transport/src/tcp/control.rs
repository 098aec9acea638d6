//! The control stream's frames: messages for the responder, revoked keys, "ready" and "bye". A pure
//! codec.

use crate::device::{MESSAGE_BYTES_MAX, ProtocolViolation};
use crate::region::RegionKey;

/// Length of a control frame's header, in bytes: kind (1), zero (3), length of what follows (4,
/// little endian).
pub(super) const CONTROL_HEADER_BYTES: usize = 8;

/// Longest message: what stands on these streams may add a byte of its own to each.
pub(super) const CONTROL_MESSAGE_BYTES_MAX: usize = MESSAGE_BYTES_MAX + 1;

const MESSAGE: u8 = 0;
const READY: u8 = 1;
const BYE: u8 = 2;
const REVOKED: u8 = 3;

/// What is said on a control stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlFrame<'a> {
    /// For the responder.
    Message(&'a [u8]),
    /// The listener has all connections of the pair and wants them.
    Ready,
    /// A region that was accepted before is gone. Comes before any message that was posted after it
    /// went.
    Revoked(RegionKey),
    /// The stream's end will be no loss.
    Bye,
}

impl<'a> ControlFrame<'a> {
    /// The frame at the beginning of `bytes` and its length; `None` when more bytes are needed.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, ProtocolViolation> {
        let Some(header) = bytes.first_chunk::<CONTROL_HEADER_BYTES>() else { return Ok(None) };
        let [kind, zero @ .., a, b, c, d] = *header;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if len > CONTROL_MESSAGE_BYTES_MAX {
            return Err(ProtocolViolation::OversizedFrame);
        }
        let len_is_right = match kind {
            MESSAGE => true,
            REVOKED => len == size_of::<u64>(),
            _ => len == 0,
        };
        if zero != [0; 3] || !len_is_right {
            return Err(ProtocolViolation::MalformedFrame);
        }
        let end = CONTROL_HEADER_BYTES + len;
        let Some(body) = bytes.get(CONTROL_HEADER_BYTES..end) else { return Ok(None) };
        let frame = match kind {
            MESSAGE => Self::Message(body),
            READY => Self::Ready,
            BYE => Self::Bye,
            REVOKED => {
                let key = body.first_chunk().ok_or(ProtocolViolation::MalformedFrame)?;
                Self::Revoked(RegionKey(u64::from_le_bytes(*key)))
            }
            _ => return Err(ProtocolViolation::MalformedFrame),
        };
        Ok(Some((frame, end)))
    }

    /// Appends the frame's bytes. A message is at most [`CONTROL_MESSAGE_BYTES_MAX`] long.
    pub(super) fn encode(&self, bytes: &mut impl Extend<u8>) {
        let key;
        let (kind, body): (u8, &[u8]) = match self {
            Self::Message(body) => (MESSAGE, body),
            Self::Ready => (READY, &[]),
            Self::Bye => (BYE, &[]),
            Self::Revoked(revoked) => {
                key = revoked.0.to_le_bytes();
                (REVOKED, &key)
            }
        };
        bytes.extend([kind, 0, 0, 0]);
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(body.iter().copied());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_as_they_were_and_parts_of_them_ask_for_more() {
        let longest = [7; CONTROL_MESSAGE_BYTES_MAX];
        let frames = [
            ControlFrame::Message(b""),
            ControlFrame::Message(b"what are you doing?"),
            ControlFrame::Message(&longest),
            ControlFrame::Revoked(RegionKey(0x0102_0304_0506_0708)),
            ControlFrame::Ready,
            ControlFrame::Bye,
        ];
        for frame in frames {
            let mut bytes = Vec::new();
            frame.encode(&mut bytes);
            for part in 0..bytes.len() {
                assert_eq!(ControlFrame::decode(&bytes[..part]), Ok(None));
            }
            assert_eq!(ControlFrame::decode(&bytes), Ok(Some((frame, bytes.len()))));
        }
    }

    #[test]
    fn what_is_no_frame_is_refused_before_its_bytes_are_awaited() {
        let oversized = [0, 0, 0, 0, 2, 16, 0, 0];
        assert_eq!(ControlFrame::decode(&oversized), Err(ProtocolViolation::OversizedFrame));
        for header in [[0, 1, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 1, 0, 0, 0], [3, 0, 0, 0, 7, 0, 0, 0], [9; 8]] {
            assert!(ControlFrame::decode(&header).is_err(), "{header:?}");
        }
    }
}
