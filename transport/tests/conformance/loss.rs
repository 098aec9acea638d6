//! Line 4: a loss is said once and for good; a peer that said bye is not lost.

use pleach_transport::{Event, Flush, MapError, PostError, SubmitError, Urgency, clock};

use crate::world::{BackendKind, PATIENCE, Submission, World, assert_bytes, noise, put, signal, skip};

const SIGNAL_SLOT: u16 = 5;

pub(crate) fn a_rank_that_ends_without_bye_is_lost_once(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    world.kill(1);
    for rank in [0, 2] {
        let cause = world.until_lost(rank, 1);
        let refused = world.try_submit(rank, 1, Submission::Signal(signal(SIGNAL_SLOT, b"")));
        assert_eq!(refused, Err(SubmitError::Lost { peer: 1, kind: cause.kind() }), "refused with its kind");
        let refused = world.device(rank).post(1, b"are you there?", Urgency::Ordinary);
        assert_eq!(refused, Err(PostError::NotConnected { peer: 1 }));
    }
    world.watch(|world| {
        for rank in [0, 2] {
            assert_eq!(world.losses(rank, 1).len(), 1, "{}: a loss is said once", backend.name);
            assert_eq!(
                world.inbox(rank).state().losses.len(),
                1,
                "{}: a loss is reported once",
                backend.name
            );
            assert_eq!(
                world.saw(rank, &Event::Departed { peer: 1 }),
                0,
                "{}: it did not say bye",
                backend.name
            );
        }
    });
    world.check_pair(0, 2);
}

pub(crate) fn a_loss_reaches_the_responder_while_nobody_polls(backend: BackendKind) {
    if !backend.live {
        return skip(backend, "has no thread of its own: losses are delivered in virtual time");
    }
    let mut world = World::connected(backend, 2);
    let inbox = world.inbox(0);
    world.kill(1);
    let deadline = clock::now() + PATIENCE;
    while inbox.state().losses.is_empty() {
        assert!(clock::now() < deadline, "{}: the loss was not reported while nobody polled", backend.name);
        std::thread::yield_now();
    }
    let reported = inbox.state().losses.clone();
    let cause = world.until_lost(0, 1);
    assert_eq!(reported, [(1, cause)], "{}: both ways tell the same", backend.name);
}

pub(crate) fn what_a_rank_said_is_told_before_its_loss(backend: BackendKind) {
    const MESSAGES: usize = 100;
    if !backend.live {
        return skip(backend, "has no thread of its own: messages are delivered in virtual time");
    }
    let mut world = World::connected(backend, 2);
    let target = world.region(0, 8);
    world.announce(0);
    let source = world.region_of(1, &[1; 8]);
    let inbox = world.inbox(1);
    let before = inbox.state().messages.len();
    // No thread of rank 1 runs: what it is told waits in the kernel.
    let held = inbox.hold();
    world.set_polled(1, false);
    for number in 0..MESSAGES {
        world.post(0, 1, &[number as u8; 20]);
    }
    world.until("the messages to be sent", |world| world.device(0).flush(Flush::All));
    world.kill(0);
    // Now its polling thread does, which sees the end of rank 0 in its own way; that may be at
    // once.
    let _ = world.try_submit(1, 0, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)));
    world.set_polled(1, true);
    let until = clock::now() + backend.failed_after;
    world.until("transfers to rank 0 to fail", |_| clock::now() >= until);
    drop(held);
    world.until_lost(1, 0);
    assert_eq!(inbox.state().heard_before, [before + MESSAGES], "{}", backend.name);
}

pub(crate) fn what_a_leaving_rank_sent_arrives_before_its_bye(backend: BackendKind) {
    const PUTS: usize = 20;
    const LEN: usize = 50_000;
    let mut world = World::connected(backend, 2);
    let bytes = noise(9, PUTS * LEN);
    let (source, target) = (world.region_of(0, &bytes), world.region(1, bytes.len()));
    let ids: Vec<_> = (0..PUTS)
        .map(|number| {
            let part = number * LEN..(number + 1) * LEN;
            let dst = target.slice(part.clone()).expect("inside").remote();
            world.submit(0, 1, put(&source.slice(part).expect("inside"), dst, Some(SIGNAL_SLOT)))
        })
        .collect();
    world.device(0).leave();
    world.until("the bye", |world| world.saw(1, &Event::Departed { peer: 0 }) > 0);
    assert_eq!(world.count(1, 0, SIGNAL_SLOT), PUTS as u64, "{}: the bye overtook transfers", backend.name);
    assert_bytes(&target.whole().to_vec(), &bytes, "what was sent before the bye");
    world.until("the leaving rank to be flushed", |world| world.device(0).flush(Flush::All));
    assert!(world.finish_all(0, &ids).iter().all(Result::is_ok), "{}: they were carried out", backend.name);
    drop(world.take(0));
    world.watch(|world| {
        assert_eq!(world.saw(1, &Event::Departed { peer: 0 }), 1, "{}: a bye is said once", backend.name);
        assert_eq!(world.losses(1, 0), [], "{}: a peer that left is not lost", backend.name);
    });
    assert!(world.inbox(1).state().losses.is_empty(), "{}: nor reported as lost", backend.name);
}

