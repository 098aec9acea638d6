//! The receiver's side: tensors that a task has produced.

use std::error::Error as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::auth::random_number;
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
        Ok(Self { shared: Arc::new(Shared { endpoint, address, channel, link }) })
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
    /// tensor is for the next receive, unless the task had answered already: then the tensor is
    /// lost. UNAVAILABLE: the task is lost. ABORTED: the task is another incarnation, or the step
    /// was aborted. FAILED_PRECONDITION: regions are required, and the tensor came without.
    /// DATA_LOSS, UNIMPLEMENTED, RESOURCE_EXHAUSTED: see [`crate::tensorflow::TensorError`].
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
        if answer.require_ack {
            let ask = MarkRecvFinishedRequest { request_id };
            let _: Ignored = self.call("MarkRecvFinished", ask, deadline.since(clock::now())).await?;
        }
        let option = answer.transport_options.as_ref().and_then(TransportOption::read);
        if let (Some(TransportOption::Offer(offer)), Some(peer)) = (option, peer.as_ref()) {
            return self.fetch(peer, key, offer, deadline).await;
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

    /// Receives what the task has offered.
    async fn fetch(&self, peer: &Peer, key: &str, offer: Offer, deadline: Nanos) -> Result<Received, Status> {
        let offered = offer.key(key).ok_or_else(|| Status::data_loss("an offer has no name"))?;
        let peer = peer.within(deadline.since(clock::now()));
        let pending =
            peer.start_receive(&offered).map_err(|error| failed(error.kind(), error.to_string()))?;
        let tensor = arrive(pending).await?;
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
