//! Which pieces of which vectors are in use by computing and by operations under way.
//!
//! **Invariant:** what is in use is written by one user alone, and then no other user reads it.
//! Whatever would break this is refused, and nothing changes.

use std::fmt;
use std::ops::Range;

use crate::policy::{OperationId, Vector};

/// The user of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// The gradient is being computed.
    Computing,
    /// An operation is under way.
    Operation(OperationId),
    /// An update, which ends at once.
    Update,
}

impl fmt::Display for User {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Computing => formatter.write_str("computing"),
            Self::Operation(id) => write!(formatter, "operation {}", id.0),
            Self::Update => formatter.write_str("an update"),
        }
    }
}

/// An action or event that breaks an invariant of [`Policy`](crate::Policy).
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// A piece is wanted that is in use.
    #[error("bad policy: {user} touches elements {piece:?} of the {}, which {holder} uses; wait for its end", vector.name())]
    InUse {
        /// Wants the piece.
        user: User,
        /// The vector.
        vector: Vector,
        /// The elements that are wanted.
        piece: Range<usize>,
        /// Uses it.
        holder: User,
    },
    /// The number of an operation is not larger than those before.
    #[error("bad policy: operation {} was asked for before; number operations upwards", .0.0)]
    Repeated(OperationId),
    /// An operation ended that is not under way.
    #[error("bad driver: operation {} ended and is not under way; report it", .0.0)]
    NotUnderWay(OperationId),
    /// A piece is not inside of the vectors.
    #[error("bad policy: elements {piece:?} of vectors of {parameters} elements; ask for less")]
    Outside {
        /// The piece.
        piece: Range<usize>,
        /// The elements of a vector.
        parameters: usize,
    },
    /// A bucket became ready twice in a step, or outside of a step, or there is no such bucket.
    #[error(
        "bucket not expected: bucket {bucket} became ready in step {step}; report each bucket once a step"
    )]
    Bucket {
        /// The bucket.
        bucket: usize,
        /// The step.
        step: u64,
    },
    /// A step ended before its gradient was there.
    #[error("step {step} has ended without bucket {bucket}; report each bucket before the end of the step")]
    Incomplete {
        /// The step.
        step: u64,
        /// The first bucket that is missing.
        bucket: usize,
    },
    /// Computing gets a bucket that it has, or outside of a step that was begun bucket by bucket,
    /// or there is no such bucket.
    #[error(
        "bad policy: bucket {bucket} is supplied in step {step}; supply each once in a step that was begun"
    )]
    Supplied {
        /// The bucket.
        bucket: usize,
        /// The step.
        step: u64,
    },
    /// Steps are not computed one after the other.
    #[error(
        "bad policy: step {step} is asked for, and step {expected} comes next; ask for one after the other"
    )]
    Order {
        /// The step that was asked for.
        step: u64,
        /// The step that comes next.
        expected: u64,
    },
    /// A step of the optimizer after the last gradient.
    #[error("bad policy: a step of the optimizer after the end of the training; make none after Stop")]
    AfterStop,
    /// One-sided exchange, and the plan has no window.
    #[error("bad policy: it reads, writes or tells, and its plan has no window; give the plan one")]
    NoWindow,
    /// A read from, or a write or word to, a rank that is no peer.
    #[error("bad policy: rank {rank} is no peer of rank {own}, of {ranks} ranks; name another")]
    Peer {
        /// The rank that was named.
        rank: u32,
        /// This rank.
        own: u32,
        /// The number of ranks.
        ranks: u32,
    },
    /// A contribution to a line that the plan does not have.
    #[error("bad policy: line {line} of a plan that has {lines}; name another")]
    NoLine {
        /// The line that was named.
        line: usize,
        /// The number of lines.
        lines: usize,
    },
    /// The elements of a write are wanted when none has come, or they are written.
    #[error("bad policy: the elements of a write are read when it comes, and never written; copy them then")]
    NoArrival,
    /// A table is used before it was begun, or by a rank that there is not.
    #[error("bad policy: a table is used that was not begun, or a rank adds to it that there is not")]
    NoTable,
    /// Nothing is under way, nothing is computed, and the training is not over.
    #[error("bad policy: step {step} is never asked for, as nothing is under way that could end; ask for it")]
    Stuck {
        /// The step that comes next.
        step: u64,
    },
}

/// A piece in use.
#[derive(Clone, Debug)]
struct Use {
    user: User,
    vector: Vector,
    piece: Range<usize>,
    writes: bool,
}

