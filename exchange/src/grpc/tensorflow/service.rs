//! The sender's side: this program as a task of which others receive.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use pleach_transport::auth::random_number;
use prost::Message;
use tokio::task::AbortHandle;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::{NamedService, UnaryService};
use tonic_prost::ProstCodec;

use super::local::of_own;
use super::{MESSAGE_BYTES_BESIDE, MESSAGE_BYTES_MAX, OFFERED_BYTES_MIN, RECV_TENSOR, SERVICE, failed};
use crate::endpoint::{Endpoint, InlineReason, ReceivedTensor, SharedTensor};
use crate::grpc::answered;
use crate::key::{Key, RendezvousKey};
use crate::table;
use crate::tensorflow::messages::{
    CleanupGraphRequest, DeviceAttributes, DeviceLocality, GetStatusResponse, Ignored, RecvTensorRequest,
    RecvTensorResponse,
};
use crate::tensorflow::{INTRODUCTION_KEY, Offer, TensorflowTensor, TransportOption};

/// The step of tensors that are for whichever step asks first, with [`WorkerOptions::any_step`].
pub const ANY_STEP: u64 = 0;

/// How long an offer waits for the program that was told of it.
const OFFER_WAIT: Duration = Duration::from_secs(60);

/// How long an offer may wait for room in the table; the tensor goes in the message then.
const OFFER_SEND_WAIT: Duration = Duration::from_millis(1);

/// How long a receive waits for its tensor by default, if its receiver waits that long.
const DEFAULT_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The longest request, in bytes: that of a new session has the devices of all tasks.
const REQUEST_BYTES_MAX: usize = 4 << 20;

/// What a task of this program is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct WorkerOptions {
    /// Its device, as `/job:pleach/replica:0/task:0/device:CPU:0`.
    pub device: String,
    /// The incarnation of the device, which keys name; that of the endpoint by default. Programs
    /// learn it from GetStatus, or are written for one number.
    pub incarnation: Option<u64>,
    /// Whether a receive takes the tensor of [`ANY_STEP`], whatever its own step. TensorFlow draws
    /// the numbers of steps at random, so this is the default.
    pub any_step: bool,
    /// How long a receive waits for its tensor at most.
    pub wait: Duration,
}

impl WorkerOptions {
    /// The defaults, for a task of a job.
    #[must_use]
    pub fn of(job: &str, task: u32) -> Self {
        let device = format!("/job:{job}/replica:0/task:{task}/device:CPU:0");
        Self { device, incarnation: None, any_step: true, wait: DEFAULT_WAIT }
    }
}

/// The service `tensorflow.WorkerService` of this program, for `Server::builder().add_service(…)`.
///
/// RecvTensor gives the tensors that the endpoint sends or publishes, under the step and the
/// rendezvous key. GetStatus names the device; CreateWorkerSession, DeleteWorkerSession and
/// CleanupAll succeed, as no state is kept for sessions; CleanupGraph cleans up the step, where
/// steps count. Anything else is UNIMPLEMENTED: no graph runs here.
#[derive(Clone)]
pub struct WorkerService {
    worker: Arc<Worker>,
}

struct Worker {
    endpoint: Endpoint,
    options: WorkerOptions,
    incarnation: u64,
    /// After which an offer that nobody has taken is withdrawn.
    offer_wait: Duration,
}

impl std::fmt::Debug for WorkerService {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "WorkerService({})", self.worker.options.device)
    }
}

impl WorkerService {
    /// A service that gives what this endpoint sends.
    #[must_use]
    pub fn new(endpoint: &Endpoint, options: WorkerOptions) -> Self {
        let incarnation = options.incarnation.unwrap_or_else(|| endpoint.incarnation());
        let (endpoint, offer_wait) = (endpoint.clone(), OFFER_WAIT);
        Self { worker: Arc::new(Worker { endpoint, options, incarnation, offer_wait }) }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.worker.options.device
    }

    /// The incarnation of the device.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.worker.incarnation
    }

    /// The rendezvous key of an edge of this name from this device to another one: the name of the
    /// tensor's [`Key`].
    #[must_use]
    pub fn key(&self, edge: &str, destination: &str) -> String {
        let (source, source_incarnation) = (self.device(), self.incarnation());
        RendezvousKey { source, source_incarnation, destination, edge, frame_iteration: "0:0" }.to_string()
    }
}

/// Withdraws an offer that nobody has taken, until it is dropped with the offered tensor.
struct Withdrawal {
    timer: AbortHandle,
    /// With its own guard.
    _tensor: SharedTensor,
}

impl Drop for Withdrawal {
    fn drop(&mut self) {
        self.timer.abort();
    }
}

impl Worker {
    fn status(&self) -> GetStatusResponse {
        let device = DeviceAttributes {
            name: self.options.device.clone(),
            device_type: "CPU".to_owned(),
            // Nothing is placed there by a program that asks how much fits.
            memory_limit: 0,
            locality: Some(DeviceLocality::default()),
            incarnation: self.incarnation,
            physical_device_desc: "a program of pleach, which runs no graph".to_owned(),
        };
        GetStatusResponse { device_attributes: vec![device] }
    }

