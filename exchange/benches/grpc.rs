//! `cargo bench --package pleach-exchange --features grpc --bench grpc`: a call of tonic that
//! returns a `bytes` field, by reference and as tonic does it.
//!
//! The client and the server are two processes. Each size is measured over sockets of TCP and of
//! Unix with everything else in turn, several times; the medians count. HTTP/2 has its largest
//! windows and frames, so that tonic waits for no credit. This reports, and fails only where
//! something does not run or a tensor is wrong. `--write-docs` writes the table into
//! `docs/exchange.md`.

#[path = "../../benches/report/mod.rs"]
mod report;
#[path = "../tests/tensors/mod.rs"]
mod tensors;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::pin::Pin;
use std::process::{Child, Command, ExitCode, Stdio};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use pleach_exchange::grpc::{self, Channel, Layer};
use pleach_transport::clock;
use tokio::net::{UnixListener, UnixStream};
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::codegen::tokio_stream::Stream;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};

use report::median;
use tensors::{Ask, Serve, TensorsClient, TensorsServer};

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// The sizes of the field, in bytes.
const SIZES: [usize; 7] = [256, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20];

/// How often each size is measured.
const TIMES: usize = 5;

/// How long a size is measured each time, and how often at least.
const TIME_OF_A_SIZE: Duration = Duration::from_millis(300);
const CALLS_MIN: usize = 5;

/// Calls before the measurement.
const CALLS_BEFORE: usize = 3;

/// The largest windows, frames and messages.
const WINDOW: u32 = (1 << 31) - 1;
const FRAME: u32 = (1 << 24) - 1;
const MESSAGE: usize = 1 << 30;

/// Where the table stands in the page.
const MARKS: [&str; 2] = ["<!-- measured grpc: begin -->", "<!-- measured grpc: end -->"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => measure(false),
        ["--write-docs"] => measure(true),
        ["serve", path] => serve(path),
        _ => Err("usage: grpc [--write-docs]".into()),
    };
    report::ended(outcome)
}

/// Serves the same bytes by four servers: by tonic over TCP and over a Unix socket, and by pleach
/// over both.
fn serve(path: &str) -> Outcome {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let longest = SIZES[SIZES.len() - 1];
        let endpoint = grpc::endpoint()?;
        let mut tensor = endpoint.tensor::<u8>(&[longest])?;
        tensor.fill(7);
        let (own, lendable) = (Bytes::from(vec![7; longest]), tensor.share().into_bytes());
        let builder = || {
            let server = Server::builder().initial_stream_window_size(WINDOW).tcp_nodelay(true);
            server.initial_connection_window_size(WINDOW).max_frame_size(FRAME)
        };
        let service = |data| TensorsServer::new(Serve(data)).max_encoding_message_size(MESSAGE);
        let tcp = || {
            let incoming = TcpIncoming::bind("127.0.0.1:0".parse().expect("an address"));
            incoming.map(|incoming| incoming.with_nodelay(Some(true)))
        };
        let (plain, layered) = (tcp()?, tcp()?);
        let unix = ["plain", "layered"].map(|name| UnixListener::bind(format!("{path}/{name}")));
        let [unix_plain, unix_layered] = unix;
        let (unix_plain, unix_layered) = (UnixIncoming(unix_plain?), UnixIncoming(unix_layered?));
        println!("{} {}", plain.local_addr()?, layered.local_addr()?);
        let layer = Layer::new(&endpoint);
        let served = tokio::try_join!(
            builder().add_service(service(own.clone())).serve_with_incoming(plain),
            builder().add_service(service(own)).serve_with_incoming(unix_plain),
            builder()
                .layer(layer.clone())
                .add_service(service(lendable.clone()))
                .serve_with_incoming(layered),
            builder().layer(layer).add_service(service(lendable)).serve_with_incoming(unix_layered),
        );
        Ok(served.map(drop)?)
    })
}

/// The connections of a Unix socket.
struct UnixIncoming(UnixListener);

impl Stream for UnixIncoming {
    type Item = std::io::Result<UnixStream>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_accept(context).map(|accepted| Some(accepted.map(|(stream, _)| stream)))
    }
}

