//! The state that the device, its control plane and the handles of its regions share, and the work
//! of the control plane's watcher for this fabric.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use rustix::io::Errno;
use rustix::thread::futex;

use super::directory::Directory;
use super::link::{
    GpuFile, OwnMemory, OwnSignals, PeerMemory, PeerRegion, REGIONS_MAX, SignalSlotTable, slot_of,
};
use super::mapping::check;
use super::message::RegionMessage;
use super::peer_status::{ConnectionEnd, PeerProcess, SlotState, StatusTable};
use super::wake_word;
use crate::Rank;
use crate::control::{FabricHandler, OpenedPair, ReceivedFiles, SendWithFiles, Streams, packet};
use crate::device::{DeviceConfig, LossCause, ProtocolViolation, Wake};
use crate::fork::Process;
use crate::memory::Memory;
use crate::mutex::lock;
use crate::primitive::AtomicU32;
use crate::region::{RegionKey, Registry};

pub(crate) struct Shared {
    /// The process of the device; a forked child must not use its copy.
    process: Process,
    pub(crate) rank: Rank,
    pub(crate) world_size: u32,
    pub(crate) own: OwnMemory,
    pub(crate) signal_slots: SignalSlotTable,
    /// Whether the watcher has published changes. Stored with release by the watcher, loaded with
    /// acquire by the poller.
    pub(crate) has_changes: AtomicBool,
    /// Whether the rank was woken while it did not sleep. Then its next attempt to sleep fails.
    woken: AtomicBool,
    peer_status: Mutex<StatusTable>,
    directory: Mutex<Directory>,
    /// The streams of the control plane, set when it exists. They are locked before the directory.
    streams: OnceLock<Streams>,
}

impl Shared {
    pub(crate) fn new(config: &DeviceConfig) -> io::Result<Self> {
        Ok(Self {
            process: Process::current(),
            rank: config.rank,
            world_size: config.world_size,
            own: OwnMemory::new()?,
            signal_slots: SignalSlotTable::new(config.world_size, config.signal_slots),
            has_changes: AtomicBool::new(false),
            woken: AtomicBool::new(false),
            peer_status: Mutex::new(StatusTable::new(config.world_size)),
            directory: Mutex::new(Directory::new(config.world_size)),
            streams: OnceLock::new(),
        })
    }

    /// Sets the streams that announce regions. Called before any peer is connected.
    pub(crate) fn set_streams(&self, streams: Streams) {
        let _ = self.streams.set(streams);
    }

    /// Changes the directory, then tells the connected peers.
    pub(crate) fn change_directory<T>(&self, change: impl FnOnce(&mut Directory) -> T) -> T {
        let mut directory = self.directory();
        let changed = change(&mut directory);
        let peers = directory.open_peers();
        drop(directory);
        if let Some(streams) = self.streams.get() {
            peers.into_iter().for_each(|peer| streams.flush(peer));
        }
        changed
    }

    /// Revokes the keys of the memory, if it is registered here.
    pub(crate) fn detach(&self, memory: &Arc<dyn Memory>) {
        self.change_directory(|directory| directory.detach(memory, &self.own.keys));
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

    /// The signal slots of the generation that the watcher has reached.
    fn signal_slots_of_watcher(&self, peer: Rank) -> Option<Arc<OwnSignals>> {
        let generation = self.peer_status().generation_of(peer);
        self.signal_slots.of_generation(peer, generation)
    }

    /// Tells the poller to read the changes. Wakes the poller if it sleeps.
    fn publish(&self) {
        // Release: the poller that sees the flag takes the lock of the status table, which orders
        // the rest.
        self.has_changes.store(true, Ordering::Release);
        self.wake_owner();
    }

    /// Whether the rank was woken since the last call, or changes are published. To be called after
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
    // The call fails only for a bad address. It is not `PRIVATE`, because processes share the word.
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
        let entry = self.change_directory(|directory| directory.remove(key, &self.own.keys));
        // Dropping the memory may take long, so it is not done under the lock.
        drop(entry);
    }
}

impl FabricHandler for Shared {
    fn restarted(&self, peer: Rank, generation: u32) {
        self.directory().close(peer);
        self.signal_slots.begin(peer, generation);
        let forgotten = self.peer_status().begin(peer, generation);
        // Unmapping may take long, so it is not done under the lock.
        drop(forgotten);
    }

    fn opened(&self, peer: Rank, pair: OpenedPair) -> Result<Option<OwnedFd>, LossCause> {
        if let Some(own) = self.signal_slots_of_watcher(peer) {
            own.sent_file();
        }
        let (link, process) = PeerMemory::from_files(pair.files, pair.signal_slots, pair.own_rank)?;
        let proven = packet::is_peer_process(&pair.stream, &process).then(|| process.try_clone());
        // The process is noted before a region can be announced to it. So if a device severs the
        // peer and finds no process here, no region will be announced to the peer.
        let mut peer_status = self.peer_status();
        let status = peer_status.status_of(peer);
        status.process = match proven {
            Some(Ok(process)) => PeerProcess::Proven(process),
            _ => PeerProcess::Unproven,
        };
        status.incarnation = Some(pair.incarnation);
        drop(peer_status);
        // The regions are listed before the device can see the link. So a peer learns of a region
        // before it gets a message that was posted after the registration of the region.
        self.directory().open(peer);
        self.peer_status().status_of(peer).link = Some(link);
        self.publish();
        Ok(Some(process))
    }

