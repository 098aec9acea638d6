//! Links that go down, change their addresses and packets, delay and lose.

use std::sync::Arc;

use pleach_transport::verbs::port::GidType;
use pleach_transport::verbs::{
    Connect, OpenError, PairError, PortError, Refusal, VerbsDevice, VerbsOptions, WorkStatus,
};
use pleach_transport::{AtomicOp, DeviceConfig, LossCause, Rank, Secret, Transfer};

use super::changed::{Changed, expect_machine};
use crate::rdma_devices::rdma_device;
use crate::verbs::{Two, Verbs};
use crate::world::{BackendKind, Inbox, PATIENCE, SIGNAL_SLOTS, World, assert_bytes, noise, put};

/// Bytes that one packet never carries.
const LONG: usize = 64 << 10;

/// Of a device that nobody connects to.
fn config() -> DeviceConfig {
    DeviceConfig {
        rank: 0,
        world_size: 2,
        secret: Some(Secret::new(b"known to both ends")),
        signal_slots: SIGNAL_SLOTS,
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::new(Inbox::default()),
    }
}

/// Puts and gets noise both ways and compares it.
fn check_transfers(world: &mut World, rounds: u64) {
    for (from, to) in [(0, 1), (1, 0)] {
        let (mine, theirs) = (world.region(from, LONG), world.region(to, LONG));
        let word = world.region(to, 8);
        let before = world.count(to, from, 6);
        for round in 1..=rounds {
            let bytes = noise(round, LONG);
            mine.whole().store(&bytes);
            assert_eq!(world.carry_out(from, to, put(&mine.whole(), theirs.remote(), Some(6))), Ok(0));
            world.until("the signal", |world| world.count(to, from, 6) == before + round);
            assert_bytes(&theirs.whole().to_vec(), &bytes, "what was put");
            mine.whole().store(&noise(99, LONG));
            let get = Transfer::Get { src: theirs.remote(), dst: mine.whole() };
            assert_eq!(world.carry_out(from, to, get), Ok(0));
            assert_bytes(&mine.whole().to_vec(), &bytes, "what was read back");
            let add = Transfer::Atomic { word: word.whole().remote(), op: AtomicOp::Add(3) };
            assert_eq!(world.carry_out(from, to, add), Ok(3 * (round - 1)), "an atomic is carried out once");
        }
    }
}

