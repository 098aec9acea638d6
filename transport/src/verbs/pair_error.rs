//! Losses and connect errors that only this fabric has.

use super::FABRIC;
use super::cm::ConnectFailure;
use super::limits::LimitKind;
use super::port::GidType;
use super::status::{WorkFailure, WorkStatus};
use super::wire::{GID_TYPE_REMEDY, NO_PATH_REMEDY, Refusal};
use crate::cuda::CudaError;
use crate::device::{BackendError, LossCause, LossKind};

/// The RDMA error behind a loss: see [`LossCause::fabric_error`].
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PairError {
    /// No queue pair was made, because this process may lock no more memory for the NIC.
    #[error(
        "the NIC needs locked memory to reach it, and this process may lock no more: the limit is {limit} bytes; raise it with 'ulimit -l unlimited', or for good by the lines '* soft memlock unlimited' and '* hard memlock unlimited' in /etc/security/limits.conf"
    )]
    NotLocked {
        /// The limit of locked memory of this process, in bytes.
        limit: u64,
    },
    /// The path MTUs of the two ports differ.
    #[error(
        "its RDMA port carries packets of {peer} bytes, this rank's of {own}; give both ends' network interfaces the same MTU"
    )]
    MtuMismatch {
        /// Longest packet of this rank's port, in bytes.
        own: u32,
        /// Longest packet of the peer's port, in bytes.
        peer: u32,
    },
    /// The GID types of the two ports do not fit.
    #[error(
        "the address of its RDMA port is {peer}, that of this rank's {own}, which do not meet; {GID_TYPE_REMEDY}"
    )]
    GidTypeMismatch {
        /// The type of this rank's GID.
        own: GidType,
        /// The type of the peer's GID.
        peer: GidType,
    },
    /// This rank's NIC did not connect the queue pair.
    #[error(
        "this rank's NIC joins no queue pair to it ({}); {NO_PATH_REMEDY}",
        std::io::Error::from_raw_os_error(*.errno)
    )]
    NotConnected {
        /// The system's error number.
        errno: i32,
    },
    /// No queue pair was made, because a limit of this rank's NIC is reached.
    #[error("this rank's NIC has no more than {most} {kind}; {}", .kind.remedy())]
    Limit {
        /// The resource.
        kind: LimitKind,
        /// The limit.
        most: u64,
    },
    /// The connection manager did not connect the two.
    #[error("{0}")]
    Connect(ConnectFailure),
    /// The peer refused the connection, for this reason.
    #[error("it refused the connection: {0}")]
    Refused(Refusal),
    /// The GPU could not be flushed, so bytes that the NIC wrote may not be visible.
    #[error(
        "this rank's GPU does not show what its NIC has written there ({0}); look whether 'nvidia-smi' works"
    )]
    GpuNotFlushed(CudaError),
    /// A work request on the queue pair failed.
    #[error("{0}")]
    QueuePair(WorkFailure),
}

impl PairError {
    fn kind(&self) -> LossKind {
        match self {
            Self::NotLocked { .. } | Self::Limit { .. } => LossKind::Exhausted,
            Self::MtuMismatch { .. } | Self::GidTypeMismatch { .. } => LossKind::Incompatible,
            Self::NotConnected { .. } => LossKind::Unreachable,
            Self::Connect(failure) => match failure {
                ConnectFailure::Rejected { .. } => LossKind::Refused,
                ConnectFailure::NoAddress
                | ConnectFailure::NoRoute
                | ConnectFailure::NoAnswer
                | ConnectFailure::NotConnected => LossKind::Unreachable,
            },
            Self::Refused(_) => LossKind::Refused,
            Self::GpuNotFlushed(_) => LossKind::Hardware,
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
