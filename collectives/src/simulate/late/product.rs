//! The whole product: every activation, algorithm, fabric, late rule and divisor, with every subset
//! of the ranks absent.
//!
//! In virtual time every rank acts by the clock, so it is known which ranks are in a round: every
//! subset of 2 to 6 ranks abstains, and comes late, in rounds by every algorithm, and every
//! combination of the table has some of these subsets. The nightly run has every combination with
//! every subset of 2 to 8. Ranks map each other's memory or put, and data travel in signals or in
//! memory, in turn. The checkers of [`super`] compare sets and sums, and find races. More ranks,
//! faults and random steps are a matter of the seeds there.
//!
//! Over shared memory, over TCP, and over both, as on two hosts, the ranks are threads that nothing
//! keeps in step. What each rank gives is a bit of its own for each step, in elements of its own.
//! So a result says by itself whose contributions of which steps are in it, whatever the library
//! says of them.
//!
//! Combinations are counted, so none is left out in silence.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pleach_packing::topology::{LATENCY_NS, Topology};
use pleach_schedule::Algorithm;
use pleach_schedule::cost::Platform;
use pleach_schedule::generate::Access;
use pleach_schedule::hosts::HostMap;
use pleach_schedule::wiring::Wiring;
use pleach_transport::rendezvous::Fabric;
use pleach_transport::sim::{self, Network};
use pleach_transport::{Nanos, clock};
use pleach_vocabulary::{Collective, DataType, Rank};

use super::{Caller, Course, Due, Step, Trial};
use crate::group::{Planner, PlannerCache};
use crate::partial::{Activation, Divisor, Late, Own, Terms};
use crate::simulate::Cluster;
use crate::{Group, PartialError, Round, ranks};

/// Who must be there for a round to open while the others have said nothing.
#[derive(Clone, Copy)]
enum Opens {
    /// So many ranks, whichever.
    Quorum(u32),
    /// That depends on the round.
    Varies,
}

/// Every activation, for so many ranks.
fn activations(ranks: u32) -> [(Activation, Opens); 9] {
    let (half, grace) = (ranks.div_ceil(2), Duration::from_micros(200));
    [
        (Activation::all(), Opens::Quorum(ranks)),
        (Activation::eager_solo(), Opens::Quorum(1)),
        (Activation::eager_majority(7), Opens::Varies),
        (Activation::quorum(half), Opens::Quorum(half)),
        (Activation::quorum(half).grace(grace), Opens::Quorum(half)),
        (Activation::deadline(grace), Opens::Quorum(1)),
        (Activation::learned_deadline(90.0), Opens::Varies),
        (Activation::backup_workers(1), Opens::Quorum(ranks - 1)),
        (Activation::laggard_resistant(0.6, ranks), Opens::Quorum((6 * ranks).div_ceil(10))),
    ]
}

const LATE_RULES: [Late; 3] = [Late::Carry, Late::Drop, Late::Correct];
const DIVISORS: [Divisor; 3] = [Divisor::None, Divisor::World, Divisor::Contributors];

/// The names of all algorithms, with the families as this grid has them.
fn algorithms(grid: &str) -> Vec<String> {
    let names = Algorithm::names(Collective::AllReduce).iter();
    let named = names.map(|name| match name.split_once(':') {
        Some((family, _)) => format!("{family}:{grid}"),
        None => (*name).to_owned(),
    });
    named.collect()
}

fn algorithm(name: &str) -> Algorithm {
    Algorithm::named(name, Collective::AllReduce).expect("it carries out an all-reduce")
}

/// A link between any two ranks, for packed trees.
fn mesh(ranks: u32) -> Topology {
    let mut builder = Topology::builder();
    let nodes: Vec<_> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
    for (at, one) in nodes.iter().enumerate() {
        nodes[at + 1..].iter().for_each(|other| builder.duplex(*one, *other, 10_000_000_000, LATENCY_NS));
    }
    builder.build().expect("connected")
}

/// The subset, as the ranks that are in it.
fn members(subset: u32, ranks: u32) -> Vec<Rank> {
    (0..ranks).filter(|rank| subset >> rank & 1 == 1).collect()
}

// ---- In virtual time.

/// Most ranks whose subsets are all tried; in the nightly run, and with every change: of so many
/// more ranks there are four times as many subsets.
const RANKS_MAX: u32 = 8;
const RANKS_MAX_OF_A_SHARE: u32 = 6;
/// Rounds begin so far apart: far more than one takes.
const PERIOD: Duration = Duration::from_millis(10);

