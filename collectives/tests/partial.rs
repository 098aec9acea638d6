//! Partial all-reduce on real fabrics, by threads that are ranks.

#[path = "ranks/meeting.rs"]
mod meeting;
mod ranks;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pleach_collectives::partial::{Activation, ActivationError, Divisor, Late, Own};
use pleach_collectives::{
    CollectiveError, Element, Group, NotExact, Options, Partial, PartialError, Progress, ReduceOp,
    Reproducible, Round, bf16,
};
use pleach_transport::rendezvous::Fabric;
use pleach_vocabulary::random::Random;

use meeting::Meeting;

const FABRICS: [Fabric; 3] = [Fabric::Shm, Fabric::Tcp, Fabric::Hybrid];

/// What a late rank does.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute_for(time: Duration) {
    std::thread::sleep(time);
}

fn with_group<T: Send>(fabric: Fabric, ranks: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    ranks::with_group(fabric, ranks, |_| {}, body)
}

/// What a rank gives in a step.
fn value(rank: u32, step: usize, index: usize) -> i64 {
    i64::from(rank + 1) << 32 | (step as i64) << 16 | (index % 977) as i64
}

#[test]
fn nobody_is_late_and_the_sum_is_that_of_an_all_reduce() {
    for fabric in FABRICS {
        for (ranks, len) in [(1, 5), (2, 0), (2, 1), (4, 1000), (3, 100_000)] {
            with_group(fabric, ranks, |group| {
                let mut rounds = group.partial::<i64>(len, Activation::all()).unwrap();
                for step in 0..5 {
                    let rank = group.rank();
                    let into = rounds.contribution();
                    into.iter_mut().enumerate().for_each(|(index, into)| *into = value(rank, step, index));
                    let round = rounds.contribute().unwrap();
                    let sums =
                        (0..len).map(|index| (0..ranks).map(|rank| value(rank, step, index)).sum::<i64>());
                    assert!(round.result().iter().copied().eq(sums), "{fabric}, {ranks} ranks, step {step}");
                    assert!(round.contributors().iter().eq(0..ranks));
                    assert_eq!((round.own(), round.missed(), round.number()), (Own::Counted, 0, step as u64));
                }
                assert!(rounds.finish().unwrap().contributors().is_empty());
            });
        }
    }
}

/// Rank 2 goes on when the round of the others has ended. A round that waited for rank 2 would end
/// at no time.
fn come_after_the_others(group: &Group) {
    if group.rank() == 2 {
        group.barrier().unwrap();
    }
}

/// See [`come_after_the_others`].
fn have_come(group: &Group) {
    if group.rank() != 2 {
        group.barrier().unwrap();
    }
}

#[test]
fn the_first_ranks_do_not_wait_for_a_late_one_whose_data_come_later() {
    for fabric in FABRICS {
        let seen = with_group(fabric, 3, |group| {
            let mut rounds = group.partial::<i64>(1, Activation::quorum(2)).unwrap();
            come_after_the_others(&group);
            rounds.contribution()[0] = value(group.rank(), 0, 0);
            let round = rounds.contribute().unwrap();
            have_come(&group);
            let first = (round.result()[0], round.contributors().to_string(), round.own());
            let last = rounds.finish().unwrap();
            (first, (last.result()[0], last.contributors().to_string()))
        });
        let sum = value(0, 0, 0) + value(1, 0, 0);
        let late = (value(2, 0, 0), "2".to_owned());
        for (rank, (first, last)) in seen.into_iter().enumerate() {
            let own = if rank == 2 { Own::Carried } else { Own::Counted };
            assert_eq!(first, (sum, "0,1".to_owned(), own), "{fabric}, rank {rank}");
            assert_eq!(last, late, "{fabric}, rank {rank}: what was carried is in the last round");
        }
    }
}

#[test]
fn a_rank_knows_how_many_rounds_it_has_missed() {
    const MISSED: u64 = 2;
    for fabric in FABRICS {
        let reports = with_group(fabric, 3, |group| {
            let rank = group.rank();
            let mut rounds = group.partial::<i64>(50, Activation::quorum(2)).unwrap();
            let mut contribute = |step: usize| {
                rounds.contribution().fill(value(rank, step, 0));
                let round = rounds.contribute().unwrap();
                (round.number(), round.missed(), round.own(), round.contributors().to_string())
            };
            let both = "0,1".to_owned();
            come_after_the_others(&group);
            if rank == 2 {
                // Two rounds came between, and the one that it sees was bound without it.
                assert_eq!(contribute(0), (MISSED, MISSED, Own::Carried, both), "{fabric}");
            } else {
                for step in 0..=MISSED {
                    assert_eq!(contribute(step as usize), (step, 0, Own::Counted, both.clone()), "{fabric}");
                }
            }
            have_come(&group);
            let last = rounds.finish().unwrap();
            assert_eq!(
                (last.number(), last.missed(), last.contributors().to_string()),
                (MISSED + 1, 0, "2".to_owned()),
                "{fabric}, rank {rank}"
            );
            let report = rounds.report().unwrap();
            assert_eq!(group.report().rounds.as_ref(), Some(&report));
            report
        });
        for (report, rank) in reports.iter().zip(0..) {
            let (late, missed) = if rank == 2 { (1, MISSED) } else { (0, 0) };
            let found = (report.rounds, report.late, report.dropped, report.missed);
            assert_eq!(found, (MISSED + 2, late, 0, missed), "{fabric}, rank {rank}");
        }
    }
}

