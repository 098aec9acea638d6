//! The table of ranks that meet, in a store outside of the job.
//!
//! Rank 0 makes the table: it takes a fresh name, a lease, and writes both to the key `current`. A
//! key of the table is a key under its name. The table lives while rank 0 renews the lease, so that
//! of a job that has ended nothing is taken: the others take a table only when they have seen its
//! lease alive, and give it up when the lease is over.
//!
//! **Invariant:** of several processes that make a table at once one succeeds, and none does while
//! the owner of another one lives.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::sealed::{Forged, open, seal};
use super::{Change, Exchanged, Lease, OutsideError, OutsideStore, Pulse};
use crate::auth::{Secret, random_bytes};
use crate::clock::now;
use crate::rendezvous::backoff::Backoff;
use crate::rendezvous::{Claim, OpenStoreError, Store, StoreError, StorePath, VALUE_BYTES_MAX, check, cut};
use crate::wire::{Malformed, Reader, Writer};
use crate::{Nanos, Rank};

const CURRENT: &str = "current";

/// The reason of a failure.
const FAILED: &str = "failed";

/// How long one renewal may take.
const BEAT_LIMIT: Duration = Duration::from_secs(2);

/// How often a rank that waits looks for a failure and whether the owner lives.
const LOOK: Duration = Duration::from_millis(200);

/// How long a process waits for the store when it closes a table.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);

/// Longest name of a table.
const NAME_BYTES_MAX: usize = 64;

/// What the table in `current` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Ranks come.
    Open = 0,
    /// All ranks are there.
    Sealed = 1,
    /// Its owner has closed it.
    Closed = 2,
}

/// The value of `current`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Current {
    phase: Phase,
    name: String,
    lease: Lease,
}

impl Current {
    fn encode(&self) -> Vec<u8> {
        let writer = Writer::default().u8(self.phase as u8).bytes(self.name.as_bytes());
        writer.bytes(self.lease.name.as_bytes()).u64(self.lease.number).finish()
    }

    fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader::new(bytes);
        let phase = match reader.u8()? {
            0 => Phase::Open,
            1 => Phase::Sealed,
            2 => Phase::Closed,
            _ => return Err(Malformed),
        };
        let (name, lease) = (reader.text(NAME_BYTES_MAX)?, reader.text(2 * NAME_BYTES_MAX)?);
        let lease = Lease { name: lease, number: reader.u64()? };
        reader.end()?;
        Ok(Self { phase, name, lease })
    }
}

/// See [`super::check_decoders`].
pub(super) fn check_decoder(bytes: &[u8]) {
    if let Ok(current) = Current::decode(bytes) {
        assert_eq!(current.encode(), bytes);
    }
}

/// Renews a lease until it is dropped.
pub(in crate::rendezvous) struct Beat {
    /// Dropping it ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Beat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Beat(..)")
    }
}

