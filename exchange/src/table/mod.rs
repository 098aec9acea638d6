//! The tensor table of a program: tensors that were sent and wait for a receiver, and receives that
//! wait for a tensor. TensorFlow calls it a rendezvous. A pure state machine, over any payload.
//!
//! * Tensors of one key queue up, and each receive takes the oldest. A receive of a key without a
//!   tensor waits for its turn.
//! * The table holds a limited number of bytes. A send beyond the limit waits, in the order of
//!   sends, so that a small tensor does not overtake a large one. A receive takes a tensor also
//!   from a send that waits.
//! * [`TensorTable::abort`] fails what waits in a step and what comes to this step later.
//!   [`TensorTable::clean_up`] fails what waits and forgets the step: it may begin anew.
//! * A receive may name the incarnation of the sender that it knows. It gets nothing from another
//!   one. The id of a request is served once; the table knows the last ids.
//! * A receive that was cancelled during its wait took nothing. If a tensor was delivered and not
//!   taken, because its receive had ended, [`TensorTable::restore`] brings it back to its old place
//!   in the queue.
//!
//! **Invariant:** an accepted request ends exactly once, by an [`Outcome`] or by its cancellation,
//! and a receive takes no tensor after its deadline. A tensor that was sent is at one place: in the
//! table, with one receiver, or back with its sender. After the end of a step, no receive gets a
//! tensor that was sent before the end. The table keeps to its limits, except for tensors that are
//! restored.

mod ended_steps;
mod error;
#[cfg(test)]
mod naive;
mod requests;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use pleach_transport::Nanos;

use self::ended_steps::EndedSteps;
pub use self::error::{ReceiveError, SendError};
use self::requests::RecentRequests;
use crate::key::Key;

/// Longest reason of an abort, in bytes. A longer one is cut.
pub const REASON_BYTES_MAX: usize = 1024;

/// The limits of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLimits {
    /// The bytes of all tensors held. More than that wait.
    pub bytes_held: u64,
    /// Tensors held. More than that wait.
    pub tensors_held: usize,
    /// Sends that wait. More are refused.
    pub waiting_sends: usize,
    /// Receives that wait. More are refused.
    pub waiting_receives: usize,
    /// Ids of requests that are remembered. Older ones are forgotten.
    pub recent_requests: usize,
    /// Steps of which the abort or the clean-up is remembered. Older ends are forgotten: a receive
    /// of such an aborted step waits for its deadline.
    pub ended_steps: usize,
}

impl Default for TableLimits {
    fn default() -> Self {
        Self {
            bytes_held: 1 << 30,
            tensors_held: 1 << 20,
            waiting_sends: 1 << 12,
            waiting_receives: 1 << 16,
            recent_requests: 1 << 16,
            ended_steps: 1 << 16,
        }
    }
}

/// A send that a table accepted. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SendId(u64);

/// A receive that a table accepted. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReceiveId(u64);

/// The parameters of a receive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// A random number, the same when the request is repeated; zero: repetitions are not found.
    pub id: u64,
    /// The incarnation of the sender that the receiver knows, if any.
    pub incarnation: Option<u64>,
}

/// A tensor on its way to a receiver.
#[derive(Debug, PartialEq, Eq)]
pub struct Delivered<T> {
    /// Its key.
    pub key: Key,
    /// Its length, in bytes.
    pub bytes: u64,
    /// The tensor.
    pub tensor: T,
    /// Its place in the order of sends.
    order: u64,
}

impl<T> Delivered<T> {
    /// Its place in the order of sends: no other tensor of the table has it.
    #[must_use]
    pub fn order(&self) -> u64 {
        self.order
    }
}

/// The end of a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome<T> {
    /// The table holds the tensor, or a receiver took it.
    Sent {
        /// The request.
        send: SendId,
    },
    /// The tensor was not sent.
    SendFailed {
        /// The request.
        send: SendId,
        /// The tensor, which comes back.
        tensor: T,
        /// Why.
        error: SendError,
    },
    /// The tensor came.
    Received {
        /// The request.
        receive: ReceiveId,
        /// The tensor.
        delivered: Delivered<T>,
    },
    /// The tensor did not come.
    ReceiveFailed {
        /// The request.
        receive: ReceiveId,
        /// Why.
        error: ReceiveError,
    },
}

