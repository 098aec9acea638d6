//! Healing: a process that joined reads the states of the job from the members.
//!
//! When an epoch is entered, each member says whether it has the states, and how they are laid out
//! ([`Said::States`]). Where one has none, the others stand still at the edge of the step. Each of
//! them writes a [`Manifest`] into registered memory: where its states are, and the hash (XXH3-64)
//! of each block of them. The newcomer reads the blocks in turn from all of them, by gets, and
//! compares the hash of each with those of all manifests. Then it says so ([`Said::Healed`]), and
//! the step begins. With [`Heal::Hidden`](super::Heal) all that goes on beside the newcomer's first
//! step ([`hidden`](super::hidden)).
//!
//! A state on a GPU ([`GpuState`](super::GpuState)) has a copy in the host's memory, registered
//! once for all epochs. A member fills the copy from the GPU before it hashes or lends the state,
//! and others read the copy. A newcomer reads to the host's memory as any state, and copies to the
//! GPU what has the right hashes. So no peer knows where a state is on a GPU, and no fence takes
//! it.
//!
//! **Invariants:** a newcomer updates no state before every block that it has read has the hash
//! that most members have for it. What it reads is written to memory that no reference of the
//! program points to ([`State`](super::State)). While a state is read nobody changes it: all
//! members wait, or the epoch is over and the read counts for nothing, but for the same step. A
//! copy is filled after the work of the last update has ended on the GPU, and only when nobody
//! reads it in an epoch that goes on.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::Duration;

use pleach_transport::cuda::{CudaEvent, CudaMemory};
use pleach_transport::wire::{Malformed, Reader, Writer};
use pleach_transport::{RegionKey, RemoteSlice, Slice};
use xxhash_rust::xxh3::xxh3_64;

use super::SessionError;
use crate::group::{Buffer, session_buffer};

/// Bytes of a block, of which one hash tells.
pub(crate) const BLOCK_BYTES: usize = 4 << 20;

/// States and hashes of a manifest at most.
const COUNT_MAX: usize = 1 << 24;

/// Bytes of a state's name at most.
pub(crate) const NAME_BYTES_MAX: usize = 1024;

/// Longest wait for the last update of a state on a GPU, and for a copy of it.
const GPU_LIMIT: Duration = Duration::from_secs(60);

/// Locked while the program changes a state, or the session reads it. Inside, of a state on a GPU:
/// an event behind the work of all changes, unless that is known to have ended.
pub(crate) type InUse = Arc<Mutex<Option<CudaEvent>>>;

/// What a process says about states, in an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    /// Whether it has them, whether it can read them behind a step, and a digest of how they are
    /// laid out.
    States { has_them: bool, hides: bool, layout: u64 },
    /// Where its manifest is.
    Manifest(RemoteSlice),
    /// It has read so much of them, in percent.
    Read { percent: u8 },
    /// It has them now.
    Healed,
    /// The hash of all its states, before a step; `None`: it has not read them.
    Audit { step: u64, hash: Option<u64> },
}

impl Said {
    pub(crate) fn put(self, writer: Writer) -> Writer {
        match self {
            Self::States { has_them, hides, layout } => {
                writer.u8(0).u8(u8::from(has_them) | u8::from(hides) << 1).u64(layout)
            }
            Self::Manifest(slice) => writer.u8(1).u64(slice.key.0).u64(slice.offset).u64(slice.len),
            Self::Healed => writer.u8(2),
            Self::Audit { step, hash: Some(hash) } => writer.u8(3).u64(step).u64(hash),
            Self::Audit { step, hash: None } => writer.u8(4).u64(step),
            Self::Read { percent } => writer.u8(5).u8(percent),
        }
    }

    pub(crate) fn take(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(match reader.u8()? {
            0 => {
                let flags = Some(reader.u8()?).filter(|flags| *flags < 4).ok_or(Malformed)?;
                Self::States { has_them: flags & 1 != 0, hides: flags & 2 != 0, layout: reader.u64()? }
            }
            1 => {
                let key = RegionKey(reader.u64()?);
                Self::Manifest(RemoteSlice { key, offset: reader.u64()?, len: reader.u64()? })
            }
            2 => Self::Healed,
            3 => Self::Audit { step: reader.u64()?, hash: Some(reader.u64()?) },
            4 => Self::Audit { step: reader.u64()?, hash: None },
            5 => {
                Self::Read { percent: Some(reader.u8()?).filter(|percent| *percent <= 100).ok_or(Malformed)? }
            }
            _ => return Err(Malformed),
        })
    }
}

