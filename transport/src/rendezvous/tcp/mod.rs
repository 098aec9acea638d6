//! A store in rank 0's process that the other ranks reach by TCP.
//!
//! Rank 0 is a client of its own store like every rank. The ends prove to each other that they know
//! the secret ([`crate::auth`]). Without a configured secret, which is possible on loopback only,
//! rank 0 makes one and gives it to processes of its own user ([`same_user`]). Other clients are
//! rejected without harm, and a server that is not a store is detected by its first bytes.
//!
//! The messages of a connection are a handshake of fixed sizes, then frames with a length prefix.
//! Bytes that do not decode, or are longer than allowed, are [`Malformed`]. If both hellos say so,
//! all after them goes through TLS ([`crate::tls`]), and the proofs cover the store's key.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use super::backoff::Backoff;
use super::{
    Claim, KEY_BYTES_MAX, OpenStoreError, REASON_BYTES_MAX, Store, StoreError, StorePath, VALUE_BYTES_MAX,
    check, cut,
};
use crate::auth::{Challenges, Secret, Side, TAG_BYTES, challenge};
use crate::clock::now;
use crate::control::packet;
use crate::device::{Protection, ProtocolViolation, files_allowed};
use crate::tls::{Session, Tls};
use crate::wire::{Malformed, Reader, Writer};
use crate::{Nanos, Rank};

#[cfg(test)]
mod message_tests;
mod same_user;
mod server;

use same_user::AskError;
use server::{HANDSHAKE_TIMEOUT, READ_BYTES, Server};

/// See [`super::check_decoders`].
pub(super) fn check_decoders(bytes: &[u8]) {
    if let Ok(Some((frame, _))) = frame(bytes, REQUEST_BYTES_MAX.max(ANSWER_BYTES_MAX)) {
        if let Ok(request) = Request::decode(frame) {
            assert_eq!(&request.encode()[4..], frame);
        }
        if let Ok(answer) = Answer::decode(frame) {
            assert_eq!(&answer.encode()[4..], frame);
        }
    }
    if let Some(Ok(hello)) = bytes.first_chunk().map(StoreHello::decode) {
        assert_eq!(StoreHello::decode(&hello.encode()), Ok(hello));
    }
    if let Some(Ok(proof)) = bytes.first_chunk().map(Proof::decode) {
        assert_eq!(Proof::decode(&proof.encode()), Ok(proof));
    }
    if let Some(Ok(verdict)) = bytes.first_chunk().map(Verdict::decode) {
        assert_eq!(Verdict::decode(&verdict.encode()), Ok(verdict));
    }
}

/// Time limit of a single connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How often a wait for an answer looks at the clock.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// How long an answer is awaited at least, also of a request that is sent behind its deadline.
const ANSWER_TIME_MIN: Duration = Duration::from_millis(500);

/// How many bytes of a foreign server's answer are shown.
const ANSWER_SHOWN_BYTES: usize = 24;

/// A connection to the store of rank 0; in rank 0 also the store itself, which lives until this is
/// dropped.
pub struct TcpStore {
    address: String,
    stream: TcpStream,
    /// The keys, if the connection speaks TLS.
    session: Option<Session>,
    input: Vec<u8>,
    /// Why ranks of other hosts cannot connect, if known.
    unreachable: Option<String>,
    /// Dropped after the stream: the last answers to others are still sent.
    server: Option<Server>,
}

