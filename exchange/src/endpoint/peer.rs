//! A program from which this one receives.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::{Nanos, clock, tune_stream};

use super::Handle;
use super::connection::Connection;
use super::error::{LinkError, ReceiveTensorError};
use super::frame::{self, HEADER_BYTES};
use super::handshake::{Handshake, HandshakeError, HandshakeStep};
use super::link::{ReceiveResult, ReceiveSlot};
use super::lookup::NameLookup;
use super::options::DEFAULT_WAIT;
use super::shared::LinkHold;
use super::tensor::{ReceivedTensor, TensorWay};
use super::thread::give_way;
use crate::calls::CallError;
use crate::introduction::Introduction;
use crate::key::Key;
use crate::reference::LinkId;

/// How long a receiver looks for the answer itself before it sleeps.
const WATCH_LIMIT: Duration = Duration::from_micros(50);

/// Between two looks whether this endpoint is over while a peer does not answer.
const HANDSHAKE_TURN: Duration = Duration::from_millis(50);

/// Another program, at its address. The link to it is made by the first receive, and anew after a
/// loss. Clones share the link. The link is closed after the last drop.
#[derive(Clone)]
pub struct Peer {
    shared: Arc<PeerShared>,
    limit: Duration,
}

struct PeerShared {
    endpoint: Arc<Handle>,
    address: Arc<str>,
    state: Mutex<PeerState>,
    changed: Condvar,
    lookup: NameLookup,
}

#[derive(Default)]
struct PeerState {
    link: Option<Arc<LinkHold>>,
    /// A thread makes the link.
    is_connecting: bool,
    /// That of the first link.
    incarnation: Option<u64>,
}

impl fmt::Debug for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Peer({})", self.shared.address)
    }
}

impl Peer {
    pub(crate) fn new(endpoint: Arc<Handle>, address: &str) -> Result<Self, LinkError> {
        let has_port = address
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
        if !has_port {
            let source = Arc::new(io::Error::from(io::ErrorKind::InvalidInput));
            return Err(LinkError::Address { address: address.into(), source });
        }
        let (state, changed, lookup) = (Mutex::default(), Condvar::new(), NameLookup::default());
        let shared = PeerShared { endpoint, address: address.into(), state, changed, lookup };
        Ok(Self { shared: Arc::new(shared), limit: DEFAULT_WAIT })
    }

    /// The same peer, of which each receive waits at most as long as this; the default is
    /// [`DEFAULT_WAIT`].
    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self { shared: self.shared.clone(), limit }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.shared.address
    }

    /// Whether there is a link, so that [`Peer::start_receive`] waits for nothing.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        lock(&self.shared.state).link.as_ref().is_some_and(|link| !link.is_lost())
    }

    /// Makes the link, if there is none. The first receive does it otherwise.
    ///
    /// # Errors
    ///
    /// See [`LinkError`].
    pub fn open(&self) -> Result<(), LinkError> {
        let now = clock::now();
        self.shared.link(now, now + self.limit).map(drop)
    }

    /// Makes the link, if there is none, and waits until it has regions, so that the next tensors
    /// come in place, or into this program's memory where nothing can be mapped.
    ///
    /// # Errors
    ///
    /// See [`LinkError`]: [`LinkError::NoRegions`] when there are none.
    pub fn share_regions(&self) -> Result<(), LinkError> {
        let now = clock::now();
        let deadline = now + self.limit;
        let (link, _) = self.shared.link(now, deadline)?;
        self.shared.require_regions(&link, now, deadline)
    }

    /// The link, if it has regions now.
    #[cfg(feature = "grpc")]
    pub(crate) fn link_with_regions(&self) -> Option<LinkId> {
        let state = lock(&self.shared.state);
        let link = state.link.as_ref().filter(|link| !link.is_lost() && link.has_regions());
        link.map(|link| link.id)
    }

    /// The incarnation of the peer's endpoint, once there was a link.
    #[must_use]
    pub fn incarnation(&self) -> Option<u64> {
        lock(&self.shared.state).incarnation
    }

    /// Receives the tensor of a key: waits until the peer sends it.
    ///
    /// # Errors
    ///
    /// See [`ReceiveTensorError`].
    pub fn receive(&self, key: &Key) -> Result<ReceivedTensor, ReceiveTensorError> {
        let mut request = self.ask(key, true)?;
        request.watch();
        request.wait()
    }

    /// As [`Peer::receive`], waiting at most as long as `turn`: the receive goes on after that, as
    /// a pending tensor. For programs that do something else between their turns.
    ///
    /// # Errors
    ///
    /// See [`ReceiveTensorError`].
    pub fn receive_or_pending(
        &self,
        key: &Key,
        turn: Duration,
    ) -> Result<Result<ReceivedTensor, PendingTensor>, ReceiveTensorError> {
        let until = clock::now() + turn;
        let mut request = self.ask(key, true)?;
        request.watch_until(until);
        if request.sleep_until(until) {
            return request.wait().map(Ok);
        }
        Ok(Err(PendingTensor::new(request)))
    }

    /// Asks for the tensor of a key. Waits for no more than the link.
    ///
    /// # Errors
    ///
    /// See [`ReceiveTensorError`].
    pub fn start_receive(&self, key: &Key) -> Result<PendingTensor, ReceiveTensorError> {
        Ok(PendingTensor::new(self.ask(key, false)?))
    }

    /// Asks for the tensor of a key. The caller that watches the link waits for the answer at once,
    /// so nobody else needs to be woken for it.
    fn ask(&self, key: &Key, watches: bool) -> Result<PendingRequest, ReceiveTensorError> {
        let now = clock::now();
        let deadline = now + self.limit;
        let peer = &self.shared;
        let linked = peer.link(now, deadline);
        let (link, incarnation) =
            linked.map_err(|source| ReceiveTensorError::Link { key: key.clone(), source })?;
        let now = clock::now();
        let mut core = peer.endpoint.shared.core();
        // Under the lock: what waits before the end is ended then.
        if peer.endpoint.shared.is_over() {
            let source = LinkError::Closed { peer: peer.address.clone() };
            return Err(ReceiveTensorError::Link { key: key.clone(), source });
        }
        let watches = watches && link.is_mapped();
        if watches {
            core.begin_watch(link.number);
        }
        let asked = core.ask(now, link.number, key, incarnation, deadline);
        drop(core);
        let Some((call, slot)) = asked else {
            link.set_lost();
            let (key, peer, cause) = (key.clone(), peer.address.clone(), "its connection closed".into());
            return Err(CallError::Lost { key, peer, cause }.into());
        };
        let (peer, key) = (self.shared.clone(), key.clone());
        Ok(PendingRequest { peer, link, call, slot, key, since: now, deadline, watches })
    }
}

