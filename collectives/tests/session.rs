//! Sessions of real processes: members are killed and stopped at any moment, and what all of them
//! say is compared by checkers that know nothing of the protocol.
//!
//! This binary starts itself as members ([`member_process`]), which make steps and say what became
//! of each, line by line ([`member`]); [`job`] is the test's side.

/// Each of these functions as a test on each fabric.
macro_rules! on_every_fabric {
    ($($test:ident),* $(,)?) => {
        mod shm {
            $(#[test] fn $test() { super::$test("shm"); })*
        }
        mod tcp {
            $(#[test] fn $test() { super::$test("tcp"); })*
        }
    };
}

/// Each of these functions as a test over RDMA.
macro_rules! over_verbs {
    ($($test:ident),* $(,)?) => {
        mod verbs {
            $(
                #[test]
                #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
                fn $test() { super::$test("verbs"); }
            )*
        }
    };
}

#[path = "session/asked.rs"]
mod asked;
#[path = "../../transport/tests/conformance/softroce/changed.rs"]
#[allow(dead_code)] // Not every change is made here.
mod changed;
#[path = "../../transport/tests/fake_cuda/mod.rs"]
mod fake_cuda;
#[path = "session/job.rs"]
mod job;
#[path = "session/kept.rs"]
mod kept;
#[path = "../../tests/links/mod.rs"]
#[allow(dead_code)] // No ranks of `pleach` are started on hosts here.
mod links;
#[path = "session/member.rs"]
mod member;
#[path = "session/on_gpu.rs"]
mod on_gpu;
#[path = "../../tests/outside_stores/mod.rs"]
mod outside_stores;
#[path = "session/over_hosts.rs"]
mod over_hosts;
#[path = "session/over_links.rs"]
mod over_links;
#[path = "session/over_tcp.rs"]
mod over_tcp;
#[path = "session/parts.rs"]
mod parts;
#[path = "../../tests/ports/mod.rs"]
mod ports;
#[path = "../../tests/rdma_devices/mod.rs"]
mod rdma_devices;
#[path = "session/served.rs"]
mod served;
#[path = "../../tests/skipped/mod.rs"]
#[allow(dead_code)] // Not every test skips a part.
mod skipped;
#[path = "session/softroce.rs"]
mod softroce;
#[path = "session/stores.rs"]
mod stores;
#[path = "session/units.rs"]
mod units;

use std::time::Duration;

use job::{Job, Told};
use pleach_vocabulary::random::Random;
use rustix::process::Signal;

/// Not a test: one member of one of the tests, which start it.
#[test]
#[ignore = "is started by the other tests as one of their members"]
fn member_process() {
    member::make_steps();
}

// What RDMA changes: how pairs are connected, drained and severed.
over_verbs!(
    survivors_of_one_death_go_on_with_what_they_have,
    who_was_stopped_is_out_and_changes_nothing,
    who_died_comes_back_on_its_seat,
    who_joins_costs_no_retry_and_has_the_state,
    who_joins_heals_behind_its_first_step,
    who_is_told_to_leave_costs_the_others_no_retry,
);

on_every_fabric!(
    without_faults_each_step_is_committed_once,
    enough_ranks_begin_and_the_others_join,
    all_ranks_that_come_in_time_begin,
    where_too_few_come_the_missing_are_named,
    a_change_tells_who_came_and_which_messages_nobody_received,
    who_comes_late_with_other_settings_is_refused_alone,
    survivors_of_one_death_go_on_with_what_they_have,
    survivors_of_three_deaths_at_once_go_on,
    the_last_survivor_goes_on_alone,
    who_was_stopped_is_out_and_changes_nothing,
    deaths_at_any_moment_lose_and_repeat_nothing,
    a_step_that_fails_on_one_member_is_repeated_by_all,
    too_few_members_say_so,
    too_few_members_take_in_who_comes,
    without_a_quorum_a_member_gives_up_and_the_others_go_on,
    who_is_told_to_leave_costs_the_others_no_retry,
    where_all_are_told_to_leave_all_do,
    an_interrupt_ends_a_commit_that_waits_for_a_stopped_member,
    who_is_told_to_leave_in_a_commit_leaves_when_the_stopped_member_is_out,
    who_leaves_without_a_word_is_named_at_once,
    who_joins_costs_no_retry_and_has_the_state,
    two_join_at_once,
    a_member_that_dies_while_one_heals_is_replaced_as_a_source,
    who_dies_while_it_heals_holds_nobody_up,
    who_died_comes_back_on_its_seat,
    one_dies_and_another_joins_at_once,
    the_first_member_dies_and_comes_back,
    a_spare_takes_the_place_of_who_dies_and_of_who_leaves,
    a_spare_that_ends_costs_the_others_nothing,
    a_spare_that_stands_still_is_passed_over,
    a_spare_of_a_job_that_ends_is_told_that_it_is_not_needed,
    who_is_not_of_the_job_is_refused,
    an_audit_names_who_differs,
    who_joins_is_audited_from_its_first_step_on,
    who_joins_heals_behind_its_first_step,
    two_heal_behind_a_step,
    a_member_that_dies_while_one_heals_behind_a_step_is_replaced_as_a_source,
    who_dies_while_it_heals_behind_a_step_holds_nobody_up,
    a_step_that_does_not_only_reduce_is_repeated_after_healing,
    who_has_read_nothing_is_told_so_when_it_leaves,
    survivors_of_a_death_make_their_parts_anew,
    deaths_while_parts_are_made_and_used_lose_and_repeat_nothing,
    who_was_stopped_changes_no_part_of_the_others,
    who_joins_has_its_place_in_each_part,
    who_heals_behind_a_step_is_in_the_parts_of_the_next,
);

fn without_faults_each_step_is_committed_once(fabric: &str) {
    without_faults(fabric, 4, 40, &[]);
}

/// So many members make so many steps; each is committed with all of them at once.
pub(crate) fn without_faults(fabric: &str, size: u32, steps: usize, settings: &[&str]) {
    let mut job = Job::start(fabric, size, &[settings, &[&format!("steps={steps}")]].concat());
    job.finish();
    job.check();
    for seat in 0..size {
        assert_eq!(job.committed(seat).len(), steps, "seat {seat}");
        assert!(job.committed(seat).iter().all(|(_, bits)| *bits == (1 << size) - 1), "seat {seat}");
        assert_eq!(job.retries(seat), 0);
    }
}

fn enough_ranks_begin_and_the_others_join(fabric: &str) {
    let mut job = Job::start_without(fabric, 5, &[1, 3], &["fewest=3", "begin=200"]);
    job.await_all_of(&[0, 1, 2]);
    let late = [1, 3].map(|rank| job.spawn(rank, &[]));
    job.await_all_of(&[0, 1, 2, late[0], late[1]]);
    // Each has its rank as its seat, as if it had been there from the beginning.
    assert_eq!(job.seats(), [0, 2, 4, 1, 3]);
    job.signal(1, Signal::KILL);
    job.await_all_of(&[0, 2, late[0], late[1]]);
    job.finish();
    job.check();
}

fn all_ranks_that_come_in_time_begin(fabric: &str) {
    // One would do, and waits for the other until it is there.
    let mut job = Job::start_without(fabric, 2, &[1], &["fewest=1"]);
    job.listen(Duration::from_millis(300));
    assert_eq!(job.told(0), [], "it waits");
    let late = job.spawn(1, &["steps=10"]);
    job.await_all_of(&[0, late]);
    job.finish();
    assert_eq!(job.committed(late)[0], (0, 0b11), "it was there from the beginning");
}

fn where_too_few_come_the_missing_are_named(fabric: &str) {
    let settings = ["fewest=4", "begin=200", "join=1500"];
    let mut job = Job::start_without(fabric, 5, &[2, 4], &settings);
    job.finish();
    let told: Vec<String> = (0..3).flat_map(|rank| job.ends(rank)).map(str::to_owned).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    // Who gives up first tells the others.
    assert!(told.iter().any(|told| told == "Missing:2,4"), "{told:?}");
    assert!(told.iter().all(|told| told == "Missing:2,4" || told == "Ended"), "{told:?}");
}

fn who_comes_late_with_other_settings_is_refused_alone(fabric: &str) {
    let mut job = Job::start_without(fabric, 3, &[2], &["fewest=2", "begin=100"]);
    job.await_all_of(&[0, 1]);
    let stranger = job.spawn(2, &["most=7"]);
    job.await_told(stranger, |told| matches!(told, Told::End(_)));
    assert_eq!(job.ends(stranger), ["Differs"]);
    job.await_further_steps();
    job.finish();
    job.check();
    assert_eq!([job.retries(0), job.retries(1)], [0, 0]);
}

fn a_change_tells_who_came_and_which_messages_nobody_received(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["sends=0:5"]);
    job.await_step(0, 7);
    let late = job.spawn(3, &[]);
    job.await_all_of(&[0, 1, 2, late]);
    job.signal(2, Signal::KILL);
    job.await_all_of(&[0, 1, late]);
    job.finish();
    job.check();
    let changes = |seat: u32| {
        let changed = |told: &Told| match told {
            Told::Other(line) if line.starts_with("changed") => Some(line.clone()),
            _ => None,
        };
        job.told(seat).iter().filter_map(changed).collect::<Vec<_>>()
    };
    // The second message of the two, at both ends, and once. A join costs no retry.
    assert_eq!(changes(0), ["changed - +3 1:1:0", "changed -2 + "]);
    assert_eq!(changes(1), ["changed - +3 0:0:1", "changed -2 + "]);
    assert_eq!(changes(late), ["changed -2 + "], "it came with the first one");
    assert!(job.retries(0) <= 1, "of the death alone");
}

fn survivors_of_one_death_go_on_with_what_they_have(fabric: &str) {
    go_on_without_seat_2(fabric, &[], 20);
}

/// Seat 2 of 4 is killed in or behind a step, and the others go on with what they have.
fn go_on_without_seat_2(fabric: &str, settings: &[&str], step: u64) {
    let mut job = Job::start(fabric, 4, settings);
    job.await_step(2, step);
    job.signal(2, Signal::KILL);
    job.await_all_of(&[0, 1, 3]);
    job.finish();
    job.check();
    for seat in [0, 1, 3] {
        // Between two steps of a member there is nothing to repeat.
        assert!(job.retries(seat) <= 1, "one death is one change");
        // Three pairs were connected once, and nothing was registered after the first epoch.
        assert_eq!(job.set_up(seat), (4, 3, 1), "seat {seat}: registered, connected, epoch");
    }
}

fn survivors_of_three_deaths_at_once_go_on(fabric: &str) {
    let mut job = Job::start(fabric, 8, &[]);
    job.await_step(0, 10);
    for seat in [1, 4, 6] {
        job.signal(seat, Signal::KILL);
    }
    job.await_all_of(&[0, 2, 3, 5, 7]);
    job.finish();
    job.check();
}

/// Two spares wait, registered and connected. One comes with the change without the dead.
fn a_spare_takes_the_place_of_who_dies_and_of_who_leaves(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["most=3", "spares=2", "state=300000"]);
    job.await_step(0, 5);
    let spares = [3, 4].map(|seat| job.spawn(seat, &[]));
    for spare in spares {
        job.await_told(spare, |told| *told == Told::Joined(spare));
    }
    job.await_further_steps();
    assert!(job.committed(0).iter().all(|(_, bits)| *bits == 0b111), "there is no room");
    job.signal(1, Signal::KILL);
    job.await_all_of(&[0, 2, spares[0]]);
    job.tell(2, Signal::TERM);
    job.await_all_of(&[0, spares[0], spares[1]]);
    job.finish();
    job.check();
    assert!(job.retries(0) <= 1, "the death, between two steps of this member or in one");
    assert_eq!(job.retries(spares[0]), 0, "it came with the first change");
    // Four pairs, and three changes: one that leaves makes room when it has gone.
    assert_eq!((job.set_up(0).1, job.set_up(0).2), (4, 3));
}

