//! `cargo bench --bench exchange`: a receive of a tensor in each way, beside what its bytes cost
//! without an exchange.
//!
//! * *in place* and *copied* over shared memory, beside a copy of the same bytes (`memcpy`);
//! * *copied* and *inline* over sockets of loopback, beside a stream of the same bytes that is
//!   asked for by one byte (`stream`), between two processes as well;
//! * a unary call of tonic whose answer has the bytes, and a step of TensorFlow in which they
//!   cross, each over gRPC of its own (TensorFlow as `benches/install-peers` got it, or of
//!   `--tensorflow PYTHON`; else that column is empty).
//!
//! Each size is measured in turn with everything else, several times; the medians count. The
//! command `pleach exchange bench` measures the ways and checks every tensor. This reports, and
//! fails only where something does not run or a tensor is wrong. `--write-docs` writes the table
//! into `docs/exchange.md`.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use pleach::transport::clock;

#[path = "../report/mod.rs"]
mod report;
mod tensorflow;

use report::median;
use tensorflow::TensorFlow;

/// How long a size is measured each time.
const TIME_OF_A_SIZE: Duration = Duration::from_millis(300);

/// Rounds before the measurement, and at least.
const ROUNDS: (usize, usize) = (5, 20);

/// Where the table stands in the page.
const MARKS: [&str; 2] = ["<!-- measured: begin -->", "<!-- measured: end -->"];

/// The Python with TensorFlow that `benches/install-peers` makes.
const INSTALLED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/tensorflow/bin/python");

/// Measure receives of tensors.
#[derive(Debug, Parser)]
#[command(name = "exchange", after_help = "Example:\n  cargo bench --bench exchange -- --sizes 1M,64M")]
struct Arguments {
    /// The sizes, with commas between
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', default_value = "256,64K,1M,16M,64M,256M")]
    sizes: Vec<String>,
    /// How often each is measured; the median counts
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    times: u32,
    /// A Python that has TensorFlow, to measure its steps too [default: that of
    /// benches/install-peers, if it is there]
    #[arg(long, value_name = "PYTHON")]
    tensorflow: Option<String>,
    /// Write the table into docs/exchange.md
    #[arg(long)]
    write_docs: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
    /// The process that sends a stream of so many bytes
    #[arg(long, hide = true)]
    stream_of: Option<usize>,
}

/// What is measured, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Measured {
    Way { way: &'static str, fabric: &'static str },
    Memcpy,
    Stream,
    TensorFlow,
}

const ALL: [Measured; 8] = [
    Measured::Way { way: "in-place", fabric: "shm" },
    Measured::Way { way: "copied", fabric: "shm" },
    Measured::Memcpy,
    Measured::Way { way: "copied", fabric: "tcp" },
    Measured::Way { way: "inline", fabric: "tcp" },
    Measured::Stream,
    Measured::Way { way: "grpc", fabric: "tcp" },
    Measured::TensorFlow,
];

/// Ways, and what they are compared with, by their places.
const RATIOS: [(&str, usize, usize); 5] = [
    ("shm copied / memcpy", 1, 2),
    ("tcp copied / stream", 3, 5),
    ("tcp inline / stream", 4, 5),
    ("in place / tonic", 0, 6),
    ("in place / TensorFlow", 0, 7),
];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = match arguments.stream_of {
        Some(bytes) => send_stream(bytes).map_err(|error| error.to_string()),
        None => measure(&arguments),
    };
    report::ended(outcome)
}

fn measure(arguments: &Arguments) -> Result<(), String> {
    let mut tensorflow = match arguments.tensorflow.as_deref() {
        Some(python) => Some(TensorFlow::start(python)?),
        None if Path::new(INSTALLED).exists() => {
            let started = TensorFlow::start(INSTALLED);
            started.inspect_err(|error| println!("no steps of TensorFlow: {error}")).ok()
        }
        None => None,
    };
    let mut page = head();
    print!("{page}");
    for size in &arguments.sizes {
        let bytes = bytes_of(size)?;
        let mut times: [Vec<f64>; ALL.len()] = Default::default();
        for _ in 0..arguments.times {
            for (measured, times) in ALL.into_iter().zip(&mut times) {
                times.push(match measured {
                    Measured::Way { way, fabric } => receive(way, fabric, size)?,
                    Measured::Memcpy => memcpy(bytes),
                    Measured::Stream => stream(bytes).map_err(|error| format!("no stream: {error}"))?,
                    Measured::TensorFlow => match &mut tensorflow {
                        Some(tensorflow) => tensorflow.step(bytes)?,
                        None => f64::NAN,
                    },
                });
            }
        }
        let line = line(size, &times.map(median));
        print!("{line}");
        page += &line;
    }
    if arguments.write_docs {
        report::write_between(MARKS, &page, concat!(env!("CARGO_MANIFEST_DIR"), "/docs/exchange.md"))?;
    }
    Ok(())
}

