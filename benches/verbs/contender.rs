//! Who is measured, and how each is started.

use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use crate::end::{VARIABLE, WINDOW};

/// How long one measurement may take, in seconds.
const LIMIT_S: u32 = 120;
/// The same of one of Gloo's algorithms, some of which do not end on devices made of software.
const GLOO_LIMIT_S: u32 = 40;

/// Ports of meetings are counted up from here, as one may be kept for a while. Relaxed: only differ
/// they must.
static PORT: AtomicU32 = AtomicU32::new(28_500);

/// One thing that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Task {
    Write { bytes: u64, count: u64 },
    Read { bytes: u64, count: u64 },
    PingPong { bytes: u64, turns: u64 },
    WindowRead { bytes: u64, reads: u64 },
    AllReduce { bytes: u64 },
}

impl Task {
    pub(crate) fn unit(&self) -> &'static str {
        if self.is_bandwidth() { "MiB/s" } else { "us" }
    }

    /// Whether more is better.
    pub(crate) fn is_bandwidth(&self) -> bool {
        matches!(self, Self::Write { .. } | Self::Read { .. })
    }
}

impl fmt::Display for Task {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { bytes, .. } => write!(formatter, "writes of {} KiB", bytes >> 10),
            Self::Read { bytes, .. } => write!(formatter, "reads of {} KiB", bytes >> 10),
            Self::PingPong { bytes, .. } => write!(formatter, "signals of {bytes} B, there and back, half"),
            Self::WindowRead { bytes, .. } => write!(formatter, "reads of {bytes} B of a window"),
            Self::AllReduce { bytes } => write!(formatter, "all-reduce of two ranks, {bytes} B"),
        }
    }
}

/// The program that measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Contender {
    Pleach,
    Perftest,
    ByHand,
    ThreeReads,
    Gloo,
    OpenMpi,
}

impl fmt::Display for Contender {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Pleach => "pleach",
            Self::Perftest => "perftest",
            Self::ByHand => "by hand",
            Self::ThreeReads => "three plain reads",
            Self::Gloo => "Gloo over ibverbs",
            Self::OpenMpi => "Open MPI over UCX",
        })
    }
}

/// What one measurement found.
#[derive(Clone, Debug)]
pub(crate) struct Measured {
    pub(crate) value: f64,
    /// Of pleach: requests, doorbells, completions and looks that found some, for each MiB or
    /// signal.
    pub(crate) asked: Option<[f64; 4]>,
}

impl From<f64> for Measured {
    fn from(value: f64) -> Self {
        Self { value, asked: None }
    }
}

/// Programs of others, where they could be compiled.
pub(crate) struct Programs {
    by_hand: Result<PathBuf, String>,
    gloo: Result<PathBuf, String>,
    mpi: Result<PathBuf, String>,
}

impl Programs {
    /// Compiles what is not there yet.
    pub(crate) fn build(folder: &Path) -> Result<Self, String> {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self {
            by_hand: compile("cc", "verbs.c", &folder.join("by-hand"), &["-libverbs"]),
            gloo: compile("c++", "gloo_verbs.cc", &folder.join("gloo"), &["-lgloo", "-libverbs"]),
            mpi: compile("mpicc.openmpi", "mpi.c", &folder.join("mpi"), &["-lm"]),
        })
    }
}

fn compile(compiler: &str, source: &str, program: &Path, libraries: &[&str]) -> Result<PathBuf, String> {
    if program.exists() {
        return Ok(program.to_owned());
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(source);
    let mut command = Command::new(compiler);
    command.args(["-O3", "-Wall", "-Wextra", "-o"]).arg(program).arg(&source).args(libraries);
    let output = command.output().map_err(|error| format!("no {compiler} ({error})"))?;
    if output.status.success() {
        return Ok(program.to_owned());
    }
    Err(format!("{compiler}: {}", last_line(&output.stderr)))
}

fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.lines().rfind(|line| line.contains(char::is_alphanumeric)).unwrap_or("without a word").to_owned()
}

