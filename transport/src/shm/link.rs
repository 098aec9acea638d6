//! The shared memory of two connected ranks: signal slots, wake source, table of valid keys,
//! regions.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, fence};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::{io, slice};

use rustix::fs::SealFlags;
use rustix::io::Errno;

use super::mapping::{Access, Mapping, check};
use crate::Rank;
use crate::cuda::{CudaError, Gpu, GpuId, ImportedMemory};
use crate::device::{LossCause, ProtocolViolation};
use crate::memory::{prefer_own_node, seal, sealed_file, unsealed_file};
use crate::mutex::lock;
use crate::primitive::{AtomicU32, AtomicU64, Ordering};
use crate::region::{RegionKey, RemoteSlice, Sharing};
use crate::signals::{SignalLine, Signals};

/// Number of files that each end sends to the other end: its process descriptor, the signal slots
/// for the other end, its wake source, its valid keys.
const PAIR_FILES: usize = 4;

/// Most regions of a device. A peer maps each of them, and Linux allows 65,530 mappings in a
/// process by default (`vm.max_map_count`).
pub(crate) const REGIONS_MAX: usize = 16_384;

/// Length of the table of keys: for each slot, a key and the peer for which it is valid.
const KEY_TABLE_BYTES: usize = REGIONS_MAX * (size_of::<u64>() + size_of::<u32>());
const WAKE_PAGE_BYTES: usize = 64;
const SIGNAL_SLOT_BYTES: usize = size_of::<SignalLine>();

/// A wake source's page: the futex word, and the processor on which its owner waits.
pub(crate) struct WakePage(Mapping);

impl WakePage {
    /// The number of the processor plus one; zero: unknown. Relaxed: a hint that orders nothing;
    /// its partner is the load in [`WakePage::published_processor`] of a peer.
    fn processor(&self) -> &AtomicU32 {
        // SAFETY: the page is mapped, aligned and writable while `self` lives, is longer than two
        // words, and is only ever accessed atomically.
        unsafe { AtomicU32::from_ptr(self.0.base().as_ptr().cast::<u32>().add(1)) }
    }

    /// For the owner. Only a changed value is stored, because peers read the cache line at each
    /// signal.
    pub(crate) fn publish_processor(&self, processor: u32) {
        let visit = processor.wrapping_add(1);
        if self.processor().load(Ordering::Relaxed) != visit {
            self.processor().store(visit, Ordering::Relaxed);
        }
    }

    /// The last processor that the owner has published.
    pub(crate) fn published_processor(&self) -> Option<u32> {
        self.processor().load(Ordering::Relaxed).checked_sub(1)
    }
}

impl AsRef<AtomicU32> for WakePage {
    fn as_ref(&self) -> &AtomicU32 {
        // SAFETY: the page is mapped, aligned and writable while `self` lives, and is only ever
        // accessed atomically.
        unsafe { AtomicU32::from_ptr(self.0.base().as_ptr().cast()) }
    }
}

/// The table of valid keys. The owner writes it and its peers read it, so a dropped region is
/// refused at once.
///
/// The lower 16 bits of a key are its slot in the table.
pub(crate) struct KeyTable(Mapping);

impl KeyTable {
    fn slot(&self, slot: u16) -> Option<&AtomicU64> {
        // SAFETY: `REGIONS_MAX` aligned words are mapped while `self` lives and are only ever
        // accessed atomically.
        let words = unsafe { slice::from_raw_parts(self.0.base().as_ptr().cast::<AtomicU64>(), REGIONS_MAX) };
        words.get(usize::from(slot))
    }

    /// The peer for which the key of a slot is valid, plus one; zero: all peers. Relaxed, like the
    /// keys: a peer learns of a key by a message, which orders both accesses.
    fn only(&self, slot: u16) -> Option<&AtomicU32> {
        // SAFETY: `REGIONS_MAX` further aligned words follow the keys, and are only ever accessed
        // atomically.
        let words = unsafe {
            let first = self.0.base().as_ptr().cast::<AtomicU64>().add(REGIONS_MAX);
            slice::from_raw_parts(first.cast::<AtomicU32>(), REGIONS_MAX)
        };
        words.get(usize::from(slot))
    }

    /// Whether a key is valid for this peer of the owner.
    pub(crate) fn is_for(&self, key: RegionKey, peer: Rank) -> bool {
        let only = self.only(slot_of(key)).map_or(0, |word| word.load(Ordering::Relaxed));
        only == 0 || only - 1 == peer
    }

