//! `pleach graph serve`, as clients of KServe's protocol use it.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use bytes::Bytes;
use pleach::exchange::grpc::{self, inference};
use pleach::exchange::inference::messages::infer_parameter::ParameterChoice;
use pleach::exchange::inference::messages::model_infer_request::{
    InferInputTensor, InferRequestedOutputTensor,
};
use pleach::exchange::inference::messages::{
    InferParameter, InferTensorContents, ModelConfigRequest, ModelConfigResponse, ModelInferRequest,
    ModelInferResponse, ModelMetadataRequest, ModelMetadataResponse, ModelReadyRequest, ModelReadyResponse,
    ServerLiveRequest, ServerLiveResponse, ServerMetadataRequest, ServerMetadataResponse, ServerReadyRequest,
    ServerReadyResponse, SystemSharedMemoryRegisterRequest, SystemSharedMemoryRegisterResponse,
    SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse, SystemSharedMemoryUnregisterRequest,
    SystemSharedMemoryUnregisterResponse,
};
use pleach::exchange::{Endpoint, EndpointOptions};
use pleach::graph::onnx::Model;
use pleach::graph::run::{Job, Rten, Tensor};
use pleach::graph::{Costs, Machine, Partition, Placement};
use pleach::transport::clock;
use prost::Message;
use rustix::process::Signal;
use tokio::runtime::Runtime;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_prost::ProstCodec;

#[allow(dead_code)] // Not every test reads JSON.
mod launcher;
mod ports;

use launcher::{Folder, finish, pleach, rank_process, signal, status_of, text, wait_until};

const SQUEEZENET: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/graph-analyzer/tests/data/light/light_squeezenet.onnx");

/// Two ranks: the first has `r` and `s`, the second the others.
const MODEL: &str = "pleach-graph 1
graph g
opset 17
input ids i64 [2]
input x f32 [batch, 4]
input b bool [3]
input u u8 [2, 3]
const w f32 [8, 4]
node r Gather(w, ids) -> r ? ?
node s Add(ids, ids) -> s ? ?
node y Relu(x) -> y ? ?
node n Not(b) -> n ? ?
node t Transpose(u) -> t ? ?
node q Relu(r) -> q ? ?
output s
output y
output n
output t
output q
";

const PLACES: &str = "r 0\ns 0\n* 1\n";

/// A server, with its launcher and its ranks.
struct Server {
    launcher: Child,
    address: String,
}

impl Server {
    /// Starts a server of this model, and waits until it listens.
    fn start(model: &str, arguments: &[&str]) -> Self {
        let mut command = pleach();
        command.args(["graph", "serve", model, "--listen", "127.0.0.1:0"]).args(arguments);
        let mut launcher =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("pleach starts");
        let mut line = String::new();
        let out = launcher.stdout.take().expect("it is a pipe");
        BufReader::new(out).read_line(&mut line).expect("it is text");
        let Some(address) = line.trim_end().strip_prefix("listening on ") else {
            let mut error = String::new();
            let pipe = launcher.stderr.as_mut().expect("it is a pipe");
            let _ = pipe.read_to_string(&mut error);
            panic!("it does not listen: {line}{error}");
        };
        Self { address: address.to_owned(), launcher }
    }

    /// A server of [`MODEL`].
    fn of_model(folder: &Folder, arguments: &[&str]) -> Self {
        let (model, places) = (folder.file("model.graph", MODEL), folder.file("places", PLACES));
        let all = [&["--place", &places, "--random-weights", "1", "--name", "m"], arguments].concat();
        Self::start(&model, &all)
    }

    fn rank(&self, rank: u32) -> u32 {
        rank_process(self.launcher.id(), rank).expect("the rank runs")
    }

    /// Waits for the end. Returns the exit status and the error.
    fn wait(mut self) -> (ExitStatus, String) {
        let ranks: Vec<u32> = (0..3).filter_map(|rank| rank_process(self.launcher.id(), rank)).collect();
        let status = self.launcher.wait().expect("it is a child");
        let mut error = String::new();
        let pipe = self.launcher.stderr.as_mut().expect("it is a pipe");
        pipe.read_to_string(&mut error).expect("it is text");
        wait_until("all ranks end", || ranks.iter().all(|rank| status_of(*rank).is_empty()));
        (status, error)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.launcher.try_wait().is_ok_and(|ended| ended.is_none()) {
            signal(self.launcher.id(), Signal::TERM);
            let _ = self.launcher.wait();
        }
    }
}

/// A client, without a library of the protocol.
#[derive(Clone)]
struct Client(Channel);

