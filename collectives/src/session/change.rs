//! What becomes of a step, and why members change.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pleach_membership::{Process, Reason, Record, Seat};
use pleach_transport::RegisterError;
use pleach_transport::cuda::CudaError;

use crate::group::{CollectiveError, GroupError, JoinGroupError, SplitError};

/// From one epoch to the next that a member enters: who left, who came, and with which step the
/// go on. Members that enter one epoch from the same one have equal changes, also where
/// some of them have heard of epochs in between that they did not enter, but for
/// [`Change::unreceived`], which is of this process's own pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The number of the epoch that ended.
    pub from: u64,
    /// The number of the epoch that begins.
    pub epoch: u64,
    /// The step with which it begins.
    pub step: u64,
    /// Who left, and why, by seats. Who left with an epoch in between is [`Reason::Unreachable`].
    pub left: Vec<(Process, Reason)>,
    /// Who came, by seats.
    pub came: Vec<Process>,
    /// The members of the epoch that begins, by rank.
    pub members: Vec<Process>,
    /// Members whose step failed, by seats, where nobody was lost. Their step has returned an
    /// error, or they could not make the group of the epoch or a part of it. Of several such
    /// members those are named of which the proposer of the change had heard.
    pub failed: Vec<Process>,
    /// The pairs of this process and members that were there before, in which messages were sent
    /// ([`Group::send`](crate::Group::send)) and not received when the epoch ended, by seats. No
    /// message crosses an epoch, so nobody receives them. Of pairs with who left nothing is known.
    pub unreceived: Vec<Unreceived>,
}

/// Messages of a pair that were sent, and not received when the epoch ended. Both ends count the
/// same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreceived {
    peer: Process,
    to: u64,
    from: u64,
}

impl Unreceived {
    pub(crate) fn new(peer: Process, to: u64, from: u64) -> Self {
        Self { peer, to, from }
    }

    /// The other process.
    #[must_use]
    pub fn peer(&self) -> Process {
        self.peer
    }

    /// Those of this process to it.
    #[must_use]
    pub fn to(&self) -> u64 {
        self.to
    }

    /// Those of it to this process.
    #[must_use]
    pub fn from(&self) -> u64 {
        self.from
    }
}

impl Change {
    /// From the epoch of one record to that of a later one. Only the two records count, so the
    /// change is the same on all members.
    pub(crate) fn between(before: &Record, after: &Record, unreceived: Vec<Unreceived>) -> Arc<Self> {
        let reasons: BTreeMap<Process, Reason> =
            after.causes().iter().map(|cause| (cause.process, cause.reason)).collect();
        // Who left with a record between the two is not named by this one.
        let reason = |process: Process| reasons.get(&process).copied().unwrap_or(Reason::Unreachable);
        let left = before.members().iter().copied().filter(|member| !after.contains(*member));
        let came = after.members().iter().copied().filter(|member| !before.contains(*member));
        Arc::new(Self {
            from: before.number(),
            epoch: after.number(),
            step: after.step(),
            left: left.map(|member| (member, reason(member))).collect(),
            came: came.collect(),
            members: after.members().to_vec(),
            failed: failed(after),
            unreceived,
        })
    }

    /// Whether the members are those of the epoch before: a step could not be ended by one of them.
    #[must_use]
    pub fn is_of_nobody(&self) -> bool {
        self.left.is_empty() && self.came.is_empty()
    }
}

impl fmt::Display for Change {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (process, reason) in &self.left {
            let why = match reason {
                Reason::Died => "has ended",
                Reason::Unreachable => "was not reached",
                Reason::Left => "has left",
                Reason::Replaced => "was replaced",
                Reason::Unit => "is of a unit that lost a member",
                Reason::Joined | Reason::Failed => "is gone",
            };
            write!(formatter, "{} {why}, ", process.seat)?;
        }
        for process in &self.came {
            write!(formatter, "{} has joined, ", process.seat)?;
        }
        for process in &self.failed {
            write!(formatter, "the step failed on {}, ", process.seat)?;
        }
        if self.is_of_nobody() && self.failed.is_empty() {
            formatter.write_str("a member could not end its step, ")?;
        }
        let count = self.members.len();
        write!(formatter, "{count} members go on with step {} (epoch {})", self.step, self.epoch)
    }
}

/// What became of an attempt: the same on all members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All members have done the step. Its results count.
    Committed,
    /// The step is repeated, by these members. Nobody has applied its results.
    Retry(
        /// What has changed.
        Arc<Change>,
    ),
}

