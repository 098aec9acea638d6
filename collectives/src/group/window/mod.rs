//! Windows as users hold them: see [`crate::window`] for how reads and writes go.
//!
//! **Invariant:** a caller's elements are touched only during a call, or while a [`PendingRead`]
//! owns them; the elements of a write that has come are shown while its credit is not given.
#![allow(unsafe_code)]

mod opening;
mod pending_read;
#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use pleach_transport::{Nanos, Slice, clock};
use pleach_vocabulary::Rank;

use super::Group;
use super::data::{Data, DataMut, Element, OwnedData, destination, source};
use super::driver::{Core, FLUSH_TIME_MAX, INTERRUPT_INTERVAL};
use super::error::CollectiveError;
use super::pending::PendingError;
use super::temporary_registration::TemporaryRegistration;
use super::unwinding::without_unwinding;
use crate::engine::{Address, Bytes, Fault, FaultKind, QUERY_AFTER};
use crate::window::{Arrived, Awaited, Layout, Place, ReadId, Request, Target, View, Word};

pub use opening::WindowError;
pub use pending_read::PendingRead;

/// Bytes that are published before other threads of the group have their turn: about 100 µs.
const TURN_BYTES: usize = 1 << 20;

/// Memory of a group that its ranks read and write without each other's calls: see
/// [`Group::window`].
///
/// One thread uses it at a time. All ranks hold their window until none reads or writes any more
/// ([`Window::close`]): a rank that drops it before leaves the window's group, and ends it for
/// those that still need the rank.
pub struct Window<T> {
    group: Group,
    layout: Layout,
    len: usize,
    /// Whether all peers' memory is mapped: then nothing is under way when a call has returned, but
    /// for started reads.
    all_mapped: bool,
    /// Ranks of which [`Window::wait_or_departure`] has said that they left.
    departures: usize,
    _element: PhantomData<T>,
}

/// A write of a peer that has come: see [`Window::poll`].
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Arrival<'a, T> {
    /// The rank that wrote.
    pub from: Rank,
    /// Its slot.
    pub slot: u16,
    /// The word that it gave.
    pub word: Word,
    data: &'a [T],
}

impl<'a, T> Arrival<'a, T> {
    /// The elements that it wrote, as many as it gave.
    #[must_use]
    pub fn data(&self) -> &'a [T] {
        self.data
    }
}

impl Group {
    /// Ends the group because of this peer, and returns the group's verdict.
    fn give_up(&self, kind: FaultKind, peer: Rank, detail: String, waited: Duration) -> CollectiveError {
        let driver = &self.shared.driver;
        let mut core = driver.lock();
        core.engine.give_up_on(kind, peer, detail, waited, clock::now());
        let fault = driver.drive(core, Nanos::MAX, |engine| engine.failure().cloned());
        self.failed(fault.expect("an unlimited drive ends with what it looks for"))
    }

    fn failed(&self, fault: Arc<Fault>) -> CollectiveError {
        self.shared.driver.observed().failed();
        CollectiveError::Failed(fault)
    }

    /// Drives the group until `look` finds something, the group has failed, or `until` has passed.
    fn drive_window<T>(
        &self,
        core: MutexGuard<'_, Core>,
        until: Nanos,
        mut look: impl FnMut(&mut Core) -> Option<T>,
    ) -> Result<Option<T>, CollectiveError> {
        let driver = &self.shared.driver;
        let mut core = Some(core);
        loop {
            let now = clock::now();
            let turn = if self.interrupted.is_some() { until.min(now + INTERRUPT_INTERVAL) } else { until };
            let locked = core.take().unwrap_or_else(|| driver.lock());
            let found = driver.drive_core(locked, turn, |core| match core.engine.failure() {
                Some(fault) => Some(Err(fault.clone())),
                None => look(core).map(Ok),
            });
            match found {
                Some(found) => return found.map(Some).map_err(|fault| self.failed(fault)),
                None if self.interrupted.is_some_and(|interrupted| interrupted()) => driver.abort(),
                None if clock::now() >= until => return Ok(None),
                None => {}
            }
        }
    }