impl Client {
    async fn connect(server: &Server) -> Self {
        let endpoint = Channel::from_shared(format!("http://{}", server.address)).expect("it is an address");
        Self(endpoint.connect().await.expect("it listens"))
    }

    async fn call<A, R>(&self, method: &str, ask: A) -> Result<R, Status>
    where
        A: Message + 'static,
        R: Message + Default + 'static,
    {
        self.send(method, Request::new(ask)).await
    }

    async fn send<A, R>(&self, method: &str, ask: Request<A>) -> Result<R, Status>
    where
        A: Message + 'static,
        R: Message + Default + 'static,
    {
        let path = PathAndQuery::try_from(format!("/inference.GRPCInferenceService/{method}"));
        let mut client = tonic::client::Grpc::new(self.0.clone());
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let answer = client.unary(ask, path.expect("it is a path"), ProstCodec::<A, R>::default()).await;
        answer.map(tonic::Response::into_inner)
    }

    async fn infer(&self, ask: ModelInferRequest) -> Result<ModelInferResponse, Status> {
        self.call("ModelInfer", ask).await
    }
}

/// A runtime of one thread: what is spawned first is sent first.
fn runtime() -> Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("it starts")
}

fn input(name: &str, datatype: &str, shape: &[i64]) -> InferInputTensor {
    InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.to_vec(),
        ..InferInputTensor::default()
    }
}

fn bytes_of<T: bytemuck::NoUninit>(values: &[T]) -> Bytes {
    Bytes::copy_from_slice(bytemuck::cast_slice(values))
}

/// A request to [`MODEL`] that has `number` in it.
fn request(number: i64) -> ModelInferRequest {
    let float = number as f32;
    ModelInferRequest {
        model_name: "m".to_owned(),
        id: number.to_string(),
        inputs: vec![
            input("ids", "INT64", &[2]),
            input("x", "FP32", &[2, 4]),
            input("b", "BOOL", &[3]),
            input("u", "UINT8", &[2, 3]),
        ],
        raw_input_contents: vec![
            bytes_of(&[number % 8, 3]),
            bytes_of(&[float, -1.0, 2.0, -1.0 - float, 4.0, 5.0, 6.0, 7.0]),
            bytes_of(&[1_u8, 0, 1]),
            bytes_of(&[number as u8, 2, 3, 4, 5, 6]),
        ],
        ..ModelInferRequest::default()
    }
}

/// Checks the answer to [`request`].
fn assert_answer(answer: &ModelInferResponse, number: i64) {
    assert_eq!((answer.model_name.as_str(), answer.id.as_str()), ("m", number.to_string().as_str()));
    let outputs: Vec<_> = answer
        .outputs
        .iter()
        .map(|output| (output.name.as_str(), output.datatype.as_str(), output.shape.as_slice()))
        .collect();
    let expected: [(_, _, &[i64]); 5] = [
        ("s", "INT64", &[2]),
        ("y", "FP32", &[2, 4]),
        ("n", "BOOL", &[3]),
        ("t", "UINT8", &[3, 2]),
        ("q", "FP32", &[2, 4]),
    ];
    assert_eq!(outputs, expected);
    let float = number as f32;
    let raw = &answer.raw_output_contents;
    assert_eq!(raw[0], bytes_of(&[2 * (number % 8), 6]));
    assert_eq!(raw[1], bytes_of(&[float.max(0.0), 0.0, 2.0, 0.0, 4.0, 5.0, 6.0, 7.0]));
    assert_eq!(raw[2], bytes_of(&[0_u8, 1, 0]));
    assert_eq!(raw[3], bytes_of(&[number as u8, 4, 2, 5, 3, 6]));
    assert_eq!(raw[4].len(), 32);
}

/// Stops a process. A thread that runs goes on until another one has taken the signal.
fn stop(process: u32) {
    signal(process, Signal::STOP);
    wait_until("all threads stop", || {
        let threads = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
        let mut status = threads.map(|thread| {
            let path = thread.expect("it is listed").path().join("status");
            std::fs::read_to_string(path).unwrap_or_default()
        });
        status.all(|status| status.contains("State:\tT"))
    });
}

fn code_and_text<T>(result: Result<T, Status>) -> (Code, String) {
    let status = result.err().expect("it is refused");
    assert_eq!(status.message().lines().count(), 1, "{}", status.message());
    (status.code(), status.message().to_owned())
}

