//! What a rank's policy was told, as a file, and the same told to a new policy.
//!
//! A log has a line of JSON for each event, with its time and, behind a tab, the actions that
//! followed. [`replay`] feeds the events to a policy of the same scheme and compares each action.
//! So what a rank did can be looked at again, step by step, without its data and without its peers.
//!
//! **Invariants:** actions are a function of the events so far and their times, so each log is
//! replayed without a difference, also that of a rank that failed. A log that was changed never
//! tells a policy of an event that no driver tells it of, and ends in a [`LogError`].

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;
use serde::{Deserialize, Serialize};

use crate::layout::Layout;
use crate::policy::{Action, Actions, Event, OperationId, Outcome, Policy};
use crate::scheme::{PIECE_BYTES, Scheme};
use crate::state::State;

/// Counts changes of the form of logs.
const FORMAT: u32 = 3;

/// Most ranks of a training with a log: a policy has numbers for each rank.
const RANKS_MAX: u32 = 1 << 14;

/// Most buckets of a log, and pieces of them: a policy has a number for each of them.
const BUCKETS_MAX: usize = 1 << 20;

/// Why a log is not written, or not replayed.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum LogError {
    /// A file cannot be written or read.
    #[error("log not {done}: {} ({error}); name a folder with space that can be written and read", .path.display())]
    Io {
        /// What was not done, as "written".
        done: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The folder has no logs, or not those of all ranks of one training.
    #[error("no logs of one training in {}: {reason}; name a folder that was given by --log", .folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A line is none of a log.
    #[error("bad log: {} line {line}: {reason}; replay it with the version of pleach that wrote it", .path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// The policy acts otherwise now.
    #[error(
        "policy differs: {} line {line}: after {event} it did {logged}, and now {replayed}; \
         replay it with the version of pleach that wrote it, or report it",
        .path.display()
    )]
    Different {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The event.
        event: String,
        /// The actions in the log.
        logged: String,
        /// The actions now.
        replayed: String,
    },
}

/// A line of a log; actions follow an event behind a tab.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Line {
    Training {
        format: u32,
        scheme: String,
        layers: Vec<usize>,
        rank: Rank,
        ranks: u32,
        /// Whether the training is bucket by bucket.
        #[serde(default)]
        by_bucket: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part_of: Option<Whole>,
    },
    /// What the policy remembered when it began, from a checkpoint.
    State(Vec<u8>),
    Event {
        at: u64,
        event: Event,
    },
    End {
        events: u64,
    },
}

/// The training of which the ranks that a policy knows are a part: those of a
/// [hybrid](crate::hybrid) training with one shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Whole {
    scheme: String,
    rank: Rank,
    ranks: u32,
}

impl Whole {
    /// This rank among all of a training by a scheme.
    pub(crate) fn new(scheme: &Scheme, (rank, ranks): (Rank, u32)) -> Self {
        Self { scheme: scheme.to_string(), rank, ranks }
    }

    /// Whether a rank among those with its shard has that place in the training.
    fn has(&self, (rank, ranks): (Rank, u32)) -> bool {
        let is_hybrid = |scheme| matches!(scheme, Scheme::Hybrid { groups: Some(groups) } if groups == ranks);
        self.scheme.parse().is_ok_and(is_hybrid)
            && self.ranks <= RANKS_MAX
            && self.ranks > 0
            && self.ranks.is_multiple_of(ranks)
            && self.rank / (self.ranks / ranks) == rank
    }
}

struct Writer {
    path: PathBuf,
    part_of: Option<Whole>,
    out: BufWriter<File>,
    events: u64,
    failed: Option<io::Error>,
}

impl Writer {
    fn line(&mut self, line: &Line, actions: Option<&Actions>) {
        let mut write = || -> io::Result<()> {
            serde_json::to_writer(&mut self.out, line)?;
            if let Some(actions) = actions {
                self.out.write_all(b"\t")?;
                serde_json::to_writer(&mut self.out, actions.as_slice())?;
            }
            self.out.write_all(b"\n")
        };
        if self.failed.is_none()
            && let Err(error) = write()
        {
            self.failed = Some(error);
        }
    }
}

/// The log of a rank that is written. Its policy writes, and its driver asks whether that failed.
#[derive(Clone)]
pub(crate) struct Log(Arc<Mutex<Writer>>);

