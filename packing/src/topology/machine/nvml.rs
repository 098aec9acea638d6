//! NVLinks as NVIDIA's management library reports them. The library comes with the driver and is
//! loaded at the first query.

use std::path::Path;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use super::{Machine, MachineError, NvLinkEnd, NvLinks, text};
use crate::topology::nccl::rates;
use crate::topology::smi::NVLINKS_MAX;

/// All active NVLinks of a machine whose driver is loaded.
pub(super) fn links(machine: &Machine, root: &Path) -> Result<Vec<NvLinks>, MachineError> {
    read(machine, root).map_err(|error| MachineError::Nvml { error: Box::new(error) })
}

fn read(machine: &Machine, root: &Path) -> Result<Vec<NvLinks>, NvmlError> {
    let library = match Nvml::init() {
        // The driver is there but its library is not, as in a container without it: there is no
        // NVML to query.
        Err(NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound) => return Ok(Vec::new()),
        opened => opened?,
    };
    let mut links = Vec::new();
    for (gpu, device) in machine.gpus.iter().enumerate() {
        let handle = match library.device_by_pci_bus_id(device.address.as_str()) {
            // A GPU of another vendor, or a GPU that this container may not use.
            Err(NvmlError::InvalidArg | NvmlError::NotFound | NvmlError::NoPermission) => continue,
            handle => handle?,
        };
        let capability = handle.cuda_compute_capability()?;
        let each = u32::try_from(capability.major * 10 + capability.minor).ok().and_then(rates::nvlink);
        let Some(each) = each else { continue };
        for number in 0..NVLINKS_MAX as u32 {
            let link = handle.link_wrapper_for(number);
            match link.is_active() {
                Ok(true) => {}
                // The GPU has fewer links than possible, or the link is not active.
                Ok(false) | Err(NvmlError::InvalidArg | NvmlError::NotSupported) => continue,
                Err(error) => return Err(error),
            }
            let to = match link.remote_pci_info() {
                Ok(remote) => end(machine, root, remote.domain, remote.bus, remote.device),
                // Virtual machines do not see the switches.
                Err(NvmlError::InvalidArg | NvmlError::NotSupported) => Some(NvLinkEnd::Switch),
                Err(error) => return Err(error),
            };
            links.extend(to.map(|to| NvLinks { gpu, to, bytes_per_s: each }));
        }
    }
    Ok(links)
}

/// The other end of a link, by the device with this address. (The library's function for the type
/// of the device is of no use: its wrapper always returns unknown.)
fn end(machine: &Machine, root: &Path, domain: u32, bus: u32, device: u32) -> Option<NvLinkEnd> {
    let address = format!("{domain:04x}:{bus:02x}:{device:02x}.0");
    if let Some(gpu) = machine.gpus.iter().position(|gpu| gpu.address == address) {
        return Some(NvLinkEnd::Gpu(gpu));
    }
    match text(&super::devices(root).join(&address).join("class")) {
        Ok(class) if class.starts_with("0x068001") => Some(NvLinkEnd::Cpu),
        Ok(class) if rates::is_gpu_class(&class) => None,
        // A switch, or a device that this machine does not show. A virtual machine does not show
        // switches.
        _ => Some(NvLinkEnd::Switch),
    }
}
