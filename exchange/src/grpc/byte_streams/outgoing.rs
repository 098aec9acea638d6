//! The direction to the peer.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice};

use pleach_transport::{
    MapError, Mapped, Rank, RegionKey, RemoteSlice, Signal, Signals, Slice, Source, Transfer, TransferId,
};

use super::ring::{RING_BYTES, store_mapped, store_own};
use super::{
    ANNOUNCED, CREDIT_BYTES, CREDIT_PUTS, CREDITS_OF_BYTES, CREDITS_OF_PUTS, PIECE_BYTES, PUTS, signal,
};

/// The direction to the peer.
pub(crate) struct Outgoing {
    signals: Signals,
    /// The first signal slot of the stream.
    slot: u16,
    /// This end's ring, for puts.
    own: Slice,
    /// The peer's ring, once it was announced.
    remote: Option<RemoteSlice>,
    /// The same, where this process maps it.
    mapped: Option<Mapped>,
    may_map: bool,
    /// What was sent.
    puts: u64,
    bytes: u64,
    /// Puts that the device carries on, the oldest first.
    under_way: VecDeque<UnderWay>,
    is_ended: bool,
}

struct UnderWay {
    /// The put, and the byte with which it begins.
    put: u64,
    begins: u64,
    has_ended: bool,
}

/// What a writer that waits for room has seen: it waits until one of these has changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SeenRoom([u64; 3]);

impl SeenRoom {
    /// Nothing: the writer tries again when the thread has polled.
    pub(crate) const NOTHING: Self = Self([u64::MAX; 3]);

    pub(crate) fn of(signals: &Signals, slot: u16) -> Self {
        Self([ANNOUNCED, CREDITS_OF_PUTS, CREDITS_OF_BYTES].map(|credits| signals.count(slot + credits)))
    }
}

/// How the next bytes are sent.
pub(crate) enum Submission {
    /// They are in the peer's ring already.
    Signal(Signal),
    Put(Transfer, TransferId),
}

