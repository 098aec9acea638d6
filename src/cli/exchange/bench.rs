//! `pleach exchange bench`: how long a receive takes, between two processes of this host. Over RDMA
//! a put and a get of the transport are measured beside it ([`Puts`]).

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use pleach::DataType;
use pleach::exchange::{
    Endpoint, EndpointOptions, ExchangeFabric, Key, Peer, SharedTensor, TensorMemoryError, TensorShape,
    TensorWay,
};
use pleach::transport::{Nanos, Secret, clock};
use serde_json::json;

use super::STEP;
use super::bench_grpc;
use super::bench_put::{self, Puts};
use crate::cli::CommandError;
use crate::cli::bench::Size;
use crate::cli::output::{print, print_json, rounded};

/// How long a size is measured.
const TIME_OF_A_SIZE: Duration = Duration::from_millis(300);

/// Receives of a size: at least, and at most.
const RECEIVES: (usize, usize) = (20, 20_000);

/// Receives before the measurement.
const WARM_UP: usize = 5;

/// How long a receive may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A NIC serves those alone that know a secret, and these tensors hold a pattern.
pub(crate) const SECRET: &[u8] = b"the pattern of a measurement";

/// How a tensor comes, and where it lies then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Way {
    /// In its sender's memory
    InPlace,
    /// In the receiver's own memory, read from the sender's
    Copied,
    /// In the receiver's own memory, sent on the connection of the messages
    Inline,
    /// By gRPC, in a field that goes by reference
    GrpcReference,
    /// By gRPC whose HTTP/2 runs over the fabric
    GrpcFabric,
    /// By gRPC over a socket of loopback, whatever the fabric
    Grpc,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::InPlace => "in-place",
            Self::Copied => "copied",
            Self::Inline => "inline",
            Self::GrpcReference => "grpc-reference",
            Self::GrpcFabric => "grpc-fabric",
            Self::Grpc => "grpc",
        }
    }

    /// Whether puts are measured beside: where the end of a put says that its bytes are there.
    fn has_puts(self, fabric: ExchangeFabric) -> bool {
        self == Self::Copied && fabric == ExchangeFabric::Verbs
    }

    fn is_grpc(self) -> bool {
        matches!(self, Self::GrpcReference | Self::GrpcFabric | Self::Grpc)
    }

    /// How the endpoint says that a tensor has come.
    fn expected(self, fabric: ExchangeFabric) -> TensorWay {
        match (self, fabric) {
            (Self::InPlace, _) | (Self::Copied, ExchangeFabric::Shm) => TensorWay::InPlace,
            (Self::Copied, _) => TensorWay::Copied,
            (Self::Inline | Self::GrpcReference | Self::GrpcFabric | Self::Grpc, _) => TensorWay::Inline,
        }
    }
}

/// Arguments of `pleach exchange bench`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// How a tensor comes, and where it lies then
    #[arg(long, value_name = "WAY", default_value = "in-place")]
    way: Way,
    /// The fabric between the two processes: shm, tcp, or verbs
    #[arg(long, value_name = "FABRIC", default_value = "shm")]
    fabric: ExchangeFabric,
    /// The smallest size
    #[arg(long, value_name = "SIZE", default_value = "256")]
    min: Size,
    /// The largest size
    #[arg(long, value_name = "SIZE", default_value = "64M")]
    max: Size,
    /// The factor between two sizes
    #[arg(long, default_value = "4", value_parser = clap::value_parser!(u64).range(2..=1024))]
    factor: u64,
    /// Print a line of JSON for each size
    #[arg(long)]
    json: bool,
}

/// Arguments of the process that sends.
#[derive(Debug, clap::Args)]
pub(crate) struct SenderArguments {
    /// How tensors are received.
    way: Way,
    /// The fabric; none: tensors go inline.
    fabric: ExchangeFabric,
    /// The sizes of its tensors, in bytes.
    sizes: Vec<u64>,
}

