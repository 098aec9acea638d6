//! The side of a program that sends tensors: its table, its leases, and the calls of its peers.
//!
//! A peer asks on its link ([`Message::Ask`]). When the table has the tensor, the server lends it
//! and answers with the reference, or with the bytes where the peer cannot read memory. The lease
//! keeps the tensor. It comes back read, and the tensor is dropped; or untouched, and the tensor
//! returns to its place in the table.
//!
//! A step may be *published* instead: a fixed set of tensors, each of which any peer receives any
//! number of times. A name that is not among them fails at once, with the nearest one.
//!
//! **Invariant:** an accepted call of a peer is answered once, unless the peer cancels it or is
//! severed. A tensor has at most one receiver that reads it. What a tensor occupies is released
//! when its lease is back or its link is severed. What a peer holds, asks and waits for has limits.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use pleach_transport::{Nanos, RegionKey, RemoteSlice};

use crate::key::Key;
use crate::lease::{LeaseLimits, LeaseOwner, LendError, OpenLinkError, ReturnError, Returned, Unlent};
use crate::message::{Description, Failure, FailureKind, Message};
use crate::reference::{LinkId, Reference};
use crate::table::{
    Delivered, Outcome, ReceiveError, ReceiveId, Request, SendId, TableLimits, TensorTable, Unsent,
};

/// A tensor to be sent, over handles of any kind that keep its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer<T> {
    /// What keeps the bytes.
    pub tensor: T,
    /// What the bytes are.
    pub description: Description,
    /// Where they lie, if peers can read them there.
    pub place: Option<Place>,
}

/// A part of a buffer in lendable memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The buffer, which is used again as a whole.
    pub buffer: RemoteSlice,
    /// The tensor's bytes in it.
    pub part: Range<u64>,
}

/// The limits of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerLimits {
    /// Of what waits.
    pub table: TableLimits,
    /// Of what is lent.
    pub leases: LeaseLimits,
    /// Calls of one link that wait. More fail.
    pub calls_per_link: usize,
    /// How long a call of a peer waits, whatever the peer asks.
    pub wait: Duration,
}

impl Default for ServerLimits {
    fn default() -> Self {
        Self {
            table: TableLimits::default(),
            leases: LeaseLimits::default(),
            calls_per_link: 1 << 12,
            wait: Duration::from_secs(24 * 60 * 60),
        }
    }
}

/// Ends of RPCs that a link remembers.
const ENDED_RPCS_MAX: usize = 1 << 10;

/// What the caller has to do, in order.
#[derive(Debug, PartialEq, Eq)]
pub enum ServerEvent<T> {
    /// Send a message.
    Post {
        /// To this link.
        link: LinkId,
        /// The message.
        message: Message,
    },
    /// Send a message and the bytes of a tensor behind it.
    PostInline {
        /// To this link.
        link: LinkId,
        /// The message.
        message: Message,
        /// The tensor.
        tensor: T,
    },
    /// Take the outcome of a request of this program.
    Outcome(Outcome<Offer<T>>),
}

/// A peer does what it must not. Sever it.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ServerViolation {
    /// The link is not open.
    #[error("link {link} is not open")]
    UnknownLink {
        /// The link.
        link: LinkId,
    },
    /// The number of a call is not higher than those before.
    #[error("call {call} came on link {link} after call {last}; it is to be severed")]
    CallNumber {
        /// The link.
        link: LinkId,
        /// The call.
        call: u64,
        /// The last call.
        last: u64,
    },
    /// The message is for a receiver.
    #[error("an answer came on link {link} to the side that answers; it is to be severed")]
    NotForServer {
        /// The link.
        link: LinkId,
    },
    /// A counter is wrong.
    #[error(transparent)]
    Return(#[from] ReturnError),
}

/// The tensors of a step that is published: their lengths and offers, by name.
pub type Publication<T> = BTreeMap<String, (u64, Offer<T>)>;

