use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::topology::NodeKind;

/// A root directory with files as the kernel writes them. It is deleted when dropped.
struct Root(PathBuf);

impl Root {
    fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // Relaxed: only the number must be unique, and it orders nothing.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pleach-machine-{}-{number}", std::process::id()));
        fs::create_dir_all(path.join("sys/bus/pci/devices")).unwrap();
        Self(path)
    }

    /// A device at the end of a chain of ports. Each port has a speed and a width in the form of
    /// the kernel.
    fn device(&self, chain: &[(&str, &str, &str)], class: &str, vendor: &str, numa: i32) -> PathBuf {
        let mut path = self.0.join("sys/devices/pci0000:00");
        for (address, speed, width) in chain {
            path.push(address);
            fs::create_dir_all(&path).unwrap();
            let is_device = *address == chain[chain.len() - 1].0;
            let (class, vendor) = if is_device { (class, vendor) } else { ("0x060400", "0x1000") };
            let numa = numa.to_string();
            let files = [
                ("class", class),
                ("vendor", vendor),
                ("numa_node", &numa),
                ("max_link_speed", speed),
                ("max_link_width", width),
            ];
            for (name, value) in files.iter().filter(|(_, value)| !value.is_empty()) {
                fs::write(path.join(name), format!("{value}\n")).unwrap();
            }
            let link = self.0.join("sys/bus/pci/devices").join(address);
            if !link.exists() {
                symlink(&path, link).unwrap();
            }
        }
        path
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const FAST: &str = "16.0 GT/s PCIe";
const SLOW: &str = "8.0 GT/s PCIe";
const GPU: (&str, &str) = ("0x030200", "0x10de");

/// The bandwidths of 16 lanes at 16 and at 8 GT/s.
const FAST_BYTES_PER_S: u64 = 31_507_692_307;
const SLOW_BYTES_PER_S: u64 = 15_753_846_153;

/// Two GPUs and a NIC under one PCIe switch of NUMA node 0, whose uplink is slow. A third GPU is
/// under a root port of node 1.
fn three_gpus() -> Root {
    let root = Root::new();
    let upstream = [("0000:00:01.0", FAST, "16"), ("0000:01:00.0", SLOW, "16")];
    let under = |port: &'static str, device: &'static str| {
        [upstream[0], upstream[1], (port, FAST, "16"), (device, FAST, "16")]
    };
    root.device(&under("0000:02:00.0", "0000:03:00.0"), GPU.0, GPU.1, 0);
    root.device(&under("0000:02:01.0", "0000:04:00.0"), GPU.0, GPU.1, 0);
    let nic = root.device(&under("0000:02:02.0", "0000:05:00.0"), "0x020700", "0x15b3", 0);
    root.device(&[("0000:00:02.0", FAST, "16"), ("0000:06:00.0", FAST, "8")], GPU.0, GPU.1, 1);
    // The display of a management controller.
    root.device(&[("0000:00:03.0", SLOW, "1"), ("0000:07:00.0", "", "")], "0x030000", "0x1a03", 0);
    fs::create_dir_all(root.0.join("sys/class/infiniband/mlx5_0")).unwrap();
    symlink(nic, root.0.join("sys/class/infiniband/mlx5_0/device")).unwrap();
    fs::create_dir_all(root.0.join("sys/class/net/lo")).unwrap();
    root
}

fn carried(topology: &Topology, from: &str, to: &str) -> Option<u64> {
    let node =
        |name: &str| NodeId(topology.nodes().iter().position(|node| node.name == name).unwrap() as u32);
    topology.link(node(from), node(to)).map(|link| link.bytes_per_s)
}

#[test]
fn gpus_hang_on_switches_and_cpus_as_the_kernel_shows_it() {
    let root = three_gpus();
    let topology = read(&root.0).unwrap();
    assert_eq!(topology.ranks(), 3);
    let switches = topology.nodes().iter().filter(|node| node.kind == NodeKind::Switch);
    let switches: Vec<&str> = switches.map(|node| node.name.as_str()).collect();
    assert_eq!(switches, ["cpu0", "pci 0000:01:00.0", "cpu1"]);
    assert_eq!(carried(&topology, "gpu0", "pci 0000:01:00.0"), Some(FAST_BYTES_PER_S));
    assert_eq!(carried(&topology, "pci 0000:01:00.0", "cpu0"), Some(SLOW_BYTES_PER_S));
    assert_eq!(carried(&topology, "cpu1", "gpu2"), Some(SLOW_BYTES_PER_S), "8 lanes of 16 GT/s");
    assert!(carried(&topology, "cpu0", "cpu1").is_some());
}

#[test]
fn nics_are_listed_with_the_way_to_them() {
    let root = three_gpus();
    let machine = Machine::look(&root.0).unwrap();
    let nics: Vec<(&str, &str)> =
        machine.nics.iter().map(|nic| (nic.name.as_str(), nic.device.address.as_str())).collect();
    assert_eq!(nics, [("mlx5_0", "0000:05:00.0")]);
    assert_eq!(machine.nics[0].device.hops[0].address, "0000:01:00.0", "beside the first two GPUs");
}

#[test]
fn nvlinks_stand_beside_pci() {
    let root = three_gpus();
    let machine = Machine::look(&root.0).unwrap();
    let link = |gpu, to| NvLinks { gpu, to, bytes_per_s: 25 };
    let direct = [
        link(0, NvLinkEnd::Gpu(1)),
        link(0, NvLinkEnd::Gpu(1)),
        link(1, NvLinkEnd::Gpu(0)),
        link(1, NvLinkEnd::Gpu(0)),
    ];
    let topology = machine.topology(&direct).unwrap();
    assert_eq!(
        (carried(&topology, "gpu0", "gpu1"), carried(&topology, "gpu1", "gpu0")),
        (Some(50), Some(50))
    );
    let switched: Vec<NvLinks> =
        (0..3).map(|gpu| link(gpu, NvLinkEnd::Switch)).chain([link(2, NvLinkEnd::Cpu)]).collect();
    let topology = machine.topology(&switched).unwrap();
    assert_eq!(carried(&topology, "nvswitch", "gpu2"), Some(25));
    assert_eq!(carried(&topology, "gpu2", "cpu1"), Some(SLOW_BYTES_PER_S + 25));
}

#[test]
fn devices_of_a_virtual_machine_that_say_nothing_hang_on_the_cpu() {
    let root = Root::new();
    for address in ["0000:00:05.0", "0000:00:06.0"] {
        root.device(&[(address, "Unknown", "0")], GPU.0, GPU.1, -1);
    }
    let topology = read(&root.0).unwrap();
    assert_eq!(carried(&topology, "gpu1", "cpu0"), Some(SLOW_BYTES_PER_S));
}

#[test]
fn without_gpus_it_is_said_what_was_looked_for() {
    let root = Root::new();
    root.device(&[("0000:00:03.0", "", "")], "0x030000", "0x1a03", 0);
    let error = read(&root.0).unwrap_err().to_string();
    let path = devices(&root.0);
    let begins =
        format!("no GPU on this machine: of 1 devices in {} none is a display controller", path.display());
    assert!(error.starts_with(&begins) && error.contains("NVIDIA (0x10de), AMD (0x1002)"), "{error}");
}

#[test]
fn what_the_kernel_does_not_show_is_named() {
    let nothing = read(Path::new("/nonexistent")).unwrap_err();
    assert!(
        matches!(&nothing, MachineError::Read { path, .. } if path.ends_with("sys/bus/pci/devices")),
        "{nothing}"
    );
    let root = Root::new();
    root.device(&[("0000:00:05.0", "fast", "16")], GPU.0, GPU.1, 0);
    let wrong = read(&root.0).unwrap_err().to_string();
    assert!(wrong.ends_with("max_link_speed: 'fast' is not of the form \"16.0 GT/s PCIe\""), "{wrong}");
}

#[test]
fn this_very_machine_is_read_or_says_why_not() {
    match read(Path::new("/")) {
        Ok(topology) => assert!(topology.ranks() > 0),
        Err(error) => {
            assert!(matches!(error, MachineError::NoGpus { .. } | MachineError::Read { .. }), "{error}")
        }
    }
}
