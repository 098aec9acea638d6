//! Machines made of files as real kernels write them, healthy and not.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pleach::transport::device::WakeSource;
use pleach::transport::rendezvous::ProbeOutcome;
use pleach::transport::verbs::VerbsOptions;
use pleach::transport::verbs::survey::{DeviceReport, OpenDevice, PortReport};

use super::FileSystemSpace;
use super::compare::PairResults;
use super::*;

mod wishes;

const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
    Max cpu time              unlimited            unlimited            seconds   \n\
    Max processes             513474               513474               processes \n\
    Max open files            65536                524288               files     \n\
    Max locked memory         unlimited            unlimited            bytes     \n";

const STATUS: &str = "Name:\tpleach\nCapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n\
    CapBnd:\t000001ffffffffff\nSeccomp:\t0\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n";

const PORT: &str = "sys/class/infiniband/mlx5_0/ports/1";
const NIC: &str = "sys/devices/pci0000:80/0000:80:01.0/0000:81:00.0";
const GPU: &str = "sys/devices/pci0000:80/0000:80:02.0/0000:82:00.0";

/// A root directory with a kernel's files, gone when dropped.
struct Root(PathBuf);

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Root {
    fn empty() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // Only the number has to be its own; nothing is ordered by it.
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pleach-doctor-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a folder of its own");
        Self(path)
    }

    /// A host with two NUMA nodes, one ConnectX with RoCE, and one GPU beside it: nothing is wrong
    /// with it.
    fn healthy() -> Self {
        let root = Self::empty();
        root.files(&[
            ("proc/self/limits", LIMITS),
            ("proc/self/status", STATUS),
            ("proc/self/uid_map", "         0          0 4294967295\n"),
            ("proc/self/cgroup", "0::/user.slice\n"),
            ("proc/1/cgroup", "0::/init.scope\n"),
            ("proc/sys/kernel/hostname", "node7\n"),
            ("proc/sys/kernel/osrelease", "6.8.0-51-generic\n"),
            ("proc/sys/kernel/numa_balancing", "0\n"),
            ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n"),
            ("proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n"),
            ("proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t4194304\n"),
            ("sys/fs/cgroup/user.slice/memory.max", "max\n"),
            ("sys/fs/cgroup/user.slice/memory.current", "41943040\n"),
            (
                "sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size [advise] never deny force\n",
            ),
            ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n"),
            ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "performance\n"),
            ("sys/devices/system/node/online", "0-1\n"),
            ("sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("sys/devices/system/node/node1/cpulist", "4-7\n"),
            ("sys/module/ib_uverbs/refcnt", "1\n"),
            ("sys/module/nvidia_peermem/refcnt", "0\n"),
            ("usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.50.0", ""),
            ("usr/lib/x86_64-linux-gnu/libcuda.so.570.86.10", ""),
            ("dev/infiniband/uverbs0", ""),
            ("dev/nvidia0", ""),
            ("dev/nvidiactl", ""),
            ("dev/nvidia-uvm", ""),
        ]);
        root.link("usr/lib/x86_64-linux-gnu/libibverbs.so.1", "libibverbs.so.1.14.50.0");
        root.link("usr/lib/x86_64-linux-gnu/libcuda.so.1", "libcuda.so.570.86.10");
        root.network();
        root.adapter();
        root.gpu();
        root
    }

    fn network(&self) {
        let folder = "sys/class/net/ens1np0";
        let files = [
            ("type", "1"),
            ("operstate", "up"),
            ("flags", "0x1003"),
            ("ifindex", "5"),
            ("mtu", "9000"),
            ("speed", "100000"),
            ("duplex", "full"),
            ("statistics/rx_packets", "90000000"),
            ("statistics/tx_packets", "90000000"),
            ("statistics/rx_errors", "2"),
            ("statistics/tx_errors", "0"),
            ("ecn/roce_np/enable/3", "1"),
            ("ecn/roce_rp/enable/3", "1"),
        ];
        files.iter().for_each(|(name, text)| self.file(&format!("{folder}/{name}"), &format!("{text}\n")));
    }

    fn adapter(&self) {
        let files = [
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", "100 Gb/sec (4X EDR)"),
            ("link_layer", "Ethernet"),
            ("counters/symbol_error", "0"),
            ("counters/port_xmit_packets", "80000000"),
            ("counters/port_xmit_discards", "0"),
            ("hw_counters/out_of_sequence", "0"),
            ("hw_counters/np_cnp_sent", "12"),
            ("gids/0", "fe80:0000:0000:0000:0e42:a1ff:fe7d:1c4a"),
            ("gids/1", "fe80:0000:0000:0000:0e42:a1ff:fe7d:1c4a"),
            ("gids/2", "0000:0000:0000:0000:0000:ffff:0a00:0007"),
            ("gids/3", "0000:0000:0000:0000:0000:ffff:0a00:0007"),
            ("gids/4", "0000:0000:0000:0000:0000:0000:0000:0000"),
            ("gid_attrs/types/0", "IB/RoCE v1"),
            ("gid_attrs/types/1", "RoCE v2"),
            ("gid_attrs/types/2", "IB/RoCE v1"),
            ("gid_attrs/types/3", "RoCE v2"),
        ];
        files.iter().for_each(|(name, text)| self.file(&format!("{PORT}/{name}"), &format!("{text}\n")));
        (0..4).for_each(|index| self.file(&format!("{PORT}/gid_attrs/ndevs/{index}"), "ens1np0\n"));
        self.file("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0\n");
        self.pci(NIC, "0x020000", "0x15b3");
        self.link(
            "sys/class/infiniband/mlx5_0/device",
            self.0.join(NIC).to_str().expect("a path of letters"),
        );
        self.link("sys/class/net/ens1np0/device", self.0.join(NIC).to_str().expect("a path of letters"));
    }

    fn gpu(&self) {
        self.pci(GPU, "0x030200", "0x10de");
        self.file(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (dvs-builder@U22)\n\
             GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n",
        );
    }

    /// A device on 16 lanes, the port above it, and their places in the lists of the bus.
    fn pci(&self, folder: &str, class: &str, vendor: &str) {
        let port = folder.rsplit_once('/').expect("a folder above").0;
        for (folder, class, vendor) in [(port, "0x060400", "0x1022"), (folder, class, vendor)] {
            let files = [
                ("class", class),
                ("vendor", vendor),
                ("device", "0x101d"),
                ("numa_node", "1"),
                ("current_link_width", "16"),
                ("max_link_width", "16"),
                ("current_link_speed", "16.0 GT/s PCIe"),
                ("max_link_speed", "16.0 GT/s PCIe"),
            ];
            files
                .iter()
                .for_each(|(name, text)| self.file(&format!("{folder}/{name}"), &format!("{text}\n")));
            self.bytes(&format!("{folder}/config"), &configuration(0));
            let address = folder.rsplit('/').next().expect("a name");
            let listed = format!("sys/bus/pci/devices/{address}");
            self.link(&listed, self.0.join(folder).to_str().expect("a path of letters"));
        }
        fs::create_dir_all(self.0.join("sys/class/iommu")).expect("a folder");
    }

    fn files(&self, files: &[(&str, &str)]) {
        files.iter().for_each(|(path, text)| self.file(path, text));
    }

    fn file(&self, path: &str, text: &str) {
        self.bytes(path, text.as_bytes());
    }

    fn bytes(&self, path: &str, bytes: &[u8]) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        fs::write(path, bytes).expect("a file");
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        symlink(target, path).expect("a link");
    }

    fn remove(&self, path: &str) {
        let path = self.0.join(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.expect("it was there");
    }

    fn machine(&self) -> Machine {
        let mut machine = Machine::of_files(&self.0);
        machine.shm = Some(FileSystemSpace { total: 64 << 30, free: 63 << 30 });
        let port = PortReport {
            number: 1,
            path_mtu_bytes: 4096,
            path_mtu_bytes_max: 4096,
            message_bytes_max: 1 << 30,
        };
        let opened = OpenDevice {
            provider: None,
            ports: vec![port],
            queue_pairs_max: 131_072,
            regions_max: 1 << 24,
            not_registered: None,
        };
        machine.verbs = Some(Ok(vec![DeviceReport { name: "mlx5_0".to_owned(), opened: Ok(opened) }]));
        machine
    }
}