impl TcpStore {
    /// Opens the store at `address` (`HOST:PORT`): rank 0 creates it, the others connect, and retry
    /// until the deadline.
    ///
    /// # Errors
    ///
    /// See [`OpenStoreError`].
    pub fn open(
        address: &str,
        rank: Rank,
        world_size: u32,
        secret: Option<&Secret>,
        deadline: Nanos,
    ) -> Result<Self, OpenStoreError> {
        let resolved = resolve(address, secret, deadline)?;
        let tls = secret.map_or_else(Tls::from_env, Secret::tls)?;
        let (mut server, mut unreachable) = (None, None);
        if rank == 0 {
            let places = listen_addresses(address, &resolved, secret.is_some());
            let secret = secret.cloned().map(|secret| secret.with_tls(tls.clone()));
            server = Some(listen(address, &places, (world_size, secret, tls.clone()), deadline)?);
            if is_named(address) && places.iter().all(|place| place.ip().is_loopback()) {
                let own = places[0].ip();
                unreachable = Some(format!(
                    "ranks of other hosts, since {address} is {own} on rank 0's host and there is no secret; set PLEACH_SECRET_FILE"
                ));
            }
        }
        let dialer = Dialer { address, resolved: &resolved, rank, world_size, secret, tls: &tls };
        let (stream, session) = dialer.dial(deadline)?;
        Ok(Self { address: address.to_owned(), stream, session, input: Vec::new(), unreachable, server })
    }

    fn request(&mut self, request: &Request, deadline: Nanos) -> Result<Answer, StoreError> {
        let lost = |source| StoreError::Lost { address: self.address.clone(), source };
        let protocol = || StoreError::Protocol { address: self.address.clone() };
        if let Some(server) = &mut self.server {
            server.ends_by(deadline);
        }
        let mut answer = Awaited::until(deadline);
        self.stream.set_write_timeout(Some(answer.left)).map_err(lost)?;
        let request = request.encode();
        let request = self.session.as_mut().map(|session| sealed(session, &request)).unwrap_or(request);
        self.stream.write_all(&request).map_err(lost)?;
        loop {
            if let Some((inside, taken)) = frame(&self.input, ANSWER_BYTES_MAX).map_err(|_| protocol())? {
                let answer = Answer::decode(inside).map_err(|_| protocol())?;
                self.input.drain(..taken);
                return Ok(answer);
            }
            let left = answer.look().ok_or_else(|| lost(io::ErrorKind::TimedOut.into()))?;
            self.stream.set_read_timeout(Some(left)).map_err(lost)?;
            match receive(&mut self.stream, self.session.as_mut(), &mut self.input) {
                Ok(0) => return Err(lost(io::ErrorKind::ConnectionAborted.into())),
                Ok(_) => {}
                Err(error) if is_retry(&error) => {}
                Err(error) => return Err(lost(error)),
            }
        }
    }

    fn unexpected(&self) -> StoreError {
        StoreError::Protocol { address: self.address.clone() }
    }
}

impl Store for TcpStore {
    fn set(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<(), StoreError> {
        check(key, value)?;
        match self.request(&Request::Set { key: key.to_owned(), value: value.to_vec() }, deadline)? {
            Answer::Done => Ok(()),
            Answer::Refused => Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() }),
            _ => Err(self.unexpected()),
        }
    }

    fn claim(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<Claim, StoreError> {
        check(key, value)?;
        match self.request(&Request::Claim { key: key.to_owned(), value: value.to_vec() }, deadline)? {
            Answer::Taken => Ok(Claim::Taken),
            Answer::Present(value) => Ok(Claim::Present(value)),
            Answer::Refused => Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() }),
            _ => Err(self.unexpected()),
        }
    }

    fn wait(&mut self, keys: &[String], until: Nanos, deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        let started = now();
        let mut values = Vec::with_capacity(keys.len());
        for keys in keys.chunks(KEYS_MAX) {
            let limit_ms = u64::try_from(until.since(now()).as_millis()).unwrap_or(u64::MAX);
            match self.request(&Request::Wait { keys: keys.to_vec(), limit_ms }, deadline)? {
                Answer::Values(some) if some.len() == keys.len() => values.extend(some),
                Answer::Failed(reason) => return Err(StoreError::Failed { reason }),
                Answer::Missing { places, refused } => {
                    let keys = places.iter().filter_map(|&place| keys.get(place as usize).cloned()).collect();
                    let refused = refused.or_else(|| self.unreachable.clone());
                    return Err(StoreError::Missing { keys, waited: now().since(started), refused });
                }
                _ => return Err(self.unexpected()),
            }
        }
        Ok(values)
    }

    fn fail(&mut self, reason: &str, deadline: Nanos) {
        // If rank 0 is gone, the others find out themselves.
        let _ = self.request(&Request::Fail { reason: cut(reason).to_owned() }, deadline);
    }

    fn seal(&mut self, deadline: Nanos) {
        let _ = self.request(&Request::Seal, deadline);
    }

    fn path(&self) -> Option<StorePath> {
        let [local, remote] = [self.stream.local_addr(), self.stream.peer_addr()];
        Some(StorePath { local: local.ok()?.ip().to_canonical(), remote: remote.ok()?.ip().to_canonical() })
    }
}

