//! An epoch as data: its members, the step that it begins with, why it came.
//!
//! **Invariant:** a [`Record`] cannot be made or decoded in another than its canonical form: at
//! least one member, seats strictly ascending, causes strictly ascending, the digest that of the
//! bytes. So equal records have equal bytes, and a MAC over the bytes is a MAC over the record.

use std::fmt;
use std::hash::{Hash, Hasher};

use pleach_derive::ErrorDebug;
use pleach_transport::wire::{Reader, Writer};
use sha2::{Digest as _, Sha256};

use crate::encoding::{DecodeError, put_process, take_process};
use crate::{Process, Seat};

/// Members of an epoch.
pub const MEMBERS_MAX: usize = 4096;

/// Causes of a change: each member of the old epoch and each of the new one may be named.
pub const CAUSES_MAX: usize = 2 * MEMBERS_MAX;

/// Bytes of an encoded record.
pub const RECORD_BYTES_MAX: usize = 64 + 20 * MEMBERS_MAX + 16 * CAUSES_MAX;

/// Numbers of records and steps; none is reached by counting up.
pub const COUNT_MAX: u64 = u64::MAX / 2;

/// The version of the encoding.
const VERSION: u8 = 2;

/// SHA-256 of a record's bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// What stands in the first record, which has none before.
    pub const NONE: Self = Self([0; 32]);

    /// The first eight bytes, by which signals of epochs are told apart.
    #[must_use]
    pub fn seed(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}…", self.seed())
    }
}

/// What became of the step that was under way when the epoch before ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Every member of the epoch before was ready with it: its result is applied.
    Committed,
    /// It is repeated; nobody has applied its result.
    Retry,
}

/// Why a process left, came, or held up the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// It joined.
    Joined,
    /// It left as it had announced.
    Left,
    /// A process with a certificate of death.
    Died,
    /// Some members did not reach it, so that it was among the fewest whose removal leaves a
    /// group in which any two reach each other.
    Unreachable,
    /// A new process holds its seat.
    Replaced,
    /// Another member of its unit left, for whichever reason.
    Unit,
    /// It stays, but its step failed.
    Failed,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 7] =
        [Self::Joined, Self::Left, Self::Died, Self::Unreachable, Self::Replaced, Self::Unit, Self::Failed];
}

/// A process that left, came or held up the step, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cause {
    /// The process.
    pub process: Process,
    /// Why.
    pub reason: Reason,
}

/// Contents that are no record.
#[derive(Clone, Copy, PartialEq, Eq, ErrorDebug, thiserror::Error)]
pub enum RecordError {
    /// An epoch has at least one member.
    #[error("a record needs at least one member")]
    NoMembers,
    /// More than [`MEMBERS_MAX`] members or [`CAUSES_MAX`] causes.
    #[error("a record names at most {MEMBERS_MAX} members and {CAUSES_MAX} causes")]
    TooMany,
    /// A number or a step that no job reaches, or a member since a later record.
    #[error("a record's number and step are at most {COUNT_MAX}, and its members came by then")]
    TooHigh,
    /// Two members have one seat.
    #[error("two members hold {0}: one of them has to go")]
    SeatTaken(Seat),
}

/// The outcome of one epoch's agreement: who the members of the next one are.
#[derive(Clone)]
pub struct Record {
    number: u64,
    members: Vec<Process>,
    /// By rank: the number of the record by which the member joined.
    since: Vec<u64>,
    step: u64,
    verdict: Verdict,
    causes: Vec<Cause>,
    previous: Digest,
    digest: Digest,
}

impl Record {
    /// The record of the epoch in which a job begins.
    ///
    /// # Errors
    ///
    /// When there are no members, too many, or two on one seat.
    pub fn first(members: Vec<Process>) -> Result<Self, RecordError> {
        let members = members.into_iter().map(|member| (member, 0)).collect();
        Self::new(0, members, 0, Verdict::Committed, Vec::new(), Digest::NONE)
    }

    /// The record after this one.
    ///
    /// # Errors
    ///
    /// When there are no members, too many, or two on one seat.
    pub fn next(
        &self,
        members: Vec<Process>,
        step: u64,
        verdict: Verdict,
        causes: Vec<Cause>,
    ) -> Result<Self, RecordError> {
        let number = self.number + 1;
        let since = |member: Process| self.member_since(member).unwrap_or(number);
        let members = members.into_iter().map(|member| (member, since(member))).collect();
        Self::new(number, members, step, verdict, causes, self.digest)
    }

    fn new(
        number: u64,
        mut members: Vec<(Process, u64)>,
        step: u64,
        verdict: Verdict,
        mut causes: Vec<Cause>,
        previous: Digest,
    ) -> Result<Self, RecordError> {
        members.sort_unstable();
        members.dedup();
        causes.sort_unstable();
        causes.dedup();
        if members.is_empty() {
            return Err(RecordError::NoMembers);
        }
        if members.len() > MEMBERS_MAX || causes.len() > CAUSES_MAX {
            return Err(RecordError::TooMany);
        }
        let is_later = |(_, since): &(Process, u64)| *since > number;
        if number > COUNT_MAX || step > COUNT_MAX || members.iter().any(is_later) {
            return Err(RecordError::TooHigh);
        }
        if let Some(pair) = members.windows(2).find(|pair| pair[0].0.seat == pair[1].0.seat) {
            return Err(RecordError::SeatTaken(pair[0].0.seat));
        }
        let digest = Digest::NONE;
        let (members, since) = members.into_iter().unzip();
        let mut record = Self { number, members, since, step, verdict, causes, previous, digest };
        record.digest = Digest(Sha256::digest(record.encode()).into());
        Ok(record)
    }