/// The configuration of a bridge whose Access Control Services have these bits on.
fn configuration(acs: u16) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    bytes[0x100..0x104].copy_from_slice(&0x0001_000d_u32.to_le_bytes());
    bytes[0x106..0x108].copy_from_slice(&acs.to_le_bytes());
    bytes
}

/// The findings that are not as they should be: level, subject, text, command.
fn troubles(machine: &Machine) -> Vec<(Level, String, String, String)> {
    look(machine, CHECKS)
        .into_iter()
        .filter(|finding| finding.level >= Level::Warning)
        .map(|it| (it.level, it.subject, it.text, it.command.expect("what mends it")))
        .collect()
}

/// The only trouble of a machine.
fn trouble(machine: &Machine) -> (Level, String, String, String) {
    let mut troubles = troubles(machine);
    assert_eq!(troubles.len(), 1, "{troubles:#?}");
    troubles.remove(0)
}

#[test]
fn nothing_is_wrong_with_a_healthy_machine_and_it_says_which_address_is_used_and_why() {
    let root = Root::healthy();
    let machine = root.machine();
    assert_eq!(troubles(&machine), []);
    let findings = look(&machine, CHECKS);
    let chosen = findings.iter().find(|finding| finding.subject == "port to use").expect("a port");
    assert_eq!(
        chosen.text,
        "mlx5_0:1, GID index 3 (10.0.0.7, RoCE v2 over IPv4): RoCE v2 over IPv4 is the best of 4"
    );
    assert!(uses(&machine).contains("tcp over ens1np0 (100 Gb/s)"), "{}", uses(&machine));
}

