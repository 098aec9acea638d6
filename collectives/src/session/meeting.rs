//! The store in which members of an epoch meet again, to make a part of its group.
//!
//! A member tells each value to all other members, over the control streams by which they are
//! connected anyway, and keeps what the others tell. So there is no server that could be lost, and
//! nobody has to be reached anew. A part names its keys by itself and its ranks, so no two members
//! set one key.
//!
//! **Invariant:** values are an epoch's, and nobody waits for one when the epoch is over: a wait
//! ends with the cause.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use pleach_transport::Nanos;
use pleach_transport::clock::now;
use pleach_transport::mutex::lock;
use pleach_transport::rendezvous::{Claim, Store, StoreError, StorePath};
use pleach_vocabulary::Rank;

use super::envelope::of_meeting;
use super::member::Member;

/// Values that are kept, the newest. A part is made by about five values a rank, which nobody needs
/// when it is made.
const VALUES_MAX: usize = 1 << 14;

#[derive(Default)]
struct State {
    /// The epochs before this one are over, and why the last of them is.
    over_below: u64,
    cause: String,
    values: BTreeMap<(u64, String), Vec<u8>>,
    /// The keys of the values, oldest first.
    order: VecDeque<(u64, String)>,
}

/// What the members have told each other; see the module.
#[derive(Default)]
pub(crate) struct Meetings {
    state: Mutex<State>,
    changed: Condvar,
}

impl Meetings {
    /// A value of an epoch. Returns the value that the key had before, if it had one: that stays.
    pub(crate) fn set(&self, epoch: u64, key: String, value: Vec<u8>) -> Option<Vec<u8>> {
        let mut state = lock(&self.state);
        if epoch < state.over_below {
            return None;
        }
        let key = (epoch, key);
        if let Some(before) = state.values.get(&key) {
            return Some(before.clone());
        }
        if state.order.len() == VALUES_MAX
            && let Some(oldest) = state.order.pop_front()
        {
            state.values.remove(&oldest);
        }
        state.order.push_back(key.clone());
        state.values.insert(key, value);
        self.changed.notify_all();
        None
    }

    /// An epoch is over, and those before it.
    pub(crate) fn end(&self, epoch: u64, cause: &str) {
        let mut state = lock(&self.state);
        if epoch < state.over_below {
            return;
        }
        (state.over_below, state.cause) = (epoch + 1, cause.to_owned());
        state.order.retain(|(of, _)| *of > epoch);
        state.values.retain(|(of, _), _| *of > epoch);
        self.changed.notify_all();
    }

    /// Why an epoch is over, if it is.
    fn end_of(&self, epoch: u64) -> Option<String> {
        lock(&self.state).end_of(epoch)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Nanos) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, until.since(now()));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl State {
    fn end_of(&self, epoch: u64) -> Option<String> {
        (epoch < self.over_below).then(|| format!("the members of the session have changed: {}", self.cause))
    }
}

/// The store of an epoch, for this member.
pub(crate) struct EpochStore {
    meetings: Arc<Meetings>,
    /// Sends to the others. The member has the group that has this.
    member: Weak<Member>,
    epoch: u64,
    /// Of the device.
    others: Vec<Rank>,
    /// Where this member's device listens, if others reach it there: parts listen there, too.
    address: Option<IpAddr>,
}

impl EpochStore {
    pub(crate) fn new(
        meetings: &Arc<Meetings>,
        member: &Arc<Member>,
        epoch: u64,
        others: Vec<Rank>,
        address: Option<IpAddr>,
    ) -> Self {
        Self { meetings: Arc::clone(meetings), member: Arc::downgrade(member), epoch, others, address }
    }
}

impl Store for EpochStore {
    fn set(&mut self, key: &str, value: &[u8], deadline: Nanos) -> Result<(), StoreError> {
        self.claim(key, value, deadline).map(drop)
    }

    /// Where two members claim one key at once, each has its own value: only reasons of failures
    /// are claimed so.
    fn claim(&mut self, key: &str, value: &[u8], _deadline: Nanos) -> Result<Claim, StoreError> {
        let Some(message) = of_meeting(self.epoch, key, value) else {
            return Err(StoreError::Limit { key: key.to_owned(), bytes: value.len() });
        };
        if let Some(before) = self.meetings.set(self.epoch, key.to_owned(), value.to_owned()) {
            return Ok(Claim::Present(before));
        }
        if let Some(member) = self.member.upgrade() {
            member.post(&self.others, &message);
        }
        Ok(Claim::Taken)
    }

