//! Damaged schedules: whatever `verify` still accepts must give right results in every run.

use pleach_vocabulary::random::Random;
use std::collections::BTreeMap;

use pleach_schedule::verify::{Violation, verify};
use pleach_schedule::{Op, Part, Schedule, SignalSlot};
use pleach_vocabulary::{Collective, Rank};

use super::interpreter::{self, Wrong};
use super::{GOOD, parse};

/// Runs of a schedule that was accepted.
const RUNS: u64 = 80;
/// Runs of a schedule that was refused, to see whether it was with reason.
const RUNS_REFUSED: u64 = 20;

fn runs(schedule: &Schedule, count: u64, salt: u64) -> Result<(), (u64, Wrong)> {
    for seed in 0..count {
        let chunks = match schedule.collective {
            Collective::Barrier => 1,
            _ => 1 + (seed as usize % (2 * schedule.window as usize + 1)),
        };
        interpreter::run(schedule, chunks, salt << 32 | seed).map_err(|wrong| (seed, wrong))?;
    }
    Ok(())
}

/// Every schedule that differs from this one in one small thing, with a description.
fn mutants(good: &Schedule) -> Vec<(String, Schedule)> {
    let mut all = Vec::new();
    let mut add = |what: String, change: &dyn Fn(&mut Schedule)| {
        let mut mutant = good.clone();
        change(&mut mutant);
        if mutant != *good {
            all.push((what, mutant));
        }
    };
    for window in [1, 2, 3, 5] {
        add(format!("window {window}"), &|mutant| mutant.window = window);
    }
    for (rank, program) in good.programs.iter().enumerate() {
        for (lane_number, lane) in program.iter().enumerate() {
            for (number, step) in lane.steps.iter().enumerate() {
                let at = format!("rank {rank} lane {lane_number} step {number}");
                for entry in 0..step.after.len() {
                    add(format!("{at}: without after {:?}", step.after[entry]), &|mutant| {
                        mutant.programs[rank][lane_number].steps[number].after.remove(entry);
                    });
                    add(format!("{at}: lag of after {:?}", step.after[entry]), &|mutant| {
                        let lag = &mut mutant.programs[rank][lane_number].steps[number].after[entry].1;
                        *lag = if *lag == 0 { 1 } else { *lag - 1 };
                    });
                }
                add(format!("{at}: dropped"), &|mutant| {
                    drop_step(&mut mutant.programs[rank][lane_number].steps, number);
                });
                if number > 0 {
                    add(format!("{at}: before the step before it"), &|mutant| {
                        exchange(&mut mutant.programs[rank][lane_number].steps, number);
                    });
                }
                for (what, op) in other_operations(&step.op, good.ranks()) {
                    add(format!("{at}: {what}"), &|mutant| {
                        mutant.programs[rank][lane_number].steps[number].op = op.clone();
                    });
                }
            }
        }
    }
    all
}

fn drop_step(steps: &mut Vec<pleach_schedule::Step>, number: usize) {
    steps.remove(number);
    for step in steps {
        step.after.retain(|(earlier, _)| *earlier as usize != number);
        step.after.iter_mut().for_each(|(earlier, _)| *earlier -= u32::from(*earlier as usize > number));
    }
}

/// Exchanges a step with the one before it, and what is after them; an entry that now looks forward
/// is dropped.
fn exchange(steps: &mut [pleach_schedule::Step], number: usize) {
    steps.swap(number - 1, number);
    for (place, step) in steps.iter_mut().enumerate() {
        for (earlier, _) in &mut step.after {
            if *earlier as usize == number {
                *earlier -= 1;
            } else if *earlier as usize + 1 == number {
                *earlier += 1;
            }
        }
        step.after.retain(|&(earlier, lag)| lag > 0 || (earlier as usize) < place);
    }
}

const PARTS: [Part; 6] =
    [Part::Input, Part::Output, Part::SharedInput, Part::SharedOutput, Part::Scratch(0), Part::Scratch(1)];

