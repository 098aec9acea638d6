//! One end of a control connection: frames, and the bytes of tensors between them. Never blocks.
//!
//! A connection begins in clear. [`Connection::secure`] begins a handshake of TLS; all bytes after
//! it are sealed and opened here, one copy on each side.
//!
//! **Invariant:** bytes are taken in their order. A frame is given out whole. The bytes of a tensor
//! go straight into the memory that was made for them, at most as many as were announced. No byte
//! that came in clear is taken after a handshake of TLS has begun.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pleach_transport::MESSAGE_BYTES_MAX;
use pleach_transport::device::TlsFault;
use pleach_transport::tls::{PLAIN_BYTES_MAX, RECORDS_AT_ONCE, Session, TlsHandshake};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, send, sendmsg};

use super::frame::{self, FrameKind, HEADER_BYTES};
use super::tensor::SharedTensor;

/// The buffer for frames, in bytes: several frames at once.
const BUFFER_BYTES: usize = 16 * (HEADER_BYTES + MESSAGE_BYTES_MAX);

/// Pieces that are sent by one system call.
const PIECES_MAX: usize = 16;

/// Frames and tensors that wait to be sent. A peer that causes more and reads none is not read
/// either.
pub(crate) const OUTGOING_MAX: usize = 1 << 14;

/// Why a connection has ended.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConnectionEnd {
    /// The other end closed it, or its process ended.
    #[error("its connection closed")]
    Closed,
    /// The operating system reports an error.
    #[error("its connection broke ({0})")]
    Broke(io::ErrorKind),
    /// Bytes that are no frame.
    #[error("it broke the protocol: a malformed frame")]
    Malformed,
    /// TLS with it failed.
    #[error("no TLS with it: {0}")]
    Tls(#[from] TlsFault),
    /// There is no memory for a tensor.
    #[error("there is no memory here for a tensor of {bytes} bytes")]
    Memory {
        /// The length of the tensor.
        bytes: u64,
    },
}

impl From<Errno> for ConnectionEnd {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::CONNRESET | Errno::PIPE => Self::Closed,
            errno => Self::Broke(io::Error::from(errno).kind()),
        }
    }
}

/// What came.
pub(crate) enum Incoming<'a> {
    /// A frame.
    Frame(FrameKind, &'a [u8]),
    /// All bytes of the tensor that [`Connection::expect`] announced.
    Tensor(Vec<u64>),
    /// The handshake that [`Connection::secure`] began is over. A proof that covers these bytes
    /// holds on this connection alone.
    Secured([u8; 32]),
}

/// How bytes go between the socket and the rest of a connection.
enum Protection {
    /// As they are.
    Clear,
    /// They are a handshake of TLS.
    Handshake(Box<TlsHandshake>),
    /// By TLS.
    Tls(Box<Sealed>),
}

struct Sealed {
    session: Session,
    /// Bytes of the queue, behind those that count as sent, of which the records wait.
    waiting: usize,
}

/// See the module.
pub(crate) struct Connection {
    socket: OwnedFd,
    protection: Protection,
    /// Bytes that are sent as they are, before all others.
    raw: Vec<u8>,
    buffer: Box<[u8]>,
    /// The bytes of the buffer that were received and not given out.
    start: usize,
    end: usize,
    /// The bytes of a tensor that come before the next frame.
    body: Option<Body>,
    /// Bytes to be skipped before the next frame.
    skip: u64,
    outgoing: VecDeque<Outgoing>,
    /// The bytes of the first of them that were sent.
    sent: usize,
}

struct Body {
    words: Vec<u64>,
    bytes: usize,
    filled: usize,
}

enum Outgoing {
    Frame(Vec<u8>),
    Tensor(SharedTensor),
}

