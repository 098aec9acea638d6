//! The other machine of a pair: what each tells the other, and how they meet.
//!
//! One listens (`--listen`), one dials (`--peer`). Each proves that it knows the secret, if there
//! is one, tells a [`Statement`] in lines of `name value`, dials the port that the other tells,
//! knocks at the other's door for shared memory, and says what came of both. Then the two join as
//! ranks of a job do: the one that listens is rank 0. At last each compares alike. **Invariant:**
//! whoever is at the other end, words are limited in length and time, and what is not understood is
//! left out.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use pleach::transport::auth::{Challenges, Secret, Side, challenge};
use pleach::transport::device::WakeSource;
use pleach::transport::rendezvous::{
    FabricChoice, JoinOptions, Launcher, ProbeListener, ProbeOutcome, Rendezvous, World, join, probe,
};
use pleach::transport::{Nanos, Rank, clock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt};
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::compare::{PairResults, Statement};
use crate::cli::CommandError;
use crate::cli::silent::SilentResponder;

/// The default port of `--listen` and `--peer`.
const DEFAULT_PORT: u16 = 9401;

/// How long one word of the other may take to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// Longest statement, in bytes.
const STATEMENT_BYTES_MAX: u64 = 64 << 10;

/// How long a port that was told may take to answer: a firewall that drops packets says nothing.
const REACH_LIMIT: Duration = Duration::from_secs(3);

/// How long the two may take to join as ranks.
const JOIN_LIMIT: Duration = Duration::from_secs(15);

/// The protocol and version: the first bytes on a connection.
const GREETING: &[u8; 16] = b"pleach doctor 2\n";

/// `IP:PORT`, `:PORT` or `IP`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListenAddress(pub(super) SocketAddr);

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let anywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        if let Ok(address) = text.parse() {
            return Ok(Self(address));
        }
        if let Ok(ip) = text.trim_matches(['[', ']']).parse() {
            return Ok(Self(SocketAddr::new(ip, DEFAULT_PORT)));
        }
        let port = text.strip_prefix(':').unwrap_or(text).parse();
        port.map(|port| Self(SocketAddr::new(anywhere, port)))
            .map_err(|_| "it has the form IP, PORT or IP:PORT, as 10.0.0.5:9401".to_owned())
    }
}

/// Both statements, and what came of dialling and knocking.
pub(super) struct PeerReport {
    pub(super) own: Statement,
    pub(super) theirs: Statement,
    pub(super) reached: PairResults,
    pub(super) address: SocketAddr,
}

/// Waits for the other host.
pub(super) fn listen(
    address: SocketAddr,
    secret: Option<&Secret>,
    wait: Duration,
    statement: &dyn Fn(IpAddr) -> Statement,
) -> Result<PeerReport, CommandError> {
    expect_secret(address, secret)?;
    let listener = TcpListener::bind(address).map_err(|error| {
        CommandError::failed(format!(
            "not listening: {address} ({error}); name an address and port that are free"
        ))
    })?;
    let own = listener.local_addr().unwrap_or(address);
    // Whoever starts the other side wants to know where.
    let _ = io::stderr()
        .write_all(format!("note: waiting for 'pleach doctor --peer {own}' on another host\n").as_bytes());
    let until = clock::now() + wait;
    let mut refused = None;
    loop {
        let Some((stream, peer)) = accept(&listener, until) else {
            let refused = refused
                .map_or(String::new(), |error: io::Error| format!(" (the last one that came: {error})"));
            return Err(CommandError::failed(format!(
                "nobody came: {own} within {} s{refused}; run 'pleach doctor --peer HOST:{}' on the other host, and look at firewalls",
                wait.as_secs(),
                own.port()
            )));
        };
        match meet(stream, Side::Listener, secret, statement) {
            Ok(met) => return Ok(PeerReport { address: peer, ..met }),
            // Strangers, scanners: the one that is waited for may still come.
            Err(error) => refused = Some(error),
        }
    }
}

