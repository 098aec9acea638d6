//! Pairs connected by the connection manager, librdmacm: the kernel resolves the peer's address and
//! route, and gives the attributes for the states of the queue pairs. Without it ranks exchange
//! their queue pairs themselves.
//!
//! [`VerbsOptions::connect`](super::VerbsOptions) selects it: networks with routers, partitions or
//! path records of their own need it. The control stream comes first in either case: over it ranks
//! authenticate each other and exchange where they listen ([`ListenerAddress`]). The rank with the
//! higher number resolves the address, then the route, then sends a connect request, one for each
//! queue pair. Both ends put their [`PrivateData`] into the request and the response. The rest,
//! "ready" and the write that proves the path, is the same in either case.
//!
//! **Invariant:** a connect request is accepted only from a peer whose pair is connecting and that
//! has the token which the control stream gave to it; other requests are rejected and change
//! nothing. This backend owns its queue pairs: the manager only supplies attributes, so a pair that
//! ends here is destroyed here, and later events of the manager are ignored. No connection waits:
//! events come over a file that is part of the device's wake source, and each step has the time
//! limit of the whole connection.

mod library;
#[cfg(all(test, feature = "verbs-oracle"))]
mod oracle;
#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    unreachable_pub,
    reason = "as the headers name things"
)]
mod sys;
mod wire;

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, fs, io, ptr};

use self::library::Library;
pub use self::library::LoadError;
pub(super) use self::wire::ListenerAddress;
use self::wire::{Endpoint, PrivateData};
use super::connecting::{connect_failed, mtu_mismatch};
use super::objects::checked;
use super::pair::Pair;
use super::pair_error::PairError;
use super::port::{ChosenPort, GidType};
use super::send_queue::RETRIES;
use super::sys::{ibv_qp_attr, ibv_qp_state};
use super::wire::assert_round_trip;
use super::{Nic, OpenError};
use super::{Peer, VerbsDevice};
use crate::Rank;
use crate::device::{LossCause, ProtocolViolation};
use crate::region::random_key;

/// See [`super::wire::check_decoders`].
pub(super) fn check_decoders(bytes: &[u8]) {
    assert_round_trip(ListenerAddress::decode(bytes), |message| ListenerAddress::decode(&message.encode()));
    assert_round_trip(PrivateData::decode(bytes), |message| PrivateData::decode(&message.encode()));
}

/// Connect requests that wait to be polled at most, for each peer.
const BACKLOG: u32 = 16;

/// The status of a reject by the peer's program: the control stream has the reason.
const REJECTED_BY_CONSUMER: i32 = 28;
/// The status of a reject by the peer's host, because this one did not answer it in time.
const REJECTED_BY_TIMEOUT: i32 = 4;

/// Whether the library can be used.
pub(super) fn check_installed() -> Result<(), LoadError> {
    library::library().map(drop)
}

/// Why the connection manager did not connect two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConnectFailure {
    /// The address of the peer's port could not be resolved.
    NoAddress,
    /// There is no route to it.
    NoRoute,
    /// The peer did not answer.
    NoAnswer,
    /// The peer's host rejected the request.
    Rejected {
        /// The reason in the code of the InfiniBand specification (12.6.7.2).
        reason: i32,
    },
    /// The connection was not established, though both ends wanted it.
    NotConnected,
}

impl fmt::Display for ConnectFailure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAddress => formatter.write_str(
                "rdma_cm did not find the address of its RDMA port; are both ports in one network, and is its link up?",
            ),
            Self::NoRoute => formatter
                .write_str("rdma_cm found no route to its RDMA port; 'ip route get ADDRESS' says what the host knows"),
            Self::NoAnswer => formatter.write_str(
                "its RDMA port does not answer rdma_cm; is its link up, and does a firewall let UDP port 4791 through?",
            ),
            Self::Rejected { reason } => {
                write!(formatter, "rdma_cm was rejected by its host (reason {reason}); did the rank end a moment ago?")
            }
            Self::NotConnected => formatter.write_str("rdma_cm did not bring the queue pairs of both ends together"),
        }
    }
}