    fn clean_up(&self, asked: &CleanupGraphRequest) {
        // Tensors of any step belong to none that ends.
        if !self.options.any_step {
            self.endpoint.clean_up(asked.step_id.cast_unsigned());
        }
    }

    async fn receive(&self, asked: RecvTensorRequest) -> Result<RecvTensorResponse, Status> {
        let option = asked.transport_options.as_ref().and_then(TransportOption::read);
        let asks = match option {
            Some(TransportOption::Ask { incarnation }) => Some(incarnation),
            _ => None,
        };
        if asks.is_some() && asked.rendezvous_key == INTRODUCTION_KEY {
            let (incarnation, address) = (self.endpoint.incarnation(), self.endpoint.address().to_string());
            let introduction = TransportOption::Introduction { incarnation, address }.write();
            let transport_options = Some(introduction);
            return Ok(RecvTensorResponse { transport_options, ..RecvTensorResponse::default() });
        }
        let key = self.key(&asked)?;
        let request = table::Request { id: asked.request_id.cast_unsigned(), incarnation: None };
        let received = self.endpoint.start_own_receive(&key, request, self.options.wait).await;
        let received = received.map_err(|error| failed(error.kind(), error.to_string()))?;
        // Without `send_start_micros`, a time of day for TensorFlow's tracing alone.
        let answer = RecvTensorResponse::default();
        let Some(tensor) = of_own(received.clone())? else {
            return Ok(RecvTensorResponse { is_dead: true, ..answer });
        };
        let may_offer = asks == Some(self.endpoint.incarnation());
        if let Some(offer) = self.offer(may_offer, &asked.rendezvous_key, &received, &tensor) {
            return Ok(RecvTensorResponse { transport_options: Some(offer), ..answer });
        }
        let message = tensor.write();
        let bytes = message.encoded_len();
        if bytes > MESSAGE_BYTES_MAX - MESSAGE_BYTES_BESIDE {
            let text = format!(
                "tensor {key} has {bytes} bytes, and a message of gRPC has less than 2 GiB; send parts of it"
            );
            return Err(Status::resource_exhausted(text));
        }
        Ok(RecvTensorResponse { tensor: Some(message), ..answer })
    }

    /// The key under which this program has sent what is asked for.
    fn key(&self, asked: &RecvTensorRequest) -> Result<Key, Status> {
        let wrong = |error: &dyn std::fmt::Display| Status::invalid_argument(error.to_string());
        let name = &asked.rendezvous_key;
        let parts = RendezvousKey::parse(name).map_err(|error| wrong(&error))?;
        let step = if self.options.any_step { ANY_STEP } else { asked.step_id.cast_unsigned() };
        let key = Key::new(step, name).map_err(|error| wrong(&error))?;
        let (device, incarnation) = (&self.options.device, self.incarnation);
        if parts.source != device {
            return Err(wrong(&format!("tensor {key}: this task has the device {device} alone")));
        }
        if parts.source_incarnation != incarnation {
            return Err(Status::aborted(format!(
                "tensor {key}: the device is incarnation {incarnation:016x}; its task was restarted, or the \
                 program names another number"
            )));
        }
        Ok(key)
    }

    /// Offers a tensor by the exchange, if the receiver and the tensor allow it.
    fn offer(
        &self,
        is_asked_for: bool,
        rendezvous_key: &str,
        received: &ReceivedTensor,
        tensor: &TensorflowTensor,
    ) -> Option<crate::tensorflow::messages::TransportOptions> {
        let bytes = tensor.bytes().map_or(0, bytes::Bytes::len);
        if bytes < OFFERED_BYTES_MIN {
            return None;
        }
        let goes_inline = |reason| {
            self.endpoint.field_goes_inline(reason, bytes);
            None
        };
        if !is_asked_for {
            return goes_inline(InlineReason::NoRegions);
        }
        let Some(shared) = received.local().filter(|shared| shared.is_lendable()) else {
            return goes_inline(InlineReason::NotLendable);
        };
        let offer = Offer {
            number: random_number() | 1,
            element: tensor.element(),
            dimensions: tensor.dimensions().to_vec(),
        };
        let (number, endpoint, wait) = (offer.number, self.endpoint.clone(), self.offer_wait);
        let key = offer.key(rendezvous_key)?;
        let timer = tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            endpoint.clean_up(number);
        });
        let guard = Withdrawal { timer: timer.abort_handle(), _tensor: shared.clone() };
        let sent =
            self.endpoint.send_within(&key, shared.clone().with_guard(Arc::new(guard)), OFFER_SEND_WAIT);
        match sent {
            Ok(()) => Some(TransportOption::Offer(offer).write()),
            Err(_) => goes_inline(InlineReason::Limit),
        }
    }
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

type Answering<Ask, Answer> = fn(Arc<Worker>, Ask) -> BoxFuture<Result<Answer, Status>>;

