//! `pleach top`: shows a live job: its calls, their rates, late ranks, and which rank waits for
//! which.
//!
//! It reads the metrics of every rank ([`Snapshot`]) and combines them ([`View`]): each rank knows
//! how late the other ranks are, and not how late it is itself. It asks a job whose processes come
//! and go who is there, as `pleach members` does ([`Watched`]).

use std::collections::BTreeMap;
use std::fmt;
use std::io::{IsTerminal, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::str::FromStr;
use std::time::Duration;

use pleach::Rank;
use pleach::collectives::observe::METRICS_VARIABLE;
use pleach::session::asks::MemberRow;
use pleach::transport::rendezvous::{Rendezvous, World};
use pleach::transport::{Nanos, clock};
use rustix::event::poll;
use rustix::time::Timespec;
use serde_json::{Value, json};

use crate::cli::CommandError;
use crate::cli::members::{asker, members_of, row_to_json, table};
use crate::cli::metrics::MetricsAddress;
use crate::cli::output::{print, print_json, rounded, visible};

/// Arguments of `pleach top`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  pleach train --ranks 4 --epochs 1000 --metrics 9400 &\n  pleach top\n  \
    pleach top --once --json 10.0.0.1:9400 10.0.0.2:9400\n  pleach top tcp://10.0.0.1:4000\n\n\
    The first screen shows rates since the group was made, each later screen rates since the screen before. 'last' counts\n\
    the calls in which a rank came last by 10 us or more, as counted by the rank with the highest count. 'late by' is the\n\
    mean over the ranks that waited. Of partial all-reduces the share of rounds that a rank's contribution is in is shown,\n\
    and how many of its contributions were late, which were carried, dropped or corrected, and how many results it missed.\n\
    Of a training by a scheme its steps are shown, the share of time without anything to compute, the steps since the last\n\
    exchange (mean and most), and how far a rank's parameters are from the mean of all. At a rendezvous address the members of\n\
    the job are shown as by 'pleach members', with the secret of PLEACH_SECRET_FILE. Without a terminal the command prints one\n\
    snapshot."
)]
pub(crate) struct Arguments {
    /// Address of the metrics of rank 0 of each host, where the ports of its other ranks follow, or
    /// the rendezvous address of a job whose processes come and go [default: 127.0.0.1:9400]
    #[arg(value_name = "ADDR")]
    addresses: Vec<Address>,
    /// Print one snapshot and end
    #[arg(long)]
    once: bool,
    /// Print the snapshot as JSON, on one line
    #[arg(long, requires = "once")]
    json: bool,
    /// Time between two screens
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(50..=3_600_000))]
    interval: u32,
}

/// What is asked.
#[derive(Clone, Debug)]
enum Address {
    Metrics(MetricsAddress),
    Job(Rendezvous),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains("://") {
            return text.parse().map(Self::Job).map_err(|error| format!("{error}"));
        }
        text.parse().map(Self::Metrics)
    }
}

/// The lines of the live screen before, which the next one overwrites.
#[derive(Default)]
struct Screen {
    lines: usize,
}

impl Screen {
    /// What shows this text in the place of the one before, without a blank moment between. Each
    /// line goes to its own row, so that one too many scrolls nothing away, and what is too wide is
    /// cut off at the edge.
    fn show(&mut self, text: &str) -> String {
        const CLEAR: &str = "\x1b[2J";
        const CUT: &str = "\x1b[?7l";
        const WRAP: &str = "\x1b[?7h";
        const CLEAR_REST: &str = "\x1b[K";
        let row = |row: usize| format!("\x1b[{row};1H");
        let mut shown = String::from(if self.lines == 0 { CLEAR } else { "" });
        shown += CUT;
        let lines = text.lines().count();
        for (number, line) in (1..).zip(text.lines()) {
            shown += &format!("{}{line}{CLEAR_REST}", row(number));
        }
        for number in lines + 1..=self.lines {
            shown += &format!("{}{CLEAR_REST}", row(number));
        }
        self.lines = lines;
        shown + &row(lines + 1) + WRAP
    }
}

