//! The sockets of the two networks: addresses, listeners, options, and the meaning of their errors.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, acceptfrom_with, bind, connect, getpeername, getsockname, listen,
    socket_with, sockopt,
};
use sha2::{Digest, Sha256};

use super::{OpenError, listening_ip, packet};
use crate::device::{Address, DeviceConfig, LossCause};

/// The prefix of addresses of these fabrics.
const SCHEME: &str = "tcp:";

/// Connections that wait to be accepted; the kernel may allow fewer.
const BACKLOG: i32 = 4096;

/// The kernel probes an idle connection after this time, then in each interval.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(3);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(1);
const KEEP_ALIVE_PROBES: u32 = 5;

/// A host that acknowledges nothing for this time is silent.
const HOST_SILENT_LIMIT: Duration = Duration::from_secs(8);

/// The most bytes in flight to a rank on the same host; the kernel doubles the number for its own
/// needs.
const NEIGHBOUR_BUFFER_BYTES: usize = 512 << 10;

/// The network that carries the streams of a control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// Connections between any hosts.
    Tcp {
        /// Data connections of a pair in each direction, beside its stream.
        data_connections: u8,
    },
    /// Sockets of this host with packets and files, between processes of one user.
    Unix,
}

/// A listener that a peer can dial.
pub(super) enum DialTarget {
    Tcp(SocketAddr),
    Unix(String),
}

impl Network {
    pub(super) fn is_unix(self) -> bool {
        self == Self::Unix
    }

    /// Data connections of a pair in each direction.
    pub(super) fn data_connections(self) -> u8 {
        match self {
            Self::Tcp { data_connections } => data_connections,
            Self::Unix => 0,
        }
    }

    /// A new listener and its address. Beyond loopback the job has to have a secret that is valid
    /// beyond this host.
    pub(super) fn listen(
        self,
        config: &DeviceConfig,
        has_secret: bool,
    ) -> Result<(OwnedFd, Address), OpenError> {
        if self.is_unix() {
            return packet::bind_anywhere()
                .map_err(|source| OpenError::System { resource: "listening socket", source });
        }
        let ip = listening_ip(config.interface.as_deref(), config.address)?;
        if !ip.is_loopback() && !has_secret {
            return Err(OpenError::SecretRequired { address: ip });
        }
        if config.secret.is_none() {
            return Err(OpenError::NoSecret);
        }
        let (listener, bound) = listen_on(ip).map_err(|source| OpenError::Listen { address: ip, source })?;
        Ok((listener, Address(format!("{SCHEME}{bound}"))))
    }

    /// The listener of an address.
    pub(super) fn target(self, address: &Address) -> Option<DialTarget> {
        if self.is_unix() {
            return packet::parse(address).map(|name| DialTarget::Unix(name.to_owned()));
        }
        let address: SocketAddr = address.0.strip_prefix(SCHEME)?.parse().ok()?;
        (address.port() != 0 && !address.ip().is_unspecified()).then_some(DialTarget::Tcp(address))
    }

    /// Accepts a connection; returns the address that it came from. `None`: the connection has
    /// ended meanwhile, or is of another user of this host.
    pub(super) fn accept(self, listener: &OwnedFd) -> Result<Option<(OwnedFd, IpAddr)>, Errno> {
        if self.is_unix() {
            let socket = packet::accept(listener)?;
            let from = IpAddr::V4(Ipv4Addr::LOCALHOST);
            return Ok(packet::is_same_user(&socket).then_some((socket, from)));
        }
        let (socket, from) = acceptfrom_with(listener, flags())?;
        Ok(from.and_then(|from| SocketAddr::try_from(from).ok()).map(|from| (socket, from.ip())))
    }