impl Outgoing {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Frame(bytes) => bytes,
            Self::Tensor(tensor) => tensor.as_bytes(),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Connection {
    /// A connection over a socket that does not block.
    pub(crate) fn new(socket: OwnedFd) -> Self {
        let buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
        let (outgoing, body) = (VecDeque::new(), None);
        let (protection, raw) = (Protection::Clear, Vec::new());
        Self { socket, protection, raw, buffer, start: 0, end: 0, body, skip: 0, outgoing, sent: 0 }
    }

    /// Begins a handshake of TLS behind the frames that are queued; [`Incoming::Secured`] is its
    /// end. Bytes that have come behind the last frame are no part of it, and nobody sends any.
    pub(crate) fn secure(&mut self, mut handshake: TlsHandshake) -> Result<(), ConnectionEnd> {
        if self.start < self.end {
            return Err(ConnectionEnd::Malformed);
        }
        for piece in std::mem::take(&mut self.outgoing) {
            self.raw.extend(&piece.as_bytes()[std::mem::take(&mut self.sent)..]);
        }
        self.raw.append(&mut handshake.take_outgoing());
        self.protection = Protection::Handshake(Box::new(handshake));
        Ok(())
    }

    /// So many bytes of a tensor follow.
    pub(crate) fn expect(&mut self, bytes: u64) -> Result<(), ConnectionEnd> {
        let too_large = ConnectionEnd::Memory { bytes };
        let count = usize::try_from(bytes).map_err(|_| too_large.clone())?;
        let words = count.div_ceil(size_of::<u64>());
        // Asked first, because an allocation that fails would end the process. Untouched pages take
        // no memory.
        Vec::<u64>::new().try_reserve_exact(words).map_err(|_| too_large)?;
        self.body = Some(Body { words: vec![0; words], bytes: count, filled: 0 });
        Ok(())
    }

    /// So many bytes follow that nobody wants.
    pub(crate) fn skip(&mut self, bytes: u64) {
        self.skip = bytes;
    }

    /// The next frame or tensor that has come whole; `None`: more bytes are needed.
    pub(crate) fn receive(&mut self) -> Result<Option<Incoming<'_>>, ConnectionEnd> {
        loop {
            if let Protection::Handshake(_) = self.protection {
                return Ok(self.shake_hands()?.map(Incoming::Secured));
            }
            self.take_buffered();
            if self.body.as_ref().is_some_and(|body| body.filled == body.bytes) {
                let words = self.body.take().map(|body| body.words).unwrap_or_default();
                return Ok(Some(Incoming::Tensor(words)));
            }
            if self.body.is_none()
                && self.skip == 0
                && let Some((kind, content)) = self.buffered_frame()?
            {
                return Ok(Some(Incoming::Frame(kind, &self.buffer[content])));
            }
            if !self.receive_some()? {
                return Ok(None);
            }
        }
    }

    /// Moves bytes of the buffer to where they belong.
    fn take_buffered(&mut self) {
        if let Some(body) = &mut self.body {
            let count = (body.bytes - body.filled).min(self.end - self.start);
            let into = &mut bytemuck::cast_slice_mut(&mut body.words)[body.filled..body.filled + count];
            into.copy_from_slice(&self.buffer[self.start..self.start + count]);
            (body.filled, self.start) = (body.filled + count, self.start + count);
        } else if self.skip > 0 {
            let count = self.skip.min((self.end - self.start) as u64);
            (self.skip, self.start) = (self.skip - count, self.start + count as usize);
        }
    }

    /// The frame at the beginning of the buffer, if it is whole: its kind, and where its content
    /// is.
    fn buffered_frame(&mut self) -> Result<Option<(FrameKind, std::ops::Range<usize>)>, ConnectionEnd> {
        let buffered = &self.buffer[self.start..self.end];
        let Some(header) = buffered.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let (kind, length) = frame::decode(*header).map_err(|_| ConnectionEnd::Malformed)?;
        if buffered.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        let content = self.start + HEADER_BYTES;
        self.start = content + length;
        Ok(Some((kind, content..content + length)))
    }