/// How long an answer is still awaited. Time passes only while this process runs: what was answered
/// while the process was stopped, or got no processor, is read though the deadline has passed.
struct Awaited {
    left: Duration,
    looked: Nanos,
}

impl Awaited {
    fn until(deadline: Nanos) -> Self {
        let looked = now();
        Self { left: deadline.since(looked).max(ANSWER_TIME_MIN), looked }
    }

    /// The time until the next look at the latest; `None` when the time is up.
    fn look(&mut self) -> Option<Duration> {
        let time = now();
        self.left = self.left.saturating_sub(time.since(self.looked).min(2 * LOOK_INTERVAL));
        self.looked = time;
        Some(self.left.min(LOOK_INTERVAL)).filter(|left| !left.is_zero())
    }
}

/// Resolves the address, and checks that it may be used with this secret.
fn resolve(
    address: &str,
    secret: Option<&Secret>,
    deadline: Nanos,
) -> Result<Vec<SocketAddr>, OpenStoreError> {
    let failed = |source| OpenStoreError::Resolve { address: address.to_owned(), source };
    let resolved = look_up(address, deadline).map_err(failed)?;
    if resolved.is_empty() {
        return Err(failed(io::ErrorKind::NotFound.into()));
    }
    if secret.is_none() && resolved.iter().any(|address| !address.ip().is_loopback()) {
        return Err(OpenStoreError::SecretRequired { address: address.to_owned() });
    }
    Ok(resolved)
}

/// Resolves a name, up to the deadline: a silent name server may take longer.
fn look_up(address: &str, deadline: Nanos) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let (sender, receiver) = mpsc::channel();
    let address = address.to_owned();
    // Not joined: the system's resolver cannot be told to stop.
    std::thread::Builder::new().name("pleach-resolver".to_owned()).spawn(move || {
        // The receiver is gone if it took too long.
        let _ = sender.send(address.to_socket_addrs().map(Iterator::collect));
    })?;
    receiver.recv_timeout(deadline.since(now())).map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

/// Whether the host is a name other than localhost.
fn is_named(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).to_ascii_lowercase();
    let is_localhost = host
        .split('.')
        .next()
        .is_some_and(|first| ["localhost", "ip6-localhost", "ip6-loopback"].contains(&first))
        || host.ends_with(".localhost");
    !is_localhost && address.parse::<SocketAddr>().is_err()
}

/// The addresses at which rank 0 tries to listen, in order. A name may have several addresses, or
/// be 127.0.1.1 on its own host (as on Debian), while other hosts know another address: then rank 0
/// listens on all addresses, if there is a secret.
fn listen_addresses(address: &str, resolved: &[SocketAddr], has_secret: bool) -> Vec<SocketAddr> {
    let mut outside: Vec<_> = resolved.iter().filter(|place| !place.ip().is_loopback()).copied().collect();
    outside.dedup();
    match (&outside[..], has_secret && is_named(address)) {
        ([one], true) => vec![*one],
        (_, true) => {
            let port = resolved[0].port();
            vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()]
        }
        _ => resolved.to_vec(),
    }
}

