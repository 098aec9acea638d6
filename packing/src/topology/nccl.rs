//! NCCL topology XML, as NCCL and RCCL write it to `NCCL_TOPO_DUMP_FILE` and read it from
//! `NCCL_TOPO_FILE`.
//!
//! Elements are nested like PCI: `system`, `cpu` (a NUMA node), `pci` (a bridge or a device), and
//! in the devices `gpu` with its `nvlink`, `xgmi` and `c2c`, or `nic` with its `net`. GPUs become
//! the ranks, in the order of the file. PCI bridges, CPUs, NICs and all NVSwitches together become
//! switches. A file for `NCCL_TOPO_FILE` may lack the `gpu` elements, which NCCL then adds itself;
//! the ranks are then the devices of the class of display controllers, linked by PCI alone.
//!
//! Bandwidths are nominal, as in the presets: see `rates`. Nodes that join no two ranks are
//! removed: bridges that lead to nothing and, if all ranks are on one host, NICs. Ranks of several
//! hosts (`host_hash`) are linked by their NICs over one switch, `network`. As in NCCL, a link to a
//! GPU that is not in the file is ignored.
//!
//! **Invariant:** there is no recursion, so the depth of nesting is not limited; the number of
//! elements is limited to [`ELEMENTS_MAX`] while they are read.

use std::collections::{BTreeSet, HashMap};

use roxmltree::{Document, Node, ParsingOptions};

use crate::topology::text::{TextError, TextFault, Texts};
use crate::topology::{Builder, LATENCY_NS, NodeId, Topology, TopologyError};

pub(super) mod rates;
#[cfg(test)]
mod tests;

/// Most elements, texts and comments of a file.
pub const ELEMENTS_MAX: u32 = 1 << 19;

/// Most attributes of an element.
const ATTRIBUTES_MAX: usize = 1 << 10;

/// Why a text is no NCCL topology.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclFault {
    /// The text is no XML.
    #[error("no XML: {message}")]
    Xml {
        /// The message of the XML reader, in one line.
        message: String,
    },
    /// The XML is no NCCL topology.
    #[error("no NCCL topology: its outermost element is <{found}> and not <system>")]
    NoSystem {
        /// The outermost element.
        found: String,
    },
    /// There is no element that could be a rank.
    #[error("no GPU: there is neither a <gpu> nor a <pci> of class 0x03")]
    NoGpus,
    /// An element is in a place where NCCL does not write it.
    #[error("<{element}> stands outside of {parent}")]
    Misplaced {
        /// The element.
        element: &'static str,
        /// The element that must hold it.
        parent: &'static str,
    },
    /// A necessary attribute is missing.
    #[error("<{element}> has no {attribute}")]
    Missing {
        /// The element.
        element: &'static str,
        /// The attribute.
        attribute: &'static str,
    },
    /// An attribute has a wrong value.
    #[error("{attribute} \"{value}\" is not {expected}")]
    Attribute {
        /// The attribute.
        attribute: &'static str,
        /// The value that was found.
        value: String,
        /// The format that was expected.
        expected: &'static str,
    },
}

/// The topology that an NCCL topology XML file describes.
///
/// # Errors
///
/// The first fault with its line and column.
pub fn parse(text: &str) -> Result<Topology, TextError> {
    if let Some(at) = crowded(text) {
        let message = format!("more than {ATTRIBUTES_MAX} attributes in one element");
        return Err(Texts(text).error(at, TextFault::Nccl(NcclFault::Xml { message })));
    }
    let options = ParsingOptions { nodes_limit: ELEMENTS_MAX, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|error| {
        let (line, column) = (error.pos().row as usize, error.pos().col as usize);
        let message = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        TextError { line, column, fault: TextFault::Nccl(NcclFault::Xml { message }) }
    })?;
    read(text, document.root_element())
}

/// The place of an element with too many attributes. Such elements are refused because the reader
/// compares each attribute with all attributes before it.
fn crowded(text: &str) -> Option<usize> {
    let mut at = 0;
    for tag in text.split_inclusive('<') {
        if tag.bytes().filter(|&byte| byte == b'=').count() > ATTRIBUTES_MAX {
            return Some(at);
        }
        at += tag.len();
    }
    None
}

// Converts elements to nodes and links.

/// Most NUMA nodes that are joined pairwise.
const CPUS_MAX: usize = 1 << 9;

/// Most parallel links that one element may stand for.
const COUNT_MAX: u64 = 1 << 10;

/// Largest bandwidth: of a NIC in megabits a second, and of a link between GPU and CPU in megabytes
/// a second.
const MEGA_PER_S_MAX: u64 = 1_000_000_000;

