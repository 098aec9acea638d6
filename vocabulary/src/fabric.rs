//! Kinds of devices, by name.

use std::fmt;
use std::str::FromStr;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fabric {
    /// Shared memory of one host.
    Shm,
    /// Sockets.
    Tcp,
    /// Shared memory between ranks of one host, sockets across.
    Hybrid,
    /// RDMA.
    Verbs,
    /// Shared memory between ranks of one host, RDMA across.
    HybridVerbs,
}

impl fmt::Display for Fabric {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Hybrid => "shm+tcp",
            Self::Verbs => "verbs",
            Self::HybridVerbs => "shm+verbs",
        })
    }
}

/// Which kind of device to take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum FabricChoice {
    /// Shared memory between ranks that can share it; between all others RDMA where each rank has a
    /// device whose ports reach each other, else sockets.
    #[default]
    Auto,
    /// This one or none: where it cannot be had that is an error, never another fabric.
    Only(Fabric),
}

/// A text that names no fabric.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[error("unknown fabric: '{text}'; choose shm, tcp, shm+tcp, verbs, shm+verbs or auto")]
pub struct UnknownFabric {
    /// The text.
    pub text: String,
}

impl FromStr for FabricChoice {
    type Err = UnknownFabric;

    fn from_str(text: &str) -> Result<Self, UnknownFabric> {
        match text {
            "auto" => Ok(Self::Auto),
            "shm" => Ok(Self::Only(Fabric::Shm)),
            "tcp" => Ok(Self::Only(Fabric::Tcp)),
            "shm+tcp" => Ok(Self::Only(Fabric::Hybrid)),
            "verbs" => Ok(Self::Only(Fabric::Verbs)),
            "shm+verbs" => Ok(Self::Only(Fabric::HybridVerbs)),
            _ => Err(UnknownFabric { text: text.to_owned() }),
        }
    }
}

impl fmt::Display for FabricChoice {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => formatter.write_str("auto"),
            Self::Only(fabric) => fabric.fmt(formatter),
        }
    }
}
