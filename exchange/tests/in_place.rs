//! Tensors that are received in the memory of their sender.

mod pairs;

use std::thread;
use std::time::Duration;

use pleach_exchange::message::FailureKind;
use pleach_exchange::{Endpoint, EndpointOptions, ExchangeFabric, Peer, TensorWay};
use pleach_transport::clock;

use pairs::{LONG, connect, key, open, tensor, wait_for_returns};

/// A sender, a receiver, and the sender as the receiver sees it, with regions.
fn pair(options: &EndpointOptions) -> (Endpoint, Endpoint, Peer) {
    let (sender, receiver) = (open(options), open(&EndpointOptions::default()));
    let peer = connect(&receiver, &sender);
    peer.share_regions().expect("both are on this host");
    (sender, receiver, peer)
}

#[test]
fn tensors_of_all_sizes_are_read_where_they_are() {
    let (sender, receiver, peer) = pair(&EndpointOptions::default());
    for size in [0, 1, 1000, 1 << 20] {
        let values: Vec<u32> = (0..size).collect();
        sender.send(&key("w"), tensor(&sender, &values)).expect("there is room");
        let received = peer.receive(&key("w")).expect("was sent");
        assert_eq!(received.way(), TensorWay::InPlace);
        assert_eq!(received.as_slice::<u32>(), Ok(&values[..]));
    }
    wait_for_returns(&sender);
    let counts = receiver.counts();
    assert_eq!((counts.in_place.tensors, counts.inline.tensors), (4, 0));
    assert_eq!((counts.receive_latencies.count(), counts.field_latencies.count()), (4, 0));
    assert_eq!(sender.counts().sent_in_place, counts.in_place);
}

#[test]
fn what_is_held_stays_while_its_sender_sends_more_and_is_used_again_after() {
    let mut options = EndpointOptions::default();
    options.limits.arenas.bytes = 1 << 16;
    let (sender, _receiver, peer) = pair(&options);
    sender.send(&key("held"), tensor(&sender, &[7; 8000])).expect("there is room");
    let held = peer.receive(&key("held")).expect("was sent");
    for value in 0..20 {
        // Only one more has room beside the one that is held.
        let until = clock::now() + LONG;
        let mut made = sender.tensor::<u32>(&[8000]);
        while made.is_err() && clock::now() < until {
            thread::yield_now();
            made = sender.tensor::<u32>(&[8000]);
        }
        let mut made = made.expect("the one before is returned");
        made.fill(value);
        sender.send(&key("w"), made.share()).expect("there is room");
        let received = peer.receive(&key("w")).expect("was sent");
        assert_eq!(received.as_slice::<u32>(), Ok(&[value; 8000][..]));
        assert_eq!(held.as_slice::<u32>(), Ok(&[7; 8000][..]));
    }
    let clone = held.clone();
    drop(held);
    assert_eq!(clone.as_slice::<u32>(), Ok(&[7; 8000][..]), "a clone holds it too");
    drop(clone);
    wait_for_returns(&sender);
    assert!(sender.tensor::<u32>(&[16_000]).is_ok(), "all memory is free again");
}

#[test]
fn a_tensor_that_was_lent_and_not_taken_is_for_the_next() {
    let (sender, _receiver, peer) = pair(&EndpointOptions::default());
    for value in 0..20 {
        sender.send(&key("w"), tensor(&sender, &[value; 10])).expect("there is room");
        let pending = peer.start_receive(&key("w")).expect("is linked");
        if value % 2 == 0 {
            // Its tensor has come.
            while !pending.is_ready() {
                thread::yield_now();
            }
        }
        drop(pending);
        let received = peer.receive(&key("w")).expect("nobody has read it");
        assert_eq!(received.as_slice::<u32>(), Ok(&[value; 10][..]));
    }
    wait_for_returns(&sender);
}

#[test]
fn a_tensor_outlives_the_handles_of_its_endpoint_and_is_returned_all_the_same() {
    let (sender, receiver, peer) = pair(&EndpointOptions::default());
    sender.send(&key("w"), tensor(&sender, &[3; 100])).expect("there is room");
    let held = peer.receive(&key("w")).expect("was sent");
    drop((receiver, peer));
    assert_eq!(held.as_slice::<u32>(), Ok(&[3; 100][..]));
    assert!(sender.counts().bytes_lent > 0);
    drop(held);
    wait_for_returns(&sender);
}

#[test]
fn a_receive_waits_for_its_tensor_and_a_sleeper_is_woken() {
    let (sender, _receiver, peer) = pair(&EndpointOptions::default());
    thread::scope(|scope| {
        for number in 0..4 {
            let peer = &peer;
            scope.spawn(move || {
                for round in 0..50 {
                    let name = format!("tensor {number} {round}");
                    let received = peer.receive(&key(&name)).expect("is sent");
                    assert_eq!(received.as_slice::<u32>(), Ok(&[number * 100 + round][..]));
                }
            });
        }
        for round in 0..50 {
            for number in 0..4 {
                let name = format!("tensor {number} {round}");
                sender.send(&key(&name), tensor(&sender, &[number * 100 + round])).expect("there is room");
            }
            // At different times: both ends sleep now and then.
            let until = clock::now() + Duration::from_micros(u64::from(round) * 20);
            while clock::now() < until {
                thread::yield_now();
            }
        }
    });
}

