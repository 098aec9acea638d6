//! Services of tonic whose fields go by reference; over RDMA where there is a device.

#[path = "../../tests/ports/mod.rs"]
mod ports;
mod raw;
mod stopping;
mod tensors;

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use pleach_exchange::endpoint::{ExchangeCounts, InlineReason};
use pleach_exchange::gathered::{self, Field, RegisteredPart};
use pleach_exchange::grpc::{self, Channel, ConnectError, Layer};
use pleach_exchange::reference::{LeaseNumber, LinkId};
use pleach_exchange::{Endpoint, EndpointOptions, ExchangeFabric, Reference};
use pleach_transport::{RegionKey, RemoteSlice, Secret, clock};
use raw::Raw;
use rustix::process::Signal;
use stopping::{PAUSE, signal};
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;
use tonic::codec::CompressionEncoding;
use tonic::codegen::tokio_stream::{self as stream, StreamExt};
use tonic::server::NamedService as _;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use tensors::{Ask, Serve, Tensor, TensorsClient, TensorsServer};

/// Longer than any test takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Calls to a server that was killed fail within this time: long before a deadline. It is some
/// milliseconds; this is for machines that are busy with other things.
const SOON: Duration = Duration::from_secs(10);

/// Held by a test that measures a time, and by the one that keeps all processors busy.
static ALONE: Mutex<()> = Mutex::const_new(());

/// Clients at a time that are killed.
const CLIENTS: u64 = 64;

/// Longer than tonic's limit of a message.
const LENGTH: usize = 5 << 20;

fn open(fabric: ExchangeFabric) -> Endpoint {
    let mut options = EndpointOptions::default();
    options.fabric = fabric;
    if fabric == ExchangeFabric::Verbs {
        // A NIC serves those alone that know a secret.
        options.secret = Some(Secret::new(b"a secret of these tests"));
    }
    Endpoint::open(&options).expect("a free port of loopback")
}

/// Bytes in lendable memory that tell where they are.
fn lendable(endpoint: &Endpoint, length: usize) -> Bytes {
    let mut tensor = endpoint.tensor::<u8>(&[length]).expect("there is memory");
    tensor.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
    tensor.share().into_bytes()
}

/// A server that runs.
struct Running {
    address: SocketAddr,
    server: JoinHandle<()>,
    end: oneshot::Sender<()>,
}

impl Running {
    /// Ends the server with its connections.
    async fn end(self) {
        drop(self.end);
        self.server.await.expect("does not panic");
    }
}

/// Serves bytes. `layer`: the endpoint that lends them.
async fn serve(data: Bytes, layer: Option<&Endpoint>, address: &str) -> (SocketAddr, Running) {
    serve_by(TensorsServer::new(Serve(data)), layer, address).await
}

async fn serve_by(
    service: TensorsServer<Serve>,
    layer: Option<&Endpoint>,
    address: &str,
) -> (SocketAddr, Running) {
    let incoming = TcpIncoming::bind(address.parse().expect("an address")).expect("a free port");
    let address = incoming.local_addr().expect("is bound");
    let layer = layer.map(Layer::new);
    let (end, ended) = oneshot::channel::<()>();
    let ended = async { drop(ended.await) };
    let server = tokio::spawn(async move {
        let served = match layer {
            Some(layer) => {
                let server = Server::builder().layer(layer).add_service(service);
                server.serve_with_incoming_shutdown(incoming, ended).await
            }
            None => {
                let server = Server::builder().add_service(service);
                server.serve_with_incoming_shutdown(incoming, ended).await
            }
        };
        served.expect("serves until its end");
    });
    (address, Running { address, server, end })
}

/// A client of a server. Its messages may be long where they go inline.
async fn client(endpoint: &Endpoint, address: SocketAddr) -> (TensorsClient<Channel>, Channel) {
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let channel = channel.connect().await.expect("listens");
    let channel = Channel::over(endpoint, channel, Some(&address.ip().to_string())).await.expect("opens");
    (TensorsClient::new(channel.clone()), channel)
}

/// Whether fields go by reference both ways.
fn is_linked(channel: &Channel) -> bool {
    channel.requests_by_reference() && channel.answers_by_reference()
}

/// The long fields that went inline for this reason, and their bytes: all that went inline.
fn inline_for(counts: &ExchangeCounts, reason: InlineReason) -> (u64, u64) {
    let count = counts.sent_inline_for(reason);
    assert_eq!(count, counts.sent_inline, "nothing goes inline for another reason");
    (count.tensors, count.bytes)
}

