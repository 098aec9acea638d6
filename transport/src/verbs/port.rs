//! The choice of a device, port and GID for a rank.
//!
//! Ports are read from sysfs, because only sysfs has the types of GIDs in every version.
//! [`choose`], a pure function, takes the first active port that fits the options, and of its GIDs
//! the one with the best [`GidType`]. **Invariant:** a choice states its reason, and an error lists
//! the ports that exist.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;

use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{Access, CWD, Mode, OFlags, access, openat};

use super::wire::{NICS_MAX, QUEUE_PAIRS_MAX};
use crate::wire::Malformed;

/// The kernel's folder of RDMA devices.
pub const SYSFS: &str = "/sys/class/infiniband";

/// The type of a GID, the best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GidType {
    /// RoCE v1: not routed.
    RoceV1,
    /// RoCE v2 with a link-local IPv6 address.
    RoceV2Local,
    /// RoCE v2 with an IPv6 address.
    RoceV2,
    /// RoCE v2 with an IPv4 address.
    RoceV2Ipv4,
    /// InfiniBand.
    InfiniBand,
}

impl GidType {
    /// All types, by their numbers on the wire.
    pub(super) const ALL: [Self; 5] =
        [Self::RoceV1, Self::RoceV2Local, Self::RoceV2, Self::RoceV2Ipv4, Self::InfiniBand];

    /// The type of this number.
    pub(super) fn decode(number: u8) -> Result<Self, Malformed> {
        Self::ALL.get(usize::from(number)).copied().ok_or(Malformed)
    }

    /// Whether packets go between GIDs of the two types.
    pub(super) fn meets(self, other: Self) -> bool {
        let is_version_6 = |kind| matches!(kind, Self::RoceV2Local | Self::RoceV2);
        self == other || (is_version_6(self) && is_version_6(other))
    }
}

impl fmt::Display for GidType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2Local => "RoCE v2, link-local",
            Self::RoceV2 => "RoCE v2",
            Self::RoceV2Ipv4 => "RoCE v2 over IPv4",
            Self::InfiniBand => "InfiniBand",
        })
    }
}

/// An entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its index in the table.
    pub index: u32,
    /// The address; an IPv4 address in its mapped form.
    pub address: Ipv6Addr,
    /// Its type.
    pub kind: GidType,
    /// Its network interface; none for InfiniBand.
    pub interface: Option<String>,
}

/// A port as sysfs describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The device, as in `mlx5_0`.
    pub device: String,
    /// The number of the port, from 1.
    pub number: u8,
    /// Whether its link is up.
    pub is_active: bool,
    /// The state of its link, as the kernel writes it: `1: DOWN`, `2: INIT`, `4: ACTIVE`.
    pub state: String,
    /// Whether its link layer is InfiniBand, not Ethernet.
    pub is_infiniband: bool,
    /// Its network interface, if it has one; that of InfiniBand carries IPoIB.
    pub interface: Option<String>,
    /// The GIDs in use, by index.
    pub gids: Vec<Gid>,
}

impl Port {
    /// The remedy for a link that is down.
    fn remedy(&self) -> String {
        match &self.interface {
            _ if self.is_infiniband && self.state.ends_with("INIT") => {
                "no subnet manager answers: start opensm on one host of its subnet".to_owned()
            }
            _ if self.is_infiniband => "look at the cable and the switch; 'ibstat' says more".to_owned(),
            Some(name) => format!("'ip link set {name} up', or look at its cable"),
            None => "set its network interface up, or look at its cable".to_owned(),
        }
    }
}

/// The user's options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerbsOptions {
    /// An RDMA device (`mlx5_0`), perhaps with a port (`mlx5_0:2`), or up to four, separated by
    /// commas; long transfers use all of them.
    pub device: Option<String>,
    /// A network interface (`eth2`) or address (`10.0.0.5`) that the port must have. Ignored with
    /// several devices.
    pub interface: Option<String>,
    /// The index of the GID in the port's table.
    pub gid_index: Option<u32>,
    /// Queue pairs to each peer on each device; default 1. If two ranks differ, the smaller number
    /// counts.
    pub queue_pairs: Option<u32>,
    /// Transfers of at least this many bytes are striped over all queue pairs to their peer;
    /// default [`STRIPE_BYTES`].
    pub stripe_bytes: Option<usize>,
    /// How queue pairs are connected. All ranks must use the same value.
    pub connect: Connect,
    /// How switches treat this rank's packets.
    pub service: Service,
}

