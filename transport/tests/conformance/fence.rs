//! Line 9: after `Severed` that peer changes no byte here, whatever it does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pleach_transport::{
    AtomicOp, Event, PostError, Region, SubmitError, Transfer, TransferError, TransferId, Urgency, clock,
};

use crate::world::{
    BackendKind, PATIENCE, SIGNAL_SLOTS, Submission, World, assert_bytes, noise, put, signal, skip, skip_part,
};

const SIGNAL_SLOT: u16 = 1;
const LEN: usize = 100_000;

/// Lets rank 1 write to rank 0 as much as its queue takes.
pub(crate) fn hammer(world: &mut World, source: &Region, target: &Region) {
    const WRITES: usize = 8;
    let word = target.slice(0..8).expect("inside").remote();
    for number in 0..WRITES {
        let transfer = match number % 3 {
            0 => put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)),
            1 => {
                let part = 0..LEN / 3;
                let src = source.slice(part.clone()).expect("inside");
                put(&src, target.slice(part).expect("inside").remote(), None)
            }
            _ => Transfer::Atomic { word, op: AtomicOp::Add(1) },
        };
        // Whether it is refused, or accepted and lost, is the severed peer's affair.
        let _ = world.try_submit(1, 0, transfer);
    }
}

pub(crate) fn until_severed(world: &mut World) {
    world.until("the fence", |world| world.saw(0, &Event::Severed { peer: 1 }) > 0);
}

/// Lets rank 1 signal rank 0 in every signal slot.
fn signal_all(world: &mut World) {
    for signal_slot in 0..SIGNAL_SLOTS as u16 {
        // Refused, or accepted and lost, as with `hammer`.
        let _ = world.try_submit(1, 0, Submission::Signal(signal(signal_slot, b"too late")));
    }
}

/// Counts and payloads of all the signal slots that rank 0 keeps for rank 1.
fn signal_slots_of_the_peer(world: &mut World) -> Vec<(u64, Vec<u8>)> {
    let signal_slots = world.signal_slots(0, 1);
    (0..SIGNAL_SLOTS as u16)
        .map(|signal_slot| (signal_slots.count(signal_slot), signal_slots.payload(signal_slot).to_vec()))
        .collect()
}

pub(crate) fn the_signal_slots_of_a_severed_peer_change_no_more(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    for _ in 0..10 {
        signal_all(&mut world);
        world.pump();
    }
    world.until("signals", |world| world.count(0, 1, SIGNAL_SLOT) > 0);
    world.device(0).sever(1);
    world.until("the fence", |world| {
        signal_all(world);
        world.saw(0, &Event::Severed { peer: 1 }) > 0
    });
    let left = signal_slots_of_the_peer(&mut world);
    world.watch(signal_all);
    world.set_polled(1, false);
    world.watch(|_| {});
    world.set_polled(1, true);
    world.watch(signal_all);
    assert_eq!(
        signal_slots_of_the_peer(&mut world),
        left,
        "{}: a signal slot changed after the fence",
        backend.name
    );
}

/// Shows that the memory is this rank's alone: it keeps what is written here while `peer` does what
/// it likes.
pub(crate) fn check_fenced(world: &mut World, region: &Region, mut peer: impl FnMut(&mut World)) {
    let whole = region.whole();
    let left = whole.to_vec();
    world.watch(&mut peer);
    assert_bytes(&whole.to_vec(), &left, "what was there at the fence");
    let own = noise(77, region.len());
    whole.store(&own);
    world.watch(&mut peer);
    assert_bytes(&whole.to_vec(), &own, "what was written after the fence");
}

pub(crate) fn a_severed_peer_that_keeps_writing_changes_no_byte(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(1, &noise(1, LEN)), world.region(0, LEN));
    for _ in 0..10 {
        hammer(&mut world, &source, &target);
        world.pump();
    }
    world.device(0).sever(1);
    world.until("the fence", |world| {
        hammer(world, &source, &target);
        world.saw(0, &Event::Severed { peer: 1 }) > 0
    });
    check_fenced(&mut world, &target, |world| hammer(world, &source, &target));
    assert_eq!(world.saw(0, &Event::Severed { peer: 1 }), 1, "{}: severed once", backend.name);
}

pub(crate) fn a_peer_that_is_stopped_while_it_is_severed_and_continued_later_changes_no_byte(
    backend: BackendKind,
) {
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(1, &noise(2, LEN)), world.region(0, LEN));
    hammer(&mut world, &source, &target);
    world.pump();
    hammer(&mut world, &source, &target);
    world.set_polled(1, false);
    world.device(0).sever(1);
    until_severed(&mut world);
    check_fenced(&mut world, &target, |_| {});
    world.set_polled(1, true);
    check_fenced(&mut world, &target, |world| hammer(world, &source, &target));
}

