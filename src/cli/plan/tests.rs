//! What is shown, of packings made by hand.

use std::time::Duration;

use pleach::Collective;
use pleach::packing::topology::{LATENCY_NS, NodeId, Topology};
use pleach::packing::{Certificate, Edge, Packing, Path, Rate, Strategy, Tree, check};

use super::{Plan, dot, json, rate_in_words, report, svg};

const GB_PER_S: u64 = 1_000_000_000;

fn plan(topology: Topology, packing: Packing) -> Plan {
    let checked = check(&topology, &packing).expect("made right");
    let generation = Duration::from_micros(300);
    let strategy = Strategy::Optimal;
    let source = "made.toml".to_owned();
    let (bytes, pcie_setup_ns) = (None, None);
    Plan { source, topology, packing, checked, strategy, generation, bytes, pcie_setup_ns }
}

fn rate(gb_s: u64) -> Rate {
    Rate::from(i128::from(gb_s * GB_PER_S))
}

fn edge(topology: &Topology, from: u32, to: u32, weight: Rate) -> Edge {
    let hops = vec![topology.node(from), topology.node(to)];
    Edge { from, to, paths: vec![Path { hops, weight }] }
}

/// a - b - c, and an all-reduce over its only tree.
fn line(names: [&str; 3]) -> Plan {
    let mut builder = Topology::builder();
    let [a, b, c] = names.map(|name| builder.rank(name));
    builder.duplex(a, b, 10 * GB_PER_S, LATENCY_NS);
    builder.duplex(b, c, 10 * GB_PER_S, LATENCY_NS);
    let topology = builder.build().expect("connected");
    let weight = rate(10);
    let edges = vec![edge(&topology, 0, 1, weight), edge(&topology, 2, 1, weight)];
    let packing = Packing {
        collective: Collective::AllReduce,
        rate: weight,
        bound: weight,
        certificate: Certificate::Partition { parts: vec![vec![a], vec![b, c]] },
        trees: vec![Tree { root: 1, weight, edges }],
    };
    plan(topology, packing)
}

/// Four ranks in a ring, and a broadcast half as fast as can be.
fn half_a_ring() -> Plan {
    let mut builder = Topology::builder();
    let nodes: Vec<NodeId> = (0..4).map(|rank| builder.rank(format!("g{rank}"))).collect();
    for rank in 0..4 {
        builder.duplex(nodes[rank], nodes[(rank + 1) % 4], 25 * GB_PER_S, LATENCY_NS);
    }
    let topology = builder.build().expect("connected");
    let weight = rate(25);
    let edges = (0..3).map(|rank| edge(&topology, rank, rank + 1, weight)).collect();
    let packing = Packing {
        collective: Collective::Broadcast { root: 0 },
        rate: weight,
        bound: rate(50),
        certificate: Certificate::Cut { nodes: vec![nodes[0]] },
        trees: vec![Tree { root: 0, weight, edges }],
    };
    plan(topology, packing)
}

#[test]
fn the_json_is_the_one_that_programs_were_promised() {
    let expected = concat!(
        r#"{"collective":"all-reduce","ranks":["a","b","c"],"root":null,"strategy":"optimal","#,
        r#""rate_gb_s":10.0,"rate":"10000000000/1","bound_gb_s":10.0,"bound":"10000000000/1","optimal":true,"#,
        r#""trees":[{"root":1,"weight":"10000000000/1","depth":1,"edges":[[0,1],[2,1]],"#,
        r#""paths":[[{"hops":["a","b"],"weight":"10000000000/1"}],[{"hops":["c","b"],"weight":"10000000000/1"}]]}],"#,
        r#""certificate":{"kind":"partition","parts":[["a"],["b","c"]],"text":"a is joined to the rest by one link of 10 GB/s"},"#,
        r#""generation_s":0.0003}"#
    );
    assert_eq!(json::object(&line(["a", "b", "c"])).to_string(), expected);
}

#[test]
fn a_gap_is_told_with_the_bound_and_a_cut_with_its_links() {
    let plan = half_a_ring();
    let text = report::text(&plan, &[]);
    assert!(text.contains("25 GB/s   50.0 % of the bound of 50 GB/s"), "{text}");
    assert!(text.contains("g0 can only be left by 2 links of 25 GB/s: together 50 GB/s"), "{text}");
    assert!(text.contains("g0(g1(g2(g3)))") && text.contains("100 %") && text.contains("0 %"), "{text}");
}

#[test]
fn names_cannot_break_out_of_a_picture_a_graph_or_json() {
    let plan = line(["<b>&\"", "b\\", "c'"]);
    let svg = svg::picture(&plan);
    assert!(!svg.contains("<b>") && svg.contains("&lt;b&gt;&amp;&quot;"), "{svg}");
    assert!(dot::graph(&plan).contains(r#""<b>&\"""#));
    assert!(json::object(&plan).to_string().contains(r#"["<b>&\"","b\\","c'"]"#));
}

#[test]
fn rates_are_written_in_the_unit_that_fits() {
    for (bytes_per_s, text) in [
        (600e9 / 7.0, "85.71 GB/s"),
        (342_857_142_857.0, "342.9 GB/s"),
        (25e9, "25 GB/s"),
        (1.5e8, "0.15 GB/s"),
        (12.5e6, "12.5 MB/s"),
        (1.0, "1 B/s"),
        (0.0, "0 GB/s"),
        (999_999e9, "999999 GB/s"),
    ] {
        assert_eq!(rate_in_words(bytes_per_s), text);
    }
}