pub(crate) fn options(fabric: ExchangeFabric, bytes: u64) -> Result<EndpointOptions, CommandError> {
    // The variables of RDMA and of the interface count here too.
    let mut options = EndpointOptions::from_env().map_err(CommandError::usage)?;
    options.metrics = None;
    options.fabric = fabric;
    if options.secret.is_none() && fabric == ExchangeFabric::Verbs {
        options.secret = Some(Secret::new(SECRET));
    }
    options.requires_regions = fabric != ExchangeFabric::None;
    options.limits.arenas.bytes = options.limits.arenas.bytes.max(bytes);
    options.limits.server.leases.bytes_lent = options.limits.server.leases.bytes_lent.max(bytes);
    Ok(options)
}

fn name(bytes: u64) -> String {
    bytes.to_string()
}

/// What a tensor holds at a byte.
pub(crate) fn byte_at(offset: u64) -> u8 {
    (offset / 7 + offset % 251) as u8
}

/// A tensor of so many bytes, in memory that can be lent.
pub(crate) fn tensor(endpoint: &Endpoint, bytes: u64) -> Result<SharedTensor, CommandError> {
    let shape = TensorShape::new(DataType::U8, &[bytes as usize]).map_err(CommandError::failed)?;
    let tensor = endpoint.tensor_of_bytes::<TensorMemoryError>(&shape, |content| {
        (0..).zip(content).for_each(|(offset, byte)| *byte = byte_at(offset));
        Ok(())
    });
    tensor.map_err(CommandError::failed)
}

/// Runs the process that sends.
pub(crate) fn run_sender(arguments: &SenderArguments) -> Result<(), CommandError> {
    if arguments.way.is_grpc() {
        return bench_grpc::serve(
            arguments.way,
            arguments.fabric,
            arguments.sizes.iter().copied().max().unwrap_or(0),
        );
    }
    let bytes = arguments.sizes.iter().map(|bytes| bytes + 64).sum();
    let endpoint = Endpoint::open(&options(arguments.fabric, bytes)?).map_err(CommandError::failed)?;
    let mut tensors = BTreeMap::new();
    for bytes in &arguments.sizes {
        tensors.insert(name(*bytes), tensor(&endpoint, *bytes)?);
    }
    endpoint.publish(STEP, tensors);
    print("address", &format!("{}\n", endpoint.address()))?;
    if arguments.way.has_puts(arguments.fabric) {
        bench_put::serve(arguments.fabric, arguments.sizes.iter().copied().max().unwrap_or(0))?;
    }
    // The measuring process holds the other end.
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    Ok(())
}

/// The process that sends. It ends with the one that measures.
pub(crate) struct Sender {
    child: Child,
    output: BufReader<ChildStdout>,
    pub(crate) address: String,
}

impl Sender {
    fn start(way: Way, fabric: ExchangeFabric, sizes: &[u64]) -> Result<Self, CommandError> {
        let failed = |error: std::io::Error| {
            CommandError::failed(format!("no measurement: the sending process did not start ({error})"))
        };
        let program = std::env::current_exe().map_err(failed)?;
        let mut child = Command::new(program)
            .args(["exchange", "bench-sender", way.name(), &fabric.to_string()])
            .args(sizes.iter().map(u64::to_string))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let output = child.stdout.take().ok_or_else(|| failed(std::io::ErrorKind::BrokenPipe.into()))?;
        let mut sender = Self { child, output: BufReader::new(output), address: String::new() };
        sender.address = sender.line()?;
        Ok(sender)
    }

    /// The next line of the process.
    fn line(&mut self) -> Result<String, CommandError> {
        let mut line = String::new();
        match self.output.read_line(&mut line) {
            Ok(count) if count > 0 => Ok(line.trim().to_owned()),
            _ => Err(CommandError::failed("no measurement: the sending process ended; see its error")),
        }
    }

    /// Gives the process the address of this one.
    pub(crate) fn tell(&mut self, address: &str) -> Result<(), CommandError> {
        let failed = |error| CommandError::failed(format!("the sending process ended ({error})"));
        let Some(input) = &mut self.child.stdin else { return Ok(()) };
        writeln!(input, "{address}").and_then(|()| input.flush()).map_err(failed)
    }

