//! GPUs: driver, library, device files, and whether NICs can reach their memory.

use super::Machine;
use super::{Finding, Section, counted};

/// The first kernel that lends GPU memory to RDMA devices by dma-buf.
const DMA_BUF_SINCE: (u32, u32) = (5, 12);

const DRIVER: &str = "proc/driver/nvidia/version";

/// CUDA's driver, and the ways from GPU memory to NICs.
pub(super) fn check(machine: &Machine) -> Vec<Finding> {
    let mut section = Section::new("GPU memory");
    let gpus = machine.gpus();
    let driver = machine.text(DRIVER);
    if gpus.is_empty() && driver.is_none() && !machine.exists("sys/bus/pci/devices") {
        section.unknown("GPUs", "/sys/bus/pci/devices cannot be read", "nvidia-smi");
        return section.done();
    }
    if gpus.is_empty() && driver.is_none() {
        section.ok("GPUs", "none on this machine: tensors are in host memory");
        return section.done();
    }
    let Some(driver) = driver else {
        let text = format!("{}, but their driver is not loaded", counted(gpus.len(), "GPU"));
        section.warning("CUDA driver", text, "sudo modprobe nvidia   # or: sudo apt-get install nvidia-open");
        return section.done();
    };
    let Some(version) = version(&driver) else {
        section.unknown("CUDA driver", format!("/{DRIVER} is not understood"), "nvidia-smi");
        return section.done();
    };
    library(machine, version, gpus.len(), &mut section);
    files(machine, &mut section);
    if !machine.rdma_devices().is_empty() {
        direct(machine, driver.contains("Open Kernel Module"), &mut section);
    }
    section.done()
}

/// The driver's version: the first word of several numbers, as in
/// `NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build`.
fn version(text: &str) -> Option<&str> {
    let line = text.lines().find(|line| line.starts_with("NVRM version:"))?;
    line.split_whitespace().find(|word| {
        let mut numbers = word.split('.');
        word.contains('.')
            && numbers.all(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

fn library(machine: &Machine, version: &str, gpus: usize, section: &mut Section) {
    let gpus = counted(gpus, "GPU");
    match machine.library("libcuda.so.1") {
        None => {
            let command = match machine.container() {
                Some("docker" | "podman") => "docker run --gpus all …   # with the NVIDIA Container Toolkit",
                _ => "sudo apt-get install libcuda1   # of the driver's version",
            };
            section.problem("CUDA driver", format!("{version} is loaded, but libcuda.so.1 is not here"), command);
        }
        Some(file) => match file.strip_prefix("libcuda.so.") {
            // A name that carries no version says nothing about it.
            Some(own) if own.contains('.') && own != version => section.problem(
                "CUDA driver",
                format!("{version} is loaded, but its library is {file}"),
                "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia   # or restart",
            ),
            _ => section.ok("CUDA driver", format!("{version}, {file}, {gpus}")),
        },
    }
}

fn files(machine: &Machine, section: &mut Section) {
    let names = machine.names("dev");
    let is_gpu = |name: &&String| name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    let found: Vec<&String> = names.iter().filter(is_gpu).collect();
    let has_memory = machine.exists("dev/nvidia-uvm");
    if found.is_empty() || !has_memory {
        let missing = if has_memory { "/dev/nvidia0" } else { "/dev/nvidia-uvm" };
        return section.problem(
            "GPU files",
            format!("{missing} is not there"),
            "sudo nvidia-modprobe -u -c 0",
        );
    }
    let both = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    let refused =
        found.iter().find(|name| rustix::fs::access(machine.path(&format!("dev/{name}")), both).is_err());
    match refused {
        Some(name) => section.problem(
            "GPU files",
            format!("/dev/{name} may not be read and written"),
            "sudo usermod -aG video,render $USER   # then log in again",
        ),
        None => section.ok("GPU files", format!("{} and /dev/nvidia-uvm", found.len())),
    }
}

/// Whether NICs reach GPU memory without a stop in host memory.
fn direct(machine: &Machine, is_open: bool, section: &mut Section) {
    let subject = "GPUDirect RDMA";
    let module = ["nvidia_peermem", "nv_peer_mem"]
        .into_iter()
        .find(|name| machine.exists(&format!("sys/module/{name}")));
    let kernel = machine.text("proc/sys/kernel/osrelease");
    let has_dma_buf = kernel.as_deref().and_then(release).map(|release| release >= DMA_BUF_SINCE && is_open);
    match (module, has_dma_buf) {
        (Some(module), Some(true)) => section.ok(subject, format!("by dma-buf, and by {module}")),
        (None, Some(true)) => section.ok(subject, "by dma-buf"),
        (Some(module), _) => section.ok(subject, format!("by {module}")),
        (None, Some(false)) => section.warning(
            subject,
            "neither dma-buf (it takes the open kernel modules and Linux 5.12) nor nvidia-peermem: GPU memory goes through host memory",
            "sudo modprobe nvidia-peermem",
        ),
        (None, None) => section.unknown(subject, "the kernel does not say its version", "lsmod | grep peermem"),
    }
}

/// The first two numbers of a kernel's release.
fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(['.', '-']).map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_the_words_around_them() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n\
            GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)";
        assert_eq!(version(closed), Some("535.183.01"));
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (dvs-builder@U22)";
        assert_eq!(version(open), Some("570.86.10"));
        assert_eq!(version("GCC version:  gcc version 12.2.0"), None);
        assert_eq!(release("6.1.0-56-amd64"), Some((6, 1)));
        assert_eq!(release("5.15.167.4-microsoft"), Some((5, 15)));
        assert_eq!(release("x"), None);
    }
}
