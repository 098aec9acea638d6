//! The wire formats apart from data: immediates, and messages between two ranks before and beside
//! the transfers.
//!
//! An [`Immediate`] is 32 bits: the signal slot, whether the inbox slot holds a payload, whether it
//! carries a signal at all, and either the credits that its sender returns or the part of a striped
//! put. A [`Hello`] and [`Announcement`]s travel on the control stream. All bytes of a peer are
//! decoded here before they are used.

use super::port::GidType;
use crate::region::RegionKey;

/// Version of these formats.
pub(super) const VERSION: u16 = 3;

/// Most credits that one immediate returns.
pub(super) const CREDITS_MAX: u32 = 255;

/// Queue pairs between two ranks at most: four bits of an immediate.
pub(super) const QUEUE_PAIRS_MAX: usize = 16;

/// NICs of a rank at most.
pub(super) const NICS_MAX: usize = 4;

/// A region's keys, by NIC.
pub(super) type NicKeys = [u32; NICS_MAX];

/// The immediate of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Immediate {
    /// The signal slot; `None`: it only returns credits.
    pub(super) signal_slot: Option<u16>,
    /// Whether the signal's inbox slot holds its payload, as long as the write was.
    pub(super) has_payload: bool,
    pub(super) piggyback: Piggyback,
}

/// The second meaning of an immediate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Piggyback {
    /// This many receives for this rank's signals are free again, at most [`CREDITS_MAX`].
    Credits(u32),
    /// It announces a part of a striped put, whose signal is raised when all parts are there.
    Stripe(Stripe),
}

/// A part of a striped put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stripe {
    /// The put's number among striped puts with a signal, modulo 16.
    pub(super) number: u8,
    /// The number of parts, at most [`QUEUE_PAIRS_MAX`].
    pub(super) parts: u8,
}

impl Stripe {
    /// The number as it is sent.
    pub(super) fn number(number: u64) -> u8 {
        (number % 16) as u8
    }
}

const PAYLOAD: u32 = 1 << 16;
const SIGNAL: u32 = 1 << 17;
const STRIPE: u32 = 1 << 18;
const KNOWN: u32 = 0xff00_0000 | STRIPE | SIGNAL | PAYLOAD | 0xffff;

impl Immediate {
    pub(super) fn encode(self) -> u32 {
        let signal_slot = self.signal_slot.map_or(0, |signal_slot| SIGNAL | u32::from(signal_slot));
        let piggyback = match self.piggyback {
            Piggyback::Credits(credits) => credits.min(CREDITS_MAX) << 24,
            Piggyback::Stripe(Stripe { number, parts }) => {
                STRIPE | u32::from(number & 15) << 28 | u32::from((parts - 1) & 15) << 24
            }
        };
        signal_slot | if self.has_payload { PAYLOAD } else { 0 } | piggyback
    }

    pub(super) fn decode(word: u32) -> Option<Self> {
        let is_signal = word & SIGNAL != 0;
        let has_payload = word & PAYLOAD != 0;
        if word & !KNOWN != 0 || (!is_signal && word & (STRIPE | PAYLOAD | 0xffff) != 0) {
            return None;
        }
        let piggyback = if word & STRIPE == 0 {
            Piggyback::Credits(word >> 24)
        } else {
            Piggyback::Stripe(Stripe { number: (word >> 28) as u8, parts: (word >> 24 & 15) as u8 + 1 })
        };
        Some(Self { signal_slot: is_signal.then_some(word as u16), has_payload, piggyback })
    }
}

/// A rank's queue pairs to a peer, as it sends them to the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Reads and atomics of the peer that it serves at once, on each queue pair.
    pub(super) reads: u8,
    /// Receives that the peer may consume before it gets credits back.
    pub(super) credits: u32,
    /// The address of the inbox for the peer's payloads.
    pub(super) inbox_address: u64,
    /// Signal slots that it keeps for the peer.
    pub(super) signal_slots: u32,
    /// Its queue pairs, each to be connected to the one at the same index; at least one.
    pub(super) queues: Vec<QueuePairHello>,
}

