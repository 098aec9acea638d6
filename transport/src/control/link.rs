//! The control stream to one peer, as both threads write it: the state of the peer, and the frames
//! to send.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown};

use super::frame::Frame;
use super::outgoing::{FrameKind, Outgoing, OutgoingFull};
use crate::Rank;
use crate::device::{LossCause, MESSAGE_BYTES_MAX, PostError};

/// The state of a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum State {
    #[default]
    Unconnected,
    Open,
    /// The peer sent a bye.
    Departed,
    Lost,
    Severed,
}

/// See the module.
#[derive(Default)]
pub(super) struct Link(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    state: State,
    /// The device has asked to be connected.
    is_requested: bool,
    stream: Option<Arc<OwnedFd>>,
    outgoing: Outgoing,
    has_sent_bye: bool,
    /// Why the peer will be lost, after all that it sent has been read.
    suspected: Option<LossCause>,
    /// Why one of the two ranks makes no connection; more precise than the loss that follows.
    refused: Option<LossCause>,
}

impl Link {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn state(&self) -> State {
        self.lock().state
    }

    /// Records that the device wants the peer; false when it did before, or the peer has a later
    /// state.
    pub(super) fn request(&self) -> bool {
        let mut link = self.lock();
        link.state == State::Unconnected && !std::mem::replace(&mut link.is_requested, true)
    }

    /// Records a cause that was seen elsewhere; the first cause counts.
    pub(super) fn suspect(&self, cause: LossCause) {
        self.lock().suspected.get_or_insert(cause);
    }

    /// Records why one of the two ranks makes no connection; the first reason counts.
    pub(super) fn refuse(&self, cause: LossCause) {
        self.lock().refused.get_or_insert(cause);
    }

    /// The cause to report for a peer whose loss looks like `seen`.
    pub(super) fn cause(&self, seen: LossCause) -> LossCause {
        let link = self.lock();
        link.refused.clone().or_else(|| link.suspected.clone()).unwrap_or(seen)
    }

    /// Marks the pair connected; false when it was severed meanwhile.
    pub(super) fn open(&self, stream: Arc<OwnedFd>) -> bool {
        let mut link = self.lock();
        if link.state != State::Unconnected {
            return false;
        }
        link.state = State::Open;
        link.stream = Some(stream);
        true
    }

    /// Marks the peer departed.
    pub(super) fn depart(&self) {
        let mut link = self.lock();
        if link.state == State::Open {
            link.state = State::Departed;
        }
    }

    /// Whether a bye was sent to a peer that is still connected.
    pub(super) fn lingers(&self) -> bool {
        let link = self.lock();
        link.has_sent_bye && link.stream.is_some()
    }

    /// Ends the link as lost or severed. Returns whether this was the first end.
    pub(super) fn end(&self, state: State) -> bool {
        let mut link = self.lock();
        if matches!(link.state, State::Lost | State::Severed) {
            return false;
        }
        link.state = state;
        link.close();
        true
    }

    /// Closes the stream.
    pub(super) fn close(&self) {
        self.lock().close();
    }

    /// Sends nothing more; the peer may still read what was sent.
    pub(super) fn shutdown_write(&self) {
        if let Some(stream) = &self.lock().stream {
            let _ = rustix::net::shutdown(stream, Shutdown::Write);
        }
    }

    /// Sends a user's message, or queues what the socket does not take. Returns whether frames
    /// wait.
    pub(super) fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<bool, PostError> {
        if message.len() > MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        let mut link = self.lock();
        if link.state != State::Open || link.stream.is_none() || link.has_sent_bye {
            return Err(PostError::NotConnected { peer });
        }
        let kind = if is_urgent { FrameKind::Urgent } else { FrameKind::Post };
        let frame = Frame::Message(message).to_bytes();
        link.outgoing.push(kind, frame).map_err(|OutgoingFull| PostError::QueueFull { peer })?;
        Ok(link.flush())
    }

    /// Sends a frame of the watcher or the fabric; returns whether frames wait.
    pub(super) fn send_frame(&self, frame: &Frame<'_>) -> Result<bool, SendError> {
        let mut link = self.lock();
        if link.stream.is_none() {
            return Err(SendError::NotConnected);
        }
        let kind = match frame {
            Frame::Message(_) | Frame::Fabric(_) => FrameKind::Reply,
            Frame::Ready | Frame::Bye => FrameKind::Single,
        };
        link.outgoing.push(kind, frame.to_bytes()).map_err(|OutgoingFull| SendError::BacklogFull)?;
        link.has_sent_bye |= *frame == Frame::Bye;
        Ok(link.flush())
    }

    /// Sends what the socket takes; returns whether frames still wait.
    pub(super) fn flush(&self) -> bool {
        self.lock().flush()
    }

    pub(super) fn has_output(&self) -> bool {
        !self.lock().outgoing.is_empty()
    }
}

/// Why a frame was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SendError {
    /// The peer has no stream, not yet or not any more.
    NotConnected,
    /// The peer does not read what was sent before.
    BacklogFull,
}

impl Inner {
    fn close(&mut self) {
        self.outgoing.clear();
        if let Some(stream) = self.stream.take() {
            // The watcher wakes and removes the stream; a forked child does not keep it open.
            let _ = rustix::net::shutdown(&stream, Shutdown::Both);
        }
    }

    fn flush(&mut self) -> bool {
        let Some(stream) = &self.stream else { return false };
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match self.outgoing.flush(|bytes| rustix::net::send(stream, bytes, flags)) {
            Ok(()) => false,
            Err(Errno::AGAIN) => true,
            Err(_) => {
                // The watcher reads the same stream and finds the cause.
                self.outgoing.clear();
                false
            }
        }
    }
}
