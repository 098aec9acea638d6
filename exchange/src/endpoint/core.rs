//! The state of an endpoint, under one lock: what is sent, the links, and the requests that wait.
//!
//! Whoever holds the lock makes progress: a thread of the program that sends or receives, or the
//! endpoint's own thread, which sleeps until a socket is ready.
//!
//! **Invariant:** the lock is not held while anything waits. After each call nothing is left in the
//! queues of events: answers are posted, and requests that have ended are given to their threads.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use pleach_transport::{Nanos, RegionKey, RemoteSlice};
use rustix::event::epoll;

use super::connection::{Connection, ConnectionEnd, Incoming, OUTGOING_MAX};
use super::error::{ReceiveTensorError, SendTensorError};
use super::frame::FrameKind;
use super::memory::LendableMemory;
use super::metrics::ExchangeCounts;
use super::options::{EndpointLimits, EndpointOptions};
use super::returns::ReturnMessages;
use super::shared::LinkHold;
use super::slot::Slot;
use super::tensor::{ReceivedBytes, ReceivedTensor, SharedTensor, TensorShape};
use crate::calls::{CallError, CallEvent, Calls};
use crate::key::Key;
use crate::lease::Lease;
use crate::message::{Description, Message};
use crate::reference::LinkId;
use crate::server::{Offer, Place, Server, ServerEvent};
use crate::table::{Delivered, Outcome, ReceiveId, Request, SendError, SendId};

/// Frames and tensors that are taken from one link before others get their turn.
const RECEIVES_AT_ONCE: usize = 64;

/// The end of a receive.
pub(crate) type ReceiveResult = Result<Arrived, ReceiveTensorError>;

/// A tensor that has come, and that its receiver has not taken.
pub(crate) struct Arrived {
    tensor: ReceivedTensor,
    /// The lease of bytes that came inline: as long as it is open the sender keeps the tensor.
    lease: Option<Lease>,
}

impl Arrived {
    /// The receiver takes it.
    pub(crate) fn take(self) -> ReceivedTensor {
        self.tensor
    }

    /// Nobody takes it: it is for another receiver.
    pub(crate) fn decline(self) {
        if let Some(lease) = self.lease {
            lease.decline();
        }
    }
}

/// Where a thread waits for the end of its receive.
pub(crate) type ReceiveSlot = Arc<Slot<ReceiveResult>>;

/// Where a thread waits for the end of its send.
pub(crate) type SendSlot = Arc<Slot<Result<(), SendTensorError>>>;

/// See the module.
pub(crate) struct Core {
    server: Server<SharedTensor>,
    limits: EndpointLimits,
    memory: Arc<LendableMemory>,
    epoll: OwnedFd,
    links: BTreeMap<u64, Link>,
    numbers: BTreeMap<LinkId, u64>,
    last_number: u64,
    sends: BTreeMap<SendId, SendSlot>,
    receives: BTreeMap<ReceiveId, ReceiveSlot>,
    /// Links to which something was queued.
    touched: BTreeSet<u64>,
    counts: ExchangeCounts,
}

struct Link {
    id: LinkId,
    /// The peer, for people.
    peer: Arc<str>,
    connection: Connection,
    /// What of the socket wakes the thread.
    watched: epoll::EventFlags,
    side: LinkSide,
}

enum LinkSide {
    /// The peer asks.
    Sender,
    /// This program asks.
    Receiver(Box<ReceiverSide>),
}

struct ReceiverSide {
    calls: Calls,
    returns: Arc<ReturnMessages>,
    hold: Weak<LinkHold>,
    waiting: BTreeMap<u64, (Key, ReceiveSlot)>,
    /// The call whose tensor follows on the connection.
    incoming: Option<IncomingTensor>,
}

struct IncomingTensor {
    key: Key,
    slot: ReceiveSlot,
    lease: Lease,
    shape: TensorShape,
}

impl Core {
    pub(crate) fn new(
        incarnation: u64,
        options: &EndpointOptions,
        memory: Arc<LendableMemory>,
        epoll: OwnedFd,
    ) -> Self {
        Self {
            server: Server::new(incarnation, options.limits.server),
            limits: options.limits,
            memory,
            epoll,
            links: BTreeMap::new(),
            numbers: BTreeMap::new(),
            last_number: 0,
            sends: BTreeMap::new(),
            receives: BTreeMap::new(),
            touched: BTreeSet::new(),
            counts: ExchangeCounts::default(),
        }
    }