/// One queue pair of a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueuePairHello {
    pub(super) queue_pair: u32,
    /// Number of its first packet, 24 bits.
    pub(super) packet: u32,
    pub(super) gid: [u8; 16],
    pub(super) kind: GidType,
    /// Address on an InfiniBand subnet; zero elsewhere.
    pub(super) lid: u16,
    /// Path MTU of its port, in the code of the verbs.
    pub(super) mtu: u8,
    /// The index of its NIC; the first queue pair is on NIC 0.
    pub(super) nic: u8,
    /// The inbox's key on that NIC.
    pub(super) inbox_key: u32,
}

const HELLO_BYTES: usize = 2 + 1 + 4 + 8 + 4 + 1;
const QUEUE_BYTES: usize = 4 + 4 + 16 + 1 + 2 + 1 + 1 + 4;

/// Takes fields from the beginning of bytes that are long enough.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HELLO_BYTES + self.queues.len() * QUEUE_BYTES);
        bytes.extend(VERSION.to_le_bytes());
        bytes.push(self.reads);
        bytes.extend(self.credits.to_le_bytes());
        bytes.extend(self.inbox_address.to_le_bytes());
        bytes.extend(self.signal_slots.to_le_bytes());
        bytes.push(self.queues.len() as u8);
        for queue in &self.queues {
            bytes.extend(queue.queue_pair.to_le_bytes());
            bytes.extend(queue.packet.to_le_bytes());
            bytes.extend(queue.gid);
            bytes.push(queue.kind as u8);
            bytes.extend(queue.lid.to_le_bytes());
            bytes.extend([queue.mtu, queue.nic]);
            bytes.extend(queue.inbox_key.to_le_bytes());
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        if u16::from_le_bytes(fields.take()?) != VERSION {
            return None;
        }
        let mut hello = Self {
            reads: fields.take::<1>()?[0],
            credits: u32::from_le_bytes(fields.take()?),
            inbox_address: u64::from_le_bytes(fields.take()?),
            signal_slots: u32::from_le_bytes(fields.take()?),
            queues: Vec::new(),
        };
        let count = usize::from(fields.take::<1>()?[0]);
        if !(1..=QUEUE_PAIRS_MAX).contains(&count)
            || fields.0.len() != count * QUEUE_BYTES
            || hello.credits == 0
        {
            return None;
        }
        for _ in 0..count {
            hello.queues.push(QueuePairHello::decode(&mut fields)?);
        }
        (hello.queues[0].nic == 0).then_some(hello)
    }
}

impl QueuePairHello {
    fn decode(fields: &mut Fields<'_>) -> Option<Self> {
        let queue = Self {
            queue_pair: u32::from_le_bytes(fields.take()?),
            packet: u32::from_le_bytes(fields.take()?),
            gid: fields.take()?,
            kind: *GidType::ALL.get(usize::from(fields.take::<1>()?[0]))?,
            lid: u16::from_le_bytes(fields.take()?),
            mtu: fields.take::<1>()?[0],
            nic: fields.take::<1>()?[0],
            inbox_key: u32::from_le_bytes(fields.take()?),
        };
        queue.is_valid().then_some(queue)
    }

    /// Whether its numbers are within their limits.
    pub(super) fn is_valid(&self) -> bool {
        self.packet < 1 << 24
            && self.queue_pair < 1 << 24
            && (1..=5).contains(&self.mtu)
            && usize::from(self.nic) < NICS_MAX
    }
}

/// The announcement of a region, for peers with several queue pairs. Its key is that of NIC 0. With
/// the length a sender knows that the peer accepts all parts of a striped transfer or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Announcement {
    pub(super) region: RegionKey,
    /// `None`: the region is gone.
    pub(super) known: Option<RemoteRegion>,
}

/// An announced region of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteRegion {
    /// Its length.
    pub(super) bytes: u64,
    pub(super) keys: NicKeys,
}

impl Announcement {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.region.0.to_le_bytes().to_vec();
        if let Some(known) = self.known {
            bytes.extend(known.bytes.to_le_bytes());
            bytes.extend(known.keys.iter().flat_map(|key| key.to_le_bytes()));
        }
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut fields = Fields(bytes);
        let region = RegionKey(u64::from_le_bytes(fields.take()?));
        if fields.0.is_empty() {
            return Some(Self { region, known: None });
        }
        let mut known = RemoteRegion { bytes: u64::from_le_bytes(fields.take()?), keys: [0; NICS_MAX] };
        for key in &mut known.keys {
            *key = u32::from_le_bytes(fields.take()?);
        }
        fields.0.is_empty().then_some(Self { region, known: Some(known) })
    }
}