/// Two processes of a program, of which the second joins the first; what the second prints.
fn pair(server: Command, client: Command) -> Result<Output, String> {
    let start = |mut command: Command| {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let failed = |error: std::io::Error| format!("not started: {error}");
    let mut server = start(server).map_err(failed)?;
    let client = start(client).and_then(Child::wait_with_output).map_err(failed);
    if client.is_err() {
        let _ = server.kill();
    }
    let _ = server.wait_with_output();
    let client = client?;
    if client.status.success() { Ok(client) } else { Err(last_line(&client.stderr)) }
}

fn limited(program: impl AsRef<std::ffi::OsStr>) -> Command {
    limited_to(LIMIT_S, program)
}

fn limited_to(limit_s: u32, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", &limit_s.to_string()]).arg(program);
    command
}

impl Contender {
    /// Those that measure this.
    pub(crate) fn of(task: &Task) -> &'static [Self] {
        match task {
            Task::Write { .. } | Task::Read { .. } => &[Self::Pleach, Self::Perftest],
            Task::PingPong { .. } => &[Self::Pleach, Self::ByHand, Self::Perftest],
            Task::WindowRead { .. } => &[Self::Pleach, Self::ThreeReads],
            Task::AllReduce { .. } => &[Self::Pleach, Self::Gloo, Self::OpenMpi],
        }
    }

    /// Measures once; or why not.
    pub(crate) fn measure(
        self,
        programs: &Programs,
        task: &Task,
        devices: &[String; 2],
        gid_index: u32,
    ) -> Result<Measured, String> {
        match (self, task) {
            (Self::Pleach, Task::AllReduce { bytes }) => Ok(all_reduce_of_pleach(*bytes, devices)?.into()),
            (Self::Pleach, Task::WindowRead { bytes, reads }) => {
                Ok(window_reads(*bytes, *reads, devices)?.into())
            }
            (Self::Pleach, _) => ends(task, devices),
            (Self::ThreeReads, _) => Ok(ends(task, devices)?.value.into()),
            (Self::Perftest, _) => Ok(perftest(task, devices, gid_index)?.into()),
            (Self::ByHand, Task::PingPong { bytes, turns }) => {
                let program = programs.by_hand.as_ref().map_err(Clone::clone)?;
                Ok(by_hand(program, *bytes, *turns, devices, gid_index)?.into())
            }
            (Self::Gloo, Task::AllReduce { bytes }) => {
                let program = programs.gloo.as_ref().map_err(Clone::clone)?;
                Ok(gloo(program, *bytes, devices, gid_index)?.into())
            }
            (Self::OpenMpi, Task::AllReduce { bytes }) => {
                let program = programs.mpi.as_ref().map_err(Clone::clone)?;
                Ok(open_mpi(program, *bytes, &devices[0])?.into())
            }
            _ => Err("does not measure that".to_owned()),
        }
    }
}

