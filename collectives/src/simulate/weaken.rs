//! The mutant of proofs: a program whose schedule lost a dependency after it was proved.

use pleach_schedule::Schedule;
use pleach_schedule::verify::{Proof, verify};
use pleach_vocabulary::Rank;

use crate::engine::Program;

/// `rank`'s share of what was proved, without one of the dependencies that the proof stands on: the
/// first, counted from number `from` on, without which the schedule is refused. `None` where there
/// is none.
pub(super) fn weakened(proof: &Proof, rank: Rank, algorithm: &str, from: u64) -> Option<Program> {
    let count = dependencies(proof.schedule(), rank).len();
    let start = (from as usize).checked_rem(count)?;
    let mut numbers = (start..count).chain(0..start);
    let needed = numbers.find(|number| verify(without(proof.schedule(), rank, *number)).is_err())?;
    Some(Program::new(proof, rank, algorithm).without_dependency(needed))
}

/// Lane, step and place in the step's list, in the order of the program.
fn dependencies(schedule: &Schedule, rank: Rank) -> Vec<(usize, usize, usize)> {
    let lanes = schedule.programs[rank as usize].iter().enumerate();
    let steps = lanes.flat_map(|(lane, steps)| steps.steps.iter().enumerate().map(move |step| (lane, step)));
    steps.flat_map(|(lane, (number, step))| (0..step.after.len()).map(move |at| (lane, number, at))).collect()
}

fn without(schedule: &Schedule, rank: Rank, number: usize) -> Schedule {
    let (lane, step, at) = dependencies(schedule, rank)[number];
    let mut damaged = schedule.clone();
    damaged.programs[rank as usize][lane].steps[step].after.remove(at);
    damaged
}
