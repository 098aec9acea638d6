//! Tensors that are got: read from their sender's memory into the receiver's, where nothing maps.
//!
//! Over sockets; with `PLEACH_TEST_FABRIC=verbs` over RDMA.

mod pairs;

use std::thread;
use std::time::Duration;

use pleach_exchange::message::FailureKind;
use pleach_exchange::{Endpoint, EndpointOptions, ExchangeFabric, Peer, TensorWay};
use pleach_transport::{Secret, clock};

use pairs::{LONG, connect, key, open, tensor, wait_for_returns};

fn options() -> EndpointOptions {
    let mut options = EndpointOptions::default();
    let fabric = std::env::var("PLEACH_TEST_FABRIC").unwrap_or_else(|_| "tcp".to_owned());
    options.fabric = fabric.parse().expect("a fabric");
    if options.fabric == ExchangeFabric::Verbs {
        // A NIC serves those alone that know a secret.
        options.secret = Some(Secret::new(b"a secret of these tests"));
    }
    options.requires_regions = true;
    options
}

/// A sender, a receiver, and the sender as the receiver sees it.
fn pair(options: &EndpointOptions) -> (Endpoint, Endpoint, Peer) {
    let (sender, receiver) = (open(options), open(options));
    let peer = connect(&receiver, &sender);
    (sender, receiver, peer)
}

#[test]
fn tensors_of_all_sizes_come_into_memory_of_the_receiver() {
    let (sender, receiver, peer) = pair(&options());
    for size in [0, 1, 1000, 1 << 18, (5 << 18) + 3] {
        let values: Vec<u32> = (0..size).collect();
        sender.send(&key("w"), tensor(&sender, &values)).expect("there is room");
        let received = peer.receive(&key("w")).expect("was sent");
        assert_eq!(received.way(), TensorWay::Copied);
        assert_eq!(received.as_slice::<u32>(), Ok(&values[..]));
        wait_for_returns(&sender);
        // Nobody else has the bytes.
        assert_eq!(received.as_slice::<u32>(), Ok(&values[..]));
    }
    let counts = receiver.counts();
    assert_eq!((counts.copied.tensors, counts.inline.tensors, counts.in_place.tensors), (5, 0, 0));
    assert_eq!((counts.receive_latencies.count(), counts.field_latencies.count()), (5, 0));
    assert_eq!((sender.counts().sent_copied, sender.counts().inline_links), (counts.copied, 0));
}

#[test]
fn tensors_come_to_several_threads_at_once_and_both_ways() {
    let (one, other, to_one) = pair(&options());
    let to_other = connect(&one, &other);
    thread::scope(|scope| {
        for number in 0..6_u32 {
            let peer = if number % 2 == 0 { &to_one } else { &to_other };
            scope.spawn(move || {
                for round in 0..20 {
                    let size = (1 << (2 * (round % 9))) + number;
                    let received = peer.receive(&key(&format!("{number} {round}"))).expect("is sent");
                    let values = received.as_slice::<u32>().expect("numbers");
                    assert!(values.len() == size as usize && values.iter().all(|value| *value == size));
                }
            });
        }
        for round in 0..20 {
            for number in 0..6_u32 {
                let sender = if number % 2 == 0 { &one } else { &other };
                let size = (1 << (2 * (round % 9))) + number;
                let values = vec![size; size as usize];
                sender.send(&key(&format!("{number} {round}")), tensor(sender, &values)).expect("room");
            }
        }
    });
    wait_for_returns(&one);
    wait_for_returns(&other);
}

#[test]
fn what_was_received_has_room_beside_the_arena_and_may_be_sent_on() {
    let mut small = options();
    small.limits.arenas.bytes = 1 << 16;
    let (sender, receiver) = (open(&options()), open(&small));
    let peer = connect(&receiver, &sender);
    let held: Vec<_> = (0..4_u32)
        .map(|number| {
            sender.send(&key("w"), tensor(&sender, &[number; 10_000])).expect("there is room");
            peer.receive(&key("w")).expect("was sent")
        })
        .collect();
    for (number, received) in (0..).zip(&held) {
        assert_eq!(received.as_slice::<u32>(), Ok(&[number; 10_000][..]));
    }
    wait_for_returns(&sender);
}