fn a_spare_that_ends_costs_the_others_nothing(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["most=2", "spares=1"]);
    job.await_step(0, 5);
    for signal in [Signal::KILL, Signal::TERM] {
        let spare = job.spawn(2, &[]);
        job.await_told(spare, |told| *told == Told::Joined(2));
        job.await_further_steps();
        job.signal(spare, signal);
        job.await_further_steps();
    }
    let spare = job.spawn(2, &[]);
    job.await_told(spare, |told| *told == Told::Joined(2));
    assert!(job.retries(0) == 0 && job.retries(1) == 0);
    job.signal(1, Signal::KILL);
    job.await_all_of(&[0, spare]);
    job.finish();
    job.check();
}

fn a_spare_that_stands_still_is_passed_over(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["most=2", "spares=2", "suspect=2000"]);
    job.await_step(0, 5);
    let spares = [2, 3].map(|seat| job.spawn(seat, &[]));
    for spare in spares {
        job.await_told(spare, |told| *told == Told::Joined(spare));
    }
    job.signal(spares[0], Signal::STOP);
    // Until nobody hears it any more.
    job.listen(Duration::from_secs(3));
    job.signal(1, Signal::KILL);
    job.await_all_of(&[0, spares[1]]);
    job.signal(spares[0], Signal::KILL);
    job.finish();
    job.check();
}

