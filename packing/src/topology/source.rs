//! The sources of topologies, and why a source cannot be read.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::topology::machine::{self, MachineError};
use crate::topology::presets::{self, PRESETS, PresetError};
use crate::topology::text::{TextError, TextFault, Texts};
use crate::topology::{Topology, file, nccl, smi};

#[cfg(test)]
mod tests;

/// Length limit of a file, in bytes: that of about 200,000 links.
pub const FILE_BYTES_MAX: u64 = 16 << 20;

/// The name of this machine as a source.
pub const THIS_MACHINE: &str = "machine";

/// Where a topology came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The name of a preset.
    Preset,
    /// This machine.
    Machine,
    /// A TOML file.
    Toml,
    /// An NCCL topology XML file.
    NcclXml,
    /// The text of `nvidia-smi topo -m`, which does not say what one NVLink carries.
    SmiMatrix {
        /// The bandwidth that was assumed in each direction, in bytes a second.
        nvlink_bytes_per_s: u64,
    },
}

/// Values that a source does not contain.
#[derive(Clone, Copy, Debug)]
pub struct SourceOptions {
    /// The bandwidth of one NVLink of an `nvidia-smi topo -m` in each direction, in bytes a second.
    pub nvlink_bytes_per_s: u64,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self { nvlink_bytes_per_s: smi::NVLINK_BYTES_PER_S }
    }
}

/// Why no topology was read.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologySourceError {
    /// A preset that does not exist, or that cannot have these numbers.
    #[error(transparent)]
    Preset(#[from] PresetError),
    /// No source has this name.
    #[error(
        "'{name}' is neither a file nor a preset; presets are {}, and {THIS_MACHINE} for this one",
        presets::forms()
    )]
    Neither {
        /// The name.
        name: String,
    },
    /// A file that cannot be read.
    #[error("{}: {error}", path.display())]
    Read {
        /// The path.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The file is longer than [`FILE_BYTES_MAX`].
    #[error("{}: longer than {FILE_BYTES_MAX} bytes, which no topology is", path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// A file with an error in it.
    #[error("{}:{error}", path.display())]
    Text {
        /// The path.
        path: PathBuf,
        /// The error and its position.
        error: Box<TextError>,
    },
    /// The machine has no GPUs, or does not show them.
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// The topology of a file. The form of the file follows from its contents: TOML, an NCCL topology
/// XML file, or the text of `nvidia-smi topo -m`.
///
/// # Errors
///
/// [`TopologySourceError::Read`], [`TopologySourceError::TooLong`], and
/// [`TopologySourceError::Text`] with line and column.
pub fn load(path: impl AsRef<Path>) -> Result<Topology, TopologySourceError> {
    load_with(path.as_ref(), &SourceOptions::default()).map(|(topology, _)| topology)
}

/// The topology of a preset (`dgx-a100:2`), of this machine (`machine`), or of a file. The name
/// says which one. A file with the name of a preset must be named by a path (`./ring:4`).
///
/// # Errors
///
/// The error of the source with this name; [`TopologySourceError::Neither`] if no source has this
/// name.
pub fn source(name: &str) -> Result<Topology, TopologySourceError> {
    source_with(name, &SourceOptions::default()).map(|(topology, _)| topology)
}

/// As [`source`], with values that the source does not contain. Returns also the kind of the
/// source.
///
/// # Errors
///
/// Those of [`source`].
pub fn source_with(name: &str, options: &SourceOptions) -> Result<(Topology, Origin), TopologySourceError> {
    if name == THIS_MACHINE {
        return Ok((machine::read(Path::new("/"))?, Origin::Machine));
    }
    let family = name.split([':', '@']).next().unwrap_or_default();
    if PRESETS.iter().any(|preset| preset.family() == family) {
        return Ok((presets::preset(name)?, Origin::Preset));
    }
    match load_with(Path::new(name), options) {
        Err(TopologySourceError::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => {
            Err(TopologySourceError::Neither { name: name.to_owned() })
        }
        loaded => loaded,
    }
}

fn load_with(path: &Path, options: &SourceOptions) -> Result<(Topology, Origin), TopologySourceError> {
    let unreadable = |error| TopologySourceError::Read { path: path.to_owned(), error };
    let mut bytes = Vec::new();
    let opened = File::open(path).map_err(unreadable)?;
    // Reading one more byte shows that the file is too long. The length of the file in its metadata
    // may be wrong.
    opened.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(TopologySourceError::TooLong { path: path.to_owned() });
    }
    let wrong = |error| TopologySourceError::Text { path: path.to_owned(), error: Box::new(error) };
    let text = String::from_utf8(bytes).map_err(|error| {
        let valid = error.utf8_error().valid_up_to();
        let text = String::from_utf8_lossy(&error.as_bytes()[..valid]);
        wrong(Texts(&text).error(valid, TextFault::NotText))
    })?;
    parse(&text, options).map_err(wrong)
}

/// The topology of a text in one of the three forms, and the form.
///
/// # Errors
///
/// The first fault with its line and column.
pub fn parse(text: &str, options: &SourceOptions) -> Result<(Topology, Origin), TextError> {
    let begins_with = text.trim_start_matches('\u{feff}').trim_start();
    if begins_with.starts_with('<') {
        return Ok((nccl::parse(text)?, Origin::NcclXml));
    }
    if smi::is_matrix(text) {
        let nvlink_bytes_per_s = options.nvlink_bytes_per_s;
        return Ok((smi::parse(text, nvlink_bytes_per_s)?, Origin::SmiMatrix { nvlink_bytes_per_s }));
    }
    match file::parse(text) {
        // A text without a table of nodes gets no error about its first character.
        Err(_) if !text.contains("node") => Err(Texts(text).error(0, TextFault::Unrecognised)),
        parsed => Ok((parsed?, Origin::Toml)),
    }
}
