//! Bytes with file descriptors over sockets, never blocking.
//!
//! On Unix sockets each send is a packet, which keeps a frame and its descriptors together, so
//! nothing has to be reassembled. The functions that send and receive serve TCP too, without
//! descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};

use crate::auth::random_bytes;
use crate::device::{Address, ProtocolViolation};

/// The most file descriptors that one packet carries.
pub(crate) const FILES_MAX: usize = 4;

/// Connections that wait to be accepted; more than a host has ranks.
const BACKLOG: i32 = 4096;

/// Random bytes in a listener's name.
const NAME_BYTES: usize = 16;

const SCHEME: &str = "shm:";

/// A listener at a new random name, which only its address contains.
pub(crate) fn bind_anywhere() -> io::Result<(OwnedFd, Address)> {
    let name: [u8; NAME_BYTES] = random_bytes();
    let hexadecimal: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
    let listener = bind_named(&hexadecimal)?;
    Ok((listener, Address(format!("{SCHEME}{hexadecimal}"))))
}

/// A listener at this name.
pub(crate) fn bind_named(name: &str) -> io::Result<OwnedFd> {
    let listener = socket()?;
    bind(&listener, &socket_address(name)?)?;
    listen(&listener, BACKLOG)?;
    Ok(listener)
}

/// The name in an address of this fabric.
pub(crate) fn parse(address: &Address) -> Option<&str> {
    parse_text(&address.0)
}

/// The name in the text of an address.
pub(crate) fn parse_text(address: &str) -> Option<&str> {
    let name = address.strip_prefix(SCHEME)?;
    (name.len() == 2 * NAME_BYTES && name.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(name)
}

/// Connects at once, or fails; `WOULDBLOCK` when the listener's backlog is full.
pub(crate) fn dial(name: &str) -> Result<OwnedFd, Errno> {
    let stream = socket()?;
    connect(&stream, &socket_address(name)?)?;
    Ok(stream)
}

/// Accepts the next connection.
pub(crate) fn accept(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
}

/// The effective user of this process.
pub(crate) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether the process at the other end runs as the same user as this one.
pub(crate) fn is_same_user(stream: &OwnedFd) -> bool {
    peer_user(stream) == Some(own_user())
}

/// The user of the process at the other end, as the kernel recorded it at the connect.
pub(crate) fn peer_user(stream: &OwnedFd) -> Option<u32> {
    credentials(stream).map(|credentials| credentials.uid)
}

/// Whether this is a descriptor of the process at the other end, which the kernel recorded at the
/// connect. False if that is not known, as between process number spaces.
pub(crate) fn is_peer_process(stream: &OwnedFd, process: &OwnedFd) -> bool {
    let Some(credentials) = credentials(stream).filter(|credentials| credentials.pid > 0) else {
        return false;
    };
    let name = format!("/proc/self/fdinfo/{}", process.as_raw_fd());
    let Ok(info) = std::fs::read_to_string(name) else { return false };
    let number = info.lines().find_map(|line| line.strip_prefix("Pid:"));
    number.and_then(|number| number.trim().parse().ok()) == Some(credentials.pid)
}

/// The process at the other end, as the kernel recorded it at the connect.
fn credentials(stream: &OwnedFd) -> Option<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: libc::uid_t::MAX, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // rustix's call has no place for the process id 0 that the kernel gives across process
    // namespaces. SAFETY: the kernel writes at most `length` bytes into `credentials`, plain
    // integers.
    let failed = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    (failed == 0).then_some(credentials)
}

/// Sends bytes; returns how many. A Unix socket takes all of them, as one packet, or none.
pub(crate) fn send(stream: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(files));
        debug_assert!(fits, "no frame carries more than {FILES_MAX} files");
    }
    sendmsg(stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// One packet, or bytes of a TCP connection.
#[derive(Debug, Default)]
pub(crate) struct Packet {
    /// Its length; zero at the end of the stream.
    pub(crate) bytes: usize,
    pub(crate) files: Vec<OwnedFd>,
    /// This process may open no more files, so the packet's descriptors were dropped.
    pub(crate) files_lost: bool,
}

/// Why no packet was received.
#[derive(Debug)]
pub(crate) enum ReceiveError {
    System(Errno),
    Violation(ProtocolViolation),
}

/// Receives one packet into `buffer`. A packet without bytes is the end of the stream, after all
/// packets that were sent before it.
pub(crate) fn receive(stream: &OwnedFd, buffer: &mut [u8]) -> Result<Packet, ReceiveError> {
    let packet = receive_once(stream, buffer)?;
    if packet.bytes > 0 {
        return Ok(packet);
    }
    // The kernel first looks for a packet, then, separately, for the end of the stream. If a packet
    // and the end both come in between, it reports the end. Nothing is sent after the end, so a
    // second call finds every packet.
    receive_once(stream, buffer)
}

fn receive_once(stream: &OwnedFd, buffer: &mut [u8]) -> Result<Packet, ReceiveError> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = recvmsg(stream.as_fd(), &mut [IoSliceMut::new(buffer)], &mut ancillary, flags)
        .map_err(ReceiveError::System)?;
    let mut packet = Packet { bytes: message.bytes, ..Packet::default() };
    for part in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(files) = part {
            packet.files.extend(files);
        }
    }
    if message.flags.contains(ReturnFlags::TRUNC) {
        return Err(ReceiveError::Violation(ProtocolViolation::OversizedFrame));
    }
    packet.files_lost = message.flags.contains(ReturnFlags::CTRUNC);
    Ok(packet)
}

fn socket() -> Result<OwnedFd, Errno> {
    socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

fn socket_address(name: &str) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("pleach.{name}").as_bytes())
}
