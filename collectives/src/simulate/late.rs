//! Rounds of whole groups in virtual time, with late and frozen ranks and signals that overtake
//! each other, and the checkers that stand outside.
//!
//! A checker knows what each rank's memory held when the rank was bound, and nothing of how sets
//! and sums come about. It checks that all ranks have the same set and the same sum; that the sum
//! is that of exactly this set; that each contribution is in one round, or in none if late ones are
//! dropped; that each rank knows how many results it has missed; that no rank is left out too often
//! in a row; and that every rank comes to an end. The checker of races watches beside it, as it
//! does in calls: a caller writes no contribution that a transfer or a peer may still read, and
//! reads no result that is still written.
//!
//! `pleach sim` runs it where a scenario has late ranks.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pleach_schedule::generate::Variant;
use pleach_transport::mutex::lock;
use pleach_transport::sim::{self, AccessKind, FaultKind, FaultKinds, Random};
use pleach_transport::{Nanos, Slice};
use pleach_vocabulary::{DataType, Rank, ReduceOp};

use super::in_rounds::{RoundsSlices, make_rounds};
use super::watch::Watch;
use super::{Checker, Cluster, Failure, Limits, Scenario, TIMEOUT_FAR, TrialReport};
use crate::engine::Bytes;
use crate::exact::BlockSums;
#[cfg(test)]
use crate::partial::Mutant;
use crate::partial::{
    Activation, Awaited, Bound, Contributions, Divisor, EXACT_CONTRIBUTIONS, Ended, Late, Own, RankSet,
    Rounds, Terms,
};

#[cfg(test)]
mod product;

/// Most ranks.
const RANKS_MAX: u32 = 16;
/// Events after which a run is called endless.
const EVENTS_MAX: u64 = 5_000_000;

#[derive(Clone, Copy, Debug)]
enum Step {
    Contribute,
    Abstain,
    Finish,
}

/// When a caller does something.
#[derive(Clone, Copy, Debug)]
enum Due {
    /// So long after what it did before has ended.
    After(Duration),
    /// Then, or when what it did before has ended.
    #[cfg_attr(not(test), expect(dead_code, reason = "of scripts"))]
    At(Nanos),
}

impl Due {
    fn since(self, now: Nanos) -> Nanos {
        match self {
            Self::After(time) => now + time,
            Self::At(at) => at.max(now),
        }
    }
}

/// What a rank's caller does.
struct Caller {
    steps: Vec<(Due, Step)>,
    next: usize,
    due_at: Nanos,
    waits: bool,
    current: usize,
    /// By contribution: its content, and the numbers of the contributions that are in it.
    contents: [(Vec<i128>, Vec<usize>); EXACT_CONTRIBUTIONS],
    /// Nobody waits for the rank.
    gives_nothing: bool,
    /// By number: in how many rounds the contribution was, or that it was dropped.
    fates: Vec<u32>,
    /// The first round that it has not seen.
    seen: u64,
    /// How many results it has not seen of the rounds before that.
    missed: u64,
    /// How many rounds in a row it was left out; `None` from when it had nothing to give until it
    /// is in a round again, as rank 0 hears of either later.
    left_out: Option<u32>,
    /// Nothing is to happen before it makes a call.
    is_waited_for: bool,
    has_ended: bool,
}

/// What a round must come to.
#[derive(Default)]
struct Expected {
    given: BTreeMap<Rank, Vec<i128>>,
    late: BTreeMap<Rank, Vec<i128>>,
    seen: Option<(RankSet, Vec<u64>)>,
}

impl Expected {
    /// Whether any rank has given anything to it.
    fn has_any(&self) -> bool {
        !self.given.is_empty() || !self.late.is_empty()
    }
}

/// What the ranks of a trial do.
struct Course {
    terms: Terms,
    staleness_max: u32,
    /// How the data are reduced; `None` leaves it to the planner.
    variant: Option<Variant>,
    /// By rank.
    callers: Vec<Caller>,
}

struct Trial {
    ranks: u32,
    terms: Terms,
    staleness_max: u32,
    cluster: Cluster,
    watch: Arc<Mutex<Watch>>,
    memory: Vec<RoundsSlices>,
    callers: Vec<Caller>,
    rounds: BTreeMap<u64, Expected>,
}

