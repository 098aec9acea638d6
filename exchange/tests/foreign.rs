//! What the interfaces of other languages stand on: parts of memory with guards, ends that are
//! told, short waits, and endpoints that are closed while others use them.

#[path = "../../tests/ports/mod.rs"]
mod ports;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use pleach_exchange::message::FailureKind;
use pleach_exchange::{
    Endpoint, EndpointOptions, ExchangeFabric, Key, Peer, ReceiveTensorError, TensorShape, TensorWay,
};
use pleach_transport::clock;
use pleach_vocabulary::DataType;

/// Longer than any test takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

fn open(fabric: ExchangeFabric) -> Endpoint {
    let mut options = EndpointOptions::default();
    options.fabric = fabric;
    Endpoint::open(&options).expect("a free port of loopback")
}

fn pair(fabric: ExchangeFabric) -> (Endpoint, Endpoint, Peer) {
    let (sender, receiver) = (open(fabric), open(fabric));
    let peer = receiver.connect(&sender.address().to_string()).expect("an address");
    (sender, receiver, peer.within(LONG))
}

fn key(name: &str) -> Key {
    Key::new(1, name).expect("a good name")
}

fn shape(data_type: DataType, dimensions: &[usize]) -> TensorShape {
    TensorShape::new(data_type, dimensions).expect("is small")
}

/// Counts its drops.
struct Guard(Arc<AtomicU32>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn parts_of_memory_are_sent_and_their_guards_drop_when_the_receiver_is_done() {
    for fabric in [ExchangeFabric::Auto, ExchangeFabric::None] {
        let (sender, _receiver, peer) = pair(fabric);
        if fabric == ExchangeFabric::Auto {
            peer.share_regions().expect("is on this host");
        }
        let mut memory = sender.untyped_tensor(&shape(DataType::U8, &[1000])).expect("there is memory");
        memory.as_bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        let memory = memory.share();
        let dropped = Arc::new(AtomicU32::new(0));
        for start in [0, 64, 960] {
            let part = memory.part(start, &shape(DataType::U16, &[4, 5])).expect("lies inside");
            let part = part.with_guard(Arc::new(Guard(dropped.clone())));
            sender.send(&key("w"), part).expect("there is room");
            assert_eq!(dropped.load(Ordering::Relaxed), 0);
            let received = peer.receive(&key("w")).expect("was sent");
            let expected: Vec<u8> = (start..start + 40).map(|at| at as u8).collect();
            assert_eq!((received.as_bytes(), received.shape().dimensions()), (&expected[..], &[4, 5][..]));
            let is_lent = received.way() == TensorWay::InPlace;
            assert_eq!(is_lent, fabric == ExchangeFabric::Auto);
            assert!(!is_lent || dropped.load(Ordering::Relaxed) == 0, "it is still read");
            drop(received);
            let until = clock::now() + LONG;
            while dropped.load(Ordering::Relaxed) == 0 {
                assert!(clock::now() < until, "its guard was not dropped");
                thread::yield_now();
            }
            assert_eq!(dropped.swap(0, Ordering::Relaxed), 1);
        }
        for (start, bytes) in [(1, 8), (992, 9), (usize::MAX - 63, 64), (1024, 0)] {
            assert!(memory.part(start, &shape(DataType::U8, &[bytes])).is_none(), "{bytes} at {start}");
        }
    }
}

#[test]
fn the_end_of_a_receive_is_told_once_whichever_way_it_ends() {
    let (sender, _receiver, peer) = pair(ExchangeFabric::Auto);
    let (told, heard) = mpsc::channel();
    let start = |name: &'static str, limit| {
        let pending = peer.within(limit).start_receive(&key(name)).expect("it listens");
        let told = told.clone();
        pending.on_end(move || told.send(name).expect("is heard"));
        pending
    };
    let sent = start("sent", LONG);
    assert!(heard.try_recv().is_err());
    sender
        .send(&key("sent"), sender.tensor::<u8>(&[3]).expect("there is memory").share())
        .expect("there is room");
    assert_eq!(heard.recv_timeout(LONG), Ok("sent"));
    assert!(sent.is_ready() && sent.wait().is_ok());
    let late = start("late", SHORT);
    assert_eq!(heard.recv_timeout(LONG), Ok("late"));
    assert_eq!(late.wait().expect_err("was never sent").kind(), FailureKind::Timeout);
    drop(start("cancelled", LONG));
    let closed = start("closed", LONG);
    sender.close();
    assert_eq!(heard.recv_timeout(LONG), Ok("closed"));
    assert_eq!(closed.wait().expect_err("its sender is gone").kind(), FailureKind::Unavailable);
    assert!(heard.try_recv().is_err(), "what was cancelled is not told");
}

