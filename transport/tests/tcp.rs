//! What only `tcp` has: connections without the secret, peers that speak the protocol badly,
//! processes that are killed or stopped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pleach_transport::auth::{Challenges, Side, TAG_BYTES};
use pleach_transport::device::ProtocolViolation;
use pleach_transport::tcp::frame::{Frame, HEADER_BYTES, TRANSFER_BYTES_MAX};
use pleach_transport::tcp::{CONNECTIONS, OpenError, TcpDevice};
use pleach_transport::{
    Address, Device, DeviceConfig, Event, HostMemory, Inline, LossCause, Rank, Region, RegionKey,
    RemoteSlice, Responder, Secret, Signal, Source, Transfer, TransferId, clock,
};

/// Longest wait for what must come: generous, as machines are loaded.
const PATIENCE: Duration = Duration::from_secs(60);

/// Polls without news after which nothing more is expected.
const IDLE_POLLS: usize = 200;

const SECRET: &[u8] = b"sixteen bytes or more";

struct Deaf;

impl Responder for Deaf {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

fn config(rank: Rank, world_size: u32) -> DeviceConfig {
    DeviceConfig {
        rank,
        world_size,
        secret: Some(Secret::new(SECRET)),
        signal_slots: 4,
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::new(Deaf),
    }
}

/// A device and everything it has said.
struct End {
    device: TcpDevice,
    log: Vec<Event>,
}

impl End {
    fn new(config: DeviceConfig) -> Self {
        Self { device: TcpDevice::new(config).expect("listening on loopback"), log: Vec::new() }
    }

    fn socket_address(&self) -> SocketAddr {
        self.device.info().address.clone().0.strip_prefix("tcp:").expect("tcp:").parse().expect("an address")
    }

    fn pump(&mut self) {
        let mut events = Vec::with_capacity(16);
        self.device.poll(clock::now(), &mut events);
        self.log.append(&mut events);
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let deadline = clock::now() + PATIENCE;
        while !holds(self) {
            assert!(clock::now() < deadline, "{what} did not come; seen {:?}", self.log);
            self.pump();
            std::thread::yield_now();
        }
    }

    fn settle(&mut self) {
        for _ in 0..IDLE_POLLS {
            self.pump();
            std::thread::yield_now();
        }
    }

    fn until_lost(&mut self, peer: Rank) -> LossCause {
        let mut found = None;
        self.until("a loss", |end| {
            found = end.log.iter().find_map(|event| match event {
                Event::PeerLost { peer: who, cause } if *who == peer => Some(cause.clone()),
                _ => None,
            });
            found.is_some()
        });
        found.expect("`until` has returned")
    }

    fn region(&mut self, len: usize) -> Region {
        self.device.register(HostMemory::new(len)).expect("host memory")
    }
}

fn connected() -> (End, End) {
    let (mut low, mut high) = (End::new(config(0, 2)), End::new(config(1, 2)));
    high.device.connect(0, &low.device.info().address.clone()).expect("starts");
    low.device.connect(1, &high.device.info().address.clone()).expect("starts");
    low.until("the connection", |low| {
        high.pump();
        low.log.contains(&Event::Connected { peer: 1 }) && high.log.contains(&Event::Connected { peer: 0 })
    });
    (low, high)
}

fn check_pair(low: &mut End, high: &mut End) {
    let before = low.device.signal_slots(1).count(3);
    let signal = Signal { signal_slot: 3, payload: Inline::EMPTY };
    high.device.signal(0, &signal, TransferId(9)).expect("connected");
    low.until("a signal", |low| {
        high.pump();
        low.device.signal_slots(1).count(3) == before + 1
    });
}

fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the device listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// All that comes until the other end closes; it must close.
fn until_closed(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("not closed: {error}"),
        _ => bytes,
    }
}

/// A hello as the wire has it, written down here a second time.
#[derive(Clone)]
struct Hello {
    magic: [u8; 8],
    role: u8,
    connection: u8,
    rank: u32,
    expected: u32,
    world_size: u32,
    session: u64,
    incarnation: u64,
}

