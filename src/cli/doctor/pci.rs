//! How NICs and GPUs hang on PCI: width and speed, and what keeps them from talking to each other
//! directly.

use super::Machine;
use super::{Finding, Section};

const DEVICES: &str = "sys/bus/pci/devices";

/// Where extended capabilities begin in a device's configuration, and how long that is, in bytes.
const EXTENDED_FROM: usize = 0x100;
const CONFIGURATION_BYTES: usize = 0x1000;

/// The capability Access Control Services, and where in it what is switched on stands.
const ACS: u16 = 0x000d;
const ACS_CONTROL: usize = 6;

/// Its bits that send what one device writes to another up to the CPU: redirected requests and
/// completions, and forwarding.
const ACS_REDIRECTS: u16 = 0x04 | 0x08 | 0x10;

/// What is looked at: a name for people, and its path under the root.
struct PciDevice {
    name: String,
    address: String,
    is_gpu: bool,
}

/// PCI.
pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let mut section = Section::new("PCI");
    let parts = parts(machine);
    for part in &parts {
        width(machine, part, &mut section);
    }
    if !parts.is_empty() {
        translation(machine, &parts, &mut section);
        if parts.len() > 1 && parts.iter().any(|part| part.is_gpu) {
            redirects(machine, &parts, &mut section);
        }
    }
    section.done()
}

/// RDMA devices and GPUs on PCI, each device once.
fn parts(machine: &Machine) -> Vec<PciDevice> {
    let mut parts: Vec<PciDevice> = Vec::new();
    for name in machine.rdma_devices() {
        let real = machine.real(&format!("sys/class/infiniband/{name}/device"));
        let address = real.as_deref().and_then(|real| real.rsplit('/').next()).map(str::to_owned);
        if let Some(address) = address.filter(|address| machine.exists(&format!("{DEVICES}/{address}")))
            && !parts.iter().any(|part| part.address == address)
        {
            parts.push(PciDevice { name, address, is_gpu: false });
        }
    }
    let gpus = machine.gpus().into_iter();
    parts.extend(gpus.map(|address| PciDevice { name: format!("GPU {address}"), address, is_gpu: true }));
    parts
}

fn width(machine: &Machine, part: &PciDevice, section: &mut Section) {
    let folder = format!("{DEVICES}/{}", part.address);
    let lanes = |folder: &str, name: &str| {
        machine.number(&format!("{folder}/{name}")).filter(|lanes| (1..=32).contains(lanes))
    };
    let speed = |folder: &str, name: &str| {
        let text = machine.text(&format!("{folder}/{name}"))?;
        text.split(' ').next()?.parse::<f64>().ok()
    };
    let subject = format!("{} link", part.name);
    let look = format!("sudo lspci -vv -s {} | grep -i lnksta", part.address);
    let wide = (lanes(&folder, "current_link_width"), lanes(&folder, "max_link_width"));
    let (Some(now), Some(most)) = wide else {
        return section.unknown(subject, "its width cannot be read, as in many virtual machines", &look);
    };
    let fast = (speed(&folder, "current_link_speed"), speed(&folder, "max_link_speed"));
    let shown = match fast {
        (Some(now_fast), Some(most_fast)) => format!("x{now} of x{most}, {now_fast} of {most_fast} GT/s"),
        _ => format!("x{now} of x{most}"),
    };
    // What the slot allows, where the port above says so.
    let above = machine.real(&folder).and_then(|real| Some(real.rsplit_once('/')?.0.to_owned()));
    let slot = above.as_deref().and_then(|above| lanes(above, "max_link_width"));
    if now < most {
        let why = match slot {
            Some(slot) if slot <= now => {
                format!("its slot has no more than x{slot}; another slot gives more")
            }
            _ => "card or riser do not sit well, or share the slot's lanes".to_owned(),
        };
        return section.warning(subject, format!("{shown}: {why}"), look);
    }
    match fast {
        // A GPU that has nothing to do slows its link down.
        (Some(now), Some(most)) if now < most && !part.is_gpu => {
            section.warning(
                subject,
                format!("{shown}: slower than it could be; look at slot, riser and firmware"),
                look,
            );
        }
        _ => section.ok(subject, shown),
    }
}