fn draw_activation(random: &mut Random, ranks: u32) -> (Activation, u32) {
    let some = random.between(1, ranks.into()) as u32;
    let time = Duration::from_nanos(random.between(1, 300_000));
    let activation = match random.below(6) {
        0 => Activation::all(),
        1 => Activation::eager_solo(),
        2 => Activation::eager_majority(random.bits()),
        3 => Activation::quorum(some).grace(if random.coin() { time } else { Duration::ZERO }),
        4 => Activation::backup_workers(some - 1),
        _ => Activation::deadline(time),
    };
    let staleness_max = random.between(1, 8) as u32;
    let late = [Late::Carry, Late::Drop, Late::Correct][random.index(3)];
    let divisor = [Divisor::None, Divisor::World, Divisor::Contributors][random.index(3)];
    (activation.late(late).divisor(divisor).staleness_max(staleness_max), staleness_max)
}

/// Carries out rounds in which ranks are late, on wires that are as bad as those of the scenario.
pub(crate) fn run_late(
    scenario: &Scenario,
    trace: Option<Box<dyn Write + Send>>,
) -> Result<TrialReport, Failure> {
    let kinds = scenario.kinds.filtered(|kind| kind.is_harmless() || kind == FaultKind::Freeze);
    let ranks = Some(scenario.ranks).filter(|ranks| (2..=RANKS_MAX).contains(ranks));
    let mut trial = Trial::new(scenario.seed, (ranks, &kinds), false);
    if let Some(trace) = trace {
        trial.cluster.world.trace_to(trace);
    }
    let outcome = trial.outcome();
    let world = &trial.cluster.world;
    let (at, events, hash) = (world.now(), world.events(), world.finish());
    match outcome {
        Ok(rounds) => Ok(TrialReport { hash, events, virtual_time: at, succeeded: rounds, failed: 0 }),
        Err((checker, what)) => Err(Failure { checker, at, what }),
    }
}

impl Trial {
    /// `drops_often`: contributions are dropped, and most of the time a rank abstains.
    fn new(seed: u64, (ranks, kinds): (Option<u32>, &FaultKinds), drops_often: bool) -> Self {
        let root = Random::new(seed).split("rounds");
        let random = &mut root.split("shape");
        let many = u64::from(RANKS_MAX);
        let drawn =
            if random.chance(200_000) { random.between(9, many) } else { random.between(2, 8) } as u32;
        let ranks = ranks.unwrap_or(drawn);
        let limits = Limits { ranks: Some(ranks), faults: kinds.clone() };
        let scenario = Scenario::draw(seed, &limits);
        let (activation, staleness_max) = draw_activation(random, ranks);
        // What is dropped counts after all if nobody gave anything: seldom, unless many abstain.
        let (activation, abstains_ppm) =
            if drops_often { (activation.late(Late::Drop), 600_000) } else { (activation, 100_000) };
        // Exact sums of floats take other runs than integers.
        let more = &mut root.split("more");
        let is_exact = more.chance(200_000);
        let op = match activation.division() {
            Divisor::None if random.chance(300_000) && !is_exact => ReduceOp::Max,
            _ if more.chance(200_000) => ReduceOp::Avg,
            _ => ReduceOp::Sum,
        };
        let activation = if more.chance(100_000) {
            let (late, divisor) = (activation.late_rule(), activation.division());
            let learned = Activation::learned_deadline(more.between(1, 100) as f64);
            learned.late(late).divisor(divisor).staleness_max(staleness_max)
        } else {
            activation
        };
        let len = random.between(0, 3) as usize + if random.coin() { random.below(3000) as usize } else { 0 };
        let activation = activation.combined_by(op);
        // More than one block now and then.
        let len = if is_exact && more.chance(100_000) { len + (16 << 10) } else { len };
        let data_type = if is_exact { DataType::F64 } else { DataType::I64 };
        let terms = Terms { len, data_type, activation, has_thread: true, can_multiply: true };
        let mut options = sim::Options::new(scenario.network.clone(), seed);
        options.faults = scenario.faults.clone();
        (options.maps, options.passive) = (scenario.maps, scenario.passive);
        options.hosts = scenario.hosts.by_rank().to_vec();
        options.queue_depth = scenario.queue_depth;
        let callers =
            (0..ranks).map(|rank| Caller::draw(&mut root.split_number(rank.into()), abstains_ppm)).collect();
        let cluster = Cluster::with(options, None, scenario.is_immediate);
        Self::of(cluster, Course { terms, staleness_max, variant: None, callers })
    }