/// Whether ranks map each other's memory, and whether they know their links.
type Kind = (bool, bool);

/// Platforms, each with the schedules that were proved for it.
struct Platforms(BTreeMap<(u32, Kind), (Platform, Arc<PlannerCache>)>);

impl Platforms {
    /// A cluster of so many ranks.
    fn cluster(&mut self, ranks: u32, (maps, knows_links): Kind) -> Cluster {
        let network = Network::full_mesh(ranks, 10_000_000_000, Duration::from_micros(1));
        let mut options = sim::Options::new(network, 0);
        (options.maps, options.passive) = (maps, maps);
        let mut cluster = Cluster::with(options, None, true);
        let (platform, known) = self.0.entry((ranks, (maps, knows_links))).or_insert_with(|| {
            let access = if maps { Access::Mapped } else { Access::Put };
            let mut platform = Platform::new(HostMap::one(ranks), access);
            platform.wiring = knows_links.then(|| Arc::new(Wiring::new(mesh(ranks))));
            (platform, Arc::default())
        });
        for (member, rank) in cluster.members.iter_mut().zip(0..) {
            let member = member.as_mut().expect("no rank has died");
            member.planner = Planner::new(rank, platform.clone(), None).sharing(known.clone());
        }
        cluster
    }
}

/// What the ranks do, by the clock: each of these subsets has others abstain, then each has others
/// come late, with a round of all ranks behind it.
struct Script {
    steps: Vec<Vec<(Due, Step)>>,
    rounds: u32,
}

impl Script {
    fn new(ranks: u32, subsets: &[u32]) -> Self {
        let mut script = Self { steps: vec![Vec::new(); ranks as usize], rounds: 0 };
        let all = (1 << ranks) - 1;
        subsets.iter().for_each(|subset| script.round(*subset, Duration::ZERO, Step::Abstain));
        script.round(all, Duration::ZERO, Step::Abstain);
        for subset in subsets {
            script.round(*subset, PERIOD / 2, Step::Contribute);
            script.round(all, Duration::ZERO, Step::Abstain);
        }
        script.round(0, Duration::ZERO, Step::Finish);
        script
    }

    /// The subset contributes, and the others do something else, so much later.
    fn round(&mut self, subset: u32, after: Duration, step: Step) {
        let begin = Nanos::ZERO + PERIOD * self.rounds;
        for (steps, rank) in self.steps.iter_mut().zip(0..) {
            let is_in = subset >> rank & 1 == 1;
            steps.push(if is_in {
                (Due::At(begin), Step::Contribute)
            } else {
                (Due::At(begin + after), step)
            });
        }
        self.rounds += 1;
    }
}

/// Carries out rounds of these subsets, and looks who is in them. Gives how many rounds there were.
fn simulate(
    platforms: &mut Platforms,
    (ranks, maps, name): (u32, bool, &str),
    (activation, opens): (Activation, Opens),
    len: usize,
    subsets: &[u32],
) -> u64 {
    let what = format!("{ranks} ranks, {name}, {activation}");
    let algorithm = algorithm(name);
    let cluster = platforms.cluster(ranks, (maps, matches!(algorithm, Algorithm::Packed(_))));
    let script = Script::new(ranks, subsets);
    let data_type = DataType::I64;
    let terms = Terms { len, data_type, activation, has_thread: true, can_multiply: true };
    let callers = script.steps.into_iter().map(Caller::new).collect();
    let course = Course { terms, staleness_max: 8, variant: Some(algorithm.into()), callers };
    let mut trial = Trial::of(cluster, course);
    let rounds = trial.outcome().unwrap_or_else(|(checker, error)| panic!("{what}: {checker:?}: {error}"));
    assert_eq!(rounds, u64::from(script.rounds), "{what}");
    let given = |number: usize| trial.rounds[&(number as u64)].given.keys().copied().collect::<Vec<Rank>>();
    let all = members((1 << ranks) - 1, ranks);
    for (number, subset) in subsets.iter().enumerate() {
        assert_eq!(given(number), members(*subset, ranks), "{what}: the others abstain");
        let late = subsets.len() + 1 + 2 * number;
        let found = given(late);
        match opens {
            Opens::Quorum(quorum) if subset.count_ones() < quorum => assert_eq!(found, all, "{what}"),
            Opens::Quorum(_) => assert_eq!(found, members(*subset, ranks), "{what}: the others are late"),
            Opens::Varies => assert!(found == all || found == members(*subset, ranks), "{what}: {found:?}"),
        }
        assert_eq!(given(late + 1), all, "{what}: nobody is late");
    }
    rounds
}

