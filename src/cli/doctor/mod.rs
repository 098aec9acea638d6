//! `pleach doctor`: checks this machine, or a pair of machines, and shows the commands that repair
//! them.
//!
//! A check is a function from a [`Machine`] to [`Finding`]s; one file a subject. All checks run at
//! once, each on a thread of its own, so that a check whose file does not answer delays no other.
//! [`peer`] meets the other machine of a pair, and [`compare`] compares both.

use std::fmt::Write;
use std::fs::OpenOptions;
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::Duration;

use pleach::transport::auth::Secret;
use pleach::transport::clock;
use pleach::transport::verbs::port::{Port, ports};
use pleach::transport::verbs::survey::DeviceReport;
use pleach::transport::verbs::{Connect, PortError, VerbsOptions, port};
use serde_json::{Value, json};

use crate::cli::CommandError;
use crate::cli::doctor::compare::Statement;
use crate::cli::doctor::peer::{ListenAddress, PeerReport};
use crate::cli::output::{print, print_json};

mod compare;
mod counters;
mod gpu;
mod limits;
pub(crate) mod network;
mod pci;
mod peer;
mod processor;
mod rdma;
#[cfg(test)]
mod tests;

/// How long checks may take before they are given up.
const CHECKS_LIMIT: Duration = Duration::from_secs(15);

/// Arguments of `pleach doctor`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pleach doctor\n  pleach doctor --json | jq '.findings[] | select(.level == \"problem\")'\n  \
    pleach doctor --listen              # on one host\n  pleach doctor --peer 10.0.0.5       # on another: both report on the pair\n\n\
    Each line is ok, unknown (the check had no result), a warning (it works, but not as well as it could) or a problem.\n\
    The line below a warning or a problem is the command that repairs it, or shows more. The exit status is 1 if there\n\
    is a problem. PLEACH_INTERFACE, PLEACH_HOST and all PLEACH_VERBS_ variables have the same effect as for ranks.\n\
    Except over loopback, a pair needs the secret of its jobs: PLEACH_SECRET_FILE."
)]
pub(crate) struct Arguments {
    /// Also check the pair with this host, on which 'pleach doctor --listen' runs
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with = "listen")]
    peer: Option<String>,
    /// Wait for the other host of a pair [default: 0.0.0.0:9401]
    #[arg(long, value_name = "[IP:]PORT", num_args = 0..=1, default_missing_value = "9401")]
    listen: Option<ListenAddress>,
    /// How long to wait for the other host
    #[arg(long, value_name = "SECONDS", default_value_t = 300, requires = "listen", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    wait: u64,
    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

/// Runs `pleach doctor`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let machine = Machine::here();
    let met = meet(arguments, &machine)?;
    let mut report = Report {
        host: machine.text("proc/sys/kernel/hostname").unwrap_or_else(|| "unknown host".to_owned()),
        uses: uses(&machine),
        findings: look(&machine, CHECKS),
    };
    if let Some(PeerReport { own, theirs, reached, address }) = met {
        let there = theirs.value("host").unwrap_or("unknown host");
        report.host = format!("{} with {there} ({})", report.host, address.ip());
        report.findings.extend(compare::check(&own, &theirs, &reached));
    }
    if arguments.json {
        print_json("report", &report.json())?;
    } else {
        print("report", &report.text())?;
    }
    verdict(&report)
}

fn meet(arguments: &Arguments, machine: &Machine) -> Result<Option<PeerReport>, CommandError> {
    if arguments.peer.is_none() && arguments.listen.is_none() {
        return Ok(None);
    }
    let file = std::env::var_os("PLEACH_SECRET_FILE").filter(|file| !file.is_empty()).map(PathBuf::from);
    let secret = file.as_deref().map(Secret::from_file).transpose().map_err(CommandError::usage)?;
    let statement = |local: IpAddr| Statement::of(machine, local);
    match (&arguments.peer, arguments.listen) {
        (Some(target), _) => peer::dial(target, source(machine)?, secret.as_ref(), &statement).map(Some),
        (None, Some(ListenAddress(address))) => {
            peer::listen(address, secret.as_ref(), Duration::from_secs(arguments.wait), &statement).map(Some)
        }
        (None, None) => Ok(None),
    }
}

