//! Measures `tcp` on loopback beside plain sockets, and `tcp` through TLS beside plain rustls, in
//! one run: `cargo run --release -p pleach-transport --example tcp_measure`.
//!
//! Each case runs all four in turn, several rounds; the medians are printed. Ranks are threads of
//! this process. In each round the cipher alone also seals records, and opens them, on one thread:
//! no stream through TLS is faster than that. The last lines are a table of `docs/security.md`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::Barrier;
use std::time::Duration;

use pleach_transport::tcp::TcpDevice;
use pleach_transport::tls::{Tls, TlsMode};
use pleach_transport::{
    Device, DeviceConfig, Event, HostMemory, Inline, LossCause, Rank, Region, RemoteSlice, Responder, Secret,
    Signal, Source, Transfer, TransferId, clock,
};

const ROUNDS: usize = 7;
const PING_PONGS: u64 = 5_000;
const STREAM_BYTES: usize = 16 << 20;
const STREAMS: u64 = 16;
const PATIENCE: Duration = Duration::from_secs(60);

struct Deaf;

impl Responder for Deaf {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }
    fn lost(&self, peer: Rank, cause: &LossCause) {
        eprintln!("rank {peer} lost: {cause}");
    }
}

/// One rank, its memory, and the peer's.
struct End {
    device: TcpDevice,
    peer: Rank,
    events: Vec<Event>,
    done: u64,
    source: Region,
    target: Region,
    remote: RemoteSlice,
}

impl End {
    fn new(rank: Rank, mode: TlsMode) -> Self {
        let tls = Tls::new(mode, None).expect("needs no file");
        let mut device = TcpDevice::new(DeviceConfig {
            rank,
            world_size: 2,
            secret: Some(Secret::new(b"known to both ends").with_tls(tls)),
            signal_slots: 4,
            connect_timeout: PATIENCE,
            interface: None,
            address: None,
            responder: Arc::new(Deaf),
        })
        .expect("listening on loopback");
        let source = device.register(HostMemory::new(STREAM_BYTES)).expect("host memory");
        let target = device.register(HostMemory::new(STREAM_BYTES)).expect("host memory");
        source.whole().store(&vec![rank as u8 + 1; STREAM_BYTES]);
        let remote = target.remote();
        Self { device, peer: 1 - rank, events: Vec::with_capacity(64), done: 0, source, target, remote }
    }

    fn pump(&mut self) {
        self.device.poll(clock::now(), &mut self.events);
        for event in self.events.drain(..) {
            match event {
                Event::Done { result, .. } => {
                    result.expect("nothing fails here");
                    self.done += 1;
                }
                Event::Connected { .. } => self.done += 1,
                other => panic!("{other:?}"),
            }
        }
    }

    fn put(&mut self, bytes: usize) {
        let transfer = Transfer::Put {
            src: Source::Slice(self.source.slice(0..bytes).expect("inside")),
            dst: self.remote.slice(0..bytes as u64).expect("inside"),
            signal: Some(Signal { signal_slot: 0, payload: Inline::EMPTY }),
        };
        self.device.submit(self.peer, transfer, TransferId(0)).expect("room");
    }

    /// Polls until that many signals have come and that many transfers are done.
    fn until(&mut self, signals: u64, done: u64) {
        let signal_slots = self.device.signal_slots(self.peer);
        while signal_slots.count(0) < signals || self.done < done {
            self.pump();
        }
    }
}

/// Runs both ends on two threads and returns the time between barriers.
fn time_both<T: Send>(ends: &mut [T; 2], run: impl Fn(&mut T, usize) + Sync) -> f64 {
    let barrier = Barrier::new(2);
    let [low, high] = ends;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            barrier.wait();
            run(high, 1);
            barrier.wait();
        });
        barrier.wait();
        let start = clock::now();
        run(low, 0);
        barrier.wait();
        let took = clock::now().since(start);
        other.join().expect("the other end only measures");
        took.as_secs_f64()
    })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn plain_pair() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let dialed = TcpStream::connect(listener.local_addr().expect("bound")).expect("listening");
    let (accepted, _) = listener.accept().expect("dialed");
    for stream in [&dialed, &accepted] {
        stream.set_nodelay(true).expect("an option");
    }
    [accepted, dialed]
}

/// An end of a connection of plain rustls.
trait RustlsEnd: Read + Write + Send {}

impl<T: Read + Write + Send> RustlsEnd for T {}