impl Hello {
    fn new(role: u8, connection: u8) -> Self {
        Self {
            magic: *b"pleach\0\x03",
            role,
            connection,
            rank: 1,
            expected: 0,
            world_size: 2,
            session: 7,
            incarnation: 9,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend([self.role, self.connection, CONNECTIONS as u8, 0]);
        for word in [self.rank, self.expected, self.world_size, 4, 0] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.session.to_le_bytes());
        bytes.extend(self.incarnation.to_le_bytes());
        bytes.extend([0; 16]);
        bytes.extend([0x5a; TAG_BYTES]);
        bytes
    }
}

const HELLO_BYTES: usize = 96;

/// Goes through the handshake; returns the stream and the verdict.
fn shake(address: SocketAddr, hello: &Hello, secret: &[u8]) -> (TcpStream, u8) {
    let mut stream = dial(address);
    let own = hello.bytes();
    stream.write_all(&own).expect("written");
    let mut theirs = [0; HELLO_BYTES];
    stream.read_exact(&mut theirs).expect("a hello");
    let challenge = |bytes: &[u8]| bytes[HELLO_BYTES - TAG_BYTES..].try_into().expect("32 bytes");
    let claim = [&own[..], &theirs].concat();
    let (ours, theirs) = (challenge(&own), challenge(&theirs));
    let secret = Secret::new(secret);
    let challenges = Challenges::new(Side::Dialer, ours, theirs);
    let answer = challenges.answer(Some(&secret), &claim);
    stream.write_all(&answer).expect("written");
    let mut verdict = [0; 1 + TAG_BYTES];
    stream.read_exact(&mut verdict).expect("a verdict");
    let tag = verdict[1..].try_into().expect("32 bytes");
    if verdict[0] == 0 {
        let proved = challenges.verify(Some(&secret), &claim, &tag);
        assert!(proved, "the listener proves that it knows the secret, too");
    } else {
        assert_eq!(tag, [0; TAG_BYTES], "who is turned away gets no proof to work on");
    }
    (stream, verdict[0])
}

/// A peer of rank 1 that knows the secret and sends what it likes.
struct RawPeer {
    _control: TcpStream,
    to: Vec<TcpStream>,
    from: Vec<TcpStream>,
}

impl RawPeer {
    fn connect(end: &mut End) -> Self {
        let address = end.socket_address();
        end.device.connect(1, &end.device.info().address.clone()).expect("starts");
        let join = |role, connection| {
            let (stream, verdict) = shake(address, &Hello::new(role, connection), SECRET);
            assert_eq!(verdict, 0);
            stream
        };
        let mut control = join(0, 0);
        let to = (0..CONNECTIONS as u8).map(|connection| join(1, connection)).collect();
        let from = (0..CONNECTIONS as u8).map(|connection| join(2, connection)).collect();
        let mut ready = [0; 8];
        control.read_exact(&mut ready).expect("ready");
        assert_eq!(ready, [1, 0, 0, 0, 0, 0, 0, 0]);
        end.until("the connection", |end| end.log.contains(&Event::Connected { peer: 1 }));
        Self { _control: control, to, from }
    }

    fn send(&mut self, connection: usize, bytes: &[u8]) {
        self.to[connection].write_all(bytes).expect("written");
    }