/// A state, as the session knows it.
#[derive(Clone)]
pub(crate) struct Entry {
    /// The element's name.
    element: &'static str,
    bytes: usize,
    /// Registered; nobody but the state itself writes to it, or, where that is on a GPU, the
    /// session.
    memory: Slice,
    /// What was read from the members, in the place of `memory`.
    healed: Arc<OnceLock<Slice>>,
    in_use: InUse,
    /// Where the state is, if not in `memory`.
    on_gpu: Option<Arc<CudaMemory>>,
}

impl Entry {
    pub(crate) fn new(element: &'static str, bytes: usize, memory: Slice) -> Self {
        Self { element, bytes, memory, healed: Arc::default(), in_use: Arc::default(), on_gpu: None }
    }

    /// The entry of a state that is on a GPU: its `memory` is the copy.
    pub(crate) fn on_gpu(self, state: Arc<CudaMemory>) -> Self {
        Self { on_gpu: Some(state), ..self }
    }

    pub(crate) fn healed(&self) -> Arc<OnceLock<Slice>> {
        Arc::clone(&self.healed)
    }

    pub(crate) fn in_use(&self) -> InUse {
        Arc::clone(&self.in_use)
    }

    /// Nobody changes the state while this is held. Of a state on a GPU the last change is done.
    fn unchanged(&self, name: &str) -> Result<MutexGuard<'_, Option<CudaEvent>>, SessionError> {
        // Who changes it now may be this very thread, so nobody waits.
        let mut unchanged = match self.in_use.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(SessionError::StateInUse(name.to_owned())),
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Ok(unchanged) => unchanged,
        };
        if let Some(change) = &*unchanged {
            change.wait(GPU_LIMIT)?;
            *unchanged = None;
        }
        Ok(unchanged)
    }

    /// The bytes of this memory of the host.
    fn bytes_of(&self, memory: &Slice) -> Buffer<u8> {
        session_buffer(memory.clone(), self.bytes, 0)
    }

    fn now(&self) -> &Slice {
        self.healed.get().unwrap_or(&self.memory)
    }
}

/// The states of a session.
#[derive(Clone, Default)]
pub(crate) struct States {
    by_name: BTreeMap<String, Entry>,
    /// Whether a fence has taken memory that peers might have written to: then newcomers read
    /// copies.
    are_taken: bool,
}

