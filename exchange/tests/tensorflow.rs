//! The service of TensorFlow's workers: between programs of Rust, and with TensorFlow itself where
//! `PLEACH_TENSORFLOW_PYTHON` names a Python that has it.

mod stopping;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use pleach_exchange::grpc::tensorflow::{
    ANY_STEP, Received, WorkerClient, WorkerOptions, WorkerService, dead, labelled, share,
};
use pleach_exchange::tensorflow::messages::{Ignored, RecvTensorRequest, RecvTensorResponse};
use pleach_exchange::tensorflow::{ElementKind, TensorflowTensor};
use pleach_exchange::{Endpoint, EndpointOptions, ExchangeFabric, Key, SharedTensor, TensorWay};
use pleach_transport::{SharedMemory, clock};
use rustix::process::Signal;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use stopping::{PAUSE, signal};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Status};

/// Longer than any test takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Calls to a peer that was killed fail within this time: long before a deadline. It is some
/// milliseconds; this is for machines that are busy with other things.
const SOON: Duration = Duration::from_secs(10);

/// Of the task of Rust: `task.py` has the same.
const INCARNATION: u64 = 7;

/// The device of the other task.
const THERE: &str = "/job:worker/replica:0/task:0/device:CPU:0";

fn open(fabric: ExchangeFabric) -> Endpoint {
    let mut options = EndpointOptions::default();
    options.fabric = fabric;
    Endpoint::open(&options).expect("a free port of loopback")
}

fn options() -> WorkerOptions {
    let mut options = WorkerOptions::of("pleach", 0);
    options.incarnation = Some(INCARNATION);
    options
}

/// A task of this program.
struct Task {
    endpoint: Endpoint,
    service: WorkerService,
    address: SocketAddr,
    server: JoinHandle<()>,
    end: oneshot::Sender<()>,
}

impl Task {
    async fn serve(endpoint: Endpoint, options: WorkerOptions) -> Self {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = incoming.local_addr().expect("is bound");
        let service = WorkerService::new(&endpoint, options);
        let (end, ended) = oneshot::channel::<()>();
        let server = Server::builder().add_service(service.clone());
        let server = tokio::spawn(async move {
            let ended = async { drop(ended.await) };
            server.serve_with_incoming_shutdown(incoming, ended).await.expect("serves until its end");
        });
        Self { endpoint, service, address, server, end }
    }

    async fn client(&self, endpoint: &Endpoint) -> WorkerClient {
        WorkerClient::connect(endpoint, &self.address.to_string()).await.expect("listens")
    }

    fn send(&self, step: u64, edge: &str, tensor: SharedTensor) {
        let key = Key::new(step, &self.service.key(edge, THERE)).expect("a good name");
        self.endpoint.send(&key, tensor).expect("there is room");
    }

    /// A method, with a request that no client makes.
    async fn raw<Ask, Answer>(&self, method: &str, ask: Ask) -> Result<Answer, Status>
    where
        Ask: prost::Message + Default + 'static,
        Answer: prost::Message + Default + Send + Sync + 'static,
    {
        let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", self.address));
        let channel = channel.expect("an address").connect().await.expect("listens");
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await.expect("listens");
        let path = format!("/tensorflow.WorkerService/{method}").parse().expect("a path");
        let codec = tonic_prost::ProstCodec::<Ask, Answer>::default();
        client.unary(tonic::Request::new(ask), path, codec).await.map(tonic::Response::into_inner)
    }

    async fn end(self) {
        drop(self.end);
        self.server.await.expect("does not panic");
    }
}

fn tensor(element: ElementKind, dimensions: &[u64], bytes: Vec<u8>) -> TensorflowTensor {
    TensorflowTensor::new(element, dimensions.to_vec(), bytes.into()).expect("has as many elements")
}

fn strings(texts: &[&'static str]) -> TensorflowTensor {
    let texts = texts.iter().map(|text| Bytes::from_static(text.as_bytes())).collect::<Vec<_>>();
    TensorflowTensor::of_strings(vec![1, texts.len() as u64], texts).expect("as many")
}

/// Bytes that tell where they are.
fn counted(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8).collect()
}

