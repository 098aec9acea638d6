//! From measurements to a table: the variants to measure, and the rows that follow from the times.
//! This module is pure: the caller runs the variants in a live group, all ranks the same ones, and
//! supplies the times.

use pleach_vocabulary::Collective;

use super::chunks::ChunkSearch;
use super::{TuningNote, TuningRow, Variant};
use crate::cost::{CostModel, Platform, Sample, Work, fit};
use crate::generate::{Access, Algorithm, generate};
use crate::select::{CHUNK_BYTES, SelectError, select};

/// A variant that a model finds this many times slower than the best is left out: models are wrong,
/// but not by as much.
const PRUNE_FACTOR: f64 = 12.0;

/// From this number of bytes on, wide windows are tried too.
const WINDOW_BYTES: u64 = 1 << 20;

/// Where the search for the best chunks begins: shorter ones are mostly signals.
const CHUNK_BYTES_LEAST: u64 = 16 << 10;

/// The wide window.
const WINDOW: u32 = 16;

/// The variant of the next smaller size stays if it takes at most this many times as long as the
/// fastest: a smaller difference is chance.
const KEEP_FACTOR: f64 = 1.03;

/// Above this rank count schedules are not made to fit a model.
const COUNTED_RANKS_MAX: u32 = 256;

/// How long a variant took.
#[derive(Clone, Debug, PartialEq)]
pub struct VariantTime {
    /// The variant.
    pub variant: Variant,
    /// For one call, in seconds.
    pub seconds: f64,
}

/// The measurements of one size.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The collective.
    pub collective: Collective,
    /// The size, as [`whole_bytes`](super::whole_bytes) counts.
    pub bytes: u64,
    /// The variants that were measured, the fastest first.
    pub timed: Vec<VariantTime>,
}

/// The variants to measure for a size, the quickest by the model first. The same on all ranks of
/// the platform.
///
/// # Errors
///
/// When there is no schedule for that many ranks.
pub fn variants(
    collective: Collective,
    bytes: u64,
    platform: &Platform,
) -> Result<Vec<Variant>, SelectError> {
    let table = select(collective, priced_bytes(collective, bytes, platform.ranks()), platform)?.table;
    let best = table.first().map_or(0.0, |row| row.seconds);
    let mut variants = Vec::new();
    for row in table.into_iter().filter(|row| row.seconds <= best * PRUNE_FACTOR) {
        let variant = Variant { access: Some(row.access), ..row.algorithm.into() };
        let wide = Variant { window: Some(WINDOW), ..variant.clone() };
        variants.push(variant);
        if bytes >= WINDOW_BYTES {
            variants.push(wide);
        }
    }
    Ok(variants)
}

/// The times that the platform's models predict for a size, as if they had been measured.
///
/// # Errors
///
/// When there is no schedule for that many ranks.
pub fn predicted(collective: Collective, bytes: u64, platform: &Platform) -> Result<Measured, SelectError> {
    let selection = select(collective, priced_bytes(collective, bytes, platform.ranks()), platform)?;
    let timed = selection.table.into_iter().map(|row| VariantTime {
        variant: Variant { access: Some(row.access), ..row.algorithm.into() },
        seconds: row.seconds,
    });
    Ok(Measured { collective, bytes, timed: timed.collect() })
}

/// The rows of a collective, from measurements of rising sizes. A row begins half way between its
/// size and the size before.
#[must_use]
pub fn rows(measured: &[Measured]) -> Vec<TuningRow> {
    let mut rows: Vec<TuningRow> = Vec::new();
    let mut before = 0;
    for Measured { collective, bytes, timed } in measured {
        let from_bytes = if rows.is_empty() { 0 } else { between(before, *bytes) };
        before = *bytes;
        let Some(best) = timed.first() else { continue };
        let stays = rows.last().and_then(|row| timed.iter().find(|timed| timed.variant == row.variant));
        if stays.is_some_and(|timed| timed.seconds <= best.seconds * KEEP_FACTOR) {
            continue;
        }
        let next = timed.get(1).map(|next| (next.variant.clone(), next.seconds));
        let note = TuningNote { bytes: *bytes, seconds: best.seconds, next };
        rows.push(TuningRow {
            collective: *collective,
            from_bytes,
            variant: best.variant.clone(),
            note: Some(note),
        });
    }
    rows
}

