//! Asks the file system for the files in which weights are. Nothing else of this crate touches a
//! file but [`super::Model::cut`], which reads weights from there.

use std::collections::BTreeMap;
use std::path::Path;

use crate::graph::{Graph, Producer, WeightSource};

/// Why the weights of a model cannot be read.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WeightFileError {
    /// A file is not there.
    #[error("the weight '{weight}' is in {path}, which cannot be read ({reason}); put it beside the model")]
    Missing {
        /// A weight in the file.
        weight: String,
        /// The file.
        path: String,
        /// What the system says.
        reason: String,
    },
    /// A file ends before a weight does.
    #[error("the weight '{weight}' ends at byte {end} of {path}, which has {length}; export the model again")]
    Short {
        /// The weight.
        weight: String,
        /// The file.
        path: String,
        /// Where the weight ends.
        end: u64,
        /// The length of the file.
        length: u64,
    },
}

/// Checks that the files with weights are in the folder of the model, and are long enough.
///
/// # Errors
///
/// [`WeightFileError`] names the first weight whose file is missing or too short.
pub fn check_weight_files(graph: &Graph, folder: &Path) -> Result<(), WeightFileError> {
    let mut lengths: BTreeMap<&str, u64> = BTreeMap::new();
    for value in graph.values() {
        let Producer::Weight { source: WeightSource::File { path, offset }, .. } = &value.producer else {
            continue;
        };
        let length = match lengths.get(path.as_str()) {
            Some(&length) => length,
            None => {
                let file = folder.join(path);
                let metadata = std::fs::metadata(&file).map_err(|error| WeightFileError::Missing {
                    weight: value.name.clone(),
                    path: file.display().to_string(),
                    reason: error.to_string(),
                })?;
                *lengths.entry(path).or_insert(metadata.len())
            }
        };
        let end = offset.saturating_add(value.tensor.bytes().unwrap_or(0));
        if end > length {
            let path = folder.join(path).display().to_string();
            return Err(WeightFileError::Short { weight: value.name.clone(), path, end, length });
        }
    }
    Ok(())
}
