//! Memory that the two ends of a link share: messages without system calls, and tensors in place.
//!
//! Each end has a device of two ranks, itself and the peer: the dialer is rank 1. An end registers
//! an *inbox*, into which the peer puts messages, and a *status page*, which the peer only reads:
//! whether this end sleeps, how many messages it has consumed, and its counters of returned leases.
//! The sender's end lends its arena besides.
//!
//! Message `n` goes to place `n` modulo [`PLACES`] of the inbox, and its signal to the signal slot
//! of that number. So messages are taken in their order, whatever order the fabric has.
//!
//! **Invariant:** a place is written again only when the peer has consumed it. A message is copied
//! out before it is decoded, so a peer that writes meanwhile changes nothing that was checked. An
//! end that sleeps has said so before it looked at its inbox for the last time.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::shm::ShmDevice;
use pleach_transport::wire::{Malformed, Reader, Writer};
use pleach_transport::{
    Address, Device, DeviceConfig, Event, Inline, LossCause, MESSAGE_BYTES_MAX, MapError, Nanos, Rank,
    ReadOnlyMapped, Region, RegionKey, RemoteSlice, Responder, SharedMemory, Signal, Signals, Source,
    Transfer, TransferId,
};

use super::memory::{MappedWords, PageWords};

/// Messages in an inbox.
const PLACES: usize = 32;

/// The length of a place, in bytes: the length of the message, and the message.
const PLACE_BYTES: usize = (8 + MESSAGE_BYTES_MAX).next_multiple_of(64);

/// Messages that wait for a place. A peer that causes more and consumes none is lost.
const WAITING_MAX: usize = 1 << 14;

/// How long setting up may take.
const SETUP_LIMIT: Duration = Duration::from_secs(5);

/// Between two looks at what a device sets up, and at a peer that has no place free.
pub(crate) const POLL_PAUSE: Duration = Duration::from_millis(1);

/// The words of a status page. Each has a cache line of its own.
const ASLEEP: usize = 0;
const CONSUMED: usize = 8;
const RETURNED: usize = 16;
const COUNTERS: usize = 24;

/// The first bytes of the frames by which regions are set up.
const OFFER: u8 = 1;
const ACCEPT: u8 = 2;
const READY: u8 = 3;
const REFUSED: u8 = 4;

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
}

/// What an end tells of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionOffer {
    pub(crate) address: Address,
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
        };
        writer.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Reader::new(bytes);
        let frame = match fields.u8()? {
            OFFER => Self::Offer(RegionOffer::read(&mut fields)?),
            ACCEPT => Self::Accept(RegionOffer::read(&mut fields)?),
            READY => Self::Ready,
            REFUSED => Self::Refused(fields.text_to_end(TEXT_BYTES_MAX)?.replace(char::is_control, " ")),
            _ => return Err(Malformed),
        };
        fields.end()?;
        Ok(frame)
    }
}

impl RegionOffer {
    fn write(&self, writer: Writer) -> Writer {
        let slices = [self.inbox, self.page, self.arena.1];
        let words = slices.iter().flat_map(|slice| [slice.key.0, slice.offset, slice.len]);
        words.chain([self.arena.0]).fold(writer, Writer::u64).raw(self.address.0.as_bytes())
    }

    fn read(fields: &mut Reader<'_>) -> Result<Self, Malformed> {
        let mut slice =
            || Ok(RemoteSlice { key: RegionKey(fields.u64()?), offset: fields.u64()?, len: fields.u64()? });
        let (inbox, page, arena) = (slice()?, slice()?, slice()?);
        let arena = (fields.u64()?, arena);
        let address = Address(fields.text_to_end(TEXT_BYTES_MAX)?.to_owned());
        Ok(Self { address, inbox, page, arena })
    }
}

