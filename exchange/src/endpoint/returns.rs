//! The counters of returned leases at the holder's end. The owner reads them in memory of the
//! holder once regions are shared; until then messages carry them.
//!
//! **Invariant:** each return reaches the owner in one of the two ways. What was read from a lease
//! was read before the owner sees that the lease is back.
#![cfg_attr(loom, allow(dead_code, reason = "links are not there"))]

#[cfg(loom)]
use loom::sync::Mutex;
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
#[cfg(not(loom))]
use std::sync::Mutex;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(loom))]
use pleach_transport::mutex::lock;

use crate::lease::ReturnCounters;

#[cfg(loom)]
fn lock<T>(mutex: &Mutex<T>) -> loom::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no thread has panicked")
}

/// Memory of the holder that the owner reads.
pub(crate) trait ReturnPage: Send + Sync {
    /// Stores the counter of a lease's slot: see [`publish_return`].
    fn store_counter(&self, slot: u32, count: u64);
}

/// Stores the counter of a slot, and counts the return in `returned`, at which the owner looks.
pub(crate) fn publish_return(counter: &AtomicU64, returned: &AtomicU64, count: u64) {
    // Release, both: pair with the acquire in `load_word`. Who sees the return sees the counter,
    // and who sees the counter comes after all that was read from the lease.
    counter.store(count, Ordering::Release);
    returned.fetch_add(1, Ordering::Release);
}

/// A word that the other end stores.
pub(crate) fn load_word(word: &AtomicU64) -> u64 {
    word.load(Ordering::Acquire)
}

/// See the module.
pub(crate) struct Returns {
    counters: Box<[AtomicU64]>,
    way: Mutex<ReturnWay>,
}

enum ReturnWay {
    /// The slots whose counters have changed and were not told.
    Messages(Vec<u32>),
    /// The owner reads this page.
    Page(Arc<dyn ReturnPage>),
}

impl Returns {
    pub(crate) fn new(slots: u32) -> Self {
        let counters = (0..slots).map(|_| AtomicU64::new(0)).collect();
        Self { counters, way: Mutex::new(ReturnWay::Messages(Vec::new())) }
    }

    /// The counters that the owner is to be told, by slot.
    pub(crate) fn take_changed(&self) -> Vec<(u32, u64)> {
        let changed = match &mut *lock(&self.way) {
            ReturnWay::Messages(changed) => std::mem::take(changed),
            ReturnWay::Page(_) => Vec::new(),
        };
        changed.into_iter().map(|slot| (slot, self.load(slot))).collect()
    }

    /// From now on the owner reads the counters in this page. Returns those that it is to be told
    /// once more.
    pub(crate) fn share(&self, page: Arc<dyn ReturnPage>) -> Vec<(u32, u64)> {
        let mut way = lock(&self.way);
        for slot in 0..self.counters.len() as u32 {
            match self.load(slot) {
                0 => {}
                count => page.store_counter(slot, count),
            }
        }
        match std::mem::replace(&mut *way, ReturnWay::Page(page)) {
            ReturnWay::Messages(changed) => changed.into_iter().map(|slot| (slot, self.load(slot))).collect(),
            ReturnWay::Page(_) => Vec::new(),
        }
    }
}

impl ReturnCounters for Returns {
    fn store(&self, slot: u32, count: u64) {
        let Some(counter) = self.counters.get(slot as usize) else { return };
        // Under the lock, so that none is missed when the way changes.
        let mut way = lock(&self.way);
        // Release: pairs with the acquire in `load_word`.
        counter.store(count, Ordering::Release);
        match &mut *way {
            ReturnWay::Messages(changed) => changed.push(slot),
            ReturnWay::Page(page) => page.store_counter(slot, count),
        }
    }

    fn load(&self, slot: u32) -> u64 {
        self.counters.get(slot as usize).map_or(0, load_word)
    }
}

/// All interleavings with at most 3 preemptions:
/// `RUSTFLAGS="--cfg loom" cargo test -p pleach-exchange --lib --release loom`.
#[cfg(all(test, loom))]
mod loom_tests {
    use loom::cell::UnsafeCell;
    use loom::thread;
    use pleach_transport::{RegionKey, RemoteSlice};

    use super::*;
    use crate::arena::{ArenaLimits, ArenaPlan, Block};
    use crate::lease::{LeaseHolder, LeaseLimits, LeaseOwner};
    use crate::reference::{LinkId, Reference};

    const LINK: LinkId = LinkId(1);
    const REGION: RegionKey = RegionKey(2);

    /// An arena with room for one buffer.
    const ARENA_BYTES: u64 = 64;

    struct Arena {
        plan: Mutex<ArenaPlan<()>>,
        /// Whoever reads or writes the buffer says so here, and loom finds who does at once.
        bytes: UnsafeCell<()>,
    }

    impl Arena {
        fn new() -> Arc<Self> {
            let plan = Mutex::new(ArenaPlan::new(ArenaLimits { bytes: ARENA_BYTES, arenas: 1 }));
            Arc::new(Self { plan, bytes: UnsafeCell::new(()) })
        }

        /// A buffer that is written, if there is room.
        fn buffer(self: &Arc<Self>) -> Option<Buffer> {
            let block = lock(&self.plan).allocate(&(), ARENA_BYTES).ok()?.block;
            self.bytes.with_mut(|_| ());
            Some(Buffer { arena: self.clone(), block: Some(block) })
        }

