//! How long simulated ranks compute.
//!
//! A time is a function of the seed, the rank and the step alone, made by arithmetic that is the
//! same on every machine: `exp`, `ln` and `cos` are those of `libm`, as those of C libraries differ
//! in the last bit.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pleach_collectives::Rank;
use pleach_collectives::partial::duration;
use pleach_vocabulary::digest::{chain, hash_of_pair};
use pleach_vocabulary::random::Random;

/// The computing times of ranks: lognormal, independent of each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Computing {
    mean: Duration,
    cv: f64,
    spread: f64,
    straggler: Option<(Rank, f64)>,
}

/// Why a text says nothing about computing times.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error(
    "bad computing time: '{part}'; give MEAN[,cv=F][,spread=F][,straggler=RANK:FACTOR] as 10ms,cv=0.2,spread=0.5"
)]
pub struct ComputingTextError {
    /// The part of the text that is wrong.
    pub part: String,
}

/// The largest standard deviation as a share of the mean, and the largest spread.
const SHARE_MAX: f64 = 10.0;

/// The largest factor of a straggler.
const FACTOR_MAX: f64 = 1_000.0;

/// The longest mean.
const MEAN_MAX: Duration = Duration::from_secs(3_600);

impl Default for Computing {
    /// A mean of 10 ms and a standard deviation of 1 ms on all ranks.
    fn default() -> Self {
        Self { mean: Duration::from_millis(10), cv: 0.1, spread: 0.0, straggler: None }
    }
}

impl Computing {
    /// The computing time of a rank in a step, at least 1 ns.
    #[must_use]
    pub fn time(&self, seed: u64, rank: Rank, step: u64) -> Duration {
        // A lognormal variable of mean 1: exp(σz - σ²/2) with σ² = ln(1 + cv²).
        let variance = libm::log(1.0 + self.cv * self.cv);
        let exponent = libm::sqrt(variance) * normal(seed, rank, step) - variance / 2.0;
        let nanos = self.mean.as_nanos() as f64 * self.slowness(seed, rank) * libm::exp(exponent);
        Duration::from_nanos((nanos as u64).max(1))
    }

    /// The mean of a rank over the common mean.
    fn slowness(&self, seed: u64, rank: Rank) -> f64 {
        let drawn = uniform(&mut Random::new(hash_of_pair(seed, rank.into())));
        let straggling = self.straggler.filter(|(straggler, _)| *straggler == rank);
        (1.0 + self.spread * drawn) * straggling.map_or(1.0, |(_, factor)| factor)
    }

    /// The rank that is slower, if one was named.
    #[must_use]
    pub fn straggler(&self) -> Option<Rank> {
        self.straggler.map(|(rank, _)| rank)
    }
}

/// A number from 0 to below 1.
fn uniform(random: &mut Random) -> f64 {
    (random.bits() >> 11) as f64 / (1_u64 << 53) as f64
}

/// A number of the standard normal distribution (Box and Muller 1958).
fn normal(seed: u64, rank: Rank, step: u64) -> f64 {
    let mut random = Random::new(chain(hash_of_pair(seed, rank.into()), step));
    let [radius, angle] = [uniform(&mut random), uniform(&mut random)];
    libm::sqrt(-2.0 * libm::log(1.0 - radius)) * libm::cos(2.0 * std::f64::consts::PI * angle)
}

impl FromStr for Computing {
    type Err = ComputingTextError;

    fn from_str(text: &str) -> Result<Self, ComputingTextError> {
        let wrong = |part: &str| ComputingTextError { part: part.to_owned() };
        let mut parts = text.split(',');
        let first = parts.next().unwrap_or_default();
        let mean = duration(first).filter(|mean| !mean.is_zero() && *mean <= MEAN_MAX);
        let mut computing = Self { mean: mean.ok_or_else(|| wrong(first))?, ..Self::default() };
        for part in parts {
            let (key, value) = part.split_once('=').ok_or_else(|| wrong(part))?;
            let number = |text: &str, most: f64| {
                text.parse()
                    .ok()
                    .filter(|number: &f64| (0.0..=most).contains(number))
                    .ok_or_else(|| wrong(part))
            };
            match key {
                "cv" => computing.cv = number(value, SHARE_MAX)?,
                "spread" => computing.spread = number(value, SHARE_MAX)?,
                "straggler" => {
                    let (rank, factor) = value.split_once(':').ok_or_else(|| wrong(part))?;
                    let rank = rank.parse().map_err(|_| wrong(part))?;
                    computing.straggler = Some((rank, number(factor, FACTOR_MAX)?));
                }
                _ => return Err(wrong(part)),
            }
        }
        Ok(computing)
    }
}