/// The power of two that is nearest to the geometric middle.
fn between(smaller: u64, larger: u64) -> u64 {
    let middle = (u128::from(smaller) * u128::from(larger)).isqrt() as u64;
    middle.next_power_of_two().min(larger)
}

/// The models that come nearest to the measurements, inside a host and between hosts, and their
/// error: half of the measurements are within this factor. A parameter that no measurement depends
/// on stays as the platform has it.
#[must_use]
pub fn models(measured: &[Measured], platform: &Platform) -> (CostModel, CostModel, f64) {
    let mut samples = Vec::new();
    for Measured { collective, bytes, timed } in measured {
        for VariantTime { variant, seconds } in timed.iter().filter(|timed| is_plain(&timed.variant)) {
            if let Some(work) = work(*collective, variant, platform) {
                let bytes = priced_bytes(*collective, *bytes, platform.ranks());
                samples.push(Sample { work, bytes, chunk_bytes: CHUNK_BYTES, seconds: *seconds });
            }
        }
    }
    fit(&samples, platform)
}

/// Whether the variant has the window and the chunks that prices are made for.
fn is_plain(variant: &Variant) -> bool {
    variant.window.is_none() && variant.chunk_bytes.is_none()
}

/// A search for the best chunk size of a variant, if calls of `bytes` are long enough for many
/// chunks. `None` also for packed trees: the links decide the number of their chunks.
#[must_use]
pub fn chunk_search(variant: &Variant, bytes: u64) -> Option<ChunkSearch> {
    let is_cut = bytes >= WINDOW_BYTES && !matches!(variant.algorithm, Algorithm::Packed(_));
    is_cut.then(|| ChunkSearch::new(CHUNK_BYTES_LEAST, CHUNK_BYTES))
}

/// Prices count the blocks of all ranks, where tables count those of one rank.
fn priced_bytes(collective: Collective, bytes: u64, ranks: u32) -> u64 {
    if collective == Collective::AllToAll { bytes.saturating_mul(ranks.into()) } else { bytes }
}

