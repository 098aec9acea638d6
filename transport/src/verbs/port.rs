//! Which device, port and address (GID) a rank uses, and why.
//!
//! What there is is read from sysfs (the kinds of GIDs stand nowhere else in every version); what
//! is taken is decided by [`choose`], a pure function over it: the first active port that fits what
//! was asked for, and of its GIDs the best [`Kind`]. **Invariant:** a choice says its reason in
//! words, and a refusal lists what was there.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;

use super::wire::{NICS_MAX, QUEUE_PAIRS_MAX};

use rustix::fs::{Access, access};

/// Where the kernel tells of RDMA devices.
pub const SYSFS: &str = "/sys/class/infiniband";

/// What an address of a port is good for, the best last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// RoCE v1: not routed.
    RoceV1,
    /// RoCE v2 of an IPv6 address that is valid on its link only.
    RoceV2Local,
    /// RoCE v2 of an IPv6 address.
    RoceV2,
    /// RoCE v2 of an IPv4 address.
    RoceV2Ipv4,
    /// InfiniBand: the subnet's own.
    InfiniBand,
}

impl Kind {
    /// All of them, as ranks number them for each other.
    pub(super) const ALL: [Self; 5] =
        [Self::RoceV1, Self::RoceV2Local, Self::RoceV2, Self::RoceV2Ipv4, Self::InfiniBand];

    /// Whether packets go from an address of this kind to one of the other.
    pub(super) fn meets(self, other: Self) -> bool {
        let is_version_6 = |kind| matches!(kind, Self::RoceV2Local | Self::RoceV2);
        self == other || (is_version_6(self) && is_version_6(other))
    }
}

impl fmt::Display for Kind {
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

/// An entry of a port's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gid {
    /// Its number in the table.
    pub index: u32,
    /// The address; of an IPv4 address its form in IPv6.
    pub address: Ipv6Addr,
    /// What it is good for.
    pub kind: Kind,
    /// Its network interface; none for InfiniBand.
    pub interface: Option<String>,
}

/// A port as sysfs shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// As in `mlx5_0`.
    pub device: String,
    /// Counted from 1.
    pub number: u8,
    /// Whether its link is up.
    pub is_active: bool,
    /// The state of its link, as the kernel writes it: `1: DOWN`, `2: INIT`, `4: ACTIVE`.
    pub state: String,
    /// Whether it is of an InfiniBand subnet, and not of Ethernet.
    pub is_infiniband: bool,
    /// The network interface under it, where one shows; of InfiniBand it carries IP over it.
    pub interface: Option<String>,
    /// The addresses that are in use, by index.
    pub gids: Vec<Gid>,
}

impl Port {
    /// What to do where its link is down.
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

/// What was asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// An RDMA device (`mlx5_0`), perhaps with a port (`mlx5_0:2`), or up to four with commas
    /// between, of which long transfers use all.
    pub device: Option<String>,
    /// A network interface (`eth2`) or address (`10.0.0.5`) that the port must have. Not for
    /// several devices.
    pub interface: Option<String>,
    /// The number of the GID in the port's table.
    pub gid_index: Option<u32>,
    /// Queue pairs to each peer on each device; one where nothing is said. Of two ranks that wish
    /// different numbers the smaller one counts.
    pub queue_pairs: Option<u32>,
    /// Transfers of so many bytes or more go in parts over all queue pairs to their peer;
    /// [`STRIPE_BYTES`] where nothing is said.
    pub stripe_bytes: Option<usize>,
    /// How queue pairs find each other. All ranks must wish the same.
    pub connect: Connect,
    /// How switches treat this rank's packets.
    pub service: Service,
}

/// How switches treat the packets of a rank. What is not said is 0, or what the connection manager
/// chooses where that joins ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Service {
    /// The traffic class of packets with a global header, 0 to 255: six bits of DSCP and two of
    /// ECN. A lossless RoCE network tells its queue by it; 106 (DSCP 26) is usual.
    pub traffic_class: Option<u8>,
    /// The service level, 0 to 15: InfiniBand's virtual queue pair, or the priority of RoCE packets
    /// with a VLAN tag.
    pub service_level: Option<u8>,
}

/// Service levels are less than this.
const SERVICE_LEVELS: u8 = 16;

/// How the queue pairs of two ranks find each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connect {
    /// Ranks tell each other, over a socket, where they are.
    #[default]
    Rendezvous,
    /// The connection manager (librdmacm) finds the address and the route: for networks that need
    /// it.
    RdmaCm,
}

/// Shortest transfer that goes over several queue pairs, in bytes, where nothing else is wished:
/// below, the time of a second doorbell and signal is more than a second NIC saves.
pub const STRIPE_BYTES: usize = 256 << 10;

