//! One link: its control connection, its regions, and the side of it that this program is.
//!
//! Messages go over the control connection until both ends have set up regions. Each end says
//! "ready" on the connection before its first message by regions, so that its messages stay in
//! their order. Where regions cannot be set up, one line of the log says why, and all goes over the
//! connection.
//!
//! **Invariant:** the bytes of a tensor follow their message on the connection, whatever else goes
//! by regions.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use pleach_transport::shm::ShmDevice;
use pleach_transport::{Nanos, Rank, RegionKey, RemoteSlice};
use rustix::event::epoll;

use super::connection::Connection;
use super::error::ReceiveTensorError;
use super::frame::FrameKind;
use super::memory::LendableMemory;
use super::pair::{MappingDevice, Pairs};
use super::regions::{Regions, RegionsError, SetupFrame, StatusPage};
use super::returns::Returns;
use super::shared::LinkHold;
use super::slot::Slot;
use super::tensor::{ReceivedBytes, ReceivedTensor, SharedTensor, TensorShape, TensorWay};
use crate::arena::ALIGNMENT;
use crate::calls::{CallError, CallEvent, Calls};
use crate::gathered::RegisteredPart;
use crate::key::Key;
use crate::lease::Lease;
use crate::message::{Description, Message};
use crate::reference::LinkId;
use crate::server::Offer;
use crate::table::Delivered;

/// The end of a receive.
pub(crate) type ReceiveResult = Result<Arrived, ReceiveTensorError>;

/// Where a thread waits for the end of its receive.
pub(crate) type ReceiveSlot = Arc<Slot<ReceiveResult>>;

/// A tensor that has come, and that its receiver has not taken.
pub(crate) struct Arrived {
    pub(crate) tensor: ReceivedTensor,
    /// The lease of bytes that came inline: as long as it is open the sender keeps the tensor.
    pub(crate) lease: Option<Lease>,
    /// A tensor of this program's own table, which can return to its place there.
    #[cfg_attr(not(feature = "grpc"), expect(dead_code, reason = "services return tensors"))]
    pub(crate) delivered: Option<Box<Delivered<Offer<SharedTensor>>>>,
}

impl Arrived {
    /// A tensor of this program.
    pub(crate) fn local(tensor: SharedTensor) -> Self {
        let shape = tensor.shape().clone();
        Self::new(ReceivedTensor::new(ReceivedBytes::Local(tensor), shape))
    }

    /// A tensor whose bytes were copied: its lease ends when it is taken.
    pub(crate) fn inline(tensor: ReceivedTensor, lease: Lease) -> Self {
        Self { lease: Some(lease), ..Self::new(tensor) }
    }

    /// A tensor of a peer.
    pub(crate) fn new(tensor: ReceivedTensor) -> Self {
        Self { tensor, lease: None, delivered: None }
    }

    /// The receiver takes it.
    pub(crate) fn take(self) -> ReceivedTensor {
        self.tensor
    }

    /// Nobody takes it: it is for another receiver.
    pub(crate) fn decline(self) {
        match self.lease {
            Some(lease) => lease.decline(),
            None => self.tensor.decline(),
        }
    }
}

/// A receive that waits for its tensor.
pub(crate) struct WaitingReceive {
    pub(crate) key: Key,
    pub(crate) slot: ReceiveSlot,
    pub(crate) since: Nanos,
    pub(crate) deadline: Nanos,
    /// A message of an RPC waits for it, and no thread.
    pub(crate) is_field: bool,
}

impl WaitingReceive {
    /// Ends it if its deadline has come, and the bytes have not, which are then for the next
    /// receiver.
    pub(crate) fn expire(&self, now: Nanos, peer: &Arc<str>) {
        if self.deadline <= now && !self.slot.has_ended() {
            let (key, peer, waited) = (self.key.clone(), peer.clone(), now.since(self.since));
            drop(self.slot.end(Err(CallError::Timeout { key, peer, waited }.into())));
        }
    }

