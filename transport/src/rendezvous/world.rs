//! The rank of this process in its job, and the rendezvous address.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::backoff::Backoff;
use super::environment::{self, ExplicitWorld, ProcessInfo, WorldError};
use super::outside::store_of;
use super::outside::table::OutsideTable;
use super::{FileStore, OpenStoreError, Store, TcpStore};
use crate::auth::Secret;
use crate::clock::now;
use crate::{Nanos, Rank};

/// Places in one address at most.
const PLACES_MAX: usize = 16;

/// Longest prefix of keys, in bytes.
const PREFIX_BYTES_MAX: usize = 256;

/// How long one of several places is tried at a time.
const PLACE_LIMIT: Duration = Duration::from_millis(300);

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Name or address of the host.
    pub host: String,
    /// The port.
    pub port: u16,
}

impl Place {
    /// `None`: the text is no `HOST:PORT`.
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.parse().ok().filter(|&port| port != 0)?;
        let inner = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_name =
            |host: &str| host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte));
        let fits = match inner {
            Some(inner) => matches!(inner.parse(), Ok(IpAddr::V6(_))),
            None => !host.is_empty() && is_name(host),
        };
        fits.then(|| Self { host: inner.unwrap_or(host).to_owned(), port })
    }

    /// `None`: the text is no list of them.
    fn parse_list(text: &str) -> Option<Vec<Self>> {
        let places: Option<Vec<Self>> = text.split(',').map(Self::parse).collect();
        places.filter(|places| places.len() <= PLACES_MAX)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') {
            write!(formatter, "[{host}]:{port}")
        } else {
            write!(formatter, "{host}:{port}")
        }
    }
}

/// The rendezvous address.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rendezvous {
    /// `tcp://HOST:PORT`: rank 0 listens there, the others connect.
    Tcp {
        /// Name or address of rank 0's host.
        host: String,
        /// Its port.
        port: u16,
    },
    /// `tcp://HOST:PORT,HOST:PORT…`: as [`Rendezvous::Tcp`], at the first of these places that is
    /// of rank 0's host. Where a job takes processes later and the host is lost, another one of
    /// these hosts takes its place.
    TcpList {
        /// The places, two or more.
        places: Vec<Place>,
    },
    /// `etcd://HOST:PORT[,…]/PREFIX`: an etcd, at any of these nodes. `etcds://…`: with TLS. The
    /// variables of `etcdctl` say who asks it, and by which keys.
    Etcd {
        /// Whether it is asked with TLS.
        is_private: bool,
        /// The nodes.
        places: Vec<Place>,
        /// The beginning of all keys.
        prefix: String,
    },
    /// `c10d://HOST:PORT`: PyTorch's `TCPStore`, such as that of torchrun.
    C10d {
        /// The server.
        place: Place,
    },
    /// `file:///DIR`: a folder that all ranks can write.
    File {
        /// Absolute path.
        folder: PathBuf,
    },
    /// A folder of this job and user, which its ranks make and remove.
    JobFolder {
        /// Absolute path.
        folder: PathBuf,
    },
}

/// Why a text is not a rendezvous address.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad rendezvous address: '{text}'; write tcp://HOST:PORT or file:///DIR, or etcd[s]://HOST:PORT/PREFIX or c10d://HOST:PORT"
)]
pub struct RendezvousError {
    /// The text.
    pub text: String,
}

impl FromStr for Rendezvous {
    type Err = RendezvousError;

    fn from_str(text: &str) -> Result<Self, RendezvousError> {
        let bad = || RendezvousError { text: text.to_owned() };
        if let Some(path) = text.strip_prefix("file://") {
            let folder = PathBuf::from(path);
            return if folder.is_absolute() { Ok(Self::File { folder }) } else { Err(bad()) };
        }
        let is_private = text.starts_with("etcds://");
        let of_etcd = text.strip_prefix(if is_private { "etcds://" } else { "etcd://" });
        let parsed = if let Some(address) = of_etcd {
            let (places, prefix) = address.split_once('/').ok_or_else(bad)?;
            let prefix = prefix.trim_end_matches('/');
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b".-_/".contains(&byte);
            let is_prefix = (1..=PREFIX_BYTES_MAX).contains(&prefix.len()) && prefix.bytes().all(fits);
            let places = Place::parse_list(places).filter(|_| is_prefix);
            places.map(|places| Self::Etcd { is_private, places, prefix: prefix.to_owned() })
        } else if let Some(address) = text.strip_prefix("c10d://") {
            Place::parse(address).map(|place| Self::C10d { place })
        } else {
            let address = text.strip_prefix("tcp://").ok_or_else(bad)?;
            Place::parse_list(address).map(|mut places| {
                if places.len() > 1 {
                    return Self::TcpList { places };
                }
                let Place { host, port } = places.remove(0);
                Self::Tcp { host, port }
            })
        };
        parsed.ok_or_else(bad)
    }
}

