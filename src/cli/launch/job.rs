//! A running job: one thread that sleeps until a rank prints, a rank ends, a signal comes or a time
//! is up.
//!
//! **Invariant:** when [`Job::run`] returns, every process of every rank's group is dead, and each
//! rank was reaped after its group was killed, so that a number is never used once it may name
//! others.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

use pleach::transport::{Nanos, clock::now};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::cause::{Failure, signal_name};
use super::guard::Guard;
use super::output::{Lines, Output};

/// How long the other ranks may still run after one has failed, before they get SIGTERM: they find
/// out by themselves, and say what they saw.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long ranks may take to end after SIGTERM (or the person's own signal) before they are
/// killed.
pub(super) const GRACE: Duration = Duration::from_secs(5);

/// How long output is read after the last rank has ended: something it started may hold the pipe.
const DRAIN: Duration = Duration::from_secs(1);

/// How long a line in the form of an error is kept back to see whether the rank ends with it.
const ERROR_HOLD: Duration = Duration::from_millis(500);

/// Bytes read from a pipe at a time.
const READ_BYTES: usize = 16 * 1024;

/// Bytes of one stream that are passed on at a time, about.
const OUTPUT_BYTES: usize = 256 * 1024;

/// Signals that are passed on.
const FORWARDED: [i32; 3] =
    [signal_hook::consts::SIGHUP, signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM];

/// How a job ended that did not end well.
#[derive(Debug)]
pub(super) enum Ended {
    /// A rank failed first.
    Failed(Failure),
    /// The person ended it.
    Signal(String),
    /// Nobody reads what it prints.
    OutputClosed(io::Error),
    /// A process could not be started, or the system refused something else.
    System(&'static str, io::Error),
}

enum Pipe {
    Out(ChildStdout),
    Error(ChildStderr),
}

impl Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Out(pipe) => pipe.read(buffer),
            Self::Error(pipe) => pipe.read(buffer),
        }
    }
}

impl AsFd for Pipe {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Out(pipe) => pipe.as_fd(),
            Self::Error(pipe) => pipe.as_fd(),
        }
    }
}

struct Stream {
    /// `None` at its end.
    pipe: Option<Pipe>,
    is_error: bool,
    lines: Lines,
    /// Until when an error is kept back.
    held_until: Option<Nanos>,
}

struct RankProcess {
    rank: u32,
    child: Child,
    group: Pid,
    /// Readable when the process has ended; `None` once it is reaped.
    alive: Option<OwnedFd>,
    streams: Vec<Stream>,
}

/// Ranks that run.
pub(super) struct Job {
    ranks: Vec<RankProcess>,
    guard: Guard,
    signals: Vec<(i32, UnixStream)>,
    ended: Option<Ended>,
    any_failed: bool,
    /// When the ranks that still run get SIGTERM.
    end_at: Option<Nanos>,
    /// When they are killed.
    kill_at: Option<Nanos>,
    /// Whether what others say about a failure is shown too.
    echoes: bool,
}

impl Job {
    /// With nothing running yet; from now on signals are passed on. `secret`: the folder of the
    /// job's secret, if it has one.
    pub(super) fn new(echoes: bool, secret: Option<&Path>) -> Result<Self, Ended> {
        let mut signals = Vec::new();
        for signal in FORWARDED {
            let system = |error| Ended::System("signals not handled", error);
            let (ours, hook) = UnixStream::pair().map_err(system)?;
            ours.set_nonblocking(true).map_err(system)?;
            signal_hook::low_level::pipe::register(signal, hook).map_err(system)?;
            signals.push((signal, ours));
        }
        let guard = Guard::start(secret).map_err(|error| Ended::System("guard not started", error))?;
        Ok(Self {
            ranks: Vec::new(),
            guard,
            signals,
            ended: None,
            any_failed: false,
            end_at: None,
            kill_at: None,
            echoes,
        })
    }