impl Log {
    /// Begins the log of a rank in a folder. With a whole the rank is named by its number there.
    pub(crate) fn create(
        folder: &Path,
        scheme: &Scheme,
        layout: &Layout,
        (rank, ranks): (Rank, u32),
        by_bucket: bool,
        part_of: Option<Whole>,
    ) -> Result<Self, LogError> {
        let number = part_of.as_ref().map_or(rank, |whole| whole.rank);
        let path = folder.join(format!("rank-{number}.log"));
        let created = fs::create_dir_all(folder).and_then(|()| File::create(&path));
        let file = created.map_err(|error| LogError::Io { done: "written", path: path.clone(), error })?;
        let out = BufWriter::new(file);
        let mut writer = Writer { path, part_of: part_of.clone(), out, events: 0, failed: None };
        let (scheme, layers) = (scheme.to_string(), layout.layers().to_vec());
        let line = Line::Training { format: FORMAT, scheme, layers, rank, ranks, by_bucket, part_of };
        writer.line(&line, None);
        Ok(Self(Arc::new(Mutex::new(writer))))
    }

    /// The folder in which it is, and what it is a part of.
    pub(crate) fn place(&self) -> (PathBuf, Option<Whole>) {
        self.with(|writer| {
            (writer.path.parent().map(Path::to_owned).unwrap_or_default(), writer.part_of.clone())
        })
    }

    /// The same policy, whose events are written.
    pub(crate) fn of(&self, policy: Box<dyn Policy>) -> Box<dyn Policy> {
        Box::new(Logged { policy, log: self.clone() })
    }

    fn with<T>(&self, body: impl FnOnce(&mut Writer) -> T) -> T {
        body(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Ends the log.
    pub(crate) fn end(&self) -> Result<(), LogError> {
        self.with(|writer| {
            let events = writer.events;
            writer.line(&Line::End { events }, None);
            let flushed = writer.failed.take().map_or_else(|| writer.out.flush(), Err);
            let path = writer.path.clone();
            flushed.map_err(|error| LogError::Io { done: "written", path, error })
        })
    }
}

struct Logged {
    policy: Box<dyn Policy>,
    log: Log,
}

impl Policy for Logged {
    fn on(&mut self, event: Event, now: Nanos, actions: &mut Actions) {
        self.policy.on(event, now, actions);
        self.log.with(|writer| {
            writer.line(&Line::Event { at: now.0, event }, Some(actions));
            writer.events += 1;
        });
    }

    fn state(&mut self, state: &mut State<'_>) {
        self.policy.state(state);
        if state.is_restoring() {
            let mut own = State::saving();
            self.policy.state(&mut own);
            if let Ok(bytes) = own.finish() {
                self.log.with(|writer| writer.line(&Line::State(bytes), None));
            }
        }
    }

    fn remark(&self) -> Option<String> {
        self.policy.remark()
    }
}

/// A log that was replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replayed {
    /// The text of the scheme.
    pub scheme: String,
    /// The rank.
    pub rank: Rank,
    /// The number of ranks.
    pub ranks: u32,
    /// The events.
    pub events: u64,
    /// The actions, all of which are the same.
    pub actions: u64,
    /// Whether the log was ended; that of a rank that failed is not.
    pub is_complete: bool,
}

/// Replays the logs of all ranks of a training.
///
/// # Errors
///
/// See [`LogError`].
pub fn replay_all(folder: &Path) -> Result<Vec<Replayed>, LogError> {
    let wrong = |reason| LogError::Folder { folder: folder.to_owned(), reason };
    let read = |error| LogError::Io { done: "read", path: folder.to_owned(), error };
    let mut logs = 0;
    for entry in fs::read_dir(folder).map_err(read)? {
        let name = entry.map_err(read)?.file_name();
        let name = name.to_string_lossy();
        logs += u32::from(name.starts_with("rank-") && name.ends_with(".log"));
    }
    if logs == 0 {
        return Err(wrong("there is no rank-0.log".to_owned()));
    }
    let mut all: Vec<Replayed> = Vec::new();
    for rank in 0..logs {
        let replayed = replay(&folder.join(format!("rank-{rank}.log")))?;
        let first = all.first().unwrap_or(&replayed);
        if (replayed.rank, replayed.ranks, &replayed.scheme) != (rank, logs, &first.scheme) {
            return Err(wrong(format!(
                "log {rank} of {logs} is of rank {} of {}, by {}",
                replayed.rank, replayed.ranks, replayed.scheme
            )));
        }
        all.push(replayed);
    }
    Ok(all)
}

/// Feeds a log to a policy again and compares each action.
///
/// # Errors
///
/// The log cannot be read, or the policy acts otherwise.
pub fn replay(path: &Path) -> Result<Replayed, LogError> {
    let read = |error| LogError::Io { done: "read", path: path.to_owned(), error };
    let mut lines = BufReader::new(File::open(path).map_err(read)?).lines().zip(1..);
    let form = |line, reason| LogError::Form { path: path.to_owned(), line, reason };
    let first = lines.next().map(|(line, _)| line).transpose().map_err(read)?.unwrap_or_default();
    let mut rank = Replay::begin(&first).map_err(|reason| form(1, reason))?;
    for (text, line) in lines {
        let text = text.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidData => form(line, "it is not UTF-8".to_owned()),
            _ => read(error),
        })?;
        let step = rank.line(&text).map_err(|reason| form(line, reason))?;
        if let Some(Difference { event, logged, replayed }) = step {
            return Err(LogError::Different { path: path.to_owned(), line, event, logged, replayed });
        }
    }
    Ok(rank.replayed)
}

