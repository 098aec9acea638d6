//! The store: one thread of rank 0 that serves all connections.
//!
//! **Invariants:** an unauthenticated connection holds at most a handshake's bytes, for at most
//! [`HANDSHAKE_TIMEOUT`] (with TLS, also the state of its handshake and one signature), never keeps
//! a rank from being served, and changes nothing in the table. A
//! connection holds at most one answer, one request and one read: no more is read from it before
//! the answer is sent.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::same_user;
use super::{
    Answer, HELLO_BYTES, PROOF_BYTES, Proof, REQUEST_BYTES_MAX, Request, StoreHello, VERSION, Verdict, frame,
};
use crate::accepting::{ACCEPT_PAUSE, ACCEPTS_AT_ONCE, UnauthenticatedConnections};
use crate::auth::{Challenges, Secret, Side, challenge};
use crate::clock::{Nanos, now};
use crate::control::packet;
use crate::device::{Protection, ProtocolViolation, files_allowed};
use crate::rendezvous::{OpenStoreError, check};
use crate::tls::{Session, Tls, TlsHandshake};
use crate::wire::Malformed;

/// Time limit of a handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the store sends the last answers when rank 0 closes it.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How long it goes on telling the others why the rendezvous has failed.
const FAIL_REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// How long it tells them, and then sends, where the deadline has passed: a rank 0 that did not run
/// meanwhile still has answers for the others.
const LATE_TIMEOUT: Duration = Duration::from_millis(100);

/// Connections beyond one a rank: unauthenticated ones, and surplus ranks.
const CONNECTIONS_SPARE: usize = 64;

/// Values beyond those of the ranks.
const VALUES_SPARE: usize = 256;

/// Warnings about rejected connections; the limit keeps a flood out of the log.
const WARNINGS_MAX: u32 = 16;

/// Values a rank may store.
const VALUES_PER_RANK: usize = 1024;

/// Bytes read from one connection at a time.
pub(crate) const READ_BYTES: usize = 16 * 1024;

/// Requests of one connection answered before the others get their turn.
const REQUESTS_AT_ONCE: usize = 16;

/// A running store. Dropping it sends the last answers, closes the port and ends the thread.
pub(super) struct Server {
    /// When the last answers must have been sent.
    deadline: Nanos,
    /// Set to end the thread: the deadline of its answers.
    stop: Arc<OnceLock<Nanos>>,
    wake_source: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves connections to `listener`. Without a secret it makes one and gives it to processes of
    /// this user and host.
    pub(super) fn start(
        listener: TcpListener,
        world_size: u32,
        secret: Option<Secret>,
        tls: Tls,
        deadline: Nanos,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let own_user = match &secret {
            Some(_) => None,
            None => Some(same_user::listen(listener.local_addr()?)?),
        };
        let stop = Arc::new(OnceLock::new());
        let wake_source = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let secret = secret.unwrap_or_else(Secret::fresh).with_tls(tls);
        let service = Service { own_user, ..Service::new(listener, world_size as usize, secret) };
        let (stopped, woken) = (Arc::clone(&stop), Arc::clone(&wake_source));
        let thread = std::thread::Builder::new()
            .name("pleach-store".to_owned())
            .spawn(move || service.serve(&stopped, &woken))?;
        Ok(Self { deadline, stop, wake_source, thread: Some(thread) })
    }

    /// Sets the deadline of the drop.
    pub(super) fn ends_by(&mut self, deadline: Nanos) {
        self.deadline = deadline;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The eventfd wakes the thread.
        let _ = self.stop.set(self.deadline);
        let _ = rustix::io::write(&*self.wake_source, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It ends within `FAIL_REPORT_TIMEOUT` and `FLUSH_TIMEOUT`; the thread itself has
            // reported a panic.
            let _ = thread.join();
        }
    }
}

/// The table, apart from sockets and time.
struct Table {
    values: BTreeMap<String, Vec<u8>>,
    values_max: usize,
    failed: Option<String>,
    sealed: bool,
    refused: Option<String>,
    /// The remaining warnings.
    warnings_left: u32,
    /// The number of changes that can end a wait.
    changes: u64,
}

impl Table {
    fn new(values_max: usize) -> Self {
        Self {
            values: BTreeMap::new(),
            values_max,
            failed: None,
            sealed: false,
            refused: None,
            warnings_left: WARNINGS_MAX,
            changes: 0,
        }
    }