    /// All ranks of the cluster do this.
    fn of(mut cluster: Cluster, course: Course) -> Self {
        let ranks = cluster.members.len() as u32;
        let watch = Arc::new(Mutex::new(Watch::new(ranks, false)));
        cluster.world.observe(Box::new(watch.clone()));
        let members = cluster.members.iter_mut().zip(0..);
        let memory = members.map(|(member, rank)| {
            let member = member.as_mut().expect("no rank has died");
            let variant = course.variant.as_ref();
            let made = make_rounds(member, (rank, ranks), &course.terms, variant, TIMEOUT_FAR);
            let (mut rounds, memory) = made.expect("an all-reduce");
            rounds.trail = Some(Vec::new());
            member.rounds = Some(rounds);
            memory
        });
        let memory = memory.collect();
        let Course { terms, staleness_max, callers, .. } = course;
        Self { ranks, terms, staleness_max, cluster, watch, memory, callers, rounds: BTreeMap::new() }
    }

    /// The number of rounds, or the check that did not hold and what was wrong.
    fn outcome(&mut self) -> Result<u64, (Checker, String)> {
        let outcome = self.carry_out();
        // A race explains a wrong result, not the other way round, so the race is reported.
        let race = lock(&self.watch).found().cloned();
        let outcome = match race {
            Some((checker, _, what)) => Err((checker, what)),
            None => outcome.map_err(|what| (Checker::Rounds, what)),
        };
        outcome.map_err(|(checker, what)| (checker, format!("{} ranks, {}: {what}", self.ranks, self.terms)))
    }

    fn carry_out(&mut self) -> Result<u64, String> {
        loop {
            loop {
                self.cluster.settle().map_err(|error| error.to_string())?;
                if lock(&self.watch).found().is_some() {
                    return Err("a race".to_owned());
                }
                let mut moved = false;
                for rank in 0..self.ranks {
                    self.take_bound(rank)?;
                    moved |= self.take_ended(rank)?;
                    moved |= self.step(rank);
                    let is_waited_for = self.rounds_of(rank).wait_for_caller();
                    self.callers[rank as usize].is_waited_for = is_waited_for;
                }
                if !moved {
                    break;
                }
            }
            if self.callers.iter().all(|caller| caller.has_ended) {
                return self.end();
            }
            let due =
                (0..self.ranks).filter(|rank| !self.cluster.world.is_frozen(*rank)).filter_map(|rank| {
                    let caller = &self.callers[rank as usize];
                    (!caller.waits && !caller.has_ended).then_some(caller.due_at)
                });
            let due = due.min();
            if !self.cluster.advance(due) {
                return Err("nothing will ever happen any more".to_owned());
            }
            if self.cluster.world.events() > EVENTS_MAX {
                return Err("it does not end".to_owned());
            }
            for member in self.cluster.members.iter().flatten() {
                if let Some(fault) = member.engine.failure() {
                    return Err(format!("an error that nothing explains: {fault}"));
                }
            }
        }
    }

    fn rounds_of(&mut self, rank: Rank) -> &mut Rounds {
        let member = self.cluster.members[rank as usize].as_mut().expect("no rank has died");
        member.rounds.as_mut().expect("installed with the member")
    }

    /// Notes what the rank has bound since the last look.
    fn take_bound(&mut self, rank: Rank) -> Result<(), String> {
        let bound = self.rounds_of(rank).trail.replace(Vec::new()).unwrap_or_default();
        if self.callers[rank as usize].is_waited_for && !bound.is_empty() {
            return Err(format!("rank {rank} is bound to a round, and was to wait for its caller"));
        }
        for Bound { number, given, late } in bound {
            let caller = &mut self.callers[rank as usize];
            let expected = self.rounds.entry(number).or_default();
            for (buffer, into) in [(given, &mut expected.given), (late, &mut expected.late)] {
                for buffer in buffer.into_iter().flat_map(Contributions::iter) {
                    let (content, numbers) = caller.contents[buffer].clone();
                    if numbers.is_empty() {
                        return Err(format!(
                            "rank {rank} has bound memory that was not handed over, in {number}"
                        ));
                    }
                    numbers.iter().for_each(|number| caller.fates[*number] += 1);
                    caller.contents[buffer].1.clear();
                    // Several only where they are added.
                    match into.entry(rank) {
                        Entry::Vacant(entry) => drop(entry.insert(content)),
                        Entry::Occupied(mut entry) => {
                            entry.get_mut().iter_mut().zip(content).for_each(|(sum, more)| *sum += more);
                        }
                    }
                }
            }
            caller.left_out = match caller.left_out {
                _ if given.is_some() => Some(0),
                Some(rounds) if !caller.gives_nothing => Some(rounds + 1),
                _ => None,
            };
            if caller.left_out.is_some_and(|rounds| rounds > self.staleness_max) {
                return Err(format!("rank {rank} was left out of more than {} rounds", self.staleness_max));
            }
        }
        Ok(())
    }

