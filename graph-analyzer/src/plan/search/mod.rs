//! The anytime search for a plan at the lower bound.
//!
//! Buffers of which no two live at the same moment are independent, so each connected [`group`] of
//! buffers is planned by itself. For a group, [`exact`] decides whether a plan of a given height
//! exists, in a number of steps. The search asks for several heights between the lower bound and
//! the best height so far, with another strategy in each round and more steps in later rounds.
//!
//! **Invariant:** the best plan so far is always a plan; a spent effort returns it.

use super::fit;
use super::{Buffer, MemoryPlan, aligned};
use exact::{Answer, Solver, Strategy};
use group::{Group, groups};

mod exact;
mod group;

/// How long a search goes on.
///
/// The search asks after each of its steps, which take some microseconds.
pub struct Effort<'a> {
    goes_on: Box<dyn FnMut() -> bool + 'a>,
}

impl<'a> Effort<'a> {
    /// So many steps: the result depends on the buffers alone.
    #[must_use]
    pub fn steps(count: u64) -> Self {
        let mut left = count;
        Self::while_it_holds(move || {
            left = left.saturating_sub(1);
            left > 0
        })
    }

    /// As long as a condition holds, such as a time that has not come.
    #[must_use]
    pub fn while_it_holds(goes_on: impl FnMut() -> bool + 'a) -> Self {
        Self { goes_on: Box::new(goes_on) }
    }
}

impl std::fmt::Debug for Effort<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Effort").finish_non_exhaustive()
    }
}

/// Steps of an attempt in the first rounds.
const FIRST_ATTEMPT_STEPS: u64 = 1_000;

/// Most buffers for which a search goes on: a step takes longer the more there are. For more, the
/// plan is the best of the other planners.
const SEARCHED_MAX: usize = 1 << 14;

/// Rounds after which attempts get an eighth more steps.
const ROUNDS_OF_EQUAL_STEPS: usize = 4;

/// Heights beside the bound: this many eighths of the distance from the bound to the best height.
const EIGHTHS: [u64; 4] = [1, 3, 5, 7];

pub(super) fn search(buffers: &[Buffer], mut effort: Effort<'_>) -> MemoryPlan {
    let [first, others @ ..] =
        [fit::by_size(buffers), fit::whole_lives_first(buffers), fit::better_of_space_and_time(buffers)];
    let lower = |best: MemoryPlan, plan: MemoryPlan| if plan.bytes < best.bytes { plan } else { best };
    let best = others.into_iter().fold(first, lower);
    if buffers.len() > SEARCHED_MAX {
        return best;
    }
    let mut groups = groups(buffers);
    groups.iter_mut().for_each(|group| group.take_offsets(&best.offsets));
    let (mut steps, mut round) = (FIRST_ATTEMPT_STEPS, 0);
    // The arena is as high as the highest group has to be.
    loop {
        let bound = groups.iter().map(Group::bound).max().unwrap_or(0);
        let mut higher = groups.iter_mut().filter(|group| group.height() > bound).peekable();
        if higher.peek().is_none() || !higher.all(|group| attempts(group, bound, round, steps, &mut effort)) {
            return with_offsets(buffers, &groups, best);
        }
        round += 1;
        if round % ROUNDS_OF_EQUAL_STEPS == 0 {
            steps += steps / 8;
        }
    }
}

/// One round of attempts at lower heights of a group. Returns whether the effort lasts.
fn attempts(group: &mut Group, bound: u64, round: usize, steps: u64, effort: &mut Effort<'_>) -> bool {
    // All rounds try the bound; they take turns with the easier heights.
    let eighths = EIGHTHS[round % EIGHTHS.len()];
    let easier = bound + (group.height() - bound) * eighths / 8;
    for height in [bound, easier] {
        if height >= group.height() || height < group.bound() {
            continue;
        }
        let mut solver = Solver::new(group, height, Strategy::of(round));
        match solver.solve(steps, &mut effort.goes_on) {
            Answer::Found => {
                let offsets = solver.into_offsets();
                group.improve(offsets);
            }
            Answer::Impossible => group.prove_above(height),
            Answer::Unknown => {}
            Answer::Stopped => return false,
        }
    }
    true
}

/// The plan with the offsets of the groups.
fn with_offsets(buffers: &[Buffer], groups: &[Group], plan: MemoryPlan) -> MemoryPlan {
    let mut offsets = plan.offsets;
    groups.iter().for_each(|group| group.give_offsets(&mut offsets));
    let ends = buffers.iter().zip(&offsets).map(|(buffer, offset)| offset + aligned(buffer.bytes));
    let bytes = ends.max().unwrap_or(0);
    MemoryPlan { offsets, bytes }
}