/// What a lease keeps.
enum Lent<T> {
    /// A tensor of the table, which returns there when nobody has read it.
    Queued(Delivered<Offer<T>>),
    /// A tensor that was published.
    Published(#[allow(dead_code, reason = "kept until the lease is back")] T),
    /// A field of a message of an RPC.
    Rpc {
        rpc: u64,
        #[allow(dead_code, reason = "kept until the lease is back")]
        tensor: T,
    },
}

/// The RPCs of a link for whose messages memory may be lent. Without these marks a reference that
/// nobody saw would keep its tensor for as long as the link is open.
#[derive(Default)]
struct Rpcs {
    running: BTreeSet<u64>,
    /// RPCs that the other end has ended while they did not run here: the end of an RPC may come
    /// before its beginning. At most [`ENDED_RPCS_MAX`], the newest.
    ended: BTreeSet<u64>,
}

impl Rpcs {
    fn begin(&mut self, rpc: u64) -> bool {
        !self.ended.remove(&rpc) && self.running.insert(rpc)
    }

    fn end(&mut self, rpc: u64) -> bool {
        self.running.remove(&rpc)
    }

    fn end_by_peer(&mut self, rpc: u64) {
        if !self.end(rpc) {
            self.ended.insert(rpc);
            if self.ended.len() > ENDED_RPCS_MAX {
                self.ended.pop_first();
            }
        }
    }
}

/// See the module.
pub struct Server<T> {
    table: TensorTable<Offer<T>>,
    leases: LeaseOwner<Lent<T>>,
    /// By step.
    publications: BTreeMap<u64, Publication<T>>,
    /// The number of the last tensor that was published and does not lie in lendable memory.
    last_published: u64,
    calls_per_link: usize,
    wait: Duration,
    peers: BTreeMap<LinkId, Peer>,
    /// The calls of peers that wait; other receives are this program's.
    callers: BTreeMap<ReceiveId, (LinkId, u64)>,
    events: Vec<ServerEvent<T>>,
}

struct Peer {
    /// Whether it can read lendable memory.
    reads_memory: bool,
    last_call: u64,
    waiting: BTreeMap<u64, ReceiveId>,
    rpcs: Rpcs,
}

/// A peer waits for too much.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("{limit} calls of this link wait already; wait for tensors, or raise the limit of the sender")]
struct TooManyCalls {
    limit: usize,
}

/// A step is published, and has no tensor of this name.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("there is no tensor {key}{}; {tensors} are offered", Suggestion(.nearest.as_deref()))]
struct NotPublished {
    key: Key,
    tensors: usize,
    nearest: Option<String>,
}

/// The name that was probably meant.
struct Suggestion<'a>(Option<&'a str>);

impl fmt::Display for Suggestion<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(name) = self.0 else { return Ok(()) };
        write!(formatter, ", did you mean '{}'?", name.escape_debug())
    }
}

impl NotPublished {
    fn new<'a>(key: &Key, names: impl ExactSizeIterator<Item = &'a String>) -> Self {
        let tensors = names.len();
        let nearest = nearest_name(names.map(String::as_str), key.name());
        Self { key: key.clone(), tensors, nearest: nearest.map(str::to_owned) }
    }
}

/// The name that was probably meant: the one with most bytes in common at both ends, if these are
/// half of the longer name. A peer may ask for any name, so the comparison is a cheap one.
fn nearest_name<'a>(names: impl Iterator<Item = &'a str>, name: &str) -> Option<&'a str> {
    let common = |other: &str| {
        let shorter = other.len().min(name.len());
        let is_same = |(one, other): &(u8, u8)| one == other;
        let start = other.bytes().zip(name.bytes()).take_while(is_same).count();
        let end = other.bytes().rev().zip(name.bytes().rev()).take_while(is_same).count();
        start + end.min(shorter - start)
    };
    let near = names.filter(|other| common(other) * 2 >= other.len().max(name.len()));
    near.max_by_key(|other| common(other))
}

impl<T: Clone> Server<T> {
    /// The server of a program with this incarnation.
    #[must_use]
    pub fn new(incarnation: u64, limits: ServerLimits) -> Self {
        Self {
            table: TensorTable::new(incarnation, limits.table),
            leases: LeaseOwner::new(limits.leases),
            publications: BTreeMap::new(),
            last_published: 0,
            calls_per_link: limits.calls_per_link,
            wait: limits.wait,
            peers: BTreeMap::new(),
            callers: BTreeMap::new(),
            events: Vec::new(),
        }
    }

    /// See [`TensorTable::give_newest_first`].
    #[cfg(test)]
    pub(crate) fn give_newest_first(&mut self) {
        self.table.give_newest_first();
    }

    /// Whether one more link may be opened.
    #[must_use]
    pub fn has_room_for_link(&self) -> bool {
        self.leases.has_room_for_link()
    }

