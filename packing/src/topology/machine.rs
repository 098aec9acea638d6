//! The topology of this machine: GPUs and their places on PCI, as the kernel shows them, and
//! NVLinks, as the driver reports them.
//!
//! Ranks are the GPUs in the order of their PCI addresses. The kernel shows each GPU as a directory
//! within the directories of the bridges above it: a root port, and for every PCIe switch its
//! upstream port and a downstream port. Here the upstream port stands for its switch, and a root
//! port is part of the CPU. A link has the bandwidth of the slower of its two ends. (The present
//! speed of a link is not used: an idle GPU slows its link down.) CPUs are NUMA nodes.
//!
//! NICs do not join GPUs of one machine. They are [listed](Machine::nics), but they are no links.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::topology::nccl::rates;
use crate::topology::{LATENCY_NS, NodeId, Topology, TopologyError};

#[cfg(feature = "nvml")]
mod nvml;

#[cfg(test)]
mod tests;

/// Most devices that are read.
const DEVICES_MAX: usize = 1 << 16;

/// The vendors of GPUs, with the PCI classes of their GPUs. Display controllers of other vendors
/// belong to management controllers. Intel's devices of class 0x0300 are parts of CPUs.
const MAKERS: [(&str, &str, &[&str]); 4] = [
    ("NVIDIA", "0x10de", &["0x0300", "0x0302"]),
    ("AMD", "0x1002", &["0x0300", "0x0302", "0x0380", "0x1200"]),
    ("Intel", "0x8086", &["0x0380", "0x1200"]),
    ("Habana", "0x1da3", &["0x1200"]),
];

/// Why this machine has no topology.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// A directory or file of the kernel that cannot be read.
    #[error("{}: {error}; this machine's PCI devices are looked for there", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// An attribute of a device that cannot be parsed.
    #[error("{}: '{value}' is not {expected}", path.display())]
    Attribute {
        /// The file of the attribute.
        path: PathBuf,
        /// The text of the attribute.
        value: String,
        /// The format that was expected.
        expected: &'static str,
    },
    /// No GPU.
    #[error(
        "no GPU on this machine: of {devices} devices in {} none is a display controller or accelerator (PCI class 0x03, 0x12) \
         of {}; name a preset or a file", path.display(), makers()
    )]
    NoGpus {
        /// The directory with the devices.
        path: PathBuf,
        /// The number of devices.
        devices: usize,
    },
    /// The driver is installed and does not answer.
    #[error(
        "the NVIDIA driver does not tell its NVLinks: {error}; is it the same version as its library (nvidia-smi says so)?"
    )]
    Nvml {
        /// The message of its library.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The GPUs do not form a topology.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

fn makers() -> String {
    MAKERS.iter().map(|(name, vendor, _)| format!("{name} ({vendor})")).collect::<Vec<_>>().join(", ")
}

/// A PCI device and the switches above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciDevice {
    /// For example `0000:c6:00.0`.
    pub address: String,
    /// The nearest NUMA node.
    pub numa: u32,
    /// The upstream ports of the PCIe switches above it, the outermost first, and then the device
    /// itself.
    pub hops: Vec<PciHop>,
}

/// One link of the path from the CPU to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciHop {
    /// The address of its lower end.
    pub address: String,
    /// Its bandwidth in each direction.
    pub bytes_per_s: u64,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    /// For example `eth0`, `mlx5_0`.
    pub name: String,
    /// Its PCI device; several interfaces can have the same.
    pub device: PciDevice,
}

/// NVLinks that leave a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NvLinks {
    /// The GPU, in the order of [`Machine::gpus`].
    pub gpu: usize,
    /// The other end.
    pub to: NvLinkEnd,
    /// The bandwidth of all of them together in each direction.
    pub bytes_per_s: u64,
}

/// The other end of an NVLink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NvLinkEnd {
    /// Another GPU, in the order of [`Machine::gpus`].
    Gpu(usize),
    /// An NVSwitch; all NVSwitches count as one.
    Switch,
    /// The CPU.
    Cpu,
}

/// The devices of a machine, as the kernel shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// In the order of their addresses.
    pub gpus: Vec<PciDevice>,
    /// In the order of their names.
    pub nics: Vec<Nic>,
    /// The bandwidth between two NUMA nodes, in each direction.
    pub between_cpus_bytes_per_s: u64,
    /// The number of PCI devices.
    pub devices: usize,
}