    fn fail(&mut self, reason: &str) {
        self.failed.get_or_insert_with(|| reason.to_owned());
        self.changes += 1;
    }

    /// Records why a connection was rejected, and logs it. The rendezvous goes on: any process can
    /// send a wrong proof, which must not end a job.
    fn refuse(&mut self, reason: String) {
        if self.refused.as_ref() != Some(&reason) && self.warnings_left > 0 {
            self.warnings_left -= 1;
            tracing::warn!("turned away: {reason}; the others wait for it");
        }
        self.refused = Some(reason);
    }

    /// The answer, or `None` for a wait that goes on.
    fn answer(&mut self, rank: u32, request: &Request, time_is_up: bool) -> Option<Answer> {
        Some(match request {
            Request::Set { key, value } | Request::Claim { key, value } => {
                let claims = matches!(request, Request::Claim { .. });
                match self.values.get(key) {
                    Some(present) if claims => Answer::Present(present.clone()),
                    Some(_) => Answer::Refused,
                    None if self.values.len() >= self.values_max || check(key, value).is_err() => {
                        Answer::Refused
                    }
                    None => {
                        self.values.insert(key.clone(), value.clone());
                        self.changes += 1;
                        if claims { Answer::Taken } else { Answer::Done }
                    }
                }
            }
            Request::Wait { keys, .. } => {
                if let Some(reason) = &self.failed {
                    return Some(Answer::Failed(reason.clone()));
                }
                let places = (0u32..).zip(keys).filter(|(_, key)| !self.values.contains_key(*key));
                let places: Vec<_> = places.map(|(place, _)| place).collect();
                if places.is_empty() {
                    Answer::Values(keys.iter().filter_map(|key| self.values.get(key).cloned()).collect())
                } else if time_is_up {
                    Answer::Missing { places, refused: self.refused.clone() }
                } else {
                    return None;
                }
            }
            Request::Fail { reason } => {
                self.fail(reason);
                Answer::Done
            }
            Request::Seal => {
                self.sealed |= rank == 0;
                Answer::Done
            }
        })
    }
}

enum Stage {
    /// No message yet.
    AwaitsHello { until: Nanos },
    /// Challenges are exchanged, and TLS comes next.
    AwaitsTls { until: Nanos, challenges: Challenges, handshake: Box<TlsHandshake> },
    /// Challenges are exchanged.
    AwaitsProof { until: Nanos, challenges: Challenges },
    /// Authenticated.
    Open { rank: u32, waiting: Option<(Request, Nanos)> },
    /// Only remaining output is sent.
    Ending { until: Nanos },
}

struct Connection {
    stream: TcpStream,
    /// The keys, if the connection speaks TLS.
    session: Option<Session>,
    from: SocketAddr,
    input: Vec<u8>,
    output: Vec<u8>,
    stage: Stage,
    gone: bool,
    /// Whether `input` may hold requests that no new bytes will announce.
    has_more: bool,
}

struct Service {
    listener: TcpListener,
    secret: Secret,
    /// The listener that gives out the secret, if none is configured.
    own_user: Option<OwnedFd>,
    /// By number, in the order of arrival.
    connections: BTreeMap<u64, Connection>,
    connections_max: usize,
    next_number: u64,
    unauthenticated: UnauthenticatedConnections,
    world_size: usize,
    table: Table,
    /// The end of a pause of accepts, after the system had no file or memory for a connection.
    paused_until: Option<Nanos>,
}

impl Service {
    fn new(listener: TcpListener, world_size: usize, secret: Secret) -> Self {
        Self {
            listener,
            secret,
            own_user: None,
            connections: BTreeMap::new(),
            connections_max: world_size + CONNECTIONS_SPARE,
            next_number: 0,
            unauthenticated: UnauthenticatedConnections::default(),
            world_size,
            table: Table::new(world_size * VALUES_PER_RANK + VALUES_SPARE),
            paused_until: None,
        }
    }

