//! Selection of an algorithm: by the cost model, or by name.
//!
//! [`select`] prices every algorithm that carries out the collective, and keeps the prices: a
//! [`Selection`] prints as its table. Of an algorithm that is named only its own forms are priced,
//! and of a form that is named nothing is; who wants the others too asks
//! [`Selection::beside_others`].

use std::fmt;

use pleach_vocabulary::{Collective, Rank, UnknownName};

use crate::Schedule;
use crate::cost::{Platform, Work};
use crate::generate::{Access, Algorithm, GenerateError, GridShape, Variant, check, generate};
use crate::wiring::{Wiring, WiringError};

/// Chunk size that prices are made for, in bytes, unless another size is given: it fits a core's
/// cache.
pub const CHUNK_BYTES: u64 = 256 << 10;

/// Above this rank count no schedule is made only for its price. Algorithms without a formula are
/// left out.
const COUNTED_RANKS_MAX: u32 = 256;

/// The choice and its candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// The collective.
    pub collective: Collective,
    /// The number of ranks.
    pub ranks: u32,
    /// The size of the whole, in bytes.
    pub bytes: u64,
    /// The algorithm to take.
    pub algorithm: Algorithm,
    /// How peers are to be reached.
    pub access: Access,
    /// What was priced, the best first: all candidates, or the forms of the algorithm that was
    /// named.
    pub table: Vec<Candidate>,
}

impl Selection {
    /// The predicted time of the algorithm, in seconds, if it has a price.
    #[must_use]
    pub fn predicted_s(&self) -> Option<f64> {
        self.table.iter().find(|row| row.algorithm == self.algorithm).map(|row| row.seconds)
    }

    /// The same choice, with the prices of all candidates on the platform that it was made for.
    ///
    /// # Errors
    ///
    /// When there is no schedule of a candidate after all.
    pub fn beside_others(self, platform: &Platform) -> Result<Self, SelectError> {
        let Self { collective, bytes, ref algorithm, .. } = self;
        if self.table.iter().any(|row| row.algorithm != *algorithm) {
            return Ok(self);
        }
        let mut algorithms = vec![algorithm.clone()];
        let others = candidates_on(collective, bytes, platform).into_iter();
        algorithms.extend(others.filter(|other| other != algorithm));
        Ok(Self { table: price(collective, bytes, platform, &algorithms)?, ..self })
    }
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Its form.
    pub access: Access,
    /// The predicted time, in seconds.
    pub seconds: f64,
}

/// Why no algorithm can be taken.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// No algorithm for this collective has this name.
    #[error(transparent)]
    Name(#[from] UnknownName),
    /// The algorithm cannot be carried out by these ranks.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The variant maps peers that cannot be mapped.
    #[error("{algorithm} cannot map peers here, which are on other hosts or over sockets; use 'put'")]
    NotMapped {
        /// The algorithm.
        algorithm: Algorithm,
    },
    /// The window is zero, or larger than the scratch allows.
    #[error("a window of {window} chunks; give 1 to {WINDOW_MAX}")]
    Window {
        /// The window.
        window: u32,
    },
    /// The chunks are so small that they cost more than they carry, or larger than the scratch
    /// allows.
    #[error("chunks of {bytes} bytes; give {CHUNK_BYTES_MIN} to {CHUNK_BYTES}")]
    Chunk {
        /// The number of bytes.
        bytes: u64,
    },
    /// The parts are longer than the algorithm carries.
    #[error(
        "{algorithm} carries parts of at most {most} bytes between {ranks} ranks, not {bytes}; choose another algorithm"
    )]
    TooLong {
        /// The algorithm.
        algorithm: Algorithm,
        /// Bytes of a part.
        bytes: u64,
        /// The limit.
        most: u64,
        /// The number of ranks.
        ranks: u32,
    },
    /// The links have no packing.
    #[error(transparent)]
    Wiring(#[from] WiringError),
    /// The links do not join ranks that the algorithm moves data between.
    #[error(
        "{algorithm} is not possible here: it sends from '{from}' (rank {from_rank}) to '{to}' (rank {to_rank}), which no link joins; take packed"
    )]
    NotJoined {
        /// The algorithm.
        algorithm: Algorithm,
        /// The name of the sender.
        from: String,
        /// The rank of the sender.
        from_rank: Rank,
        /// The name of the receiver.
        to: String,
        /// The rank of the receiver.
        to_rank: Rank,
    },
}