    /// Whether the key is valid. Relaxed: orders nothing else (and the page may be read-only here).
    pub(crate) fn holds(&self, key: RegionKey) -> bool {
        key != RegionKey::NONE
            && self.slot(slot_of(key)).is_some_and(|word| word.load(Ordering::Relaxed) == key.0)
    }

    /// For the owner: empties the slot. No key is valid in it from now on.
    pub(crate) fn clear(&self, slot: u16) {
        if let Some(word) = self.slot(slot) {
            word.store(RegionKey::NONE.0, Ordering::Relaxed);
        }
    }

    /// For the owner: makes this key valid in its slot, for one peer or for all peers.
    pub(crate) fn store(&self, key: RegionKey, only: Option<Rank>) {
        if let (Some(word), Some(peer)) = (self.slot(slot_of(key)), self.only(slot_of(key))) {
            peer.store(only.map_or(0, |peer| peer + 1), Ordering::Relaxed);
            word.store(key.0, Ordering::Relaxed);
        }
    }
}

/// The slot of a key in its owner's table.
pub(crate) fn slot_of(key: RegionKey) -> u16 {
    key.0 as u16
}

/// The shared memory of this rank, for all peers.
pub(crate) struct OwnMemory {
    pub(crate) wake_source: Arc<WakePage>,
    pub(crate) wake_file: OwnedFd,
    pub(crate) keys: KeyTable,
    pub(crate) keys_file: OwnedFd,
    pub(crate) process: OwnedFd,
}

impl OwnMemory {
    pub(crate) fn new() -> io::Result<Self> {
        let wake_file = sealed_file("pleach-wake", WAKE_PAGE_BYTES, SealFlags::empty())?;
        let wake_source = Mapping::new(wake_file.as_fd(), 0, WAKE_PAGE_BYTES, Access::ReadWrite)?;
        let keys_file = sealed_key_table()?;
        let (keys_file, keys) = keys_file;
        let own = rustix::process::getpid();
        let process = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())?;
        Ok(Self {
            wake_source: Arc::new(WakePage(wake_source)),
            wake_file,
            keys: KeyTable(keys),
            keys_file,
            process,
        })
    }
}

/// Makes the file of a table of keys. The file is sealed against writing only after it was mapped
/// for writing here.
fn sealed_key_table() -> io::Result<(OwnedFd, Mapping)> {
    let file = unsealed_file("pleach-keys", KEY_TABLE_BYTES)?;
    let mapping = Mapping::new(file.as_fd(), 0, KEY_TABLE_BYTES, Access::ReadWrite)?;
    seal(&file, SealFlags::FUTURE_WRITE)?;
    Ok((file, mapping))
}

/// The signal slots that this rank keeps for one peer. They are in a file of their own, so that a
/// single peer can be detached.
pub(crate) struct OwnSignals {
    pub(crate) signal_slots: Signals,
    /// The mapping, or the system's error. After an error the peer cannot be connected.
    shared: Result<Arc<Mapping>, Errno>,
    /// The file, until the peer has it.
    file: Mutex<Option<Arc<OwnedFd>>>,
}

impl OwnSignals {
    pub(crate) fn new(len: usize) -> Self {
        match Self::in_file(len) {
            Ok(own) => own,
            Err(error) => {
                let refused = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                Self { signal_slots: Signals::new(len), shared: Err(refused), file: Mutex::new(None) }
            }
        }
    }

    fn in_file(len: usize) -> io::Result<Self> {
        let bytes = len.max(1) * SIGNAL_SLOT_BYTES;
        let file = sealed_file("pleach-signals", bytes, SealFlags::empty())?;
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, bytes, Access::ReadWrite)?);
        prefer_own_node(mapping.base(), bytes);
        // SAFETY: the mapping is page-aligned, has `len` zeroed lines, is kept by `mapping`, and
        // serves no other purpose.
        let signal_slots = unsafe { Signals::from_raw(mapping.base().cast(), len, mapping.clone()) };
        Ok(Self { signal_slots, shared: Ok(mapping), file: Mutex::new(Some(Arc::new(file))) })
    }

    /// The error because of which the peer cannot signal these signal slots, if there was one.
    pub(crate) fn failure(&self) -> Option<Errno> {
        self.shared.as_ref().err().copied()
    }

    /// The file, until [`OwnSignals::sent_file`].
    pub(crate) fn file(&self) -> Option<Arc<OwnedFd>> {
        lock(&self.file).clone()
    }

    /// Closes the file, because the peer has it.
    pub(crate) fn sent_file(&self) {
        *lock(&self.file) = None;
    }

    /// The mapping of the signal slots, if the peer can map them too.
    pub(crate) fn mapping(&self) -> Option<&Arc<Mapping>> {
        self.shared.as_ref().ok()
    }
}

