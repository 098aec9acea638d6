//! A survey of the RDMA devices, for diagnosis: it opens each device, queries its ports, and
//! registers some memory, as a job would. It keeps nothing open.

use super::library::library;
use super::limits::{CreateError, Limits};
use super::objects::{self, Context, MemoryRegion, ProtectionDomain};
use super::{LoadError, OpenError, PortError, RdmaCmLoadError, sys};
use crate::memory::SharedMemory;

/// Length of the memory that is registered as a test, in bytes: more than the usual limit of 8 MiB.
pub const REGISTERED_BYTES: usize = 16 << 20;

/// A port as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortReport {
    /// The number of the port, from 1.
    pub number: u8,
    /// Current path MTU, in bytes.
    pub path_mtu_bytes: u32,
    /// Largest path MTU, in bytes.
    pub path_mtu_bytes_max: u32,
    /// Longest message, in bytes.
    pub message_bytes_max: u32,
}

/// A device that could be opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenDevice {
    /// The file of its provider, with its version if it has one.
    pub provider: Option<String>,
    /// Its ports, without those that did not answer.
    pub ports: Vec<PortReport>,
    /// Most queue pairs.
    pub queue_pairs_max: u32,
    /// Most memory regions.
    pub regions_max: u32,
    /// Why memory could not be registered; `None` if [`REGISTERED_BYTES`] could.
    pub not_registered: Option<String>,
}

/// A device that libibverbs lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// The name, as in `mlx5_0`.
    pub name: String,
    /// Its description, or why it could not be opened, with a remedy.
    pub opened: Result<OpenDevice, String>,
}

/// All devices that libibverbs lists: those whose driver has a provider here.
///
/// # Errors
///
/// [`LoadError`] without libibverbs. A device that cannot be opened is not an error.
pub fn survey() -> Result<Vec<DeviceReport>, LoadError> {
    let library = library()?;
    // A kernel without RDMA reports an error in place of an empty list.
    let names = objects::device_names(library).unwrap_or_default();
    let look = |name: String| {
        let opened = open(&name).map_err(|error| {
            let source = std::error::Error::source(&error);
            source.map_or_else(|| error.to_string(), |source| format!("{error} ({source})"))
        });
        DeviceReport { name, opened }
    };
    Ok(names.into_iter().map(look).collect())
}

/// Whether librdmacm can be loaded.
///
/// # Errors
///
/// [`RdmaCmLoadError`] if it is missing or too old.
pub fn rdma_cm() -> Result<(), RdmaCmLoadError> {
    super::cm::check_installed()
}

fn open(name: &str) -> Result<OpenDevice, OpenError> {
    let refused = |object| {
        let device = name.to_owned();
        move |source| OpenError::Refused { device, object, source }
    };
    let context = Context::open(library()?, name).map_err(refused("to be opened"))?;
    let context = context.ok_or(PortError::NoDevice)?;
    let limits = context.limits().map_err(refused("to tell its limits"))?;
    let seen = |number| {
        let port = context.port(number).ok()?;
        Some(PortReport {
            number,
            path_mtu_bytes: bytes_of(port.active_mtu),
            path_mtu_bytes_max: bytes_of(port.max_mtu),
            message_bytes_max: port.max_msg_sz,
        })
    };
    let domain =
        ProtectionDomain::new(&context, Limits::of(name, &limits)).map_err(refused("a protection domain"))?;
    let registered = SharedMemory::new(REGISTERED_BYTES)
        .map_err(CreateError::from)
        .and_then(|memory| MemoryRegion::new(&domain, memory, 0, sys::IBV_ACCESS_LOCAL_WRITE));
    // Providers have unversioned names, which link to versioned ones.
    let provider = context.provider().map(|path| path.canonicalize().unwrap_or(path));
    Ok(OpenDevice {
        provider: provider.and_then(|path| Some(path.file_name()?.to_str()?.to_owned())),
        ports: (1..=limits.phys_port_cnt).filter_map(seen).collect(),
        queue_pairs_max: u32::try_from(limits.max_qp).unwrap_or(0),
        regions_max: u32::try_from(limits.max_mr).unwrap_or(0),
        not_registered: registered.err().map(|error| error.to_string()),
    })
}

/// The verbs number path MTUs: 1 is 256 bytes, 5 is 4096.
fn bytes_of(mtu: sys::ibv_mtu) -> u32 {
    if (1..=5).contains(&mtu) { 128 << mtu } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_are_told_in_bytes_and_what_is_no_payload_is_none() {
        assert_eq!([1, 3, 5].map(bytes_of), [256, 1024, 4096]);
        assert_eq!([0, 6, 77].map(bytes_of), [0, 0, 0]);
    }

    #[test]
    fn a_machine_without_the_library_says_so_and_one_with_it_lists_what_it_has() {
        match survey() {
            Err(LoadError::Absent { reason }) => assert!(reason.contains("libibverbs"), "{reason}"),
            Err(LoadError::Symbol { symbol }) => assert!(symbol.starts_with("ibv_")),
            Ok(devices) => assert!(devices.iter().all(|device| !device.name.is_empty())),
        }
    }
}
