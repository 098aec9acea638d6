//! Checkpoints: the state of all ranks between two steps, in files.
//!
//! A folder holds checkpoints as folders `step-N`: a file of safetensors for each rank
//! ([`RankState`]), and `manifest.json` ([`Manifest`]) with the scheme, the layout and a digest
//! (SHA-256) of each file. All ranks write to the same folder.
//!
//! **Invariants:** a folder `step-N` is complete: it was written as `step-N.partial` and renamed
//! when all files were on the disk. A checkpoint is never overwritten; the two newest are kept.
//! What is read is what was written, or an error says which file differs.

mod rank_state;
mod writing;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::state::StateError;

pub use rank_state::RankState;
pub(crate) use writing::Writing;

const MANIFEST: &str = "manifest.json";

/// Counts changes of the files' form.
const FORMAT: u32 = 1;

/// Longest manifest that is read, in bytes.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// Why a checkpoint was not written, or is not taken.
#[derive(pleach_derive::ErrorDebug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The disk is full.
    #[error("disk full: {} was not written; free space, or name a folder on another disk", .path.display())]
    Full {
        /// The file.
        path: PathBuf,
    },
    /// A file cannot be written, renamed or read.
    #[error("checkpoint not {done}: {} ({error}); name a folder that all ranks can read and write", .path.display())]
    Io {
        /// What was not done, as "written".
        done: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        error: io::Error,
    },
    /// The folder has no checkpoint.
    #[error("no checkpoint in {}; name a folder that was given by --checkpoint, or train from the beginning", .folder.display())]
    Absent {
        /// The folder.
        folder: PathBuf,
    },
    /// The folder has a checkpoint of the same step or a later one.
    #[error(
        "{} holds a checkpoint of step {found}, and this training is in step {step}; resume from it, or name another folder",
        .folder.display()
    )]
    Later {
        /// The folder.
        folder: PathBuf,
        /// The newest step in it.
        found: u64,
        /// The step that was to be written.
        step: u64,
    },
    /// A file is not of the form of checkpoints.
    #[error("bad checkpoint: {}: {reason}; take another one", .path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A file is cut.
    #[error("checkpoint cut: {} has {bytes} bytes of {expected}; take another one", .path.display())]
    Cut {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
        /// The bytes that were written.
        expected: u64,
    },
    /// A file is not the one that was written.
    #[error(
        "checkpoint changed: the SHA-256 of {} is {found}, and {expected} was written; take another one",
        .path.display()
    )]
    Digest {
        /// The file.
        path: PathBuf,
        /// Its digest.
        found: String,
        /// The digest that was written.
        expected: String,
    },
    /// It is of another scheme.
    #[error("checkpoint of another scheme: {} is of {theirs}, and this training is by {own}; train by {theirs}", .path.display())]
    Scheme {
        /// The checkpoint.
        path: PathBuf,
        /// Its scheme.
        theirs: String,
        /// That of the training.
        own: String,
    },
    /// It is of another model.
    #[error(
        "checkpoint of another model: {} has layers of {theirs:?} parameters, and this model {own:?}; give the same model",
        .path.display()
    )]
    Layout {
        /// The checkpoint.
        path: PathBuf,
        /// Its layers.
        theirs: Vec<usize>,
        /// Those of the training.
        own: Vec<usize>,
    },
    /// It is of another number of ranks.
    #[error(
        "checkpoint of another world: {} is of {theirs} ranks, and there are {own}; start {theirs}, or take its parameters alone",
        .path.display()
    )]
    World {
        /// The checkpoint.
        path: PathBuf,
        /// Its ranks.
        theirs: u32,
        /// Those of the training.
        own: u32,
    },
    /// It has made more steps than there are to make.
    #[error("no step left: {} is of step {step}, and {steps} are asked for; give more steps", .path.display())]
    Steps {
        /// The checkpoint.
        path: PathBuf,
        /// Its step.
        step: u64,
        /// The steps of the training.
        steps: u64,
    },
    /// It lacks a vector, or has it with another length.
    #[error(
        "checkpoint without {expected} elements of '{name}': it has {found:?}; take one of the same program"
    )]
    Vector {
        /// The vector.
        name: String,
        /// The elements that it has, if it is there.
        found: Option<usize>,
        /// The elements that are needed.
        expected: usize,
    },
    /// What the scheme remembers is not there.
    #[error(transparent)]
    State(#[from] StateError),
    /// The last step was made, and its exchange too.
    #[error("nothing to save: the training has ended; save before the step that would be the next one")]
    Ended,
    /// Another rank failed.
    #[error("no checkpoint: rank {rank} failed: {reason}")]
    Peer {
        /// The rank.
        rank: u32,
        /// Its error, as text.
        reason: String,
    },
}

impl CheckpointError {
    fn io(done: &'static str, path: &Path, error: io::Error) -> Self {
        let path = path.to_owned();
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path },
            _ => Self::Io { done, path, error },
        }
    }
}

/// A file of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankFile {
    /// Its length in bytes.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal digits.
    pub sha256: String,
}

/// What a checkpoint is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    format: u32,
    /// The text of the scheme.
    pub scheme: String,
    /// The parameters of each layer.
    pub layers: Vec<usize>,
    /// The step that comes next.
    pub step: u64,
    /// The file of each rank.
    pub files: Vec<RankFile>,
}

impl Manifest {
    /// Of these files.
    #[must_use]
    pub fn new(scheme: String, layers: Vec<usize>, step: u64, files: Vec<RankFile>) -> Self {
        Self { format: FORMAT, scheme, layers, step, files }
    }

