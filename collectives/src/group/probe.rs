//! The links of a live group, found by measuring: bandwidth and latency between every two of its
//! ranks.
//!
//! Pairs are measured in rounds, all pairs of a round at the same time. **Invariant:** no rank is
//! in two pairs of a round, and of two pairs across hosts none touch the same host, so no
//! measurement shares a wire or a processor that is known of with another. Between rounds all ranks
//! meet.
//!
//! In a pair one rank drives and then the other: it times notes of 8 bytes there and back, then
//! sends messages, larger and larger until one takes [`LONG_ENOUGH`], each answered by a note. What
//! is measured differs a little from time to time, so it is rounded to two digits that count: then
//! equal links are equal, and symmetric ones symmetric.

use std::time::Duration;

use pleach_packing::topology::{Topology, TopologyError};
use pleach_schedule::hosts::HostMap;
use pleach_transport::clock::now;
use pleach_transport::cuda::Stream;
use pleach_vocabulary::Rank;

use super::{Buffer, CollectiveError, GpuBuffer, Group};

/// Notes there and back of which the median counts, and those before that do not count.
const NOTES: usize = 31;
const NOTES_BEFORE: usize = 4;
/// Messages of the last size, of which the median counts.
const MESSAGES: usize = 3;
/// Length of a note, in bytes: a number.
const NOTE_BYTES: usize = 8;
/// First and last size of messages, in bytes.
const MESSAGE_BYTES_MIN: usize = 64 << 10;
const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// How long a message must take to be measured by.
const LONG_ENOUGH: Duration = Duration::from_millis(40);
/// Digits that count.
const DIGITS: i32 = 2;
/// Least that is told of a link, in bytes a second.
const BYTES_PER_S_MIN: f64 = 1.0;

