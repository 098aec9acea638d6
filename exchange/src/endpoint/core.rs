//! The state of an endpoint, under one lock: what is sent, the links, and the requests that wait.
//!
//! Whoever holds the lock makes progress: a thread of the program that sends or receives, or the
//! endpoint's own thread, which sleeps until a socket is ready.
//!
//! **Invariant:** the lock is not held while anything waits. After each call nothing is left in the
//! queues of events: answers are posted, and requests that have ended are given to their threads.

mod gets;
#[cfg(feature = "grpc")]
mod rpcs;
#[cfg(feature = "grpc")]
pub(crate) use self::rpcs::Accepted;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::shm::ShmDevice;
use pleach_transport::{Nanos, RegionKey, RemoteSlice};
use pleach_vocabulary::Fabric;
use rustix::event::epoll;

use super::connection::{Connection, ConnectionEnd, Incoming, OUTGOING_MAX};
use super::error::{ReceiveTensorError, SendTensorError};
use super::frame::FrameKind;
use super::gets::{GetDevice, GetOptions};
use super::link::{
    Arrived, IncomingTensor, Link, LinkSide, ReceiveResult, ReceiveSlot, ReceiverSide, SharedRegions,
    WaitingReceive,
};
use super::memory::LendableMemory;
use super::metrics::{ExchangeCounts, InlineReason};
use super::options::{EndpointLimits, EndpointOptions};
use super::pair::{MappingDevice, PairedDevices, Pairs};
use super::regions::{PLACES, POLL_PAUSE, Regions, SETUP_LIMIT, SetupFrame};
use super::returns::Returns;
use super::shared::LinkHold;
use super::slot::Slot;
use super::tensor::{ReceivedBytes, ReceivedTensor, SharedTensor};
use crate::calls::{CallError, CallEvent, Calls};
use crate::introduction::Fabrics;
use crate::key::Key;
use crate::message::Message;
use crate::reference::LinkId;
use crate::server::{Offer, Place, Server, ServerEvent};
use crate::table::{Outcome, ReceiveId, Request, SendError, SendId};

/// Between two looks at frames that were left in a buffer.
const UNREAD_PAUSE: Duration = Duration::from_micros(50);

/// How long the owner of memory may take to see that leases are back while it sleeps.
const RETURN_PAUSE: Duration = Duration::from_millis(20);

/// Frames and tensors that are taken from one link before others get their turn.
const RECEIVES_AT_ONCE: usize = 64;

/// Where a thread waits for the end of its send.
pub(crate) type SendSlot = Arc<Slot<Result<(), SendTensorError>>>;

/// See the module.
pub(crate) struct Core<D: MappingDevice = ShmDevice> {
    server: Server<SharedTensor>,
    limits: EndpointLimits,
    /// Whether memory is shared at all, or why not.
    may_share: Result<(), Arc<str>>,
    /// The fabrics by which there may be regions.
    fabrics: Fabrics,
    get_options: GetOptions,
    /// Devices of shared memory.
    paired_devices: Box<dyn Pairs<D>>,
    /// Devices of fabrics that map nothing, by their number in the epoll set.
    devices: BTreeMap<u64, GetDevice>,
    /// When one of them must be polled at the latest.
    armed_until: Option<Nanos>,
    memory: Arc<LendableMemory>,
    epoll: OwnedFd,
    /// Wakes the thread.
    wake: OwnedFd,
    /// Whether the thread is awake, or looks for returned leases soon.
    is_polled: bool,
    /// When the thread is awake at the latest, if it sleeps.
    planned: Option<Nanos>,
    links: BTreeMap<u64, Link<D>>,
    numbers: BTreeMap<LinkId, u64>,
    last_number: u64,
    sends: BTreeMap<SendId, SendSlot>,
    receives: BTreeMap<ReceiveId, ReceiveSlot>,
    /// Links to which something was queued.
    touched: BTreeSet<u64>,
    /// Links that are to end, and why.
    failed: Vec<(u64, String)>,
    /// Links of which frames may be in buffers.
    unread: BTreeSet<u64>,
    /// Links that have ended and whose peers may still read what was lent to them.
    lingering: Vec<Lingering<D>>,
    /// To be dropped after the lock.
    dropped: Vec<Dropped<D>>,
    /// When the endpoint's thread took the last message by regions. What threads of the program
    /// take does not count: they look themselves.
    last_message: Nanos,
    counts: ExchangeCounts,
}