fn listen(
    address: &str,
    places: &[SocketAddr],
    (world_size, secret, tls): (u32, Option<Secret>, Tls),
    deadline: Nanos,
) -> Result<Server, OpenStoreError> {
    TcpListener::bind(places)
        .and_then(|listener| Server::start(listener, world_size, secret, tls, deadline))
        .map_err(|source| match (source.kind(), files_allowed(&source)) {
            (_, Some(most)) => OpenStoreError::Files { most },
            (io::ErrorKind::AddrInUse, _) => OpenStoreError::PortInUse { address: address.to_owned() },
            _ => OpenStoreError::Listen { address: address.to_owned(), source },
        })
}

/// Why an attempt to connect failed.
enum DialFailure {
    /// Trying again may help: no listener, closed, silent.
    Later(io::Error),
    /// The job there has all its ranks; it may be the previous job.
    Complete,
    /// Trying again does not help.
    Final(OpenStoreError),
}

impl From<io::Error> for DialFailure {
    fn from(error: io::Error) -> Self {
        match files_allowed(&error) {
            Some(most) => Self::Final(OpenStoreError::Files { most }),
            None => Self::Later(error),
        }
    }
}

/// The parameters of a connect.
struct Dialer<'a> {
    address: &'a str,
    resolved: &'a [SocketAddr],
    rank: Rank,
    world_size: u32,
    secret: Option<&'a Secret>,
    tls: &'a Tls,
}

/// A connection to the store, with its keys if it speaks TLS.
type StoreStream = (TcpStream, Option<Session>);

