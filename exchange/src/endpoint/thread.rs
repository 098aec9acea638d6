//! The endpoint's own thread: accepts connections, and makes progress while no thread of the
//! program does.
//!
//! **Invariant:** a connection that has not proved the secret costs at most [`UNPROVED_MAX`]
//! places, one buffer of frames (with TLS, also one record, the state of a handshake and one
//! signature) and [`HANDSHAKE_LIMIT`]. If there are too many, the source with the most loses its
//! oldest one.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::accepting::{ACCEPTS_AT_ONCE, AcceptPause, UnauthenticatedConnections};
use pleach_transport::auth::random_number;
use pleach_transport::{Nanos, clock, tune_stream};
use rustix::event::epoll;

use super::connection::{Connection, ConnectionEnd, Incoming};
use super::handshake::{Handshake, HandshakeStep};
use super::shared::Shared;
use crate::reference::LinkId;

/// Connections that have not proved the secret.
const UNPROVED_MAX: usize = 256;

/// How long a connection may take to prove the secret.
pub(crate) const HANDSHAKE_LIMIT: Duration = Duration::from_secs(5);

/// Warnings about peers that were refused; the limit keeps a flood out of the log.
const WARNINGS_MAX: u32 = 16;

/// How long the thread looks for the next message before it sleeps.
const WATCH_LIMIT: Duration = Duration::from_micros(100);

/// How long the thread looks at regions before sockets and deadlines get their turn.
const TURN_LIMIT: Duration = Duration::from_millis(2);

/// Looks at regions before a thread gives way: less than a microsecond.
const LOOKS_BEFORE_GIVING_WAY: u32 = 8;

/// In the epoll set. Links and connections have numbers from 1.
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

struct Unproved {
    connection: Connection,
    handshake: Handshake,
    from: SocketAddr,
    deadline: Nanos,
}

struct Acceptor {
    shared: Arc<Shared>,
    listener: TcpListener,
    pause: AcceptPause,
    unproved: BTreeMap<u64, Unproved>,
    sources: UnauthenticatedConnections,
    warnings_left: u32,
}

/// Adds the listener and the waker to the epoll set.
pub(crate) fn watch(shared: &Shared, listener: &TcpListener) -> rustix::io::Result<()> {
    let core = shared.core();
    let flags = epoll::EventFlags::IN;
    epoll::add(core.epoll(), listener, epoll::EventData::new_u64(LISTENER), flags)?;
    epoll::add(core.epoll(), shared.wake_file(), epoll::EventData::new_u64(WAKE), flags)
}

/// Ends all links with the thread, also where it ends by a panic: else its callers and peers would
/// wait for it until their deadlines.
struct Closing(Arc<Shared>);

impl Drop for Closing {
    fn drop(&mut self) {
        // Before the links: what begins after that ends at once.
        self.0.end();
        self.0.core().close(clock::now());
    }
}

/// The thread's function: returns when the endpoint is over.
pub(crate) fn run(shared: Arc<Shared>, epoll: &OwnedFd, listener: TcpListener) {
    let _closing = Closing(shared.clone());
    let mut acceptor = Acceptor {
        shared: shared.clone(),
        listener,
        pause: AcceptPause::default(),
        unproved: BTreeMap::new(),
        sources: UnauthenticatedConnections::default(),
        warnings_left: WARNINGS_MAX,
    };
    let mut events = Vec::with_capacity(64);
    while !shared.is_over() {
        let now = clock::now();
        {
            let mut core = shared.core();
            shared.settle_drops(&mut core, now);
            core.expire(now);
            core.pump_unread(now);
            core.poll(now);
        }
        watch_regions(&shared);
        // Dropped after the lock: the end of a device takes a while.
        let dropped = shared.core().take_dropped();
        drop(dropped);
        // A message that has come meanwhile is looked at after the sockets, whose turn it is.
        let until = acceptor.expire(epoll, now);
        let until = {
            let mut core = shared.core();
            let may_sleep = core.sleep();
            // After the messages: they may have lent what is to come back.
            if may_sleep { until.into_iter().chain(core.next_deadline(now)).min() } else { Some(now) }
        };
        let timeout = until.map(|until| {
            let wait = until.since(now);
            rustix::time::Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()) }
        });
        events.clear();
        // The only possible error is an interruption: look again.
        let _ = epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        let now = clock::now();
        shared.core().wake_up();
        for event in events.drain(..) {
            match event.data.u64() {
                LISTENER => acceptor.accept(epoll, now),
                WAKE => drain(shared.wake_file()),
                number if acceptor.unproved.contains_key(&number) => acceptor.advance(now, number),
                number => shared.core().pump(now, number),
            }
        }
    }
}

/// Looks at regions until nothing has come for a while.
fn watch_regions(shared: &Shared) {
    let turn = clock::now() + TURN_LIMIT;
    for look in 1_u32.. {
        let now = clock::now();
        let last = shared.core().pump_all_regions(now);
        if now >= turn || now.since(last) >= WATCH_LIMIT {
            return;
        }
        give_way(look);
    }
}