pub(crate) fn long_transfers_and_messages_of_a_leaving_rank_arrive_before_its_bye(backend: BackendKind) {
    const PUTS: usize = 3;
    const LEN: usize = 3 << 20;
    const MESSAGES: u8 = 5;
    let mut world = World::connected(backend, 2);
    let len = world.longest(LEN);
    let bytes = noise(11, PUTS * len);
    let (source, target) = (world.region_of(0, &bytes), world.region(1, bytes.len()));
    let heard = world.inbox(1).state().messages.len();
    for number in 0..PUTS {
        let part = number * len..(number + 1) * len;
        let dst = target.slice(part.clone()).expect("inside").remote();
        world.submit(0, 1, put(&source.slice(part).expect("inside"), dst, Some(SIGNAL_SLOT)));
    }
    for message in 0..MESSAGES {
        world.post(0, 1, &[message]);
    }
    world.device(0).leave();
    world.until("the bye", |world| world.saw(1, &Event::Departed { peer: 0 }) > 0);
    assert_eq!(
        world.count(1, 0, SIGNAL_SLOT),
        PUTS as u64,
        "{}: the bye overtook long transfers",
        backend.name
    );
    assert_bytes(&target.whole().to_vec(), &bytes, "long puts before the bye");
    let messages = world.inbox(1).state().messages.split_off(heard);
    let said: Vec<_> = (0..MESSAGES).map(|message| (0, vec![message])).collect();
    assert_eq!(messages, said, "{}: the bye overtook messages", backend.name);
}

pub(crate) fn a_rank_that_left_is_refused_as_having_left(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    world.device(0).leave();
    world.until("the bye", |world| world.saw(1, &Event::Departed { peer: 0 }) > 0);
    let refused = world.try_submit(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b"")));
    assert_eq!(refused, Err(SubmitError::Departed { peer: 0 }));
    assert_eq!(
        world.device(1).post(0, b"hello?", Urgency::Ordinary),
        Err(PostError::NotConnected { peer: 0 })
    );
}

pub(crate) fn ranks_that_leave_at_the_same_time_lose_nobody(backend: BackendKind) {
    const RANKS: u32 = 3;
    let mut world = World::connected(backend, RANKS);
    for rank in 0..RANKS {
        world.device(rank).leave();
    }
    for rank in 0..RANKS {
        world.until("a leaving rank to be flushed", |world| world.device(rank).flush(Flush::All));
        drop(world.take(rank));
    }
    for rank in 0..RANKS {
        assert!(world.inbox(rank).state().losses.is_empty(), "{}: rank {rank} lost somebody", backend.name);
    }
}

pub(crate) fn a_flushed_rank_may_be_dropped_without_losing_what_it_sent(backend: BackendKind) {
    const LEN: usize = 300_000;
    let mut world = World::connected(backend, 2);
    let bytes = noise(10, LEN);
    let (source, target) = (world.region_of(0, &bytes), world.region(1, LEN));
    world.submit(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)));
    world.device(0).leave();
    world.until("the leaving rank to be flushed", |world| world.device(0).flush(Flush::All));
    drop(source);
    drop(world.take(0));
    world.until("the signal of a rank that is gone", |world| world.count(1, 0, SIGNAL_SLOT) == 1);
    assert_bytes(&target.whole().to_vec(), &bytes, "what a rank sent before it was dropped");
    world.until("its bye", |world| world.saw(1, &Event::Departed { peer: 0 }) == 1);
}

pub(crate) fn what_a_gone_rank_sent_arrives_though_its_peer_still_writes_to_it(backend: BackendKind) {
    const PUTS: usize = 4;
    const LEN: usize = 20_000;
    if !backend.live {
        return skip(backend, "has no time of its own in which a rank is gone and not polled");
    }
    let mut world = World::connected(backend, 2);
    let bytes = noise(12, LEN);
    let (source, target) = (world.region_of(0, &bytes), world.region(1, LEN));
    let one =
        |world: &mut World| world.submit(0, 1, put(&source.whole(), target.remote(), Some(SIGNAL_SLOT)));
    // Of the first one its sender waits for an answer.
    let first = one(&mut world);
    assert_eq!(world.finish(0, first), Ok(0));
    world.set_polled(1, false);
    for _ in 1..PUTS {
        one(&mut world);
    }
    world.device(0).leave();
    world.until("the leaving rank to be flushed", |world| world.device(0).flush(Flush::All));
    drop(source);
    drop(world.take(0));
    // What ends here tells the peer so, which needs to know it no more.
    for _ in 0..4 {
        match world.try_submit(1, 0, Submission::Signal(signal(SIGNAL_SLOT, b"ended"))) {
            Ok(_) | Err(SubmitError::Departed { .. }) => {}
            Err(error) => panic!("{}: {error}", backend.name),
        }
        world.device(1).flush(Flush::Transfers);
        std::thread::yield_now();
    }
    world.set_polled(1, true);
    world.until("its bye or its loss", |world| {
        world.saw(1, &Event::Departed { peer: 0 }) > 0 || !world.losses(1, 0).is_empty()
    });
    assert_eq!(world.losses(1, 0), [], "{}: a peer that left is not lost", backend.name);
    assert_eq!(
        world.count(1, 0, SIGNAL_SLOT),
        PUTS as u64,
        "{}: what it had sent before is here",
        backend.name
    );
    assert_bytes(&target.whole().to_vec(), &bytes, "what a rank sent before it was dropped");
}

pub(crate) fn a_lost_rank_is_not_mapped(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    if !world.device(0).info().reach[1].maps {
        return skip(backend, "maps nothing");
    }
    let theirs = world.region(1, 4096).remote();
    world.kill(1);
    world.until_lost(0, 1);
    let refused = world.device(0).map(1, &theirs);
    assert!(matches!(refused, Err(MapError::Disconnected { peer: 1 })), "{}: {refused:?}", backend.name);
}
