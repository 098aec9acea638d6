//! Links of a machine made of Soft-RoCE devices, changed and put back.

use std::fs;
use std::process::Command;
use std::time::Duration;

use pleach_transport::clock;

/// How long the kernel may take to give a port the addresses of its link.
const GIDS_LIMIT: Duration = Duration::from_secs(10);

/// What was changed, to be put back: commands of `ip` and `tc`, run in reverse order.
#[derive(Default)]
pub(crate) struct Changed {
    undo: Vec<String>,
    /// The hosts whose address was taken away.
    without_address: Vec<u32>,
}

/// Tests of this module may be on no other machine.
pub(crate) fn expect_machine() {
    let is_here = std::env::var_os("RDMA_VM").is_some_and(|value| value == "1");
    assert!(is_here, "this test changes links: run it on a machine made for it, with RDMA_VM=1");
}

fn run(line: &str) {
    let mut words = line.split(' ');
    let output = Command::new(words.next().expect("a command")).args(words).output();
    let output = output.unwrap_or_else(|error| panic!("{line}: {error}"));
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Whether the port of a host has its address, 10.77.0.H.
fn has_gid(host: u32) -> bool {
    let gids = fs::read_dir(format!("/sys/class/infiniband/rxe{host}/ports/1/gids")).expect("the port");
    let mut gids = gids.map(|gid| fs::read_to_string(gid.expect("a GID").path()));
    // An index without a GID cannot be read, or is zero.
    gids.any(|gid| gid.is_ok_and(|gid| gid.trim_end().ends_with(&format!(":ffff:0a4d:{host:04x}"))))
}

/// Waits until the port of a host has its address, or has not: the kernel changes the addresses of
/// ports some time after those of links.
fn await_gid(host: u32, is_there: bool) {
    let until = clock::now() + GIDS_LIMIT;
    while has_gid(host) != is_there {
        assert!(clock::now() < until, "rxe{host} keeps its addresses");
        std::thread::yield_now();
    }
}

impl Changed {
    /// Changes something; `undo` puts it back.
    pub(crate) fn make(&mut self, line: &str, undo: &[&str]) {
        expect_machine();
        run(line);
        self.undo.extend(undo.iter().rev().map(|line| (*line).to_owned()));
    }

    /// Takes a host's link away. Its routes go with it.
    pub(crate) fn link_down(&mut self, host: u32) {
        let route =
            format!("ip route replace 10.77.0.0/24 dev h{host} src 10.77.0.{host} table {}", 100 + host);
        self.make(&format!("ip link set h{host} down"), &[&format!("ip link set h{host} up"), &route]);
    }

    /// Takes a host's address away.
    pub(crate) fn without_address(&mut self, host: u32) {
        let address = format!("10.77.0.{host}/24 dev h{host}");
        let route =
            format!("ip route replace 10.77.0.0/24 dev h{host} src 10.77.0.{host} table {}", 100 + host);
        self.make(&format!("ip addr del {address}"), &[&format!("ip addr add {address}"), &route]);
        self.without_address.push(host);
        await_gid(host, false);
    }

    /// Gives a host another address besides.
    pub(crate) fn another_address(&mut self, host: u32) {
        let address = format!("10.77.0.{}/24 dev h{host}", 100 + host);
        self.make(&format!("ip addr add {address}"), &[&format!("ip addr del {address}")]);
    }

    /// Shortens the packets of a host's port.
    pub(crate) fn mtu(&mut self, host: u32, bytes: u32) {
        self.make(&format!("ip link set h{host} mtu {bytes}"), &[&format!("ip link set h{host} mtu 9000")]);
    }

    /// Loses all that a host sends.
    pub(crate) fn deaf(&mut self, host: u32) {
        self.make(
            &format!("tc qdisc add dev h{host} root netem loss 100%"),
            &[&format!("tc qdisc del dev h{host} root")],
        );
    }

    /// Delays and loses what a host sends.
    pub(crate) fn lossy(&mut self, host: u32) {
        self.make(
            &format!("tc qdisc add dev h{host} root netem delay 1ms loss 1%"),
            &[&format!("tc qdisc del dev h{host} root")],
        );
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        for line in self.undo.drain(..).rev() {
            run(&line);
        }
        for host in self.without_address.drain(..) {
            await_gid(host, true);
        }
    }
}
