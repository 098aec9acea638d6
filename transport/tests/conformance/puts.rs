//! Lines 1, 2 and 6: a put's bytes are visible when its signal is, a put gives one signal, and its
//! source may be reused when it is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pleach_transport::{Inline, SIGNAL_SLOT_PAYLOAD_BYTES, Source, Transfer, clock};

use crate::world::{
    BackendKind, PATIENCE, SIGNAL_SLOTS, Submission, World, assert_bytes, noise, pairs, put, signal,
    skip_part,
};

/// Lengths at which implementations change their ways, in bytes.
pub(crate) const SIZES: [usize; 14] =
    [0, 1, 3, 8, 48, 63, 64, 65, 4095, 4096, 4097, 65_537, 262_144, (1 << 20) + 3];

/// Bytes around a target that must stay as they are.
const MARGIN: usize = 67;

/// What is around a target.
const FILL: u8 = 0xEE;

/// Longest transfer that is tried, in bytes.
const LENGTH_TRIED_MAX: u64 = 64 << 20;

const SIGNAL_SLOT: u16 = 3;

pub(crate) fn bytes_of_every_length_and_alignment_are_there_when_the_signal_is(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let longest = world.longest(SIZES[SIZES.len() - 1]);
    let room = longest + 2 * MARGIN;
    let (source, target) = (world.region(0, room), world.region(1, room));
    for (round, len) in SIZES.into_iter().filter(|&len| len <= longest).enumerate() {
        let bytes = noise(round as u64, len);
        let (from, to) = (round % 9, MARGIN - round * 5 % 13);
        let src = source.slice(from..from + len).expect("inside");
        src.store(&bytes);
        target.whole().store(&vec![FILL; room]);
        let dst = target.slice(to..to + len).expect("inside");
        let id = world.submit(0, 1, put(&src, dst.remote(), Some(SIGNAL_SLOT)));
        world.until("the signal of a put", |world| world.count(1, 0, SIGNAL_SLOT) > round as u64);
        assert_bytes(&dst.to_vec(), &bytes, &format!("{len} bytes from {from} to {to}"));
        let all = target.whole().to_vec();
        assert!(
            all[..to].iter().chain(&all[to + len..]).all(|byte| *byte == FILL),
            "bytes around a put changed"
        );
        assert_eq!(world.finish(0, id), Ok(0));
        assert_eq!(world.count(1, 0, SIGNAL_SLOT), round as u64 + 1, "a put gives one signal");
    }
}

pub(crate) fn a_put_without_signal_arrives_and_touches_no_signal_slot(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let bytes = noise(1, 5000);
    let (source, target) = (world.region_of(0, &bytes), world.region(1, 5000));
    assert_eq!(world.carry_out(0, 1, put(&source.whole(), target.remote(), None)), Ok(0));
    // Its arrival shows in a get only after some time: `Done` of the put means that the source may
    // be reused.
    world.until("the bytes of a put without signal", |_| target.whole().to_vec() == bytes);
    assert!((0..SIGNAL_SLOTS as u16).all(|signal_slot| world.count(1, 0, signal_slot) == 0));
}

pub(crate) fn a_put_of_the_maximum_length_works(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let max = world.device(0).info().transfer_bytes_max;
    let len = max.min(LENGTH_TRIED_MAX) as usize;
    if max > LENGTH_TRIED_MAX {
        skip_part(backend, &format!("allows {max} bytes a transfer; {len} are tried"));
    }
    let bytes = noise(7, len);
    let (source, target) = (world.region_of(0, &bytes), world.region(1, len));
    let id = world.submit(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)));
    world.until("the signal of a very long put", |world| world.count(1, 0, SIGNAL_SLOT) > 0);
    assert_bytes(&target.whole().to_vec(), &bytes, "a very long put");
    assert_eq!(world.finish(0, id), Ok(0));
    world.watch(|world| assert_eq!(world.count(1, 0, SIGNAL_SLOT), 1, "however it is split, one signal"));
}

