//! A table without indexes, for comparison: one list that is searched from its beginning. A
//! [`Mutant`] makes one thing wrong in it.

use pleach_transport::Nanos;

use super::{Delivered, Outcome, ReceiveError, ReceiveId, Request, SendError, SendId, TableLimits, Unsent};
use crate::key::Key;

/// What a table could do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// A tensor stays in the table when a receiver takes it from among others.
    TakenTwice,
    /// A receive that is cancelled takes the next tensor with it.
    LostAtCancel,
    /// A tensor that comes back goes to the end of the queue.
    RestoredBehind,
    /// A tensor comes back into a step that was cleaned up since.
    RestoredAfterCleanUp,
    /// Another incarnation is served too.
    OldIncarnation,
    /// What a receiver took still counts as held.
    BytesKept,
    /// A receive takes a tensor after its deadline.
    Late,
    /// A request is served again.
    DuplicateServed,
    /// A small tensor is held while a larger one waits.
    Overtakes,
    /// A tensor of a send that waits is not received.
    WaitingUnseen,
    /// A receive of a step that was aborted waits.
    AbortForgotten,
}

struct Item {
    number: u64,
    key: Key,
    since: Nanos,
    deadline: Nanos,
    /// `None`: a receive.
    tensor: Option<(u64, u32)>,
    is_held: bool,
}

/// See the module.
pub(crate) struct NaiveTable {
    incarnation: u64,
    limits: TableLimits,
    mutant: Option<Mutant>,
    items: Vec<Item>,
    /// In the order of their ends: the step, when it ended, why it was aborted.
    ended: Vec<(u64, u64, Option<String>)>,
    forgotten: u64,
    recent: Vec<u64>,
    last: u64,
    kept: u64,
    outcomes: Vec<Outcome<u32>>,
}

impl NaiveTable {
    pub(crate) fn new(incarnation: u64, limits: TableLimits, mutant: Option<Mutant>) -> Self {
        let (items, ended, recent, outcomes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Self { incarnation, limits, mutant, items, ended, forgotten: 0, recent, last: 0, kept: 0, outcomes }
    }

    pub(crate) fn bytes_held(&self) -> u64 {
        self.kept + self.held().map(|item| item.tensor.map_or(0, |(bytes, _)| bytes)).sum::<u64>()
    }

    pub(crate) fn counts(&self) -> (u64, usize, usize, usize) {
        let sends = self.waiting_sends().count();
        let receives = self.items.iter().filter(|item| item.tensor.is_none()).count();
        (self.bytes_held(), self.held().count(), sends, receives)
    }

    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.items.iter().filter(|item| !item.is_held).map(|item| item.deadline).min()
    }

    pub(crate) fn take_outcomes(&mut self) -> Vec<Outcome<u32>> {
        std::mem::take(&mut self.outcomes)
    }

    pub(crate) fn send(
        &mut self,
        now: Nanos,
        key: &Key,
        bytes: u64,
        tensor: u32,
        deadline: Nanos,
    ) -> Result<SendId, Unsent<u32>> {
        self.expire(now);
        let key = key.clone();
        if let Some(reason) = self.aborted(key.step()) {
            return Err(Unsent { tensor, error: SendError::Aborted { key, reason: reason.as_str().into() } });
        }
        let limit = self.limits.bytes_held;
        if bytes > limit {
            return Err(Unsent { tensor, error: SendError::TooLarge { key, bytes, limit } });
        }
        let has_receive = self.items.iter().any(|item| item.tensor.is_none() && item.key == key);
        let waits = self.waiting_sends().count();
        if !has_receive && (waits > 0 || !self.has_room(bytes)) && waits >= self.limits.waiting_sends {
            return Err(Unsent { tensor, error: SendError::TooManySends { key, limit: waits } });
        }
        self.last += 1;
        let (number, tensor) = (self.last, Some((bytes, tensor)));
        self.items.push(Item { number, key, since: now, deadline, tensor, is_held: false });
        self.settle(now);
        Ok(SendId(number))
    }

