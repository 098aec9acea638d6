//! Notes where a runtime allocates the tensors that cross, and gives these sites registered memory.
//!
//! A runtime that allocates its results itself cannot be told where to put them. But the sequence
//! of its allocations is the same in each run. So a program installs [`TracingAllocator`] as its
//! global allocator, and a [`Tracer`] notes in one run which allocation holds a result: its
//! [`Site`], which is the size and the number among the allocations of this size. From the next run
//! on the site gets registered memory, a place for each slot of the tensor.
//!
//! A runtime may use a buffer for several values, one after another. The result is in it at the
//! end, and only then it is sent, so this does no harm: peers read the memory after the signal.
//!
//! **Invariant:** a place is given out once at a time: it is *live* until it is deallocated. Only
//! the thread between [`Tracer::begin`] and [`Tracer::end`] is traced, and only its allocations use
//! the tables of sites. When no tracer was ever started, an allocation costs one relaxed load more.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pleach_transport::Slice;

use super::channels::SLOT_ALIGN_BYTES;

/// Smaller allocations are not counted.
pub const COUNTED_BYTES: usize = 1024;

/// Most allocations of a run that are noted; later ones are not found.
const LOG_MAX: usize = 1 << 14;

/// Most sizes of allocations of a run, a power of two.
const SIZES_MAX: usize = 1 << 11;

/// Most places, of all slots of all sites.
const PLACES_MAX: usize = 1 << 10;

/// The allocations of a run with the same number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Site {
    /// The size.
    pub bytes: usize,
    /// The number among the allocations of this size.
    pub number: u32,
}

/// The global allocator of a program that runs parts of graphs.
#[derive(Clone, Copy, Debug)]
pub struct TracingAllocator;

/// Whether places may be live. Relaxed: the thread that traces sets it, and other threads can only
/// free a place that was given to them by a synchronization.
static IS_ON: AtomicBool = AtomicBool::new(false);

/// Whether there is a tracer. Acquire and release: the tables go from one tracer to the next.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IS_TRACED: Cell<bool> = const { Cell::new(false) };
}

/// Memory for one slot of a site. Relaxed: the entries are written before an address in them is
/// given out, and who frees the address got it by a synchronization.
struct PlaceEntry {
    start: AtomicUsize,
    /// Acquire and release: who gets the place after it was freed sees what was written before.
    is_live: AtomicBool,
}

static PLACES: [PlaceEntry; PLACES_MAX] =
    [const { PlaceEntry { start: AtomicUsize::new(0), is_live: AtomicBool::new(false) } }; PLACES_MAX];

static PLACE_COUNT: AtomicUsize = AtomicUsize::new(0);

/// The tables of the traced thread.
struct Tables {
    /// By hash: a size, and how many allocations of it there were in this run.
    sizes: [(usize, u32); SIZES_MAX],
    size_count: usize,
    log: [(usize, Site); LOG_MAX],
    log_len: usize,
    /// Sites with their first place.
    sites: [(Site, usize); PLACES_MAX],
    site_count: usize,
    slot: usize,
    threshold: usize,
    heap_allocations: u64,
    is_counting: bool,
}

struct Shared(UnsafeCell<Tables>);

// SAFETY: one tracer exists at a time (`IS_TAKEN`), it stays on its thread, and allocations use the
// tables only on this thread, while the tracer itself does not: between `begin` and `end`.
unsafe impl Sync for Shared {}

const NO_SITE: Site = Site { bytes: 0, number: 0 };

static TABLES: Shared = Shared(UnsafeCell::new(Tables {
    sizes: [(0, 0); SIZES_MAX],
    size_count: 0,
    log: [(0, NO_SITE); LOG_MAX],
    log_len: 0,
    sites: [(NO_SITE, 0); PLACES_MAX],
    site_count: 0,
    slot: 0,
    threshold: usize::MAX,
    heap_allocations: 0,
    is_counting: false,
}));

impl Tables {
    /// The number of this allocation among those of its size in this run; nothing if there are too
    /// many sizes.
    fn number(&mut self, bytes: usize) -> Option<u32> {
        let mut at = bytes.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        loop {
            at %= SIZES_MAX;
            let (size, count) = &mut self.sizes[at];
            if *size == 0 && self.size_count + 1 < SIZES_MAX {
                self.size_count += 1;
                *size = bytes;
            } else if *size == 0 {
                return None;
            }
            if *size == bytes {
                *count += 1;
                return Some(*count - 1);
            }
            at += 1;
        }
    }

