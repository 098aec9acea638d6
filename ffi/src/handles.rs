//! Handles: numbers that look like pointers.
//!
//! **Invariant:** a handle names a slot of its table and a generation of the slot. The generation
//! of a slot counts up when the value of the slot is dropped. So a handle that was taken, damaged
//! or invented is invalid. A function holds its value while it runs. If another thread takes the
//! handle meanwhile, the value is dropped when the function returns.
//!
//! A call takes a tenth of a microsecond, and a lock with a reference count would add four atomic
//! operations. Here a call adds two atomic operations, on the word of the slot. The word has the
//! generation, the state and the number of holders. The value is dropped once, while no thread
//! holds it:
//!
//! * A thread that looks for a value counts itself as a holder and reads the word in one step. If
//!   the state was "live" and the generation is right, the value stays until the thread has counted
//!   itself out. Otherwise the thread reads no value and counts itself out.
//! * Only [`Handles::take`] leads from "live" to "taken", and counts itself in the same step.
//! * A thread drops the value only after the step from "taken" without holders to "leaving". The
//!   step happens once a generation. A thread that counts itself out tries the step if it leaves
//!   the state "taken" without holders. If the step fails, another thread has counted itself in,
//!   and that thread tries the step when it counts itself out.
//! * Only [`Handles::keep`] writes a value, to a slot that is "free", under a lock.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use pleach_transport::mutex::lock;

use crate::result::Failed;

/// Most values at a time in a table.
const VALUES_MAX: usize = 1 << 16;

/// The low bits of a handle are the slot, counted from 1; the others are its generation.
const SLOT_BITS: u32 = 20;

/// Slots of the first block. Each further block has twice as many slots.
const FIRST_SLOTS: usize = 64;
const BLOCKS: usize = 11;
const _: () = assert!(FIRST_SLOTS * ((1 << BLOCKS) - 1) >= VALUES_MAX);

/// The word of a slot, from its lowest bits: the number of holders, the state, the generation.
const STATE_SHIFT: u32 = 30;
const GENERATION_SHIFT: u32 = 32;
const HOLDERS: u64 = (1 << STATE_SHIFT) - 1;

/// Most holders of a value. [`Handles::find`] refuses further holders. The count has room for twice
/// as many, because a refused thread is counted for a moment too.
const HOLDERS_MAX: u64 = HOLDERS >> 1;

const FREE: u64 = 0;
const LIVE: u64 = 1;
const TAKEN: u64 = 2;
const LEAVING: u64 = 3;

/// The word of a slot in this generation and this state, without its holders.
const fn word(generation: u32, state: u64) -> u64 {
    (generation as u64) << GENERATION_SHIFT | state << STATE_SHIFT
}

/// A slot of a table.
struct Slot<T> {
    word: AtomicU64,
    /// `Some` in the states "live" and "taken".
    value: UnsafeCell<Option<T>>,
}

// SAFETY: several threads read the value. A thread writes or drops it only while no other thread
// reads it: see the module.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

impl<T> Slot<T> {
    const fn new() -> Self {
        Self { word: AtomicU64::new(word(0, FREE)), value: UnsafeCell::new(None) }
    }

    /// Counts this thread out. Drops the value if it was taken and has no holder any more.
    #[inline]
    fn let_go(&self) {
        // Release: this thread's reads of the value come before the drop of the value in `end`.
        let before = self.word.fetch_sub(1, Ordering::Release);
        if before & (word(0, LEAVING) | HOLDERS) == word(0, TAKEN) | 1 {
            self.end(before - 1);
        }
    }

    #[cold]
    fn end(&self, taken: u64) {
        let generation = (taken >> GENERATION_SHIFT) as u32;
        let leaving = word(generation.wrapping_add(1), LEAVING);
        // Acquire: pairs with the `fetch_sub` of all threads that have held the value.
        if self.word.compare_exchange(taken, leaving, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            // SAFETY: the value was taken and no thread holds it. This step is made once.
            drop(unsafe { (*self.value.get()).take() });
            // Release: pairs with the load of `keep`, which writes the next value.
            self.word.fetch_sub(word(0, LEAVING) - word(0, FREE), Ordering::Release);
        }
    }
}

