//! `verbs`: the device contract over RDMA, by libibverbs, which is loaded at run time.
//!
//! Each pair of ranks has one or several reliable connections ([`pair`]), perhaps over several NICs
//! ([`Nic`]); long transfers are striped over all of them ([`pair`]). A put is an RDMA write,
//! its signal an immediate on the same queue pair. All completions of a NIC come to one completion
//! queue. `poll` turns them into signals, ends of transfers and losses. Signals consume receives of
//! one shared receive queue, which credits cover. Each pair also has the stream of the [control
//! plane](crate::control): over it ranks authenticate each other, exchange their queue pairs
//! ([`wire`]) or the addresses of their connection managers ([`cm`]), and post messages. Its
//! watcher detects dead peers.
//!
//! * **Keys** contain everything that a peer's NIC needs ([`wire::KeyParts`]), so no region is
//!   announced. Only where pairs have several queue pairs, ranks announce a region's length and its
//!   keys on further NICs; a transfer to a region whose announcement has not come uses one queue
//!   pair. The NIC checks keys; a stale or forged key costs the pair, which is lost with that
//!   cause.
//! * **Registrations are shared**: registering memory again returns another handle of its region
//!   ([`cache`]), and the NIC keeps it until the last handle is gone. Limited resources of a NIC
//!   are counted before they are requested ([`limits`]).
//! * **Fence**: a queue pair is destroyed when its peer is severed or lost; then the NIC accepts
//!   nothing from the peer.
//! * **GPUs**: their memory is registered where the kernel gives NICs access, and signals are
//!   counted after a flush ([`direct`]).
//! * **Progress**: the NIC transfers without a poll, but `poll` counts signals.
//! * **Sleeping** is on the completion channel and the control streams at once.
//!
//! Costs of a put with a signal: one doorbell, shared by all submits between two polls
//! ([`send_queue`]); one work request if the signal has no payload, else two; one completion here,
//! shared likewise (none for bytes that submit copies, except every 32nd), and one at the target.
//! [`VerbsDevice::counts`] counts them.

mod cache;
#[allow(unsafe_code)]
mod cm;
mod connecting;
mod contract;
mod counts;
mod direct;
mod lease;
#[allow(unsafe_code)]
mod library;
#[cfg_attr(test, allow(unsafe_code))]
mod limits;
#[allow(unsafe_code)]
mod objects;
#[cfg(all(test, feature = "verbs-oracle"))]
#[allow(unsafe_code)]
mod oracle;
#[allow(unsafe_code)]
mod pair;
mod pair_error;
pub mod port;
mod progress;
mod registered;
#[allow(unsafe_code)]
mod send_queue;
mod status;
pub mod survey;
#[allow(
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    reason = "as the headers name things"
)]
mod sys;
mod wire;

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use std::{fs, io};

use rustix::event::epoll;

pub(crate) use self::cache::Cache;
use self::cm::ConnectionManager;
pub use self::cm::{ConnectFailure, LoadError as RdmaCmLoadError};
use self::connecting::Connecting;
pub use self::counts::Counts;
use self::direct::Gpus;
pub use self::lease::LeaseError;
pub use self::library::LoadError;
use self::library::{Library, library};
use self::limits::{CreateError, Limits};
pub use self::limits::{Limit, LimitKind};
use self::objects::{COMPLETIONS_AT_ONCE, CompletionQueue, Context, ProtectionDomain, SharedReceiveQueue};
use self::pair::Pair;
pub use self::pair_error::PairError;
use self::port::{ChosenPort, SYSFS};
pub use self::port::{Connect, PortError, STRIPE_BYTES, Service, Unusable, VerbsOptions};
pub use self::registered::MemoryError;
use self::registered::RegisteredMemory;
use self::send_queue::QueueSizes;
pub use self::status::{Operation, WorkFailure, WorkStatus};
pub use self::wire::Refusal;
#[doc(hidden)]
pub use self::wire::check_decoders;
use self::wire::{ControlMessage, QUEUE_PAIRS_MAX, RemoteRegions};
use crate::Rank;
use crate::clock::Nanos;
use crate::control::{self, Control, ControlEventQueue, KnownProcesses, Network, ReleasedRegions, Streams};
use crate::cuda::FlushScope;
use crate::device::{
    DeviceConfig, DeviceInfo, Event, Incarnation, LossCause, Reach, RegisterError, SetupCounts,
};
use crate::memory::Memory;
use crate::region::{KeyMap, RegionKey, Registry};
use crate::signals::Signals;
use crate::tls::{TlsError, TlsMode};

/// Longest transfer, in bytes, if the NIC carries more.
const TRANSFER_BYTES_MAX: u64 = 1 << 30;

