//! A program from which this one receives.

use std::fmt;
use std::io;
use std::net::{IpAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use pleach_transport::mutex::lock;
use pleach_transport::{Nanos, clock, tune_stream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Handle;
use super::connection::{Connection, ConnectionEnd, Incoming};
use super::error::{LinkError, ReceiveTensorError};
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
        let (connection, id, theirs) = dialed?;
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
        let number = core.add_receiver(now, id, &self.address, connection, fabric);
        let hold = LinkHold::new(number, id, &self.endpoint);
        core.hold(&hold);
        // Frames may have come with the verdict.
        core.pump(now, number);
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

    /// Connects and shakes hands. Returns the connection, the link and what the peer says of
    /// itself.
    fn dial(&self, since: Nanos, deadline: Nanos) -> Result<(Connection, LinkId, Introduction), LinkError> {
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
                Ok(stream) => return self.shake_hands(stream, address.ip(), since, deadline),
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
        stream: TcpStream,
        to: IpAddr,
        since: Nanos,
        deadline: Nanos,
    ) -> Result<(Connection, LinkId, Introduction), LinkError> {
        let shared = &self.endpoint.shared;
        let failed = |source| LinkError::Handshake { peer: self.address.clone(), source };
        let unreachable =
            |error| LinkError::Unreachable { peer: self.address.clone(), source: Arc::new(error) };
        stream.set_nonblocking(true).map_err(unreachable)?;
        let socket = OwnedFd::from(stream);
        tune_stream(&socket).map_err(unreachable)?;
        let mut connection = Connection::new(socket);
        let ended = |end| match end {
            ConnectionEnd::Tls(fault) => failed(fault.into()),
            ConnectionEnd::Broke(kind) => unreachable(kind.into()),
            _ => failed(HandshakeError::Protocol),
        };
        let (secret, tls) = (shared.options.secret.clone(), shared.tls.clone());
        let dialed = Handshake::dial(shared.introduce(), secret, tls, to);
        let (mut handshake, first) = dialed.map_err(|error| failed(error.into()))?;
        connection.queue_encoded(first);
        loop {
            // Whoever refuses this end says why before it closes: that comes before its absence.
            let flushed = connection.flush();
            let step = match connection.receive().map_err(ended)? {
                Some(Incoming::Frame(kind, content)) => handshake.received(kind, content),
                Some(Incoming::Secured(binding)) => handshake.secured(binding),
                Some(Incoming::Tensor(_)) => return Err(failed(HandshakeError::Protocol)),
                None => {
                    let has_sent = flushed.map_err(ended)?;
                    if shared.is_over() {
                        return Err(LinkError::Closed { peer: self.address.clone() });
                    }
                    let left = deadline.since(clock::now()).min(HANDSHAKE_TURN);
                    if left.is_zero() {
                        return Err(self.timeout(since));
                    }
                    wait_for(&connection, !has_sent, left);
                    continue;
                }
            };
            match step {
                HandshakeStep::Continue(next) => connection.queue_encoded(next),
                HandshakeStep::Secure(next) => {
                    connection.queue_encoded(next);
                    let handshake = shared.tls.dial().map_err(|fault| failed(fault.into()))?;
                    connection.secure(handshake).map_err(ended)?;
                }
                HandshakeStep::Refused { error, .. } => return Err(failed(error)),
                HandshakeStep::Done { link, .. } => {
                    let theirs = handshake.theirs().cloned();
                    let theirs = theirs.ok_or_else(|| failed(HandshakeError::Protocol))?;
                    return Ok((connection, link, theirs));
                }
            }
        }
    }
}

/// Waits until a connection has bytes, or takes some.
fn wait_for(connection: &Connection, takes_bytes: bool, limit: Duration) {
    let output = if takes_bytes { PollFlags::OUT } else { PollFlags::empty() };
    let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    // The only possible error is an interruption: look again.
    let _ = poll(&mut [PollFd::new(connection, PollFlags::IN | output)], Some(&limit));
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