        fn read(&self) {
            self.bytes.with(|_| ());
        }
    }

    /// Gives its place back as buffers of an endpoint do.
    struct Buffer {
        arena: Arc<Arena>,
        block: Option<Block>,
    }

    impl Drop for Buffer {
        fn drop(&mut self) {
            if let Some(block) = self.block.take() {
                lock(&self.arena.plan).free(block);
            }
        }
    }

    /// A status page whose counters are stored in a given way.
    struct Page {
        counter: AtomicU64,
        returned: AtomicU64,
        publish: fn(&AtomicU64, &AtomicU64, u64),
    }

    impl Page {
        fn new(publish: fn(&AtomicU64, &AtomicU64, u64)) -> Arc<Self> {
            Arc::new(Self { counter: AtomicU64::new(0), returned: AtomicU64::new(0), publish })
        }
    }

    impl ReturnPage for Page {
        fn store_counter(&self, _slot: u32, count: u64) {
            (self.publish)(&self.counter, &self.returned, count);
        }
    }

    /// An owner that has lent a buffer.
    struct Owner {
        arena: Arc<Arena>,
        leases: LeaseOwner<Buffer>,
        page: Arc<Page>,
        seen: u64,
    }

    impl Owner {
        fn new(page: Arc<Page>) -> (Self, Reference) {
            let (arena, mut leases) = (Arena::new(), LeaseOwner::new(LeaseLimits::default()));
            leases.open_link(LINK).expect("is new");
            let buffer = arena.buffer().expect("there is room");
            let whole = RemoteSlice { key: REGION, offset: 0, len: ARENA_BYTES };
            let lent = leases.lend(LINK, whole, 0..8, buffer);
            let reference = lent.map_err(|unlent| unlent.error).expect("is below the limits");
            (Self { arena, leases, page, seen: 0 }, reference)
        }

        /// Looks at the page as the endpoint does, and uses what is back again. True: it was.
        fn look(&mut self) -> bool {
            let returned = load_word(&self.page.returned);
            if std::mem::replace(&mut self.seen, returned) != returned {
                let counters = self.leases.collect(LINK, |_slot| load_word(&self.page.counter));
                drop(counters.expect("the holder counts right"));
            }
            self.arena.buffer().is_some()
        }
    }

    fn holder(returns: &Arc<Returns>) -> LeaseHolder {
        let mut holder = LeaseHolder::new(LINK, 1, returns.clone());
        holder.add_region(REGION, ARENA_BYTES).expect("is the first");
        holder
    }

    /// A holder reads and returns, while the owner looks, and another thread of the owner's program
    /// asks for memory. `reads_late`: the holder reads once more when it has returned.
    fn check(publish: fn(&AtomicU64, &AtomicU64, u64), reads_late: bool) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let page = Page::new(publish);
            let (mut owner, reference) = Owner::new(page.clone());
            let arena = owner.arena.clone();
            let reads = thread::spawn({
                let arena = arena.clone();
                move || {
                    let returns = Arc::new(Returns::new(1));
                    assert_eq!(returns.share(page), []);
                    let lease = holder(&returns).accept(&reference).expect("is good");
                    arena.read();
                    drop(lease);
                    if reads_late {
                        arena.read();
                    }
                }
            });
            let sends = thread::spawn(move || drop(arena.buffer()));
            owner.look();
            reads.join().expect("does not panic");
            sends.join().expect("does not panic");
            assert!(owner.look(), "the return was missed");
        });
    }

    #[test]
    fn loom_a_buffer_is_used_again_when_its_lease_is_back_and_no_return_is_missed() {
        check(publish_return, false);
    }

    #[test]
    #[should_panic(expected = "Causality violation")]
    fn loom_a_lease_that_is_returned_before_its_last_read_is_caught() {
        check(publish_return, true);
    }

    #[test]
    #[should_panic(expected = "the return was missed")]
    fn loom_counters_without_an_order_are_caught() {
        let without_order = |counter: &AtomicU64, returned: &AtomicU64, count| {
            counter.store(count, Ordering::Relaxed);
            returned.fetch_add(1, Ordering::Relaxed);
        };
        check(without_order, false);
    }

    /// The way of returns changes while a lease comes back: the owner is told by a message, or
    /// finds the counter in the page. It was seen to fail with a [`Returns::share`] that lets go of
    /// the lock before the way changes, and tells nothing.
    #[test]
    fn loom_a_return_is_not_lost_when_its_way_changes() {
        loom::model(|| {
            let page = Page::new(publish_return);
            let (mut owner, reference) = Owner::new(page.clone());
            let returns = Arc::new(Returns::new(1));
            let mut holder = holder(&returns);
            let reads = thread::spawn({
                let arena = owner.arena.clone();
                move || {
                    let lease = holder.accept(&reference).expect("is good");
                    arena.read();
                    drop(lease);
                }
            });
            let mut told = returns.take_changed();
            told.extend(returns.share(page));
            for (slot, counter) in told {
                drop(owner.leases.returned(LINK, slot, counter).expect("the holder counts right"));
            }
            owner.look();
            reads.join().expect("does not panic");
            assert!(owner.look(), "the return was missed");
        });
    }
}