/// A key of a region: the NIC's own key, and the region's first address as peers use it.
///
/// The address has random bits that no offset reaches. So a key of a region that is gone names an
/// address that the NIC refuses, even if the NIC has given the same key out again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KeyParts {
    pub(super) remote_key: u32,
    /// 20 random bits.
    pub(super) tag: u32,
    /// The region's offset in its page: addresses keep it.
    pub(super) page_offset: u16,
}

/// Length limit of a region, in bytes.
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

    /// The address of the region's first byte for peers.
    pub(super) fn address(self) -> u64 {
        u64::from(self.tag & ((1 << TAG_BITS) - 1)) << 44 | u64::from(self.page_offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn immediates_come_back_and_unknown_bits_are_refused() {
        let stripe = |number, parts| Piggyback::Stripe(Stripe { number, parts });
        for signal_slot in [None, Some(0), Some(7), Some(u16::MAX)] {
            let credits = [0, 1, CREDITS_MAX].map(Piggyback::Credits);
            let stripes = [stripe(0, 1), stripe(15, 16)];
            for piggyback in credits.into_iter().chain(stripes.into_iter().filter(|_| signal_slot.is_some()))
            {
                let said = Immediate { signal_slot, has_payload: signal_slot.is_some(), piggyback };
                assert_eq!(Immediate::decode(said.encode()), Some(said));
            }
        }
        assert_eq!(Immediate::decode(1 << 19), None);
        assert_eq!(Immediate::decode(STRIPE), None, "a part without a signal");
        assert_eq!(Immediate::decode(5), None, "a signal slot without a signal");
    }

    #[test]
    fn a_hello_comes_back_and_impossible_ones_are_refused() {
        let queue = QueuePairHello {
            queue_pair: 17,
            packet: 0x00ab_cdef,
            gid: [3; 16],
            kind: GidType::RoceV2Ipv4,
            lid: 4,
            mtu: 5,
            nic: 0,
            inbox_key: 9,
        };
        let queues = vec![queue, QueuePairHello { nic: 1, ..queue }];
        let hello = Hello { reads: 16, credits: 256, inbox_address: 1 << 50, signal_slots: 100, queues };
        let bytes = hello.encode();
        assert_eq!(Hello::decode(&bytes), Some(hello.clone()));
        assert_eq!(Hello::decode(&bytes[1..]), None);
        assert_eq!(Hello::decode(&bytes[..bytes.len() - 1]), None);
        let with = |queues| Hello { queues, ..hello.clone() };
        let impossible = [
            with(vec![QueuePairHello { mtu: 9, ..queue }]),
            with(vec![QueuePairHello { nic: 1, ..queue }]),
            with(vec![queue, QueuePairHello { nic: NICS_MAX as u8, ..queue }]),
            with(vec![queue; QUEUE_PAIRS_MAX + 1]),
            with(Vec::new()),
            Hello { credits: 0, ..hello.clone() },
        ];
        for hello in impossible {
            assert_eq!(Hello::decode(&hello.encode()), None, "{hello:?}");
        }
        for kind in GidType::ALL {
            let hello = with(vec![QueuePairHello { kind, ..queue }]);
            assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        }
        let mut other = bytes;
        other[0] = 99;
        assert_eq!(Hello::decode(&other), None);
    }

    #[test]
    fn announcements_come_back_and_others_are_refused() {
        for known in [None, Some(RemoteRegion { bytes: 5, keys: [1, 2, 3, u32::MAX] })] {
            let said = Announcement { region: RegionKey(7 << 40), known };
            let bytes = said.encode();
            assert_eq!(Announcement::decode(&bytes), Some(said));
            assert_eq!(Announcement::decode(&bytes[1..]), None);
            assert_eq!(Announcement::decode(&[&bytes[..], &[0]].concat()), None);
        }
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
