//! RDMA: library, device files, ports, links, addresses, payloads, and which of them will be used.

use std::net::IpAddr;

use pleach::transport::verbs::port::{self, ChosenPort, GidType, Port};
use pleach::transport::verbs::survey::{DeviceReport, OpenDevice, REGISTERED_BYTES};
use pleach::transport::verbs::{Connect, VerbsOptions};

use super::{Finding, Level, Section};
use super::{Machine, size};

const FOLDER: &str = "sys/class/infiniband";

/// Headers of a RoCE v2 packet that leave room for less payload, in bytes: those of IPv6, UDP,
/// InfiniBand, an atomic, and the check sum.
const ROCE_HEADER_BYTES: u32 = 40 + 8 + 12 + 28 + 4;

/// PCI devices that are RDMA devices when their driver is loaded. By row: vendor number, the first
/// digits of device numbers, the name of the maker, the kernel module.
const ADAPTERS: [(&str, &str, &str, &str); 2] =
    [("0x15b3", "0x1", "NVIDIA (Mellanox)", "mlx5_ib"), ("0x1d0f", "0xefa", "Amazon EFA", "efa")];

/// RDMA devices and their ports.
pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let mut section = Section::new("RDMA");
    let devices = machine.rdma_devices();
    if devices.is_empty() {
        return without(machine, section);
    }
    library(machine, &devices, &mut section);
    rdma_cm(machine, &mut section);
    modules(machine, &mut section);
    for device in &devices {
        files(machine, device, &mut section);
    }
    match machine.rdma_ports() {
        Ok(ports) => {
            let chosen = choose(machine, ports);
            for port in ports {
                link(machine, port, ports, chosen.is_err(), &mut section);
            }
            // Without the library no port is taken, which an earlier finding has said.
            if !matches!(machine.verbs, Some(Err(_))) {
                address(machine, ports, chosen, &mut section);
            }
            for port in ports.iter().filter(|port| port.is_active) {
                payload(machine, port, &mut section);
            }
            if machine.has_secret && ports.iter().any(|port| port.is_active) {
                section.warning(
                    "privacy",
                    "RDMA encrypts nothing: whoever shares its network reads tensors, and may change memory; \
                     the secret and TLS protect the connections over TCP alone",
                    "export PLEACH_TLS=require   # tensors over TCP, encrypted; or give jobs an RDMA network of their own",
                );
            }
        }
        Err(error) => section.unknown("ports", error.to_string(), "rdma link"),
    }
    section.done()
}

/// The ports that a rank would take, at least one, in the order in which libibverbs lists their
/// devices. Ports of other devices are left out.
pub(super) fn choose(machine: &Machine, ports: &[Port]) -> Result<Vec<ChosenPort>, String> {
    let wish = machine.wish.clone()?;
    if let Some(Err(no_library)) = &machine.verbs {
        return Err(no_library.clone());
    }
    port::choose_all(&listed(machine, ports), &wish).map_err(|error| error.to_string())
}

/// The ports whose device libibverbs lists, in its order. All ports if the library was not asked.
fn listed(machine: &Machine, ports: &[Port]) -> Vec<Port> {
    let Some(Ok(seen)) = &machine.verbs else { return ports.to_vec() };
    let of = |name| ports.iter().filter(move |port| port.device == name).cloned();
    seen.iter().flat_map(|seen| of(seen.name.as_str())).collect()
}

/// The findings of a machine without an RDMA device: whether it should have one.
fn without(machine: &Machine, mut section: Section) -> Vec<Finding> {
    let folder = "sys/bus/pci/devices";
    for address in machine.names(folder) {
        let said = |name: &str| machine.text(&format!("{folder}/{address}/{name}")).unwrap_or_default();
        let (vendor, device) = (said("vendor"), said("device"));
        let known =
            ADAPTERS.iter().find(|(maker, numbers, ..)| vendor == *maker && device.starts_with(numbers));
        if let Some((.., maker, module)) = known {
            let text = format!("{maker} adapter without an RDMA device: its driver is not loaded");
            section.warning(address, text, format!("sudo modprobe {module}"));
        }
    }
    if machine.exists("sys/class") {
        section.ok("devices", "none on this machine");
    } else {
        section.unknown("devices", "/sys/class cannot be read", "rdma link");
    }
    section.done()
}

