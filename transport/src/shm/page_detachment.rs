//! Memory of this process whose pages are private or become private, for all devices of the
//! process.
//!
//! **Invariant:** the pages of a memory are replaced once. A second time would lose their bytes,
//! because the file behind them may be empty by then. So devices that detach the same pages share
//! one [`Detachment`].

use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, Weak};

use super::directory::file_of;
use super::mapping::{empty, make_private, pages_around, touch};
use super::shared::Shared;
use crate::memory::Memory;
use crate::mutex::lock;

/// Bytes that are made private at once; this takes about 2 ms.
pub(super) const PIECE_BYTES: usize = 4 << 20;

/// Pages that become private.
struct Detachment {
    /// Address of the first page, and the length of all.
    pages: (u64, u64),
    /// The number of these bytes that are private.
    private_bytes: Mutex<u64>,
}

/// Pages of a memory that must be private before no peer can access the memory.
pub(crate) struct PendingPages {
    memory: Arc<dyn Memory>,
    detachment: Arc<Detachment>,
}

/// A memory, and pages of it that are or become private.
type Detached = (Weak<dyn Memory>, Arc<Detachment>);

static DETACHED: Mutex<Vec<Detached>> = Mutex::new(Vec::new());

/// The devices of this process.
static DEVICES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Registers this device, which then learns which memory other devices detach.
pub(super) fn register_device(device: &Arc<Shared>) {
    let mut devices = lock(&DEVICES);
    devices.retain(|other| other.strong_count() > 0);
    devices.push(Arc::downgrade(device));
}

/// Revokes the keys of the memory in all devices of this process, and returns the pages to make
/// private.
pub(super) fn detach(memory: &Arc<dyn Memory>) -> Vec<PendingPages> {
    let parts = pending_pages(memory);
    let devices: Vec<_> = {
        let devices = lock(&DEVICES);
        devices.iter().filter_map(Weak::upgrade).collect()
    };
    for device in devices.iter().filter(|device| !device.is_forked()) {
        device.detach(memory);
    }
    parts
}

fn pending_pages(memory: &Arc<dyn Memory>) -> Vec<PendingPages> {
    let mut detached = lock(&DETACHED);
    detached.retain(|(other, _)| other.strong_count() > 0);
    let (first, bytes) = pages_of(memory);
    let mut parts: Vec<PendingPages> = detached
        .iter()
        .filter(|(_, other)| overlap(other.pages, (first, bytes)))
        .filter_map(|(memory, other)| {
            Some(PendingPages { memory: memory.upgrade()?, detachment: other.clone() })
        })
        .collect();
    parts.sort_by_key(|part| part.detachment.pages.0);
    let mut own = Vec::new();
    let mut from = first;
    for (other, other_bytes) in parts.iter().map(|part| part.detachment.pages) {
        own.push((from, other.saturating_sub(from)));
        from = from.max(other + other_bytes);
    }
    own.push((from, (first + bytes).saturating_sub(from)));
    for pages in own.into_iter().filter(|(_, bytes)| *bytes > 0) {
        let detachment = Arc::new(Detachment { pages, private_bytes: Mutex::new(0) });
        detached.push((Arc::downgrade(memory), detachment.clone()));
        parts.push(PendingPages { memory: memory.clone(), detachment });
    }
    parts
}

impl PendingPages {
    /// Makes a part of the pages private. Returns whether all pages are private.
    pub(super) fn advance(&self) -> io::Result<bool> {
        let mut private_bytes = lock(&self.detachment.private_bytes);
        let (first, bytes) = self.detachment.pages;
        let Some((file, offset)) = file_of(&*self.memory) else { return Ok(true) };
        let piece = (bytes - *private_bytes).min(PIECE_BYTES as u64);
        if piece == 0 {
            return Ok(true);
        }
        let at = first + *private_bytes;
        let start = self.memory.base().as_ptr() as u64;
        // Registered memory has the same offset in its pages as in the file's, see
        // `ShmDevice::register`.
        let piece_offset = (offset + at).wrapping_sub(start);
        // SAFETY: the offset is within the pages around the memory, all of which are mapped.
        let piece_base: NonNull<u8> = unsafe { self.memory.base().offset(at.wrapping_sub(start) as isize) };
        // SAFETY: by the memory's contract, these whole pages map this file here and may be
        // replaced. They are not replaced yet, because the lock is held and they are beyond the
        // private pages.
        unsafe {
            make_private(piece_base, piece as usize, file, piece_offset)?;
            touch(piece_base, piece as usize)?;
        }
        *private_bytes += piece;
        if self.memory.may_empty_file() {
            // If the file cannot be emptied, the bytes are stored twice. The fence holds in this
            // case too.
            let _ = empty(file, piece_offset, piece as usize);
        }
        Ok(*private_bytes == bytes)
    }
}

/// Whether the memory shares pages with memory that was detached.
pub(crate) fn was_detached(memory: &Arc<dyn Memory>) -> bool {
    let detached = lock(&DETACHED);
    let pages = pages_of(memory);
    detached.iter().any(|(other, detachment)| other.strong_count() > 0 && overlap(detachment.pages, pages))
}

/// Whether two memories have pages in common.
pub(super) fn share_pages(one: &Arc<dyn Memory>, other: &Arc<dyn Memory>) -> bool {
    overlap(pages_of(one), pages_of(other))
}

fn overlap((start, bytes): (u64, u64), (other, other_bytes): (u64, u64)) -> bool {
    start < other + other_bytes && other < start + bytes
}

/// The pages around a memory: the address of the first page, and the length of all pages.
fn pages_of(memory: &Arc<dyn Memory>) -> (u64, u64) {
    pages_around(memory.base().as_ptr() as u64, memory.len() as u64).unwrap_or_default()
}