#[test]
fn a_server_says_what_it_is_and_what_its_model_takes() {
    let folder = Folder::new("serve-metadata");
    let server = Server::of_model(&folder, &[]);
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        let live: ServerLiveResponse = client.call("ServerLive", ServerLiveRequest {}).await.expect("it is");
        let ready: ServerReadyResponse =
            client.call("ServerReady", ServerReadyRequest {}).await.expect("it is");
        assert!(live.live && ready.ready);
        for (name, version, is_ready) in
            [("m", "", true), ("m", "1", true), ("m", "2", false), ("n", "", false)]
        {
            let asked = ModelReadyRequest { name: name.to_owned(), version: version.to_owned() };
            let answer: ModelReadyResponse = client.call("ModelReady", asked).await.expect("it answers");
            assert_eq!(answer.ready, is_ready, "{name} {version}");
        }
        let of_server: ServerMetadataResponse =
            client.call("ServerMetadata", ServerMetadataRequest {}).await.expect("it answers");
        assert_eq!(
            (of_server.name.as_str(), of_server.extensions),
            ("pleach", vec!["model_configuration".to_owned()])
        );
        let asked = |name: &str| ModelMetadataRequest { name: name.to_owned(), version: String::new() };
        let metadata: ModelMetadataResponse =
            client.call("ModelMetadata", asked("m")).await.expect("it is there");
        assert_eq!((metadata.platform.as_str(), metadata.versions.len()), ("rten_onnx", 1));
        let inputs: Vec<_> = metadata
            .inputs
            .iter()
            .map(|one| (one.name.as_str(), one.datatype.as_str(), &one.shape[..]))
            .collect();
        let expected: [(_, _, &[i64]); 4] =
            [("ids", "INT64", &[2]), ("x", "FP32", &[-1, 4]), ("b", "BOOL", &[3]), ("u", "UINT8", &[2, 3])];
        assert_eq!(inputs, expected);
        let asked_config = ModelConfigRequest { name: "m".to_owned(), version: String::new() };
        let config: ModelConfigResponse =
            client.call("ModelConfig", asked_config).await.expect("it is there");
        let config = config.config.expect("it is there");
        assert_eq!((config.max_batch_size, config.input.len(), config.output.len()), (0, 4, 5));
        let unknown = client.call::<_, ModelMetadataResponse>("ModelMetadata", asked("n")).await;
        assert_eq!(
            code_and_text(unknown),
            (Code::NotFound, "there is no model \"n\"; 'm' is served".to_owned())
        );
        for method in ["ModelStatistics", "RepositoryIndex", "TraceSetting", "ModelStreamInfer", "Nonsense"] {
            let (code, text) =
                code_and_text(client.call::<_, ServerLiveResponse>(method, ServerLiveRequest {}).await);
            assert!(code == Code::Unimplemented && text.contains(method), "{text}");
        }
        let all = SystemSharedMemoryStatusRequest::default();
        let refused =
            client.call::<_, SystemSharedMemoryStatusResponse>("SystemSharedMemoryStatus", all).await;
        let (code, text) = code_and_text(refused);
        assert!(code == Code::Unimplemented && text.contains("--allow-client-shm"), "{text}");
    });
}

#[test]
fn a_client_asks_for_the_health_of_the_server() {
    let folder = Folder::new("serve-health");
    let server = Server::of_model(&folder, &[]);
    runtime().block_on(async {
        let Client(channel) = Client::connect(&server).await;
        let mut client = HealthClient::new(channel);
        let of = |service: &str| HealthCheckRequest { service: service.to_owned() };
        for service in ["", inference::SERVICE] {
            let answer = client.check(of(service)).await.expect("it is served").into_inner();
            assert_eq!(answer.status(), ServingStatus::Serving, "{service:?}");
        }
        let unknown = client.check(of("nobody")).await.expect_err("it is not served");
        assert_eq!(unknown.code(), Code::NotFound);
    });
}

/// The metrics that a server has at this port.
fn metrics(port: u16) -> String {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("it is a socket");
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("it answers");
    text
}