fn library(machine: &Machine, devices: &[String], section: &mut Section) {
    let install =
        "sudo apt-get install libibverbs1 ibverbs-providers   # or: sudo dnf install rdma-core libibverbs";
    let file = machine.library("libibverbs.so.1");
    let seen = match (&machine.verbs, &file) {
        (Some(Ok(seen)), _) => seen,
        (Some(Err(error)), _) => return section.problem("libibverbs", error.clone(), install),
        (None, Some(file)) => return section.unknown("libibverbs", format!("{file}, not tried"), ""),
        (None, None) => {
            return section.problem("libibverbs", "not in the usual folders of libraries", install);
        }
    };
    let file = file.unwrap_or_else(|| "version unknown".to_owned());
    section.ok("libibverbs", format!("{file}, lists {} of {} devices", seen.len(), devices.len()));
    for device in devices {
        let subject = format!("{device} provider");
        match seen.iter().find(|seen| seen.name == *device) {
            None => {
                let driver = machine.link(&format!("{FOLDER}/{device}/device/driver"));
                let of = driver.map_or(String::new(), |driver| format!(" for its driver {driver}"));
                let text = format!("libibverbs does not list it: no provider{of}, or no right to its file");
                section.problem(subject, text, install);
            }
            Some(DeviceReport { opened: Err(error), .. }) => {
                section.problem(
                    subject,
                    error.clone(),
                    "ls -l /dev/infiniband; id   # then: sudo usermod -aG rdma $USER",
                );
            }
            Some(DeviceReport { opened: Ok(opened), .. }) => {
                let firmware = machine.text(&format!("{FOLDER}/{device}/fw_ver"));
                registered(&subject, opened, firmware.as_deref(), section);
            }
        }
    }
}

/// Whether memory could be registered, which proves limits and rights.
fn registered(subject: &str, opened: &OpenDevice, firmware: Option<&str>, section: &mut Section) {
    let most = size(REGISTERED_BYTES as u64);
    let firmware = firmware.filter(|version| !version.is_empty());
    let firmware = firmware.map_or(String::new(), |version| format!("; firmware {version}"));
    let provider = opened.provider.as_deref().map_or(String::new(), |file| format!("{file}; "));
    match &opened.not_registered {
        None => section.ok(
            subject,
            format!(
                "{provider}opened, {most} registered; up to {} queue pairs, {} regions{firmware}",
                opened.queue_pairs_max, opened.regions_max
            ),
        ),
        Some(error) => section.problem(
            subject,
            format!("{provider}opened, but {most} could not be registered ({error})"),
            "ulimit -l unlimited   # the line 'locked memory' says how, where that is refused",
        ),
    }
}

/// The library and the file of rdma_cm, if ranks are joined by it.
fn rdma_cm(machine: &Machine, section: &mut Section) {
    if !machine.wish.as_ref().is_ok_and(|wish| wish.connect == Connect::RdmaCm) {
        return;
    }
    match &machine.rdma_cm {
        Some(Err(error)) => section.problem(
            "librdmacm",
            error.clone(),
            "sudo apt-get install librdmacm1   # or: sudo dnf install librdmacm",
        ),
        Some(Ok(())) => {
            let file = machine.library("librdmacm.so.1");
            section.ok("librdmacm", file.unwrap_or_else(|| "version unknown".to_owned()));
        }
        None => section.unknown("librdmacm", "not tried", ""),
    }
    let path = "dev/infiniband/rdma_cm";
    let both = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    if !machine.exists(path) {
        section.problem("rdma_cm file", format!("/{path} is not there"), "sudo modprobe rdma_ucm");
    } else if let Err(error) = rustix::fs::access(machine.path(path), both) {
        let text = format!("/{path} may not be read and written ({error})");
        section.problem("rdma_cm file", text, format!("sudo chmod 666 /{path}"));
    } else {
        section.ok("rdma_cm file", format!("/{path}"));
    }
}