/// One end of a queue pair that is connecting or connected.
struct Connection {
    id: ConnectionId,
    peer: Rank,
    queue: usize,
    is_established: bool,
}

/// See the module.
pub(super) struct ConnectionManager {
    // Before the channel.
    /// By the number by which events name them.
    connections: BTreeMap<usize, Connection>,
    /// The listeners and their port numbers, by NIC.
    listeners: Vec<(ConnectionId, u16)>,
    channel: Arc<EventChannel>,
}

/// A connecting pair's state in the connection manager.
#[derive(Default)]
pub(super) struct CmState {
    /// The token of this rank's listener address, or of the peer's if this rank connects.
    token: u64,
    /// The number of connected queue pairs.
    established: usize,
}

impl ConnectionManager {
    /// Listens at the addresses of these NICs.
    pub(super) fn new(nics: &[Nic], world_size: u32) -> Result<Self, OpenError> {
        let library = library::library()?;
        let failed = |nic: &Nic, object| {
            let device = nic.chosen.device.clone();
            move |source| OpenError::Refused { device, object, source }
        };
        let channel = EventChannel::new(library).map_err(failed(&nics[0], "events of rdma_cm"))?;
        let mut listeners = Vec::with_capacity(nics.len());
        for nic in nics {
            let at = address(&nic.chosen, 0)?;
            let most = (world_size.saturating_mul(BACKLOG)).min(i32::MAX as u32) as i32;
            listeners.push(
                ConnectionId::listen(&channel, at, most).map_err(failed(nic, "a listener of rdma_cm"))?,
            );
        }
        Ok(Self { connections: BTreeMap::new(), listeners, channel })
    }

    /// Readable when an event has come.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.channel.file()
    }

    fn add(&mut self, id: ConnectionId, peer: Rank, queue: usize) {
        self.connections.insert(id.address(), Connection { id, peer, queue, is_established: false });
    }

    /// Destroys all connections of a peer.
    pub(super) fn disconnect(&mut self, peer: Rank) {
        self.connections.retain(|_, connection| connection.peer != peer);
    }
}

/// The socket address of a port.
fn address(chosen: &ChosenPort, number: u16) -> Result<SocketAddr, OpenError> {
    if chosen.gid.kind == GidType::InfiniBand {
        let (device, port) = (chosen.device.clone(), chosen.port);
        return Err(OpenError::NoSocketAddress { device, port });
    }
    Ok(socket_address(chosen.gid.address, number, scope(chosen)))
}

/// The index of a port's interface.
fn scope(chosen: &ChosenPort) -> u32 {
    let number = chosen.gid.interface.as_ref().and_then(|interface| {
        let file = Path::new("/sys/class/net").join(interface).join("ifindex");
        fs::read_to_string(file).ok()?.trim().parse().ok()
    });
    number.unwrap_or(0)
}

impl VerbsDevice {
    /// Where this rank listens for a peer whose pair exists.
    pub(super) fn listener_address(&mut self, peer: Rank) -> Option<ListenerAddress> {
        let connection_manager = self.connection_manager.as_ref()?;
        let Peer::Connecting(connecting) = &mut self.peers[peer as usize] else { return None };
        // The rank that connects uses the other's token.
        let token = random_key().0;
        if self.info.rank < peer {
            connecting.cm_state().token = token;
        }
        let pair = connecting.pair()?;
        let endpoint = |(nic, _): (usize, u32)| {
            let gid = &self.nics[nic].chosen.gid;
            Endpoint { address: gid.address, kind: gid.kind, number: connection_manager.listeners[nic].1 }
        };
        Some(ListenerAddress { token, endpoints: pair.queue_pairs().map(endpoint).collect() })
    }

