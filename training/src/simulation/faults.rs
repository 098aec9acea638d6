//! Faults of simulated ranks: which there are, and what befalls which rank, drawn from the seed.
//!
//! What is drawn is measured by the *unit*: the computing time of rank 0 in its first step. Rank 0,
//! whose steps are observed, never ends.
//!
//! **Invariant:** each fault has a stream of random numbers of its own. So a fault that is left out
//! leaves the others as they were.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_transport::clock::Nanos;
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

use super::network::TransferTime;
use super::report::Settings;

/// Something that befalls simulated ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// A rank takes 2 to 10 times as long for each step.
    Slow,
    /// Each rank takes between half and twice its time, drawn anew every [`DRIFT_STEPS`] steps.
    Drift,
    /// A rank stands still, one to three times: one of its steps takes 5 to 50 units longer.
    Freeze,
    /// From 0.1 to 20 % of all transfers and words, and of all-reduces, take up to 2 units longer.
    Delay,
    /// Each transfer, word and all-reduce takes up to a tenth of a unit longer, so what different
    /// ranks send loses its order.
    Reorder,
    /// From a step on the links of a rank carry a half to an eighth of what they carried.
    LinkShrink,
    /// A rank ends before one of its steps. It says nothing any more, and its peers may read what
    /// it has published.
    RankDeath,
}

/// Steps between two changes of speed.
pub const DRIFT_STEPS: u64 = 16;

/// What happens once happens within so many steps: all, where there are fewer.
pub const FAULTS_WITHIN_STEPS: u64 = 100;

/// Factors are so many thousandths.
const PER_MILLE: u64 = 1_000;

/// One in a million, the unit of probabilities.
const MILLION: u64 = 1_000_000;

/// Tells the random numbers of faults from others of the same seed.
const PURPOSE: u64 = 0xfa17;

impl Fault {
    /// Every fault.
    pub const ALL: [Self; 7] = [
        Self::Slow,
        Self::Drift,
        Self::Freeze,
        Self::Delay,
        Self::Reorder,
        Self::LinkShrink,
        Self::RankDeath,
    ];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Slow => "slow",
            Self::Drift => "drift",
            Self::Freeze => "freeze",
            Self::Delay => "delay",
            Self::Reorder => "reorder",
            Self::LinkShrink => "link-shrink",
            Self::RankDeath => "rank-death",
        }
    }
}

/// A text that names something else than faults.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("'{name}' is no fault of a training; there are {}, all, none", Fault::ALL.map(Fault::name).join(", "))]
pub struct UnknownFault {
    /// The name.
    pub name: String,
}

/// A set of faults. As text: names separated by commas, `all`, or `none`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(BTreeSet<Fault>);

impl Faults {
    /// The set of these.
    #[must_use]
    pub fn of(faults: &[Fault]) -> Self {
        Self(faults.iter().copied().collect())
    }

    /// Whether it is in the set.
    #[must_use]
    pub fn contains(&self, fault: Fault) -> bool {
        self.0.contains(&fault)
    }

    /// Whether nothing befalls anybody.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Faults {
    type Err = UnknownFault;

    fn from_str(list: &str) -> Result<Self, UnknownFault> {
        let mut faults = BTreeSet::new();
        for name in list.split(',').map(str::trim) {
            match name {
                "all" => faults.extend(Fault::ALL),
                "none" => {}
                _ => {
                    let known = Fault::ALL.into_iter().find(|fault| fault.name() == name);
                    faults.insert(known.ok_or_else(|| UnknownFault { name: name.to_owned() })?);
                }
            }
        }
        Ok(Self(faults))
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|fault| fault.name()).collect();
        formatter.write_str(if names.is_empty() { "none".to_owned() } else { names.join(",") }.as_str())
    }
}

/// How messages are delayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// How many of a million messages are late.
    pub per_million: u32,
    /// How late they are, at most.
    pub most: Duration,
    /// How much longer each message takes, at most.
    pub reorder: Duration,
}

/// A freeze: the rank, the step, and how much longer that takes.
type Freeze = (Rank, u64, Duration);

/// The faults of one simulation; see the module.
#[derive(Clone, Debug)]
pub(crate) struct DrawnFaults {
    /// The rank, and its time in thousandths of what it were.
    slow: Option<(Rank, u64)>,
    /// The seed of the speeds.
    drift: Option<u64>,
    freezes: Vec<Freeze>,
    delays: Delays,
    /// Which messages are late, and how much longer each takes.
    late: [Random; 2],
    /// The rank, since when, and how many times as long its transfers take.
    shrunk: Option<(Rank, Nanos, u32)>,
    death: Option<(Rank, u64)>,
}

