//! The report of a run: of each rank, and of all together.

use std::time::Duration;

use pleach::graph::Partition;
use pleach::graph::run::{RankReport, median};
use pleach::transport::rendezvous::Store;
use pleach::transport::{Nanos, Rank, clock};
use serde_json::{Value, json};

use crate::cli::CommandError;
use crate::cli::output::{print, put, rounded};

/// How long rank 0 waits for the reports of all ranks, at least.
const PATIENCE: Duration = Duration::from_secs(60);

/// How much longer it waits for those of a run that is checked: the last rank runs the whole model
/// before it reports.
const CHECK_PATIENCE: Duration = Duration::from_secs(1800);

/// Iterations of which a rank reports the moments: a value in the store is short.
const MOMENTS_MAX: usize = 100;

/// What `--check` found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Verdict {
    /// Whether all outputs have the bits of the parts one after another.
    pub(crate) equal_to_parts: bool,
    /// The largest difference from the whole model.
    pub(crate) largest_difference: f64,
}

/// What a rank reports.
#[derive(Clone, Debug)]
pub(crate) struct RankLine {
    pub(crate) report: RankReport,
    /// Of the last rank.
    pub(crate) verdict: Option<Verdict>,
}

impl RankLine {
    fn median_us(&self, from: usize, to: usize) -> f64 {
        // The first iteration fills caches and waits for ranks that begin.
        let later = self.report.moments.iter().skip(usize::from(self.report.moments.len() > 1));
        micros(median(later.map(|moments| moments[to].since(moments[from])).collect()))
    }

    fn compute_us(&self) -> f64 {
        self.median_us(1, 2)
    }

    fn wait_us(&self) -> f64 {
        self.median_us(0, 1)
    }

    fn json(&self) -> Value {
        let RankReport { rank, iterations, copies_first, copies_later, copied_bytes, .. } = &self.report;
        let RankReport { bytes_in, bytes_out, heap_allocations_later, arena_bytes, .. } = &self.report;
        json!({
            "rank": rank, "iterations": iterations, "copies_first": copies_first, "copies_later": copies_later,
            "copied_bytes": copied_bytes, "bytes_in": bytes_in, "bytes_out": bytes_out,
            "heap_allocations_later": heap_allocations_later, "arena_bytes": arena_bytes,
            "compute_us_p50": self.compute_us(), "wait_us_p50": self.wait_us(),
        })
    }

    fn encode(&self) -> Vec<u8> {
        let mut report = self.json();
        let moments = &self.report.moments;
        let last = &moments[moments.len().saturating_sub(MOMENTS_MAX)..];
        report["moments"] = last.iter().map(|moments| moments.map(|moment| moment.0).to_vec()).collect();
        report["equal_to_parts"] = json!(self.verdict.map(|verdict| verdict.equal_to_parts));
        report["largest_difference"] =
            json!(self.verdict.map(|verdict| verdict.largest_difference.min(f64::MAX)));
        report.to_string().into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let value: Value = serde_json::from_slice(bytes).ok()?;
        let number = |name: &str| value[name].as_u64();
        let moment = |list: &Value| {
            let at = |place: usize| list[place].as_u64().map(Nanos);
            Some([at(0)?, at(1)?, at(2)?])
        };
        let verdict = value["equal_to_parts"].as_bool().zip(value["largest_difference"].as_f64());
        Some(Self {
            report: RankReport {
                rank: Rank::try_from(number("rank")?).ok()?,
                iterations: number("iterations")?,
                copies_first: number("copies_first")?,
                copies_later: number("copies_later")?,
                copied_bytes: number("copied_bytes")?,
                bytes_in: number("bytes_in")?,
                bytes_out: number("bytes_out")?,
                heap_allocations_later: number("heap_allocations_later"),
                arena_bytes: number("arena_bytes")?,
                moments: value["moments"].as_array()?.iter().map(moment).collect::<Option<_>>()?,
            },
            verdict: verdict
                .map(|(equal_to_parts, largest_difference)| Verdict { equal_to_parts, largest_difference }),
        })
    }
}

/// How long ranks wait for the reports, where a wait for a tensor takes `timeout` at most: as long
/// as all waits of the iterations that are under way.
pub(crate) fn report_patience(timeout: Duration, depth: u32, ranks: u32, is_checked: bool) -> Duration {
    let waits = timeout.saturating_mul(depth.saturating_mul(ranks));
    waits.max(PATIENCE).saturating_add(if is_checked { CHECK_PATIENCE } else { Duration::ZERO })
}

/// Gives rank 0 the lines of all ranks; the others get nothing.
pub(crate) fn exchange(
    store: Option<Box<dyn Store>>,
    rank: Rank,
    ranks: u32,
    line: RankLine,
    patience: Duration,
) -> Result<Option<Vec<RankLine>>, CommandError> {
    let Some(mut store) = store else { return Ok(Some(vec![line])) };
    let deadline = clock::now() + patience;
    let lost =
        |error: &dyn std::fmt::Display| CommandError::failed(format!("no report: rank {rank}, {error}"));
    let key = |rank: Rank| format!("graph-run/{rank}");
    if rank > 0 {
        store.set(&key(rank), &line.encode(), deadline).map_err(|error| lost(&error))?;
        return Ok(None);
    }
    let keys: Vec<String> = (1..ranks).map(key).collect();
    let values = store.wait(&keys, deadline, deadline).map_err(|error| lost(&error))?;
    let others = values.iter().map(|bytes| RankLine::decode(bytes)).collect::<Option<Vec<_>>>();
    let others =
        others.ok_or_else(|| lost(&"another rank reported nonsense; run the same version on all ranks"))?;
    Ok(Some([vec![line], others].concat()))
}

