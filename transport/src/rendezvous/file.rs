//! A store in a folder that all ranks can write.
//!
//! Rank 0 makes a folder for this one job inside the given one, and puts its name into the file `current` by renaming;
//! a key is a file there. **Invariant:** the job that `current` names is alive exactly as long as rank 0 holds a lock
//! (`flock`) on that job's file `alive`, which the kernel releases when rank 0's process ends, so what an earlier job
//! left behind is recognised, never used, and removed by the next rank 0.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};

use super::pause::Attempts;
use super::{Claim, OpenError, Store, StoreError, check, cut};
use crate::auth::challenge;
use crate::clock::now;
use crate::{Nanos, Rank};

/// Names the folder of the job that is meeting now.
const CURRENT: &str = "current";

/// Locked by a rank 0 as long as it uses the folder.
const OWNER: &str = "owner";

/// Locked by a job's rank 0 as long as the job's table is to be used.
const ALIVE: &str = "alive";

/// Locked, together with others, by every rank but 0 while it uses the job's table.
const PRESENT: &str = "present";

/// Beginning of the names of jobs' folders.
const JOB: &str = "job-";

/// What a rank that ends the meeting leaves there.
const FAILED: &str = "failed";

/// How long rank 0 waits for the rank 0 of the job before to let go of the folder.
const OWNER_PATIENCE: Duration = Duration::from_secs(5);

/// How long rank 0 keeps the table of a meeting that failed, so that the others read why.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(3);

/// A table in a shared folder.
#[derive(Debug)]
pub struct FileStore {
    folder: PathBuf,
    job: PathBuf,
    owner: Option<Owner>,
    /// Holds the lock of a rank that is not 0.
    _present: Option<File>,
}

/// What rank 0 holds.
#[derive(Debug)]
struct Owner {
    alive: File,
    owner: File,
    remove_folder: bool,
}

impl FileStore {
    /// Opens the table in `folder`: rank 0 makes it, the others wait for that until the deadline. The folder is made if
    /// it does not exist; `private` says that it belongs to this job and user alone, and goes away with the job.
    ///
    /// # Errors
    ///
    /// See [`OpenError`].
    pub fn open(folder: &Path, rank: Rank, private: bool, deadline: Nanos) -> Result<Self, OpenError> {
        if private {
            if let Some(parent) = folder.parent() {
                make_private(parent)?;
            }
            make_private(folder)?;
        } else {
            make(folder)?;
        }
        if rank == 0 { Self::create(folder, private, deadline) } else { Self::find(folder, deadline) }
    }

    fn create(folder: &Path, private: bool, deadline: Nanos) -> Result<Self, OpenError> {
        let path = folder.join(OWNER);
        let failed = |source| OpenError::Folder { path: path.clone(), source };
        let owner = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        let owner = owner.map_err(failed)?;
        let mut attempts = Attempts::until(deadline.min(now() + OWNER_PATIENCE));
        while let Err(error) = flock(&owner, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK {
                return Err(failed(error.into()));
            }
            if !attempts.again() {
                let holder = std::fs::read_to_string(&path).unwrap_or_default();
                return Err(OpenError::Busy { folder: folder.to_owned(), holder });
            }
        }
        Self::create_owned(folder, owner, private)
            .map_err(|source| OpenError::Folder { path: folder.to_owned(), source })
    }

    fn create_owned(folder: &Path, mut owner: File, private: bool) -> io::Result<Self> {
        owner.set_len(0)?;
        write!(owner, "process {} on {}", std::process::id(), super::record::host_name())?;
        remove(&folder.join(CURRENT));
        for entry in std::fs::read_dir(folder)?.flatten() {
            if entry.file_name().as_encoded_bytes().starts_with(JOB.as_bytes()) {
                // Of a job that ended without closing. If it cannot be removed it is still not used.
                let _ = std::fs::remove_dir_all(entry.path());
            }
        }
        let name = format!("{JOB}{}", unique());
        let job = folder.join(&name);
        DirBuilder::new().mode(0o700).create(&job)?;
        File::create_new(job.join(PRESENT))?;
        let alive = OpenOptions::new().create_new(true).write(true).mode(0o600).open(job.join(ALIVE))?;
        flock(&alive, FlockOperation::NonBlockingLockExclusive)?;
        let owner = Owner { alive, owner, remove_folder: private };
        let store = Self { folder: folder.to_owned(), job, owner: Some(owner), _present: None };
        let draft = store.draft(name.as_bytes())?;
        std::fs::rename(draft, folder.join(CURRENT))?;
        Ok(store)
    }

    fn find(folder: &Path, deadline: Nanos) -> Result<Self, OpenError> {
        let mut attempts = Attempts::until(deadline);
        loop {
            if let Some(job) = living_job(folder)
                && let Ok(present) = File::open(job.join(PRESENT))
                && flock(&present, FlockOperation::NonBlockingLockShared).is_ok()
            {
                return Ok(Self { folder: folder.to_owned(), job, owner: None, _present: Some(present) });
            }
            if !attempts.again() {
                return Err(OpenError::NoRankZero { folder: folder.to_owned(), waited: attempts.waited() });
            }
        }
    }