fn modules(machine: &Machine, section: &mut Section) {
    if machine.names("sys/module").is_empty() {
        return section.unknown("kernel modules", "/sys/module cannot be read", "lsmod");
    }
    if machine.exists("sys/module/ib_uverbs") || !machine.names("sys/class/infiniband_verbs").is_empty() {
        section.ok("kernel modules", "ib_uverbs is loaded");
    } else {
        section.problem("kernel modules", "ib_uverbs is not loaded", "sudo modprobe ib_uverbs");
    }
}

/// The file by which programs open a device.
fn files(machine: &Machine, device: &str, section: &mut Section) {
    let subject = format!("{device} file");
    let folder = "sys/class/infiniband_verbs";
    let is_its = |name: &String| machine.text(&format!("{folder}/{name}/ibdev")).as_deref() == Some(device);
    let Some(name) = machine.names(folder).into_iter().find(is_its) else {
        return section.unknown(subject, format!("/{folder} does not name one"), "ls /dev/infiniband");
    };
    let path = format!("dev/infiniband/{name}");
    if !machine.exists(&path) {
        let command = match machine.container() {
            Some("docker" | "podman") => "docker run --device=/dev/infiniband …".to_owned(),
            Some(_) => "ask for the cluster's RDMA device plugin in the pod's resources".to_owned(),
            None => "sudo udevadm trigger --subsystem-match=infiniband_verbs".to_owned(),
        };
        return section.problem(subject, format!("/{path} is not there"), command);
    }
    let may =
        rustix::fs::access(machine.path(&path), rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK);
    match may {
        Ok(()) => section.ok(subject, format!("/{path}")),
        Err(error) => {
            section.problem(
                subject,
                format!("/{path} may not be read and written ({error})"),
                format!("sudo chmod 666 /{path}"),
            );
        }
    }
}

fn folder_of(port: &Port) -> String {
    format!("{FOLDER}/{}/ports/{}", port.device, port.number)
}

pub(super) fn name_of(port: &Port) -> String {
    format!("{}:{}", port.device, port.number)
}

/// Whether a port is of a device made of software.
pub(super) fn is_software(machine: &Machine, port: &Port) -> bool {
    !machine.exists(&format!("{FOLDER}/{}/device", port.device))
}

fn link(machine: &Machine, port: &Port, all: &[Port], none_is_usable: bool, section: &mut Section) {
    let subject = format!("{} link", name_of(port));
    let said = |name: &str| machine.text(&format!("{}/{name}", folder_of(port)));
    let Some(state) = said("state") else {
        return section.unknown(subject, "its state cannot be read", "rdma link");
    };
    let word = |text: String| text.split_once(": ").map_or(text.clone(), |(_, word)| word.to_owned());
    let state = word(state);
    let rate = said("rate").unwrap_or_else(|| "rate unknown".to_owned());
    let layer = said("link_layer").unwrap_or_else(|| "link layer unknown".to_owned());
    let interface = port.interface.as_deref();
    let over = interface.map_or(String::new(), |name| format!(", {name}"));
    if port.is_active {
        return section.ok(subject, format!("{state}, {rate}, {layer}{over}"));
    }
    let (why, command) = why_down(machine, layer == "InfiniBand", &state, said("phys_state"), interface);
    let is_asked_for = machine.wish.as_ref().is_ok_and(|wish| {
        let mut names = wish.device.as_deref().unwrap_or_default().split(',').map(str::trim);
        names.any(|name| name == port.device || name == name_of(port))
    });
    let level = if is_asked_for || none_is_usable || !all.iter().any(|port| port.is_active) {
        Level::Problem
    } else {
        Level::Warning
    };
    section.push(level, subject, format!("{state}{over}: {why}"), Some(command));
}

