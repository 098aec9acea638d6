//! The cost of a schedule: latency, bytes over links, bytes combined (α, β, γ), and the overlap of
//! chunks.
//!
//! [`Work`] counts what the busiest rank does for one chunk of every block, and the critical path
//! through that chunk. [`Work::of`] counts it in a schedule. [`Work::formula`] has it in closed
//! form for all algorithms that work by puts, as their modules state it, and for some that map.
//! [`CostModel::time`] makes a time of it:
//!
//! ```text
//! T = rounds·α + k·messages·o + (path + (k-1)·moved)·c·β + (path + (k-1)·passed)·c·γ/3
//! ```
//!
//! for `k` chunks of `c` bytes in each block: the first chunk takes the critical path, and the
//! others follow at the pace of the busiest rank. A pass over memory costs, for each place that it
//! reads or writes, a third of the cost of combining two sources. So mapped schedules, in which
//! nothing else moves, are priced by the same measure. Memory is counted as registered: copies to
//! and from shared windows cost nothing, nor do copies of a rank's own input.
//!
//! Links between hosts ([`Platform`]) have an α, β and o of their own. Traffic over them is counted
//! separately ([`InterHost`]), and its time is added. The ranks of a host share its wire, so bytes
//! are those of the busiest host.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use pleach_vocabulary::{Collective, Fabric};

use crate::generate::{Access, Algorithm, GenerateError, family, generate};
use crate::hosts::HostMap;
use crate::wiring::Wiring;
use crate::{BlockId, Schedule};

use links::BlockBytes;

pub use fit::{Sample, fit};

mod count;
mod fit;
mod formulae;
mod links;

/// Most bytes that travel in a signal itself, no slower than a signal without data: as many as the
/// signal slots of `pleach-transport` carry.
pub const INLINE_BYTES_MAX: usize = 48;

/// The work for one chunk of every block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// The number of blocks of the whole data.
    pub blocks: u32,
    /// Signals one after the other on the longest path.
    pub rounds: u32,
    /// Signals that one rank sends, at most, with and without data.
    pub messages: u32,
    /// Chunks put by or to one rank, at most.
    pub moved: u32,
    /// Chunks combined by one rank, at most: a reduction of `k` sources is `k - 1`. Priced by the
    /// places that the pass reads and writes.
    pub reduced: u32,
    /// Chunks read and written by one rank in passes over memory, at most.
    pub passed: u32,
    /// Chunks put one after the other on the longest path, if that is more than any rank moves.
    pub moved_on_path: u32,
    /// Chunks read and written one after the other on the longest path, if that is more than any
    /// rank reads and writes.
    pub passed_on_path: u32,
    /// The work between hosts; rounds, messages and moved chunks above are those inside hosts.
    pub inter_host: InterHost,
}

/// The work between hosts for one chunk of every block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct InterHost {
    /// Signals one after the other on the longest path.
    pub rounds: u32,
    /// Signals that one rank sends, at most.
    pub messages: u32,
    /// Chunks put by or to the ranks of one host, at most.
    pub moved: u32,
    /// Chunks put one after the other on the longest path, if that is more than any host moves.
    pub moved_on_path: u32,
}

impl Work {
    /// Counts the work of a schedule of ranks that are all on one host.
    #[must_use]
    pub fn of(schedule: &Schedule) -> Self {
        Self::between(schedule, &HostMap::one(schedule.ranks()))
    }

    /// Counts the work of a schedule of ranks on these hosts.
    ///
    /// # Panics
    ///
    /// When the map has fewer ranks than the schedule.
    #[must_use]
    pub fn between(schedule: &Schedule, hosts: &HostMap) -> Self {
        count::schedule(schedule, hosts).0
    }

    /// The same work between ranks that are all on hosts of their own.
    #[must_use]
    pub fn all_inter_host(mut self) -> Self {
        let Self { rounds, messages, moved, moved_on_path, .. } = self;
        self.inter_host = InterHost { rounds, messages, moved, moved_on_path };
        (self.rounds, self.messages, self.moved, self.moved_on_path) = (0, 0, 0, 0);
        self
    }
}

