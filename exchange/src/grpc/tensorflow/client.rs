//! The receiver's side: tensors that a task has produced.
//!
//! **Invariant:** an offer that was read is fetched, or left for the next receive of its tensor,
//! whatever becomes of the receive that read it; beyond a limit of such offers it is lost. A key
//! names the task that receives, so the next receive is of this client.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::auth::random_number;
use pleach_transport::mutex::lock;
use pleach_transport::{Nanos, clock};
use tokio::sync::{Mutex, oneshot};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Code, Status, transport};
use tonic_prost::ProstCodec;

use super::{MESSAGE_BYTES_MAX, OFFERED_BYTES_MIN, OTHER_ANSWER_BYTES_MAX, RECV_TENSOR, failed};
use crate::endpoint::{Endpoint, Peer, PendingTensor, ReceivedTensor, TensorWay};
use crate::grpc::introduction;
use crate::tensorflow::messages::{
    CleanupGraphRequest, GetStatusResponse, GetStepSequenceRequest, GetStepSequenceResponse, Ignored,
    MarkRecvFinishedRequest, RecvTensorRequest, RecvTensorResponse,
};
use crate::tensorflow::{INTRODUCTION_KEY, Offer, TensorflowTensor, TransportOption};

/// How long a connection to a task may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);

/// Bytes that a task may send before they are read: of an answer, and of a connection.
const STREAM_WINDOW: u32 = 16 << 20;
const CONNECTION_WINDOW: u32 = 64 << 20;

/// How long a task has to introduce itself.
const INTRODUCTION_LIMIT: Duration = Duration::from_secs(10);

/// Between two introductions to a task that has no pleach, or no fabric in common.
const LINK_PAUSE: Duration = Duration::from_secs(20);

/// The same where the task has shown that it may be another one now.
const LINK_PAUSE_AFTER_LOSS: Duration = Duration::from_secs(2);

/// When a host that does not answer is asked for its connection.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// For how long an offer that was not fetched is tried again. The task withdraws it after 60 s.
const OFFER_LIMIT: Duration = Duration::from_secs(50);

/// Offers that are left for later receives at most, of all steps and keys.
const OFFERS_MAX: usize = 1 << 10;

/// Largest tensor in a message, in bytes: protobuf has no larger ones.
const MESSAGE_TENSOR_MAX: u64 = 2 << 30;

/// How much later the task gives a call up than this end. Where both ended a call at once, the last
/// frames of the task were seen to be taken for an error of the whole connection.
const TASK_GRACE: Duration = Duration::from_secs(1);

/// A device of a task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// As `/job:worker/replica:0/task:0/device:CPU:0`.
    pub name: String,
    /// As `CPU`.
    pub kind: String,
    /// Another one after each start of the task: a part of the keys of its tensors.
    pub incarnation: u64,
}

/// What was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The tensor; nothing if it is dead, that of a branch that was not taken.
    pub tensor: Option<TensorflowTensor>,
    /// How it came: [`TensorWay::Inline`] is in the message.
    pub way: TensorWay,
}

/// A task of TensorFlow, or of this module, from which this program receives. Clones share the
/// connection.
#[derive(Clone)]
pub struct WorkerClient {
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: Endpoint,
    address: String,
    channel: transport::Channel,
    link: Mutex<LinkState>,
    left: std::sync::Mutex<LeftOffers>,
}

/// Offers that were read and not fetched, by step and key.
type LeftOffers = BTreeMap<(i64, String), VecDeque<LeftOffer>>;

struct LeftOffer {
    offer: Offer,
    /// Of the endpoint that has the tensor.
    incarnation: Option<u64>,
    until: Nanos,
}

