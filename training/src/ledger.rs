//! Which pieces of which vectors are in use by computing and by operations under way.
//!
//! **Invariant:** what is in use is written by one user alone, and then no other user reads it.
//! Whatever would break this is refused, and nothing changes.

use std::collections::VecDeque;
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
    /// A vector is named that the plan does not have.
    #[error("bad policy: it names the {}, which its plan does not have; add the vector to the plan", .0.name())]
    NoVector(Vector),
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
    /// A step of some elements, and the program has the optimizer.
    #[error(
        "bad policy: a step of some elements, and the trainer has no optimizer; give it one by Trainer::by_bucket"
    )]
    NoOptimizer,
    /// The word of a session is asked for outside of one.
    #[error("bad policy: it asks for the word of a session, and trains in none; leave Action::Commit out")]
    NoSession,
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
    /// A word of a peer that no rank sends by the scheme at that place.
    #[error(
        "bad word: rank {from} has sent {word:#x}, which no rank sends here; start all ranks with one version of \
         pleach, and look at rank {from}"
    )]
    Word {
        /// The peer.
        from: u32,
        /// The word, or its first eight bytes.
        word: u64,
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

/// A piece of a vector in use.
#[derive(Clone, Debug)]
struct Use {
    user: User,
    piece: Range<usize>,
}

/// Uses of one vector of one kind, by where their pieces begin. Operations with one peer after the
/// other end in this order, too, so the first one is taken out most often.
#[derive(Clone, Debug, Default)]
struct Uses(VecDeque<Use>);

impl Uses {
    fn insert(&mut self, user: User, piece: &Range<usize>) {
        let is_before = |used: &Use| (used.piece.start, used.piece.end) <= (piece.start, piece.end);
        let is_last = self.0.back().is_none_or(is_before);
        let used = Use { user, piece: piece.clone() };
        if is_last {
            return self.0.push_back(used);
        }
        let place = self.0.partition_point(is_before);
        self.0.insert(place, used);
    }

    /// The place of a use.
    fn place(&self, user: User, begin: usize) -> Option<usize> {
        let is_before = |used: &Use| used.piece.start < begin;
        let has_before = self.0.front().is_some_and(is_before);
        let first = if has_before { self.0.partition_point(is_before) } else { 0 };
        let with_this_begin = self.0.range(first..).take_while(|used| used.piece.start == begin);
        with_this_begin.zip(first..).find(|(used, _)| used.user == user).map(|(_, place)| place)
    }

    fn remove(&mut self, user: User, begin: usize) {
        match self.place(user, begin) {
            Some(0) => drop(self.0.pop_front()),
            Some(place) => drop(self.0.remove(place)),
            None => {}
        }
    }

    /// A use of a piece that has elements of this one.
    fn overlapping(&self, piece: &Range<usize>) -> Option<&Use> {
        self.0
            .iter()
            .take_while(|used| used.piece.start < piece.end)
            .find(|used| piece.start < used.piece.end)
    }

    /// The same, of pieces that have no elements in common, so that their ends are in order, too.
    fn overlapping_of_disjoint(&self, piece: &Range<usize>) -> Option<&Use> {
        let is_before = |used: &Use| used.piece.end <= piece.start;
        if self.0.back().is_none_or(is_before) {
            return None;
        }
        let first = self.0.partition_point(is_before);
        self.0.get(first).filter(|used| used.piece.start < piece.end)
    }

    fn end_computing(&mut self) {
        self.0.retain(|used| used.user != User::Computing);
    }

    fn has_computing(&self) -> bool {
        self.0.iter().any(|used| used.user == User::Computing)
    }
}

/// An operation under way: the use that ends with it.
#[derive(Clone, Debug)]
struct UnderWay {
    id: OperationId,
    vector: Vector,
    begin: usize,
    writes: bool,
}

/// The pieces in use on one rank. A rank that reads from, and writes to, all others has hundreds of
/// them, so they are found without a look at each.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// By vector: whether there is none.
    is_missing: [bool; Vector::COUNT],
    /// By vector. Pieces that are written have no elements in common.
    written: [Uses; Vector::COUNT],
    read: [Uses; Vector::COUNT],
    /// In the order of their numbers.
    under_way: VecDeque<UnderWay>,
    /// Larger than the number of each operation so far.
    next: u64,
}

impl Ledger {
    /// Of a rank that has these vectors.
    #[must_use]
    pub fn of(vectors: &[Vector]) -> Self {
        let mut is_missing = [true; Vector::COUNT];
        vectors.iter().for_each(|vector| is_missing[vector.index()] = false);
        Self { is_missing, ..Self::default() }
    }