struct Difference {
    event: String,
    logged: String,
    replayed: String,
}

/// How an operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Averaged,
    Totalled,
    Combined,
    Left,
    Read,
    Written,
    /// Of a write that does not wait, to this rank.
    WrittenOrRefused(Rank),
}

impl End {
    fn allows(self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Averaged => self == Self::Averaged,
            Outcome::Totalled => self == Self::Totalled,
            Outcome::Combined { .. } => self == Self::Combined,
            Outcome::Left { .. } => self == Self::Left,
            Outcome::Read { .. } => self == Self::Read,
            Outcome::Written => matches!(self, Self::Written | Self::WrittenOrRefused(_)),
            Outcome::Refused { by } => self == Self::WrittenOrRefused(by),
        }
    }
}

/// A policy that is told a log.
struct Replay {
    policy: Box<dyn Policy>,
    /// The number of its rank, and of all that it knows.
    place: (Rank, u32),
    buckets: usize,
    actions: Actions,
    /// What was asked for and has not ended. A log that was changed must not tell the policy of
    /// more.
    under_way: Vec<(OperationId, End)>,
    /// Places of the sums that are under way and were not told, in order.
    totals: Vec<u32>,
    computing: Option<u64>,
    /// Whether it was told to come to rest, and not to go on yet.
    is_paused: bool,
    /// Whether it was told that there is no next step.
    is_stopped: bool,
    replayed: Replayed,
}

impl Replay {
    fn begin(line: &str) -> Result<Self, String> {
        let Ok(Line::Training { format, scheme, layers, rank, ranks, by_bucket, part_of }) =
            serde_json::from_str(line)
        else {
            return Err("it does not begin as a log".to_owned());
        };
        if format != FORMAT {
            return Err(format!("format {format}, and this version of pleach reads {FORMAT}"));
        }
        let layout = Layout::of(&layers);
        let parameters = layout.parameters();
        if rank >= ranks || ranks > RANKS_MAX || parameters == 0 || parameters == usize::MAX {
            return Err(format!("rank {rank} of {ranks}, {parameters} parameters"));
        }
        if let Some(whole) = part_of.as_ref().filter(|whole| !whole.has((rank, ranks))) {
            let Whole { scheme, rank: number, ranks: all } = whole;
            return Err(format!(
                "rank {number} of {all} by {scheme}, and rank {rank} of {ranks} of its shard"
            ));
        }
        let parsed: Scheme = scheme.parse().map_err(|error| format!("{error}"))?;
        if let Scheme::Sync { bucket_bytes, .. } = parsed
            && parameters / (bucket_bytes.min(PIECE_BYTES) / size_of::<f32>()).max(1) > BUCKETS_MAX
        {
            return Err(format!("{parameters} parameters in buckets of {bucket_bytes} bytes"));
        }
        let plan = if by_bucket {
            parsed.plan_by_bucket(&layout, rank, ranks)
        } else {
            parsed.plan(&layout, rank, ranks)
        };
        let plan = plan.map_err(|error| error.to_string())?;
        let Whole { scheme, rank: number, ranks: all } = part_of.unwrap_or(Whole { scheme, rank, ranks });
        Ok(Self {
            policy: plan.policy,
            place: (rank, ranks),
            buckets: plan.buckets.len(),
            actions: Actions::default(),
            under_way: Vec::new(),
            totals: Vec::new(),
            computing: None,
            is_paused: false,
            is_stopped: false,
            replayed: Replayed {
                scheme,
                rank: number,
                ranks: all,
                events: 0,
                actions: 0,
                is_complete: false,
            },
        })
    }

