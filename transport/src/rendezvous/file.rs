//! A store in a folder that all ranks can write.
//!
//! Rank 0 makes a folder for this job inside the given one, and writes its name to the file
//! `current` by renaming; a key is a file there. **Invariant:** the job in `current` is alive
//! exactly as long as rank 0 holds a lock (`flock`) on that job's file `alive`, which the kernel
//! releases when rank 0's process ends. So files of an earlier job are recognised, never used, and
//! removed by the next rank 0.
//!
//! The folder and its contents must belong to this user, and other users must not be able to write
//! it. Other users cannot read a job's own folder, because its contents admit ranks.

mod registers;

use std::fs::File;
use std::io;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, flock, fstat, linkat, mkdirat, openat,
    renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::path::Arg;

use super::backoff::Backoff;
use super::{Claim, OpenStoreError, Store, StoreError, check, cut};
use crate::auth::challenge;
use crate::clock::now;
use crate::control::packet::own_user;
use crate::{Nanos, Rank};

pub(super) use registers::RegisterFolder;

/// The name of the current job's folder.
const CURRENT: &str = "current";

/// Locked by a rank 0 as long as it uses the folder.
const OWNER: &str = "owner";

/// Locked by a job's rank 0 as long as the job's table may be used.
const ALIVE: &str = "alive";

/// Locked, shared, by every rank but 0 while it uses the job's table.
const PRESENT: &str = "present";

/// Prefix of the names of jobs' folders.
const JOB: &str = "job-";

/// Random bytes in the names of jobs' folders, in hexadecimal.
const UNIQUE_BYTES: usize = 12;

/// The reason of a failure.
const FAILED: &str = "failed";

/// How long rank 0 waits for the rank 0 of the previous job to release the folder.
const OWNER_PATIENCE: Duration = Duration::from_secs(5);

/// How often a folder that was removed before it was opened is made again.
const OPEN_TRIES: usize = 16;

/// How long rank 0 keeps the table of a failed rendezvous, so that the others read the reason.
const FAIL_REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// A table in a shared folder.
#[derive(Debug)]
pub struct FileStore {
    folder: Folder,
    job: Folder,
    job_name: String,
    owner: Option<Owner>,
    /// The deadline of the last call.
    deadline: Nanos,
    /// The lock of a rank that is not 0.
    _present: Option<File>,
}

/// The locks of rank 0.
#[derive(Debug)]
struct Owner {
    alive: File,
    owner: File,
    remove_folder: bool,
}

impl Owner {
    /// Locks the folder's file [`OWNER`]; `None`: another rank 0 has it.
    ///
    /// **Invariant:** who removes that file or the folder holds the lock. So of those that waited
    /// for it meanwhile each one finds that its file is not the folder's any more: two would hold
    /// the folder otherwise, each with a file of its own.
    fn lock(folder: &Folder) -> Result<Option<File>, OpenStoreError> {
        let failed = |error| open_error(&folder.path().join(OWNER), error);
        let owner = match folder.open_or_create(OWNER) {
            Ok(owner) => owner,
            // The folder has just been removed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        match flock(&owner, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_named(&folder.file, OWNER, &owner) => Ok(Some(owner)),
            Ok(()) | Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(failed(error.into())),
        }
    }
}

impl FileStore {
    /// Opens the table in `folder`: rank 0 makes it, the others wait for it until the deadline. The
    /// folder is made if it does not exist. A `private` folder belongs to this job and user, and is
    /// removed with the job.
    ///
    /// # Errors
    ///
    /// See [`OpenStoreError`].
    pub fn open(folder: &Path, rank: Rank, private: bool, deadline: Nanos) -> Result<Self, OpenStoreError> {
        let reach = || match (private, folder.parent(), folder.file_name()) {
            (true, Some(parent), Some(name)) => {
                Folder::open(parent, OtherUsers::NoAccess)?.inner(Path::new(name), OtherUsers::NoAccess)
            }
            _ => Folder::open(folder, OtherUsers::MayRead),
        };
        if rank == 0 { Self::create(reach, private, deadline) } else { Self::find(reach, deadline) }
    }

