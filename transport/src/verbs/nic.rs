//! An open port, with the objects that its queue pairs share.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::library::Library;
use super::limits::{CreateError, Limits};
use super::objects::{COMPLETIONS_AT_ONCE, CompletionQueue, Context, ProtectionDomain, SharedReceiveQueue};
use super::open::OpenError;
use super::port::{ChosenPort, PortError, SYSFS};
use super::send_queue::QueueSizes;
use super::{Counts, sys};
use crate::Rank;

/// Consumed receives that are posted again together.
const REPLENISH_BATCH: u32 = 64;

/// Receives that are posted in addition to the peers' credits: that many may be consumed, and their
/// credits returned, before they are posted again.
pub(super) const SPARE_RECEIVES: u32 = REPLENISH_BATCH + COMPLETIONS_AT_ONCE as u32;

/// Capability flags of memory windows of type 2; either suffices.
const WINDOWS: u32 = sys::IBV_DEVICE_MEM_WINDOW_TYPE_2A | sys::IBV_DEVICE_MEM_WINDOW_TYPE_2B;

/// Counters of a port for messages that found no receive, by driver.
const NOT_READY_COUNTERS: [&str; 4] = ["rcvd_rnr_err", "send_rnr_err", "rnr_nak_retry_err", "out_of_buffer"];

/// An open port with its limits.
pub(super) struct OpenPort {
    pub(super) chosen: ChosenPort,
    pub(super) limits: sys::ibv_device_attr,
    context: Arc<Context>,
    port: sys::ibv_port_attr,
}

impl OpenPort {
    pub(super) fn new(library: &'static Library, chosen: ChosenPort) -> Result<Self, OpenError> {
        let context = Context::open(library, &chosen.device).map_err(|source| {
            if source.kind() == io::ErrorKind::PermissionDenied {
                return OpenError::NotPermitted { device: chosen.device.clone() };
            }
            refused(&chosen, "to be opened")(source)
        })?;
        let context = context.ok_or(PortError::NoDevice)?;
        let limits = context.limits().map_err(refused(&chosen, "to tell its limits"))?;
        let port = context.port(chosen.port).map_err(refused(&chosen, "to tell of its port"))?;
        Ok(Self { chosen, limits, context, port })
    }
}

/// An error of this port's device.
fn refused(chosen: &ChosenPort, object: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    let device = chosen.device.clone();
    move |source| OpenError::Refused { device, object, source }
}

/// See the module.
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
        let domain =
            ProtectionDomain::new(&context, told.clone()).map_err(refused(&chosen, "a protection domain"))?;
        let receives = others * sizes.receives() + SPARE_RECEIVES;
        let entries = others * sizes.queue_pairs * sizes.requests() + receives;
        let completions = CompletionQueue::new(&context, &told, entries).map_err(|error| match error {
            CreateError::Limit(limit) => OpenError::Limit(limit),
            CreateError::System(error) => refused(&chosen, "a completion queue")(error),
        })?;
        let mut receives =
            SharedReceiveQueue::new(&domain, receives).map_err(refused(&chosen, "a shared receive queue"))?;
        receives.post(SPARE_RECEIVES as usize).map_err(refused(&chosen, "receives"))?;
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
