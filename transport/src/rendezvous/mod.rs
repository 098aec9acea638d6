//! How ranks find each other: who is there, where, and with which settings.
//!
//! [`World`] says who this process is (from arguments or from a launcher's variables), a [`Store`]
//! is a small table that all ranks of a job can reach ([`FileStore`], [`TcpStore`]), and [`join()`]
//! is the meeting: all ranks claim their numbers, compare what must be equal, agree on a fabric and
//! connect.
//!
//! **Invariant:** every wait ends at a deadline, with an error that names the ranks that did not
//! come.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::Nanos;

mod environment;
mod error;
mod fabrics;
mod file;
mod gate;
mod join;
mod listening;
mod neighbours;
mod part;
mod pause;
mod record;
mod tcp;
mod world;

pub use environment::{Explicit, Found, Surroundings, Variables, WORLD_SIZE_MAX, WorldError, parse};
pub use error::JoinError;
pub use fabrics::{Fabric, FabricChoice, FabricError, Fabrics, Machine};
pub use file::FileStore;
pub use join::{DEFAULT_JOIN_TIMEOUT, JoinOptions, Joined, join, join_at, join_over};
pub use listening::NoAddress;
pub use neighbours::{Distance, Door, knock};
pub use part::PartOfStore;
pub use record::Difference;
pub use tcp::TcpStore;
pub use world::{Launcher, Rendezvous, RendezvousError, World};

/// Gives bytes to every decoder of what ranks and strangers say where ranks meet: for fuzzing.
///
/// # Panics
///
/// When what was decoded does not survive being encoded and decoded again.
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    // A record's texts are kept as they came, escaped, so it is not what was encoded.
    let _ = record::Record::decode(bytes);
    tcp::check_decoders(bytes);
}

/// Longest key, in bytes.
pub const KEY_BYTES_MAX: usize = 128;

/// Longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 16 * 1024;

/// Longest reason given to [`Store::fail`], in bytes; longer ones are cut.
pub const REASON_BYTES_MAX: usize = 4 * 1024;

/// What became of an attempt to claim a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// It is ours.
    Taken,
    /// It had a value already, which stays.
    Present(Vec<u8>),
}

/// A small table that all ranks of one job share. Values are written once and never change.
///
/// Keys consist of lower-case letters, digits, `-` and `/`. No call lasts longer than its deadline,
/// and dropping the store no longer than the deadline of the last call.
pub trait Store: Send {
    /// Sets `key`, which nobody else sets.
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

    /// Ends the waiting of all ranks with this reason (the first one given counts). Tries, but does
    /// not insist.
    fn fail(&mut self, reason: &str, deadline: Nanos);

    /// Says that all ranks are here: who comes later belongs to another job. Only rank 0's call has
    /// an effect.
    fn seal(&mut self, deadline: Nanos);

    /// The ends of the connection by which this rank reaches the store; `None` for a store that
    /// needs none.
    fn path(&self) -> Option<StorePath> {
        None
    }
}