/// Events that wait to be polled before submits are refused.
const EVENTS_MAX: usize = 4096;

/// Interval of the polls of the control plane, the connection manager and time limits.
const CONTROL_INTERVAL: Duration = Duration::from_micros(200);
/// They are also polled after this many polls of the device, because the caller's clock may stand
/// still.
const CONTROL_POLLS: u32 = 512;

const FABRIC: &str = "verbs";

enum Peer {
    Idle,
    Connecting(Box<Connecting>),
    Open(Box<Pair>),
    Departed,
    Lost(LossCause),
    Severed,
}

/// One rank's end of the verbs fabric. See the module.
pub struct VerbsDevice {
    // Queue pairs are dropped before the objects that they use; fields are dropped in this order.
    peers: Vec<Peer>,
    /// Set when the connection manager connects pairs.
    connection_manager: Option<ConnectionManager>,
    regions: KeyMap<RegisteredMemory>,
    cache: Cache,
    nics: Vec<Nic>,
    gpus: Gpus,
    control: Control<ControlEventQueue<ControlMessage>>,
    releases: Arc<ReleasedRegions>,
    registry: Arc<dyn Registry>,
    epoll: Arc<OwnedFd>,
    info: DeviceInfo,
    reason: String,
    sizes: QueueSizes,
    stripe_bytes: usize,
    /// The peers' regions, by rank.
    remote_regions: Vec<RemoteRegions>,
    /// Peers with work requests to post.
    due: Vec<Rank>,
    /// Peers with drains of this rank under way.
    draining: Vec<Rank>,
    /// Counts of peers that are gone.
    past_counts: Counts,
    signal_slots: Vec<OnceLock<Signals>>,
    /// The process that has each rank, or had it last.
    incarnations: Vec<Option<Incarnation>>,
    /// Peers that are given up and whose `PeerLost` the control plane has not told.
    untold: Vec<Rank>,
    /// A rank was given to another process.
    was_replaced: bool,
    connect_timeout: Duration,
    event_queue: VecDeque<Event>,
    control_due_at: Nanos,
    control_polls: u32,
    is_armed: bool,
    /// The device was armed since the last poll of the connection manager.
    has_slept: bool,
    unfinished: bool,
    /// This rank leaves, but its transfers are still under way.
    is_leaving: bool,
    has_left: bool,
}