impl Outgoing {
    pub(crate) fn new(signals: Signals, slot: u16, own: Slice, may_map: bool) -> Self {
        let under_way = VecDeque::with_capacity(PUTS);
        let (remote, mapped, is_ended) = (None, None, false);
        Self { signals, slot, own, remote, mapped, may_map, puts: 0, bytes: 0, under_way, is_ended }
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// Learns where the peer's ring is, which `map` maps.
    pub(crate) fn learn(
        &mut self,
        peer: Rank,
        map: impl FnOnce(&RemoteSlice) -> Result<Mapped, MapError>,
    ) -> io::Result<()> {
        if self.remote.is_none() && self.signals.count(self.slot + ANNOUNCED) > 0 {
            let payload = self.signals.payload(self.slot + ANNOUNCED);
            let mut words = payload.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
            let mut next = || words.next().unwrap_or_default();
            let (key, offset, len) = (RegionKey(next()), next(), next());
            if len != RING_BYTES as u64 {
                let text = format!("rank {peer} broke the protocol: a ring of {len} bytes");
                return Err(io::Error::new(ErrorKind::InvalidData, text));
            }
            self.remote = Some(RemoteSlice { key, offset, len });
        }
        if let Some(remote) = self.remote.filter(|_| self.may_map && self.mapped.is_none()) {
            match map(&remote) {
                Ok(mapped) if mapped.is_on_host() => self.mapped = Some(mapped),
                // Its announcement is on the way; until then bytes are put.
                Err(MapError::Unknown { .. }) => {}
                Ok(_) | Err(_) => self.may_map = false,
            }
        }
        Ok(())
    }

    /// The puts whose bits are set have ended.
    pub(crate) fn end_puts(&mut self, ended: u32) {
        for put in &mut self.under_way {
            put.has_ended |= ended >> (put.put % PUTS as u64) & 1 == 1;
        }
        while self.under_way.pop_front_if(|put| put.has_ended).is_some() {}
    }

    /// Whether a put is free: its signal slot was read, and its number names no other one.
    pub(crate) fn has_put(&self) -> bool {
        let read = CREDIT_PUTS.saturating_mul(self.signals.count(self.slot + CREDITS_OF_PUTS));
        let ended = self.under_way.front().map_or(self.puts, |put| put.put);
        self.remote.is_some() && !self.is_ended && self.puts - ended.min(read) < PUTS as u64
    }

    /// Whether the device carries puts on.
    pub(crate) fn has_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    pub(crate) fn has_room(&self) -> bool {
        self.room() > 0
    }

    /// The bytes that the next put may have.
    fn room(&self) -> usize {
        if !self.has_put() {
            return 0;
        }
        let read = CREDIT_BYTES.saturating_mul(self.signals.count(self.slot + CREDITS_OF_BYTES));
        let ended = self.under_way.front().map_or(self.bytes, |put| put.begins);
        // A peer may give any number of credits, and take them back.
        let room = RING_BYTES.saturating_sub((self.bytes - ended.min(read)) as usize);
        room.min(RING_BYTES - self.at()).min(PIECE_BYTES)
    }

    fn at(&self) -> usize {
        (self.bytes % RING_BYTES as u64) as usize
    }

    /// Copies the first of these bytes to where they are sent from, behind `stored` bytes of the
    /// same put, as many as there is room for.
    pub(crate) fn store(&self, stored: usize, bytes: &[u8]) -> usize {
        let count = bytes.len().min(self.room().saturating_sub(stored));
        let at = self.at() + stored;
        match &self.mapped {
            Some(ring) => store_mapped(ring, at, &bytes[..count]),
            None => store_own(&self.own, at, &bytes[..count]),
        }
        count
    }

    /// The number of the next put.
    pub(crate) fn number(&self) -> usize {
        (self.puts % PUTS as u64) as usize
    }

    /// How the bytes that were stored are sent; none end the direction.
    pub(crate) fn send(&self, place: usize, count: usize) -> io::Result<Submission> {
        let number = self.number();
        let signal = signal(self.slot + number as u16, &(count as u32).to_le_bytes());
        let Some(remote) = self.remote.filter(|_| self.mapped.is_none() && count > 0) else {
            return Ok(Submission::Signal(signal));
        };
        let out_of_bounds = |_| io::Error::from(ErrorKind::InvalidData);
        let (begins, ends) = (self.at(), self.at() + count);
        let src = Source::Slice(self.own.slice(begins..ends).map_err(out_of_bounds)?);
        let dst = remote.slice(begins as u64..ends as u64).map_err(out_of_bounds)?;
        let put = Transfer::Put { src, dst, signal: Some(signal) };
        Ok(Submission::Put(put, TransferId((place * PUTS + number) as u64)))
    }

    /// They were sent.
    pub(crate) fn sent(&mut self, count: usize, is_under_way: bool) {
        if is_under_way {
            self.under_way.push_back(UnderWay { put: self.puts, begins: self.bytes, has_ended: false });
        }
        self.is_ended |= count == 0;
        self.puts += 1;
        self.bytes += count as u64;
    }
}

/// Bytes that are to be sent: those of these slices, one after another, but for the first ones.
#[derive(Clone, Copy)]
pub(crate) struct Unsent<'a> {
    slices: &'a [IoSlice<'a>],
    /// Bytes of the first slice that were sent.
    of_first: usize,
    /// Bytes that were sent.
    passed: usize,
}

impl<'a> Unsent<'a> {
    pub(crate) fn of(slices: &'a [IoSlice<'a>]) -> Self {
        let mut unsent = Self { slices, of_first: 0, passed: 0 };
        unsent.pass(0);
        unsent
    }

    /// How many of them were sent.
    pub(crate) fn passed(&self) -> usize {
        self.passed
    }

    /// The first of them, in one piece.
    pub(crate) fn first(&self) -> Option<&'a [u8]> {
        self.slices.first().map(|first| &first[self.of_first..])
    }

    /// So many of [`Unsent::first`] were sent.
    pub(crate) fn pass(&mut self, count: usize) {
        self.of_first += count;
        self.passed += count;
        while let [first, rest @ ..] = self.slices
            && self.of_first == first.len()
        {
            (self.slices, self.of_first) = (rest, 0);
        }
    }
}
