//! `shm` under the suite: every rank a device of this process, with real files, sockets, watchers and mappings between.

use std::sync::Arc;

use pleach_transport::shm::ShmDevice;
use pleach_transport::{Device, DeviceConfig, Memory, Nanos, SharedMemory, clock};

use crate::world::Backend;

/// Shared memory of this host; ranks find each other by address, so there is nothing to keep.
pub(crate) struct Shm;

impl Backend for Shm {
    const NAME: &'static str = "shm";
    const LIVE: bool = true;

    fn start(_world_size: u32) -> Self {
        Self
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        Box::new(ShmDevice::new(config).expect("the system gives memory and sockets"))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        SharedMemory::new(len).expect("the system gives memory")
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}
