//! A rendezvous in a store of Python's: an object with the methods `set`, `get`, `check` and `add`
//! of `torch.distributed.Store`.
//!
//! **Invariant:** the GIL is taken for each call alone, and never while a lock of pleach is waited
//! for by a thread that holds the GIL.

use std::io;
use std::time::Duration;

use pleach_transport::Nanos;
use pleach_transport::clock::now;
use pleach_transport::rendezvous::{Claim, Store, StoreError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Key of the reason of a failure.
const FAILED: &str = "failed";

/// Interval between two checks of keys, which grows up to the second.
const CHECK_INTERVALS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(20)];

/// A store of Python's.
pub(crate) struct PythonStore {
    store: Py<PyAny>,
    prefix: String,
}

impl PythonStore {
    pub(crate) fn new(store: Py<PyAny>, prefix: String) -> Self {
        Self { store, prefix }
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

    fn get(&self, key: &str) -> Result<Vec<u8>, StoreError> {
        self.call(|store| store.call_method1("get", (self.key(key),))?.extract::<Vec<u8>>())
    }

    fn has(&self, keys: &[&str]) -> Result<bool, StoreError> {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        self.call(|store| store.call_method1("check", (keys,))?.extract::<bool>())
    }
}

/// The store has nothing to wait for: its keys are asked again after a while.
#[expect(clippy::disallowed_methods, reason = "no wake source is behind a store of Python's")]
fn pause(interval: Duration) {
    std::thread::sleep(interval);
}

impl Store for PythonStore {
    fn set(&mut self, key: &str, value: &[u8], _deadline: Nanos) -> Result<(), StoreError> {
        self.call(|store| {
            store.call_method1("set", (self.key(key), PyBytes::new(store.py(), value))).map(drop)
        })
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
        let mut interval = CHECK_INTERVALS[0];
        while !self.has(&all)? {
            if self.has(&[FAILED])? {
                let reason = self.get(FAILED)?;
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
            pause(interval);
            interval = (interval * 2).min(CHECK_INTERVALS[1]);
        }
        keys.iter().map(|key| self.get(key)).collect()
    }

    fn fail(&mut self, reason: &str, deadline: Nanos) {
        // The first reason counts; without a store the others find out themselves.
        let _ = self.claim(FAILED, reason.as_bytes(), deadline);
    }

    fn seal(&mut self, _deadline: Nanos) {
        // The store belongs to the ranks of one job.
    }
}