    /// Connects to the peer's listener, if this rank has the higher number.
    pub(super) fn connect_by_cm(&mut self, peer: Rank) {
        let (is_caller, limit_ms) = (self.info.rank > peer, self.step_limit_ms());
        let Some(connection_manager) = &mut self.connection_manager else { return };
        let Peer::Connecting(connecting) = &mut self.peers[peer as usize] else { return };
        let Some(listener) = connecting.take_listener().filter(|_| is_caller) else { return };
        connecting.cm_state().token = listener.token;
        let Some(pair) = connecting.pair_mut() else { return };
        pair.truncate_queues(listener.endpoints.len());
        let mut failure = None;
        for (queue, (nic, _)) in pair.queue_pairs().enumerate() {
            let chosen = &self.nics[nic].chosen;
            let endpoint = &listener.endpoints[queue];
            if !endpoint.is_reachable_from(chosen.gid.address) {
                failure =
                    Some(PairError::GidTypeMismatch { own: chosen.gid.kind, peer: endpoint.kind }.into());
                break;
            }
            let from = socket_address(chosen.gid.address, 0, scope(chosen));
            let to = socket_address(endpoint.address, endpoint.number, scope(chosen));
            match ConnectionId::resolve(&connection_manager.channel, from, to, limit_ms) {
                Ok(id) => connection_manager.add(id, peer, queue),
                Err(error) => {
                    tracing::warn!("verbs: rdma_cm does not look for {to} from {from} ({error})");
                    failure = Some(ConnectFailure::NoAddress.into());
                }
            }
        }
        if let Some(cause) = failure {
            self.refuse(peer, cause);
        }
    }

    /// The time limit of each step, in milliseconds.
    fn step_limit_ms(&self) -> i32 {
        i32::try_from(self.connect_timeout.max(Duration::from_millis(1)).as_millis()).unwrap_or(i32::MAX)
    }

    /// Handles the events of the connection manager.
    pub(super) fn poll_connection_manager(&mut self) {
        while let Some(event) =
            self.connection_manager.as_ref().and_then(|connection_manager| connection_manager.channel.next())
        {
            self.handle_event(event);
        }
    }

    fn handle_event(&mut self, event: CmEvent) {
        if let Some(id) = event.new_id {
            return self.handle_connect_request(id, &event.private_data, event.queue_pair);
        }
        let connection = self
            .connection_manager
            .as_ref()
            .and_then(|connection_manager| connection_manager.connections.get(&event.id));
        // An event of a listener, or of a pair that has ended meanwhile: both are detected
        // otherwise.
        let Some(&Connection { peer, queue, .. }) = connection else { return };
        let failure = match event.kind {
            CmEventKind::AddressResolved => self.resolve_route(event.id),
            CmEventKind::RouteResolved => self.send_connect_request(event.id, peer, queue),
            CmEventKind::ConnectResponse => self.handle_connect_response(event.id, peer, queue, &event),
            CmEventKind::Established => return self.queue_established(event.id),
            CmEventKind::AddressError => Err(ConnectFailure::NoAddress.into()),
            CmEventKind::RouteError => Err(ConnectFailure::NoRoute.into()),
            CmEventKind::Unreachable => Err(ConnectFailure::NoAnswer.into()),
            CmEventKind::Rejected if event.status == REJECTED_BY_CONSUMER => return self.await_refusal(peer),
            CmEventKind::Rejected if event.status == REJECTED_BY_TIMEOUT => {
                Err(ConnectFailure::NoAnswer.into())
            }
            CmEventKind::Rejected => Err(ConnectFailure::Rejected { reason: event.status }.into()),
            CmEventKind::ConnectError => Err(ConnectFailure::NotConnected.into()),
            CmEventKind::ConnectRequest | CmEventKind::Other => return,
        };
        if let (Err(cause), Peer::Connecting(_)) = (failure, &self.peers[peer as usize]) {
            tracing::warn!("verbs: rdma_cm to rank {peer}: {:?}, status {}", event.kind, event.status);
            self.refuse(peer, cause);
        }
    }