impl PeerShared {
    /// The link, and the incarnation of the peer.
    fn link(&self, since: Nanos, deadline: Nanos) -> Result<(Arc<LinkHold>, u64), LinkError> {
        let mut state = lock(&self.state);
        loop {
            if self.endpoint.shared.is_over() {
                return Err(LinkError::Closed { peer: self.address.clone() });
            }
            if let Some(link) = state.link.clone().filter(|link| !link.is_lost()) {
                let incarnation = state.incarnation.unwrap_or_default();
                drop(state);
                if self.endpoint.shared.options.requires_regions && !link.has_regions() {
                    self.require_regions(&link, since, deadline)?;
                }
                return Ok((link, incarnation));
            }
            let left = deadline.since(clock::now());
            if left.is_zero() {
                return Err(self.timeout(since));
            }
            if !state.is_connecting {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.is_connecting = true;
        state.link = None;
        drop(state);
        let dialed = self.dial(since, deadline);
        let mut state = lock(&self.state);
        state.is_connecting = false;
        self.changed.notify_all();
        let (socket, id, theirs) = dialed?;
        let incarnation = theirs.incarnation;
        let known = *state.incarnation.get_or_insert(incarnation);
        if known != incarnation {
            return Err(LinkError::Restarted { peer: self.address.clone(), known, now: incarnation });
        }
        let shared = &self.endpoint.shared;
        let mut core = shared.core();
        // Under the lock: what is added before the end is closed then.
        if shared.is_over() {
            return Err(LinkError::Closed { peer: self.address.clone() });
        }
        let fabric = shared.fabric_with(&theirs);
        let now = clock::now();
        let number = core.add_receiver(now, id, &self.address, Connection::new(socket), fabric);
        let hold = LinkHold::new(number, id, &self.endpoint);
        core.hold(&hold);
        drop(core);
        // The thread waits for the set-up of regions.
        shared.wake();
        state.link = Some(hold.clone());
        drop(state);
        if shared.options.requires_regions {
            self.require_regions(&hold, since, deadline)?;
        }
        Ok((hold, incarnation))
    }

    /// Waits for regions, which must come.
    fn require_regions(&self, link: &LinkHold, since: Nanos, deadline: Nanos) -> Result<(), LinkError> {
        let peer = self.address.clone();
        match link.wait_for_regions(deadline.since(clock::now())) {
            Some(Ok(_)) => Ok(()),
            Some(Err(reason)) => Err(LinkError::NoRegions { peer, reason }),
            None => Err(self.timeout(since)),
        }
    }

    fn timeout(&self, since: Nanos) -> LinkError {
        LinkError::Timeout { peer: self.address.clone(), waited: clock::now().since(since) }
    }

    /// Connects and shakes hands. Returns a socket that does not block, the link and the peer's
    /// incarnation.
    fn dial(&self, since: Nanos, deadline: Nanos) -> Result<(OwnedFd, LinkId, Introduction), LinkError> {
        let found = self.lookup.addresses(&self.address, deadline.since(clock::now()));
        let waited = || clock::now().since(since);
        let late = || LinkError::NoLookup { peer: self.address.clone(), waited: waited() };
        let unknown = |source| LinkError::Address { address: self.address.clone(), source };
        let addresses = found.ok_or_else(late)?.map_err(unknown)?;
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in addresses {
            let left = deadline.since(clock::now());
            if left.is_zero() {
                return Err(self.timeout(since));
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => return self.shake_hands(stream, since, deadline),
                Err(error) => last = error,
            }
        }
        if last.kind() == io::ErrorKind::TimedOut {
            return Err(self.timeout(since));
        }
        Err(LinkError::Unreachable { peer: self.address.clone(), source: Arc::new(last) })
    }

    fn shake_hands(
        &self,
        mut stream: TcpStream,
        since: Nanos,
        deadline: Nanos,
    ) -> Result<(OwnedFd, LinkId, Introduction), LinkError> {
        let failed = |source| LinkError::Handshake { peer: self.address.clone(), source };
        let secret = self.endpoint.shared.options.secret.clone();
        let dialed = Handshake::dial(self.endpoint.shared.introduce(), secret);
        let (mut handshake, mut send) = dialed.map_err(|error| failed(error.into()))?;
        loop {
            let is_over = || self.endpoint.shared.is_over();
            let frame =
                exchange(&mut stream, &send, deadline, &is_over).map_err(|error| match error.kind() {
                    _ if is_over() => LinkError::Closed { peer: self.address.clone() },
                    io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => self.timeout(since),
                    io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => {
                        failed(HandshakeError::Protocol)
                    }
                    _ => LinkError::Unreachable { peer: self.address.clone(), source: Arc::new(error) },
                })?;
            match handshake.received(frame.0, &frame.1) {
                HandshakeStep::Continue(next) => send = next,
                HandshakeStep::Refused { error, .. } => return Err(failed(error)),
                HandshakeStep::Done { link, .. } => {
                    let theirs = handshake.theirs().cloned();
                    let theirs = theirs.ok_or_else(|| failed(HandshakeError::Protocol))?;
                    let unreachable = |error: io::Error| LinkError::Unreachable {
                        peer: self.address.clone(),
                        source: Arc::new(error),
                    };
                    stream.set_nonblocking(true).map_err(unreachable)?;
                    let socket = OwnedFd::from(stream);
                    tune_stream(&socket).map_err(unreachable)?;
                    return Ok((socket, link, theirs));
                }
            }
        }
    }
}

/// Sends bytes and receives one frame, unless this endpoint is over.
fn exchange(
    stream: &mut TcpStream,
    send: &[u8],
    deadline: Nanos,
    is_over: &impl Fn() -> bool,
) -> io::Result<(frame::FrameKind, Vec<u8>)> {
    let left = || {
        let left = deadline.since(clock::now()).min(HANDSHAKE_TURN);
        let has_ended = left.is_zero() || is_over();
        if has_ended { Err(io::Error::from(io::ErrorKind::TimedOut)) } else { Ok(Some(left)) }
    };
    // A few hundred bytes, for which a new socket has room.
    stream.set_write_timeout(left()?)?;
    stream.write_all(send)?;
    let mut header = [0; HEADER_BYTES];
    fill(stream, &mut header, &left)?;
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidData);
    let (kind, length) = frame::decode(header).map_err(invalid)?;
    let mut content = vec![0; length];
    fill(stream, &mut content, &left)?;
    Ok((kind, content))
}

/// Receives as many bytes as the buffer has.
fn fill(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    left: &impl Fn() -> io::Result<Option<Duration>>,
) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        stream.set_read_timeout(left()?)?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
            Ok(count) => filled += count,
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// A tensor that was asked for. Its drop cancels the request: a tensor that has not been received
/// is then for the next receiver.
#[must_use = "a pending tensor that is dropped is cancelled"]
pub struct PendingTensor {
    request: Option<PendingRequest>,
}

struct PendingRequest {
    peer: Arc<PeerShared>,
    link: Arc<LinkHold>,
    call: u64,
    slot: ReceiveSlot,
    key: Key,
    since: Nanos,
    deadline: Nanos,
    /// This thread looks at the regions of the link.
    watches: bool,
}

impl fmt::Debug for PendingTensor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.request.as_ref().map(|request| &request.key);
        write!(formatter, "PendingTensor({key:?})")
    }
}