impl DrawnFaults {
    pub(crate) fn draw(faults: &Faults, settings: &Settings, unit: Duration) -> Self {
        let Settings { seed, ranks, steps, .. } = *settings;
        let seed_of = |fault: Fault| chain(hash_of_pair(seed, PURPOSE), fault as u64);
        // A stream for each, if it is in the set.
        let stream = |fault: Fault| faults.contains(fault).then(|| Random::new(seed_of(fault)));
        let last = steps.clamp(2, FAULTS_WITHIN_STEPS) - 1;
        let any = |random: &mut Random| random.below(ranks.into()) as Rank;
        let slow = stream(Fault::Slow)
            .map(|mut random| (any(&mut random), between(2 * PER_MILLE, 10 * PER_MILLE, &mut random)));
        let mut freezes = Vec::new();
        if let Some(mut random) = stream(Fault::Freeze) {
            for _ in 0..between(1, 3, &mut random) {
                let (rank, step) = (any(&mut random), between(0, last, &mut random));
                let longer = unit * between(5, 50, &mut random) as u32;
                freezes.push((rank, step, longer));
            }
        }
        let mut delays = Delays::default();
        if let Some(mut random) = stream(Fault::Delay) {
            (delays.per_million, delays.most) = (between(1_000, 200_000, &mut random) as u32, unit * 2);
        }
        if faults.contains(Fault::Reorder) {
            delays.reorder = unit / 10;
        }
        let late = [Fault::Delay, Fault::Reorder].map(|fault| Random::new(hash_of_pair(seed_of(fault), 1)));
        let shrunk = stream(Fault::LinkShrink).map(|mut random| {
            let (rank, step) = (any(&mut random), between(0, last, &mut random) as u32);
            (rank, Nanos::ZERO + unit * step, between(2, 8, &mut random) as u32)
        });
        let death = stream(Fault::RankDeath).filter(|_| ranks > 1).map(|mut random| {
            (1 + random.below(u64::from(ranks) - 1) as Rank, between(1, last, &mut random))
        });
        let drift = faults.contains(Fault::Drift).then(|| seed_of(Fault::Drift));
        Self { slow, drift, freezes, delays, late, shrunk, death }
    }

    /// How long a rank takes for a step that takes this time without faults.
    pub(crate) fn computing(&self, rank: Rank, step: u64, time: Duration) -> Duration {
        let mut time = time;
        if let Some((_, factor)) = self.slow.filter(|(slow, _)| *slow == rank) {
            time = per_mille(time, factor);
        }
        if let Some(seed) = self.drift {
            let mut random = Random::new(chain(hash_of_pair(seed, rank.into()), step / DRIFT_STEPS));
            time = per_mille(time, between(PER_MILLE / 2, 2 * PER_MILLE, &mut random));
        }
        time + self.frozen(rank, step)
    }

    /// How long a rank stands still in a step.
    pub(crate) fn frozen(&self, rank: Rank, step: u64) -> Duration {
        let own = self.freezes.iter().filter(|(frozen, at, _)| (*frozen, *at) == (rank, step));
        own.map(|(.., longer)| *longer).sum()
    }

    /// The rank that ends, and the step before which it does.
    pub(crate) fn death(&self) -> Option<(Rank, u64)> {
        self.death
    }

    /// How long a transfer takes that takes this time without faults.
    pub(crate) fn transfer(&mut self, time: TransferTime, now: Nanos, between: [Rank; 2]) -> TransferTime {
        let sending = time.sending * self.shrunk_by(now, &between);
        TransferTime { latency: time.latency + self.late(), sending }
    }

    /// How long an all-reduce of these ranks takes that takes this time without faults.
    pub(crate) fn all_reduce(&mut self, time: Duration, now: Nanos, ranks: Option<&[Rank]>) -> Duration {
        let factor = match (ranks, self.shrunk) {
            (Some(ranks), _) => self.shrunk_by(now, ranks),
            (None, Some((rank, ..))) => self.shrunk_by(now, &[rank]),
            (None, None) => 1,
        };
        time * factor + self.late()
    }

    /// How many times as long the links of one of these ranks take.
    fn shrunk_by(&self, now: Nanos, ranks: &[Rank]) -> u32 {
        let shrunk = self.shrunk.filter(|(rank, since, _)| *since <= now && ranks.contains(rank));
        shrunk.map_or(1, |(.., factor)| factor)
    }