fn a_spare_of_a_job_that_ends_is_told_that_it_is_not_needed(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["most=2", "spares=1"]);
    job.await_step(0, 5);
    let spare = job.spawn(2, &[]);
    job.await_told(spare, |told| *told == Told::Joined(2));
    job.finish();
    job.check();
    assert_eq!(job.ends(spare), ["NotNeeded"]);
    assert_eq!((job.ends(0), job.ends(1)), (vec![], vec![]));
}

/// More than half are gone, and each of them by the kernel's word.
fn the_last_survivor_goes_on_alone(fabric: &str) {
    let mut job = Job::start(fabric, 4, &[]);
    job.await_step(3, 10);
    for seat in [0, 1, 2] {
        job.signal(seat, Signal::KILL);
    }
    job.await_all_of(&[3]);
    job.finish();
    job.check();
}

fn who_was_stopped_is_out_and_changes_nothing(fabric: &str) {
    let mut job = Job::start(fabric, 4, &["suspect=2000", "watch=1"]);
    job.await_step(1, 8);
    job.signal(1, Signal::STOP);
    job.await_all_of(&[0, 2, 3]);
    job.signal(1, Signal::CONT);
    // The others make steps and compare their memory while it wakes.
    job.await_told(1, |told| matches!(told, Told::End(_)));
    job.finish();
    job.check();
    assert_eq!(job.ends(1), ["Expelled"]);
    assert_eq!(job.ends(0), [""; 0]);
}