    pub(crate) fn receive(
        &mut self,
        now: Nanos,
        key: &Key,
        request: Request,
        deadline: Nanos,
    ) -> Result<ReceiveId, ReceiveError> {
        self.expire(now);
        let (key, own) = (key.clone(), self.incarnation);
        if self.recent.contains(&request.id) && self.mutant != Some(Mutant::DuplicateServed) {
            return Err(ReceiveError::DuplicateRequest { key, request: request.id });
        }
        if let Some(asked) = request.incarnation
            && asked != own
            && self.mutant != Some(Mutant::OldIncarnation)
        {
            return Err(ReceiveError::WrongIncarnation { key, asked, own });
        }
        if let Some(reason) = self.aborted(key.step())
            && self.mutant != Some(Mutant::AbortForgotten)
        {
            return Err(ReceiveError::Aborted { key, reason: reason.as_str().into() });
        }
        let has_tensor = self.items.iter().any(|item| item.tensor.is_some() && item.key == key);
        let waits = self.items.iter().filter(|item| item.tensor.is_none()).count();
        if !has_tensor && waits >= self.limits.waiting_receives {
            return Err(ReceiveError::TooManyReceives { key, limit: waits });
        }
        if request.id != 0 {
            self.recent.push(request.id);
        }
        let surplus = self.recent.len().saturating_sub(self.limits.recent_requests);
        self.recent.drain(..surplus);
        self.last += 1;
        let number = self.last;
        self.items.push(Item { number, key, since: now, deadline, tensor: None, is_held: false });
        self.settle(now);
        Ok(ReceiveId(number))
    }

    pub(crate) fn cancel_receive(&mut self, now: Nanos, receive: ReceiveId) -> bool {
        self.expire(now);
        let place = self.items.iter().position(|item| item.number == receive.0 && item.tensor.is_none());
        let Some(place) = place else { return false };
        self.items.remove(place);
        if self.mutant == Some(Mutant::LostAtCancel)
            && let Some(place) = self.items.iter().position(|item| item.is_held)
        {
            self.items.remove(place);
        }
        true
    }

    pub(crate) fn cancel_send(&mut self, now: Nanos, send: SendId) -> Option<u32> {
        self.expire(now);
        let is_waiting = |item: &Item| item.number == send.0 && item.tensor.is_some() && !item.is_held;
        let place = self.items.iter().position(is_waiting)?;
        let item = self.items.remove(place);
        self.settle(now);
        item.tensor.map(|(_, tensor)| tensor)
    }

    pub(crate) fn restore(&mut self, now: Nanos, delivered: Delivered<u32>) -> Option<u32> {
        self.expire(now);
        let Delivered { key, bytes, tensor, order } = delivered;
        let has_ended = |(step, end, _): &(u64, u64, _)| *step == key.step() && *end > order;
        if (self.ended.iter().any(has_ended) || self.forgotten > order)
            && self.mutant != Some(Mutant::RestoredAfterCleanUp)
        {
            return Some(tensor);
        }
        let mut place = self.items.iter().position(|item| item.number > order).unwrap_or(self.items.len());
        if self.mutant == Some(Mutant::RestoredBehind) {
            place = self.items.len();
        }
        let tensor = Some((bytes, tensor));
        let deadline = Nanos::MAX;
        self.items.insert(place, Item { number: order, key, since: now, deadline, tensor, is_held: true });
        self.settle(now);
        None
    }

    pub(crate) fn abort(&mut self, now: Nanos, step: u64, reason: &str) -> Vec<u32> {
        self.expire(now);
        self.last += 1;
        if self.aborted(step).is_none() {
            self.end(step, Some(reason.to_owned()));
        }
        self.end_step(now, step, Some(reason))
    }

    pub(crate) fn clean_up(&mut self, now: Nanos, step: u64) -> Vec<u32> {
        self.expire(now);
        self.last += 1;
        self.end(step, None);
        self.end_step(now, step, None)
    }

    pub(crate) fn expire(&mut self, now: Nanos) {
        if self.mutant != Some(Mutant::Late) {
            self.fail_late(now);
        }
        self.settle(now);
        self.fail_late(now);
    }

    fn fail_late(&mut self, now: Nanos) {
        loop {
            let late =
                self.items.iter().enumerate().filter(|(_, item)| !item.is_held && item.deadline <= now);
            let Some((place, _)) = late.min_by_key(|(_, item)| (item.deadline, item.number)) else { return };
            let Item { number, key, since, tensor, .. } = self.items.remove(place);
            let waited = now.since(since);
            self.outcomes.push(match tensor {
                None => {
                    let error = ReceiveError::Timeout { key, waited };
                    Outcome::ReceiveFailed { receive: ReceiveId(number), error }
                }
                Some((bytes, tensor)) => {
                    let (held, limit) = (self.bytes_held(), self.limits.bytes_held);
                    let error = SendError::Timeout { key, bytes, waited, held, limit };
                    Outcome::SendFailed { send: SendId(number), tensor, error }
                }
            });
        }
    }

