//! Whole jobs in virtual time, under seeded faults. A seed that fails is printed with its state.

mod checkers;
mod scenarios;
mod world;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::num::NonZeroU32;
use std::time::Duration;

use pleach_membership::{MEMBERS_MAX, Maker, Process};
use pleach_transport::Nanos;
use pleach_vocabulary::random::Random;
use world::{Event, Fault, SUSPECT_AFTER, World, ms};

/// How long faults come.
const FAULTS: Duration = Duration::from_secs(3);

/// Within this many times `suspect_after` after the last fault every living member has entered the
/// newest epoch.
const SETTLED: u32 = 12;

fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn any(random: &mut Random, world: &World, joined: &BTreeSet<Process>) -> Process {
    let all: Vec<Process> = world.living().chain(joined.iter().copied()).collect();
    all[random.index(all.len())]
}

/// Faults of one seed.
fn plan_faults(random: &mut Random, world: &mut World, members: u32) {
    let unit = world.unit();
    let mut joined = BTreeSet::new();
    let mut kills = 0;
    for number in 0..1 + random.below(7) {
        let start = Nanos::ZERO + Duration::from_micros(random.below(FAULTS.as_micros() as u64));
        let length = Duration::from_micros(random.below(3 * SUSPECT_AFTER.as_micros() as u64));
        let end = start + length;
        let target = any(random, world, &joined);
        let mut add = |time: Nanos, fault: Fault| world.at(time, Event::Fault(fault));
        match random.below(9) {
            0 | 1 if kills + 1 < members => {
                kills += 1;
                add(start, Fault::Kill(Process::new(random.below(u64::from(members)) as u32, 1)));
            }
            2 => add(start, Fault::Freeze(target, length)),
            3 => {
                for (seat, after) in (members + number as u32 * unit..).zip(0..unit) {
                    let process = Process::new(seat, 2);
                    joined.insert(process);
                    add(start + ms(u64::from(17 * after)), Fault::Join(process));
                }
            }
            4 => add(start, Fault::Leave(Process::new(random.below(u64::from(members)) as u32, 1))),
            5 => {
                // Two sides that do not reach each other.
                let side: Vec<bool> = (0..members + 8).map(|_| random.below(3) == 0).collect();
                for (from, to) in
                    pairs(members + 8).filter(|(from, to)| side[*from as usize] != side[*to as usize])
                {
                    world.at(start, Event::Fault(Fault::Cut(from, to, true)));
                    world.at(end, Event::Fault(Fault::Cut(from, to, false)));
                }
            }
            6 | 7 => {
                let (from, to) =
                    (random.below(u64::from(members)) as u32, random.below(u64::from(members)) as u32);
                add(start, Fault::Cut(from, to, true));
                add(end, Fault::Cut(from, to, false));
                if random.below(2) == 0 {
                    add(start, Fault::Cut(to, from, true));
                    add(end, Fault::Cut(to, from, false));
                }
            }
            _ => {
                add(start, Fault::Loss(1 + random.below(30)));
                add(end, Fault::Loss(0));
            }
        }
    }
}

fn pairs(seats: u32) -> impl Iterator<Item = (u32, u32)> {
    (0..seats).flat_map(move |from| (0..seats).map(move |to| (from, to))).filter(|(from, to)| from != to)
}

/// Whether every living member has entered the newest epoch, and the newest epoch has no one else.
fn is_settled(world: &World) -> bool {
    let Some((_, newest)) = world.checkers.records.last_key_value() else { return false };
    newest.members().iter().all(|member| {
        world.is_living(*member) && world.entered(*member).is_some_and(|record| record == newest)
    })
}