    /// A file of the job's folder with these bytes, under a name that nobody looks at.
    fn draft(&self, value: &[u8]) -> io::Result<PathBuf> {
        let path = self.job.join(format!("draft.{}", unique()));
        let mut file = OpenOptions::new().create_new(true).write(true).mode(0o600).open(&path)?;
        file.write_all(value)?;
        Ok(path)
    }

    /// Gives `key` this value if it has none.
    fn put(&self, key: &str, value: &[u8]) -> Result<Claim, StoreError> {
        let path = self.path(key);
        let failed = |source| self.failed(&path, source);
        let draft = self.draft(value).map_err(failed)?;
        let linked = std::fs::hard_link(&draft, &path);
        remove(&draft);
        match linked {
            Ok(()) => Ok(Claim::Taken),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(Claim::Present(std::fs::read(&path).map_err(failed)?))
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.job.join(format!("key.{}", key.replace('/', ".")))
    }

    fn failed(&self, path: &Path, source: io::Error) -> StoreError {
        // The table is gone when rank 0 is.
        if source.kind() == io::ErrorKind::NotFound && !self.job.exists() {
            return StoreError::Lost { address: self.folder.display().to_string(), source };
        }
        StoreError::Folder { path: path.to_owned(), source }
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

    fn wait(&mut self, keys: &[String], deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        let mut attempts = Attempts::until(deadline);
        let mut values = Vec::with_capacity(keys.len());
        loop {
            if let Ok(reason) = std::fs::read(self.job.join(FAILED)) {
                return Err(StoreError::Failed { reason: cut(&String::from_utf8_lossy(&reason)).to_owned() });
            }
            while let Some(key) = keys.get(values.len()) {
                let path = self.path(key);
                match std::fs::read(&path) {
                    Ok(value) => values.push(value),
                    Err(error) if error.kind() == io::ErrorKind::NotFound && self.job.exists() => break,
                    Err(error) => return Err(self.failed(&path, error)),
                }
            }
            if values.len() == keys.len() {
                return Ok(values);
            }
            if self.owner.is_none() && !is_locked(&self.job.join(ALIVE)) {
                let source = io::ErrorKind::ConnectionAborted.into();
                return Err(StoreError::Lost { address: self.folder.display().to_string(), source });
            }
            if !attempts.again() {
                let missing = keys[values.len()..].iter().filter(|key| !self.path(key).exists());
                let keys = missing.cloned().collect();
                return Err(StoreError::Missing { keys, waited: attempts.waited(), refused: None });
            }
        }
    }

    fn fail(&mut self, reason: &str, _deadline: Nanos) {
        // The first one counts; if rank 0 is gone, the others find out themselves.
        if let Ok(draft) = self.draft(cut(reason).as_bytes()) {
            let _ = std::fs::hard_link(&draft, self.job.join(FAILED));
            remove(&draft);
        }
    }

    fn seal(&mut self, _deadline: Nanos) {
        if self.owner.is_some() {
            remove(&self.folder.join(CURRENT));
        }
    }
}

impl Drop for FileStore {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        remove(&self.folder.join(CURRENT));
        if self.job.join(FAILED).exists()
            && let Ok(present) = File::open(self.job.join(PRESENT))
        {
            let mut attempts = Attempts::until(now() + FAREWELL_TIMEOUT);
            while flock(&present, FlockOperation::NonBlockingLockExclusive).is_err() && attempts.again() {}
        }
        let _ = std::fs::remove_dir_all(&self.job);
        if owner.remove_folder {
            remove(&self.folder.join(OWNER));
            // Not empty when a rank of the next job has written there; it stays then.
            let _ = std::fs::remove_dir(&self.folder);
        }
        // By hand, since a child that was forked meanwhile keeps the files open.
        let _ = flock(&owner.alive, FlockOperation::Unlock);
        let _ = flock(&owner.owner, FlockOperation::Unlock);
    }
}

/// The folder of the job that `current` names, if its rank 0 is alive.
fn living_job(folder: &Path) -> Option<PathBuf> {
    let name = std::fs::read_to_string(folder.join(CURRENT)).ok()?;
    let is_name =
        name.starts_with(JOB) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let job = folder.join(&name);
    (is_name && is_locked(&job.join(ALIVE))).then_some(job)
}

/// Whether somebody holds the lock of a file.
fn is_locked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    // Nobody else waits for this lock, so trying disturbs nobody; closing the file gives it back.
    flock(&file, FlockOperation::NonBlockingLockShared) == Err(rustix::io::Errno::WOULDBLOCK)
}

fn make(folder: &Path) -> Result<(), OpenError> {
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(OpenError::Folder { path: folder.to_owned(), source: error })
        }
        _ => Ok(()),
    }
}

