//! Handles: numbers in the clothes of pointers.
//!
//! **Invariant:** a handle names an entry of its table by its place and by how often the place was
//! used, and a place counts up when its value is gone. So a handle that was taken, damaged or never
//! given names nothing. A function that runs holds the value, so taking the value in another thread
//! takes effect when the function returns.
//!
//! A lock and a count would be four atomic operations a call, which is much for a call of a tenth
//! of a microsecond; here are two, on one word of the place: it says how often the place was used,
//! its state, and how many hold the value. Why a value is dropped once, and while nobody holds it:
//!
//! * Whoever looks for a value counts itself first and reads the word in the same step. The state
//!   was "live" and the use the right one: then no later step drops the value before it has counted
//!   itself out. Otherwise it reads nothing and counts itself out.
//! * Only [`Handles::take`] leads from "live" to "taken", and counts itself in the same step.
//! * Only a step from "taken" with a count of 0 to "leaving" lets a thread drop the value. It can
//!   be made once a use. Whoever counts itself out and leaves "taken" with 0 behind tries it; where
//!   it fails, somebody has counted itself in meanwhile, who then tries it in turn.
//! * Only [`Handles::keep`] writes a value, to a place that is "free", under a lock.

use std::cell::UnsafeCell;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use pleach_transport::mutex::lock;

use crate::result::Failed;

/// Most values at a time in a table.
const VALUES_MAX: usize = 1 << 16;

/// The low bits of a handle say the place, counted from 1; the others how often it was used before.
const PLACE_BITS: u32 = 20;

/// Places of the first block; each further block has twice as many.
const FIRST_PLACES: usize = 64;
const BLOCKS: usize = 11;
const _: () = assert!(FIRST_PLACES * ((1 << BLOCKS) - 1) >= VALUES_MAX);

/// The bits of a place's word: how many hold the value, then the state, then the uses.
const STATE_SHIFT: u32 = 30;
const USES_SHIFT: u32 = 32;
const HOLDERS: u64 = (1 << STATE_SHIFT) - 1;

/// [`Handles::find`] adds a holder to at most so many holders. The count has twice the room, because
/// every thread that is refused is counted for a moment too.
const HOLDERS_MAX: u64 = HOLDERS >> 1;

const FREE: u64 = 0;
const LIVE: u64 = 1;
const TAKEN: u64 = 2;
const LEAVING: u64 = 3;

/// The word of a place in this use and this state, without its holders.
const fn word(uses: u32, state: u64) -> u64 {
    (uses as u64) << USES_SHIFT | state << STATE_SHIFT
}

/// A place of a table.
struct Place<T> {
    word: AtomicU64,
    /// Some from the time it is live until it is leaving.
    value: UnsafeCell<Option<T>>,
}

// SAFETY: several threads read the value; one writes and drops it while no other reads it: see the
// module.
unsafe impl<T: Send + Sync> Sync for Place<T> {}

impl<T> Place<T> {
    const fn new() -> Self {
        Self { word: AtomicU64::new(word(0, FREE)), value: UnsafeCell::new(None) }
    }

    /// Counts this thread out; drops a value that was taken and that nobody holds now.
    #[inline]
    fn let_go(&self) {
        // Release: what this thread has read of the value comes before its end (`end`).
        let before = self.word.fetch_sub(1, Ordering::Release);
        if before & (word(0, LEAVING) | HOLDERS) == word(0, TAKEN) | 1 {
            self.end(before - 1);
        }
    }

    #[cold]
    fn end(&self, taken: u64) {
        let uses = (taken >> USES_SHIFT) as u32;
        let leaving = word(uses.wrapping_add(1), LEAVING);
        // Acquire: pairs with the `fetch_sub` of all that have held the value.
        if self.word.compare_exchange(taken, leaving, Ordering::Acquire, Ordering::Relaxed).is_ok() {
            // SAFETY: the value was taken and nobody holds it; this step is made once.
            drop(unsafe { (*self.value.get()).take() });
            // Release: pairs with the load of `keep`, which writes the next value.
            self.word.fetch_sub(word(0, LEAVING) - word(0, FREE), Ordering::Release);
        }
    }
}

/// A value of a table, which stays until this is dropped.
pub(crate) struct Held<T: 'static> {
    place: &'static Place<T>,
}

impl<T> Held<T> {
    /// Whether both are the same value.
    pub(crate) fn is(&self, other: &Self) -> bool {
        std::ptr::eq(self.place, other.place)
    }
}

impl<T> Deref for Held<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this thread has counted itself in a live place, whose value stays until it counts
        // itself out.
        match unsafe { &*self.place.value.get() } {
            Some(value) => value,
            None => unreachable!("a value that is held is there"),
        }
    }
}

impl<T> Drop for Held<T> {
    #[inline]
    fn drop(&mut self) {
        self.place.let_go();
    }
}

/// The table of one kind of handles.
pub(crate) struct Handles<T> {
    /// The name of the kind in errors: "communicator".
    kind: &'static str,
    /// The name of the argument in errors: "comm".
    argument: &'static str,
    /// Places stay where they are, so nobody locks to find one.
    blocks: [OnceLock<Box<[Place<T>]>>; BLOCKS],
    /// How many places there are; held by who stores a value.
    places: Mutex<usize>,
}