fn deaths_at_any_moment_lose_and_repeat_nothing(fabric: &str) {
    deaths_at_any_moment(fabric, 5, 6, &[]);
}

/// In each of so many jobs all but two of `size` members die at most, and the others go on.
pub(crate) fn deaths_at_any_moment(fabric: &str, size: u32, jobs: u64, settings: &[&str]) {
    let seed = job::seed();
    for run in 0..jobs {
        let mut random = Random::new(seed.wrapping_add(run));
        let mut next = |below: u32| random.below(u64::from(below)) as u32;
        let mut job = Job::start(fabric, size, settings);
        let watched = next(size);
        job.await_step(watched, 5 + u64::from(next(20)));
        for _ in 0..1 + next(size - 2) {
            job.listen(Duration::from_micros(u64::from(next(6_000))));
            job.signal((watched + 1 + next(size - 1)) % size, Signal::KILL);
        }
        let so_far = job.committed(watched).last().map_or(0, |(step, _)| *step);
        job.await_step(watched, so_far + 20);
        job.finish();
        job.check_or(&format!("seed {seed}, run {run}"));
    }
}

fn a_step_that_fails_on_one_member_is_repeated_by_all(fabric: &str) {
    // Seat 1 fails step 5 twice, and step 9 for ever.
    let mut job = Job::start(fabric, 3, &["steps=12", "fails=1:5:2,1:9:99"]);
    job.finish();
    job.check();
    for seat in 0..3 {
        assert_eq!(job.committed(seat).len(), 9, "seat {seat}");
        assert_eq!(job.ends(seat), ["Step"], "seat {seat}");
    }
}

fn too_few_members_say_so(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["fewest=3"]);
    job.await_step(0, 6);
    job.signal(2, Signal::KILL);
    for seat in [0, 1] {
        job.await_told(seat, |told| matches!(told, Told::End(_)));
    }
    job.finish();
    job.check();
    for seat in [0, 1] {
        assert_eq!(job.ends(seat), ["TooFew"], "seat {seat}");
    }
}

/// They wait for others, and make steps again when one has come.
fn too_few_members_take_in_who_comes(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["fewest=3", "too-few=60000"]);
    job.await_step(0, 6);
    job.signal(2, Signal::KILL);
    // By then they are too few, as a rule: a member that had begun no step says nothing of it.
    job.listen(Duration::from_millis(200));
    let again = job.spawn(2, &["fewest=3", "too-few=60000"]);
    job.await_told(again, |told| matches!(told, Told::Joined(_)));
    job.await_all_of(&[0, 1, again]);
    job.finish();
    job.check();
}

/// Stopped processes have not ended, so nobody certifies that they have.
fn without_a_quorum_a_member_gives_up_and_the_others_go_on(fabric: &str) {
    let mut job = Job::start_together(fabric, 4, &["suspect=2000", "watch=1"], &[1, 2, 3]);
    job.await_step(0, 6);
    job.signal_together(Signal::STOP);
    job.await_told(0, |told| matches!(told, Told::End(_)));
    assert_eq!(job.ends(0), ["NoQuorum"]);
    job.signal_together(Signal::CONT);
    job.await_all_of(&[1, 2, 3]);
    job.finish();
    job.check();
}