/// Runs `pleach top`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), CommandError> {
    let is_live = !arguments.once && std::io::stdout().is_terminal();
    let mut watched = Watched::new(&arguments.addresses)?;
    let mut screen = Screen::default();
    let mut has_shown = false;
    loop {
        let seen = watched.look();
        if has_shown && seen.is_empty() {
            return print("view", "the job has ended\n");
        }
        if let Some(reason) = seen.silent.first().filter(|_| !has_shown) {
            return Err(CommandError::failed(reason));
        }
        if !is_live {
            return if arguments.json {
                print_json("view", &seen.to_json())
            } else {
                print("view", &seen.to_string())
            };
        }
        print("view", &screen.show(&seen.to_string()))?;
        has_shown = true;
        let interval = Timespec {
            tv_sec: i64::from(arguments.interval / 1000),
            tv_nsec: i64::from(arguments.interval % 1000) * 1_000_000,
        };
        // A signal of the terminal (its size has changed) only shows the next screen early.
        let _ = poll(&mut [], Some(&interval));
    }
}

/// All that is looked at.
struct Watched {
    metrics: Vec<MetricsAddress>,
    before: Option<Snapshot>,
    jobs: Vec<(Rendezvous, World)>,
}

/// What one look has shown.
struct Seen {
    view: Option<View>,
    /// By job.
    members: Vec<(Rendezvous, Vec<MemberRow>)>,
    /// Why there is nothing else: a rank may have ended a moment ago, or who gives seats.
    silent: Vec<String>,
}

impl Watched {
    fn new(addresses: &[Address]) -> Result<Self, CommandError> {
        let (mut metrics, mut jobs) = (Vec::new(), Vec::new());
        for address in addresses {
            match address {
                Address::Metrics(address) => metrics.push(*address),
                Address::Job(address) => jobs.push((address.clone(), asker(address)?)),
            }
        }
        if addresses.is_empty() {
            metrics.push(MetricsAddress::default());
        }
        Ok(Self { metrics, before: None, jobs })
    }

    fn look(&mut self) -> Seen {
        let mut seen = Seen { view: None, members: Vec::new(), silent: Vec::new() };
        if !self.metrics.is_empty() {
            match Snapshot::take(&self.metrics, clock::now()) {
                Ok(now) => {
                    seen.view = Some(View::new(&now, self.before.as_ref()));
                    self.before = Some(now);
                }
                Err(reason) => seen.silent.push(reason),
            }
        }
        for (address, asker) in &self.jobs {
            match members_of(asker) {
                Ok(rows) => seen.members.push((address.clone(), rows)),
                Err(error) => seen.silent.push(error.to_string()),
            }
        }
        seen
    }
}

impl Seen {
    fn is_empty(&self) -> bool {
        self.view.is_none() && self.members.is_empty()
    }

    fn to_json(&self) -> Value {
        let mut value = self.view.as_ref().map_or_else(|| json!({}), View::to_json);
        if !self.members.is_empty() {
            let of_job = |(address, rows): &(Rendezvous, Vec<MemberRow>)| -> Vec<Value> {
                let row = |row| {
                    let mut value = row_to_json(row);
                    value["job"] = json!(address.to_string());
                    value
                };
                rows.iter().map(row).collect()
            };
            value["members"] = self.members.iter().flat_map(of_job).collect();
        }
        value
    }
}

/// The screen: calls and ranks, then members, then what does not answer.
impl fmt::Display for Seen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { view, members, silent } = self;
        if let Some(view) = view {
            write!(formatter, "{view}")?;
        }
        for (number, (address, rows)) in members.iter().enumerate() {
            if number > 0 || view.is_some() {
                writeln!(formatter)?;
            }
            write!(formatter, "members of {address}\n\n{}", table(rows))?;
        }
        silent.iter().try_for_each(|reason| writeln!(formatter, "\n{}", visible(reason)))
    }
}