    /// Its number; the first record has 0.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Its members by ascending seats: rank r of the epoch is `members()[r]`.
    #[must_use]
    pub fn members(&self) -> &[Process] {
        &self.members
    }

    /// The step with which the epoch begins. Every step before it is committed.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// [`Verdict::Retry`] when a member that was asked had begun [`Record::step`] in the epoch
    /// before, else [`Verdict::Committed`].
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// What this record says of a step that a member was in when the epoch before ended.
    #[must_use]
    pub fn verdict_of(&self, step: u64) -> Verdict {
        if step < self.step { Verdict::Committed } else { Verdict::Retry }
    }

    /// Who left and who came, and why.
    #[must_use]
    pub fn causes(&self) -> &[Cause] {
        &self.causes
    }

    /// The digest of the record before.
    #[must_use]
    pub fn previous(&self) -> Digest {
        self.previous
    }

    /// The digest of this record.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether a process is a member.
    #[must_use]
    pub fn contains(&self, process: Process) -> bool {
        self.rank_of(process).is_some()
    }

    /// The rank of a member.
    #[must_use]
    pub fn rank_of(&self, process: Process) -> Option<usize> {
        self.members.binary_search(&process).ok()
    }

    /// The number of the record by which a member joined. It has been a member ever since.
    #[must_use]
    pub fn member_since(&self, process: Process) -> Option<u64> {
        self.rank_of(process).map(|rank| self.since[rank])
    }

    /// The member on a seat.
    #[must_use]
    pub fn on_seat(&self, seat: Seat) -> Option<Process> {
        let rank = self.members.binary_search_by_key(&seat, |member| member.seat).ok()?;
        Some(self.members[rank])
    }

    /// The highest seat that it names, of a member or of one that left.
    #[must_use]
    pub fn highest_seat(&self) -> Seat {
        let causes = self.causes.iter().map(|cause| cause.process.seat);
        self.members.iter().map(|member| member.seat).chain(causes).max().expect("there is a member")
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let bytes = 64 + 20 * self.members.len() + 16 * self.causes.len();
        let mut writer = Writer::with_capacity(bytes)
            .u8(VERSION)
            .u64(self.number)
            .u64(self.step)
            .u8(u8::from(self.verdict == Verdict::Retry))
            .raw(&self.previous.0)
            .count(self.members.len());
        for (member, since) in self.members.iter().zip(&self.since) {
            writer = put_process(writer, *member).u64(*since);
        }
        writer = writer.count(self.causes.len());
        for cause in &self.causes {
            writer = put_process(writer, cause.process).u8(cause.reason as u8);
        }
        writer.finish()
    }

    /// The record with these bytes.
    ///
    /// # Errors
    ///
    /// When the bytes are not exactly those that [`Record::encode`] writes for a record.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.len() > RECORD_BYTES_MAX {
            return Err(DecodeError::TooLong { bytes: bytes.len(), max: RECORD_BYTES_MAX });
        }
        let mut reader = Reader::new(bytes);
        let version = reader.u8()?;
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let (number, step) = (reader.u64()?, reader.u64()?);
        let verdict = match reader.u8()? {
            0 => Verdict::Committed,
            1 => Verdict::Retry,
            _ => return Err(DecodeError::Malformed),
        };
        let previous = Digest(reader.array()?);
        // Each member takes twenty bytes, so their number is bounded by the bytes that are there.
        let count = reader.count(MEMBERS_MAX.min(bytes.len()))?;
        let members = (0..count).map(|_| take_member(&mut reader)).collect::<Result<Vec<_>, _>>()?;
        let count = reader.count(CAUSES_MAX.min(bytes.len()))?;
        let causes = (0..count).map(|_| take_cause(&mut reader)).collect::<Result<Vec<_>, _>>()?;
        reader.end()?;
        let record = Self::new(number, members, step, verdict, causes, previous)?;
        if record.encode() != bytes {
            return Err(DecodeError::NotCanonical);
        }
        Ok(record)
    }
}

fn take_member(reader: &mut Reader<'_>) -> Result<(Process, u64), DecodeError> {
    Ok((take_process(reader)?, reader.u64()?))
}

fn take_cause(reader: &mut Reader<'_>) -> Result<Cause, DecodeError> {
    let process = take_process(reader)?;
    let reason = *Reason::ALL.get(usize::from(reader.u8()?)).ok_or(DecodeError::Malformed)?;
    Ok(Cause { process, reason })
}

impl PartialEq for Record {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Record {}

impl Hash for Record {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.seed().hash(state);
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "record {} {:?} step {}", self.number, self.members, self.step)
    }
}