    /// Goes on with a handshake of TLS; `None`: more bytes are needed.
    fn shake_hands(&mut self) -> Result<Option<[u8; 32]>, ConnectionEnd> {
        let Protection::Handshake(handshake) = &mut self.protection else { return Ok(None) };
        let is_over = loop {
            let Some(count) = receive_bytes(&self.socket, handshake.room())? else { break false };
            let received = handshake.received(count);
            // After an error these bytes tell the other end.
            self.raw.append(&mut handshake.take_outgoing());
            match received {
                Ok(false) => {}
                Ok(true) => break true,
                Err(fault) => {
                    let _ = self.flush_raw();
                    return Err(fault.into());
                }
            }
        };
        // An error that lasts is met by whoever receives or sends next.
        let _ = self.flush_raw();
        let handshake = match std::mem::replace(&mut self.protection, Protection::Clear) {
            Protection::Handshake(handshake) if is_over => handshake,
            goes_on => {
                self.protection = goes_on;
                return Ok(None);
            }
        };
        let session = handshake.finish()?;
        let binding = *session.binding();
        self.protection = Protection::Tls(Box::new(Sealed { session, waiting: 0 }));
        Ok(Some(binding))
    }

    /// Receives bytes into the tensor or into the buffer, through TLS. False: there are none.
    fn receive_sealed(&mut self) -> Result<bool, ConnectionEnd> {
        let Protection::Tls(sealed) = &mut self.protection else { return Ok(false) };
        let reader = sealed.session.reader();
        // Nobody expects a tensor of a peer that has not proved the secret, which costs one record.
        let records = if self.body.is_some() { RECORDS_AT_ONCE } else { 1 };
        while reader.plain()?.is_empty() {
            match receive_bytes(&self.socket, reader.room(records))? {
                Some(count) => reader.received(count),
                None => return Ok(false),
            }
        }
        let plain = reader.plain()?;
        let count = match &mut self.body {
            Some(body) => {
                let count = plain.len().min(body.bytes - body.filled);
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut body.words);
                bytes[body.filled..body.filled + count].copy_from_slice(&plain[..count]);
                body.filled += count;
                count
            }
            None => {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                let count = plain.len().min(self.buffer.len() - self.end);
                self.buffer[self.end..self.end + count].copy_from_slice(&plain[..count]);
                self.end += count;
                count
            }
        };
        reader.take(count);
        Ok(true)
    }

    /// Receives bytes into the tensor or into the buffer. False: there are none.
    fn receive_some(&mut self) -> Result<bool, ConnectionEnd> {
        if let Protection::Tls(_) = self.protection {
            return self.receive_sealed();
        }
        let received = match &mut self.body {
            Some(body) => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut body.words);
                let received = receive_bytes(&self.socket, &mut bytes[body.filled..body.bytes])?;
                body.filled += received.unwrap_or(0);
                received
            }
            None => {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                let received = receive_bytes(&self.socket, &mut self.buffer[self.end..])?;
                self.end += received.unwrap_or(0);
                received
            }
        };
        Ok(received.is_some())
    }

    /// Queues a frame.
    pub(crate) fn queue(&mut self, kind: FrameKind, content: &[u8]) {
        self.outgoing.push_back(Outgoing::Frame(frame::encode(kind, content)));
    }

    /// Queues bytes that are frames already.
    pub(crate) fn queue_encoded(&mut self, frames: Vec<u8>) {
        if !frames.is_empty() {
            self.outgoing.push_back(Outgoing::Frame(frames));
        }
    }

    /// Queues the bytes of a tensor.
    pub(crate) fn queue_tensor(&mut self, tensor: SharedTensor) {
        if !tensor.as_bytes().is_empty() {
            self.outgoing.push_back(Outgoing::Tensor(tensor));
        }
    }

    /// The frames and tensors that wait to be sent.
    pub(crate) fn queued(&self) -> usize {
        self.outgoing.len()
    }

    /// Sends what is queued, as far as the system takes it. True: all.
    pub(crate) fn flush(&mut self) -> Result<bool, ConnectionEnd> {
        if !self.flush_raw()? {
            return Ok(false);
        }
        if let Protection::Tls(_) = self.protection {
            return self.flush_sealed();
        }
        while !self.outgoing.is_empty() {
            let pieces = self.outgoing.iter().take(PIECES_MAX).enumerate();
            let pieces = pieces.map(|(number, piece)| {
                let bytes = piece.as_bytes();
                IoSlice::new(if number == 0 { &bytes[self.sent..] } else { bytes })
            });
            let pieces: Vec<IoSlice<'_>> = pieces.collect();
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.socket, &pieces, &mut SendAncillaryBuffer::default(), flags) {
                Ok(count) => self.sent(count),
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(true)
    }

    /// Sends the bytes that go as they are. True: all.
    fn flush_raw(&mut self) -> Result<bool, ConnectionEnd> {
        while !self.raw.is_empty() {
            let Some(count) = send_bytes(&self.socket, &self.raw)? else { return Ok(false) };
            self.raw.drain(..count);
        }
        Ok(true)
    }

    /// As [`Connection::flush`], through TLS: bytes count as sent when the system has taken their
    /// records.
    fn flush_sealed(&mut self) -> Result<bool, ConnectionEnd> {
        while let Protection::Tls(sealed) = &mut self.protection {
            let writer = sealed.session.writer();
            while !writer.waiting().is_empty() {
                let Some(count) = send_bytes(&self.socket, writer.waiting())? else { return Ok(false) };
                writer.sent(count);
            }
            let taken = std::mem::take(&mut sealed.waiting);
            self.sent(taken);
            if self.outgoing.is_empty() {
                return Ok(true);
            }
            self.seal_next();
        }
        Ok(true)
    }

    /// Seals the next bytes of the queue, up to [`RECORDS_AT_ONCE`] records.
    fn seal_next(&mut self) {
        let Protection::Tls(sealed) = &mut self.protection else { return };
        let mut pieces = self.outgoing.iter().map(Outgoing::as_bytes);
        let mut left = pieces.clone().map(<[u8]>::len).sum::<usize>() - self.sent;
        // Less than the first piece has been sent.
        let mut piece = pieces.next().map_or(&[][..], |first| &first[self.sent..]);
        for _ in 0..RECORDS_AT_ONCE {
            let len = left.min(PLAIN_BYTES_MAX);
            if len == 0 {
                return;
            }
            sealed.session.writer().seal_record(len, |room| {
                let mut filled = 0;
                while filled < len {
                    if piece.is_empty() {
                        piece = pieces.next().expect("the record is as long as what is left");
                    }
                    let (now, later) = piece.split_at(piece.len().min(len - filled));
                    room[filled..filled + now.len()].copy_from_slice(now);
                    (piece, filled) = (later, filled + now.len());
                }
            });
            sealed.waiting += len;
            left -= len;
        }
    }

    fn sent(&mut self, count: usize) {
        self.sent += count;
        while let Some(first) = self.outgoing.front()
            && self.sent >= first.as_bytes().len()
        {
            self.sent -= first.as_bytes().len();
            self.outgoing.pop_front();
        }
    }
}