impl PendingTensor {
    fn new(request: PendingRequest) -> Self {
        // Nobody of the program may wait until the deadline, so the endpoint's thread ends it then.
        request.peer.endpoint.shared.core().be_awake_at(request.deadline);
        Self { request: Some(request) }
    }

    /// Whether the tensor is here, or it is known that it does not come.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.request.as_ref().is_none_or(|request| request.slot.has_ended())
    }

    /// Has `call` called, once, when the tensor is here or it is known that it does not come; at
    /// once if that is known. A thread of the endpoint calls it under a lock, or the thread that
    /// calls this method: it must not block, and must not use the endpoint. It is not called when
    /// the pending tensor is dropped or waited for.
    pub fn on_end(&self, call: impl FnOnce() + Send + 'static) {
        match &self.request {
            Some(request) => request.slot.call_at_end(Box::new(call)),
            None => call(),
        }
    }

    /// Waits at most as long as this. True: [`PendingTensor::wait`] returns at once.
    pub fn wait_for(&mut self, limit: Duration) -> bool {
        let Some(request) = &mut self.request else { return true };
        let until = clock::now() + limit;
        if !request.slot.has_ended() && request.link.has_regions() && !limit.is_zero() {
            request.peer.endpoint.shared.core().begin_watch(request.link.number);
            request.watches = true;
            request.watch_until(until);
        }
        request.sleep_until(until)
    }

    /// Waits for the tensor, at most until the deadline of the receive.
    ///
    /// # Errors
    ///
    /// See [`ReceiveTensorError`].
    pub fn wait(mut self) -> Result<ReceivedTensor, ReceiveTensorError> {
        let mut request = self.request.take().expect("it is taken once");
        if !request.slot.has_ended() && request.link.is_mapped() {
            request.peer.endpoint.shared.core().begin_watch(request.link.number);
            request.watches = true;
            request.watch();
        }
        request.wait()
    }
}

