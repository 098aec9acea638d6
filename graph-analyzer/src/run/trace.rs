//! What a run allocates, and where the buffers of the next run lie. Nothing here touches memory.
//!
//! A [`Trace`] notes which [`Site`] allocates which address, and when the address is freed. So the
//! next run can have a memory plan for these lifetimes. [`Places`] knows what of the planned memory
//! is in use. It has a table for each plan in whose memory values live.
//!
//! **Invariant:** [`Places::take`] gives no byte that is in use, whatever a run does: a plan is a
//! proposal. An allocation that has no place, or whose place is in use, is a *miss*. After a whole
//! run with misses the [outcome](Trace::outcome) is that the plan is stale.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::plan::{ALIGNMENT_BYTES, Buffer, Effort, MemoryPlan};

#[cfg(test)]
mod tests;

/// Smaller allocations have no place in a plan and are not counted, in bytes.
pub const COUNTED_BYTES: usize = 1024;

/// Entries for which a log has room at first. It is enlarged between runs.
const LOG_ROOM: usize = 1 << 15;

/// Most entries of a log. A run with more gets no plan.
const LOG_MAX: usize = 1 << 20;

/// Most sizes of allocations of a run, a power of two.
const SIZES_MAX: usize = 1 << 11;

/// Most places of a plan, of all slots of all sites.
pub(crate) const PLACES_MAX: usize = 1 << 12;

/// Most plans that have places at a time: the newest, and earlier ones in whose places values live.
pub(crate) const TABLES: usize = 4;

/// Steps of the search for a plan, which take some microseconds each.
const EFFORT_STEPS: u64 = 4_000;

/// Room for sites, a power of two. A site has a place, so that half of it is used at most.
const SITES_ROOM: usize = 2 * PLACES_MAX;

/// The allocations of a run with the same number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// The size.
    pub bytes: usize,
    /// The number among the allocations of this size.
    pub number: u32,
}

const NO_SITE: Site = Site { bytes: 0, number: 0 };

/// A site, and where it allocates: an address for each slot, or one for all slots.
pub(crate) type Assigned = (Site, Vec<usize>);

/// A place, by its first byte. Places of one arena can share bytes.
struct Place {
    start: AtomicUsize,
    /// How many bytes of it are in use. Acquire and release: who takes bytes that were given back
    /// sees what was written there before, and who finds them in use sees the start.
    used: AtomicUsize,
}

/// The places of one plan. They change only while none of them is in use.
struct Table {
    /// In order of the starts; behind the count all are zero.
    ///
    /// Every free of every thread reads the starts, also while they change. An address that is no
    /// place of this table must not be found then. It is not: each start is one of now or before,
    /// and the memory of both is held, so that no other address is equal to it. Memory that comes
    /// back to the heap later does so after the count was released.
    entries: [Place; PLACES_MAX],
    /// Release after the starts are written; acquire before they are read.
    count: AtomicUsize,
    /// The length of the longest place. Relaxed: only the thread that takes uses it.
    longest: AtomicUsize,
}

/// The places of a tracer. One thread takes, and every thread gives back.
pub(crate) struct Places {
    tables: [Table; TABLES],
    /// The table of the newest plan. Relaxed: only the thread that takes uses it.
    newest: AtomicUsize,
}

/// Mistakes that the tests must find.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutant {
    /// A place is given out though it is in use: the trace is trusted after the graph has changed.
    Trusted,
    /// Nothing is traced anew.
    NeverStale,
}

impl Table {
    const fn new() -> Self {
        let entries = [const { Place { start: AtomicUsize::new(0), used: AtomicUsize::new(0) } }; PLACES_MAX];
        Self { entries, count: AtomicUsize::new(0), longest: AtomicUsize::new(0) }
    }

    fn entries(&self) -> &[Place] {
        &self.entries[..self.count.load(Ordering::Acquire)]
    }

    /// The place that begins at this address.
    fn at(&self, address: usize) -> Option<&Place> {
        let entries = self.entries();
        // Nearly all addresses of the heap are on one side of all places.
        if entries.last().is_none_or(|last| address > last.start()) || address < entries[0].start() {
            return None;
        }
        let found = entries.binary_search_by_key(&address, Place::start).ok()?;
        Some(&entries[found])
    }

