//! Single situations, each with what must come of it.

use std::num::NonZeroU32;
use std::time::Duration;

use pleach_membership::{Maker, Process, Reason};
use pleach_transport::Nanos;

use crate::world::{Event, Fault, SUSPECT_AFTER, World, ms};

fn at(world: &mut World, time: Duration, fault: Fault) {
    world.at(Nanos::ZERO + time, Event::Fault(fault));
}

/// The seats of the newest record.
fn newest(world: &World) -> Vec<u32> {
    let newest = world.checkers.records.values().next_back().expect("there is a first record");
    newest.members().iter().map(|member| member.seat.0).collect()
}

#[test]
fn planned_joins_and_leaves_cost_no_retry() {
    for seed in 0..20 {
        for maker in [Maker::Members, Maker::Store] {
            let mut world = World::new(seed, 4, maker);
            at(&mut world, ms(100), Fault::Join(Process::new(4, 2)));
            at(&mut world, ms(600), Fault::Leave(Process::new(0, 1)));
            at(&mut world, ms(610), Fault::Leave(Process::new(2, 1)));
            at(&mut world, ms(1200), Fault::Join(Process::new(5, 2)));
            at(&mut world, ms(1201), Fault::Join(Process::new(0, 3)));
            world.run_until(Nanos::ZERO + ms(3000));
            assert_eq!(world.checkers.retries, 0, "seed {seed}");
            assert_eq!(newest(&world), [0, 1, 3, 4, 5], "seed {seed}:\n{}", world.describe());
        }
    }
}

#[test]
fn a_new_process_replaces_the_one_on_its_seat() {
    let mut world = World::new(1, 3, Maker::Members);
    at(&mut world, ms(100), Fault::Join(Process::new(1, 2)));
    world.run_until(Nanos::ZERO + ms(1500));
    let newest = world.checkers.records.values().next_back().expect("there is a first record");
    assert!(newest.contains(Process::new(1, 2)) && !newest.contains(Process::new(1, 1)));
    assert!(newest.causes().iter().any(|cause| cause.reason == Reason::Replaced));
    assert!(!world.is_living(Process::new(1, 1)), "it is told that it is out");
}

/// Whoever loses a connection first, and whichever death is certified first: nobody else goes.
#[test]
fn deaths_one_after_the_other_cost_nobody_else() {
    for seed in 0..200 {
        let mut world = World::new(seed, 5, Maker::Members);
        for (seat, after) in [(1, 0), (3, seed % 40), (2, seed % 7)] {
            at(&mut world, ms(100 + after), Fault::Kill(Process::new(seat, 1)));
        }
        world.run_until(Nanos::ZERO + ms(2000));
        assert_eq!(newest(&world), [0, 4], "seed {seed}:\n{}", world.describe());
    }
}

fn of_pairs(seed: u64, members: u32, maker: Maker) -> World {
    World::of_units(seed, members, maker, NonZeroU32::new(2).expect("is not 0"))
}

/// Why seats left or came, in the newest record.
fn newest_causes(world: &World) -> Vec<(u32, Reason)> {
    let newest = world.checkers.records.values().next_back().expect("there is a first record");
    newest.causes().iter().map(|cause| (cause.process.seat.0, cause.reason)).collect()
}

#[test]
fn a_unit_falls_with_one_of_its_members_and_another_one_comes_when_it_is_whole() {
    for seed in 0..20 {
        for maker in [Maker::Members, Maker::Store] {
            let mut world = of_pairs(seed, 6, maker);
            at(&mut world, ms(100), Fault::Kill(Process::new(3, 1)));
            at(&mut world, ms(400), Fault::Join(Process::new(2, 2)));
            world.run_until(Nanos::ZERO + ms(1500));
            assert_eq!(newest(&world), [0, 1, 4, 5], "seed {seed}: half a unit waits");
            assert_eq!(newest_causes(&world), [(2, Reason::Unit), (3, Reason::Died)]);
            assert!(!world.is_living(Process::new(2, 1)), "it is told that it is out");
            let retries = world.checkers.retries;
            world.at(world.now, Event::Fault(Fault::Join(Process::new(3, 2))));
            world.run_until(Nanos::ZERO + ms(3000));
            assert_eq!(newest(&world), [0, 1, 2, 3, 4, 5], "seed {seed}:\n{}", world.describe());
            assert_eq!(world.checkers.retries, retries, "seed {seed}: a planned join");
        }
    }
}

