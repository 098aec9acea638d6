//! Severing: this rank's memory is replaced, in place, by private copies, so that no peer's mapping reaches it.
//!
//! Nobody is asked, so it does not matter whether the peer runs, is stopped, or is continued later. Memory that any
//! peer may have mapped is detached from all of them, as pages cannot be taken from one of several. A page becomes
//! private by being written to; that is done in pieces, from `poll`.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use super::directory::{file_of, remember_detached};
use super::link::PeerRegion;
use super::mapping::{Mapping, make_private, pages_around, touch};
use crate::memory::Memory;

/// Bytes made private in one poll; about 2 ms.
const PIECE_BYTES: usize = 4 << 20;

enum Job {
    /// Memory of this rank: how many bytes are private already, once its mapping is.
    Own { memory: Arc<dyn Memory>, private_bytes: Option<usize> },
    /// Cells of this rank that the severed peer writes to.
    Cells(Arc<Mapping>),
    /// Memory of the severed peer that somebody here still holds mapped.
    Theirs(Arc<PeerRegion>),
}

/// What is left to do until all is silent.
#[derive(Default)]
pub(crate) struct Silence {
    jobs: VecDeque<Job>,
}

impl Silence {
    pub(crate) fn detach_own(&mut self, memory: Arc<dyn Memory>) {
        remember_detached(&memory);
        self.jobs.push_back(Job::Own { memory, private_bytes: None });
    }

    pub(crate) fn detach_cells(&mut self, mapping: Arc<Mapping>) {
        self.jobs.push_back(Job::Cells(mapping));
    }

    pub(crate) fn detach_theirs(&mut self, region: Arc<PeerRegion>) {
        self.jobs.push_back(Job::Theirs(region));
    }

    /// Whether all that was asked for is done.
    pub(crate) fn holds(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Does a piece of what is left. What the system refuses (for want of memory) is tried again at the next poll:
    /// silence is never claimed that does not hold.
    pub(crate) fn advance(&mut self) {
        let Some(job) = self.jobs.front_mut() else { return };
        let step = match job {
            Job::Own { memory, private_bytes } => match memory.as_cuda() {
                Some(memory) => memory.detach().map(|()| true).map_err(std::io::Error::other),
                None => advance_own(&**memory, private_bytes),
            },
            Job::Cells(mapping) => mapping.detach_by_copy().map(|()| true),
            Job::Theirs(region) => region.detach().map(|()| true),
        };
        match step {
            Ok(true) => {
                self.jobs.pop_front();
            }
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "memory could not be detached from a severed peer yet"),
        }
    }
}

/// Whether all of the memory is private now.
fn advance_own(memory: &dyn Memory, private_bytes: &mut Option<usize>) -> std::io::Result<bool> {
    let Some((file, offset)) = file_of(memory) else { return Ok(true) };
    // Registered memory lies at the same place in its pages as in the file's, see `ShmDevice::register`.
    let (start, len) = (memory.base().as_ptr() as u64, memory.len() as u64);
    // No pages, nothing to take back; and the system refuses to map none of them.
    let Some((first, bytes)) = pages_around(start, len).filter(|(_, bytes)| *bytes > 0) else {
        return Ok(true);
    };
    let (before, bytes) = ((start - first) as usize, bytes as usize);
    // SAFETY: the first byte of the page that the memory begins in.
    let base: NonNull<u8> = unsafe { memory.base().sub(before) };
    let done = match private_bytes {
        Some(done) => done,
        None => {
            // SAFETY: whole pages around the memory, which by its contract map this file here and may be replaced.
            unsafe { make_private(base, bytes, file, offset - before as u64)? };
            private_bytes.insert(0)
        }
    };
    let piece = PIECE_BYTES.min(bytes - *done);
    // SAFETY: pages inside those that `make_private` replaced.
    unsafe { touch(base.add(*done), piece) };
    *done += piece;
    Ok(*done == bytes)
}