impl fmt::Display for Computing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?},cv={}", self.mean, self.cv)?;
        if self.spread != 0.0 {
            write!(formatter, ",spread={}", self.spread)?;
        }
        match self.straggler {
            Some((rank, factor)) => write!(formatter, ",straggler={rank}:{factor}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_the_mean_and_the_deviation_that_were_asked_for() {
        let computing: Computing = "10ms,cv=0.3".parse().expect("is a text");
        let times: Vec<f64> = (0..20_000).map(|step| computing.time(7, 3, step).as_secs_f64()).collect();
        let mean = times.iter().sum::<f64>() / times.len() as f64;
        let variance = times.iter().map(|time| (time - mean).powi(2)).sum::<f64>() / times.len() as f64;
        assert!((mean / 0.01 - 1.0).abs() < 0.01, "{mean}");
        assert!((variance.sqrt() / mean - 0.3).abs() < 0.01, "{}", variance.sqrt() / mean);
    }

    #[test]
    fn a_time_is_a_function_of_seed_rank_and_step_and_has_the_same_bits_everywhere() {
        let computing: Computing = "10ms,cv=0.2,spread=0.5".parse().expect("is a text");
        assert_eq!(computing.time(1, 2, 3), Duration::from_nanos(GOLDEN_NS));
        assert_ne!(computing.time(1, 2, 3), computing.time(2, 2, 3));
        assert_ne!(computing.time(1, 2, 3), computing.time(1, 3, 3));
        assert_ne!(computing.time(1, 2, 3), computing.time(1, 2, 4));
    }

    /// Computed by the same formulae in another language.
    const GOLDEN_NS: u64 = 16_266_508;

    #[test]
    fn spread_and_stragglers_make_single_ranks_slower_by_what_was_said() {
        let steady = |text: &str| -> Vec<f64> {
            let computing: Computing = text.parse().expect("is a text");
            (0..100).map(|rank| computing.time(5, rank, 0).as_secs_f64() * 100.0).collect()
        };
        let spread = steady("10ms,cv=0,spread=0.5");
        let [least, most] = [f64::min, f64::max].map(|extreme| spread.iter().copied().fold(1.2, extreme));
        assert!((1.0..1.02).contains(&least) && (1.48..=1.5).contains(&most), "{least} {most}");
        let straggling = steady("10ms,cv=0,straggler=3:4");
        for (rank, time) in straggling.iter().enumerate() {
            assert!((time - if rank == 3 { 4.0 } else { 1.0 }).abs() < 1e-6, "{rank}: {time}");
        }
    }

    #[test]
    fn a_text_comes_back_and_a_wrong_part_is_named() {
        for text in ["10ms,cv=0.1", "1.5ms,cv=0.3,spread=0.5,straggler=3:2.5"] {
            assert_eq!(text.parse::<Computing>().expect("is a text").to_string(), text);
        }
        assert_eq!("10ms".parse(), Ok(Computing::default()));
        for (text, part) in [
            ("", ""),
            ("0ms", "0ms"),
            ("10", "10"),
            ("10ms,cv=-1", "cv=-1"),
            ("10ms,cv=nan", "cv=nan"),
            ("10ms,spread=11", "spread=11"),
            ("10ms,straggler=1", "straggler=1"),
            ("10ms,straggler=x:2", "straggler=x:2"),
            ("10ms,cw=1", "cw=1"),
        ] {
            assert_eq!(
                text.parse::<Computing>(),
                Err(ComputingTextError { part: part.to_owned() }),
                "{text}"
            );
        }
    }
}
