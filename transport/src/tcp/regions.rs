//! The regions of this rank by key, and the peers that rely on each.

use crate::Rank;
use crate::control::FabricMessage;
use crate::region::{KeyMap, Region, RegionKey, RemoteSlice, Slice, WeakRegion};
use crate::wire::{Malformed, Reader};

/// Tells the peers that rely on a key that its region is gone. Comes before any message that was
/// posted after the release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Revoked(pub(super) RegionKey);

impl Revoked {
    pub(super) fn encode(self) -> [u8; 8] {
        self.0.0.to_le_bytes()
    }
}

impl FabricMessage for Revoked {
    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let key = RegionKey(reader.u64()?);
        reader.end()?;
        Ok(Self(key))
    }
}

/// This rank's regions, owned by the polling thread: a lookup takes no lock.
#[derive(Default)]
pub(super) struct Regions {
    by_key: KeyMap<RegionEntry>,
}

struct RegionEntry {
    region: WeakRegion,
    peers_may_write: bool,
    /// The only peer that it is for.
    only: Option<Rank>,
    /// Another process has the rank that it was for.
    is_orphaned: bool,
    /// Peers that know that the key is valid, and must be told when it is not.
    informed_peers: Vec<Rank>,
}

impl Regions {
    /// Enters a region, for one peer or for all.
    pub(super) fn insert(&mut self, region: &Region, only: Option<Rank>) {
        let peers_may_write = region.memory().peers_may_write();
        let (is_orphaned, informed_peers) = (false, Vec::new());
        let entry =
            RegionEntry { region: region.downgrade(), peers_may_write, only, is_orphaned, informed_peers };
        self.by_key.insert(region.key(), entry);
    }

    /// The slice that a peer names to write or only to read it, if it may; it keeps the memory
    /// alive.
    pub(super) fn find(&self, named: &RemoteSlice, peer: Rank, writes: bool) -> Option<Slice> {
        let entry = self.by_key.get(&named.key).filter(|entry| entry.peers_may_write || !writes)?;
        if entry.is_orphaned || entry.only.is_some_and(|only| only != peer) {
            return None;
        }
        let region = entry.region.upgrade()?;
        let start = usize::try_from(named.offset).ok()?;
        let end = start.checked_add(usize::try_from(named.len).ok()?)?;
        region.slice(start..end).ok()
    }

    /// Records that `peer` knows the key as valid; returns the region's length.
    pub(super) fn grant(&mut self, key: RegionKey, peer: Rank) -> Option<u64> {
        let known = self.by_key.get_mut(&key)?;
        let len = known.region.upgrade()?.len();
        if !known.informed_peers.contains(&peer) {
            known.informed_peers.push(peer);
        }
        Some(len as u64)
    }

    /// Takes memory for this peer alone from all peers: another process gets its rank.
    pub(super) fn orphan(&mut self, peer: Rank) {
        for entry in self.by_key.values_mut() {
            entry.is_orphaned |= entry.only == Some(peer);
            // The other process knows no key.
            entry.informed_peers.retain(|informed| *informed != peer);
        }
    }

    /// Removes a region; returns the peers to tell.
    pub(super) fn remove(&mut self, key: RegionKey) -> Vec<Rank> {
        self.by_key.remove(&key).map(|known| known.informed_peers).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revoked_key_comes_back_and_other_lengths_are_refused() {
        let revoked = Revoked(RegionKey(0x0102_0304_0506_0708));
        assert_eq!(Revoked::decode(&revoked.encode()), Ok(revoked));
        assert_eq!((Revoked::decode(&[0; 7]), Revoked::decode(&[0; 9])), (Err(Malformed), Err(Malformed)));
    }
}