#[test]
fn a_unit_leaves_when_one_of_its_members_does() {
    for seed in 0..20 {
        let mut world = of_pairs(seed, 4, Maker::Members);
        at(&mut world, ms(100), Fault::Leave(Process::new(1, 1)));
        world.run_until(Nanos::ZERO + ms(1000));
        assert_eq!(newest_causes(&world), [(0, Reason::Unit), (1, Reason::Left)], "seed {seed}");
        assert_eq!((newest(&world), world.checkers.retries), (vec![2, 3], 0), "seed {seed}");
        // Nobody is left to leave to, so steps go on.
        let (epochs, steps) = (world.checkers.records.len(), world.checkers.steps());
        world.at(world.now, Event::Fault(Fault::Leave(Process::new(2, 1))));
        world.run_until(Nanos::ZERO + ms(2000));
        assert_eq!(world.checkers.records.len(), epochs, "seed {seed}");
        assert!(world.checkers.steps() > steps, "seed {seed}");
    }
}

#[test]
fn a_spare_joins_in_the_record_without_the_dead_and_after_the_one_without_the_leaver() {
    for seed in 0..20 {
        for maker in [Maker::Members, Maker::Store] {
            let mut world = World::full(seed, 4, maker);
            at(&mut world, ms(100), Fault::Join(Process::new(4, 2)));
            at(&mut world, ms(110), Fault::Join(Process::new(5, 2)));
            world.run_until(Nanos::ZERO + ms(600));
            assert_eq!(world.checkers.records.len(), 1, "seed {seed}: there is no room");
            at(&mut world, ms(600), Fault::Leave(Process::new(2, 1)));
            world.run_until(Nanos::ZERO + ms(1000));
            // It comes at the end of the first step without the other one.
            assert_eq!(newest_causes(&world), [(4, Reason::Joined)], "seed {seed}");
            assert_eq!(newest(&world), [0, 1, 3, 4], "seed {seed}");
            assert_eq!(world.checkers.retries, 0, "seed {seed}: both are planned");
            at(&mut world, ms(1000), Fault::Kill(Process::new(1, 1)));
            world.run_until(Nanos::ZERO + ms(1500));
            assert_eq!(newest_causes(&world), [(1, Reason::Died), (5, Reason::Joined)], "seed {seed}");
            assert_eq!(newest(&world), [0, 3, 4, 5], "seed {seed}:\n{}", world.describe());
            assert_eq!(world.checkers.records.len(), 4, "seed {seed}: two for the leave, one for the death");
        }
    }
}

#[test]
fn a_spare_that_stands_still_is_not_taken_until_it_goes_on() {
    for seed in 0..20 {
        let mut world = World::full(seed, 4, Maker::Members);
        at(&mut world, ms(100), Fault::Join(Process::new(4, 2)));
        at(&mut world, ms(300), Fault::Freeze(Process::new(4, 2), ms(1500)));
        at(&mut world, ms(900), Fault::Kill(Process::new(1, 1)));
        world.run_until(Nanos::ZERO + ms(1500));
        assert_eq!(newest_causes(&world), [(1, Reason::Died)], "seed {seed}");
        world.run_until(Nanos::ZERO + ms(2500));
        assert_eq!(newest(&world), [0, 2, 3, 4], "seed {seed}:\n{}", world.describe());
    }
}

