//! Unique ids: the address where the ranks of a communicator meet, and the secret with which they
//! may join.

use std::ffi::c_char;
use std::net::{IpAddr, Ipv4Addr, TcpListener, UdpSocket};
use std::sync::Mutex;

use pleach_transport::Secret;
use pleach_transport::auth::challenge;
use pleach_transport::mutex::lock;
use pleach_transport::rendezvous::{Launcher, Rendezvous, World};

use crate::result::{Failed, guarded, out, pleachResult_t};

/// Length of a unique id, in bytes.
pub const PLEACH_UNIQUE_ID_BYTES: usize = 128;

/// The first bytes of every id, which distinguish an id from other bytes.
const MAGIC: [u8; 8] = *b"pleach1\0";
const PORT_AT: usize = MAGIC.len();
const HOST_LEN_AT: usize = PORT_AT + 2;
const HOST_AT: usize = HOST_LEN_AT + 1;
const SECRET_BYTES: usize = 32;
const SECRET_AT: usize = PLEACH_UNIQUE_ID_BYTES - SECRET_BYTES;

/// The unique id of a communicator that is to be made. One process makes it with pleachGetUniqueId,
/// and the program hands it to all ranks. It holds a secret: every process that has the id can
/// join.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pleachUniqueId {
    /// Opaque.
    pub internal: [c_char; PLEACH_UNIQUE_ID_BYTES],
}

/// The ports of ids on which rank 0 does not listen yet. They are held so that no other process
/// takes them.
static RESERVED: Mutex<Vec<TcpListener>> = Mutex::new(Vec::new());

impl pleachUniqueId {
    fn new(host: IpAddr, port: u16) -> Self {
        let mut bytes = [0; PLEACH_UNIQUE_ID_BYTES];
        let host = host.to_string();
        bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
        bytes[PORT_AT..HOST_LEN_AT].copy_from_slice(&port.to_le_bytes());
        bytes[HOST_LEN_AT] = host.len() as u8;
        bytes[HOST_AT..HOST_AT + host.len()].copy_from_slice(host.as_bytes());
        // Two challenges, which are as random as the challenges of a handshake.
        let secret = [challenge(), challenge()].concat();
        bytes[SECRET_AT..].copy_from_slice(&secret[..SECRET_BYTES]);
        Self { internal: bytes.map(u8::cast_signed) }
    }

    fn read(&self) -> Option<(String, u16, Secret)> {
        let bytes = self.internal.map(c_char::cast_unsigned);
        let host_len = usize::from(bytes[HOST_LEN_AT]);
        if bytes[..MAGIC.len()] != MAGIC || HOST_AT + host_len > SECRET_AT {
            return None;
        }
        let host = std::str::from_utf8(&bytes[HOST_AT..HOST_AT + host_len]).ok()?;
        let port = u16::from_le_bytes([bytes[PORT_AT], bytes[PORT_AT + 1]]);
        host.parse::<IpAddr>().ok()?;
        Some((host.to_owned(), port, Secret::new(&bytes[SECRET_AT..])))
    }

    /// The world of a rank that joins by this id.
    pub(crate) fn world(&self, rank: u32, world_size: u32) -> Result<World, Failed> {
        let (host, port, secret) = self.read().ok_or_else(|| {
            Failed::argument(
                "the unique id is not one that pleachGetUniqueId has stored; hand on all 128 bytes",
            )
        })?;
        Ok(World {
            rank,
            world_size,
            local_rank: None,
            rendezvous: Some(Rendezvous::Tcp { host, port }),
            secret: Some(secret),
            launcher: Launcher::Arguments,
            ..World::alone()
        })
    }
}

/// Releases the port of an id, if this process holds it, so that rank 0 can listen there.
pub(crate) fn release(id: &pleachUniqueId) {
    let Some((_, port, _)) = id.read() else { return };
    let mut reserved = lock(&RESERVED);
    reserved.retain(|listener| listener.local_addr().map_or(true, |address| address.port() != port));
}

/// The address at which other hosts reach this host. It is the address of the variable
/// PLEACH_INTERFACE, or the source address of packets on the default route. A host without a
/// network has the loopback address.
fn own_address() -> Result<IpAddr, Failed> {
    if let Some(address) = named_address(std::env::var("PLEACH_INTERFACE").ok())? {
        return Ok(address);
    }
    let of_route = || -> std::io::Result<IpAddr> {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        // The address is reserved for documentation. No packet is sent; the system only chooses a
        // route.
        socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9))?;
        Ok(socket.local_addr()?.ip())
    };
    Ok(of_route().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)))
}

/// The address that the variable PLEACH_INTERFACE holds, if it is set.
fn named_address(variable: Option<String>) -> Result<Option<IpAddr>, Failed> {
    let Some(named) = variable.filter(|named| !named.is_empty()) else { return Ok(None) };
    match named.parse() {
        Ok(address) => Ok(Some(address)),
        Err(_) => Err(Failed::argument(format!(
            "PLEACH_INTERFACE is '{named}'; for pleachGetUniqueId give the address of the interface"
        ))),
    }
}

/// Stores a new unique id. The process that calls the function must be rank 0 of the communicator,
/// because the other ranks connect to its address. This is the address of the variable
/// PLEACH_INTERFACE, or that of the default route.
///
/// Ownership: `uniqueId` is NULL or points to a pleachUniqueId. Threads: any. Blocks: no.
///
/// Returns: pleachSuccess; pleachInvalidArgument if `uniqueId` is NULL or the variable is no
/// address; pleachSystemError if there is no port; pleachInternalError after a mistake of the
/// library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pleachGetUniqueId(uniqueId: *mut pleachUniqueId) -> pleachResult_t {
    guarded(|| {
        // SAFETY: the caller's promise.
        let stored = unsafe { out(uniqueId, "uniqueId") }?;
        let host = own_address()?;
        let refused =
            |error: std::io::Error| Failed::system(format!("no port of {host} can be had: {error}"));
        let listener = TcpListener::bind((host, 0)).map_err(refused)?;
        *stored = pleachUniqueId::new(host, listener.local_addr().map_err(refused)?.port());
        lock(&RESERVED).push(listener);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_variable_counts_as_one_that_is_not_set() {
        let address = |text: &str| named_address(Some(text.to_owned())).ok();
        assert_eq!(named_address(None).ok(), Some(None));
        assert_eq!(address(""), Some(None));
        assert_eq!(address("10.0.0.7"), Some(Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 7)))));
        assert_eq!(address("eth2"), None);
    }

    #[test]
    fn an_id_is_read_as_it_was_made_and_other_bytes_are_not() {
        let id = pleachUniqueId::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 7)), 4321);
        let (host, port, _) = id.read().expect("an id");
        assert_eq!((host.as_str(), port), ("10.0.0.7", 4321));
        let world = id.world(1, 3).expect("an id");
        assert_eq!((world.rank, world.world_size), (1, 3));
        for damaged in [0, HOST_LEN_AT, HOST_AT] {
            let mut other = id;
            other.internal[damaged] = -1;
            assert!(other.read().is_none(), "byte {damaged}");
        }
        assert!(pleachUniqueId { internal: [0; PLEACH_UNIQUE_ID_BYTES] }.read().is_none());
    }
}
