//! The processes of one job, on this host or on several. None outlives the value.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use pleach::transport::{Nanos, clock};
use rustix::process::{Pid, Signal, kill_process};

use crate::links::Hosts;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the members of a job are.
#[derive(Clone)]
pub(crate) enum Program {
    /// Processes of this bench.
    Own,
    /// The same on hosts: the first processes on the first ones, one that joins on the last one.
    Apart(Rc<Hosts>),
    /// Processes of torchft, by this Python.
    Torchft(PathBuf),
    /// Processes of torch that make their group of Gloo anew, by this Python.
    Gloo(PathBuf),
}

impl Program {
    /// Torchft, where `benches/install-peers` has put it.
    pub(crate) fn torchft() -> Option<Self> {
        python_of_torchft().map(Self::Torchft)
    }

    /// Gloo of the torch that is installed with torchft.
    pub(crate) fn gloo() -> Option<Self> {
        python_of_torchft().map(Self::Gloo)
    }

    /// Whether its members meet at a process that is none of them.
    fn has_lighthouse(&self) -> bool {
        matches!(self, Self::Torchft(_) | Self::Gloo(_))
    }

    /// A member that is told this; `number` counts those of the job, of which `size` are there
    /// first.
    fn command(&self, settings: &str, number: u32, size: u32) -> Result<Command, String> {
        let own = || std::env::current_exe().map_err(|error| format!("this program: {error}"));
        match self {
            Self::Own => {
                let mut command = Command::new(own()?);
                command.args(["--member", settings]);
                Ok(command)
            }
            Self::Apart(hosts) => {
                let host = if number < size { number as usize } else { hosts.count() - 1 };
                let mut command = hosts.command(host);
                command.arg(own()?).args(["--member", settings]).stderr(Stdio::inherit());
                // What is measured there is the wire, not the cipher of busy processors.
                command.env("PLEACH_SECRET_FILE", hosts.secret()).env("PLEACH_TLS", "off");
                Ok(command)
            }
            Self::Torchft(python) => Ok(by_python(python, "torchft_member.py", settings)),
            Self::Gloo(python) => Ok(by_python(python, "gloo_member.py", settings)),
        }
    }
}

fn python_of_torchft() -> Option<PathBuf> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/torchft/bin/python");
    python.exists().then_some(python)
}