    /// Gives the process the address of this one, and returns its next line.
    pub(crate) fn exchange(&mut self, address: &str) -> Result<String, CommandError> {
        self.tell(address)?;
        self.line()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        // Its standard input ends, and so does it.
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// Runs `pleach exchange bench`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let Arguments { way, fabric, .. } = *arguments;
    let no_measurement = |why: String| Err(CommandError::typed(format!("no measurement: {why}")));
    match (way, fabric) {
        (Way::InPlace | Way::Copied, ExchangeFabric::Shm)
        | (Way::Copied, ExchangeFabric::Tcp | ExchangeFabric::Verbs)
        | (Way::Inline, ExchangeFabric::Tcp)
        | (
            Way::GrpcReference | Way::GrpcFabric | Way::Grpc,
            ExchangeFabric::Shm | ExchangeFabric::Tcp | ExchangeFabric::Verbs,
        ) => {}
        (Way::InPlace, ExchangeFabric::Tcp) => {
            return no_measurement("sockets map no memory; take --way copied or --fabric shm".to_owned());
        }
        (Way::InPlace, ExchangeFabric::Verbs) => {
            return no_measurement("RDMA maps no memory; take --way copied or --fabric shm".to_owned());
        }
        (Way::Inline, ExchangeFabric::Shm | ExchangeFabric::Verbs) => {
            return no_measurement("bytes go inline over tcp; take --fabric tcp".to_owned());
        }
        (_, ExchangeFabric::Auto | ExchangeFabric::None) => {
            return no_measurement(format!("fabric {fabric}; this command measures shm, tcp and verbs"));
        }
    }
    let sizes = sizes(arguments)?;
    let of_endpoints = if way == Way::Inline { ExchangeFabric::None } else { fabric };
    let mut sender = Sender::start(way, of_endpoints, &sizes)?;
    let receiver = match way {
        way if way.is_grpc() => Receiver::Grpc(bench_grpc::Client::connect(&mut sender, way, fabric)?),
        _ => {
            let endpoint = Endpoint::open(&options(of_endpoints, 0)?).map_err(CommandError::failed)?;
            let peer = endpoint.connect(&sender.address).map_err(CommandError::failed)?.within(LIMIT);
            Receiver::Peer { peer, _endpoint: endpoint }
        }
    };
    let mut puts = if way.has_puts(fabric) { Some(Puts::connect(&mut sender, fabric)?) } else { None };
    if !arguments.json {
        let beside = if puts.is_some() { "    put_us_p50    get_us_p50  of a put" } else { "" };
        print("table", &format!("       bytes   time_us_p50   time_us_p99       GB/s  errors{beside}\n"))?;
    }
    for bytes in sizes {
        let measured = receiver.measure(way, fabric, bytes)?;
        let beside = puts.as_mut().map(|puts| puts.measure(bytes)).transpose()?;
        let Measured { p50, p99, errors } = measured;
        let errors = errors + beside.iter().flatten().map(|measured| measured.errors).sum::<usize>();
        let gb_s = if p50 > 0.0 { bytes as f64 / p50 / 1e3 } else { 0.0 };
        if arguments.json {
            let mut line = json!({
                "way": way.name(), "fabric": fabric.to_string(), "bytes": bytes,
                "time_us_p50": rounded(p50, 3), "time_us_p99": rounded(p99, 3),
                "gb_s": rounded(gb_s, 3), "errors": errors,
            });
            if let Some([put, get]) = &beside {
                line["put_us_p50"] = rounded(put.p50, 3).into();
                line["get_us_p50"] = rounded(get.p50, 3).into();
            }
            print_json("line", &line)?;
        } else {
            let beside = beside.map_or_else(String::new, |[put, get]| {
                format!(" {:>13.2} {:>13.2} {:>9.2}", put.p50, get.p50, put.p50 / p50)
            });
            print(
                "line",
                &format!("{bytes:>12} {p50:>13.2} {p99:>13.2} {gb_s:>10.2} {errors:>7}{beside}\n"),
            )?;
        }
        if errors > 0 {
            return Err(CommandError::failed(format!("{errors} tensors of {bytes} bytes came wrong")));
        }
    }
    Ok(())
}

fn sizes(arguments: &Arguments) -> Result<Vec<u64>, CommandError> {
    let (min, max) = (arguments.min, arguments.max);
    if min > max || min.0 == 0 {
        return Err(CommandError::typed(format!(
            "bad sizes: --min {min} and --max {max}; the first is above zero and not above the second"
        )));
    }
    let next = |size: &u64| size.checked_mul(arguments.factor);
    Ok(std::iter::successors(Some(min.0), next).take_while(|size| *size <= max.0).collect())
}

/// The times of what was measured, in microseconds.
pub(crate) struct Measured {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) errors: usize,
}

