//! TensorFlow beside: a step of two tasks in which one tensor crosses by its own gRPC.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::report::median;

/// The program of the tasks.
const PROGRAM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/python/benches/tensorflow_step.py");

/// Two tasks, which end with this value.
pub(crate) struct TensorFlow {
    sends: Child,
    receives: Child,
    answers: BufReader<ChildStdout>,
}

impl TensorFlow {
    /// Starts the tasks by a Python that has TensorFlow.
    pub(crate) fn start(python: &str) -> Result<Self, String> {
        let ports = free_ports().map_err(|error| format!("no ports: {error}"))?;
        let mut sends = task(python, "serve", &ports)?;
        let ready = lines(&mut sends).and_then(|mut lines| line(&mut lines));
        let receives = ready.and_then(|_| task(python, "step", &ports));
        let answers = receives.and_then(|mut task| lines(&mut task).map(|lines| (task, lines)));
        match answers {
            Ok((receives, answers)) => Ok(Self { sends, receives, answers }),
            Err(error) => {
                end(&mut sends);
                Err(error)
            }
        }
    }

    /// The median time of a step in which so many bytes cross, in microseconds.
    pub(crate) fn step(&mut self, bytes: usize) -> Result<f64, String> {
        let input = self.receives.stdin.as_mut().ok_or("TensorFlow's task has no input")?;
        writeln!(input, "{bytes}").map_err(|error| format!("TensorFlow's task has ended: {error}"))?;
        let times: Vec<f64> =
            serde_json::from_str(&line(&mut self.answers)?).map_err(|error| error.to_string())?;
        Ok(median(times))
    }
}

impl Drop for TensorFlow {
    fn drop(&mut self) {
        end(&mut self.receives);
        end(&mut self.sends);
    }
}

fn task(python: &str, role: &str, ports: &[String; 2]) -> Result<Child, String> {
    let mut command = Command::new(python);
    command.args([PROGRAM, role, "grpc"]).args(ports);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.spawn().map_err(|error| format!("{python} does not start: {error}"))
}

fn lines(task: &mut Child) -> Result<BufReader<ChildStdout>, String> {
    task.stdout.take().map(BufReader::new).ok_or_else(|| "TensorFlow's task has no output".to_owned())
}

fn line(lines: &mut BufReader<ChildStdout>) -> Result<String, String> {
    let mut line = String::new();
    match lines.read_line(&mut line) {
        Ok(0) => Err(format!("TensorFlow's task has ended; does this Python have TensorFlow? ({PROGRAM})")),
        Ok(_) => Ok(line),
        Err(error) => Err(format!("TensorFlow's task is not heard: {error}")),
    }
}

fn end(task: &mut Child) {
    let _ = task.kill();
    let _ = task.wait();
}

/// Ports that were free a moment ago: a cluster of TensorFlow names them all at its start.
fn free_ports() -> std::io::Result<[String; 2]> {
    let listeners = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
    let [one, other] = listeners.each_ref().map(TcpListener::local_addr);
    Ok([one?.port().to_string(), other?.port().to_string()])
}