/// An offer that a receive fetches. Its drop leaves the offer for the next receive.
struct Fetching<'a> {
    shared: &'a Shared,
    step: i64,
    key: &'a str,
    left: Option<LeftOffer>,
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        let Some(left) = self.left.take() else { return };
        let (mut offers, now) = (lock(&self.shared.left), clock::now());
        offers.retain(|_, offers| {
            offers.retain(|offer| offer.until > now);
            !offers.is_empty()
        });
        if offers.values().map(VecDeque::len).sum::<usize>() < OFFERS_MAX {
            // In the order in which they were read.
            let of_key = offers.entry((self.step, self.key.to_owned())).or_default();
            let place = of_key.partition_point(|other| other.until <= left.until);
            of_key.insert(place, left);
        }
    }
}

enum LinkState {
    /// Tensors come in messages. The first receive after `until` asks for an introduction.
    Ordinary { until: Nanos, reason: String },
    /// Long ones come by the exchange.
    Linked(Peer),
}

impl std::fmt::Debug for WorkerClient {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "WorkerClient({})", self.shared.address)
    }
}

impl WorkerClient {
    /// Connects to a task at `HOST:PORT`.
    ///
    /// # Errors
    ///
    /// INVALID_ARGUMENT where that is no address, and UNAVAILABLE where nobody listens.
    pub async fn connect(endpoint: &Endpoint, address: &str) -> Result<Self, Status> {
        let wrong = |error: &dyn std::fmt::Display| {
            Status::invalid_argument(format!("no task at {address:?} ({error}); name HOST:PORT"))
        };
        let server = transport::Endpoint::from_shared(format!("http://{address}"));
        let server = server.map_err(|error| wrong(&error))?;
        let channel = server
            .connect_timeout(CONNECT_LIMIT)
            .tcp_keepalive(Some(KEEP_ALIVE))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .connect()
            .await
            .map_err(|error| {
                // tonic says "transport error", and its sources say which.
                let source = error.source().map(ToString::to_string);
                let source = source.unwrap_or_else(|| error.to_string());
                Status::unavailable(format!("task {address} is not reached: {source}"))
            })?;
        let link = LinkState::Ordinary { until: clock::now(), reason: String::new() };
        let (endpoint, address, link) = (endpoint.clone(), address.to_owned(), Mutex::new(link));
        let left = std::sync::Mutex::default();
        Ok(Self { shared: Arc::new(Shared { endpoint, address, channel, link, left }) })
    }

    /// The devices of the task.
    ///
    /// # Errors
    ///
    /// A status that names the task: DEADLINE_EXCEEDED, UNAVAILABLE, or what the task answers.
    pub async fn devices(&self, limit: Duration) -> Result<Vec<Device>, Status> {
        let status: GetStatusResponse = self.shared.ask("GetStatus", Ignored {}, limit).await?;
        let devices = status.device_attributes.into_iter();
        let device = |found: crate::tensorflow::messages::DeviceAttributes| Device {
            name: found.name,
            kind: found.device_type,
            incarnation: found.incarnation,
        };
        Ok(devices.map(device).collect())
    }

    /// The step that the next run of a graph has at the task, for a run whose options have this
    /// number as `collective_graph_key`. TensorFlow draws the steps of other runs at random.
    ///
    /// # Errors
    ///
    /// As of [`WorkerClient::devices`].
    pub async fn next_step(&self, graph_key: i64, limit: Duration) -> Result<i64, Status> {
        let ask = GetStepSequenceRequest { graph_key: vec![graph_key] };
        let answer: GetStepSequenceResponse = self.shared.ask("GetStepSequence", ask, limit).await?;
        let found = answer.step_sequence.iter().find(|sequence| sequence.graph_key == graph_key);
        let missing =
            || Status::not_found(format!("task {} knows no graph {graph_key}", self.shared.address));
        found.map(|sequence| sequence.next_step_id).ok_or_else(missing)
    }