    /// The wait of a rank's caller ends.
    fn take_ended(&mut self, rank: Rank) -> Result<bool, String> {
        let rounds = self.rounds_of(rank);
        let Some((ended, awaited, free)) = rounds.take_ended() else { return Ok(false) };
        let memory = &self.memory[rank as usize];
        let read = |slice: &Slice| -> Vec<u64> {
            let bytes = slice.to_vec();
            self.cluster.world.accessed(
                rank,
                slice.as_ptr(),
                bytes.len(),
                AccessKind::Read,
                self.cluster.world.now(),
            );
            bytes.as_chunks::<8>().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect()
        };
        let number = ended.number;
        if awaited.round().is_some_and(|round| round != number) {
            return Err(format!("rank {rank} waits for {awaited:?} and gets round {number}"));
        }
        let expected = self.rounds.entry(number).or_default();
        let set: RankSet = expected.given.keys().copied().collect();
        let same = |left: &RankSet, right: &RankSet| left.iter().eq(right.iter());
        if !same(&ended.contributors, &set) {
            let found = &ended.contributors;
            return Err(format!("round {number} at rank {rank}: set {found}, but {set} were bound"));
        }
        let sum = read(memory.result(ended.result));
        let division = self.terms.activation.division();
        if sum != combined(&expected.given, self.terms, division, self.ranks) {
            return Err(format!("round {number} at rank {rank}: not the sum of {set}"));
        }
        if let Some((other_set, other_sum)) = &expected.seen
            && (!same(other_set, &ended.contributors) || *other_sum != sum)
        {
            return Err(format!("round {number} at rank {rank}: not what another rank has"));
        }
        expected.seen = Some((ended.contributors.clone(), sum));
        let late: RankSet = expected.late.keys().copied().collect();
        if let Some(corrected) = &ended.corrected {
            if !same(corrected, &late) {
                return Err(format!("round {number} at rank {rank}: corrected by {corrected}, not {late}"));
            }
            // The correction is divided as the round is.
            let contributors = ended.contributors.len();
            let sum = combined_by(&expected.late, self.terms, division, self.ranks, contributors);
            if read(memory.correction(ended.result)) != sum {
                return Err(format!("round {number} at rank {rank}: not the correction of {late}"));
            }
        } else if !late.is_empty() {
            return Err(format!("round {number} at rank {rank} shows no correction by {late}"));
        }
        self.count_missed(rank, &ended, &awaited)?;
        let caller = &mut self.callers[rank as usize];
        caller.waits = false;
        if awaited.own() == Own::Dropped {
            let numbers = std::mem::take(&mut caller.contents[caller.current].1);
            numbers.into_iter().for_each(|number| caller.fates[number] += 1);
        }
        caller.current = free;
        caller.has_ended = awaited.round().is_none();
        let now = self.cluster.world.now();
        caller.due_at = caller.steps.get(caller.next).map_or(now, |(due, _)| due.since(now));
        Ok(true)
    }

    /// Compares how many results a rank says that it has missed with those that its caller did not
    /// see.
    fn count_missed(&mut self, rank: Rank, ended: &Ended, awaited: &Awaited) -> Result<(), String> {
        let (number, caller) = (ended.number, &mut self.callers[rank as usize]);
        let between = self.rounds.range(caller.seen..number);
        let missed = between.filter(|(_, round)| round.has_any()).count() as u64;
        let found = awaited.missed(ended);
        if found != missed {
            return Err(format!("rank {rank} has missed {missed} results before {number}, and says {found}"));
        }
        caller.missed += missed;
        caller.seen = number + 1;
        Ok(())
    }

