//! Faults as data: a plan that a seed draws, or that a test writes.
//!
//! **Invariant:** a fault never makes the device break its contract; it only uses the freedom of
//! the contract.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::Rank;
use crate::clock::Nanos;
use crate::sim::network::LinkId;
use crate::sim::random::Random;

/// Kinds of faults, with the names of the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FaultKind {
    /// Some transfers and messages take much longer.
    Delay,
    /// Every arrival, signal and completion is delayed by a short random time, so they lose their
    /// order.
    Reorder,
    /// Puts become visible in random pieces in random order before their signal.
    Tear,
    /// Queues hold very few transfers.
    QueueFull,
    /// A rank makes no progress for a while.
    Freeze,
    /// A link goes down for good.
    LinkDown,
    /// A rank dies.
    RankDeath,
    /// One end of a pair loses the other, which detects the loss later.
    OneSidedLoss,
    /// Ranks come late to what they do together. The wires know nothing of it: whoever drives the
    /// ranks holds them up.
    Late,
}

impl FaultKind {
    /// Every kind.
    pub const ALL: [Self; 9] = [
        Self::Delay,
        Self::Reorder,
        Self::Tear,
        Self::QueueFull,
        Self::Freeze,
        Self::LinkDown,
        Self::RankDeath,
        Self::OneSidedLoss,
        Self::Late,
    ];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Delay => "delay",
            Self::Reorder => "reorder",
            Self::Tear => "tear",
            Self::QueueFull => "queue-full",
            Self::Freeze => "freeze",
            Self::LinkDown => "link-down",
            Self::RankDeath => "rank-death",
            Self::OneSidedLoss => "one-sided-loss",
            Self::Late => "late",
        }
    }

    /// Whether a collective must end correctly in spite of it.
    #[must_use]
    pub const fn is_harmless(self) -> bool {
        matches!(self, Self::Delay | Self::Reorder | Self::Tear | Self::QueueFull | Self::Late)
    }
}

/// An unknown fault.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("'{name}' is no fault; there are {}, all, none", FaultKind::ALL.map(FaultKind::name).join(", "))]
pub struct UnknownFault {
    /// The name.
    pub name: String,
}

/// A set of kinds of faults. As text: names separated by commas, `all`, or `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FaultKinds(BTreeSet<FaultKind>);

impl FaultKinds {
    /// The set of these kinds.
    #[must_use]
    pub fn of(kinds: &[FaultKind]) -> Self {
        Self(kinds.iter().copied().collect())
    }

    /// All kinds.
    #[must_use]
    pub fn all() -> Self {
        Self::of(&FaultKind::ALL)
    }

    /// All kinds with which everything must succeed.
    #[must_use]
    pub fn harmless() -> Self {
        Self(FaultKind::ALL.into_iter().filter(|kind| kind.is_harmless()).collect())
    }

    /// A random subset, possibly empty or all: such swarms find more than the full set.
    #[must_use]
    pub fn swarm(&self, random: &mut Random) -> Self {
        Self(self.0.iter().copied().filter(|_| random.coin()).collect())
    }

    /// The kinds of the set that are chosen.
    #[must_use]
    pub fn filtered(&self, mut is_chosen: impl FnMut(FaultKind) -> bool) -> Self {
        Self(self.0.iter().copied().filter(|kind| is_chosen(*kind)).collect())
    }

    /// Whether this kind is in the set.
    #[must_use]
    pub fn contains(&self, kind: FaultKind) -> bool {
        self.0.contains(&kind)
    }

    /// The kinds, in the order of [`FaultKind::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = FaultKind> + '_ {
        self.0.iter().copied()
    }
}

impl FromStr for FaultKinds {
    type Err = UnknownFault;

