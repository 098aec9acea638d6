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
//! ends here is destroyed here, and later events of the manager are ignored. No call waits: events
//! come over a file that is part of the device's wake source, and each step has the time limit of
//! the whole connection.

mod greeting;
mod ids;
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
pub(super) mod sys;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub(super) use self::greeting::Entrance;
use self::greeting::{Door, Greeting};
use self::ids::{Channel, Happened, Id, Terms, What, socket_address};
pub use self::library::LoadError;
use super::joining::{REFUSAL_GRACE, not_joined, unequal_packets};
use super::nic::Nic;
use super::open::OpenError;
use super::pair::Pair;
use super::pair_error::PairError;
use super::port::{Chosen, Kind};
use super::send_queue::RETRIES;
use super::{Peer, VerbsDevice};
use crate::Rank;
use crate::clock;
use crate::device::{LossCause, ProtocolViolation};
use crate::region::random_key;

/// See [`super::check_decoders`].
pub(super) fn check_decoders(bytes: &[u8]) {
    super::survives(Entrance::decode(bytes), |said| Entrance::decode(&said.encode()));
    super::survives(Greeting::decode(bytes), |said| Greeting::decode(&said.encode()));
}

/// Connect requests that wait to be polled at most, for each peer.
const BACKLOG: u32 = 16;

/// The status of a reject by the peer's program: the control stream has the reason.
const REJECTED_BY_ITS_USER: i32 = 28;

/// Whether the library can be used.
pub(super) fn is_here() -> Result<(), LoadError> {
    library::library().map(drop)
}

/// Why the connection manager did not connect two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CallFailure {
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
    NotJoined,
}

impl fmt::Display for CallFailure {
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
            Self::NotJoined => formatter.write_str("rdma_cm did not bring the queue pairs of both ends together"),
        }
    }
}

/// One end of a queue pair that is connecting or connected.
struct Call {
    id: Id,
    peer: Rank,
    queue: usize,
    is_joined: bool,
}

/// See the module.
pub(super) struct Switchboard {
    // Before the channel.
    /// By the number by which events name them.
    calls: BTreeMap<usize, Call>,
    /// The listeners and their port numbers, by NIC.
    doors: Vec<(Id, u16)>,
    channel: Arc<Channel>,
}

/// A connecting pair's state in the connection manager.
#[derive(Default)]
pub(super) struct Meeting {
    /// The token of this rank's listener address, or of the peer's if this rank connects.
    token: u64,
    /// The number of connected queue pairs.
    joined: usize,
}

impl Switchboard {
    /// Listens at the addresses of these NICs.
    pub(super) fn new(nics: &[Nic], world_size: u32) -> Result<Self, OpenError> {
        let library = library::library()?;
        let failed = |nic: &Nic, what| {
            let device = nic.chosen.device.clone();
            move |source| OpenError::Refused { device, what, source }
        };
        let channel = Channel::new(library).map_err(failed(&nics[0], "events of rdma_cm"))?;
        let mut doors = Vec::with_capacity(nics.len());
        for nic in nics {
            let at = address(&nic.chosen, 0)?;
            let most = (world_size.saturating_mul(BACKLOG)).min(i32::MAX as u32) as i32;
            doors.push(Id::listening(&channel, at, most).map_err(failed(nic, "to listen for rdma_cm"))?);
        }
        Ok(Self { calls: BTreeMap::new(), doors, channel })
    }

    /// Readable when an event has come.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.channel.file()
    }

    fn add(&mut self, id: Id, peer: Rank, queue: usize) {
        self.calls.insert(id.address(), Call { id, peer, queue, is_joined: false });
    }

    /// Destroys all connections of a peer.
    pub(super) fn hang_up(&mut self, peer: Rank) {
        self.calls.retain(|_, call| call.peer != peer);
    }
}

/// The socket address of a port.
fn address(chosen: &Chosen, number: u16) -> Result<SocketAddr, OpenError> {
    if chosen.gid.kind == Kind::InfiniBand {
        let (device, port) = (chosen.device.clone(), chosen.port);
        return Err(OpenError::NoSocketAddress { device, port });
    }
    Ok(socket_address(chosen.gid.address, number, scope(chosen)))
}

/// The index of a port's interface.
fn scope(chosen: &Chosen) -> u32 {
    let number = chosen.gid.interface.as_ref().and_then(|interface| {
        let file = Path::new("/sys/class/net").join(interface).join("ifindex");
        fs::read_to_string(file).ok()?.trim().parse().ok()
    });
    number.unwrap_or(0)
}

impl VerbsDevice {
    /// Where this rank listens for a peer whose pair exists.
    pub(super) fn open_entrance(&mut self, peer: Rank) -> Option<Entrance> {
        let switchboard = self.switchboard.as_ref()?;
        let Peer::Joining(joining) = &mut self.peers[peer as usize] else { return None };
        let pair = joining.pair.as_ref()?;
        // The rank that connects uses the other's token.
        let token = random_key().0;
        if self.info.rank < peer {
            joining.meeting.token = token;
        }
        let door = |(nic, _): (usize, u32)| {
            let gid = &self.nics[nic].chosen.gid;
            Door { address: gid.address, kind: gid.kind, number: switchboard.doors[nic].1 }
        };
        Some(Entrance { token, doors: pair.queue_pairs().map(door).collect() })
    }