    fn serve(mut self, stop: &OnceLock<Nanos>, wake_source: &OwnedFd) {
        let deadline = loop {
            if let Some(deadline) = stop.get() {
                break *deadline;
            }
            let ready = self.sleep(Some(wake_source), self.next_deadline());
            self.advance(&ready);
        };
        // What rank 0 itself has asked for last.
        let ready = self.sleep(Some(&self.listener), Some(Nanos::ZERO));
        self.advance(&ready);
        let end = |limit| deadline.max(now() + LATE_TIMEOUT).min(now() + limit);
        // After a failure the others get the reason, then each closes its connection.
        let until = end(FAIL_REPORT_TIMEOUT);
        while self.table.failed.is_some()
            && now() < until
            && self.connections.values().any(Connection::is_open)
        {
            let ready = self.sleep(Some(&self.listener), Some(until));
            self.advance(&ready);
        }
        let until = end(FLUSH_TIMEOUT);
        while now() < until && self.connections.values().any(|connection| !connection.output.is_empty()) {
            self.sleep(None, Some(until));
            self.connections.values_mut().for_each(Connection::send);
            self.connections.retain(|_, connection| !connection.gone);
        }
    }

    fn next_deadline(&self) -> Option<Nanos> {
        let deadlines = self.connections.values().filter_map(|connection| match &connection.stage {
            Stage::AwaitsHello { until }
            | Stage::AwaitsTls { until, .. }
            | Stage::AwaitsProof { until, .. }
            | Stage::Ending { until } => Some(*until),
            Stage::Open { waiting, .. } => waiting.as_ref().map(|(_, until)| *until),
        });
        deadlines.chain(self.paused_until).min()
    }

    /// Sleeps until a socket is ready, the wake source wakes or the deadline has passed; gives the
    /// connections to look at. Without a wake source only what can be sent is waited for.
    fn sleep(&self, wake_source: Option<&dyn AsFd>, deadline: Option<Nanos>) -> Vec<u64> {
        let mut files = Vec::with_capacity(self.connections.len() + 2);
        for connection in self.connections.values() {
            let flags = connection.awaited(wake_source.is_some());
            files.push(PollFd::from_borrowed_fd(connection.stream.as_fd(), flags));
        }
        if let Some(wake_source) = wake_source {
            files.push(PollFd::from_borrowed_fd(wake_source.as_fd(), PollFlags::IN));
            if self.paused_until.is_none() {
                files.push(PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN));
                files.extend(
                    self.own_user.iter().map(|file| PollFd::from_borrowed_fd(file.as_fd(), PollFlags::IN)),
                );
            }
        }
        let can_go_on = |connection: &Connection| connection.has_more && connection.takes_requests();
        let deadline = if self.connections.values().any(can_go_on) { Some(Nanos::ZERO) } else { deadline };
        let limit = deadline.map(|deadline| {
            let left = deadline.since(now());
            rustix::time::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        // Interrupted, or out of memory: serve all connections.
        let failed = poll(&mut files, limit.as_ref()).is_err();
        let is_ready = |connection: &Connection, events: PollFlags| {
            !events.is_empty() || can_go_on(connection) || (failed && !connection.is_waiting())
        };
        let seen = self.connections.iter().zip(&files);
        let ready = seen.filter(|((_, connection), file)| is_ready(connection, file.revents()));
        ready.map(|((&number, _), _)| number).collect()
    }

    /// Serves ready connections, accepts new ones, then ends the waits that are over.
    fn advance(&mut self, ready: &[u64]) {
        let changes = self.table.changes;
        ready.iter().for_each(|&number| self.serve_one(number));
        self.accept();
        // After all inputs, so that a value that came now ends the waits of all connections.
        let (has_changed, time) = (self.table.changes != changes, now());
        for connection in self.connections.values_mut() {
            connection.finish_wait(&mut self.table, time, has_changed);
        }
        let Self { connections, unauthenticated, .. } = self;
        connections.retain(|&number, connection| {
            if connection.gone {
                unauthenticated.remove(connection.from.ip(), number);
            }
            !connection.gone
        });
    }

    fn serve_one(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        connection.serve_once(&mut self.table, &self.secret);
        match connection.stage {
            Stage::AwaitsHello { .. } => {}
            Stage::AwaitsTls { .. } | Stage::AwaitsProof { .. } => {
                self.unauthenticated.hello_received(connection.from.ip(), number)
            }
            // A rejected connection sends nothing more, and ends when it has the reason.
            Stage::Open { .. } | Stage::Ending { .. } => {
                self.unauthenticated.remove(connection.from.ip(), number)
            }
        }
    }

    /// Accepts connections, up to a limit, so that existing connections get their turn.
    fn accept(&mut self) {
        if self.paused_until.is_some_and(|until| now() < until) {
            return;
        }
        self.paused_until = None;
        self.hand_out();
        for _ in 0..ACCEPTS_AT_ONCE {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => return self.not_accepted(&error),
            };
            if self.connections.len() >= self.connections_max {
                // An unauthenticated connection is dropped; if there is none, the new one must
                // retry.
                let Some(oldest) = self.unauthenticated.first_to_drop() else { continue };
                self.drop_unauthenticated(oldest);
            }
            if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
                let number = self.next_number;
                self.next_number += 1;
                self.unauthenticated.add(from.ip(), number);
                self.connections.insert(number, Connection::new(stream, from));
                // At once: bytes that have come already keep it from being counted as a connection
                // that sends nothing.
                self.serve_one(number);
            }
        }
    }

    /// Gives the secret to processes of this user that ask, up to a limit.
    fn hand_out(&mut self) {
        let Some(listener) = &self.own_user else { return };
        for _ in 0..ACCEPTS_AT_ONCE {
            match same_user::give_secret(listener, &self.secret) {
                Ok(None) => {}
                Ok(Some(user)) => {
                    let own = packet::own_user();
                    self.table.refuse(format!("a process of user {user}, this job is of user {own}"));
                }
                Err(errno) => return self.not_accepted(&errno.into()),
            }
        }
    }

    fn drop_unauthenticated(&mut self, number: u64) {
        if let Some(connection) = self.connections.remove(&number) {
            self.unauthenticated.remove(connection.from.ip(), number);
        }
    }

    /// No connection waited, or it ended meanwhile, which harms no other. Or there is no file or
    /// memory for a connection: then the listener would stay ready, and the client would wait until
    /// its time is up.
    fn not_accepted(&mut self, error: &io::Error) {
        use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        if matches!(error.kind(), WouldBlock | ConnectionAborted | Interrupted) {
            return;
        }
        if self.unauthenticated.len() > self.world_size
            && let Some(oldest) = self.unauthenticated.first_to_drop()
        {
            // More than there are ranks: these connections use up the resource.
            return self.drop_unauthenticated(oldest);
        }
        self.paused_until = Some(now() + ACCEPT_PAUSE);
        if let Some(most) = files_allowed(error)
            && !self.table.sealed
        {
            self.table.fail(&format!("rank 0: {}", OpenStoreError::Files { most }));
        }
    }
}