/// The speeds of links and processors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CostModel {
    /// From sending a signal to its being seen, in seconds (α).
    pub latency_s: f64,
    /// The sender's overhead of a signal, in seconds (o).
    pub message_s: f64,
    /// Bytes a rank puts in a second, and receives at the same time (1/β).
    pub bytes_per_s: f64,
    /// Bytes of each source a rank combines in a second, two sources to one result (1/γ).
    pub reduce_bytes_per_s: f64,
}

impl CostModel {
    /// Ranks of one host, before any measurement there. The values were fitted to the sizes at
    /// which one algorithm overtakes another: above 2 KiB the mapped direct schedule is the
    /// fastest. Two ranks had a processor each. Three and four ranks shared two processors; their
    /// times are tenfold, as a round is a turn of all of them.
    pub const SHARED_MEMORY: Self =
        Self { latency_s: 300e-9, message_s: 120e-9, bytes_per_s: 22.4e9, reduce_bytes_per_s: 5.6e9 };
    /// Ranks of one host connected by TCP over its loopback interface, before any measurement. The
    /// sender does the receiver's work too, so messages cost more than waiting for them.
    pub const LOOPBACK: Self =
        Self { latency_s: 4e-6, message_s: 6e-6, bytes_per_s: 4e9, reduce_bytes_per_s: 10e9 };
    /// Ranks connected by RDMA at 100 Gb/s. The values are a guess of the best that such links can
    /// do: no NIC has been measured, and devices made of software say nothing about NICs. `pleach
    /// tune` fits a model to the NICs of the machine.
    pub const VERBS: Self =
        Self { latency_s: 2e-6, message_s: 300e-9, bytes_per_s: 12e9, reduce_bytes_per_s: 8e9 };
    /// Ranks connected by TCP, before any measurement.
    pub const TCP: Self =
        Self { latency_s: 20e-6, message_s: 4e-6, bytes_per_s: 1.2e9, reduce_bytes_per_s: 4e9 };

    /// The same links where `ranks` ranks take turns on each processor. A signal is seen after a
    /// turn of all of them, and each of them has that part of the memory's speed.
    ///
    /// The values are fitted to all-reduces of 4, 8, 16 and 32 ranks on two processors: a round
    /// takes 2.5, 7, 22 and 58 us, and each message of a rank 0.4 us for each rank of a processor.
    #[must_use]
    pub fn of_ranks_in_turn(self, ranks: u32) -> Self {
        const ROUND_S: f64 = 0.9e-6;
        const MESSAGE_S: f64 = 0.4e-6;
        if ranks <= 1 {
            return self;
        }
        let ranks = f64::from(ranks);
        Self {
            latency_s: self.latency_s.max(ROUND_S * ranks.powf(1.5)),
            message_s: self.message_s.max(MESSAGE_S * ranks),
            bytes_per_s: self.bytes_per_s / ranks,
            reduce_bytes_per_s: self.reduce_bytes_per_s / ranks,
        }
    }

    /// The time for `bytes` bytes of the whole in chunks of at most `chunk_bytes`, in seconds.
    #[must_use]
    pub fn time(&self, work: &Work, bytes: u64, chunk_bytes: u64) -> f64 {
        let chunks = Chunks::of(work, bytes, chunk_bytes);
        let Work { rounds, messages, moved, moved_on_path, .. } = *work;
        self.links(&chunks, rounds, messages, chunks.pipelined(moved_on_path, moved))
            + chunks.pipelined(work.passed_on_path, work.passed) / 3.0 / self.reduce_bytes_per_s
    }

    /// The time on links: rounds, messages of each chunk, bytes one after the other.
    fn links(&self, chunks: &Chunks, rounds: u32, messages: u32, bytes: f64) -> f64 {
        // Bytes that fit in the signal's own line come with the signal.
        let moving = if chunks.bytes <= INLINE_BYTES_MAX as f64 { 0.0 } else { bytes / self.bytes_per_s };
        f64::from(rounds) * self.latency_s + chunks.count * f64::from(messages) * self.message_s + moving
    }