/// The topology of the machine whose root directory this is.
pub fn read(root: &Path) -> Result<Topology, MachineError> {
    let machine = Machine::look(root)?;
    if machine.gpus.is_empty() {
        return Err(MachineError::NoGpus { path: devices(root), devices: machine.devices });
    }
    let links = nvlinks(&machine, root)?;
    Ok(machine.topology(&links)?)
}

/// The NVLinks that the driver reports, if there is a driver.
#[cfg(feature = "nvml")]
fn nvlinks(machine: &Machine, root: &Path) -> Result<Vec<NvLinks>, MachineError> {
    // The library reports the machine on which this process runs, so another root has no NVLinks.
    // The library is loaded only if the driver is there.
    if root != Path::new("/") || !root.join("proc/driver/nvidia/version").exists() {
        return Ok(Vec::new());
    }
    nvml::links(machine, root)
}

/// NVML is not available.
#[cfg(not(feature = "nvml"))]
fn nvlinks(_: &Machine, _: &Path) -> Result<Vec<NvLinks>, MachineError> {
    Ok(Vec::new())
}

fn devices(root: &Path) -> PathBuf {
    root.join("sys/bus/pci/devices")
}

impl Machine {
    /// Reads the machine whose root directory this is.
    ///
    /// # Errors
    ///
    /// [`MachineError::Read`] and [`MachineError::Attribute`]. A machine without a GPU is no error.
    pub fn look(root: &Path) -> Result<Self, MachineError> {
        let mut machine = Self { between_cpus_bytes_per_s: between_cpus(root), ..Self::default() };
        for address in names(&devices(root))? {
            machine.devices += 1;
            let path = devices(root).join(&address);
            let class = text(&path.join("class"))?;
            let vendor = text(&path.join("vendor"))?;
            let is_class = |known: &&str| class.starts_with(known);
            if MAKERS.iter().any(|(_, maker, classes)| vendor == *maker && classes.iter().any(is_class)) {
                machine.gpus.push(device(&path)?);
            }
        }
        machine.nics = nics(root)?;
        Ok(machine)
    }

    /// The topology of the GPUs: PCI, and these NVLinks.
    ///
    /// # Panics
    ///
    /// When a link names a GPU that is not there.
    pub fn topology(&self, nvlinks: &[NvLinks]) -> Result<Topology, TopologyError> {
        let mut builder = Topology::builder();
        let ranks: Vec<NodeId> = (0..self.gpus.len()).map(|gpu| builder.rank(format!("gpu{gpu}"))).collect();
        let mut cpus: BTreeMap<u32, NodeId> = BTreeMap::new();
        let mut bridges: BTreeMap<&str, NodeId> = BTreeMap::new();
        for (gpu, &rank) in self.gpus.iter().zip(&ranks) {
            let mut above =
                *cpus.entry(gpu.numa).or_insert_with(|| builder.switch(format!("cpu{}", gpu.numa)));
            for (hop, is_device) in
                gpu.hops.iter().zip(1..).map(|(hop, number)| (hop, number == gpu.hops.len()))
            {
                let known = bridges.get(hop.address.as_str()).copied();
                let below = match known {
                    _ if is_device => rank,
                    Some(bridge) => bridge,
                    None => builder.switch(format!("pci {}", hop.address)),
                };
                if is_device || known.is_none() {
                    builder.duplex(above, below, hop.bytes_per_s, LATENCY_NS);
                    bridges.insert(&hop.address, below);
                }
                above = below;
            }
        }
        let cpu_nodes: Vec<NodeId> = cpus.values().copied().collect();
        for (index, &one) in cpu_nodes.iter().enumerate() {
            for &other in &cpu_nodes[index + 1..] {
                builder.duplex(one, other, self.between_cpus_bytes_per_s, LATENCY_NS);
            }
        }
        let mut switch = None;
        for link in nvlinks {
            let from = ranks[link.gpu];
            match link.to {
                // The other GPU lists the opposite direction itself.
                NvLinkEnd::Gpu(to) => builder.link(from, ranks[to], link.bytes_per_s, LATENCY_NS),
                NvLinkEnd::Cpu => {
                    builder.duplex(from, cpus[&self.gpus[link.gpu].numa], link.bytes_per_s, LATENCY_NS);
                }
                NvLinkEnd::Switch => {
                    let switch = *switch.get_or_insert_with(|| builder.switch("nvswitch"));
                    builder.duplex(from, switch, link.bytes_per_s, LATENCY_NS);
                }
            }
        }
        builder.without_dead_ends().build()
    }
}