/// A peer's signal slots (for this rank's signals), wake source and valid keys.
pub(crate) struct PeerMemory {
    /// The number of this rank in the world of the peer, which the peer's table of keys uses.
    pub(crate) own_rank: Rank,
    pub(crate) signal_slots: Signals,
    pub(crate) wake_source: WakePage,
    pub(crate) keys: Arc<KeyTable>,
}

impl PeerMemory {
    /// Checks and maps the files of a peer, for which this rank has the number `own_rank`.
    /// `signal_slots` is the number of slots that the peer claims. Returns the process descriptor
    /// too.
    ///
    /// # Errors
    ///
    /// The files are not safe to map, or this process cannot map them.
    pub(crate) fn from_files(
        files: Vec<OwnedFd>,
        signal_slots: u32,
        own_rank: Rank,
    ) -> Result<(Self, OwnedFd), LossCause> {
        let [process, signal_slots_file, wake_file, keys_file] =
            <[OwnedFd; PAIR_FILES]>::try_from(files).map_err(|_| ProtocolViolation::MalformedFrame)?;
        if !is_process(&process) {
            return Err(ProtocolViolation::UnsafeFile.into());
        }
        let len = signal_slots as usize;
        if len > SIGNAL_SLOTS_MAX {
            return Err(ProtocolViolation::MalformedFrame.into());
        }
        let map = |file: &OwnedFd, bytes: usize, access| {
            check(file.as_fd(), bytes as u64)?;
            Mapping::new(file.as_fd(), 0, bytes, access).map_err(|error| LossCause::Unmapped(error.kind()))
        };
        let lines = Arc::new(map(&signal_slots_file, len.max(1) * SIGNAL_SLOT_BYTES, Access::ReadWrite)?);
        // SAFETY: the mapping was checked to hold `len` lines and is kept by `lines`. All contents
        // of a line are valid.
        let signal_slots = unsafe { Signals::from_raw(lines.base().cast(), len, lines.clone()) };
        let wake_source = WakePage(map(&wake_file, WAKE_PAGE_BYTES, Access::ReadWrite)?);
        let keys = Arc::new(KeyTable(map(&keys_file, KEY_TABLE_BYTES, Access::Read)?));
        Ok((Self { own_rank, signal_slots, wake_source, keys }, process))
    }
}

/// Most signal slots for a peer.
pub(crate) const SIGNAL_SLOTS_MAX: usize = 65_536;

/// Whether the file is a process descriptor. Files of other kinds may never become readable, or may
/// block.
fn is_process(file: &OwnedFd) -> bool {
    // SAFETY: signal 0 only checks; the call has no pointers except an optional one, which is null.
    let result = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            file.as_raw_fd(),
            0,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    };
    // The process may have ended, or may be in another process namespace. The file is a process
    // descriptor in these cases too.
    result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EBADF)
}

/// A GPU allocation that a peer sent. The driver checks it at the import.
pub(crate) struct GpuFile {
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) gpu: GpuId,
}

struct GpuRegion {
    file: GpuFile,
    /// The result of the import at the first use, with the GPU that uses the region.
    imported: OnceLock<Result<(ImportedMemory, Arc<Gpu>), CudaError>>,
}

/// A region of a peer that is mapped here.
pub(crate) struct PeerRegion {
    pub(crate) key: RegionKey,
    len: u64,
    /// The access rights of this rank.
    access: Access,
    base: NonNull<u8>,
    /// Absent for an empty region and for a region on a GPU.
    mapping: Option<Mapping>,
    gpu: Option<GpuRegion>,
    /// The owner's table of keys, set when the device has the region.
    keys: OnceLock<Arc<KeyTable>>,
    /// Whether the device has given out the address. Relaxed: only the device uses the flag, and
    /// the device has one owner.
    was_given_out: AtomicBool,
}

// SAFETY: the address lies inside a mapping or an import that the value owns. Its bytes are touched
// through raw pointers only.
unsafe impl Send for PeerRegion {}
// SAFETY: as above.
unsafe impl Sync for PeerRegion {}