#[test]
fn a_short_wait_takes_nothing_and_a_later_one_does() {
    let (sender, _receiver, peer) = pair(ExchangeFabric::Auto);
    assert!(!peer.is_linked());
    let mut pending = peer.start_receive(&key("w")).expect("it listens");
    assert!(peer.is_linked());
    assert!(!pending.wait_for(Duration::ZERO) && !pending.wait_for(SHORT));
    sender
        .send(&key("w"), sender.tensor::<f32>(&[2]).expect("there is memory").share())
        .expect("there is room");
    assert!(pending.wait_for(LONG));
    assert_eq!(pending.wait().expect("was sent").as_bytes(), [0; 8]);
    sender
        .send(&key("w"), sender.tensor::<u8>(&[2]).expect("there is memory").share())
        .expect("there is room");
    let received = peer.receive_or_pending(&key("w"), LONG).expect("it listens");
    assert_eq!(received.expect("was sent").as_bytes(), [0; 2]);
    let pending = peer.receive_or_pending(&key("v"), Duration::ZERO).expect("it listens");
    let pending = pending.expect_err("was not sent");
    sender
        .send(&key("v"), sender.tensor::<u8>(&[2]).expect("there is memory").share())
        .expect("there is room");
    assert_eq!(pending.wait().expect("was sent").as_bytes(), [0; 2]);
    let late = peer.within(SHORT).receive_or_pending(&key("v"), LONG).expect_err("was never sent");
    assert_eq!(late.kind(), FailureKind::Timeout);
    let mut late = peer.within(SHORT).start_receive(&key("w")).expect("it listens");
    assert!(late.wait_for(LONG), "its own deadline ends it");
    assert_eq!(late.wait().expect_err("was never sent").kind(), FailureKind::Timeout);
}

#[test]
fn a_closed_endpoint_ends_its_calls_and_takes_none() {
    let mut options = EndpointOptions::default();
    options.listen = format!("127.0.0.1:{}", ports::reserve(1));
    let (sender, receiver) =
        (open(ExchangeFabric::Auto), Endpoint::open(&options).expect("a port of its own"));
    let peer = receiver.connect(&sender.address().to_string()).expect("an address").within(LONG);
    let pending = peer.start_receive(&key("w")).expect("it listens");
    let waiting = thread::spawn({
        let peer = peer.clone();
        move || peer.receive(&key("v"))
    });
    let until = clock::now() + SHORT;
    while clock::now() < until {
        thread::yield_now();
    }
    let own = thread::spawn({
        let receiver = receiver.clone();
        move || receiver.receive(&key("own"), LONG)
    });
    let begun = clock::now();
    receiver.close();
    receiver.close();
    let returned = "it returns its error";
    let ended = [pending.wait(), waiting.join().expect(returned), own.join().expect(returned)];
    for result in ended.into_iter().chain([peer.receive(&key("w"))]) {
        assert_eq!(result.expect_err("is closed").kind(), FailureKind::Unavailable);
    }
    assert!(clock::now().since(begun) < LONG / 2, "they do not wait for their deadlines");
    let error = peer.receive(&key("w")).expect_err("is closed");
    assert!(matches!(error, ReceiveTensorError::Link { .. }), "{error}");
    assert!(error.to_string().contains("the endpoint was closed"), "{error}");
    let tensor = receiver.tensor::<u8>(&[1]).expect("there is memory").share();
    let error = receiver.send(&key("w"), tensor.clone()).expect_err("is closed");
    assert_eq!(error.kind(), FailureKind::Unavailable);
    let address = receiver.address().to_string();
    let other = sender.connect(&address).expect("an address").within(LONG).receive(&key("w"));
    assert_eq!(other.expect_err("nobody listens").kind(), FailureKind::Unavailable);
    assert!(Endpoint::open(&options).is_ok(), "its port is free again");
}

#[test]
fn a_send_waits_no_longer_than_it_is_told() {
    let mut options = EndpointOptions::default();
    options.limits.server.table.bytes_held = 100;
    let sender = Endpoint::open(&options).expect("a free port of loopback");
    let tensor = sender.tensor::<u8>(&[80]).expect("there is memory").share();
    sender.send(&key("a"), tensor.clone()).expect("there is room");
    let error = sender.send_within(&key("b"), tensor.clone(), SHORT).expect_err("there is none");
    assert_eq!(error.kind(), FailureKind::Timeout, "{error}");
    let waiting = thread::spawn({
        let sender = sender.clone();
        move || sender.send(&key("b"), tensor)
    });
    let until = clock::now() + SHORT;
    while clock::now() < until {
        thread::yield_now();
    }
    sender.close();
    let error = waiting.join().expect("it returns its error").expect_err("is closed");
    assert_eq!(error.kind(), FailureKind::Unavailable, "{error}");
    assert!(clock::now().since(until) < LONG / 2, "it does not wait for its deadline");
}