    fn from_str(list: &str) -> Result<Self, UnknownFault> {
        let mut kinds = BTreeSet::new();
        for name in list.split(',').map(str::trim) {
            match name {
                "all" => kinds.extend(FaultKind::ALL),
                "none" => {}
                _ => {
                    let known = FaultKind::ALL.into_iter().find(|kind| kind.name() == name);
                    kinds.insert(known.ok_or_else(|| UnknownFault { name: name.to_owned() })?);
                }
            }
        }
        Ok(Self(kinds))
    }
}

impl fmt::Display for FaultKinds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.iter().map(FaultKind::name).collect();
        formatter.write_str(if names.is_empty() { "none".to_owned() } else { names.join(",") }.as_str())
    }
}

/// A fault at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// A rank is not polled for a while ([`super::World::is_frozen`]).
    Freeze {
        /// The rank.
        rank: Rank,
        /// The duration.
        duration: Duration,
        /// Whether its watcher stops too, so that it does not answer control messages: a stopped
        /// process rather than a busy thread.
        watcher: bool,
    },
    /// A link goes down for good. Every pair with a route over it is cut at once; each end detects
    /// it by itself.
    LinkDown {
        /// The link.
        link: LinkId,
    },
    /// A rank dies: nothing of it happens any more, except that bytes already on the wire may land.
    RankDeath {
        /// The rank.
        rank: Rank,
    },
    /// `rank` loses `peer` at once, `peer` loses `rank` within [`Faults::detection`] and goes on
    /// until then.
    OneSidedLoss {
        /// The rank that detects the loss first.
        rank: Rank,
        /// The rank that it loses.
        peer: Rank,
    },
}

/// All faults of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Faults {
    /// How many of a million arrivals and messages are delayed.
    pub delay_per_million: u32,
    /// The longest such delay.
    pub delay: Duration,
    /// Every arrival, signal and completion is delayed by a random time up to this; zero keeps
    /// their order.
    pub reorder: Duration,
    /// The most pieces of a put; 1: all bytes become visible at once.
    pub pieces: u32,
    /// The most transfers under way to one peer; `None`: as in the world's options.
    pub queue_depth: Option<usize>,
    /// The most time until an end detects that a peer is gone.
    pub detection: Duration,
    /// The most time until a severed peer is fenced.
    pub severance: Duration,
    /// Faults at given instants of virtual time.
    pub timed: Vec<(Nanos, Fault)>,
}

/// Default of [`Faults::detection`].
pub const DETECTION: Duration = Duration::from_millis(100);

/// Longest delay of one transfer or message in a drawn plan.
pub const DELAY_MAX: Duration = Duration::from_millis(2);

/// Longest freeze in a drawn plan.
pub const FREEZE_MAX: Duration = Duration::from_millis(20);

impl Faults {
    /// No faults; transfers take exactly the time of the network.
    #[must_use]
    pub fn none() -> Self {
        Self {
            delay_per_million: 0,
            delay: Duration::ZERO,
            reorder: Duration::ZERO,
            pieces: 1,
            queue_depth: None,
            detection: DETECTION,
            severance: Duration::ZERO,
            timed: Vec::new(),
        }
    }