    pub(crate) fn epoll(&self) -> &OwnedFd {
        &self.epoll
    }

    /// What metrics show.
    pub(crate) fn counts(&self) -> ExchangeCounts {
        ExchangeCounts {
            bytes_held: self.server.bytes_held(),
            bytes_lent: self.server.bytes_lent(),
            arena_bytes: self.memory.touched(),
            links: self.links.len() as u64,
            ..self.counts.clone()
        }
    }

    /// Whether one more link may be opened for a peer that asks.
    pub(crate) fn has_room_for_link(&self) -> bool {
        self.links.len() < self.limits.server.leases.links
    }

    /// Number of a new link or connection, which names it in the epoll set.
    pub(crate) fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Sends a tensor. The slot gets the end.
    pub(crate) fn send(&mut self, now: Nanos, key: &Key, tensor: SharedTensor, deadline: Nanos) -> SendSlot {
        let (slot, bytes) = (Arc::new(Slot::new()), tensor.shape().bytes() as u64);
        match self.server.send(now, key, bytes, offer(tensor), deadline) {
            Ok(send) => drop(self.sends.insert(send, slot.clone())),
            Err(unsent) => drop(slot.end(Err(unsent.error.into()))),
        }
        self.settle(now);
        slot
    }

    /// Offers the tensors of a step to all, any number of times.
    pub(crate) fn publish(&mut self, now: Nanos, step: u64, tensors: BTreeMap<String, SharedTensor>) {
        let offers = tensors.into_iter().map(|(name, tensor)| {
            let bytes = tensor.shape().bytes() as u64;
            (name, (bytes, offer(tensor)))
        });
        self.server.publish(step, offers.collect());
        self.settle(now);
    }

    /// Receives a tensor that this program sends.
    pub(crate) fn receive(&mut self, now: Nanos, key: &Key, deadline: Nanos) -> ReceiveSlot {
        let slot = Arc::new(Slot::new());
        match self.server.receive(now, key, deadline) {
            Ok(receive) => drop(self.receives.insert(receive, slot.clone())),
            Err(error) => drop(slot.end(Err(error.into()))),
        }
        self.settle(now);
        slot
    }

    /// Ends a step.
    pub(crate) fn abort(&mut self, now: Nanos, step: u64, reason: &str) {
        self.server.abort(now, step, reason);
        self.settle(now);
    }

    /// Forgets a step.
    pub(crate) fn clean_up(&mut self, now: Nanos, step: u64) {
        self.server.clean_up(now, step);
        self.settle(now);
    }

    /// Opens a link to a peer that asks.
    pub(crate) fn add_sender(
        &mut self,
        now: Nanos,
        number: u64,
        id: LinkId,
        peer: &str,
        connection: Connection,
    ) {
        if let Err(error) = self.server.open_link(id, false) {
            tracing::warn!(peer, "no link: {error}");
            return;
        }
        self.add(now, number, id, peer, connection, LinkSide::Sender);
    }

    /// Opens a link to a peer that this program asks. Returns its number.
    pub(crate) fn add_receiver(&mut self, id: LinkId, peer: &str, connection: Connection) -> u64 {
        let returns = Arc::new(ReturnMessages::new(self.limits.calls.slots));
        let calls = Calls::new(peer, id, self.limits.calls, returns.clone());
        let (hold, waiting) = (Weak::new(), BTreeMap::new());
        let side =
            LinkSide::Receiver(Box::new(ReceiverSide { calls, returns, hold, waiting, incoming: None }));
        let number = self.next_number();
        self.add(Nanos::ZERO, number, id, peer, connection, side);
        number
    }

    /// The handle whose drop closes a link.
    pub(crate) fn hold(&mut self, hold: &Arc<LinkHold>) {
        match self.links.get_mut(&hold.number).map(|link| &mut link.side) {
            Some(LinkSide::Receiver(side)) => side.hold = Arc::downgrade(hold),
            _ => hold.set_lost(),
        }
    }