    /// The next frame of the device, which is polled meanwhile.
    fn frame(&mut self, end: &mut End) -> Frame {
        let stream = &mut self.from[0];
        stream.set_nonblocking(true).expect("an option");
        let (mut bytes, mut have) = (Vec::new(), 0);
        let mut decoded = None;
        end.until("a frame", |_| {
            let extra_bytes = bytes.get(4).copied().map_or(0, usize::from);
            let wanted = if have < HEADER_BYTES { HEADER_BYTES } else { HEADER_BYTES + extra_bytes };
            bytes.resize(wanted, 0);
            match stream.read(&mut bytes[have..]) {
                Ok(0) if have < wanted => panic!("closed"),
                Ok(count) => have += count,
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            decoded = Frame::decode(&bytes[..have]).expect("well formed");
            decoded.is_some()
        });
        decoded.expect("`until` has returned").0
    }
}

fn put(dst: RemoteSlice, signal_slot: u16) -> Frame {
    let signal = Some(Signal { signal_slot, payload: Inline::new(b"beside").expect("short") });
    Frame::Put { dst, signal, wants_answer: true, other_connections: 0, token: 5 }
}

#[test]
fn unauthenticated_connections_are_dropped_and_harm_nobody() {
    let (mut low, mut high) = connected();
    let address = low.socket_address();
    let mut kept = Vec::new();
    for said in
        [&b""[..], b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", &[0xff; 4096], b"\x16\x03\x01\x02\0", b"q"]
    {
        let mut stream = dial(address);
        stream.write_all(said).expect("written");
        if said.is_empty() {
            // A port scanner.
            drop(stream);
        } else {
            assert_eq!(until_closed(&mut stream), b"", "a peer without the secret is told nothing");
        }
        check_pair(&mut low, &mut high);
    }
    for _ in 0..300 {
        // More than may wait at once: the oldest go.
        kept.push(dial(address));
    }
    check_pair(&mut low, &mut high);
    // The hello of version 1 had 8 bytes less; a later one may have more.
    for (version, bytes) in [(1, HELLO_BYTES - 8), (2, HELLO_BYTES), (4, HELLO_BYTES), (4, HELLO_BYTES + 8)] {
        let mut other_version = Hello::new(0, 0);
        other_version.magic[7] = version;
        let mut hello = other_version.bytes();
        hello.resize(bytes, 0);
        let mut stream = dial(address);
        stream.write_all(&hello).expect("written");
        let answer = until_closed(&mut stream);
        // A longer hello is not read to its end, so the answer may be lost with the connection.
        if bytes <= HELLO_BYTES {
            assert_eq!(&answer[..8], b"pleach\0\x03", "version {version} is told ours");
        }
    }
    check_pair(&mut low, &mut high);
    assert!(low.log.iter().all(|event| !matches!(event, Event::PeerLost { .. })));
}

/// Among so many of the newest unauthenticated connections, the slow ones send their next byte.
const SLOW_PEERS: usize = 64;

/// Signals that a pair sends before a flood ends.
const SIGNALS_UNDER_FLOOD: u32 = 20;

/// A pair sends signals while unauthenticated peers connect again and again, silent, with a hello,
/// with half of one and byte by byte, and a new pair comes about meanwhile. The flood goes on until
/// both have.
fn work_under_flood(connections: usize, held: usize) {
    let (mut low, mut high) = connected();
    let (mut new_low, mut new_high) = (End::new(config(0, 2)), End::new(config(1, 2)));
    let addresses = [low.socket_address(), new_low.socket_address()];
    let work_is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work_is_done = &work_is_done;
        let flood = scope.spawn(move || {
            let mut unauthenticated = std::collections::VecDeque::new();
            let hello = Hello::new(0, 0).bytes();
            let until = clock::now() + PATIENCE;
            // Acquire: pairs with the release of the thread that works.
            let goes_on = |number| {
                number < connections || !work_is_done.load(Ordering::Acquire) && clock::now() < until
            };
            for number in (0..).take_while(|number| goes_on(*number)) {
                // The device may have dropped any of them already.
                if let Ok(mut stream) = TcpStream::connect(addresses[number % 2]) {
                    let said = [0, HELLO_BYTES, 50, 1][number / 2 % 4];
                    let _ = stream.write(&hello[..said]);
                    unauthenticated.push_back((stream, said));
                }
                // Each slow connection sends its next byte, as long as the connection exists.
                let slow = unauthenticated.iter_mut().rev().take(SLOW_PEERS);
                for (stream, said) in slow.filter(|(_, said)| (1..50).contains(said)) {
                    let _ = stream.write(&hello[*said..=*said]);
                    *said += 1;
                }
                if unauthenticated.len() > held {
                    unauthenticated.pop_front();
                }
            }
        });
        let (mut signals, mut slowest, mut joined_in) = (0, Duration::ZERO, None);
        new_high.device.connect(0, &new_low.device.info().address.clone()).expect("starts");
        new_low.device.connect(1, &new_high.device.info().address.clone()).expect("starts");
        let began = clock::now();
        while !flood.is_finished() || joined_in.is_none() {
            let asked = clock::now();
            check_pair(&mut low, &mut high);
            signals += 1_u32;
            slowest = slowest.max(clock::now().since(asked));
            new_low.pump();
            new_high.pump();
            let is_connected = new_low.log.contains(&Event::Connected { peer: 1 })
                && new_high.log.contains(&Event::Connected { peer: 0 });
            if is_connected && joined_in.is_none() {
                joined_in = Some(clock::now().since(began));
            }
            let has_all = joined_in.is_some() && signals >= SIGNALS_UNDER_FLOOD;
            work_is_done.store(has_all, Ordering::Release); // Pairs with the acquire of the flood.
            assert!(has_all || asked.since(began) < PATIENCE, "{signals} signals, joined in {joined_in:?}");
        }
        println!(
            "{connections} unauthenticated: {signals} signals, the slowest {slowest:?}; a new pair in {joined_in:?}"
        );
        assert!(signals >= SIGNALS_UNDER_FLOOD, "{signals} while the flood went on");
    });
}