    /// Whether any of these bytes is in use.
    fn is_in_use(&self, start: usize, bytes: usize) -> bool {
        let (entries, longest) = (self.entries(), self.longest.load(Ordering::Relaxed));
        let first = entries.partition_point(|place| place.start() + longest <= start);
        let near = entries[first..].iter().take_while(|place| place.start() < start + bytes);
        let mut used = near.map(|place| (place.start(), place.used.load(Ordering::Acquire)));
        used.any(|(other, used)| used > 0 && other + used > start)
    }

    fn is_idle(&self) -> bool {
        self.entries().iter().all(|place| place.used.load(Ordering::Acquire) == 0)
    }

    /// Has these places from now on, in order and each once.
    fn replace(&self, starts: &[usize], longest: usize) {
        assert!(self.is_idle() && starts.is_sorted(), "places are replaced in order, while idle");
        self.count.store(0, Ordering::Release);
        self.longest.store(longest, Ordering::Relaxed);
        for (number, place) in self.entries.iter().enumerate() {
            place.start.store(starts.get(number).copied().unwrap_or(0), Ordering::Relaxed);
        }
        self.count.store(starts.len(), Ordering::Release);
    }
}

impl Places {
    pub(crate) const fn new() -> Self {
        Self { tables: [const { Table::new() }; TABLES], newest: AtomicUsize::new(0) }
    }

    /// Whether a place begins at this address.
    pub(crate) fn has(&self, address: usize) -> bool {
        self.tables.iter().any(|table| table.at(address).is_some())
    }

    /// Takes so many bytes, at least one, from the start of a place of the newest plan. False if
    /// any is in use, also by a place of another plan.
    fn take(&self, start: usize, bytes: usize) -> bool {
        let is_in_use = self.tables.iter().any(|table| table.is_in_use(start, bytes));
        let newest = &self.tables[self.newest.load(Ordering::Relaxed)];
        let place = newest.at(start).filter(|_| !is_in_use);
        place.inspect(|place| place.used.store(bytes, Ordering::Release)).is_some()
    }

    /// Gives back what was taken at this address. False if no place begins there.
    ///
    /// Several plans can have this place, and one of them has given it out. The tables of the other
    /// plans may change meanwhile, so that an entry found here becomes another place, which is in
    /// use then. Who sees that it is also sees its start.
    pub(crate) fn give_back(&self, address: usize) -> bool {
        let mut is_place = false;
        for place in self.tables.iter().filter_map(|table| table.at(address)) {
            is_place = true;
            if place.used.load(Ordering::Acquire) > 0 && place.start() == address {
                place.used.store(0, Ordering::Release);
            }
        }
        is_place
    }

    /// Whether no place of this table is in use.
    pub(crate) fn is_idle(&self, table: usize) -> bool {
        self.tables[table].is_idle()
    }

    /// A table for the next plan: that of the newest plan if it is idle, or else another.
    pub(crate) fn idle_table(&self) -> Option<usize> {
        let newest = self.newest.load(Ordering::Relaxed);
        std::iter::once(newest).chain(0..TABLES).find(|&table| self.is_idle(table))
    }

    /// Takes the places of an idle table. Their memory must be held until this returns.
    pub(crate) fn clear(&self, table: usize) {
        self.tables[table].replace(&[], 0);
    }
}

impl Place {
    fn start(&self) -> usize {
        self.start.load(Ordering::Relaxed)
    }
}

/// Entries of a run, as many as there is room for.
struct Log<Entry> {
    entries: Vec<Entry>,
    /// How many had no room.
    left_out: usize,
}

impl<Entry> Log<Entry> {
    const fn new() -> Self {
        Self { entries: Vec::new(), left_out: 0 }
    }

    fn start() -> Self {
        Self { entries: Vec::with_capacity(LOG_ROOM), left_out: 0 }
    }

    /// Begins a run. There is room for as much as happened in the last one.
    fn begin(&mut self) {
        let needed = self.entries.len() + self.left_out;
        self.entries.clear();
        self.entries.reserve_exact(needed.next_power_of_two().min(LOG_MAX));
        self.left_out = 0;
    }

    fn push(&mut self, entry: Entry) {
        if self.entries.len() < self.entries.capacity() {
            self.entries.push(entry);
        } else {
            self.left_out += 1;
        }
    }
}