    /// `reach` opens the folder by its path.
    fn create(
        reach: impl Fn() -> Result<Folder, OpenStoreError>,
        private: bool,
        deadline: Nanos,
    ) -> Result<Self, OpenStoreError> {
        let mut backoff = Backoff::until(deadline.min(now() + OWNER_PATIENCE));
        loop {
            let folder = reach()?;
            if let Some(owner) = Owner::lock(&folder)? {
                return Self::create_owned(folder, owner, private, deadline);
            }
            if !backoff.again() {
                let holder = folder.read(OWNER).unwrap_or_default();
                let holder = String::from_utf8_lossy(&holder).into_owned();
                return Err(OpenStoreError::Busy { folder: folder.path().to_owned(), holder });
            }
        }
    }

    fn create_owned(
        folder: Folder,
        mut owner: File,
        private: bool,
        deadline: Nanos,
    ) -> Result<Self, OpenStoreError> {
        let path = folder.path().to_owned();
        let failed = |error| open_error(&path, error);
        let holder = format!("process {} on {}", std::process::id(), super::record::host_name());
        owner.set_len(0).and_then(|()| owner.write_all(holder.as_bytes())).map_err(failed)?;
        folder.remove(CURRENT);
        // Folders of jobs that ended without closing. A folder that cannot be removed is still not
        // used.
        folder.names().iter().filter(|name| is_job(name)).for_each(|name| folder.remove_folder(name));
        let job_name = format!("{JOB}{}", unique());
        let job = folder.inner(Path::new(&job_name), OtherUsers::NoAccess)?;
        let alive = job.create(PRESENT).and_then(|_| job.create(ALIVE)).map_err(failed)?;
        flock(&alive, FlockOperation::NonBlockingLockExclusive).map_err(|errno| failed(errno.into()))?;
        let owner = Owner { alive, owner, remove_folder: private };
        let store = Self { folder, job, job_name, owner: Some(owner), deadline, _present: None };
        let draft = store.draft(store.job_name.as_bytes()).map_err(failed)?;
        store.job.move_to(&draft, &store.folder, CURRENT).map_err(failed)?;
        Ok(store)
    }

    /// `reach` opens the folder by its path.
    fn find(
        mut reach: impl FnMut() -> Result<Folder, OpenStoreError>,
        deadline: Nanos,
    ) -> Result<Self, OpenStoreError> {
        let mut backoff = Backoff::until(deadline);
        let mut folder = reach()?;
        loop {
            if let Some((job_name, job)) = live_job(&folder)?
                && let Ok(present) = job.open_to_read(PRESENT)
                && flock(&present, FlockOperation::NonBlockingLockShared).is_ok()
            {
                return Ok(Self { folder, job, job_name, owner: None, deadline, _present: Some(present) });
            }
            if !backoff.again() {
                let folder = folder.path().to_owned();
                return Err(OpenStoreError::NoRankZero { folder, waited: backoff.waited() });
            }
            // Rank 0 may have closed an earlier job of these ranks and removed its folder; the next
            // job is in a new one.
            if let Ok(reached) = reach() {
                folder = reached;
            }
        }
    }

    /// A file of the job's folder with these bytes, under a temporary name.
    fn draft(&self, value: &[u8]) -> io::Result<String> {
        let name = format!("draft.{}", unique());
        self.job.create(&name)?.write_all(value)?;
        Ok(name)
    }

    /// Sets `key` if it is not set.
    fn put(&self, key: &str, value: &[u8]) -> Result<Claim, StoreError> {
        let name = file_name(key);
        let failed = |source| self.failed(&name, source);
        let draft = self.draft(value).map_err(failed)?;
        let linked = self.job.link(&draft, &name);
        self.job.remove(&draft);
        match linked {
            Ok(()) => Ok(Claim::Taken),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(Claim::Present(self.job.read(&name).map_err(failed)?))
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn job_exists(&self) -> bool {
        self.folder.has(&self.job_name)
    }

    fn failed(&self, name: &str, source: io::Error) -> StoreError {
        // The table is gone when rank 0 is.
        if source.kind() == io::ErrorKind::NotFound && !self.job_exists() {
            return self.lost(source);
        }
        StoreError::Folder { path: self.job.path().join(name), source }
    }

    fn lost(&self, source: io::Error) -> StoreError {
        StoreError::Lost { address: self.folder.path().display().to_string(), source }
    }
}

impl Store for FileStore {
    fn set(&mut self, key: &str, value: &[u8], _deadline: Nanos) -> Result<(), StoreError> {
        check(key, value)?;
        match self.put(key, value)? {
            Claim::Taken => Ok(()),
            Claim::Present(_) => Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() }),
        }
    }

