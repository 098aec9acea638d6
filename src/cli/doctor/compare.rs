//! Two machines side by side: what must be equal, and what each can reach of the other. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;

use pleach::transport::rendezvous::ProbeOutcome;

use super::Machine;
use super::network;
use super::peer::{from_lines, to_lines};
use super::rdma;
use super::{Finding, Section};

/// Clocks may differ by so much, in nanoseconds, before logs of two hosts are hard to read
/// together.
const CLOCKS_APART_NS: u64 = 1_000_000_000;

/// What one machine tells the other, by name. What is of a NIC beside the first one ends with its
/// index, as `rdma-port.1`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Statement(BTreeMap<String, String>);

impl Statement {
    /// The statement about this machine, which is reached at this address.
    pub(super) fn of(machine: &Machine, local: IpAddr) -> Self {
        let mut statement = Self::default();
        statement.set("version", env!("CARGO_PKG_VERSION"));
        let mut note = |name: &str, value: Option<String>| {
            if let Some(value) = value.filter(|value| !value.is_empty()) {
                statement.set(name, &value);
            }
        };
        note("host", machine.text("proc/sys/kernel/hostname"));
        note("kernel", machine.text("proc/sys/kernel/osrelease"));
        note("boot", machine.text("proc/sys/kernel/random/boot_id"));
        note("libibverbs", machine.library("libibverbs.so.1"));
        note("cuda", machine.library("libcuda.so.1"));
        note("address", Some(local.to_string()));
        note("named-host", std::env::var("PLEACH_HOST").ok().filter(|host| !host.is_empty()));
        let mtu = |name: &str| machine.text(&format!("sys/class/net/{name}/mtu"));
        if let Some(name) = network::interface_of(machine, local) {
            note("mtu", mtu(&name));
            note("interface", Some(name));
        }
        let ports = machine.rdma_ports().unwrap_or_default();
        match rdma::choose(machine, ports) {
            Ok(chosen) => {
                for (index, chosen) in chosen.iter().enumerate() {
                    let mut note = |name: &str, value| note(&of_nic(name, index), value);
                    let port =
                        ports.iter().find(|port| port.device == chosen.device && port.number == chosen.port);
                    note("rdma-port", Some(format!("{}:{}", chosen.device, chosen.port)));
                    note("rdma-kind", Some(chosen.gid.kind.to_string()));
                    note("rdma-gid", Some(IpAddr::V6(chosen.gid.address).to_canonical().to_string()));
                    let payload = port.and_then(|port| rdma::path_mtu(machine, port));
                    note("rdma-mtu", payload.map(|(now, _)| now.to_string()));
                    if let Some(name) = port.and_then(|port| port.interface.clone()) {
                        note("rdma-interface-mtu", mtu(&name));
                        note("rdma-interface", Some(name));
                    }
                    let layer =
                        format!("sys/class/infiniband/{}/ports/{}/link_layer", chosen.device, chosen.port);
                    note("rdma-layer", machine.text(&layer));
                }
            }
            Err(reason) if !ports.is_empty() => note("rdma-none", Some(reason)),
            Err(_) => {}
        }
        statement
    }

    pub(super) fn set(&mut self, name: &str, value: &str) {
        self.0.insert(name.to_owned(), value.to_owned());
    }

    pub(super) fn value(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(super) fn to_text(&self) -> String {
        to_lines(&self.0)
    }

    pub(super) fn from_text(text: &str) -> Self {
        Self(from_lines(text))
    }
}

/// The result of a trial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PairResults {
    /// Whether this machine reaches a port of the other that the kernel chose.
    pub(super) reaches: Result<(), String>,
    /// Whether the other reaches one here.
    pub(super) is_reached: Result<(), String>,
    /// Whether memory can be shared.
    pub(super) distance: Option<ProbeOutcome>,
    /// Over which fabric the two joined as ranks, or why they did not.
    pub(super) joined: Result<String, String>,
    /// How far the other's time of day is ahead and how surely that is known, in nanoseconds.
    pub(super) clock_ahead: Option<(i64, u64)>,
}