    /// Sets the options of every connection. The kernel sizes the buffers by the path, except to a
    /// rank on the same host: that path has no wire to keep full, and bytes that wait in the kernel
    /// leave the cache.
    pub(super) fn tune(self, socket: &OwnedFd) -> io::Result<()> {
        if self.is_unix() {
            return Ok(());
        }
        let ends = [getsockname(socket)?, getpeername(socket)?.ok_or(Errno::NOTCONN)?];
        if let [Ok(own), Ok(peer)] = ends.map(SocketAddr::try_from)
            && own.ip() == peer.ip()
        {
            sockopt::set_socket_send_buffer_size(socket, NEIGHBOUR_BUFFER_BYTES)?;
        }
        sockopt::set_tcp_nodelay(socket, true)?;
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_keepidle(socket, KEEP_ALIVE_IDLE)?;
        sockopt::set_tcp_keepintvl(socket, KEEP_ALIVE_INTERVAL)?;
        sockopt::set_tcp_keepcnt(socket, KEEP_ALIVE_PROBES)?;
        Ok(())
    }

    /// Sets the options of a control stream: unacknowledged data ends it in bounded time. Data
    /// connections have no such limit, because a peer that computes and does not receive is not
    /// lost.
    pub(super) fn tune_control(self, socket: &OwnedFd) -> io::Result<()> {
        if self.is_unix() {
            return Ok(());
        }
        Ok(sockopt::set_tcp_user_timeout(socket, HOST_SILENT_LIMIT.as_millis() as u32)?)
    }
}

impl DialTarget {
    /// Whether others than processes of this host may listen there.
    pub(super) fn is_beyond_this_host(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }

    /// Its address, over TCP.
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(address) => Some(address.ip()),
            Self::Unix(_) => None,
        }
    }

    /// A socket that is connecting, or connected.
    pub(super) fn dial(&self) -> io::Result<OwnedFd> {
        let address = match self {
            Self::Tcp(address) => address,
            Self::Unix(name) => {
                let socket = packet::dial(name)?;
                let is_same_user = packet::is_same_user(&socket);
                return if is_same_user { Ok(socket) } else { Err(Errno::ACCESS.into()) };
            }
        };
        let socket = socket_with(family(address), SocketType::STREAM, flags(), None)?;
        match connect(&socket, address) {
            Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
            Err(error) => Err(error.into()),
        }
    }
}

/// The loss of a peer that an error of its connection means.
pub(crate) fn loss(error: &io::Error) -> LossCause {
    match error.kind() {
        io::ErrorKind::TimedOut => LossCause::HostSilent(HOST_SILENT_LIMIT),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => LossCause::ConnectionClosed,
        kind => LossCause::ConnectionBroke(kind),
    }
}

/// A socket that listens on this address, at a port of the kernel's choice, and its bound address.
fn listen_on(ip: IpAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let address = SocketAddr::new(ip, 0);
    let socket = socket_with(family(&address), SocketType::STREAM, flags(), None)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    let bound = rustix::net::getsockname(&socket)?;
    let bound = SocketAddr::try_from(bound).map_err(|_| io::Error::from(io::ErrorKind::AddrNotAvailable))?;
    Ok((socket, bound))
}

fn family(address: &SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn flags() -> SocketFlags {
    SocketFlags::CLOEXEC | SocketFlags::NONBLOCK
}

/// Sets the options of a TCP stream that carries messages, so that it ends in bounded time when its
/// other end is gone.
///
/// # Errors
///
/// The kernel's error.
pub fn tune_stream(socket: &OwnedFd) -> io::Result<()> {
    let network = Network::Tcp { data_connections: 0 };
    network.tune(socket)?;
    network.tune_control(socket)
}

/// Identifies the host and its process number space; zero when they are unknown.
#[must_use]
pub fn host_identity() -> [u8; 16] {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id");
    let space = std::fs::read_link("/proc/self/ns/pid");
    let (Ok(boot), Ok(space)) = (boot, space) else { return [0; 16] };
    let mut hash = Sha256::new();
    hash.update(boot);
    hash.update(space.as_os_str().as_encoded_bytes());
    let hash: [u8; 32] = hash.finalize().into();
    std::array::from_fn(|byte| hash[byte])
}
