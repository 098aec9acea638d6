//! The secret of one job: a file that this user alone can read, in a folder of the job, there as
//! long as the job is.
//!
//! Ranks are told the file's path (`PLEACH_SECRET_FILE`); what it holds stands in no argument and
//! no variable, which other users may see.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use pleach::transport::auth::challenge;
use rustix::fs::{Access, access};

use crate::cli::{CommandError, secret};

/// Where ranks look for the secret.
pub(super) const SECRET_VARIABLE: &str = "PLEACH_SECRET_FILE";

/// The file's name in its folder.
const FILE: &str = "secret";

/// A folder with a secret, removed when dropped.
pub(super) struct JobSecret {
    folder: PathBuf,
}

impl JobSecret {
    /// Where it will be: in the folder for such files of this user, or else in the one for
    /// temporary files.
    pub(super) fn new() -> Self {
        let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let own =
            own.filter(|path| path.is_absolute() && access(path, Access::WRITE_OK | Access::EXEC_OK).is_ok());
        let random: String = challenge()[..12].iter().map(|byte| format!("{byte:02x}")).collect();
        let place = own.unwrap_or_else(std::env::temp_dir);
        Self { folder: place.join(format!("pleach-job-{random}")) }
    }

    /// Makes the folder and writes a fresh secret. To be called when signals do not end this
    /// process any more.
    pub(super) fn write(&self) -> Result<(), CommandError> {
        // An error where anything is there already, also a link.
        DirBuilder::new().mode(0o700).create(&self.folder).map_err(|error| {
            let folder = self.folder.display();
            CommandError::failed(format!(
                "no secret for the job: {folder} ({error}); set TMPDIR to a folder that you can write"
            ))
        })?;
        secret::write(&self.file())
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn file(&self) -> PathBuf {
        self.folder.join(FILE)
    }
}

impl Drop for JobSecret {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

/// Removes a job's secret; it may be gone already.
pub(super) fn remove(folder: &Path) {
    let _ = fs::remove_file(folder.join(FILE));
    let _ = fs::remove_dir(folder);
}