/// The allocations of a thread in one run, and the sites that have places. Its tables have all
/// their room from [`Trace::start`] on, so that an allocation that is noted allocates nothing.
pub(crate) struct Trace {
    /// By hash: a size, a run, and how many allocations of the size there were in it. What is of an
    /// earlier run is room.
    sizes: Vec<(usize, u64, u32)>,
    size_count: usize,
    /// The number of this run, from one on.
    run: u64,
    /// Addresses, with the site that allocated them, or nothing where they were freed.
    log: Log<(usize, Option<Site>)>,
    /// Addresses with sites that are too small to be counted. No plan needs to know their frees.
    small: Log<(usize, Site)>,
    /// Whether the log has the whole run, but for what was freed after it.
    is_complete: bool,
    /// Whether a run has ended well since the last [`Trace::outcome`].
    has_outcome: bool,
    /// By hash: sites with the first of their starts, and the number of these.
    sites: Vec<(Site, u32, u32)>,
    starts: Vec<usize>,
    slot: usize,
    /// Smaller allocations are not traced.
    threshold: usize,
    misses: u64,
    /// Of all runs after the first.
    later_misses: u64,
    is_first: bool,
    #[cfg(test)]
    mutant: Option<Mutant>,
}

impl Trace {
    /// One without room.
    pub(crate) const fn new() -> Self {
        Self {
            sizes: Vec::new(),
            size_count: 0,
            run: 0,
            log: Log::new(),
            small: Log::new(),
            is_complete: false,
            has_outcome: false,
            sites: Vec::new(),
            starts: Vec::new(),
            slot: 0,
            threshold: 0,
            misses: 0,
            later_misses: 0,
            is_first: false,
            #[cfg(test)]
            mutant: None,
        }
    }

    pub(crate) fn start(threshold: usize) -> Self {
        let (sizes, sites) = (vec![(0, 0, 0); SIZES_MAX], vec![(NO_SITE, 0, 0); SITES_ROOM]);
        Self { sizes, sites, log: Log::start(), small: Log::start(), threshold, ..Self::new() }
    }

    /// Begins a run in which sites get the places of this slot.
    pub(crate) fn begin(&mut self, slot: usize, is_first: bool) {
        self.run += 1;
        self.log.begin();
        self.small.begin();
        (self.size_count, self.misses, self.has_outcome) = (0, 0, false);
        (self.slot, self.is_first) = (slot, is_first);
    }

    /// Ends a run. What a run that failed has allocated says nothing about later ones.
    pub(crate) fn end(&mut self, is_whole: bool) {
        (self.is_complete, self.has_outcome) = (is_whole && self.log.left_out == 0, is_whole);
    }

    /// Once after each run that ended well: whether it was not as planned.
    pub(crate) fn outcome(&mut self) -> Option<bool> {
        #[cfg(test)]
        if self.mutant == Some(Mutant::NeverStale) && !self.is_first {
            return None;
        }
        std::mem::take(&mut self.has_outcome).then_some(self.misses > 0)
    }

    /// The site of an allocation of this size that happens now; nothing if there are too many
    /// sizes.
    pub(crate) fn site(&mut self, bytes: usize) -> Option<Site> {
        let mut at = hash(bytes, 0);
        loop {
            at %= SIZES_MAX;
            let (size, run, count) = &mut self.sizes[at];
            if *run < self.run {
                if self.size_count + 1 >= SIZES_MAX {
                    return None;
                }
                self.size_count += 1;
                (*size, *run, *count) = (bytes, self.run, 0);
            }
            if *size == bytes {
                *count += 1;
                return Some(Site { bytes, number: *count - 1 });
            }
            at += 1;
        }
    }

    /// The place of a site in this run, which is then in use; nothing is a miss. Places have the
    /// alignment of plans.
    pub(crate) fn take(&mut self, site: Site, align: usize, places: &Places) -> Option<usize> {
        let proposed = self.start_of(site).filter(|_| align as u64 <= ALIGNMENT_BYTES);
        let start = proposed.filter(|&start| places.take(start, site.bytes));
        #[cfg(test)]
        let start = start.or(proposed.filter(|_| self.mutant == Some(Mutant::Trusted)));
        if start.is_none() {
            self.miss(site.bytes);
        }
        start
    }

    /// Counts an allocation of this size as a miss.
    pub(crate) fn miss(&mut self, bytes: usize) {
        if bytes >= COUNTED_BYTES {
            self.misses += 1;
            self.later_misses += u64::from(!self.is_first);
        }
    }

    /// The misses of all runs after the first.
    pub(crate) fn later_misses(&self) -> u64 {
        self.later_misses
    }

