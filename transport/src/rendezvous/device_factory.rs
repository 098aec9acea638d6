//! The fabrics, and the factory of their devices.

use std::error::Error;
use std::iter;

pub use pleach_vocabulary::{Fabric, FabricChoice};

use crate::device::{Device, DeviceConfig, LossCause, files_allowed};
use crate::hybrid::{HostId, HybridDevice};
use crate::shm::ShmDevice;
use crate::tcp::TcpDevice;
use crate::verbs::{self, VerbsDevice, VerbsOptions};

/// Why a device was not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[error("{}", shown(&**source))]
pub struct FabricError {
    /// The fabric's error.
    #[source]
    pub source: Box<dyn Error + Send + Sync>,
}

/// The error's text, or the limit of open files if the system refused one more.
fn shown(error: &(dyn Error + 'static)) -> String {
    let files_allowed = |error: &(dyn Error + 'static)| files_allowed(error.downcast_ref()?);
    match iter::successors(Some(error), |&error| error.source()).find_map(files_allowed) {
        Some(most) => LossCause::Files { most }.to_string(),
        None => error.to_string(),
    }
}

/// Makes devices.
pub trait DeviceFactory {
    /// A device of this fabric on this host. `hosts`: those of the first ranks, as far as they are
    /// known.
    ///
    /// # Errors
    ///
    /// When this machine, or this configuration, has none.
    fn make(
        &mut self,
        fabric: Fabric,
        host: HostId,
        hosts: &[HostId],
        config: DeviceConfig,
    ) -> Result<Box<dyn Device>, FabricError>;
}

/// Makes the devices of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDevices;

impl DeviceFactory for SystemDevices {
    fn make(
        &mut self,
        fabric: Fabric,
        host: HostId,
        hosts: &[HostId],
        config: DeviceConfig,
    ) -> Result<Box<dyn Device>, FabricError> {
        match fabric {
            Fabric::Shm => boxed(ShmDevice::new(config)),
            Fabric::Tcp => boxed(TcpDevice::new(config)),
            Fabric::Hybrid => boxed(HybridDevice::new(config, host, hosts)),
            Fabric::Verbs => boxed(options().and_then(|options| VerbsDevice::new(config, &options))),
            Fabric::HybridVerbs => boxed(
                options()
                    .map_err(Into::into)
                    .and_then(|options| HybridDevice::over_verbs(config, host, hosts, &options)),
            ),
        }
    }
}

fn options() -> Result<VerbsOptions, verbs::OpenError> {
    Ok(VerbsOptions::from_env()?)
}

fn boxed<D: Device + 'static, E: Error + Send + Sync + 'static>(
    made: Result<D, E>,
) -> Result<Box<dyn Device>, FabricError> {
    match made {
        Ok(device) => Ok(Box::new(device)),
        Err(error) => Err(FabricError { source: Box::new(error) }),
    }
}
