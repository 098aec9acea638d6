//! How many ranks a job has whose processes come and go.

use std::fmt;
use std::str::FromStr;

use pleach::transport::rendezvous::WORLD_SIZE_MAX;

/// The fewest and the most ranks, as `2:6`. **Invariant:** 1 ≤ fewest ≤ most ≤ [`WORLD_SIZE_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bounds {
    fewest: u32,
    most: u32,
}

impl Bounds {
    /// From 1 to so many.
    pub(crate) fn up_to(most: u32) -> Self {
        Self { fewest: 1, most: most.clamp(1, WORLD_SIZE_MAX) }
    }

    pub(crate) fn fewest(self) -> u32 {
        self.fewest
    }

    pub(crate) fn most(self) -> u32 {
        self.most
    }

    /// Whether there may be so many ranks.
    pub(crate) fn allow(self, ranks: u32) -> bool {
        (self.fewest..=self.most).contains(&ranks)
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}:{}", self.fewest, self.most)
    }
}

impl FromStr for Bounds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers =
            text.split_once(':').and_then(|(fewest, most)| Some((fewest.parse().ok()?, most.parse().ok()?)));
        match numbers {
            Some((fewest, most)) if fewest >= 1 && fewest <= most && most <= WORLD_SIZE_MAX => {
                Ok(Self { fewest, most })
            }
            _ => Err(format!("give MIN:MAX, as 2:6, with MIN from 1 to MAX, and MAX to {WORLD_SIZE_MAX}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_two_numbers_in_order() {
        for text in ["2:6", "3:3", "1:4096"] {
            assert_eq!(text.parse::<Bounds>().map(|bounds| bounds.to_string()), Ok(text.to_owned()));
        }
        let too_many = format!("1:{}", WORLD_SIZE_MAX + 1);
        for wrong in ["8:2", "0:2", "2", "2:", ":6", "2:6:8", "a:b", &too_many] {
            assert!(wrong.parse::<Bounds>().is_err(), "{wrong}");
        }
        assert_eq!(Bounds::up_to(4).to_string(), "1:4");
    }
}