fn who_is_told_to_leave_costs_the_others_no_retry(fabric: &str) {
    let mut job = Job::start(fabric, 4, &[]);
    for (seat, rest) in [(1, &[0, 2, 3][..]), (0, &[2, 3])] {
        job.await_step(seat, 10);
        job.tell(seat, Signal::TERM);
        job.await_told(seat, |told| *told == Told::End("Left".to_owned()));
        job.await_all_of(rest);
    }
    job.finish();
    job.check();
    for seat in 0..4 {
        assert_eq!(job.retries(seat), 0, "seat {seat}");
    }
    assert_eq!([job.ends(0), job.ends(1)], [["Left"], ["Left"]]);
    // Those that stay connect nothing anew. On shared memory a fence takes scratch from all, as
    // those that left still lived.
    let (registered, connected, epoch) = job.set_up(2);
    assert_eq!((connected, epoch), (3, 2));
    assert!(registered == 4 || fabric == "shm", "{registered}");
}

fn where_all_are_told_to_leave_all_do(fabric: &str) {
    let mut job = Job::start(fabric, 3, &[]);
    job.await_step(0, 5);
    for seat in 0..3 {
        job.tell(seat, Signal::TERM);
    }
    for seat in 0..3 {
        job.await_told(seat, |told| *told == Told::End("Left".to_owned()));
    }
    job.finish();
    job.check();
    for seat in 0..3 {
        assert_eq!(job.ends(seat), ["Left"], "seat {seat}");
    }
}

/// Between hosts nobody sees the end of another by the kernel, and no call ends with a change.
#[test]
fn all_of_two_hosts_leave_at_once_from_steps_without_calls() {
    // By a signal while they make steps, and by themselves after the same step.
    for settings in [["hosts=2", "idle=1", "steps=0"], ["hosts=2", "idle=1", "steps=30"]] {
        let mut job = Job::start("tcp", 4, &settings);
        let is_told = settings[2] == "steps=0";
        if is_told {
            let has_made_steps = |told: &Told| *told == Told::Other("idle 5".to_owned());
            (0..4).for_each(|seat| job.await_told(seat, has_made_steps));
            (0..4).for_each(|seat| job.tell(seat, Signal::TERM));
        }
        job.finish();
        let steps = |seat| {
            let committed = |told: &Told| matches!(told, Told::Other(line) if line.starts_with("idle"));
            job.told(seat).iter().filter(|told| committed(told)).count()
        };
        for seat in 0..4 {
            let said = job.told(seat);
            let context = format!("seat {seat}, {settings:?}: {}", job.last());
            assert_eq!(said.last(), Some(&Told::Other("left".to_owned())), "{context}");
            let ends: &[&str] = if is_told { &["Left"] } else { &[] };
            assert_eq!(job.ends(seat), ends, "{context}");
            assert!(is_told || steps(seat) == 30, "{context}");
            let again = |told: &Told| matches!(told, Told::Other(line) if line.starts_with("again"));
            assert!(is_told || !said.iter().any(again), "{context}");
        }
    }
}

/// Waits until all have made the calls of step 6, at the end of which seat 1 stops.
fn stopped_behind_calls(fabric: &str, suspect: &str) -> Job {
    let job_settings = [suspect, "stops=1:6", "watch=1"];
    let mut job = Job::start(fabric, 3, &job_settings);
    for seat in 0..3 {
        job.await_told(seat, |told| *told == Told::Other("calls of 6 are done".to_owned()));
    }
    job
}

/// Nobody is suspected as long as a test lasts, so the interrupt alone can end the wait.
fn an_interrupt_ends_a_commit_that_waits_for_a_stopped_member(fabric: &str) {
    let mut job = stopped_behind_calls(fabric, "suspect=600000");
    job.tell(0, Signal::USR1);
    job.await_told(0, |told| matches!(told, Told::End(_)));
    assert_eq!(job.ends(0), ["Interrupted"]);
    job.signal(1, Signal::CONT);
    // The others repeat the step without it.
    job.await_all_of(&[1, 2]);
    job.finish();
    job.check();
    assert_eq!((job.committed(0).len(), job.ends(1).len() + job.ends(2).len()), (6, 0), "{:?}", job.told(0));
}