impl Wish {
    /// What `PLEACH_VERBS_DEVICE`, `PLEACH_VERBS_GID_INDEX`, `PLEACH_VERBS_QUEUE_PAIRS`,
    /// `PLEACH_VERBS_STRIPE_BYTES`, `PLEACH_VERBS_CONNECT` (`rendezvous` or `cm`),
    /// `PLEACH_VERBS_TRAFFIC_CLASS` and `PLEACH_VERBS_SERVICE_LEVEL` say.
    ///
    /// # Errors
    ///
    /// Something that should be a number, or one of those two, and is none.
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

    /// The service, where there is such a one.
    pub(super) fn service(&self) -> Result<Service, PortError> {
        match self.service.service_level {
            Some(wanted) if wanted >= SERVICE_LEVELS => Err(PortError::ServiceLevel { wanted }),
            _ => Ok(self.service),
        }
    }

    /// Queue pairs on each of so many NICs.
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
            _ => Err(PortError::NoSuchWay { text: text.to_owned() }),
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

/// What is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// As in `mlx5_0`.
    pub device: String,
    /// Counted from 1.
    pub port: u8,
    /// The address that peers are told.
    pub gid: Gid,
    /// Why these, for people.
    pub reason: String,
}

/// Why no port can be used.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// No RDMA device.
    #[error(
        "this machine has no RDMA device; take --fabric tcp, or load the driver (for Soft-RoCE: rdma link add rxe0 type rxe netdev INTERFACE)"
    )]
    NoDevice,
    /// None of that name.
    #[error("there is no RDMA device '{wanted}'; there are {known}")]
    NoSuchDevice {
        /// What was asked for.
        wanted: String,
        /// What there is.
        known: String,
    },
    /// None that is up, or has what was asked for.
    #[error("no RDMA port is usable: {}", shown_all(.looked_at))]
    NoPort {
        /// Each port and what is wrong with it.
        looked_at: Vec<Unusable>,
    },
    /// More NICs than a rank uses.
    #[error("PLEACH_VERBS_DEVICE names {wanted} devices; name at most {NICS_MAX}")]
    TooManyDevices {
        /// How many were asked for.
        wanted: usize,
    },
    /// No such number of queue pairs.
    #[error(
        "{wanted} queue pairs to each peer on each device (PLEACH_VERBS_QUEUE_PAIRS) cannot be; take 1 to {most}"
    )]
    QueuePairs {
        /// How many were asked for.
        wanted: u32,
        /// How many there may be.
        most: u32,
    },
    /// No such service level.
    #[error("PLEACH_VERBS_SERVICE_LEVEL is {wanted}; take 0 to 15")]
    ServiceLevel {
        /// What was asked for.
        wanted: u8,
    },
    /// The number is not in the table.
    #[error("GID index {index} does not exist on {port}; there are {known}")]
    NoSuchGid {
        /// What was asked for.
        index: u32,
        /// On which port.
        port: String,
        /// What there is.
        known: String,
    },
    /// No number.
    #[error("{name} is no number, or too large: '{text}'")]
    NoNumber {
        /// Which variable of the environment.
        name: &'static str,
        /// What it is.
        text: String,
    },
    /// No such way to connect.
    #[error("PLEACH_VERBS_CONNECT is '{text}'; take 'rendezvous' or 'cm'")]
    NoSuchWay {
        /// What was asked for.
        text: String,
    },
    /// Sysfs is not readable.
    #[error("{path} is not readable ({kind})")]
    Sysfs {
        /// Which file or folder.
        path: String,
        /// Why.
        kind: io::ErrorKind,
    },
}

/// A port that cannot be used, and why.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unusable {
    /// Its link is down.
    #[error("{port} is down ({remedy})")]
    Down {
        /// Device and number.
        port: String,
        /// What to do.
        remedy: String,
    },
    /// Its table of GIDs has no entry that does.
    #[error(
        "{port} has no RoCE or InfiniBand address{} (give its interface one)",
        .of.as_deref().map_or(String::new(), |of| format!(" of {of}"))
    )]
    NoAddress {
        /// Device and number.
        port: String,
        /// Of which interface or address, where one was asked for.
        of: Option<String>,
    },
}

fn shown_all(looked_at: &[Unusable]) -> String {
    looked_at.iter().map(Unusable::to_string).collect::<Vec<_>>().join("; ")
}

/// All ports of these devices, as this sysfs folder shows them.
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