/// Numbers of a combination: those of its activation, late rule and divisor.
fn combinations() -> impl Iterator<Item = [usize; 3]> {
    (0..9 * LATE_RULES.len() * DIVISORS.len()).map(|number| [number % 9, number / 9 % 3, number / 27])
}

/// Which of these subsets of so many ranks the `turn`th of so many combinations has.
fn share(ranks: u32, turn: usize, turns: usize) -> Vec<u32> {
    let subsets: Vec<u32> = (1..1 << ranks).collect();
    let own: Vec<u32> = subsets.iter().copied().skip(turn).step_by(turns).collect();
    if own.is_empty() { vec![subsets[turn % subsets.len()]] } else { own }
}

/// Most subsets of one trial. Trials of a combination take turns between fabrics, and between
/// lengths.
const SUBSETS_MAX: usize = 32;
/// Data in signals, and data in memory.
const LENGTHS: [usize; 2] = [3, 40];

/// Every combination by every algorithm of even number, or of odd number, with all subsets or with
/// its share of them. Gives how many rounds there were.
fn simulate_all(has_all_subsets: bool, is_odd: bool) -> u64 {
    let mut platforms = Platforms(BTreeMap::new());
    let (mut done, mut seen, mut all_rounds) = (BTreeSet::new(), BTreeSet::new(), 0);
    let grids = ["1x2", "1x3", "2x2", "1x5", "2x3", "1x7", "2x4"];
    let ranks_max = if has_all_subsets { RANKS_MAX } else { RANKS_MAX_OF_A_SHARE };
    for (grid, ranks) in grids.into_iter().zip(2..=ranks_max) {
        let (begin, mut rounds, mut trials) = (clock::now(), 0, 0);
        let names = algorithms(grid);
        for (place, name) in names.iter().enumerate().filter(|(place, _)| (place % 2 == 1) == is_odd) {
            let sizes = (ranks_max - 1) as usize;
            let is_here =
                |number: &usize| has_all_subsets || (number + place) % sizes == (ranks - 2) as usize;
            let here: Vec<_> = combinations().enumerate().filter(|(number, _)| is_here(number)).collect();
            for (turn, (number, [at, late, divisor])) in here.iter().enumerate() {
                let (activation, opens) = activations(ranks)[*at];
                let activation = activation.late(LATE_RULES[*late]).divisor(DIVISORS[*divisor]);
                let turns = if has_all_subsets { 1 } else { here.len() };
                let subsets = share(ranks, turn % turns, turns);
                for (part, subsets) in subsets.chunks(SUBSETS_MAX).enumerate() {
                    let maps = (ranks as usize + turn + part).is_multiple_of(2);
                    let len = LENGTHS[(turn / 2 + part) % 2];
                    let what = (ranks, maps, &**name);
                    rounds += simulate(&mut platforms, what, (activation, opens), len, subsets);
                    trials += 1;
                }
                done.insert((place, *number));
                seen.extend(subsets.into_iter().map(|subset| (place, ranks, subset)));
            }
        }
        let time = clock::now().since(begin);
        println!("{ranks} ranks: {rounds} rounds in {trials} trials, {:.1} s", time.as_secs_f64());
        all_rounds += rounds;
    }
    assert_eq!(done.len(), 5 * 9 * 3 * 3, "every combination was there");
    let subsets: usize = (2..=ranks_max).map(|ranks| (1 << ranks) - 1).sum();
    assert_eq!(seen.len(), 5 * subsets, "every subset was there, by every algorithm");
    all_rounds
}

/// Every subset of every combination, by half of the algorithms. Every subset has a round in which
/// the others abstain, one in which they are late, and one of all ranks behind that; every trial
/// has two rounds more.
fn simulate_every_subset(is_odd: bool) {
    let subsets = |ranks: u32| (1usize << ranks) - 1;
    let of_ranks = |ranks| 3 * subsets(ranks) + 2 * subsets(ranks).div_ceil(SUBSETS_MAX);
    let expected = 5 * 9 * 3 * 3 * (2..=RANKS_MAX).map(of_ranks).sum::<usize>() as u64;
    assert_eq!(simulate_all(true, is_odd), expected, "nothing was left out");
}