fn who_is_told_to_leave_in_a_commit_leaves_when_the_stopped_member_is_out(fabric: &str) {
    let mut job = stopped_behind_calls(fabric, "suspect=2000");
    job.tell(0, Signal::TERM);
    job.await_told(0, |told| matches!(told, Told::End(_)));
    job.await_all_of(&[2]);
    job.signal(1, Signal::CONT);
    job.await_told(1, |told| matches!(told, Told::End(_)));
    job.finish();
    job.check();
    assert_eq!([job.ends(0), job.ends(1)], [["Left"], ["Expelled"]]);
    // Who leaves is told that it has left. Who repeats the step is told who is out.
    let names_it = |told: &Told| matches!(told, Told::Retry { change, .. } if change.contains("seat 1 "));
    assert!(job.told(2).iter().any(names_it), "{:#?}", job.told(2));
}

fn who_leaves_without_a_word_is_named_at_once(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["quits=1:7", "suspect=5000"]);
    job.await_all_of(&[0, 2]);
    job.finish();
    job.check();
    for seat in [0, 2] {
        assert!(job.retries(seat) <= 1, "seat {seat}: {:#?}", job.told(seat));
        let is_named =
            |told: &Told| matches!(told, Told::Retry { change, .. } if change.starts_with("seat 1 has left"));
        let is_named = job.retries(seat) == 0 || job.told(seat).iter().any(is_named);
        assert!(is_named, "seat {seat}: {:#?}", job.told(seat));
    }
}

fn who_joins_costs_no_retry_and_has_the_state(fabric: &str) {
    for size in [2, 4] {
        // Blocks of the state on all members, and a last one that is shorter.
        let mut job = Job::start(fabric, size, &["state=1500000"]);
        job.await_step(0, 5);
        let joined = job.spawn(size, &[]);
        let all: Vec<u32> = (0..=joined).collect();
        job.await_all_of(&all);
        job.finish();
        job.check();
        for member in all {
            assert_eq!(job.retries(member), 0, "member {member} of {size}");
            assert_eq!(job.ends(member), [""; 0]);
        }
        // Each pair was connected once.
        assert_eq!(job.set_up(0).1, u64::from(size), "connected");
    }
}

fn two_join_at_once(fabric: &str) {
    let mut job = Job::start(fabric, 2, &[]);
    job.await_step(0, 5);
    let joined = [job.spawn(5, &[]), job.spawn(3, &[])];
    for member in joined {
        job.await_told(member, |told| matches!(told, Told::Joined(_)));
    }
    job.await_all_of(&[0, 1, joined[0], joined[1]]);
    job.finish();
    job.check();
    assert_eq!([job.retries(0), job.retries(1)], [0, 0]);
}

fn a_member_that_dies_while_one_heals_is_replaced_as_a_source(fabric: &str) {
    let mut job = Job::start(fabric, 4, &["state=6000000"]);
    job.await_step(0, 3);
    let joined = job.spawn(4, &[]);
    job.await_told(joined, |told| matches!(told, Told::Joined(_)));
    job.signal(2, Signal::KILL);
    job.await_all_of(&[0, 1, 3, joined]);
    job.finish();
    job.check();
}

fn who_dies_while_it_heals_holds_nobody_up(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["state=6000000"]);
    job.await_step(0, 3);
    let joined = job.spawn(3, &[]);
    job.await_told(joined, |told| matches!(told, Told::Joined(_)));
    job.signal(joined, Signal::KILL);
    job.await_further_steps();
    job.finish();
    job.check();
    // Steps before may have been made with the one that died, which may have healed before.
    assert_eq!(job.committed(0).last().map(|(_, bits)| *bits), Some(0b111));
}

fn who_died_comes_back_on_its_seat(fabric: &str) {
    let mut job = Job::start(fabric, 3, &[]);
    job.await_step(0, 5);
    job.signal(1, Signal::KILL);
    job.await_all_of(&[0, 2]);
    let again = job.spawn(1, &[]);
    job.await_told(again, |told| *told == Told::Joined(1));
    job.await_all_of(&[0, 2, again]);
    job.finish();
    job.check();
}

/// The dead may still have its seat when the other one asks for it.
fn one_dies_and_another_joins_at_once(fabric: &str) {
    let mut job = Job::start(fabric, 4, &[]);
    job.await_step(0, 5);
    for dead in [1, 2] {
        let joined = job.spawn(dead, &[]);
        job.signal(dead, Signal::KILL);
        job.await_told(joined, |told| matches!(told, Told::Joined(_)));
        job.await_further_steps();
    }
    job.await_all_of(&[0, 3, 4, 5]);
    job.finish();
    job.check();
}

