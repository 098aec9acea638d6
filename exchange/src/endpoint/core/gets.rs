//! Links whose tensors are got: the set-up, the gets of calls, and the ends.
//!
//! Dialer: offers a fabric. Listener: gives the dialer a rank, waits for the dialer's device, and
//! says where its own device is and which memory it lends. Dialer: connects its device, and says
//! "ready". From then on the listener lends.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use pleach_transport::{Meeting, Nanos, Rank, RegionKey, WakeSource};
use pleach_vocabulary::Fabric;
use rustix::event::epoll;
use rustix::net::getsockname;

use super::{Core, Dropped, Link, LinkSide};
use crate::endpoint::gets::{Get, GetDevice, GetEvent, LeaseName, SETUP_LIMIT};
use crate::endpoint::link::{Arrived, GetRequest, LinkPair, PairState};
use crate::endpoint::pair::MappingDevice;
use crate::endpoint::regions::SetupFrame;
use crate::endpoint::tensor::{ReceivedBytes, ReceivedTensor, SharedTensor, TensorWay};
use crate::gathered::RegisteredPart;
use crate::message::Message;
use crate::reference::{LinkId, Reference};

impl<D: MappingDevice> Core<D> {
    /// Opens a device by which links can have gets. Returns its number.
    pub(crate) fn open_device(&mut self, fabric: Fabric) -> Result<u64, String> {
        let device = GetDevice::open(fabric, &self.get_options)?;
        let number = self.next_number();
        self.devices.insert(number, device);
        Ok(number)
    }

    /// A rank for the other end of a link, with the number of its device, which is opened if none
    /// has a rank.
    fn take_rank(&mut self, fabric: Fabric, link: LinkId, number: u64) -> Result<(u64, Rank), String> {
        for (device, opened) in &mut self.devices {
            if let Some(rank) = opened.take_rank(fabric, link, number) {
                return Ok((*device, rank));
            }
        }
        let device = self.open_device(fabric)?;
        let opened = self.devices.get_mut(&device);
        let rank = opened.and_then(|opened| opened.take_rank(fabric, link, number));
        Ok((device, rank.ok_or("a device has no ranks")?))
    }

    /// This end's half of the pair of a link.
    fn new_pair(
        &mut self,
        now: Nanos,
        fabric: Fabric,
        link: LinkId,
        number: u64,
    ) -> Result<LinkPair, String> {
        let is_allowed = match fabric {
            Fabric::Tcp => self.fabrics.tcp,
            Fabric::Verbs => self.fabrics.verbs,
            _ => false,
        };
        if !is_allowed {
            return Err(format!("the other program takes no fabric '{fabric}'"));
        }
        let (device, rank) = self.take_rank(fabric, link, number)?;
        let (arena, registered, unnamed) = ((0, 0), RegisteredPart::NONE, BTreeMap::new());
        let (state, deadline) = (PairState::Offered, now + SETUP_LIMIT);
        Ok(LinkPair { device, rank, arena, registered, unnamed, state, deadline })
    }

    /// The receiver's end of a new link begins to set up gets.
    pub(crate) fn offer_gets(&mut self, now: Nanos, number: u64, link: &mut Link<D>, fabric: Fabric) {
        match self.new_pair(now, fabric, link.id, number) {
            Ok(pair) => {
                link.send_setup(&SetupFrame::OfferGets(fabric));
                link.pair = Some(pair);
            }
            Err(reason) => link.go_inline(&reason),
        }
    }

