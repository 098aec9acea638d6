//! What there is to know of a group that does not change.

use std::sync::Arc;

use pleach_transport::cuda::Gpu;
use pleach_transport::rendezvous::Fabric;

use super::{Group, GroupName};
use pleach_schedule::hosts::HostMap;

/// What there is to know of a group beside its rank: see [`Group::info`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupInfo {
    /// What errors call it.
    pub name: GroupName,
    /// What the ranks agreed to move bytes over; `None` for a group over a device of the caller's.
    pub fabric: Option<Fabric>,
    /// Which rank is on which host, as far as that makes a difference: ranks of one host share
    /// memory over [`Fabric::Shm`] and [`Fabric::Hybrid`]; over sockets alone all count as being on
    /// one.
    pub hosts: HostMap,
    /// The GPU whose memory the group works on, if it works on one's.
    pub gpu: Option<Arc<Gpu>>,
    /// Whether peers reach that memory themselves, so that nothing is staged through the host's:
    /// neighbours' kernels over shared memory, NICs over RDMA where the kernel lets them (see
    /// [`pleach_transport::cuda`]).
    pub reaches_gpu: bool,
}

impl Group {
    /// What there is to know of it beside its rank. Local.
    #[must_use]
    pub fn info(&self) -> GroupInfo {
        let (name, gpu) = (self.name(), self.shared.gpu.clone());
        let hosts = self.shared.hosts.clone();
        GroupInfo { name, fabric: self.fabric, hosts, gpu, reaches_gpu: self.shared.shares_gpu }
    }

    /// What errors call this group.
    pub(super) fn name(&self) -> GroupName {
        GroupName { number: self.shared.number, rank: self.rank(), world_size: self.world_size() }
    }
}
