//! A store in rank 0's process that the other ranks reach by TCP.
//!
//! Rank 0 is a client of its own store like every rank. The ends prove to each other that they know
//! the secret ([`crate::auth`]). Without a configured secret, which is possible on loopback only,
//! rank 0 makes one and gives it to processes of its own user ([`same_user`]). Other clients are
//! rejected without harm, and a server that is not a store is detected by its first bytes.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::Duration;

use super::backoff::Backoff;
use super::{Claim, OpenError, Store, StoreError, StorePath, check, cut};
use crate::auth::{Challenges, Secret, Side, challenge};
use crate::clock::now;
use crate::control::packet;
use crate::device::files_allowed;
use crate::{Nanos, Rank};

mod codec;
mod same_user;
mod server;

use codec::{
    ANSWER_BYTES_MAX, Answer, HELLO_BYTES, Hello, MAGIC, Proof, Request, VERDICT_BYTES, VERSION, Verdict,
};
use same_user::AskError;
use server::{HANDSHAKE_TIMEOUT, Server};

/// See [`super::check_decoders`].
pub(super) fn check_decoders(bytes: &[u8]) {
    if let Ok(Some((frame, _))) = codec::frame(bytes, codec::REQUEST_BYTES_MAX.max(ANSWER_BYTES_MAX)) {
        if let Ok(request) = Request::decode(frame) {
            assert_eq!(&request.encode()[4..], frame);
        }
        if let Ok(answer) = Answer::decode(frame) {
            assert_eq!(&answer.encode()[4..], frame);
        }
    }
    if let Some(Ok(hello)) = bytes.first_chunk().map(Hello::decode) {
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
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

/// How many bytes of a foreign server's answer are shown.
const ANSWER_SHOWN_BYTES: usize = 24;

/// A connection to the store of rank 0; in rank 0 also the store itself, which lives until this is
/// dropped.
pub struct TcpStore {
    address: String,
    stream: TcpStream,
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
    /// See [`OpenError`].
    pub fn open(
        address: &str,
        rank: Rank,
        world_size: u32,
        secret: Option<&Secret>,
        deadline: Nanos,
    ) -> Result<Self, OpenError> {
        let resolved = resolve(address, secret, deadline)?;
        let (mut server, mut unreachable) = (None, None);
        if rank == 0 {
            let places = listen_addresses(address, &resolved, secret.is_some());
            server = Some(listen(address, &places, world_size, secret, deadline)?);
            if is_named(address) && places.iter().all(|place| place.ip().is_loopback()) {
                let own = places[0].ip();
                unreachable = Some(format!(
                    "ranks of other hosts, since {address} is {own} on rank 0's host and there is no secret; set PLEACH_SECRET_FILE"
                ));
            }
        }
        let dialer = Dialer { address, resolved: &resolved, rank, world_size, secret };
        let stream = dialer.dial(deadline)?;
        Ok(Self { address: address.to_owned(), stream, input: Vec::new(), unreachable, server })
    }

    fn request(&mut self, request: &Request, deadline: Nanos) -> Result<Answer, StoreError> {
        let lost = |source| StoreError::Lost { address: self.address.clone(), source };
        let protocol = || StoreError::Protocol { address: self.address.clone() };
        if let Some(server) = &mut self.server {
            server.ends_by(deadline);
        }
        let left = || match deadline.since(now()) {
            Duration::ZERO => Err(lost(io::ErrorKind::TimedOut.into())),
            left => Ok(left),
        };
        self.stream.set_write_timeout(Some(left()?)).map_err(lost)?;
        self.stream.write_all(&request.encode()).map_err(lost)?;
        loop {
            if let Some((inside, taken)) =
                codec::frame(&self.input, ANSWER_BYTES_MAX).map_err(|_| protocol())?
            {
                let answer = Answer::decode(inside).map_err(|_| protocol())?;
                self.input.drain(..taken);
                return Ok(answer);
            }
            self.stream.set_read_timeout(Some(left()?)).map_err(lost)?;
            let mut buffer = [0; 16 * 1024];
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(lost(io::ErrorKind::ConnectionAborted.into())),
                Ok(count) => self.input.extend_from_slice(&buffer[..count]),
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
        for keys in keys.chunks(codec::KEYS_MAX) {
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

/// Resolves the address, and checks that it may be used with this secret.
fn resolve(address: &str, secret: Option<&Secret>, deadline: Nanos) -> Result<Vec<SocketAddr>, OpenError> {
    let failed = |source| OpenError::Resolve { address: address.to_owned(), source };
    let resolved = look_up(address, deadline).map_err(failed)?;
    if resolved.is_empty() {
        return Err(failed(io::ErrorKind::NotFound.into()));
    }
    if secret.is_none() && resolved.iter().any(|address| !address.ip().is_loopback()) {
        return Err(OpenError::SecretRequired { address: address.to_owned() });
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
    world_size: u32,
    secret: Option<&Secret>,
    deadline: Nanos,
) -> Result<Server, OpenError> {
    TcpListener::bind(places)
        .and_then(|listener| Server::start(listener, world_size, secret.cloned(), deadline))
        .map_err(|source| match (source.kind(), files_allowed(&source)) {
            (_, Some(most)) => OpenError::Files { most },
            (io::ErrorKind::AddrInUse, _) => OpenError::PortInUse { address: address.to_owned() },
            _ => OpenError::Listen { address: address.to_owned(), source },
        })
}

/// Why an attempt to connect failed.
enum Refusal {
    /// Trying again may help: no listener, closed, silent.
    Later(io::Error),
    /// The job there has all its ranks; it may be the previous job.
    Complete,
    /// Trying again does not help.
    Final(OpenError),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        match files_allowed(&error) {
            Some(most) => Self::Final(OpenError::Files { most }),
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
}

impl Dialer<'_> {
    fn dial(&self, deadline: Nanos) -> Result<TcpStream, OpenError> {
        let mut backoff = Backoff::until(deadline);
        let mut last = Refusal::Later(io::ErrorKind::TimedOut.into());
        loop {
            for socket_address in self.resolved {
                // At least a little, else an expired deadline would give no reason.
                let limit = backoff.left().clamp(Duration::from_millis(1), CONNECT_TIMEOUT);
                let stream = TcpStream::connect_timeout(socket_address, limit);
                match stream.map_err(Refusal::from).and_then(|stream| self.shake_hands(stream, &backoff)) {
                    Ok(stream) => return Ok(stream),
                    Err(Refusal::Final(error)) => return Err(error),
                    // An attempt that the deadline cut short is less informative than the previous
                    // one.
                    Err(Refusal::Later(_)) if matches!(last, Refusal::Complete) => {}
                    Err(refusal) => last = refusal,
                }
            }
            if !backoff.again() {
                let (place, waited) = (self.address.to_owned(), backoff.waited());
                return Err(match last {
                    Refusal::Later(source) => OpenError::Unreachable { address: place, waited, source },
                    Refusal::Complete => OpenError::Complete { place, waited },
                    Refusal::Final(error) => error,
                });
            }
        }
    }

    fn shake_hands(&self, mut stream: TcpStream, backoff: &Backoff) -> Result<TcpStream, Refusal> {
        let limit = backoff.left().clamp(Duration::from_millis(1), HANDSHAKE_TIMEOUT);
        if stream.local_addr()? == stream.peer_addr()? {
            // No listener, and the kernel chose the same port for this end: a connection to
            // itself.
            return Err(io::Error::from(io::ErrorKind::ConnectionRefused).into());
        }
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(limit))?;
        let until = now() + limit;
        let own = Hello { version: VERSION, challenge: challenge() };
        stream.write_all(&own.encode())?;
        let mut bytes = [0; HELLO_BYTES];
        read_until(&mut stream, &mut bytes, until, |said| {
            if Hello::is_prefix(said) { Ok(()) } else { Err(self.foreign(said)) }
        })?;
        let theirs = Hello::decode(&bytes).map_err(|_| self.foreign(&bytes))?;
        if theirs.version != VERSION {
            let address = self.address.to_owned();
            return Err(Refusal::Final(OpenError::Version { address, own: VERSION, theirs: theirs.version }));
        }
        let made;
        let secret = match self.secret {
            Some(secret) => secret,
            None => {
                made = self.request_secret(stream.peer_addr()?, until)?;
                &made
            }
        };
        let claim = Proof::claim(self.rank, self.world_size);
        let challenges = Challenges::new(Side::Dialer, own.challenge, theirs.challenge);
        let answer = challenges.answer(Some(secret), &claim);
        stream.write_all(&Proof { rank: self.rank, world_size: self.world_size, answer }.encode())?;
        let mut bytes = [0; VERDICT_BYTES];
        read_until(&mut stream, &mut bytes, until, |_| Ok(()))?;
        let wrong_secret = || Refusal::Final(OpenError::WrongSecret { address: self.address.to_owned() });
        match Verdict::decode(&bytes).map_err(|_| self.foreign(&bytes))? {
            Verdict::Welcome(answer) => {
                let known = challenges.verify(Some(secret), &claim, &answer);
                if known { Ok(stream) } else { Err(wrong_secret()) }
            }
            Verdict::WrongSecret => Err(wrong_secret()),
            Verdict::Complete => Err(Refusal::Complete),
        }
    }

    /// The secret that the store gives to processes of its user.
    fn request_secret(&self, store: SocketAddr, until: Nanos) -> Result<Secret, Refusal> {
        match same_user::request_secret(store, until) {
            Ok(secret) => Ok(secret),
            // The store has a configured secret, and will reject this rank.
            Err(AskError::NotHandedOut) => Ok(Secret::fresh()),
            Err(AskError::OtherUser(owner)) => {
                let (place, user) = (self.address.to_owned(), packet::own_user());
                Err(Refusal::Final(OpenError::Owner { place, owner, user }))
            }
            Err(AskError::System(error)) => Err(error.into()),
        }
    }

    fn foreign(&self, said: &[u8]) -> Refusal {
        // A prefix that is ours has no information.
        let ours = said.iter().zip(MAGIC).take_while(|(said, own)| said == own).count();
        let said = if ours == MAGIC.len() { &said[ours..] } else { said };
        let answer = said[..said.len().min(ANSWER_SHOWN_BYTES)].to_vec();
        Refusal::Final(OpenError::Foreign { address: self.address.to_owned(), answer })
    }
}

/// Fills `bytes`, and checks them after every read.
fn read_until(
    stream: &mut TcpStream,
    bytes: &mut [u8],
    until: Nanos,
    check: impl Fn(&[u8]) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    let mut filled = 0;
    while filled < bytes.len() {
        let left = until.since(now());
        if left.is_zero() {
            return Err(
                io::Error::new(io::ErrorKind::TimedOut, "it accepts connections but says nothing").into()
            );
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut bytes[filled..]) {
            Ok(0) => {
                let closed = "it closes the connection";
                return Err(io::Error::new(io::ErrorKind::ConnectionAborted, closed).into());
            }
            Ok(count) => filled += count,
            Err(error) if is_retry(&error) => {}
            Err(error) => return Err(error.into()),
        }
        check(&bytes[..filled])?;
    }
    Ok(())
}

/// Whether a read was only interrupted, or timed out.
fn is_retry(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests;
