//! Tensors of a run by ordinary gRPC, for comparison: over sockets, or over byte streams of the
//! ranks' fabric.
//!
//! A receiver asks its sender for each tensor by a call of its own (`Receive`), a few iterations
//! ahead, as TensorFlow does at the start of a step. The sender answers when the tensor is there.
//! The call encodes the tensor into a message, a copy, and the receiver copies it out of the
//! message into memory in which a runtime can use it. HTTP/2 has its largest windows and frames.
//!
//! **Invariant:** a tensor's memory is written again only when its message has been encoded.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use pleach::exchange::grpc::byte_streams::ByteStreams;
use pleach::graph::ElementType;
use pleach::graph::run::channels::{Channel, Received, ReceivedBytes, TensorForm};
use pleach::graph::run::{TensorTransport, TransportError, leave, tensor_memory};
use pleach::transport::mutex::lock;
use pleach::transport::rendezvous::Store;
use pleach::transport::{Device, Event, Rank, Region, RegisterError, SharedMemory, Slice, clock};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::tokio_stream;
use tonic::{Status, transport};
use tonic_prost::ProstCodec;

use crate::cli::grpc::{BoxFuture, MESSAGE, Method, Served, endpoint, listen, only, server};

/// The only method of the service.
const PATH: &str = "/pleach.graph.Tensors/Receive";

/// Streams of a pair of ranks: the lower rank serves the first, the higher one the second.
pub(crate) const STREAMS: u16 = 2;

/// Threads of the runtime of a rank.
const THREADS: usize = 2;

/// Why a tensor did not travel.
#[derive(Debug, thiserror::Error)]
enum GrpcError {
    #[error("gRPC does not start: {0}; run all ranks on one host, or take --transfer grpc-fabric")]
    Start(String),
    #[error("the tensor '{tensor}' of iteration {iteration} did not come from rank {from} by gRPC: {cause}")]
    Receive { tensor: String, iteration: u64, from: Rank, cause: String },
    #[error("rank {to} did not take the tensor '{tensor}' of iteration {iteration} within {patience:?}")]
    Late { tensor: String, iteration: u64, to: Rank, patience: Duration },
}

fn other(error: GrpcError) -> TransportError {
    TransportError::Other(Box::new(error))
}

/// Names a tensor: its channel and its iteration.
#[derive(Clone, Copy, PartialEq, Eq, Hash, prost::Message)]
struct Ask {
    #[prost(uint64, tag = "1")]
    crossing: u64,
    #[prost(uint64, tag = "2")]
    iteration: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Tensor {
    #[prost(string, tag = "1")]
    element: String,
    #[prost(uint64, repeated, tag = "2")]
    dims: Vec<u64>,
    #[prost(bytes = "bytes", tag = "3")]
    data: Bytes,
}

/// Where tensors wait for those that ask, and those that ask for tensors.
#[derive(Default)]
struct Mailbox {
    state: Mutex<MailboxState>,
    /// A tensor's memory is free.
    freed: Condvar,
}

#[derive(Default)]
struct MailboxState {
    sent: HashMap<Ask, Tensor>,
    asked: HashMap<Ask, oneshot::Sender<Tensor>>,
    /// Tensors whose memory is in use.
    in_use: HashSet<Ask>,
}

impl Mailbox {
    fn send(&self, name: Ask, tensor: Tensor) {
        let mut state = lock(&self.state);
        match state.asked.remove(&name) {
            // Dropped outside of the lock, which its memory takes.
            Some(asked) => {
                drop(state);
                drop(asked.send(tensor));
            }
            None => drop(state.sent.insert(name, tensor)),
        }
    }

    async fn ask(&self, name: Ask) -> Result<Tensor, Status> {
        let asked = {
            let mut state = lock(&self.state);
            if let Some(tensor) = state.sent.remove(&name) {
                return Ok(tensor);
            }
            let (answer, asked) = oneshot::channel();
            state.asked.insert(name, answer);
            asked
        };
        asked.await.map_err(|_| Status::aborted("the rank has ended, or the tensor is asked for again"))
    }

    /// Waits until the memory of this tensor is free. False: it is not.
    fn wait_free(&self, name: Ask, patience: Duration) -> bool {
        let state = lock(&self.state);
        let is_used = |state: &mut MailboxState| state.in_use.contains(&name);
        let waited = self.freed.wait_timeout_while(state, patience, is_used);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

/// A tensor's memory, as bytes of a message.
struct InUse {
    mailbox: Arc<Mailbox>,
    name: Ask,
    slice: Slice,
}

impl AsRef<[u8]> for InUse {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the slice lies in its region, which it holds. This rank writes there again only
        // after `wait_free`, which waits for the drop of this value; peers may not write there.
        unsafe { std::slice::from_raw_parts(self.slice.as_ptr(), self.slice.len()) }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        lock(&self.mailbox.state).in_use.remove(&self.name);
        self.mailbox.freed.notify_all();
    }
}

/// The service of a rank.
#[derive(Clone)]
struct Service(Arc<Mailbox>);

impl Method for Service {
    const SERVICE: &'static str = "pleach.graph.Tensors";
    const PATH: &'static str = PATH;
    type Ask = Ask;
    type Answer = Tensor;
    type Codec = ProstCodec<Tensor, Ask>;

