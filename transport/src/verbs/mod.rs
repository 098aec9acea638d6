//! `verbs`: the device contract over RDMA, by libibverbs found at run time.
//!
//! Each pair of ranks has one reliable connection ([`pair`]): a put is an RDMA write, its notice an immediate on the same
//! queue pair. All completions come to one queue, whose entries `poll` turns into counted cells, ends of transfers and
//! losses; notices use up receives of one shared queue, covered by credits. Beside it each pair has the control stream of
//! [`tcp`](crate::tcp): over it ranks prove that they know the secret, tell each other their queue pairs ([`wire`]), post
//! messages and say goodbye, and its watcher finds out who has died.
//!
//! * **Keys** hold all that a peer's NIC asks for ([`wire::KeyParts`]), so nothing is announced. The NIC checks them; one that
//!   is stale or forged costs the pair, which is lost with that cause.
//! * **Silence**: a queue pair is destroyed when its peer is severed or lost, after which the NIC takes nothing of it.
//! * **Progress**: the NIC works by itself, but cells are counted by `poll`.
//! * **Sleeping** is on the completion channel and the control streams at once.
//!
//! Costs a put with notice: one doorbell; one request where the notice has no payload, else two; one completion here (none
//! for what is copied by submit, but every 32nd) and one there.

mod desk;
mod joining;
#[allow(unsafe_code)]
mod lane;
#[allow(unsafe_code)]
mod library;
#[allow(unsafe_code)]
mod objects;
mod open;
#[cfg(all(test, feature = "verbs-oracle"))]
#[allow(unsafe_code)]
mod oracle;
#[allow(unsafe_code)]
mod pair;
pub mod port;
mod progress;
mod releases;
#[allow(unsafe_code)]
mod request;
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

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::epoll;

use self::desk::Desk;
use self::joining::Joining;
use self::lane::{Base, Sizes};
pub use self::library::LoadError;
use self::library::library;
use self::objects::{Completions, Context, Domain, MemoryRegion, Receives};
pub use self::open::{OpenError, QUEUE_DEPTH};
use self::open::{locked_limit, sizes};
use self::pair::Pair;
use self::port::Chosen;
pub use self::port::{PortError, Wish};
use self::releases::Releases;
pub use self::status::WorkStatus;
use self::wire::{KeyParts, REGION_BYTES_MAX};
use crate::Rank;
use crate::cells::Cells;
use crate::clock::{self, Nanos};
use crate::device::{
    Address, Bell, Caps, ConnectError, Device, DeviceConfig, Event, LossCause, MESSAGE_BYTES_MAX, MapError,
    Mapped, PostError, Reach, RegisterError, Ring, Source, SubmitError, Submitted, Transfer, TransferError,
    TransferId,
};
use crate::memory::{Memory, Space, random_key};
use crate::region::{Region, RegionKey, Registry, RemoteSlice};
use crate::tcp::TcpDevice;

/// Longest transfer, in bytes, where the NIC carries more.
const TRANSFER_BYTES_MAX: u64 = 1 << 30;

/// Events that wait to be polled before submits are refused.
const OUTBOX_MAX: usize = 4096;

/// The control streams are looked at so often while nothing rings there: their sockets cost a system call.
const CONTROL_INTERVAL: Duration = Duration::from_micros(200);
/// And at every so many polls, as the time that polls are told may stand still.
const CONTROL_POLLS: u32 = 512;

const FABRIC: &str = "verbs";

enum Peer {
    Idle,
    Joining(Box<Joining>),
    Open(Box<Pair>),
    Left,
    Lost(LossCause),
    Severed,
}