    /// Receives the tensor of a rendezvous key in a step: waits until the task has produced it.
    ///
    /// # Errors
    ///
    /// A status that names the tensor and the task. DEADLINE_EXCEEDED: not within `limit`; the
    /// tensor is for the next receive of this step and key, also when this future is dropped. It is
    /// lost if the answer of the task was on its way just then, or if too many are left already.
    /// RESOURCE_EXHAUSTED: there are too many calls or leases, or there is no memory here, and the
    /// tensor is for the next receive as well; or it is too large. UNAVAILABLE: the task is lost.
    /// ABORTED: the task is another incarnation, or the step was aborted. FAILED_PRECONDITION:
    /// regions are required, and the tensor came without. DATA_LOSS, UNIMPLEMENTED: see
    /// [`crate::tensorflow::TensorError`], also for a tensor that is too large.
    pub async fn receive(&self, step: i64, key: &str, limit: Duration) -> Result<Received, Status> {
        let deadline = clock::now() + limit;
        let received = tokio::time::timeout(limit, self.shared.receive(step, key, deadline)).await;
        received.unwrap_or_else(|_| Err(late(limit))).map_err(|status| {
            let (task, message) = (&self.shared.address, status.message());
            let text = format!("tensor '{}' of step {step} from task {task}: {message}", key.escape_debug());
            Status::new(status.code(), text)
        })
    }

    /// Has the task forget a step: what waits in it fails.
    ///
    /// # Errors
    ///
    /// As of [`WorkerClient::devices`].
    pub async fn clean_up(&self, step: i64, limit: Duration) -> Result<(), Status> {
        lock(&self.shared.left).retain(|(of, _), _| *of != step);
        let _: Ignored =
            self.shared.ask("CleanupGraph", CleanupGraphRequest { step_id: step }, limit).await?;
        Ok(())
    }
}

fn late(limit: Duration) -> Status {
    Status::deadline_exceeded(format!("there is no answer within {limit:?}"))
}

/// The path of a method.
fn path(method: &str) -> Result<PathAndQuery, Status> {
    let path = format!("/{}/{method}", super::SERVICE);
    path.parse().map_err(|_| Status::internal("a method has a path"))
}

impl Shared {
    /// Calls a method. An error names the task.
    async fn ask<Ask, Answer>(&self, method: &str, ask: Ask, limit: Duration) -> Result<Answer, Status>
    where
        Ask: prost::Message + Send + Sync + 'static,
        Answer: prost::Message + Default + Send + Sync + 'static,
    {
        self.call(method, ask, limit).await.map_err(|status| {
            Status::new(status.code(), format!("{method} of task {}: {}", self.address, status.message()))
        })
    }

