//! A few ranks on a simulated fabric, and the loop that drives them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_transport::sim::{Faults, Mutant, Network, Options, SimDevice, World};
use pleach_transport::{
    Device, DeviceConfig, Event, Inline, LossCause, Rank, Region, RemoteSlice, Responder, SharedMemory,
    Signal, Slice, Source, SubmitError, Submitted, Transfer, TransferError, TransferId,
};

/// What a test has a device do: a transfer, or a signal alone.
#[derive(Clone, Debug)]
pub(crate) enum Submission {
    Signal(Signal),
    Transfer(Transfer),
}

impl From<Transfer> for Submission {
    fn from(transfer: Transfer) -> Self {
        Self::Transfer(transfer)
    }
}

impl Submission {
    pub(crate) fn submit(
        self,
        device: &mut (impl Device + ?Sized),
        peer: Rank,
        id: TransferId,
    ) -> Result<Submitted, SubmitError> {
        match self {
            Self::Signal(signal) => device.signal(peer, &signal, id),
            Self::Transfer(transfer) => device.submit(peer, transfer, id),
        }
    }
}

pub(crate) const LATENCY: Duration = Duration::from_micros(2);
pub(crate) const GB_PER_S: u64 = 1_000_000_000;
pub(crate) const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

/// How many events a simulation may take before it counts as hung.
const EVENTS_MAX: u64 = 1_000_000;

/// Keeps what it is told and answers every message that begins with a question mark.
#[derive(Default)]
pub(crate) struct Listener {
    pub(crate) heard: Mutex<Vec<(Rank, Vec<u8>)>>,
    pub(crate) lost: Mutex<Vec<(Rank, LossCause)>>,
}

impl Responder for Listener {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.heard.lock().unwrap().push((from, message.to_vec()));
        (message.first() == Some(&b'?')).then(|| b"!".to_vec())
    }

    fn lost(&self, peer: Rank, cause: &LossCause) {
        self.lost.lock().unwrap().push((peer, cause.clone()));
    }
}

pub(crate) struct Ranks {
    pub(crate) world: World,
    pub(crate) devices: Vec<Option<SimDevice>>,
    pub(crate) listeners: Vec<Arc<Listener>>,
    pub(crate) events: Vec<Vec<Event>>,
    next: u64,
}

pub(crate) fn options(ranks: u32, seed: u64) -> Options {
    Options::new(Network::full_mesh(ranks, GB_PER_S, LATENCY), seed)
}

pub(crate) fn harsh(ranks: u32, seed: u64) -> Options {
    let mut options = options(ranks, seed);
    options.faults = Faults {
        delay_per_million: 100_000,
        delay: Duration::from_micros(300),
        reorder: Duration::from_micros(20),
        pieces: 6,
        queue_depth: None,
        severance: Duration::from_micros(30),
        detection: Duration::from_millis(1),
        timed: Vec::new(),
    };
    options.passive = seed.is_multiple_of(2);
    options
}

/// A world that may break the contract.
#[allow(unsafe_code)]
pub(crate) fn mutated(mutant: Option<Mutant>, options: Options) -> Options {
    // SAFETY: these tests touch registered memory by slices alone.
    Options { mutant: mutant.map(|mutant| unsafe { mutant.allow() }), ..options }
}

impl Ranks {
    /// Makes the devices; nobody connects.
    pub(crate) fn alone(options: Options) -> Self {
        let count = options.network.ranks();
        let world = World::new(options);
        let listeners: Vec<Arc<Listener>> = (0..count).map(|_| Arc::default()).collect();
        let devices = (0..count)
            .map(|rank| {
                Some(world.device(DeviceConfig {
                    rank,
                    world_size: count,
                    secret: None,
                    signal_slots: 16,
                    connect_timeout: CONNECT_TIMEOUT,
                    interface: None,
                    address: None,
                    responder: listeners[rank as usize].clone(),
                }))
            })
            .collect();
        let events = (0..count).map(|_| Vec::new()).collect();
        Self { world, devices, listeners, events, next: 0 }
    }

    /// Starts to connect everybody with everybody.
    pub(crate) fn connecting(options: Options) -> Self {
        let mut ranks = Self::alone(options);
        let count = ranks.devices.len() as Rank;
        for rank in 0..count {
            for peer in (0..count).filter(|&peer| peer != rank) {
                let address = ranks.device(peer).info().address.clone();
                ranks.device(rank).connect(peer, &address).expect("a peer of this world");
            }
        }
        ranks
    }