#[test]
fn long_inputs_and_outputs_go_by_reference_between_programs_of_pleach() {
    const ROWS: usize = 64;
    let model = "pleach-graph 1\ngraph g\nopset 17\ninput x f32 [rows, 1024]\nnode y Relu(x) -> y ? ?\n\
                 output y\n";
    let folder = Folder::new("serve-references");
    let port = ports::reserve(1);
    let (model, port_text) = (folder.file("model.graph", model), port.to_string());
    let server = Server::start(&model, &["--name", "m", "--metrics", &port_text]);
    let endpoint = Endpoint::open(&EndpointOptions::default()).expect("a port is free");
    let mut values = endpoint.tensor::<f32>(&[ROWS, 1024]).expect("there is memory");
    values.iter_mut().enumerate().for_each(|(at, value)| *value = at as f32 - 1000.0);
    let expected: Vec<f32> = values.iter().map(|value| value.max(0.0)).collect();
    let request = ModelInferRequest {
        model_name: "m".to_owned(),
        inputs: vec![input("x", "FP32", &[ROWS as i64, 1024])],
        raw_input_contents: vec![values.share().into_bytes()],
        ..ModelInferRequest::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    runtime.expect("it starts").block_on(async {
        let Client(plain) = Client::connect(&server).await;
        let channel = grpc::Channel::over(&endpoint, plain.clone(), Some("127.0.0.1")).await;
        let channel = channel.expect("it opens");
        assert!(channel.requests_by_reference() && channel.answers_by_reference());
        for _ in 0..3 {
            let mut client = tonic::client::Grpc::new(channel.clone());
            client.ready().await.expect("it listens");
            let path = PathAndQuery::from_static("/inference.GRPCInferenceService/ModelInfer");
            let codec = grpc::Codec::<ModelInferRequest, ModelInferResponse>::default();
            let answer = client.unary(Request::new(request.clone()), path, codec).await;
            let answer = answer.expect("it is served").into_inner();
            assert_eq!(answer.raw_output_contents, [bytes_of(&expected)]);
        }
        // A client without pleach is served by the same call.
        let answer = Client(plain).infer(request).await.expect("it is served");
        assert_eq!(answer.raw_output_contents, [bytes_of(&expected)]);
    });
    let counts = endpoint.counts();
    assert_eq!((counts.sent_in_place.tensors, counts.in_place.tensors), (3, 3), "{counts:?}");
    let text = metrics(port);
    for line in [
        "pleach_exchange_tensors_total{direction=\"sent\",way=\"in_place\"} 3\n",
        "pleach_exchange_tensors_total{direction=\"received\",way=\"in_place\"} 3\n",
        "pleach_exchange_inline_total{reason=\"no_regions\"} 1\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
    wait_until("all bytes are back", || endpoint.counts().bytes_lent == 0);
    wait_until("all bytes are back", || metrics(port).contains("\npleach_exchange_lent_bytes 0\n"));
}

#[test]
fn a_slow_rank_is_waited_for() {
    let folder = Folder::new("serve-slow");
    let server = Server::of_model(&folder, &[]);
    let process = server.rank(0);
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        stop(process);
        let calls = send_requests(&client, 4);
        // Longer than a healthy rank takes, and shorter than the server waits.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert!(calls.iter().all(|call| !call.is_finished()));
        signal(process, Signal::CONT);
        for call in calls {
            call.await.expect("no panic").expect("the rank goes on");
        }
    });
}

#[test]
fn outputs_are_those_of_the_same_parts_in_one_process() {
    let server = Server::start(SQUEEZENET, &["--ranks", "2", "--random-weights", "1"]);
    let model = Model::decode(std::fs::read(SQUEEZENET).expect("it is in the tree")).expect("it is a model");
    let graph = model.graph().expect("it has a graph").with_dims(&[]).expect("its shapes fit");
    let costs = Costs::estimated(&graph, &Machine::TYPICAL);
    let placement = Placement::pipeline(&graph, 2, &costs, None).expect("it has enough nodes");
    let partition = Partition::with_caller(&graph, &placement).expect("it has no cycle");
    let (runtime_of_parts, folder) = (Rten::new(), Path::new(""));
    let job = Job {
        model: &model,
        folder,
        graph: &graph,
        partition: &partition,
        runtime: &runtime_of_parts,
        random_weights: Some(1),
    };
    let inputs = job.random_inputs(3, 9).expect("the shapes are known");
    let reference = job.reference(&inputs).expect("the parts run");
    let request = |set: &Vec<Tensor>| ModelInferRequest {
        model_name: "light_squeezenet".to_owned(),
        inputs: vec![input("data_0", "FP32", &[1, 3, 224, 224])],
        raw_input_contents: vec![Bytes::copy_from_slice(&set[0].bytes)],
        ..ModelInferRequest::default()
    };
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        let calls: Vec<_> = inputs
            .iter()
            .map(|set| {
                let (client, request) = (client.clone(), request(set));
                tokio::spawn(async move { client.infer(request).await })
            })
            .collect();
        for (call, expected) in calls.into_iter().zip(&reference.outputs) {
            let answer = call.await.expect("no panic").expect("it answers");
            assert_eq!(answer.raw_output_contents[0], expected[0].bytes);
        }
    });
}