impl VerbsDevice {
    /// Opens the port that `options` names, or the first usable one, and listens at the configured
    /// interface.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn new(config: DeviceConfig, options: &VerbsOptions) -> Result<Self, OpenError> {
        let known = KnownProcesses::fresh(config.world_size);
        Self::of_process(config, known, options)
    }

    /// As [`VerbsDevice::new`], for a device that is one with others.
    pub(crate) fn of_process(
        config: DeviceConfig,
        known: KnownProcesses,
        options: &VerbsOptions,
    ) -> Result<Self, OpenError> {
        if let Some(secret) = &config.secret
            && secret.tls()?.mode() == TlsMode::Require
        {
            return Err(TlsError::Unprotected.into());
        }
        let library = library()?;
        let listed = objects::device_names(library);
        let names = listed.map_err(|_| PortError::NoDevice)?;
        let ports = port::ports(Path::new(port::SYSFS), &options.considered(names))?;
        let mut options = options.clone();
        if options.interface.is_none() {
            options.interface.clone_from(&config.interface);
        }
        let chosen = port::choose_all(&ports, &options)?;
        let queue_pairs = options.queue_pairs(chosen.len())?;
        let reason = port::reason(&chosen);
        tracing::info!("verbs: {reason}");
        let opened = chosen.into_iter().map(|chosen| OpenPort::new(library, chosen));
        let opened = opened.collect::<Result<Vec<_>, _>>()?;
        let (world_size, connect_timeout) = (config.world_size, config.connect_timeout);
        let incarnation = known.own();
        let sizes = QueueSizes { service: options.service()?, ..sizes(&opened, world_size, queue_pairs)? };
        let others = world_size.saturating_sub(1).max(1);
        let nics = opened.into_iter().map(|opened| Nic::new(opened, others, sizes));
        let nics = nics.collect::<Result<Vec<_>, _>>()?;
        let control = Control::new(
            config,
            known,
            FABRIC,
            Network::Tcp { data_connections: 0 },
            ControlEventQueue::new()?,
        )?;
        let connection_manager = match options.connect {
            Connect::Rendezvous => None,
            Connect::RdmaCm => Some(ConnectionManager::new(&nics, world_size)?),
        };
        let joined = combine_wake_sources(&nics, &control, connection_manager.as_ref()).map_err(|error| {
            OpenError::Refused {
                device: nics[0].chosen.device.clone(),
                object: "an epoll descriptor",
                source: error.into(),
            }
        })?;
        let releases = Arc::new(control.releases());
        let message_bytes_max = nics.iter().map(|nic| u64::from(nic.port.max_msg_sz)).min().unwrap_or(0);
        let queue_depth = sizes.depth as usize;
        let reach = Reach { fabric: FABRIC, maps: false, passive: false, queue_depth };
        let info = DeviceInfo {
            rank: control.rank(),
            incarnation,
            address: control.address().clone(),
            fabric: FABRIC,
            registers_freely: false,
            signal_slots: control.signal_slots(),
            transfer_bytes_max: TRANSFER_BYTES_MAX.min(message_bytes_max),
            reach: vec![reach; world_size as usize],
            waker: Arc::clone(control.handler()) as _,
            setup: Arc::default(),
        };
        Ok(Self {
            peers: (0..world_size).map(|_| Peer::Idle).collect(),
            connection_manager,
            regions: KeyMap::default(),
            cache: Cache::default(),
            nics,
            gpus: Gpus::default(),
            control,
            registry: Arc::clone(&releases) as _,
            releases,
            epoll: Arc::new(joined),
            info,
            reason,
            sizes,
            stripe_bytes: options.stripe_bytes.unwrap_or(STRIPE_BYTES),
            remote_regions: vec![RemoteRegions::default(); world_size as usize],
            due: Vec::with_capacity(world_size as usize),
            draining: Vec::new(),
            past_counts: Counts::default(),
            signal_slots: (0..world_size).map(|_| OnceLock::new()).collect(),
            incarnations: vec![None; world_size as usize],
            untold: Vec::new(),
            was_replaced: false,
            connect_timeout,
            event_queue: VecDeque::with_capacity(64),
            control_due_at: Nanos::ZERO,
            control_polls: 0,
            is_armed: false,
            has_slept: false,
            unfinished: false,
            is_leaving: false,
            has_left: false,
        })
    }

    /// Which devices, ports and addresses the device uses, and why.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// The requests to its NICs so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = self.past_counts;
        self.nics.iter().for_each(|nic| counts += nic.counts());
        self.peers.iter().filter_map(Peer::pair).for_each(|pair| counts += pair.counts());
        counts
    }

    /// Messages on its ports that found no receive since the device was made, also those of other
    /// processes; `None` where no driver counts them. Credits keep the number at zero.
    #[must_use]
    pub fn receivers_not_ready(&self) -> Option<u64> {
        self.nics.iter().filter_map(Nic::not_ready).reduce(|sum, count| sum + count)
    }

    /// The registry of this device's regions.
    pub(crate) fn registry(&self) -> Arc<dyn Registry> {
        Arc::clone(&self.registry)
    }

    /// Sets the registry of later regions; the caller's registry must inform the previous one.
    pub(crate) fn replace_registry(&mut self, registry: Arc<dyn Registry>) {
        self.registry = registry;
    }

    /// The descriptor that `arm` returns, always the same.
    pub(crate) fn wake_file(&self) -> &OwnedFd {
        &self.epoll
    }

    /// The streams of its control plane.
    pub(crate) fn streams(&self) -> Streams {
        self.control.streams()
    }

    /// Counts set-up work together with the other device of a hybrid device.
    pub(crate) fn count_in(&mut self, setup: &Arc<SetupCounts>) {
        self.info.setup = Arc::clone(setup);
    }

    /// Registers memory under a key that ends with `slot`; the region of the key belongs to the
    /// shared registry.
    pub(crate) fn adopt(
        &mut self,
        memory: &Arc<dyn Memory>,
        slot: u16,
        only: Option<Rank>,
    ) -> Result<RegionKey, RegisterError> {
        self.list(memory, Some(slot), only)
    }

    /// Deregisters these regions, because their pages are about to be replaced. A peer that still
    /// writes there gets an error and loses the pair.
    pub(crate) fn withdraw(&mut self, keys: &[RegionKey]) {
        self.cache.clear();
        for key in keys {
            if self.regions.remove(key).is_some() {
                self.announce(*key);
            }
        }
    }

    fn list(
        &mut self,
        memory: &Arc<dyn Memory>,
        slot: Option<u16>,
        only: Option<Rank>,
    ) -> Result<RegionKey, RegisterError> {
        self.forget_released();
        // GPUs read memory that ranks of this host map.
        let scope = if slot.is_some() { FlushScope::AllDevices } else { FlushScope::Owner };
        let gpu = Gpus::of(&**memory, scope)?;
        let (key, registered) = RegisteredMemory::new(&self.nics, memory, slot, only)?;
        gpu.into_iter().for_each(|gpu| self.gpus.note(gpu, scope));
        self.regions.insert(key, registered);
        self.announce(key);
        Ok(key)
    }
}