async fn tensors_come_as_they_were_sent(fabric: ExchangeFabric, long: TensorWay) {
    let task = Task::serve(open(fabric), options()).await;
    let receiver = open(fabric);
    let client = task.client(&receiver).await;
    let large = counted(1 << 20);
    for (tensor, way) in [
        (tensor(ElementKind::Float, &[2, 3], counted(24)), TensorWay::Inline),
        (tensor(ElementKind::Int64, &[1 << 17], large.clone()), long),
        (tensor(ElementKind::Bool, &[1 << 20], large.clone()), long),
        (tensor(ElementKind::Complex64, &[1 << 10, 1 << 7], large.clone()), long),
        (tensor(ElementKind::Uint8, &[2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1 << 10], large.clone()), long),
        (tensor(ElementKind::Half, &[0, 3], Vec::new()), TensorWay::Inline),
        (strings(&["a", "", "ccc"]), TensorWay::Inline),
    ] {
        task.send(ANY_STEP, "x", share(&task.endpoint, &tensor).expect("there is memory"));
        let received = client.receive(5, &task.service.key("x", THERE), LONG).await.expect("was sent");
        assert_eq!(received, Received { tensor: Some(tensor), way });
    }
    task.send(ANY_STEP, "x", dead(&task.endpoint).expect("there is memory"));
    let received = client.receive(5, &task.service.key("x", THERE), LONG).await.expect("was sent");
    assert_eq!(received, Received { tensor: None, way: TensorWay::Inline });
    // What other interfaces send: a tensor of a type of pleach, and bytes that are named.
    let mut numbers = task.endpoint.tensor::<i32>(&[3]).expect("there is memory");
    numbers.copy_from_slice(&[1, -2, 3]);
    task.send(ANY_STEP, "x", numbers.share());
    let received = client.receive(6, &task.service.key("x", THERE), LONG).await.expect("was sent");
    assert_eq!(received.tensor.expect("is alive").to_vec::<i32>(), Ok(vec![1, -2, 3]));
    let named = task.endpoint.tensor::<u8>(&[16]).expect("there is memory").share();
    let named = labelled(named, ElementKind::Complex128, vec![]).expect("16 bytes");
    assert!(labelled(named.clone(), ElementKind::Complex128, vec![2]).is_err());
    task.send(ANY_STEP, "x", named);
    let received = client.receive(7, &task.service.key("x", THERE), LONG).await.expect("was sent");
    assert_eq!(received.tensor.map(|tensor| tensor.element()), Some(ElementKind::Complex128));
    let until = clock::now() + LONG;
    while task.endpoint.counts().bytes_held + task.endpoint.counts().bytes_lent > 0 {
        assert!(clock::now() < until, "{:?}", task.endpoint.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    task.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_tensors_are_read_in_place() {
    tensors_come_as_they_were_sent(ExchangeFabric::Shm, TensorWay::InPlace).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_tensors_are_got_over_sockets() {
    tensors_come_as_they_were_sent(ExchangeFabric::Tcp, TensorWay::Copied).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_regions_tensors_come_in_messages() {
    tensors_come_as_they_were_sent(ExchangeFabric::None, TensorWay::Inline).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receive_waits_and_one_that_was_cancelled_leaves_its_tensor() {
    let task = Task::serve(open(ExchangeFabric::Auto), options()).await;
    let receiver = open(ExchangeFabric::Auto);
    let client = task.client(&receiver).await;
    let key = task.service.key("x", THERE);
    let limit = Duration::from_millis(30);
    let refused = client.receive(1, &key, limit).await.expect_err("was not sent");
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    let text = refused.message();
    assert!(text.contains(&key) && text.contains(&task.address.to_string()), "{text}");
    let first = tokio::spawn({
        let (client, key) = (client.clone(), key.clone());
        async move { client.receive(2, &key, LONG).await }
    });
    let sent = tensor(ElementKind::Uint8, &[3], counted(3));
    tokio::time::sleep(limit).await;
    task.send(ANY_STEP, "x", share(&task.endpoint, &sent).expect("there is memory"));
    assert_eq!(first.await.expect("does not panic").expect("was sent").tensor, Some(sent));
    task.end().await;
}

/// Memory that the system refuses: mappings as long as this, until there is no room for one more in
/// the addresses of this process. What other tests need is shorter.
const HUGE_BYTES: usize = 1 << 44;

#[tokio::test(flavor = "multi_thread")]
async fn a_tensor_for_which_there_is_no_memory_here_is_for_the_next_receive() {
    let task = Task::serve(open(ExchangeFabric::Tcp), options()).await;
    // The receiver gets tensors into an arena of its own, which it makes with the first one.
    let mut options = EndpointOptions::default();
    options.fabric = ExchangeFabric::Tcp;
    options.limits.arenas.bytes = HUGE_BYTES as u64;
    let receiver = Endpoint::open(&options).expect("a free port of loopback");
    let (client, key) = (task.client(&receiver).await, task.service.key("x", THERE));
    let sent = tensor(ElementKind::Uint8, &[1 << 20], counted(1 << 20));
    task.send(ANY_STEP, "x", share(&task.endpoint, &sent).expect("there is memory"));
    let mut taken = Vec::new();
    while let Ok(memory) = SharedMemory::lendable(HUGE_BYTES) {
        taken.push(memory);
    }
    let refused = client.receive(1, &key, LONG).await.expect_err("there is no memory");
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("free memory here"), "{refused}");
    drop(taken);
    let received = client.receive(1, &key, LONG).await.expect("the task has it still");
    assert_eq!(received, Received { tensor: Some(sent), way: TensorWay::Copied });
    task.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn steps_count_where_they_are_agreed_and_end() {
    let mut options = options();
    options.any_step = false;
    let task = Task::serve(open(ExchangeFabric::Auto), options).await;
    let receiver = open(ExchangeFabric::Auto);
    let client = task.client(&receiver).await;
    let key = task.service.key("x", THERE);
    let of = |value: u8| tensor(ElementKind::Uint8, &[1], vec![value]);
    for value in [1, 2, 3] {
        task.send(value.into(), "x", share(&task.endpoint, &of(value)).expect("there is memory"));
    }
    assert_eq!(client.receive(2, &key, LONG).await.expect("was sent").tensor, Some(of(2)));
    client.clean_up(1, LONG).await.expect("is served");
    let limit = Duration::from_millis(20);
    let refused = client.receive(1, &key, limit).await.expect_err("the step was cleaned up");
    assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused}");
    task.endpoint.abort(3, "enough");
    let refused = client.receive(3, &key, LONG).await.expect_err("the step was aborted");
    assert_eq!(refused.code(), Code::Aborted, "{refused}");
    assert!(refused.message().contains("enough"), "{refused}");
    // A step that ends fails the receive that waits in it. Steps of TensorFlow may be negative.
    let waiting = tokio::spawn({
        let (client, key) = (client.clone(), key.clone());
        async move { client.receive(-4, &key, LONG).await }
    });
    while !waiting.is_finished() {
        task.endpoint.abort((-4_i64).cast_unsigned(), "over");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let refused = waiting.await.expect("does not panic").expect_err("the step was aborted");
    assert_eq!(refused.code(), Code::Aborted, "{refused}");
    task.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_wrong_are_refused_in_the_words_of_grpc() {
    let task = Task::serve(open(ExchangeFabric::Auto), options()).await;
    let receiver = open(ExchangeFabric::Auto);
    let client = task.client(&receiver).await;
    let devices = client.devices(LONG).await.expect("is served");
    assert_eq!((devices.len(), devices[0].incarnation), (1, INCARNATION));
    assert_eq!(devices[0].name, task.service.device());
    let good = task.service.key("x", THERE);
    for (key, code) in [
        (String::new(), Code::InvalidArgument),
        ("a;b;c".to_owned(), Code::InvalidArgument),
        (good.replace("pleach", "other"), Code::InvalidArgument),
        (good.replace(";x;", &format!(";{};", "x".repeat(1024))), Code::InvalidArgument),
        (good.replace("0007;", "0008;"), Code::Aborted),
    ] {
        let refused = client.receive(1, &key, LONG).await.expect_err("is wrong");
        assert_eq!(refused.code(), code, "{refused}");
    }
    // A request that comes twice, as after a loss of the connection.
    task.send(ANY_STEP, "x", task.endpoint.tensor::<u8>(&[1]).expect("there is memory").share());
    let ask =
        || RecvTensorRequest { rendezvous_key: good.clone(), request_id: -9, ..RecvTensorRequest::default() };
    let first: RecvTensorResponse = task.raw("RecvTensor", ask()).await.expect("was sent");
    assert!(first.tensor.is_some() && !first.require_ack);
    let again = task.raw::<_, RecvTensorResponse>("RecvTensor", ask()).await.expect_err("came twice");
    assert_eq!(again.code(), Code::Aborted, "{again}");
    for method in ["CreateWorkerSession", "DeleteWorkerSession", "CleanupAll", "CleanupGraph"] {
        task.raw::<_, Ignored>(method, Ignored {}).await.expect("is served");
    }
    for method in ["RegisterGraph", "RunGraph", "RecvBuf", "Logging", "GetStepSequence", "Unheard"] {
        let refused = task.raw::<_, Ignored>(method, Ignored {}).await.expect_err("is not served");
        assert_eq!(refused.code(), Code::Unimplemented, "{refused}");
        assert!(refused.message().contains(method), "{refused}");
    }
    task.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn regions_that_are_required_and_not_there_are_an_error() {
    let task = Task::serve(open(ExchangeFabric::None), options()).await;
    let mut options = EndpointOptions::default();
    options.requires_regions = true;
    let receiver = Endpoint::open(&options).expect("a free port of loopback");
    let client = task.client(&receiver).await;
    for _ in 0..2 {
        let refused =
            client.receive(1, &task.service.key("x", THERE), LONG).await.expect_err("has no regions");
        assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
        assert!(refused.message().contains("PLEACH_REQUIRE=regions"), "{refused}");
    }
    task.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_not_there_or_ends_is_unavailable() {
    let receiver = open(ExchangeFabric::Auto);
    for (address, code) in [("127.0.0.1:1", Code::Unavailable), ("a b", Code::InvalidArgument)] {
        let refused = WorkerClient::connect(&receiver, address).await.expect_err("is not there");
        assert_eq!(refused.code(), code, "{refused}");
    }
    let task = Task::serve(open(ExchangeFabric::Auto), options()).await;
    let client = task.client(&receiver).await;
    let key = task.service.key("x", THERE);
    let waiting = tokio::spawn({
        let (client, key) = (client.clone(), key.clone());
        async move { client.receive(1, &key, LONG).await }
    });
    let Task { endpoint, end, .. } = task;
    endpoint.close();
    let refused = waiting.await.expect("does not panic").expect_err("its endpoint is closed");
    assert_eq!(refused.code(), Code::Unavailable, "{refused}");
    drop(end);
}

/// Tells a child that it is one.
const PART: &str = "PLEACH_TEST_TASK";

/// A task that will be stopped; nothing in the process of the tests.
#[tokio::test(flavor = "multi_thread")]
async fn task_of_a_child() {
    if std::env::var(PART).is_err() {
        return;
    }
    let task = Task::serve(open(ExchangeFabric::Auto), options()).await;
    let sent = tensor(ElementKind::Uint8, &[1 << 20], counted(1 << 20));
    let shared = share(&task.endpoint, &sent).expect("there is memory");
    task.endpoint.publish(ANY_STEP, [(task.service.key("x", THERE), shared)].into());
    println!("ready {}", task.address);
    task.server.await.expect("does not panic");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_task_is_waited_for_a_stopped_one_until_the_deadline_and_a_killed_one_not() {
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "task_of_a_child", "--nocapture"])
        .env(PART, "")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("this test starts");
    let lines = BufReader::new(child.stdout.take().expect("is piped")).lines();
    let mut lines = lines.map_while(Result::ok);
    let address = lines.find_map(|line| line.find("ready").map(|at| line[at + 6..].trim().to_owned()));
    let receiver = open(ExchangeFabric::Auto);
    let client = WorkerClient::connect(&receiver, &address.expect("it serves")).await.expect("listens");
    let key = client.devices(LONG).await.expect("is served")[0].name.clone();
    let key = format!("{key};{INCARNATION:016x};{THERE};x;0:0");
    let expected = tensor(ElementKind::Uint8, &[1 << 20], counted(1 << 20));
    let received = client.receive(1, &key, LONG).await.expect("is published");
    assert_eq!(received, Received { tensor: Some(expected), way: TensorWay::InPlace });
    signal(&child, Signal::STOP);
    let late = client.receive(1, &key, PAUSE / 3).await.expect_err("is stopped");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    let slow = tokio::spawn({
        let (client, key) = (client.clone(), key.clone());
        async move { client.receive(2, &key, LONG).await }
    });
    tokio::time::sleep(PAUSE).await;
    assert!(!slow.is_finished());
    signal(&child, Signal::CONT);
    assert_eq!(slow.await.expect("does not panic").expect("is published"), received);
    let waiting = tokio::spawn({
        let (client, key) = (client.clone(), key.replace(";x;", ";never;"));
        async move { (client.receive(3, &key, LONG).await, client) }
    });
    // Published names fail at once where they are not there.
    let (missing, client) = waiting.await.expect("does not panic");
    assert_eq!(missing.expect_err("is not published").code(), Code::NotFound);
    signal(&child, Signal::STOP);
    let waiting = tokio::spawn({
        let (client, key) = (client.clone(), key.clone());
        async move { client.receive(4, &key, LONG).await }
    });
    tokio::time::sleep(PAUSE).await;
    let killed = clock::now();
    child.kill().expect("it runs");
    child.wait().expect("it was killed");
    let lost = waiting.await.expect("does not panic").expect_err("was killed");
    let waited = clock::now().since(killed);
    println!("a call to a killed task failed after {waited:?}");
    assert!(waited < SOON, "{waited:?}");
    assert_eq!(lost.code(), Code::Unavailable, "{lost}");
    let again = client.receive(5, &key, LONG).await.expect_err("is gone");
    assert_eq!(again.code(), Code::Unavailable, "{again}");
    assert_eq!(received.tensor.and_then(|tensor| tensor.bytes().map(|bytes| bytes[1000])), Some(247));
}

/// A task of TensorFlow, which is killed at the end.
struct TensorFlow {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    early: VecDeque<Value>,
    address: String,
    last: u64,
}

impl TensorFlow {
    /// Starts one in a cluster with a task of Rust at this address; nothing where there is none.
    fn start(protocol: &str, rust: SocketAddr) -> Self {
        let python = std::env::var("PLEACH_TENSORFLOW_PYTHON").expect("names a Python that has TensorFlow");
        let mut child = Command::new(python)
            .args([concat!(env!("CARGO_MANIFEST_DIR"), "/tests/tensorflow/task.py"), protocol])
            .arg(rust.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python starts");
        let orders = child.stdin.take().expect("is piped");
        let answers = BufReader::new(child.stdout.take().expect("is piped")).lines();
        let mut task =
            Self { child, orders, answers, early: VecDeque::new(), address: String::new(), last: 0 };
        task.address = task.take(0).expect("it serves").as_str().expect("a text").to_owned();
        task
    }

    /// Has it do something; `take` gives the result.
    fn order(&mut self, mut order: Value) -> u64 {
        self.last += 1;
        order["id"] = self.last.into();
        writeln!(self.orders, "{order}").expect("it reads");
        self.last
    }

    fn take(&mut self, id: u64) -> Result<Value, String> {
        let found = self.early.iter().position(|answer| answer[0] == id);
        let answer = match found.and_then(|place| self.early.remove(place)) {
            Some(answer) => answer,
            None => loop {
                let line = self.answers.next().expect("it has not ended").expect("text");
                let Some(text) = line.strip_prefix("answer ") else { continue };
                let answer: Value = serde_json::from_str(text).expect("JSON");
                if answer[0] == id {
                    break answer;
                }
                self.early.push_back(answer);
            },
        };
        if answer[2].is_null() { Ok(answer[1].clone()) } else { Err(answer[2].to_string()) }
    }

    fn run(&mut self, order: Value) -> Result<Value, String> {
        let id = self.order(order);
        self.take(id)
    }
}

impl Drop for TensorFlow {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As `digest` of `task.py`.
fn digest(dtype: &str, dimensions: &[u64], bytes: &[u8], elements: u64) -> Value {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let elements = if elements <= 8 { hex(bytes) } else { hex(&Sha256::digest(bytes)) };
    json!([dtype, dimensions, elements])
}

/// What TensorFlow receives from Rust.
fn fed(task: &Task, tensorflow: &mut TensorFlow) {
    let large = counted(1 << 20);
    for (number, (name, element, dimensions, bytes)) in [
        ("float32", ElementKind::Float, &[5][..], counted(20)),
        ("float64", ElementKind::Double, &[], counted(8)),
        ("int32", ElementKind::Int32, &[1 << 18], large.clone()),
        ("bfloat16", ElementKind::Bfloat16, &[2, 3], counted(12)),
        ("bool", ElementKind::Bool, &[2], vec![1, 0]),
        ("complex64", ElementKind::Complex64, &[1 << 17], large),
        ("uint64", ElementKind::Uint64, &[0, 4], Vec::new()),
    ]
    .into_iter()
    .enumerate()
    {
        let sent = tensor(element, dimensions, bytes.clone());
        let edge = format!("edge {number}");
        let id = tensorflow.order(json!({"do": "receive", "edge": edge, "dtype": name, "times": 2}));
        for _ in 0..2 {
            task.send(ANY_STEP, &edge, share(&task.endpoint, &sent).expect("there is memory"));
        }
        let expected = digest(name, dimensions, &bytes, dimensions.iter().product());
        assert_eq!(tensorflow.take(id), Ok(json!([expected, expected])), "{name}");
    }
    task.send(ANY_STEP, "texts", share(&task.endpoint, &strings(&["a", "bc"])).expect("there is memory"));
    let received = tensorflow.run(json!({"do": "receive", "edge": "texts", "dtype": "string"}));
    assert_eq!(received, Ok(json!([["object", [1, 2], ["a", "bc"]]])));
    task.send(ANY_STEP, "dead", dead(&task.endpoint).expect("there is memory"));
    let error = tensorflow.run(json!({"do": "receive", "edge": "dead", "dtype": "float32"}));
    // The operation that programs write themselves has no output then, and says so.
    let error = error.expect_err("is dead");
    assert!(error.contains("Missing 0-th output"), "{error}");
    let wrong = json!({"do": "receive", "edge": "x", "dtype": "float32", "incarnation": 8});
    let error = tensorflow.run(wrong).expect_err("names another incarnation");
    assert!(error.contains("AbortedError") && error.contains("incarnation"), "{error}");
    task.send(ANY_STEP, "type", task.endpoint.tensor::<u8>(&[1]).expect("there is memory").share());
    let error = tensorflow.run(json!({"do": "receive", "edge": "type", "dtype": "float32"}));
    error.expect_err("is of another type");
}

/// What Rust receives from TensorFlow. Returns the ways of the tensors.
async fn drained(task: &Task, receiver: &Endpoint, tensorflow: &mut TensorFlow) -> Vec<TensorWay> {
    let client = WorkerClient::connect(receiver, &tensorflow.address).await.expect("listens");
    let devices = client.devices(LONG).await.expect("is served");
    let device = devices.iter().find(|device| device.kind == "CPU").expect("has a processor");
    assert_eq!(device.name, THERE);
    let key = |edge: &str, incarnation: u64| {
        format!("{THERE};{incarnation:016x};/job:pleach/replica:0/task:0/device:CPU:0;{edge};0:0")
    };
    let large = (0..1_i32 << 20).flat_map(i32::to_le_bytes).collect();
    let floats = (1_u8..5).flat_map(|value| f32::from(value).to_le_bytes()).collect();
    let mut ways = Vec::new();
    for (graph, (edge, expected)) in [
        ("floats", Some(tensor(ElementKind::Float, &[4], floats))),
        ("large", Some(tensor(ElementKind::Int32, &[1 << 20], large))),
        ("bools", Some(tensor(ElementKind::Bool, &[2], vec![1, 0]))),
        ("strings", Some(strings(&["a", "bc"]))),
        ("same", Some(tensor(ElementKind::Bfloat16, &[3, 2], [0x80, 0x3f].repeat(6)))),
        ("empty", Some(tensor(ElementKind::Float, &[0, 5], Vec::new()))),
    ]
    .into_iter()
    .enumerate()
    {
        let graph = 70 + graph as i64;
        let step = client.next_step(graph, LONG).await.expect("is served");
        let order = json!({"do": "send", "made": edge, "incarnation": device.incarnation, "graph": graph});
        let id = tensorflow.order(order);
        let received = client.receive(step, &key(edge, device.incarnation), LONG).await;
        let received = received.unwrap_or_else(|status| panic!("{status}: {:?}", tensorflow.take(id)));
        assert_eq!(received.tensor, expected, "{edge}");
        ways.push(received.way);
        // A run that ends drops what nobody has received, so this one waits for a word of Rust.
        let word = tensor(ElementKind::Bool, &[], vec![1]);
        task.send(ANY_STEP, &format!("has {edge}"), share(&task.endpoint, &word).expect("there is memory"));
        assert_eq!(tensorflow.take(id), Ok(json!("sent")), "{edge}");
    }
    let stale = client.receive(1, &key("floats", device.incarnation ^ 1), LONG).await;
    assert_eq!(stale.expect_err("is another incarnation").code(), Code::Aborted);
    let malformed = client.receive(1, "no key", LONG).await.expect_err("is no key");
    assert_eq!(malformed.code(), Code::InvalidArgument, "{malformed}");
    let limit = Duration::from_millis(50);
    let late = client.receive(1, &key("never", device.incarnation), limit).await.expect_err("never comes");
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    client.clean_up(1, LONG).await.expect("is served");
    signal(&tensorflow.child, Signal::STOP);
    let stopped = client.devices(limit).await.expect_err("is stopped");
    assert_eq!(stopped.code(), Code::DeadlineExceeded, "{stopped}");
    let slow = tokio::spawn({
        let client = client.clone();
        async move { client.devices(LONG).await }
    });
    tokio::time::sleep(PAUSE).await;
    signal(&tensorflow.child, Signal::CONT);
    assert_eq!(slow.await.expect("does not panic").expect("goes on"), devices);
    // The task is killed, and its receives fail with what they were about.
    let never = key("never", device.incarnation);
    let waiting = tokio::spawn({
        let (client, never) = (client.clone(), never.clone());
        async move { client.receive(2, &never, LONG).await }
    });
    tokio::time::sleep(limit).await;
    let since = clock::now();
    tensorflow.child.kill().expect("it runs");
    let lost = waiting.await.expect("does not panic").expect_err("is killed");
    assert!(clock::now().since(since) < LONG / 6, "it is not waited for");
    assert_eq!(lost.code(), Code::Unavailable, "{lost}");
    assert!(lost.message().contains(&never) && lost.message().contains(&tensorflow.address), "{lost}");
    ways
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TensorFlow: PLEACH_TENSORFLOW_PYTHON"]
async fn tensorflow_without_the_plug_in_is_fed_and_drained() {
    let task = Task::serve(open(ExchangeFabric::Auto), options()).await;
    let mut tensorflow = TensorFlow::start("grpc", task.address);
    fed(&task, &mut tensorflow);
    let counts = task.endpoint.counts();
    assert_eq!((counts.sent_in_place.tensors, counts.links), (0, 0), "{counts:?}");
    // A session that knows all tasks of the cluster.
    let sent = tensor(ElementKind::Uint8, &[1], vec![9]);
    task.send(ANY_STEP, "all", share(&task.endpoint, &sent).expect("there is memory"));
    let order = json!({"do": "receive", "edge": "all", "dtype": "uint8", "all_tasks": true});
    assert_eq!(tensorflow.run(order), Ok(json!([["uint8", [1], "09"]])));
    let ways = drained(&task, &open(ExchangeFabric::Auto), &mut tensorflow).await;
    assert!(ways.iter().all(|way| *way == TensorWay::Inline), "{ways:?}");
    task.end().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs TensorFlow and the package: PLEACH_TENSORFLOW_PYTHON, PYTHONPATH"]
async fn tensorflow_with_the_plug_in_is_fed_and_drained_by_reference() {
    let task = Task::serve(open(ExchangeFabric::Auto), options()).await;
    let mut tensorflow = TensorFlow::start("grpc+pleach", task.address);
    fed(&task, &mut tensorflow);
    let counts = task.endpoint.counts();
    assert_eq!((counts.sent_in_place.tensors, counts.links), (4, 1), "{counts:?}");
    let ways = drained(&task, &open(ExchangeFabric::Auto), &mut tensorflow).await;
    assert_eq!(ways.iter().filter(|way| **way == TensorWay::InPlace).count(), 1, "{ways:?}");
    let until = clock::now() + LONG;
    while task.endpoint.counts().bytes_lent > 0 {
        assert!(clock::now() < until, "{:?}", task.endpoint.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    task.end().await;
}
