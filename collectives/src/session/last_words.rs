//! What outlives a process: its job, who it was, and the last record that it had learned.
//!
//! **Invariant:** a word names its job and its process from the beginning of its session on, so who
//! reads it behind the end of the process knows whose end that is. A word of another job is
//! refused: its records would end this one.

use std::sync::Arc;

use pleach_membership::{Certificate, Process, Record, Seat, put_process, take_process};
use pleach_transport::wire::{Malformed, Reader, Writer};
use pleach_transport::witness::WORD_BYTES_MAX;

/// The word of a process that has learned this record last, if any. `job`: the digest of the first
/// record of its job.
pub(crate) fn encode(job: &[u8; 32], process: Process, learned: Option<&Record>) -> Vec<u8> {
    let writer = put_process(Writer::default().raw(job), process);
    writer.raw(&learned.map(Record::encode).unwrap_or_default()).finish()
}

/// The certificate of death of a process of this job that has ended with this word. `is_seat`:
/// whether there is such a seat.
///
/// # Errors
///
/// The bytes are no word of a member: the text says what they are instead.
pub(crate) fn certificate(
    word: &[u8],
    job: &[u8; 32],
    is_seat: impl Fn(Seat) -> bool,
) -> Result<Certificate, String> {
    let mut reader = Reader::new(word);
    let mut read = || Ok((reader.array::<32>()?, take_process(&mut reader)?, reader.rest(WORD_BYTES_MAX)?));
    let (of, process, record) = read().map_err(|Malformed| "names no process".to_owned())?;
    if of != *job {
        return Err("is of another job".to_owned());
    }
    let learned = (!record.is_empty()).then(|| Record::decode(record)).transpose();
    let learned = learned.map_err(|error| format!("is no record: {error}"))?;
    let highest = learned.iter().map(Record::highest_seat).chain([process.seat]).max();
    if highest.is_some_and(|seat| !is_seat(seat)) {
        return Err("names seats that there are not".to_owned());
    }
    Ok(Certificate { process, learned: learned.map(Arc::new) })
}

#[cfg(test)]
mod tests {
    use super::*;

    const JOB: [u8; 32] = [7; 32];

    #[test]
    fn a_word_says_who_has_ended_and_what_it_had_learned() {
        let process = Process::new(3, 0x1234_5678_9abc_def0);
        let record = Record::first(vec![Process::new(0, 1), process]).expect("are members");
        for learned in [None, Some(&record)] {
            let word = encode(&JOB, process, learned);
            let certificate = certificate(&word, &JOB, |seat| seat.0 < 4).expect("is a word");
            assert_eq!((certificate.process, certificate.learned.as_deref()), (process, learned));
        }
    }

    #[test]
    fn what_is_no_word_or_names_seats_that_there_are_not_is_refused() {
        let process = Process::new(3, 7);
        let record = Record::first(vec![Process::new(0, 1), Process::new(5, 2)]).expect("are members");
        let word = encode(&JOB, process, Some(&record));
        let of_other = encode(&[8; 32], process, Some(&record));
        for (bytes, is) in [
            (&word[..43], "names no process"),
            (&word[..45], "is no record: "),
            (&word[..], "names seats that there are not"),
            (&of_other[..], "is of another job"),
        ] {
            let refused = certificate(bytes, &JOB, |seat| seat.0 < 5).expect_err("is no word of theirs");
            assert!(refused.starts_with(is), "{refused}");
        }
        let word = encode(&JOB, process, None);
        let refused = certificate(&word, &JOB, |seat| seat.0 < 3).expect_err("there is no seat 3");
        assert_eq!(refused, "names seats that there are not");
    }
}
