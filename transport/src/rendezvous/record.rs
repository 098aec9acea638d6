//! A rank's record in the store: lines of text, so that a person can read them in a file store.

use std::collections::HashMap;
use std::fmt;

use super::StorePath;
use crate::Rank;
use crate::processors::Processors;

/// Version of the join protocol and of the protocols of the fabrics.
pub(super) const PROTOCOL_VERSION: u32 = 6;

/// Most settings that are compared.
const KNOBS_MAX: usize = 64;

/// A rank's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankRecord {
    world_size: u32,
    process: u32,
    /// Name of the host, for messages.
    host_name: String,
    /// Identifies the machine, across its containers. Only for messages, and to count ranks that
    /// share processors.
    machine: String,
    /// The network namespace: processes of one machine with the same one share loopback.
    pub(super) network: String,
    /// The ends of its connection to the store, if it has one.
    pub(super) path: Option<StorePath>,
    /// The processors that it may use; empty if unknown.
    processors: Processors,
    /// How many of them it may use at a time: fewer than it has if a control group limits it.
    parallelism: usize,
    /// `PLEACH_HOST`.
    pub(super) host: Option<String>,
    /// The address of its [`ProbeListener`](super::ProbeListener), if it has one.
    pub(super) probe_listener: Option<String>,
    /// Settings that must be equal everywhere, by name.
    knobs: Vec<(String, String)>,
}

/// Two ranks with different values of a setting that must be equal.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("ranks disagree: {setting} is {} at rank {} and {} at rank {}; start all ranks alike", .first.1, .first.0, .second.1, .second.0)]
pub struct Difference {
    /// The setting.
    pub setting: String,
    /// One rank and its value.
    pub first: (Rank, String),
    /// The other rank and its value.
    pub second: (Rank, String),
}

/// A record that cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unreadable;

impl RankRecord {
    /// The record of this process.
    pub(super) fn own(
        world_size: u32,
        host: Option<&str>,
        probe_listener: Option<&str>,
        path: Option<StorePath>,
        knobs: &[(String, String)],
    ) -> Self {
        let mut knobs = knobs.to_vec();
        knobs.sort();
        Self {
            world_size,
            process: std::process::id(),
            host_name: host_name(),
            machine: machine(),
            network: network(),
            path,
            processors: Processors::allowed().unwrap_or_default(),
            parallelism: std::thread::available_parallelism().map_or(1, usize::from),
            host: host.map(str::to_owned),
            probe_listener: probe_listener.map(str::to_owned),
            knobs,
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut text = format!("pleach {PROTOCOL_VERSION}\n");
        let mut line = |name: &str, value: &str| {
            text.extend([name, " ", &value.escape_default().to_string(), "\n"]);
        };
        line("world-size", &self.world_size.to_string());
        line("process", &self.process.to_string());
        line("host-name", &self.host_name);
        line("machine", &self.machine);
        line("network", &self.network);
        if let Some(StorePath { local, remote }) = self.path {
            line("path", &format!("{local} {remote}"));
        }
        line("processors", &self.processors.to_string());
        line("parallelism", &self.parallelism.to_string());
        if let Some(host) = &self.host {
            line("host", host);
        }
        if let Some(probe_listener) = &self.probe_listener {
            line("door", probe_listener);
        }
        for (name, value) in &self.knobs {
            line(&format!("knob {}", name.replace(char::is_whitespace, "-")), value);
        }
        text.into_bytes()
    }

    /// The record of a rank of this version, or the other version.
    pub(super) fn decode(bytes: &[u8]) -> Result<Result<Self, u32>, Unreadable> {
        let text = std::str::from_utf8(bytes).map_err(|_| Unreadable)?;
        let mut lines = text.lines();
        let version =
            lines.next().and_then(|line| line.strip_prefix("pleach ")).and_then(|text| text.parse().ok());
        match version.ok_or(Unreadable)? {
            PROTOCOL_VERSION => {}
            other => return Ok(Err(other)),
        }
        let mut field = |name: &str| {
            let (found, value) = lines.clone().next()?.split_once(' ')?;
            (found == name).then(|| {
                lines.next();
                value.to_owned()
            })
        };
        let number = |text: String| text.parse().map_err(|_| Unreadable);
        let world_size = field("world-size").ok_or(Unreadable).and_then(number)?;
        let process = field("process").ok_or(Unreadable).and_then(number)?;
        let host_name = field("host-name").ok_or(Unreadable)?;
        let machine = field("machine").ok_or(Unreadable)?;
        let network = field("network").ok_or(Unreadable)?;
        let path = field("path").map(|text| path(&text).ok_or(Unreadable)).transpose()?;
        let processors = field("processors").ok_or(Unreadable)?;
        let processors = Processors::of_list(&processors);
        let parallelism = field("parallelism").ok_or(Unreadable)?.parse().map_err(|_| Unreadable)?;
        let host = field("host");
        let probe_listener = field("door");
        let mut knobs = Vec::new();
        while let Some(knob) = field("knob") {
            let (name, value) = knob.split_once(' ').ok_or(Unreadable)?;
            if knobs.len() == KNOBS_MAX {
                return Err(Unreadable);
            }
            knobs.push((name.to_owned(), value.to_owned()));
        }
        if lines.next().is_some() {
            return Err(Unreadable);
        }
        Ok(Ok(Self {
            world_size,
            process,
            host_name,
            machine,
            network,
            path,
            processors,
            parallelism,
            host,
            probe_listener,
            knobs,
        }))
    }

    /// The first setting that differs.
    pub(super) fn compare(&self, own: Rank, other: &Self, theirs: Rank) -> Result<(), Difference> {
        let differs = |setting: &str, first: String, second: String| {
            if first == second {
                return Ok(());
            }
            Err(Difference { setting: setting.to_owned(), first: (own, first), second: (theirs, second) })
        };
        differs("the world size", self.world_size.to_string(), other.world_size.to_string())?;
        // As it arrives there: escaped.
        let mut names: Vec<_> = self.knobs.iter().chain(&other.knobs).map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        for name in names {
            differs(name, self.knob(name), other.knob(name))?;
        }
        Ok(())
    }

    fn knob(&self, wanted: &str) -> String {
        let found = self.knobs.iter().find(|(name, _)| name == wanted);
        found.map_or("not set", |(_, value)| value).to_owned()
    }

    /// What is of use once all ranks have compared their records.
    pub(crate) fn of_known_rank(self) -> Self {
        Self { probe_listener: None, knobs: Vec::new(), ..self }
    }

    /// Whether both run on one machine.
    pub(super) fn same_machine(&self, other: &Self) -> bool {
        self.machine == other.machine
    }

    /// The host's name for messages.
    pub(super) fn host_shown(&self) -> &str {
        self.host.as_deref().unwrap_or(&self.host_name)
    }
}

impl fmt::Display for RankRecord {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "process {} on {}", self.process, self.host_shown())
    }
}