    /// The place of a site in this run, if it has one that is not in use.
    fn place(&self, site: Site, align: usize) -> Option<usize> {
        let (_, first) = self.sites[..self.site_count].iter().find(|(known, _)| *known == site)?;
        let place = &PLACES[first + self.slot];
        let is_free = align <= SLOT_ALIGN_BYTES as usize && !place.is_live.swap(true, Ordering::Acquire);
        is_free.then(|| place.start.load(Ordering::Relaxed))
    }

    fn allocate(&mut self, layout: Layout, is_zeroed: bool) -> *mut u8 {
        let Some(number) = self.number(layout.size()) else { return heap(layout, is_zeroed) };
        let site = Site { bytes: layout.size(), number };
        let address = match self.place(site, layout.align()) {
            Some(start) => {
                let address = std::ptr::with_exposed_provenance_mut::<u8>(start);
                if is_zeroed {
                    // SAFETY: the place has the size of its site.
                    unsafe { address.write_bytes(0, layout.size()) };
                }
                address
            }
            None => {
                self.heap_allocations += u64::from(self.is_counting && layout.size() >= COUNTED_BYTES);
                heap(layout, is_zeroed)
            }
        };
        if self.log_len < LOG_MAX {
            self.log[self.log_len] = (address.addr(), site);
            self.log_len += 1;
        }
        address
    }
}

fn heap(layout: Layout, is_zeroed: bool) -> *mut u8 {
    // SAFETY: a layout of the caller of the allocator, which is not empty.
    unsafe { if is_zeroed { System.alloc_zeroed(layout) } else { System.alloc(layout) } }
}

/// An allocation while tracing is on.
#[cold]
fn allocate(layout: Layout, is_zeroed: bool) -> *mut u8 {
    if !IS_TRACED.try_with(Cell::get).unwrap_or(false) {
        return heap(layout, is_zeroed);
    }
    // SAFETY: this is the traced thread, whose tracer is between `begin` and `end`, and nothing
    // below allocates.
    let tables = unsafe { &mut *TABLES.0.get() };
    if layout.size() < tables.threshold {
        return heap(layout, is_zeroed);
    }
    tables.allocate(layout, is_zeroed)
}

/// The place at this address.
#[cold]
fn place_at(address: *mut u8) -> Option<&'static PlaceEntry> {
    let count = PLACE_COUNT.load(Ordering::Relaxed);
    let is_it = |place: &&PlaceEntry| place.start.load(Ordering::Relaxed) == address.addr();
    PLACES[..count].iter().find(is_it)
}

// SAFETY: memory comes from the system's allocator, or is a place of the size of its site, aligned
// to 64 bytes, which nobody else has until it is deallocated here.
unsafe impl GlobalAlloc for TracingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_ON.load(Ordering::Relaxed) {
            return allocate(layout, false);
        }
        heap(layout, false)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if IS_ON.load(Ordering::Relaxed) {
            return allocate(layout, true);
        }
        heap(layout, true)
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if IS_ON.load(Ordering::Relaxed)
            && let Some(place) = place_at(address)
        {
            place.is_live.store(false, Ordering::Release);
            return;
        }
        // SAFETY: the system's allocator gave this address, with this layout.
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if IS_ON.load(Ordering::Relaxed) && place_at(address).is_some() {
            // SAFETY: the caller's promise: `bytes` is not zero and does not overflow.
            let new = heap(unsafe { Layout::from_size_align_unchecked(bytes, layout.align()) }, false);
            if !new.is_null() {
                // SAFETY: both are that long, and apart.
                unsafe { new.copy_from_nonoverlapping(address, bytes.min(layout.size())) };
                // SAFETY: the address is given back once.
                unsafe { self.dealloc(address, layout) };
            }
            return new;
        }
        // SAFETY: the system's allocator gave this address, with this layout.
        unsafe { System.realloc(address, layout, bytes) }
    }
}

/// Traces the allocations of the thread that made it. There is one at a time.
#[derive(Debug)]
pub struct Tracer {
    /// The memory of the places.
    places: Vec<Slice>,
    /// It stays on its thread.
    _thread: PhantomData<*mut ()>,
}

