//! What a channel of tonic meets at an address: nobody, something else than gRPC, programs of other
//! versions or with another secret, and servers that forge references. Each is an error of one line
//! or served inline, in bounded time.

mod raw;
mod tensors;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use pleach_exchange::gathered::{self, Field, RegisteredPart};
use pleach_exchange::grpc::introduction::{Introduction, PATH};
use pleach_exchange::grpc::{self, Channel, ConnectError, Layer};
use pleach_exchange::reference::{LeaseNumber, LinkId};
use pleach_exchange::{Endpoint, EndpointOptions, Reference};
use pleach_transport::{RegionKey, RemoteSlice, Secret, clock};
use tokio::net::TcpSocket;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request};

use raw::Raw;
use tensors::{Ask, Serve, TensorsClient, TensorsServer};

/// Longer than any test takes on a busy machine, and shorter than a test that hangs.
const LONG: Duration = Duration::from_secs(60);

/// A client waits for the answer to its introduction for this time.
const INTRODUCTION: Duration = Duration::from_secs(10);

/// Bytes of a field that would go by reference.
const LENGTH: usize = 100_000;

fn open(secret: Option<&[u8]>, requires_regions: bool) -> Endpoint {
    let mut options = EndpointOptions::default();
    (options.secret, options.requires_regions) = (secret.map(Secret::new), requires_regions);
    Endpoint::open(&options).expect("a free port of loopback")
}

/// A channel to a server, for an endpoint that has regions or none, or for one that needs them.
async fn over(endpoint: &Endpoint, address: SocketAddr) -> Result<Channel, ConnectError> {
    let server = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    Channel::over(endpoint, server.connect().await.expect("listens"), Some("127.0.0.1")).await
}

/// The text of an error, which is one line.
fn one_line(error: &impl ToString) -> String {
    let text = error.to_string();
    assert!(!text.is_empty() && !text.contains(char::is_control), "{text:?}");
    text
}

/// Whether a call is served, and nothing of it goes by reference.
async fn is_served_inline(channel: &Channel) {
    assert!(!channel.requests_by_reference() && !channel.answers_by_reference());
    let mut client = TensorsClient::new(channel.clone());
    let received = client.get(ask()).await.expect("is served").into_inner().data;
    assert_eq!(received, vec![7; LENGTH]);
}

fn ask() -> Ask {
    Ask { bytes: LENGTH as u64, tensors: 1 }
}

fn data(endpoint: &Endpoint) -> Bytes {
    let mut tensor = endpoint.tensor::<u8>(&[LENGTH]).expect("there is memory");
    tensor.fill(7);
    tensor.share().into_bytes()
}

