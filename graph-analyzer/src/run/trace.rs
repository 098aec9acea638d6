//! What a run allocates, and where the buffers of the next run lie. Nothing here touches memory.
//!
//! A [`Trace`] notes which [`Site`] allocates which address, and when the address is freed. So the
//! next run can have a memory plan for these lifetimes. [`Places`] knows what of the planned memory
//! is in use.
//!
//! **Invariant:** [`Places::take`] gives no byte that is in use, whatever a run does: a plan is a
//! proposal. An allocation that has no place, or whose place is in use, is a *miss*; after a run
//! with misses the trace is [stale](Trace::is_stale), and the next plan follows the new one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::plan::{ALIGNMENT_BYTES, Buffer, Effort, MemoryPlan};

#[cfg(test)]
mod tests;

/// Smaller allocations have no place in a plan and are not counted, in bytes.
pub const COUNTED_BYTES: usize = 1024;

/// Most allocations and frees of a run that are noted. A run with more gets no plan.
const LOG_MAX: usize = 1 << 15;

/// Most sizes of allocations of a run, a power of two.
const SIZES_MAX: usize = 1 << 11;

/// Most places, of all slots of all sites.
const PLACES_MAX: usize = 1 << 12;

/// Steps of the search for a plan, which take some microseconds each.
const EFFORT_STEPS: u64 = 4_000;

/// Room for sites, a power of two; half of it is used at most.
const SITES_ROOM: usize = 1 << 13;

/// The allocations of a run with the same number and size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    /// The size.
    pub bytes: usize,
    /// The number among the allocations of this size.
    pub number: u32,
}

const NO_SITE: Site = Site { bytes: 0, number: 0 };

/// Where a site allocates: an address for each slot, or one for all slots.
pub(crate) struct Assigned {
    pub(crate) site: Site,
    pub(crate) starts: Vec<usize>,
}

/// A place, by its first byte. Places of one arena can share bytes.
struct Place {
    start: AtomicUsize,
    /// How many bytes of it are in use. Acquire and release: who takes bytes that were given back
    /// sees what was written there before.
    used: AtomicUsize,
}

/// The places of a tracer. One thread takes, and every thread gives back.
///
/// Starts are relaxed: they are written before an address is given out, and who gives the address
/// back got it by a synchronization. They change only while no place is in use.
pub(crate) struct Places {
    /// In order of the starts.
    entries: [Place; PLACES_MAX],
    count: AtomicUsize,
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

impl Places {
    pub(crate) const fn new() -> Self {
        let entries = [const { Place { start: AtomicUsize::new(0), used: AtomicUsize::new(0) } }; PLACES_MAX];
        Self { entries, count: AtomicUsize::new(0) }
    }

    fn entries(&self) -> &[Place] {
        &self.entries[..self.count.load(Ordering::Relaxed)]
    }

    /// The place that begins at this address.
    fn at(&self, address: usize) -> Option<&Place> {
        let entries = self.entries();
        let start = |place: &Place| place.start.load(Ordering::Relaxed);
        // Nearly all addresses of the heap are on one side of all places.
        if entries.last().is_none_or(|last| address > start(last)) || address < start(&entries[0]) {
            return None;
        }
        let found = entries.binary_search_by_key(&address, start).ok()?;
        Some(&entries[found])
    }

    /// Whether a place begins at this address.
    pub(crate) fn has(&self, address: usize) -> bool {
        self.at(address).is_some()
    }

    /// Takes so many bytes, at least one, from the start of a place. False if any is in use.
    fn take(&self, start: usize, bytes: usize) -> bool {
        let in_use = |place: &Place| {
            let used = place.used.load(Ordering::Acquire);
            used > 0 && place.start.load(Ordering::Relaxed) + used > start
        };
        let below =
            self.entries().partition_point(|place| place.start.load(Ordering::Relaxed) < start + bytes);
        let is_in_use = self.entries()[..below].iter().any(in_use);
        let place = self.at(start).filter(|_| !is_in_use);
        place.inspect(|place| place.used.store(bytes, Ordering::Relaxed)).is_some()
    }

    /// Gives back what was taken at this address. False if no place begins there.
    pub(crate) fn give_back(&self, address: usize) -> bool {
        self.at(address).inspect(|place| place.used.store(0, Ordering::Release)).is_some()
    }

    /// Whether nothing is in use.
    pub(crate) fn are_idle(&self) -> bool {
        self.entries().iter().all(|place| place.used.load(Ordering::Acquire) == 0)
    }

