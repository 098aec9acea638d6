//! Sequences of runs: a call belongs to one of them, and runs are numbered in each.

use pleach_vocabulary::{Collective, Rank};

/// Which sequence of runs: the collectives of the group, or the messages from one rank to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Stream {
    Collectives,
    Messages { from: Rank, to: Rank },
}

impl Stream {
    pub(super) fn of(collective: Collective) -> Self {
        match collective {
            Collective::SendRecv { from, to } => Self::Messages { from, to },
            _ => Self::Collectives,
        }
    }

    pub(super) fn to_word(self) -> u64 {
        match self {
            Self::Collectives => u64::MAX,
            Self::Messages { from, to } => u64::from(from) | u64::from(to) << 32,
        }
    }

    pub(super) fn from_word(word: u64) -> Self {
        if word == u64::MAX {
            Self::Collectives
        } else {
            Self::Messages { from: word as u32, to: (word >> 32) as u32 }
        }
    }
}