/// Least size of chunks that a variant may name, in bytes; [`CHUNK_BYTES`] is the largest.
pub const CHUNK_BYTES_MIN: u64 = 1 << 10;

/// Most chunks of a block under way at once that a variant may name.
pub const WINDOW_MAX: u32 = 64;

/// Chooses an algorithm for `bytes` bytes of the whole. The platform decides which forms are
/// possible: where peers are mapped, puts work too.
///
/// # Errors
///
/// When there is no schedule for that many ranks, or the collective names a rank that does not
/// exist.
pub fn select(collective: Collective, bytes: u64, platform: &Platform) -> Result<Selection, SelectError> {
    let table = price(collective, bytes, platform, &candidates_on(collective, bytes, platform))?;
    Ok(Selection {
        collective,
        ranks: platform.ranks(),
        bytes,
        algorithm: table[0].algorithm.clone(),
        access: table[0].access,
        table,
    })
}

/// Takes the algorithm of this name (`auto`: chooses), in the quickest form. `hierarchical` without
/// hosts takes those of the platform.
///
/// # Errors
///
/// When there is no such algorithm for the collective, or it does not fit the rank count.
pub fn select_named(
    name: &str,
    collective: Collective,
    bytes: u64,
    platform: &Platform,
) -> Result<Selection, SelectError> {
    if name == "auto" {
        return select(collective, bytes, platform);
    }
    select_algorithm(&Algorithm::named(name, collective)?, collective, bytes, platform)
}

/// Takes this algorithm, in the quickest form. `hierarchical` without hosts takes those of the
/// platform. `packed` without trees takes the packing for the platform's links.
///
/// # Errors
///
/// When the algorithm does not carry out the collective, or does not fit the ranks or their links.
pub fn select_algorithm(
    algorithm: &Algorithm,
    collective: Collective,
    bytes: u64,
    platform: &Platform,
) -> Result<Selection, SelectError> {
    let named = named_on(algorithm, collective, bytes, platform)?;
    let table = price(collective, bytes, platform, std::slice::from_ref(&named))?;
    // Without a price, take the form that moves the least data.
    let best = platform.forms(&named).last().copied().unwrap_or(Access::Put);
    let access = table.first().map_or(best, |row| row.access);
    Ok(Selection { collective, ranks: platform.ranks(), bytes, algorithm: named, access, table })
}

/// The algorithm of this name, which the platform completes.
fn named_on(
    algorithm: &Algorithm,
    collective: Collective,
    bytes: u64,
    platform: &Platform,
) -> Result<Algorithm, SelectError> {
    let ranks = platform.ranks();
    if !algorithm.carries_out(collective) {
        let (algorithm, known) = (algorithm.clone(), Algorithm::names(collective));
        return Err(GenerateError::WrongCollective { algorithm, collective, known }.into());
    }
    let named = match (algorithm, &platform.wiring) {
        (Algorithm::Hierarchical(None), _) => Algorithm::Hierarchical(Some(platform.hosts.clone())),
        (Algorithm::Packed(None), Some(wiring)) if ranks > 1 => {
            let packed = packed_on(collective, bytes, wiring)?;
            price(collective, bytes, platform, &packed)?.swap_remove(0).algorithm
        }
        (named, _) => named.clone(),
    };
    check(collective, &named, ranks)?;
    expect_short(collective, &named, ranks, bytes)?;
    expect_joined(collective, &named, platform)?;
    Ok(named)
}