/// How switches treat the packets of a rank. A value that is not set is 0, or the choice of the
/// connection manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// The traffic class of packets with a global header, 0 to 255: six bits of DSCP and two of
    /// ECN. A lossless RoCE network selects the queue by it; 106 (DSCP 26) is usual.
    pub traffic_class: Option<u8>,
    /// The service level, 0 to 15: InfiniBand's service level, or the priority of RoCE packets with
    /// a VLAN tag.
    pub service_level: Option<u8>,
}

/// The number of service levels.
const SERVICE_LEVELS: u8 = 16;

/// How the queue pairs of two ranks are connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connect {
    /// Ranks exchange their addresses over a socket.
    #[default]
    Rendezvous,
    /// The connection manager (librdmacm) resolves address and route.
    RdmaCm,
}

/// Default of the shortest striped transfer, in bytes: for shorter ones a second doorbell and
/// signal cost more than a second NIC saves.
pub const STRIPE_BYTES: usize = 256 << 10;

impl VerbsOptions {
    /// The options in `PLEACH_VERBS_DEVICE`, `PLEACH_VERBS_GID_INDEX`, `PLEACH_VERBS_QUEUE_PAIRS`,
    /// `PLEACH_VERBS_STRIPE_BYTES`, `PLEACH_VERBS_CONNECT` (`rendezvous` or `cm`),
    /// `PLEACH_VERBS_TRAFFIC_CLASS` and `PLEACH_VERBS_SERVICE_LEVEL`.
    ///
    /// # Errors
    ///
    /// When a value is not a number, or not one of the two words.
    pub fn from_env() -> Result<Self, PortError> {
        Ok(Self {
            device: text("PLEACH_VERBS_DEVICE"),
            interface: None,
            gid_index: number("PLEACH_VERBS_GID_INDEX")?,
            queue_pairs: number("PLEACH_VERBS_QUEUE_PAIRS")?,
            stripe_bytes: number("PLEACH_VERBS_STRIPE_BYTES")?,
            connect: text("PLEACH_VERBS_CONNECT").map_or(Ok(Connect::default()), |text| text.parse())?,
            service: Service {
                traffic_class: number("PLEACH_VERBS_TRAFFIC_CLASS")?,
                service_level: number("PLEACH_VERBS_SERVICE_LEVEL")?,
            },
        })
    }

    /// The checked service.
    pub(super) fn service(&self) -> Result<Service, PortError> {
        match self.service.service_level {
            Some(wanted) if wanted >= SERVICE_LEVELS => Err(PortError::ServiceLevel { wanted }),
            _ => Ok(self.service),
        }
    }

    /// Queue pairs on each of `nics` NICs.
    pub(super) fn queue_pairs(&self, nics: usize) -> Result<u32, PortError> {
        let (wanted, most) = (self.queue_pairs.unwrap_or(1), (QUEUE_PAIRS_MAX / nics) as u32);
        if (1..=most).contains(&wanted) { Ok(wanted) } else { Err(PortError::QueuePairs { wanted, most }) }
    }
}

impl FromStr for Connect {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        match text {
            "rendezvous" => Ok(Self::Rendezvous),
            "cm" => Ok(Self::RdmaCm),
            _ => Err(PortError::NoSuchMethod { text: text.to_owned() }),
        }
    }
}

/// A variable of the environment that is not empty.
fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn number<T: FromStr>(name: &'static str) -> Result<Option<T>, PortError> {
    let Some(text) = text(name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| PortError::NoNumber { name, text })
}

/// A chosen port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenPort {
    /// The device, as in `mlx5_0`.
    pub device: String,
    /// The number of the port, from 1.
    pub port: u8,
    /// The GID that peers get.
    pub gid: Gid,
    /// The reason for the choice.
    pub reason: String,
}

