//! The wire formats apart from data: immediates, and messages between two ranks before and beside
//! the transfers.
//!
//! An [`Immediate`] is 32 bits: the signal slot, whether the inbox slot holds a payload, whether it
//! carries a signal at all, and either the credits that its sender returns or the part of a striped
//! put; or it marks a drain. A [`PairHello`] and [`Announcement`]s travel on the control stream.
//! All bytes of a peer are decoded here before they are used.

use std::{fmt, io};

use super::cm::ListenerAddress;
use super::limits::LimitKind;
use super::pair_error::PairError;
use super::port::GidType;
use crate::control::FabricMessage;
use crate::device::LossCause;
use crate::region::{KeyMap, RegionKey};
use crate::wire::{Malformed, Reader, Writer};

/// Decodes bytes with every decoder of this fabric: for fuzzing.
///
/// # Panics
///
/// When a decoded value does not survive encoding and decoding.
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    assert_round_trip(PairHello::decode(bytes), |said| PairHello::decode(&said.encode()));
    assert_round_trip(Announcement::decode(bytes), |said| Announcement::decode(&said.encode()));
    assert_round_trip(Refusal::decode(bytes), |said| Refusal::decode(&said.encode()));
    assert_round_trip(ControlMessage::decode(bytes), |said| ControlMessage::decode(&said.encode()));
    super::cm::check_decoders(bytes);
    if let Some(word) = bytes.first_chunk() {
        let word = u32::from_le_bytes(*word);
        assert_round_trip(Immediate::decode(word), |said| Immediate::decode(said.encode()));
    }
}

/// Asserts that a decoded value survives encoding and decoding.
pub(super) fn assert_round_trip<T: PartialEq + fmt::Debug>(
    decoded: Result<T, Malformed>,
    again: impl Fn(&T) -> Result<T, Malformed>,
) {
    if let Ok(decoded) = decoded {
        assert_eq!(again(&decoded), Ok(decoded));
    }
}

/// Version of these formats.
pub(super) const VERSION: u16 = 4;

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
    /// It marks a drain on this queue pair. It carries no signal, and consumes a credit as one.
    DrainMark,
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
const DRAIN_MARK: u32 = 1 << 19;
const KNOWN: u32 = 0xff00_0000 | STRIPE | SIGNAL | PAYLOAD | 0xffff;

impl Immediate {
    pub(super) fn encode(self) -> u32 {
        let signal_slot = self.signal_slot.map_or(0, |signal_slot| SIGNAL | u32::from(signal_slot));
        let piggyback = match self.piggyback {
            Piggyback::Credits(credits) => credits.min(CREDITS_MAX) << 24,
            Piggyback::Stripe(Stripe { number, parts }) => {
                STRIPE | u32::from(number & 15) << 28 | u32::from((parts - 1) & 15) << 24
            }
            Piggyback::DrainMark => DRAIN_MARK,
        };
        signal_slot | if self.has_payload { PAYLOAD } else { 0 } | piggyback
    }

    pub(super) fn decode(word: u32) -> Result<Self, Malformed> {
        if word == DRAIN_MARK {
            return Ok(Self { signal_slot: None, has_payload: false, piggyback: Piggyback::DrainMark });
        }
        let is_signal = word & SIGNAL != 0;
        let has_payload = word & PAYLOAD != 0;
        if word & !KNOWN != 0 || (!is_signal && word & (STRIPE | PAYLOAD | 0xffff) != 0) {
            return Err(Malformed);
        }
        let piggyback = if word & STRIPE == 0 {
            Piggyback::Credits(word >> 24)
        } else {
            Piggyback::Stripe(Stripe { number: (word >> 28) as u8, parts: (word >> 24 & 15) as u8 + 1 })
        };
        Ok(Self { signal_slot: is_signal.then_some(word as u16), has_payload, piggyback })
    }
}

/// A rank's queue pairs to a peer, as it sends them to the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PairHello {
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

/// One queue pair of a [`PairHello`].
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