    /// Has these places from now on, in order and each once, while nothing is in use. The memory of
    /// the old ones must be held until this returns.
    fn replace(&self, starts: &[usize]) {
        assert!(self.are_idle() && starts.is_sorted(), "places are replaced in order, while idle");
        for (place, &start) in self.entries.iter().zip(starts) {
            place.start.store(start, Ordering::Relaxed);
        }
        self.count.store(starts.len(), Ordering::Relaxed);
    }
}

/// Where the buffers of a run lie in one arena.
pub(crate) struct Planned {
    pub(crate) bytes: u64,
    /// Sites with their offsets.
    pub(crate) offsets: Vec<(Site, u64)>,
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
    log: Vec<(usize, Option<Site>)>,
    is_complete: bool,
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
            log: Vec::new(),
            is_complete: false,
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
        Self { sizes, sites, log: Vec::with_capacity(LOG_MAX), threshold, ..Self::new() }
    }

    /// Begins a run in which sites get the places of this slot.
    pub(crate) fn begin(&mut self, slot: usize, is_first: bool) {
        self.run += 1;
        self.log.clear();
        (self.size_count, self.misses, self.is_complete) = (0, 0, true);
        (self.slot, self.is_first) = (slot, is_first);
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
        self.note(address, Some(site));
    }

    /// Notes that this address is freed.
    pub(crate) fn freed(&mut self, address: usize) {
        self.note(address, None);
    }

    fn note(&mut self, address: usize, site: Option<Site>) {
        if self.log.len() < LOG_MAX {
            self.log.push((address, site));
        } else {
            self.is_complete = false;
        }
    }

    /// The site that allocated this address last.
    pub(crate) fn site_of(&self, address: usize) -> Option<Site> {
        self.log.iter().rev().find_map(|(start, site)| site.filter(|_| *start == address))
    }

    /// Whether the run was not as planned.
    pub(crate) fn is_stale(&self) -> bool {
        #[cfg(test)]
        if self.mutant == Some(Mutant::NeverStale) && !self.is_first {
            return false;
        }
        self.misses > 0
    }

    /// What the run allocated and freed until now, with its lifetimes. What lives on belongs to no
    /// plan, such as weights that a runtime packs at first use. Nothing if not all was noted.
    fn lifetimes(&self) -> Vec<(Site, Buffer)> {
        if !self.is_complete {
            return Vec::new();
        }
        let (mut live, mut ended) = (HashMap::new(), Vec::new());
        for (moment, &(address, site)) in (0_u64..).zip(&self.log) {
            match site {
                Some(site) => drop(live.insert(address, (site, moment))),
                None => ended.extend(live.remove(&address).map(|(site, start)| {
                    (site, Buffer { lifetime: start..moment, bytes: site.bytes as u64 })
                })),
            }
        }
        ended.retain(|(site, _)| site.bytes >= COUNTED_BYTES);
        ended
    }

    /// A plan for what the run allocated until now, but for some sites. Its misses are dealt with.
    pub(crate) fn planned(&mut self, is_elsewhere: impl Fn(Site) -> bool) -> Planned {
        self.misses = 0;
        let found = self.lifetimes().into_iter().filter(|(site, _)| !is_elsewhere(*site));
        let (sites, buffers): (Vec<Site>, Vec<Buffer>) = found.unzip();
        let plan = MemoryPlan::search(&buffers, Effort::steps(EFFORT_STEPS));
        let checked = plan.check(&buffers).expect("a planner makes plans");
        Planned { bytes: checked.bytes, offsets: sites.into_iter().zip(plan.offsets).collect() }
    }

    /// Gives sites places, and takes all others from them, while no place is in use. The first of
    /// equal sites counts. False if there is not room for all: then no site has a place.
    pub(crate) fn assign(&mut self, assigned: &[Assigned], places: &Places) -> bool {
        self.sites.fill((NO_SITE, 0, 0));
        self.starts.clear();
        let mut site_count = 0;
        for Assigned { site, starts } in assigned {
            let at = self.room_of(*site);
            if self.sites[at].0 == *site {
                continue;
            }
            site_count += 1;
            if self.starts.len() + starts.len() > PLACES_MAX || site_count > SITES_ROOM / 2 {
                self.sites.fill((NO_SITE, 0, 0));
                places.replace(&[]);
                return false;
            }
            self.sites[at] = (*site, self.starts.len() as u32, starts.len() as u32);
            self.starts.extend(starts);
        }
        let mut starts = self.starts.clone();
        starts.sort_unstable();
        starts.dedup();
        places.replace(&starts);
        true
    }
}

fn hash(bytes: usize, number: u32) -> usize {
    let mixed = (bytes as u64 ^ u64::from(number) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 32) as usize
}