/// Answers whoever connects with these bytes, and reads on.
fn speak(answer: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("is bound");
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let (mut stream, mut bytes) = (stream, [0; 4096]);
                // Until the client closes.
                while stream.read(&mut bytes).is_ok_and(|count| count > 0) {
                    let _ = stream.write_all(answer);
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_at_an_address_is_an_error_of_one_line() {
    // It has the port, so that nobody else listens there, and does not listen either.
    let socket = TcpSocket::new_v4().expect("there are sockets");
    socket.bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
    let address = socket.local_addr().expect("is bound");
    let refused = grpc::connect(format!("http://{address}")).await.expect_err("nobody listens");
    assert!(matches!(&refused, ConnectError::Transport(_)), "{refused}");
    assert!(one_line(&refused).contains(&address.to_string()), "{refused}");
    let refused = grpc::connect("http://[::1").await.expect_err("is no address");
    assert!(matches!(&refused, ConnectError::Transport(_)), "{}", one_line(&refused));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_protocol_fails_its_calls_and_holds_up_nobody() {
    let requiring = open(None, true);
    let http1 = &b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"[..];
    // A call may find that the connection has ended before it was sent.
    let wrong = &[Code::Internal, Code::Unavailable][..];
    // The last one says nothing, and is waited for until the limit of introductions.
    for (answer, limits, codes) in [
        (http1, Duration::ZERO..LONG / 10, wrong),
        (&[0xff; 64], Duration::ZERO..LONG / 10, wrong),
        (&b""[..], INTRODUCTION..LONG / 3, &[Code::DeadlineExceeded]),
    ] {
        let (address, begun) = (speak(answer), clock::now());
        let channel = grpc::connect(format!("http://{address}"));
        let (channel, required) = tokio::join!(channel, over(&requiring, address));
        let waited = clock::now().since(begun);
        assert!(limits.contains(&waited), "{answer:?}: {waited:?}");
        let refused = required.expect_err("has no regions");
        assert!(matches!(&refused, ConnectError::NoRegions(_)), "{}", one_line(&refused));
        one_line(&refused);
        let mut client = TensorsClient::new(channel.expect("takes connections"));
        let mut request = Request::new(ask());
        request.set_timeout(Duration::from_millis(200));
        let refused = tokio::time::timeout(LONG, client.get(request)).await.expect("has a deadline");
        let refused = refused.expect_err("is no gRPC");
        assert!(codes.contains(&refused.code()), "{answer:?}: {refused}");
        assert!(one_line(&refused.message()).contains("/pleach.example.Tensors/Get"), "{refused}");
    }
}

/// What a server says that has its own mind about introductions.
#[derive(Clone)]
struct Says(Introduction);

impl<S> tower_layer::Layer<S> for Says {
    type Service = Answering<S>;

    fn layer(&self, inner: S) -> Answering<S> {
        Answering { inner, says: self.0.clone() }
    }
}

#[derive(Clone)]
struct Answering<S> {
    inner: S,
    says: Introduction,
}

type BoxFuture<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

impl<S, B> tower_service::Service<http::Request<Body>> for Answering<S>
where
    S: tower_service::Service<http::Request<Body>, Response = http::Response<B>>,
    S::Future: Send + 'static,
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Result<http::Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        if request.uri().path() == PATH {
            let says = self.says.clone();
            let codec = tonic_prost::ProstCodec::<Introduction, Introduction>::default();
            let mut server = tonic::server::Grpc::new(codec);
            return Box::pin(async move { Ok(server.unary(Told(says), request).await) });
        }
        let answer = self.inner.call(request);
        Box::pin(async move { Ok(answer.await?.map(Body::new)) })
    }
}

struct Told(Introduction);

impl tonic::server::UnaryService<Introduction> for Told {
    type Response = Introduction;
    type Future = std::future::Ready<Result<tonic::Response<Introduction>, tonic::Status>>;

    fn call(&mut self, _request: Request<Introduction>) -> Self::Future {
        let Self(says) = self;
        std::future::ready(match says.version {
            u32::MAX => Err(tonic::Status::internal("two\nlines\u{7}")),
            _ => Ok(tonic::Response::new(says.clone())),
        })
    }
}

/// A server with this layer.
async fn serve<L>(layer: L, data: Bytes) -> SocketAddr
where
    L: tower_layer::Layer<tonic::service::Routes> + Clone + Send + 'static,
    L::Service: tower_service::Service<
            http::Request<Body>,
            Response = http::Response<Body>,
            Error = std::convert::Infallible,
        > + Clone
        + Send
        + 'static,
    <L::Service as tower_service::Service<http::Request<Body>>>::Future: Send,
{
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
    let address = incoming.local_addr().expect("is bound");
    let server = Server::builder().layer(layer).add_service(TensorsServer::new(Serve(data)));
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_introduces_itself_wrongly_is_served_inline() {
    let (endpoint, requiring, other) = (open(None, false), open(None, true), open(None, false));
    let (address, incarnation) = (other.address().to_string(), other.incarnation());
    let right =
        Introduction { version: 1, address, incarnation, link: 0, reason: "two\nlines\u{7}".to_owned() };
    let says = |change: fn(&mut Introduction)| {
        let mut says = right.clone();
        change(&mut says);
        says
    };
    for (says, part) in [
        (says(|says| says.version = 0), "version 0"),
        (says(|says| says.version = 2), "version 2"),
        (says(|says| says.version = u32::MAX), "two"),
        (says(|says| says.address = "some\nwhere".to_owned()), "no address"),
        (says(|says| says.address = "192.0.2.1:7".to_owned()), "goes elsewhere"),
        (says(|says| says.address = "127.0.0.1:1".to_owned()), "127.0.0.1:1"),
        (says(|says| says.incarnation += 1), "another program"),
        (says(|says| says.address = "x".repeat(1 << 20)), "no address"),
        (says(|says| says.reason = format!("{}ü{}", "x".repeat(1023), "y".repeat(4000))), "xxx"),
        (says(|_| {}), "two lines"),
    ] {
        let address = serve(Says(says.clone()), vec![7; LENGTH].into()).await;
        let refused = over(&requiring, address).await.expect_err("has no regions");
        assert!(matches!(&refused, ConnectError::NoRegions(_)), "{refused}");
        assert!(one_line(&refused).contains(part) && refused.to_string().len() < 1200, "{refused}");
        let channel = over(&endpoint, address).await.expect("goes inline");
        assert!(!channel.requests_by_reference());
        let received = TensorsClient::new(channel).get(ask()).await.expect("is served").into_inner();
        assert_eq!(received.data, vec![7; LENGTH], "{part}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_another_version_is_told_why_it_goes_inline() {
    let (sender, client) = (open(None, false), open(None, false));
    let address = serve(Layer::new(&sender), data(&sender)).await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let channel = channel.connect().await.expect("listens");
    for version in [0, 2, u32::MAX] {
        let (address, incarnation) = (client.address().to_string(), client.incarnation());
        let introduction = Introduction { version, address, incarnation, link: 0, reason: String::new() };
        let mut caller = tonic::client::Grpc::new(channel.clone());
        caller.ready().await.expect("listens");
        let codec = tonic_prost::ProstCodec::<Introduction, Introduction>::default();
        let path = PATH.parse().expect("a path");
        let answer = caller.unary(Request::new(introduction), path, codec).await.expect("is answered");
        let Introduction { link, reason, .. } = answer.into_inner();
        assert!(link == 0 && one_line(&reason).contains(&format!("version {version}")), "{reason}");
    }
    assert_eq!((sender.counts().links, client.counts().links), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_with_different_secrets_go_inline_or_say_so() {
    for (theirs, own) in
        [(Some(&b"one"[..]), Some(&b"another"[..])), (Some(b"one"), None), (None, Some(b"one"))]
    {
        let sender = open(theirs, false);
        let address = serve(Layer::new(&sender), data(&sender)).await;
        let channel = over(&open(own, false), address).await.expect("goes inline");
        is_served_inline(&channel).await;
        let refused = over(&open(own, true), address).await.expect_err("has no regions");
        assert!(matches!(&refused, ConnectError::NoRegions(_)), "{refused}");
        assert!(one_line(&refused).contains("secret"), "{refused}");
        assert_eq!(sender.counts().sent_in_place.tensors, 0);
    }
}

/// What a server answers in the place of a tensor, given the link of the call.
type Forgery = fn(LinkId) -> Vec<u8>;

/// A layer that lends, around one that forges answers when it is told to.
#[derive(Clone)]
struct Forging {
    layer: Layer,
    forgery: Arc<Mutex<Option<Forgery>>>,
}

impl<S> tower_layer::Layer<S> for Forging {
    type Service = grpc::Service<Forger<S>>;

    fn layer(&self, inner: S) -> Self::Service {
        self.layer.layer(Forger { inner, forgery: self.forgery.clone() })
    }
}

#[derive(Clone)]
struct Forger<S> {
    inner: S,
    forgery: Arc<Mutex<Option<Forgery>>>,
}

impl<S> tower_service::Service<http::Request<Body>> for Forger<S>
where
    S: tower_service::Service<http::Request<Body>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<Result<http::Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let Some(forgery) = *self.forgery.lock().expect("no thread has panicked") else {
            return Box::pin(self.inner.call(request));
        };
        let header = request.headers().get("pleach-rpc").and_then(|header| header.to_str().ok());
        let link = header.and_then(|header| header.split_once('-')).map(|(link, _)| link);
        let link = u64::from_str_radix(link.expect("the client accepts references"), 16).expect("a link");
        let answer = Answer(forgery(LinkId(link)));
        let mut server = tonic::server::Grpc::new(Raw);
        Box::pin(async move { Ok(server.unary(answer, request).await) })
    }
}

/// Answers with these bytes.
struct Answer(Vec<u8>);

impl tonic::server::UnaryService<()> for Answer {
    type Response = Vec<u8>;
    type Future = std::future::Ready<Result<tonic::Response<Vec<u8>>, tonic::Status>>;

    fn call(&mut self, _request: Request<()>) -> Self::Future {
        std::future::ready(Ok(tonic::Response::new(std::mem::take(&mut self.0))))
    }
}

/// A message of one field by this reference.
fn message(link: LinkId, slot: u32, slice: RemoteSlice) -> Vec<u8> {
    let reference = Reference { link, lease: LeaseNumber { slot, generation: 1 }, slice };
    gathered::encode(&[Field { at: 0, reference, registered: RegisteredPart::NONE }])
}

/// Bytes of the first arena of a program.
const SLICE: RemoteSlice = RemoteSlice { key: RegionKey(1), offset: 0, len: LENGTH as u64 };

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_forges_references_fails_its_calls_and_no_others() {
    let (sender, receiver) = (open(None, false), open(None, true));
    let (data, forgery) = (data(&sender), Arc::new(Mutex::new(None)));
    let forging = Forging { layer: Layer::new(&sender), forgery: forgery.clone() };
    let channel = over(&receiver, serve(forging, data.clone()).await).await.expect("has regions");
    let mut client = TensorsClient::new(channel);
    let held = client.get(ask()).await.expect("is served").into_inner().data;
    let forgeries: [(Forgery, Code, &str); 7] = [
        (|link| message(link, 0, SLICE), Code::DataLoss, "again"),
        (|_| message(LinkId(1), 0, SLICE), Code::Unavailable, "is not open here"),
        (|link| message(link, 1 << 20, SLICE), Code::DataLoss, "has 4096 slots"),
        (
            |link| message(link, 1, RemoteSlice { key: RegionKey(9), ..SLICE }),
            Code::DataLoss,
            "was not announced",
        ),
        (|link| message(link, 1, RemoteSlice { offset: u64::MAX - 4, ..SLICE }), Code::DataLoss, "from byte"),
        (|link| message(link, 1, RemoteSlice { len: 1 << 40, ..SLICE }), Code::DataLoss, "from byte"),
        (|_| vec![0, b'p', b'm', 9, 1, 0, 0, 0], Code::DataLoss, "is malformed"),
    ];
    for (forged, code, part) in forgeries {
        *forgery.lock().expect("no thread has panicked") = Some(forged);
        let refused = tokio::time::timeout(LONG, client.get(ask())).await.expect("does not hang");
        let refused = refused.expect_err("is forged");
        assert_eq!(refused.code(), code, "{refused}");
        let text = one_line(&refused.message());
        assert!(text.contains(part) && text.contains("/pleach.example.Tensors/Get"), "{refused}");
        *forgery.lock().expect("no thread has panicked") = None;
        let received = client.get(ask()).await.expect("is served").into_inner().data;
        assert!(received == data && held == data, "{part}");
    }
    let counts = sender.counts();
    assert_eq!((counts.sent_in_place.tensors, counts.sent_inline.tensors), (8, 0), "{counts:?}");
}