impl Beat {
    /// Renews this lease. `is_presence`: it says that a member lives, so it is made anew where it
    /// has run out, and revoked when this is dropped.
    pub(in crate::rendezvous) fn start(
        mut store: Box<dyn OutsideStore>,
        mut lease: Lease,
        is_presence: bool,
    ) -> io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let thread = std::thread::Builder::new().name("pleach-lease".to_owned());
        let thread = thread.spawn(move || {
            while stopped.recv_timeout(store.beat()) == Err(RecvTimeoutError::Timeout) {
                match store.renew(&lease, now() + BEAT_LIMIT) {
                    Ok(true) => {}
                    Ok(false) if is_presence => match store.presence(now() + BEAT_LIMIT) {
                        Ok(next) => lease = next,
                        Err(error) => tracing::debug!("no lease is made: {error}"),
                    },
                    Ok(false) => {
                        tracing::debug!("the lease {} at {} has run out", lease.name, store.address());
                        return;
                    }
                    // It lasts for a while, and the store may come back.
                    Err(error) => tracing::debug!("the lease {} is not renewed: {error}", lease.name),
                }
            }
            if is_presence {
                store.revoke(&lease, now() + CLOSE_LIMIT);
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// See the module.
pub(in crate::rendezvous) struct OutsideTable {
    store: Box<dyn OutsideStore>,
    secret: Secret,
    current: Current,
    /// Of the process that made the table: what it wrote to `current`, and its lease.
    owner: Option<(Vec<u8>, Beat)>,
    pulse: Pulse,
    looked: Nanos,
    has_failed: bool,
}

impl OutsideTable {
    /// Opens the table: rank 0 makes it, the others wait for it until the deadline.
    pub(in crate::rendezvous) fn open(
        store: Box<dyn OutsideStore>,
        rank: Rank,
        secret: Option<&Secret>,
        deadline: Nanos,
    ) -> Result<Self, OpenStoreError> {
        let Some(secret) = secret.cloned() else {
            return Err(OutsideError::SecretRequired { address: store.address().to_owned() }.into());
        };
        if rank == 0 { Self::create(store, secret, deadline) } else { Self::find(store, secret, deadline) }
    }

    fn create(
        mut store: Box<dyn OutsideStore>,
        secret: Secret,
        deadline: Nanos,
    ) -> Result<Self, OpenStoreError> {
        let place = store.address().to_owned();
        let busy = || OpenStoreError::InUse { place: place.clone() };
        let before = store.read(CURRENT, deadline)?;
        if let Some(sealed) = &before {
            let current = read_current(&secret, sealed, &place)?;
            let mut backoff = Backoff::until(deadline);
            let mut pulse = Pulse::default();
            loop {
                let is_closed = current.phase == Phase::Closed;
                match if is_closed {
                    Some(false)
                } else {
                    store.is_alive(&current.lease, &mut pulse, deadline)?
                } {
                    Some(false) => break,
                    Some(true) => return Err(busy()),
                    None if !backoff.again() => return Err(busy()),
                    None => {}
                }
            }
        }
        let name: [u8; 12] = random_bytes();
        let name: String = name.iter().map(|byte| format!("{byte:02x}")).collect();
        let lease = store.lease(&name, deadline)?;
        let current = Current { phase: Phase::Open, name, lease };
        let sealed = seal(&secret, CURRENT, &current.encode());
        let change = Change { expected: before.as_deref(), value: &sealed, lease: None };
        if store.exchange(CURRENT, change, deadline)? != Exchanged::Written {
            store.revoke(&current.lease, now() + CLOSE_LIMIT);
            return Err(busy());
        }
        let beat = Beat::start(store.again(), current.lease.clone(), false);
        let beat = beat.map_err(|source| OutsideError::Unreachable { address: place, source })?;
        let pulse = Pulse::default();
        let owner = Some((sealed, beat));
        Ok(Self { store, secret, current, owner, pulse, looked: now(), has_failed: false })
    }

    fn find(
        mut store: Box<dyn OutsideStore>,
        secret: Secret,
        deadline: Nanos,
    ) -> Result<Self, OpenStoreError> {
        let mut backoff = Backoff::until(deadline);
        let mut seen: Option<(Current, Pulse)> = None;
        let mut has_answered = false;
        loop {
            let found = match store.read(CURRENT, deadline) {
                Ok(Some(sealed)) => Some(read_current(&secret, &sealed, store.address())?),
                Ok(None) => None,
                // It has answered before: no time is left for another answer.
                Err(_) if has_answered && now() >= deadline => None,
                Err(error) => return Err(error.into()),
            };
            has_answered = true;
            if let Some(current) = found.filter(|current| current.phase == Phase::Open) {
                let (_, pulse) = match &mut seen {
                    Some(seen) if seen.0 == current => seen,
                    seen => seen.insert((current.clone(), Pulse::default())),
                };
                let is_alive = match store.is_alive(&current.lease, pulse, deadline) {
                    Err(_) if now() >= deadline => None,
                    result => result?,
                };
                if is_alive == Some(true) {
                    let pulse = *pulse;
                    let (owner, looked) = (None, now());
                    return Ok(Self { store, secret, current, owner, pulse, looked, has_failed: false });
                }
            }
            if !backoff.again() {
                let (place, waited) = (store.address().to_owned(), backoff.waited());
                return Err(OpenStoreError::NobodyThere { place, waited });
            }
        }
    }

    fn key(&self, key: &str) -> String {
        format!("table-{}/{key}", self.current.name)
    }

    fn opened(&self, key: &str, sealed: &[u8]) -> Result<Vec<u8>, StoreError> {
        open(&self.secret, key, sealed).map_err(|Forged| {
            let (key, address) = (key.to_owned(), self.store.address().to_owned());
            StoreError::Outside(OutsideError::Forged { key, address })
        })
    }

    fn put(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<Claim, StoreError> {
        let key = self.key(key);
        let sealed = seal(&self.secret, &key, value);
        let change = Change { expected: None, value: &sealed, lease: Some(&self.current.lease) };
        match self.store.exchange(&key, change, deadline) {
            Ok(Exchanged::Written) => Ok(Claim::Taken),
            Ok(Exchanged::Present(Some(present))) => Ok(Claim::Present(self.opened(&key, &present)?)),
            Ok(Exchanged::Present(None)) => Err(self.lost()),
            // No key is written with a lease that has run out.
            Err(error) => match self.store.read(&self.current.lease.name, deadline) {
                Ok(None) => Err(self.lost()),
                _ => Err(error.into()),
            },
        }
    }

    fn get(&mut self, key: &str, deadline: Nanos) -> Result<Option<Vec<u8>>, StoreError> {
        let key = self.key(key);
        let Some(sealed) = self.store.read(&key, deadline)? else { return Ok(None) };
        self.opened(&key, &sealed).map(Some)
    }

    fn lost(&self) -> StoreError {
        let address = self.store.address().to_owned();
        StoreError::Lost { address, source: io::ErrorKind::ConnectionAborted.into() }
    }

    /// Looks for a failure, and whether the owner lives.
    fn look(&mut self, deadline: Nanos) -> Result<(), StoreError> {
        self.looked = now();
        if let Some(reason) = self.get(FAILED, deadline)? {
            let reason = cut(&String::from_utf8_lossy(&reason)).to_owned();
            return Err(StoreError::Failed { reason });
        }
        match self.store.is_alive(&self.current.lease, &mut self.pulse, deadline)? {
            Some(false) => Err(self.lost()),
            _ => Ok(()),
        }
    }

    /// Says in `current` what the table is now.
    fn enter(&mut self, phase: Phase, deadline: Nanos) {
        let Some((written, _)) = &mut self.owner else { return };
        let next = Current { phase, ..self.current.clone() };
        let sealed = seal(&self.secret, CURRENT, &next.encode());
        let change = Change { expected: Some(written), value: &sealed, lease: None };
        // Where the store is away the lease says it soon.
        if self.store.exchange(CURRENT, change, deadline).ok() == Some(Exchanged::Written) {
            *written = sealed;
        }
    }
}

fn read_current(secret: &Secret, sealed: &[u8], address: &str) -> Result<Current, OutsideError> {
    let forged = || OutsideError::Forged { key: CURRENT.to_owned(), address: address.to_owned() };
    let value = open(secret, CURRENT, sealed).map_err(|Forged| forged())?;
    Current::decode(&value).map_err(|Malformed| forged())
}

impl Store for OutsideTable {
    fn set(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<(), StoreError> {
        match self.claim(key, value, deadline)? {
            Claim::Taken => Ok(()),
            Claim::Present(_) => Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() }),
        }
    }

    fn claim(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<Claim, StoreError> {
        check(key, value)?;
        debug_assert!(value.len() <= VALUE_BYTES_MAX);
        self.put(key, value, deadline)
    }

    fn wait(&mut self, keys: &[String], until: Nanos, deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        let mut backoff = Backoff::until(until);
        let mut values = Vec::with_capacity(keys.len());
        let mut has_answered = false;
        loop {
            while let Some(key) = keys.get(values.len()) {
                match self.get(key, deadline) {
                    Ok(Some(value)) => values.push(value),
                    Ok(None) => break,
                    // It has answered before: no time is left for another answer.
                    Err(_) if has_answered && now() >= until => break,
                    Err(error) => return Err(error),
                }
            }
            has_answered = true;
            if values.len() == keys.len() {
                return Ok(values);
            }
            if now().since(self.looked) >= LOOK && now() < until {
                self.look(deadline)?;
            }
            if !backoff.again() {
                let mut missing = keys[values.len()..].to_vec();
                missing.retain(|key| !matches!(self.get(key, deadline), Ok(Some(_))));
                return Err(StoreError::Missing { keys: missing, waited: backoff.waited(), refused: None });
            }
        }
    }

    fn fail(&mut self, reason: &str, deadline: Nanos) {
        self.has_failed = true;
        // The first reason counts; if rank 0 is gone, the others find out themselves.
        let _ = self.put(FAILED, cut(reason).as_bytes(), deadline);
    }

    fn seal(&mut self, deadline: Nanos) {
        self.enter(Phase::Sealed, deadline);
    }

    fn path(&self) -> Option<StorePath> {
        self.store.path()
    }
}

impl Drop for OutsideTable {
    fn drop(&mut self) {
        if self.owner.is_none() {
            return;
        }
        let deadline = now() + CLOSE_LIMIT;
        self.enter(Phase::Closed, deadline);
        self.owner = None;
        // The reason of a failure stays until the lease is over: the others read it.
        if !self.has_failed && self.get(FAILED, deadline).is_ok_and(|reason| reason.is_none()) {
            self.store.revoke(&self.current.lease, deadline);
        }
    }
}