/// By rank: ranks for each processor that it may run on, rounded up. Ranks count that have no other
/// processors than it has.
pub(super) fn ranks_a_processor(records: &[RankRecord]) -> Vec<u32> {
    // Most ranks of a machine have the same processors.
    let mut alike: HashMap<_, usize> = HashMap::new();
    let key =
        |record: &RankRecord| (record.machine.clone(), record.processors.to_string(), record.parallelism);
    for record in records {
        *alike.entry(key(record)).or_default() += 1;
    }
    let share = |record: &RankRecord| {
        let own = &record.processors;
        let is_limited = record.parallelism < own.len() || own.is_empty();
        let processors = if is_limited { record.parallelism } else { own.len() };
        let ranks: usize = alike
            .iter()
            .filter(|((machine, list, _), _)| {
                *machine == record.machine && (is_limited || Processors::of_list(list).all_among(own))
            })
            .map(|(_, ranks)| ranks)
            .sum();
        ranks.div_ceil(processors.max(1)) as u32
    };
    let mut shares = HashMap::new();
    records.iter().map(|record| *shares.entry(key(record)).or_insert_with(|| share(record))).collect()
}

/// The host's name, for messages.
#[must_use]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Changes with every boot of a machine, so two machines never have the same.
fn machine() -> String {
    let identity = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    identity.map_or_else(|_| host_name(), |text| text.trim().to_owned())
}

/// The network namespace of this process.
fn network() -> String {
    let link = std::fs::read_link("/proc/self/ns/net");
    link.map_or_else(|_| "unknown".to_owned(), |link| link.to_string_lossy().into_owned())
}

