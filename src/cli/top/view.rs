//! What snapshots mean, put together over all ranks: as a screen and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use pleach::Rank;
use serde_json::{Value, json};

use super::scrape::{Calls, RankState, ShapeKey, Snapshot};
use crate::cli::output::rounded;

/// A shape over all ranks.
#[derive(Debug, PartialEq)]
struct ShapeRow {
    shape: ShapeKey,
    /// Of a rank on average, since the snapshot before.
    calls_per_s: f64,
    call_us: f64,
    gb_per_s: f64,
}

/// A rank as the others see it.
#[derive(Debug, PartialEq)]
struct RankRow {
    rank: Rank,
    waits_for: Option<Rank>,
    under_way: u64,
    has_failed: bool,
    calls_per_s: f64,
    /// Share of its time in calls.
    in_calls: f64,
    /// Calls in which it was the last, as seen by the rank that saw most.
    last: u64,
    arrival_skew_us: f64,
    longest_us: f64,
}

#[derive(Debug, PartialEq)]
pub(super) struct View {
    world_size: u32,
    answered: usize,
    age_s: f64,
    shapes: Vec<ShapeRow>,
    ranks: Vec<RankRow>,
}

/// What was counted between two snapshots, or since the group was made.
fn counted<'a>(
    state: &'a RankState,
    before: Option<&'a RankState>,
) -> impl Iterator<Item = (&'a ShapeKey, Calls)> {
    state.shapes.iter().map(move |(key, now)| {
        let then = before.and_then(|before| before.shapes.get(key)).copied().unwrap_or_default();
        // A job that was started anew counts from zero.
        let since = |now: f64, then: f64| if now >= then { now - then } else { now };
        let calls = Calls {
            calls: since(now.calls, then.calls),
            bytes: since(now.bytes, then.bytes),
            seconds: since(now.seconds, then.seconds),
        };
        (key, calls)
    })
}

fn ratio(above: f64, below: f64) -> f64 {
    if below > 0.0 { above / below } else { 0.0 }
}