pub(crate) fn a_peer_on_another_thread_changes_no_byte_after_the_fence(backend: BackendKind) {
    if !backend.live {
        return skip(backend, "runs on one thread");
    }
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(1, &noise(3, LEN)), world.region(0, LEN));
    let mut device = world.take(1);
    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, src, dst) = (Arc::clone(&stop), source.whole(), target.remote());
    let writer = std::thread::spawn(move || {
        let mut events = Vec::with_capacity(8);
        let deadline = clock::now() + PATIENCE;
        // Relaxed: says only that the test is over.
        while !stopped.load(Ordering::Relaxed) && clock::now() < deadline {
            let _ = device.submit(0, put(&src, dst, Some(SIGNAL_SLOT)), TransferId(0));
            device.poll(clock::now(), &mut events);
            events.clear();
        }
        device
    });
    world.until("writes of the peer", |world| world.count(0, 1, SIGNAL_SLOT) > 20);
    world.device(0).sever(1);
    until_severed(&mut world);
    check_fenced(&mut world, &target, |_| {});
    stop.store(true, Ordering::Relaxed);
    drop(writer.join().expect("the writer only writes"));
}

pub(crate) fn severing_ends_what_is_under_way_and_refuses_the_rest(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (mine, theirs) = (world.region(0, LEN), world.region(1, LEN));
    world.set_polled(1, false);
    let mut ids = Vec::new();
    while ids.len() < 50 {
        match world.try_submit(0, 1, put(&mine.whole(), theirs.remote(), None)) {
            Ok(id) => ids.push(id),
            Err(SubmitError::QueueFull { .. }) => break,
            Err(error) => panic!("{}: {error}", backend.name),
        }
    }
    world.device(0).sever(1);
    until_severed(&mut world);
    for ending in world.finish_all(0, &ids) {
        let severed = Err(TransferError::Severed { peer: 1 });
        assert!(ending.is_ok() || ending == severed, "{}: ended with {ending:?}", backend.name);
    }
    world.check_nothing_succeeds_after(0, &Event::Severed { peer: 1 });
    let refused = world.try_submit(0, 1, Submission::Signal(signal(SIGNAL_SLOT, b"")));
    assert_eq!(refused, Err(SubmitError::Severed { peer: 1 }));
    assert_eq!(
        world.device(0).post(1, b"hello?", Urgency::Ordinary),
        Err(PostError::NotConnected { peer: 1 })
    );
}

pub(crate) fn a_get_under_way_writes_nothing_after_the_fence(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region_of(1, &noise(4, LEN)), world.region(0, LEN));
    world.set_polled(1, false);
    let gets: Vec<_> = (0..4)
        .filter_map(|_| {
            world.try_submit(0, 1, Transfer::Get { src: source.remote(), dst: target.whole() }).ok()
        })
        .collect();
    world.pump();
    world.device(0).sever(1);
    until_severed(&mut world);
    check_fenced(&mut world, &target, |_| {});
    world.set_polled(1, true);
    check_fenced(&mut world, &target, |_| {});
    world.finish_all(0, &gets);
    world.check_nothing_succeeds_after(0, &Event::Severed { peer: 1 });
}

pub(crate) fn severing_one_peer_keeps_the_others(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let detaches = world.device(0).info().reach[1].fabric == "shm";
    let (source, old) = (world.region_of(2, &noise(5, LEN)), world.region(0, LEN));
    world.device(0).sever(1);
    until_severed(&mut world);
    world.check_pair(0, 2);
    world.check_pair(1, 2);
    if detaches {
        skip_part(
            backend,
            "takes regions away from all peers when it severs one; only a new region is tried",
        );
    } else {
        assert_eq!(world.carry_out(2, 0, put(&source.whole(), old.remote(), Some(SIGNAL_SLOT))), Ok(0));
        world.until("the signal", |world| world.count(0, 2, SIGNAL_SLOT) == 1);
        assert_bytes(&old.whole().to_vec(), &noise(5, LEN), "a region that was there before");
    }
    let before = world.count(0, 2, SIGNAL_SLOT);
    let new = world.region(0, LEN);
    assert_eq!(world.carry_out(2, 0, put(&source.whole(), new.remote(), Some(SIGNAL_SLOT))), Ok(0));
    world.until("the signal", |world| world.count(0, 2, SIGNAL_SLOT) == before + 1);
    assert_bytes(&new.whole().to_vec(), &noise(5, LEN), "a region registered after severing");
}

pub(crate) fn severing_a_lost_peer_ends_as_well(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let region = world.region(0, LEN);
    world.kill(1);
    world.until_lost(0, 1);
    world.device(0).sever(1);
    until_severed(&mut world);
    check_fenced(&mut world, &region, |_| {});
}

pub(crate) fn ranks_may_sever_each_other_at_once(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let regions = [world.region(0, LEN), world.region(1, LEN)];
    hammer(&mut world, &regions[1], &regions[0]);
    world.device(0).sever(1);
    world.device(1).sever(0);
    until_severed(&mut world);
    world.until("the fence of the other", |world| world.saw(1, &Event::Severed { peer: 0 }) == 1);
    check_fenced(&mut world, &regions[0], |_| {});
    check_fenced(&mut world, &regions[1], |_| {});
}
