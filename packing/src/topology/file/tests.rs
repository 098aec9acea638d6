use proptest::prelude::*;

use super::*;
use crate::topology::preset;

/// The example of the documentation.
const EXAMPLE: &str = r#"
[[node]]
name = "g0"            # ranks are numbered in file order
kind = "rank"
[[node]]
name = "s0"
kind = "switch"
[[node]]
name = "g1"
kind = "rank"
[[link]]
from = "g0"
to = "s0"
bandwidth = 25         # GB/s in each direction, rounded to 1 byte/s
latency_us = 1.0       # this is the default
[[link]]
from = "s0"
to = "g1"
bandwidth = 12.5000000004
latency_us = 0.25
[[link]]
from = "g0"
to = "g1"
bandwidth = 1e-9
duplex = false
"#;

#[test]
fn nodes_and_links_are_read_as_written() {
    let topology = parse(EXAMPLE).unwrap();
    assert_eq!((topology.ranks(), topology.name(topology.node(1))), (2, "g1"));
    let link = |from: u32, to: u32| {
        topology.link(NodeId(from), NodeId(to)).map(|link| (link.bytes_per_s, link.latency_ns))
    };
    assert_eq!((link(0, 1), link(1, 0)), (Some((25_000_000_000, 1_000)), Some((25_000_000_000, 1_000))));
    assert_eq!(link(2, 1), Some((12_500_000_000, 250)));
    assert_eq!((link(0, 2), link(2, 0)), (Some((1, 1_000)), None));
}

#[test]
fn parallel_links_add_up_and_are_counted() {
    let more = "[[link]]\nfrom = \"s0\"\nto = \"g0\"\nbandwidth = 5\n";
    let topology = parse(&format!("{EXAMPLE}{more}{more}")).unwrap();
    let link = topology.link(NodeId(0), NodeId(1)).unwrap();
    assert_eq!((link.bytes_per_s, link.count), (35_000_000_000, 3));
}