impl States {
    /// Adds a state; false: there is one of this name.
    pub(crate) fn add(&mut self, name: &str, entry: Entry) -> bool {
        let is_new = !self.by_name.contains_key(name);
        if is_new {
            self.by_name.insert(name.to_owned(), entry);
        }
        is_new
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// Their names.
    pub(crate) fn names(&self) -> Vec<String> {
        self.by_name.keys().cloned().collect()
    }

    /// A digest of names, elements and lengths.
    pub(crate) fn layout(&self) -> u64 {
        let writer = self.by_name.iter().fold(Writer::default(), |writer, (name, entry)| {
            writer.bytes(name.as_bytes()).bytes(entry.element.as_bytes()).u64(entry.bytes as u64)
        });
        xxh3_64(&writer.finish())
    }

    /// All of them in words.
    pub(crate) fn describe(&self) -> String {
        let one =
            |(name, entry): (&String, &Entry)| format!("{name}: {} bytes of {}", entry.bytes, entry.element);
        let all: Vec<String> = self.by_name.iter().map(one).collect();
        if all.is_empty() { "none".to_owned() } else { all.join(", ") }
    }

    /// One hash of all bytes.
    pub(crate) fn hash(&self) -> Result<u64, SessionError> {
        let writer = self.hashes()?.into_iter().fold(Writer::default(), Writer::u64);
        Ok(xxh3_64(&writer.finish()))
    }

    /// By block: its hash.
    fn hashes(&self) -> Result<Vec<u64>, SessionError> {
        let mut hashes = Vec::new();
        for (name, entry) in &self.by_name {
            let _unchanged = entry.unchanged(name)?;
            if let Some(state) = &entry.on_gpu {
                state.load(0, &mut entry.bytes_of(entry.now()), GPU_LIMIT)?;
            }
            for from in (0..entry.bytes).step_by(BLOCK_BYTES) {
                let block = from..entry.bytes.min(from + BLOCK_BYTES);
                hashes.push(hash(entry.now().slice(block).expect("inside of it")));
            }
        }
        Ok(hashes)
    }

    /// A fence has taken memory.
    pub(crate) fn were_taken(&mut self) {
        self.are_taken = true;
    }

    /// What newcomers read first, and the memory that it names. `memory` registers some.
    pub(crate) fn manifest(
        &self,
        memory: impl Fn(usize) -> Result<Slice, SessionError>,
    ) -> Result<(Manifest, Vec<Slice>), SessionError> {
        // First, as that fills the copies of states on a GPU.
        let hashes = self.hashes()?;
        let readable = |entry: &Entry| {
            if !self.are_taken {
                return Ok(entry.now().clone());
            }
            let copy = memory(entry.bytes)?;
            copy.store(&entry.now().to_vec()[..entry.bytes]);
            Ok(copy)
        };
        let slices = self.by_name.values().map(readable).collect::<Result<Vec<_>, SessionError>>()?;
        let remote = slices.iter().map(Slice::remote).collect();
        Ok((Manifest { slices: remote, hashes }, slices))
    }

    /// The blocks of all states, in the order of the hashes: number of the state, and bytes.
    pub(crate) fn blocks(&self) -> Vec<(usize, std::ops::Range<usize>)> {
        let of = |(number, entry): (usize, &Entry)| {
            let bytes = entry.bytes;
            (0..bytes).step_by(BLOCK_BYTES).map(move |from| (number, from..bytes.min(from + BLOCK_BYTES)))
        };
        self.by_name.values().enumerate().flat_map(of).collect()
    }

    /// Bytes of each state.
    pub(crate) fn lengths(&self) -> Vec<usize> {
        self.by_name.values().map(|entry| entry.bytes).collect()
    }

    /// The name of a state.
    pub(crate) fn name(&self, number: usize) -> String {
        self.by_name.keys().nth(number).cloned().unwrap_or_default()
    }

    /// The states are what was read.
    pub(crate) fn heal(&self, memory: Vec<Slice>) -> Result<(), SessionError> {
        for ((name, entry), memory) in self.by_name.iter().zip(&memory) {
            let Some(state) = &entry.on_gpu else { continue };
            let _unchanged = entry.unchanged(name)?;
            state.store(0, &entry.bytes_of(memory), GPU_LIMIT)?;
        }
        // After the last error that there may be, as a session heals once.
        for (entry, memory) in self.by_name.values().zip(memory) {
            let _ = entry.healed.set(memory);
        }
        Ok(())
    }
}

/// The hash of a block that nobody changes meanwhile.
pub(crate) fn hash(block: Slice) -> u64 {
    let bytes = block.len();
    xxh3_64(&session_buffer::<u8>(block, bytes, 0))
}

/// Where the states of a member are, and the hash of each block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    slices: Vec<RemoteSlice>,
    hashes: Vec<u64>,
}