/// The address that `PLEACH_INTERFACE` means.
fn source(machine: &Machine) -> Result<Option<IpAddr>, CommandError> {
    let Some(wanted) = machine.wish.as_ref().ok().and_then(|wish| wish.interface.as_deref()) else {
        return Ok(None);
    };
    if let Ok(address) = wanted.trim_matches(['[', ']']).parse() {
        return Ok(Some(address));
    }
    let index = machine.number(&format!("sys/class/net/{wanted}/ifindex"));
    let own = machine.addresses.iter().find(|(owner, _)| Some(u64::from(*owner)) == index);
    own.map(|(_, address)| Some(*address)).ok_or_else(|| {
        CommandError::usage(format!(
            "no such interface: PLEACH_INTERFACE='{wanted}'; name one that 'ip addr' shows, with an address"
        ))
    })
}

fn verdict(report: &Report) -> Result<(), CommandError> {
    match report.count(Level::Problem) {
        0 => Ok(()),
        problems => Err(CommandError::failed(format!(
            "{}: {}; run the commands below them, and pleach doctor again",
            counted(problems, "problem"),
            report.host
        ))),
    }
}

/// A subject, and the function that checks it.
type Check = (&'static str, fn(&Machine) -> Vec<Finding>);

const CHECKS: &[Check] = &[
    ("limits", limits::check),
    ("processors and memory", processor::check),
    ("sockets", network::check),
    ("RDMA", rdma::check),
    ("RDMA links", counters::check),
    ("PCI", pci::check),
    ("GPU memory", gpu::check),
];

/// The findings of all checks, in the order of the checks.
fn look(machine: &Machine, checks: &[Check]) -> Vec<Finding> {
    look_within(machine, checks, CHECKS_LIMIT)
}

fn look_within(machine: &Machine, checks: &[Check], limit: Duration) -> Vec<Finding> {
    let (sender, receiver) = mpsc::channel();
    for (number, (_, check)) in checks.iter().copied().enumerate() {
        let (sender, machine) = (sender.clone(), machine.clone());
        // Not joined: a check that hangs in the kernel ends with the process.
        let started = std::thread::Builder::new().name("pleach-doctor".to_owned()).spawn(move || {
            // The receiver is gone if the check took too long.
            let _ = sender.send((number, check(&machine)));
        });
        drop(started);
    }
    drop(sender);
    let until = clock::now() + limit;
    let mut found: Vec<Option<Vec<Finding>>> = checks.iter().map(|_| None).collect();
    while let Ok((number, findings)) = receiver.recv_timeout(until.since(clock::now())) {
        found[number] = Some(findings);
    }
    let missing = |name: &'static str| {
        let mut section = Section::new(name);
        section.unknown(
            "all of it",
            format!("no answer within {} s: a file of the kernel hangs", limit.as_secs()),
            "dmesg | tail",
        );
        section.done()
    };
    found
        .into_iter()
        .zip(checks)
        .flat_map(|(findings, (name, _))| findings.unwrap_or_else(|| missing(name)))
        .collect()
}

/// The transport that pleach will use.
fn uses(machine: &Machine) -> String {
    let up: Vec<String> = network::interfaces(machine)
        .into_iter()
        .filter(|interface| interface.is_up)
        .map(|interface| format!("{} ({})", interface.name, interface.speed()))
        .collect();
    let across = if up.is_empty() {
        "nothing to other hosts: no interface is up".to_owned()
    } else {
        format!("tcp over {} to other hosts", up.join(", "))
    };
    let ports = machine.rdma_ports().unwrap_or_default();
    let rdma = match rdma::choose(machine, ports) {
        _ if ports.is_empty() => "there is no RDMA device, so --fabric verbs is not possible".to_owned(),
        Ok(chosen) => format!("--fabric verbs takes {}", port::reason(&chosen)),
        Err(reason) => format!("--fabric verbs is not possible ({reason})"),
    };
    format!("ranks will use: shm inside this host, {across}; {rdma}")
}

// Findings and their report.