    /// Opens a link. `reads_memory`: whether the peer can read lendable memory; otherwise it gets
    /// bytes.
    ///
    /// # Errors
    ///
    /// See [`OpenLinkError`].
    pub fn open_link(&mut self, link: LinkId, reads_memory: bool) -> Result<(), OpenLinkError> {
        self.leases.open_link(link)?;
        self.peers.insert(
            link,
            Peer { reads_memory, last_call: 0, waiting: BTreeMap::new(), rpcs: Rpcs::default() },
        );
        Ok(())
    }

    /// The peer of a link can read lendable memory from now on.
    pub fn set_reads_memory(&mut self, link: LinkId) {
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.reads_memory = true;
        }
    }

    /// Whether the peer of a link can read lendable memory.
    #[must_use]
    pub fn reads_memory(&self, link: LinkId) -> bool {
        self.peers.get(&link).is_some_and(|peer| peer.reads_memory)
    }

    /// The peer of a link asks no more, and may still read what was lent to it: its calls end.
    pub fn disconnect(&mut self, now: Nanos, link: LinkId) {
        let Some(peer) = self.peers.get_mut(&link) else { return };
        for (_, receive) in std::mem::take(&mut peer.waiting) {
            self.callers.remove(&receive);
            self.table.cancel_receive(now, receive);
        }
        self.settle(now);
    }

    /// The leases of a link that are not back.
    #[must_use]
    pub fn leases(&self, link: LinkId) -> usize {
        self.leases.leases(link)
    }

    /// The peer of a link is severed and reads no more: its calls end, and its leases are back. A
    /// tensor that was lent to it may have been read, and nobody else receives it.
    pub fn sever(&mut self, now: Nanos, link: LinkId) {
        let Some(peer) = self.peers.remove(&link) else { return };
        for (_, receive) in peer.waiting {
            self.callers.remove(&receive);
            self.table.cancel_receive(now, receive);
        }
        drop(self.leases.sever(link));
        self.settle(now);
    }

    /// Sends a tensor of this length: see [`TensorTable::send`].
    ///
    /// # Errors
    ///
    /// See [`crate::table::SendError`].
    pub fn send(
        &mut self,
        now: Nanos,
        key: &Key,
        bytes: u64,
        offer: Offer<T>,
        deadline: Nanos,
    ) -> Result<SendId, Box<Unsent<Offer<T>>>> {
        let sent = self.table.send(now, key, bytes, offer, deadline);
        self.settle(now);
        sent.map_err(Box::new)
    }

    /// Publishes the tensors of a step, in place of those that were published there, and answers
    /// the calls of peers that wait for tensors of this step. Returns the receives of this program
    /// that wait for some: see [`Server::published`].
    pub fn publish(&mut self, now: Nanos, step: u64, tensors: Publication<T>) -> Vec<(ReceiveId, Key)> {
        self.publications.insert(step, tensors);
        let mut own = self.table.cancel_receives(now, step);
        own.retain(|(receive, key)| {
            let Some((link, call)) = self.end_call(*receive) else { return true };
            self.answer_by_name(link, call, key);
            false
        });
        self.settle(now);
        own
    }

    /// Answers a call for a key of a step that is published.
    fn answer_by_name(&mut self, link: LinkId, call: u64, key: &Key) {
        let Some(tensors) = self.publications.get(&key.step()) else { return };
        match tensors.get(key.name()).cloned() {
            Some((bytes, offer)) => self.answer_published(link, call, bytes, offer),
            None => {
                let error = NotPublished::new(key, tensors.keys());
                self.fail(link, call, Failure::new(FailureKind::NotFound, &error));
            }
        }
    }

    /// Cancels a send that waits: see [`TensorTable::cancel_send`].
    pub fn cancel_send(&mut self, now: Nanos, send: SendId) -> Option<Offer<T>> {
        let offer = self.table.cancel_send(now, send);
        self.settle(now);
        offer
    }

    /// The tensor of a key for this program itself, if its step is published.
    pub fn published(&self, key: &Key) -> Option<Result<T, Failure>> {
        let tensors = self.publications.get(&key.step())?;
        let found = tensors.get(key.name()).map(|(_, offer)| offer.tensor.clone());
        Some(
            found.ok_or_else(|| Failure::new(FailureKind::NotFound, &NotPublished::new(key, tensors.keys()))),
        )
    }

    /// Receives a tensor of this program in this program.
    ///
    /// # Errors
    ///
    /// See [`ReceiveError`].
    pub fn receive(
        &mut self,
        now: Nanos,
        key: &Key,
        request: Request,
        deadline: Nanos,
    ) -> Result<ReceiveId, ReceiveError> {
        let received = self.table.receive(now, key, request, deadline);
        self.settle(now);
        received
    }

    /// Cancels a receive of this program: see [`TensorTable::cancel_receive`].
    pub fn cancel_receive(&mut self, now: Nanos, receive: ReceiveId) -> bool {
        let is_cancelled = !self.callers.contains_key(&receive) && self.table.cancel_receive(now, receive);
        self.settle(now);
        is_cancelled
    }

    /// Takes back a tensor that this program received and did not take: see
    /// [`TensorTable::restore`].
    pub fn restore(&mut self, now: Nanos, delivered: Delivered<Offer<T>>) {
        drop(self.table.restore(now, delivered));
        self.settle(now);
    }

    /// Ends a step: see [`TensorTable::abort`]. What it held is dropped.
    pub fn abort(&mut self, now: Nanos, step: u64, reason: &str) {
        self.publications.remove(&step);
        drop(self.table.abort(now, step, reason));
        self.settle(now);
    }

    /// Forgets a step: see [`TensorTable::clean_up`]. What it held is dropped.
    pub fn clean_up(&mut self, now: Nanos, step: u64) {
        self.publications.remove(&step);
        drop(self.table.clean_up(now, step));
        self.settle(now);
    }

    /// A message came on a link.
    ///
    /// # Errors
    ///
    /// See [`ServerViolation`]: sever the link then.
    pub fn message(&mut self, now: Nanos, link: LinkId, message: Message) -> Result<(), ServerViolation> {
        match message {
            Message::Ask { call, key, request, within } => {
                self.ask(now, link, call, &key, request, within)?
            }
            Message::Cancel { call } => self.cancel(now, link, call)?,
            Message::Returned { slot, counter } => {
                if let Some(returned) = self.leases.returned(link, slot, counter)? {
                    self.back(now, returned);
                }
            }
            Message::RpcEnded { rpc } => {
                let peer = self.peers.get_mut(&link).ok_or(ServerViolation::UnknownLink { link })?;
                peer.rpcs.end_by_peer(rpc);
                self.recall_rpc(link, rpc);
            }
            Message::Lent { .. }
            | Message::Inline { .. }
            | Message::Failed { .. }
            | Message::Recall { .. } => return Err(ServerViolation::NotForServer { link }),
        }
        self.settle(now);
        Ok(())
    }

    /// An RPC begins, whose messages to the peer of a link may hold references. False: they may
    /// not, since the peer cannot read memory, or has ended the RPC already.
    pub fn begin_rpc(&mut self, link: LinkId, rpc: u64) -> bool {
        let peer = self.peers.get_mut(&link).filter(|peer| peer.reads_memory);
        peer.is_some_and(|peer| peer.rpcs.begin(rpc))
    }

    /// Nothing more is lent for an RPC. What was lent may still be on its way.
    pub fn end_rpc(&mut self, link: LinkId, rpc: u64) {
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.rpcs.end(rpc);
        }
    }

    /// An RPC is over at both ends: what was lent for it and the peer has not accepted comes back.
    /// Its references must not come any more.
    pub fn recall_rpc(&mut self, link: LinkId, rpc: u64) {
        for (lease, lent) in self.leases.open_leases(link) {
            if matches!(lent, Lent::Rpc { rpc: of, .. } if *of == rpc) {
                self.events.push(ServerEvent::Post { link, message: Message::Recall { lease } });
            }
        }
    }

    /// Lends a field of a message of an RPC that has begun.
    ///
    /// # Errors
    ///
    /// See [`LendError`]; the field may go inline. [`LendError::UnknownLink`] also when the RPC has
    /// ended.
    pub fn lend_for_rpc(
        &mut self,
        link: LinkId,
        rpc: u64,
        place: Place,
        tensor: T,
    ) -> Result<Reference, LendError> {
        let is_running = self.peers.get(&link).is_some_and(|peer| peer.rpcs.running.contains(&rpc));
        if !is_running {
            return Err(LendError::UnknownLink { link });
        }
        let lent = self.leases.lend(link, place.buffer, place.part, Lent::Rpc { rpc, tensor });
        lent.map_err(|unlent| unlent.error)
    }

    /// Reads the counters of a link: see [`LeaseOwner::collect`].
    ///
    /// # Errors
    ///
    /// See [`ReturnError`]: sever the link then.
    pub fn collect(
        &mut self,
        now: Nanos,
        link: LinkId,
        counter: impl Fn(u32) -> u64,
    ) -> Result<(), ReturnError> {
        for returned in self.leases.collect(link, counter)? {
            self.back(now, returned);
        }
        self.settle(now);
        Ok(())
    }

    /// Reads the counters of a link whose peer accepts no more: see [`LeaseOwner::collect_closed`].
    ///
    /// # Errors
    ///
    /// As of [`Server::collect`].
    pub fn collect_closed(
        &mut self,
        now: Nanos,
        link: LinkId,
        counter: impl Fn(u32) -> u64,
        held: impl Fn(u32) -> u64,
    ) -> Result<(), ReturnError> {
        for returned in self.leases.collect_closed(link, counter, held)? {
            self.back(now, returned);
        }
        self.settle(now);
        Ok(())
    }

    /// Fails the requests whose deadline has come.
    pub fn expire(&mut self, now: Nanos) {
        self.table.expire(now);
        self.settle(now);
    }

    /// When [`Server::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.table.next_deadline()
    }

    /// What there is to do since the last call.
    pub fn take_events(&mut self) -> Vec<ServerEvent<T>> {
        std::mem::take(&mut self.events)
    }

    /// The bytes of all tensors that wait for a receiver.
    #[must_use]
    pub fn bytes_held(&self) -> u64 {
        self.table.bytes_held()
    }

    /// The bytes of all buffers that are lent.
    #[must_use]
    pub fn bytes_lent(&self) -> u64 {
        self.leases.bytes_lent()
    }

    fn ask(
        &mut self,
        now: Nanos,
        link: LinkId,
        call: u64,
        key: &Key,
        request: Request,
        within: Duration,
    ) -> Result<(), ServerViolation> {
        let Some(peer) = self.peers.get_mut(&link) else { return Err(ServerViolation::UnknownLink { link }) };
        let last = peer.last_call;
        if call <= last {
            return Err(ServerViolation::CallNumber { link, call, last });
        }
        peer.last_call = call;
        if peer.waiting.len() >= self.calls_per_link {
            let error = TooManyCalls { limit: self.calls_per_link };
            self.fail(link, call, Failure::new(FailureKind::Exhausted, &error));
            return Ok(());
        }
        if self.publications.contains_key(&key.step()) {
            let own = self.table.incarnation();
            match request.incarnation {
                Some(asked) if asked != own => {
                    let error = ReceiveError::WrongIncarnation { key: key.clone(), asked, own };
                    self.fail(link, call, Failure::from(&error));
                }
                _ => self.answer_by_name(link, call, key),
            }
            return Ok(());
        }
        match self.table.receive(now, key, request, now + within.min(self.wait)) {
            Ok(receive) => {
                peer.waiting.insert(call, receive);
                self.callers.insert(receive, (link, call));
            }
            Err(error) => self.fail(link, call, Failure::from(&error)),
        }
        Ok(())
    }

    fn cancel(&mut self, now: Nanos, link: LinkId, call: u64) -> Result<(), ServerViolation> {
        let Some(peer) = self.peers.get_mut(&link) else { return Err(ServerViolation::UnknownLink { link }) };
        // A call that was answered is none any more: its lease comes back untouched.
        if let Some(receive) = peer.waiting.get(&call).copied()
            && self.table.cancel_receive(now, receive)
        {
            peer.waiting.remove(&call);
            self.callers.remove(&receive);
        }
        Ok(())
    }

    /// A lease has come back.
    fn back(&mut self, now: Nanos, returned: Returned<Lent<T>>) {
        if returned.is_untouched
            && let Lent::Queued(delivered) = returned.handle
        {
            // Where the step has ended nobody asks for it any more.
            drop(self.table.restore(now, delivered));
        }
    }

    /// Turns outcomes of the table into answers. An answer that cannot be given brings the tensor
    /// back to the table, which gives it to the next call; each round answers at least one.
    fn settle(&mut self, now: Nanos) {
        loop {
            let outcomes = self.table.take_outcomes();
            if outcomes.is_empty() {
                return;
            }
            for outcome in outcomes {
                self.outcome(now, outcome);
            }
        }
    }

    /// The call of a peer that a receive was, which waits no longer; `None`: it is this program's.
    fn end_call(&mut self, receive: ReceiveId) -> Option<(LinkId, u64)> {
        let (link, call) = self.callers.remove(&receive)?;
        if let Some(peer) = self.peers.get_mut(&link) {
            peer.waiting.remove(&call);
        }
        Some((link, call))
    }

    fn outcome(&mut self, now: Nanos, outcome: Outcome<Offer<T>>) {
        let (Outcome::Received { receive, .. } | Outcome::ReceiveFailed { receive, .. }) = &outcome else {
            return self.events.push(ServerEvent::Outcome(outcome));
        };
        let Some((link, call)) = self.end_call(*receive) else {
            return self.events.push(ServerEvent::Outcome(outcome));
        };
        match outcome {
            Outcome::Received { delivered, .. } => self.answer(now, link, call, delivered),
            Outcome::ReceiveFailed { error, .. } => self.fail(link, call, Failure::from(&error)),
            Outcome::Sent { .. } | Outcome::SendFailed { .. } => {}
        }
    }

    fn answer(&mut self, now: Nanos, link: LinkId, call: u64, delivered: Delivered<Offer<T>>) {
        let (offer, bytes, number) = (delivered.tensor.clone(), delivered.bytes, delivered.order());
        if let Some(Lent::Queued(delivered)) =
            self.lend(link, call, bytes, number, offer, Lent::Queued(delivered))
        {
            drop(self.table.restore(now, delivered));
        }
    }

    fn answer_published(&mut self, link: LinkId, call: u64, bytes: u64, offer: Offer<T>) {
        self.last_published += 1;
        // The table counts from the other end.
        let (number, tensor) = (u64::MAX - self.last_published, offer.tensor.clone());
        self.lend(link, call, bytes, number, offer, Lent::Published(tensor));
    }

    /// Lends a tensor and answers a call. If it cannot be lent the call fails, and the tensor comes
    /// back.
    fn lend(
        &mut self,
        link: LinkId,
        call: u64,
        bytes: u64,
        number: u64,
        offer: Offer<T>,
        lent: Lent<T>,
    ) -> Option<Lent<T>> {
        let Offer { tensor, description, place } = offer;
        let is_in_place = place.is_some() && self.reads_memory(link);
        // Memory that is not lendable has a name of its own, for the accounts.
        let whole = RemoteSlice { key: RegionKey::NONE, offset: number, len: bytes };
        let Place { buffer, part } = place.unwrap_or(Place { buffer: whole, part: 0..bytes });
        match self.leases.lend(link, buffer, part, lent) {
            Ok(reference) if is_in_place => {
                let message = Message::Lent { call, reference, description };
                self.events.push(ServerEvent::Post { link, message });
                None
            }
            Ok(reference) => {
                let message = Message::Inline { call, lease: reference.lease, bytes, description };
                self.events.push(ServerEvent::PostInline { link, message, tensor });
                None
            }
            Err(Unlent { handle, error }) => {
                self.fail(link, call, Failure::new(FailureKind::Exhausted, &error));
                Some(handle)
            }
        }
    }

    fn fail(&mut self, link: LinkId, call: u64, failure: Failure) {
        self.events.push(ServerEvent::Post { link, message: Message::Failed { call, failure } });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::LeaseNumber;

    const LINK: LinkId = LinkId(1);
    const NOW: Nanos = Nanos(1_000);

    fn server(limits: ServerLimits) -> Server<u32> {
        let mut server = Server::new(7, limits);
        server.open_link(LINK, true).expect("is new");
        server
    }

    fn ask(call: u64, within: Duration) -> Message {
        let key = Key::new(1, "w").expect("a good name");
        Message::Ask { call, key, request: Request::default(), within }
    }

    /// The kinds of failures that were posted, with their texts.
    fn failures(server: &mut Server<u32>) -> Vec<(FailureKind, String)> {
        let failure = |event| match event {
            ServerEvent::Post { message: Message::Failed { failure, .. }, .. } => {
                Some((failure.kind, failure.text))
            }
            _ => None,
        };
        server.take_events().into_iter().filter_map(failure).collect()
    }

    #[test]
    fn a_peer_waits_for_no_more_and_no_longer_than_it_may() {
        let limits =
            ServerLimits { calls_per_link: 1, wait: Duration::from_secs(1), ..ServerLimits::default() };
        let mut server = server(limits);
        server.message(NOW, LINK, ask(1, Duration::MAX)).expect("is good");
        server.message(NOW, LINK, ask(2, Duration::MAX)).expect("is good");
        let text = "1 calls of this link wait already; wait for tensors, or raise the limit of the sender";
        assert_eq!(failures(&mut server), [(FailureKind::Exhausted, text.to_owned())]);
        assert_eq!(server.next_deadline(), Some(NOW + Duration::from_secs(1)));
        server.expire(NOW + Duration::from_secs(1));
        let text = "tensor 'w' of step 1 was not sent within 1s; look for the sender, or wait longer";
        assert_eq!(failures(&mut server), [(FailureKind::Timeout, text.to_owned())]);
    }

    #[test]
    fn a_tensor_that_cannot_be_lent_stays_for_the_next() {
        let leases = LeaseLimits { bytes_lent: 10, ..LeaseLimits::default() };
        let mut server = server(ServerLimits { leases, ..ServerLimits::default() });
        let key = Key::new(1, "w").expect("a good name");
        let offer = Offer { tensor: 5, description: Description::default(), place: None };
        server.send(NOW, &key, 11, offer, NOW).expect("there is room");
        server.message(NOW, LINK, ask(1, Duration::ZERO)).expect("is good");
        let failed = failures(&mut server);
        assert!(matches!(&failed[..], [(FailureKind::Exhausted, _)]), "{failed:?}");
        assert_eq!((server.bytes_held(), server.bytes_lent()), (11, 0));
    }

    #[test]
    fn a_published_tensor_is_for_all_and_an_unknown_name_fails_with_the_nearest() {
        let mut server = server(ServerLimits::default());
        let offer = |tensor| Offer { tensor, description: Description::default(), place: None };
        let tensors = [("w".to_owned(), (8, offer(5))), ("layer.0.weight".to_owned(), (8, offer(6)))];
        let asked = |call, name| {
            let (key, within) = (Key::new(1, name).expect("a good name"), Duration::MAX);
            Message::Ask { call, key, request: Request::default(), within }
        };
        server.message(NOW, LINK, asked(1, "w")).expect("is good");
        server.message(NOW, LINK, asked(2, "none")).expect("is good");
        assert!(server.take_events().is_empty(), "both wait");
        let own = server.publish(NOW, 1, tensors.into_iter().collect());
        let events = server.take_events();
        let failed = |event: &ServerEvent<u32>| {
            matches!(event, ServerEvent::Post { message: Message::Failed { call: 2, .. }, .. })
        };
        assert!(own.is_empty() && events.len() == 2 && events.iter().any(failed), "{events:?}");
        assert_eq!((server.bytes_lent(), server.next_deadline()), (8, None), "nobody waits");
        for call in 3..5 {
            server.message(NOW, LINK, ask(call, Duration::ZERO)).expect("is good");
            let events = server.take_events();
            assert!(matches!(&events[..], [ServerEvent::PostInline { tensor: 5, .. }]), "{events:?}");
        }
        assert_eq!(server.bytes_lent(), 24, "each receiver has it until its lease is back");
        for (call, name, text) in [
            (5, "layer.0.wieght", ", did you mean 'layer.0.weight'?"),
            (6, "q", ""),
            (7, "layer.0.weightlayer.0.weight", ", did you mean 'layer.0.weight'?"),
        ] {
            let (key, within) = (Key::new(1, name).expect("a good name"), Duration::ZERO);
            let message = Message::Ask { call, key, request: Request::default(), within };
            server.message(NOW, LINK, message).expect("is good");
            let text = format!("there is no tensor '{name}' of step 1{text}; 2 are offered");
            assert_eq!(failures(&mut server), [(FailureKind::NotFound, text)]);
        }
        let request = Request { id: 0, incarnation: Some(6) };
        let (key, within) = (Key::new(1, "w").expect("a good name"), Duration::ZERO);
        server.message(NOW, LINK, Message::Ask { call: 8, key, request, within }).expect("is good");
        assert!(matches!(&failures(&mut server)[..], [(FailureKind::Aborted, _)]));
    }

    /// The leases that are recalled.
    fn recalled(server: &mut Server<u32>) -> Vec<LeaseNumber> {
        let lease = |event| match event {
            ServerEvent::Post { message: Message::Recall { lease }, link: LINK } => lease,
            other => panic!("{other:?}"),
        };
        server.take_events().into_iter().map(lease).collect()
    }

    fn lend(server: &mut Server<u32>, rpc: u64, at: u64) -> Result<LeaseNumber, LendError> {
        let buffer = RemoteSlice { key: RegionKey(1), offset: at, len: 8 };
        let lent = server.lend_for_rpc(LINK, rpc, Place { buffer, part: 0..8 }, 5);
        lent.map(|reference| reference.lease)
    }

    #[test]
    fn what_is_lent_for_an_rpc_is_recalled_when_it_is_over_unless_it_is_back() {
        let mut server = server(ServerLimits::default());
        assert!(server.begin_rpc(LINK, 1) && server.begin_rpc(LINK, 2) && !server.begin_rpc(LINK, 2));
        let [one, other] = [0, 8].map(|at| lend(&mut server, 1, at).expect("runs"));
        let third = lend(&mut server, 2, 16).expect("runs");
        let returned = Message::Returned { slot: one.slot, counter: one.generation };
        server.message(NOW, LINK, returned).expect("was lent");
        server.end_rpc(LINK, 1);
        assert_eq!(lend(&mut server, 1, 24), Err(LendError::UnknownLink { link: LINK }));
        assert_eq!((recalled(&mut server), server.bytes_lent()), (Vec::new(), 16), "it may be on its way");
        server.recall_rpc(LINK, 1);
        assert_eq!(recalled(&mut server), [other]);
        server.message(NOW, LINK, Message::RpcEnded { rpc: 2 }).expect("is good");
        assert_eq!(recalled(&mut server), [third]);
        assert_eq!(lend(&mut server, 2, 24), Err(LendError::UnknownLink { link: LINK }));
        for lease in [other, third] {
            let counter = lease.generation | crate::lease::UNTOUCHED;
            server.message(NOW, LINK, Message::Returned { slot: lease.slot, counter }).expect("was lent");
        }
        assert_eq!(server.bytes_lent(), 0);
    }

    #[test]
    fn an_rpc_that_the_peer_ended_before_it_came_is_lent_nothing() {
        let mut server = server(ServerLimits::default());
        server.message(NOW, LINK, Message::RpcEnded { rpc: 1 }).expect("is good");
        assert!(!server.begin_rpc(LINK, 1) && lend(&mut server, 1, 0).is_err());
        assert!(server.begin_rpc(LINK, 1), "the end was for one beginning");
        for rpc in 2..2 * ENDED_RPCS_MAX as u64 {
            server.message(NOW, LINK, Message::RpcEnded { rpc }).expect("is good");
        }
        let peer = &server.peers[&LINK];
        assert_eq!(peer.rpcs.ended.len(), ENDED_RPCS_MAX);
        assert!(!server.begin_rpc(LINK, 2 * ENDED_RPCS_MAX as u64 - 1), "the newest are kept");
        let mut blind = Server::<u32>::new(7, ServerLimits::default());
        blind.open_link(LINK, false).expect("is new");
        assert!(!blind.begin_rpc(LINK, 1) && !blind.begin_rpc(LinkId(2), 1));
    }

    #[test]
    fn a_peer_that_answers_or_counts_wrongly_is_a_violation() {
        let mut server = server(ServerLimits::default());
        server.message(NOW, LINK, ask(3, Duration::ZERO)).expect("is good");
        let again = server.message(NOW, LINK, ask(3, Duration::ZERO));
        assert_eq!(again, Err(ServerViolation::CallNumber { link: LINK, call: 3, last: 3 }));
        let failure = Failure::new(FailureKind::Timeout, &"");
        let answer = server.message(NOW, LINK, Message::Failed { call: 3, failure });
        assert_eq!(answer, Err(ServerViolation::NotForServer { link: LINK }));
        let returned = server.message(NOW, LINK, Message::Returned { slot: 0, counter: 1 });
        let error = ReturnError::UnknownSlot { link: LINK, slot: 0 };
        assert_eq!(returned, Err(ServerViolation::Return(error)));
        server.sever(NOW, LINK);
        let unknown = server.message(NOW, LINK, Message::Cancel { call: 3 });
        assert_eq!(unknown, Err(ServerViolation::UnknownLink { link: LINK }));
    }
}