/// A holder of a value of a table. The value stays until the holder is dropped.
pub(crate) struct Held<T: 'static> {
    slot: &'static Slot<T>,
}

impl<T> Held<T> {
    /// Whether both are the same value.
    pub(crate) fn is(&self, other: &Self) -> bool {
        std::ptr::eq(self.slot, other.slot)
    }
}

impl<T> Deref for Held<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread has counted itself in while the slot was live, so the value stays
        // until the thread counts itself out.
        match unsafe { &*self.slot.value.get() } {
            Some(value) => value,
            None => unreachable!("a value that is held is there"),
        }
    }
}

impl<T> Drop for Held<T> {
    #[inline]
    fn drop(&mut self) {
        self.slot.let_go();
    }
}

/// The table of one kind of handles.
pub(crate) struct Handles<T> {
    /// The name of the kind in errors: "communicator".
    kind: &'static str,
    /// The name of the argument in errors: "comm".
    argument: &'static str,
    /// Slots never move, so a thread finds a slot without a lock.
    blocks: [OnceLock<Box<[Slot<T>]>>; BLOCKS],
    /// Locked while a value is stored.
    slots: Mutex<Slots>,
}

struct Slots {
    count: usize,
    /// The slot where the search for a free slot begins: the slot behind the last one that was
    /// found. So a search takes one step if most slots are free.
    next: usize,
}

fn slot_of(number: usize) -> Option<(usize, u32)> {
    let slot = (number & ((1 << SLOT_BITS) - 1)).checked_sub(1)?;
    Some((slot, u32::try_from(number >> SLOT_BITS).ok()?))
}

fn number(slot: usize, generation: u32) -> usize {
    (slot + 1) | (generation as usize) << SLOT_BITS
}

