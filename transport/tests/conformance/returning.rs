//! Line 16: a rank that is free again is taken by another process, and nothing late of the former
//! one is taken for its successor's.

use pleach_transport::device::ProtocolViolation;
use pleach_transport::{
    ConnectError, Event, Flush, LossCause, MapError, Meeting, PostError, Rank, Signals, SubmitError,
    Transfer, TransferError, TransferId, Urgency, clock,
};

use crate::fence::{check_fenced, hammer};
use crate::keys::accesses;
use crate::mappings::map;
use crate::world::{
    BackendKind, SIGNAL_SLOTS, Submission, World, assert_bytes, noise, put, signal, skip, skip_part,
};

/// The slot of the signals of `hammer` is another one.
const SIGNAL_SLOT: u16 = 4;
const LEN: usize = 100_000;

/// Waits until a rank has seen an event so many times.
fn until_saw(world: &mut World, rank: Rank, event: &Event, times: usize) {
    world.until("an end", |world| world.saw(rank, event) == times);
}

fn sever(world: &mut World, rank: Rank, peer: Rank) {
    let times = world.saw(rank, &Event::Severed { peer }) + 1;
    world.device(rank).sever(peer);
    until_saw(world, rank, &Event::Severed { peer }, times);
}

fn counts(signal_slots: &Signals) -> Vec<u64> {
    (0..SIGNAL_SLOTS as u16).map(|signal_slot| signal_slots.count(signal_slot)).collect()
}

/// Shows that a pair carries puts, gets, signals and messages both ways, from the first signal on.
fn check_new_pair(world: &mut World, one: Rank, other: Rank) {
    let backend = world.kind();
    for (from, to) in [(one, other), (other, one)] {
        let bytes = noise(u64::from(from), LEN);
        let (source, target) = (world.region_of(from, &bytes), world.region(to, LEN));
        assert_eq!(world.count(to, from, SIGNAL_SLOT), 0, "{}: signal slots are new", backend.name);
        let ending = world.carry_out(from, to, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)));
        assert_eq!(ending, Ok(0), "{}: {from} to {to}", backend.name);
        world.until("the signal", |world| world.count(to, from, SIGNAL_SLOT) == 1);
        assert_bytes(&target.whole().to_vec(), &bytes, "a put of the successor");
        let back = world.region(from, LEN);
        let get = Transfer::Get { src: target.remote(), dst: back.whole() };
        assert_eq!(world.carry_out(from, to, get), Ok(0), "{}: {from} from {to}", backend.name);
        assert_bytes(&back.whole().to_vec(), &bytes, "a get of the successor");
        world.post(from, to, b"in its place");
        world.until("the message", |world| {
            world.inbox(to).state().messages.last() == Some(&(from, b"in its place".to_vec()))
        });
    }
}