/// What a rank saw of a round.
type Seen = BTreeMap<u64, (String, Vec<i64>, Option<(String, Vec<i64>)>)>;

/// Some steps of a rank that is late now and then, and what it gave in all.
fn some_steps(rounds: &mut Partial<i64>, rank: u32, len: usize) -> (Seen, Vec<i64>) {
    let (mut seen, mut given) = (Seen::new(), vec![0i64; len]);
    let mut random = Random::new(rank.into());
    for step in 0..20 {
        if random.below(3) == 0 {
            compute_for(Duration::from_micros(random.below(3000)));
        }
        for (index, into) in rounds.contribution().iter_mut().enumerate() {
            *into = value(rank, step, index);
        }
        let round = rounds.contribute().unwrap();
        if round.own() != Own::Dropped {
            given.iter_mut().enumerate().for_each(|(index, sum)| *sum += value(rank, step, index));
        }
        note(&mut seen, &round);
    }
    note(&mut seen, &rounds.finish().unwrap());
    (seen, given)
}

fn note(seen: &mut Seen, round: &Round<'_, i64>) {
    let correction = round.correction().map(|(set, sum)| (set.to_string(), sum.to_vec()));
    seen.insert(round.number(), (round.contributors().to_string(), round.result().to_vec(), correction));
}

#[test]
fn nothing_is_lost_or_counted_twice_and_all_ranks_see_the_same() {
    let activations = [
        Activation::all(),
        Activation::eager_solo(),
        Activation::eager_majority(3),
        Activation::quorum(2).grace(Duration::from_micros(300)),
        Activation::backup_workers(1),
        Activation::deadline(Duration::from_millis(1)),
    ];
    for fabric in FABRICS {
        for (number, activation) in activations.into_iter().enumerate() {
            let late = [Late::Carry, Late::Drop, Late::Correct][number % 3];
            let activation = activation.late(late).divisor(Divisor::None);
            let (ranks, len) = (2 + number as u32 % 3, 1 + number * 301);
            let all = with_group(fabric, ranks, |group| {
                let mut rounds = group.partial::<i64>(len, activation).unwrap();
                let steps = some_steps(&mut rounds, group.rank(), len);
                (steps, rounds.report().unwrap())
            });
            let (mut together, mut given) = (Seen::new(), vec![0i64; len]);
            let rounds = all[0].1.rounds;
            for ((seen, own), report) in all {
                given.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
                assert_eq!(report.rounds, rounds, "all ranks were in all rounds");
                for (number, round) in seen {
                    let other = together.entry(number).or_insert_with(|| round.clone());
                    assert_eq!(*other, round, "{fabric}, {activation}: round {number}");
                }
            }
            assert_eq!(together.len() as u64, rounds, "each round had a rank that waited for it");
            let mut sum = vec![0i64; len];
            for (_, result, correction) in together.values() {
                let parts = [Some(result), correction.as_ref().map(|(_, sum)| sum)];
                for part in parts.into_iter().flatten() {
                    sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
                }
            }
            assert_eq!(sum, given, "{fabric}, {activation}");
        }
    }
}

#[test]
fn sums_are_divided_as_asked_and_negative_zeros_survive() {
    for (divisor, expected) in [(Divisor::None, 6.0), (Divisor::World, 2.0), (Divisor::Contributors, 3.0)] {
        with_group(Fabric::Shm, 3, |group| {
            let activation = Activation::quorum(2).divisor(divisor);
            let mut rounds = group.partial::<f32>(3, activation).unwrap();
            come_after_the_others(&group);
            rounds.contribution().copy_from_slice(&[2.0 + 2.0 * group.rank() as f32, -0.0, f32::MAX]);
            let round = rounds.contribute().unwrap();
            have_come(&group);
            assert_eq!(round.contributors().to_string(), "0,1");
            let bits = round.result()[..2].iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits, [f32::to_bits(expected), f32::to_bits(-0.0)], "{divisor}");
            rounds.finish().unwrap();
        });
    }
}

