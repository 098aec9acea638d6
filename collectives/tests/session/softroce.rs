//! Sessions on a machine made of Soft-RoCE devices, whose links are changed as root: seat I is on
//! the host with the interface `h(I+1)`, the address 10.77.0.(I+1) and the device `rxe(I+1)`.

use super::changed::Changed;
use super::job::{Job, Told};

/// Of a job whose control streams go over the same links as what its NICs send.
pub(crate) const ON_LINKS: &str = "on-links=1";

/// Without a secret no two hosts meet.
const SECRET: &str = "secret=7";

/// Where the host of a seat is reached.
pub(crate) fn address(seat: u32) -> String {
    format!("10.77.0.{}", seat + 1)
}

#[test]
#[ignore = "changes links of Soft-RoCE devices: run it on a machine made for it, with --ignored softroce::"]
fn the_others_go_on_without_a_host_whose_link_is_down() {
    let meet = format!("meet=tcp://{}:29500", address(0));
    let settings = [&meet, SECRET, ON_LINKS, "hosts=1", "suspect=8000", "quorum=8000"];
    let mut job = Job::start("verbs", 3, &settings);
    job.await_step(0, 5);
    let mut changed = Changed::default();
    changed.link_down(3);
    job.await_all_of(&[0, 1]);
    job.await_told(2, |told| matches!(told, Told::End(_)));
    job.finish();
    drop(changed);
    job.check();
    assert_eq!([job.ends(0), job.ends(1)], [[""; 0]; 2]);
    // The hosts are interfaces of one machine. When the third dials the others to find out whether
    // they are reached, the kernel may go by loopback, and then they tell it.
    let alone = job.ends(2);
    assert!(alone == ["NoQuorum"] || alone == ["Expelled"], "{alone:?}");
}
