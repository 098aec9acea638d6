//! Parts of a world: devices of ranks that have met before, made without another meeting.
//!
//! Ranks that have met know the hosts, the processors and the secret of each other
//! ([`KnownRanks`]). So ranks that become a part of their own need nothing but the addresses of
//! each other's new devices, which they tell each other by whatever way joins them: a group has its
//! all-gather. A rank opens its device ([`KnownRanks::open`]), the addresses are told, and each
//! connects to those that it needs ([`OpenedPart::connect`]).
//!
//! **Invariants:**
//!
//! * All members take the same fabric and the same hosts, because each computes them from what all
//!   have learnt when they met.
//! * The secret of a part is derived from that of the whole and the part's name, so a device never
//!   takes one of another part for a peer, though both are of one job.
//! * A listener exists before its address is told, so a member that was told all addresses finds
//!   every listener of a rank that has not ended.

use std::sync::Arc;

use super::{
    CONNECT_ON_USE_LIMIT, Fabric, FabricChoice, Hosts, JoinError, JoinOptions, Joined, RankRecord, World,
    config, connect_to, listening_address, ranks_a_processor,
};
use crate::auth::Secret;
use crate::clock::now;
use crate::device::{Address, Device, Responder};
use crate::hybrid::HostId;
use crate::rendezvous::{DeviceFactory, SystemDevices};
use crate::{Nanos, Rank};

/// What the ranks of a world know of each other since they have met; see the module.
#[derive(Clone)]
pub struct KnownRanks {
    /// The fabric between them.
    fabric: Fabric,
    /// Whether the caller named it: then parts have no other one.
    is_asked_for: bool,
    /// Of their devices.
    secret: Secret,
    /// By rank.
    records: Vec<Arc<RankRecord>>,
    /// By rank: the number of its host.
    hosts: Vec<u32>,
}

impl KnownRanks {
    pub(super) fn new(
        fabric: Fabric,
        asked: FabricChoice,
        secret: Secret,
        records: Vec<RankRecord>,
        hosts: Vec<u32>,
    ) -> Arc<Self> {
        let is_asked_for = matches!(asked, FabricChoice::Only(_));
        let records = records.into_iter().map(|record| Arc::new(record.of_known_rank())).collect();
        Arc::new(Self { fabric, is_asked_for, secret, records, hosts })
    }

    /// What these ranks know of each other as a part of this name, in which they have other
    /// numbers: their places in the list.
    ///
    /// # Panics
    ///
    /// When there is no such rank.
    #[must_use]
    pub fn part(&self, members: &[Rank], name: &str) -> Self {
        let records = members.iter().map(|rank| self.records[*rank as usize].clone()).collect();
        let hosts = Hosts::of_numbers(members.iter().map(|rank| self.hosts[*rank as usize]));
        let is_one_host = hosts.count() == 1;
        let fabric = match self.fabric {
            fabric if self.is_asked_for => fabric,
            Fabric::Hybrid | Fabric::HybridVerbs if is_one_host => Fabric::Shm,
            Fabric::Hybrid if hosts.fabric() == Fabric::Tcp => Fabric::Tcp,
            Fabric::HybridVerbs if hosts.fabric() == Fabric::Tcp => Fabric::Verbs,
            fabric => fabric,
        };
        let secret = self.secret.of_part(name);
        Self { fabric, is_asked_for: self.is_asked_for, secret, records, hosts: hosts.of }
    }

    /// Opens the device of this rank, which is that of `world`. `on_use`: pairs connect when their
    /// first use comes, whenever that is.
    ///
    /// # Errors
    ///
    /// [`JoinError::Fabric`], and what keeps this rank from listening.
    pub fn open(
        self,
        world: &World,
        options: &JoinOptions,
        responder: Arc<dyn Responder>,
        on_use: bool,
    ) -> Result<OpenedPart, JoinError> {
        let records: Vec<RankRecord> = self.records.iter().map(|record| (**record).clone()).collect();
        let address = match self.fabric {
            // Ranks that share memory are on one host.
            Fabric::Shm => None,
            _ => listening_address(world, &records, false)?,
        };
        let hosts = self.hosts.iter().zip(&records);
        let hosts: Vec<_> =
            hosts.map(|(number, record)| HostId::new(*number, record.host.as_deref())).collect();
        let limit = if on_use { CONNECT_ON_USE_LIMIT } else { options.timeout };
        let config = config(world, options, (self.secret.clone(), address), limit, responder);
        let made = SystemDevices.make(self.fabric, hosts[world.rank as usize], &hosts, config);
        let failed = |error: &dyn ToString| JoinError::Fabric {
            fabric: self.fabric,
            rank: world.rank,
            reason: error.to_string(),
        };
        let device = made.map_err(|error| failed(&error))?;
        let own = &records[world.rank as usize];
        let ranks_here = records.iter().filter(|record| own.same_machine(record)).count() as u32;
        Ok(OpenedPart { ranks_here, ranks_a_processor: ranks_a_processor(&records), known: self, device })
    }
}

