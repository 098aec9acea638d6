//! The store itself: one thread of rank 0 that serves all connections.
//!
//! **Invariant:** a connection that has not proved the secret holds at most a handshake's bytes, for at most
//! [`HANDSHAKE_TIMEOUT`], and never keeps a rank from being served; nothing it sends changes the table.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::codec::{
    Answer, HELLO_BYTES, Hello, Malformed, PROOF_BYTES, Proof, REQUEST_BYTES_MAX, Request, VERSION, Verdict,
    frame,
};
use crate::accepting::ACCEPT_PAUSE;
use crate::auth::{Secret, Side, TAG_BYTES, challenge};
use crate::clock::{Nanos, now};
use crate::error::files_allowed;
use crate::rendezvous::{OpenError, check};

/// How long a connection may take to say who it is.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the store keeps sending the last answers when rank 0 closes it.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How long it goes on telling the others why the meeting has failed.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(3);

/// Connections beyond one a rank: strangers, and ranks that come too often.
const CONNECTIONS_SPARE: usize = 64;

/// Values beyond what a meeting of this world needs.
const VALUES_SPARE: usize = 256;

/// Values a rank may store.
const VALUES_PER_RANK: usize = 1024;

/// Bytes read from one connection at a time.
const READ_BYTES: usize = 16 * 1024;

/// A running store. Dropping it sends the last answers, closes the port and ends the thread.
pub(super) struct Server {
    stop: Arc<AtomicBool>,
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves what comes to `listener`.
    pub(super) fn start(listener: TcpListener, world_size: u32, secret: Option<Secret>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let stop = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let service = Service {
            listener,
            secret,
            connections: Vec::new(),
            connections_max: world_size as usize + CONNECTIONS_SPARE,
            table: Table::new(world_size as usize * VALUES_PER_RANK + VALUES_SPARE),
            paused_until: None,
        };
        let (stopped, rung) = (Arc::clone(&stop), Arc::clone(&bell));
        let thread = std::thread::Builder::new()
            .name("pleach-store".to_owned())
            .spawn(move || service.serve(&stopped, &rung))?;
        Ok(Self { stop, bell, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Pairs with the load in `serve`; the eventfd wakes it.
        self.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&*self.bell, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            // It ends within `FAREWELL_TIMEOUT` and `FLUSH_TIMEOUT`; a panic there has been printed by its thread.
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
}

impl Table {
    fn new(values_max: usize) -> Self {
        Self { values: BTreeMap::new(), values_max, failed: None, sealed: false, refused: None }
    }

    /// The answer, or `None` for a wait that must go on.
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
                self.failed.get_or_insert_with(|| reason.clone());
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
    /// Nothing said yet.
    Greeting { until: Nanos },
    /// Challenges are exchanged.
    Proving { until: Nanos, dialer: [u8; TAG_BYTES], listener: [u8; TAG_BYTES] },
    /// In.
    Open { rank: u32, waiting: Option<(Request, Nanos)> },
    /// Only what is left to send goes out.
    Ending { until: Nanos },
}

struct Connection {
    stream: TcpStream,
    from: SocketAddr,
    input: Vec<u8>,
    output: Vec<u8>,
    stage: Stage,
    gone: bool,
}

struct Service {
    listener: TcpListener,
    secret: Option<Secret>,
    connections: Vec<Connection>,
    connections_max: usize,
    table: Table,
    /// Until when nobody is let in, as the system had no file or memory for one more.
    paused_until: Option<Nanos>,
}

impl Service {
    fn serve(mut self, stop: &AtomicBool, bell: &OwnedFd) {
        // Pairs with the store in `Server::drop`.
        while !stop.load(Ordering::Acquire) {
            self.sleep(Some(bell), self.next_deadline());
            self.accept();
            self.advance_all();
        }
        // After a failure the others are told why: each goes away as soon as it knows.
        let until = now() + FAREWELL_TIMEOUT;
        while self.table.failed.is_some() && now() < until && self.connections.iter().any(Connection::is_open)
        {
            self.sleep(Some(&self.listener), Some(until));
            self.accept();
            self.advance_all();
        }
        let until = now() + FLUSH_TIMEOUT;
        while now() < until && self.connections.iter().any(|connection| !connection.output.is_empty()) {
            self.sleep(None, Some(until));
            self.connections.iter_mut().for_each(Connection::send);
            self.connections.retain(|connection| !connection.gone);
        }
    }

    fn next_deadline(&self) -> Option<Nanos> {
        let deadlines = self.connections.iter().filter_map(|connection| match &connection.stage {
            Stage::Greeting { until } | Stage::Proving { until, .. } | Stage::Ending { until } => {
                Some(*until)
            }
            Stage::Open { waiting, .. } => waiting.as_ref().map(|(_, until)| *until),
        });
        deadlines.chain(self.paused_until).min()
    }

    /// Sleeps until a socket is ready, the bell rings or the deadline has passed.
    fn sleep(&self, bell: Option<&dyn AsFd>, deadline: Option<Nanos>) {
        let mut files = Vec::with_capacity(self.connections.len() + 2);
        if let Some(bell) = bell {
            files.push(PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN));
            if self.paused_until.is_none() {
                files.push(PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN));
            }
        }
        for connection in &self.connections {
            let mut flags = if bell.is_some() { PollFlags::IN } else { PollFlags::empty() };
            flags.set(PollFlags::OUT, !connection.output.is_empty());
            files.push(PollFd::from_borrowed_fd(connection.stream.as_fd(), flags));
        }
        let limit = deadline.map(|deadline| {
            let left = deadline.since(now());
            rustix::time::Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        // An error (interrupted, out of memory) means: look at everything.
        let _ = poll(&mut files, limit.as_ref());
    }

    fn accept(&mut self) {
        if self.paused_until.is_some_and(|until| now() < until) {
            return;
        }
        self.paused_until = None;
        loop {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) => return self.not_accepted(&error),
            };
            if self.connections.len() >= self.connections_max {
                // The oldest that has not shown who it is makes room; without one the newcomer must come again.
                let stranger = self
                    .connections
                    .iter()
                    .position(|connection| !matches!(connection.stage, Stage::Open { .. }));
                let Some(stranger) = stranger else { continue };
                self.connections.remove(stranger);
            }
            if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
                let stage = Stage::Greeting { until: now() + HANDSHAKE_TIMEOUT };
                let (input, output) = (Vec::new(), Vec::new());
                self.connections.push(Connection { stream, from, input, output, stage, gone: false });
            }
        }
    }

