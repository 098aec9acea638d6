//! A rendezvous in a store of Python's: an object with the methods `set`, `get`, `check` and `add`
//! of `torch.distributed.Store`.
//!
//! **Invariants:** the GIL is taken for each call alone, and never while a lock of pleach is waited
//! for by a thread that holds the GIL. A rank that fails the rendezvous returns after the other
//! ranks have read the reason, or when [`REPORT_TIMEOUT`] has passed: the process of that rank may
//! hold the store, and its end would take the reason from them.

use std::io;
use std::time::Duration;

use pleach_transport::clock::now;
use pleach_transport::rendezvous::{Claim, Store, StoreError};
use pleach_transport::{Nanos, Rank};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Key of the reason of a failure.
const FAILED: &str = "failed";

/// Begins the keys of the ranks that use the store,
const USER: &str = "user";

/// and of those among them that know of a failure.
const INFORMED: &str = "informed";

/// How long a rank that fails the rendezvous waits for the others to read the reason.
const REPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// Interval between two checks of keys, which grows up to the second.
const CHECK_INTERVALS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];

/// A store of Python's.
pub(crate) struct PythonStore {
    store: Py<PyAny>,
    prefix: String,
    rank: Rank,
    world_size: u32,
}

impl PythonStore {
    /// The keys of `store` that begin with `prefix`, for these ranks.
    pub(crate) fn new(
        store: Py<PyAny>,
        prefix: String,
        rank: Rank,
        world_size: u32,
    ) -> Result<Self, StoreError> {
        let store = Self { store, prefix, rank, world_size };
        store.put(&rank_key(USER, rank), b"")?;
        Ok(store)
    }

    fn call<T>(&self, call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, StoreError> {
        Python::attach(|py| {
            call(self.store.bind(py)).map_err(|error| StoreError::Lost {
                address: "the store of the caller".to_owned(),
                source: io::Error::other(error.to_string()),
            })
        })
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.call(|store| {
            store.call_method1("set", (self.key(key), PyBytes::new(store.py(), value))).map(drop)
        })
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        self.call(|store| store.call_method1("get", (self.key(key),))?.extract::<Vec<u8>>())
    }

    fn has(&self, keys: &[&str]) -> Result<bool, StoreError> {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        self.call(|store| store.call_method1("check", (keys,))?.extract::<bool>())
    }

    /// Tells the ranks that this one knows of the failure.
    fn report_informed(&self) -> Result<(), StoreError> {
        self.put(&rank_key(INFORMED, self.rank), b"")
    }

    /// Waits until all ranks that use the store know of the failure.
    fn wait_for_informed(&self, until: Nanos) -> Result<(), StoreError> {
        let mut pauses = Pauses::new();
        for rank in (0..self.world_size).filter(|&rank| rank != self.rank) {
            if !self.has(&[&rank_key(USER, rank)])? {
                continue;
            }
            while !self.has(&[&rank_key(INFORMED, rank)])? && now() < until {
                pauses.next();
            }
        }
        Ok(())
    }
}

fn rank_key(begin: &str, rank: Rank) -> String {
    format!("{begin}/{rank}")
}

/// The store has nothing to wait for: its keys are asked again after a while.
struct Pauses {
    interval: Duration,
}

impl Pauses {
    fn new() -> Self {
        Self { interval: CHECK_INTERVALS[0] }
    }

    #[expect(clippy::disallowed_methods, reason = "no wake source is behind a store of Python's")]
    fn next(&mut self) {
        std::thread::sleep(self.interval);
        self.interval = (self.interval * 2).min(CHECK_INTERVALS[1]);
    }
}

impl Store for PythonStore {
    fn set(&mut self, key: &str, value: &[u8], _deadline: Nanos) -> Result<(), StoreError> {
        self.put(key, value)
    }

    fn claim(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<Claim, StoreError> {
        let number = self.call(|store| {
            store.call_method1("add", (self.key(&format!("{key}/claims")), 1))?.extract::<i64>()
        })?;
        if number == 1 {
            self.set(key, value, deadline)?;
            return Ok(Claim::Taken);
        }
        let present = self.wait(&[key.to_owned()], deadline, deadline)?;
        Ok(Claim::Present(present.into_iter().next().unwrap_or_default()))
    }

    fn wait(&mut self, keys: &[String], until: Nanos, _deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        let started = now();
        let all: Vec<&str> = keys.iter().map(String::as_str).collect();
        let mut pauses = Pauses::new();
        while !self.has(&all)? {
            if self.has(&[FAILED])? {
                let reason = self.get(FAILED)?;
                // Without the store nobody waits for this rank.
                let _ = self.report_informed();
                return Err(StoreError::Failed { reason: String::from_utf8_lossy(&reason).into_owned() });
            }
            if now() >= until {
                let mut missing = Vec::new();
                for key in keys {
                    if !self.has(&[key])? {
                        missing.push(key.clone());
                    }
                }
                return Err(StoreError::Missing {
                    keys: missing,
                    waited: now().since(started),
                    refused: None,
                });
            }
            pauses.next();
        }
        keys.iter().map(|key| self.get(key)).collect()
    }

    fn fail(&mut self, reason: &str, deadline: Nanos) {
        // The first reason counts; without a store the others find out themselves.
        let _ = self
            .claim(FAILED, reason.as_bytes(), deadline)
            .and_then(|_| self.report_informed())
            .and_then(|()| self.wait_for_informed(deadline.min(now() + REPORT_TIMEOUT)));
    }

    fn seal(&mut self, _deadline: Nanos) {
        // The store belongs to the ranks of one job.
    }
}
