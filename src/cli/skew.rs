//! Ranks that are late on purpose: how long each sleeps before it contributes.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use pleach::Rank;
use pleach::partial::duration;
use pleach_vocabulary::digest::chain;
use pleach_vocabulary::random::Random;

/// How late ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Skew {
    None,
    /// Rank `r` sleeps `r + 1` times as long.
    Linear(Duration),
    /// One rank sleeps, drawn for each step.
    One(Duration),
}

impl Skew {
    /// Makes a rank as late as it is in a step.
    #[expect(clippy::disallowed_methods, reason = "a rank that computes")]
    pub(crate) fn sleep(self, rank: Rank, ranks: u32, step: u64) {
        std::thread::sleep(self.of(rank, ranks, step));
    }

    /// How long a rank sleeps in a step.
    fn of(self, rank: Rank, ranks: u32, step: u64) -> Duration {
        match self {
            Self::None => Duration::ZERO,
            Self::Linear(by) => by.saturating_mul(rank + 1),
            Self::One(by) => {
                let late = Random::new(chain(0, step)).below(ranks.into()) as Rank;
                if rank == late { by } else { Duration::ZERO }
            }
        }
    }
}

impl FromStr for Skew {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || "there are none linear:D one:D, with D as 1ms or 0.5s".to_owned();
        if text == "none" {
            return Ok(Self::None);
        }
        let (kind, by) = text.split_once(':').ok_or_else(unknown)?;
        let by = duration(by).ok_or_else(unknown)?;
        match kind {
            "linear" => Ok(Self::Linear(by)),
            "one" => Ok(Self::One(by)),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Skew {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => formatter.write_str("none"),
            Self::Linear(by) => write!(formatter, "linear:{by:?}"),
            Self::One(by) => write!(formatter, "one:{by:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_late_as_the_text_says() {
        let millis = Duration::from_millis;
        let linear: Skew = "linear:2ms".parse().expect("a skew");
        assert_eq!([0, 1, 3].map(|rank| linear.of(rank, 4, 9)), [millis(2), millis(4), millis(8)]);
        let one: Skew = "one:20ms".parse().expect("a skew");
        for step in 0..50 {
            let late = (0..4).filter(|rank| one.of(*rank, 4, step) == millis(20)).count();
            assert_eq!(late, 1, "step {step}");
        }
        assert_eq!("none".parse::<Skew>().expect("a skew").of(3, 4, 0), Duration::ZERO);
        for text in ["", "some", "linear", "linear:", "linear:5", "two:1ms", "one:-1ms"] {
            assert!(text.parse::<Skew>().is_err_and(|error| error.contains("linear:D")), "{text}");
        }
    }
}
