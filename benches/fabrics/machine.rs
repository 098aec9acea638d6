//! The machine: what it is, and what it can do at most.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::peers::Peers;

/// A machine in words and limits. Holds no names and no dates.
pub(crate) struct Machine {
    lines: Vec<String>,
    limits: Vec<(String, f64, String)>,
}

impl Machine {
    /// Examines this machine, and measures each of its limits for `time_ms`.
    pub(crate) fn look(peers: &Peers, time_ms: u32) -> Self {
        let mut lines = vec![processor()];
        lines.extend(caches());
        lines.extend(peers.versions());
        Self { lines, limits: limits(peers, time_ms) }
    }

    /// One fact a line.
    pub(crate) fn lines(&self) -> &[String] {
        &self.lines
    }

    /// What, how much, unit.
    pub(crate) fn limits(&self) -> &[(String, f64, String)] {
        &self.limits
    }
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |line: &str| line.split_once(':').map(|(_, value)| value.trim().to_owned());
    let field = |name: &str| text.lines().find(|line| line.starts_with(name)).and_then(value);
    let model = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let number = field("model\t").map_or_else(String::new, |number| format!(", model {number}"));
    let count = std::thread::available_parallelism().map_or(0, usize::from);
    let virtual_machine = if text.contains("hypervisor") { ", in a virtual machine" } else { "" };
    format!("{model}{number}: {count} processors{virtual_machine}")
}

/// Of the first processor.
fn caches() -> Option<String> {
    let read = |index: u32, name: &str| {
        let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{name}");
        fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
    };
    let found = (0..8).filter_map(|index| {
        let (level, kind, size) = (read(index, "level")?, read(index, "type")?, read(index, "size")?);
        (kind != "Instruction").then(|| format!("L{level} {size}"))
    });
    let found: Vec<_> = found.collect();
    (!found.is_empty()).then(|| format!("caches: {}", found.join(", ")))
}

fn limits(peers: &Peers, time_ms: u32) -> Vec<(String, f64, String)> {
    let output = Command::new("timeout").arg("60").arg(peers.limits()).arg(time_ms.to_string()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let limit = |line: &str| {
        let value: Value = serde_json::from_str(line).ok()?;
        Some((
            value["what"].as_str()?.to_owned(),
            value["value"].as_f64()?,
            value["unit"].as_str()?.to_owned(),
        ))
    };
    text.lines().filter_map(limit).collect()
}
