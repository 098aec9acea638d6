//! What goes over the wire beside data: immediates, and what two ranks tell each other before.
//!
//! An [`Immediate`] is 32 bits: the cell, whether a payload was written to the cell's place in the inbox, whether it is a
//! notice at all, and how many receives its sender gives back. A [`Hello`] travels on the control stream. All that comes
//! from a peer is decoded here, before anything is done with it.

/// Version of all of this.
const VERSION: u16 = 1;

/// Most credits that one immediate gives back.
pub(super) const CREDITS_MAX: u32 = 255;

/// What a peer says with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Immediate {
    /// Which cell; `None`: it only gives credits back.
    pub(super) cell: Option<u16>,
    /// Whether the cell's place in the inbox holds its payload, as long as the write was.
    pub(super) has_payload: bool,
    /// So many receives of this rank's notices are free again, at most [`CREDITS_MAX`].
    pub(super) credits: u32,
}

const PAYLOAD: u32 = 1 << 16;
const NOTICE: u32 = 1 << 17;
const KNOWN: u32 = 0xff00_0000 | NOTICE | PAYLOAD | 0xffff;

impl Immediate {
    pub(super) fn encode(self) -> u32 {
        let cell = self.cell.map_or(0, |cell| NOTICE | u32::from(cell));
        cell | if self.has_payload { PAYLOAD } else { 0 } | self.credits.min(CREDITS_MAX) << 24
    }

    pub(super) fn decode(word: u32) -> Option<Self> {
        let is_notice = word & NOTICE != 0;
        let has_payload = word & PAYLOAD != 0;
        if word & !KNOWN != 0 || (!is_notice && word & (PAYLOAD | 0xffff) != 0) {
            return None;
        }
        Some(Self { cell: is_notice.then_some(word as u16), has_payload, credits: word >> 24 })
    }
}

/// What a rank tells a peer of its queue pair to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) queue_pair: u32,
    /// Number of its first packet, 24 bits.
    pub(super) packet: u32,
    pub(super) gid: [u8; 16],
    /// Address on an InfiniBand subnet; zero elsewhere.
    pub(super) lid: u16,
    /// Longest packet of its port, as the verbs number it.
    pub(super) mtu: u8,
    /// Reads and atomics of the peer that it serves at once.
    pub(super) reads: u8,
    /// Notices that the peer may send before it gets credits back.
    pub(super) credits: u32,
    /// Where the peer's payloads go.
    pub(super) inbox_key: u32,
    pub(super) inbox_address: u64,
    /// How many cells it keeps for the peer.
    pub(super) cells: u32,
}

/// Bytes of a hello.
pub(super) const HELLO_BYTES: usize = 2 + 4 + 4 + 16 + 2 + 1 + 1 + 4 + 4 + 8 + 4;

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        let fields: [&[u8]; 11] = [
            &VERSION.to_le_bytes(),
            &self.queue_pair.to_le_bytes(),
            &self.packet.to_le_bytes(),
            &self.gid,
            &self.lid.to_le_bytes(),
            &[self.mtu],
            &[self.reads],
            &self.credits.to_le_bytes(),
            &self.inbox_key.to_le_bytes(),
            &self.inbox_address.to_le_bytes(),
            &self.cells.to_le_bytes(),
        ];
        let mut at = 0;
        for field in fields {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HELLO_BYTES] = bytes.try_into().ok()?;
        let mut left = &bytes[..];
        let mut take = |count: usize| {
            let (field, rest) = left.split_at(count);
            left = rest;
            field
        };
        let version = u16::from_le_bytes(take(2).try_into().ok()?);
        let hello = Self {
            queue_pair: u32::from_le_bytes(take(4).try_into().ok()?),
            packet: u32::from_le_bytes(take(4).try_into().ok()?),
            gid: take(16).try_into().ok()?,
            lid: u16::from_le_bytes(take(2).try_into().ok()?),
            mtu: take(1)[0],
            reads: take(1)[0],
            credits: u32::from_le_bytes(take(4).try_into().ok()?),
            inbox_key: u32::from_le_bytes(take(4).try_into().ok()?),
            inbox_address: u64::from_le_bytes(take(8).try_into().ok()?),
            cells: u32::from_le_bytes(take(4).try_into().ok()?),
        };
        let is_possible =
            hello.packet < 1 << 24 && hello.queue_pair < 1 << 24 && (1..=5).contains(&hello.mtu);
        (version == VERSION && is_possible && hello.credits > 0).then_some(hello)
    }
}

/// A key of a region: the NIC's own key, and where the region begins in the addresses that peers use.
///
/// The beginning is random in bits that no address of a region reaches, so that a key of a region that is gone names an
/// address that the NIC refuses, also where it gave the same key out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyParts {
    pub(super) remote_key: u32,
    /// 20 random bits.
    pub(super) tag: u32,
    /// Where in its page the region begins: addresses keep that.
    pub(super) page_offset: u16,
}

/// A region is shorter than this.
pub(super) const REGION_BYTES_MAX: u64 = 1 << 43;

const TAG_BITS: u32 = 20;

impl KeyParts {
    pub(super) fn encode(self) -> u64 {
        u64::from(self.remote_key) << 32 | u64::from(self.page_offset) << TAG_BITS | u64::from(self.tag)
    }

    pub(super) fn decode(key: u64) -> Self {
        let low = key as u32;
        Self {
            remote_key: (key >> 32) as u32,
            tag: low & ((1 << TAG_BITS) - 1),
            page_offset: (low >> TAG_BITS) as u16,
        }
    }

    /// The address by which peers name the region's first byte.
    pub(super) fn address(self) -> u64 {
        u64::from(self.tag & ((1 << TAG_BITS) - 1)) << 44 | u64::from(self.page_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_come_back_and_unknown_bits_are_refused() {
        for cell in [None, Some(0), Some(7), Some(u16::MAX)] {
            for credits in [0, 1, CREDITS_MAX] {
                let said = Immediate { cell, has_payload: cell.is_some(), credits };
                assert_eq!(Immediate::decode(said.encode()), Some(said));
            }
        }
        assert_eq!(Immediate::decode(1 << 18), None);
        assert_eq!(Immediate::decode(5), None, "a cell without a notice");
    }

    #[test]
    fn a_hello_comes_back_and_impossible_ones_are_refused() {
        let hello = Hello {
            queue_pair: 17,
            packet: 0x00ab_cdef,
            gid: [3; 16],
            lid: 4,
            mtu: 5,
            reads: 16,
            credits: 256,
            inbox_key: 9,
            inbox_address: 1 << 50,
            cells: 100,
        };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Some(hello));
        assert_eq!(Hello::decode(&bytes[1..]), None);
        assert_eq!(Hello::decode(&Hello { mtu: 9, ..hello }.encode()), None);
        assert_eq!(Hello::decode(&Hello { credits: 0, ..hello }.encode()), None);
        let mut other = bytes;
        other[0] = 99;
        assert_eq!(Hello::decode(&other), None);
    }

    #[test]
    fn keys_come_back_and_addresses_of_different_tags_do_not_meet() {
        let parts = KeyParts { remote_key: 0xdead_beef, tag: 0xf_ffff, page_offset: 0xabc };
        assert_eq!(KeyParts::decode(parts.encode()), parts);
        assert_eq!(parts.address() & 0xfff, 0xabc);
        let next = KeyParts { tag: 0xf_fffe, ..parts };
        assert!(parts.address() - next.address() > REGION_BYTES_MAX);
    }
}
