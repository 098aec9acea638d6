//! Calls as values: which collective, of how many elements, of which type and reduction.
//!
//! Both `engine`, which carries calls out, and `observe`, which notes them, use this module; it
//! uses neither. A [`Descriptor`] holds the values that must be the same on all ranks; its
//! signature travels in every signal. [`Counts`] hold one rank's lengths of parts: read the first
//! comment of [`counts`].

pub mod counts;

use std::fmt;

use pleach_vocabulary::digest::chain;
use pleach_vocabulary::{Collective, DataType, Rank, ReduceOp};

use counts::PairCounts;
pub use counts::{Counts, CountsError, Paired};

/// A rank's call, as far as it must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// The operation and its root.
    pub collective: Collective,
    /// How much of it.
    pub amount: Amount,
    /// Element type.
    pub data_type: DataType,
    /// Reduction.
    pub op: ReduceOp,
    /// The caller's own tag.
    pub tag: u32,
}

/// How many elements, as far as it must be the same on all ranks. See [`counts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Amount {
    /// This many in each part.
    Each(u64),
    /// Parts of different lengths that every rank knows.
    Listed {
        /// Elements of all parts together.
        all: u64,
        /// Tells lists of equal sum apart.
        digest: u32,
    },
    /// Parts whose lengths only the two ranks know that give and get them.
    Paired,
    /// Of such parts those between two ranks.
    Pair {
        /// The lower rank.
        low: Rank,
        /// The higher rank.
        high: Rank,
        /// Elements from the lower to the higher rank.
        up: u64,
        /// Elements from the higher to the lower rank.
        down: u64,
    },
}

/// Words of an encoded descriptor.
pub(crate) const DESCRIPTOR_WORDS: usize = 4;

impl Descriptor {
    /// The signature that travels in every signal, mixed with the schedule and the chunk size.
    /// Never zero.
    pub(crate) fn signature(&self, schedule_hash: u64, chunk_bytes: usize) -> u64 {
        self.to_words().into_iter().fold(chain(schedule_hash, chunk_bytes as u64), chain).max(1)
    }

    #[inline]
    pub(crate) fn to_words(self) -> [u64; DESCRIPTOR_WORDS] {
        let (kind, a, b) = match self.collective {
            Collective::AllReduce => (1u64, 0, 0),
            Collective::Reduce { root } => (2, root, 0),
            Collective::Broadcast { root } => (3, root, 0),
            Collective::AllGather => (4, 0, 0),
            Collective::ReduceScatter => (5, 0, 0),
            Collective::Barrier => (6, 0, 0),
            Collective::SendRecv { from, to } => (7, from, to),
            Collective::Gather { root } => (8, root, 0),
            Collective::Scatter { root } => (9, root, 0),
            Collective::AllToAll => (10, 0, 0),
        };
        let codes = kind | (self.data_type as u64) << 8 | self.op.code() << 16;
        let (named, tag) = (u64::from(a) | u64::from(b) << 32, u64::from(self.tag));
        match self.amount {
            Amount::Each(count) => [codes, named, count, tag],
            Amount::Listed { all, digest } => [codes | 1 << 24, named, all, tag | u64::from(digest) << 32],
            Amount::Paired => [codes | 2 << 24, named, 0, tag],
            Amount::Pair { low, high, up, down } => {
                let [named, count] = PairCounts { low, high, up, down }.to_words(self.collective);
                // Ranks of a collective that has such parts fit 16 bits: see `generate::RANKS_MAX`.
                let pair = u64::from(low as u16) << 32 | u64::from(high as u16) << 48;
                [codes | 3 << 24 | pair, named, count, tag]
            }
        }
    }

    /// `None` when a peer sent nonsense.
    pub(crate) fn from_words(words: [u64; DESCRIPTOR_WORDS]) -> Option<Self> {
        let (a, b) = (words[1] as u32, (words[1] >> 32) as u32);
        let collective = match words[0] & 0xff {
            1 => Collective::AllReduce,
            2 => Collective::Reduce { root: a },
            3 => Collective::Broadcast { root: a },
            4 => Collective::AllGather,
            5 => Collective::ReduceScatter,
            6 => Collective::Barrier,
            7 => Collective::SendRecv { from: a, to: b },
            8 => Collective::Gather { root: a },
            9 => Collective::Scatter { root: a },
            10 => Collective::AllToAll,
            _ => return None,
        };
        let data_type = DataType::ALL.into_iter().find(|item| *item as u64 == (words[0] >> 8) & 0xff)?;
        let op = ReduceOp::ALL.into_iter().find(|item| item.code() == (words[0] >> 16) & 0xff)?;
        let amount = match (words[0] >> 24) & 0xff {
            0 => Amount::Each(words[2]),
            1 => Amount::Listed { all: words[2], digest: (words[3] >> 32) as u32 },
            2 => Amount::Paired,
            3 => {
                let (low, high) = ((words[0] >> 32) as u16, (words[0] >> 48) as u16);
                let between =
                    PairCounts::from_words(collective, low.into(), high.into(), [words[1], words[2]]);
                let PairCounts { low, high, up, down } = between;
                Amount::Pair { low, high, up, down }
            }
            _ => return None,
        };
        Some(Self { collective, amount, data_type, op, tag: words[3] as u32 })
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (collective, data_type) = (self.collective, self.data_type);
        match self.amount {
            _ if collective == Collective::Barrier => write!(formatter, "{collective}")?,
            Amount::Each(count) => write!(formatter, "{collective} of {count} {data_type}")?,
            Amount::Listed { all, digest } => write!(
                formatter,
                "{collective} with a list of counts (digest {digest:08x}) of {all} {data_type} together"
            )?,
            Amount::Paired => write!(formatter, "{collective} with own counts of {data_type}")?,
            Amount::Pair { low, high, up, down } => {
                write!(formatter, "{collective} with own counts of {data_type}")?;
                if matches!(collective, Collective::AllToAll) || up > 0 || down == 0 {
                    write!(formatter, ", {up} from rank {low} to rank {high}")?;
                }
                if matches!(collective, Collective::AllToAll) || down > 0 {
                    write!(formatter, ", {down} from rank {high} to rank {low}")?;
                }
            }
        }
        if self.collective.reduces() {
            write!(formatter, " ({})", self.op)?;
        }
        if self.tag != 0 {
            write!(formatter, " tag {}", self.tag)?;
        }
        Ok(())
    }
}