    fn resolve_route(&mut self, id: usize) -> Result<(), LossCause> {
        let limit_ms = self.step_limit_ms();
        let Some(connection) = self
            .connection_manager
            .as_ref()
            .and_then(|connection_manager| connection_manager.connections.get(&id))
        else {
            return Ok(());
        };
        connection.id.resolve_route(limit_ms).map_err(|_| ConnectFailure::NoRoute.into())
    }

    /// The private data for one of this rank's queue pairs, and the queue pair's number.
    fn own_private_data(&self, pair: &Pair, queue: usize, token: u64) -> (PrivateData, u32) {
        let hello = pair.hello(&self.nics);
        let own = hello.queues[queue];
        let data = PrivateData {
            rank: self.info.rank,
            token,
            queue: queue as u8,
            queues: hello.queues.len() as u8,
            nic: own.nic,
            mtu: own.mtu,
            reads: hello.reads,
            credits: hello.credits,
            signal_slots: hello.signal_slots,
            inbox_address: hello.inbox_address,
            inbox_key: own.inbox_key,
        };
        (data, own.queue_pair)
    }

    /// Sends a connect request when the route is resolved.
    fn send_connect_request(&mut self, id: usize, peer: Rank, queue: usize) -> Result<(), LossCause> {
        let Peer::Connecting(connecting) = &mut self.peers[peer as usize] else { return Ok(()) };
        let token = connecting.cm_state().token;
        let Some(pair) = self.peers[peer as usize].pair() else { return Ok(()) };
        let (data, queue_pair) = self.own_private_data(pair, queue, token);
        let Some(connection) = self
            .connection_manager
            .as_ref()
            .and_then(|connection_manager| connection_manager.connections.get(&id))
        else {
            return Ok(());
        };
        let private_data = data.encode();
        let parameters = ConnectParameters {
            private_data: &private_data,
            queue_pair,
            reads: self.sizes.reads,
            retries: RETRIES,
        };
        connection.id.connect(&parameters).map_err(|_| ConnectFailure::NotConnected.into())
    }

    /// Handles a connect request.
    fn handle_connect_request(&mut self, id: ConnectionId, private_data: &[u8], queue_pair: u32) {
        let Ok(data) = PrivateData::decode(private_data) else { return id.reject() };
        let peer = data.rank;
        let Some(Peer::Connecting(connecting)) = self.peers.get_mut(peer as usize) else {
            return id.reject();
        };
        let is_expected = self.info.rank < peer && connecting.cm_state().token == data.token;
        let Some(pair) = connecting.pair_mut().filter(|_| is_expected) else { return id.reject() };
        pair.truncate_queues(usize::from(data.queues));
        let queue = usize::from(data.queue);
        if queue >= pair.queue_pairs().count() {
            return id.reject();
        }
        let established = self.connect_queue(&id, peer, queue, &data, queue_pair).and_then(|()| {
            let Peer::Connecting(connecting) = &self.peers[peer as usize] else { return Ok(()) };
            let Some(pair) = connecting.pair() else { return Ok(()) };
            let (own, number) = self.own_private_data(pair, queue, data.token);
            let reads = self.sizes.reads.min(data.reads);
            let private_data = own.encode();
            let parameters = ConnectParameters {
                private_data: &private_data,
                queue_pair: number,
                reads,
                retries: RETRIES,
            };
            id.accept(&parameters).map_err(|_| ConnectFailure::NotConnected.into())
        });
        match (established, &mut self.connection_manager) {
            (Ok(()), Some(connection_manager)) => connection_manager.add(id, peer, queue),
            (Err(cause), _) => {
                // The control stream gives the reason before the reject.
                self.refuse(peer, cause);
                id.reject();
            }
            _ => {}
        }
    }