    /// How much later the next message is.
    fn late(&mut self) -> Duration {
        let Delays { per_million, most, reorder } = self.delays;
        let [delaying, reordering] = &mut self.late;
        let mut late = up_to(reorder, reordering);
        if delaying.below(MILLION) < per_million.into() {
            late += up_to(most, delaying);
        }
        late
    }

    /// How messages are delayed.
    pub(crate) fn delays(&self) -> Delays {
        self.delays
    }
}

/// A number from `low` to `high`.
fn between(low: u64, high: u64, random: &mut Random) -> u64 {
    low + random.below(high - low + 1)
}

fn up_to(most: Duration, random: &mut Random) -> Duration {
    Duration::from_nanos(between(0, most.as_nanos() as u64, random))
}

fn per_mille(time: Duration, factor: u64) -> Duration {
    let nanos = time.as_nanos() * u128::from(factor) / u128::from(PER_MILLE);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::super::computing::Computing;
    use super::*;

    const UNIT: Duration = Duration::from_millis(10);

    fn drawn(faults: &Faults, seed: u64) -> DrawnFaults {
        let settings = Settings {
            ranks: 8,
            steps: 60,
            seed,
            computing: Computing::default(),
            learning_rate: 0.1,
            momentum: 0.0,
            observed_every: 1,
        };
        DrawnFaults::draw(faults, &settings, UNIT)
    }

    #[test]
    fn names_are_read_back_as_they_are_printed_and_others_are_refused_with_the_list() {
        for faults in [Faults::of(&Fault::ALL), Faults::default(), Faults::of(&[Fault::Drift, Fault::Slow])] {
            assert_eq!(faults.to_string().parse(), Ok(faults));
        }
        assert_eq!("all".parse(), Ok(Faults::of(&Fault::ALL)));
        let error = "slow,gremlin".parse::<Faults>().expect_err("there is no such fault").to_string();
        assert!(error.contains("'gremlin'"), "{error}");
        assert!(Fault::ALL.iter().all(|fault| error.contains(fault.name())), "{error}");
    }

    #[test]
    fn a_fault_that_is_left_out_leaves_the_others_as_they_were() {
        for seed in 0..200 {
            let all = drawn(&Faults::of(&Fault::ALL), seed);
            let few = drawn(&Faults::of(&[Fault::Freeze, Fault::RankDeath]), seed);
            assert_eq!((&few.freezes, few.death), (&all.freezes, all.death), "seed {seed}");
            assert!(few.slow.is_none() && few.drift.is_none() && few.shrunk.is_none(), "seed {seed}");
        }
    }

    #[test]
    fn what_is_drawn_keeps_to_what_is_promised() {
        for seed in 0..500 {
            let mut all = drawn(&Faults::of(&Fault::ALL), seed);
            let (rank, step) = all.death.expect("there are several ranks");
            assert!((1..8).contains(&rank) && (1..60).contains(&step), "rank {rank}, step {step}");
            let (rank, since, factor) = all.shrunk.expect("is in the set");
            assert!((2..=8).contains(&factor) && since < Nanos::ZERO + UNIT * 60, "{since}, {factor}");
            let time = TransferTime { latency: UNIT, sending: UNIT };
            let late = all.transfer(time, since, [rank, rank ^ 1]);
            assert_eq!(late.sending, UNIT * factor);
            assert!(late.latency <= UNIT * 3 + UNIT / 10, "{:?}", late.latency);
            for (rank, step, longer) in all.freezes.clone() {
                assert!(rank < 8 && step < 60 && longer >= UNIT * 5, "rank {rank}, step {step}: {longer:?}");
                assert!(all.computing(rank, step, UNIT) > longer);
            }
        }
    }

    #[test]
    fn a_slow_rank_is_slow_in_each_step_and_speeds_change_every_few_steps() {
        let slow = drawn(&Faults::of(&[Fault::Slow]), 1);
        let (rank, factor) = slow.slow.expect("is in the set");
        for (other, step) in (0..8).flat_map(|rank| (0..60).map(move |step| (rank, step))) {
            let expected = if other == rank { per_mille(UNIT, factor) } else { UNIT };
            assert_eq!(slow.computing(other, step, UNIT), expected);
        }
        let drift = drawn(&Faults::of(&[Fault::Drift]), 1);
        let time = |step| drift.computing(3, step, UNIT);
        assert_eq!(time(0), time(DRIFT_STEPS - 1));
        assert_ne!(time(0), time(DRIFT_STEPS));
        assert!((0..60).all(|step| (UNIT / 2..=UNIT * 2).contains(&time(step))));
    }
}
