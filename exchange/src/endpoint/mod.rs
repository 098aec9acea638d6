//! The endpoint: a program's end of the tensor exchange.
//!
//! | type | what it is |
//! | --- | --- |
//! | [`Endpoint`] | what the program sends, where peers connect, and a thread that makes progress |
//! | [`Peer`] | another program, from which this one receives |
//! | [`Tensor`], [`UntypedTensor`] | lendable memory that the program fills |
//! | [`SharedTensor`] | the same when nobody writes it any more: what is sent |
//! | [`ReceivedTensor`] | a tensor of a peer, in place where the peer's memory can be mapped |
//! | [`PendingTensor`] | a tensor that was asked for |
//!
//! Two programs share a control connection over TCP. Both introduce themselves there and prove the
//! secret ([`handshake`]); after that it carries messages ([`crate::message`]). The program that
//! dialed asks, the other one answers. The pure parts decide ([`crate::Server`], [`crate::Calls`]);
//! [`core`] carries out what they decide, under one lock.
//!
//! **Invariant:** each request of this program ends by its deadline, whatever its peers do. After
//! an error no peer changes a byte that this program can see.

mod connection;
mod core;
mod error;
mod frame;
mod gets;
mod handshake;
mod link;
mod lookup;
mod memory;
mod metrics;
mod options;
#[cfg(feature = "grpc")]
mod own;
mod pair;
mod peer;
mod regions;
mod returns;
#[cfg(feature = "grpc")]
pub(crate) mod rpcs;
mod shared;
#[cfg(test)]
mod simulated;
mod slot;
mod tensor;
mod thread;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use pleach_transport::auth::random_number;
use pleach_transport::device::Protection;
use pleach_transport::metrics_server::MetricsServer;
use pleach_transport::mutex::lock;
use pleach_transport::tls::TlsMode;
use pleach_transport::{Nanos, clock, host_identity};
use pleach_vocabulary::Fabric;
use rustix::event::epoll;
use sha2::{Digest, Sha256};

pub use self::error::{LinkError, OpenEndpointError, ReceiveTensorError, SendTensorError};
pub use self::handshake::HandshakeError;
use self::link::Arrived;
use self::lookup::NameLookup;
pub use self::memory::TensorMemoryError;
pub use self::metrics::{ExchangeCounts, InlineReason, Latencies, TensorCount};
pub use self::options::{DEFAULT_LISTEN, DEFAULT_WAIT, EndpointLimits, EndpointOptions, ExchangeFabric};
pub use self::peer::{Peer, PendingTensor};
use self::shared::Shared;
use self::slot::Slot;
pub use self::tensor::{
    DIMENSIONS_MAX, ElementTypeError, ReceivedTensor, SharedTensor, Tensor, TensorElement, TensorShape,
    TensorWay, UntypedTensor,
};
use crate::introduction::Fabrics;
use crate::key::Key;
use crate::table::{ReceiveError, Request, SendError};

/// A program's end of the tensor exchange. Clones are handles of one endpoint. It ends with its
/// last handle, its last peer and the last tensor that is held in a peer's memory.
#[derive(Clone)]
pub struct Endpoint {
    handle: Arc<Handle>,
}

/// Ends the thread when nobody uses the endpoint.
pub(crate) struct Handle {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// Where metrics are served.
    metrics: Option<SocketAddr>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    /// Ends the thread, which ends all links.
    fn end(&self) {
        self.shared.end();
        let thread = lock(&self.thread).take();
        // The thread itself drops the last tensor that nobody took.
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // It has reported a panic.
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Endpoint({})", self.handle.address)
    }
}

