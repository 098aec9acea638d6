//! Line 5: a full queue says so, leaves no trace of what it refused, and empties by polling.

use std::sync::Arc;

use pleach_transport::{AtomicOp, Rank, SubmitError, Transfer, TransferId};

use crate::world::{BackendKind, Submission, World, assert_bytes, noise, put, signal, skip};

const SIGNAL_SLOT: u16 = 7;

/// Waits for room for one transfer, then submits without polling anybody until the queue is full,
/// or until it is clear that it never is because whatever is submitted ends at once.
fn fill<T: Into<Submission>>(
    world: &mut World,
    from: Rank,
    to: Rank,
    mut transfer: impl FnMut(usize) -> T,
) -> Filled {
    let depth = world.device(from).info().reach[to as usize].queue_depth;
    let mut accepted = vec![world.submit(from, to, transfer(0))];
    let mut under_way = 0;
    loop {
        match world.try_submit(from, to, transfer(accepted.len())) {
            Ok(id) => {
                under_way += usize::from(world.endings(from, id).is_empty());
                accepted.push(id);
            }
            Err(error) => {
                assert_eq!(error, SubmitError::QueueFull { peer: to }, "{}", world.kind().name);
                return Filled { accepted, is_full: true };
            }
        }
        assert!(
            under_way <= depth,
            "{}: more than {depth} transfers are under way unpolled",
            world.kind().name
        );
        if under_way == 0 && accepted.len() > 2 * depth {
            return Filled { accepted, is_full: false };
        }
    }
}

struct Filled {
    accepted: Vec<TransferId>,
    is_full: bool,
}

pub(crate) fn a_full_queue_is_an_error_without_a_trace(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let len = backend.long_bytes;
    let (source, target) = (world.region_of(0, &noise(1, len)), world.region(1, 2 * len));
    let written = target.slice(0..len).expect("inside");
    let refused = target.slice(len..2 * len).expect("inside");
    let Filled { accepted, is_full } =
        fill(&mut world, 0, 1, |_| put(&source.whole(), written.remote(), Some(SIGNAL_SLOT)));
    if !is_full {
        return skip(backend, "every put ends at once");
    }
    let memory = world.backend().memory(len);
    let watched = Arc::downgrade(&memory);
    let dropped = world.device(0).register(memory).expect("registers");
    dropped.whole().store(&vec![0xFF; len]);
    let mut names = Vec::new();
    for _ in 0..10 {
        let name = TransferId(u64::MAX - names.len() as u64);
        let transfer = put(&dropped.whole(), refused.remote(), Some(SIGNAL_SLOT + 1));
        assert_eq!(world.device(0).submit(1, transfer, name), Err(SubmitError::QueueFull { peer: 1 }));
        names.push(name);
    }
    drop(dropped);
    assert!(
        world.finish_all(0, &accepted).iter().all(Result::is_ok),
        "{}: what was accepted is done",
        backend.name
    );
    world.until("all signals", |world| world.count(1, 0, SIGNAL_SLOT) == accepted.len() as u64);
    assert_bytes(&written.to_vec(), &noise(1, len), "what was accepted");
    world.watch(|world| assert_eq!(world.count(1, 0, SIGNAL_SLOT + 1), 0, "a refused put gives no signal"));
    assert_bytes(&refused.to_vec(), &vec![0; len], "what was refused");
    for name in names {
        assert_eq!(world.endings(0, name), [], "{}: what was refused does not end", backend.name);
    }
    world.until("a refused transfer to hold no memory", |_| watched.strong_count() == 0);
}

pub(crate) fn polling_makes_room_every_time(backend: BackendKind) {
    const ROUNDS: usize = 6;
    let mut world = World::connected(backend, 2);
    let len = backend.long_bytes;
    let mine = world.region(0, len);
    let theirs = world.region_of(1, &noise(2, len));
    let word = theirs.slice(0..8).expect("inside").remote();
    let mut all = Vec::new();
    let mut signals = 0;
    for round in 0..ROUNDS {
        let Filled { accepted, .. } = fill(&mut world, 0, 1, |number| match (round + number) % 4 {
            0 => put(&mine.whole(), theirs.remote(), Some(SIGNAL_SLOT)).into(),
            1 => Transfer::Get { src: theirs.remote(), dst: mine.whole() }.into(),
            2 => Transfer::Atomic { word, op: AtomicOp::Add(0) }.into(),
            _ => Submission::Signal(signal(SIGNAL_SLOT, b"full")),
        });
        signals += (0..accepted.len()).filter(|number| matches!((round + number) % 4, 0 | 3)).count() as u64;
        all.extend(accepted);
        // Room for one is enough for the next round: it begins while the rest is still under way.
        let extra = world.submit(0, 1, Submission::Signal(signal(SIGNAL_SLOT, b"room")));
        signals += 1;
        all.push(extra);
    }
    assert!(world.finish_all(0, &all).iter().all(Result::is_ok), "{}", backend.name);
    world.until("all signals", |world| world.count(1, 0, SIGNAL_SLOT) >= signals);
    assert_eq!(world.count(1, 0, SIGNAL_SLOT), signals, "{}: each accepted signal counts once", backend.name);
}

pub(crate) fn both_ends_may_have_full_queues_at_once(backend: BackendKind) {
    const ROUNDS: usize = 4;
    let mut world = World::connected(backend, 2);
    let regions = [0, 1].map(|rank| world.region(rank, backend.long_bytes.max(40_000)));
    let mut accepted = [0_u64; 2];
    for _ in 0..ROUNDS {
        for from in 0..2_usize {
            let (mine, theirs) = (regions[from].whole(), regions[1 - from].remote());
            let filled =
                fill(&mut world, from as u32, 1 - from as u32, |_| put(&mine, theirs, Some(SIGNAL_SLOT)));
            accepted[from] += filled.accepted.len() as u64;
        }
        for from in 0..2_u32 {
            world.submit(from, 1 - from, Submission::Signal(signal(SIGNAL_SLOT, b"")));
            accepted[from as usize] += 1;
        }
    }
    world.until("all signals of both", |world| {
        world.count(1, 0, SIGNAL_SLOT) == accepted[0] && world.count(0, 1, SIGNAL_SLOT) == accepted[1]
    });
}

pub(crate) fn a_full_queue_to_one_peer_leaves_the_others_alone(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    let mine = world.region(0, backend.long_bytes);
    let theirs = world.region(1, backend.long_bytes);
    let Filled { accepted: first, .. } =
        fill(&mut world, 0, 1, |_| put(&mine.whole(), theirs.remote(), None));
    let other = world.try_submit(0, 2, Submission::Signal(signal(SIGNAL_SLOT, b"")));
    let other = other.expect("a queue for each peer");
    assert_eq!(world.finish(0, other), Ok(0));
    world.finish_all(0, &first);
    world.until("the signal to the other peer", |world| world.count(2, 0, SIGNAL_SLOT) == 1);
}