/// A send that was refused, with its tensor.
#[derive(Debug, PartialEq, Eq)]
pub struct Unsent<T> {
    /// The tensor, which comes back.
    pub tensor: T,
    /// Why the send was refused.
    pub error: SendError,
}

/// See the module.
pub struct TensorTable<T> {
    incarnation: u64,
    limits: TableLimits,
    /// The tensors or the receives that wait, by key; no queue is empty.
    queues: BTreeMap<Key, Queue<T>>,
    /// Requests that wait, by number.
    waits: BTreeMap<u64, Wait>,
    /// The same requests, by deadline.
    deadlines: BTreeSet<(Nanos, u64)>,
    /// The sends among them, with the bytes of their tensors.
    waiting_sends: BTreeMap<u64, u64>,
    bytes_held: u64,
    tensors_held: usize,
    recent: RecentRequests,
    ended: EndedSteps,
    /// The number of the last request or end of a step.
    last: u64,
    outcomes: Vec<Outcome<T>>,
    #[cfg(test)]
    gives_newest_first: bool,
}

/// The queue of a key. It holds tensors or receives, never both.
enum Queue<T> {
    /// In the order of their sends.
    Tensors(VecDeque<Entry<T>>),
    /// In the order of their numbers.
    Receives(VecDeque<u64>),
}

struct Entry<T> {
    /// The number of its send.
    order: u64,
    bytes: u64,
    tensor: T,
    /// Whether the send has ended and the table holds the tensor. Otherwise the send waits.
    is_held: bool,
}

struct Wait {
    key: Key,
    since: Nanos,
    deadline: Nanos,
}

/// Why all requests that wait in a step end.
enum StepEnd {
    Aborted(Arc<str>),
    CleanedUp,
}

impl<T> TensorTable<T> {
    /// The table of a program with this incarnation: a number that it has drawn at its start.
    #[must_use]
    pub fn new(incarnation: u64, limits: TableLimits) -> Self {
        Self {
            incarnation,
            limits,
            queues: BTreeMap::new(),
            waits: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            waiting_sends: BTreeMap::new(),
            bytes_held: 0,
            tensors_held: 0,
            recent: RecentRequests::new(limits.recent_requests),
            ended: EndedSteps::new(limits.ended_steps),
            last: 0,
            outcomes: Vec::new(),
            #[cfg(test)]
            gives_newest_first: false,
        }
    }

    /// From now on receives take the newest tensor of a key: a violation that simulations must
    /// find.
    #[cfg(test)]
    pub(crate) fn give_newest_first(&mut self) {
        self.gives_newest_first = true;
    }

    /// Sends a tensor of this length. The send ends by an [`Outcome`]: at once if a receive waits
    /// or the limits allow the tensor.
    ///
    /// # Errors
    ///
    /// See [`SendError`]; the tensor comes back.
    pub fn send(
        &mut self,
        now: Nanos,
        key: &Key,
        bytes: u64,
        tensor: T,
        deadline: Nanos,
    ) -> Result<SendId, Unsent<T>> {
        self.expire(now);
        if let Some(reason) = self.ended.aborted(key.step()) {
            let error = SendError::Aborted { key: key.clone(), reason: reason.clone() };
            return Err(Unsent { tensor, error });
        }
        if bytes > self.limits.bytes_held {
            let error = SendError::TooLarge { key: key.clone(), bytes, limit: self.limits.bytes_held };
            return Err(Unsent { tensor, error });
        }
        let receive = self.pop_receive(key);
        let must_wait = receive.is_none() && (!self.waiting_sends.is_empty() || !self.has_room(bytes));
        if must_wait && self.waiting_sends.len() >= self.limits.waiting_sends {
            let error = SendError::TooManySends { key: key.clone(), limit: self.limits.waiting_sends };
            return Err(Unsent { tensor, error });
        }
        let order = self.next_number();
        if let Some(receive) = receive {
            self.outcomes.push(Outcome::Sent { send: SendId(order) });
            let delivered = Delivered { key: key.clone(), bytes, tensor, order };
            self.outcomes.push(Outcome::Received { receive, delivered });
            return Ok(SendId(order));
        }
        self.tensors_mut(key).push_back(Entry { order, bytes, tensor, is_held: false });
        if must_wait {
            self.wait(order, key, now, deadline);
            self.waiting_sends.insert(order, bytes);
            self.expire(now);
        } else {
            self.hold(key, order);
        }
        Ok(SendId(order))
    }

