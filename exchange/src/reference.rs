//! References: a message's name for a tensor in lent memory.
//!
//! A [`Reference`] names a link, a lease of this link, and the bytes. It is plain data: whoever
//! gets it checks it ([`crate::lease::LeaseHolder::accept`]).
//!
//! **Invariant:** a reference is [`REFERENCE_BYTES`] long, and its first byte is zero, with which
//! no protobuf message begins. A reference of another version is not decoded.

use std::fmt;

use pleach_transport::{RegionKey, RemoteSlice};

/// Length of a reference, in bytes.
pub const REFERENCE_BYTES: usize = 48;

/// What each reference begins with: zero, the name, and the version.
const MAGIC: [u8; 4] = [0, b'p', b'r', 1];

/// Names a link between two programs: random bits that only these two know.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

impl fmt::Debug for LinkId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

impl fmt::Display for LinkId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, formatter)
    }
}

/// Names a lease of a link: the slot that counts its return, and the number of leases that the slot
/// has had with this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseNumber {
    /// The slot.
    pub slot: u32,
    /// From 1.
    pub generation: u64,
}

/// Bytes that the owner of memory has lent to the other end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// The link on which the lease is good.
    pub link: LinkId,
    /// The lease.
    pub lease: LeaseNumber,
    /// The bytes, in a region of the owner.
    pub slice: RemoteSlice,
}

/// Why bytes are no reference.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReferenceFormatError {
    /// They have another length.
    #[error("a reference has {REFERENCE_BYTES} bytes, and these are {bytes}")]
    Length {
        /// Their length.
        bytes: usize,
    },
    /// They do not begin as a reference of this version.
    #[error("these bytes are no reference of this version; both programs need the same version of pleach")]
    Version,
}

impl Reference {
    /// Whether bytes are meant as a reference of some version, and not as a protobuf message.
    #[must_use]
    pub fn is_meant(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC[..3])
    }

    /// As it is sent.
    #[must_use]
    pub fn encode(&self) -> [u8; REFERENCE_BYTES] {
        let mut bytes = [0; REFERENCE_BYTES];
        let (start, words) = bytes.split_at_mut(8);
        start[..4].copy_from_slice(&MAGIC);
        start[4..].copy_from_slice(&self.lease.slot.to_le_bytes());
        let RemoteSlice { key, offset, len } = self.slice;
        let values = [self.link.0, self.lease.generation, key.0, offset, len];
        for (word, value) in words.as_chunks_mut().0.iter_mut().zip(values) {
            *word = value.to_le_bytes();
        }
        bytes
    }

    /// Reads a reference. Nothing is known then of what it names.
    ///
    /// # Errors
    ///
    /// When the bytes are no reference of this version.
    pub fn decode(bytes: &[u8]) -> Result<Self, ReferenceFormatError> {
        let Ok(bytes) = <&[u8; REFERENCE_BYTES]>::try_from(bytes) else {
            return Err(ReferenceFormatError::Length { bytes: bytes.len() });
        };
        let ([start, words @ ..], []) = bytes.as_chunks::<8>() else {
            return Err(ReferenceFormatError::Length { bytes: bytes.len() });
        };
        let [magic @ .., a, b, c, d] = *start;
        if magic != MAGIC {
            return Err(ReferenceFormatError::Version);
        }
        let word = |at: usize| u64::from_le_bytes(words[at]);
        let lease = LeaseNumber { slot: u32::from_le_bytes([a, b, c, d]), generation: word(1) };
        let slice = RemoteSlice { key: RegionKey(word(2)), offset: word(3), len: word(4) };
        Ok(Self { link: LinkId(word(0)), lease, slice })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert_eq, proptest};

    use super::*;

    #[test]
    fn a_reference_is_the_same_bytes_in_every_build() {
        let reference = Reference {
            link: LinkId(0x0807_0605_0403_0201),
            lease: LeaseNumber { slot: 5, generation: 6 },
            slice: RemoteSlice { key: RegionKey(7), offset: 8, len: 9 },
        };
        let mut bytes = vec![0, b'p', b'r', 1, 5, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        for number in 6..10 {
            bytes.extend([number, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert_eq!(reference.encode()[..], bytes);
        assert_eq!(Reference::decode(&bytes), Ok(reference));
    }

    #[test]
    fn bytes_that_are_no_reference_of_this_version_are_refused() {
        assert_eq!(Reference::decode(&[]), Err(ReferenceFormatError::Length { bytes: 0 }));
        let (mut newer, longer) = ([0; REFERENCE_BYTES], [0; REFERENCE_BYTES + 1]);
        newer[..4].copy_from_slice(&[0, b'p', b'r', 2]);
        assert_eq!(Reference::decode(&newer), Err(ReferenceFormatError::Version));
        assert_eq!(Reference::decode(&longer), Err(ReferenceFormatError::Length { bytes: 49 }));
        assert!(
            Reference::is_meant(&newer) && !Reference::is_meant(&longer) && !Reference::is_meant(b"\x0apr")
        );
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same_bytes(mut bytes in prop::collection::vec(any::<u8>(), REFERENCE_BYTES)) {
            bytes[..4].copy_from_slice(&MAGIC);
            let reference = Reference::decode(&bytes).expect("has the length and the beginning");
            prop_assert_eq!(&reference.encode()[..], &bytes[..]);
        }
    }
}
