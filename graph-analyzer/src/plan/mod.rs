//! Where every buffer lies in one arena.
//!
//! A [`Buffer`] has a size and a lifetime; a [`MemoryPlan`] gives each buffer an offset such that
//! no two buffers that live at the same moment share a byte. Four planners make plans:
//!
//! * [`best_fit`](MemoryPlan::best_fit): by decreasing size, each in the tightest gap that holds it
//!   ("greedy by size", Pisarchyk and Lee 2020).
//! * [`tflite`](MemoryPlan::tflite): the same, after the buffers that live throughout, as the arena
//!   planner of TensorFlow Lite orders them.
//! * [`xla`](MemoryPlan::xla): the better of two orders, by size and by length of life, as XLA's
//!   heap simulator does.
//! * [`search`](MemoryPlan::search): starts with the plans above and improves on the best, until a
//!   plan is at the lower bound or the [`Effort`] is spent.
//!
//! **Invariant:** offsets are multiples of [`ALIGNMENT_BYTES`]. [`MemoryPlan::check`] verifies a
//! plan and computes the lower bound, the largest sum of live bytes, and shares no code with the
//! planners.

use std::ops::Range;

mod check;
mod fit;
mod search;

pub use check::{Checked, PlanFlaw};
pub use search::Effort;

/// Offsets are multiples of this many bytes, and sizes are rounded up to them: a cache line.
pub const ALIGNMENT_BYTES: u64 = 64;

/// Memory that is needed for some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// The moments at which it lives. A buffer with an empty range overlaps nothing.
    pub lifetime: Range<u64>,
    /// The size. At most [`BUFFER_BYTES_MAX`].
    pub bytes: u64,
}

/// The largest size of one buffer. Sums of sizes stay exact.
pub const BUFFER_BYTES_MAX: u64 = 1 << 40;

/// Most buffers of one plan: planners take the square of their number in steps.
pub const BUFFERS_MAX: usize = 1 << 17;

/// An offset for each buffer, in the order of the buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The first byte of each buffer.
    pub offsets: Vec<u64>,
    /// The size of the arena.
    pub bytes: u64,
}

impl MemoryPlan {
    /// Places buffers by decreasing size, each in the smallest gap that holds it.
    #[must_use]
    pub fn best_fit(buffers: &[Buffer]) -> Self {
        fit::by_size(buffers)
    }

    /// Places buffers as the arena planner of TensorFlow Lite does.
    #[must_use]
    pub fn tflite(buffers: &[Buffer]) -> Self {
        fit::whole_lives_first(buffers)
    }

    /// Places buffers as XLA's heap simulator does.
    #[must_use]
    pub fn xla(buffers: &[Buffer]) -> Self {
        fit::better_of_space_and_time(buffers)
    }

    /// Searches for a plan at the lower bound, as long as the effort lasts.
    #[must_use]
    pub fn search(buffers: &[Buffer], effort: Effort<'_>) -> Self {
        search::search(buffers, effort)
    }

    /// Verifies that this is a plan of these buffers.
    ///
    /// # Errors
    ///
    /// [`PlanFlaw`] names the buffers that the plan places wrongly.
    pub fn check(&self, buffers: &[Buffer]) -> Result<Checked, PlanFlaw> {
        check::check(self, buffers)
    }
}

/// A size in whole units of the alignment.
fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT_BYTES)
}