fn other_operations(op: &Op, ranks: Rank) -> Vec<(String, Op)> {
    let mut others = Vec::new();
    let mut add = |what: String, other: Op| others.push((what, other));
    match op {
        Op::Signal { to, signal_slot } => {
            add("other slot".into(), Op::Signal { to: *to, signal_slot: SignalSlot(signal_slot.0 ^ 1) });
            add("other rank".into(), Op::Signal { to: (to + 1) % ranks, signal_slot: *signal_slot });
        }
        Op::Wait { from, signal_slot } => {
            add("other slot".into(), Op::Wait { from: *from, signal_slot: SignalSlot(signal_slot.0 ^ 1) });
            add("other rank".into(), Op::Wait { from: (from + 1) % ranks, signal_slot: *signal_slot });
        }
        Op::Put { to, src, dst, signal_slot } => {
            add(
                "other slot".into(),
                Op::Put { to: *to, src: *src, dst: *dst, signal_slot: SignalSlot(signal_slot.0 ^ 1) },
            );
            add("no bytes".into(), Op::Signal { to: *to, signal_slot: *signal_slot });
            for part in PARTS {
                add(
                    format!("from {part}"),
                    Op::Put { to: *to, src: part, dst: *dst, signal_slot: *signal_slot },
                );
                add(
                    format!("into {part}"),
                    Op::Put { to: *to, src: *src, dst: part, signal_slot: *signal_slot },
                );
            }
        }
        Op::Reduce { from, into } => {
            for index in 0..from.len() {
                for part in PARTS {
                    let mut from = from.clone();
                    from[index].part = part;
                    add(format!("from {part}"), Op::Reduce { from, into: into.clone() });
                }
                let mut moved = from.clone();
                moved[index].rank = (moved[index].rank + 1) % ranks;
                add("from another rank".into(), Op::Reduce { from: moved, into: into.clone() });
                if from.len() > 1 {
                    let mut fewer = from.clone();
                    fewer.remove(index);
                    add("a source less".into(), Op::Reduce { from: fewer, into: into.clone() });
                    let mut turned = from.clone();
                    turned.rotate_left(1);
                    add("sources turned".into(), Op::Reduce { from: turned, into: into.clone() });
                }
            }
            for index in 0..into.len() {
                for part in PARTS {
                    let mut into = into.clone();
                    into[index].part = part;
                    add(format!("into {part}"), Op::Reduce { from: from.clone(), into });
                }
            }
            for part in PARTS {
                let mut into = into.clone();
                let place = pleach_schedule::Place { rank: into[0].rank, part };
                into.push(place);
                add(format!("also into {part}"), Op::Reduce { from: from.clone(), into });
            }
        }
    }
    others
}

#[test]
fn good_schedules_give_right_results_in_every_interleaving() {
    for (number, (name, text)) in GOOD.into_iter().enumerate() {
        if let Err((seed, wrong)) = runs(&parse(text), 400, number as u64) {
            panic!("{name}, seed {seed}: {wrong:?}");
        }
    }
}

#[test]
fn damaged_schedules_are_refused_or_harmless() {
    let mut random = Random::new(1);
    let mut refusals: BTreeMap<String, (u32, u32)> = BTreeMap::new();
    let (mut accepted, mut refused) = (0, 0);
    for (name, text) in GOOD {
        for (what, mutant) in mutants(&parse(text)) {
            let salt = random.bits() >> 32;
            match verify(mutant.clone()) {
                Ok(_) => {
                    accepted += 1;
                    if let Err((seed, wrong)) = runs(&mutant, RUNS, salt) {
                        panic!("accepted {name}, {what}; run {seed}: {wrong:?}\n{mutant}");
                    }
                }
                Err(violation) => {
                    refused += 1;
                    let kind = format!("{violation:#?}");
                    let kind = kind.split([' ', '(', '\n']).next().unwrap_or_default().to_owned();
                    let with_reason = match violation {
                        // The interpreter has no words for a form that is forbidden.
                        Violation::NoSlice { .. }
                        | Violation::Private { .. }
                        | Violation::UnknownStep { .. } => true,
                        Violation::ToItself { .. } | Violation::NamedTwice { .. } => true,
                        _ => runs(&mutant, RUNS_REFUSED, salt).is_err(),
                    };
                    let counts = refusals.entry(kind).or_default();
                    counts.0 += 1;
                    counts.1 += u32::from(with_reason);
                }
            }
        }
    }
    println!(
        "{accepted} accepted, {refused} refused; by kind, how often and how often seen to be wrong: {refusals:#?}"
    );
    assert!(accepted > 20 && refused > 400, "{accepted} accepted, {refused} refused");
    // The interpreter has teeth, and verify does not refuse for nothing.
    for kind in
        ["Race", "Undefined", "ContributionMissing", "OutputMissing", "Deadlock", "Unconsumed", "TouchedLate"]
    {
        let &(count, wrong) = refusals.get(kind).unwrap_or(&(0, 0));
        assert!(count > 0, "no mutant was refused as {kind}");
        assert!(wrong * 2 > count, "of {count} mutants refused as {kind} only {wrong} were seen to be wrong");
    }
}