/// The device of a rank in a part, which listens and is connected to no other.
pub struct OpenedPart {
    known: KnownRanks,
    ranks_here: u32,
    ranks_a_processor: Vec<u32>,
    device: Box<dyn Device>,
}

impl OpenedPart {
    /// The fabric between the members.
    #[must_use]
    pub fn fabric(&self) -> Fabric {
        self.known.fabric
    }

    /// The address of the device, to be told to the other members.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.device.info().address
    }

    /// Connects to these ranks, each of which connects to this one too. `addresses`: of all
    /// members, by rank. `ended`: why not all come any more, once that is known.
    ///
    /// # Errors
    ///
    /// [`JoinError::Fabric`], at the latest at `deadline`.
    pub fn connect(
        mut self,
        addresses: Vec<Address>,
        peers: Vec<Rank>,
        deadline: Nanos,
        ended: impl Fn() -> Option<String>,
    ) -> Result<Joined, JoinError> {
        let (rank, world_size) = (self.device.info().rank, addresses.len() as u32);
        let address_of = |peer: Rank| &*addresses[peer as usize].0;
        let mut events = Vec::new();
        let device = &mut *self.device;
        let reached = connect_to(device, peers, address_of, (now(), deadline), &ended, &mut events);
        let fabric = self.known.fabric;
        reached.map_err(|error| JoinError::Fabric { fabric, rank, reason: error.to_string() })?;
        Ok(Joined {
            rank,
            world_size,
            local_rank: None,
            ranks_here: self.ranks_here,
            ranks_a_processor: self.ranks_a_processor,
            fabric,
            hosts: self.known.hosts.clone(),
            device: self.device,
            addresses,
            events,
            known: Some(Arc::new(self.known)),
            store: None,
            deadline,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(fabric: Fabric, asked: FabricChoice, hosts: &[u32]) -> Arc<KnownRanks> {
        let record = || RankRecord::own(hosts.len() as u32, None, None, None, &[]);
        let records = hosts.iter().map(|_| record()).collect();
        KnownRanks::new(fabric, asked, Secret::fresh(), records, hosts.to_vec())
    }

    #[test]
    fn a_part_has_the_fabric_of_its_hosts_unless_the_caller_named_one() {
        use Fabric::{Hybrid, HybridVerbs, Shm, Tcp, Verbs};
        let hosts = [0, 0, 1, 2, 2];
        // Members; the fabric where sockets join hosts, and where RDMA does; hosts.
        let rows: [(&[Rank], [Fabric; 2], &[u32]); 5] = [
            (&[0, 1], [Shm, Shm], &[0, 0]),
            (&[4, 3], [Shm, Shm], &[0, 0]),
            (&[4, 2, 0], [Tcp, Verbs], &[0, 1, 2]),
            (&[3, 4, 1], [Hybrid, HybridVerbs], &[0, 0, 1]),
            (&[2], [Shm, Shm], &[0]),
        ];
        for (members, fabrics, numbers) in rows {
            for (whole, expected) in [Hybrid, HybridVerbs].into_iter().zip(fabrics) {
                let part = known(whole, FabricChoice::Auto, &hosts).part(members, "s0-0");
                assert_eq!((part.fabric, &*part.hosts), (expected, numbers), "{members:?}");
                let part = known(whole, FabricChoice::Only(whole), &hosts).part(members, "s0-0");
                assert_eq!((part.fabric, &*part.hosts), (whole, numbers), "{members:?}");
            }
            for whole in [Shm, Tcp, Verbs] {
                assert_eq!(known(whole, FabricChoice::Auto, &hosts).part(members, "s0-0").fabric, whole);
            }
        }
    }

    #[test]
    fn parts_have_secrets_of_their_own_which_all_members_derive_alike() {
        let whole = known(Fabric::Tcp, FabricChoice::Auto, &[0, 1, 2]);
        let secret = |members: &[Rank], name: &str| whole.part(members, name).secret.as_bytes().to_vec();
        let first = secret(&[0, 1], "s0-0");
        assert_eq!(first, secret(&[0, 1], "s0-0"));
        assert_ne!(first, secret(&[0, 1], "s1-0"));
        assert_ne!(first, whole.secret.as_bytes());
        assert!(whole.part(&[0, 1], "s0-0").secret.is_of_this_host());
        let again = whole.part(&[0, 1], "s0-0").part(&[0, 1], "s0-0");
        assert_ne!(first, again.secret.as_bytes());
    }
}
