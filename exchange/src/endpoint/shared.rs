//! What the handles of an endpoint, its peers and its thread share.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_transport::device::Protection;
use pleach_transport::mutex::lock;
use pleach_transport::tls::Tls;
use pleach_vocabulary::Fabric;
use rustix::event::{EventfdFlags, eventfd};

use super::Handle;
use super::core::Core;
use super::error::OpenEndpointError;
use super::memory::LendableMemory;
use super::options::EndpointOptions;
use super::slot::Slot;
use super::tensor::TensorWay;
use crate::introduction::{Fabrics, Introduction};
use crate::reference::LinkId;

/// See the module.
pub(crate) struct Shared {
    pub(crate) options: EndpointOptions,
    /// How links are protected.
    pub(crate) tls: Tls,
    pub(crate) memory: Arc<LendableMemory>,
    /// What the introductions of this program say, but for the challenge.
    introduction: Introduction,
    core: Mutex<Core>,
    /// Wakes the thread.
    wake: OwnedFd,
    /// What drops have said.
    dropped: Mutex<Vec<DropNote>>,
    /// The thread is to end. Release store pairs with its acquire load.
    is_over: AtomicBool,
}

impl Shared {
    pub(crate) fn new(
        options: EndpointOptions,
        tls: Tls,
        address: IpAddr,
        introduction: Introduction,
        epoll: OwnedFd,
    ) -> Result<Arc<Self>, OpenEndpointError> {
        let refused = |source: rustix::io::Errno| OpenEndpointError::System {
            resource: "descriptor",
            source: source.into(),
        };
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(refused)?;
        let memory = LendableMemory::new(options.limits.arenas);
        let cloned = wake.try_clone();
        let cloned = cloned.map_err(|source| OpenEndpointError::System { resource: "descriptor", source })?;
        let core = Core::new(introduction.incarnation, &options, address, memory.clone(), [epoll, cloned]);
        Ok(Arc::new(Self {
            options,
            tls,
            memory,
            introduction,
            core: Mutex::new(core),
            wake,
            dropped: Mutex::new(Vec::new()),
            is_over: AtomicBool::new(false),
        }))
    }

    pub(crate) fn core(&self) -> MutexGuard<'_, Core> {
        lock(&self.core)
    }

    /// The fabric by which there are regions with the program of this introduction, or why there
    /// are none.
    pub(crate) fn fabric_with(&self, theirs: &Introduction) -> Result<Fabric, Arc<str>> {
        if let Some(fabric) = self.introduction.shared_fabric(theirs) {
            return Ok(fabric);
        }
        let own = self.introduction.fabrics;
        Err(if own == Fabrics::default() {
            format!("fabric '{}' has no regions here", self.options.fabric).into()
        } else if theirs.fabrics == Fabrics::default() {
            "the other program has no regions".into()
        } else if own.shm && theirs.fabrics.shm && !own.tcp && !theirs.fabrics.tcp {
            "the two programs are on different hosts".into()
        } else {
            let fabrics = theirs.fabrics;
            format!("the other program takes {fabrics} alone, and this one {own}").into()
        })
    }

    /// An introduction with a new challenge.
    pub(crate) fn introduce(&self) -> Introduction {
        Introduction { challenge: pleach_transport::auth::challenge(), ..self.introduction.clone() }
    }

    pub(crate) fn incarnation(&self) -> u64 {
        self.introduction.incarnation
    }

    pub(crate) fn wake_file(&self) -> &OwnedFd {
        &self.wake
    }

    pub(crate) fn wake(&self) {
        // It fails only when the counter is full, and then the file is readable.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Ends the thread.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The core is told later: the lock of the core may be held where a drop happens.
    pub(crate) fn dropped(&self, note: DropNote) {
        lock(&self.dropped).push(note);
        self.wake();
    }

    #[cfg(all(test, feature = "grpc"))]
    pub(crate) fn has_drop_notes(&self) -> bool {
        !lock(&self.dropped).is_empty()
    }

    /// Tells the core what drops have said since the last call.
    pub(crate) fn settle_drops(&self, core: &mut Core, now: Nanos) {
        for note in std::mem::take(&mut *lock(&self.dropped)) {
            match note {
                DropNote::Link(number) => core.close_link(now, number),
                #[cfg(feature = "grpc")]
                DropNote::Leases(number) => core.leases_returned(now, number),
                #[cfg(feature = "grpc")]
                DropNote::Rpc(over) => core.rpc_over(now, over),
            }
        }
    }
}