    /// Asks for the tensor of a key. The receive ends by an [`Outcome`]: at once if there is a
    /// tensor.
    ///
    /// # Errors
    ///
    /// See [`ReceiveError`]; nothing is changed then.
    pub fn receive(
        &mut self,
        now: Nanos,
        key: &Key,
        request: Request,
        deadline: Nanos,
    ) -> Result<ReceiveId, ReceiveError> {
        self.expire(now);
        if self.recent.contains(request.id) {
            return Err(ReceiveError::DuplicateRequest { key: key.clone(), request: request.id });
        }
        if let Some(asked) = request.incarnation.filter(|asked| *asked != self.incarnation) {
            return Err(ReceiveError::WrongIncarnation { key: key.clone(), asked, own: self.incarnation });
        }
        if let Some(reason) = self.ended.aborted(key.step()) {
            return Err(ReceiveError::Aborted { key: key.clone(), reason: reason.clone() });
        }
        let delivered = self.pop_tensor(key);
        if delivered.is_none() && self.waiting_receives() >= self.limits.waiting_receives {
            let limit = self.limits.waiting_receives;
            return Err(ReceiveError::TooManyReceives { key: key.clone(), limit });
        }
        self.recent.insert(request.id);
        let number = self.next_number();
        let receive = ReceiveId(number);
        if let Some(delivered) = delivered {
            self.outcomes.push(Outcome::Received { receive, delivered });
            self.admit();
        } else {
            let queue = self.queues.entry(key.clone()).or_insert_with(|| Queue::Receives(VecDeque::new()));
            if let Queue::Receives(receives) = queue {
                receives.push_back(number);
            }
            self.wait(number, key, now, deadline);
            self.expire(now);
        }
        Ok(receive)
    }

    /// Cancels a receive that waits. False: it has ended, and its outcome stands.
    pub fn cancel_receive(&mut self, now: Nanos, receive: ReceiveId) -> bool {
        self.expire(now);
        if self.waiting_sends.contains_key(&receive.0) {
            return false;
        }
        let Some(wait) = self.end_wait(receive.0) else { return false };
        self.remove_receive(&wait.key, receive.0);
        true
    }

    /// Cancels all receives of a step that wait. Returns them with their keys, the oldest first.
    pub fn cancel_receives(&mut self, now: Nanos, step: u64) -> Vec<(ReceiveId, Key)> {
        let of_step = self.waits.iter().filter(|(_, wait)| wait.key.step() == step);
        let mut found: Vec<_> =
            of_step.map(|(number, wait)| (ReceiveId(*number), wait.key.clone())).collect();
        // Sends wait too, and go on.
        found.retain(|(receive, _)| self.cancel_receive(now, *receive));
        found
    }

    /// Cancels a send that waits. `None`: it has ended, and its outcome stands.
    pub fn cancel_send(&mut self, now: Nanos, send: SendId) -> Option<T> {
        self.expire(now);
        if !self.waiting_sends.contains_key(&send.0) {
            return None;
        }
        let wait = self.end_wait(send.0)?;
        let entry = self.remove_tensor(&wait.key, send.0);
        self.admit();
        entry.map(|entry| entry.tensor)
    }

    /// Takes back a tensor that was delivered and not taken. The next receive gets it. The table
    /// holds it even beyond the limits. If the step has ended since, the tensor is returned.
    pub fn restore(&mut self, now: Nanos, delivered: Delivered<T>) -> Option<T> {
        self.expire(now);
        let Delivered { key, bytes, tensor, order } = delivered;
        if self.ended.has_ended_since(key.step(), order) {
            return Some(tensor);
        }
        if let Some(receive) = self.pop_receive(&key) {
            let delivered = Delivered { key, bytes, tensor, order };
            self.outcomes.push(Outcome::Received { receive, delivered });
            return None;
        }
        let tensors = self.tensors_mut(&key);
        let place = tensors.partition_point(|entry| entry.order < order);
        tensors.insert(place, Entry { order, bytes, tensor, is_held: true });
        self.bytes_held += bytes;
        self.tensors_held += 1;
        None
    }

