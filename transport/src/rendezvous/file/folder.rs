//! Folders and files that only this user can change, as open descriptors.
//!
//! **Invariant:** no symbolic link is followed below a folder, nor as its last name, and files of
//! another user are refused before they are read or written. So a user who can write the folder's
//! parent can end a rendezvous, but neither take part in it nor redirect it to other files.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fstat, linkat, mkdirat, openat, renameat, statat,
    unlinkat,
};
use rustix::io::Errno;

use crate::control::packet::own_user;
use crate::rendezvous::OpenError;

/// Mode of folders that are made.
const FOLDER_MODE: Mode = Mode::RWXU;

/// Mode of files that are made.
const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The rights of other users on a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OtherUsers {
    /// They may list and read it.
    MayRead,
    /// None.
    NoAccess,
}

/// A folder of this user.
#[derive(Debug)]
pub(super) struct Folder {
    file: OwnedFd,
    path: PathBuf,
}

/// A file or folder of another user.
#[derive(Debug, thiserror::Error)]
#[error("it belongs to user {owner}")]
struct OtherOwner {
    owner: u32,
}

impl Folder {
    /// Opens the folder at this path, and makes it if it does not exist.
    pub(super) fn open(path: &Path, other_users: OtherUsers) -> Result<Self, OpenError> {
        Self::open_at(CWD, path, path.to_owned(), other_users, true)
    }

    /// Opens a folder in this one, and makes it if it does not exist.
    pub(super) fn inner(&self, name: &Path, other_users: OtherUsers) -> Result<Self, OpenError> {
        Self::open_at(&self.file, name, self.path.join(name), other_users, true)
    }

    /// Opens a folder in this one that other users cannot read; `NotFound` if it does not exist.
    pub(super) fn find(&self, name: &str) -> Result<Self, OpenError> {
        Self::open_at(&self.file, Path::new(name), self.path.join(name), OtherUsers::NoAccess, false)
    }

    fn open_at(
        at: impl AsFd,
        name: &Path,
        path: PathBuf,
        other_users: OtherUsers,
        makes: bool,
    ) -> Result<Self, OpenError> {
        let failed = |path: &Path, errno: Errno| open_error(path, errno.into());
        if makes
            && let Err(errno) = mkdirat(&at, name, FOLDER_MODE)
            && errno != Errno::EXIST
        {
            return Err(failed(&path, errno));
        }
        // A mere name of it, which can be had also where this user may not look into it: so whose
        // it is can be told.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&at, name, flags, Mode::empty()).map_err(|errno| {
            let is_link = statat(&at, name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink);
            failed(&path, if is_link { Errno::LOOP } else { errno })
        })?;
        let stat = fstat(&file).map_err(|errno| failed(&path, errno))?;
        check_owner(&stat).map_err(|error| open_error(&path, error))?;
        let open_to_others = match other_users {
            OtherUsers::MayRead => Mode::WGRP | Mode::WOTH,
            OtherUsers::NoAccess => Mode::RWXG | Mode::RWXO,
        };
        let mode = Mode::from_raw_mode(stat.st_mode);
        if mode.intersects(open_to_others) {
            return Err(OpenError::Unsafe { folder: path, mode: mode.bits() & 0o777 });
        }
        Ok(Self { file, path })
    }

    /// Its path, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// A new file to write.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    /// A file to read and write, made if it does not exist.
    pub(super) fn open_or_create(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::RDWR | OFlags::CREATE)
    }

    /// A file to read.
    pub(super) fn open_to_read(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::RDONLY)
    }

    /// The contents of a file.
    pub(super) fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_to_read(name)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        // Without waiting, as a named pipe would.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(&self.file, name, flags, FILE_MODE)?;
        let stat = fstat(&file)?;
        check_owner(&stat)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        Ok(file.into())
    }

    /// Whether a file of this name exists.
    pub(super) fn has(&self, name: &str) -> bool {
        statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Gives a file a second name; an error if that exists.
    pub(super) fn link(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(linkat(&self.file, from, &self.file, to, AtFlags::empty())?)
    }

    /// Moves a file to another folder, and replaces a file of that name.
    pub(super) fn move_to(&self, from: &str, folder: &Self, to: &str) -> io::Result<()> {
        Ok(renameat(&self.file, from, &folder.file, to)?)
    }

    /// Removes a file, which may be gone already.
    pub(super) fn remove(&self, name: &str) {
        let _ = unlinkat(&self.file, name, AtFlags::empty());
    }

    /// Removes a folder in this one with the files in it, as far as possible.
    pub(super) fn remove_folder(&self, name: &str) {
        let Ok(folder) = self.find(name) else { return };
        folder.names().iter().for_each(|name| folder.remove(name));
        let _ = unlinkat(&self.file, name, AtFlags::REMOVEDIR);
    }

    /// Removes this folder, if it is empty.
    pub(super) fn remove_itself(&self) {
        let _ = unlinkat(CWD, &self.path, AtFlags::REMOVEDIR);
    }

    /// The names of its entries, without those that are not UTF-8.
    pub(super) fn names(&self) -> Vec<String> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let entries = openat(&self.file, ".", flags, Mode::empty()).and_then(Dir::new);
        let entries = entries.into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| Some(entry.file_name().to_str().ok()?.to_owned()));
        names.filter(|name| name != "." && name != "..").collect()
    }
}

fn check_owner(stat: &Stat) -> io::Result<()> {
    if stat.st_uid == own_user() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, OtherOwner { owner: stat.st_uid }))
}

/// The public error at this path.
pub(super) fn open_error(path: &Path, source: io::Error) -> OpenError {
    if source.raw_os_error() == Some(Errno::LOOP.raw_os_error()) {
        return OpenError::Link { path: path.to_owned() };
    }
    match source.get_ref().and_then(|inner| inner.downcast_ref()) {
        Some(&OtherOwner { owner }) => {
            OpenError::Owner { place: path.display().to_string(), owner, user: own_user() }
        }
        None => OpenError::Folder { path: path.to_owned(), source },
    }
}
