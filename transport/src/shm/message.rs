//! The messages of `shm` itself: a rank's regions for its peers, and drain marks. The [control
//! plane](crate::control) carries them with the files of the regions, beside the messages of users.

use crate::cuda::GpuId;
use crate::device::ProtocolViolation;
use crate::region::RegionKey;
use crate::wire::{Reader, Writer};

/// A message about one slot of the sender's table of regions, or a drain mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RegionMessage {
    /// A region is announced with its file: `len` bytes of the file from `offset` on.
    Announce {
        slot: u16,
        key: RegionKey,
        offset: u64,
        len: u64,
    },
    /// A region on a GPU is announced with the descriptor of an allocation of `bytes` bytes. The
    /// region is the first `len` bytes of the allocation.
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
    /// All transfers that the sender submitted before its next drain have ended.
    DrainMark,
}

const ANNOUNCE: u8 = 1;
const ANNOUNCE_GPU: u8 = 2;
const REVOKE: u8 = 3;
const DRAIN_MARK: u8 = 4;

impl RegionMessage {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        let writer = match *self {
            Self::Announce { slot, key, offset, len } => {
                writer.u8(ANNOUNCE).u16(slot).u64(key.0).u64(offset).u64(len)
            }
            Self::AnnounceGpu { slot, key, bytes, len, gpu } => {
                writer.u8(ANNOUNCE_GPU).u16(slot).u64(key.0).u64(bytes).u64(len).raw(&gpu.0)
            }
            Self::Revoke { slot } => writer.u8(REVOKE).u16(slot),
            Self::DrainMark => writer.u8(DRAIN_MARK),
        };
        writer.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, ProtocolViolation> {
        let mut reader = Reader::new(bytes);
        let message = match reader.u8()? {
            ANNOUNCE => Self::Announce {
                slot: reader.u16()?,
                key: RegionKey(reader.u64()?),
                offset: reader.u64()?,
                len: reader.u64()?,
            },
            ANNOUNCE_GPU => Self::AnnounceGpu {
                slot: reader.u16()?,
                key: RegionKey(reader.u64()?),
                bytes: reader.u64()?,
                len: reader.u64()?,
                gpu: GpuId(reader.array()?),
            },
            REVOKE => Self::Revoke { slot: reader.u16()? },
            DRAIN_MARK => Self::DrainMark,
            _ => return Err(ProtocolViolation::MalformedFrame),
        };
        reader.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_message_decodes_to_itself_and_no_part_of_it_decodes(
            slot: u16,
            words: [u64; 3],
            gpu: [u8; 16],
        ) {
            let (key, offset, len) = (RegionKey(words[0]), words[1], words[2]);
            for message in [
                RegionMessage::Announce { slot, key, offset, len },
                RegionMessage::AnnounceGpu { slot, key, bytes: offset, len, gpu: GpuId(gpu) },
                RegionMessage::Revoke { slot },
                RegionMessage::DrainMark,
            ] {
                let bytes = message.encode();
                prop_assert_eq!(RegionMessage::decode(&bytes), Ok(message));
                prop_assert!(RegionMessage::decode(&bytes[..bytes.len() - 1]).is_err());
                prop_assert!(RegionMessage::decode(&[&bytes[..], &[0]].concat()).is_err());
            }
        }

        #[test]
        fn any_bytes_decode_or_are_refused_and_what_decodes_encodes_to_the_same(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
            kind in 0..=5_u8,
        ) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() {
                *first = kind;
            }
            if let Ok(message) = RegionMessage::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