impl<T: Send + Sync + 'static> Handles<T> {
    pub(crate) const fn new(kind: &'static str, argument: &'static str) -> Self {
        Self {
            kind,
            argument,
            blocks: [const { OnceLock::new() }; BLOCKS],
            slots: Mutex::new(Slots { count: 0, next: 0 }),
        }
    }

    #[cold]
    fn unknown(&self, number: usize) -> Failed {
        let Self { kind, argument, .. } = self;
        match number {
            0 => Failed::argument(format!("{argument} is NULL")),
            _ => Failed::argument(format!("{argument} is no {kind}: it was destroyed, or never made")),
        }
    }

    /// The slot with this number; `None` if its block was not made.
    #[inline]
    fn slot(&'static self, number: usize) -> Option<&'static Slot<T>> {
        let block = (number / FIRST_SLOTS + 1).ilog2();
        let first = FIRST_SLOTS * ((1 << block) - 1);
        self.blocks.get(block as usize)?.get()?.get(number - first)
    }

    /// The value of a handle.
    #[inline]
    pub(crate) fn find<H>(&'static self, handle: *mut H) -> Result<Held<T>, Failed> {
        let found =
            slot_of(handle.addr()).and_then(|(number, generation)| Some((self.slot(number)?, generation)));
        let Some((slot, generation)) = found else { return Err(self.unknown(handle.addr())) };
        // Acquire: pairs with the step of `keep` that makes the value live.
        let before = slot.word.fetch_add(1, Ordering::Acquire);
        if before & !HOLDERS_MAX == word(generation, LIVE) {
            return Ok(Held { slot });
        }
        slot.let_go();
        Err(self.refused(handle.addr(), before & !HOLDERS == word(generation, LIVE)))
    }

    #[cold]
    fn refused(&self, number: usize, is_live: bool) -> Failed {
        let Self { argument, .. } = self;
        match is_live {
            false => self.unknown(number),
            true => Failed::usage(format!(
                "{argument} is in use by {} calls, and takes no more: end calls by pleachGroupEnd",
                HOLDERS_MAX + 1
            )),
        }
    }

    /// Stores a value; returns its handle.
    pub(crate) fn keep<H>(&'static self, value: T) -> Result<*mut H, Failed> {
        let mut slots = lock(&self.slots);
        // Acquire: pairs with the drop of the former value in `end`.
        let state = |slot: &Slot<T>| slot.word.load(Ordering::Acquire) & word(0, LEAVING);
        let (count, next) = (slots.count, slots.next);
        let free = (next..count)
            .chain(0..next)
            .find(|&at| self.slot(at).is_some_and(|slot| state(slot) == word(0, FREE)));
        if free.is_none() && count == VALUES_MAX {
            let kind = self.kind;
            return Err(Failed::usage(format!("there are {VALUES_MAX} handles of a {kind}; destroy some")));
        }
        let at = free.unwrap_or(count);
        slots.next = at + 1;
        if at == count {
            let block = (at / FIRST_SLOTS + 1).ilog2();
            let made = || (0..FIRST_SLOTS << block).map(|_| Slot::new()).collect();
            self.blocks[block as usize].get_or_init(made);
            slots.count += 1;
        }
        let slot = self.slot(at).expect("its block was made");
        // SAFETY: the slot is free, and this thread holds the lock for filling slots, so no other
        // thread reads or writes the value.
        unsafe { *slot.value.get() = Some(value) };
        // Release: pairs with `find` and `take`.
        let before = slot.word.fetch_add(word(0, LIVE) - word(0, FREE), Ordering::Release);
        Ok(std::ptr::without_provenance_mut(number(at, (before >> GENERATION_SHIFT) as u32)))
    }

    /// Takes the value out of the table. Its handle is invalid from now on.
    pub(crate) fn take<H>(&'static self, handle: *mut H) -> Result<Held<T>, Failed> {
        let found =
            slot_of(handle.addr()).and_then(|(number, generation)| Some((self.slot(number)?, generation)));
        let taken = found.and_then(|(slot, generation)| {
            let taken = |now: u64| {
                (now & !HOLDERS == word(generation, LIVE)).then(|| now + 1 + word(0, TAKEN) - word(0, LIVE))
            };
            // Acquire: as in `find`.
            slot.word.fetch_update(Ordering::Acquire, Ordering::Relaxed, taken).ok().map(|_| Held { slot })
        });
        taken.ok_or_else(|| self.unknown(handle.addr()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::result::pleachResult_t;

    #[test]
    fn a_handle_names_its_value_until_it_is_taken_and_nothing_after() {
        static TABLE: Handles<u32> = Handles::new("thing", "it");
        let first: *mut u8 = TABLE.keep(7).expect("room");
        assert_eq!(TABLE.find(first).map(|value| *value).ok(), Some(7));
        assert_eq!(TABLE.take(first).map(|value| *value).ok(), Some(7));
        let second: *mut u8 = TABLE.keep(8).expect("room");
        assert!(TABLE.find(first).is_err() && TABLE.take(first).is_err());
        assert_eq!(TABLE.find(second).map(|value| *value).ok(), Some(8));
        for number in [0, 2, 1 << 19, usize::MAX] {
            assert!(TABLE.find::<u8>(std::ptr::without_provenance_mut(number)).is_err(), "{number}");
        }
    }

    #[test]
    fn a_value_with_too_many_holders_is_refused_and_stays() {
        static TABLE: Handles<u32> = Handles::new("thing", "it");
        let handle: *mut u8 = TABLE.keep(7).expect("room");
        let word_now = &TABLE.slot(0).expect("its block was made").word;
        // Relaxed: no other thread knows the table.
        word_now.store(word(0, LIVE) | HOLDERS_MAX, Ordering::Relaxed);
        let last = TABLE.find(handle).expect("the holder before the limit");
        for further in [0, HOLDERS_MAX - 1] {
            word_now.fetch_add(further, Ordering::Relaxed);
            let failed = TABLE.find(handle).err().expect("the limit is reached");
            assert_eq!(failed.result, pleachResult_t::pleachInvalidUsage);
            assert!(failed.text.starts_with("it is in use by 536870912 calls"), "{}", failed.text);
            assert_eq!(word_now.load(Ordering::Relaxed), word(0, LIVE) | (HOLDERS_MAX + 1 + further));
        }
        assert_eq!(TABLE.take(handle).map(|value| *value).ok(), Some(7), "the limit keeps no value alive");
        // As if all the other holders had counted themselves out.
        word_now.store(word(0, TAKEN) | 1, Ordering::Relaxed);
        assert_eq!(*last, 7);
        drop(last);
        assert_eq!(word_now.load(Ordering::Relaxed), word(1, FREE));
    }

    #[test]
    fn a_table_is_full_at_its_limit_and_has_room_again_when_a_value_was_taken() {
        static TABLE: Handles<usize> = Handles::new("thing", "it");
        let handles: Vec<*mut u8> = (0..300).map(|value| TABLE.keep(value).expect("room")).collect();
        for (value, handle) in handles.iter().enumerate() {
            assert_eq!(TABLE.find(*handle).map(|found| *found).ok(), Some(value));
        }
        let held = TABLE.take(handles[200]).expect("it is there");
        let other: *mut u8 = TABLE.keep(1000).expect("room");
        assert_eq!(slot_of(other.addr()).map(|(slot, _)| slot), Some(300), "a held slot is not free");
        assert_eq!(*held, 200);
        drop(held);
        let again: *mut u8 = TABLE.keep(2000).expect("room");
        assert_eq!(slot_of(again.addr()), Some((200, 1)));
    }

    #[test]
    fn a_value_is_dropped_once_and_when_nobody_holds_it_whoever_takes_it() {
        static TABLE: Handles<Counted> = Handles::new("thing", "it");
        /// Relaxed: the threads are joined before the counter is read.
        static DROPPED: AtomicUsize = AtomicUsize::new(0);
        /// Relaxed: the number only marks the value as live. Dropping the value resets it.
        struct Counted(AtomicUsize);
        impl Drop for Counted {
            fn drop(&mut self) {
                assert_eq!(self.0.swap(0, Ordering::Relaxed), 1, "dropped once");
                DROPPED.fetch_add(1, Ordering::Relaxed);
            }
        }
        const ROUNDS: usize = 300;
        /// Relaxed: handles carry no memory with them.
        static NEWEST: AtomicUsize = AtomicUsize::new(0);
        let user = || {
            let mut found = 0;
            while NEWEST.load(Ordering::Relaxed) != usize::MAX {
                let handle: *mut u8 = std::ptr::without_provenance_mut(NEWEST.load(Ordering::Relaxed));
                if let Ok(held) = TABLE.find(handle) {
                    assert_eq!(held.0.load(Ordering::Relaxed), 1, "it lives while it is held");
                    found += 1;
                }
                // Two threads and the maker try to take the value. One of the three takes it.
                drop(TABLE.take(handle));
            }
            found
        };
        let users = [std::thread::spawn(user), std::thread::spawn(user)];
        for _ in 0..ROUNDS {
            let handle: *mut u8 = TABLE.keep(Counted(AtomicUsize::new(1))).expect("room");
            NEWEST.store(handle.addr(), Ordering::Relaxed);
            std::thread::yield_now();
            drop(TABLE.take(handle));
        }
        NEWEST.store(usize::MAX, Ordering::Relaxed);
        for user in users {
            user.join().expect("it found nothing wrong");
        }
        assert_eq!(DROPPED.load(Ordering::Relaxed), ROUNDS);
        assert!(lock(&TABLE.slots).count <= 4, "slots are used again");
    }
}