/// It gives seats to newcomers, and comes as rank 0, which begins a job elsewhere.
fn the_first_member_dies_and_comes_back(fabric: &str) {
    let mut job = Job::start(fabric, 3, &[]);
    job.await_step(1, 5);
    job.signal(0, Signal::KILL);
    let again = job.spawn(0, &[]);
    job.await_told(again, |told| *told == Told::Joined(0));
    job.await_all_of(&[1, 2, again]);
    job.finish();
    job.check();
}

fn who_is_not_of_the_job_is_refused(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["most=3"]);
    job.await_step(0, 5);
    for (settings, end) in [
        (&["program=another"][..], "Differs"),
        (&["most=4"], "Differs"),
        (&["suspect=9999"], "Differs"),
        (&["tls=off"], "Differs"),
        (&["heal=hidden"], "Differs"),
        (&["heal-wait=59999"], "Differs"),
        (&["state=4"], "StatesDiffer"),
    ] {
        let other = job.spawn(2, settings);
        job.await_told(other, |told| *told == Told::End(end.to_owned()));
        job.await_further_steps();
    }
    let third = job.spawn(2, &[]);
    job.await_all_of(&[0, 1, third]);
    let fourth = job.spawn(3, &[]);
    job.await_told(fourth, |told| *told == Told::End("Closed".to_owned()));
    job.finish();
    job.check();
}

/// All audit after each step, so also where the record with the newcomer comes in between.
fn who_joins_is_audited_from_its_first_step_on(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["state=700000", "audit=1"]);
    job.await_step(0, 5);
    for joins in [2, 3] {
        let joined = job.spawn(joins, &[]);
        job.await_told(joined, |told| matches!(told, Told::Joined(_)));
        job.await_further_steps();
    }
    job.await_all_of(&[0, 1, 2, 3]);
    job.finish();
    job.check();
    assert!((0..4).all(|member| job.ends(member).is_empty()));
    assert_eq!([job.retries(0), job.retries(1)], [0, 0]);
}

fn an_audit_names_who_differs(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["state=700000", "steps=20", "audit=1", "errs=1:6"]);
    job.finish();
    job.check();
    for seat in 0..3 {
        assert_eq!(job.ends(seat), ["Diverged:1"], "seat {seat}");
        assert_eq!(job.committed(seat).len(), 6, "seat {seat}");
    }
}

/// Steps in which a member said that it contributes nothing.
fn neutral(job: &Job, member: u32) -> usize {
    job.told(member).iter().filter(|told| matches!(told, Told::Neutral(_))).count()
}

/// The newcomer takes part in its first step while it reads, and all update the same states after.
fn who_joins_heals_behind_its_first_step(fabric: &str) {
    for size in [2, 4] {
        let mut job = Job::start(fabric, size, &["state=1500000", "heal=hidden", "audit=1"]);
        job.await_step(0, 5);
        let joined = job.spawn(size, &[]);
        let all: Vec<u32> = (0..=joined).collect();
        job.await_all_of(&all);
        job.finish();
        job.check();
        for member in all {
            assert_eq!(job.retries(member), 0, "member {member} of {size}");
            assert_eq!(job.ends(member), [""; 0]);
            assert_eq!(neutral(&job, member), usize::from(member == joined), "member {member} of {size}");
        }
        let first = job.told(joined).iter().find(|told| matches!(told, Told::Neutral(_)));
        let Some(Told::Neutral(first)) = first else { panic!("{:#?}", job.told(joined)) };
        assert_eq!(job.committed(joined)[0].0, *first, "it has the states after that step");
    }
}

fn two_heal_behind_a_step(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["state=700000", "heal=hidden"]);
    job.await_step(0, 5);
    let joined = [job.spawn(5, &[]), job.spawn(3, &[])];
    for member in joined {
        job.await_told(member, |told| matches!(told, Told::Joined(_)));
    }
    job.await_all_of(&[0, 1, joined[0], joined[1]]);
    job.finish();
    job.check();
    assert_eq!([job.retries(0), job.retries(1)], [0, 0]);
    // The second one may end the epoch of the first one before that has read all. Both heal at an
    // edge then.
    let neutral = joined.map(|member| neutral(&job, member));
    assert!(neutral.iter().all(|steps| *steps <= 1) && neutral != [0, 0], "{neutral:?}");
}

