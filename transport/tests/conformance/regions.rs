//! Line 7: a transfer in flight holds its slice, and nothing holds a region longer.

use std::sync::Arc;

use pleach_transport::{Transfer, TransferError};

use crate::world::{BackendKind, World, assert_bytes, noise, put};

const SIGNAL_SLOT: u16 = 2;
const LEN: usize = 70_000;

pub(crate) fn a_region_dropped_while_its_puts_are_under_way_is_still_read(backend: BackendKind) {
    const PUTS: usize = 12;
    let mut world = World::connected(backend, 2);
    let target = world.region(1, PUTS * LEN);
    let mut watched = Vec::new();
    let mut ids = Vec::new();
    for number in 0..PUTS {
        let memory = world.backend().memory(LEN);
        watched.push(Arc::downgrade(&memory));
        let source = world.device(0).register(memory).expect("registers");
        source.whole().store(&noise(number as u64, LEN));
        let dst = target.slice(number * LEN..(number + 1) * LEN).expect("inside").remote();
        ids.push(world.submit(0, 1, put(&source.whole(), dst, Some(SIGNAL_SLOT))));
    }
    world.until("all signals", |world| world.count(1, 0, SIGNAL_SLOT) == PUTS as u64);
    for (number, bytes) in target.whole().to_vec().chunks(LEN).enumerate() {
        assert_bytes(bytes, &noise(number as u64, LEN), "a put of a dropped region");
    }
    assert!(world.finish_all(0, &ids).iter().all(Result::is_ok), "{}", backend.name);
    world.until("dropped regions to release their memory", |_| {
        watched.iter().all(|memory| memory.strong_count() == 0)
    });
}

pub(crate) fn a_region_dropped_while_a_get_fills_it_stays_until_the_end(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let source = world.region_of(1, &noise(5, LEN));
    for _ in 0..8 {
        let memory = world.backend().memory(LEN);
        let (watched, kept) = (Arc::downgrade(&memory), Arc::clone(&memory));
        let target = world.device(0).register(memory).expect("registers");
        let id = world.submit(0, 1, Transfer::Get { src: source.remote(), dst: target.whole() });
        drop(target);
        assert_eq!(world.finish(0, id), Ok(0));
        let again = world.register(0, kept);
        assert_bytes(&again.whole().to_vec(), &noise(5, LEN), "a get into a dropped region");
        drop(again);
        world.until("the memory to be released", |_| watched.strong_count() == 0);
    }
}

pub(crate) fn a_target_dropped_while_puts_to_it_are_under_way_harms_nobody(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let checks_keys = world.checks_keys();
    let source = world.region_of(0, &noise(6, LEN));
    let target = world.region(1, LEN);
    let memory = Arc::downgrade(target.memory());
    let key = target.key();
    let ids: Vec<_> =
        (0..6).map(|_| world.submit(0, 1, put(&source.whole(), target.remote(), None))).collect();
    drop(target);
    let refused = Err(TransferError::Refused { peer: 1, key });
    for ending in world.finish_all(0, &ids) {
        assert!(!checks_keys || ending.is_ok() || ending == refused, "{}: {ending:?}", backend.name);
    }
    world.until("the dropped target to release its memory", |_| memory.strong_count() == 0);
    world.check_pair(0, 2);
    world.check_pair(1, 2);
    if checks_keys {
        world.check_pair(0, 1);
    }
}

pub(crate) fn memory_may_be_registered_twice_and_again(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let source = world.region_of(0, &noise(8, 100));
    let memory = world.backend().memory(100);
    let (one, other) = (world.register(1, Arc::clone(&memory)), world.register(1, Arc::clone(&memory)));
    drop(one);
    world.announce(1);
    assert_eq!(world.carry_out(0, 1, put(&source.whole(), other.remote(), Some(SIGNAL_SLOT))), Ok(0));
    world.until("the signal", |world| world.count(1, 0, SIGNAL_SLOT) == 1);
    assert_bytes(&other.whole().to_vec(), &noise(8, 100), "the other registration still works");
}

pub(crate) fn registrations_are_counted(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let counted = |world: &mut World| world.device(0).info().setup.registered();
    let memory = world.backend().memory(5000);
    let one = world.register(0, Arc::clone(&memory));
    assert_eq!(counted(&mut world), 1, "{}", backend.name);
    // Where registering is expensive, this is another handle of the region that exists.
    let again = world.register(0, Arc::clone(&memory));
    let regions = if one.key() == again.key() { 1 } else { 2 };
    assert_eq!(counted(&mut world), regions, "{}", backend.name);
    let for_one = world.region_for(0, 1, &[1; 100]);
    assert_eq!(counted(&mut world), regions + 1, "{}", backend.name);
    world.device(0).register_for(0, memory).expect_err("it is no peer of its own");
    drop((one, again, for_one));
    world.announce(0);
    assert_eq!(counted(&mut world), regions + 1, "{}: neither refused nor dropped ones", backend.name);
}

pub(crate) fn a_region_registered_before_connecting_is_reached(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    let target = world.region(1, 1000);
    let source = world.region_of(0, &noise(9, 1000));
    world.connect_all();
    world.announce(1);
    assert_eq!(world.carry_out(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT))), Ok(0));
    world.until("the signal", |world| world.count(1, 0, SIGNAL_SLOT) == 1);
    assert_bytes(&target.whole().to_vec(), &noise(9, 1000), "a put to an early region");
}

pub(crate) fn many_regions_come_and_go(backend: BackendKind) {
    const ROUNDS: u64 = 60;
    let mut world = World::connected(backend, 2);
    let mut keys = std::collections::BTreeSet::new();
    for round in 0..ROUNDS {
        let len = 1 + (round as usize * 977) % 9000;
        let source = world.region_of(0, &noise(round, len));
        let target = world.region(1, len);
        assert!(keys.insert(source.key()) && keys.insert(target.key()), "{}: a key came twice", backend.name);
        world.submit(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)));
        world.until("the signal", |world| world.count(1, 0, SIGNAL_SLOT) == round + 1);
        assert_bytes(&target.whole().to_vec(), &noise(round, len), "a put between fresh regions");
    }
}