/// What is over, and whose drop may take a while.
#[expect(dead_code, reason = "kept until it is dropped")]
pub(crate) enum Dropped<D: MappingDevice = ShmDevice> {
    Regions(Box<SharedRegions<D>>),
    Device(Box<GetDevice>),
}

struct Lingering<D: MappingDevice> {
    id: LinkId,
    shared: Box<SharedRegions<D>>,
}

impl Core {
    pub(crate) fn new(
        incarnation: u64,
        options: &EndpointOptions,
        address: IpAddr,
        memory: Arc<LendableMemory>,
        descriptors: [OwnedFd; 2],
    ) -> Self {
        let pairs = Box::new(PairedDevices::new(PLACES, SETUP_LIMIT));
        Self::over(pairs, incarnation, options, address, memory, descriptors)
    }
}

impl<D: MappingDevice> Core<D> {
    /// The state of an endpoint whose links have pairs of these devices.
    fn over(
        pairs: Box<dyn Pairs<D>>,
        incarnation: u64,
        options: &EndpointOptions,
        address: IpAddr,
        memory: Arc<LendableMemory>,
        [epoll, wake]: [OwnedFd; 2],
    ) -> Self {
        let (secret, verbs) = (options.secret.clone(), options.verbs.clone());
        Self {
            server: Server::new(incarnation, options.limits.server),
            limits: options.limits,
            may_share: options.may_share_memory(),
            fabrics: options.fabrics(address),
            get_options: GetOptions { secret, address, verbs },
            paired_devices: pairs,
            devices: BTreeMap::new(),
            armed_until: None,
            memory,
            epoll,
            wake,
            is_polled: true,
            planned: None,
            links: BTreeMap::new(),
            numbers: BTreeMap::new(),
            last_number: 0,
            sends: BTreeMap::new(),
            receives: BTreeMap::new(),
            touched: BTreeSet::new(),
            failed: Vec::new(),
            unread: BTreeSet::new(),
            lingering: Vec::new(),
            dropped: Vec::new(),
            last_message: Nanos::ZERO,
            counts: ExchangeCounts::default(),
        }
    }

    pub(crate) fn epoll(&self) -> &OwnedFd {
        &self.epoll
    }

    /// Goes on with links of which frames were left in buffers: no socket tells of them.
    pub(crate) fn pump_unread(&mut self, now: Nanos) {
        for number in std::mem::take(&mut self.unread) {
            self.pump(now, number);
        }
    }

    /// What metrics show.
    pub(crate) fn counts(&self) -> ExchangeCounts {
        ExchangeCounts {
            bytes_held: self.server.bytes_held(),
            bytes_lent: self.server.bytes_lent(),
            arena_bytes: self.memory.touched(),
            links: self.links.len() as u64,
            leases: self.numbers.keys().map(|id| self.server.leases(*id) as u64).sum(),
            inline_links: self.links.values().filter(|link| link.is_inline()).count() as u64,
            ..self.counts.clone()
        }
    }