    /// The time of an algorithm: by its formula if it has one, else by counting.
    ///
    /// # Errors
    ///
    /// When there is no such schedule.
    pub fn predict(
        &self,
        collective: Collective,
        algorithm: &Algorithm,
        ranks: u32,
        access: Access,
        bytes: u64,
        chunk_bytes: u64,
    ) -> Result<f64, GenerateError> {
        let work = match Work::formula(collective, algorithm, ranks, access) {
            Some(work) => work,
            None => Work::of(&generate(collective, algorithm, ranks, access)?),
        };
        Ok(self.time(&work, bytes, chunk_bytes))
    }
}

/// The chunks of a block.
struct Chunks {
    count: f64,
    /// The bytes of one chunk.
    bytes: f64,
}

impl Chunks {
    fn of(work: &Work, bytes: u64, chunk_bytes: u64) -> Self {
        let block = bytes as f64 / f64::from(work.blocks);
        let count = (block / chunk_bytes.max(1) as f64).ceil().max(1.0);
        Self { count, bytes: block / count }
    }

    /// Bytes one after the other. The first chunk takes `path`, the others follow at the pace of
    /// `each`.
    fn pipelined(&self, path: u32, each: u32) -> f64 {
        (f64::from(path) + (self.count - 1.0) * f64::from(each)) * self.bytes
    }
}

/// Ranks on hosts, and the speeds of the links inside and between the hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Platform {
    /// The host of every rank.
    pub hosts: HostMap,
    /// Whether ranks of one host map each other's memory.
    pub access: Access,
    /// The links inside a host, and its processors.
    pub near: CostModel,
    /// The links between hosts.
    pub far: CostModel,
    /// The links between ranks one by one, if they are known. Then they alone decide which
    /// algorithm is quickest.
    pub wiring: Option<Arc<Wiring>>,
    /// A cache of counted work, shared by clones of this platform.
    pub(crate) counted: WorkCache,
}

impl Platform {
    /// These hosts, before any measurement. If no memory is mapped, all links are taken to be
    /// alike.
    #[must_use]
    pub fn new(hosts: HostMap, access: Access) -> Self {
        let (near, far) = match access {
            Access::Put => (CostModel::TCP, CostModel::TCP),
            Access::Mapped => (CostModel::SHARED_MEMORY, CostModel::TCP),
        };
        Self { hosts, access, near, far, wiring: None, counted: WorkCache::default() }
    }

    /// Ranks of these hosts over a fabric, before any measurement.
    #[must_use]
    pub fn over(fabric: Fabric, hosts: HostMap) -> Self {
        match fabric {
            Fabric::Shm | Fabric::Hybrid => Self::new(hosts, Access::Mapped),
            Fabric::HybridVerbs => Self { far: CostModel::VERBS, ..Self::new(hosts, Access::Mapped) },
            Fabric::Tcp => Self::new(hosts, Access::Put),
            Fabric::Verbs => {
                let model = CostModel::VERBS;
                Self { near: model, far: model, ..Self::new(hosts, Access::Put) }
            }
        }
    }

    /// All ranks on one host.
    #[must_use]
    pub fn one_host(ranks: u32, access: Access, model: CostModel) -> Self {
        Self { near: model, far: model, ..Self::new(HostMap::one(ranks), access) }
    }

    /// Ranks joined by these links and nothing else; they reach each other by puts.
    #[must_use]
    pub fn wired(wiring: Arc<Wiring>) -> Self {
        let ranks = wiring.topology().ranks();
        Self { wiring: Some(wiring), ..Self::one_host(ranks, Access::Put, CostModel::TCP) }
    }

    /// Time of a schedule over the links one by one, in seconds; `None` if the links are not known.
    #[must_use]
    pub fn time_over_links(
        &self,
        algorithm: &Algorithm,
        schedule: &Schedule,
        bytes: u64,
        chunk_bytes: u64,
    ) -> Option<f64> {
        let wiring = self.wiring.as_ref()?;
        let mut weights = vec![0u64; schedule.collective.parts(schedule.ranks()) as usize];
        for block in &schedule.blocks {
            weights[block.part as usize] += u64::from(block.weight);
        }
        let part = bytes as f64 / weights.len().max(1) as f64;
        let packed = match algorithm {
            Algorithm::Packed(Some(trees)) => Some(trees.pacing().chunks(bytes)),
            _ => None,
        };
        let sizes = |block: BlockId| {
            let block = schedule.blocks[block as usize];
            let bytes = part * f64::from(block.weight) / weights[block.part as usize] as f64;
            let chunks =
                packed.map_or_else(|| (bytes / chunk_bytes.max(1) as f64).ceil(), |chunks| chunks as f64);
            BlockBytes { block: bytes, chunk: bytes / chunks.max(1.0) }
        };
        let packed = wiring.carried_out_by(schedule.collective, algorithm);
        let routes = packed.as_ref().map_or(wiring.routes(), |packed| &packed.routes);
        Some(links::seconds(routes, schedule, &sizes))
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.hosts.ranks()
    }

