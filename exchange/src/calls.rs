//! The side of a program that receives tensors of one peer: its calls that wait for an answer.
//!
//! A call ends by its answer, at its deadline, by its cancellation, or with the link. An answer
//! that comes after that brings a lease that nobody wants: the lease is declined, so that the peer
//! may give the tensor to another receiver.
//!
//! **Invariant:** a call ends exactly once. A lease that was answered is given to the caller or
//! declined. A peer that answers what was not asked, or lends what it cannot, is to be severed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pleach_transport::{Nanos, RegionKey};

use crate::key::Key;
use crate::lease::{Lease, LeaseHolder, ReferenceError, RegionAnnounceError, ReturnCounters};
use crate::message::{Description, Failure, Message};
use crate::reference::{LeaseNumber, LinkId, Reference};
use crate::table::Request;

/// What the calls of one link may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallLimits {
    /// Calls that wait.
    pub calls: usize,
    /// Slots for leases.
    pub slots: u32,
    /// The bytes of a tensor that comes inline.
    pub inline_bytes: u64,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self { calls: 1 << 12, slots: 1 << 12, inline_bytes: 2 << 30 }
    }
}

/// Why a call has no tensor.
#[derive(Clone, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallError {
    /// Too many calls wait.
    #[error(
        "tensor {key} was not asked of {peer}: {limit} calls wait already; wait for tensors, or raise the limit"
    )]
    TooManyCalls {
        /// The key.
        key: Key,
        /// The peer.
        peer: Arc<str>,
        /// The limit.
        limit: usize,
    },
    /// The answer did not come in time.
    #[error("tensor {key} did not come from {peer} within {waited:?}; look there, or wait longer")]
    Timeout {
        /// The key.
        key: Key,
        /// The peer.
        peer: Arc<str>,
        /// How long the call waited.
        waited: Duration,
    },
    /// The peer answers that there is none.
    #[error("{peer}: {failure}")]
    Failed {
        /// The peer.
        peer: Arc<str>,
        /// Its answer.
        failure: Failure,
    },
    /// This program has no memory for it. It is for the next receiver.
    #[error("tensor {key} was not received from {peer}: {cause}; free memory here, and ask again")]
    NoMemory {
        /// The key.
        key: Key,
        /// The peer.
        peer: Arc<str>,
        /// Why.
        cause: Arc<str>,
    },
    /// The link has ended.
    #[error("tensor {key} did not come from {peer}, which is lost: {cause}")]
    Lost {
        /// The key.
        key: Key,
        /// The peer.
        peer: Arc<str>,
        /// Why.
        cause: Arc<str>,
    },
}

/// A peer does what it must not. Sever it.
#[derive(Clone, Copy, pleach_derive::ErrorDebug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallViolation {
    /// The call was never made.
    #[error("call {call} is answered, and {last} calls were made; the link is to be severed")]
    UnknownCall {
        /// The call.
        call: u64,
        /// The last call.
        last: u64,
    },
    /// More bytes are to come than may.
    #[error("call {call} is answered by {bytes} bytes, more than {limit}; the link is to be severed")]
    TooLarge {
        /// The call.
        call: u64,
        /// The bytes.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The message is for a sender.
    #[error("a question came to the side that asks; the link is to be severed")]
    NotForCalls,
    /// The lease is wrong.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
}

/// What the caller has to do, in order.
#[derive(Debug)]
pub enum CallEvent {
    /// Send a message to the peer.
    Post(Message),
    /// The tensor of a call is in the peer's memory.
    Lent {
        /// The call.
        call: u64,
        /// Its bytes.
        lease: Lease,
        /// What they are.
        description: Description,
    },
    /// The tensor of a call follows on the control connection. Drop the lease when it is read.
    Inline {
        /// The call.
        call: u64,
        /// Its lease.
        lease: Lease,
        /// The bytes that follow.
        bytes: u64,
        /// What they are.
        description: Description,
    },
    /// A tensor that nobody wants follows on the control connection: skip it.
    Skip {
        /// The bytes that follow.
        bytes: u64,
    },
    /// The call has no tensor.
    Failed {
        /// The call.
        call: u64,
        /// Why.
        error: CallError,
    },
}

/// See the module.
pub struct Calls {
    peer: Arc<str>,
    limits: CallLimits,
    holder: LeaseHolder,
    waiting: BTreeMap<u64, Call>,
    deadlines: BTreeSet<(Nanos, u64)>,
    last: u64,
    events: Vec<CallEvent>,
}

struct Call {
    key: Key,
    since: Nanos,
    deadline: Nanos,
}

impl Calls {
    /// Calls to a peer, by its name for people, on a link.
    #[must_use]
    pub fn new(peer: &str, link: LinkId, limits: CallLimits, counters: Arc<dyn ReturnCounters>) -> Self {
        Self {
            peer: peer.into(),
            limits,
            holder: LeaseHolder::new(link, limits.slots, counters),
            waiting: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            last: 0,
            events: Vec::new(),
        }
    }