/// A number of queue pairs, at least one.
pub(super) fn queue_pairs(reader: &mut Reader<'_>) -> Result<usize, Malformed> {
    let count = usize::from(reader.u8()?);
    if (1..=QUEUE_PAIRS_MAX).contains(&count) { Ok(count) } else { Err(Malformed) }
}

/// The reader of a message that begins with [`VERSION`].
pub(super) fn versioned(bytes: &[u8]) -> Result<Reader<'_>, Malformed> {
    let mut reader = Reader::new(bytes);
    if reader.u16()? == VERSION { Ok(reader) } else { Err(Malformed) }
}

impl PairHello {
    fn encode(&self) -> Vec<u8> {
        let writer = Writer::default().u16(VERSION).u8(self.reads).u32(self.credits).u64(self.inbox_address);
        let writer = writer.u32(self.signal_slots).u8(self.queues.len() as u8);
        let writer = self.queues.iter().fold(writer, |writer, queue| {
            let writer = writer.u32(queue.queue_pair).u32(queue.packet).raw(&queue.gid).u8(queue.kind as u8);
            writer.u16(queue.lid).u8(queue.mtu).u8(queue.nic).u32(queue.inbox_key)
        });
        writer.finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = versioned(bytes)?;
        let mut hello = Self {
            reads: reader.u8()?,
            credits: reader.u32()?,
            inbox_address: reader.u64()?,
            signal_slots: reader.u32()?,
            queues: Vec::new(),
        };
        for _ in 0..queue_pairs(&mut reader)? {
            hello.queues.push(QueuePairHello::decode(&mut reader)?);
        }
        reader.end()?;
        let is_valid = hello.credits > 0 && hello.queues[0].nic == 0;
        if is_valid { Ok(hello) } else { Err(Malformed) }
    }
}

impl QueuePairHello {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let queue = Self {
            queue_pair: reader.u32()?,
            packet: reader.u32()?,
            gid: reader.array()?,
            kind: GidType::decode(reader.u8()?)?,
            lid: reader.u16()?,
            mtu: reader.u8()?,
            nic: reader.u8()?,
            inbox_key: reader.u32()?,
        };
        if queue.is_valid() { Ok(queue) } else { Err(Malformed) }
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

/// The announced regions of a peer.
pub(super) type RemoteRegions = KeyMap<RemoteRegion>;

/// An announced region of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteRegion {
    /// Its length.
    pub(super) bytes: u64,
    pub(super) keys: NicKeys,
}

impl Announcement {
    fn encode(&self) -> Vec<u8> {
        let writer = Writer::default().u64(self.region.0);
        let writer = match self.known {
            Some(known) => known.keys.into_iter().fold(writer.u64(known.bytes), Writer::u32),
            None => writer,
        };
        writer.finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let region = RegionKey(reader.u64()?);
        if reader.is_empty() {
            return Ok(Self { region, known: None });
        }
        let mut known = RemoteRegion { bytes: reader.u64()?, keys: [0; NICS_MAX] };
        for key in &mut known.keys {
            *key = reader.u32()?;
        }
        reader.end()?;
        Ok(Self { region, known: Some(known) })
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

const HELLO: u8 = 1;
const READY: u8 = 2;
const ANNOUNCEMENT: u8 = 3;
const REFUSAL: u8 = 4;
const LISTENER: u8 = 5;

/// A message of a rank to the same backend of another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControlMessage {
    /// The sender's queue pairs.
    Hello(PairHello),
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
            Self::Refusal(refusal) => (REFUSAL, refusal.encode()),
        };
        [&[kind], &body[..]].concat()
    }
}

impl FabricMessage for ControlMessage {
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        match bytes.split_first().ok_or(Malformed)? {
            (&HELLO, hello) => PairHello::decode(hello).map(Self::Hello),
            (&LISTENER, listener) => ListenerAddress::decode(listener).map(Self::ListenerAddress),
            (&READY, []) => Ok(Self::Ready),
            (&ANNOUNCEMENT, announced) => Announcement::decode(announced).map(Self::Announcement),
            (&REFUSAL, refusal) => Refusal::decode(refusal).map(Self::Refusal),
            _ => Err(Malformed),
        }
    }

    fn refusal(&self) -> Option<LossCause> {
        match self {
            Self::Refusal(refusal) => Some(refusal.as_received()),
            _ => None,
        }
    }
}

