//! What the polling thread and the watcher thread share: the bell, mail both ways, and a link for
//! each peer.
//!
//! None of it is on the data path: a poll with no news reads two flags.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendFlags, Shutdown};

use super::control::{CONTROL_MESSAGE_BYTES_MAX, ControlFrame};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{LossCause, PostError, Responder, Ring};
use crate::region::RegionKey;

/// Bytes of posted messages that wait to be sent to one peer at most.
const POSTED_BYTES_MAX: usize = 256 << 10;

/// Bytes of replies that wait at most; a peer that makes more does not read them.
const REPLIED_BYTES_MAX: usize = 4 << 20;

/// Locks; a panic elsewhere leaves nothing half done under these locks.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file descriptor that is readable once it was rung.
pub(super) struct Chime {
    file: OwnedFd,
    rung: AtomicBool,
}

impl Chime {
    pub(super) fn new() -> std::io::Result<Self> {
        let file = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { file, rung: AtomicBool::new(false) })
    }

    /// Whether it was rung since it was last silenced. One load: for the busy way.
    pub(super) fn is_rung(&self) -> bool {
        // Acquire: pairs with the release in `ring`.
        self.rung.load(Ordering::Acquire)
    }

    /// Makes the file unreadable; returns whether it was rung. What the ringer published before is
    /// visible then.
    pub(super) fn silence(&self) -> bool {
        let mut count = [0; 8];
        // Nothing to read: not rung, or the ringer is between its two steps, and rings again for
        // the next attempt.
        let read = rustix::io::read(&self.file, &mut count).is_ok();
        // AcqRel: pairs with the swap in `ring`. Whoever rings after this swap writes again.
        self.rung.swap(false, Ordering::AcqRel) || read
    }
}

impl Ring for Chime {
    fn ring(&self) {
        // AcqRel: pairs with `silence` and `is_rung`.
        if !self.rung.swap(true, Ordering::AcqRel) {
            // Can fail only when the counter is full, and then the file is readable.
            let _ = rustix::io::write(&self.file, &1u64.to_ne_bytes());
        }
    }
}

impl AsFd for Chime {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// From the watcher to the device.
pub(super) enum Mail {
    Opened { peer: Rank, cells: usize, out: Vec<OwnedFd>, incoming: Vec<OwnedFd> },
    Revoked { peer: Rank, key: RegionKey },
    Lost { peer: Rank, cause: LossCause },
}

/// From the device to the watcher.
pub(super) enum Order {
    /// Dial the address, or wait for the peer when there is none.
    Connect { peer: Rank, dial: Option<std::net::SocketAddr>, deadline: Nanos },
    /// Something waits to be sent on the control stream.
    Flush { peer: Rank },
    /// Nothing more of this peer.
    Sever { peer: Rank },
    /// The peer is lost, as was seen elsewhere than on its control stream.
    Lose { peer: Rank, cause: LossCause },
    /// End; peers that were told goodbye may read it until this time.
    Stop { linger_until: Nanos },
}

pub(super) struct Shared {
    pub(super) responder: Arc<dyn Responder>,
    /// The device's bell.
    pub(super) bell: Chime,
    /// The watcher's.
    pub(super) wake: Chime,
    mail: Mutex<Vec<Mail>>,
    any_mail: AtomicBool,
    orders: Mutex<Vec<Order>>,
    pub(super) links: Vec<Link>,
}

impl Shared {
    pub(super) fn new(responder: Arc<dyn Responder>, world_size: u32) -> std::io::Result<Self> {
        Ok(Self {
            responder,
            bell: Chime::new()?,
            wake: Chime::new()?,
            mail: Mutex::new(Vec::new()),
            any_mail: AtomicBool::new(false),
            orders: Mutex::new(Vec::new()),
            links: (0..world_size).map(|_| Link::default()).collect(),
        })
    }

    pub(super) fn link(&self, peer: Rank) -> &Link {
        &self.links[peer as usize]
    }

    pub(super) fn has_mail(&self) -> bool {
        // Acquire: pairs with the release in `send`; the lock orders the mail itself.
        self.any_mail.load(Ordering::Acquire)
    }

    pub(super) fn take_mail(&self) -> Vec<Mail> {
        let mut mail = lock(&self.mail);
        // Release: under the lock, so it never hides mail that is still there.
        self.any_mail.store(false, Ordering::Release);
        std::mem::take(&mut *mail)
    }

    pub(super) fn send(&self, mail: Mail) {
        let mut waiting = lock(&self.mail);
        waiting.push(mail);
        // Release: pairs with the acquire in `has_mail`.
        self.any_mail.store(true, Ordering::Release);
        drop(waiting);
        self.bell.ring();
    }

    pub(super) fn order(&self, order: Order) {
        lock(&self.orders).push(order);
        self.wake.ring();
    }

    pub(super) fn take_orders(&self) -> Vec<Order> {
        std::mem::take(&mut *lock(&self.orders))
    }

    /// A peer is lost. Of several that find out, the first is heard; a severed peer is not lost.
    pub(super) fn lose(&self, peer: Rank, cause: LossCause) {
        let cause = self.link(peer).suspected().unwrap_or(cause);
        if self.link(peer).end(Standing::Lost) {
            self.responder.lost(peer, &cause);
            self.send(Mail::Lost { peer, cause });
        }
    }
}

/// How this rank stands with a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Standing {
    #[default]
    Unconnected,
    Open,
    /// Its goodbye has come.
    Goodbye,
    Lost,
    Severed,
}