    /// When [`WaitingReceive::expire`] has something to do.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        (!self.slot.has_ended()).then_some(self.deadline)
    }

    /// Ends it, because there is no memory for its tensor.
    pub(crate) fn lack_memory(&self, peer: &Arc<str>, cause: &str) {
        let (key, peer, cause) = (self.key.clone(), peer.clone(), cause.into());
        drop(self.slot.end(Err(CallError::NoMemory { key, peer, cause }.into())));
    }

    /// Ends it with the link.
    pub(crate) fn lose(&self, peer: &Arc<str>, cause: &str) {
        let (key, peer, cause) = (self.key.clone(), peer.clone(), cause.into());
        drop(self.slot.end(Err(CallError::Lost { key, peer, cause }.into())));
    }
}

/// See the module.
pub(crate) struct Link<D: MappingDevice = ShmDevice> {
    pub(crate) id: LinkId,
    /// The peer, for people.
    pub(crate) peer: Arc<str>,
    pub(crate) connection: Connection,
    /// What of the socket wakes the thread.
    pub(crate) watched: epoll::EventFlags,
    pub(crate) side: LinkSide,
    pub(crate) regions: Option<Box<SharedRegions<D>>>,
    /// The pair of devices by which tensors are got.
    pub(crate) pair: Option<LinkPair>,
}

/// This end's half of a pair of devices.
pub(crate) struct LinkPair {
    /// The number of the device.
    pub(crate) device: u64,
    /// The rank of the other end there.
    pub(crate) rank: Rank,
    /// The sender's arena: its number and its length.
    pub(crate) arena: (u64, u64),
    /// The part of it that was told last.
    pub(crate) registered: RegisteredPart,
    /// Answers that wait until their leases can be got, by the slots of these.
    pub(crate) unnamed: BTreeMap<u32, Message>,
    pub(crate) state: PairState,
    /// When the set-up is given up.
    pub(crate) deadline: Nanos,
}

/// How far the set-up of a pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PairState {
    /// The dialer has offered it.
    Offered,
    /// The devices connect.
    Connecting,
    /// Tensors are got.
    Ready,
}

/// A tensor that is to be got.
pub(crate) struct GetRequest {
    pub(crate) device: u64,
    pub(crate) rank: Rank,
    pub(crate) receive: WaitingReceive,
    pub(crate) lease: Lease,
    pub(crate) shape: TensorShape,
    pub(crate) src: RemoteSlice,
}

/// Regions, and which directions use them.
pub(crate) struct SharedRegions<D: MappingDevice = ShmDevice> {
    pub(crate) regions: Regions<D>,
    /// This end's messages go by them.
    pub(crate) sends: bool,
    /// The peer's messages come by them.
    pub(crate) receives: bool,
}

/// What this program is on a link.
pub(crate) enum LinkSide {
    /// The peer asks.
    Sender,
    /// This program asks.
    Receiver(Box<ReceiverSide>),
}

/// What a receiver keeps of a link.
pub(crate) struct ReceiverSide {
    pub(crate) calls: Calls,
    pub(crate) returns: Arc<Returns>,
    pub(crate) page: Option<Arc<StatusPage>>,
    pub(crate) hold: Weak<LinkHold>,
    /// Whether regions are shared, before anybody holds the link.
    decided: Option<Result<TensorWay, Arc<str>>>,
    pub(crate) waiting: BTreeMap<u64, WaitingReceive>,
    /// The call whose tensor follows on the connection.
    pub(crate) incoming: Option<IncomingTensor>,
}

/// A tensor whose bytes come.
pub(crate) struct IncomingTensor {
    pub(crate) receive: WaitingReceive,
    pub(crate) lease: Lease,
    pub(crate) shape: TensorShape,
}

impl ReceiverSide {
    pub(crate) fn new(calls: Calls, returns: Arc<Returns>) -> Box<Self> {
        let (waiting, hold) = (BTreeMap::new(), Weak::new());
        Box::new(Self { calls, returns, page: None, hold, decided: None, waiting, incoming: None })
    }

