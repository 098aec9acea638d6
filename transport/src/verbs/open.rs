//! The opening of a device: its errors, and the share of the NIC that each pair gets.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::path::Path;
use std::sync::Arc;
use std::{fs, io};

use super::library::{Library, LoadError};
use super::limits::{CreateError, Limit, LimitKind, Limits};
use super::objects::{COMPLETIONS_AT_ONCE, CompletionQueue, Context, ProtectionDomain, SharedReceiveQueue};
use super::pair_error::PairError;
use super::port::{ChosenPort, PortError, SYSFS, Service};
use super::send_queue::QueueSizes;
use super::wire::QUEUE_PAIRS_MAX;
use super::{Counts, cm, sys};
use crate::device::LossCause;
use crate::{Rank, control};

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

/// Consumed receives that are posted again together.
const REPLENISH_BATCH: u32 = 64;

/// Receives that are posted in addition to the peers' credits: that many may be consumed, and their
/// credits returned, before they are posted again.
const SPARE_RECEIVES: u32 = REPLENISH_BATCH + COMPLETIONS_AT_ONCE as u32;

/// Capability flags of memory windows of type 2; either suffices.
const WINDOWS: u32 = sys::IBV_DEVICE_MEM_WINDOW_TYPE_2A | sys::IBV_DEVICE_MEM_WINDOW_TYPE_2B;

/// Counters of a port for messages that found no receive, by driver.
const NOT_READY_COUNTERS: [&str; 4] = ["rcvd_rnr_err", "send_rnr_err", "rnr_nak_retry_err", "out_of_buffer"];

/// An open port with its limits.
pub(super) struct OpenPort {
    chosen: ChosenPort,
    limits: sys::ibv_device_attr,
    context: Arc<Context>,
    port: sys::ibv_port_attr,
}

impl OpenPort {
    pub(super) fn new(library: &'static Library, chosen: ChosenPort) -> Result<Self, OpenError> {
        let context = Context::open(library, &chosen.device).map_err(|source| {
            if source.kind() == io::ErrorKind::PermissionDenied {
                return OpenError::NotPermitted { device: chosen.device.clone() };
            }
            device_refused(&chosen, "to be opened")(source)
        })?;
        let context = context.ok_or(PortError::NoDevice)?;
        let limits = context.limits().map_err(device_refused(&chosen, "to tell its limits"))?;
        let port = context.port(chosen.port).map_err(device_refused(&chosen, "to tell of its port"))?;
        Ok(Self { chosen, limits, context, port })
    }
}

/// An error of this port's device.
fn device_refused(chosen: &ChosenPort, object: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    let device = chosen.device.clone();
    move |source| OpenError::Refused { device, object, source }
}

/// An open port, with the objects that its queue pairs share.
pub(super) struct Nic {
    // Queue pairs are dropped before; then these, in this order.
    pub(super) receives: SharedReceiveQueue,
    pub(super) completions: CompletionQueue,
    pub(super) domain: Arc<ProtectionDomain>,
    pub(super) chosen: ChosenPort,
    pub(super) port: sys::ibv_port_attr,
    /// Whether it supports memory windows of type 2.
    pub(super) has_windows: bool,
    /// The owners of queue pairs by number: the rank, and the index among its queue pairs.
    pub(super) owners: BTreeMap<u32, (Rank, usize)>,
    counts: Counts,
    /// Consumed receives that are not posted again.
    used: u32,
    not_ready_before: u64,
}

impl Nic {
    /// Makes the shared objects for `others` peers.
    pub(super) fn new(opened: OpenPort, others: u32, sizes: QueueSizes) -> Result<Self, OpenError> {
        let OpenPort { chosen, context, port, limits } = opened;
        let told = Limits::of(&chosen.device, &limits);
        let domain = ProtectionDomain::new(&context, told.clone())
            .map_err(device_refused(&chosen, "a protection domain"))?;
        let receives = others * sizes.receives() + SPARE_RECEIVES;
        let entries = others * sizes.queue_pairs * sizes.requests() + receives;
        let completions = CompletionQueue::new(&context, &told, entries).map_err(|error| match error {
            CreateError::Limit(limit) => OpenError::Limit(limit),
            CreateError::System(error) => device_refused(&chosen, "a completion queue")(error),
        })?;
        let mut receives = SharedReceiveQueue::new(&domain, receives)
            .map_err(device_refused(&chosen, "a shared receive queue"))?;
        receives.post(SPARE_RECEIVES as usize).map_err(device_refused(&chosen, "receives"))?;
        let not_ready_before = not_ready(&chosen).unwrap_or(0);
        Ok(Self {
            receives,
            completions,
            domain,
            chosen,
            port,
            has_windows: limits.device_cap_flags & WINDOWS != 0,
            owners: BTreeMap::new(),
            counts: Counts::default(),
            used: 0,
            not_ready_before,
        })
    }

    /// The requests to the NIC, without those of its queue pairs.
    pub(super) fn counts(&self) -> Counts {
        let (registrations, deregistrations) = self.domain.registrations();
        Counts { registrations, deregistrations, ..self.counts }
    }

    /// Polls one batch of completions; returns their number, for [`CompletionQueue::found`].
    #[inline(always)]
    pub(super) fn poll(&mut self) -> usize {
        self.counts.polls += 1;
        let count = self.completions.poll();
        if count > 0 {
            self.counts.polls_with_completions += 1;
            self.counts.completions += count as u64;
        }
        count
    }

    /// Records `used` consumed receives, and posts them again in batches.
    pub(super) fn replenish(&mut self, used: u32) {
        self.used += used;
        self.counts.receives += u64::from(used);
        if self.used >= REPLENISH_BATCH {
            self.counts.receive_doorbells += 1;
            if self.receives.post(self.used as usize).is_err() {
                tracing::warn!("verbs: {} took no receives", self.chosen.device);
            }
            self.used = 0;
        }
    }

    /// Messages on this port that found no receive since the device was made, of all processes, if
    /// the driver counts them.
    pub(super) fn not_ready(&self) -> Option<u64> {
        not_ready(&self.chosen).map(|count| count.saturating_sub(self.not_ready_before))
    }
}

fn not_ready(chosen: &ChosenPort) -> Option<u64> {
    let folder = Path::new(SYSFS).join(&chosen.device).join(format!("ports/{}/hw_counters", chosen.port));
    let count = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    NOT_READY_COUNTERS.into_iter().filter_map(count).reduce(|sum, count| sum + count)
}
