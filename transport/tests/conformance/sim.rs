//! The simulator, under harmless faults drawn from many seeds.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::sim::{AllowedMutant, FaultKinds, Faults, Mutant, Network, Options, Random, World};
use pleach_transport::{Device, DeviceConfig, HostMemory, Memory, Nanos, SharedMemory};

use crate::drain;
use crate::world::{Backend, BackendKind};

/// How many seeds each test is run for.
const SEEDS: u64 = 12;

/// How far virtual time goes at most in one round of polling: as if the ranks were quick.
const ROUND: Duration = Duration::from_micros(10);

/// Longest transfer, in bytes: long enough to matter, short enough to be repeated.
const TRANSFER_BYTES_MAX: u64 = 300_000;

thread_local! {
    static SEED: Cell<u64> = const { Cell::new(0) };
    static MUTANT: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// A simulated fabric, with or without mappings.
pub(crate) struct Sim<const MAPS: bool>(World);

/// Says which seed it was when a test fails.
struct Replay(&'static str, u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: failed with seed {}", self.0, self.1);
        }
    }
}

impl<const MAPS: bool> Backend for Sim<MAPS> {
    const NAME: &'static str = if MAPS { "sim with mappings" } else { "sim" };
    const LIVE: bool = false;

    fn repeat(test: fn()) {
        for seed in 0..SEEDS {
            SEED.set(seed);
            let _replay = Replay(Self::NAME, seed);
            test();
        }
    }

    fn start(world_size: u32) -> Self {
        let seed = SEED.get();
        let network = Network::full_mesh(world_size, 10_000_000_000, Duration::from_micros(2));
        // Seed 0 is the fabric on which nothing goes wrong.
        let kinds = match seed {
            0 => FaultKinds::default(),
            _ => FaultKinds::harmless().swarm(&mut Random::new(seed)),
        };
        let mut faults = Faults::draw(&kinds, seed, &network, Duration::ZERO);
        faults.detection = Duration::from_micros(500);
        let mut options = Options::new(network, seed);
        options.faults = faults;
        options.maps = MAPS;
        options.passive = seed % 2 == 1;
        options.queue_depth = 16;
        options.transfer_bytes_max = TRANSFER_BYTES_MAX;
        options.mutant = MUTANT.get().map(allow);
        Self(World::new(options))
    }

    fn device(&mut self, config: DeviceConfig) -> Box<dyn Device> {
        Box::new(self.0.device(config))
    }

    fn memory(&self, len: usize) -> Arc<dyn Memory> {
        if MAPS { SharedMemory::new(len).expect("memory") } else { HostMemory::new(len) }
    }

    fn tick(&mut self) -> Nanos {
        let now = self.0.now();
        self.0.advance(Some(now + ROUND));
        self.0.now()
    }
}

#[allow(unsafe_code)]
fn allow(mutant: Mutant) -> AllowedMutant {
    // SAFETY: the suite touches registered memory by slices alone.
    unsafe { mutant.allow() }
}

/// The seeds with which a test of the suite fails over a fabric that breaks the contract.
fn caught(mutant: Mutant, test: fn(BackendKind)) -> usize {
    MUTANT.set(Some(mutant));
    let fails = |seed: &u64| {
        SEED.set(*seed);
        std::panic::catch_unwind(|| test(BackendKind::of::<Sim<false>>())).is_err()
    };
    let caught = (0..SEEDS).filter(fails).count();
    MUTANT.set(None);
    caught
}

#[test]
fn the_suite_catches_fabrics_that_say_drained_too_early() {
    for mutant in [Mutant::DrainedBeforeLanding, Mutant::SignalAfterDrained, Mutant::PutAgainAfterDrained] {
        let caught = caught(mutant, drain::all_from_before_has_landed_when_a_pair_is_drained);
        assert!(caught as u64 >= SEEDS / 4, "{mutant:?} was caught with {caught} of {SEEDS} seeds");
    }
}
