//! What processes say to each other, and its bytes.
//!
//! **Invariant:** [`Message::decode`] takes exactly the bytes that [`Message::encode`] writes, so a
//! MAC over the bytes is a MAC over the message. Limits come before allocations, and no bytes make
//! it panic. The sender is not in the bytes: a connection names it, or what the MAC covers.

use std::sync::Arc;

use pleach_transport::wire::{Reader, Writer};

use crate::ballot::Ballot;
use crate::certificate::Certificate;
use crate::encoding::{DecodeError, put_process, take_process};
use crate::record::{COUNT_MAX, MEMBERS_MAX, RECORD_BYTES_MAX};
use crate::register::Answer;
use crate::view::View;
use crate::{Process, Record, Seat};

/// Bytes of an encoded message.
pub const MESSAGE_BYTES_MAX: usize = RECORD_BYTES_MAX + 128;

/// A message from one process to another.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Asks for a promise for the record of this number.
    Prepare {
        /// The record's number.
        number: u64,
        /// The ballot that is to be promised.
        ballot: Ballot,
    },
    /// The promise, and what the member knows.
    Promise {
        /// The record's number.
        number: u64,
        /// The ballot that is promised.
        ballot: Ballot,
        /// What the member knows.
        answer: Answer,
    },
    /// The member has promised a higher ballot.
    Refused {
        /// The record's number.
        number: u64,
        /// The higher ballot.
        promised: Ballot,
    },
    /// Asks for a vote.
    Accept {
        /// The ballot.
        ballot: Ballot,
        /// The record, which has its number.
        record: Arc<Record>,
    },
    /// The vote.
    Accepted {
        /// The record's number.
        number: u64,
        /// The ballot.
        ballot: Ballot,
    },
    /// A record that stands.
    Decided(
        /// The record.
        Arc<Record>,
    ),
    /// Asks for a record that is newer than that of this number. `None`: for any.
    Query(
        /// The number of the newest record that the asker knows.
        Option<u64>,
    ),
    /// The sender is ready with a step: the first round of its commit.
    Ready {
        /// The epoch.
        epoch: u64,
        /// The step.
        step: u64,
        /// Whether a planned change waits for the step's end.
        halts: bool,
    },
    /// The sender knows that all are ready with a step: the second round.
    Knows {
        /// The epoch.
        epoch: u64,
        /// The step.
        step: u64,
    },
    /// Whom a process reaches, and what it wants. The receiver passes on what is new to it.
    View(
        /// The view.
        View,
    ),
    /// A witness says that a process has ended. The receiver passes on what is new to it.
    Certificate(
        /// The certificate.
        Certificate,
    ),
    /// The sender runs. An answer is asked for or is this.
    Alive {
        /// Whether the receiver answers with another one.
        asks: bool,
    },
}

impl Message {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let writer = Writer::default();
        match self {
            Self::Prepare { number, ballot } => put_ballot(writer.u8(0).u64(*number), *ballot),
            Self::Promise { number, ballot, answer } => {
                let writer = put_ballot(writer.u8(1).u64(*number), *ballot).u64(answer.known);
                let writer = put_option(writer, answer.begun.as_ref(), |writer, step| writer.u64(*step));
                put_option(writer, answer.accepted.as_ref(), |writer, (ballot, record)| {
                    put_ballot(writer, *ballot).bytes(&record.encode())
                })
            }
            Self::Refused { number, promised } => put_ballot(writer.u8(2).u64(*number), *promised),
            Self::Accept { ballot, record } => put_ballot(writer.u8(3), *ballot).bytes(&record.encode()),
            Self::Accepted { number, ballot } => put_ballot(writer.u8(4).u64(*number), *ballot),
            Self::Decided(record) => writer.u8(5).bytes(&record.encode()),
            Self::Query(number) => {
                put_option(writer.u8(6), number.as_ref(), |writer, number| writer.u64(*number))
            }
            Self::Ready { epoch, step, halts } => writer.u8(7).u64(*epoch).u64(*step).u8(u8::from(*halts)),
            Self::Knows { epoch, step } => writer.u8(8).u64(*epoch).u64(*step),
            Self::View(view) => put_view(writer.u8(9), view),
            Self::Certificate(certificate) => {
                let writer = put_process(writer.u8(11), certificate.process);
                put_option(writer, certificate.learned.as_ref(), |writer, record| {
                    writer.bytes(&record.encode())
                })
            }
            Self::Alive { asks } => writer.u8(10).u8(u8::from(*asks)),
        }
        .finish()
    }

    /// The highest seat that it names. Who keeps seats in a table looks at it first: bytes of a
    /// peer name any seat.
    #[must_use]
    pub fn highest_seat(&self) -> Option<Seat> {
        match self {
            Self::Prepare { ballot, .. } | Self::Accepted { ballot, .. } => Some(ballot.seat),
            Self::Refused { promised, .. } => Some(promised.seat),
            Self::Promise { ballot, answer, .. } => {
                let accepted = answer.accepted.iter();
                let seats = accepted.flat_map(|(ballot, record)| [ballot.seat, record.highest_seat()]);
                seats.chain([ballot.seat]).max()
            }
            Self::Accept { ballot, record } => Some(ballot.seat.max(record.highest_seat())),
            Self::Decided(record) => Some(record.highest_seat()),
            Self::View(view) => {
                let others = view.unreached.iter().chain(&view.reached);
                others.chain([&view.process]).map(|process| process.seat).max()
            }
            Self::Certificate(certificate) => {
                let learned = certificate.learned.iter().map(|record| record.highest_seat());
                learned.chain([certificate.process.seat]).max()
            }
            Self::Query(_) | Self::Ready { .. } | Self::Knows { .. } | Self::Alive { .. } => None,
        }
    }

    /// The message with these bytes.
    ///
    /// # Errors
    ///
    /// When the bytes are not exactly those that [`Message::encode`] writes for a message.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(DecodeError::TooLong { bytes: bytes.len(), max: MESSAGE_BYTES_MAX });
        }
        let reader = &mut Reader::new(bytes);
        let message = match reader.u8()? {
            0 => Self::Prepare { number: reader.u64()?, ballot: take_ballot(reader)? },
            1 => Self::Promise {
                number: reader.u64()?,
                ballot: take_ballot(reader)?,
                answer: Answer {
                    known: take_step(reader)?,
                    begun: take_option(reader, take_step)?,
                    accepted: take_option(reader, |reader| Ok((take_ballot(reader)?, take_record(reader)?)))?,
                },
            },
            2 => Self::Refused { number: reader.u64()?, promised: take_ballot(reader)? },
            3 => Self::Accept { ballot: take_ballot(reader)?, record: take_record(reader)? },
            4 => Self::Accepted { number: reader.u64()?, ballot: take_ballot(reader)? },
            5 => Self::Decided(take_record(reader)?),
            6 => Self::Query(take_option(reader, |reader| Ok(reader.u64()?))?),
            7 => Self::Ready { epoch: reader.u64()?, step: take_step(reader)?, halts: take_bool(reader)? },
            8 => Self::Knows { epoch: reader.u64()?, step: take_step(reader)? },
            9 => Self::View(take_view(reader, bytes.len())?),
            10 => Self::Alive { asks: take_bool(reader)? },
            11 => Self::Certificate(Certificate {
                process: take_process(reader)?,
                learned: take_option(reader, take_record)?,
            }),
            _ => return Err(DecodeError::Malformed),
        };
        reader.end()?;
        Ok(message)
    }
}