#[test]
fn every_combination_is_right_in_virtual_time_and_so_is_every_subset() {
    assert_eq!(algorithms("1x2").len(), 10, "five here, and five in the next test");
    simulate_all(false, false);
}

#[test]
fn every_combination_by_the_other_algorithms_is_right_in_virtual_time() {
    simulate_all(false, true);
}

#[test]
#[ignore = "every subset of every combination takes long: .ci/nightly runs it"]
fn every_combination_is_right_with_every_subset() {
    simulate_every_subset(false);
}

#[test]
#[ignore = "every subset of every combination takes long: .ci/nightly runs it"]
fn every_combination_by_the_other_algorithms_is_right_with_every_subset() {
    simulate_every_subset(true);
}

// ---- Over real fabrics.

/// Ranks of a group of threads.
const THREADS: u32 = 4;
/// What a step's bit is multiplied by: every number of ranks divides it.
const UNIT: i64 = 12;

/// What a rank saw of a round: whose contributions are in it, the result, and the correction with
/// its ranks.
type Seen = (Vec<Rank>, Vec<i64>, Option<(Vec<Rank>, Vec<i64>)>);

/// What a rank did and saw.
#[derive(Default)]
struct Log {
    seen: BTreeMap<u64, Seen>,
    /// The steps of which it gave something, with what became of it and the round that said so.
    given: Vec<(u32, Own, u64)>,
}

impl Log {
    fn note(&mut self, round: &Round<'_, i64>) {
        let set = round.contributors().iter().collect();
        let correction = round.correction().map(|(set, sum)| (set.iter().collect(), sum.to_vec()));
        let seen = (set, round.result().to_vec(), correction);
        assert!(self.seen.insert(round.number(), seen).is_none(), "a round is seen once");
    }
}

/// A rank's steps: in each another subset of the ranks gives something.
fn take_part(group: &Group, activation: Activation, len: usize) -> Log {
    let (mut log, rank) = (Log::default(), group.rank());
    let mut rounds = group.partial::<i64>(len, activation).expect("all ask for the same");
    for step in 0..1u32 << THREADS {
        // Never the same two steps apart: some are late for others.
        let subset = (step * 7 + 3) % (1 << THREADS);
        let gives = subset >> rank & 1 == 1;
        let round = if gives {
            let into = rounds.contribution().iter_mut().zip((0..THREADS).cycle());
            into.for_each(|(into, owner)| *into = if owner == rank { UNIT << step } else { 0 });
            rounds.contribute()
        } else {
            rounds.abstain()
        };
        match round {
            Ok(round) => {
                log.note(&round);
                if gives {
                    log.given.push((step, round.own(), round.number()));
                }
            }
            Err(PartialError::NothingGiven { .. }) if !gives => {}
            Err(error) => panic!("rank {rank}, {activation}: {error}"),
        }
    }
    let last = rounds.finish().expect("all finish");
    if !last.contributors().is_empty() || last.correction().is_some() {
        log.note(&last);
    }
    log
}

/// The steps of each rank that are in a sum that was divided by this; `set`: whose they must be.
fn steps_in(sum: &[i64], divisor: i64, set: &[Rank], what: &str) -> [i64; THREADS as usize] {
    let own = |owner: usize| {
        let mut elements = sum.iter().skip(owner).step_by(THREADS as usize);
        let first = *elements.next().expect("as many elements as ranks at least");
        assert!(elements.all(|element| *element == first), "{what}: half a contribution of rank {owner}");
        let whole = first * divisor;
        assert_eq!(whole % UNIT, 0, "{what}: {sum:?}, divided by {divisor}");
        assert_eq!(whole != 0, set.contains(&(owner as Rank)), "{what}: {set:?} are said to be in {sum:?}");
        whole / UNIT
    };
    std::array::from_fn(own)
}