    /// Connects to these peers where that has not been done, within the deadline of a call. A peer
    /// that is in no call is asked for it.
    ///
    /// # Errors
    ///
    /// The group has failed: also if a peer has left, or did not connect within the deadline.
    pub(crate) fn connect_to(&self, peers: &[Rank]) -> Result<(), CollectiveError> {
        let begun_at = clock::now();
        let core = self.shared.driver.lock();
        let found = self.drive_window(core, begun_at + self.timeout, |core| {
            let now = clock::now();
            // Peers that come to need the pair at the same time need not be asked.
            let asks = now.since(begun_at) >= QUERY_AFTER;
            core.engine.reach(peers, asks, now).then_some(())
        })?;
        if found.is_some() {
            return Ok(());
        }
        let late = self.shared.driver.lock().engine.first_not_reached(peers);
        let waited = clock::now().since(begun_at);
        match late {
            None => Ok(()),
            Some(late) => Err(self.give_up(FaultKind::TimedOut, late, "connecting to it".to_owned(), waited)),
        }
    }

    /// Takes the result of a read, or forgets it when the group has failed.
    fn finish_read(&self, core: MutexGuard<'_, Core>, id: ReadId) -> Result<(u64, Word), CollectiveError> {
        // The read's own deadline ends it.
        let found = self.drive_window(core, Nanos::MAX, |core| core.expect_window().0.reads.take(id));
        match found {
            Ok(found) => Ok(found.expect("an unlimited drive ends with what it looks for")),
            Err(error) => {
                self.shared.driver.lock().expect_window().0.reads.forget(id);
                Err(error)
            }
        }
    }
}

/// The credit of a write that is shown. It is given, and goes out, also when who is shown the write
/// panics: else the slot would be taken for ever.
struct OwedCredit<'a, T: Element> {
    window: &'a Window<T>,
    from: Rank,
}

impl<'a, T: Element> OwedCredit<'a, T> {
    /// Gives it. Returns the core, for what comes next.
    fn give(self) -> MutexGuard<'a, Core> {
        let (window, from) = (self.window, self.from);
        std::mem::forget(self);
        window.give_credit(from)
    }
}

impl<T: Element> Drop for OwedCredit<'_, T> {
    fn drop(&mut self) {
        self.window.flush(self.window.give_credit(self.from));
    }
}

impl<T: Element> Window<T> {
    /// The number of elements of a rank.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether a rank has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The slots that each rank has at each peer.
    #[must_use]
    pub fn slots(&self) -> u16 {
        self.layout.slots()
    }

    /// Publishes all of this rank's elements with a word, and returns the number of this version.
    /// The first is 1. It waits for nobody; reads under way see this version or one before.
    ///
    /// # Errors
    ///
    /// The elements are not as many as the window has, or the group has failed.
    pub fn publish<D>(&mut self, elements: &D, word: Word) -> Result<u64, CollectiveError>
    where
        D: Data<Element = T> + ?Sized,
    {
        let operand = source(elements, self.group.shared.number)?;
        self.expect_len("what is published", operand.len, self.len)?;
        self.group.expect_space(operand.space, operand.len)?;
        drop(self.turn()?);
        let (from, bytes) = (operand.bytes.base(), self.layout.data_bytes());
        let driver = &self.group.shared.driver;
        let mut core = driver.lock();
        core.expect_window().0.publisher.begin();
        let mut written = 0;
        loop {
            let end = bytes.min(written + TURN_BYTES);
            core.expect_window().0.publisher.write(from.add(written), written..end);
            written = end;
            if written == bytes {
                return Ok(core.expect_window().0.publisher.finish(word));
            }
            // Peers' reads go on.
            drop(core);
            core = driver.lock();
        }
    }

    /// Reads these elements of a rank into `into`, and returns their version and word. All elements
    /// are of one version, the newest at some time during the call or the one before it. Version 0
    /// is zeros: nothing was published yet. The owner need not call anything.
    ///
    /// The read begins again if the owner publishes twice while it goes on.
    ///
    /// # Errors
    ///
    /// The range is not inside of the window, `into` has another length, or the group has failed:
    /// also if the read took longer than the deadline.
    pub fn read<D>(
        &mut self,
        peer: Rank,
        range: Range<usize>,
        into: &mut D,
    ) -> Result<(u64, Word), CollectiveError>
    where
        D: DataMut<Element = T> + ?Sized,
    {
        self.read_as(peer, range, into, false)
    }

