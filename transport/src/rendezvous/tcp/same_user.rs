//! The secret of a store without a configured one: given over a Unix socket, to processes of the
//! same user.
//!
//! A loopback address distinguishes hosts, not users: every process of the host can connect. On a
//! Unix socket the kernel reports the user of the other end (`SO_PEERCRED`), to both ends. The
//! socket's name is abstract, so it exists in the network namespace of the store's address, and
//! disappears with the process.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::Nanos;
use crate::auth::{Secret, TAG_BYTES};
use crate::clock::now;
use crate::control::packet::{self, ReceiveError};
use crate::device::WakeSource;

/// The socket's name of the store at this address.
fn name(address: SocketAddr) -> String {
    format!("store.{address}")
}

/// The listener at which rank 0 gives out the secret of its store.
pub(super) fn listen(address: SocketAddr) -> io::Result<OwnedFd> {
    packet::bind_named(&name(address))
}

/// Gives the secret to the next process that connects, or rejects it and returns its user.
pub(super) fn give_secret(listener: &OwnedFd, secret: &Secret) -> Result<Option<u32>, Errno> {
    let stream = packet::accept(listener)?;
    match packet::peer_user(&stream) {
        Some(user) if user == packet::own_user() => {
            // The stream is new and has room. If it has none, the other end asks again.
            let _ = packet::send(&stream, secret.as_bytes(), &[]);
            Ok(None)
        }
        user => Ok(user),
    }
}

/// Why the secret was not given.
#[derive(Debug)]
pub(super) enum AskError {
    /// The store has a configured secret.
    NotHandedOut,
    /// The store belongs to this user.
    OtherUser(u32),
    /// Trying again may help.
    System(io::Error),
}

impl From<Errno> for AskError {
    fn from(errno: Errno) -> Self {
        Self::System(errno.into())
    }
}

/// Asks for the secret of the store at this address.
pub(super) fn request_secret(address: SocketAddr, until: Nanos) -> Result<Secret, AskError> {
    let stream = packet::dial(&name(address)).map_err(|errno| match errno {
        Errno::CONNREFUSED => AskError::NotHandedOut,
        errno => errno.into(),
    })?;
    match packet::peer_user(&stream) {
        Some(user) if user == packet::own_user() => {}
        Some(user) => return Err(AskError::OtherUser(user)),
        None => return Err(AskError::System(io::ErrorKind::PermissionDenied.into())),
    }
    let stream = Arc::new(stream);
    // One byte more than expected, so that a longer message is detected.
    let mut received = [0; TAG_BYTES + 1];
    loop {
        match packet::receive(&stream, &mut received) {
            Ok(packet) if packet.bytes == TAG_BYTES => {
                return Ok(Secret::of_this_host(&received[..TAG_BYTES]));
            }
            Ok(_) => return Err(AskError::System(io::ErrorKind::ConnectionAborted.into())),
            Err(ReceiveError::System(Errno::AGAIN | Errno::INTR)) => {
                let left = until.since(now());
                if left.is_zero() {
                    return Err(AskError::System(io::ErrorKind::TimedOut.into()));
                }
                WakeSource::File(Arc::clone(&stream)).wait(left);
            }
            Err(ReceiveError::System(errno)) => return Err(errno.into()),
            Err(ReceiveError::Violation(_)) => {
                return Err(AskError::System(io::ErrorKind::InvalidData.into()));
            }
        }
    }
}
