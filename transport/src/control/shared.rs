//! The state that the polling thread and the watcher thread share: events and commands, the flag
//! that wakes each of the two, and a link for each peer.
//!
//! None of it is on the data path: a poll without events reads two flags.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::event_flag::EventFlag;
use super::frame::Frame;
use super::link::{Link, State};
use crate::Rank;
use crate::clock::Nanos;
use crate::device::{LossCause, Responder, Wake};

/// From the watcher to the device.
pub(crate) enum ControlEvent<M> {
    /// The pair has its control stream and its data connections, if the fabric has some.
    Opened {
        peer: Rank,
        /// Signal slots that the peer keeps for this rank.
        signal_slots: usize,
        to_peer: Vec<OwnedFd>,
        from_peer: Vec<OwnedFd>,
    },
    /// A message of the fabric itself.
    Message { peer: Rank, message: M },
    /// The peer sent a bye: the end of its stream will be no loss.
    Departed { peer: Rank },
    /// The peer is lost; comes at most once, after all that the peer sent.
    Lost { peer: Rank, cause: LossCause },
}

/// From the device to the watcher.
pub(super) enum Command {
    /// Dial the address, or wait for the peer when there is none.
    Connect { peer: Rank, dial: Option<SocketAddr>, deadline: Nanos },
    /// Frames wait to be sent on the control stream.
    Flush { peer: Rank },
    /// Ignore this peer from now on.
    Sever { peer: Rank },
    /// The peer is lost, for a cause that was seen elsewhere than on its control stream.
    Lose { peer: Rank, cause: LossCause },
    /// End; peers that got a bye may read it until this time.
    Stop { linger_until: Nanos },
}

/// The commands of a device to its watcher, which sleeps on the flag.
pub(crate) struct Commands<C> {
    waiting: Mutex<Vec<C>>,
    wake: EventFlag,
}

impl<C> Commands<C> {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { waiting: Mutex::new(Vec::new()), wake: EventFlag::new()? })
    }

    pub(crate) fn send(&self, command: C) {
        lock(&self.waiting).push(command);
        self.wake.wake();
    }

    /// All commands since the last call, in order.
    pub(crate) fn take(&self) -> Vec<C> {
        std::mem::take(&mut *lock(&self.waiting))
    }

    /// Set when there are commands; drain it before taking them.
    pub(crate) fn wake(&self) -> &EventFlag {
        &self.wake
    }
}

pub(super) struct Shared<M> {
    pub(super) responder: Arc<dyn Responder>,
    /// Wakes the device.
    pub(super) wake_source: Arc<EventFlag>,
    pub(super) commands: Commands<Command>,
    events: Mutex<Vec<ControlEvent<M>>>,
    has_events: AtomicBool,
    pub(super) links: Vec<Link>,
}

impl<M> Shared<M> {
    pub(super) fn new(responder: Arc<dyn Responder>, world_size: u32) -> std::io::Result<Self> {
        Ok(Self {
            responder,
            wake_source: Arc::new(EventFlag::new()?),
            commands: Commands::new()?,
            events: Mutex::new(Vec::new()),
            has_events: AtomicBool::new(false),
            links: (0..world_size).map(|_| Link::default()).collect(),
        })
    }

    pub(super) fn link(&self, peer: Rank) -> &Link {
        &self.links[peer as usize]
    }

    pub(super) fn has_events(&self) -> bool {
        // Acquire: pairs with the release in `send`; the lock orders the events themselves.
        self.has_events.load(Ordering::Acquire)
    }

    pub(super) fn take_events(&self) -> Vec<ControlEvent<M>> {
        let mut events = lock(&self.events);
        // Release: under the lock, so it never hides events that are still there.
        self.has_events.store(false, Ordering::Release);
        std::mem::take(&mut *events)
    }

    pub(super) fn send(&self, event: ControlEvent<M>) {
        let mut events = lock(&self.events);
        events.push(event);
        // Release: pairs with the acquire in `has_events`.
        self.has_events.store(true, Ordering::Release);
        drop(events);
        self.wake_source.wake();
    }

    /// Sends a frame on the fabric's behalf; false when the peer is not connected. A peer that does
    /// not read is found out by other means.
    pub(super) fn send_frame(&self, peer: Rank, frame: &Frame<'_>) -> bool {
        let waits = self.link(peer).send_frame(frame);
        if waits == Ok(true) {
            self.commands.send(Command::Flush { peer });
        }
        waits.is_ok()
    }

    /// Marks a peer lost. The first of several reports counts; a severed peer is not lost.
    pub(super) fn lose(&self, peer: Rank, cause: LossCause) {
        let cause = self.link(peer).cause(cause);
        if self.link(peer).end(State::Lost) {
            self.responder.lost(peer, &cause);
            self.send(ControlEvent::Lost { peer, cause });
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
