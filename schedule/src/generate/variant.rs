//! [`Variant`]: an algorithm with its parameters.

use std::fmt;

use super::{Access, Algorithm};

/// How a collective is carried out. What is not set here is chosen from the cost model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// How peers are reached.
    pub access: Option<Access>,
    /// How many chunks of a block may be under way at once.
    pub window: Option<u32>,
    /// How many bytes a chunk of the longest block has at most.
    pub chunk_bytes: Option<u64>,
}

impl From<Algorithm> for Variant {
    fn from(algorithm: Algorithm) -> Self {
        Self { algorithm, access: None, window: None, chunk_bytes: None }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.algorithm.fmt(formatter)?;
        if let Some(access) = self.access {
            write!(formatter, " {access}")?;
        }
        self.window.map_or(Ok(()), |window| write!(formatter, " window {window}"))?;
        self.chunk_bytes.map_or(Ok(()), |bytes| write!(formatter, " chunk {bytes}"))
    }
}