    fn line(&mut self, text: &str) -> Result<Option<Difference>, String> {
        let (line, actions) = text.split_once('\t').unwrap_or((text, ""));
        match serde_json::from_str(line).map_err(|error| error.to_string())? {
            Line::Event { at, event } => self.event(event, at, actions),
            Line::State(bytes) if self.replayed.events == 0 => {
                let mut state = State::restoring(&bytes);
                self.policy.state(&mut state);
                state.finish().map(|_| None).map_err(|error| error.to_string())
            }
            Line::End { events } if events == self.replayed.events => {
                self.replayed.is_complete = true;
                Ok(None)
            }
            line => Err(format!("{line:?} after {} events", self.replayed.events)),
        }
    }

    fn event(&mut self, event: Event, at: u64, logged: &str) -> Result<Option<Difference>, String> {
        if !self.may_come(event) {
            return Err(format!("{event:?} cannot come here"));
        }
        self.policy.on(event, Nanos(at), &mut self.actions);
        let replayed = serde_json::to_string(self.actions.as_slice()).map_err(|error| error.to_string())?;
        for action in self.actions.drain() {
            self.replayed.actions += 1;
            let operation = match action {
                Action::Compute { step } | Action::Begin { step } => {
                    self.computing = Some(step);
                    continue;
                }
                Action::Average { id, .. } | Action::AverageCompressed { id, .. } => (id, End::Averaged),
                Action::Contribute { id, .. } => (id, End::Combined),
                Action::Total { id, numbers } => {
                    self.totals = (0..numbers.len() as u32).collect();
                    (id, End::Totalled)
                }
                Action::Leave { id, .. } => (id, End::Left),
                Action::Read { id, .. } => (id, End::Read),
                Action::Write { id, waits: true, .. } => (id, End::Written),
                Action::Write { id, to, .. } => (id, End::WrittenOrRefused(to)),
                _ => continue,
            };
            self.under_way.push(operation);
        }
        self.replayed.events += 1;
        let differs = replayed != logged;
        let logged = logged.to_owned();
        Ok(differs.then(|| Difference { event: format!("{event:?}"), logged, replayed }))
    }

    /// Whether an event follows from what was asked for.
    fn may_come(&mut self, event: Event) -> bool {
        let ((own, ranks), is_first) = (self.place, self.replayed.events == 0);
        match event {
            Event::Start => is_first,
            Event::Resume => {
                let is_resting = std::mem::take(&mut self.is_paused) && self.under_way.is_empty();
                is_first || is_resting
            }
            // Both take the place of a step that was asked for.
            Event::Pause => {
                self.is_paused = self.computing.take().is_some() && !self.is_stopped;
                self.is_paused
            }
            Event::Stop => {
                self.is_stopped = self.computing.take().is_some() && !self.is_paused && !self.is_stopped;
                self.is_stopped
            }
            Event::Ready(bucket) | Event::Needed(bucket) => self.computing.is_some() && bucket < self.buckets,
            Event::Computed { step } => self.computing.take() == Some(step),
            Event::Done(id, outcome) => {
                if outcome == Outcome::Totalled && !self.totals.is_empty() {
                    return false;
                }
                let is_ended = |(asked, end): &(OperationId, End)| *asked == id && end.allows(outcome);
                let place = self.under_way.iter().position(is_ended);
                place.map(|place| self.under_way.swap_remove(place)).is_some()
            }
            Event::Totalled { place, .. } => {
                let is_next = self.totals.first() == Some(&place);
                self.totals.drain(..usize::from(is_next));
                is_next
            }
            // Trainings in sessions have no logs.
            Event::Committed | Event::Membership { .. } => false,
            Event::Arrived { from, .. } | Event::Told { from, .. } => {
                !is_first && from < ranks && from != own
            }
        }
    }
}