/// The ends of the connection by which a rank reaches the store.
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
    /// Not all keys came in time.
    #[error("not all ranks came within {} ms: {} is missing", .waited.as_millis(), .keys.join(", "))]
    Missing {
        /// Which keys.
        keys: Vec<String>,
        /// How long was waited.
        waited: Duration,
        /// Who last tried to connect and was refused, and why.
        refused: Option<String>,
    },
    /// A rank has ended the meeting.
    #[error("{reason}")]
    Failed {
        /// As given to [`Store::fail`].
        reason: String,
    },
    /// Rank 0, which holds the store, is gone.
    #[error("rendezvous lost: {address} ({source}); look at what rank 0 says")]
    Lost {
        /// Where it was.
        address: String,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// The other end does not keep to the protocol.
    #[error("rendezvous broken: {address} sent what is no answer; look whether rank 0 runs the same version")]
    Protocol {
        /// Where.
        address: String,
    },
    /// The folder cannot be used.
    #[error("rendezvous folder unusable: {path} ({source}); name a folder that all ranks can write")]
    Folder {
        /// Which file or folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// A key or value outside the limits, or too many of them.
    #[error("rendezvous value refused: key '{key}' with {bytes} bytes; at most {VALUE_BYTES_MAX} fit")]
    Limit {
        /// Which key.
        key: String,
        /// Length of its value.
        bytes: usize,
    },
}

/// Why a store could not be opened.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Not loopback, and no secret.
    #[error(
        "secret required: {address} is not a loopback address; write one with 'pleach secret FILE', give it to all hosts, and set PLEACH_SECRET_FILE"
    )]
    SecretRequired {
        /// Which address.
        address: String,
    },
    /// The name is unknown.
    #[error("rendezvous host unknown: {address} ({source}); check the name in the rendezvous address")]
    Resolve {
        /// Which address.
        address: String,
        /// What the resolver said.
        #[source]
        source: io::Error,
    },
    /// Somebody else listens there.
    #[error(
        "port in use: rank 0 cannot listen on {address}; choose another port or end the process that has it"
    )]
    PortInUse {
        /// Where.
        address: String,
    },
    /// Rank 0 cannot listen.
    #[error(
        "rendezvous not opened: rank 0 cannot listen on {address} ({source}); name an address of rank 0's host"
    )]
    Listen {
        /// Where.
        address: String,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// This process has no file left for a connection.
    #[error(
        "rendezvous not reached: this process may open no more than {most} files; raise the limit ('ulimit -n')"
    )]
    Files {
        /// How many it may have open.
        most: u64,
    },
    /// Nobody answers.
    #[error(
        "rank 0 is missing: nobody answered at {address} within {} ms ({source}); start rank 0, or check the address{}", .waited.as_millis(), loopback_note(address)
    )]
    Unreachable {
        /// Where.
        address: String,
        /// How long was tried.
        waited: Duration,
        /// The last attempt's end.
        #[source]
        source: io::Error,
    },
    /// Something answers that is not a store of ours.
    #[error(
        "not a pleach rendezvous: {address} answers with something else (\"{}\"); choose another port", .answer.escape_ascii()
    )]
    Foreign {
        /// Where.
        address: String,
        /// The beginning of what it said.
        answer: Vec<u8>,
    },
    /// Another version of the protocol.
    #[error(
        "versions differ: {address} speaks rendezvous version {theirs}, this rank {own}; install one version on all hosts"
    )]
    Version {
        /// Where.
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
        /// Where.
        address: String,
    },
    /// All ranks of that job are there already.
    #[error(
        "world complete: the job at {place} has all its ranks and did not end within {} ms; start one process a rank, or use another rendezvous", .waited.as_millis()
    )]
    Complete {
        /// Address or folder.
        place: String,
        /// How long was tried.
        waited: Duration,
    },
    /// The folder belongs to another job that runs.
    #[error("rendezvous in use: {} has a rank 0 already ({holder}); start one process a rank, or use another folder", .folder.display())]
    Busy {
        /// Which folder.
        folder: PathBuf,
        /// Who holds it.
        holder: String,
    },
    /// The folder cannot be used.
    #[error("rendezvous folder unusable: {} ({source}); name a folder that all ranks can write", .path.display())]
    Folder {
        /// Which file or folder.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// The store, the folder, or a file in it, belongs to somebody else.
    #[error(
        "rendezvous of another user: {place} belongs to user {owner}, this process is of user {user}; start all ranks as one user, or give all the same PLEACH_SECRET_FILE and meet at tcp://HOST:PORT"
    )]
    Owner {
        /// Which address, file or folder.
        place: String,
        /// The user it belongs to.
        owner: u32,
        /// The user of this process.
        user: u32,
    },
    /// Other users may change the folder.
    #[error("rendezvous folder unsafe: {} is open to other users (mode {mode:o}); run 'chmod 700 {}'", .folder.display(), .folder.display())]
    Unsafe {
        /// Which folder.
        folder: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A link, which may lead anywhere.
    #[error("rendezvous folder unsafe: {} is a link; name the folder itself, or remove the link", .path.display())]
    Link {
        /// Which file or folder.
        path: PathBuf,
    },
    /// Rank 0 has not opened the folder.
    #[error("rank 0 is missing: it did not open {} within {} ms; start rank 0, or check the folder", .folder.display(), .waited.as_millis())]
    NoRankZero {
        /// Which folder.
        folder: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
}

/// Reminds who was told an address that means this host alone.
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

/// Refuses what no store keeps.
fn check(key: &str, value: &[u8]) -> Result<(), StoreError> {
    if is_key(key) && value.len() <= VALUE_BYTES_MAX {
        return Ok(());
    }
    Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() })
}

/// The longest beginning of `text` that is short enough to be a reason.
fn cut(text: &str) -> &str {
    let mut end = text.len().min(REASON_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