pub(crate) fn a_killed_process_is_replaced_and_others_are_not_touched(backend: BackendKind) {
    const PUTS: usize = 6;
    let mut world = World::connected(backend, 3);
    let long = world.longest(1 << 20);
    let target = world.region_for(0, 2, &vec![0; PUTS * long]);
    let (fenced, source) = (world.region_for(0, 1, &noise(1, LEN)), world.region_of(1, &noise(2, LEN)));
    let first = world.device(0).incarnation(1);
    assert_eq!(first, Some(world.device(1).info().incarnation), "{}", backend.name);
    let put_next = |world: &mut World, number: usize| -> TransferId {
        let bytes = world.region_of(2, &noise(number as u64, long));
        let dst = target.slice(number * long..(number + 1) * long).expect("inside").remote();
        world.submit(2, 0, put(&bytes.whole(), dst, Some(SIGNAL_SLOT)))
    };
    let mut puts = vec![put_next(&mut world, 0)];
    for _ in 0..4 {
        hammer(&mut world, &source, &fenced);
        world.pump();
    }
    puts.push(put_next(&mut world, 1));
    world.post(1, 0, b"last words");
    hammer(&mut world, &source, &fenced);
    drop(source);
    world.kill(1);
    let old_slots = world.signal_slots(0, 1);
    world.until_lost(0, 1);
    world.until_lost(2, 1);
    puts.push(put_next(&mut world, 2));
    sever(&mut world, 0, 1);
    let left = (counts(&old_slots), fenced.whole().to_vec());
    assert!(world.replace(1).is_none(), "it was killed");
    puts.push(put_next(&mut world, 3));
    world.connect_pair([0, 1], [2, 1]);
    puts.push(put_next(&mut world, 4));
    world.connect_pair([1, 2], [1, 2]);
    puts.push(put_next(&mut world, 5));
    let second = world.device(0).incarnation(1);
    assert_eq!(second, Some(world.device(1).info().incarnation), "{}", backend.name);
    assert_ne!(first, second, "{}: another process", backend.name);
    let new_slots = world.signal_slots(0, 1);
    world.watch(|world| {
        assert_eq!(counts(&new_slots), [0; SIGNAL_SLOTS], "{}: no signal is late", world.kind().name);
    });
    check_new_pair(&mut world, 0, 1);
    check_new_pair(&mut world, 2, 1);
    assert!(world.finish_all(2, &puts).iter().all(Result::is_ok), "{}: no put is lost", backend.name);
    world.until("all signals", |world| world.count(0, 2, SIGNAL_SLOT) == PUTS as u64);
    for (number, bytes) in target.whole().to_vec().chunks(long).enumerate() {
        assert_bytes(bytes, &noise(number as u64, long), "a put of a peer that was not touched");
    }
    assert_eq!((counts(&old_slots), fenced.whole().to_vec()), left, "{}: nothing came late", backend.name);
    assert_eq!(world.losses(0, 1).len(), 1, "{}: one loss", backend.name);
    assert_eq!(world.losses(1, 0), [], "{}: the successor lost nobody", backend.name);
}

pub(crate) fn a_process_that_left_is_replaced(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    world.carry_out(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b"first"))).expect("connected");
    world.device(1).leave();
    world.until("the leaving rank to be flushed", |world| world.device(1).flush(Flush::All));
    drop(world.take(1));
    until_saw(&mut world, 0, &Event::Departed { peer: 1 }, 1);
    world.replace(1);
    world.connect_pair([0, 1], [2, 1]);
    check_new_pair(&mut world, 0, 1);
    assert_eq!(world.losses(0, 1), [], "{}: nobody was lost", backend.name);
}

pub(crate) fn a_process_that_comes_before_its_rank_is_free_is_waited_for(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    // The survivor does not look, so that it finds the loss when the successor is there.
    world.set_polled(0, false);
    world.kill(1);
    world.replace(1);
    let addresses = [world.device(0).info().address.clone(), world.device(1).info().address.clone()];
    world.device(1).connect(0, &addresses[0]).expect("starts");
    world.watch(|_| {});
    assert_eq!(world.saw(1, &Event::Connected { peer: 0 }), 0, "{}: nobody asked for it", backend.name);
    assert_eq!(world.losses(1, 0), [], "{}: it is waited for", backend.name);
    world.set_polled(0, true);
    world.until_lost(0, 1);
    world.device(0).connect(1, &addresses[1]).expect("its end was polled");
    world.until_connected([0, 1], [2, 1]);
    check_new_pair(&mut world, 0, 1);
}

pub(crate) fn a_process_that_comes_first_or_last_is_connected(backend: BackendKind) {
    // Also rank 0, which does not dial.
    for gone in 0..2 {
        let stays = 1 - gone;
        for first in 0..2 {
            let mut world = World::connected(backend, 2);
            world.kill(gone);
            world.until_lost(stays, gone);
            world.replace(gone);
            let second = 1 - first;
            let address = world.device(second).info().address.clone();
            world.device(first).connect(second, &address).expect("starts");
            world.watch(|_| {});
            let address = world.device(first).info().address.clone();
            world.device(second).connect(first, &address).expect("starts");
            world.until_connected([stays, gone], [2, 1]);
            check_new_pair(&mut world, stays, gone);
        }
    }
}

