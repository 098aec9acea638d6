//! One call of a scenario, and how its data lie in the memory of a rank.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use pleach_schedule::generate::{Access, Algorithm};
use pleach_vocabulary::{Collective, DataType, Parts, Rank, ReduceOp};

use crate::call::{Counts, Paired};

/// One call, as all ranks make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallPlan {
    /// The operation and its root.
    pub collective: Collective,
    /// Element type.
    pub data_type: DataType,
    /// Reduction.
    pub op: ReduceOp,
    /// Elements of one part.
    pub count: usize,
    /// By part, where they are not equally long.
    pub lengths: Option<Vec<usize>>,
    /// How; `None` leaves it to the planner.
    pub algorithm: Option<Algorithm>,
    /// In which form, if the algorithm is named.
    pub access: Access,
    /// Whether output and input are one memory, where they can be.
    pub in_place: bool,
    /// By rank: whether input and output are registered.
    pub registered: Vec<(bool, bool)>,
    /// A rank that enters the call so much later than it could.
    pub late: Option<(Rank, Duration)>,
}

impl CallPlan {
    /// The length of an input or output that holds these parts, in bytes.
    pub(super) fn bytes_of(&self, parts: Parts) -> usize {
        let elements: usize = match &self.lengths {
            None => parts.len() * self.count,
            Some(lengths) => parts.iter().map(|part| lengths[part as usize]).sum(),
        };
        elements * self.data_type.bytes()
    }

    /// The length of all parts, in bytes.
    pub(super) fn whole_bytes(&self, ranks: u32) -> usize {
        self.bytes_of(Parts::run(0, self.collective.parts(ranks)))
    }

    /// The counts that a rank gives for the call.
    pub(super) fn counts(&self, rank: Rank, ranks: u32) -> Counts {
        let Some(lengths) = &self.lengths else { return Counts::Each(self.count) };
        let mut paired = Paired { given: vec![0; ranks as usize], taken: vec![0; ranks as usize] };
        for (part, &length) in (0..).zip(lengths) {
            let Some((from, to)) = self.collective.ends(part, ranks) else { return Counts::listed(lengths) };
            if from == rank {
                paired.given[to as usize] = length;
            }
            if to == rank {
                paired.taken[from as usize] = length;
            }
        }
        Counts::Paired(Arc::new(paired))
    }

    /// Where a part lies in an input or output that holds these parts, in bytes.
    pub(super) fn range(&self, parts: Parts, part: u32) -> Range<usize> {
        let before = match &self.lengths {
            None => parts.position(part) as usize * self.count,
            Some(lengths) => {
                let earlier = parts.iter().take(parts.position(part) as usize);
                earlier.map(|part| lengths[part as usize]).sum()
            }
        };
        let start = before * self.data_type.bytes();
        start..start + self.bytes_of(Parts::one(part))
    }

    /// How input and output of a rank lie in one memory, if they are to and can.
    pub(super) fn overlap(&self, rank: Rank, ranks: u32) -> Option<Overlap> {
        let inputs = self.collective.input_parts(rank, ranks);
        let outputs = self.collective.output_parts(rank, ranks);
        // The parts to a rank and from it would lie at the same place.
        let is_exchange = self.collective == Collective::AllToAll && ranks > 1;
        if !self.in_place || is_exchange || inputs.is_empty() || outputs.is_empty() {
            return None;
        }
        let first = |parts: Parts| parts.iter().next().unwrap_or_default();
        Some(if inputs.len() <= outputs.len() {
            let start = self.range(outputs, first(inputs)).start;
            Overlap::InputInOutput(start..start + self.bytes_of(inputs))
        } else {
            let start = self.range(inputs, first(outputs)).start;
            Overlap::OutputInInput(start..start + self.bytes_of(outputs))
        })
    }
}

/// Which of input and output lies in the other one, and where, in bytes.
pub(super) enum Overlap {
    InputInOutput(Range<usize>),
    OutputInInput(Range<usize>),
}

impl fmt::Display for CallPlan {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, data_type, op, count, .. } = self;
        match &self.lengths {
            None => write!(formatter, "{collective} of {count} {data_type} ({op}) by ")?,
            Some(lengths) => {
                let (most, all) = (lengths.iter().max().unwrap_or(&0), lengths.iter().sum::<usize>());
                write!(formatter, "{collective} of {all} {data_type} in parts of up to {most} ({op}) by ")?;
            }
        }
        match &self.algorithm {
            Some(algorithm) => write!(formatter, "{algorithm} ({})", self.access)?,
            None => write!(formatter, "choice")?,
        }
        if self.in_place {
            write!(formatter, " in place")?;
        }
        if let Some((rank, by)) = self.late {
            write!(formatter, ", rank {rank} late by {by:?}")?;
        }
        Ok(())
    }
}