/// A process that serves, until it is dropped.
struct ServerProcess {
    child: Child,
    folder: PathBuf,
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn measure(is_written: bool) -> Outcome {
    let folder = std::env::temp_dir().join(format!("pleach-grpc-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let mut command = Command::new(std::env::current_exe()?);
    let child = command.arg("serve").arg(&folder).stdout(Stdio::piped()).spawn()?;
    let mut server = ServerProcess { child, folder };
    let mut addresses = String::new();
    let output = server.child.stdout.take().ok_or("the server has no output")?;
    BufReader::new(output).read_line(&mut addresses)?;
    let (plain, layered) = addresses.trim().split_once(' ').ok_or("the server does not start")?;
    let unix = |name: &str| format!("unix://{}", server.folder.join(name).display());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let page = runtime.block_on(async {
        let tcp = TensorsClient::new(connect(format!("http://{plain}")).await?);
        let socket = TensorsClient::new(connect(unix("plain")).await?);
        let by_tcp = TensorsClient::new(over(connect(format!("http://{layered}")).await?).await?);
        let by_socket = TensorsClient::new(over(connect(unix("layered")).await?).await?);
        let mut page =
            "| bytes | tonic, TCP | tonic, Unix socket | by reference, TCP | by reference, Unix socket \
                        | TCP: ratio | Unix socket: ratio |\n|--:|--:|--:|--:|--:|--:|--:|\n"
                .to_owned();
        print!("{page}");
        for bytes in SIZES {
            let mut times: [Vec<f64>; 4] = Default::default();
            for _ in 0..TIMES {
                times[0].push(median_time(tcp.clone(), bytes).await?);
                times[1].push(median_time(socket.clone(), bytes).await?);
                times[2].push(median_time(by_tcp.clone(), bytes).await?);
                times[3].push(median_time(by_socket.clone(), bytes).await?);
            }
            let [tcp, socket, by_tcp, by_socket] = times.map(median);
            let mut line = format!("| {} |", name_of(bytes));
            for time in [tcp, socket, by_tcp, by_socket] {
                let _ =
                    if time < 100.0 { write!(line, " {time:.1} |") } else { write!(line, " {time:.0} |") };
            }
            let _ = writeln!(line, " {:.1} | {:.1} |", tcp / by_tcp, socket / by_socket);
            print!("{line}");
            page += &line;
        }
        Ok::<_, Box<dyn std::error::Error>>(page)
    })?;
    if is_written {
        report::write_between(MARKS, &page, concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/exchange.md"))?;
    }
    Ok(())
}

async fn connect(address: String) -> Outcome<tonic::transport::Channel> {
    let server = Endpoint::from_shared(address)?.initial_stream_window_size(WINDOW).tcp_nodelay(true);
    Ok(server.initial_connection_window_size(WINDOW).connect().await?)
}

async fn over(channel: tonic::transport::Channel) -> Outcome<Channel> {
    let channel = Channel::over(&grpc::endpoint()?, channel, None).await?;
    if channel.answers_by_reference() {
        Ok(channel)
    } else {
        Err("fields of answers do not go by reference".into())
    }
}

/// The median time of a call, in microseconds.
async fn median_time<C>(client: TensorsClient<C>, bytes: usize) -> Outcome<f64>
where
    C: GrpcService<Body, ResponseBody = Body>,
    C::Error: Into<tonic::codegen::StdError>,
{
    let mut client = client.max_decoding_message_size(MESSAGE);
    let (mut times, mut calls, until) = (Vec::new(), 0, clock::now() + TIME_OF_A_SIZE);
    while times.len() < CALLS_MIN || clock::now() < until {
        let begin = clock::now();
        let tensor = client.get(Ask { bytes: bytes as u64, tensors: 1 }).await?.into_inner();
        let time = clock::now().since(begin);
        if tensor.data.len() != bytes || tensor.data.last() != Some(&7) {
            return Err(format!("{bytes} bytes are wrong").into());
        }
        calls += 1;
        if calls > CALLS_BEFORE {
            times.push(time.as_nanos() as f64 / 1e3);
        }
    }
    Ok(median(times))
}

fn name_of(bytes: usize) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 => format!("{}M", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{}K", bytes >> 10),
        bytes => bytes.to_string(),
    }
}
