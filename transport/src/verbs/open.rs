//! The opening of a device: its errors, and the share of the NIC that each pair gets.

use std::ffi::c_int;
use std::io;

use super::cm;
use super::library::LoadError;
use super::limits::{CreateError, Limit, LimitKind, Limits};
use super::nic::{OpenPort, SPARE_RECEIVES};
use super::pair_error::PairError;
use super::port::{PortError, Service};
use super::send_queue::QueueSizes;
use super::sys;
use super::wire::QUEUE_PAIRS_MAX;
use crate::control;
use crate::device::LossCause;

/// Transfers under way to one peer, if the NIC has room for them.
pub const QUEUE_DEPTH: u32 = 256;

/// Signals that a rank accepts from a peer before it returns credits.
const CREDITS: u32 = 256;
/// With fewer credits a device is not made.
const CREDITS_MIN: u32 = 8;

/// Reads and atomics of a peer that a rank serves at once.
const READS: u8 = 16;

/// Why a device was not made.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No libibverbs.
    #[error(transparent)]
    Library(#[from] LoadError),
    /// No port to use.
    #[error(transparent)]
    Port(#[from] PortError),
    /// No control streams.
    #[error(transparent)]
    Control(#[from] control::OpenError),
    /// The NIC has too little of a resource.
    #[error(
        "RDMA device {device} has room for {ranks} ranks at most ({limit}); take fewer ranks a NIC or another fabric"
    )]
    TooManyRanks {
        /// The device.
        device: String,
        /// How many ranks fit.
        ranks: u32,
        /// The resource.
        limit: &'static str,
    },
    /// librdmacm, which is configured, is missing.
    #[error(transparent)]
    RdmaCm(#[from] cm::LoadError),
    /// The connection manager addresses ports by IP addresses.
    #[error(
        "rdma_cm needs an IP address, and {device}:{port} has a GID that is none; unset PLEACH_VERBS_CONNECT, or set it to 'rendezvous'"
    )]
    NoSocketAddress {
        /// The device.
        device: String,
        /// The port.
        port: u8,
    },
    /// The NIC has too little of a resource for any number of ranks.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// This user may not use the device.
    #[error(
        "no right to open RDMA device {device}; give this user read and write access to /dev/infiniband/uverbs* (in a container: --device=/dev/infiniband)"
    )]
    NotPermitted {
        /// The device.
        device: String,
    },
    /// The kernel or the NIC refused an object.
    #[error("RDMA device {device} refused {object}{}", hint(.source.kind()))]
    Refused {
        /// The device.
        device: String,
        /// The object.
        object: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// The remedy for an error of the kernel.
pub(super) fn hint(error: io::ErrorKind) -> &'static str {
    match error {
        io::ErrorKind::PermissionDenied => {
            "; give this user read and write access to /dev/infiniband/uverbs*"
        }
        io::ErrorKind::NotFound => {
            "; its file in /dev/infiniband is not there (in a container: docker run --device=/dev/infiniband)"
        }
        io::ErrorKind::OutOfMemory => "; raise the limit of locked memory (ulimit -l unlimited)",
        _ => "",
    }
}

/// The cause of a loss when an object of the pair was refused.
pub(super) fn refused(error: &CreateError) -> LossCause {
    match (error, error.kind(), locked_limit()) {
        (CreateError::Limit(limit), ..) => PairError::Limit { kind: limit.kind, most: limit.most }.into(),
        // Without a limit another kind of memory is short.
        (_, io::ErrorKind::OutOfMemory, limit) if limit < u64::MAX => PairError::NotLocked { limit }.into(),
        (_, kind, _) => LossCause::ConnectionBroke(kind),
    }
}

/// The queue sizes of each pair on each NIC.
pub(super) fn sizes(opened: &[OpenPort], world_size: u32, queue_pairs: u32) -> Result<QueueSizes, OpenError> {
    let service = Service::default();
    let mut least = QueueSizes { queue_pairs, depth: QUEUE_DEPTH, credits: CREDITS, reads: READS, service };
    for nic in opened {
        let sizes = sizes_of(&nic.chosen.device, world_size, queue_pairs, &nic.limits)?;
        least.depth = least.depth.min(sizes.depth);
        least.credits = least.credits.min(sizes.credits);
        least.reads = least.reads.min(sizes.reads);
    }
    Ok(least)
}

fn sizes_of(
    device: &str,
    world_size: u32,
    queue_pairs: u32,
    limits: &sys::ibv_device_attr,
) -> Result<QueueSizes, OpenError> {
    let others = world_size.saturating_sub(1).max(1);
    let of = |limit: c_int| u32::try_from(limit).unwrap_or(0);
    let receives = of(limits.max_srq_wr).saturating_sub(SPARE_RECEIVES) / others;
    let completions = of(limits.max_cqe).saturating_sub(SPARE_RECEIVES) / others;
    let requests = of(limits.max_qp_wr).min(completions / 2 / queue_pairs);
    let reads =
        of(limits.max_qp_rd_atom).min(of(limits.max_qp_init_rd_atom)).clamp(1, u32::from(READS)) as u8;
    let depth = QUEUE_DEPTH.min(requests.saturating_sub(16) / 2);
    let credits = CREDITS.min(receives.min(completions / 2).saturating_sub(4));
    let limit =
        if receives < completions { "receives of a shared queue" } else { "completion queue entries" };
    let least = CREDITS_MIN.max(2 * QUEUE_PAIRS_MAX as u32);
    if depth < CREDITS_MIN || credits < least {
        let ranks = of(limits.max_srq_wr).min(of(limits.max_cqe)) / (8 * least) + 1;
        return Err(OpenError::TooManyRanks { device: device.to_owned(), ranks, limit });
    }
    let told = Limits::of(device, limits);
    told.allow(LimitKind::QueuePairs, u64::from(queue_pairs) * u64::from(others))?;
    // For each peer the inbox, and the slots of each queue pair.
    told.allow(LimitKind::Regions, u64::from(queue_pairs + 1) * u64::from(others))?;
    Ok(QueueSizes { queue_pairs, depth, credits, reads, service: Service::default() })
}

/// The limit of locked memory of this process, in bytes.
pub(super) fn locked_limit() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(u64::MAX)
}