    /// A plan with these kinds of faults, a function of the arguments alone. Timed faults happen
    /// before `within`.
    #[must_use]
    pub fn draw(kinds: &FaultKinds, seed: u64, network: &super::Network, within: Duration) -> Self {
        let mut random = Random::new(seed).split("faults");
        let mut faults = Self::none();
        let within_ns = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX).max(1);
        let nanos = |random: &mut Random, low: u64, high: Duration| {
            Duration::from_nanos(random.between(low, high.as_nanos() as u64))
        };
        for kind in kinds.iter() {
            // A stream of its own for each kind: removing a kind leaves the others as they were, so
            // that a failing set can be made smaller.
            let random = &mut random.split(kind.name());
            match kind {
                FaultKind::Delay => {
                    faults.delay_per_million = random.between(1_000, 200_000) as u32;
                    faults.delay = nanos(random, 1_000, DELAY_MAX);
                    faults.severance = nanos(random, 0, DELAY_MAX);
                }
                FaultKind::Reorder => faults.reorder = nanos(random, 100, Duration::from_micros(50)),
                FaultKind::Tear => faults.pieces = random.between(2, 9) as u32,
                FaultKind::QueueFull => faults.queue_depth = Some(random.between(1, 3) as usize),
                FaultKind::Freeze if network.ranks() > 0 => {
                    for _ in 0..random.between(1, 3) {
                        let at = Nanos(random.below(within_ns));
                        let rank = random.below(u64::from(network.ranks())) as Rank;
                        let duration = nanos(random, 1_000, FREEZE_MAX);
                        let watcher = random.coin();
                        faults.timed.push((at, Fault::Freeze { rank, duration, watcher }));
                    }
                }
                FaultKind::LinkDown if !network.links().is_empty() => {
                    let link = LinkId(random.index(network.links().len()) as u32);
                    faults.timed.push((Nanos(random.below(within_ns)), Fault::LinkDown { link }));
                }
                FaultKind::RankDeath if network.ranks() > 0 => {
                    let rank = random.below(u64::from(network.ranks())) as Rank;
                    faults.timed.push((Nanos(random.below(within_ns)), Fault::RankDeath { rank }));
                }
                FaultKind::OneSidedLoss if network.ranks() > 1 => {
                    let ranks = u64::from(network.ranks());
                    let rank = random.below(ranks);
                    let peer = (rank + 1 + random.below(ranks - 1)) % ranks;
                    let fault = Fault::OneSidedLoss { rank: rank as Rank, peer: peer as Rank };
                    faults.timed.push((Nanos(random.below(within_ns)), fault));
                }
                FaultKind::Freeze
                | FaultKind::LinkDown
                | FaultKind::RankDeath
                | FaultKind::OneSidedLoss
                | FaultKind::Late => {}
            }
        }
        if kinds.iter().any(|kind| !kind.is_harmless()) {
            faults.detection = nanos(&mut random, 1_000, DETECTION);
        }
        faults
    }

    /// Whether everything must end correctly with this plan, if no deadline is near.
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        self.timed.iter().all(|(_, fault)| matches!(fault, Fault::Freeze { .. }))
    }

    /// The ranks that die.
    pub fn deaths(&self) -> impl Iterator<Item = (Nanos, Rank)> + '_ {
        self.timed.iter().filter_map(|&(at, fault)| match fault {
            Fault::RankDeath { rank } => Some((at, rank)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::Network;

    #[test]
    fn names_are_read_back_as_they_are_printed() {
        for kinds in [FaultKinds::all(), FaultKinds::harmless(), FaultKinds::default()] {
            assert_eq!(kinds.to_string().parse(), Ok(kinds));
        }
        assert_eq!("delay, tear".parse(), Ok(FaultKinds::of(&[FaultKind::Tear, FaultKind::Delay])));
        let error = "delay,gremlin".parse::<FaultKinds>().expect_err("there is no such fault");
        assert!(error.to_string().contains("'gremlin'") && error.to_string().contains("one-sided-loss"));
    }

    #[test]
    fn removing_a_kind_leaves_the_other_faults_as_they_were() {
        let network = Network::full_mesh(5, 1_000, Duration::ZERO);
        let within = Duration::from_millis(1);
        for seed in 0..50 {
            let all = Faults::draw(&FaultKinds::all(), seed, &network, within);
            let few = Faults::draw(
                &FaultKinds::of(&[FaultKind::Tear, FaultKind::RankDeath]),
                seed,
                &network,
                within,
            );
            assert_eq!(few.pieces, all.pieces);
            assert_eq!(few.deaths().collect::<Vec<_>>(), all.deaths().collect::<Vec<_>>());
            assert_eq!((few.delay_per_million, few.queue_depth), (0, None));
            assert!(all.timed.iter().all(|&(at, _)| at < Nanos(1_000_000)));
        }
    }
}
