//! A store outside of the job that can be out of reach: processes reach it through this one, which
//! passes on what both sides send, and for a while does not.

use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs as _};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use pleach::transport::Nanos;
use pleach::transport::clock::now;
use pleach::transport::mutex::lock;
use pleach::transport::rendezvous::{Place, Rendezvous};

use crate::cli::CommandError;

/// How long the store is out of reach at a time.
const AWAY: Duration = Duration::from_secs(1);

/// How long connecting to the store may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// What stands between the processes and the store.
pub(crate) struct Between {
    /// Where processes find it.
    rendezvous: Rendezvous,
    way: Arc<Mutex<Way>>,
}

#[derive(Default)]
struct Way {
    away_until: Nanos,
    /// Both ends of all connections.
    streams: Vec<TcpStream>,
}

impl Between {
    /// On the way to the store at this address.
    pub(crate) fn start(rendezvous: &Rendezvous) -> Result<Self, CommandError> {
        let failed = |error| CommandError::failed(format!("no way to the store: {error}; see 'ulimit -a'"));
        let way = Arc::new(Mutex::new(Way::default()));
        let pass_on = |place: &Place| -> io::Result<Place> {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let port = listener.local_addr()?.port();
            let (place, way) = (place.clone(), Arc::clone(&way));
            thread::Builder::new().spawn(move || {
                for here in listener.incoming().map_while(Result::ok) {
                    // Who gets no answer finds the store away.
                    let _ = connect(here, &place, &way);
                }
            })?;
            Ok(Place { host: Ipv4Addr::LOCALHOST.to_string(), port })
        };
        let rendezvous = match rendezvous {
            Rendezvous::Etcd { is_private: false, places, prefix } => {
                let places = places.iter().map(pass_on).collect::<io::Result<_>>().map_err(failed)?;
                Rendezvous::Etcd { is_private: false, places, prefix: prefix.clone() }
            }
            Rendezvous::C10d { place } => Rendezvous::C10d { place: pass_on(place).map_err(failed)? },
            Rendezvous::Etcd { .. } => {
                return Err(refused(
                    "its certificate names the store, and chaos stands between; give an etcd:// address",
                ));
            }
            Rendezvous::File { .. } => {
                return Err(refused(
                    "it is a folder, which this command cannot take away; give an etcd:// or c10d:// address",
                ));
            }
            _ => {
                return Err(refused(
                    "the members make the records by themselves there; give an etcd:// or c10d:// address with --rendezvous",
                ));
            }
        };
        Ok(Self { rendezvous, way })
    }

    /// Where processes find the store.
    pub(crate) fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// The store is out of reach for a while.
    pub(crate) fn take_away(&self) {
        let mut way = lock(&self.way);
        way.away_until = now() + AWAY;
        for stream in way.streams.drain(..) {
            // It may be closed already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn refused(reason: &str) -> CommandError {
    CommandError::typed(format!("no store to take away: --faults store, and {reason}"))
}

/// Passes on what comes, to the end or until the store is out of reach.
fn connect(here: TcpStream, place: &Place, way: &Mutex<Way>) -> io::Result<()> {
    let address = (place.host.as_str(), place.port).to_socket_addrs()?.next();
    let there = TcpStream::connect_timeout(&address.ok_or(io::ErrorKind::NotFound)?, CONNECT_LIMIT)?;
    let ends = [(here.try_clone()?, there.try_clone()?), (there.try_clone()?, here.try_clone()?)];
    {
        let mut way = lock(way);
        if now() < way.away_until {
            return Ok(());
        }
        // Those that are closed have no other end.
        way.streams.retain(|stream| stream.peer_addr().is_ok());
        way.streams.extend([here, there]);
    }
    for (mut from, mut to) in ends {
        thread::Builder::new().spawn(move || {
            let _ = io::copy(&mut from, &mut to);
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
        })?;
    }
    Ok(())
}