impl Connection {
    fn new(stream: TcpStream, from: SocketAddr) -> Self {
        let stage = Stage::AwaitsHello { until: now() + HANDSHAKE_TIMEOUT };
        let (input, output) = (Vec::new(), Vec::new());
        Self { stream, session: None, from, input, output, stage, gone: false, has_more: false }
    }

    fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open { .. })
    }

    fn is_waiting(&self) -> bool {
        matches!(self.stage, Stage::Open { waiting: Some(_), .. })
    }

    /// Whether the next request or handshake message may be read: not while an answer is awaited or
    /// sent, so that a peer that does not read fills its own buffers.
    fn takes_requests(&self) -> bool {
        self.output.is_empty() && !self.is_waiting() && !matches!(self.stage, Stage::Ending { .. })
    }

    /// The events to wait for.
    fn awaited(&self, reads: bool) -> PollFlags {
        if !self.output.is_empty() {
            PollFlags::OUT
        } else if !reads {
            PollFlags::empty()
        } else if self.takes_requests() {
            PollFlags::IN
        } else {
            // No bytes are read; the end of the peer is still detected.
            PollFlags::RDHUP
        }
    }

    /// Sends, receives and answers; called when the socket is ready.
    fn serve_once(&mut self, table: &mut Table, secret: &Secret) {
        if self.is_waiting() {
            // Its answers are sent, and its requests not read: only its end woke this thread.
            self.gone = true;
        }
        self.send();
        for _ in 0..REQUESTS_AT_ONCE {
            if self.gone || !self.takes_requests() {
                return;
            }
            if !std::mem::take(&mut self.has_more) {
                self.receive(table);
            }
            match self.handle_input(table, secret) {
                Ok(true) => self.has_more = true,
                Ok(false) => return,
                Err(Malformed) => self.gone = true,
            }
            self.send();
        }
    }

    fn receive(&mut self, table: &mut Table) {
        let Self { stream, session, input, .. } = self;
        let received = match (&mut self.stage, session) {
            // The bytes of a handshake, and no more.
            (Stage::AwaitsHello { .. }, _) => receive_up_to(stream, input, HELLO_BYTES),
            (Stage::AwaitsTls { handshake, .. }, _) => stream.read(handshake.room()),
            (Stage::AwaitsProof { .. }, None) => receive_up_to(stream, input, PROOF_BYTES),
            (Stage::AwaitsProof { .. }, Some(session)) => receive_record(stream, session, input),
            // A correct rank has one request under way, so no more than one request and one read
            // are kept.
            (Stage::Open { .. }, session) if input.len() <= REQUEST_BYTES_MAX => {
                super::receive(stream, session.as_mut(), input)
            }
            (Stage::Open { .. } | Stage::Ending { .. }, _) => return,
        };
        match received {
            Ok(0) => self.gone = true,
            Ok(count) => self.tls_came(count, table),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(_) => self.gone = true,
        }
    }

    /// If these bytes are of a handshake of TLS: handles them.
    fn tls_came(&mut self, count: usize, table: &mut Table) {
        let Stage::AwaitsTls { until, challenges, handshake } = &mut self.stage else { return };
        let (until, challenges) = (*until, *challenges);
        let received = handshake.received(count);
        self.output.append(&mut handshake.take_outgoing());
        let is_done = match received {
            Ok(false) => return,
            Ok(true) => Ok(()),
            Err(violation) => Err(violation),
        };
        let ending = std::mem::replace(&mut self.stage, Stage::Ending { until });
        let Stage::AwaitsTls { handshake, .. } = ending else { return };
        match is_done.and_then(|()| handshake.finish()) {
            Ok(session) => {
                self.session = Some(session);
                self.stage = Stage::AwaitsProof { until, challenges };
            }
            Err(violation) => table.refuse(format!("TLS with {} failed: {violation}", self.from.ip())),
        }
    }

    /// Sends a message, through TLS if the connection has keys.
    fn say(&mut self, message: &[u8]) {
        match &mut self.session {
            Some(session) => self.output.append(&mut super::sealed(session, message)),
            None => self.output.extend_from_slice(message),
        }
    }

    /// Handles the next whole message, if there is one.
    fn handle_input(&mut self, table: &mut Table, secret: &Secret) -> Result<bool, Malformed> {
        match &mut self.stage {
            Stage::AwaitsHello { until } => {
                if !StoreHello::is_prefix(&self.input) {
                    return Err(Malformed);
                }
                let Some((hello, rest)) = self.input.split_first_chunk::<HELLO_BYTES>() else {
                    return Ok(false);
                };
                let (dialer, own, until) = (StoreHello::decode(hello)?, challenge(), *until);
                self.input = rest.to_vec();
                // The store has set it when it began.
                let tls = secret.tls().map_err(|_| Malformed)?;
                let from = self.from.ip();
                let protection = tls.answered(from, dialer.protection);
                self.output.extend(StoreHello { version: VERSION, protection, challenge: own }.encode());
                let challenges = Challenges::new(Side::Listener, own, dialer.challenge);
                self.stage = if dialer.version != VERSION {
                    table.refuse(format!("{from} speaks rendezvous version {}", dialer.version));
                    Stage::Ending { until }
                } else if dialer.protection != protection {
                    let (own, theirs) = (protection, dialer.protection);
                    table.refuse(format!("{from}: {}", ProtocolViolation::Protection { own, theirs }));
                    Stage::Ending { until }
                } else if protection == Protection::Clear {
                    Stage::AwaitsProof { until, challenges }
                } else {
                    let handshake = Box::new(tls.listen().map_err(|_| Malformed)?);
                    Stage::AwaitsTls { until, challenges, handshake }
                };
            }
            // Its bytes were handled as they came.
            Stage::AwaitsTls { .. } => return Ok(false),
            Stage::AwaitsProof { until, challenges } => {
                let Some((proof, rest)) = self.input.split_first_chunk::<PROOF_BYTES>() else {
                    return Ok(false);
                };
                let (proof, until, challenges) = (Proof::decode(proof)?, *until, *challenges);
                let claim = super::bound(&Proof::claim(proof.rank, proof.world_size), self.session.as_ref());
                let verdict = if !challenges.verify(Some(secret), &claim, &proof.answer) {
                    let from = self.from.ip();
                    table.refuse(format!("rank {} from {from} has a wrong secret", proof.rank));
                    Verdict::WrongSecret
                } else if table.sealed {
                    Verdict::Complete
                } else {
                    Verdict::Welcome(challenges.answer(Some(secret), &claim))
                };
                self.input = rest.to_vec();
                self.say(&verdict.encode());
                self.stage = match verdict {
                    Verdict::Welcome(_) => Stage::Open { rank: proof.rank, waiting: None },
                    Verdict::WrongSecret | Verdict::Complete => Stage::Ending { until },
                };
            }
            Stage::Open { rank, waiting } => {
                let Some((inside, taken)) = frame(&self.input, REQUEST_BYTES_MAX)? else {
                    return Ok(false);
                };
                let request = Request::decode(inside)?;
                self.input.drain(..taken);
                match table.answer(*rank, &request, false) {
                    Some(answer) => self.say(&answer.encode()),
                    None => {
                        let Request::Wait { limit_ms, .. } = request else { return Err(Malformed) };
                        *waiting = Some((request, now() + Duration::from_millis(limit_ms)));
                    }
                }
            }
            Stage::Ending { .. } => return Ok(false),
        }
        Ok(true)
    }

    fn finish_wait(&mut self, table: &mut Table, time: Nanos, has_changed: bool) {
        match &mut self.stage {
            Stage::AwaitsHello { until }
            | Stage::AwaitsTls { until, .. }
            | Stage::AwaitsProof { until, .. } => self.gone |= *until <= time,
            Stage::Ending { until } => self.gone |= *until <= time || self.output.is_empty(),
            Stage::Open { rank, waiting } => {
                if let Some((request, until)) = waiting
                    && (has_changed || *until <= time)
                    && let Some(answer) = table.answer(*rank, request, *until <= time)
                {
                    *waiting = None;
                    self.say(&answer.encode());
                    self.has_more = !self.input.is_empty();
                    self.send();
                }
            }
        }
    }

    fn send(&mut self) {
        while !self.gone && !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(count) => drop(self.output.drain(..count)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => self.gone = true,
            }
        }
    }
}

