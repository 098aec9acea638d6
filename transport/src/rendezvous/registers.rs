//! The registers of a job, each of which is written once, in a store that outlives its processes.
//!
//! The members of a job keep their records there ([`pleach-membership`]'s `Maker::Store`): one
//! register a number. Which store it is the rendezvous says: a folder (`file://`), etcd, or
//! PyTorch's `TCPStore`. Where ranks meet at a process of their own (`tcp://`) there is none.
//!
//! **Invariant:** of all that write to a register one is first, and everybody reads its value. A
//! register of another job, of another number, or without the MAC of the job's secret is not read.
//!
//! [`pleach-membership`]: https://docs.rs/pleach-membership

use super::file::RegisterFolder;
use super::outside::sealed::{Forged, open, seal};
use super::outside::{Change, Exchanged, OutsideStore, store_of};
use super::{OpenStoreError, OutsideError, Rendezvous, World};
use crate::Nanos;
use crate::auth::Secret;

/// Bytes of a job's digest in names.
const NAME_BYTES: usize = 8;

enum Home {
    Folder(RegisterFolder),
    Outside(Box<dyn OutsideStore>),
}

/// See the module.
pub struct Registers {
    home: Home,
    secret: Secret,
    /// The beginning of all keys.
    job: String,
}

impl std::fmt::Debug for Registers {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Registers({})", self.address())
    }
}

/// Whether ranks that meet there keep the records of their job in registers.
#[must_use]
pub fn has_registers(rendezvous: Option<&Rendezvous>) -> bool {
    matches!(rendezvous, Some(Rendezvous::File { .. } | Rendezvous::Etcd { .. } | Rendezvous::C10d { .. }))
}

impl Registers {
    /// The registers of the job with this digest, where ranks of `world` meet; `None`: there are
    /// none. `begins`: the job begins in this process.
    ///
    /// # Errors
    ///
    /// The folder cannot be used, or there is no secret of the user's for a store that others use.
    pub(super) fn open(
        world: &World,
        secret: &Secret,
        job: &[u8; 32],
        begins: bool,
    ) -> Result<Option<Self>, OpenStoreError> {
        let job: String = job[..NAME_BYTES].iter().map(|byte| format!("{byte:02x}")).collect();
        let home = match &world.rendezvous {
            Some(Rendezvous::File { folder }) => Home::Folder(RegisterFolder::open(folder, &job, begins)?),
            Some(rendezvous) => match store_of(rendezvous)? {
                Some(store) if secret.is_of_this_host() => {
                    return Err(OutsideError::SecretRequired { address: store.address().to_owned() }.into());
                }
                Some(store) => Home::Outside(store),
                None => return Ok(None),
            },
            None => return Ok(None),
        };
        Ok(Some(Self { home, secret: secret.clone(), job }))
    }

    /// The store's address, for messages.
    #[must_use]
    pub fn address(&self) -> String {
        match &self.home {
            Home::Folder(folder) => format!("file://{}", folder.path().display()),
            Home::Outside(store) => store.address().to_owned(),
        }
    }

    /// Writes a register, unless it is written. Returns what it holds, whoever wrote it.
    ///
    /// # Errors
    ///
    /// See [`OutsideError`]. The value may be there all the same.
    pub fn write_once(
        &mut self,
        number: u64,
        value: &[u8],
        deadline: Nanos,
    ) -> Result<Vec<u8>, OutsideError> {
        let key = self.key(number);
        let sealed = seal(&self.secret, &key, value);
        let present = match &mut self.home {
            Home::Folder(folder) => folder.write_once(&name(number), &sealed)?,
            Home::Outside(store) => loop {
                let change = Change { expected: None, value: &sealed, lease: None };
                match store.exchange(&key, change, deadline)? {
                    Exchanged::Written => break None,
                    Exchanged::Present(Some(present)) => break Some(present),
                    // Somebody has removed it between comparing and reading.
                    Exchanged::Present(None) if crate::clock::now() < deadline => {}
                    Exchanged::Present(None) => return Err(self.forged(&key)),
                }
            },
        };
        match present {
            None => Ok(value.to_vec()),
            Some(present) => self.opened(&key, &present),
        }
    }

