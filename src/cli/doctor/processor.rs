//! Processors and memory: huge pages, governors, NUMA, and what a control group gives.

use std::collections::BTreeMap;

use super::Machine;
use super::{Finding, Section};

/// Processors and memory.
pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let mut section = Section::new("processors and memory");
    governor(machine, &mut section);
    quota(machine, &mut section);
    balancing(machine, &mut section);
    placement(machine, &mut section);
    huge_pages(machine, &mut section);
    section.done()
}

/// The numbers of a list as the kernel writes them: `0-3,8,10-11`.
fn numbers(list: &str) -> Vec<u32> {
    let mut found = Vec::new();
    for part in list.split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>())
            && last.saturating_sub(first) < 1 << 16
        {
            found.extend(first..=last);
        }
    }
    found
}

fn governor(machine: &Machine, section: &mut Section) {
    let folder = "sys/devices/system/cpu";
    let is_processor =
        |name: &String| name.strip_prefix("cpu").is_some_and(|number| number.parse::<u32>().is_ok());
    let mut governors: BTreeMap<String, u32> = BTreeMap::new();
    for name in machine.names(folder).iter().filter(|name| is_processor(name)) {
        if let Some(governor) = machine.text(&format!("{folder}/{name}/cpufreq/scaling_governor")) {
            *governors.entry(governor).or_default() += 1;
        }
    }
    let text: Vec<String> = governors.iter().map(|(name, count)| format!("{name} on {count}")).collect();
    match text.join(", ") {
        text if text.is_empty() => {
            section.unknown("governor", "the kernel shows none, as in most virtual machines", "");
        }
        text if governors.keys().all(|name| name == "performance") => section.ok("governor", text),
        text => section.warning(
            "governor",
            format!("{text}: a processor that sleeps answers later"),
            "sudo cpupower frequency-set -g performance",
        ),
    }
}

fn quota(machine: &Machine, section: &mut Section) {
    let second = machine.text("sys/fs/cgroup/cpu.max").and_then(|text| {
        let (quota, period) = text.split_once(' ')?;
        Some((quota.parse::<f64>().ok(), period.parse::<f64>().ok()?))
    });
    let first = || {
        let quota = machine.text("sys/fs/cgroup/cpu/cpu.cfs_quota_us")?.parse::<f64>().ok()?;
        let period = machine.number("sys/fs/cgroup/cpu/cpu.cfs_period_us")? as f64;
        Some(((quota > 0.0).then_some(quota), period))
    };
    match second.or_else(first) {
        Some((Some(quota), period)) if period > 0.0 => section.warning(
            "quota",
            format!(
                "{:.1} processors: who uses them up stands still for the rest of {} ms",
                quota / period,
                period / 1000.0
            ),
            "docker update --cpus 0 CONTAINER   # in Kubernetes: leave limits.cpu away",
        ),
        _ => {
            let status = machine.text("proc/self/status").unwrap_or_default();
            let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
            match list.map(|list| numbers(list.trim()).len()) {
                Some(count) => section.ok("processors", format!("{count} may be used")),
                None => section.unknown("processors", "/proc/self/status does not say", "nproc"),
            }
        }
    }
}

/// The machine's NUMA nodes.
fn nodes(machine: &Machine) -> Vec<u32> {
    numbers(&machine.text("sys/devices/system/node/online").unwrap_or_default())
}

fn balancing(machine: &Machine, section: &mut Section) {
    let nodes = nodes(machine).len();
    match (nodes, machine.number("proc/sys/kernel/numa_balancing")) {
        (0, _) => section.unknown("NUMA", "the kernel shows no nodes", "lscpu"),
        (1, _) => section.ok("NUMA", "1 node"),
        (nodes, Some(0)) => section.ok("NUMA", format!("{nodes} nodes, memory stays where it was put")),
        (nodes, Some(_)) => section.warning(
            "NUMA",
            format!("{nodes} nodes, and the kernel moves memory between them while it is used"),
            "sudo sysctl -w kernel.numa_balancing=0",
        ),
        (nodes, None) => section.ok("NUMA", format!("{nodes} nodes")),
    }
}

/// Whether this process may run near what it talks to.
fn placement(machine: &Machine, section: &mut Section) {
    let status = machine.text("proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let allowed = numbers(allowed.unwrap_or_default().trim());
    if nodes(machine).len() < 2 || allowed.is_empty() {
        return;
    }
    let rdma = machine.rdma_devices().into_iter().map(|name| {
        let folder = format!("sys/class/infiniband/{name}/device");
        (name, folder)
    });
    let gpus = machine.gpus().into_iter().map(|address| {
        let folder = format!("sys/bus/pci/devices/{address}");
        (format!("GPU {address}"), folder)
    });
    for (name, folder) in rdma.chain(gpus) {
        let node = machine.text(&format!("{folder}/numa_node")).and_then(|node| node.parse::<u32>().ok());
        let Some(node) = node else {
            section.unknown(format!("node of {name}"), "the kernel does not say which is nearest", "");
            continue;
        };
        let list = machine.text(&format!("sys/devices/system/node/node{node}/cpulist")).unwrap_or_default();
        let near = numbers(&list);
        if near.iter().any(|processor| allowed.contains(processor)) {
            section.ok(format!("node of {name}"), format!("{node}, on which this process may run"));
        } else {
            let command = format!("numactl --cpunodebind={node} --membind={node} PROGRAM");
            let text = format!("{node}, but this process may run on other nodes only");
            section.warning(format!("node of {name}"), text, command);
        }
    }
}

/// What `always [madvise] never` has in brackets.
fn chosen(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

fn huge_pages(machine: &Machine, section: &mut Section) {
    let path = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let said = machine.text(path);
    match said.as_deref().and_then(chosen) {
        None => section.unknown("huge pages", format!("/{path} cannot be read"), ""),
        Some(value @ ("never" | "deny")) => section.warning(
            "huge pages",
            format!("'{value}' for shared memory: large buffers cost more translations of addresses"),
            format!("echo advise | sudo tee /{path}"),
        ),
        Some(value) => section.ok("huge pages", format!("'{value}' for shared memory")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read_and_nonsense_is_left_out() {
        assert_eq!(numbers("0-2,5,7-8"), [0, 1, 2, 5, 7, 8]);
        assert_eq!(numbers(""), [] as [u32; 0]);
        assert_eq!(numbers("x,3-y,0-4294967295,4"), [4]);
        assert_eq!(chosen("always inherit within_size advise [never] deny force"), Some("never"));
        assert_eq!(chosen("never"), None);
    }
}