#[test]
fn other_operations_ignore_absent_ranks() {
    for (op, expected) in [
        (ReduceOp::Max, [-3, -3]),
        (ReduceOp::Min, [-5, -5]),
        (ReduceOp::Prod, [15, 15]),
        (ReduceOp::And, [-5 & -3; 2]),
        (ReduceOp::Or, [-5 | -3; 2]),
        (ReduceOp::Xor, [-5 ^ -3; 2]),
    ] {
        with_group(Fabric::Shm, 3, |group| {
            let mut rounds = group.partial::<i32>(2, Activation::quorum(2).combined_by(op)).unwrap();
            come_after_the_others(&group);
            rounds.contribution().fill([-5, -3, -100][group.rank() as usize]);
            let round = rounds.contribute().unwrap();
            have_come(&group);
            assert_eq!(
                (round.result(), round.contributors().to_string()),
                (&expected[..], "0,1".into()),
                "{op}"
            );
            rounds.finish().unwrap();
        });
    }
}

#[test]
fn an_average_is_that_of_the_contributors_unless_another_divisor_is_named() {
    for (divisor, expected) in [(Divisor::None, -5), (Divisor::Contributors, -5), (Divisor::World, -3)] {
        with_group(Fabric::Shm, 3, |group| {
            let activation = Activation::quorum(2).combined_by(ReduceOp::Avg).divisor(divisor);
            let mut rounds = group.partial::<i32>(1, activation).unwrap();
            come_after_the_others(&group);
            rounds.contribution()[0] = [-4, -7, -100][group.rank() as usize];
            let round = rounds.contribute().unwrap();
            have_come(&group);
            assert_eq!((round.result(), round.contributors().to_string()), (&[expected][..], "0,1".into()));
            rounds.finish().unwrap();
        });
    }
}

#[test]
fn each_rank_multiplies_its_contributions_by_its_own_factor_once() {
    for late in [Late::Carry, Late::Correct] {
        with_group(Fabric::Shm, 3, |group| {
            let rank = group.rank();
            // Rank 1 has no factor.
            let op = [ReduceOp::premul_sum(2.0), ReduceOp::Sum, ReduceOp::premul_sum(10.0)][rank as usize];
            let mut rounds =
                group.partial::<f32>(2, Activation::quorum(2).late(late).combined_by(op)).unwrap();
            come_after_the_others(&group);
            rounds.contribution().copy_from_slice(&[1.0 + rank as f32, -0.0]);
            let round = rounds.contribute().unwrap();
            let bits = round.result().iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits, [f32::to_bits(4.0), f32::to_bits(-0.0)]);
            have_come(&group);
            let last = rounds.finish().unwrap();
            let late_part = last.correction().map_or(last.result(), |(_, sum)| sum);
            assert_eq!(late_part, [30.0, -0.0], "{late}");
        });
    }
    with_group(Fabric::Shm, 2, |group| {
        // A factor that fits the elements of one rank alone is refused on both.
        let op = [ReduceOp::premul_sum(2.0), ReduceOp::premul_sum(2)][group.rank() as usize];
        let error = group.partial::<f32>(2, Activation::all().combined_by(op)).err().expect("an integer");
        assert!(error.to_string().contains("times a factor that does not fit"), "{error}");
        let activation = Activation::all().combined_by(ReduceOp::premul_sum(3));
        let error = group.partial::<f32>(2, activation).err().expect("an integer");
        assert!(matches!(error, PartialError::Activation(ActivationError::Factor { .. })), "{error}");
    });
}

/// The float nearest to a quotient of whole numbers; ties go to even.
fn nearest(number: i128, divide_by: u32) -> f32 {
    let shift = number.unsigned_abs().leading_zeros().saturating_sub(1);
    let (shifted, divisor) = (number.unsigned_abs() << shift, u128::from(divide_by));
    let quotient = (shifted / divisor) | u128::from(!shifted.is_multiple_of(divisor));
    let magnitude = quotient as f32 * 2f32.powi(-(shift as i32));
    if number < 0 { -magnitude } else { magnitude }
}

fn exact(options: &mut Options) {
    options.reproducible = Reproducible::Exact;
}

