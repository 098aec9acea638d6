//! The facts about a group.

use std::sync::Arc;

use pleach_transport::cuda::Gpu;
use pleach_transport::rendezvous::Fabric;

use super::{Group, GroupName};
use pleach_schedule::hosts::HostMap;

/// The facts about a group besides its rank: see [`Group::info`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupInfo {
    /// The name of the group in errors.
    pub name: GroupName,
    /// The fabric that the ranks agreed on; `None` for a group over a device that the caller gave.
    pub fabric: Option<Fabric>,
    /// The host of each rank, as far as hosts make a difference. Ranks of one host share memory
    /// over [`Fabric::Shm`] and [`Fabric::Hybrid`]. Over sockets alone, all ranks count as ranks of
    /// one host.
    pub hosts: HostMap,
    /// The GPU whose memory the group works on, if it works on a GPU's memory.
    pub gpu: Option<Arc<Gpu>>,
    /// Whether peers reach that memory directly, so that nothing is staged through the host's
    /// memory: neighbours' kernels over shared memory, and NICs over RDMA if the kernel lets them
    /// (see [`pleach_transport::cuda`]).
    pub reaches_gpu: bool,
    /// The connections to peers that this rank has made so far: see
    /// [`Options::connect`](super::Options::connect).
    pub connections: u64,
}

impl Group {
    /// The facts about the group besides its rank. Local.
    #[must_use]
    pub fn info(&self) -> GroupInfo {
        let (name, gpu) = (self.name(), self.shared.gpu.clone());
        let hosts = self.shared.hosts.clone();
        let (reaches_gpu, connections) = (self.shared.shares_gpu, self.shared.setup.connected());
        GroupInfo { name, fabric: self.fabric, hosts, gpu, reaches_gpu, connections }
    }

    /// The name of this group in errors.
    pub(super) fn name(&self) -> GroupName {
        GroupName { number: self.shared.number, rank: self.rank(), world_size: self.world_size() }
    }
}