    /// A step of the set-up came.
    pub(crate) fn gets_frame(&mut self, now: Nanos, number: u64, frame: SetupFrame) -> Result<(), String> {
        let Some(link) = self.links.get(&number) else { return Ok(()) };
        let is_sender = matches!(link.side, LinkSide::Sender);
        let state = link.pair.as_ref().map(|pair| pair.state);
        match (frame, state) {
            (SetupFrame::OfferGets(fabric), None) if is_sender && link.regions.is_none() => {
                if let Err(reason) = self.accept_gets(now, number, fabric) {
                    return self.refuse_gets(number, &reason);
                }
                Ok(())
            }
            (SetupFrame::AcceptGets { address, rank, arena }, Some(PairState::Offered)) if !is_sender => {
                let Some(pair) = self.links.get_mut(&number).and_then(|link| link.pair.as_mut()) else {
                    return Ok(());
                };
                pair.arena = arena;
                pair.state = PairState::Connecting;
                let (device, own) = (pair.device, pair.rank);
                let meeting = Meeting::Dial { address: &address, own: rank };
                let met = self.devices.get_mut(&device).map_or(Ok(()), |device| device.meet(own, meeting));
                met.or_else(|reason| self.refuse_gets(number, &reason))
            }
            (SetupFrame::Ready, Some(PairState::Connecting)) if is_sender => {
                let Some(link) = self.links.get_mut(&number) else { return Ok(()) };
                let id = link.id;
                link.pair.iter_mut().for_each(|pair| pair.state = PairState::Ready);
                self.server.set_reads_memory(id);
                Ok(())
            }
            (SetupFrame::Registered(part), Some(PairState::Ready)) if !is_sender => {
                let pair = self.links.get_mut(&number).and_then(|link| link.pair.as_mut());
                pair.into_iter().for_each(|pair| pair.registered = part);
                Ok(())
            }
            (SetupFrame::Refused(reason), Some(state)) if state != PairState::Ready => {
                self.give_up_gets(number, &reason);
                Ok(())
            }
            (SetupFrame::Refused(reason), Some(_)) => Err(format!("gets were given up: {reason}")),
            // This end may have given up meanwhile.
            (SetupFrame::Refused(_), None) => Ok(()),
            (SetupFrame::AcceptGets { .. }, None) if !is_sender => Ok(()),
            _ => Err("it broke the protocol: gets out of turn".to_owned()),
        }
    }

    fn accept_gets(&mut self, now: Nanos, number: u64, fabric: Fabric) -> Result<(), String> {
        let Some(id) = self.links.get(&number).map(|link| link.id) else { return Ok(()) };
        let mut pair = self.new_pair(now, fabric, id, number)?;
        pair.state = PairState::Connecting;
        let (rank, key) = (pair.rank, pair.device);
        let Some(link) = self.links.get_mut(&number) else { return Ok(()) };
        let local = getsockname(&link.connection).ok().and_then(|local| SocketAddr::try_from(local).ok());
        let pair = link.pair.insert(pair);
        let device = self.devices.get_mut(&key).ok_or("there is no device")?;
        pair.arena = device.lent_arena(&self.memory)?;
        device.meet(rank, Meeting::Await)?;
        let accept = SetupFrame::AcceptGets { address: device.address(local), rank, arena: pair.arena };
        link.send_setup(&accept);
        Ok(())
    }

    /// This end gives up, and tells the other end.
    fn refuse_gets(&mut self, number: u64, reason: &str) -> Result<(), String> {
        self.give_up_gets(number, reason);
        if let Some(link) = self.links.get_mut(&number) {
            link.send_setup(&SetupFrame::Refused(reason.to_owned()));
        }
        Ok(())
    }