    /// The peer has announced a region: see [`LeaseHolder::add_region`].
    ///
    /// # Errors
    ///
    /// See [`RegionAnnounceError`].
    pub fn add_region(&mut self, key: RegionKey, bytes: u64) -> Result<(), RegionAnnounceError> {
        self.holder.add_region(key, bytes)
    }

    /// Asks the peer for a tensor. Returns the number of the call.
    ///
    /// # Errors
    ///
    /// When too many calls wait.
    pub fn ask(
        &mut self,
        now: Nanos,
        key: &Key,
        request: Request,
        deadline: Nanos,
    ) -> Result<u64, CallError> {
        self.expire(now);
        let key = key.clone();
        if self.waiting.len() >= self.limits.calls {
            return Err(CallError::TooManyCalls { key, peer: self.peer.clone(), limit: self.limits.calls });
        }
        self.last += 1;
        let (call, within) = (self.last, deadline.since(now));
        self.events.push(CallEvent::Post(Message::Ask { call, key: key.clone(), request, within }));
        self.waiting.insert(call, Call { key, since: now, deadline });
        self.deadlines.insert((deadline, call));
        Ok(call)
    }

    /// Cancels a call. False: it has ended.
    pub fn cancel(&mut self, now: Nanos, call: u64) -> bool {
        self.expire(now);
        let is_waiting = self.end(call).is_some();
        if is_waiting {
            self.events.push(CallEvent::Post(Message::Cancel { call }));
        }
        is_waiting
    }

    /// A message came from the peer.
    ///
    /// # Errors
    ///
    /// See [`CallViolation`]: sever the link then.
    pub fn message(&mut self, now: Nanos, message: Message) -> Result<(), CallViolation> {
        self.expire(now);
        match message {
            Message::Lent { call, reference, description } => {
                self.check(call)?;
                let lease = self.holder.accept(&reference)?;
                if self.end(call).is_some() {
                    self.events.push(CallEvent::Lent { call, lease, description });
                } else {
                    lease.decline();
                }
            }
            Message::Inline { call, lease, bytes, description } => {
                self.check(call)?;
                let limit = self.limits.inline_bytes;
                if bytes > limit {
                    return Err(CallViolation::TooLarge { call, bytes, limit });
                }
                let lease = self.holder.accept_inline(lease, bytes)?;
                if self.end(call).is_some() {
                    self.events.push(CallEvent::Inline { call, lease, bytes, description });
                } else {
                    lease.decline();
                    self.events.push(CallEvent::Skip { bytes });
                }
            }
            Message::Failed { call, failure } => {
                self.check(call)?;
                if self.end(call).is_some() {
                    let error = CallError::Failed { peer: self.peer.clone(), failure };
                    self.events.push(CallEvent::Failed { call, error });
                }
            }
            Message::Recall { lease } => self.holder.recall(lease)?,
            Message::Ask { .. }
            | Message::Cancel { .. }
            | Message::Returned { .. }
            | Message::RpcEnded { .. } => return Err(CallViolation::NotForCalls),
        }
        Ok(())
    }

    /// Takes the lease of a reference that came with a message of an RPC.
    ///
    /// # Errors
    ///
    /// See [`ReferenceError`]. Whoever sent that message may be somebody else than the peer, which
    /// is not to be severed for it.
    pub fn accept(&mut self, reference: &Reference) -> Result<Lease, ReferenceError> {
        self.holder.accept(reference)
    }

    /// See [`LeaseHolder::accept_stale`].
    #[cfg(test)]
    pub(crate) fn accept_stale(&mut self) {
        self.holder.accept_stale();
    }

    /// This program has done with an RPC before it saw the end of the answer: the peer recalls what
    /// it has lent for the RPC and this program has not accepted.
    pub fn end_rpc(&mut self, rpc: u64) {
        self.events.push(CallEvent::Post(Message::RpcEnded { rpc }));
    }

    /// The leases that are held: see [`LeaseHolder::held`].
    pub fn held(&self) -> impl Iterator<Item = LeaseNumber> {
        self.holder.held()
    }

    /// The link has ended: all calls fail.
    pub fn lost(&mut self, cause: &str) {
        let cause: Arc<str> = cause.into();
        self.deadlines.clear();
        for (call, Call { key, .. }) in std::mem::take(&mut self.waiting) {
            let error = CallError::Lost { key, peer: self.peer.clone(), cause: cause.clone() };
            self.events.push(CallEvent::Failed { call, error });
        }
    }

    /// Fails the calls whose deadline has come.
    pub fn expire(&mut self, now: Nanos) {
        while let Some(&(deadline, call)) = self.deadlines.first()
            && deadline <= now
            && let Some(Call { key, since, .. }) = self.end(call)
        {
            let error = CallError::Timeout { key, peer: self.peer.clone(), waited: now.since(since) };
            self.events.push(CallEvent::Post(Message::Cancel { call }));
            self.events.push(CallEvent::Failed { call, error });
        }
    }

    /// When [`Calls::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// What there is to do since the last call.
    pub fn take_events(&mut self) -> Vec<CallEvent> {
        std::mem::take(&mut self.events)
    }