/// What a drop has to say to the core.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DropNote {
    /// Nobody uses the link of this number any more.
    Link(u64),
    /// Leases of the link of this number are back.
    #[cfg(feature = "grpc")]
    Leases(u64),
    /// An RPC is over.
    #[cfg(feature = "grpc")]
    Rpc(OverRpc),
}

/// An RPC that is over at this end.
#[cfg(feature = "grpc")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct OverRpc {
    /// Its number.
    pub(crate) rpc: u64,
    /// The link on which this program lends for it.
    pub(crate) lends: Option<LinkId>,
    /// Whether the peer must not send references of it any more, so that they are recalled.
    pub(crate) recalls: bool,
    /// The link on which references of the peer may be on their way here, which nobody will see.
    pub(crate) misses: Option<LinkId>,
}

/// The introduction of a program, without a challenge.
pub(crate) fn own_introduction(
    options: &EndpointOptions,
    address: SocketAddr,
    host: [u8; 16],
    incarnation: u64,
) -> Introduction {
    let fabrics = options.fabrics(address.ip());
    let address = pleach_transport::Address(address.to_string());
    let protection = Protection::Clear;
    Introduction { host, incarnation, fabrics, address, challenge: [0; 32], protection }
}

/// The use of a link to a peer: the link is closed after the last drop.
pub(crate) struct LinkHold {
    /// The number of the link in the core.
    pub(crate) number: u64,
    /// Its name at both ends.
    #[cfg_attr(not(feature = "grpc"), expect(dead_code, reason = "RPCs name links"))]
    pub(crate) id: LinkId,
    /// Set when the link has ended. Release store pairs with the acquire load.
    is_lost: AtomicBool,
    /// How tensors come by regions, or why there are none, once that is known.
    regions: Slot<Result<TensorWay, Arc<str>>>,
    /// Set when there are regions. Release store pairs with the acquire load.
    has_regions: AtomicBool,
    /// Set when messages come through memory too. Release store pairs with the acquire load.
    is_mapped: AtomicBool,
    /// A tensor that is held keeps the endpoint, which returns its lease.
    endpoint: Arc<Handle>,
}

impl LinkHold {
    pub(crate) fn new(number: u64, id: LinkId, endpoint: &Arc<Handle>) -> Arc<Self> {
        let [is_lost, has_regions, is_mapped] = [(); 3].map(|()| AtomicBool::new(false));
        let endpoint = endpoint.clone();
        Arc::new(Self { number, id, is_lost, regions: Slot::new(), has_regions, is_mapped, endpoint })
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.is_lost.load(Ordering::Acquire)
    }

    pub(crate) fn set_lost(&self) {
        self.is_lost.store(true, Ordering::Release);
        self.set_regions(Err("its connection closed".into()));
    }
}

impl LinkHold {
    /// Whether there are regions now.
    pub(crate) fn has_regions(&self) -> bool {
        self.has_regions.load(Ordering::Acquire)
    }

    /// Whether messages come through memory, so that it is worth looking for them.
    pub(crate) fn is_mapped(&self) -> bool {
        self.is_mapped.load(Ordering::Acquire)
    }

    /// It is known whether there are regions. The first call counts.
    pub(crate) fn set_regions(&self, regions: Result<TensorWay, Arc<str>>) {
        self.has_regions.store(regions.is_ok(), Ordering::Release);
        self.is_mapped.store(regions == Ok(TensorWay::InPlace), Ordering::Release);
        drop(self.regions.end(regions));
    }

    /// Waits until it is known whether there are regions, at most so long.
    pub(crate) fn wait_for_regions(&self, limit: Duration) -> Option<Result<TensorWay, Arc<str>>> {
        self.regions.wait(limit);
        self.regions.peek()
    }
}

impl Drop for LinkHold {
    fn drop(&mut self) {
        self.endpoint.shared.dropped(DropNote::Link(self.number));
    }
}