    /// The next thing that a rank's caller does, if it is time.
    fn step(&mut self, rank: Rank) -> bool {
        let now = self.cluster.world.now();
        let caller = &self.callers[rank as usize];
        if caller.waits || caller.has_ended || now < caller.due_at || self.cluster.world.is_frozen(rank) {
            return false;
        }
        let (step, current) = (caller.steps[caller.next].1, caller.current);
        match step {
            Step::Contribute => {
                let late = self.rounds_of(rank).take_late();
                let (len, op) = (self.terms.len, self.terms.activation.op());
                let caller = &mut self.callers[rank as usize];
                let number = caller.fates.len();
                caller.fates.push(0);
                let mut random = Random::new(u64::from(rank) << 32 | number as u64);
                let mut content: Vec<i128> =
                    (0..len).map(|_| i128::from(random.bits() as i64 >> 8)).collect();
                if self.terms.data_type == DataType::F64 {
                    // Of few bits, in places that are far apart.
                    content.iter_mut().for_each(|it| *it = (*it >> 8) << [0, 0, 31, 60][random.index(4)]);
                }
                let mut numbers = vec![number];
                if let Some(late) = late {
                    let (more, others) = caller.contents[late].clone();
                    content.iter_mut().zip(more).for_each(|(into, more)| *into = combine(op, *into, more));
                    numbers.extend(others);
                    caller.contents[late].1.clear();
                }
                let bytes: Vec<u8> =
                    content.iter().flat_map(|it| bits(*it, 1, self.terms).to_ne_bytes()).collect();
                let slice = self.memory[rank as usize].contribution(current);
                slice.store(&bytes);
                self.cluster.world.accessed(rank, slice.as_ptr(), bytes.len(), AccessKind::Write, now);
                caller.contents[current] = (content, numbers);
                caller.gives_nothing = false;
                let facts = match self.terms.data_type {
                    DataType::F64 => {
                        BlockSums::new(DataType::F64, len).facts(&Bytes::Registered(slice.clone()))
                    }
                    _ => Vec::new(),
                };
                self.rounds_of(rank).hand_over(current, facts);
                // The caller may write its next contribution while it waits.
                let next = self.rounds_of(rank).free_contribution();
                let slice = self.memory[rank as usize].contribution(next);
                slice.store(&vec![0x5a; bytes.len()]);
                self.cluster.world.accessed(rank, slice.as_ptr(), bytes.len(), AccessKind::Write, now);
            }
            Step::Abstain => self.rounds_of(rank).abstain(),
            Step::Finish => self.rounds_of(rank).finish(),
        }
        let caller = &mut self.callers[rank as usize];
        caller.gives_nothing |= !matches!(step, Step::Contribute);
        caller.next += 1;
        caller.waits = true;
        self.cluster.wake(rank);
        true
    }

    /// The number of rounds, if each contribution was in one, and each rank reports the results
    /// that it did not see.
    fn end(&mut self) -> Result<u64, String> {
        for rank in 0..self.ranks {
            let reported = self.rounds_of(rank).report().missed;
            let caller = &self.callers[rank as usize];
            if reported != caller.missed {
                let missed = caller.missed;
                return Err(format!("rank {rank} has missed {missed} results, and reports {reported}"));
            }
            if let Some(number) = caller.fates.iter().position(|times| *times != 1) {
                let times = caller.fates[number];
                return Err(format!("contribution {number} of rank {rank} was in {times} rounds"));
            }
        }
        Ok(self.rounds_of(0).report().rounds)
    }
}

impl Caller {
    fn draw(random: &mut Random, abstains_ppm: u32) -> Self {
        let slow = random.chance(250_000);
        let time =
            |random: &mut Random| Duration::from_nanos(random.below(if slow { 2_000_000 } else { 100_000 }));
        let steps = (0..random.between(1, 8)).map(|_| {
            let step = if random.chance(abstains_ppm) { Step::Abstain } else { Step::Contribute };
            (Due::After(time(random)), step)
        });
        let mut steps: Vec<_> = steps.collect();
        steps.push((Due::After(time(random)), Step::Finish));
        Self::new(steps)
    }

    fn new(steps: Vec<(Due, Step)>) -> Self {
        Self {
            due_at: steps[0].0.since(Nanos::ZERO),
            steps,
            next: 0,
            waits: false,
            current: 0,
            contents: Default::default(),
            gives_nothing: false,
            fates: Vec::new(),
            seen: 0,
            missed: 0,
            left_out: Some(0),
            is_waited_for: false,
            has_ended: false,
        }
    }
}

fn combine(op: ReduceOp, left: i128, right: i128) -> i128 {
    if op == ReduceOp::Max { left.max(right) } else { left + right }
}

/// A float is a whole number of these.
const UNIT: f64 = 1.0 / (1u64 << 40) as f64;

/// The element that is the quotient: towards zero, or the nearest float.
fn bits(number: i128, divide_by: i128, terms: Terms) -> u64 {
    if terms.data_type == DataType::I64 {
        return (number / divide_by) as i64 as u64;
    }
    // A zero is positive. Of others, more bits than a float has; the lowest says whether more
    // follow.
    let shift = number.unsigned_abs().leading_zeros().saturating_sub(1);
    let shifted = number.unsigned_abs() << shift;
    let divisor = divide_by.unsigned_abs();
    let quotient = (shifted / divisor) | u128::from(!shifted.is_multiple_of(divisor));
    let magnitude = quotient as f64 * 2f64.powi(-(shift as i32)) * UNIT;
    (if number < 0 { -magnitude } else { magnitude }).to_bits()
}

/// What contributions come to, divided by as many as there are.
fn combined(given: &BTreeMap<Rank, Vec<i128>>, terms: Terms, division: Divisor, ranks: u32) -> Vec<u64> {
    combined_by(given, terms, division, ranks, given.len() as u32)
}

