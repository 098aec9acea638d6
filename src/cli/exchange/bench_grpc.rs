//! The measured ways of gRPC: a call whose answer has a field of bytes, over a socket of loopback,
//! over byte streams of a fabric, and by reference.

use std::io::{BufRead, Read};
use std::marker::PhantomData;

use bytes::Bytes;
use pleach::exchange::grpc::byte_streams::{ByteStream, ByteStreams, signal_slots};
use pleach::exchange::grpc::{self, Channel, Layer};
use pleach::exchange::{Endpoint, ExchangeFabric};
use pleach::transport::{Nanos, Rank, clock};
use tokio::runtime::Runtime;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Status, transport};
use tonic_prost::ProstCodec;

use super::bench::{LIMIT, Sender, Way, byte_at, options, tensor};
use super::bench_put::{connect, open_device};
use crate::cli::CommandError;
use crate::cli::grpc::{BoxFuture, MESSAGE, Method, Served, endpoint, listen, only, server};
use crate::cli::output::print;

const PATH: &str = "/pleach.bench.Tensors/Get";

/// Streams of the two ranks.
const STREAMS: u16 = 1;

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct Ask {
    #[prost(uint64, tag = "1")]
    bytes: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Tensor {
    #[prost(bytes = "bytes", tag = "1")]
    data: Bytes,
}

/// Answers with the beginning of these bytes.
struct Tensors<C> {
    content: Bytes,
    codec: PhantomData<fn() -> C>,
}

impl<C> Clone for Tensors<C> {
    fn clone(&self) -> Self {
        Self { content: self.content.clone(), codec: PhantomData }
    }
}

impl<C> Method for Tensors<C>
where
    C: tonic::codec::Codec<Encode = Tensor, Decode = Ask> + Default + Send + 'static,
{
    const SERVICE: &'static str = "pleach.bench.Tensors";
    const PATH: &'static str = PATH;
    type Ask = Ask;
    type Answer = Tensor;
    type Codec = C;

    fn answer(&self, ask: Ask) -> BoxFuture<Result<Tensor, Status>> {
        let length = usize::try_from(ask.bytes).ok().filter(|length| *length <= self.content.len());
        let data = length.map(|length| Tensor { data: self.content.slice(..length) });
        let has = self.content.len();
        Box::pin(async move { data.ok_or_else(|| Status::out_of_range(format!("{has} bytes are served"))) })
    }
}

fn service<C>(content: Bytes) -> Served<Tensors<C>> {
    Served(Tensors { content, codec: PhantomData })
}

type Plain<E, D> = ProstCodec<E, D>;

fn failed(error: &dyn std::fmt::Display) -> CommandError {
    CommandError::failed(format!("no measurement: gRPC, {error}"))
}

/// Serves so many bytes until standard input ends.
pub(crate) fn serve(way: Way, fabric: ExchangeFabric, bytes: u64) -> Result<(), CommandError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|error| failed(&error))?;
    let own = || (0..bytes).map(byte_at).collect::<Vec<u8>>();
    // What is served lives until standard input ends.
    let (mut endpoint, mut streams) = (None, None);
    if way == Way::GrpcFabric {
        let (opened, stream) = open_stream(fabric, 0, |address| {
            print("address", &format!("{address}\n"))?;
            let mut line = String::new();
            std::io::stdin().lock().read_line(&mut line).map_err(|error| failed(&error))?;
            Ok(line)
        })?;
        streams = Some(opened);
        let service = service::<Plain<Tensor, Ask>>(own().into());
        runtime.spawn(server().add_service(service).serve_with_incoming(only(stream)));
    } else {
        let in_runtime = runtime.enter();
        let (address, incoming) = listen().map_err(|error| failed(&error))?;
        if way == Way::GrpcReference {
            let opened = Endpoint::open(&options(fabric, bytes)?).map_err(CommandError::failed)?;
            let content = tensor(&opened, bytes)?.into_bytes();
            let service = service::<grpc::Codec<Tensor, Ask>>(content);
            let server = server().layer(Layer::new(&opened)).add_service(service);
            runtime.spawn(server.serve_with_incoming(incoming));
            endpoint = Some(opened);
        } else {
            let service = service::<Plain<Tensor, Ask>>(own().into());
            runtime.spawn(server().add_service(service).serve_with_incoming(incoming));
        }
        drop(in_runtime);
        print("address", &format!("{address}\n"))?;
    }
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    runtime.shutdown_background();
    drop((endpoint, streams));
    Ok(())
}