#[test]
fn an_exact_result_is_the_exact_sum_of_the_contributors_whoever_is_absent() {
    const LEN: usize = 40_000;
    // Whole numbers of 24 bits in places that are far apart, some of which cancel each other.
    let numbers = |rank: u32| -> Vec<i128> {
        let mut random = Random::new(u64::from(rank) + 7);
        let number = |index: usize| {
            let number = i128::from(random.below(1 << 24) as i64 - (1 << 23));
            let number = number << (7 * random.below(12));
            if index.is_multiple_of(5) {
                if rank.is_multiple_of(2) { 1 << 100 } else { -1 << 100 }
            } else {
                number
            }
        };
        (0..LEN).map(number).collect()
    };
    for (ranks, divisor, op) in [
        (3, Divisor::Contributors, ReduceOp::Sum),
        (4, Divisor::None, ReduceOp::Sum),
        (4, Divisor::None, ReduceOp::Avg),
        (5, Divisor::World, ReduceOp::Sum),
    ] {
        ranks::with_group(Fabric::Shm, ranks, exact, |group| {
            let rank = group.rank();
            let activation = Activation::all().combined_by(op).divisor(divisor);
            let all: Vec<_> = (0..ranks).map(numbers).collect();
            for present in 1u32..1 << ranks {
                let mut rounds = group.partial::<f32>(LEN, activation).unwrap();
                let round = if present >> rank & 1 == 1 {
                    for (into, number) in rounds.contribution().iter_mut().zip(&all[rank as usize]) {
                        *into = *number as f32;
                    }
                    rounds.contribute()
                } else {
                    rounds.contribution().fill(f32::NAN);
                    rounds.abstain()
                };
                let round = round.unwrap();
                let contributors: Vec<u32> = (0..ranks).filter(|rank| present >> rank & 1 == 1).collect();
                assert!(round.contributors().iter().eq(contributors.iter().copied()));
                let divide_by = match (divisor, op) {
                    (Divisor::None, ReduceOp::Sum) => 1,
                    (Divisor::World, _) => ranks,
                    _ => contributors.len() as u32,
                };
                for (index, found) in round.result().iter().enumerate() {
                    let sum = contributors.iter().map(|rank| all[*rank as usize][index]).sum();
                    let expected = nearest(sum, divide_by);
                    assert_eq!(found.to_bits(), expected.to_bits(), "{index} of {contributors:?}");
                }
                rounds.finish().unwrap();
            }
        });
    }
}

#[test]
fn a_late_contribution_that_goes_with_another_one_is_in_the_exact_sum_unrounded() {
    let large = 2f32.powi(40);
    for (late, expected, correction) in [
        (Late::Carry, 1.0, None),
        (Late::Drop, -large, None),
        (Late::Correct, -large, Some(("2".to_owned(), vec![large]))),
    ] {
        ranks::with_group(Fabric::Shm, 3, exact, |group| {
            let rank = group.rank();
            let activation = Activation::quorum(2).late(late).divisor(Divisor::None);
            let mut rounds = group.partial::<f32>(1, activation).unwrap();
            come_after_the_others(&group);
            rounds.contribution()[0] = large;
            assert_eq!(rounds.contribute().unwrap().result(), [2.0 * large]);
            have_come(&group);
            rounds.contribution()[0] = [-large, 0.0, 1.0][rank as usize];
            if rank == 2 {
                rounds.start_contribute().unwrap();
            }
            group.barrier().unwrap();
            match rank {
                0 => rounds.start_contribute().unwrap(),
                1 => return drop(rounds.finish().unwrap()),
                _ => {}
            }
            let round = rounds.wait().unwrap();
            assert_eq!((round.result(), round.contributors().to_string()), (&[expected][..], "0,2".into()));
            let found = round.correction().map(|(set, sum)| (set.to_string(), sum.to_vec()));
            assert_eq!(found, correction, "{late}");
            rounds.finish().unwrap();
        });
    }
}

#[test]
fn exact_rounds_have_special_values_other_types_and_few_elements() {
    for fabric in FABRICS {
        ranks::with_group(fabric, 2, exact, |group| {
            let rank = group.rank() as usize;
            let mut rounds = group.partial::<f64>(4, Activation::all()).unwrap();
            let own = [[1e300, f64::INFINITY, f64::NAN, -0.0], [-1e300, 1.0, 1.0, -0.0]][rank];
            rounds.contribution().copy_from_slice(&own);
            let result = rounds.contribute().unwrap().result().to_vec();
            assert_eq!((result[0], result[1], result[2].is_nan()), (0.0, f64::INFINITY, true));
            rounds.finish().unwrap();
            let mut rounds = group.partial::<bf16>(1, Activation::all()).unwrap();
            rounds.contribution()[0] = bf16::from_f32(0.5);
            assert_eq!(rounds.contribute().unwrap().result()[0].to_f32(), 1.0);
            rounds.finish().unwrap();
            group.partial::<f32>(0, Activation::all()).unwrap().contribute().unwrap();
            // What needs no exact sums goes as in other groups.
            let mut rounds = group.partial::<f32>(1, Activation::all().combined_by(ReduceOp::Max)).unwrap();
            rounds.contribution()[0] = rank as f32;
            assert_eq!(rounds.contribute().unwrap().result(), [1.0]);
            rounds.finish().unwrap();
            let mut rounds = group.partial::<i32>(1, Activation::all()).unwrap();
            rounds.contribution()[0] = i32::MAX;
            assert_eq!(rounds.contribute().unwrap().result(), [-2]);
            rounds.finish().unwrap();
        });
    }
}