#[test]
fn requests_of_many_clients_are_under_way_at_once_and_each_gets_its_own_answer() {
    let folder = Folder::new("serve-many");
    for arguments in [
        &["--fabric", "shm", "--depth", "3"][..],
        &["--fabric", "tcp", "--depth", "2"],
        &["--fabric", "shm", "--depth", "1", "--transfer", "copy"],
    ] {
        let server = Server::of_model(&folder, arguments);
        runtime().block_on(async {
            let clients = [Client::connect(&server).await, Client::connect(&server).await];
            let calls: Vec<_> = (0..64)
                .map(|number| {
                    let client = clients[number as usize % 2].clone();
                    tokio::spawn(async move { (number, client.infer(request(number)).await) })
                })
                .collect();
            for call in calls {
                let (number, answer) = call.await.expect("no panic");
                assert_answer(&answer.expect("it answers"), number);
            }
        });
    }
}

#[test]
fn typed_contents_chosen_outputs_and_other_sizes_are_answered() {
    let folder = Folder::new("serve-typed");
    let server = Server::of_model(&folder, &[]);
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        let mut typed = request(5);
        typed.raw_input_contents.clear();
        let empty = InferTensorContents::default;
        let contents = [
            InferTensorContents { int64_contents: vec![5, 3], ..empty() },
            InferTensorContents { fp32_contents: vec![5.0, -1.0, 2.0, -6.0, 4.0, 5.0, 6.0, 7.0], ..empty() },
            InferTensorContents { bool_contents: vec![true, false, true], ..empty() },
            InferTensorContents { uint_contents: vec![5, 2, 3, 4, 5, 6], ..empty() },
        ];
        for (input, contents) in typed.inputs.iter_mut().zip(contents) {
            input.contents = Some(contents);
        }
        assert_answer(&client.infer(typed).await.expect("it answers"), 5);
        for batch in [1, 3, 2, 7] {
            let mut other = request(4);
            other.inputs[1].shape[0] = batch;
            let x: Vec<f32> = (0..4 * batch).map(|place| place as f32 - 2.0).collect();
            other.raw_input_contents[1] = bytes_of(&x);
            let y =
                InferRequestedOutputTensor { name: "y".to_owned(), ..InferRequestedOutputTensor::default() };
            other.outputs = vec![y];
            let answer = client.infer(other).await.expect("it answers");
            assert_eq!((answer.outputs.len(), &answer.outputs[0].shape[..]), (1, &[batch, 4][..]));
            let expected: Vec<f32> = x.iter().map(|value| value.max(0.0)).collect();
            assert_eq!(answer.raw_output_contents, [bytes_of(&expected)]);
        }
    });
}

#[test]
fn what_does_not_fit_is_refused_in_a_line_and_later_requests_are_answered() {
    let folder = Folder::new("serve-bad");
    let server = Server::of_model(&folder, &[]);
    let with = |change: fn(&mut ModelInferRequest)| {
        let mut request = request(1);
        change(&mut request);
        request
    };
    let cases = [
        (with(|ask| ask.model_name = "n".to_owned()), Code::NotFound, "there is no model \"n\""),
        (with(|ask| ask.model_version = "3".to_owned()), Code::NotFound, "no version \"3\""),
        (with(|ask| ask.inputs[0].name = "idz".to_owned()), Code::InvalidArgument, "no input \"idz\""),
        (
            with(|ask| ask.inputs[0].datatype = "INT32".to_owned()),
            Code::InvalidArgument,
            "'ids' is INT64 [2]",
        ),
        (with(|ask| ask.inputs[0].shape = vec![3]), Code::InvalidArgument, "the request has \"INT64\" [3]"),
        (with(|ask| ask.inputs[1].shape[0] = 1 << 60), Code::InvalidArgument, "has more than"),
        (
            with(|ask| ask.raw_input_contents[2] = Bytes::new()),
            Code::InvalidArgument,
            "3 bytes, and 0 were given",
        ),
        (
            with(|ask| drop(ask.raw_input_contents.pop())),
            Code::InvalidArgument,
            "no raw contents for the input 'u'",
        ),
        (with(|ask| drop(ask.inputs.pop())), Code::InvalidArgument, "more raw contents"),
        (
            with(|ask| (drop(ask.inputs.pop()), drop(ask.raw_input_contents.pop())).0),
            Code::InvalidArgument,
            "the input 'u' is missing; it is UINT8 [2, 3]",
        ),
        (
            with(|ask| {
                ask.outputs = vec![InferRequestedOutputTensor { name: "z".to_owned(), ..Default::default() }]
            }),
            Code::InvalidArgument,
            "no output \"z\"",
        ),
        // The runtime holds this type in one that does not have the number.
        (
            with(|ask| ask.raw_input_contents[0] = bytes_of(&[1_i64 << 40, 0])),
            Code::InvalidArgument,
            "the number 1099511627776 of the input 'ids' is no i32",
        ),
        // There are eight rows: the part of rank 0 does not run with this.
        (
            with(|ask| ask.raw_input_contents[0] = bytes_of(&[1_i64, 99])),
            Code::InvalidArgument,
            "rank 0: rten does not run the part",
        ),
    ];
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        for (number, (ask, expected, part)) in (0..).zip(cases) {
            let (code, text) = code_and_text(client.infer(ask).await);
            assert!(code == expected && text.contains(part), "{code:?}: {text} does not contain {part}");
            assert_answer(&client.infer(request(number)).await.expect("it answers"), number);
        }
        let garbage = InferParameter { parameter_choice: Some(ParameterChoice::BoolParam(true)) };
        let refused = client.call::<_, ModelInferResponse>("ModelInfer", garbage).await;
        assert_eq!(code_and_text(refused).0, Code::InvalidArgument);
    });
}