/// Why no port can be used.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// The machine has no RDMA device.
    #[error(
        "this machine has no RDMA device; take --fabric tcp, or load the driver (for Soft-RoCE: rdma link add rxe0 type rxe netdev INTERFACE)"
    )]
    NoDevice,
    /// No device has that name.
    #[error("there is no RDMA device '{wanted}'; there are {known}")]
    NoSuchDevice {
        /// The configured name.
        wanted: String,
        /// The devices that exist.
        known: String,
    },
    /// No port is up and fits the options.
    #[error("no RDMA port is usable: {}", shown_all(.unusable))]
    NoPort {
        /// Each port with its defect.
        unusable: Vec<Unusable>,
    },
    /// More NICs than a rank supports.
    #[error("PLEACH_VERBS_DEVICE names {wanted} devices; name at most {NICS_MAX}")]
    TooManyDevices {
        /// How many are configured.
        wanted: usize,
    },
    /// The number of queue pairs is out of range.
    #[error(
        "{wanted} queue pairs to each peer on each device (PLEACH_VERBS_QUEUE_PAIRS) cannot be; take 1 to {most}"
    )]
    QueuePairs {
        /// The configured number.
        wanted: u32,
        /// The largest number.
        most: u32,
    },
    /// The service level is out of range.
    #[error("PLEACH_VERBS_SERVICE_LEVEL is {wanted}; take 0 to 15")]
    ServiceLevel {
        /// The configured level.
        wanted: u8,
    },
    /// The table has no GID with that index.
    #[error("GID index {index} does not exist on {port}; there are {known}")]
    NoSuchGid {
        /// The configured index.
        index: u32,
        /// The port.
        port: String,
        /// The indices that exist.
        known: String,
    },
    /// The value is not a number.
    #[error("{name} is no number, or too large: '{text}'")]
    NoNumber {
        /// The environment variable.
        name: &'static str,
        /// Its value.
        text: String,
    },
    /// Unknown connect method.
    #[error("PLEACH_VERBS_CONNECT is '{text}'; take 'rendezvous' or 'cm'")]
    NoSuchMethod {
        /// The configured method.
        text: String,
    },
    /// Sysfs is not readable.
    #[error("{path} is not readable ({kind})")]
    Sysfs {
        /// The file or folder.
        path: String,
        /// The error.
        kind: io::ErrorKind,
    },
}

/// A port that cannot be used, with the reason.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// Its link is down.
    #[error("{port} is down ({remedy})")]
    Down {
        /// Device and number.
        port: String,
        /// The remedy.
        remedy: String,
    },
    /// Its GID table has no fitting entry.
    #[error(
        "{port} has no RoCE or InfiniBand address{} (give its interface one)",
        .of.as_deref().map_or(String::new(), |of| format!(" of {of}"))
    )]
    NoAddress {
        /// Device and number.
        port: String,
        /// The configured interface or address, if any.
        of: Option<String>,
    },
}

fn shown_all(unusable: &[Unusable]) -> String {
    unusable.iter().map(Unusable::to_string).collect::<Vec<_>>().join("; ")
}

/// All ports of these devices in this sysfs folder.
///
/// # Errors
///
/// [`PortError::Sysfs`].
pub fn ports(sysfs: &Path, devices: &[String]) -> Result<Vec<Port>, PortError> {
    let mut found = Vec::new();
    for device in devices {
        let folder = sysfs.join(device).join("ports");
        for number in numbers(&folder)? {
            let port = folder.join(number.to_string());
            let state = read(&port.join("state")).unwrap_or_default();
            let is_infiniband = read(&port.join("link_layer")).is_none_or(|layer| layer == "InfiniBand");
            let gids = gids(&port, is_infiniband)?;
            let interface = interface(&sysfs.join(device), &port, &gids);
            let (device, number, is_active) = (device.clone(), number as u8, state.starts_with('4'));
            found.push(Port { device, number, is_active, state, is_infiniband, interface, gids });
        }
    }
    Ok(found)
}