    /// As [`Window::read`], but takes the bytes as they are while the owner writes them: elements
    /// may be of the returned version, of newer ones, and mixed in their bytes. It costs one step
    /// less, and never begins again. Asynchronous training is published with such reads; whoever
    /// makes them says so by this name.
    ///
    /// # Errors
    ///
    /// As of [`Window::read`].
    pub fn read_torn<D>(
        &mut self,
        peer: Rank,
        range: Range<usize>,
        into: &mut D,
    ) -> Result<u64, CollectiveError>
    where
        D: DataMut<Element = T> + ?Sized,
    {
        Ok(self.read_as(peer, range, into, true)?.0)
    }

    fn read_as<D>(
        &mut self,
        peer: Rank,
        range: Range<usize>,
        into: &mut D,
        is_torn: bool,
    ) -> Result<(u64, Word), CollectiveError>
    where
        D: DataMut<Element = T> + ?Sized,
    {
        let operand = destination(into, self.group.shared.number)?;
        self.expect_len("what a read fills", operand.len, range.len())?;
        self.group.expect_space(operand.space, operand.len)?;
        let range = self.bytes_of(peer, range)?;
        let core = self.turn_with(peer, "a read of its window")?;
        let mut core = self.reach(core, peer)?;
        let view = core.expect_window().0.peers()[peer as usize].view.clone();
        if let Some(view) = view {
            drop(core);
            return self.read_mapped(peer, &view, range, operand.bytes.base(), is_torn);
        }
        let timeout = self.group.timeout;
        without_unwinding(|| {
            let mut registration = TemporaryRegistration::default();
            let bytes = registration.register(&mut core.engine, operand.bytes);
            let bytes = bytes.map_err(|error| CollectiveError::Register(Arc::new(error)))?;
            let request = Request { peer, range, target: target(bytes), is_torn, timeout };
            let outcome = match core.expect_window().0.start_read(request) {
                Some(id) => self.group.finish_read(core, id),
                None => {
                    drop(core);
                    Err(CollectiveError::TooMany)
                }
            };
            self.group.take_back(&registration);
            outcome
        })
    }

    /// Reads memory that is mapped here, on this thread.
    fn read_mapped(
        &self,
        peer: Rank,
        view: &View,
        range: Range<usize>,
        into: Address,
        is_torn: bool,
    ) -> Result<(u64, Word), CollectiveError> {
        let mut since = None;
        let mut tries = 0u64;
        loop {
            let found = if is_torn {
                view.read_torn(&self.layout, range.clone(), into)
            } else {
                view.read(&self.layout, range.clone(), into)
            };
            if let Some(found) = found
                && view.is_shared()
            {
                return Ok(found);
            }
            tries += 1;
            let now = clock::now();
            let waited = now.since(*since.get_or_insert(now));
            if waited >= self.group.timeout {
                let detail = format!("{tries} tries to read its window");
                return Err(self.group.give_up(FaultKind::TimedOut, peer, detail, waited));
            }
            // The owner may have left, or the group has failed.
            drop(self.turn_with(peer, "a read of its window")?);
        }
    }

    /// As [`Window::read`], but returns at once: the read goes on while the caller does something
    /// else, and owns the memory meanwhile. At most 8 reads are under way.
    ///
    /// # Errors
    ///
    /// As of [`Window::read`], with the memory.
    pub fn start_read<D>(
        &mut self,
        peer: Rank,
        range: Range<usize>,
        mut into: D,
    ) -> Result<PendingRead<D>, PendingError<D>>
    where
        D: OwnedData + DataMut<Element = T>,
    {
        match self.begin_read(peer, range, &mut into) {
            Ok(id) => {
                self.group.shared.wake_progress();
                Ok(PendingRead::new(self.group.clone(), id, into))
            }
            Err(error) => Err(PendingError { error, data: into }),
        }
    }

    fn begin_read<D>(
        &mut self,
        peer: Rank,
        range: Range<usize>,
        into: &mut D,
    ) -> Result<ReadId, CollectiveError>
    where
        D: DataMut<Element = T>,
    {
        let operand = destination(into, self.group.shared.number)?;
        self.expect_len("what a read fills", operand.len, range.len())?;
        self.group.expect_space(operand.space, operand.len)?;
        let range = self.bytes_of(peer, range)?;
        self.group.shared.begin_progress()?;
        let mut core = self.reach(self.turn()?, peer)?;
        let timeout = self.group.timeout;
        let request = Request { peer, range, target: target(operand.bytes), is_torn: false, timeout };
        core.expect_window().0.start_read(request).ok_or(CollectiveError::TooMany)
    }