impl Dialer<'_> {
    fn dial(&self, deadline: Nanos) -> Result<StoreStream, OpenStoreError> {
        let mut backoff = Backoff::until(deadline);
        let mut last = DialFailure::Later(io::ErrorKind::TimedOut.into());
        loop {
            for socket_address in self.resolved {
                // At least a little, else an expired deadline would give no reason.
                let limit = backoff.left().clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
                let stream = TcpStream::connect_timeout(socket_address, limit);
                match stream.map_err(DialFailure::from).and_then(|stream| self.shake_hands(stream, &backoff))
                {
                    Ok(stream) => return Ok(stream),
                    Err(DialFailure::Final(error)) => return Err(error),
                    // An attempt that the deadline cut short is less informative than the previous
                    // one.
                    Err(DialFailure::Later(_)) if matches!(last, DialFailure::Complete) => {}
                    Err(refusal) => last = refusal,
                }
            }
            if !backoff.again() {
                let (place, waited) = (self.address.to_owned(), backoff.waited());
                return Err(match last {
                    DialFailure::Later(source) => {
                        OpenStoreError::Unreachable { address: place, waited, source }
                    }
                    DialFailure::Complete => OpenStoreError::Complete { place, waited },
                    DialFailure::Final(error) => error,
                });
            }
        }
    }

    fn shake_hands(&self, mut stream: TcpStream, backoff: &Backoff) -> Result<StoreStream, DialFailure> {
        let limit = backoff.left().clamp(Duration::from_millis(1), HANDSHAKE_TIMEOUT);
        if stream.local_addr()? == stream.peer_addr()? {
            // No listener, and the kernel chose the same port for this end: a connection to
            // itself.
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        }
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(limit))?;
        let until = now() + limit;
        let protection = self.tls.asked(stream.peer_addr()?.ip());
        let own = StoreHello { version: VERSION, protection, challenge: challenge() };
        stream.write_all(&own.encode())?;
        let mut bytes = [0; HELLO_BYTES];
        read_until(&mut stream, &mut bytes, until, |said| {
            if StoreHello::is_prefix(said) { Ok(()) } else { Err(self.foreign(said)) }
        })?;
        let theirs = StoreHello::decode(&bytes).map_err(|_| self.foreign(&bytes))?;
        if theirs.version != VERSION {
            let address = self.address.to_owned();
            return Err(DialFailure::Final(OpenStoreError::Version {
                address,
                own: VERSION,
                theirs: theirs.version,
            }));
        }
        if theirs.protection != protection {
            let (address, theirs) = (self.address.to_owned(), theirs.protection);
            return Err(DialFailure::Final(OpenStoreError::Protection { address, own: protection, theirs }));
        }
        let mut session = None;
        if protection != Protection::Clear {
            session = Some(self.shake_hands_of_tls(&mut stream, until)?);
        }
        let made;
        let secret = match self.secret {
            Some(secret) => secret,
            None => {
                made = self.request_secret(stream.peer_addr()?, until)?;
                &made
            }
        };
        let claim = bound(&Proof::claim(self.rank, self.world_size), session.as_ref());
        let challenges = Challenges::new(Side::Dialer, own.challenge, theirs.challenge);
        let answer = challenges.answer(Some(secret), &claim);
        let proof = Proof { rank: self.rank, world_size: self.world_size, answer }.encode();
        let mut bytes = [0; VERDICT_BYTES];
        match &mut session {
            None => {
                stream.write_all(&proof)?;
                read_until(&mut stream, &mut bytes, until, |_| Ok(()))?;
            }
            Some(session) => {
                stream.write_all(&sealed(session, &proof))?;
                self.read_sealed(&mut stream, session, &mut bytes, until)?;
            }
        }
        let wrong_secret =
            || DialFailure::Final(OpenStoreError::WrongSecret { address: self.address.to_owned() });
        match Verdict::decode(&bytes).map_err(|_| self.foreign(&bytes))? {
            Verdict::Welcome(answer) => {
                let known = challenges.verify(Some(secret), &claim, &answer);
                if known { Ok((stream, session)) } else { Err(wrong_secret()) }
            }
            Verdict::WrongSecret => Err(wrong_secret()),
            Verdict::Complete => Err(DialFailure::Complete),
        }
    }

    fn shake_hands_of_tls(&self, stream: &mut TcpStream, until: Nanos) -> Result<Session, DialFailure> {
        let mut handshake = self.tls.dial().map_err(|violation| self.violated(violation))?;
        loop {
            stream.write_all(&handshake.take_outgoing())?;
            let count = read_some(stream, handshake.room(), until)?;
            match handshake.received(count) {
                Ok(false) => {}
                Ok(true) => break,
                Err(violation) => {
                    // The alert that tells the store.
                    let _ = stream.write_all(&handshake.take_outgoing());
                    return Err(self.violated(violation));
                }
            }
        }
        stream.write_all(&handshake.take_outgoing())?;
        handshake.finish().map_err(|violation| self.violated(violation))
    }

    /// Reads one message that comes in one record.
    fn read_sealed(
        &self,
        stream: &mut TcpStream,
        session: &mut Session,
        bytes: &mut [u8],
        until: Nanos,
    ) -> Result<(), DialFailure> {
        loop {
            let plain = session.reader().plain().map_err(|violation| self.violated(violation))?;
            if plain.len() == bytes.len() {
                bytes.copy_from_slice(plain);
                session.reader().take(bytes.len());
                return Ok(());
            }
            if !plain.is_empty() {
                return Err(self.violated(ProtocolViolation::MalformedFrame));
            }
            let count = read_some(stream, session.reader().room_of_record(), until)?;
            session.reader().received(count);
        }
    }

    fn violated(&self, violation: impl Into<ProtocolViolation>) -> DialFailure {
        let (address, violation) = (self.address.to_owned(), violation.into());
        DialFailure::Final(OpenStoreError::Violated { address, violation })
    }

    /// The secret that the store gives to processes of its user.
    fn request_secret(&self, store: SocketAddr, until: Nanos) -> Result<Secret, DialFailure> {
        match same_user::request_secret(store, until) {
            Ok(secret) => Ok(secret),
            // The store has a configured secret, and will reject this rank.
            Err(AskError::NotHandedOut) => Ok(Secret::fresh()),
            Err(AskError::OtherUser(owner)) => {
                let (place, user) = (self.address.to_owned(), packet::own_user());
                Err(DialFailure::Final(OpenStoreError::Owner { place, owner, user }))
            }
            Err(AskError::System(error)) => Err(error.into()),
        }
    }

    fn foreign(&self, said: &[u8]) -> DialFailure {
        // A prefix that is ours has no information.
        let ours = said.iter().zip(MAGIC).take_while(|(said, own)| said == own).count();
        let said = if ours == MAGIC.len() { &said[ours..] } else { said };
        let answer = said[..said.len().min(ANSWER_SHOWN_BYTES)].to_vec();
        DialFailure::Final(OpenStoreError::Foreign { address: self.address.to_owned(), answer })
    }
}