    fn held(&self) -> impl Iterator<Item = &Item> {
        self.items.iter().filter(|item| item.is_held)
    }

    fn waiting_sends(&self) -> impl Iterator<Item = &Item> {
        self.items.iter().filter(|item| item.tensor.is_some() && !item.is_held)
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.bytes_held() + bytes <= self.limits.bytes_held && self.held().count() < self.limits.tensors_held
    }

    fn aborted(&self, step: u64) -> Option<String> {
        self.ended.iter().find(|(ended, ..)| *ended == step).and_then(|(.., reason)| reason.clone())
    }

    fn end(&mut self, step: u64, reason: Option<String>) {
        self.ended.retain(|(ended, ..)| *ended != step);
        self.ended.push((step, self.last, reason));
        if self.ended.len() > self.limits.ended_steps {
            self.forgotten = self.ended.remove(0).1;
        }
    }

    fn end_step(&mut self, now: Nanos, step: u64, reason: Option<&str>) -> Vec<u32> {
        let (mut ended, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.items).into_iter().partition(|item| item.key.step() == step);
        self.items = left;
        ended.sort_by(|one, other| (&one.key, one.number).cmp(&(&other.key, other.number)));
        let mut held = Vec::new();
        for Item { number, key, tensor, is_held, .. } in ended {
            match tensor {
                Some((_, tensor)) if is_held => held.push(tensor),
                Some((_, tensor)) => {
                    let error = match reason {
                        Some(reason) => SendError::Aborted { key, reason: reason.into() },
                        None => SendError::CleanedUp { key },
                    };
                    self.outcomes.push(Outcome::SendFailed { send: SendId(number), tensor, error });
                }
                None => {
                    let error = match reason {
                        Some(reason) => ReceiveError::Aborted { key, reason: reason.into() },
                        None => ReceiveError::CleanedUp { key },
                    };
                    self.outcomes.push(Outcome::ReceiveFailed { receive: ReceiveId(number), error });
                }
            }
        }
        self.settle(now);
        held
    }

    /// Carries out all that can be, the oldest first.
    fn settle(&mut self, now: Nanos) {
        while let Some((receive, tensor)) = self.pair() {
            self.deliver(receive, tensor);
        }
        while let Some(place) = self.admissible() {
            self.items[place].is_held = true;
            self.outcomes.push(Outcome::Sent { send: SendId(self.items[place].number) });
        }
        if self.mutant != Some(Mutant::Late) {
            self.fail_late(now);
        }
    }

    /// The oldest receive that finds a tensor, and the oldest tensor of its key.
    fn pair(&self) -> Option<(usize, usize)> {
        let is_seen = |item: &Item| {
            item.tensor.is_some() && (item.is_held || self.mutant != Some(Mutant::WaitingUnseen))
        };
        self.items.iter().enumerate().filter(|(_, item)| item.tensor.is_none()).find_map(|(at, receive)| {
            let tensor = self.items.iter().position(|item| is_seen(item) && item.key == receive.key)?;
            Some((at, tensor))
        })
    }

    fn deliver(&mut self, receive: usize, tensor: usize) {
        let Item { number, key, tensor: sent, is_held, .. } = &self.items[tensor];
        let (order, key, is_held) = (*number, key.clone(), *is_held);
        let (bytes, sent) = sent.expect("it is a tensor");
        if !is_held {
            self.outcomes.push(Outcome::Sent { send: SendId(order) });
        }
        if is_held && self.mutant == Some(Mutant::BytesKept) {
            self.kept += bytes;
        }
        let delivered = Delivered { key, bytes, tensor: sent, order };
        let id = ReceiveId(self.items[receive].number);
        self.outcomes.push(Outcome::Received { receive: id, delivered });
        let mut gone = vec![receive, tensor];
        if self.mutant == Some(Mutant::TakenTwice) && self.held().count() > 1 {
            gone.pop();
        }
        gone.sort_unstable();
        for place in gone.into_iter().rev() {
            self.items.remove(place);
        }
    }

    /// The send that waits and is held next.
    fn admissible(&self) -> Option<usize> {
        let sends = self.items.iter().enumerate().filter(|(_, item)| item.tensor.is_some() && !item.is_held);
        let mut fits = sends.map(|(at, item)| {
            let bytes = item.tensor.map_or(0, |(bytes, _)| bytes);
            (at, self.has_room(bytes))
        });
        let first =
            if self.mutant == Some(Mutant::Overtakes) { fits.find(|(_, fits)| *fits) } else { fits.next() };
        first.filter(|(_, fits)| *fits).map(|(at, _)| at)
    }
}