fn a_member_that_dies_while_one_heals_behind_a_step_is_replaced_as_a_source(fabric: &str) {
    for (size, dead) in [(4, &[2][..]), (3, &[0, 1])] {
        let mut job = Job::start(fabric, size, &["state=6000000", "heal=hidden"]);
        job.await_step(0, 3);
        let joined = job.spawn(size, &[]);
        job.await_told(joined, |told| matches!(told, Told::Neutral(_)));
        for seat in dead {
            job.signal(*seat, Signal::KILL);
        }
        let rest: Vec<u32> = (0..=joined).filter(|member| !dead.contains(member)).collect();
        job.await_all_of(&rest);
        job.finish();
        job.check();
    }
}

fn who_dies_while_it_heals_behind_a_step_holds_nobody_up(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["state=6000000", "heal=hidden"]);
    job.await_step(0, 3);
    let joined = job.spawn(3, &[]);
    job.await_told(joined, |told| matches!(told, Told::Neutral(_)));
    job.signal(joined, Signal::KILL);
    job.await_further_steps();
    job.finish();
    job.check();
    assert_eq!(job.committed(0).last().map(|(_, bits)| *bits), Some(0b111));
}

fn a_step_that_does_not_only_reduce_is_repeated_after_healing(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["state=700000", "heal=hidden", "gathers=1"]);
    job.await_step(0, 5);
    let joined = job.spawn(2, &[]);
    job.await_all_of(&[0, 1, joined]);
    job.finish();
    job.check();
    assert_eq!([0, 1, joined].map(|member| job.retries(member)), [1, 1, 1]);
    assert_eq!(job.ends(joined), [""; 0]);
}

/// As one that joins when the others have made their last step.
fn who_has_read_nothing_is_told_so_when_it_leaves(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["state=4"]);
    job.await_step(0, 5);
    let joined = job.spawn(2, &["unread=1"]);
    job.await_told(joined, |told| *told == Told::End("StatesNotRead".to_owned()));
    job.await_further_steps();
    job.finish();
    job.check();
}

fn survivors_of_a_death_make_their_parts_anew(fabric: &str) {
    // What the session itself has is neither registered nor connected anew.
    go_on_without_seat_2(fabric, &["parts=1"], 5);
}

fn deaths_while_parts_are_made_and_used_lose_and_repeat_nothing(fabric: &str) {
    deaths_while_parts_are_used(fabric, 4, &[]);
}

/// In each of so many jobs one or two of four members die while all make parts of the group.
pub(crate) fn deaths_while_parts_are_used(fabric: &str, jobs: u64, settings: &[&str]) {
    let seed = job::seed();
    for run in 0..jobs {
        let mut random = Random::new(seed.wrapping_add(run));
        let mut job = Job::start(fabric, 4, &[settings, &["parts=1"]].concat());
        job.await_step(0, 2 + random.below(4));
        for struck in 0..1 + random.below(2) {
            job.listen(Duration::from_micros(random.below(40_000)));
            job.signal(1 + struck as u32, Signal::KILL);
        }
        job.await_further_steps();
        job.finish();
        job.check_or(&format!("seed {seed}, run {run}"));
    }
}

fn who_was_stopped_changes_no_part_of_the_others(fabric: &str) {
    let mut job = Job::start(fabric, 3, &["suspect=2000", "watch=1", "parts=1"]);
    job.await_step(1, 4);
    job.signal(1, Signal::STOP);
    job.await_all_of(&[0, 2]);
    job.signal(1, Signal::CONT);
    job.await_told(1, |told| matches!(told, Told::End(_)));
    job.await_further_steps();
    job.finish();
    job.check();
    assert_eq!(job.ends(1), ["Expelled"]);
}

fn who_joins_has_its_place_in_each_part(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["parts=1"]);
    job.await_step(0, 3);
    let third = job.spawn(2, &[]);
    job.await_all_of(&[0, 1, third]);
    job.finish();
    job.check();
    for seat in [0, 1] {
        assert_eq!(job.retries(seat), 0, "seat {seat}");
    }
}

fn who_heals_behind_a_step_is_in_the_parts_of_the_next(fabric: &str) {
    let mut job = Job::start(fabric, 2, &["parts=1", "heal=hidden", "state=300000"]);
    job.await_step(0, 3);
    let third = job.spawn(2, &[]);
    job.await_all_of(&[0, 1, third]);
    job.await_further_steps();
    job.finish();
    job.check();
    assert_eq!((neutral(&job, third), job.retries(0)), (1, 0));
}