#[test]
fn a_pair_works_and_a_new_one_comes_about_while_unauthenticated_connections_flood_both() {
    work_under_flood(1_500, 300);
}

#[test]
#[ignore = "10,000 connections take many seconds: .ci/nightly runs it"]
fn a_pair_works_and_a_new_one_comes_about_while_ten_thousand_flood_both() {
    work_under_flood(10_000, 600);
}

#[test]
fn a_peer_that_says_half_a_hello_is_not_waited_for_in_vain() {
    let end = End::new(config(0, 2));
    let mut stream = dial(end.socket_address());
    stream.write_all(&Hello::new(0, 0).bytes()[..50]).expect("written");
    assert_eq!(until_closed(&mut stream), b"");
}

#[test]
fn a_wrong_secret_is_named_on_both_sides() {
    let limit = Duration::from_secs(5);
    let mut low = End::new(DeviceConfig { connect_timeout: limit, ..config(0, 2) });
    let secret = Some(Secret::new(b"another secret, as long"));
    let mut high = End::new(DeviceConfig { secret, connect_timeout: limit, ..config(1, 2) });
    low.device.connect(1, &high.device.info().address.clone()).expect("starts");
    high.device.connect(0, &low.device.info().address.clone()).expect("starts");
    for (end, peer) in [(&mut high, 0), (&mut low, 1)] {
        assert_eq!(end.until_lost(peer), LossCause::Protocol(ProtocolViolation::WrongSecret));
    }
}

#[test]
fn a_wrong_rank_is_turned_away_though_it_knows_the_secret() {
    let (mut low, mut high) = connected();
    let address = low.socket_address();
    let turned_away = |change: fn(&mut Hello), secret: &[u8]| {
        let mut hello = Hello::new(0, 0);
        change(&mut hello);
        let (mut stream, verdict) = shake(address, &hello, secret);
        assert_eq!(until_closed(&mut stream), b"");
        verdict
    };
    assert_eq!(turned_away(|_| {}, b"not the secret, really"), 1);
    assert_eq!(turned_away(|_| {}, SECRET), 4, "rank 1 is here already");
    let same = high.device.info().incarnation.0;
    let verdict = {
        let (mut stream, verdict) = shake(address, &Hello { incarnation: same, ..Hello::new(0, 0) }, SECRET);
        assert_eq!(until_closed(&mut stream), b"");
        verdict
    };
    assert_eq!(verdict, 5, "it is here already, and is not given the rank again");
    assert_eq!(turned_away(|hello| hello.rank = 0, SECRET), 2);
    assert_eq!(turned_away(|hello| hello.rank = 2, SECRET), 2);
    assert_eq!(turned_away(|hello| hello.expected = 1, SECRET), 2);
    assert_eq!(turned_away(|hello| hello.world_size = 3, SECRET), 2);
    check_pair(&mut low, &mut high);
    let mut third = End::new(config(2, 3));
    let other = End::new(config(1, 3));
    third.device.connect(0, &other.device.info().address.clone()).expect("starts");
    assert_eq!(third.until_lost(0), LossCause::Protocol(ProtocolViolation::WrongRank));
}

