//! Control frames: one packet each. Decoding is a pure function of hostile bytes.
//!
//! The handshake is: the dialer's `Hello`, the listener's `Welcome`, the dialer's `Grant`, the
//! listener's `Accept`; each proves that it knows the secret before the other sends it any file
//! descriptor. Then `Announce`, `AnnounceGpu`, `Revoke`, `Message` in any number, and `Bye` at the
//! end.

use crate::auth::TAG_BYTES;
use crate::cuda::GpuId;
use crate::device::{MESSAGE_BYTES_MAX, ProtocolViolation};
use crate::region::RegionKey;

/// Longest frame, in bytes: a message and its kind.
pub(crate) const FRAME_BYTES_MAX: usize = 1 + MESSAGE_BYTES_MAX;

/// Version of this protocol; ranks of different versions do not connect.
pub(crate) const PROTOCOL_VERSION: u16 = 2;

const MAGIC: [u8; 4] = *b"plsh";
const CLAIM_BYTES: usize = 4 + 2 + 4 + 4 + 4 + 4;

/// A rank's claim in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) version: u16,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) world_size: u32,
    /// Signal slots that it keeps for the other.
    pub(crate) signal_slots: u32,
}

/// Why a listener or dialer rejects the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    Version,
    Secret,
    Rank,
}

impl From<Reason> for ProtocolViolation {
    fn from(reason: Reason) -> Self {
        match reason {
            Reason::Version => Self::Version,
            Reason::Secret => Self::WrongSecret,
            Reason::Rank => Self::WrongRank,
        }
    }
}

/// One packet of a control stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame<'bytes> {
    Hello {
        claim: Claim,
        challenge: [u8; TAG_BYTES],
    },
    Welcome {
        claim: Claim,
        challenge: [u8; TAG_BYTES],
        answer: [u8; TAG_BYTES],
    },
    /// With the dialer's file descriptors.
    Grant {
        answer: [u8; TAG_BYTES],
    },
    /// With the listener's file descriptors.
    Accept,
    Reject(Reason),
    /// With the region's file: `len` bytes of it from `offset` on.
    Announce {
        slot: u16,
        key: RegionKey,
        offset: u64,
        len: u64,
    },
    /// With the descriptor of a GPU allocation of `bytes` bytes: the region is its first `len`
    /// bytes.
    AnnounceGpu {
        slot: u16,
        key: RegionKey,
        bytes: u64,
        len: u64,
        gpu: GpuId,
    },
    Revoke {
        slot: u16,
    },
    Message(&'bytes [u8]),
    Bye,
}

const HELLO: u8 = 1;
const WELCOME: u8 = 2;
const GRANT: u8 = 3;
const ACCEPT: u8 = 4;
const REJECT: u8 = 5;
const ANNOUNCE: u8 = 6;
const REVOKE: u8 = 7;
const MESSAGE: u8 = 8;
const BYE: u8 = 9;
const ANNOUNCE_GPU: u8 = 10;

impl Claim {
    /// The claim as it is sent and authenticated. The first six bytes keep their meaning in every
    /// version.
    pub(crate) fn to_bytes(self) -> [u8; CLAIM_BYTES] {
        let mut bytes = [0; CLAIM_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        for (slot, word) in
            bytes[6..].chunks_exact_mut(4).zip([self.from, self.to, self.world_size, self.signal_slots])
        {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

impl Frame<'_> {
    /// The packet.
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello { claim, challenge } => concat(HELLO, &[&claim.to_bytes(), challenge]),
            Self::Welcome { claim, challenge, answer } => {
                concat(WELCOME, &[&claim.to_bytes(), challenge, answer])
            }
            Self::Grant { answer } => concat(GRANT, &[answer]),
            Self::Accept => vec![ACCEPT],
            Self::Reject(reason) => concat(REJECT, &[&MAGIC, &[*reason as u8]]),
            Self::Announce { slot, key, offset, len } => concat(
                ANNOUNCE,
                &[&slot.to_le_bytes(), &key.0.to_le_bytes(), &offset.to_le_bytes(), &len.to_le_bytes()],
            ),
            Self::AnnounceGpu { slot, key, bytes, len, gpu } => concat(
                ANNOUNCE_GPU,
                &[
                    &slot.to_le_bytes(),
                    &key.0.to_le_bytes(),
                    &bytes.to_le_bytes(),
                    &len.to_le_bytes(),
                    &gpu.0,
                ],
            ),
            Self::Revoke { slot } => concat(REVOKE, &[&slot.to_le_bytes()]),
            Self::Message(message) => concat(MESSAGE, &[message]),
            Self::Bye => vec![BYE],
        }
    }

    /// The number of file descriptors of the frame.
    pub(crate) fn files(&self) -> usize {
        match self {
            Self::Grant { .. } | Self::Accept => super::link::GRANT_FILES,
            Self::Announce { .. } | Self::AnnounceGpu { .. } => 1,
            _ => 0,
        }
    }
}

/// Decodes a packet.
pub(crate) fn decode(packet: &[u8]) -> Result<Frame<'_>, ProtocolViolation> {
    if packet.len() > FRAME_BYTES_MAX {
        return Err(ProtocolViolation::OversizedFrame);
    }
    let (&kind, rest) = packet.split_first().ok_or(ProtocolViolation::MalformedFrame)?;
    let mut reader = Reader { rest };
    let frame = match kind {
        HELLO => Frame::Hello { claim: reader.claim()?, challenge: reader.array()? },
        WELCOME => {
            Frame::Welcome { claim: reader.claim()?, challenge: reader.array()?, answer: reader.array()? }
        }
        GRANT => Frame::Grant { answer: reader.array()? },
        ACCEPT => Frame::Accept,
        REJECT => {
            if reader.array::<4>()? != MAGIC {
                return Err(ProtocolViolation::Version);
            }
            Frame::Reject(match reader.array::<1>()? {
                [0] => Reason::Version,
                [1] => Reason::Secret,
                [2] => Reason::Rank,
                _ => return Err(ProtocolViolation::MalformedFrame),
            })
        }
        ANNOUNCE => Frame::Announce {
            slot: u16::from_le_bytes(reader.array()?),
            key: RegionKey(u64::from_le_bytes(reader.array()?)),
            offset: u64::from_le_bytes(reader.array()?),
            len: u64::from_le_bytes(reader.array()?),
        },
        ANNOUNCE_GPU => Frame::AnnounceGpu {
            slot: u16::from_le_bytes(reader.array()?),
            key: RegionKey(u64::from_le_bytes(reader.array()?)),
            bytes: u64::from_le_bytes(reader.array()?),
            len: u64::from_le_bytes(reader.array()?),
            gpu: GpuId(reader.array()?),
        },
        REVOKE => Frame::Revoke { slot: u16::from_le_bytes(reader.array()?) },
        MESSAGE => Frame::Message(std::mem::take(&mut reader.rest)),
        BYE => Frame::Bye,
        _ => return Err(ProtocolViolation::MalformedFrame),
    };
    if reader.rest.is_empty() { Ok(frame) } else { Err(ProtocolViolation::MalformedFrame) }
}