#[test]
fn too_few_members_take_in_who_comes() {
    for seed in 0..20 {
        for maker in [Maker::Members, Maker::Store] {
            let mut world = World::new(seed, 3, maker);
            world.fewest = 3;
            at(&mut world, ms(100), Fault::Kill(Process::new(1, 1)));
            world.run_until(Nanos::ZERO + ms(800));
            assert_eq!(newest(&world), [0, 2], "seed {seed}");
            let (retries, steps) = (world.checkers.retries, world.checkers.steps());
            at(&mut world, ms(800), Fault::Join(Process::new(1, 2)));
            world.run_until(Nanos::ZERO + ms(2000));
            assert_eq!(newest(&world), [0, 1, 2], "seed {seed}:\n{}", world.describe());
            assert_eq!(newest_causes(&world), [(1, Reason::Joined)], "seed {seed}");
            assert_eq!(world.checkers.retries, retries, "seed {seed}: nobody was in a step");
            assert!(world.checkers.steps() > steps, "seed {seed}");
        }
    }
}

#[test]
fn a_member_whose_step_fails_is_named_and_stays() {
    for seed in 0..20 {
        for maker in [Maker::Members, Maker::Store] {
            let mut world = World::new(seed, 4, maker);
            at(&mut world, ms(100), Fault::Fail(Process::new(2, 1)));
            world.run_until(Nanos::ZERO + ms(1000));
            assert_eq!(newest_causes(&world), [(2, Reason::Failed)], "seed {seed}:\n{}", world.describe());
            assert_eq!(newest(&world), [0, 1, 2, 3], "seed {seed}");
            // Where a member is lost, steps fail for that reason.
            at(&mut world, ms(1000), Fault::Kill(Process::new(1, 1)));
            at(&mut world, ms(1000), Fault::Fail(Process::new(0, 1)));
            world.run_until(Nanos::ZERO + ms(2000));
            let causes = newest_causes(&world);
            assert!(causes == [(1, Reason::Died)], "seed {seed}: {causes:?}\n{}", world.describe());
        }
    }
}

/// Each member of one unit does not reach a member of another unit: one unit goes instead of two.
#[test]
fn links_that_stay_down_cost_as_few_units_as_possible() {
    for seed in 0..20 {
        let mut world = of_pairs(seed, 8, Maker::Members);
        for (from, to) in [(0, 5), (1, 7)] {
            at(&mut world, ms(100), Fault::Cut(from, to, true));
        }
        world.run_until(Nanos::ZERO + ms(4000));
        assert_eq!(newest(&world), [2, 3, 4, 5, 6, 7], "seed {seed}:\n{}", world.describe());
        let mut world = of_pairs(seed, 4, Maker::Members);
        at(&mut world, ms(100), Fault::Cut(2, 3, true));
        world.run_until(Nanos::ZERO + ms(4000));
        assert_eq!(newest(&world), [0, 1], "seed {seed}:\n{}", world.describe());
    }
}

#[test]
fn members_see_that_no_unit_is_whole() {
    for seed in 0..20 {
        let mut world = of_pairs(seed, 4, Maker::Members);
        for seat in [0, 3] {
            at(&mut world, ms(100), Fault::Kill(Process::new(seat, 1)));
        }
        world.run_until(Nanos::ZERO + ms(200));
        let left = [Process::new(1, 1), Process::new(2, 1)];
        assert!(left.iter().all(|process| !world.has_lost_every_unit(*process)), "seed {seed}: it is early");
        world.run_until(Nanos::ZERO + ms(2000));
        assert_eq!(world.checkers.records.len(), 1, "seed {seed}: there is nobody to go on");
        assert!(left.iter().all(|process| world.has_lost_every_unit(*process)), "seed {seed}");
    }
}

#[test]
fn a_link_that_stays_down_costs_one_member() {
    for seed in 0..20 {
        for both_ways in [false, true] {
            let mut world = World::new(seed, 5, Maker::Members);
            at(&mut world, ms(100), Fault::Cut(3, 1, true));
            if both_ways {
                at(&mut world, ms(100), Fault::Cut(1, 3, true));
            }
            world.run_until(Nanos::ZERO + ms(4000));
            let seats = newest(&world);
            assert_eq!(seats.len(), 4, "seed {seed}: {seats:?}:\n{}", world.describe());
            assert!(!(seats.contains(&1) && seats.contains(&3)), "seed {seed}: {seats:?}");
        }
    }
}