// Reads the metrics of the ranks of a job.
//
// Any process may answer, so answers are limited in time and length, and unknown lines are
// ignored.

/// Longest time for one rank's answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 16 << 20;
/// Most ports that are tried from an address on.
const PORTS_MAX: u32 = 1024;

/// Collective, algorithm, and the largest size in bytes.
type ShapeKey = (String, String, u64);

/// Counters of calls of a shape.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Calls {
    calls: f64,
    bytes: f64,
    seconds: f64,
}

/// The metrics of a rank about a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ArrivalSkew {
    last: f64,
    heard: f64,
    sum_s: f64,
    longest_s: f64,
}

/// The counters of a rank's rounds of partial all-reduces.
#[derive(Clone, Debug, Default, PartialEq)]
struct Rounds {
    rounds: f64,
    late: f64,
    carried: f64,
    dropped: f64,
    corrected: f64,
    missed: f64,
    /// By rank: the rounds that its contribution is in.
    counted: BTreeMap<Rank, f64>,
}

/// A rank's training by a scheme.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Training {
    steps: f64,
    seconds: f64,
    waiting_s: f64,
    bytes: f64,
    staleness_mean: f64,
    staleness_max: f64,
    /// If it was measured.
    spread: Option<f64>,
}

/// The metrics of one rank.
#[derive(Clone, Debug, Default, PartialEq)]
struct RankState {
    world_size: u32,
    age_s: f64,
    has_failed: bool,
    under_way: f64,
    waits_for: Option<Rank>,
    shapes: BTreeMap<ShapeKey, Calls>,
    peers: BTreeMap<Rank, ArrivalSkew>,
    /// If it has made any.
    rounds: Option<Rounds>,
    /// If there is one.
    training: Option<Training>,
}

/// The metrics of all ranks that answered.
#[derive(Clone, Debug, Default)]
struct Snapshot {
    at: Nanos,
    ranks: BTreeMap<Rank, RankState>,
}

impl Snapshot {
    /// Asks the ranks from each address on, as many as the first says there are.
    fn take(addresses: &[MetricsAddress], now: Nanos) -> Result<Self, String> {
        let mut snapshot = Self { at: now, ranks: BTreeMap::new() };
        let mut failure = None;
        for MetricsAddress(first) in addresses {
            let mut ports = 1;
            let mut offset = 0;
            while offset < ports {
                let Some(port) = u16::try_from(u32::from(first.port()) + offset).ok() else { break };
                let address = SocketAddr::new(first.ip(), port);
                let answer = ask(address).map(|text| read(&text));
                match answer {
                    Ok(Some((rank, state))) => {
                        ports = ports.max(state.world_size.min(PORTS_MAX));
                        snapshot.ranks.insert(rank, state);
                    }
                    Ok(None) => {
                        failure.get_or_insert_with(|| {
                            format!("no job: {address} (it serves other things); see {METRICS_VARIABLE}")
                        });
                    }
                    Err(error) => {
                        failure.get_or_insert_with(|| {
                            format!(
                                "no job: {address} ({error}); start it with {METRICS_VARIABLE}={port}, or a subcommand with \
                                 '--metrics {port}'",
                                port = first.port()
                            )
                        });
                        // Ranks of other hosts listen there.
                        if offset == 0 {
                            break;
                        }
                    }
                }
                offset += 1;
            }
        }
        match failure {
            Some(failure) if snapshot.ranks.is_empty() => Err(failure),
            _ => Ok(snapshot),
        }
    }
}

