//! Seats and the processes that hold them.

use std::cmp::Ordering;
use std::fmt;

use pleach_transport::Incarnation;

/// A stable number of a place in the job. One process after the other may hold it; ranks of an
/// epoch are its members in the order of their seats.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Seat(pub u32);

impl fmt::Debug for Seat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "seat {}", self.0)
    }
}

/// A process: a seat, and the 64 random bits that tell it from every other holder of the seat.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Process {
    /// Its seat.
    pub seat: Seat,
    /// Its random bits.
    pub incarnation: Incarnation,
}

impl Process {
    /// The process of this incarnation on this seat.
    #[must_use]
    pub const fn new(seat: u32, incarnation: u64) -> Self {
        Self { seat: Seat(seat), incarnation: Incarnation(incarnation) }
    }
}

/// By seats.
impl Ord for Process {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.seat, self.incarnation.0).cmp(&(other.seat, other.incarnation.0))
    }
}

impl PartialOrd for Process {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}#{:x}", self.seat.0, self.incarnation.0)
    }
}

impl fmt::Display for Process {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} (incarnation {:016x})", self.seat, self.incarnation.0)
    }
}