/// Both ends of a connection of plain rustls, with the cipher that `tcp` takes.
fn rustls_pair() -> [Box<dyn RustlsEnd>; 2] {
    use rustls::crypto::ring::{cipher_suite, default_provider};
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
    let file = |name: &str| format!("{}/tests/certificates/{name}", env!("CARGO_MANIFEST_DIR"));
    let certificate = |name| CertificateDer::from_pem_file(file(name)).expect("a certificate");
    let cipher_suites = vec![cipher_suite::TLS13_AES_128_GCM_SHA256];
    let provider = Arc::new(rustls::crypto::CryptoProvider { cipher_suites, ..default_provider() });
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certificate("authority.pem")).expect("an authority");
    let client = rustls::ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("it has the version")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let key = PrivateKeyDer::from_pem_file(file("rank.key")).expect("a key");
    let server = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("it has the version")
        .with_no_client_auth()
        .with_single_cert(vec![certificate("rank.pem")], key)
        .expect("they fit");
    let name = ServerName::try_from("rank").expect("a name");
    let client = rustls::ClientConnection::new(Arc::new(client), name).expect("a configuration");
    let server = rustls::ServerConnection::new(Arc::new(server)).expect("a configuration");
    let [accepted, dialed] = plain_pair();
    let sockets = [&accepted, &dialed].map(|socket| socket.try_clone().expect("a file"));
    let mut ends: [Box<dyn RustlsEnd>; 2] = [
        Box::new(rustls::StreamOwned::new(server, accepted)),
        Box::new(rustls::StreamOwned::new(client, dialed)),
    ];
    // The handshake, while the sockets block.
    time_both(&mut ends, |end, _| {
        end.write_all(&[1]).expect("written");
        end.flush().expect("written");
        end.read_exact(&mut [0]).expect("read");
    });
    for socket in sockets {
        socket.set_nonblocking(true).expect("an option");
    }
    ends
}

/// Reads busily, as the device does.
fn read_busily(stream: &mut impl Read, bytes: &mut [u8]) {
    let mut at = 0;
    while at < bytes.len() {
        match stream.read(&mut bytes[at..]) {
            Ok(count) => at += count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => panic!("{error}"),
        }
    }
}

fn plain_ping_pong<T: Read + Write + Send>(ends: &mut [T; 2]) -> f64 {
    time_both(ends, |stream, rank| {
        let mut bytes = [0; 8];
        for _ in 0..PING_PONGS {
            if rank == 0 {
                stream.write_all(&bytes).expect("written");
                read_busily(stream, &mut bytes);
            } else {
                read_busily(stream, &mut bytes);
                stream.write_all(&bytes).expect("written");
            }
        }
    }) / PING_PONGS as f64
        / 2.0
}

/// Bytes a second in all; `both`: on one connection in both directions, one thread an end.
fn plain_stream<T: Read + Write + Send>(ends: &mut [T; 2], both: bool) -> f64 {
    let seconds = time_both(ends, |stream, rank| {
        let out = vec![1; STREAM_BYTES];
        let mut into = vec![0; STREAM_BYTES];
        let total = STREAM_BYTES * STREAMS as usize;
        let to_send = if both || rank == 0 { total } else { 0 };
        let to_read = if both || rank == 1 { total } else { 0 };
        let (mut sent, mut read) = (0, 0);
        while sent < to_send || read < to_read {
            // What rustls has sealed and the socket did not take.
            if sent == to_send {
                let _ = stream.flush();
            }
            if sent < to_send
                && let Ok(count) = stream.write(&out[sent % STREAM_BYTES..])
            {
                sent += count;
            }
            if read < to_read
                && let Ok(count) = stream.read(&mut into[read % STREAM_BYTES..])
            {
                read += count;
            }
        }
        while stream.flush().is_err() {}
    });
    (STREAM_BYTES as u64 * STREAMS * if both { 2 } else { 1 }) as f64 / seconds
}

fn ping_pong(ends: &mut [End; 2], signals: &mut [u64; 2]) -> f64 {
    let before = *signals;
    let seconds = time_both(ends, |end, rank| {
        let done = end.done;
        for number in 1..=PING_PONGS {
            if rank == 0 {
                end.put(8);
                end.until(before[0] + number, 0);
            } else {
                end.until(before[1] + number, 0);
                end.put(8);
            }
        }
        end.until(0, done + PING_PONGS);
    });
    *signals = before.map(|count| count + PING_PONGS);
    seconds / PING_PONGS as f64 / 2.0
}

fn stream(ends: &mut [End; 2], signals: &mut [u64; 2], both: bool) -> f64 {
    let before = *signals;
    let seconds = time_both(ends, |end, rank| {
        let done = end.done;
        let sends = if both || rank == 0 { STREAMS } else { 0 };
        let gets = if both || rank == 1 { STREAMS } else { 0 };
        for _ in 0..sends {
            end.put(STREAM_BYTES);
        }
        end.until(before[rank] + gets, done + sends);
    });
    for (rank, count) in signals.iter_mut().enumerate() {
        *count += if both || rank == 1 { STREAMS } else { 0 };
    }
    (STREAM_BYTES as u64 * STREAMS * if both { 2 } else { 1 }) as f64 / seconds
}