pub(crate) fn a_severed_process_does_not_get_its_rank_back(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(1, &noise(1, LEN)), world.region_for(0, 1, &noise(2, LEN)));
    sever(&mut world, 0, 1);
    world.until_lost(1, 0);
    world.start_pair(0, 1);
    world.until("the refusal", |world| world.losses(1, 0).len() == 2);
    let refused = LossCause::Protocol(ProtocolViolation::FormerProcess);
    assert_eq!(world.losses(1, 0)[1], refused, "{}", backend.name);
    world.watch(|world| {
        hammer(world, &source, &target);
        assert_eq!(world.saw(0, &Event::Connected { peer: 1 }), 1, "{}", backend.name);
        assert_eq!(world.losses(0, 1), [], "{}: another one may still come", backend.name);
        assert_eq!(counts(&world.signal_slots(0, 1)), [0; SIGNAL_SLOTS], "{}", backend.name);
    });
    if !backend.live {
        skip_part(backend, "has one device a rank: the severed process ends before the next one comes");
        world.kill(1);
        world.until_lost(0, 1);
    }
    // Another one gets the rank, also while the severed one runs and goes on asking for it.
    let mut severed = world.replace(1);
    let mut events = Vec::with_capacity(16);
    let mut ask = |world: &mut World| {
        let Some(severed) = &mut severed else { return };
        let address = world.device(0).info().address.clone();
        let _ = severed.connect(0, &address);
        let _ = severed.submit(0, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)), TransferId(0));
        severed.poll(clock::now(), &mut events);
        events.clear();
    };
    world.start_pair(1, 0);
    world.until("the other process", |world| {
        ask(world);
        world.saw(0, &Event::Connected { peer: 1 }) == 2 && world.saw(1, &Event::Connected { peer: 0 }) == 1
    });
    let incarnation = world.device(1).info().incarnation;
    assert_eq!(world.device(0).incarnation(1), Some(incarnation), "{}: the other process", backend.name);
    world.watch(&mut ask);
    check_new_pair(&mut world, 0, 1);
    check_fenced(&mut world, &target, ask);
}

pub(crate) fn what_a_former_process_was_given_is_bad_for_its_successor(backend: BackendKind) {
    const KINDS: usize = 5;
    for kind in 0..KINDS {
        let mut world = World::connected(backend, 2);
        let (checks_keys, before) = (world.checks_keys(), noise(kind as u64, 64));
        let given = world.region_for(0, 1, &before);
        let theirs = world.region_of(1, &before);
        let old = theirs.remote();
        world.kill(1);
        drop(theirs);
        world.until_lost(0, 1);
        world.replace(1);
        world.connect_pair([0, 1], [2, 1]);
        if checks_keys {
            for (from, to, bad) in [(1, 0, given.remote()), (0, 1, old)] {
                let mine = world.region_of(from, &noise(99, 64)).whole();
                let access = accesses(bad, &mine).into_iter().nth(kind).expect("it is aligned");
                let what = format!("{}: {access:?}", backend.name);
                let refused = Err(TransferError::Refused { peer: to, key: bad.key });
                assert_eq!(world.carry_out(from, to, access), refused, "{what}");
                world.watch(|world| assert_eq!(world.count(to, from, SIGNAL_SLOT), 0, "{what}"));
                assert_bytes(&given.whole().to_vec(), &before, &what);
                assert_bytes(&mine.to_vec(), &noise(99, 64), "a refused get changes nothing here");
            }
        }
        if world.device(1).info().reach[0].maps {
            for (from, to, bad) in [(1, 0, given.remote()), (0, 1, old)] {
                let refused = world.device(from).map(to, &bad);
                assert!(matches!(refused, Err(MapError::Unknown { .. })), "{}: {refused:?}", backend.name);
            }
        }
        // Its owner still has it, and the successor gets memory of its own.
        let target = world.region(1, 64);
        let used = world.carry_out(0, 1, put(&given.whole(), target.remote(), None));
        assert_eq!(used, Ok(0), "{}", backend.name);
        let new = world.region_for(0, 1, &before);
        let mine = world.region_of(1, &noise(98, 64));
        let ending = world.carry_out(1, 0, put(&mine.whole(), new.remote(), Some(SIGNAL_SLOT)));
        assert_eq!(ending, Ok(0), "{}", backend.name);
        world.until("the signal", |world| world.count(0, 1, SIGNAL_SLOT) == 1);
        assert_bytes(&new.whole().to_vec(), &noise(98, 64), "memory for the successor");
    }
}

