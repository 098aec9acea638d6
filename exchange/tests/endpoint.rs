//! Endpoints that send and receive over sockets, as programs use them.

#[path = "../../tests/ports/mod.rs"]
mod ports;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use pleach_exchange::message::FailureKind;
use pleach_exchange::{
    Endpoint, EndpointOptions, ExchangeFabric, Key, Peer, PendingTensor, ReceiveTensorError, SharedTensor,
    TensorWay,
};
use pleach_transport::{Secret, clock};

/// Longer than any test takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(50);

fn inline() -> EndpointOptions {
    let mut options = EndpointOptions::default();
    options.fabric = ExchangeFabric::None;
    options
}

fn open(options: &EndpointOptions) -> Endpoint {
    Endpoint::open(options).expect("a free port of loopback")
}

/// A sender, a receiver, and the sender as the receiver sees it.
fn pair(options: &EndpointOptions) -> (Endpoint, Endpoint, Peer) {
    let (sender, receiver) = (open(options), open(options));
    let peer = receiver.connect(&sender.address().to_string()).expect("an address");
    (sender, receiver, peer.within(LONG))
}

fn key(step: u64, name: &str) -> Key {
    Key::new(step, name).expect("a good name")
}

fn tensor(endpoint: &Endpoint, values: &[f32]) -> SharedTensor {
    let mut tensor = endpoint.tensor::<f32>(&[values.len()]).expect("there is memory");
    tensor.copy_from_slice(values);
    tensor.share()
}

fn kind<T>(result: Result<T, ReceiveTensorError>) -> (FailureKind, String) {
    let error = result.err().expect("it fails");
    (error.kind(), error.to_string())
}

#[test]
fn tensors_of_a_key_come_in_the_order_in_which_they_were_sent() {
    let (sender, _receiver, peer) = pair(&inline());
    for value in 0..5 {
        sender.send(&key(1, "w"), tensor(&sender, &[value as f32; 3])).expect("there is room");
    }
    for value in 0..5 {
        let received = peer.receive(&key(1, "w")).expect("was sent");
        assert_eq!(received.as_slice::<f32>(), Ok(&[value as f32; 3][..]));
        assert_eq!((received.way(), received.shape().to_string()), (TensorWay::Inline, "f32[3]".to_owned()));
    }
    assert_eq!(sender.counts().bytes_held, 0);
}

#[test]
fn tensors_of_all_sizes_come_whole_to_several_receivers_at_once() {
    let (sender, _receiver, peer) = pair(&inline());
    let sizes = [0, 1, 1023, 1 << 16, 3 << 20];
    thread::scope(|scope| {
        for (number, size) in sizes.into_iter().enumerate() {
            let (peer, name) = (&peer, format!("tensor {number}"));
            scope.spawn(move || {
                let received = peer.receive(&key(1, &name)).expect("is sent");
                let values = received.as_slice::<u8>().expect("bytes");
                assert!(
                    values.len() == size && values.iter().enumerate().all(|(at, byte)| *byte == at as u8)
                );
            });
        }
        // The largest first, so that the others come behind it.
        for (number, size) in sizes.into_iter().enumerate().rev() {
            let mut tensor = sender.tensor::<u8>(&[size]).expect("there is memory");
            tensor.iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
            sender.send(&key(1, &format!("tensor {number}")), tensor.share()).expect("there is room");
        }
    });
}

#[test]
fn a_tensor_has_the_type_and_dimensions_that_it_was_made_with() {
    let (sender, _receiver, peer) = pair(&inline());
    let made = sender.tensor::<i64>(&[2, 3]).expect("there is memory");
    sender.send(&key(1, "w"), made.share()).expect("there is room");
    let received = peer.receive(&key(1, "w")).expect("was sent");
    assert_eq!(received.shape().dimensions(), [2, 3]);
    let error = received.as_slice::<f32>().expect_err("is of another type");
    assert_eq!(error.to_string(), "the tensor has elements of type i64, and f32 was asked for");
    let scalar = sender.tensor::<u16>(&[]).expect("there is memory");
    sender.send(&key(1, "scalar"), scalar.share()).expect("there is room");
    assert_eq!(peer.receive(&key(1, "scalar")).expect("was sent").shape().to_string(), "u16[]");
}

