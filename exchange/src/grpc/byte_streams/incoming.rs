//! The direction from the peer.

use pleach_transport::{Signals, Slice};
use tokio::io::ReadBuf;

use super::ring::{RING_BYTES, load};
use super::{CREDIT_BYTES, CREDIT_PUTS, CREDITS_OF_BYTES, CREDITS_OF_PUTS, PUTS};

/// The direction from the peer.
pub(crate) struct Incoming {
    signals: Signals,
    /// The first signal slot of the stream.
    slot: u16,
    ring: Slice,
    /// What was read to its end: puts and bytes.
    puts: u64,
    bytes: u64,
    /// The bytes of the present put that are to be read; none: there is no present one.
    rest: usize,
    is_ended: bool,
    /// Credits that were given for puts, and for bytes.
    given: [u64; 2],
}

/// A put that is waited for: its signal slot, and the count that the slot has without it.
#[derive(Clone, Copy)]
pub(crate) struct Awaited {
    slot: u16,
    count: u64,
}

impl Awaited {
    pub(crate) fn has_come(self, signals: &Signals) -> bool {
        signals.count(self.slot) > self.count
    }
}

/// The peer counts wrongly.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[error("a put of {0} bytes")]
pub(crate) struct WrongPut(usize);

impl Incoming {
    pub(crate) fn new(signals: Signals, slot: u16, ring: Slice) -> Self {
        Self { signals, slot, ring, puts: 0, bytes: 0, rest: 0, is_ended: false, given: [0; 2] }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    pub(crate) fn awaited(&self) -> Awaited {
        let (count, number) = (self.puts / PUTS as u64, self.puts % PUTS as u64);
        Awaited { slot: self.slot + number as u16, count }
    }

    /// Whether a read finds something.
    pub(crate) fn has_come(&self) -> bool {
        self.is_ended || self.rest > 0 || self.awaited().has_come(&self.signals)
    }

    fn at(&self) -> usize {
        (self.bytes % RING_BYTES as u64) as usize
    }

    /// Begins with the next put, if it has come. False: there is nothing to read.
    fn begin(&mut self) -> Result<bool, WrongPut> {
        let awaited = self.awaited();
        if self.is_ended || self.rest > 0 || !awaited.has_come(&self.signals) {
            return Ok(self.rest > 0);
        }
        let [a, b, c, d, ..] = self.signals.payload(awaited.slot);
        let bytes = u32::from_le_bytes([a, b, c, d]) as usize;
        if bytes > RING_BYTES - self.at() {
            return Err(WrongPut(bytes));
        }
        (self.rest, self.is_ended) = (bytes, bytes == 0);
        Ok(!self.is_ended)
    }

    fn passed(&mut self, count: usize) {
        self.bytes += count as u64;
        self.rest -= count;
        self.puts += u64::from(self.rest == 0);
    }

    /// Reads what has come.
    pub(crate) fn read(&mut self, into: &mut ReadBuf<'_>) -> Result<(), WrongPut> {
        while into.remaining() > 0 && self.begin()? {
            let count = into.remaining().min(self.rest);
            load(&self.ring, self.at(), count, into);
            self.passed(count);
        }
        Ok(())
    }

    /// Drops what has come.
    pub(crate) fn skip(&mut self) -> Result<(), WrongPut> {
        // No more are under way, whatever the peer counts.
        for _ in 0..PUTS {
            if !self.begin()? {
                break;
            }
            self.passed(self.rest);
        }
        Ok(())
    }

    /// The signal slots of the credits that are due, which count as given.
    pub(crate) fn credits(&mut self) -> impl Iterator<Item = u16> + use<> {
        let [puts, bytes] = &mut self.given;
        let due_puts = self.puts / CREDIT_PUTS - *puts;
        let due_bytes = self.bytes / CREDIT_BYTES - *bytes;
        (*puts, *bytes) = (*puts + due_puts, *bytes + due_bytes);
        let of = |credits, due| std::iter::repeat_n(credits, due as usize);
        of(self.slot + CREDITS_OF_PUTS, due_puts).chain(of(self.slot + CREDITS_OF_BYTES, due_bytes))
    }
}