/// Two ends of pleach, that tell each other where they are by way of this process.
fn ends(task: &Task, devices: &[String; 2]) -> Result<Measured, String> {
    let (what, bytes, count) = match *task {
        Task::Write { bytes, count } => ("write", bytes, count),
        Task::Read { bytes, count } => ("read", bytes, count),
        Task::PingPong { bytes, turns } => ("ping-pong", bytes, turns),
        Task::WindowRead { bytes, reads } => ("three-reads", bytes, reads),
        Task::AllReduce { .. } => return Err("is measured by ranks".to_owned()),
    };
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut ends = Vec::new();
    for (rank, device) in devices.iter().enumerate() {
        let mut command = limited(&own);
        command.env(VARIABLE, format!("{rank} {device} {what} {bytes} {count}"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut end = command.spawn().map_err(|error| format!("not started: {error}"))?;
        let output = BufReader::new(end.stdout.take().ok_or("no output")?);
        ends.push((end, output));
    }
    let told: Vec<String> = ends.iter_mut().map(|(_, output)| line(output)).collect();
    for ((end, _), told) in ends.iter_mut().zip(told.iter().rev()) {
        let input = end.stdin.as_mut().ok_or("no input")?;
        // One that has ended says why.
        let _ = writeln!(input, "{told}").and_then(|()| input.flush());
    }
    let result = line(&mut ends[0].1);
    let mut failure = None;
    for (end, _) in ends {
        let output = end.wait_with_output().map_err(|error| error.to_string())?;
        if !output.status.success() {
            failure.get_or_insert(last_line(&output.stderr));
        }
    }
    match failure {
        None => {
            let numbers = result.split_whitespace().map(str::parse::<f64>).collect::<Result<Vec<_>, _>>();
            match numbers.as_deref() {
                Ok([value, asked @ ..]) => Ok(Measured { value: *value, asked: asked.try_into().ok() }),
                _ => Err(format!("no numbers: {result}")),
            }
        }
        Some(failure) => Err(failure),
    }
}

fn line(output: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    let _ = output.read_line(&mut line);
    line.trim().to_owned()
}

fn perftest(task: &Task, devices: &[String; 2], gid_index: u32) -> Result<f64, String> {
    // Which column of its last line counts: the average bandwidth, in MiB/s, or the typical time.
    let (program, bytes, count, column) = match *task {
        Task::Write { bytes, count } => ("ib_write_bw", bytes, count, 3),
        Task::Read { bytes, count } => ("ib_read_bw", bytes, count, 3),
        Task::PingPong { bytes, turns } => ("ib_write_lat", bytes, turns, 4),
        Task::WindowRead { .. } => return Err("has no windows".to_owned()),
        Task::AllReduce { .. } => return Err("has no collectives".to_owned()),
    };
    let port = PORT.fetch_add(1, Ordering::Relaxed).to_string();
    let command = |device: &str| {
        let mut command = limited(program);
        command.args(["-d", device, "-x", &gid_index.to_string(), "-p", &port, "-F"]);
        command.args(["-s", &bytes.to_string(), "-n", &count.max(5).to_string()]);
        command
    };
    let server = command(&devices[1]);
    // It gives up at once where nobody listens yet.
    let mut client = Command::new("bash");
    let script = "for try in {1..100}; do ss -ltn | grep -q \":$0 \" && break; sleep 0.1; done; exec \"$@\"";
    let started = command(&devices[0]);
    client.args(["-c", script, &port]).arg(started.get_program()).args(started.get_args()).arg("127.0.0.1");
    let output = pair(server, client)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let row = text.lines().rfind(|line| line.split_whitespace().next() == Some(&bytes.to_string()));
    let value = row.and_then(|row| row.split_whitespace().nth(column)?.parse().ok());
    value.ok_or_else(|| format!("{program} printed no row: {}", last_line(&output.stdout)))
}

fn by_hand(
    program: &Path,
    bytes: u64,
    turns: u64,
    devices: &[String; 2],
    gid_index: u32,
) -> Result<f64, String> {
    let port = PORT.fetch_add(1, Ordering::Relaxed).to_string();
    let command = |device: &str| {
        let mut command = limited(program);
        command.args([device, &gid_index.to_string(), &port, &bytes.to_string(), &turns.to_string()]);
        command
    };
    let mut client = command(&devices[0]);
    client.arg("127.0.0.1");
    let output = pair(command(&devices[1]), client)?;
    let value: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    value["median_us"].as_f64().ok_or_else(|| "no median".to_owned())
}

/// The median of one size.
fn median(output: &Output) -> Result<f64, String> {
    if !output.status.success() {
        return Err(last_line(&output.stderr));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let row = text.lines().find_map(|line| serde_json::from_str::<Value>(line).ok()).ok_or("no row")?;
    if row["errors"].as_u64() != Some(0) {
        return Err("wrong results".to_owned());
    }
    row["time_us_p50"].as_f64().ok_or_else(|| "no median".to_owned())
}

/// A new folder in which ranks meet.
fn meeting() -> Result<PathBuf, String> {
    let number = PORT.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("pleach-bench-verbs-{}-{number}", std::process::id()));
    fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    Ok(folder)
}

/// Two ranks of a group, and what rank 0 prints. `command` makes the command of a rank.
fn ranks(devices: &[String; 2], command: impl Fn(usize) -> Command) -> Result<Output, String> {
    let folder = meeting()?;
    let start = |rank: usize| {
        let mut command = command(rank);
        command
            .env("PLEACH_RANK", rank.to_string())
            .env("PLEACH_WORLD_SIZE", "2")
            .env("PLEACH_RENDEZVOUS", format!("file://{}", folder.display()))
            .env("PLEACH_HOST", format!("host-{rank}"))
            .env("PLEACH_VERBS_DEVICE", &devices[rank]);
        command
    };
    let output = pair(start(1), start(0));
    let _ = fs::remove_dir_all(&folder);
    output
}

fn all_reduce_of_pleach(bytes: u64, devices: &[String; 2]) -> Result<f64, String> {
    median(&ranks(devices, |_| {
        let mut command = limited(env!("CARGO_BIN_EXE_pleach"));
        command.args(["bench", "all-reduce", "--fabric", "verbs", "--reuse", "--json", "--time", "1000"]);
        command.args(["--sizes", &bytes.to_string()]);
        command
    })?)
}

fn window_reads(bytes: u64, reads: u64, devices: &[String; 2]) -> Result<f64, String> {
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = ranks(devices, |rank| {
        let mut command = limited(&own);
        command.env(VARIABLE, format!("{rank} {} {WINDOW} {bytes} {reads}", devices[rank]));
        command
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().map_err(|_| format!("no number: {text}"))
}

/// The quickest of its algorithms.
fn gloo(program: &Path, bytes: u64, devices: &[String; 2], gid_index: u32) -> Result<f64, String> {
    let mut best = Err("no algorithm".to_owned());
    for algorithm in ["ring", "ring-chunked", "halving-doubling"] {
        let folder = meeting()?;
        let mut command = limited_to(GLOO_LIMIT_S, program);
        command.arg(&folder).args([&devices.join(","), &gid_index.to_string(), algorithm]);
        command.args(["all-reduce", "1000", "same", "free", &bytes.to_string()]);
        let output = command.stdin(Stdio::null()).output().map_err(|error| format!("not started: {error}"));
        let _ = fs::remove_dir_all(&folder);
        let found = output.and_then(|output| median(&output));
        best = match (best, found) {
            (Ok(before), Ok(found)) => Ok(f64::min(before, found)),
            (Ok(before), Err(_)) => Ok(before),
            (Err(_), found) => found,
        };
    }
    best
}

fn open_mpi(program: &Path, bytes: u64, device: &str) -> Result<f64, String> {
    let mut command = limited("mpirun.openmpi");
    command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]);
    // Its way to connections begins with datagrams, which the name `rc` brings along.
    command.args(["--mca", "pml", "ucx", "--mca", "osc", "ucx", "-x", "UCX_TLS=rc,self"]);
    command.args(["-x", &format!("UCX_NET_DEVICES={device}:1")]).arg(program);
    command.args(["all-reduce", "1000", "same", "free", &bytes.to_string()]);
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("not started: {error}"))?;
    median(&output)
}