/// Fills `bytes`, and checks them after every read.
fn read_until(
    stream: &mut TcpStream,
    bytes: &mut [u8],
    until: Nanos,
    check: impl Fn(&[u8]) -> Result<(), DialFailure>,
) -> Result<(), DialFailure> {
    let mut filled = 0;
    while filled < bytes.len() {
        filled += read_some(stream, &mut bytes[filled..], until)?;
        check(&bytes[..filled])?;
    }
    Ok(())
}

/// Reads once; at least one byte.
fn read_some(stream: &mut TcpStream, bytes: &mut [u8], until: Nanos) -> Result<usize, DialFailure> {
    loop {
        let left = until.since(now());
        if left.is_zero() {
            return Err(
                io::Error::new(io::ErrorKind::TimedOut, "it accepts connections but says nothing").into()
            );
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(bytes) {
            Ok(0) => {
                let closed = "it closes the connection";
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, closed).into());
            }
            Ok(count) => return Ok(count),
            Err(error) if is_retry(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The claim of a proof, which holds on this connection alone if it speaks TLS.
fn bound(claim: &[u8], session: Option<&Session>) -> Vec<u8> {
    let binding = session.map(|session| &session.binding()[..]);
    [claim, binding.unwrap_or_default()].concat()
}

/// The bytes as records.
fn sealed(session: &mut Session, bytes: &[u8]) -> Vec<u8> {
    session.writer().seal(bytes);
    session.writer().take_waiting()
}

/// Reads once from a stream whose handshake is over, and appends all that was opened to `input`.
/// Returns the number of bytes that were read; zero at the end of the stream.
fn receive(stream: &mut TcpStream, session: Option<&mut Session>, input: &mut Vec<u8>) -> io::Result<usize> {
    let Some(session) = session else {
        let mut buffer = [0; READ_BYTES];
        let count = stream.read(&mut buffer)?;
        input.extend_from_slice(&buffer[..count]);
        return Ok(count);
    };
    let count = stream.read(session.reader().room(1))?;
    session.reader().received(count);
    loop {
        let plain = session.reader().plain().map_err(io::Error::other)?;
        let opened = plain.len();
        if opened == 0 {
            return Ok(count);
        }
        input.extend_from_slice(plain);
        session.reader().take(opened);
    }
}

/// Whether a read was only interrupted, or timed out.
fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

/// The first bytes of both ends. They end like an HTTP request, so that an HTTP server answers
/// (with an error) at once.
const MAGIC: &[u8; 16] = b"PLEACH STORE\r\n\r\n";

/// Version of this protocol.
const VERSION: u16 = 1;

/// The bits of a version's place that say how the sender protects the connection.
const PROTECTION_SHIFT: u32 = 14;

/// Length of [`StoreHello`] on the wire.
const HELLO_BYTES: usize = MAGIC.len() + 2 + TAG_BYTES;

/// Length of [`Proof`] on the wire.
const PROOF_BYTES: usize = 8 + TAG_BYTES;

/// Length of [`Verdict`] on the wire.
const VERDICT_BYTES: usize = 1 + TAG_BYTES;

/// Most keys in one request; longer waits use several requests.
const KEYS_MAX: usize = 256;

/// Longest request, in bytes.
const REQUEST_BYTES_MAX: usize = 16 + KEYS_MAX * (4 + KEY_BYTES_MAX);

/// Longest answer, in bytes.
const ANSWER_BYTES_MAX: usize = 16 + KEYS_MAX * (4 + VALUE_BYTES_MAX);

/// The first message of either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StoreHello {
    version: u16,
    protection: Protection,
    challenge: [u8; TAG_BYTES],
}

impl StoreHello {
    fn encode(&self) -> [u8; HELLO_BYTES] {
        let protection = match self.protection {
            Protection::Clear => 0,
            Protection::Secret => 1,
            Protection::Certificates => 2,
        };
        let version = self.version | (protection << PROTECTION_SHIFT);
        Writer::default().raw(MAGIC).u16(version).raw(&self.challenge).to_array()
    }

    fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != *MAGIC {
            return Err(Malformed);
        }
        let version = reader.u16()?;
        let protection = match version >> PROTECTION_SHIFT {
            0 => Protection::Clear,
            1 => Protection::Secret,
            2 => Protection::Certificates,
            _ => return Err(Malformed),
        };
        let version = version & ((1 << PROTECTION_SHIFT) - 1);
        Ok(Self { version, protection, challenge: reader.array()? })
    }

    /// Whether `bytes` can be the beginning of a hello.
    fn is_prefix(bytes: &[u8]) -> bool {
        let length = bytes.len().min(MAGIC.len());
        bytes[..length] == MAGIC[..length]
    }
}

/// The dialer's identity, and its proof of the secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Proof {
    rank: u32,
    world_size: u32,
    answer: [u8; TAG_BYTES],
}

