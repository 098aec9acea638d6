//! Gives the buffers of a runtime the places that a memory plan has for them.
//!
//! A runtime that allocates its results itself cannot be told where to put them. But the sequence
//! of its allocations is the same in each run. So a program installs [`TracingAllocator`] as its
//! global allocator, and a [`Tracer`] notes in the first run what its thread allocates and when
//! that is freed ([`Site`]: the size, and the number among the allocations of this size). For
//! these lifetimes it makes a [`MemoryPlan`](crate::MemoryPlan) and one arena, and from the second
//! run on each site allocates at its offset there. A site that holds a tensor that crosses
//! allocates in registered memory instead, a place for each slot of the tensor.
//!
//! A later run may be another one: its inputs have another shape. Then sites miss their places, and
//! the next plan follows this run. A value that lives on in a place stays there, and the next plan
//! has an arena of its own.
//!
//! A runtime may use a buffer for several values, one after another. The result is in it at the
//! end, and only then it is sent, so this does no harm: peers read the memory after the signal.
//!
//! **Invariant:** memory that is given out shares no byte with memory that is in use. A plan says
//! where a buffer should lie; whether it can lie there, [`Places`] says. What has no place, or
//! finds it in use, is on the heap. Only the thread between [`Tracer::begin`] and [`Tracer::end`]
//! is traced. While no tracer lives, an allocation costs one relaxed load more.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memmap2::{MmapMut, MmapRaw};
use pleach_transport::Slice;

use super::channels::SLOT_ALIGN_BYTES;
use super::trace::{Assigned, PLACES_MAX, Places, TABLES, Trace};
pub use super::trace::{COUNTED_BYTES, Site};

/// Most tracers of a process at a time: tests have ranks that are threads.
const TRACERS_MAX: usize = 8;

/// The global allocator of a program that runs parts of graphs.
#[derive(Clone, Copy, Debug)]
pub struct TracingAllocator;

/// How many tracers live, or have left places in use. Relaxed: the thread that traces raises it,
/// and other threads can only free a place that was given to them by a synchronization.
static TRACERS: AtomicUsize = AtomicUsize::new(0);

/// How many of the desks were ever used. Relaxed, as above.
static DESKS_USED: AtomicUsize = AtomicUsize::new(0);

/// What a tracer is to the allocator.
struct Desk {
    /// Acquire and release: the trace goes from one tracer to the next.
    is_taken: AtomicBool,
    places: &'static Places,
    trace: UnsafeCell<Trace>,
}

// SAFETY: a desk has one tracer at a time (`is_taken`), which stays on its thread. The allocator
// uses the trace on this thread alone, while the tracer itself does not (`Role`).
unsafe impl Sync for Desk {}

impl Desk {
    const fn new(places: &'static Places) -> Self {
        Self { is_taken: AtomicBool::new(false), places, trace: UnsafeCell::new(Trace::new()) }
    }
}

/// All zero, so that they take no room in the program's file, and memory only where they are used.
static PLACES: [Places; TRACERS_MAX] = [const { Places::new() }; TRACERS_MAX];

static DESKS: [Desk; TRACERS_MAX] = {
    let [a, b, c, d, e, f, g, h] = &PLACES;
    [
        Desk::new(a),
        Desk::new(b),
        Desk::new(c),
        Desk::new(d),
        Desk::new(e),
        Desk::new(f),
        Desk::new(g),
        Desk::new(h),
    ]
};

fn used_desks() -> &'static [Desk] {
    &DESKS[..DESKS_USED.load(Ordering::Relaxed)]
}