/// A stream to the other rank. `exchange` gives this device's address to the other rank, and
/// returns that of its device.
fn open_stream(
    fabric: ExchangeFabric,
    rank: Rank,
    exchange: impl FnOnce(&str) -> Result<String, CommandError>,
) -> Result<(ByteStreams, ByteStream), CommandError> {
    let mut device = open_device(fabric, rank, signal_slots(STREAMS))?;
    let own = device.info().address.to_string();
    let events = connect(&mut *device, &exchange(&own)?)?;
    let (streams, mut opened) =
        ByteStreams::open(device, events, &[1 - rank], STREAMS).map_err(|error| failed(&error))?;
    Ok((streams, opened.remove(0)))
}

/// One call, and what came.
pub(crate) struct Call {
    pub(crate) start: Nanos,
    pub(crate) end: Nanos,
    pub(crate) content: Bytes,
    /// It came by the way that is measured.
    pub(crate) is_by_its_way: bool,
}

/// The process that measures.
pub(crate) struct Client {
    runtime: Runtime,
    way: ClientWay,
    /// The streams of the fabric live as long as their channel.
    _streams: Option<ByteStreams>,
}

enum ClientWay {
    Plain(transport::Channel),
    Reference(Channel),
}

impl Client {
    pub(crate) fn connect(
        sender: &mut Sender,
        way: Way,
        fabric: ExchangeFabric,
    ) -> Result<Self, CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| failed(&error))?;
        let late = || failed(&format!("the server did not answer within {LIMIT:?}"));
        if way == Way::GrpcFabric {
            let (streams, stream) = open_stream(fabric, 1, |address| {
                sender.tell(address)?;
                Ok(sender.address.clone())
            })?;
            let server = endpoint("http://rank").map_err(|error| failed(&error))?;
            let connecting = async { tokio::time::timeout(LIMIT, stream.channel(server)).await };
            let channel =
                runtime.block_on(connecting).map_err(|_| late())?.map_err(|error| failed(&error))?;
            return Ok(Self { runtime, way: ClientWay::Plain(channel), _streams: Some(streams) });
        }
        let server = endpoint(&format!("http://{}", sender.address)).map_err(|error| failed(&error))?;
        let connecting = async { tokio::time::timeout(LIMIT, server.connect()).await };
        let channel = runtime.block_on(connecting).map_err(|_| late())?.map_err(|error| failed(&error))?;
        let way = if way == Way::GrpcReference {
            let endpoint = Endpoint::open(&options(fabric, 0)?).map_err(CommandError::failed)?;
            let over = Channel::over(&endpoint, channel, None);
            let over = runtime.block_on(async { tokio::time::timeout(LIMIT, over).await });
            ClientWay::Reference(over.map_err(|_| late())?.map_err(|error| failed(&error))?)
        } else {
            ClientWay::Plain(channel)
        };
        Ok(Self { runtime, way, _streams: None })
    }

    /// One call.
    pub(crate) fn receive(&self, bytes: u64) -> Result<Call, CommandError> {
        let call = async {
            match &self.way {
                ClientWay::Plain(channel) => {
                    get(channel.clone(), bytes, Plain::<Ask, Tensor>::default()).await
                }
                ClientWay::Reference(channel) => {
                    get(channel.clone(), bytes, grpc::Codec::<Ask, Tensor>::default()).await
                }
            }
        };
        let called = self.runtime.block_on(async { tokio::time::timeout(LIMIT, call).await });
        let late = |_| failed(&format!("{bytes} bytes did not come within {LIMIT:?}"));
        let (start, end, content) = called.map_err(late)?.map_err(|error| failed(&error))?;
        let is_by_its_way = match &self.way {
            ClientWay::Plain(_) => true,
            ClientWay::Reference(channel) => channel.answers_by_reference(),
        };
        Ok(Call { start, end, content, is_by_its_way })
    }
}

async fn get<C, K>(channel: C, bytes: u64, codec: K) -> Result<(Nanos, Nanos, Bytes), Status>
where
    C: GrpcService<Body, ResponseBody = Body>,
    C::Error: Into<tonic::codegen::StdError>,
    K: tonic::codec::Codec<Encode = Ask, Decode = Tensor>,
{
    let mut client = Grpc::new(channel).max_decoding_message_size(MESSAGE);
    let start = clock::now();
    client.ready().await.map_err(|error| Status::unavailable(error.into().to_string()))?;
    let answer = client.unary(tonic::Request::new(Ask { bytes }), PathAndQuery::from_static(PATH), codec);
    let answer = answer.await?.into_inner();
    Ok((start, clock::now(), answer.data))
}