impl Proof {
    fn encode(&self) -> [u8; PROOF_BYTES] {
        Writer::default().raw(&Self::claim(self.rank, self.world_size)).raw(&self.answer).to_array()
    }

    fn decode(bytes: &[u8; PROOF_BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        Ok(Self { rank: reader.u32()?, world_size: reader.u32()?, answer: reader.array()? })
    }

    /// The claim of the proof.
    fn claim(rank: u32, world_size: u32) -> [u8; 8] {
        Writer::default().u32(rank).u32(world_size).to_array()
    }
}

/// The listener's decision on a dialer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Admitted; the tag proves that the listener knows the secret too.
    Welcome([u8; TAG_BYTES]),
    /// The dialer did not prove that it knows the secret.
    WrongSecret,
    /// All ranks are here.
    Complete,
}

impl Verdict {
    fn encode(&self) -> [u8; VERDICT_BYTES] {
        let (kind, answer) = match self {
            Self::Welcome(answer) => (0, *answer),
            Self::WrongSecret => (1, [0; TAG_BYTES]),
            Self::Complete => (2, [0; TAG_BYTES]),
        };
        Writer::default().u8(kind).raw(&answer).to_array()
    }

    fn decode(bytes: &[u8; VERDICT_BYTES]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        match reader.u8()? {
            0 => Ok(Self::Welcome(reader.array()?)),
            1 => Ok(Self::WrongSecret),
            2 => Ok(Self::Complete),
            _ => Err(Malformed),
        }
    }
}

/// A request of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Request {
    Set { key: String, value: Vec<u8> },
    Claim { key: String, value: Vec<u8> },
    Wait { keys: Vec<String>, limit_ms: u64 },
    Fail { reason: String },
    Seal,
}

/// An answer of the store, in the order of the requests.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Answer {
    /// Set, failed or sealed.
    Done,
    /// A claim that succeeded.
    Taken,
    /// A claim of a key that is set, with its value.
    Present(Vec<u8>),
    /// The values of all keys.
    Values(Vec<Vec<u8>>),
    /// Time is up: the missing keys (by index in the request), and the last rank that was refused.
    Missing { places: Vec<u32>, refused: Option<String> },
    /// A rank has ended the rendezvous.
    Failed(String),
    /// The table is full, or the key is set already.
    Refused,
}

