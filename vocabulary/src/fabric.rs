//! Fabrics, by name.

use std::fmt;
use std::str::FromStr;

use crate::name::{UnknownName, named};

/// The transport that moves bytes between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fabric {
    /// Shared memory of one host.
    Shm,
    /// TCP sockets.
    Tcp,
    /// Shared memory between ranks of one host, TCP sockets between hosts.
    Hybrid,
    /// RDMA, by libibverbs.
    Verbs,
    /// Shared memory between ranks of one host, RDMA between hosts.
    HybridVerbs,
}

impl Fabric {
    /// Every fabric.
    pub const ALL: [Self; 5] = [Self::Shm, Self::Tcp, Self::Hybrid, Self::Verbs, Self::HybridVerbs];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Hybrid => "shm+tcp",
            Self::Verbs => "verbs",
            Self::HybridVerbs => "shm+verbs",
        }
    }
}

impl fmt::Display for Fabric {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Fabric {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        named("fabric", &Self::ALL, Self::name, name)
    }
}

/// Which fabric a group takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FabricChoice {
    /// Shared memory between ranks that can share it. Between all other ranks RDMA, if each rank
    /// has a device and the ports of these devices reach each other; otherwise TCP sockets.
    #[default]
    Auto,
    /// This fabric. If it is not available the group is not made: no other fabric is taken.
    Only(Fabric),
}

impl FabricChoice {
    /// Every choice.
    pub const ALL: [Self; 6] = [
        Self::Only(Fabric::Shm),
        Self::Only(Fabric::Tcp),
        Self::Only(Fabric::Hybrid),
        Self::Only(Fabric::Verbs),
        Self::Only(Fabric::HybridVerbs),
        Self::Auto,
    ];

    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Only(fabric) => fabric.name(),
        }
    }
}

impl FromStr for FabricChoice {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        named("fabric", &Self::ALL, Self::name, name)
    }
}

impl fmt::Display for FabricChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}
