//! What people and launchers ask of a running job, from a process that is none of it.
//!
//! The question goes to the rendezvous of the job, where the member that gives seats answers
//! (`transport/src/rendezvous/seats.rs`). Who asks proves the job's secret as any newcomer.

use std::fmt;
use std::time::Duration;

use pleach_membership::{Process, Seat, put_process, take_process};
use pleach_transport::clock::now;
use pleach_transport::rendezvous::{JoinError, World, ask as ask_there};
use pleach_transport::wire::{Malformed, Reader, Writer};
use pleach_transport::witness::WORD_BYTES_MAX;

/// Longest text in an answer, in bytes.
const TEXT_BYTES_MAX: usize = 4096;

/// Rows of an answer at most.
const ROWS_MAX: usize = 8192;

/// A question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Who is there?
    Members,
    /// May this seat leave at the end of a step?
    Drain(Seat),
    /// This process is dead, by the word of the person.
    Certify(Process),
    /// The process that wrote this last has ended, by the word of its launcher.
    Ended(Vec<u8>),
}

impl Ask {
    fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        match self {
            Self::Members => writer.u8(0),
            Self::Drain(seat) => writer.u8(1).u32(seat.0),
            Self::Certify(process) => put_process(writer.u8(2), *process),
            Self::Ended(word) => writer.u8(3).bytes(word),
        }
        .finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let ask = match reader.u8()? {
            0 => Self::Members,
            1 => Self::Drain(Seat(reader.u32()?)),
            2 => Self::Certify(take_process(&mut reader)?),
            3 => Self::Ended(reader.bytes(WORD_BYTES_MAX)?.to_vec()),
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(ask)
    }
}

/// What a process of a job is doing, as the member sees it that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemberState {
    /// It is a member.
    Member,
    /// It waits to join.
    Joining,
    /// It is a member that reads the states of the job from the others.
    Healing {
        /// How much of them it has read, in percent of their bytes.
        percent: u8,
    },
    /// It is a member that leaves at the end of a step.
    Leaving,
    /// It is a member that the member which answers does not reach.
    Suspected,
    /// It is the last one that had its seat, which is free: it has ended, left or was not reached.
    Out,
}

impl fmt::Display for MemberState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Member => formatter.write_str("member"),
            Self::Joining => formatter.write_str("joining"),
            Self::Healing { percent } => write!(formatter, "healing {percent} %"),
            Self::Leaving => formatter.write_str("leaving"),
            Self::Suspected => formatter.write_str("suspected"),
            Self::Out => formatter.write_str("out"),
        }
    }
}

/// A process of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberRow {
    /// The process.
    pub process: Process,
    /// The address of its host, or the number that it has among those of the job.
    pub host: String,
    /// The newest epoch, if it is a member; if it is out, the first one without it.
    pub epoch: Option<u64>,
    /// The step of the member that answers. Steps of two members differ by one at most.
    pub step: u64,
    /// What it is doing.
    pub state: MemberState,
}

/// How soon a launcher repeats its word, until the members go on without the process: who heard it
/// may have died since. Then twice as long after that, up to the longest pause: a server of a job
/// answers a limited number of questions.
const REPEAT_MIN: Duration = Duration::from_millis(100);
const REPEAT_MAX: Duration = Duration::from_secs(1);

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Done,
    /// It is taken in, and not done yet.
    Begun,
    Refused(String),
    Members(Vec<MemberRow>),
}

impl Reply {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        match self {
            Self::Done => writer.u8(0),
            Self::Begun => writer.u8(3),
            Self::Refused(reason) => writer.u8(1).bytes(reason.as_bytes()),
            Self::Members(rows) => rows.iter().fold(writer.u8(2).count(rows.len()), |writer, row| {
                let MemberRow { process, host, epoch, step, state } = row;
                let writer = put_process(writer, *process).bytes(host.as_bytes());
                let writer = writer.u8(u8::from(epoch.is_some())).u64(epoch.unwrap_or(0)).u64(*step);
                match *state {
                    MemberState::Member => writer.u8(0),
                    MemberState::Joining => writer.u8(1),
                    MemberState::Leaving => writer.u8(2),
                    MemberState::Suspected => writer.u8(3),
                    MemberState::Healing { percent } => writer.u8(4).u8(percent),
                    MemberState::Out => writer.u8(5),
                }
            }),
        }
        .finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let reply = match reader.u8()? {
            0 => Self::Done,
            1 => Self::Refused(reader.text(TEXT_BYTES_MAX)?),
            2 => {
                // Each row takes bytes, so their number is bounded by the bytes that are there.
                let count = reader.count(ROWS_MAX.min(bytes.len()))?;
                let rows = (0..count).map(|_| take_row(&mut reader)).collect::<Result<_, _>>()?;
                Self::Members(rows)
            }
            3 => Self::Begun,
            _ => return Err(Malformed),
        };
        reader.end()?;
        Ok(reply)
    }
}

