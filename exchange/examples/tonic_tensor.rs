//! A service of tonic before and after: the same generated client asks the same service for a
//! tensor of 16 MiB, over a channel of tonic and over one of pleach.
//!
//! `cargo run --package pleach-exchange --features grpc --example tonic_tensor`
//!
//! What a program changes: the codec in `build.rs` (`exchange/proto/regenerate.rs` has the two
//! lines), the layer of the server, and the channel of the client. Fields that are to go by
//! reference lie in lendable memory.

#[path = "../tests/tensors/mod.rs"]
mod tensors;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use pleach_exchange::grpc::{self, Layer};
use pleach_transport::clock;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::server::NamedService as _;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use tensors::{Ask, Serve, TensorsClient, TensorsServer};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// The length of the tensor, in bytes.
const BYTES: usize = 16 << 20;

/// Calls that are measured.
const CALLS: usize = 20;

#[tokio::main]
async fn main() -> Outcome {
    if std::env::args().nth(1).as_deref() == Some("serve") {
        return serve().await;
    }
    let server = ServerProcess::start()?;
    let address = format!("http://{}", server.address);
    // Before:
    let channel = Endpoint::from_shared(address.clone())?.connect().await?;
    let before = median_time(TensorsClient::new(channel)).await?;
    // After:
    let channel = grpc::connect(address).await?;
    let service = TensorsServer::<Serve>::NAME.to_owned();
    let health = HealthClient::new(channel.clone()).check(HealthCheckRequest { service }).await?.into_inner();
    println!("the service says of itself: {:?}", health.status());
    let after = median_time(TensorsClient::new(channel)).await?;
    println!("a tensor of 16 MiB by tonic: {before:?}, by reference: {after:?}");
    Ok(())
}

async fn serve() -> Outcome {
    let endpoint = grpc::endpoint()?;
    let mut tensor = endpoint.tensor::<f32>(&[BYTES / size_of::<f32>()])?;
    tensor.fill(1.5);
    let service = TensorsServer::new(Serve(tensor.share().into_bytes()));
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse()?)?;
    println!("{}", incoming.local_addr()?);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<TensorsServer<Serve>>().await;
    // The layer is what is new here. It stands around all services.
    let server = Server::builder().layer(Layer::new(&endpoint)).add_service(service).add_service(health);
    Ok(server.serve_with_incoming(incoming).await?)
}

/// The median time of a call.
async fn median_time<C>(client: TensorsClient<C>) -> Outcome<Duration>
where
    C: GrpcService<Body, ResponseBody = Body>,
    C::Error: Into<tonic::codegen::StdError>,
{
    let mut client = client.max_decoding_message_size(2 * BYTES);
    let mut times = Vec::new();
    for _ in 0..CALLS {
        let begin = clock::now();
        let tensor = client.get(Ask { bytes: BYTES as u64, tensors: 1 }).await?.into_inner();
        times.push(clock::now().since(begin));
        let is_right = tensor.data.len() == BYTES && tensor.data.ends_with(&1.5_f32.to_ne_bytes());
        assert!(is_right, "{} bytes came", tensor.data.len());
    }
    times.sort();
    Ok(times[CALLS / 2])
}

/// A process of this program that serves, until it is dropped.
struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    fn start() -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?).arg("serve").stdout(Stdio::piped()).spawn()?;
        let mut address = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut address)?;
        }
        Ok(Self { child, address: address.trim().to_owned() })
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