/// The remedy for GID types that do not fit.
pub(super) const GID_TYPE_REMEDY: &str = "give both interfaces an address of one network, or set PLEACH_VERBS_GID_INDEX on both to addresses of one kind ('pleach devices' lists them)";

/// The remedy for a path that was not found.
pub(super) const NO_PATH_REMEDY: &str =
    "are the addresses of both RDMA ports in one network? 'pleach doctor --peer HOST' compares them";

/// Why the peer refuses the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// The path MTUs of the two ports differ.
    MtuMismatch {
        /// Path MTU of the sender's port, in bytes.
        own: u32,
        /// Path MTU of the receiver's port, in bytes.
        peer: u32,
    },
    /// The GID types of the two ports do not fit.
    GidTypeMismatch {
        /// The type of the sender's GID.
        own: GidType,
        /// The type of the receiver's GID.
        peer: GidType,
    },
    /// The sender's NIC did not connect the queue pair.
    NotConnected {
        /// The system's error number.
        errno: i32,
    },
    /// The sender may lock no more memory for its NIC.
    NotLocked {
        /// The limit of locked memory, in bytes.
        limit: u64,
    },
    /// A limit of the sender's NIC is reached.
    Limit {
        /// The resource.
        kind: LimitKind,
        /// The limit.
        most: u64,
    },
    /// The sender could not make or connect its queue pairs; its own error has the cause.
    NoQueuePair,
    /// The connection manager found no path to the peer, or was rejected; the sender's own error
    /// has the cause.
    NoPath,
    /// Only one of the two uses the connection manager.
    OtherConnectMethod,
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MtuMismatch { own, peer } => write!(
                formatter,
                "its RDMA port carries packets of {own} bytes, this rank's of {peer}; give both ends' network interfaces the same MTU"
            ),
            Self::GidTypeMismatch { own, peer } => write!(
                formatter,
                "the address of its RDMA port is {own}, that of this rank's {peer}, which do not meet; {GID_TYPE_REMEDY}"
            ),
            Self::NotConnected { errno } => write!(
                formatter,
                "its NIC joins no queue pair to this rank's ({}); {NO_PATH_REMEDY}",
                io::Error::from_raw_os_error(*errno)
            ),
            Self::NotLocked { limit } => write!(
                formatter,
                "it may lock no more memory for its NIC: the limit is {limit} bytes; raise it there with 'ulimit -l unlimited', or for good by the lines '* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.conf"
            ),
            Self::Limit { kind, most } => write!(formatter, "its NIC has no more than {most} {kind}"),
            Self::NoQueuePair => {
                formatter.write_str("it has no queue pair for this rank; its own error says why")
            }
            Self::OtherConnectMethod => formatter.write_str(
                "one of the two connects by rdma_cm and the other does not; set PLEACH_VERBS_CONNECT alike on all ranks",
            ),
            Self::NoPath => {
                formatter.write_str("it found no way for RDMA to this rank; its own error says why")
            }
        }
    }
}

const MTU_MISMATCH: u8 = 0;
const NOT_LOCKED: u8 = 1;
const NO_QUEUE_PAIR: u8 = 2;
const NO_PATH: u8 = 3;
const OTHER_CONNECT_METHOD: u8 = 4;
/// The first number of limits; the kind is added.
const LIMIT: u8 = 5;

/// Limits by their numbers on the wire.
const KINDS: [LimitKind; 5] = [
    LimitKind::Regions,
    LimitKind::RegionBytes,
    LimitKind::Windows,
    LimitKind::QueuePairs,
    LimitKind::CompletionQueues,
];
const GID_TYPE_MISMATCH: u8 = LIMIT + KINDS.len() as u8;
const NOT_CONNECTED: u8 = GID_TYPE_MISMATCH + 1;

