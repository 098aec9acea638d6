//! Byte streams over devices, and gRPC on them.

mod tensors;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use pleach_exchange::grpc::byte_streams::{
    self, ByteStream, ByteStreams, OpenStreamsError, StreamCounts, signal_slots,
};
use pleach_transport::shm::ShmDevice;
use pleach_transport::tcp::TcpDevice;
use pleach_transport::verbs::{VerbsDevice, VerbsOptions};
use pleach_transport::{Device, DeviceConfig, Event, LossCause, Rank, Responder, Secret, clock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;
use tonic::codegen::tokio_stream::{self as stream, StreamExt};
use tonic::transport::{Channel, Endpoint, Error, Server};

use tensors::{Ask, Serve, Tensor, TensorsClient, TensorsServer};

/// Longer than any test takes on a busy machine.
const LONG: Duration = Duration::from_secs(60);

/// Streams of a pair.
const STREAMS: u16 = 2;

struct Silent;

impl Responder for Silent {
    fn message(&self, _from: Rank, _message: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn lost(&self, _peer: Rank, _cause: &LossCause) {}
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fabric {
    Shm,
    Tcp,
    Verbs,
}

/// Those of this machine.
const HERE: [Fabric; 2] = [Fabric::Shm, Fabric::Tcp];

fn device(fabric: Fabric, rank: Rank, signal_slots: usize) -> Box<dyn Device> {
    let config = DeviceConfig {
        rank,
        world_size: 2,
        secret: Some(Secret::new(b"a secret of this test")),
        signal_slots,
        connect_timeout: LONG,
        interface: None,
        address: None,
        responder: Arc::new(Silent),
    };
    match fabric {
        Fabric::Shm => Box::new(ShmDevice::new(config).expect("shared memory")),
        Fabric::Tcp => Box::new(TcpDevice::new(config).expect("a free port")),
        Fabric::Verbs => Box::new(VerbsDevice::new(config, &VerbsOptions::default()).expect("a NIC")),
    }
}

/// The two ends of a pair, with the streams of each.
fn pair(fabric: Fabric) -> [(ByteStreams, Vec<ByteStream>); 2] {
    let mut devices = [0, 1].map(|rank| device(fabric, rank, signal_slots(STREAMS)));
    let addresses = [0, 1].map(|rank: usize| devices[rank].info().address.clone());
    for (rank, device) in devices.iter_mut().enumerate() {
        device.connect(1 - rank as Rank, &addresses[1 - rank]).expect("an address");
    }
    let mut events = [Vec::with_capacity(8), Vec::with_capacity(8)];
    let until = clock::now() + LONG;
    while !events.iter().all(|events| events.iter().any(|event| matches!(event, Event::Connected { .. }))) {
        assert!(clock::now() < until, "{events:?}");
        for (device, events) in devices.iter_mut().zip(&mut events) {
            device.poll(clock::now(), events);
        }
    }
    let mut rank = 0;
    let [one, other] = devices;
    let [one_events, other_events] = events;
    [(one, one_events), (other, other_events)].map(|(device, events)| {
        rank += 1;
        let peer = 2 - rank;
        let opened = ByteStreams::open(device, events, &[peer], STREAMS).expect("there is memory");
        assert!(opened.1.iter().all(|stream| stream.peer() == peer), "{:?}", opened.1);
        opened
    })
}

/// Bytes that tell where they are.
fn content(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| ((at * 7 + seed) % 251) as u8).collect()
}

async fn bytes_arrive_in_order(fabric: Fabric) {
    let [(one, one_streams), (other, other_streams)] = pair(fabric);
    let (lengths, mut tasks) = ([0, 1, 100, 4 << 20, (4 << 20) + 1, 3_000_000, 64, 5_000_000], Vec::new());
    for stream in one_streams.into_iter().chain(other_streams) {
        let (mut reads, mut writes) = tokio::io::split(stream);
        // Both ends write the same, so that each knows what comes.
        tasks.push(tokio::spawn(async move {
            for (seed, length) in lengths.into_iter().enumerate() {
                writes.write_all(&content(length, seed)).await.expect("the peer reads");
            }
            writes.shutdown().await.expect("the peer is there");
        }));
        // Shorter and longer than what is written at once.
        let step = 1_000 + 77_777 * tasks.len();
        tasks.push(tokio::spawn(async move {
            let (mut came, mut buffer) = (Vec::new(), vec![0; step]);
            loop {
                match reads.read(&mut buffer).await.expect("the peer writes") {
                    0 => break,
                    count => came.extend_from_slice(&buffer[..count]),
                }
            }
            let expected: Vec<u8> =
                lengths.into_iter().enumerate().flat_map(|(seed, length)| content(length, seed)).collect();
            assert!(came == expected, "{} of {} bytes", came.len(), expected.len());
        }));
    }
    for task in tasks {
        tokio::time::timeout(LONG, task).await.expect("ends").expect("does not panic");
    }
    drop((one, other));
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_arrive_in_order_both_ways() {
    for fabric in HERE {
        bytes_arrive_in_order(fabric).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_waits_for_its_reader_and_for_no_other_one() {
    for fabric in HERE {
        let [(_one, mut one), (_other, mut other)] = pair(fabric);
        let (mut slow, mut quick) = (one.remove(0), one.remove(0));
        let (mut slow_reader, mut quick_reader) = (other.remove(0), other.remove(0));
        let sent = content(8 << 20, 1);
        let mut writing = tokio::spawn({
            let sent = sent.clone();
            async move { slow.write_all(&sent).await.map(|()| slow) }
        });
        // The other stream goes on while this one is full.
        let (wrote, mut came) = tokio::join!(quick.write_all(&sent), async {
            let mut came = vec![0; sent.len()];
            quick_reader.read_exact(&mut came).await.map(|_| came)
        });
        wrote.expect("the peer reads");
        assert!(came.as_mut().expect("the peer writes") == &sent);
        assert!(!writing.is_finished(), "8 MiB are more than is under way");
        let mut came = vec![0; sent.len()];
        slow_reader.read_exact(&mut came).await.expect("the peer writes");
        assert!(came == sent);
        let written = tokio::time::timeout(LONG, &mut writing).await.expect("ends").expect("does not panic");
        drop(written.expect("all was read"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_dropped_ends_and_holds_up_nobody() {
    for fabric in HERE {
        let [(_one, mut one), (_other, mut other)] = pair(fabric);
        let (mut written, mut reader) = (one.remove(0), other.remove(0));
        written.write_all(b"the last words").await.expect("there is room");
        drop(written);
        let mut came = Vec::new();
        reader.read_to_end(&mut came).await.expect("the peer has ended it");
        assert_eq!(came, b"the last words");
        // Nobody reads it, as with a socket whose reader is gone.
        let sent = content(8 << 20, 1);
        tokio::time::timeout(LONG, reader.write_all(&sent)).await.expect("ends").expect("is dropped there");
        // The other stream of the pair is as good as before.
        one.remove(0).write_all(&[7; 100]).await.expect("there is room");
        let mut came = [0; 100];
        other.remove(0).read_exact(&mut came).await.expect("the peer writes");
        assert_eq!(came, [7; 100]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_has_left_is_an_error_after_its_last_bytes() {
    for fabric in HERE {
        let [(one, mut streams), (_other, mut other)] = pair(fabric);
        let mut reader = other.remove(0);
        streams[0].write_all(&content(300_000, 3)).await.expect("there is room");
        // The streams are not dropped, so they have no end.
        tokio::task::spawn_blocking(move || drop(one)).await.expect("does not panic");
        let mut came = vec![0; 300_000];
        reader.read_exact(&mut came).await.expect("came before");
        assert!(came == content(300_000, 3));
        let end = tokio::time::timeout(LONG, reader.read(&mut came)).await.expect("ends");
        let error = end.expect_err("has no end");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        assert!(error.to_string().contains("rank 0 is gone"), "{error}");
        let own = streams[0].write(&[1]).await.expect_err("its device is closed");
        assert!(own.to_string().contains("closed"), "{own}");
        let full = tokio::time::timeout(LONG, async {
            loop {
                reader.write_all(&came).await?;
            }
        });
        let error: std::io::Result<()> = full.await.expect("ends");
        assert_eq!(error.expect_err("nobody reads").kind(), std::io::ErrorKind::ConnectionReset);
    }
}

#[test]
fn a_device_with_too_few_signal_slots_is_refused() {
    let opened = ByteStreams::open(device(Fabric::Shm, 0, 5), Vec::new(), &[1], 1);
    let refused = opened.expect_err("has too few");
    assert!(matches!(refused, OpenStreamsError::SignalSlots { has: 5, .. }), "{refused}");
}

/// Serves these bytes on one end of a stream, with the sizes of `server`, and connects the other
/// end, with those of `client`.
async fn connected(
    data: &Bytes,
    (mut server, on): (Server, ByteStream),
    (client, from): (Endpoint, ByteStream),
) -> (TensorsClient<Channel>, JoinHandle<Result<(), Error>>) {
    let incoming = stream::iter([Ok::<_, std::io::Error>(on)]).chain(stream::pending());
    let service = TensorsServer::new(Serve(data.clone()));
    let serving = tokio::spawn(server.add_service(service).serve_with_incoming(incoming));
    let channel = from.channel(client).await.expect("is connected");
    (TensorsClient::new(channel).max_decoding_message_size(usize::MAX), serving)
}

async fn grpc_runs_on_streams(fabric: Fabric) {
    let [(_client, mut client), (_server, mut server)] = pair(fabric);
    let data = Bytes::from(content(3 << 20, 9));
    // With tonic's own sizes, windows of 64 KiB and frames of 16 KiB.
    let (server, client) = (server.remove(0), client.remove(0));
    let client = (Endpoint::from_static("http://rank-1"), client);
    let (mut client, serving) = connected(&data, (Server::builder(), server), client).await;
    for bytes in [0, 100, 3 << 20] {
        let got = client.get(Ask { bytes, tensors: 1 }).await.expect("is served").into_inner();
        assert!(got.data == data.slice(..bytes as usize), "{bytes}");
    }
    let many = client.repeat(Ask { bytes: 300_000, tensors: 20 }).await.expect("is served").into_inner();
    let got: Vec<Tensor> = many.map(|tensor| tensor.expect("comes")).collect().await;
    assert!(got.len() == 20 && got.iter().all(|tensor| tensor.data == data.slice(..300_000)));
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn grpc_runs_on_the_streams_of_each_fabric() {
    for fabric in HERE {
        grpc_runs_on_streams(fabric).await;
    }
}

/// Counts, where times would depend on who else has the processors: a call takes a few pieces,
/// credits and wake-ups, whatever its bytes, and no hand-over to the thread of the streams. On a
/// processor that computes, each hand-over is a wait for a turn.
#[tokio::test(flavor = "multi_thread")]
async fn over_shared_memory_no_thread_carries_the_bytes_of_a_call() {
    const CALLS: u64 = 40;
    let [(asking, mut client), (answering, mut server)] = pair(Fabric::Shm);
    let data = Bytes::from(content(1 << 20, 2));
    let (server, client) = (server.remove(0), client.remove(0));
    let server = (byte_streams::server(), server);
    let (mut client, serving) = connected(&data, server, (byte_streams::client(), client)).await;
    let ask = Ask { bytes: 1 << 20, tensors: 1 };
    // The first call exchanges the settings of HTTP/2, and may come before the peer's ring is
    // mapped here.
    assert!(client.get(ask).await.expect("is served").into_inner().data == data);
    let before = (asking.counts(), answering.counts());
    for _ in 0..CALLS {
        assert!(client.get(ask).await.expect("is served").into_inner().data == data);
    }
    let after = (asking.counts(), answering.counts());
    let of_calls = |before: StreamCounts, after: StreamCounts| {
        let [pieces, carried_on] = [after.pieces - before.pieces, after.carried_on - before.carried_on];
        let [credits, wakes] = [after.credits - before.credits, after.wakes - before.wakes];
        (pieces, carried_on, credits, wakes, after.polls - before.polls)
    };
    let (pieces, carried_on, credits, wakes, polls) = of_calls(before.1, after.1);
    let shown = format!("{before:?} {after:?}");
    // Five pieces for the answer, one for its end, and one where the ring ends.
    assert!(carried_on == 0 && pieces <= 8 * CALLS && credits <= CALLS && wakes <= 3 * CALLS, "{shown}");
    // A question, and the credits for an answer, wake the thread, which then looks once more.
    assert!(polls <= 12 * CALLS, "{shown}");
    let (pieces, carried_on, credits, ..) = of_calls(before.0, after.0);
    assert!(carried_on == 0 && pieces <= 4 * CALLS && credits <= 5 * CALLS, "{shown}");
    serving.abort();
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs an RDMA device"]
async fn verbs_carry_streams() {
    bytes_arrive_in_order(Fabric::Verbs).await;
    grpc_runs_on_streams(Fabric::Verbs).await;
}