#[test]
fn a_receive_that_has_no_tensor_fails_at_its_deadline_and_takes_none_later() {
    let (sender, _receiver, peer) = pair(&inline());
    let address = peer.address().to_owned();
    peer.open().expect("it listens");
    let (kind_of_error, text) = kind(peer.within(SHORT).receive(&key(3, "w")));
    assert_eq!(kind_of_error, FailureKind::Timeout);
    assert!(text.contains("'w' of step 3") && text.contains(&address), "{text}");
    let pending = peer.start_receive(&key(3, "w")).expect("it listens");
    assert!(!pending.is_ready());
    drop(pending);
    sender.send(&key(3, "w"), tensor(&sender, &[1.0])).expect("there is room");
    let received = peer.receive(&key(3, "w")).expect("nobody has taken it");
    assert_eq!(received.as_slice::<f32>(), Ok(&[1.0][..]));
}

#[test]
fn a_tensor_that_came_and_was_not_taken_is_for_the_next() {
    let (sender, _receiver, peer) = pair(&inline());
    sender.send(&key(1, "w"), tensor(&sender, &[7.0])).expect("there is room");
    // Cancelled at different times of its way.
    for pause_us in [0, 20, 50, 100, 200, 500, 5_000] {
        let pending = peer.start_receive(&key(1, "w")).expect("it listens");
        let until = pleach_transport::clock::now() + Duration::from_micros(pause_us);
        while pleach_transport::clock::now() < until {
            std::hint::spin_loop();
        }
        drop(pending);
    }
    let received = peer.receive(&key(1, "w")).expect("is there");
    assert_eq!(received.as_slice::<f32>(), Ok(&[7.0][..]));
}

#[test]
fn an_aborted_step_fails_its_receives_until_it_is_cleaned_up() {
    let (sender, _receiver, peer) = pair(&inline());
    let pending = peer.start_receive(&key(5, "w")).expect("it listens");
    sender.abort(5, "worker 3 is\nlost");
    let (kind_of_error, text) = kind(pending.wait());
    assert_eq!(kind_of_error, FailureKind::Aborted);
    assert!(text.ends_with("the step was aborted: worker 3 is lost"), "{text}");
    assert_eq!(kind(peer.receive(&key(5, "w"))).0, FailureKind::Aborted);
    let refused = sender.send(&key(5, "w"), tensor(&sender, &[1.0])).expect_err("the step is over");
    assert!(refused.to_string().contains("aborted"), "{refused}");
    sender.clean_up(5);
    sender.send(&key(5, "w"), tensor(&sender, &[2.0])).expect("the step begins anew");
    assert_eq!(peer.receive(&key(5, "w")).expect("was sent").as_slice::<f32>(), Ok(&[2.0][..]));
}

#[test]
fn a_restarted_sender_is_another_one() {
    let mut options = inline();
    options.listen = format!("127.0.0.1:{}", ports::reserve(1));
    let (sender, receiver) = (open(&options), open(&inline()));
    let address = sender.address().to_string();
    let peer = receiver.connect(&address).expect("an address").within(LONG);
    sender.send(&key(1, "w"), tensor(&sender, &[1.0])).expect("there is room");
    peer.receive(&key(1, "w")).expect("was sent");
    drop(sender);
    let (kind_of_error, text) = kind(peer.receive(&key(1, "w")));
    assert_eq!(kind_of_error, FailureKind::Unavailable, "{text}");
    let sender = open(&options);
    sender.send(&key(1, "w"), tensor(&sender, &[2.0])).expect("there is room");
    let (kind_of_error, text) = kind(peer.receive(&key(1, "w")));
    assert_eq!(kind_of_error, FailureKind::Aborted);
    assert!(text.contains("was restarted") && text.contains(&address), "{text}");
    let anew = receiver.connect(&address).expect("an address").within(LONG);
    assert_eq!(anew.receive(&key(1, "w")).expect("was sent").as_slice::<f32>(), Ok(&[2.0][..]));
}