#[test]
fn a_learned_deadline_waits_for_all_at_first_and_then_leaves_late_ranks_out() {
    let all = with_group(Fabric::Shm, 3, |group| {
        let activation = Activation::learned_deadline(95.0).late(Late::Carry).divisor(Divisor::None);
        let mut rounds = group.partial::<i64>(1, activation).unwrap();
        for step in 0..20 {
            rounds.contribution()[0] = 1;
            let round = rounds.contribute().unwrap();
            assert_eq!((round.result(), round.number()), (&[3][..], step), "{}", round.contributors());
        }
        come_after_the_others(&group);
        rounds.contribution()[0] = 1 << group.rank();
        let round = rounds.contribute().unwrap();
        let seen = (round.number(), round.contributors().to_string());
        have_come(&group);
        rounds.finish().unwrap();
        seen
    });
    // A rank may also have been left out by a deadline of microseconds.
    assert!(all.iter().all(|(number, set)| *number >= 20 && !set.contains('2')), "{all:?}");
}

#[test]
fn a_group_reports_the_rounds_that_it_has_made() {
    for (rule, became) in [(Late::Carry, "carried"), (Late::Drop, "dropped"), (Late::Correct, "corrected")] {
        let reports = with_group(Fabric::Shm, 3, |group| {
            assert_eq!(group.report().rounds, None);
            let mut rounds = group.partial::<i64>(1, Activation::quorum(2).late(rule)).unwrap();
            come_after_the_others(&group);
            rounds.contribution()[0] = 1;
            rounds.contribute().unwrap();
            have_come(&group);
            rounds.finish().unwrap();
            let report = group.report();
            assert_eq!(report.rounds, Some(rounds.report().unwrap()));
            let text = report.to_prometheus();
            let rank = group.rank();
            let late = u8::from(rank == 2);
            let of = |name| if name == became { late } else { 0 };
            for line in [
                format!("pleach_rounds_total{{rank=\"{rank}\"}} 2"),
                format!("pleach_late_total{{rank=\"{rank}\"}} {late}"),
                format!("pleach_carried_total{{rank=\"{rank}\"}} {}", of("carried")),
                format!("pleach_dropped_total{{rank=\"{rank}\"}} {}", of("dropped")),
                format!("pleach_corrected_total{{rank=\"{rank}\"}} {}", of("corrected")),
                format!("pleach_counted_total{{rank=\"{rank}\",peer=\"0\"}} 1"),
                format!(
                    "pleach_counted_total{{rank=\"{rank}\",peer=\"2\"}} {}",
                    u8::from(rule == Late::Carry)
                ),
            ] {
                assert!(text.contains(&line), "{line} in {text}");
            }
            assert!(report.to_string().contains(&format!("1 {became}")) == (rank == 2), "{report}");
            report.rounds.unwrap()
        });
        assert_eq!(reports[2].counted, [1, 1, u64::from(rule == Late::Carry)]);
    }
}

/// What becomes of the ranks that are not among the contributors.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Others {
    Abstain,
    ComeLate,
}

/// Compares a round of these ranks of the group with an all-reduce of a group of their own.
fn compare_with_part(group: &Group, contributors: &[u32], others: Others, len: usize) {
    let rank = group.rank();
    let mut random = Random::new(rank.into());
    let own: Vec<f32> = (0..len).map(|_| (random.below(1 << 24) as f32).powi(3) * 1e-9).collect();
    let contributes = contributors.contains(&rank);
    let part = group.split(Some(u32::from(contributes)), rank).unwrap().expect("a colour was named");
    let mut expected = own.clone();
    part.all_reduce(&mut expected, ReduceOp::Sum).unwrap();
    let activation = Activation::quorum(contributors.len() as u32);
    let mut rounds = group.partial::<f32>(len, activation).unwrap();
    if !contributes && others == Others::ComeLate {
        group.barrier().unwrap();
    }
    rounds.contribution().copy_from_slice(&own);
    let round =
        if contributes || others == Others::ComeLate { rounds.contribute() } else { rounds.abstain() };
    let round = round.unwrap();
    if contributes && others == Others::ComeLate {
        group.barrier().unwrap();
    }
    let what = format!("{contributors:?} of {}, others: {others:?}, {len} elements", group.world_size());
    assert_eq!(round.contributors().iter().collect::<Vec<_>>(), contributors, "{what}");
    if contributes {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(bits(round.result()) == bits(&expected), "other bits than without others: {what}");
    }
    rounds.finish().unwrap();
}

