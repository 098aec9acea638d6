//! Two ranks of this process, joined by devices of one kind.

use std::sync::Arc;

use pleach_transport::cuda::CudaMemory;
use pleach_transport::{
    Device, DeviceConfig, Event, Inline, LossCause, Rank, Region, Responder, Secret, Signal, Submitted,
    Transfer, TransferError, TransferId, clock,
};

use crate::PATIENCE;

struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

pub(crate) fn config(rank: Rank) -> DeviceConfig {
    DeviceConfig {
        rank,
        world_size: 2,
        secret: Some(Secret::new(b"known to both ends")),
        signal_slots: 4,
        connect_timeout: PATIENCE,
        interface: None,
        address: None,
        responder: Arc::new(Silent),
    }
}

/// Two connected ranks of this process.
pub(crate) struct Pair<D> {
    pub(crate) devices: [D; 2],
    pub(crate) log: Vec<Event>,
}

impl<D: Device> Pair<D> {
    pub(crate) fn connected(mut devices: [D; 2]) -> Self {
        let addresses = [devices[0].info().address.clone(), devices[1].info().address.clone()];
        devices[0].connect(1, &addresses[1]).expect("an address");
        devices[1].connect(0, &addresses[0]).expect("an address");
        let mut pair = Self { devices, log: Vec::new() };
        pair.until("connections", |pair| {
            let connected = |peer| pair.log.contains(&Event::Connected { peer });
            connected(0) && connected(1)
        });
        pair
    }

    pub(crate) fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Self) -> bool) {
        let deadline = clock::now() + PATIENCE;
        while !holds(self) {
            assert!(clock::now() < deadline, "{what} did not come: {:?}", self.log);
            for device in &mut self.devices {
                let mut events = Vec::with_capacity(16);
                device.poll(clock::now(), &mut events);
                self.log.append(&mut events);
            }
            std::thread::yield_now();
        }
    }

    pub(crate) fn region(&mut self, rank: usize, memory: &Arc<CudaMemory>) -> Region {
        self.devices[rank].register(memory.clone()).expect("GPU memory that the device reaches")
    }

    /// Carries out a transfer of rank 0, and says how it ended.
    pub(crate) fn carry_out(&mut self, transfer: Transfer, id: u64) -> Result<u64, TransferError> {
        let id = TransferId(id);
        match self.devices[0].submit(1, transfer, id).expect("room") {
            Submitted::Ended(value) => Ok(value),
            Submitted::UnderWay => {
                let mut found = None;
                self.until("an end", |pair| {
                    found = pair.log.iter().find_map(|event| match event {
                        Event::Done { id: done, result } if *done == id => Some(result.clone()),
                        _ => None,
                    });
                    found.is_some()
                });
                found.expect("`until` has returned")
            }
        }
    }
}

pub(crate) fn signal(signal_slot: u16) -> Option<Signal> {
    Some(Signal { signal_slot, payload: Inline::new(b"payload").expect("few bytes") })
}
