//! Memory that the two ends of a link share: messages without system calls, and tensors in place.
//!
//! Each end has a pair of its endpoint's device ([`DevicePair`]). An end registers for its peer an
//! *inbox*, into which the peer puts messages, and a *status page*, which the peer only reads:
//! whether this end sleeps, how many messages it has consumed, and its counters of returned leases.
//! The sender's end lends its arena besides.
//!
//! Message `n` goes to place `n` modulo [`PLACES`] of the inbox, and its signal to the signal slot
//! of that number. So messages are taken in their order, whatever order the fabric has.
//!
//! **Invariant:** a place is written again only when the peer has consumed it. A message is copied
//! out before it is decoded, so a peer that writes meanwhile changes nothing that was checked. An
//! end that sleeps has said so before it looked at its inbox for the last time. The other end looks
//! whether it sleeps after each message has arrived, also one that the device carries out later.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::shm::ShmDevice;
use pleach_transport::wire::{Malformed, Reader, Writer};
use pleach_transport::{
    Address, Event, Inline, LossCause, MESSAGE_BYTES_MAX, MapError, Meeting, Nanos, Rank, ReadOnlyMapped,
    Region, RegionKey, RemoteSlice, SharedMemory, Signal, Signals, Source, SubmitError, Submitted, Transfer,
    sleep,
};
use pleach_vocabulary::Fabric;

use super::memory::{MappedWords, PageWords};
use super::pair::{DevicePair, MappingDevice};
use super::returns::{ReturnPage, publish_return};
use crate::arena::ALIGNMENT;
use crate::gathered::RegisteredPart;
use crate::reference::LeaseNumber;

/// Messages in an inbox.
pub(crate) const PLACES: usize = 32;

/// The length of a place, in bytes: the length of the message, and the message.
const PLACE_BYTES: usize = (8 + MESSAGE_BYTES_MAX).next_multiple_of(64);

/// Messages that wait for a place. A peer that causes more and consumes none is lost.
const WAITING_MAX: usize = 1 << 14;

/// How long setting up may take.
pub(crate) const SETUP_LIMIT: Duration = Duration::from_secs(5);

/// Between two looks at what a device sets up, and at a peer that has no place free.
pub(crate) const POLL_PAUSE: Duration = Duration::from_millis(1);

/// The words of a status page. Each of the first has a cache line of its own. Behind them are two
/// words for each slot of leases: the counter, and the lease that is held when the end has closed.
const ASLEEP: usize = 0;
const CONSUMED: usize = 8;
const RETURNED: usize = 16;
const CLOSED: usize = 24;
const SLOTS: usize = 32;
const COUNTER: usize = 0;
const HELD: usize = 1;

/// The word of a slot.
fn word_of(slot: u32, which: usize) -> usize {
    SLOTS + 2 * slot as usize + which
}

/// The first bytes of the frames by which regions are set up.
const OFFER: u8 = 1;
const ACCEPT: u8 = 2;
const READY: u8 = 3;
const REFUSED: u8 = 4;
const OFFER_GETS: u8 = 5;
const ACCEPT_GETS: u8 = 6;
const REGISTERED: u8 = 7;

/// Fabrics of gets, by their numbers on the wire.
const GET_FABRICS: [Fabric; 2] = [Fabric::Tcp, Fabric::Verbs];

/// A step of the set-up, as a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SetupFrame {
    /// The dialer's device and regions.
    Offer(RegionOffer),
    /// Those of the listener.
    Accept(RegionOffer),
    /// The messages of the sender of this frame come by regions from now on.
    Ready,
    /// There will be no regions.
    Refused(String),
    /// The dialer can get tensors by this fabric.
    OfferGets(Fabric),
    /// The listener's device, the rank that it gives to the dialer's, and the arena that it lends:
    /// its number and its length.
    AcceptGets { address: Address, rank: Rank, arena: (u64, u64) },
    /// The part of the listener's arena in which the next leases are.
    Registered(RegisteredPart),
}