impl Refusal {
    /// The refusal to send for a cause of a pair that is connecting; `None` if the peer knows the
    /// cause.
    pub(super) fn of(cause: &LossCause) -> Option<Self> {
        if let LossCause::ConnectionBroke(_) = cause {
            return Some(Self::NoQueuePair);
        }
        Some(match cause.fabric_error()? {
            PairError::MtuMismatch { own, peer } => Self::MtuMismatch { own: *own, peer: *peer },
            PairError::GidTypeMismatch { own, peer } => Self::GidTypeMismatch { own: *own, peer: *peer },
            PairError::NotConnected { errno } => Self::NotConnected { errno: *errno },
            PairError::NotLocked { limit } => Self::NotLocked { limit: *limit },
            PairError::Limit { kind, most } => Self::Limit { kind: *kind, most: *most },
            PairError::Connect(_) => Self::NoPath,
            PairError::Refused(Self::OtherConnectMethod) => Self::OtherConnectMethod,
            PairError::Refused(_) | PairError::GpuNotFlushed(_) | PairError::QueuePair(_) => return None,
        })
    }

    /// The cause of the loss at the receiver.
    pub(super) fn as_received(self) -> LossCause {
        LossCause::from(match self {
            Self::MtuMismatch { own, peer } => PairError::MtuMismatch { own: peer, peer: own },
            Self::GidTypeMismatch { own, peer } => PairError::GidTypeMismatch { own: peer, peer: own },
            other => PairError::Refused(other),
        })
    }