/// Reads once, so that `input` has at most so many bytes.
fn receive_up_to(stream: &mut TcpStream, input: &mut Vec<u8>, most: usize) -> io::Result<usize> {
    let start = input.len();
    input.resize(most.max(start), 0);
    let received = stream.read(&mut input[start..]);
    input.truncate(start + *received.as_ref().unwrap_or(&0));
    received
}

/// Reads once from the record that is coming, and appends what was opened to `input`.
fn receive_record(stream: &mut TcpStream, session: &mut Session, input: &mut Vec<u8>) -> io::Result<usize> {
    let count = stream.read(session.reader().room_of_record())?;
    session.reader().received(count);
    let plain = session.reader().plain().map_err(io::Error::other)?;
    let opened = plain.len();
    input.extend_from_slice(plain);
    session.reader().take(opened);
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str) -> Request {
        Request::Set { key: key.to_owned(), value: vec![1] }
    }

    fn wait(keys: &[&str]) -> Request {
        Request::Wait { keys: keys.iter().map(|&key| key.to_owned()).collect(), limit_ms: 0 }
    }

    #[test]
    fn a_wait_names_by_place_what_is_missing_and_ends_when_a_rank_fails() {
        let mut table = Table::new(10);
        assert_eq!(table.answer(1, &set("b"), false), Some(Answer::Done));
        assert_eq!(table.answer(0, &wait(&["a", "b", "c"]), false), None);
        let missing = Answer::Missing { places: vec![0, 2], refused: None };
        assert_eq!(table.answer(0, &wait(&["a", "b", "c"]), true), Some(missing));
        table.answer(1, &Request::Fail { reason: "first".to_owned() }, false);
        table.answer(2, &Request::Fail { reason: "second".to_owned() }, false);
        assert_eq!(table.answer(0, &wait(&["a"]), false), Some(Answer::Failed("first".to_owned())));
    }

    #[test]
    fn a_key_is_set_once_and_a_claim_tells_what_is_there() {
        let mut table = Table::new(2);
        let claim = |value| Request::Claim { key: "k".to_owned(), value: vec![value] };
        assert_eq!(table.answer(1, &claim(5), false), Some(Answer::Taken));
        assert_eq!(table.answer(2, &claim(6), false), Some(Answer::Present(vec![5])));
        assert_eq!(table.answer(2, &set("k"), false), Some(Answer::Refused));
        assert_eq!(table.answer(2, &set("l"), false), Some(Answer::Done));
        assert_eq!(table.answer(2, &set("m"), false), Some(Answer::Refused), "the table is full");
        assert_eq!(table.answer(2, &set("NO KEY"), false), Some(Answer::Refused));
    }

    /// A connection of rank 1, and the other end.
    fn connection() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let client = TcpStream::connect(listener.local_addr().expect("is bound")).expect("it listens");
        let (stream, from) = listener.accept().expect("somebody comes");
        stream.set_nonblocking(true).expect("a socket");
        client.set_nonblocking(true).expect("a socket");
        let mut connection = Connection::new(stream, from);
        connection.stage = Stage::Open { rank: 1, waiting: None };
        (connection, client)
    }

    #[test]
    fn who_asks_much_and_listens_late_costs_one_answer_of_memory_and_gets_all() {
        const ASKED: usize = 20;
        let mut table = Table::new(1);
        let value = vec![7; crate::rendezvous::VALUE_BYTES_MAX];
        table.answer(0, &Request::Set { key: "k".to_owned(), value: value.clone() }, false);
        let (mut connection, mut client) = connection();
        let ask = wait(&["k"; 256]);
        let answer = Answer::Values(vec![value; 256]).encode();
        for _ in 0..ASKED {
            client.write_all(&ask.encode()).expect("26 KB fit into the sockets");
        }
        let (mut heard, mut buffer) = (0, vec![0; 1 << 20]);
        for turn in 0_u32.. {
            connection.serve_once(&mut table, &Secret::fresh());
            assert!(!connection.gone && connection.output.len() <= answer.len(), "turn {turn}");
            assert!(connection.input.len() <= REQUEST_BYTES_MAX + READ_BYTES, "turn {turn}");
            // It does not read during the first turns.
            if turn > 50 {
                match client.read(&mut buffer) {
                    Ok(count) => heard += count,
                    Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
            if heard == ASKED * answer.len() {
                break;
            }
        }
    }

    #[test]
    fn requests_that_came_together_are_all_answered_also_behind_a_wait() {
        let mut table = Table::new(9);
        let (mut connection, mut client) = connection();
        let requests = [set("a"), wait(&["b"]), set("c")].map(|request| request.encode());
        client.write_all(&requests.concat()).expect("there is room");
        while !connection.is_waiting() {
            connection.serve_once(&mut table, &Secret::fresh());
        }
        assert!(!table.values.contains_key("c"), "nothing is looked at while an answer is due");
        table.answer(2, &set("b"), false);
        connection.finish_wait(&mut table, now(), true);
        assert!(connection.has_more, "no new bytes will come for it");
        connection.serve_once(&mut table, &Secret::fresh());
        assert!(table.values.contains_key("c"));
    }

    #[test]
    fn a_turn_lets_in_so_many_and_unauthenticated_connections_make_room_for_later_ones() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("is bound");
        let mut service = Service::new(listener, 2, Secret::fresh());
        let most = service.connections_max;
        let unauthenticated_clients: Vec<_> =
            (0..most + 3).map(|_| TcpStream::connect(address).expect("it listens")).collect();
        service.accept();
        assert_eq!(service.connections.len(), ACCEPTS_AT_ONCE);
        let first = &mut service.connections.first_entry().expect("there are some");
        first.get_mut().stage = Stage::Open { rank: 1, waiting: None };
        service.serve_one(0);
        while service.next_number < unauthenticated_clients.len() as u64 {
            service.accept();
        }
        assert_eq!((service.connections.len(), service.unauthenticated.len()), (most, most - 1));
        let numbers: Vec<_> = service.connections.keys().copied().take(2).collect();
        assert_eq!(numbers, [0, 4], "who is in stays, the oldest unauthenticated connections have gone");
    }

    #[test]
    fn only_rank_0_seals() {
        let mut table = Table::new(2);
        table.answer(1, &Request::Seal, false);
        assert!(!table.sealed);
        table.answer(0, &Request::Seal, false);
        assert!(table.sealed);
    }
}