fn path(text: &str) -> Option<StorePath> {
    let (local, remote) = text.split_once(' ')?;
    Some(StorePath { local: local.parse().ok()?, remote: remote.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> RankRecord {
        RankRecord {
            world_size: 4,
            process: 77,
            host_name: "vm".to_owned(),
            machine: "m".to_owned(),
            network: "net:[7]".to_owned(),
            path: None,
            processors: Processors::new([0, 1]),
            parallelism: 2,
            host: None,
            probe_listener: None,
            knobs: vec![
                ("chunk-bytes".to_owned(), "64".to_owned()),
                ("fabric".to_owned(), "auto".to_owned()),
            ],
        }
    }

    #[test]
    fn ranks_a_processor_count_those_that_are_kept_on_the_same_processors() {
        let shares = |parallelism: usize, lists: &[&str]| {
            let processors = lists.iter().map(|list| Processors::of_list(list));
            let records: Vec<_> =
                processors.map(|processors| RankRecord { processors, parallelism, ..record() }).collect();
            ranks_a_processor(&records)
        };
        assert_eq!(shares(2, &["0-1", "0-1"]), [1, 1]);
        assert_eq!(shares(2, &["0-1"; 3]), [2, 2, 2]);
        assert_eq!(shares(2, &["0-1"; 32]), [16; 32]);
        // Each on a processor of its own, as the launcher bound them.
        assert_eq!(shares(1, &["0", "1"]), [1, 1]);
        assert_eq!(shares(4, &["0-3", "4-7", "4-7"]), [1, 1, 1]);
        assert_eq!(shares(1, &["0", "1", "1"]), [1, 2, 2]);
        // The others leave no processor for a rank that is not bound.
        assert_eq!(shares(2, &["0", "1", "0-1"]), [1, 1, 2]);
        // A quota, and ranks that do not know their processors.
        assert_eq!(shares(1, &["0-63", "0-63"]), [2, 2]);
        assert_eq!(shares(2, &["", "", ""]), [2, 2, 2]);
        assert_eq!(shares(2, &["", ""]), [1, 1]);
        // Another machine's processors have the same numbers.
        let elsewhere = RankRecord { machine: "n".to_owned(), ..record() };
        assert_eq!(
            ranks_a_processor(&[record(), elsewhere.clone(), record(), elsewhere, record()]),
            [2, 1, 2, 1, 2]
        );
    }

    #[test]
    fn a_record_reads_back_with_and_without_a_host_name_of_its_own() {
        let texts = || [None, Some("rack 1".to_owned())];
        for (host, probe_listener) in
            texts().into_iter().flat_map(|host| texts().map(|probe_listener| (host.clone(), probe_listener)))
        {
            let ends = ["10.1.0.2", "fd00::1"].map(|text| text.parse().expect("an address"));
            let path = probe_listener.as_ref().map(|_| StorePath { local: ends[0], remote: ends[1] });
            let record = RankRecord { host, probe_listener, path, ..record() };
            assert_eq!(RankRecord::decode(&record.encode()), Ok(Ok(record)));
        }
        assert_eq!(RankRecord::decode(b"pleach 9\nwhatever"), Ok(Err(9)));
        for bytes in [&b""[..], b"pleach x", b"HTTP/1.1 200", b"pleach 6\nworld-size x\n", &[0xff]] {
            assert_eq!(RankRecord::decode(bytes), Err(Unreadable));
        }
        let whole = record().encode();
        let lines = whole.split_inclusive(|&byte| byte == b'\n').count();
        for deferred in 1..lines - 2 {
            let bytes: Vec<u8> =
                whole.split_inclusive(|&byte| byte == b'\n').take(deferred).flatten().copied().collect();
            assert_eq!(RankRecord::decode(&bytes), Err(Unreadable), "{deferred} lines");
        }
    }

    #[test]
    fn a_difference_names_both_ranks_and_both_values() {
        let other = RankRecord { world_size: 5, ..record() };
        let text = record().compare(0, &other, 4).expect_err("differs").to_string();
        assert!(text.contains("the world size is 4 at rank 0 and 5 at rank 4"), "{text}");
        let mut other = record();
        other.knobs[0].1 = "128".to_owned();
        let text = record().compare(1, &other, 2).expect_err("differs").to_string();
        assert!(text.contains("chunk-bytes is 64 at rank 1 and 128 at rank 2"), "{text}");
        other.knobs.remove(0);
        let text = record().compare(1, &other, 2).expect_err("differs").to_string();
        assert!(text.contains("chunk-bytes is 64 at rank 1 and not set at rank 2"), "{text}");
        assert_eq!(record().compare(0, &record(), 3), Ok(()));
    }
}