#[test]
fn a_reproducible_result_is_that_of_a_group_of_the_contributors_alone() {
    const RANKS: u32 = 4;
    let reproducible = |options: &mut Options| options.reproducible = Reproducible::PerWorldSize;
    for fabric in FABRICS {
        ranks::with_group(fabric, RANKS, reproducible, |group| {
            for subset in 1u32..(1 << RANKS) - 1 {
                let contributors: Vec<u32> = (0..RANKS).filter(|rank| subset >> rank & 1 == 1).collect();
                let len = if subset % 4 == 1 { 5000 } else { 40 + subset as usize };
                compare_with_part(&group, &contributors, Others::Abstain, len);
            }
            for contributors in [&[0, 1, 3][..], &[1, 2, 3], &[1, 2]] {
                compare_with_part(&group, contributors, Others::ComeLate, 500);
            }
        });
    }
}

#[test]
fn a_rank_that_is_always_late_is_waited_for_in_time() {
    let activation = Activation::eager_solo().late(Late::Drop).staleness_max(3);
    let is_over = AtomicBool::new(false);
    let all = with_group(Fabric::Shm, 2, |group| {
        let mut rounds = group.partial::<i64>(1, activation).unwrap();
        let (mut in_a_row, mut most, mut steps) = (0, 0, 0);
        // Rank 1 goes on until rank 0 has made its steps.
        while steps < 24 && !(group.rank() == 1 && is_over.load(Ordering::Acquire)) {
            if group.rank() == 1 {
                compute_for(Duration::from_millis(20));
            } else {
                steps += 1;
            }
            rounds.contribution()[0] = 1;
            let round = rounds.contribute().unwrap();
            in_a_row = if round.contributors().contains(1) { 0 } else { in_a_row + 1 };
            most = most.max(in_a_row);
        }
        is_over.store(true, Ordering::Release);
        rounds.finish().unwrap();
        (most, rounds.report().unwrap())
    });
    assert!(all[0].0 <= 3, "{:?}", all[0].1);
    assert!(all[0].1.counted[1] > 0, "{:?}", all[0].1);
}

#[test]
fn ranks_that_ask_for_different_things_are_told_both() {
    let different = |rank: u32| match rank {
        1 => (6, Activation::eager_solo()),
        _ => (5, Activation::quorum(2)),
    };
    let errors = with_group(Fabric::Shm, 3, |group| {
        let (len, activation) = different(group.rank());
        let error = group.partial::<f32>(len, activation).err().expect("they differ").to_string();
        // The group works as before.
        group.barrier().unwrap();
        error
    });
    for error in errors {
        for text in ["5 f32 (sum), quorum:2", "6 f32 (sum), solo", "ask for the same on all"] {
            assert!(error.contains(text), "{error}");
        }
    }
}

#[test]
fn what_cannot_be_carried_out_is_refused_on_all_ranks_and_hurts_nobody() {
    with_group(Fabric::Shm, 2, |group| {
        for activation in [Activation::quorum(0), Activation::quorum(3), Activation::deadline(Duration::ZERO)]
        {
            let error = group.partial::<f32>(1, activation).err().expect("it makes no sense");
            assert!(matches!(error, PartialError::Activation(ActivationError::Quorum { .. })), "{error}");
        }
        let error =
            group.partial::<f32>(1, Activation::all().combined_by(ReduceOp::Xor)).err().expect("of floats");
        assert!(matches!(error, PartialError::Activation(ActivationError::Operation { .. })), "{error}");
        group.barrier().unwrap();
    });
    let called = |options: &mut Options| options.progress = Progress::WhenCalled;
    ranks::with_group(Fabric::Shm, 2, called, |group| {
        let error = group.partial::<f32>(1, Activation::all()).err().expect("nobody could bind");
        assert!(matches!(error, PartialError::Activation(ActivationError::NoThread)), "{error}");
    });
    let exact = |options: &mut Options| options.reproducible = Reproducible::Exact;
    ranks::with_group(Fabric::Shm, 2, exact, |group| {
        let activation = Activation::all().combined_by(ReduceOp::Prod);
        let error = group.partial::<f32>(1, activation).err().expect("a product is rounded in some order");
        let reason = NotExact::Operation;
        assert!(
            matches!(&error, PartialError::Collective(CollectiveError::NotExact { reason: it, .. }) if *it == reason),
            "{error}"
        );
    });
}

