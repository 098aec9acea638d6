//! Ports made by hand, and what is taken of them.

use super::*;

fn gid(index: u32, address: &str, kind: GidType) -> Gid {
    Gid { index, address: address.parse().unwrap(), kind, interface: Some("eth0".to_owned()) }
}

fn port(device: &str, is_active: bool) -> Port {
    let gids = vec![
        gid(0, "fe80::1", GidType::RoceV1),
        gid(1, "fe80::1", GidType::RoceV2Local),
        gid(2, "::ffff:10.0.0.1", GidType::RoceV1),
        gid(3, "::ffff:10.0.0.1", GidType::RoceV2Ipv4),
    ];
    let (device, interface) = (device.to_owned(), Some("eth0".to_owned()));
    let state = if is_active { "4: ACTIVE" } else { "1: DOWN" }.to_owned();
    Port { device, number: 1, is_active, state, is_infiniband: false, interface, gids }
}

#[test]
fn the_first_active_port_and_its_best_address_are_taken_with_a_reason() {
    let chosen = choose(&[port("a", false), port("b", true)], &VerbsOptions::default()).unwrap();
    assert_eq!((chosen.device.as_str(), chosen.gid.index), ("b", 3));
    assert_eq!(
        chosen.reason,
        "b:1, GID index 3 (10.0.0.1, RoCE v2 over IPv4): RoCE v2 over IPv4 is the best of 4"
    );
}

#[test]
fn wishes_are_kept_or_refused_with_what_there_is() {
    let ports = [port("a", true), port("b", true)];
    let options = |device: &str, interface: Option<&str>, gid_index| VerbsOptions {
        device: Some(device.to_owned()),
        interface: interface.map(str::to_owned),
        gid_index,
        ..VerbsOptions::default()
    };
    assert_eq!(choose(&ports, &options("b:1", Some("10.0.0.1"), None)).unwrap().device, "b");
    assert_eq!(choose(&ports, &options("b", None, Some(0))).unwrap().gid.kind, GidType::RoceV1);
    let missing = choose(&ports, &options("b", None, Some(9))).unwrap_err();
    assert_eq!(missing.to_string(), "GID index 9 does not exist on b:1; there are 0 1 2 3");
    for unknown in ["c", "b:2", "b:x", "b:", "b:300"] {
        let error = choose(&ports, &options(unknown, None, None)).unwrap_err().to_string();
        assert_eq!(error, format!("there is no RDMA device '{unknown}'; there are a:1 b:1"));
    }
    assert!(matches!(choose(&ports, &options("a", Some("eth9"), None)), Err(PortError::NoPort { .. })));
    assert_eq!(choose(&[], &VerbsOptions::default()), Err(PortError::NoDevice));
    let down = choose(&[port("a", false)], &VerbsOptions::default()).unwrap_err();
    assert!(down.to_string().contains("a:1 is down ('ip link set eth0 up'"), "{down}");
    let infiniband = Port { is_infiniband: true, interface: None, ..port("a", false) };
    let down = choose(std::slice::from_ref(&infiniband), &VerbsOptions::default()).unwrap_err();
    assert!(down.to_string().contains("'ibstat' says more"), "{down}");
    let unmanaged = Port { state: "2: INIT".to_owned(), ..infiniband };
    let down = choose(&[unmanaged], &VerbsOptions::default()).unwrap_err();
    assert!(down.to_string().contains("start opensm"), "{down}");
}

#[test]
fn how_to_connect_is_one_of_two_words() {
    assert_eq!("rendezvous".parse(), Ok(Connect::Rendezvous));
    assert_eq!("cm".parse(), Ok(Connect::RdmaCm));
    let error = "udp".parse::<Connect>().unwrap_err();
    assert_eq!(error.to_string(), "PLEACH_VERBS_CONNECT is 'udp'; take 'rendezvous' or 'cm'");
}

#[test]
fn several_devices_are_taken_in_their_order_each_with_its_best_address() {
    let ports = [port("a", true), port("b", true), port("c", false)];
    let named = |text: &str| VerbsOptions { device: Some(text.to_owned()), ..VerbsOptions::default() };
    let chosen = choose_all(&ports, &named("b,a")).unwrap();
    assert_eq!(chosen.iter().map(|chosen| chosen.device.as_str()).collect::<Vec<_>>(), ["b", "a"]);
    let down = choose_all(&ports, &named("a,c")).unwrap_err();
    let PortError::NoPort { unusable } = down else { panic!("{down}") };
    assert!(matches!(&unusable[..], [Unusable::Down { port, .. }] if port == "c:1"), "{unusable:?}");
    let many = choose_all(&ports, &named("a,a,a,a,a")).unwrap_err();
    assert_eq!(many, PortError::TooManyDevices { wanted: 5 });
    let without_pairs = VerbsOptions { queue_pairs: Some(9), ..named("a,b") };
    assert_eq!(choose_all(&ports, &without_pairs), Err(PortError::QueuePairs { wanted: 9, most: 8 }));
}

#[test]
fn only_ports_of_named_devices_are_read_unless_a_name_is_wrong() {
    let all = || vec!["a".to_owned(), "b".to_owned(), "c".to_owned()];
    let named = |text: &str| VerbsOptions { device: Some(text.to_owned()), ..VerbsOptions::default() };
    assert_eq!(named("c, a:2").considered(all()), ["a", "c"]);
    assert_eq!(named("b:1,b:2").considered(all()), ["b"]);
    assert_eq!(named("a,x").considered(all()), all());
    assert_eq!(VerbsOptions::default().considered(all()), all());
}

#[test]
fn an_ethernet_port_without_addresses_is_told_apart_from_one_that_is_down() {
    let bare = Port { gids: Vec::new(), ..port("a", true) };
    let refused = choose(&[bare], &VerbsOptions::default()).unwrap_err();
    let no_address = Unusable::NoAddress { port: "a:1".to_owned(), of: None };
    assert_eq!(refused, PortError::NoPort { unusable: vec![no_address] });
}

#[test]
fn queue_pairs_on_all_nics_are_at_most_what_immediates_tell_apart() {
    let options = |queue_pairs| VerbsOptions { queue_pairs, ..VerbsOptions::default() };
    assert_eq!(options(None).queue_pairs(1), Ok(1));
    assert_eq!(options(Some(8)).queue_pairs(2), Ok(8));
    assert_eq!(options(Some(9)).queue_pairs(2), Err(PortError::QueuePairs { wanted: 9, most: 8 }));
    assert!(options(Some(0)).queue_pairs(1).is_err());
}
