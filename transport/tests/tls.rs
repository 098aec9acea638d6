//! Devices over tcp that speak TLS, and somebody between them who listens, changes, repeats, cuts.
#![cfg(feature = "tls")]

use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_transport::device::{Protection, ProtocolViolation, TlsFault};
use pleach_transport::tcp::{SPLIT_BYTES_MIN, TcpDevice, interface_addresses};
use pleach_transport::tls::{CertificateFiles, Tls, TlsMode};
use pleach_transport::{
    Address, Device, DeviceConfig, Event, HostMemory, Inline, LossCause, Rank, Region, Responder, Secret,
    Signal, Source, Transfer, TransferId, Urgency, clock,
};

#[path = "../../tests/skipped/mod.rs"]
mod skipped;

/// Longest wait for what must come: generous, as machines are loaded.
const PATIENCE: Duration = Duration::from_secs(60);

/// Known bytes, of which nobody in between may see eight in a row.
const PAYLOAD: &[u8] = b"0: known bytes; 1: that nobody; 2: between two ranks may see....";

#[derive(Default)]
struct Inbox(Mutex<Vec<Vec<u8>>>);

impl Responder for Inbox {
    fn message(&self, _from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.0.lock().expect("no test panics while it holds this").push(message.to_vec());
        None
    }
    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// A device and everything it has said.
struct End {
    device: TcpDevice,
    inbox: Arc<Inbox>,
    log: Vec<Event>,
}

impl End {
    fn new(rank: Rank, tls: Tls, connect_timeout: Duration) -> Self {
        Self::of(rank, 2, tls, connect_timeout, None)
    }

    /// One of so many ranks; listens at this address, or on loopback.
    fn of(rank: Rank, world_size: u32, tls: Tls, connect_timeout: Duration, address: Option<IpAddr>) -> Self {
        let inbox = Arc::new(Inbox::default());
        let config = DeviceConfig {
            rank,
            world_size,
            secret: Some(Secret::new(b"sixteen bytes or more").with_tls(tls)),
            signal_slots: 4,
            connect_timeout,
            interface: None,
            address,
            responder: Arc::clone(&inbox) as _,
        };
        Self { device: TcpDevice::new(config).expect("it listens"), inbox, log: Vec::new() }
    }

    fn address(&self) -> SocketAddr {
        self.device.info().address.0.strip_prefix("tcp:").expect("tcp:").parse().expect("an address")
    }

    fn pump(&mut self) {
        let mut events = Vec::with_capacity(16);
        self.device.poll(clock::now(), &mut events);
        self.log.append(&mut events);
    }

    fn region(&mut self, bytes: &[u8]) -> Region {
        let region = self.device.register(HostMemory::new(bytes.len())).expect("host memory");
        region.whole().store(bytes);
        region
    }

    fn loss(&self) -> Option<LossCause> {
        self.log.iter().find_map(|event| match event {
            Event::PeerLost { cause, .. } => Some(cause.clone()),
            _ => None,
        })
    }
}

/// Polls all until something holds.
fn until<const N: usize>(ends: &mut [End; N], what: &str, mut holds: impl FnMut(&mut [End; N]) -> bool) {
    let deadline = clock::now() + PATIENCE;
    while !holds(ends) {
        let logs = || ends.iter().map(|end| &end.log).collect::<Vec<_>>();
        assert!(clock::now() < deadline, "{what} did not come: {:?}", logs());
        ends.iter_mut().for_each(End::pump);
        std::thread::yield_now();
    }
}

fn on() -> Tls {
    Tls::new(TlsMode::On, None).expect("needs no file")
}

fn mode(mode: TlsMode) -> Tls {
    Tls::new(mode, None).expect("needs no file")
}

/// Whose bytes go from the dialer to the listener on a connection: see `control/handshake.rs`.
const CONTROL: u8 = 0;
const DATA_TO_LISTENER: u8 = 1;

/// What somebody in between does to the next bytes from the dialer on connections of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    Change,
    Repeat,
    Cut,
}

#[derive(Default)]
struct Seen {
    bytes: Vec<u8>,
    attack: Option<(u8, Attack)>,
}

/// Somebody between two ranks, who carries and keeps all bytes.
struct Between {
    address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

impl Between {
    /// Takes connections at the same address as the listener, at another port.
    fn new(listener: SocketAddr) -> Self {
        let own = TcpListener::bind((listener.ip(), 0)).expect("a port");
        let address = own.local_addr().expect("bound");
        let seen = Arc::new(Mutex::new(Seen::default()));
        let kept = Arc::clone(&seen);
        // The threads end with the connections, and the first with the test's process.
        std::thread::spawn(move || {
            for dialed in own.incoming() {
                let Ok(mut dialed) = dialed else { return };
                let Ok(mut onward) = TcpStream::connect(listener) else { continue };
                let mut hello = [0; 96];
                if dialed.read_exact(&mut hello).is_err() || onward.write_all(&hello).is_err() {
                    continue;
                }
                let back = (onward.try_clone().expect("a file"), dialed.try_clone().expect("a file"));
                let (there, here) = (Arc::clone(&kept), Arc::clone(&kept));
                std::thread::spawn(move || carry(dialed, onward, Some(hello[8]), &there));
                std::thread::spawn(move || carry(back.0, back.1, None, &here));
            }
        });
        Self { address, seen }
    }