/// A method that a function answers.
struct Method<Ask, Answer> {
    worker: Arc<Worker>,
    answer: Answering<Ask, Answer>,
}

impl<Ask, Answer: 'static> UnaryService<Ask> for Method<Ask, Answer> {
    type Response = Answer;
    type Future = BoxFuture<Result<tonic::Response<Answer>, Status>>;

    fn call(&mut self, request: tonic::Request<Ask>) -> Self::Future {
        let answer = (self.answer)(self.worker.clone(), request.into_inner());
        Box::pin(async move { answer.await.map(tonic::Response::new) })
    }
}

/// An answer that is at hand.
fn now<Answer: Send + 'static>(answer: Answer) -> BoxFuture<Result<Answer, Status>> {
    Box::pin(std::future::ready(Ok(answer)))
}

impl WorkerService {
    /// Answers a request by a function.
    async fn by<Ask, Answer>(self, request: Request<Body>, answer: Answering<Ask, Answer>) -> Response<Body>
    where
        Ask: Message + Default + Send + 'static,
        Answer: Message + Send + 'static,
    {
        let method = Method { worker: self.worker, answer };
        answered(ProstCodec::<Answer, Ask>::default(), REQUEST_BYTES_MAX, method, request).await
    }

    async fn answer(self, request: Request<Body>) -> Response<Body> {
        let path = request.uri().path().to_owned();
        match path.rsplit('/').next().unwrap_or_default() {
            RECV_TENSOR => {
                self.by(request, |worker, asked| Box::pin(async move { worker.receive(asked).await })).await
            }
            "GetStatus" => self.by(request, |worker, _: Ignored| now(worker.status())).await,
            "CleanupGraph" => {
                self.by(request, |worker, asked| {
                    worker.clean_up(&asked);
                    now(Ignored {})
                })
                .await
            }
            // Answers are not kept, and sessions and containers have nothing here.
            "CreateWorkerSession" | "DeleteWorkerSession" | "CleanupAll" | "MarkRecvFinished" => {
                self.by(request, |_, _: Ignored| now(Ignored {})).await
            }
            method => {
                let text = format!("{method:?} is not served: {} sends tensors alone", self.device());
                Status::unimplemented(text).into_http()
            }
        }
    }
}

impl tonic::codegen::Service<Request<Body>> for WorkerService {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move { Ok(service.answer(request).await) })
    }
}

impl NamedService for WorkerService {
    const NAME: &'static str = SERVICE;
}

#[cfg(test)]
mod tests {
    use pleach_transport::clock;

    use super::*;
    use crate::endpoint::EndpointOptions;

    /// Longer than any test takes on a busy machine.
    const LONG: Duration = Duration::from_secs(60);

    const BYTES: usize = 1 << 20;

    /// A worker that has offered a tensor, and the key of the offer.
    async fn offered(offer_wait: Duration) -> (Endpoint, Key) {
        let endpoint = Endpoint::open(&EndpointOptions::default()).expect("a free port of loopback");
        let service = WorkerService::new(&endpoint, WorkerOptions::of("pleach", 0));
        let name = service.key("x", "/job:worker/replica:0/task:0/device:CPU:0");
        let tensor = endpoint.tensor::<u8>(&[BYTES]).expect("there is memory").share();
        endpoint.send(&Key::new(ANY_STEP, &name).expect("a good name"), tensor).expect("there is room");
        let (options, incarnation) = (WorkerOptions::of("pleach", 0), service.incarnation());
        let worker = Worker { endpoint: endpoint.clone(), options, incarnation, offer_wait };
        let asks = TransportOption::Ask { incarnation: endpoint.incarnation() }.write();
        let asked = RecvTensorRequest {
            rendezvous_key: name.clone(),
            transport_options: Some(asks),
            ..RecvTensorRequest::default()
        };
        let answer = worker.receive(asked).await.expect("was sent");
        let options = answer.transport_options.expect("an offer");
        let Some(TransportOption::Offer(offer)) = TransportOption::read(&options) else {
            panic!("no offer: {options:?}")
        };
        assert!(answer.tensor.is_none() && offer.dimensions == [BYTES as u64]);
        (endpoint, offer.key(&name).expect("a good name"))
    }

    #[tokio::test]
    async fn an_offer_that_nobody_takes_is_withdrawn() {
        let (endpoint, _) = offered(Duration::from_millis(20)).await;
        let until = clock::now() + LONG;
        while endpoint.counts().bytes_held > 0 {
            assert!(clock::now() < until, "{:?}", endpoint.counts());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    #[tokio::test]
    async fn an_offer_is_received_once() {
        let (endpoint, key) = offered(LONG).await;
        assert_eq!(endpoint.counts().bytes_held, BYTES as u64);
        assert_eq!(endpoint.receive(&key, LONG).expect("is offered").as_bytes().len(), BYTES);
        assert_eq!(endpoint.counts().bytes_held, 0);
        endpoint.receive(&key, Duration::ZERO).expect_err("was received");
    }
}
