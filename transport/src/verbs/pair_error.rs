//! Why a pair of queue pairs is lost, or not made: what only this fabric can say of a loss.

use super::FABRIC;
use super::cm::CallFailure;
use super::limits::Kind as LimitKind;
use super::port::Kind as AddressKind;
use super::refusal::{KINDS_REMEDY, NOT_JOINED_REMEDY, Refusal};
use super::status::{WorkFailure, WorkStatus};
use crate::cuda::CudaError;
use crate::device::{BackendError, LossCause, LossKind};

/// How a loss was found out by RDMA: see [`LossCause::fabric_error`].
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    /// There is no queue pair to it, since this process may lock no more memory for the NIC.
    #[error(
        "the NIC needs locked memory to reach it, and this process may lock no more: the limit is {limit} bytes; raise it with 'ulimit -l unlimited', or for good by the lines '* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.conf"
    )]
    NotLocked {
        /// How many bytes this process may lock in all.
        limit: u64,
    },
    /// Its port carries packets of another length than this rank's.
    #[error(
        "its RDMA port carries packets of {peer} bytes, this rank's of {own}; give both ends' network interfaces the same MTU"
    )]
    PacketLengths {
        /// Longest packet of this rank's port, in bytes.
        own: u32,
        /// Longest packet of the peer's port, in bytes.
        peer: u32,
    },
    /// The address of its port is of a kind that does not meet this rank's.
    #[error(
        "the address of its RDMA port is {peer}, that of this rank's {own}, which do not meet; {KINDS_REMEDY}"
    )]
    AddressKinds {
        /// That of this rank's port.
        own: AddressKind,
        /// That of the peer's port.
        peer: AddressKind,
    },
    /// This rank's NIC does not join a queue pair to the peer's.
    #[error(
        "this rank's NIC joins no queue pair to it ({}); {NOT_JOINED_REMEDY}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    NotJoined {
        /// Why, as the system numbers it.
        errno: i32,
    },
    /// There is no queue pair to it, since this rank's NIC has no more of something.
    #[error("this rank's NIC has no more than {most} {kind}; {}", .kind.remedy())]
    Limit {
        /// Of what.
        kind: LimitKind,
        /// How many there may be.
        most: u64,
    },
    /// The connection manager did not join the two.
    #[error("{0}")]
    Call(CallFailure),
    /// It made no connection, and said why.
    #[error("it refused the connection: {0}")]
    Refused(Refusal),
    /// This rank's GPU does not show what its NIC has written to it.
    #[error(
        "this rank's GPU does not show what its NIC has written there ({0}); look whether 'nvidia-smi' works"
    )]
    NotShown(CudaError),
    /// Work on its queue pair failed.
    #[error("{0}")]
    QueuePair(WorkFailure),
}

impl PairError {
    fn kind(&self) -> LossKind {
        match self {
            Self::NotLocked { .. } | Self::Limit { .. } => LossKind::Exhausted,
            Self::PacketLengths { .. } | Self::AddressKinds { .. } => LossKind::Incompatible,
            Self::NotJoined { .. } => LossKind::Unreachable,
            Self::Call(failure) => match failure {
                CallFailure::Rejected { .. } => LossKind::Refused,
                CallFailure::NoAddress
                | CallFailure::NoRoute
                | CallFailure::NoAnswer
                | CallFailure::NotJoined => LossKind::Unreachable,
            },
            Self::Refused(_) => LossKind::Refused,
            Self::NotShown(_) => LossKind::Hardware,
            Self::QueuePair(failure) => match failure.status {
                WorkStatus::RetriesExceeded => LossKind::Unresponsive,
                WorkStatus::RemoteAccess => LossKind::AccessDenied,
                WorkStatus::RemoteRequest | WorkStatus::ReceiverNotReady | WorkStatus::BadResponse => {
                    LossKind::Protocol
                }
                WorkStatus::RemoteOperation
                | WorkStatus::LocalProtection
                | WorkStatus::LocalLength
                | WorkStatus::LocalRequest
                | WorkStatus::WindowNotBound
                | WorkStatus::LocalFailure => LossKind::Hardware,
                WorkStatus::Flushed | WorkStatus::Other(_) => LossKind::Broken,
            },
        }
    }
}

impl From<PairError> for LossCause {
    fn from(error: PairError) -> Self {
        Self::Fabric { kind: error.kind(), error: BackendError::new(FABRIC, error) }
    }
}