/// The place of an element in the topology.
#[derive(Clone, Copy)]
struct Place {
    /// The switch of the element, or the switch above it.
    node: NodeId,
    /// The CPU above it.
    cpu: NodeId,
    /// The number of the host, in the order of the text.
    host: usize,
    /// If the element is a device, its connection to the switch.
    device: Option<Device>,
}

/// A device on PCI.
#[derive(Clone, Copy)]
struct Device {
    bus: u64,
    bytes_per_s: u64,
}

/// A GPU that became a rank.
#[derive(Clone, Copy)]
struct Gpu {
    node: NodeId,
    place: Place,
}

/// A NUMA node.
struct Cpu {
    node: NodeId,
    host: usize,
    bytes_per_s: u64,
}

/// The kinds of `pci` element.
enum Kind {
    Bridge,
    Gpu,
    Nic,
    /// Data do not pass through the element.
    Other,
}

/// The topology as read so far.
struct Reader<'text> {
    text: Texts<'text>,
    builder: Builder,
    /// The number of each host hash, in the order of the text.
    hosts: HashMap<String, usize>,
    /// Whether GPUs have elements of their own.
    has_gpus: bool,
    /// The places of elements that may hold other elements.
    places: HashMap<roxmltree::NodeId, Place>,
    gpus: HashMap<roxmltree::NodeId, Gpu>,
    /// By host and bus: the rank.
    buses: HashMap<(usize, u64), NodeId>,
    /// By host: the number of GPUs that were numbered here because the text has no numbers.
    unnumbered: HashMap<usize, usize>,
    /// By name: the number of bridges.
    bridges: HashMap<String, usize>,
    /// By name: the place of its element in the text.
    names: HashMap<String, usize>,
    cpus: Vec<Cpu>,
    nvswitch: Option<NodeId>,
    network: Option<NodeId>,
}

/// The topology of a `system` element.
fn read(text: &str, root: Node<'_, '_>) -> Result<Topology, TextError> {
    let mut hosts = HashMap::new();
    for cpu in root.children().filter(|node| node.has_tag_name("cpu")) {
        let number = hosts.len();
        hosts.entry(host_hash(cpu).to_owned()).or_insert(number);
    }
    let reader = Reader {
        text: Texts(text),
        builder: Topology::builder(),
        hosts,
        has_gpus: root.descendants().any(|node| node.has_tag_name("gpu")),
        places: HashMap::new(),
        gpus: HashMap::new(),
        buses: HashMap::new(),
        unnumbered: HashMap::new(),
        bridges: HashMap::new(),
        names: HashMap::new(),
        cpus: Vec::new(),
        nvswitch: None,
        network: None,
    };
    reader.read(root)
}