    /// Connects one queue pair with the attributes of the manager.
    fn connect_queue(
        &mut self,
        id: &ConnectionId,
        peer: Rank,
        queue: usize,
        data: &PrivateData,
        queue_pair: u32,
    ) -> Result<(), LossCause> {
        let Peer::Connecting(connecting) = &mut self.peers[peer as usize] else { return Ok(()) };
        let Some(pair) = connecting.pair_mut() else { return Ok(()) };
        let (hello, other) = data.hello(queue_pair);
        let nic = pair.queue_pairs().nth(queue).map_or(0, |(nic, _)| nic);
        if let Some(unequal) = mtu_mismatch(&self.nics[nic..=nic], &hello) {
            return Err(unequal);
        }
        let attributes = |state| id.attributes(state);
        pair.connect_queue(queue, &hello, &other, attributes).map_err(|error| connect_failed(peer, error))
    }

    /// Handles the response to a connect request.
    fn handle_connect_response(
        &mut self,
        id: usize,
        peer: Rank,
        queue: usize,
        event: &CmEvent,
    ) -> Result<(), LossCause> {
        let Some(connection) = self
            .connection_manager
            .as_mut()
            .and_then(|connection_manager| connection_manager.connections.remove(&id))
        else {
            return Ok(());
        };
        let data = PrivateData::decode(&event.private_data)
            .ok()
            .filter(|data| data.rank == peer && usize::from(data.queue) == queue)
            .ok_or(LossCause::Protocol(ProtocolViolation::MalformedFrame))?;
        self.connect_queue(&connection.id, peer, queue, &data, event.queue_pair)?;
        connection.id.establish().map_err(|_| LossCause::from(ConnectFailure::NotConnected))?;
        if let Some(connection_manager) = &mut self.connection_manager {
            connection_manager.connections.insert(id, connection);
        }
        self.queue_established(id);
        Ok(())
    }

    /// Counts a connected queue pair; sends "ready" after the last.
    fn queue_established(&mut self, id: usize) {
        let connection = self
            .connection_manager
            .as_mut()
            .and_then(|connection_manager| connection_manager.connections.get_mut(&id));
        let Some(connection) = connection.filter(|connection| !connection.is_established) else { return };
        connection.is_established = true;
        let peer = connection.peer;
        let Peer::Connecting(connecting) = &mut self.peers[peer as usize] else { return };
        connecting.cm_state().established += 1;
        let established = connecting.cm_state().established;
        let Some(pair) = connecting.pair() else { return };
        if established == pair.queue_pairs().count() {
            connecting.mark_connected();
            self.say_ready(peer);
            self.advance(peer);
        }
    }

    /// The peer has rejected the request; the control stream gives the reason.
    fn await_refusal(&mut self, peer: Rank) {
        if let Peer::Connecting(connecting) = &mut self.peers[peer as usize] {
            connecting.await_end();
        }
    }
}

impl From<ConnectFailure> for LossCause {
    fn from(failure: ConnectFailure) -> Self {
        PairError::Connect(failure).into()
    }
}

/// The kind of an event of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CmEventKind {
    AddressResolved,
    RouteResolved,
    /// A connect request; the event's id is new.
    ConnectRequest,
    ConnectResponse,
    Established,
    AddressError,
    RouteError,
    Unreachable,
    Rejected,
    ConnectError,
    /// A disconnect, or an event that this backend detects otherwise.
    Other,
}

/// A copy of one event.
struct CmEvent {
    kind: CmEventKind,
    /// The id of the event, see [`ConnectionId::address`].
    id: usize,
    /// The new id of a connect request; this process owns it.
    new_id: Option<ConnectionId>,
    /// A negative error number, or the reason of a reject.
    status: i32,
    /// The peer's private data.
    private_data: Vec<u8>,
    /// The peer's queue pair.
    queue_pair: u32,
}

/// The channel of events.
///
/// **Invariant:** destroying an id waits until all its events are acknowledged, so
/// [`next`](EventChannel::next) copies and acknowledges an event at once.
struct EventChannel {
    raw: NonNull<sys::rdma_event_channel>,
    library: &'static Library,
}

