//! Members of a job whose processes come and go, started on this host. Unlike in a
//! [`Launch`](super::Launch), the end of one does not end the others, and others can be started
//! later. Each has a number of its own, in the order in which they are started; which seat a
//! process has is the job's matter, once processes have joined.
//!
//! Each member writes lines to its standard output, which are for this process. What it writes to
//! standard error is passed on, but for the error with which it ends.
//!
//! **Invariant:** no member outlives this value, or this process: each is tied to it by the kernel
//! (see [`guard`]), and dropping the value kills and reaps all of them.

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::process::{Child, ChildStderr, ChildStdout, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use pleach::transport::Nanos;
use pleach::transport::clock::now;
use pleach::transport::rendezvous::Rendezvous;
use rustix::process::{Pid, Signal, kill_process};

use super::{guard, reserve_port};
use crate::cli::CommandError;
use crate::cli::faults::Fault;

/// The prefix of this command's errors.
const ERROR: &str = "error: ";

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
    /// Passes on what it writes to standard error, and keeps its error; `None` once it was joined.
    errors: Option<JoinHandle<Option<String>>>,
    has_ended: bool,
}

/// See the module.
pub(crate) struct Members {
    /// By number.
    members: Vec<Member>,
    command: Vec<OsString>,
    /// Members that were started first: the world that begins the job.
    founders: u32,
    rendezvous: Rendezvous,
    sender: Sender<(u32, Option<String>)>,
    /// `None`: the member has closed its output.
    lines: Receiver<(u32, Option<String>)>,
    /// Keeps the port of the rendezvous from being given to others.
    _reserved: OwnedFd,
}

impl Members {
    /// Starts so many members as this command with these arguments. The thread that calls this has
    /// to outlive them.
    pub(crate) fn start(count: u32, arguments: &[OsString]) -> Result<Self, CommandError> {
        let failed = |error| CommandError::failed(format!("ranks not started: {error}; see 'ulimit -a'"));
        let (port, reserved) = reserve_port().map_err(failed)?;
        let rendezvous = Rendezvous::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port };
        let command: Vec<OsString> =
            std::iter::once(guard::OWN_PROGRAM.into()).chain(arguments.iter().cloned()).collect();
        let (sender, lines) = channel();
        let members = Vec::new();
        let founders = count;
        let mut started = Self { members, command, founders, rendezvous, sender, lines, _reserved: reserved };
        for rank in 0..count {
            started.add(rank)?;
        }
        Ok(started)
    }

    /// Starts one more, which joins the job that runs. Returns its number.
    pub(crate) fn join(&mut self) -> Result<u32, CommandError> {
        // As rank 0 it would begin a job where the holder of the address has just gone. It is given
        // a seat that is free, whatever its rank is.
        self.add(self.founders.saturating_sub(1))
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
            .stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (out, error) = (child.stdout.take(), child.stderr.take());
        self.members.push(Member { child, errors: None, has_ended: false });
        let sender = self.sender.clone();
        let out = out.expect("is piped");
        thread::Builder::new().spawn(move || read_lines(number, out, &sender)).map_err(failed)?;
        let error = error.expect("is piped");
        let errors = thread::Builder::new().spawn(move || pass_on(error)).map_err(failed)?;
        self.members[number as usize].errors = Some(errors);
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
        let status = member.child.wait().unwrap_or_default();
        let error = member.errors.take().and_then(|errors| errors.join().ok()).flatten();
        Some((number, Told::Ended(status, error)))
    }

    /// The fault befalls a member; a join befalls none.
    pub(crate) fn strike(&self, number: u32, fault: Fault) {
        fault.signal().into_iter().for_each(|signal| self.signal(number, signal));
    }

    /// A member that stands still goes on.
    pub(crate) fn wake(&self, number: u32) {
        self.signal(number, Signal::CONT);
    }

    fn signal(&self, number: u32, signal: Signal) {
        let member = &self.members[number as usize];
        if !member.has_ended {
            // It is not reaped, so its number is its own. It may have ended by itself.
            let _ = kill_process(Pid::from_child(&member.child), signal);
        }
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        for member in self.members.iter_mut().filter(|member| !member.has_ended) {
            let _ = member.child.kill();
            let _ = member.child.wait();
        }
    }
}

fn read_lines(number: u32, out: ChildStdout, sender: &Sender<(u32, Option<String>)>) {
    for line in BufReader::new(out).lines().map_while(Result::ok) {
        // Nobody listens any more when the members are dropped.
        let _ = sender.send((number, Some(line)));
    }
    let _ = sender.send((number, None));
}

/// Passes on all lines but errors, of which the last one is returned.
fn pass_on(error: ChildStderr) -> Option<String> {
    let mut last = None;
    for line in BufReader::new(error).lines().map_while(Result::ok) {
        match line.strip_prefix(ERROR) {
            Some(error) => last = Some(error.to_owned()),
            // Nobody is left to tell when standard error is closed.
            None => drop(std::io::stderr().write_all(format!("{line}\n").as_bytes())),
        }
    }
    last
}