    fn add(
        &mut self,
        now: Nanos,
        number: u64,
        id: LinkId,
        peer: &str,
        connection: Connection,
        side: LinkSide,
    ) {
        let (data, watched) = (epoll::EventData::new_u64(number), epoll::EventFlags::IN);
        let added = epoll::add(&self.epoll, &connection, data, watched);
        self.numbers.insert(id, number);
        let link = Link { id, peer: peer.into(), connection, watched, side };
        self.links.insert(number, link);
        if let Err(errno) = added {
            self.end_link(now, number, &ConnectionEnd::from(errno).to_string());
        }
        self.touched.insert(number);
        self.settle(now);
    }

    /// Asks a peer for a tensor. The slot gets the end.
    pub(crate) fn ask(
        &mut self,
        now: Nanos,
        number: u64,
        key: &Key,
        incarnation: u64,
        deadline: Nanos,
    ) -> Option<(u64, ReceiveSlot)> {
        let slot = Arc::new(Slot::new());
        let LinkSide::Receiver(side) = &mut self.links.get_mut(&number)?.side else { return None };
        let request = Request { id: 0, incarnation: Some(incarnation) };
        let call = match side.calls.ask(now, key, request, deadline) {
            Ok(call) => {
                side.waiting.insert(call, (key.clone(), slot.clone()));
                call
            }
            Err(error) => {
                drop(slot.end(Err(error.into())));
                0
            }
        };
        self.touched.insert(number);
        self.settle(now);
        Some((call, slot))
    }

    /// Cancels a call. Its tensor is for the next receiver, if it has not been received.
    pub(crate) fn cancel(&mut self, now: Nanos, number: u64, call: u64) {
        if let Some(LinkSide::Receiver(side)) = self.links.get_mut(&number).map(|link| &mut link.side) {
            side.calls.cancel(now, call);
            side.waiting.remove(&call);
            self.touched.insert(number);
            self.settle(now);
        }
    }

    /// Leases of a link were returned.
    pub(crate) fn leases_returned(&mut self, now: Nanos, number: u64) {
        self.touched.insert(number);
        self.settle(now);
    }

    /// A socket is ready.
    pub(crate) fn pump(&mut self, now: Nanos, number: u64) {
        self.touched.insert(number);
        for _ in 0..RECEIVES_AT_ONCE {
            match self.receive_one(now, number) {
                Ok(true) => self.settle(now),
                Ok(false) => break,
                Err(cause) => {
                    self.end_link(now, number, &cause);
                    break;
                }
            }
        }
        self.settle(now);
    }

    /// Handles the next frame or tensor of a link; false: none has come.
    fn receive_one(&mut self, now: Nanos, number: u64) -> Result<bool, String> {
        let Some(link) = self.links.get_mut(&number) else { return Ok(false) };
        if link.connection.queued() > OUTGOING_MAX {
            return Ok(false);
        }
        self.touched.insert(number);
        match link.connection.receive().map_err(|end| end.to_string())? {
            None => Ok(false),
            Some(Incoming::Frame(FrameKind::Message, content)) => {
                let message = Message::decode(content).map_err(|error| error.to_string())?;
                self.message(now, number, message)?;
                Ok(true)
            }
            Some(Incoming::Frame(kind, _)) => Err(format!("it broke the protocol: a frame {kind:?}")),
            Some(Incoming::Tensor(words)) => {
                if let LinkSide::Receiver(side) = &mut link.side
                    && let Some(IncomingTensor { key: _, slot, lease, shape }) = side.incoming.take()
                {
                    self.counts.inline.add(shape.bytes() as u64);
                    let tensor = ReceivedTensor::new(ReceivedBytes::Own(words), shape);
                    if let Some(Ok(arrived)) = slot.end(Ok(Arrived { tensor, lease: Some(lease) })) {
                        arrived.decline();
                    }
                }
                Ok(true)
            }
        }
    }

    fn message(&mut self, now: Nanos, number: u64, message: Message) -> Result<(), String> {
        let Some(link) = self.links.get_mut(&number) else { return Ok(()) };
        match &mut link.side {
            LinkSide::Sender => {
                self.server.message(now, link.id, message).map_err(|violation| violation.to_string())
            }
            LinkSide::Receiver(side) => {
                side.calls.message(now, message).map_err(|violation| violation.to_string())
            }
        }
    }

