//! The files in which weights are: whether they are there, and their bytes.
//!
//! Nothing else of this crate touches a file. [`check_weight_files`] asks the file system for the
//! lengths of files. [`WeightFiles`] maps a file once for all weights of a part. The weights are
//! copied once, from the page cache into the part's model. Weights never cross between ranks, so
//! registering them would only pin memory.
//!
//! **Invariant:** a weight lies in its file, or it is an error. Until the last of its bytes is
//! dropped, the file must not be shortened: the system ends a process that reads behind the end of
//! a file that it maps.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use prost::bytes::Bytes;

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

/// The files with weights of one folder, each mapped once.
pub(crate) struct WeightFiles<'a> {
    folder: &'a Path,
    mapped: HashMap<PathBuf, Bytes>,
}

impl<'a> WeightFiles<'a> {
    pub(crate) fn new(folder: &'a Path) -> Self {
        Self { folder, mapped: HashMap::new() }
    }

    /// So many bytes of a file, where they are mapped.
    ///
    /// # Errors
    ///
    /// The system's error; `UnexpectedEof` if the file ends before.
    pub(crate) fn bytes(&mut self, path: &str, offset: u64, length: u64) -> io::Result<Bytes> {
        let path = self.folder.join(path);
        let file = match self.mapped.get(&path) {
            Some(file) => file,
            None => {
                let file = map(&path)?;
                self.mapped.entry(path).or_insert(file)
            }
        };
        let end = offset.checked_add(length).filter(|&end| end <= file.len() as u64);
        let end = end.ok_or_else(|| {
            let text = format!("it has {} bytes, not {length} from byte {offset} on", file.len());
            io::Error::new(io::ErrorKind::UnexpectedEof, text)
        })?;
        Ok(file.slice(offset as usize..end as usize))
    }
}

fn map(path: &Path) -> io::Result<Bytes> {
    let file = File::open(path)?;
    // SAFETY: the mapping is read as bytes alone, whose values mean nothing to this program, and
    // the module says that the file must not be shortened meanwhile.
    let mapping = unsafe { Mmap::map(&file) }?;
    Ok(Bytes::from_owner(mapping))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_its_part_of_the_file_which_is_mapped_once_and_bytes_behind_the_end_are_an_error() {
        let folder = std::env::temp_dir().join(format!("pleach-weight-files-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("there is a folder for temporary files");
        let content: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        std::fs::write(folder.join("w.bin"), &content).expect("the folder can be written");
        std::fs::write(folder.join("empty.bin"), []).expect("the folder can be written");
        let mut files = WeightFiles::new(&folder);
        let (first, last) = (files.bytes("w.bin", 3, 8), files.bytes("w.bin", 9_000, 1_000));
        let (first, last) = (first.expect("it is there"), last.expect("it is there"));
        assert_eq!((&first[..], &last[..]), (&content[3..11], &content[9_000..]));
        assert_eq!(last.as_ptr().addr() - first.as_ptr().addr(), 8_997, "both are in one mapping");
        assert_eq!(files.bytes("empty.bin", 0, 0).expect("it is there").len(), 0);
        for (file, offset, length) in [("w.bin", 9_000, 1_001), ("w.bin", u64::MAX, 2), ("empty.bin", 0, 1)] {
            let error = files.bytes(file, offset, length).expect_err("it is behind the end");
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        }
        let error = files.bytes("missing.bin", 0, 0).expect_err("there is no such file");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        assert!(files.bytes(".", 0, 0).is_err(), "a folder has no bytes");
        drop(files);
        std::fs::remove_dir_all(&folder).expect("it is there");
        assert_eq!(&first[..], &content[3..11], "a weight keeps its mapping");
    }
}