fn put_ballot(writer: Writer, ballot: Ballot) -> Writer {
    writer.u64(ballot.round).u32(ballot.seat.0)
}

/// A round that no proposer reaches by counting up is none.
fn take_ballot(reader: &mut Reader<'_>) -> Result<Ballot, DecodeError> {
    let (round, seat) = (reader.u64()?, Seat(reader.u32()?));
    if round == 0 || round > COUNT_MAX { Err(DecodeError::Malformed) } else { Ok(Ballot { round, seat }) }
}

/// A step that no job reaches is none.
fn take_step(reader: &mut Reader<'_>) -> Result<u64, DecodeError> {
    let step = reader.u64()?;
    if step <= COUNT_MAX { Ok(step) } else { Err(DecodeError::Malformed) }
}

fn take_bool(reader: &mut Reader<'_>) -> Result<bool, DecodeError> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(DecodeError::Malformed),
    }
}

fn put_option<T>(writer: Writer, value: Option<&T>, put: impl FnOnce(Writer, &T) -> Writer) -> Writer {
    let writer = writer.u8(u8::from(value.is_some()));
    match value {
        Some(value) => put(writer, value),
        None => writer,
    }
}

fn take_option<T>(
    reader: &mut Reader<'_>,
    take: impl FnOnce(&mut Reader<'_>) -> Result<T, DecodeError>,
) -> Result<Option<T>, DecodeError> {
    if take_bool(reader)? { take(reader).map(Some) } else { Ok(None) }
}

fn take_record(reader: &mut Reader<'_>) -> Result<Arc<Record>, DecodeError> {
    Record::decode(reader.bytes(RECORD_BYTES_MAX)?).map(Arc::new)
}

fn put_view(writer: Writer, view: &View) -> Writer {
    let writer = put_process(writer, view.process).u64(view.version).u8(u8::from(view.leaves));
    let writer = writer.u8(u8::from(view.failed));
    let writer = put_option(writer, view.epoch.as_ref(), |writer, epoch| writer.u64(*epoch));
    let writer = writer.count(view.unreached.len());
    let writer = view.unreached.iter().fold(writer, |writer, process| put_process(writer, *process));
    let writer = writer.count(view.reached.len());
    view.reached.iter().fold(writer, |writer, process| put_process(writer, *process))
}

fn take_view(reader: &mut Reader<'_>, bytes: usize) -> Result<View, DecodeError> {
    let process = take_process(reader)?;
    let (version, leaves, failed) = (reader.u64()?, take_bool(reader)?, take_bool(reader)?);
    let epoch = take_option(reader, |reader| Ok(reader.u64()?))?;
    let (unreached, reached) = (take_processes(reader, bytes)?, take_processes(reader, bytes)?);
    Ok(View { process, version, epoch, leaves, failed, unreached, reached })
}

/// Ascending, as their encoding is canonical. The bytes that are there bound their number.
fn take_processes<S: FromIterator<Process>>(reader: &mut Reader<'_>, bytes: usize) -> Result<S, DecodeError> {
    let count = reader.count(MEMBERS_MAX.min(bytes))?;
    let processes = (0..count).map(|_| take_process(reader)).collect::<Result<Vec<_>, _>>()?;
    if processes.windows(2).any(|pair| pair[0] >= pair[1]) {
        return Err(DecodeError::NotCanonical);
    }
    Ok(processes.into_iter().collect())
}
