//! Real stores for tests: etcd (Debian's `etcd-server`), and PyTorch's `TCPStore`.
//!
//! Each is a process of its own on a port of its own, and ends with the test. Where it is not
//! installed the test says so and is skipped.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Nodes of an etcd.
pub(crate) struct Etcd {
    /// `etcd`, or `etcds` where options name a certificate.
    scheme: &'static str,
    nodes: Vec<Child>,
    ports: Vec<u16>,
    folder: PathBuf,
}

impl Etcd {
    /// Starts so many nodes, with further options; `None`: etcd is not installed. `port` is the
    /// first of two for each node.
    pub(crate) fn start(count: u16, port: u16, options: &[&str]) -> Option<Self> {
        let folder = std::env::temp_dir().join(format!("pleach-etcd-{}-{port}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let peer = |node: u16| format!("http://127.0.0.1:{}", port + count + node);
        let cluster: Vec<String> = (0..count).map(|node| format!("n{node}={}", peer(node))).collect();
        let ports: Vec<u16> = (0..count).map(|node| port + node).collect();
        let (scheme, protocol) =
            if options.contains(&"--cert-file") { ("etcds", "https") } else { ("etcd", "http") };
        let mut etcd = Self { scheme, nodes: Vec::new(), ports, folder };
        for node in 0..count {
            let client = format!("{protocol}://127.0.0.1:{}", port + node);
            let started = Command::new("etcd")
                .args(["--name", &format!("n{node}")])
                .arg("--data-dir")
                .arg(etcd.folder.join(format!("n{node}")))
                .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer(node), "--initial-advertise-peer-urls", &peer(node)])
                .args(["--initial-cluster", &cluster.join(","), "--initial-cluster-token", &port.to_string()])
                .args(["--heartbeat-interval", "100", "--election-timeout", "1000"])
                .args(options)
                .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH.replace("aarch64", "arm64"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            etcd.nodes.push(started.ok()?);
        }
        Some(etcd)
    }

    /// Its address, with this prefix.
    pub(crate) fn address(&self, prefix: &str) -> String {
        let places: Vec<String> = self.ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("{}://{}/{prefix}", self.scheme, places.join(","))
    }

    /// The port of a node.
    #[allow(dead_code)] // Not every test asks a node by itself.
    pub(crate) fn port(&self, node: usize) -> u16 {
        self.ports[node]
    }

    /// Kills a node.
    pub(crate) fn kill(&mut self, node: usize) {
        let _ = self.nodes[node].kill();
        let _ = self.nodes[node].wait();
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        (0..self.nodes.len()).for_each(|node| self.kill(node));
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A server of PyTorch's `TCPStore`.
pub(crate) struct TorchStore {
    server: Child,
    port: u16,
}

/// What the server runs: it serves until its input ends.
const SERVE: &str = "
import sys
from torch.distributed import TCPStore
store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
store.set('of torch', 'its own')
print(store.port, flush=True)
sys.stdin.read()
";

impl TorchStore {
    /// Starts a server; `None`: there is no python with torch.
    pub(crate) fn start() -> Option<Self> {
        let mut server = Command::new(torch_python()?)
            .args(["-c", SERVE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut line = String::new();
        let output = server.stdout.take().expect("is piped");
        let read = BufReader::new(output).read_line(&mut line);
        let port = read.ok().and_then(|_| line.trim().parse().ok());
        let mut store = Self { server, port: 0 };
        store.port = port?;
        Some(store)
    }

    /// Its address.
    pub(crate) fn address(&self) -> String {
        format!("c10d://127.0.0.1:{}", self.port)
    }
}

impl Drop for TorchStore {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A python that has torch: that of the variable, or that which `.ci` keeps.
fn torch_python() -> Option<PathBuf> {
    let kept = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/pleach-ci/torch/bin/python"));
    let given = std::env::var_os("PLEACH_TEST_TORCH_PYTHON").map(PathBuf::from);
    given.or_else(kept).filter(|python| python.exists())
}