/// One rank's end of the verbs fabric. See the module.
pub struct VerbsDevice {
    // Queue pairs go before all that they stand on, which is dropped in this order.
    peers: Vec<Peer>,
    regions: HashMap<RegionKey, MemoryRegion>,
    receives: Receives,
    completions: Completions,
    domain: Arc<Domain>,
    control: TcpDevice,
    desk: Arc<Desk>,
    releases: Arc<Releases>,
    registry: Arc<dyn Registry>,
    epoll: Arc<OwnedFd>,
    caps: Caps,
    chosen: Chosen,
    port: sys::ibv_port_attr,
    sizes: Sizes,
    /// Whose completions are whose.
    by_queue_pair: HashMap<u32, Rank>,
    cells: Vec<OnceLock<Cells>>,
    connect_timeout: Duration,
    outbox: VecDeque<Event>,
    /// Kept to be used again.
    control_events: Vec<Event>,
    control_polled_at: Nanos,
    control_polls: u32,
    is_armed: bool,
    unfinished: bool,
    /// This rank leaves, but what it sent is still under way.
    is_leaving: bool,
    has_left: bool,
}

impl VerbsDevice {
    /// Takes the port that `wish` names, or the first that is usable, and listens as the configuration says.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn new(config: DeviceConfig, wish: &Wish) -> Result<Self, OpenError> {
        let library = library()?;
        let listed = objects::device_names(library);
        let names = listed.map_err(|_| PortError::NoDevice)?;
        let ports = port::ports(Path::new(port::SYSFS), &names)?;
        let mut wish = wish.clone();
        if wish.interface.is_none() {
            wish.interface.clone_from(&config.interface);
        }
        let chosen = port::choose(&ports, &wish)?;
        tracing::info!("verbs: {}", chosen.reason);
        let refused = |what| {
            let device = chosen.device.clone();
            move |source| OpenError::Refused { device, what, source }
        };
        let context = Context::open(library, &chosen.device).map_err(refused("to be opened"))?;
        let context = context.ok_or(PortError::NoDevice)?;
        let limits = context.limits().map_err(refused("to tell its limits"))?;
        let port = context.port(chosen.port).map_err(refused("to tell of its port"))?;
        let sizes = sizes(&chosen.device, config.world_size, &limits)?;
        let domain = Domain::new(&context).map_err(refused("a protection domain"))?;
        let others = config.world_size.saturating_sub(1).max(1);
        let entries = others * (sizes.requests() + sizes.receives());
        let completions = Completions::new(&context, entries).map_err(refused("a completion queue"))?;
        let receives =
            Receives::new(&domain, others * sizes.receives()).map_err(refused("a shared receive queue"))?;
        let desk = Arc::new(Desk::new(Arc::clone(&config.responder)));
        let (world_size, cells, connect_timeout) = (config.world_size, config.cells, config.connect_timeout);
        let control = TcpDevice::new(DeviceConfig { responder: Arc::clone(&desk) as _, ..config })?;
        let joined = epoll::create(epoll::CreateFlags::CLOEXEC).and_then(|joined| {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&joined, completions.file(), data, epoll::EventFlags::IN)?;
            epoll::add(&joined, control.bell_file(), data, epoll::EventFlags::IN)?;
            Ok(joined)
        });
        let joined = joined.map_err(|error| refused("an epoll descriptor")(error.into()))?;
        let releases = Arc::new(Releases::default());
        let caps = Caps {
            fabric: FABRIC,
            checks_keys: false,
            registers_freely: false,
            cells: control.caps().cells.min(cells),
            transfer_bytes_max: TRANSFER_BYTES_MAX.min(u64::from(port.max_msg_sz)),
        };
        Ok(Self {
            peers: (0..world_size).map(|_| Peer::Idle).collect(),
            regions: HashMap::new(),
            receives,
            completions,
            domain,
            control,
            desk,
            registry: Arc::clone(&releases) as _,
            releases,
            epoll: Arc::new(joined),
            caps,
            chosen,
            port,
            sizes,
            by_queue_pair: HashMap::new(),
            cells: (0..world_size).map(|_| OnceLock::new()).collect(),
            connect_timeout,
            outbox: VecDeque::with_capacity(64),
            control_events: Vec::with_capacity(64),
            control_polled_at: Nanos::ZERO,
            control_polls: 0,
            is_armed: false,
            unfinished: false,
            is_leaving: false,
            has_left: false,
        })
    }

    /// Which device, port and address it uses, and why.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.chosen.reason
    }

    fn base(&self) -> Base<'_> {
        Base {
            domain: &self.domain,
            completions: &self.completions,
            receives: &self.receives,
            chosen: &self.chosen,
            port: &self.port,
        }
    }

    /// Checks a transfer; the NIC's key of its local slice.
    fn check(&self, peer: Rank, transfer: &Transfer) -> Result<u32, SubmitError> {
        transfer.check(&self.registry, self.caps.transfer_bytes_max)?;
        if self.outbox.len() >= OUTBOX_MAX {
            return Err(SubmitError::QueueFull { peer });
        }
        let local = match transfer {
            Transfer::Put { src: Source::Slice(slice), .. } | Transfer::Get { dst: slice, .. } => {
                self.regions.get(&slice.region().key())
            }
            _ => None,
        };
        Ok(local.map_or(0, MemoryRegion::local_key))
    }
}

