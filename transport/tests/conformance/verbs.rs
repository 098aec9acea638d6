//! The suite over `verbs`: each rank on the next RDMA device of this machine, from the first one on again.

use std::sync::Arc;

use pleach_transport::verbs::{VerbsDevice, Wish};
use pleach_transport::{Device, DeviceConfig, HostMemory, Memory, Nanos, clock};

use crate::world::Backend;

mod refused;

pub(crate) struct Verbs {
    devices: Vec<String>,
}

impl Backend for Verbs {
    const NAME: &'static str = "verbs";
    const LIVE: bool = true;

    fn start(_world_size: u32) -> Self {
        let entries = std::fs::read_dir("/sys/class/infiniband").expect("there are RDMA devices");
        let mut devices: Vec<String> = entries
            .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
            .collect();
        devices.sort();
        assert!(!devices.is_empty(), "there is no RDMA device");
        Self { devices }
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        let device = self.devices[config.rank as usize % self.devices.len()].clone();
        let wish = Wish { device: Some(device), ..Wish::default() };
        Box::new(VerbsDevice::new(config, &wish).expect("an RDMA device that is up"))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        HostMemory::new(len)
    }

    fn tick(&mut self) -> Nanos {
        clock::now()
    }
}