/// Members whose step failed, as a record says, by seats.
pub(crate) fn failed(record: &Record) -> Vec<Process> {
    let failed = record.causes().iter().filter(|cause| cause.reason == Reason::Failed);
    failed.map(|cause| cause.process).collect()
}

fn list(members: &[Process]) -> String {
    let all: Vec<String> = members.iter().map(ToString::to_string).collect();
    all.join(", ")
}

/// Why a session does not go on.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The ranks did not meet.
    #[error(transparent)]
    Join(#[from] JoinGroupError),
    /// The limits of members that were given cannot be.
    #[error(
        "a session of {fewest} to {most} members cannot be joined by {ranks}; give fewest and most with 1 ≤ fewest ≤ \
         {ranks} ≤ most"
    )]
    Limits {
        /// The fewest members.
        fewest: u32,
        /// The most members.
        most: u32,
        /// How many ranks the world has.
        ranks: u32,
    },
    /// The members did not take this process in.
    #[error(
        "{process} was given a seat, and was no member within {} ms: a member could not be reached, its step takes \
         longer, or the others of its unit did not come; look whether all hosts reach each other, or raise the time", .waited.as_millis()
    )]
    NotAdmitted {
        /// This process.
        process: Process,
        /// How long it has waited.
        waited: Duration,
    },
    /// The job of a spare ([`Elastic::spares`](super::Elastic::spares)) has ended, or the spare has
    /// lost its connection to a member that stays.
    #[error(
        "{process} was a spare of the job, and does not reach all members any more: the job has ended, or a link is \
         down; if the job runs, start the process again"
    )]
    NotNeeded {
        /// This process.
        process: Process,
    },
    /// The others go on without this process. No peer reads or changes its memory any more.
    #[error(
        "the others go on without this process ({0}); it was stopped, out of their reach, or of a unit that lost a \
         member; join anew as another process"
    )]
    Expelled(
        /// How they go on.
        Arc<Change>,
    ),
    /// This process has left the job, as it was told to
    /// ([`Session::leave_on`](super::Session::leave_on)). The others go on, and repeat no step for
    /// it.
    #[error("this process has left the job, as it was told to; end its loop and call Session::leave")]
    Left,
    /// A call was interrupted ([`Session::interrupted_by`](super::Session::interrupted_by)). The
    /// others go on without this process.
    #[error("a call of the session was interrupted; the others go on without this process")]
    Interrupted,
    /// A signal that no process can catch, or that the system refused.
    #[error("signal {signal} cannot be caught ({source}); name another one, such as 15 (SIGTERM)")]
    Signal {
        /// The signal's number.
        signal: i32,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// What the options ask for, sessions cannot do.
    #[error("sessions have no {option}; {remedy}")]
    Unsupported {
        /// The option.
        option: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// Too few members can be reached to agree on who goes on. No peer reads or changes this
    /// process's memory any more.
    #[error(
        "{answered} of {members} members answered within {} ms, and a majority has to, or all whose end no witness of \
         this host has seen; if a host is gone, say so by `pleach members ADDRESS --certify HOST` within that time, or let \
         the job keep its records in an etcd (PLEACH_RENDEZVOUS); now start all again", .waited.as_millis()
    )]
    NoQuorum {
        /// Those that answered, this process included.
        answered: usize,
        /// The members of the epoch.
        members: usize,
        /// How long this process has tried.
        waited: Duration,
    },
    /// Of each unit ([`Elastic::unit`](super::Elastic)) a member has ended or cannot be reached, so
    /// nobody can go on. No peer reads or changes this process's memory any more.
    #[error(
        "no unit of {unit} seats was whole for {} ms: of each one a member has ended or was not reached; start all again, \
         from a checkpoint", .waited.as_millis()
    )]
    UnitsLost {
        /// Seats of a unit.
        unit: u32,
        /// How long this process has waited.
        waited: Duration,
    },
    /// The store that holds the records of the job was of no use when members changed. No peer
    /// reads or changes this process's memory any more.
    #[error(
        "members changed, and the next record could not be written or read for {} ms: {reason}; then start all again",
        .waited.as_millis()
    )]
    Store {
        /// What the store or the way to it says, with the remedy.
        reason: String,
        /// How long this process has tried.
        waited: Duration,
    },
    /// Fewer members than [`Elastic`](super::Elastic) wants, for too long. The session still works.
    #[error(
        "there are {members} members, and steps are made by {fewest} or more; nobody joined within {} ms",
        .waited.as_millis()
    )]
    TooFew {
        /// How many there are.
        members: usize,
        /// How many there have to be.
        fewest: u32,
        /// How long this process has waited for more.
        waited: Duration,
    },
    /// The step failed again and again, on this member or on another one. The session still works.
    #[error("step {step} failed {times} times in a row{}", match (own, failed.as_slice()) {
        (Some(own), _) => format!(": {own}"),
        (None, []) => " on another member; see its own output".to_owned(),
        (None, failed) => format!(" on another member, at last on {}; see its own output", list(failed)),
    })]
    Step {
        /// The step.
        step: u64,
        /// How often it was repeated without a change of the members.
        times: u32,
        /// This member's own error, if it had one.
        own: Option<Box<CollectiveError>>,
        /// Members on which it failed at last ([`Change::failed`]).
        failed: Vec<Process>,
    },
    /// [`Session::commit`](super::Session::commit) without a step that has begun.
    #[error("no step has begun; call Session::next before Session::commit, or Session::attempt")]
    NotBegun,
    /// The group of an epoch could not be made.
    #[error("the group of epoch {epoch} could not be made: {source}")]
    Group {
        /// The epoch.
        epoch: u64,
        /// The cause.
        #[source]
        source: Box<GroupError>,
    },
    /// The group of an epoch could not be split ([`Session::split`](super::Session::split)).
    #[error("in epoch {epoch}: {source}")]
    Split {
        /// The epoch.
        epoch: u64,
        /// The cause.
        #[source]
        source: Box<SplitError>,
    },
    /// Memory cannot be allocated.
    #[error("{bytes} bytes cannot be had: {source}; {}", pleach_transport::memory::remedy(source))]
    Memory {
        /// The number of bytes.
        bytes: usize,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// Memory cannot be registered.
    #[error("memory cannot be registered: {0}")]
    Register(#[from] RegisterError),
    /// The GPU has too little memory, or has failed.
    #[error(transparent)]
    Gpu(#[from] CudaError),
    /// Two states of one name.
    #[error("there is a state '{0}' already; give each state a name of its own")]
    StateTaken(
        /// The name.
        String,
    ),
    /// The name of a state is too long.
    #[error("the name of a state has {bytes} bytes; give at most {bytes_max}")]
    StateName {
        /// The number of bytes.
        bytes: usize,
        /// The most that there may be.
        bytes_max: usize,
    },
    /// The program changes a state while the session reads it.
    #[error("the state '{0}' is being changed; call the session after State::update has returned")]
    StateInUse(
        /// The name.
        String,
    ),
    /// States that members declare with other names, elements or lengths.
    #[error("{first} and {other} declare different states ({own} here); declare the same on all members")]
    StatesDiffer {
        /// A member that has the states.
        first: Process,
        /// The one that differs from it.
        other: Process,
        /// The states of this process, in words.
        own: String,
    },
    /// This process has joined when the job was about to end, and has read none of its states.
    #[error(
        "the job was over at step {step} when this process had joined, before it could read '{}': they are zeros \
         here; take them from another member or from a checkpoint", states.join("', '")
    )]
    StatesNotRead {
        /// The step at which it is.
        step: u64,
        /// The states that it has declared.
        states: Vec<String>,
    },
    /// A member names a seat that the job does not have. This process takes part in nothing any
    /// more, as no other word of that member can be relied on.
    #[error(
        "{from} names seat {}, and this job has {seats} seats; it is another version, or not what it says: install \
         one version on all hosts, and keep the secret secret", seat.0
    )]
    NoSuchSeat {
        /// The member.
        from: Process,
        /// The seat.
        seat: Seat,
        /// How many there are, from 0.
        seats: u32,
    },
    /// All members that had the states are gone.
    #[error("all members that had the states of the job are gone; begin again from a checkpoint")]
    StatesLost,
    /// A state that should be equal on all members is not.
    #[error(
        "the state {state} is not the same on all members: that of {} differs; every member has to change states \
         alike, after steps that are committed",
        list(members)
    )]
    Diverged {
        /// The state.
        state: String,
        /// The members that differ from most; all, where there is no majority.
        members: Vec<Process>,
    },
    /// What this process knows cannot be kept where it outlives the process.
    #[error("what outlives this process cannot be written: {0}; allow it more memory or files")]
    LastWord(#[source] std::io::Error),
    /// The session's thread has panicked.
    #[error("the session's thread has ended by a panic, which it has printed; this process has to end")]
    ThreadEnded,
    /// The session's thread could not be started.
    #[error("no thread can be started for the session ({0}); raise the limit ('ulimit -u')")]
    Thread(#[source] std::io::Error),
}
