//! How far apart ranks may go that train at copies of a table, and what is known of each.

use pleach_transport::clock::Nanos;

use crate::state::{Remembered, State};

/// How far apart ranks may go. A clock is a step of one rank, a version an update of any rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// A rank with a copy that lacks a clock more than `low` below its own takes a new one, or goes
    /// on where that makes it wait less. No copy lacks a clock more than `high` below.
    Clocks { low: u64, high: u64 },
    /// No update is added to a shard that holds more than so many updates of others that the copy
    /// lacks by which it was computed.
    Versions { distance: u64 },
    /// Nobody waits.
    None,
}

impl Bound {
    pub(crate) fn is_of_clocks(self) -> bool {
        matches!(self, Self::Clocks { .. })
    }

    /// With versions: updates that a rank may push and the copy of another rank lacks.
    pub(crate) fn of_a_rank(distance: u64, ranks: u32) -> u64 {
        distance / u64::from(ranks - 1).max(1)
    }

    /// Writes that a rank may be ahead of a peer so that the bound is what makes it wait.
    pub(crate) fn slots(self, ranks: u32) -> u16 {
        /// Each has its memory.
        const SLOTS_MAX: u64 = 16;
        match self {
            Self::Versions { distance } => Self::of_a_rank(distance, ranks).min(SLOTS_MAX) as u16,
            Self::Clocks { .. } | Self::None => 0,
        }
    }
}

/// What a rank knows of a rank; of itself, too.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    /// Its updates that this rank's shard holds.
    pub(crate) clocks: u64,
    /// When the last of them came, and how long it was computed, in nanoseconds.
    pub(crate) came: Nanos,
    pub(crate) interval: u64,
    /// What it has answered to the last question of this rank: the clocks or versions of its shard.
    pub(crate) answer: Option<u64>,
    /// Updates of others in this rank's shard when it was answered last.
    pub(crate) others_answered: u64,
    /// Of its updates those that this rank's shard held when this rank asked for its copy.
    pub(crate) asked_with: u64,
    /// Of this rank's updates those that its copy holds, as it has told.
    pub(crate) holds: u64,
}

impl Remembered for Known {
    /// Without the answer, as nobody asks when all are at rest, and without all that only bounds of
    /// versions need.
    fn visit(&mut self, state: &mut State<'_>) {
        state.field(&mut self.clocks);
        state.field(&mut self.came.0);
        state.field(&mut self.interval);
    }
}

/// Most steps that are weighed at a time.
const CREDITS_MAX: u64 = 1 << 12;

/// How many more steps a rank makes before it waits (Zhao et al. 2019, DSSP, algorithm 2): those
/// after which the next push of the slowest rank comes soonest. `most`: so many may be made.
pub(crate) fn credits(now: Nanos, interval: u64, slowest: &Known, most: u64) -> u64 {
    if interval == 0 || slowest.interval == 0 {
        return 0;
    }
    let waiting = |steps: &u64| {
        let own = now.0.saturating_add(steps.saturating_mul(interval));
        let since = own.saturating_sub(slowest.came.0);
        let pushes = since.div_ceil(slowest.interval).max(1);
        pushes.saturating_mul(slowest.interval) - since
    };
    (0..=most.min(CREDITS_MAX)).min_by_key(waiting).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credits_are_the_steps_after_which_the_slowest_rank_pushes_soonest() {
        let slowest = Known { came: Nanos(100), interval: 35, ..Known::default() };
        // The slowest pushes at 135, 170 and so on; this rank at 101, 111, 121, 131.
        assert_eq!(credits(Nanos(101), 10, &slowest, 12), 3);
        assert_eq!(credits(Nanos(101), 10, &slowest, 2), 2);
        assert_eq!(credits(Nanos(101), 10, &slowest, 0), 0);
        assert_eq!(credits(Nanos(101), 0, &slowest, 12), 0, "nothing is known yet");
    }
}