/// Goes to the other one.
pub(super) fn dial(
    target: &str,
    from: Option<IpAddr>,
    secret: Option<&Secret>,
    statement: &dyn Fn(IpAddr) -> Statement,
) -> Result<PeerReport, CommandError> {
    let has_port =
        target.parse::<SocketAddr>().is_ok() || (target.matches(':').count() == 1 && !target.ends_with(':'));
    let named = if has_port { target.to_owned() } else { format!("{}:{DEFAULT_PORT}", bracketed(target)) };
    let addresses: Vec<SocketAddr> = named.to_socket_addrs().map(Iterator::collect).unwrap_or_default();
    let Some(&first) = addresses.first() else {
        return Err(CommandError::usage(format!(
            "unknown host: {target}; name a host or an address, as 10.0.0.5:{DEFAULT_PORT}"
        )));
    };
    expect_secret(first, secret)?;
    let mut failure = io::Error::from(io::ErrorKind::NotFound);
    for address in addresses {
        let dialled =
            connect(address, from, PATIENCE).and_then(|stream| meet(stream, Side::Dialer, secret, statement));
        match dialled {
            Ok(met) => return Ok(PeerReport { address, ..met }),
            Err(error) => failure = error,
        }
    }
    Err(CommandError::failed(format!(
        "peer not reached: {named} ({failure}); run 'pleach doctor --listen' there, with the same secret and version, and look at firewalls"
    )))
}

fn bracketed(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}

/// As for jobs: nothing is told beyond this host without a secret.
fn expect_secret(address: SocketAddr, secret: Option<&Secret>) -> Result<(), CommandError> {
    if address.ip().is_loopback() || secret.is_some() {
        return Ok(());
    }
    Err(CommandError::usage(format!(
        "no secret: {address} is not loopback; run 'pleach secret FILE', copy it to both hosts, and set PLEACH_SECRET_FILE=FILE"
    )))
}

/// The next one that connects.
fn accept(listener: &TcpListener, until: Nanos) -> Option<(TcpStream, SocketAddr)> {
    listener.set_nonblocking(true).ok()?;
    let file = Arc::new(std::os::fd::OwnedFd::from(listener.try_clone().ok()?));
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                stream.set_nonblocking(false).ok()?;
                return Some((stream, peer));
            }
            Err(_) => {
                let left = until.since(clock::now());
                if left.is_zero() {
                    return None;
                }
                WakeSource::File(Arc::clone(&file)).wait(left);
            }
        }
    }
}

/// Connects, from this address of this host where one is meant.
fn connect(address: SocketAddr, from: Option<IpAddr>, limit: Duration) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    if let Some(from) = from {
        bind(&socket, &SocketAddr::new(from, 0))?;
    }
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => {}
        Err(error) => return Err(error.into()),
    }
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    if poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&limit))? == 0 {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "no answer"));
    }
    sockopt::socket_error(&socket)??;
    let stream = TcpStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// A stream on which every word must come in time.
struct PeerStream {
    stream: TcpStream,
    until: Nanos,
}

impl PeerStream {
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.since(clock::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write_all(bytes)
    }