#[test]
fn something_else_at_the_address_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = Address(format!("tcp:{}", listener.local_addr().expect("bound")));
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("dialed");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("written");
        // Held until the device gives up.
        until_closed(&mut stream);
    });
    let mut end = End::new(config(1, 2));
    end.device.connect(0, &address).expect("starts");
    assert_eq!(end.until_lost(0), LossCause::Protocol(ProtocolViolation::Version));
    server.join().expect("the server only talks");
}

/// Takes the next connection of a dialer of rank 1 and goes through the handshake but for the
/// verdict, which is given back.
fn take(listener: &std::net::TcpListener) -> (TcpStream, [u8; 1 + TAG_BYTES], u8) {
    let (mut stream, _) = listener.accept().expect("dialed");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let mut theirs = [0; HELLO_BYTES];
    stream.read_exact(&mut theirs).expect("a hello");
    // The same connection of the same attempt, from rank 0.
    let session = u64::from_le_bytes(theirs[32..40].try_into().expect("8 bytes"));
    let own = Hello { rank: 0, expected: 1, session, ..Hello::new(theirs[8], theirs[9]) }.bytes();
    stream.write_all(&own).expect("written");
    stream.read_exact(&mut [0; TAG_BYTES]).expect("an answer");
    let challenge = |bytes: &[u8]| bytes[HELLO_BYTES - TAG_BYTES..].try_into().expect("32 bytes");
    let challenges = Challenges::new(Side::Listener, challenge(&own), challenge(&theirs));
    let claim = [&theirs[..], &own].concat();
    let mut verdict = [0; 1 + TAG_BYTES];
    verdict[1..].copy_from_slice(&challenges.answer(Some(&Secret::new(SECRET)), &claim));
    (stream, verdict, theirs[8])
}

#[test]
fn a_listeners_ready_that_comes_before_its_verdict_on_a_connection_waits_for_it() {
    // Streams are not ordered among each other: a dialer may read the listener's word on the
    // control stream first.
    const AHEAD: rustix::time::Timespec = rustix::time::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    for held in [1, 2] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = Address(format!("tcp:{}", listener.local_addr().expect("bound")));
        let mut end = End::new(config(1, 2));
        end.device.connect(0, &address).expect("starts");
        let mut taken: Vec<_> = (0..1 + 2 * CONNECTIONS).map(|_| take(&listener)).collect();
        let last = taken.iter().rposition(|(.., role)| *role == held).expect("a connection each way");
        let (mut last, last_verdict, _) = taken.remove(last);
        for (stream, verdict, role) in &mut taken {
            stream.write_all(verdict).expect("written");
            if *role == 0 {
                stream.write_all(&[1, 0, 0, 0, 0, 0, 0, 0]).expect("ready");
            }
        }
        // Time to read it, and to take it for a breach of the protocol.
        let _ = rustix::event::poll(&mut [], Some(&AHEAD));
        end.settle();
        assert_eq!(end.log, [], "neither connected nor lost before the last connection is there");
        last.write_all(&last_verdict).expect("written");
        end.until("the connection", |end| end.log.contains(&Event::Connected { peer: 0 }));
        assert_eq!(end.log, [Event::Connected { peer: 0 }]);
    }
}