    /// Sets the handle whose drop closes the link.
    pub(crate) fn set_hold(&mut self, hold: &Arc<LinkHold>) {
        self.hold = Arc::downgrade(hold);
        if let Some(decided) = self.decided.take() {
            hold.set_regions(decided);
        }
    }

    /// Tells whoever waits for it whether there are regions, and how tensors come by them.
    pub(crate) fn decide(&mut self, regions: Result<TensorWay, Arc<str>>) {
        match self.hold.upgrade() {
            Some(hold) => hold.set_regions(regions),
            None => self.decided = Some(regions),
        }
    }

    /// Gives the end of a call to its thread.
    pub(crate) fn end_call(&mut self, call: u64, result: ReceiveResult) {
        if let Some(receive) = self.waiting.remove(&call)
            && let Some(Ok(arrived)) = receive.slot.end(result)
        {
            arrived.decline();
        }
    }
}

impl<D: MappingDevice> Link<D> {
    pub(crate) fn new(id: LinkId, peer: &str, connection: Connection, side: LinkSide) -> Self {
        let watched = epoll::EventFlags::IN;
        Self { id, peer: peer.into(), connection, watched, side, regions: None, pair: None }
    }

    /// Since when a receive waits for the end of this call.
    pub(crate) fn waits_since(&self, call: u64) -> Option<Nanos> {
        let LinkSide::Receiver(side) = &self.side else { return None };
        side.waiting.get(&call).map(|receive| receive.since)
    }

    /// Sends a message, by regions if they are shared.
    pub(crate) fn send(&mut self, message: &Message) -> Result<(), RegionsError> {
        match &mut self.regions {
            Some(shared) if shared.sends => {
                if shared.regions.post(message.encode())? {
                    self.connection.queue(FrameKind::Doorbell, &[]);
                }
            }
            _ => self.connection.queue(FrameKind::Message, &message.encode()),
        }
        Ok(())
    }

    /// Sends a message and the bytes of a tensor behind it.
    pub(crate) fn send_inline(&mut self, message: &Message, tensor: SharedTensor) {
        self.connection.queue(FrameKind::Message, &message.encode());
        self.connection.queue_tensor(tensor);
    }

    /// Sends a step of the set-up.
    pub(crate) fn send_setup(&mut self, frame: &SetupFrame) {
        self.connection.queue(FrameKind::Regions, &frame.encode());
    }

    /// The receiver's end begins to set up regions that are mapped.
    pub(crate) fn offer_regions(&mut self, now: Nanos, slots: u32, devices: &mut dyn Pairs<D>) {
        let opened = StatusPage::new(slots).map_err(RegionsError::from).and_then(|page| {
            let regions = Regions::open(now, devices.pair(None)?, page.clone(), None)?;
            Ok((page, regions))
        });
        match opened.map_err(|error| error.to_string()) {
            Ok((page, regions)) => {
                self.send_setup(&SetupFrame::Offer(regions.offer().clone()));
                self.regions = Some(Box::new(SharedRegions { regions, sends: false, receives: false }));
                if let LinkSide::Receiver(side) = &mut self.side {
                    side.page = Some(page);
                }
            }
            Err(reason) => self.go_inline(&reason),
        }
    }

    /// Whether this program lends what the peer reads in place: the peer has mapped it, and this
    /// program sees there what comes back.
    pub(crate) fn may_lend_in_place(&self) -> bool {
        let shared = self.regions.as_ref().filter(|shared| shared.sends && shared.receives);
        matches!(self.side, LinkSide::Sender) && shared.is_some()
    }

    /// Whether tensors go inline, as far as is known.
    pub(crate) fn is_inline(&self) -> bool {
        self.regions.is_none() && self.pair.is_none()
    }