impl Device for VerbsDevice {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn reach(&self, _peer: Rank) -> Reach {
        let queue_depth = self.sizes.depth as usize;
        Reach { fabric: FABRIC, maps: false, passive: false, sever_detaches: false, queue_depth }
    }

    fn rank(&self) -> Rank {
        self.control.rank()
    }

    fn address(&self) -> Address {
        self.control.address()
    }

    fn register(&mut self, memory: Arc<dyn Memory>) -> Result<Region, RegisterError> {
        match memory.space() {
            Space::Host => {}
            space => return Err(RegisterError::Space { fabric: FABRIC, space }),
        }
        self.forget_released();
        let bytes = memory.len();
        let random = random_key().0;
        let page_offset = (memory.base().as_ptr() as usize % 4096) as u16;
        let mut parts = KeyParts { remote_key: 0, tag: (random as u32 >> 12).max(1), page_offset };
        if bytes as u64 >= REGION_BYTES_MAX {
            let source = io::Error::from(io::ErrorKind::InvalidInput);
            return Err(RegisterError::System { bytes, source });
        }
        let registered = if bytes == 0 {
            None
        } else {
            let access = sys::IBV_ACCESS_LOCAL_WRITE
                | sys::IBV_ACCESS_REMOTE_WRITE
                | sys::IBV_ACCESS_REMOTE_READ
                | sys::IBV_ACCESS_REMOTE_ATOMIC;
            let made = MemoryRegion::new(&self.domain, Arc::clone(&memory), parts.address(), access);
            let made = made.map_err(|source| match source.kind() {
                io::ErrorKind::OutOfMemory => RegisterError::Locked { bytes, limit: locked_limit() },
                _ => RegisterError::System { bytes, source },
            })?;
            parts.remote_key = made.remote_key();
            Some(made)
        };
        let key = RegionKey(parts.encode());
        if let Some(made) = registered {
            self.regions.insert(key, made);
        }
        Ok(Region::new(memory, key, Arc::clone(&self.registry)))
    }

    fn map(&mut self, _peer: Rank, _slice: &RemoteSlice) -> Result<Mapped, MapError> {
        Err(MapError::Unsupported { fabric: FABRIC })
    }

    fn connect(&mut self, peer: Rank, address: &Address) -> Result<(), ConnectError> {
        self.control.connect(peer, address)?;
        if let Some(slot @ Peer::Idle) = self.peers.get_mut(peer as usize) {
            let deadline = clock::now() + self.connect_timeout;
            *slot = Peer::Joining(Box::new(Joining {
                deadline,
                pair: None,
                hello: None,
                is_connected: false,
                peer_is_ready: false,
            }));
        }
        Ok(())
    }

    fn sever(&mut self, peer: Rank) {
        self.end(peer, Peer::Severed, &TransferError::Severed { peer });
        self.control.sever(peer);
    }