    fn encode(self) -> Vec<u8> {
        let (kind, number) = match self {
            Self::MtuMismatch { own, peer } => (MTU_MISMATCH, u64::from(own) << 32 | u64::from(peer)),
            Self::GidTypeMismatch { own, peer } => (GID_TYPE_MISMATCH, (own as u64) << 8 | peer as u64),
            Self::NotConnected { errno } => (NOT_CONNECTED, u64::from(errno.unsigned_abs())),
            Self::NotLocked { limit } => (NOT_LOCKED, limit),
            Self::NoQueuePair => (NO_QUEUE_PAIR, 0),
            Self::NoPath => (NO_PATH, 0),
            Self::OtherConnectMethod => (OTHER_CONNECT_METHOD, 0),
            Self::Limit { kind, most } => {
                let index = KINDS.iter().position(|known| *known == kind).unwrap_or(0);
                (LIMIT + index as u8, most)
            }
        };
        Writer::default().u8(kind).u64(number).finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let (kind, number) = (reader.u8()?, reader.u64()?);
        reader.end()?;
        Ok(match kind {
            MTU_MISMATCH => Self::MtuMismatch { own: (number >> 32) as u32, peer: number as u32 },
            NOT_LOCKED => Self::NotLocked { limit: number },
            NO_QUEUE_PAIR => Self::NoQueuePair,
            NO_PATH => Self::NoPath,
            OTHER_CONNECT_METHOD => Self::OtherConnectMethod,
            GID_TYPE_MISMATCH => {
                let kind = |number: u64| GidType::decode(u8::try_from(number).map_err(|_| Malformed)?);
                Self::GidTypeMismatch { own: kind(number >> 8)?, peer: kind(number & 0xff)? }
            }
            NOT_CONNECTED => Self::NotConnected { errno: i32::try_from(number).map_err(|_| Malformed)? },
            limit => {
                let kind = KINDS.get(usize::from(limit - LIMIT)).ok_or(Malformed)?;
                Self::Limit { kind: *kind, most: number }
            }
        })
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
                assert_eq!(Immediate::decode(said.encode()), Ok(said));
            }
        }
        let mark = Immediate { signal_slot: None, has_payload: false, piggyback: Piggyback::DrainMark };
        assert_eq!(Immediate::decode(mark.encode()), Ok(mark));
        assert_eq!(Immediate::decode(mark.encode() | SIGNAL), Err(Malformed), "a mark with a signal");
        assert_eq!(Immediate::decode(1 << 20), Err(Malformed));
        assert_eq!(Immediate::decode(STRIPE), Err(Malformed), "a part without a signal");
        assert_eq!(Immediate::decode(5), Err(Malformed), "a signal slot without a signal");
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
        let hello = PairHello { reads: 16, credits: 256, inbox_address: 1 << 50, signal_slots: 100, queues };
        let bytes = hello.encode();
        assert_eq!(PairHello::decode(&bytes), Ok(hello.clone()));
        assert_eq!(PairHello::decode(&bytes[1..]), Err(Malformed));
        assert_eq!(PairHello::decode(&bytes[..bytes.len() - 1]), Err(Malformed));
        let with = |queues| PairHello { queues, ..hello.clone() };
        let impossible = [
            with(vec![QueuePairHello { mtu: 9, ..queue }]),
            with(vec![QueuePairHello { nic: 1, ..queue }]),
            with(vec![queue, QueuePairHello { nic: NICS_MAX as u8, ..queue }]),
            with(vec![queue; QUEUE_PAIRS_MAX + 1]),
            with(Vec::new()),
            PairHello { credits: 0, ..hello.clone() },
        ];
        for hello in impossible {
            assert_eq!(PairHello::decode(&hello.encode()), Err(Malformed), "{hello:?}");
        }
        for kind in GidType::ALL {
            let hello = with(vec![QueuePairHello { kind, ..queue }]);
            assert_eq!(PairHello::decode(&hello.encode()), Ok(hello));
        }
        let mut other = bytes;
        other[0] = 99;
        assert_eq!(PairHello::decode(&other), Err(Malformed));
    }

    #[test]
    fn announcements_come_back_and_others_are_refused() {
        for known in [None, Some(RemoteRegion { bytes: 5, keys: [1, 2, 3, u32::MAX] })] {
            let said = Announcement { region: RegionKey(7 << 40), known };
            let bytes = said.encode();
            assert_eq!(Announcement::decode(&bytes), Ok(said));
            assert_eq!(Announcement::decode(&bytes[1..]), Err(Malformed));
            assert_eq!(Announcement::decode(&[&bytes[..], &[0]].concat()), Err(Malformed));
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

#[cfg(test)]
mod refusal_tests {
    use super::*;

    #[test]
    fn refusals_come_back_and_others_are_none() {
        let limits = KINDS.map(|kind| Refusal::Limit { kind, most: 1 << 40 });
        let others = [
            Refusal::MtuMismatch { own: 1024, peer: 4096 },
            Refusal::GidTypeMismatch { own: GidType::RoceV1, peer: GidType::InfiniBand },
            Refusal::NotConnected { errno: 22 },
            Refusal::NotLocked { limit: 65_536 },
            Refusal::NoQueuePair,
            Refusal::NoPath,
            Refusal::OtherConnectMethod,
        ];
        for refusal in limits.into_iter().chain(others) {
            assert_eq!(Refusal::decode(&refusal.encode()), Ok(refusal));
            assert_eq!(Refusal::decode(&refusal.encode()[..8]), Err(Malformed));
        }
        assert_eq!(Refusal::decode(&[GID_TYPE_MISMATCH; 9]), Err(Malformed));
        assert_eq!(Refusal::decode(&[NOT_CONNECTED + 1; 9]), Err(Malformed));
        assert_eq!(Refusal::decode(&[]), Err(Malformed));
    }

    #[test]
    fn both_ends_name_the_lengths_of_packets_each_from_its_side() {
        let cause = LossCause::from(PairError::MtuMismatch { own: 1024, peer: 4096 });
        let as_received = Refusal::of(&cause).expect("the peer is told").as_received();
        assert_eq!(as_received, PairError::MtuMismatch { own: 4096, peer: 1024 }.into());
        let cause = LossCause::from(PairError::GidTypeMismatch {
            own: GidType::RoceV2Local,
            peer: GidType::RoceV2Ipv4,
        });
        let as_received = Refusal::of(&cause).expect("the peer is told").as_received();
        assert_eq!(
            as_received,
            PairError::GidTypeMismatch { own: GidType::RoceV2Ipv4, peer: GidType::RoceV2Local }.into()
        );
    }
}
