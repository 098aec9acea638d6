//! Line 15: memory for one peer is that peer's alone, and severing one peer takes nothing from
//! other pairs.

use pleach_transport::{Event, MapError, RegisterError, Transfer, TransferError, TransferId};

use crate::fence::{check_fenced, hammer, until_severed};
use crate::keys::accesses;
use crate::mappings::map;
use crate::world::{BackendKind, SIGNAL_SLOTS, Submission, World, assert_bytes, noise, put, signal};

/// The slot of the signals of `hammer` is another one.
const SIGNAL_SLOT: u16 = 4;
const LEN: usize = 100_000;

pub(crate) fn memory_for_one_peer_is_that_peers_alone(backend: BackendKind) {
    const KINDS: usize = 5;
    for kind in 0..KINDS {
        let mut world = World::connected(backend, 3);
        let (checks_keys, before) = (world.checks_keys(), noise(kind as u64, 64));
        let theirs = world.region_for(1, 0, &before);
        let access = |world: &mut World, rank| {
            let mine = world.region_of(rank, &noise(99, 64)).whole();
            (accesses(theirs.remote(), &mine).into_iter().nth(kind).expect("it is aligned"), mine)
        };
        if checks_keys {
            let (others, mine) = access(&mut world, 2);
            let what = format!("{}: {others:?}", backend.name);
            let refused = Err(TransferError::Refused { peer: 1, key: theirs.key() });
            assert_eq!(world.carry_out(2, 1, others), refused, "{what}");
            world.watch(|world| assert_eq!(world.count(1, 2, SIGNAL_SLOT), 0, "{what}"));
            assert_bytes(&theirs.whole().to_vec(), &before, &what);
            assert_bytes(&mine.to_vec(), &noise(99, 64), "a refused get changes nothing here");
            world.check_pair(1, 2);
        }
        let (own, mine) = access(&mut world, 0);
        let (is_get, is_signalled) =
            (matches!(own, Transfer::Get { .. }), matches!(own, Transfer::Put { signal: Some(_), .. }));
        assert!(world.carry_out(0, 1, own).is_ok(), "{}: its peer has access", backend.name);
        if is_get {
            assert_bytes(&mine.to_vec(), &before, "what its peer got");
        }
        if is_signalled {
            world.until("the signal", |world| world.count(1, 0, SIGNAL_SLOT) == 1);
            assert_bytes(&theirs.whole().to_vec(), &noise(99, 64), "what its peer put");
        }
        if world.device(0).info().reach[1].maps {
            map(&mut world, 0, 1, &theirs.remote());
        }
        if world.device(2).info().reach[1].maps {
            let refused = world.device(2).map(1, &theirs.remote());
            assert!(matches!(refused, Err(MapError::Unknown { .. })), "{}: {refused:?}", backend.name);
            let refused = world.device(2).map_read_only(1, &theirs.remote());
            assert!(matches!(refused, Err(MapError::Unknown { .. })), "{}: {refused:?}", backend.name);
        }
    }
}

pub(crate) fn memory_is_registered_for_a_peer_that_exists(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    for peer in [0, 2, u32::MAX] {
        let memory = world.backend().memory(64);
        let refused = world.device(0).register_for(peer, memory).map(|_| ());
        let expected = matches!(refused, Err(RegisterError::Peer { peer: of, own: 0 }) if of == peer);
        assert!(expected, "{}: {refused:?}", backend.name);
    }
}

pub(crate) fn a_key_is_for_its_own_peer_also_where_it_follows_another(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let checks_keys = world.checks_keys();
    for round in 0..10 {
        // A table of regions invites the second one to take the place of the first.
        let memory = [world.backend().memory(64), world.backend().memory(64)];
        drop(world.device(1).register_for(0, memory[0].clone()).expect("registers"));
        let theirs = world.device(1).register_for(2, memory[1].clone()).expect("registers");
        world.announce(1);
        let [mine, of_two] = [0, 2].map(|rank| world.region_of(rank, &noise(round, 64)));
        if checks_keys {
            let ending = world.carry_out(0, 1, put(&mine.whole(), theirs.remote(), None));
            assert_eq!(
                ending,
                Err(TransferError::Refused { peer: 1, key: theirs.key() }),
                "{}",
                backend.name
            );
        }
        let ending = world.carry_out(2, 1, put(&of_two.whole(), theirs.remote(), Some(SIGNAL_SLOT)));
        assert_eq!(ending, Ok(0), "{}", backend.name);
        world.until("the signal", |world| world.count(1, 2, SIGNAL_SLOT) == round + 1);
        assert_bytes(&theirs.whole().to_vec(), &noise(round, 64), "what its peer put");
    }
}

