//! Bandwidths of links in each direction, from the values in a topology file or in the system.
//!
//! Rates are nominal: an NVLink of the third generation counts 25 GB/s as in `dgx-a100`. NCCL
//! itself uses the rates that it expects to reach (its `topo.h` has 20 GB/s for that link). Such
//! rates would mix overheads into the bounds.

use crate::topology::decimal::scaled;

/// Bytes a second of 1 GB/s.
const GB_PER_S: u64 = 1_000_000_000;

/// The speed of a NIC without a known speed, as NCCL assumes it.
pub(super) const NET_DEFAULT_MEGABITS_PER_S: u64 = 10_000;

/// The speed of PCIe 3.0, which NCCL assumes where no speed is known.
const TRANSFERS_DEFAULT_PER_S: u64 = 8 * GB_PER_S;

/// The number of lanes that NCCL assumes where no number is known.
const LANES_DEFAULT: u64 = 16;

/// Highest plausible speed of a lane.
const TRANSFERS_MAX_PER_S: u64 = 1_024 * GB_PER_S;

/// Largest plausible number of lanes. A NIC that NCCL merged from several NICs has more than 16.
const LANES_MAX: u64 = 1_024;

/// The bandwidth of one NVLink of a GPU of this compute capability, from data sheets: P100 (NVLink
/// 1, 40 GB/s both ways together), V100, RTX 20 and A100 (NVLink 2 and 3, 50), A40 and RTX 30 (4
/// links, 112.5 in all), H100 (NVLink 4, 50) and B200 (NVLink 5, 100).
pub(in crate::topology) fn nvlink(compute_capability: u32) -> Option<u64> {
    match compute_capability {
        60 => Some(20 * GB_PER_S),
        86 => Some(14_062_500_000),
        70..100 => Some(25 * GB_PER_S),
        100..120 => Some(50 * GB_PER_S),
        _ => None,
    }
}

/// The bandwidth of one xGMI link of an AMD GPU of this architecture, from data sheets: MI50 and
/// MI100 (92 GB/s both ways together), MI200 (100), MI300 (128) and MI350 (153.6). Older files have
/// RCCL's numbers of architectures.
pub(super) fn xgmi(architecture: &str) -> Option<u64> {
    match architecture.strip_prefix("gfx").unwrap_or(architecture) {
        "906" | "908" => Some(46 * GB_PER_S),
        "90a" | "910" => Some(50 * GB_PER_S),
        "940" | "941" | "942" => Some(64 * GB_PER_S),
        "950" => Some(76_800_000_000),
        _ => None,
    }
}

/// The bandwidth between two NUMA nodes of these CPUs: the measured values in NCCL's
/// `src/graph/topo.h` (2.2x).
pub(in crate::topology) fn between_cpus(
    architecture: &str,
    vendor: &str,
    family: Option<u32>,
    model: Option<u32>,
) -> u64 {
    let gb_per_s = match (architecture, vendor) {
        ("arm64", _) => 6,
        ("ppc64", _) => 32,
        (_, "GenuineIntel") if family == Some(6) => match model.unwrap_or(0) {
            0xcf.. => 40,
            0x8f.. => 22,
            0x55.. => 10,
            _ => 6,
        },
        (_, "AuthenticAMD") => 16,
        (_, "CentaurHauls" | "  Shanghai  ") if (family, model) == (Some(7), Some(0x5b)) => 9,
        _ => 6,
    };
    gb_per_s * GB_PER_S
}

/// Whether a device of this PCI class computes: display controllers and processing accelerators do.
pub(in crate::topology) fn is_gpu_class(class: &str) -> bool {
    class.starts_with("0x03") || class.starts_with("0x12") || class.starts_with("0x13")
}

/// The number of a bus such as `0000:07:00.0`.
pub(in crate::topology) fn bus(text: &str) -> Option<u64> {
    let digits: String = text.chars().filter(|character| !matches!(character, ':' | '.')).collect();
    let is_hexadecimal = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    Some(digits).filter(|_| is_hexadecimal).and_then(|digits| u64::from_str_radix(&digits, 16).ok())
}