/// The level of a finding. **Invariant:** a fact that could not be read is [`Level::Unknown`],
/// never [`Level::Ok`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// No action is needed.
    Ok,
    /// The check could not be done.
    Unknown,
    /// It works, but more slowly or less reliably than it could.
    Warning,
    /// It does not work.
    Problem,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Its section of the report.
    section: &'static str,
    /// The subject of the check.
    subject: String,
    level: Level,
    /// The observation.
    text: String,
    /// The command that repairs it, or that shows more.
    command: Option<String>,
}

/// A section's findings, as they are made.
struct Section {
    name: &'static str,
    findings: Vec<Finding>,
}

impl Section {
    fn new(name: &'static str) -> Self {
        Self { name, findings: Vec::new() }
    }

    fn ok(&mut self, subject: impl Into<String>, text: impl Into<String>) {
        self.push(Level::Ok, subject.into(), text.into(), None);
    }

    fn unknown(&mut self, subject: impl Into<String>, text: impl Into<String>, command: &str) {
        let command = (!command.is_empty()).then(|| command.to_owned());
        self.push(Level::Unknown, subject.into(), text.into(), command);
    }

    fn warning(&mut self, subject: impl Into<String>, text: impl Into<String>, command: impl Into<String>) {
        self.push(Level::Warning, subject.into(), text.into(), Some(command.into()));
    }

    fn problem(&mut self, subject: impl Into<String>, text: impl Into<String>, command: impl Into<String>) {
        self.push(Level::Problem, subject.into(), text.into(), Some(command.into()));
    }

    fn push(&mut self, level: Level, subject: String, text: String, command: Option<String>) {
        self.findings.push(Finding { section: self.name, subject, level, text, command });
    }

    fn done(self) -> Vec<Finding> {
        self.findings
    }
}

/// A count with its noun, in the plural where the count is not 1.
fn counted(count: usize, one: &str) -> String {
    format!("{count} {one}{}", if count == 1 { "" } else { "s" })
}

/// All findings.
#[derive(Clone, Debug, Default)]
struct Report {
    host: String,
    /// The transport that pleach will use on this machine.
    uses: String,
    findings: Vec<Finding>,
}

impl Report {
    fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }

    /// The report for people.
    fn text(&self) -> String {
        let mut out =
            format!("# pleach doctor {}: {}\n# {}\n", env!("CARGO_PKG_VERSION"), self.host, self.uses);
        let width = self.findings.iter().map(|finding| finding.subject.chars().count()).max().unwrap_or(0);
        let mut section = "";
        for finding in &self.findings {
            if finding.section != section {
                section = finding.section;
                let _ = write!(out, "\n{section}\n");
            }
            let Finding { subject, level, text, .. } = finding;
            let _ = writeln!(out, "  {:<8} {subject:<width$}  {text}", level.name());
            if let Some(command) = &finding.command {
                let _ = writeln!(out, "  {:<8} {:<width$}    {command}", "", "");
            }
        }
        let [problems, warnings, unknown, ok] =
            [Level::Problem, Level::Warning, Level::Unknown, Level::Ok].map(|level| self.count(level));
        let (problems, warnings) = (counted(problems, "problem"), counted(warnings, "warning"));
        let _ = writeln!(out, "\n{problems}, {warnings}, {unknown} unknown, {ok} ok");
        out
    }

    /// The report as JSON.
    fn json(&self) -> Value {
        let finding = |finding: &Finding| {
            let Finding { section, subject, level, text, command } = finding;
            json!({
                "section": section, "subject": subject, "level": level.name(), "text": text, "command": command
            })
        };
        json!({
            "host": self.host,
            "version": env!("CARGO_PKG_VERSION"),
            "uses": self.uses,
            "problems": self.count(Level::Problem),
            "warnings": self.count(Level::Warning),
            "unknown": self.count(Level::Unknown),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>()
        })
    }
}

// The machine that checks examine: files under a root directory, and the few facts that no file
// gives.
//
// **Invariant:** checks depend on a [`Machine`] alone, so a test can make a faulty machine from
// files. Every read is bounded in length and never waits for a writer. Only the file systems of
// the kernel, `/etc` and the folders of libraries are read, so a network file system that does not
// answer blocks no check.

/// Longest file that is read, in bytes; the rest is left out.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Most entries of a folder that are read.
const ENTRIES_MAX: usize = 1 << 14;

/// The size of a file system, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileSystemSpace {
    total: u64,
    free: u64,
}