    /// Nobody was there, whose connection may have gone wrong meanwhile: that is its own affair. Or there is no file or memory
    /// for one: then the listener would be ready for ever, and who wants in would wait until its time is up.
    fn not_accepted(&mut self, error: &io::Error) {
        use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
        if matches!(error.kind(), WouldBlock | ConnectionAborted | Interrupted) {
            return;
        }
        self.paused_until = Some(now() + ACCEPT_PAUSE);
        if let Some(most) = files_allowed(error)
            && !self.table.sealed
        {
            self.table.failed.get_or_insert_with(|| format!("rank 0: {}", OpenError::Files { most }));
        }
    }

    fn advance_all(&mut self) {
        let Self { connections, table, secret, .. } = self;
        for connection in connections.iter_mut() {
            connection.receive();
            if connection.take_input(table, secret.as_ref()).is_err() {
                connection.gone = true;
            }
        }
        // After all inputs, so that a value that came now ends the waiting of everybody.
        let time = now();
        for connection in connections.iter_mut() {
            connection.finish_waiting(table, time);
            connection.send();
        }
        connections.retain(|connection| !connection.gone);
    }
}

impl Connection {
    fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open { .. })
    }

    fn receive(&mut self) {
        let mut buffer = [0; READ_BYTES];
        // A well-behaved rank has one request under way, so more than one and a bit is never kept.
        while !self.gone && self.input.len() <= REQUEST_BYTES_MAX {
            match self.stream.read(&mut buffer) {
                Ok(0) => self.gone = true,
                Ok(count) => self.input.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => self.gone = true,
            }
            if !self.is_open() {
                break;
            }
        }
    }

    /// Handles all whole messages that are there, one request at a time.
    fn take_input(&mut self, table: &mut Table, secret: Option<&Secret>) -> Result<(), Malformed> {
        loop {
            match &mut self.stage {
                Stage::Greeting { until } => {
                    if !Hello::may_begin(&self.input) {
                        return Err(Malformed);
                    }
                    let Some((hello, rest)) = self.input.split_first_chunk::<HELLO_BYTES>() else {
                        return Ok(());
                    };
                    let (dialer, listener, until) = (Hello::decode(hello)?, challenge(), *until);
                    self.input = rest.to_vec();
                    self.output.extend(Hello { version: VERSION, challenge: listener }.encode());
                    self.stage = if dialer.version == VERSION {
                        Stage::Proving { until, dialer: dialer.challenge, listener }
                    } else {
                        table.refused =
                            Some(format!("{} speaks rendezvous version {}", self.from, dialer.version));
                        Stage::Ending { until }
                    };
                }
                Stage::Proving { until, dialer, listener } => {
                    let Some((proof, rest)) = self.input.split_first_chunk::<PROOF_BYTES>() else {
                        return Ok(());
                    };
                    let (proof, until) = (Proof::decode(proof)?, *until);
                    let claim = Proof::claim(proof.rank, proof.world_size);
                    let verdict =
                        if !Secret::verify(secret, Side::Dialer, dialer, listener, &claim, &proof.answer) {
                            table.refused = Some(format!(
                                "rank {} from {} has a wrong secret",
                                proof.rank,
                                self.from.ip()
                            ));
                            Verdict::WrongSecret
                        } else if table.sealed {
                            Verdict::Complete
                        } else {
                            Verdict::Welcome(Secret::answer(secret, Side::Listener, dialer, listener, &claim))
                        };
                    self.input = rest.to_vec();
                    self.output.extend(verdict.encode());
                    self.stage = match verdict {
                        Verdict::Welcome(_) => Stage::Open { rank: proof.rank, waiting: None },
                        Verdict::WrongSecret | Verdict::Complete => Stage::Ending { until },
                    };
                }
                Stage::Open { waiting: Some(_), .. } => return Ok(()),
                Stage::Open { rank, waiting } => {
                    let Some((inside, taken)) = frame(&self.input, REQUEST_BYTES_MAX)? else { return Ok(()) };
                    let request = Request::decode(inside)?;
                    self.input.drain(..taken);
                    match table.answer(*rank, &request, false) {
                        Some(answer) => self.output.extend(answer.encode()),
                        None => {
                            let Request::Wait { limit_ms, .. } = request else { return Err(Malformed) };
                            *waiting = Some((request, now() + Duration::from_millis(limit_ms)));
                        }
                    }
                }
                Stage::Ending { .. } => {
                    self.input.clear();
                    return Ok(());
                }
            }
        }
    }

    fn finish_waiting(&mut self, table: &mut Table, time: Nanos) {
        match &mut self.stage {
            Stage::Greeting { until } | Stage::Proving { until, .. } => self.gone |= *until <= time,
            Stage::Ending { until } => self.gone |= *until <= time || self.output.is_empty(),
            Stage::Open { rank, waiting } => {
                if let Some((request, until)) = waiting
                    && let Some(answer) = table.answer(*rank, request, *until <= time)
                {
                    self.output.extend(answer.encode());
                    *waiting = None;
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

    #[test]
    fn only_rank_0_seals() {
        let mut table = Table::new(2);
        table.answer(1, &Request::Seal, false);
        assert!(!table.sealed);
        table.answer(0, &Request::Seal, false);
        assert!(table.sealed);
    }
}
