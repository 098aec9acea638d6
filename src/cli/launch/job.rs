//! A running job: one thread that sleeps until a rank prints, a rank ends, a signal comes or a time
//! is up.
//!
//! **Invariant:** when [`Job::run`] returns, every process of every rank's group is dead, and each
//! rank was reaped after its group was killed, so that a number is never used once it may name
//! others.

use std::io;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use pleach::transport::Nanos;
use pleach::transport::clock::now;
use pleach::transport::witness::WordFile;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::cli::launch::certifier::{Certifier, LOOK};
use crate::cli::launch::guard::Guard;
use crate::cli::launch::restarts::{Fate, Outliving, Restarts};
use crate::cli::output::note;

/// How long the other ranks may still run after one has failed, before they get SIGTERM: they find
/// out by themselves, and say what they saw.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// How long ranks may take to end after SIGTERM (or the person's own signal) before they are
/// killed.
const GRACE: Duration = Duration::from_secs(5);

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
pub(super) enum JobEnd {
    /// A rank failed first.
    Failed(Failure),
    /// A rank has died, and too few are left to go on without it.
    TooFew { failure: Failure, running: u32, outliving: Outliving, used: u32 },
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
    /// Where its session keeps its last word, if its death is certified.
    word: Option<WordFile>,
}

/// Ranks that run.
pub(super) struct Job {
    ranks: Vec<RankProcess>,
    guard: Guard,
    signals: Vec<(i32, UnixStream)>,
    end_cause: Option<JobEnd>,
    any_failed: bool,
    /// Whether one has ended well.
    any_done: bool,
    /// The failure of the rank that has ended last, if it did not end well.
    missed: Option<Failure>,
    /// When the ranks that still run get SIGTERM.
    end_at: Option<Nanos>,
    /// When they are killed.
    kill_at: Option<Nanos>,
    /// Whether what others say about a failure is shown too.
    echoes: bool,
    /// Certifies deaths to the ranks of other launchers.
    certifier: Option<Certifier>,
}

impl Job {
    /// With nothing running yet; from now on signals are passed on. `secret`: the folder of the
    /// job's secret, if it has one. `certifier` certifies deaths here.
    pub(super) fn new(
        echoes: bool,
        secret: Option<&Path>,
        certifier: Option<Certifier>,
    ) -> Result<Self, JobEnd> {
        let mut signals = Vec::new();
        for signal in FORWARDED {
            let system = |error| JobEnd::System("signals not handled", error);
            let (ours, hook) = UnixStream::pair().map_err(system)?;
            ours.set_nonblocking(true).map_err(system)?;
            signal_hook::low_level::pipe::register(signal, hook).map_err(system)?;
            signals.push((signal, ours));
        }
        let guard = Guard::start(secret).map_err(|error| JobEnd::System("guard not started", error))?;
        Ok(Self {
            ranks: Vec::new(),
            guard,
            signals,
            end_cause: None,
            any_failed: false,
            any_done: false,
            missed: None,
            end_at: None,
            kill_at: None,
            echoes,
            certifier,
        })
    }

    /// Starts a rank.
    pub(super) fn start(&mut self, rank: u32, mut command: Command, output: Output) {
        if self.end_cause.is_some() {
            return;
        }
        command.stdin(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        command.stdout(match output {
            Output::Prefixed => Stdio::piped(),
            Output::Plain => Stdio::inherit(),
        });
        let word = Certifier::word_file(self.certifier.as_ref(), &mut command);
        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return self.end(JobEnd::System("rank not started", error)),
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
            Ok(alive) => {
                self.ranks.push(RankProcess { rank, child, group, alive: Some(alive), streams, word });
            }
            Err(error) => {
                let _ = kill_process_group(group, Signal::KILL);
                self.guard.remove(group);
                let _ = child.wait();
                self.end(JobEnd::System("rank not started", error));
            }
        }
    }

