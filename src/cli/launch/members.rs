//! Members of a job whose processes come and go, started on this host. Unlike in a
//! [`Launch`](super::Launch), the end of one does not end the others, and others can be started
//! later. Each has a number of its own, in the order in which they are started; which seat a
//! process has is the job's matter, once processes have joined.
//!
//! A member is this command, or a program of the user's. This command writes lines to its standard
//! output, which are for this process; what a program writes is passed on to standard error, behind
//! the member's number. What members write to standard error is passed on, but for the error with
//! which one ends.
//!
//! **Invariant:** no member, and nothing in its process group, outlives this value, or this
//! process: each is tied to it by the kernel (see [`guard`]), and dropping the value kills and
//! reaps all of them. A member is reaped after its group was killed, so that a number is never used
//! once it may name others.

use std::ffi::OsString;
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use pleach::transport::Nanos;
use pleach::transport::auth::Secret;
use pleach::transport::clock::now;
use pleach::transport::rendezvous::{Rendezvous, World};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::guard::Guard;
use super::store::Between;
use super::{JobSecret, SECRET_VARIABLE, guard, needs_secret, reserve_port, sockets};
use crate::cli::CommandError;
use crate::cli::faults::Fault;

/// The prefix of this command's errors.
const ERROR: &str = "error: ";

/// Longest line that is kept together, in bytes.
const LINE_BYTES_MAX: u64 = 64 * 1024;

/// How long the last words of a member that has ended are awaited: something that it started may
/// hold the pipe.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// What is heard of a member.
#[derive(Debug)]
pub(crate) enum Told {
    /// A line that it wrote.
    Line(String),
    /// It has ended, with the error that it printed last.
    Ended(ExitStatus, Option<String>),
}

struct Member {
    child: Child,
    /// The error that it wrote last, when it has closed standard error.
    error: Receiver<Option<String>>,
    has_ended: bool,
}

/// See the module.
pub(crate) struct Members {
    /// By number.
    members: Vec<Member>,
    command: Vec<OsString>,
    /// Whether members are a program of the user's.
    is_program: bool,
    /// Members that were started first: the world that begins the job.
    founders: u32,
    rendezvous: Rendezvous,
    secret: Option<JobSecret>,
    guard: Guard,
    between: Option<Arc<Between>>,
    sender: Sender<(u32, Option<String>)>,
    /// `None`: the member has ended.
    lines: Receiver<(u32, Option<String>)>,
    /// Keeps the port of the rendezvous from being given to others.
    _reserved: Option<OwnedFd>,
}

impl Members {
    /// Starts so many members as this command with these arguments. They meet at this address, or
    /// else at a port of this host. The thread that calls this has to outlive them.
    pub(crate) fn start(
        count: u32,
        arguments: &[OsString],
        rendezvous: Option<Rendezvous>,
    ) -> Result<Self, CommandError> {
        let own = std::iter::once(guard::OWN_PROGRAM.into());
        Self::start_as(count, own.chain(arguments.iter().cloned()).collect(), rendezvous, false)
    }

    /// As [`Members::start`], as a program of the user's.
    pub(crate) fn start_program(
        count: u32,
        command: &[OsString],
        rendezvous: Option<Rendezvous>,
    ) -> Result<Self, CommandError> {
        Self::start_as(count, command.to_vec(), rendezvous, true)
    }