#[test]
fn what_cannot_be_read_is_unknown_and_never_ok() {
    let root = Root::empty();
    let findings = look(&Machine::of_files(&root.0), CHECKS);
    assert!(findings.len() > 8);
    for finding in findings {
        assert_eq!(finding.level, Level::Unknown, "{finding:?}");
    }
}

#[test]
fn little_locked_memory_is_a_problem_with_the_command_for_where_it_runs() {
    let small = LIMITS.replace(
        "memory         unlimited            unlimited",
        "memory         8388608              8388608  ",
    );
    let root = Root::healthy();
    root.file("proc/self/limits", &small);
    let (level, subject, text, command) = trouble(&root.machine());
    assert_eq!((level, subject.as_str()), (Level::Problem, "locked memory"));
    assert!(text.starts_with("8 MiB"), "{text}");
    assert!(command.contains("/etc/security/limits.d/90-memlock.conf"), "{command}");

    root.file(".dockerenv", "");
    assert_eq!(trouble(&root.machine()).3, "docker run --ulimit memlock=-1 …");

    // Who may lock more is not held to it; but capabilities of a user namespace do not count.
    root.file("proc/self/status", &STATUS.replace("CapEff:\t0000000000000000", "CapEff:\t0000000000004000"));
    assert_eq!(troubles(&root.machine()), []);
    root.file("proc/self/uid_map", "         0       1000          1\n");
    assert_eq!(trouble(&root.machine()).1, "locked memory");

    root.file(
        "proc/self/limits",
        &small.replace("8388608              8388608  ", "8388608              unlimited"),
    );
    assert_eq!(trouble(&root.machine()).3, "ulimit -l unlimited");
}

