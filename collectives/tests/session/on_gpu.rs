//! Sessions whose groups work on a GPU's memory, by the fake driver.

use rustix::process::Signal;

use super::job::{Job, Told};

/// The setting of members whose groups work on the fake driver's GPU.
pub(crate) const SETTING: &str = "gpu=1";

on_every_fabric!(
    without_faults_each_step_is_committed_once,
    survivors_of_one_death_go_on_with_the_buffers_that_they_have,
    deaths_at_any_moment_lose_and_repeat_nothing,
    who_was_stopped_is_out_and_takes_no_buffer,
    a_step_that_fails_on_one_member_is_repeated_by_all,
    who_joins_costs_no_retry_and_has_the_state,
    who_joins_after_a_fence_has_the_state,
    a_member_that_dies_while_one_heals_is_replaced_as_a_source,
    an_audit_names_who_differs,
    deaths_while_parts_are_made_and_used_lose_and_repeat_nothing,
);

fn without_faults_each_step_is_committed_once(fabric: &str) {
    super::without_faults(fabric, 3, 20, &[SETTING]);
}

fn survivors_of_one_death_go_on_with_the_buffers_that_they_have(fabric: &str) {
    // It ends while the others wait for it in the call of the step.
    let mut job = Job::start(fabric, 4, &[SETTING, "stops=2:10"]);
    for seat in 0..4 {
        job.await_told(seat, |told| *told == Told::Other("begins 10".to_owned()));
    }
    job.signal(2, Signal::KILL);
    job.await_all_of(&[0, 1, 3]);
    job.finish();
    job.check();
    for seat in [0, 1, 3] {
        assert_eq!(job.retries(seat), 1, "seat {seat}");
        // Scratch and the copy of the state, once for all epochs. No device knows the buffers.
        assert_eq!(job.set_up(seat), (2, 3, 1), "seat {seat}: registered, connected, epoch");
    }
}

fn deaths_at_any_moment_lose_and_repeat_nothing(fabric: &str) {
    super::deaths_at_any_moment(fabric, 4, 4, &[SETTING]);
}

fn who_was_stopped_is_out_and_takes_no_buffer(fabric: &str) {
    let mut job = Job::start(fabric, 3, &[SETTING, "suspect=2000"]);
    job.await_step(1, 6);
    job.signal(1, Signal::STOP);
    job.await_all_of(&[0, 2]);
    job.signal(1, Signal::CONT);
    job.await_told(1, |told| matches!(told, Told::End(_)));
    job.await_further_steps();
    job.finish();
    job.check();
    assert_eq!(job.ends(1), ["Expelled"]);
    // Who was stopped may have mapped scratch, so that is new. The buffers on the GPU are not.
    let registered = if fabric == "shm" { 3 } else { 2 };
    for seat in [0, 2] {
        assert_eq!(job.set_up(seat), (registered, 2, 1), "seat {seat}: registered, connected, epoch");
    }
}

fn a_step_that_fails_on_one_member_is_repeated_by_all(fabric: &str) {
    let mut job = Job::start(fabric, 3, &[SETTING, "steps=12", "fails=1:5:2"]);
    job.finish();
    job.check();
    for seat in 0..3 {
        assert_eq!(job.committed(seat).len(), 12, "seat {seat}");
        // Who had not begun the step when it failed has nothing to repeat.
        assert!(job.retries(seat) <= 2, "seat {seat}");
    }
    assert_eq!(job.retries(1), 2);
}

fn who_joins_costs_no_retry_and_has_the_state(fabric: &str) {
    // Two blocks, of which one is shorter.
    let mut job = Job::start(fabric, 2, &[SETTING, "state=700000", "audit=1"]);
    job.await_step(0, 5);
    let joined = job.spawn(2, &[]);
    job.await_all_of(&[0, 1, joined]);
    job.finish();
    job.check();
    assert_eq!([0, 1, joined].map(|member| job.retries(member)), [0; 3]);
}

/// On shared memory a fence takes what is lent from all peers, and copies are lent from then on.
fn who_joins_after_a_fence_has_the_state(fabric: &str) {
    let mut job = Job::start(fabric, 3, &[SETTING, "state=300000", "suspect=2000"]);
    job.await_step(1, 4);
    job.signal(1, Signal::STOP);
    job.await_all_of(&[0, 2]);
    let joined = job.spawn(3, &[]);
    job.await_all_of(&[0, 2, joined]);
    job.signal(1, Signal::CONT);
    job.await_told(1, |told| matches!(told, Told::End(_)));
    job.finish();
    job.check();
}

fn a_member_that_dies_while_one_heals_is_replaced_as_a_source(fabric: &str) {
    let mut job = Job::start(fabric, 4, &[SETTING, "state=3000000"]);
    job.await_step(0, 2);
    let joined = job.spawn(4, &[]);
    job.await_told(joined, |told| matches!(told, Told::Joined(_)));
    job.signal(2, Signal::KILL);
    job.await_all_of(&[0, 1, 3, joined]);
    job.finish();
    job.check();
}

fn an_audit_names_who_differs(fabric: &str) {
    let settings = [SETTING, "state=700000", "steps=20", "audit=1", "errs=1:6"];
    let mut job = Job::start(fabric, 3, &settings);
    job.finish();
    job.check();
    for seat in 0..3 {
        assert_eq!(job.ends(seat), ["Diverged:1"], "seat {seat}");
        assert_eq!(job.committed(seat).len(), 6, "seat {seat}");
    }
}

fn deaths_while_parts_are_made_and_used_lose_and_repeat_nothing(fabric: &str) {
    super::deaths_while_parts_are_used(fabric, 2, &[SETTING]);
}