#[test]
fn a_round_to_which_nobody_gives_is_an_error_on_all_ranks_and_the_next_one_works() {
    with_group(Fabric::Tcp, 3, |group| {
        let mut rounds = group.partial::<i64>(1, Activation::all()).unwrap();
        let error = rounds.abstain().err().expect("nobody gives anything");
        assert!(matches!(error, PartialError::NothingGiven { round: 0 }), "{error}");
        rounds.contribution()[0] = 7;
        assert_eq!(rounds.contribute().unwrap().result(), [21]);
        rounds.finish().unwrap();
        assert!(matches!(rounds.contribute(), Err(PartialError::Finished)));
        assert!(matches!(rounds.abstain(), Err(PartialError::Finished)));
        assert!(matches!(rounds.finish(), Err(PartialError::Finished)));
    });
}

#[test]
fn a_rank_that_leaves_ends_the_rounds_of_the_others_and_their_contribution_is_theirs_again() {
    let errors = with_group(Fabric::Shm, 3, |group| {
        let mut rounds = group.partial::<i64>(4, Activation::all()).unwrap();
        rounds.contribution().fill(1);
        rounds.contribute().unwrap();
        group.barrier().unwrap();
        if group.rank() == 1 {
            return None;
        }
        rounds.contribution().fill(5 + i64::from(group.rank()));
        let error = rounds.contribute().err().expect("rank 1 is gone").to_string();
        assert_eq!(rounds.contribution(), [5 + i64::from(group.rank()); 4]);
        // The group that the rounds were made from is another one.
        let fault = rounds.contribute().err().expect("it stays so").to_string();
        assert_eq!(error, fault);
        Some(error)
    });
    let errors: Vec<String> = errors.into_iter().flatten().collect();
    assert_eq!(errors[0], errors[1]);
    assert!(errors[0].contains("rank 1 has closed the group"), "{}", errors[0]);
}