    /// There are no regions on this link.
    pub(crate) fn go_inline(&mut self, reason: &str) {
        let peer = &*self.peer;
        if let LinkSide::Receiver(side) = &mut self.side {
            tracing::info!(peer, "tensors come inline: {reason}");
            side.decide(Err(reason.into()));
        } else {
            tracing::info!(peer, "tensors go inline: {reason}");
        }
    }

    /// Gives up regions that are not shared yet. They are to be dropped. An error: messages may be
    /// in them, and the link has to end.
    fn give_up(&mut self, reason: &str) -> Result<Option<Box<SharedRegions<D>>>, String> {
        let Some(shared) = self.regions.take() else { return Ok(None) };
        if shared.sends || shared.receives {
            self.regions = Some(shared);
            return Err(format!("regions were given up: {reason}"));
        }
        self.go_inline(reason);
        Ok(Some(shared))
    }

    /// A step of the set-up came. Returns regions that are to be dropped.
    pub(crate) fn setup_frame(
        &mut self,
        now: Nanos,
        frame: SetupFrame,
        may_share: Result<(), Arc<str>>,
        devices: &mut dyn Pairs<D>,
        memory: &Arc<LendableMemory>,
    ) -> Result<Option<Box<SharedRegions<D>>>, String> {
        let is_sender = matches!(self.side, LinkSide::Sender);
        match (frame, &mut self.regions) {
            (SetupFrame::Offer(theirs), None) if is_sender => {
                let opened = may_share.map_err(|reason| reason.to_string()).and_then(|()| {
                    let arena = memory.arena().map_err(|error| error.to_string())?;
                    let page = StatusPage::new(0).map_err(|error| error.to_string())?;
                    let pair = devices.pair(Some(&theirs.address)).map_err(|error| error.to_string())?;
                    let regions = Regions::open(now, pair, page, Some(arena));
                    let mut regions = regions.map_err(|error| error.to_string())?;
                    regions.accept(false, theirs).map_err(|error| error.to_string())?;
                    Ok(regions)
                });
                match opened {
                    Ok(regions) => {
                        self.send_setup(&SetupFrame::Accept(regions.offer().clone()));
                        self.regions =
                            Some(Box::new(SharedRegions { regions, sends: false, receives: false }));
                    }
                    Err(reason) => {
                        self.send_setup(&SetupFrame::Refused(reason.clone()));
                        self.go_inline(&reason);
                    }
                }
                Ok(None)
            }
            (SetupFrame::Accept(theirs), Some(shared)) if !is_sender && !shared.sends => {
                match shared.regions.accept(true, theirs) {
                    Ok(()) => Ok(None),
                    Err(error) => self.refuse(&error.to_string()),
                }
            }
            (SetupFrame::Ready, Some(shared)) => {
                shared.receives = true;
                self.regions_changed();
                Ok(None)
            }
            // This end may have given up meanwhile.
            (SetupFrame::Ready, None) => Err("it shares regions that were refused".to_owned()),
            (SetupFrame::Refused(reason), _) => self.give_up(&reason),
            _ => Err("it broke the protocol: regions out of turn".to_owned()),
        }
    }

    fn refuse(&mut self, reason: &str) -> Result<Option<Box<SharedRegions<D>>>, String> {
        let given_up = self.give_up(reason)?;
        self.send_setup(&SetupFrame::Refused(reason.to_owned()));
        Ok(given_up)
    }