    /// Connects to the peer's listener, if this rank has the higher number.
    pub(super) fn call_back(&mut self, peer: Rank) {
        let (is_caller, limit_ms) = (self.info.rank > peer, self.call_limit_ms());
        let Some(switchboard) = &mut self.switchboard else { return };
        let Peer::Joining(joining) = &mut self.peers[peer as usize] else { return };
        let (Some(pair), Some(entrance)) = (&mut joining.pair, joining.entrance.take()) else { return };
        if !is_caller {
            return;
        }
        joining.meeting.token = entrance.token;
        pair.keep_first(entrance.doors.len());
        let mut failure = None;
        for (queue, (nic, _)) in pair.queue_pairs().enumerate() {
            let chosen = &self.nics[nic].chosen;
            let door = &entrance.doors[queue];
            if !door.meets(chosen.gid.address) {
                failure = Some(PairError::AddressKinds { own: chosen.gid.kind, peer: door.kind }.into());
                break;
            }
            let from = socket_address(chosen.gid.address, 0, scope(chosen));
            let to = socket_address(door.address, door.number, scope(chosen));
            match Id::calling(&switchboard.channel, from, to, limit_ms) {
                Ok(id) => switchboard.add(id, peer, queue),
                Err(error) => {
                    tracing::warn!("verbs: rdma_cm does not look for {to} from {from} ({error})");
                    failure = Some(CallFailure::NoAddress.into());
                }
            }
        }
        if let Some(cause) = failure {
            self.refuse(peer, cause);
        }
    }

    /// The time limit of each step, in milliseconds.
    fn call_limit_ms(&self) -> i32 {
        i32::try_from(self.connect_timeout.max(Duration::from_millis(1)).as_millis()).unwrap_or(i32::MAX)
    }

    /// Handles the events of the connection manager.
    pub(super) fn take_calls(&mut self) {
        while let Some(happened) =
            self.switchboard.as_ref().and_then(|switchboard| switchboard.channel.next())
        {
            self.happened(happened);
        }
    }

    fn happened(&mut self, happened: Happened) {
        if let Some(id) = happened.requested {
            return self.asked(id, &happened.said, happened.queue_pair);
        }
        let call = self.switchboard.as_ref().and_then(|switchboard| switchboard.calls.get(&happened.id));
        // An event of a listener, or of a pair that has ended meanwhile: both are detected
        // otherwise.
        let Some(&Call { peer, queue, .. }) = call else { return };
        let failure = match happened.what {
            What::AddressResolved => self.find_route(happened.id),
            What::RouteResolved => self.call(happened.id, peer, queue),
            What::Answered => self.answered(happened.id, peer, queue, &happened),
            What::Established => return self.queue_is_joined(happened.id),
            What::AddressFailed => Err(CallFailure::NoAddress.into()),
            What::RouteFailed => Err(CallFailure::NoRoute.into()),
            What::Unreachable => Err(CallFailure::NoAnswer.into()),
            What::Rejected if happened.status == REJECTED_BY_ITS_USER => return self.await_word(peer),
            What::Rejected => Err(CallFailure::Rejected { reason: happened.status }.into()),
            What::ConnectFailed => Err(CallFailure::NotJoined.into()),
            What::Requested | What::Other => return,
        };
        if let (Err(cause), Peer::Joining(_)) = (failure, &self.peers[peer as usize]) {
            tracing::warn!("verbs: rdma_cm to rank {peer}: {:?}, status {}", happened.what, happened.status);
            self.refuse(peer, cause);
        }
    }

    fn find_route(&mut self, id: usize) -> Result<(), LossCause> {
        let limit_ms = self.call_limit_ms();
        let Some(call) = self.switchboard.as_ref().and_then(|switchboard| switchboard.calls.get(&id)) else {
            return Ok(());
        };
        call.id.find_route(limit_ms).map_err(|_| CallFailure::NoRoute.into())
    }

