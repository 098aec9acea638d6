//! The links between the ranks of a group, and what has been packed for them.
//!
//! A [`Wiring`] is a [`Topology`] that a group is told of. It packs for each collective when that
//! is asked for first, and keeps what came of it. **Invariant:** what it gives depends on the
//! topology and the options alone, so ranks that were told of the same links choose the same
//! schedules; [`Wiring::digest`] is what they compare.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pleach_packing::latency::{flatter, soonest_of};
use pleach_packing::topology::{NodeKind, Topology};
use pleach_packing::{PackError, PackOptions, Packing, pack};
use pleach_vocabulary::{Collective, Rank};

use crate::digest::Hasher64;
use crate::generate::Algorithm;
use crate::generate::packed::{PackedError, PackedTrees};
use crate::{Op, Schedule};

mod routes;

pub use routes::{Route, Routes};

/// Links of a group. See the module.
#[derive(Debug)]
pub struct Wiring {
    topology: Topology,
    options: PackOptions,
    /// What a message costs its sender besides its bytes, in nanoseconds.
    message_ns: u64,
    routes: Routes,
    digest: u64,
    packed: Mutex<BTreeMap<Collective, Result<Arc<Packed>, WiringError>>>,
    flat: Mutex<BTreeMap<Collective, Flat>>,
}

/// What there is besides the optimum for a collective, for messages that are short.
#[derive(Debug)]
struct Flat {
    /// The optimum first, then flatter ones.
    packings: Vec<Packing>,
    /// Those that were asked for, by their places.
    ready: BTreeMap<usize, Arc<Packed>>,
}

/// A packing with what was made of it.
#[derive(Debug)]
pub struct Packed {
    /// The packing itself.
    pub packing: Packing,
    /// For schedules.
    pub trees: Arc<PackedTrees>,
    /// The routes that the packing says.
    pub routes: Routes,
}

/// Why there is no packing to be carried out.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WiringError {
    /// Nothing could be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// What was packed is no packing of these ranks.
    #[error(transparent)]
    Packed(#[from] PackedError),
    /// Its paths are no paths.
    #[error("the packing's way from rank {from} to rank {to} is no path over links of its topology")]
    NoRoute {
        /// Where the path should begin.
        from: Rank,
        /// Where it should end.
        to: Rank,
    },
}

impl PartialEq for Wiring {
    fn eq(&self, other: &Self) -> bool {
        let key = |wiring: &Self| (wiring.digest, wiring.message_ns);
        key(self) == key(other) && self.topology == other.topology && self.options == other.options
    }
}