    /// Whether this rank's slot at the peer is free, so that a write into it waits for nothing.
    ///
    /// # Errors
    ///
    /// There is no such slot or rank, or the group has failed.
    pub fn is_free(&mut self, peer: Rank, slot: u16) -> Result<bool, CollectiveError> {
        self.expect_slot(peer, slot)?;
        Ok(self.turn()?.expect_window().0.slots.is_free(peer, slot))
    }

    /// Writes elements, at most as many as the window has, into this rank's slot at a peer, with a
    /// word. It waits until the peer has polled the slot's last write, and returns when `elements`
    /// may be changed; the peer polls the write later. Writes to one peer are polled in the order
    /// in which they were written, whatever their slots.
    ///
    /// # Errors
    ///
    /// There is no such slot or rank, there are too many elements, or the group has failed: also if
    /// the peer did not poll within the deadline.
    pub fn write<D>(&mut self, peer: Rank, slot: u16, elements: &D, word: Word) -> Result<(), CollectiveError>
    where
        D: Data<Element = T> + ?Sized,
    {
        let operand = source(elements, self.group.shared.number)?;
        self.expect_slot(peer, slot)?;
        if operand.len > self.len {
            let (start, end) = (0, operand.len);
            return Err(CollectiveError::OutsideWindow { start, end, len: self.len });
        }
        self.group.expect_space(operand.space, operand.len)?;
        let (from, bytes) = (operand.bytes.base(), operand.len * size_of::<T>());
        let place = self.place(peer, slot)?;
        let header = {
            let mut core = self.group.shared.driver.lock();
            core.expect_window().0.slots.header(peer, bytes)
        };
        place.fill(header, from);
        self.send((peer, slot), (&place, bytes), word)
    }

    /// Waits until a slot at a peer is free; returns where the next write to it is put together.
    fn place(&mut self, peer: Rank, slot: u16) -> Result<Place, CollectiveError> {
        let mut core = self.reach(self.turn()?, peer)?;
        let find = |core: &mut Core| {
            let (window, _) = core.expect_window();
            let (slots, peers) = window.slots_and_peers();
            if slots.is_free(peer, slot) { slots.place(peers, peer, slot) } else { None }
        };
        if let Some(place) = find(&mut core) {
            return Ok(place);
        }
        let begun_at = clock::now();
        core.expect_window().0.await_signal(Some(Awaited::Credit(peer, slot)));
        let found = self.group.drive_window(core, begun_at + self.group.timeout, |core| {
            let now = clock::now();
            core.engine.expect_present(peer, "the credit of a write into its window", now);
            find(core)
        });
        let mut core = self.group.shared.driver.lock();
        core.expect_window().0.await_signal(None);
        // Somebody else may have had the lock, and have polled, since the time was up.
        if let Some(place) = found?.or_else(|| find(&mut core)) {
            return Ok(place);
        }
        let slots = &core.expect_window().0.slots;
        // The staging may be full of writes to somebody else, who is the late one then.
        let on_its_way = slots.oldest_on_its_way().filter(|_| slots.is_free(peer, slot));
        drop(core);
        let (late, detail) = match on_its_way {
            Some(other) => (other, "an earlier write into its window to arrive".to_owned()),
            None => (peer, format!("the credit of slot {slot} of a window, which it has not polled")),
        };
        let waited = clock::now().since(begun_at);
        Err(self.group.give_up(FaultKind::TimedOut, late, detail, waited))
    }

    /// Sends a write that was put together.
    fn send(
        &mut self,
        target: (Rank, u16),
        written: (&Place, usize),
        word: Word,
    ) -> Result<(), CollectiveError> {
        let driver = &self.group.shared.driver;
        let try_once = |core: &mut Core| {
            let (window, engine) = core.expect_window();
            let (slots, peers) = window.slots_and_peers();
            slots.send(engine, peers, target, written, word, clock::now()).then_some(())
        };
        let mut core = driver.lock();
        if try_once(&mut core).is_none() {
            let begun_at = clock::now();
            if self.group.drive_window(core, begun_at + self.group.timeout, try_once)?.is_none() {
                let detail = "room for a write into its window".to_owned();
                let waited = clock::now().since(begun_at);
                return Err(self.group.give_up(FaultKind::TimedOut, target.0, detail, waited));
            }
            core = driver.lock();
        }
        self.flush(core);
        Ok(())
    }