/// The network interface of a port. While the link is down, the port has no addresses, but the
/// kernel's table of interfaces still names the interface. So the table is read if the addresses do
/// not name it.
fn interface(device: &Path, port: &Path, gids: &[Gid]) -> Option<String> {
    let of_address = gids.iter().find_map(|gid| gid.interface.clone());
    let table = port.join("gid_attrs/ndevs");
    let places = || numbers(&table).unwrap_or_default();
    let of_table = || places().into_iter().find_map(|index| read(&table.join(index.to_string())));
    let of_software = || read(&device.join("parent"));
    let of_device = || {
        let entries = fs::read_dir(device.join("device/net")).ok()?;
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).min()
    };
    of_address.or_else(of_table).or_else(of_software).or_else(of_device).filter(|name| !name.is_empty())
}

fn gids(port: &Path, is_infiniband: bool) -> Result<Vec<Gid>, PortError> {
    let mut found = Vec::new();
    let path = port.join("gids");
    let sysfs = |error: rustix::io::Errno| PortError::Sysfs {
        path: path.display().to_string(),
        kind: io::Error::from(error).kind(),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let table = openat(CWD, &path, flags, Mode::empty()).map_err(sysfs)?;
    for index in numbers(&path)? {
        // Unused entries have no type, or cannot be read.
        let name = index.to_string();
        let Some(address) = address(table.as_fd(), &name) else { continue };
        if address.is_unspecified() || address.segments()[4..] == [0; 4] {
            continue;
        }
        let kind = read(&port.join("gid_attrs/types").join(&name)).unwrap_or_default();
        let kind = match kind.as_str() {
            _ if is_infiniband => GidType::InfiniBand,
            "RoCE v2" if address.to_ipv4_mapped().is_some() => GidType::RoceV2Ipv4,
            "RoCE v2" if address.is_unicast_link_local() => GidType::RoceV2Local,
            "RoCE v2" => GidType::RoceV2,
            _ => GidType::RoceV1,
        };
        let interface = read(&port.join("gid_attrs/ndevs").join(&name));
        found.push(Gid { index, address, kind, interface });
    }
    Ok(found)
}

/// The address of an entry in a port's table of GIDs. A table has up to 1,024 entries, nearly all
/// of them unused, so an entry costs three system calls and no walk along the path.
fn address(table: BorrowedFd<'_>, entry: &str) -> Option<Ipv6Addr> {
    const TEXT_BYTES_MAX: usize = 64;
    let file = openat(table, entry, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0; TEXT_BYTES_MAX];
    let len = rustix::io::read(&file, &mut text).ok()?;
    std::str::from_utf8(&text[..len]).ok()?.trim().parse().ok()
}

/// The error when this user cannot open the file of a device.
pub(super) fn refusal(device: &str) -> Option<io::Error> {
    let mut files = fs::read_dir("/sys/class/infiniband_verbs").ok()?;
    let file = files.find_map(|entry| {
        let entry = entry.ok()?;
        let is_its = read(&entry.path().join("ibdev"))? == device;
        is_its.then(|| Path::new("/dev/infiniband").join(entry.file_name()))
    })?;
    access(&file, Access::READ_OK | Access::WRITE_OK).err().map(io::Error::from)
}

/// The numeric names of a folder's entries, in order.
fn numbers(folder: &Path) -> Result<Vec<u32>, PortError> {
    let entries = fs::read_dir(folder)
        .map_err(|error| PortError::Sysfs { path: folder.display().to_string(), kind: error.kind() })?;
    let mut numbers: Vec<u32> =
        entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn read(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

impl VerbsOptions {
    /// The devices whose ports a rank with these options has to know: those that it names, if all
    /// of them exist, otherwise all, which an error then lists.
    pub(super) fn considered(&self, mut devices: Vec<String>) -> Vec<String> {
        let device = |part: &str| part.trim().split(':').next().unwrap_or_default().to_owned();
        let named: Vec<String> = self.device.iter().flat_map(|text| text.split(',')).map(device).collect();
        if !named.is_empty() && named.iter().all(|name| devices.contains(name)) {
            devices.retain(|name| named.contains(name));
        }
        devices
    }
}

/// Chooses a port for each device of the options. See the module.
///
/// # Errors
///
/// See [`PortError`].
pub fn choose_all(ports: &[Port], options: &VerbsOptions) -> Result<Vec<ChosenPort>, PortError> {
    let names: Vec<&str> = options.device.as_deref().map_or(Vec::new(), |text| text.split(',').collect());
    if names.len() > NICS_MAX {
        return Err(PortError::TooManyDevices { wanted: names.len() });
    }
    let each = |name: &str| VerbsOptions {
        device: Some(name.trim().to_owned()),
        interface: None,
        ..options.clone()
    };
    let chosen = match names.len() {
        0 | 1 => vec![choose(ports, options)?],
        _ => names.into_iter().map(|name| choose(ports, &each(name))).collect::<Result<_, _>>()?,
    };
    options.queue_pairs(chosen.len())?;
    Ok(chosen)
}

/// The reasons of a choice, in one line.
#[must_use]
pub fn reason(chosen: &[ChosenPort]) -> String {
    chosen.iter().map(|chosen| chosen.reason.as_str()).collect::<Vec<_>>().join("; ")
}

/// Chooses a port of one device.
fn choose(ports: &[Port], options: &VerbsOptions) -> Result<ChosenPort, PortError> {
    if ports.is_empty() {
        return Err(PortError::NoDevice);
    }
    let is_named = |port: &&Port| match options.device.as_deref().map(|text| (text, text.split_once(':'))) {
        None => true,
        Some((device, None)) => port.device == device,
        Some((_, Some((device, number)))) => port.device == device && number.parse() == Ok(port.number),
    };
    let named: Vec<&Port> = ports.iter().filter(is_named).collect();
    if named.is_empty() {
        let known: Vec<String> =
            ports.iter().map(|port| format!("{}:{}", port.device, port.number)).collect();
        let wanted = options.device.clone().unwrap_or_default();
        return Err(PortError::NoSuchDevice { wanted, known: known.join(" ") });
    }
    let mut unusable = Vec::new();
    for port in named {
        let name = format!("{}:{}", port.device, port.number);
        if !port.is_active {
            unusable.push(Unusable::Down { port: name, remedy: port.remedy() });
            continue;
        }
        let has = |gid: &&Gid| options.interface.as_deref().is_none_or(|wanted| fits(gid, wanted));
        let fitting: Vec<&Gid> = port.gids.iter().filter(has).collect();
        let gid = match options.gid_index {
            Some(index) => Some(port.gids.iter().find(|gid| gid.index == index).ok_or_else(|| {
                let known: Vec<String> = port.gids.iter().map(|gid| gid.index.to_string()).collect();
                PortError::NoSuchGid { index, port: name.clone(), known: known.join(" ") }
            })?),
            // Among equal types the first.
            None => fitting.iter().rev().max_by_key(|gid| gid.kind).copied(),
        };
        let Some(gid) = gid else {
            unusable.push(Unusable::NoAddress { port: name, of: options.interface.clone() });
            continue;
        };
        let why = match (options.gid_index, port.gids.len()) {
            (Some(_), _) => "asked for".to_owned(),
            (None, 1) => "the only one".to_owned(),
            (None, count) => format!("{} is the best of {count}", gid.kind),
        };
        let (index, address, kind) = (gid.index, shown(gid.address), gid.kind);
        let reason = format!("{name}, GID index {index} ({address}, {kind}): {why}");
        return Ok(ChosenPort { device: port.device.clone(), port: port.number, gid: gid.clone(), reason });
    }
    Err(PortError::NoPort { unusable })
}

/// Whether a GID belongs to this interface, or is this address.
fn fits(gid: &Gid, wanted: &str) -> bool {
    let address: Option<IpAddr> = wanted.trim_matches(['[', ']']).parse().ok();
    match address {
        Some(address) => address.to_canonical() == IpAddr::V6(gid.address).to_canonical(),
        None => gid.interface.as_deref() == Some(wanted),
    }
}

fn shown(address: Ipv6Addr) -> IpAddr {
    IpAddr::V6(address).to_canonical()
}

#[cfg(test)]
mod tests;