    /// Ends a step: the requests that wait in it fail with this reason. Later requests of the step
    /// fail too, until the step is cleaned up. The reason of the first abort stays. Returns the
    /// tensors that were held.
    pub fn abort(&mut self, now: Nanos, step: u64, reason: &str) -> Vec<T> {
        self.expire(now);
        let order = self.next_number();
        let reason: Arc<str> = reason[..reason.floor_char_boundary(REASON_BYTES_MAX)].into();
        self.ended.abort(step, order, reason.clone());
        self.end_step(step, &StepEnd::Aborted(reason))
    }

    /// Forgets a step: the requests that wait in it fail. Returns the tensors that were held. The
    /// step may begin again, without any tensor of before.
    pub fn clean_up(&mut self, now: Nanos, step: u64) -> Vec<T> {
        self.expire(now);
        let order = self.next_number();
        self.ended.clean_up(step, order);
        self.end_step(step, &StepEnd::CleanedUp)
    }

    /// Fails the requests whose deadline has come.
    pub fn expire(&mut self, now: Nanos) {
        let mut has_failed_send = false;
        while let Some(&(deadline, number)) = self.deadlines.first()
            && deadline <= now
        {
            let is_send = self.waiting_sends.contains_key(&number);
            has_failed_send |= is_send;
            let Some(Wait { key, since, .. }) = self.end_wait(number) else { continue };
            let waited = now.since(since);
            if !is_send {
                self.remove_receive(&key, number);
                let error = ReceiveError::Timeout { key, waited };
                self.outcomes.push(Outcome::ReceiveFailed { receive: ReceiveId(number), error });
            } else if let Some(Entry { bytes, tensor, .. }) = self.remove_tensor(&key, number) {
                let (held, limit) = (self.bytes_held, self.limits.bytes_held);
                let error = SendError::Timeout { key, bytes, waited, held, limit };
                self.outcomes.push(Outcome::SendFailed { send: SendId(number), tensor, error });
            }
        }
        if has_failed_send {
            self.admit();
        }
    }

    /// When [`TensorTable::expire`] has something to do.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Nanos> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// The outcomes since the last call, in their order.
    pub fn take_outcomes(&mut self) -> Vec<Outcome<T>> {
        std::mem::take(&mut self.outcomes)
    }

    /// The incarnation of the program.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The bytes of all tensors held.
    #[must_use]
    pub fn bytes_held(&self) -> u64 {
        self.bytes_held
    }

    /// The number of tensors held.
    #[must_use]
    pub fn tensors_held(&self) -> usize {
        self.tensors_held
    }

    /// The number of sends that wait.
    #[must_use]
    pub fn waiting_sends(&self) -> usize {
        self.waiting_sends.len()
    }

    /// The number of receives that wait.
    #[must_use]
    pub fn waiting_receives(&self) -> usize {
        self.waits.len() - self.waiting_sends.len()
    }

    fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn has_room(&self, bytes: u64) -> bool {
        // Nothing more is held beyond the limit, not even a tensor without bytes.
        let free = self.limits.bytes_held.checked_sub(self.bytes_held);
        free.is_some_and(|free| bytes <= free) && self.tensors_held < self.limits.tensors_held
    }

    fn wait(&mut self, number: u64, key: &Key, since: Nanos, deadline: Nanos) {
        self.waits.insert(number, Wait { key: key.clone(), since, deadline });
        self.deadlines.insert((deadline, number));
    }

    fn end_wait(&mut self, number: u64) -> Option<Wait> {
        let wait = self.waits.remove(&number)?;
        self.deadlines.remove(&(wait.deadline, number));
        self.waiting_sends.remove(&number);
        Some(wait)
    }

    /// The tensors of a key at which no receive waits.
    fn tensors_mut(&mut self, key: &Key) -> &mut VecDeque<Entry<T>> {
        let queue = self.queues.entry(key.clone()).or_insert_with(|| Queue::Tensors(VecDeque::new()));
        match queue {
            Queue::Tensors(tensors) => tensors,
            Queue::Receives(_) => unreachable!("a receive would have taken the tensor"),
        }
    }

    /// Counts a tensor of the table as held, and ends its send.
    fn hold(&mut self, key: &Key, order: u64) {
        let tensors = self.tensors_mut(key);
        let Ok(place) = tensors.binary_search_by_key(&order, |entry| entry.order) else { return };
        let entry = &mut tensors[place];
        entry.is_held = true;
        let bytes = entry.bytes;
        self.bytes_held += bytes;
        self.tensors_held += 1;
        self.outcomes.push(Outcome::Sent { send: SendId(order) });
    }

