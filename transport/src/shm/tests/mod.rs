//! Tests of errors that only shared memory can have: lying peers, stopped and killed processes,
//! objects that are left behind.

mod bye;
mod data_path;
mod hostile;
mod processes;
mod set_up;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::ShmDevice;
use crate::clock;
use crate::device::{Device, DeviceConfig, Event, LossCause, Responder, Submitted, Transfer, TransferId};
use crate::memory::SharedMemory;
use crate::region::Region;
use crate::{Rank, Secret};

/// How long a test waits for anything. The time is long because machines may be loaded.
const PATIENCE: Duration = Duration::from_secs(60);

/// Keeps the messages that came.
#[derive(Default)]
struct Inbox {
    messages: Mutex<Vec<(Rank, Vec<u8>)>>,
}

impl Responder for Inbox {
    fn message(&self, from: Rank, message: &[u8]) -> Option<Vec<u8>> {
        self.messages.lock().expect("no panic under the lock").push((from, message.to_vec()));
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

/// A device, with its events and messages.
struct Station {
    device: ShmDevice,
    inbox: Arc<Inbox>,
    log: Vec<Event>,
}

impl Station {
    fn new(rank: Rank, world_size: u32) -> Self {
        Self::with(rank, world_size, |_| {})
    }

    fn with(rank: Rank, world_size: u32, apply_atomic: impl FnOnce(&mut DeviceConfig)) -> Self {
        let inbox = Arc::new(Inbox::default());
        let mut config = DeviceConfig {
            rank,
            world_size,
            secret: None,
            signal_slots: 8,
            connect_timeout: PATIENCE,
            interface: None,
            address: None,
            responder: inbox.clone(),
        };
        apply_atomic(&mut config);
        let device = ShmDevice::new(config).expect("the system gives memory and sockets");
        Self { device, inbox, log: Vec::new() }
    }

    fn pump(&mut self) {
        let mut events = Vec::with_capacity(16);
        self.device.poll(clock::now(), &mut events);
        if events.is_empty() {
            std::thread::yield_now();
        }
        self.log.append(&mut events);
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let deadline = clock::now() + PATIENCE;
        while !holds(self) {
            assert!(clock::now() < deadline, "{what} did not come: {:?}", self.log);
            self.pump();
        }
    }

    fn until_event(&mut self, event: &Event) {
        self.until(&format!("{event:?}"), |station| station.log.contains(event));
    }

    /// Submits a transfer, and waits for its end unless it has ended already.
    fn carry_out(&mut self, peer: Rank, transfer: Transfer, id: TransferId) {
        if self.device.submit(peer, transfer, id).expect("room") == Submitted::UnderWay {
            self.until_event(&Event::Done { id, result: Ok(0) });
        }
    }

    fn until_lost(&mut self, peer: Rank) -> LossCause {
        let find = |station: &Self| {
            station.log.iter().find_map(|event| match event {
                Event::PeerLost { peer: lost, cause } if *lost == peer => Some(cause.clone()),
                _ => None,
            })
        };
        self.until("a loss", |station| find(station).is_some());
        find(self).expect("`until` has returned")
    }

    fn region(&mut self, len: usize) -> Region {
        self.device.register(SharedMemory::new(len).expect("memory")).expect("sealed memory is registered")
    }
}

/// Two connected ranks in this process.
fn pair() -> [Station; 2] {
    let mut stations = [Station::new(0, 2), Station::new(1, 2)];
    connect(&mut stations);
    stations
}

fn connect([zero, one]: &mut [Station; 2]) {
    let addresses = [zero.device.info().address.clone(), one.device.info().address.clone()];
    zero.device.connect(1, &addresses[1]).expect("an address");
    one.device.connect(0, &addresses[0]).expect("an address");
    until_both(zero, one, "a connection", |zero, one| {
        zero.log.contains(&Event::Connected { peer: 1 }) && one.log.contains(&Event::Connected { peer: 0 })
    });
}

fn until_both(
    zero: &mut Station,
    one: &mut Station,
    what: &str,
    mut holds: impl FnMut(&mut Station, &mut Station) -> bool,
) {
    let deadline = clock::now() + PATIENCE;
    while !holds(zero, one) {
        assert!(clock::now() < deadline, "{what} did not come: {:?}, {:?}", zero.log, one.log);
        zero.pump();
        one.pump();
    }
}

fn secret(text: &str) -> Option<Secret> {
    Some(Secret::new(text.as_bytes()))
}