impl Default for PairResults {
    fn default() -> Self {
        let untried = || Err("not tried".to_owned());
        let joined = Err("not tried".to_owned());
        Self { reaches: untried(), is_reached: untried(), distance: None, joined, clock_ahead: None }
    }
}

const DISTANCES: [(ProbeOutcome, &str); 6] = [
    (ProbeOutcome::Neighbours, "neighbours"),
    (ProbeOutcome::Named, "named"),
    (ProbeOutcome::NotFound, "not-found"),
    (ProbeOutcome::OtherUser, "other-user"),
    (ProbeOutcome::NoDescriptor, "no-descriptor"),
    (ProbeOutcome::NotMapped, "not-mapped"),
];

impl PairResults {
    pub(super) fn to_text(&self) -> String {
        let mut values = BTreeMap::new();
        let reaches = self.reaches.clone().err().unwrap_or_else(|| "yes".to_owned());
        values.insert("reaches".to_owned(), reaches);
        let word = DISTANCES.iter().find(|(distance, _)| Some(*distance) == self.distance);
        if let Some((_, word)) = word {
            values.insert("distance".to_owned(), (*word).to_owned());
        }
        to_lines(&values)
    }

    pub(super) fn from_text(text: &str) -> Self {
        let values = from_lines(text);
        let reaches = match values.get("reaches").map(String::as_str) {
            Some("yes") => Ok(()),
            Some(reason) => Err(reason.to_owned()),
            None => Err("it does not say".to_owned()),
        };
        let distance = values.get("distance");
        let distance = DISTANCES.iter().find(|(_, word)| distance.is_some_and(|said| said == word));
        Self { reaches, distance: distance.map(|(distance, _)| *distance), ..Self::default() }
    }
}

/// The findings about a pair of machines.
pub(super) fn check(own: &Statement, theirs: &Statement, reached: &PairResults) -> Vec<Finding> {
    let mut section = Section::new("pair");
    versions(own, theirs, &mut section);
    let ways = [
        ("ports from here", &reached.reaches, own, theirs),
        ("ports from there", &reached.is_reached, theirs, own),
    ];
    for (subject, outcome, from, to) in ways {
        match outcome {
            Ok(()) => section.ok(subject, "any port that ranks listen on can be reached"),
            Err(reason) => section.problem(
                subject,
                format!("not reached ({reason}): a firewall? Ranks listen on ports of the kernel's choice"),
                format!(
                    "sudo iptables -I INPUT -s {} -j ACCEPT   # on {}",
                    said(from, "address"),
                    said(to, "host")
                ),
            ),
        }
    }
    match &reached.joined {
        Ok(fabric) => section.ok("join", format!("one rank on each joined over {fabric}")),
        Err(reason) => section.problem(
            "join",
            format!("one rank on each did not join: {reason}"),
            "ip addr   # on both; then set PLEACH_INTERFACE where it is wrong",
        ),
    }
    shared(own, theirs, reached, &mut section);
    clocks(reached, &mut section);
    mtu("MTU", ["interface", "mtu"], own, theirs, &mut section);
    fabric(own, theirs, &mut section);
    let is_told = |index: &usize| {
        [own, theirs].iter().any(|statement| statement.value(&of_nic("rdma-port", *index)).is_some())
    };
    for index in (1..).take_while(is_told) {
        further_nic(index, own, theirs, &mut section);
    }
    section.done()
}

fn said<'a>(statement: &'a Statement, name: &str) -> &'a str {
    statement.value(name).unwrap_or("unknown")
}