/// What an end tells of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionOffer {
    pub(crate) address: Address,
    /// The rank that it gives to the other end.
    pub(crate) rank: Rank,
    pub(crate) inbox: RemoteSlice,
    pub(crate) page: RemoteSlice,
    /// The arena whose tensors are lent, by its number; without one its length is zero.
    pub(crate) arena: (u64, RemoteSlice),
}

/// Longest text of a frame.
const TEXT_BYTES_MAX: usize = 1024;

impl SetupFrame {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let kind = |kind: u8| Writer::default().u8(kind);
        let writer = match self {
            Self::Offer(offer) => offer.write(kind(OFFER)),
            Self::Accept(offer) => offer.write(kind(ACCEPT)),
            Self::Ready => kind(READY),
            Self::Refused(reason) => {
                kind(REFUSED).raw(&reason.as_bytes()[..reason.floor_char_boundary(TEXT_BYTES_MAX)])
            }
            Self::OfferGets(fabric) => {
                let number =
                    GET_FABRICS.iter().position(|known| known == fabric).unwrap_or(GET_FABRICS.len());
                kind(OFFER_GETS).u8(number as u8)
            }
            Self::AcceptGets { address, rank, arena: (number, bytes) } => {
                let writer = kind(ACCEPT_GETS).u32(*rank).u64(*number).u64(*bytes);
                writer.raw(address.0.as_bytes())
            }
            Self::Registered(part) => write_slice(kind(REGISTERED).u64(part.start), &part.slice),
        };
        writer.finish()
    }

    /// Whether it is about gets, and not about memory that is mapped.
    pub(crate) fn is_about_gets(&self) -> bool {
        matches!(self, Self::OfferGets(_) | Self::AcceptGets { .. } | Self::Registered(_))
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Reader::new(bytes);
        let frame = match fields.u8()? {
            OFFER => Self::Offer(RegionOffer::read(&mut fields)?),
            ACCEPT => Self::Accept(RegionOffer::read(&mut fields)?),
            READY => Self::Ready,
            REFUSED => Self::Refused(fields.text_to_end(TEXT_BYTES_MAX)?.replace(char::is_control, " ")),
            OFFER_GETS => {
                let number = usize::from(fields.u8()?);
                Self::OfferGets(*GET_FABRICS.get(number).ok_or(Malformed)?)
            }
            ACCEPT_GETS => {
                let (rank, arena) = (fields.u32()?, (fields.u64()?, fields.u64()?));
                let address = Address(fields.text_to_end(TEXT_BYTES_MAX)?.to_owned());
                Self::AcceptGets { address, rank, arena }
            }
            REGISTERED => {
                let (start, slice) = (fields.u64()?, read_slice(&mut fields)?);
                Self::Registered(RegisteredPart { start, slice })
            }
            _ => return Err(Malformed),
        };
        fields.end()?;
        Ok(frame)
    }
}

fn write_slice(writer: Writer, slice: &RemoteSlice) -> Writer {
    writer.u64(slice.key.0).u64(slice.offset).u64(slice.len)
}

fn read_slice(fields: &mut Reader<'_>) -> Result<RemoteSlice, Malformed> {
    Ok(RemoteSlice { key: RegionKey(fields.u64()?), offset: fields.u64()?, len: fields.u64()? })
}

impl RegionOffer {
    fn write(&self, writer: Writer) -> Writer {
        let slices = [self.inbox, self.page, self.arena.1];
        let writer = slices.iter().fold(writer, write_slice);
        writer.u64(self.arena.0).u32(self.rank).raw(self.address.0.as_bytes())
    }

    fn read(fields: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (inbox, page, arena) = (read_slice(fields)?, read_slice(fields)?, read_slice(fields)?);
        let (arena, rank) = ((fields.u64()?, arena), fields.u32()?);
        let address = Address(fields.text_to_end(TEXT_BYTES_MAX)?.to_owned());
        Ok(Self { address, rank, inbox, page, arena })
    }
}