/// Waits until nothing is lent.
async fn wait_for_returns(endpoint: &Endpoint) {
    let until = clock::now() + LONG;
    while endpoint.counts().leases > 0 {
        assert!(clock::now() < until, "{:?}", endpoint.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn ask(bytes: usize) -> Ask {
    Ask { bytes: bytes as u64, tensors: 1 }
}

fn tensor(data: Bytes) -> Tensor {
    Tensor { name: "x".to_owned(), dimensions: vec![1, 2, 3], data, parts: Vec::new() }
}

/// A server and a client, with endpoints of this fabric.
struct Pair {
    sender: Endpoint,
    receiver: Endpoint,
    data: Bytes,
    client: TensorsClient<Channel>,
    server: Running,
}

async fn pair(fabric: ExchangeFabric) -> Pair {
    let (sender, receiver) = (open(fabric), open(fabric));
    let data = lendable(&sender, LENGTH);
    let (address, server) = serve(data.clone(), Some(&sender), "127.0.0.1:0").await;
    let (client, channel) = client(&receiver, address).await;
    assert!(is_linked(&channel));
    Pair { sender, receiver, data, client, server }
}

async fn fields_go_by_reference_both_ways(fabric: ExchangeFabric) {
    let Pair { sender, receiver, data, mut client, server } = pair(fabric).await;
    for length in [0, 1, 100, 16 << 10, 100_000, LENGTH] {
        let received = client.get(ask(length)).await.expect("is served").into_inner();
        assert_eq!((received.data.len(), &received.data), (length, &data.slice(..length)));
        assert_eq!(received.dimensions, [length as u64]);
    }
    let own = lendable(&receiver, LENGTH);
    let parts = vec![own.slice(7..70_000), Bytes::from(vec![3; 20_000]), own.slice(..5)];
    let sent = Tensor { parts, ..tensor(own.clone()) };
    let expected = tensors::sum(&sent);
    assert_eq!(client.sum(sent).await.expect("is served").into_inner().sum, expected);
    let (lent, got) = (sender.counts(), receiver.counts());
    let ways =
        [lent.sent_in_place, got.sent_in_place, lent.sent_copied, got.sent_copied].map(|count| count.tensors);
    let expected = if fabric == ExchangeFabric::Shm { [3, 2, 0, 0] } else { [0, 0, 3, 2] };
    assert_eq!(ways, expected, "answers, and fields of requests");
    assert_eq!([&lent, &got].map(|counts| counts.field_latencies.count()), [2, 3]);
    let inline = [&lent, &got].map(|counts| inline_for(counts, InlineReason::NotLendable));
    assert_eq!(inline, [(0, 0), (1, 20_000)], "what lies in memory of another kind");
    drop(own);
    for endpoint in [&sender, &receiver] {
        wait_for_returns(endpoint).await;
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_are_read_in_place() {
    fields_go_by_reference_both_ways(ExchangeFabric::Shm).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_are_got_over_sockets() {
    fields_go_by_reference_both_ways(ExchangeFabric::Tcp).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_stays_as_long_as_it_is_held_and_can_be_sent_on() {
    let Pair { sender, receiver, data, mut client, server } = pair(ExchangeFabric::Tcp).await;
    let received = client.get(ask(LENGTH)).await.expect("is served").into_inner().data;
    // It was copied into lendable memory of this program.
    let expected = tensors::sum(&tensor(data));
    assert_eq!(client.sum(tensor(received.clone())).await.expect("is served").into_inner().sum, expected);
    assert_eq!((receiver.counts().sent_copied.tensors, sender.counts().copied.tensors), (1, 1));
    server.end().await;
    let Pair { sender, receiver: _receiver, data, mut client, server } = pair(ExchangeFabric::Shm).await;
    let received = client.get(ask(LENGTH)).await.expect("is served").into_inner().data;
    drop(client);
    server.end().await;
    assert_eq!((&received, sender.counts().leases), (&data, 1));
    drop(received);
    wait_for_returns(&sender).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_have_references_in_each_message() {
    for fabric in [ExchangeFabric::Shm, ExchangeFabric::Tcp] {
        references_in_streams(fabric).await;
    }
}

async fn references_in_streams(fabric: ExchangeFabric) {
    let Pair { sender, receiver, data, mut client, server } = pair(fabric).await;
    let many = Ask { bytes: 100_000, tensors: 50 };
    let mut received = client.repeat(many).await.expect("is served").into_inner();
    for number in 0..50 {
        let tensor = received.next().await.expect("more comes").expect("is served");
        assert_eq!((tensor.name, tensor.data), (number.to_string(), data.slice(..100_000)));
    }
    assert!(received.next().await.is_none());
    let own = lendable(&receiver, 100_000);
    let expected = 50 * tensors::sum(&tensor(own.clone()));
    let sent = stream::iter((0..50).map(move |_| tensor(own.clone())));
    assert_eq!(client.sum_all(sent).await.expect("is served").into_inner().sum, expected);
    for endpoint in [&sender, &receiver] {
        wait_for_returns(endpoint).await;
        let counts = endpoint.counts();
        assert_eq!(counts.sent_in_place.tensors + counts.sent_copied.tensors, 50, "{counts:?}");
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_messages_have_no_references_and_others_of_the_same_call_do() {
    const GZIP: CompressionEncoding = CompressionEncoding::Gzip;
    for fabric in [ExchangeFabric::Shm, ExchangeFabric::Tcp] {
        let (sender, receiver) = (open(fabric), open(fabric));
        let (data, own) = (lendable(&sender, 1 << 20), lendable(&receiver, 1 << 20));
        let service = TensorsServer::new(Serve(data.clone())).accept_compressed(GZIP).send_compressed(GZIP);
        let (address, server) = serve_by(service, Some(&sender), "127.0.0.1:0").await;
        let (ordinary, channel) = client(&receiver, address).await;
        assert!(is_linked(&channel));
        let lent = |endpoint: &Endpoint| {
            let counts = endpoint.counts();
            counts.sent_in_place.tensors + counts.sent_copied.tensors
        };
        for (compresses, is_answered_compressed) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let mut client = ordinary.clone();
            if compresses {
                client = client.send_compressed(GZIP);
            }
            if is_answered_compressed {
                client = client.accept_compressed(GZIP);
            }
            let before = [&sender, &receiver].map(lent);
            let answer = client.get(ask(1 << 20)).await.expect("is served");
            assert_eq!(answer.metadata().contains_key("grpc-encoding"), is_answered_compressed);
            assert_eq!(answer.into_inner().data, data);
            let many = Ask { bytes: 100_000, tensors: 2 };
            let mut answers = client.repeat(many).await.expect("is served").into_inner();
            for number in 0..2 {
                let tensor = answers.next().await.expect("more comes").expect("is served");
                assert_eq!((tensor.name, tensor.data), (number.to_string(), data.slice(..100_000)));
            }
            assert!(answers.next().await.is_none());
            let expected = tensors::sum(&tensor(own.clone()));
            assert_eq!(client.sum(tensor(own.clone())).await.expect("is served").into_inner().sum, expected);
            let sent = stream::iter([tensor(own.clone()), tensor(own.clone())]);
            let total = client.sum_all(sent).await.expect("is served").into_inner().sum;
            assert_eq!(total, 2 * expected);
            let after = [&sender, &receiver].map(lent);
            let counted = [after[0] - before[0], after[1] - before[1]];
            let expected = [!is_answered_compressed, !compresses].map(|lends| 3 * u64::from(lends));
            assert_eq!(counted, expected, "lent by server and client on {fabric}");
        }
        // In two of the four cases, an answer and two in a stream, and as many requests.
        let inline = [&sender, &receiver].map(|endpoint| {
            let (fields, _) = inline_for(&endpoint.counts(), InlineReason::Compressed);
            fields
        });
        assert_eq!(inline, [6, 6]);
        for endpoint in [&sender, &receiver] {
            wait_for_returns(endpoint).await;
        }
        server.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_takes_no_compressed_request_refuses_it_and_serves_on() {
    let Pair { receiver, data, client, server, .. } = pair(ExchangeFabric::Auto).await;
    let own = lendable(&receiver, 100_000);
    let mut compressing = client.clone().send_compressed(CompressionEncoding::Gzip);
    let refused = compressing.sum(tensor(own)).await.expect_err("is compressed");
    assert_eq!((refused.code(), receiver.counts().leases), (Code::Unimplemented, 0), "{refused}");
    let mut client = client;
    assert_eq!(client.get(ask(100_000)).await.expect("is served").into_inner().data, data.slice(..100_000));
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_asks_for_the_health_of_services_behind_the_layer() {
    let sender = open(ExchangeFabric::Auto);
    let data = lendable(&sender, 100_000);
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
    let address = format!("http://{}", incoming.local_addr().expect("is bound"));
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<TensorsServer<Serve>>().await;
    let server = Server::builder().layer(Layer::new(&sender)).add_service(health);
    let server = server.add_service(TensorsServer::new(Serve(data.clone())));
    let server = tokio::spawn(server.serve_with_incoming(incoming));
    let channel = grpc::connect(address.clone()).await.expect("listens");
    assert!(is_linked(&channel));
    let ordinary = tonic::transport::Endpoint::from_shared(address).expect("an address");
    let ordinary = ordinary.connect().await.expect("listens");
    let of = |service: &str| HealthCheckRequest { service: service.to_owned() };
    let (mut client, mut plain) = (HealthClient::new(channel.clone()), HealthClient::new(ordinary));
    for service in ["", TensorsServer::<Serve>::NAME] {
        let answers = [client.check(of(service)).await, plain.check(of(service)).await];
        for answer in answers {
            assert_eq!(
                answer.expect("is served").into_inner().status(),
                ServingStatus::Serving,
                "{service:?}"
            );
        }
    }
    let unknown = client.check(of("nobody")).await.expect_err("is not served");
    assert_eq!(unknown.code(), Code::NotFound);
    // A stream of short messages beside calls by reference.
    let mut watched = client.watch(of(TensorsServer::<Serve>::NAME)).await.expect("is served").into_inner();
    for is_serving in [true, false] {
        let seen = watched.next().await.expect("goes on").expect("is served").status();
        assert_eq!(seen == ServingStatus::Serving, is_serving, "{seen:?}");
        let got = TensorsClient::new(channel.clone()).get(ask(100_000)).await.expect("is served");
        assert_eq!(got.into_inner().data, data);
        reporter.set_not_serving::<TensorsServer<Serve>>().await;
    }
    assert_eq!(sender.counts().sent_in_place.tensors, 2);
    server.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_without_pleach_is_served_by_the_same_call() {
    let (sender, receiver) = (open(ExchangeFabric::Auto), open(ExchangeFabric::Auto));
    let data = lendable(&sender, 1 << 20);
    // A server without a layer.
    let (address, server) = serve(data.clone(), None, "127.0.0.1:0").await;
    let (mut ordinary, channel) = client(&receiver, address).await;
    assert!(!channel.requests_by_reference() && !channel.answers_by_reference());
    let received = ordinary.get(ask(1 << 20)).await.expect("is served").into_inner();
    assert_eq!(received.data, data);
    let own = lendable(&receiver, 1 << 20);
    let expected = tensors::sum(&tensor(own.clone()));
    assert_eq!(ordinary.sum(tensor(own)).await.expect("is served").into_inner().sum, expected);
    assert_eq!(inline_for(&receiver.counts(), InlineReason::NoRegions), (1, 1 << 20));
    server.end().await;
    // A client of tonic alone.
    let (address, server) = serve(data.clone(), Some(&sender), "127.0.0.1:0").await;
    let mut plain = TensorsClient::connect(format!("http://{address}")).await.expect("listens");
    let received = plain.get(ask(1 << 20)).await.expect("is served").into_inner();
    assert_eq!(received.data, data);
    let refused = plain.get(ask(LENGTH)).await.expect_err("is not served");
    assert_eq!(refused.code(), Code::OutOfRange);
    server.end().await;
    let counts = sender.counts();
    assert_eq!(counts.sent_in_place.tensors, 0);
    assert_eq!(inline_for(&counts, InlineReason::NoRegions), (1, 1 << 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_beyond_a_limit_go_inline_and_are_counted() {
    let mut options = EndpointOptions::default();
    // One of two tensors may be lent.
    options.limits.server.leases.bytes_lent = 150_000;
    let sender = Endpoint::open(&options).expect("a free port of loopback");
    let receiver = open(ExchangeFabric::Auto);
    let (data, own) = (lendable(&sender, 100_000), lendable(&receiver, 20_000));
    let other = lendable(&sender, 100_000);
    let (address, server) = serve(data.clone(), Some(&sender), "127.0.0.1:0").await;
    let (other_address, other_server) = serve(other.clone(), Some(&sender), "127.0.0.1:0").await;
    let (mut first, _) = client(&receiver, address).await;
    let (mut second, _) = client(&receiver, other_address).await;
    let held = first.get(ask(100_000)).await.expect("is served").into_inner().data;
    let inline = second.get(ask(100_000)).await.expect("is served").into_inner().data;
    assert!(held == data && inline == other);
    assert_eq!(inline_for(&sender.counts(), InlineReason::Limit), (1, 100_000));
    // A message has room for so many references.
    let parts = vec![own.clone(); gathered::FIELDS_MAX + 3];
    let sent = Tensor { parts, ..tensor(Bytes::new()) };
    let expected = tensors::sum(&sent);
    assert_eq!(first.sum(sent).await.expect("is served").into_inner().sum, expected);
    assert_eq!(inline_for(&receiver.counts(), InlineReason::Limit), (3, 60_000));
    for server in [server, other_server] {
        server.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn regions_that_are_required_and_not_there_are_an_error() {
    let mut options = EndpointOptions::default();
    options.requires_regions = true;
    let receiver = Endpoint::open(&options).expect("a free port of loopback");
    let (address, server) = serve(Bytes::new(), None, "127.0.0.1:0").await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let channel = channel.connect().await.expect("listens");
    let refused = Channel::over(&receiver, channel, None).await.expect_err("has no regions");
    assert!(matches!(&refused, ConnectError::NoRegions(_)), "{refused}");
    assert!(refused.to_string().contains("the server has no pleach"), "{refused}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_lent_to_calls_that_are_cancelled_comes_back() {
    for fabric in [ExchangeFabric::Shm, ExchangeFabric::Tcp] {
        cancelled_calls_return_what_was_lent(fabric).await;
    }
}

async fn cancelled_calls_return_what_was_lent(fabric: ExchangeFabric) {
    let Pair { sender, receiver, data: _data, client, server } = pair(fabric).await;
    let own = lendable(&receiver, 100_000);
    let calls = (0..200_u64).map(|number| {
        let (mut client, own) = (client.clone(), own.clone());
        tokio::spawn(async move {
            // Some end before they begin, and some after their answer.
            let limit = Duration::from_micros(number * 37 % 3_000);
            let work = async {
                match number % 4 {
                    0 => drop(client.get(ask(100_000)).await),
                    1 => drop(client.sum(tensor(own)).await),
                    2 => {
                        let many = Ask { bytes: 100_000, tensors: 20 };
                        if let Ok(received) = client.repeat(many).await {
                            let mut received = received.into_inner();
                            while received.next().await.is_some() {}
                        }
                    }
                    _ => {
                        let sent = stream::iter((0..20).map(move |_| tensor(own.clone())));
                        drop(client.sum_all(sent).await);
                    }
                }
            };
            let _ = tokio::time::timeout(limit, work).await;
        })
    });
    // A server of HTTP/2 closes the connection of a client that cancels many at once; a few of
    // them do fail for that.
    let mut calls = calls.into_iter();
    while let Some(first) = calls.next() {
        for call in std::iter::once(first).chain(calls.by_ref().take(7)).collect::<Vec<_>>() {
            call.await.expect("does not panic");
        }
    }
    for endpoint in [&sender, &receiver] {
        wait_for_returns(endpoint).await;
    }
    // The links are as good as before.
    let mut client = client;
    let before = sender.counts();
    let until = clock::now() + LONG;
    while let Err(status) = client.get(ask(100_000)).await {
        assert!(clock::now() < until, "{status}");
    }
    let after = sender.counts();
    let count = |of: &ExchangeCounts| of.sent_in_place.tensors + of.sent_copied.tensors;
    assert!(count(&after) > count(&before), "{after:?}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_lent_to_a_server_that_does_not_read_the_request_comes_back() {
    for fabric in [ExchangeFabric::Shm, ExchangeFabric::Tcp] {
        let (sender, receiver) = (open(fabric), open(fabric));
        let refuse = |_| Err(tonic::Status::permission_denied("not today"));
        let service = TensorsServer::with_interceptor(Serve(Bytes::new()), refuse);
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address")).expect("a free port");
        let address = incoming.local_addr().expect("is bound");
        let server = Server::builder().layer(Layer::new(&sender)).add_service(service);
        let server = tokio::spawn(server.serve_with_incoming(incoming));
        let (mut client, _) = client(&receiver, address).await;
        let own = lendable(&receiver, 100_000);
        let until = clock::now() + LONG;
        while receiver.counts().sent_in_place.tensors + receiver.counts().sent_copied.tensors < 10 {
            assert!(clock::now() < until, "{:?}", receiver.counts());
            let refused = client.sum(tensor(own.clone())).await.expect_err("is refused");
            assert_eq!(refused.code(), Code::PermissionDenied);
        }
        wait_for_returns(&receiver).await;
        assert_eq!(sender.counts().in_place.tensors + sender.counts().copied.tensors, 0, "nobody read it");
        server.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_reference_fails_its_call_and_no_other() {
    let Pair { sender, data, mut client, server, .. } = pair(ExchangeFabric::Shm).await;
    let address = server.address;
    let slice = RemoteSlice { key: RegionKey(1), offset: 0, len: 100_000 };
    let lease = LeaseNumber { slot: 0, generation: 1 };
    let forged = |link: u64| {
        let reference = Reference { link: LinkId(link), lease, slice };
        let registered = RegisteredPart::NONE;
        gathered::encode(&[Field { at: 0, reference, registered }])
    };
    for (message, header, code) in [
        (forged(1), Some("1-1"), Code::Unavailable),
        (vec![0, b'p', b'm', 9, 1, 0, 0, 0], Some("1-1"), Code::DataLoss),
        (forged(1), None, Code::Internal),
        (forged(1), Some("nonsense"), Code::Internal),
    ] {
        let channel =
            tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let mut forger = tonic::client::Grpc::new(channel.connect().await.expect("listens"));
        forger.ready().await.expect("listens");
        let mut request = Request::new(message);
        if let Some(header) = header {
            request.metadata_mut().insert("pleach-rpc", header.parse().expect("is text"));
        }
        let path = "/pleach.example.Tensors/Sum".parse().expect("a path");
        let refused = forger.unary(request, path, Raw).await.expect_err("is forged");
        assert_eq!(refused.code(), code, "{refused}");
    }
    let received = client.get(ask(100_000)).await.expect("is served").into_inner();
    assert_eq!((received.data, sender.counts().sent_in_place.tensors), (data.slice(..100_000), 1));
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_is_linked_anew() {
    let (sender, receiver) = (open(ExchangeFabric::Auto), open(ExchangeFabric::Auto));
    let data = lendable(&sender, 100_000);
    let own = format!("127.0.0.1:{}", ports::reserve(1));
    let (address, server) = serve(data.clone(), Some(&sender), &own).await;
    let (mut client, channel) = client(&receiver, address).await;
    client.get(ask(100_000)).await.expect("is served");
    server.end().await;
    drop((sender, data));
    let again = open(ExchangeFabric::Auto);
    let other = lendable(&again, 100_000);
    let (_, server) = serve(other.clone(), Some(&again), &address.to_string()).await;
    let until = clock::now() + LONG;
    // A call may fail while the server is away, and go inline until the programs know each other.
    while !is_linked(&channel) || again.counts().sent_in_place.tensors == 0 {
        assert!(clock::now() < until, "{}", channel.answers_by_reference());
        if let Ok(received) = client.get(ask(100_000)).await {
            assert_eq!(received.into_inner().data, other);
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deadlines_and_statuses_are_those_of_tonic() {
    let Pair { client, server, .. } = pair(ExchangeFabric::Auto).await;
    let mut client = client;
    let refused = client.get(ask(LENGTH + 1)).await.expect_err("is longer");
    assert_eq!((refused.code(), refused.message()), (Code::OutOfRange, "5242880 bytes are served"));
    let mut late = Request::new(stream::pending::<Tensor>());
    late.set_timeout(Duration::from_millis(20));
    let refused = client.sum_all(late).await.expect_err("has no end");
    assert!(matches!(refused.code(), Code::Cancelled | Code::DeadlineExceeded), "{refused}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device"]
async fn services_lend_their_fields_over_verbs() {
    fields_go_by_reference_both_ways(ExchangeFabric::Verbs).await;
    references_in_streams(ExchangeFabric::Verbs).await;
    cancelled_calls_return_what_was_lent(ExchangeFabric::Verbs).await;
}

/// Tells a child that it is one, and of which server it is a client.
const PART: &str = "PLEACH_TEST_CLIENT_OF";

/// What a client does that will be killed; nothing in the process of the tests.
#[tokio::test(flavor = "multi_thread")]
async fn part_of_a_child() {
    let Some(address) = std::env::var(PART).ok().filter(|address| !address.is_empty()) else { return };
    let receiver = open(ExchangeFabric::Auto);
    let (client, _) = client(&receiver, address.parse().expect("an address")).await;
    let own = lendable(&receiver, 100_000);
    println!("ready");
    let mut held = Vec::new();
    for number in 0_u64.. {
        let mut client = client.clone();
        if number % 2 == 0 {
            held.push(client.get(ask(100_000)).await.expect("is served"));
            held.truncate(3);
        } else {
            let expected = tensors::sum(&tensor(own.clone()));
            let sum = client.sum(tensor(own.clone())).await.expect("is served").into_inner().sum;
            assert_eq!(sum, expected, "a torn tensor");
        }
    }
}

/// A child of this test that does the part of a test of this name.
fn child(test: &str, address: &str) -> (Child, String) {
    let program = std::env::current_exe().expect("this test");
    let mut child = Command::new(program)
        .args(["--exact", test, "--nocapture"])
        .env(PART, address)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("this test starts");
    let lines = BufReader::new(child.stdout.take().expect("is piped")).lines();
    // The harness may have begun the line.
    let mut lines = lines.map_while(Result::ok);
    let said =
        lines.find_map(|line| line.find("ready").map(|at| line[at + "ready".len()..].trim().to_owned()));
    (child, said.expect("it did not end by itself"))
}

/// How long clients come and are killed.
const KILLING: Duration = Duration::from_secs(10);

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_are_killed_leave_nothing_behind() {
    let _alone = ALONE.lock().await;
    let sender = open(ExchangeFabric::Auto);
    let data = lendable(&sender, 100_000);
    let (address, server) = serve(data.clone(), Some(&sender), "127.0.0.1:0").await;
    let until = clock::now() + KILLING;
    // Each is killed at another point of its calls, and another one comes.
    let programs = (1..=CLIENTS).map(|number| {
        std::thread::spawn(move || {
            let (mut random, mut killed) = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15), 0);
            while killed == 0 || clock::now() < until {
                let (mut program, _) = child("part_of_a_child", &address.to_string());
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                std::thread::park_timeout(Duration::from_micros(random % 50_000));
                kill(&mut program);
                killed += 1;
            }
            killed
        })
    });
    let programs = programs.collect::<Vec<_>>();
    let killed = tokio::task::spawn_blocking(|| {
        programs.into_iter().map(|program| program.join().expect("does not panic")).sum::<u64>()
    });
    let killed = killed.await.expect("does not panic");
    assert!(
        killed >= CLIENTS && sender.counts().sent_in_place.tensors > 0,
        "{killed}: {:?}",
        sender.counts()
    );
    wait_for_returns(&sender).await;
    let until = clock::now() + LONG;
    while sender.counts().links > 0 || sender.counts().bytes_lent > 0 {
        assert!(clock::now() < until, "{:?}", sender.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // Others are served as before.
    let receiver = open(ExchangeFabric::Auto);
    let (mut client, channel) = client(&receiver, address).await;
    assert!(is_linked(&channel));
    assert_eq!(client.get(ask(100_000)).await.expect("is served").into_inner().data, data);
    server.end().await;
}

/// A server that will be stopped; nothing in the process of the tests.
#[tokio::test(flavor = "multi_thread")]
async fn server_of_a_child() {
    if std::env::var(PART).is_err() {
        return;
    }
    let sender = open(ExchangeFabric::Auto);
    let data = lendable(&sender, LENGTH);
    let (address, running) = serve(data, Some(&sender), "127.0.0.1:0").await;
    println!("ready {address}");
    running.server.await.expect("does not panic");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_server_is_waited_for_a_stopped_one_until_the_deadline_and_a_killed_one_not() {
    let _alone = ALONE.lock().await;
    let (mut program, address) = child("server_of_a_child", "");
    let receiver = open(ExchangeFabric::Auto);
    let (mut client, channel) = client(&receiver, address.parse().expect("an address")).await;
    assert!(is_linked(&channel));
    let own = lendable(&receiver, 100_000);
    let sum = tensors::sum(&tensor(own.clone()));
    let held = client.get(ask(100_000)).await.expect("is served").into_inner().data;
    signal(&program, Signal::STOP);
    let limited = |message| {
        let mut request = Request::new(message);
        request.set_timeout(PAUSE / 3);
        request
    };
    let refused = client.get(limited(ask(100_000))).await.expect_err("is stopped");
    // The server's timer is stopped with it.
    let names_call = refused.message().contains("/pleach.example.Tensors/Get");
    assert!(refused.code() == Code::DeadlineExceeded && names_call, "{refused}");
    let (mut late, message) = (client.clone(), tensor(own.clone()));
    let slow = tokio::spawn(async move { late.sum(message).await });
    tokio::time::sleep(PAUSE).await;
    assert!(!slow.is_finished() && tensors::sum(&tensor(held.clone())) == sum, "what was received stays");
    signal(&program, Signal::CONT);
    let total = slow.await.expect("does not panic").expect("is served").into_inner().sum;
    assert_eq!(total, sum);
    assert_eq!(client.get(ask(100_000)).await.expect("is served").into_inner().data, held);
    wait_for_returns(&receiver).await;
    // One that is killed is not waited for.
    signal(&program, Signal::STOP);
    let calls = (0..CALLS).map(|_| {
        let (mut last, message) = (client.clone(), tensor(own.clone()));
        tokio::spawn(async move { last.sum(message).await })
    });
    let calls = calls.collect::<Vec<_>>();
    // A request is sent when it lends. The others wait for a place.
    let until = clock::now() + LONG;
    while receiver.counts().leases < STREAMS {
        assert!(clock::now() < until, "{:?}", receiver.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let since = clock::now();
    kill(&mut program);
    for call in calls {
        let lost = call.await.expect("does not panic").expect_err("is killed");
        is_lost(&lost, "Sum");
    }
    let waited = clock::now().since(since);
    println!("{CALLS} calls to a killed server failed after {waited:?}");
    assert!(waited < SOON && tensors::sum(&tensor(held)) == sum, "{waited:?}: what was received stays");
    // Nobody listens there any more.
    is_lost(&client.get(ask(1)).await.expect_err("is killed"), "Get");
}

/// Calls at a time.
const CALLS: usize = 300;

/// How many of them the server takes at a time.
const STREAMS: u64 = 200;

/// Kills a child that runs until then.
fn kill(program: &mut Child) {
    program.kill().expect("it runs");
    let status = program.wait().expect("it was killed");
    assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "it failed by itself");
}

/// Whether a status says that the server of this call is lost, and why.
fn is_lost(status: &Status, method: &str) {
    let names_call =
        status.message().contains(&format!("/pleach.example.Tensors/{method}: the server is lost"));
    let has_source = std::error::Error::source(status).is_some();
    assert!(status.code() == Code::Unavailable && names_call && has_source, "{status:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_killed_within_an_answer_is_lost_whether_there_are_links_or_not() {
    for (fabric, method, bytes) in [
        (ExchangeFabric::Auto, "Repeat", 1000),
        (ExchangeFabric::None, "Repeat", 1000),
        (ExchangeFabric::None, "Get", LENGTH),
    ] {
        let (mut program, address) = child("server_of_a_child", "");
        let (_, channel) = client(&open(fabric), address.parse().expect("an address")).await;
        assert_eq!(is_linked(&channel), fabric == ExchangeFabric::Auto);
        let mut caller = tonic::client::Grpc::new(channel).max_decoding_message_size(2 * LENGTH);
        caller.ready().await.expect("listens");
        let path = format!("/pleach.example.Tensors/{method}").parse().expect("a path");
        let ask = Request::new(Ask { tensors: 1 << 20, ..ask(bytes) });
        let codec = grpc::Codec::<Ask, Tensor>::default();
        // An answer of one message is a stream of one. Its end waits until the client reads.
        let mut answer = caller.server_streaming(ask, path, codec).await.expect("is served").into_inner();
        kill(&mut program);
        let lost = loop {
            match tokio::time::timeout(LONG, answer.message()).await.expect("does not hang") {
                Ok(message) => assert!(message.is_some(), "{method}: the answer is not whole"),
                Err(status) => break status,
            }
        };
        is_lost(&lost, method);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_this_program_is_no_lost_server() {
    let (sender, receiver) = (open(ExchangeFabric::Auto), open(ExchangeFabric::Auto));
    let (address, server) = serve(lendable(&sender, 100), Some(&sender), "127.0.0.1:0").await;
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).expect("an address");
    let channel = endpoint.origin("nowhere".parse().expect("a name")).connect().await.expect("listens");
    let channel = Channel::over(&receiver, channel, None).await.expect("goes inline");
    let refused = TensorsClient::new(channel).get(ask(1)).await.expect_err("has no scheme");
    let names_call = refused.message().contains("/pleach.example.Tensors/Get");
    let has_source = std::error::Error::source(&refused).is_some();
    assert!(refused.code() == Code::Unknown && names_call && has_source, "{refused:?}");
    server.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_keeps_what_it_reads_and_holds_up_nobody() {
    let sender = open(ExchangeFabric::Auto);
    let data = lendable(&sender, 100_000);
    let (address, server) = serve(data.clone(), Some(&sender), "127.0.0.1:0").await;
    let (mut program, _) = child("part_of_a_child", &address.to_string());
    let receiver = open(ExchangeFabric::Auto);
    let (mut client, _) = client(&receiver, address).await;
    let until = clock::now() + LONG;
    while sender.counts().leases == 0 {
        assert!(clock::now() < until, "{:?}", sender.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    signal(&program, Signal::STOP);
    for _ in 0..10 {
        assert_eq!(client.get(ask(100_000)).await.expect("is served").into_inner().data, data);
    }
    tokio::time::sleep(PAUSE).await;
    let before = sender.counts().sent_in_place.tensors;
    signal(&program, Signal::CONT);
    while sender.counts().sent_in_place.tensors < before + 10 {
        assert!(clock::now() < until, "{:?}", sender.counts());
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    kill(&mut program);
    wait_for_returns(&sender).await;
    server.end().await;
}