/// Makes a folder in a place where others can write too, such as `/tmp`: they must not have made it before us.
fn make_private(folder: &Path) -> Result<(), OpenError> {
    make(folder)?;
    let failed = |source| OpenError::Folder { path: folder.to_owned(), source };
    let metadata = std::fs::symlink_metadata(folder).map_err(failed)?;
    let owned = metadata.uid() == rustix::process::geteuid().as_raw();
    if metadata.is_dir() && owned && metadata.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(OpenError::Unsafe { folder: folder.to_owned() })
}

/// Removes a file that may be gone already.
fn remove(path: &Path) {
    let _ = std::fs::remove_file(path);
}

/// A name that no other process chooses.
fn unique() -> String {
    challenge()[..12].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    /// A folder that goes away with the test.
    struct Folder(PathBuf);

    impl Folder {
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

    impl Drop for Folder {
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
        let folder = Folder::new();
        let mut zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let mut one = FileStore::open(&folder.0, 1, false, late()).expect("rank 1 opens");
        one.set("address/1", b"there", late()).expect("set");
        assert_eq!(zero.wait(&["address/1".to_owned()], late()).expect("there"), [b"there"]);
        assert_eq!(zero.claim("rank/7", b"a", late()).expect("claim"), Claim::Taken);
        assert_eq!(one.claim("rank/7", b"b", late()).expect("claim"), Claim::Present(b"a".to_vec()));
        assert!(one.set("NO KEY", b"", late()).is_err());
    }

    #[test]
    fn files_of_a_job_that_died_are_not_used_and_are_removed_by_the_next_one() {
        let folder = Folder::new();
        let stale = folder.0.join("job-0123");
        std::fs::create_dir(&stale).expect("made");
        std::fs::write(stale.join(ALIVE), b"").expect("written");
        std::fs::write(stale.join("key.rank.1"), b"old").expect("written");
        std::fs::write(folder.0.join(CURRENT), b"job-0123").expect("written");
        let error = FileStore::open(&folder.0, 1, false, soon()).expect_err("its rank 0 is dead");
        assert!(matches!(error, OpenError::NoRankZero { .. }), "{error}");
        let mut zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        assert!(!stale.exists());
        assert_eq!(zero.claim("rank/1", b"new", late()).expect("claim"), Claim::Taken);
    }

    #[test]
    fn a_second_rank_0_is_refused_while_the_first_lives_and_a_later_job_waits_for_its_own() {
        let folder = Folder::new();
        let mut zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let error = FileStore::open(&folder.0, 0, false, soon()).expect_err("there is one");
        assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
        zero.seal(late());
        let error = FileStore::open(&folder.0, 1, false, soon()).expect_err("sealed");
        assert!(matches!(error, OpenError::NoRankZero { .. }), "{error}");
        drop(zero);
        let _zero = FileStore::open(&folder.0, 0, false, late()).expect("the next job's rank 0 opens");
        FileStore::open(&folder.0, 1, false, late()).expect("and its rank 1 finds it");
    }

    #[test]
    fn a_wait_names_what_is_missing_ends_on_failure_and_ends_with_rank_0() {
        let folder = Folder::new();
        let zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let mut one = FileStore::open(&folder.0, 1, false, late()).expect("rank 1 opens");
        let mut two = FileStore::open(&folder.0, 2, false, late()).expect("rank 2 opens");
        one.set("rank/1", b"", late()).expect("set");
        let keys = ["rank/0", "rank/1", "rank/2"].map(str::to_owned);
        let error = one.wait(&keys, soon()).expect_err("not all are there");
        assert!(
            matches!(&error, StoreError::Missing { keys, .. } if *keys == ["rank/0", "rank/2"]),
            "{error}"
        );
        two.fail("first", late());
        two.fail("second", late());
        let error = one.wait(&keys, late()).expect_err("ended");
        assert!(matches!(&error, StoreError::Failed { reason } if reason == "first"), "{error}");
        let zero = std::thread::spawn(move || drop(zero));
        let error = one.wait(&keys, late()).expect_err("is told even though rank 0 is closing");
        assert!(matches!(error, StoreError::Failed { .. }), "{error}");
        drop(two);
        drop(one);
        zero.join().expect("ends");
        let zero = FileStore::open(&folder.0, 0, false, late()).expect("rank 0 opens");
        let mut one = FileStore::open(&folder.0, 1, false, late()).expect("rank 1 opens");
        drop(zero);
        let error = one.wait(&keys, late()).expect_err("rank 0 is gone");
        assert!(matches!(error, StoreError::Lost { .. }), "{error}");
    }

    #[test]
    fn a_private_folder_is_removed_with_the_job_and_refused_when_others_can_reach_it() {
        let outer = Folder::new();
        let folder = outer.0.join("job");
        let store = FileStore::open(&folder, 0, true, late()).expect("rank 0 opens");
        drop(store);
        assert!(!folder.exists());
        std::fs::create_dir(&folder).expect("made");
        std::fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o770))
            .expect("changed");
        let error = FileStore::open(&folder, 0, true, late()).expect_err("open to others");
        assert!(matches!(error, OpenError::Unsafe { .. }), "{error}");
    }
}