/// Takes exactly this variant, as far as it names a form. Nothing is priced but the forms to choose
/// from, where there are several; these prices hold for the usual window and chunks only.
///
/// # Errors
///
/// When the variant cannot be carried out on this platform.
pub fn select_variant(
    variant: &Variant,
    collective: Collective,
    bytes: u64,
    platform: &Platform,
) -> Result<Selection, SelectError> {
    if let Some(window) = variant.window.filter(|window| !(1..=WINDOW_MAX).contains(window)) {
        return Err(SelectError::Window { window });
    }
    if let Some(bytes) = variant.chunk_bytes.filter(|bytes| !(CHUNK_BYTES_MIN..=CHUNK_BYTES).contains(bytes))
    {
        return Err(SelectError::Chunk { bytes });
    }
    let algorithm = named_on(&variant.algorithm, collective, bytes, platform)?;
    let forms = platform.forms(&algorithm);
    // Over known links there are prices of puts alone.
    let is_wired = platform.wiring.is_some();
    let access = match (variant.access, forms) {
        (Some(access), _) if !forms.contains(&access) => return Err(SelectError::NotMapped { algorithm }),
        (Some(access), _) => access,
        (None, _) if is_wired => Access::Put,
        (None, &[only]) => only,
        (None, _) => return select_algorithm(&algorithm, collective, bytes, platform),
    };
    let (ranks, table) = (platform.ranks(), Vec::new());
    Ok(Selection { collective, ranks, bytes, algorithm, access, table })
}

/// The algorithms that carry out a collective on these hosts. Where links are known, also two
/// packings: the one with the most throughput, and the one that should be the fastest for `bytes`.
fn candidates_on(collective: Collective, bytes: u64, platform: &Platform) -> Vec<Algorithm> {
    let mut all = candidates(collective, platform.ranks());
    // On one host, or without two ranks on a host, other algorithms do the same.
    let (hosts, ranks) = (platform.hosts.hosts(), platform.ranks());
    let hierarchical = Algorithm::Hierarchical(Some(platform.hosts.clone()));
    if (2..ranks).contains(&hosts) && hierarchical.carries_out(collective) {
        all.push(hierarchical);
    }
    if let Some(wiring) = &platform.wiring
        && Algorithm::Packed(None).carries_out(collective)
        && ranks > 1
    {
        match packed_on(collective, bytes, wiring) {
            Ok(packed) => all.splice(..0, packed).for_each(drop),
            Err(error) => tracing::warn!("nothing is packed for {collective}: {error}"),
        }
    }
    all
}

/// The packed algorithms for these links: the optimum, and the one that moves `bytes` faster.
fn packed_on(collective: Collective, bytes: u64, wiring: &Wiring) -> Result<Vec<Algorithm>, WiringError> {
    let optimum = wiring.packed(collective)?;
    let flat = wiring.packed_for(collective, bytes)?;
    let mut all = vec![optimum.trees.clone()];
    if flat.trees != optimum.trees {
        all.push(flat.trees.clone());
    }
    Ok(all.into_iter().map(|trees| Algorithm::Packed(Some(trees))).collect())
}

/// Checks that the parts are not longer than the algorithm carries.
fn expect_short(
    collective: Collective,
    algorithm: &Algorithm,
    ranks: u32,
    bytes: u64,
) -> Result<(), SelectError> {
    let bytes = bytes / u64::from(collective.parts(ranks).max(1));
    match algorithm.part_bytes_max(collective, ranks) {
        Some(most) if bytes > most => {
            Err(SelectError::TooLong { algorithm: algorithm.clone(), bytes, most, ranks })
        }
        _ => Ok(()),
    }
}