/// Sees that rank 0 loses rank 1 because nothing comes back, and that both still reach rank 2 and
/// each other's loss is told.
fn check_fenced(world: &mut World) {
    let (mine, theirs) = (world.region(0, 64), world.region(1, 64));
    world.submit(0, 1, put(&mine.whole(), theirs.remote(), Some(0)));
    let cause = world.until_lost(0, 1);
    let Some(PairError::QueuePair(failure)) = cause.fabric_error() else { panic!("{cause:?}") };
    assert_eq!(failure.status, WorkStatus::RetriesExceeded);
    let text = cause.to_string();
    assert!(text.contains("its NIC does not answer") && text.contains("is its link up"), "{text}");
    world.until_lost(1, 0);
    world.check_pair(0, 2);
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_link_that_goes_down_loses_its_rank_and_nobody_else() {
    let mut changed = Changed::default();
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 3);
    changed.link_down(2);
    check_fenced(&mut world);
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn an_address_that_is_taken_away_loses_its_rank_and_nobody_else() {
    let mut changed = Changed::default();
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 3);
    changed.without_address(2);
    check_fenced(&mut world);
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn an_address_that_comes_besides_harms_nobody() {
    let mut changed = Changed::default();
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 3);
    changed.another_address(2);
    check_transfers(&mut world, 2);
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn delayed_and_lost_packets_change_no_byte_and_repeat_no_operation() {
    let mut changed = Changed::default();
    changed.lossy(1);
    changed.lossy(2);
    let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 2);
    check_transfers(&mut world, 12);
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn ends_with_different_packet_sizes_are_told_both() {
    let mut changed = Changed::default();
    changed.mtu(2, 1500);
    let mut world = World::new(BackendKind::of::<Verbs<false>>(), 2);
    let addresses = [world.device(0).info().address.clone(), world.device(1).info().address.clone()];
    world.device(0).connect(1, &addresses[1]).expect("starts");
    world.device(1).connect(0, &addresses[0]).expect("starts");
    let causes = [world.until_lost(0, 1), world.until_lost(1, 0)];
    let of = |own, peer| LossCause::from(PairError::MtuMismatch { own, peer });
    assert_eq!(causes, [of(4096, 1024), of(1024, 4096)], "each end says both, whoever found it");
    let text = causes[0].to_string();
    assert!(text.contains("1024") && text.contains("4096") && text.contains("the same MTU"), "{text}");
}

/// An RDMA device of this machine, at an index of its addresses.
fn at(rank: Rank, gid_index: u32) -> VerbsOptions {
    VerbsOptions { device: Some(rdma_device(rank)), gid_index: Some(gid_index), ..VerbsOptions::default() }
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn ends_whose_addresses_are_of_kinds_that_do_not_meet_are_told_both() {
    expect_machine();
    for connect in [Connect::Rendezvous, Connect::RdmaCm] {
        // Index 0 is that of the link alone, index 1 of IPv4.
        let mut two = Two::new(|rank| VerbsOptions { connect, ..at(rank, 1 - rank) }, PATIENCE);
        two.connect();
        let of = |own, peer| LossCause::from(PairError::GidTypeMismatch { own, peer });
        let (ipv4, local) = (GidType::RoceV2Ipv4, GidType::RoceV2Local);
        let causes = two.until_lost();
        assert_eq!(causes, [of(ipv4, local), of(local, ipv4)], "each end says both, whoever found it");
        let text = causes[0].to_string();
        let says = ["port is RoCE v2, link-local", "this rank's RoCE v2 over IPv4", "PLEACH_VERBS_GID_INDEX"];
        assert!(says.iter().all(|part| text.contains(part)), "{text}");
    }
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn an_address_that_goes_before_queue_pairs_are_joined_is_told_by_both_ends_with_what_to_compare() {
    let mut changed = Changed::default();
    let mut two = Two::new(|rank| at(rank, 1), PATIENCE);
    changed.without_address(2);
    two.connect();
    let causes = two.until_lost();
    println!("{causes:?}");
    let is_meant = |cause: &LossCause| {
        let said = cause.fabric_error();
        matches!(
            said,
            Some(PairError::NotConnected { .. } | PairError::Refused(Refusal::NotConnected { .. }))
        )
    };
    assert!(causes.iter().all(is_meant), "{causes:?}");
    for cause in causes {
        assert!(cause.to_string().contains("'pleach doctor --peer HOST' compares them"), "{cause}");
    }
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn a_port_that_is_down_is_refused_with_what_to_do() {
    let mut changed = Changed::default();
    changed.link_down(2);
    let wish = VerbsOptions { device: Some("rxe2".to_owned()), ..VerbsOptions::default() };
    let Err(OpenError::Port(error @ PortError::NoPort { .. })) = VerbsDevice::new(config(), &wish) else {
        panic!("rxe2 is down");
    };
    let text = error.to_string();
    assert!(text.contains("rxe2:1 is down ('ip link set h2 up'"), "{text}");
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn addresses_that_are_not_there_are_refused_with_those_that_are() {
    expect_machine();
    let wish =
        VerbsOptions { device: Some("rxe1".to_owned()), gid_index: Some(77), ..VerbsOptions::default() };
    let Err(OpenError::Port(error @ PortError::NoSuchGid { .. })) = VerbsDevice::new(config(), &wish) else {
        panic!("there is no index 77");
    };
    let text = error.to_string();
    assert!(text.starts_with("GID index 77 does not exist on rxe1:1; there are 0 1"), "{text}");
    let mut changed = Changed::default();
    changed.without_address(1);
    let interface = Some("10.77.0.1".to_owned());
    let wish = VerbsOptions { device: Some("rxe1".to_owned()), interface, ..VerbsOptions::default() };
    let Err(OpenError::Port(error @ PortError::NoPort { .. })) = VerbsDevice::new(config(), &wish) else {
        panic!("the address is gone");
    };
    let text = error.to_string();
    assert!(text.contains("rxe1:1 has no RoCE or InfiniBand address of 10.77.0.1"), "{text}");
}
