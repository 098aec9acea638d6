//! Signal slots: the counters by which a put reports its arrival at the target.
//!
//! A target has for each peer a table of signal slots. A signal slot is a counter on a cache line
//! of its own with [`SIGNAL_SLOT_PAYLOAD_BYTES`] of payload, so that a small message is one line. A
//! signal stores its payload and then adds one to the counter. Only that peer's signals change the
//! signal slot, so it has one writer.
//!
//! **Invariant:** a thread that sees a counter of `n` ([`Signals::count`], acquire) sees every byte
//! of the puts whose signals made it `n`, and the payload of the last of them until the peer's next
//! signal to the same signal slot. Overwriting a payload that was not read yet is an error of the
//! sender; the proof of a schedule excludes it.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

#[cfg(not(loom))]
use memmap2::MmapMut;

use crate::primitive::{AtomicU64, Ordering};

/// Bytes of payload beside a signal slot's counter.
pub const SIGNAL_SLOT_PAYLOAD_BYTES: usize = 48;

const PAYLOAD_WORDS: usize = SIGNAL_SLOT_PAYLOAD_BYTES / 8;

/// At most [`SIGNAL_SLOT_PAYLOAD_BYTES`] bytes by value: the payload of a signal, or the source of
/// a tiny put.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Inline {
    words: [u64; PAYLOAD_WORDS],
    /// A whole word, so that the value is copied in whole words.
    len: usize,
}

impl Inline {
    /// No bytes.
    pub const EMPTY: Self = Self { words: [0; PAYLOAD_WORDS], len: 0 };

    /// These bytes, or `None` when there are more than [`SIGNAL_SLOT_PAYLOAD_BYTES`].
    #[must_use]
    #[inline]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > SIGNAL_SLOT_PAYLOAD_BYTES {
            return None;
        }
        let mut inline = Self { words: [0; PAYLOAD_WORDS], len: bytes.len() };
        bytemuck::bytes_of_mut(&mut inline.words)[..bytes.len()].copy_from_slice(bytes);
        Some(inline)
    }

    /// The first `len` bytes (at most all) of these words in the processor's byte order.
    #[must_use]
    #[inline]
    pub fn of_words(words: [u64; SIGNAL_SLOT_PAYLOAD_BYTES / 8], len: usize) -> Self {
        Self { words, len: len.min(SIGNAL_SLOT_PAYLOAD_BYTES) }
    }

    /// The words that hold the bytes; the bytes beyond them have no meaning.
    #[inline]
    pub(crate) fn words(&self) -> &[u64; PAYLOAD_WORDS] {
        &self.words
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &bytemuck::bytes_of(&self.words)[..self.len()]
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Inline {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Inline({} bytes)", self.len)
    }
}

/// Raised at the target when all bytes of its put are visible there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// The target's signal slot for this sender.
    pub signal_slot: u16,
    /// Bytes stored beside the counter.
    pub payload: Inline,
}

/// One signal slot: a counter and its payload, alone on their cache line.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SignalLine {
    count: AtomicU64,
    payload: [AtomicU64; PAYLOAD_WORDS],
    reserved: AtomicU64,
}

impl SignalLine {
    /// A signal slot with a count of zero.
    #[must_use]
    pub fn new() -> Self {
        Self {
            count: AtomicU64::new(0),
            payload: std::array::from_fn(|_| AtomicU64::new(0)),
            reserved: AtomicU64::new(0),
        }
    }
}

impl Default for SignalLine {
    fn default() -> Self {
        Self::new()
    }
}

/// The signal slots of one rank for one peer. Handles are cheap; reading is wait-free and safe from
/// any thread.
#[derive(Clone)]
pub struct Signals {
    lines: NonNull<SignalLine>,
    len: usize,
    /// The owner of the lines: a mapping or a heap slice.
    _keep: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for Signals {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Signals({})", self.len)
    }
}

// SAFETY: the lines are atomics, kept alive by `_keep`, which is itself Send + Sync.
#[allow(unsafe_code)]
unsafe impl Send for Signals {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Signals {}

impl Signals {
    /// `len` signal slots in pages of this process that are not accessed yet. Most signal slots of
    /// most pairs are never used, and such pages take no memory. The heap would hand out pages that
    /// were used before.
    #[cfg(not(loom))]
    #[must_use]
    pub fn new(len: usize) -> Self {
        let bytes = len.max(1) * size_of::<SignalLine>();
        let mut pages = MmapMut::map_anon(bytes)
            .unwrap_or_else(|error| panic!("no memory for {len} signal slots ({bytes} bytes): {error}"));
        let lines = NonNull::new(pages.as_mut_ptr()).expect("mapped").cast::<SignalLine>();
        // The mapping is only kept: its bytes are accessed through the lines alone.
        Self { lines, len, _keep: Arc::new(pages) }
    }