    /// Serves the ranks until all have ended. With `restarts` the job outlives some of them, and
    /// has ended well when the last one has.
    pub(super) fn run(mut self, mut restarts: Option<Restarts<'_>>) -> Result<(), JobEnd> {
        while self.ranks.iter().any(|rank| rank.alive.is_some()) {
            self.sleep(self.next_deadline());
            self.take_signals();
            self.pass_on(false);
            self.reap(restarts.as_mut());
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
        // A signal ends the wait.
        while self.certifier.as_ref().is_some_and(|certifier| !certifier.is_done())
            && self.signals_come().is_empty()
        {
            self.sleep(Some(now() + LOOK));
        }
        match self.end_cause {
            None => self.missed.map_or(Ok(()), |failure| Err(JobEnd::Failed(failure))),
            // They took it as a request to end, and did.
            Some(JobEnd::Signal(_)) if !self.any_failed => Ok(()),
            Some(end_cause) => Err(end_cause),
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

    /// The signals that have come since the last look.
    fn signals_come(&mut self) -> Vec<i32> {
        let mut came = Vec::new();
        for (signal, pipe) in &mut self.signals {
            let mut buffer = [0; 64];
            if matches!(pipe.read(&mut buffer), Ok(count) if count > 0) {
                came.push(*signal);
            }
        }
        came
    }

    fn take_signals(&mut self) {
        for signal in self.signals_come() {
            if matches!(self.end_cause, Some(JobEnd::Signal(_))) {
                // Asked twice.
                self.kill_at = Some(now());
                continue;
            }
            if let Some(signal) = Signal::from_named_raw(signal) {
                self.signal_all(signal);
            }
            let name = signal_name(signal);
            (self.end_at, self.kill_at) = (None, Some(now() + GRACE));
            self.end_cause.get_or_insert(JobEnd::Signal(name));
        }
    }

    /// Reads what the ranks wrote and passes it on; in the end also what was kept back.
    fn pass_on(&mut self, last: bool) {
        let mut closed = None;
        let quiet = self.end_cause.is_some() && !self.echoes;
        for rank in &mut self.ranks {
            let hold = match rank.alive {
                None => ErrorHold::Never,
                Some(_) if quiet => ErrorHold::UntilReaped,
                Some(_) => ErrorHold::Shortly,
            };
            for stream in &mut rank.streams {
                if let Err(error) = stream.pass_on(hold, last) {
                    closed.get_or_insert(error);
                }
            }
        }
        if let Some(error) = closed {
            self.end(JobEnd::OutputClosed(error));
        }
    }

    /// Reaps the ranks that have ended.
    fn reap(&mut self, restarts: Option<&mut Restarts<'_>>) {
        let (mut failures, mut any_well) = (Vec::new(), false);
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
                    closed.get_or_insert(JobEnd::System("rank not reaped", error));
                    rank.alive = None;
                    continue;
                }
            };
            rank.alive = None;
            let mut error = None;
            for stream in &mut rank.streams {
                // All that it wrote before its end is there now.
                if let Err(error) = stream.pass_on(ErrorHold::UntilReaped, false) {
                    closed.get_or_insert(JobEnd::OutputClosed(error));
                }
                if !status.success() && !self.echoes {
                    error = stream.lines.take_error().or(error);
                }
                stream.held_until = None;
            }
            any_well |= status.success();
            if !status.success() {
                if let (Some(certifier), Some(word)) = (&mut self.certifier, rank.word.take()) {
                    certifier.certify(rank.rank, word);
                }
                failures.push(Failure { rank: rank.rank, process: rank.child.id(), status, error });
            }
        }
        self.any_done |= any_well;
        match restarts {
            Some(restarts) if self.end_cause.is_none() => {
                failures.into_iter().for_each(|failure| self.outlive(failure, restarts));
            }
            _ => {
                self.any_failed |= !failures.is_empty();
                if let Some(failure) = Failure::root(&failures) {
                    self.end(JobEnd::Failed(failure.clone()));
                }
                // A rank that aborts the group may end after those that it aborted.
                let asked_to_end = self.end_at.is_none();
                if let Some(JobEnd::Failed(first)) = &mut self.end_cause {
                    for failure in failures {
                        let is_own = !asked_to_end || failure.status.signal().is_none();
                        if is_own && first.follows(&failure) {
                            *first = failure;
                        }
                    }
                }
            }
        }
        if any_well {
            // Nobody knows in which order those ended that are reaped together.
            self.missed = None;
        }
        if let Some(end_cause) = closed {
            self.end(end_cause);
        }
    }

