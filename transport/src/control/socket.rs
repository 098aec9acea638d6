//! Making sockets: addresses, options, and what their errors mean.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, connect, getpeername, getsockname, listen, socket_with,
    sockopt,
};
use sha2::{Digest, Sha256};

use crate::device::{Address, LossCause};

/// What an address of these fabrics begins with.
const SCHEME: &str = "tcp:";

/// Connections that wait to be accepted at most; the kernel may allow fewer.
const BACKLOG: i32 = 4096;

/// An idle connection is asked for a sign of life after this time, and then as often.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(3);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(1);
const KEEP_ALIVE_PROBES: u32 = 5;

/// A host that acknowledges nothing for so long is silent.
const HOST_SILENT_LIMIT: Duration = Duration::from_secs(8);

/// What waits to be received at a rank on the same host at most, in bytes; the kernel doubles it
/// for its own needs.
const NEIGHBOUR_BUFFER_BYTES: usize = 512 << 10;

/// The text for a socket address.
pub(super) fn to_text(address: SocketAddr) -> Address {
    Address(format!("{SCHEME}{address}"))
}

/// The socket address of a text.
pub(super) fn from_text(address: &Address) -> Option<SocketAddr> {
    let address: SocketAddr = address.0.strip_prefix(SCHEME)?.parse().ok()?;
    (address.port() != 0 && !address.ip().is_unspecified()).then_some(address)
}

/// What an error of a connection says about the peer.
pub(crate) fn loss(error: &io::Error) -> LossCause {
    match error.kind() {
        io::ErrorKind::TimedOut => LossCause::HostSilent(HOST_SILENT_LIMIT),
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => LossCause::ConnectionClosed,
        kind => LossCause::ConnectionBroke(kind),
    }
}

/// A socket that listens on this address, at a port of the kernel's choice, and where that is.
pub(super) fn listen_on(ip: IpAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let address = SocketAddr::new(ip, 0);
    let socket = socket_with(family(&address), SocketType::STREAM, flags(), None)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    let bound = rustix::net::getsockname(&socket)?;
    let bound = SocketAddr::try_from(bound).map_err(|_| io::Error::from(io::ErrorKind::AddrNotAvailable))?;
    Ok((socket, bound))
}

/// A socket that is connecting.
pub(super) fn dial(address: &SocketAddr) -> io::Result<OwnedFd> {
    let socket = socket_with(family(address), SocketType::STREAM, flags(), None)?;
    match connect(&socket, address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

fn family(address: &SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

fn flags() -> SocketFlags {
    SocketFlags::CLOEXEC | SocketFlags::NONBLOCK
}

/// Options of every connection. Buffers are left to the kernel, which sizes them by the path, but
/// on the way to a neighbour: there is no wire to keep full, and what waits in the kernel leaves
/// the cache.
pub(super) fn tune(socket: impl AsFd) -> io::Result<()> {
    let socket = socket.as_fd();
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

/// Options of a control stream: unanswered data ends it in bounded time, too. Not for data
/// connections, where a peer that computes and does not receive is no loss.
pub(super) fn tune_control(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_user_timeout(socket.as_fd(), HOST_SILENT_LIMIT.as_millis() as u32)?;
    Ok(())
}

/// Which host and process number space this is; zero when it cannot be told.
pub(super) fn host_identity() -> [u8; 16] {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id");
    let space = std::fs::read_link("/proc/self/ns/pid");
    let (Ok(boot), Ok(space)) = (boot, space) else { return [0; 16] };
    let mut hash = Sha256::new();
    hash.update(boot);
    hash.update(space.as_os_str().as_encoded_bytes());
    let hash: [u8; 32] = hash.finalize().into();
    std::array::from_fn(|byte| hash[byte])
}