pub(crate) fn severing_one_peer_leaves_the_memory_of_others(backend: BackendKind) {
    const PUTS: usize = 6;
    let mut world = World::connected(backend, 3);
    let long = world.longest(1 << 20);
    let target = world.region_for(0, 2, &vec![0; PUTS * long]);
    let (fenced, source) = (world.region_for(0, 1, &noise(1, LEN)), world.region_of(1, &noise(2, LEN)));
    let maps = world.device(2).info().reach[0].maps;
    let mapped = maps.then(|| map(&mut world, 2, 0, &target.remote()));
    for _ in 0..4 {
        hammer(&mut world, &source, &fenced);
        world.pump();
    }
    // Under way at the fence, and more of them after it.
    let mut puts = Vec::new();
    let put_next = |world: &mut World, number: usize| -> TransferId {
        let bytes = world.region_of(2, &noise(number as u64, long));
        let dst = target.slice(number * long..(number + 1) * long).expect("inside").remote();
        world.submit(2, 0, put(&bytes.whole(), dst, Some(SIGNAL_SLOT)))
    };
    for number in 0..PUTS / 2 {
        let id = put_next(&mut world, number);
        puts.push(id);
    }
    world.device(0).sever(1);
    hammer(&mut world, &source, &fenced);
    until_severed(&mut world);
    for number in PUTS / 2..PUTS {
        let id = put_next(&mut world, number);
        puts.push(id);
    }
    assert!(world.finish_all(2, &puts).iter().all(Result::is_ok), "{}: no put is lost", backend.name);
    world.until("all signals", |world| world.count(0, 2, SIGNAL_SLOT) == PUTS as u64);
    for (number, bytes) in target.whole().to_vec().chunks(long).enumerate() {
        assert_bytes(bytes, &noise(number as u64, long), "a put of a peer that was not severed");
    }
    let here = world.region(2, long);
    let src = target.slice(0..long).expect("inside").remote();
    assert_eq!(world.carry_out(2, 0, Transfer::Get { src, dst: here.whole() }), Ok(0), "{}", backend.name);
    assert_bytes(&here.whole().to_vec(), &noise(0, long), "a get after the fence");
    if let Some(mapped) = mapped {
        assert!(mapped.is_shared(), "{}: what was mapped stays so", backend.name);
        mapped.store(0, &noise(50, long));
        assert_eq!(world.carry_out(2, 0, Submission::Signal(signal(SIGNAL_SLOT, b""))), Ok(0));
        world.until("the signal", |world| world.count(0, 2, SIGNAL_SLOT) > PUTS as u64);
        assert_bytes(&target.whole().to_vec()[..long], &noise(50, long), "a write through a mapping");
    }
    check_fenced(&mut world, &fenced, |world| hammer(world, &source, &fenced));
    world.check_pair(0, 2);
}

pub(crate) fn severing_a_peer_that_never_came_leaves_all_memory(backend: BackendKind) {
    let mut world = World::new(backend, 3);
    let target = world.region(0, LEN);
    for (from, to) in [(0, 2), (2, 0)] {
        let address = world.device(to).info().address.clone();
        world.device(from).connect(to, &address).expect("connecting starts");
    }
    world.until("one pair to be connected", |world| {
        world.saw(0, &Event::Connected { peer: 2 }) > 0 && world.saw(2, &Event::Connected { peer: 0 }) > 0
    });
    world.announce(0);
    world.device(0).sever(1);
    until_severed(&mut world);
    let source = world.region_of(2, &noise(3, LEN));
    assert_eq!(world.carry_out(2, 0, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT))), Ok(0));
    world.until("the signal", |world| world.count(0, 2, SIGNAL_SLOT) == 1);
    assert_bytes(&target.whole().to_vec(), &noise(3, LEN), "a region for all peers");
}

pub(crate) fn memory_for_a_severed_peer_is_fenced(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let (target, source) = (world.region_for(0, 1, &noise(4, LEN)), world.region_of(1, &noise(5, LEN)));
    let maps = world.device(1).info().reach[0].maps;
    let mapped = maps.then(|| map(&mut world, 1, 0, &target.remote()));
    let attack = |world: &mut World| {
        hammer(world, &source, &target);
        if let Some(mapped) = &mapped {
            mapped.store(0, &noise(6, LEN));
        }
    };
    for _ in 0..4 {
        attack(&mut world);
        world.pump();
    }
    world.device(0).sever(1);
    world.until("the fence", |world| {
        attack(world);
        world.saw(0, &Event::Severed { peer: 1 }) > 0
    });
    check_fenced(&mut world, &target, attack);
    const { assert!(SIGNAL_SLOT < SIGNAL_SLOTS as u16) };
}
