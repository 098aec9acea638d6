//! A second user of this host, for tests: a thread of this process that gives up being root.
//!
//! The kernel keeps users by thread, so sockets and files that such a thread makes belong to the
//! other user.

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::skipped::skip;

/// The number of the other user.
pub(crate) const NOBODY: u32 = 65_534;

/// Whether this process may act as another user. Skips the test where not.
pub(crate) fn can_act_as_nobody() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        skip("only root can act as another user");
    }
    is_root
}

/// Runs `act` as the other user. To be called by root.
pub(crate) fn as_nobody<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            let (user, group) = (Uid::from_raw(NOBODY), Gid::from_raw(NOBODY));
            set_thread_groups(&[]).expect("root may");
            set_thread_res_gid(group, group, group).expect("root may");
            set_thread_res_uid(user, user, user).expect("root may");
            act()
        });
        acting.join().expect("it does not panic")
    })
}