/// The metrics served at an address.
fn ask(address: SocketAddr) -> std::io::Result<String> {
    let until = clock::now() + PATIENCE;
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(
        format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes(),
    )?;
    let mut answer = Vec::new();
    let mut piece = vec![0; 64 << 10];
    loop {
        let left = until.since(clock::now());
        if left.is_zero() || answer.len() as u64 > ANSWER_BYTES_MAX {
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let read = stream.read(&mut piece)?;
        if read == 0 {
            break;
        }
        answer.extend_from_slice(&piece[..read]);
    }
    let text = String::from_utf8_lossy(&answer);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok(body.to_owned())
}

/// Whose metrics they are, and what they say; `None` if they are something else's.
fn read(text: &str) -> Option<(Rank, RankState)> {
    let mut found = None;
    let mut state = RankState::default();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, labels, value)) = sample(line) else { continue };
        let label = |key: &str| labels.iter().find(|(name, _)| *name == key).map(|(_, value)| *value);
        let rank = label("rank").and_then(|rank| rank.parse::<Rank>().ok());
        found = found.or(rank);
        if rank != found || !value.is_finite() {
            continue;
        }
        let peer = label("peer").and_then(|peer| peer.parse::<Rank>().ok());
        match (name, peer) {
            ("world_size", _) => state.world_size = value as u32,
            ("age_seconds", _) => state.age_s = value,
            ("failed", _) => state.has_failed = value > 0.0,
            ("under_way", _) => state.under_way = value,
            ("waits_for", Some(peer)) => state.waits_for = Some(peer),
            ("rounds_total", _) => state.rounds.get_or_insert_default().rounds = value,
            ("late_total", _) => state.rounds.get_or_insert_default().late = value,
            ("carried_total", _) => state.rounds.get_or_insert_default().carried = value,
            ("corrected_total", _) => state.rounds.get_or_insert_default().corrected = value,
            ("dropped_total", _) => state.rounds.get_or_insert_default().dropped = value,
            ("missed_total", _) => state.rounds.get_or_insert_default().missed = value,
            ("counted_total", Some(peer)) => {
                state.rounds.get_or_insert_default().counted.insert(peer, value);
            }
            ("training_steps_total", _) => state.training.get_or_insert_default().steps = value,
            ("training_seconds_total", _) => state.training.get_or_insert_default().seconds = value,
            ("training_waiting_seconds_total", _) => {
                state.training.get_or_insert_default().waiting_s = value;
            }
            ("training_bytes_total", _) => state.training.get_or_insert_default().bytes = value,
            ("training_staleness_mean", _) => {
                state.training.get_or_insert_default().staleness_mean = value;
            }
            ("training_staleness_max", _) => state.training.get_or_insert_default().staleness_max = value,
            ("training_spread", _) => state.training.get_or_insert_default().spread = Some(value),
            ("last_total", Some(peer)) => state.peers.entry(peer).or_default().last = value,
            ("arrival_skew_seconds_sum", Some(peer)) => state.peers.entry(peer).or_default().sum_s = value,
            ("arrival_skew_seconds_count", Some(peer)) => state.peers.entry(peer).or_default().heard = value,
            ("longest_arrival_skew_seconds", Some(peer)) => {
                state.peers.entry(peer).or_default().longest_s = value
            }
            ("calls_total" | "bytes_total" | "call_seconds_total", _) => {
                let text = |key| label(key).unwrap_or_default().to_owned();
                let bytes_max = label("bytes_max").and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
                let calls =
                    state.shapes.entry((text("collective"), text("algorithm"), bytes_max)).or_default();
                match name {
                    "calls_total" => calls.calls = value,
                    "bytes_total" => calls.bytes = value,
                    _ => calls.seconds = value,
                }
            }
            _ => {}
        }
    }
    found.filter(|_| state.world_size > 0).map(|rank| (rank, state))
}

/// Name, labels, value.
type Sample<'a> = (&'a str, Vec<(&'a str, &'a str)>, f64);

/// Name without `pleach_`, labels and value of a line. Values of our labels hold neither commas nor
/// quotes.
fn sample(line: &str) -> Option<Sample<'_>> {
    let (series, value) = line.strip_prefix("pleach_")?.rsplit_once(' ')?;
    let (name, labels) = series.split_once('{')?;
    let labels = labels.strip_suffix('}')?.split(',').filter_map(|label| {
        let (key, value) = label.split_once('=')?;
        Some((key, value.trim_matches('"')))
    });
    Some((name, labels.collect(), value.parse().ok()?))
}

