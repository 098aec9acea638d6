//! A store of the keys with a prefix, for ranks of a job that join a further group.
//!
//! **Invariant:** keys and failures of a prefix are visible under that prefix alone.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::{Claim, Store, StoreError, StorePath, cut};
use crate::Nanos;
use crate::clock::now;
use crate::mutex::lock;

/// Key of the reason of a failure.
const FAILED: &str = "failed";

/// Interval of the checks for a failure during a wait.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The keys of a store that begin with a prefix; a store of its own, as long as the whole store
/// exists.
pub struct PrefixStore {
    whole: Arc<Mutex<Box<dyn Store>>>,
    name: String,
}

impl PrefixStore {
    /// The store of this prefix (lower-case letters, digits and `-`), which no other user of the
    /// store has.
    #[must_use]
    pub fn new(whole: Arc<Mutex<Box<dyn Store>>>, name: &str) -> Self {
        Self { whole, name: name.to_owned() }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.name)
    }

    fn whole(&self) -> MutexGuard<'_, Box<dyn Store>> {
        lock(&self.whole)
    }

    /// The reason of the failure, if there is one.
    fn failure(&self, deadline: Nanos) -> Option<String> {
        let reason = self.whole().wait(&[self.key(FAILED)], now(), deadline).ok()?;
        Some(String::from_utf8_lossy(reason.first()?).into_owned())
    }
}

impl Store for PrefixStore {
    fn set(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<(), StoreError> {
        self.whole().set(&self.key(key), value, deadline)
    }

    fn claim(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<Claim, StoreError> {
        self.whole().claim(&self.key(key), value, deadline)
    }

    fn wait(&mut self, keys: &[String], until: Nanos, deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        let started = now();
        let whole_keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        loop {
            let found = self.whole().wait(&whole_keys, until.min(now() + POLL_INTERVAL), deadline);
            let Err(StoreError::Missing { keys, refused, .. }) = found else { return found };
            if let Some(reason) = self.failure(deadline) {
                return Err(StoreError::Failed { reason });
            }
            if now() >= until {
                let begins = self.key("");
                let keys = keys.iter().map(|key| key.strip_prefix(&begins).unwrap_or(key).to_owned());
                return Err(StoreError::Missing {
                    keys: keys.collect(),
                    waited: now().since(started),
                    refused,
                });
            }
        }
    }

    fn fail(&mut self, reason: &str, deadline: Nanos) {
        // The first reason counts; if rank 0 is gone, the others find out themselves.
        let _ = self.claim(FAILED, cut(reason).as_bytes(), deadline);
    }

    fn seal(&mut self, _deadline: Nanos) {
        // Only ranks of the whole store's world can use it.
    }

    fn path(&self) -> Option<StorePath> {
        self.whole().path()
    }

    fn ended(&self) -> Option<String> {
        self.whole().ended()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A store of this process.
    #[derive(Default)]
    struct Table(BTreeMap<String, Vec<u8>>);

    impl Store for Table {
        fn set(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<(), StoreError> {
            match self.claim(key, value, deadline)? {
                Claim::Taken => Ok(()),
                Claim::Present(_) => Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() }),
            }
        }

        fn claim(&mut self, key: &str, value: &[u8], _deadline: Nanos) -> Result<Claim, StoreError> {
            super::super::check(key, value)?;
            if let Some(present) = self.0.get(key) {
                return Ok(Claim::Present(present.clone()));
            }
            self.0.insert(key.to_owned(), value.to_owned());
            Ok(Claim::Taken)
        }

        fn wait(
            &mut self,
            keys: &[String],
            _until: Nanos,
            _deadline: Nanos,
        ) -> Result<Vec<Vec<u8>>, StoreError> {
            let missing: Vec<_> = keys.iter().filter(|key| !self.0.contains_key(*key)).cloned().collect();
            if missing.is_empty() {
                return Ok(keys.iter().map(|key| self.0[key].clone()).collect());
            }
            Err(StoreError::Missing { keys: missing, waited: Duration::ZERO, refused: None })
        }

        fn fail(&mut self, reason: &str, _deadline: Nanos) {
            panic!("the whole store is told of a part's failure: {reason}");
        }

        fn seal(&mut self, _deadline: Nanos) {
            panic!("the whole store is sealed by a part");
        }
    }

    #[test]
    fn parts_do_not_see_each_other_and_their_failures_are_their_own() {
        let whole: Arc<Mutex<Box<dyn Store>>> = Arc::new(Mutex::new(Box::new(Table::default())));
        let mut one = PrefixStore::new(whole.clone(), "s0-1");
        let mut other = PrefixStore::new(whole, "s0-2");
        let keys = ["rank/0".to_owned(), "rank/1".to_owned()];
        one.set("rank/0", b"one", now()).expect("set");
        other.set("rank/0", b"other", now()).expect("the same key in another part");
        assert_eq!(one.claim("rank/0", b"two", now()).expect("asked"), Claim::Present(b"one".to_vec()));
        let error = one.wait(&keys, now(), now() + MINUTE).expect_err("one key is missing");
        assert!(matches!(&error, StoreError::Missing { keys, .. } if *keys == ["rank/1"]), "{error}");
        one.fail("first", now());
        one.fail("second", now());
        one.seal(now());
        let error = one.wait(&keys, now() + MINUTE, now() + MINUTE).expect_err("the part has ended");
        assert!(matches!(&error, StoreError::Failed { reason } if reason == "first"), "{error}");
        assert_eq!(other.wait(&keys[..1], now(), now() + MINUTE).expect("goes on"), [b"other"]);
    }
}