    fn receive<const BYTES: usize>(&mut self) -> io::Result<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        self.receive_into(&mut bytes)?;
        Ok(bytes)
    }

    fn receive_into(&mut self, mut place: &mut [u8]) -> io::Result<()> {
        while !place.is_empty() {
            self.stream.set_read_timeout(Some(self.left()?))?;
            let heard = self.stream.read(place)?;
            if heard == 0 {
                return Err(io::Error::new(
                    io::ErrorKind::UnexpectedEof,
                    "it hung up: another secret or version",
                ));
            }
            place = &mut place[heard..];
        }
        Ok(())
    }

    /// A text, preceded by its length.
    fn send_text(&mut self, text: &str) -> io::Result<()> {
        let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(text.as_bytes());
        self.send(&bytes)
    }

    fn receive_text(&mut self) -> io::Result<String> {
        let length = u64::from_le_bytes(self.receive()?);
        if length > STATEMENT_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it says more than a doctor does"));
        }
        let mut text = vec![0; length as usize];
        self.receive_into(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

/// Both sides alike, but for who begins.
fn meet(
    stream: TcpStream,
    side: Side,
    secret: Option<&Secret>,
    statement: &dyn Fn(IpAddr) -> Statement,
) -> io::Result<PeerReport> {
    let address = stream.peer_addr()?;
    let local = stream.local_addr()?.ip();
    let mut stream = PeerStream { stream, until: clock::now() + PATIENCE };
    prove(&mut stream, side, secret)?;
    let clock_ahead = compare_clocks(&mut stream, side)?;
    // Ranks listen at ports of the kernel's choice: what reaches this one reaches those.
    let listener = TcpListener::bind((local, 0))?;
    let door = ProbeListener::open()?;
    // Kept until rank 0 listens there, or another program might take the port.
    let place = TcpListener::bind((local, 0))?;
    let mut own = statement(local);
    own.set("rendezvous", &place.local_addr()?.to_string());
    own.set("port", &listener.local_addr()?.to_string());
    own.set("door", door.address());
    stream.send_text(&own.to_text())?;
    let theirs = Statement::from_text(&stream.receive_text()?);
    // A door to knock at on one side only: the other one learns what came of it.
    stream.until = clock::now() + PATIENCE;
    let reached = match side {
        Side::Dialer => {
            let reached = PairResults {
                distance: Some(knock_at(&theirs)),
                reaches: reaches(&theirs, local),
                ..PairResults::default()
            };
            stream.send_text(&reached.to_text())?;
            let heard = PairResults::from_text(&stream.receive_text()?);
            PairResults { is_reached: heard.reaches, ..reached }
        }
        Side::Listener => {
            let heard = PairResults::from_text(&stream.receive_text()?);
            let reached = PairResults { reaches: reaches(&theirs, local), ..PairResults::default() };
            stream.send_text(&reached.to_text())?;
            PairResults { is_reached: heard.reaches, distance: heard.distance, ..reached }
        }
    };
    drop(place);
    let joined = match side {
        Side::Listener => join_as(0, own.value("rendezvous"), secret),
        Side::Dialer => join_as(1, theirs.value("rendezvous"), secret),
    };
    stream.until = clock::now() + PATIENCE;
    // Both have dialled by now: neither closes its port before.
    stream.send(b"\n")?;
    stream.receive::<1>()?;
    Ok(PeerReport {
        own,
        theirs,
        reached: PairResults { clock_ahead: Some(clock_ahead), joined, ..reached },
        address,
    })
}

/// Joins a job of the two, which meets at this address of rank 0, with what ranks here would be
/// told by variables. Over which fabric, or why not.
fn join_as(rank: Rank, place: Option<&str>, secret: Option<&Secret>) -> Result<String, String> {
    let place = place.ok_or_else(|| "it told no place to meet".to_owned())?;
    let rendezvous = format!("tcp://{place}").parse::<Rendezvous>().map_err(|error| error.to_string())?;
    let told = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
    let world = World {
        rank,
        world_size: 2,
        local_rank: None,
        rendezvous: Some(rendezvous),
        secret: secret.cloned(),
        host: told("PLEACH_HOST"),
        interface: told("PLEACH_INTERFACE"),
        launcher: Launcher::Arguments,
        ..World::alone()
    };
    let options =
        JoinOptions { fabric: FabricChoice::Auto, knobs: Vec::new(), signal_slots: 1, timeout: JOIN_LIMIT };
    let mut joined = join(&world, &options, Arc::new(SilentResponder)).map_err(|error| error.to_string())?;
    joined.device.leave();
    Ok(joined.fabric.to_string())
}

/// Each proves to the other that it knows the secret; the one that listens does so last, so that a
/// stranger who dials gets no proof to work on.
fn prove(stream: &mut PeerStream, side: Side, secret: Option<&Secret>) -> io::Result<()> {
    let own = challenge();
    stream.send(GREETING)?;
    stream.send(&own)?;
    if &stream.receive::<16>()? != GREETING {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no pleach doctor of this version"));
    }
    let challenges = Challenges::new(side, own, stream.receive()?);
    let answer = challenges.answer(secret, GREETING);
    if side == Side::Dialer {
        stream.send(&answer)?;
    }
    if !challenges.verify(secret, GREETING, &stream.receive()?) {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it has another secret"));
    }
    if side == Side::Listener {
        stream.send(&answer)?;
    }
    Ok(())
}

/// How far the other's time of day is ahead, in nanoseconds, and half of what the question took.
fn compare_clocks(stream: &mut PeerStream, side: Side) -> io::Result<(i64, u64)> {
    // Only compared and shown: nothing depends on the time of day.
    let now = || {
        let time = clock_gettime(ClockId::Realtime);
        time.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec)
    };
    let ask = |stream: &mut PeerStream| -> io::Result<(i64, u64)> {
        let asked = now();
        stream.send(b"?")?;
        let theirs = i64::from_le_bytes(stream.receive()?);
        let heard = now();
        let half = heard.wrapping_sub(asked) / 2;
        Ok((theirs.wrapping_sub(asked.wrapping_add(half)), half.unsigned_abs()))
    };
    let answer = |stream: &mut PeerStream| -> io::Result<()> {
        stream.receive::<1>()?;
        stream.send(&now().to_le_bytes())
    };
    match side {
        Side::Dialer => {
            let ahead = ask(stream)?;
            answer(stream)?;
            Ok(ahead)
        }
        Side::Listener => {
            answer(stream)?;
            ask(stream)
        }
    }
}