/// The error of the example with one line changed.
fn fault(line: usize, text: &str) -> String {
    let lines = EXAMPLE.lines().enumerate().map(|(number, old)| if number + 1 == line { text } else { old });
    let error = parse(&lines.collect::<Vec<_>>().join("\n")).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn faults_name_line_and_column() {
    assert_eq!(fault(13, r#"to = "s9""#), "13:6: a link names node 's9', which is not there");
    assert_eq!(fault(9, r#"name = "g0""#), "9:8: there are two nodes 'g0'; give each a name of its own");
    assert_eq!(fault(12, r#"from = "s0""#), "13:6: a link joins 's0' to itself");
    assert_eq!(fault(14, "bandwidth = 0"), "14:13: bandwidth 0 is zero");
    assert_eq!(fault(14, "bandwidth = -2.5"), "14:13: bandwidth -2.5 is negative");
    assert_eq!(fault(14, "bandwidth = nan"), "14:13: bandwidth nan is not a decimal number");
    assert_eq!(fault(14, "bandwidth = inf"), "14:13: bandwidth inf is not a decimal number");
    assert_eq!(fault(14, "bandwidth = 1e-10"), "14:13: bandwidth 1e-10 is zero");
    assert_eq!(fault(14, "bandwidth = 1e10"), "14:13: bandwidth 1e10 is too large");
    assert_eq!(fault(15, "latency_us = -1"), "15:14: latency_us -1 is negative");
    let sum = "the links carry more than 9223372036854775808 bytes a second together; are their units right?";
    assert_eq!(fault(14, "bandwidth = 5e9"), format!("14:13: {sum}"));
}

#[test]
fn names_with_line_breaks_make_no_second_line() {
    assert!(fault(13, r#"to = "s\n9""#).starts_with(r"13:6: a link names node 's\n9'"));
    let named = parse("[[node]]\nname = \"g\\n1\"\nkind = \"rank\"\n").unwrap_err().to_string();
    assert!(named.starts_with("2:8: \"g\\n1\" is no name of a node"), "{named}");
}

#[test]
fn unknown_keys_and_wrong_types_name_line_and_column() {
    let unknown = fault(15, "latency = 1.0");
    assert!(
        unknown.starts_with("15:1: unknown field `latency`, expected one of `from`, `to`, `bandwidth`"),
        "{unknown}"
    );
    assert!(fault(1, "nodes = 3").starts_with("1:1: unknown field `nodes`"));
    assert!(
        fault(4, r#"kind = "gpu""#).starts_with("4:8: unknown variant `gpu`, expected `rank` or `switch`")
    );
    assert!(
        fault(14, r#"bandwidth = "25""#).starts_with("14:13: invalid type: string \"25\", expected a number")
    );
    assert!(fault(14, "").starts_with("11:1: missing field `bandwidth`"), "{}", fault(14, ""));
    assert!(fault(14, "bandwidth = ").starts_with("14:"));
    assert!(fault(3, r#"name = "g0"#).starts_with("3:"));
}

#[test]
fn parts_that_do_not_reach_each_other_are_named() {
    let alone = "[[node]]\nname = \"a\"\nkind = \"rank\"\n[[node]]\nname = \"b\"\nkind = \"rank\"\n";
    let error = parse(alone).unwrap_err().to_string();
    assert!(error.starts_with("5:8: disconnected: {a}, {b} do not reach each other"), "{error}");
    assert_eq!(parse("").unwrap_err().fault, TextFault::Topology(TopologyError::NoRanks));
}

#[test]
fn presets_read_back_as_they_were() {
    for name in
        ["dgx-1v", "dgx-1p", "dgx-a100:2", "mi250:2", "torus:3x4@12.5", "fat-tree:4", "dragonfly:5,2,2"]
    {
        let topology = preset(name).unwrap();
        assert_eq!(parse(&topology.to_toml()).as_ref(), Ok(&topology), "{name}");
    }
}

#[test]
fn a_hundred_thousand_links_are_read_soon() {
    let topology = preset("mesh:448").unwrap();
    assert!(topology.links().len() > 200_000);
    assert_eq!(parse(&topology.to_toml()).unwrap(), topology);
}

#[test]
fn more_than_can_be_worked_with_is_refused() {
    let node = |number: usize| format!("[[node]]\nname = \"{number}\"\nkind = \"rank\"\n");
    let nodes: String = (0..=NODES_MAX).map(node).collect();
    let error = parse(&nodes).unwrap_err();
    let line = NODES_MAX * 3 + 2;
    assert_eq!(
        (error.line, error.fault),
        (line, TextFault::Topology(TopologyError::TooMany { what: "nodes", limit: NODES_MAX }))
    );
}

/// Links between these nodes: from, to, bytes a second, nanoseconds.
type Links = Vec<(usize, usize, u64, u64)>;

fn graphs() -> impl Strategy<Value = (Vec<(String, bool)>, Links, Option<u64>)> {
    let nodes = prop::collection::vec((".{0,6}", any::<bool>()), 1..7);
    let bytes_per_s = prop_oneof![1..100_u64, 1..1_u64 << 55];
    let links = prop::collection::vec((0..7_usize, 0..7_usize, bytes_per_s, 0..1_u64 << 40), 0..20);
    (nodes, links, prop::option::of(1..1_u64 << 50))
}

proptest! {
    #[test]
    fn every_topology_reads_back_as_it_was((nodes, links, ring) in graphs()) {
        let mut builder = Topology::builder();
        if let Some(bytes_per_s) = ring {
            builder.pcie_ring(bytes_per_s);
        }
        let mut ids: Vec<NodeId> = Vec::new();
        for (number, (name, is_rank)) in nodes.iter().enumerate() {
            let kind = if *is_rank { NodeKind::Rank } else { NodeKind::Switch };
            let id = builder.node(format!("{name}{number}"), kind);
            if let Some(&last) = ids.last() {
                builder.duplex(last, id, 7, 250);
            }
            ids.push(id);
        }
        for (from, to, bytes_per_s, latency_ns) in links {
            if from != to && from.max(to) < ids.len() {
                builder.link(ids[from], ids[to], bytes_per_s, latency_ns);
            }
        }
        if let Ok(topology) = builder.build() {
            let text = topology.to_toml();
            prop_assert_eq!(parse(&text), Ok(topology), "{}", text);
        }
    }

    #[test]
    fn no_text_panics(text in "(\\[\\[(node|link)\\]\\]\n|(name|kind|from|to|bandwidth|latency_us|duplex) = (\"(a|b|rank|switch)\"|[0-9.e-]{1,6}|true|nan)\n|.{0,5}\n){0,12}") {
        let _ = parse(&text);
    }
}
