//! Whatever text comes, TOML, XML or a matrix: no panic; what parses is written as TOML that parses
//! to the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pleach_packing::topology::{SourceOptions, file, parse};

/// Of more parallel links only the sum is written.
const COUNT_WRITTEN_MAX: u32 = 64;

fuzz_target!(|text: &str| {
    if let Ok((topology, _)) = parse(text, &SourceOptions::default()) {
        let again = file::parse(&topology.to_toml());
        let is_counted = |count: u32, bytes_per_s: u64| count <= COUNT_WRITTEN_MAX && u64::from(count) <= bytes_per_s;
        if topology.links().iter().all(|link| is_counted(link.count, link.bytes_per_s)) {
            assert_eq!(again, Ok(topology));
        } else {
            assert!(again.is_ok());
        }
    }
});