/// What the allocator does with the trace on this thread. It uses none while the tracer does.
#[derive(Clone, Copy)]
enum Role {
    None,
    /// Notes what is freed: after a run.
    Frees(&'static Desk),
    /// Gives places, and notes what is allocated and freed: in a run.
    All(&'static Desk),
}

thread_local! {
    static ROLE: Cell<Role> = const { Cell::new(Role::None) };
}

fn role() -> Role {
    ROLE.try_with(Cell::get).unwrap_or(Role::None)
}

fn heap(layout: Layout, is_zeroed: bool) -> *mut u8 {
    // SAFETY: a layout of the caller of the allocator, which is not empty.
    unsafe { if is_zeroed { System.alloc_zeroed(layout) } else { System.alloc(layout) } }
}

/// An allocation while there are tracers.
#[cold]
fn allocate(layout: Layout, is_zeroed: bool) -> *mut u8 {
    let Role::All(desk) = role() else { return heap(layout, is_zeroed) };
    // SAFETY: this is the thread of the desk's tracer, in a run, and nothing below allocates by
    // this allocator.
    let trace = unsafe { &mut *desk.trace.get() };
    if !trace.sees(layout.size()) {
        return heap(layout, is_zeroed);
    }
    let Some(site) = trace.site(layout.size()) else {
        trace.miss(layout.size());
        return heap(layout, is_zeroed);
    };
    let address = match trace.take(site, layout.align(), desk.places) {
        Some(start) => {
            let address = std::ptr::with_exposed_provenance_mut::<u8>(start);
            if is_zeroed {
                // SAFETY: the place has the size of its site, and nobody else uses it.
                unsafe { address.write_bytes(0, layout.size()) };
            }
            address
        }
        None => heap(layout, is_zeroed),
    };
    trace.allocated(address.addr(), site);
    address
}

/// Whether this was a place and is free now.
#[cold]
fn give_back(address: *mut u8, layout: Layout) -> bool {
    if let Role::Frees(desk) | Role::All(desk) = role() {
        // SAFETY: this is the thread of the desk's tracer, which does not use the trace now.
        let trace = unsafe { &mut *desk.trace.get() };
        trace.freed(address.addr(), layout.size());
    }
    used_desks().iter().any(|desk| desk.places.give_back(address.addr()))
}

/// Whether growth or shrinkage in place would escape the trace.
#[cold]
fn is_traced(address: *mut u8, bytes: usize) -> bool {
    let is_long = |desk: &Desk| {
        // SAFETY: as in `give_back`.
        unsafe { &*desk.trace.get() }.sees(bytes)
    };
    matches!(role(), Role::All(desk) if is_long(desk))
        || used_desks().iter().any(|desk| desk.places.has(address.addr()))
}

// SAFETY: memory comes from the system's allocator, or is a place of the size of its site, aligned
// to 64 bytes, of which nobody else has a byte until it is deallocated here.
unsafe impl GlobalAlloc for TracingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if TRACERS.load(Ordering::Relaxed) > 0 {
            return allocate(layout, false);
        }
        heap(layout, false)
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if TRACERS.load(Ordering::Relaxed) > 0 {
            return allocate(layout, true);
        }
        heap(layout, true)
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        if TRACERS.load(Ordering::Relaxed) > 0 && give_back(address, layout) {
            return;
        }
        // SAFETY: the system's allocator gave this address, with this layout.
        unsafe { System.dealloc(address, layout) }
    }

    unsafe fn realloc(&self, address: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if TRACERS.load(Ordering::Relaxed) > 0 && is_traced(address, bytes.max(layout.size())) {
            // SAFETY: the caller's promise: `bytes` is not zero and does not overflow.
            let new = unsafe { self.alloc(Layout::from_size_align_unchecked(bytes, layout.align())) };
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

/// Traces the allocations of the thread that made it, and plans their memory.
pub struct Tracer {
    desk: &'static Desk,
    /// Sites with registered memory, by slot; the newest first.
    directed: Vec<(Site, Vec<Slice>)>,
    /// Whether all of them have their places.
    is_directed: bool,
    /// By table of places. It is never seen through a reference, as others own bytes of it.
    arenas: [Option<MmapRaw>; TABLES],
    /// How many whole runs were not as planned.
    stale_runs: u64,
    /// It stays on its thread.
    _thread: PhantomData<*mut ()>,
}

impl std::fmt::Debug for Tracer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Tracer({} stale runs, {} bytes)", self.stale_runs, self.arena_bytes())
    }
}

impl Tracer {
    /// A tracer of allocations of so many bytes and more, or of [`COUNTED_BYTES`] and more if that
    /// is less; nothing if the process has too many tracers or no [`TracingAllocator`].
    #[must_use]
    pub fn start(threshold: usize) -> Option<Self> {
        let is_free = |desk: &&Desk| !desk.is_taken.swap(true, Ordering::Acquire);
        let (number, desk) = DESKS.iter().enumerate().find(|(_, desk)| is_free(desk))?;
        DESKS_USED.fetch_max(number + 1, Ordering::Relaxed);
        TRACERS.fetch_add(1, Ordering::Relaxed);
        let mut tracer = Self {
            desk,
            directed: Vec::new(),
            is_directed: true,
            arenas: [const { None }; TABLES],
            stale_runs: 0,
            _thread: PhantomData,
        };
        tracer.trace(|trace| *trace = Trace::start(threshold.clamp(1, COUNTED_BYTES)));
        tracer.begin(0, true);
        let probe = std::hint::black_box(Vec::<u8>::with_capacity(COUNTED_BYTES));
        // It says nothing about the runs of a program.
        tracer.end(false);
        tracer.site_of(probe.as_ptr()).map(|_| tracer)
    }

    /// Uses the trace, which the allocator does not meanwhile.
    fn trace<T>(&mut self, work: impl FnOnce(&mut Trace) -> T) -> T {
        let role = ROLE.replace(Role::None);
        // SAFETY: this is the desk's only tracer, on its thread, where the allocator has no role
        // now; `work` is of this module and calls no other method of a tracer.
        let result = work(unsafe { &mut *self.desk.trace.get() });
        ROLE.set(role);
        result
    }