    /// Has what was submitted go out, though this rank may be in no call for long.
    fn flush(&self, mut core: MutexGuard<'_, Core>) {
        let is_flushed = |core: &mut Core| {
            let (window, engine) = core.expect_window();
            (engine.failure().is_some() || engine.flush() && !window.slots.owes()).then_some(())
        };
        if is_flushed(&mut core).is_some() {
            return;
        }
        let shared = &self.group.shared;
        if !self.all_mapped && shared.progress.is_some() {
            drop(core);
            return shared.wake_progress();
        }
        shared.driver.drive_core(core, clock::now() + FLUSH_TIME_MAX, is_flushed);
    }

    /// Calls `seen` with each write of peers that has come, and gives the credit of its slot when
    /// `seen` has returned. Returns how many there were; it does not wait for any. Writes of one
    /// peer come in the order in which they were written; peers take turns.
    ///
    /// # Errors
    ///
    /// The group has failed.
    pub fn poll(&mut self, mut seen: impl FnMut(Arrival<'_, T>)) -> Result<usize, CollectiveError> {
        let mut core = self.turn()?;
        // So many can have been there at once; writers that go on are seen by the next call.
        let most = usize::from(self.layout.slots()) * self.group.world_size() as usize;
        for count in 0..most {
            let (window, engine) = core.expect_window();
            let Some(arrived) = window.slots.take_arrival(engine, clock::now()) else {
                if !core.engine.works() {
                    // A peer has broken the protocol.
                    drop(core);
                    drop(self.turn()?);
                } else if count > 0 {
                    self.flush(core);
                }
                return Ok(count);
            };
            drop(core);
            let credit = OwedCredit { window: self, from: arrived.from };
            self.show(&arrived, &mut seen);
            core = credit.give();
        }
        self.flush(core);
        Ok(most)
    }

    /// As [`Window::poll`], but waits for a write if none is there, at most `limit`.
    ///
    /// # Errors
    ///
    /// The group has failed.
    pub fn wait(
        &mut self,
        limit: Duration,
        seen: impl FnMut(Arrival<'_, T>),
    ) -> Result<usize, CollectiveError> {
        self.wait_for(limit, false, seen)
    }

    /// As [`Window::wait`], but also returns, with 0, when a rank has left since this was called
    /// last: for callers that know which ranks still owe them something ([`Window::has_left`]).
    ///
    /// # Errors
    ///
    /// The group has failed.
    pub fn wait_or_departure(
        &mut self,
        limit: Duration,
        seen: impl FnMut(Arrival<'_, T>),
    ) -> Result<usize, CollectiveError> {
        self.wait_for(limit, true, seen)
    }

    /// Whether this rank has left the window: it writes and polls no more.
    #[must_use]
    pub fn has_left(&self, rank: Rank) -> bool {
        self.group.shared.driver.lock().engine.has_departed(rank)
    }

    fn wait_for(
        &mut self,
        limit: Duration,
        or_departure: bool,
        mut seen: impl FnMut(Arrival<'_, T>),
    ) -> Result<usize, CollectiveError> {
        let count = self.poll(&mut seen)?;
        if count > 0 {
            return Ok(count);
        }
        let mut core = self.turn()?;
        core.expect_window().0.await_signal(Some(Awaited::Arrival));
        let known = self.departures;
        let come = self.group.drive_window(core, clock::now() + limit, |core| {
            let has_left = or_departure && core.engine.departures() > known;
            (has_left || core.expect_window().0.has_come()).then_some(())
        });
        let mut core = self.group.shared.driver.lock();
        core.expect_window().0.await_signal(None);
        if or_departure {
            self.departures = core.engine.departures();
        }
        drop(core);
        come?;
        self.poll(seen)
    }

    fn give_credit(&self, to: Rank) -> MutexGuard<'_, Core> {
        let mut core = self.group.shared.driver.lock();
        let (window, engine) = core.expect_window();
        window.slots.owe(to);
        window.slots.give_credits(engine, clock::now());
        core
    }

    fn show(&self, arrived: &Arrived, seen: &mut impl FnMut(Arrival<'_, T>)) {
        let Arrived { from, slot, word, data } = arrived;
        let data: &Slice = data;
        // SAFETY: `data` holds registered memory that is aligned to a cache line. Its writer does
        // not touch the memory until it gets the credit, which is given after `seen` has returned.
        // All bytes are valid elements.
        let data =
            unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<T>(), data.len() / size_of::<T>()) };
        seen(Arrival { from: *from, slot: *slot, word: *word, data });
    }

    /// How long a call waits for peers: as long as the group from which the window was made.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.group.timeout
    }

    /// Ends the window on all ranks: calls under way return at once with an error. It does nothing
    /// to the group that the window was made from.
    pub fn abort(&self) {
        self.group.abort();
    }

    /// Ends the window on all ranks because of a peer for which this rank has waited too long.
    /// Returns the verdict that all ranks get. `needed`: what the peer owes, as "a word".
    #[must_use]
    pub fn give_up(&self, peer: Rank, needed: &str, waited: Duration) -> CollectiveError {
        if let Err(error) = self.group.expect_open().and(self.expect_rank(peer)) {
            return error;
        }
        self.group.give_up(FaultKind::TimedOut, peer, needed.to_owned(), waited)
    }

    /// Meets all ranks once more and leaves the window.
    ///
    /// # Errors
    ///
    /// The group has failed.
    pub fn close(self) -> Result<(), CollectiveError> {
        self.group.close()
    }

    /// Polls once, and returns the error of a group that has failed.
    fn turn(&self) -> Result<MutexGuard<'_, Core>, CollectiveError> {
        self.group.expect_open()?;
        let driver = &self.group.shared.driver;
        let mut core = driver.lock();
        without_unwinding(|| core.poll(clock::now()));
        if core.engine.works() {
            return Ok(core);
        }
        self.group.drive_window(core, Nanos::MAX, |_| None::<()>)?;
        unreachable!("a group that does not work has failed in the end")
    }

