//! Pairs of devices of the simulated fabric, for tests.
//!
//! A link that maps has two ranks of one world, an even one at the end that dials and the odd one
//! above it at the other. What the kernel tells of processes, a thread of tests tells here.
//!
//! A device for gets has a rank of the world too, and links of any number of programs. Two ranks of
//! a world have one link in their lives, so [`GetPlan`] chooses the devices of each link before it
//! is made.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use pleach_transport::mutex::lock;
use pleach_transport::shm::OpenError;
use pleach_transport::sim::{Network, Options, SimDevice, World};
use pleach_transport::{Address, ConnectError, Device, Meeting, Rank};
use pleach_vocabulary::Fabric;

use super::gets::{GetDevice, GettingDevice};
use super::pair::{DevicePair, MappingDevice, PairedDevice, Pairs, config_of};
use super::regions::{PLACES, SETUP_LIMIT};
use crate::reference::LinkId;

thread_local! {
    /// The ranks whose processes have ended.
    static ENDED: RefCell<BTreeSet<Rank>> = const { RefCell::new(BTreeSet::new()) };

    /// The ranks of the two devices of each link that gets.
    static GET_ENDS: RefCell<BTreeMap<LinkId, [Rank; 2]>> = const { RefCell::new(BTreeMap::new()) };
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

/// Devices of worlds that map nothing.
impl GettingDevice for SimDevice {
    fn rank_of(&self, link: LinkId, _next: Rank) -> Option<Rank> {
        let own = self.info().rank;
        GET_ENDS.with_borrow(|ends| match ends.get(&link) {
            Some(&[one, other]) if one == own => Some(other),
            Some(&[one, other]) if other == own => Some(one),
            _ => None,
        })
    }

    /// All ranks are in one world.
    fn link(&mut self, peer: Rank, _meeting: Meeting<'_>) -> Result<(), ConnectError> {
        self.connect(peer, &Address(format!("sim:{peer}")))
    }
}

/// The ranks of the two devices of a link, and those of the devices that are new, with their
/// programs.
pub(crate) type GetEnds = ([Rank; 2], Vec<(usize, GetDevice)>);

/// Which devices of the programs of a world get from which.
pub(crate) struct GetPlan {
    world: World,
    ranks: u32,
    /// The next rank that nobody has.
    next: Rank,
    /// By program: the ranks of its devices.
    own: Vec<Vec<Rank>>,
    /// Pairs of ranks that have had their link.
    used: BTreeSet<[Rank; 2]>,
}

impl GetPlan {
    /// There are no links yet, on this thread.
    pub(crate) fn new(world: World, ranks: u32) -> Self {
        GET_ENDS.take();
        Self { world, ranks, next: 0, own: Vec::new(), used: BTreeSet::new() }
    }

    /// The ranks of a program.
    pub(crate) fn own(&self, program: usize) -> &[Rank] {
        self.own.get(program).map_or(&[], Vec::as_slice)
    }

    /// Chooses the devices of a link of two programs: those that they have, if two of these have
    /// had no link. Otherwise one program gets one more, or both get their first. `None`: there are
    /// no ranks for them.
    pub(crate) fn link(&mut self, link: LinkId, programs: [usize; 2]) -> Option<GetEnds> {
        self.own.resize_with(self.own.len().max(programs[0].max(programs[1]) + 1), Vec::new);
        let mut opened = Vec::new();
        loop {
            let [own, others] = programs.map(|program| self.own[program].clone());
            let pairs = own.iter().flat_map(|own| others.iter().map(move |other| [*own, *other]));
            let is_used = |[one, other]: [Rank; 2]| self.used.contains(&[one.min(other), one.max(other)]);
            if let Some(ranks @ [one, other]) = pairs.into_iter().find(|pair| !is_used(*pair)) {
                self.used.insert([one.min(other), one.max(other)]);
                GET_ENDS.with_borrow_mut(|ends| ends.insert(link, ranks));
                return Some((ranks, opened));
            }
            if opened.is_empty() && self.next + 2 > self.ranks {
                return None;
            }
            let program = programs[usize::from(own.len() > others.len())];
            self.own[program].push(self.next);
            let device = self.world.device(config_of(self.next, self.ranks, 1, SETUP_LIMIT));
            opened.push((program, GetDevice::over(Fabric::Tcp, Box::new(device))));
            self.next += 1;
        }
    }
}
