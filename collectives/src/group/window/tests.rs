//! Windows whose time is up, on real fabrics, by threads that are ranks. The ranks meet with more
//! time than that.

use std::sync::Barrier;
use std::time::Duration;

use pleach_transport::clock;
use pleach_transport::rendezvous::Fabric;

use crate::group::{Options, Progress};
use crate::ranks;
use crate::window::Word;

/// Longest time a call may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A rank that computes.
#[expect(clippy::disallowed_methods, reason = "a rank that computes")]
fn compute_for_a_moment() {
    std::thread::sleep(Duration::from_millis(1));
}

#[test]
fn a_read_whose_owner_publishes_all_the_time_ends_at_its_deadline() {
    let adjust = |options: &mut Options| options.progress = Progress::WhenCalled;
    let errors = ranks::with_group(Fabric::Shm, 2, adjust, |group| {
        let len = 4 << 20;
        let mut window = group.window::<u64>(len, 0).unwrap();
        // The ranks have met, with more time.
        window.group.timeout = Duration::from_secs(3);
        let elements = vec![group.rank().into(); len];
        let deadline = clock::now() + PATIENCE;
        loop {
            let result = if group.rank() == 0 {
                window.publish(&elements, Word::EMPTY).map(drop)
            } else {
                let mut read = window.start_read(0, 0..len, vec![9; len]).unwrap();
                while !read.test() {
                    // So it is slower than its owner.
                    compute_for_a_moment();
                }
                read.wait().map(drop).map_err(|error| error.error)
            };
            if let Err(error) = result {
                break error.to_string();
            }
            assert!(clock::now() < deadline, "the read comes to an end");
        }
    });
    for error in &errors {
        assert!(
            error.contains("for rank 0: a read of its window, whose elements were overwritten "),
            "{error}"
        );
        assert_eq!(*error, errors[0]);
    }
}

#[test]
fn a_write_that_finds_no_staging_names_the_rank_that_takes_no_bytes() {
    // More than the system holds between two sockets.
    let len = 32 << 20;
    let (stopped, failed) = (Barrier::new(3), Barrier::new(3));
    let errors = ranks::with_group(
        Fabric::Tcp,
        3,
        |_| {},
        |group| {
            let mut window = group.window::<u8>(len, 2).expect("all ask for the same");
            window.group.timeout = Duration::from_secs(3);
            let error = match group.rank() {
                2 => {
                    // Its thread takes no byte as long as this one has the lock.
                    let core = window.group.shared.driver.lock();
                    stopped.wait();
                    failed.wait();
                    drop(core);
                    window.group.timeout = PATIENCE;
                    window.wait(PATIENCE, |_| ()).map(drop)
                }
                0 => {
                    stopped.wait();
                    let elements = vec![1; len];
                    window.write(2, 0, &elements, Word::EMPTY).expect("staged");
                    window.write(2, 1, &elements, Word::EMPTY).expect("staged");
                    let error = window.write(1, 0, &elements[..1], Word::EMPTY);
                    failed.wait();
                    error
                }
                _ => {
                    stopped.wait();
                    let deadline = clock::now() + PATIENCE;
                    let elements = vec![7; len];
                    let error = loop {
                        let result = window.publish(&elements, Word::EMPTY).map(drop);
                        if result.is_err() || clock::now() > deadline {
                            break result;
                        }
                    };
                    failed.wait();
                    error
                }
            };
            error.expect_err("the group has failed").to_string()
        },
    );
    for error in &errors {
        assert!(error.contains("for rank 2: an earlier write into its window to arrive"), "{error}");
        assert_eq!(*error, errors[0]);
    }
}

#[test]
fn a_peer_that_is_given_up_is_named_on_all_ranks_and_the_first_group_works_on() {
    for is_aborted in [false, true] {
        let errors = ranks::with_group(
            Fabric::Shm,
            3,
            |_| {},
            |group| {
                let mut window = group.window::<u8>(4, 1).expect("all ask for the same");
                group.barrier().expect("all have opened the window");
                let error = if group.rank() == 1 {
                    if is_aborted {
                        window.abort();
                        window.wait(PATIENCE, |_| ()).expect_err("the window has ended")
                    } else {
                        window.give_up(2, "a word", Duration::from_secs(7))
                    }
                } else {
                    window.wait(PATIENCE, |_| ()).expect_err("rank 1 gives up")
                };
                assert_eq!(window.timeout(), PATIENCE);
                group.barrier().expect("the group that the window was made from works on");
                error.to_string()
            },
        );
        let part = if is_aborted { "rank 1 aborted" } else { "rank 1 waited 7000 ms for rank 2: a word" };
        for error in &errors {
            assert!(error.contains(part), "{error}");
        }
    }
}
