//! Line 12: a peer's memory at an address here obeys the same lines.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pleach_transport::{Event, MapError, Mapped, Rank, Region, RegionKey, RemoteSlice, clock};

use crate::world::{
    BackendKind, PATIENCE, SIGNAL_SLOTS, Submission, World, assert_bytes, noise, put, signal, skip,
};

const SIGNAL_SLOT: u16 = 8;
const LEN: usize = 50_000;
const NO_MAPS: &str = "maps nothing";

pub(crate) fn maps(world: &mut World) -> bool {
    let maps = world.device(0).info().reach[1].maps;
    if !maps {
        skip(world.kind(), NO_MAPS);
    }
    maps
}

pub(crate) fn map(world: &mut World, rank: Rank, peer: Rank, slice: &RemoteSlice) -> Mapped {
    let mut mapped = None;
    world.until("a region that was announced to be mapped", |world| {
        match world.device(rank).map(peer, slice) {
            Ok(mapping) => mapped = Some(mapping),
            Err(MapError::Unknown { .. }) => {}
            Err(error) => panic!("{}: {error}", world.kind().name),
        }
        mapped.is_some()
    });
    mapped.expect("`until` has returned")
}

fn loaded(mapped: &Mapped) -> Vec<u8> {
    let mut bytes = vec![0; mapped.len()];
    mapped.load(0, &mut bytes);
    bytes
}

pub(crate) fn a_fabric_that_does_not_map_says_so(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if world.device(0).info().reach[1].maps {
        return skip(backend, "maps; that is tested by the others");
    }
    let theirs = world.region(1, LEN).remote();
    let refused = world.device(0).map(1, &theirs);
    assert!(matches!(refused, Err(MapError::Unsupported { .. })), "{}: {refused:?}", backend.name);
}

pub(crate) fn a_mapping_shows_what_the_owner_wrote(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if !maps(&mut world) {
        return;
    }
    let theirs = world.region_of(1, &noise(1, LEN));
    let whole = map(&mut world, 0, 1, &theirs.remote());
    assert_bytes(&loaded(&whole), &noise(1, LEN), "the whole region");
    for (start, end) in [(1, 2), (4095, 4097), (333, LEN), (LEN, LEN)] {
        let part = theirs.slice(start..end).expect("inside").remote();
        let mapped = map(&mut world, 0, 1, &part);
        assert_bytes(&loaded(&mapped), &noise(1, LEN)[start..end], "a part of the region");
    }
    theirs.whole().store(&noise(2, LEN));
    assert_eq!(world.carry_out(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b"written"))), Ok(0));
    world.until("the owner's signal", |world| world.count(0, 1, SIGNAL_SLOT) == 1);
    assert_bytes(&loaded(&whole), &noise(2, LEN), "what the owner wrote later");
}

pub(crate) fn what_is_written_through_a_mapping_is_there_when_a_later_signal_is(backend: BackendKind) {
    const ROUNDS: u64 = 100;
    let mut world = World::connected(backend, 2);
    if !maps(&mut world) {
        return;
    }
    let theirs = world.region(1, LEN);
    let mapped = map(&mut world, 0, 1, &theirs.remote());
    let (signal_slots, slice) = (world.signal_slots(1, 0), theirs.whole());
    let checked = Arc::new(AtomicU64::new(0));
    let says = Arc::clone(&checked);
    let reader = std::thread::spawn(move || {
        let deadline = clock::now() + PATIENCE;
        for round in 1..=ROUNDS {
            while signal_slots.count(SIGNAL_SLOT) < round {
                assert!(clock::now() < deadline, "no signal {round}");
                std::thread::yield_now();
            }
            assert_bytes(&slice.to_vec(), &noise(round, LEN), &format!("round {round}"));
            says.store(round, Ordering::Release); // Pairs with the acquire below.
        }
    });
    for round in 1..=ROUNDS {
        mapped.store(0, &noise(round, LEN));
        world.submit(0, 1, Submission::Signal(signal(SIGNAL_SLOT, b"")));
        world.until("the reader to have checked", |_| {
            checked.load(Ordering::Acquire) >= round || reader.is_finished()
        });
    }
    reader.join().expect("the reader saw every write whole");
}

pub(crate) fn mappings_and_puts_see_the_same_memory(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    if !maps(&mut world) {
        return;
    }
    let theirs = world.region(1, LEN);
    let source = world.region_of(2, &noise(3, LEN));
    let mapped = map(&mut world, 0, 1, &theirs.remote());
    world.submit(2, 1, put(&source.whole(), theirs.remote(), Some(SIGNAL_SLOT)));
    world.until("the signal of a put", |world| world.count(1, 2, SIGNAL_SLOT) == 1);
    assert_eq!(world.carry_out(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b""))), Ok(0));
    world.until("the owner's signal", |world| world.count(0, 1, SIGNAL_SLOT) == 1);
    assert_bytes(&loaded(&mapped), &noise(3, LEN), "a third rank's put, seen through a mapping");
}