fn why_down(
    machine: &Machine,
    is_infiniband: bool,
    state: &str,
    physical: Option<String>,
    interface: Option<&str>,
) -> (String, String) {
    if is_infiniband {
        return match state {
            "INIT" => (
                "the link is up, but no subnet manager answers".to_owned(),
                "sudo systemctl start opensm   # on one host of the subnet".to_owned(),
            ),
            _ => {
                let physical = physical.unwrap_or_else(|| "state of the cable unknown".to_owned());
                (
                    format!("no link ({physical}); look at the cable and the switch"),
                    "ibstat; iblinkinfo".to_owned(),
                )
            }
        };
    }
    let Some(name) = interface else {
        return ("it has no network interface".to_owned(), "rdma link".to_owned());
    };
    let flags = machine.text(&format!("sys/class/net/{name}/flags"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim_start_matches("0x"), 16).ok());
    match flags {
        Some(flags) if flags & 1 == 0 => {
            (format!("the interface {name} is switched off"), format!("sudo ip link set dev {name} up"))
        }
        _ => (format!("{name} has no link; look at the cable and the switch"), format!("ethtool {name}")),
    }
}

/// Which address will be used, and why.
fn address(
    machine: &Machine,
    ports: &[Port],
    chosen: Result<Vec<ChosenPort>, String>,
    section: &mut Section,
) {
    for port in ports.iter().filter(|port| port.is_active && port.gids.is_empty()) {
        let command = match &port.interface {
            Some(name) => format!("sudo ip addr add ADDRESS/24 dev {name}"),
            None => "rdma link".to_owned(),
        };
        section.warning(format!("{} addresses", name_of(port)), "none: peers cannot reach it", command);
    }
    let chosen = match chosen {
        Ok(chosen) => chosen,
        Err(text) => return section.problem("port to use", text, other_choice(machine, ports)),
    };
    for chosen in chosen {
        let name = chosen.gid.interface.as_deref().unwrap_or("INTERFACE");
        let give = format!("sudo ip addr add ADDRESS/24 dev {name}");
        match chosen.gid.kind {
            GidType::RoceV1 => {
                let text = format!(
                    "{}: RoCE v1 is not routed, and switches treat it as any other traffic",
                    chosen.reason
                );
                section.warning("port to use", text, give);
            }
            GidType::RoceV2Local => {
                let text = format!("{}: not routed beyond its link", chosen.reason);
                section.warning("port to use", text, give);
            }
            _ => section.ok("port to use", chosen.reason),
        }
    }
}

/// The fix for a setting that cannot be satisfied.
fn other_choice(machine: &Machine, ports: &[Port]) -> String {
    let wish = match &machine.wish {
        Ok(wish) => wish,
        // It names the variable that is wrong.
        Err(error) => {
            let variable = error.split(' ').find(|word| word.starts_with("PLEACH_VERBS_"));
            return format!("unset {}", variable.unwrap_or("PLEACH_VERBS_DEVICE"));
        }
    };
    let ports = listed(machine, ports);
    let without = |wish: VerbsOptions| port::choose_all(&ports, &wish).ok().map(|chosen| chosen[0].clone());
    let other_index = || {
        let best = without(VerbsOptions { gid_index: None, ..wish.clone() })?;
        Some(format!("unset PLEACH_VERBS_GID_INDEX   # or: export PLEACH_VERBS_GID_INDEX={}", best.gid.index))
    };
    let other_interface = || {
        let best = without(VerbsOptions { interface: None, ..wish.clone() })?;
        let address = IpAddr::V6(best.gid.address).to_canonical();
        let name = best.gid.interface.unwrap_or_else(|| address.to_string());
        Some(format!("unset PLEACH_INTERFACE   # or: export PLEACH_INTERFACE={name}"))
    };
    let other_device = || {
        let best = without(VerbsOptions { device: None, ..wish.clone() })?;
        Some(format!("export PLEACH_VERBS_DEVICE={}:{}", best.device, best.port))
    };
    let other_count = || {
        without(VerbsOptions { queue_pairs: None, ..wish.clone() })?;
        Some("unset PLEACH_VERBS_QUEUE_PAIRS".to_owned())
    };
    let mended = other_index().or_else(other_interface).or_else(other_device).or_else(other_count);
    mended.unwrap_or_else(|| match without(VerbsOptions::default()) {
        Some(_) => "unset PLEACH_VERBS_DEVICE PLEACH_VERBS_GID_INDEX PLEACH_INTERFACE".to_owned(),
        None => "rdma link; ip addr".to_owned(),
    })
}