/// Why links were not measured.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A message did not come.
    #[error("links were not measured: {0}")]
    Collective(#[from] CollectiveError),
    /// What was measured is no topology.
    #[error("what was measured is no topology: {0}")]
    Topology(#[from] TopologyError),
}

impl Group {
    /// Measures what joins the ranks, in as many rounds as it takes: about as many as ranks. All
    /// ranks call it, and all are given the same: ranks named `r0`, `r1`, …, and a link from each
    /// to each, in bytes a second and nanoseconds, both rounded to two digits. What is between
    /// ranks (switches, and links that several pairs share) cannot be seen so.
    pub fn probe(&self) -> Result<Topology, ProbeError> {
        let ranks = self.world_size();
        let group = match self.gpu() {
            Some(gpu) => self.on(&Stream::new(gpu).map_err(CollectiveError::from)?),
            None => self.clone(),
        };
        // Bandwidth and latency to each rank, as bits: words travel in groups on any memory.
        let mut own = vec![0; 2 * ranks as usize];
        for round in rounds(&self.shared.hosts) {
            group.barrier()?;
            let pair = round.iter().find(|pair| pair.0 == self.rank() || pair.1 == self.rank());
            if let Some(&(low, high)) = pair {
                let peer = if self.rank() == low { high } else { low };
                let measured = group.measure_with(peer)?;
                own[2 * peer as usize] = measured.bytes_per_s.to_bits();
                own[2 * peer as usize + 1] = measured.latency_s.to_bits();
            }
        }
        let mut all = vec![0; own.len() * ranks as usize];
        group.gather_words(&own, &mut all)?;
        let mut builder = Topology::builder();
        let nodes: Vec<_> = (0..ranks).map(|rank| builder.rank(format!("r{rank}"))).collect();
        for (row, &from) in all.chunks_exact(own.len()).zip(&nodes) {
            for (link, &to) in row.chunks_exact(2).zip(&nodes).filter(|(_, to)| **to != from) {
                let bytes_per_s = rounded(f64::from_bits(link[0]).max(BYTES_PER_S_MIN)) as u64;
                let latency_ns = rounded(f64::from_bits(link[1]) * 1e9) as u64;
                builder.link(from, to, bytes_per_s.max(1), latency_ns);
            }
        }
        Ok(builder.build()?)
    }

    fn measure_with(&self, peer: Rank) -> Result<Measured, CollectiveError> {
        if self.rank() < peer {
            let measured = self.drive(peer)?;
            self.follow(peer)?;
            Ok(measured)
        } else {
            self.follow(peer)?;
            self.drive(peer)
        }
    }

    /// Measures the link to a peer, which follows.
    fn drive(&self, peer: Rank) -> Result<Measured, CollectiveError> {
        let mut note = ProbeMessage::new(self, NOTE_BYTES)?;
        let mut trips = Vec::with_capacity(NOTES);
        for number in 0..NOTES_BEFORE + NOTES {
            let begin = now();
            note.send(self, peer)?;
            note.recv(self, peer)?;
            if number >= NOTES_BEFORE {
                trips.push(now().since(begin));
            }
        }
        let trip = median(&mut trips);
        let mut bytes = MESSAGE_BYTES_MIN;
        let mut times = Vec::new();
        while times.len() < MESSAGES {
            let message = ProbeMessage::new(self, bytes)?;
            note.store(bytes as u64)?;
            note.send(self, peer)?;
            // The peer says when it has memory.
            note.recv(self, peer)?;
            let begin = now();
            message.send(self, peer)?;
            note.recv(self, peer)?;
            let took = now().since(begin);
            if took < LONG_ENOUGH && bytes < MESSAGE_BYTES_MAX {
                bytes *= 2;
            } else {
                times.push(took);
            }
        }
        note.store(0)?;
        note.send(self, peer)?;
        let took = median(&mut times).saturating_sub(trip / 2);
        Ok(Measured {
            bytes_per_s: bytes as f64 / took.as_secs_f64().max(f64::MIN_POSITIVE),
            latency_s: trip.as_secs_f64() / 2.0,
        })
    }

    /// Answers a peer that drives.
    fn follow(&self, peer: Rank) -> Result<(), CollectiveError> {
        let mut note = ProbeMessage::new(self, NOTE_BYTES)?;
        for _ in 0..NOTES_BEFORE + NOTES {
            note.recv(self, peer)?;
            note.send(self, peer)?;
        }
        loop {
            note.recv(self, peer)?;
            // A peer of the same release asks for no more; its message is checked against this
            // length anyway.
            let bytes = usize::try_from(note.load()?).unwrap_or(0).min(MESSAGE_BYTES_MAX);
            if bytes == 0 {
                return Ok(());
            }
            let mut message = ProbeMessage::new(self, bytes)?;
            note.send(self, peer)?;
            message.recv(self, peer)?;
            note.send(self, peer)?;
        }
    }
}

/// Bytes between two ranks, in the memory that the group works on.
enum ProbeMessage {
    Host(Buffer<u8>),
    Gpu(GpuBuffer<u8>),
}

impl ProbeMessage {
    fn new(group: &Group, bytes: usize) -> Result<Self, CollectiveError> {
        match group.gpu() {
            Some(_) => group.gpu_buffer(bytes).map(Self::Gpu),
            None => group.buffer(bytes).map(Self::Host),
        }
    }

    fn send(&self, group: &Group, peer: Rank) -> Result<(), CollectiveError> {
        match self {
            Self::Host(buffer) => group.send(buffer, peer),
            Self::Gpu(buffer) => group.send(buffer, peer),
        }
    }

    fn recv(&mut self, group: &Group, peer: Rank) -> Result<(), CollectiveError> {
        match self {
            Self::Host(buffer) => group.recv(buffer, peer),
            Self::Gpu(buffer) => group.recv(buffer, peer),
        }
    }

    /// Stores the number of a note.
    fn store(&mut self, number: u64) -> Result<(), CollectiveError> {
        let bytes = number.to_le_bytes();
        match self {
            Self::Host(buffer) => buffer.copy_from_slice(&bytes),
            Self::Gpu(buffer) => buffer.store(&bytes)?,
        }
        Ok(())
    }

    /// Reads the number of a note.
    fn load(&self) -> Result<u64, CollectiveError> {
        let mut bytes = [0; NOTE_BYTES];
        match self {
            Self::Host(buffer) => bytes.copy_from_slice(buffer),
            Self::Gpu(buffer) => buffer.load(&mut bytes)?,
        }
        Ok(u64::from_le_bytes(bytes))
    }
}

/// The link to a peer.
struct Measured {
    bytes_per_s: f64,
    latency_s: f64,
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// To the digits that count.
fn rounded(value: f64) -> f64 {
    if value <= 0.0 {
        return 0.0;
    }
    let unit = 10f64.powi(value.log10().floor() as i32 - (DIGITS - 1));
    (value / unit).round() * unit
}

/// All pairs of ranks, lower one first, in rounds of pairs that have no rank in common and, across
/// hosts, no host either.
fn rounds(hosts: &HostMap) -> Vec<Vec<(Rank, Rank)>> {
    let ranks = hosts.ranks();
    // A tournament: one place stays, the others move on around it; with an odd number somebody
    // pauses.
    let places = ranks + ranks % 2;
    let mut rounds = Vec::new();
    for turn in 0..places.saturating_sub(1) {
        let at = |place: u32| if place == 0 { 0 } else { (place - 1 + turn) % (places - 1) + 1 };
        let pairs = (0..places / 2).map(|place| (at(place), at(places - 1 - place)));
        let pairs = pairs.map(|(one, other)| (one.min(other), one.max(other)));
        rounds.extend(apart(hosts, pairs.filter(|&(_, high)| high < ranks).collect()));
    }
    rounds
}

/// The pairs of a round in as few rounds as keep pairs across hosts from sharing a host.
fn apart(hosts: &HostMap, mut pairs: Vec<(Rank, Rank)>) -> Vec<Vec<(Rank, Rank)>> {
    let mut rounds = Vec::new();
    while !pairs.is_empty() {
        let mut is_taken = vec![false; hosts.hosts() as usize];
        let (now, later): (Vec<_>, Vec<_>) = pairs.into_iter().partition(|&(low, high)| {
            let (here, there) = (hosts.host(low) as usize, hosts.host(high) as usize);
            let is_free = here == there || !(is_taken[here] || is_taken[there]);
            if here != there && is_free {
                (is_taken[here], is_taken[there]) = (true, true);
            }
            is_free
        });
        rounds.push(now);
        pairs = later;
    }
    rounds
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_two_ranks_meet_once_and_no_rank_or_wire_is_in_two_pairs_at_a_time() {
        for text in ["1x2", "1x5", "1x8", "8x1", "2x4", "3+2", "0,1,0,1,2", "4x3"] {
            let hosts: HostMap = text.parse().expect("a map");
            let rounds = rounds(&hosts);
            let mut met = BTreeSet::new();
            for round in &rounds {
                let (mut busy, mut wires) = (BTreeSet::new(), BTreeSet::new());
                for &(low, high) in round {
                    assert!(low < high && met.insert((low, high)), "{text}: {low} {high}");
                    assert!(busy.insert(low) && busy.insert(high), "{text}: {round:?}");
                    if !hosts.are_neighbours(low, high) {
                        assert!(wires.insert(hosts.host(low)) && wires.insert(hosts.host(high)), "{text}");
                    }
                }
            }
            let ranks = hosts.ranks() as usize;
            assert_eq!(met.len(), ranks * (ranks - 1) / 2, "{text}");
            if hosts.hosts() == hosts.ranks() || hosts.hosts() == 1 {
                assert_eq!(rounds.len(), (ranks + ranks % 2).saturating_sub(1), "{text}: as few as can be");
            }
        }
    }

    #[test]
    fn two_digits_count() {
        for (value, expected) in
            [(0.0, 0.0), (1.0, 1.0), (99.6, 100.0), (12_345.0, 12_000.0), (0.0567, 0.057)]
        {
            assert!((rounded(value) - expected).abs() < 1e-9, "{value}: {}", rounded(value));
        }
    }
}