fn list(places: &[Place]) -> String {
    let places: Vec<String> = places.iter().map(ToString::to_string).collect();
    places.join(",")
}

impl fmt::Display for Rendezvous {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(formatter, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(formatter, "tcp://{host}:{port}"),
            Self::TcpList { places } => write!(formatter, "tcp://{}", list(places)),
            Self::Etcd { is_private, places, prefix } => {
                write!(formatter, "etcd{}://{}/{prefix}", if *is_private { "s" } else { "" }, list(places))
            }
            Self::C10d { place } => write!(formatter, "c10d://{place}"),
            Self::File { folder } | Self::JobFolder { folder } => {
                write!(formatter, "file://{}", folder.display())
            }
        }
    }
}

/// The source of rank and world size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Arguments of the command line or the program.
    Arguments,
    /// `PLEACH_RANK` etc., as `pleach run` sets them.
    Pleach,
    /// `RANK` etc.
    Torchrun,
    /// `OMPI_COMM_WORLD_RANK` etc.
    OpenMpi,
    /// `PMI_RANK` etc.: MPICH, Intel MPI.
    Hydra,
    /// `SLURM_PROCID` etc.
    Srun,
    /// None: a world of one.
    Alone,
}

impl fmt::Display for Launcher {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Arguments => "the arguments",
            Self::Pleach => "PLEACH_RANK",
            Self::Torchrun => "torchrun",
            Self::OpenMpi => "Open MPI",
            Self::Hydra => "MPICH",
            Self::Srun => "srun",
            Self::Alone => "no launcher",
        })
    }
}

/// When the pairs of ranks of a group connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Connect {
    /// All when the group is joined: `n - 1` connections a rank.
    AtJoin,
    /// When the group is joined, those of ranks whose distance is a power of two, which are
    /// `2 log2 n` a rank at most; others when a call first needs them, under its deadline.
    OnUse,
}

/// Groups of so many ranks connect on use, where nothing is set.
pub const CONNECT_ON_USE_FROM: u32 = 16;

impl Connect {
    /// What a group of so many ranks does where nothing is set.
    #[must_use]
    pub fn of_ranks(ranks: u32) -> Self {
        if ranks < CONNECT_ON_USE_FROM { Self::AtJoin } else { Self::OnUse }
    }
}

impl fmt::Display for Connect {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::AtJoin => "at-join",
            Self::OnUse => "on-use",
        })
    }
}

/// The rank of this process in its job, and the rendezvous address.
#[derive(Clone, Debug)]
pub struct World {
    /// This rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world_size: u32,
    /// This rank's number among those of its host, if the launcher tells it.
    pub local_rank: Option<u32>,
    /// The rendezvous address; needed unless the rank is alone.
    pub rendezvous: Option<Rendezvous>,
    /// The job's secret; `None` where all ranks are of one user on one host.
    pub secret: Option<Secret>,
    /// A name for this host: ranks with different names do not share memory.
    pub host: Option<String>,
    /// Address or name of the network interface to use.
    pub interface: Option<String>,
    /// How long its ranks wait for each other, if it is set (`PLEACH_JOIN_TIMEOUT`).
    pub join_timeout: Option<Duration>,
    /// When pairs of its ranks connect, if it is set (`PLEACH_CONNECT`).
    pub connect: Option<Connect>,
    /// The file that the launcher has made for the last word of this process in a session
    /// ([`WordFile`](crate::witness::WordFile), `PLEACH_LAST_WORD`).
    pub last_word: Option<PathBuf>,
    /// The source of rank and world size.
    pub launcher: Launcher,
}

impl World {
    /// A world of this process alone.
    #[must_use]
    pub fn alone() -> Self {
        Self {
            rank: 0,
            world_size: 1,
            local_rank: Some(0),
            rendezvous: None,
            secret: None,
            host: None,
            interface: None,
            join_timeout: None,
            connect: None,
            last_word: None,
            launcher: Launcher::Alone,
        }
    }