#[test]
fn few_files_ports_and_little_shared_memory_are_told_with_numbers() {
    let root = Root::healthy();
    root.file("proc/self/limits", &LIMITS.replace("65536 ", "1024  "));
    root.file("proc/sys/net/ipv4/ip_local_port_range", "50000\t51000\n");
    let mut machine = root.machine();
    machine.shm = Some(FileSystemSpace { total: 64 << 20, free: 64 << 20 });
    let found = troubles(&machine);
    let of = |subject: &str| {
        found.iter().find(|(_, it, ..)| it == subject).unwrap_or_else(|| panic!("{found:#?}"))
    };
    assert!(of("open files").2.contains("320 peers"), "{found:#?}");
    assert_eq!(of("open files").3, "ulimit -n 65536");
    assert!(of("ports").3.contains("ip_local_port_range"));
    assert_eq!(of("/dev/shm").3, "sudo mount -o remount,size=8G /dev/shm");
    assert_eq!(found.len(), 3);
}

#[test]
fn a_link_that_is_down_says_whether_it_was_switched_off_or_has_no_cable() {
    let root = Root::healthy();
    root.file(&format!("{PORT}/state"), "1: DOWN\n");
    root.file(&format!("{PORT}/phys_state"), "3: Disabled\n");
    let found = |root: &Root| {
        let found = troubles(&root.machine());
        let link = found.iter().find(|(_, subject, ..)| subject == "mlx5_0:1 link").cloned();
        assert!(
            found
                .iter()
                .any(|(level, subject, ..)| (*level, subject.as_str()) == (Level::Problem, "port to use"))
        );
        link.unwrap_or_else(|| panic!("{found:#?}"))
    };
    let (level, _, text, command) = found(&root);
    assert_eq!(level, Level::Problem);
    assert!(text.contains("ens1np0 has no link"), "{text}");
    assert_eq!(command, "ethtool ens1np0");
    root.file("sys/class/net/ens1np0/flags", "0x1002\n");
    assert_eq!(found(&root).3, "sudo ip link set dev ens1np0 up");
    // InfiniBand: a link without a subnet manager.
    root.file(&format!("{PORT}/link_layer"), "InfiniBand\n");
    root.file(&format!("{PORT}/state"), "2: INIT\n");
    assert!(found(&root).3.contains("opensm"));
}

#[test]
fn an_address_that_does_not_exist_or_is_not_routed_is_told() {
    let root = Root::healthy();
    let mut machine = root.machine();
    machine.wish = Ok(VerbsOptions { gid_index: Some(9), ..VerbsOptions::default() });
    let (level, _, text, command) = trouble(&machine);
    assert_eq!(
        (level, text.as_str()),
        (Level::Problem, "GID index 9 does not exist on mlx5_0:1; there are 0 1 2 3")
    );
    assert!(command.contains("PLEACH_VERBS_GID_INDEX=3"), "{command}");
    machine.wish = Err("PLEACH_VERBS_GID_INDEX is no number: 'x'".to_owned());
    assert_eq!(trouble(&machine).0, Level::Problem);
    (1..4).for_each(|index| root.remove(&format!("{PORT}/gids/{index}")));
    let (level, _, text, _) = trouble(&root.machine());
    assert_eq!(level, Level::Warning);
    assert!(text.contains("RoCE v1 is not routed"), "{text}");
}

#[test]
fn no_library_no_provider_no_file_and_no_right_are_different_problems() {
    let root = Root::healthy();
    let mut machine = root.machine();
    machine.verbs = Some(Err("libibverbs is not here".to_owned()));
    assert_eq!(trouble(&machine).1, "libibverbs");
    machine.verbs = Some(Ok(Vec::new()));
    let found = troubles(&machine);
    assert!(found.iter().any(|(_, subject, text, command)| subject == "mlx5_0 provider"
        && text.contains("no provider")
        && command.contains("ibverbs-providers")));
    let refused = "RDMA device mlx5_0 refused to be opened; give this user read and write access (EACCES)";
    machine.verbs =
        Some(Ok(vec![DeviceReport { name: "mlx5_0".to_owned(), opened: Err(refused.to_owned()) }]));
    assert_eq!(trouble(&machine).2, refused);
    let opened =
        OpenDevice { not_registered: Some("Cannot allocate memory".to_owned()), ..OpenDevice::default() };
    machine.verbs = Some(Ok(vec![DeviceReport { name: "mlx5_0".to_owned(), opened: Ok(opened) }]));
    assert!(trouble(&machine).2.contains("16 MiB could not be registered"));

    root.remove("dev/infiniband");
    root.file(".dockerenv", "");
    assert_eq!(trouble(&root.machine()).3, "docker run --device=/dev/infiniband …");
    root.remove("sys/module/ib_uverbs");
    root.remove("sys/class/infiniband_verbs");
    assert!(troubles(&root.machine()).iter().any(|(.., command)| command == "sudo modprobe ib_uverbs"));
}

