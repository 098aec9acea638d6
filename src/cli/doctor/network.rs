//! Interfaces and sockets: what ranks of different hosts use where there is no RDMA.

use super::{Finding, Section};
use super::{Machine, size};

/// Most that a connection may have under way for a fast link with some delay, in bytes.
const BUFFER_BYTES_MIN: u64 = 4 << 20;

/// Fewer errors than one in this number of packets are ignored.
const PACKETS_AN_ERROR: u64 = 1_000_000;

/// An interface as the kernel shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) is_up: bool,
    pub(crate) mtu: Option<u64>,
    /// Of its link, in Mbit/s; virtual ones have none.
    pub(crate) megabits_per_s: Option<u64>,
    pub(crate) numa: Option<u64>,
    pub(crate) addresses: Vec<String>,
}

/// All interfaces but loopback, and but those that are down and have no device.
pub(crate) fn interfaces(machine: &Machine) -> Vec<Interface> {
    let folder = "sys/class/net";
    let mut found = Vec::new();
    for name in machine.names(folder) {
        let said = |file: &str| machine.text(&format!("{folder}/{name}/{file}"));
        // 772: loopback.
        if said("type").as_deref() == Some("772") || name == "lo" {
            continue;
        }
        let number = |file: &str| said(file).and_then(|text| text.parse::<u64>().ok());
        let is_up = match said("operstate").as_deref() {
            // Tunnels and the like do not know more than that they are switched on.
            Some("unknown") => number("carrier") == Some(1),
            state => state == Some("up"),
        };
        if !is_up && !machine.exists(&format!("{folder}/{name}/device")) {
            continue;
        }
        let index = number("ifindex").and_then(|index| u32::try_from(index).ok());
        let own = machine.addresses.iter().filter(|(owner, _)| Some(*owner) == index);
        found.push(Interface {
            is_up,
            mtu: number("mtu"),
            // "-1" and errors are no speed.
            megabits_per_s: number("speed").filter(|speed| *speed > 0 && *speed < u64::from(u32::MAX)),
            numa: number("device/numa_node"),
            addresses: own.map(|(_, address)| address.to_string()).collect(),
            name,
        });
    }
    found
}

/// The interface that has this address.
pub(super) fn interface_of(machine: &Machine, address: std::net::IpAddr) -> Option<String> {
    let (index, _) = machine.addresses.iter().find(|(_, own)| *own == address.to_canonical())?;
    machine
        .names("sys/class/net")
        .into_iter()
        .find(|name| machine.number(&format!("sys/class/net/{name}/ifindex")) == Some(u64::from(*index)))
}

impl Interface {
    /// The speed of its link, as text.
    pub(crate) fn speed(&self) -> String {
        match self.megabits_per_s {
            Some(speed) if speed % 1000 == 0 => format!("{} Gb/s", speed / 1000),
            Some(speed) => format!("{} Gb/s", speed as f64 / 1000.0),
            None => "speed unknown".to_owned(),
        }
    }
}

/// Interfaces, and what sockets may hold.
pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let mut section = Section::new("sockets");
    let interfaces = interfaces(machine);
    if !machine.exists("sys/class/net") {
        section.unknown("interfaces", "/sys/class/net cannot be read", "ip link");
    } else if !interfaces.iter().any(|interface| interface.is_up) {
        section.warning(
            "interfaces",
            "none is up: only ranks of this host reach each other",
            "ip link; sudo ip link set dev INTERFACE up",
        );
    }
    for interface in &interfaces {
        one(machine, interface, &mut section);
    }
    for name in ["tcp_rmem", "tcp_wmem"] {
        buffers(machine, name, &mut section);
    }
    section.done()
}

fn one(machine: &Machine, interface: &Interface, section: &mut Section) {
    let name = &interface.name;
    if !interface.is_up {
        return section.ok(name, "down, so not used");
    }
    let mtu = interface.mtu.map_or_else(|| "unknown".to_owned(), |mtu| mtu.to_string());
    let addresses = if interface.addresses.is_empty() {
        String::new()
    } else {
        format!(", {}", interface.addresses.join(" "))
    };
    let text = format!("up, {}, MTU {mtu}{addresses}", interface.speed());
    let count = |name_of: &str| machine.number(&format!("sys/class/net/{name}/statistics/{name_of}"));
    let broken = [
        ("rx_crc_errors", "rx_packets"),
        ("rx_errors", "rx_packets"),
        ("tx_errors", "tx_packets"),
        ("tx_carrier_errors", "tx_packets"),
    ];
    let broken = broken.into_iter().find_map(|(errors, packets)| {
        let (of, packets) = (count(errors)?, count(packets)?);
        (of > packets / PACKETS_AN_ERROR).then(|| format!("{errors} {of} of {packets} packets"))
    });
    if machine.text(&format!("sys/class/net/{name}/duplex")).as_deref() == Some("half") {
        return section.warning(
            name,
            format!("{text}: half duplex"),
            format!("sudo ethtool -s {name} autoneg on"),
        );
    }
    match broken {
        Some(broken) => {
            section.warning(name, format!("{text}: {broken}"), format!("ethtool -S {name} | grep -i err"))
        }
        None => section.ok(name, text),
    }
}

fn buffers(machine: &Machine, name: &str, section: &mut Section) {
    let path = format!("proc/sys/net/ipv4/{name}");
    let most = machine.text(&path).and_then(|text| text.split_whitespace().nth(2)?.parse::<u64>().ok());
    match most {
        None => section.unknown(name, format!("/{path} cannot be read"), ""),
        Some(most) if most < BUFFER_BYTES_MIN => section.warning(
            name,
            format!(
                "connections may have {} under way: too little for fast links with some delay",
                size(most)
            ),
            format!("sudo sysctl -w net.ipv4.{name}='4096 131072 16777216'"),
        ),
        Some(most) => section.ok(name, format!("up to {}", size(most))),
    }
}
