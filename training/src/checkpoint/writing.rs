//! How a checkpoint comes to the disk: beside the others, and then by one renaming.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::{
    CheckpointError, MANIFEST, Manifest, RankFile, RankState, file_name, folder_name, hexadecimal, steps,
};

/// Checkpoints that are kept in a folder.
const KEPT: usize = 2;

/// A checkpoint that is written. All ranks write their files; rank 0 makes the folder first, and
/// completes the checkpoint last.
#[derive(Debug)]
pub(crate) struct Writing {
    folder: PathBuf,
    step: u64,
}

impl Writing {
    pub(crate) fn new(folder: &Path, step: u64) -> Self {
        Self { folder: folder.to_owned(), step }
    }

    fn partial(&self) -> PathBuf {
        self.folder.join(format!("{}.partial", folder_name(self.step)))
    }

    /// The checkpoint's own folder.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join(folder_name(self.step))
    }

    /// Makes the folder.
    pub(crate) fn begin(&self) -> Result<(), CheckpointError> {
        if let Some((found, _)) = steps(&self.folder)?.last().filter(|(found, _)| *found >= self.step) {
            return Err(CheckpointError::Later {
                folder: self.folder.clone(),
                found: *found,
                step: self.step,
            });
        }
        self.discard();
        let partial = self.partial();
        fs::create_dir_all(&partial).map_err(|error| CheckpointError::io("written", &partial, error))
    }

    /// Writes the file of a rank.
    pub(crate) fn rank(&self, rank: u32, state: &RankState) -> Result<RankFile, CheckpointError> {
        let path = self.partial().join(file_name(rank));
        let form = |reason| CheckpointError::Form { path: path.clone(), reason };
        let bytes = state.encode().map_err(form)?;
        write(&path, &bytes)?;
        Ok(RankFile { bytes: bytes.len() as u64, sha256: hexadecimal(&Sha256::digest(&bytes)) })
    }

    /// Writes the manifest, gives the checkpoint its name, and removes those that are too old.
    pub(crate) fn complete(&self, manifest: &Manifest) -> Result<PathBuf, CheckpointError> {
        let (partial, path) = (self.partial(), self.path());
        write(&partial.join(MANIFEST), &manifest.encode())?;
        sync(&partial)?;
        fs::rename(&partial, &path).map_err(|error| CheckpointError::io("renamed", &partial, error))?;
        sync(&self.folder)?;
        let all = steps(&self.folder)?;
        for (_, old) in all.iter().rev().skip(KEPT) {
            fs::remove_dir_all(old).map_err(|error| CheckpointError::io("removed", old, error))?;
        }
        Ok(path)
    }

    /// Removes what was written, after a failure. A rest that cannot be removed harms nobody: it is
    /// no checkpoint, and the next one of this step removes it.
    pub(crate) fn discard(&self) {
        let _ = fs::remove_dir_all(self.partial());
    }
}

/// Writes a file to the disk.
fn write(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    let written = || -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    written().map_err(|error| CheckpointError::io("written", path, error))
}

/// Puts the names of a folder on the disk.
fn sync(folder: &Path) -> Result<(), CheckpointError> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| CheckpointError::io("written", folder, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("pleach-checkpoint-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    fn written(folder: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
        let writing = Writing::new(folder, step);
        writing.begin()?;
        let file = |rank: u32| {
            let mut state = RankState::new(vec![rank as u8]);
            state.insert("parameters", &[1.0, rank as f32]);
            writing.rank(rank, &state)
        };
        let files = vec![file(0)?, file(1)?];
        writing.complete(&Manifest::new("sync".to_owned(), vec![2], step, files))
    }

    #[test]
    fn the_two_newest_are_kept_and_none_is_overwritten() {
        let folder = folder("kept");
        assert!(matches!(Checkpoint::newest(&folder), Err(CheckpointError::Absent { .. })));
        for step in [2, 9, 10] {
            let path = written(&folder, step).expect("there is space");
            let newest = Checkpoint::newest(&folder).expect("was written");
            assert_eq!((newest.path(), newest.ranks()), (path.as_path(), 2));
            assert_eq!(newest, Checkpoint { path: path.clone(), ..newest.clone() });
            assert_eq!(Checkpoint::newest(&path).expect("is one itself"), newest);
            assert_eq!(newest.mean_parameters().expect("is whole"), [1.0, 0.5]);
        }
        let kept: Vec<u64> = steps(&folder).expect("is there").into_iter().map(|(step, _)| step).collect();
        assert_eq!(kept, [9, 10]);
        let error = written(&folder, 10).expect_err("it is there");
        assert!(matches!(error, CheckpointError::Later { found: 10, step: 10, .. }), "{error}");
        fs::remove_dir_all(&folder).expect("is there");
    }

    #[test]
    fn cut_and_changed_files_are_named() {
        let folder = folder("changed");
        let path = written(&folder, 3).expect("there is space");
        let checkpoint = Checkpoint::newest(&folder).expect("was written");
        let file = path.join(file_name(1));
        let whole = fs::read(&file).expect("was written");
        fs::write(&file, &whole[..whole.len() - 1]).expect("there is space");
        let error = checkpoint.rank(1).expect_err("is cut");
        assert!(matches!(error, CheckpointError::Cut { bytes, expected, .. } if bytes + 1 == expected));
        let mut changed = whole;
        *changed.last_mut().expect("has bytes") ^= 1;
        fs::write(&file, changed).expect("there is space");
        let error = checkpoint.rank(1).expect_err("is changed");
        assert!(matches!(&error, CheckpointError::Digest { found, expected, .. } if found != expected));
        assert!(error.to_string().contains("rank-1"), "{error}");
        assert!(checkpoint.rank(0).is_ok());
        fs::write(path.join(MANIFEST), "{").expect("there is space");
        let error = Checkpoint::newest(&folder).expect_err("is cut");
        assert!(matches!(error, CheckpointError::Form { .. }), "{error}");
        fs::remove_dir_all(&folder).expect("is there");
    }

    #[test]
    fn a_full_disk_is_called_full() {
        let error = write(Path::new("/dev/full"), &[1]).expect_err("it is always full");
        assert!(matches!(error, CheckpointError::Full { .. }), "{error}");
    }
}