    /// Whether one more link may be opened for a peer that asks.
    pub(crate) fn has_room_for_link(&self) -> bool {
        self.server.has_room_for_link()
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

    /// The program no longer waits for the end of its send.
    pub(crate) fn give_up_send(&mut self, now: Nanos, slot: &SendSlot) {
        let found = self.sends.iter().find(|(_, other)| Arc::ptr_eq(slot, other)).map(|(id, _)| *id);
        if let Some(id) = found {
            self.sends.remove(&id);
            drop(self.server.cancel_send(now, id));
            self.settle(now);
        }
    }

    /// The program no longer waits for the end of its receive of a tensor of its own.
    pub(crate) fn give_up_receive(&mut self, now: Nanos, slot: &ReceiveSlot) {
        let found = self.receives.iter().find(|(_, other)| Arc::ptr_eq(slot, other)).map(|(id, _)| *id);
        if let Some(id) = found {
            self.receives.remove(&id);
            self.server.cancel_receive(now, id);
            self.settle(now);
        }
    }

    /// Offers the tensors of a step to all, any number of times.
    pub(crate) fn publish(&mut self, now: Nanos, step: u64, tensors: BTreeMap<String, SharedTensor>) {
        let offers = tensors.into_iter().map(|(name, tensor)| {
            let bytes = tensor.shape().bytes() as u64;
            (name, (bytes, offer(tensor)))
        });
        for (receive, key) in self.server.publish(now, step, offers.collect()) {
            if let (Some(slot), Some(result)) = (self.receives.remove(&receive), self.published(&key)) {
                drop(slot.end(result));
            }
        }
        self.settle(now);
    }

    /// What a receive of this program gets of a step that is published.
    fn published(&self, key: &Key) -> Option<Result<Arrived, ReceiveTensorError>> {
        let failed = |failure| CallError::Failed { peer: "this program".into(), failure }.into();
        self.server.published(key).map(|found| found.map(Arrived::local).map_err(failed))
    }

    /// Receives a tensor that this program sends.
    pub(crate) fn receive(
        &mut self,
        now: Nanos,
        key: &Key,
        request: Request,
        deadline: Nanos,
    ) -> ReceiveSlot {
        let slot = Arc::new(Slot::new());
        if let Some(result) = self.published(key) {
            drop(slot.end(result));
            return slot;
        }
        match self.server.receive(now, key, request, deadline) {
            Ok(receive) => drop(self.receives.insert(receive, slot.clone())),
            Err(error) => drop(slot.end(Err(error.into()))),
        }
        self.settle(now);
        slot
    }

    /// A tensor of this program that came and was not taken returns to its place.
    #[cfg(feature = "grpc")]
    pub(crate) fn restore(&mut self, now: Nanos, arrived: Arrived) {
        if let Some(delivered) = arrived.delivered {
            self.server.restore(now, *delivered);
            self.settle(now);
        }
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
        self.add(now, number, Link::new(id, peer, connection, LinkSide::Sender));
    }

    /// Opens a link to a peer that this program asks. Returns its number.
    pub(crate) fn add_receiver(
        &mut self,
        now: Nanos,
        id: LinkId,
        peer: &str,
        connection: Connection,
        fabric: Result<Fabric, Arc<str>>,
    ) -> u64 {
        let returns = Arc::new(Returns::new(self.limits.calls.slots));
        let calls = Calls::new(peer, id, self.limits.calls, returns.clone());
        let number = self.next_number();
        let side = LinkSide::Receiver(ReceiverSide::new(calls, returns));
        let mut link = Link::new(id, peer, connection, side);
        match fabric {
            Ok(Fabric::Shm) => {
                link.offer_regions(now, self.limits.calls.slots, &mut *self.paired_devices);
            }
            Ok(fabric) => self.offer_gets(now, number, &mut link, fabric),
            Err(reason) => link.go_inline(&reason),
        }
        self.add(now, number, link);
        number
    }

    /// The handle whose drop closes a link.
    pub(crate) fn hold(&mut self, hold: &Arc<LinkHold>) {
        match self.links.get_mut(&hold.number).map(|link| &mut link.side) {
            Some(LinkSide::Receiver(side)) => side.set_hold(hold),
            _ => hold.set_lost(),
        }
    }

    fn add(&mut self, now: Nanos, number: u64, link: Link<D>) {
        let data = epoll::EventData::new_u64(number);
        let added = epoll::add(&self.epoll, &link.connection, data, link.watched);
        self.numbers.insert(link.id, number);
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
                let (key, slot, is_field) = (key.clone(), slot.clone(), false);
                let receive = WaitingReceive { key, slot, since: now, deadline, is_field };
                side.waiting.insert(call, receive);
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
        let mut may_have_more = true;
        for _ in 0..RECEIVES_AT_ONCE {
            match self.receive_one(now, number) {
                Ok(true) => self.settle(now),
                Ok(false) => {
                    may_have_more = false;
                    break;
                }
                Err(cause) => {
                    self.failed.push((number, cause));
                    break;
                }
            }
        }
        if may_have_more {
            self.unread.insert(number);
        }
        self.touched.insert(number);
        self.settle(now);
        if self.pump_regions(now, number) {
            self.last_message = now;
        }
    }

    /// Takes the messages that have come by the regions of a link. True: there were some.
    pub(crate) fn pump_regions(&mut self, now: Nanos, number: u64) -> bool {
        let mut had_some = false;
        for _ in 0..RECEIVES_AT_ONCE {
            match self.receive_by_regions(now, number) {
                Ok(true) => {
                    had_some = true;
                    self.touched.insert(number);
                    self.settle(now);
                }
                Ok(false) => break,
                Err(cause) => {
                    self.failed.push((number, cause));
                    self.settle(now);
                    break;
                }
            }
        }
        had_some
    }

    fn receive_by_regions(&mut self, now: Nanos, number: u64) -> Result<bool, String> {
        let Some(link) = self.links.get_mut(&number) else { return Ok(false) };
        let Some(shared) = link.regions.as_mut().filter(|shared| shared.receives) else { return Ok(false) };
        let regions = &mut shared.regions;
        if matches!(link.side, LinkSide::Sender) && regions.has_returned() {
            let collected = self.server.collect(now, link.id, |slot| regions.counter(slot));
            collected.map_err(|error| error.to_string())?;
            // A tensor that nobody has read may be for a call that waits.
            self.settle(now);
        }
        let Some(link) = self.links.get_mut(&number) else { return Ok(false) };
        let Some(shared) = &mut link.regions else { return Ok(false) };
        let Some(message) = shared.regions.next_message().map_err(|error| error.to_string())? else {
            return Ok(false);
        };
        let message = Message::decode(&message).map_err(|error| error.to_string())?;
        self.message(now, number, message)?;
        Ok(true)
    }

    /// Takes what has come by all regions. Returns when this thread took the last message.
    pub(crate) fn pump_all_regions(&mut self, now: Nanos) -> Nanos {
        let mut next = 0;
        // Links may end meanwhile.
        while let Some((&number, link)) = self.links.range(next..).next() {
            next = number + 1;
            let has_news = |shared: &SharedRegions<D>| shared.receives && shared.regions.has_news();
            if link.regions.as_deref().is_some_and(has_news) && self.pump_regions(now, number) {
                self.last_message = now;
            }
        }
        self.last_message
    }

    /// The thread sleeps from now on. False: a message has come, and it must not.
    pub(crate) fn sleep(&mut self) -> bool {
        let mut may_sleep = self.arm_devices();
        for shared in self.links.values_mut().filter_map(|link| link.regions.as_mut()) {
            // What came before the peer's "ready" is looked at when that has come, over the
            // connection.
            may_sleep &= shared.regions.sleep() || !shared.receives;
        }
        may_sleep
    }

    /// The thread sleeps no longer.
    pub(crate) fn wake_up(&mut self) {
        self.is_polled = true;
        let shared = self.links.values_mut().filter_map(|link| link.regions.as_mut());
        shared.for_each(|shared| shared.regions.wake_up());
    }

    /// A thread of the program looks at the regions of a link from now on.
    pub(crate) fn begin_watch(&mut self, number: u64) {
        if let Some(shared) = self.links.get_mut(&number).and_then(|link| link.regions.as_mut()) {
            shared.regions.wake_up();
        }
    }

    /// It looks no longer: the endpoint's thread is woken from now on.
    pub(crate) fn end_watch(&mut self, now: Nanos, number: u64) {
        // As long as messages come.
        while let Some(shared) = self.links.get_mut(&number).and_then(|link| link.regions.as_mut())
            && !shared.regions.sleep()
            && self.pump_regions(now, number)
        {}
    }

    /// Goes on with what no message tells of: set-ups, messages that wait for a place, peers that
    /// have ended.
    pub(crate) fn poll(&mut self, now: Nanos) {
        self.poll_gets(now);
        for (number, link) in &mut self.links {
            match link.advance_setup(now) {
                Ok(dropped) => {
                    self.dropped.extend(dropped.map(Dropped::Regions));
                    if link.may_lend_in_place() {
                        self.server.set_reads_memory(link.id);
                    }
                }
                Err(cause) => self.failed.push((*number, cause)),
            }
            if let Some(shared) = link.regions.as_mut().filter(|shared| shared.sends) {
                let polled = shared.regions.poll(now);
                let sent = polled.and_then(|wakes| Ok(shared.regions.send_waiting()? | wakes));
                match sent {
                    Ok(true) => link.connection.queue(FrameKind::Doorbell, &[]),
                    Ok(false) => {}
                    Err(error) => self.failed.push((*number, error.to_string())),
                }
            }
            self.touched.insert(*number);
        }
        for Lingering { id, mut shared } in std::mem::take(&mut self.lingering) {
            // A loss is known by now.
            let _ = shared.regions.poll(now);
            let regions = &shared.regions;
            let collected = if regions.is_closed() {
                let (counter, held) = (|slot| regions.counter(slot), |slot| regions.held(slot));
                self.server.collect_closed(now, id, counter, held)
            } else {
                self.server.collect(now, id, |slot| regions.counter(slot))
            };
            if !shared.regions.may_read() || (collected.is_ok() && self.server.leases(id) == 0) {
                self.server.sever(now, id);
                self.dropped.push(Dropped::Regions(shared));
            } else {
                self.lingering.push(Lingering { id, shared });
            }
        }
        self.settle(now);
        self.pump_all_regions(now);
    }

    /// When [`Core::poll`] has something to do.
    fn next_poll(&self, now: Nanos) -> Option<Nanos> {
        let shared = self.links.values().filter_map(|link| link.regions.as_ref());
        if shared.clone().any(|shared| shared.regions.must_poll()) {
            return Some(now + POLL_PAUSE);
        }
        let has_lent = !self.lingering.is_empty() || self.server.bytes_lent() > 0;
        (has_lent && (shared.count() > 0 || !self.lingering.is_empty())).then(|| now + RETURN_PAUSE)
    }

    /// Devices to be dropped after the lock.
    pub(crate) fn take_dropped(&mut self) -> Vec<Dropped<D>> {
        std::mem::take(&mut self.dropped)
    }

    /// Handles the next frame or tensor of a link; false: none has come.
    fn receive_one(&mut self, now: Nanos, number: u64) -> Result<bool, String> {
        let Some(link) = self.links.get_mut(&number) else { return Ok(false) };
        if link.connection.queued() > OUTGOING_MAX {
            // Until the peer has read some, which is seen after a pause.
            self.unread.insert(number);
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
            Some(Incoming::Frame(FrameKind::Regions, content)) => {
                let frame = SetupFrame::decode(content).map_err(|_| ConnectionEnd::Malformed.to_string())?;
                if link.pair.is_some() || frame.is_about_gets() {
                    return self.gets_frame(now, number, frame).map(|()| true);
                }
                let dropped = link.setup_frame(
                    now,
                    frame,
                    self.may_share.clone(),
                    &mut *self.paired_devices,
                    &self.memory,
                )?;
                self.dropped.extend(dropped.map(Dropped::Regions));
                if link.may_lend_in_place() {
                    self.server.set_reads_memory(link.id);
                }
                Ok(true)
            }
            // What it announces is looked at after each frame.
            Some(Incoming::Frame(FrameKind::Doorbell, _)) => Ok(true),
            Some(Incoming::Frame(kind, _)) => Err(format!("it broke the protocol: a frame {kind:?}")),
            // A link never begins TLS anew.
            Some(Incoming::Secured(_)) => Err(ConnectionEnd::Malformed.to_string()),
            Some(Incoming::Tensor(words)) => {
                if let LinkSide::Receiver(side) = &mut link.side
                    && let Some(IncomingTensor { receive, lease, shape }) = side.incoming.take()
                {
                    self.counts.inline.add(shape.bytes() as u64);
                    self.counts.receive_latencies.add(now.since(receive.since));
                    let tensor = ReceivedTensor::new(ReceivedBytes::Own(words), shape);
                    if let Some(Ok(arrived)) = receive.slot.end(Ok(Arrived::inline(tensor, lease))) {
                        arrived.decline();
                    }
                }
                Ok(true)
            }
        }
    }

    fn message(&mut self, now: Nanos, number: u64, message: Message) -> Result<(), String> {
        if let Message::Returned { slot, .. } = &message {
            self.returned_by_gets(number, *slot);
        }
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
            let LinkSide::Receiver(side) = &mut link.side else { continue };
            if side.calls.next_deadline().is_some_and(|deadline| deadline <= now) {
                side.calls.expire(now);
                self.touched.insert(*number);
            }
            if let Some(incoming) = &side.incoming {
                incoming.receive.expire(now, &link.peer);
            }
        }
        for (number, receive) in self.devices.values().flat_map(GetDevice::receives) {
            if let Some(link) = self.links.get(&number) {
                receive.expire(now, &link.peer);
            }
        }
        self.settle(now);
    }