    /// The forms in which an algorithm can be carried out here: the mapped form only if all ranks
    /// that it maps are on one host.
    #[must_use]
    pub fn forms(&self, algorithm: &Algorithm) -> &'static [Access] {
        let stays_inside = match algorithm {
            Algorithm::Hierarchical(Some(hosts)) => hosts.is_within(&self.hosts),
            Algorithm::Hierarchical(None) => true,
            _ => self.hosts.hosts() == 1,
        };
        if stays_inside && self.access == Access::Mapped {
            &[Access::Put, Access::Mapped]
        } else {
            &[Access::Put]
        }
    }

    /// The time for `bytes` bytes of the whole in chunks of at most `chunk_bytes`, in seconds.
    #[must_use]
    pub fn time(&self, work: &Work, bytes: u64, chunk_bytes: u64) -> f64 {
        let chunks = Chunks::of(work, bytes, chunk_bytes);
        let InterHost { rounds, messages, moved, moved_on_path } = work.inter_host;
        let inter_host = chunks.pipelined(moved_on_path, moved);
        self.near.time(work, bytes, chunk_bytes) + self.far.links(&chunks, rounds, messages, inter_host)
    }
}

// A cache of counted work. Work is the same for any number of bytes, and counting it generates the
// schedule, or the lanes of one block of it.

/// Most works that are kept; others are counted again each time. A collective has some tens of
/// works, and as many again for each root that a caller names.
const CACHE_ENTRIES_MAX: usize = 4096;

/// The key of cached work.
type WorkKey = (Collective, Algorithm, Access, HostMap);

/// The work that a platform and its clones have counted, and in how many steps. The cache changes
/// times only, not results.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkCache(Arc<Mutex<HashMap<WorkKey, (Work, usize)>>>);

#[cfg(test)]
impl WorkCache {
    /// How many steps were looked at for all that is kept.
    pub(crate) fn steps(&self) -> usize {
        self.0.lock().expect("nobody panicked").values().map(|(_, steps)| steps).sum()
    }
}

