//! A call that waits does not sleep over a message, whichever point of its loop the message comes
//! at.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use pleach_collectives::compute::HostCompute;
use pleach_collectives::engine::{StatusBoard, signal_slots};
use pleach_collectives::group::Connection;
use pleach_collectives::{Group, Options};
use pleach_schedule::cost::{CostModel, Platform};
use pleach_schedule::generate::Access;
use pleach_transport::hybrid::{HostId, HybridDevice};
use pleach_transport::rendezvous::World;
use pleach_transport::shm::ShmDevice;
use pleach_transport::{
    Address, Armed, ConnectError, Device, DeviceConfig, DeviceInfo, Event, Flush, Incarnation, MapError,
    Mapped, Meeting, Memory, Nanos, PostError, ReadOnlyMapped, Region, RegisterError, RemoteSlice, Secret,
    Signal, Signals, SubmitError, Submitted, Transfer, TransferId, Urgency, WakeSource, clock,
};
use pleach_vocabulary::Rank;

use super::PATIENCE;

/// Numbers of wake sources that were armed before the call that is looked at.
const BEFORE_THE_CALL: u32 = u32::MAX / 2;

/// Where in its loop the receiver is when the message comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// After the last look, before the wake source is armed.
    BeforeArming,
    /// The wake source is armed, but not looked at yet.
    AfterArming,
    /// In the call that sleeps, before the kernel compares the word.
    BeforeWaiting,
}

/// Has the peer send its message at one moment, and sees whether the receiver sleeps after it.
struct Interruption {
    moment: Moment,
    /// Which of the armed wake sources is the first that is meant.
    at: u32,
    armed: AtomicU32,
    /// The message is complete: it lies in a signal slot here, and the sender's call has returned.
    is_sent: AtomicBool,
    slept_on: AtomicBool,
    talk: Mutex<(Sender<()>, Receiver<()>)>,
}

impl Interruption {
    /// The receiver is at this point with its `number`th wake source.
    fn reach(&self, moment: Moment, number: u32) {
        let is_time = number >= self.at && number < BEFORE_THE_CALL;
        if moment == self.moment && is_time && !self.is_sent.load(Ordering::SeqCst) {
            let talk = self.talk.lock().unwrap_or_else(PoisonError::into_inner);
            talk.0.send(()).unwrap();
            talk.1.recv().unwrap();
            self.is_sent.store(true, Ordering::SeqCst);
        }
    }
}

/// The word of a wake source, which notes who sleeps on it.
struct Word {
    word: Arc<dyn AsRef<AtomicU32> + Send + Sync>,
    seen: u32,
    number: u32,
    interruption: Arc<Interruption>,
}

impl AsRef<AtomicU32> for Word {
    fn as_ref(&self) -> &AtomicU32 {
        self.interruption.reach(Moment::BeforeWaiting, self.number);
        let word = (*self.word).as_ref();
        // The kernel sleeps where the word holds what it held when armed.
        let sleeps = word.load(Ordering::SeqCst) == self.seen;
        if sleeps && self.interruption.is_sent.load(Ordering::SeqCst) {
            self.interruption.slept_on.store(true, Ordering::SeqCst);
        }
        word
    }
}

/// The device of the receiver.
struct Interrupted {
    inner: Box<dyn Device>,
    interruption: Arc<Interruption>,
}

// SAFETY: the device that it wraps keeps the contract.
#[allow(unsafe_code)]
unsafe impl Device for Interrupted {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.inner.register(memory)
    }
    fn register_for(&mut self, peer: Rank, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        self.inner.register_for(peer, memory)
    }
    fn map(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<Mapped, MapError> {
        self.inner.map(peer, slice)
    }
    fn map_read_only(&mut self, peer: Rank, slice: &RemoteSlice) -> Result<ReadOnlyMapped, MapError> {
        self.inner.map_read_only(peer, slice)
    }
    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.inner.connect(peer, address)
    }
    fn meet(&mut self, peer: Rank, meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.inner.meet(peer, meeting)
    }
    fn incarnation(&self, peer: Rank) -> Option<Incarnation> {
        self.inner.incarnation(peer)
    }
    fn sever(&mut self, peer: Rank) {
        self.inner.sever(peer);
    }
    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        self.inner.submit(peer, transfer, id)
    }
    fn signal(&mut self, peer: Rank, signal: &Signal, id: TransferId) -> Result<Submitted, SubmitError> {
        self.inner.signal(peer, signal, id)
    }
    fn drain(&mut self, peer: Rank) -> Result<(), SubmitError> {
        self.inner.drain(peer)
    }
    fn signal_slots(&self, peer: Rank) -> Signals {
        self.inner.signal_slots(peer)
    }
    fn post(&mut self, peer: Rank, message: &[u8], urgency: Urgency) -> Result<(), PostError> {
        self.inner.post(peer, message, urgency)
    }
    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        self.inner.poll(now, events);
    }
    fn arm(&mut self) -> Option<Armed> {
        let number = self.interruption.armed.fetch_add(1, Ordering::SeqCst) + 1;
        self.interruption.reach(Moment::BeforeArming, number);
        let armed = self.inner.arm();
        self.interruption.reach(Moment::AfterArming, number);
        let Some(Armed { wake_source: WakeSource::Word { word, seen }, until }) = armed else { return armed };
        let interruption = self.interruption.clone();
        let word = Arc::new(Word { word, seen, number, interruption });
        Some(Armed { wake_source: WakeSource::Word { word, seen }, until })
    }
    fn leave(&mut self) {
        self.inner.leave();
    }
    fn flush(&mut self, what: Flush) -> bool {
        self.inner.flush(what)
    }
}

