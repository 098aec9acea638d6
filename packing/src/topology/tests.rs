use super::*;

fn line() -> Builder {
    let mut builder = Topology::builder();
    let (a, b, s) = (builder.rank("a"), builder.rank("b"), builder.switch("s"));
    builder.duplex(a, s, 5, LATENCY_NS);
    builder.duplex(s, b, 7, LATENCY_NS);
    builder
}

#[test]
fn parallel_links_add_up() {
    let mut builder = line();
    builder.link(NodeId(0), NodeId(2), 6, 3 * LATENCY_NS);
    let topology = builder.build().unwrap();
    let link = topology.link(NodeId(0), NodeId(2)).unwrap();
    assert_eq!((link.bytes_per_s, link.latency_ns, link.count), (11, 3 * LATENCY_NS, 2));
    assert!(!topology.is_symmetric() && line().build().unwrap().is_symmetric());
}

#[test]
fn ranks_are_numbered_in_their_order_and_switches_have_no_number() {
    let topology = line().build().unwrap();
    assert_eq!((topology.node(1), topology.rank(NodeId(2)), topology.ranks()), (NodeId(1), None, 2));
}

#[test]
fn one_way_is_not_connected_and_the_parts_are_named() {
    let mut builder = line();
    let c = builder.rank("c");
    builder.link(NodeId(0), c, 1, LATENCY_NS);
    let Err(TopologyError::Disconnected { parts }) = builder.build() else { panic!("connected") };
    assert_eq!(parts, [vec!["a".to_owned(), "b".to_owned()], vec!["c".to_owned()]]);
}

#[test]
fn bad_links_and_names_are_refused() {
    let build = |change: fn(&mut Builder)| {
        let mut builder = line();
        change(&mut builder);
        builder.build().unwrap_err()
    };
    let nothing = build(|builder| builder.link(NodeId(0), NodeId(1), 0, 0));
    assert!(matches!(nothing, TopologyError::NoBandwidth { .. }));
    let itself = build(|builder| builder.link(NodeId(0), NodeId(0), 1, 0));
    assert!(matches!(itself, TopologyError::Loop { .. }));
    let unknown = build(|builder| builder.link(NodeId(0), NodeId(9), 1, 0));
    assert!(matches!(unknown, TopologyError::UnknownNode { .. }));
    let much = build(|builder| builder.link(NodeId(0), NodeId(1), u64::MAX, 0));
    assert_eq!(much, TopologyError::TooMuchBandwidth);
    let twice = build(|builder| {
        builder.switch("a");
    });
    assert_eq!(twice, TopologyError::DuplicateName { name: "a".to_owned() });
}

#[test]
fn an_allocation_renumbers_ranks_and_keeps_switches() {
    let topology = line().build().unwrap();
    let only = topology.only(&[1, 0]).unwrap();
    assert_eq!((only.name(only.node(0)), only.nodes().len()), ("b", 3));
    assert_eq!(topology.only(&[0, 0]), Err(TopologyError::RankTwice { rank: 0 }));
    assert_eq!(topology.only(&[5]), Err(TopologyError::NoSuchRank { rank: 5, ranks: 2 }));
}

#[test]
fn names_fit_in_a_line() {
    for name in ["", "a\nb", "\u{7}"] {
        let mut builder = line();
        builder.switch(name);
        assert_eq!(builder.build().unwrap_err(), TopologyError::BadName { name: name.to_owned() });
    }
}