// Combines the snapshots of all ranks to a screen or to JSON.

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
    rounds: Option<RoundsRow>,
    training: Option<TrainingRow>,
}

/// A rank in a training, since the snapshot before.
#[derive(Debug, PartialEq)]
struct TrainingRow {
    steps: u64,
    steps_per_s: f64,
    wait_share: f64,
    bytes_per_step: f64,
    staleness_mean: f64,
    staleness_max: u64,
    spread: Option<f64>,
}

/// A rank in the rounds of partial all-reduces, since the group was made.
#[derive(Debug, PartialEq)]
struct RoundsRow {
    /// The share of rounds that its contribution is in, by the rank that has seen most rounds.
    share: f64,
    /// How many of its contributions came too late, what became of them, and how many results it
    /// never saw.
    late: u64,
    carried: u64,
    dropped: u64,
    corrected: u64,
    missed: u64,
}

#[derive(Debug, PartialEq)]
struct View {
    world_size: u32,
    answered: usize,
    age_s: f64,
    shapes: Vec<ShapeRow>,
    ranks: Vec<RankRow>,
}

/// The difference of two snapshots, or the counts since the group was made.
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

/// The rank in the rounds that it and the others have counted.
fn rounds_row(now: &Snapshot, rank: Rank, state: &RankState) -> Option<RoundsRow> {
    let own = state.rounds.as_ref()?;
    let all = now.ranks.values().filter_map(|state| state.rounds.as_ref());
    let most = all.max_by(|left, right| left.rounds.total_cmp(&right.rounds)).unwrap_or(own);
    Some(RoundsRow {
        share: ratio(most.counted.get(&rank).copied().unwrap_or(0.0), most.rounds).min(1.0),
        late: own.late as u64,
        carried: own.carried as u64,
        dropped: own.dropped as u64,
        corrected: own.corrected as u64,
        missed: own.missed as u64,
    })
}

/// A training since the snapshot before, or since its first step.
fn training_row(now: &Training, before: Option<&Training>) -> TrainingRow {
    // A training that has begun since counts from zero, and one that has not gone on shows all.
    let before = before.filter(|before| before.steps < now.steps && before.seconds < now.seconds);
    let before = before.copied().unwrap_or_default();
    let (steps, seconds) = (now.steps - before.steps, now.seconds - before.seconds);
    TrainingRow {
        steps: now.steps as u64,
        steps_per_s: ratio(steps, seconds),
        wait_share: ratio((now.waiting_s - before.waiting_s).max(0.0), seconds).min(1.0),
        bytes_per_step: ratio((now.bytes - before.bytes).max(0.0), steps),
        staleness_mean: now.staleness_mean,
        staleness_max: now.staleness_max as u64,
        spread: now.spread,
    }
}

fn ratio(above: f64, below: f64) -> f64 {
    if below > 0.0 { above / below } else { 0.0 }
}