/// The control stream to one peer, written by both threads.
#[derive(Default)]
pub(super) struct Link(Mutex<LinkState>);

#[derive(Default)]
struct LinkState {
    standing: Standing,
    stream: Option<Arc<OwnedFd>>,
    out: VecDeque<u8>,
    /// A frame that goes out once `out` is empty; the next one of its kind takes its place.
    urgent: Option<Vec<u8>>,
    said_goodbye: bool,
    /// Why the peer will be lost, once all that it said has been read.
    suspected: Option<LossCause>,
}

impl Link {
    pub(super) fn standing(&self) -> Standing {
        lock(&self.0).standing
    }

    /// The peer is lost for this cause, as was seen elsewhere; the first cause counts.
    pub(super) fn suspect(&self, cause: LossCause) {
        lock(&self.0).suspected.get_or_insert(cause);
    }

    fn suspected(&self) -> Option<LossCause> {
        lock(&self.0).suspected.clone()
    }

    /// The pair is connected; false when it was severed meanwhile.
    pub(super) fn open(&self, stream: Arc<OwnedFd>) -> bool {
        let mut state = lock(&self.0);
        if state.standing != Standing::Unconnected {
            return false;
        }
        state.standing = Standing::Open;
        state.stream = Some(stream);
        true
    }

    /// The peer's goodbye has come.
    pub(super) fn goodbye_came(&self) {
        let mut state = lock(&self.0);
        if state.standing == Standing::Open {
            state.standing = Standing::Goodbye;
        }
    }

    /// Whether goodbye was said to a peer that is still there.
    pub(super) fn lingers(&self) -> bool {
        let state = lock(&self.0);
        state.said_goodbye && state.stream.is_some()
    }

    /// Ends the link: lost or severed. Returns whether this was the first end.
    pub(super) fn end(&self, standing: Standing) -> bool {
        let mut state = lock(&self.0);
        if matches!(state.standing, Standing::Lost | Standing::Severed) {
            return false;
        }
        state.standing = standing;
        close(&mut state);
        true
    }

    /// The peer has closed after its goodbye.
    pub(super) fn close(&self) {
        close(&mut lock(&self.0));
    }

    /// Nothing more will be sent, but the peer may still read what was.
    pub(super) fn shutdown_write(&self) {
        if let Some(stream) = &lock(&self.0).stream {
            let _ = rustix::net::shutdown(stream, Shutdown::Write);
        }
    }

    /// Sends a message, or queues what the socket does not take. Returns whether something waits.
    /// For an urgent one there is always room: of those that wait the last one is kept.
    pub(super) fn post(&self, peer: Rank, message: &[u8], is_urgent: bool) -> Result<bool, PostError> {
        if message.len() > CONTROL_MESSAGE_BYTES_MAX {
            return Err(PostError::TooLong { bytes: message.len() });
        }
        let mut state = lock(&self.0);
        if state.standing != Standing::Open || state.stream.is_none() || state.said_goodbye {
            return Err(PostError::NotConnected { peer });
        }
        if is_urgent {
            let mut frame = Vec::new();
            ControlFrame::Message(message).encode(&mut frame);
            state.urgent = Some(frame);
        } else if state.out.len() > POSTED_BYTES_MAX {
            return Err(PostError::QueueFull { peer });
        } else {
            ControlFrame::Message(message).encode(&mut state.out);
        }
        Ok(flush(&mut state))
    }

    /// Says something on the watcher's or the protocol's behalf. `None`: the peer does not read.
    pub(super) fn say(&self, frame: &ControlFrame<'_>) -> Option<bool> {
        let mut state = lock(&self.0);
        if state.stream.is_none() {
            return Some(false);
        }
        if state.out.len() > REPLIED_BYTES_MAX {
            return None;
        }
        frame.encode(&mut state.out);
        state.said_goodbye |= *frame == ControlFrame::Bye;
        Some(flush(&mut state))
    }

    /// Sends what the socket takes; returns whether something still waits.
    pub(super) fn flush(&self) -> bool {
        flush(&mut lock(&self.0))
    }

    pub(super) fn has_output(&self) -> bool {
        let state = lock(&self.0);
        !state.out.is_empty() || state.urgent.is_some()
    }
}

fn close(state: &mut LinkState) {
    drop_output(state);
    if let Some(stream) = state.stream.take() {
        // The watcher wakes and forgets the stream; a forked child does not keep it open.
        let _ = rustix::net::shutdown(&stream, Shutdown::Both);
    }
}

fn drop_output(state: &mut LinkState) {
    state.out.clear();
    state.urgent = None;
}

fn flush(state: &mut LinkState) -> bool {
    let Some(stream) = &state.stream else {
        drop_output(state);
        return false;
    };
    loop {
        if state.out.is_empty() {
            let Some(frame) = state.urgent.take() else { return false };
            state.out.extend(frame);
        }
        let (first, _) = state.out.as_slices();
        match rustix::net::send(stream, first, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => drop(state.out.drain(..count)),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => return true,
            Err(_) => {
                // The watcher reads the same stream and finds out why.
                drop_output(state);
                return false;
            }
        }
    }
}