/// Compares what all ranks have seen and given.
fn compare(logs: &[Log], late: Late, divisor: Divisor, what: &str) {
    let mut together: BTreeMap<u64, &Seen> = BTreeMap::new();
    for (number, seen) in logs.iter().flat_map(|log| &log.seen) {
        let other = together.entry(*number).or_insert(seen);
        assert_eq!(*other, seen, "{what}: round {number} is not the same on all ranks");
    }
    let mut found = [0i64; THREADS as usize];
    let mut by_round = BTreeMap::new();
    for (number, (set, result, correction)) in together {
        let what = format!("{what}, round {number}");
        let divide_by = match divisor {
            Divisor::None => 1,
            Divisor::World => i64::from(THREADS),
            Divisor::Contributors => set.len().max(1) as i64,
        };
        let steps = steps_in(result, divide_by, set, &what);
        by_round.insert(number, steps);
        let corrected = correction.as_ref().map(|(set, sum)| steps_in(sum, divide_by, set, &what));
        assert!(corrected.is_none() || late == Late::Correct, "{what}: {correction:?}");
        for steps in [Some(steps), corrected].into_iter().flatten() {
            for (all, more) in found.iter_mut().zip(steps) {
                assert_eq!(*all & more, 0, "{what}: a contribution is in two rounds");
                *all |= more;
            }
        }
    }
    for (log, rank) in logs.iter().zip(0..) {
        let mut expected = 0;
        for (step, own, round) in &log.given {
            let (bit, is_in_it) = (1 << step, by_round[round][rank] >> step & 1 == 1);
            let becomes = match (own, late) {
                (Own::Counted, _) => (bit, true),
                (Own::Carried, Late::Carry) | (Own::Corrected, Late::Correct) => (bit, false),
                (Own::Dropped, Late::Drop) => (0, false),
                other => panic!("{what}: step {step} of rank {rank} is {other:?}"),
            };
            expected |= becomes.0;
            assert_eq!(is_in_it, becomes.1, "{what}: step {step} of rank {rank} is {own:?} in round {round}");
        }
        assert_eq!(found[rank], expected, "{what}: the contributions of rank {rank} that are in results");
    }
}

/// Every activation by every algorithm, each with another late rule and divisor, so that every
/// activation has all pairs of these.
fn by_threads(fabric: Fabric) {
    let names = algorithms("2x2");
    let course = |place: usize, at: usize| {
        let pair = (place + at) % 9;
        let (late, divisor) = (LATE_RULES[pair / 3], DIVISORS[pair % 3]);
        (activations(THREADS)[at].0.late(late).divisor(divisor), late, divisor)
    };
    let all = ranks::with_group(
        fabric,
        THREADS,
        |_| {},
        |group| {
            let mut logs = Vec::new();
            for (place, name) in names.iter().enumerate() {
                let algorithm = algorithm(name);
                if matches!(algorithm, Algorithm::Packed(_)) {
                    group.set_topology(Some(&mesh(THREADS))).expect("the same on all ranks");
                }
                let group = group.with_variant(algorithm);
                for at in 0..9 {
                    // In signals, and in memory.
                    let len = if (place + at).is_multiple_of(2) { THREADS as usize } else { 4000 };
                    logs.push(((place, at), take_part(&group, course(place, at).0, len)));
                }
            }
            logs
        },
    );
    let mut all: Vec<_> = all.into_iter().map(Vec::into_iter).collect();
    let mut done = BTreeSet::new();
    for (place, name) in names.iter().enumerate() {
        for at in 0..9 {
            let next = all.iter_mut().map(|logs| logs.next().expect("as many on each rank"));
            let (places, logs): (Vec<_>, Vec<Log>) = next.unzip();
            assert_eq!(places, [(place, at); THREADS as usize]);
            let (activation, late, divisor) = course(place, at);
            let what = format!("{fabric}, {name}, {activation}, late: {late}, divisor: {divisor}");
            compare(&logs, late, divisor, &what);
            done.insert((place, at, late.to_string(), divisor.to_string()));
        }
    }
    assert_eq!(done.len(), 10 * 9, "every algorithm with every activation");
    let pairs: BTreeSet<_> = done.iter().map(|(_, at, late, divisor)| (at, late, divisor)).collect();
    assert_eq!(pairs.len(), 9 * 9, "every activation with every late rule and divisor");
}

#[test]
fn every_combination_is_right_over_shared_memory() {
    by_threads(Fabric::Shm);
}

#[test]
fn every_combination_is_right_over_tcp() {
    by_threads(Fabric::Tcp);
}

#[test]
fn every_combination_is_right_over_shared_memory_and_tcp() {
    by_threads(Fabric::Hybrid);
}
