//! Sockets: addresses, options, and the meaning of their errors.

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

/// The text for a socket address.
pub(super) fn to_text(address: SocketAddr) -> Address {
    Address(format!("{SCHEME}{address}"))
}

/// The socket address of a text.
pub(super) fn from_text(address: &Address) -> Option<SocketAddr> {
    let address: SocketAddr = address.0.strip_prefix(SCHEME)?.parse().ok()?;
    (address.port() != 0 && !address.ip().is_unspecified()).then_some(address)
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

/// Sets the options of every connection. The kernel sizes the buffers by the path, except to a rank
/// on the same host: that path has no wire to keep full, and bytes that wait in the kernel leave
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

/// Sets the options of a control stream: unacknowledged data ends it in bounded time. Data
/// connections have no such limit, because a peer that computes and does not receive is not lost.
pub(super) fn tune_control(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_tcp_user_timeout(socket.as_fd(), HOST_SILENT_LIMIT.as_millis() as u32)?;
    Ok(())
}

/// Identifies the host and its process number space; zero when they are unknown.
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