    fn start_as(
        count: u32,
        command: Vec<OsString>,
        rendezvous: Option<Rendezvous>,
        is_program: bool,
    ) -> Result<Self, CommandError> {
        let failed = |error| CommandError::failed(format!("ranks not started: {error}; see 'ulimit -a'"));
        let (rendezvous, reserved) = match rendezvous {
            Some(rendezvous) => (rendezvous, None),
            None => {
                let (port, reserved) = reserve_port().map_err(failed)?;
                (Rendezvous::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port }, Some(reserved))
            }
        };
        let secret = needs_secret().then(JobSecret::new);
        let guard = Guard::start(secret.as_ref().map(JobSecret::folder)).map_err(failed)?;
        secret.as_ref().map(JobSecret::write).transpose()?;
        let (sender, lines) = channel();
        let mut started = Self {
            members: Vec::new(),
            command,
            is_program,
            founders: count,
            rendezvous,
            secret,
            guard,
            between: None,
            sender,
            lines,
            _reserved: reserved,
        };
        for rank in 0..count {
            started.add(rank)?;
        }
        Ok(started)
    }

    /// Starts one more, which joins the job that runs. Returns its number.
    pub(crate) fn join(&mut self) -> Result<u32, CommandError> {
        // As rank 0 it would begin a job where the holder of the address has just gone. It is given
        // a seat that is free, whatever its rank is.
        self.add(self.founders.saturating_sub(1).max(1))
    }

    /// Whoever asks the job who its members are.
    pub(crate) fn asker(&self) -> Result<World, CommandError> {
        let of_job = self.secret.as_ref().map(JobSecret::file);
        let file = of_job.or_else(|| std::env::var_os(SECRET_VARIABLE).map(Into::into));
        let secret = file.map(|file| Secret::from_file(&file)).transpose().map_err(CommandError::usage)?;
        Ok(World { rendezvous: Some(self.rendezvous.clone()), secret, ..World::alone() })
    }

    fn add(&mut self, rank: u32) -> Result<u32, CommandError> {
        let failed = |error| CommandError::failed(format!("rank not started: {error}; see 'ulimit -a'"));
        let number = self.members.len() as u32;
        let mut command = guard::rank_command(&self.command, None);
        command
            .env("PLEACH_RANK", rank.to_string())
            .env("PLEACH_WORLD_SIZE", self.founders.to_string())
            .env("PLEACH_LOCAL_RANK", rank.to_string())
            .env("PLEACH_RENDEZVOUS", self.rendezvous.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        if let Some(secret) = &self.secret {
            command.env(SECRET_VARIABLE, secret.file());
        }
        let mut child = command.spawn().map_err(failed)?;
        let process = Pid::from_child(&child);
        self.guard.add(process);
        let out = child.stdout.take().expect("is piped");
        let errors = child.stderr.take().expect("is piped");
        let (last_error, error) = channel();
        self.members.push(Member { child, error, has_ended: false });
        let sender = self.sender.clone();
        let prefix = if self.is_program { format!("[{number}] ") } else { String::new() };
        let on_thread =
            |work: Box<dyn FnOnce() + Send>| thread::Builder::new().spawn(work).map(drop).map_err(failed);
        // Nobody listens any more when the members are dropped.
        if self.is_program {
            let own_prefix = prefix.clone();
            on_thread(Box::new(move || each_line(out, |line| write_error(&own_prefix, line))))?;
            on_thread(Box::new(move || {
                await_end(process);
                let _ = sender.send((number, None));
            }))?;
        } else {
            on_thread(Box::new(move || {
                each_line(out, |line| drop(sender.send((number, Some(line.to_owned())))));
                let _ = sender.send((number, None));
            }))?;
        }
        on_thread(Box::new(move || drop(last_error.send(pass_on(errors, &prefix)))))?;
        Ok(number)
    }

    /// What is heard next of a member, by then.
    pub(crate) fn next(&mut self, until: Nanos) -> Option<(u32, Told)> {
        let (number, line) = self.lines.recv_timeout(until.since(now())).ok()?;
        if let Some(line) = line {
            return Some((number, Told::Line(line)));
        }
        let member = &mut self.members[number as usize];
        member.has_ended = true;
        let group = Pid::from_child(&member.child);
        // What it started ends with it.
        let _ = kill_process_group(group, Signal::KILL);
        self.guard.remove(group);
        let status = member.child.wait().unwrap_or_default();
        Some((number, Told::Ended(status, member.error.recv_timeout(LAST_WORDS).ok().flatten())))
    }

    /// The member that holds the rendezvous: it listens there, or its number stands in the folder.
    /// `None`: nobody does just now, or nobody ever does there.
    pub(crate) fn holder(&self) -> Result<Option<u32>, CommandError> {
        let failed = |error: io::Error| {
            CommandError::failed(format!(
                "holder of the rendezvous not found: {error}; the fault 'rendezvous' needs a Linux from 5.6 on that lets a \
                 process trace its children"
            ))
        };
        let alive = (0..).zip(&self.members).filter(|(_, member)| !member.has_ended);
        let mut groups = alive.map(|(number, member)| (number, Pid::from_child(&member.child)));
        match &self.rendezvous {
            Rendezvous::Tcp { port, .. } => {
                for (number, group) in groups {
                    if sockets::listens(group, *port).map_err(failed)? {
                        return Ok(Some(number));
                    }
                }
                Ok(None)
            }
            Rendezvous::File { folder } => {
                let group = holder_in(folder).and_then(sockets::group_of);
                Ok(groups.find(|(_, member)| group == Some(*member)).map(|(number, _)| number))
            }
            _ => Ok(None),
        }
    }

    /// Whether members are a program of the user's.
    pub(crate) fn is_program(&self) -> bool {
        self.is_program
    }

    /// The store is reached through this.
    pub(crate) fn through(mut self, between: Option<Arc<Between>>) -> Self {
        self.between = between;
        self
    }

    /// The fault befalls a member; a join befalls none.
    pub(crate) fn strike(&self, number: u32, fault: Fault) {
        if let Some(between) = self.between.as_ref().filter(|_| fault == Fault::Store) {
            between.take_away();
        }
        fault.signal().into_iter().for_each(|signal| self.signal(number, signal));
    }

    /// Cuts all connections of two members.
    pub(crate) fn cut(&self, one: u32, other: u32) -> Result<(), CommandError> {
        let group = |number: u32| Pid::from_child(&self.members[number as usize].child);
        match sockets::cut(group(one), group(other)) {
            Ok(1..) => Ok(()),
            Ok(0) => Err(CommandError::failed(format!(
                "nothing to cut: processes {one} and {other} have no connection; take cut out of --faults"
            ))),
            Err(error) => Err(CommandError::failed(format!(
                "connections not cut: {error}; the fault 'cut' needs a Linux from 5.6 on that lets a process trace its \
                 children"
            ))),
        }
    }

    /// A member stands still.
    pub(crate) fn stop(&self, number: u32) {
        self.signal(number, Signal::STOP);
    }

    /// A member that stands still goes on.
    pub(crate) fn wake(&self, number: u32) {
        self.signal(number, Signal::CONT);
    }

    /// Tells all members to end that have not.
    pub(crate) fn end(&self) {
        for number in 0..self.members.len() as u32 {
            self.signal(number, Signal::TERM);
            self.wake(number);
        }
    }

    fn signal(&self, number: u32, signal: Signal) {
        let member = &self.members[number as usize];
        if !member.has_ended {
            // It is not reaped, so the number is that of its group. It may have ended by itself.
            let _ = kill_process_group(Pid::from_child(&member.child), signal);
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        for number in 0..self.members.len() {
            self.signal(number as u32, Signal::KILL);
            let member = &mut self.members[number];
            if !member.has_ended {
                self.guard.remove(Pid::from_child(&member.child));
                let _ = member.child.wait();
            }
        }
    }
}

/// The process of this host that has written into a rendezvous folder that it holds it, as people
/// read it.
fn holder_in(folder: &Path) -> Option<Pid> {
    let words = std::fs::read_to_string(folder.join("owner")).ok()?;
    words.strip_prefix("process ")?.split(' ').next()?.parse().ok().and_then(Pid::from_raw)
}

/// Waits until a child has ended, and does not reap it.
fn await_end(process: Pid) {
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    while matches!(waitid(WaitId::Pid(process), ended), Err(rustix::io::Errno::INTR)) {}
}

/// Reads to the end, line by line; a line that is too long is several.
fn each_line(pipe: impl Read, mut take: impl FnMut(&str)) {
    let mut pipe = BufReader::new(pipe);
    let mut line = Vec::new();
    while matches!(pipe.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line), Ok(1..)) {
        take(String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n']));
        line.clear();
    }
}

/// Passes on all lines but the last error, which is returned.
fn pass_on(pipe: impl Read, prefix: &str) -> Option<String> {
    let mut last: Option<String> = None;
    each_line(pipe, |line| match line.strip_prefix(ERROR) {
        Some(error) => {
            if let Some(before) = last.replace(error.to_owned()) {
                write_error(prefix, &format!("{ERROR}{before}"));
            }
        }
        None => write_error(prefix, line),
    });
    last
}

fn write_error(prefix: &str, line: &str) {
    // Nobody is left to tell when standard error is closed.
    let _ = io::stderr().write_all(format!("{prefix}{line}\n").as_bytes());
}
