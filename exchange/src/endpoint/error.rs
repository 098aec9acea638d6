//! Why operations of an endpoint fail.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::auth::SecretError;
use pleach_transport::tls::{TlsError, TlsMode};
use pleach_transport::verbs::PortError;

use super::handshake::HandshakeError;
use crate::calls::CallError;
use crate::key::Key;
use crate::message::FailureKind;
use crate::table::{ReceiveError, SendError};

/// Why an endpoint was not opened.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenEndpointError {
    /// A variable has a wrong value.
    #[error("{variable}='{value}'; it takes {form}")]
    Variable {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// What it takes.
        form: &'static str,
    },
    /// The secret was not read.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// TLS cannot be used as it was asked for.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// TLS was asked for, and nothing would prove who is at the other end.
    #[error(
        "PLEACH_TLS={mode} without a secret or certificates: links of the exchange would not know their \
         peers; set PLEACH_SECRET_FILE (write one with 'pleach secret FILE') or PLEACH_TLS_CERT"
    )]
    NoKeys {
        /// What was asked for.
        mode: TlsMode,
    },
    /// A variable of RDMA has a wrong value.
    #[error(transparent)]
    Verbs(#[from] PortError),
    /// The address has another form, or its host has no address.
    #[error("no address to listen on: '{address}' ({source}); name HOST:PORT")]
    Address {
        /// The address.
        address: String,
        /// Why.
        source: Arc<io::Error>,
    },
    /// The system did not tell the address of the host in time.
    #[error(
        "no address of {address} was found within {waited:?}; name an IP address, or look at the resolver of \
         this host"
    )]
    NoLookup {
        /// The address.
        address: String,
        /// How long the system was waited for.
        waited: Duration,
    },
    /// The address is too long to be told to peers.
    #[error("the address '{address}' is too long")]
    LongAddress {
        /// The address.
        address: String,
    },
    /// The port is taken, or the host has no such address.
    #[error("cannot listen on {address} ({source}); name another port or address")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The port of metrics is taken, or the host has no such address.
    #[error("no metrics at {address} ({source}); name another port or address")]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// The system refuses a file or a thread.
    #[error("the system refuses a {resource} ({source}); raise its limit ('ulimit -n', 'ulimit -u')")]
    System {
        /// What.
        resource: &'static str,
        /// Why.
        source: io::Error,
    },
    /// No fabric has regions, and regions are required.
    #[error(
        "regions are required, and fabric '{fabric}' has none here: {reason}; take another fabric, or do \
         without PLEACH_REQUIRE=regions"
    )]
    NoRegions {
        /// The fabric.
        fabric: super::options::ExchangeFabric,
        /// Why.
        reason: Arc<str>,
    },
}

/// Why there is no link to a peer.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The address has another form, or its host is not known.
    #[error("no peer at '{address}' ({source}); name HOST:PORT")]
    Address {
        /// The address.
        address: Arc<str>,
        /// Why.
        source: Arc<io::Error>,
    },
    /// Nobody listens there, or there is no way.
    #[error("{peer} was not reached ({source}); look whether it runs, and at the port")]
    Unreachable {
        /// The peer.
        peer: Arc<str>,
        /// Why.
        source: Arc<io::Error>,
    },
    /// The peer did not answer in time.
    #[error("{peer} did not answer within {waited:?}; look whether it runs, or wait longer")]
    Timeout {
        /// The peer.
        peer: Arc<str>,
        /// How long it was waited for.
        waited: Duration,
    },
    /// The system did not tell the address of the peer's host in time.
    #[error(
        "no address of {peer} was found within {waited:?}; name an IP address, or look at the resolver of \
         this host"
    )]
    NoLookup {
        /// The peer.
        peer: Arc<str>,
        /// How long the system was waited for.
        waited: Duration,
    },
    /// The two programs do not go together.
    #[error("no link to {peer}: {source}")]
    Handshake {
        /// The peer.
        peer: Arc<str>,
        /// Why.
        source: HandshakeError,
    },
    /// The peer was started anew since the first link to it.
    #[error(
        "{peer} was restarted: it is incarnation {now:016x} and was {known:016x}; its old tensors are gone, \
         connect anew"
    )]
    Restarted {
        /// The peer.
        peer: Arc<str>,
        /// The incarnation that the receiver knows.
        known: u64,
        /// The incarnation now.
        now: u64,
    },
    /// This program's endpoint was closed.
    #[error("no link to {peer}: the endpoint was closed; open another one")]
    Closed {
        /// The peer.
        peer: Arc<str>,
    },
    /// Regions are required and there are none.
    #[error(
        "no memory is shared with {peer}: {reason}; take a fabric that both have, or do without \
         PLEACH_REQUIRE=regions"
    )]
    NoRegions {
        /// The peer.
        peer: Arc<str>,
        /// Why.
        reason: Arc<str>,
    },
}

/// Why a tensor was not received.
#[derive(Clone, pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveTensorError {
    /// There is no link to the peer.
    #[error("tensor {key} was not received: {source}")]
    Link {
        /// The key.
        key: Key,
        /// Why.
        source: LinkError,
    },
    /// The peer has no tensor, or is lost.
    #[error(transparent)]
    Call(#[from] CallError),
    /// The program sent itself no tensor.
    #[error(transparent)]
    Own(#[from] ReceiveError),
    /// The endpoint was closed while the program waited for a tensor of its own.
    #[error("the tensor was not received: the endpoint was closed; open another one")]
    Closed,
}

impl ReceiveTensorError {
    /// The kind, for programs.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Link { source: LinkError::Timeout { .. } | LinkError::NoLookup { .. }, .. } => {
                FailureKind::Timeout
            }
            Self::Link { source: LinkError::Restarted { .. }, .. } => FailureKind::Aborted,
            Self::Link { .. } | Self::Call(CallError::Lost { .. }) | Self::Closed => FailureKind::Unavailable,
            Self::Call(CallError::Timeout { .. }) => FailureKind::Timeout,
            Self::Call(CallError::TooManyCalls { .. } | CallError::NoMemory { .. }) => FailureKind::Exhausted,
            Self::Call(CallError::Failed { failure, .. }) => failure.kind,
            Self::Own(error) => FailureKind::from(error),
        }
    }
}

/// Why a tensor was not sent.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendTensorError {
    /// The table does not take it.
    #[error(transparent)]
    Table(#[from] SendError),
    /// The endpoint was closed.
    #[error("the tensor was not sent: the endpoint was closed; open another one")]
    Closed,
}

impl SendTensorError {
    /// The kind, for programs.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Table(SendError::Timeout { .. }) => FailureKind::Timeout,
            Self::Table(SendError::TooLarge { .. } | SendError::TooManySends { .. }) => {
                FailureKind::Exhausted
            }
            Self::Table(SendError::Aborted { .. } | SendError::CleanedUp { .. }) => FailureKind::Aborted,
            Self::Closed => FailureKind::Unavailable,
        }
    }
}