/// The report of a run.
pub(crate) struct Report<'a> {
    /// By rank.
    pub(crate) lines: Vec<RankLine>,
    pub(crate) runtime: &'static str,
    pub(crate) fabric: String,
    pub(crate) transfer: &'static str,
    /// Whether the clocks of all ranks are one.
    pub(crate) is_one_host: bool,
    pub(crate) partition: &'a Partition,
}

impl Report<'_> {
    fn verdict(&self) -> Option<Verdict> {
        self.lines.last().and_then(|line| line.verdict)
    }

    /// Iterations a second, from the end of the first that is known to the end of the last.
    fn iterations_per_s(&self) -> f64 {
        let moments = self.lines.last().map(|line| line.report.moments.as_slice()).unwrap_or_default();
        match moments {
            [] => 0.0,
            [only] => 1.0 / only[2].since(only[0]).as_secs_f64().max(1e-9),
            [first, .., last] => (moments.len() - 1) as f64 / last[2].since(first[2]).as_secs_f64().max(1e-9),
        }
    }

    /// The median time from the moment in which the first rank begins an iteration to the end of
    /// the last.
    fn latency_us(&self) -> Option<f64> {
        let (first, last) = (self.lines.first()?, self.lines.last()?);
        let pairs = first.report.moments.iter().zip(&last.report.moments).skip(1);
        let latencies: Vec<Duration> = pairs.map(|(first, last)| last[2].since(first[0])).collect();
        (self.is_one_host && !latencies.is_empty()).then(|| micros(median(latencies)))
    }

    /// The median time from the end of the operators that compute what a rank needs to the start of
    /// its own. An iteration counts if the rank waited by then.
    fn handover_us(&self) -> Option<f64> {
        let mut handovers = Vec::new();
        for line in &self.lines {
            let to = line.report.rank;
            let feeders: Vec<Rank> = self
                .partition
                .crossings()
                .iter()
                .filter(|crossing| crossing.to == to)
                .map(|crossing| crossing.from)
                .collect();
            for (iteration, [waits, begins, _]) in line.report.moments.iter().enumerate().skip(1) {
                let end =
                    |&rank: &Rank| Some(self.lines.get(rank as usize)?.report.moments.get(iteration)?[2]);
                let Some(ready) = feeders.iter().filter_map(end).max() else { continue };
                if *waits < ready && ready < *begins {
                    handovers.push(begins.since(ready));
                }
            }
        }
        (self.is_one_host && !handovers.is_empty()).then(|| micros(median(handovers)))
    }

    fn json(&self) -> Value {
        json!({
            "iterations_per_s": rounded(self.iterations_per_s(), 3),
            "latency_us_p50": self.latency_us(),
            "handover_us_p50": self.handover_us(),
            "equal_to_parts": self.verdict().map(|verdict| verdict.equal_to_parts),
            "largest_difference": self.verdict().map(|verdict| verdict.largest_difference),
            "runtime": self.runtime,
            "fabric": self.fabric,
            "transfer": self.transfer,
        })
    }

    /// Prints a line for each rank, and one for all.
    pub(crate) fn print(&self, as_json: bool) -> Result<(), CommandError> {
        let mut out = String::new();
        if as_json {
            self.lines.iter().for_each(|line| put!(out, "{}", line.json()));
            put!(out, "{}", self.json());
            return print("results", &out);
        }
        put!(out, "rank  copies 1st  later  bytes in  bytes out  compute µs   wait µs");
        for line in &self.lines {
            let RankReport { rank, copies_first, copies_later, bytes_in, bytes_out, .. } = &line.report;
            let (compute, wait) = (line.compute_us(), line.wait_us());
            put!(
                out,
                "{rank:>4} {copies_first:>11} {copies_later:>6} {bytes_in:>9} {bytes_out:>10} {compute:>11.1} {wait:>9.1}"
            );
        }
        let shown =
            |value: Option<f64>| value.map_or_else(|| "unknown".to_owned(), |value| format!("{value:.1} µs"));
        put!(
            out,
            "{:.2} iterations/s by {} over {}, {}; latency {}, hand-over {}",
            self.iterations_per_s(),
            self.runtime,
            self.fabric,
            self.transfer,
            shown(self.latency_us()),
            shown(self.handover_us())
        );
        if let Some(Verdict { equal_to_parts, largest_difference }) = self.verdict() {
            let equal = if equal_to_parts { "yes" } else { "NO" };
            put!(out, "all outputs have the bits of the parts in one process: {equal}");
            put!(out, "largest difference from the whole model: {largest_difference:.1e}");
        }
        print("results", &out)
    }

    /// An error if the outputs are wrong.
    pub(crate) fn check(&self, difference_max: f64) -> Result<(), CommandError> {
        match self.verdict() {
            Some(verdict) if !verdict.equal_to_parts => Err(CommandError::failed(
                "wrong outputs: they are not those of the same parts in one process; report this with PLEACH_LOG=debug",
            )),
            Some(Verdict { largest_difference, .. }) if largest_difference > difference_max => {
                Err(CommandError::failed(format!(
                    "wrong outputs: they differ by {largest_difference:.1e} from those of the whole model; \
                     report this with PLEACH_LOG=debug"
                )))
            }
            _ => Ok(()),
        }
    }
}

fn micros(duration: Duration) -> f64 {
    rounded(duration.as_secs_f64() * 1e6, 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::report_patience;

    #[test]
    fn half_an_hour_is_for_checked_runs_alone() {
        let second = Duration::from_secs(1);
        let patience = |timeout, is_checked| report_patience(timeout, 2, 4, is_checked).as_secs();
        assert_eq!([patience(30 * second, false), patience(second, false)], [240, 60]);
        assert_eq!([patience(30 * second, true), patience(Duration::MAX, true)], [2040, u64::MAX]);
    }
}