impl Wiring {
    /// These links, with nothing packed yet. Messages cost nothing besides their bytes.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let routes = Routes::new(&topology, None).expect("the shortest paths of a connected topology");
        let digest = topology_digest(&topology);
        Self {
            topology,
            options: PackOptions::default(),
            message_ns: 0,
            routes,
            digest,
            packed: Mutex::default(),
            flat: Mutex::default(),
        }
    }

    /// The same, packed in this way.
    #[must_use]
    pub fn packed_by(self, options: PackOptions) -> Self {
        let mut hasher = Hasher64::default();
        hasher.write_u64(topology_digest(&self.topology));
        hasher.write(format!("{options:?}").as_bytes());
        Self { options, digest: hasher.finish(), packed: Mutex::default(), flat: Mutex::default(), ..self }
    }

    /// The same where a message costs its sender so much besides its bytes: the more, the fewer
    /// chunks.
    #[must_use]
    pub fn with_message_cost(self, cost: Duration) -> Self {
        Self { message_ns: u64::try_from(cost.as_nanos()).unwrap_or(u64::MAX), ..self }
    }

    /// The same with this packing in place of what would be packed for its collective.
    ///
    /// # Errors
    ///
    /// It is no packing of these links.
    pub fn with_packing(self, packing: Packing) -> Result<Self, WiringError> {
        let collective = packing.collective;
        let mut hasher = Hasher64::default();
        let packed = self.prepared(packing)?;
        hasher.write_u64(self.digest);
        hasher.write_u64(packed.trees.digest());
        let digest = hasher.finish();
        let packed = Arc::new(packed);
        let packings = vec![packed.packing.clone()];
        // For all sizes, as it was asked for.
        let only = Flat { packings, ready: BTreeMap::from([(0, packed.clone())]) };
        locked(&self.flat).insert(collective, only);
        locked(&self.packed).insert(collective, Ok(packed));
        Ok(Self { digest, ..self })
    }

    /// The links.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The shortest path between any two ranks, which leads over other ranks only where switches do
    /// not join the two.
    #[must_use]
    pub fn routes(&self) -> &Routes {
        &self.routes
    }

    /// A number that is the same on ranks that were told of the same links.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// What is packed for a collective: made when it is asked for first, which can take seconds.
    ///
    /// # Errors
    ///
    /// See [`WiringError`].
    pub fn packed(&self, collective: Collective) -> Result<Arc<Packed>, WiringError> {
        let mut known = locked(&self.packed);
        let make = || Ok(Arc::new(self.prepared(pack(&self.topology, collective, &self.options)?)?));
        known.entry(collective).or_insert_with(make).clone()
    }

    /// What carries so many bytes (of what the packing's rate counts) soonest: the optimum, or
    /// where that was not said otherwise by the options one with fewer or less deep trees. The same
    /// for sizes of as many bits.
    ///
    /// # Errors
    ///
    /// See [`WiringError`].
    pub fn packed_for(&self, collective: Collective, bytes: u64) -> Result<Arc<Packed>, WiringError> {
        let optimum = self.packed(collective)?;
        if !self.options.may_be_flat() {
            return Ok(optimum);
        }
        let largest = bytes.checked_next_power_of_two().unwrap_or(u64::MAX);
        let mut known = locked(&self.flat);
        let flat = known.entry(collective).or_insert_with(|| {
            let mut packings = flatter(&optimum.packing, &self.topology);
            packings.insert(0, optimum.packing.clone());
            Flat { packings, ready: BTreeMap::from([(0, optimum)]) }
        });
        let place = soonest_of(&flat.packings, &self.topology, largest);
        if let Some(packed) = flat.ready.get(&place) {
            return Ok(packed.clone());
        }
        let packed = Arc::new(self.prepared(flat.packings[place].clone())?);
        flat.ready.insert(place, packed.clone());
        Ok(packed)
    }

    /// The packing that an algorithm carries out, if it is one of these links.
    #[must_use]
    pub fn carried_out_by(&self, collective: Collective, algorithm: &Algorithm) -> Option<Arc<Packed>> {
        let Algorithm::Packed(Some(trees)) = algorithm else { return None };
        let optimum = self.packed(collective).ok().filter(|packed| packed.trees == *trees);
        optimum.or_else(|| {
            let known = locked(&self.flat);
            known.get(&collective)?.ready.values().find(|packed| packed.trees == *trees).cloned()
        })
    }

    /// The first two ranks between which a schedule puts but no link or path through switches
    /// leads.
    #[must_use]
    pub fn missing_link(&self, schedule: &Schedule) -> Option<(Rank, Rank)> {
        let puts = (0..).zip(&schedule.programs).flat_map(|(from, lanes)| {
            let steps = lanes.iter().flat_map(|lane| &lane.steps);
            steps.filter_map(move |step| match step.op {
                Op::Put { to, .. } => Some((from, to)),
                _ => None,
            })
        });
        puts.into_iter().find(|&(from, to)| self.not_joined(from, to).is_some())
    }

    /// The names of two ranks that no link or path through switches leads from and to.
    #[must_use]
    pub fn not_joined(&self, from: Rank, to: Rank) -> Option<[&str; 2]> {
        let links = self.routes.between(from, to)[0].links.iter().skip(1);
        let mut between = links.map(|&link| self.routes.links()[link].from);
        let passes_rank = between.any(|node| self.topology.rank(node).is_some());
        let name = |rank: Rank| self.topology.name(self.topology.node(rank));
        passes_rank.then(|| [name(from), name(to)])
    }

    fn prepared(&self, packing: Packing) -> Result<Packed, WiringError> {
        let trees = Arc::new(PackedTrees::new(&packing, &self.topology, self.message_ns)?);
        let routes = Routes::new(&self.topology, Some(&packing))?;
        Ok(Packed { packing, trees, routes })
    }
}

fn locked<T>(known: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is half done when a packer panics.
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number of a topology that equal ones have in common.
#[must_use]
pub fn topology_digest(topology: &Topology) -> u64 {
    let mut hasher = Hasher64::default();
    for node in topology.nodes() {
        hasher.write(node.name.as_bytes());
        hasher.write_u8(match node.kind {
            NodeKind::Rank => 1,
            NodeKind::Switch => 2,
        });
    }
    for link in topology.links() {
        hasher.write_u32(link.from.0);
        hasher.write_u32(link.to.0);
        hasher.write_u64(link.bytes_per_s);
        hasher.write_u64(link.latency_ns);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests;