    fn device_address(&self) -> Address {
        Address(format!("tcp:{}", self.address))
    }

    fn attack(&self, role: u8, attack: Attack) {
        self.seen.lock().expect("no carrier panics").attack = Some((role, attack));
    }

    /// Whether eight bytes in a row of the payload were seen.
    fn has_seen_payload(&self) -> bool {
        let known: HashSet<&[u8]> = PAYLOAD.windows(8).collect();
        let seen = self.seen.lock().expect("no carrier panics");
        assert!(seen.bytes.len() > SPLIT_BYTES_MIN, "all went through here");
        seen.bytes.windows(8).any(|window| known.contains(window))
    }
}

fn carry(mut from: TcpStream, mut to: TcpStream, role: Option<u8>, seen: &Mutex<Seen>) {
    let mut buffer = vec![0; 1 << 16];
    loop {
        let count = from.read(&mut buffer).unwrap_or(0);
        let mut bytes = buffer[..count].to_vec();
        let mut is_cut = count == 0;
        {
            let mut seen = seen.lock().expect("no carrier panics");
            seen.bytes.extend_from_slice(&bytes);
            if let Some((of, attack)) = seen.attack
                && role == Some(of)
                && count > 0
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

/// Rank 1 dials rank 0, through somebody in between.
fn through(tls: [Tls; 2], connect_timeout: Duration) -> ([End; 2], Between) {
    let [low, high] = tls;
    let ends = [End::new(0, low, connect_timeout), End::new(1, high, connect_timeout)];
    let listener = ends[0].address();
    dialed(ends, listener)
}

/// Rank 1 dials rank 0 at this address, through somebody in between.
fn dialed(mut ends: [End; 2], listener: SocketAddr) -> ([End; 2], Between) {
    let between = Between::new(listener);
    ends[1].device.connect(0, &between.device_address()).expect("starts");
    let address = ends[1].device.info().address.clone();
    ends[0].device.connect(1, &address).expect("starts");
    (ends, between)
}

fn connected(tls: [Tls; 2]) -> ([End; 2], Between) {
    let (mut ends, between) = through(tls, PATIENCE);
    await_connection(&mut ends);
    (ends, between)
}

fn await_connection(ends: &mut [End; 2]) {
    until(ends, "the connection", |[low, high]| {
        low.log.contains(&Event::Connected { peer: 1 }) && high.log.contains(&Event::Connected { peer: 0 })
    });
}

fn repeated(len: usize) -> Vec<u8> {
    PAYLOAD.iter().copied().cycle().take(len).collect()
}

fn put(src: &Region, dst: &Region) -> Transfer {
    Transfer::Put {
        src: Source::Slice(src.whole()),
        dst: dst.remote(),
        signal: Some(Signal { signal_slot: 0, payload: Inline::new(&PAYLOAD[..16]).expect("fits") }),
    }
}

/// Puts and gets of short and split lengths in both directions, signals and messages.
fn exchange(ends: &mut [End; 2]) {
    let bytes = repeated(SPLIT_BYTES_MIN + 12_345);
    let nothing = vec![0; bytes.len()];
    for (from, to) in [(0, 1), (1, 0)] {
        let peer = to as Rank;
        let src = ends[from].region(&bytes);
        let dst = ends[to].region(&nothing);
        let got = ends[from].region(&nothing);
        let short = ends[from].region(&bytes[..100]);
        let device = &mut ends[from].device;
        device.submit(peer, put(&src, &dst), TransferId(1)).expect("room");
        let dst_short = dst.remote().slice(0..100).expect("inside");
        let transfer = Transfer::Put { src: Source::Slice(short.whole()), dst: dst_short, signal: None };
        device.submit(peer, transfer, TransferId(2)).expect("room");
        device.post(peer, PAYLOAD, Urgency::Ordinary).expect("room");
        let slots = ends[to].device.signal_slots(from as Rank);
        until(ends, "a put and a message", |ends| {
            slots.count(0) == 1 && ends[to].inbox.0.lock().expect("whole").contains(&PAYLOAD.to_vec())
        });
        let get = Transfer::Get { src: dst.remote(), dst: got.whole() };
        ends[from].device.submit(peer, get, TransferId(3)).expect("room");
        until(ends, "a get", |ends| {
            ends[from].log.contains(&Event::Done { id: TransferId(3), result: Ok(0) })
        });
        let mut landed = vec![0; bytes.len()];
        for region in [&dst, &got] {
            region.whole().load(&mut landed);
            assert!(landed == bytes, "bytes came as they were sent");
        }
    }
}

#[test]
fn somebody_in_between_sees_no_byte_of_what_ranks_send() {
    let (mut ends, between) = connected([on(), on()]);
    exchange(&mut ends);
    assert!(!between.has_seen_payload());
    // The same test sees all without TLS, so it would see it.
    let (mut ends, between) = connected([mode(TlsMode::Off), mode(TlsMode::Off)]);
    exchange(&mut ends);
    assert!(between.has_seen_payload());
}

#[test]
fn what_somebody_in_between_changes_or_repeats_is_found_out() {
    for attack in [Attack::Change, Attack::Repeat] {
        let (mut ends, between) = connected([on(), on()]);
        let (src, dst) = (ends[1].region(&repeated(4096)), ends[0].region(&[0; 4096]));
        between.attack(DATA_TO_LISTENER, attack);
        ends[1].device.submit(0, put(&src, &dst), TransferId(1)).expect("room");
        until(&mut ends, "a loss", |[low, _]| low.loss().is_some());
        let violation = ProtocolViolation::Tls(TlsFault::Tampered);
        assert_eq!(ends[0].loss(), Some(LossCause::Protocol(violation)), "{attack:?}");
        if attack == Attack::Change {
            assert_eq!(ends[0].device.signal_slots(1).count(0), 0, "no put came whole");
        }
        let (mut ends, between) = connected([on(), on()]);
        between.attack(CONTROL, attack);
        ends[1].device.post(0, PAYLOAD, Urgency::Ordinary).expect("room");
        until(&mut ends, "a loss", |[low, _]| low.loss().is_some());
        assert_eq!(ends[0].loss(), Some(LossCause::Protocol(violation)), "{attack:?}");
    }
}

#[test]
fn what_somebody_in_between_cuts_is_a_loss_and_no_short_success() {
    for role in [DATA_TO_LISTENER, CONTROL] {
        let (mut ends, between) = connected([on(), on()]);
        let (src, dst) = (ends[1].region(&repeated(4096)), ends[0].region(&[0; 4096]));
        between.attack(role, Attack::Cut);
        if role == CONTROL {
            ends[1].device.post(0, PAYLOAD, Urgency::Ordinary).expect("room");
        } else {
            ends[1].device.submit(0, put(&src, &dst), TransferId(1)).expect("room");
        }
        until(&mut ends, "losses", |ends| ends.iter().all(|end| end.loss().is_some()));
        for end in &ends {
            assert_eq!(end.loss(), Some(LossCause::ConnectionClosed));
            assert!(!end.log.contains(&Event::Departed { peer: 1 }));
        }
        assert_eq!(ends[0].device.signal_slots(1).count(0), 0);
        assert!(ends[0].inbox.0.lock().expect("whole").is_empty());
    }
}

/// How ranks that do not fit end: rank 0, then rank 1.
fn losses(tls: [Tls; 2]) -> [LossCause; 2] {
    let (mut ends, _between) = through(tls, Duration::from_secs(3));
    until(&mut ends, "losses", |ends| ends.iter().all(|end| end.loss().is_some()));
    ends.map(|end| end.loss().expect("was seen"))
}

#[test]
fn ranks_of_which_one_speaks_no_tls_both_say_so() {
    let (clear, secret) = (Protection::Clear, Protection::Secret);
    let differ = |own, theirs| LossCause::Protocol(ProtocolViolation::Protection { own, theirs });
    let seen = losses([on(), mode(TlsMode::Off)]);
    assert_eq!(seen, [differ(secret, clear), differ(clear, secret)]);
    let seen = losses([mode(TlsMode::Off), mode(TlsMode::Require)]);
    assert_eq!(seen, [differ(clear, secret), differ(secret, clear)]);
    let certificates = differ(Protection::Certificates, secret);
    assert_eq!(losses([certified("rank", "authority"), on()])[0], certificates);
}

fn certified(name: &str, authority: &str) -> Tls {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/certificates");
    let file = |name: String| folder.join(name);
    let files = CertificateFiles {
        certificate: file(format!("{name}.pem")),
        key: file(format!("{name}.key")),
        authority: file(format!("{authority}.pem")),
    };
    Tls::new(TlsMode::On, Some(&files)).expect("the files fit each other")
}

#[test]
fn ranks_with_certificates_of_one_authority_connect_and_others_are_named() {
    let rank = || certified("rank", "authority");
    let (mut ends, between) = connected([rank(), rank()]);
    exchange(&mut ends);
    assert!(!between.has_seen_payload());
    let fault = |fault| LossCause::Protocol(ProtocolViolation::Tls(fault));
    for (bad, at_other, at_own) in [
        (certified("expired", "authority"), TlsFault::Expired, TlsFault::OwnExpired),
        (certified("foreign", "authority"), TlsFault::Foreign, TlsFault::OwnRefused),
        // Of another authority, also where a chain leads there.
        (certified("chained", "authority"), TlsFault::Foreign, TlsFault::OwnRefused),
    ] {
        assert_eq!(losses([rank(), bad.clone()]), [fault(at_other), fault(at_own)]);
        assert_eq!(losses([bad, rank()]), [fault(at_own), fault(at_other)]);
    }
}

/// A device may listen on all addresses of its host; which one a peer takes says whether both want
/// TLS.
#[test]
fn a_listener_on_all_addresses_speaks_tls_with_whoever_comes_by_one_of_the_network() {
    let all = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let addresses = interface_addresses().expect("the kernel lists them").into_iter();
    let network = addresses.map(|(_, ip)| ip).find(|ip| ip.is_ipv4() && !ip.is_loopback());
    if network.is_none() {
        skipped::skip_part("no address but loopback here");
    }
    for (ip, is_seen) in [(Some(IpAddr::V4(Ipv4Addr::LOCALHOST)), true), (network, false)] {
        let Some(ip) = ip else { continue };
        let end = |rank, address| End::of(rank, 2, mode(TlsMode::Auto), PATIENCE, address);
        let ends = [end(0, Some(all)), end(1, None)];
        let listener = SocketAddr::new(ip, ends[0].address().port());
        let (mut ends, between) = dialed(ends, listener);
        await_connection(&mut ends);
        exchange(&mut ends);
        assert_eq!(between.has_seen_payload(), is_seen, "{ip}");
    }
}

/// Each rank has one key or certificate for all its peers, and each connection keys of its own.
#[test]
fn six_ranks_with_certificates_of_a_chain_and_six_with_fresh_keys_connect_all_pairs() {
    const RANKS: usize = 6;
    for tls in [|| certified("chained", "root"), on] {
        let mut ends: [End; RANKS] =
            std::array::from_fn(|rank| End::of(rank as Rank, RANKS as u32, tls(), PATIENCE, None));
        let addresses = ends.each_ref().map(|end| end.device.info().address.clone());
        for (rank, end) in ends.iter_mut().enumerate() {
            for peer in (0..RANKS).filter(|peer| *peer != rank) {
                end.device.connect(peer as Rank, &addresses[peer]).expect("starts");
            }
        }
        let connected = |end: &End| {
            let is_one = |event: &&Event| matches!(event, Event::Connected { .. });
            end.log.iter().filter(is_one).count()
        };
        until(&mut ends, "all connections", |ends| ends.iter().all(|end| connected(end) == RANKS - 1));
        for rank in 0..RANKS {
            let (src, bytes) = (ends[rank].region(&repeated(4096)), repeated(4096));
            for peer in (0..RANKS).filter(|peer| *peer != rank) {
                let dst = ends[peer].region(&[0; 4096]);
                ends[rank].device.submit(peer as Rank, put(&src, &dst), TransferId(1)).expect("room");
                let slots = ends[peer].device.signal_slots(rank as Rank);
                until(&mut ends, "a put", |_| slots.count(0) == 1);
                assert!(dst.whole().to_vec() == bytes, "from {rank} to {peer}");
            }
        }
        assert!(ends.iter().all(|end| end.loss().is_none()));
    }
}

#[test]
fn whoever_asks_for_tls_and_speaks_something_else_is_turned_away() {
    let (mut ends, _between) = connected([on(), on()]);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[22, 3, 1, 0xff, 0xff], &[22, 3, 3, 0, 0, 1, 2, 3, 4, 5]]
    {
        let mut stream = TcpStream::connect(ends[0].address()).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut hello = b"pleach\0\x03".to_vec();
        hello.extend([0, 0, pleach_transport::tcp::CONNECTIONS as u8, 1]);
        for word in [1_u32, 0, 2, 4, 0] {
            hello.extend(word.to_le_bytes());
        }
        hello.resize(96, 0x5a);
        stream.write_all(&hello).expect("written");
        let mut theirs = [0; 96];
        stream.read_exact(&mut theirs).expect("a hello");
        assert_eq!(theirs[11], 1, "it speaks TLS");
        stream.write_all(garbage).expect("written");
        let _ = stream.shutdown(Shutdown::Write);
        let mut rest = Vec::new();
        // An alert may come; then it closes.
        let _ = stream.read_to_end(&mut rest);
        assert!(rest.len() < 100, "{rest:?}");
    }
    exchange(&mut ends);
}