impl Endpoint {
    /// Opens an endpoint: it listens from now on.
    ///
    /// # Errors
    ///
    /// See [`OpenEndpointError`].
    pub fn open(options: &EndpointOptions) -> Result<Self, OpenEndpointError> {
        let refused = |resource| move |source: std::io::Error| OpenEndpointError::System { resource, source };
        let tls = options.link_tls()?;
        // Devices protect their connections in the same way.
        let secret = options.secret.clone().map(|secret| secret.with_tls(tls.clone()));
        let options = &EndpointOptions { secret, ..options.clone() };
        let listener = listen(&options.listen)?;
        let address = listener.local_addr().map_err(refused("socket"))?;
        let without_regions = |reason: String| {
            let (fabric, reason) = (options.fabric, reason.into());
            if options.requires_regions {
                return Err(OpenEndpointError::NoRegions { fabric, reason });
            }
            tracing::warn!("tensors go inline: {reason}");
            Ok(())
        };
        if options.requires_regions && options.fabrics(address.ip()) == Fabrics::default() {
            let needs_secret = options.fabric != ExchangeFabric::None;
            let reason =
                if needs_secret { "it needs PLEACH_SECRET_FILE beyond loopback" } else { "there are none" };
            without_regions(reason.to_owned())?;
        }
        if options.secret.is_none() && !address.ip().to_canonical().is_loopback() {
            tracing::warn!(
                "{address} is not loopback and there is no secret: whoever reaches it receives tensors, \
                 inline; set PLEACH_SECRET_FILE"
            );
        }
        let protection = tls.asked(address.ip());
        tracing::info!("exchange: who connects to {address} {protection}");
        let is_near = options.secret.is_none() || address.ip().to_canonical().is_loopback();
        if tls.mode() == TlsMode::Auto && protection == Protection::Clear && !is_near {
            tracing::warn!("built without the feature 'tls': links to other hosts are in clear");
        }
        let incarnation = random_number();
        let host = options.host.as_deref().map_or_else(host_identity, named_host);
        let introduction = shared::own_introduction(options, address, host, incarnation);
        let descriptor = || refused("descriptor");
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from);
        let set: OwnedFd = set.map_err(descriptor())?;
        let cloned = set.try_clone().map_err(descriptor())?;
        let shared = Shared::new(options.clone(), tls, address.ip(), introduction, cloned)?;
        if options.fabric == ExchangeFabric::Verbs {
            // Whoever names it learns now what is missing.
            let opened = shared.core().open_device(Fabric::Verbs);
            opened.map(drop).or_else(without_regions)?;
        }
        thread::watch(&shared, &listener).map_err(std::io::Error::from).map_err(descriptor())?;
        let runs = shared.clone();
        let metrics = options.metrics.map(|address| {
            let seen = Arc::downgrade(&shared);
            let text = move || seen.upgrade().map_or_else(String::new, |seen| seen.core().counts().to_text());
            MetricsServer::start(address, text)
                .map_err(|source| OpenEndpointError::Metrics { address, source })
        });
        let metrics = metrics.transpose()?;
        let metrics_address = metrics.as_ref().map(MetricsServer::address);
        let thread = std::thread::Builder::new()
            .name("pleach-exchange".to_owned())
            .spawn(move || {
                thread::run(runs, &set, listener);
                // Its end waits for whoever reads metrics, so it ends here, outside of all locks.
                drop(metrics);
            })
            .map_err(refused("thread"))?;
        let thread = Mutex::new(Some(thread));
        Ok(Self { handle: Arc::new(Handle { shared, address, metrics: metrics_address, thread }) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.handle.address
    }

    /// The incarnation of the endpoint: a number that it has drawn when it was opened.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.handle.shared.incarnation()
    }

