//! What real processes do when one of them is killed, stopped, forked, leaves, or calls something
//! else: every survivor is told who and where, in time, and nothing of its memory changes
//! afterwards.
//!
//! This binary starts itself as ranks ([`rank_process`]), which obey what a test tells them line by
//! line ([`script`]); [`ranks`] is the test's side.

mod agreed;
mod children;
mod cyclic;
mod killed;
mod left;
mod memory;
mod mismatched;
mod ranks;
#[path = "../rdma_devices/mod.rs"]
mod rdma_devices;
mod repeated;
mod script;
#[allow(dead_code)] // Nobody here asks who listens.
#[path = "../../src/cli/launch/sockets.rs"]
mod sockets;
mod stopped;
mod windows;

/// Not a test: one rank of one of the tests, which start it.
#[test]
#[ignore = "is started by the other tests as one of their ranks"]
fn rank_process() {
    script::obey();
}

/// Each of these functions of the module as a test on each fabric.
macro_rules! on_every_fabric {
    ($($test:ident),* $(,)?) => {
        mod shm {
            $(#[test] fn $test() { super::$test(pleach::transport::rendezvous::Fabric::Shm); })*
        }
        mod tcp {
            $(#[test] fn $test() { super::$test(pleach::transport::rendezvous::Fabric::Tcp); })*
        }
        /// Ranks of even and of odd numbers are on different hosts.
        mod hybrid {
            $(#[test] fn $test() { super::$test(pleach::transport::rendezvous::Fabric::Hybrid); })*
        }
        /// Each rank on the next RDMA device.
        mod verbs {
            $(#[test]
            #[ignore = "needs RDMA devices: where there are some, run it with --ignored verbs::"]
            fn $test() { super::$test(pleach::transport::rendezvous::Fabric::Verbs); })*
        }
    };
}
pub(crate) use on_every_fabric;