/// Checks, if links are known, that they join all ranks that the algorithm moves data between.
fn expect_joined(
    collective: Collective,
    algorithm: &Algorithm,
    platform: &Platform,
) -> Result<(), SelectError> {
    let Some(wiring) = &platform.wiring else { return Ok(()) };
    let schedule = generate(collective, algorithm, platform.ranks(), Access::Put)?;
    match unjoined_pair(algorithm, &schedule, wiring) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

fn unjoined_pair(algorithm: &Algorithm, schedule: &Schedule, wiring: &Wiring) -> Option<SelectError> {
    // A packing chooses its own links.
    if matches!(algorithm, Algorithm::Packed(_)) {
        return None;
    }
    let (from_rank, to_rank) = wiring.missing_link(schedule)?;
    let [from, to] = wiring.unjoined_pair(from_rank, to_rank)?.map(str::to_owned);
    Some(SelectError::NotJoined { algorithm: algorithm.clone(), from, from_rank, to, to_rank })
}

/// The algorithms that carry out a collective, with the grids without holes that are most like a
/// square. In a grid with holes some ranks send more than in other algorithms: it is for who names
/// it. If prices are equal, the first one is taken.
#[must_use]
pub fn candidates(collective: Collective, ranks: u32) -> Vec<Algorithm> {
    let mut all = vec![
        Algorithm::RecursiveDoubling,
        Algorithm::Exchange,
        Algorithm::Eager,
        Algorithm::EagerTree,
        Algorithm::Direct,
        Algorithm::HalvingDoubling,
        Algorithm::Ring,
        Algorithm::DoubleTree,
        Algorithm::Chain,
    ];
    if let Some(rows) = (2..=ranks.isqrt()).rev().find(|&rows| ranks.is_multiple_of(rows)) {
        let shape = GridShape::from(vec![rows, ranks / rows]);
        all.push(Algorithm::Grid(shape.clone()));
        all.push(Algorithm::GridStaged(shape));
    }
    all.retain(|algorithm| algorithm.carries_out(collective));
    all
}

/// Over known links, the factor on the price of an algorithm that is not packed for them. The
/// prices assume chunks that do not wait for each other. This is nearly true of packed trees; of
/// other algorithms some chunks wait. For example, two ranks exchange 256 MiB by recursive doubling
/// in 1.6 times the price, and three ranks get a broadcast by the double tree in 1.1 times the
/// price.
const UNPACED: f64 = 1.05;

/// Prices of the algorithms that fit, the best first. Fails when none does.
fn price(
    collective: Collective,
    bytes: u64,
    platform: &Platform,
    algorithms: &[Algorithm],
) -> Result<Vec<Candidate>, SelectError> {
    let ranks = platform.ranks();
    let mut table = Vec::new();
    let mut refused = None;
    for algorithm in algorithms {
        let fits = check(collective, algorithm, ranks).map_err(SelectError::from);
        if let Err(error) = fits.and_then(|_| expect_short(collective, algorithm, ranks, bytes)) {
            refused = Some(error);
            continue;
        }
        if let Some(wiring) = &platform.wiring {
            let schedule = generate(collective, algorithm, ranks, Access::Put)?;
            if let Some(error) = unjoined_pair(algorithm, &schedule, wiring) {
                refused = Some(error);
            } else if let Some(seconds) = platform.time_over_links(algorithm, &schedule, bytes, CHUNK_BYTES) {
                table.push(Candidate { algorithm: algorithm.clone(), access: Access::Put, seconds });
            }
            continue;
        }
        for &access in platform.forms(algorithm) {
            let Some(work) = work(collective, algorithm, access, platform) else { continue };
            let seconds = platform.time(&work?, bytes, CHUNK_BYTES);
            table.push(Candidate { algorithm: algorithm.clone(), access, seconds });
        }
    }
    let is_packed = |row: &Candidate| matches!(row.algorithm, Algorithm::Packed(_));
    let is_paced = |row: &Candidate| platform.wiring.is_none() || is_packed(row);
    let weighed = |row: &Candidate| if is_paced(row) { row.seconds } else { row.seconds * UNPACED };
    table.sort_by(|one, other| weighed(one).total_cmp(&weighed(other)));
    // Keep only the quickest packing.
    let mut packings = 0;
    table.retain(|row| {
        packings += u32::from(is_packed(row));
        packings < 2 || !is_packed(row)
    });
    match refused {
        Some(error) if table.is_empty() => Err(error),
        _ => Ok(table),
    }
}

/// The work by the formula if it knows the links, else by counting. `None` if counting would take
/// too long.
fn work(
    collective: Collective,
    algorithm: &Algorithm,
    access: Access,
    platform: &Platform,
) -> Option<Result<Work, GenerateError>> {
    let ranks = platform.ranks();
    let is_uniform = platform.hosts.hosts() == 1 || platform.near == platform.far;
    // Of many ranks those schedules are not taken that have formulas and are no families: each rank
    // would make and prove the whole of them.
    let is_left_out = ranks > COUNTED_RANKS_MAX
        && (access == Access::Mapped
            || *algorithm == Algorithm::HalvingDoubling
                && collective != Collective::AllReduce
                && !ranks.is_power_of_two());
    let formula = || Work::formula(collective, algorithm, ranks, access).filter(|_| !is_left_out);
    if is_uniform && let Some(work) = formula() {
        return Some(Ok(work));
    }
    if ranks <= COUNTED_RANKS_MAX {
        return Some(platform.counted(collective, algorithm, access));
    }
    // Priced as if all the data went between hosts.
    formula().filter(|_| !is_uniform).map(|work| Ok(work.all_inter_host()))
}

impl fmt::Display for Selection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "{}, {} ranks, {} bytes:", self.collective, self.ranks, self.bytes)?;
        let mut is_shown = false;
        for row in &self.table {
            let chosen = row.algorithm == self.algorithm && row.access == self.access;
            let name = row.algorithm.to_string();
            let (mark, micros) = (if chosen { '>' } else { ' ' }, row.seconds * 1e6);
            writeln!(formatter, "{mark} {name:<20} {:<6} {micros:>14.2} us", row.access.to_string())?;
            is_shown |= chosen;
        }
        if !is_shown {
            writeln!(formatter, "> {:<20} {:<6} not priced", self.algorithm.to_string(), self.access)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::CostModel;
    use crate::generate::ALL_TO_ALL_RANKS_MAX;
    use crate::hosts::HostMap;

    fn chosen(collective: Collective, ranks: u32, bytes: u64, access: Access) -> (Algorithm, Access) {
        let model = match access {
            Access::Mapped => CostModel::SHARED_MEMORY,
            Access::Put => CostModel::TCP,
        };
        let platform = Platform::one_host(ranks, access, model);
        let selection = select(collective, bytes, &platform).expect("a choice");
        (selection.algorithm, selection.access)
    }

    #[test]
    fn few_bytes_go_in_one_round_and_many_on_one_host_directly_in_place() {
        for ranks in [2, 3, 4, 8] {
            let few = chosen(Collective::AllReduce, ranks, 8, Access::Mapped);
            let many = chosen(Collective::AllReduce, ranks, 64 << 20, Access::Mapped);
            assert_eq!(many, (Algorithm::Direct, Access::Mapped), "{ranks} ranks");
            // With two ranks, both algorithms are the same.
            let one_round = if ranks == 2 { Algorithm::RecursiveDoubling } else { Algorithm::Exchange };
            assert_eq!(few, (one_round, Access::Put), "{ranks} ranks");
        }
    }

    /// The algorithm that was the quickest in measurements on two processors, or within a tenth of
    /// it.
    #[test]
    fn what_is_chosen_on_one_host_is_what_was_measured_to_be_quickest() {
        use Algorithm::{Direct, Exchange, RecursiveDoubling};
        let all_reduce = |ranks, bytes, access, model: &CostModel| {
            let platform = Platform::one_host(ranks, access, *model);
            let selection = select(Collective::AllReduce, bytes, &platform).expect("a choice");
            (selection.algorithm, selection.access)
        };
        let shm = [
            (2, 8, RecursiveDoubling),
            (2, 2047, RecursiveDoubling),
            (2, 4095, Direct),
            (2, 16 << 20, Direct),
            // Of these, two to sixteen take turns on a processor.
            (3, 64, Exchange),
            (3, 16 << 10, Direct),
            (4, 2047, Exchange),
            (4, 16 << 10, Direct),
            (4, 16 << 20, Direct),
            (16, 64, Exchange),
            (16, 1 << 20, Direct),
            (32, 64, Exchange),
            (32, 1 << 20, Direct),
        ];
        for (ranks, bytes, algorithm) in shm {
            let access = if algorithm == Direct { Access::Mapped } else { Access::Put };
            let model = CostModel::SHARED_MEMORY.of_ranks_in_turn(u32::div_ceil(ranks, 2));
            let selection = all_reduce(ranks, bytes, Access::Mapped, &model);
            assert_eq!(selection, (algorithm, access), "shm, {ranks} ranks, {bytes} bytes");
        }
        let tcp = [
            (2, 8, RecursiveDoubling),
            (2, 64 << 10, RecursiveDoubling),
            (2, 1 << 20, Direct),
            (3, 8, Exchange),
            (3, 4096, Exchange),
            (4, 8, RecursiveDoubling),
            (4, 16 << 10, RecursiveDoubling),
            (4, 1 << 20, Direct),
            (6, 16 << 10, RecursiveDoubling),
        ];
        for (ranks, bytes, algorithm) in tcp {
            let selection = all_reduce(ranks, bytes, Access::Put, &CostModel::LOOPBACK);
            assert_eq!(selection, (algorithm, Access::Put), "loopback, {ranks} ranks, {bytes} bytes");
        }
    }

    #[test]
    fn many_bytes_over_links_go_by_an_algorithm_that_sends_no_more_than_it_must() {
        for ranks in [4, 6, 8, 16] {
            let (algorithm, access) = chosen(Collective::AllReduce, ranks, 256 << 20, Access::Put);
            assert_eq!(access, Access::Put);
            let work =
                Work::formula(Collective::AllReduce, &algorithm, ranks, Access::Put).expect("a formula");
            assert_eq!(work.moved * ranks, 2 * (ranks - 1) * work.blocks, "{algorithm}");
        }
    }

    #[test]
    fn a_name_overrides_the_prices_and_they_can_still_be_had() {
        let platform = Platform::one_host(6, Access::Mapped, CostModel::SHARED_MEMORY);
        let by_name = |name| select_named(name, Collective::AllReduce, 8, &platform);
        let alone = by_name("grid:2x3").expect("it fits");
        assert_eq!(alone.table.len(), 2, "only its own forms are priced: {alone}");
        let selection = alone.clone().beside_others(&platform).expect("they fit");
        assert_eq!((&selection.algorithm, selection.access), (&alone.algorithm, alone.access));
        assert_eq!(selection.algorithm, Algorithm::Grid(vec![2, 3].into()));
        assert!(selection.table.len() > 8);
        let printed = selection.to_string();
        assert_eq!(printed.lines().filter(|line| line.starts_with("> grid:2x3")).count(), 1, "{printed}");
        assert!(printed.contains("ring"));
        assert!(matches!(by_name("grid:2x2"), Err(SelectError::Generate(_))));
        assert!(matches!(by_name("chain"), Err(SelectError::Name(_))));
        assert_eq!(
            by_name("auto").expect("a choice").algorithm,
            chosen(Collective::AllReduce, 6, 8, Access::Mapped).0
        );
    }

    /// Worlds of one host and of several, with links alike and not.
    fn worlds() -> Vec<Platform> {
        let arranged = "1x2 1x3 1x8 1x12 1x17 1x32 2x1 2x4 4x4 3x5 6x6 9x1 3+2 5+3+8 0,1,0,1 0,1,2,0,1,2";
        let mut worlds = Vec::new();
        for hosts in arranged.split(' ') {
            let hosts: HostMap = hosts.parse().expect("a map");
            for access in [Access::Put, Access::Mapped] {
                let platform = Platform::new(hosts.clone(), access);
                let near = platform.near.of_ranks_in_turn(hosts.ranks().div_ceil(2));
                worlds.extend([platform.clone(), Platform { near, far: CostModel::VERBS, ..platform }]);
            }
        }
        worlds
    }

    const SIZES: [u64; 6] = [0, 8, 1000, 64 << 10, 1_000_000, 1 << 30];

    /// The table by whole schedules, without shortcuts.
    fn priced_whole(collective: Collective, bytes: u64, platform: &Platform) -> Vec<Candidate> {
        let ranks = platform.ranks();
        let is_uniform = platform.hosts.hosts() == 1 || platform.near == platform.far;
        let mut table = Vec::new();
        for algorithm in candidates_on(collective, bytes, platform) {
            let fits = check(collective, &algorithm, ranks).map_err(SelectError::from);
            if fits.and_then(|_| expect_short(collective, &algorithm, ranks, bytes)).is_err() {
                continue;
            }
            for &access in platform.forms(&algorithm) {
                let formula = Work::formula(collective, &algorithm, ranks, Access::Put);
                let work = match formula.filter(|_| is_uniform && access == Access::Put) {
                    Some(work) => work,
                    None => {
                        let whole = generate(collective, &algorithm, ranks, access).expect("it fits");
                        Work::between(&whole, &platform.hosts)
                    }
                };
                let seconds = platform.time(&work, bytes, CHUNK_BYTES);
                table.push(Candidate { algorithm: algorithm.clone(), access, seconds });
            }
        }
        table.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
        table
    }

    #[test]
    fn what_is_chosen_and_all_prices_are_those_of_whole_schedules() {
        let mut compared = 0;
        for platform in worlds() {
            for name in Collective::NAMES {
                let collective = Collective::from_name(name).expect("a known name");
                for bytes in SIZES {
                    let selection = select(collective, bytes, &platform).expect("a choice");
                    let table = priced_whole(collective, bytes, &platform);
                    assert_eq!(selection.table, table, "{} {name} {bytes}", platform.hosts);
                    compared += table.len();
                }
            }
        }
        assert!(compared > 15_000, "{compared}");
    }

    #[test]
    fn a_named_algorithm_takes_the_form_that_it_takes_beside_all_others() {
        let mut compared = 0;
        for platform in worlds() {
            for collective in [Collective::AllReduce, Collective::Broadcast { root: 1 }, Collective::AllToAll]
            {
                for (bytes, algorithm) in SIZES.into_iter().flat_map(|bytes| {
                    candidates_on(collective, bytes, &platform)
                        .into_iter()
                        .map(move |algorithm| (bytes, algorithm))
                }) {
                    let variant = Variant::from(algorithm.clone());
                    let Ok(alone) = select_variant(&variant, collective, bytes, &platform) else { continue };
                    let beside = select(collective, bytes, &platform).expect("a choice").table;
                    let quickest = beside.iter().find(|row| row.algorithm == algorithm).expect("its row");
                    assert_eq!(
                        (&alone.algorithm, alone.access),
                        (&algorithm, quickest.access),
                        "{}",
                        platform.hosts
                    );
                    assert!(alone.table.iter().all(|row| row.algorithm == algorithm), "{alone}");
                    let together = alone.beside_others(&platform).expect("they fit").table;
                    let prices =
                        |table: &[Candidate]| -> Vec<f64> { table.iter().map(|row| row.seconds).collect() };
                    assert_eq!(prices(&together), prices(&beside));
                    compared += 1;
                }
            }
        }
        assert!(compared > 4000, "{compared}");
    }

    #[test]
    fn prices_of_many_ranks_walk_few_steps() {
        let named = |algorithm: Algorithm, platform: &Platform| {
            select_variant(&algorithm.into(), Collective::AllReduce, 64 << 10, platform).expect("it fits");
            platform.counted.steps()
        };
        let world = |hosts: &str, access| Platform::new(hosts.parse().expect("a map"), access);
        // There is one form, and no price.
        assert_eq!(named(Algorithm::Ring, &world("1x64", Access::Put)), 0);
        assert_eq!(named(Algorithm::HalvingDoubling, &world("8x8", Access::Mapped)), 0);
        // Of two forms one has a formula; of the other one block is counted, not 64.
        assert_eq!(named(Algorithm::Ring, &world("1x64", Access::Mapped)), 505);
        for (hosts, most) in
            [("1x16", 704), ("1x63", 2555), ("1x64", 2976), ("1x256", 12_128), ("8x8", 18_426)]
        {
            let platform = world(hosts, Access::Mapped);
            select(Collective::AllReduce, 64 << 10, &platform).expect("a choice");
            let steps = platform.counted.steps();
            assert!(steps <= most, "{hosts}: {steps} steps");
        }
    }

    #[test]
    fn every_collective_has_a_choice_for_any_rank_count() {
        let platform = |ranks| Platform::one_host(ranks, Access::Put, CostModel::TCP);
        for ranks in (1..=9).chain([1024, 2048]) {
            for name in Collective::NAMES {
                let collective = Collective::from_name(name).expect("a known name");
                let is_too_large = collective == Collective::AllToAll && ranks > ALL_TO_ALL_RANKS_MAX;
                if (ranks == 1 && name == "send-recv") || is_too_large {
                    assert!(select(collective, 8, &platform(ranks)).is_err());
                    continue;
                }
                let selection = select(collective, 1 << 20, &platform(ranks)).expect("a choice");
                let made = generate(collective, &selection.algorithm, ranks.min(9), selection.access);
                assert!(ranks > 9 || made.is_ok(), "{name} {ranks}");
            }
        }
    }

    #[test]
    fn hosts_of_several_ranks_take_the_schedule_that_sends_each_byte_between_them_once() {
        let hosts: HostMap = "2x4".parse().expect("a map");
        let platform = Platform::new(hosts.clone(), Access::Mapped);
        let hierarchical = Algorithm::Hierarchical(Some(hosts.clone()));
        let across = |collective, algorithm: &Algorithm, access| {
            let made = generate(collective, algorithm, 8, access).expect("it fits");
            let work = Work::between(&made, &hosts);
            f64::from(work.inter_host.moved) / f64::from(work.blocks)
        };
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::ReduceScatter] {
            let selection = select(collective, 64 << 20, &platform).expect("a choice");
            let least = across(collective, &hierarchical, Access::Mapped);
            let sent = across(collective, &selection.algorithm, selection.access);
            assert!(
                sent <= least,
                "{collective} by {}: {sent} of the data, not {least}",
                selection.algorithm
            );
            assert!(
                selection.table.iter().all(|row| row.access == Access::Put || row.algorithm == hierarchical),
                "nothing else may map: {:?}",
                selection.table
            );
        }
        let selection = select(Collective::AllReduce, 64 << 20, &platform).expect("a choice");
        assert_eq!((selection.algorithm, selection.access), (hierarchical.clone(), Access::Mapped));
        let named = select_named("hierarchical", Collective::Barrier, 0, &platform).expect("it fits");
        assert_eq!(named.algorithm, hierarchical, "without hosts it takes those that there are");
        // Hosts that join what is apart may be named, but not mapped.
        let named = select_named("hierarchical:1x8", Collective::AllReduce, 1 << 20, &platform);
        assert_eq!(named.expect("it fits").access, Access::Put);
        let unfit = select_named("hierarchical:2x3", Collective::AllReduce, 1 << 20, &platform);
        assert!(
            matches!(unfit, Err(SelectError::Generate(GenerateError::HostsDoNotFit { .. }))),
            "{unfit:?}"
        );
    }

    #[test]
    fn worlds_too_large_to_count_still_have_a_choice() {
        let platform = Platform::new("64x8".parse().expect("a map"), Access::Mapped);
        for name in Collective::NAMES {
            let collective = Collective::from_name(name).expect("a known name");
            if collective == Collective::AllToAll {
                assert!(platform.ranks() > ALL_TO_ALL_RANKS_MAX);
                assert!(select(collective, 1 << 20, &platform).is_err());
                continue;
            }
            let selection = select(collective, 1 << 20, &platform).expect("a choice");
            assert_eq!(selection.access, Access::Put);
        }
    }
}
