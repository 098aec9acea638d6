//! Stores outside of a job, which outlive all of its processes: etcd, and PyTorch's `TCPStore`.
//!
//! An [`OutsideStore`] changes single keys, each change at once or not at all. Two things are built
//! on it: the table where ranks meet ([`table`]), which lives as long as the process that holds it,
//! and the registers of a job ([`Registers`](super::Registers)), which outlive every process.
//!
//! **Invariants:** all that lies in a store carries a MAC by the job's secret, over the bytes and
//! over the key ([`sealed`]), so no value is taken that another program wrote, or that was written
//! to another key. Every request ends at a deadline. A change whose answer was lost is asked for
//! again: no two values are equal, so whoever made a change recognises it.

use std::io;
use std::net::{ToSocketAddrs, UdpSocket};
use std::time::Duration;

use super::backoff::Backoff;
use super::world::Place;
use super::{Rendezvous, StorePath};
use crate::Nanos;

pub(super) mod c10d;
#[cfg(feature = "etcd")]
pub(super) mod etcd;
#[cfg(all(feature = "etcd", feature = "tls"))]
mod etcd_tls;
pub(super) mod sealed;
pub(super) mod table;
#[cfg(all(test, feature = "etcd"))]
mod tests;

/// See [`super::check_decoders`].
pub(super) fn check_decoders(bytes: &[u8]) {
    sealed::check_decoder(bytes);
    table::check_decoder(bytes);
    #[cfg(feature = "etcd")]
    etcd::check_decoders(bytes);
}

/// Longest value in a store, in bytes: a record of 4,096 members with room for its MAC.
pub(super) const SEALED_BYTES_MAX: usize = 1 << 20;

/// Why a store outside of the job was of no use.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OutsideError {
    /// No answer.
    #[error("store not reached: no answer of {address} in time ({source}); start it, or check the address")]
    Unreachable {
        /// The address.
        address: String,
        /// The error of the last attempt.
        #[source]
        source: io::Error,
    },
    /// It answers, and cannot do it now: it has no leader, or too few of its nodes run.
    #[error("store not ready: {address} says \"{reason}\"; look whether most of its nodes run")]
    NotReady {
        /// The address.
        address: String,
        /// What it says.
        reason: String,
    },
    /// It does not let this process read or write.
    #[error(
        "store refuses: {address} says \"{reason}\"; give ETCDCTL_USER=NAME:PASSWORD of a user that reads and writes all \
         keys under the prefix, or name a store without users"
    )]
    Refused {
        /// The address.
        address: String,
        /// What it says.
        reason: String,
    },
    /// This process and an etcd do not agree by which keys they talk.
    #[error(
        "no TLS to etcd: {problem}; set ETCDCTL_CACERT, and ETCDCTL_CERT and ETCDCTL_KEY if the store asks for a \
         certificate, as for etcdctl"
    )]
    Access {
        /// What is wrong, of which variable or address.
        problem: String,
    },
    /// It takes no more bytes.
    #[error(
        "store full: {address} says \"{reason}\"; compact and defragment it, then run 'etcdctl alarm disarm'"
    )]
    Full {
        /// The address.
        address: String,
        /// What it says.
        reason: String,
    },
    /// Something else listens there.
    #[error("no {kind}: {address} answers with something else (\"{}\"); check the address", .answer.escape_ascii())]
    Foreign {
        /// What was expected.
        kind: &'static str,
        /// The address.
        address: String,
        /// The beginning of its answer.
        answer: Vec<u8>,
    },
    /// A value without a MAC by this job's secret.
    #[error(
        "store not trusted: what lies under '{key}' at {address} was not written with this job's secret; give all ranks \
         the same PLEACH_SECRET_FILE, or take another prefix and look who writes there"
    )]
    Forged {
        /// The key.
        key: String,
        /// The address.
        address: String,
    },
    /// There is no secret.
    #[error(
        "secret required: {address} is read and written by others too; write a secret with 'pleach secret FILE', give it to \
         all hosts, and set PLEACH_SECRET_FILE"
    )]
    SecretRequired {
        /// The address.
        address: String,
    },
    /// The program was built without it.
    #[error("no etcd: this program was built without the feature '{feature}'; build it with it")]
    NotBuilt {
        /// The feature.
        feature: &'static str,
    },
    /// A folder cannot be used.
    #[error("store folder unusable: {path} ({source}); name a folder that all hosts can write")]
    Folder {
        /// The file or folder.
        path: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

/// What a change of a key has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Exchanged {
    /// The key has the new value.
    Written,
    /// The key has another value than the expected one: this one, or none.
    Present(Option<Vec<u8>>),
}

