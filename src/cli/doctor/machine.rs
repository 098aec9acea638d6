//! What checks look at: the files of a machine under a root directory, and the few answers that no
//! file gives.
//!
//! **Invariant:** checks are functions of a [`Machine`] alone, so a machine that is unwell can be
//! made of files. Every read is bounded in length and never waits for a writer; nothing outside the
//! kernel's own file systems, `/etc` and the folders of libraries is touched, so that a network
//! file system that does not answer holds nobody up.

use std::fs::OpenOptions;
use std::io::Read;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use pleach::transport::verbs::port::{Port, ports};
use pleach::transport::verbs::survey::DeviceReport;
use pleach::transport::verbs::{Connect, PortError, VerbsOptions};

/// Longest file that is read, in bytes; the rest is left out.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Most entries of a folder that are looked at.
const ENTRIES_MAX: usize = 1 << 14;

/// What a file system has room for, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) total: u64,
    pub(super) free: u64,
}

/// A machine.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    root: PathBuf,
    /// Looked at once: tables of addresses are long.
    ports: Arc<OnceLock<Result<Vec<Port>, PortError>>>,
    /// Of `/dev/shm`, where it is in memory.
    pub(super) shm: Option<Space>,
    /// What libibverbs says, or why there is none; `None` where it was not asked.
    pub(super) verbs: Option<Result<Vec<DeviceReport>, String>>,
    /// Whether librdmacm is here, where ranks are joined by it.
    pub(super) rdma_cm: Option<Result<(), String>>,
    /// The addresses of the interfaces, by their numbers.
    pub(super) addresses: Vec<(u32, IpAddr)>,
    /// Which RDMA port was asked for, or what is wrong with that.
    pub(super) wish: Result<VerbsOptions, String>,
}

impl Machine {
    /// Only what the files under this directory say.
    pub(super) fn of_files(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            ports: Arc::default(),
            shm: None,
            verbs: None,
            rdma_cm: None,
            addresses: Vec::new(),
            wish: Ok(VerbsOptions::default()),
        }
    }

    /// This machine.
    pub(crate) fn here() -> Self {
        let mut machine = Self::of_files(Path::new("/"));
        // Only of what is memory: another file system may wait for a server.
        if machine.is_memory("/dev/shm")
            && let Ok(told) = rustix::fs::statvfs("/dev/shm")
        {
            let bytes = |blocks: u64| blocks.saturating_mul(told.f_frsize);
            machine.shm = Some(Space { total: bytes(told.f_blocks), free: bytes(told.f_bavail) });
        }
        machine.verbs = Some(pleach::transport::verbs::survey::survey().map_err(|error| error.to_string()));
        machine.addresses = pleach::transport::tcp::interface_addresses().unwrap_or_default();
        // As ranks take it.
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
    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub(super) fn bytes(&self, path: &str) -> Option<Vec<u8>> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(path)).ok()?;
        let mut bytes = Vec::new();
        file.take(FILE_BYTES_MAX).read_to_end(&mut bytes).ok()?;
        Some(bytes)
    }

    /// What a file says, without white space around it.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        Some(String::from_utf8_lossy(&self.bytes(path)?).trim().to_owned())
    }

    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// What a folder holds, in order.
    pub(super) fn names(&self, folder: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path(folder)) else { return Vec::new() };
        let mut names: Vec<String> = entries
            .take(ENTRIES_MAX)
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .collect();
        names.sort();
        names
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.path(path).symlink_metadata().is_ok()
    }

    /// The last part of where a link leads.
    pub(super) fn link(&self, path: &str) -> Option<String> {
        let target = std::fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    /// Where a path really is, under the root.
    pub(super) fn real(&self, path: &str) -> Option<String> {
        let real = self.path(path).canonicalize().ok()?;
        let root = self.root.canonicalize().ok()?;
        Some(real.strip_prefix(root).ok()?.to_str()?.to_owned())
    }

    /// RDMA devices that the kernel shows.
    pub(super) fn rdma_devices(&self) -> Vec<String> {
        self.names("sys/class/infiniband")
    }

    /// All RDMA ports that the kernel shows.
    pub(super) fn rdma_ports(&self) -> Result<&[Port], &PortError> {
        let look = || ports(&self.path("sys/class/infiniband"), &self.rdma_devices());
        self.ports.get_or_init(look).as_deref()
    }

    /// PCI addresses of NVIDIA's GPUs: display controllers and those that only compute.
    pub(super) fn gpus(&self) -> Vec<String> {
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

    /// Each GPU's PCI address, nearest NUMA node, and what its driver calls it.
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

    /// This machine's memory, for people.
    pub(crate) fn memory(&self) -> Option<String> {
        let table = self.text("proc/meminfo")?;
        let kibibytes = |name: &str| {
            let line = table.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
        };
        let (total, available) = (kibibytes("MemTotal:")?, kibibytes("MemAvailable:")?);
        Some(format!("{} of {} free", size(available << 10), size(total << 10)))
    }

    /// Whether this process may do what takes this capability (its number), also in the eyes of the
    /// kernel's limits.
    pub(super) fn has_capability(&self, number: u32) -> Option<bool> {
        let status = self.text("proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        let set = u64::from_str_radix(line.trim(), 16).ok()?;
        // Capabilities of a user namespace do not count against limits of the machine.
        let users = self.text("proc/self/uid_map").unwrap_or_default();
        let is_initial = users.split_whitespace().eq(["0", "0", "4294967295"]);
        Some(set >> number & 1 == 1 && is_initial)
    }

    /// What runs this process beside the machine itself, if it shows.
    pub(super) fn container(&self) -> Option<&'static str> {
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

    /// The name of a library's file with its version, such as `libibverbs.so.1.14.44.0`: of the one
    /// that this process uses, or else of the one in the usual folders.
    pub(super) fn library(&self, name: &str) -> Option<String> {
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

/// Bytes as people say them.
pub(super) fn size(bytes: u64) -> String {
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
