//! Sockets of the processes that were started here: who listens at a port, and the connections
//! between two of them, which can be cut.
//!
//! The kernel gives a process duplicates of the files of those that it may trace (`pidfd_getfd`,
//! from Linux 5.6 on), and its children are among these unless the system forbids it. A socket that
//! is shut down through a duplicate is shut down for both ends, as if somebody between them had
//! ended the connection.
//! **Invariant:** no duplicate outlives a call, because the other end would not see the end of a
//! process that has one elsewhere.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{Shutdown, getpeername, getsockname, shutdown, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Whether a process of this group listens at this port.
pub(crate) fn listens(group: Pid, port: u16) -> io::Result<bool> {
    let is_there = |socket: &OwnedFd| {
        let local = getsockname(socket).ok().and_then(|address| SocketAddr::try_from(address).ok());
        local.is_some_and(|local| local.port() == port) && sockopt::socket_acceptconn(socket) == Ok(true)
    };
    Ok(sockets(&processes(group)?)?.iter().any(is_there))
}

/// Cuts all connections of a process in one group to one in the other. Returns how many there were.
pub(crate) fn cut(one: Pid, other: Pid) -> io::Result<usize> {
    cut_between(&processes(one)?, &processes(other)?)
}

/// Cuts all connections of the ones to the others. Returns how many there were.
pub(crate) fn cut_between(ones: &[Pid], others: &[Pid]) -> io::Result<usize> {
    let ends: Vec<_> = sockets(others)?.iter().filter_map(ends).collect();
    let mut cut = 0;
    for socket in sockets(ones)? {
        let is_theirs = match self::ends(&socket) {
            Some((local, remote)) => ends.contains(&(remote, local)),
            // Of one host: who has connected, or who has listened.
            None => sockopt::socket_peercred(&socket).is_ok_and(|peer| others.contains(&peer.pid)),
        };
        if is_theirs && shutdown(&socket, Shutdown::Both).is_ok() {
            cut += 1;
        }
    }
    Ok(cut)
}

/// The local and the remote address of a connection over IP.
fn ends(socket: &OwnedFd) -> Option<(SocketAddr, SocketAddr)> {
    let local = SocketAddr::try_from(getsockname(socket).ok()?).ok()?;
    Some((local, SocketAddr::try_from(getpeername(socket).ok()??).ok()?))
}

/// The group of a process.
pub(crate) fn group_of(process: Pid) -> Option<Pid> {
    let words = std::fs::read(format!("/proc/{}/stat", process.as_raw_pid())).ok()?;
    group_in(&String::from_utf8_lossy(&words))
}

/// The group that the line of a process names.
fn group_in(stat: &str) -> Option<Pid> {
    // Behind its name, which ends with a bracket: its state, its parent, and its group. Of a
    // process that is just being reaped the kernel says -1.
    let (_, words) = stat.rsplit_once(')')?;
    let group = words.split_ascii_whitespace().nth(2)?.parse().ok();
    group.filter(|group| *group > 0).and_then(Pid::from_raw)
}

/// The processes of a group.
fn processes(group: Pid) -> io::Result<Vec<Pid>> {
    let mut processes = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let number = entry?.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        processes.extend(number.filter(|number| group_of(*number) == Some(group)));
    }
    Ok(processes)
}

/// Duplicates of the sockets of processes.
fn sockets(processes: &[Pid]) -> io::Result<Vec<OwnedFd>> {
    let each: Vec<Vec<OwnedFd>> = processes.iter().copied().map(sockets_of).collect::<io::Result<_>>()?;
    Ok(each.into_iter().flatten().collect())
}

/// Duplicates of the sockets of a process; none if it has ended.
fn sockets_of(process: Pid) -> io::Result<Vec<OwnedFd>> {
    let Ok(files) = std::fs::read_dir(format!("/proc/{}/fd", process.as_raw_pid())) else {
        return Ok(Vec::new());
    };
    let Ok(of) = pidfd_open(process, PidfdFlags::empty()) else { return Ok(Vec::new()) };
    let mut sockets = Vec::new();
    for file in files.filter_map(Result::ok) {
        let is_socket = std::fs::read_link(file.path())
            .is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"socket:"));
        let Some(number) = file.file_name().to_str().and_then(|name| name.parse().ok()).filter(|_| is_socket)
        else {
            continue;
        };
        match pidfd_getfd(&of, number, PidfdGetfdFlags::empty()) {
            Ok(socket) => sockets.push(socket),
            // It has closed it, or has ended.
            Err(Errno::BADF | Errno::SRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(sockets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_just_being_reaped_is_in_no_group() {
        let group = |stat| group_in(stat).map(Pid::as_raw_pid);
        assert_eq!(group("7 (a (strange) name) S 1 42 42 0 -1 4194304"), Some(42));
        assert_eq!(group("7 (pleach) X 0 -1 -1 0 -1 4194304"), None);
        assert_eq!(group("7 (kthreadd) S 0 0 0 0 -1 2129984"), None);
        assert_eq!(group("7 (cut"), None);
    }
}
