//! Write-once registers in a folder that all hosts see.
//!
//! **Invariant:** a register is a file that came under its name whole, by a hard link to a draft,
//! or is not there. The first link counts, on NFS too, where the answer to a link may be lost: then
//! the file is compared with the draft.

use std::io::{self, Write};
use std::path::Path;

use super::{Folder, OtherUsers, unique};
use crate::rendezvous::OpenStoreError;
use crate::rendezvous::outside::OutsideError;

/// Prefix of the names of the folders of jobs' records.
const RECORDS: &str = "records-";

/// The registers of one job.
#[derive(Debug)]
pub(in crate::rendezvous) struct RegisterFolder {
    folder: Folder,
}

impl RegisterFolder {
    /// The registers of a job in the folder where its ranks meet. `begins`: the job begins, and
    /// those of jobs that have ended are removed.
    pub(in crate::rendezvous) fn open(
        folder: &Path,
        job: &str,
        begins: bool,
    ) -> Result<Self, OpenStoreError> {
        let outer = Folder::open(folder, OtherUsers::MayRead)?;
        let name = format!("{RECORDS}{job}");
        if begins {
            let others =
                outer.names().into_iter().filter(|other| other.starts_with(RECORDS) && *other != name);
            others.for_each(|other| outer.remove_folder(&other));
        }
        Ok(Self { folder: outer.inner(Path::new(&name), OtherUsers::NoAccess)? })
    }

    /// Writes a register; what it holds, where it was written before.
    pub(in crate::rendezvous) fn write_once(
        &self,
        name: &str,
        value: &[u8],
    ) -> Result<Option<Vec<u8>>, OutsideError> {
        let draft = format!("draft.{}", unique());
        let written = self.folder.create(&draft).and_then(|mut file| {
            file.write_all(value)?;
            // A record has to outlive the host of the folder too.
            file.sync_all()
        });
        let linked = written.and_then(|()| self.folder.link(&draft, name));
        self.folder.remove(&draft);
        match linked {
            Ok(()) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let present = self.folder.read(name).map_err(|source| self.failed(name, source))?;
                Ok(Some(present).filter(|present| present != value))
            }
            Err(source) => Err(self.failed(name, source)),
        }
    }

    /// What a register holds.
    pub(in crate::rendezvous) fn read(&self, name: &str) -> Result<Option<Vec<u8>>, OutsideError> {
        match self.folder.read(name) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(self.failed(name, source)),
        }
    }

    fn failed(&self, name: &str, source: io::Error) -> OutsideError {
        OutsideError::Folder { path: self.folder.path().join(name).display().to_string(), source }
    }

    /// Its path, for messages.
    pub(in crate::rendezvous) fn path(&self) -> &Path {
        self.folder.path()
    }
}