    fn answer(&self, ask: Ask) -> BoxFuture<Result<Tensor, Status>> {
        let mailbox = self.0.clone();
        Box::pin(async move { mailbox.ask(ask).await })
    }
}

/// A server that runs, and how to end it.
type Serving = (oneshot::Sender<()>, JoinHandle<Result<(), transport::Error>>);

/// Where memory for tensors is registered.
enum Keeper {
    Device(Box<dyn Device>),
    Streams(ByteStreams),
}

impl Keeper {
    fn register(&mut self, memory: Arc<SharedMemory>) -> Result<Region, RegisterError> {
        match self {
            Self::Device(device) => device.register(memory),
            Self::Streams(streams) => streams.register(memory),
        }
    }
}

/// See the module.
pub(crate) struct OverGrpc {
    runtime: Runtime,
    keeper: Keeper,
    mailbox: Arc<Mailbox>,
    clients: BTreeMap<Rank, transport::Channel>,
    servers: Vec<Serving>,
    channels: Vec<Channel>,
    depth: u64,
    iterations: u64,
    patience: Duration,
    asked: HashMap<Ask, JoinHandle<Result<Tensor, Status>>>,
    /// By channel: memory of tensors that were released.
    free: HashMap<usize, Vec<Slice>>,
    held: HashMap<Ask, Slice>,
    registered_bytes: u64,
}

/// How a run goes over gRPC.
pub(crate) struct Plan {
    pub(crate) rank: Rank,
    pub(crate) ranks: u32,
    pub(crate) channels: Vec<Channel>,
    pub(crate) depth: u32,
    pub(crate) iterations: u64,
    pub(crate) patience: Duration,
}

/// A connection to a rank that sends, on its way.
type Connecting = (Rank, BoxFuture<Result<transport::Channel, transport::Error>>);

/// The servers of a rank, and its connections to others.
struct Front<'a> {
    runtime: &'a Runtime,
    mailbox: &'a Arc<Mailbox>,
    /// The ranks that send to this one.
    senders: &'a [Rank],
    servers: Vec<Serving>,
    connecting: Vec<Connecting>,
}

impl Front<'_> {
    /// Serves on a socket of loopback and dials those of the senders: the ranks of a comparison are
    /// on one host.
    fn open_sockets(
        &mut self,
        plan: &Plan,
        store: Option<&mut (dyn Store + 'static)>,
    ) -> Result<(), TransportError> {
        let own = {
            let _in_runtime = self.runtime.enter();
            let (own, incoming) = listen().map_err(|error| not_started(&error))?;
            self.serve(incoming);
            own
        };
        let addresses = exchange_addresses(store, plan, own).map_err(|error| not_started(&error))?;
        for from in self.senders {
            let server = endpoint(&format!("http://{}", addresses[*from as usize]));
            let server = server.map_err(|error| not_started(&error))?;
            self.connecting.push((*from, Box::pin(async move { server.connect().await })));
        }
        Ok(())
    }

    /// Serves and dials over streams of a device.
    fn open_streams(
        &mut self,
        plan: &Plan,
        device: Box<dyn Device>,
        events: Vec<Event>,
    ) -> Result<ByteStreams, TransportError> {
        let peers: Vec<Rank> = (0..plan.ranks).filter(|peer| *peer != plan.rank).collect();
        let opened = ByteStreams::open(device, events, &peers, STREAMS);
        let (streams, opened) = opened.map_err(|error| not_started(&error))?;
        for (number, stream) in opened.into_iter().enumerate() {
            let (peer, is_first) = (stream.peer(), number % usize::from(STREAMS) == 0);
            if is_first == (plan.rank < peer) {
                self.serve(only(stream));
            } else if self.senders.contains(&peer) {
                let server = endpoint("http://rank").map_err(|error| not_started(&error))?;
                self.connecting.push((peer, Box::pin(stream.channel(server))));
            }
        }
        Ok(streams)
    }

    /// Starts a server for what comes in.
    fn serve<I, S, E>(&mut self, incoming: I)
    where
        I: tokio_stream::Stream<Item = Result<S, E>> + Send + 'static,
        S: tokio::io::AsyncRead
            + tokio::io::AsyncWrite
            + transport::server::Connected
            + Unpin
            + Send
            + 'static,
        S::ConnectInfo: Clone + Send + Sync + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
    {
        let (end, ended) = oneshot::channel::<()>();
        let service = Served(Service(self.mailbox.clone()));
        let serving = async move {
            let ended = async { drop(ended.await) };
            server().add_service(service).serve_with_incoming_shutdown(incoming, ended).await
        };
        self.servers.push((end, self.runtime.spawn(serving)));
    }

    /// Waits for the connections. Returns the clients, by rank.
    fn connect(&mut self, patience: Duration) -> Result<BTreeMap<Rank, transport::Channel>, TransportError> {
        let mut clients = BTreeMap::new();
        for (from, connecting) in self.connecting.drain(..) {
            let connected = self.runtime.block_on(async { tokio::time::timeout(patience, connecting).await });
            let connected = connected.map_err(|_| not_started(&format!("rank {from} does not answer")))?;
            clients.insert(from, connected.map_err(|error| not_started(&format!("rank {from}: {error}")))?);
        }
        Ok(clients)
    }
}

fn not_started(error: &dyn std::fmt::Display) -> TransportError {
    other(GrpcError::Start(error.to_string()))
}

impl OverGrpc {
    /// Serves this rank's tensors and connects to the ranks that send to it: over sockets, or over
    /// streams of the device, which gives memory for tensors as well.
    pub(crate) fn open(
        plan: Plan,
        is_on_sockets: bool,
        (device, events): (Box<dyn Device>, Vec<Event>),
        store: Option<&mut (dyn Store + 'static)>,
    ) -> Result<Self, TransportError> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
        let runtime = runtime.map_err(|error| not_started(&error))?;
        let mailbox = Arc::new(Mailbox::default());
        let sends_here = |from: &Rank| {
            plan.channels.iter().any(|channel| (channel.from, channel.to) == (*from, plan.rank))
        };
        let senders: Vec<Rank> = (0..plan.ranks).filter(sends_here).collect();
        let (servers, connecting) = (Vec::new(), Vec::new());
        let mut front =
            Front { runtime: &runtime, mailbox: &mailbox, senders: &senders, servers, connecting };
        let keeper = if is_on_sockets {
            front.open_sockets(&plan, store)?;
            Keeper::Device(device)
        } else {
            Keeper::Streams(front.open_streams(&plan, device, events)?)
        };
        let clients = front.connect(plan.patience)?;
        let servers = front.servers;
        let mut opened = Self {
            runtime,
            keeper,
            mailbox,
            clients,
            servers,
            channels: plan.channels,
            depth: plan.depth.into(),
            iterations: plan.iterations,
            patience: plan.patience,
            asked: HashMap::new(),
            free: HashMap::new(),
            held: HashMap::new(),
            registered_bytes: 0,
        };
        for crossing in 0..opened.channels.len() {
            if opened.channels[crossing].to != plan.rank {
                continue;
            }
            for iteration in 0..opened.depth {
                opened.ask(Ask { crossing: crossing as u64, iteration });
            }
        }
        Ok(opened)
    }

