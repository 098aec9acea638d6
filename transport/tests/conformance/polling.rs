//! `poll` never grows the vector of events, loses no event when the vector is full, and keeps the
//! events that are in it. (All polls of this suite also assert that the vector does not grow.)

use pleach_transport::{Event, Submitted, TransferId};

use crate::world::{BackendKind, World, assert_bytes, noise, put, skip};

const SIGNAL_SLOT: u16 = 10;

pub(crate) fn room_for_one_event_is_enough(backend: BackendKind) {
    const PUTS: usize = 100;
    const LEN: usize = 2000;
    let mut world = World::new(backend, 3);
    world.set_event_capacity(1);
    world.connect_all();
    let (source, target) = (world.region_of(0, &noise(1, LEN)), world.region(1, LEN));
    let ids: Vec<_> = (0..PUTS)
        .map(|_| world.submit(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT))))
        .collect();
    assert!(world.finish_all(0, &ids).iter().all(Result::is_ok), "{}", backend.name);
    world.until("all signals", |world| world.count(1, 0, SIGNAL_SLOT) == PUTS as u64);
    assert_bytes(&target.whole().to_vec(), &noise(1, LEN), "the last put");
    world.kill(1);
    world.until_lost(0, 1);
    world.until_lost(2, 1);
}

pub(crate) fn nothing_is_lost_for_want_of_room(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region(0, backend.long_bytes), world.region(1, backend.long_bytes));
    let ids: Vec<_> = (0..4)
        .filter_map(|_| world.try_submit(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT))).ok())
        .collect();
    if ids.iter().any(|id| !world.endings(0, *id).is_empty()) {
        return skip(backend, "every put ends at once");
    }
    world.set_event_capacity(0);
    world.watch(|_| {});
    assert!(ids.iter().all(|id| world.endings(0, *id).is_empty()), "{}: there was no room", backend.name);
    world.set_event_capacity(2);
    assert!(world.finish_all(0, &ids).iter().all(Result::is_ok), "{}", backend.name);
}

pub(crate) fn what_is_in_the_vector_stays(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let kept = Event::Done { id: TransferId(u64::MAX), result: Ok(42) };
    let mut events = Vec::with_capacity(2);
    events.push(kept.clone());
    let capacity = events.capacity();
    let id = TransferId(5);
    let (source, target) = (world.region(0, backend.long_bytes), world.region(1, backend.long_bytes));
    let long = put(&source.whole(), target.remote(), Some(SIGNAL_SLOT));
    if world.device(0).submit(1, long, id).expect("an idle queue takes a transfer") != Submitted::UnderWay {
        return skip(backend, "every put ends at once");
    }
    world.set_polled(0, false);
    world.until("an event behind what was there", |world| {
        let now = world.backend().tick();
        world.device(0).poll(now, &mut events);
        events.len() > 1
    });
    assert_eq!(events, [kept, Event::Done { id, result: Ok(0) }]);
    assert_eq!(events.capacity(), capacity);
}