impl PartialEq for WorkCache {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Platform {
    /// [`Work::between`] these hosts for the schedule of an algorithm. Of a family only one block
    /// is made.
    ///
    /// # Errors
    ///
    /// When the algorithm does not fit the collective or the ranks.
    pub(crate) fn counted(
        &self,
        collective: Collective,
        algorithm: &Algorithm,
        access: Access,
    ) -> Result<Work, GenerateError> {
        // A thread that panics leaves nothing incomplete in the cache.
        let kept = || self.counted.0.lock().unwrap_or_else(PoisonError::into_inner);
        let made = (collective, algorithm.clone(), access, self.hosts.clone());
        if let Some((work, _)) = kept().get(&made) {
            return Ok(*work);
        }
        let ranks = self.ranks();
        let by_symmetry = family(collective, algorithm, ranks, access)?
            .and_then(|family| count::family(&family, &self.hosts));
        let (work, steps) = match by_symmetry {
            Some(counted) => counted,
            None => count::schedule(&generate(collective, algorithm, ranks, access)?, &self.hosts),
        };
        tracing::trace!("{collective} by {algorithm}, {access}: counted in {steps} steps");
        let mut kept = kept();
        if kept.len() < CACHE_ENTRIES_MAX {
            kept.insert(made, (work, steps));
        }
        Ok(work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLLECTIVES: [Collective; 10] = [
        Collective::AllReduce,
        Collective::Reduce { root: 1 },
        Collective::Broadcast { root: 1 },
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::Gather { root: 1 },
        Collective::Scatter { root: 1 },
        Collective::AllToAll,
        Collective::Barrier,
        Collective::SendRecv { from: 1, to: 0 },
    ];

    fn algorithms(collective: Collective, ranks: u32) -> Vec<Algorithm> {
        crate::select::candidates(collective, ranks)
    }

    #[test]
    fn formulae_say_exactly_what_is_counted_in_the_schedules() {
        let mut compared = 0;
        for ranks in (2..=33).chain([47, 48, 49, 63, 64]) {
            for collective in COLLECTIVES {
                for algorithm in algorithms(collective, ranks) {
                    for access in [Access::Put, Access::Mapped] {
                        let Some(formula) = Work::formula(collective, &algorithm, ranks, access) else {
                            assert_eq!(access, Access::Mapped, "{collective} {algorithm} {ranks}");
                            continue;
                        };
                        let schedule = generate(collective, &algorithm, ranks, access).expect("a candidate");
                        let counted = Work::of(&schedule);
                        assert_eq!(formula, counted, "{collective} {algorithm} {access} {ranks}");
                        compared += 1;
                    }
                }
            }
        }
        assert!(compared > 1800, "{compared}");
    }

    #[test]
    fn a_mapped_direct_all_reduce_passes_over_the_data_once() {
        let schedule =
            generate(Collective::AllReduce, &Algorithm::Direct, 4, Access::Mapped).expect("it fits");
        let work = Work::of(&schedule);
        // Four places read and four written, of a block that is a quarter of the whole.
        assert_eq!((work.moved, work.passed, work.blocks, work.reduced, work.rounds), (0, 8, 4, 3, 2));
    }

    #[test]
    fn a_pipeline_through_a_chain_takes_what_the_textbook_says() {
        let model = CostModel { latency_s: 0.0, message_s: 0.0, bytes_per_s: 1e9, reduce_bytes_per_s: 1e9 };
        let (ranks, bytes, chunk) = (5, 1 << 20, 1 << 16);
        let time = model
            .predict(Collective::Broadcast { root: 0 }, &Algorithm::Chain, ranks, Access::Put, bytes, chunk)
            .expect("it fits");
        let chunks = (bytes / chunk) as f64;
        let expected = (f64::from(ranks) - 2.0 + chunks) * (bytes as f64 / chunks) / 1e9;
        assert!((time - expected).abs() < 1e-12, "{time} {expected}");
    }

    #[test]
    fn formula_and_schedule_predict_the_same_time() {
        for (bytes, chunk) in [(8, 1 << 18), (1 << 20, 1 << 18), (64 << 20, 1 << 18), (12_345_678, 4096)] {
            for algorithm in algorithms(Collective::AllReduce, 12) {
                let schedule =
                    generate(Collective::AllReduce, &algorithm, 12, Access::Put).expect("a candidate");
                let counted = CostModel::TCP.time(&Work::of(&schedule), bytes, chunk);
                let predicted = CostModel::TCP
                    .predict(Collective::AllReduce, &algorithm, 12, Access::Put, bytes, chunk)
                    .expect("a candidate");
                assert!((predicted - counted).abs() <= 1e-12 * counted, "{algorithm}: {predicted} {counted}");
            }
        }
    }
}

#[cfg(test)]
mod counted_tests {
    use super::*;

    #[test]
    fn work_is_counted_once_for_all_clones_and_again_for_other_hosts() {
        let platform = Platform::new(HostMap::one(6), Access::Mapped);
        let count = |platform: &Platform, access| {
            platform.counted(Collective::AllReduce, &Algorithm::Direct, access).expect("it fits")
        };
        let kept = || platform.counted.0.lock().expect("nobody panicked").len();
        let mapped = count(&platform, Access::Mapped);
        assert_eq!((count(&platform.clone(), Access::Mapped), kept()), (mapped, 1));
        assert_ne!(count(&platform, Access::Put), mapped);
        assert_eq!(kept(), 2);
        let mut apart = platform.clone();
        apart.hosts = "2x3".parse().expect("two hosts");
        let made = generate(Collective::AllReduce, &Algorithm::Direct, 6, Access::Put).expect("it fits");
        assert_eq!(count(&apart, Access::Put), Work::between(&made, &apart.hosts));
        assert_ne!(count(&apart, Access::Put), count(&platform, Access::Put));
        assert_eq!(kept(), 3);
    }
}