    /// Asks the sender for a tensor, if there will be one.
    fn ask(&mut self, name: Ask) {
        let from = self.channels[name.crossing as usize].from;
        if name.iteration >= self.iterations {
            return;
        }
        let Some(client) = self.clients.get(&from).cloned() else { return };
        let call = async move {
            let mut client = tonic::client::Grpc::new(client).max_decoding_message_size(MESSAGE);
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<Ask, Tensor>::default();
            let answer =
                client.unary(tonic::Request::new(name), PathAndQuery::from_static(PATH), codec).await;
            answer.map(tonic::Response::into_inner)
        };
        self.asked.insert(name, self.runtime.spawn(call));
    }

    /// The bytes of a message in memory that a runtime can use.
    fn copy(&mut self, crossing: usize, name: Ask, data: &[u8]) -> Result<ReceivedBytes, TransportError> {
        if data.is_empty() {
            return Ok(ReceivedBytes::Empty);
        }
        let released = self.free.entry(crossing).or_default().pop().filter(|slice| slice.len() == data.len());
        let slice = released.map_or_else(|| self.memory(data.len()), Ok)?;
        // SAFETY: the slice has so many bytes, in memory of this rank that peers do not write. It
        // is new, or was released, so nothing else here has its bytes.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), slice.as_ptr(), data.len()) };
        self.held.insert(name, slice.clone());
        Ok(ReceivedBytes::Own(slice))
    }
}

/// The addresses of all ranks, by rank.
fn exchange_addresses(
    store: Option<&mut (dyn Store + 'static)>,
    plan: &Plan,
    own: SocketAddr,
) -> Result<Vec<String>, String> {
    let Some(store) = store else { return Ok(vec![own.to_string()]) };
    let deadline = clock::now() + plan.patience;
    let key = |rank: Rank| format!("graph-run-grpc/{rank}");
    store.set(&key(plan.rank), own.to_string().as_bytes(), deadline).map_err(|error| error.to_string())?;
    let keys: Vec<String> = (0..plan.ranks).map(key).collect();
    let addresses = store.wait(&keys, deadline, deadline).map_err(|error| error.to_string())?;
    Ok(addresses.iter().map(|address| String::from_utf8_lossy(address).into_owned()).collect())
}

impl TensorTransport for OverGrpc {
    fn memory(&mut self, bytes: usize) -> Result<Slice, TransportError> {
        let slice = tensor_memory(bytes, |memory| self.keeper.register(memory))?;
        self.registered_bytes += slice.region().len() as u64;
        Ok(slice)
    }

    fn wait_free(&mut self, crossing: usize, iteration: u64) -> Result<(), TransportError> {
        let Some(before) = iteration.checked_sub(self.depth) else { return Ok(()) };
        let (name, patience) = (Ask { crossing: crossing as u64, iteration: before }, self.patience);
        if self.mailbox.wait_free(name, patience) {
            return Ok(());
        }
        let Channel { tensor, to, .. } = &self.channels[crossing];
        Err(other(GrpcError::Late { tensor: tensor.clone(), iteration: before, to: *to, patience }))
    }

    fn send(
        &mut self,
        crossing: usize,
        iteration: u64,
        source: Slice,
        form: &TensorForm,
    ) -> Result<(), TransportError> {
        let name = Ask { crossing: crossing as u64, iteration };
        lock(&self.mailbox.state).in_use.insert(name);
        let data = Bytes::from_owner(InUse { mailbox: self.mailbox.clone(), name, slice: source });
        let tensor = Tensor { element: form.element.name().to_owned(), dims: form.dims.clone(), data };
        self.mailbox.send(name, tensor);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn receive(&mut self, crossing: usize, iteration: u64) -> Result<Received, TransportError> {
        let name = Ask { crossing: crossing as u64, iteration };
        let Channel { tensor, from, .. } = &self.channels[crossing];
        let (tensor, from, patience) = (tensor.clone(), *from, self.patience);
        let failed = |cause: String| other(GrpcError::Receive { tensor, iteration, from, cause });
        let Some(call) = self.asked.remove(&name) else {
            return Err(failed("it was not asked for".to_owned()));
        };
        self.ask(Ask { iteration: iteration + self.depth, ..name });
        let answer = self.runtime.block_on(async { tokio::time::timeout(patience, call).await });
        let answer = match answer {
            Err(_) => return Err(failed(format!("not within {patience:?}"))),
            Ok(Err(error)) => return Err(failed(error.to_string())),
            Ok(Ok(Err(status))) => return Err(failed(status.to_string())),
            Ok(Ok(Ok(answer))) => answer,
        };
        let Some(element) = ElementType::from_name(&answer.element) else {
            return Err(failed(format!("it has elements of type {:?}", answer.element)));
        };
        let form = TensorForm { element, dims: answer.dims };
        if form.bytes() != Some(answer.data.len() as u64) {
            return Err(failed(format!("{} bytes came as {element} {:?}", answer.data.len(), form.dims)));
        }
        let bytes = self.copy(crossing, name, &answer.data)?;
        Ok(Received { bytes, form: Some(form) })
    }

    fn release(&mut self, crossing: usize, iteration: u64) -> Result<(), TransportError> {
        if let Some(slice) = self.held.remove(&Ask { crossing: crossing as u64, iteration }) {
            self.free.entry(crossing).or_default().push(slice);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), TransportError> {
        // What was sent is encoded, then the servers end when it was written.
        for crossing in 0..self.channels.len() {
            for iteration in self.iterations..self.iterations + self.depth {
                self.wait_free(crossing, iteration)?;
            }
        }
        self.clients.clear();
        for (end, server) in self.servers.drain(..) {
            drop(end);
            let ended = self.runtime.block_on(async { tokio::time::timeout(self.patience, server).await });
            let ended = ended.map_err(|_| "its clients did not end".to_owned());
            let ended = ended.and_then(|ended| ended.map_err(|error| error.to_string()));
            let ended = ended.and_then(|ended| ended.map_err(|error| error.to_string()));
            ended.map_err(|cause| other(GrpcError::Start(cause)))?;
        }
        if let Keeper::Device(device) = &mut self.keeper {
            leave(&mut **device, self.patience);
        }
        Ok(())
    }

    fn registered_bytes(&self) -> u64 {
        self.registered_bytes
    }
}
