//! The state that the device, its watcher and the handles of its regions share.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::event::epoll;
use rustix::thread::futex;

use super::directory::Directory;
use super::link::{OwnMemory, SignalSlotTable};
use super::peer_status::StatusTable;
use super::wake_word;
use crate::Rank;
use crate::control::Commands;
use crate::device::{DeviceConfig, Wake};
use crate::fork::Process;
use crate::mutex::lock;
use crate::primitive::AtomicU32;
use crate::region::{RegionKey, Registry};

/// A command of the device to the watcher.
pub(crate) enum Command {
    /// Connect by dialing this name, or, without one, by waiting for the peer.
    Connect { peer: Rank, dial: Option<String> },
    /// The peer was severed: close its connections.
    Cut { peer: Rank },
    /// End.
    Stop,
}

pub(crate) struct Shared {
    /// The process of the device; a forked child must not use its copy.
    process: Process,
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) own: OwnMemory,
    pub(crate) signal_slots: SignalSlotTable,
    pub(crate) epoll: Arc<OwnedFd>,
    pub(crate) commands: Commands<Command>,
    /// The watcher has published changes. Release by the watcher, acquire by the poller.
    pub(crate) has_changes: AtomicBool,
    /// The rank was woken while it did not sleep: its next attempt to sleep fails.
    woken: AtomicBool,
    peer_status: Mutex<StatusTable>,
    directory: Mutex<Directory>,
}

impl Shared {
    pub(crate) fn new(config: &DeviceConfig) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?);
        Ok(Self {
            process: Process::current(),
            rank: config.rank,
            world_size: config.world_size,
            own: OwnMemory::new()?,
            signal_slots: SignalSlotTable::new(config.world_size, config.signal_slots),
            commands: Commands::new()?,
            has_changes: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            peer_status: Mutex::new(StatusTable::new(config.world_size)),
            directory: Mutex::new(Directory::new(config.world_size, epoll.clone())),
            epoll,
        })
    }

    /// Whether this is a forked child of the device's process.
    pub(crate) fn is_forked(&self) -> bool {
        !self.process.is_current()
    }

    pub(crate) fn peer_status(&self) -> MutexGuard<'_, StatusTable> {
        lock(&self.peer_status)
    }

    pub(crate) fn directory(&self) -> MutexGuard<'_, Directory> {
        lock(&self.directory)
    }

    /// Tells the poller to read the changes, also if it sleeps.
    pub(crate) fn publish(&self) {
        // Release: the poller that sees the flag takes the board's lock, which orders the rest.
        self.has_changes.store(true, Ordering::Release);
        self.wake_owner();
    }

    /// Whether the rank was woken since the last call, or changes are published. After
    /// [`wake_word::arm`].
    pub(crate) fn was_woken(&self) -> bool {
        // Acquire: pairs with the release in `wake`, so all that the waking thread did before is
        // visible.
        self.woken.swap(false, Ordering::Acquire) || self.has_changes.load(Ordering::Acquire)
    }

    fn wake_owner(&self) {
        let word: &AtomicU32 = (*self.own.wake_source).as_ref();
        if wake_word::wake(word) {
            wake_sleepers(word);
        }
    }
}

/// Wakes all threads that sleep on a wake source; call it after [`wake_word::wake`] or
/// [`wake_word::must_wake`] returned true.
pub(crate) fn wake_sleepers(word: &AtomicU32) {
    // It fails for a bad address only. Not `PRIVATE`: the word is shared between processes.
    let _ = futex::wake(word, futex::Flags::empty(), i32::MAX as u32);
}

impl Wake for Shared {
    fn wake(&self) {
        // Release: see `was_woken`.
        self.woken.store(true, Ordering::Release);
        self.wake_owner();
    }
}

impl Registry for Shared {
    fn released(&self, key: RegionKey) {
        // The table of keys and the streams belong to the parent, whose region still exists.
        if self.is_forked() {
            return;
        }
        let entry = self.directory().remove(key, &self.own.keys);
        // Dropping the memory may take long, so not under the lock.
        drop(entry);
    }
}