/// The payload of a packet on a port now, and the largest possible one, in bytes. Both come from
/// the driver, or from the MTU of the interface.
pub(super) fn path_mtu(machine: &Machine, port: &Port) -> Option<(u32, u32)> {
    if let Some(Ok(seen)) = &machine.verbs
        && let Some(Ok(opened)) = seen.iter().find(|seen| seen.name == port.device).map(|seen| &seen.opened)
        && let Some(seen) = opened.ports.iter().find(|seen| seen.number == port.number)
    {
        return Some((seen.path_mtu_bytes, seen.path_mtu_bytes_max));
    }
    let name = port.interface.as_deref()?;
    let room = machine.number(&format!("sys/class/net/{name}/mtu"))?.try_into().unwrap_or(u32::MAX);
    let payload = room.saturating_sub(ROCE_HEADER_BYTES);
    let fits = [4096, 2048, 1024, 512, 256].into_iter().find(|bytes| *bytes <= payload)?;
    Some((fits, 4096))
}

fn payload(machine: &Machine, port: &Port, section: &mut Section) {
    let subject = format!("{} MTU", name_of(port));
    let Some((now, most)) = path_mtu(machine, port) else {
        return section.unknown(subject, "neither its driver nor its interface says", "ibv_devinfo");
    };
    let interface = port.interface.as_deref();
    let own = interface.and_then(|name| machine.number(&format!("sys/class/net/{name}/mtu")));
    let text = match (&interface, own) {
        (Some(name), Some(mtu)) => format!("{now} bytes of payload ({name} has MTU {mtu})"),
        _ => format!("{now} bytes of payload"),
    };
    match interface {
        Some(name) if now < most => {
            let text = format!("{text}, {most} are possible: more packets, and more work, than needed");
            section.warning(
                subject,
                text,
                format!("sudo ip link set dev {name} mtu 4200   # on all hosts and switches"),
            );
        }
        _ => section.ok(subject, text),
    }
}

/// The facts that a list of ports shows beside the addresses.
pub(crate) struct PortFacts {
    pub(crate) rate: Option<String>,
    pub(crate) layer: Option<String>,
    pub(crate) path_mtu_bytes: Option<u32>,
    pub(crate) numa: Option<u64>,
}

/// All ports, the ports that ranks take, and the reason.
pub(crate) struct Overview {
    pub(crate) ports: Vec<(Port, PortFacts)>,
    pub(crate) chosen: Result<String, String>,
}

impl Machine {
    /// The RDMA ports of this machine.
    pub(crate) fn rdma(&self) -> Overview {
        let ports = self.rdma_ports().unwrap_or_default().to_vec();
        let chosen = choose(self, &ports).map(|chosen| port::reason(&chosen));
        let facts = |port: &Port| PortFacts {
            rate: self.text(&format!("{}/rate", folder_of(port))),
            layer: self.text(&format!("{}/link_layer", folder_of(port))),
            path_mtu_bytes: path_mtu(self, port).map(|(now, _)| now),
            numa: self.number(&format!("{FOLDER}/{}/device/numa_node", port.device)),
        };
        Overview { ports: ports.into_iter().map(|port| (port.clone(), facts(&port))).collect(), chosen }
    }
}