impl Tracer {
    /// A tracer of allocations of at least this size; nothing if there is one already, or the
    /// program has no [`TracingAllocator`].
    #[must_use]
    pub fn start(threshold: usize) -> Option<Self> {
        if IS_TAKEN.swap(true, Ordering::Acquire) {
            return None;
        }
        let mut tracer = Self { places: Vec::new(), _thread: PhantomData };
        // SAFETY: this is the only tracer, and the thread is not traced now.
        let tables = unsafe { &mut *TABLES.0.get() };
        (tables.threshold, tables.site_count, tables.heap_allocations) = (threshold.max(1), 0, 0);
        PLACE_COUNT.store(0, Ordering::Relaxed);
        IS_ON.store(true, Ordering::Relaxed);
        tracer.begin(0, true);
        let probe = std::hint::black_box(Vec::<u8>::with_capacity(threshold.max(COUNTED_BYTES)));
        tracer.end();
        tracer.site_of(probe.as_ptr()).map(|_| tracer)
    }

    /// Begins a run, in which sites get the places of this slot. Allocations of the first one are
    /// not counted.
    pub fn begin(&mut self, slot: usize, is_first: bool) {
        // SAFETY: this is the only tracer, and the thread is not traced now.
        let tables = unsafe { &mut *TABLES.0.get() };
        (tables.slot, tables.log_len, tables.size_count) = (slot, 0, 0);
        tables.sizes = [(0, 0); SIZES_MAX];
        tables.is_counting = !is_first;
        IS_TRACED.set(true);
    }

    /// Ends a run.
    pub fn end(&mut self) {
        IS_TRACED.set(false);
    }

    /// The site that allocated this address in the last run.
    #[must_use]
    pub fn site_of(&self, address: *const u8) -> Option<Site> {
        // SAFETY: this is the only tracer, and the thread is not traced now.
        let tables = unsafe { &*TABLES.0.get() };
        let log = &tables.log[..tables.log_len];
        log.iter().rev().find(|(start, _)| *start == address.addr()).map(|(_, site)| *site)
    }

    /// Gives a site memory: a place for each slot, of its size. False if there is no room for more
    /// places.
    pub fn direct(&mut self, site: Site, places: &[Slice]) -> bool {
        let first = PLACE_COUNT.load(Ordering::Relaxed);
        // SAFETY: this is the only tracer, and the thread is not traced now.
        let tables = unsafe { &mut *TABLES.0.get() };
        let fits = |place: &Slice| {
            place.len() >= site.bytes && place.as_ptr().addr().is_multiple_of(SLOT_ALIGN_BYTES as usize)
        };
        if first + places.len() > PLACES_MAX || !places.iter().all(fits) {
            return false;
        }
        for (entry, place) in PLACES[first..].iter().zip(places) {
            let start = place.as_ptr().expose_provenance();
            entry.start.store(start, Ordering::Relaxed);
            entry.is_live.store(false, Ordering::Relaxed);
            self.places.push(place.clone());
        }
        PLACE_COUNT.store(first + places.len(), Ordering::Relaxed);
        match tables.sites[..tables.site_count].iter_mut().find(|(known, _)| *known == site) {
            Some(known) => known.1 = first,
            None => {
                tables.sites[tables.site_count] = (site, first);
                tables.site_count += 1;
            }
        }
        true
    }

    /// How many allocations went to the heap after the first run.
    #[must_use]
    pub fn heap_allocations(&self) -> u64 {
        // SAFETY: this is the only tracer, and the thread is not traced now.
        unsafe { (*TABLES.0.get()).heap_allocations }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        IS_TRACED.set(false);
        let count = PLACE_COUNT.load(Ordering::Relaxed);
        if PLACES[..count].iter().any(|place| place.is_live.load(Ordering::Acquire)) {
            // Somebody holds a value in a place: the places stay for ever, and nobody traces again.
            std::mem::forget(std::mem::take(&mut self.places));
            return;
        }
        IS_ON.store(false, Ordering::Relaxed);
        PLACE_COUNT.store(0, Ordering::Relaxed);
        IS_TAKEN.store(false, Ordering::Release);
    }
}
