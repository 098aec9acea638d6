//! Control messages: in order, answered, bounded, and read while nobody polls.

use pleach_transport::{MESSAGE_BYTES_MAX, PostError, Urgency, clock};

use crate::world::{
    BackendKind, PASS_ON, PATIENCE, QUESTION, World, assert_bytes, noise, pairs, put, skip, skip_part,
};

/// A message that is neither a question nor anything else the suite knows.
fn text(seed: u64, len: usize) -> Vec<u8> {
    let mut message = noise(seed, len);
    if let Some(first) = message.first_mut() {
        *first = b'#';
    }
    message
}

pub(crate) fn messages_arrive_whole_and_in_order(backend: BackendKind) {
    const MESSAGES: usize = 200;
    let mut world = World::connected(backend, 2);
    let len = |number: usize| match number % 5 {
        0 => MESSAGE_BYTES_MAX,
        1 => 1,
        2 => MESSAGE_BYTES_MAX - 1,
        _ => number * 17 % 900,
    };
    for number in 0..MESSAGES {
        for from in 0..2 {
            world.post(from, 1 - from, &text(number as u64 * 2 + u64::from(from), len(number)));
        }
    }
    for to in 0..2_u32 {
        let inbox = world.inbox(to);
        world.until("all messages", |_| inbox.state().messages.len() >= MESSAGES);
        let state = inbox.state();
        assert_eq!(state.messages.len(), MESSAGES);
        for (number, (from, message)) in state.messages.iter().enumerate() {
            assert_eq!(*from, 1 - to);
            let expected = text(number as u64 * 2 + u64::from(1 - to), len(number));
            assert_bytes(message, &expected, &format!("message {number} to {to}"));
        }
    }
}

pub(crate) fn an_empty_message_arrives(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    world.post(0, 1, b"");
    world.post(0, 1, b"#");
    let inbox = world.inbox(1);
    world.until("both messages", |_| inbox.state().messages.len() == 2);
    assert_eq!(inbox.state().messages, [(0, vec![]), (0, b"#".to_vec())]);
}

pub(crate) fn a_question_is_answered(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    for (from, to) in pairs(3) {
        world.post(from, to, &[QUESTION, from as u8, to as u8]);
    }
    for rank in 0..3_u32 {
        let inbox = world.inbox(rank);
        let answers = || -> Vec<_> {
            let state = inbox.state();
            state.messages.iter().filter(|(_, message)| message[0] == b'!').cloned().collect()
        };
        world.until("the answers", |_| answers().len() >= 2);
        let mut answers = answers();
        answers.sort();
        let peers = (0..3).filter(|peer| *peer != rank);
        let expected: Vec<_> = peers.map(|peer| (peer, vec![b'!', rank as u8, peer as u8])).collect();
        assert_eq!(answers, expected, "{}: rank {rank} has one answer of each peer", backend.name);
    }
}

pub(crate) fn a_question_is_answered_while_the_asked_rank_does_not_poll(backend: BackendKind) {
    if !backend.live {
        return skip(backend, "has no thread of its own: messages are delivered in virtual time");
    }
    let mut world = World::connected(backend, 2);
    world.set_polled(1, false);
    let inbox = world.inbox(0);
    for round in 1..=20 {
        world.post(0, 1, &[QUESTION, round as u8]);
        world.until("an answer of a rank that does not poll", |_| inbox.state().messages.len() == round);
    }
}

pub(crate) fn what_a_responder_passes_on_goes_out_while_its_rank_does_not_poll(backend: BackendKind) {
    let mut world = World::connected(backend, 3);
    for (through, to) in [(1, 2), (2, 1)] {
        if backend.live {
            world.set_polled(through, false);
        }
        let inbox = world.inbox(to);
        for round in 1..=20 {
            world.post(0, through, &[PASS_ON, to as u8, b'#', round]);
            let arrived = || inbox.state().messages.iter().any(|it| *it == (through, vec![b'#', round]));
            world.until("a message that another rank passes on", |_| arrived());
        }
        if backend.live {
            world.set_polled(through, true);
        }
    }
    let inbox = world.inbox(2);
    world.inbox(1).state().reports_to = Some(2);
    if backend.live {
        world.set_polled(1, false);
    }
    world.kill(0);
    world.until("word of a loss", |_| inbox.state().messages.contains(&(1, vec![b'#', 0])));
}