fn by_python(python: &Path, program: &str, settings: &str) -> Command {
    let mut command = Command::new(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peers").join(program));
    // It says much of each step.
    command.args(settings.split(' ')).env("LOGLEVEL", "ERROR").env("RUST_LOG", "error");
    command.stderr(Stdio::null());
    command
}

/// See the module.
pub(crate) struct Job {
    program: Program,
    /// What members of other programs meet at.
    lighthouse: Option<Child>,
    folder: PathBuf,
    size: u32,
    members: Vec<Child>,
    sender: Sender<(u32, Option<String>)>,
    /// `None`: the member says no more.
    lines: Receiver<(u32, Option<String>)>,
    /// What each has said and nobody has asked for.
    said: Vec<Vec<String>>,
    /// Which say no more.
    ended: Vec<bool>,
}

impl Job {
    /// Starts so many ranks, which meet.
    pub(crate) fn start(size: u32, settings: &str) -> Result<Self, String> {
        Self::start_by(Program::Own, size, settings)
    }

    /// The same of another program.
    pub(crate) fn start_by(program: Program, size: u32, settings: &str) -> Result<Self, String> {
        // Relaxed: only uniqueness matters.
        static JOBS: AtomicU32 = AtomicU32::new(0);
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let folder =
            std::env::temp_dir().join(format!("pleach-bench-elastic-{}-{number}", std::process::id()));
        std::fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let (sender, lines) = channel();
        let mut job = Self {
            program,
            lighthouse: None,
            folder,
            size,
            members: Vec::new(),
            sender,
            lines,
            said: Vec::new(),
            ended: Vec::new(),
        };
        if job.program.has_lighthouse() {
            let told = settings.split_once(' ').map_or("", |(_, told)| told);
            job.lighthouse = Some(job.child(format!("lighthouse {told}").trim_end(), 0)?);
        }
        for _ in 0..size {
            job.spawn(settings)?;
        }
        Ok(job)
    }

    /// Starts one more, which joins where all others were started. Returns its number.
    pub(crate) fn spawn(&mut self, settings: &str) -> Result<u32, String> {
        let seat = self.members.len() as u32;
        let mut child = self.child(settings, seat)?;
        let output = BufReader::new(child.stdout.take().expect("is piped"));
        let sender = self.sender.clone();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let _ = sender.send((seat, Some(line)));
            }
            let _ = sender.send((seat, None));
        });
        self.members.push(child);
        self.said.push(Vec::new());
        self.ended.push(false);
        Ok(seat)
    }

    fn child(&self, settings: &str, number: u32) -> Result<Child, String> {
        // One that joins is given a seat that is free, whatever its rank is.
        let rank = number.min(self.size - 1);
        let child = self
            .program
            .command(settings, number, self.size)?
            .env("PLEACH_RANK", rank.to_string())
            .env("PLEACH_WORLD_SIZE", self.size.to_string())
            .env("PLEACH_LOCAL_RANK", rank.to_string())
            .env("PLEACH_RENDEZVOUS", format!("file://{}", self.folder.display()))
            // Its end tells the member that this process is gone.
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        child.map_err(|error| format!("a rank is not started: {error}"))
    }

    pub(crate) fn kill(&mut self, seat: u32) {
        let _ = self.members[seat as usize].kill();
    }

    pub(crate) fn stop(&mut self, seat: u32) {
        let _ = kill_process(Pid::from_child(&self.members[seat as usize]), Signal::STOP);
    }

    /// The words after the first one of the next line of a member that begins with it.
    fn await_line(&mut self, seat: u32, first: &str) -> Result<Vec<u64>, String> {
        let until = clock::now() + PATIENCE;
        loop {
            let said = &mut self.said[seat as usize];
            let is_it = |line: &String| line.split(' ').next() == Some(first);
            if let Some(at) = said.iter().position(is_it) {
                let line = said.remove(at);
                let words = line.split(' ').skip(1);
                return words.map(|word| word.parse().map_err(|error| format!("{line}: {error}"))).collect();
            }
            if self.ended[seat as usize] {
                return Err(format!("rank {seat} has ended and had not said '{first}'; see its output"));
            }
            match self.lines.recv_timeout(until.since(clock::now())) {
                Ok((seat, Some(line))) => self.said[seat as usize].push(line),
                Ok((seat, None)) => self.ended[seat as usize] = true,
                Err(_) => {
                    return Err(format!(
                        "rank {seat} did not say '{first}' within {PATIENCE:?}; see its output"
                    ));
                }
            }
        }
    }

    /// Waits until all have said this.
    pub(crate) fn await_all(&mut self, first: &str) -> Result<(), String> {
        (0..self.members.len() as u32).try_for_each(|seat| self.await_line(seat, first).map(drop))
    }

    /// The first result of a member among so many: when, and how long after the one before.
    pub(crate) fn await_change(&mut self, seat: u32, ranks: u32) -> Result<(Nanos, Duration), String> {
        loop {
            if let [of, at, gap] = self.await_line(seat, "change")?[..]
                && of == u64::from(ranks)
            {
                return Ok((Nanos(at), Duration::from_nanos(gap)));
            }
        }
    }

    pub(crate) fn await_time(&mut self, seat: u32, first: &str) -> Result<Nanos, String> {
        let words = self.await_line(seat, first)?;
        words.first().map(|time| Nanos(*time)).ok_or_else(|| format!("'{first}' has no time"))
    }

    pub(crate) fn await_duration(&mut self, seat: u32, first: &str) -> Result<Duration, String> {
        self.await_time(seat, first).map(|time| Duration::from_nanos(time.0))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let mut children: Vec<&mut Child> = self.members.iter_mut().chain(&mut self.lighthouse).collect();
        for child in &mut children {
            let _ = child.kill();
        }
        for child in &mut children {
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