impl PeerRegion {
    /// Maps `len` bytes of a checked file from `offset` on, with the rights that the file gives.
    pub(crate) fn new(key: RegionKey, file: &OwnedFd, offset: u64, len: u64) -> io::Result<Self> {
        let access = Access::of_file(file.as_fd())?;
        if len == 0 {
            let (base, was_given_out) = (NonNull::dangling(), AtomicBool::new(false));
            let keys = OnceLock::new();
            return Ok(Self { key, len, access, base, mapping: None, gpu: None, keys, was_given_out });
        }
        let too_long = || io::Error::from(io::ErrorKind::InvalidInput);
        let (first, bytes) = super::mapping::pages_around(offset, len).ok_or_else(too_long)?;
        let bytes = usize::try_from(bytes).map_err(|_| too_long())?;
        let mut mapping = Mapping::new(file.as_fd(), first, bytes, access)?;
        if access == Access::ReadWrite {
            // The owner does not fence a process that has ended (see `fence`), so no child may keep
            // the mapping.
            mapping.withhold_from_children()?;
        }
        // SAFETY: `offset` lies in the first of the mapped pages.
        let base = unsafe { mapping.base().add((offset - first) as usize) };
        let (keys, was_given_out) = (OnceLock::new(), AtomicBool::new(false));
        Ok(Self { key, len, access, base, mapping: Some(mapping), gpu: None, keys, was_given_out })
    }

    /// A region of the first bytes of a GPU allocation.
    pub(crate) fn on_gpu(key: RegionKey, file: GpuFile, len: u64) -> Self {
        let gpu = Some(GpuRegion { file, imported: OnceLock::new() });
        let (base, was_given_out) = (NonNull::dangling(), AtomicBool::new(false));
        let (access, keys) = (Access::ReadWrite, OnceLock::new());
        Self { key, len, access, base, mapping: None, gpu, keys, was_given_out }
    }

    /// Whether this rank may write the region.
    pub(crate) fn is_writable(&self) -> bool {
        self.access == Access::ReadWrite
    }

    /// Sets the owner's table of keys, which shows when the region has ended.
    pub(crate) fn set_key_table(&self, keys: &Arc<KeyTable>) {
        let _ = self.keys.set(keys.clone());
    }

    /// Whether the region is on a GPU. Then [`PeerRegion::import`] must be called before
    /// [`PeerRegion::locate`].
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Imports a region on a GPU, at the first call, for kernels and copies of `reader` or else of
    /// the GPU of the region.
    pub(crate) fn import(&self, reader: Option<&Arc<Gpu>>) -> Result<Arc<Gpu>, CudaError> {
        let Some(GpuRegion { file: GpuFile { file, bytes, gpu }, imported }) = &self.gpu else {
            return reader.cloned().map_or_else(|| Gpu::open(0), Ok);
        };
        let import = || {
            let reader = reader.map_or_else(|| Gpu::open(Gpu::find(*gpu)?), |reader| Ok(reader.clone()))?;
            // A length above the address space does not fit. The driver has no such allocation
            // either.
            let bytes = usize::try_from(*bytes).unwrap_or(usize::MAX);
            ImportedMemory::new(&reader, *gpu, file.as_fd(), bytes).map(|imported| (imported, reader))
        };
        imported.get_or_init(import).as_ref().map(|(_, reader)| reader.clone()).map_err(CudaError::clone)
    }