    /// Whether allocations of this size are traced.
    pub(crate) fn sees(&self, bytes: usize) -> bool {
        bytes >= self.threshold
    }

    fn start_of(&self, site: Site) -> Option<usize> {
        let (known, first, slots) = self.sites[self.room_of(site)];
        (known == site).then(|| self.starts[first as usize + self.slot % slots as usize])
    }

    /// Where a site is, or could be.
    fn room_of(&self, site: Site) -> usize {
        let mut at = hash(site.bytes, site.number) % SITES_ROOM;
        while self.sites[at].0 != site && self.sites[at].0 != NO_SITE {
            at = (at + 1) % SITES_ROOM;
        }
        at
    }

    /// Notes that a site has allocated this address.
    pub(crate) fn allocated(&mut self, address: usize, site: Site) {
        if site.bytes >= COUNTED_BYTES {
            self.log.push((address, Some(site)));
        } else {
            self.small.push((address, site));
        }
    }

    /// Notes that so many bytes at this address are freed.
    pub(crate) fn freed(&mut self, address: usize, bytes: usize) {
        if bytes >= COUNTED_BYTES {
            self.log.push((address, None));
        }
    }

    /// The site that allocated this address, which is in use.
    pub(crate) fn site_of(&self, address: usize) -> Option<Site> {
        let mut counted = self.log.entries.iter().rev().filter(|(start, _)| *start == address);
        // What was freed there is not what is there now.
        let counted = counted.next().and_then(|&(_, site)| site);
        let mut small = self.small.entries.iter().rev().filter(|(start, _)| *start == address);
        counted.or_else(|| small.next().map(|&(_, site)| site))
    }

    /// What the run allocated and freed until now, with its lifetimes. What lives on belongs to no
    /// plan, such as a buffer that a runtime keeps for later runs. Nothing if not all was noted.
    fn lifetimes(&self) -> Vec<(Site, Buffer)> {
        if !self.is_complete {
            return Vec::new();
        }
        let (mut live, mut ended) = (HashMap::new(), Vec::new());
        for (moment, &(address, site)) in (0_u64..).zip(&self.log.entries) {
            match site {
                Some(site) => drop(live.insert(address, (site, moment))),
                None => ended.extend(live.remove(&address).map(|(site, start)| {
                    (site, Buffer { lifetime: start..moment, bytes: site.bytes as u64 })
                })),
            }
        }
        ended
    }

    /// A plan for what the run allocated until now, but for some sites: for the largest buffers if
    /// there are more than `room`. Returns the size of the arena, and sites with their offsets.
    pub(crate) fn planned(
        &self,
        is_elsewhere: impl Fn(Site) -> bool,
        room: usize,
    ) -> (u64, Vec<(Site, u64)>) {
        let mut found = self.lifetimes();
        found.retain(|(site, _)| !is_elsewhere(*site));
        if found.len() > room {
            found.sort_by_key(|(site, _)| Reverse(site.bytes));
            found.truncate(room);
        }
        let (sites, buffers): (Vec<Site>, Vec<Buffer>) = found.into_iter().unzip();
        let plan = MemoryPlan::search(&buffers, Effort::steps(EFFORT_STEPS));
        let checked = plan.check(&buffers).expect("a planner makes plans");
        (checked.bytes, sites.into_iter().zip(plan.offsets).collect())
    }

    /// Gives sites the places of a table that is idle, and no other site has a place then. A site
    /// that comes twice has the places with which it comes first. What finds no room gets no place.
    pub(crate) fn assign(&mut self, assigned: &[Assigned], table: usize, places: &Places) {
        self.sites.fill((NO_SITE, 0, 0));
        self.starts.clear();
        let mut longest = 0;
        for (site, starts) in assigned {
            let at = self.room_of(*site);
            if self.sites[at].0 == *site || self.starts.len() + starts.len() > PLACES_MAX {
                continue;
            }
            self.sites[at] = (*site, self.starts.len() as u32, starts.len() as u32);
            self.starts.extend(starts);
            longest = longest.max(site.bytes);
        }
        let mut starts = self.starts.clone();
        starts.sort_unstable();
        starts.dedup();
        places.tables[table].replace(&starts, longest);
        places.newest.store(table, Ordering::Relaxed);
    }
}

fn hash(bytes: usize, number: u32) -> usize {
    let mixed = (bytes as u64 ^ u64::from(number) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize
}