    fn claim(&mut self, key: &str, value: &[u8], _deadline: Nanos) -> Result<Claim, StoreError> {
        check(key, value)?;
        self.put(key, value)
    }

    fn wait(&mut self, keys: &[String], until: Nanos, deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        self.deadline = deadline;
        let mut backoff = Backoff::until(until);
        let mut values = Vec::with_capacity(keys.len());
        loop {
            if let Ok(reason) = self.job.read(FAILED) {
                return Err(StoreError::Failed { reason: cut(&String::from_utf8_lossy(&reason)).to_owned() });
            }
            while let Some(key) = keys.get(values.len()) {
                let name = file_name(key);
                match self.job.read(&name) {
                    Ok(value) => values.push(value),
                    Err(error) if error.kind() == io::ErrorKind::NotFound && self.job_exists() => break,
                    Err(error) => return Err(self.failed(&name, error)),
                }
            }
            if values.len() == keys.len() {
                return Ok(values);
            }
            if self.owner.is_none() && !is_locked(&self.job, ALIVE) {
                return Err(self.lost(io::ErrorKind::ConnectionAborted.into()));
            }
            if !backoff.again() {
                let missing = keys[values.len()..].iter().filter(|key| !self.job.has(&file_name(key)));
                let keys = missing.cloned().collect();
                return Err(StoreError::Missing { keys, waited: backoff.waited(), refused: None });
            }
        }
    }

    fn fail(&mut self, reason: &str, deadline: Nanos) {
        self.deadline = deadline;
        // The first reason counts; if rank 0 is gone, the others find out themselves.
        if let Ok(draft) = self.draft(cut(reason).as_bytes()) {
            let _ = self.job.link(&draft, FAILED);
            self.job.remove(&draft);
        }
    }

    fn seal(&mut self, _deadline: Nanos) {
        if self.owner.is_some() {
            self.folder.remove(CURRENT);
        }
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        self.folder.remove(CURRENT);
        if self.job.has(FAILED)
            && let Ok(present) = self.job.open_to_read(PRESENT)
        {
            let mut backoff = Backoff::until(self.deadline.min(now() + FAIL_REPORT_TIMEOUT));
            while flock(&present, FlockOperation::NonBlockingLockExclusive).is_err() && backoff.again() {}
        }
        self.folder.remove_folder(&self.job_name);
        if owner.remove_folder {
            self.folder.remove(OWNER);
            // Not empty when a rank of the next job has written there; then it stays.
            self.folder.remove_itself();
        }
        // Explicitly, because a child that was forked meanwhile keeps the files open.
        let _ = flock(&owner.alive, FlockOperation::Unlock);
        let _ = flock(&owner.owner, FlockOperation::Unlock);
    }
}