fn versions(own: &Statement, theirs: &Statement, section: &mut Section) {
    match (own.value("version"), theirs.value("version")) {
        (Some(here), Some(there)) if here == there => section.ok("pleach", format!("{here} at both ends")),
        (here, there) => section.problem(
            "pleach",
            format!(
                "{} here, {} there: ranks of different versions do not join",
                here.unwrap_or("unknown"),
                there.unwrap_or("unknown")
            ),
            format!("cargo install pleach --version {}", here.unwrap_or("VERSION")),
        ),
    }
    for (name, subject) in [("kernel", "kernel"), ("libibverbs", "libibverbs"), ("cuda", "CUDA driver")] {
        match (own.value(name), theirs.value(name)) {
            (None, None) => {}
            (Some(here), Some(there)) if here == there => section.ok(subject, format!("{here} at both ends")),
            (here, there) => section.ok(
                subject,
                format!(
                    "{} here, {} there, which may differ",
                    here.unwrap_or("none"),
                    there.unwrap_or("none")
                ),
            ),
        }
    }
}

/// Whether the two are one host in the eyes of ranks.
fn shared(own: &Statement, theirs: &Statement, reached: &PairResults, section: &mut Section) {
    let is_one_machine = own.value("boot").is_some() && own.value("boot") == theirs.value("boot");
    let is_named_apart = own.value("named-host") != theirs.value("named-host");
    let distance = if is_named_apart { Some(ProbeOutcome::Named) } else { reached.distance };
    match distance {
        None => section.unknown("shared memory", "was not tried", ""),
        Some(ProbeOutcome::Neighbours) => {
            section.ok("shared memory", "one host: ranks of these two share memory (shm)")
        }
        Some(distance) if !is_one_machine => {
            section.ok(
                "shared memory",
                format!("two hosts ({}): tcp or verbs between them", distance.reason(false)),
            );
        }
        Some(distance) => {
            let command = match distance {
                ProbeOutcome::Named => "unset PLEACH_HOST   # on both",
                ProbeOutcome::OtherUser => "id   # run both as one user",
                _ => "docker run --network=host --ipc=host …   # both",
            };
            let text = format!(
                "one machine, but memory is not shared ({}): sockets instead, which is slower",
                distance.reason(true)
            );
            section.warning("shared memory", text, command);
        }
    }
}

fn clocks(reached: &PairResults, section: &mut Section) {
    match reached.clock_ahead {
        None => section.unknown("clocks", "were not compared", "date"),
        Some((ahead, half)) => {
            let text = format!("{:.3} s apart, known to {:.3} s", ahead as f64 / 1e9, half as f64 / 1e9);
            if ahead.unsigned_abs() > CLOCKS_APART_NS.saturating_add(half) {
                let text = format!("{text}: pleach does not mind, but logs cannot be laid side by side");
                section.warning("clocks", text, "sudo timedatectl set-ntp true   # on both");
            } else {
                section.ok("clocks", text);
            }
        }
    }
}

/// The same MTU at both ends, or both numbers.
fn mtu(subject: &str, [name, value]: [&str; 2], own: &Statement, theirs: &Statement, section: &mut Section) {
    let number = |statement: &Statement| statement.value(value).and_then(|text| text.parse::<u64>().ok());
    let (Some(here), Some(there)) = (number(own), number(theirs)) else {
        return section.unknown(subject, "one of the ends does not know its own", "ip link");
    };
    let (own_name, their_name) = (said(own, name), said(theirs, name));
    if here == there {
        return section.ok(subject, format!("{here} at both ends ({own_name}, {their_name})"));
    }
    let (low, low_name, low_host, high) = if here < there {
        (here, own_name, said(own, "host"), there)
    } else {
        (there, their_name, said(theirs, "host"), here)
    };
    section.problem(
        subject,
        format!("{here} here ({own_name}), {there} there ({their_name}): packets of the larger may be dropped without a word (lower is {low})"),
        format!("sudo ip link set dev {low_name} mtu {high}   # on {low_host}"),
    );
}

fn fabric(own: &Statement, theirs: &Statement, section: &mut Section) {
    let (here, there) = match (own.value("rdma-port"), theirs.value("rdma-port")) {
        (Some(here), Some(there)) => (here, there),
        (None, None) => return section.ok("RDMA", "at neither end: tcp between these hosts"),
        (here, there) => {
            let (end, reason) = if here.is_none() {
                ("here", own.value("rdma-none"))
            } else {
                ("there", theirs.value("rdma-none"))
            };
            let text = format!(
                "{} here, {} there: verbs takes a port at both ends{}",
                here.unwrap_or("none"),
                there.unwrap_or("none"),
                reason.map_or(String::new(), |reason| format!(" ({end}: {reason})")),
            );
            return section.problem(
                "RDMA",
                text,
                format!("pleach doctor   # {end}: it says what is missing"),
            );
        }
    };
    joined(0, [here, there], own, theirs, section);
}

