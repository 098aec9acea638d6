//! Where a topology comes from, and why one did not.

use crate::topology::presets::PresetError;

/// Why no topology was read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologySourceError {
    /// A preset that is not there or cannot be as asked for.
    #[error(transparent)]
    Preset(#[from] PresetError),
}
