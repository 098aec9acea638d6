//! Line 10: polling both ends is enough, and where the fabric is passive polling the submitter is.

use pleach_transport::{AtomicOp, Transfer};

use crate::world::{BackendKind, Submission, World, assert_bytes, noise, put, signal, skip};

const SIGNAL_SLOT: u16 = 6;
const LEN: usize = 200_000;

pub(crate) fn a_passive_fabric_needs_no_polling_of_the_target(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if !world.device(0).info().reach[1].passive {
        return skip(backend, "says that the target must be polled");
    }
    let (mine, theirs) = (world.region_of(0, &noise(1, LEN)), world.region(1, LEN));
    let signal_slots = world.signal_slots(1, 0);
    world.set_polled(1, false);
    assert_eq!(world.carry_out(0, 1, put(&mine.whole(), theirs.remote(), Some(SIGNAL_SLOT))), Ok(0));
    world.until("the signal at a rank that does not poll", |_| signal_slots.count(SIGNAL_SLOT) == 1);
    assert_bytes(&theirs.whole().to_vec(), &noise(1, LEN), "a put to a rank that does not poll");
    mine.whole().store(&vec![0; LEN]);
    let get = Transfer::Get { src: theirs.remote(), dst: mine.whole() };
    assert_eq!(world.carry_out(0, 1, get), Ok(0));
    assert_bytes(&mine.whole().to_vec(), &noise(1, LEN), "a get from a rank that does not poll");
    let word = theirs.slice(0..8).expect("inside").remote();
    let old = u64::from_ne_bytes(noise(1, 8).try_into().expect("eight bytes"));
    assert_eq!(world.carry_out(0, 1, Transfer::Atomic { word, op: AtomicOp::Add(1) }), Ok(old));
}

pub(crate) fn a_rank_that_was_not_polled_for_a_while_catches_up(backend: BackendKind) {
    const SIGNALS: u64 = 400;
    let mut world = World::connected(backend, 2);
    world.set_polled(1, false);
    let mut sent = 0;
    world.watch(|world| {
        if sent < SIGNALS && world.try_submit(0, 1, Submission::Signal(signal(SIGNAL_SLOT, b"late"))).is_ok()
        {
            sent += 1;
        }
    });
    assert!(sent > 0, "{}: an idle queue takes a transfer", backend.name);
    world.set_polled(1, true);
    world.until("all signals of a rank that was away", |world| world.count(1, 0, SIGNAL_SLOT) == sent);
    world.watch(|world| assert_eq!(world.count(1, 0, SIGNAL_SLOT), sent));
}

pub(crate) fn long_transfers_both_ways_end_together(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let long = world.longest(8 << 20);
    let sources = [world.region_of(0, &noise(2, long)), world.region_of(1, &noise(3, long))];
    let targets = [world.region(0, long), world.region(1, long)];
    for from in 0..2_usize {
        let transfer = put(&sources[from].whole(), targets[1 - from].remote(), Some(SIGNAL_SLOT));
        world.submit(from as u32, 1 - from as u32, transfer);
    }
    world.until("both signals", |world| {
        world.count(0, 1, SIGNAL_SLOT) == 1 && world.count(1, 0, SIGNAL_SLOT) == 1
    });
    assert_bytes(&targets[1].whole().to_vec(), &noise(2, long), "from 0 to 1");
    assert_bytes(&targets[0].whole().to_vec(), &noise(3, long), "from 1 to 0");
}