    /// Starts a rank.
    pub(super) fn start(&mut self, rank: u32, mut command: Command, output: Output) {
        if self.ended.is_some() {
            return;
        }
        command.stdin(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        command.stdout(match output {
            Output::Prefixed => Stdio::piped(),
            Output::Plain => Stdio::inherit(),
        });
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return self.end(Ended::System("rank not started", error)),
        };
        let group = Pid::from_child(&child);
        self.guard.add(group);
        let mut streams = Vec::new();
        let pipes = [child.stdout.take().map(Pipe::Out), child.stderr.take().map(Pipe::Error)];
        let prepare = || {
            for pipe in pipes.into_iter().flatten() {
                rustix::io::ioctl_fionbio(&pipe, true)?;
                let is_error = matches!(pipe, Pipe::Error(_));
                let lines = Lines::new(rank, output, is_error);
                streams.push(Stream { pipe: Some(pipe), is_error, lines, held_until: None });
            }
            Ok(pidfd_open(group, PidfdFlags::empty())?)
        };
        match prepare() {
            Ok(alive) => self.ranks.push(RankProcess { rank, child, group, alive: Some(alive), streams }),
            Err(error) => {
                let _ = kill_process_group(group, Signal::KILL);
                self.guard.remove(group);
                let _ = child.wait();
                self.end(Ended::System("rank not started", error));
            }
        }
    }

    /// Serves the ranks until all have ended.
    pub(super) fn run(mut self) -> Result<(), Ended> {
        while self.ranks.iter().any(|rank| rank.alive.is_some()) {
            self.sleep(self.next_deadline());
            self.take_signals();
            self.pass_on(false);
            self.reap();
            if self.end_at.is_some_and(|at| at <= now()) {
                self.end_ranks();
            }
            if self.kill_at.is_some_and(|at| at <= now()) {
                self.signal_all(Signal::KILL);
                self.kill_at = None;
            }
        }
        let until = now() + DRAIN;
        while now() < until
            && self.ranks.iter().flat_map(|rank| &rank.streams).any(|stream| stream.pipe.is_some())
        {
            self.sleep(Some(until));
            self.pass_on(false);
        }
        self.pass_on(true);
        match self.ended {
            None => Ok(()),
            // They took it as a request to end, and did.
            Some(Ended::Signal(_)) if !self.any_failed => Ok(()),
            Some(ended) => Err(ended),
        }
    }

    fn next_deadline(&self) -> Option<Nanos> {
        let held = self.ranks.iter().flat_map(|rank| &rank.streams).filter_map(|stream| stream.held_until);
        held.chain(self.end_at).chain(self.kill_at).min()
    }