/// Nobody sends messages by the control plane of these devices.
struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
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
        Ok(Arc::new(Self { words: PageWords::new(COUNTERS + slots as usize)? }))
    }

    /// Stores the counter of a lease's slot.
    pub(crate) fn store_counter(&self, slot: u32, count: u64) {
        self.words.store(COUNTERS + slot as usize, count);
        self.words.add(RETURNED, 1);
    }
}

/// One end of the regions of a link.
pub(crate) struct Regions {
    device: ShmDevice,
    peer: Rank,
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
    waiting: VecDeque<Vec<u8>>,
    /// The sleep of the peer for which it was woken.
    woken: u64,
    /// The peer's returns that were seen.
    returned: u64,
    events: Vec<Event>,
}

struct TheirRegions {
    inbox: RemoteSlice,
    page: MappedWords,
    arena: Option<(u64, ReadOnlyMapped)>,
}

impl Regions {
    /// This end: rank 1 is the dialer. `arena`: what is lent.
    pub(crate) fn open(
        now: Nanos,
        is_dialer: bool,
        page: Arc<StatusPage>,
        arena: Option<(u64, Arc<SharedMemory>)>,
    ) -> Result<Self, RegionsError> {
        let (rank, peer) = if is_dialer { (1, 0) } else { (0, 1) };
        let mut device = ShmDevice::new(DeviceConfig {
            rank,
            world_size: 2,
            // The kernel says that the other end is of the same user.
            secret: None,
            signal_slots: PLACES,
            connect_timeout: SETUP_LIMIT,
            interface: None,
            address: None,
            responder: Arc::new(Silent),
        })?;
        let inbox = device.register_for(peer, SharedMemory::new(PLACES * PLACE_BYTES)?)?;
        // The peer sees there what it is sent.
        let staging = device.register_for(peer, SharedMemory::lendable(PLACES * PLACE_BYTES)?)?;
        let mut registered = Vec::new();
        let mut lent = (0, RemoteSlice { key: RegionKey::NONE, offset: 0, len: 0 });
        if let Some((number, memory)) = arena {
            let region = device.register_for(peer, memory)?;
            lent = (number, region.remote());
            registered.push(region);
        }
        // The last one: when the peer has mapped it, it knows the others too.
        let page_region = device.register_for(peer, page.words.memory())?;
        let address = device.info().address.clone();
        let offer = RegionOffer { address, inbox: inbox.remote(), page: page_region.remote(), arena: lent };
        registered.push(page_region);
        Ok(Self {
            signals: device.signal_slots(peer),
            device,
            peer,
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
            waiting: VecDeque::new(),
            woken: 0,
            returned: 0,
            events: Vec::with_capacity(16),
        })
    }

    /// What the other end needs to know.
    pub(crate) fn offer(&self) -> &RegionOffer {
        &self.offer
    }

