//! What encodings share: errors of decoding, and the fields of a process.

use pleach_derive::ErrorDebug;
use pleach_transport::Incarnation;
use pleach_transport::wire::{Malformed, Reader, Writer};

use crate::record::RecordError;
use crate::{Process, Seat};

/// Bytes that are no record and no message.
#[derive(Clone, Copy, PartialEq, Eq, ErrorDebug, thiserror::Error)]
pub enum DecodeError {
    /// They end early, go on too long, or hold a value that no field has.
    #[error("the bytes are no message of this protocol: they were cut off or changed on their way")]
    Malformed,
    /// More bytes than any record or message has.
    #[error("{bytes} bytes are too many, at most {max}: they were not written by this program")]
    TooLong {
        /// How many came.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// A version that this program does not know.
    #[error("version {0} of the encoding is unknown here: run the same version of pleach on all ranks")]
    Version(u8),
    /// The same contents have other bytes.
    #[error("the bytes are not in canonical form: a program that is not pleach wrote them")]
    NotCanonical,
    /// Contents that are no record.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl From<Malformed> for DecodeError {
    fn from(Malformed: Malformed) -> Self {
        Self::Malformed
    }
}

/// Writes a process: its seat and its incarnation.
pub fn put_process(writer: Writer, process: Process) -> Writer {
    writer.u32(process.seat.0).u64(process.incarnation.0)
}

/// Reads what [`put_process`] has written.
///
/// # Errors
///
/// The bytes end before.
pub fn take_process(reader: &mut Reader<'_>) -> Result<Process, Malformed> {
    Ok(Process { seat: Seat(reader.u32()?), incarnation: Incarnation(reader.u64()?) })
}