#[test]
fn programs_with_different_secrets_share_nothing() {
    let with = |secret: &[u8]| {
        let mut options = inline();
        options.secret = (!secret.is_empty()).then(|| Secret::new(secret));
        open(&options)
    };
    let (sender, same) = (with(b"0123456789abcdef"), with(b"0123456789abcdef"));
    sender.send(&key(1, "w"), tensor(&sender, &[1.0])).expect("there is room");
    let address = sender.address().to_string();
    for other in [with(b"another secret of"), with(b"")] {
        let peer = other.connect(&address).expect("an address").within(LONG);
        let (kind_of_error, text) = kind(peer.receive(&key(1, "w")));
        assert_eq!(kind_of_error, FailureKind::Unavailable);
        assert!(text.contains("another secret") && text.contains(&address), "{text}");
    }
    let peer = same.connect(&address).expect("an address").within(LONG);
    assert!(peer.receive(&key(1, "w")).is_ok(), "the tensor is still there");
}

#[test]
fn an_address_without_an_exchange_is_an_error_that_says_what_is_there() {
    let receiver = open(&inline());
    for wrong in ["", "localhost", ":1", "localhost:x", "localhost:0", "localhost:70000"] {
        assert!(receiver.connect(wrong).is_err(), "{wrong}");
    }
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("is bound").to_string();
    let peer = receiver.connect(&address).expect("an address");
    // So long that the receive dials.
    let (kind_of_error, text) = kind(peer.within(Duration::from_secs(2)).receive(&key(1, "w")));
    assert_eq!(kind_of_error, FailureKind::Timeout, "{text}");
    let web = thread::spawn(move || {
        // The first one is of the receive that has ended.
        for stream in listener.incoming().take(2) {
            let mut stream = stream.expect("a connection");
            let _ = stream.read(&mut [0; 64]);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let (kind_of_error, text) = kind(peer.within(LONG).receive(&key(1, "w")));
    assert_eq!(kind_of_error, FailureKind::Unavailable);
    assert!(text.contains("does not speak the protocol"), "{text}");
    web.join().expect("it answers twice");
    let (kind_of_error, text) = kind(peer.within(LONG).receive(&key(1, "w")));
    assert_eq!(kind_of_error, FailureKind::Unavailable);
    assert!(text.contains("was not reached"), "{text}");
}

#[test]
fn a_send_beyond_the_limit_waits_for_a_receiver_or_its_deadline() {
    let mut options = inline();
    options.limits.server.table.bytes_held = 100;
    options.send_wait = SHORT;
    let (sender, _receiver, peer) = pair(&options);
    sender.send(&key(1, "a"), tensor(&sender, &[0.0; 20])).expect("there is room");
    let error = sender.send(&key(1, "b"), tensor(&sender, &[0.0; 20])).expect_err("there is none");
    assert!(error.to_string().contains("80 bytes of at most 100 are held"), "{error}");
    let error = sender.send(&key(1, "b"), tensor(&sender, &[0.0; 26])).expect_err("is too large");
    assert!(error.to_string().contains("at most 100 bytes are held"), "{error}");
    let pending = peer.start_receive(&key(1, "b")).expect("it listens");
    // A receive that waits takes a tensor for which there is no room.
    while sender.send(&key(1, "b"), tensor(&sender, &[3.0; 20])).is_err() {}
    assert_eq!(pending.wait().expect("was sent").as_slice::<f32>(), Ok(&[3.0; 20][..]));
    peer.receive(&key(1, "a")).expect("was sent");
    sender.send(&key(1, "c"), tensor(&sender, &[0.0; 20])).expect("there is room again");
}

#[test]
fn many_calls_that_come_at_once_are_all_answered() {
    let (sender, _receiver, peer) = pair(&inline());
    let names: Vec<String> = (0..500).map(|number| number.to_string()).collect();
    let ask = |name: &String| peer.start_receive(&key(1, name)).expect("it listens");
    let pending: Vec<_> = names.iter().map(ask).collect();
    for (number, name) in names.iter().enumerate() {
        sender.send(&key(1, name), tensor(&sender, &[number as f32])).expect("there is room");
    }
    for (number, pending) in pending.into_iter().enumerate() {
        let received = pending.wait().expect("was sent");
        assert_eq!(received.as_slice::<f32>(), Ok(&[number as f32][..]));
    }
}

#[test]
fn a_program_receives_its_own_tensors() {
    let endpoint = open(&inline());
    endpoint.send(&key(1, "w"), tensor(&endpoint, &[4.0])).expect("there is room");
    let received = endpoint.receive(&key(1, "w"), LONG).expect("was sent");
    assert_eq!((received.way(), received.as_slice::<f32>()), (TensorWay::Local, Ok(&[4.0][..])));
    assert_eq!(kind(endpoint.receive(&key(1, "w"), SHORT)).0, FailureKind::Timeout);
}

#[test]
fn published_tensors_are_for_all_and_another_name_fails_at_once() {
    let (sender, _receiver, peer) = pair(&inline());
    let tensors = [("weight".to_owned(), tensor(&sender, &[1.0, 2.0]))];
    sender.publish(0, BTreeMap::from(tensors));
    for _ in 0..3 {
        let received = peer.receive(&key(0, "weight")).expect("is published");
        assert_eq!(received.as_slice::<f32>(), Ok(&[1.0, 2.0][..]));
    }
    let (kind_of_error, text) = kind(peer.receive(&key(0, "wieght")));
    assert_eq!(kind_of_error, FailureKind::NotFound);
    assert!(text.ends_with("no tensor 'wieght' of step 0, did you mean 'weight'?; 1 are offered"), "{text}");
}

#[test]
fn receives_that_wait_get_what_is_published_then() {
    let (sender, _receiver, peer) = pair(&inline());
    let [found, missed] = ["weight", "bias"].map(|name| peer.start_receive(&key(0, name)).expect("is asked"));
    let own = {
        let sender = sender.clone();
        std::thread::spawn(move || sender.receive(&key(0, "weight"), LONG))
    };
    // Whether they wait already or ask later is the same to them.
    sender.publish(0, BTreeMap::from([("weight".to_owned(), tensor(&sender, &[1.0]))]));
    assert_eq!(found.wait().expect("is published").as_slice::<f32>(), Ok(&[1.0][..]));
    assert_eq!(kind(missed.wait()).0, FailureKind::NotFound);
    let own = own.join().expect("does not panic").expect("is published");
    assert_eq!(own.as_slice::<f32>(), Ok(&[1.0][..]));
}

#[test]
fn metrics_show_what_was_received_and_is_held() {
    let mut options = inline();
    options.metrics = Some("127.0.0.1:0".parse().expect("an address"));
    let (sender, receiver, peer) = pair(&options);
    sender.send(&key(1, "w"), tensor(&sender, &[1.0; 4])).expect("there is room");
    peer.receive(&key(1, "w")).expect("was sent");
    sender.send(&key(1, "x"), tensor(&sender, &[1.0; 2])).expect("there is room");
    let ask = |endpoint: &Endpoint| {
        let address = endpoint.metrics_address().expect("serves metrics");
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").expect("it listens");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        text
    };
    let (sent, received) = (ask(&sender), ask(&receiver));
    assert!(sent.contains("pleach_exchange_held_bytes 8\n"), "{sent}");
    assert!(sent.contains("bytes_total{direction=\"sent\",way=\"inline\"} 16\n"), "{sent}");
    assert!(sent.contains("inline_total{reason=\"no_regions\"} 1\n"), "{sent}");
    assert!(received.contains("tensors_total{direction=\"received\",way=\"inline\"} 1\n"), "{received}");
    assert!(received.contains("receive_seconds_count 1\n"), "{received}");
}

#[test]
fn memory_of_tensors_is_used_again_and_has_a_limit() {
    let mut options = inline();
    options.limits.arenas.bytes = 1 << 16;
    let endpoint = open(&options);
    for _ in 0..100 {
        drop(endpoint.tensor::<u8>(&[60_000]).expect("the one before is gone"));
    }
    let _one = endpoint.tensor::<u8>(&[60_000]).expect("there is room");
    let error = endpoint.tensor::<u8>(&[60_000]).expect_err("there is none");
    assert!(error.to_string().contains("no room for a tensor of 60000 bytes"), "{error}");
}

#[test]
fn a_step_that_is_published_ends_by_clean_up_and_by_abort() {
    let (sender, _receiver, peer) = pair(&inline());
    let published = |value: f32| [("w".to_owned(), tensor(&sender, &[value]))].into();
    for step in 0..2 {
        sender.publish(step, published(1.0));
        assert_eq!(peer.receive(&key(step, "w")).expect("is published").as_slice::<f32>(), Ok(&[1.0][..]));
        // The program itself has it, too.
        let own = sender.receive(&key(step, "w"), LONG).expect("is published");
        assert_eq!((own.way(), own.as_slice::<f32>()), (TensorWay::Local, Ok(&[1.0][..])));
        let (error, text) = kind(sender.receive(&key(step, "v"), LONG));
        assert_eq!(error, FailureKind::NotFound, "{text}");
    }
    sender.clean_up(0);
    // As if it had never been: tensors of the step are sent one by one.
    assert_eq!(kind(peer.within(SHORT).receive(&key(0, "w"))).0, FailureKind::Timeout);
    sender.send(&key(0, "w"), tensor(&sender, &[2.0])).expect("there is room");
    assert_eq!(peer.receive(&key(0, "w")).expect("was sent").as_slice::<f32>(), Ok(&[2.0][..]));
    sender.abort(1, "over");
    let (error, text) = kind(peer.receive(&key(1, "w")));
    assert!(error == FailureKind::Aborted && text.contains("over"), "{text}");
}

/// A way to an address on which nothing comes back after a while, as if the peer were stopped.
struct Relay {
    address: SocketAddr,
    /// How many bytes may still come back.
    left: Arc<AtomicUsize>,
}

impl Relay {
    fn new(to: SocketAddr, left: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("is bound");
        let left = Arc::new(AtomicUsize::new(left));
        let of_thread = left.clone();
        thread::spawn(move || {
            let (near, _) = listener.accept().expect("somebody comes");
            let far = TcpStream::connect(to).expect("it listens");
            let (mut from, mut into) =
                (near.try_clone().expect("a socket"), far.try_clone().expect("a socket"));
            thread::spawn(move || std::io::copy(&mut from, &mut into));
            let (mut from, mut into, mut buffer) = (far, near, [0; 4096]);
            while let Ok(count) = from.read(&mut buffer)
                && count > 0
            {
                // Relaxed: nothing else is read after it.
                let before = of_thread.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                    Some(left.saturating_sub(count))
                });
                let may_pass = before.expect("is always changed").min(count);
                if into.write_all(&buffer[..may_pass]).is_err() {
                    return;
                }
            }
        });
        Self { address, left }
    }

    fn stop(&self) {
        self.left.store(0, Ordering::Relaxed);
    }
}

/// Whoever waits for nothing but to be told.
fn expect_timeout(pending: PendingTensor) {
    let (ended, end) = mpsc::channel();
    pending.on_end(move || ended.send(()).expect("is heard"));
    end.recv_timeout(LONG).expect("nobody calls this endpoint");
    assert!(pending.is_ready());
    assert_eq!(kind(pending.wait()).0, FailureKind::Timeout);
}

#[test]
fn a_receive_that_nobody_waits_for_ends_at_its_deadline() {
    let sender = open(&inline());
    let relay = Relay::new(sender.address(), usize::MAX);
    let receiver = open(&inline());
    let peer = receiver.connect(&relay.address.to_string()).expect("an address").within(LONG);
    peer.open().expect("it listens");
    relay.stop();
    let far = peer.start_receive(&key(1, "far")).expect("it listens");
    // The endpoint's thread sleeps by then, until the far deadline.
    thread::park_timeout(SHORT);
    expect_timeout(peer.within(SHORT).start_receive(&key(1, "w")).expect("it listens"));
    assert!(!far.is_ready());
}

#[test]
fn a_receive_whose_bytes_stop_on_their_way_ends_at_its_deadline() {
    let sender = open(&inline());
    let relay = Relay::new(sender.address(), 1 << 20);
    let receiver = open(&inline());
    let peer = receiver.connect(&relay.address.to_string()).expect("an address").within(LONG);
    peer.open().expect("it listens");
    let long = sender.tensor::<u8>(&[4 << 20]).expect("there is memory");
    sender.send(&key(1, "w"), long.share()).expect("there is room");
    expect_timeout(peer.within(Duration::from_secs(1)).start_receive(&key(1, "w")).expect("it listens"));
}

#[test]
fn an_endpoint_that_is_closed_waits_for_no_peer() {
    // Nobody ever answers there.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let endpoint = open(&inline());
    let address = silent.local_addr().expect("is bound").to_string();
    let peer = endpoint.connect(&address).expect("an address").within(LONG);
    thread::scope(|scope| {
        let receive = scope.spawn(|| kind(peer.receive(&key(1, "w"))));
        // It has connected, and waits for an introduction.
        let _connection = silent.accept().expect("it dials");
        let since = clock::now();
        endpoint.close();
        let (error, text) = receive.join().expect("does not panic");
        assert!(error == FailureKind::Unavailable && text.contains("the endpoint was closed"), "{text}");
        assert!(clock::now().since(since) < LONG / 3, "it waits for nobody");
    });
    let (error, text) = kind(peer.receive(&key(1, "w")));
    assert!(error == FailureKind::Unavailable && text.contains("the endpoint was closed"), "{text}");
}

#[test]
fn links_to_others_take_no_place_of_those_that_ask_and_a_full_program_says_so() {
    let mut options = inline();
    options.limits.server.leases.links = 1;
    let (other, full) = (open(&inline()), open(&options));
    let to_other = full.connect(&other.address().to_string()).expect("an address").within(LONG);
    to_other.open().expect("it listens");
    let receivers = [(); 2].map(|()| open(&inline()));
    let peers = receivers
        .each_ref()
        .map(|receiver| receiver.connect(&full.address().to_string()).expect("an address").within(LONG));
    peers[0].open().expect("there is one place");
    let error = peers[1].open().expect_err("it is taken").to_string();
    assert!(error.contains("links"), "{error}");
}

#[test]
fn a_request_that_looks_up_between_turns_keeps_its_place() {
    const TURN: Duration = Duration::from_millis(1);
    let mut options = inline();
    options.limits.server.table.bytes_held = 1000;
    let sender = open(&options);
    let bytes = |count: usize| sender.tensor::<u8>(&[count]).expect("there is memory").share();
    sender.send(&key(1, "first"), bytes(800)).expect("there is room");
    let turns = AtomicUsize::new(0);
    thread::scope(|scope| {
        let large = scope.spawn(|| {
            sender.send_while(&key(1, "large"), bytes(900), LONG, TURN, || {
                turns.fetch_add(1, Ordering::Relaxed);
                true
            })
        });
        while turns.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        let small = scope.spawn(|| sender.send_within(&key(1, "small"), bytes(100), LONG));
        let since = turns.load(Ordering::Relaxed);
        while turns.load(Ordering::Relaxed) < since + 30 {
            thread::yield_now();
        }
        assert!(!small.is_finished(), "it overtook the large one");
        drop(sender.receive(&key(1, "first"), LONG).expect("was sent"));
        assert_eq!(large.join().expect("does not panic"), Some(Ok(())));
        assert_eq!(small.join().expect("does not panic"), Ok(()));
    });
    // A request that is given up leaves nothing behind.
    let given_up = sender.send_while(&key(1, "never"), bytes(900), LONG, TURN, || false);
    assert_eq!(given_up, None);
    assert!(sender.receive_while(&key(2, "never"), LONG, TURN, || false).is_none());
    for name in ["large", "small"] {
        drop(sender.receive(&key(1, name), LONG).expect("was sent"));
    }
    let late =
        sender.receive_while(&key(1, "never"), SHORT, TURN, || true).expect("goes on until its deadline");
    assert_eq!(kind(late).0, FailureKind::Timeout);
    sender.send(&key(2, "never"), bytes(1)).expect("there is room");
    assert_eq!(sender.counts().bytes_held, 1, "nobody takes it");
}