impl PendingRequest {
    fn wait(self) -> Result<ReceivedTensor, ReceiveTensorError> {
        loop {
            if let Some(result) = self.slot.take() {
                return self.take(result);
            }
            let now = clock::now();
            if now >= self.deadline {
                break;
            }
            self.slot.wait(self.deadline.since(now));
        }
        let now = clock::now();
        self.peer.endpoint.shared.core().expire(now);
        // A tensor whose bytes are on their way when the deadline comes is for the next receiver.
        match self.slot.leave() {
            Some(result) => self.take(result),
            None => {
                let (key, peer, waited) = (self.key, self.peer.address.clone(), now.since(self.since));
                Err(CallError::Timeout { key, peer, waited }.into())
            }
        }
    }

    /// Looks at the regions of the link for a while: the answer may come within a microsecond or
    /// two.
    fn watch(&mut self) {
        self.watch_until(self.deadline);
    }

    /// Sleeps until the end of the request, its deadline or this time. True: there is nothing more
    /// to wait for.
    fn sleep_until(&self, until: Nanos) -> bool {
        let (now, until) = (clock::now(), until.min(self.deadline));
        if !self.slot.has_ended() && now < until {
            self.slot.wait(until.since(now));
        }
        self.slot.has_ended() || clock::now() >= self.deadline
    }

    fn watch_until(&mut self, limit: Nanos) {
        if !std::mem::take(&mut self.watches) {
            return;
        }
        let (shared, number) = (&self.peer.endpoint.shared, self.link.number);
        let begin = clock::now();
        let until = (begin + WATCH_LIMIT).min(limit);
        let mut now = begin;
        let mut look = 0_u32;
        while !self.slot.has_ended() && now < until {
            shared.core().pump_regions(now, number);
            look += 1;
            give_way(look);
            now = clock::now();
        }
        shared.core().end_watch(now, number);
    }

    /// The tensor of a call that has ended. Its sender is told that it is no longer needed there.
    fn take(&self, result: ReceiveResult) -> Result<ReceivedTensor, ReceiveTensorError> {
        let tensor = result?.take();
        if matches!(tensor.way(), TensorWay::Inline | TensorWay::Copied) {
            self.peer.endpoint.shared.core().leases_returned(clock::now(), self.link.number);
        }
        Ok(tensor)
    }
}

impl Drop for PendingTensor {
    fn drop(&mut self) {
        let Some(request) = self.request.take() else { return };
        if let Some(Ok(arrived)) = request.slot.leave() {
            arrived.decline();
        }
        request.peer.endpoint.shared.core().cancel(clock::now(), request.link.number, request.call);
    }
}