/// Without witnesses, as over hosts: two of four are no majority, so the two stand still.
#[test]
fn half_of_the_members_stand_still_where_no_store_decides() {
    let mut world = World::new(1, 4, Maker::Members);
    world.certifies = false;
    at(&mut world, ms(100), Fault::Kill(Process::new(0, 1)));
    at(&mut world, ms(100), Fault::Kill(Process::new(1, 1)));
    world.run_until(Nanos::ZERO + ms(5000));
    assert_eq!(world.checkers.records.len(), 1);
    assert!(world.checkers.no_quorums > 0, "they say so");
}

#[test]
fn half_of_the_members_go_on_where_a_store_decides() {
    let mut world = World::new(1, 4, Maker::Store);
    world.certifies = false;
    at(&mut world, ms(100), Fault::Kill(Process::new(0, 1)));
    at(&mut world, ms(100), Fault::Kill(Process::new(1, 1)));
    world.run_until(Nanos::ZERO + ms(5000));
    assert_eq!(newest(&world), [2, 3]);
}

/// A member that is cut off reaches the store as the others do, and must not win the race.
#[test]
fn who_is_cut_off_alone_does_not_win_the_race() {
    for seed in 0..20 {
        for alone in 0..4 {
            let mut world = World::new(seed, 4, Maker::Store);
            for other in (0..4).filter(|other| *other != alone) {
                at(&mut world, ms(100), Fault::Cut(alone, other, true));
                at(&mut world, ms(100), Fault::Cut(other, alone, true));
            }
            world.run_until(Nanos::ZERO + ms(4000));
            let others: Vec<u32> = (0..4).filter(|other| *other != alone).collect();
            assert_eq!(newest(&world), others, "seed {seed}");
            assert!(!world.is_living(Process::new(alone, 1)), "seed {seed}: it reads that it is out");
        }
    }
}

/// A process that did not run has not waited: it suspects nobody for that time.
#[test]
fn all_that_are_stopped_at_once_go_on_together() {
    for seed in 0..20 {
        let mut world = World::new(seed, 4, Maker::Members);
        for seat in 0..4 {
            at(&mut world, ms(100), Fault::Freeze(Process::new(seat, 1), 10 * SUSPECT_AFTER));
        }
        world.run_until(Nanos::ZERO + 20 * SUSPECT_AFTER);
        assert_eq!(world.checkers.records.len(), 1, "seed {seed}: nobody is taken out");
    }
}

#[test]
fn any_number_of_kills_is_survived_where_all_are_certified() {
    let mut world = World::new(3, 6, Maker::Members);
    for seat in 0..5 {
        at(&mut world, ms(100 + 3 * u64::from(seat)), Fault::Kill(Process::new(seat, 1)));
    }
    world.run_until(Nanos::ZERO + ms(1000));
    assert_eq!(newest(&world), [5]);
    let time = world.checkers.last_change.since(world.last_fault);
    assert!(time < 2 * SUSPECT_AFTER, "{time:?}: silence is waited for in turn");
}

/// The two witnesses of each death are drawn among all that run, so some wait to join.
#[test]
fn a_witness_that_waits_to_join_is_heard() {
    for seed in 0..40 {
        let mut world = World::new(seed, 2, Maker::Members);
        at(&mut world, ms(100), Fault::Join(Process::new(2, 2)));
        at(&mut world, ms(101), Fault::Join(Process::new(3, 2)));
        at(&mut world, ms(102), Fault::Kill(Process::new(1, 1)));
        world.run_until(Nanos::ZERO + ms(3000));
        assert!(!newest(&world).contains(&1), "seed {seed}:\n{}", world.describe());
    }
}

/// The checker of foreign writes finds a device that does not sever.
#[test]
#[should_panic(expected = "which is in another epoch")]
fn a_device_that_does_not_sever_is_found() {
    for seed in 0..50 {
        let mut world = World::new(seed, 4, Maker::Members);
        world.severs = false;
        at(&mut world, ms(100), Fault::Freeze(Process::new(3, 1), 4 * SUSPECT_AFTER));
        world.run_until(Nanos::ZERO + ms(2000));
    }
}