    /// Goes on with setting up. Returns regions that are to be dropped.
    pub(crate) fn advance_setup(&mut self, now: Nanos) -> Result<Option<Box<SharedRegions<D>>>, String> {
        let Some(shared) = &mut self.regions else { return Ok(None) };
        if shared.sends {
            return Ok(None);
        }
        match shared.regions.set_up(now) {
            Ok(false) => return Ok(None),
            Ok(true) => {}
            Err(error) => return self.refuse(&error.to_string()),
        }
        if let LinkSide::Receiver(side) = &mut self.side {
            let Some((number, mapping)) = shared.regions.arena() else {
                return self.refuse("it lends no memory");
            };
            let added = side.calls.add_region(RegionKey(*number), mapping.len() as u64);
            added.map_err(|error| error.to_string())?;
            // Told on the connection, before "ready".
            let told = side.page.clone().map_or_else(Vec::new, |page| side.returns.share(page));
            for (slot, counter) in told {
                let message = Message::Returned { slot, counter };
                self.connection.queue(FrameKind::Message, &message.encode());
            }
        }
        self.send_setup(&SetupFrame::Ready);
        if let Some(shared) = &mut self.regions {
            shared.sends = true;
        }
        self.regions_changed();
        Ok(None)
    }

    fn regions_changed(&mut self) {
        if let (Some(shared), LinkSide::Receiver(side)) = (&self.regions, &mut self.side)
            && shared.sends
            && shared.receives
        {
            tracing::debug!(peer = &*self.peer, "tensors come in place");
            side.decide(Ok(TensorWay::InPlace));
        }
    }

    /// Carries out an event of the calls of this link. Returns a tensor that is to be got.
    pub(crate) fn call_event(&mut self, event: CallEvent) -> Result<Option<GetRequest>, String> {
        let LinkSide::Receiver(side) = &mut self.side else { return Ok(None) };
        match event {
            CallEvent::Post(message) => self.send(&message).map_err(|error| error.to_string())?,
            CallEvent::Skip { bytes } => self.connection.skip(bytes),
            CallEvent::Failed { call, error } => side.end_call(call, Err(error.into())),
            CallEvent::Inline { call, lease, bytes, description } => {
                let shape = shape_of(&description, bytes)?;
                let Some(receive) = side.waiting.remove(&call) else {
                    lease.decline();
                    self.connection.skip(bytes);
                    return Ok(None);
                };
                side.incoming = Some(IncomingTensor { receive, lease, shape });
                self.connection.expect(bytes).map_err(|end| end.to_string())?;
            }
            CallEvent::Lent { call, lease, description } => {
                let (slice, hold) = (lease.slice(), side.hold.upgrade());
                let shape = shape_of(&description, slice.len)?;
                if slice.offset % ALIGNMENT != 0 {
                    return Err(format!("it lends a tensor at byte {} of its memory", slice.offset));
                }
                if let Some(pair) = &self.pair {
                    return request_get(pair, side, call, lease, shape);
                }
                let Some(_link) = hold else {
                    // Nobody uses the link any more, so nobody waits.
                    lease.decline();
                    return Ok(None);
                };
                let shared = self.regions.as_ref().and_then(|shared| shared.regions.arena());
                let Some((_, mapping)) = shared else {
                    return Err("it lends memory that is not mapped here".to_owned());
                };
                // The holder has checked that it is inside of the region.
                let start = slice.offset as usize;
                let range = start..start + slice.len as usize;
                let mapped = ReceivedBytes::Mapped { mapping: mapping.clone(), range, lease, _link };
                let tensor = ReceivedTensor::new(mapped, shape);
                side.end_call(call, Ok(Arrived::new(tensor)));
            }
        }
        Ok(None)
    }
}

/// The get of what was lent to a call.
fn request_get(
    pair: &LinkPair,
    side: &mut ReceiverSide,
    call: u64,
    lease: Lease,
    shape: TensorShape,
) -> Result<Option<GetRequest>, String> {
    let src = pair.registered.of(lease.slice()).ok_or("it lends memory that it has not registered")?;
    let Some(receive) = side.waiting.remove(&call) else {
        lease.decline();
        return Ok(None);
    };
    Ok(Some(GetRequest { device: pair.device, rank: pair.rank, receive, lease, shape, src }))
}

fn shape_of(description: &Description, bytes: u64) -> Result<TensorShape, String> {
    let shape = TensorShape::of(description, bytes);
    shape.ok_or_else(|| format!("it describes {bytes} bytes as what they cannot be"))
}