/// The device with this path in the kernel's file system.
fn device(path: &Path) -> Result<PciDevice, MachineError> {
    let unreadable = |error| MachineError::Read { path: path.to_owned(), error };
    let real = path.canonicalize().map_err(unreadable)?;
    // From the device up to the root port.
    let is_device = |path: &&Path| path.join("vendor").exists();
    let mut chain: Vec<&Path> = real.ancestors().take_while(is_device).collect();
    chain.reverse();
    let last = chain.len().saturating_sub(1);
    let mut hops = Vec::new();
    for (index, port) in chain.iter().enumerate() {
        // The ports are a root port, an upstream port, a downstream port, an upstream port and so
        // on. Every second port is the lower end of a link.
        if index % 2 == 1 || index == last {
            let upper = index.checked_sub(1).map(|upper| chain[upper]);
            let own = bytes_per_s(port)?;
            let slower = upper.map(bytes_per_s).transpose()?.map_or(own, |upper| own.min(upper));
            hops.push(PciHop { address: file_name(port), bytes_per_s: slower });
        }
    }
    let numa = text(&real.join("numa_node")).ok().and_then(|numa| numa.parse().ok()).unwrap_or(0);
    Ok(PciDevice { address: file_name(path), numa, hops })
}

/// The bandwidth of a port at its highest speed and width. Devices of virtual machines often report
/// neither.
fn bytes_per_s(port: &Path) -> Result<u64, MachineError> {
    let said = |name: &str| text(&port.join(name)).unwrap_or_default();
    let wrong = |name: &str, value: String, expected| MachineError::Attribute {
        path: port.join(name),
        value,
        expected,
    };
    let (speed, width) = (said("max_link_speed"), said("max_link_width"));
    let transfers_per_s = rates::transfers_per_s(&speed);
    let transfers_per_s =
        transfers_per_s.ok_or_else(|| wrong("max_link_speed", speed, "of the form \"16.0 GT/s PCIe\""))?;
    let lanes = if width.is_empty() { rates::lanes("0") } else { rates::lanes(&width) };
    let lanes = lanes.ok_or_else(|| wrong("max_link_width", width, "a number of lanes"))?;
    Ok(rates::pcie(transfers_per_s, lanes))
}

/// Network interfaces and RDMA devices on PCI.
fn nics(root: &Path) -> Result<Vec<Nic>, MachineError> {
    let mut nics = Vec::new();
    for class in ["sys/class/infiniband", "sys/class/net"] {
        let folder = root.join(class);
        if !folder.exists() {
            continue;
        }
        for name in names(&folder)? {
            let path = folder.join(&name).join("device");
            if path.join("vendor").exists() && path.join("class").exists() {
                let mut device = device(&path)?;
                if let Ok(real) = path.canonicalize() {
                    device.address = file_name(&real);
                }
                nics.push(Nic { name, device });
            }
        }
    }
    Ok(nics)
}

/// The bandwidth between two NUMA nodes, by the names of the processors.
fn between_cpus(root: &Path) -> u64 {
    let said = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
    let value = |key: &str| {
        let mut lines = said.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
    };
    let number = |key| value(key).and_then(|value| value.parse().ok());
    let architecture = match std::env::consts::ARCH {
        "aarch64" => "arm64",
        "powerpc64" => "ppc64",
        other => other,
    };
    let vendor = value("vendor_id").unwrap_or_default();
    rates::between_cpus(architecture, &vendor, number("cpu family"), number("model"))
}

/// The entries of a directory, sorted.
fn names(folder: &Path) -> Result<Vec<String>, MachineError> {
    let unreadable = |error| MachineError::Read { path: folder.to_owned(), error };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)?.take(DEVICES_MAX) {
        names.push(entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

fn text(path: &Path) -> Result<String, MachineError> {
    let read = fs::read_to_string(path).map(|text| text.trim().to_owned());
    read.map_err(|error| MachineError::Read { path: path.to_owned(), error })
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