    /// The deadlines that have come.
    pub(crate) fn expire(&mut self, now: Nanos) {
        self.server.expire(now);
        for (number, link) in &mut self.links {
            if let LinkSide::Receiver(side) = &mut link.side
                && side.calls.next_deadline().is_some_and(|deadline| deadline <= now)
            {
                side.calls.expire(now);
                self.touched.insert(*number);
            }
        }
        self.settle(now);
    }

    /// When [`Core::expire`] has something to do.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let calls = self.links.values().filter_map(|link| match &link.side {
            LinkSide::Receiver(side) => side.calls.next_deadline(),
            LinkSide::Sender => None,
        });
        calls.chain(self.server.next_deadline()).min()
    }

    /// Closes a link that nobody uses.
    pub(crate) fn close_link(&mut self, now: Nanos, number: u64) {
        self.end_link(now, number, "this program closed the link");
        self.settle(now);
    }

    /// Ends all links and requests: the endpoint is over.
    pub(crate) fn close(&mut self, now: Nanos) {
        let numbers: Vec<u64> = self.links.keys().copied().collect();
        for number in numbers {
            self.close_link(now, number);
        }
    }

    fn end_link(&mut self, now: Nanos, number: u64, cause: &str) {
        let Some(link) = self.links.remove(&number) else { return };
        self.numbers.remove(&link.id);
        self.touched.remove(&number);
        let peer = &*link.peer;
        match link.side {
            LinkSide::Sender => {
                tracing::debug!(peer, "a link has ended: {cause}");
                self.server.sever(now, link.id);
            }
            LinkSide::Receiver(mut side) => {
                tracing::debug!(peer, "the link to a peer has ended: {cause}");
                if let Some(hold) = side.hold.upgrade() {
                    hold.set_lost();
                }
                side.calls.lost(cause);
                if let Some(incoming) = side.incoming.take() {
                    let (key, cause) = (incoming.key, cause.into());
                    let lost = CallError::Lost { key, peer: link.peer.clone(), cause };
                    drop(incoming.slot.end(Err(lost.into())));
                }
                for event in side.calls.take_events() {
                    if let CallEvent::Failed { call, error } = event {
                        end_call(&mut side.waiting, call, Err(error.into()));
                    }
                }
            }
        }
    }

    /// Carries out what the pure parts decided, until nothing is left, and sends what was queued.
    fn settle(&mut self, now: Nanos) {
        loop {
            let events = self.server.take_events();
            let is_idle = events.is_empty() & !self.settle_calls(now);
            for event in events {
                self.server_event(event);
            }
            if is_idle && self.flush(now) {
                return;
            }
        }
    }

    fn server_event(&mut self, event: ServerEvent<SharedTensor>) {
        match event {
            ServerEvent::Post { link, message } => self.post(link, &message, None),
            ServerEvent::PostInline { link, message, tensor } => self.post(link, &message, Some(tensor)),
            ServerEvent::Outcome(outcome) => self.outcome(outcome),
        }
    }

    fn post(&mut self, link: LinkId, message: &Message, tensor: Option<SharedTensor>) {
        let Some(number) = self.numbers.get(&link) else { return };
        let Some(link) = self.links.get_mut(number) else { return };
        link.connection.queue(FrameKind::Message, &message.encode());
        if let Some(tensor) = tensor {
            self.counts.sent_inline.add(tensor.shape().bytes() as u64);
            link.connection.queue_tensor(tensor);
        }
        self.touched.insert(*number);
    }

    fn outcome(&mut self, outcome: Outcome<Offer<SharedTensor>>) {
        match outcome {
            Outcome::Sent { send } => self.end_send(send, Ok(())),
            Outcome::SendFailed { send, error, .. } => self.end_send(send, Err(error)),
            Outcome::Received { receive, delivered } => {
                let Delivered { tensor: Offer { tensor, .. }, .. } = delivered;
                let shape = tensor.shape().clone();
                let tensor = ReceivedTensor::new(ReceivedBytes::Local(tensor), shape);
                self.end_receive(receive, Ok(Arrived { tensor, lease: None }));
            }
            Outcome::ReceiveFailed { receive, error } => self.end_receive(receive, Err(error.into())),
        }
    }

    fn end_send(&mut self, send: SendId, result: Result<(), SendError>) {
        if let Some(slot) = self.sends.remove(&send) {
            drop(slot.end(result.map_err(SendTensorError::from)));
        }
    }

    fn end_receive(&mut self, receive: ReceiveId, result: ReceiveResult) {
        if let Some(slot) = self.receives.remove(&receive) {
            drop(slot.end(result));
        }
    }

    /// Carries out the events of the calls of links that were touched. True: there were some.
    fn settle_calls(&mut self, now: Nanos) -> bool {
        let (mut had_events, mut ended) = (false, Vec::new());
        for number in self.touched.iter().copied() {
            let Some(link) = self.links.get_mut(&number) else { continue };
            let LinkSide::Receiver(side) = &mut link.side else { continue };
            for event in side.calls.take_events() {
                had_events = true;
                if let Err(cause) = call_event(side, &mut link.connection, event) {
                    ended.push((number, cause));
                    break;
                }
            }
            for (slot, counter) in side.returns.take_changed() {
                let message = Message::Returned { slot, counter };
                link.connection.queue(FrameKind::Message, &message.encode());
            }
        }
        for (number, cause) in ended {
            self.end_link(now, number, &cause);
        }
        had_events
    }

    /// Sends what is queued. False: links have ended, which causes more.
    fn flush(&mut self, now: Nanos) -> bool {
        let mut ended = Vec::new();
        for number in std::mem::take(&mut self.touched) {
            let Some(link) = self.links.get_mut(&number) else { continue };
            match link.connection.flush() {
                Ok(is_empty) => {
                    let mut flags = epoll::EventFlags::empty();
                    flags.set(epoll::EventFlags::OUT, !is_empty);
                    flags.set(epoll::EventFlags::IN, link.connection.queued() <= OUTGOING_MAX);
                    if link.watched != flags {
                        link.watched = flags;
                        let data = epoll::EventData::new_u64(number);
                        let _ = epoll::modify(&self.epoll, &link.connection, data, flags);
                    }
                }
                Err(end) => ended.push((number, end.to_string())),
            }
        }
        let is_quiet = ended.is_empty();
        for (number, cause) in ended {
            self.end_link(now, number, &cause);
        }
        is_quiet
    }
}