#[test]
fn a_message_above_the_limit_is_refused() {
    let server = Server::start(SQUEEZENET, &["--random-weights", "1", "--name", "s"]);
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        let most = 10 * 3 * 224 * 224 + (1 << 20);
        let ask = ModelInferRequest {
            model_name: "s".to_owned(),
            raw_input_contents: vec![vec![0; most + 1].into()],
            ..ModelInferRequest::default()
        };
        let (code, text) = code_and_text(client.infer(ask).await);
        assert!(code == Code::OutOfRange && text.contains(&most.to_string()), "{code:?}: {text}");
        let long = ModelMetadataRequest { name: "x".repeat(100_000), version: String::new() };
        let refused = client.call::<_, ModelMetadataResponse>("ModelMetadata", long).await;
        assert_eq!(code_and_text(refused).0, Code::OutOfRange);
    });
}

/// An object of shared memory that goes away with the test.
struct Object(String, std::fs::File);

impl Object {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let key = format!("/pleach-serve-{name}-{}", std::process::id());
        let mut options = std::fs::OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(format!("/dev/shm{key}"));
        let file = file.expect("there is shared memory");
        file.write_all_at(bytes, 0).expect("there is room");
        Self(key, file)
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(format!("/dev/shm{}", self.0));
    }
}

/// The parameters of a tensor in shared memory.
fn in_region(region: &str, offset: i64, bytes: i64) -> HashMap<String, InferParameter> {
    let parameter = |value| InferParameter { parameter_choice: Some(value) };
    HashMap::from([
        ("shared_memory_region".to_owned(), parameter(ParameterChoice::StringParam(region.to_owned()))),
        ("shared_memory_offset".to_owned(), parameter(ParameterChoice::Int64Param(offset))),
        ("shared_memory_byte_size".to_owned(), parameter(ParameterChoice::Int64Param(bytes))),
    ])
}