#[test]
fn a_small_mtu_lost_packets_and_broken_cables_are_warnings() {
    let root = Root::healthy();
    let mut machine = root.machine();
    machine.verbs = None;
    root.file("sys/class/net/ens1np0/mtu", "1500\n");
    let (_, subject, text, command) = trouble(&machine);
    assert_eq!(subject, "mlx5_0:1 MTU");
    assert!(text.contains("1024 bytes of payload (ens1np0 has MTU 1500)"), "{text}");
    assert!(command.starts_with("sudo ip link set dev ens1np0 mtu 4200"), "{command}");
    root.file("sys/class/net/ens1np0/mtu", "9000\n");

    // One in a million is nothing to speak of; more is.
    root.file(&format!("{PORT}/hw_counters/out_of_sequence"), "80\n");
    assert_eq!(troubles(&machine), []);
    root.file(&format!("{PORT}/hw_counters/out_of_sequence"), "81\n");
    let (_, subject, _, command) = trouble(&machine);
    assert_eq!(subject, "mlx5_0:1 losses");
    assert!(command.contains("mlnx_qos -i ens1np0"), "{command}");
    root.file(&format!("{PORT}/hw_counters/out_of_sequence"), "0\n");
    root.file(&format!("{PORT}/counters/symbol_error"), "3\n");
    assert!(trouble(&machine).2.contains("symbol_error 3"));
    root.file(&format!("{PORT}/counters/symbol_error"), "0\n");
    root.file("sys/class/net/ens1np0/ecn/roce_rp/enable/3", "0\n");
    assert!(trouble(&machine).2.contains("ECN is off"));
}

#[test]
fn a_short_queue_of_packets_is_a_warning_for_rdma_made_of_software() {
    let root = Root::healthy();
    const QUEUE: &str = "proc/sys/net/core/netdev_max_backlog";
    root.file(QUEUE, "1000\n");
    assert_eq!(troubles(&root.machine()), [], "a NIC has a queue of its own");
    root.remove("sys/class/infiniband/mlx5_0/device");
    let about_queues = || {
        let mut troubles = troubles(&root.machine());
        troubles.retain(|(_, subject, _, _)| subject.ends_with(" queue"));
        troubles
    };
    let found = about_queues();
    let [(level, subject, text, command)] = &found[..] else { panic!("{found:#?}") };
    assert_eq!((*level, subject.as_str()), (Level::Warning, "mlx5_0:1 queue"));
    assert!(text.starts_with("1000 packets: "), "{text}");
    assert_eq!(command, "sudo sysctl -w net.core.netdev_max_backlog=100000");
    root.file(QUEUE, "100000\n");
    assert_eq!(about_queues(), []);
    root.remove(QUEUE);
    assert_eq!(about_queues(), [], "a network namespace does not show it");
}