    /// From a file.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, in words.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let manifest: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if manifest.format != FORMAT {
            return Err(format!("format {}, and this version of pleach reads {FORMAT}", manifest.format));
        }
        if manifest.files.is_empty() {
            return Err("it is of no rank".to_owned());
        }
        Ok(manifest)
    }

    fn encode(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("numbers and texts are JSON")
    }
}

/// A checkpoint to go on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    /// A number that is the same for the same checkpoint.
    mark: u64,
}

impl Checkpoint {
    /// The newest one of a folder, or the folder itself if it is one.
    ///
    /// # Errors
    ///
    /// There is none, or its manifest cannot be read.
    pub fn newest(folder: &Path) -> Result<Self, CheckpointError> {
        let path = match steps(folder)?.last() {
            Some((_, path)) => path.clone(),
            None if folder.join(MANIFEST).is_file() => folder.to_owned(),
            None => return Err(CheckpointError::Absent { folder: folder.to_owned() }),
        };
        let file = path.join(MANIFEST);
        let read = |error| CheckpointError::io("read", &file, error);
        let form = |reason| CheckpointError::Form { path: file.clone(), reason };
        let bytes = fs::metadata(&file).map_err(read)?.len();
        if bytes > MANIFEST_BYTES_MAX {
            return Err(form(format!("{bytes} bytes, at most {MANIFEST_BYTES_MAX}")));
        }
        let bytes = fs::read(&file).map_err(read)?;
        let manifest = Manifest::decode(&bytes).map_err(form)?;
        let digest = Sha256::digest(&bytes);
        let mark = u64::from_le_bytes(digest[..8].try_into().expect("eight bytes"));
        Ok(Self { path, manifest, mark })
    }

    /// Its folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it is of.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(crate) fn mark(&self) -> u64 {
        self.mark
    }

    /// The number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.manifest.files.len() as u32
    }

    /// Checks that it is of this scheme, or goes on with parameters alone where that is `None`, and
    /// of this layout.
    pub(crate) fn expect(&self, scheme: Option<&str>, layers: &[usize]) -> Result<(), CheckpointError> {
        let (path, Manifest { scheme: theirs, layers: their_layers, .. }) =
            (self.path.clone(), &self.manifest);
        if let Some(own) = scheme.filter(|own| own != theirs) {
            return Err(CheckpointError::Scheme { path, theirs: theirs.clone(), own: own.to_owned() });
        }
        if their_layers != layers {
            return Err(CheckpointError::Layout { path, theirs: their_layers.clone(), own: layers.to_vec() });
        }
        Ok(())
    }

    /// The state of a rank.
    ///
    /// # Errors
    ///
    /// Its file is cut or changed, or cannot be read.
    pub fn rank(&self, rank: u32) -> Result<RankState, CheckpointError> {
        let path = self.path.join(file_name(rank));
        let RankFile { bytes: expected, sha256 } = &self.manifest.files[rank as usize];
        let read = |error| CheckpointError::io("read", &path, error);
        let bytes = fs::metadata(&path).map_err(read)?.len();
        if bytes != *expected {
            return Err(CheckpointError::Cut { path, bytes, expected: *expected });
        }
        let bytes = fs::read(&path).map_err(read)?;
        let found = hexadecimal(&Sha256::digest(&bytes));
        if found != *sha256 {
            return Err(CheckpointError::Digest { path, found, expected: sha256.clone() });
        }
        RankState::decode(&bytes).map_err(|reason| CheckpointError::Form { path, reason })
    }

    /// The mean of all ranks' parameters.
    ///
    /// # Errors
    ///
    /// A file is cut or changed, or cannot be read.
    pub fn mean_parameters(&self) -> Result<Vec<f32>, CheckpointError> {
        let expected = self.manifest.layers.iter().fold(0, |sum: usize, layer| sum.saturating_add(*layer));
        let mut sums: Option<Vec<f64>> = None;
        for rank in 0..self.ranks() {
            let rank = self.rank(rank)?;
            let parameters = vector(&rank, "parameters", expected)?;
            let sums = sums.get_or_insert_with(|| vec![0.0; expected]);
            sums.iter_mut().zip(parameters).for_each(|(sum, element)| *sum += f64::from(*element));
        }
        let ranks = f64::from(self.ranks());
        Ok(sums.unwrap_or_default().into_iter().map(|sum| (sum / ranks) as f32).collect())
    }
}

/// A vector of a rank, with so many elements.
pub(crate) fn vector<'a>(
    rank: &'a RankState,
    name: &str,
    expected: usize,
) -> Result<&'a [f32], CheckpointError> {
    let found = rank.vector(name);
    found.filter(|elements| elements.len() == expected).ok_or_else(|| CheckpointError::Vector {
        name: name.to_owned(),
        found: found.map(<[f32]>::len),
        expected,
    })
}

fn file_name(rank: u32) -> String {
    format!("rank-{rank}.safetensors")
}

fn folder_name(step: u64) -> String {
    format!("step-{step}")
}

fn hexadecimal(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The checkpoints of a folder by their steps, the newest last; none if there is no folder.
fn steps(folder: &Path) -> Result<Vec<(u64, PathBuf)>, CheckpointError> {
    let read = |error| CheckpointError::io("read", folder, error);
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(read)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(read)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let step = name.and_then(|name| name.strip_prefix("step-")?.parse().ok());
        found.extend(step.filter(|_| path.join(MANIFEST).is_file()).map(|step| (step, path)));
    }
    found.sort_unstable();
    Ok(found)
}