impl Request {
    /// The frame with its length prefix.
    fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        let writer = match self {
            Self::Set { key, value } => writer.u8(0).bytes(key.as_bytes()).bytes(value),
            Self::Claim { key, value } => writer.u8(1).bytes(key.as_bytes()).bytes(value),
            Self::Wait { keys, limit_ms } => {
                let writer = writer.u8(2).u64(*limit_ms).count(keys.len());
                keys.iter().fold(writer, |writer, key| writer.bytes(key.as_bytes()))
            }
            Self::Fail { reason } => writer.u8(3).bytes(reason.as_bytes()),
            Self::Seal => writer.u8(4),
        };
        with_length(&writer.finish())
    }

    /// Decodes a frame without its length prefix.
    fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(frame);
        let request = match reader.u8()? {
            0 => {
                Self::Set { key: reader.text(KEY_BYTES_MAX)?, value: reader.bytes(VALUE_BYTES_MAX)?.to_vec() }
            }
            1 => Self::Claim {
                key: reader.text(KEY_BYTES_MAX)?,
                value: reader.bytes(VALUE_BYTES_MAX)?.to_vec(),
            },
            2 => {
                let limit_ms = reader.u64()?;
                let count = reader.count(KEYS_MAX)?;
                let keys = (0..count).map(|_| reader.text(KEY_BYTES_MAX)).collect::<Result<_, _>>()?;
                Self::Wait { keys, limit_ms }
            }
            3 => Self::Fail { reason: reader.text(REASON_BYTES_MAX)? },
            4 => Self::Seal,
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(request)
    }
}

impl Answer {
    /// The frame with its length prefix.
    fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        let writer = match self {
            Self::Done => writer.u8(0),
            Self::Taken => writer.u8(1),
            Self::Present(value) => writer.u8(2).bytes(value),
            Self::Values(values) => {
                values.iter().fold(writer.u8(3).count(values.len()), |writer, value| writer.bytes(value))
            }
            Self::Missing { places, refused } => {
                let refused = refused.as_deref().unwrap_or_default();
                let writer = writer.u8(4).bytes(refused.as_bytes()).count(places.len());
                places.iter().fold(writer, |writer, place| writer.u32(*place))
            }
            Self::Failed(reason) => writer.u8(5).bytes(reason.as_bytes()),
            Self::Refused => writer.u8(6),
        };
        with_length(&writer.finish())
    }

    /// Decodes a frame without its length prefix.
    fn decode(frame: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(frame);
        let answer = match reader.u8()? {
            0 => Self::Done,
            1 => Self::Taken,
            2 => Self::Present(reader.bytes(VALUE_BYTES_MAX)?.to_vec()),
            3 => {
                let count = reader.count(KEYS_MAX)?;
                let values = (0..count).map(|_| reader.bytes(VALUE_BYTES_MAX).map(<[u8]>::to_vec));
                Self::Values(values.collect::<Result<_, _>>()?)
            }
            4 => {
                let refused = Some(reader.text(REASON_BYTES_MAX)?).filter(|text| !text.is_empty());
                let count = reader.count(KEYS_MAX)?;
                Self::Missing { places: (0..count).map(|_| reader.u32()).collect::<Result<_, _>>()?, refused }
            }
            5 => Self::Failed(reader.text(REASON_BYTES_MAX)?),
            6 => Self::Refused,
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(answer)
    }
}

/// The first whole frame in `bytes` (without its length) and the number of bytes it takes; `None`:
/// more are needed.
fn frame(bytes: &[u8], bytes_max: usize) -> Result<Option<(&[u8], usize)>, Malformed> {
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > bytes_max {
        return Err(Malformed);
    }
    Ok(rest.get(..length).map(|frame| (frame, 4 + length)))
}

/// A frame after its length.
fn with_length(frame: &[u8]) -> Vec<u8> {
    Writer::default().bytes(frame).finish()
}

#[cfg(test)]
mod tests;
