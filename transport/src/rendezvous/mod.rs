//! The rendezvous: how the ranks of a job find each other and compare their settings.
//!
//! [`World`] describes this process (from arguments or from a launcher's variables). A [`Store`] is
//! a small table that all ranks of a job can access ([`FileStore`], [`TcpStore`], or a table in a
//! store outside of the job). [`Registers`] outlive all of its processes. [`join()`] runs
//! the join protocol: all ranks claim their numbers, compare settings that must be equal, agree on
//! a fabric and connect.
//!
//! **Invariant:** every wait ends at a deadline, with an error that names the missing ranks.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::Nanos;
use crate::device::{Protection, ProtocolViolation};

mod backoff;
mod deferred_responder;
mod device_factory;
mod environment;
mod error;
mod file;
mod join;
mod listening;
mod neighbours;
mod outside;
mod prefix_store;
mod record;
mod registers;
mod seats;
mod tcp;
mod world;

pub use device_factory::{DeviceFactory, Fabric, FabricChoice, FabricError, SystemDevices};
pub use environment::{
    ExplicitWorld, ParsedWorld, ProcessInfo, Variables, WORLD_SIZE_MAX, WorldError, parse,
};
pub use error::JoinError;
pub use file::FileStore;
pub use join::{
    DEFAULT_JOIN_TIMEOUT, JoinOptions, Joined, KnownRanks, OpenedPart, join, join_at, join_over, join_to_some,
};
pub use listening::NoAddress;
pub use neighbours::{ProbeListener, ProbeOutcome, probe};
pub use outside::OutsideError;
pub use prefix_store::PrefixStore;
pub use record::{Difference, host_name};
pub use registers::{Registers, has_registers};
pub use seats::{
    Arrival, Founding, MemberAddresses, Presence, SeatGrant, SeatRequest, SeatServer, Terms, arrive, ask,
};
pub use tcp::TcpStore;
pub use world::{CONNECT_ON_USE_FROM, Connect, Launcher, Place, Rendezvous, RendezvousError, World};

/// Decodes bytes with every decoder of the rendezvous: for fuzzing.
///
/// # Panics
///
/// When a decoded value does not survive encoding and decoding.
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    // A record's texts stay escaped, so encoding it again gives other bytes.
    let _ = record::RankRecord::decode(bytes);
    tcp::check_decoders(bytes);
    outside::check_decoders(bytes);
}

/// Longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 128;

/// Longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 16 * 1024;

/// Longest reason given to [`Store::fail`], in bytes; longer ones are cut.
pub const REASON_BYTES_MAX: usize = 4 * 1024;

/// The result of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// This rank set the key.
    Taken,
    /// The key had this value already, which stays.
    Present(Vec<u8>),
}

/// A small table that all ranks of one job share. Values are written once and never change.
///
/// Keys consist of lower-case letters, digits, `-` and `/`. No call takes longer than its deadline,
/// and dropping the store takes no longer than the deadline of the last call.
pub trait Store: Send {
    /// Sets `key`, which no other rank sets.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    fn set(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<(), StoreError>;

