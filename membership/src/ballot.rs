//! Ballots of one register.

use crate::Seat;

/// The number of an attempt to make a record. Members have different seats, so two proposers never
/// use one ballot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ballot {
    /// Counts up with each attempt; the first has 1.
    pub round: u64,
    /// The proposer's seat.
    pub seat: Seat,
}