fn place_of(number: usize) -> Option<(usize, u32)> {
    let place = (number & ((1 << PLACE_BITS) - 1)).checked_sub(1)?;
    Some((place, u32::try_from(number >> PLACE_BITS).ok()?))
}

fn number(place: usize, uses: u32) -> usize {
    (place + 1) | (uses as usize) << PLACE_BITS
}

impl<T: Send + Sync + 'static> Handles<T> {
    pub(crate) const fn new(kind: &'static str, argument: &'static str) -> Self {
        Self { kind, argument, blocks: [const { OnceLock::new() }; BLOCKS], places: Mutex::new(0) }
    }

    #[cold]
    fn unknown(&self, number: usize) -> Failed {
        let Self { kind, argument, .. } = self;
        match number {
            0 => Failed::argument(format!("{argument} is NULL")),
            _ => Failed::argument(format!("{argument} is no {kind}: it was destroyed, or never made")),
        }
    }

    /// The place of this number, where its block was made.
    #[inline]
    fn place(&'static self, number: usize) -> Option<&'static Place<T>> {
        let block = (number / FIRST_PLACES + 1).ilog2();
        let first = FIRST_PLACES * ((1 << block) - 1);
        self.blocks.get(block as usize)?.get()?.get(number - first)
    }

    /// The value of a handle.
    #[inline]
    pub(crate) fn find<H>(&'static self, handle: *mut H) -> Result<Held<T>, Failed> {
        let found = place_of(handle.addr()).and_then(|(number, uses)| Some((self.place(number)?, uses)));
        let Some((place, uses)) = found else { return Err(self.unknown(handle.addr())) };
        // Acquire: pairs with the step of `keep` that makes the value live.
        let before = place.word.fetch_add(1, Ordering::Acquire);
        if before & !HOLDERS_MAX == word(uses, LIVE) {
            return Ok(Held { place });
        }
        place.let_go();
        Err(self.refused(handle.addr(), before & !HOLDERS == word(uses, LIVE)))
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
        let mut places = lock(&self.places);
        // Acquire: pairs with the end of the value before.
        let state = |place: &Place<T>| place.word.load(Ordering::Acquire) & word(0, LEAVING);
        let free = (0..*places).find(|&at| self.place(at).is_some_and(|place| state(place) == word(0, FREE)));
        if free.is_none() && *places == VALUES_MAX {
            let kind = self.kind;
            return Err(Failed::usage(format!("there are {VALUES_MAX} handles of a {kind}; destroy some")));
        }
        let at = free.unwrap_or(*places);
        if at == *places {
            let block = (at / FIRST_PLACES + 1).ilog2();
            let made = || (0..FIRST_PLACES << block).map(|_| Place::new()).collect();
            self.blocks[block as usize].get_or_init(made);
            *places += 1;
        }
        let place = self.place(at).expect("its block was made");
        // SAFETY: the place is free, and this thread has the lock of who fills places: no other
        // thread reads or writes its value.
        unsafe { *place.value.get() = Some(value) };
        // Release: pairs with `find` and `take`.
        let before = place.word.fetch_add(word(0, LIVE) - word(0, FREE), Ordering::Release);
        Ok(std::ptr::without_provenance_mut(number(at, (before >> USES_SHIFT) as u32)))
    }

    /// Takes the value out of the table: its handle names nothing from now on.
    pub(crate) fn take<H>(&'static self, handle: *mut H) -> Result<Held<T>, Failed> {
        let found = place_of(handle.addr()).and_then(|(number, uses)| Some((self.place(number)?, uses)));
        let taken = found.and_then(|(place, uses)| {
            let taken = |now: u64| {
                (now & !HOLDERS == word(uses, LIVE)).then(|| now + 1 + word(0, TAKEN) - word(0, LIVE))
            };
            // Acquire: as in `find`.
            place.word.fetch_update(Ordering::Acquire, Ordering::Relaxed, taken).ok().map(|_| Held { place })
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
        let word_now = &TABLE.place(0).expect("its block was made").word;
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
        assert_eq!(place_of(other.addr()).map(|(place, _)| place), Some(300), "a held place is not free");
        assert_eq!(*held, 200);
        drop(held);
        let again: *mut u8 = TABLE.keep(2000).expect("room");
        assert_eq!(place_of(again.addr()), Some((200, 1)));
    }

    #[test]
    fn a_value_is_dropped_once_and_when_nobody_holds_it_whoever_takes_it() {
        static TABLE: Handles<Counted> = Handles::new("thing", "it");
        /// Relaxed: the threads are joined before it is read.
        static DROPPED: AtomicUsize = AtomicUsize::new(0);
        /// Relaxed: a sign of life of the value, which its drop takes away.
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
                // Two threads try, and the maker: one of the three takes it.
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
        assert!(*TABLE.places.lock().expect("nobody has panicked") <= 4, "places are used again");
    }
}