#[test]
fn tensors_lie_in_shared_memory_that_the_client_may_shorten() {
    let folder = Folder::new("serve-shm");
    let server = Server::of_model(&folder, &["--allow-client-shm"]);
    let values = [1.0_f32, -1.0, 2.0, -1.0, 4.0, 5.0, 6.0, 7.0];
    let object = Object::new("regions", &[bytes_of(&values), Bytes::from(vec![9; 64])].concat());
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        let register = |offset, byte_size| SystemSharedMemoryRegisterRequest {
            name: "r".to_owned(),
            key: object.0.clone(),
            offset,
            byte_size,
        };
        let call =
            |ask| client.call::<_, SystemSharedMemoryRegisterResponse>("SystemSharedMemoryRegister", ask);
        for (offset, bytes) in [(0, 97), (97, 1), (u64::MAX, 8), (8, u64::MAX), (0, 0)] {
            assert_eq!(code_and_text(call(register(offset, bytes)).await).0, Code::InvalidArgument);
        }
        let outside = SystemSharedMemoryRegisterRequest { key: "../etc/passwd".to_owned(), ..register(0, 8) };
        assert_eq!(code_and_text(call(outside).await).0, Code::InvalidArgument);
        call(register(0, 96)).await.expect("it is inside");
        assert_eq!(code_and_text(call(register(0, 96)).await).0, Code::AlreadyExists);
        let status: SystemSharedMemoryStatusResponse = client
            .call("SystemSharedMemoryStatus", SystemSharedMemoryStatusRequest::default())
            .await
            .expect("it answers");
        assert_eq!(status.regions["r"].byte_size, 96);

        let ask = |offset, bytes, room| {
            let mut ask = request(1);
            ask.inputs[1].parameters = in_region("r", offset, bytes);
            ask.raw_input_contents.remove(1);
            let output =
                |name: &str| InferRequestedOutputTensor { name: name.to_owned(), ..Default::default() };
            ask.outputs = vec![output("y"), output("n")];
            ask.outputs[0].parameters = in_region("r", 40, room);
            ask
        };
        let answer = client.infer(ask(0, 32, 56)).await.expect("it answers");
        assert_eq!((answer.raw_output_contents[0].len(), answer.raw_output_contents[1].len()), (0, 3));
        let place = answer.outputs[0].parameters["shared_memory_byte_size"].parameter_choice.clone();
        assert_eq!(place, Some(ParameterChoice::Int64Param(32)));
        let mut seen = [0; 64];
        object.1.read_exact_at(&mut seen, 32).expect("it is there");
        assert_eq!(seen[8..40], bytes_of(&values.map(|value| value.max(0.0))));
        assert!(seen[..8].iter().chain(&seen[40..]).all(|byte| *byte == 9), "nothing else was written");

        for (wrong, part) in [
            (ask(-4, 32, 56), "is no size"),
            (ask(i64::MAX, 32, 56), "do not lie in the region"),
            (ask(0, 28, 56), "has 32 bytes, and 28 were given"),
            (ask(0, 32, 57), "do not lie in the region"),
            (ask(0, 32, 31), "has 32 bytes, and 31 bytes of shared memory were given"),
        ] {
            let (code, text) = code_and_text(client.infer(wrong).await);
            assert!(code == Code::InvalidArgument && text.contains(part), "{text}");
        }
        object.1.set_len(16).expect("it is ours");
        let (code, text) = code_and_text(client.infer(ask(0, 32, 56)).await);
        assert!(code == Code::InvalidArgument && text.contains("was shortened to 16 bytes"), "{text}");
        assert_eq!(object.1.metadata().expect("it is there").len(), 16);
        let unregister = SystemSharedMemoryUnregisterRequest::default();
        let _: SystemSharedMemoryUnregisterResponse =
            client.call("SystemSharedMemoryUnregister", unregister).await.expect("it answers");
        assert_eq!(code_and_text(client.infer(ask(0, 32, 56)).await).0, Code::NotFound);
        assert_answer(&client.infer(request(2)).await.expect("it answers"), 2);
    });
}

#[test]
fn a_cancelled_call_and_one_whose_deadline_is_over_disturb_no_other() {
    for fabric in ["shm", "tcp"] {
        cancel(fabric);
    }
}

/// Sends the requests of so many numbers at once.
fn send_requests(
    client: &Client,
    requests: i64,
) -> Vec<tokio::task::JoinHandle<Result<ModelInferResponse, Status>>> {
    let send = |number| {
        let client = client.clone();
        tokio::spawn(async move { client.infer(request(number)).await })
    };
    (0..requests).map(send).collect()
}

fn cancel(fabric: &str) {
    let folder = Folder::new(&format!("serve-cancelled-{fabric}"));
    let server = Server::of_model(&folder, &["--depth", "2", "--fabric", fabric]);
    let stopped = server.rank(1);
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        assert_answer(&client.infer(request(1)).await.expect("it answers"), 1);
        stop(stopped);
        // More than are under way, so that some are cancelled before they are fed.
        let cancelled = send_requests(&client, 6);
        let mut late = Request::new(request(9));
        late.set_timeout(Duration::from_millis(300));
        let late = client.send::<_, ModelInferResponse>("ModelInfer", late).await;
        let code = late.expect_err("rank 1 is stopped").code();
        assert!(matches!(code, Code::DeadlineExceeded | Code::Cancelled), "{code:?}");
        for call in &cancelled {
            call.abort();
        }
        for call in cancelled {
            assert!(call.await.is_err_and(|error| error.is_cancelled()), "it waits for rank 1");
        }
        signal(stopped, Signal::CONT);
        for number in 20..28 {
            assert_answer(&client.infer(request(number)).await.expect("it answers"), number);
        }
    });
}