/// Why there are no regions, or no longer.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
pub(crate) enum RegionsError {
    #[error("there is no device ({0})")]
    Device(#[from] pleach_transport::shm::OpenError),
    #[error("memory cannot be shared ({0})")]
    Memory(#[from] io::Error),
    #[error("memory cannot be registered ({0})")]
    Register(#[from] pleach_transport::RegisterError),
    #[error("its memory cannot be mapped ({0})")]
    Map(#[from] MapError),
    #[error("the devices do not connect ({0})")]
    Connect(#[from] pleach_transport::ConnectError),
    #[error("{0}")]
    Lost(LossCause),
    #[error("it was not set up within {} s", SETUP_LIMIT.as_secs())]
    Late,
    #[error("its regions are too short")]
    Short,
    #[error("its memory does not begin at a multiple of {ALIGNMENT} bytes")]
    Misaligned,
    #[error("a message does not reach it ({0})")]
    Submit(#[from] pleach_transport::SubmitError),
    #[error("a message does not reach it ({0})")]
    Transfer(#[from] pleach_transport::TransferError),
    #[error("it consumes no messages")]
    Stuck,
    #[error("it breaks the protocol: a message of {0} bytes")]
    Length(u64),
}

/// This end's page of status words, which the peer reads.
pub(crate) struct StatusPage {
    words: PageWords,
}

impl StatusPage {
    pub(crate) fn new(slots: u32) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { words: PageWords::new(word_of(slots, 0))? }))
    }

    /// This end accepts no more leases. These are held.
    pub(crate) fn close(&self, held: impl Iterator<Item = LeaseNumber>) {
        for lease in held {
            self.words.store(word_of(lease.slot, HELD), lease.generation);
        }
        self.words.store(CLOSED, 1);
    }
}

impl ReturnPage for StatusPage {
    fn store_counter(&self, slot: u32, count: u64) {
        let [counter, returned] = [word_of(slot, COUNTER), RETURNED].map(|index| self.words.word(index));
        publish_return(counter, returned, count);
    }
}

/// One end of the regions of a link.
pub(crate) struct Regions<D: MappingDevice = ShmDevice> {
    offer: RegionOffer,
    page: Arc<StatusPage>,
    signals: Signals,
    /// Where the peer's messages come.
    inbox: Region,
    /// What the peer reads.
    _lent: Vec<Region>,
    /// Where messages lie while they are put.
    staging: Region,
    theirs: Option<TheirRegions>,
    accepted: Option<RegionOffer>,
    is_connected: bool,
    deadline: Nanos,
    /// Messages that were put, and that were taken.
    sent: u64,
    taken: u64,
    /// Messages that the device has accepted and not carried out.
    under_way: usize,
    waiting: VecDeque<Vec<u8>>,
    /// Wakes the peer.
    waker: sleep::Waker,
    /// The peer's returns that were seen.
    returned: u64,
    /// Dropped after all that is mapped and registered.
    pair: DevicePair<D>,
}

struct TheirRegions {
    inbox: RemoteSlice,
    page: MappedWords,
    arena: Option<(u64, ReadOnlyMapped)>,
}

impl<D: MappingDevice> Regions<D> {
    /// This end. `arena`: what is lent.
    pub(crate) fn open(
        now: Nanos,
        pair: DevicePair<D>,
        page: Arc<StatusPage>,
        arena: Option<(u64, Arc<SharedMemory>)>,
    ) -> Result<Self, RegionsError> {
        let inbox = pair.register(SharedMemory::new(PLACES * PLACE_BYTES)?)?;
        // The peer sees there what it is sent.
        let staging = pair.register(SharedMemory::lendable(PLACES * PLACE_BYTES)?)?;
        let mut registered = Vec::new();
        let mut lent = (0, RemoteSlice { key: RegionKey::NONE, offset: 0, len: 0 });
        if let Some((number, memory)) = arena {
            let region = pair.register(memory)?;
            lent = (number, region.remote());
            registered.push(region);
        }
        let page_region = pair.register(page.words.memory())?;
        let (address, rank) = (pair.address(), pair.rank());
        let (inbox_slice, page_slice) = (inbox.remote(), page_region.remote());
        let offer = RegionOffer { address, rank, inbox: inbox_slice, page: page_slice, arena: lent };
        registered.push(page_region);
        Ok(Self {
            signals: pair.signal_slots(),
            pair,
            offer,
            page,
            inbox,
            _lent: registered,
            staging,
            theirs: None,
            accepted: None,
            is_connected: false,
            deadline: now + SETUP_LIMIT,
            sent: 0,
            taken: 0,
            under_way: 0,
            waiting: VecDeque::new(),
            waker: sleep::Waker::default(),
            returned: 0,
        })
    }

    /// What the other end needs to know.
    pub(crate) fn offer(&self) -> &RegionOffer {
        &self.offer
    }

    /// The other end's device and regions. The dialer's end connects to it, and the other end waits
    /// for it.
    pub(crate) fn accept(&mut self, is_dialer: bool, theirs: RegionOffer) -> Result<(), RegionsError> {
        if theirs.inbox.len < (PLACES * PLACE_BYTES) as u64 || theirs.page.len < (SLOTS * 8) as u64 {
            return Err(RegionsError::Short);
        }
        let (address, own) = (&theirs.address, theirs.rank);
        self.pair.connect(if is_dialer { Meeting::Dial { address, own } } else { Meeting::Await })?;
        self.accepted = Some(theirs);
        Ok(())
    }

    /// Goes on with setting up. True: this end can send messages.
    pub(crate) fn set_up(&mut self, now: Nanos) -> Result<bool, RegionsError> {
        if self.theirs.is_some() {
            return Ok(true);
        }
        self.poll(now)?;
        if now >= self.deadline {
            return Err(RegionsError::Late);
        }
        let Some(accepted) = self.accepted.as_ref().filter(|_| self.is_connected) else { return Ok(false) };
        let (inbox, (number, slice)) = (accepted.inbox, accepted.arena);
        // The inbox is mapped to see that it is known: then a message goes there at once.
        let mut mapped = Vec::new();
        for slice in [accepted.page, inbox, slice].into_iter().filter(|slice| slice.len > 0) {
            match self.pair.map(&slice) {
                Ok(mapping) => mapped.push(mapping),
                // Its announcement is on its way.
                Err(MapError::Unknown { .. }) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        let mut mapped = mapped.into_iter();
        let page = MappedWords::new(mapped.next().ok_or(RegionsError::Short)?);
        let arena = mapped.nth(1).map(|arena| (number, arena));
        // Elements of tensors are aligned as far as their arena is.
        let is_aligned = |arena: &ReadOnlyMapped| (arena.as_ptr().addr() as u64).is_multiple_of(ALIGNMENT);
        if arena.as_ref().is_some_and(|(_, arena)| !is_aligned(arena)) {
            return Err(RegionsError::Misaligned);
        }
        self.theirs = Some(TheirRegions { inbox, page, arena });
        Ok(true)
    }

    /// The peer's arena: its number, and where it is mapped.
    pub(crate) fn arena(&self) -> Option<&(u64, ReadOnlyMapped)> {
        self.theirs.as_ref()?.arena.as_ref()
    }

    /// Sends a message. True: the peer sleeps, and must be woken.
    pub(crate) fn post(&mut self, message: Vec<u8>) -> Result<bool, RegionsError> {
        self.waiting.push_back(message);
        self.send_waiting()
    }

    /// Sends the messages for which there are places. True: the peer sleeps, and must be woken.
    pub(crate) fn send_waiting(&mut self) -> Result<bool, RegionsError> {
        let Some(theirs) = &self.theirs else { return Ok(false) };
        if self.waiting.is_empty() {
            return Ok(false);
        }
        let mut has_sent = false;
        let consumed = theirs.page.load(CONSUMED);
        while let Some(message) = self.waiting.front() {
            if self.sent.saturating_sub(consumed) >= PLACES as u64 {
                break;
            }
            let place = (self.sent % PLACES as u64) as usize;
            let (start, len) = (place * PLACE_BYTES, 8 + message.len());
            let staged = self.staging.slice(start..start + len).expect("inside of the staging memory");
            staged.slice(0..8).expect("inside").store(&(message.len() as u64).to_le_bytes());
            staged.slice(8..len).expect("inside").store(message);
            let dst = RemoteSlice {
                key: theirs.inbox.key,
                offset: theirs.inbox.offset + start as u64,
                len: len as u64,
            };
            let signal = Signal { signal_slot: place as u16, payload: Inline::EMPTY };
            let transfer = Transfer::Put { src: Source::Slice(staged), dst, signal: Some(signal) };
            match self.pair.submit(transfer) {
                Ok(Submitted::Ended(_)) => has_sent = true,
                Ok(Submitted::UnderWay) => self.under_way += 1,
                // Until the device has carried out some.
                Err(SubmitError::QueueFull { .. }) => break,
                Err(error) => return Err(error.into()),
            }
            self.sent += 1;
            self.waiting.pop_front();
        }
        if self.waiting.len() > WAITING_MAX {
            return Err(RegionsError::Stuck);
        }
        Ok(has_sent && self.must_wake())
    }

    /// Whether the peer sleeps, and was not woken from this sleep.
    fn must_wake(&mut self) -> bool {
        let Some(theirs) = &self.theirs else { return false };
        self.waker.must_wake(|| theirs.page.load(ASLEEP))
    }

    /// Whether messages wait for a place or are under way, or the set-up goes on: then this end
    /// must look again soon.
    pub(crate) fn must_poll(&self) -> bool {
        self.theirs.is_none() || !self.waiting.is_empty() || self.under_way > 0
    }

    /// The next message of the peer.
    pub(crate) fn next_message(&mut self) -> Result<Option<Vec<u8>>, RegionsError> {
        let (place, round) = ((self.taken % PLACES as u64) as usize, self.taken / PLACES as u64);
        if self.signals.count(place as u16) <= round {
            return Ok(None);
        }
        let start = place * PLACE_BYTES;
        let whole = self.inbox.slice(start..start + PLACE_BYTES).expect("inside of the inbox");
        let mut length = [0; 8];
        whole.load(&mut length);
        let length = u64::from_le_bytes(length);
        if length > MESSAGE_BYTES_MAX as u64 {
            return Err(RegionsError::Length(length));
        }
        let mut message = vec![0; length as usize];
        whole.slice(8..8 + length as usize).expect("inside").load(&mut message);
        self.taken += 1;
        self.page.words.store(CONSUMED, self.taken);
        Ok(Some(message))
    }

    /// Whether a message has come.
    pub(crate) fn has_message(&self) -> bool {
        let (place, round) = (self.taken % PLACES as u64, self.taken / PLACES as u64);
        self.signals.count(place as u16) > round
    }

    /// Whether a message has come, or a lease has come back.
    pub(crate) fn has_news(&self) -> bool {
        let has_returned = |theirs: &TheirRegions| theirs.page.load(RETURNED) != self.returned;
        self.has_message() || self.theirs.as_ref().is_some_and(has_returned)
    }

    /// This end sleeps from now on, unless a message has come: then false.
    pub(crate) fn sleep(&mut self) -> bool {
        let words = &self.page.words;
        sleep::announce(words.load(ASLEEP), |number| words.store(ASLEEP, number));
        !self.has_message()
    }

    /// This end no longer sleeps.
    pub(crate) fn wake_up(&mut self) {
        let words = &self.page.words;
        if let Some(number) = sleep::awake(words.load(ASLEEP)) {
            words.store(ASLEEP, number);
        }
    }

    /// Whether the peer has returned leases since the last call.
    pub(crate) fn has_returned(&mut self) -> bool {
        let Some(theirs) = &self.theirs else { return false };
        let returned = theirs.page.load(RETURNED);
        std::mem::replace(&mut self.returned, returned) != returned
    }

    /// The peer's counter of a lease's slot.
    pub(crate) fn counter(&self, slot: u32) -> u64 {
        self.theirs.as_ref().map_or(0, |theirs| theirs.page.load(word_of(slot, COUNTER)))
    }

    /// Whether the peer accepts no more leases.
    pub(crate) fn is_closed(&self) -> bool {
        self.theirs.as_ref().is_some_and(|theirs| theirs.page.load(CLOSED) != 0)
    }

    /// The lease of a slot that the peer holds, when it accepts no more.
    pub(crate) fn held(&self, slot: u32) -> u64 {
        self.theirs.as_ref().map_or(0, |theirs| theirs.page.load(word_of(slot, HELD)))
    }

    /// Whether the peer's process may run and read what it has mapped.
    pub(crate) fn may_read(&self) -> bool {
        self.pair.may_read()
    }

    /// Polls the device. True: a message has arrived while the peer sleeps, and it must be woken.
    pub(crate) fn poll(&mut self, now: Nanos) -> Result<bool, RegionsError> {
        let mut has_arrived = false;
        for event in self.pair.poll(now) {
            match event {
                Event::Connected { .. } => self.is_connected = true,
                Event::PeerLost { cause, .. } => return Err(RegionsError::Lost(cause)),
                Event::Done { result: Err(error), .. } => return Err(error.into()),
                Event::Done { .. } => {
                    self.under_way -= 1;
                    has_arrived = true;
                }
                Event::Departed { .. } | Event::Severed { .. } | Event::Drained { .. } => {}
            }
        }
        Ok(has_arrived && self.must_wake())
    }
}

#[cfg(test)]
mod tests {
    use pleach_transport::sim::{Network, World};

    use super::*;
    use crate::endpoint::pair::{PairedDevices, Pairs, config_of};
    use crate::endpoint::simulated::mapping_options;

    /// The devices of two endpoints.
    fn devices() -> [PairedDevices; 2] {
        [(); 2].map(|()| PairedDevices::new(PLACES, SETUP_LIMIT))
    }

    /// Both ends of a new link, set up.
    fn link(devices: &mut [PairedDevices; 2]) -> [Regions; 2] {
        let mut ends = devices.each_mut().map(|devices| {
            let page = StatusPage::new(4).expect("there is memory");
            Regions::open(Nanos(0), devices.pair(None).expect("a device"), page, None)
                .expect("there is memory")
        });
        let [listener, dialer] = ends.each_ref().map(|end| end.offer().clone());
        ends[0].accept(false, dialer).expect("a good address");
        ends[1].accept(true, listener).expect("a good address");
        while !ends.each_mut().map(|end| end.set_up(Nanos(1)).expect("connects")).iter().all(|done| *done) {
            std::thread::yield_now();
        }
        ends
    }

    fn pair() -> [Regions; 2] {
        link(&mut devices())
    }

    #[test]
    fn links_of_one_device_are_independent_and_come_and_go_for_ever() {
        let mut devices = devices();
        let [mut first, mut other_first] = link(&mut devices);
        for number in 0..150_u8 {
            let [mut one, mut other] = link(&mut devices);
            for (sender, receiver) in [(&mut one, &mut other), (&mut first, &mut other_first)] {
                sender.post(vec![number]).expect("the peer is there");
                assert_eq!(receiver.next_message().expect("is good"), Some(vec![number]));
                receiver.poll(Nanos(2)).expect("the peer is there");
            }
            // One end first, then the other.
            drop(if number % 2 == 0 { one } else { other });
        }
        first.post(vec![1]).expect("the peer is there");
        assert!(other_first.has_message());
    }

    #[test]
    fn messages_come_in_their_order_and_wait_for_places() {
        let [mut one, mut other] = pair();
        let message = |number: usize| vec![number as u8; 1 + number * 40 % MESSAGE_BYTES_MAX];
        let mut taken = 0;
        for number in 0..3 * PLACES {
            one.post(message(number)).expect("the peer is there");
            assert_eq!(one.must_poll(), number >= PLACES);
        }
        while taken < 3 * PLACES {
            match other.next_message().expect("is good") {
                Some(next) => {
                    assert_eq!(next, message(taken));
                    taken += 1;
                }
                None => drop(one.send_waiting().expect("the peer is there")),
            }
        }
        assert!(!one.must_poll() && !other.has_message());
    }

    #[test]
    fn each_sleep_of_an_end_is_ended_by_the_next_message_and_by_no_other() {
        let [mut one, mut other] = pair();
        assert!(!one.post(vec![1]).expect("the peer is there"), "nobody sleeps yet");
        assert!(!other.sleep(), "a message has come");
        other.next_message().expect("is good").expect("has come");
        assert!(other.sleep());
        assert!(one.post(vec![2]).expect("the peer is there"));
        assert!(!one.post(vec![3]).expect("the peer is there"), "it was woken already");
        for _ in 0..2 {
            other.next_message().expect("is good").expect("has come");
        }
        assert!(other.sleep(), "it sleeps anew, without having been awake in between");
        assert!(one.post(vec![4]).expect("the peer is there"), "this sleep is another one");
        other.next_message().expect("is good").expect("has come");
        other.wake_up();
        assert!(!one.post(vec![5]).expect("the peer is there"), "it is awake");
    }

    #[test]
    fn a_message_that_arrives_after_its_receiver_fell_asleep_wakes_it() {
        let latency = Duration::from_micros(2);
        let world = World::new(mapping_options(Network::full_mesh(2, 1_000_000_000, latency), 1));
        let mut ends = [0, 1].map(|rank| {
            let device = world.device(config_of(rank, 2, PLACES, SETUP_LIMIT));
            let (pair, page) =
                (DevicePair::only(device, 1 - rank), StatusPage::new(4).expect("there is memory"));
            Regions::open(world.now(), pair, page, None).expect("there is memory")
        });
        let [one, other] = ends.each_ref().map(|end| end.offer().clone());
        ends[0].accept(false, other).expect("a good address");
        ends[1].accept(true, one).expect("a good address");
        while !ends.each_mut().map(|end| end.set_up(world.now()).expect("connects")).iter().all(|done| *done)
        {
            world.advance(None);
        }
        let [mut sender, mut receiver] = ends;
        assert!(!sender.post(vec![7]).expect("the peer is there"), "it has not arrived, and nobody sleeps");
        assert!(sender.must_poll() && receiver.sleep(), "nothing has come yet");
        let mut has_woken = false;
        while sender.must_poll() {
            assert!(world.advance(None), "the message is under way");
            if sender.poll(world.now()).expect("the peer is there") {
                assert!(receiver.has_message(), "it is woken too early, and sleeps again");
                has_woken = true;
            }
        }
        assert!(has_woken, "the receiver sleeps until its deadline");
        assert_eq!(receiver.next_message().expect("is good"), Some(vec![7]));
    }

    #[test]
    fn a_step_of_the_set_up_survives_the_wire_and_no_beginning_of_it_is_taken() {
        let slice = |key| RemoteSlice { key: RegionKey(key), offset: key + 1, len: key + 2 };
        let address = Address("shm:x".to_owned());
        let offer = RegionOffer { address, rank: 5, inbox: slice(1), page: slice(4), arena: (9, slice(7)) };
        let gets = SetupFrame::AcceptGets { address: offer.address.clone(), rank: 3, arena: (9, 12) };
        for frame in [
            SetupFrame::Offer(offer.clone()),
            SetupFrame::Accept(offer),
            SetupFrame::Ready,
            SetupFrame::OfferGets(Fabric::Verbs),
            gets,
            SetupFrame::Registered(RegisteredPart { start: 64, slice: slice(5) }),
        ] {
            let bytes = frame.encode();
            assert_eq!(SetupFrame::decode(&bytes), Ok(frame.clone()));
            for end in 0..bytes.len() {
                assert_ne!(SetupFrame::decode(&bytes[..end]), Ok(frame.clone()));
            }
        }
        let refused = SetupFrame::Refused("no\nroom".to_owned()).encode();
        assert_eq!(SetupFrame::decode(&refused), Ok(SetupFrame::Refused("no room".to_owned())));
        for bytes in [&[][..], &[9], &[READY, 0], &[OFFER_GETS, 2]] {
            assert_eq!(SetupFrame::decode(bytes), Err(Malformed));
        }
    }
}