impl View {
    /// With rates since the snapshot before, or since the group was made.
    pub(super) fn new(now: &Snapshot, before: Option<&Snapshot>) -> Self {
        let of_before = |rank: &Rank| before.and_then(|before| before.ranks.get(rank));
        let age_s = now.ranks.values().map(|state| state.age_s).fold(0.0, f64::max);
        let time_s = |rank: &Rank, state: &RankState| match (before, of_before(rank)) {
            (Some(before), Some(_)) => now.at.since(before.at).as_secs_f64(),
            _ => state.age_s,
        };
        let mut shapes: BTreeMap<&ShapeKey, (Calls, f64)> = BTreeMap::new();
        let mut ranks = Vec::new();
        for (rank, state) in &now.ranks {
            let time_s = time_s(rank, state);
            let mut own = Calls::default();
            for (key, calls) in counted(state, of_before(rank)) {
                let (all, per_s) = shapes.entry(key).or_default();
                for sum in [&mut own, all] {
                    sum.calls += calls.calls;
                    sum.bytes += calls.bytes;
                    sum.seconds += calls.seconds;
                }
                *per_s += ratio(calls.calls, time_s);
            }
            let seen = now.ranks.values().filter_map(|other| other.peers.get(rank));
            let (mut last, mut longest_s, mut sum_s, mut heard) = (0.0f64, 0.0f64, 0.0, 0.0);
            for skew in seen {
                last = last.max(skew.last);
                longest_s = longest_s.max(skew.longest_s);
                sum_s += skew.sum_s;
                heard += skew.heard;
            }
            ranks.push(RankRow {
                rank: *rank,
                waits_for: state.waits_for,
                under_way: state.under_way as u64,
                has_failed: state.has_failed,
                calls_per_s: ratio(own.calls, time_s),
                in_calls: ratio(own.seconds, time_s).min(1.0),
                last: last as u64,
                arrival_skew_us: ratio(sum_s, heard) * 1e6,
                longest_us: longest_s * 1e6,
            });
        }
        let shapes =
            shapes.into_iter().filter(|(_, (all, _))| all.calls > 0.0).map(|(key, (all, per_s))| ShapeRow {
                shape: key.clone(),
                calls_per_s: per_s / now.ranks.len() as f64,
                call_us: ratio(all.seconds, all.calls) * 1e6,
                gb_per_s: ratio(all.bytes, all.seconds) / 1e9,
            });
        Self {
            world_size: now.ranks.values().map(|state| state.world_size).max().unwrap_or(0),
            answered: now.ranks.len(),
            age_s,
            shapes: shapes.collect(),
            ranks,
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let Self { world_size, answered, age_s, shapes, ranks } = self;
        let call = |row: &ShapeRow| {
            let (collective, algorithm, bytes_max) = &row.shape;
            json!({
                "collective": plain(collective),
                "algorithm": plain(algorithm),
                "bytes_max": bytes_max,
                "calls_per_s": rounded(row.calls_per_s, 3),
                "call_us": rounded(row.call_us, 3),
                "gb_per_s": rounded(row.gb_per_s, 6)
            })
        };
        let rank = |row: &RankRow| {
            json!({
                "rank": row.rank,
                "waits_for": row.waits_for,
                "under_way": row.under_way,
                "failed": row.has_failed,
                "calls_per_s": rounded(row.calls_per_s, 3),
                "in_calls": rounded(row.in_calls, 4),
                "last": row.last,
                "arrival_skew_us": rounded(row.arrival_skew_us, 3),
                "longest_us": rounded(row.longest_us, 3)
            })
        };
        json!({
            "world_size": world_size,
            "answered": answered,
            "age_s": rounded(*age_s, 3),
            "calls": shapes.iter().map(call).collect::<Value>(),
            "ranks": ranks.iter().map(rank).collect::<Value>()
        })
    }
}

/// Without what could leave a string or the line of a screen: names come over the network.
fn plain(name: &str) -> String {
    name.chars().filter(|letter| !letter.is_control() && !matches!(letter, '"' | '\\')).take(40).collect()
}

/// The screen: calls, then ranks.
impl fmt::Display for View {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { world_size, answered, age_s, .. } = self;
        writeln!(formatter, "{answered} of {world_size} ranks answer, {age_s:.0} s old")?;
        writeln!(
            formatter,
            "\n{:<15} {:<20} {:>12} {:>10} {:>12} {:>9}",
            "collective", "algorithm", "bytes up to", "calls/s", "us/call", "GB/s"
        )?;
        for row in &self.shapes {
            let (collective, algorithm, bytes_max) = &row.shape;
            writeln!(
                formatter,
                "{:<15} {:<20} {bytes_max:>12} {:>10.1} {:>12.1} {:>9.3}",
                plain(collective),
                plain(algorithm),
                row.calls_per_s,
                row.call_us,
                row.gb_per_s
            )?;
        }
        writeln!(
            formatter,
            "\n{:<6} {:>10} {:>9} {:>8} {:>12} {:>12}  does",
            "rank", "calls/s", "in calls", "last", "skew us", "longest us"
        )?;
        for row in &self.ranks {
            let does = match (row.has_failed, row.waits_for, row.under_way) {
                (true, ..) => "has failed".to_owned(),
                (_, Some(peer), _) => format!("waits for rank {peer}"),
                (_, None, 0) => "its own work".to_owned(),
                (_, None, _) => "a call".to_owned(),
            };
            writeln!(
                formatter,
                "{:<6} {:>10.1} {:>8.1}% {:>8} {:>12.1} {:>12.1}  {does}",
                row.rank,
                row.calls_per_s,
                row.in_calls * 100.0,
                row.last,
                row.arrival_skew_us,
                row.longest_us
            )?;
        }
        Ok(())
    }
}
