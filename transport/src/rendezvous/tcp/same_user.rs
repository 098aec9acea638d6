//! The secret of a store that was given none: handed out over a Unix socket, to processes of the
//! same user.
//!
//! An address of loopback tells hosts apart, not users: whoever is on the host can connect to it.
//! At the other end of a Unix socket the kernel says who is there (`SO_PEERCRED`), to both. The
//! socket's name is abstract, so it is there in the network namespace in which the store's address
//! is, and is gone with the process.

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

/// Where the secret of the store at this address is handed out.
fn name(address: SocketAddr) -> String {
    format!("store.{address}")
}

/// The end at which rank 0 hands out the secret of its store.
pub(super) fn listen(address: SocketAddr) -> io::Result<OwnedFd> {
    packet::bind_named(&name(address))
}

/// Hands the secret to the next one that came, or turns it away and gives the number of its user.
pub(super) fn hand_out(listener: &OwnedFd, secret: &Secret) -> Result<Option<u32>, Errno> {
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

/// Why no secret was told.
#[derive(Debug)]
pub(super) enum AskError {
    /// Nobody hands one out: the store has one of its user's.
    NotHandedOut,
    /// The store is this user's.
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
pub(super) fn ask(address: SocketAddr, until: Nanos) -> Result<Secret, AskError> {
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
    // One more than there should be, so that a longer word is seen.
    let mut told = [0; TAG_BYTES + 1];
    loop {
        match packet::receive(&stream, &mut told) {
            Ok(packet) if packet.bytes == TAG_BYTES => return Ok(Secret::of_this_host(&told[..TAG_BYTES])),
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