pub(crate) fn a_message_goes_out_while_its_sender_does_not_poll(backend: BackendKind) {
    if !backend.live {
        return skip(backend, "has no thread of its own: messages are delivered in virtual time");
    }
    let mut world = World::connected(backend, 2);
    let inbox = world.inbox(1);
    world.post(0, 1, b"#");
    let deadline = clock::now() + PATIENCE;
    while inbox.state().messages.is_empty() {
        assert!(clock::now() < deadline, "{}: the message did not arrive while nobody polled", backend.name);
        std::thread::yield_now();
    }
}

pub(crate) fn a_message_that_is_too_long_is_not_sent(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let bytes = MESSAGE_BYTES_MAX + 1;
    assert_eq!(
        world.device(0).post(1, &vec![0; bytes], Urgency::Ordinary),
        Err(PostError::TooLong { bytes })
    );
    world.watch(|_| {});
    assert!(world.inbox(1).state().messages.is_empty());
    world.check_pair(0, 1);
}

pub(crate) fn a_message_to_a_peer_that_is_not_connected_is_not_sent(backend: BackendKind) {
    let mut world = World::new(backend, 2);
    assert_eq!(world.device(0).post(1, b"#", Urgency::Ordinary), Err(PostError::NotConnected { peer: 1 }));
}

pub(crate) fn messages_pass_while_long_transfers_are_under_way(backend: BackendKind) {
    let mut world = World::connected(backend, 2);
    let long = world.longest(4 << 20);
    let (source, target) = (world.region_of(0, &noise(1, long)), world.region(1, long));
    for _ in 0..4 {
        world.submit(0, 1, put(&source.whole(), target.remote(), Some(0)));
    }
    world.post(0, 1, &[QUESTION, 1]);
    let inbox = world.inbox(0);
    world.until("an answer and all signals", |world| {
        inbox.state().messages.len() == 1 && world.count(1, 0, 0) == 4
    });
    assert_bytes(&target.whole().to_vec(), &noise(1, long), "the transfer beside the messages");
}

pub(crate) fn too_many_messages_are_refused_until_there_is_room(backend: BackendKind) {
    const MOST: usize = 4000;
    let mut world = World::connected(backend, 2);
    let message = text(5, MESSAGE_BYTES_MAX);
    let mut sent = 0;
    while sent < MOST {
        match world.device(0).post(1, &message, Urgency::Ordinary) {
            Ok(()) => sent += 1,
            Err(PostError::QueueFull { peer: 1 }) => break,
            Err(error) => panic!("{}: {error}", backend.name),
        }
    }
    if sent == MOST {
        // A watcher that keeps up never lets the queue fill; that what waits is bounded shows only
        // where it does not.
        skip_part(backend, "took every message at once; its bound was not reached");
    }
    let inbox = world.inbox(1);
    world.until("all messages that were taken", |_| inbox.state().messages.len() == sent);
    world.post(0, 1, b"#");
    world.until("one more", |_| inbox.state().messages.len() == sent + 1);
}

pub(crate) fn an_urgent_message_has_room_where_the_queue_is_full(backend: BackendKind) {
    const MOST: usize = 4000;
    const URGENT: usize = 100;
    let mut world = World::connected(backend, 2);
    let message = text(6, MESSAGE_BYTES_MAX);
    let mut sent = 0;
    while sent < MOST && world.device(0).post(1, &message, Urgency::Ordinary).is_ok() {
        sent += 1;
    }
    for number in 0..URGENT {
        let urgent = [b'#', number as u8];
        assert_eq!(
            world.device(0).post(1, &urgent, Urgency::Urgent),
            Ok(()),
            "{}: urgent {number}",
            backend.name
        );
    }
    let last = (0, vec![b'#', URGENT as u8 - 1]);
    let inbox = world.inbox(1);
    let is_short = |message: &(u32, Vec<u8>)| message.1.len() == 2;
    world.until("all that was posted and the last urgent message", |_| {
        let state = inbox.state();
        let urgent = state.messages.iter().filter(|message| is_short(message));
        state.messages.len() - urgent.clone().count() == sent && urgent.clone().next_back() == Some(&last)
    });
}