fn work(collective: Collective, variant: &Variant, platform: &Platform) -> Option<Work> {
    let (ranks, access) = (platform.ranks(), variant.access.unwrap_or(Access::Put));
    if ranks > COUNTED_RANKS_MAX {
        return Work::formula(collective, &variant.algorithm, ranks, access);
    }
    let schedule = generate(collective, &variant.algorithm, ranks, access).ok()?;
    Some(Work::between(&schedule, &platform.hosts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hosts::HostMap;

    fn timed(algorithm: Algorithm, seconds: f64) -> VariantTime {
        VariantTime { variant: Variant { access: Some(Access::Put), ..algorithm.into() }, seconds }
    }

    #[test]
    fn a_way_begins_where_it_overtakes_and_chance_does_not_end_it() {
        use Algorithm::{Direct, Exchange, Ring};
        let size = |bytes, timed: &[VariantTime]| Measured {
            collective: Collective::AllReduce,
            bytes,
            timed: timed.to_vec(),
        };
        let rows = rows(&[
            size(8, &[timed(Exchange, 1e-6), timed(Direct, 2e-6)]),
            size(32, &[timed(Direct, 1.00e-6), timed(Exchange, 1.02e-6)]),
            size(128, &[timed(Direct, 1e-6), timed(Exchange, 2e-6)]),
            size(512, &[timed(Ring, 1e-6), timed(Direct, 1.01e-6)]),
            size(2048, &[timed(Ring, 1e-6)]),
        ]);
        let brief: Vec<_> = rows.iter().map(|row| (row.from_bytes, row.variant.algorithm.clone())).collect();
        assert_eq!(brief, [(0, Exchange), (64, Direct), (1024, Ring)]);
        assert_eq!(rows[1].note.as_ref().map(|note| note.bytes), Some(128));
    }

    #[test]
    fn sizes_meet_at_a_power_of_two_between_them() {
        for (smaller, larger, middle) in
            [(8, 32, 16), (8, 16, 16), (1, 4, 2), (0, 8, 1), (1 << 40, 1 << 42, 1 << 41)]
        {
            assert_eq!(between(smaller, larger), middle, "{smaller} {larger}");
        }
    }

    #[test]
    fn what_is_measured_holds_what_the_model_prefers_and_all_of_it_can_be_done() {
        for hosts in ["1x4", "2x3"] {
            let platform = Platform::new(hosts.parse().expect("a map"), Access::Mapped);
            for collective in Collective::ALL {
                for bytes in [8, 4096, 16 << 20] {
                    let variants = variants(collective, bytes, &platform).expect("some");
                    let best = select(collective, bytes, &platform).expect("a choice");
                    assert_eq!(
                        (&variants[0].algorithm, variants[0].access),
                        (&best.algorithm, Some(best.access))
                    );
                    for variant in variants {
                        crate::select::select_variant(&variant, collective, bytes, &platform)
                            .expect("it can be done");
                    }
                }
            }
        }
    }

    #[test]
    fn chunks_are_searched_for_calls_that_are_cut() {
        let ring: Variant = Algorithm::Ring.into();
        assert_eq!(chunk_search(&ring, WINDOW_BYTES - 1), None);
        assert_eq!(chunk_search(&Algorithm::Packed(None).into(), 1 << 30), None);
        let mut search = chunk_search(&ring, 1 << 30).expect("a search");
        while !search.is_settled() {
            let variant = Variant { chunk_bytes: Some(search.chunk_bytes()), ..ring.clone() };
            let platform = Platform::new(HostMap::one(4), Access::Put);
            crate::select::select_variant(&variant, Collective::AllReduce, 1 << 30, &platform)
                .expect("it can be done");
            // The best is between the ends.
            search.measured(1_000_000_000 - search.chunk_bytes().abs_diff(100 << 10) * 1_000);
        }
        assert!(search.chunk_bytes().abs_diff(100 << 10) <= 20 << 10, "{}", search.chunk_bytes());
    }

    #[test]
    fn models_are_found_again_from_the_times_that_they_predict() {
        let truth =
            CostModel { latency_s: 2e-6, message_s: 0.5e-6, bytes_per_s: 7e9, reduce_bytes_per_s: 3e9 };
        let slow = CostModel { latency_s: 40e-6, message_s: 9e-6, bytes_per_s: 5e8, reduce_bytes_per_s: 3e9 };
        for (hosts, far) in [("1x4", truth), ("2x2", slow)] {
            let hosts: HostMap = hosts.parse().expect("a map");
            let plain = Platform::new(hosts.clone(), Access::Mapped);
            let real = Platform { near: truth, far, ..plain.clone() };
            let mut measured = Vec::new();
            for collective in
                [Collective::AllReduce, Collective::AllGather, Collective::Broadcast { root: 0 }]
            {
                for bytes in [8, 512, 1 << 15, 1 << 21, 1 << 26] {
                    let variants = variants(collective, bytes, &plain).expect("some").into_iter();
                    let timed = variants.filter(is_plain).map(|variant| {
                        let work = work(collective, &variant, &plain).expect("it can be counted");
                        VariantTime { variant, seconds: real.time(&work, bytes, CHUNK_BYTES) }
                    });
                    measured.push(Measured { collective, bytes, timed: timed.collect() });
                }
            }
            let (near, found_far, off) = models(&measured, &plain);
            assert!(off < 1.02, "{off}");
            let is_near = |found: f64, right: f64| (found / right - 1.0).abs() < 0.05;
            assert!(is_near(near.latency_s, truth.latency_s), "{near:?}");
            assert!(is_near(near.message_s, truth.message_s), "{near:?}");
            assert!(is_near(near.bytes_per_s, truth.bytes_per_s), "{near:?}");
            assert!(is_near(near.reduce_bytes_per_s, truth.reduce_bytes_per_s), "{near:?}");
            if far == slow {
                assert!(is_near(found_far.bytes_per_s, slow.bytes_per_s), "{found_far:?}");
            }
        }
    }
}