    /// Everybody is connected with everybody.
    pub(crate) fn connected(options: Options) -> Self {
        let mut ranks = Self::connecting(options);
        let pairs = ranks.devices.len() * (ranks.devices.len() - 1);
        ranks.until(|ranks| {
            let connected = |event: &&Event| matches!(event, Event::Connected { .. });
            ranks.events.iter().flatten().filter(connected).count() == pairs
        });
        ranks.events.iter_mut().for_each(Vec::clear);
        ranks
    }

    pub(crate) fn device(&mut self, rank: Rank) -> &mut SimDevice {
        self.devices[rank as usize].as_mut().expect("its device was not dropped")
    }

    pub(crate) fn register(&mut self, rank: Rank, len: usize) -> Region {
        self.device(rank).register(SharedMemory::new(len).expect("memory")).expect("registered")
    }

    pub(crate) fn poll(&mut self, rank: Rank) {
        let now = self.world.now();
        if let Some(device) = &mut self.devices[rank as usize] {
            let mut events = Vec::with_capacity(3);
            device.poll(now, &mut events);
            assert!(events.len() <= 3, "poll grew the vector");
            self.events[rank as usize].append(&mut events);
        }
    }

    /// One round of the driver; false when nothing will happen any more.
    pub(crate) fn step(&mut self) -> bool {
        let woken = self.world.take_woken();
        for &rank in &woken {
            self.poll(rank);
        }
        // Who was left something by its poll is polled again before time goes on.
        !woken.is_empty() || self.world.advance(None)
    }

    pub(crate) fn until(&mut self, condition: impl Fn(&mut Self) -> bool) {
        let first = self.world.events();
        while !condition(self) {
            assert!(self.step(), "nothing will happen any more at {}", self.world.now());
            assert!(self.world.events() - first < EVENTS_MAX, "too many events");
        }
    }

    /// Until nothing will happen any more.
    pub(crate) fn drain(&mut self) {
        let first = self.world.events();
        while self.step() {
            assert!(self.world.events() - first < EVENTS_MAX, "too many events");
        }
    }

    pub(crate) fn try_submit(
        &mut self,
        rank: Rank,
        peer: Rank,
        what: impl Into<Submission>,
    ) -> Result<TransferId, SubmitError> {
        let id = TransferId(self.next);
        if let Submitted::Ended(value) = what.into().submit(self.device(rank), peer, id)? {
            self.events[rank as usize].push(Event::Done { id, result: Ok(value) });
        }
        self.next += 1;
        Ok(id)
    }

    pub(crate) fn submit(&mut self, rank: Rank, peer: Rank, what: impl Into<Submission>) -> TransferId {
        self.try_submit(rank, peer, what).expect("accepted")
    }

    pub(crate) fn done(&self, rank: Rank, id: TransferId) -> Option<Result<u64, TransferError>> {
        let mut results = self.events[rank as usize].iter().filter_map(|event| match event {
            Event::Done { id: done, result } if *done == id => Some(result.clone()),
            _ => None,
        });
        let result = results.next();
        assert!(results.next().is_none(), "{id:?} is done twice");
        result
    }

    pub(crate) fn saw(&self, rank: Rank, wanted: &Event) -> bool {
        self.events[rank as usize].contains(wanted)
    }

    pub(crate) fn lost(&self, rank: Rank, peer: Rank) -> Option<LossCause> {
        let mut causes = self.events[rank as usize].iter().filter_map(|event| match event {
            Event::PeerLost { peer: lost, cause } if *lost == peer => Some(cause.clone()),
            _ => None,
        });
        let cause = causes.next();
        assert!(causes.next().is_none(), "rank {rank} loses rank {peer} twice");
        cause
    }

    pub(crate) fn count(&mut self, rank: Rank, from: Rank, signal_slot: u16) -> u64 {
        self.device(rank).signal_slots(from).count(signal_slot)
    }
}

pub(crate) fn put(src: &Slice, dst: RemoteSlice, signal_slot: u16) -> Transfer {
    Transfer::Put { src: Source::Slice(src.clone()), dst, signal: Some(signal(signal_slot)) }
}

pub(crate) fn signal(signal_slot: u16) -> Signal {
    Signal { signal_slot, payload: Inline::EMPTY }
}
