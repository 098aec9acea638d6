//! Verifies a plan, by a sweep over the moments at which buffers begin and end.
//!
//! **Invariant:** nothing here is shared with the planners, the rounding of sizes included.

use std::collections::BTreeMap;

use super::{ALIGNMENT_BYTES, BUFFERS_MAX, Buffer, MemoryPlan};

/// What holds of a plan that was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The size of the arena.
    pub bytes: u64,
    /// The largest sum of live bytes: no plan has a smaller arena.
    pub lower_bound: u64,
}

impl Checked {
    /// Whether no better plan exists.
    #[must_use]
    pub fn is_optimal(&self) -> bool {
        self.bytes == self.lower_bound
    }
}

/// Why a plan is none.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFlaw {
    /// There are more buffers than a plan may have.
    #[error("{buffers} buffers in one plan, which has at most {BUFFERS_MAX}; make several plans")]
    TooMany {
        /// The number of buffers.
        buffers: usize,
    },
    /// There is not one offset for each buffer.
    #[error("{offsets} offsets for {buffers} buffers; plan all buffers")]
    Count {
        /// The number of offsets.
        offsets: usize,
        /// The number of buffers.
        buffers: usize,
    },
    /// An offset is not aligned.
    #[error("buffer {buffer} is at {offset}, which is no multiple of {ALIGNMENT_BYTES}; align it")]
    Unaligned {
        /// The buffer.
        buffer: usize,
        /// Its offset.
        offset: u64,
    },
    /// A buffer ends behind the arena.
    #[error("buffer {buffer} ends at {end}, and the arena at {arena}; enlarge the arena")]
    Outside {
        /// The buffer.
        buffer: usize,
        /// Its end.
        end: u64,
        /// The end of the arena.
        arena: u64,
    },
    /// Two buffers that live at the same moment share bytes.
    #[error("buffers {one} and {other} both live at moment {moment} and share bytes; move one of them")]
    Overlap {
        /// A buffer.
        one: usize,
        /// Another buffer.
        other: usize,
        /// A moment at which both live.
        moment: u64,
    },
}

pub(super) fn check(plan: &MemoryPlan, buffers: &[Buffer]) -> Result<Checked, PlanFlaw> {
    if plan.offsets.len() != buffers.len() {
        return Err(PlanFlaw::Count { offsets: plan.offsets.len(), buffers: buffers.len() });
    }
    if buffers.len() > BUFFERS_MAX {
        return Err(PlanFlaw::TooMany { buffers: buffers.len() });
    }
    let mut changes = Vec::with_capacity(buffers.len() * 2);
    for (number, (buffer, &offset)) in buffers.iter().zip(&plan.offsets).enumerate() {
        if offset % ALIGNMENT_BYTES != 0 {
            return Err(PlanFlaw::Unaligned { buffer: number, offset });
        }
        // An end behind all numbers is outside too. Inside of an arena no sum overflows.
        let end = offset.checked_add(occupied(buffer));
        if end.is_none_or(|end| end > plan.bytes) {
            let end = end.unwrap_or(u64::MAX);
            return Err(PlanFlaw::Outside { buffer: number, end, arena: plan.bytes });
        }
        if !buffer.lifetime.is_empty() && buffer.bytes > 0 {
            // What ends at a moment ends before anything begins at this moment.
            changes.push((buffer.lifetime.end, false, number));
            changes.push((buffer.lifetime.start, true, number));
        }
    }
    changes.sort_unstable();
    let (mut live, mut live_bytes, mut lower_bound) = (BTreeMap::<u64, usize>::new(), 0, 0);
    for (moment, begins, number) in changes {
        let (bytes, offset) = (occupied(&buffers[number]), plan.offsets[number]);
        if !begins {
            live.remove(&offset);
            live_bytes -= bytes;
            continue;
        }
        let below = live.range(..=offset).next_back();
        let below = below.filter(|(start, other)| **start + occupied(&buffers[**other]) > offset);
        let above = live.range(offset..).next().filter(|(start, _)| **start < offset + bytes);
        if let Some((_, &other)) = below.or(above) {
            return Err(PlanFlaw::Overlap { one: other, other: number, moment });
        }
        live.insert(offset, number);
        live_bytes += bytes;
        lower_bound = lower_bound.max(live_bytes);
    }
    Ok(Checked { bytes: plan.bytes, lower_bound })
}

/// The bytes that a buffer keeps others from.
fn occupied(buffer: &Buffer) -> u64 {
    buffer.bytes.div_ceil(ALIGNMENT_BYTES).saturating_mul(ALIGNMENT_BYTES)
}
