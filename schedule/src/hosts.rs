//! The host of each rank.
//!
//! Ranks of one host reach each other at low cost and, if the fabric allows it, by mapped memory. A
//! [`HostMap`] is the same on all ranks; schedules over two kinds of links are made from it.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use pleach_vocabulary::{Rank, UnknownName};

/// Most ranks that a text may name.
const RANKS_MAX: usize = 65_536;

/// Which rank is on which host. **Invariant:** hosts are numbered from 0 in the order of their
/// first ranks, so two maps that say the same are equal.
///
/// As text `4x2`: four hosts of two ranks each, one after the other; `3+2`: a host of three and one
/// of two; else the host of each rank, `0,1,0,1`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostMap {
    of: Arc<[u32]>,
}

impl HostMap {
    /// From a name of the host of each rank.
    #[must_use]
    pub fn new(names: &[u32]) -> Self {
        let mut seen = Vec::new();
        let number = |name: &u32| {
            let known = seen.iter().position(|other| other == name);
            known.unwrap_or_else(|| {
                seen.push(*name);
                seen.len() - 1
            }) as u32
        };
        Self { of: names.iter().map(number).collect() }
    }

    /// All ranks on one host.
    #[must_use]
    pub fn one(ranks: u32) -> Self {
        Self { of: vec![0; ranks as usize].into() }
    }

    /// Every rank on a host of its own.
    #[must_use]
    pub fn apart(ranks: u32) -> Self {
        Self { of: (0..ranks).collect() }
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.of.len() as u32
    }

    /// The number of hosts.
    #[must_use]
    pub fn hosts(&self) -> u32 {
        self.of.iter().max().map_or(0, |last| last + 1)
    }

    /// The number of a rank's host.
    ///
    /// # Panics
    ///
    /// When there is no such rank.
    #[must_use]
    pub fn host(&self, rank: Rank) -> u32 {
        self.of[rank as usize]
    }

    /// Whether two ranks are on one host.
    ///
    /// # Panics
    ///
    /// When there is no such rank.
    #[must_use]
    pub fn are_neighbours(&self, rank: Rank, other: Rank) -> bool {
        self.host(rank) == self.host(other)
    }

    /// Whether ranks that this map has on one host are on one host of `other` too.
    #[must_use]
    pub fn is_within(&self, other: &Self) -> bool {
        let first = |rank: usize| self.of[..rank].iter().position(|host| *host == self.of[rank]);
        self.ranks() == other.ranks()
            && (0..self.of.len())
                .all(|rank| first(rank).is_none_or(|first| other.of[first] == other.of[rank]))
    }

    /// By rank: the number of its host.
    #[must_use]
    pub fn by_rank(&self) -> &[u32] {
        &self.of
    }

    /// By host: its ranks, in order.
    #[must_use]
    pub fn members(&self) -> Vec<Vec<Rank>> {
        let mut members = vec![Vec::new(); self.hosts() as usize];
        for (rank, &host) in self.of.iter().enumerate() {
            members[host as usize].push(rank as Rank);
        }
        members
    }
}

impl fmt::Display for HostMap {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list =
            |formatter: &mut fmt::Formatter<'_>, numbers: &mut dyn Iterator<Item = u32>, mark: &str| {
                for (index, number) in numbers.enumerate() {
                    write!(formatter, "{}{number}", if index == 0 { "" } else { mark })?;
                }
                Ok(())
            };
        if !self.of.is_sorted() {
            return list(formatter, &mut self.of.iter().copied(), ",");
        }
        let sizes: Vec<u32> = self.members().iter().map(|ranks| ranks.len() as u32).collect();
        match sizes.first() {
            Some(size) if sizes.iter().all(|other| other == size) => {
                write!(formatter, "{}x{size}", sizes.len())
            }
            _ => list(formatter, &mut sizes.into_iter(), "+"),
        }
    }
}

impl FromStr for HostMap {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let numbers =
            |mark: char| -> Option<Vec<u32>> { text.split(mark).map(|number| number.parse().ok()).collect() };
        let blocks = |sizes: &[u32]| -> Option<Vec<u32>> {
            let total = sizes.iter().try_fold(0_usize, |total, &size| total.checked_add(size as usize));
            let fits = total.is_some_and(|total| total <= RANKS_MAX) && !sizes.contains(&0);
            let host = |(host, &size): (usize, &u32)| std::iter::repeat_n(host as u32, size as usize);
            fits.then(|| sizes.iter().enumerate().flat_map(host).collect())
        };
        let names = if text.contains(',') {
            numbers(',').filter(|names| names.len() <= RANKS_MAX)
        } else if text.contains('x') {
            match numbers('x').as_deref() {
                Some(&[hosts, ranks]) if (1..=RANKS_MAX as u32).contains(&hosts) => {
                    blocks(&vec![ranks; hosts as usize])
                }
                _ => None,
            }
        } else {
            numbers('+').and_then(|sizes| blocks(&sizes))
        };
        let unknown = || UnknownName {
            what: "arrangement of ranks on hosts",
            name: text.to_owned(),
            known: "HOSTSxRANKS (4x2), ranks of each host (3+2), host of each rank (0,1,0,1)".to_owned(),
        };
        names.map(|names| Self::new(&names)).ok_or_else(unknown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_print_as_short_as_they_can_and_read_back() {
        for (names, text) in [
            (&[0, 0, 1, 1, 2, 2][..], "3x2"),
            (&[7, 7, 7, 2, 2], "3+2"),
            (&[5, 3, 5, 3], "0,1,0,1"),
            (&[4, 4], "1x2"),
            (&[1, 2], "2x1"),
        ] {
            let map = HostMap::new(names);
            assert_eq!(map.to_string(), text);
            assert_eq!(text.parse::<HostMap>(), Ok(map));
        }
        assert_eq!("0,0,1".parse::<HostMap>().map(|map| map.to_string()), Ok("2+1".to_owned()));
        for bad in ["", "x", "2x", "0x2", "2x0", "3+0", "1,,2", "a", "2x2x2", "70000x1", "99999999x99999999"]
        {
            assert!(bad.parse::<HostMap>().is_err(), "{bad}");
        }
    }

    #[test]
    fn one_map_is_within_another_when_it_splits_no_less() {
        let map = |text: &str| text.parse::<HostMap>().expect("a map");
        assert!(map("4x1").is_within(&map("2x2")) && map("2x2").is_within(&map("2x2")));
        assert!(map("2x2").is_within(&map("1x4")) && !map("1x4").is_within(&map("2x2")));
        assert!(!map("0,1,0,1").is_within(&map("2x2")) && !map("2x2").is_within(&map("2x3")));
        assert_eq!(map("0,1,0").members(), [vec![0, 2], vec![1]]);
        assert!(map("0,1,0").are_neighbours(0, 2) && !map("0,1,0").are_neighbours(0, 1));
    }
}
