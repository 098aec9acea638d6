//! Whether the largest size fits the memory of this host, asked before anything is started.
//!
//! Memory is given out before it is there: without this a size that is much too large ends with
//! whatever process the kernel chooses to kill.

use super::sizes::{Size, Sweep};
use super::{Arguments, BenchFabric, CommandError, Task, is_one_of_several, lengths};

/// Refuses what cannot fit.
pub(super) fn check(task: &Task, sweep: &Sweep, arguments: &Arguments) -> Result<(), CommandError> {
    let largest = Size(sweep.sizes().max().unwrap_or_default());
    let is_simulated = arguments.fabric == Some(BenchFabric::Simulated);
    // A launcher's other ranks answer for themselves, here or on their hosts.
    let ranks = if !is_simulated && is_one_of_several(&arguments.world)? { 1 } else { task.ranks };
    let needed = needed(task, largest, ranks);
    match std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available(&text)) {
        Some(available) if needed > available => Err(CommandError::usage(format!(
            "not enough memory: {largest} needs {} for {ranks} ranks, and this host has {} left; give a smaller --max",
            rounded(needed),
            rounded(available),
        ))),
        _ => Ok(()),
    }
}

/// Bytes that the buffers of one iteration take on the first so many ranks.
fn needed(task: &Task, largest: Size, ranks: u32) -> u64 {
    let count = task.count(largest.0);
    let elements = |rank| {
        let (data, output) = lengths(task, rank, count);
        data as u64 + output.unwrap_or_default() as u64
    };
    (0..ranks).map(elements).sum::<u64>() * task.data_type.bytes() as u64
}

/// What the kernel could give without swapping, from its own table.
fn available(table: &str) -> Option<u64> {
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// To whole units, upwards.
fn rounded(bytes: u64) -> Size {
    let unit = if bytes >= 1 << 30 { 1 << 30 } else { 1 << 20 };
    Size(bytes.div_ceil(unit) * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let table = "MemTotal:       24689764 kB\nMemFree:          310 kB\nMemAvailable:   22020096 kB\n";
        assert_eq!(available(table), Some(21 << 30));
        for broken in ["", "MemAvailable:", "MemAvailable: x kB", "MemAvailable: 99999999999999999999 kB"] {
            assert_eq!(available(broken), None, "{broken}");
        }
    }

    #[test]
    fn sizes_are_told_in_units_that_can_be_read() {
        assert_eq!(rounded((3 << 30) + 1).to_string(), "4G");
        assert_eq!(rounded(5 << 20).to_string(), "5M");
    }
}