    /// The other end's device and regions.
    pub(crate) fn accept(&mut self, theirs: RegionOffer) -> Result<(), RegionsError> {
        if theirs.inbox.len < (PLACES * PLACE_BYTES) as u64 || theirs.page.len < (COUNTERS * 8) as u64 {
            return Err(RegionsError::Short);
        }
        self.device.connect(self.peer, &theirs.address)?;
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
        let page = match self.device.map_read_only(self.peer, &accepted.page) {
            Ok(page) => MappedWords::new(page),
            // Its announcement is on its way.
            Err(MapError::Unknown { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        let (number, slice) = accepted.arena;
        let arena = match slice.len {
            0 => None,
            _ => Some((number, self.device.map_read_only(self.peer, &slice)?)),
        };
        self.theirs = Some(TheirRegions { inbox: accepted.inbox, page, arena });
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
            self.device.submit(self.peer, transfer, TransferId(self.sent))?;
            self.sent += 1;
            self.waiting.pop_front();
            has_sent = true;
        }
        if self.waiting.len() > WAITING_MAX {
            return Err(RegionsError::Stuck);
        }
        Ok(has_sent && self.must_wake())
    }

    /// Whether the peer sleeps, and was not woken from this sleep.
    fn must_wake(&mut self) -> bool {
        let Some(theirs) = &self.theirs else { return false };
        // Partner: the fence in `sleep`.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let asleep = theirs.page.load(ASLEEP);
        let must = asleep % 2 == 1 && asleep != self.woken;
        if must {
            self.woken = asleep;
        }
        must
    }

    /// Whether messages wait for a place, or the set-up goes on: then this end must look again
    /// soon.
    pub(crate) fn must_poll(&self) -> bool {
        self.theirs.is_none() || !self.waiting.is_empty()
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

    /// This end sleeps from now on, unless a message has come: then false. The number of the sleep
    /// is odd.
    pub(crate) fn sleep(&mut self) -> bool {
        // Another sleep than the last one, for which the peer may have woken this end already.
        let asleep = self.page.words.load(ASLEEP);
        self.page.words.store(ASLEEP, (asleep + 1) | 1);
        // Partner: the fence in `must_wake`.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        !self.has_message()
    }

    /// This end no longer sleeps.
    pub(crate) fn wake_up(&mut self) {
        let asleep = self.page.words.load(ASLEEP);
        if asleep % 2 == 1 {
            self.page.words.store(ASLEEP, asleep + 1);
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
        self.theirs.as_ref().map_or(0, |theirs| theirs.page.load(COUNTERS + slot as usize))
    }

    /// Whether the peer's process may run and read what it has mapped.
    pub(crate) fn may_read(&self) -> bool {
        self.device.may_map(self.peer)
    }

    /// Polls the device.
    pub(crate) fn poll(&mut self, now: Nanos) -> Result<(), RegionsError> {
        self.device.poll(now, &mut self.events);
        for event in std::mem::take(&mut self.events) {
            match event {
                Event::Connected { .. } => self.is_connected = true,
                Event::PeerLost { cause, .. } => return Err(RegionsError::Lost(cause)),
                Event::Done { result: Err(error), .. } => return Err(error.into()),
                Event::Done { .. } | Event::Departed { .. } | Event::Severed { .. } => {}
            }
        }
        self.events.reserve(16);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both ends, set up.
    fn pair() -> [Regions; 2] {
        let open = |is_dialer| {
            let page = StatusPage::new(4).expect("there is memory");
            Regions::open(Nanos(0), is_dialer, page, None).expect("a device")
        };
        let mut ends = [open(false), open(true)];
        let [listener, dialer] = ends.each_ref().map(|end| end.offer().clone());
        ends[0].accept(dialer).expect("a good address");
        ends[1].accept(listener).expect("a good address");
        while !ends.each_mut().map(|end| end.set_up(Nanos(1)).expect("connects")).iter().all(|done| *done) {
            std::thread::yield_now();
        }
        ends
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
    fn a_step_of_the_set_up_survives_the_wire_and_no_beginning_of_it_is_taken() {
        let slice = |key| RemoteSlice { key: RegionKey(key), offset: key + 1, len: key + 2 };
        let address = Address("shm:x".to_owned());
        let offer = RegionOffer { address, inbox: slice(1), page: slice(4), arena: (9, slice(7)) };
        for frame in [SetupFrame::Offer(offer.clone()), SetupFrame::Accept(offer), SetupFrame::Ready] {
            let bytes = frame.encode();
            assert_eq!(SetupFrame::decode(&bytes), Ok(frame.clone()));
            for end in 0..bytes.len() {
                assert_ne!(SetupFrame::decode(&bytes[..end]), Ok(frame.clone()));
            }
        }
        let refused = SetupFrame::Refused("no\nroom".to_owned()).encode();
        assert_eq!(SetupFrame::decode(&refused), Ok(SetupFrame::Refused("no room".to_owned())));
        for bytes in [&[][..], &[9], &[READY, 0]] {
            assert_eq!(SetupFrame::decode(bytes), Err(Malformed));
        }
    }
}