    async fn call<Ask, Answer>(&self, method: &str, ask: Ask, limit: Duration) -> Result<Answer, Status>
    where
        Ask: prost::Message + Send + Sync + 'static,
        Answer: prost::Message + Default + Send + Sync + 'static,
    {
        // A task says how long its answer is before it sends it.
        let answer_bytes_max = if method == RECV_TENSOR { MESSAGE_BYTES_MAX } else { OTHER_ANSWER_BYTES_MAX };
        let client = tonic::client::Grpc::new(self.channel.clone());
        let mut client = client.max_decoding_message_size(answer_bytes_max);
        let deadline = clock::now() + limit;
        let mut request = tonic::Request::new(ask);
        request.set_timeout(limit + TASK_GRACE);
        let path = path(method)?;
        let call = async move {
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            client.unary(request, path, ProstCodec::<Ask, Answer>::default()).await
        };
        match tokio::time::timeout(limit, call).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            // Timers of tonic, at either end, say that the call was cancelled.
            Err(_) => Err(late(limit)),
            Ok(Err(_)) if clock::now() >= deadline => Err(late(limit)),
            // A status of the task has no source; one of this end has what ended the connection.
            Ok(Err(status)) => Err(match status.source() {
                Some(source) => {
                    // Those of tonic and hyper say less than the last one.
                    let mut cause = source;
                    while let Some(deeper) = cause.source() {
                        cause = deeper;
                    }
                    Status::unavailable(format!("the task is lost: {cause}"))
                }
                None => status,
            }),
        }
    }

    async fn receive(&self, step: i64, key: &str, deadline: Nanos) -> Result<Received, Status> {
        let peer = self.link(deadline).await?;
        let incarnation = peer.as_ref().and_then(Peer::incarnation);
        if let Some(peer) = &peer
            && let Some(left) = self.take_left(step, key, incarnation)
        {
            return self.fetch(peer, Fetching { shared: self, step, key, left: Some(left) }, deadline).await;
        }
        // Positive, and never the number of no request.
        let request_id = (random_number() >> 1 | 1).cast_signed();
        let ask = RecvTensorRequest {
            step_id: step,
            rendezvous_key: key.to_owned(),
            dma_ok: false,
            transport_options: incarnation.map(|incarnation| TransportOption::Ask { incarnation }.write()),
            request_id,
        };
        let answer: RecvTensorResponse = self.call(RECV_TENSOR, ask, deadline.since(clock::now())).await?;
        let option = answer.transport_options.as_ref().and_then(TransportOption::read);
        let offer = match option {
            Some(TransportOption::Offer(offer)) if peer.is_some() => Some(offer),
            _ => None,
        };
        let left = offer.map(|offer| LeftOffer { offer, incarnation, until: clock::now() + OFFER_LIMIT });
        let fetching = Fetching { shared: self, step, key, left };
        if answer.require_ack {
            let ask = MarkRecvFinishedRequest { request_id };
            let _: Ignored = self.call("MarkRecvFinished", ask, deadline.since(clock::now())).await?;
        }
        if let (Some(_), Some(peer)) = (&fetching.left, peer.as_ref()) {
            return self.fetch(peer, fetching, deadline).await;
        }
        if answer.is_dead {
            return Ok(Received { tensor: None, way: TensorWay::Inline });
        }
        let message = answer.tensor.ok_or_else(|| Status::data_loss("the answer has no tensor"))?;
        let tensor = TensorflowTensor::read(message, MESSAGE_TENSOR_MAX)?;
        if tensor.bytes().is_some_and(|bytes| bytes.len() >= OFFERED_BYTES_MIN) {
            if peer.is_some() {
                // It could not lend it, or is another task than it was.
                let (until, reason) =
                    (clock::now() + LINK_PAUSE_AFTER_LOSS, "it did not lend a tensor".to_owned());
                *self.link.lock().await = LinkState::Ordinary { until, reason };
            }
            self.require(&|| "it did not lend this tensor".to_owned())?;
        }
        Ok(Received { tensor: Some(tensor), way: TensorWay::Inline })
    }

    /// An error where regions are required.
    fn require(&self, reason: &dyn Fn() -> String) -> Result<(), Status> {
        if !self.endpoint.requires_regions() {
            return Ok(());
        }
        let text = format!("regions are required (PLEACH_REQUIRE=regions), and there are none: {}", reason());
        Err(Status::failed_precondition(text))
    }

    /// The link to the task, if it has one.
    async fn link(&self, deadline: Nanos) -> Result<Option<Peer>, Status> {
        let mut state = self.link.lock().await;
        match &*state {
            LinkState::Linked(peer) if peer.is_linked() => return Ok(Some(peer.clone())),
            LinkState::Ordinary { until, reason } if clock::now() < *until => {
                self.require(&|| reason.clone())?;
                return Ok(None);
            }
            _ => {}
        }
        let limit = deadline.since(clock::now()).min(INTRODUCTION_LIMIT);
        match self.introduce(limit).await {
            Ok(peer) => {
                *state = LinkState::Linked(peer.clone());
                Ok(Some(peer))
            }
            // A task that is not there says nothing about its pleach.
            Err(status) if matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded) => Err(status),
            Err(status) => {
                let reason = status.message().to_owned();
                tracing::info!("tensors of task {} come in messages: {reason}", self.address);
                *state = LinkState::Ordinary { until: clock::now() + LINK_PAUSE, reason: reason.clone() };
                drop(state);
                self.require(&|| reason.clone())?;
                Ok(None)
            }
        }
    }

    /// Asks the task where its endpoint is, and connects to it.
    async fn introduce(&self, limit: Duration) -> Result<Peer, Status> {
        let ask = RecvTensorRequest {
            rendezvous_key: INTRODUCTION_KEY.to_owned(),
            transport_options: Some(TransportOption::Ask { incarnation: 0 }.write()),
            ..RecvTensorRequest::default()
        };
        let answer: RecvTensorResponse = self.call(RECV_TENSOR, ask, limit).await?;
        let option = answer.transport_options.as_ref().and_then(TransportOption::read);
        let Some(TransportOption::Introduction { incarnation, address }) = option else {
            return Err(Status::unimplemented("it has no pleach, or another version of it"));
        };
        if incarnation == self.endpoint.incarnation() {
            return Err(Status::unimplemented("it is of the same program"));
        }
        let endpoint = self.endpoint.clone();
        let host = self.address.rsplit_once(':').map(|(host, _)| host.trim_matches(['[', ']']));
        // A name is resolved by tonic alone: what the task says counts then.
        let host = host.and_then(|host| host.parse::<IpAddr>().ok());
        let host = host.or_else(|| address.parse().ok().map(|said: SocketAddr| said.ip()));
        let linked = tokio::task::spawn_blocking(move || {
            introduction::link_to_endpoint(&endpoint, &address, incarnation, host).map(|(peer, _)| peer)
        });
        let linked = linked.await.map_err(|error| Status::internal(error.to_string()))?;
        linked.map_err(Status::unimplemented)
    }

    /// An offer of this tensor that an earlier receive has left, by the endpoint of this
    /// incarnation.
    fn take_left(&self, step: i64, key: &str, incarnation: Option<u64>) -> Option<LeftOffer> {
        let mut offers = lock(&self.left);
        if offers.is_empty() {
            return None;
        }
        let (place, now) = ((step, key.to_owned()), clock::now());
        let of_key = offers.get_mut(&place)?;
        of_key.retain(|left| left.until > now && left.incarnation == incarnation);
        let left = of_key.pop_front();
        if of_key.is_empty() {
            offers.remove(&place);
        }
        left
    }

    /// Receives what the task has offered.
    async fn fetch(
        &self,
        peer: &Peer,
        mut fetching: Fetching<'_>,
        deadline: Nanos,
    ) -> Result<Received, Status> {
        let offer = fetching.left.as_ref().map(|left| left.offer.clone());
        let offer = offer.ok_or_else(|| Status::internal("there is no offer"))?;
        let Some(offered) = offer.key(fetching.key) else {
            // No later receive can fetch it either.
            fetching.left = None;
            return Err(Status::data_loss("an offer has no name"));
        };
        let peer = peer.within(deadline.since(clock::now()));
        let pending =
            peer.start_receive(&offered).map_err(|error| failed(error.kind(), error.to_string()))?;
        let arrived = arrive(pending).await;
        // After these the tensor is still at the task.
        let stays =
            |status: &Status| matches!(status.code(), Code::DeadlineExceeded | Code::ResourceExhausted);
        if !arrived.as_ref().is_err_and(stays) {
            // It was received, or cannot be any more.
            fetching.left = None;
        }
        let tensor = arrived?;
        let (way, bytes) = (tensor.way(), tensor.into_bytes());
        let tensor = TensorflowTensor::new(offer.element, offer.dimensions, bytes)?;
        Ok(Received { tensor: Some(tensor), way })
    }
}