    /// `len` signal slots on the heap: loom's atomics cannot be zeroed pages.
    #[cfg(loom)]
    #[must_use]
    pub fn new(len: usize) -> Self {
        let lines: Arc<Vec<SignalLine>> = Arc::new((0..len).map(|_| SignalLine::new()).collect());
        let base = NonNull::from(lines.as_slice()).cast::<SignalLine>();
        Self { lines: base, len, _keep: lines }
    }

    /// Signal slots in memory that `keep` keeps.
    ///
    /// # Safety
    ///
    /// `lines` points to `len` initialised signal slot lines (zero bytes are), aligned to 64, valid
    /// while `keep` lives, and accessed only through `Signals`.
    #[allow(unsafe_code)]
    pub unsafe fn from_raw(lines: NonNull<SignalLine>, len: usize, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { lines, len, _keep: keep }
    }

    /// The number of signal slots.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn line(&self, signal_slot: u16) -> &SignalLine {
        let index = usize::from(signal_slot);
        assert!(index < self.len, "signal slot {signal_slot} of {}", self.len);
        // SAFETY: the index is inside the table, which `_keep` keeps alive (see `from_raw`).
        #[allow(unsafe_code)]
        unsafe {
            self.lines.add(index).as_ref()
        }
    }

    /// The number of signals that the signal slot has received. Acquire: pairs with the release in
    /// [`Signals::signal`].
    ///
    /// # Panics
    ///
    /// When there is no such signal slot.
    #[must_use]
    #[inline]
    pub fn count(&self, signal_slot: u16) -> u64 {
        self.line(signal_slot).count.load(Ordering::Acquire)
    }

    /// The payload of the signal slot's last signal; read it after [`Signals::count`]. Bytes beyond
    /// a shorter payload are undefined in value. A sender that breaks the protocol can make this a
    /// mixture, never undefined behaviour.
    #[must_use]
    #[inline]
    pub fn payload(&self, signal_slot: u16) -> [u8; SIGNAL_SLOT_PAYLOAD_BYTES] {
        bytemuck::cast(self.payload_words(signal_slot))
    }

    /// As [`Signals::payload`], in words of the processor's byte order.
    #[must_use]
    #[inline]
    pub fn payload_words(&self, signal_slot: u16) -> [u64; SIGNAL_SLOT_PAYLOAD_BYTES / 8] {
        let line = self.line(signal_slot);
        std::array::from_fn(|word| line.payload[word].load(Ordering::Relaxed))
    }

    /// For backends: stores the payload and adds one. Only one thread at a time may signal a signal
    /// slot.
    ///
    /// Release: pairs with the acquire in [`Signals::count`], so a thread that sees the count sees
    /// the bytes that this thread wrote before.
    #[inline]
    pub fn signal(&self, signal: &Signal) {
        let count = self.line(signal.signal_slot).count.load(Ordering::Relaxed);
        self.signal_as(signal, count.wrapping_add(1));
    }

    /// As [`Signals::signal`], for a caller that knows the count: reading it would bring its cache
    /// line here, only for the line to go back.
    #[inline]
    pub fn signal_as(&self, signal: &Signal, count: u64) {
        let line = self.line(signal.signal_slot);
        let words = signal.payload.len().div_ceil(8);
        for (slot, word) in line.payload.iter().zip(&signal.payload.words).take(words) {
            slot.store(*word, Ordering::Relaxed);
        }
        line.count.store(count, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;

    fn wait(signal_slots: &Signals, signal_slot: u16, count: u64) {
        while signal_slots.count(signal_slot) < count {
            thread::yield_now();
        }
    }

    #[test]
    fn who_sees_a_signal_sees_its_payload() {
        let signal_slots = Signals::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=20u64 {
                    let payload = Inline::of_words([number; PAYLOAD_WORDS], SIGNAL_SLOT_PAYLOAD_BYTES);
                    signal_slots.signal(&Signal { signal_slot: 0, payload });
                    wait(&signal_slots, 1, number);
                }
            });
            for number in 1..=20u64 {
                wait(&signal_slots, 0, number);
                assert_eq!(signal_slots.payload_words(0), [number; PAYLOAD_WORDS]);
                signal_slots.signal(&Signal { signal_slot: 1, payload: Inline::EMPTY });
            }
        });
    }
}
