//! The frames of a control connection. A pure codec.
//!
//! **Invariant:** a frame has at most [`MESSAGE_BYTES_MAX`] bytes behind its header. Only the bytes
//! of a tensor, which follow an inline message without a header, may be longer.

use pleach_transport::MESSAGE_BYTES_MAX;
use pleach_transport::wire::Malformed;

/// Length of a frame's header, in bytes: kind (1), zero (3), length of the content (4, little
/// endian).
pub(crate) const HEADER_BYTES: usize = 8;

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum FrameKind {
    /// An introduction.
    Introduction = 1,
    /// The dialer's proof of the secret.
    Proof = 2,
    /// The listener's verdict, with its own proof.
    Verdict = 3,
    /// A message about tensors.
    Message = 4,
    /// A step by which both ends set up regions.
    Regions = 5,
    /// The other end has put messages into memory while this end slept.
    Doorbell = 6,
}

/// A frame as it is sent.
pub(crate) fn encode(kind: FrameKind, content: &[u8]) -> Vec<u8> {
    debug_assert!(content.len() <= MESSAGE_BYTES_MAX, "a content of {} bytes", content.len());
    let mut bytes = Vec::with_capacity(HEADER_BYTES + content.len());
    bytes.extend([kind as u8, 0, 0, 0]);
    bytes.extend((content.len() as u32).to_le_bytes());
    bytes.extend(content);
    bytes
}

/// The kind and the length of the content that follows a header.
pub(crate) fn decode(header: [u8; HEADER_BYTES]) -> Result<(FrameKind, usize), Malformed> {
    const KINDS: [FrameKind; 6] = [
        FrameKind::Introduction,
        FrameKind::Proof,
        FrameKind::Verdict,
        FrameKind::Message,
        FrameKind::Regions,
        FrameKind::Doorbell,
    ];
    let [kind, zero @ .., a, b, c, d] = header;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    let kind = KINDS.into_iter().find(|known| *known as u8 == kind).ok_or(Malformed)?;
    let is_right = zero == [0; 3] && length <= MESSAGE_BYTES_MAX;
    if is_right { Ok((kind, length)) } else { Err(Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_survives_the_wire_and_no_other_header_is_taken() {
        for kind in [FrameKind::Introduction, FrameKind::Doorbell] {
            let bytes = encode(kind, b"abc");
            let (header, content) = bytes.split_first_chunk().expect("has a header");
            assert_eq!((decode(*header), content), (Ok((kind, 3)), &b"abc"[..]));
        }
        let longest = (MESSAGE_BYTES_MAX as u32).to_le_bytes();
        let with_length = |length: [u8; 4]| {
            let mut header = [4, 0, 0, 0, 0, 0, 0, 0];
            header[4..].copy_from_slice(&length);
            header
        };
        assert_eq!(decode(with_length(longest)), Ok((FrameKind::Message, MESSAGE_BYTES_MAX)));
        let longer = (MESSAGE_BYTES_MAX as u32 + 1).to_le_bytes();
        for header in [with_length(longer), [0; 8], [7, 0, 0, 0, 0, 0, 0, 0], [4, 1, 0, 0, 0, 0, 0, 0]] {
            assert_eq!(decode(header), Err(Malformed), "{header:?}");
        }
    }
}