    fn give_up_gets(&mut self, number: u64, reason: &str) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let pair = link.pair.take();
        link.go_inline(reason);
        if let Some(pair) = pair
            && let Some(device) = self.devices.get_mut(&pair.device)
        {
            device.sever(pair.rank, None);
            self.must_poll();
        }
    }

    /// Goes on with what devices and set-ups have done.
    pub(crate) fn poll_gets(&mut self, now: Nanos) {
        let mut events = Vec::new();
        self.devices.values_mut().for_each(|device| events.extend(device.poll(now)));
        for event in events {
            self.device_event(now, event);
        }
        let over = self.devices.extract_if(.., |_, device| device.is_over());
        self.dropped.extend(over.map(|(_, device)| Dropped::Device(Box::new(device))));
        let late = self.links.iter().filter(|(_, link)| {
            let pair = link.pair.as_ref().filter(|pair| pair.state != PairState::Ready);
            pair.is_some_and(|pair| pair.deadline <= now)
        });
        for number in late.map(|(number, _)| *number).collect::<Vec<_>>() {
            let reason = format!("it was not set up within {} s", SETUP_LIMIT.as_secs());
            let refused = self.refuse_gets(number, &reason);
            self.failed.extend(refused.err().map(|cause| (number, cause)));
            self.touched.insert(number);
        }
    }

    /// When [`Core::poll_gets`] has something to do, whatever devices do.
    pub(crate) fn next_gets_poll(&self) -> Option<Nanos> {
        let pairs = self.links.values().filter_map(|link| link.pair.as_ref());
        let deadlines = pairs.filter(|pair| pair.state != PairState::Ready).map(|pair| pair.deadline);
        deadlines.chain(self.armed_until).min()
    }

    /// Arms the devices; false: something may have come already.
    pub(crate) fn arm_devices(&mut self) -> bool {
        self.armed_until = None;
        let mut is_armed = true;
        for (number, device) in &mut self.devices {
            let Some(armed) = device.arm() else {
                is_armed = false;
                continue;
            };
            self.armed_until = self.armed_until.into_iter().chain(armed.until).min();
            if !device.is_watched
                && let WakeSource::File(file) = &armed.wake_source
            {
                let data = epoll::EventData::new_u64(*number);
                let added = epoll::add(&self.epoll, file, data, epoll::EventFlags::IN);
                device.is_watched = added.is_ok();
                is_armed &= device.is_watched;
            }
        }
        is_armed
    }

    pub(crate) fn device_event(&mut self, now: Nanos, event: GetEvent) {
        match event {
            GetEvent::Connected { link } => self.pair_connected(link),
            GetEvent::Lost { link: number, cause } => {
                let link = self.links.get(&number);
                let state = link.and_then(|link| link.pair.as_ref()).map(|pair| pair.state);
                match state {
                    Some(PairState::Ready) => self.failed.push((number, cause)),
                    Some(_) => {
                        let refused = self.refuse_gets(number, &cause);
                        self.failed.extend(refused.err().map(|cause| (number, cause)));
                    }
                    None => {}
                }
                self.touched.insert(number);
            }
            GetEvent::Named { link: number, slot, part } => {
                let pair = self.links.get_mut(&number).and_then(|link| link.pair.as_mut());
                if let Some(answer) = pair.and_then(|pair| pair.unnamed.remove(&slot)) {
                    let sent = self.answer_by_gets(number, part, &answer);
                    self.failed.extend(sent.err().map(|cause| (number, cause)));
                }
            }
            GetEvent::Severed { lent_to } => {
                if let Some(link) = lent_to {
                    self.server.sever(now, link);
                }
            }
            GetEvent::Ended { get, result } => self.finish(now, *get, result),
        }
    }

    /// The receiver's end is ready: the other end may lend from now on.
    fn pair_connected(&mut self, number: u64) {
        let Some(link) = self.links.get_mut(&number) else { return };
        let LinkSide::Receiver(side) = &mut link.side else { return };
        let Some(pair) = link.pair.as_mut().filter(|pair| pair.state == PairState::Connecting) else {
            return;
        };
        let (arena, bytes) = pair.arena;
        pair.state = PairState::Ready;
        self.touched.insert(number);
        if let Err(error) = side.calls.add_region(RegionKey(arena), bytes) {
            return self.failed.push((number, error.to_string()));
        }
        tracing::debug!(peer = &*link.peer, "tensors are got");
        side.decide(Ok(TensorWay::Copied));
        link.send_setup(&SetupFrame::Ready);
    }

    /// Answers a call with the lease of this reference, as soon as the other end can get it.
    pub(crate) fn lend_by_gets(
        &mut self,
        number: u64,
        reference: &Reference,
        answer: Message,
    ) -> Result<(), String> {
        let pair = self.links.get_mut(&number).and_then(|link| link.pair.as_mut());
        let Some(pair) = pair else { return Ok(()) };
        let Some(device) = self.devices.get_mut(&pair.device) else { return Ok(()) };
        match device.lend(&self.memory, pair.rank, reference)? {
            LeaseName::Part(part) => self.answer_by_gets(number, part, &answer),
            LeaseName::Coming => {
                pair.unnamed.insert(reference.lease.slot, answer);
                self.must_poll();
                Ok(())
            }
        }
    }

    /// Answers a call with a lease in this part, which is told before.
    fn answer_by_gets(&mut self, number: u64, part: RegisteredPart, answer: &Message) -> Result<(), String> {
        let Some(link) = self.links.get_mut(&number) else { return Ok(()) };
        let Some(pair) = &mut link.pair else { return Ok(()) };
        self.touched.insert(number);
        if part != pair.registered {
            pair.registered = part;
            link.send_setup(&SetupFrame::Registered(part));
        }
        link.send(answer).map_err(|error| error.to_string())
    }

    /// A lease of a link is back.
    pub(crate) fn returned_by_gets(&mut self, number: u64, slot: u32) {
        let pair = self.links.get_mut(&number).and_then(|link| link.pair.as_mut());
        let Some(pair) = pair else { return };
        // A peer may return what it was not told of yet.
        pair.unnamed.remove(&slot);
        if let Some(device) = self.devices.get_mut(&pair.device) {
            device.returned(pair.rank, slot);
        }
    }

    /// Gets the tensor of a call.
    pub(crate) fn begin_get(&mut self, link: u64, request: GetRequest) -> Result<(), String> {
        let GetRequest { device, rank, receive, lease, shape, src } = request;
        let buffer = match self.memory.allocate_to_receive(shape.bytes()) {
            Ok(buffer) => buffer,
            Err(error) => {
                // The tensor is for another receiver.
                let peer = self.links.get(&link).map(|link| link.peer.clone());
                receive.lack_memory(&peer.unwrap_or_else(|| "".into()), &error.to_string());
                lease.decline();
                return Ok(());
            }
        };
        let get = Box::new(Get { link, receive, lease, shape, buffer });
        let device = self.devices.get_mut(&device).ok_or("there is no device")?;
        device.begin(&self.memory, rank, src, get);
        self.must_poll();
        Ok(())
    }

    fn finish(&mut self, now: Nanos, get: Get, result: Result<(), String>) {
        let Get { link: number, receive, lease, shape, buffer } = get;
        self.touched.insert(number);
        match result {
            Ok(()) => {
                let bytes = shape.bytes() as u64;
                let tensor = SharedTensor::of_bytes(buffer, shape.clone());
                let tensor = ReceivedTensor::new(ReceivedBytes::Copied(tensor), shape);
                match receive.slot.end(Ok(Arrived::inline(tensor, lease))) {
                    None => {
                        self.counts.copied.add(bytes);
                        let (counts, time) = (&mut self.counts, now.since(receive.since));
                        let latencies = if receive.is_field {
                            &mut counts.field_latencies
                        } else {
                            &mut counts.receive_latencies
                        };
                        latencies.add(time);
                    }
                    Some(Ok(arrived)) => arrived.decline(),
                    Some(Err(_)) => {}
                }
            }
            Err(cause) => {
                let cause = format!("its memory was not read ({cause})");
                if let Some(link) = self.links.get(&number) {
                    receive.lose(&link.peer, &cause);
                    self.failed.push((number, cause));
                }
            }
        }
    }

    /// The pair of a link that has ended. `is_lent`: what was lent is back when the fence holds.
    /// True: it is severed then, and not yet.
    pub(crate) fn end_pair(&mut self, number: u64, link: &mut Link<D>, cause: &str) -> bool {
        let Some(pair) = link.pair.take() else { return false };
        let Some(device) = self.devices.get_mut(&pair.device) else { return false };
        for (_, receive) in device.receives().filter(|(link, _)| *link == number) {
            receive.lose(&link.peer, cause);
        }
        let lent_to = matches!(link.side, LinkSide::Sender).then_some(link.id);
        device.sever(pair.rank, lent_to);
        self.must_poll();
        lent_to.is_some()
    }
}