/// Whether the port that the other told can be reached from here.
fn reaches(theirs: &Statement, from: IpAddr) -> Result<(), String> {
    let address = theirs.value("port").and_then(|text| text.parse::<SocketAddr>().ok());
    let address = address.ok_or_else(|| "it told no port".to_owned())?;
    connect(address, Some(from), REACH_LIMIT).map(drop).map_err(|error| format!("{address}: {error}"))
}

/// Whether memory can be shared with the other.
fn knock_at(theirs: &Statement) -> ProbeOutcome {
    theirs.value("door").map_or(ProbeOutcome::NotFound, |door| probe(door, clock::now() + PATIENCE))
}

/// Values by their names, as lines.
pub(super) fn to_lines(values: &BTreeMap<String, String>) -> String {
    values.iter().map(|(name, value)| format!("{name} {}\n", value.replace('\n', " "))).collect()
}

/// The lines of [`to_lines`]; others are left out.
pub(super) fn from_lines(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .map(|(name, value)| (name.to_owned(), value.chars().filter(|it| !it.is_control()).collect()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(secrets: [Option<Secret>; 2]) -> [io::Result<PeerReport>; 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let address = listener.local_addr().expect("is bound");
        let [first, second] = secrets;
        let statement = |_| Statement::default();
        let other = std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("somebody comes");
            meet(stream, Side::Listener, second.as_ref(), &statement)
        });
        let stream = connect(address, None, PATIENCE).expect("it listens");
        let dialled = meet(stream, Side::Dialer, first.as_ref(), &statement);
        [dialled, other.join().expect("it ends")]
    }

    #[test]
    fn two_that_meet_know_the_same_of_each_other() {
        let secret = || Some(Secret::new(&[7; 32]));
        for met in pair([secret(), secret()]) {
            let PeerReport { reached, theirs, .. } = met.expect("they meet");
            assert_eq!((reached.reaches, reached.is_reached), (Ok(()), Ok(())));
            assert_eq!(reached.distance, Some(ProbeOutcome::Neighbours), "one process is its own neighbour");
            assert_eq!(reached.joined, Ok("shm".to_owned()));
            let (ahead, half) = reached.clock_ahead.expect("clocks were compared");
            assert!(ahead.unsigned_abs() <= half + 1_000_000_000, "one clock: {ahead} ns apart");
            assert!(theirs.value("port").is_some());
        }
    }

    #[test]
    fn who_has_another_secret_is_refused_by_both() {
        for met in pair([Some(Secret::new(&[7; 32])), Some(Secret::new(&[8; 32]))]) {
            assert!(met.is_err());
        }
    }

    #[test]
    fn a_stranger_who_says_too_much_or_nothing_is_left_in_bounded_time() {
        for stream in [&b"GET / HTTP/1.1\r\nHost: nobody\r\n\r\n and more and more and more"[..], b""] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
            let mut stranger =
                connect(listener.local_addr().expect("is bound"), None, PATIENCE).expect("it listens");
            stranger.write_all(stream).expect("there is room");
            stranger.shutdown(std::net::Shutdown::Write).expect("is connected");
            let (stream, _) = listener.accept().expect("somebody comes");
            assert!(meet(stream, Side::Listener, None, &|_| Statement::default()).is_err());
        }
    }

    #[test]
    fn listening_addresses_have_a_default_for_what_is_not_said() {
        let parsed = |text: &str| text.parse::<ListenAddress>().map(|address| address.0.to_string());
        assert_eq!(parsed("10.0.0.5").as_deref(), Ok("10.0.0.5:9401"));
        assert_eq!(parsed(":77").as_deref(), Ok("0.0.0.0:77"));
        assert_eq!(parsed("[::1]:77").as_deref(), Ok("[::1]:77"));
        assert_eq!(parsed("::1").as_deref(), Ok("[::1]:9401"));
        assert!(parsed("host").is_err());
    }
}
