//! The suite over `tcp`, on loopback.

use std::sync::Arc;

use pleach_transport::tcp::TcpDevice;
use pleach_transport::{Device, DeviceConfig, HostMemory, Memory, Nanos, clock};

use crate::world::Backend;

pub(crate) struct Tcp;

impl Backend for Tcp {
    const NAME: &'static str = "tcp";
    const LIVE: bool = true;

    fn start(_world_size: u32) -> Self {
        Self
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        Box::new(TcpDevice::new(config).expect("listening on loopback"))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        HostMemory::new(len)
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}