/// Receives at least one byte; `None`: there is none now.
fn receive_bytes(socket: &OwnedFd, bytes: &mut [u8]) -> Result<Option<usize>, ConnectionEnd> {
    loop {
        match recv(socket, &mut *bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(ConnectionEnd::Closed),
            Ok((_, count)) => return Ok(Some(count)),
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Sends at least one byte; `None`: the system takes none now.
fn send_bytes(socket: &OwnedFd, bytes: &[u8]) -> Result<Option<usize>, ConnectionEnd> {
    loop {
        match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) => return Ok(Some(count)),
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use pleach_vocabulary::DataType;

    use super::*;
    use crate::arena::ArenaLimits;
    use crate::endpoint::memory::LendableMemory;
    use crate::endpoint::tensor::TensorShape;

    fn pair() -> (Connection, UnixStream) {
        let (own, other) = UnixStream::pair().expect("a socket");
        own.set_nonblocking(true).expect("a socket");
        (Connection::new(own.into()), other)
    }

    fn next(connection: &mut Connection) -> String {
        match connection.receive() {
            Ok(None) => "nothing".to_owned(),
            Ok(Some(Incoming::Frame(kind, content))) => format!("{kind:?} {content:?}"),
            Ok(Some(Incoming::Tensor(words))) => format!("tensor {words:x?}"),
            Ok(Some(Incoming::Secured(_))) => "secured".to_owned(),
            Err(end) => end.to_string(),
        }
    }

    #[test]
    fn frames_and_tensors_are_taken_in_their_order_however_they_are_cut() {
        let bytes = [frame::encode(FrameKind::Message, b"ab"), b"12345678x".to_vec()].concat();
        let bytes = [bytes, b"skipped".to_vec(), frame::encode(FrameKind::Doorbell, b"")].concat();
        for cut in 0..bytes.len() {
            let (mut connection, mut other) = pair();
            other.write_all(&bytes[..cut]).expect("room");
            let mut seen = Vec::new();
            for part in [&[][..], &bytes[cut..]] {
                other.write_all(part).expect("room");
                loop {
                    let one = next(&mut connection);
                    if one == "nothing" {
                        break;
                    }
                    match seen.len() {
                        0 => connection.expect(9).expect("there is memory"),
                        1 => connection.skip(7),
                        _ => {}
                    }
                    seen.push(one);
                }
            }
            let expected = ["Message [97, 98]", "tensor [3837363534333231, 78]", "Doorbell []"];
            assert_eq!(seen, expected, "cut at {cut}");
            drop(other);
            assert_eq!(next(&mut connection), "its connection closed");
        }
    }

    #[test]
    fn a_large_tensor_is_sent_as_the_other_end_reads_it() {
        let (mut sender, other) = pair();
        other.set_nonblocking(true).expect("a socket");
        let mut receiver = Connection::new(other.into());
        let memory = LendableMemory::new(ArenaLimits::default());
        let shape = TensorShape::new(DataType::U8, &[3 << 20]).expect("is small");
        let mut buffer = memory.allocate(shape.bytes()).expect("there is memory");
        buffer.as_bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
        sender.queue(FrameKind::Message, b"first");
        sender.queue_tensor(SharedTensor::of_bytes(buffer, shape));
        sender.queue(FrameKind::Message, b"last");
        assert_eq!(sender.flush(), Ok(false), "the kernel does not take 3 MiB at once");
        let mut seen = Vec::new();
        while seen.len() < 3 {
            let _ = sender.flush();
            match receiver.receive().expect("is open") {
                None => {}
                Some(Incoming::Frame(_, content)) => seen.push(content.to_vec()),
                Some(Incoming::Tensor(words)) => seen.push(bytemuck::cast_slice(&words).to_vec()),
                Some(Incoming::Secured(_)) => panic!("nobody began TLS"),
            }
            if seen.len() == 1 && receiver.body.is_none() {
                receiver.expect(3 << 20).expect("there is memory");
            }
        }
        assert_eq!((&seen[0][..], &seen[2][..]), (&b"first"[..], &b"last"[..]));
        assert!(seen[1].iter().enumerate().all(|(at, byte)| *byte == at as u8));
        assert_eq!((sender.flush(), sender.queued()), (Ok(true), 0));
    }

    #[test]
    fn bytes_that_are_no_frame_end_the_connection() {
        let (mut connection, mut other) = pair();
        other.write_all(b"GET / HTTP/1.1\r\n").expect("room");
        assert_eq!(next(&mut connection), "it broke the protocol: a malformed frame");
    }
}
