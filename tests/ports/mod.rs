//! Ports for processes that a test starts, which listen there later than the test chooses them.
//!
//! The kernel's choice of a port (port 0) is no such port: when it is closed again, the kernel may
//! give it to another test, or to the near end of any connection. So a port here lies below the
//! kernel's range, and a name among the abstract Unix sockets keeps other tests away from it.
//!
//! **Invariant:** a port is given to one test alone, of all processes of this host, until the
//! process of this test ends.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Below the kernel's range of ports, which begins at 32768 by default.
const PORTS: std::ops::Range<u16> = 10_000..30_000;

/// The first of `count` ports in a row that nobody listens on.
pub(crate) fn reserve(count: u16) -> u16 {
    let name = |port: u16| SocketAddr::from_abstract_name(format!("pleach-test-port-{port}"));
    let take = |port: u16| UnixListener::bind_addr(&name(port).expect("a short name")).ok();
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    // Each process begins elsewhere, so that few meet.
    let begin = std::process::id() as usize * 31 % PORTS.len();
    for first in PORTS.cycle().skip(begin).take(PORTS.len()) {
        let ports = first..first + count;
        let Some(names) = ports.clone().map(take).collect::<Option<Vec<_>>>() else { continue };
        if ports.clone().all(is_free) {
            // Kept until the process ends.
            std::mem::forget(names);
            return first;
        }
    }
    panic!("no {count} ports in a row are free among {PORTS:?}");
}