/// Waits for a tensor without a thread.
async fn arrive(pending: PendingTensor) -> Result<ReceivedTensor, Status> {
    let (told, heard) = oneshot::channel::<()>();
    // Dropping it tells as well.
    pending.on_end(move || drop(told));
    let _ = heard.await;
    pending.wait().map_err(|error| failed(error.kind(), error.to_string()))
}

#[cfg(test)]
mod tests {
    use tonic::transport::Server;
    use tonic::transport::server::TcpIncoming;

    use super::*;
    use crate::endpoint::EndpointOptions;
    use crate::grpc::tensorflow::{WorkerOptions, WorkerService};
    use crate::tensorflow::ElementKind;

    /// Longer than any test takes on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    const BYTES: usize = 1 << 20;

    const STEP: i64 = 3;

    fn open() -> Endpoint {
        Endpoint::open(&EndpointOptions::default()).expect("a free port of loopback")
    }

    /// A task without tensors, a client of it, and the key of a tensor.
    async fn linked() -> (Endpoint, WorkerClient, String) {
        let (task, receiver) = (open(), open());
        let service = WorkerService::new(&task, WorkerOptions::of("pleach", 0));
        let key = service.key("x", "/job:worker/replica:0/task:0/device:CPU:0");
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = incoming.local_addr().expect("is bound").to_string();
        tokio::spawn(Server::builder().add_service(service).serve_with_incoming(incoming));
        let client = WorkerClient::connect(&receiver, &address).await.expect("listens");
        (task, client, key)
    }