/// The network interface of a port. Addresses go with the link, but not their places in the table.
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
    for index in numbers(&port.join("gids"))? {
        // Entries that are not used have no type, or cannot be read.
        let name = index.to_string();
        let Some(address) = read(&port.join("gids").join(&name)).and_then(|text| text.parse().ok()) else {
            continue;
        };
        let address: Ipv6Addr = address;
        if address.is_unspecified() || address.segments()[4..] == [0; 4] {
            continue;
        }
        let kind = read(&port.join("gid_attrs/types").join(&name)).unwrap_or_default();
        let kind = match kind.as_str() {
            _ if is_infiniband => Kind::InfiniBand,
            "RoCE v2" if address.to_ipv4_mapped().is_some() => Kind::RoceV2Ipv4,
            "RoCE v2" if address.is_unicast_link_local() => Kind::RoceV2Local,
            "RoCE v2" => Kind::RoceV2,
            _ => Kind::RoceV1,
        };
        let interface = read(&port.join("gid_attrs/ndevs").join(&name));
        found.push(Gid { index, address, kind, interface });
    }
    Ok(found)
}

/// Why this user cannot open the file of a device, where that is so.
pub(super) fn refusal(device: &str) -> Option<io::Error> {
    let mut files = fs::read_dir("/sys/class/infiniband_verbs").ok()?;
    let file = files.find_map(|entry| {
        let entry = entry.ok()?;
        let is_its = read(&entry.path().join("ibdev"))? == device;
        is_its.then(|| Path::new("/dev/infiniband").join(entry.file_name()))
    })?;
    access(&file, Access::READ_OK | Access::WRITE_OK).err().map(io::Error::from)
}

/// The numbers that name entries of a folder, in order.
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

/// What to use of these ports, one for each device that was named. See the module.
///
/// # Errors
///
/// See [`PortError`].
pub fn choose_all(ports: &[Port], wish: &Wish) -> Result<Vec<Chosen>, PortError> {
    let names: Vec<&str> = wish.device.as_deref().map_or(Vec::new(), |text| text.split(',').collect());
    if names.len() > NICS_MAX {
        return Err(PortError::TooManyDevices { wanted: names.len() });
    }
    let each = |name: &str| Wish { device: Some(name.trim().to_owned()), interface: None, ..wish.clone() };
    let chosen = match names.len() {
        0 | 1 => vec![choose(ports, wish)?],
        _ => names.into_iter().map(|name| choose(ports, &each(name))).collect::<Result<_, _>>()?,
    };
    wish.queue_pairs(chosen.len())?;
    Ok(chosen)
}

/// Why these were taken, in one line.
#[must_use]
pub fn reason(chosen: &[Chosen]) -> String {
    chosen.iter().map(|chosen| chosen.reason.as_str()).collect::<Vec<_>>().join("; ")
}

/// What to use of these ports, of one device.
fn choose(ports: &[Port], wish: &Wish) -> Result<Chosen, PortError> {
    if ports.is_empty() {
        return Err(PortError::NoDevice);
    }
    let is_named = |port: &&Port| match wish.device.as_deref().map(|text| (text, text.split_once(':'))) {
        None => true,
        Some((device, None)) => port.device == device,
        Some((_, Some((device, number)))) => port.device == device && number.parse() == Ok(port.number),
    };
    let named: Vec<&Port> = ports.iter().filter(is_named).collect();
    if named.is_empty() {
        let known: Vec<String> =
            ports.iter().map(|port| format!("{}:{}", port.device, port.number)).collect();
        let wanted = wish.device.clone().unwrap_or_default();
        return Err(PortError::NoSuchDevice { wanted, known: known.join(" ") });
    }
    let mut looked_at = Vec::new();
    for port in named {
        let name = format!("{}:{}", port.device, port.number);
        if !port.is_active {
            looked_at.push(Unusable::Down { port: name, remedy: port.remedy() });
            continue;
        }
        let has = |gid: &&Gid| wish.interface.as_deref().is_none_or(|wanted| fits(gid, wanted));
        let fitting: Vec<&Gid> = port.gids.iter().filter(has).collect();
        let gid = match wish.gid_index {
            Some(index) => Some(port.gids.iter().find(|gid| gid.index == index).ok_or_else(|| {
                let known: Vec<String> = port.gids.iter().map(|gid| gid.index.to_string()).collect();
                PortError::NoSuchGid { index, port: name.clone(), known: known.join(" ") }
            })?),
            // Of equal ones the first.
            None => fitting.iter().rev().max_by_key(|gid| gid.kind).copied(),
        };
        let Some(gid) = gid else {
            looked_at.push(Unusable::NoAddress { port: name, of: wish.interface.clone() });
            continue;
        };
        let why = match (wish.gid_index, port.gids.len()) {
            (Some(_), _) => "asked for".to_owned(),
            (None, 1) => "the only one".to_owned(),
            (None, count) => format!("{} is the best of {count}", gid.kind),
        };
        let (index, address, kind) = (gid.index, shown(gid.address), gid.kind);
        let reason = format!("{name}, GID index {index} ({address}, {kind}): {why}");
        return Ok(Chosen { device: port.device.clone(), port: port.number, gid: gid.clone(), reason });
    }
    Err(PortError::NoPort { looked_at })
}

/// Whether a GID is of this interface, or of this address.
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