/// A change of one key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change<'a> {
    /// The value that the key has to have; `None`: it has none.
    pub(super) expected: Option<&'a [u8]>,
    /// The value that it gets; not empty, and no other one is equal.
    pub(super) value: &'a [u8],
    /// The key ends with this lease, where the store can do that.
    #[cfg_attr(not(feature = "etcd"), expect(dead_code, reason = "etcd alone has leases"))]
    pub(super) lease: Option<&'a Lease>,
}

/// A sign of life of the process that renews it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Lease {
    /// Chosen by its owner.
    pub(super) name: String,
    /// The store's number of it.
    pub(super) number: u64,
}

/// What one observer has seen of a lease.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pulse {
    /// The count of renewals, and when it was seen first.
    count: Option<(u64, Nanos)>,
}

/// A store outside of the job.
pub(super) trait OutsideStore: Send {
    /// Its address, for messages.
    fn address(&self) -> &str;

    /// Another connection to it.
    fn again(&self) -> Box<dyn OutsideStore>;

    /// Changes a key if it has the expected value.
    fn exchange(&mut self, key: &str, change: Change<'_>, deadline: Nanos)
    -> Result<Exchanged, OutsideError>;

    /// The value of a key.
    fn read(&mut self, key: &str, deadline: Nanos) -> Result<Option<Vec<u8>>, OutsideError>;

    /// Makes a lease, which lasts for the store's own short time after each renewal.
    fn lease(&mut self, name: &str, deadline: Nanos) -> Result<Lease, OutsideError>;

    /// A lease by which this process says that a member of the job lives.
    fn presence(&mut self, deadline: Nanos) -> Result<Lease, OutsideError>;

    /// How often a lease is renewed.
    fn beat(&self) -> Duration;

    /// Renews a lease; false: it has run out.
    fn renew(&mut self, lease: &Lease, deadline: Nanos) -> Result<bool, OutsideError>;

    /// Ends a lease of this process, as far as possible.
    fn revoke(&mut self, lease: &Lease, deadline: Nanos);

    /// Whether the owner of a lease renews it; `None`: that is not known yet.
    fn is_alive(
        &mut self,
        lease: &Lease,
        pulse: &mut Pulse,
        deadline: Nanos,
    ) -> Result<Option<bool>, OutsideError>;

    /// Whether a member of a job lives that meets here. It takes the time of a lease at most.
    fn is_inhabited(&mut self, deadline: Nanos) -> Result<bool, OutsideError>;

    /// The ends of a connection to it.
    fn path(&self) -> Option<StorePath>;
}

/// The store at a rendezvous address; `None`: no store outside of the job is there.
pub(super) fn store_of(rendezvous: &Rendezvous) -> Result<Option<Box<dyn OutsideStore>>, OutsideError> {
    match rendezvous {
        Rendezvous::C10d { place } => Ok(Some(Box::new(c10d::C10dStore::new(place.clone())))),
        #[cfg(feature = "etcd")]
        Rendezvous::Etcd { is_private, places, prefix } => {
            Ok(Some(Box::new(etcd::EtcdStore::open(*is_private, places.clone(), prefix)?)))
        }
        #[cfg(not(feature = "etcd"))]
        Rendezvous::Etcd { .. } => Err(OutsideError::NotBuilt { feature: "etcd" }),
        _ => Ok(None),
    }
}

/// The address of this host towards a place, and the place's own. Nothing is sent: the kernel looks
/// up the route.
fn path_to(place: &Place) -> Option<StorePath> {
    let remote = (place.host.as_str(), place.port).to_socket_addrs().ok()?.next()?;
    let any = if remote.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(remote).ok()?;
    Some(StorePath { local: socket.local_addr().ok()?.ip(), remote: remote.ip() })
}

/// Tries again until the deadline what fails for a moment.
fn retried<T>(
    deadline: Nanos,
    mut attempt: impl FnMut() -> Result<T, OutsideError>,
) -> Result<T, OutsideError> {
    let mut backoff = Backoff::until(deadline);
    loop {
        match attempt() {
            Err(OutsideError::Unreachable { .. } | OutsideError::NotReady { .. }) if backoff.again() => {}
            result => return result,
        }
    }
}
