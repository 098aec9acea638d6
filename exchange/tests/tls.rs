//! Links that speak TLS, and somebody between two programs who listens, changes and cuts.

mod pairs;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;

use pleach_exchange::{Endpoint, EndpointOptions, ExchangeFabric, Peer, TensorWay};
use pleach_transport::Secret;
use pleach_transport::tls::{CertificateFiles, Tls, TlsMode};

use pairs::{LONG, connect, key, open, tensor, wait_for_returns};

const SECRET: &[u8] = b"a secret of these tests";

fn options(tls: Tls) -> EndpointOptions {
    let mut options = EndpointOptions::default();
    options.fabric = ExchangeFabric::None;
    options.secret = Some(Secret::new(SECRET).with_tls(tls));
    options
}

fn mode(mode: TlsMode) -> Tls {
    Tls::new(mode, None).expect("takes no file")
}

fn certified(name: &str, authority: &str) -> Tls {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../transport/tests/certificates");
    let file = |name: String| folder.join(name);
    let files = CertificateFiles {
        certificate: file(format!("{name}.pem")),
        key: file(format!("{name}.key")),
        authority: file(format!("{authority}.pem")),
    };
    Tls::new(TlsMode::On, Some(&files)).expect("the files fit each other")
}

/// Words of which nobody in between may see two in a row.
fn payload(len: usize) -> Vec<u32> {
    (0..len as u32).map(|word| word.wrapping_mul(0x9e37_79b9) ^ 0x5bd1_e995).collect()
}

/// What somebody in between does to the bytes from the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    Change,
    Repeat,
    Cut,
}

#[derive(Default)]
struct Seen {
    bytes: Vec<u8>,
    /// Once so many bytes were seen.
    attack: Option<(usize, Attack)>,
}

/// Somebody between two programs, who carries and keeps all bytes.
struct Between {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

impl Between {
    fn new(sender: &Endpoint) -> Self {
        let to = sender.address();
        let own = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = own.local_addr().expect("bound");
        let seen = Arc::new(Mutex::new(Seen::default()));
        let kept = seen.clone();
        // The threads end with the connections, and the first with the test's process.
        thread::spawn(move || {
            for dialed in own.incoming() {
                let Ok(dialed) = dialed else { return };
                let Ok(onward) = TcpStream::connect(to) else { continue };
                let back = (onward.try_clone().expect("a file"), dialed.try_clone().expect("a file"));
                let (there, here) = (kept.clone(), kept.clone());
                thread::spawn(move || carry(dialed, onward, &there, false));
                thread::spawn(move || carry(back.0, back.1, &here, true));
            }
        });
        Self { address, seen }
    }

    fn peer(&self, receiver: &Endpoint) -> Peer {
        receiver.connect(&self.address.to_string()).expect("an address").within(LONG)
    }

    fn attack(&self, after: usize, attack: Attack) {
        self.seen.lock().expect("no carrier panics").attack = Some((after, attack));
    }

    fn has_seen(&self, payload: &[u32]) -> bool {
        let bytes: Vec<u8> = payload.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let known: HashSet<&[u8]> = bytes.windows(8).collect();
        let seen = self.seen.lock().expect("no carrier panics");
        assert!(seen.bytes.len() > bytes.len(), "all went through here");
        seen.bytes.windows(8).any(|window| known.contains(window))
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, seen: &Mutex<Seen>, is_of_sender: bool) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = from.read(&mut buffer).unwrap_or(0);
        let mut bytes = buffer[..count].to_vec();
        let mut is_cut = count == 0;
        {
            let mut seen = seen.lock().expect("no carrier panics");
            seen.bytes.extend_from_slice(&bytes);
            if let Some((after, attack)) = seen.attack
                && is_of_sender
                && count > 0
                && seen.bytes.len() > after
            {
                seen.attack = None;
                match attack {
                    Attack::Change => bytes[count / 2] ^= 1,
                    Attack::Repeat => bytes.extend_from_within(..),
                    Attack::Cut => {
                        bytes.truncate(count / 2);
                        is_cut = true;
                    }
                }
            }
        }
        if to.write_all(&bytes).is_err() || is_cut {
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            return;
        }
    }
}

#[test]
fn somebody_in_between_sees_no_byte_of_a_tensor() {
    for (tls, is_seen) in [
        (mode(TlsMode::On), false),
        (mode(TlsMode::Require), false),
        (certified("chained", "root"), false),
        // The same test sees all without TLS, so it would see it.
        (mode(TlsMode::Off), true),
        (mode(TlsMode::Auto), true),
    ] {
        let (sender, receiver) = (open(&options(tls.clone())), open(&options(tls.clone())));
        let between = Between::new(&sender);
        let peer = between.peer(&receiver);
        // Shorter and longer than a record, and many records.
        for len in [2, 1000, 5000, 1 << 17] {
            let words = payload(len);
            sender.send(&key("w"), tensor(&sender, &words)).expect("there is room");
            let received = peer.receive(&key("w")).expect("was sent");
            assert_eq!(received.way(), TensorWay::Inline);
            assert!(received.as_slice::<u32>() == Ok(&words[..]), "{tls}: {len} words");
        }
        assert_eq!(between.has_seen(&payload(1 << 15)), is_seen, "{tls}");
    }
}