/// Where tensors come from.
enum Receiver {
    Peer { peer: Peer, _endpoint: Endpoint },
    Grpc(bench_grpc::Client),
}

impl Receiver {
    fn measure(&self, way: Way, fabric: ExchangeFabric, bytes: u64) -> Result<Measured, CommandError> {
        let peer = match self {
            Self::Peer { peer, .. } => peer,
            Self::Grpc(client) => {
                return measure(|check| {
                    let call = client.receive(bytes)?;
                    let is_right = call.is_by_its_way && check.is_right(&call.content, bytes);
                    Ok((call.start, call.end, is_right))
                });
            }
        };
        let key = Key::new(STEP, &name(bytes)).map_err(CommandError::failed)?;
        let mut own = vec![0_u8; if way == Way::Copied { bytes as usize } else { 0 }];
        let expected = way.expected(fabric);
        measure(|check| {
            let start = clock::now();
            let tensor = peer.receive(&key).map_err(CommandError::failed)?;
            let is_copied = way == Way::Copied && tensor.way() == TensorWay::InPlace;
            if is_copied {
                own.copy_from_slice(tensor.as_bytes());
            }
            let end = clock::now();
            let content = if is_copied { &own } else { tensor.as_bytes() };
            let is_by_its_way = tensor.way() == expected && tensor.shape().bytes() as u64 == bytes;
            Ok((start, end, is_by_its_way && check.is_right(content, bytes)))
        })
    }
}

/// Receives until there are enough times. `receive` says when it began and ended, and whether what
/// came is right.
pub(crate) fn measure(
    mut receive: impl FnMut(Check) -> Result<(Nanos, Nanos, bool), CommandError>,
) -> Result<Measured, CommandError> {
    let (mut times, mut errors) = (Vec::new(), 0);
    let mut until = clock::now() + TIME_OF_A_SIZE;
    for number in 0.. {
        let check = if number == 0 { Check::All } else { Check::Some };
        let (start, end, is_right) = receive(check)?;
        if number >= WARM_UP {
            times.push(end.since(start).as_nanos() as u64);
        } else {
            until = end + TIME_OF_A_SIZE;
        }
        errors += usize::from(!is_right);
        let count = times.len();
        if count >= RECEIVES.1 || (count >= RECEIVES.0 && end >= until) {
            break;
        }
    }
    times.sort_unstable();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)] as f64 / 1e3;
    Ok(Measured { p50: at(50), p99: at(99), errors })
}

/// Which bytes of a tensor are looked at.
#[derive(Clone, Copy)]
pub(crate) enum Check {
    All,
    /// Those at its beginning, middle and end.
    Some,
}

impl Check {
    /// Whether a tensor is the one that was sent.
    pub(crate) fn is_right(self, content: &[u8], bytes: u64) -> bool {
        let is_byte_right = |offset: u64| content.get(offset as usize) == Some(&byte_at(offset));
        content.len() as u64 == bytes
            && match self {
                Self::All => (0..bytes).all(is_byte_right),
                Self::Some => [0, bytes / 2, bytes - 1].into_iter().all(is_byte_right),
            }
    }
}