/// The pieces in use on one rank.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    uses: Vec<Use>,
    /// Larger than the number of each operation so far.
    next: u64,
}

impl Ledger {
    /// Checks that a piece may be used. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`PolicyError::InUse`].
    pub fn check(
        &self,
        user: User,
        vector: Vector,
        piece: &Range<usize>,
        writes: bool,
    ) -> Result<(), PolicyError> {
        let conflicts = |used: &&Use| {
            used.vector == vector
                && (writes || used.writes)
                && used.piece.start < piece.end
                && piece.start < used.piece.end
        };
        match self.uses.iter().find(conflicts) {
            None => Ok(()),
            Some(used) => Err(PolicyError::InUse { user, vector, piece: piece.clone(), holder: used.user }),
        }
    }

    /// Nothing is in use any more: computing and all operations are over.
    pub fn abandon(&mut self) {
        self.uses.clear();
    }

    /// Begins the computing of a gradient of `parameters` elements in these buckets.
    ///
    /// # Errors
    ///
    /// [`PolicyError::InUse`].
    pub fn begin_computing(
        &mut self,
        parameters: usize,
        buckets: &[Range<usize>],
    ) -> Result<(), PolicyError> {
        self.check(User::Computing, Vector::Parameters, &(0..parameters), false)?;
        self.check(User::Computing, Vector::Gradient, &(0..parameters), true)?;
        self.insert(User::Computing, Vector::Parameters, 0..parameters, false);
        for bucket in buckets {
            self.insert(User::Computing, Vector::Gradient, bucket.clone(), true);
        }
        Ok(())
    }

    /// Begins to compute with a bucket: reads its parameters, and writes its gradient.
    ///
    /// # Errors
    ///
    /// [`PolicyError::InUse`].
    pub fn begin_bucket(&mut self, bucket: &Range<usize>) -> Result<(), PolicyError> {
        self.check(User::Computing, Vector::Parameters, bucket, false)?;
        self.check(User::Computing, Vector::Gradient, bucket, true)?;
        self.insert(User::Computing, Vector::Parameters, bucket.clone(), false);
        self.insert(User::Computing, Vector::Gradient, bucket.clone(), true);
        Ok(())
    }

    /// Whether anything is computed.
    #[must_use]
    pub fn has_computing(&self) -> bool {
        self.uses.iter().any(|used| used.user == User::Computing)
    }

    /// Ends the computing of a bucket; returns whether it was computed.
    pub fn end_bucket(&mut self, bucket: &Range<usize>) -> bool {
        let is_bucket = |used: &Use| used.user == User::Computing && used.writes && used.piece == *bucket;
        self.uses.iter().position(is_bucket).map(|place| self.uses.swap_remove(place)).is_some()
    }

    /// Whether a bucket is being computed.
    #[must_use]
    pub fn is_computing(&self, bucket: &Range<usize>) -> bool {
        self.uses.iter().any(|used| used.user == User::Computing && used.writes && used.piece == *bucket)
    }

    /// Ends all computing.
    pub fn end_computing(&mut self) {
        self.uses.retain(|used| used.user != User::Computing);
    }

    /// Begins an operation that reads a piece, and also writes it if `writes` says so.
    ///
    /// # Errors
    ///
    /// [`PolicyError::Repeated`], [`PolicyError::InUse`].
    pub fn begin_operation(
        &mut self,
        id: OperationId,
        vector: Vector,
        piece: &Range<usize>,
        writes: bool,
    ) -> Result<(), PolicyError> {
        if id.0 < self.next {
            return Err(PolicyError::Repeated(id));
        }
        self.check(User::Operation(id), vector, piece, writes)?;
        self.insert(User::Operation(id), vector, piece.clone(), writes);
        self.next = id.0 + 1;
        Ok(())
    }

    /// Ends an operation.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NotUnderWay`].
    pub fn end_operation(&mut self, id: OperationId) -> Result<(), PolicyError> {
        let place = self.uses.iter().position(|used| used.user == User::Operation(id));
        let place = place.ok_or(PolicyError::NotUnderWay(id))?;
        self.uses.swap_remove(place);
        Ok(())
    }