pub(crate) fn a_signal_carries_payload_of_every_length(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let signal_slots = world.signal_slots(1, 0);
    for len in 0..=SIGNAL_SLOT_PAYLOAD_BYTES {
        let payload = noise(len as u64, len);
        assert_eq!(world.carry_out(0, 1, Submission::Signal(signal(SIGNAL_SLOT, &payload))), Ok(0));
        world.until("a signal with payload", |_| signal_slots.count(SIGNAL_SLOT) > len as u64);
        assert_bytes(&signal_slots.payload(SIGNAL_SLOT)[..len], &payload, "payload");
    }
}

pub(crate) fn a_put_carries_payload_beside_its_bytes(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let bytes = noise(3, 10_000);
    let payload = noise(4, SIGNAL_SLOT_PAYLOAD_BYTES);
    let (source, target) = (world.region_of(0, &bytes), world.region(1, bytes.len()));
    let src = Source::Slice(source.whole());
    let transfer = Transfer::Put { src, dst: target.remote(), signal: Some(signal(SIGNAL_SLOT, &payload)) };
    world.submit(0, 1, transfer);
    world.until("the signal", |world| world.count(1, 0, SIGNAL_SLOT) == 1);
    assert_bytes(&target.whole().to_vec(), &bytes, "bytes");
    assert_bytes(&world.signal_slots(1, 0).payload(SIGNAL_SLOT), &payload, "payload");
}

pub(crate) fn an_inline_put_needs_no_region(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let target = world.region(1, 100);
    for len in [0, 1, 8, 47, SIGNAL_SLOT_PAYLOAD_BYTES] {
        let before = world.count(1, 0, SIGNAL_SLOT);
        let bytes = noise(len as u64, len);
        let src = Source::Inline(Inline::new(&bytes).expect("fits"));
        let dst = target.slice(5..5 + len).expect("inside");
        let transfer = Transfer::Put { src, dst: dst.remote(), signal: Some(signal(SIGNAL_SLOT, b"")) };
        assert_eq!(world.carry_out(0, 1, transfer), Ok(0));
        world.until("the signal of an inline put", |world| world.count(1, 0, SIGNAL_SLOT) > before);
        assert_bytes(&dst.to_vec(), &bytes, "an inline put");
    }
}

pub(crate) fn signal_slots_are_counted_apart_for_each_signal_slot_and_peer(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let wanted = |from: u32, signal_slot: u16| u64::from(from * 3 + u32::from(signal_slot) % 5);
    for (from, to) in pairs(3) {
        for signal_slot in 0..SIGNAL_SLOTS as u16 {
            for _ in 0..wanted(from, signal_slot) {
                world.submit(from, to, Submission::Signal(signal(signal_slot, b"")));
            }
        }
    }
    let all = |world: &mut World, what: fn(u64, u64) -> bool| {
        pairs(3).all(|(from, to)| {
            (0..SIGNAL_SLOTS as u16)
                .all(|signal_slot| what(world.count(to, from, signal_slot), wanted(from, signal_slot)))
        })
    };
    world.until("all signals", |world| all(world, |count, wanted| count >= wanted));
    world.watch(|world| assert!(all(world, |count, wanted| count == wanted), "no signal counts twice"));
}

pub(crate) fn a_thread_that_polls_nothing_sees_the_bytes_with_the_signal(backend: BackendKind) {
    const LEN: usize = 20_000;
    // A world in virtual time gains little from another thread's pace and is repeated with many
    // seeds.
    let rounds = if backend.live { 200 } else { 20 };
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region(0, LEN), world.region(1, LEN));
    let (signal_slots, slice) = (world.signal_slots(1, 0), target.whole());
    let checked = Arc::new(AtomicU64::new(0));
    let reader = {
        let checked = Arc::clone(&checked);
        std::thread::spawn(move || {
            let deadline = clock::now() + PATIENCE;
            for round in 1..=rounds {
                while signal_slots.count(SIGNAL_SLOT) < round {
                    assert!(clock::now() < deadline, "no signal {round}");
                    std::thread::yield_now();
                }
                assert_bytes(&slice.to_vec(), &noise(round, LEN), &format!("round {round}"));
                checked.store(round, Ordering::Release); // Pairs with the acquire below.
            }
        })
    };
    for round in 1..=rounds {
        source.whole().store(&noise(round, LEN));
        assert_eq!(world.carry_out(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT))), Ok(0));
        world.until("the reader to have checked", |_| {
            checked.load(Ordering::Acquire) >= round || reader.is_finished()
        });
    }
    reader.join().expect("the reader saw every put whole");
}

