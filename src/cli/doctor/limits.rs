//! What this process may have: locked memory, files, processes, ports, and memory.

use super::{Finding, Section};
use super::{Machine, size};

/// Locked memory that RDMA can work with, in bytes.
const LOCKED_BYTES_MIN: u64 = 1 << 30;

/// With fewer open files a rank of a large job runs out of them.
const FILES_MIN: u64 = 4096;

/// Files that a peer over sockets takes: a control stream and the data lanes.
const FILES_A_PEER: u64 = 1 + pleach::transport::tcp::CONNECTIONS as u64;

/// Files that a process has open anyway, about.
const FILES_OF_ITS_OWN: u64 = 64;

const PROCESSES_MIN: u64 = 4096;

/// Ports that connections from this host can have.
const PORTS_MIN: u64 = 8192;

/// The default size of a container's `/dev/shm`, in bytes.
const SHM_BYTES_SMALL: u64 = 64 << 20;

/// `CAP_IPC_LOCK`.
const MAY_LOCK: u32 = 14;

/// A soft and a hard limit; `None` is none.
type Limit = (Option<u64>, Option<u64>);

/// The findings about the limits of this process.
pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let mut section = Section::new("limits");
    let limits = machine.text("proc/self/limits");
    let limit = |name: &str| limits.as_deref().and_then(|table| limit(table, name));
    locked(machine, limit("Max locked memory"), &mut section);
    files(limit("Max open files"), &mut section);
    match limit("Max processes") {
        None => section.unknown("processes", "/proc/self/limits does not say", "ulimit -u"),
        Some((Some(soft), hard)) if soft < PROCESSES_MIN => section.warning(
            "processes",
            format!("at most {soft} processes and threads of this user"),
            raise("u", "nproc", hard, PROCESSES_MIN),
        ),
        Some((soft, _)) => section.ok("processes", shown(soft)),
    }
    ports(machine, &mut section);
    shared_memory(machine, &mut section);
    memory_of_group(machine, &mut section);
    capabilities(machine, &mut section);
    section.done()
}

/// Soft and hard limit of a row of `/proc/self/limits`.
fn limit(table: &str, name: &str) -> Option<Limit> {
    let rest = table.lines().find_map(|line| line.strip_prefix(name))?;
    let mut values = rest.split_whitespace().map(|value| match value {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    });
    Some((values.next()??, values.next()??))
}

fn shown(limit: Option<u64>) -> String {
    limit.map_or_else(|| "unlimited".to_owned(), |limit| limit.to_string())
}

/// How to raise a limit: in this shell where that is allowed, else for all logins.
fn raise(letter: &str, name: &str, hard: Option<u64>, wanted: u64) -> String {
    match hard {
        Some(hard) if hard < wanted => format!(
            "echo '* - {name} {wanted}' | sudo tee /etc/security/limits.d/90-{name}.conf   # then log in again"
        ),
        _ => format!("ulimit -{letter} {wanted}"),
    }
}

fn locked(machine: &Machine, limit: Option<Limit>, section: &mut Section) {
    let name = "locked memory";
    let Some((soft, hard)) = limit else {
        return section.unknown(name, "/proc/self/limits does not say", "ulimit -l");
    };
    let Some(bytes) = soft else { return section.ok(name, "unlimited") };
    let shown = size(bytes);
    if machine.has_capability(MAY_LOCK) == Some(true) {
        return section.ok(name, format!("{shown}, and this process may exceed it (CAP_IPC_LOCK)"));
    }
    if machine.rdma_devices().is_empty() {
        return section.ok(name, format!("{shown}; only RDMA locks memory, and there is none here"));
    }
    if bytes >= LOCKED_BYTES_MIN {
        return section.ok(name, shown);
    }
    let command = match (hard, machine.container()) {
        (None, _) => "ulimit -l unlimited".to_owned(),
        (_, Some("docker")) => "docker run --ulimit memlock=-1 …".to_owned(),
        (_, Some("podman")) => "podman run --ulimit memlock=-1 …".to_owned(),
        (_, Some(_)) => "sudo systemctl edit containerd   # [Service] LimitMEMLOCK=infinity, then restart it".to_owned(),
        _ => "echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/90-memlock.conf   # then log in again"
            .to_owned(),
    };
    section.problem(name, format!("{shown}: RDMA cannot register more than that"), command);
}