/// Whether addresses of devices are translated.
fn translation(machine: &Machine, parts: &[PciDevice], section: &mut Section) {
    if !machine.exists("sys/class/iommu") {
        return section.unknown("IOMMU", "/sys/class/iommu cannot be read", "dmesg | grep -i iommu");
    }
    if machine.names("sys/class/iommu").is_empty() {
        return section.ok("IOMMU", "off");
    }
    for part in parts {
        let kind = machine.text(&format!("{DEVICES}/{}/iommu_group/type", part.address));
        let subject = format!("IOMMU of {}", part.name);
        match kind.as_deref() {
            Some("identity") => section.ok(subject, "passes through"),
            Some(kind) => section.warning(
                subject,
                format!("translates ({kind}): slower, and between devices only by way of the CPU"),
                "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && sudo update-grub   # then restart",
            ),
            None => section.unknown(subject, "on; its kind cannot be read", "cat /proc/cmdline"),
        }
    }
}

/// The bits of ACS that are on, from a device's configuration; `None` where this is not all of it,
/// `Some(0)` without ACS.
fn acs(configuration: &[u8]) -> Option<u16> {
    if configuration.len() < CONFIGURATION_BYTES {
        return None;
    }
    let word = |at: usize| u16::from_le_bytes([configuration[at], configuration[at + 1]]);
    let mut at = EXTENDED_FROM;
    // Each capability is named once, so a longer chain is a cycle.
    for _ in 0..CONFIGURATION_BYTES / 4 {
        if word(at) == ACS {
            return Some(if at + ACS_CONTROL + 2 <= CONFIGURATION_BYTES {
                word(at + ACS_CONTROL)
            } else {
                0
            });
        }
        let next = usize::from(word(at + 2) >> 4);
        if next < EXTENDED_FROM || next + 4 > CONFIGURATION_BYTES {
            break;
        }
        at = next;
    }
    Some(0)
}

/// Bridges above GPUs and NICs that send everything up to the CPU.
fn redirects(machine: &Machine, parts: &[PciDevice], section: &mut Section) {
    let mut bridges: Vec<String> = Vec::new();
    for part in parts {
        let real = machine.real(&format!("{DEVICES}/{}", part.address)).unwrap_or_default();
        let mut above: Vec<&str> =
            real.split('/').filter(|name| name.contains(':') && !name.starts_with("pci")).collect();
        above.pop();
        bridges.extend(above.into_iter().map(str::to_owned));
    }
    bridges.sort();
    bridges.dedup();
    let mut hidden = 0;
    let mut redirecting = Vec::new();
    for bridge in bridges {
        match machine.bytes(&format!("{DEVICES}/{bridge}/config")).and_then(|bytes| acs(&bytes)) {
            None => hidden += 1,
            Some(bits) if bits & ACS_REDIRECTS != 0 => redirecting.push(bridge),
            Some(_) => {}
        }
    }
    if !redirecting.is_empty() {
        let text =
            format!("on at {}: NICs and GPUs reach each other only by way of the CPU", redirecting.join(" "));
        let command = format!(
            "for bridge in {}; do sudo setpci -s $bridge ECAP_ACS+6.w=0000; done   # or switch it off in the firmware",
            redirecting.join(" ")
        );
        section.warning("ACS", text, command);
    } else if hidden > 0 {
        section.unknown("ACS", format!("{hidden} bridges show it to root only"), "sudo pleach doctor");
    } else {
        section.ok("ACS", "redirects nothing");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn configuration(capabilities: &[(usize, u16, usize)]) -> Vec<u8> {
        let mut bytes = vec![0; CONFIGURATION_BYTES];
        for &(at, id, next) in capabilities {
            bytes[at..at + 2].copy_from_slice(&id.to_le_bytes());
            bytes[at + 2..at + 4].copy_from_slice(&(((next as u16) << 4) | 1).to_le_bytes());
        }
        bytes
    }

    #[test]
    fn access_control_is_found_in_the_chain_of_capabilities() {
        let mut bytes = configuration(&[(0x100, 1, 0x148), (0x148, ACS, 0)]);
        assert_eq!(acs(&bytes), Some(0));
        bytes[0x148 + ACS_CONTROL] = 0x1d;
        assert_eq!(acs(&bytes), Some(0x1d));
        assert_eq!(acs(&bytes[..256]), None, "what only root sees is not known");
        assert_eq!(acs(&configuration(&[(0x100, 1, 0x100)])), Some(0), "a cycle ends");
        assert_eq!(acs(&configuration(&[(0x100, 1, 0xffc), (0xffc, ACS, 0)])), Some(0), "the end is kept to");
    }
}
