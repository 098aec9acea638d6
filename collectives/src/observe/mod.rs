//! Observations of a group: its calls, and the ranks that are late. They are always counted, and
//! are written to files on request.
//!
//! [`Observations`] are the counters of one rank. Only the engine writes them. Any thread reads
//! them at any time without the engine's lock. From them come the [`Report`] (a table, or text for
//! Prometheus by [`pleach_transport::metrics_server`]), the flight recorder ([`recorder`]) and the
//! trace ([`trace`]).
//!
//! **Arrival skew.** A signal carries the time that its sender had spent in the call when it sent
//! the signal ([`scale`]). When the signal arrives, the receiver subtracts this time from the time
//! that it has spent in the call itself. The difference shows how much later the sender made the
//! call. Both times are differences on one clock, so clocks of different hosts need not agree. The
//! skew includes the latency of the signal and of the bytes before it. If a peer sends several
//! signals in a call, the least difference counts. A peer that came first has a skew of zero: this
//! rank's own skew is in the reports of its peers.
//!
//! **Invariant: the clock is not read for this.** A call that ends within a few microseconds is
//! only counted. A call that waits reads the clock anyway, and only then arrivals are noted.
//! Besides, one call in [`SAMPLE_EVERY`] is timed as a sample. A call allocates nothing: tables and
//! rings have their final length from the start. At 64 KiB (shm, two ranks, 2.5 us a call) a
//! profile had 0.6 % of its samples in this module and its callers in the engine.

mod metric;
mod prometheus;
mod recorder;
mod report;
mod rounds;
pub(crate) mod scale;
mod settings;
mod trace;

use std::collections::VecDeque;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_transport::mutex::lock;
use pleach_vocabulary::digest::Hasher64;

pub(crate) use metric::ProgramMetrics;
pub use metric::{HistogramMetric, Metric, MetricKind};
pub(crate) use recorder::Recorder;
pub use report::{PeerReport, Report, ShapeReport};
pub use rounds::PartialReport;
pub(crate) use rounds::RoundCounters;
use rounds::RoundsOfGroup;
pub use scale::Distribution;
pub(crate) use settings::Part;
pub use settings::{METRICS_FORM, METRICS_VARIABLE, Observe, metrics_address};
pub(crate) use trace::Trace;

use pleach_vocabulary::{Collective, Rank};

use crate::call::Descriptor;
use scale::Histogram;

/// One call in this number is timed although it does not wait. The number is prime, so that in a
/// loop over several calls each call is timed sometimes.
const SAMPLE_EVERY: u64 = 61;
/// Most shapes that have counters of their own. Further shapes share the last counters.
const SHAPES_MAX: usize = 256;
/// Calls that the flight recorder keeps.
const TIMED_CALLS_MAX: usize = 256;
/// A rank that makes a call this much later than other ranks is late.
pub const LATE_AFTER: Duration = Duration::from_micros(10);

/// A collective, the algorithm that carries it out, and a size class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The hash of the collective, the algorithm and the size class; never zero.
    key: u64,
    collective: &'static str,
    algorithm: Arc<str>,
    /// The size class: the power of two that these calls do not exceed, in bytes; zero for calls
    /// without bytes.
    bytes_max: u64,
    /// The bytes of one call on this rank: its input or its output, whichever is longer.
    bytes: u64,
}

impl Shape {
    /// The shape of all calls that have no counters of their own.
    fn others() -> Self {
        Self { key: 0, collective: "others", algorithm: "".into(), bytes_max: 0, bytes: 0 }
    }

    /// The shape of calls. `bytes` is the length of a call's input or output on this rank,
    /// whichever is longer.
    pub(crate) fn new(collective: Collective, algorithm: &str, bytes: u64) -> Self {
        let bytes_max = if bytes == 0 { 0 } else { bytes.checked_next_power_of_two().unwrap_or(u64::MAX) };
        let mut hasher = Hasher64::default();
        (collective.name(), algorithm, bytes_max).hash(&mut hasher);
        Self {
            key: hasher.finish().max(1),
            collective: collective.name(),
            algorithm: algorithm.into(),
            bytes_max,
            bytes,
        }
    }
}

/// A text as a JSON string, with its quotes.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        formatter.write_char('"')?;
        for character in self.0.chars() {
            match character {
                '"' | '\\' => write!(formatter, "\\{character}")?,
                control if control < ' ' => write!(formatter, "\\u{:04x}", control as u32)?,
                other => formatter.write_char(other)?,
            }
        }
        formatter.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::Quoted;

    #[test]
    fn what_would_end_a_string_is_escaped() {
        assert_eq!(Quoted("a\"b\\c\nd é").to_string(), "\"a\\\"b\\\\c\\u000ad é\"");
    }
}