    /// What a register holds, if it is written.
    ///
    /// # Errors
    ///
    /// See [`OutsideError`].
    pub fn read(&mut self, number: u64, deadline: Nanos) -> Result<Option<Vec<u8>>, OutsideError> {
        let key = self.key(number);
        let present = match &mut self.home {
            Home::Folder(folder) => folder.read(&name(number))?,
            Home::Outside(store) => store.read(&key, deadline)?,
        };
        present.map(|present| self.opened(&key, &present)).transpose()
    }

    fn key(&self, number: u64) -> String {
        format!("job-{}/{}", self.job, name(number))
    }

    fn opened(&self, key: &str, sealed: &[u8]) -> Result<Vec<u8>, OutsideError> {
        open(&self.secret, key, sealed).map_err(|Forged| self.forged(key))
    }

    fn forged(&self, key: &str) -> OutsideError {
        OutsideError::Forged { key: key.to_owned(), address: self.address() }
    }
}

fn name(number: u64) -> String {
    format!("record-{number}")
}

#[cfg(test)]
mod tests {
    use std::fs::DirBuilder;
    use std::os::unix::fs::DirBuilderExt;
    use std::path::PathBuf;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    struct TestFolder(PathBuf);

    impl TestFolder {
        fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            // Only uniqueness is needed.
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("pleach-registers-{}-{number}", std::process::id()));
            DirBuilder::new().mode(0o700).create(&path).expect("a fresh folder");
            Self(path)
        }

        fn registers(&self, secret: u8, job: u8, begins: bool) -> Registers {
            let rendezvous = Some(Rendezvous::File { folder: self.0.clone() });
            let world = World { rendezvous, ..World::alone() };
            let opened = Registers::open(&world, &Secret::new(&[secret; 32]), &[job; 32], begins);
            opened.expect("the folder can be used").expect("a folder has registers")
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn of_many_writers_one_is_first_and_all_read_its_value() {
        let folder = TestFolder::new();
        let found: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let write = |writer: u8| {
                let mut registers = folder.registers(7, 1, false);
                scope.spawn(move || registers.write_once(3, &[writer; 9], Nanos::MAX).expect("is written"))
            };
            let writers: Vec<_> = (0..8).map(write).collect();
            writers.into_iter().map(|writer| writer.join().expect("does not panic")).collect()
        });
        assert!(found.iter().all(|value| value == &found[0]), "{found:?}");
        let mut registers = folder.registers(7, 1, false);
        assert_eq!(registers.read(3, Nanos::MAX).expect("is there"), Some(found[0].clone()));
        assert_eq!(registers.read(4, Nanos::MAX).expect("can be looked for"), None);
    }

    #[test]
    fn a_register_of_another_secret_number_or_job_is_not_read() {
        let folder = TestFolder::new();
        let mut registers = folder.registers(7, 1, false);
        registers.write_once(0, b"a record", Nanos::MAX).expect("is written");
        let error = folder.registers(8, 1, false).read(0, Nanos::MAX).expect_err("has another secret");
        assert!(error.to_string().contains("PLEACH_SECRET_FILE"), "{error}");
        assert!(matches!(
            folder.registers(8, 1, false).write_once(0, b"x", Nanos::MAX),
            Err(OutsideError::Forged { .. })
        ));
        let home = registers.address().replacen("file://", "", 1);
        let at = |number: u64| PathBuf::from(&home).join(name(number));
        std::fs::copy(at(0), at(1)).expect("is copied");
        assert!(matches!(registers.read(1, Nanos::MAX), Err(OutsideError::Forged { .. })), "a replay");
        let mut other = folder.registers(7, 2, false);
        let home = other.address().replacen("file://", "", 1);
        std::fs::copy(at(0), PathBuf::from(home).join(name(0))).expect("is copied");
        assert!(matches!(other.read(0, Nanos::MAX), Err(OutsideError::Forged { .. })), "of another job");
    }

    #[test]
    fn a_job_that_begins_removes_the_registers_of_others() {
        let folder = TestFolder::new();
        folder.registers(7, 1, false).write_once(0, b"a record", Nanos::MAX).expect("is written");
        let _new = folder.registers(7, 2, true);
        let mut old = folder.registers(7, 1, false);
        assert_eq!(old.read(0, Nanos::MAX).expect("can be looked for"), None);
    }
}
