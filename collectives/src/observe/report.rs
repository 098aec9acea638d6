//! The report of a rank about its group, as a value to read, print or send.

use std::fmt;
use std::time::Duration;

use pleach_vocabulary::Rank;

use super::rounds::PartialReport;
use super::scale::Distribution;

/// The report of one rank about its group. Counters count from the creation of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// The rank that reports.
    pub rank: Rank,
    /// The number of ranks of the group.
    pub world_size: u32,
    /// The time since the group was made.
    pub age: Duration,
    /// Calls that have ended, by collective, size and algorithm.
    pub shapes: Vec<ShapeReport>,
    /// The other ranks, in order.
    pub peers: Vec<PeerReport>,
    /// The rounds of the partial all-reduces that the group has made, if it has made any.
    pub rounds: Option<PartialReport>,
    /// Collectives that this rank has begun and not completed.
    pub under_way: u64,
    /// The rank for which this rank waits, if it has waited for a millisecond. It is the cause of
    /// the wait, as far as the queried ranks know.
    pub waits_for: Option<Rank>,
    /// The failure of the group.
    pub failure: Option<String>,
}

/// Calls of one collective, algorithm and size class.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShapeReport {
    /// The collective.
    pub collective: &'static str,
    /// The algorithm that carries it out.
    pub algorithm: String,
    /// The size class: a power of two, in bytes. The longer one of this rank's input and output
    /// does not exceed it.
    pub bytes_max: u64,
    /// The number of calls that have succeeded.
    pub calls: u64,
    /// The bytes of these calls: of this rank's input or output, whichever is longer.
    pub bytes: u64,
    /// The number of calls that waited so long that each of them was timed. On a fabric whose bytes
    /// move only while ranks poll (tcp), all calls are timed.
    pub waited_calls: u64,
    /// The total time of the calls on this rank, from call to end. One in 61 of the calls that did
    /// not wait is timed and stands for the calls before it.
    pub time: Duration,
}

/// The report of one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerReport {
    /// The rank.
    pub rank: Rank,
    /// How much later than this rank the peer made its calls; zero if it came first. Calls count in
    /// which this rank waited and heard from the peer directly. Precise to about 10 µs and 12.5 %.
    /// The latency of the peer's first signal is included.
    pub arrival_skew: Distribution,
    /// The number of calls in which the peer was the last rank heard, by at least
    /// [`super::LATE_AFTER`].
    pub last: u64,
}

impl Report {
    /// The peer for which calls have waited longest; `None` if no peer was late.
    #[must_use]
    pub fn latest(&self) -> Option<&PeerReport> {
        let late = self.peers.iter().filter(|peer| peer.last > 0);
        late.max_by_key(|peer| peer.arrival_skew.sum())
    }
}

/// A time, printed with three digits and a unit.
pub(super) struct ShortDuration(pub(super) Duration);

impl fmt::Display for ShortDuration {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time_ns = self.0.as_nanos() as f64;
        let (number, unit) = match time_ns {
            ..1e3 => (time_ns, "ns"),
            ..1e6 => (time_ns / 1e3, "us"),
            ..1e9 => (time_ns / 1e6, "ms"),
            _ => (time_ns / 1e9, "s"),
        };
        let digits = if number < 10.0 { 2 } else { usize::from(number < 100.0) };
        formatter.pad(&format!("{number:.digits$} {unit}"))
    }
}

/// A number of bytes, printed in powers of two.
struct BinaryBytes(u64);

impl fmt::Display for BinaryBytes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
            bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
            bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
            bytes => format!("{bytes} B"),
        };
        formatter.pad(&text)
    }
}

/// Prints two tables: the calls, and the peers by arrival skew.
impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, world_size, age, under_way, .. } = self;
        write!(
            formatter,
            "rank {rank} of {world_size}, {} old, {under_way} collectives under way",
            ShortDuration(*age)
        )?;
        match self.waits_for {
            Some(peer) => writeln!(formatter, ", waits for rank {peer}")?,
            None => writeln!(formatter)?,
        }
        if let Some(failure) = &self.failure {
            writeln!(formatter, "failed: {failure}")?;
        }
        writeln!(
            formatter,
            "{:<15} {:<20} {:>8} {:>10} {:>10} {:>10} {:>10}",
            "collective", "algorithm", "up to", "calls", "waited", "time/call", "GB/s"
        )?;
        for shape in &self.shapes {
            let per_call = shape.time.div_f64(shape.calls.max(1) as f64);
            let rate = shape.bytes as f64 / shape.time.as_nanos().max(1) as f64;
            writeln!(
                formatter,
                "{:<15} {:<20} {:>8} {:>10} {:>10} {:>10} {rate:>10.3}",
                shape.collective,
                shape.algorithm,
                BinaryBytes(shape.bytes_max),
                shape.calls,
                shape.waited_calls,
                ShortDuration(per_call)
            )?;
        }
        let heading = |heading: &str| format!("{heading:>10}");
        let columns: String = ["p50", "p99", "longest", "together"].map(heading).join(" ");
        writeln!(formatter, "{:<6} {:>10} {:>10} {columns}", "late", "was last", "heard")?;
        for PeerReport { rank, arrival_skew, last } in &self.peers {
            let times = [
                arrival_skew.quantile(0.5),
                arrival_skew.quantile(0.99),
                arrival_skew.longest(),
                arrival_skew.sum(),
            ];
            let times = times.map(|time| format!("{:>10}", ShortDuration(time))).join(" ");
            writeln!(formatter, "{rank:<6} {last:>10} {:>10} {times}", arrival_skew.count())?;
        }
        let Some(PartialReport { rounds, counted, late, carried, dropped, corrected, missed }) = &self.rounds
        else {
            return Ok(());
        };
        writeln!(
            formatter,
            "{rounds} rounds, this rank: {late} late ({carried} carried, {dropped} dropped, {corrected} \
             corrected), {missed} missed"
        )?;
        for (rank, counted) in counted.iter().enumerate() {
            let share = 100.0 * *counted as f64 / (*rounds).max(1) as f64;
            writeln!(formatter, "{rank:<6} {counted:>10} {share:>9.1}%")?;
        }
        Ok(())
    }
}