/// A tensor as the server takes it.
fn offer(tensor: SharedTensor) -> Offer<SharedTensor> {
    let (description, bytes) = (tensor.shape().describe(), tensor.shape().bytes() as u64);
    let place = tensor.buffer().arena().map(|arena| {
        let range = tensor.buffer().range();
        let (key, offset, len) = (RegionKey(arena.number()), range.start, range.end - range.start);
        Place { buffer: RemoteSlice { key, offset, len }, part: 0..bytes }
    });
    Offer { tensor, description, place }
}

fn call_event(side: &mut ReceiverSide, connection: &mut Connection, event: CallEvent) -> Result<(), String> {
    match event {
        CallEvent::Post(message) => connection.queue(FrameKind::Message, &message.encode()),
        CallEvent::Skip { bytes } => connection.skip(bytes),
        CallEvent::Failed { call, error } => end_call(&mut side.waiting, call, Err(error.into())),
        CallEvent::Inline { call, lease, bytes, description } => {
            let shape = shape_of(&description, bytes)?;
            let Some((key, slot)) = side.waiting.remove(&call) else {
                lease.decline();
                connection.skip(bytes);
                return Ok(());
            };
            side.incoming = Some(IncomingTensor { key, slot, lease, shape });
            connection.expect(bytes).map_err(|end| end.to_string())?;
        }
        CallEvent::Lent { .. } => return Err("it lends memory that it never announced".to_owned()),
    }
    Ok(())
}

fn shape_of(description: &Description, bytes: u64) -> Result<TensorShape, String> {
    let shape = TensorShape::of(description, bytes);
    shape.ok_or_else(|| format!("it describes {bytes} bytes as what they cannot be"))
}

/// Gives the end of a call to its thread.
fn end_call(waiting: &mut BTreeMap<u64, (Key, ReceiveSlot)>, call: u64, result: ReceiveResult) {
    if let Some((_, slot)) = waiting.remove(&call)
        && let Some(Ok(arrived)) = slot.end(result)
    {
        arrived.decline();
    }
}