fn files(limit: Option<Limit>, section: &mut Section) {
    match limit {
        None => section.unknown("open files", "/proc/self/limits does not say", "ulimit -n"),
        Some((Some(soft), hard)) if soft < FILES_MIN => {
            let peers = soft.saturating_sub(FILES_OF_ITS_OWN) / FILES_A_PEER;
            let text =
                format!("{soft}: room for about {peers} peers over sockets, {FILES_A_PEER} files each");
            section.warning("open files", text, raise("n", "nofile", hard, 65_536));
        }
        Some((soft, _)) => section.ok("open files", shown(soft)),
    }
}

fn ports(machine: &Machine, section: &mut Section) {
    let path = "proc/sys/net/ipv4/ip_local_port_range";
    let range = machine.text(path).and_then(|text| {
        let mut ends = text.split_whitespace().map(str::parse::<u64>);
        Some((ends.next()?.ok()?, ends.next()?.ok()?))
    });
    match range {
        None => section.unknown("ports", format!("/{path} cannot be read"), ""),
        Some((first, last)) if last.saturating_sub(first) < PORTS_MIN => section.warning(
            "ports",
            format!("{first} to {last}: few connections can be open at once"),
            "sudo sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        ),
        Some((first, last)) => section.ok("ports", format!("{first} to {last}")),
    }
}

fn shared_memory(machine: &Machine, section: &mut Section) {
    let Some(space) = machine.shm else {
        let text =
            "no file system in memory is mounted there; pleach does not need it (memfd), other libraries do";
        return section.unknown("/dev/shm", text, "sudo mount -t tmpfs tmpfs /dev/shm");
    };
    let text = format!("{} free of {}", size(space.free), size(space.total));
    if space.total > SHM_BYTES_SMALL && space.free > SHM_BYTES_SMALL {
        return section.ok("/dev/shm", text);
    }
    let command = match machine.container() {
        Some("docker") => "docker run --shm-size=8g …",
        Some("podman") => "podman run --shm-size=8g …",
        _ if space.total > SHM_BYTES_SMALL => "ls -lS /dev/shm   # and remove what nobody uses any more",
        _ => "sudo mount -o remount,size=8G /dev/shm",
    };
    section.warning(
        "/dev/shm",
        format!("{text}; pleach does not need it (memfd), NCCL and others do"),
        command,
    );
}

/// Memory that this process's control group may have: shared memory counts, too.
fn memory_of_group(machine: &Machine, section: &mut Section) {
    let groups = machine.text("proc/self/cgroup").unwrap_or_default();
    let group = |mark: &str| {
        let mut lines = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        lines.find(|(name, _)| name.split(',').any(|name| name == mark)).map(|(_, path)| path.to_owned())
    };
    let second = group("").map(|path| ("sys/fs/cgroup", path, "memory.max", "memory.current"));
    let first = group("memory")
        .map(|path| ("sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes"));
    // Inside a container the group's path may be the host's: then the root is its own.
    let places = [first, second].into_iter().flatten().flat_map(|(folder, path, limit, usage)| {
        [path.as_str(), ""].map(|path| (format!("{folder}{path}/{limit}"), format!("{folder}{path}/{usage}")))
    });
    let found =
        places.into_iter().find_map(|(limit, usage)| Some((machine.text(&limit)?, machine.number(&usage)?)));
    let Some((limit, used)) = found else {
        return section.unknown("memory limit", "the control group does not say", "cat /proc/self/cgroup");
    };
    match limit.parse::<u64>() {
        // The first kind of groups says "none" as a very large number.
        Ok(limit) if limit < 1 << 60 => {
            let text = format!("{} of {} used", size(used), size(limit));
            if used > limit / 10 * 9 {
                let command =
                    "docker update --memory 64g CONTAINER   # or ask whoever sets the limit of this group";
                section.warning("memory limit", format!("{text}: buffers and shared memory count"), command);
            } else {
                section.ok("memory limit", text);
            }
        }
        _ => section.ok("memory limit", "none"),
    }
}

/// The capabilities that a container lacks.
fn capabilities(machine: &Machine, section: &mut Section) {
    let Some(container) = machine.container() else { return };
    match machine.has_capability(MAY_LOCK) {
        None => section.unknown("container", format!("{container}; its capabilities cannot be read"), ""),
        Some(true) => section.ok("container", format!("{container}, with CAP_IPC_LOCK")),
        Some(false) if machine.rdma_devices().is_empty() => {
            section.ok("container", format!("{container}, without CAP_IPC_LOCK: nothing here needs it"));
        }
        Some(false) => {
            section.ok(
                "container",
                format!("{container}, without CAP_IPC_LOCK: the limit of locked memory counts"),
            );
        }
    }
}