    /// Notes that the device gives out this region's address. Returns whether this is the first
    /// time.
    pub(crate) fn is_given_out_first(&self) -> bool {
        !self.was_given_out.swap(true, Ordering::Relaxed)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Address of a slice's first byte, if all of it lies inside.
    pub(crate) fn locate(&self, slice: &RemoteSlice) -> Option<NonNull<u8>> {
        let end = slice.offset.checked_add(slice.len)?;
        let base = match &self.gpu {
            None => self.base,
            Some(region) => region.imported.get()?.as_ref().ok()?.0.base(),
        };
        // SAFETY: the offset is at most the region's length, all of which is mapped from `base` on.
        (end <= self.len).then(|| unsafe { base.add(slice.offset as usize) })
    }

    /// Detaches the region from the peer. Its bytes and addresses stay, but later writes do not
    /// reach the peer.
    pub(crate) fn detach(&self) -> io::Result<()> {
        if let Some(Ok((imported, _))) = self.gpu.as_ref().and_then(|region| region.imported.get()) {
            return imported.detach().map_err(io::Error::other);
        }
        self.mapping.as_ref().map_or(Ok(()), Mapping::detach_by_copy)
    }
}

impl Sharing for PeerRegion {
    fn is_shared(&self) -> bool {
        // Partner: the fence in `mapping::empty`. If the key is valid after this fence, all bytes
        // that were read before it are the owner's.
        fence(Ordering::Acquire);
        self.keys.get().is_some_and(|keys| keys.holds(self.key))
    }
}

/// The signal slots for each peer. They are made at the first use, because a world may be much
/// larger than a host.
///
/// Each generation of a pair has signal slots of its own. The device is ahead of the watcher, which
/// may still send the signal slots of an earlier generation.
pub(crate) struct SignalSlotTable {
    each: usize,
    peers: Vec<Mutex<Generations>>,
}

#[derive(Default)]
struct Generations {
    /// The signal slots of each generation that may be requested, the newest generation last.
    slots: Vec<(u32, Arc<OwnSignals>)>,
    /// The mappings of former generations that may still be in use.
    former: Vec<Weak<Mapping>>,
}

impl SignalSlotTable {
    pub(crate) fn new(world_size: u32, each: usize) -> Self {
        Self { each, peers: (0..world_size).map(|_| Mutex::default()).collect() }
    }

    /// The signal slots of the newest generation.
    pub(crate) fn of(&self, peer: Rank) -> Arc<OwnSignals> {
        let mut generations = lock(&self.peers[peer as usize]);
        if let Some((_, newest)) = generations.slots.last() {
            return Arc::clone(newest);
        }
        let first = Arc::new(OwnSignals::new(self.each));
        generations.slots.push((0, Arc::clone(&first)));
        first
    }

    /// The signal slots of a generation, if it was not forgotten.
    pub(crate) fn of_generation(&self, peer: Rank, generation: u32) -> Option<Arc<OwnSignals>> {
        let generations = lock(&self.peers[peer as usize]);
        let own = generations.slots.iter().find(|(number, _)| *number == generation);
        own.map(|(_, own)| Arc::clone(own))
    }

    /// Makes signal slots for a new generation, or returns the system's error.
    pub(crate) fn renew(&self, peer: Rank, generation: u32) -> Result<(), Errno> {
        let own = Arc::new(OwnSignals::new(self.each));
        if let Some(refused) = own.failure() {
            return Err(refused);
        }
        lock(&self.peers[peer as usize]).slots.push((generation, own));
        Ok(())
    }

    /// Forgets the generations before this one.
    pub(crate) fn begin(&self, peer: Rank, generation: u32) {
        let mut generations = lock(&self.peers[peer as usize]);
        let Generations { slots, former } = &mut *generations;
        former.retain(|mapping| mapping.strong_count() > 0);
        let gone = slots.extract_if(.., |(number, _)| *number < generation);
        former.extend(gone.filter_map(|(_, own)| own.mapping().map(Arc::downgrade)));
    }

    /// The memory of all signal slots that a process with this rank may have mapped.
    pub(crate) fn mappings(&self, peer: Rank) -> Vec<Arc<Mapping>> {
        let generations = lock(&self.peers[peer as usize]);
        let current = generations.slots.iter().filter_map(|(_, own)| own.mapping().cloned());
        current.chain(generations.former.iter().filter_map(Weak::upgrade)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watcher_finds_the_signal_slots_of_its_generation_however_far_the_device_is() {
        let table = SignalSlotTable::new(2, 4);
        let slots = |own: &OwnSignals| own.signal_slots.clone();
        let first = slots(&table.of(1));
        for generation in 1..4 {
            table.renew(1, generation).expect("memory");
        }
        for generation in 0..4 {
            let own = table.of_generation(1, generation).expect("it was not forgotten");
            assert!(own.file().is_some(), "no peer has the file of generation {generation}");
        }
        table.begin(1, 2);
        assert!(table.of_generation(1, 1).is_none() && table.of_generation(1, 2).is_some());
        assert_eq!(table.mappings(1).len(), 3, "somebody reads the first ones");
        drop(first);
        assert_eq!(table.mappings(1).len(), 2, "a process of generation 0 can change nothing that is read");
        table
            .of(1)
            .signal_slots
            .signal(&crate::signals::Signal { signal_slot: 3, payload: crate::signals::Inline::EMPTY });
        assert_eq!(table.of_generation(1, 2).map(|own| own.signal_slots.count(3)), Some(0));
    }
}
