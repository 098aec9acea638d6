//! Predictions beside real runs: eight ranks on four hosts, whose links to a switch are shaped, by
//! each algorithm and size. Times do not decide about the test: they are printed, for a person to
//! read on a machine with nothing else to do.

#[allow(dead_code)] // Other topologies have one rank a host.
mod links;
mod skipped;

use std::path::Path;
use std::process::Output;

use links::{Hosts, Wire, ended, number};
use skipped::skip;

const HOSTS: usize = 4;
const RANKS: usize = 8;
/// Of each host, in each direction.
const MEGABITS_PER_S: u32 = 200;
/// Inside a host: what two ranks copy from and to each other at once.
const INSIDE_GB_PER_S: f64 = 2.0;

const ALGORITHMS: [&str; 4] = ["ring", "double-tree", "hierarchical:4x2", "packed"];
const SIZES: &str = "64K,256K,1M,4M,16M";

/// The links as a file: ranks of a host on one switch, hosts on another.
fn topology() -> String {
    let mut toml = String::new();
    for rank in 0..RANKS {
        toml += &format!("[[node]]\nname = \"h{}.{}\"\nkind = \"rank\"\n", rank / 2, rank % 2);
    }
    for switch in (0..HOSTS).map(|host| format!("h{host}")).chain(["network".to_owned()]) {
        toml += &format!("[[node]]\nname = \"{switch}\"\nkind = \"switch\"\n");
    }
    let link = |from: &str, to: &str, bandwidth: f64, latency_us: f64| {
        format!(
            "[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nbandwidth = {bandwidth:.6}\nlatency_us = {latency_us}\n"
        )
    };
    // Of a frame of 1,514 bytes 1,448 are data.
    let outside = f64::from(MEGABITS_PER_S) / 8e3 * 1448.0 / 1514.0;
    for host in 0..HOSTS {
        for rank in 0..2 {
            toml += &link(&format!("h{host}.{rank}"), &format!("h{host}"), INSIDE_GB_PER_S, 2.0);
        }
        toml += &link(&format!("h{host}"), "network", outside, 50.0);
    }
    toml
}

fn rows(output: &Output) -> Vec<(f64, f64)> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let row = |line: &str| {
        assert_eq!(number(line, "errors"), 0.0, "{line}");
        (number(line, "bytes"), number(line, "time_us_p50"))
    };
    text.lines().map(row).collect()
}

#[test]
#[ignore = "compares times, which other work on the machine changes: run it by hand with --ignored --nocapture"]
fn predictions_are_printed_beside_what_shaped_links_take() {
    let wires: Vec<Wire> =
        (0..HOSTS).map(|host| Wire { ends: [host, HOSTS], megabits_per_s: Some(MEGABITS_PER_S) }).collect();
    // The switch is a namespace of its own, which forwards.
    let hosts = match Hosts::new(Path::new(env!("CARGO_BIN_EXE_pleach")), HOSTS + 1, &wires) {
        Ok(hosts) => hosts,
        Err(reason) => return skip(format_args!("no shaped networks here: {reason}")),
    };
    let file = hosts.folder().join("links.toml");
    std::fs::write(&file, topology()).expect("a file");
    let file = file.to_string_lossy().into_owned();
    println!("algorithm            bytes     real (us)  predicted (us)  real / predicted");
    let mut compared = 0;
    for algorithm in ALGORITHMS {
        let what = [
            "bench",
            "all-reduce",
            "--algorithm",
            algorithm,
            "--sizes",
            SIZES,
            "--json",
            "--topology",
            &file,
        ];
        let real = [&what[..], &["--warmup", "1", "--iterations", "3"]].concat();
        let children = (0..RANKS).map(|rank| hosts.start(rank / 2, rank, RANKS, &real)).collect();
        let real = ended(children);
        let predicted = hosts.pleach(0).args(what).args(["--fabric", "sim"]).output().expect("starts");
        for ((bytes, took), (of_bytes, expected)) in rows(&real[0]).into_iter().zip(rows(&predicted)) {
            assert_eq!(bytes, of_bytes);
            println!("{algorithm:<18} {bytes:>8} {took:>13.1} {expected:>15.1} {:>17.2}", took / expected);
            compared += 1;
        }
    }
    assert_eq!(compared, ALGORITHMS.len() * SIZES.split(',').count());
}