    /// Goes on after the death of a rank, if it can.
    fn outlive(&mut self, failure: Failure, restarts: &mut Restarts<'_>) {
        if self.end_cause.is_some() {
            return;
        }
        if failure.is_usage() {
            // It would be wrong the next time too.
            return self.end(JobEnd::Failed(failure));
        }
        let running = self.ranks.iter().filter(|rank| rank.alive.is_some()).count() as u32;
        let (rank, text, outliving) = (failure.rank, failure.text(), restarts.outliving());
        match restarts.after_death(running, self.any_done) {
            Fate::Again(number) => {
                note(&format!("{text}; it joins again, restart {number} of {}", outliving.restarts()));
                self.start(rank, restarts.command(rank), Output::Prefixed);
            }
            Fate::Without => {
                if running > 0 {
                    note(&format!("{text}; the others go on without it"));
                } else {
                    note(&text);
                }
                self.missed = Some(failure);
            }
            Fate::End => {
                self.end(JobEnd::TooFew { failure, running, outliving, used: restarts.used() });
            }
        }
    }

    /// Ends the job, unless it is ending already. Where a rank has failed, the others have time for
    /// their last words.
    fn end(&mut self, end_cause: JobEnd) {
        if self.end_cause.is_some() {
            return;
        }
        match end_cause {
            JobEnd::Failed(_) | JobEnd::TooFew { .. } => self.end_at = Some(now() + LAST_OUTPUT),
            _ => self.end_ranks(),
        }
        self.end_cause = Some(end_cause);
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
enum ErrorHold {
    Never,
    Shortly,
    UntilReaped,
}

impl Stream {
    fn pass_on(&mut self, hold: ErrorHold, last: bool) -> io::Result<()> {
        let mut out = Vec::new();
        let end_cause = self.read(&mut out);
        if end_cause || last {
            self.pipe = None;
            self.lines.finish(&mut out);
        }
        if self.lines.keeps() {
            let until = *self.held_until.get_or_insert_with(|| now() + ERROR_HOLD);
            if hold == ErrorHold::Never || (hold == ErrorHold::Shortly && until <= now()) {
                self.lines.release(&mut out);
            }
        }
        if !self.lines.keeps() || hold == ErrorHold::UntilReaped {
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

// The rank that failed first, and its error.

/// A rank that did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    rank: u32,
    process: u32,
    status: ExitStatus,
    /// The error it printed last, in the form of this command.
    error: Option<String>,
}

impl Failure {
    /// Of failures that were seen at the same time, the one that the others follow from: rather one
    /// that was killed than one that gave up, rather one that does not name another of them.
    fn root(failures: &[Self]) -> Option<&Self> {
        failures.iter().min_by_key(|failure| {
            let echoes = failures.iter().any(|other| other.rank != failure.rank && failure.names(other.rank));
            (failure.status.signal().is_none(), echoes, failure.rank)
        })
    }

    /// Whether this one gave up because of the other, and not the other way round.
    fn follows(&self, other: &Self) -> bool {
        self.status.signal().is_none()
            && other.rank != self.rank
            && self.names(other.rank)
            && !other.names(self.rank)
    }

    fn names(&self, rank: u32) -> bool {
        let Some(error) = &self.error else { return false };
        let mut words = error.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
        let mut last = "";
        words.any(|word| {
            let named = (last == "rank" || last == "ranks") && word.parse() == Ok(rank);
            last = word;
            named
        })
    }

    /// Whether it was a matter of what was typed.
    pub(super) fn is_usage(&self) -> bool {
        self.status.code() == Some(2) && self.error.is_some()
    }

    /// The message for the user.
    pub(super) fn text(&self) -> String {
        let Self { rank, process, status, error } = self;
        if let Some(number) = status.signal() {
            let (name, core) =
                (signal_name(number), if status.core_dumped() { " (core dumped)" } else { "" });
            let advice = match number {
                9 => "if nobody did that, look for 'out of memory' in dmesg",
                _ => "look at its output above",
            };
            return format!(
                "rank died: rank {rank} (process {process}) was killed by {name}{core}; {advice}"
            );
        }
        match error {
            Some(error) => format!("rank {rank} failed: {error}"),
            None => {
                let code = status.code().unwrap_or_default();
                format!(
                    "rank failed: rank {rank} (process {process}) exited with status {code}; look at its output above"
                )
            }
        }
    }
}

/// A signal's name.
fn signal_name(number: i32) -> String {
    let names = [
        "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
        "ALRM", "TERM",
    ];
    match usize::try_from(number - 1).ok().and_then(|place| names.get(place)) {
        Some(name) => format!("SIG{name}"),
        None => format!("signal {number}"),
    }
}

// Passes on the output of ranks line by line, each line in one write.

/// Longest line that is kept together, in bytes.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// The prefix of this command's errors.
const ERROR: &[u8] = b"error: ";

/// How lines are passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// With the rank in front: `[3] line`.
    Prefixed,
    /// As they are; a carriage return (a progress bar) ends a line too.
    Plain,
}

/// One rank's output stream, split into lines.
#[derive(Debug)]
struct Lines {
    prefix: Vec<u8>,
    output: Output,
    /// Whether a line in the form of an error is kept back while it is the last one.
    keeps_errors: bool,
    partial: Vec<u8>,
    kept: Option<Vec<u8>>,
}

impl Lines {
    fn new(rank: u32, output: Output, keeps_errors: bool) -> Self {
        let prefix = match output {
            Output::Prefixed => format!("[{rank}] ").into_bytes(),
            Output::Plain => Vec::new(),
        };
        Self { prefix, output, keeps_errors, partial: Vec::new(), kept: None }
    }

    /// Takes what the rank wrote; appends the lines that are whole now to `out`.
    fn push(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            let room = LINE_BYTES_MAX - self.partial.len();
            let piece = &bytes[..bytes.len().min(room)];
            let end = piece.iter().position(|&byte| self.ends_line(byte));
            let taken = end.map_or(piece.len(), |end| end + 1);
            self.partial.extend_from_slice(&piece[..taken]);
            bytes = &bytes[taken..];
            if end.is_some() || self.partial.len() == LINE_BYTES_MAX {
                self.emit(out);
            }
        }
    }

    /// The stream has ended: what is left is a line too.
    fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.partial.is_empty() {
            self.emit(out);
        }
    }

    /// Passes on the error that was kept back.
    fn release(&mut self, out: &mut Vec<u8>) {
        if let Some(line) = self.kept.take() {
            out.extend_from_slice(&self.prefix);
            out.extend_from_slice(&line);
        }
    }

    /// Whether an error is kept back.
    fn keeps(&self) -> bool {
        self.kept.is_some()
    }

    /// Takes the error that was kept back, without what precedes it.
    fn take_error(&mut self) -> Option<String> {
        let line = self.kept.take()?;
        Some(String::from_utf8_lossy(line[ERROR.len()..].trim_ascii()).into_owned())
    }

    fn ends_line(&self, byte: u8) -> bool {
        byte == b'\n' || (byte == b'\r' && self.output == Output::Plain)
    }

    fn emit(&mut self, out: &mut Vec<u8>) {
        let mut line = std::mem::take(&mut self.partial);
        if !line.last().is_some_and(|&byte| self.ends_line(byte)) {
            line.push(b'\n');
        }
        self.release(out);
        if self.keeps_errors && line.starts_with(ERROR) {
            self.kept = Some(line);
        } else {
            out.extend_from_slice(&self.prefix);
            out.append(&mut line);
        }
    }
}

#[cfg(test)]
mod cause_tests {
    use super::*;