    /// Sets `key` if nobody has; of several ranks that try, one succeeds.
    ///
    /// # Errors
    ///
    /// See [`StoreError`].
    fn claim(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<Claim, StoreError>;

    /// The values of all `keys`, once they are there. Waits for them until `until`, and for the
    /// store's answer until `deadline`.
    ///
    /// # Errors
    ///
    /// [`StoreError::Missing`] at `until`, [`StoreError::Failed`] as soon as any rank called
    /// [`Store::fail`].
    fn wait(&mut self, keys: &[String], until: Nanos, deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError>;

    /// Ends the waits of all ranks with this reason (the first one counts). A best effort.
    fn fail(&mut self, reason: &str, deadline: Nanos);

    /// Declares that all ranks are here: later ones belong to another job. Only rank 0's call has
    /// an effect.
    fn seal(&mut self, deadline: Nanos);

    /// The ends of this rank's connection to the store; `None` for a store without connections.
    fn path(&self) -> Option<StorePath> {
        None
    }

    /// Why no rank comes any more, if that is known here. Asked while a rank waits for something
    /// else than the store.
    fn ended(&self) -> Option<String> {
        None
    }
}

/// The ends of a rank's connection to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StorePath {
    /// The address of the rank.
    pub local: IpAddr,
    /// The address of the store.
    pub remote: IpAddr,
}

/// Why a store could not be used.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Not all keys were set in time.
    #[error("not all ranks came within {} ms: {} is missing", .waited.as_millis(), .keys.join(", "))]
    Missing {
        /// The missing keys.
        keys: Vec<String>,
        /// How long this rank waited.
        waited: Duration,
        /// The last rank that was refused, and why.
        refused: Option<String>,
    },
    /// A rank has ended the rendezvous.
    #[error("{reason}")]
    Failed {
        /// As given to [`Store::fail`].
        reason: String,
    },
    /// Rank 0, which holds the store, is gone.
    #[error("rendezvous lost: {address} ({source}); look at what rank 0 says")]
    Lost {
        /// The address.
        address: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The other end broke the protocol.
    #[error("rendezvous broken: {address} sent what is no answer; look whether rank 0 runs the same version")]
    Protocol {
        /// Its address.
        address: String,
    },
    /// The folder cannot be used.
    #[error("rendezvous folder unusable: {path} ({source}); name a folder that all ranks can write")]
    Folder {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A key or value outside the limits, a key that is set already, or too many of them.
    #[error(
        "rendezvous value refused: key '{key}' with {bytes} bytes; a key is set once, a value has at most \
         {VALUE_BYTES_MAX} bytes, and the world size limits the number of keys"
    )]
    Limit {
        /// The key.
        key: String,
        /// Length of its value.
        bytes: usize,
    },
    /// The store outside of the job is of no use.
    #[error(transparent)]
    Outside(#[from] OutsideError),
}

/// Why a store could not be opened.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenStoreError {
    /// Not loopback, and no secret.
    #[error(
        "secret required: {address} is not a loopback address; write one with 'pleach secret FILE', give it to all hosts, and set PLEACH_SECRET_FILE"
    )]
    SecretRequired {
        /// The address.
        address: String,
    },
    /// The name is unknown.
    #[error("rendezvous host unknown: {address} ({source}); check the name in the rendezvous address")]
    Resolve {
        /// The address.
        address: String,
        /// The resolver's error.
        #[source]
        source: io::Error,
    },
    /// Another process listens there.
    #[error(
        "port in use: rank 0 cannot listen on {address}; choose another port or end the process that has it"
    )]
    PortInUse {
        /// The address.
        address: String,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rendezvous not opened: rank 0 cannot listen on {address} ({source}); name an address of rank 0's host"
    )]
    Listen {
        /// The address.
        address: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// This process may open no more files.
    #[error(
        "rendezvous not reached: this process may open no more than {most} files; raise the limit ('ulimit -n')"
    )]
    Files {
        /// The limit of open files.
        most: u64,
    },
    /// No answer.
    #[error(
        "rank 0 is missing: nobody answered at {address} within {} ms ({source}); start rank 0, or check the address{}", .waited.as_millis(), loopback_note(address)
    )]
    Unreachable {
        /// The address.
        address: String,
        /// How long this rank tried.
        waited: Duration,
        /// The error of the last attempt.
        #[source]
        source: io::Error,
    },
    /// The server at the address is not a store.
    #[error(
        "not a pleach rendezvous: {address} answers with something else (\"{}\"); choose another port", .answer.escape_ascii()
    )]
    Foreign {
        /// The address.
        address: String,
        /// The beginning of its answer.
        answer: Vec<u8>,
    },
    /// Another version of the protocol.
    #[error(
        "versions differ: {address} speaks rendezvous version {theirs}, this rank {own}; install one version on all hosts"
    )]
    Version {
        /// The address.
        address: String,
        /// This rank's.
        own: u16,
        /// Rank 0's.
        theirs: u16,
    },
    /// The secrets differ.
    #[error(
        "wrong secret: {address} has another one than this rank; give all ranks the same PLEACH_SECRET_FILE"
    )]
    WrongSecret {
        /// The address.
        address: String,
    },
    /// TLS cannot be used as it was asked for.
    #[error(transparent)]
    Tls(#[from] crate::tls::TlsError),
    /// Rank 0 does not protect the connection as this rank does.
    #[error(
        "TLS differs: rank 0 at {address} {theirs} on this connection and this rank {own}; set PLEACH_TLS, PLEACH_TLS_CERT, PLEACH_TLS_KEY and PLEACH_TLS_CA alike on all hosts"
    )]
    Protection {
        /// The address.
        address: String,
        /// This rank's protection.
        own: Protection,
        /// Rank 0's.
        theirs: Protection,
    },
    /// TLS with rank 0 failed.
    #[error("no TLS with rank 0 at {address}: {violation}")]
    Violated {
        /// The address.
        address: String,
        /// What rank 0 did.
        violation: ProtocolViolation,
    },
    /// All ranks of that job have joined already.
    #[error(
        "world complete: the job at {place} has all its ranks and did not end within {} ms; start one process a rank, or use another rendezvous", .waited.as_millis()
    )]
    Complete {
        /// Address or folder.
        place: String,
        /// How long this rank tried.
        waited: Duration,
    },
    /// The folder belongs to another job that runs.
    #[error("rendezvous in use: {} has a rank 0 already ({holder}); start one process a rank, or use another folder", .folder.display())]
    Busy {
        /// The folder.
        folder: PathBuf,
        /// The process that holds it.
        holder: String,
    },
    /// The folder cannot be used.
    #[error("rendezvous folder unusable: {} ({source}); name a folder that all ranks can write", .path.display())]
    Folder {
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The store, the folder, or a file in it belongs to another user.
    #[error(
        "rendezvous of another user: {place} belongs to user {owner}, this process is of user {user}; start all ranks as one user, or give all the same PLEACH_SECRET_FILE and meet at tcp://HOST:PORT"
    )]
    Owner {
        /// The address, file or folder.
        place: String,
        /// Its owner.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Other users may change the folder.
    #[error("rendezvous folder unsafe: {} is open to other users (mode {mode:o}); run 'chmod 700 {}'", .folder.display(), .folder.display())]
    Unsafe {
        /// The folder.
        folder: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A symbolic link, which may lead anywhere.
    #[error("rendezvous folder unsafe: {} is a link; name the folder itself, or remove the link", .path.display())]
    Link {
        /// The file or folder.
        path: PathBuf,
    },
    /// Rank 0 has not opened the folder.
    #[error("rank 0 is missing: it did not open {} within {} ms; start rank 0, or check the folder", .folder.display(), .waited.as_millis())]
    NoRankZero {
        /// The folder.
        folder: PathBuf,
        /// How long this rank waited.
        waited: Duration,
    },
    /// The place belongs to another job that runs.
    #[error("rendezvous in use: a job runs at {place}; start one process a rank, or use another rendezvous")]
    InUse {
        /// The address.
        place: String,
    },
    /// Rank 0 has not come to the place.
    #[error(
        "rank 0 is missing: it did not come to {place} within {} ms; start rank 0, or check the address", .waited.as_millis()
    )]
    NobodyThere {
        /// The address.
        place: String,
        /// How long this rank waited.
        waited: Duration,
    },
    /// The store outside of the job is of no use.
    #[error(transparent)]
    Outside(#[from] OutsideError),
}

/// A note for loopback addresses, which only this host reaches.
fn loopback_note(address: &str) -> &'static str {
    match address.parse() {
        Ok(address) if SocketAddr::ip(&address).is_loopback() => ", which only ranks of its own host reach",
        _ => "",
    }
}

/// Whether `key` may be used.
fn is_key(key: &str) -> bool {
    !key.is_empty()
        && key.len() <= KEY_BYTES_MAX
        && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-/".contains(&byte))
}

/// Checks the limits of keys and values.
fn check(key: &str, value: &[u8]) -> Result<(), StoreError> {
    if is_key(key) && value.len() <= VALUE_BYTES_MAX {
        return Ok(());
    }
    Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() })
}

/// The longest prefix of `text` that fits a reason.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(REASON_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