/// Gives way to other threads now and then: the peer may wait for this processor.
pub(crate) fn give_way(look: u32) {
    if look.is_multiple_of(LOOKS_BEFORE_GIVING_WAY) {
        std::thread::yield_now();
    }
}

fn drain(wake: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(wake, &mut count);
}

impl Acceptor {
    fn accept(&mut self, epoll: &OwnedFd, now: Nanos) {
        for _ in 0..ACCEPTS_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    let is_ready = stream.set_nonblocking(true).is_ok();
                    let socket = OwnedFd::from(stream);
                    if is_ready && tune_stream(&socket).is_ok() {
                        self.add(epoll, now, socket, from);
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    self.warn(&format!("no connection is accepted for now: {error}"));
                    return self.pause.begin(epoll, &self.listener, now);
                }
            }
        }
    }

    fn add(&mut self, epoll: &OwnedFd, now: Nanos, socket: OwnedFd, from: SocketAddr) {
        if self.sources.len() >= UNPROVED_MAX
            && let Some(number) = self.sources.first_to_drop()
        {
            self.remove(number);
        }
        let number = self.shared.core().next_number();
        let link = LinkId(random_number());
        let (secret, tls) = (self.shared.options.secret.clone(), self.shared.tls.clone());
        let handshake = Handshake::listen(self.shared.introduce(), secret, tls, from.ip(), link);
        let Ok(handshake) = handshake else { return };
        let data = epoll::EventData::new_u64(number);
        if epoll::add(epoll, &socket, data, epoll::EventFlags::IN).is_ok() {
            let connection = Connection::new(socket);
            let deadline = now + HANDSHAKE_LIMIT;
            self.unproved.insert(number, Unproved { connection, handshake, from, deadline });
            self.sources.add(from.ip(), number);
        }
    }

    /// Bytes of a connection that has not proved the secret.
    fn advance(&mut self, now: Nanos, number: u64) {
        let Some(unproved) = self.unproved.get_mut(&number) else { return };
        let step = match unproved.connection.receive() {
            Ok(Some(Incoming::Frame(kind, content))) => {
                // Now: this thread alone opens links of peers.
                unproved.handshake.set_has_room(self.shared.core().has_room_for_link());
                unproved.handshake.received(kind, content)
            }
            Ok(Some(Incoming::Secured(binding))) => unproved.handshake.secured(binding),
            Ok(Some(Incoming::Tensor(_)) | None) => return,
            Err(end) => {
                if let ConnectionEnd::Tls(_) = end {
                    let from = unproved.from;
                    self.warn(&format!("{from} was refused: {end}"));
                }
                return self.remove(number);
            }
        };
        match step {
            HandshakeStep::Secure(send) => {
                unproved.connection.queue_encoded(send);
                let begun = self.shared.tls.listen().map_err(ConnectionEnd::from);
                let begun = begun.and_then(|handshake| unproved.connection.secure(handshake));
                let from = unproved.from.ip();
                if begun.and_then(|()| unproved.connection.flush()) != Ok(true) {
                    return self.remove(number);
                }
                self.sources.hello_received(from, number);
            }
            HandshakeStep::Continue(send) => {
                unproved.connection.queue_encoded(send);
                let from = unproved.from.ip();
                if unproved.connection.flush() != Ok(true) {
                    return self.remove(number);
                }
                self.sources.hello_received(from, number);
                // The proof may have come with the introduction.
                self.advance(now, number);
            }
            HandshakeStep::Done { send, link } => {
                let Some(mut unproved) = self.take(number) else { return };
                unproved.connection.queue_encoded(send);
                let mut core = self.shared.core();
                let _ = epoll::delete(core.epoll(), &unproved.connection);
                core.add_sender(now, number, link, &unproved.from.to_string(), unproved.connection);
                // Calls may have come with the proof.
                core.pump(now, number);
            }
            HandshakeStep::Refused { send, error } => {
                unproved.connection.queue_encoded(send);
                let _ = unproved.connection.flush();
                let from = unproved.from;
                self.warn(&format!("{from} was refused: {error}"));
                self.remove(number);
            }
        }
    }

    fn take(&mut self, number: u64) -> Option<Unproved> {
        let unproved = self.unproved.remove(&number)?;
        self.sources.remove(unproved.from.ip(), number);
        Some(unproved)
    }

    fn remove(&mut self, number: u64) {
        drop(self.take(number));
    }

    /// Closes the connections that took too long. Returns when there is more to do.
    fn expire(&mut self, epoll: &OwnedFd, now: Nanos) -> Option<Nanos> {
        let late = self.unproved.iter().filter(|(_, unproved)| unproved.deadline <= now);
        let late: Vec<u64> = late.map(|(number, _)| *number).collect();
        late.into_iter().for_each(|number| self.remove(number));
        let pause = self.pause.end(epoll, &self.listener, LISTENER, now);
        let deadlines = self.unproved.values().map(|unproved| unproved.deadline);
        deadlines.chain(pause).min()
    }

    fn warn(&mut self, text: &str) {
        if self.warnings_left > 0 {
            self.warnings_left -= 1;
            tracing::warn!("{text}");
        }
    }
}