    /// Where it serves metrics, if it does.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.handle.metrics
    }

    /// Lendable memory for a tensor. It holds zeros, or bytes of earlier tensors of this program.
    ///
    /// # Errors
    ///
    /// See [`TensorMemoryError`].
    pub fn tensor<T: TensorElement>(&self, dimensions: &[usize]) -> Result<Tensor<T>, TensorMemoryError> {
        let shape = TensorShape::new(T::DATA_TYPE, dimensions)?;
        let buffer = self.handle.shared.memory.allocate(shape.bytes())?;
        Ok(Tensor::new(buffer, shape))
    }

    /// Lendable memory for a tensor whose type is known at run time. It holds zeros, or bytes of
    /// earlier tensors of this program.
    ///
    /// # Errors
    ///
    /// See [`TensorMemoryError`].
    pub fn untyped_tensor(&self, shape: &TensorShape) -> Result<UntypedTensor, TensorMemoryError> {
        let buffer = self.handle.shared.memory.allocate(shape.bytes())?;
        Ok(UntypedTensor::new(buffer, shape.clone()))
    }

    /// A tensor whose bytes `fill` writes.
    ///
    /// # Errors
    ///
    /// See [`TensorMemoryError`], or the error of `fill`.
    pub fn tensor_of_bytes<E: From<TensorMemoryError>>(
        &self,
        shape: &TensorShape,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<SharedTensor, E> {
        let mut buffer = self.handle.shared.memory.allocate(shape.bytes())?;
        fill(buffer.as_bytes_mut())?;
        Ok(SharedTensor::of_bytes(buffer, shape.clone()))
    }

    /// Sends a tensor under a key: it is kept until a program receives it, or its step is aborted
    /// or cleaned up. Waits where there is no room for it, at most [`EndpointOptions::send_wait`].
    ///
    /// # Errors
    ///
    /// See [`SendTensorError`].
    pub fn send(&self, key: &Key, tensor: SharedTensor) -> Result<(), SendTensorError> {
        self.send_within(key, tensor, self.handle.shared.options.send_wait)
    }

    /// As [`Endpoint::send`], waiting at most as long as this.
    ///
    /// # Errors
    ///
    /// See [`SendTensorError`].
    pub fn send_within(
        &self,
        key: &Key,
        tensor: SharedTensor,
        limit: Duration,
    ) -> Result<(), SendTensorError> {
        self.send_while(key, tensor, limit, limit, || true).unwrap_or(Ok(()))
    }

    /// As [`Endpoint::send_within`], for programs that look at something else between two turns of
    /// waiting. `None`: `goes_on` said no after a turn, and the tensor was not sent.
    ///
    /// # Errors
    ///
    /// See [`SendTensorError`].
    pub fn send_while(
        &self,
        key: &Key,
        tensor: SharedTensor,
        limit: Duration,
        turn: Duration,
        mut goes_on: impl FnMut() -> bool,
    ) -> Option<Result<(), SendTensorError>> {
        let now = clock::now();
        let deadline = now + limit;
        let shared = &self.handle.shared;
        let mut core = shared.core();
        // Under the lock: what waits before the end is ended then.
        if shared.is_over() {
            return Some(Err(SendTensorError::Closed));
        }
        let slot = core.send(now, key, tensor, deadline);
        drop(core);
        let waited = wait_in_turns(shared, &slot, deadline, turn, &mut goes_on);
        if waited.is_none() {
            shared.core().give_up_send(clock::now(), &slot);
        }
        // A send that is over and has no result was of a step that ended with the endpoint.
        let cleaned_up = || Err(SendError::CleanedUp { key: key.clone() }.into());
        match (waited, slot.leave()) {
            (Some(Some(result)), _) | (_, Some(result)) => Some(result),
            (Some(None), None) => Some(cleaned_up()),
            (None, None) => None,
        }
    }

    /// Offers the tensors of a step to all programs, each any number of times, in place of those
    /// that were published in this step before. A name that is not among them fails at once, also
    /// for receives that wait already.
    pub fn publish(&self, step: u64, tensors: BTreeMap<String, SharedTensor>) {
        self.handle.shared.core().publish(clock::now(), step, tensors);
    }

    /// Receives a tensor that this program sends.
    ///
    /// # Errors
    ///
    /// See [`ReceiveTensorError`].
    pub fn receive(&self, key: &Key, limit: Duration) -> Result<ReceivedTensor, ReceiveTensorError> {
        let received = self.receive_while(key, limit, limit, || true);
        received.unwrap_or(Err(ReceiveTensorError::Closed))
    }

    /// As [`Endpoint::receive`], for programs that look at something else between two turns of
    /// waiting. `None`: `goes_on` said no after a turn, and the tensor is for the next receiver.
    ///
    /// # Errors
    ///
    /// See [`ReceiveTensorError`].
    pub fn receive_while(
        &self,
        key: &Key,
        limit: Duration,
        turn: Duration,
        mut goes_on: impl FnMut() -> bool,
    ) -> Option<Result<ReceivedTensor, ReceiveTensorError>> {
        let now = clock::now();
        let deadline = now + limit;
        let shared = &self.handle.shared;
        let mut core = shared.core();
        // Under the lock: what waits before the end is ended then.
        if shared.is_over() {
            return Some(Err(ReceiveTensorError::Closed));
        }
        let slot = core.receive(now, key, Request::default(), deadline);
        drop(core);
        let waited = wait_in_turns(shared, &slot, deadline, turn, &mut goes_on);
        if waited.is_none() {
            shared.core().give_up_receive(clock::now(), &slot);
        }
        let late = || Err(ReceiveError::Timeout { key: key.clone(), waited: clock::now().since(now) }.into());
        match (waited, slot.leave()) {
            (Some(Some(result)), _) | (_, Some(result)) => Some(result.map(Arrived::take)),
            (Some(None), None) => Some(late()),
            (None, None) => None,
        }
    }

    /// Ends a step: what waits in it here fails with this reason, and what comes to it later, until
    /// the step is cleaned up. Its tensors are dropped.
    pub fn abort(&self, step: u64, reason: &str) {
        self.handle.shared.core().abort(clock::now(), step, reason);
    }

    /// Forgets a step: what waits in it here fails. Its tensors are dropped.
    pub fn clean_up(&self, step: u64) {
        self.handle.shared.core().clean_up(clock::now(), step);
    }

    /// Another program, by the address `HOST:PORT` of its endpoint. The first receive makes the
    /// link.
    ///
    /// # Errors
    ///
    /// When the address has another form.
    pub fn connect(&self, address: &str) -> Result<Peer, LinkError> {
        Peer::new(self.handle.clone(), address)
    }

    /// Closes the endpoint for all its handles: it listens no longer, its links end, and calls to
    /// and of its peers fail. Tensors that were received stay readable until they are dropped. This
    /// program's memory is no longer lent: a peer that still reads a tensor in place sees what this
    /// program writes there next.
    pub fn close(&self) {
        self.handle.end();
    }

    /// What it has counted, and what it holds now.
    #[must_use]
    pub fn counts(&self) -> ExchangeCounts {
        self.handle.shared.core().counts()
    }
}

