//! Windows of ranks that stop amid their calls, on real fabrics, by threads that are ranks.

#[path = "../../../tests/ranks/mod.rs"]
mod ranks;

use std::sync::Barrier;
use std::time::Duration;

use pleach_transport::clock;
use pleach_transport::rendezvous::Fabric;

use crate::window::Word;

/// Longest time a call may take on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);

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
            window.group.timeout = Duration::from_secs(1);
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
