//! Pairs of devices of the simulated fabric, for tests.
//!
//! A link has two ranks of one world, an even one at the end that dials and the odd one above it at
//! the other. What the kernel tells of processes, a thread of tests tells here.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;
use pleach_transport::shm::OpenError;
use pleach_transport::sim::{Network, Options, SimDevice, World};
use pleach_transport::{Address, ConnectError, Device, Meeting, Rank};

use super::pair::{DevicePair, MappingDevice, PairedDevice, Pairs, config_of};
use super::regions::{PLACES, SETUP_LIMIT};

thread_local! {
    /// The ranks whose processes have ended.
    static ENDED: RefCell<BTreeSet<Rank>> = const { RefCell::new(BTreeSet::new()) };
}

/// The processes of these ranks have ended, and no others.
pub(crate) fn set_ended(ranks: BTreeSet<Rank>) {
    ENDED.set(ranks);
}

/// The parameters of a world without faults whose devices do as a [`MappingDevice`] does.
pub(crate) fn mapping_options(network: Network, seed: u64) -> Options {
    // A sender wakes a receiver that sleeps at the end of a put. If that came before the signal,
    // the receiver would look too early, sleep again, and be woken by nobody.
    Options { maps: true, passive: true, signals_before_ends: true, ..Options::new(network, seed) }
}

/// Devices of worlds of [`mapping_options`].
impl MappingDevice for SimDevice {
    fn may_read(&self, peer: Rank) -> bool {
        !ENDED.with_borrow(|ended| ended.contains(&peer))
    }

    /// All ranks are in one world.
    fn link(&mut self, peer: Rank, _meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.connect(peer, &Address(format!("sim:{peer}")))
    }
}

/// A rank of a program, with its device.
type OwnRank = (Rank, Arc<Mutex<PairedDevice<SimDevice>>>);

/// The pairs of a program.
#[derive(Clone)]
pub(crate) struct SimulatedPairs {
    world: World,
    ranks: u32,
    /// The next rank that nobody has, of all programs.
    next: Arc<AtomicU32>,
    own: Arc<Mutex<Vec<OwnRank>>>,
}

impl SimulatedPairs {
    /// Those of the first program.
    pub(crate) fn new(world: World, ranks: u32) -> Self {
        Self { world, ranks, next: Arc::default(), own: Arc::default() }
    }

    /// Those of another program.
    pub(crate) fn of_another(&self) -> Self {
        Self { own: Arc::default(), ..self.clone() }
    }

    /// Whether there are ranks for one more link.
    pub(crate) fn has_ranks(&self) -> bool {
        self.next.load(Ordering::Relaxed) < self.ranks
    }

    /// The ranks of this program.
    pub(crate) fn own(&self) -> Vec<Rank> {
        lock(&self.own).iter().map(|(rank, _)| *rank).collect()
    }
}

impl Pairs<SimDevice> for SimulatedPairs {
    fn pair(&mut self, dialer: Option<&Address>) -> Result<DevicePair<SimDevice>, OpenError> {
        let rank = match dialer {
            None => self.next.fetch_add(2, Ordering::Relaxed),
            Some(address) => {
                let rank = address.0.strip_prefix("sim:").and_then(|rank| rank.parse::<Rank>().ok());
                rank.expect("an address of this fabric") + 1
            }
        };
        let device = self.world.device(config_of(rank, self.ranks, PLACES, SETUP_LIMIT));
        let pair = DevicePair::only(device, rank ^ 1);
        // A device outlives its links: it ends with its process.
        lock(&self.own).push((rank, pair.device()));
        Ok(pair)
    }
}
