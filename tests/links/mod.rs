//! Hosts as network namespaces, joined by wires: pairs of virtual interfaces, each shaped by a
//! token bucket at both ends where it is to have a bandwidth. What no wire joins directly is
//! forwarded by hosts in between, along the fewest wires, so that ranks can meet; data goes there
//! only if an algorithm sends it.
//!
//! It takes root and `ip`, and for bandwidths `tc` and a kernel with `sch_tbf`.

use std::collections::VecDeque;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use pleach_transport::auth::challenge;
use pleach_transport::clock::now;

/// Numbers networks of this process. Relaxed: only uniqueness matters.
static NETWORKS: AtomicU32 = AtomicU32::new(0);

/// Where rank 0 listens, in a namespace of its own.
const PORT: u16 = 29_500;
/// How long all ranks of a command may take together.
const PATIENCE: Duration = Duration::from_secs(150);
/// Files that `ip netns exec` lays over those of `/etc`, in a folder a namespace.
const NAMESPACE_FILES: &str = "/etc/netns";
/// What a bucket holds at least, in bytes: some frames. It holds a millisecond's bytes where these
/// are more, as the kernel cuts what it sends at once into frames where a bucket has less room.
const BURST_BYTES: u32 = 32 << 10;
/// Bytes that a megabit per second carries in a millisecond.
const BYTES_PER_MEGABIT_AND_MS: u32 = 125;
/// The address of no device.
const NOBODY: &str = "02:00:00:00:00:01";
/// How long a frame may wait in a bucket before it is dropped. Longer than the data under way take,
/// so that nothing is.
const QUEUE_MS: u32 = 400;

/// A wire between two hosts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    pub(crate) ends: [usize; 2],
    /// As much as the machine can where there is none.
    pub(crate) megabits_per_s: Option<u32>,
}

/// Namespaces with wires between them, a topology file that says the same, and a secret. Gone when
/// dropped.
pub(crate) struct Hosts {
    pleach: PathBuf,
    names: Vec<String>,
    addresses: Vec<Ipv4Addr>,
    wires: Vec<Wire>,
    folder: PathBuf,
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {}: {}", arguments.join(" "), said.trim()))
}

impl Hosts {
    /// Hosts joined by these wires; `pleach` is the command that runs on them.
    ///
    /// Says why where this machine or user has no such networks.
    pub(crate) fn new(pleach: &Path, count: usize, wires: &[Wire]) -> Result<Self, String> {
        let (process, number) = (std::process::id(), NETWORKS.fetch_add(1, Ordering::Relaxed));
        let name = format!("pleach-{process}-{number}");
        let folder = std::env::temp_dir().join(format!("{name}-links"));
        std::fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let hosts = Self {
            pleach: pleach.to_owned(),
            names: (0..count).map(|host| format!("{name}-{host}")).collect(),
            // Of a range that is set aside for tests of networks between them.
            addresses: (0..count).map(|host| Ipv4Addr::new(198, 19, number as u8, host as u8 + 1)).collect(),
            wires: wires.to_vec(),
            folder,
        };
        hosts.build()?;
        Ok(hosts)
    }

    fn build(&self) -> Result<(), String> {
        if !rustix::process::geteuid().is_root() {
            return Err("not root".to_owned());
        }
        for (name, address) in self.names.iter().zip(&self.addresses) {
            run("ip", &["netns", "add", name])?;
            run("ip", &["-n", name, "link", "set", "lo", "up"])?;
            run("ip", &["-n", name, "addr", "add", &format!("{address}/32"), "dev", "lo"])?;
            // Ways there and back need not be the same.
            let forward = "cd /proc/sys/net/ipv4 && echo 1 > ip_forward && echo 0 > conf/all/rp_filter && \
                           echo 0 > conf/default/rp_filter";
            run("ip", &["netns", "exec", name, "sh", "-c", forward])?;
        }
        for (number, wire) in self.wires.iter().enumerate() {
            self.lay(number, wire)?;
        }
        for from in 0..self.names.len() {
            for to in (0..self.names.len()).filter(|&to| to != from) {
                self.route(from, to)?;
            }
        }
        let secret: String = challenge().iter().map(|byte| format!("{byte:02x}")).collect();
        self.write(&self.secret(), &secret, 0o600)?;
        self.toml().map_or(Ok(()), |toml| self.write(&self.topology(), &toml, 0o644))
    }

