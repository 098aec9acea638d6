//! What a NIC refuses its peer: the transfer says so, the pair is lost with that cause, and nobody
//! else is harmed.
//!
//! That no byte changes is shown by the suite (`keys`); here is what people are told.

use pleach_transport::verbs::{Operation, PairError, WorkStatus};
use pleach_transport::{LossKind, RegionKey, RemoteSlice, SubmitError, Transfer, TransferError};

use super::Verbs;
use crate::world::{BackendKind, Submission, World, assert_bytes, noise, put, signal};

const LEN: usize = 4096;

/// Writes and reads what rank 1 does not have, each in a world of its own.
fn check(bad: impl Fn(&mut World, RemoteSlice) -> RemoteSlice) {
    for is_read in [false, true] {
        let mut world = World::connected(BackendKind::of::<Verbs<false>>(), 3);
        let owned = world.region_of(1, &noise(1, LEN));
        let mine = world.region_of(0, &noise(2, 64));
        let remote = bad(&mut world, owned.remote());
        let access = if is_read {
            Transfer::Get { src: remote, dst: mine.whole() }
        } else {
            put(&mine.whole(), remote, Some(3))
        };
        let ending = world.carry_out(0, 1, access);
        assert_eq!(ending, Err(TransferError::Refused { peer: 1, key: remote.key }), "is_read: {is_read}");
        let cause = world.until_lost(0, 1);
        let Some(PairError::QueuePair(failure)) = cause.fabric_error() else { panic!("{cause:?}") };
        let operation = if is_read { Operation::Read } else { Operation::WriteWithImmediate };
        assert_eq!((failure.status, failure.operation), (WorkStatus::RemoteAccess, operation));
        assert_ne!(failure.queue_pair, 0);
        let text = TransferError::Lost { peer: 1, cause: cause.clone() }.to_string();
        let queue_pair = format!("[{operation} on queue pair {} of this rank]", failure.queue_pair);
        let says = ["rank 1", "remote access error", "a key was stale", "outside its region", &queue_pair];
        assert!(says.iter().all(|part| text.contains(part)), "{text}");
        // What follows is refused with the same kind.
        let again = world.try_submit(0, 1, Submission::Signal(signal(0, b"")));
        assert_eq!(again, Err(SubmitError::Lost { peer: 1, kind: LossKind::AccessDenied }));
        // Its peer hears that the pair is over as well, and nothing of either has changed.
        world.until_lost(1, 0);
        assert_bytes(&owned.whole().to_vec(), &noise(1, LEN), "what was refused");
        assert_bytes(&mine.whole().to_vec(), &noise(2, 64), "what was not read");
        world.check_pair(0, 2);
        world.check_pair(1, 2);
    }
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn a_wrong_key_is_an_error_that_names_it_and_costs_the_pair() {
    check(|_, owned| {
        let key = RegionKey(owned.key.0 ^ 0x5555_0000_0000_0000);
        RemoteSlice { key, offset: 0, len: 64 }
    });
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn a_range_outside_of_a_region_is_an_error_and_costs_the_pair() {
    check(|_, owned| RemoteSlice { offset: LEN as u64 - 32, len: 64, ..owned });
}

#[test]
#[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
fn a_region_that_is_registered_no_more_is_an_error_and_costs_the_pair() {
    check(|world, _| {
        let dropped = world.region(1, LEN);
        let stale = RemoteSlice { len: 64, ..dropped.remote() };
        drop(dropped);
        world.announce(1);
        stale
    });
}
