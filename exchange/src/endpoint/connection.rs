//! One end of a control connection: frames, and the bytes of tensors between them. Never blocks.
//!
//! **Invariant:** bytes are taken in their order. A frame is given out whole. The bytes of a tensor
//! go straight into the memory that was made for them, at most as many as were announced.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use pleach_transport::MESSAGE_BYTES_MAX;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};

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
}

/// See the module.
pub(crate) struct Connection {
    socket: OwnedFd,
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
        Self { socket, buffer, start: 0, end: 0, body, skip: 0, outgoing, sent: 0 }
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

    /// Receives bytes into the tensor or into the buffer. False: there are none.
    fn receive_some(&mut self) -> Result<bool, ConnectionEnd> {
        let flags = RecvFlags::DONTWAIT;
        let received = match &mut self.body {
            Some(body) => {
                let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut body.words);
                recv(&self.socket, &mut bytes[body.filled..body.bytes], flags).map(|(_, count)| {
                    body.filled += count;
                    count
                })
            }
            None => {
                self.buffer.copy_within(self.start..self.end, 0);
                (self.start, self.end) = (0, self.end - self.start);
                recv(&self.socket, &mut self.buffer[self.end..], flags).map(|(_, count)| {
                    self.end += count;
                    count
                })
            }
        };
        match received {
            Ok(0) => Err(ConnectionEnd::Closed),
            Ok(_) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(errno.into()),
        }
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
