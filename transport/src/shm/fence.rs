//! Severing: private copies replace this rank's memory in place, so that no mapping of a peer
//! reaches it.
//!
//! **A process that has ended maps nothing**, so severing it takes no memory from other peers. The
//! kernel tells whether the process at the other end of the stream has ended ([`PeerProcess`]). Its
//! forked children have no mapping that they could write ([`Mapping::withhold_from_children`]). A
//! process descriptor that may belong to another process proves nothing.
//!
//! Lent memory stays as it is ([`Memory::peers_may_write`]): its file is sealed against writing, so
//! no peer changes a byte through a mapping of it.
//!
//! No peer takes part, so it does not matter whether the peer runs, is stopped, or is continued
//! later. Memory that the peer may have mapped is detached from all peers, because pages cannot be
//! taken from one process alone. Memory for other peers stays
//! ([`register_for`](crate::device::Device::register_for)). A write makes a page private; `poll`
//! does this part by part.
//!
//! **Memory stays bounded.** When a part is private, its part of the file is emptied (a hole is
//! punched), so that at most one part is stored twice. A file is emptied only if nobody but devices
//! maps it ([`Memory::may_empty_file`]). Peers that still map the file see zeros there. That is
//! allowed for every peer:
//!
//! * The severed peer may not write any more. If it does, its writes go to new pages of the file,
//!   which nobody reads. These pages are charged to the peer.
//! * Another peer may be reading in place, as a step of a run that the owner of the memory has
//!   given up. This reader must not take zeros for data. So the owner revokes its keys *before* the
//!   first hole, and a reader checks *after* reading whether the key still exists
//!   ([`Sharing`](crate::region::Sharing), like a sequence lock). A reader that saw a zero of a
//!   hole also sees that the key is revoked: between the two steps of the owner, the kernel removes
//!   the page from the reader's tables, which orders them. Then the reader's step does not
//!   complete, and the group's fault, which the owner has reported, ends the run. Gets are refused
//!   in the same way.
//! * Writers need no check: their writes to an owner that has severed a peer are lost in any case.
//! * Peers of other devices of this process, which registered the same memory: its keys are revoked
//!   there too ([`page_detachment`]), because its pages are replaced for the whole process.
//!
//! **Time stays bounded.** A refusal of the system (no memory for a part, no mapping) is retried
//! until [`REFUSAL_LIMIT`]. Then the fence is impossible, and the process is aborted, because its
//! memory must not be freed while a peer can write there. On a GPU there is another way: memory
//! that cannot be copied is unmapped. Then its bytes are lost, and its use is an error
//! ([`CudaMemory::detach`]).

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::link::PeerRegion;
use super::mapping::Mapping;
use super::page_detachment::{self, PendingPages};
#[cfg(doc)]
use super::peer_status::PeerProcess;
use crate::clock::Nanos;
use crate::cuda::CudaMemory;
use crate::memory::Memory;

/// How long the system may refuse the same part before the process is aborted.
pub(crate) const REFUSAL_LIMIT: Duration = Duration::from_secs(10);

enum FenceJob {
    /// Pages of this rank's memory.
    OwnMemory(PendingPages),
    /// GPU memory of this rank.
    OwnOnGpu(Arc<dyn Memory>),
    /// Signal slots of this rank that the severed peer writes.
    Signals(Arc<Mapping>),
    /// Memory of the severed peer that this process still holds mapped.
    SeveredRegion(Arc<PeerRegion>),
}

/// The remaining work until the fence holds.
#[derive(Default)]
pub(crate) struct Fence {
    jobs: VecDeque<FenceJob>,
    /// When the system first refused the first remaining job.
    refused_since: Option<Nanos>,
}

impl Fence {
    pub(crate) fn detach_own(&mut self, memory: Arc<dyn Memory>) {
        let parts = page_detachment::detach(&memory);
        if CudaMemory::of(&*memory).is_some() {
            self.jobs.push_back(FenceJob::OwnOnGpu(memory));
        } else {
            self.jobs.extend(parts.into_iter().map(FenceJob::OwnMemory));
        }
    }

    pub(crate) fn detach_signal_slots(&mut self, mapping: Arc<Mapping>) {
        self.jobs.push_back(FenceJob::Signals(mapping));
    }

    pub(crate) fn detach_theirs(&mut self, region: Arc<PeerRegion>) {
        self.jobs.push_back(FenceJob::SeveredRegion(region));
    }