    /// Fetches a tensor that the task has offered and does not give yet, for so long.
    async fn fetch(
        client: &WorkerClient,
        key: &str,
        number: u64,
        limit: Duration,
    ) -> Result<Received, Status> {
        let shared = &client.shared;
        let peer = shared.link(clock::now() + LONG).await?.expect("both have pleach");
        let offer = Offer { number, element: ElementKind::Uint8, dimensions: vec![BYTES as u64] };
        let left = LeftOffer { offer, incarnation: peer.incarnation(), until: clock::now() + OFFER_LIMIT };
        let fetching = Fetching { shared, step: STEP, key, left: Some(left) };
        shared.fetch(&peer, fetching, clock::now() + limit).await
    }

    /// The task gives a tensor of this value under an offer.
    fn give(task: &Endpoint, key: &str, number: u64, value: u8) {
        let mut tensor = task.tensor::<u8>(&[BYTES]).expect("there is memory");
        tensor.fill(value);
        let offer = Offer { number, element: ElementKind::Uint8, dimensions: Vec::new() };
        task.send(&offer.key(key).expect("a good name"), tensor.share()).expect("there is room");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_receive_that_ends_during_its_fetch_leaves_the_tensor_for_the_next() {
        let (task, client, key) = linked().await;
        let late = fetch(&client, &key, 5, Duration::from_millis(20)).await.expect_err("is not given");
        assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
        give(&task, &key, 5, 1);
        // One whose future is dropped.
        let dropped = tokio::time::timeout(Duration::from_millis(20), fetch(&client, &key, 6, LONG)).await;
        dropped.expect_err("is not given");
        give(&task, &key, 6, 2);
        // The task has no tensor of the key.
        for value in [1, 2] {
            let received = client.receive(STEP, &key, LONG).await.expect("is offered");
            let tensor = received.tensor.expect("is not dead");
            assert_eq!(tensor.bytes().map(|bytes| bytes[BYTES / 2]), Some(value));
        }
        let none = client.receive(STEP, &key, Duration::from_millis(20)).await.expect_err("was received");
        assert_eq!(none.code(), Code::DeadlineExceeded, "{none}");
        assert!(lock(&client.shared.left).is_empty());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_tensor_that_is_left_ends_with_its_step_and_with_the_task() {
        let (task, client, key) = linked().await;
        let limit = Duration::from_millis(20);
        fetch(&client, &key, 5, limit).await.expect_err("is not given");
        client.clean_up(STEP, LONG).await.expect("is served");
        assert!(lock(&client.shared.left).is_empty());
        fetch(&client, &key, 6, limit).await.expect_err("is not given");
        assert!(client.shared.take_left(STEP, &key, Some(task.incarnation() ^ 1)).is_none());
        assert!(lock(&client.shared.left).is_empty(), "another incarnation has other tensors");
    }
}