impl Peer {
    /// The pair of a peer that is open or connecting.
    fn pair(&self) -> Option<&Pair> {
        match self {
            Self::Open(pair) => Some(pair),
            Self::Connecting(connecting) => connecting.pair(),
            _ => None,
        }
    }

    /// As [`Peer::pair`].
    fn pair_mut(&mut self) -> Option<&mut Pair> {
        match self {
            Self::Open(pair) => Some(pair),
            Self::Connecting(connecting) => connecting.pair_mut(),
            _ => None,
        }
    }
}

/// One epoll descriptor that is readable when a completion queue, the control plane or the
/// connection manager has an event.
fn combine_wake_sources(
    nics: &[Nic],
    control: &Control<ControlEventQueue<ControlMessage>>,
    connection_manager: Option<&ConnectionManager>,
) -> rustix::io::Result<OwnedFd> {
    let joined = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let data = epoll::EventData::new_u64(0);
    for nic in nics {
        epoll::add(&joined, nic.completions.file(), data, epoll::EventFlags::IN)?;
    }
    epoll::add(&joined, control.wake_source(), data, epoll::EventFlags::IN)?;
    if let Some(connection_manager) = connection_manager {
        epoll::add(&joined, connection_manager.file(), data, epoll::EventFlags::IN)?;
    }
    Ok(joined)
}

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
    /// The encryption that is asked for cannot be had.
    #[error(transparent)]
    Tls(#[from] TlsError),
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
fn hint(error: io::ErrorKind) -> &'static str {
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
fn refused(error: &CreateError) -> LossCause {
    match (error, error.kind(), locked_limit()) {
        (CreateError::Limit(limit), ..) => PairError::Limit { kind: limit.kind, most: limit.most }.into(),
        // Without a limit another kind of memory is short.
        (_, io::ErrorKind::OutOfMemory, limit) if limit < u64::MAX => PairError::NotLocked { limit }.into(),
        (_, kind, _) => LossCause::ConnectionBroke(kind),
    }
}

/// The queue sizes of each pair on each NIC.
fn sizes(opened: &[OpenPort], world_size: u32, queue_pairs: u32) -> Result<QueueSizes, OpenError> {
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
fn locked_limit() -> u64 {
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
struct OpenPort {
    chosen: ChosenPort,
    limits: sys::ibv_device_attr,
    context: Arc<Context>,
    port: sys::ibv_port_attr,
}

impl OpenPort {
    fn new(library: &'static Library, chosen: ChosenPort) -> Result<Self, OpenError> {
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
struct Nic {
    // Queue pairs are dropped before; then these, in this order.
    receives: SharedReceiveQueue,
    completions: CompletionQueue,
    domain: Arc<ProtectionDomain>,
    chosen: ChosenPort,
    port: sys::ibv_port_attr,
    /// Whether it supports memory windows of type 2.
    has_windows: bool,
    /// The owners of queue pairs by number: the rank, and the index among its queue pairs.
    owners: BTreeMap<u32, (Rank, usize)>,
    counts: Counts,
    /// Consumed receives that are not posted again.
    used: u32,
    not_ready_before: u64,
}

impl Nic {
    /// Makes the shared objects for `others` peers.
    fn new(opened: OpenPort, others: u32, sizes: QueueSizes) -> Result<Self, OpenError> {
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
    fn counts(&self) -> Counts {
        let (registrations, deregistrations) = self.domain.registrations();
        Counts { registrations, deregistrations, ..self.counts }
    }

    /// Polls one batch of completions; returns their number, for [`CompletionQueue::found`].
    #[inline(always)]
    fn poll(&mut self) -> usize {
        self.counts.polls += 1;
        let count = self.completions.poll();
        if count > 0 {
            self.counts.polls_with_completions += 1;
            self.counts.completions += count as u64;
        }
        count
    }

    /// Records `used` consumed receives, and posts them again in batches.
    fn replenish(&mut self, used: u32) {
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
    fn not_ready(&self) -> Option<u64> {
        not_ready(&self.chosen).map(|count| count.saturating_sub(self.not_ready_before))
    }
}

fn not_ready(chosen: &ChosenPort) -> Option<u64> {
    let folder = Path::new(SYSFS).join(&chosen.device).join(format!("ports/{}/hw_counters", chosen.port));
    let count = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    NOT_READY_COUNTERS.into_iter().filter_map(count).reduce(|sum, count| sum + count)
}