/// Two devices that are connected.
fn pair(mode: TlsMode) -> [End; 2] {
    let mut ends = [End::new(0, mode), End::new(1, mode)];
    let addresses = [ends[0].device.info().address.clone(), ends[1].device.info().address.clone()];
    for rank in 0..2 {
        let peer = 1 - rank;
        ends[rank].device.connect(peer as Rank, &addresses[peer]).expect("starts");
        ends[rank].remote = ends[peer].target.remote();
    }
    while ends[0].done == 0 || ends[1].done == 0 {
        ends[0].pump();
        ends[1].pump();
    }
    ends
}

/// What a record holds, in bytes.
const RECORD_BYTES: usize = 16 << 10;

/// Records that the cipher seals and opens in a round.
const RECORDS: u32 = 8 << 10;

/// How fast one thread seals records with the cipher that `tcp` takes, and how fast it opens them,
/// in bytes a second.
fn cipher_rates() -> [f64; 2] {
    use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
    let key = LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &[7; 16]).expect("16 bytes"));
    let nonce = |number: u32| {
        let mut bytes = [0; 12];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        Nonce::assume_unique_for_key(bytes)
    };
    // As much as a connection seals at once, so it stays in the cache as there.
    let mut records = vec![vec![1; RECORD_BYTES]; 4];
    let mut tags = Vec::with_capacity(records.len());
    let (mut sealing, mut opening) = (Duration::ZERO, Duration::ZERO);
    for turn in 0..RECORDS / records.len() as u32 {
        let start = clock::now();
        tags.extend(records.iter_mut().zip(0..).map(|(record, number)| {
            let nonce = nonce(turn * 4 + number);
            key.seal_in_place_separate_tag(nonce, Aad::empty(), record).expect("it is short")
        }));
        let sealed = clock::now();
        for (record, (number, tag)) in records.iter_mut().zip((0..).zip(tags.drain(..))) {
            let nonce = nonce(turn * 4 + number);
            key.open_in_place_separate_tag(nonce, Aad::empty(), tag, record, 0..).expect("it was sealed");
        }
        opening += clock::now().since(sealed);
        sealing += sealed.since(start);
    }
    [sealing, opening].map(|took| f64::from(RECORDS) * RECORD_BYTES as f64 / took.as_secs_f64())
}

/// One round of the three cases: microseconds, and twice gigabytes a second.
fn plain_round<T: Read + Write + Send>(ends: &mut [T; 2]) -> [f64; 3] {
    [plain_ping_pong(ends) * 1e6, plain_stream(ends, false) / 1e9, plain_stream(ends, true) / 1e9]
}

fn round(ends: &mut [End; 2], signals: &mut [u64; 2]) -> [f64; 3] {
    let latency = ping_pong(ends, signals) * 1e6;
    [latency, stream(ends, signals, false) / 1e9, stream(ends, signals, true) / 1e9]
}

fn main() {
    let (mut plain, mut sealed) = (plain_pair(), rustls_pair());
    for stream in &plain {
        stream.set_nonblocking(true).expect("an option");
    }
    let mut clear = (pair(TlsMode::Off), [0, 0]);
    let mut tls = (pair(TlsMode::On), [0, 0]);
    let mut results: [Vec<[f64; 3]>; 4] = Default::default();
    let mut ciphers = Vec::new();
    // The first round warms up: buffers grow.
    for number in 0..=ROUNDS {
        let rounds = [
            plain_round(&mut plain),
            round(&mut clear.0, &mut clear.1),
            plain_round(&mut sealed),
            round(&mut tls.0, &mut tls.1),
        ];
        let cipher = cipher_rates();
        if number > 0 {
            ciphers.push(cipher);
            results.iter_mut().zip(rounds).for_each(|(all, one)| all.push(one));
        }
    }
    for ends in [&clear.0, &tls.0] {
        for (end, theirs) in ends.iter().zip([2, 1]) {
            assert!(
                end.target.whole().to_vec().iter().all(|byte| *byte == theirs),
                "the right bytes arrived"
            );
        }
    }
    let [sealing, opening] = [0, 1].map(|at| median(ciphers.iter().map(|one| one[at]).collect()) / 1e9);
    println!("| | sockets | `tcp` in clear | plain rustls | `tcp` with TLS | AES-128-GCM alone |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for (at, (case, unit)) in
        [("8 bytes, one way", "µs"), ("16 MiB, one way", "GB/s"), ("16 MiB, both ways", "GB/s")]
            .iter()
            .enumerate()
    {
        let [a, b, c, d] = results.each_ref().map(|all| median(all.iter().map(|one| one[at]).collect()));
        // Both ways each of two threads seals what it sends and opens what it receives.
        let cipher = match at {
            0 => "–".to_owned(),
            1 => format!("{:.2}", sealing.min(opening)),
            _ => format!("{:.2}", 2.0 / (1.0 / sealing + 1.0 / opening)),
        };
        println!("| {case}, {unit} | {a:.2} | {b:.2} | {c:.2} | {d:.2} | {cipher} |");
    }
}