#[test]
fn a_put_that_comes_byte_by_byte_is_noticed_after_its_last_byte() {
    let mut end = End::new(config(0, 2));
    let mut peer = RawPeer::connect(&mut end);
    let region = end.region(64);
    let data: Vec<u8> = (1..=32).collect();
    let frame = put(region.slice(8..40).expect("inside").remote(), 2);
    let bytes = [frame.encode().as_bytes(), &data].concat();
    for (at, byte) in bytes.iter().enumerate() {
        assert_eq!(end.device.signal_slots(1).count(2), 0, "noticed {} bytes early", bytes.len() - at);
        peer.send(0, &[*byte]);
        end.pump();
    }
    end.until("the signal", |end| end.device.signal_slots(1).count(2) == 1);
    assert_eq!(region.slice(8..40).expect("inside").to_vec(), data);
    assert_eq!(region.slice(0..8).expect("inside").to_vec(), [0; 8]);
    assert_eq!(&end.device.signal_slots(1).payload(2)[..6], b"beside");
    assert_eq!(peer.frame(&mut end), Frame::Accepted { key: region.key(), region_bytes: 64, token: 5 });
}

#[test]
fn pieces_of_a_put_in_any_order_give_one_signal_after_the_last() {
    let mut end = End::new(config(0, 2));
    let mut peer = RawPeer::connect(&mut end);
    let region = end.region(64);
    let half = |from: usize| region.slice(from..from + 32).expect("inside").remote();
    let signal = Some(Signal { signal_slot: 1, payload: Inline::EMPTY });
    let first =
        Frame::Put { dst: half(0), signal, wants_answer: false, other_connections: 2, token: 1 << 63 };
    let second = Frame::Piece { dst: half(32), token: 1 << 63 };
    for round in 1..=4u64 {
        let bytes = [round as u8; 32];
        if round % 2 == 0 {
            peer.send(1, &[second.encode().as_bytes(), &bytes].concat());
            end.settle();
            assert_eq!(end.device.signal_slots(1).count(1), round - 1);
        }
        peer.send(0, &[first.encode().as_bytes(), &bytes].concat());
        end.settle();
        if round % 2 == 1 {
            assert_eq!(end.device.signal_slots(1).count(1), round - 1);
            peer.send(1, &[second.encode().as_bytes(), &bytes].concat());
        }
        end.until("the signal", |end| end.device.signal_slots(1).count(1) == round);
        assert_eq!(region.whole().to_vec(), [round as u8; 64]);
    }
}

#[test]
fn half_a_payload_is_no_put() {
    let mut end = End::new(config(0, 2));
    let mut peer = RawPeer::connect(&mut end);
    let region = end.region(1 << 20);
    peer.send(0, put(region.remote(), 2).encode().as_bytes());
    peer.send(0, &vec![1; 1 << 19]);
    end.until("half of it", |_| region.slice((1 << 19) - 1..1 << 19).expect("inside").to_vec() == [1]);
    drop(peer);
    let cause = end.until_lost(1);
    assert_eq!(cause, LossCause::ConnectionClosed);
    assert_eq!(end.device.signal_slots(1).count(2), 0);
}

#[test]
fn bytes_for_memory_that_is_not_there_are_thrown_away_and_answered() {
    let mut end = End::new(config(0, 2));
    let mut peer = RawPeer::connect(&mut end);
    let region = end.region(4096);
    let bad = [
        RemoteSlice { key: RegionKey(region.key().0 ^ 1), offset: 0, len: 1 << 20 },
        RemoteSlice { key: region.key(), offset: 1, len: 4096 },
        RemoteSlice { key: region.key(), offset: u64::MAX, len: 4096 },
    ];
    for dst in bad {
        let mut writer = peer.to[0].try_clone().expect("a second handle");
        let sender = std::thread::spawn(move || {
            writer.write_all(put(dst, 0).encode().as_bytes()).expect("written");
            writer.write_all(&vec![0xee; dst.len as usize]).expect("written");
        });
        end.until("all to be read", |_| sender.is_finished());
        sender.join().expect("the sender only sends");
        assert_eq!(peer.frame(&mut end), Frame::Refused { key: dst.key, token: 5 });
    }
    assert_eq!(region.whole().to_vec(), vec![0; 4096]);
    assert_eq!(end.device.signal_slots(1).count(0), 0, "no signal without its bytes");
    peer.send(
        0,
        &[put(region.slice(0..4).expect("inside").remote(), 0).encode().as_bytes(), b"good"].concat(),
    );
    end.until("the signal", |end| end.device.signal_slots(1).count(0) == 1);
    assert_eq!(region.slice(0..4).expect("inside").to_vec(), b"good");
}