/// A call that has ended and was timed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimedCall {
    pub(crate) run: u64,
    pub(crate) call: Descriptor,
    /// The index of the counters of its shape.
    pub(crate) shape: u16,
    pub(crate) begun: Nanos,
    pub(crate) ended: Nanos,
    /// The peer that came last, and how much later than this rank, in nanoseconds.
    pub(crate) latest: Option<(Rank, u64)>,
}

/// A call that was under way when the group failed.
#[derive(Clone, Debug)]
pub(crate) struct UnfinishedCall {
    pub(crate) run: u64,
    pub(crate) call: Descriptor,
    pub(crate) algorithm: String,
    /// When the call began; `None` if the clock was not read yet.
    pub(crate) begun: Option<Nanos>,
    /// The peers for which the call waits, each with a text of the awaited step.
    pub(crate) waits_for: Vec<(Rank, String)>,
}

/// The failure of the group, with the unfinished calls of this rank.
#[derive(Clone, Debug)]
pub(crate) struct FailureRecord {
    pub(crate) text: String,
    pub(crate) at: Nanos,
    pub(crate) unfinished: Vec<UnfinishedCall>,
}

/// Counters of the calls of a shape. [`Observations`] says which thread writes them.
#[derive(Debug)]
struct ShapeCounters {
    key: AtomicU64,
    shape: OnceLock<Shape>,
    calls: AtomicU64,
    bytes: AtomicU64,
    waited: AtomicU64,
    waited_ns: AtomicU64,
    /// For calls that did not wait: the number of calls that the time below stands for; then this
    /// time.
    covered: AtomicU64,
    covered_ns: AtomicU64,
}

#[derive(Debug)]
struct Peer {
    arrival_skew: Histogram,
    last: AtomicU64,
}

/// The counters of a rank; see the module. The engine, which is behind its group's lock, is the
/// only writer. So an addition is a load and a store. Relaxed: no other memory depends on a number.
#[derive(Debug)]
pub struct Observations {
    rank: Rank,
    counters: Box<[ShapeCounters]>,
    peers: Box<[Peer]>,
    calls: AtomicU64,
    rounds: RoundsOfGroup,
    /// Metrics that the program writes, and not the engine.
    program: ProgramMetrics,
    /// When the group was made.
    began: Nanos,
    timed_calls: Mutex<VecDeque<TimedCall>>,
    trace: Option<Trace>,
    failure: OnceLock<FailureRecord>,
}

fn add(counter: &AtomicU64, number: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(number), Ordering::Relaxed);
}

impl Observations {
    pub(crate) fn new(rank: Rank, ranks: u32, began: Nanos, trace: Option<Trace>) -> Self {
        let counter = || AtomicU64::new(0);
        let counters = |_| ShapeCounters {
            key: counter(),
            shape: OnceLock::new(),
            calls: counter(),
            bytes: counter(),
            waited: counter(),
            waited_ns: counter(),
            covered: counter(),
            covered_ns: counter(),
        };
        let peer = |_| Peer { arrival_skew: Histogram::new(), last: counter() };
        Self {
            rank,
            counters: (0..SHAPES_MAX).map(counters).collect(),
            peers: (0..ranks).map(peer).collect(),
            calls: counter(),
            rounds: RoundsOfGroup::default(),
            program: ProgramMetrics::default(),
            began,
            timed_calls: Mutex::new(VecDeque::with_capacity(TIMED_CALLS_MAX)),
            trace,
            failure: OnceLock::new(),
        }
    }

    /// The counters of a further partial all-reduce of this group, whose rounds add to them.
    pub(crate) fn begin_rounds(&self) -> Arc<RoundCounters> {
        self.rounds.begin(self.peers.len() as u32)
    }

    /// The metrics of the group's program.
    pub(crate) fn program(&self) -> &ProgramMetrics {
        &self.program
    }

    /// Whether the next call is to be timed even if it does not wait.
    pub(crate) fn wants_time(&self) -> bool {
        self.trace.is_some() || self.calls.load(Ordering::Relaxed).is_multiple_of(SAMPLE_EVERY)
    }

    /// Counts a call that has ended. Returns the index of the counters of its shape.
    #[inline]
    pub(crate) fn count(&self, shape: &Shape) -> u16 {
        let index = self.index(shape);
        let counters = &self.counters[usize::from(index)];
        add(&self.calls, 1);
        add(&counters.calls, 1);
        add(&counters.bytes, shape.bytes);
        index
    }

    #[inline]
    fn index(&self, shape: &Shape) -> u16 {
        let first = shape.key as usize % (SHAPES_MAX - 1);
        if self.counters[first].key.load(Ordering::Relaxed) == shape.key {
            return first as u16;
        }
        self.find_index(shape, first)
    }

    #[cold]
    fn find_index(&self, shape: &Shape, first: usize) -> u16 {
        for at in (first..SHAPES_MAX - 1).chain(0..first) {
            let counters = &self.counters[at];
            match counters.key.load(Ordering::Relaxed) {
                0 => {
                    counters.key.store(shape.key, Ordering::Relaxed);
                    let _ = counters.shape.set(shape.clone());
                    return at as u16;
                }
                key if key == shape.key => return at as u16,
                _ => {}
            }
        }
        let last = SHAPES_MAX - 1;
        self.counters[last].shape.get_or_init(Shape::others);
        last as u16
    }