    fn wait(&mut self, keys: &[String], until: Nanos, _deadline: Nanos) -> Result<Vec<Vec<u8>>, StoreError> {
        let started = now();
        if let Some(member) = self.member.upgrade() {
            member.ask_whether_interrupted();
        }
        let mut state = lock(&self.meetings.state);
        loop {
            if let Some(reason) = state.end_of(self.epoch) {
                return Err(StoreError::Failed { reason });
            }
            let value = |key: &String| state.values.get(&(self.epoch, key.clone())).cloned();
            let found: Vec<Option<Vec<u8>>> = keys.iter().map(value).collect();
            if found.iter().all(Option::is_some) {
                return Ok(found.into_iter().flatten().collect());
            }
            if now() >= until {
                let missing = keys.iter().zip(&found).filter(|(_, value)| value.is_none());
                let keys = missing.map(|(key, _)| key.clone()).collect();
                return Err(StoreError::Missing { keys, waited: now().since(started), refused: None });
            }
            state = self.meetings.wait(state, until);
        }
    }

    fn fail(&mut self, reason: &str, _deadline: Nanos) {
        // A part says by a key of its own that it has failed, and the epoch goes on.
        tracing::debug!("a part of the group of epoch {} was not made: {reason}", self.epoch);
    }

    fn seal(&mut self, _deadline: Nanos) {
        // Only members are told.
    }

    fn path(&self) -> Option<StorePath> {
        self.address.map(|address| StorePath { local: address, remote: address })
    }

    fn ended(&self) -> Option<String> {
        self.meetings.end_of(self.epoch)
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    /// As long as no test should wait.
    const PATIENCE: Duration = Duration::from_secs(60);

    fn store(meetings: &Arc<Meetings>, epoch: u64) -> EpochStore {
        EpochStore {
            meetings: Arc::clone(meetings),
            member: Weak::new(),
            epoch,
            others: Vec::new(),
            address: None,
        }
    }

    #[test]
    fn values_that_others_tell_are_waited_for_and_those_of_an_epoch_that_is_over_are_none() {
        let meetings = Arc::<Meetings>::default();
        let (mut seventh, mut eighth) = (store(&meetings, 7), store(&meetings, 8));
        eighth.set("a", b"early", now()).expect("is kept");
        let teller = Arc::clone(&meetings);
        let told = thread::spawn(move || teller.set(7, "a".to_owned(), b"one".to_vec()));
        let keys = ["a".to_owned()];
        assert_eq!(seventh.wait(&keys, now() + PATIENCE, now()).expect("comes"), [b"one"]);
        assert_eq!(told.join().expect("ends"), None);
        assert_eq!(seventh.claim("a", b"two", now()).expect("asked"), Claim::Present(b"one".to_vec()));
        let error = seventh.wait(&["b".to_owned()], now(), now()).expect_err("nobody has said it");
        assert!(matches!(&error, StoreError::Missing { keys, .. } if *keys == ["b"]), "{error}");
        let waits = thread::spawn(move || {
            let error = seventh.wait(&["b".to_owned()], now() + PATIENCE, now()).expect_err("is over");
            (seventh, error)
        });
        meetings.end(7, "seat 1 has ended");
        let (mut seventh, error) = waits.join().expect("ends");
        assert!(matches!(&error, StoreError::Failed { reason } if reason.contains("seat 1")), "{error}");
        assert!(seventh.ended().is_some() && eighth.ended().is_none());
        seventh.set("late", b"", now()).expect("is dropped");
        assert_eq!(eighth.wait(&keys, now(), now()).expect("is there"), [b"early"]);
        assert_eq!(lock(&meetings.state).values.len(), 1);
    }

    #[test]
    fn a_member_that_tells_without_an_end_takes_bounded_memory() {
        let meetings = Meetings::default();
        for number in 0..VALUES_MAX + 3 {
            assert_eq!(meetings.set(1, number.to_string(), vec![1]), None);
        }
        let state = lock(&meetings.state);
        assert_eq!((state.values.len(), state.order.len()), (VALUES_MAX, VALUES_MAX));
        assert!(!state.values.contains_key(&(1, "2".to_owned())), "the oldest went");
    }
}