pub(crate) fn a_rank_is_not_free_before_its_end_was_polled(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let address = world.device(1).info().address.clone();
    world.device(0).connect(1, &address).expect("it is connected: nothing to do");
    world.device(0).sever(1);
    let refused = world.device(0).connect(1, &address);
    assert!(matches!(refused, Err(ConnectError::NotFree { peer: 1 })), "{}: {refused:?}", backend.name);
    until_saw(&mut world, 0, &Event::Severed { peer: 1 }, 1);
    let refused = world.try_submit(0, 1, Submission::Signal(signal(SIGNAL_SLOT, b"")));
    assert_eq!(refused, Err(SubmitError::Severed { peer: 1 }), "{}", backend.name);
    world.device(0).connect(1, &address).expect("the rank is free");
    let refused = world.try_submit(0, 1, Submission::Signal(signal(SIGNAL_SLOT, b"")));
    assert_eq!(refused, Err(SubmitError::NotConnected { peer: 1 }), "{}", backend.name);
    let refused = world.device(0).post(1, b"", Urgency::Ordinary);
    assert_eq!(refused, Err(PostError::NotConnected { peer: 1 }), "{}", backend.name);
    world.device(0).connect(1, &address).expect("it is connecting: nothing to do");
    assert_eq!(counts(&world.signal_slots(0, 1)), [0; SIGNAL_SLOTS], "{}", backend.name);
}

pub(crate) fn many_processes_have_one_rank_one_after_the_other(backend: BackendKind) {
    const ROUNDS: usize = 6;
    let mut world = World::connected(backend, 3);
    let mut seen = vec![world.device(0).incarnation(1)];
    for round in 0..ROUNDS {
        let (source, target) = (world.region_of(1, &noise(1, LEN)), world.region_for(0, 1, &noise(2, LEN)));
        for _ in 0..3 {
            hammer(&mut world, &source, &target);
            world.pump();
        }
        world.post(1, 0, &[round as u8]);
        match round % 3 {
            0 => {
                world.kill(1);
                until_ended(&mut world, round + 1);
                sever(&mut world, 0, 1);
            }
            1 => {
                world.device(0).sever(1);
                world.device(2).sever(1);
                until_ended(&mut world, round + 1);
                world.kill(1);
            }
            _ => {
                world.device(1).leave();
                world.until("the leaving rank to be flushed", |world| world.device(1).flush(Flush::All));
                drop(world.take(1));
                until_ended(&mut world, round + 1);
            }
        }
        assert!(world.replace(1).is_none());
        world.start_pair(0, 1);
        world.start_pair(1, 2);
        world.until_connected([0, 1], [round + 2, 1]);
        world.until_connected([2, 1], [round + 2, 1]);
        check_new_pair(&mut world, 0, 1);
        let incarnation = world.device(0).incarnation(1);
        assert!(!seen.contains(&incarnation), "{}: another one", backend.name);
        seen.push(incarnation);
        world.check_pair(0, 2);
    }
}

/// Waits until ranks 0 and 2 have seen so many ends of rank 1; one may have severed what it lost.
fn until_ended(world: &mut World, times: usize) {
    for rank in [0, 2] {
        world.until("the end of a process", |world| {
            let mut ends = 0;
            let mut is_up = false;
            for event in world.log(rank) {
                match event {
                    Event::Connected { peer: 1 } => is_up = true,
                    Event::PeerLost { peer: 1, .. }
                    | Event::Departed { peer: 1 }
                    | Event::Severed { peer: 1 } => {
                        ends += usize::from(std::mem::take(&mut is_up));
                    }
                    _ => {}
                }
            }
            ends == times
        });
    }
}