#[test]
fn more_calls_than_an_inbox_has_places_are_all_answered() {
    let (sender, _receiver, peer) = pair(&EndpointOptions::default());
    let names: Vec<String> = (0..200).map(|number| format!("tensor {number}")).collect();
    let pending: Vec<_> =
        names.iter().map(|name| peer.start_receive(&key(name)).expect("is linked")).collect();
    for (number, name) in (0..).zip(&names) {
        sender.send(&key(name), tensor(&sender, &[number])).expect("there is room");
    }
    for (number, pending) in (0..).zip(pending) {
        let received = pending.wait().expect("was sent");
        assert_eq!(received.as_slice::<u32>(), Ok(&[number][..]));
    }
    wait_for_returns(&sender);
}

#[test]
fn where_no_memory_is_shared_tensors_come_inline_and_a_receiver_that_requires_it_is_told() {
    let options = |host: &str, fabric, requires_regions| {
        let mut options = EndpointOptions::default();
        (options.host, options.fabric) = (Some(host.to_owned()), fabric);
        options.requires_regions = requires_regions;
        options
    };
    let sender = open(&options("a", ExchangeFabric::Auto, false));
    let without = open(&options("a", ExchangeFabric::None, false));
    let address = sender.address().to_string();
    let connect =
        |receiver: &Endpoint, address: &str| receiver.connect(address).expect("an address").within(LONG);
    for receiver in
        [open(&options("b", ExchangeFabric::Shm, false)), open(&options("a", ExchangeFabric::None, false))]
    {
        sender.send(&key("w"), tensor(&sender, &[1])).expect("there is room");
        let received = connect(&receiver, &address).receive(&key("w")).expect("was sent");
        assert_eq!(received.way(), TensorWay::Inline);
    }
    let (other_host, strict) =
        (open(&options("a", ExchangeFabric::Shm, false)), open(&options("b", ExchangeFabric::Shm, true)));
    let error = connect(&strict, &other_host.address().to_string()).receive(&key("w"));
    let error = error.expect_err("is on another host");
    assert_eq!(error.kind(), FailureKind::Unavailable);
    assert!(error.to_string().contains("the two programs are on different hosts; take a fabric"), "{error}");
    let strict = open(&options("a", ExchangeFabric::Shm, true));
    let error = connect(&strict, &without.address().to_string()).receive(&key("w"));
    assert!(error.expect_err("shares none").to_string().contains("the other program has no regions"));
    sender.send(&key("w"), tensor(&sender, &[2])).expect("there is room");
    let received = connect(&strict, &address).receive(&key("w")).expect("was sent");
    assert_eq!(received.way(), TensorWay::InPlace, "the first tensor waits for regions");
    let error = Endpoint::open(&options("a", ExchangeFabric::None, true)).expect_err("has no regions");
    assert!(error.to_string().contains("fabric 'none' has none here"), "{error}");
}

#[test]
fn a_tensor_that_was_lent_to_a_receive_that_ended_with_its_link_is_for_the_next() {
    let (sender, receiver) = (open(&EndpointOptions::default()), open(&EndpointOptions::default()));
    for round in 0..200_u32 {
        let peer = connect(&receiver, &sender);
        peer.share_regions().expect("both are on this host");
        let pending = peer.start_receive(&key("w")).expect("it listens");
        sender.send(&key("w"), tensor(&sender, &[round; 100])).expect("there is room");
        // The answer may be anywhere between the two.
        drop((pending, peer));
        let next = connect(&receiver, &sender).receive(&key("w")).expect("nobody has taken it");
        assert_eq!(next.as_slice::<u32>(), Ok(&[round; 100][..]));
    }
    wait_for_returns(&sender);
    let until = clock::now() + LONG;
    while sender.counts().links > 0 {
        assert!(clock::now() < until, "{:?}", sender.counts());
        thread::yield_now();
    }
}

#[test]
fn what_is_held_when_its_link_ends_is_lent_until_it_is_dropped() {
    let (sender, receiver, peer) = pair(&EndpointOptions::default());
    sender.send(&key("w"), tensor(&sender, &[1; 100])).expect("there is room");
    let held = peer.receive(&key("w")).expect("was sent");
    sender.send(&key("w"), tensor(&sender, &[2; 100])).expect("there is room");
    receiver.close();
    // The link has ended, and the bytes stay.
    let until = clock::now() + LONG;
    while sender.counts().links > 0 {
        assert!(clock::now() < until, "{:?}", sender.counts());
        thread::yield_now();
    }
    assert!(sender.counts().bytes_lent > 0 && held.as_slice::<u32>() == Ok(&[1; 100][..]));
    drop(held);
    wait_for_returns(&sender);
}
