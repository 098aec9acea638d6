//! One direction of one connection. An [`OutConnection`] sends queued frames, many in one call, and
//! data straight out of its slice. An [`InConnection`] receives frames through a small buffer and
//! data straight into its slice.
//!
//! A connection that speaks TLS copies once on each side: frames and data from their places to the
//! place where they are sealed, and from the place where they are opened to theirs. Where the
//! kernel opens records, it does so into the places of the data, as from a connection in clear. A
//! connection in clear asks once a call whether it is one.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use super::frame::Encoded;
use super::memory::Gather;
use crate::Rank;
use crate::control::ProtectedSocket;
use crate::device::{ProtocolViolation, TransferId};
use crate::region::Slice;
use crate::signals::Inline;
use crate::tls::{KernelReader, PLAIN_BYTES_MAX, RECORDS_AT_ONCE, ReadFailure, TlsReader, TlsWriter};

/// Receive buffer of a connection, in bytes: large enough for many small frames a call, small
/// enough that few bytes of a large frame are copied twice.
const RECEIVE_BUFFER_BYTES: usize = 16 << 10;

/// Bytes that one connection receives in one poll at most, so that polls stay short and the other
/// connections get their turn.
const RECEIVE_BYTES_PER_POLL: usize = 1 << 20;

/// The data that follow a frame on the wire.
pub(super) enum Body {
    Nothing,
    Inline(Inline),
    Slice(Slice),
}

impl Body {
    fn len(&self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Inline(inline) => inline.len(),
            Self::Slice(slice) => slice.len(),
        }
    }
}

/// The effect of a frame having been accepted by the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendCompletion {
    Nothing,
    /// This transfer is complete.
    Transfer(TransferId),
    /// A part of a transfer is complete.
    Part(u64),
    /// An answer was sent.
    Answer,
    /// The answer to a drain mark was sent on this connection, and all answers before it.
    DrainAnswer(usize),
    /// The bye was sent.
    Bye,
}

/// A frame to send.
struct OutFrame {
    head: Encoded,
    body: Body,
    completion: SendCompletion,
}

impl OutFrame {
    fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    /// Copies its bytes from byte `at` on, as many as fit; returns their number.
    fn load(&self, at: usize, bytes: &mut [u8]) -> usize {
        let head = &self.head.as_bytes()[at.min(self.head.len())..];
        let from_head = head.len().min(bytes.len());
        bytes[..from_head].copy_from_slice(&head[..from_head]);
        let from = at.saturating_sub(self.head.len());
        let count = (self.body.len() - from).min(bytes.len() - from_head);
        let rest = &mut bytes[from_head..from_head + count];
        match &self.body {
            Body::Nothing => {}
            Body::Inline(inline) => rest.copy_from_slice(&inline.as_bytes()[from..from + count]),
            Body::Slice(slice) => slice.load_at(from, rest),
        }
        from_head + count
    }
}

/// The sending end of a connection.
pub(super) struct OutConnection {
    socket: Socket,
    /// Present if the connection speaks TLS.
    sealing: Option<Box<Sealing>>,
    queue: VecDeque<OutFrame>,
    /// Bytes of the first frame that have been sent.
    sent: usize,
    /// The socket took fewer bytes than it was given.
    blocked: bool,
}

/// What seals a connection's bytes.
struct Sealing {
    writer: TlsWriter,
    /// Bytes of the queue, behind those that count as sent, of which the records wait.
    waiting: usize,
}

impl OutConnection {
    pub(super) fn new(connection: ProtectedSocket) -> Self {
        let (socket, writer, _) = connection.split();
        Self {
            socket: Socket::new(socket),
            sealing: writer.map(|writer| Box::new(Sealing { writer, waiting: 0 })),
            queue: VecDeque::with_capacity(64),
            sent: 0,
            blocked: false,
        }
    }

    /// Queues a frame with the data that follow it.
    pub(super) fn push(&mut self, head: Encoded, body: Body, completion: SendCompletion) {
        self.queue.push_back(OutFrame { head, body, completion });
    }