pub(crate) fn severing_takes_back_what_former_processes_could_write(backend: BackendKind) {
    if !backend.live {
        return skip(backend, "has one device a rank: a former process has ended");
    }
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(1, &noise(1, LEN)), world.region(0, LEN));
    let maps = world.device(1).info().reach[0].maps;
    let mapped = maps.then(|| map(&mut world, 1, 0, &target.remote()));
    // It leaves, and goes on running: it may write until the rank is severed.
    world.device(1).leave();
    until_saw(&mut world, 0, &Event::Departed { peer: 1 }, 1);
    let mut former = world.replace(1).expect("it was not ended");
    world.connect_pair([0, 1], [2, 1]);
    sever(&mut world, 0, 1);
    check_fenced(&mut world, &target, |_| {
        if let Some(mapped) = &mapped {
            mapped.store(0, &noise(6, LEN));
        }
        let _ = former.submit(0, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)), TransferId(0));
    });
}

pub(crate) fn devices_of_different_worlds_meet(backend: BackendKind) {
    if !backend.live {
        return skip(backend, "is one world");
    }
    // A server, and two clients that have two peers at most. Each calls itself rank 0.
    let mut world = World::with(backend, 3, |config| {
        config.world_size = if config.rank == 0 { 6 } else { 3 };
        config.rank = 0;
    });
    let address = world.device(0).info().address.clone();
    let mut connected = 0;
    for (client, at_server, server) in [(1, 1, 1), (2, 4, 2)] {
        let dial = Meeting::Dial { address: &address, own: at_server };
        match world.device(client).meet(server, dial) {
            Ok(()) => {}
            Err(ConnectError::OtherWorld { .. }) => return skip(backend, "joins ranks of one world"),
            Err(error) => panic!("{}: {error}", backend.name),
        }
        // Also when the client comes first.
        if client == 2 {
            world.watch(|_| {});
        }
        world.device(0).meet(at_server, Meeting::Await).expect("a free rank");
        world.until("the client", |world| {
            world.saw(0, &Event::Connected { peer: at_server }) == 1
                && world.saw(client, &Event::Connected { peer: server }) == 1
        });
        connected += 1;
        let known = world.device(0).incarnation(at_server);
        assert_eq!(known, Some(world.device(client).info().incarnation), "{}", backend.name);
        let memory = world.backend().memory(64);
        let given = world.device(0).register_for(at_server, memory).expect("registers");
        given.whole().store(&[0; 64]);
        let memory = world.backend().memory(64);
        let mine = world.device(client).register(memory).expect("registers");
        mine.whole().store(&noise(u64::from(client), 64));
        world.device(client).post(server, b"hello", Urgency::Ordinary).expect("connected");
        world.until("the message", |world| {
            world.inbox(0).state().messages.last() == Some(&(at_server, b"hello".to_vec()))
        });
        let transfer = put(&mine.whole(), given.remote(), Some(SIGNAL_SLOT));
        let id = world.try_submit(client, server, transfer).expect("accepted");
        assert_eq!(world.finish(client, id), Ok(0), "{}: memory for this client", backend.name);
        world.until("the signal", |world| world.count(0, at_server, SIGNAL_SLOT) == 1);
        assert_bytes(&given.whole().to_vec(), &noise(u64::from(client), 64), "a put of a client");
        let back = Submission::Signal(signal(SIGNAL_SLOT, b"back"));
        let id = world.try_submit(0, at_server, back).expect("accepted");
        assert_eq!(world.finish(0, id), Ok(0));
        world.until("the answer", |world| world.count(client, server, SIGNAL_SLOT) == 1);
    }
    assert_eq!(connected, 2);
    // A client that ends leaves its rank to another one, who calls the server otherwise.
    world.kill(2);
    world.until_lost(0, 4);
    world.replace_as(2, |config| (config.rank, config.world_size) = (0, 3));
    world.device(0).meet(4, Meeting::Await).expect("the rank is free");
    world.device(2).meet(2, Meeting::Dial { address: &address, own: 4 }).expect("starts");
    world.until("the next client", |world| world.saw(0, &Event::Connected { peer: 4 }) == 2);
    assert_eq!(world.losses(0, 1), [], "{}: the other client stays", backend.name);
}
