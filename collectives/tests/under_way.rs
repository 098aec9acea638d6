//! Groups made of groups, operations prepared once, bundled, and carried out by a thread of the
//! group.

mod ranks;

/// The tests of a module on every fabric.
macro_rules! on_every_fabric {
    ($($test:ident),* $(,)?) => {
        mod shm {
            $(
                #[test]
                fn $test() {
                    super::$test(pleach_transport::rendezvous::Fabric::Shm);
                }
            )*
        }
        mod tcp {
            $(
                #[test]
                fn $test() {
                    super::$test(pleach_transport::rendezvous::Fabric::Tcp);
                }
            )*
        }
    };
}
use on_every_fabric;

#[path = "under_way/any_and_all.rs"]
mod any_and_all;
#[path = "under_way/batch.rs"]
mod batch;
#[path = "under_way/persistent.rs"]
mod persistent;
#[path = "under_way/progress.rs"]
mod progress;
#[path = "under_way/speed.rs"]
mod speed;
#[path = "under_way/split.rs"]
mod split;
#[path = "under_way/topology.rs"]
mod topology;