pub(crate) fn a_source_may_be_overwritten_when_its_put_is_done(backend: BackendKind) {
    const PUTS: usize = 24;
    const LEN: usize = 100_003;
    let mut world = World::connected(backend, 2);
    let (source, target) = (world.region(0, LEN), world.region(1, LEN * PUTS));
    for put_number in 0..PUTS {
        source.whole().store(&noise(put_number as u64, LEN));
        let at = put_number * LEN;
        let dst = target.slice(at..at + LEN).expect("inside").remote();
        assert_eq!(world.carry_out(0, 1, put(&source.whole(), dst, Some(SIGNAL_SLOT))), Ok(0));
        source.whole().store(&vec![FILL; LEN]);
    }
    world.until("all signals", |world| world.count(1, 0, SIGNAL_SLOT) == PUTS as u64);
    let arrived = target.whole().to_vec();
    for (put_number, bytes) in arrived.chunks(LEN).enumerate() {
        assert_bytes(bytes, &noise(put_number as u64, LEN), "a put carries what its source held before Done");
    }
}

pub(crate) fn a_get_is_done_when_its_bytes_are_here(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let longest = world.longest(SIZES[SIZES.len() - 1]);
    let room = longest + 2 * MARGIN;
    let remote = noise(11, room);
    let (source, target) = (world.region_of(1, &remote), world.region(0, room));
    for (round, len) in SIZES.into_iter().filter(|&len| len <= longest).enumerate() {
        let (from, to) = (round % 11, MARGIN - round * 3 % 17);
        target.whole().store(&vec![FILL; room]);
        let src = source.slice(from..from + len).expect("inside").remote();
        let dst = target.slice(to..to + len).expect("inside");
        let id = world.submit(0, 1, Transfer::Get { src, dst: dst.clone() });
        world.until("the end of a get", |world| !world.endings(0, id).is_empty());
        assert_bytes(&dst.to_vec(), &remote[from..from + len], &format!("a get of {len} bytes"));
        let all = target.whole().to_vec();
        assert!(
            all[..to].iter().chain(&all[to + len..]).all(|byte| *byte == FILL),
            "bytes around a get changed"
        );
        assert_eq!(world.ending(0, id), Ok(0));
    }
    assert_bytes(&source.whole().to_vec(), &remote, "a get changes nothing at its source");
}

pub(crate) fn all_pairs_move_different_bytes_at_once(backend: BackendKind) {
    const RANKS: u32 = 4;
    const LEN: usize = 150_001;
    let mut world = World::connected(backend, RANKS);
    let seed = |from: u32, to: u32| u64::from(from * RANKS + to);
    let sources: Vec<_> =
        pairs(RANKS).map(|(from, to)| world.region_of(from, &noise(seed(from, to), LEN))).collect();
    let targets: Vec<_> = pairs(RANKS).map(|(_, to)| world.region(to, LEN)).collect();
    for (index, (from, to)) in pairs(RANKS).enumerate() {
        world.submit(from, to, put(&sources[index].whole(), targets[index].remote(), Some(SIGNAL_SLOT)));
    }
    world
        .until("all signals", |world| pairs(RANKS).all(|(from, to)| world.count(to, from, SIGNAL_SLOT) == 1));
    for (index, (from, to)) in pairs(RANKS).enumerate() {
        let what = format!("from {from} to {to}");
        assert_bytes(&targets[index].whole().to_vec(), &noise(seed(from, to), LEN), &what);
    }
}