fn combined_by(
    given: &BTreeMap<Rank, Vec<i128>>,
    terms: Terms,
    division: Divisor,
    ranks: u32,
    contributors: u32,
) -> Vec<u64> {
    let op = terms.activation.op();
    let none = if op == ReduceOp::Max { i128::from(i64::MIN) } else { 0 };
    let divide_by = i128::from(match division {
        Divisor::None => 1,
        Divisor::World => ranks,
        Divisor::Contributors => contributors.max(1),
    });
    let element = |index: usize| given.values().fold(none, |sum, content| combine(op, sum, content[index]));
    (0..terms.len).map(|index| bits(element(index), divide_by, terms)).collect()
}

#[cfg(test)]
mod tests {
    use pleach_schedule::Algorithm;

    use super::*;
    use crate::simulate::in_rounds::is_set_added;

    /// A trial on wires that do no more than a round survives, and its outcome.
    fn trial(seed: u64, mutant: Option<Mutant>) -> Result<u64, (Checker, String)> {
        new_trial(seed, mutant).outcome()
    }

    fn new_trial(seed: u64, mutant: Option<Mutant>) -> Trial {
        let kinds = FaultKinds::all().filtered(|kind| kind.is_harmless() || kind == FaultKind::Freeze);
        let drops_often = mutant == Some(Mutant::ReusedContribution);
        let mut trial = Trial::new(seed, (None, &kinds), drops_often);
        for member in trial.cluster.members.iter_mut().flatten() {
            member.rounds.iter_mut().for_each(|rounds| rounds.mutate(mutant));
        }
        trial
    }

    fn expect_seeds(seeds: std::ops::Range<u64>) {
        let mut rounds = 0;
        for seed in seeds {
            match trial(seed, None) {
                Ok(more) => rounds += more,
                Err((checker, error)) => panic!("seed {seed}, {checker:?}: {error}"),
            }
        }
        println!("{rounds} rounds");
    }

    #[test]
    fn sets_and_sums_are_right_whoever_is_late() {
        expect_seeds(0..500);
    }

    #[test]
    fn where_nobody_is_late_nobody_waits_for_a_word() {
        const ROUNDS: u32 = 50;
        const FLIGHT: Duration = Duration::from_micros(10);
        for ranks in [2, 4] {
            let network = sim::Network::full_mesh(ranks, 100_000_000_000, FLIGHT);
            let cluster = Cluster::with(sim::Options::new(network, 0), None, true);
            let at_once = Due::After(Duration::ZERO);
            let mut steps = vec![(at_once, Step::Contribute); ROUNDS as usize];
            steps.push((at_once, Step::Finish));
            let callers = (0..ranks).map(|_| Caller::new(steps.clone())).collect();
            let (data_type, activation) = (DataType::I64, Activation::all());
            let terms = Terms { len: 3, data_type, activation, has_thread: true, can_multiply: true };
            let variant = Some(Algorithm::Exchange.into());
            let mut trial = Trial::of(cluster, Course { terms, staleness_max: 8, variant, callers });
            let rounds = trial.outcome().unwrap_or_else(|(checker, error)| panic!("{checker:?}: {error}"));
            assert_eq!(rounds, u64::from(ROUNDS) + 1);
            let time = trial.cluster.world.now().since(Nanos::ZERO);
            println!("{ranks} ranks: {time:?} for {ROUNDS} rounds");
            // One flight for the data, as an all-reduce; a word and its answer take two more.
            assert!(time < FLIGHT * ROUNDS * 2, "{ranks} ranks: {time:?}");
        }
    }