#[test]
fn a_tensor_that_was_asked_for_and_not_taken_is_for_the_next() {
    let (sender, _receiver, peer) = pair(&options());
    for value in 0..20 {
        sender.send(&key("w"), tensor(&sender, &[value; 100_000])).expect("there is room");
        let pending = peer.start_receive(&key("w")).expect("is linked");
        if value % 3 == 0 {
            while !pending.is_ready() {
                thread::yield_now();
            }
        } else if value % 3 == 1 {
            let until = clock::now() + Duration::from_micros(u64::from(value) * 20);
            while clock::now() < until {
                thread::yield_now();
            }
        }
        drop(pending);
        let received = peer.receive(&key("w")).expect("nobody has read it");
        assert_eq!(received.as_slice::<u32>(), Ok(&[value; 100_000][..]));
    }
    wait_for_returns(&sender);
}

#[test]
fn links_that_come_and_go_take_no_rank_for_ever() {
    // More than a device has ranks.
    const LINKS: u32 = 70;
    let (sender, receiver, _) = pair(&options());
    for value in 0..LINKS {
        sender.send(&key("w"), tensor(&sender, &[value; 10])).expect("there is room");
        let peer = connect(&receiver, &sender);
        let received = peer.receive(&key("w")).expect("was sent");
        assert_eq!((received.way(), received.as_slice::<u32>()), (TensorWay::Copied, Ok(&[value; 10][..])));
    }
    let until = clock::now() + LONG;
    while sender.counts().links > 0 || receiver.counts().links > 0 {
        assert!(clock::now() < until, "{:?}", sender.counts());
        thread::yield_now();
    }
}

#[test]
fn programs_with_one_secret_have_regions_and_others_are_refused() {
    let secret = |text: &str| {
        let mut options = options();
        options.secret = Some(Secret::new(text.as_bytes()));
        open(&options)
    };
    let (sender, same) = (secret("0123456789abcdef"), secret("0123456789abcdef"));
    sender.send(&key("w"), tensor(&sender, &[3])).expect("there is room");
    for stranger in [secret("0123456789abcdeg"), open(&options())] {
        let peer = connect(&stranger, &sender);
        let error = peer.receive(&key("w")).expect_err("has another secret");
        assert_eq!(error.kind(), FailureKind::Unavailable);
        assert!(error.to_string().contains("another secret"), "{error}");
    }
    let peer = connect(&same, &sender);
    let received = peer.receive(&key("w")).expect("was sent");
    assert_eq!((received.way(), received.as_slice::<u32>()), (TensorWay::Copied, Ok(&[3][..])));
}

#[test]
fn a_program_that_takes_no_fabric_of_the_other_gets_tensors_inline_or_is_told() {
    let with = |fabric, requires_regions| {
        let mut options = options();
        (options.fabric, options.requires_regions) = (fabric, requires_regions);
        open(&options)
    };
    let sender = with(ExchangeFabric::None, false);
    sender.send(&key("w"), tensor(&sender, &[5])).expect("there is room");
    let address = sender.address().to_string();
    let error = open(&options()).connect(&address).expect("an address").within(LONG).receive(&key("w"));
    let error = error.expect_err("has no regions");
    assert_eq!(error.kind(), FailureKind::Unavailable);
    assert!(error.to_string().contains("the other program has no regions; take a fabric"), "{error}");
    let lenient = with(options().fabric, false);
    let received = lenient.connect(&address).expect("an address").within(LONG).receive(&key("w"));
    assert_eq!(received.expect("was sent").way(), TensorWay::Inline);
    let (shm, gets) = (with(ExchangeFabric::Shm, true), open(&options()));
    let error = connect(&gets, &shm).share_regions();
    let error = error.expect_err("have no fabric in common").to_string();
    assert!(error.contains("the other program takes shm alone, and this one"), "{error}");
}