#[test]
fn a_device_on_half_its_lanes_and_bridges_that_redirect_are_found() {
    let root = Root::healthy();
    root.file(&format!("{NIC}/current_link_width"), "8\n");
    let (level, subject, text, _) = trouble(&root.machine());
    assert_eq!((level, subject.as_str()), (Level::Warning, "mlx5_0 link"));
    assert!(text.contains("x8 of x16") && text.contains("do not sit well"), "{text}");
    root.file("sys/devices/pci0000:80/0000:80:01.0/max_link_width", "8\n");
    assert!(trouble(&root.machine()).2.contains("another slot gives more"));
    root.file(&format!("{NIC}/current_link_width"), "16\n");
    // An idle GPU slows its link down, a NIC does not.
    root.file(&format!("{GPU}/current_link_speed"), "2.5 GT/s PCIe\n");
    assert_eq!(troubles(&root.machine()), []);
    root.file(&format!("{NIC}/current_link_speed"), "8.0 GT/s PCIe\n");
    assert!(trouble(&root.machine()).2.contains("8 of 16 GT/s"));
    root.file(&format!("{NIC}/current_link_speed"), "16.0 GT/s PCIe\n");

    root.bytes("sys/devices/pci0000:80/0000:80:01.0/config", &configuration(0x1d));
    let (_, subject, _, command) = trouble(&root.machine());
    assert_eq!(subject, "ACS");
    assert!(command.contains("0000:80:01.0") && command.contains("ECAP_ACS+6.w=0000"), "{command}");
    // What only root may read is not known to be well.
    root.bytes("sys/devices/pci0000:80/0000:80:01.0/config", &configuration(0x1d)[..64]);
    assert_eq!(troubles(&root.machine()), []);
    let findings = look(&root.machine(), CHECKS);
    assert!(findings.iter().any(|it| it.subject == "ACS" && it.level == Level::Unknown));

    root.file("sys/class/iommu/dmar0/name", "");
    root.file(&format!("{NIC}/iommu_group/type"), "DMA-FQ\n");
    root.file(&format!("{GPU}/iommu_group/type"), "identity\n");
    let (_, subject, _, command) = trouble(&root.machine());
    assert_eq!(subject, "IOMMU of mlx5_0");
    assert!(command.contains("iommu=pt"), "{command}");
}

#[test]
fn a_gpu_without_driver_library_or_way_to_the_nic_is_found() {
    let root = Root::healthy();
    root.remove("sys/module/nvidia_peermem");
    assert_eq!(troubles(&root.machine()), [], "the open modules lend memory by dma-buf");
    root.file(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Sun May 12 19:39:15 UTC 2024\n",
    );
    assert_eq!(trouble(&root.machine()).3, "sudo modprobe nvidia-peermem");
    root.file("sys/module/nvidia_peermem/refcnt", "0\n");
    root.file(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n",
    );
    let (level, _, text, _) = trouble(&root.machine());
    assert_eq!(level, Level::Problem);
    assert!(text.contains("535.183.01") && text.contains("libcuda.so.570.86.10"), "{text}");
    root.remove("usr/lib/x86_64-linux-gnu/libcuda.so.1");
    assert!(trouble(&root.machine()).2.contains("libcuda.so.1 is not here"));
    root.remove("proc/driver/nvidia");
    assert!(trouble(&root.machine()).2.contains("driver is not loaded"));
}

#[test]
fn processors_that_sleep_or_are_far_away_are_warnings() {
    let root = Root::healthy();
    root.file("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n");
    root.file("proc/self/status", &STATUS.replace("list:\t0-7", "list:\t0-3"));
    root.file("proc/sys/kernel/numa_balancing", "1\n");
    root.file("sys/fs/cgroup/cpu.max", "150000 100000\n");
    root.file(
        "sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always within_size advise [never] deny force\n",
    );
    let found = troubles(&root.machine());
    let subjects: Vec<&str> = found.iter().map(|(_, subject, ..)| subject.as_str()).collect();
    assert_eq!(
        subjects,
        ["governor", "quota", "NUMA", "node of mlx5_0", "node of GPU 0000:82:00.0", "huge pages"]
    );
    assert!(found[1].2.starts_with("1.5 processors"), "{found:#?}");
    assert_eq!(found[3].3, "numactl --cpunodebind=1 --membind=1 PROGRAM");
}