    fn check(&self, call: u64) -> Result<(), CallViolation> {
        let is_known = (1..=self.last).contains(&call);
        if is_known { Ok(()) } else { Err(CallViolation::UnknownCall { call, last: self.last }) }
    }

    fn end(&mut self, call: u64) -> Option<Call> {
        let ended = self.waiting.remove(&call)?;
        self.deadlines.remove(&(ended.deadline, call));
        Some(ended)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use pleach_transport::RemoteSlice;

    use super::*;
    use crate::lease::UNTOUCHED;
    use crate::message::FailureKind;

    const LINK: LinkId = LinkId(1);
    const REGION: RegionKey = RegionKey(2);
    const NOW: Nanos = Nanos(1_000);
    const LATER: Nanos = Nanos(2_000);

    /// The counter of slot 0.
    #[derive(Default)]
    struct Counter(AtomicU64);

    impl ReturnCounters for Counter {
        fn store(&self, _slot: u32, count: u64) {
            // Release: pairs with the acquire in `load`. One thread runs these tests.
            self.0.store(count, Ordering::Release);
        }

        fn load(&self, _slot: u32) -> u64 {
            self.0.load(Ordering::Acquire)
        }
    }

    fn calls(counter: &Arc<Counter>) -> Calls {
        let limits = CallLimits { calls: 2, slots: 1, inline_bytes: 100 };
        let mut calls = Calls::new("worker 1", LINK, limits, counter.clone());
        calls.add_region(REGION, 100).expect("is the first");
        calls
    }

    fn ask(calls: &mut Calls) -> Result<u64, CallError> {
        calls.ask(NOW, &Key::new(1, "w").expect("a good name"), Request::default(), LATER)
    }

    fn lent(call: u64) -> Message {
        let lease = LeaseNumber { slot: 0, generation: 1 };
        let reference =
            Reference { link: LINK, lease, slice: RemoteSlice { key: REGION, offset: 0, len: 8 } };
        Message::Lent { call, reference, description: Description::default() }
    }

    #[test]
    fn an_answer_to_a_call_that_was_cancelled_comes_back_untouched() {
        let counter = Arc::new(Counter::default());
        let mut calls = calls(&counter);
        let call = ask(&mut calls).expect("may wait");
        assert!(calls.cancel(NOW, call) && !calls.cancel(NOW, call));
        calls.message(NOW, lent(call)).expect("was asked");
        assert_eq!(counter.load(0), 1 | UNTOUCHED);
        let [CallEvent::Post(Message::Ask { .. }), CallEvent::Post(Message::Cancel { .. })] =
            &calls.take_events()[..]
        else {
            panic!("the peer is asked, and told that nobody waits");
        };
    }

    #[test]
    fn each_failure_names_the_tensor_and_the_peer() {
        let mut calls = calls(&Arc::default());
        let call = ask(&mut calls).expect("may wait");
        ask(&mut calls).expect("may wait");
        let too_many = ask(&mut calls).expect_err("two wait");
        calls
            .message(NOW, Message::Failed { call, failure: Failure::new(FailureKind::Aborted, &"over") })
            .expect("was asked");
        ask(&mut calls).expect("one waits");
        calls.expire(LATER);
        ask(&mut calls).expect("none waits");
        calls.lost("connection reset");
        assert_eq!(calls.next_deadline(), None);
        let failed = calls.take_events().into_iter().filter_map(|event| match event {
            CallEvent::Failed { error, .. } => Some(error.to_string()),
            _ => None,
        });
        let texts: Vec<String> = [too_many.to_string()].into_iter().chain(failed).collect();
        let timeout =
            "tensor 'w' of step 1 did not come from worker 1 within 1µs; look there, or wait longer";
        let expected = [
            "tensor 'w' of step 1 was not asked of worker 1: 2 calls wait already; wait for tensors, or raise \
             the limit",
            "worker 1: over",
            timeout,
            timeout,
            "tensor 'w' of step 1 did not come from worker 1, which is lost: connection reset",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn an_answer_that_cannot_be_is_a_violation() {
        let counter = Arc::new(Counter::default());
        let mut calls = calls(&counter);
        let unknown = calls.message(NOW, lent(1));
        assert_eq!(unknown, Err(CallViolation::UnknownCall { call: 1, last: 0 }));
        let call = ask(&mut calls).expect("may wait");
        assert_eq!(calls.message(NOW, Message::Cancel { call }), Err(CallViolation::NotForCalls));
        let (lease, description) = (LeaseNumber { slot: 0, generation: 1 }, Description::default());
        let large = Message::Inline { call, lease, bytes: 101, description };
        assert_eq!(calls.message(NOW, large), Err(CallViolation::TooLarge { call, bytes: 101, limit: 100 }));
        calls.message(NOW, lent(call)).expect("was asked");
        let stale = calls.message(NOW, lent(call));
        assert!(matches!(stale, Err(CallViolation::Reference(ReferenceError::Stale { .. }))), "{stale:?}");
        assert_eq!(counter.load(0), 0, "the first lease is still held");
        drop(calls.take_events());
        assert_eq!(counter.load(0), 1);
    }
}