fn config(rank: Rank, board: &Arc<StatusBoard>) -> DeviceConfig {
    DeviceConfig {
        rank,
        world_size: 2,
        secret: Some(Secret::new(b"known to both ends")),
        signal_slots: signal_slots(2),
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: board.clone(),
    }
}

fn connect(device: &mut dyn Device, peer: Rank, address: &Address) {
    device.connect(peer, address).unwrap();
    let deadline = clock::now() + PATIENCE;
    let mut events = Vec::with_capacity(16);
    while !events.iter().any(|event| matches!(event, Event::Connected { .. })) {
        assert!(clock::now() < deadline, "rank {peer} does not connect: {events:?}");
        device.poll(clock::now(), &mut events);
        thread::yield_now();
    }
}

fn group(device: Box<dyn Device>, board: Arc<StatusBoard>) -> Group {
    let connection = Connection {
        device,
        events: Vec::new(),
        board,
        platform: Platform::one_host(2, Access::Put, CostModel::LOOPBACK),
        ranks_a_processor: 1,
        store: None,
    };
    let mut options = Options::new(World::alone());
    options.timeout = PATIENCE;
    connection.into_group(Box::new(HostCompute::new()), &options).unwrap()
}

/// Whether a receiver slept on after a message that came at this moment of its loop.
fn sleeps_on(open: impl Fn(DeviceConfig) -> Box<dyn Device>, moment: Moment, at: u32) -> bool {
    let boards = [0, 1].map(|rank| Arc::new(StatusBoard::new(rank)));
    let [mut zero, mut one] = [0, 1].map(|rank: u32| open(config(rank, &boards[rank as usize])));
    let addresses = [zero.info().address.clone(), one.info().address.clone()];
    let (ask, asked) = channel();
    let (answer, answered) = channel();
    let interruption = Arc::new(Interruption {
        moment,
        at,
        armed: AtomicU32::new(BEFORE_THE_CALL),
        is_sent: AtomicBool::new(false),
        slept_on: AtomicBool::new(false),
        talk: Mutex::new((ask, answered)),
    });
    let [own_board, peer_board] = boards;
    let [own_address, peer_address] = addresses;
    let sender = thread::spawn(move || {
        connect(&mut *one, 0, &own_address);
        let group = group(one, peer_board);
        group.barrier().unwrap();
        asked.recv().unwrap();
        group.send(&[7_u64], 0).unwrap();
        answer.send(()).unwrap();
        group.barrier().unwrap();
    });
    connect(&mut *zero, 1, &peer_address);
    let group = group(Box::new(Interrupted { inner: zero, interruption: interruption.clone() }), own_board);
    group.barrier().unwrap();
    interruption.armed.store(0, Ordering::SeqCst);
    let mut data = [0_u64; 1];
    group.recv(&mut data, 1).unwrap();
    assert_eq!(data, [7]);
    let slept_on = interruption.slept_on.load(Ordering::SeqCst);
    group.barrier().unwrap();
    sender.join().unwrap();
    slept_on
}

fn no_moment_is_slept_over(name: &str, open: impl Fn(DeviceConfig) -> Box<dyn Device>) {
    for moment in [Moment::BeforeArming, Moment::AfterArming, Moment::BeforeWaiting] {
        for at in [1, 2, 3] {
            let slept_on = sleeps_on(&open, moment, at);
            assert!(!slept_on, "{name}: a message that came {moment:?}, wake source {at}, was slept over");
        }
    }
}

#[test]
fn a_message_at_each_point_of_the_loop_is_not_slept_over() {
    no_moment_is_slept_over("shm", |config| Box::new(ShmDevice::new(config).unwrap()));
    no_moment_is_slept_over("shm+tcp", |config| {
        let host = HostId::new(0, None);
        Box::new(HybridDevice::new(config, host, &[host; 2]).unwrap())
    });
}