    /// Begins a run, in which sites get the places of this slot. Allocations of the first one are
    /// not counted.
    pub fn begin(&mut self, slot: usize, is_first: bool) {
        self.trace(|trace| trace.begin(slot, is_first));
        ROLE.set(Role::All(self.desk));
    }

    /// Ends a run. What is freed is noted until [`Tracer::plan`]. A run that failed half-way is not
    /// planned for.
    pub fn end(&mut self, is_whole: bool) {
        self.trace(|trace| trace.end(is_whole));
        ROLE.set(Role::Frees(self.desk));
    }

    /// The site that allocated this address in the last run. A value must be there.
    #[must_use]
    pub fn site_of(&mut self, address: *const u8) -> Option<Site> {
        self.trace(|trace| trace.site_of(address.addr()))
    }

    /// Has a site allocate in this memory, which is of its size for each slot: from the next
    /// [`Tracer::plan`] on. Nobody else may write this memory while a value is there, and the
    /// caller must not begin a run in a slot of which somebody still reads the last value.
    ///
    /// # Panics
    ///
    /// If a place is too short, or does not begin at a multiple of 64 bytes.
    pub(crate) fn direct(&mut self, site: Site, places: &[Slice]) {
        let fits = |place: &Slice| {
            place.len() >= site.bytes && place.as_ptr().addr().is_multiple_of(SLOT_ALIGN_BYTES as usize)
        };
        assert!(!places.is_empty() && places.iter().all(fits), "a place has the size of its site");
        self.directed.insert(0, (site, places.to_vec()));
        self.is_directed = false;
    }

    /// After a run whose outputs are gone: plans the memory of the next runs, if this one was not
    /// as planned. A program that always changes is planned less and less often: after the first,
    /// second, fourth, eighth... run that was not as planned.
    ///
    /// A value that lives on in a place keeps it, and the arena around it. The next plan has an
    /// arena of its own.
    pub fn plan(&mut self) {
        ROLE.set(Role::None);
        let places = self.desk.places;
        let Some(is_stale) = self.trace(Trace::outcome) else { return };
        self.stale_runs += u64::from(is_stale);
        let is_due = is_stale && self.stale_runs.is_power_of_two();
        let Some(table) = places.idle_table().filter(|_| is_due || !self.is_directed) else { return };
        self.is_directed = true;
        let directed = std::mem::take(&mut self.directed);
        let is_directed = |site| directed.iter().any(|(directed, _)| *directed == site);
        let room = PLACES_MAX.saturating_sub(directed.iter().map(|(_, slots)| slots.len()).sum());
        let (bytes, offsets) = self.trace(|trace| trace.planned(is_directed, room));
        let slots =
            |places: &[Slice]| places.iter().map(|place| place.as_ptr().expose_provenance()).collect();
        let place = |(site, places): &(Site, Vec<Slice>)| (*site, slots(places));
        let mut assigned: Vec<Assigned> = directed.iter().map(place).collect();
        self.directed = directed;
        // Without memory the buffers stay on the heap.
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0);
        let arena = bytes.and_then(|bytes| MmapMut::map_anon(bytes).ok()).map(MmapRaw::from);
        if let Some(arena) = &arena {
            let start = arena.as_mut_ptr().expose_provenance();
            let place = |&(site, offset): &(Site, u64)| (site, vec![start + offset as usize]);
            assigned.extend(offsets.iter().map(place));
        }
        self.trace(|trace| trace.assign(&assigned, table, places));
        // An old arena is unmapped here, when no place is in it.
        self.arenas[table] = arena;
        self.leave(|other| other != table);
    }

    /// Drops the arenas of some tables, where nothing lives on.
    fn leave(&mut self, is_left: impl Fn(usize) -> bool) {
        let places = self.desk.places;
        for (table, arena) in self.arenas.iter_mut().enumerate() {
            if is_left(table) && places.is_idle(table) {
                places.clear(table);
                *arena = None;
            }
        }
    }

    /// How many allocations of at least [`COUNTED_BYTES`] went to the heap after the first run:
    /// they had no place, or it was in use.
    #[must_use]
    pub fn heap_allocations(&mut self) -> u64 {
        self.trace(|trace| trace.later_misses())
    }

    /// The bytes of the arena, and of earlier ones in which values live on.
    #[must_use]
    pub fn arena_bytes(&self) -> u64 {
        self.arenas.iter().flatten().map(|arena| arena.len() as u64).sum()
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        ROLE.set(Role::None);
        let places = self.desk.places;
        self.leave(|_| true);
        self.trace(|trace| *trace = Trace::new());
        if (0..TABLES).any(|table| !places.is_idle(table)) {
            // Somebody holds a value in a place: its memory stays for ever, and so does the desk.
            let arenas = std::mem::replace(&mut self.arenas, [const { None }; TABLES]);
            std::mem::forget((std::mem::take(&mut self.directed), arenas));
            return;
        }
        TRACERS.fetch_sub(1, Ordering::Relaxed);
        self.desk.is_taken.store(false, Ordering::Release);
    }
}