/// What ranks have beside the first NIC at each end: the second ones are joined to each other, and
/// so on.
fn further_nic(index: usize, own: &Statement, theirs: &Statement, section: &mut Section) {
    let [here, there] = [own, theirs].map(|statement| statement.value(&of_nic("rdma-port", index)));
    match [here, there] {
        [Some(here), Some(there)] => joined(index, [here, there], own, theirs, section),
        // That there is none at all at one end was said.
        _ if own.value("rdma-port").is_none() || theirs.value("rdma-port").is_none() => {}
        _ => section.warning(
            nic_subject("RDMA", index),
            format!(
                "{} here, {} there: ranks use as many devices as both ends have",
                here.unwrap_or("none"),
                there.unwrap_or("none")
            ),
            "export PLEACH_VERBS_DEVICE=DEVICE,DEVICE   # as many at both ends",
        ),
    }
}

/// Two ports that ranks join to each other, the `index`th of each end.
fn joined(
    index: usize,
    [here, there]: [&str; 2],
    own: &Statement,
    theirs: &Statement,
    section: &mut Section,
) {
    let name = |name: &str| of_nic(name, index);
    let subject = |what: &str| nic_subject(what, index);
    let both = |name: &str| [own, theirs].map(|statement| said(statement, &of_nic(name, index)));
    let (layers, kinds, gids) = (both("rdma-layer"), both("rdma-kind"), both("rdma-gid"));
    let text = format!("{here} ({}, {}) here, {there} ({}, {}) there", gids[0], kinds[0], gids[1], kinds[1]);
    if layers[0] != layers[1] {
        section.problem(
            subject("RDMA"),
            format!("{text}: {} and {} do not meet", layers[0], layers[1]),
            "export PLEACH_VERBS_DEVICE=DEVICE   # of the same network at both ends",
        );
    } else if kinds[0] != kinds[1] {
        section.problem(subject("RDMA"), format!("{text}: different kinds of addresses do not meet"), "export PLEACH_VERBS_GID_INDEX=INDEX   # of the same kind at both ends; 'pleach devices' lists them");
    } else {
        section.ok(subject("RDMA"), text);
    }
    if layers[0] == "Ethernet" {
        let names = [name("rdma-interface"), name("rdma-interface-mtu")];
        mtu(&subject("RDMA interface MTU"), [&names[0], &names[1]], own, theirs, section);
    }
    let payloads = [own, theirs].map(|statement| statement.value(&name("rdma-mtu")));
    match payloads {
        [Some(here), Some(there)] if here == there => {
            section.ok(subject("RDMA path MTU"), format!("{here} bytes of payload at both ends"));
        }
        [Some(bytes_here), Some(bytes_there)] => section.problem(
            subject("RDMA path MTU"),
            format!(
                "{bytes_here} bytes of payload here, {bytes_there} there: set both ends, and the switches between, alike"
            ),
            format!("ibv_devinfo -d {} | grep mtu   # at both ends", device(here)),
        ),
        _ => section.unknown(subject("RDMA path MTU"), "one of the ends does not know its own", "ibv_devinfo"),
    }
}

/// The device of a port.
fn device(port: &str) -> &str {
    port.split(':').next().unwrap_or_default()
}

/// What a statement calls something of the NIC of this index.
fn of_nic(name: &str, index: usize) -> String {
    if index == 0 { name.to_owned() } else { format!("{name}.{index}") }
}

/// What a finding about a pair of NICs is about.
fn nic_subject(what: &str, index: usize) -> String {
    if index == 0 { what.to_owned() } else { format!("{what}, device {}", index + 1) }
}