fn take_row(reader: &mut Reader<'_>) -> Result<MemberRow, Malformed> {
    let (process, host) = (take_process(reader)?, reader.text(TEXT_BYTES_MAX)?);
    let (has_epoch, epoch, step) = (reader.u8()?, reader.u64()?, reader.u64()?);
    let epoch = match has_epoch {
        0 if epoch == 0 => None,
        1 => Some(epoch),
        _ => return Err(Malformed),
    };
    let state = match reader.u8()? {
        0 => MemberState::Member,
        1 => MemberState::Joining,
        2 => MemberState::Leaving,
        3 => MemberState::Suspected,
        4 => MemberState::Healing {
            percent: Some(reader.u8()?).filter(|percent| *percent <= 100).ok_or(Malformed)?,
        },
        5 => MemberState::Out,
        _ => return Err(Malformed),
    };
    Ok(MemberRow { process, host, epoch, step, state })
}

/// Decodes bytes as a question and as an answer: for fuzzing.
pub(super) fn check_decoders(bytes: &[u8]) {
    if let Ok(ask) = Ask::decode(bytes) {
        assert_eq!(ask.encode(), bytes);
    }
    if let Ok(reply) = Reply::decode(bytes) {
        assert_eq!(reply.encode(), bytes);
    }
}

/// Why a job did not do as it was asked.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// The job was not found.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// It does not do that.
    #[error("not done: {0}")]
    Refused(
        /// The reason, with the remedy.
        String,
    ),
    /// Another version answered.
    #[error("the answer cannot be read: the job runs another version; use the command of that version")]
    Unreadable,
}

fn ask(world: &World, ask: Ask, limit: Duration) -> Result<Reply, AskError> {
    let answer = ask_there(world, &ask.encode(), now() + limit)?;
    match Reply::decode(&answer).map_err(|Malformed| AskError::Unreadable)? {
        Reply::Refused(reason) => Err(AskError::Refused(reason)),
        reply => Ok(reply),
    }
}

/// The processes of the job at the rendezvous address of `world`, by seats.
///
/// # Errors
///
/// See [`AskError`]; at the latest when `limit` has passed.
pub fn members(world: &World, limit: Duration) -> Result<Vec<MemberRow>, AskError> {
    match ask(world, Ask::Members, limit)? {
        Reply::Members(rows) => Ok(rows),
        _ => Err(AskError::Unreadable),
    }
}

/// Asks the member on a seat to leave at the end of a step. It may still be a member on return.
///
/// # Errors
///
/// See [`AskError`]; at the latest when `limit` has passed.
pub fn drain(world: &World, seat: Seat, limit: Duration) -> Result<(), AskError> {
    ask(world, Ask::Drain(seat), limit).map(drop)
}

/// Certifies that a process has ended, by the word of a person: its host is lost for good, or the
/// person has ended it. The members go on without it also where they are half or fewer.
///
/// A person cannot know what the process had learned last. If it lives after all, or had agreed on
/// another epoch with others that are lost too, that job and this one go on apart.
///
/// # Errors
///
/// See [`AskError`]; at the latest when `limit` has passed. A process that is reached is refused.
pub fn certify(world: &World, process: Process, limit: Duration) -> Result<(), AskError> {
    ask(world, Ask::Certify(process), limit).map(drop)
}

/// Certifies that a process has ended, by the word of who started it: `word` is what the process
/// wrote last ([`WordFile`](pleach_transport::witness::WordFile)). The members go on without the
/// process also where they are half or fewer. Waits until they have, or `limit` has passed: then
/// the member that answered has heard it.
///
/// # Errors
///
/// See [`AskError`]; at the latest when `limit` has passed. Bytes that are no word are refused.
pub fn certify_end(world: &World, word: &[u8], limit: Duration) -> Result<(), AskError> {
    let (deadline, mut pause) = (now() + limit, REPEAT_MIN);
    loop {
        let told = ask(world, Ask::Ended(word.to_vec()), deadline.since(now()));
        let is_last = now() + pause >= deadline;
        match told {
            Ok(Reply::Begun) if !is_last => {}
            // Ranks that are still meeting, or a member that takes the place of another one.
            Err(AskError::Join(_)) if !is_last => {}
            told => return told.map(drop),
        }
        std::thread::park_timeout(pause);
        pause = (pause * 2).min(REPEAT_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_answers_survive_the_wire_and_cut_ones_are_refused() {
        let process = Process::new(3, 0x1234_5678_9abc_def0);
        for ask in [Ask::Members, Ask::Drain(Seat(7)), Ask::Certify(process), Ask::Ended(vec![7; 40])] {
            let bytes = ask.encode();
            assert_eq!(Ask::decode(&bytes), Ok(ask));
            (0..bytes.len()).for_each(|end| assert_eq!(Ask::decode(&bytes[..end]), Err(Malformed)));
        }
        let row = |state| MemberRow { process, host: "10.0.0.1".to_owned(), epoch: Some(4), step: 9, state };
        let waiting = MemberRow { epoch: None, ..row(MemberState::Joining) };
        let healing = MemberState::Healing { percent: 40 };
        let states =
            [MemberState::Member, MemberState::Leaving, MemberState::Suspected, healing, MemberState::Out];
        let rows = states.map(row).into_iter().chain([waiting]).collect();
        for reply in [Reply::Done, Reply::Begun, Reply::Refused("no".to_owned()), Reply::Members(rows)] {
            let bytes = reply.encode();
            assert_eq!(Reply::decode(&bytes), Ok(reply));
            (0..bytes.len()).for_each(|end| assert_eq!(Reply::decode(&bytes[..end]), Err(Malformed)));
        }
    }
}