    /// From explicit values, then this process's variables; `None` when there are none. Reads the
    /// secret file.
    ///
    /// # Errors
    ///
    /// See [`WorldError`].
    pub fn find(arguments: &ExplicitWorld) -> Result<Option<Self>, WorldError> {
        // Variables that are not UTF-8 are no numbers or addresses.
        let variables = std::env::vars_os()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let variables = variables.collect();
        environment::parse(arguments, &variables, &ProcessInfo::current())?
            .map(|found| found.open())
            .transpose()
    }

    /// As [`World::find`], or else a world of this process alone.
    ///
    /// # Errors
    ///
    /// See [`WorldError`].
    pub fn from_env() -> Result<Self, WorldError> {
        Ok(Self::find(&ExplicitWorld::default())?.unwrap_or_else(Self::alone))
    }

    /// Opens the ranks' store; `None` for a rank that is alone.
    ///
    /// # Errors
    ///
    /// See [`OpenStoreError`].
    pub fn open_store(&self, deadline: Nanos) -> Result<Option<Box<dyn Store>>, OpenStoreError> {
        Ok(match &self.rendezvous {
            _ if self.world_size == 1 => None,
            None => None,
            Some(Rendezvous::Tcp { host, port }) => {
                let place = Place { host: host.clone(), port: *port };
                Some(Box::new(self.open_at(&place, deadline)?))
            }
            Some(Rendezvous::TcpList { places }) => Some(Box::new(self.open_at_any(places, deadline)?)),
            Some(rendezvous @ (Rendezvous::Etcd { .. } | Rendezvous::C10d { .. })) => {
                let Some(store) = store_of(rendezvous)? else { return Ok(None) };
                Some(Box::new(OutsideTable::open(store, self.rank, self.secret.as_ref(), deadline)?))
            }
            Some(Rendezvous::File { folder }) => {
                Some(Box::new(FileStore::open(folder, self.rank, false, deadline)?))
            }
            Some(Rendezvous::JobFolder { folder }) => {
                Some(Box::new(FileStore::open(folder, self.rank, true, deadline)?))
            }
        })
    }

    fn open_at(&self, place: &Place, deadline: Nanos) -> Result<TcpStore, OpenStoreError> {
        TcpStore::open(&place.to_string(), self.rank, self.world_size, self.secret.as_ref(), deadline)
    }

    /// Rank 0 listens at the first place that is of its host. The others try all places in turn.
    fn open_at_any(&self, places: &[Place], deadline: Nanos) -> Result<TcpStore, OpenStoreError> {
        let mut backoff = Backoff::until(deadline);
        loop {
            let mut last = None;
            for place in places {
                let until = if self.rank == 0 { deadline } else { deadline.min(now() + PLACE_LIMIT) };
                match self.open_at(place, until) {
                    Ok(store) => return Ok(store),
                    // Of another host, out of reach, or not opened yet.
                    Err(
                        error @ (OpenStoreError::Listen { .. }
                        | OpenStoreError::Resolve { .. }
                        | OpenStoreError::Unreachable { .. }),
                    ) => last = Some(error),
                    Err(error) => return Err(error),
                }
            }
            match last {
                Some(error) if self.rank == 0 || !backoff.again() => return Err(error),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_prints_as_it_was_written() {
        for text in [
            "tcp://127.0.0.1:4000",
            "tcp://[::1]:1",
            "tcp://node-1.rack_2:65535",
            "tcp://a:1,[::1]:2,c:3",
            "etcd://a:2379/jobs/one",
            "etcd://a:1,b:2,[::1]:3/one",
            "etcds://a:1,b:2/one",
            "c10d://[::1]:29500",
            "file:///tmp/job",
        ] {
            let parsed: Rendezvous = text.parse().expect(text);
            assert_eq!(parsed.to_string(), text);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_forms_that_are() {
        let bad = [
            "",
            "tcp://",
            "tcp://host",
            "tcp://:1",
            "tcp://host:0",
            "tcp://host:65536",
            "tcp://host:x",
            "tcp://::1:5",
            "tcp://[::1]",
            "tcp://[host]:1",
            "tcp://a b:1",
            "tcp://a/b:1",
            "file://",
            "file://relative",
            "host:1",
            "http://host:1",
            "tcp://a:1,",
            "etcd://a:1",
            "etcd://a:1/",
            "etcds://a:1",
            "etcd://a/b",
            "etcd://a:1/b c",
            "c10d://a:1/b",
            "c10d://a:1,b:2",
        ];
        for text in bad {
            let error = text.parse::<Rendezvous>().expect_err(text).to_string();
            assert!(error.contains("tcp://HOST:PORT or file:///DIR"), "{error}");
        }
    }
}