#[test]
fn nothing_waits_for_a_file_that_does_not_answer() {
    let root = Root::healthy();
    root.remove("proc/self/limits");
    let path = root.0.join("proc/self/limits");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).expect("a pipe");
    let findings = look(&root.machine(), &[("limits", limits::check)]);
    assert!(findings.iter().any(|it| it.subject == "locked memory" && it.level == Level::Unknown));

    fn hangs(_: &Machine) -> Vec<Finding> {
        let never = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("a descriptor");
        WakeSource::File(Arc::new(never)).wait(Duration::from_secs(60));
        Vec::new()
    }
    let began = clock::now();
    let checks: [Check; 2] = [("stuck", hangs), ("limits", limits::check)];
    let findings = look_within(&root.machine(), &checks, Duration::from_secs(3));
    assert!(clock::now() - began < Duration::from_secs(30));
    assert_eq!((findings[0].section, findings[0].level), ("stuck", Level::Unknown));
    assert!(findings.iter().any(|finding| finding.subject == "locked memory"), "the others are heard");
}

#[test]
fn reports_are_json_and_count_what_they_hold() {
    let root = Root::healthy();
    root.file(
        "proc/self/limits",
        &LIMITS.replace(
            "unlimited            unlimited            bytes",
            "65536                65536                bytes",
        ),
    );
    let machine = root.machine();
    let report =
        Report { host: "a \"b\"".to_owned(), uses: uses(&machine), findings: look(&machine, CHECKS) };
    let json = report.json();
    assert_eq!(json["host"], "a \"b\"");
    assert_eq!((json["problems"].as_u64(), json["warnings"].as_u64()), (Some(1), Some(0)));
    let findings = json["findings"].as_array().expect("a list");
    assert_eq!(findings.len(), report.findings.len());
    let problem = findings.iter().find(|it| it["level"] == "problem").expect("the problem");
    assert_eq!(problem["subject"], "locked memory");
    assert!(problem["command"].as_str().expect("a command").contains("memlock"));
    let text = report.text();
    assert!(text.contains("\nlimits\n  problem  locked memory"), "{text}");
    assert!(text.ends_with(" ok\n") && text.contains("1 problem, 0 warnings"), "{text}");
    assert_eq!(verdict(&report).expect_err("there is a problem").status(), 1);
}

fn statement(values: &[(&str, &str)]) -> Statement {
    let mut statement = Statement::default();
    let usual = [
        ("version", "1"),
        ("host", "a"),
        ("boot", "1"),
        ("address", "10.0.0.1"),
        ("interface", "eth0"),
        ("mtu", "9000"),
        ("rdma-port", "mlx5_0:1"),
        ("rdma-layer", "Ethernet"),
        ("rdma-kind", "RoCE v2 over IPv4"),
        ("rdma-interface", "eth0"),
        ("rdma-interface-mtu", "9000"),
        ("rdma-mtu", "4096"),
    ];
    usual.iter().chain(values).for_each(|(name, value)| statement.set(name, value));
    statement
}

fn between(theirs: &[(&str, &str)], reached: &PairResults) -> Vec<(Level, String, String)> {
    let theirs = [&[("host", "b"), ("boot", "2")][..], theirs].concat();
    let theirs = Statement::from_text(&statement(&theirs).to_text());
    let findings = compare::check(&statement(&[]), &theirs, reached);
    let bad = findings.into_iter().filter(|finding| finding.level != Level::Ok);
    bad.map(|it| (it.level, it.subject, it.text)).collect()
}