// SAFETY: librdmacm is thread-safe.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl EventChannel {
    fn new(library: &'static Library) -> io::Result<Arc<Self>> {
        // SAFETY: no arguments; null means that errno has the error.
        let raw = NonNull::new(unsafe { (library.create_event_channel)() });
        let channel = Arc::new(Self { raw: raw.ok_or_else(io::Error::last_os_error)?, library });
        rustix::io::ioctl_fionbio(channel.file(), true)?;
        Ok(channel)
    }

    /// Readable when an event has come.
    fn file(&self) -> BorrowedFd<'_> {
        // SAFETY: a live channel, whose file is open as long as the channel, which the borrow does
        // not outlive.
        unsafe { BorrowedFd::borrow_raw(self.raw.as_ref().fd) }
    }

    /// The next event, if there is one; never waits.
    fn next(self: &Arc<Self>) -> Option<CmEvent> {
        let mut event = ptr::null_mut();
        // SAFETY: a live channel that does not block; it writes one pointer.
        if unsafe { (self.library.get_cm_event)(self.raw.as_ptr(), &raw mut event) } != 0 {
            return None;
        }
        // SAFETY: an event that was not acknowledged; for events of a connection `conn` is valid,
        // with its pointer and length.
        let copy = unsafe {
            let event = &*event;
            let kind = event_kind(event.event);
            let has_private_data = matches!(
                kind,
                CmEventKind::ConnectRequest
                    | CmEventKind::ConnectResponse
                    | CmEventKind::Rejected
                    | CmEventKind::Established
            );
            let (mut private_data, mut queue_pair) = (Vec::new(), 0);
            if has_private_data {
                let conn = &event.param.conn;
                queue_pair = conn.qp_num;
                if !conn.private_data.is_null() {
                    let (bytes, length) =
                        (conn.private_data.cast::<u8>(), usize::from(conn.private_data_len));
                    private_data.extend_from_slice(std::slice::from_raw_parts(bytes, length));
                }
            }
            let raw_id = if kind == CmEventKind::ConnectRequest { NonNull::new(event.id) } else { None };
            let new_id = raw_id.map(|raw| ConnectionId { raw, channel: Arc::clone(self) });
            CmEvent { kind, id: event.id as usize, new_id, status: event.status, private_data, queue_pair }
        };
        // SAFETY: the event of above, which is not used afterwards.
        unsafe { (self.library.ack_cm_event)(event) };
        Some(copy)
    }
}

fn event_kind(event: sys::rdma_cm_event_type) -> CmEventKind {
    match event {
        sys::RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddressResolved,
        sys::RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
        sys::RDMA_CM_EVENT_CONNECT_REQUEST => CmEventKind::ConnectRequest,
        sys::RDMA_CM_EVENT_CONNECT_RESPONSE => CmEventKind::ConnectResponse,
        sys::RDMA_CM_EVENT_ESTABLISHED => CmEventKind::Established,
        sys::RDMA_CM_EVENT_ADDR_ERROR => CmEventKind::AddressError,
        sys::RDMA_CM_EVENT_ROUTE_ERROR => CmEventKind::RouteError,
        sys::RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Unreachable,
        sys::RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected,
        sys::RDMA_CM_EVENT_CONNECT_ERROR => CmEventKind::ConnectError,
        _ => CmEventKind::Other,
    }
}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: ids hold their channel, so no id exists.
        unsafe { (self.library.destroy_event_channel)(self.raw.as_ptr()) };
    }
}

/// The parameters of a connect or an accept.
struct ConnectParameters<'a> {
    private_data: &'a [u8],
    queue_pair: u32,
    /// Reads and atomics at once, in each direction.
    reads: u8,
    retries: u8,
}

