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

#[path = "together/batch.rs"]
mod batch;
#[path = "together/persistent.rs"]
mod persistent;
#[path = "together/progress.rs"]
mod progress;
#[path = "together/several.rs"]
mod several;
#[path = "together/speed.rs"]
mod speed;
#[path = "together/split.rs"]
mod split;
#[path = "together/topology.rs"]
mod topology;