/// A machine.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    root: PathBuf,
    /// Read once: tables of addresses are long.
    ports: Arc<OnceLock<Result<Vec<Port>, PortError>>>,
    /// The size of `/dev/shm`, if it is in memory.
    shm: Option<FileSystemSpace>,
    /// The report of libibverbs, or why there is none; `None` if the library was not asked.
    verbs: Option<Result<Vec<DeviceReport>, String>>,
    /// Whether librdmacm is installed, if ranks are joined by it.
    rdma_cm: Option<Result<(), String>>,
    /// The addresses of the interfaces, by their numbers.
    addresses: Vec<(u32, IpAddr)>,
    /// The RDMA port that the variables ask for, or the error in them.
    wish: Result<VerbsOptions, String>,
    /// Whether the variables name a secret: jobs of this user reach other hosts.
    has_secret: bool,
}

impl Machine {
    /// A machine of which only the files under this directory are known.
    fn of_files(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            ports: Arc::default(),
            shm: None,
            verbs: None,
            rdma_cm: None,
            addresses: Vec::new(),
            wish: Ok(VerbsOptions::default()),
            has_secret: false,
        }
    }

    /// This machine.
    pub(crate) fn here() -> Self {
        let mut machine = Self::of_files(Path::new("/"));
        // Only for memory: another file system may wait for a server.
        if machine.is_memory("/dev/shm")
            && let Ok(told) = rustix::fs::statvfs("/dev/shm")
        {
            let bytes = |blocks: u64| blocks.saturating_mul(told.f_frsize);
            machine.shm = Some(FileSystemSpace { total: bytes(told.f_blocks), free: bytes(told.f_bavail) });
        }
        machine.verbs = Some(pleach::transport::verbs::survey::survey().map_err(|error| error.to_string()));
        machine.addresses = pleach::transport::tcp::interface_addresses().unwrap_or_default();
        machine.has_secret = std::env::var_os("PLEACH_SECRET_FILE").is_some_and(|file| !file.is_empty());
        // In the form in which ranks take it.
        let interface = std::env::var("PLEACH_INTERFACE").ok().filter(|text| !text.is_empty());
        machine.wish = VerbsOptions::from_env()
            .map(|wish| VerbsOptions { interface, ..wish })
            .map_err(|error| error.to_string());
        if machine.wish.as_ref().is_ok_and(|wish| wish.connect == Connect::RdmaCm) {
            let here = pleach::transport::verbs::survey::rdma_cm();
            machine.rdma_cm = Some(here.map_err(|error| error.to_string()));
        }
        machine
    }

    fn is_memory(&self, folder: &str) -> bool {
        let mounts = self.text("proc/self/mountinfo").unwrap_or_default();
        // ID parent device root FOLDER options … - KIND source options
        let mut mounted = mounts.lines().filter(|line| line.split(' ').nth(4) == Some(folder));
        let kind = |line: &str| line.split_once(" - ")?.1.split(' ').next().map(str::to_owned);
        mounted.next_back().and_then(kind).is_some_and(|kind| kind == "tmpfs")
    }

    /// A path under the root.
    fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(path)).ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// The text of a file, trimmed.
    fn text(&self, path: &str) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes(path)?).trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// The entries of a folder, sorted.
    fn names(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(folder)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .take(ENTRIES_MAX)
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    fn exists(&self, path: &str) -> bool {
        self.path(path).symlink_metadata().is_ok()
    }

    /// The file name of a symbolic link's target.
    fn link(&self, path: &str) -> Option<String> {
        let target = std::fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// The target of a path after all links, under the root.
    fn real(&self, path: &str) -> Option<String> {
        let real = self.path(path).canonicalize().ok()?;
        let root = self.root.canonicalize().ok()?;
        Some(real.strip_prefix(root).ok()?.to_str()?.to_owned())
    }

    /// RDMA devices that the kernel shows.
    fn rdma_devices(&self) -> Vec<String> {
        self.names("sys/class/infiniband")
    }

    /// All RDMA ports that the kernel shows.
    fn rdma_ports(&self) -> Result<&[Port], &PortError> {
        let look = || ports(&self.path("sys/class/infiniband"), &self.rdma_devices());
        self.ports.get_or_init(look).as_deref()
    }

    /// PCI addresses of NVIDIA's GPUs: display controllers and those that only compute.
    fn gpus(&self) -> Vec<String> {
        let folder = "sys/bus/pci/devices";
        let says =
            |address: &str, name: &str| self.text(&format!("{folder}/{address}/{name}")).unwrap_or_default();
        let is_gpu = |address: &String| {
            let class = says(address, "class");
            says(address, "vendor") == "0x10de"
                && (class.starts_with("0x0300") || class.starts_with("0x0302"))
        };
        self.names(folder).into_iter().filter(is_gpu).collect()
    }

    /// Each GPU's PCI address, nearest NUMA node, and the name that its driver gives.
    pub(crate) fn gpus_described(&self) -> Vec<(String, Option<u64>, Option<String>)> {
        let describe = |address: String| {
            let numa = self.number(&format!("sys/bus/pci/devices/{address}/numa_node"));
            let told =
                self.text(&format!("proc/driver/nvidia/gpus/{address}/information")).unwrap_or_default();
            let model = told
                .lines()
                .find_map(|line| line.strip_prefix("Model:"))
                .map(|model| model.trim().to_owned());
            (address, numa, model)
        };
        self.gpus().into_iter().map(describe).collect()
    }

    /// This machine's memory, as text.
    pub(crate) fn memory(&self) -> Option<String> {
        let table = self.text("proc/meminfo")?;
        let kibibytes = |name: &str| {
            let line = table.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        };
        let (total, available) = (kibibytes("MemTotal:")?, kibibytes("MemAvailable:")?);
        Some(format!("{} of {} free", size(available << 10), size(total << 10)))
    }

    /// Whether this process has a capability (by its number) that the limits of the kernel respect.
    fn has_capability(&self, number: u32) -> Option<bool> {
        let status = self.text("proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        let set = u64::from_str_radix(line.trim(), 16).ok()?;
        // Capabilities of a user namespace do not count against limits of the machine.
        let users = self.text("proc/self/uid_map").unwrap_or_default();
        let is_initial = users.split_whitespace().eq(["0", "0", "4294967295"]);
        Some(set >> number & 1 == 1 && is_initial)
    }

    /// The container runtime of this process, if it can be detected.
    fn container(&self) -> Option<&'static str> {
        if self.exists(".dockerenv") {
            return Some("docker");
        }
        if self.exists("run/.containerenv") {
            return Some("podman");
        }
        let groups = self.text("proc/1/cgroup").unwrap_or_default();
        let known =
            [("kubepods", "Kubernetes"), ("docker", "docker"), ("lxc", "LXC"), ("containerd", "containerd")];
        known.into_iter().find(|(mark, _)| groups.contains(mark)).map(|(_, name)| name)
    }

    /// The name of a library's file with its version, such as `libibverbs.so.1.14.44.0`. It is the
    /// file that this process uses, or else the one in the usual folders.
    fn library(&self, name: &str) -> Option<String> {
        let maps = self.text("proc/self/maps").unwrap_or_default();
        let files = maps.lines().filter_map(|line| line.rsplit('/').next());
        if let Some(file) = files.into_iter().find(|file| file.starts_with(name)) {
            return Some(file.to_owned());
        }
        let mut folders: Vec<String> =
            ["usr/lib64", "usr/lib", "usr/local/lib", "lib64", "lib"].map(str::to_owned).into();
        for parent in ["usr/lib", "lib"] {
            let named = self.names(parent).into_iter().filter(|name| name.contains("-linux-"));
            folders.extend(named.map(|name| format!("{parent}/{name}")));
        }
        let place = folders.iter().map(|folder| format!("{folder}/{name}")).find(|path| self.exists(path))?;
        Some(self.link(&place).unwrap_or_else(|| name.to_owned()))
    }
}

/// A size in bytes, in the usual units.
fn size(bytes: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in units {
        let whole = bytes >> shift;
        if whole >= 10 {
            return format!("{whole} {unit}");
        }
        if whole >= 1 {
            let tenths = (bytes >> (shift - 10)) * 10 / 1024;
            let (whole, tenth) = (tenths / 10, tenths % 10);
            return if tenth == 0 { format!("{whole} {unit}") } else { format!("{whole}.{tenth} {unit}") };
        }
    }
    format!("{bytes} B")
}