    /// Whether epoll reports, as an event of this peer, that the socket takes more.
    pub(super) fn watch(&mut self, epoll: &OwnedFd, peer: Rank, wanted: bool) -> rustix::io::Result<()> {
        self.socket.watch(epoll, peer, epoll::EventFlags::OUT, wanted)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether frames wait and the socket is not known to be full.
    pub(super) fn is_ready(&self) -> bool {
        !self.queue.is_empty() && !self.blocked
    }

    /// Sends what the socket takes; appends the effects to `written`.
    pub(super) fn flush(&mut self, written: &mut Vec<SendCompletion>) -> io::Result<()> {
        self.blocked = false;
        if self.sealing.is_some() {
            return self.flush_sealed(written);
        }
        while !self.queue.is_empty() {
            let mut gather = Gather::new();
            let mut skip = self.sent;
            for frame in &self.queue {
                if gather.room() < 2 {
                    break;
                }
                let head = frame.head.as_bytes();
                gather.push_bytes(&head[skip.min(head.len())..]);
                let from = skip.saturating_sub(head.len());
                match &frame.body {
                    Body::Nothing => {}
                    Body::Inline(inline) => gather.push_bytes(&inline.as_bytes()[from..]),
                    Body::Slice(slice) => gather.push_slice(slice, from),
                }
                skip = 0;
            }
            let offered = gather.bytes();
            match gather.send(self.socket.as_fd()) {
                Ok(count) => {
                    self.advance(count, written);
                    if count < offered {
                        self.blocked = true;
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// As [`OutConnection::flush`], through TLS: frames count as sent when the socket has taken
    /// their records.
    #[cold]
    #[inline(never)]
    fn flush_sealed(&mut self, written: &mut Vec<SendCompletion>) -> io::Result<()> {
        while let Some(sealing) = &mut self.sealing {
            while !sealing.writer.waiting().is_empty() {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                match rustix::net::send(self.socket.as_fd(), sealing.writer.waiting(), flags) {
                    Ok(count) => sealing.writer.sent(count),
                    Err(Errno::AGAIN) => {
                        self.blocked = true;
                        return Ok(());
                    }
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            let taken = std::mem::take(&mut sealing.waiting);
            self.advance(taken, written);
            if self.queue.is_empty() {
                return Ok(());
            }
            self.seal_next();
        }
        Ok(())
    }

    /// Seals the next bytes of the queue, up to [`RECORDS_AT_ONCE`] records.
    fn seal_next(&mut self) {
        let Some(sealing) = &mut self.sealing else { return };
        let mut frames = self.queue.iter();
        let (mut frame, mut at) = (frames.next(), self.sent);
        let mut left = self.queue.iter().map(OutFrame::len).sum::<usize>() - self.sent;
        for _ in 0..RECORDS_AT_ONCE {
            let len = left.min(PLAIN_BYTES_MAX);
            if len == 0 {
                return;
            }
            sealing.writer.seal_record(len, |mut room| {
                while let Some(current) = frame
                    && !room.is_empty()
                {
                    let count = current.load(at, room);
                    room = &mut room[count..];
                    at += count;
                    if at == current.len() {
                        (frame, at) = (frames.next(), 0);
                    }
                }
            });
            sealing.waiting += len;
            left -= len;
        }
    }

    /// Frames of the queue whose bytes have begun to be sent, or sealed.
    fn begun(&self) -> usize {
        let mut left = self.sent + self.sealing.as_ref().map_or(0, |sealing| sealing.waiting);
        self.queue
            .iter()
            .take_while(|frame| {
                let has_begun = left > 0;
                left = left.saturating_sub(frame.len());
                has_begun
            })
            .count()
    }

    fn advance(&mut self, count: usize, written: &mut Vec<SendCompletion>) {
        self.sent += count;
        while let Some(first) = self.queue.front() {
            let len = first.len();
            if self.sent < len {
                break;
            }
            self.sent -= len;
            written.push(first.completion);
            self.queue.pop_front();
        }
    }

    /// Drops the frames that have not begun to be sent. A frame that has begun stays, so that the
    /// stream stays well-formed.
    pub(super) fn abandon_waiting(&mut self, abandoned: &mut Vec<SendCompletion>) {
        let keep = self.begun();
        abandoned.extend(self.queue.drain(keep..).map(|frame| frame.completion));
    }

    /// Drops all frames.
    pub(super) fn abandon(&mut self, abandoned: &mut Vec<SendCompletion>) {
        self.sent = 0;
        if let Some(sealing) = &mut self.sealing {
            sealing.waiting = 0;
        }
        abandoned.extend(self.queue.drain(..).map(|frame| frame.completion));
    }
}

/// The destination of the data that are arriving.
pub(super) struct Incoming<T> {
    /// `None`: the frame named memory that does not exist, and the data are dropped.
    dst: Option<Slice>,
    /// Bytes that have arrived.
    at: usize,
    /// Bytes that are still to arrive.
    remaining: u64,
    /// The action when all data have arrived.
    action: T,
}

impl<T> Incoming<T> {
    /// `bytes` are about to arrive. Without a destination they are dropped.
    pub(super) fn new(dst: Option<Slice>, bytes: u64, action: T) -> Self {
        Self { dst, at: 0, remaining: bytes, action }
    }
}

/// The result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// There may be more.
    More,
    /// No more bytes for now.
    Drained,
    /// The peer has closed its end.
    Closed,
    /// What has come is not what the peer has sent.
    Violated(ProtocolViolation),
}

/// The receiving end of a connection.
pub(super) struct InConnection<T> {
    socket: Socket,
    /// Present if the connection speaks TLS, and the kernel does not open its records.
    reader: Option<Box<TlsReader>>,
    /// Present if the kernel does.
    kernel: Option<KernelReader>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// The data that are arriving; `None` between frames.
    incoming: Option<Incoming<T>>,
    /// Bytes received in this poll.
    spent: usize,
}

impl<T> InConnection<T> {
    pub(super) fn new(connection: ProtectedSocket) -> Self {
        let (socket, _, reader) = connection.split();
        let (reader, kernel) = match reader.map(|reader| KernelReader::take_over(socket.as_fd(), reader)) {
            None => (None, None),
            Some(Ok(kernel)) => (None, Some(kernel)),
            Some(Err(reader)) => (Some(reader), None),
        };
        Self {
            socket: Socket::new(socket),
            reader,
            kernel,
            buffer: vec![0; RECEIVE_BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            incoming: None,
            spent: 0,
        }
    }

    /// Whether epoll reports, as an event of this peer, that there is something to receive.
    pub(super) fn watch(&mut self, epoll: &OwnedFd, peer: Rank, wanted: bool) -> rustix::io::Result<()> {
        self.socket.watch(epoll, peer, epoll::EventFlags::IN, wanted)
    }

    /// Whether data are arriving, which [`InConnection::settle`] moves.
    pub(super) fn is_amid_data(&self) -> bool {
        self.incoming.is_some()
    }

    /// The data that follow the frame which was consumed, if any.
    pub(super) fn expect_data(&mut self, incoming: Option<Incoming<T>>) {
        self.incoming = incoming;
    }

    /// Bytes that have arrived and were not consumed.
    pub(super) fn buffered(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    pub(super) fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    pub(super) fn start_poll(&mut self) {
        self.spent = 0;
    }

    /// Whether any bytes have come in this poll.
    pub(super) fn has_received(&self) -> bool {
        self.spent > 0
    }

    /// Whether this poll may receive no more. Records that this process holds are opened in any
    /// case: no socket tells of them.
    pub(super) fn is_spent(&self) -> bool {
        let has_more = || self.reader.as_ref().is_some_and(|reader| reader.has_whole());
        self.spent >= RECEIVE_BYTES_PER_POLL && !has_more()
    }

    /// Moves buffered bytes to the destination of the arriving data; returns the action when all of
    /// them have arrived.
    pub(super) fn settle(&mut self) -> Option<T> {
        let incoming = self.incoming.as_mut()?;
        let count = usize::try_from(incoming.remaining).unwrap_or(usize::MAX).min(self.end - self.start);
        if count > 0 {
            if let Some(dst) = &incoming.dst {
                dst.store_at(incoming.at, &self.buffer[self.start..self.start + count]);
            }
            incoming.at += count;
            incoming.remaining -= count as u64;
            self.consume(count);
        }
        match &self.incoming {
            Some(incoming) if incoming.remaining == 0 => self.incoming.take().map(|incoming| incoming.action),
            _ => None,
        }
    }

    /// Receives once. Before, the buffered bytes must have been settled, or be too few for a frame.
    pub(super) fn receive(&mut self) -> io::Result<Received> {
        if self.reader.is_some() {
            return self.receive_sealed();
        }
        let (asked, result) = match &mut self.incoming {
            Some(Incoming { dst: Some(dst), at, remaining, .. }) => {
                let remaining_bytes = usize::try_from(*remaining).unwrap_or(usize::MAX);
                let limit = remaining_bytes.min(RECEIVE_BYTES_PER_POLL);
                // The bytes after the data go to the buffer, in the same call.
                let tail = if limit == remaining_bytes { &mut self.buffer[..] } else { &mut [] };
                let asked = limit + tail.len();
                let result = dst.receive(self.socket.as_fd(), *at, limit, tail);
                if let Ok(count) = result {
                    let direct = count.min(limit);
                    *at += direct;
                    *remaining -= direct as u64;
                    (self.start, self.end) = (0, count - direct);
                }
                (asked, result)
            }
            _ => {
                if self.start > 0 {
                    self.buffer.copy_within(self.start..self.end, 0);
                    (self.start, self.end) = (0, self.end - self.start);
                }
                let room = &mut self.buffer[self.end..];
                let asked = room.len();
                let result = rustix::net::recv(self.socket.as_fd(), room, RecvFlags::DONTWAIT)
                    .map(|(count, _)| count)
                    .map_err(io::Error::from);
                if let Ok(count) = result {
                    self.end += count;
                }
                (asked, result)
            }
        };
        match result {
            Ok(0) => Ok(Received::Closed),
            Ok(count) => {
                self.spent += count;
                if let Some(kernel) = &mut self.kernel {
                    kernel.has_received();
                }
                Ok(if count < asked { Received::Drained } else { Received::More })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Received::Drained),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Received::More),
            Err(error) => {
                let Some(kernel) = &mut self.kernel else { return Err(error) };
                match kernel.failed(self.socket.as_fd(), error) {
                    Ok(()) => Ok(Received::More),
                    Err(ReadFailure::Fault(fault)) => Ok(Received::Violated(fault.into())),
                    Err(ReadFailure::System(error)) => Err(error),
                }
            }
        }
    }

    /// As [`InConnection::receive`], through TLS: moves the opened bytes of one record, and
    /// receives once if there are none.
    #[cold]
    #[inline(never)]
    fn receive_sealed(&mut self) -> io::Result<Received> {
        let Some(reader) = &mut self.reader else { return Ok(Received::Drained) };
        let mut is_drained = false;
        let has_plain = match reader.plain() {
            Ok(plain) => !plain.is_empty(),
            Err(fault) => return Ok(Received::Violated(fault.into())),
        };
        if !has_plain {
            let room = reader.room(RECORDS_AT_ONCE);
            let asked = room.len();
            match rustix::net::recv(self.socket.as_fd(), room, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Ok(Received::Closed),
                Ok((count, _)) => {
                    reader.received(count);
                    is_drained = count < asked;
                }
                Err(Errno::AGAIN) => return Ok(Received::Drained),
                Err(Errno::INTR) => return Ok(Received::More),
                Err(errno) => return Err(errno.into()),
            }
        }
        let plain = match reader.plain() {
            Ok(plain) => plain,
            Err(fault) => return Ok(Received::Violated(fault.into())),
        };
        if plain.is_empty() {
            return Ok(if is_drained { Received::Drained } else { Received::More });
        }
        let count = match &mut self.incoming {
            Some(Incoming { dst: Some(dst), at, remaining, .. }) => {
                let count = usize::try_from(*remaining).unwrap_or(usize::MAX).min(plain.len());
                dst.store_at(*at, &plain[..count]);
                *at += count;
                *remaining -= count as u64;
                count
            }
            _ => {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                let count = plain.len().min(self.buffer.len() - self.end);
                self.buffer[self.end..self.end + count].copy_from_slice(&plain[..count]);
                self.end += count;
                count
            }
        };
        reader.take(count);
        self.spent += count;
        // Other records may be whole, of which the socket tells nothing. Without them a short
        // message costs one call, as in clear.
        Ok(if is_drained && !reader.has_whole() { Received::Drained } else { Received::More })
    }
}

/// A data socket. Dropping it closes the connection, even if a forked child keeps a descriptor.
struct Socket {
    file: OwnedFd,
    /// Whether epoll reports that it is ready.
    is_watched: bool,
}

impl Socket {
    fn new(file: OwnedFd) -> Self {
        Self { file, is_watched: false }
    }

    /// Adds the socket to epoll or removes it, if that changes.
    fn watch(
        &mut self,
        epoll: &OwnedFd,
        peer: Rank,
        readiness: epoll::EventFlags,
        wanted: bool,
    ) -> rustix::io::Result<()> {
        if wanted == self.is_watched {
            return Ok(());
        }
        if wanted {
            epoll::add(epoll, &self.file, epoll::EventData::new_u64(u64::from(peer)), readiness)?;
        } else {
            epoll::delete(epoll, &self.file)?;
        }
        self.is_watched = wanted;
        Ok(())
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Fails when the connection is closed already.
        let _ = rustix::net::shutdown(&self.file, Shutdown::Both);
    }
}