#[test]
fn what_the_protocol_does_not_allow_ends_the_pair_with_its_name() {
    let signal = |signal_slot| Signal { signal_slot, payload: Inline::EMPTY };
    let oversized = RemoteSlice { key: RegionKey(1), offset: 0, len: TRANSFER_BYTES_MAX + 1 };
    let cases: Vec<(usize, Vec<u8>, ProtocolViolation)> = vec![
        (0, vec![0xff; 88], ProtocolViolation::OversizedFrame),
        (0, vec![0; 88], ProtocolViolation::MalformedFrame),
        (0, put(oversized, 0).encode().as_bytes().to_vec(), ProtocolViolation::OversizedFrame),
        (
            0,
            Frame::Signal { signal: signal(4) }.encode().as_bytes().to_vec(),
            ProtocolViolation::UnknownSignalSlot,
        ),
        (
            0,
            Frame::GetReply { len: 8, token: 1 << 32 }.encode().as_bytes().to_vec(),
            ProtocolViolation::UnexpectedAnswer,
        ),
        (
            0,
            Frame::AtomicReply { old: 8, token: 0 }.encode().as_bytes().to_vec(),
            ProtocolViolation::UnexpectedAnswer,
        ),
    ];
    for (connection, bytes, violation) in cases {
        let mut end = End::new(config(0, 2));
        let mut peer = RawPeer::connect(&mut end);
        peer.send(connection, &bytes);
        assert_eq!(end.until_lost(1), LossCause::Protocol(violation), "{bytes:?}");
    }
}

#[test]
fn who_asks_without_reading_the_answers_is_cut_off() {
    let mut end = End::new(config(0, 2));
    let mut peer = RawPeer::connect(&mut end);
    let region = end.region(1 << 20);
    let ask = Frame::Get { src: region.remote(), connection: 0, token: 1 };
    let mut asked = 0;
    end.until("the end", |end| {
        if asked < 4096 {
            asked += 1;
            // Fails once the device has closed its end.
            let _ = peer.to[0].write_all(ask.encode().as_bytes());
        }
        end.log.iter().any(|event| matches!(event, Event::PeerLost { .. }))
    });
    assert_eq!(end.until_lost(1), LossCause::Protocol(ProtocolViolation::TooManyRequests));
}

#[test]
fn severing_in_the_middle_of_a_long_put_is_fenced() {
    const LEN: usize = 64 << 20;
    let (mut low, mut high) = connected();
    let (source, target) = (high.region(LEN), low.region(LEN));
    source.whole().store(&vec![7; LEN]);
    let signal = Some(Signal { signal_slot: 0, payload: Inline::EMPTY });
    let transfer = Transfer::Put { src: Source::Slice(source.whole()), dst: target.remote(), signal };
    high.device.submit(0, transfer, TransferId(1)).expect("connected");
    let probe = target.slice(4096..4097).expect("inside");
    low.until("the first bytes", |_| {
        high.pump();
        probe.to_vec() == [7]
    });
    assert_eq!(low.device.signal_slots(1).count(0), 0, "not all of it is here yet");
    low.device.sever(1);
    low.until("the fence", |low| low.log.contains(&Event::Severed { peer: 1 }));
    target.whole().store(&vec![9; LEN]);
    assert_eq!(high.until_lost(0), LossCause::ConnectionClosed);
    low.settle();
    assert!(target.whole().to_vec().iter().all(|byte| *byte == 9), "the owner's bytes are the owner's");
    assert_eq!(low.device.signal_slots(1).count(0), 0);
    assert!(high.log.iter().any(|event| matches!(event, Event::Done { id: TransferId(1), result: Err(_) })));
}