impl View {
    /// With rates since the snapshot before, or since the group was made.
    fn new(now: &Snapshot, before: Option<&Snapshot>) -> Self {
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
                rounds: rounds_row(now, *rank, state),
                training: state.training.as_ref().map(|training| {
                    training_row(training, of_before(rank).and_then(|before| before.training.as_ref()))
                }),
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

    fn to_json(&self) -> Value {
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
                "longest_us": rounded(row.longest_us, 3),
                "rounds": row.rounds.as_ref().map(|rounds| json!({
                    "share": rounded(rounds.share, 4),
                    "late": rounds.late,
                    "carried": rounds.carried,
                    "dropped": rounds.dropped,
                    "corrected": rounds.corrected,
                    "missed": rounds.missed
                })),
                "training": row.training.as_ref().map(|training| json!({
                    "steps": training.steps,
                    "steps_per_s": rounded(training.steps_per_s, 3),
                    "wait_share": rounded(training.wait_share, 4),
                    "bytes_per_step": rounded(training.bytes_per_step, 1),
                    "staleness_mean": rounded(training.staleness_mean, 4),
                    "staleness_max": training.staleness_max,
                    "spread": training.spread.map(|spread| rounded(spread, 6))
                }))
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
        let in_rounds = || self.ranks.iter().filter_map(|row| Some((row.rank, row.rounds.as_ref()?)));
        if in_rounds().next().is_some() {
            writeln!(
                formatter,
                "\n{:<6} {:>10} {:>9} {:>8} {:>8} {:>9} {:>12}",
                "rank", "in rounds", "late", "carried", "dropped", "corrected", "missed"
            )?;
        }
        for (rank, RoundsRow { share, late, carried, dropped, corrected, missed }) in in_rounds() {
            writeln!(
                formatter,
                "{rank:<6} {:>9.1}% {late:>9} {carried:>8} {dropped:>8} {corrected:>9} {missed:>12}",
                share * 100.0
            )?;
        }
        let in_training = || self.ranks.iter().filter_map(|row| Some((row.rank, row.training.as_ref()?)));
        if in_training().next().is_some() {
            writeln!(
                formatter,
                "\n{:<6} {:>10} {:>9} {:>8} {:>12} {:>12} {:>10}",
                "rank", "steps", "steps/s", "waiting", "bytes/step", "staleness", "spread"
            )?;
        }
        for (rank, row) in in_training() {
            let staleness = format!("{:.1} of {}", row.staleness_mean, row.staleness_max);
            let spread = row.spread.map_or_else(|| "-".to_owned(), |spread| format!("{spread:.1e}"));
            writeln!(
                formatter,
                "{rank:<6} {:>10} {:>9.1} {:>7.1}% {:>12.0} {staleness:>12} {spread:>10}",
                row.steps,
                row.steps_per_s,
                row.wait_share * 100.0,
                row.bytes_per_step
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The part of the frames that fits a terminal of `rows` and `columns`.
    fn shown(frames: &[String], rows: usize, columns: usize) -> Vec<String> {
        let mut screen = vec![String::new(); rows];
        for frame in frames {
            for piece in frame.split("\x1b[").filter(|piece| piece.contains(";1H")) {
                let (row, text) = piece.split_once(";1H").expect("a row");
                let row: usize = row.parse().expect("a number");
                // Rows that are not there are the last one.
                screen[row.min(rows) - 1] = text.chars().take(columns).collect();
            }
            assert!(!frame.contains('\n'), "nothing may scroll: {frame:?}");
        }
        screen
    }

    #[test]
    fn a_screen_takes_the_place_of_the_one_before_line_by_line() {
        let mut screen = Screen::default();
        let frames = [screen.show("one\ntwo\nthree\n"), screen.show("four\nfive\n")];
        assert_eq!(shown(&frames[..1], 4, 80), ["one", "two", "three", ""]);
        assert_eq!(shown(&frames, 4, 80), ["four", "five", "", ""]);
        assert!(frames[0].starts_with("\x1b[2J") && !frames[1].contains("[2J"), "it is cleared once");
        assert!(frames.iter().all(|frame| frame.ends_with("\x1b[?7h")), "lines wrap again afterwards");
    }

    #[test]
    fn what_is_too_long_for_the_terminal_keeps_its_head() {
        let text: String = (0..50).map(|number| format!("line {number} and more\n")).collect();
        let frame = Screen::default().show(&text);
        let screen = shown(&[frame], 10, 6);
        assert_eq!(screen[..3], ["line 0", "line 1", "line 2"]);
    }
}

#[cfg(test)]
mod scrape_tests {
    use super::*;

    #[test]
    fn what_a_rank_serves_is_understood_and_nonsense_left_out() {
        let text = "# TYPE pleach_world_size gauge\npleach_world_size{rank=\"1\"} 4\nnonsense\npleach_x{ 3\n\
            pleach_waits_for{rank=\"1\",peer=\"3\"} 1\npleach_waits_for{rank=\"2\",peer=\"0\"} 1\n\
            pleach_calls_total{rank=\"1\",collective=\"all-reduce\",algorithm=\"ring\",bytes_max=\"64\"} 7\n\
            pleach_bytes_total{rank=\"1\",collective=\"all-reduce\",algorithm=\"ring\",bytes_max=\"64\"} NaN\n\
            pleach_arrival_skew_seconds_sum{rank=\"1\",peer=\"3\"} 0.5\n";
        let (rank, state) = read(text).unwrap();
        assert_eq!(state.rounds, None);
        assert_eq!((rank, state.world_size, state.waits_for), (1, 4, Some(3)));
        let calls = state.shapes[&("all-reduce".to_owned(), "ring".to_owned(), 64)];
        assert_eq!((calls.calls, calls.bytes), (7.0, 0.0));
        assert_eq!(state.peers[&3].sum_s, 0.5);
        let text = "pleach_world_size{rank=\"1\"} 2\npleach_rounds_total{rank=\"1\"} 8\n\
            pleach_late_total{rank=\"1\"} 6\npleach_carried_total{rank=\"1\"} 2\npleach_dropped_total{rank=\"1\"} 3\n\
            pleach_corrected_total{rank=\"1\"} 1\npleach_missed_total{rank=\"1\"} 1\n\
            pleach_counted_total{rank=\"1\",peer=\"0\"} 8\npleach_counted_total{rank=\"1\",peer=\"1\"} 2\n";
        let (rank, state) = read(text).unwrap();
        let snapshot = Snapshot { at: Nanos(0), ranks: [(rank, state)].into() };
        let view = View::new(&snapshot, None);
        let row = RoundsRow { share: 0.25, late: 6, carried: 2, dropped: 3, corrected: 1, missed: 1 };
        assert_eq!(view.ranks[0].rounds, Some(row));
        assert!(view.to_string().contains("in rounds") && view.to_string().contains("25.0%"), "{view}");
        let expected = json!({
            "share": 0.25, "late": 6, "carried": 2, "dropped": 3, "corrected": 1, "missed": 1
        });
        assert_eq!(view.to_json()["ranks"][0]["rounds"], expected);
        assert_eq!(view.ranks[0].training, None);
        let at = |steps: u64, waiting: f64| {
            let text = format!(
                "pleach_world_size{{rank=\"1\"}} 2\npleach_training_steps_total{{rank=\"1\"}} {steps}\n\
                 pleach_training_seconds_total{{rank=\"1\"}} {steps}\n\
                 pleach_training_waiting_seconds_total{{rank=\"1\"}} {waiting}\n\
                 pleach_training_bytes_total{{rank=\"1\"}} 4000\npleach_training_staleness_max{{rank=\"1\"}} 9\n\
                 pleach_training_spread{{rank=\"1\"}} 0.25\n"
            );
            let (rank, state) = read(&text).expect("is a rank's");
            Snapshot { at: Nanos(0), ranks: [(rank, state)].into() }
        };
        let row = |view: &View| view.to_json()["ranks"][0]["training"].clone();
        let view = View::new(&at(40, 10.0), None);
        assert_eq!(
            (row(&view)["steps_per_s"].clone(), row(&view)["bytes_per_step"].clone()),
            (json!(1.0), json!(100.0))
        );
        assert_eq!(
            (row(&view)["wait_share"].clone(), row(&view)["spread"].clone()),
            (json!(0.25), json!(0.25))
        );
        assert!(view.to_string().contains("staleness") && view.to_string().contains("0.0 of 9"), "{view}");
        let since = View::new(&at(40, 10.0), Some(&at(20, 0.0)));
        assert_eq!(row(&since)["wait_share"], json!(0.5), "of the time since");
        for foreign in ["", "go_goroutines 3\n", "<html>", "pleach_failed{rank=\"0\"} 0\n"] {
            assert_eq!(read(foreign), None, "{foreign}");
        }
    }
}