    /// A round that waits for its grace has the ranks that come meanwhile, and none that comes
    /// later.
    #[test]
    fn a_rank_that_comes_within_the_grace_counts() {
        const GRACE: Duration = Duration::from_micros(200);
        const BEGIN: Nanos = Nanos(1_000_000);
        let [soon, barely, late] = [GRACE / 4, GRACE * 9 / 10, GRACE * 11 / 10];
        for (quorum, grace, after, first) in [
            (2, GRACE, &[Duration::ZERO, Duration::ZERO, soon, barely, late][..], 0..4),
            (2, GRACE, &[late, Duration::ZERO, barely, Duration::ZERO, soon], 1..5),
            (3, GRACE, &[Duration::ZERO, soon, GRACE, GRACE + barely, GRACE + late], 0..4),
            // Nobody else is waited for when all are there.
            (2, GRACE, &[Duration::ZERO, Duration::ZERO, soon], 0..3),
            (2, Duration::ZERO, &[Duration::ZERO, Duration::ZERO, soon], 0..2),
        ] {
            let ranks = after.len() as u32;
            let network = sim::Network::full_mesh(ranks, 100_000_000_000, Duration::from_micros(1));
            let cluster = Cluster::with(sim::Options::new(network, 0), None, true);
            let comes = |after: &Duration| {
                Caller::new(vec![
                    (Due::At(BEGIN + *after), Step::Contribute),
                    (Due::At(BEGIN + GRACE * 5), Step::Finish),
                ])
            };
            let callers = after.iter().map(comes).collect();
            let activation = Activation::quorum(quorum).grace(grace).late(Late::Carry);
            let terms =
                Terms { len: 40, data_type: DataType::I64, activation, has_thread: true, can_multiply: true };
            let mut trial = Trial::of(cluster, Course { terms, staleness_max: 8, variant: None, callers });
            let rounds = trial.outcome().unwrap_or_else(|(checker, error)| panic!("{checker:?}: {error}"));
            let given: Vec<Vec<Rank>> =
                trial.rounds.values().map(|round| round.given.keys().copied().collect()).collect();
            let late = (0..ranks).filter(|rank| !first.contains(rank)).collect();
            assert_eq!((rounds, given), (2, vec![first.collect(), late]), "{activation}: {after:?}");
        }
    }

    /// Far behind the time that is allowed.
    const NEVER: Duration = Duration::from_secs(10_000);

    /// The verdict that ends the rounds at all survivors. By rank: what its caller does, each step
    /// so long after the one before; then it computes for ever. `stopped`: these processes stand
    /// still from the beginning.
    fn verdict(activation: Activation, callers: &[&[(Duration, Step)]], stopped: &[Rank]) -> String {
        let ranks = callers.len() as u32;
        let network = sim::Network::full_mesh(ranks, 100_000_000_000, Duration::from_micros(10));
        let cluster = Cluster::with(sim::Options::new(network, 0), None, true);
        let callers = callers.iter().map(|steps| {
            let steps = steps.iter().chain(&[(NEVER, Step::Contribute)]);
            Caller::new(steps.map(|(after, step)| (Due::After(*after), *step)).collect())
        });
        let terms =
            Terms { len: 3, data_type: DataType::I64, activation, has_thread: true, can_multiply: true };
        let callers = callers.collect();
        let mut trial = Trial::of(cluster, Course { terms, staleness_max: 8, variant: None, callers });
        trial.cluster.run(|_| false).expect_err("connected, ranks have nothing to do");
        for rank in stopped {
            trial.cluster.world.inject(sim::Fault::Freeze { rank: *rank, duration: NEVER, watcher: true });
        }
        trial.carry_out().expect_err("the round cannot end");
        let is_over = |member: &Option<crate::simulate::Member>| {
            member.as_ref().is_some_and(|it| it.engine.failure().is_some())
        };
        let survivors = |cluster: &Cluster| -> Vec<bool> {
            let of = cluster.members.iter().zip(0..).filter(|(_, rank)| !stopped.contains(rank));
            of.map(|(member, _)| is_over(member)).collect()
        };
        trial.cluster.run(|cluster| survivors(cluster).into_iter().all(|it| it)).expect("all hear of it");
        let texts = trial.cluster.members.iter().flatten();
        let mut texts: Vec<String> =
            texts.filter_map(|member| Some(member.engine.failure()?.to_string())).collect();
        texts.dedup();
        assert_eq!(texts.len(), 1, "{activation}: survivors differ: {texts:?}");
        texts.remove(0)
    }