/// Kills a rank while requests are under way, or while none is. All that wait fail with its name.
fn kill(victim: u32, fabric: &str, is_idle: bool) {
    let folder = Folder::new(&format!("serve-killed-{victim}-{fabric}-{is_idle}"));
    let server = Server::of_model(&folder, &["--fabric", fabric]);
    let process = server.rank(victim);
    runtime().block_on(async {
        let client = Client::connect(&server).await;
        assert_answer(&client.infer(request(1)).await.expect("it answers"), 1);
        if is_idle {
            signal(process, Signal::KILL);
            return;
        }
        stop(process);
        let calls = send_requests(&client, 8);
        // One with a deadline is sent after the others, so these are on their way when it is over.
        let mut last = Request::new(request(9));
        last.set_timeout(Duration::from_secs(1));
        let last =
            tokio::spawn(async move { client.send::<_, ModelInferResponse>("ModelInfer", last).await });
        last.await.expect("no panic").expect_err("the rank is stopped");
        let killed = clock::now();
        signal(process, Signal::KILL);
        for call in calls {
            let (code, text) = code_and_text(call.await.expect("no panic"));
            assert!(code == Code::Unavailable && text.contains(&format!("rank {victim} is lost")), "{text}");
        }
        let took = clock::now().since(killed);
        println!("the calls took {took:?} to fail");
        assert!(took < Duration::from_secs(20), "the calls took {took:?} to fail");
    });
    let (status, error) = server.wait();
    assert_eq!(status.code(), Some(1), "{error}");
    assert!(error.lines().count() == 1 && error.contains(&format!("rank {victim}")), "{error}");
}

#[test]
fn a_killed_rank_fails_its_requests_by_name_and_ends_the_server() {
    for victim in [0, 1] {
        kill(victim, "shm", false);
    }
    kill(1, "tcp", false);
}

#[test]
fn a_killed_rank_ends_a_server_without_requests() {
    kill(0, "shm", true);
    kill(1, "tcp", true);
}

#[test]
fn the_end_of_the_rank_that_listens_and_a_signal_end_all_ranks() {
    let folder = Folder::new("serve-ended");
    let server = Server::of_model(&folder, &[]);
    signal(server.rank(2), Signal::KILL);
    let (status, error) = server.wait();
    assert!(status.code() == Some(1) && error.contains("rank 2"), "{error}");
    for end in [Signal::INT, Signal::TERM] {
        let server = Server::of_model(&folder, &[]);
        signal(server.launcher.id(), end);
        let (status, error) = server.wait();
        assert!(status.code() == Some(1) && error.starts_with("error: job ended: SIG"), "{error}");
    }
}

#[test]
fn what_cannot_be_served_is_said_in_a_line() {
    let folder = Folder::new("serve-unfit");
    let file =
        |name: &str, lines: &str| folder.file(name, format!("pleach-graph 1\ngraph g\nopset 17\n{lines}"));
    let good = file("good", "input x f32 [2]\nnode a Relu(x) -> a ? ?\noutput a\n");
    let complex = file("complex", "input x c64 [2]\nnode a Relu(x) -> a ? ?\noutput a\n");
    let unknown = file("unknown", "input x f32 [2]\nnode a Nonsense(x) -> a f32 [2]\noutput a\n");
    let taken = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port is free");
    let taken = taken.local_addr().map(|address| (address.to_string(), taken)).expect("it is bound");
    let rendezvous = format!("file://{}", folder.path("rendezvous"));
    let by_hand = ["--rank", "0", "--world-size", "2", "--rendezvous", &rendezvous];
    let contradicting = [&["--listen", "127.0.0.1:0", "--ranks", "2"], &by_hand[..]].concat();
    let busy = ["--listen", "127.0.0.1:0", "--metrics", &taken.0];
    let cases: [(&str, &[&str], i32, &str); 9] = [
        (&good, &contradicting, 2, "--ranks 2 and 1 more that listens, but"),
        (&good, &busy, 2, &taken.0),
        (&good, &["--listen", &taken.0], 1, "Address already in use"),
        (&good, &["--listen", "127.0.0.1"], 2, "write HOST:PORT"),
        (&good, &["--listen", "127.0.0.1:99999"], 2, "write HOST:PORT"),
        (&good, &["--listen", "127.0.0.1:0", "--transfer", "grpc"], 2, "take zero-copy or copy"),
        (&complex, &["--listen", "127.0.0.1:0"], 2, "c64"),
        (&unknown, &["--listen", "127.0.0.1:0"], 2, "Nonsense"),
        (&folder.path("missing"), &["--listen", "127.0.0.1:0"], 2, "model not read"),
    ];
    for (model, arguments, status, part) in cases {
        let mut command = pleach();
        command.args(["graph", "serve", model]).args(arguments);
        let output = finish(command);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        assert!(
            error.starts_with("error: ") && error.lines().count() == 1 && error.contains(part),
            "{error}"
        );
    }
}