/// The number of transfers a second of a lane, from a text such as `16.0 GT/s PCIe`. `None` if the
/// text is empty or says that the speed is unknown.
pub(in crate::topology) fn transfers_per_s(text: &str) -> Option<u64> {
    if text.is_empty() || text.starts_with("Unknown") {
        return Some(TRANSFERS_DEFAULT_PER_S);
    }
    let number = text.split_once(" GT/s").map(|(number, _)| number)?;
    let transfers_per_s = scaled(number, 9).ok()?;
    (1..=TRANSFERS_MAX_PER_S).contains(&transfers_per_s).then_some(transfers_per_s)
}

/// The number of lanes. `None` if the text says 0, or 255 as the kernel does for an unknown number.
pub(in crate::topology) fn lanes(text: &str) -> Option<u64> {
    match text.parse::<u64>().ok()? {
        0 | 255 => Some(LANES_DEFAULT),
        lanes => Some(lanes).filter(|&lanes| lanes <= LANES_MAX),
    }
}

/// The rate of PCIe lanes after line coding: 8 of 10 bits up to 5 GT/s, 128 of 130 bits up to 32
/// GT/s, and from 64 GT/s on 242 of the 256 bytes of a flit (PCI Express base specification).
pub(in crate::topology) fn pcie(transfers_per_s: u64, lanes: u64) -> u64 {
    let (data, coded) = match transfers_per_s {
        0..=5_000_000_000 => (8, 10),
        5_000_000_001..=32_000_000_000 => (128, 130),
        _ => (242, 256),
    };
    let bytes_per_s = u128::from(transfers_per_s) * u128::from(lanes) * data / (coded * 8);
    // The result is below 2⁶³ by the limits of both numbers.
    u64::try_from(bytes_per_s).unwrap_or(u64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pcie_generations_carry_what_they_are_known_for() {
        let x16 = |text| pcie(transfers_per_s(text).unwrap(), lanes("16").unwrap());
        assert_eq!((x16("2.5 GT/s"), x16("5.0 GT/s PCIe")), (4_000_000_000, 8_000_000_000));
        assert_eq!((x16("8 GT/s"), x16("16.0 GT/s PCIe")), (15_753_846_153, 31_507_692_307));
        assert_eq!((x16("32.0 GT/s PCIe"), x16("64.0 GT/s PCIe")), (63_015_384_615, 121_000_000_000));
        assert_eq!((x16(""), x16("Unknown")), (x16("8 GT/s"), x16("8 GT/s")));
        assert_eq!(
            (transfers_per_s("fast"), transfers_per_s("-8 GT/s"), transfers_per_s("1e9 GT/s")),
            (None, None, None)
        );
        assert_eq!((lanes("0"), lanes("4"), lanes("x16"), lanes("5000")), (Some(16), Some(4), None, None));
    }

    #[test]
    fn buses_are_the_same_however_they_are_padded() {
        assert_eq!(bus("000000:c6:00.0"), bus("0000:C6:00.0"));
        assert_eq!(bus("fffffff:ff:ff.0"), Some(0xffff_ffff_fff0));
        assert_eq!((bus("0000:g6:00.0"), bus("")), (None, None));
    }

    #[test]
    fn links_carry_what_data_sheets_say() {
        let gb = |rate: Option<u64>| rate.map(|rate| rate as f64 / 1e9);
        assert_eq!((gb(nvlink(60)), gb(nvlink(70)), gb(nvlink(80))), (Some(20.0), Some(25.0), Some(25.0)));
        assert_eq!(
            (gb(nvlink(86)), gb(nvlink(90)), gb(nvlink(100))),
            (Some(14.0625), Some(25.0), Some(50.0))
        );
        assert_eq!((nvlink(52), nvlink(120)), (None, None));
        assert_eq!(
            (gb(xgmi("gfx90a")), gb(xgmi("910")), gb(xgmi("gfx942"))),
            (Some(50.0), Some(50.0), Some(64.0))
        );
        assert_eq!(xgmi("gfx1100"), None);
    }
}