impl ConnectParameters<'_> {
    fn raw(&self) -> sys::rdma_conn_param {
        sys::rdma_conn_param {
            private_data: self.private_data.as_ptr().cast(),
            private_data_len: self.private_data.len() as u8,
            responder_resources: self.reads,
            initiator_depth: self.reads,
            flow_control: 1,
            retry_count: self.retries,
            rnr_retry_count: self.retries,
            // All queue pairs of this backend use a shared receive queue.
            srq: 1,
            qp_num: self.queue_pair,
        }
    }
}

/// A connection id: a connection, or a listener. The id holds its channel, so the id is destroyed
/// before the channel.
struct ConnectionId {
    raw: NonNull<sys::rdma_cm_id>,
    channel: Arc<EventChannel>,
}

// SAFETY: as for `EventChannel`.
unsafe impl Send for ConnectionId {}

impl ConnectionId {
    fn new(channel: &Arc<EventChannel>) -> io::Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: a live channel; it writes one pointer.
        checked(unsafe {
            let create = channel.library.create_id;
            create(channel.raw.as_ptr(), &raw mut raw, ptr::null_mut(), sys::RDMA_PS_TCP)
        })?;
        let raw = NonNull::new(raw).ok_or(io::ErrorKind::Other)?;
        Ok(Self { raw, channel: Arc::clone(channel) })
    }

    /// Listens at an address of a port, with a backlog of `backlog` requests; returns the port
    /// number, which the system chooses.
    fn listen(channel: &Arc<EventChannel>, address: SocketAddr, backlog: c_int) -> io::Result<(Self, u16)> {
        let id = Self::new(channel)?;
        let (mut raw_address, library) = (RawSocketAddress::of(address), channel.library);
        // SAFETY: a live id, and an address that stays for the call.
        checked(unsafe { (library.bind_addr)(id.raw.as_ptr(), raw_address.as_mut_ptr()) })?;
        // SAFETY: as above.
        checked(unsafe { (library.listen)(id.raw.as_ptr(), backlog) })?;
        // SAFETY: as above.
        let port = u16::from_be(unsafe { (library.get_src_port)(id.raw.as_ptr()) });
        Ok((id, port))
    }

    /// Starts to resolve a peer's address, from an address of a port.
    fn resolve(
        channel: &Arc<EventChannel>,
        from: SocketAddr,
        to: SocketAddr,
        limit_ms: c_int,
    ) -> io::Result<Self> {
        let id = Self::new(channel)?;
        let (mut from, mut to) = (RawSocketAddress::of(from), RawSocketAddress::of(to));
        // SAFETY: a live id, and addresses that stay for the call.
        checked(unsafe {
            let resolve = channel.library.resolve_addr;
            resolve(id.raw.as_ptr(), from.as_mut_ptr(), to.as_mut_ptr(), limit_ms)
        })?;
        Ok(id)
    }

    /// The number by which events name the id.
    fn address(&self) -> usize {
        self.raw.as_ptr() as usize
    }

    fn library(&self) -> &'static Library {
        self.channel.library
    }

    /// Starts to resolve the route.
    fn resolve_route(&self, limit_ms: c_int) -> io::Result<()> {
        // SAFETY: a live id.
        checked(unsafe { (self.library().resolve_route)(self.raw.as_ptr(), limit_ms) })
    }

    /// Sends a connect request to the peer.
    fn connect(&self, parameters: &ConnectParameters<'_>) -> io::Result<()> {
        let mut parameters = parameters.raw();
        // SAFETY: a live id, and parameters that stay for the call.
        checked(unsafe { (self.library().connect)(self.raw.as_ptr(), &raw mut parameters) })
    }

    /// Accepts the peer's connect request.
    fn accept(&self, parameters: &ConnectParameters<'_>) -> io::Result<()> {
        let mut parameters = parameters.raw();
        // SAFETY: as above.
        checked(unsafe { (self.library().accept)(self.raw.as_ptr(), &raw mut parameters) })
    }

    /// Rejects the peer's connect request.
    fn reject(self) {
        // SAFETY: a live id; no private data. After a failure the request expires.
        unsafe { (self.library().reject)(self.raw.as_ptr(), ptr::null(), 0) };
    }

    /// Completes the connection after the peer's response.
    fn establish(&self) -> io::Result<()> {
        // SAFETY: a live id.
        checked(unsafe { (self.library().establish)(self.raw.as_ptr()) })
    }

    /// The attributes that bring the queue pair into a state, and their mask.
    fn attributes(&self, state: ibv_qp_state) -> io::Result<(ibv_qp_attr, u32)> {
        // SAFETY: plain numbers, of which zero is one.
        let mut attributes: ibv_qp_attr = unsafe { std::mem::zeroed() };
        let mut mask: c_int = 0;
        attributes.qp_state = state;
        // SAFETY: a live id; it writes into both.
        checked(unsafe {
            (self.library().init_qp_attr)(self.raw.as_ptr(), &raw mut attributes, &raw mut mask)
        })?;
        Ok((attributes, mask as u32))
    }
}