    fn submit(&mut self, peer: Rank, transfer: Transfer, id: TransferId) -> Result<Submitted, SubmitError> {
        match self.peers.get(peer as usize) {
            Some(Peer::Open(_)) if self.is_leaving => return Err(SubmitError::Left { peer }),
            Some(Peer::Open(_)) => {}
            None | Some(Peer::Idle | Peer::Joining(_)) => return Err(SubmitError::NotConnected { peer }),
            Some(Peer::Left) => return Err(SubmitError::Left { peer }),
            Some(Peer::Lost(cause)) => return Err(SubmitError::Lost { peer, cause: cause.clone() }),
            Some(Peer::Severed) => return Err(SubmitError::Severed { peer }),
        }
        let local_key = self.check(peer, &transfer)?;
        let Peer::Open(pair) = &mut self.peers[peer as usize] else {
            return Err(SubmitError::NotConnected { peer });
        };
        let submitted = pair.submit(transfer, id, local_key, &mut self.outbox);
        if let Err(SubmitError::Lost { cause, .. }) = &submitted {
            self.lose(peer, cause.clone());
        }
        submitted
    }

    fn cells(&self, peer: Rank) -> Cells {
        self.cells[peer as usize].get_or_init(|| Cells::on_heap(self.caps.cells)).clone()
    }

    fn post(&mut self, peer: Rank, message: &[u8]) -> Result<(), PostError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        match self.peers.get(peer as usize) {
            Some(Peer::Open(_)) => {}
            _ => return Err(PostError::NotConnected { peer }),
        }
        // Who has this message finds released regions gone.
        self.forget_released();
        self.control.post_framed(peer, &desk::of_user(message))
    }

    fn poll(&mut self, now: Nanos, events: &mut Vec<Event>) {
        if std::mem::take(&mut self.is_armed) {
            self.completions.silence();
        }
        self.unfinished = self.take_completions();
        self.control_polls += 1;
        let is_due = now.since(self.control_polled_at) >= CONTROL_INTERVAL
            || self.control_polls >= CONTROL_POLLS
            || self.desk.has_any()
            || self.control.has_news();
        if is_due {
            self.poll_control(now);
            self.convict_late(now);
        }
        if self.releases.has_any() {
            self.forget_released();
        }
        if self.is_leaving && !self.has_left {
            self.go();
        }
        self.deliver(events);
    }

    fn arm(&mut self) -> Option<Bell> {
        if self.unfinished || self.desk.has_any() || self.releases.has_any() || !self.outbox.is_empty() {
            return None;
        }
        self.control_polls = CONTROL_POLLS;
        let control = self.control.arm();
        self.is_armed = true;
        self.completions.silence();
        self.completions.arm().ok()?;
        // What completed before it was armed rings nothing.
        self.unfinished = self.take_completions();
        if control.is_none() || self.unfinished || !self.outbox.is_empty() || self.desk.has_any() {
            return None;
        }
        Some(Bell::File(Arc::clone(&self.epoll)))
    }

    fn ringer(&self) -> Arc<dyn Ring> {
        self.control.ringer()
    }

    fn next_wakeup(&self) -> Option<Nanos> {
        let joining = self.peers.iter().filter_map(|peer| match peer {
            Peer::Joining(joining) => Some(joining.deadline),
            _ => None,
        });
        joining.chain(self.control.next_wakeup()).min()
    }

    fn leave(&mut self) {
        self.is_leaving = true;
        self.go();
    }

    fn flush(&mut self) -> bool {
        // The NIC sends what it was given by itself.
        self.control.flush()
    }

    fn is_flushed(&self) -> bool {
        let is_sent = self.peers.iter().all(|peer| match peer {
            Peer::Open(pair) => pair.is_idle(),
            _ => true,
        });
        is_sent && (!self.is_leaving || self.has_left) && self.control.is_flushed()
    }
}