    fn failure(rank: u32, raw: i32, error: Option<&str>) -> Failure {
        Failure {
            rank,
            process: 70 + rank,
            status: ExitStatus::from_raw(raw),
            error: error.map(str::to_owned),
        }
    }

    #[test]
    fn a_killed_rank_is_the_cause_before_those_that_gave_up() {
        let failures =
            [failure(0, 1 << 8, Some("rank 2 is lost")), failure(2, 9, None), failure(3, 1 << 8, None)];
        assert_eq!(Failure::root(&failures).expect("there is one").rank, 2);
        let text = failures[1].text();
        assert!(text.starts_with("rank died: rank 2 (process 72) was killed by SIGKILL;"), "{text}");
    }

    #[test]
    fn a_rank_that_names_another_failed_one_is_its_echo() {
        let failures = [failure(0, 1 << 8, Some("peer lost: rank 1; x")), failure(1, 3 << 8, None)];
        let root = Failure::root(&failures).expect("there is one");
        assert_eq!(root.rank, 1);
        assert!(root.text().contains("rank 1 (process 71) exited with status 3"), "{}", root.text());
        let failures = [failure(0, 1 << 8, Some("rank 11 is lost")), failure(1, 3 << 8, None)];
        assert_eq!(Failure::root(&failures).expect("there is one").rank, 0, "11 is not 1");
    }