impl Reader<'_> {
    fn read(mut self, root: Node<'_, '_>) -> Result<Topology, TextError> {
        if !root.has_tag_name("system") {
            let found = root.tag_name().name().to_owned();
            return Err(self.error(root, NcclFault::NoSystem { found }));
        }
        // Elements are read in the order of the text, so each element is read after the elements
        // around it.
        for node in root.descendants() {
            match node.tag_name().name() {
                "cpu" => self.cpu(node)?,
                "pci" => self.pci(node)?,
                "gpu" => self.gpu(node)?,
                "net" => self.net(node)?,
                _ => {}
            }
        }
        if self.buses.is_empty() {
            return Err(self.error(root, NcclFault::NoGpus));
        }
        // The targets of links may come later in the text, so links are read last.
        for node in root.descendants() {
            match node.tag_name().name() {
                "nvlink" => self.nvlink(node)?,
                "xgmi" => self.xgmi(node)?,
                "c2c" => self.c2c(node)?,
                _ => {}
            }
        }
        self.join_cpus(root)?;
        let Self { text, builder, names, .. } = self;
        builder.without_dead_ends().build().map_err(|error| {
            let part = match &error {
                TopologyError::Disconnected { parts } => parts.get(1).and_then(|part| part.first()),
                _ => None,
            };
            let at = part.and_then(|name| names.get(name)).copied();
            text.error(at.unwrap_or(root.range().start), TextFault::Topology(error))
        })
    }

    fn cpu(&mut self, node: Node<'_, '_>) -> Result<(), TextError> {
        if !node.parent().is_some_and(|parent| parent.has_tag_name("system")) {
            return Err(self.error(node, NcclFault::Misplaced { element: "cpu", parent: "<system>" }));
        }
        let numa = self.attribute(node, "cpu", "numaid")?;
        let host = self.hosts.get(host_hash(node)).copied().unwrap_or(0);
        let name = self.on_host(host, &format!("cpu{numa}"));
        let switch = self.named(node, name, Builder::switch)?;
        let number = |name| node.attribute(name).and_then(|text| text.parse().ok());
        let bytes_per_s = rates::between_cpus(
            node.attribute("arch").unwrap_or_default(),
            node.attribute("vendor").unwrap_or_default(),
            number("familyid"),
            number("modelid"),
        );
        self.cpus.push(Cpu { node: switch, host, bytes_per_s });
        self.places.insert(node.id(), Place { node: switch, cpu: switch, host, device: None });
        Ok(())
    }

    fn pci(&mut self, node: Node<'_, '_>) -> Result<(), TextError> {
        let misplaced = NcclFault::Misplaced { element: "pci", parent: "<cpu> and <pci>" };
        let Some(parent) =
            node.parent().filter(|parent| parent.has_tag_name("cpu") || parent.has_tag_name("pci"))
        else {
            return Err(self.error(node, misplaced));
        };
        let Some(&above) = self.places.get(&parent.id()) else { return Ok(()) };
        let class = self.attribute(node, "pci", "class")?;
        let busid = self.attribute(node, "pci", "busid")?;
        let Some(bus) = rates::bus(busid) else {
            return Err(self.wrong(node, "busid", "hexadecimal digits with colons and points"));
        };
        let speed = node.attribute("link_speed").unwrap_or_default();
        let Some(speed) = rates::transfers_per_s(speed) else {
            return Err(self.wrong(node, "link_speed", "of the form \"16.0 GT/s PCIe\""));
        };
        let width = node.attribute("link_width").unwrap_or("0");
        let Some(lanes) = rates::lanes(width) else {
            return Err(self.wrong(node, "link_width", "a number of lanes"));
        };
        let bytes_per_s = rates::pcie(speed, lanes);
        let device = Place { device: Some(Device { bus, bytes_per_s }), ..above };
        match self.kind(node, class) {
            Kind::Other => {}
            Kind::Gpu if self.has_gpus => {
                self.places.insert(node.id(), device);
            }
            Kind::Gpu => {
                let number = self.unnumbered.entry(above.host).or_insert(0);
                *number += 1;
                let name = format!("gpu{}", *number - 1);
                self.rank(node, &name, device)?;
            }
            Kind::Bridge | Kind::Nic => {
                let switch = self.bridge(node, above.host, busid)?;
                self.builder.duplex(switch, above.node, bytes_per_s, LATENCY_NS);
                self.places.insert(node.id(), Place { node: switch, ..above });
            }
        }
        Ok(())
    }

    /// A switch for a bridge or NIC. A file that was put together from several machines lists the
    /// same bus more than once.
    fn bridge(&mut self, node: Node<'_, '_>, host: usize, busid: &str) -> Result<NodeId, TextError> {
        let name = self.on_host(host, &format!("pci {busid}"));
        let before = self.bridges.entry(name.clone()).or_insert(0);
        *before += 1;
        let name = if *before == 1 { name } else { format!("{name} ({before})") };
        self.named(node, name, Builder::switch)
    }

    fn kind(&self, node: Node<'_, '_>, class: &str) -> Kind {
        let holds = |name| node.children().any(|child| child.has_tag_name(name));
        if holds("gpu") {
            Kind::Gpu
        } else if holds("nic") {
            Kind::Nic
        } else if rates::is_gpu_class(class) {
            if self.has_gpus { Kind::Other } else { Kind::Gpu }
        } else if class.starts_with("0x02") || class.starts_with("0x0680") {
            Kind::Other
        } else {
            Kind::Bridge
        }
    }

    fn gpu(&mut self, node: Node<'_, '_>) -> Result<(), TextError> {
        let parent = node.parent().filter(|parent| parent.has_tag_name("pci"));
        let misplaced = NcclFault::Misplaced { element: "gpu", parent: "<pci>" };
        let Some(parent) = parent else { return Err(self.error(node, misplaced)) };
        let number = self.attribute(node, "gpu", "dev")?;
        let Some(&place) = self.places.get(&parent.id()) else { return Ok(()) };
        // NCCL's mark of a GPU that is not part of the job.
        if node.attribute("rank") == Some("-1") {
            return Ok(());
        }
        self.rank(node, &format!("gpu{number}"), place)
    }

    fn rank(&mut self, node: Node<'_, '_>, name: &str, place: Place) -> Result<(), TextError> {
        let name = self.on_host(place.host, name);
        let rank = self.named(node, name, Builder::rank)?;
        if let Some(Device { bus, bytes_per_s }) = place.device {
            self.builder.duplex(rank, place.node, bytes_per_s, LATENCY_NS);
            self.buses.entry((place.host, bus)).or_insert(rank);
        }
        self.gpus.insert(node.id(), Gpu { node: rank, place });
        Ok(())
    }

    /// Adds the network link of a NIC. NICs matter only where ranks are on several hosts.
    fn net(&mut self, node: Node<'_, '_>) -> Result<(), TextError> {
        let nic = node.parent().filter(|parent| parent.has_tag_name("nic"));
        let Some(parent) = nic.and_then(|nic| nic.parent()) else {
            let misplaced = NcclFault::Misplaced { element: "net", parent: "<nic>" };
            return Err(self.error(node, misplaced));
        };
        let Some(&place) = self.places.get(&parent.id()) else { return Ok(()) };
        if self.hosts.len() == 1 {
            return Ok(());
        }
        let megabits = match self.attribute(node, "net", "speed")?.parse::<i64>() {
            Ok(speed) if speed <= 0 => rates::NET_DEFAULT_MEGABITS_PER_S,
            Ok(speed) if speed as u64 <= MEGA_PER_S_MAX => speed as u64,
            _ => return Err(self.wrong(node, "speed", "a number of megabits a second")),
        };
        let network = self.network.unwrap_or_else(|| self.builder.switch("network"));
        self.network = Some(network);
        self.builder.duplex(place.node, network, megabits * 1_000_000 / 8, LATENCY_NS);
        Ok(())
    }

    /// The GPU that the element of a link belongs to.
    fn holder(&self, node: Node<'_, '_>, element: &'static str) -> Result<Option<Gpu>, TextError> {
        let parent = node.parent().filter(|parent| parent.has_tag_name("gpu"));
        let misplaced = NcclFault::Misplaced { element, parent: "<gpu>" };
        let parent = parent.ok_or_else(|| self.error(node, misplaced))?;
        Ok(self.gpus.get(&parent.id()).copied())
    }

    fn nvlink(&mut self, node: Node<'_, '_>) -> Result<(), TextError> {
        let Some(gpu) = self.holder(node, "nvlink")? else { return Ok(()) };
        let count = self.count(node, "nvlink")?;
        let Some(holder) = node.parent() else { return Ok(()) };
        let sm = self.attribute(holder, "gpu", "sm")?.parse().ok();
        let Some(each) = sm.and_then(rates::nvlink) else {
            return Err(self.wrong(
                holder,
                "sm",
                "a compute capability with NVLink, such as 70, 80, 90 or 100",
            ));
        };
        let bytes_per_s = count * each;
        let target = self.target(node, "nvlink", gpu)?;
        match node.attribute("tclass") {
            Some(class) if rates::is_gpu_class(class) => self.link_to(gpu, target, bytes_per_s),
            Some("0x068001") => self.builder.duplex(gpu.node, gpu.place.cpu, bytes_per_s, LATENCY_NS),
            Some("0x068000") => self.link_to_nvswitch(gpu, bytes_per_s),
            Some(_) => {
                return Err(self.wrong(
                    node,
                    "tclass",
                    "the class of a GPU (0x03), an NVSwitch (0x068000) or a CPU (0x068001)",
                ));
            }
            None if target.is_some() => self.link_to(gpu, target, bytes_per_s),
            None => self.link_to_nvswitch(gpu, bytes_per_s),
        }
        Ok(())
    }

    fn xgmi(&mut self, node: Node<'_, '_>) -> Result<(), TextError> {
        let Some(gpu) = self.holder(node, "xgmi")? else { return Ok(()) };
        let count = self.count(node, "xgmi")?;
        let Some(holder) = node.parent() else { return Ok(()) };
        let Some(each) = rates::xgmi(self.attribute(holder, "gpu", "gcn")?) else {
            return Err(self.wrong(holder, "gcn", "an architecture with xGMI, such as gfx90a or gfx942"));
        };
        let target = self.target(node, "xgmi", gpu)?;
        self.link_to(gpu, target, count * each);
        Ok(())
    }

    fn c2c(&mut self, node: Node<'_, '_>) -> Result<(), TextError> {
        let Some(gpu) = self.holder(node, "c2c")? else { return Ok(()) };
        let count = self.count(node, "c2c")?;
        let megabytes = self.attribute(node, "c2c", "bw")?.parse::<u64>().ok();
        let Some(megabytes) = megabytes.filter(|each| (1..=MEGA_PER_S_MAX).contains(each)) else {
            return Err(self.wrong(node, "bw", "a number of megabytes a second"));
        };
        self.builder.duplex(gpu.node, gpu.place.cpu, count * megabytes * 1_000_000, LATENCY_NS);
        Ok(())
    }

    /// The GPU of the same host to which a link leads; `None` if the job does not have this GPU.
    fn target(
        &self,
        node: Node<'_, '_>,
        element: &'static str,
        gpu: Gpu,
    ) -> Result<Option<NodeId>, TextError> {
        let Some(bus) = rates::bus(self.attribute(node, element, "target")?) else {
            return Err(self.wrong(node, "target", "hexadecimal digits with colons and points"));
        };
        Ok(self.buses.get(&(gpu.place.host, bus)).copied().filter(|&target| target != gpu.node))
    }

    /// Adds one direction of a link. The other end lists the other direction.
    fn link_to(&mut self, gpu: Gpu, target: Option<NodeId>, bytes_per_s: u64) {
        if let Some(target) = target {
            self.builder.link(gpu.node, target, bytes_per_s, LATENCY_NS);
        }
    }

    fn link_to_nvswitch(&mut self, gpu: Gpu, bytes_per_s: u64) {
        let switch = self.nvswitch.unwrap_or_else(|| self.builder.switch("nvswitch"));
        self.nvswitch = Some(switch);
        self.builder.duplex(gpu.node, switch, bytes_per_s, LATENCY_NS);
    }

    fn count(&self, node: Node<'_, '_>, element: &'static str) -> Result<u64, TextError> {
        let count = self.attribute(node, element, "count")?.parse().ok();
        let count = count.filter(|count| (1..=COUNT_MAX).contains(count));
        count.ok_or_else(|| self.wrong(node, "count", "a number of links from 1 to 1024"))
    }

    /// Joins the CPUs of each host pairwise. Without a network, CPUs without ranks are left out.
    fn join_cpus(&mut self, root: Node<'_, '_>) -> Result<(), TextError> {
        let used: BTreeSet<NodeId> = self.gpus.values().map(|gpu| gpu.place.cpu).collect();
        let has_network = self.network.is_some();
        let cpus: Vec<&Cpu> =
            self.cpus.iter().filter(|cpu| has_network || used.contains(&cpu.node)).collect();
        if cpus.len() > CPUS_MAX {
            let error = TopologyError::TooMany { what: "CPUs", limit: CPUS_MAX };
            return Err(self.text.error(root.range().start, TextFault::Topology(error)));
        }
        for (index, one) in cpus.iter().enumerate() {
            for other in cpus[index + 1..].iter().filter(|other| other.host == one.host) {
                let bytes_per_s = one.bytes_per_s.min(other.bytes_per_s);
                self.builder.duplex(one.node, other.node, bytes_per_s, LATENCY_NS);
            }
        }
        Ok(())
    }

    /// Adds a node with a name that must be new.
    fn named(
        &mut self,
        node: Node<'_, '_>,
        name: String,
        add: impl FnOnce(&mut Builder, String) -> NodeId,
    ) -> Result<NodeId, TextError> {
        let at = node.range().start;
        if self.names.insert(name.clone(), at).is_some() {
            return Err(self.text.error(at, TextFault::Topology(TopologyError::DuplicateName { name })));
        }
        Ok(add(&mut self.builder, name))
    }

    fn on_host(&self, host: usize, name: &str) -> String {
        if self.hosts.len() > 1 { format!("host{host}.{name}") } else { name.to_owned() }
    }

    fn attribute<'a>(
        &self,
        node: Node<'a, '_>,
        element: &'static str,
        attribute: &'static str,
    ) -> Result<&'a str, TextError> {
        let missing = || self.error(node, NcclFault::Missing { element, attribute });
        node.attribute(attribute).ok_or_else(missing)
    }

    fn error(&self, node: Node<'_, '_>, fault: NcclFault) -> TextError {
        self.text.error(node.range().start, TextFault::Nccl(fault))
    }

    fn wrong(&self, node: Node<'_, '_>, attribute: &'static str, expected: &'static str) -> TextError {
        let found = node.attribute_node(attribute);
        let value = found.map_or("", |found| found.value()).to_owned();
        let at = found.map_or(node.range().start, |found| found.range_value().start);
        self.text.error(at, TextFault::Nccl(NcclFault::Attribute { attribute, value, expected }))
    }
}

fn host_hash<'a>(cpu: Node<'a, '_>) -> &'a str {
    cpu.attribute("host_hash").unwrap_or_default()
}