    /// Checks that a piece may be used. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`PolicyError::InUse`], [`PolicyError::NoVector`].
    pub fn check(
        &self,
        user: User,
        vector: Vector,
        piece: &Range<usize>,
        writes: bool,
    ) -> Result<(), PolicyError> {
        if self.is_missing[vector.index()] {
            return Err(PolicyError::NoVector(vector));
        }
        let written = self.written[vector.index()].overlapping_of_disjoint(piece);
        let read = || if writes { self.read[vector.index()].overlapping(piece) } else { None };
        match written.or_else(read) {
            None => Ok(()),
            Some(used) => Err(PolicyError::InUse { user, vector, piece: piece.clone(), holder: used.user }),
        }
    }

    /// Nothing is in use any more: computing and all operations are over.
    pub fn abandon(&mut self) {
        self.written.iter_mut().chain(&mut self.read).for_each(|uses| uses.0.clear());
        self.under_way.clear();
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
        self.read[Vector::Parameters.index()].insert(User::Computing, &(0..parameters));
        for bucket in buckets {
            self.written[Vector::Gradient.index()].insert(User::Computing, bucket);
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
        self.read[Vector::Parameters.index()].insert(User::Computing, bucket);
        self.written[Vector::Gradient.index()].insert(User::Computing, bucket);
        Ok(())
    }

    /// Whether anything is computed.
    #[must_use]
    pub fn has_computing(&self) -> bool {
        // Its parameters are in use until its end, and its gradient until each bucket is ready.
        self.read[Vector::Parameters.index()].has_computing()
    }

    /// Ends the computing of a bucket; returns whether it was computed.
    pub fn end_bucket(&mut self, bucket: &Range<usize>) -> bool {
        let place = self.computed_place(bucket);
        place.and_then(|place| self.written[Vector::Gradient.index()].0.remove(place)).is_some()
    }

    /// Whether a bucket is being computed.
    #[must_use]
    pub fn is_computing(&self, bucket: &Range<usize>) -> bool {
        self.computed_place(bucket).is_some()
    }

    fn computed_place(&self, bucket: &Range<usize>) -> Option<usize> {
        let written = &self.written[Vector::Gradient.index()];
        written.place(User::Computing, bucket.start).filter(|place| written.0[*place].piece == *bucket)
    }

    /// Ends all computing.
    pub fn end_computing(&mut self) {
        self.read[Vector::Parameters.index()].end_computing();
        self.written[Vector::Gradient.index()].end_computing();
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
        self.uses(vector, writes).insert(User::Operation(id), piece);
        self.under_way.push_back(UnderWay { id, vector, begin: piece.start, writes });
        self.next = id.0 + 1;
        Ok(())
    }

    /// Ends an operation.
    ///
    /// # Errors
    ///
    /// [`PolicyError::NotUnderWay`].
    pub fn end_operation(&mut self, id: OperationId) -> Result<(), PolicyError> {
        let ended = if self.under_way.front().is_some_and(|first| first.id == id) {
            self.under_way.pop_front()
        } else {
            let place = self.under_way.binary_search_by_key(&id, |it| it.id);
            place.ok().and_then(|place| self.under_way.remove(place))
        };
        let UnderWay { vector, begin, writes, .. } = ended.ok_or(PolicyError::NotUnderWay(id))?;
        self.uses(vector, writes).remove(User::Operation(id), begin);
        Ok(())
    }

    /// Whether nothing is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.under_way.is_empty() && !self.has_computing()
    }

    fn uses(&mut self, vector: Vector, writes: bool) -> &mut Uses {
        let all = if writes { &mut self.written } else { &mut self.read };
        &mut all[vector.index()]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn pieces_are_refused_as_a_look_at_each_use_would_refuse_them(
            asked in prop::collection::vec((0_usize..12, 0_usize..5, prop::bool::ANY, 0_usize..8), 1..40),
        ) {
            let mut ledger = Ledger::default();
            let mut under_way: Vec<(OperationId, Range<usize>, bool)> = Vec::new();
            for (id, (begin, length, writes, ends)) in (0..).map(OperationId).zip(asked) {
                let piece = begin..begin + length;
                let is_used = under_way.iter().any(|(_, used, written)| {
                    (writes || *written) && used.start < piece.end && piece.start < used.end
                });
                let begun = ledger.begin_operation(id, Vector::Delta, &piece, writes);
                prop_assert_eq!(begun.is_err(), is_used);
                if begun.is_ok() {
                    under_way.push((id, piece, writes));
                }
                if ends < under_way.len() {
                    let (ended, ..) = under_way.remove(ends);
                    prop_assert_eq!(ledger.end_operation(ended), Ok(()));
                }
                prop_assert_eq!(ledger.is_empty(), under_way.is_empty());
            }
        }
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