fn head() -> String {
    let mut text = "| bytes |".to_owned();
    for measured in ALL {
        let _ = match measured {
            Measured::Way { way: "grpc", .. } => write!(text, " tonic |"),
            Measured::Way { way, fabric } => write!(text, " {fabric} {} |", way.replace('-', " ")),
            Measured::TensorFlow => write!(text, " TensorFlow |"),
            Measured::Memcpy => write!(text, " memcpy |"),
            Measured::Stream => write!(text, " tcp stream |"),
        };
    }
    for (name, _, _) in RATIOS {
        let _ = write!(text, " {name} |");
    }
    format!("{text}\n|--:|{}\n", "--:|".repeat(ALL.len() + RATIOS.len()))
}

fn line(size: &str, times: &[f64; ALL.len()]) -> String {
    let mut text = format!("| {size} |");
    let cell = |value: f64, digits: usize| match value {
        _ if value.is_nan() => " – |".to_owned(),
        _ if value >= 100.0 => format!(" {value:.0} |"),
        _ => format!(" {value:.digits$} |"),
    };
    times.iter().for_each(|time| text += &cell(*time, 1));
    for (_, way, beside) in RATIOS {
        text += &cell(times[beside] / times[way], 2);
    }
    text + "\n"
}

fn bytes_of(size: &str) -> Result<usize, String> {
    let (digits, unit) = match size.strip_suffix(['K', 'M', 'G']) {
        Some(digits) => (digits, size.chars().next_back()),
        None => (size, None),
    };
    let factor = match unit {
        Some('K') => 1 << 10,
        Some('M') => 1 << 20,
        Some('G') => 1 << 30,
        _ => 1,
    };
    let number: Option<usize> = digits.parse().ok().and_then(|number: usize| number.checked_mul(factor));
    number.filter(|bytes| *bytes > 0).ok_or_else(|| format!("'{size}' is no size; write 256, 64K or 1M"))
}

/// The median time of a receive, in microseconds.
fn receive(way: &str, fabric: &str, size: &str) -> Result<f64, String> {
    let bench =
        ["exchange", "bench", "--way", way, "--fabric", fabric, "--min", size, "--max", size, "--json"];
    let output = Command::new(env!("CARGO_BIN_EXE_pleach")).args(bench).output();
    let output = output.map_err(|error| format!("pleach does not start: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line: Option<serde_json::Value> =
        text.lines().next().and_then(|line| serde_json::from_str(line).ok());
    let time = line.and_then(|line| line["time_us_p50"].as_f64()).filter(|_| output.status.success());
    time.ok_or_else(|| format!("{bench:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// The median of rounds, in microseconds.
fn median_time<E>(mut round: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    for _ in 0..ROUNDS.0 {
        round()?;
    }
    let (mut times, until) = (Vec::new(), clock::now() + TIME_OF_A_SIZE);
    while times.len() < ROUNDS.1 || clock::now() < until {
        let start = clock::now();
        round()?;
        times.push(clock::now().since(start).as_nanos() as f64 / 1e3);
    }
    Ok(median(times))
}

fn memcpy(bytes: usize) -> f64 {
    let (source, mut destination) = (vec![1_u8; bytes], vec![0_u8; bytes]);
    let copied = median_time(|| {
        std::hint::black_box(&mut destination).copy_from_slice(std::hint::black_box(&source));
        Ok::<(), std::convert::Infallible>(())
    });
    copied.unwrap_or_else(|never| match never {})
}

/// The process that sends a stream; it ends with its standard input's reader.
struct Sender(Child);

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn stream(bytes: usize) -> std::io::Result<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    let command = command.args(["--stream-of", &bytes.to_string()]).stdout(Stdio::piped());
    let mut sender = Sender(command.spawn()?);
    let mut address = String::new();
    let output = sender.0.stdout.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
    BufReader::new(output).read_line(&mut address)?;
    let mut socket = TcpStream::connect(address.trim())?;
    socket.set_nodelay(true)?;
    let mut received = vec![0_u8; bytes];
    let time = median_time(|| {
        socket.write_all(&[1])?;
        socket.read_exact(&mut received)
    })?;
    let is_right = received.iter().enumerate().all(|(at, byte)| *byte == at as u8);
    if is_right { Ok(time) } else { Err(std::io::Error::other("the bytes are wrong")) }
}

/// Sends the bytes for each byte that comes.
fn send_stream(bytes: usize) -> std::io::Result<()> {
    let content: Vec<u8> = (0..bytes).map(|at| at as u8).collect();
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    let (mut socket, _) = listener.accept()?;
    socket.set_nodelay(true)?;
    let mut asked = [0];
    while socket.read(&mut asked)? == 1 {
        socket.write_all(&content)?;
    }
    Ok(())
}