#[test]
fn where_to_listen_is_checked_and_said() {
    let with = |interface: &str, secret| {
        let interface = Some(interface.to_owned());
        TcpDevice::new(DeviceConfig { interface, secret, ..config(0, 2) })
    };
    let error = with("192.0.2.1", None).err().expect("a stranger could connect there");
    assert!(matches!(error, OpenError::SecretRequired { .. }));
    let text = error.to_string();
    assert!(text.contains("pleach secret FILE") && text.contains("PLEACH_SECRET_FILE"), "{text}");
    let error = with("no-such-interface", None).err().expect("there is none");
    assert!(matches!(error, OpenError::NoSuchInterface { .. }), "{error}");
    let secret = Some(Secret::new(SECRET));
    assert!(matches!(with("0.0.0.0", secret.clone()), Err(OpenError::Unspecified { .. })));
    assert!(matches!(with("192.0.2.1", secret), Err(OpenError::Listen { .. })));
    let fresh = Some(Secret::fresh());
    let error = with("192.0.2.1", fresh.clone()).err().expect("other hosts do not know it");
    assert!(matches!(error, OpenError::SecretRequired { .. }), "{error}");
    let error = with("lo", None).err().expect("other users could connect");
    assert!(matches!(error, OpenError::NoSecret), "{error}");
    let device = with("lo", fresh).expect("loopback has an address");
    assert!(
        device.info().address.clone().0.starts_with("tcp:127.0.0.1:"),
        "{}",
        device.info().address.clone()
    );
}

/// What a child process is told by the environment: the address of rank 0.
const CHILD: &str = "PLEACH_TEST_TCP_CHILD";

/// The child of the process tests; as a test of its own it has nothing to do.
#[test]
fn the_other_process() {
    let Ok(address) = std::env::var(CHILD) else { return };
    let mut end = End::new(config(1, 2));
    end.device.connect(0, &Address(address)).expect("starts");
    end.until("the connection", |end| end.log.contains(&Event::Connected { peer: 0 }));
    println!("\nconnected");
    let deadline = clock::now() + PATIENCE;
    while clock::now() < deadline {
        let signal = Signal { signal_slot: 0, payload: Inline::EMPTY };
        let _ = end.device.signal(0, &signal, TransferId(0));
        end.pump();
        end.log.clear();
    }
}

/// Ended when dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn with_process() -> (End, Process) {
    let mut end = End::new(config(0, 2));
    end.device.connect(1, &end.device.info().address.clone()).expect("starts");
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "the_other_process", "--nocapture"])
        .env(CHILD, end.device.info().address.clone().0)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test starts itself");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let process = Process(child);
    let reader = std::thread::spawn(move || lines.map_while(Result::ok).any(|line| line == "connected"));
    end.until("the other process", |_| reader.is_finished());
    assert!(reader.join().expect("the reader only reads"));
    end.until("its signals", |end| end.device.signal_slots(1).count(0) > 10);
    (end, process)
}

fn signal(process: &Process, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_child(&process.0);
    rustix::process::kill_process(pid, signal).expect("it is there");
}

#[test]
fn a_killed_process_is_found_by_a_sleeper_without_delay() {
    let (mut end, mut process) = with_process();
    process.0.kill().expect("it is there");
    let killed = clock::now();
    let cause = end.until_lost(1);
    let took = clock::now().since(killed);
    assert!(matches!(cause, LossCause::ProcessEnded | LossCause::ConnectionClosed), "{cause}");
    assert!(took < Duration::from_secs(10), "{took:?}");
}

#[test]
fn a_stopped_process_is_not_lost_and_fenced_once_severed() {
    let (mut end, process) = with_process();
    signal(&process, rustix::process::Signal::STOP);
    end.settle();
    assert!(end.log.iter().all(|event| !matches!(event, Event::PeerLost { .. })), "{:?}", end.log);
    end.device.sever(1);
    end.until("the fence", |end| end.log.contains(&Event::Severed { peer: 1 }));
    let count = end.device.signal_slots(1).count(0);
    signal(&process, rustix::process::Signal::CONT);
    end.settle();
    assert_eq!(end.device.signal_slots(1).count(0), count);
}