    /// When [`Core::expire`] or [`Core::poll`] has something to do.
    pub(crate) fn next_deadline(&mut self, now: Nanos) -> Option<Nanos> {
        let unread = (!self.unread.is_empty()).then_some(now + UNREAD_PAUSE);
        let poll = self.next_poll(now).into_iter().chain(unread).min();
        self.is_polled = poll.is_some();
        let calls = self.links.values().filter_map(|link| match &link.side {
            LinkSide::Receiver(side) => {
                let incoming = side.incoming.as_ref().and_then(|incoming| incoming.receive.next_deadline());
                side.calls.next_deadline().into_iter().chain(incoming).min()
            }
            LinkSide::Sender => None,
        });
        let receives = self.devices.values().flat_map(GetDevice::receives);
        let gets = receives.filter_map(|(_, receive)| receive.next_deadline());
        let until = calls.chain(gets).chain(self.server.next_deadline()).chain(self.next_gets_poll());
        // A time for which the thread was woken once is not given up: a program that asks again and
        // again would wake the thread each time.
        let planned = self.planned.filter(|planned| *planned > now);
        let until = until.chain(poll).chain(planned).min();
        self.planned = until;
        until
    }

    /// The endpoint's thread is awake at this time.
    pub(crate) fn be_awake_at(&mut self, deadline: Nanos) {
        if self.planned.is_none_or(|planned| planned > deadline) {
            self.planned = Some(deadline);
            self.is_polled = true;
            // It fails only when the counter is full, and then the file is readable.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
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
        for slot in std::mem::take(&mut self.receives).into_values() {
            drop(slot.end(Err(ReceiveTensorError::Closed)));
        }
        for slot in std::mem::take(&mut self.sends).into_values() {
            drop(slot.end(Err(SendTensorError::Closed)));
        }
    }

    fn end_link(&mut self, now: Nanos, number: u64, cause: &str) {
        let Some(mut link) = self.links.remove(&number) else { return };
        self.numbers.remove(&link.id);
        self.touched.remove(&number);
        let is_severing = self.end_pair(number, &mut link, cause);
        let peer = &*link.peer;
        match link.side {
            LinkSide::Sender => {
                tracing::debug!(peer, "a link has ended: {cause}");
                self.server.disconnect(now, link.id);
                match link.regions {
                    // Its leases are back when the fence holds.
                    None if is_severing => {}
                    // Its process may run on and read what it has mapped.
                    Some(shared) if shared.sends && shared.receives && self.server.leases(link.id) > 0 => {
                        self.lingering.push(Lingering { id: link.id, shared });
                    }
                    shared => {
                        self.server.sever(now, link.id);
                        self.dropped.extend(shared.map(Dropped::Regions));
                    }
                }
            }
            LinkSide::Receiver(mut side) => {
                tracing::debug!(peer, "the link to a peer has ended: {cause}");
                if let Some(hold) = side.hold.upgrade() {
                    hold.set_lost();
                }
                side.calls.lost(cause);
                if let Some(incoming) = side.incoming.take() {
                    incoming.receive.lose(&link.peer, cause);
                }
                if let Some(shared) = &mut link.regions {
                    close_regions(now, &mut side, &mut shared.regions);
                }
                for event in side.calls.take_events() {
                    if let CallEvent::Failed { call, error } = event {
                        side.end_call(call, Err(error.into()));
                    }
                }
                // Calls whose answers could not be used: for what decides they have ended.
                for receive in std::mem::take(&mut side.waiting).into_values() {
                    receive.lose(&link.peer, cause);
                }
                self.dropped.extend(link.regions.map(Dropped::Regions));
            }
        }
    }

    /// Carries out what the pure parts decided, until nothing is left, and sends what was queued.
    fn settle(&mut self, now: Nanos) {
        loop {
            for (number, cause) in std::mem::take(&mut self.failed) {
                self.end_link(now, number, &cause);
            }
            let events = self.server.take_events();
            let is_idle = events.is_empty() & !self.settle_calls(now);
            for event in events {
                self.server_event(event);
            }
            if is_idle && self.failed.is_empty() {
                self.flush();
            }
            if is_idle && self.failed.is_empty() {
                return;
            }
        }
    }

    fn server_event(&mut self, event: ServerEvent<SharedTensor>) {
        let (id, message, tensor) = match event {
            ServerEvent::Outcome(outcome) => return self.outcome(outcome),
            ServerEvent::Post { link, message } => (link, message, None),
            ServerEvent::PostInline { link, message, tensor } => (link, message, Some(tensor)),
        };
        let Some(number) = self.numbers.get(&id) else { return };
        let Some(link) = self.links.get_mut(number) else { return };
        self.touched.insert(*number);
        if let Some(tensor) = tensor {
            let reason = if self.server.reads_memory(id) {
                InlineReason::NotLendable
            } else {
                InlineReason::NoRegions
            };
            self.counts.add_inline(reason, tensor.shape().bytes() as u64);
            return link.send_inline(&message, tensor);
        }
        let (number, mut must_poll) = (*number, false);
        if let Message::Lent { reference, .. } = &message {
            if link.pair.is_some() {
                self.counts.sent_copied.add(reference.slice.len);
                let reference = *reference;
                let lent = self.lend_by_gets(number, &reference, message);
                return self.failed.extend(lent.err().map(|cause| (number, cause)));
            }
            self.counts.sent_in_place.add(reference.slice.len);
            must_poll = true;
        }
        if let Some(Err(error)) = self.links.get_mut(&number).map(|link| link.send(&message)) {
            self.failed.push((number, error.to_string()));
        }
        if must_poll {
            self.must_poll();
        }
    }

    /// The thread must look at returned leases, or at messages that wait for a place: if it sleeps
    /// without a limit, it is woken.
    fn must_poll(&mut self) {
        if !std::mem::replace(&mut self.is_polled, true) {
            // It fails only when the counter is full, and then the file is readable.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    fn outcome(&mut self, outcome: Outcome<Offer<SharedTensor>>) {
        match outcome {
            Outcome::Sent { send } => self.end_send(send, Ok(())),
            Outcome::SendFailed { send, error, .. } => self.end_send(send, Err(error)),
            Outcome::Received { receive, delivered } => {
                let tensor = delivered.tensor.tensor.clone();
                let delivered = Some(Box::new(delivered));
                self.end_receive(receive, Ok(Arrived { delivered, ..Arrived::local(tensor) }));
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
        let (mut had_events, mut requests) = (false, Vec::new());
        for number in self.touched.iter().copied() {
            let Some(link) = self.links.get_mut(&number) else { continue };
            let LinkSide::Receiver(side) = &mut link.side else { continue };
            let returned = side.returns.take_changed();
            for event in side.calls.take_events() {
                had_events = true;
                if let (CallEvent::Lent { call, lease, .. }, None) = (&event, &link.pair) {
                    self.counts.in_place.add(lease.slice().len);
                    if let Some(since) = link.waits_since(*call) {
                        self.counts.receive_latencies.add(now.since(since));
                    }
                }
                match link.call_event(event) {
                    Ok(request) => requests.extend(request.map(|request| (number, request))),
                    Err(cause) => {
                        self.failed.push((number, cause));
                        break;
                    }
                }
            }
            for (slot, counter) in returned {
                let sent = link.send(&Message::Returned { slot, counter });
                self.failed.extend(sent.err().map(|error| (number, error.to_string())));
            }
        }
        for (number, request) in requests {
            let begun = self.begin_get(number, request);
            self.failed.extend(begun.err().map(|cause| (number, cause)));
        }
        had_events
    }

    /// Sends what is queued.
    fn flush(&mut self) {
        let mut must_poll = false;
        for number in std::mem::take(&mut self.touched) {
            let Some(link) = self.links.get_mut(&number) else { continue };
            must_poll |= link.regions.as_ref().is_some_and(|shared| shared.regions.must_poll());
            match link.connection.flush() {
                Ok(is_empty) => {
                    let mut flags = epoll::EventFlags::empty();
                    flags.set(epoll::EventFlags::OUT, !is_empty);
                    flags.set(epoll::EventFlags::IN, link.connection.queued() <= OUTGOING_MAX);
                    if link.watched != flags {
                        let data = epoll::EventData::new_u64(number);
                        match epoll::modify(&self.epoll, &link.connection, data, flags) {
                            Ok(()) => link.watched = flags,
                            // Nobody would go on with the link.
                            Err(errno) => self.failed.push((number, ConnectionEnd::from(errno).to_string())),
                        }
                    }
                }
                Err(end) => self.failed.push((number, end.to_string())),
            }
        }
        if must_poll {
            self.must_poll();
        }
    }
}

/// The receiver's end of a link accepts no more: what has come is declined, and the sender learns
/// which leases are still held. All others are for other receivers.
fn close_regions<D: MappingDevice>(now: Nanos, side: &mut ReceiverSide, regions: &mut Regions<D>) {
    while let Ok(Some(message)) = regions.next_message() {
        // A peer that sends nonsense is not listened to any more.
        let Ok(message) = Message::decode(&message) else { break };
        if side.calls.message(now, message).is_err() {
            break;
        }
    }
    if let Some(page) = &side.page {
        page.close(side.calls.held());
    }
}

/// A tensor as the server takes it.
fn offer(tensor: SharedTensor) -> Offer<SharedTensor> {
    let (description, place) = (tensor.shape().describe(), place(&tensor));
    Offer { tensor, description, place }
}

/// Where a tensor lies in lendable memory, if it does.
fn place(tensor: &SharedTensor) -> Option<Place> {
    let (arena, range) = (tensor.buffer().arena()?, tensor.buffer().range());
    let (key, offset, len) = (RegionKey(arena.number()), range.start, range.end - range.start);
    let part = tensor.range();
    Some(Place { buffer: RemoteSlice { key, offset, len }, part: part.start as u64..part.end as u64 })
}