    fn write(&self, path: &Path, text: &str, mode: u32) -> Result<(), String> {
        let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
        let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| format!("{}: {error}", path.display()))
    }

    /// A pair of interfaces, each end shaped.
    fn lay(&self, number: usize, wire: &Wire) -> Result<(), String> {
        let device = format!("wire{number}");
        let [one, other] = wire.ends.map(|host| self.names[host].as_str());
        run(
            "ip",
            &["-n", one, "link", "add", &device, "type", "veth", "peer", "name", &device, "netns", other],
        )?;
        let queue = format!("{QUEUE_MS}ms");
        for name in [one, other] {
            run("ip", &["-n", name, "link", "set", &device, "up"])?;
            let Some(megabits_per_s) = wire.megabits_per_s else { continue };
            let rate = format!("{megabits_per_s}mbit");
            let burst = BURST_BYTES.max(megabits_per_s * BYTES_PER_MEGABIT_AND_MS).to_string();
            let shape = ["qdisc", "add", "dev", &device, "root", "tbf", "rate", &rate, "burst", &burst];
            run("ip", &[&["netns", "exec", name, "tc"], &shape[..], &["latency", &queue]].concat())?;
        }
        Ok(())
    }

    /// Towards another host, over the first of the fewest wires.
    fn route(&self, from: usize, to: usize) -> Result<(), String> {
        // By host: the wire towards `to`, and who is at its other end.
        let mut towards = vec![None; self.names.len()];
        let mut open = VecDeque::from([to]);
        while let Some(host) = open.pop_front() {
            for (number, wire) in self.wires.iter().enumerate().filter(|(_, wire)| wire.ends.contains(&host))
            {
                let there = wire.ends[usize::from(wire.ends[0] == host)];
                if there != to && towards[there].is_none() {
                    towards[there] = Some((number, host));
                    open.push_back(there);
                }
            }
        }
        let Some((wire, next)) = towards[from] else {
            return Err(format!("no wires lead from host {from} to {to}"));
        };
        let [target, source, gateway] = [to, from, next].map(|host| self.addresses[host].to_string());
        let device = format!("wire{wire}");
        let variant = ["route", "add", &target, "dev", &device, "src", &source];
        let how: &[&str] = if next == to { &["scope", "link"] } else { &["via", &gateway, "onlink"] };
        run("ip", &[&["-n", &self.names[from]], &variant[..], how].concat())
    }

    /// Cuts what one host sends to another over the wire between them, until it is mended: it is
    /// lost, and no error says so.
    #[allow(dead_code)] // Most leave their wires alone.
    pub(crate) fn cut(&self, from: usize, to: usize) -> Result<(), String> {
        self.neighbour("replace", from, to, &["lladdr", NOBODY, "nud", "permanent"])
    }

    /// Undoes [`Hosts::cut`].
    #[allow(dead_code)] // As `cut`.
    pub(crate) fn mend(&self, from: usize, to: usize) -> Result<(), String> {
        self.neighbour("del", from, to, &[])
    }

    /// Changes which device a host takes for another one.
    fn neighbour(&self, change: &str, from: usize, to: usize, how: &[&str]) -> Result<(), String> {
        let joins = |wire: &Wire| wire.ends.contains(&from) && wire.ends.contains(&to);
        let wire =
            self.wires.iter().position(joins).ok_or_else(|| format!("no wire joins {from} and {to}"))?;
        let (address, device) = (self.addresses[to].to_string(), format!("wire{wire}"));
        self.ip(from, &[&["neigh", change, &address, "dev", &device], how].concat())
    }

    /// A file that every host can read.
    pub(crate) fn secret(&self) -> PathBuf {
        self.folder.join("secret")
    }

    /// How many hosts there are.
    pub(crate) fn count(&self) -> usize {
        self.names.len()
    }

    /// Of a host, on which all others reach it.
    pub(crate) fn address(&self, host: usize) -> Ipv4Addr {
        self.addresses[host]
    }

    /// A folder that every host can write.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Says which addresses a host knows by which names, as `/etc/hosts` does.
    pub(crate) fn names(&self, host: usize, lines: &str) -> Result<(), String> {
        let folder = Path::new(NAMESPACE_FILES).join(&self.names[host]);
        let written =
            std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(folder.join("hosts"), lines));
        written.map_err(|error| format!("{}: {error}", folder.display()))
    }

    /// Runs `ip` on a host.
    pub(crate) fn ip(&self, host: usize, arguments: &[&str]) -> Result<(), String> {
        run("ip", &[&["-n", &self.names[host]], arguments].concat())
    }

    /// `pleach` on a host, without what this process's own variables say about ranks.
    pub(crate) fn pleach(&self, host: usize) -> Command {
        let mut command = self.command(host);
        command.arg(&self.pleach);
        command
    }

    /// A line of a shell on a host that finds `pleach`, in the folder of all hosts; without the
    /// variables of ranks, as [`Hosts::pleach`].
    pub(crate) fn shell(&self, host: usize, line: &str) -> Command {
        let mut command = self.command(host);
        let built = self.pleach.parent().expect("a command is in a folder");
        let before = std::env::var("PATH").unwrap_or_default();
        command.args(["sh", "-c", line]).env("PATH", format!("{}:{before}", built.display()));
        command.current_dir(&self.folder);
        command
    }

    /// A command on a host, which is given the program; without the variables of ranks, as
    /// [`Hosts::pleach`].
    pub(crate) fn command(&self, host: usize) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[host]]);
        let prefixes = ["PLEACH_", "OMPI_", "PMI_", "SLURM_"];
        for (name, _) in std::env::vars_os() {
            if prefixes.iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// How long each end of each wire that has a bandwidth has sent so far, by the bytes that the
    /// kernel has counted.
    pub(crate) fn busy_s(&self) -> Vec<f64> {
        let shaped = self
            .wires
            .iter()
            .enumerate()
            .filter_map(|(number, wire)| Some((number, wire.ends, wire.megabits_per_s?)));
        shaped
            .flat_map(|(number, ends, megabits_per_s)| ends.map(|host| (number, host, megabits_per_s)))
            .map(|(number, host, megabits_per_s)| {
                let mut command = self.command(host);
                command.arg("cat").arg(format!("/sys/class/net/wire{number}/statistics/tx_bytes"));
                let told = String::from_utf8(command.output().expect("ip starts").stdout).expect("is text");
                let bytes: u64 = told.trim().parse().expect("a number");
                bytes as f64 * 8e-6 / f64::from(megabits_per_s)
            })
            .collect()
    }

    /// A file that says how the hosts are joined, one rank on each, where all wires have a
    /// bandwidth.
    pub(crate) fn topology(&self) -> PathBuf {
        self.folder.join("topology.toml")
    }

    fn toml(&self) -> Option<String> {
        let mut toml = String::new();
        for host in 0..self.names.len() {
            toml += &format!("[[node]]\nname = \"h{host}\"\nkind = \"rank\"\n");
        }
        for wire in &self.wires {
            // Of a frame of 1,514 bytes 1,448 are data.
            let bandwidth = f64::from(wire.megabits_per_s?) / 8e3 * 1448.0 / 1514.0;
            let [from, to] = wire.ends;
            toml += &format!(
                "[[link]]\nfrom = \"h{from}\"\nto = \"h{to}\"\nbandwidth = {bandwidth:.6}\nlatency_us = 200.0\n"
            );
        }
        Some(toml)
    }

    /// Runs a subcommand of `pleach` as one rank on each host; what each printed, by rank.
    pub(crate) fn ranks(&self, arguments: &[&str]) -> Vec<Output> {
        let ranks = self.names.len();
        ended((0..ranks).map(|rank| self.start(rank, rank, ranks, arguments)).collect())
    }

    /// Starts a subcommand of `pleach` as a rank on a host.
    pub(crate) fn start(&self, host: usize, rank: usize, world_size: usize, arguments: &[&str]) -> Child {
        let mut command = self.pleach(host);
        command
            .args(arguments)
            .env("PLEACH_RANK", rank.to_string())
            .env("PLEACH_WORLD_SIZE", world_size.to_string())
            .env("PLEACH_RENDEZVOUS", format!("tcp://{}:{PORT}", self.addresses[0]))
            .env("PLEACH_SECRET_FILE", self.secret())
            .env("PLEACH_LOG", "info");
        // What is measured there is the wire, not the cipher of busy processors.
        if self.wires.iter().any(|wire| wire.megabits_per_s.is_some()) {
            command.env("PLEACH_TLS", "off");
        }
        command.spawn().expect("ip starts")
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // Of those that were not made there is nothing to remove. The wires go with their ends.
            let _ = run("ip", &["netns", "delete", name]);
            let _ = std::fs::remove_dir_all(Path::new(NAMESPACE_FILES).join(name));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Waits for all, each on a thread so that no pipe fills up; what does not end is killed.
pub(crate) fn ended(children: Vec<Child>) -> Vec<Output> {
    let waiters: Vec<_> = children
        .into_iter()
        .map(|child| {
            let process = rustix::process::Pid::from_child(&child);
            (process, thread::spawn(move || child.wait_with_output().expect("ends")))
        })
        .collect();
    let deadline = now() + PATIENCE;
    while waiters.iter().any(|(_, waiter)| !waiter.is_finished()) {
        if now() >= deadline {
            for (process, _) in waiters.iter().filter(|(_, waiter)| !waiter.is_finished()) {
                let _ = rustix::process::kill_process(*process, rustix::process::Signal::KILL);
            }
        }
        let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let _ = rustix::event::poll(&mut [], Some(&pause));
    }
    waiters.into_iter().map(|(_, waiter)| waiter.join().expect("only waits")).collect()
}

/// A field of a line that `pleach bench --json` printed.
pub(crate) fn number(line: &str, field: &str) -> f64 {
    let object: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
    object[field].as_f64().unwrap_or_else(|| panic!("{field} in {line}"))
}

/// Four hosts: around them wires of 160, 80, 160 and 80 Mbit/s, and one of 80 across. A ring goes
/// at the pace of its slowest wires; trees use all of them.
pub(crate) const IRREGULAR: [Wire; 5] = [
    Wire { ends: [0, 1], megabits_per_s: Some(160) },
    Wire { ends: [1, 2], megabits_per_s: Some(80) },
    Wire { ends: [2, 3], megabits_per_s: Some(160) },
    Wire { ends: [3, 0], megabits_per_s: Some(80) },
    Wire { ends: [0, 2], megabits_per_s: Some(80) },
];

/// Hosts of [`IRREGULAR`].
pub(crate) const IRREGULAR_HOSTS: usize = 4;

/// Times of all-reduces on the wires of [`IRREGULAR`], in seconds: their median, what the simulator
/// predicts, and what the bytes of all of them together take on the wire that is busy longest. By
/// each algorithm there is the same number of them.
pub(crate) fn all_reduce(hosts: &Hosts, algorithm: &str, bytes: &str) -> (f64, f64, f64) {
    let topology = hosts.topology();
    let topology = topology.to_string_lossy();
    let what = [
        "bench",
        "all-reduce",
        "--algorithm",
        algorithm,
        "--sizes",
        bytes,
        "--json",
        "--topology",
        &topology,
    ];
    let before = hosts.busy_s();
    let real = hosts.ranks(&[&what[..], &["--fabric", "tcp", "--warmup", "1", "--iterations", "5"]].concat());
    let busy_s = hosts.busy_s().into_iter().zip(before).map(|(after, before)| after - before);
    let busy_s = busy_s.fold(0.0, f64::max);
    for (rank, output) in real.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let predicted =
        Command::new(&hosts.pleach).args(what).args(["--fabric", "sim"]).output().expect("starts");
    assert!(predicted.status.success(), "{}", String::from_utf8_lossy(&predicted.stderr));
    let seconds = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let line = text.lines().next().expect("a row");
        assert_eq!(number(line, "errors"), 0.0, "{line}");
        number(line, "time_us_p50") / 1e6
    };
    (seconds(&real[0]), seconds(&predicted), busy_s)
}