/// Whether the members of the newest epoch that still run may make another record, and have a whole
/// unit to make it for.
fn has_quorum(world: &World) -> bool {
    let newest = world.checkers.records.values().next_back().expect("there is a first record");
    let is_living = |member: &Process| world.is_living(*member);
    let living = newest.members().iter().filter(|member| is_living(member)).count();
    let mut units = newest.members().chunks(world.unit() as usize);
    let is_whole = units.any(|members| members.iter().all(is_living));
    is_whole && (world.certifies || 2 * living > newest.members().len())
}

struct Totals {
    epochs: usize,
    retries: u64,
    steps: usize,
    no_quorums: u64,
    stuck: usize,
    longest: Duration,
}

fn simulate(seed: u64, unit: NonZeroU32, is_full: bool, totals: &mut Totals) {
    let mut random = Random::new(seed);
    let members = (2 + random.below(7) as u32) * unit.get();
    let maker = if random.below(4) == 0 { Maker::Store } else { Maker::Members };
    let most = if is_full { members as usize } else { MEMBERS_MAX };
    let mut world = World::of_most(seed, members, maker, unit, most);
    world.certifies = maker == Maker::Store || random.below(4) != 0;
    plan_faults(&mut random, &mut world, members);
    let end = Nanos::ZERO + FAULTS + 3 * SUSPECT_AFTER;
    world.run_until(end + SUSPECT_AFTER * SETTLED);
    let is_settled = is_settled(&world);
    if is_settled {
        let time = world.checkers.last_change.since(world.last_fault);
        totals.longest = totals.longest.max(time);
    } else if has_quorum(&world) {
        panic!("seed {seed} ({members} members, {maker:?}) does not settle:\n{}", world.describe());
    } else {
        totals.stuck += 1;
    }
    let steps = world.checkers.steps();
    world.run_until(world.now + ms(500));
    let runs_on = world.checkers.steps() > steps || !is_settled || world.living().count() == 0;
    assert!(runs_on, "seed {seed}: no step is committed:\n{}", world.describe());
    totals.epochs += world.checkers.records.len() - 1;
    totals.retries += world.checkers.retries;
    totals.steps += world.checkers.steps();
    totals.no_quorums += world.checkers.no_quorums;
}

/// `is_full`: who joins takes the place of one that is gone.
fn simulate_all(seeds: std::ops::Range<u64>, unit: u32, is_full: bool) {
    let unit = NonZeroU32::new(unit).expect("a unit has a seat");
    let (count, mut totals) = (
        seeds.end - seeds.start,
        Totals { epochs: 0, retries: 0, steps: 0, no_quorums: 0, stuck: 0, longest: Duration::ZERO },
    );
    for seed in seeds {
        let simulate = || simulate(seed, unit, is_full, &mut totals);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(simulate));
        if let Err(panic) = failed {
            say(&format!("seed {seed} fails"));
            std::panic::resume_unwind(panic);
        }
    }
    let Totals { epochs, retries, steps, no_quorums, stuck, longest } = totals;
    say(&format!(
        "{count} seeds: {epochs} epochs, {steps} steps committed, {retries} verdicts to retry, {no_quorums} times no \
         quorum, {stuck} jobs without one at the end; settled at most {longest:?} after the last fault"
    ));
    assert!(epochs > 0 && steps > 0 && retries > 0);
}

#[test]
fn jobs_under_faults() {
    simulate_all(0..SEEDS, 1, false);
}

#[test]
fn jobs_of_units_under_faults() {
    simulate_all(0..SEEDS / 5, 2, false);
    simulate_all(0..SEEDS / 10, 3, false);
}

#[test]
fn jobs_without_room_under_faults() {
    simulate_all(0..SEEDS / 5, 1, true);
    simulate_all(0..SEEDS / 10, 2, true);
}

/// As many as take a few seconds.
const SEEDS: u64 = 150;

#[test]
#[ignore = "takes minutes: nightly"]
fn many_jobs_under_faults() {
    simulate_all(SEEDS..10_000, 1, false);
    simulate_all(SEEDS..3_000, 2, false);
    simulate_all(SEEDS..3_000, 1, true);
}