/// Decodes bytes with every decoder of control connections: for fuzzing.
///
/// # Panics
///
/// When a decoded value does not survive encoding and decoding, or a handshake takes a proof that
/// nobody can make.
#[doc(hidden)]
pub fn check_decoders(bytes: &[u8]) {
    if let Ok(frame) = regions::SetupFrame::decode(bytes) {
        assert_eq!(regions::SetupFrame::decode(&frame.encode()), Ok(frame));
    }
    handshake::check(bytes);
}

/// Waits for the end of a request of this program, in turns. `None`: `goes_on` said no.
/// `Some(None)`: the deadline has come, and there is no result.
fn wait_in_turns<R>(
    shared: &Shared,
    slot: &Slot<R>,
    deadline: Nanos,
    turn: Duration,
    goes_on: &mut impl FnMut() -> bool,
) -> Option<Option<R>> {
    loop {
        if let Some(result) = slot.take() {
            return Some(Some(result));
        }
        let now = clock::now();
        if now >= deadline {
            shared.core().expire(now);
            return Some(slot.take());
        }
        slot.wait(deadline.since(now).min(turn));
        if !slot.has_ended() && clock::now() < deadline && !goes_on() {
            return None;
        }
    }
}

/// How long opening an endpoint waits for the addresses of the host that it listens on.
const LISTEN_LOOKUP_LIMIT: Duration = Duration::from_secs(10);

/// A listener at `HOST:PORT` that does not block.
fn listen(text: &str) -> Result<TcpListener, OpenEndpointError> {
    let wrong = |source| OpenEndpointError::Address { address: text.to_owned(), source };
    let found = NameLookup::default().addresses(text, LISTEN_LOOKUP_LIMIT);
    let late = || OpenEndpointError::NoLookup { address: text.to_owned(), waited: LISTEN_LOOKUP_LIMIT };
    let addresses = found.ok_or_else(late)?.map_err(wrong)?;
    let missing = || wrong(Arc::new(std::io::ErrorKind::AddrNotAvailable.into()));
    let address = *addresses.first().ok_or_else(missing)?;
    let refused = |source| OpenEndpointError::Listen { address, source };
    let listener = TcpListener::bind(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    Ok(listener)
}

/// The identity of a host that was named.
fn named_host(name: &str) -> [u8; 16] {
    let hash: [u8; 32] = Sha256::digest(name.as_bytes()).into();
    std::array::from_fn(|byte| hash[byte])
}