    /// Holds the tensors of sends that wait, in their order, as far as there is room.
    fn admit(&mut self) {
        while let Some((&order, &bytes)) = self.waiting_sends.first_key_value()
            && self.has_room(bytes)
            && let Some(wait) = self.end_wait(order)
        {
            self.hold(&wait.key, order);
        }
    }

    /// The oldest receive that waits at a key, which waits no longer.
    fn pop_receive(&mut self, key: &Key) -> Option<ReceiveId> {
        let Some(Queue::Receives(receives)) = self.queues.get(key) else { return None };
        let number = *receives.front()?;
        self.remove_receive(key, number);
        self.end_wait(number);
        Some(ReceiveId(number))
    }

    /// The oldest tensor of a key. If its send waits, the send ends. The caller must then admit
    /// others.
    fn pop_tensor(&mut self, key: &Key) -> Option<Delivered<T>> {
        let Some(Queue::Tensors(tensors)) = self.queues.get(key) else { return None };
        let next = tensors.front()?;
        #[cfg(test)]
        let next = tensors.back().filter(|_| self.gives_newest_first).unwrap_or(next);
        let order = next.order;
        let Entry { bytes, tensor, is_held, .. } = self.remove_tensor(key, order)?;
        if !is_held {
            self.end_wait(order);
            self.outcomes.push(Outcome::Sent { send: SendId(order) });
        }
        Some(Delivered { key: key.clone(), bytes, tensor, order })
    }

    fn remove_receive(&mut self, key: &Key, number: u64) {
        let Some(Queue::Receives(receives)) = self.queues.get_mut(key) else { return };
        if let Ok(place) = receives.binary_search(&number) {
            receives.remove(place);
        }
        if receives.is_empty() {
            self.queues.remove(key);
        }
    }

    fn remove_tensor(&mut self, key: &Key, order: u64) -> Option<Entry<T>> {
        let Some(Queue::Tensors(tensors)) = self.queues.get_mut(key) else { return None };
        let place = tensors.binary_search_by_key(&order, |entry| entry.order).ok()?;
        let entry = tensors.remove(place)?;
        if tensors.is_empty() {
            self.queues.remove(key);
        }
        self.release(&entry);
        Some(entry)
    }

    /// Subtracts an entry from the counts of the table.
    fn release(&mut self, entry: &Entry<T>) {
        if entry.is_held {
            self.bytes_held -= entry.bytes;
            self.tensors_held -= 1;
        }
    }

    /// Empties the queues of a step, and fails the requests that wait there. Returns the held
    /// tensors.
    fn end_step(&mut self, step: u64, end: &StepEnd) -> Vec<T> {
        let keys = self.queues.range(Key::before(step)..).map(|(key, _)| key);
        let keys: Vec<Key> = keys.take_while(|key| key.step() == step).cloned().collect();
        let mut held = Vec::new();
        for key in keys {
            match self.queues.remove(&key) {
                Some(Queue::Receives(receives)) => {
                    for number in receives {
                        self.end_wait(number);
                        let (receive, error) = (ReceiveId(number), end.of_receive(&key));
                        self.outcomes.push(Outcome::ReceiveFailed { receive, error });
                    }
                }
                Some(Queue::Tensors(tensors)) => {
                    for entry in tensors {
                        self.release(&entry);
                        if entry.is_held {
                            held.push(entry.tensor);
                            continue;
                        }
                        self.end_wait(entry.order);
                        let (send, tensor) = (SendId(entry.order), entry.tensor);
                        let error = end.of_send(&key);
                        self.outcomes.push(Outcome::SendFailed { send, tensor, error });
                    }
                }
                None => {}
            }
        }
        self.admit();
        held
    }
}

impl StepEnd {
    fn of_send(&self, key: &Key) -> SendError {
        match self {
            Self::Aborted(reason) => SendError::Aborted { key: key.clone(), reason: reason.clone() },
            Self::CleanedUp => SendError::CleanedUp { key: key.clone() },
        }
    }

    fn of_receive(&self, key: &Key) -> ReceiveError {
        match self {
            Self::Aborted(reason) => ReceiveError::Aborted { key: key.clone(), reason: reason.clone() },
            Self::CleanedUp => ReceiveError::CleanedUp { key: key.clone() },
        }
    }
}