/// Rounds have begun on a rank when it has heard the terms of all, so nobody needs it any more.
#[test]
fn a_rank_that_leaves_as_soon_as_rounds_have_begun_keeps_no_other_rank_from_beginning_them() {
    for fabric in [Fabric::Shm, Fabric::Tcp] {
        with_group(fabric, 4, |group| {
            for step in 0..40 {
                let rounds = group.partial::<i64>(3, Activation::all());
                let mut rounds = rounds.unwrap_or_else(|error| panic!("{fabric}, step {step}: {error}"));
                if group.rank() != step % 4 {
                    let Err(error) = rounds.contribute() else { panic!("one does not contribute") };
                    let left = format!("rank {}", step % 4);
                    assert!(error.to_string().contains(&left), "{fabric}, step {step}: {error}");
                }
                drop(rounds);
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_while_rounds_go_on_is_the_one_that_is_named() {
    for fabric in FABRICS {
        let errors = with_group(fabric, 3, |group| {
            let mut rounds = group.partial::<i64>(1000, Activation::eager_solo()).unwrap();
            if group.rank() == 1 {
                rounds.contribute().unwrap();
                return None;
            }
            loop {
                if let Err(error) = rounds.contribute() {
                    return Some(error.to_string());
                }
            }
        });
        for error in errors.into_iter().flatten() {
            assert!(error.contains("rank 1 has closed the group"), "{fabric}: {error}");
        }
    }
}

/// Rank 0 carries 3, then contributes 5 until rank 1 has left.
fn fail_with<T: Element>(adjust: impl Fn(&mut Options) + Sync, op: ReduceOp, value: fn(i8) -> T, left: &[T]) {
    ranks::with_group(Fabric::Shm, 2, adjust, |group| {
        let activation = Activation::quorum(1).combined_by(op);
        let mut rounds = group.partial::<T>(1, activation).unwrap();
        if group.rank() == 1 {
            rounds.contribution()[0] = value(1);
            rounds.contribute().unwrap();
            group.barrier().unwrap();
            group.barrier().unwrap();
            return;
        }
        group.barrier().unwrap();
        rounds.contribution()[0] = value(3);
        assert_eq!(rounds.contribute().unwrap().own(), Own::Carried);
        group.barrier().unwrap();
        let found = loop {
            rounds.contribution()[0] = value(5);
            if rounds.contribute().is_err() {
                break rounds.contribution()[0];
            }
        };
        assert!(left.contains(&found), "{found:?}");
        for _ in 0..3 {
            assert!(rounds.contribute().is_err());
            assert_eq!(rounds.contribution(), [found]);
        }
    });
}

#[test]
fn a_contribution_that_failed_is_not_added_to_itself_by_another_try() {
    fail_with::<i64>(|_| {}, ReduceOp::Sum, i64::from, &[5, 8]);
    fail_with::<i64>(|_| {}, ReduceOp::premul_sum(2), i64::from, &[5, 10, 16]);
    fail_with::<f64>(exact, ReduceOp::Sum, f64::from, &[5.0, 8.0]);
    // A try that the group had failed before multiplies nothing.
    fail_with::<f64>(exact, ReduceOp::premul_sum(2.0), f64::from, &[5.0, 10.0, 16.0]);
}

#[test]
fn ranks_that_have_abstained_and_do_not_wait_time_nobody_out() {
    let timeout = Duration::from_secs(4);
    let both = Meeting::new(2);
    ranks::with_group(
        Fabric::Shm,
        2,
        |options| options.timeout = timeout,
        |group| {
            let mut rounds = group.partial::<i64>(1, Activation::quorum(1)).unwrap();
            if group.rank() == 0 {
                rounds.contribute().unwrap();
                group.barrier().unwrap();
            } else {
                group.barrier().unwrap();
                let round = rounds.abstain().unwrap();
                assert_eq!((round.number(), round.own()), (0, Own::Abstained));
            }
            compute_for(timeout + timeout / 2);
            both.wait();
            rounds.contribution()[0] = 2;
            rounds.contribute().unwrap();
            rounds.finish().unwrap();
        },
    );
}

#[test]
fn after_a_round_to_which_nobody_gave_anything_all_are_waited_for_again() {
    with_group(Fabric::Shm, 3, |group| {
        let mut rounds = group.partial::<i64>(1, Activation::all()).unwrap();
        for _ in 0..20 {
            rounds.contribution()[0] = 1;
            let round = rounds.contribute().unwrap();
            assert_eq!((round.result(), round.missed()), (&[3][..], 0), "{}", round.contributors());
            assert!(matches!(rounds.abstain(), Err(PartialError::NothingGiven { .. })));
        }
        rounds.finish().unwrap();
    });
}

#[test]
fn the_next_contribution_is_computed_while_the_round_of_the_last_goes_on() {
    for late in [Late::Carry, Late::Drop, Late::Correct] {
        let all = with_group(Fabric::Shm, 3, |group| {
            let rank = group.rank();
            let activation = Activation::quorum(2).late(late);
            let mut rounds = group.partial::<i64>(50, activation).unwrap();
            assert!(matches!(rounds.wait(), Err(PartialError::NotStarted)));
            let (mut seen, mut given) = (Seen::new(), 0);
            rounds.contribution().fill(value(rank, 0, 0));
            for step in 1..=30 {
                rounds.start_contribute().unwrap();
                assert!(matches!(rounds.contribute(), Err(PartialError::UnderWay)));
                assert!(matches!(rounds.abstain(), Err(PartialError::UnderWay)));
                rounds.contribution().fill(value(rank, step, 0));
                if (step as u32 + rank).is_multiple_of(5) {
                    compute_for(Duration::from_millis(2));
                }
                let round = rounds.wait().unwrap();
                given += if round.own() == Own::Dropped { 0 } else { value(rank, step - 1, 0) };
                note(&mut seen, &round);
                assert_eq!(rounds.contribution(), [value(rank, step, 0); 50], "what was written stays");
            }
            note(&mut seen, &rounds.finish().unwrap());
            (seen, given)
        });
        let (mut together, mut sum) = (Seen::new(), 0);
        for (seen, given) in all {
            sum += given;
            together.extend(seen);
        }
        for (_, result, correction) in together.values() {
            sum -= result[0] + correction.as_ref().map_or(0, |(_, sum)| sum[0]);
        }
        assert_eq!(sum, 0, "{late}");
    }
}

#[test]
fn a_rank_that_never_contributes_is_named_when_the_time_is_up() {
    let (two, all) = (Meeting::new(2), Meeting::new(3));
    let short = |options: &mut Options| options.timeout = Duration::from_secs(4);
    let errors = ranks::with_group(Fabric::Shm, 3, short, |group| {
        let mut rounds = group.partial::<i64>(1, Activation::all()).unwrap();
        if group.rank() == 2 {
            all.wait();
        } else {
            two.wait();
        }
        let error = rounds.contribute().err().expect("rank 2 comes too late").to_string();
        if group.rank() != 2 {
            all.wait();
        }
        error
    });
    let expected = "for rank 2: its contribution to round 0 of a partial all-reduce, on host ";
    for error in &errors {
        assert!(error.contains(expected) && *error == errors[0], "{error}");
    }
}