impl Manifest {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let writer = self.slices.iter().fold(Writer::default().count(self.slices.len()), |writer, slice| {
            writer.u64(slice.key.0).u64(slice.offset).u64(slice.len)
        });
        self.hashes.iter().fold(writer.count(self.hashes.len()), |writer, hash| writer.u64(*hash)).finish()
    }

    /// Bytes of the manifest of so many states and blocks.
    pub(crate) fn encoded_len(states: usize, blocks: usize) -> usize {
        2 * size_of::<u32>() + 3 * size_of::<u64>() * states + size_of::<u64>() * blocks
    }

    /// The manifest of as many states and blocks as this process has.
    pub(crate) fn decode(bytes: &[u8], states: usize, blocks: usize) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let count = reader.count(COUNT_MAX.min(bytes.len()))?;
        let slices = (0..count).map(|_| {
            let key = RegionKey(reader.u64()?);
            Ok(RemoteSlice { key, offset: reader.u64()?, len: reader.u64()? })
        });
        let slices = slices.collect::<Result<Vec<_>, Malformed>>()?;
        let count = reader.count(COUNT_MAX.min(bytes.len()))?;
        let hashes = (0..count).map(|_| reader.u64()).collect::<Result<Vec<_>, _>>()?;
        reader.end()?;
        if slices.len() != states || hashes.len() != blocks {
            return Err(Malformed);
        }
        Ok(Self { slices, hashes })
    }

    /// Bytes of a state there.
    pub(crate) fn source(&self, state: usize, bytes: &std::ops::Range<usize>) -> Option<RemoteSlice> {
        self.slices[state].slice(bytes.start as u64..bytes.end as u64).ok()
    }

    pub(crate) fn hash(&self, block: usize) -> u64 {
        self.hashes[block]
    }
}

/// The hash that more than half of these say, or all of two.
pub(crate) fn most(hashes: &[u64]) -> Option<u64> {
    hashes
        .iter()
        .copied()
        .find(|hash| 2 * hashes.iter().filter(|other| *other == hash).count() > hashes.len())
}

/// Decodes bytes as a manifest of as many states and blocks as they may hold: for fuzzing.
pub(crate) fn check_decoder(bytes: &[u8]) {
    let Ok(states) = Reader::new(bytes).u32() else { return };
    let states = (states as usize).min(bytes.len());
    let blocks = bytes.len().saturating_sub(Manifest::encoded_len(states, 0)) / size_of::<u64>();
    if let Ok(manifest) = Manifest::decode(bytes, states, blocks) {
        assert_eq!(manifest.encode(), bytes);
        for state in 0..states {
            let _ = manifest.source(state, &(0..1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_survives_the_wire() {
        let slice = RemoteSlice { key: RegionKey(7), offset: 8, len: 9 };
        let all = [
            Said::States { has_them: true, hides: false, layout: 5 },
            Said::States { has_them: false, hides: true, layout: 5 },
            Said::Manifest(slice),
            Said::Read { percent: 40 },
            Said::Healed,
            Said::Audit { step: 3, hash: Some(4) },
            Said::Audit { step: 3, hash: None },
        ];
        for said in all {
            let bytes = said.put(Writer::default()).finish();
            assert_eq!(Said::take(&mut Reader::new(&bytes)), Ok(said));
            assert_eq!(Said::take(&mut Reader::new(&bytes[..bytes.len() - 1])), Err(Malformed));
        }
        let beyond = Said::Read { percent: 101 }.put(Writer::default()).finish();
        assert_eq!(Said::take(&mut Reader::new(&beyond)), Err(Malformed));
    }

    #[test]
    fn a_manifest_survives_the_wire_and_others_are_refused() {
        let slice = RemoteSlice { key: RegionKey(7), offset: 8, len: 90 };
        let manifest = Manifest { slices: vec![slice; 2], hashes: vec![1, 2, 3] };
        let bytes = manifest.encode();
        assert_eq!(bytes.len(), Manifest::encoded_len(2, 3));
        assert_eq!(Manifest::decode(&bytes, 2, 3), Ok(manifest.clone()));
        assert!(Manifest::decode(&bytes, 1, 3).is_err() && Manifest::decode(&bytes, 2, 4).is_err());
        assert!((0..bytes.len()).all(|end| Manifest::decode(&bytes[..end], 2, 3).is_err()));
        assert_eq!(manifest.source(0, &(80..90)), Some(RemoteSlice { offset: 88, len: 10, ..slice }));
        assert_eq!(manifest.source(0, &(80..91)), None);
    }

    #[test]
    fn the_hash_that_counts_is_that_of_more_than_half() {
        assert_eq!(most(&[]), None);
        assert_eq!(most(&[4]), Some(4));
        assert_eq!(most(&[4, 5]), None);
        assert_eq!(most(&[4, 5, 4]), Some(4));
        assert_eq!(most(&[4, 5, 6]), None);
    }
}