    fn message(
        &self,
        peer: Rank,
        message: &[u8],
        files: ReceivedFiles,
        _refuse: &dyn Fn(LossCause),
    ) -> Result<(), LossCause> {
        let (slot, state) = match RegionMessage::decode(message)? {
            RegionMessage::Announce { slot, key, offset, len } => {
                check_key(slot, key)?;
                let state = match one_file(files)? {
                    None => {
                        tracing::warn!(peer, "a region cannot be mapped: too many open files (ulimit -n)");
                        SlotState::Unmappable(key)
                    }
                    Some(file) => {
                        let end = offset.checked_add(len).ok_or(ProtocolViolation::MalformedFrame)?;
                        check(file.as_fd(), end)?;
                        self.map(peer, key, &file, offset, len)
                    }
                };
                (slot, state)
            }
            RegionMessage::AnnounceGpu { slot, key, bytes, len, gpu } => {
                check_key(slot, key)?;
                if len > bytes {
                    return Err(ProtocolViolation::MalformedFrame.into());
                }
                // The file is for the driver, which checks it at the first use.
                let has_room = self.peer_status().status_of(peer).has_room(len);
                let state = match one_file(files)? {
                    Some(file) if has_room => SlotState::Mapped(Arc::new(PeerRegion::on_gpu(
                        key,
                        GpuFile { file, bytes, gpu },
                        len,
                    ))),
                    _ => {
                        tracing::warn!(
                            peer,
                            len,
                            "a region on a GPU cannot be taken: too many open files or bytes"
                        );
                        SlotState::Unmappable(key)
                    }
                };
                (slot, state)
            }
            RegionMessage::Revoke { slot } => {
                let has_files = files.is_some_and(|files| !files.is_empty());
                if usize::from(slot) >= REGIONS_MAX || has_files {
                    return Err(ProtocolViolation::MalformedFrame.into());
                }
                (slot, SlotState::Empty)
            }
            RegionMessage::DrainMark => {
                if files.is_some_and(|files| !files.is_empty()) {
                    return Err(ProtocolViolation::MalformedFrame.into());
                }
                // Release, by the lock: a poller that sees the mark also sees all bytes that the
                // peer wrote before it sent the mark.
                let mut peer_status = self.peer_status();
                let status = peer_status.status_of(peer);
                status.drain_marks = status.drain_marks.saturating_add(1);
                drop(peer_status);
                self.publish();
                return Ok(());
            }
        };
        let before = self.peer_status().status_of(peer).set(slot, state);
        self.publish();
        // Unmapping may take long, so it is not done under the lock.
        drop(before);
        Ok(())
    }

    fn departed(&self, peer: Rank) {
        self.directory().close(peer);
        self.peer_status().status_of(peer).end = Some(ConnectionEnd::Departed);
        self.publish();
    }

    fn lost(&self, peer: Rank, cause: LossCause) {
        self.directory().close(peer);
        self.peer_status().status_of(peer).end = Some(ConnectionEnd::Lost(cause));
        self.publish();
    }

    fn send_ready(&self, peer: Rank, ready: &[u8], send: &mut SendWithFiles<'_>) -> Result<(), Errno> {
        // If there is no file, `connect` has failed, and the peer gets no "ready".
        let own = self.signal_slots_of_watcher(peer);
        let Some(signal_slots) = own.and_then(|own| own.file()) else { return Ok(()) };
        let own = &self.own;
        send(
            ready,
            &[own.process.as_fd(), signal_slots.as_fd(), own.wake_file.as_fd(), own.keys_file.as_fd()],
        )
    }

    fn send_waiting(&self, peer: Rank, send: &mut SendWithFiles<'_>) -> Result<(), Errno> {
        self.directory().send_listed(peer, send)
    }

    fn has_waiting(&self, peer: Rank) -> bool {
        self.directory().has_listed(peer)
    }
}

impl Shared {
    fn map(&self, peer: Rank, key: RegionKey, file: &OwnedFd, offset: u64, len: u64) -> SlotState {
        if !self.peer_status().status_of(peer).has_room(len) {
            tracing::warn!(peer, len, "a region cannot be mapped: the peer has too many bytes registered");
            return SlotState::Unmappable(key);
        }
        match PeerRegion::new(key, file, offset, len) {
            Ok(region) => SlotState::Mapped(Arc::new(region)),
            Err(error) => {
                tracing::warn!(peer, len, %error, "a region cannot be mapped (vm.max_map_count, ulimit -v)");
                SlotState::Unmappable(key)
            }
        }
    }
}

/// Whether a key may be announced for a slot.
fn check_key(slot: u16, key: RegionKey) -> Result<(), ProtocolViolation> {
    let is_valid = usize::from(slot) < REGIONS_MAX && slot_of(key) == slot && key != RegionKey::NONE;
    if is_valid { Ok(()) } else { Err(ProtocolViolation::MalformedFrame) }
}

/// The file of an announcement; `None` if this process has no room for more files.
fn one_file(files: ReceivedFiles) -> Result<Option<OwnedFd>, ProtocolViolation> {
    let Some(files) = files else { return Ok(None) };
    let [file] = <[OwnedFd; 1]>::try_from(files).map_err(|_| ProtocolViolation::MalformedFrame)?;
    Ok(Some(file))
}