    #[test]
    fn a_rank_follows_the_one_that_it_names_but_not_one_that_names_it() {
        let aborted = failure(2, 1 << 8, Some("rank 1 aborted the group (during all-reduce)"));
        let own = failure(1, 1 << 8, Some("loss NaN of rank 1 in step 2; lower the learning rate"));
        assert!(aborted.follows(&own) && !own.follows(&aborted) && !own.follows(&own));
        let other = failure(1, 1 << 8, Some("rank 2 is lost"));
        assert!(!aborted.follows(&other) && !failure(2, 9, None).follows(&own));
    }

    #[test]
    fn signals_have_names() {
        assert_eq!((signal_name(15).as_str(), signal_name(11).as_str()), ("SIGTERM", "SIGSEGV"));
        assert_eq!((signal_name(0).as_str(), signal_name(34).as_str()), ("signal 0", "signal 34"));
    }
}

#[cfg(test)]
mod output_tests {
    use super::*;

    fn shown(lines: &mut Lines, pieces: &[&str]) -> String {
        let mut out = Vec::new();
        for piece in pieces {
            lines.push(piece.as_bytes(), &mut out);
        }
        String::from_utf8(out).expect("is text")
    }

    #[test]
    fn pieces_become_whole_lines_with_the_rank_in_front() {
        let mut lines = Lines::new(3, Output::Prefixed, false);
        assert_eq!(shown(&mut lines, &["a", "b\nc\n\nd"]), "[3] ab\n[3] c\n[3] \n");
        let mut out = Vec::new();
        lines.finish(&mut out);
        lines.finish(&mut out);
        assert_eq!(out, b"[3] d\n");
    }

    #[test]
    fn a_line_without_end_is_cut_at_the_limit() {
        let mut lines = Lines::new(0, Output::Prefixed, false);
        let text = shown(&mut lines, &["x".repeat(LINE_BYTES_MAX + 5).as_str(), "\n"]);
        let lengths: Vec<_> = text.lines().map(str::len).collect();
        assert_eq!(lengths, [LINE_BYTES_MAX + 4, 9]);
    }

    #[test]
    fn an_error_is_kept_back_only_while_it_is_the_last_line() {
        let mut lines = Lines::new(1, Output::Prefixed, true);
        assert_eq!(shown(&mut lines, &["hello\nerror: no luck: here; try again\n"]), "[1] hello\n");
        assert_eq!(shown(&mut lines, &["more\n"]), "[1] error: no luck: here; try again\n[1] more\n");
        assert_eq!(shown(&mut lines, &["error: the last\n"]), "");
        assert!(lines.keeps());
        assert_eq!(lines.take_error().as_deref(), Some("the last"));
        assert!(!lines.keeps());
    }

    #[test]
    fn plain_lines_are_as_they_were_and_a_progress_bar_moves() {
        let mut lines = Lines::new(1, Output::Plain, false);
        assert_eq!(shown(&mut lines, &["10%\r20", "%\rdone\n"]), "10%\r20%\rdone\n");
    }
}