pub(crate) fn what_is_not_there_is_not_mapped(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if !maps(&mut world) {
        return;
    }
    let theirs = world.region(1, LEN);
    map(&mut world, 0, 1, &theirs.remote());
    let key = theirs.key();
    for unknown in [RegionKey(key.0 ^ 0xFFFF), RegionKey(key.0.wrapping_add(1)), RegionKey::NONE] {
        let refused = world.device(0).map(1, &RemoteSlice { key: unknown, offset: 0, len: 8 });
        let expected = matches!(&refused, Err(MapError::Unknown { peer: 1, key }) if *key == unknown);
        assert!(expected, "{}: {refused:?}", backend.name);
    }
    let len = LEN as u64;
    for (offset, length) in [(0, len + 1), (len, 1), (len - 7, 8), (u64::MAX, 2), (1 << 63, 1 << 63)] {
        let refused = world.device(0).map(1, &RemoteSlice { key, offset, len: length });
        let expected = matches!(refused, Err(MapError::OutOfBounds { peer: 1, .. }));
        assert!(expected, "{}: {offset} + {length}: {refused:?}", backend.name);
    }
    drop(theirs);
    world.announce(1);
    let refused = world.device(0).map(1, &RemoteSlice { key, offset: 0, len: 8 });
    assert!(
        matches!(refused, Err(MapError::Unknown { .. })),
        "{}: a dropped region: {refused:?}",
        backend.name
    );
}

/// Shows that what is written through a mapping of rank 1 does not reach rank 0's region.
fn check_unreachable(world: &mut World, mapped: &Mapped, region: &Region) {
    let left = region.whole().to_vec();
    let signal_slots = world.signal_slots(0, 1);
    let counts =
        || (0..SIGNAL_SLOTS as u16).map(|signal_slot| signal_slots.count(signal_slot)).collect::<Vec<_>>();
    let noticed = counts();
    world.watch(|world| {
        mapped.store(0, &noise(20, LEN));
        // As who tells of what was written through a mapping. Refused, or accepted and lost.
        let _ = world.try_submit(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b"written")));
    });
    assert_bytes(&region.whole().to_vec(), &left, "what was there at the fence");
    assert_eq!(counts(), noticed, "{}: a signal slot changed after the fence", world.kind().name);
    region.whole().store(&noise(21, LEN));
    world.watch(|_| mapped.store(0, &noise(22, LEN)));
    assert_bytes(&region.whole().to_vec(), &noise(21, LEN), "what was written after the fence");
}

pub(crate) fn a_severed_peer_writes_through_its_mapping_in_vain(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if !maps(&mut world) {
        return;
    }
    let region = world.region(0, LEN);
    let mapped = map(&mut world, 1, 0, &region.remote());
    mapped.store(0, &noise(9, LEN));
    assert_eq!(world.carry_out(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b""))), Ok(0));
    world.until("the signal", |world| world.count(0, 1, SIGNAL_SLOT) == 1);
    assert_bytes(&region.whole().to_vec(), &noise(9, LEN), "before the fence it reaches");
    world.set_polled(1, false);
    world.device(0).sever(1);
    world.until("the fence", |world| {
        mapped.store(0, &noise(9, LEN));
        world.saw(0, &Event::Severed { peer: 1 }) > 0
    });
    assert_bytes(&region.whole().to_vec(), &noise(9, LEN), "severing keeps the bytes");
    check_unreachable(&mut world, &mapped, &region);
    world.set_polled(1, true);
    check_unreachable(&mut world, &mapped, &region);
}

pub(crate) fn a_reader_is_told_when_the_owner_has_taken_the_bytes_away(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    if !maps(&mut world) {
        return;
    }
    let theirs = world.region_of(1, &noise(40, LEN));
    let mapped = map(&mut world, 0, 1, &theirs.remote());
    assert_bytes(&loaded(&mapped), &noise(40, LEN), "before anybody was severed");
    assert!(mapped.is_shared(), "{}: the owner shares it", backend.name);
    // Not the reader, but the memory is taken back from all.
    world.device(1).sever(2);
    let check = |_: &mut World| {
        let seen = loaded(&mapped);
        if mapped.is_shared() {
            assert_bytes(&seen, &noise(40, LEN), "the owner is said to share it still");
        }
    };
    world.until("the fence", |world| {
        check(world);
        world.saw(1, &Event::Severed { peer: 2 }) > 0
    });
    world.watch(check);
    assert_bytes(&theirs.whole().to_vec(), &noise(40, LEN), "the owner keeps them");
}

pub(crate) fn a_mapping_outlives_its_owner(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if !maps(&mut world) {
        return;
    }
    let theirs = world.region_of(1, &noise(30, LEN));
    let (kept, mapped) = (theirs.remote(), map(&mut world, 0, 1, &theirs.remote()));
    drop(theirs);
    world.announce(1);
    assert_bytes(&loaded(&mapped), &noise(30, LEN), "the region was dropped");
    world.kill(1);
    world.until_lost(0, 1);
    assert_bytes(&loaded(&mapped), &noise(30, LEN), "its owner was lost");
    mapped.store(0, &noise(31, LEN));
    assert_bytes(&loaded(&mapped), &noise(31, LEN), "it stays writable");
    let refused = world.device(0).map(1, &kept);
    assert!(matches!(refused, Err(MapError::Disconnected { peer: 1 })), "{}: {refused:?}", backend.name);
}