/// The folder of the current job, if its rank 0 is alive.
fn live_job(folder: &Folder) -> Result<Option<(String, Folder)>, OpenStoreError> {
    let name = match folder.read(CURRENT) {
        Ok(name) => String::from_utf8_lossy(&name).into_owned(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(open_error(&folder.path().join(CURRENT), error)),
    };
    if !is_job(&name) {
        return Ok(None);
    }
    match folder.find(&name) {
        Ok(job) => Ok(is_locked(&job, ALIVE).then_some((name, job))),
        // Its rank 0 has just removed it.
        Err(OpenStoreError::Folder { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether a process holds the lock of a file.
fn is_locked(folder: &Folder, name: &str) -> bool {
    let Ok(file) = folder.open_to_read(name) else { return false };
    // No process waits for this lock, so trying it disturbs nothing; closing the file releases it.
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}

/// Whether a rank 0 made the folder of this name; other folders may have the same prefix.
fn is_job(name: &str) -> bool {
    name.strip_prefix(JOB).is_some_and(|digits| {
        digits.len() == 2 * UNIQUE_BYTES && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// The file of a key.
fn file_name(key: &str) -> String {
    format!("key.{}", key.replace('/', "."))
}

/// A name that no other process chooses.
fn unique() -> String {
    challenge()[..UNIQUE_BYTES].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Mode of folders that are made.
const FOLDER_MODE: Mode = Mode::RWXU;

/// Mode of files that are made.
const FILE_MODE: Mode = Mode::RUSR.union(Mode::WUSR);

/// The rights of other users on a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OtherUsers {
    /// They may list and read it.
    MayRead,
    /// None.
    NoAccess,
}

/// An open folder that only this user can change.
///
/// **Invariant:** no symbolic link is followed below a folder, nor as its last name, and files of
/// another user are refused before they are read or written. So a user who can write the folder's
/// parent can end a rendezvous, but neither take part in it nor redirect it to other files.
#[derive(Debug)]
struct Folder {
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
    fn open(path: &Path, other_users: OtherUsers) -> Result<Self, OpenStoreError> {
        // A slash behind a link would follow it.
        let path = path.components().as_path();
        Self::open_at(CWD, path, path.to_owned(), other_users, true)
    }

    /// Opens a folder in this one, and makes it if it does not exist.
    fn inner(&self, name: &Path, other_users: OtherUsers) -> Result<Self, OpenStoreError> {
        Self::open_at(&self.file, name, self.path.join(name), other_users, true)
    }

    /// Opens a folder in this one that other users cannot read; `NotFound` if it does not exist.
    fn find(&self, name: &str) -> Result<Self, OpenStoreError> {
        Self::open_at(&self.file, Path::new(name), self.path.join(name), OtherUsers::NoAccess, false)
    }

    fn open_at(
        at: impl AsFd,
        name: &Path,
        path: PathBuf,
        other_users: OtherUsers,
        makes: bool,
    ) -> Result<Self, OpenStoreError> {
        let failed = |path: &Path, errno: Errno| open_error(path, errno.into());
        // A mere name of it, which can be had also where this user may not look into it: so whose
        // it is can be told.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut tries = 0..OPEN_TRIES;
        let file = loop {
            if makes
                && let Err(errno) = mkdirat(&at, name, FOLDER_MODE)
                && errno != Errno::EXIST
            {
                return Err(failed(&path, errno));
            }
            match openat(&at, name, flags, Mode::empty()) {
                Ok(file) => break file,
                // It was there, and was removed before it was opened.
                Err(Errno::NOENT) if makes && tries.next().is_some() => {}
                Err(errno) => {
                    let is_link = statat(&at, name, AtFlags::SYMLINK_NOFOLLOW)
                        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink);
                    return Err(failed(&path, if is_link { Errno::LOOP } else { errno }));
                }
            }
        };
        let stat = fstat(&file).map_err(|errno| failed(&path, errno))?;
        check_owner(&stat).map_err(|error| open_error(&path, error))?;
        let open_to_others = match other_users {
            OtherUsers::MayRead => Mode::WGRP | Mode::WOTH,
            OtherUsers::NoAccess => Mode::RWXG | Mode::RWXO,
        };
        let mode = Mode::from_raw_mode(stat.st_mode);
        if mode.intersects(open_to_others) {
            return Err(OpenStoreError::Unsafe { folder: path, mode: mode.bits() & 0o777 });
        }
        Ok(Self { file, path })
    }

    /// Its path, for messages.
    fn path(&self) -> &Path {
        &self.path
    }

    /// A new file to write.
    fn create(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)
    }

    /// A file to read and write, made if it does not exist.
    fn open_or_create(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::RDWR | OFlags::CREATE)
    }

    /// A file to read.
    fn open_to_read(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::RDONLY)
    }

    /// The contents of a file.
    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
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
    fn has(&self, name: &str) -> bool {
        statat(&self.file, name, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// Gives a file a second name; an error if that exists.
    fn link(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(linkat(&self.file, from, &self.file, to, AtFlags::empty())?)
    }

    /// Moves a file to another folder, and replaces a file of that name.
    fn move_to(&self, from: &str, folder: &Self, to: &str) -> io::Result<()> {
        Ok(renameat(&self.file, from, &folder.file, to)?)
    }

    /// Removes a file, which may be gone already.
    fn remove(&self, name: &str) {
        let _ = unlinkat(&self.file, name, AtFlags::empty());
    }

    /// Removes a folder in this one with the files in it, as far as possible.
    fn remove_folder(&self, name: &str) {
        let Ok(folder) = self.find(name) else { return };
        folder.names().iter().for_each(|name| folder.remove(name));
        let _ = unlinkat(&self.file, name, AtFlags::REMOVEDIR);
    }

    /// Removes this folder, if it is empty.
    fn remove_itself(&self) {
        let _ = unlinkat(CWD, &self.path, AtFlags::REMOVEDIR);
    }

    /// The names of its entries, without those that are not UTF-8.
    fn names(&self) -> Vec<String> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let entries = openat(&self.file, ".", flags, Mode::empty()).and_then(Dir::new);
        let entries = entries.into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| Some(entry.file_name().to_str().ok()?.to_owned()));
        names.filter(|name| name != "." && name != "..").collect()
    }
}

/// Whether this name is still that of an opened file.
pub(crate) fn is_named(folder: impl AsFd, name: impl Arg, file: &File) -> bool {
    let place = |stat: Stat| (stat.st_dev, stat.st_ino);
    let named = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).map(place);
    named.is_ok() && named == fstat(file).map(place)
}

fn check_owner(stat: &Stat) -> io::Result<()> {
    if stat.st_uid == own_user() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, OtherOwner { owner: stat.st_uid }))
}

/// The public error at this path.
fn open_error(path: &Path, source: io::Error) -> OpenStoreError {
    if source.raw_os_error() == Some(Errno::LOOP.raw_os_error()) {
        return OpenStoreError::Link { path: path.to_owned() };
    }
    match source.get_ref().and_then(|inner| inner.downcast_ref()) {
        Some(&OtherOwner { owner }) => {
            OpenStoreError::Owner { place: path.display().to_string(), owner, user: own_user() }
        }
        None => OpenStoreError::Folder { path: path.to_owned(), source },
    }
}

#[cfg(test)]
mod tests {
    use std::fs::DirBuilder;
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown, symlink};
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;
    use crate::other_user::{NOBODY, as_nobody, can_act_as_nobody};

    /// A folder that is removed after the test.
    struct TestFolder(PathBuf);

    impl TestFolder {
        fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            // Only uniqueness is needed.
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path =
                std::env::temp_dir().join(format!("pleach-file-store-{}-{number}", std::process::id()));
            DirBuilder::new().mode(0o700).create(&path).expect("a fresh folder");
            Self(path)
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn soon() -> Nanos {
        now() + Duration::from_millis(30)
    }

    fn late() -> Nanos {
        now() + Duration::from_secs(60)
    }

    #[test]
    fn what_one_rank_sets_the_others_read_and_claims_are_exclusive() {
        let folder = TestFolder::new();
        let mut zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let mut one = FileStore::open(&folder.0, 1, false, late()).expect("rank 1 opens");
        one.set("address/1", b"there", late()).expect("set");
        assert_eq!(zero.wait(&["address/1".to_owned()], late(), late()).expect("there"), [b"there"]);
        assert_eq!(zero.claim("rank/7", b"a", late()).expect("claim"), Claim::Taken);
        assert_eq!(one.claim("rank/7", b"b", late()).expect("claim"), Claim::Present(b"a".to_vec()));
        assert!(one.set("NO KEY", b"", late()).is_err());
    }

    #[test]
    fn files_of_a_job_that_died_are_not_used_and_are_removed_by_the_next_one() {
        let folder = TestFolder::new();
        let stale = folder.0.join("job-0123456789abcdef01234567");
        DirBuilder::new().mode(0o700).create(&stale).expect("made");
        std::fs::write(stale.join(ALIVE), b"").expect("written");
        std::fs::write(stale.join("key.rank.1"), b"old").expect("written");
        std::fs::write(folder.0.join(CURRENT), b"job-0123456789abcdef01234567").expect("written");
        let other = folder.0.join("job-results");
        std::fs::create_dir(&other).expect("made");
        let error = FileStore::open(&folder.0, 1, false, soon()).expect_err("its rank 0 is dead");
        assert!(matches!(error, OpenStoreError::NoRankZero { .. }), "{error}");
        let mut zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        assert!(!stale.exists());
        assert!(other.exists(), "a folder that no rank 0 has made is nobody's to remove");
        assert_eq!(zero.claim("rank/1", b"new", late()).expect("claim"), Claim::Taken);
    }

    #[test]
    fn a_second_rank_0_is_refused_while_the_first_lives_and_a_later_job_waits_for_its_own() {
        let folder = TestFolder::new();
        let mut zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let error = FileStore::open(&folder.0, 0, false, soon()).expect_err("there is one");
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        zero.seal(late());
        let error = FileStore::open(&folder.0, 1, false, soon()).expect_err("sealed");
        assert!(matches!(error, OpenStoreError::NoRankZero { .. }), "{error}");
        drop(zero);
        let _zero = FileStore::open(&folder.0, 0, false, late()).expect("the next job's rank 0 opens");
        FileStore::open(&folder.0, 1, false, late()).expect("and its rank 1 finds it");
    }

    #[test]
    fn a_wait_names_what_is_missing_ends_on_failure_and_ends_with_rank_0() {
        let folder = TestFolder::new();
        let zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let mut one = FileStore::open(&folder.0, 1, false, late()).expect("rank 1 opens");
        let mut two = FileStore::open(&folder.0, 2, false, late()).expect("rank 2 opens");
        one.set("rank/1", b"", late()).expect("set");
        let keys = ["rank/0", "rank/1", "rank/2"].map(str::to_owned);
        let error = one.wait(&keys, soon(), late()).expect_err("not all are there");
        assert!(
            matches!(&error, StoreError::Missing { keys, .. } if *keys == ["rank/0", "rank/2"]),
            "{error}"
        );
        two.fail("first", late());
        two.fail("second", late());
        let error = one.wait(&keys, late(), late()).expect_err("ended");
        assert!(matches!(&error, StoreError::Failed { reason } if reason == "first"), "{error}");
        let zero = std::thread::spawn(move || drop(zero));
        let error = one.wait(&keys, late(), late()).expect_err("is told even though rank 0 is closing");
        assert!(matches!(error, StoreError::Failed { .. }), "{error}");
        drop(two);
        drop(one);
        zero.join().expect("ends");
        let zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let mut one = FileStore::open(&folder.0, 1, false, late()).expect("rank 1 opens");
        drop(zero);
        let error = one.wait(&keys, late(), late()).expect_err("rank 0 is gone");
        assert!(matches!(error, StoreError::Lost { .. }), "{error}");
    }

    /// Each one removes the folder when it ends, while the others wait for it.
    #[test]
    fn of_those_that_hand_a_private_folder_on_one_has_it_at_a_time() {
        let outer = TestFolder::new();
        let folder = outer.0.join("meeting");
        // Relaxed: a value that is not its own is enough to fail.
        let is_held = AtomicBool::new(false);
        let hold = || {
            for _ in 0..100 {
                let mut zero = FileStore::open(&folder, 0, true, late()).expect("it is handed on");
                assert!(!is_held.swap(true, Ordering::Relaxed), "another one has it");
                let mut one = FileStore::open(&folder, 1, true, late()).expect("it is found");
                one.set("rank/1", b"", late()).expect("set");
                zero.wait(&["rank/1".to_owned()], late(), late()).expect("it is the same table");
                is_held.store(false, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(hold);
            }
        });
        assert!(!folder.exists());
    }

    #[test]
    fn a_rank_that_waits_while_the_folder_is_made_anew_finds_the_next_job() {
        let folder = TestFolder::new();
        let protocol = folder.0.join("meeting");
        let open = || FileStore::open(&protocol, 0, true, late()).expect("rank 0 opens");
        let mut zero = Some(open());
        zero.as_mut().expect("is open").seal(late());
        let mut looks = 0;
        let found = FileStore::find(
            || {
                looks += 1;
                if looks == 2 {
                    drop(zero.take());
                    zero = Some(open());
                }
                Folder::open(&folder.0, OtherUsers::NoAccess)?
                    .inner(Path::new("meeting"), OtherUsers::NoAccess)
            },
            late(),
        );
        let mut one = found.expect("the next job is there");
        one.set("rank/1", b"", late()).expect("rank 0 has it");
    }

    #[test]
    fn a_private_folder_is_removed_with_the_job_and_refused_when_others_can_reach_it() {
        let outer = TestFolder::new();
        let folder = outer.0.join("job");
        let store = FileStore::open(&folder, 0, true, late()).expect("rank 0 opens");
        drop(store);
        assert!(!folder.exists());
        std::fs::create_dir(&folder).expect("made");
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o770)).expect("changed");
        let error = FileStore::open(&folder, 0, true, late()).expect_err("open to others");
        assert!(matches!(error, OpenStoreError::Unsafe { mode: 0o770, .. }), "{error}");
        let error = FileStore::open(&folder, 0, false, late()).expect_err("others can write it");
        assert!(error.to_string().ends_with(&format!("run 'chmod 700 {}'", folder.display())), "{error}");
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).expect("changed");
        let store = FileStore::open(&folder, 0, false, late()).expect("others only see that it is there");
        let mode = |path: &Path| std::fs::metadata(path).expect("is there").permissions().mode() & 0o777;
        assert_eq!(mode(&folder.join(&store.job_name)), 0o700);
        assert_eq!(mode(&folder.join(&store.job_name).join(ALIVE)), 0o600);
    }

    #[test]
    fn a_link_in_the_folder_or_in_its_place_is_refused_and_costs_no_file() {
        let outer = TestFolder::new();
        let (precious, folder) = (outer.0.join("precious"), outer.0.join("job"));
        std::fs::write(&precious, b"something that I need").expect("written");
        std::fs::create_dir(&folder).expect("made");
        for (rank, name) in [(0, OWNER), (1, CURRENT)] {
            symlink(&precious, folder.join(name)).expect("made");
            let error = FileStore::open(&folder, rank, false, late()).expect_err("leads elsewhere");
            let path = folder.join(name);
            assert!(matches!(&error, OpenStoreError::Link { path: refused } if *refused == path), "{error}");
            std::fs::remove_file(&path).expect("is there");
        }
        let link = outer.0.join("link");
        symlink(&folder, &link).expect("made");
        let with_slash = PathBuf::from(format!("{}/", link.display()));
        for private in [false, true] {
            for given in [&link, &with_slash] {
                let error = FileStore::open(given, 0, private, late()).expect_err("leads elsewhere");
                assert!(matches!(&error, OpenStoreError::Link { path } if *path == link), "{error}");
            }
        }
        std::fs::remove_dir_all(&folder).expect("is there");
        let error = FileStore::open(&with_slash, 0, false, late()).expect_err("leads nowhere");
        assert!(matches!(&error, OpenStoreError::Link { .. }), "{error}");
        assert_eq!(std::fs::read(&precious).expect("is there"), b"something that I need");
    }

    #[test]
    fn a_folder_or_a_file_of_another_user_is_refused_by_both() {
        if !can_act_as_nobody() {
            return;
        }
        let outer = TestFolder::new();
        std::fs::set_permissions(&outer.0, PermissionsExt::from_mode(0o755)).expect("changed");
        let folder = outer.0.join("job");
        let zero = FileStore::open(&folder, 0, false, late()).expect("rank 0 opens");
        let text =
            as_nobody(|| FileStore::open(&folder, 1, false, late()).map(drop).map_err(|e| e.to_string()));
        let path = folder.display();
        let expected = format!(
            "rendezvous of another user: {path} belongs to user 0, this process is of user 65534; \
             start all ranks as one user, or give all the same PLEACH_SECRET_FILE and meet at tcp://HOST:PORT"
        );
        assert_eq!(text, Err(expected));
        drop(zero);
        chown(folder.join(OWNER), Some(NOBODY), None).expect("root may");
        let error = FileStore::open(&folder, 0, false, late()).expect_err("its owner can change it");
        let path = folder.join(OWNER).display().to_string();
        assert!(matches!(&error, OpenStoreError::Owner { place, owner: NOBODY, .. } if *place == path));
        chown(&folder, Some(NOBODY), None).expect("root may");
        let error = FileStore::open(&folder, 0, false, late()).expect_err("its owner can change it");
        assert!(matches!(error, OpenStoreError::Owner { owner: NOBODY, user: 0, .. }), "{error}");
    }
}
