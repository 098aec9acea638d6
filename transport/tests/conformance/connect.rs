//! Connecting: both ends, in any order, once; what cannot be connected is said.

use std::time::Duration;

use pleach_transport::{Address, ConnectError, DeviceInfo, Event, LossCause, Secret};

use crate::world::{BackendKind, Submission, World, pairs, signal};

pub(crate) fn every_pair_is_connected_once(backend: BackendKind) {
    let mut world = World::connected(backend, 4);
    world.watch(|_| {});
    for (from, to) in pairs(4) {
        assert_eq!(world.saw(from, &Event::Connected { peer: to }), 1, "{}: {from} to {to}", backend.name);
        assert_eq!(world.losses(from, to), []);
    }
}

pub(crate) fn ends_may_connect_at_different_times_in_either_order(backend: BackendKind) {
    for first in 0..2 {
        let mut world = World::new(backend, 2);
        let addresses = [world.device(0).info().address.clone(), world.device(1).info().address.clone()];
        let second = 1 - first;
        world.device(first).connect(second, &addresses[second as usize]).expect("starts");
        world.watch(|_| {});
        world.device(second).connect(first, &addresses[first as usize]).expect("starts");
        world.until("both to be connected", |world| {
            world.saw(0, &Event::Connected { peer: 1 }) == 1
                && world.saw(1, &Event::Connected { peer: 0 }) == 1
        });
        world.check_pair(0, 1);
    }
}

pub(crate) fn transfers_work_as_soon_as_connected_was_seen(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    let addresses = [world.device(0).info().address.clone(), world.device(1).info().address.clone()];
    world.device(1).connect(0, &addresses[0]).expect("starts");
    world.device(0).connect(1, &addresses[1]).expect("starts");
    // Only this end is known to be connected; the other may still be about to.
    world.until("one end to be connected", |world| world.saw(0, &Event::Connected { peer: 1 }) == 1);
    assert_eq!(world.carry_out(0, 1, Submission::Signal(signal(0, b"early"))), Ok(0));
    world.until("a signal to a rank that connects", |world| world.count(1, 0, 0) == 1);
}

pub(crate) fn a_rank_that_is_no_peer_is_refused(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    let address = world.device(1).info().address.clone();
    for peer in [0, 2, u32::MAX] {
        let refused = world.device(0).connect(peer, &address);
        let expected = matches!(
            refused,
            Err(ConnectError::Peer { peer: who, own: 0, world_size: 2 }) if who == peer
        );
        assert!(expected, "{}: {refused:?}", backend.name);
    }
}

pub(crate) fn a_text_that_is_no_address_is_refused(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    for text in ["", "no address of any fabric", "\u{0}\n", "tcp://", "shm", "256.0.0.1:99999"] {
        let refused = world.device(0).connect(1, &Address(text.to_owned()));
        assert!(
            matches!(refused, Err(ConnectError::Address { .. })),
            "{}: {text:?}: {refused:?}",
            backend.name
        );
    }
    world.connect_all();
}

pub(crate) fn a_peer_that_is_gone_before_it_was_connected_is_not_waited_for_in_vain(backend: BackendKind) {
    let limit = Duration::from_millis(300);
    let mut world = World::with(backend, 2, |config| config.connect_timeout = limit);
    let address = world.device(1).info().address.clone();
    world.kill(1);
    match world.device(0).connect(1, &address) {
        Err(ConnectError::System { peer: 1, .. }) => {}
        Err(error) => panic!("{}: {error}", backend.name),
        Ok(()) => {
            world.until_lost(0, 1);
            assert_eq!(world.saw(0, &Event::Connected { peer: 1 }), 0);
        }
    }
}

pub(crate) fn a_peer_that_ends_while_it_connects_is_lost_once(backend: BackendKind) {
    let limit = Duration::from_millis(500);
    let mut world = World::with(backend, 2, |config| config.connect_timeout = limit);
    let addresses = [world.device(0).info().address.clone(), world.device(1).info().address.clone()];
    world.device(0).connect(1, &addresses[1]).expect("starts");
    world.device(1).connect(0, &addresses[0]).expect("starts");
    world.kill(1);
    let cause = world.until_lost(0, 1);
    world.watch(|world| {
        assert_eq!(world.losses(0, 1), std::slice::from_ref(&cause), "{}: a loss is said once", backend.name)
    });
    assert!(!matches!(cause, LossCause::Protocol(_)), "{}: to end is no offence: {cause}", backend.name);
}

pub(crate) fn ranks_with_the_same_secret_connect(backend: BackendKind) {
    let secret = Secret::new(b"sixteen bytes or more of it");
    let mut world = World::with(backend, 2, |config| config.secret = Some(secret.clone()));
    world.connect_all();
    world.check_pair(0, 1);
}

pub(crate) fn worlds_side_by_side_do_not_meet(backend: BackendKind) {
    let mut one = World::connected(backend, 2);
    let mut other = World::connected(backend, 2);
    one.check_pair(0, 1);
    assert!((0..crate::world::SIGNAL_SLOTS as u16).all(|signal_slot| other.count(1, 0, signal_slot) == 0));
    other.check_pair(0, 1);
}

pub(crate) fn a_device_says_the_same_of_itself_always_and_both_ends_are_reached_alike(backend: BackendKind) {
    let mut world = World::new(backend, 3);
    let said = |world: &mut World, rank| {
        let DeviceInfo {
            rank,
            address,
            fabric,
            registers_freely,
            signal_slots,
            transfer_bytes_max,
            reach,
            ..
        } = world.device(rank).info().clone();
        (rank, address, fabric, registers_freely, signal_slots, transfer_bytes_max, reach)
    };
    let before = [0, 1, 2].map(|rank| said(&mut world, rank));
    for (rank, said) in (0..).zip(&before) {
        assert_eq!((said.0, said.6.len()), (rank, 3), "{}: it knows who it is", backend.name);
    }
    for (one, other) in [(0, 1), (0, 2), (1, 2)] {
        let (there, back) = (before[one].6[other], before[other].6[one]);
        assert_eq!(there, back, "{}: ranks {one} and {other} reach each other alike", backend.name);
    }
    world.connect_all();
    world.device(0).sever(1);
    world.until("the peer to be severed", |world| world.saw(0, &Event::Severed { peer: 1 }) == 1);
    world.kill(2);
    world.until_lost(0, 2);
    assert_eq!(said(&mut world, 0), before[0], "{}", backend.name);
}