    /// Whether the fence holds.
    pub(crate) fn holds(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Carries out a part of the remaining work. After a refusal the next poll retries.
    ///
    /// # Errors
    ///
    /// The system has refused for [`REFUSAL_LIMIT`].
    pub(crate) fn advance(&mut self, now: Nanos) -> io::Result<()> {
        let Some(job) = self.jobs.front_mut() else { return Ok(()) };
        let step = match job {
            FenceJob::OwnMemory(part) => part.advance(),
            FenceJob::OwnOnGpu(memory) => match CudaMemory::of(&**memory) {
                Some(memory) => memory.detach().map(|()| true).map_err(io::Error::other),
                None => Ok(true),
            },
            FenceJob::Signals(mapping) => mapping.detach_by_copy().map(|()| true),
            FenceJob::SeveredRegion(region) => region.detach().map(|()| true),
        };
        match step {
            Ok(is_done) => {
                self.refused_since = None;
                if is_done {
                    self.jobs.pop_front();
                }
            }
            Err(error) => match self.refused_since {
                Some(since) if now.since(since) >= REFUSAL_LIMIT => return Err(error),
                Some(_) => {}
                None => {
                    tracing::warn!(%error, "memory could not be detached from a severed peer yet");
                    self.refused_since = Some(now);
                }
            },
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::ptr::NonNull;

    use super::page_detachment::PIECE_BYTES;
    use super::*;
    use crate::memory::{Share, SharedMemory, Space};

    /// Memory whose file cannot be mapped.
    struct Unmappable {
        memory: Arc<SharedMemory>,
        file: File,
    }

    // SAFETY: the bytes are those of `memory`, which is kept. Nothing can replace their pages,
    // because the file has none of them.
    unsafe impl Memory for Unmappable {
        fn base(&self) -> NonNull<u8> {
            self.memory.base()
        }
        fn len(&self) -> usize {
            self.memory.len()
        }
        fn space(&self) -> Space {
            Space::Host
        }
        fn share(&self) -> Share<'_> {
            Share::File { file: self.file.as_fd(), offset: 0 }
        }
    }

    #[test]
    fn what_the_system_refuses_is_tried_again_until_a_limit() {
        let mut fence = Fence::default();
        let memory = SharedMemory::new(8192).unwrap();
        fence.detach_own(Arc::new(Unmappable { memory, file: File::open("/").unwrap() }));
        let begin = Nanos(1_000);
        assert!(fence.advance(begin).is_ok());
        assert!(fence.advance(begin + REFUSAL_LIMIT / 2).is_ok());
        assert!(!fence.holds(), "fence is not claimed");
        let error = fence.advance(begin + REFUSAL_LIMIT).expect_err("it was refused for the whole limit");
        assert!(!error.to_string().is_empty());
    }

    /// Blocks of 512 bytes that a file in memory occupies.
    fn blocks(memory: &SharedMemory) -> u64 {
        let Share::File { file, .. } = Memory::share(memory) else { unreachable!("it is in a file") };
        rustix::fs::fstat(file).unwrap().st_blocks as u64
    }

    #[test]
    fn memory_that_only_devices_map_is_kept_once() {
        for is_given_away in [false, true] {
            let memory = SharedMemory::new(PIECE_BYTES * 5 / 2 + 100).unwrap();
            // SAFETY: all of the memory is mapped, and nobody else touches it.
            unsafe { memory.base().as_ptr().write_bytes(7, memory.len()) };
            if is_given_away {
                let _ = memory.file();
            }
            let before = blocks(&memory);
            let mut fence = Fence::default();
            fence.detach_own(memory.clone());
            // The fence of another device, or of another region of the same memory.
            let mut other = Fence::default();
            other.detach_own(memory.clone());
            for number in 0..3_u64 {
                assert!(!fence.holds());
                fence.advance(Nanos(number)).unwrap();
                let emptied = before - blocks(&memory);
                let expected = (PIECE_BYTES as u64 / 512 * (number + 1)).min(before);
                assert_eq!(emptied, if is_given_away { 0 } else { expected });
            }
            assert!(fence.holds());
            while !other.holds() {
                other.advance(Nanos(9)).unwrap();
            }
            // SAFETY: as above.
            let bytes = unsafe { std::slice::from_raw_parts(memory.base().as_ptr(), memory.len()) };
            assert!(bytes.iter().all(|byte| *byte == 7), "its owner keeps the bytes");
        }
    }
}
