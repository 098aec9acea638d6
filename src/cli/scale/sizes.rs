//! Links of one kind for any number of ranks, and the numbers of ranks to look at.

use std::fmt;
use std::str::FromStr;

use pleach::Topology;
use pleach::collectives::simulate::many::RANKS_MAX;
use pleach::packing::topology::{PresetError, preset_up_to};

use crate::cli::CommandError;
use crate::cli::error::did_you_mean;

/// Most numbers of ranks in one call.
const LISTED_MAX: usize = 64;

/// Fewest ranks: one has nothing to send.
const RANKS_MIN: u32 = 2;

/// A kind of preset, with the bandwidth of its links if that may be said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinksOfSize {
    family: &'static str,
    /// With the sign before it.
    bandwidth: String,
}

/// The kinds of presets that there are in many sizes.
const FAMILIES: [&str; 8] = ["dgx-a100", "dgx-h100", "mi250", "ring", "mesh", "torus", "star", "fat-tree"];

impl FromStr for LinksOfSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, bandwidth) = text.find('@').map_or((text, ""), |at| text.split_at(at));
        let known = FAMILIES.into_iter().find(|family| *family == name);
        let family = known.ok_or_else(|| match name.split_once(':') {
            Some((family, _)) if FAMILIES.contains(&family) => {
                format!("the number of ranks is that of --ranks; write {family}")
            }
            _ => format!(
                "there are {}{}; a file has one number of ranks, see 'pleach bench --fabric sim'",
                FAMILIES.join(" "),
                did_you_mean(FAMILIES, name)
            ),
        })?;
        Ok(Self { family, bandwidth: bandwidth.to_owned() })
    }
}

impl fmt::Display for LinksOfSize {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{}", self.family, self.bandwidth)
    }
}

impl LinksOfSize {
    /// The preset of so many ranks, if there is one.
    fn preset(&self, ranks: u32) -> Option<String> {
        let of_boxes = |size: u32| ranks.is_multiple_of(size).then_some(ranks / size);
        let numbers = match self.family {
            "dgx-a100" | "dgx-h100" => of_boxes(8)?.to_string(),
            "mi250" => of_boxes(16)?.to_string(),
            "torus" => {
                let rows = (1..=ranks.isqrt()).rev().find(|rows| ranks.is_multiple_of(*rows))?;
                format!("{rows}x{}", ranks / rows)
            }
            "fat-tree" => {
                let ports = (2..).step_by(2).take_while(|ports: &u64| ports.pow(3) / 4 <= u64::from(ranks));
                let exact = ports.filter(|ports| ports.pow(3) / 4 == u64::from(ranks)).last();
                exact?.to_string()
            }
            _ => ranks.to_string(),
        };
        Some(format!("{}:{numbers}{}", self.family, self.bandwidth))
    }

    /// The links of so many ranks.
    fn topology(&self, ranks: u32) -> Option<Result<Topology, PresetError>> {
        Some(preset_up_to(&self.preset(ranks)?, u64::from(RANKS_MAX)))
    }
}

/// Numbers of ranks, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RankList {
    ranks: Vec<u32>,
    /// Doubled, so that those without a preset are left out.
    is_range: bool,
}

impl FromStr for RankList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("give FIRST..LAST or a list, of {RANKS_MIN} to {RANKS_MAX} ranks");
        let number = |text: &str| {
            let number: Option<u32> = text.parse().ok();
            number.filter(|ranks| (RANKS_MIN..=RANKS_MAX).contains(ranks)).ok_or_else(wrong)
        };
        if let Some((first, last)) = text.split_once("..") {
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(format!("{first} is more than {last}; exchange them"));
            }
            let doubled = std::iter::successors(Some(first), |ranks| ranks.checked_mul(2));
            return Ok(Self { ranks: doubled.take_while(|ranks| *ranks <= last).collect(), is_range: true });
        }
        let mut ranks: Vec<u32> = text.split(',').map(number).collect::<Result<_, _>>()?;
        ranks.sort_unstable();
        ranks.dedup();
        if ranks.len() > LISTED_MAX {
            return Err(format!("{} numbers of ranks; give at most {LISTED_MAX}", ranks.len()));
        }
        Ok(Self { ranks, is_range: false })
    }
}

impl RankList {
    /// The fewest ranks.
    pub(crate) fn least(&self) -> u32 {
        self.ranks[0]
    }

    /// The links of each number of ranks.
    pub(crate) fn topologies(&self, links: &LinksOfSize) -> Result<Vec<(u32, Topology)>, CommandError> {
        let mut found = Vec::with_capacity(self.ranks.len());
        for &ranks in &self.ranks {
            match links.topology(ranks) {
                Some(Ok(topology)) => found.push((ranks, topology)),
                Some(Err(PresetError::TooLarge { .. })) | None if self.is_range => {}
                Some(Err(error)) => return Err(CommandError::usage(format!("no links: {error}"))),
                None => {
                    return Err(CommandError::usage(format!(
                        "no links: there is no {links} of {ranks} ranks; give another number of ranks"
                    )));
                }
            }
        }
        if found.is_empty() {
            return Err(CommandError::usage(format!(
                "no links: there is no {links} of any of these numbers of ranks; give others"
            )));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(text: &str) -> LinksOfSize {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn presets_have_the_ranks_that_they_are_asked_for() {
        for (name, ranks, preset) in [
            ("dgx-h100", 1024, Some("dgx-h100:128")),
            ("dgx-a100", 12, None),
            ("mi250", 32, Some("mi250:2")),
            ("torus@50", 24, Some("torus:4x6@50")),
            ("fat-tree", 16, Some("fat-tree:4")),
            ("fat-tree", 32, None),
            ("star@12.5", 5, Some("star:5@12.5")),
        ] {
            assert_eq!(links(name).preset(ranks).as_deref(), preset, "{name} of {ranks}");
            let topology = links(name).topology(ranks).map(|made| made.expect("a preset").ranks());
            assert_eq!(topology, preset.map(|_| ranks), "{name} of {ranks}");
        }
        let error = "dgx-h100:4".parse::<LinksOfSize>().expect_err("has a number");
        assert!(error.contains("write dgx-h100"), "{error}");
        let error = "dgx-h10".parse::<LinksOfSize>().expect_err("is none");
        assert!(error.contains("did you mean 'dgx-h100'"), "{error}");
    }

    #[test]
    fn ranks_are_doubled_or_listed() {
        let list = |text: &str| text.parse::<RankList>().map(|list| list.ranks);
        assert_eq!(list("8..64"), Ok(vec![8, 16, 32, 64]));
        assert_eq!(list("3,24,8,8"), Ok(vec![3, 8, 24]));
        for text in ["", "1..8", "8..4", "8..99999", "8,x", "0", "..8"] {
            assert!(list(text).is_err(), "{text}");
        }
    }
}