    fn sleep(&self, deadline: Option<Nanos>) {
        let readable = |file| PollFd::from_borrowed_fd(file, PollFlags::IN);
        let mut files: Vec<_> = self.signals.iter().map(|(_, pipe)| readable(pipe.as_fd())).collect();
        for rank in &self.ranks {
            files.extend(rank.alive.iter().map(|file| readable(file.as_fd())));
            files.extend(
                rank.streams
                    .iter()
                    .filter_map(|stream| stream.pipe.as_ref())
                    .map(|pipe| readable(pipe.as_fd())),
            );
        }
        let limit = deadline.map(|deadline| {
            let left = deadline.since(now());
            rustix::time::Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        // Interrupted or not: look at everything.
        let _ = poll(&mut files, limit.as_ref());
    }

    fn take_signals(&mut self) {
        let mut came = Vec::new();
        for (signal, pipe) in &mut self.signals {
            let mut buffer = [0; 64];
            if matches!(pipe.read(&mut buffer), Ok(count) if count > 0) {
                came.push(*signal);
            }
        }
        for signal in came {
            if matches!(self.ended, Some(Ended::Signal(_))) {
                // Asked twice.
                self.kill_at = Some(now());
                continue;
            }
            if let Some(signal) = Signal::from_named_raw(signal) {
                self.signal_all(signal);
            }
            let name = signal_name(signal);
            (self.end_at, self.kill_at) = (None, Some(now() + GRACE));
            self.ended.get_or_insert(Ended::Signal(name));
        }
    }

    /// Reads what the ranks wrote and passes it on; in the end also what was kept back.
    fn pass_on(&mut self, last: bool) {
        let mut closed = None;
        let quiet = self.ended.is_some() && !self.echoes;
        for rank in &mut self.ranks {
            let hold = match rank.alive {
                None => Hold::Never,
                Some(_) if quiet => Hold::UntilReaped,
                Some(_) => Hold::Shortly,
            };
            for stream in &mut rank.streams {
                if let Err(error) = stream.pass_on(hold, last) {
                    closed.get_or_insert(error);
                }
            }
        }
        if let Some(error) = closed {
            self.end(Ended::OutputClosed(error));
        }
    }

    /// Reaps the ranks that have ended.
    fn reap(&mut self) {
        let mut failures = Vec::new();
        let mut closed = None;
        for rank in &mut self.ranks {
            let Some(alive) = &rank.alive else { continue };
            if !is_readable(alive) {
                continue;
            }
            // As long as it is not reaped its number is its group's; what it started ends with it.
            let _ = kill_process_group(rank.group, Signal::KILL);
            self.guard.remove(rank.group);
            let status = match rank.child.wait() {
                Ok(status) => status,
                Err(error) => {
                    closed.get_or_insert(Ended::System("rank not reaped", error));
                    rank.alive = None;
                    continue;
                }
            };
            rank.alive = None;
            let mut error = None;
            for stream in &mut rank.streams {
                // All that it wrote before its end is there now.
                if let Err(error) = stream.pass_on(Hold::UntilReaped, false) {
                    closed.get_or_insert(Ended::OutputClosed(error));
                }
                if !status.success() && !self.echoes {
                    error = stream.lines.take_error().or(error);
                }
                stream.held_until = None;
            }
            if !status.success() {
                failures.push(Failure { rank: rank.rank, process: rank.child.id(), status, error });
            }
        }
        self.any_failed |= !failures.is_empty();
        if let Some(failure) = Failure::root(&failures) {
            self.end(Ended::Failed(failure.clone()));
        }
        if let Some(ended) = closed {
            self.end(ended);
        }
    }

    /// Ends the job, unless it is ending already. Where a rank has failed, the others have time for
    /// their last words.
    fn end(&mut self, ended: Ended) {
        if self.ended.is_some() {
            return;
        }
        match ended {
            Ended::Failed(_) => self.end_at = Some(now() + LAST_WORDS),
            _ => self.end_ranks(),
        }
        self.ended = Some(ended);
    }

    /// Asks the ranks that still run to end, for a limited time.
    fn end_ranks(&mut self) {
        self.signal_all(Signal::TERM);
        (self.end_at, self.kill_at) = (None, Some(now() + GRACE));
    }

    fn signal_all(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.alive.is_some()) {
            // Not reaped, so the group is still its own.
            let _ = kill_process_group(rank.group, signal);
        }
    }
}

/// How long an error that is the last line is kept back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hold {
    Never,
    Shortly,
    UntilReaped,
}

impl Stream {
    fn pass_on(&mut self, hold: Hold, last: bool) -> io::Result<()> {
        let mut out = Vec::new();
        let ended = self.read(&mut out);
        if ended || last {
            self.pipe = None;
            self.lines.finish(&mut out);
        }
        if self.lines.keeps() {
            let until = *self.held_until.get_or_insert_with(|| now() + ERROR_HOLD);
            if hold == Hold::Never || (hold == Hold::Shortly && until <= now()) {
                self.lines.release(&mut out);
            }
        }
        if !self.lines.keeps() || hold == Hold::UntilReaped {
            self.held_until = None;
        }
        match (out.is_empty(), self.is_error) {
            (true, _) => Ok(()),
            (false, true) => io::stderr().lock().write_all(&out),
            (false, false) => {
                let mut stdout = io::stdout().lock();
                stdout.write_all(&out).and_then(|()| stdout.flush())
            }
        }
    }

    /// Takes what is there; whether the stream has ended.
    fn read(&mut self, out: &mut Vec<u8>) -> bool {
        let Some(pipe) = &mut self.pipe else { return false };
        let mut buffer = [0; READ_BYTES];
        loop {
            match pipe.read(&mut buffer) {
                Ok(0) => return true,
                Ok(count) => self.lines.push(&buffer[..count], out),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
            }
            // The other ranks' turn.
            if out.len() > OUTPUT_BYTES {
                return false;
            }
        }
    }
}

fn is_readable(file: &OwnedFd) -> bool {
    let mut files = [PollFd::from_borrowed_fd(file.as_fd(), PollFlags::IN)];
    matches!(poll(&mut files, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}