#[test]
fn two_machines_are_compared_with_both_numbers() {
    let fine = PairResults {
        reaches: Ok(()),
        is_reached: Ok(()),
        distance: Some(ProbeOutcome::NotFound),
        joined: Ok("tcp".to_owned()),
        clock_ahead: Some((20_000_000, 1_000_000)),
    };
    assert_eq!(between(&[], &fine), []);
    let found = between(&[("mtu", "1500"), ("rdma-interface-mtu", "1500"), ("rdma-mtu", "1024")], &fine);
    let subjects: Vec<&str> = found.iter().map(|(_, subject, _)| subject.as_str()).collect();
    assert_eq!(subjects, ["MTU", "RDMA interface MTU", "RDMA path MTU"]);
    assert!(found.iter().all(|(level, ..)| *level == Level::Problem));
    assert!(found[0].2.contains("9000 here (eth0), 1500 there"), "{found:#?}");
    assert!(found[2].2.contains("4096") && found[2].2.contains("1024"), "{found:#?}");

    assert_eq!(between(&[("version", "2")], &fine)[0].1, "pleach");
    assert!(between(&[("rdma-kind", "RoCE v1")], &fine)[0].2.contains("different kinds"));
    assert!(between(&[("rdma-layer", "InfiniBand")], &fine)[0].2.contains("do not meet"));
    let late = PairResults { clock_ahead: Some((-5_000_000_000, 1_000_000)), ..fine.clone() };
    assert_eq!(between(&[], &late)[0].1, "clocks");
    let walled = PairResults { is_reached: Err("10.0.0.1:4: no answer".to_owned()), ..fine.clone() };
    assert_eq!(between(&[], &walled)[0].1, "ports from there");
    let apart = PairResults { joined: Err("no address: rank 1 on b".to_owned()), ..fine.clone() };
    let found = between(&[], &apart);
    assert_eq!((found[0].0, found[0].1.as_str()), (Level::Problem, "join"));
    assert!(found[0].2.contains("no address: rank 1 on b"), "{found:#?}");
    // One machine whose containers do not share memory.
    let apart = between(&[("boot", "1")], &fine);
    assert!(apart[0].2.contains("different network namespaces"), "{apart:#?}");
    let heard = PairResults::from_text(&PairResults { reaches: Err("x y".to_owned()), ..fine }.to_text());
    assert_eq!((heard.reaches, heard.distance), (Err("x y".to_owned()), Some(ProbeOutcome::NotFound)));
}

#[test]
fn further_devices_are_compared_in_their_order() {
    let second = |mtu, bytes| {
        let values = [
            ("rdma-port.1", "mlx5_1:1"),
            ("rdma-layer.1", "Ethernet"),
            ("rdma-kind.1", "RoCE v2 over IPv4"),
            ("rdma-interface.1", "eth1"),
            ("rdma-interface-mtu.1", mtu),
            ("rdma-mtu.1", bytes),
        ];
        statement(&values)
    };
    let reached = PairResults::default();
    let about_second = |theirs: &Statement| {
        let mut found = compare::check(&second("9000", "4096"), theirs, &reached);
        found.retain(|finding| finding.subject.ends_with(", device 2"));
        found
    };
    let alike = about_second(&second("9000", "4096"));
    assert_eq!(alike.len(), 3);
    assert!(alike.iter().all(|finding| finding.level == Level::Ok), "{alike:#?}");
    let unlike = about_second(&second("1500", "1024"));
    let problems = unlike.iter().filter(|finding| finding.level == Level::Problem);
    let texts: Vec<_> = problems.map(|finding| finding.text.as_str()).collect();
    assert!(texts[0].contains("9000 here (eth1), 1500 there") && texts[1].contains("4096"), "{texts:#?}");
    let none = about_second(&statement(&[]));
    assert_eq!((none.len(), none[0].level), (1, Level::Warning));
    assert!(none[0].text.starts_with("mlx5_1:1 here, none there"), "{none:#?}");
}

#[test]
fn what_a_machine_says_of_itself_is_what_is_compared() {
    let root = Root::healthy();
    let mut machine = root.machine();
    machine.addresses = vec![(5, "10.0.0.7".parse().expect("an address"))];
    let statement = Statement::of(&machine, "10.0.0.7".parse().expect("an address"));
    let expected = [
        ("host", "node7"),
        ("interface", "ens1np0"),
        ("mtu", "9000"),
        ("rdma-port", "mlx5_0:1"),
        ("rdma-gid", "10.0.0.7"),
        ("rdma-mtu", "4096"),
        ("rdma-interface-mtu", "9000"),
        ("libibverbs", "libibverbs.so.1.14.50.0"),
        ("cuda", "libcuda.so.570.86.10"),
    ];
    for (name, value) in expected {
        assert_eq!(statement.value(name), Some(value), "{name}");
    }
}
