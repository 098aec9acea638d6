//! Links that change between collectives: one was repaired, or has lost part of its bandwidth.

use pleach_packing::topology::Topology;
use pleach_schedule::wiring::topology_digest;
use pleach_vocabulary::Rank;

use super::join::wiring;
use super::{CollectiveError, Group};

/// Sets the calls apart from a caller's own all-gather.
const TOPOLOGY_MARK: u32 = 0x544f_504f;

/// Why the links of a group were not changed.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum SetTopologyError {
    /// The ranks could not tell each other what they were told.
    #[error("the topology was not set: {0}")]
    Collective(#[from] CollectiveError),
    /// Ranks were told of different links; the group goes on with those that it had.
    #[error(
        "the topology was not set: rank {rank} was given {theirs}, this rank {own}; give all ranks the same topology"
    )]
    Differs {
        /// The first rank whose topology differs from this rank's.
        rank: Rank,
        /// What it was told.
        theirs: TopologyName,
        /// What this rank was told.
        own: TopologyName,
    },
    /// The topology is one of other ranks; the group goes on with the links that it had.
    #[error("the topology has {nodes} ranks, the group {ranks}; give that of the group's ranks")]
    Ranks {
        /// How many ranks the topology has.
        nodes: u32,
        /// How many the group has.
        ranks: u32,
    },
}

/// A topology as ranks compare it: by a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyName {
    /// How many ranks it has; 0 for none.
    pub ranks: u64,
    /// Equal topologies have the same.
    pub digest: u64,
}

impl std::fmt::Display for TopologyName {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.ranks {
            0 => formatter.write_str("no topology"),
            ranks => write!(formatter, "topology {:016x} of {ranks} ranks", self.digest),
        }
    }
}

impl Group {
    /// Tells the group which links join its ranks from now on; `None`: the links are unknown. All
    /// ranks call it with the same topology. Later calls are packed and chosen anew. Calls under
    /// way and [persistent](super::Persistent) calls keep their schedules.
    ///
    /// # Errors
    ///
    /// See [`SetTopologyError`]; the group goes on with the links that it had. When ranks were
    /// given different topologies, all of them are told.
    pub fn set_topology(&self, topology: Option<&Topology>) -> Result<(), SetTopologyError> {
        let world_size = self.world_size();
        let own =
            topology.map_or([0, 0], |topology| [u64::from(topology.ranks()), topology_digest(topology)]);
        let mut all = vec![0u64; 2 * world_size as usize];
        let plain = Self { variant: None, stream: None, ..self.tagged_further(TOPOLOGY_MARK) };
        plain.gather_words(&own, &mut all)?;
        let name = |words: &[u64]| TopologyName { ranks: words[0], digest: words[1] };
        let different = all.chunks_exact(2).zip(0..).find(|(words, _)| *words != own);
        if let Some((theirs, rank)) = different {
            return Err(SetTopologyError::Differs { rank, theirs: name(theirs), own: name(&own) });
        }
        if let Some(topology) = topology
            && topology.ranks() != world_size
        {
            return Err(SetTopologyError::Ranks { nodes: topology.ranks(), ranks: world_size });
        }
        let mut core = self.shared.driver.lock();
        let links = topology.map(|topology| wiring(topology, core.planner.platform()));
        core.planner.take_links(links);
        Ok(())
    }

    /// The links that the group was told of.
    #[must_use]
    pub fn topology(&self) -> Option<Topology> {
        self.shared.driver.lock().planner.wiring().map(|wiring| wiring.topology().clone())
    }
}