#[test]
fn many_tensors_go_through_tls_at_once_and_both_ways() {
    let options = options(mode(TlsMode::On));
    let (one, other) = (open(&options), open(&options));
    let peers = [connect(&one, &other), connect(&other, &one)];
    thread::scope(|scope| {
        for number in 0..8_usize {
            let (sender, peer) = ([&other, &one][number % 2], &peers[number % 2]);
            let (name, words) = (format!("tensor {number}"), payload(100_000 + number));
            scope.spawn(move || {
                for _ in 0..10 {
                    sender.send(&key(&name), tensor(sender, &words)).expect("there is room");
                    let received = peer.receive(&key(&name)).expect("was sent");
                    assert!(received.as_slice::<u32>() == Ok(&words[..]));
                }
            });
        }
    });
}

#[test]
fn gets_over_sockets_speak_tls_with_the_link() {
    let mut options = options(mode(TlsMode::Require));
    options.fabric = ExchangeFabric::Tcp;
    options.requires_regions = true;
    let (sender, receiver) = (open(&options), open(&options));
    let peer = connect(&receiver, &sender);
    let words = payload(1 << 18);
    sender.send(&key("w"), tensor(&sender, &words)).expect("there is room");
    let received = peer.receive(&key("w")).expect("was sent");
    assert_eq!(received.way(), TensorWay::Copied);
    assert!(received.as_slice::<u32>() == Ok(&words[..]));
    wait_for_returns(&sender);
}

#[test]
fn a_link_that_is_changed_repeated_or_cut_is_lost_and_gives_no_part_of_a_tensor() {
    for attack in [Attack::Change, Attack::Repeat, Attack::Cut] {
        let options = options(mode(TlsMode::On));
        let (sender, receiver) = (open(&options), open(&options));
        let between = Between::new(&sender);
        let peer = between.peer(&receiver);
        peer.open().expect("they fit");
        between.attack(1 << 20, attack);
        sender.send(&key("w"), tensor(&sender, &payload(1 << 20))).expect("there is room");
        let Err(error) = peer.receive(&key("w")) else { panic!("it was attacked: {attack:?}") };
        let error = error.to_string();
        let reason = match attack {
            Attack::Cut => "its connection closed",
            Attack::Change | Attack::Repeat => "has changed, left out or repeated bytes",
        };
        assert!(error.contains(&between.address.to_string()) && error.contains(reason), "{error}");
        // The tensor is still there for who comes directly.
        let words = payload(1 << 20);
        sender.send(&key("again"), tensor(&sender, &words)).expect("there is room");
        let received = connect(&receiver, &sender).receive(&key("again")).expect("was sent");
        assert!(received.as_slice::<u32>() == Ok(&words[..]));
    }
}

/// Why a receiver has no link.
fn refused(receiver: Tls, sender: Tls) -> String {
    let (sender, receiver) = (open(&options(sender)), open(&options(receiver)));
    let error = connect(&receiver, &sender).open().expect_err("they do not fit").to_string();
    assert!(error.contains(&sender.address().to_string()), "{error}");
    error
}

#[test]
fn programs_that_do_not_fit_are_told_what_to_set() {
    let clear = refused(mode(TlsMode::Off), mode(TlsMode::Require));
    let text =
        "it speaks TLS with the job's secret on this link and this program speaks no TLS; set PLEACH_TLS";
    assert!(clear.contains(text), "{clear}");
    let clear = refused(mode(TlsMode::On), mode(TlsMode::Off));
    assert!(clear.contains("it speaks no TLS on this link"), "{clear}");
    let none = refused(mode(TlsMode::On), certified("rank", "authority"));
    assert!(none.contains("it speaks TLS with certificates"), "{none}");
    let rank = || certified("rank", "authority");
    for (bad, at_other, at_own) in [
        ("expired", "its certificate has expired", "this rank's certificate has expired"),
        ("foreign", "not signed by the authority", "does not take this rank's certificate"),
    ] {
        let seen = refused(rank(), certified(bad, "authority"));
        assert!(seen.contains(at_other), "{seen}");
        let seen = refused(certified(bad, "authority"), rank());
        assert!(seen.contains(at_own), "{seen}");
    }
}

#[test]
fn whoever_speaks_no_tls_where_it_is_due_gets_nothing_and_others_are_served() {
    let options = options(mode(TlsMode::Require));
    let (sender, receiver) = (open(&options), open(&options));
    sender.send(&key("w"), tensor(&sender, &payload(1000))).expect("there is room");
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[22, 3, 3, 0, 5, 1, 2, 3, 4, 5], &[23, 3, 3, 0, 1, 0]] {
        let mut stream = TcpStream::connect(sender.address()).expect("it listens");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        stream.write_all(garbage).expect("written");
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        assert!(said.is_empty(), "it does not answer what is no introduction: {said:?}");
    }
    let received = connect(&receiver, &sender).receive(&key("w")).expect("was sent");
    assert_eq!(received.as_slice::<u32>(), Ok(&payload(1000)[..]));
}