fn concat(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let mut packet = Vec::with_capacity(1 + parts.iter().map(|part| part.len()).sum::<usize>());
    packet.push(kind);
    for part in parts {
        packet.extend_from_slice(part);
    }
    packet
}

struct Reader<'bytes> {
    rest: &'bytes [u8],
}

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], ProtocolViolation> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(ProtocolViolation::MalformedFrame)?;
        self.rest = rest;
        Ok(*head)
    }

    fn claim(&mut self) -> Result<Claim, ProtocolViolation> {
        if self.array::<4>()? != MAGIC {
            return Err(ProtocolViolation::Version);
        }
        let version = u16::from_le_bytes(self.array()?);
        if version != PROTOCOL_VERSION {
            return Err(ProtocolViolation::Version);
        }
        let [from, to, world_size, signal_slots] = [self.word()?, self.word()?, self.word()?, self.word()?];
        Ok(Claim { version, from, to, world_size, signal_slots })
    }

    fn word(&mut self) -> Result<u32, ProtocolViolation> {
        self.array().map(u32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn claims() -> impl Strategy<Value = Claim> {
        (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>()).prop_map(
            |(from, to, world_size, signal_slots)| Claim {
                version: PROTOCOL_VERSION,
                from,
                to,
                world_size,
                signal_slots,
            },
        )
    }

    proptest! {
        #[test]
        fn every_frame_decodes_to_itself(
            claim in claims(),
            challenge: [u8; 32],
            answer: [u8; 32],
            slot: u16,
            words: [u64; 3],
            gpu: [u8; 16],
            message in proptest::collection::vec(any::<u8>(), 0..=MESSAGE_BYTES_MAX),
        ) {
            for frame in [
                Frame::Hello { claim, challenge },
                Frame::Welcome { claim, challenge, answer },
                Frame::Grant { answer },
                Frame::Accept,
                Frame::Reject(Reason::Version),
                Frame::Reject(Reason::Secret),
                Frame::Reject(Reason::Rank),
                Frame::Announce { slot, key: RegionKey(words[0]), offset: words[1], len: words[2] },
                Frame::AnnounceGpu { slot, key: RegionKey(words[0]), bytes: words[1], len: words[2], gpu: GpuId(gpu) },
                Frame::Revoke { slot },
                Frame::Message(&message),
                Frame::Bye,
            ] {
                let packet = frame.encode();
                prop_assert_eq!(decode(&packet), Ok(frame));
                // A frame that is cut short or followed by anything is no frame, except a message.
                if !matches!(frame, Frame::Message(_)) {
                    prop_assert!(decode(&packet[..packet.len() - 1]).is_err());
                    prop_assert!(decode(&[&packet[..], &[0]].concat()).is_err());
                }
            }
        }

        #[test]
        fn any_bytes_decode_or_are_refused_and_what_decodes_encodes_to_the_same(
            packet in proptest::collection::vec(any::<u8>(), 0..128),
            kind in 0..=12_u8,
        ) {
            let mut packet = packet;
            if let Some(first) = packet.first_mut() {
                *first = kind;
            }
            if let Ok(frame) = decode(&packet) {
                prop_assert_eq!(frame.encode(), packet);
            }
        }
    }

    #[test]
    fn another_version_and_an_oversized_packet_are_told_apart() {
        let claim = Claim { version: PROTOCOL_VERSION + 1, from: 1, to: 0, world_size: 2, signal_slots: 1 };
        let packet = Frame::Hello { claim, challenge: [0; TAG_BYTES] }.encode();
        assert_eq!(decode(&packet), Err(ProtocolViolation::Version));
        assert_eq!(decode(&[MESSAGE; FRAME_BYTES_MAX + 1]), Err(ProtocolViolation::OversizedFrame));
        assert_eq!(decode(&[]), Err(ProtocolViolation::MalformedFrame));
    }
}