    /// Whether nothing is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.uses.is_empty()
    }

    fn insert(&mut self, user: User, vector: Vector, piece: Range<usize>, writes: bool) {
        self.uses.push(Use { user, vector, piece, writes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: OperationId = OperationId(0);

    #[test]
    fn a_piece_that_an_operation_uses_is_neither_read_nor_written_before_its_end() {
        let mut ledger = Ledger::default();
        ledger.begin_operation(FIRST, Vector::Gradient, &(4..8), true).expect("nothing is in use");
        for (piece, is_free) in [(0..4, true), (8..12, true), (0..5, false), (5..6, false), (7..12, false)] {
            for writes in [false, true] {
                let checked = ledger.check(User::Update, Vector::Gradient, &piece, writes);
                assert_eq!(checked.is_ok(), is_free, "{piece:?}");
            }
            assert!(ledger.check(User::Update, Vector::Parameters, &piece, true).is_ok());
        }
        ledger.end_operation(FIRST).expect("it is under way");
        assert!(ledger.check(User::Update, Vector::Gradient, &(0..12), true).is_ok() && ledger.is_empty());
    }

    #[test]
    fn a_piece_that_an_operation_reads_is_read_by_others_and_not_written_before_its_end() {
        let mut ledger = Ledger::default();
        ledger.begin_operation(FIRST, Vector::Delta, &(4..8), false).expect("nothing is in use");
        ledger.begin_operation(OperationId(1), Vector::Delta, &(6..9), false).expect("both read");
        assert!(ledger.check(User::Update, Vector::Delta, &(0..9), false).is_ok());
        ledger.end_operation(FIRST).expect("it is under way");
        assert!(ledger.check(User::Update, Vector::Delta, &(4..6), true).is_ok());
        assert!(ledger.check(User::Update, Vector::Delta, &(5..7), true).is_err());
    }

    #[test]
    fn an_operation_is_asked_for_once_and_ends_once() {
        let mut ledger = Ledger::default();
        ledger.begin_operation(FIRST, Vector::Delta, &(0..1), true).expect("nothing is in use");
        ledger.end_operation(FIRST).expect("it is under way");
        assert_eq!(ledger.end_operation(FIRST), Err(PolicyError::NotUnderWay(FIRST)));
        assert_eq!(
            ledger.begin_operation(FIRST, Vector::Delta, &(0..1), true),
            Err(PolicyError::Repeated(FIRST))
        );
    }

    #[test]
    fn a_bucket_is_computed_with_while_operations_use_others() {
        let (mut ledger, buckets) = (Ledger::default(), [2..4, 0..2]);
        ledger.begin_operation(FIRST, Vector::Gradient, &buckets[0], true).expect("nothing is in use");
        assert!(ledger.begin_bucket(&buckets[0]).is_err() && !ledger.has_computing());
        ledger.begin_bucket(&buckets[1]).expect("no operation uses it");
        assert!(ledger.check(User::Update, Vector::Parameters, &buckets[1], true).is_err());
        assert!(ledger.check(User::Update, Vector::Parameters, &buckets[0], true).is_ok());
        assert!(ledger.is_computing(&buckets[1]) && !ledger.is_computing(&buckets[0]));
        ledger.end_operation(FIRST).expect("it is under way");
        ledger.begin_bucket(&buckets[0]).expect("its average is there");
        assert!(ledger.begin_bucket(&buckets[0]).is_err(), "it is computed with");
        ledger.end_computing();
        assert!(ledger.is_empty());
    }

    #[test]
    fn computing_gives_up_one_bucket_after_the_other_and_the_parameters_at_its_end() {
        let (mut ledger, buckets) = (Ledger::default(), [2..4, 0..2]);
        ledger.begin_computing(4, &buckets).expect("nothing is in use");
        assert!(ledger.begin_computing(4, &buckets).is_err(), "the gradient is in use");
        assert!(ledger.begin_operation(FIRST, Vector::Gradient, &buckets[0], true).is_err());
        assert!(ledger.end_bucket(&buckets[0]) && !ledger.end_bucket(&buckets[0]));
        ledger.begin_operation(FIRST, Vector::Gradient, &buckets[0], true).expect("it is ready");
        assert!(ledger.check(User::Update, Vector::Parameters, &(0..1), false).is_ok());
        assert!(ledger.check(User::Update, Vector::Parameters, &(0..1), true).is_err());
        ledger.end_computing();
        assert!(ledger.check(User::Update, Vector::Parameters, &(0..1), true).is_ok());
        assert!(ledger.begin_computing(4, &buckets).is_err(), "an operation uses a part of the gradient");
    }
}