    /// The private data for one of this rank's queue pairs, and the queue pair's number.
    fn greeting(&self, pair: &Pair, queue: usize, token: u64) -> (Greeting, u32) {
        let hello = pair.hello(&self.nics);
        let own = hello.queues[queue];
        let greeting = Greeting {
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
        (greeting, own.queue_pair)
    }

    /// Sends a connect request when the route is resolved.
    fn call(&mut self, id: usize, peer: Rank, queue: usize) -> Result<(), LossCause> {
        let Peer::Joining(joining) = &self.peers[peer as usize] else { return Ok(()) };
        let Some(pair) = &joining.pair else { return Ok(()) };
        let (greeting, queue_pair) = self.greeting(pair, queue, joining.meeting.token);
        let Some(call) = self.switchboard.as_ref().and_then(|switchboard| switchboard.calls.get(&id)) else {
            return Ok(());
        };
        let said = greeting.encode();
        let terms = Terms { said: &said, queue_pair, reads: self.sizes.reads, retries: RETRIES };
        call.id.connect(&terms).map_err(|_| CallFailure::NotJoined.into())
    }

    /// Handles a connect request.
    fn asked(&mut self, id: Id, said: &[u8], queue_pair: u32) {
        let Some(greeting) = Greeting::decode(said) else { return id.reject() };
        let peer = greeting.rank;
        let Some(Peer::Joining(joining)) = self.peers.get_mut(peer as usize) else { return id.reject() };
        let is_expected = self.info.rank < peer && joining.meeting.token == greeting.token;
        let Some(pair) = joining.pair.as_mut().filter(|_| is_expected) else { return id.reject() };
        pair.keep_first(usize::from(greeting.queues));
        let queue = usize::from(greeting.queue);
        if queue >= pair.queue_pairs().count() {
            return id.reject();
        }
        let joined = self.join_queue(&id, peer, queue, &greeting, queue_pair).and_then(|()| {
            let Peer::Joining(joining) = &self.peers[peer as usize] else { return Ok(()) };
            let Some(pair) = &joining.pair else { return Ok(()) };
            let (own, number) = self.greeting(pair, queue, greeting.token);
            let reads = self.sizes.reads.min(greeting.reads);
            let said = own.encode();
            let terms = Terms { said: &said, queue_pair: number, reads, retries: RETRIES };
            id.accept(&terms).map_err(|_| CallFailure::NotJoined.into())
        });
        match (joined, &mut self.switchboard) {
            (Ok(()), Some(switchboard)) => switchboard.add(id, peer, queue),
            (Err(cause), _) => {
                // The control stream gives the reason before the reject.
                self.refuse(peer, cause);
                id.reject();
            }
            _ => {}
        }
    }

    /// Connects one queue pair with the attributes of the manager.
    fn join_queue(
        &mut self,
        id: &Id,
        peer: Rank,
        queue: usize,
        greeting: &Greeting,
        queue_pair: u32,
    ) -> Result<(), LossCause> {
        let Peer::Joining(joining) = &mut self.peers[peer as usize] else { return Ok(()) };
        let Some(pair) = &mut joining.pair else { return Ok(()) };
        let (hello, other) = greeting.hello(queue_pair);
        let nic = pair.queue_pairs().nth(queue).map_or(0, |(nic, _)| nic);
        if let Some(unequal) = unequal_packets(&self.nics[nic..=nic], &hello) {
            return Err(unequal);
        }
        let attributes = |state| id.attributes(state);
        pair.connect_queue(queue, &hello, &other, attributes).map_err(|error| not_joined(peer, error))
    }

    /// Handles the response to a connect request.
    fn answered(
        &mut self,
        id: usize,
        peer: Rank,
        queue: usize,
        happened: &Happened,
    ) -> Result<(), LossCause> {
        let Some(call) = self.switchboard.as_mut().and_then(|switchboard| switchboard.calls.remove(&id))
        else {
            return Ok(());
        };
        let greeting = Greeting::decode(&happened.said)
            .filter(|greeting| greeting.rank == peer && usize::from(greeting.queue) == queue)
            .ok_or(LossCause::Protocol(ProtocolViolation::MalformedFrame))?;
        self.join_queue(&call.id, peer, queue, &greeting, happened.queue_pair)?;
        call.id.establish().map_err(|_| LossCause::from(CallFailure::NotJoined))?;
        if let Some(switchboard) = &mut self.switchboard {
            switchboard.calls.insert(id, call);
        }
        self.queue_is_joined(id);
        Ok(())
    }

    /// Counts a connected queue pair; sends "ready" after the last.
    fn queue_is_joined(&mut self, id: usize) {
        let call = self.switchboard.as_mut().and_then(|switchboard| switchboard.calls.get_mut(&id));
        let Some(call) = call.filter(|call| !call.is_joined) else { return };
        call.is_joined = true;
        let peer = call.peer;
        let Peer::Joining(joining) = &mut self.peers[peer as usize] else { return };
        joining.meeting.joined += 1;
        let Some(pair) = &joining.pair else { return };
        if joining.meeting.joined == pair.queue_pairs().count() {
            joining.is_connected = true;
            self.say_ready(peer);
            self.advance(peer);
        }
    }

    /// The peer has rejected the request; the control stream gives the reason.
    fn await_word(&mut self, peer: Rank) {
        if let Peer::Joining(joining) = &mut self.peers[peer as usize] {
            joining.is_refused = true;
            joining.deadline = joining.deadline.min(clock::now() + REFUSAL_GRACE);
        }
    }
}

impl From<CallFailure> for LossCause {
    fn from(failure: CallFailure) -> Self {
        PairError::Call(failure).into()
    }
}