    #[test]
    fn a_round_that_does_not_open_names_the_rank_that_it_waits_for_on_all_survivors() {
        const AT_ONCE: (Duration, Step) = (Duration::from_millis(2), Step::Contribute);
        const LATE: (Duration, Step) = (Duration::from_millis(99_500), Step::Contribute);
        const NOT: &[(Duration, Step)] = &[];
        const GIVES: &[(Duration, Step)] = &[AT_ONCE];
        let opened_by = |rank| {
            let seed = (0..).find(|seed| crate::partial::drawn(*seed, 0, 8) == rank);
            Activation::eager_majority(seed.expect("some seed draws each rank"))
        };
        let but = |ranks: &[usize]| {
            let mut callers = [GIVES; 8];
            ranks.iter().for_each(|rank| callers[*rank] = NOT);
            callers
        };
        for (activation, silent, stopped, named) in [
            (Activation::all(), &[5][..], &[][..], 5),
            (Activation::all(), &[5], &[5], 5),
            (Activation::all(), &[0, 5], &[5], 5),
            (Activation::all(), &[0, 2, 5], &[], 0),
            (Activation::all(), &[0, 2], &[0], 0),
            (Activation::quorum(6), &[0, 1, 5], &[5], 5),
            (Activation::quorum(6), &[0, 1, 5], &[0], 0),
            (Activation::backup_workers(1), &[1, 6], &[6], 6),
            (opened_by(3), &[0, 3, 5], &[5], 3),
            (opened_by(3), &[0, 3, 5], &[3], 3),
        ] {
            let text = verdict(activation, &but(silent), stopped);
            let what = if stopped == [0] { "it opens round 0" } else { "its contribution to round 0" };
            let expected = format!("for rank {named}: {what}");
            assert!(text.contains(&expected), "{activation}, {silent:?} silent, {stopped:?} stopped: {text}");
        }
        // Rank 3 tells rank 7 which rounds are open. The round opens shortly before rank 7 would
        // have waited for too long.
        let mut callers = but(&[3]);
        callers[0] = &[LATE];
        let text = verdict(opened_by(0), &callers, &[3]);
        assert!(text.contains("for rank 3:"), "{text}");
        // Who has said that it has nothing to give is not waited for.
        const ABSTAINS: (Duration, Step) = (Duration::from_millis(2), Step::Abstain);
        let text = verdict(Activation::all(), &[&[ABSTAINS], &[AT_ONCE, ABSTAINS], GIVES], &[]);
        assert!(text.contains("for rank 2: its contribution to round 1"), "{text}");
    }

    #[test]
    #[ignore = "10,000 seeds take minutes: .ci/nightly runs it"]
    fn sets_and_sums_are_right_in_ten_thousand_seeds() {
        expect_seeds(500..10_500);
    }

    /// Trials of one kind.
    type Kind = fn(&Trial) -> bool;

    #[test]
    fn each_mutant_is_caught() {
        const ANY: Kind = |_| true;
        const ADDED: Kind = |trial| is_set_added(&trial.terms, trial.ranks);
        const TOLD: Kind = |trial| !is_set_added(&trial.terms, trial.ranks);
        const WHOLE: Kind = |trial| trial.terms.data_type == DataType::I64;
        const CARRIES: Kind = |trial| trial.terms.activation.late_rule() == Late::Carry;
        const CORRECTS: Kind = |trial| trial.terms.activation.late_rule() == Late::Correct;
        for (mutant, kinds) in [
            (Mutant::TornBinding, &[("any terms", ANY)][..]),
            (Mutant::UnboundContribution, &[("any terms", ANY)]),
            (Mutant::OtherBit, &[("the set is added", ADDED), ("signals tell it", TOLD)]),
            (Mutant::LostLate, &[("late ones are carried", CARRIES), ("they are corrected", CORRECTS)]),
            (Mutant::UncountedResult, &[("any terms", ANY)]),
            (Mutant::OtherSet, &[("any terms", ANY)]),
            (Mutant::Stale, &[("any terms", ANY)]),
            // Digits of exact sums are cut by a window that a contribution must not leave
            // meanwhile.
            (Mutant::ReusedContribution, &[("sums of integers", WHOLE)]),
            (Mutant::MuteContribution, &[("any terms", ANY)]),
            (Mutant::UnreadyAhead, &[("any terms", ANY)]),
            (Mutant::ForgottenCaller, &[("any terms", ANY)]),
        ] {
            for (what, is_apt) in kinds {
                let found = caught(mutant, *is_apt);
                let (seed, error) = found.unwrap_or_else(|| panic!("{mutant:?}, {what}: it is not caught"));
                println!("{mutant:?}, {what}: seed {seed}: {error}");
            }
        }
    }

    /// The first seed of such a trial whose checkers catch the mutant, and what they say.
    fn caught(mutant: Mutant, is_apt: Kind) -> Option<(u64, String)> {
        (0..300).find_map(|seed| {
            let mut trial = new_trial(seed, Some(mutant));
            let (_, error) = if is_apt(&trial) { trial.outcome().err()? } else { return None };
            Some((seed, error))
        })
    }

    #[test]
    fn a_contribution_that_is_written_while_it_is_read_is_a_race() {
        let trials = (0..300).map(|seed| new_trial(seed, Some(Mutant::ActiveContribution)));
        // Peers read no contribution to exact sums.
        let mut caught = trials
            .filter(|trial| trial.terms.data_type == DataType::I64)
            .filter_map(|mut trial| trial.outcome().err());
        // What travels in signals is read by its own rank alone.
        let race = caught.find(|(checker, _)| *checker == Checker::Race);
        println!("{}", race.expect("some seed has a race").1);
    }
}