    /// Connects to a peer before the first use of its memory, and maps that where it can be.
    fn reach<'a>(
        &'a self,
        mut core: MutexGuard<'a, Core>,
        peer: Rank,
    ) -> Result<MutexGuard<'a, Core>, CollectiveError> {
        let reaches = |core: &mut Core| {
            let (window, engine) = core.expect_window();
            window.reaches(engine, peer).then_some(())
        };
        if reaches(&mut core).is_some() {
            return Ok(core);
        }
        drop(core);
        self.group.connect_to(&[peer])?;
        let driver = &self.group.shared.driver;
        // Without a mapping, transfers do.
        self.group.drive_window(driver.lock(), clock::now() + self.group.timeout, reaches)?;
        Ok(driver.lock())
    }

    /// The same, where this peer must not have left.
    fn turn_with(&self, peer: Rank, needed: &str) -> Result<MutexGuard<'_, Core>, CollectiveError> {
        let mut core = self.turn()?;
        core.engine.expect_present(peer, needed, clock::now());
        if core.engine.works() {
            return Ok(core);
        }
        drop(core);
        self.turn()
    }

    fn expect_len(&self, what: &'static str, actual: usize, expected: usize) -> Result<(), CollectiveError> {
        if actual == expected { Ok(()) } else { Err(CollectiveError::Length { what, expected, actual }) }
    }

    fn expect_rank(&self, rank: Rank) -> Result<(), CollectiveError> {
        let world_size = self.group.world_size();
        if rank < world_size { Ok(()) } else { Err(CollectiveError::NoSuchRank { rank, world_size }) }
    }

    fn expect_slot(&self, peer: Rank, slot: u16) -> Result<(), CollectiveError> {
        self.expect_rank(peer)?;
        let slots = self.layout.slots();
        match slot < slots {
            _ if peer == self.group.rank() => Err(CollectiveError::Own { rank: peer }),
            true => Ok(()),
            false => Err(CollectiveError::NoSuchSlot { slot, slots }),
        }
    }

    /// Where elements of a rank lie among its bytes.
    fn bytes_of(&self, peer: Rank, range: Range<usize>) -> Result<Range<usize>, CollectiveError> {
        self.expect_rank(peer)?;
        let Range { start, end } = range;
        if start > end || end > self.len {
            return Err(CollectiveError::OutsideWindow { start, end, len: self.len });
        }
        Ok(start * size_of::<T>()..end * size_of::<T>())
    }
}

/// Where the bytes of a read go.
fn target(bytes: Bytes) -> Target {
    match bytes {
        Bytes::Registered(slice) | Bytes::Staged(slice) => Target::Registered(slice),
        Bytes::Lent(slice) => Target::Registered(slice.hold()),
        Bytes::Private { base, .. } => Target::Private(base),
        Bytes::None => Target::Private(Address::NULL),
    }
}