impl Drop for ConnectionId {
    fn drop(&mut self) {
        // SAFETY: a live id, whose events were all acknowledged. Its queue pair is not the
        // library's.
        unsafe { (self.channel.library.destroy_id)(self.raw.as_ptr()) };
    }
}

/// An address as the library takes it.
struct RawSocketAddress(libc::sockaddr_storage);

impl RawSocketAddress {
    fn of(address: SocketAddr) -> Self {
        // SAFETY: plain numbers, of which zero is one.
        let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
        let place = &raw mut storage;
        match address {
            SocketAddr::V4(address) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: address.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                    sin_zero: [0; 8],
                };
                // SAFETY: the storage has room for any address, and is aligned for it.
                unsafe { place.cast::<libc::sockaddr_in>().write(raw) };
            }
            SocketAddr::V6(address) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: address.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                    sin6_scope_id: address.scope_id(),
                };
                // SAFETY: as above.
                unsafe { place.cast::<libc::sockaddr_in6>().write(raw) };
            }
        }
        Self(storage)
    }

    fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// A port's GID as a socket address; `scope` is the index of its interface.
fn socket_address(gid: Ipv6Addr, port: u16, scope: u32) -> SocketAddr {
    match IpAddr::V6(gid).to_canonical() {
        IpAddr::V4(address) => SocketAddr::from((address, port)),
        IpAddr::V6(address) => {
            let scope = if address.is_unicast_link_local() { scope } else { 0 };
            SocketAddr::V6(SocketAddrV6::new(address, port, 0, scope))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_ports_are_those_of_sockets_with_their_scope_where_it_counts() {
        let of = |gid: &str| socket_address(gid.parse().unwrap(), 7, 3).to_string();
        assert_eq!(of("::ffff:10.77.0.1"), "10.77.0.1:7");
        assert_eq!(of("fe80::1"), "[fe80::1%3]:7");
        assert_eq!(of("2001:db8::1"), "[2001:db8::1]:7");
    }

    #[test]
    fn addresses_are_given_to_the_library_in_the_order_of_the_network() {
        let mut four = RawSocketAddress::of("10.77.0.1:258".parse().unwrap());
        // SAFETY: the beginning of a storage that is longer.
        let bytes = unsafe { std::slice::from_raw_parts(four.as_mut_ptr().cast::<u8>(), 8) };
        assert_eq!(bytes[2..], [1, 2, 10, 77, 0, 1]);
        let mut six = RawSocketAddress::of("[fe80::1%5]:258".parse().unwrap());
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(six.as_mut_ptr().cast::<u8>(), 28) };
        assert_eq!((bytes[2..4].to_vec(), bytes[8], bytes[23]), (vec![1, 2], 0xfe, 1));
        assert_eq!(u32::from_ne_bytes(bytes[24..28].try_into().unwrap()), 5);
    }
}