    /// Notes the time of a call that was counted. `waited` says that the call waited, so the clock
    /// was read in any case.
    pub(crate) fn time(&self, timed: TimedCall, waited: bool) {
        let counters = &self.counters[usize::from(timed.shape)];
        let took_ns = timed.ended.0.saturating_sub(timed.begun.0);
        if waited {
            add(&counters.waited, 1);
            add(&counters.waited_ns, took_ns);
        } else {
            let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let quick = read(&counters.calls).saturating_sub(read(&counters.waited));
            let new = quick.saturating_sub(read(&counters.covered));
            add(&counters.covered, new);
            add(&counters.covered_ns, took_ns.saturating_mul(new));
        }
        if let Some(trace) = &self.trace {
            trace.add(timed);
        }
        let mut timed_calls = self.timed_calls();
        if timed_calls.len() == TIMED_CALLS_MAX {
            timed_calls.pop_front();
        }
        timed_calls.push_back(timed);
    }

    /// Notes how much later than this rank its peers made a call. Returns the latest peer, if it
    /// was late.
    pub(crate) fn arrivals(&self, arrivals: &[(Rank, u64)]) -> Option<(Rank, u64)> {
        for (peer, skew_ns) in arrivals {
            self.peers[*peer as usize].arrival_skew.add(*skew_ns);
        }
        let latest = arrivals.iter().copied().max_by_key(|(_, skew_ns)| *skew_ns)?;
        let is_late = Duration::from_nanos(latest.1) >= LATE_AFTER;
        if is_late {
            add(&self.peers[latest.0 as usize].last, 1);
        }
        is_late.then_some(latest)
    }

    /// Notes that the group has failed. Only the first call counts.
    pub(crate) fn failed(&self, failure: FailureRecord) {
        let _ = self.failure.set(failure);
    }

    fn timed_calls(&self) -> MutexGuard<'_, VecDeque<TimedCall>> {
        // The list is consistent between any two statements, so a panic of another thread leaves it
        // valid.
        lock(&self.timed_calls)
    }

    fn shape(&self, timed: &TimedCall) -> Option<&Shape> {
        self.counters[usize::from(timed.shape)].shape.get()
    }

    /// The calls that the flight recorder has kept, oldest first, with the names of their
    /// algorithms.
    pub(crate) fn last_timed_calls(&self) -> Vec<(TimedCall, String)> {
        let timed_calls = self.timed_calls();
        let name = |timed: &TimedCall| {
            self.shape(timed).map_or_else(String::new, |shape| shape.algorithm.to_string())
        };
        timed_calls.iter().map(|timed| (*timed, name(timed))).collect()
    }

    pub(crate) fn failure(&self) -> Option<&FailureRecord> {
        self.failure.get()
    }

    /// Writes the trace, if it was requested.
    pub(crate) fn write_trace(&self) {
        if let Some(trace) = &self.trace {
            trace.write(self.rank, |timed| self.shape(timed));
        }
    }

    /// The report at this moment. `under_way` is the number of collectives under way, and
    /// `waits_for` the rank for which this rank waits.
    pub(crate) fn report(&self, under_way: u64, waits_for: Option<Rank>, now: Nanos) -> Report {
        let shapes = self.counters.iter().filter_map(|counters| {
            let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let shape = counters.shape.get()?;
            let (calls, waited) = (read(&counters.calls), read(&counters.waited));
            Some(ShapeReport {
                collective: shape.collective,
                algorithm: shape.algorithm.to_string(),
                bytes_max: shape.bytes_max,
                calls,
                bytes: read(&counters.bytes),
                waited_calls: waited,
                time: Duration::from_nanos(
                    read(&counters.waited_ns).saturating_add(read(&counters.covered_ns)),
                ),
            })
        });
        let mut shapes: Vec<_> = shapes.collect();
        shapes.sort_by(|left, right| {
            (left.collective, left.bytes_max, &left.algorithm).cmp(&(
                right.collective,
                right.bytes_max,
                &right.algorithm,
            ))
        });
        let peers = (0..).zip(&self.peers).filter(|(rank, _)| *rank != self.rank);
        let peers = peers.map(|(rank, peer)| PeerReport {
            rank,
            arrival_skew: peer.arrival_skew.read(),
            last: peer.last.load(Ordering::Relaxed),
        });
        Report {
            rank: self.rank,
            world_size: self.peers.len() as u32,
            age: now.since(self.began),
            shapes,
            peers: peers.collect(),
            rounds: self.rounds.report(),
            under_way,
            waits_for,
            failure: self.failure.get().map(|failure| failure.text.clone()),
        }
    }
}
