//! The reason for refusing a connection. The peer gets it, so that both ends report the cause.

use std::fmt;
use std::io;

use super::limits::LimitKind;
use super::pair_error::PairError;
use super::port::GidType;
use crate::device::LossCause;

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

    pub(super) fn encode(self) -> [u8; 9] {
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
        let mut bytes = [kind; 9];
        bytes[1..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (kind, number) = bytes.split_first()?;
        let number = u64::from_le_bytes(number.try_into().ok()?);
        Some(match *kind {
            MTU_MISMATCH => Self::MtuMismatch { own: (number >> 32) as u32, peer: number as u32 },
            NOT_LOCKED => Self::NotLocked { limit: number },
            NO_QUEUE_PAIR => Self::NoQueuePair,
            NO_PATH => Self::NoPath,
            OTHER_CONNECT_METHOD => Self::OtherConnectMethod,
            GID_TYPE_MISMATCH => {
                let kind =
                    |number: u64| usize::try_from(number).ok().and_then(|index| GidType::ALL.get(index));
                Self::GidTypeMismatch { own: *kind(number >> 8)?, peer: *kind(number & 0xff)? }
            }
            NOT_CONNECTED => Self::NotConnected { errno: i32::try_from(number).ok()? },
            limit => Self::Limit { kind: *KINDS.get(usize::from(limit - LIMIT))?, most: number },
        })
    }
}

#[cfg(test)]
mod tests {
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
            assert_eq!(Refusal::decode(&refusal.encode()), Some(refusal));
            assert_eq!(Refusal::decode(&refusal.encode()[..8]), None);
        }
        assert_eq!(Refusal::decode(&[GID_TYPE_MISMATCH; 9]), None);
        assert_eq!(Refusal::decode(&[NOT_CONNECTED + 1; 9]), None);
        assert_eq!(Refusal::decode(&[]), None);
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
